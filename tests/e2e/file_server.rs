//! The file server: what it may do, and what happens when it dies or its image is damaged under a running program.

use std::fs;
use std::process::Command;

use mizzen_tests::check::{
    Emptiness, assert_failed, assert_out, one_node, run_in_time, start_with_busybox, with_busybox,
};
use mizzen_tests::images::ImageTree;
use mizzen_tests::{Cluster, Output, Release, Spec, User, on_every_release, run_tool};

on_every_release!(a_step_is_told_and_ends, a_step_ends_on_all_its_nodes);

/// Waits for the file server of a container whose program runs, and sets `server`.
const SERVER: &str =
    "until pgrep -x sleep >/dev/null && server=$(pgrep -x mizzen-fuse); do sleep 0.02; done; sleep 0.1";
/// What a shell that waits for the background job `$!` prints and exits with, and whether that took too long.
const WAIT: &str = "begin=$EPOCHREALTIME; wait $!; code=$?; end=$EPOCHREALTIME; [ $((${end/./} - ${begin/./})) -lt 5000000 ] || echo late; exit $code";

/// The same, and goes on.
const WAIT_THEN: &str = "begin=$EPOCHREALTIME; wait $!; end=$EPOCHREALTIME; [ $((${end/./} - ${begin/./})) -lt 5000000 ] || echo late";

/// What the user reads: once, and nothing else of mizzen. The program was killed by the watcher, or by the kernel before
/// that, because it lacked a page of its own.
#[track_caller]
fn assert_told(output: &Output, message: &str, hint: &str) {
    let code = if output.code == 135 { 135 } else { 137 };
    assert_failed(output, code, &format!("mizzen: {message}"));
    assert_failed(output, code, &format!("mizzen: hint: {hint}"));
    assert_eq!(output.stderr.matches("mizzen: ").count(), 2, "{}", output.text());
    assert!(!output.stdout.contains("late"), "{}", output.text());
}

/// Text that compresses to about half, so that its blocks are compressed.
fn text(bytes: usize) -> String {
    let mut state = 42_u64;
    let mut digit = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        char::from_digit((state >> 60) as u32, 16).unwrap()
    };
    (0..bytes).map(|_| digit()).collect()
}

/// An image whose first data block is that of /aaa/first, and whose program is elsewhere.
fn image(first: &str, options: &[&str]) -> Vec<u8> {
    let tree = ImageTree::busybox().unwrap();
    tree.file("aaa/first", first).unwrap();
    tree.squashfs(options).unwrap()
}

/// Where the first data block of an image is, or a part of it.
fn damage(image: &mut [u8], from: usize, length: usize) {
    image[96 + from..96 + from + length].fill(0xff);
}

#[test]
fn every_compressor_is_served_under_the_filter() {
    let cluster = with_busybox("filter");
    let tree = ImageTree::busybox().unwrap();
    for (number, size) in [0, 1, 4096, 131_072, 131_073, 3_000_000].into_iter().enumerate() {
        tree.file(&format!("data/{number}"), &text(size)).unwrap();
    }
    for number in 0..300 {
        tree.file(&format!("data/small/{number}"), &text(number * 7)).unwrap();
    }
    let sums = "find bin data -type f | sort | xargs md5sum";
    let expected = run_tool(Command::new("sh").args(["-c", sums]).current_dir(tree.path("."))).unwrap();
    assert_eq!(expected.lines().count(), 307);
    for options in [
        &["-comp", "gzip"][..],
        &["-comp", "lzma"],
        &["-comp", "lzo"],
        &["-comp", "xz", "-b", "1M"],
        &["-comp", "lz4"],
        &["-comp", "zstd"],
        &["-comp", "zstd", "-b", "1M"],
        &["-noI", "-noD", "-noF", "-noX"],
    ] {
        cluster.share("all.sqsh", &tree.squashfs(options).unwrap()).unwrap();
        // Twice at once, so that every thread has something to do.
        let script = format!(
            "cd /; {sums} > /tmp/other & {sums}; wait; {sums} | cmp - /tmp/other; \
             server=$(grep -lx mizzen-fuse /proc/[0-9]*/comm); cat ${{server%comm}}task/*/status | grep -E \"^(Seccomp|NoNewPrivs):\" | sort -u"
        );
        let run = cluster.run(&format!("mizzen run /shared/all.sqsh sh -c '{script}'"));
        assert_eq!(run.stderr, "", "{options:?}");
        assert_out(&run, 0, &format!("{expected}NoNewPrivs:\t1\nSeccomp:\t2\n"));
    }
}

/// A kernel without filters is no reason to have no container; whatever else keeps a server from having one is.
#[test]
fn a_server_without_a_filter_serves_only_where_the_kernel_has_none() {
    let cluster = with_busybox("no-filter");
    let with = |error: &str, words: &str| {
        run_in_time(
            &cluster,
            &format!(
                "strace -f -o /dev/null -e trace=seccomp -e inject=seccomp:error={error} mizzen {words}"
            ),
        )
    };
    for error in ["ENOSYS", "EINVAL"] {
        assert_out(&with(error, "run /shared/bb.sqsh echo served"), 0, "served\n");
        let doctor = with(error, "doctor");
        let line = "ok       seccomp         not in this kernel: file servers run without it (for the file server's filter)\n";
        assert!(doctor.code == 0 && doctor.stdout.contains(line), "{}", doctor.text());
    }
    // For lack of memory it could not be tried.
    for (error, why, word, code) in [
        ("EPERM", "Operation not permitted", "FAILED ", 1),
        ("ENOMEM", "Cannot allocate memory", "unknown", 2),
    ] {
        let run = with(error, "run /shared/bb.sqsh echo served");
        let message =
            format!("mizzen: cannot start the file server: its seccomp filter cannot be installed: {why}");
        let hint = "something on this node keeps users from installing one";
        assert_failed(&run, 125, &message);
        assert_failed(&run, 125, hint);
        assert_eq!((run.stdout.as_str(), run.stderr.matches("mizzen: ").count()), ("", 2), "{}", run.text());
        let doctor = with(error, "doctor");
        let line = format!(
            "{word}  seccomp         cannot install a filter: {why} (for the file server's filter)\n"
        );
        assert!(doctor.code == code && doctor.stdout.contains(&line), "{}", doctor.text());
        assert!(
            doctor.stdout.contains("hint: another filter, or a security module, forbids it"),
            "{}",
            doctor.text()
        );
    }
}

#[test]
fn the_watcher_keeps_nothing_open_and_ends_with_the_container() {
    let cluster = with_busybox("watcher");
    let empty = Emptiness::of(&cluster, &["node1"]);
    let facts = cluster.run(&format!(
        "exec 7</etc/passwd; mizzen run --stage=never --writable -m /shared/bb.sqsh:/mnt:squashfs /shared/bb.sqsh sleep 100 & {SERVER}; \
         for pid in $(pgrep -x mizzen-watch); do readlink /proc/$pid/cwd; readlink /proc/$pid/fd/* | sed 's/:.*//'; \
         grep -E '^(CapEff|NoNewPrivs)' /proc/$pid/status; grep -c '^SigBlk:.fffffff.7ffbfeff$' /proc/$pid/status; [ $(readlink /proc/$pid/ns/mnt) = $(readlink /proc/self/ns/mnt) ] && echo outside; \
         pgrep -P $pid -x mizzen-fuse | wc -l; done; kill %1"
    ));
    // The pipe is the place of the standard error: not open, so that nobody waits for its end.
    let one = "/\n/dev/null\n/dev/null\n/dev/null\n/shared/bb.sqsh\nsocket\nsocket\nanon_inode\npipe\n\
               1\nCapEff:\t0000000000000000\nNoNewPrivs:\t1\noutside\n1\n";
    let lines = |text: &str| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(lines(&facts.stdout), lines(&one.repeat(2)), "{}", facts.text());
    empty.assert_again(&cluster, "watched");
    // The program finds no child that it did not start, and nothing outlives it: `wait` returns, a pipe ends.
    let run = cluster.run("mizzen run /shared/bb.sqsh sh -c 'wait; read children < /proc/$$/task/$$/children; echo \"[$children]\"; exit 7' | cat; exit ${PIPESTATUS[0]}");
    assert_out(&run, 7, "[]\n");
    empty.assert_again(&cluster, "ended");
}

#[test]
fn a_file_server_that_dies_is_told_and_ends_the_container() {
    let cluster = with_busybox("server-dies");
    let empty = Emptiness::of(&cluster, &["node1"]);
    let killed = (
        "/shared/bb.sqsh: its file server was killed, so the container was ended\n",
        "the kernel kills processes when memory runs out: see `dmesg` on the node, and the limit of the step (--mem)\n",
    );
    for (options, program) in [
        ("", "sleep 100"),
        ("--unshare pid", "sleep 100"),
        ("--remap-root", "sleep 100"),
        // Whatever the other processes do with their streams, and although a signal is not taken.
        ("", "sh -c 'trap \"\" TERM HUP; sleep 100 >/dev/null 2>&1 & setsid sleep 100 & wait'"),
        ("--writable --remap-root -m /shared/bb.sqsh:/mnt:squashfs", "sleep 100"),
    ] {
        // All servers of the container at once: one message all the same. Whatever the caller does with signals.
        let env = if options.is_empty() { "--ignore-signal=CHLD" } else { "" };
        let run = run_in_time(
            &cluster,
            &format!(
                "env {env} mizzen run {options} /shared/bb.sqsh {program} & {SERVER}; kill -KILL $server; {WAIT}"
            ),
        );
        assert_told(&run, killed.0, killed.1);
        empty.assert_again(&cluster, &format!("{options} {program}"));
    }
    // The program is told to a file, which is not written over; and it dies by itself at once.
    let run = run_in_time(
        &cluster,
        &format!(
            "(echo before >&2; mizzen run /shared/bb.sqsh sh -c 'sleep 100 & echo more >&2; while :; do [ -e /etc/$((i = i + 1)) ]; done'; echo after >&2) 2>log & \
             {SERVER}; kill -KILL $server; wait $!; cat log; rm log"
        ),
    );
    let expected = ["before", "more", &format!("mizzen: {}", killed.0), "mizzen: hint: ", "after\n"];
    let mut rest = run.stdout.as_str();
    for part in expected {
        let at = rest.find(part).unwrap_or_else(|| panic!("{part}: {}", run.text()));
        rest = &rest[at + part.len()..];
    }
    // A program that lacks a page of its own is gone before the watcher looks: here that is stopped meanwhile.
    let run = run_in_time(
        &cluster,
        &format!(
            "(mizzen run /shared/bb.sqsh sleep 100 & {SERVER}; watcher=$(pgrep -P $! -x mizzen-watch || pgrep -x mizzen-watch); \
             kill -STOP $watcher; kill -KILL $server $!; wait $!; kill -CONT $watcher; sleep 2) 2>&1 | cat >&2; exit 137"
        ),
    );
    assert_told(&run, killed.0, killed.1);
    empty.assert_again(&cluster, "a program that is gone");
    // Of two servers, that of a data mount, which nothing has waited for yet.
    cluster.share("data.sqsh", &image("data", &[])).unwrap();
    let run = run_in_time(
        &cluster,
        &format!(
            "mizzen run -m /shared/data.sqsh:/mnt:squashfs /shared/bb.sqsh sleep 100 & {SERVER}; \
             until [ -n \"$data\" ]; do for pid in $(pgrep -x mizzen-fuse); do \
             readlink /proc/$pid/fd/* | grep -qx /shared/data.sqsh && data=$pid; done; done; kill -KILL $data; {WAIT}"
        ),
    );
    assert_told(
        &run,
        "/shared/data.sqsh: its file server was killed, so the container was ended\n",
        killed.1,
    );
    empty.assert_again(&cluster, "a data mount");
    // Signals that a program of the job gets as well do nothing to it, nor does a server that ends with its container.
    let signals = cluster.run(&format!(
        "mizzen run /shared/bb.sqsh sleep 1 & {SERVER}; for s in SEGV ABRT SYS TERM; do kill -$s $server; done; wait $!"
    ));
    assert_eq!((signals.code, signals.text().contains("mizzen:")), (0, false), "{}", signals.text());
    // When everything is killed, there is nothing to say.
    let all = cluster.run(&format!(
        "mizzen run /shared/bb.sqsh sleep 100 & {SERVER}; kill -KILL $server $(pgrep -x 'mizzen-watch|sleep'); wait $!"
    ));
    assert_eq!((all.code, all.stderr.contains("mizzen:")), (137, false), "{}", all.text());
    empty.assert_again(&cluster, "everything killed");
}

/// Puts machine code where the server is after its system call. (For lack of a hole in a decompressor.)
fn run_code_in_server(cluster: &Cluster, code: &str) -> Output {
    let inject = format!(
        "pid=$(pgrep -x mizzen-fuse); pc=$(sed 's/.* //' /proc/$pid/syscall); printf '{code}' | dd of=/proc/$pid/mem bs=1 seek=$((pc)) conv=notrunc 2>/dev/null && touch /shared/injected"
    );
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            run_in_time(
                cluster,
                &format!(
                    "mizzen run -m /shared /shared/bb.sqsh sh -c 'sleep 1000 & until [ -e /shared/injected ]; do :; done; ls /etc/nothing' & {WAIT}"
                ),
            )
        });
        assert_out(&cluster.run_as_root(&format!("{SERVER}; {inject}")), 0, "");
        let run = run.join().unwrap();
        cluster.run_as_root("rm -f /shared/injected");
        run
    })
}

#[test]
#[cfg(target_arch = "x86_64")] // the machine code
fn what_the_filter_does_not_allow_ends_the_server() {
    let cluster = with_busybox("violation");
    let empty = Emptiness::of(&cluster, &["node1"]);
    let bug = "the image is broken or means harm, or this is a bug of mizzen; please report it";
    let filtered = "/shared/bb.sqsh: its file server made a system call that its filter does not allow, so the container was ended\n";
    let hint = format!("{bug}. The node's kernel log names the call (type=1326)\n");
    // socket; execve; fork; kill; ptrace; clone without CLONE_THREAD; the last in the ABI of 32 bits: getpid.
    for code in [
        "\\xb8\\x29\\0\\0\\0\\x0f\\x05",
        "\\xb8\\x3b\\0\\0\\0\\x0f\\x05",
        "\\xb8\\x39\\0\\0\\0\\x0f\\x05",
        "\\xb8\\x3e\\0\\0\\0\\x0f\\x05",
        "\\xb8\\x65\\0\\0\\0\\x0f\\x05",
        "\\x31\\xff\\xb8\\x38\\0\\0\\0\\x0f\\x05",
        "\\xb8\\x14\\0\\0\\0\\xcd\\x80",
        // Memory that can be executed: mmap, mprotect.
        "\\x31\\xff\\xbe\\0\\x10\\0\\0\\xba\\x07\\0\\0\\0\\xb8\\x09\\0\\0\\0\\x0f\\x05",
        "\\x31\\xff\\x31\\xf6\\xba\\x04\\0\\0\\0\\xb8\\x0a\\0\\0\\0\\x0f\\x05",
    ] {
        assert_told(&run_code_in_server(&cluster, code), filtered, &hint);
        empty.assert_again(&cluster, code);
    }
    // A crash: a write to address 0.
    let crashed = "/shared/bb.sqsh: its file server crashed (SIGSEGV), so the container was ended\n";
    assert_told(&run_code_in_server(&cluster, "\\x31\\xc0\\x88\\x00"), crashed, &format!("{bug}\n"));
    empty.assert_again(&cluster, "crashed");
}

#[test]
fn an_image_that_is_damaged_under_a_running_program_is_named() {
    let cluster = with_busybox("damaged");
    let empty = Emptiness::of(&cluster, &["node1"]);
    let whole = image_bytes();
    let broken = "the image is broken or was not copied completely; copy it again, or make it again\n";
    let written = "the image was written to while it was in use; put a new one in its place with mv, which leaves the old one to those who use it\n";
    let undecodable = "cannot read /aaa/first in it, so the container was ended: corrupt image: the gzip block at byte 96 does not decompress\n";
    let mut damaged = whole.clone();
    damage(&mut damaged, 0, 1000);
    cluster.share("damaged.sqsh", &damaged).unwrap();
    for options in ["", "--unshare pid", "--writable"] {
        // The program that gets the error does not go on with it, and no other does.
        let run = run_in_time(
            &cluster,
            &format!(
                "mizzen run {options} /shared/damaged.sqsh sh -c 'sleep 100 & cat /aaa/first; echo went on' & {WAIT}"
            ),
        );
        assert_told(&run, &format!("/shared/damaged.sqsh: {undecodable}"), broken);
        assert_eq!(run.stdout, "", "{}", run.text());
        empty.assert_again(&cluster, "damaged");
    }
    let data = cluster.run(&format!(
        "mizzen run -m /shared/damaged.sqsh:/mnt:squashfs /shared/bb.sqsh cat /mnt/aaa/first & {WAIT}"
    ));
    assert_told(&data, &format!("/shared/damaged.sqsh: {undecodable}"), broken);
    // Under a program that runs: written over, and made shorter.
    for (change, message) in [
        (
            "dd if=/dev/zero of=/shared/changed.sqsh bs=96 seek=1 count=10 conv=notrunc 2>/dev/null",
            undecodable,
        ),
        (
            "truncate -s 100 /shared/changed.sqsh",
            "cannot read /aaa/first in it, so the container was ended: the image has become shorter: the block at byte 96 is not whole\n",
        ),
    ] {
        cluster.share("changed.sqsh", &whole).unwrap();
        cluster.run_as_root("chown alice /shared/changed.sqsh");
        let run = run_in_time(
            &cluster,
            &format!(
                "mizzen run -m /shared /shared/changed.sqsh sh -c 'sleep 100 & until [ -e /shared/go ]; do :; done; cat /aaa/first; echo went on' & {SERVER}; \
                 {change}; touch /shared/go; {WAIT}"
            ),
        );
        cluster.run("rm /shared/go");
        assert_told(&run, &format!("/shared/changed.sqsh: {message}"), written);
        assert_eq!(run.stdout, "", "{}", run.text());
        empty.assert_again(&cluster, change);
    }
}

/// Blocks that are stored as they are always decode: only the file tells that they are another image's.
#[test]
fn an_image_that_another_is_copied_over_is_named() {
    let cluster = with_busybox("copied-over");
    let empty = Emptiness::of(&cluster, &["node1"]);
    let made = |text: &str, time: &str| {
        let stored = ["-noD", "-noF", "-noI", "-noX", "-no-fragments", "-mkfs-time", time];
        image(&text.repeat(300_000), &stored)
    };
    let (old, new) = (made("old\n", "1"), made("new\n", "2"));
    assert_eq!(old.len(), new.len());
    cluster.share("new.sqsh", &new).unwrap();
    // It reads its own program before, so that what it reads later is the file alone.
    let program = "sh -c 'sleep 100 & cat /bin/busybox > /dev/null; touch /shared/ready; until [ -e /shared/go ]; do :; done; \
                   head -c 4 /aaa/first; tail -c 4 /aaa/first; kill $!'";
    let in_use = |start: &str, change: &str| {
        cluster.share("changed.sqsh", &old).unwrap();
        assert_out(&cluster.run_as_root("chown alice /shared/changed.sqsh"), 0, "");
        let run = run_in_time(
            &cluster,
            &format!(
                "{start} {program} & until [ -e /shared/ready ]; do sleep 0.02; done; {change}; touch /shared/go; {WAIT}"
            ),
        );
        assert_out(&cluster.run("rm /shared/go /shared/ready"), 0, "");
        empty.assert_again(&cluster, change);
        run
    };
    let by_hand = "mizzen run -m /shared /shared/changed.sqsh";
    let step = "srun -n2 --container-image=/shared/changed.sqsh --container-mounts=/shared";
    let message = "/shared/changed.sqsh: cannot read /aaa/first in it, so the container was ended: \
                   reading the image at byte 96: the file has another image by now";
    for change in [
        "cp /shared/new.sqsh /shared/changed.sqsh",
        // Nobody sees a shorter file meanwhile.
        "dd if=/shared/new.sqsh of=/shared/changed.sqsh conv=notrunc 2> /dev/null",
    ] {
        let run = in_use(by_hand, change);
        let hint = "the image was written to while it was in use; put a new one in its place with mv, which leaves the old one to those who use it\n";
        assert_told(&run, &format!("{message}\n"), hint);
        assert_eq!(run.stdout, "", "{change}: {}", run.text());
    }
    let run = in_use(step, "cp /shared/new.sqsh /shared/changed.sqsh");
    assert_step_told(&cluster, &run, &format!("node1: {message}"));
    // Who keeps a file from being purged changes nothing in it; what has another one's name is another file.
    for change in
        ["touch /shared/changed.sqsh", "cp /shared/new.sqsh /shared/x; mv /shared/x /shared/changed.sqsh"]
    {
        assert_out(&in_use(by_hand, change), 0, "old\nold\n");
        let run = in_use(step, change);
        assert_eq!((run.code, &*run.stdout, &*run.stderr), (0, &*"old\nold\n".repeat(2), ""), "{change}");
    }
}

#[test]
fn a_damaged_program_is_named_once() {
    let cluster = with_busybox("damaged-program");
    let empty = Emptiness::of(&cluster, &["node1"]);
    let tree = ImageTree::busybox().unwrap();
    tree.program("aaa/program", "").unwrap();
    fs::copy("/bin/busybox", tree.path("aaa/program")).unwrap();
    let mut bytes = tree.squashfs(&["-comp", "gzip", "-no-fragments", "-no-duplicates"]).unwrap();
    damage(&mut bytes, 0, 1000);
    cluster.share("damaged.sqsh", &bytes).unwrap();
    for options in ["", "--unshare pid"] {
        let run = run_in_time(
            &cluster,
            &format!("mizzen run {options} /shared/damaged.sqsh /aaa/program sleep 1 & {WAIT}"),
        );
        assert_told(
            &run,
            "/shared/damaged.sqsh: cannot read /aaa/program in it, so the container was ended: corrupt image: the gzip block at byte 96 does not decompress\n",
            "the image is broken or was not copied completely; copy it again, or make it again\n",
        );
        empty.assert_again(&cluster, options);
    }
}

#[test]
fn damage_that_only_read_ahead_meets_ends_nothing() {
    let cluster = with_busybox("read-ahead");
    let empty = Emptiness::of(&cluster, &["node1"]);
    // In blocks of 4 KiB: the kernel reads at least four of them when a program wants the first.
    let whole = image(&text(100_000), &["-comp", "gzip", "-b", "4K", "-no-fragments"]);
    let mut damaged = whole;
    damage(&mut damaged, 7500, 100);
    cluster.share("damaged.sqsh", &damaged).unwrap();
    let part = |count: u32| {
        cluster.run(&format!("mizzen run /shared/damaged.sqsh sh -c 'dd if=/aaa/first bs=4096 count={count} 2>/dev/null | wc -c; sleep 1; echo went on' & {WAIT}"))
    };
    assert_out(&part(1), 0, "4096\nwent on\n");
    let wanted = part(5);
    assert_failed(
        &wanted,
        137,
        "mizzen: /shared/damaged.sqsh: cannot read /aaa/first in it, so the container was ended: corrupt image: ",
    );
    // What the server reads ahead itself: a damaged program that is not the one that is started.
    empty.assert_again(&cluster, "read ahead");
}

const KILLED: &str = "node1: /shared/bb.sqsh: its file server was killed, so the container was ended";

/// What srun shows and slurmd's log has, once, of a step whose container has lost its files.
#[track_caller]
fn assert_step_told(cluster: &Cluster, output: &Output, message: &str) {
    let context = format!("{}: {}", cluster.release(), output.text());
    assert!(output.code != 0 && output.stdout.is_empty(), "{context}");
    assert_eq!(output.stderr.matches(&format!("mizzen: {message}")).count(), 1, "{message}: {context}");
    assert_eq!(output.stderr.matches("mizzen: ").count(), 2, "a message and a hint: {context}");
    let log = cluster.slurmd_log("node1");
    assert_eq!(log.matches(message).count(), 1, "{message}: {log}");
}

fn a_step_is_told_and_ends(release: Release) {
    let cluster = start_with_busybox(one_node(release, "step-told"));
    assert_steps_are_told(&cluster);
}

#[test]
fn a_step_in_a_cgroup_is_told_and_ends() {
    assert_steps_are_told(&start_with_busybox(Spec {
        cgroup_v1: true,
        nodes: 1,
        ..Cluster::spec("told-in-cgroup")
    }));
}

fn assert_steps_are_told(cluster: &Cluster) {
    let empty = Emptiness::of(cluster, &["node1"]);
    let image = "--container-image=/shared/bb.sqsh";
    let dies = format!("srun -n8 {image} sleep 100 & {SERVER}; kill -KILL $server; {WAIT}");
    assert_step_told(cluster, &run_in_time(cluster, &dies), KILLED);
    empty.assert_again(cluster, "killed");
    let mut damaged = image_bytes();
    damage(&mut damaged, 0, 1000);
    cluster.share("damaged.sqsh", &damaged).unwrap();
    let reads = format!(
        "srun -n4 --container-image=/shared/damaged.sqsh sh -c 'sleep 100 & cat /aaa/first; echo went on' & {WAIT}"
    );
    let message = "node1: /shared/damaged.sqsh: cannot read /aaa/first in it, so the container was ended: corrupt image: the gzip block at byte 96 does not decompress";
    assert_step_told(cluster, &run_in_time(cluster, &reads), message);
    empty.assert_again(cluster, "damaged");
    // A batch script: into the file that the job writes to.
    let batch = run_in_time(
        cluster,
        &format!(
            "sbatch --quiet --output=/shared/out {image} --wrap 'sleep 100'; {SERVER}; kill -KILL $server; \
             (while [ -n \"$(squeue -h -t running)\" ]; do sleep 0.1; done) & {WAIT_THEN}; cat /shared/out"
        ),
    );
    assert!(!batch.stdout.contains("late"), "{}", batch.text());
    assert_eq!(batch.stdout.matches(&format!("mizzen: {KILLED}\n")).count(), 1, "{}", batch.text());
    empty.assert_again(cluster, "a batch script");
    // Nothing is said of containers that end as they should, or with everything else.
    let orderly = run_in_time(cluster, &format!("srun -n8 {image} sh -c 'exit $SLURM_PROCID'"));
    assert_eq!((orderly.code, orderly.stderr.contains("mizzen")), (7, false), "{}", orderly.text());
    let cancelled =
        run_in_time(cluster, &format!("srun -n8 {image} sleep 100 & {SERVER}; scancel -u alice; wait $!"));
    assert!(cancelled.code != 0 && !cancelled.stderr.contains("mizzen"), "{}", cancelled.text());
    empty.assert_again(cluster, "cancelled");
    assert_eq!(cluster.slurmd_log("node1").matches("its file server").count(), 2);
}

fn image_bytes() -> Vec<u8> {
    image(&text(1_000_000), &["-comp", "gzip", "-no-fragments"])
}

fn a_step_ends_on_all_its_nodes(release: Release) {
    let spec = Spec { release, nodes: 2, ..Cluster::spec(&format!("all-nodes-{}", release.version())) };
    let cluster = start_with_busybox(spec);
    let empty = Emptiness::of(&cluster, &["node1", "node2"]);
    let output = std::thread::scope(|scope| {
        let step =
            scope.spawn(|| run_in_time(&cluster, "srun -N2 -n4 --container-image=/shared/bb.sqsh sleep 100"));
        let kill = "until pgrep -x sleep > /dev/null; do sleep 0.05; done; sleep 0.3; own=$(readlink /proc/self/ns/uts); \
                    for pid in $(pgrep -x mizzen-fuse); do [ $(readlink /proc/$pid/ns/uts) = $own ] && kill -KILL $pid; done; true";
        assert_out(&cluster.run_on("node1", User::Root, kill), 0, "");
        let begin = std::time::Instant::now();
        let output = step.join().unwrap();
        assert!(begin.elapsed().as_secs() < 6, "{:?}: {}", begin.elapsed(), output.text());
        output
    });
    assert_step_told(&cluster, &output, KILLED);
    empty.assert_again(&cluster, "on all nodes");
}

/// A program that starts others all the time is ended like any other.
#[test]
fn nothing_that_forks_is_left() {
    let cluster = with_busybox("forks");
    let forks = "i=0; while :; do (sleep 30 &); i=$((i + 1)); [ $i -lt 200 ] || sleep 0.1; done";
    let ended = cluster.run(&format!(
        "mizzen run /shared/bb.sqsh sh -c '{forks}' & sleep 0.5; pkill -KILL -u alice -x mizzen-fuse; wait $!; echo $?; sleep 1; pgrep -u alice -x sleep | wc -l"
    ));
    assert_out(&ended, 0, "137\n0\n");
}

/// The number of a mount namespace that is gone is soon another's.
#[test]
fn no_other_container_is_ended() {
    let cluster = with_busybox("others");
    let rounds = cluster.run(
        "for round in 1 2 3; do \
         mizzen run /shared/bb.sqsh sleep 60 2> /dev/null & first=$!; \
         until pgrep -u alice -x sleep > /dev/null; do sleep 0.02; done; \
         pkill -KILL -u alice -x mizzen-fuse; sleep 0.02; kill -KILL $first; wait $first; \
         for other in 1 2 3 4 5 6 7 8; do (mizzen run /shared/bb.sqsh sh -c 'sleep 1.5; echo done') & done; wait; done 2> /dev/null",
    );
    assert_eq!(rounds.stdout, "done\n".repeat(24), "{}", rounds.text());
}
