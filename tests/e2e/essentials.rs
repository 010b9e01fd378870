//! Containers in Slurm's steps, in every supported release: what every user needs.

use std::collections::BTreeSet;

use mizzen_tests::check::{CONTAINER_OPTIONS, assert_out, one_node, with_images};
use mizzen_tests::{Release, Spec, on_every_release};

on_every_release!(runs_steps, runs_batch_scripts, runs_task_prologs_on_the_host);

fn runs_steps(release: Release) {
    let cluster = with_images(Spec { nodes: 2, ..one_node(release, "steps") });
    for option in CONTAINER_OPTIONS {
        let srun = cluster.run(&format!(
            "cd /shared; srun -N2 --ntasks-per-node=2 {option}=a.sqsh sh -c 'echo $(hostname) $SLURM_PROCID $(cat /image)' | sort"
        ));
        assert_out(&srun, 0, "node1 0 a\nnode1 1 a\nnode2 2 a\nnode2 3 a\n");
    }
    // Each step of an allocation has a container of its own, also at the same time.
    let salloc = cluster.run(
        "salloc -N2 --container-image=/shared/a.sqsh bash -c 'srun -n2 cat /image; \
         for i in a b; do srun --overlap -n2 --container=/shared/$i.sqsh sh -c \"sleep 1; cat /image\" & done; wait' \
         | sort",
    );
    assert_out(&salloc, 0, "a\na\na\na\nb\nb\n");
    for (program, code) in [("sh -c 'exit 42'", 42), ("sh -c 'kill -KILL $$'", 137), ("nosuch", 127)] {
        let srun = cluster.run(&format!("srun --container=/shared/a.sqsh {program}"));
        assert_eq!(srun.code, code, "{release}: {}", srun.text());
    }
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
    let left = "for i in $(seq 50); do pgrep mizzen || exit 0; sleep 0.1; done; exit 1";
    assert_eq!(cluster.run_as_root(left).code, 0, "{release}: a process is left");
}

fn runs_batch_scripts(release: Release) {
    let cluster = with_images(one_node(release, "batch"));
    let sbatch = |options: &str, script: &str| {
        cluster.run(&format!(
            "cat > job.sh <<'END'\n{script}\nEND\nsbatch --wait --output=out {options} job.sh word >/dev/null; \
             code=$?; cat out; exit $code"
        ))
    };
    let inside = "#!/bin/sh\n#SBATCH --container=/shared/a.sqsh\ncat /image; id -un; pwd; echo $1; exit 7";
    assert_out(&sbatch("", inside), 7, "a\nalice\n/home/alice\nword\n");
    assert_out(&sbatch("--container=/shared/b.sqsh", inside), 7, "b\nalice\n/home/alice\nword\n");
    // As Slurm reports it without a container.
    let killed = "#!/bin/sh\ncat /image 2>/dev/null; kill -9 $$";
    assert_out(&sbatch("--container-image=/shared/a.sqsh", killed), sbatch("", killed).code, "a\n");
    // The script on the host, its steps inside; each of them may have another container, or none.
    let nested = "#!/bin/bash\n\
                  cat /image 2>/dev/null || echo host\n\
                  srun -Q cat /image\n\
                  srun -Q --container=/shared/b.sqsh cat /image\n\
                  srun -Q --container-image=/shared/b.sqsh cat /image\n\
                  srun -Q --container=none /bin/hostname\n\
                  srun -Q --container-image=none /bin/hostname\n\
                  srun -Q cat /image";
    let steps = sbatch("--no-container-script --container=/shared/a.sqsh", nested);
    assert_out(&steps, 0, "host\na\nb\nb\nnode1\nnode1\na\n");
    // 26.05 wants a login of the user's on the node for this, and holds the job.
    if release != Release::Slurm26_05 {
        let steps = sbatch("--no-container-script --container-image=/shared/a.sqsh --export=NONE", nested);
        assert_out(&steps, 0, "host\na\nb\nb\nnode1\nnode1\na\n");
    }
    if release.has_container_option() {
        let shown = cluster.run(
            "job=$(sbatch --hold --parsable --container=/shared/a.sqsh --wrap true); scontrol show job $job; \
             squeue --noheader --job=$job -O Container",
        );
        assert!(shown.stdout.contains("Container=/shared/a.sqsh"), "{release}: {}", shown.text());
        assert!(shown.stdout.trim_end().ends_with("\n/shared/a.sqsh"), "{release}: {}", shown.text());
    }
}

fn runs_task_prologs_on_the_host(release: Release) {
    let mut spec = one_node(release, "prolog");
    spec.slurm_conf = vec!["TaskProlog=/shared/prolog".to_owned()];
    let cluster = with_images(spec);
    // Everything that a prolog can see of its surroundings.
    let prolog = "#!/bin/sh\n\
        { readlink /proc/self/ns/mnt; cat /etc/debian_version; id; pwd; ulimit -a; ls -d /image /shared; \n\
          env | cut -d= -f1 | sort; grep -E '^(Sig[PBIC]|Cap|NoNew)' /proc/self/status; } > /shared/seen.NAME 2>&1\n\
        ls -l /proc/self/fd | wc -l > /shared/fds.NAME\n\
        echo print printed by NAME\n\
        echo export EXPORTED_BY_NAME=yes\n\
        echo unset UNSET_BY_NAME\n";
    for name in ["prolog", "own"] {
        cluster.share(name, prolog.replace("NAME", name).as_bytes()).unwrap();
        cluster.run_as_root(&format!("chmod 755 /shared/{name}"));
    }
    let step = |options: &str| {
        let ran = cluster.run(&format!(
            "UNSET_BY_prolog=1 UNSET_BY_own=1 srun {options} --task-prolog=/shared/own sh -c \
             'env | grep _BY_ | sort; ls -d /image 2>/dev/null || true'"
        ));
        let seen = cluster.run("cat /shared/seen.prolog /shared/seen.own; rm /shared/seen.*").stdout;
        let fds = cluster.run("cat /shared/fds.prolog /shared/fds.own; rm /shared/fds.*").stdout;
        let fds: Vec<u32> = fds.lines().filter_map(|number| number.parse().ok()).collect();
        (ran, seen.lines().map(str::to_owned).collect::<BTreeSet<_>>(), fds)
    };
    let (plain, plain_seen, plain_fds) = step("");
    let printed = "printed by prolog\nprinted by own\nEXPORTED_BY_own=yes\nEXPORTED_BY_prolog=yes\n";
    assert_out(&plain, 0, printed);
    let (inside, inside_seen, inside_fds) = step("--container=/shared/a.sqsh");
    assert_out(&inside, 0, &format!("{printed}/image\n"));
    let ours = |line: &&String| line.starts_with("SLURM_MIZZEN_") || line.contains("SPANK_OPTION");
    let differ: Vec<&String> =
        plain_seen.symmetric_difference(&inside_seen).filter(|line| !ours(line)).collect();
    assert!(differ.is_empty(), "{release}: {differ:?}");
    // Beside its usual descriptors: the two sockets of the tasks, their report, and the user namespace.
    assert_eq!(plain_fds.len(), 2);
    for (plain, inside) in plain_fds.iter().zip(&inside_fds) {
        assert!((plain..=&(plain + 4)).contains(&inside), "{release}: {plain_fds:?} {inside_fds:?}");
    }
}
