//! Copies of images that root keeps for all users of a node, when something fails: kills, errors, sources that hang,
//! change or go away, a disk that fills up.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test fails by panicking

use mizzen_tests::check::{assert_failed, assert_out, count, run_in_time};
use mizzen_tests::copies::{CALLS, digest_of, inject};
use mizzen_tests::shared_copies::{CACHE, TOML, assert_nobody_left, assert_sound, cluster, on_node};
use mizzen_tests::{Cluster, User};

#[test]
fn many_starts_make_one_copy_and_kills_do_no_harm() {
    let cluster = cluster("many", &format!("{TOML}stage_max_size = \"\"\n"));
    cluster.run("head -c 40000000 /dev/urandom > noise; cat /shared/a.sqsh noise > /shared/big.sqsh; cat /shared/b.sqsh noise > /shared/other.sqsh");
    // What the file system's server reads from its own disk; requests that it reads from the kernel are small. Without the
    // option every open would let the kernel forget what has just been read.
    cluster.run_as_root("ln -s /shared /counted; ln -s /shared /slow");
    on_node(
        &cluster,
        "mkdir /counted; bindfs -o allow_other,kernel_cache /run/shared-backing /counted; pgrep -nx bindfs > /run/counted",
    );
    let served = || {
        let script = "sed -n 's/rchar: //p' /proc/$(cat /run/counted)/io";
        on_node(&cluster, script).stdout.trim().parse::<f64>().unwrap()
    };
    let starts = count(16, 64);
    let before = served();
    let many = cluster.run(&format!(
        "salloc -Q -n8 bash -c 'for i in $(seq {starts}); do srun -Q --overlap -n1 --container=/counted/big.sqsh cat /image & done; wait'"
    ));
    assert_out(&many, 0, &"a\n".repeat(starts as usize));
    let (read, size) = (served() - before, 41e6);
    assert!(read >= 0.95 * size && read <= 1.1 * size, "{read} bytes were read of {size}");
    assert_sound(&cluster, "many", 1);
    // A slow source, so that there is a copy in the making.
    on_node(&cluster, "mkdir /slow; bindfs -o allow_other --read-rate=8M /run/shared-backing /slow");
    let start = "srun --container=/slow/other.sqsh cat /image";
    for (victim, note) in [
        ("mizzen-store", "other.sqsh is used where it is: the process that copies it has ended"),
        ("mizzen-keeper", "other.sqsh is used where it is: the keeper of the shared copies has ended"),
    ] {
        let step = cluster
            .command("ctl", User::Alice, &["bash", "-c", start])
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let killed = on_node(
            &cluster,
            &format!(
                "for i in $(seq 50); do [ -n \"$(ls {CACHE}/temporary-* 2>/dev/null)\" ] && break; sleep 0.1; done; sleep 0.3; pkill -KILL -x {victim} && sleep 0.3; pgrep -la 'mizzen-(keeper|store)' | grep -v {victim}; ls {CACHE} | grep -c ^sha256"
            ),
        );
        let output = step.wait_with_output().unwrap();
        let (stdout, stderr) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(stdout == "b\n" && stderr.contains(note), "{victim}: {stdout}{stderr}{}", killed.text());
        assert_sound(&cluster, victim, 1);
    }
    // Cancelled in the middle: gone at once, and the next one does it.
    let cancelled = run_in_time(
        &cluster,
        &format!(
            "{start} & sleep 1.5; scancel -u alice; wait; for i in $(seq 80); do [ -z \"$(squeue -h)\" ] && exit; sleep 0.1; done; echo still there"
        ),
    );
    assert_eq!(cancelled.stdout, "", "{}", cancelled.text());
    assert_nobody_left(&cluster, "cancelled");
    // One waits while another copies, and takes over when that one is cancelled.
    let waiting = cluster.run(&format!(
        "{start} & first=$!; sleep 1; srun --container=/slow/other.sqsh --job-name=second cat /image > second & sleep 0.7; scancel -u alice --name=cat; wait; cat second"
    ));
    assert!(waiting.stdout.ends_with("b\n"), "{}", waiting.text());
    assert!(
        waiting.stderr.contains("mizzen: node1: /slow/other.sqsh: copying to the node: "),
        "{}",
        waiting.text()
    );
    assert_sound(&cluster, "taken over", 2);
    let tidy = on_node(
        &cluster,
        &format!("mizzen cache prune > /dev/null; ls {CACHE} | grep -E '^(temporary|broken)'"),
    );
    assert_eq!(tidy.stdout, "", "{}", tidy.text());
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
}

#[test]
fn kills_and_faults_leave_no_wrong_copy() {
    let cluster = cluster("kills", TOML);
    let start = "srun --quiet --container=/shared/a.sqsh cat /image";
    let mut killed = 0;
    for call in CALLS.into_iter().chain(["sendmsg"]) {
        for when in 1..=count(1, 40) {
            // Root's command has a keeper and a storekeeper of its own; both are followed.
            let inject = inject(call, &format!("signal=KILL:when={when}"));
            let staged = on_node(
                &cluster,
                &format!(
                    "rm -rf {CACHE}; strace -f -o /tmp/trace {inject} mizzen stage /shared/a.sqsh; grep -c 'killed by SIGKILL' /tmp/trace"
                ),
            );
            killed += staged.stdout.lines().last().and_then(|line| line.parse::<u32>().ok()).unwrap_or(0);
            let what = format!("KILL at {call} {when}");
            let wrong = on_node(
                &cluster,
                &format!(
                    "cd {CACHE} && for c in sha256-*; do [ -e $c ] || continue; [ sha256-$(sha256sum < $c | cut -d' ' -f1) = $c ] || echo $c; done"
                ),
            );
            assert_eq!(wrong.stdout, "", "{what}");
            assert_out(&run_in_time(&cluster, start), 0, "a\n");
            assert_sound(&cluster, &what, 1);
        }
    }
    assert!(killed >= 6, "only {killed} were killed");
    // The long form: at every system call of each of the three, one after the other.
    let mut undisturbed = 0;
    for when in (1..).take_while(|_| count(0, 1) == 1) {
        let staged = on_node(
            &cluster,
            &format!(
                "rm -rf {CACHE}; strace -f -o /dev/null -e trace=all -e inject=all:signal=KILL:when={when} mizzen stage /shared/a.sqsh"
            ),
        );
        undisturbed = if staged.code == 0 { undisturbed + 1 } else { 0 };
        if undisturbed == 5 {
            break;
        }
        let what = format!("KILL at call {when}");
        assert_out(&run_in_time(&cluster, start), 0, "a\n");
        assert_sound(&cluster, &what, 1);
    }
    assert_nobody_left(&cluster, "killed");
    for (call, error, why) in [
        ("splice,pwrite64", "ENOSPC", "cannot write the copy: No space left on device"),
        ("splice,pwrite64", "EIO", "cannot write the copy: Input/output error"),
        ("fsync", "EIO", "Input/output error"),
        ("linkat", "EROFS", "Read-only file system"),
        ("flock", "ENOLCK", "No locks available"),
        ("chroot", "EPERM", "cannot give up root's powers: Operation not permitted"),
        ("capset", "EPERM", "cannot give up root's powers: Operation not permitted"),
    ] {
        let inject = inject(call, &format!("error={error}"));
        let staged = on_node(
            &cluster,
            &format!("rm -rf {CACHE}; strace -f -o /dev/null {inject} mizzen stage /shared/a.sqsh"),
        );
        let noted =
            staged.stderr.contains("mizzen: /shared/a.sqsh: no copy: ") && staged.stderr.contains(why);
        assert!(staged.code == 1 && noted, "{call} {error}: {}", staged.text());
        let left = on_node(&cluster, &format!("ls {CACHE} | grep -E '^(sha256|temporary)'"));
        assert_eq!(left.stdout, "", "{call} {error}");
    }
}

#[test]
fn a_full_cache_keeps_what_is_in_use() {
    let toml = "network_file_systems = [\"fuse\"]\nstage_keep_free = \"\"\nstage_max_size = \"\"\nstage_shared = \"/small/cache\"\n";
    let cluster = cluster("full", toml);
    on_node(&cluster, "mkdir /small; mount -t tmpfs -o size=16m,mode=755 tmpfs /small");
    cluster.run("head -c 8500000 /dev/urandom > half; cat /shared/a.sqsh half > /shared/one.sqsh; cat /shared/b.sqsh half > /shared/two.sqsh");
    let both = cluster.run("srun --container=/shared/one.sqsh sleep 4 & sleep 2; srun --container=/shared/two.sqsh cat /image; wait");
    assert_out(&both, 0, "b\n");
    assert!(
        both.stderr.contains("note: node1: /shared/two.sqsh is used where it is: no room for 9."),
        "{}",
        both.text()
    );
    let after = cluster.run("srun --container=/shared/two.sqsh cat /image");
    assert_out(&after, 0, "b\n");
    assert_eq!(after.stderr, "");
    let listed = on_node(&cluster, "mizzen cache list").stdout;
    assert!(listed.contains("two.sqsh (for uid 2001)") && !listed.contains("one.sqsh"), "{listed}");
    // Other files fill the disk in the middle of a copy.
    on_node(&cluster, "mizzen cache remove --all; head -c 10000000 /dev/zero > /small/fill");
    let full = cluster.run("srun --container=/shared/one.sqsh cat /image");
    assert_out(&full, 0, "a\n");
    assert!(full.stderr.contains("note: node1: /shared/one.sqsh is used where it is: "), "{}", full.text());
    assert_eq!(on_node(&cluster, "ls /small/cache | grep -cE '^(sha256|temporary)'").stdout, "0\n");
}

/// A slow way to /shared on the node, so that there is a copy in the making; its server's process is in /run/slow.
fn slow_source(cluster: &Cluster) {
    cluster.run_as_root("ln -s /shared /slow");
    let slow = "mkdir /slow; bindfs -o allow_other --read-rate=8M /run/shared-backing /slow; pgrep -nx bindfs > /run/slow";
    assert_out(&on_node(cluster, slow), 0, "");
}

/// Waits on the node until a copy is in the making.
const COPYING: &str = "for i in $(seq 80); do [ -n \"$(ls /var/cache/mizzen/temporary-* 2>/dev/null)\" ] && break; sleep 0.1; done; sleep 0.3";

#[test]
fn a_source_that_fails_or_changes_does_no_harm() {
    let cluster = cluster("sources", TOML);
    slow_source(&cluster);
    let image = "head -c 24000000 noise | cat /shared/a.sqsh - > /shared/big.sqsh";
    cluster.run(&format!("head -c 24000000 /dev/urandom > noise; {image}"));
    // Somebody writes to it all the time, through a descriptor from before.
    let writer = "exec 9<>/shared/big.sqsh; for i in $(seq 60); do head -c 8192 /dev/urandom | dd of=/dev/fd/9 bs=4096 seek=$((1000 + i * 50)) conv=notrunc; sleep 0.1; done 2> /dev/null";
    let written =
        run_in_time(&cluster, &format!("({writer}) & srun --container=/slow/big.sqsh cat /image; wait"));
    // Old or new, or not at all: never a mixture under a name that is not its own.
    let refused = written.stderr.contains("/slow/big.sqsh: it changes while it is read");
    assert!(written.code == 0 && (written.stdout == "a\n" || refused), "{}", written.text());
    let copies = on_node(&cluster, &format!("ls {CACHE} | grep -c ^sha256")).stdout.trim().parse().unwrap();
    assert_sound(&cluster, "written", copies);
    // It is put in another's place by rename: the copy is the new one's.
    let replaced = run_in_time(
        &cluster,
        &format!(
            "{image}; srun --container=/slow/big.sqsh cat /image & sleep 1.5; cp /shared/b.sqsh /shared/new; mv /shared/new /shared/big.sqsh; wait"
        ),
    );
    assert_out(&replaced, 0, "b\n");
    // Its server stops: the step can be cancelled.
    cluster.run(image);
    signal_server_of(&cluster, "STOP");
    let cancelled = run_in_time(
        &cluster,
        "srun --container=/slow/big.sqsh cat /image & sleep 2; begin=$EPOCHREALTIME; scancel -u alice; wait; \
         until [ -z \"$(squeue -h)\" ]; do sleep 0.1; done; end=$EPOCHREALTIME; \
         [ $((${end/./} - ${begin/./})) -lt 10000000 ] || echo late",
    );
    signal_server_of(&cluster, "CONT");
    assert_eq!(cancelled.stdout, "", "{}", cancelled.text());
    assert_nobody_left(&cluster, "stopped");
    // While it is copied slurmstepd is killed, or the source's server.
    let meanwhile = |script: &str| {
        std::thread::scope(|scope| {
            let step = scope.spawn(|| run_in_time(&cluster, "srun --container=/slow/big.sqsh cat /image"));
            on_node(&cluster, &format!("{COPYING}; {script}"));
            step.join().unwrap()
        })
    };
    let stepd = meanwhile(
        "pkill -KILL -x slurmstepd; sleep 0.5; pkill -KILL -u alice -x mizzen-enter; scancel -u alice",
    );
    // What srun's exit code is then, is Slurm's business.
    assert_eq!(stepd.stdout, "", "{}", stepd.text());
    assert_nobody_left(&cluster, "slurmstepd killed");
    let server = meanwhile("kill -KILL $(cat /run/slow)");
    assert_failed(&server, 125, "Transport endpoint is not connected");
    assert_nobody_left(&cluster, "server killed");
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
    assert_out(&cluster.run("srun -Q --container=/shared/a.sqsh cat /image"), 0, "a\n");
}

fn signal_server_of(cluster: &Cluster, signal: &str) {
    let told = on_node(cluster, &format!("kill -{signal} $(cat /run/slow)"));
    assert_out(&told, 0, "");
}

/// Copies in the making count with their whole size: those who begin at the same time do not fill the disk together.
#[test]
fn limits_hold_for_copies_in_the_making() {
    let cluster = cluster("promised", &format!("{TOML}stage_max_size = \"60m\"\n"));
    slow_source(&cluster);
    cluster.run("head -c 40000000 /dev/urandom > noise; for i in a b; do cat /shared/$i.sqsh noise > /shared/$i.big; done");
    let (first, second) = std::thread::scope(|scope| {
        let first = scope.spawn(|| run_in_time(&cluster, "srun -Q --container=/slow/a.big cat /image"));
        on_node(&cluster, COPYING);
        let second = run_in_time(&cluster, "srun -Q --container=/slow/b.big cat /image");
        (first.join().unwrap(), second)
    });
    assert_out(&first, 0, "a\n");
    assert_out(&second, 0, "b\n");
    let full = "note: node1: /slow/b.big is used where it is: no room for 4";
    assert!(second.stderr.contains(full), "{}", second.text());
    assert_sound(&cluster, "promised", 1);
    // Afterwards the older one makes room. A user at the same time as another gets one copy between them.
    let start = "srun -Q --container=/slow/b.big cat /image";
    let users = std::thread::scope(|scope| {
        let alice = scope.spawn(|| cluster.run(start));
        let bob = scope.spawn(|| cluster.run_on("ctl", User::Bob, start));
        [alice, bob].map(|user| user.join().unwrap())
    });
    for user in users {
        assert_out(&user, 0, "b\n");
        assert!(!user.stderr.contains("is used where it is"), "{}", user.text());
    }
    assert_sound(&cluster, "two users", 1);
    let listed = on_node(&cluster, "mizzen cache list").stdout;
    assert!(listed.contains("b.big") && !listed.contains("a.big"), "{listed}");
}

/// What a disk has lost is found before a program runs from it, if the image is asked for by its digest.
#[test]
fn a_damaged_copy_is_made_again() {
    let cluster = cluster("damaged", TOML);
    let start =
        format!("srun --container=/shared/a.sqsh@{} cat /image", digest_of(&cluster, "/shared/a.sqsh"));
    assert_out(&cluster.run(&start), 0, "a\n");
    let flip = format!(
        "cd {CACHE}; c=$(echo sha256-*); touch -r $c /tmp/t; printf x | dd of=$c bs=1 seek=5000 conv=notrunc; touch -r /tmp/t $c"
    );
    on_node(&cluster, &flip);
    let found = cluster.run(&start);
    assert_out(&found, 0, "a\n");
    let note = "note: node1: /shared/a.sqsh: its copy on the node is damaged: its content is sha256:";
    assert_eq!(found.stderr.matches(note).count(), 1, "{}", found.text());
    assert_sound(&cluster, "damaged", 1);
    let again = cluster.run(&start);
    assert_out(&again, 0, "a\n");
    assert_eq!(again.stderr, "");
}
