//! Steps in containers under bad conditions: many tasks, kills at any time, bugs, hostile processes, other plugins.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test fails by panicking

use std::time::{Duration, Instant};

use mizzen_tests::check::{Emptiness, assert_failed, assert_out, start_with_busybox, with_busybox};
use mizzen_tests::images::ImageTree;
use mizzen_tests::{Cluster, Output, Release, Spec, User, target_dir};

const PLUGIN: &str = "/usr/lib/mizzen/spank_mizzen.so";
const LAUNCHER: &str = "/usr/lib/mizzen/mizzen-enter";
const IMAGE: &str = "--container-image=/shared/bb.sqsh";
/// Nothing that fails may take longer, on a machine that does other things too.
const HANG: Duration = Duration::from_secs(15);

/// A small number in `make test`, a large one in `make test-long`.
fn count(short: u32, long: u32) -> u32 {
    if std::env::var_os("MIZZEN_TEST_LONG").is_some() { long } else { short }
}

/// Runs a command that must not hang.
#[track_caller]
fn run_in_time(cluster: &Cluster, script: &str) -> Output {
    let begin = Instant::now();
    let output = cluster.run(script);
    assert!(begin.elapsed() < HANG, "took {:?}: {script}\n{}", begin.elapsed(), output.text());
    output
}

#[test]
fn any_number_of_tasks_ends_in_any_order() {
    let cluster = start_with_busybox(Spec { cpus: 256, ..Cluster::spec("many-tasks") });
    let empty = Emptiness::of(&cluster, &["node1", "node2"]);
    let host = cluster.run("readlink /proc/self/ns/mnt").stdout;
    // The first task ends first, every eighth at once, the others within 300 ms and after they have used the image.
    let program = "echo $SLURMD_NODENAME $(readlink /proc/self/ns/mnt); [ $((SLURM_LOCALID % 8)) = 0 ] && exit 0; \
                   usleep $((RANDOM % 300 * 1000)); cat /etc/os-release >/dev/null && [ $(ulimit -n) = 256 ]";
    for round in 0..count(2, 50) {
        for (nodes, tasks) in [(1, 1), (1, 2), (1, 64), (1, 256), (2, 64)] {
            let srun = cluster.run(&format!(
                "ulimit -n 256; srun --quiet -N{nodes} --ntasks-per-node={} {IMAGE} sh -c '{program}' | sort | uniq -c",
                tasks / nodes
            ));
            assert_eq!((srun.code, srun.stderr.as_str()), (0, ""), "{round}: {tasks}: {}", srun.text());
            let namespaces: Vec<&str> = srun.stdout.lines().map(str::trim).collect();
            assert_eq!(namespaces.len(), nodes, "one container on each node: {}", srun.text());
            for line in namespaces {
                assert!(line.starts_with(&format!("{} node", tasks / nodes)), "{}", srun.text());
                assert!(!line.ends_with(host.trim()), "{}", srun.text());
            }
        }
        empty.assert_again(&cluster, "many tasks");
    }
}

#[test]
fn steps_of_a_job_have_containers_of_their_own() {
    let cluster = start_with_busybox(Cluster::spec("steps"));
    let empty = Emptiness::of(&cluster, &["node1", "node2"]);
    let tree = ImageTree::busybox().unwrap();
    for name in ["a", "b"] {
        tree.file("etc/which", &format!("{name}\n")).unwrap();
        cluster.share(&format!("{name}.sqsh"), &tree.squashfs(&[]).unwrap()).unwrap();
    }
    let step = "srun --overlap -n4 --container-image=/shared/$image.sqsh sh -c \"usleep 200000; cat /etc/which; readlink /proc/self/ns/mnt\"";
    for _ in 0..count(2, 20) {
        let job = cluster.run(&format!(
            "salloc --quiet -N2 -n8 bash -c 'for i in 1 2; do for image in a b; do {step} > out.$i.$image & done; done; wait'"
        ));
        assert_out(&job, 0, "");
        for image in ["a", "b"] {
            let names = cluster.run(&format!("cat out.?.{image} | grep -v mnt | sort | uniq -c | xargs"));
            assert_out(&names, 0, &format!("8 {image}\n"));
        }
        // The steps shared neither a container nor, across nodes, anything else.
        let containers = cluster.run("cat out.?.? | grep -c mnt; cat out.?.? | grep mnt | sort -u | wc -l; for f in out.?.?; do grep mnt $f | sort -u | wc -l; done | sort -n | uniq -c | xargs; rm out.?.?");
        let lines: Vec<&str> = containers.stdout.lines().collect();
        assert_eq!(lines[0], "16", "{}", containers.text());
        let distinct: u32 = lines[1].parse().unwrap();
        let per_step: u32 = lines[2]
            .split(' ')
            .map(|n| n.parse::<u32>().unwrap())
            .collect::<Vec<_>>()
            .chunks(2)
            .map(|pair| pair[0] * pair[1])
            .sum();
        assert_eq!(distinct, per_step, "{}", containers.text());
    }
    empty.assert_again(&cluster, "steps at once");
}

/// The kernel counts the descriptors that lie in sockets, of all processes of a user together, against the limit on
/// open files of the one that sends another.
#[test]
fn many_steps_at_once_do_not_use_up_the_descriptors() {
    let cluster = with_busybox("many-steps");
    let empty = Emptiness::of(&cluster, &["node1"]);
    for (limit, tasks, steps) in [("-n 64", 1, 40), ("-Sn 64", 2, 25)] {
        let job = cluster.run(&format!(
            "ulimit {limit}; salloc --quiet -n2 bash -c 'for i in $(seq {steps}); do \
             srun --quiet --overlap -n{tasks} {IMAGE} sh -c \"ulimit -Sn; until [ -e ~/go ]; do sleep 0.3; done\" & done; \
             until [ $(pgrep -xc mizzen-fuse) -ge {steps} ]; do sleep 0.2; done; touch ~/go; wait; rm ~/go' | uniq -c"
        ));
        assert_out(&job, 0, &format!("{:7} 64\n", tasks * steps));
        assert_eq!(job.stderr, "");
    }
    empty.assert_again(&cluster, "many steps");
}

#[test]
fn a_cancelled_job_leaves_nothing() {
    cancel_at_any_time(Release::Slurm22_05, count(16, 200));
    for release in Release::ALL {
        cancel_at_any_time(release, count(0, 40));
    }
}

fn cancel_at_any_time(release: Release, runs: u32) {
    if runs == 0 {
        return;
    }
    let name = format!("cancels-{}", release.version());
    let cluster = start_with_busybox(Spec { release, nodes: 1, ..Cluster::spec(&name) });
    let empty = Emptiness::of(&cluster, &["node1"]);
    let program = "sh -c \"cat /bin/busybox >/dev/null; sleep 60\"";
    for run in 0..runs {
        // From before the step exists to when all its tasks run.
        let delay = f64::from(run / 2) * 0.4 / f64::from(runs / 2);
        let start = match run % 2 {
            0 => format!("srun --quiet -n8 --container-writable {IMAGE} {program} &"),
            _ => format!(
                "sbatch --quiet --output=/dev/null -n8 {IMAGE} --no-container-script --wrap 'srun {program}'"
            ),
        };
        let cancelled = run_in_time(
            &cluster,
            &format!(
                "{start}\n sleep {delay:.3}; while [ -n \"$(squeue -h; jobs -r)\" ]; do scancel --quiet -u alice; sleep 0.05; done; wait"
            ),
        );
        assert!(!cancelled.stderr.contains("panic"), "{}", cancelled.text());
        if run % 8 >= 6 || runs > 100 {
            empty.assert_again(&cluster, &format!("cancelled after {delay:.3} s: {start}"));
        }
    }
    empty.assert_again(&cluster, "cancelled");
}

#[test]
fn a_killed_process_does_not_hang_its_step() {
    let cluster = with_busybox("killed-parts");
    let empty = Emptiness::of(&cluster, &["node1"]);
    let prolog = |text: &str| {
        cluster.share("prolog", format!("#!/bin/bash\n{text}\n").as_bytes()).unwrap();
        cluster.run_as_root("chmod 755 /shared/prolog");
        format!("srun -n8 --task-prolog=/shared/prolog {IMAGE}")
    };
    // The first task, before it becomes the launcher, while the others wait for it; all of them tell it once.
    let srun = prolog("[ $SLURM_LOCALID != 0 ] || { sleep 0.5; kill -KILL $PPID; }");
    let first = run_in_time(&cluster, &format!("{srun} touch ~/marker"));
    assert_failed(
        &first,
        137,
        "mizzen: node1: the first task on this node ended before it had made the container",
    );
    empty.assert_again(&cluster, "the first task killed");
    // The same while it builds: at any of its system calls.
    let wrapper = "case $SLURM_LOCALID in\n\
                   0) exec strace -D -o /dev/null -e inject=all:signal=KILL:when=$WHEN /usr/lib/mizzen/real/mizzen-enter \"$@\";;\n\
                   *) exec /usr/lib/mizzen/real/mizzen-enter \"$@\";;\nesac";
    cluster.share("wrapper", format!("#!/bin/bash\n{wrapper}\n").as_bytes()).unwrap();
    let wrap = format!(
        "cd /usr/lib/mizzen; mkdir real; ln -s /usr/bin/mizzen real/mizzen-enter; cp -P {LAUNCHER} /root; install -m 755 /shared/wrapper {LAUNCHER}.new; mv {LAUNCHER}.new {LAUNCHER}"
    );
    assert_out(&cluster.run_on("node1", User::Root, &wrap), 0, "");
    let (mut failed, mut started) = (0, 0);
    for call in (1..).step_by(if count(0, 1) == 1 { 1 } else { 31 }) {
        let killed = run_in_time(
            &cluster,
            &format!("WHEN={call} srun -n4 {IMAGE} sh -c 'echo $SLURM_PROCID' | sort | xargs"),
        );
        let told = "mizzen: node1: the first task on this node ended before it had made the container";
        match (killed.stdout.as_str(), killed.stderr.matches("mizzen: ").count()) {
            ("\n", 2) => assert_failed(&Output { code: 125, ..killed }, 125, told),
            ("1 2 3\n", 0) => started += 1,
            ("0 1 2 3\n", 0) => break, // it makes fewer calls
            _ => panic!("killed at its call {call}: {}", killed.text()),
        }
        failed += 1;
        empty.assert_again(&cluster, &format!("the builder killed at its call {call}"));
    }
    assert!(failed > 3 && failed < 1000, "{failed}, {started}");
    empty.assert_again(&cluster, "the builder killed");
    cluster.run_on(
        "node1",
        User::Root,
        &format!("mv /root/mizzen-enter {LAUNCHER}; rm -r /usr/lib/mizzen/real"),
    );
    // The broker, which waits for the launcher.
    let srun = prolog("[ $SLURM_LOCALID != 0 ] || sleep 1");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let kill = "for i in $(seq 100); do pid=$(pgrep -x mizzen-broker) && exec kill -KILL $pid; sleep 0.05; done; exit 1";
            assert_out(&cluster.run_as_root(kill), 0, "");
        });
        let broker = run_in_time(&cluster, &format!("{srun} touch ~/marker"));
        assert_failed(&broker, 125, "mizzen: node1: ");
        assert!(broker.stderr.contains("the broker"), "{}", broker.text());
    });
    empty.assert_again(&cluster, "the broker killed");
    // The file server: the tasks get an error.
    let server = run_in_time(
        &cluster,
        &format!(
            "srun -n8 {IMAGE} sh -c 'sleep 1; exec cat /etc/os-release' & \
             until pid=$(pgrep -x mizzen-fuse); do sleep 0.05; done; sleep 0.5; kill -KILL $pid; wait $!"
        ),
    );
    assert!(server.code != 0 && server.stdout.is_empty(), "{}", server.text());
    assert!(
        server.stderr.contains("not connected") || server.stderr.contains("Bus error"),
        "{}",
        server.text()
    );
    empty.assert_again(&cluster, "the file server killed");
    // slurmstepd: its tasks go on, by Slurm's ways; nothing of ours outlives them.
    let stepd = std::thread::scope(|scope| {
        let srun =
            scope.spawn(|| cluster.run(&format!("timeout 8 srun -n4 {IMAGE} sleep 3; scancel -u alice")));
        let kill = "for i in $(seq 100); do pgrep -x -u alice sleep >/dev/null && exec kill -KILL $(pgrep slurmstepd); sleep 0.05; done; exit 1";
        assert_out(&cluster.run_as_root(kill), 0, "");
        srun.join().unwrap()
    });
    assert!(!stepd.stderr.contains("mizzen"), "{}", stepd.text());
    empty.assert_again(&cluster, "slurmstepd killed");
    assert_eq!(cluster.run("ls ~/marker").stdout, "", "something ran");
}

mod a_bug_in_any_hook_does_not_run_jobs_on_the_host {
    use super::*;

    #[test]
    fn slurm_20_11() {
        inject_everywhere(Release::Slurm20_11);
    }

    #[test]
    fn slurm_22_05() {
        inject_everywhere(Release::Slurm22_05);
    }

    #[test]
    fn slurm_24_11() {
        inject_everywhere(Release::Slurm24_11);
    }

    #[test]
    fn slurm_26_05() {
        inject_everywhere(Release::Slurm26_05);
    }

    fn inject_everywhere(release: Release) {
        let mut spec =
            Spec { release, nodes: 1, ..Cluster::spec(&format!("injected-{}", release.version())) };
        spec.layers.insert(0, target_dir().join("stage-inject"));
        let cluster = start_with_busybox(spec);
        // Leaves a mark where it does not see the image.
        let program = "grep -q Busybox /etc/os-release || touch ~/marker";
        assert_out(
            &cluster.run(&format!("printf '#!/bin/sh\n{program}\n' > program; chmod 755 program")),
            0,
            "",
        );
        let empty = Emptiness::of(&cluster, &["node1"]);
        for requirement in ["required", "optional"] {
            for (place, single, several) in [
                ("init", 125, 125),
                ("option", 125, 125),
                ("init_post_opt", 125, 125),
                ("task_init_privileged", 125, 125),
                // The first task is not hurt; the others do not know it, and must not go on.
                ("task_post_fork", 0, 125),
                ("task_init", 125, 125),
                ("exit", 0, 0),
            ] {
                cluster
                    .set_plugstack(&[&format!("{requirement} {PLUGIN} inject-panic=node:{place}")])
                    .unwrap();
                let mut commands = vec![
                    (format!("srun -n3 {IMAGE} /home/alice/program"), several),
                    (format!("salloc --quiet {IMAGE} srun /home/alice/program"), single),
                ];
                if requirement == "required" || count(0, 1) == 1 {
                    // (--wait looks only every other second.)
                    let job = format!(
                        "job=$(sbatch --parsable --output=/shared/out {IMAGE} /home/alice/program); \
                         while [ -n \"$(squeue -h)\" ]; do sleep 0.05; done; cat /shared/out >&2; \
                         exit $(scontrol show job $job | sed -n 's/.* ExitCode=\\([0-9]*\\):.*/\\1/p')"
                    );
                    commands.push((job, single));
                }
                for (command, code) in commands {
                    let hit = run_in_time(&cluster, &command);
                    let what = format!("{release} {requirement} {place} {command}: {}", hit.text());
                    assert_eq!(hit.code, code, "{what}");
                    let told = hit.stderr.matches("mizzen: ").count();
                    assert_eq!(told > 0, code != 0, "{what}");
                    assert!(hit.stderr.matches("mizzen: hint").count() <= 1, "{what}");
                    assert_eq!(cluster.run("ls ~/marker").stdout, "", "on the host: {what}");
                }
            }
        }
        empty.assert_again(&cluster, "panics");
    }
}

/// What holds whatever else is configured.
fn assert_basics(cluster: &Cluster, empty: &Emptiness) {
    let inside = cluster.run(&format!("srun -n4 {IMAGE} cat /etc/os-release"));
    assert_out(&inside, 0, &"PRETTY_NAME=\"Busybox for tests\"\n".repeat(4));
    assert_eq!(inside.stderr, "");
    let code = cluster.run(&format!("srun -n4 {IMAGE} sh -c 'exit $((SLURM_PROCID == 2 ? 7 : 0))'"));
    assert_eq!(code.code, 7, "{}", code.text());
    assert!(!code.stderr.contains("mizzen"), "{}", code.text());
    let missing = cluster.run(&format!("srun -n4 {IMAGE} nosuch"));
    assert_failed(&missing, 127, "mizzen: node1: nosuch: no such program in the container\n");
    assert_eq!(missing.stderr.matches("mizzen: hint").count(), 1, "{}", missing.text());
    let mount = cluster.run(&format!("srun -n4 --container-mounts=/nosuch:/mnt {IMAGE} true"));
    assert_failed(&mount, 125, "mizzen: node1: ");
    let batch = cluster.run(&format!(
        "sbatch --quiet --wait --output=/shared/out {IMAGE} --wrap 'cat /etc/os-release; exit 5'; code=$?; cat /shared/out; exit $code"
    ));
    assert_out(&batch, 5, "PRETTY_NAME=\"Busybox for tests\"\n");
    empty.assert_again(cluster, "the basics");
}

#[test]
fn pinned_tasks_do_not_pin_the_file_server() {
    let mut spec = Spec { nodes: 1, ..Cluster::spec("affinity") };
    spec.slurm_conf = vec!["TaskPlugin=task/affinity".to_owned()];
    let cluster = start_with_busybox(spec);
    assert_basics(&cluster, &Emptiness::of(&cluster, &["node1"]));
    let all = cluster.run("grep Cpus_allowed_list /proc/self/status").stdout;
    let list = "grep Cpus_allowed_list /proc/self/status; server=$(grep -lx mizzen-fuse /proc/[0-9]*/comm) && grep Cpus_allowed_list ${server%comm}status";
    let pinned = cluster.run(&format!("srun -n1 --cpu-bind=map_cpu:0 {IMAGE} sh -c '{list}'"));
    assert_out(&pinned, 0, &format!("Cpus_allowed_list:\t0\n{all}"));
}

#[test]
fn steps_live_in_their_cgroups() {
    let cluster = start_with_busybox(Spec { cgroup_v1: true, nodes: 1, ..Cluster::spec("in-cgroups") });
    let empty = Emptiness::of(&cluster, &["node1"]);
    assert_basics(&cluster, &empty);
    let list = "own=$(grep -o freezer.*step_[0-9]* /proc/self/cgroup) && server=$(grep -lx mizzen-fuse /proc/[0-9]*/comm) && grep -c $own ${server%comm}cgroup";
    let groups = cluster.run(&format!("srun {IMAGE} sh -c '{list}'"));
    assert_out(&groups, 0, "1\n");
    empty.assert_again(&cluster, "the file server");
    // The broker may have started before Slurm puts its task into the cgroup; it ends with it all the same.
    cluster.share("prolog", b"#!/bin/sh\nsleep 60\n").unwrap();
    cluster.run_as_root("chmod 755 /shared/prolog");
    let broker = run_in_time(
        &cluster,
        &format!(
            "srun --task-prolog=/shared/prolog {IMAGE} true & until pgrep -x mizzen-broker; do sleep 0.05; done; sleep 0.5; scancel -u alice; wait $!"
        ),
    );
    assert_ne!(broker.code, 0, "{}", broker.text());
    empty.assert_again(&cluster, "the broker");
    // A file server that does not answer, here because it is stopped: its readers cannot be killed before it is.
    let stopped = run_in_time(
        &cluster,
        &format!(
            "srun --quiet -n4 {IMAGE} sh -c 'i=0; while :; do i=$((i + 1)); [ -e /etc/$SLURM_PROCID.$i ]; done' & until server=$(pgrep -x mizzen-fuse); do sleep 0.05; done; \
             sleep 0.5; kill -STOP $server; sleep 0.5; scancel -u alice; wait $!"
        ),
    );
    assert_ne!(stopped.code, 0, "{}", stopped.text());
    empty.assert_again(&cluster, "a file server that does not answer");
    // A process that leaves its session ends with the step, and so do its helpers.
    let daemon =
        cluster.run(&format!("srun {IMAGE} sh -c 'setsid sleep 60 >/dev/null 2>&1 </dev/null & sleep 0.2'"));
    assert_out(&daemon, 0, "");
    empty.assert_again(&cluster, "a daemon");
}

#[test]
fn a_jobs_own_tmp_is_the_containers() {
    let mut spec = Spec { one_cpu: true, nodes: 1, ..Cluster::spec("own-tmp") };
    spec.slurm_conf =
        vec!["JobContainerType=job_container/tmpfs".to_owned(), "PrologFlags=Contain".to_owned()];
    spec.slurm_files =
        vec![("job_container.conf".to_owned(), "AutoBasePath=true\nBasePath=/local\n".to_owned())];
    let cluster = start_with_busybox(spec);
    let empty = Emptiness::of(&cluster, &["node1"]);
    assert_basics(&cluster, &empty);
    cluster.run_on("node1", User::Root, "touch /tmp/of-the-node");
    let own = cluster.run(&format!(
        "salloc --quiet bash -c 'srun touch /tmp/private; srun {IMAGE} sh -c \"ls /tmp; touch /tmp/back\"; srun ls /tmp'"
    ));
    assert_out(&own, 0, "private\nback\nprivate\n");
    cluster.run_on("node1", User::Root, "rm /tmp/of-the-node");
    empty.assert_again(&cluster, "own /tmp");
}

#[test]
fn plugins_can_be_contained() {
    let mut spec = Spec { release: Release::Slurm24_11, nodes: 1, ..Cluster::spec("contained") };
    spec.slurm_conf = vec!["SlurmdParameters=config_overrides,contain_spank".to_owned()];
    let cluster = start_with_busybox(spec);
    assert_basics(&cluster, &Emptiness::of(&cluster, &["node1"]));
}

#[test]
fn signals_reach_the_program_and_not_its_root() {
    let cluster = start_with_busybox(Spec { cgroup_v1: true, nodes: 1, ..Cluster::spec("signals") });
    let empty = Emptiness::of(&cluster, &["node1"]);
    let tree = ImageTree::busybox().unwrap();
    tree.file("data/unread", "never read before\n").unwrap();
    cluster.share("data.sqsh", &tree.squashfs(&[]).unwrap()).unwrap();
    let image = "--container-image=/shared/data.sqsh";
    let ready = "until [ -e ~/ready ]; do sleep 0.05; done";
    let program =
        "trap \"sleep 0.3; cat /data/unread; exit 3\" TERM; touch ~/ready; while :; do sleep 0.1; done";
    let term = run_in_time(
        &cluster,
        &format!(
            "srun --quiet {image} sh -c '{program}' & {ready}; scancel --signal=TERM -u alice; rm ~/ready; wait $!"
        ),
    );
    assert_out(&term, 3, "never read before\n");
    empty.assert_again(&cluster, "SIGTERM");
    // Time stands still while a job is suspended, and goes on.
    let program = "i=0; while [ $i -lt 15 ]; do i=$((i + 1)); cat /bin/busybox >/dev/null; echo $i > ~/count; sleep 0.1; done; cat /data/unread";
    cluster.run(&format!("sbatch --output=out {image} --wrap '{program}'"));
    let suspended = cluster.run_as_root(
        "cd /home/alice; job=$(squeue -ho %i); until [ -s count ]; do sleep 0.05; done; scontrol suspend $job; sleep 0.3; \
         before=$(cat count); sleep 1; [ $before = $(cat count) ] && echo stands; squeue -ho %T; scontrol resume $job; \
         while [ -n \"$(squeue -h)\" ]; do sleep 0.1; done; cat count out; rm count out",
    );
    assert_out(&suspended, 0, "stands\nSUSPENDED\n15\nnever read before\n");
    // Run again from its beginning, under the same number.
    let program = "echo run $SLURM_RESTART_COUNT; cat /data/unread; [ $SLURM_RESTART_COUNT ] || sleep 60";
    cluster.run(&format!("sbatch --requeue --output=out --open-mode=append {image} --wrap '{program}'"));
    let requeued = cluster.run_as_root(
        "cd /home/alice; job=$(squeue -ho %i); until grep -q never out 2>/dev/null; do sleep 0.05; done; \
         scontrol requeue $job; until [ $(squeue -ho %T) = PENDING ]; do sleep 0.1; done; scontrol update job=$job StartTime=now; \
         while [ -n \"$(squeue -h)\" ]; do sleep 0.1; done; grep -v ' error: ' out; rm out",
    );
    assert_out(&requeued, 0, "run\nnever read before\nrun 1\nnever read before\n");
    empty.assert_again(&cluster, "requeued");
}

#[test]
fn a_time_limit_ends_the_program_politely() {
    let cluster = with_busybox("time-limit");
    let empty = Emptiness::of(&cluster, &["node1"]);
    let program = "trap \"cat /etc/os-release; sleep 60\" TERM; touch running; while :; do sleep 0.1; done";
    cluster.run(&format!(
        "echo '{program}' > program; sbatch --output=out --time=1 --no-container-script {IMAGE} --wrap 'srun sh program'"
    ));
    // Slurm looks at time limits, which have whole minutes, every 30 seconds.
    let ended = cluster.run_as_root(
        "cd /home/alice; job=$(squeue -ho %i); until [ -e running ]; do sleep 0.1; done; scontrol update job=$job EndTime=now+1; \
         while [ -n \"$(squeue -h)\" ]; do sleep 0.2; done; scontrol show job $job | grep -o JobState=[A-Z]*; grep -m 1 PRETTY out; rm out running program",
    );
    assert_out(&ended, 0, "JobState=TIMEOUT\nPRETTY_NAME=\"Busybox for tests\"\n");
    empty.assert_again(&cluster, "time limit");
}

#[test]
fn the_broker_trusts_nobody() {
    let cluster = with_busybox("broker");
    let empty = Emptiness::of(&cluster, &["node1"]);
    let launcher = include_str!("../fixtures/hostile-launcher.pl");
    cluster.share("hostile", launcher.as_bytes()).unwrap();
    cluster.share("lend", include_bytes!("../fixtures/lends-namespace.pl")).unwrap();
    let install = format!("cp -P {LAUNCHER} /root; rm {LAUNCHER}; install -m 755 /shared/hostile {LAUNCHER}");
    assert_out(&cluster.run_on("node1", User::Root, &install), 0, "");
    let hosts = "gid_map: 0 0 4294967295 \nsetgroups: allow \n";
    let refused = |why: &str| format!("answer: -the broker refuses a namespace: {why}\n");
    for (case, answer, map) in [
        ("a file", refused("it is none"), hosts),
        ("a device", refused("it is none"), hosts),
        ("mounts", refused("not a user namespace"), hosts),
        ("the node", refused("it belongs to another user"), hosts),
        ("another user", refused("it belongs to another user"), hosts),
        ("nested", refused("it is nested in another"), "gid_map:\nsetgroups: deny \n"),
        (
            "mapped",
            "answer: -cannot write setgroups: Operation not permitted (os error 1)\n".to_owned(),
            "gid_map: 2001 2001 1 \nsetgroups: deny \n",
        ),
        ("many", "answer: \n".to_owned(), hosts),
        ("no file", "answer: \n".to_owned(), hosts),
        ("garbage", "answer: \n".to_owned(), hosts),
        ("own", "answer: +\n".to_owned(), "gid_map: 2001 2001 1 2100 2100 2 \nsetgroups: deny \n"),
        ("own, 0", "answer: +\n".to_owned(), "gid_map: 0 2001 1 2100 2100 2 \nsetgroups: deny \n"),
    ] {
        let lender = (case == "another user").then(|| {
            let mut lender = cluster.command("node1", User::Bob, &["perl", "/shared/lend"]).spawn().unwrap();
            std::thread::sleep(Duration::from_millis(300));
            assert!(lender.try_wait().unwrap().is_none(), "bob has no namespace");
            lender
        });
        let talked = run_in_time(&cluster, &format!("CASE='{case}' srun -n2 {IMAGE} true"));
        // It has ended by itself: nothing more can be sent.
        let expected = format!("{answer}again: not sent: Broken pipe\n{map}");
        assert_out(&talked, 0, &expected);
        assert_eq!(talked.stderr, "", "{case}");
        lender.into_iter().for_each(|mut lender| assert!(lender.wait().unwrap().success()));
        empty.assert_again(&cluster, case);
    }
    // A launcher that never asks.
    cluster.share("hostile", b"#!/bin/sh\nexit 3\n").unwrap();
    cluster.run_on("node1", User::Root, &format!("install -m 755 /shared/hostile {LAUNCHER}"));
    assert_eq!(run_in_time(&cluster, &format!("srun {IMAGE} true")).code, 3);
    empty.assert_again(&cluster, "no question");
}

#[test]
fn groups_are_the_users_and_cannot_be_dropped() {
    let cluster = with_busybox("groups");
    cluster.run_as_root(
        "cd /shared; for mode in 0040 0604; do echo $mode > gpu.$mode; chown root:gpu gpu.$mode; chmod $mode gpu.$mode; done; \
         echo bob > bobs; chown root:bob bobs; chmod 0040 bobs",
    );
    let inside = |options: &str, script: &str| {
        cluster
            .run(&format!("srun --quiet {options} --container-mounts=/shared {IMAGE} sh -c '{script}' 2>&1"))
    };
    for (options, first) in [("", "2001"), ("--container-remap-root", "0")] {
        let map = inside(options, "cat /proc/self/setgroups /proc/self/gid_map | xargs");
        assert_out(&map, 0, &format!("deny {first} 2001 1 2100 2100 2\n"));
        let files = inside(options, "cd /shared; cat gpu.0040; cat gpu.0604; cat bobs; stat -c %G gpu.0040");
        let denied = |file: &str| format!("cat: can't open '{file}': Permission denied\n");
        assert_out(&files, 0, &format!("0040\n{}{}gpu\n", denied("gpu.0604"), denied("bobs")));
    }
    // Root inside has the capability, and still cannot.
    let dropped = inside("--container-remap-root", "su -c \"cat /shared/gpu.0604\" root");
    assert!(dropped.code != 0 && dropped.stdout.contains("Operation not permitted"), "{}", dropped.text());
    let names = inside("", "id");
    assert_out(&names, 0, "uid=2001(alice) gid=2001(alice) groups=2001(alice),2100(research),2101(gpu)\n");
}

#[test]
fn the_program_starts_as_slurm_would_start_it() {
    let cluster = with_busybox("inside");
    cluster.share("busybox", &std::fs::read("/bin/busybox").unwrap()).unwrap();
    cluster.run_as_root("chmod 755 /shared/busybox");
    let inside = format!("--container-mounts=/shared {IMAGE}");
    // The same program on both sides, and all that it can see of how it was started.
    let probe = |options: &str, script: &str| {
        let all = "ulimit -n 777; ulimit -c 5; ulimit -s 4096; trap '' USR2;";
        let run = cluster.run(&format!("{all} srun {options} /shared/busybox sh -c '{script}'"));
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{}", run.text());
        run.stdout
    };
    let state = "ls /proc/$$/fd; grep -E \"^(Sig[BICP]|Shd|Cap(Inh|Prm|Eff|Amb)|Seccomp|Groups)\" /proc/self/status; \
                 cat /proc/self/limits /proc/self/oom_score_adj; umask; pwd; id; echo $TMPDIR; hostname";
    let (bare, contained) = (probe("", state), probe(&inside, state));
    assert_eq!(contained, bare);
    assert!(bare.starts_with("0\n1\n2\nGroups") && bare.contains("CapEff:\t0000000000000000\n"), "{bare}");
    assert!(bare.contains("Max open files            777 "), "{bare}");
    assert_eq!(probe(&inside, "grep NoNewPrivs /proc/self/status"), "NoNewPrivs:\t1\n");
    let names = "env | grep -o ^[A-Za-z_0-9]*= | sort";
    let lines = |text: String| text.lines().map(str::to_owned).collect::<std::collections::BTreeSet<_>>();
    let (bare, contained) = (lines(probe("", names)), lines(probe(&inside, names)));
    let lost: Vec<_> = bare.difference(&contained).collect();
    let added: Vec<_> = contained.difference(&bare).filter(|name| *name != "TZ=").collect();
    assert!(lost.is_empty(), "{lost:?}");
    assert_eq!(added, ["SLURM_MIZZEN_REQUEST=", "SLURM_MIZZEN_STEP="]);
    // The one further descriptor that Slurm gives a program.
    let pmi = probe(&format!("--mpi=pmi2 {inside}"), "ls /proc/$$/fd; echo $PMI_FD");
    let mut fds: Vec<u32> = pmi.lines().map(|fd| fd.parse().unwrap()).collect();
    let pmi_fd = fds.pop().unwrap();
    fds.sort_unstable();
    assert_eq!(fds, [0, 1, 2, pmi_fd]);
    // The directory of Slurm's for temporary files exists inside.
    let temporary = cluster
        .run(&format!("TMPDIR=/tmp srun {IMAGE} sh -c 'touch $TMPDIR/x && echo $TMPDIR; rm $TMPDIR/x'"));
    assert_out(&temporary, 0, "/tmp\n");
}

#[test]
fn upgrades_do_not_touch_running_steps() {
    let cluster = with_busybox("upgrades");
    let empty = Emptiness::of(&cluster, &["node1"]);
    let go = "until [ -e ~/go ]; do sleep 0.1; done; cat /etc/os-release";
    let expected = "PRETTY_NAME=\"Busybox for tests\"\n".repeat(4);
    let while_it_runs = |change: &str| {
        cluster.run("rm -f ~/go ~/running*");
        std::thread::scope(|scope| {
            let step = scope.spawn(|| {
                cluster.run(&format!("srun -n4 {IMAGE} sh -c 'touch ~/running$SLURM_PROCID; {go}'"))
            });
            let running = "until [ -e ~/running0 -a -e ~/running1 -a -e ~/running2 -a -e ~/running3 ]; do sleep 0.05; done";
            cluster.run(running);
            let changed = cluster.run_on("node1", User::Root, change);
            assert_eq!(changed.code, 0, "{}", changed.text());
            cluster.run("touch ~/go");
            let step = step.join().unwrap();
            assert_out(&step, 0, &expected);
            assert_eq!(step.stderr, "", "{change}");
        });
        cluster.run("rm -f ~/go ~/running*");
    };
    // slurmd ends and starts again, as its service would.
    while_it_runs(
        "pid=$(cat /run/slurmd.pid); mapfile -d '' words < /proc/$pid/cmdline; kill $pid; while [ -e /proc/$pid ] && ! grep -q 'State:.Z' /proc/$pid/status; do sleep 0.05; done; \
         setsid \"${words[@]}\" </dev/null >/dev/null 2>&1 & sleep 1",
    );
    empty.assert_again(&cluster, "slurmd restarted");
    // New files, broken at that, by rename.
    let broken = format!(
        "for file in {PLUGIN} /usr/bin/mizzen; do cp $file /root; echo broken > $file.new; mv $file.new $file; done"
    );
    while_it_runs(&broken);
    let restore = format!("mv /root/spank_mizzen.so {PLUGIN}; mv /root/mizzen /usr/bin/mizzen");
    assert_out(&cluster.run_on("node1", User::Root, &restore), 0, "");
    while_it_runs("true");
    empty.assert_again(&cluster, "files replaced");
}
