//! Copies of images on the node: when they are made, that they are whole, and what happens when they cannot be made.

use mizzen_tests::check::{assert_failed, assert_out, count, run_in_time, with_images};
use mizzen_tests::copies::{
    CACHE, TOML, assert_sound, copies, digest_of, served, signal_server, staging_cluster as cluster,
};
use mizzen_tests::images::{ImageTree, sif};
use mizzen_tests::{Cluster, SharedFs, Spec, User};

#[test]
fn the_second_start_uses_the_copy() {
    let cluster = cluster("second", TOML);
    cluster.run("cp /shared/a.sqsh /shared/own.sqsh");
    let a = "mizzen run /shared/own.sqsh cat /image";
    assert_out(&cluster.run(a), 0, "a\n");
    let first = copies(&cluster);
    let digest = digest_of(&cluster, "/shared/own.sqsh");
    assert_eq!(first, [digest.replace(':', "-")]);
    let listing = cluster.run(&format!("stat -c '%a %U %F' {CACHE} {CACHE}/sha256-*")).stdout;
    assert_eq!(listing, "700 alice directory\n400 alice regular file\n");
    // Nothing is read from the source but its first bytes.
    let read = "strace -f -y -o trace -e trace=read,pread64,splice mizzen run /shared/own.sqsh cat /image; grep -c 'shared/own.sqsh>' trace";
    let again = cluster.run(read);
    let reads: u32 = again.stdout.lines().last().unwrap().parse().unwrap();
    assert!(again.stdout.starts_with("a\n") && reads <= 3, "{}", again.text());
    assert_out(
        &cluster.run("mizzen run /shared/own.sqsh sh -c 'echo $MIZZEN_IMAGE_DIGEST'"),
        0,
        &format!("{digest}\n"),
    );
    // Without the source, or without the right to read it, the copy is of no use.
    assert_failed(
        &cluster.run("mv /shared/own.sqsh /shared/c.sqsh; mizzen run /shared/own.sqsh true"),
        125,
        "no such image",
    );
    cluster.run_as_root("mv /shared/c.sqsh /shared/own.sqsh; chmod 0 /shared/own.sqsh");
    assert_failed(&cluster.run(a), 125, "Permission denied");
    cluster.run_as_root("chmod 644 /shared/own.sqsh");
    // Another file of the same name is another image; a running container keeps what it has.
    let replaced = cluster.run(
        "mizzen run /shared/own.sqsh sh -c 'sleep 1; cat /image' & sleep 0.5; cp /shared/b.sqsh /shared/new; \
         mv /shared/new /shared/own.sqsh; mizzen run /shared/own.sqsh cat /image; wait",
    );
    assert_out(&replaced, 0, "b\na\n");
    assert_eq!(copies(&cluster).len(), 2);
    assert_sound(&cluster, "second start");
    // Another user has copies of their own.
    let bob = "mizzen run /shared/own.sqsh cat /image; stat -c '%a %U' /var/tmp/mizzen-2002; ls /var/tmp/mizzen-2001";
    let bob = cluster.run_on("ctl", User::Bob, bob);
    assert!(bob.stdout == "b\n700 bob\n" && bob.stderr.contains("Permission denied"), "{}", bob.text());
}

#[test]
fn policies_and_pins_hold() {
    let cluster = cluster("policy", TOML);
    let run = |options: &str, image: &str| cluster.run(&format!("mizzen run {options} {image} cat /image"));
    assert_out(&run("--stage=never", "/shared/a.sqsh"), 0, "a\n");
    cluster.run("cp /shared/a.sqsh local.sqsh; mizzen run local.sqsh true");
    assert!(copies(&cluster).is_empty(), "a local file is not copied");
    assert_failed(
        &run("--stage=often", "/shared/a.sqsh"),
        125,
        "--stage: \"often\" is not auto, always, never or bcast",
    );
    // The file system that statfs tells of, here NFS, Lustre and ext4. Where the copies would be on one as well, or in
    // memory, there are none.
    for (magic, when, expected) in
        [("6969", "1", 1), ("d00bd00b", "1", 1), ("53ef", "1", 0), ("6969", "1+", 0)]
    {
        let inject = format!("fstatfs:poke_exit=@arg2={magic:0<16}:when={when}");
        let told = cluster.run(&format!(
            "strace -f -o /dev/null -e trace=fstatfs -e inject={inject} mizzen run local.sqsh cat /image"
        ));
        assert_out(&told, 0, "a\n");
        assert_eq!(copies(&cluster).len(), expected, "{magic}");
        cluster.run("mizzen cache remove --all");
    }
    assert_out(&run("--stage=always", "local.sqsh"), 0, "a\n");
    assert_eq!(copies(&cluster).len(), 1);
    let squashfs = ImageTree::busybox().unwrap().squashfs(&[]).unwrap();
    cluster.share("image.sif", &sif(&squashfs)).unwrap();
    assert_out(&cluster.run("mizzen run /shared/image.sif whoami"), 0, "alice\n");
    assert_eq!(copies(&cluster).len(), 2);
    let (a, b) = (digest_of(&cluster, "/shared/a.sqsh"), digest_of(&cluster, "/shared/b.sqsh"));
    for stage in ["auto", "never"] {
        let inside = cluster.run(&format!(
            "mizzen run --stage={stage} /shared/a.sqsh@{a} sh -c 'cat /image; echo $MIZZEN_IMAGE_DIGEST'"
        ));
        assert_out(&inside, 0, &format!("a\n{a}\n"));
        let wrong = run(&format!("--stage={stage}"), &format!("/shared/a.sqsh@{b}"));
        assert_failed(&wrong, 125, &format!("/shared/a.sqsh: its content is {a}, not {b}"));
    }
    // Another image's digest is not inherited.
    let bare = cluster
        .run("MIZZEN_IMAGE_DIGEST=x mizzen run --stage=never /shared/a.sqsh sh -c 'echo ${MIZZEN_IMAGE_DIGEST-none}'");
    assert_out(&bare, 0, "none\n");
    cluster.run(
        "mkdir -p tree/bin; cp /bin/true tree/bin; cp $(ldd /bin/true | grep -o '/[^ ]*') --parents tree",
    );
    assert_failed(&run("", &format!("tree@{a}")), 125, "tree: a directory has no digest");
    let (before, none) = (copies(&cluster), "/home/alice/tree: a directory, used where it is\n");
    assert_out(&cluster.run("mizzen run --stage=always tree /bin/true && mizzen stage tree"), 0, none);
    assert_eq!(copies(&cluster), before);
    // What everybody can change meanwhile is not used without a word.
    let open = cluster.run("chmod 666 local.sqsh; mizzen run local.sqsh cat /image");
    assert_out(&open, 0, "a\n");
    let warning = "note: ctl: /home/alice/local.sqsh: everybody can write to it, also while it is used";
    assert_eq!(open.stderr.matches(warning).count(), 1, "{}", open.text());
    assert_failed(&run("", "/shared/a.sqsh@sha256:12"), 125, "no such image; tried /shared/a.sqsh@sha256:12");
    assert_failed(&cluster.run(&format!("mizzen inspect /shared/a.sqsh@{b}")), 1, "its content is");
}

#[test]
fn steps_use_one_copy() {
    let cluster = cluster("steps", TOML);
    let a = digest_of(&cluster, "/shared/a.sqsh");
    let b = digest_of(&cluster, "/shared/b.sqsh");
    let step =
        cluster.run("srun -n2 --container=/shared/a.sqsh sh -c 'echo $(cat /image) $MIZZEN_IMAGE_DIGEST'");
    assert_out(&step, 0, &format!("a {a}\n").repeat(2));
    let on_node = cluster.run_on("node1", User::Alice, &format!("ls {CACHE} | grep -c ^sha256-")).stdout;
    assert_eq!(on_node, "1\n");
    cluster.run("cp /shared/a.sqsh local.sqsh");
    let local = cluster
        .run("srun -n2 --container-stage=always --container-verbose --container=local.sqsh cat /image");
    assert_out(&local, 0, "a\na\n");
    assert!(local.stderr.contains(&a), "{}", local.text());
    assert_out(&cluster.run(&format!("srun --container=/shared/a.sqsh@{a} cat /image")), 0, "a\n");
    assert_out(
        &cluster
            .run(&format!("srun --container-image=/shared/a.sqsh@{a} --container-stage=never cat /image")),
        0,
        "a\n",
    );
    let wrong = cluster.run(&format!("srun -n2 --container=/shared/a.sqsh@{b} cat /image"));
    assert_failed(&wrong, 125, &format!("its content is {a}, not {b}"));
    assert_failed(
        &cluster.run("srun --container=/shared/a.sqsh --container-stage=now true"),
        1,
        "--container-stage: \"now\" is not auto, always, never or bcast",
    );
    // A nested step has the pin of its job.
    let nested = cluster.run(&format!(
        "printf '#!/bin/sh\\nsrun env | grep MIZZEN_IMAGE_DIGEST\\n' > job; sbatch -W -o out --container=/shared/a.sqsh@{a} job >/dev/null; cat out"
    ));
    assert_out(&nested, 0, &format!("MIZZEN_IMAGE_DIGEST={a}\n"));
}

#[test]
fn a_stalled_source_does_not_outlive_scancel() {
    let cluster = cluster("stalled", TOML);
    signal_server(&cluster, "node1", "STOP");
    let cancelled = run_in_time(
        &cluster,
        "srun --container=/shared/a.sqsh cat /image & sleep 2; begin=$EPOCHREALTIME; scancel -u alice; wait; \
         until [ -z \"$(squeue -h)\" ]; do sleep 0.1; done; end=$EPOCHREALTIME; \
         [ $((${end/./} - ${begin/./})) -lt 10000000 ] || echo late",
    );
    signal_server(&cluster, "node1", "CONT");
    assert_eq!(cancelled.stdout, "", "{}", cancelled.text());
    assert_out(&cluster.run("srun --container=/shared/a.sqsh cat /image"), 0, "a\n");
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
    // Copies and the namespaces after them, over and over: nothing of the one disturbs the other.
    let many = format!(
        "for i in $(seq {}); do rm -rf {CACHE}; mizzen run /shared/a.sqsh cat /image; done | uniq -c",
        count(40, 400)
    );
    let many = cluster.run(&many);
    assert_eq!(
        many.stdout.split_whitespace().collect::<Vec<_>>(),
        [count(40, 400).to_string().as_str(), "a"],
        "{}",
        many.text()
    );
}

#[test]
fn many_starts_make_one_copy() {
    let cluster = cluster("many", TOML);
    // Large enough that all of them meet.
    cluster.run("head -c 60000000 /dev/urandom | cat /shared/a.sqsh - > /shared/big.sqsh");
    let size: u64 = cluster.run("stat -c %s /shared/big.sqsh").stdout.trim().parse().unwrap();
    let before = served(&cluster, "ctl");
    let starts = "for i in $(seq 64); do mizzen run /shared/big.sqsh cat /image & done; wait";
    assert_out(&cluster.run(starts), 0, &"a\n".repeat(64));
    let read = served(&cluster, "ctl") - before;
    assert!(read >= size && read <= size + size / 10, "{read} bytes were read of {size}");
    assert_eq!(copies(&cluster).len(), 1);
    assert_sound(&cluster, "many starts");
}

#[test]
fn data_is_copied_like_an_image() {
    let cluster = cluster("data", TOML);
    let run = |options: &str| {
        cluster.run(&format!(
            "mizzen run {options} -m /shared/b.sqsh:/data:squashfs /shared/a.sqsh cat /image /data/image"
        ))
    };
    assert_out(&run("--stage=never"), 0, "a\nb\n");
    assert!(copies(&cluster).is_empty());
    assert_out(&run(""), 0, "a\nb\n");
    let mut expected =
        ["a", "b"].map(|name| digest_of(&cluster, &format!("/shared/{name}.sqsh")).replace(':', "-"));
    expected.sort();
    assert_eq!(copies(&cluster), expected);
    // A copy that serves as data is in use.
    let used = cluster.run(
        "mizzen run -m /shared/b.sqsh:/data:squashfs /shared/a.sqsh sleep 2 & sleep 0.7; mizzen cache remove --all; wait",
    );
    assert_eq!(used.stdout.matches("in use, kept").count(), 2, "{}", used.text());
    // `mizzen plan` only looks.
    cluster.run("mizzen cache remove --all");
    cluster.run("mizzen plan -m /shared/b.sqsh:/data:squashfs /shared/a.sqsh true");
    assert!(copies(&cluster).is_empty());
}

#[test]
fn a_source_that_changes_is_noticed() {
    let cluster = cluster("changes", TOML);
    cluster.run("head -c 12000000 /dev/urandom > noise; for i in a b; do cat /shared/$i.sqsh noise > /shared/$i.mid; done");
    // Each reader waits at each of its pieces: there is time to change the file, and to see the progress.
    let slow = |delay: u32, image: &str| {
        let inject = format!("-e trace=splice -e inject=splice:delay_enter={delay}");
        format!("strace -f -o /dev/null {inject} mizzen stage {image}")
    };
    let shown = cluster.run(&slow(50_000, "/shared/a.mid"));
    assert!(shown.stderr.contains("mizzen: ctl: /shared/a.mid: copying to the node: "), "{}", shown.text());
    let b = digest_of(&cluster, "/shared/b.mid");
    let replaced = cluster.run(&format!(
        "cp /shared/a.mid /shared/x; {} & sleep 0.8; cp /shared/b.mid /shared/y; mv /shared/y /shared/x; wait",
        slow(40_000, "/shared/x")
    ));
    assert!(replaced.stdout.contains(&format!("/shared/x: {b} copied")), "{}", replaced.text());
    let written = cluster.run(&format!(
        "cp /shared/a.mid /shared/z; (while :; do echo x >> /shared/z; sleep 0.1; done) & {}; kill %1",
        slow(20_000, "/shared/z")
    ));
    assert!(written.stderr.contains("mizzen: /shared/z: it changes while it is read"), "{}", written.text());
    assert_eq!(copies(&cluster).len(), 2);
    // Written over in its middle, or cut off, once the copy has begun: what is copied in the end is what is there.
    for change in [
        "head -c 4096 /dev/urandom | dd of=/shared/v seek=1000 bs=4096 conv=notrunc",
        "truncate -s 6000000 /shared/v",
    ] {
        let changed = cluster.run(&format!(
            "cp /shared/a.mid /shared/v; {} & sleep 0.8; {change} 2> /dev/null; wait; echo sha256:$(sha256sum < /shared/v)",
            slow(40_000, "/shared/v")
        ));
        let now = changed.stdout.lines().last().unwrap().trim_end_matches(" -");
        assert!(changed.stdout.contains(&format!("/shared/v: {now} copied")), "{change}: {}", changed.text());
    }
    assert_sound(&cluster, "changes");
    // Who finds somebody else copying waits for them, and takes over when they die.
    let dying =
        "strace -f -o /dev/null -e trace=splice -e inject=splice:delay_enter=1500000:signal=KILL:when=3";
    let waiting = cluster.run(&format!(
        "cp /shared/a.mid /shared/w; {dying} mizzen stage /shared/w & sleep 0.7; mizzen stage /shared/w; wait"
    ));
    assert_eq!(waiting.stdout.matches(" copied").count(), 1, "{}", waiting.text());
}

/// Of all who wait for a copy one tells how far it is: a bar on a terminal, a line now and then elsewhere.
#[test]
fn progress_is_shown_once() {
    let spec = Spec {
        shared: SharedFs::Fuse,
        mizzen_toml: Some(TOML.to_owned()),
        ..Cluster::spec("staging-progress")
    };
    let cluster = with_images(spec);
    cluster.run("head -c 40000000 /dev/urandom | cat /shared/a.sqsh - > /shared/slow.sqsh");
    for machine in ["ctl", "node1", "node2"] {
        let slow = "mkdir /slow; bindfs -o allow_other --read-rate=8M /run/shared-backing /slow";
        assert_out(&cluster.run_on(machine, User::Root, slow), 0, "");
    }
    let step = cluster.run("srun -N2 -n4 --container=/slow/slow.sqsh cat /image");
    assert_out(&step, 0, &"a\n".repeat(4));
    let lines: Vec<&str> = step.stderr.lines().filter(|line| line.contains("copying to the node")).collect();
    let percent = |line: &&str| {
        let state = line.strip_prefix("mizzen: node1: /slow/slow.sqsh: copying to the node: ")?;
        let (percent, rate) = state.split_once(" % (")?;
        rate.strip_suffix(" MB/s)")?.parse::<u32>().ok()?;
        percent.parse::<u32>().ok()
    };
    let percents: Vec<Option<u32>> = lines.iter().map(percent).collect();
    assert!(percents.first().is_some_and(|first| first.is_some_and(|first| (1..100).contains(&first))));
    assert!(percents.iter().all(Option::is_some), "{}", step.text());
    // Each line fits into the terminal, or it could not be renewed.
    let terminal =
        cluster.run("script -qec 'stty cols 70; mizzen stage /slow/slow.sqsh' /dev/null < /dev/null");
    let shown: Vec<&str> = terminal.stdout.split('\r').filter(|line| line.contains("MB/s")).collect();
    let fits = |line: &&str| line.trim_end_matches("\u{1b}[K").chars().count() < 70;
    assert!(shown.len() > 3 && shown.iter().all(fits), "{:?}", terminal.stdout);
    assert!(shown[0].contains(": copying to the node: [#") && shown[0].contains("-]  "), "{:?}", shown[0]);
}

/// Sites may hide who has copies.
#[test]
fn a_directory_that_nobody_can_list_will_do() {
    let toml = "stage = \"always\"\nstage_directory = \"/var/tmp/copies\"\n";
    let cluster =
        with_images(Spec { nodes: 1, mizzen_toml: Some(toml.to_owned()), ..Cluster::spec("unlisted") });
    cluster.run_on("node1", User::Root, "mkdir -m 1733 /var/tmp/copies");
    for _ in 0..2 {
        let step = cluster.run("srun -Q --container=/shared/a.sqsh cat /image");
        assert_eq!(step.stderr, "");
        assert_out(&step, 0, "a\n");
    }
    let copies = cluster.run_on(
        "node1",
        User::Alice,
        "mizzen cache list | grep -c sha256; mizzen cache prune > /dev/null; ls /var/tmp/copies",
    );
    assert!(copies.stdout == "1\n" && copies.stderr.contains("Permission denied"), "{}", copies.text());
    let other = cluster.run_on(
        "node1",
        User::Bob,
        "mizzen run /shared/a.sqsh cat /image; mizzen cache list | grep -c sha256",
    );
    assert_out(&other, 0, "a\n1\n");
}
