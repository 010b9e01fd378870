//! Every failure says what it is about, why, and what to do: limits by their names and values, damaged images, files
//! that are not what they must be.

use mizzen_tests::check::{assert_out, assert_told, run_in_time, with_busybox};
use mizzen_tests::images::{ImageTree, sif};
use mizzen_tests::{Cluster, User};

const BROKEN: &str = "the image is broken or hostile; make it again";
const DAMAGED: &str = "the image is broken or was not copied completely; copy it again, or make it again";
const REMAKE: &str = "the program that makes the image writes this file; make the image again";

#[test]
fn limits_are_named_with_their_values() {
    let cluster = with_busybox("limits");
    unpack(&cluster);
    // Every number of open files up to what is enough: wherever the limit is met, it is named.
    for image in ["/shared/bb.sqsh", "tree"] {
        let mut enough = 0;
        for limit in 3..64 {
            let run = run_in_time(&cluster, &format!("ulimit -n {limit}; exec mizzen run {image} true"));
            if run.code == 0 {
                assert_eq!(run.stderr, "", "{limit}");
                enough += 1;
                continue;
            }
            // Once it is known what will be mounted, that is counted beforehand.
            let counted = format!(" open files, but you may have {limit}\n");
            if run.stderr.contains(&counted) {
                assert_told(&run, 125, &counted, "ulimit -Hn is the limit, the administrator can raise it");
                continue;
            }
            let hint =
                format!("your limit on open files: ulimit -n is {limit}; only an administrator can raise it");
            assert_told(&run, 125, ": Too many open files\n", &hint);
        }
        assert!(enough > 0, "64 are enough for {image}");
    }
    for limit in [9000, 12_000, 60_000] {
        for image in ["/shared/bb.sqsh", "tree"] {
            let run = run_in_time(&cluster, &format!("ulimit -v {limit}; exec mizzen run {image} true"));
            let hint = format!(
                "your limit on address space: ulimit -v is {limit} KiB; only an administrator can raise it"
            );
            assert_told(&run, 125, "mizzen: a container needs 64 MiB of memory to start\n", &hint);
        }
        // Slurm hands the soft limit on.
        let srun =
            cluster.run(&format!("srun --quiet bash -c 'ulimit -Sv {limit}; exec mizzen run tree true'"));
        let hint = format!(
            "your limit on address space: ulimit -v is {limit} KiB; `ulimit -v unlimited` raises it, for a job"
        );
        assert_told(&srun, 125, "mizzen: a container needs 64 MiB of memory to start\n", &hint);
    }
    assert_out(&cluster.run("ulimit -v 66000; exec mizzen run /shared/bb.sqsh echo ran"), 0, "ran\n");
    in_a_user_namespace(&cluster);
    in_a_full_cgroup(&cluster);
}

/// Here limits hold that touch nobody else on the machine: the kernel has them for each user namespace.
fn in_a_user_namespace(cluster: &Cluster) {
    // Root is nobody in it, and not to be believed there.
    let nested = "unshare -U --map-current-user mizzen run /shared/bb.sqsh true";
    let hint = "root is not known in this user namespace; run mizzen outside of it";
    assert_told(&cluster.run(nested), 125, "belongs to uid 65534, not to root", hint);
    cluster.run_as_root("mv /etc/mizzen /etc/elsewhere");
    assert_out(&cluster.run(nested), 0, "");
    let mut refused = 0;
    for limit in 1..8 {
        let run = run_in_time(
            cluster,
            &format!(
                "unshare -U --map-current-user prlimit --nproc={limit} mizzen run --unshare pid /shared/bb.sqsh true"
            ),
        );
        if run.code == 0 {
            continue;
        }
        refused += 1;
        let hint =
            format!("your limit on processes: ulimit -u is {limit}; only an administrator can raise it");
        assert_told(&run, 125, ": Resource temporarily unavailable\n", &hint);
    }
    assert!(refused >= 3, "the launcher, its server and process 1: {refused}");
    for (kind, name) in [
        ("user", "a user"),
        ("mnt", "a mount"),
        ("pid", "a process id"),
        ("ipc", "an IPC"),
        ("net", "a network"),
        ("uts", "a UTS"),
    ] {
        let run = cluster.run(&format!(
            "unshare -U --map-root-user sh -c 'echo 0 > /proc/sys/user/max_{kind}_namespaces; \
             exec mizzen run --unshare pid,ipc,net,uts /shared/bb.sqsh true'"
        ));
        let message = format!("mizzen: cannot make {name} namespace: No space left on device\n");
        let (_, plural) = name.split_once(' ').unwrap();
        let hint = format!("{plural} namespaces are off here (sysctl user.max_{kind}_namespaces = 0)\n");
        assert_told(&run, 125, &message, &hint);
    }
    let used_up = cluster.run(
        "unshare -U --map-root-user sh -c 'echo 1 > /proc/sys/user/max_mnt_namespaces; \
         exec unshare -m mizzen run /shared/bb.sqsh true'",
    );
    assert_told(
        &used_up,
        125,
        "mizzen: cannot make a mount namespace: No space left on device\n",
        "you have as many mount namespaces as you may (sysctl user.max_mnt_namespaces = 1)\n",
    );
    let doctor = cluster.run(
        "unshare -U --map-root-user sh -c 'echo 0 > /proc/sys/user/max_mnt_namespaces; exec mizzen doctor'",
    );
    assert_eq!(doctor.code, 1, "{}", doctor.text());
    assert!(doctor.stdout.contains("hint: mount namespaces are off here"), "{}", doctor.text());
    cluster.run_as_root("mv /etc/elsewhere /etc/mizzen");
}

fn in_a_full_cgroup(cluster: &Cluster) {
    let group = format!("/sys/fs/cgroup/pids/mizzen-hints-{}", cluster.supervisor());
    let mounted = cluster.run_as_root(&format!(
        "mount -t tmpfs tmpfs /sys/fs/cgroup && mkdir /sys/fs/cgroup/pids && \
         mount -t cgroup -o pids cgroup /sys/fs/cgroup/pids && mkdir {group} && echo 3 > {group}/pids.max"
    ));
    assert_out(&mounted, 0, "");
    // The shell that waits, runuser, and the launcher: its server finds no room.
    let run = cluster.run_as_root(&format!(
        "bash -c 'echo 0 > {group}/cgroup.procs; runuser -u alice -- mizzen run /shared/bb.sqsh true; exit $?'; code=$?; \
         rmdir {group}; exit $code"
    ));
    let hint = format!("the cgroup {group} may have 3 processes (pids.max), and has them\n");
    assert_told(&run, 125, "cannot start the file server: Resource temporarily unavailable\n", &hint);
}

/// Makes the directory `tree` with the files of the image in Alice's home.
fn unpack(cluster: &Cluster) {
    let unpacked = cluster.run(
        "mizzen run /shared/bb.sqsh tar -C / -cf /tmp/bb.tar bin etc root usr var && mkdir tree && cd tree && \
         tar -xf /tmp/bb.tar && mkdir dev home proc sys tmp && printf 'root:x:0:\\n' > etc/group && \
         printf 'root:x:0:0:root:/root:/bin/sh\\n' > etc/passwd",
    );
    assert_out(&unpacked, 0, "");
}

#[test]
fn damaged_images_say_what_to_do() {
    let cluster = with_busybox("damaged");
    let image = ImageTree::busybox().unwrap().squashfs(&["-comp", "gzip"]).unwrap();
    let changed = |bytes: &[u8], at: usize, new: &[u8]| {
        let mut changed = bytes.to_vec();
        changed[at..at + new.len()].copy_from_slice(new);
        changed
    };
    let number = |at: usize| u64::from_le_bytes(image[at..at + 8].try_into().unwrap()) as usize;
    let (inodes, directories) = (number(64), number(72));
    let listings = number(80) - directories;
    let newer = "make the image again with mksquashfs 4";
    for (name, bytes, message, hint) in [
        ("half", image[..image.len() / 2].to_vec(), "truncated: the header says ", DAMAGED),
        ("table", changed(&image, 72, &[255; 8]), "corrupt image: the directory table start", DAMAGED),
        ("compressor", changed(&image, 20, &[9, 0]), "compressed with method 9", newer),
        ("version", changed(&image, 28, &[3, 0]), "squashfs 3.0", newer),
        ("inodes", changed(&image, inodes, &vec![0xff; directories - inodes]), "corrupt image: ", DAMAGED),
        ("directories", changed(&image, directories, &vec![0xff; listings]), "corrupt image: ", DAMAGED),
    ] {
        let path = cluster.share(&format!("{name}.sqsh"), &bytes).unwrap();
        assert_told(&run_in_time(&cluster, &format!("mizzen run {path} true")), 125, message, hint);
    }
    // Where a program is, nothing looks before the program starts; then the file server's watcher tells.
    let block = cluster.share("block.sqsh", &changed(&image, 200, &[0xff; 4096])).unwrap();
    let message = "cannot read /bin/busybox in it, so the container was ended: corrupt image: ";
    assert_told(&cluster.run(&format!("mizzen run {block} true")), 137, message, DAMAGED);

    let good = sif(&image);
    let (count, table, first) = (88, 96, 4096);
    let (offset, length) = (first + 17, first + 25);
    for (name, bytes, message, hint) in [
        ("count", changed(&good, count, &[255; 8]), "SIF is damaged: it claims -1 descriptors", DAMAGED),
        ("start", changed(&good, table, &[0; 8]), "SIF is damaged: its descriptors start at byte 0", DAMAGED),
        ("offset", changed(&good, offset, &[1; 8]), "SIF is cut off: its system partition ends", "the copy"),
        ("place", changed(&good, offset, &[0; 8]), "at byte 0 overlaps the header", DAMAGED),
        ("length", changed(&good, length, &[0; 8]), "SIF is damaged: its system partition has", DAMAGED),
        (
            "other",
            changed(&good, 42, b"02"),
            "SIF version \"02\" is not known",
            "convert it: apptainer build",
        ),
        (
            "unused",
            changed(&good, first + 4, &[0]),
            "SIF without a squashfs system partition",
            "convert it: ",
        ),
    ] {
        let path = cluster.share(&format!("{name}.sif"), &bytes).unwrap();
        assert_told(&run_in_time(&cluster, &format!("mizzen run {path} true")), 125, message, hint);
    }

    let config = "/.mizzen/config.json in the image";
    for (text, message, hint) in [
        ("{", format!("{config} is damaged: EOF while parsing"), REMAKE),
        ("{\"config\": {\"Env\": [1]}}", format!("{config} is damaged: invalid type: integer `1`"), REMAKE),
        (
            "{\"config\": {\"Cmd\": [\"a\\u0000\"]}}",
            format!("{config} is damaged: Cmd contains a NUL"),
            REMAKE,
        ),
        (
            &" ".repeat(2 << 20),
            format!("{config} has more than 1048576 bytes"),
            "what an image's maker writes there is short; the image is broken or hostile",
        ),
    ] {
        let tree = ImageTree::busybox().unwrap();
        tree.file(".mizzen/config.json", text).unwrap();
        let path = cluster.share("oci.sqsh", &tree.squashfs(&["-comp", "gzip"]).unwrap()).unwrap();
        let message = format!("/shared/oci.sqsh: {message}");
        assert_told(&cluster.run(&format!("mizzen run {path} true")), 125, &message, hint);
        let srun = cluster.run(&format!("srun --quiet -n3 --container-image={path} true"));
        assert_told(&srun, 125, &format!("mizzen: node1: {message}"), hint);
    }
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
}

#[test]
fn files_that_are_not_what_they_must_be_are_named() {
    let cluster = with_busybox("not-files");
    unpack(&cluster);
    let own_link = "a symbolic link in the image leads back to itself";
    for (place, make, message, hint) in [
        ("etc/passwd", "mkfifo", "/etc/passwd in the image is not a regular file\n", BROKEN),
        ("etc/group", "mkfifo", "/etc/group in the image is not a regular file\n", BROKEN),
        ("etc/passwd", "mkdir", "/etc/passwd in the image is a directory, and must be a file\n", BROKEN),
        (
            "etc/group",
            "ln -s group",
            "/etc/group in the image: Too many levels of symbolic links\n",
            own_link,
        ),
        ("tmp", "ln -s tmp", "/tmp in the image: Too many levels of symbolic links\n", own_link),
        ("home", "ln -s home", "/home/alice in the image: Too many levels of symbolic links\n", own_link),
        ("ch", "ln -s ch", "/ch/metadata.json in the image: Too many levels of symbolic links\n", own_link),
        (".mizzen", "ln -s .mizzen", "/.mizzen/config.json in the image: Too many levels", own_link),
    ] {
        let script = format!(
            "rm -rf x; cp -a tree x && rm -rf x/{place} && {make} x/{place} && exec mizzen run x true"
        );
        let run = run_in_time(&cluster, &script);
        assert_told(&run, 125, &format!("mizzen: /home/alice/x: {message}"), hint);
    }
    // The same in a squashfs, with devices that would never end.
    for file in ["passwd", "group"] {
        let tree = ImageTree::busybox().unwrap();
        tree.remove(&format!("etc/{file}"));
        let zero = format!("etc/{file} c 666 0 0 1 5");
        let path = cluster.share("device.sqsh", &tree.squashfs(&["-p", &zero]).unwrap()).unwrap();
        let message = format!("/shared/device.sqsh: /etc/{file} in the image is not a regular file\n");
        let run = run_in_time(&cluster, &format!("mizzen run {path} true"));
        assert_told(&run, 125, &format!("mizzen: {message}"), BROKEN);
        let srun = run_in_time(&cluster, &format!("srun --quiet -n3 --container-image={path} true"));
        assert_told(&srun, 125, &format!("mizzen: node1: {message}"), BROKEN);
    }
    // A directory has a name, whichever way it is given.
    for name in ["/proc/self/fd/0", "/dev/stdin"] {
        let run = cluster.run(&format!("mizzen run {name} grep -c Busybox /etc/os-release < tree"));
        assert_out(&run, 0, "1\n");
    }
    unusual_settings(&cluster);
}

/// Everything that may lie where mizzen.toml is expected: told to those who want a container, and to nobody else.
fn unusual_settings(cluster: &Cluster) {
    let toml = "/etc/mizzen/mizzen.toml";
    let text = |text: &str| format!("printf '{text}' > {toml}");
    let move_away = format!("put a text file there, or nothing: mv {toml} {toml}.old");
    let shipped = "the mizzen.toml that comes with mizzen shows every key with its default";
    for (make, message, hint) in [
        (format!("mkdir {toml}"), ": is a directory, not a regular file\n", move_away.as_str()),
        (format!("mkfifo {toml}"), ": is a FIFO, not a regular file\n", &move_away),
        (format!("mknod {toml} c 1 5"), ": is a character device, not a regular file\n", &move_away),
        (
            format!("touch {toml}; chmod 600 {toml}"),
            ": cannot read it: Permission denied\n",
            "all users must be able to read it: chmod a+r /etc/mizzen/mizzen.toml\n",
        ),
        (
            format!("ln -s /etc/passwd {toml}"),
            ": is a symbolic link; mizzen reads only the file itself\n",
            "put the file itself there, or the link on a directory above it\n",
        ),
        (
            text("# ok\\n# caf\\351\\n"),
            ":2: not UTF-8\n",
            "it must be text in UTF-8; iconv -f LATIN1 -t UTF-8 /etc/mizzen/mizzen.toml converts other text\n",
        ),
        (
            format!("head -c 2000000 /dev/zero > {toml}"),
            ": is larger than 1 MiB\n",
            "is it the right file?\n",
        ),
        (format!("head -c 100 /dev/zero > {toml}"), ":1: ", shipped),
        (text("mount_home = true\\n\\033[31m = 1\\n"), ":2: ", shipped),
    ] {
        for machine in ["ctl", "node1"] {
            let made = cluster.run_on(machine, User::Root, &format!("rm -rf {toml}; {make}"));
            assert_eq!(made.code, 0, "{make}: {}", made.text());
        }
        let message = format!("mizzen: {toml}{message}");
        let run = run_in_time(cluster, "mizzen run /shared/bb.sqsh true");
        assert_told(&run, 125, &message, hint);
        assert!(!run.stderr.contains('\x1b'), "{}", run.text());
        let srun = run_in_time(cluster, "srun --quiet --container-image=/shared/bb.sqsh true");
        assert_told(&srun, 1, &message, hint);
        let plain = run_in_time(cluster, "srun --quiet hostname");
        assert_eq!((plain.code, plain.stderr.as_str()), (0, ""), "{make}: {}", plain.text());
    }
    // What looks odd and is well.
    for make in [":".to_owned(), text("\\357\\273\\277mount_home = true\\n"), text("mount_home = true\\r\\n")]
    {
        for machine in ["ctl", "node1"] {
            cluster.run_on(machine, User::Root, &format!("rm -rf {toml}; touch {toml}; {make}"));
        }
        assert_out(&cluster.run("mizzen run /shared/bb.sqsh echo ran"), 0, "ran\n");
        assert_out(&cluster.run("srun --quiet --container-image=/shared/bb.sqsh echo ran"), 0, "ran\n");
    }
}
