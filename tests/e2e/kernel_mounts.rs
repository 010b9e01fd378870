//! Images that the kernel mounts: which it does and which it does not, that the mount gives nobody a privilege, and
//! that nothing of it is seen outside or left.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test fails by panicking

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use mizzen_tests::check::{Emptiness, assert_failed, assert_out, one_node, run_in_time};
use mizzen_tests::images::{ImageTree, c_program, sif};
use mizzen_tests::{Cluster, Output, Release, Spec, User, on_every_release, run_tool};

/// All images are copied; the rest of the file follows.
const STAGE: &str = "stage = \"always\"\nstage_keep_free = \"\"\n";

/// An image with everything that a mount without restrictions would make dangerous. Every place that a container needs
/// is in it, so that its root is the mount itself.
static IMAGE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let tree = ImageTree::busybox().unwrap();
    tree.file("image", "kernel\n").unwrap();
    tree.file("etc/hosts", "").unwrap();
    tree.file("etc/resolv.conf", "").unwrap();
    tree.file("etc/hostname", "").unwrap();
    std::fs::create_dir_all(tree.path("home/alice")).unwrap();
    std::fs::create_dir_all(tree.path("var/tmp")).unwrap();
    for name in ["probe", "suid", "capable"] {
        std::fs::write(tree.path(name), c_program("probe").unwrap()).unwrap();
    }
    let modes = [("probe", 0o755), ("suid", 0o6755), ("capable", 0o755)];
    for (name, mode) in modes {
        std::fs::set_permissions(tree.path(name), std::fs::Permissions::from_mode(mode)).unwrap();
    }
    // All capabilities, effective (struct vfs_cap_data, revision 2); and the nodes of memory and of a disk.
    let set = "import os, struct, sys; os.setxattr(sys.argv[1], 'security.capability', struct.pack('<5I', 0x02000001, 0xffffffff, 0, 0xff, 0))";
    run_tool(Command::new("python3").args(["-c", set]).arg(tree.path("capable"))).unwrap();
    for (name, kind, numbers) in [("kmsg", "c", ["1", "11"]), ("loop", "b", ["7", "0"])] {
        run_tool(Command::new("mknod").args(["-m", "666"]).arg(tree.path(name)).arg(kind).args(numbers))
            .unwrap();
    }
    tree.squashfs(&["-comp", "gzip"]).unwrap()
});

/// The cache has the test's name: loop devices are the whole machine's.
fn spec(name: &str, mount: &str) -> Spec {
    let toml = format!("{STAGE}stage_shared = \"/var/cache/{name}\"\n[mount]\n{mount}\n");
    Spec { nodes: 1, mizzen_toml: Some(toml), ..Cluster::spec(name) }
}

fn start(spec: Spec) -> Cluster {
    let cluster = Cluster::start(spec).unwrap();
    cluster.share("k.sqsh", &IMAGE).unwrap();
    cluster
}

fn on_node(cluster: &Cluster, script: &str) -> Output {
    cluster.run_on("node1", User::Root, script)
}

/// The loop devices of this cluster's cache, with their flags.
fn loops(cluster: &Cluster, name: &str) -> String {
    on_node(
        cluster,
        &format!("losetup -nlO BACK-FILE,RO,AUTOCLEAR | grep /var/cache/{name}/ | awk '{{ print $2, $3 }}'"),
    )
    .stdout
}

/// Who reads the root of the container.
const READER: &str = "grep -q ' / / .* squashfs ' /proc/self/mountinfo && echo kernel || echo fuse";

#[test]
fn a_mount_of_the_kernels_gives_no_privilege() {
    let name = "kernel-powers";
    let cluster = start(spec(name, "squashfs = \"kernel\"\nowners = [0]"));
    let empty = Emptiness::of(&cluster, &["node1"]);
    let srun = "srun --quiet --no-container-mount-home --container-workdir=/ --container=/shared/k.sqsh";
    let inside = cluster.run(&format!("{srun} -n3 sh -c \"{READER}; cat /image\""));
    assert_out(&inside, 0, &"kernel\n".repeat(6));
    let options =
        cluster.run(&format!("{srun} sh -c 'grep squashfs /proc/self/mountinfo | cut -d\" \" -f 6'"));
    assert_out(&options, 0, "ro,nosuid,nodev,relatime\n");
    let powerless = "2001 0000000000000000\n";
    let tried = cluster.run(&format!("{srun} sh -c 'exec 2>&1; /probe id; /suid id; /capable id; /probe open /kmsg; /probe open /loop; touch /x; true'"));
    assert_out(
        &tried,
        0,
        &format!(
            "{}open: Permission denied\nopen: Permission denied\ntouch: /x: Read-only file system\n",
            powerless.repeat(3)
        ),
    );
    let no = "remount,bind: Operation not permitted\nremount,bind,rw: Operation not permitted\nremount: Operation not permitted\n\
              mount_setattr: Operation not permitted\nclone, mount_setattr: Operation not permitted\nfspick, reconfigure: Operation not permitted\n";
    let in_new = cluster.run(&format!("{srun} unshare -r -m /probe remount /"));
    assert_out(&in_new, 0, no);
    // From outside, with all capabilities in the container's user namespace and without no_new_privs.
    let step = cluster.command("ctl", User::Alice, &["bash", "-c", &format!("{srun} sleep 6")]).spawn();
    let pid = "pid=$(for i in $(seq 50); do pgrep -u alice -x sleep && break; sleep 0.1; done | tail -1)";
    let enter = "nsenter --target $pid --user --mount --preserve-credentials";
    let outside = cluster.run_on(
        "node1",
        User::Alice,
        &format!("{pid}; {enter} /probe remount /; {enter} /suid id; {enter} /probe open /kmsg; {enter} /probe open /loop; {enter} -r /bin/mount -o remount,bind,dev,suid / 2>&1"),
    );
    assert!(outside.stdout.starts_with(no), "{}", outside.text());
    assert!(outside.stdout.contains("2001 ") && !outside.stdout.contains("\n0 "), "{}", outside.text());
    assert_eq!(outside.stdout.matches("open: Permission denied").count(), 2, "{}", outside.text());
    assert!(outside.stdout.ends_with("mount: permission denied (are you root?)\n"), "{}", outside.text());
    // Not seen by others, and read-only.
    assert_eq!(loops(&cluster, name), "1 1\n");
    let seen =
        on_node(&cluster, "findmnt -t squashfs; cat /proc/$(pgrep -o slurmd)/mountinfo | grep squashfs");
    assert_eq!(seen.stdout, "", "{}", seen.text());
    assert!(step.unwrap().wait().unwrap().success());
    empty.assert_again(&cluster, "a mount of the kernel's");
    assert_eq!(loops(&cluster, name), "");
    // Nothing is left when everything is killed at any moment either.
    for delay in [0.05, 0.1, 0.15, 0.2, 0.3, 0.6] {
        run_in_time(
            &cluster,
            &format!(
                "srun -Q -n4 --container=/shared/k.sqsh sleep 60 & sleep {delay}; while [ -n \"$(squeue -h; jobs -r)\" ]; do scancel -Q -s KILL -u alice; scancel -Q -u alice; sleep 0.05; done; wait"
            ),
        );
    }
    empty.assert_again(&cluster, "killed");
    assert_eq!(loops(&cluster, name), "");
}

/// Root resolves no path of the user's, and runs no program for him: what the keeper and its storekeeper name is their own.
#[test]
fn the_keeper_names_nothing_of_the_users() {
    let name = "kernel-paths";
    let cluster = start(spec(name, "squashfs = \"kernel\"\nowners = [0]"));
    let begun = "until grep -q ^TracerPid:.[1-9] /proc/$(pgrep -ox slurmd)/status; do sleep 0.05; done";
    let trace = "exec strace -ff -y -qq -s 300 -o /root/trace -e trace=%file,prctl -p $(pgrep -ox slurmd) 2>/dev/null";
    let mut tracer = cluster.command("node1", User::Root, &["sh", "-c", trace]).spawn().unwrap();
    assert_out(&on_node(&cluster, begun), 0, "");
    assert_eq!(run_in_time(&cluster, "srun -Q --container=/shared/k.sqsh true").code, 0);
    on_node(&cluster, "pkill -INT -x strace");
    tracer.wait().unwrap();
    // From the moment on when the keeper is the launcher's program.
    let keepers = "cd /root; for t in $(grep -lE '^(execve.*\"mizzen-keeper\"|prctl.*\"mizzen-store\")' trace.*); do \
                   sed -n '/^execve.*mizzen-keeper/,$p; /mizzen-store/,$p' $t; echo; done";
    let traced = on_node(&cluster, keepers).stdout;
    let own = [
        "/etc/mizzen",
        "/var/cache",
        "/proc/self/",
        "/proc/sys/",
        "/dev/null",
        "/dev/loop",
        "/sys/block",
        "/usr/lib/mizzen/",
    ];
    let is_own = |call: &str, path: &str| match path {
        "/" | "/etc" | "/var" => true,
        path if path.starts_with('/') => own.iter().any(|own| path.starts_with(own)),
        // In the directory of the copies, which is also the storekeeper's root.
        _ => call.contains("</var/cache/kernel-paths") || call == "chroot(\".\")",
    };
    let calls: Vec<&str> = traced.lines().filter_map(|line| Some(line.split_once(" = ")?.0.trim())).collect();
    let named =
        calls.iter().filter(|call| !["prctl(", "fsconfig("].iter().any(|name| call.starts_with(name)));
    let foreign: Vec<&&str> =
        named.filter(|call| call.split('"').nth(1).is_some_and(|path| !is_own(call, path))).collect();
    assert!(foreign.is_empty(), "{foreign:#?}");
    let programs = calls.iter().filter(|call| call.starts_with("execve(")).count();
    let copied = calls.iter().any(|call| call.contains("\"temporary-"));
    assert!(programs == 1 && copied && traced.contains("move_mount("), "{traced}");
}

#[test]
fn only_what_the_limits_admit_is_mounted() {
    let name = "kernel-limits";
    let cluster =
        start(spec(name, "squashfs = \"kernel\"\nowners = [0, 2002]\npaths = [\"/shared\", \"/sw/images\"]"));
    let everywhere = |script: &str| {
        for machine in ["ctl", "node1"] {
            let done = cluster.run_on(machine, User::Root, script);
            assert_eq!(done.code, 0, "{}", done.text());
        }
    };
    everywhere(
        "mkdir -p /sw/images /sw/images2; cp /shared/k.sqsh /sw/images; cp /shared/k.sqsh /sw/images2",
    );
    let reader = |image: &str| {
        cluster.run(&format!(
            "srun -Q --no-container-mount-home --container-workdir=/ --container={image} sh -c \"{READER}\""
        ))
    };
    assert_out(&reader("/shared/k.sqsh"), 0, "kernel\n");
    assert_out(&reader("/sw/images/k.sqsh"), 0, "kernel\n");
    cluster.run_as_root("cd /shared; cp k.sqsh bobs; chown bob bobs; cp k.sqsh group; chmod 664 group; cp k.sqsh link; ln link link2; ln -s /sw/images2/k.sqsh symbolic");
    cluster.run("cp /shared/k.sqsh /shared/own; cp /shared/k.sqsh home.sqsh");
    cluster.share("k.sif", &sif(&IMAGE)).unwrap();
    assert_out(&reader("/shared/bobs"), 0, "kernel\n");
    // Whoever had a file before its owner may have it still.
    cluster.run("cp /shared/k.sqsh /shared/was-mine");
    let holding = "exec 9<>/shared/was-mine; touch held; for i in $(seq 100); do [ -e let-go ] && exit; sleep 0.1; done";
    let holder = cluster.command("ctl", User::Alice, &["bash", "-c", holding]).spawn();
    cluster.run_as_root("until [ -e /home/alice/held ]; do sleep 0.05; done; chown root /shared/was-mine; chmod 644 /shared/was-mine");
    assert_failed(
        &reader("/shared/was-mine"),
        125,
        "the kernel does not mount it: somebody has it open for writing",
    );
    cluster.run("touch let-go");
    assert!(holder.unwrap().wait().unwrap().success());
    assert_out(&reader("/shared/was-mine"), 0, "kernel\n");
    for (image, why) in [
        ("/shared/own", "it belongs to uid 2001, whom mount.owners does not list"),
        ("/home/alice/home.sqsh", "it belongs to uid 2001"),
        ("/shared/group", "others than its owner can write it (mode 0664)"),
        ("/shared/link", "it has 2 names, and so no certain place"),
        ("/sw/images2/k.sqsh", "/sw/images2/k.sqsh is in none of the directories of mount.paths"),
        ("/shared/symbolic", "/sw/images2/k.sqsh is in none of the directories of mount.paths"),
        ("/shared/k.sif", "it is not a squashfs as a whole"),
    ] {
        assert_failed(&reader(image), 125, &format!("the kernel does not mount it: {why}"));
    }
    // Other file systems are not images in the first place, and the keeper does not take a launcher's word for it.
    everywhere(
        "cd /shared; truncate -s 8M ext4; mkfs.ext4 -q ext4; printf '\\0%.0s' $(seq 4096) > erofs; printf '\\342\\341\\365\\340' | dd of=erofs bs=1 seek=1024 conv=notrunc 2>/dev/null",
    );
    for image in ["/shared/ext4", "/shared/erofs"] {
        assert_failed(&reader(image), 1, &format!("{image}: not an image"));
    }
    for (name, program) in [("ask", "ask-keeper"), ("stand-in", "stand-in")] {
        cluster.share(name, &c_program(program).unwrap()).unwrap();
    }
    on_node(
        &cluster,
        "chmod 755 /shared/ask; rm /usr/lib/mizzen/mizzen-enter; install -m 755 /shared/stand-in /usr/lib/mizzen/mizzen-enter",
    );
    let ask = |script: &str| {
        let step = run_in_time(
            &cluster,
            &format!(
                "HOSTILE='({script}) > ~/said 2>&1; grep squashfs /proc/self/mountinfo >> ~/said; true' srun -Q --container=/shared/k.sqsh true"
            ),
        );
        (cluster.run("cat said").stdout, step)
    };
    for (script, why) in [
        ("/shared/ask m /shared/ext4", "xit is not a squashfs"),
        ("/shared/ask m /shared/erofs", "xit is not a squashfs"),
        ("/shared/ask m /shared/own", "xit belongs to uid 2001"),
        ("/shared/ask m /home/alice/home.sqsh", "xit belongs to uid 2001"),
        ("/shared/ask m /shared/own w", "xit is not open for reading alone"),
        (
            "unshare -Urm sh -c \"mount --bind /shared/own /shared/k.sqsh; /shared/ask m /shared/k.sqsh\"",
            "xit does not lie on a mount of the node",
        ),
    ] {
        let (said, step) = ask(script);
        assert!(said.contains(why) && !said.contains("squashfs /dev/loop"), "{script}: {said}");
        // Who has asked for that gets nothing more from the keeper, and so no container.
        if said.contains("\n!") {
            let lost = "the kernel does not mount it: the keeper of the shared copies cannot be reached";
            assert_failed(&step, 125, lost);
        } else {
            assert_out(&step, 0, "");
        }
    }
    // What it does mount, it mounts with all restrictions, and once.
    let (said, step) = ask("/shared/ask m /shared/k.sqsh");
    assert_failed(&step, 125, "the kernel does not mount it: there is nothing more to mount");
    assert!(
        said.contains("\n+\n")
            && said.contains("/mount ro,nosuid,nodev,relatime")
            && said.contains("squashfs /dev/loop"),
        "{said}"
    );
    // A keeper that is killed on its way leaves no device and no mount.
    for call in ["ioctl", "fsopen", "fsconfig", "fsmount", "move_mount"] {
        on_node(&cluster, &format!("echo {call} > /run/kill-at"));
        let killed = run_in_time(&cluster, "srun -Q --container=/shared/k.sqsh true");
        assert_failed(
            &killed,
            125,
            "the keeper of the shared copies has ended before it had mounted the image",
        );
        on_node(
            &cluster,
            "rm /run/kill-at; for i in $(seq 50); do pgrep 'slurmstepd|mizzen' || break; sleep 0.1; done",
        );
        assert_eq!(loops(&cluster, name), "", "{call}");
    }
    // An old kernel does it another way.
    on_node(&cluster, "touch /run/old-kernel");
    assert_out(&reader("/shared/k.sqsh"), 0, "kernel\n");
    let (old, _) = ask("/shared/ask m /shared/k.sqsh");
    assert!(old.contains("/mount ro,nosuid,nodev,relatime"), "{old}");
    let used = cluster
        .command("ctl", User::Alice, &["srun", "-Q", "--container=/shared/k.sqsh", "sleep", "3"])
        .spawn();
    cluster.run("sleep 1.5");
    assert_eq!(loops(&cluster, name), "1 1\n");
    assert!(used.unwrap().wait().unwrap().success());
    on_node(&cluster, "for i in $(seq 50); do pgrep slurmstepd || break; sleep 0.1; done");
    assert_eq!(loops(&cluster, name), "");
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
}

#[test]
fn without_limits_or_by_another_wish_it_is_not_used() {
    let name = "kernel-auto";
    let cluster = start(spec(name, "squashfs = \"auto\"\nowners = [0]"));
    let run = |options: &str, image: &str| {
        cluster.run(&format!("srun -Q --no-container-mount-home --container-workdir=/ {options} --container={image} sh -c \"{READER}; cat /image\""))
    };
    assert_out(&run("", "/shared/k.sqsh"), 0, "kernel\nkernel\n");
    cluster.run("cp /shared/k.sqsh /shared/own");
    assert_out(&run("", "/shared/own"), 0, "fuse\nkernel\n");
    let told = run("--container-verbose", "/shared/own");
    assert!(
        told.stderr.contains("note: node1: the kernel does not mount the image: it belongs to uid 2001"),
        "{}",
        told.text()
    );
    // What is mounted beside the root is a copy too, and served.
    let data = "--container-mounts=/shared/own:/var/tmp:squashfs";
    let beside = cluster.run(&format!("srun -Q --no-container-mount-home --container-workdir=/ {data} --container=/shared/k.sqsh sh -c \"{READER}; cat /var/tmp/image\""));
    assert_out(&beside, 0, "kernel\nkernel\n");
    // Where files shall be the user's own, they are served.
    for options in ["--container-writable", "--container-remap-root", "--container-stage=never"] {
        assert_out(&run(options, "/shared/k.sqsh"), 0, "fuse\nkernel\n");
    }
    // Loop devices that cannot be had.
    on_node(&cluster, "mount --bind /dev/null /dev/loop-control");
    assert_out(&run("", "/shared/k.sqsh"), 0, "fuse\nkernel\n");
    on_node(&cluster, "umount /dev/loop-control");
    // The cache has no room: the original is served.
    on_node(
        &cluster,
        &format!("mizzen cache remove --all; mount -t tmpfs -o size=100k,mode=755 t /var/cache/{name}"),
    );
    let full = run("", "/shared/k.sqsh");
    assert_out(&full, 0, "fuse\nkernel\n");
    assert!(full.stderr.contains("/shared/k.sqsh is used where it is: no room for"), "{}", full.text());
    let toml = |text: &str| cluster.write_everywhere("/etc/mizzen/mizzen.toml", text).unwrap();
    // Where only the kernel will do, there is no container then.
    toml(&spec(name, "squashfs = \"kernel\"\nowners = [0]").mizzen_toml.unwrap());
    assert_failed(
        &run("", "/shared/k.sqsh"),
        125,
        "/shared/k.sqsh: the kernel does not mount it: no room for",
    );
    for (text, why) in [
        (
            "stage_shared = \"/var/cache/x\"\n[mount]\nsquashfs = \"kernel\"\n",
            "mount.squashfs: the kernel mounts nothing without a limit",
        ),
        (
            "[mount]\nsquashfs = \"auto\"\nowners = [0]\n",
            "mount.squashfs: the kernel mounts copies of root's alone",
        ),
    ] {
        toml(text);
        let refused = cluster.run("srun -Q --container=/shared/k.sqsh true");
        assert!(refused.code != 0 && refused.stderr.contains(why), "{}", refused.text());
        let checked = cluster.run("mizzen check-config");
        assert!(checked.code == 1 && checked.stderr.contains(why), "{}", checked.text());
    }
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
}

/// What the kernel has inflated for one step is there for the others of the same user that run beside it.
#[test]
fn steps_at_the_same_time_share_a_device() {
    let name = "kernel-beside";
    let cluster = start(spec(name, "squashfs = \"kernel\"\nowners = [0]"));
    let empty = Emptiness::of(&cluster, &["node1"]);
    let srun = "srun -Q --overlap --no-container-mount-home --container-workdir=/ --container=/shared/k.sqsh";
    let until = |file: &str| format!("until [ -e /shared/{file} ]; do sleep 0.05; done");
    let waiting = |user: User, start: &str, end: &str| {
        let mounts = "--container-mounts=/shared:/var/tmp";
        let inside =
            format!("touch /var/tmp/{start}; until [ -e /var/tmp/{end} ]; do sleep 0.1; done; cat /image");
        cluster
            .command("ctl", user, &["bash", "-c", &format!("{srun} {mounts} sh -c '{inside}'")])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let first = waiting(User::Alice, "first", "end-first");
    cluster.run(&until("first"));
    let second = waiting(User::Alice, "second", "end-second");
    cluster.run(&until("second"));
    assert_eq!(loops(&cluster, name), "1 1\n");
    // Who shares files shares their locks: another user has a device of his own.
    let third = waiting(User::Bob, "third", "end-third");
    cluster.run(&until("third"));
    assert_eq!(loops(&cluster, name), "1 1\n1 1\n");
    cluster.run("touch /shared/end-third");
    assert_eq!(third.wait_with_output().unwrap().stdout, b"kernel\n");
    on_node(
        &cluster,
        &format!("until [ $(losetup -nlO BACK-FILE | grep -c /var/cache/{name}/) = 1 ]; do sleep 0.05; done"),
    );
    // It stays as long as one of them does.
    cluster.run("touch /shared/end-first");
    assert_eq!(first.wait_with_output().unwrap().stdout, b"kernel\n");
    assert_eq!(loops(&cluster, name), "1 1\n");
    assert_out(&cluster.run(&format!("{srun} cat /image")), 0, "kernel\n");
    cluster.run("touch /shared/end-second");
    assert_eq!(second.wait_with_output().unwrap().stdout, b"kernel\n");
    empty.assert_again(&cluster, "two steps");
    assert_eq!(loops(&cluster, name), "");
    // A device on a file system that does not answer does not matter.
    let stopped = "mkdir /stopped; truncate -s 1m /local/disk; bindfs /local /stopped; pgrep -nx bindfs > /run/stopped; \
                   losetup --find --show --read-only /stopped/disk; kill -STOP $(cat /run/stopped)";
    let device = on_node(&cluster, stopped).stdout;
    assert!(device.starts_with("/dev/loop"), "{device}");
    assert_out(&run_in_time(&cluster, &format!("{srun} cat /image")), 0, "kernel\n");
    on_node(
        &cluster,
        &format!(
            "kill -CONT $(cat /run/stopped); losetup -d {}; umount /stopped; rmdir /stopped; rm /local/disk",
            device.trim()
        ),
    );
    // A device that somebody has made otherwise of the same file is left alone.
    let other = format!("losetup --find --show --read-only --offset 4096 /var/cache/{name}/sha256-*");
    let device = on_node(&cluster, &other).stdout;
    assert_out(&cluster.run(&format!("{srun} sh -c \"{READER}; cat /image\"")), 0, "kernel\nkernel\n");
    assert_out(&on_node(&cluster, &format!("losetup -d {device}")), 0, "");
    // All at once: they come and go as they like.
    let many =
        "for i in $(seq 24); do srun -Q --overlap -n1 --container=/shared/k.sqsh cat /image & done; wait";
    let many = cluster.run(&format!("salloc -Q -n8 bash -c '{many}'"));
    assert_out(&many, 0, &"kernel\n".repeat(24));
    cluster.run("rm /shared/first /shared/second /shared/third /shared/end-*");
    empty.assert_again(&cluster, "many steps");
    assert_eq!(loops(&cluster, name), "");
}

#[test]
fn a_job_with_mounts_of_its_own_has_the_kernels_too() {
    let name = "kernel-own-tmp";
    let mut spec = Spec { one_cpu: true, ..spec(name, "squashfs = \"kernel\"\nowners = [0]") };
    spec.slurm_conf =
        vec!["JobContainerType=job_container/tmpfs".to_owned(), "PrologFlags=Contain".to_owned()];
    spec.slurm_files =
        vec![("job_container.conf".to_owned(), "AutoBasePath=true\nBasePath=/local\n".to_owned())];
    let cluster = start(spec);
    let empty = Emptiness::of(&cluster, &["node1"]);
    cluster.run(&format!("echo \"{READER}; ls /tmp\" > /shared/look"));
    let own = cluster.run("salloc -Q bash -c 'srun -Q touch /tmp/private; srun -Q --container=/shared/k.sqsh --container-mounts=/shared:/var/tmp --no-container-mount-home --container-workdir=/ sh /var/tmp/look'");
    assert_out(&own, 0, "kernel\nprivate\n");
    empty.assert_again(&cluster, "own /tmp");
    assert_eq!(loops(&cluster, name), "");
}

on_every_release![mounts_and_leaves_nothing];

fn mounts_and_leaves_nothing(release: Release) {
    let name = format!("kernel-{}", release.version());
    let toml = spec(&name, "squashfs = \"kernel\"\nowners = [0]").mizzen_toml;
    let cluster = start(Spec { mizzen_toml: toml, ..one_node(release, "kernel") });
    let empty = Emptiness::of(&cluster, &["node1"]);
    let step = cluster.run(&format!("srun -Q -n2 --no-container-mount-home --container-workdir=/ --container-image=/shared/k.sqsh sh -c \"{READER}\""));
    assert_out(&step, 0, "kernel\nkernel\n");
    let batch = cluster.run("printf '#!/bin/sh\\ncat /image; srun -Q cat /image\\n' > job; sbatch -Q -W -o out --container-image=/shared/k.sqsh job; cat out; rm job out");
    assert_out(&batch, 0, "kernel\nkernel\n");
    empty.assert_again(&cluster, "a step and a batch job");
    assert_eq!(loops(&cluster, &name), "");
}
