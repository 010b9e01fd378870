//! What scripts that were written for pyxis rely on. Quoted lines are the contract that they were read from.

use mizzen_tests::check::{Emptiness, assert_failed, assert_out, assert_told, one_node};
use mizzen_tests::images::{self, ImageTree};
use mizzen_tests::packages::{HttpServer, Mirror, share_repository, share_rpm_repository};
use mizzen_tests::{Cluster, Output, Release, Spec, User, on_every_release};

on_every_release!(scripts_run_unchanged);

/// Runs each check in an old and a new release.
macro_rules! on_two_releases {
    ($($check:ident),* $(,)?) => {
        mod old { $(#[test] fn $check() { super::$check(mizzen_tests::Release::Slurm22_05) })* }
        mod new { $(#[test] fn $check() { super::$check(mizzen_tests::Release::Slurm24_11) })* }
    };
}

on_two_releases!(
    variables_stand_for_options,
    variables_of_the_host_and_of_pytorch,
    the_entrypoint_runs_once_on_a_node,
    mounts_have_enroots_flags,
    namespaces_of_its_own,
    accounts_and_homes,
    root_inside_installs_packages,
    root_inside_installs_rpms,
);

const TWO_RELEASES: [Release; 2] = [Release::Slurm22_05, Release::Slurm24_11];

/// An image as Docker's users make them.
fn image(entrypoint: &str) -> Vec<u8> {
    let tree = ImageTree::busybox().unwrap();
    let config = format!(
        r#"{{"config": {{"Env": ["X=image", "PYTORCH_VERSION=2.5"], "Entrypoint": {entrypoint}, "WorkingDir": "/opt"}}}}"#
    );
    tree.file(".mizzen/config.json", &config).unwrap();
    tree.file("opt/file", "").unwrap();
    let script = "#!/bin/sh\necho == BANNER ==\necho \"$X $SLURM_PROCID.\" >> /tmp/runs\n\
                  export FROM_ENTRYPOINT=\"yes $X\" PATH=/entry:$PATH\nunset GONE\ncd /var\nexec \"$@\"\n";
    tree.program("entry.sh", script).unwrap();
    tree.program("fail.sh", "#!/bin/sh\necho first\necho no card here >&2\nexit 3\n").unwrap();
    tree.squashfs(&["-comp", "zstd"]).unwrap()
}

fn start(spec: Spec) -> Cluster {
    let cluster = Cluster::start(spec).unwrap();
    cluster.share("i.sqsh", &image(r#"["/entry.sh"]"#)).unwrap();
    cluster
}

fn srun(cluster: &Cluster, options: &str, program: &str) -> Output {
    cluster.run(&format!("srun --container-image=/shared/i.sqsh {options} {program}"))
}

/// What every script needs, on every release.
fn scripts_run_unchanged(release: Release) {
    let cluster = start(one_node(release, "pyxis"));
    let by_variables = cluster.run(
        "PYXIS_CONTAINER_IMAGE=/shared/i.sqsh PYXIS_CONTAINER_WRITABLE=1 PYXIS_CONTAINER_WORKDIR=/var srun sh -c 'touch /x; pwd'",
    );
    assert_out(&by_variables, 0, "/var\n");
    let entered = srun(&cluster, "-n3 --container-entrypoint", "sh -c 'echo $FROM_ENTRYPOINT $(pwd)'");
    assert_out(&entered, 0, &"yes image /var\n".repeat(3));
    assert_eq!(entered.stderr, "");
    assert_out(&cluster.run_on("node1", User::Root, "cat /tmp/runs; rm /tmp/runs"), 0, "image .\n");
    let apart = srun(
        &cluster,
        "-n2 --container-unshare=net,ipc,uts",
        "sh -c 'for i in net ipc uts; do readlink /proc/self/ns/$i; done' | sort | uniq -c | tr -s ' ' | cut -d' ' -f2",
    );
    assert_out(&apart, 0, "2\n2\n2\n");
    let ranks = srun(&cluster, "-n2", "sh -c 'echo $RANK $LOCAL_RANK [$LANG]' | sort");
    assert_out(&ranks, 0, "0 0 []\n1 1 []\n");
    let mounts = "--container-mounts=umount:/tmp,/usr:/mnt:unbindable+ro,tmpfs:/t:mode=700";
    let mounted = srun(&cluster, mounts, "sh -c 'stat -c %a /t; grep -c unbindable /proc/self/mountinfo'");
    assert_out(&mounted, 0, "700\n1\n");
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
}

/// "Every option has a variable `PYXIS_CONTAINER_…`, used when the option is not given."
fn variables_stand_for_options(release: Release) {
    let cluster = start(one_node(release, "pyxis-variables"));
    cluster.run("mkdir -p a b; echo a > a/f; echo b > b/f");
    let image = "PYXIS_CONTAINER_IMAGE=/shared/i.sqsh";
    for (variables, options, program, expected) in [
        ("PYXIS_CONTAINER_MOUNTS=/home/alice/a:/m", "", "cat /m/f", "a\n"),
        ("PYXIS_CONTAINER_MOUNTS=/home/alice/a:/m", "--container-mounts=/home/alice/b:/m", "cat /m/f", "b\n"),
        ("PYXIS_CONTAINER_WORKDIR=/var", "", "pwd", "/var\n"),
        ("PYXIS_CONTAINER_WORKDIR=/var", "--container-workdir=/etc", "pwd", "/etc\n"),
        ("PYXIS_CONTAINER_REMAP_ROOT=y", "", "id -u", "0\n"),
        ("PYXIS_CONTAINER_REMAP_ROOT=1", "--no-container-remap-root", "id -u", "2001\n"),
        // "other values are ignored"
        ("PYXIS_CONTAINER_REMAP_ROOT=on", "", "id -u", "2001\n"),
        ("PYXIS_CONTAINER_MOUNT_HOME=0", "", "sh -c 'ls -A $HOME | wc -l'", "0\n"),
        ("PYXIS_CONTAINER_READONLY=0", "", "sh -c 'touch /x && echo yes'", "yes\n"),
        ("PYXIS_CONTAINER_ENV=X X=mine", "", "sh -c 'echo $X'", "mine\n"),
        ("PYXIS_CONTAINER_ENTRYPOINT=1", "", "sh -c 'echo $FROM_ENTRYPOINT'", "yes image\n"),
        (
            "PYXIS_CONTAINER_UNSHARE=net",
            "",
            "sh -c 'ls /sys/class/net >/dev/null; grep -c : /proc/net/dev'",
            "1\n",
        ),
        // Ours win.
        ("PYXIS_CONTAINER_WORKDIR=/var MIZZEN_CONTAINER_WORKDIR=/etc", "", "pwd", "/etc\n"),
    ] {
        let run = cluster.run(&format!("{image} {variables} srun {options} {program}"));
        assert_out(&run, 0, expected);
    }
    let log =
        cluster.run(&format!("{image} PYXIS_CONTAINER_ENTRYPOINT_LOG=1 srun --container-entrypoint true"));
    assert_out(&log, 0, "== BANNER ==\n");
    assert_failed(
        &cluster.run(&format!("{image} PYXIS_CONTAINER_MOUNTS=/a:b srun true")),
        1,
        "mizzen: PYXIS_CONTAINER_MOUNTS: \"/a:b\": the destination is not absolute",
    );
    // A job without a container does not look at them.
    assert_out(&cluster.run("PYXIS_CONTAINER_MOUNTS=/a:b srun hostname"), 0, "node1\n");
}

/// "the host's value wins over the image's, for the entrypoint too; unset on the host: the image's stays; an empty item is an
/// error"; "`LANG`, `LANGUAGE`, `LC_ALL` are unset unless named in --container-env"; "with `PYTORCH_VERSION` in the image's
/// environment every task gets `RANK=$SLURM_PROCID`, `LOCAL_RANK=$SLURM_LOCALID`".
fn variables_of_the_host_and_of_pytorch(release: Release) {
    let cluster = start(Spec { nodes: 2, ..one_node(release, "pyxis-environment") });
    let locale = "export LANG=de_DE.UTF-8 LANGUAGE=de LC_ALL=de_DE.UTF-8 LC_TIME=C; ";
    let show = "sh -c 'echo \"$X [$LANG] [$LANGUAGE] [$LC_ALL] $LC_TIME\"'";
    let step = "srun -N1 --container-image=/shared/i.sqsh";
    assert_out(&cluster.run(&format!("{locale} X=host {step} {show}")), 0, "image [] [] [] C\n");
    let asked = cluster.run(&format!("{locale} X=host {step} --container-env=X,LANG {show}"));
    assert_out(&asked, 0, "host [de_DE.UTF-8] [] [] C\n");
    assert_out(&cluster.run(&format!("{step} --container-env=X sh -c 'echo $X'")), 0, "image\n");
    let entered = cluster.run(&format!(
        "X=host {step} --container-entrypoint --container-env=X sh -c 'echo $FROM_ENTRYPOINT'"
    ));
    assert_out(&entered, 0, "yes host\n");
    for empty in ["X,,LANG", ""] {
        let refused = cluster.run(&format!("{step} --container-env={empty} true"));
        assert_failed(&refused, 1, "mizzen: --container-env: \"\": the name is empty");
    }
    let ranks = "sh -c 'echo $RANK $LOCAL_RANK [$WORLD_SIZE$MASTER_ADDR$MASTER_PORT]' | sort";
    // Also where a script has some of another step.
    let run =
        cluster.run(&format!("RANK=7 srun -N2 --ntasks-per-node=2 --container-image=/shared/i.sqsh {ranks}"));
    assert_out(&run, 0, "0 0 []\n1 1 []\n2 0 []\n3 1 []\n");
    let all = "sh -c 'echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $((MASTER_PORT - 61000 - SLURM_JOB_ID - SLURM_STEP_ID))' | sort";
    let run = cluster.run(&format!(
        "srun -N2 --ntasks-per-node=2 --container-pytorch --container-image=/shared/i.sqsh {all}"
    ));
    assert_out(&run, 0, "0 0 4 node1 0\n1 1 4 node1 0\n2 0 4 node1 0\n3 1 4 node1 0\n");
    let without = cluster.run(&format!("{step} --no-container-pytorch sh -c 'echo [$RANK$LOCAL_RANK]'"));
    assert_out(&without, 0, "[]\n");
}

/// "the image's entrypoint, once per node before the tasks"; "its output goes to the user" with --container-entrypoint-log.
fn the_entrypoint_runs_once_on_a_node(release: Release) {
    let cluster = start(Spec { nodes: 2, ..one_node(release, "pyxis-entrypoint") });
    let count = |node: &str| cluster.run_on(node, User::Root, "cat /tmp/runs; rm -f /tmp/runs").stdout;
    let show = "sh -c 'echo $SLURM_PROCID $FROM_ENTRYPOINT [$GONE] $(pwd) ${PATH%%:*}' | sort";
    let run = cluster.run(&format!(
        "GONE=1 srun -N2 --ntasks-per-node=2 --container-entrypoint --container-image=/shared/i.sqsh {show}"
    ));
    let expected: String = (0..4).map(|rank| format!("{rank} yes image [] /var /entry\n")).collect();
    assert_out(&run, 0, &expected);
    assert_eq!(run.stderr, "");
    // Once, and for no task in particular.
    assert_eq!((count("node1"), count("node2")), ("image .\n".to_owned(), "image .\n".to_owned()));
    let logged = srun(&cluster, "-n3 --container-entrypoint --container-entrypoint-log", "echo x | sort");
    assert_out(&logged, 0, "== BANNER ==\nx\nx\nx\n");
    // "--container-workdir holds" whatever the entrypoint's own directory is.
    let workdir = srun(&cluster, "--container-entrypoint --container-workdir=/etc", "pwd");
    assert_out(&workdir, 0, "/etc\n");
    assert_out(&srun(&cluster, "--no-container-entrypoint", "sh -c 'echo [$FROM_ENTRYPOINT]'"), 0, "[]\n");
    // "a missing one: `No such file or directory`"
    let missing = srun(&cluster, "--container-workdir=/nosuch", "true");
    assert_failed(&missing, 125, "--container-workdir: cannot start in /nosuch: No such file or directory");
    // A batch script and its steps.
    let batch = cluster.run(
        "sbatch --wait --quiet --output=out --container-image=/shared/i.sqsh --container-entrypoint -n2 -N1 \
         --wrap 'echo $FROM_ENTRYPOINT; srun sh -c \"echo \\$FROM_ENTRYPOINT\"'; cat out",
    );
    assert_out(&batch, 0, "yes image\nyes image\nyes image\n");
    cluster.share("fail.sqsh", &image(r#"["/fail.sh"]"#)).unwrap();
    let failed = cluster
        .run("srun -n3 -N1 --container-entrypoint --container-image=/shared/fail.sqsh touch /shared/marker");
    assert_told(
        &failed,
        125,
        "node1: the image's entrypoint /fail.sh: exit code 3; its last lines: first | no card here",
        "--container-entrypoint-log shows all that it prints",
    );
    cluster.share("echo.sqsh", &image(r#"["/bin/echo", "entry"]"#)).unwrap();
    let ended =
        cluster.run("srun --container-entrypoint --container-image=/shared/echo.sqsh touch /shared/marker");
    assert_failed(
        &ended,
        125,
        "the image's entrypoint /bin/echo: ended without starting the program that it was given; its last lines: entry /proc/",
    );
    cluster.share("missing.sqsh", &image(r#"["/nosuch"]"#)).unwrap();
    let missing = cluster
        .run("srun --container-entrypoint --container-image=/shared/missing.sqsh touch /shared/marker");
    assert_failed(&missing, 127, "the image's entrypoint /nosuch: /nosuch: no such program in the container");
    assert_out(&cluster.run("ls /shared | grep -c marker"), 1, "0\n");
}

/// "no DST: DST = SRC; flags joined by `+`"; "SRC begins with `.` or `/` (rbind, destination created), or is `tmpfs`, or `umount` (DST
/// is unmounted inside)"; "spaces allowed; duplicates ignored"; "a missing absolute source: `source path does not exist: …`; invalid
/// format"; "a DST that leaves the root (`../home`): error `cross-device link`".
fn mounts_have_enroots_flags(release: Release) {
    let cluster = start(one_node(release, "pyxis-mounts"));
    cluster.run("mkdir -p 'a b' data; echo spaces > 'a b/f'; echo data > data/f");
    cluster.run_on("node1", User::Root, "touch /tmp/host");
    let line = |place: &str| format!("grep ' {place} ' /proc/self/mountinfo");
    for (mounts, program, expected) in [
        ("/shared", "ls /shared/i.sqsh", "/shared/i.sqsh\n"),
        ("'/home/alice/a b:/c d'", "cat '/c d/f'", "spaces\n"),
        ("'a b:/c d,a b:/c d'", "cat '/c d/f'", "spaces\n"),
        ("./data:/m:x-create=dir", "cat /m/f", "data\n"),
        ("data/f:/new/place/f:x-create=file+ro", "cat /new/place/f", "data\n"),
        ("/dev/null:/null:x-create=auto", "sh -c '[ -c /null ] && echo device'", "device\n"),
        ("/no/such:/m:nofail", "sh -c 'ls -d /m 2>/dev/null || echo none'", "none\n"),
        (
            "tmpfs:/t:size=1m+mode=0750",
            "sh -c 'stat -c %a /t; df -k /t | tail -n1 | tr -s \" \" | cut -d\" \" -f2'",
            "750\n1024\n",
        ),
        (
            "tmpfs:/t:nr_inodes=100+huge=never+uid=2001+gid=2100",
            "sh -c 'stat -c \"%u %g\" /t; df -i /t | tail -n1 | tr -s \" \" | cut -d\" \" -f2'",
            "2001 2100\n100\n",
        ),
        ("tmpfs:/t:nr_blocks=4", "sh -c 'df -k /t | tail -n1 | tr -s \" \" | cut -d\" \" -f2'", "16\n"),
        (
            "data:/m:sync+dirsync+strictatime+nostrictatime+lazytime+nolazytime+iversion+noiversion+mand+nomand",
            "cat /m/f",
            "data\n",
        ),
        ("data:/m:auto+noauto+user+users+nouser+nousers+owner+noowner+group+nogroup", "cat /m/f", "data\n"),
        ("none:/tmp:x-detach+nofail", "sh -c 'ls -A /tmp | wc -l'", "0\n"),
        ("umount:/tmp", "sh -c 'ls -A /tmp | wc -l'", "0\n"),
        ("umount:/tmp,tmpfs:/tmp", "sh -c 'touch /tmp/x && ls -A /tmp'", "x\n"),
        ("umount:/home/alice", "sh -c 'ls -A /home/alice | wc -l'", "0\n"),
        ("/tmp:/m:", "ls /m/host", "/m/host\n"),
    ] {
        let run = srun(&cluster, &format!("--container-mounts={mounts}"), program);
        assert_out(&run, 0, expected);
        assert!(!run.stderr.contains("twice"), "{}", run.text());
    }
    for (flag, mark) in
        [("unbindable", "unbindable"), ("shared", "shared:"), ("rprivate", "- "), ("private", "- ")]
    {
        let show = format!("sh -c \"{} | grep -c -e '{mark}'; touch /m/x\"", line("/m"));
        let run = srun(&cluster, &format!("--container-mounts=/tmp:/m:{flag}+ro"), &show);
        assert_out(&run, 1, "1\n");
        assert!(run.stderr.contains("Read-only file system"), "{}", run.text());
    }
    // What the node mounts later appears in a slave, and nowhere else.
    let shared = "mkdir -p /srv/auto /srv/other && mount --bind /srv /srv && mount --make-shared /srv && mkdir -p /srv/auto/new /srv/other/new";
    assert_out(&cluster.run_on("node1", User::Root, shared), 0, "");
    assert_out(
        &cluster.run(
            "sbatch --quiet --output=slave.out --container-image=/shared/i.sqsh \
             --container-mounts=/srv/auto:/auto:rslave,/srv/other:/other \
             --wrap 'touch ready; until [ -e /auto/new/file ]; do sleep 0.1; done; ls -A /auto/new /other/new; touch done'; \
             for i in $(seq 300); do [ -e ready ] && exit 0; sleep 0.1; done; exit 1",
        ),
        0,
        "",
    );
    let later = "for i in auto other; do mount -t tmpfs none /srv/$i/new && touch /srv/$i/new/file; done";
    assert_out(&cluster.run_on("node1", User::Root, later), 0, "");
    let seen = cluster.run("for i in $(seq 300); do [ -e done ] && break; sleep 0.1; done; cat slave.out");
    assert_out(&seen, 0, "/auto/new:\nfile\n\n/other/new:\n");
    for (mounts, code, message) in [
        ("/no/such:/m", 125, "node1: --container-mounts: source path does not exist: /no/such"),
        ("data:/m:x-create=file", 125, "/home/alice/data: x-create=file, but it is a directory"),
        ("umount:/proc", 125, "--container-mounts: umount:/proc: /proc, /sys and /dev are mizzen's own"),
        // Before anything is submitted.
        (
            "/home:../home",
            1,
            "\"/home:../home\": the destination leaves the container's root: Cross-device link",
        ),
        ("/tmp:/m:shiny", 1, "\"/tmp:/m:shiny\": unknown flag \"shiny\""),
        ("/tmp:/m:size=1m", 1, "\"/tmp:/m:size=1m\": size= belongs to tmpfs"),
        ("/tmp:/m:nr_inodes=10", 1, "\"/tmp:/m:nr_inodes=10\": nr_inodes= belongs to tmpfs"),
        ("/tmp:/m:remount+ro", 1, "\"/tmp:/m:remount+ro\": unknown flag \"remount\""),
        ("/tmp:/m:x-move", 1, "\"/tmp:/m:x-move\": unknown flag \"x-move\""),
        ("tmpfs:/m:uid=0", 125, "node1: --container-mounts: uid=0 is not you"),
        ("tmpfs:/m:gid=7", 125, "node1: --container-mounts: gid=7 is no group of yours that there is inside"),
        ("tmpfs:/m:mode=rwx", 1, "\"tmpfs:/m:mode=rwx\": mode=rwx is not an octal mode"),
        ("/tmp:", 1, "\"/tmp:\": the destination is empty"),
        (":", 1, "\":\": the source is empty"),
    ] {
        assert_failed(&srun(&cluster, &format!("--container-mounts={mounts}"), "true"), code, message);
    }
    let root = "--container-remap-root --container-mounts=tmpfs:/t:uid=0+gid=0";
    assert_out(&srun(&cluster, root, "stat -c '%u %g' /t"), 0, "0 0\n");
    let left_out =
        srun(&cluster, "--container-mounts=/no/such:/m:nofail,umount:/opt,/shared:/s:dev+suid", "true");
    for note in [
        "mizzen: note: node1: --container-mounts: /s: dev+suid has no effect: no mount in a container gives privileges\n",
        "mizzen: note: node1: --container-mounts: source path does not exist: /no/such; it is left out (nofail)\n",
        "mizzen: note: node1: --container-mounts: umount:/opt: nothing is mounted there\n",
    ] {
        assert_eq!(left_out.stderr.matches(note).count(), 1, "{}", left_out.text());
    }
}

/// "argument required; empty; `unknown namespace '…'`"; "with unshare=ipc /dev, /dev/shm and /dev/mqueue are its own"; "with
/// unshare=net the loopback is up and the rest is `Network is unreachable`"; "sethostname works with uts and remap-root".
fn namespaces_of_its_own(release: Release) {
    let cluster = start(one_node(release, "pyxis-unshare"));
    let net = srun(
        &cluster,
        "--container-unshare=net",
        "sh -c 'grep -c : /proc/net/dev; ip address show lo | grep -o LOOPBACK,UP; nc -w1 192.0.2.1 80'",
    );
    assert_out(&net, 1, "1\nLOOPBACK,UP\n");
    assert!(net.stderr.contains("Network is unreachable"), "{}", net.text());
    // All tasks of the step have the same shared memory, and the node has another.
    let together = "sh -c 'touch /dev/shm/task.$SLURM_PROCID; until [ -e /dev/shm/task.0 -a -e /dev/shm/task.1 ]; do sleep 0.1; done; \
                    grep -c \" /dev/mqueue .* mqueue \" /proc/self/mountinfo'";
    assert_out(&srun(&cluster, "-n2 --container-unshare=ipc", together), 0, "1\n1\n");
    assert_out(&cluster.run_on("node1", User::Root, "ls -A /dev/shm | grep -c task"), 1, "0\n");
    for kind in ["net", "ipc", "uts"] {
        let number = format!("readlink /proc/self/ns/{kind}");
        let inside =
            srun(&cluster, &format!("-n3 --container-unshare={kind}"), &format!("{number} | sort -u"));
        assert!(inside.code == 0 && inside.stdout.lines().count() == 1, "{}", inside.text());
        assert_ne!(inside.stdout, cluster.run(&format!("srun {number}")).stdout, "{kind}");
        assert_eq!(
            srun(&cluster, "", &number).stdout,
            cluster.run(&format!("srun {number}")).stdout,
            "{kind}"
        );
        let joined = cluster.run(&format!(
            "salloc --quiet -n2 sh -c 'srun --overlap -n1 --container-image=/shared/i.sqsh --container-unshare={kind} \
             sh -c \"{number} > own; touch began.{kind}; exec sleep 30\" & \
             until [ -e began.{kind} ]; do sleep 0.1; done; srun --overlap -n1 --container-join=0 {number} > joined; \
             scancel -s KILL $SLURM_JOB_ID.0; wait'; cmp own joined && echo same"
        ));
        assert!(joined.stdout.ends_with("same\n"), "{kind}: {}", joined.text());
    }
    let renamed =
        srun(&cluster, "--container-unshare=uts --container-remap-root", "sh -c 'hostname ship; hostname'");
    assert_out(&renamed, 0, "ship\n");
    assert_out(&cluster.run("srun hostname"), 0, "node1\n");
    for (value, message) in [
        ("net,user", "mizzen: --container-unshare: unknown namespace 'user'"),
        ("", "mizzen: --container-unshare: the list of namespaces is empty"),
        ("pid", "mizzen: --container-unshare: pid is not for the tasks of a step"),
    ] {
        assert_failed(&srun(&cluster, &format!("--container-unshare={value}"), "true"), 1, message);
    }
    let by_hand = cluster.run(
        "mizzen run --unshare ipc /shared/i.sqsh sh -c 'touch /dev/shm/mine; ls -A /dev/shm; grep -c \" /dev/mqueue .* mqueue \" /proc/self/mountinfo'; \
         ls -A /dev/shm | grep -c mine",
    );
    assert_out(&by_hand, 1, "mine\n1\n0\n");
}

/// "home (or /root when remapped)"; "uid_map `0 UID 1` or `UID UID 1`"; accounts can be added to in a writable container.
fn accounts_and_homes(release: Release) {
    let cluster = start(one_node(release, "pyxis-accounts"));
    cluster.run("echo mine > mark");
    let show = "sh -c 'echo $HOME; cat $HOME/mark; tr -s \" \" < /proc/self/uid_map'";
    assert_out(&srun(&cluster, "--container-remap-root", show), 0, "/root\nmine\n 0 2001 1\n");
    assert_out(&srun(&cluster, "", show), 0, "/home/alice\nmine\n 2001 2001 1\n");
    let without = srun(
        &cluster,
        "--container-remap-root --no-container-mount-home",
        "sh -c 'cd $HOME && pwd && ls -A'",
    );
    assert_out(&without, 0, "/root\n");
    let writable = "--container-remap-root --container-writable";
    let added = srun(&cluster, writable, "sh -c 'echo bob:x:7:7::/:/bin/sh >> /etc/passwd && id -u bob'");
    assert_out(&added, 0, "7\n");
    let replaced = srun(
        &cluster,
        "--container-writable",
        "sh -c 'cp /etc/passwd /etc/new && echo eve:x:7:7::/:/bin/sh >> /etc/new && mv /etc/new /etc/passwd && id -un && id -u eve'",
    );
    assert_out(&replaced, 0, "alice\n7\n");
    // As the package of the time zones does it, in an image that has a file there.
    let tree = ImageTree::busybox().unwrap();
    tree.file("etc/localtime", "of the image\n").unwrap();
    cluster.share("zone.sqsh", &tree.squashfs(&[]).unwrap()).unwrap();
    cluster.run_on("node1", User::Root, "rm -f /etc/localtime; echo of the node > /etc/localtime");
    let zone = "sh -c 'cat /etc/localtime; ln -s /usr/share/zoneinfo/UTC /etc/new && mv -f /etc/new /etc/localtime && readlink /etc/localtime'";
    let relinked = cluster.run(&format!("srun --container-image=/shared/zone.sqsh {writable} {zone}"));
    assert_out(&relinked, 0, "of the node\n/usr/share/zoneinfo/UTC\n");
    let refused = srun(&cluster, "", "sh -c 'echo >> /etc/passwd'");
    assert!(refused.code != 0 && refused.stderr.contains("Read-only file system"), "{}", refused.text());
}

/// "chown, setuid, mknod and the like appear to succeed" for root inside, and for nobody else.
fn root_inside_installs_packages(release: Release) {
    let cluster = start(one_node(release, "pyxis-packages"));
    cluster.share("debian.sqsh", &images::mpi().unwrap()).unwrap();
    share_repository(&cluster).unwrap();
    cluster
        .share(
            "install.sh",
            b"set -e; exec 2>&1; mkdir -p /var/lib/apt/lists/partial /var/cache/apt/archives/partial; rm -f /etc/apt/sources.list.d/*\n\
              echo 'deb [trusted=yes] file:/repository ./' > /etc/apt/sources.list\n\
              apt-get -q update; DEBIAN_FRONTEND=noninteractive apt-get -qy install crew\n\
              cat /usr/share/crew/log; getent passwd crew | cut -d: -f1; ls -A /usr/share/crew\n",
        )
        .unwrap();
    let installed = cluster.run(
        "srun --container-remap-root --container-writable --container-image=/shared/debian.sqsh \
         --container-mounts=/shared/repository:/repository:ro,/shared/install.sh:/install.sh sh /install.sh",
    );
    assert_eq!(installed.code, 0, "{}", installed.text());
    assert!(installed.stdout.ends_with("aye\ncrew\nlog\n"), "{}", installed.text());
    install_from_the_mirror(&cluster);
    // From a server, with another list of sources of the node's. What fetches would be the user _apt, and look whether it is; a setting that
    // mizzen adds has it stay root.
    let server = HttpServer::start(&cluster, 8000).unwrap();
    let sources = "deb [trusted=yes] http://ctl:8000/repository ./\n";
    cluster.write_everywhere("/etc/apt/sources.list", sources).unwrap();
    let update = "set -e; exec 2>&1; getent passwd _apt | cut -d: -f1; mkdir -p /var/cache/apt/archives; apt-get -q update; \
                  DEBIAN_FRONTEND=noninteractive apt-get -qy install crew; crew\n\
                  apt-get install -y file && file /bin/sh\n";
    cluster.share("update.sh", update.as_bytes()).unwrap();
    let fetched = cluster.run(
        "srun --container-remap-root --container-writable --container-image=/shared/debian.sqsh \
         --container-mounts=/etc/apt/sources.list:/etc/apt/sources.list:ro,tmpfs:/etc/apt/sources.list.d,/shared/update.sh:/update.sh \
         sh /update.sh",
    );
    assert_eq!(fetched.code, 0, "{}", fetched.text());
    let printed = &fetched.stdout;
    assert!(printed.starts_with("_apt\n") && printed.contains("\naye\n"), "{printed}");
    // "`srun --container-remap-root --container-writable … apt-get install -y file` works"
    assert!(printed.ends_with("\n/bin/sh: symbolic link to dash\n"), "{printed}");
    assert!(printed.contains("http://ctl:8000/repository ./ crew 1"), "{printed}");
    assert!(!printed.contains("W: ") && !printed.contains("E: "), "{printed}");
    assert!(server.was_asked_for("url:/repository/crew.deb"));
    // The calls are answered and not made; who asks who they are is told the truth.
    let show = "sh -c 'grep Seccomp: /proc/self/status; touch $HOME/f; chown 7:7 $HOME/f && stat -c %u $HOME/f; \
                mknod /dev/shm/c c 1 3 && ls /dev/shm/c; mknod /dev/shm/p p && stat -c %F /dev/shm/p'";
    let root = srun(&cluster, "--container-remap-root --container-unshare=ipc", show);
    assert_out(&root, 0, "Seccomp:\t2\n0\nfifo\n");
    assert!(root.stderr.contains("/dev/shm/c: No such file"), "{}", root.text());
    let user = srun(&cluster, "--container-unshare=ipc", show);
    assert_out(&user, 0, "Seccomp:\t0\nfifo\n");
    assert!(
        user.stderr.contains("chown: ") && user.stderr.contains("Operation not permitted"),
        "{}",
        user.text()
    );
}

/// "`srun --container-remap-root --container-writable … apt-get install -y file` works (from the machine's own package mirror through
/// the host's configuration, mounted)": the nodes were installed from that mirror, and have it in their list. Its release is that of
/// the image in ours.
fn install_from_the_mirror(cluster: &Cluster) {
    let _mirror = Mirror::start(cluster).unwrap();
    let sources = cluster.run("sed -E 's/[a-z]+ main$/bookworm main/' /etc/apt/sources.list").stdout;
    assert!(sources.ends_with(" bookworm main\n"), "{sources}");
    cluster.write_everywhere("/etc/apt/sources.list", &sources).unwrap();
    let script = "set -e; exec 2>&1; mkdir -p /var/lib/apt/lists/partial /var/cache/apt/archives/partial; apt-get -q update\n\
                  apt-get install -y file && file /bin/sh\n";
    cluster.share("mirror.sh", script.as_bytes()).unwrap();
    let installed = cluster.run(
        "srun --container-remap-root --container-writable --container-image=/shared/debian.sqsh \
         --container-mounts=/etc/apt/sources.list:/etc/apt/sources.list:ro,/shared/mirror.sh:/mirror.sh sh /mirror.sh",
    );
    assert_eq!(installed.code, 0, "{}", installed.text());
    assert!(installed.stdout.contains("\nSetting up file "), "{}", installed.text());
    assert!(installed.stdout.ends_with("\n/bin/sh: symbolic link to dash\n"), "{}", installed.text());
}

/// The same with dnf and rpm, whose packages name the owners, modes and capabilities of their files.
fn root_inside_installs_rpms(release: Release) {
    let cluster = start(one_node(release, "pyxis-rpms"));
    share_rpm_repository(&cluster).unwrap();
    let _server = HttpServer::start(&cluster, 8000).unwrap();
    cluster
        .share("crew.repo", b"[crew]\nname=crew\nbaseurl=http://ctl:8000/rpms\nenabled=1\ngpgcheck=0\n")
        .unwrap();
    let install = "dnf -y install crew >out 2>&1 || { cat out; exit 1; }; crew; getent passwd crew | cut -d: -f1; \
                   stat -c '%a %n' /usr/bin/crew-* /usr/share/crew; getcap /usr/bin/crew-ping; ls /usr/share/crew; \
                   grep -i -e warn -e error -e fail out; rpm -q crew; dnf -y remove crew >out 2>&1 || { cat out; exit 1; }; [ ! -e /usr/bin/crew ]";
    let installed = cluster.run(&format!(
        "srun --container-remap-root --container-writable --no-container-mount-home --container-image=/shared/dnf.sqsh \
         --container-mounts=/shared/crew.repo:/etc/yum.repos.d/crew.repo:ro --container-workdir=/root sh -c \"{install}\""
    ));
    let expected = "aye\ncrew\n755 /usr/bin/crew-ping\n2755 /usr/bin/crew-setgid\n4755 /usr/bin/crew-setuid\n2755 /usr/share/crew\n\
                    /usr/bin/crew-ping cap_net_raw=ep\nlog\ncrew-1-1.noarch\n";
    assert_out(&installed, 0, expected);
}

/// Whoever waits is told what for, and can end it.
#[test]
fn an_entrypoint_that_does_not_end_is_named_and_can_be_cancelled() {
    let cluster = start(one_node(Release::Slurm24_11, "pyxis-slow"));
    let tree = ImageTree::busybox().unwrap();
    tree.file(".mizzen/config.json", r#"{"config": {"Entrypoint": ["/slow.sh"]}}"#).unwrap();
    tree.program("slow.sh", "#!/bin/sh\nsleep 1000\nexec \"$@\"\n").unwrap();
    cluster.share("slow.sqsh", &tree.squashfs(&[]).unwrap()).unwrap();
    let empty = Emptiness::of(&cluster, &["node1"]);
    let told = cluster.run(
        "srun -n2 --container-entrypoint --container-image=/shared/slow.sqsh touch /shared/marker 2> told & \
         for i in $(seq 450); do grep -q 'has not ended' told && break; sleep 0.1; done; scancel -u alice; wait; cat told; rm told",
    );
    let note = "mizzen: note: node1: the image's entrypoint /slow.sh has not ended after 30 s; the tasks wait for it\n";
    assert_eq!(told.stdout.matches(note).count(), 1, "{}", told.text());
    empty.assert_again(&cluster, "cancelled in the entrypoint");
    assert_out(&cluster.run("ls /shared | grep -c marker"), 1, "0\n");
}

/// "where mizzen differs on purpose, docs say so, and `compatible = "pyxis"` switches over"; so "PATH if it begins with
/// `.` or `/`; else `docker://` is put in front unless it has `docker://` or `dockerd://`".
#[test]
fn a_site_can_have_its_defaults() {
    for release in TWO_RELEASES {
        let toml = "compatible = \"pyxis\"\nimport = \"never\"\n".to_owned();
        let spec = Spec { mizzen_toml: Some(toml), ..one_node(release, "pyxis-compatible") };
        let cluster = start(spec);
        let show = "sh -c 'pwd; ls -A $HOME | wc -l'";
        let run = |options: &str| cluster.run(&format!("touch ~/mark; cd /shared; srun {options} {show}"));
        let plain = run("--container-image=./i.sqsh");
        assert_out(&plain, 0, "/opt\n0\n");
        assert_eq!(plain.stderr, "");
        assert_out(
            &run("--container-image=./i.sqsh --container-mount-home --container-workdir=/etc"),
            0,
            "/etc\n1\n",
        );
        let here = cluster.run("cd /shared; srun --container-image=./i.sqsh ls -d /shared");
        assert!(here.code == 1 && here.stderr.contains("No such file or directory"), "{}", here.text());
        let name = cluster.run("cd /shared; srun --container-image=i.sqsh true");
        assert_failed(
            &name,
            1,
            "--container-image: docker://docker.io/library/i.sqsh:latest: images in registries are not imported",
        );
        // "DST = SRC": below the container's root.
        for (mount, option) in [("./i.sqsh", ""), ("i.sqsh", "PYXIS_CONTAINER_MOUNTS=./i.sqsh")] {
            let given = if option.is_empty() { format!("--container-mounts={mount}") } else { String::new() };
            let mounted = cluster
                .run(&format!("cd /shared; {option} srun --container-image=./i.sqsh {given} ls /i.sqsh"));
            assert_out(&mounted, 0, "/i.sqsh\n");
        }
        let root = cluster.run("srun --container-image=/shared/i.sqsh --container-mounts=./ true");
        assert_failed(&root, 1, "mizzen: mounts: a destination is the root itself");
        // By hand it is as everywhere.
        assert_out(&cluster.run("cd /shared; mizzen run i.sqsh pwd"), 0, "/shared\n");
    }
}
