//! Whole runs on kernels that lack calls. Linux 4.18 and 5.14, the kernels of RHEL 8 and 9, are not to be had here: a filter that
//! programs inherit (`fixtures/old-kernel.c`) answers every call that came later as they would. Real kernels: `make test-kernels`.

use std::sync::LazyLock;

use mizzen_tests::check::{Emptiness, assert_failed, assert_out, assert_told, with_images};
use mizzen_tests::copies::{CACHE, LARGE, copies, digest_of, large_cluster, sum_of};
use mizzen_tests::images::{ImageTree, c_program};
use mizzen_tests::{Cluster, Output, Spec, User};

/// Calls newer than Linux 4.18, and what file systems could not do then. (RHEL's 4.18 has some of it: it lies between the first and the
/// third.)
const SINCE_4_18: &str = "424-:ENOSYS overlay:EPERM xattr:EOPNOTSUPP";
/// The same for Linux 5.14.
const SINCE_5_14: &str = "448-:ENOSYS xattr:EOPNOTSUPP";
/// No newer call, and overlays all the same.
const CALLS_ALONE: &str = "424-:ENOSYS xattr:EOPNOTSUPP";
/// A filter that refuses what it does not know, as those of old container engines do. (For clone3 and faccessat2 glibc, and so
/// slurmd, takes ENOSYS alone as a reason to do without.)
const REFUSED: &str = "435:ENOSYS 439:ENOSYS 424-:EPERM overlay:EPERM xattr:EOPNOTSUPP";

/// The newer calls one by one, and statx (Linux 4.11), for which the standard library has a substitute.
const CALLS: [(&str, &str); 14] = [
    ("424", "pidfd_send_signal"),
    ("428", "open_tree"),
    ("429", "move_mount"),
    ("430", "fsopen"),
    ("431", "fsconfig"),
    ("432", "fsmount"),
    ("434", "pidfd_open"),
    ("435", "clone3"),
    ("436", "close_range"),
    ("437", "openat2"),
    ("438", "pidfd_getfd"),
    ("439", "faccessat2"),
    ("442", "mount_setattr"),
    ("statx", "statx"),
];

static PROGRAM: LazyLock<Vec<u8>> = LazyLock::new(|| c_program("old-kernel").unwrap());

const NO_OVERLAY: &str = "overlays in user namespaces need Linux 5.11; run without --writable";

/// One node with disks for changes and named containers, an image that is a directory, and the filter.
fn start(name: &str) -> Cluster {
    let mizzen_toml = Some("stage_directory = \"/disk\"\n".to_owned());
    let cluster = with_images(Spec { nodes: 1, mizzen_toml, ..Cluster::spec(name) });
    let tree = ImageTree::busybox().unwrap();
    tree.file("image", "directory\n").unwrap();
    cluster.share("data.sqsh", &tree.squashfs(&[]).unwrap()).unwrap();
    cluster.share("old-kernel", &PROGRAM).unwrap();
    for machine in ["ctl", "node1"] {
        let prepare =
            "mkdir -p /disk && mount -t tmpfs disk /disk && chmod 1777 /disk && chmod 755 /shared/old-kernel";
        assert_eq!(cluster.run_on(machine, User::Root, prepare).code, 0);
    }
    let unpack = "mkdir -p /shared/directory/proc && mizzen run /shared/data.sqsh tar -C / -cf - bin etc image | tar -C /shared/directory -xf -; \
                  mkdir /tmp/data && echo a > /tmp/data/a";
    assert_out(&cluster.run(unpack), 0, "");
    cluster
}

/// Runs `mizzen` without these calls.
fn without(cluster: &Cluster, calls: &str, words: &str) -> Output {
    cluster.run(&format!("TMPDIR=/local timeout 20 /shared/old-kernel {calls} -- mizzen {words}"))
}

/// Writes to the root and to a mount, which are both read-only.
const READ_ONLY: &str =
    "sh -c 'id -un; cat /image /mnt/data/a; touch /x || echo read-only; touch /mnt/data/y || echo read-only'";

fn runs_read_only(cluster: &Cluster, calls: &str, what: &str) {
    for (image, name) in [("/shared/a.sqsh", "a"), ("/shared/directory", "directory")] {
        let run = without(cluster, calls, &format!("run -m /tmp/data:/mnt/data:ro {image} {READ_ONLY}"));
        assert_eq!(
            (run.code, run.stdout),
            (0, format!("alice\n{name}\na\nread-only\nread-only\n")),
            "without {what}, {image}: {}",
            run.stderr
        );
    }
}

#[test]
fn every_newer_call_can_be_missing_or_refused() {
    let cluster = start("without-one");
    for (call, name) in CALLS {
        for error in ["ENOSYS", "EPERM"] {
            let (calls, what) = (format!("{call}:{error}"), format!("{name} ({error})"));
            runs_read_only(&cluster, &calls, &what);
            let writable = without(
                &cluster,
                &calls,
                "run --unshare pid --writable /shared/a.sqsh sh -c 'echo new > /image; cat /image; exit 3'",
            );
            assert_eq!(
                (writable.code, writable.stdout.as_str()),
                (3, "new\n"),
                "without {what}: {}",
                writable.stderr
            );
        }
    }
}

#[test]
fn runs_on_kernels_of_other_years() {
    let cluster = start("other-years");
    let empty = Emptiness::of(&cluster, &["ctl"]);
    for (calls, overlays) in [(SINCE_4_18, false), (SINCE_5_14, true), (CALLS_ALONE, true), (REFUSED, false)]
    {
        let run = |words: &str| without(&cluster, calls, words);
        runs_read_only(&cluster, calls, calls);
        assert_out(
            &run("run -m /shared/data.sqsh:/mnt:squashfs /shared/a.sqsh cat /mnt/image"),
            0,
            "directory\n",
        );
        assert_out(
            &run("run --unshare pid,ipc,net,uts /shared/a.sqsh sh -c 'ip -o link | wc -l; exit 7'"),
            7,
            "1\n",
        );
        let as_root = "run --remap-root /shared/a.sqsh sh -c 'id -u; touch /tmp/f; chown 7:7 /tmp/f; echo $?; rm /tmp/f'";
        assert_out(&run(as_root), 0, "0\n0\n");
        assert_out(&run("run --stage always /shared/a.sqsh cat /image"), 0, "a\n");
        // Ranks of one launch are together, and their server ends with the last one.
        let ranks = "for i in 1 2 3; do mizzen run --share=x /shared/a.sqsh sh -c 'readlink /proc/self/ns/mnt; sleep 1' & done; wait";
        let together =
            cluster.run(&format!("/shared/old-kernel {calls} -- bash -c \"{ranks}\" | sort -u | wc -l"));
        assert_out(&together, 0, "1\n");
        let writable = "run --writable /shared/a.sqsh sh -c 'rm /image; echo new > /etc/new; cat /etc/new'";
        let named = "run --name dev /shared/a.sqsh sh -c 'echo new > /etc/new; cat /etc/new'";
        if overlays {
            let noted = run(writable);
            assert_out(&noted, 0, "new\n");
            assert!(
                noted.stderr.starts_with("mizzen: note: changes are kept in /local/mizzen-"),
                "{calls}: {}",
                noted.text()
            );
            let saved = run("run --writable --save new.sqsh /shared/a.sqsh sh -c 'echo saved > /image'");
            assert_out(&saved, 0, "");
            assert_out(&cluster.run("mizzen run new.sqsh cat /image; rm new.sqsh"), 0, "saved\n");
        } else {
            assert_failed(
                &run(writable),
                125,
                "mizzen: --writable: cannot mount an overlay: Operation not permitted\n",
            );
            assert_failed(&run(writable), 125, &format!("mizzen: hint: {NO_OVERLAY}\n"));
            let message = "mizzen: a named container: cannot mount an overlay: Operation not permitted\n";
            let hint = "overlays in user namespaces need Linux 5.11; run without a name here\n";
            assert_told(&run(named), 125, message, hint);
        }
        let doctor = run("doctor");
        assert_eq!(doctor.code, 0, "{calls}: {}", doctor.text());
        let word = if overlays { "ok       overlay " } else { "missing  overlay " };
        assert!(doctor.stdout.contains(word), "{calls}: {}", doctor.text());
        cluster.run("mizzen containers remove dev; mizzen cache remove --all");
    }
    // Named containers need user xattrs of the file system that they are on, which is a tmpfs here.
    let calls = "424-:ENOSYS";
    for expected in ["1\n", "1\n2\n"] {
        let script = "sh -c 'echo $(( $(wc -l < /etc/new || echo 0) + 1 )) >> /etc/new; cat /etc/new'";
        assert_out(
            &without(&cluster, calls, &format!("run --name dev /shared/a.sqsh {script}")),
            0,
            expected,
        );
    }
    cluster.run("mizzen containers remove dev; rm -r /disk/* 2>/dev/null");
    empty.assert_again(&cluster, "runs without newer calls");
}

/// A large image is used while it is copied, which asks the file system about it again and again (`fstat`, `statx`); what that start has
/// read is unpacked by the next one, from the copy, and is a layer of the third, where users have overlays.
#[test]
fn images_from_the_network_on_kernels_of_other_years() {
    let cluster = large_cluster("other-years", "");
    cluster.share("old-kernel", &PROGRAM).unwrap();
    assert_eq!(cluster.run_as_root("chmod 755 /shared/old-kernel").code, 0);
    let image = format!("/shared/{LARGE}");
    let read = "grep -o lowerdir=/places[^,]* /proc/self/mountinfo; cat /data/* | wc -c; sha256sum < /data/2";
    for (calls, overlays) in
        [(SINCE_4_18, false), (SINCE_5_14, true), ("statx:ENOSYS", true), ("statx:EPERM", true)]
    {
        let start = |wait: &str| {
            cluster.run(&format!(
                "/shared/old-kernel {calls} -- mizzen run --verbose {image} sh -c '{read}; until [ -e ~/go ]; do sleep 0.1; done' & \
                 for i in $(seq 300); do {wait} && break; sleep 0.1; done; touch go; wait $!; code=$?; rm go; exit $code"
            ))
        };
        let expected = |layer: &str| {
            let lower = if overlays { format!("lowerdir=/places:{layer}/image\n") } else { String::new() };
            format!("{lower}25165824\n{}", sum_of(2))
        };
        let first = start(&format!("ls {CACHE}/profile-* > /dev/null 2>&1"));
        assert_eq!(
            (first.code, first.stdout.as_str()),
            (0, expected("").as_str()),
            "{calls}: {}",
            first.stderr
        );
        let told = first.stderr.lines().filter(|line| line.contains(" from the copy on the node, ")).count();
        assert_eq!(told, 1, "{calls}: {}", first.stderr);
        let staged = cluster.run(&format!("/shared/old-kernel {calls} -- mizzen stage {image}"));
        assert_eq!(staged.code, 0, "{calls}: {}", staged.text());
        assert_eq!(copies(&cluster), [digest_of(&cluster, &image).replace(':', "-")], "{calls}");
        // Where nobody could use them, nothing is unpacked.
        let (made, layer) =
            if overlays { ("unpacked-*/manifest", "/unpacked-0:") } else { ("profile-*.skip", "") };
        start(&format!("ls {CACHE}/{made} > /dev/null 2>&1"));
        let third = start("true");
        assert_eq!(
            (third.code, third.stdout.as_str()),
            (0, expected(layer).as_str()),
            "{calls}: {}",
            third.stderr
        );
        let found = cluster.run(&format!(
            "ls -d {CACHE}/unpack* {CACHE}/*.skip 2> /dev/null | sed 's/.*[/]\\([a-z]*\\)-.*[.-]/\\1 /'"
        ));
        assert_eq!(found.stdout, if overlays { "unpacked 0\n" } else { "profile skip\n" }, "{calls}");
        cluster.run("mizzen cache remove --all");
    }
}

/// slurmd ends and starts again, as its service would, without these calls.
fn restart_slurmd(cluster: &Cluster, calls: &str) {
    let restart = format!(
        "pid=$(cat /run/slurmd.pid); kill $pid; while [ -e /proc/$pid ] && ! grep -q 'State:.Z' /proc/$pid/status; do sleep 0.05; done; \
         setsid /shared/old-kernel {calls} -- slurmd -D </dev/null >/dev/null 2>&1 & \
         for i in $(seq 100); do grep -qs '^Seccomp:.2' /proc/$(cat /run/slurmd.pid)/status && exit; sleep 0.1; done; exit 1"
    );
    let restarted = cluster.run_on("node1", User::Root, &restart);
    assert_eq!(restarted.code, 0, "{calls}: {}", restarted.text());
}

#[test]
fn steps_on_kernels_of_other_years() {
    let cluster = start("steps-of-other-years");
    // On the login node, and not on the other.
    cluster.run("cp /shared/a.sqsh /tmp/here.sqsh");
    let empty = Emptiness::of(&cluster, &["node1"]);
    for (calls, overlays) in [(SINCE_4_18, false), (SINCE_5_14, true), (REFUSED, false)] {
        restart_slurmd(&cluster, calls);
        let srun = |options: &str, words: &str| cluster.run(&format!("srun -Q {options} {words}"));
        let image = "--container=/shared/a.sqsh";
        let together = srun(
            &format!("-n4 {image}"),
            "sh -c 'cat /image; id -G; readlink /proc/self/ns/mnt' | sort -u | grep -v mnt",
        );
        assert_out(&together, 0, "2001 2100 2101\na\n");
        let namespaces = srun(&format!("-n4 {image}"), "readlink /proc/self/ns/mnt | sort -u | wc -l");
        assert_out(&namespaces, 0, "1\n");
        assert_eq!(namespaces.stderr, "", "{calls}");
        // A program inside runs Slurm's commands.
        let script = "printf '#!/bin/sh\nsqueue --noheader --format=%%u\nsrun -Q cat /image\n' > job.sh";
        let job = format!("{script}; sbatch -Q --wait --output=out {image} job.sh; cat out; rm job.sh out");
        assert_out(&cluster.run(&job), 0, "alice\na\n");
        assert_out(&srun(&format!("{image} --container-remap-root"), "id -u"), 0, "0\n");
        // Fails as anywhere: with a message, and not on the host.
        let missing = srun("--container=/tmp/here.sqsh", "touch /shared/marker");
        assert_failed(&missing, 125, "mizzen: node1: /tmp/here.sqsh: No such file or directory\n");
        assert_failed(&srun(image, "nosuch"), 127, "nosuch: no such program");
        let writable =
            srun(&format!("{image} --container-writable"), "sh -c 'echo new > /image; cat /image'");
        if overlays {
            assert_out(&writable, 0, "new\n");
        } else {
            assert_failed(&writable, 125, "--writable: cannot mount an overlay: Operation not permitted\n");
            assert_failed(&writable, 125, &format!("mizzen: hint: {NO_OVERLAY}\n"));
            assert_eq!(cluster.run("ls /shared/marker").stdout, "");
        }
        let began = std::time::Instant::now();
        let killed = srun(&format!("-n2 {image}"), "sh -c '[ $SLURM_PROCID = 1 ] && kill -KILL $$; sleep 1'");
        assert_eq!(killed.code, 137, "{calls}: {}", killed.text());
        assert!(began.elapsed().as_secs() < 15, "{calls}");
        cluster.run("rm -rf /local/mizzen-*");
        empty.assert_again(&cluster, calls);
    }
}
