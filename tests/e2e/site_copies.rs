//! Copies that root has made for all users of a node: who gets them, and of what they are made.

use mizzen_tests::check::{assert_failed, assert_out, run_in_time, with_images};
use mizzen_tests::copies::{digest_of, served};
use mizzen_tests::site::{CACHE, TOML, assert_sound, cluster, on_node, own_copies};
use mizzen_tests::{Cluster, SharedFs, Spec, User};

/// Makes /shared/big.sqsh, whose content is a.sqsh's with much behind it.
const BIG: &str = "head -c 8000000 /dev/urandom | cat /shared/a.sqsh - > /shared/big.sqsh";

#[test]
fn one_copy_serves_all_users() {
    let cluster = cluster("users", TOML);
    cluster.run(BIG);
    let (a, big) = (digest_of(&cluster, "/shared/a.sqsh"), digest_of(&cluster, "/shared/big.sqsh"));
    let staged = on_node(
        &cluster,
        "umask 077; mizzen stage /shared/a.sqsh /shared/big.sqsh | sed 's/, .*//'; mizzen stage /shared/a.sqsh",
    );
    let expected = format!(
        "/shared/a.sqsh: {a} copied\n/shared/big.sqsh: {big} copied\n/shared/a.sqsh: {a} was there\n"
    );
    assert_out(&staged, 0, &expected);
    assert_eq!(staged.stderr, "");
    assert_sound(&cluster, "staged", 2);
    let modes = on_node(
        &cluster,
        &format!("cd {CACHE}; stat -c '%a %u' . source-*.json | sort -u; stat -c '%a %u' *.lock | sort -u"),
    );
    assert_out(&modes, 0, "644 0\n755 0\n600 0\n");
    // Beside its header nothing is read of the original, and nobody makes a folder.
    let before = served(&cluster, "node1");
    let start = "srun -n2 --container=/shared/big.sqsh --container-mounts=/shared/a.sqsh:/data:squashfs \
                 sh -c 'cat /image /data/image; echo $MIZZEN_IMAGE_DIGEST'";
    for user in [User::Alice, User::Bob] {
        let ran = cluster.run_on("ctl", user, start);
        assert_eq!(ran.stderr, "");
        let mut lines: Vec<&str> = ran.stdout.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, ["a", "a", "a", "a", &*big, &*big], "{}", ran.text());
    }
    let by_hand = "mizzen run /shared/big.sqsh cat /image; mizzen stage /shared/big.sqsh";
    let by_hand = cluster.run_on("node1", User::Bob, by_hand);
    assert_out(&by_hand, 0, &format!("a\n/shared/big.sqsh: {big} is among the site's copies\n"));
    let pinned = format!("srun --container=/shared/big.sqsh@{big} cat /image");
    assert_out(&cluster.run(&pinned), 0, "a\n");
    let read = served(&cluster, "node1") - before;
    assert!(read < 500_000, "{read} bytes");
    assert_out(&on_node(&cluster, "ls /var/tmp | grep -c mizzen; true"), 0, "0\n");
    let wrong = cluster.run(&format!("srun --container=/shared/big.sqsh@{a} true"));
    assert_failed(&wrong, 125, &format!("its content is {big}, not {a}"));
    // Only where a copy is wanted at all, and only on the node that has it.
    let before = served(&cluster, "node1");
    let never = cluster.run("srun --container=/shared/big.sqsh --container-stage=never cat /image");
    assert_out(&never, 0, "a\n");
    assert!(served(&cluster, "node1") - before > 100_000);
    assert_out(
        &cluster.run("mizzen run /shared/a.sqsh cat /image; ls /var/tmp | grep -c mizzen"),
        0,
        "a\n1\n",
    );
    // What is not network is not staged by default; but if it is to be, the site's copy serves.
    let local = "cp /shared/b.sqsh /local/b.sqsh; mizzen stage /local/b.sqsh > /dev/null; rm -f /tmp/read; ls /var/tmp | grep -c mizzen";
    assert_eq!(on_node(&cluster, local).stdout, "0\n");
    cluster.run_as_root("cp /shared/b.sqsh /local/b.sqsh");
    let always = cluster.run("srun --container-stage=always --container=/local/b.sqsh cat /image");
    assert_out(&always, 0, "b\n");
    assert_eq!(own_copies(&cluster), 0, "{}", always.text());
    let seen = cluster.run_on("node1", User::Bob, "mizzen cache list --json");
    let seen: serde_json::Value = serde_json::from_str(&seen.stdout).unwrap();
    assert_eq!(seen["shared"]["copies"].as_array().unwrap().len(), 3, "{seen}");
    assert_eq!(seen["copies"].as_array().unwrap().len(), 0, "{seen}");
    let own: serde_json::Value =
        serde_json::from_str(&on_node(&cluster, "mizzen cache list --json").stdout).unwrap();
    assert_eq!((own["copies"].as_array().unwrap().len(), &own["directory"]), (3, &CACHE.into()), "{own}");
}

/// Gives a file an access list that shuts one user out, as setfacl does: user::rw- user:bob:--- group::r-- mask::r-- other::r--
const DENY_BOB: &str = r#"perl -e 'my $list = pack("V (v v V)5", 2, 1, 6, ~0, 2, 0, 2002, 4, 4, ~0, 16, 4, ~0, 32, 4, ~0);
    my ($path, $name) = ("/local/open/listed", "system.posix_acl_access");
    syscall(188, $path, $name, $list, length $list, 0) == 0 or die "setxattr: $!\n"'"#;

#[test]
fn only_what_everybody_may_read_is_copied() {
    let cluster = cluster("readable", TOML);
    let prepared = on_node(
        &cluster,
        "cd /local; mkdir -p open closed/below open/between; chmod 755 open; chmod 750 closed; \
         cp /shared/b.sqsh open/image; cp /shared/b.sqsh open/private; chmod 640 open/private; \
         cp /shared/b.sqsh closed/below/image; ln -s ../closed/below/image open/to-closed; \
         ln -s /local/open/image closed/to-open; ln -s ../closed/to-open open/through-closed; \
         cp /shared/b.sqsh open/not-group; chmod 604 open/not-group; cp /shared/b.sqsh open/listed; \
         mkfifo open/fifo; mkdir open/tree; cp -r /bin open/tree/bin; head -c 2000 /shared/b.sqsh > open/cut",
    );
    assert_eq!(prepared.code, 0, "{}", prepared.text());
    assert_out(&on_node(&cluster, DENY_BOB), 0, "");
    let closed = "the directory /local/closed is closed to others (mode 0750)";
    for (image, why, hint) in [
        ("/local/open/private", "it is closed to others (mode 0640)", "chmod go+r /local/open/private"),
        (
            "/local/open/not-group",
            "it is closed to its group (mode 0604)",
            "chmod go+r /local/open/not-group",
        ),
        ("/local/open/listed", "it has an access list", "setfacl -b /local/open/listed"),
        ("/local/closed/below/image", closed, "chmod go+x /local/closed"),
        // What a link leads to may not be for its maker to open.
        ("/local/open/to-closed", closed, "a symbolic link leads to /local/closed; users"),
        ("/local/open/through-closed", closed, "a symbolic link leads to /local/closed; users"),
    ] {
        // The others are copied all the same.
        let staged =
            on_node(&cluster, &format!("mizzen cache remove --all; mizzen stage {image} /shared/a.sqsh"));
        assert_failed(
            &staged,
            1,
            &format!("mizzen: {image}: no copy for all users: {why}\nmizzen: hint: {hint}"),
        );
        assert!(staged.stdout.contains("/shared/a.sqsh: sha256:"), "{}", staged.text());
        assert_sound(&cluster, image, 1);
    }
    let fifo = on_node(&cluster, "mizzen stage /local/open/fifo");
    assert_failed(&fifo, 1, "/local/open/fifo: not an image (is a FIFO)");
    assert_failed(&on_node(&cluster, "mizzen stage /local/open/cut"), 1, "/local/open/cut: ");
    assert_out(
        &on_node(&cluster, "mizzen stage /local/open/tree; mizzen stage /local/open/image | sed 's/: .*//'"),
        0,
        "/local/open/tree: a directory, used where it is\n/local/open/image\n",
    );
    // Who has it open for writing could change it unseen.
    let holder = on_node(
        &cluster,
        "cp /shared/a.sqsh /local/held; (exec 9<>/local/held; sleep 30) & sleep 0.3; mizzen stage /local/held; \
         kill $!; wait 2>/dev/null; sleep 0.1; mizzen stage /local/held | sed 's/.*sha/sha/; s/:.*//'",
    );
    assert_failed(&holder, 0, "/local/held: no copy for all users: somebody has it open for writing");
    assert!(holder.stdout.ends_with("sha256\n"), "{}", holder.text());
    // What a user serves has whatever identity the user likes.
    on_node(&cluster, "grep -q ^user_allow_other /etc/fuse.conf || echo user_allow_other >> /etc/fuse.conf");
    let mount = "mkdir /tmp/mine /tmp/m; chmod 755 /tmp/mine; cp /shared/a.sqsh /tmp/mine; bindfs -o allow_other /tmp/mine /tmp/m";
    assert_out(&cluster.run_on("node1", User::Alice, mount), 0, "");
    let served = on_node(&cluster, "mizzen stage /tmp/m/a.sqsh");
    assert_failed(&served, 1, "no copy for all users: it lies on a file system that a user serves");
    // A user's own copies have no such conditions.
    let own =
        cluster.run_on("node1", User::Alice, "cp /shared/b.sqsh ~/own; chmod 600 ~/own; mizzen stage ~/own");
    assert!(own.code == 0 && own.stdout.contains(" copied, "), "{}", own.text());
}

/// A user who follows the path sees another file than the one that root has copied.
#[test]
fn a_replaced_original_has_another_copy() {
    let cluster = cluster("replaced", TOML);
    let start = "srun --container=/shared/c.sqsh cat /image";
    let stage = || {
        let staged = on_node(&cluster, "mizzen stage /shared/c.sqsh");
        assert_eq!(staged.code, 0, "{}", staged.text());
    };
    cluster.run("cp /shared/a.sqsh /shared/c.sqsh");
    stage();
    assert_out(&cluster.run(start), 0, "a\n");
    assert_eq!(own_copies(&cluster), 0);
    for (change, content) in [
        ("cp /shared/b.sqsh /shared/new; mv /shared/new /shared/c.sqsh", "b\n"),
        ("cat /shared/a.sqsh > /shared/c.sqsh", "a\n"),
        ("touch -d yesterday /shared/c.sqsh", "a\n"),
        // The same size and time of modification.
        ("touch -r /shared/c.sqsh t; cat /shared/b.sqsh > /shared/c.sqsh; touch -r t /shared/c.sqsh", "b\n"),
    ] {
        cluster.run(change);
        let own = cluster.run(start);
        assert_out(&own, 0, content);
        assert_eq!((own_copies(&cluster), &*own.stderr), (1, ""), "{change}");
        stage();
        assert_out(&cluster.run(start), 0, content);
        assert_eq!(own_copies(&cluster), 0, "{change}");
    }
    // Another file in its place, in a mount namespace of the job's own.
    let other = "cp /shared/a.sqsh /local/mine; unshare -m sh -c 'mount --bind /local/mine /shared/c.sqsh; \
                 runuser -u alice -- mizzen run --stage=always /shared/c.sqsh cat /image'";
    assert_out(&on_node(&cluster, other), 0, "a\n");
    assert_eq!(own_copies(&cluster), 1);
    assert_sound(&cluster, "replaced", 2);
}

#[test]
fn damaged_copies_are_not_used() {
    let cluster = cluster("damaged", TOML);
    let start =
        format!("srun --container=/shared/a.sqsh@{} cat /image", digest_of(&cluster, "/shared/a.sqsh"));
    let flip =
        "touch -r $c /tmp/t; printf x | dd of=$c bs=1 seek=5000 conv=notrunc 2>/dev/null; touch -r /tmp/t $c";
    for (damage, why) in [
        ("chmod 600 $c", "Permission denied"),
        ("chmod 644 $c", "it is of another mode"),
        ("chmod 600 $c; truncate -s -1 $c; touch -d @1 $c; chmod 444 $c", "it is of another size"),
        ("printf x | dd of=$c bs=1 seek=5000 conv=notrunc 2>/dev/null", "it is written to since it was made"),
        ("rm $c; ln -s /etc/passwd $c", "Too many levels of symbolic links"),
        ("rm $c; mkfifo -m 444 $c", "it is not a file"),
        ("chown alice $c", "it is of another owner"),
        (flip, "it is damaged: its content is sha256:"),
        // Without a word: as if there was none.
        ("rm $c", ""),
        ("for m in source-*.json; do echo '{' > $m; done", ""),
        ("chown alice source-*.json", ""),
    ] {
        assert_eq!(on_node(&cluster, "mizzen stage /shared/a.sqsh").code, 0, "{damage}");
        assert_sound(&cluster, damage, 1);
        on_node(&cluster, &format!("cd {CACHE}; c=$(echo sha256-*); {damage}"));
        let ran = run_in_time(&cluster, &start);
        assert_out(&ran, 0, "a\n");
        assert_eq!(own_copies(&cluster), 1, "{damage}: {}", ran.text());
        let note = format!("mizzen: note: node1: /shared/a.sqsh: the site's copy {CACHE}/sha256-");
        if why.is_empty() {
            assert_eq!(ran.stderr, "", "{damage}");
        } else {
            assert!(
                ran.stderr.starts_with(&note) && ran.stderr.contains(&format!(" is not used: {why}")),
                "{damage}: {}",
                ran.text()
            );
        }
        let verified = on_node(&cluster, "mizzen cache verify");
        assert_eq!(verified.code, i32::from(!why.is_empty()), "{damage}: {}", verified.text());
        on_node(&cluster, "mizzen cache prune");
    }
    assert_eq!(on_node(&cluster, "mizzen stage /shared/a.sqsh").code, 0);
    assert_out(&cluster.run(&start), 0, "a\n");
    assert_eq!(own_copies(&cluster), 0);
}

#[test]
fn a_directory_that_others_can_change_is_not_used() {
    let cluster = cluster("directory", TOML);
    for (damage, users, roots) in [
        (
            format!("chmod 777 {CACHE}"),
            "is writable by others than root (mode 0777)",
            "has mode 0777, not 0755",
        ),
        (format!("chmod 1777 {CACHE}"), "is not root's alone (uid 0, mode 1777)", "has mode 1777, not 0755"),
        (
            format!("chown alice {CACHE}"),
            "belongs to uid 2001, not to root",
            "belongs to uid 2001, not to root",
        ),
        (format!("mv {CACHE} /tmp/x; ln -s /tmp/x {CACHE}"), "is not a directory", "is not a directory"),
        (format!("rm -rf {CACHE}; touch {CACHE}"), "is not a directory", "is not a directory"),
        (
            "chmod 777 /var/cache".to_owned(),
            "/var/cache is writable by others than root",
            "/var/cache is writable by others than root",
        ),
    ] {
        let reset = format!("rm -rf {CACHE} /tmp/x; chmod 755 /var/cache; mizzen stage /shared/a.sqsh");
        let reset = on_node(&cluster, &reset);
        assert_eq!(reset.code, 0, "{damage}: {}", reset.text());
        on_node(&cluster, &damage);
        let ran = cluster.run("srun --container=/shared/a.sqsh cat /image");
        assert_out(&ran, 0, "a\n");
        let noted = ran.stderr.contains("note: node1: the site's copies are not used: ")
            && ran.stderr.contains(users);
        assert!(noted, "{damage}: {}", ran.text());
        assert_eq!(own_copies(&cluster), 1, "{damage}");
        for command in ["stage /shared/a.sqsh", "cache verify", "cache prune"] {
            assert_failed(&on_node(&cluster, &format!("mizzen {command}")), 1, roots);
        }
    }
    // There is nothing to say where there is nothing yet.
    on_node(&cluster, &format!("chmod 755 /var/cache; rm -rf {CACHE}"));
    let ran = cluster.run("srun --container=/shared/a.sqsh cat /image");
    assert_eq!((ran.stdout.as_str(), ran.stderr.as_str()), ("a\n", ""));
}

#[test]
fn a_retired_key_names_what_is_there_instead() {
    let cluster = cluster("retired", &format!("{TOML}[mount]\nsquashfs = \"auto\"\nowners = [0]\n"));
    let refused = cluster.run("srun --container=/shared/a.sqsh cat /image");
    assert_failed(&refused, 1, "/etc/mizzen/mizzen.toml:4: [mount] is gone: ");
    assert!(
        refused.stderr.contains("(docs/admins.md, \"Site mounts\") and name the directory"),
        "{}",
        refused.text()
    );
    assert_failed(&on_node(&cluster, "mizzen check-config"), 1, "mizzen.toml:4: [mount] is gone: ");
    assert_out(&cluster.run("srun echo no container"), 0, "no container\n");
}

/// The lines for slurm.conf's Prolog in docs/admins.md: copies are there before a job starts.
#[test]
fn a_prolog_fills_the_caches() {
    let manual = include_str!("../../docs/admins.md");
    let is_line = |line: &&str| line.contains("runuser -u") && line.contains("/mizzen stage ");
    let of_user = manual.lines().find(is_line).unwrap().replace("/images/tf.sqsh", "/shared/a.sqsh");
    let of_root = manual.split('`').find(|text| text.starts_with("mizzen stage /images/")).unwrap();
    let of_root = of_root.replace("/images/tf.sqsh", "/shared/a.sqsh");
    for (prolog, copies) in [(of_user, "/var/tmp/mizzen-2001"), (of_root, CACHE)] {
        let toml = if copies == CACHE { TOML } else { "" };
        let cluster = with_images(Spec {
            nodes: 1,
            mizzen_toml: Some(toml.to_owned()),
            slurm_conf: vec!["Prolog=/etc/slurm/prolog".to_owned()],
            slurm_files: vec![("prolog".to_owned(), format!("#!/bin/sh\n{prolog}\n"))],
            ..Cluster::spec("site-prolog")
        });
        on_node(&cluster, "chmod 755 /etc/slurm/prolog");
        assert_out(&cluster.run("srun -Q true"), 0, "");
        let made = on_node(&cluster, &format!("ls {copies} | grep -c ^sha256"));
        assert_eq!(made.stdout, "1\n", "{}{}", made.text(), cluster.slurmd_log("node1"));
        assert!(cluster.all_idle(), "{:?}", cluster.node_states());
    }
}

#[test]
fn a_job_with_mounts_of_its_own_uses_them_too() {
    let cluster = with_images(Spec {
        nodes: 1,
        shared: SharedFs::Fuse,
        one_cpu: true,
        mizzen_toml: Some(TOML.to_owned()),
        slurm_conf: vec!["JobContainerType=job_container/tmpfs".to_owned(), "PrologFlags=Contain".to_owned()],
        slurm_files: vec![(
            "job_container.conf".to_owned(),
            "AutoBasePath=true\nBasePath=/local\n".to_owned(),
        )],
        ..Cluster::spec("site-own-tmp")
    });
    assert_eq!(on_node(&cluster, "mizzen stage /shared/a.sqsh").code, 0);
    let before = served(&cluster, "node1");
    let own = "salloc -Q bash -c 'srun -Q touch /tmp/private; srun -Q --container=/shared/a.sqsh sh -c \"cat /image; ls /tmp\"'";
    assert_out(&cluster.run(own), 0, "a\nprivate\n");
    let read = served(&cluster, "node1") - before;
    assert!(read < 200_000, "{read} bytes");
    assert_eq!(own_copies(&cluster), 0);
}
