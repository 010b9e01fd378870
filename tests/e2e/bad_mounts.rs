//! Mounts whose places are behind links of the host or would be on it, and very many mounts.

use mizzen_tests::User;
use mizzen_tests::check::{assert_failed, assert_out, with_busybox};

#[test]
fn homes_behind_links_of_the_host_are_there() {
    let cluster = with_busybox("links");
    let made = cluster.run_as_root(
        "mkdir -p /data/alice /shared/people/real/alice /srv/deep; echo data > /data/alice/mine; \
         echo real > /shared/people/real/alice/mine; chown -R alice /data/alice /shared/people; cd /shared/people; \
         ln -s /data/alice absolute; ln -s real/alice relative; ln -s ../../data/alice upwards; \
         ln -s /shared/people/absolute twice; ln -s /data whole; ln -s /etc system; ln -s /srv/deep/../deep dots; \
         cp /etc/resolv.conf /run/real-resolv.conf; echo '# linked' >> /run/real-resolv.conf; \
         ln -sf ../run/real-resolv.conf /etc/resolv.conf",
    );
    assert_out(&made, 0, "");
    let look = "/shared/bb.sqsh sh -c 'echo $HOME; pwd; cat $HOME/mine; cd; cat mine'";
    for (home, content) in [
        ("absolute", "data"),
        ("relative", "real"),
        ("upwards", "data"),
        ("twice", "data"),
        ("whole/alice", "data"),
        ("real/alice", "real"),
    ] {
        let home = format!("/shared/people/{home}");
        for (before, options, cwd) in [
            ("cd /shared/people", "", "/shared/people"),
            ("cd", "-m /shared/people", "/home/alice"),
            ("cd /data/alice", "-m /shared/people:/shared/people", "/data/alice"),
            ("cd /shared/people", "-m /data", "/shared/people"),
        ] {
            let run = cluster.run(&format!("{before}; HOME={home} mizzen run {options} {look}"));
            assert_out(&run, 0, &format!("{home}\n{cwd}\n{content}\n{content}\n"));
        }
    }
    // What the image has is not hidden by a link of the host.
    let system = cluster
        .run("cd /shared/people; HOME=/shared/people/system mizzen run /shared/bb.sqsh cat /etc/os-release");
    assert_out(&system, 0, "PRETTY_NAME=\"Busybox for tests\"\n");
    let note = "note: /shared/people/system is left out: its symbolic link leads to /etc\n";
    assert_eq!(system.stderr.matches(note).count(), 1, "{}", system.text());
    // Other defaults are found in the same way.
    let resolver = cluster.run("mizzen run -m /etc:/etc /shared/bb.sqsh tail -n 1 /etc/resolv.conf");
    assert_out(&resolver, 0, "# linked\n");
    // A destination of the user's is where it says, or nowhere.
    let linked =
        cluster.run("cd /shared/people; mizzen run -m /srv:/shared/people/dots/x /shared/bb.sqsh true");
    assert_failed(
        &linked,
        125,
        "--mount: /shared/people/dots/x does not exist in the mount of /shared/people",
    );
    let linked =
        cluster.run("cd /shared/people; mizzen run -m /srv:/shared/people/absolute /shared/bb.sqsh true");
    assert_failed(
        &linked,
        125,
        "--mount: /shared/people/absolute: in the mount of /shared/people there is the symbolic link absolute",
    );
}

#[test]
fn no_place_for_a_mount_is_made_on_the_host() {
    let cluster = with_busybox("host-places");
    cluster.run("mkdir -p /tmp/data /tmp/there /dev/shm/there; echo a > /tmp/data/a; echo f > /tmp/file");
    let everything = "find /tmp /dev /home /shared /local | sort | sha256sum";
    let before = cluster.run(everything).stdout;
    for (options, message) in [
        ("-m /tmp/data:/dev/shm/y", "--mount: /dev/shm/y does not exist in the mount of /dev/shm"),
        ("-m /tmp/data:/dev/shm/y/z", "--mount: /dev/shm/y/z does not exist in the mount of /dev/shm"),
        ("-m /tmp/file:/dev/shm/f", "--mount: /dev/shm/f does not exist in the mount of /dev/shm"),
        ("-m tmpfs:/dev/shm/t", "--mount: /dev/shm/t does not exist in the mount of /dev/shm"),
        (
            "-m /shared/bb.sqsh:/dev/shm/s:squashfs",
            "--mount: /dev/shm/s does not exist in the mount of /dev/shm",
        ),
        ("-m /tmp/file:/dev/mqueue/f", "--mount: /dev/mqueue/f does not exist in the mount of /dev/mqueue"),
        ("-m /tmp/data:/tmp/y", "--mount: /tmp/y does not exist in the mount of /tmp"),
        ("-m /tmp/data:/home/alice/y", "--mount: /home/alice/y does not exist in the mount of /home/alice"),
        ("-m /tmp/data:/x -m /tmp/data:/x/y", "--mount: /x/y does not exist in the mount of /x"),
        (
            "-m tmpfs:/t -m /tmp/data:/t/x -m /tmp/data:/t/x/y",
            "--mount: /t/x/y does not exist in the mount of /t/x",
        ),
    ] {
        for further in ["", "--writable", "--unshare pid"] {
            let refused = cluster.run(&format!("mizzen run {further} {options} /shared/bb.sqsh true"));
            assert_failed(&refused, 125, message);
            assert_failed(&refused, 125, "hint: make it on the host first, or choose another destination");
            assert_eq!(cluster.run(everything).stdout, before, "{further} {options}");
        }
    }
    // What is there, and what is ours, can be mounted on.
    for (options, file) in [
        ("-m /tmp/data:/dev/shm/there", "/dev/shm/there/a"),
        ("-m /tmp/data:/tmp/there", "/tmp/there/a"),
        ("-m tmpfs:/dev/shm -m /tmp/data:/dev/shm/y/z", "/dev/shm/y/z/a"),
        ("-m /tmp/data:/dev/deep/y", "/dev/deep/y/a"),
        ("-m /tmp/data:/dev/shm", "/dev/shm/a"),
        ("--no-home -m /tmp/data:/home/alice/y", "/home/alice/y/a"),
        ("-m /tmp/data:/deep/er/y", "/deep/er/y/a"),
    ] {
        let run = cluster.run(&format!("cd /; mizzen run {options} /shared/bb.sqsh cat {file}"));
        assert_out(&run, 0, "a\n");
        assert_eq!(cluster.run(everything).stdout, before, "{options}");
    }
    // Nor does a specification of the node make anything there.
    for machine in ["ctl", "node1"] {
        assert_out(&cluster.run_on(machine, User::Root, "mkdir -p /etc/cdi"), 0, "");
    }
    let device = |edits: &str| {
        let head =
            "cdiVersion: 0.6.0\nkind: vendor.com/card\ndevices:\n- name: \"0\"\n  containerEdits:\n    ";
        cluster.write_everywhere("/etc/cdi/vendor.yaml", &format!("{head}{edits}\n")).unwrap();
        cluster.run("mizzen run --device vendor.com/card=0 /shared/bb.sqsh ls /dev/shm")
    };
    let mounted = device("mounts: [{hostPath: /tmp/data, containerPath: /dev/shm/m}]");
    assert_failed(
        &mounted,
        125,
        "CDI: /etc/cdi/vendor.yaml: /dev/shm/m does not exist in the mount of /dev/shm",
    );
    let linked = device(
        "hooks: [{hookName: createContainer, path: /usr/bin/nvidia-cdi-hook, \
         args: [nvidia-cdi-hook, create-symlinks, --link, \"x::/dev/shm/l\"]}]",
    );
    assert_out(&linked, 0, "there\n");
    let note = "note: the link /dev/shm/l is left out: the mount of /dev/shm has no such name";
    assert_eq!(linked.stderr.matches(note).count(), 1, "{}", linked.text());
    assert_eq!(cluster.run(everything).stdout, before);
}

#[test]
fn thousands_of_mounts_are_made() {
    let cluster = with_busybox("many-mounts");
    cluster.run("mkdir -p /tmp/data; echo a > /tmp/data/a; for i in $(seq 5000); do echo \"-m /tmp/data:/many/$i\"; done > options");
    let run = |count: u32, before: &str, program: &str| {
        cluster.run(&format!("{before}; mizzen run $(head -n {count} options) /shared/bb.sqsh {program}"))
    };
    // The limit is the user's own again for the program.
    let look = "sh -c 'ls /many | wc -l; cat /many/2000/a; ulimit -Sn; ulimit -Hn'";
    for options in ["", "--unshare pid"] {
        let many = cluster.run(&format!(
            "ulimit -Sn 256; ulimit -Hn 4096; mizzen run {options} $(head -n 2000 options) /shared/bb.sqsh {look}"
        ));
        assert_out(&many, 0, "2000\na\n256\n4096\n");
    }
    let refused = run(2000, "ulimit -n 1024", "true");
    assert_eq!(refused.code, 125, "{}", refused.text());
    assert!(
        refused.stderr.contains(" mounts need ")
            && refused.stderr.contains(" open files, but you may have 1024\n"),
        "{}",
        refused.text()
    );
    assert!(refused.stderr.contains("hint: ulimit -Hn is the limit"), "{}", refused.text());
    assert_out(&run(5000, "ulimit -n 8192", "cat /many/5000/a"), 0, "a\n");
    // As many again take as long again.
    let planned = |count: u32| {
        let timed = cluster.run(&format!(
            "ulimit -n 8192; TIMEFORMAT=%U; time mizzen plan $(head -n {count} options) /shared/bb.sqsh true > plan; grep -c '^mount *./many/' plan"
        ));
        assert_eq!(timed.stdout, format!("{count}\n"), "{}", timed.text());
        timed.stderr.trim().parse::<f64>().unwrap()
    };
    let (few, many) = (planned(1000), planned(5000));
    assert!(many < 10.0 * few.max(0.02), "1000 mounts take {few} s, 5000 take {many} s");
}
