//! Copies of images on the node when something fails: kills, errors of every call, full disks, power loss, processes
//! that hang.

use mizzen_tests::User;
use mizzen_tests::check::{assert_failed, assert_out, count, run_in_time};
use mizzen_tests::copies::{
    CACHE, CALLS, TOML, assert_sound, assert_sound_in, copies, copies_in, inject, signal_server,
    staging_cluster as cluster,
};

#[test]
fn kills_leave_no_wrong_copy() {
    let cluster = cluster("kills", TOML);
    let start = "mizzen run /shared/a.sqsh cat /image";
    let mut killed = 0;
    for call in CALLS.into_iter().chain(["fchmod", "unlinkat"]) {
        for when in 1..=count(2, 40) {
            let when = if call == "open,openat" { when * 4 } else { when };
            cluster.run(&format!("rm -rf {CACHE}"));
            let run = cluster.run(&format!(
                "strace -f -o /dev/null {} {start}",
                inject(call, &format!("signal=KILL:when={when}"))
            ));
            killed += u32::from(run.code == 137);
            let what = format!("KILL at {call} {when}");
            assert_sound(&cluster, &what);
            assert_out(&run_in_time(&cluster, start), 0, "a\n");
            assert_sound(&cluster, &what);
            assert_eq!(copies(&cluster).len(), 1, "{what}");
        }
    }
    assert!(killed >= 10, "only {killed} were killed");
    // The long form: at every system call, one after the other. (Of copying alone: strace cannot look into a program that
    // runs from a file server which it holds.)
    let mut undisturbed = 0;
    for when in (1..).take_while(|_| count(0, 1) == 1) {
        cluster.run(&format!("rm -rf {CACHE}"));
        let run = cluster.run(&format!(
            "strace -f -o /dev/null -e trace=all -e inject=all:signal=KILL:when={when} mizzen stage /shared/a.sqsh"
        ));
        undisturbed = if run.code == 0 { undisturbed + 1 } else { 0 };
        if undisturbed == 5 {
            break;
        }
        let what = format!("KILL at call {when}");
        assert_sound(&cluster, &what);
        assert_out(&run_in_time(&cluster, start), 0, "a\n");
        assert_sound(&cluster, &what);
        assert_eq!(copies(&cluster).len(), 1, "{what}");
    }
    assert_out(
        &cluster
            .run("mizzen cache prune >/dev/null; ls /var/tmp/mizzen-2001 | grep -E '^(temporary|broken)'"),
        1,
        "",
    );
}

#[test]
fn failures_of_the_disk_and_of_the_server() {
    let cluster = cluster("faults", &format!("{TOML}stage_directory = \"/small\"\nstage_max_size = \"\"\n"));
    cluster.run_as_root("mkdir /small; mount -t tmpfs -o size=16m,mode=1777 tmpfs /small");
    let run = |options: &str| {
        cluster.run(&format!("{options} mizzen run --stage=always /shared/a.sqsh cat /image"))
    };
    let room = "note: ctl: /shared/big.sqsh is used where it is: no room for";
    cluster.run("head -c 20000000 /dev/urandom > noise; cat /shared/a.sqsh noise > /shared/big.sqsh; head -c 12000000 noise | cat /shared/a.sqsh - > /shared/mid.sqsh");
    let big = cluster.run("mizzen run --stage=always /shared/big.sqsh cat /image");
    assert_out(&big, 0, "a\n");
    assert!(big.stderr.contains(room), "{}", big.text());
    for (call, error) in [
        ("splice,pwrite64", "ENOSPC"),
        ("splice,pwrite64", "EDQUOT"),
        ("splice,pwrite64", "EIO"),
        ("fsync", "EIO"),
        ("linkat", "EROFS"),
        ("flock", "ENOLCK"),
    ] {
        let failed = run(&format!("strace -f -o /dev/null {}", inject(call, &format!("error={error}"))));
        assert_out(&failed, 0, "a\n");
        assert!(
            failed.stderr.contains("note: ctl: /shared/a.sqsh is used where it is"),
            "{call} {error}: {}",
            failed.text()
        );
        assert_eq!(
            cluster.run("ls /small/mizzen-2001 | grep -cE '^(sha256|temporary)'").stdout,
            "0\n",
            "{call} {error}"
        );
    }
    // A source that cannot be read has no copy, and nothing runs.
    for error in ["ESTALE", "EIO"] {
        let failed = cluster.run(&format!(
            "strace -f -o /dev/null {} mizzen run --stage=always /shared/mid.sqsh cat /image",
            inject("pread64", &format!("error={error}:when=3"))
        ));
        assert_failed(&failed, 125, "/shared/mid.sqsh: cannot read: ");
        assert_eq!(cluster.run("ls /small/mizzen-2001 | grep -cE '^(sha256|temporary)'").stdout, "0\n");
    }
    let in_place = cluster.run(&format!(
        "strace -f -o /dev/null {} mizzen run --stage=never /shared/mid.sqsh cat /image",
        inject("pread64", "error=EIO:when=2")
    ));
    assert_failed(
        &in_place,
        125,
        "/shared/mid.sqsh: cannot read: Input/output error\nmizzen: hint: its file system",
    );
    // Two images of which only one fits: the older goes, unless it is in use.
    cluster.run("mizzen cache remove --all; head -c 8500000 noise > half; cat /shared/a.sqsh half > /shared/one.sqsh; cat /shared/b.sqsh half > /shared/two.sqsh");
    let one = "mizzen run --stage=always /shared/one.sqsh";
    let two = "mizzen run --stage=always /shared/two.sqsh";
    let both =
        cluster.run(&format!("{one} sleep 3 & sleep 1; {two} cat /image; mizzen cache list --json; wait"));
    assert!(
        both.stdout.starts_with("b\n") && both.stderr.contains("two.sqsh is used where it is: no room"),
        "{}",
        both.text()
    );
    assert!(
        both.stdout.contains("\"in_use\": true") && both.stdout.contains("/shared/one.sqsh"),
        "{}",
        both.text()
    );
    let after = cluster.run(&format!("{two} cat /image; mizzen cache list"));
    assert!(after.stderr.is_empty() && !after.stdout.contains("one.sqsh"), "{}", after.text());
}

#[test]
fn errors_of_every_call_leave_no_wrong_copy() {
    let cluster = cluster("errors", TOML);
    let start = "mizzen run /shared/a.sqsh cat /image";
    let calls = [
        "mkdirat",
        "open,openat",
        "flock",
        "stat,lstat,fstat,newfstatat,statx",
        "splice",
        "madvise",
        "pread64",
        "pwrite64",
        "splice,pread64",
        "splice,pwrite64",
        "fchmod",
        "utimensat",
        "fsync",
        "linkat",
        "renameat",
        "ftruncate",
        "unlinkat",
        "fstatfs",
    ];
    let errors = ["ENOSPC", "EDQUOT", "EIO", "ESTALE", "EMFILE", "ENOMEM", "EINTR"];
    let (mut in_place, mut refused) = (0, 0);
    for (number, call) in calls.into_iter().enumerate() {
        // Each call with another error; the long form has all of all, once and from then on, at many moments.
        let chosen: Vec<&str> =
            if count(0, 1) == 1 { errors.to_vec() } else { vec![errors[number % errors.len()]] };
        for (error, when) in chosen.iter().flat_map(|error| (1..=count(1, 12)).map(move |when| (error, when)))
        {
            for when in [format!("{when}"), format!("{when}+")] {
                // Who is interrupted tries again, for ever if need be.
                if *error == "EINTR" && when.ends_with('+') {
                    continue;
                }
                let what = format!("{error} of {call} {when}");
                let inject = inject(call, &format!("error={error}:when={when}"));
                // A pipe of the user's own: the watcher opens it anew if the program is gone before it can tell.
                let run = cluster.run(&format!(
                    "rm -rf {CACHE}; (strace -f -o /dev/null {inject} {start}; exit $?) 2> >(cat >&2)"
                ));
                // With its own copy, from the source with a note, or not at all with a message; never otherwise.
                let noted = run.stderr.contains("note: ctl: /shared/a.sqsh is used where it is");
                let failed = run.code == 125 && run.stdout.is_empty() && run.stderr.contains("mizzen: ");
                // strace puts an invalid call in the place of the one that fails, and the file server's filter allows none.
                let filtered = run.stderr.contains("made a system call that its filter does not allow");
                assert!(run.code == 0 && run.stdout == "a\n" || failed || filtered, "{what}: {}", run.text());
                (in_place, refused) = (in_place + u32::from(noted), refused + u32::from(failed));
                assert_sound(&cluster, &what);
                assert_out(&run_in_time(&cluster, start), 0, "a\n");
                assert_eq!(copies(&cluster).len(), 1, "{what}");
            }
        }
    }
    assert!(in_place >= 5 && refused >= 2, "{in_place} in place, {refused} refused");
    assert_eq!(cluster.run(&format!("ls {CACHE} | grep -E '^(temporary|broken)'")).stdout, "");
}

#[test]
fn a_disk_that_fills_up_gets_a_second_chance() {
    let cluster = cluster("second-chance", TOML);
    let a = cluster.run("sha256sum < /shared/a.sqsh").stdout[..64].to_owned();
    // One write fails; those of the locks do not matter. Without threads, because strace counts the calls of each.
    let made_room = (1..=5).any(|when| {
        let run = cluster.run(&format!(
            "mizzen cache remove --all; mizzen stage /shared/b.sqsh; strace -f -o /dev/null -e trace=pwrite64,clone,clone3 \
             -e inject=clone,clone3:error=EAGAIN -e inject=pwrite64:error=ENOSPC:when={when} mizzen stage /shared/a.sqsh"
        ));
        assert!(run.stdout.contains("/shared/a.sqsh: ") && run.stderr.is_empty(), "{}", run.text());
        copies(&cluster) == [format!("sha256-{a}")]
    });
    assert!(made_room, "the older copy is still there");
    assert_sound(&cluster, "second chance");
    // Where everything is in use nothing can make room.
    let full = cluster.run(&format!(
        "mizzen run /shared/a.sqsh sleep 3 & sleep 1; \
         strace -f -o /dev/null -e trace=splice,pwrite64 -e inject=splice,pwrite64:error=ENOSPC mizzen run /shared/b.sqsh cat /image; \
         ls {CACHE} | grep ^sha256; wait"
    ));
    assert_out(&full, 0, &format!("b\nsha256-{a}\n"));
    assert!(full.stderr.contains("/shared/b.sqsh is used where it is: "), "{}", full.text());
}

#[test]
fn a_holder_that_hangs_is_not_waited_for_for_ever() {
    let cluster = cluster("holder", TOML);
    cluster.run("head -c 8000000 /dev/urandom | cat /shared/a.sqsh - > /shared/mid.sqsh");
    // The first one stops in the middle of its copy; the second one waits, and says for whom.
    let slow = "strace -f -o /dev/null -e trace=splice -e inject=splice:delay_enter=3000000";
    let stopped = format!(
        "rm -rf {CACHE}; {slow} mizzen stage /shared/mid.sqsh > /dev/null 2>&1 & while ! ls {CACHE}/*.lock; do sleep 0.05; done > /dev/null 2>&1; \
         pid=$(pgrep -n -u alice -x mizzen); kill -STOP $pid"
    );
    let start = "mizzen run /shared/mid.sqsh cat /image";
    let told = "is being copied to the node by process";
    let killed = cluster.run(&format!(
        "{stopped}; {start} 2> err & second=$!; for i in $(seq 100); do grep -q '{told}' err && break; sleep 0.1; done; \
         kill -9 $pid; begin=$EPOCHREALTIME; wait $second; end=$EPOCHREALTIME; cat err >&2; \
         [ $((${{end/./}} - ${{begin/./}})) -lt 5000000 ] || echo late"
    ));
    assert_out(&killed, 0, "a\n");
    assert!(killed.stderr.contains(&format!("note: ctl: /shared/mid.sqsh {told}")), "{}", killed.text());
    assert_sound(&cluster, "killed holder");
    // The long form: one that does nothing for a minute is given up.
    if count(0, 1) == 1 {
        cluster.run(&format!("{stopped}; nohup {start} > out 2> err & sleep 40"));
        let given_up = cluster.run(
            "for i in $(seq 50); do [ -s out ] && break; sleep 1; done; cat out; cat err >&2; pkill -9 -u alice -x mizzen",
        );
        assert_out(&given_up, 0, "a\n");
        assert!(given_up.stderr.contains("is used where it is: process "), "{}", given_up.text());
        assert!(given_up.stderr.contains(" is copying it and makes no progress"), "{}", given_up.text());
        assert_out(&run_in_time(&cluster, start), 0, "a\n");
    }
}

#[test]
fn power_loss_leaves_no_wrong_copy() {
    power_losses("power", User::Alice, "images", "/disk/mizzen-2001", "");
}

/// Root's copies have a temporary name at first; what they are made of, everybody may read.
#[test]
fn power_loss_leaves_no_wrong_copy_for_all() {
    let toml = "stage_shared = \"/disk/cache\"\n";
    power_losses("power-site", User::Root, "/local/images", "/disk/cache", toml);
}

/// The user stages images all the time, while the disk is cut off again and again.
fn power_losses(name: &str, user: User, images: &str, cache: &str, toml: &str) {
    let cluster = cluster(name, &format!("{TOML}stage_directory = \"/disk\"\nstage_max_size = \"\"\n{toml}"));
    let run = |script: &str| cluster.run_on("ctl", user, script);
    // The disk is a file behind the FUSE server. When that is stopped, what has been written is what has been written.
    let made = cluster.run_as_root(
        "truncate -s 48m /shared/disk && mkfs.ext4 -q -E lazy_itable_init=0 -J size=4 /shared/disk && mkdir /disk && \
         mount -o loop,commit=1 /shared/disk /disk && chmod 1777 /disk && sync -f /disk",
    );
    assert_eq!(made.code, 0, "{}", made.text());
    run(&format!(
        "mkdir {images}; for i in 1 2 3 4 5 6; do head -c ${{i}}500000 /dev/urandom | cat /shared/a.sqsh - > {images}/$i; done; \
         (while [ ! -e stop ]; do for i in {images}/*; do mizzen stage $i; done; mizzen cache remove --all; done; touch stopped) > /dev/null 2>&1 &",
    ));
    let losses = 20;
    let mut found = 0;
    for loss in 0..losses {
        // Not in step with the copies.
        std::thread::sleep(std::time::Duration::from_millis(40 + loss * 97 % 140));
        signal_server(&cluster, "ctl", "STOP");
        let saved =
            cluster.run_as_root(&format!("cp --sparse=always /run/shared-backing/disk /local/{loss}"));
        signal_server(&cluster, "ctl", "CONT");
        assert_eq!(saved.code, 0, "{}", saved.text());
    }
    run("touch stop; until [ -e stopped ]; do sleep 0.1; done");
    let unmounted = cluster.run_as_root("umount /disk");
    assert_eq!(unmounted.code, 0, "{}", unmounted.text());
    for loss in 0..losses {
        let mounted = cluster.run_as_root(&format!("mount -o loop /local/{loss} /disk"));
        assert_eq!(mounted.code, 0, "{}", mounted.text());
        let what = format!("power loss {loss}");
        assert_sound_in(&cluster, user, cache, &what);
        found += copies_in(&cluster, user, cache).len();
        let after = run(&format!("for i in 1 6; do mizzen stage {images}/$i; done; mizzen cache verify"));
        assert!(after.code == 0 && after.stdout.matches(": good\n").count() >= 2, "{what}: {}", after.text());
        assert_sound_in(&cluster, user, cache, &what);
        let started = cluster.run("mizzen run --stage=always /shared/a.sqsh cat /image");
        assert_out(&started, 0, "a\n");
        cluster.run_as_root(&format!("umount /disk; rm /local/{loss}"));
    }
    assert!(found >= 10, "only {found} copies were there after {losses} losses");
}
