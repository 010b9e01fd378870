//! Copies of images that root keeps for all users of a node: one for all, for nobody who cannot read the original, and
//! with no other content than their name says, whatever a user sends to the keeper.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test fails by panicking

use mizzen_tests::check::{assert_failed, assert_out, count, run_in_time, with_images};
use mizzen_tests::copies::{CALLS, inject};
use mizzen_tests::images::c_program;
use mizzen_tests::{Cluster, Output, SharedFs, Spec, User};

const CACHE: &str = "/var/cache/mizzen";
const LAUNCHER: &str = "/usr/lib/mizzen/mizzen-enter";
/// FUSE counts as a network file system here.
const TOML: &str =
    "network_file_systems = [\"fuse\"]\nstage_keep_free = \"\"\nstage_shared = \"/var/cache/mizzen\"\n";

fn cluster(name: &str, toml: &str) -> Cluster {
    with_images(Spec {
        nodes: 1,
        shared: SharedFs::Fuse,
        mizzen_toml: Some(toml.to_owned()),
        ..Cluster::spec(&format!("shared-{name}"))
    })
}

fn on_node(cluster: &Cluster, script: &str) -> Output {
    cluster.run_on("node1", User::Root, script)
}

/// Every copy has the content that it is named by, is root's, and can be read by nobody else.
#[track_caller]
fn assert_sound(cluster: &Cluster, what: &str, copies: usize) {
    let found = on_node(
        cluster,
        &format!(
            "cd {CACHE} && for copy in sha256-*; do [ -e $copy ] || continue; \
             echo $(stat -c '%a %u' $copy) $([ sha256-$(sha256sum < $copy | cut -d' ' -f1) = $copy ] && echo good); done"
        ),
    );
    assert_eq!(found.stdout, "400 0 good\n".repeat(copies), "{what}: {}", found.text());
}

/// Root's processes have ended with the steps.
#[track_caller]
fn assert_nobody_left(cluster: &Cluster, what: &str) {
    let script = "for i in $(seq 50); do left=$(pgrep -la 'mizzen-(keeper|store)'); [ -z \"$left\" ] && exit; sleep 0.1; done; echo \"$left\"";
    assert_eq!(on_node(cluster, script).stdout, "", "{what}");
}

fn digest_of(cluster: &Cluster, image: &str) -> String {
    let sum = cluster.run(&format!("sha256sum < {image}")).stdout;
    format!("sha256:{}", sum.split(' ').next().unwrap())
}

#[test]
fn one_copy_serves_those_who_can_read_the_original() {
    let cluster = cluster("users", TOML);
    let a = digest_of(&cluster, "/shared/a.sqsh");
    let start = "srun -n2 --container=/shared/a.sqsh sh -c 'cat /image; echo $MIZZEN_IMAGE_DIGEST'";
    let expected = format!("a\n{a}\n").repeat(2);
    let sorted = |output: Output| {
        assert_eq!(output.code, 0, "{}", output.text());
        let mut lines: Vec<&str> = output.stdout.lines().collect();
        lines.sort_unstable();
        lines.join("\n")
    };
    let expected = sorted(Output { code: 0, stdout: expected, stderr: String::new() });
    assert_eq!(sorted(cluster.run(start)), expected);
    let made = on_node(&cluster, &format!("stat -c %i {CACHE}/sha256-*")).stdout;
    assert_eq!(sorted(cluster.run_on("ctl", User::Bob, start)), expected);
    assert_eq!(on_node(&cluster, &format!("stat -c %i {CACHE}/sha256-*")).stdout, made, "copied again");
    assert_sound(&cluster, "two users", 1);
    // The copy cannot be had by another way than by opening the original.
    let direct = cluster.run_on("node1", User::Bob, &format!("cat {CACHE}/sha256-* > /dev/null"));
    assert!(direct.stderr.contains("Permission denied"), "{}", direct.text());
    cluster.run_as_root("chown alice /shared/a.sqsh; chmod 600 /shared/a.sqsh");
    assert_eq!(sorted(cluster.run(start)), expected);
    let closed = cluster.run_on("ctl", User::Bob, start);
    assert!(
        closed.code != 0 && closed.stderr.contains("/shared/a.sqsh: Permission denied"),
        "{}",
        closed.text()
    );
    assert_eq!(on_node(&cluster, &format!("stat -c %i {CACHE}/sha256-*")).stdout, made, "same content");
    // A pin holds, and another content has another copy.
    let b = digest_of(&cluster, "/shared/b.sqsh");
    assert_failed(
        &cluster.run(&format!("srun --container=/shared/b.sqsh@{a} true")),
        125,
        &format!("its content is {b}, not {a}"),
    );
    let replaced =
        "cp /shared/b.sqsh new.sqsh; mv new.sqsh /shared/c.sqsh; srun --container=/shared/c.sqsh cat /image";
    assert_out(&cluster.run(replaced), 0, "b\n");
    assert_sound(&cluster, "two contents", 2);
    // By hand the user's own folder is used; so it is for local files, which are not copied.
    assert_out(
        &cluster.run("mizzen run /shared/b.sqsh cat /image; ls /var/tmp/mizzen-2001 | grep -c ^sha256"),
        0,
        "b\n1\n",
    );
    assert_out(&cluster.run("srun --container=/shared/b.sqsh --container-stage=never cat /image"), 0, "b\n");
    assert_nobody_left(&cluster, "two users");
}

#[test]
fn root_looks_after_the_copies() {
    let cluster = cluster("commands", TOML);
    let (a, b) = (digest_of(&cluster, "/shared/a.sqsh"), digest_of(&cluster, "/shared/b.sqsh"));
    let staged = on_node(
        &cluster,
        "mizzen stage /shared/a.sqsh /shared/b.sqsh | sed 's/, .*//'; mizzen stage /shared/a.sqsh",
    );
    assert_out(
        &staged,
        0,
        &format!("/shared/a.sqsh: {a} copied\n/shared/b.sqsh: {b} copied\n/shared/a.sqsh: {a} was there\n"),
    );
    assert_sound(&cluster, "staged by root", 2);
    let made = on_node(&cluster, &format!("stat -c %i {CACHE}/sha256-*")).stdout;
    assert_out(&cluster.run("srun --container=/shared/a.sqsh cat /image"), 0, "a\n");
    assert_eq!(on_node(&cluster, &format!("stat -c %i {CACHE}/sha256-*")).stdout, made, "copied again");
    let listed: serde_json::Value =
        serde_json::from_str(&on_node(&cluster, "mizzen cache list --json").stdout).unwrap();
    let first = &listed["copies"][0];
    assert_eq!((&first["digest"], &first["sources"][0]["path"]), (&a.into(), &"/shared/a.sqsh".into()));
    assert_eq!(first["sources"][0]["user"], 0);
    // Others see what there is, but not who has it from where.
    let seen: serde_json::Value =
        serde_json::from_str(&cluster.run_on("node1", User::Bob, "mizzen cache list --json").stdout).unwrap();
    assert_eq!(seen["shared"]["copies"].as_array().unwrap().len(), 2, "{seen}");
    assert_eq!(seen["shared"]["copies"][0]["sources"].as_array().unwrap().len(), 0, "{seen}");
    let used = cluster.run("srun --container=/shared/a.sqsh sleep 3 & sleep 1.5; wait");
    assert_eq!(used.code, 0, "{}", used.text());
    let kept =
        cluster.command("ctl", User::Alice, &["srun", "--container=/shared/a.sqsh", "sleep", "4"]).spawn();
    let kept_output =
        on_node(&cluster, "sleep 2; mizzen cache remove --all; mizzen cache list | head -1 | cut -c 72-");
    assert!(
        kept_output.stdout.contains("in use, kept") && kept_output.stdout.contains(&format!("{b}: removed")),
        "{}",
        kept_output.text()
    );
    assert!(kept.unwrap().wait().unwrap().success());
    for damage in [
        "chmod 600 $c",
        "truncate -s -1 $c",
        "printf x | dd of=$c bs=1 seek=5000 conv=notrunc",
        "rm $c; ln -s /etc/passwd $c",
        "chown alice $c",
        "for m in source-*.json; do echo '{' > $m; done",
    ] {
        on_node(&cluster, &format!("cd {CACHE}; c=$(echo sha256-*); {damage}"));
        assert_out(&run_in_time(&cluster, "srun --container=/shared/a.sqsh cat /image"), 0, "a\n");
        assert_sound(&cluster, damage, 1);
    }
    // What leaves no trace in the inode is found by reading.
    on_node(
        &cluster,
        &format!(
            "cd {CACHE}; c=$(echo sha256-*); touch -r $c /tmp/t; printf x | dd of=$c bs=1 seek=5000 conv=notrunc; touch -r /tmp/t $c"
        ),
    );
    assert_eq!(on_node(&cluster, "mizzen cache verify").code, 1);
    assert_out(&cluster.run("srun --container=/shared/a.sqsh cat /image"), 0, "a\n");
    assert_sound(&cluster, "verified", 1);
    // A directory that others could change is not used.
    on_node(&cluster, &format!("rm -rf {CACHE}; mkdir -m 777 {CACHE}"));
    let open = cluster.run("srun --container=/shared/a.sqsh cat /image");
    assert_out(&open, 0, "a\n");
    assert!(
        open.stderr.contains("is used where it is: /var/cache/mizzen: has mode 0777, not 0755"),
        "{}",
        open.text()
    );
    on_node(&cluster, &format!("rm -rf {CACHE}; chmod 777 /var/cache"));
    let open = cluster.run("srun --container=/shared/a.sqsh cat /image");
    assert!(open.stderr.contains("/var/cache is writable by others than root"), "{}", open.text());
}

#[test]
fn what_a_user_sends_is_not_believed() {
    let cluster = cluster("hostile", TOML);
    for (name, program) in [("ask", "ask-keeper"), ("stand-in", "stand-in")] {
        cluster.share(name, &c_program(program).unwrap()).unwrap();
    }
    cluster.run_as_root("chmod 755 /shared/ask");
    let installed = on_node(
        &cluster,
        &format!(
            "rm {LAUNCHER}; install -m 755 /shared/stand-in {LAUNCHER}; ln -s /proc/self/mounts /etc/mtab"
        ),
    );
    assert_out(&installed, 0, "");
    // What the user's own process says to the keeper before the launcher does.
    let ask = |script: &str| {
        let step = "srun --quiet --container=/shared/b.sqsh cat /image";
        let step = run_in_time(
            &cluster,
            &format!("export HOSTILE='cd /tmp; ({script}) > ~/said 2>&1; true'; {step}"),
        );
        (cluster.run("cat said").stdout, step)
    };
    let a = digest_of(&cluster, "/shared/a.sqsh").replace("sha256:", "");
    let (said, _) = ask("/shared/ask s /shared/a.sqsh");
    assert_eq!(said, format!("=1{a}\nwrite: Permission denied\nchmod: Operation not permitted\n"));
    let refused = [
        ("/shared/ask s /home/alice/own w", "!it is not open for reading alone\n"),
        ("/shared/ask s /shared/a.sqsh p", "!it is not open for reading alone\n"),
        ("/shared/ask s /shared", "!it is not a file\n"),
        ("/shared/ask s /dev/null", "!it is not a file\n"),
        ("/shared/ask s /proc/self/status", "!it lies on proc\n"),
        ("/shared/ask s /sys/kernel/notes", "!it lies on sysfs\n"),
        ("/shared/ask s x n", "!it does not come alone\n"),
        ("/shared/ask m /shared/a.sqsh", "xmizzen.toml does not let it\n"),
        // Somebody else\u{2019}s name for one\u{2019}s own bytes.
        (
            "unshare -Urm sh -c \"mount --bind /home/alice/own /shared/a.sqsh; /shared/ask s /shared/a.sqsh\"",
            "!it does not lie on a mount of the node\n",
        ),
        (
            "unshare -Urm sh -c \"mount -t tmpfs t /mnt; cp /home/alice/own /mnt/a; /shared/ask s /mnt/a\"",
            "!it does not lie on a mount of the node\n",
        ),
        (
            "mkdir m; bindfs --no-allow-other /home/alice m; /shared/ask s m/own; fusermount -u m; rmdir m",
            "!it lies on a file system that a user serves\n",
        ),
    ];
    cluster.run("echo hsqs-mine > own");
    for (script, answer) in refused {
        let (said, step) = ask(script);
        assert!(said.starts_with(answer), "{script}: {said}{}", step.text());
        assert_out(&step, 0, "b\n");
    }
    assert_sound(&cluster, "refused", 2);
    // Two descriptors, words without meaning, and more than there is room for.
    for script in [
        "/shared/ask s /shared/a.sqsh 2",
        "/shared/ask \"$(head -c 3000 /dev/zero | tr \"\\\\0\" s)\" /shared/a.sqsh",
        "/shared/ask ? /shared/a.sqsh",
    ] {
        let (said, step) = ask(script);
        assert!(!said.is_empty(), "{script}: {}", step.text());
        assert_out(&step, 0, "b\n");
    }
    // A write descriptor that is kept open changes the original, never the copy.
    let (said, step) =
        ask("cp /shared/a.sqsh /shared/w; exec 9<>/shared/w; /shared/ask s /shared/w; printf evil >&9");
    assert!(said.starts_with("=1"), "{said}{}", step.text());
    assert_sound(&cluster, "written behind the copy", 2);
    // Who locks what he was given locks nobody out.
    let lock = "rm -f said; HOSTILE='/shared/ask s /shared/a.sqsh r 5 > ~/said' srun -Q --container=/shared/b.sqsh true";
    let locker = cluster.command("ctl", User::Alice, &["bash", "-c", lock]).spawn();
    cluster.run("for i in $(seq 50); do grep -q lock: said && exit; sleep 0.1; done");
    assert!(cluster.run("cat said").stdout.ends_with("lock: done\n"));
    let other = run_in_time(&cluster, "srun --container=/shared/a.sqsh cat /image");
    assert_out(&other, 0, "a\n");
    let as_bob = cluster.run_on("ctl", User::Bob, "srun --container=/shared/a.sqsh cat /image");
    assert_out(&as_bob, 0, "a\n");
    assert!(!as_bob.stderr.contains("is used where it is"), "{}", as_bob.text());
    assert!(locker.unwrap().wait().unwrap().success());
    assert_sound(&cluster, "locked", 2);
    assert_nobody_left(&cluster, "hostile");
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
}

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
            staged.stderr.contains("/shared/a.sqsh is used where it is: ") && staged.stderr.contains(why);
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
