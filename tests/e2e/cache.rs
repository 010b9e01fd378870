//! The copies of images that a user has on a node: how many there may be, what becomes of damaged ones, and the commands
//! that look after them.

use mizzen_tests::User;
use mizzen_tests::check::{assert_failed, assert_out, count, run_in_time};
use mizzen_tests::copies::{
    CACHE, TOML, assert_sound, copies, copies_in, digest_of, staging_cluster as cluster,
};

#[test]
fn the_limits_hold() {
    let cluster = cluster("limits", TOML);
    cluster.run_as_root("mkdir /small; mount -t tmpfs -o size=64m,mode=1777 tmpfs /small");
    cluster.run("head -c 10000000 /dev/urandom > noise; for i in 1 2 3 4; do (cat /shared/a.sqsh noise; echo $i) > /shared/$i; done");
    let limit = |limits: &str| {
        let toml = format!("stage = \"always\"\nstage_directory = \"/small\"\n{limits}\n");
        cluster.write_everywhere("/etc/mizzen/mizzen.toml", &toml).unwrap();
    };
    // The images whose copies are there.
    let kept = || {
        let script = "for i in 1 2 3 4; do [ -e /small/mizzen-2001/sha256-$(sha256sum < /shared/$i | cut -d' ' -f1) ] && echo $i; done | xargs";
        cluster.run(script).stdout.trim().to_owned()
    };
    let stage = |image: u32| {
        let staged = cluster.run(&format!("mizzen stage /shared/{image}"));
        assert_eq!((staged.code, staged.stderr.as_str()), (0, ""), "{}", staged.text());
    };
    // What was not used for the longest time goes first.
    limit("stage_max_size = \"25m\"\nstage_keep_free = \"\"");
    [1, 2, 1, 3].into_iter().for_each(stage);
    assert_eq!(kept(), "1 3");
    limit("stage_max_size = \"\"\nstage_keep_free = \"20m\"");
    [2, 4].into_iter().for_each(stage);
    assert_eq!(kept(), "1 2 3 4");
    limit("stage_max_size = \"\"\nstage_keep_free = \"50%\"");
    assert_out(&cluster.run("mizzen run /shared/3 cat /image"), 0, "a\n");
    let pruned: serde_json::Value =
        serde_json::from_str(&cluster.run("mizzen cache prune --json").stdout).unwrap();
    assert_eq!((&pruned["within_limits"], kept().as_str()), (&true.into(), "2 3 4"), "{pruned}");
    assert!(pruned["freed"].as_u64().unwrap() > 10_000_000, "{pruned}");
    // Clocks that were wrong cost no copy that there is room for.
    cluster.run("set -- /small/mizzen-2001/sha256-*; touch -a -d @0 $1; touch -a -d '2100-01-01' $2; mizzen cache prune");
    assert_eq!(kept(), "2 3 4");
    // A copy that cannot have room removes no other one.
    limit("stage_max_size = \"5m\"\nstage_keep_free = \"\"");
    let refused = cluster.run("mizzen stage /shared/1");
    assert_failed(&refused, 1, "mizzen: /shared/1: no copy: no room for 1");
    assert_eq!(kept(), "2 3 4");
    // Nor has one that is larger than the user's files may be.
    limit("stage_max_size = \"\"\nstage_keep_free = \"\"");
    let limited = cluster.run("ulimit -f 1000; mizzen run /shared/1 cat /image");
    assert_out(&limited, 0, "a\n");
    let note = "note: ctl: /shared/1 is used where it is: /small/mizzen-2001: cannot write the copy: \
                File too large (your limit on the size of files: ulimit -f)";
    assert_eq!(limited.stderr.matches(note).count(), 1, "{}", limited.text());
    let nothing = cluster.run(
        "(ulimit -f 0; mizzen run --stage=never /shared/1 cat /image) 2>&1 | cat >&2; exit ${PIPESTATUS[0]}",
    );
    assert_failed(
        &nothing,
        125,
        ": File too large\nmizzen: hint: your limit on the size of files: ulimit -f",
    );
    assert_eq!(kept(), "2 3 4");
    let verified: serde_json::Value =
        serde_json::from_str(&cluster.run("mizzen cache verify --json").stdout).unwrap();
    assert_eq!((verified["copies"].as_array().unwrap().len(), &verified["good"]), (3, &true.into()));
    let removed: serde_json::Value =
        serde_json::from_str(&cluster.run("mizzen cache remove --all --json").stdout).unwrap();
    assert_eq!(removed["copies"].as_array().unwrap().len(), 3, "{removed}");
    assert_eq!(kept(), "");
}

/// Many images at once, and a cache that has seen many.
#[test]
fn many_images_are_kept_apart() {
    let cluster = cluster("images", TOML);
    let images = count(16, 64);
    cluster
        .run(&format!("for i in $(seq {images}); do (cat /shared/a.sqsh; echo $i) > /shared/$i.sqsh; done"));
    let start = format!("for i in $(seq {images}); do mizzen run /shared/$i.sqsh cat /image & done; wait");
    assert_out(&cluster.run(&start), 0, &"a\n".repeat(images as usize));
    assert_eq!(copies(&cluster).len(), images as usize);
    assert_sound(&cluster, "many images");
    // A start looks for its own source, and at none of the others.
    cluster.run(&format!(
        "cd {CACHE}; for i in $(seq {}); do echo {{}} > source-x$i.json; done",
        count(2000, 100_000)
    ));
    let looked = cluster.run(&format!(
        "strace -f -o trace -e trace=getdents,getdents64,open,openat mizzen run /shared/1.sqsh cat /image; grep -c source- trace; \
         strace -f -y -o trace -e trace=getdents64 mizzen run /shared/1.sqsh true; grep -c {CACHE} trace"
    ));
    assert_eq!(looked.stdout, "a\n1\n0\n", "{}", looked.text());
    // The next copy removes them.
    cluster.run("mizzen stage /shared/b.sqsh");
    assert_out(&cluster.run(&format!("ls {CACHE} | grep -c source-x")), 1, "0\n");
}

#[test]
fn damage_is_found() {
    let cluster = cluster("damage", TOML);
    let start = "mizzen run /shared/a.sqsh cat /image";
    cluster.run(start);
    let [copy] = copies(&cluster).try_into().unwrap();
    let copy = format!("{CACHE}/{copy}");
    for damage in [
        format!("chmod 600 {copy}"),
        format!("chmod 600 {copy}; truncate -s -1 {copy}; chmod 400 {copy}"),
        format!("chmod 600 {copy}; printf x | dd of={copy} bs=1 seek=5000 conv=notrunc; chmod 400 {copy}"),
        format!("mv {copy} x; ln -s ~/x {copy}"),
        format!("rm -f {copy}; mkdir {copy}"),
        format!("rm -rf {copy}; mkfifo {copy}"),
        format!("for m in {CACHE}/source-*.json; do echo '{{' > $m; done"),
        format!("for m in {CACHE}/source-*.json; do rm $m; mkfifo $m; done"),
    ] {
        cluster.run(&damage);
        assert_out(&run_in_time(&cluster, start), 0, "a\n");
        assert_sound(&cluster, &damage);
        assert_eq!(copies(&cluster).len(), 1, "{damage}");
    }
    // What leaves no trace in the inode is found by reading.
    assert_out(&cluster.run("mizzen cache verify | sed 's/.*: //'"), 0, "good\n");
    // A byte that no program reads: the last one of a squashfs is padding.
    let flip = || {
        cluster.run(&format!(
            "touch -r {copy} x.time; chmod 600 {copy}; truncate -s -1 {copy}; printf x >> {copy}; chmod 400 {copy}; touch -r x.time {copy}"
        ))
    };
    let pinned = format!("mizzen run /shared/a.sqsh@{} cat /image", digest_of(&cluster, "/shared/a.sqsh"));
    let note =
        |image: &str| format!("note: ctl: {image}: its copy on the node is damaged: its content is sha256:");
    // By a start that asks for the digest, also if the copy was made of another file;
    for image in ["/shared/a.sqsh", "/shared/same.sqsh"] {
        cluster.run("cp /shared/a.sqsh /shared/same.sqsh");
        flip();
        let found = cluster.run(&pinned.replace("/shared/a.sqsh", image));
        assert_out(&found, 0, "a\n");
        assert_eq!(found.stderr.matches(&note(image)).count(), 1, "{}", found.text());
        assert_sound(&cluster, image);
        assert_eq!(cluster.run(&pinned).stderr, "");
    }
    // by every start, or by none, as the site likes;
    flip();
    for (key, found) in [("never", false), ("always", true)] {
        let toml = format!("{TOML}stage_verify = \"{key}\"\n");
        cluster.write_everywhere("/etc/mizzen/mizzen.toml", &toml).unwrap();
        let run = cluster.run(if found { start } else { &pinned });
        assert_out(&run, 0, "a\n");
        assert_eq!(run.stderr.contains(&note("/shared/a.sqsh")), found, "{key}: {}", run.text());
    }
    assert_sound(&cluster, "always");
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", TOML).unwrap();
    // and by whoever looks after the copies.
    flip();
    let verified = cluster.run("mizzen cache verify");
    assert!(
        verified.code == 1 && verified.stdout.contains("broken: its content is sha256:"),
        "{}",
        verified.text()
    );
    assert_out(&cluster.run(start), 0, "a\n");
    assert_sound(&cluster, "verify");
    assert_eq!(cluster.run("mizzen cache verify").code, 0);
}

#[test]
fn a_foreign_folder_is_not_used() {
    let cluster = cluster("foreign", TOML);
    let start = "mizzen run /shared/a.sqsh cat /image";
    for make in ["mkdir -m 777", "ln -s /home/alice", "touch", "ln -s /nowhere"] {
        cluster.run_as_root(&format!("rm -rf {CACHE}*; {make} {CACHE}"));
        let run = cluster.run(start);
        assert_out(&run, 0, "a\n");
        assert_eq!(run.stderr, "", "{make}");
        assert_eq!(copies_in(&cluster, User::Alice, &format!("{CACHE}.1")).len(), 1, "{make}");
        assert!(make.starts_with("ln") || copies(&cluster).is_empty(), "{make}");
        assert_out(&cluster.run("ls"), 0, "");
    }
    // Her own, but open to others.
    cluster.run_as_root(&format!("rm -rf {CACHE}*; mkdir -m 755 {CACHE}; chown alice {CACHE}"));
    let open = cluster.run(start);
    assert_out(&open, 0, "a\n");
    let why = "has mode 0755, not 0700 (chmod 700 ";
    let note = format!("note: ctl: /shared/a.sqsh is used where it is: {CACHE}: {why}");
    assert!(open.stderr.contains(&note), "{}", open.text());
    assert!(copies(&cluster).is_empty());
    cluster.run_as_root(&format!("rm -rf {CACHE}; chmod 755 /var/tmp"));
    assert_failed(
        &cluster.run(&format!("{start} > /dev/null")),
        0,
        "cannot make the directory: Permission denied",
    );
}

#[test]
fn images_can_be_copied_beforehand_and_removed() {
    let cluster = cluster("commands", TOML);
    let (a, b) = (digest_of(&cluster, "/shared/a.sqsh"), digest_of(&cluster, "/shared/b.sqsh"));
    let staged = cluster.run("cd /shared; mizzen stage a.sqsh b.sqsh | sed 's/, .*//'; mizzen stage a.sqsh");
    assert_out(
        &staged,
        0,
        &format!("/shared/a.sqsh: {a} copied\n/shared/b.sqsh: {b} copied\n/shared/a.sqsh: {a} was there\n"),
    );
    assert_failed(&cluster.run(&format!("mizzen stage /shared/a.sqsh@{b}")), 1, "its content is");
    // Each for itself, as far as its header tells.
    cluster.run("head -c 100000 /shared/a.sqsh > half.sqsh");
    let some = cluster.run("mizzen stage /no/such half.sqsh /shared/a.sqsh");
    assert_out(&some, 1, &format!("/shared/a.sqsh: {a} was there\n"));
    assert!(
        some.stderr.starts_with("mizzen: no such image; tried /no/such\n")
            && some.stderr.contains("mizzen: /home/alice/half.sqsh: truncated: "),
        "{}",
        some.text()
    );
    cluster.run("mizzen cache remove half.sqsh");
    assert_failed(&cluster.run("mizzen cache remove --all /shared/a.sqsh"), 2, "cannot be used with");
    assert_failed(&cluster.run("mizzen cache remove"), 2, "mizzen cache remove [OPTIONS] --all\n");
    assert_failed(
        &cluster.run("mizzen run /shared/a.sqsh@sha256:12 true"),
        125,
        "hint: IMAGE@sha256:HEX takes 64 hexadecimal digits",
    );
    let listed = cluster.run("mizzen cache list --json").stdout;
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed["copies"].as_array().unwrap().len(), 2);
    assert_eq!(listed["copies"][0]["sources"][0]["path"], "/shared/a.sqsh");
    let used = cluster.run("mizzen run /shared/a.sqsh sleep 2 & sleep 0.7; mizzen cache remove /shared/a.sqsh; mizzen cache list; wait");
    assert!(
        used.stdout.contains(&format!("{a}: in use, kept")) && used.stdout.contains("in use  "),
        "{}",
        used.text()
    );
    assert_out(&cluster.run("cd /shared; mizzen cache remove a.sqsh"), 0, &format!("{a}: removed\n"));
    assert_failed(&cluster.run("mizzen cache remove a.sqsh"), 1, "a.sqsh: no copy of it is here");
    assert_out(
        &cluster.run(&format!("mizzen cache remove {b}; mizzen cache prune; ls {CACHE}")),
        0,
        &format!("{b}: removed\n0.0 MB freed, 0.0 MB kept, 0 other files removed\nroom.lock\n"),
    );
    // What cannot be removed is not said to be in use.
    assert_eq!(cluster.run("mizzen stage /shared/a.sqsh").code, 0);
    cluster.run_as_root("mount --bind /var/tmp /var/tmp; mount -o remount,bind,ro /var/tmp");
    let kept = cluster.run("mizzen cache remove --all");
    assert_out(&kept, 1, &format!("{a}: cannot be removed: Read-only file system\n"));
    assert_failed(&cluster.run("mizzen cache prune"), 1, "room.lock: cannot lock: Read-only file system");
    cluster.run_as_root("umount /var/tmp");
    let limited = cluster.run("(ulimit -f 0; mizzen cache prune; echo $? >&2) 2>&1 | cat");
    assert_out(&limited, 0, "0.0 MB freed, 1.0 MB kept, 0 other files removed\n0\n");
    // Where the file system has no nameless files a copy has a temporary name.
    cluster
        .write_everywhere("/etc/mizzen/mizzen.toml", &format!("{TOML}stage_directory = \"/shared\"\n"))
        .unwrap();
    assert_out(
        &cluster.run(
            "mizzen run --stage=always /shared/a.sqsh cat /image; ls /shared/mizzen-2001 | grep -c ^sha256",
        ),
        0,
        "a\n1\n",
    );
    assert_eq!(cluster.run("ls /shared/mizzen-2001 | grep -c ^temporary").stdout, "0\n");
}
