//! `mizzen run` in real namespaces, as an unprivileged user: what runs, and what it sees.

use mizzen_tests::Release;
use mizzen_tests::check::{assert_failed, assert_out, machine, with_busybox};
use mizzen_tests::images::{ImageTree, pack, sif};

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
        &cluster.run("mkdir -p /shared/project/a; cd /shared/project/a; mizzen run ../../bb.sqsh pwd"),
        0,
        "/shared/project/a\n",
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
    assert_out(&run("--no-home", "sh -c 'ls -A /home/alice; pwd'"), 0, "/\n");
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
        ("-m /no/such:/x", "--mount: source path does not exist: /no/such"),
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
        ("--unshare moon", "--unshare: unknown namespace 'moon'"),
        ("-e =x", "--env: \"=…\": the name is empty"),
        ("--env-file /no/such", "--env-file: /no/such: No such file or directory"),
        ("-w /no/such", "--workdir: cannot start in /no/such: No such file or directory"),
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
    // A directory that the caller has left open is the host's.
    let outside = cluster.run("mizzen run -w /proc/self/fd/7 /shared/bb.sqsh touch /tmp/ran 7< /usr/share");
    assert_failed(&outside, 125, "--workdir: cannot start in /proc/self/fd/7: it is not in the container");
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
