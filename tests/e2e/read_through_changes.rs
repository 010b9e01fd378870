//! Images that are used while they are copied, when the original changes, fails, hangs, or is gone. A program gets the bytes of the
//! image that was opened, or an error; a copy is whole or there is none.

use mizzen_tests::User;
use mizzen_tests::check::{assert_failed, assert_out, run_in_time};
use mizzen_tests::copies::{
    CACHE, LARGE, assert_recovers, copies, large_cluster, signal_server, slow_mount, sum_of,
};

/// What becomes of a program when its image changes while it is copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Outcome {
    /// It reads what the image had when it was opened.
    ReadsOn,
    /// It reads the original from then on, as without a copy, and its user is told.
    InPlace,
    /// It is ended, with a message.
    Ended,
}

/// A file system whose server, behind whose back everything happens here, knows files by their paths only. It is slow.
const BY_PATH: &str = "/slow";
/// One on which an open file stays what it is, whatever becomes of its names. The copier is slow there.
const BY_INODE: &str = "/run/shared-backing";

#[test]
fn an_original_that_changes_gives_no_mixture() {
    use Outcome::{Ended, InPlace, ReadsOn};
    let cluster = large_cluster("changes", "");
    let settings = cluster.run("cat /etc/mizzen/mizzen.toml").stdout;
    let with_both = settings.replace("[\"fuse\"]", "[\"fuse\", \"tmpfs\"]");
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", &with_both).unwrap();
    slow_mount(&cluster, "8M");
    let write = "dd if=/dev/urandom of=$f bs=1M seek=10 count=13 conv=notrunc 2>/dev/null";
    let written_back = format!("touch -r $f $f.time; {write}; touch -r $f.time $f");
    let table = [
        ("written", BY_PATH, write, Ended),
        ("shortened", BY_PATH, "truncate -s 15000000 $f", Ended),
        ("other", BY_PATH, "head -c 25000000 /dev/urandom > $f.new; mv $f.new $f", Ended),
        ("mode", BY_PATH, "chmod 444 $f", InPlace),
        ("linked", BY_PATH, "ln $f $f.link", InPlace),
        ("written-back", BY_PATH, &written_back, InPlace),
        ("moved", BY_INODE, "mv $f $f.old", InPlace),
        ("replaced", BY_INODE, "cp $f $f.new; mv $f.new $f", ReadsOn),
        ("replaced-linked", BY_INODE, "ln $f $f.link; cp $f $f.new; mv $f.new $f", InPlace),
        ("removed", BY_INODE, "rm $f", ReadsOn),
        ("overwritten", BY_INODE, write, Ended),
    ];
    let backing = |row: &str| format!("{BY_INODE}/{row}.sqsh");
    for (row, ..) in &table {
        cluster.run_as_root(&format!("cp {BY_INODE}/{LARGE} {0} && chmod 644 {0}", backing(row)));
    }
    std::thread::sleep(std::time::Duration::from_millis(1200));
    let mut starts = String::new();
    for (row, place, ..) in &table {
        // Of what the copier calls pread64 for, a part is the original.
        let slowly = if *place == BY_INODE {
            "strace -f -o /dev/null -e trace=pread64 -e inject=pread64:delay_enter=20000"
        } else {
            ""
        };
        starts += &format!(
            "({slowly} mizzen run {place}/{row}.sqsh sh -c 'touch {row}.ready; until [ -e go ]; do sleep 0.1; done; sha256sum < /data/2'; \
             touch {row}.ended) > {row}.out 2> {row}.err & "
        );
    }
    for (row, ..) in &table {
        starts += &format!("until [ -e {row}.ready ]; do sleep 0.1; done; ");
    }
    let started = cluster.run(&starts);
    assert_eq!(started.code, 0, "{}", started.text());
    assert!(copies(&cluster).is_empty(), "they were copied before they could change");
    for (row, _, change, _) in &table {
        let changed = cluster.run_as_root(&format!("f={}; {change}", backing(row)));
        assert_eq!(changed.code, 0, "{row}: {}", changed.text());
    }
    // The copier sees it when it reads next.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    cluster.run("touch go");
    for (row, place, _, outcome) in table {
        let end = cluster
            .run(&format!("until [ -e {row}.ended ]; do sleep 0.1; done; cat {row}.out; cat {row}.err >&2"));
        let image = format!("{place}/{row}.sqsh");
        let expected = match (row, outcome) {
            (_, Ended) => String::new(),
            ("written-back", _) => {
                cluster.run(&format!("mizzen run --stage=never {image} sh -c 'sha256sum < /data/2'")).stdout
            }
            _ => sum_of(2),
        };
        assert_eq!(end.stdout, expected, "{row}: {}", end.text());
        let ended = format!("mizzen: {image}: cannot read /data/2 in it, so the container was ended: ");
        let note = format!(
            "mizzen: note: {image}: its copy on the node is not completed: its times, names or mode were changed meanwhile; it is read from where it is"
        );
        assert_eq!(
            end.stderr.matches(&ended).count(),
            usize::from(outcome == Ended),
            "{row}: {}",
            end.text()
        );
        assert_eq!(
            end.stderr.matches(&note).count(),
            usize::from(outcome == InPlace),
            "{row}: {}",
            end.text()
        );
    }
    assert!(copies(&cluster).is_empty(), "a copy was made of two files");
}

/// A file system's client believes for a while what it was told of a file. The file server, which reads the original itself where
/// there is no copier, must not.
#[test]
fn a_change_that_is_not_seen_yet_gives_no_mixture() {
    let cluster = large_cluster("unseen", "");
    // Of a file system that can be written to, the kernel asks after each read when the file was read last, and hears of the change.
    let image = format!("/far/{LARGE}");
    let mounted = cluster.run_as_root(
        "mkdir /far; bindfs -o ro,allow_other,attr_timeout=60,entry_timeout=60 --read-rate=4M /run/shared-backing /far",
    );
    assert_eq!(mounted.code, 0, "{}", mounted.text());
    std::thread::sleep(std::time::Duration::from_millis(1200));
    cluster.run(&format!("mizzen run {image} sh -c 'until [ -e go ]; do sleep 0.1; done; sha256sum < /data/2' > out 2> err & echo $! > pid; sleep 1; pkill -9 -u alice -x mizzen-copy"));
    let believed = cluster.run(&format!("stat -c %z {image}"));
    cluster.run_as_root(&format!(
        "dd if=/dev/urandom of=/run/shared-backing/{LARGE} bs=1M seek=10 count=13 conv=notrunc 2>/dev/null"
    ));
    assert_eq!(cluster.run(&format!("stat -c %z {image}")).stdout, believed.stdout, "the change is seen");
    let end = run_in_time(
        &cluster,
        "touch go; for i in $(seq 100); do kill -0 $(cat pid) 2>/dev/null || break; sleep 0.1; done; cat out; cat err >&2",
    );
    assert_eq!(end.stdout, "", "{}", end.text());
    let failed = format!(
        "mizzen: {image}: cannot read /data/2 in it, so the container was ended: reading the image at byte "
    );
    assert!(end.stderr.contains(&failed), "{}", end.text());
    let cause = ": it was changed or replaced while it was being copied to the node\n";
    assert_eq!(end.stderr.matches(cause).count(), 1, "{}", end.text());
    assert!(copies(&cluster).is_empty(), "a copy was made of two files");
}

#[test]
fn an_original_that_fails_is_told_of() {
    let cluster = large_cluster("unreadable", "");
    let image = format!("/shared/{LARGE}");
    for error in ["EIO", "ESTALE"] {
        cluster.run(&format!("rm -rf {CACHE}"));
        let inject = format!("-e trace=pread64 -e inject=pread64:error={error}:when=40+");
        let failed = cluster.run(&format!(
            "(strace -f -o /dev/null {inject} mizzen run {image} sh -c 'sha256sum < /data/0 && sha256sum < /data/2'; exit $?) 2> >(cat >&2)"
        ));
        assert!(failed.code != 0, "{error}: {}", failed.text());
        assert!(failed.stderr.contains(&format!("mizzen: {image}: ")), "{error}: {}", failed.text());
        assert!(copies(&cluster).is_empty());
        assert_recovers(&cluster, &image, error);
    }
    // One whose file system is gone.
    slow_mount(&cluster, "8M");
    let gone = cluster.run(&format!(
        "rm -rf {CACHE}; (mizzen run /slow/{LARGE} sh -c 'touch ready; until [ -e go ]; do sleep 0.1; done; sha256sum < /data/2'; touch gone) > out 2> err & \
         until [ -e ready ]; do sleep 0.1; done"
    ));
    assert_eq!(gone.code, 0, "{}", gone.text());
    let killed = cluster.run_on(
        "ctl",
        User::Root,
        "for p in $(pgrep -f 'bindfs.*/slow$'); do [ $(readlink /proc/$p/ns/mnt) = $(readlink /proc/self/ns/mnt) ] && kill -9 $p && echo $p; done",
    );
    assert_eq!(killed.stdout.lines().count(), 1, "{}", killed.text());
    let ended =
        run_in_time(&cluster, "touch go; until [ -e gone ]; do sleep 0.1; done; cat out; cat err >&2");
    assert_eq!(ended.stdout, "", "{}", ended.text());
    let failed = format!("mizzen: /slow/{LARGE}: cannot read /data/2 in it, so the container was ended: ");
    assert_eq!(ended.stderr.matches(&failed).count(), 1, "{}", ended.text());
    assert!(copies(&cluster).is_empty());
    cluster.run_as_root("umount -l /slow");
    assert_recovers(&cluster, &image, "gone");
    // One that hangs stops who reads it, and nobody else; when it goes on, so do they.
    signal_server(&cluster, "ctl", "STOP");
    cluster.run(&format!("(mizzen run {image} cat /image > hung; touch ended) > /dev/null 2>&1 &"));
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert_failed(&cluster.run("cat ended"), 1, "No such file");
    signal_server(&cluster, "ctl", "CONT");
    assert_out(&cluster.run("until [ -e ended ]; do sleep 0.1; done; cat hung"), 0, "large\n");
}
