//! The virtual cluster itself: it offers what the other tests need, and it vanishes whatever happens to it.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use mizzen_tests::check::count;
use mizzen_tests::{Cluster, Release, SharedFs, Spec, User, target_dir};

#[test]
fn two_clusters_run_side_by_side_and_leave_nothing() {
    let one = Cluster::start(Cluster::spec("side")).unwrap();
    let other = Cluster::start(Spec { nodes: 3, ..Cluster::spec("side") }).unwrap();
    assert_eq!(one.run("srun -N2 hostname | sort").stdout, "node1\nnode2\n");
    assert_eq!(other.run("srun -N3 hostname | sort").stdout, "node1\nnode2\nnode3\n");
    let identity = one.run("srun id").stdout;
    assert_eq!(identity, "uid=2001(alice) gid=2001(alice) groups=2001(alice),2100(research),2101(gpu)\n");
    assert_eq!(one.run_on("node2", User::Bob, "srun whoami").stdout, "bob\n");
    // Each machine has its own /tmp and disk; /shared and /home are common.
    one.run("srun -N1 -w node1 touch /tmp/x /local/x /shared/x ~/x");
    let seen = one.run("srun -N1 -w node2 ls /tmp/x /local/x /shared/x /home/alice/x");
    assert_eq!(seen.stdout, "/home/alice/x\n/shared/x\n", "{}", seen.text());
    let dirs = [one.logs(), other.logs()].map(|logs| logs.parent().unwrap().to_owned());
    // Below the supervisors: other tests of this process have clusters too.
    let mut processes = descendants(one.supervisor());
    processes.extend(descendants(other.supervisor()));
    assert!(processes.len() > 10, "the clusters have processes: {processes:?}");
    drop(one);
    drop(other);
    for dir in dirs {
        assert!(!dir.exists(), "{}", dir.display());
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(dir.to_str().unwrap()), "a mount is left");
    }
    expect_gone(&processes);
}

#[test]
fn a_killed_owner_takes_its_cluster_along() {
    for attempt in 0..count(8, 100) {
        // Later and later, from the first moments to a running cluster.
        let delay = Duration::from_millis(u64::from(attempt * 1500 / count(8, 100)));
        let mut owner = spawn_shell();
        std::thread::sleep(delay);
        kill_and_expect_nothing(&mut owner, "KILL");
    }
    let mut owner = spawn_shell();
    wait_until_up(&mut owner);
    kill_and_expect_nothing(&mut owner, "KILL");
    let mut owner = spawn_shell();
    wait_until_up(&mut owner);
    kill_and_expect_nothing(&mut owner, "INT");
    assert_eq!(Cluster::start(Cluster::spec("after-kills")).unwrap().run("srun hostname").stdout, "node1\n");
}

#[test]
fn logs_of_a_failure_are_kept() {
    let mut spec = Cluster::spec("broken");
    spec.slurm_conf = vec!["SelectType=select/nonsense".to_owned()];
    let error = format!("{:#}", Cluster::start(spec).err().expect("such a cluster cannot start"));
    let logs = error.rsplit("logs are in ").next().unwrap();
    let slurmctld = fs::read_to_string(format!("{logs}/ctl-slurmctld.log")).unwrap();
    assert!(slurmctld.contains("select/nonsense"), "{slurmctld}");
    fs::remove_dir_all(std::path::Path::new(logs).parent().unwrap()).unwrap();
}

#[test]
fn slurm_can_be_configured() {
    let mut spec = Cluster::spec("prolog");
    spec.slurm_conf = vec!["TaskProlog=/shared/prolog".to_owned(), "TaskPlugin=task/affinity".to_owned()];
    let cluster = Cluster::start(spec).unwrap();
    cluster.share("prolog", b"#!/bin/sh\necho export FROM_PROLOG=yes\n").unwrap();
    cluster.run_as_root("chmod 755 /shared/prolog");
    assert_eq!(cluster.run("srun printenv FROM_PROLOG").stdout, "yes\n");
    let pinned = cluster.run("srun -n1 -c1 nproc");
    assert_eq!(pinned.stdout, "1\n", "{}", pinned.text());
}

#[test]
fn a_job_can_have_its_own_tmp() {
    let mut spec = Spec { one_cpu: true, ..Cluster::spec("job-tmp") };
    spec.slurm_conf =
        vec!["JobContainerType=job_container/tmpfs".to_owned(), "PrologFlags=Contain".to_owned()];
    spec.slurm_files =
        vec![("job_container.conf".to_owned(), "AutoBasePath=true\nBasePath=/local\n".to_owned())];
    let cluster = Cluster::start(spec).unwrap();
    let private = cluster.run("srun bash -c 'touch /tmp/private; ls /tmp'");
    assert_eq!(private.stdout, "private\n", "{}", private.text());
    assert_eq!(cluster.run_on("node1", User::Root, "ls /tmp").stdout, "");
}

#[test]
fn steps_can_be_in_cgroups() {
    let cluster = Cluster::start(Spec { cgroup_v1: true, ..Cluster::spec("cgroups") }).unwrap();
    let groups = cluster.run("srun cat /proc/self/cgroup");
    assert!(groups.stdout.contains("freezer:/slurm_node1/uid_2001/job_"), "{}", groups.text());
    let mine = format!("mizzen-cluster-{}", cluster.supervisor());
    let left = || fs::exists(format!("/sys/fs/cgroup/freezer/{mine}")).unwrap();
    assert!(left());
    drop(cluster);
    assert!(!left(), "cgroup directories are left");
}

#[test]
fn spank_plugins_can_be_contained() {
    let mut spec = Spec { release: Release::Slurm24_11, ..Cluster::spec("contain-spank") };
    spec.slurm_conf = vec!["SlurmdParameters=config_overrides,contain_spank".to_owned()];
    let cluster = Cluster::start(spec).unwrap();
    assert_eq!(cluster.run("srun hostname").stdout, "node1\n");
}

#[test]
fn the_shared_file_system_can_be_a_network_one() {
    for (shared, kind) in [(SharedFs::Tmpfs, "tmpfs"), (SharedFs::Fuse, "fuseblk")] {
        let cluster = Cluster::start(Spec { shared, ..Cluster::spec("shared") }).unwrap();
        let found =
            cluster.run("echo text > /shared/file; srun -N2 sh -c 'stat -f -c %T /shared; cat /shared/file'");
        assert_eq!(found.stdout.matches(&format!("{kind}\n")).count(), 2, "{}", found.text());
        assert_eq!(found.stdout.matches("text\n").count(), 2, "{}", found.text());
    }
}

/// The lines that `make cluster` prints for another terminal are typed as they stand there.
#[test]
fn the_printed_ways_in_work() {
    let mut owner = spawn_shell();
    let lines = BufReader::new(owner.stdout.take().unwrap()).lines().map(Result::unwrap);
    let greeting: Vec<String> = lines.take_while(|line| !line.starts_with("The daemons' logs")).collect();
    let behind = |words: &str| {
        let line = greeting.iter().find_map(|line| line.trim_start().strip_prefix(words));
        line.unwrap_or_else(|| panic!("{words}: {greeting:?}")).trim().to_owned()
    };
    let typed = |command: &str| {
        let done = Command::new("sh").args(["-c", command]).output().unwrap();
        assert!(done.status.success(), "{command}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap()
    };
    let copy = behind("bring in an image");
    assert!(copy.contains(" FILE.sqsh "), "{copy}");
    let name = format!("brought.{}.sqsh", std::process::id());
    let file = target_dir().join("tmp").join(&name);
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(&file, "an image").unwrap();
    typed(&copy.replace("FILE.sqsh", file.to_str().unwrap()));
    let root = behind("be root in there");
    let (login_node, rest) = root.split_once("   (node1: ").unwrap();
    let node = rest.strip_suffix(')').unwrap();
    for (shell, machine) in [(login_node, "ctl"), (node, "node1")] {
        let seen = typed(&format!("{shell} -c 'id -un; hostname; cat /shared/{name}; echo; pwd'"));
        assert_eq!(seen, format!("root\n{machine}\nan image\n/root\n"));
    }
    fs::remove_file(file).unwrap();
    drop(owner.stdin.take());
    assert!(owner.wait().unwrap().success());
}

/// `vcluster shell` with a shell that waits for input.
fn spawn_shell() -> Child {
    let vcluster = target_dir().join("debug/vcluster");
    Command::new(vcluster).arg("shell").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

fn wait_until_up(owner: &mut Child) {
    let mut line = String::new();
    BufReader::new(owner.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("is up"), "{line}");
}

fn kill_and_expect_nothing(owner: &mut Child, signal: &str) {
    let processes = descendants(owner.id());
    let status =
        Command::new("kill").args([&format!("-{signal}"), &owner.id().to_string()]).status().unwrap();
    assert!(status.success());
    if signal == "INT" {
        drop(owner.stdin.take()); // the shell, whom the terminal would have told too, ends at the end of its input
    }
    owner.wait().unwrap();
    expect_gone(&processes);
}

/// Waits a while for processes that [`descendants`] found to end.
fn expect_gone(processes: &HashMap<u32, u64>) {
    let begin = Instant::now();
    loop {
        let left: Vec<&u32> = processes
            .iter()
            .filter(|(pid, start)| start_time(**pid) == Some(**start))
            .map(|(p, _)| p)
            .collect();
        if left.is_empty() {
            return;
        }
        assert!(begin.elapsed() < Duration::from_secs(10), "still there: {left:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Every process below `ancestor`, with its start time, so that a reused pid does not count.
fn descendants(ancestor: u32) -> HashMap<u32, u64> {
    let mut parents = HashMap::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        if let Some(parent) = stat_field(pid, 1) {
            parents.insert(pid, parent as u32);
        }
    }
    let below = |mut pid: u32| {
        while let Some(parent) = parents.get(&pid) {
            if *parent == ancestor {
                return true;
            }
            pid = *parent;
        }
        false
    };
    parents.keys().filter(|pid| below(**pid)).filter_map(|pid| Some((*pid, start_time(*pid)?))).collect()
}

fn start_time(pid: u32) -> Option<u64> {
    stat_field(pid, 19)
}

/// A number of /proc/PID/stat, counted after the parenthesised name.
fn stat_field(pid: u32, index: usize) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.split_whitespace().nth(index)?.parse().ok()
}
