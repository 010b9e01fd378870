//! Copies of images that root keeps for all users of a node: one for all, for nobody who cannot read the original, and
//! with no other content than their name says, whatever a user sends to the keeper.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test fails by panicking

use mizzen_tests::check::{assert_failed, assert_out, run_in_time, with_images};
use mizzen_tests::copies::digest_of;
use mizzen_tests::images::c_program;
use mizzen_tests::shared_copies::{CACHE, TOML, assert_nobody_left, assert_sound, cluster, on_node};
use mizzen_tests::{Cluster, Output, Spec, User};

const LAUNCHER: &str = "/usr/lib/mizzen/mizzen-enter";
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
    // What it would take an hour to close is not closed: the keeper ends, and a copy that it had given out is free.
    on_node(&cluster, "ip link set lo up");
    let deaf = cluster.command("node1", User::Bob, &["/shared/ask", "listen", "60"]).spawn();
    assert_out(&on_node(&cluster, "until ss -Hltn | grep -q :7000; do sleep 0.05; done"), 0, "");
    for how in ["l", "L"] {
        let (said, step) =
            ask(&format!("ulimit -n 1024; /shared/ask s /shared/a.sqsh; /shared/ask s x {how}"));
        let last = said.lines().last().unwrap_or_default();
        assert!(last.starts_with("!it "), "{how}: {said}{}", step.text());
        assert_out(&step, 0, "b\n");
        assert_nobody_left(&cluster, how);
        let removed = on_node(&cluster, "mizzen cache remove --all");
        assert!(!removed.stdout.contains("in use"), "{how}: {}", removed.text());
    }
    let mut deaf = deaf.unwrap();
    assert_eq!(deaf.try_wait().unwrap(), None);
    deaf.kill().unwrap();
    deaf.wait().unwrap();
    assert_out(
        &cluster.run("for i in a b; do srun -Q --container=/shared/$i.sqsh cat /image; done"),
        0,
        "a\nb\n",
    );
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

/// The lines for slurm.conf's Prolog in docs/admins.md: copies are there before a job starts.
#[test]
fn a_prolog_fills_the_caches() {
    let manual = include_str!("../../docs/admins.md");
    let line = |begin: &str| {
        let found = manual.lines().find(|line| line.trim_start().starts_with(begin)).expect(begin);
        found.trim().replace("/images/tf.sqsh", "/shared/a.sqsh")
    };
    let of_user = line("runuser -u");
    let of_root = manual.split('`').find(|text| text.starts_with("mizzen stage /images/")).unwrap();
    let of_root = of_root.replace("/images/tf.sqsh", "/shared/a.sqsh");
    for (prolog, copies) in [(of_user, "/var/tmp/mizzen-2001"), (of_root, CACHE)] {
        let toml = if copies == CACHE { TOML } else { "" };
        let cluster = with_images(Spec {
            nodes: 1,
            mizzen_toml: Some(toml.to_owned()),
            slurm_conf: vec!["Prolog=/etc/slurm/prolog".to_owned()],
            slurm_files: vec![("prolog".to_owned(), format!("#!/bin/sh\n{prolog}\n"))],
            ..Cluster::spec("shared-prolog")
        });
        on_node(&cluster, "chmod 755 /etc/slurm/prolog");
        assert_out(&cluster.run("srun -Q true"), 0, "");
        let made = on_node(&cluster, &format!("ls {copies} | grep -c ^sha256"));
        assert_eq!(made.stdout, "1\n", "{}{}", made.text(), cluster.slurmd_log("node1"));
        assert!(cluster.all_idle(), "{:?}", cluster.node_states());
    }
}
