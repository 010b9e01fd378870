//! Copies that root makes for all users of a node, when something fails: kills, errors, sources that change, a disk
//! that fills up, two commands at once.

use mizzen_tests::check::{assert_failed, assert_out, count, run_in_time};
use mizzen_tests::copies::{CALLS, digest_of, inject};
use mizzen_tests::site::{CACHE, TOML, assert_sound, cluster, on_node, own_copies};
use mizzen_tests::{Cluster, User};

/// The copies that are not what their name says.
#[track_caller]
fn assert_none_wrong(cluster: &Cluster, what: &str) {
    let wrong = on_node(
        cluster,
        &format!(
            "cd {CACHE} 2>/dev/null && for c in sha256-*; do [ -e $c ] || continue; \
             [ sha256-$(sha256sum < $c | cut -d' ' -f1) = $c ] || echo $c; done"
        ),
    );
    assert_eq!(wrong.stdout, "", "{what}");
}

#[test]
fn kills_and_errors_leave_no_wrong_copy() {
    let cluster = cluster("kills", TOML);
    let start = "srun --quiet --container=/shared/a.sqsh cat /image";
    let stage = |strace: &str| {
        on_node(
            &cluster,
            &format!("rm -rf {CACHE}; strace -f -o /dev/null {strace} mizzen stage /shared/a.sqsh"),
        )
    };
    // After a kill no user sees more than a whole copy or none, and root's next command puts it right.
    let after_kill = |what: &str| {
        assert_none_wrong(&cluster, what);
        assert_out(&run_in_time(&cluster, start), 0, "a\n");
        own_copies(&cluster);
        let again = on_node(
            &cluster,
            &format!("mizzen stage /shared/a.sqsh; ls {CACHE} | grep -cE '^(temporary|broken)'"),
        );
        assert!(again.stdout.ends_with("\n0\n") && again.stderr.is_empty(), "{what}: {}", again.text());
        assert_sound(&cluster, what, 1);
    };
    let mut killed = 0;
    for call in CALLS.into_iter().chain(["fchmod", "ftruncate", "unlinkat", "mkdirat"]) {
        for when in 1..=count(2, 40) {
            let when = if call == "open,openat" { when * 4 } else { when };
            let staged = stage(&inject(call, &format!("signal=KILL:when={when}")));
            killed += u32::from(staged.code == 137);
            after_kill(&format!("KILL at {call} {when}"));
        }
    }
    assert!(killed >= 10, "only {killed} were killed");
    // The long form: at every system call, one after the other.
    let mut undisturbed = 0;
    for when in (1..).take_while(|_| count(0, 1) == 1) {
        let staged = stage(&format!("-e trace=all -e inject=all:signal=KILL:when={when}"));
        undisturbed = if staged.code == 0 { undisturbed + 1 } else { 0 };
        if undisturbed == 5 {
            break;
        }
        after_kill(&format!("KILL at call {when}"));
    }
    for (call, error, why) in [
        ("splice,pwrite64", "ENOSPC", "cannot write the copy: No space left on device"),
        ("splice,pwrite64", "EIO", "cannot write the copy: Input/output error"),
        ("fsync", "EIO", "Input/output error"),
        ("linkat", "EROFS", "Read-only file system"),
        ("flock", "ENOLCK", "No locks available"),
        ("fchmod", "EPERM", "Operation not permitted"),
    ] {
        let staged = stage(&inject(call, &format!("error={error}")));
        let said = staged.stderr.contains("mizzen: /shared/a.sqsh: no copy: ") && staged.stderr.contains(why);
        assert!(staged.code == 1 && said, "{call} {error}: {}", staged.text());
        let left = on_node(&cluster, &format!("ls {CACHE} | grep -E '^(sha256|temporary)'"));
        assert_eq!(left.stdout, "", "{call} {error}");
        // Users have their own.
        assert_out(&cluster.run(start), 0, "a\n");
        assert_eq!(own_copies(&cluster), 1);
    }
}

/// What was not copied completely is found out before it is copied again.
#[test]
fn an_image_that_is_not_whole_leaves_no_copy() {
    let cluster = cluster("not-whole", TOML);
    cluster.run("head -c 100000 /shared/a.sqsh > /shared/half.sqsh");
    let damaged = "mizzen: /shared/half.sqsh: truncated: the header says ";
    assert_failed(&on_node(&cluster, "mizzen stage /shared/half.sqsh"), 1, damaged);
    let left = on_node(&cluster, &format!("ls {CACHE} | grep -E '^(sha256|temporary|broken)'"));
    assert_eq!(left.stdout, "", "{}", left.text());
    // Nor do users copy it.
    assert_failed(&cluster.run("mizzen stage /shared/half.sqsh"), 1, damaged);
    let step = cluster.run("srun --container-stage=always --container=/shared/half.sqsh true");
    assert_failed(&step, 125, "mizzen: node1: /shared/half.sqsh: truncated: the header says ");
    assert_eq!(own_copies(&cluster), 0);
}

/// A slow way to /shared on the node, so that there is a copy in the making.
fn slow_source(cluster: &Cluster) {
    cluster.run_as_root("ln -s /shared /slow");
    let slow = "mkdir /slow; bindfs -o allow_other,kernel_cache --read-rate=8M /run/shared-backing /slow; pgrep -nx bindfs > /run/slow";
    assert_out(&on_node(cluster, slow), 0, "");
}

/// Waits on the node until a copy is in the making.
const COPYING: &str = "for i in $(seq 80); do [ -n \"$(ls /var/cache/mizzen/temporary-* 2>/dev/null)\" ] && break; sleep 0.1; done; sleep 0.3";

#[test]
fn of_two_commands_one_copies_and_the_other_waits() {
    let cluster = cluster("two", TOML);
    slow_source(&cluster);
    cluster.run("head -c 12000000 /dev/urandom | cat /shared/a.sqsh - > /shared/big.sqsh");
    let big = digest_of(&cluster, "/shared/big.sqsh");
    let read = || {
        on_node(&cluster, "sed -n 's/rchar: //p' /proc/$(cat /run/slow)/io")
            .stdout
            .trim()
            .parse::<f64>()
            .unwrap()
    };
    let before = read();
    let both = on_node(
        &cluster,
        &format!(
            "mizzen stage /slow/big.sqsh > one & {COPYING}; ls -l {CACHE}/temporary-* | cut -c 1-10; mizzen stage /slow/big.sqsh > two; wait; cat one two"
        ),
    );
    // What is not complete nobody else can open.
    let expected = format!("-r--------\n/slow/big.sqsh: {big} copied, 13.");
    assert!(both.code == 0 && both.stdout.starts_with(&expected), "{}", both.text());
    assert!(both.stdout.ends_with(&format!("/slow/big.sqsh: {big} was there\n")), "{}", both.text());
    let (read, size) = (read() - before, 13.0e6);
    assert!(read <= 1.2 * size, "{read} bytes were read of {size}");
    assert_sound(&cluster, "two commands", 1);
    // The one that copies dies: the other goes on.
    let taken = on_node(
        &cluster,
        &format!(
            "mizzen cache remove --all > /dev/null; (mizzen stage /slow/big.sqsh > /dev/null 2>&1 & echo $! > pid; wait) & {COPYING}; \
             (sleep 0.5; kill -9 $(cat pid)) & mizzen stage /slow/big.sqsh; ls {CACHE} | grep -c ^temporary"
        ),
    );
    assert!(taken.stdout.contains(" copied, 13.") && taken.stdout.ends_with("\n0\n"), "{}", taken.text());
    assert_sound(&cluster, "taken over", 1);
    // Copies in the making count with their whole size.
    cluster
        .write_everywhere("/etc/mizzen/mizzen.toml", &format!("{TOML}stage_max_size = \"20m\"\n"))
        .unwrap();
    cluster.run("head -c 12000000 /dev/urandom | cat /shared/b.sqsh - > /shared/other.sqsh");
    let second = on_node(
        &cluster,
        &format!(
            "mizzen cache remove --all > /dev/null; mizzen stage /slow/big.sqsh > /dev/null & {COPYING}; mizzen stage /slow/other.sqsh; echo $?; wait"
        ),
    );
    assert_failed(&second, 0, "/slow/other.sqsh: no copy: no room for 13.");
    assert_eq!(second.stdout, "1\n", "{}", second.text());
    assert_sound(&cluster, "promised", 1);
}

#[test]
fn a_source_that_changes_or_fails_does_no_harm() {
    let cluster = cluster("sources", TOML);
    slow_source(&cluster);
    let image = "head -c 16000000 noise | cat /shared/a.sqsh - > /shared/big.sqsh";
    cluster.run(&format!("head -c 16000000 /dev/urandom > noise; {image}"));
    // Somebody writes to it all the time, through a descriptor from before.
    let writer = "exec 9<>/shared/big.sqsh; for i in $(seq 40); do head -c 8192 /dev/urandom | dd of=/dev/fd/9 bs=4096 seek=$((1000 + i * 50)) conv=notrunc; sleep 0.1; done 2> /dev/null";
    let writing = cluster.command("ctl", User::Alice, &["bash", "-c", writer]).spawn();
    let staged = on_node(&cluster, "sleep 0.3; mizzen stage /slow/big.sqsh");
    let refused = staged.stderr.contains("/slow/big.sqsh: it changes while it is read");
    assert!(staged.code == 0 || refused, "{}", staged.text());
    assert!(writing.unwrap().wait().unwrap().success());
    assert_none_wrong(&cluster, "written");
    let now = digest_of(&cluster, "/shared/big.sqsh");
    let used = cluster.run("srun --container=/slow/big.sqsh sh -c 'echo $MIZZEN_IMAGE_DIGEST'");
    assert_out(&used, 0, &format!("{now}\n"));
    own_copies(&cluster);
    // It is put in another's place by rename: the copy is the new one's.
    cluster.run(image);
    let replaced = on_node(
        &cluster,
        &format!(
            "mizzen cache remove --all > /dev/null; mizzen stage /slow/big.sqsh & {COPYING}; runuser -u alice -- sh -c 'cp /shared/b.sqsh /shared/new; mv /shared/new /shared/big.sqsh'; wait"
        ),
    );
    let b = digest_of(&cluster, "/shared/b.sqsh");
    assert!(replaced.stdout.starts_with(&format!("/slow/big.sqsh: {b} copied")), "{}", replaced.text());
    // Its server dies. (What it has said of a file holds for a second.)
    assert_out(&cluster.run(&format!("{image}; sleep 1.2")), 0, "");
    let dead = on_node(
        &cluster,
        &format!(
            "mizzen stage /slow/big.sqsh & stage=$!; {COPYING}; kill -KILL $(cat /run/slow); wait $stage"
        ),
    );
    assert_failed(&dead, 1, "/slow/big.sqsh: Transport endpoint is not connected");
    assert_none_wrong(&cluster, "server killed");
    let tidy = on_node(
        &cluster,
        &format!("mizzen stage /shared/a.sqsh > /dev/null; ls {CACHE} | grep -c ^temporary"),
    );
    assert_eq!(tidy.stdout, "0\n", "{}", tidy.text());
}

#[test]
fn a_full_disk_costs_the_oldest_copies() {
    let toml = "network_file_systems = [\"fuse\"]\nstage_keep_free = \"\"\nstage_max_size = \"\"\nstage_shared = \"/small/cache\"\n";
    let cluster = cluster("full", toml);
    on_node(&cluster, "mkdir /small; mount -t tmpfs -o size=16m,mode=755 tmpfs /small");
    cluster.run("head -c 8500000 /dev/urandom > half; for i in a b; do cat /shared/$i.sqsh half > /shared/$i.big; done");
    let staged =
        on_node(&cluster, "mizzen stage /shared/a.big; mizzen stage /shared/b.big; mizzen cache list");
    assert!(
        staged.stdout.contains("b.big\n") && !staged.stdout.contains("  /shared/a.big"),
        "{}",
        staged.text()
    );
    // In use: nothing makes room for another.
    let mut step = cluster.command(
        "ctl",
        User::Alice,
        &["srun", "-Q", "--container=/shared/b.big", "sh", "-c", "touch running; sleep 4"],
    );
    let step = step.spawn();
    cluster.run("until [ -e running ]; do sleep 0.05; done");
    assert_failed(
        &on_node(&cluster, "mizzen stage /shared/a.big"),
        1,
        "/shared/a.big: no copy: no room for 9.",
    );
    assert!(step.unwrap().wait().unwrap().success());
    // What cannot have room in any case costs nobody a copy.
    on_node(&cluster, "head -c 2000000 /dev/zero > /small/fill");
    cluster.run("cat half half | cat /shared/a.sqsh - > /shared/huge");
    assert_failed(&on_node(&cluster, "mizzen stage /shared/huge"), 1, "/shared/huge: no copy: no room for 1");
    assert_eq!(on_node(&cluster, "ls /small/cache | grep -cE '^(sha256|temporary)'").stdout, "1\n");
    assert_out(&cluster.run("srun --container=/shared/b.big cat /image"), 0, "b\n");
    assert_eq!(own_copies(&cluster), 0);
}
