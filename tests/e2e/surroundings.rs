//! Steps in containers and what surrounds them: other plugins, cgroups, signals, limits, groups, upgrades.

use mizzen_tests::check::{
    Emptiness, assert_failed, assert_out, cancel_at_any_time, count, run_in_time, start_with_busybox,
    with_busybox,
};
use mizzen_tests::copies::digest_of;
use mizzen_tests::images::ImageTree;
use mizzen_tests::{Cluster, Release, Spec, User};

const PLUGIN: &str = "/usr/lib/mizzen/spank_mizzen.so";
const LAUNCHER: &str = "/usr/lib/mizzen/mizzen-enter";
const IMAGE: &str = "--container-image=/shared/bb.sqsh";

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
    let mount =
        cluster.run(&format!("srun -n4 --container-mounts=/nosuch:/mnt {IMAGE} touch /home/alice/marker"));
    assert_failed(&mount, 125, "mizzen: node1: ");
    assert_eq!(cluster.run("ls ~/marker").stdout, "", "ran on the host");
    cancel_at_any_time(cluster, empty, count(4, 50));
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
    // The user namespace is there before the task is in its cgroup; it needs nobody to keep it.
    cluster.share("prolog", b"#!/bin/sh\nsleep 60\n").unwrap();
    cluster.run_as_root("chmod 755 /shared/prolog");
    let prolog = run_in_time(
        &cluster,
        &format!(
            "srun --task-prolog=/shared/prolog {IMAGE} true & until pgrep -f ^/bin/sh./shared/prolog; do sleep 0.05; done; sleep 0.5; scancel -u alice; wait $!"
        ),
    );
    assert_ne!(prolog.code, 0, "{}", prolog.text());
    empty.assert_again(&cluster, "a prolog");
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
fn the_user_namespace_is_the_users_and_settled() {
    let cluster = with_busybox("namespace");
    let empty = Emptiness::of(&cluster, &["node1"]);
    cluster.share("curious", include_bytes!("../fixtures/curious-launcher.pl")).unwrap();
    let install = format!("cp -P {LAUNCHER} /root; rm {LAUNCHER}; install -m 755 /shared/curious {LAUNCHER}");
    assert_out(&cluster.run_on("node1", User::Root, &install), 0, "");
    for (options, first) in [("", 2001), ("--container-remap-root", 0)] {
        let told = run_in_time(&cluster, &format!("srun -n2 {options} {IMAGE} true"));
        let expected = format!(
            "owner: 2001\nparent: the node's\nuid_map: {first} 2001 1\ngid_map: {first} 2001 1, 2100 2100 2\nsetgroups: deny\n\
             write gid_map: Operation not permitted\nwrite setgroups: Operation not permitted\n\
             setgroups: Operation not permitted\nchildren: No child processes\n"
        );
        assert_out(&told, 0, &expected);
        assert_eq!(told.stderr, "");
        empty.assert_again(&cluster, options);
    }
    // Who makes it has nothing of slurmstepd's open when it becomes the user's process.
    let trace = "exec strace -ff -qq -o /root/trace -e trace=close_range,setgroups,setresgid,setresuid,prctl,unshare \
                 -p $(pgrep -ox slurmd) 2>/dev/null";
    let mut tracer = cluster.command("node1", User::Root, &["sh", "-c", trace]).spawn().unwrap();
    let begun = "until grep -q ^TracerPid:.[1-9] /proc/$(pgrep -ox slurmd)/status; do sleep 0.05; done";
    assert_out(&cluster.run_on("node1", User::Root, begun), 0, "");
    assert_eq!(run_in_time(&cluster, &format!("srun {IMAGE} true")).code, 0);
    cluster.run_on("node1", User::Root, "pkill -INT -x strace");
    tracer.wait().unwrap();
    let read = "cat $(grep -l ^unshare.CLONE_NEWUSER /root/trace.*); rm /root/trace.*";
    let traced = cluster.run_on("node1", User::Root, read).stdout;
    let mut calls: Vec<&str> =
        traced.lines().filter_map(|line| line.split_once('(')).map(|(call, _)| call).collect();
    calls.dedup();
    let order = ["close_range", "setgroups", "setresgid", "setresuid", "prctl", "unshare"];
    assert_eq!(calls, order, "{traced}");
    empty.assert_again(&cluster, "traced");
    // A launcher that does not even enter it.
    cluster.share("curious", b"#!/bin/sh\nexit 3\n").unwrap();
    cluster.run_on("node1", User::Root, &format!("install -m 755 /shared/curious {LAUNCHER}"));
    assert_eq!(run_in_time(&cluster, &format!("srun {IMAGE} true")).code, 3);
    empty.assert_again(&cluster, "not entered");
}

#[test]
fn groups_are_the_users_and_cannot_be_dropped() {
    let cluster = with_busybox("groups");
    cluster.run_as_root(
        "cd /shared; for mode in 0040 0604; do echo $mode > gpu.$mode; chown root:gpu gpu.$mode; chmod $mode gpu.$mode; done; \
         echo bob > bobs; chown root:bob bobs; chmod 0040 bobs",
    );
    let inside = |options: &str, script: &str| {
        cluster.run(&format!(
            "srun --quiet {options} --container-mounts=/shared {IMAGE} sh -c 'exec 2>&1; {script}'"
        ))
    };
    for (options, first) in [("", "2001"), ("--container-remap-root", "0")] {
        let map = inside(options, "cat /proc/self/setgroups /proc/self/gid_map | xargs");
        assert_out(&map, 0, &format!("deny {first} 2001 1 2100 2100 2\n"));
        let files = inside(options, "cd /shared; cat gpu.0040; cat gpu.0604; cat bobs; stat -c %G gpu.0040");
        let denied = |file: &str| format!("cat: can't open '{file}': Permission denied\n");
        assert_out(&files, 0, &format!("0040\n{}{}gpu\n", denied("gpu.0604"), denied("bobs")));
    }
    // Root inside appears to drop the group, and has it still.
    let dropped = inside("--container-remap-root", "su -c \"cat /shared/gpu.0604\" root");
    assert!(dropped.code != 0 && dropped.stdout.contains("Permission denied"), "{}", dropped.text());
    let names = inside("", "id");
    assert_out(&names, 0, "uid=2001(alice) gid=2001(alice) groups=2001(alice),2100(research),2101(gpu)\n");
}

/// Slurm drops a variable that is too long for their names, without a word.
#[test]
fn a_user_may_be_in_thousands_of_groups() {
    let cluster = with_busybox("many-groups");
    let join = "name=$(printf %060d 0); for i in $(seq 3000); do echo \"g$name$i:x:$((100000 + i)):alice\"; done >> /etc/group";
    for machine in ["ctl", "node1"] {
        assert_out(&cluster.run_on(machine, User::Root, join), 0, "");
    }
    let script = "id -G | wc -w; grep -c . /proc/self/gid_map";
    assert_out(&cluster.run(&format!("srun sh -c '{script}'")), 0, "3003\n1\n");
    assert_out(&cluster.run(&format!("srun {IMAGE} sh -c '{script}'")), 0, "3003\n3\n");
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
    assert_eq!(lost, ["LANG="], "a locale is the image's");
    assert_eq!(added, ["MIZZEN_IMAGE=", "SLURM_MIZZEN_REQUEST=", "SLURM_MIZZEN_STEP="]);
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

/// Where procfs hides other processes, a task does not see the first one until that has become the launcher.
#[test]
fn hidden_processes_are_waited_for() {
    let cluster = with_busybox("hidepid");
    cluster.run_on("node1", User::Root, "mount -o remount,hidepid=2 /proc");
    let slow = "printf '#!/bin/sh\\n[ $SLURM_PROCID != 0 ] || sleep 1\\n' > slow; chmod +x slow; ";
    let run = run_in_time(&cluster, &format!("{slow} srun -n4 --task-prolog=$PWD/slow {IMAGE} echo inside"));
    assert_out(&run, 0, &"inside\n".repeat(4));
    // A mask that hides everything is for the program's files.
    let mask = cluster.run(&format!("umask 0777; srun {IMAGE} sh -c 'umask; ls /etc/os-release'"));
    assert_out(&mask, 0, "0777\n/etc/os-release\n");
}

#[test]
fn slurms_log_tells_what_ran_and_how_long_its_start_took() {
    let mut spec = Spec { nodes: 1, ..Cluster::spec("times") };
    spec.slurm_conf = vec!["SlurmdDebug=info".to_owned()];
    let cluster = start_with_busybox(spec);
    let digest = digest_of(&cluster, "/shared/bb.sqsh");
    for (step, options, known) in
        [("1.0", "", String::new()), ("2.0", "--container-stage=always", format!("@{digest}"))]
    {
        let run = cluster.run(&format!("srun -Q -n2 {options} {IMAGE} true"));
        assert_eq!((run.code, run.text().contains("mizzen")), (0, false), "{}", run.text());
        let log = cluster.slurmd_log("node1");
        let begin = format!("mizzen: /shared/bb.sqsh{known}: stage ");
        let line = log.lines().find(|line| line.contains(&begin)).expect(&log);
        let parts = line.contains(" ms, plan ") && line.contains(" ms, mount ");
        assert!(line.contains(&format!("[{step}] ")) && parts, "{line}");
    }
}
