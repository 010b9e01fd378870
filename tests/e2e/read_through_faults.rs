//! Images that are used while they are copied, when something fails on the node: copiers that are killed or stopped, disks that
//! are full or lose what was written, power loss. A program gets the bytes of the image that was opened, or an error; a copy is whole or there is none.

use mizzen_tests::check::{assert_out, count, run_in_time};
use mizzen_tests::copies::{
    CACHE, LARGE, assert_recovers, assert_sound, copies, digest_of, inject, large_cluster, signal_slow_disk,
    slow_mount, sum_of,
};
use mizzen_tests::{Cluster, User};

#[test]
fn a_dead_or_stopped_copier_stops_nobody() {
    let cluster = large_cluster("copier", "");
    let image = format!("/slow/{LARGE}");
    slow_mount(&cluster, "6M");
    let dead = cluster.run(&format!(
        "mizzen run {image} sh -c 'until [ -e go ]; do sleep 0.1; done; sha256sum < /data/0' & sleep 1; \
         pkill -9 -u alice -x mizzen-copy; touch go; wait"
    ));
    assert_out(&dead, 0, &sum_of(0));
    // Another start goes on, also while one that is stopped has the lock.
    let stopped = run_in_time(
        &cluster,
        &format!(
            "rm -rf {CACHE} go; mizzen run {image} sh -c 'until [ -e go ]; do sleep 0.1; done' & sleep 1; \
             pkill -STOP -u alice -x mizzen-copy; mizzen run {image} sh -c 'head -c 2000000 /data/2 | wc -c'; \
             pkill -CONT -u alice -x mizzen-copy; touch go; wait"
        ),
    );
    assert_out(&stopped, 0, "2000000\n");
    assert_recovers(&cluster, &format!("/shared/{LARGE}"), "stopped copier");
}

/// The processes of a suspended job keep their locks, on the image and on what they were fetching.
#[test]
fn who_waits_for_a_copy_does_not_wait_for_a_suspended_job() {
    let cluster = large_cluster("suspended", "");
    slow_mount(&cluster, "8M");
    let image = format!("/slow/{LARGE}");
    let digest = digest_of(&cluster, &format!("/shared/{LARGE}"));
    let begin = std::time::Instant::now();
    let waited = cluster.run(&format!(
            "mizzen run {image} sh -c 'touch ready; until [ -e go ]; do sleep 0.1; done; sha256sum < /data/0' > out 2> err & \
             until [ -e ready ]; do sleep 0.1; done; sleep 0.5; pkill -STOP -u alice -x mizzen-copy; \
             mizzen run {image}@{digest} cat /image & pinned=$!; mizzen stage {image} >&2 && wait $pinned"
    ));
    assert_out(&waited, 0, "large\n");
    assert!(begin.elapsed() < std::time::Duration::from_secs(45), "{:?}", begin.elapsed());
    assert_eq!(copies(&cluster), [digest.replace(':', "-")]);
    let went_on = run_in_time(
        &cluster,
        "pkill -CONT -u alice -x mizzen-copy; touch go; until [ -s out ]; do sleep 0.1; done; sleep 0.5; cat out",
    );
    assert_out(&went_on, 0, &sum_of(0));
    assert_sound(&cluster, "suspended");
    // As Slurm does it.
    let mounted = cluster.run_on(
        "node1",
        User::Root,
        "mkdir /slow; bindfs -o allow_other --read-rate=8M /run/shared-backing /slow",
    );
    assert_eq!(mounted.code, 0, "{}", mounted.text());
    let wait = "touch started; until [ -e end ]; do sleep 0.1; done; sha256sum < /data/0";
    let submitted = cluster.run(&format!(
        "rm -f started end; sbatch -n1 --mem=500 --output=job --container-image={image} --wrap '{wait}'; until [ -e started ]; do sleep 0.1; done; sleep 0.3"
    ));
    assert_eq!(submitted.code, 0, "{}", submitted.text());
    assert_eq!(cluster.run_as_root("scontrol suspend $(squeue -ho %i)").code, 0);
    let staged = cluster
        .run(&format!("srun -n1 --mem=500 sh -c 'mizzen stage {image} >&2; ls {CACHE} | grep sha256-'"));
    assert_out(&staged, 0, &(digest.replace(':', "-") + "\n"));
    let resumed =
        cluster.run_as_root("squeue -ho %T; scontrol resume $(squeue -ho %i); touch /home/alice/end");
    assert_out(&resumed, 0, "SUSPENDED\n");
    let ended = cluster.run("while [ -n \"$(squeue -h)\" ]; do sleep 0.1; done; cat job");
    assert_out(&ended, 0, &sum_of(0));
}

#[test]
fn a_disk_that_is_full_is_a_note() {
    let cluster = large_cluster("full", "");
    let image = format!("/shared/{LARGE}");
    for (calls, error, why) in [
        ("pwrite64", "ENOSPC", "No space left on device"),
        ("pwrite64", "EDQUOT", "Disk quota exceeded"),
        ("pwrite64", "EIO", "Input/output error"),
    ] {
        cluster.run(&format!("rm -rf {CACHE}"));
        let inject = format!("-e trace={calls} -e inject={calls}:error={error}:when=5+");
        let full = cluster.run(&format!(
            "strace -f -o /dev/null {inject} mizzen run {image} sh -c 'sleep 0.5; sha256sum < /data/0; sha256sum < /data/2'"
        ));
        assert_out(&full, 0, &(sum_of(0) + &sum_of(2)));
        let note = format!(
            "mizzen: note: {image}: its copy on the node is not completed: {why}; it is read from where it is"
        );
        assert_eq!(full.stderr.matches(&note).count(), 1, "{error}: {}", full.text());
        assert_recovers(&cluster, &image, error);
    }
    // Where it cannot even begin.
    let inject = inject("mkdirat", "error=ENOSPC:when=2");
    let unmade = cluster
        .run(&format!("rm -rf {CACHE}; strace -f -o /dev/null {inject} mizzen run {image} cat /image"));
    assert_out(&unmade, 0, "large\n");
    assert!(
        unmade.stderr.contains(&format!("note: ctl: {image} is used where it is: ")),
        "{}",
        unmade.text()
    );
}

/// A disk that others fill: copies that nobody uses go, and where there are none the copy in the making does.
#[test]
fn a_disk_that_others_fill_has_room_or_nothing_stays() {
    let cluster = large_cluster("filled", "stage_directory = \"/disk\"\nstage_max_size = \"\"\n");
    let made = cluster.run_as_root(&format!(
        "truncate -s 76m /tmp/disk && mkfs.ext4 -q -m 0 -E lazy_itable_init=0 -J size=4 /tmp/disk && mkdir /disk && \
         mount -o loop /tmp/disk /disk && chmod 1777 /disk && cd /run/shared-backing && \
         (cat {LARGE}; head -c 4096 /dev/zero) > other.sqsh"
    ));
    assert_eq!(made.code, 0, "{}", made.text());
    slow_mount(&cluster, "8M");
    let image = format!("/slow/{LARGE}");
    let wait = "until [ -e go ]; do sleep 0.1; done; cat /data/0 /data/2 | sha256sum";
    let expected = cluster
        .run(&format!("mizzen run --stage=never /shared/{LARGE} sh -c 'cat /data/0 /data/2 | sha256sum'"))
        .stdout;
    let full = "its copy on the node is not completed: No space left on device";
    let digest = digest_of(&cluster, &format!("/shared/{LARGE}")).replace(':', "-");
    for (has_unused, notes) in [(true, 0), (false, 1)] {
        cluster.run_as_root("rm -f /disk/others");
        cluster.run("mizzen cache remove --all; rm -f go ready");
        if has_unused {
            assert_eq!(cluster.run("mizzen stage /shared/other.sqsh").code, 0);
        }
        cluster.run(&format!(
            "mizzen run {image} sh -c 'touch ready; {wait}' > out 2> err & until [ -e ready ]; do sleep 0.1; done"
        ));
        let filled = cluster.run_as_root("dd if=/dev/zero of=/disk/others bs=1M 2>&1; df -m /disk | tail -1");
        assert!(filled.stdout.contains("No space left on device"), "{}", filled.text());
        let until = if has_unused {
            format!("-e /disk/mizzen-2001/{digest}")
        } else {
            "! -e /disk/mizzen-2001/partial-*".to_owned()
        };
        let ended = run_in_time(
            &cluster,
            &format!(
                "for i in $(seq 150); do [ {until} ] && break; sleep 0.1; done; touch go; until [ -s out ]; do sleep 0.1; done; \
                 while pgrep -u alice -x mizzen-copy; do sleep 0.1; done > /dev/null; cat out; cat err >&2"
            ),
        );
        assert_out(&ended, 0, &expected);
        assert_eq!(ended.stderr.matches(full).count(), notes, "{}", ended.text());
        let left = cluster.run("ls /disk/mizzen-2001 | grep -E 'partial-|sha256-'").stdout;
        let completed = if has_unused { format!("{digest}\n") } else { String::new() };
        assert_eq!(left, completed, "unused copies: {has_unused}");
    }
}

/// What the disk could not write may be read as zeros later, although it is marked as written. The kernel says so once, to one
/// process; all others who use the copy must not go on with it.
#[test]
fn what_the_disk_has_lost_is_read_from_the_original() {
    let cluster = large_cluster("lost", "");
    // Both are there before all of it is.
    slow_mount(&cluster, "8M");
    let image = format!("/slow/{LARGE}");
    let inject = "-e trace=fdatasync -e inject=fdatasync:error=EIO";
    let wait = "until [ -e go ]; do sleep 0.1; done; sha256sum < /data/0";
    let started = cluster.run(&format!(
        "rm -rf {CACHE}; strace -f -o /dev/null {inject} mizzen run {image} sh -c '{wait}' > out1 2> err1 & \
         until [ -e {CACHE}/partial-* ]; do sleep 0.1; done; sleep 0.3; \
         mizzen run {image} sh -c 'touch ready; {wait}' > out2 2> err2 & \
         for i in $(seq 150); do [ -e ready ] && ! [ -e {CACHE}/partial-* ] && break; sleep 0.1; done; ls {CACHE}"
    ));
    assert!(!started.stdout.contains("partial-"), "the disk was not asked: {}", started.text());
    assert_eq!(zero_data(&cluster).code, 0);
    let ended = run_in_time(
        &cluster,
        "touch go; for i in $(seq 100); do [ -s out1 ] && [ -s out2 ] && break; sleep 0.1; done; sleep 1; cat out1 out2; cat err1 err2 >&2",
    );
    assert_out(&ended, 0, &sum_of(0).repeat(2));
    let note = format!(
        "mizzen: note: {image}: its copy on the node is not completed: Input/output error; it is read from where it is"
    );
    assert_eq!(ended.stderr.matches(&note).count(), 2, "{}", ended.text());
    assert!(copies(&cluster).is_empty(), "a copy was made of what was lost");
    assert_recovers(&cluster, &image, "lost");
}

/// Who has the disk write what is there, and tells when it cannot, is the copier. Without one only what is on disk counts.
#[test]
fn without_a_copier_what_is_not_on_disk_is_read_from_the_original() {
    let cluster = large_cluster("unsynced", "");
    slow_mount(&cluster, "8M");
    let started = cluster.run(&format!(
        "mizzen run /slow/{LARGE} sh -c 'touch ready; until [ -e go ]; do sleep 0.1; done; sha256sum < /data/0; sha256sum < /data/2' > out 2> err & \
         until [ -e ready ]; do sleep 0.1; done; sleep 1; pkill -9 -u alice -x mizzen-copy; \
         tail -c +4097 {CACHE}/partial-*/record | tr -dc w | wc -c"
    ));
    let written: u32 = started.stdout.trim().parse().unwrap();
    assert!(written > 8, "{}", started.text());
    // As a disk does that has lost all, and has told nobody.
    let lost = cluster.run_as_root(&format!(
        "dd if=/dev/zero of=$(echo {CACHE}/partial-*/data) bs=1M count=24 conv=notrunc"
    ));
    assert_eq!(lost.code, 0, "{}", lost.text());
    let ended = run_in_time(
        &cluster,
        "touch go; until [ $(wc -l < out) = 2 ]; do sleep 0.1; done; cat out; cat err >&2",
    );
    assert_out(&ended, 0, &(sum_of(0) + &sum_of(2)));
    assert_eq!(ended.stderr, "");
}

/// Does to the copies in the making that processes on the login node have open what a disk does that has lost all.
fn zero_data(cluster: &Cluster) -> mizzen_tests::Output {
    let script = "n=0; for p in $(pgrep -x mizzen-copy); do \
                  [ $(readlink /proc/$p/ns/mnt) = $(readlink /proc/self/ns/mnt) ] || continue; \
                  for fd in /proc/$p/fd/*; do case $(readlink $fd) in *'/data (deleted)') \
                  dd if=/dev/zero of=$fd bs=1M count=24 conv=notrunc 2>/dev/null && n=1;; esac; done; done; [ $n = 1 ]";
    cluster.run_on("ctl", User::Root, script)
}

/// The disk with the copies is cut off while images are copied; in the next boot of the node they are as they should be.
#[test]
fn power_loss_leaves_no_wrong_copy() {
    let toml = "stage_directory = \"/disk\"\nstage_max_size = \"\"\n";
    let cluster = large_cluster("power", toml);
    let made = cluster.run_as_root(
        "truncate -s 80m /shared/disk && mkfs.ext4 -q -E lazy_itable_init=0 -J size=4 /shared/disk && mkdir /disk && \
         mount -o loop,commit=1 /shared/disk /disk && chmod 1777 /disk && sync -f /disk",
    );
    assert_eq!(made.code, 0, "{}", made.text());
    slow_mount(&cluster, "20M");
    let image = format!("/slow/{LARGE}");
    cluster.run(&format!(
        "(while [ ! -e stop ]; do mizzen run {image} sh -c 'head -c 300000 /data/1; sleep 0.4' ; [ -e /disk/mizzen-2001/sha256-* ] && mizzen cache remove --all; done; touch stopped) > /dev/null 2>&1 &"
    ));
    let losses = count(6, 20);
    for loss in 0..losses {
        // Not in step with the copies.
        std::thread::sleep(std::time::Duration::from_millis(240 + u64::from(loss) * 97 % 340));
        signal_slow_disk(&cluster, "STOP");
        let saved =
            cluster.run_as_root(&format!("cp --sparse=always /run/shared-backing/disk /local/{loss}"));
        signal_slow_disk(&cluster, "CONT");
        assert_eq!(saved.code, 0, "{}", saved.text());
    }
    cluster.run("touch stop; until [ -e stopped ]; do sleep 0.1; done");
    let unmounted = cluster.run_as_root("for i in $(seq 50); do umount /disk && break; sleep 0.1; done");
    assert_eq!(unmounted.code, 0, "{}", unmounted.text());
    let expected = digest_of(&cluster, &format!("/shared/{LARGE}")).replace(':', "-");
    let mut resumed = 0;
    for loss in 0..losses {
        // After a power loss the node has booted anew.
        let booted = cluster.run_as_root(&format!(
            "mount -o loop /local/{loss} /disk && cat /proc/sys/kernel/random/uuid > /tmp/boot && \
             mount --bind /tmp/boot /proc/sys/kernel/random/boot_id"
        ));
        assert_eq!(booted.code, 0, "{}", booted.text());
        let what = format!("power loss {loss}");
        resumed += u32::from(!cluster.run("ls -d /disk/mizzen-2001/partial-*").stdout.is_empty());
        let again = run_in_time(
            &cluster,
            &format!(
                "mizzen run {image} sh -c 'sha256sum < /data/0'; mizzen stage {image} >&2; ls /disk/mizzen-2001 | grep sha256"
            ),
        );
        assert_out(&again, 0, &format!("{}{expected}\n", sum_of(0)));
        let wrong = cluster.run(&format!("sha256sum < /disk/mizzen-2001/{expected} | cut -d' ' -f1"));
        assert_eq!(format!("sha256-{}", wrong.stdout), format!("{expected}\n"), "{what}");
        cluster.run_as_root(&format!("umount /proc/sys/kernel/random/boot_id; for i in $(seq 50); do umount /disk && break; sleep 0.1; done; rm /local/{loss}"));
    }
    assert!(resumed >= losses / 3, "only {resumed} of {losses} losses had something to go on from");
}
