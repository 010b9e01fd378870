//! How a container lives and ends: namespaces, older kernels, the file server, kills.

use std::time::Duration;

use mizzen_tests::Cluster;
use mizzen_tests::check::{assert_failed, assert_out, count, with_busybox};
use serde_json::json;

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
    assert_out(&cluster.run("timeout --foreground -s TERM 1 mizzen run --unshare pid /shared/bb.sqsh sh -c 'trap \"echo caught; exit 3\" TERM; while :; do sleep 0.1; done'"), 124, "caught\n");
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
fn a_directory_image_is_mounted_alike_by_every_kernel() {
    let cluster = with_busybox("directories");
    // Two file systems below the image, one in the other, with what must not work in a container.
    cluster.run("mizzen run /shared/bb.sqsh tar -C / -cf bb.tar bin etc/group etc/passwd");
    cluster.run_as_root(
        "mkdir /shared/full; cd /shared/full; tar -xf /home/alice/bb.tar; mkdir -p dev home/alice opt proc sys tmp; \
         mount -t tmpfs one opt; mkdir opt/sub; mount -t tmpfs two opt/sub; echo a > opt/a; \
         cp bin/busybox opt/sub/id; chmod 4755 opt/sub/id; mknod -m 666 opt/sub/null c 1 3; chmod 1777 opt opt/sub; \
         touch etc/hosts etc/resolv.conf; mkdir /shared/lacking; cp -a bin /shared/lacking; \
         mkdir /shared/lacking/opt; mount --rbind opt /shared/lacking/opt",
    );
    let script = "sh -c 'cat /opt/a; /opt/sub/id -u; echo x > /opt/sub/null || echo no device; \
                  for i in / /opt /opt/sub; do touch $i/x || echo read-only; done; \
                  awk \"\\$5 ~ /^.opt/ {print \\$5, \\$6}\" /proc/self/mountinfo'";
    let restricted = "ro,nosuid,nodev,relatime";
    let expected = format!(
        "a\n2001\nno device\nread-only\nread-only\nread-only\n/opt {restricted}\n/opt/sub {restricted}\n"
    );
    // In one image every mount point is there; the other is put together anew.
    for image in ["/shared/full", "/shared/lacking"] {
        let command = format!("mizzen run --no-home {image} {script}");
        let traced = |options: &str| {
            let run = cluster.run(&format!(
                "strace -o calls -e trace=open_tree,move_mount,mount_setattr,openat2 {options} {command}"
            ));
            assert_out(&run, 0, &expected);
            cluster.run("cat calls").stdout
        };
        let calls = traced("");
        for call in ["open_tree(", "move_mount("] {
            assert_eq!(calls.matches(call).count(), 1, "{calls}");
            assert!(!calls.contains(" = -1 "), "{calls}");
        }
        // Linux before 5.2 has none of these calls; a seccomp filter may forbid those that it does not know.
        for (missing, error) in [
            ("open_tree,move_mount", "ENOSYS"),
            ("open_tree,move_mount", "EPERM"),
            ("open_tree,move_mount,mount_setattr,openat2", "ENOSYS"),
        ] {
            let calls = traced(&format!("-e inject={missing}:error={error}"));
            assert!(calls.contains("open_tree(") && calls.contains("(INJECTED)"), "{calls}");
            assert!(!calls.contains("move_mount("), "{calls}");
        }
    }
    let failed = cluster
        .run("strace -o /dev/null -e inject=open_tree:error=ENOMEM mizzen run --no-home /shared/full true");
    assert_failed(&failed, 125, "mizzen: cannot clone the image's mounts: Cannot allocate memory");
}

/// As before Linux 6.6, where a tmpfs has no user xattrs: changes go to disk.
const OLD: &str = "TMPDIR=/var/tmp/alice strace -o /dev/null -e inject=fsetxattr:error=EOPNOTSUPP";

/// A machine with a disk for the changes. (The overlay that is its root directory cannot be under another.)
fn with_disk(name: &str) -> Cluster {
    let cluster = with_busybox(name);
    cluster.run_as_root(
        "mkdir /var/tmp/alice; mount -t tmpfs disk /var/tmp/alice; chmod 1777 /var/tmp/alice; mount -t tmpfs var /mnt",
    );
    cluster
}

#[test]
fn changes_go_to_disk_where_memory_cannot_hold_them() {
    let cluster = with_disk("on-disk");
    let script = "sh -c 'echo new > /etc/new; rm -r /var; mkdir /var; touch /var/x; mv /usr /usr2; rm /etc/os-release; cat /etc/new; ls /var; ls -d /usr2'";
    let run = cluster
        .run(&format!("{OLD} mizzen run --writable /shared/bb.sqsh {script}; sleep 0.5; ls /var/tmp/alice"));
    assert_out(&run, 0, "new\nx\n/usr2\n");
    assert!(
        run.stderr.starts_with("mizzen: note: changes are kept in /var/tmp/alice/mizzen-"),
        "{}",
        run.text()
    );
    // Whatever modes the program leaves, and however it ends.
    let killed = cluster.run(&format!("{OLD} mizzen run --writable /shared/bb.sqsh sh -c 'mkdir -p /a/b/c; chmod 0 /a/b/c; chmod 500 /a/b /a; sleep 50' & sleep 0.7; ls /var/tmp/alice | wc -l; pkill -KILL -x sleep; pkill -KILL -x sh; sleep 0.5; ls /var/tmp/alice"));
    assert_out(&killed, 0, "1\n");
    let nowhere = cluster.run("TMPDIR=/proc strace -o /dev/null -e inject=fsetxattr:error=EOPNOTSUPP mizzen run --writable /shared/bb.sqsh true");
    assert_failed(&nowhere, 125, "mizzen: --writable: /proc: cannot make a directory: ");
    // The plan tells it, and a limit that would not hold is refused before anything happens.
    let value = "writable on disk, in a new directory below /var/tmp/alice";
    let why =
        "by option, or mizzen.toml; the kernel's tmpfs has no user xattrs (Linux 6.6 has), so no limit holds";
    let text = cluster.run(&format!("{OLD} mizzen plan --writable /shared/bb.sqsh true"));
    assert!(text.stdout.contains(&format!("root      {value:<58} {why}\n")), "{}", text.text());
    let plan = cluster.run(&format!("{OLD} mizzen plan --json --writable /shared/bb.sqsh true"));
    let plan: serde_json::Value = serde_json::from_str(&plan.stdout).unwrap();
    assert_eq!(plan["root"], json!({ "value": value, "why": why }));
    for command in ["run", "plan"] {
        let refused = cluster.run(&format!(
            "touch before; {OLD} mizzen {command} --writable=1m /shared/bb.sqsh touch /tmp/ran"
        ));
        let (code, hint) = (
            if command == "run" { 125 } else { 1 },
            "mizzen: hint: without a size they are kept below /var/tmp/alice (TMPDIR)",
        );
        assert_failed(
            &refused,
            code,
            "mizzen: /shared/bb.sqsh: writable up to 1m: this node's kernel cannot keep the changes in memory, and on disk no limit holds\n",
        );
        assert_failed(&refused, code, hint);
    }
    assert_out(&cluster.run("ls /tmp/ran; find /var/tmp/alice -newer before"), 0, "");
}

#[test]
fn what_a_killed_step_leaves_on_disk_the_next_run_removes() {
    let cluster = with_disk("left-behind");
    let list = || cluster.run("cd /var/tmp/alice; ls -A").stdout;
    // The process that cleans up first: it must not have the time to do so.
    let run_and_kill_all = || {
        let before = list();
        cluster.run(&format!(
            "{OLD} mizzen run --writable /shared/bb.sqsh sh -c 'mkdir -p /a/b; touch /a/b/c; ln -s /mnt/kept /a/link; chmod 0 /a/b; sleep 50' & \
             sleep 0.7; pkill -KILL -x mizzen; pkill -KILL -x 'strace|mizzen-fuse|sh|sleep'; sleep 0.2"
        ));
        let left: Vec<String> =
            list().lines().filter(|name| !before.contains(name)).map(str::to_owned).collect();
        assert_eq!(left.len(), 1, "{left:?}");
        left[0].clone()
    };
    let next = || {
        let run = cluster.run(&format!("{OLD} mizzen run --writable /shared/bb.sqsh true; sleep 0.5"));
        assert_eq!(run.code, 0, "{}", run.text());
        list()
    };
    run_and_kill_all();
    assert_eq!(next(), "");
    // What only looks like one of ours, or cannot be told from it but through a link, or is another's, stays.
    let old = run_and_kill_all();
    cluster.run_as_root(&format!(
        "cd /var/tmp/alice; cp -a --preserve=all {old} /mnt/kept; cp -a --preserve=all {old} mizzen-others; \
         chown -R bob mizzen-others; chmod -R 777 mizzen-others; ln -s /mnt/kept mizzen-linked; chown -h alice mizzen-linked"
    ));
    cluster.run("cd /var/tmp/alice; mkdir mizzen-mydata; touch mizzen-mydata/file mizzen-afiles");
    let kept =
        "cd /var/tmp/alice; find mizzen-others mizzen-linked mizzen-mydata mizzen-afiles /mnt/kept | sort";
    let before = cluster.run_as_root(kept).stdout;
    assert_eq!(before.matches("/upper/a/b/c\n").count(), 2, "{before}");
    assert_eq!(next(), "mizzen-afiles\nmizzen-linked\nmizzen-mydata\nmizzen-others\n");
    assert_eq!(cluster.run_as_root(kept).stdout, before);
    // The owner alone is not enough: whoever can write to it could have marked it, and moved it here.
    cluster.run_as_root("chown -R alice /var/tmp/alice/mizzen-others");
    assert_eq!(next(), "mizzen-afiles\nmizzen-linked\nmizzen-mydata\nmizzen-others\n");
    assert_eq!(cluster.run_as_root(kept).stdout, before);
    cluster.run_as_root("chmod 700 /var/tmp/alice/mizzen-others");
    assert_eq!(next(), "mizzen-afiles\nmizzen-linked\nmizzen-mydata\n");
    // A directory that is in use stays, although others start and end.
    let shared = cluster.run(&format!(
        "{OLD} mizzen run --writable /shared/bb.sqsh sh -c 'echo mine > /file; until [ -e ~/go ]; do sleep 0.1; done; cat /file' & sleep 0.7; \
         for i in 1 2; do {OLD} mizzen run --writable /shared/bb.sqsh true; done; cat /var/tmp/alice/*/upper/file; touch go; wait"
    ));
    assert_out(&shared, 0, "mine\nmine\n");
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
    // Nothing of the caller's is kept open: not its files, not the other server's connection.
    let kept = cluster.run(
        "exec 7</etc/passwd; mizzen run -m /shared/bb.sqsh:/mnt:squashfs /shared/bb.sqsh sleep 2 & sleep 0.5; \
         for s in $(pgrep mizzen-fuse); do readlink /proc/$s/fd/* | grep -cE 'passwd|pipe|socket' ; done; wait",
    );
    assert_eq!(kept.stdout, "2\n2\n", "sockets to the launcher and the watcher: {}", kept.text());
}

#[test]
fn random_kills_leave_nothing() {
    let cluster = with_busybox("kills");
    let runs = u64::from(count(30, 200));
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
