//! Batch jobs, many at a time, and the circumstances in which they are submitted.

use crate::{Cluster, User};

/// Tells where it runs.
pub const WHERE: &str = "cat /image 2>/dev/null || echo host";
/// The same for a batch script and a step of it.
pub const BOTH: &str =
    "cat /image 2>/dev/null || echo host; srun -Q sh -c 'cat /image 2>/dev/null || echo host'";

/// A batch job: variables of sbatch's environment, its options, the script, its exit code, and what it prints: exactly, or
/// for a job that fails, among other things.
pub struct Job<'a>(pub &'a str, pub &'a str, pub &'a str, pub i32, pub &'a str);

/// Runs all of them at the same time: most of a job's time is waiting.
#[track_caller]
pub fn assert_jobs(cluster: &Cluster, jobs: &[Job]) {
    let mut all = "rm -f job.* out.* err.* code.*\n".to_owned();
    for (number, Job(variables, options, script, ..)) in jobs.iter().enumerate() {
        let script = format!("#!/bin/sh\n{script}\n").replace('\'', r"'\''");
        all.push_str(&format!(
            "printf %s '{script}' > job.{number}\n( env {variables} sbatch -Q --wait -n1 -o out.{number} {options} job.{number} \
             >/dev/null 2>err.{number}; echo $? > code.{number} ) &\n"
        ));
    }
    cluster.run(&format!("{all}wait"));
    for (number, Job(variables, options, script, code, prints)) in jobs.iter().enumerate() {
        let done = cluster.run(&format!("cat out.{number} err.{number}; exit $(cat code.{number})"));
        let context =
            format!("{}: {variables} sbatch {options}: {script}\n{}", cluster.release(), done.text());
        assert_eq!(done.code, *code, "{context}");
        let told = if *code == 0 { done.stdout == *prints } else { done.stdout.matches(prints).count() == 1 };
        assert!(told, "expected: {prints}\n{context}");
    }
    assert_eq!(cluster.run("ls /shared/marker*").stdout, "", "{}: ran outside", cluster.release());
}

/// Slurm asks `su - alice` for the user's own environment, with --get-user-env and with sbatch's --export but for ALL. The su
/// of the newest release wants to see a line in /etc/shadow first.
pub fn let_slurm_log_in(cluster: &Cluster, nodes: &[&str]) {
    for node in nodes {
        let added =
            cluster.run_on(node, User::Root, "echo 'alice:*:20000::::::' >> /etc/shadow; su - alice -c true");
        assert_eq!(added.code, 0, "{}", added.text());
    }
}

/// The way to a configuration of Slurm without mizzen, for clients.
pub fn without_mizzen(cluster: &Cluster) -> &'static str {
    let done = cluster
        .run_as_root("rm -rf /shared/conf; cp -r /etc/slurm /shared/conf; : > /shared/conf/plugstack.conf");
    assert_eq!(done.code, 0, "{}", done.text());
    "SLURM_CONF=/shared/conf/slurm.conf"
}
