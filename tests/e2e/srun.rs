//! srun's own options and habits, in a container: everything as without one. Where it matters, each command runs once
//! without and once with the container, and both must give the same.

use mizzen_tests::check::{
    assert_failed, assert_failed_closed, assert_out, assert_told, one_node, run_in_time, with_images,
};
use mizzen_tests::{Cluster, Output, Release, User};

const A: &str = "--container=/shared/a.sqsh";

fn start(name: &str) -> Cluster {
    with_images(one_node(Release::Slurm22_05, name))
}

/// The same command without and with a container; CONTAINER in it stands for the option.
fn both(cluster: &Cluster, script: &str) -> (Output, Output) {
    (cluster.run(&script.replace("CONTAINER", "")), cluster.run(&script.replace("CONTAINER", A)))
}

#[track_caller]
fn assert_same(cluster: &Cluster, script: &str) {
    let (outside, inside) = both(cluster, script);
    let context = format!("{script}\noutside: {}\ninside: {}", outside.text(), inside.text());
    assert_eq!((inside.code, &inside.stdout), (outside.code, &outside.stdout), "{context}");
}

#[test]
fn exit_codes_and_signals_arrive() {
    let cluster = start("step-codes");
    for script in [
        "srun -Q CONTAINER sh -c 'exit 42'",
        "srun -Q CONTAINER sh -c 'exit 125'",
        "srun -Q CONTAINER sh -c 'kill -TERM $$'",
        "srun -Q CONTAINER sh -c 'kill -KILL $$'",
        "srun -Q CONTAINER sh -c 'kill -ABRT $$'",
        "srun -Q -n4 CONTAINER sh -c 'exit $SLURM_PROCID'",
        "srun -Q -K -n3 CONTAINER sh -c '[ $SLURM_PROCID = 1 ] && exit 3; exec sleep 20'",
        "srun -Q CONTAINER sh -c 'yes | head -n 1'",
        "srun -Q CONTAINER grep -E '^Sig(Ign|Blk)' /proc/self/status",
        "srun -Q CONTAINER sh -c 'trap \"echo caught; exit 3\" USR1; for i in $(seq 100); do sleep 0.1; done' & sleep 1; scancel -s USR1 -u alice; wait $!",
        "srun -Q --time=0:01 CONTAINER sh -c 'exit 9'",
    ] {
        assert_same(&cluster, script);
    }
    // The whole of srun's report is the same too.
    let killed = |container: &str| cluster.run(&format!("srun {container} sh -c 'kill -SEGV $$'"));
    let (outside, inside) = (killed(""), killed(A));
    let words =
        |output: &Output| output.stderr.lines().find(|line| line.contains("task 0")).map(str::to_owned);
    assert_eq!((outside.code, words(&outside)), (inside.code, words(&inside)), "{}", inside.text());
    for (program, code, message) in [
        ("nosuch", 127, "mizzen: node1: nosuch: no such program in the container\nmizzen: hint: PATH is "),
        ("/no/such", 127, "mizzen: node1: /no/such: no such program in the container"),
        ("/etc/passwd", 126, "mizzen: node1: /etc/passwd: Permission denied"),
        ("/etc", 126, "mizzen: node1: /etc: is a directory"),
        ("'echo hi'", 127, "hint: all of it is taken as the program's name"),
    ] {
        assert_failed(&cluster.run(&format!("srun -Q -n4 {A} {program}")), code, message);
    }
}

#[test]
fn streams_go_where_srun_says() {
    let cluster = start("step-streams");
    cluster.run("printf 'one\\ntwo\\n' > input");
    for script in [
        "echo from stdin | srun -Q CONTAINER cat",
        "srun -Q --input=input CONTAINER cat",
        "srun -Q -n2 --input=input CONTAINER cat",
        "echo to none | srun -Q --input=none CONTAINER cat",
        "head -c 3000000 /dev/zero | srun -Q CONTAINER wc -c",
        "srun -Q CONTAINER head -c 3000000 /dev/zero | wc -c",
        "srun -Q --output=out.%t -n2 CONTAINER sh -c 'echo $SLURM_PROCID; echo error >&2'; cat out.0 out.1; rm out.*",
        "srun -Q --output=out --error=err CONTAINER sh -c 'echo out; echo err >&2'; cat out err; rm out err",
        "srun -Q --label -n3 CONTAINER sh -c 'echo $SLURM_LOCALID' | sort",
        "srun -Q --unbuffered CONTAINER printf no-newline",
        "srun -Q -n4 --ntasks-per-node=4 CONTAINER sh -c 'echo $SLURM_NTASKS_PER_NODE' | sort",
        "srun -Q --chdir=/tmp CONTAINER pwd",
        "srun -Q CONTAINER sh -c 'echo $TMPDIR; umask; ulimit -n; ulimit -c; ulimit -s'",
        "ulimit -n 300; umask 077; srun -Q CONTAINER sh -c 'umask; ulimit -n'",
        "TMPDIR=/tmp/mine srun -Q CONTAINER sh -c 'echo $TMPDIR; touch $TMPDIR/x && echo written'",
        "mkdir -p /shared/mine; TMPDIR=/shared/mine srun -Q CONTAINER sh -c 'touch $TMPDIR/x && ls $TMPDIR'",
        "salloc -Q bash -c 'for i in 1 2 3; do srun -Q --overlap CONTAINER echo step & done; wait'",
    ] {
        assert_same(&cluster, script);
    }
    let killed = run_in_time(
        &cluster,
        &format!("srun -Q --kill-on-bad-exit -n3 {A} sh -c '[ $SLURM_PROCID = 1 ] && exit 3; sleep 40'"),
    );
    assert_ne!(killed.code, 0, "{}", killed.text());
    let label = cluster.run(&format!("srun -Q --label -n2 {A} sh -c 'cat /image' | sort"));
    assert_out(&label, 0, "0: a\n1: a\n");
}

#[test]
fn programs_are_broadcast() {
    let cluster = start("step-broadcast");
    cluster.run("printf '#!/bin/sh\\ncat /image 2>/dev/null || echo outside; echo $0 $1\\n' > script; chmod +x script");
    // Others may have put programs beside the copy that are called almost the same.
    let planted = "for job in $(seq 9); do for name in 0 zz node1x; do printf '#!/bin/sh\\necho planted\\n' > /tmp/slurm_bcast_$job.0_$name; done; done; \
                   chmod 755 /tmp/slurm_bcast_*";
    assert_out(&cluster.run_on("node1", User::Bob, planted), 0, "");
    for (destination, expected) in [("/tmp/copy", "a\n/tmp/copy word\n"), ("/tmp/", "a\n/tmp/slurm_bcast_")] {
        let srun = cluster.run(&format!("srun -Q -n1 --bcast={destination} {A} ./script word"));
        assert!(srun.code == 0 && srun.stdout.starts_with(expected), "{}", srun.text());
    }
    cluster.run("printf '0 cat /image\\n1-2 echo %%t\\n' > programs");
    let refused = cluster.run(&format!("srun -n3 {A} --multi-prog programs"));
    assert_failed(&refused, 1, "mizzen: --multi-prog: not in a container before Slurm 23.11");
    assert_failed(&refused, 1, "hint: start one script, which chooses its program by SLURM_PROCID");
    // A line that is continued on the next; a pipe; a client without the plugin, and a file that the node has not.
    cluster.run_as_root("cp -r /etc/slurm /shared/conf; : > /shared/conf/plugstack.conf");
    cluster.run("printf '0-2 touch \\\\\\n /shared/marker\\n' > /tmp/continued");
    let continued = cluster.run(&format!("srun -n3 {A} --multi-prog /tmp/continued"));
    assert_failed(&continued, 1, "mizzen: --multi-prog: not in a container before Slurm 23.11");
    let piped = cluster.run(&format!("srun -n3 {A} --multi-prog <(printf '0-2 touch /shared/marker')"));
    assert_failed(&piped, 1, "mizzen: --multi-prog: not in a container before Slurm 23.11");
    let bare = "SLURM_CONF=/shared/conf/slurm.conf srun";
    let elsewhere = cluster.run(&format!("{bare} -n3 {A} --multi-prog /tmp/continued"));
    let message = "node1: --multi-prog: not in a container before Slurm 23.11";
    assert_failed_closed(&cluster, "--multi-prog", &elsewhere, &elsewhere.stderr, message);
    assert_out(&cluster.run(&format!("srun -Q {A} echo '1 2'")), 0, "1 2\n");
    let plain =
        cluster.run("sed -i 's|cat /image|echo first|' programs; srun -Q -n3 --multi-prog programs | sort");
    assert_out(&plain, 0, "1\n2\nfirst\n");
    let newer = with_images(one_node(Release::Slurm24_11, "multi-prog"));
    newer.run("printf '0 cat /image\\n1-2 echo %%t\\n' > programs");
    let several = newer.run(&format!("srun -Q -n3 {A} --multi-prog programs | sort"));
    assert_out(&several, 0, "1\n2\na\n");
}

#[test]
fn terminals_work() {
    let cluster = start("step-terminal");
    let terminal = |command: &str| {
        let typed =
            cluster.run(&format!("script -qec \"stty rows 33 cols 77; {command}\" /dev/null </dev/null"));
        // `script` passes the end of its own input on as a NUL.
        typed.stdout.replace(['\0', '\r'], "").replace("^@", "")
    };
    let look = "sh -c 'stty size; test -t 0 && test -t 1 && test -t 2 && tty; stty -a | tail -n +2'";
    let inside = terminal(&format!("srun -Q --pty {A} {look}"));
    // The two programs have two names for one control character.
    assert_eq!(inside, terminal(&format!("srun -Q --pty {look}")).replace("discard = ", "flush = "));
    assert!(inside.starts_with("33 77\n/dev/pts/"), "{inside}");
    assert_eq!(terminal(&format!("srun -Q --pty {A} cat /image")), "a\n");
    assert_eq!(cluster.run(&format!("script -qec 'srun -Q --pty {A} sh -c \"exit 6\"' /dev/null")).code, 6);
}

#[test]
fn debuggers_join_a_running_step() {
    let cluster = start("join");
    // The host's perl and strace in the container, so that one rank can look into another.
    let mounts = "--container-mounts=/usr,/usr/lib:/lib,/usr/lib64:/lib64";
    let begin = cluster.run(&format!(
        "salloc -Q --no-shell --ntasks=4 -J debugged && job=$(squeue -h -n debugged -o %i) && echo $job; \
         nohup srun -Q --jobid=$job --overlap -n2 {A} --container-writable {mounts} --container-env=INSIDE=1 \
         sh -c 'echo mark > /mark; exec sleep 50' >/dev/null 2>&1 & sleep 2"
    ));
    let job = begin.stdout.trim();
    let join = |step: &str, program: &str| {
        cluster.run(&format!("srun -Q --overlap --jobid={job} --container-join={step} {program}"))
    };
    assert_out(
        &join("0", "sh -c 'cat /image /mark; pwd; echo $INSIDE; id -un'"),
        0,
        "a\nmark\n/home/alice\n1\nalice\n",
    );
    assert_out(&join(&format!("{job}.0"), "cat /image"), 0, "a\n");
    let namespaces = "sh -c 'readlink /proc/self/ns/user /proc/self/ns/mnt; pid=$(pgrep -x sleep | head -n 1); \
                      readlink /proc/$pid/ns/user /proc/$pid/ns/mnt'";
    let namespaces = join("0", namespaces);
    let lines: Vec<&str> = namespaces.stdout.lines().collect();
    assert!(lines.len() == 4 && lines[..2] == lines[2..], "{}", namespaces.text());
    cluster
        .share(
            "peek.pl",
            br#"my $pid = `pgrep -x sleep | head -n 1` + 0;
                open(my $maps, "<", "/proc/$pid/maps") or die "maps: $!";
                my ($address) = <$maps> =~ /^([0-9a-f]+)/;
                my $buffer = "\0" x 4;
                my $here = pack("QQ", unpack("Q", pack("p", $buffer)), 4);
                my $there = pack("QQ", hex($address), 4);
                my $read = syscall(310, $pid, $here, 1, $there, 1, 0); # process_vm_readv
                print "$read ", substr($buffer, 1, 3), "\n";"#,
        )
        .unwrap();
    cluster.run("cp /shared/peek.pl .");
    assert_out(&join("0", "/usr/bin/perl peek.pl"), 0, "4 ELF\n");
    let traced = join("0", "sh -c 'timeout 1 /usr/bin/strace -p $(pgrep -x sleep | head -n 1); true'");
    assert!(traced.stderr.contains(" attached"), "{}", traced.text());
    for step in ["7", "batch", "99999.0"] {
        let message = "no such step with a container of yours runs on this node";
        assert_failed(&join(step, "touch /shared/marker"), 125, message);
    }
    let other = cluster.run(&format!("srun -Q -n1 --container-join={job}.0 touch /shared/marker"));
    assert_told(
        &other,
        125,
        &format!(
            "--container-join={job}.0: that step is in another job, and a container is joined within its job"
        ),
        &format!("srun --jobid={job} --overlap"),
    );
    let bob = cluster.run_on(
        "ctl",
        User::Bob,
        &format!("srun -Q -n1 --container-join={job}.0 touch /shared/marker"),
    );
    assert_failed(&bob, 125, "no such step with a container of yours runs on this node");
    assert_eq!(cluster.run(&format!("ls /shared/marker; scancel {job}")).stdout, "");
    let batch = cluster.run(&format!("sbatch --parsable -o /dev/null {A} --wrap 'sleep 30'; sleep 1.5"));
    let job = batch.stdout.trim();
    let joined = cluster
        .run(&format!("srun -Q --overlap --jobid={job} --container-join=batch cat /image; scancel {job}"));
    assert_out(&joined, 0, "a\n");
}

#[test]
fn shells_of_allocations_are_inside() {
    for release in [Release::Slurm22_05, Release::Slurm24_11] {
        let mut spec = one_node(release, "interactive");
        spec.slurm_conf = vec!["LaunchParameters=use_interactive_step".to_owned()];
        let cluster = with_images(spec);
        let salloc = |options: &str| {
            let typed = "printf 'cat /image || echo outside\\nhostname\\nexit 5\\n'";
            cluster.run(&format!("{typed} | SHELL=/bin/sh script -qec 'salloc -Q {options}' /dev/null"))
        };
        for option in ["--container", "--container-image"] {
            let shell = salloc(&format!("{option}=/shared/a.sqsh"));
            assert_eq!(shell.code, 5, "{release}: {}", shell.text());
            assert!(
                shell.stdout.contains("\r\na\r\n") && shell.stdout.contains("\r\nnode1\r\n"),
                "{release}: {}",
                shell.text()
            );
        }
        let outside = salloc("--container-image=/shared/a.sqsh --no-container-script");
        assert!(outside.stdout.contains("\r\noutside\r\n"), "{release}: {}", outside.text());
        // A command in place of the shell runs where salloc does, and its steps inside.
        let command =
            cluster.run("salloc -Q --container-image=/shared/a.sqsh sh -c 'hostname; srun cat /image'");
        assert_out(&command, 0, "ctl\na\n");
    }
}
