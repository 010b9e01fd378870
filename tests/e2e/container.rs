//! `mizzen run` in real namespaces, as an unprivileged user.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test fails by panicking

use std::time::Duration;

use mizzen_tests::images::{ImageTree, pack, sif};
use mizzen_tests::{Cluster, Output, Release, Spec, User};

/// One machine with an unprivileged user and a mizzen; Slurm on it does not matter here.
fn machine(name: &str) -> Cluster {
    Cluster::start(Spec { nodes: 1, ..Cluster::spec(name) }).unwrap()
}

fn with_busybox(name: &str) -> Cluster {
    let cluster = machine(name);
    cluster.share("bb.sqsh", &ImageTree::busybox().unwrap().squashfs(&["-comp", "gzip"]).unwrap()).unwrap();
    cluster
}

#[track_caller]
fn assert_out(output: &Output, code: i32, stdout: &str) {
    assert_eq!((output.code, output.stdout.as_str()), (code, stdout), "{}", output.text());
}

#[track_caller]
fn assert_failed(output: &Output, code: i32, message: &str) {
    assert_eq!(output.code, code, "{}", output.text());
    assert_eq!(output.stderr.matches(message).count(), 1, "expected: {message}\n{}", output.text());
}

#[test]
fn every_kind_of_image_runs() {
    let cluster = machine("kinds");
    let tree = ImageTree::busybox().unwrap();
    for compressor in ["gzip", "lzma", "xz", "lzo", "lz4", "zstd"] {
        let image =
            cluster.share(&format!("{compressor}.sqsh"), &tree.squashfs(&["-comp", compressor]).unwrap());
        let run = cluster.run(&format!("mizzen run {} cat /etc/os-release", image.unwrap()));
        assert_out(&run, 0, "PRETTY_NAME=\"Busybox for tests\"\n");
    }
    let squashfs = tree.squashfs(&["-comp", "zstd"]).unwrap();
    cluster.share("image.sif", &sif(&squashfs)).unwrap();
    assert_out(&cluster.run("mizzen run /shared/image.sif whoami"), 0, "alice\n");
    cluster
        .run("mizzen run /shared/gzip.sqsh tar -C / -cf - bin etc > bb.tar; mkdir bb; tar -C bb -xf bb.tar");
    assert_out(
        &cluster.run("mizzen run bb sh -c 'whoami; touch /x || echo read-only'"),
        0,
        "alice\nread-only\n",
    );
    assert!(cluster.run("ls bb").stdout == "bin\netc\n", "a directory image stays as it is");
}

#[test]
fn a_whole_debian_runs() {
    let cluster = machine("debian");
    let root = Release::Slurm24_11.rootfs().unwrap();
    let options = [
        "-comp",
        "zstd",
        "-Xcompression-level",
        "1",
        "-e",
        "var/cache",
        "usr/share",
        "usr/lib/x86_64-linux-gnu/slurm-wlm",
    ];
    cluster.share("debian.sqsh", &pack(&root, &options).unwrap()).unwrap();
    let run = cluster.run("mizzen run /shared/debian.sqsh bash -c '. /etc/os-release; echo $VERSION_CODENAME; perl -e \"print 6*7\"; id -un'");
    assert_out(&run, 0, "trixie\n42alice\n");
    let inspected = cluster.run("mizzen inspect --json /shared/debian.sqsh").stdout;
    let inspected: serde_json::Value = serde_json::from_str(&inspected).unwrap();
    assert_eq!(inspected["format"], "squashfs");
    assert_eq!(inspected["architecture"], "x86_64");
    assert!(inspected["system"].as_str().unwrap().contains("trixie"), "{inspected}");
    let sha = cluster.run("sha256sum < /shared/debian.sqsh").stdout;
    assert_eq!(inspected["digest"], format!("sha256:{}", sha.split(' ').next().unwrap()));
}

#[test]
fn an_image_needs_nothing_but_a_program() {
    let cluster = machine("bare");
    let tree = ImageTree::empty().unwrap();
    std::fs::copy("/bin/busybox", tree.path("echo")).unwrap();
    cluster.share("bare.sqsh", &tree.squashfs(&[]).unwrap()).unwrap();
    // No shell, no /proc, /dev, /tmp, /etc, /home.
    assert_out(&cluster.run("mizzen run /shared/bare.sqsh /echo hello"), 0, "hello\n");
    assert_failed(
        &cluster.run("mizzen run /shared/bare.sqsh"),
        127,
        "mizzen: /bin/sh: no such program in the container",
    );
}

#[test]
fn exit_codes_and_signals_are_the_programs() {
    let cluster = with_busybox("codes");
    let run = |command: &str| cluster.run(&format!("mizzen run /shared/bb.sqsh {command}"));
    assert_out(&run("sh -c 'exit 42'"), 42, "");
    assert_eq!(run("sh -c 'kill -TERM $$'").code, 143);
    assert_eq!(run("sh -c 'kill -KILL $$'").code, 137);
    assert_failed(
        &run("nosuch"),
        127,
        "mizzen: nosuch: no such program in the container\nmizzen: hint: PATH is /usr/local/sbin:",
    );
    assert_failed(&run("/no/such"), 127, "mizzen: /no/such: no such program in the container");
    assert_failed(&run("/etc/passwd"), 126, "mizzen: /etc/passwd: Permission denied");
    assert_failed(&run("/etc"), 126, "mizzen: /etc: is a directory");
    cluster.run("printf '#!/no/interpreter -x\\n' > script; printf 'echo no first line\\n' > plain; chmod +x script plain");
    assert_failed(
        &run("./script"),
        127,
        "mizzen: ./script: its interpreter /no/interpreter is not in the container",
    );
    assert_failed(
        &run("./plain"),
        126,
        "mizzen: ./plain: not a program for this machine, and no script with a #! line",
    );
    assert_failed(&run("/usr/bin/id"), 127, "no such program");
    cluster.run("cp /usr/bin/id here");
    assert_failed(&run("./here"), 127, "mizzen: ./here: its dynamic linker is not in the container");
    assert_out(&cluster.run("echo from stdin | mizzen run /shared/bb.sqsh cat"), 0, "from stdin\n");
    assert_eq!(cluster.run("mizzen run").code, 125, "a wrong call must not look like a program's exit code");
    assert_failed(&run("--mout /x true"), 125, "mizzen: --mout: not an option of mizzen, and no program");
    assert_failed(&run("'echo hi'"), 127, "hint: all of it is taken as the program's name");
    cluster.run("printf '#!/bin/sh\\r\\n' > dos; chmod +x dos");
    assert_failed(&run("./dos"), 127, "its interpreter /bin/sh\\r is not in the container");
    // Signals have their usual effect: a pipe that nobody reads ends its writer without a word.
    let signals = "grep -E '^Sig(Ign|Blk)' /proc/self/status";
    assert_out(&run(signals), 0, &cluster.run(signals).stdout);
    let pipe = run("sh -c 'yes | head -n 1'");
    assert_eq!((pipe.stdout.as_str(), pipe.stderr.as_str()), ("y\n", ""));
    assert_out(&cluster.run("trap '' CHLD; mizzen run --unshare pid /shared/bb.sqsh sh -c 'exit 4'"), 4, "");
}

#[test]
fn the_program_sees_what_it_expects() {
    let cluster = with_busybox("inside");
    let run = |command: &str| cluster.run(&format!("mizzen run /shared/bb.sqsh {command}"));
    assert_out(&run("sh -c 'id -un; id -gn; id -G | wc -w; pwd'"), 0, "alice\nalice\n3\n/home/alice\n");
    assert_out(
        &run("sh -c 'echo $HOME $USER $PATH'"),
        0,
        "/home/alice alice /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n",
    );
    let status = run("grep -E '^(NoNewPrivs|CapEff|CapPrm|CapInh|CapAmb)' /proc/self/status");
    let zero = "0000000000000000";
    assert_out(
        &status,
        0,
        &format!("CapInh:\t{zero}\nCapPrm:\t{zero}\nCapEff:\t{zero}\nCapAmb:\t{zero}\nNoNewPrivs:\t1\n"),
    );
    // Nothing is inherited but the standard streams; the fourth is ls's own.
    assert_out(
        &cluster.run("exec 7</etc/passwd; mizzen run /shared/bb.sqsh ls /proc/self/fd"),
        0,
        "0\n1\n2\n3\n",
    );
    let dev = run("ls /dev").stdout;
    for device in [
        "fd", "full", "fuse", "mqueue", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout",
        "tty", "urandom", "zero",
    ] {
        assert!(dev.lines().any(|line| line == device), "{device} is missing: {dev}");
    }
    assert_out(
        &run("sh -c 'echo x > /dev/null && echo y > /dev/shm/y && cat /dev/shm/y && rm /dev/shm/y'"),
        0,
        "y\n",
    );
    // Every mount of the image is nosuid and nodev; the root is read-only.
    let mounts = run("cat /proc/self/mountinfo").stdout;
    for line in mounts.lines().filter(|line| !line.split(' ').nth(4).unwrap().starts_with("/dev")) {
        let options = line.split(' ').nth(5).unwrap();
        assert!(options.contains("nosuid") && options.contains("nodev"), "{line}");
    }
    assert_failed(&run("touch /x"), 1, "Read-only file system");
    assert_out(
        &cluster.run("cd /tmp; echo t > t; mizzen run /shared/bb.sqsh sh -c 'pwd; cat t'"),
        0,
        "/tmp\nt\n",
    );
    assert_out(
        &cluster.run("mkdir -p /shared/work/a; cd /shared/work/a; mizzen run ../../bb.sqsh pwd"),
        0,
        "/shared/work/a\n",
    );
    assert_out(&cluster.run("cd /usr; mizzen run /shared/bb.sqsh pwd"), 0, "/usr\n");
    let nowhere = cluster.run("cd /usr/share; mizzen run /shared/bb.sqsh pwd");
    assert_out(&nowhere, 0, "/\n");
    assert!(
        nowhere.stderr.contains("note: /usr/share is not in the container; the program starts in /"),
        "{}",
        nowhere.text()
    );
    assert_out(&cluster.run("cd /dev/shm; mizzen run /shared/bb.sqsh pwd"), 0, "/dev/shm\n");
    assert_out(&cluster.run("mkdir sub; mizzen run -w sub /shared/bb.sqsh pwd"), 0, "/home/alice/sub\n");
    // A home that is one of the image's directories stays the image's.
    assert_out(&cluster.run("HOME=/usr mizzen run /shared/bb.sqsh sh -c 'ls /usr | wc -l'"), 0, "0\n");
    assert_out(&run("cat /etc/hosts"), 0, &cluster.run("cat /etc/hosts").stdout);
    // A user whom no file knows: the environment tells the name.
    let unknown = cluster.run_as_root("cd /tmp; HOME=/tmp USER=ldap setpriv --reuid 5555 --regid 5555 --clear-groups mizzen run /shared/bb.sqsh sh -c 'whoami; id'");
    assert_out(&unknown, 0, "ldap\nuid=5555(ldap) gid=5555(ldap)\n");
    // Nothing of the container can be seen from outside.
    let outside = cluster.run("findmnt > before; mizzen run /shared/bb.sqsh sleep 2 & sleep 0.5; pgrep -x sleep >/dev/null || echo did not run; findmnt | diff before -; wait");
    assert_out(&outside, 0, "");
}

#[test]
fn mounts_are_made_as_asked() {
    let cluster = with_busybox("mounts");
    let run = |options: &str, command: &str| {
        cluster.run(&format!("mizzen run {options} /shared/bb.sqsh {command}"))
    };
    cluster.run("mkdir -p /tmp/data/sub; echo a > /tmp/data/a; echo b > /tmp/data/sub/b; echo f > /tmp/file");
    assert_out(&run("-m /tmp/data:/mnt/deep/data", "cat /mnt/deep/data/a /mnt/deep/data/sub/b"), 0, "a\nb\n");
    assert_out(&run("-m /tmp/data:/data:ro", "sh -c 'touch /data/x || cat /data/a'"), 0, "a\n");
    assert_out(&run("-m /tmp/data:/data", "sh -c 'echo w > /data/w; cat /data/w'"), 0, "w\n");
    assert_out(&cluster.run("cat /tmp/data/w"), 0, "w\n");
    assert_out(
        &run(
            "-m /tmp/file:/etc/os-release:ro,tmpfs:/scratch:size=64k",
            "sh -c 'cat /etc/os-release; df -k /scratch | tail -n 1 | tr -s \" \" | cut -d\" \" -f2'",
        ),
        0,
        "f\n64\n",
    );
    assert_out(&run("-m /tmp/data:/opt/a,/tmp/data/sub:/opt/a/sub", "cat /opt/a/sub/b"), 0, "b\n");
    // In the other order on the command line, and in a tmpfs.
    assert_out(&run("-m /tmp/data/sub:/opt/a/b -m tmpfs:/opt/a", "cat /opt/a/b/b"), 0, "b\n");
    assert_out(
        &run("-m /shared/bb.sqsh:/other:squashfs", "cat /other/etc/os-release"),
        0,
        "PRETTY_NAME=\"Busybox for tests\"\n",
    );
    assert_out(
        &run("-m /tmp/data:/data:noexec", "sh -c 'cp /bin/busybox /data/bb; /data/bb true || echo refused'"),
        0,
        "refused\n",
    );
    assert_out(
        &run("--no-home", "sh -c 'ls /home/alice 2>/dev/null || echo no home; pwd'"),
        0,
        "no home\n/\n",
    );
    let twice = run("-m /tmp/data:/data -m /tmp/data/sub:/data", "ls /data");
    assert_out(&twice, 0, "b\n");
    assert!(
        twice.stderr.contains("mizzen: note: --mount: /data is mounted twice; the last one holds"),
        "{}",
        twice.text()
    );
    // Five hundred, and in the wrong order.
    let many: Vec<String> = (0..500).rev().map(|i| format!("/tmp/data:/many/{i}")).collect();
    assert_out(
        &run(&format!("-m {}", many.join(",")), "sh -c 'ls /many | wc -l; cat /many/499/a'"),
        0,
        "500\na\n",
    );
    for (options, message) in [
        ("-m /no/such:/x", "--mount: /no/such: No such file or directory"),
        ("-m /tmp/data:/", "the destination is the root itself"),
        ("-m /tmp/data:x", "the destination is not absolute"),
        ("-m /tmp/data:/proc/self", "--mount: /proc/self: /proc, /sys and /dev are mizzen's own"),
        ("-m /tmp/data:/dev", "--mount: /dev: /proc, /sys and /dev are mizzen's own"),
        (
            "-m /tmp/data:/etc/passwd",
            "cannot mount a directory on /etc/passwd, which is not a directory in the image",
        ),
        ("-m /tmp/file:/etc", "cannot mount a file on /etc, which is a directory in the image"),
        ("-m /tmp/data:/tmp/new", "--mount: /tmp/new does not exist in the mount of /tmp"),
        (
            "-m /tmp/file:/x:squashfs",
            "/tmp/file: not an image (2 bytes, too short; starts with 66 0a, looks like text)",
        ),
        ("-m /tmp/data:/x:squashfs", "--mount: /tmp/data: not a file"),
        ("-m a:b:c:d", "more than three parts"),
        ("--unshare moon", "--unshare: no namespace \"moon\""),
        ("-e =x", "--env: \"=x\": the name is empty"),
        ("--env-file /no/such", "--env-file: /no/such: No such file or directory"),
        ("-w /no/such", "cannot start in /no/such (--workdir): No such file or directory"),
        ("--writable=lots", "--writable: \"lots\" is not a size"),
        ("--writable=1m,size=9g", "--writable: \"1m,size=9g\" is not a size"),
        ("-m tmpfs:/x:size=10Q", "\"10Q\" is not a size"),
        ("-e 'export A=1'", "--env: \"export A\": not a variable's name"),
    ] {
        let failed = run(options, "touch /tmp/ran");
        assert_failed(&failed, 125, message);
        assert_eq!(
            failed.stderr.lines().filter(|line| !line.starts_with("mizzen: ")).count(),
            0,
            "{}",
            failed.text()
        );
    }
    assert_eq!(cluster.run("ls /tmp/ran").stdout, "");
    // A default gives way to the user's mount, and a device below /dev works.
    let over = run("-m /tmp/data:/etc", "ls /etc");
    assert!(over.code == 0 && over.stdout.contains("a\n"), "{}", over.text());
    assert!(
        over.stderr.contains("mizzen: note: /etc/hosts is left out: the mount of /etc has no such place"),
        "{}",
        over.text()
    );
    assert_out(&run("-m /dev/null:/dev/mine", "sh -c 'echo x > /dev/mine && echo written'"), 0, "written\n");
    // Mounted, but no more readable than on the host.
    assert_failed(&run("-m /etc/shadow:/etc/shadow", "cat /etc/shadow"), 1, "Permission denied");
}

#[test]
fn a_root_can_be_written_for_a_while() {
    let cluster = with_busybox("writable");
    let run = |options: &str, command: &str| {
        cluster.run(&format!("mizzen run {options} /shared/bb.sqsh {command}"))
    };
    let script = "sh -c 'echo new > /etc/new; rm -r /var; mkdir /var; touch /var/x; mv /usr /usr2; rm /etc/os-release; cat /etc/new; ls /var; ls -d /usr2'";
    assert_out(&run("--writable", script), 0, "new\nx\n/usr2\n");
    assert_out(
        &run("", "sh -c 'cat /etc/os-release; ls -d /usr'"),
        0,
        "PRETTY_NAME=\"Busybox for tests\"\n/usr\n",
    );
    let full = run("--writable=1m", "dd if=/dev/zero of=/big bs=1k count=2000");
    assert_failed(&full, 1, "No space left on device");
    cluster.run("mkdir -p dir/bin; mizzen run /shared/bb.sqsh cp /bin/busybox dir/bin/sh");
    assert_out(
        &cluster.run("mizzen run --writable dir /bin/sh -c 'echo x > /x; cd /; echo *'; ls dir"),
        0,
        "bin dev etc home proc sys tmp x\nbin\n",
    );
    // Before Linux 6.6 a tmpfs cannot hold the changes: they go to disk, and nothing stays there.
    let old = "TMPDIR=/var/tmp/alice strace -o /dev/null -e inject=fsetxattr:error=EOPNOTSUPP";
    cluster.run_as_root(
        "mkdir -m 1777 /var/tmp/alice; mount -t tmpfs disk /var/tmp/alice; chmod 1777 /var/tmp/alice",
    );
    let on_disk = cluster
        .run(&format!("{old} mizzen run --writable /shared/bb.sqsh {script}; sleep 0.5; ls /var/tmp/alice"));
    assert_out(&on_disk, 0, "new\nx\n/usr2\n");
    let killed = cluster.run(&format!("{old} mizzen run --writable /shared/bb.sqsh sh -c 'touch /x; sleep 50' & sleep 0.7; ls /var/tmp/alice | wc -l; pkill -KILL -x sleep; pkill -KILL -x sh; sleep 0.5; ls /var/tmp/alice"));
    assert_out(&killed, 0, "1\n");
    let nowhere = cluster.run("TMPDIR=/proc strace -o /dev/null -e inject=fsetxattr:error=EOPNOTSUPP mizzen run --writable /shared/bb.sqsh true");
    assert_failed(&nowhere, 125, "mizzen: --writable: /proc: cannot make a directory: ");
    // An image of another owner, whose directories cannot be copied.
    cluster.run_as_root("mkdir /shared/foreign; cp -a /home/alice/dir/. /shared/foreign; mkdir /shared/foreign/etc; chown -R 1234:1234 /shared/foreign");
    assert_out(
        &cluster.run("mizzen run --writable /shared/foreign /bin/sh -c 'echo x > /x; echo ok'"),
        0,
        "ok\n",
    );
    assert_out(&run("--remap-root", "id -u"), 0, "0\n");
    assert_out(&run("--remap-root --writable", "sh -c 'touch /root/x; stat -c %u /root/x'"), 0, "0\n");
}

#[test]
fn the_environment_follows_the_policy() {
    let cluster = machine("environment");
    let tree = ImageTree::busybox().unwrap();
    tree.file(".mizzen/config.json", r#"{"config": {"Env": ["PATH=/opt/bin:/bin", "FROM_IMAGE=yes", "HOME=/root"],
        "Entrypoint": ["/bin/echo", "entry"], "Cmd": ["point"], "WorkingDir": "/var", "Labels": {"a": "b"}}}"#).unwrap();
    cluster.share("oci.sqsh", &tree.squashfs(&[]).unwrap()).unwrap();
    let run = |options: &str, command: &str| {
        cluster.run(&format!("export LD_PRELOAD= FROM_HOST=1 FROM_IMAGE=host BASH_ENV=/x; mizzen run {options} /shared/oci.sqsh {command}"))
    };
    assert_out(
        &run("", "sh -c 'echo $PATH $FROM_IMAGE $FROM_HOST $HOME $BASH_ENV'"),
        0,
        "/opt/bin:/bin yes 1 /home/alice\n",
    );
    assert_out(&run("--clean-env", "sh -c 'echo $FROM_IMAGE $FROM_HOST $HOME'"), 0, "yes /home/alice\n");
    assert_out(&run("-e FROM_IMAGE -e A=b=c", "sh -c 'echo $FROM_IMAGE $A'"), 0, "host b=c\n");
    cluster.run("printf '# comment\\nA=1\\n\\nB=two words\\r\\nFROM_IMAGE\\n' > env");
    assert_out(&run("--env-file env", "sh -c 'echo $A $B $FROM_IMAGE'"), 0, "1 two words host\n");
    assert_out(&run("", ""), 0, "entry point\n");
    assert_out(&cluster.run("cd /usr/share; mizzen run /shared/oci.sqsh pwd"), 0, "/var\n");
    let inspected = cluster.run("mizzen inspect /shared/oci.sqsh").stdout;
    for line in [
        "made by       oci",
        "entrypoint    /bin/echo entry",
        "command       point",
        "workdir       /var",
        "env           FROM_IMAGE=yes",
        "label         a=b",
        "system        Busybox for tests",
    ] {
        assert!(inspected.contains(line), "{line}: {inspected}");
    }
    // The other makers.
    let enroot = ImageTree::busybox().unwrap();
    enroot.file("etc/environment", "FROM_ENROOT=1\n").unwrap();
    enroot.program("etc/rc", "echo \"rc $FROM_ENROOT\"\nif [ $# -gt 0 ]; then exec \"$@\"; fi\n").unwrap();
    cluster.share("enroot.sqsh", &enroot.squashfs(&[]).unwrap()).unwrap();
    assert_out(&cluster.run("mizzen run /shared/enroot.sqsh"), 0, "rc 1\n");
    let singularity = ImageTree::busybox().unwrap();
    singularity
        .file(
            ".singularity.d/env/90-environment.sh",
            "export A='one two'\nexport B=\"$A three\"\nexport C=$(date)\n",
        )
        .unwrap();
    singularity.program(".singularity.d/runscript", "#!/bin/sh\necho run $B\n").unwrap();
    cluster.share("singularity.sqsh", &singularity.squashfs(&[]).unwrap()).unwrap();
    let run = cluster.run("mizzen run /shared/singularity.sqsh");
    assert_out(&run, 0, "run one two three\n");
    assert!(run.stderr.contains("90-environment.sh:3: not understood"), "{}", run.text());
    let charliecloud = ImageTree::busybox().unwrap();
    charliecloud.file("ch/environment", "FROM_CH=1\n").unwrap();
    cluster.share("ch.sqsh", &charliecloud.squashfs(&[]).unwrap()).unwrap();
    assert_out(&cluster.run("mizzen run /shared/ch.sqsh sh -c 'echo $FROM_CH'"), 0, "1\n");
}

#[test]
fn namespaces_can_be_added() {
    let cluster = with_busybox("unshare");
    let run = |options: &str, command: &str| {
        cluster.run(&format!("mizzen run {options} /shared/bb.sqsh {command}"))
    };
    let processes = run("--unshare pid", "ps");
    assert_eq!(processes.stdout.lines().count(), 3, "a heading, process 1 and ps: {}", processes.text());
    assert_out(&run("--unshare pid", "sh -c 'exit 9'"), 9, "");
    assert_eq!(run("--unshare pid", "sh -c 'kill -TERM $$'").code, 143);
    // Process 1 holds nothing that the program does not have.
    let first = cluster.run("exec 7</etc/passwd; mizzen run --unshare pid --remap-root /shared/bb.sqsh sh -c 'ls /proc/1/fd; grep CapEff /proc/1/status'");
    assert_out(&first, 0, "0\n1\n2\nCapEff:\t0000000000000000\n");
    assert_failed(&run("--unshare pid", "nosuch"), 127, "mizzen: nosuch: no such program");
    assert_out(&cluster.run("timeout -s TERM 1 mizzen run --unshare pid /shared/bb.sqsh sh -c 'trap \"echo caught; exit 3\" TERM; while :; do sleep 0.1; done'"), 124, "caught\n");
    assert_out(
        &run(
            "--unshare net",
            "sh -c 'ls /sys/class/net /proc/self/net/dev >/dev/null; ip -o link | wc -l; ping -c 1 127.0.0.1 >/dev/null 2>&1; ip -o addr show lo | grep -c 127.0.0.1'",
        ),
        0,
        "1\n1\n",
    );
    assert_out(&run("--unshare uts --remap-root", "sh -c 'hostname inside; hostname'"), 0, "inside\n");
    assert_out(&cluster.run("hostname"), 0, "ctl\n");
    let ipc = run("--unshare ipc", "readlink /proc/self/ns/ipc").stdout;
    assert_ne!(ipc, cluster.run("readlink /proc/self/ns/ipc").stdout);
}

#[test]
fn kernels_without_the_newer_calls_work_too() {
    let cluster = with_busybox("old-kernels");
    let script = "sh -c 'id -un; pwd; touch /x || cat /mnt/data/a; touch /mnt/data/y || echo read-only'";
    let command = format!("mizzen run -m /tmp/data:/mnt/data:ro /shared/bb.sqsh {script}");
    cluster.run("mkdir /tmp/data; echo a > /tmp/data/a");
    let expected = "alice\n/home/alice\na\nread-only\n";
    assert_out(&cluster.run(&command), 0, expected);
    // Before Linux 5.6, 5.11 and 5.12: these calls do not exist.
    // (Without -f: strace would wait for a file that the file server, stopped by strace, has to serve.)
    let without = "-e inject=openat2,close_range,mount_setattr:error=ENOSYS";
    assert_out(&cluster.run(&format!("strace -o /dev/null {without} {command}")), 0, expected);
    // No overlay in user namespaces: the mount fails, and only that one.
    let calls =
        cluster.run(&format!("strace -e trace=mount -o calls {command} >/dev/null; cat calls")).stdout;
    let nth = 1 + calls
        .lines()
        .filter(|line| line.starts_with("mount("))
        .position(|line| line.contains("\"overlay\""))
        .expect("an overlay is tried");
    let without = format!("-e inject=mount:error=ENODEV:when={nth}");
    let rebuilt = cluster.run(&format!("strace -e trace=mount -o calls {without} {command}"));
    assert_out(&rebuilt, 0, expected);
    assert!(cluster.run("cat calls").stdout.contains("ENODEV (No such device) (INJECTED)"));
    // Both at once.
    let both = cluster.run(&format!("strace -e trace=mount,openat2,mount_setattr -o calls -e inject=openat2,mount_setattr:error=ENOSYS {without} {command}"));
    assert_out(&both, 0, expected);
}

#[test]
fn the_file_server_belongs_to_the_container() {
    let cluster = with_busybox("server");
    let start = "mizzen run /shared/bb.sqsh sleep 100 & sleep 0.5; server=$(pgrep mizzen-fuse);";
    // Not pinned with the program, no standard streams, no capabilities, its own session; ends with the container.
    let facts = cluster.run(&format!(
        "taskset -c 0 bash -c '{start} grep Cpus_allowed_list /proc/$server/status; readlink /proc/$server/fd/0 /proc/$server/fd/1; grep -E \"CapEff|SigBlk\" /proc/$server/status; kill %1; sleep 0.5; pgrep mizzen-fuse || echo gone'"
    ));
    let all_cpus = cluster.run("grep Cpus_allowed_list /proc/self/status").stdout;
    assert!(facts.stdout.starts_with(&all_cpus), "{}", facts.text());
    for fact in ["/dev/null\n/dev/null\n", "CapEff:\t0000000000000000", "SigBlk:\tffff", "gone\n"] {
        assert!(facts.stdout.replace("fffffff", "ffff").contains(fact), "{fact}: {}", facts.text());
    }
    // What ends a job's processes early does not end the server before them.
    let term = cluster.run(
        "mizzen run /shared/bb.sqsh sh -c 'trap : TERM INT; sleep 1; sleep 1; cat /etc/os-release' & sleep 0.5; \
         pkill -TERM -u alice mizzen-fuse; pkill -INT -u alice mizzen-fuse; kill -TERM $!; wait $!; wait $!",
    );
    assert!(term.stdout.contains("Busybox for tests"), "{}", term.text());
    // Killed: an error, not a hang; also when there is another server, and under an overlay.
    for options in ["", "-m /shared/bb.sqsh:/mnt:squashfs", "--writable -m /shared/bb.sqsh:/mnt:squashfs"] {
        let killed = cluster.run(&format!(
            "mizzen run {options} /shared/bb.sqsh sh -c 'sleep 1; exec cat /etc/os-release' & sleep 0.5; \
             pgrep mizzen-fuse | head -n 1 | xargs kill -KILL; wait $!"
        ));
        assert!(killed.code != 0 && !killed.stdout.contains("Busybox"), "{options}: {}", killed.text());
        // The program's own pages come from the server too: without them it gets SIGBUS.
        let told = killed.text().contains("not connected") || killed.code == 128 + 7;
        assert!(told, "{options}: {}", killed.text());
    }
    // Nothing of the caller's is kept open: not its files, not the other server's connection.
    let kept = cluster.run(
        "exec 7</etc/passwd; mizzen run -m /shared/bb.sqsh:/mnt:squashfs /shared/bb.sqsh sleep 2 & sleep 0.5; \
         for s in $(pgrep mizzen-fuse); do readlink /proc/$s/fd/* | grep -cE 'passwd|pipe' ; done; wait",
    );
    assert_eq!(kept.stdout, "1\n1\n", "its own end of a pipe each: {}", kept.text());
}

#[test]
fn random_kills_leave_nothing() {
    let cluster = with_busybox("kills");
    let runs = if std::env::var_os("MIZZEN_TEST_LONG").is_some() { 200 } else { 30 };
    let before = cluster.run("ls -a /tmp /dev/shm /run ~; cat /proc/self/mountinfo").stdout;
    for run in 0..runs {
        let delay = Duration::from_micros(run * 37_000 / runs).as_secs_f32();
        let script = format!(
            "mizzen run --writable -m /shared/bb.sqsh:/d:squashfs /shared/bb.sqsh sh -c 'cat /bin/busybox >/dev/null; sleep 60' & sleep {delay:.4}; kill -KILL $!; wait"
        );
        cluster.run(&script);
    }
    let left = cluster.run("for i in $(seq 50); do pgrep -l -u alice mizzen || pgrep -l -u alice -x sleep || exit 0; sleep 0.1; done; exit 1");
    assert_eq!(left.code, 0, "{}", left.text());
    assert_eq!(cluster.run("ls -a /tmp /dev/shm /run ~; cat /proc/self/mountinfo").stdout, before);
}

#[test]
fn the_plan_tells_what_a_run_does_and_why() {
    let cluster = with_busybox("plan");
    cluster.run("mkdir /tmp/data");
    let plan = cluster.run("mizzen plan -m /tmp/data:/data:ro -e A=b /shared/bb.sqsh true");
    assert_eq!(plan.code, 0, "{}", plan.text());
    for line in [
        "command   true",
        "workdir   /home/alice",
        "user      2001 is 2001 inside",
        "places    /home                                                      the image lacks /home/alice",
        "mount     /data from /tmp/data read-only                             --mount",
        "mount     /home/alice from the host                                  default: the home directory",
        "env       A=b                                                        --env",
        "env       HOME=/home/alice                                           host",
    ] {
        assert!(plan.stdout.contains(line), "{line}\n{}", plan.stdout);
    }
    let json: serde_json::Value =
        serde_json::from_str(&cluster.run("mizzen plan --json --writable=1g /shared/bb.sqsh").stdout)
            .unwrap();
    assert_eq!(json["root"], "writable in memory, up to 1g");
    assert_eq!(json["command"]["value"][0], "/bin/sh");
    assert_eq!(cluster.run("pgrep mizzen").stdout, "", "a plan does nothing");
}

#[test]
fn the_doctor_finds_what_is_missing() {
    let cluster = with_busybox("doctor");
    let healthy = cluster.run("mizzen doctor");
    assert_eq!(healthy.code, 0, "{}", healthy.text());
    assert!(
        healthy.stdout.ends_with("containers can run here\n") && !healthy.stdout.contains("FAILED"),
        "{}",
        healthy.text()
    );
    cluster.run_as_root("chmod 600 /dev/fuse");
    let fuse = cluster.run("mizzen doctor");
    cluster.run_as_root("chmod 666 /dev/fuse");
    assert_eq!(fuse.code, 1, "{}", fuse.text());
    assert!(
        fuse.stdout.contains("FAILED   FUSE            cannot open /dev/fuse: Permission denied"),
        "{}",
        fuse.text()
    );
    assert!(fuse.stdout.contains("hint: load the kernel module fuse"), "{}", fuse.text());
    let denied = "strace -f -o /dev/null -e inject=unshare:error=EPERM";
    let namespaces = cluster.run(&format!("{denied} mizzen doctor --json"));
    let json: serde_json::Value = serde_json::from_str(&namespaces.stdout).unwrap();
    assert_eq!((namespaces.code, &json["healthy"]), (1, &serde_json::Value::Bool(false)));
    let run = cluster.run(&format!("{denied} mizzen run /shared/bb.sqsh true"));
    assert_failed(&run, 125, "mizzen: cannot make a user namespace: Operation not permitted\nmizzen: hint: ");
    let full =
        cluster.run("strace -f -o /dev/null -e inject=unshare:error=ENOSPC mizzen run /shared/bb.sqsh true");
    assert_failed(&full, 125, "mizzen: hint: the limit is reached (sysctl user.max_user_namespaces)");
}

#[test]
fn help_completions_and_man_pages_come_from_one_place() {
    let cluster = machine("help");
    let help = cluster.run("mizzen run --help").stdout;
    let man = cluster
        .run_on("ctl", User::Alice, "mkdir man; mizzen man man && ls man && cat man/mizzen-run.1")
        .stdout;
    let completions = cluster.run("mizzen completions bash").stdout;
    for option in [
        "--mount",
        "--no-home",
        "--workdir",
        "--env",
        "--env-file",
        "--clean-env",
        "--remap-root",
        "--writable",
        "--unshare",
    ] {
        assert!(help.contains(option), "{option}: {help}");
        assert!(man.replace("\\-", "-").contains(option), "{option}: {man}");
        assert!(completions.contains(option), "{option}");
    }
    assert!(man.contains("mizzen.1") && man.contains("mizzen-doctor.1"), "{man}");
}
