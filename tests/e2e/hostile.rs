//! Images and files that are broken or that mean harm: a clear message, and nothing of the host is touched.

use mizzen_tests::Cluster;
use mizzen_tests::check::{count, machine, with_busybox};
use mizzen_tests::images::{ImageTree, sif};
use mizzen_tests::trace::{STRACE, escapes, is_complete};

use End::{Refused, Runs, Strays, Without};

/// Files of the host that a hostile image would like to reach, with their content and times.
fn victims(cluster: &Cluster) -> String {
    cluster.run_as_root("cd /; find etc root home usr/local opt srv mnt media -xdev | sort | xargs -d '\\n' stat -c '%n %s %Y %Z %f %i'; md5sum etc/passwd etc/shadow etc/hosts").stdout
}

#[track_caller]
fn refused(cluster: &Cluster, image: &str, message: &str) {
    let run = cluster.run(&format!("timeout 10 mizzen run {image} touch /tmp/ran"));
    assert_eq!(run.code, 125, "{image}: {}", run.text());
    assert_eq!(run.stderr.matches(message).count(), 1, "{image}: expected {message}\n{}", run.text());
    assert!(run.stderr.lines().count() <= 2, "one message and a hint: {}", run.text());
    assert_eq!(cluster.run("ls /tmp/ran").stdout, "");
}

#[test]
fn what_is_not_an_image_is_named() {
    let cluster = machine("not-images");
    cluster.run("cd /tmp; mkfifo fifo; (echo '<!DOCTYPE html><html>'; head -c 200 /dev/zero | tr '\\0' ' ') > html; : > empty; echo x > short; cp /bin/ls elf; tar cf tar /etc/hostname; \
                 gzip < html > gz; mkdir dir; ln -s loop loop; ln -s nowhere dangling; printf '#!/bin/sh\\necho\\n' > script; \
                 head -c 4096 /dev/zero > zeros; echo '{\"a\":1}' > json; echo secret > secret; chmod 0 secret; mkdir oci; echo '{}' > oci/oci-layout");
    for (image, message) in [
        ("/tmp/fifo", "/tmp/fifo: not an image (is a FIFO)"),
        ("/dev/zero", "/dev/zero: not an image (is a character device)"),
        ("/tmp/html", "/tmp/html: not an image (starts with \"<!DO\", looks like HTML)"),
        ("/tmp/empty", "/tmp/empty: not an image (empty"),
        ("/tmp/short", "/tmp/short: not an image"),
        ("/tmp/elf", "looks like"),
        ("/tmp/tar", "looks like tar"),
        ("/tmp/gz", "looks like gzip"),
        ("/tmp/script", "looks like"),
        ("/tmp/zeros", "/tmp/zeros: not an image"),
        ("/tmp/json", "looks like JSON"),
        ("/tmp/dir", "/tmp/dir: not an image"),
        ("/tmp/oci", "OCI"),
        ("/tmp/loop", "/tmp/loop: Too many levels of symbolic links"),
        ("/tmp/dangling", "hint: it is a symbolic link to nowhere, which is not there on this node"),
        ("/tmp/nothing", "no such image; tried /tmp/nothing"),
        ("/tmp/secret", "/tmp/secret: Permission denied"),
        ("https://x", "cannot fetch images from https://"),
    ] {
        refused(&cluster, image, message);
    }
}

#[test]
fn broken_images_are_refused() {
    let cluster = machine("broken");
    let image = ImageTree::busybox().unwrap().squashfs(&["-comp", "gzip"]).unwrap();
    let put = |name: &str, bytes: &[u8]| cluster.share(name, bytes).unwrap();
    for length in [4, 95, 96, 4096, image.len() / 2, image.len() - 4096] {
        let path = put("cut.sqsh", &image[..length]);
        refused(&cluster, &path, "/shared/cut.sqsh: ");
    }
    put("cut.sqsh", &image[..image.len() / 2]);
    refused(&cluster, "/shared/cut.sqsh", "truncated: the header says");
    // Offsets in the superblock: compressor, version, block size, inode table, and so on.
    for (name, at, bytes, message) in [
        ("compressor", 20, &[9, 0][..], "compressed with method 9"),
        ("version", 28, &[3, 0][..], "squashfs 3.0"),
        ("block-size", 12, &[0, 0, 32, 0][..], "the block size in the header is 2097152"),
        ("root", 32, &[255; 8][..], ".sqsh: corrupt image: "),
        ("used", 40, &[255; 8][..], "truncated"),
        ("ids", 26, &[255, 255][..], ".sqsh: corrupt image: "),
        ("id-table", 48, &[255; 8][..], ".sqsh: corrupt image: "),
        ("inode-table", 64, &[255; 8][..], ".sqsh: corrupt image: "),
        ("directory-table", 72, &[255; 8][..], ".sqsh: corrupt image: "),
    ] {
        let mut broken = image.clone();
        broken[at..at + bytes.len()].copy_from_slice(bytes);
        let path = put(&format!("{name}.sqsh"), &broken);
        refused(&cluster, &path, message);
    }
    let good = sif(&image);
    refused(&cluster, &put("cut.sif", &good[..good.len() - 1000]), "/shared/cut.sif: ");
    refused(&cluster, &put("header.sif", &good[..100]), "/shared/header.sif: ");
    let mut encrypted = good.clone();
    let extra = 4096 + 585 - 384;
    encrypted[extra] = 5;
    refused(&cluster, &put("encrypted.sif", &encrypted), "an encrypted system partition");
    let mut none = good;
    none[4096 + 4] = 0;
    refused(&cluster, &put("none.sif", &none), "/shared/none.sif: ");
}

#[test]
fn foreign_programs_are_named() {
    let cluster = machine("foreign");
    let tree = ImageTree::busybox().unwrap();
    let mut arm = std::fs::read("/bin/busybox").unwrap();
    arm[18] = 183; // the machine in the ELF header: aarch64
    std::fs::write(tree.path("bin/busybox"), arm).unwrap();
    cluster.share("arm.sqsh", &tree.squashfs(&[]).unwrap()).unwrap();
    let started = cluster.run("mizzen run /shared/arm.sqsh true");
    assert_eq!(started.code, 126, "{}", started.text());
    assert!(
        started.stderr.contains("mizzen: /bin/true: made for aarch64, this node is x86_64"),
        "{}",
        started.text()
    );
    // Where the maker says so, nothing has to be started to find out.
    std::fs::create_dir(tree.path(".mizzen")).unwrap();
    std::fs::write(tree.path(".mizzen/config.json"), "{\"architecture\": \"arm64\"}").unwrap();
    cluster.share("oci.sqsh", &tree.squashfs(&[]).unwrap()).unwrap();
    refused(&cluster, "/shared/oci.sqsh", "/shared/oci.sqsh: made for aarch64, this node is x86_64");
}

#[test]
fn links_in_an_image_lead_nowhere_but_into_it() {
    let cluster = machine("links");
    cluster
        .run_as_root("mkdir -p /opt/victim; echo untouched > /opt/victim/file; chmod -R a+rwX /opt/victim");
    let before = victims(&cluster);
    let run = |name: &str, change: &dyn Fn(&ImageTree), options: &str, command: &str| {
        let tree = ImageTree::busybox().unwrap();
        change(&tree);
        cluster.share(&format!("{name}.sqsh"), &tree.squashfs(&[]).unwrap()).unwrap();
        cluster.run(&format!("timeout 10 mizzen run {options} /shared/{name}.sqsh {command}"))
    };
    let link =
        |path: &'static str, target: &'static str| move |tree: &ImageTree| tree.link(path, target).unwrap();
    // /etc leads to the root: nothing may be mounted on what /etc/hosts then means.
    let etc_root = run("etc-root", &link("etc", "/"), "", "cat /hosts");
    assert_eq!(etc_root.code, 0, "the files appear where the image says: {}", etc_root.text());
    for (name, path, target) in [
        ("proc-etc", "proc", "/etc"),
        ("sys-proc", "sys", "/proc"),
        ("dev-tmp", "dev", "tmp"),
        ("proc-self", "proc", "/proc/self/root"),
    ] {
        let run = run(name, &link(path, target), "", "true");
        assert_eq!(run.code, 125, "{name}: {}", run.text());
        assert!(run.stderr.contains("in the image"), "{name}: {}", run.text());
    }
    for (name, path) in [("proc-file", "proc"), ("dev-file", "dev"), ("tmp-file", "tmp")] {
        let change = |tree: &ImageTree| {
            tree.remove(path);
            tree.file(path, "a file").unwrap();
        };
        let run = run(name, &change, "", "true");
        assert_eq!(run.code, 125, "{name}: {}", run.text());
        assert!(
            run.stderr.contains(&format!("cannot mount a directory on /{path}, which is not a directory")),
            "{name}: {}",
            run.text()
        );
    }
    let tmp_root = run("tmp-root", &link("tmp", "/"), "", "true");
    assert!(
        tmp_root.code == 125 && tmp_root.stderr.contains("/tmp leads to the image's root directory"),
        "{}",
        tmp_root.text()
    );
    let home = run("home", &link("home", "/opt/victim"), "", "ls -d /opt/victim/alice");
    assert_eq!(home.stdout, "/opt/victim/alice\n", "in the container: {}", home.text());
    assert_eq!(victims(&cluster), before, "a file of the host has changed");
    assert_eq!(cluster.run("cat /opt/victim/file").stdout, "untouched\n");
    // The same where the kernel does not resolve paths for us.
    let tree = ImageTree::busybox().unwrap();
    tree.link("data", "/opt/victim").unwrap();
    cluster.share("old.sqsh", &tree.squashfs(&[]).unwrap()).unwrap();
    let old = cluster.run("strace -o /dev/null -e inject=openat2:error=ENOSYS mizzen run -m /tmp:/data/x /shared/old.sqsh ls -d /opt/victim/x");
    assert_eq!(old.stdout, "/opt/victim/x\n", "{}", old.text());
    assert_eq!(victims(&cluster), before, "a file of the host has changed");
}

/// How a run on an image with a hostile link ends.
enum End {
    /// The program runs, and this is what it finds in /opt/victim.
    Runs(&'static str),
    /// The same, without a mount of mizzen's own: which one, where the link leads it, into which other mount.
    Without(&'static str, &'static str, &'static str),
    /// The user's mount on /data/mounted would do that.
    Strays(&'static str, &'static str),
    /// With one message.
    Refused(&'static str),
}

const LOOP: End = Refused("/etc/passwd in the image: Too many levels of symbolic links");
const ACCOUNTS: End = Runs("group hosts passwd resolv.conf");
const OWN: End = Refused("--mount: /data/mounted: /proc, /sys and /dev are mizzen's own");

/// A link in an image, where it points, and what comes of it. /host is where the host is in the workshop.
const HOSTILE_LINKS: [(&str, &str, End); 30] = [
    ("etc", "../../../../etc", LOOP),
    ("etc", "/etc", LOOP),
    ("etc", "/opt/victim", ACCOUNTS),
    ("etc", "../../../../opt/victim", ACCOUNTS),
    ("etc", "/proc/self/root/etc", Without("/etc/hosts", "/proc/self/root/etc/hosts", "/proc")),
    ("etc", "/proc/1/root/opt/victim", Without("/etc/hosts", "/proc/1/root/opt/victim/hosts", "/proc")),
    ("etc", "/host/opt/victim", Runs("")),
    ("etc", "../host/etc", Runs("")),
    ("etc", "/tmp", Without("/etc/hosts", "/tmp/hosts", "/tmp")),
    ("etc", "/home/alice/.ssh", Without("/etc/hosts", "/home/alice/.ssh/hosts", "/home/alice")),
    ("etc/hosts", "/opt/victim/hosts", Runs("hosts")),
    ("etc/passwd", "../../../../opt/victim/passwd", Runs("passwd")),
    ("etc/environment", "/opt/victim/environment", Runs("")),
    (".singularity.d", "/opt/victim", Runs("")),
    ("tmp", "/etc", Without("/tmp", "/etc", "/etc/group")),
    ("tmp", "/proc", Without("/tmp", "/proc", "/proc")),
    ("tmp", "/", Refused("/tmp leads to the image's root directory")),
    ("home", "/tmp", Without("/home/alice", "/tmp/alice", "/tmp")),
    ("home", "/proc/self/root/home", Without("/home/alice", "/proc/self/root/home/alice", "/proc")),
    ("home", "/opt/victim", Runs("alice")),
    ("proc", "/opt/victim", Refused("/proc in the image is a symbolic link to /opt/victim")),
    ("sys", "/proc/self/root", Refused("/sys in the image is a symbolic link to /proc/self/root")),
    ("dev", "../../opt/victim", Refused("/dev in the image is a symbolic link to /opt/victim")),
    ("data", "/opt/victim", Runs("mounted")),
    ("data", "../../../opt/victim", Runs("mounted")),
    ("data", "/host/opt/victim", Runs("")),
    ("data", "/proc/self/root/opt/victim", OWN),
    ("data", "/proc/1/cwd", OWN),
    ("data", "/tmp", Strays("/tmp/mounted", "/tmp")),
    ("data", "/home/alice/.ssh", Strays("/home/alice/.ssh/mounted", "/home/alice")),
];

#[test]
fn nothing_is_reached_through_an_image_but_itself() {
    let cluster = with_busybox("reached");
    cluster.run_as_root(
        "mkdir -m 777 /opt/victim; cd /opt/victim; for f in environment file group hosts localtime os-release passwd rc resolv.conf; do echo A=secret > $f; done; chmod 666 *",
    );
    cluster.run("mkdir .ssh; mizzen run /shared/bb.sqsh tar -C / -cf /tmp/bb.tar bin etc root usr var; mkdir /shared/base; cd /shared/base; tar -xf /tmp/bb.tar; mkdir dev home proc sys tmp; echo root:x:0: > etc/group");
    let host = || victims(&cluster) + &cluster.run("ls -lA /tmp").stdout;
    let before = host();
    for (path, target, end) in &HOSTILE_LINKS {
        let tree = ImageTree::busybox().unwrap();
        tree.link(path, target).unwrap();
        cluster.share("links.sqsh", &tree.squashfs(&["-noI", "-noD", "-noF"]).unwrap()).unwrap();
        cluster.run(&format!(
            "cd /shared; rm -rf links; cp -a base links; cd links; rm -rf {path}; ln -s {target} {path}"
        ));
        let mount = if *path == "data" { "-m /sys:/data/mounted" } else { "" };
        for image in ["/shared/links.sqsh", "/shared/links"] {
            let case = format!("{image}, {path} -> {target}");
            let run = cluster.run(&format!(
                "{STRACE} -o /var/tmp/calls mizzen run {mount} {image} sh -c 'echo $(ls -A /opt/victim 2>/dev/null) $A'"
            ));
            let calls = cluster.run("cat /var/tmp/calls").stdout;
            assert_eq!(escapes(&calls, image, "/opt/victim"), Vec::<&str>::new(), "{case}");
            let (code, stdout, message) = match end {
                Runs(found) => (0, format!("{found}\n"), String::new()),
                Without(what, place, other) => {
                    let note = format!(
                        "note: {what} is left out: in the image it leads to {place}, and so to the mount of {other}\n"
                    );
                    (0, "\n".to_owned(), note)
                }
                Strays(place, other) => {
                    let message = format!(
                        "--mount: /data/mounted: in the image it leads to {place}, and so to the mount of {other}\n"
                    );
                    (125, String::new(), message)
                }
                Refused(message) => (125, String::new(), (*message).to_owned()),
            };
            assert_eq!((run.code, run.stdout.as_str()), (code, stdout.as_str()), "{case}: {}", run.text());
            assert!(run.stderr.contains(&message), "{case}: {}", run.text());
            assert_eq!(is_complete(&calls), code == 0, "{case}");
        }
    }
    assert_eq!(host(), before, "a file of the host has changed");
    // The trace does tell when a link leads out.
    cluster.run(&format!(
        "ln -sfn /opt/victim /shared/links/etc; {STRACE} -o /var/tmp/calls cat /shared/links/etc/file"
    ));
    let calls = cluster.run("cat /var/tmp/calls").stdout;
    assert!(!escapes(&calls, "/shared/links", "/opt/victim").is_empty(), "{calls}");
}

#[test]
fn a_directory_that_changes_while_it_is_used_leads_nowhere_else() {
    let cluster = machine("races");
    cluster.run_as_root("mkdir -p /opt/victim/mounted; chmod -R a+rwX /opt/victim");
    let before = victims(&cluster);
    let tree = ImageTree::busybox().unwrap();
    cluster.share("bb.sqsh", &tree.squashfs(&[]).unwrap()).unwrap();
    cluster.run("mizzen run /shared/bb.sqsh sh -c 'cp -a /bin /etc ~/; true'; mkdir -p image; mv bin etc image/; mkdir -p image/a/mounted image/tmp");
    let runs = count(25, 500);
    // One process swaps a directory of the image with a link to the host while containers are made of it.
    let race = cluster.run(&format!(
        "(while [ -e image ]; do mv -T image/a image/b; ln -s /opt/victim image/a; rm image/a; mv -T image/b image/a; done) 2>/dev/null & \
         for i in $(seq {runs}); do timeout 5 mizzen run -m /tmp:/a/mounted image sh -c 'grep -c /a/mounted /proc/self/mountinfo' 2>>errors; done | sort | uniq -c; mv image gone; wait"
    ));
    // All but Alice's home, where her image is.
    let elsewhere = |listing: String| {
        listing
            .replace("home/alice", "\0")
            .split('\n')
            .filter(|line| !line.starts_with('\0'))
            .collect::<String>()
    };
    assert_eq!(elsewhere(victims(&cluster)), elsewhere(before), "{}", race.text());
    assert_eq!(cluster.run("ls -A /opt/victim").stdout, "mounted\n");
    assert!(
        race.stdout.lines().any(|line| line.trim().ends_with(" 1")),
        "some runs got through: {}",
        race.text()
    );
}

#[test]
fn programs_of_an_image_gain_nothing() {
    let cluster = machine("privileges");
    let tree = ImageTree::busybox().unwrap();
    std::fs::copy("/bin/busybox", tree.path("bin/busybox-suid")).unwrap();
    std::fs::set_permissions(
        tree.path("bin/busybox-suid"),
        std::os::unix::fs::PermissionsExt::from_mode(0o6755),
    )
    .unwrap();
    let nodes = ["-p", "kmsg c 666 0 0 1 11", "-p", "disk b 666 0 0 254 0"];
    cluster.share("p.sqsh", &tree.squashfs(&nodes).unwrap()).unwrap();
    let run = |command: &str| cluster.run(&format!("mizzen run /shared/p.sqsh {command}"));
    assert_eq!(run("/bin/busybox-suid id -u").stdout, "2001\n");
    for device in ["/kmsg", "/disk"] {
        let open = run(&format!("head -c 1 {device}"));
        assert!(open.code != 0 && open.stderr.contains("Permission denied"), "{}", open.text());
    }
    for command in
        ["mount -t ext4 /dev/null /tmp", "mknod /tmp/n c 1 3", "chroot / true", "hostname x", "kill -0 1"]
    {
        let denied = run(command);
        assert!(denied.code != 0, "{command}: {}", denied.text());
    }
    // As root of the container: still nothing of the host's.
    let root = cluster.run("mizzen run --remap-root /shared/p.sqsh sh -c 'cat /etc/shadow /proc/1/environ; mknod /tmp/n b 254 0; ls /tmp/n; mount -o remount,dev,suid,rw /; kill -0 1; echo done'");
    assert_eq!(root.stdout, "done\n", "{}", root.text());
    assert_eq!(
        root.stderr.lines().count(),
        5,
        "every one was refused, and no device was made: {}",
        root.text()
    );
}
