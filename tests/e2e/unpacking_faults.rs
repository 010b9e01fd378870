//! Files that are unpacked for the next start, when something fails meanwhile: the unpacker is killed, a call of it fails, the disk
//! loses what was written, the image hangs or is another one. A program gets the bytes of its image, and what is left is finished or
//! removed by the next start.

use std::process::Command;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use mizzen_tests::check::{assert_out, count, run_in_time, start_with_busybox, with_busybox};
use mizzen_tests::copies::{CACHE, signal_server, signal_slow_disk, staging_cluster};
use mizzen_tests::images::ImageTree;
use mizzen_tests::{Cluster, SharedFs, Spec, User, run_tool};

/// Its files /data/0 and so on are more than one child of an unpacker writes; and what `md5sum` says of them.
static MANY: LazyLock<(Vec<u8>, String)> = LazyLock::new(|| many(1));
/// Another one, of the same size or nearly.
static OTHER: LazyLock<(Vec<u8>, String)> = LazyLock::new(|| many(2));

const FILES: u32 = 180;

fn many(seed: u32) -> (Vec<u8>, String) {
    let tree = ImageTree::busybox().unwrap();
    for number in 0..FILES {
        let word = |word: u32| format!("{:08x} ", (word ^ number ^ seed << 20).wrapping_mul(2_654_435_761));
        tree.file(&format!("data/{number}"), &(0..24_000).map(word).collect::<String>()).unwrap();
    }
    let sums = "find data -type f | sort | xargs md5sum";
    let expected = run_tool(Command::new("sh").args(["-c", sums]).current_dir(tree.path("."))).unwrap();
    (tree.squashfs(&["-comp", "zstd"]).unwrap(), expected)
}

const SUMS: &str = "cd /; find data -type f | sort | xargs md5sum";
const LAYERS: &str = "grep -o 'lowerdir=/places:/unpacked-0:/image' /proc/self/mountinfo";
const WITH_LAYER: &str = "lowerdir=/places:/unpacked-0:/image\n";
/// What there is when the layer is complete.
const COMPLETE: &str = "profile profile.lock room.lock unpacked-0 ";

/// Where tests run, the disk may be fuller than a node's.
fn configure(cluster: &Cluster, toml: &str) {
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", &format!("stage_keep_free = \"\"\n{toml}")).unwrap();
}

/// A start on a machine is noted, and nothing is unpacked.
fn note(cluster: &Cluster, machine: &str) {
    configure(cluster, "stage_unpacked_max_size = \"1m\"\n");
    let noted = cluster.run_on(
        machine,
        User::Alice,
        &format!(
            "mizzen run /shared/many.sqsh sh -c \"{SUMS}; sleep 2\" | tail -1; \
             while pgrep -u alice -x mizzen-unpack > /dev/null; do sleep 0.05; done; rm -f {CACHE}/*.skip"
        ),
    );
    assert_eq!(noted.code, 0, "{}", noted.text());
    configure(cluster, "");
}

fn noted_cluster(name: &str) -> Cluster {
    let cluster = with_busybox(&format!("unpacking-{name}"));
    cluster.share("many.sqsh", &MANY.0).unwrap();
    note(&cluster, "ctl");
    cluster
}

/// Has a process of Alice's wait for the room that it needs: it can be looked at then.
const HOLD: &str = "rm -f go free held ended out err; \
     flock $cache/room.lock sh -c 'touch held; until [ -e free ]; do sleep 0.02; done' > /dev/null 2>&1 & \
     until [ -e held ]; do sleep 0.02; done";

/// A start whose unpacker waits.
#[track_caller]
fn start_held(cluster: &Cluster, cache: &str) {
    let started = cluster.run(&format!(
        "while pgrep -u alice -x mizzen-unpack > /dev/null; do sleep 0.02; done; cache={cache}; {HOLD}; (mizzen run /shared/many.sqsh sh -c \"until [ -e ~/go ]; do sleep 0.05; done; {SUMS}\" > out 2> err; touch ended) > /dev/null 2>&1 & \
         until pgrep -u alice -x mizzen-unpack > /dev/null; do sleep 0.02; done"
    ));
    assert_eq!(started.code, 0, "{}", started.text());
}

/// Its unpacker goes on, and this happens to its calls. Tells how often.
#[track_caller]
fn inject(cluster: &Cluster, call: &str, what: &str) -> u32 {
    start_held(cluster, CACHE);
    // One that finds nothing to do has ended by then.
    let traced = cluster.run_as_root(&format!(
        "sleep 0.3; p=$(pgrep -o -u alice -x mizzen-unpack); \
         strace -f -p $p -o /tmp/trace -e trace={call} -e inject={call}:{what} > /dev/null 2>&1 & \
         until [ ! -e /proc/$p ] || grep -q 'TracerPid:.*[1-9]' /proc/$p/status; do sleep 0.02; done; touch /home/alice/free; wait; \
         grep -cE 'SIGKILL|INJECTED' /tmp/trace"
    ));
    let ended =
        run_in_time(cluster, "touch go; until [ -e ended ]; do sleep 0.02; done; cat out; cat err >&2");
    assert_out(&ended, 0, &MANY.1);
    assert_eq!(ended.stderr, "", "{what} at {call}");
    traced.stdout.trim().parse().unwrap()
}

/// The next start has the right files; it finishes what was begun, and removes all else.
#[track_caller]
fn assert_recovers(cluster: &Cluster, what: &str) {
    let next = cluster.run(&format!(
        "rm -f go {CACHE}/*.skip; (for i in $(seq 300); do [ -e {CACHE}/unpacked-*/manifest ] && break; sleep 0.05; done; touch go) & \
         mizzen run /shared/many.sqsh sh -c \"{SUMS}; until [ -e ~/go ]; do sleep 0.05; done\""
    ));
    assert_out(&next, 0, &MANY.1);
    let names = cluster.run(&format!("ls {CACHE} | sed 's/-[0-9a-f]*//' | tr '\\n' ' '"));
    assert_eq!(names.stdout, COMPLETE, "{what}");
    let last = cluster
        .run(&format!("mizzen run /shared/many.sqsh sh -c \"{LAYERS}; {SUMS}\"; rm -rf {CACHE}/unpacked-*"));
    assert_out(&last, 0, &format!("{WITH_LAYER}{}", MANY.1));
}

/// No unpacker tries the same again.
#[track_caller]
fn assert_skipped(cluster: &Cluster, cache: &str) {
    let again = cluster.run(&format!(
        "strace -f -o trace -e trace=prctl mizzen run /shared/many.sqsh sh -c \"{SUMS}; sleep 1.5\"; \
         grep -c mizzen-unpack trace; ls {cache} | sed 's/-[0-9a-f]*//' | tr '\n' ' '"
    ));
    assert_out(&again, 0, &format!("{}0\nprofile profile.lock profile.skip room.lock ", MANY.1));
}

/// Calls by which files are unpacked, and which of them are tried in the long form. In the short form the first half is tried, each
/// once.
const CALLS: [(&str, u32); 10] = [
    ("renameat", 1),
    ("write", 97),
    ("openat", 61),
    ("utimensat", 37),
    ("unlinkat", 11),
    ("mkdirat", 1),
    ("fchmod", 53),
    ("flock", 1),
    ("pread64", 41),
    ("sync_file_range", 1),
];

/// So many are tried in the long form.
const MOST: u32 = 8;

#[test]
fn kills_leave_no_wrong_file() {
    let cluster = noted_cluster("kills");
    for (call, step) in CALLS.into_iter().take(count(5, 10) as usize) {
        let mut killed = 0;
        for turn in 1..=count(1, MOST) {
            let when = turn * step;
            let times = inject(&cluster, call, &format!("signal=KILL:when={when}"));
            assert_recovers(&cluster, &format!("KILL at {call} {when}"));
            if times == 0 {
                break;
            }
            killed += 1;
        }
        assert!(killed > 0, "no unpacker makes a call of {call}");
    }
}

/// An error is none of the program's; and a disk that was filled is not filled again at once. (A child whose call is made to fail is
/// killed: its filter sees another call.)
#[test]
fn errors_leave_no_wrong_file() {
    let cluster = noted_cluster("errors");
    let table = [
        ("write", "EDQUOT:when=1"),
        ("renameat", "EIO"),
        ("openat", "EIO:when=20+"),
        ("mkdirat", "EDQUOT"),
        ("utimensat", "EPERM"),
        ("fchmod", "EIO"),
        ("unlinkat", "EIO"),
        ("flock", "ENOLCK"),
        ("pread64", "EIO"),
        ("write", "EIO:when=4"),
        ("mkdirat", "ENOSPC:when=3"),
        ("openat", "EIO:when=40"),
    ];
    for (call, error) in table.into_iter().take(count(4, 12) as usize) {
        let what = format!("{error} of {call}");
        let times = inject(&cluster, call, &format!("error={error}"));
        assert_ne!(times, 0, "no unpacker makes a call of {call}");
        if error.starts_with("ENOSPC") || error.starts_with("EDQUOT") {
            let again = cluster.run(&format!(
                "strace -f -o trace -e trace=prctl mizzen run /shared/many.sqsh sh -c \"{SUMS}; sleep 1.5\"; \
                 grep -c mizzen-unpack trace; ls {CACHE} | sed 's/-[0-9a-f]*//' | tr '\\n' ' '"
            ));
            let left = format!("{}0\nprofile profile.lock profile.skip room.lock ", MANY.1);
            assert_out(&again, 0, &left);
        }
        assert_recovers(&cluster, &what);
    }
}

/// Others fill the disk when room was made, so that a child meets it.
#[test]
fn a_disk_that_others_fill_is_not_filled_again() {
    let cluster = with_busybox("unpacking-full");
    cluster.share("many.sqsh", &MANY.0).unwrap();
    let made = cluster.run_as_root(
        "truncate -s 100m /tmp/disk && mkfs.ext4 -q -m 0 -E lazy_itable_init=0 -J size=4 /tmp/disk && mkdir /disk && \
         mount -o loop /tmp/disk /disk && chmod 1777 /disk",
    );
    assert_eq!(made.code, 0, "{}", made.text());
    configure(&cluster, "stage_directory = \"/disk\"\nstage_unpacked_max_size = \"1m\"\n");
    let noted = cluster.run(&format!("mizzen run /shared/many.sqsh sh -c \"{SUMS}; sleep 2\""));
    assert_out(&noted, 0, &MANY.1);
    configure(&cluster, "stage_directory = \"/disk\"\n");
    start_held(&cluster, "/disk/mizzen-2001");
    // It waits once more, before it makes the directory for the files.
    let filled = cluster.run_as_root(
        "p=$(pgrep -o -u alice -x mizzen-unpack); \
         strace -p $p -o /tmp/trace -e trace=mkdirat -e inject=mkdirat:delay_enter=2000000:when=2 > /dev/null 2>&1 & \
         until [ ! -e /proc/$p ] || grep -q 'TracerPid:.*[1-9]' /proc/$p/status; do sleep 0.02; done; touch /home/alice/free; \
         until [ -e /disk/mizzen-2001/unpacking-*/journal ]; do sleep 0.02; done; \
         dd if=/dev/zero of=/disk/others bs=1M count=$(($(df -m --output=avail /disk | tail -1) - 10)) 2> /dev/null; wait; ls /disk/mizzen-2001 | grep -c unpack",
    );
    assert_eq!(filled.stdout, "0\n", "{}", filled.text());
    let ended =
        run_in_time(&cluster, "touch go; until [ -e ended ]; do sleep 0.02; done; cat out; cat err >&2");
    assert_out(&ended, 0, &MANY.1);
    // Nor when there would be room.
    cluster.run_as_root("rm /disk/others");
    assert_skipped(&cluster, "/disk/mizzen-2001");
}

/// An image that is written to while it is unpacked becomes no layer.
#[test]
fn an_image_that_is_overwritten_becomes_no_layer() {
    let cluster = noted_cluster("overwritten");
    start_held(&cluster, CACHE);
    // The file stays; an unpacker has read its tables by now.
    cluster.share("other.sqsh", &OTHER.0).unwrap();
    let ended = cluster.run_as_root(
        "cat /shared/other.sqsh > /shared/many.sqsh; touch /home/alice/free; \
         for i in $(seq 200); do pgrep -u alice -x mizzen-unpack > /dev/null || break; sleep 0.05; done; touch /home/alice/go; \
         until [ -e /home/alice/ended ]; do sleep 0.05; done; ls /var/tmp/mizzen-2001 | grep -c unpacked-",
    );
    assert_eq!(ended.stdout, "0\n", "{}", ended.text());
    assert_out(&cluster.run(&format!("mizzen run /shared/many.sqsh sh -c \"{SUMS}\"")), 0, &OTHER.1);
}

/// Whatever becomes of the file system with the image, a step ends at once.
#[test]
fn an_image_that_hangs_holds_up_no_end() {
    let cluster =
        start_with_busybox(Spec { nodes: 1, shared: SharedFs::Fuse, ..Cluster::spec("unpacking-hangs") });
    cluster.share("many.sqsh", &MANY.0).unwrap();
    note(&cluster, "node1");
    let held = cluster.run_on("node1", User::Alice, &format!("cache={CACHE}; {HOLD}"));
    assert_eq!(held.code, 0, "{}", held.text());
    let started = cluster.run(
        "(srun --container=/shared/many.sqsh sh -c 'until [ -e ~/go ]; do sleep 0.05; done; echo done' > out 2> err; touch ended) > /dev/null 2>&1 & \
         until pgrep -u alice -x mizzen-unpack > /dev/null; do sleep 0.02; done; sleep 0.5",
    );
    assert_eq!(started.code, 0, "{}", started.text());
    signal_server(&cluster, "node1", "STOP");
    let begin = Instant::now();
    let ended = cluster.run("touch free; sleep 0.5; pgrep -u alice -x mizzen-unpack > /dev/null && touch go; until [ -e ended ]; do sleep 0.02; done; cat out; cat err >&2");
    let took = begin.elapsed();
    signal_server(&cluster, "node1", "CONT");
    assert_out(&ended, 0, "done\n");
    assert!(took < Duration::from_secs(6), "{took:?}: {}", ended.text());
    let next = cluster.run(&format!("srun --container=/shared/many.sqsh sh -c \"{SUMS}\""));
    assert_out(&next, 0, &MANY.1);
    assert!(
        cluster.run("sinfo -ho %T").stdout.lines().all(|state| state != "drained"),
        "{:?}",
        cluster.node_states()
    );
}

/// The disk with the unpacked files is cut off; in the next boot of the node nothing of them is believed.
#[test]
fn power_loss_leaves_no_wrong_file() {
    let cluster = staging_cluster(
        "unpacking-power",
        "stage_keep_free = \"\"\nnetwork_file_systems = [\"fuse\"]\nstage_directory = \"/disk\"\n",
    );
    cluster.share("many.sqsh", &MANY.0).unwrap();
    let made = cluster.run_as_root(
        "truncate -s 200m /shared/disk && mkfs.ext4 -q -E lazy_itable_init=0 -J size=4 /shared/disk && mkdir /disk && \
         mount -o loop,commit=1 /shared/disk /disk && chmod 1777 /disk && sync -f /disk && cp /shared/many.sqsh /local && sleep 1.2",
    );
    assert_eq!(made.code, 0, "{}", made.text());
    cluster.run(
        "(while [ ! -e stop ]; do mizzen run /local/many.sqsh sh -c 'cat /data/* | wc -c; sleep 3'; \
         mizzen run /local/many.sqsh sh -c 'cat /data/* | wc -c'; mizzen cache remove --all; done; touch stopped) > /dev/null 2>&1 &",
    );
    let losses = count(3, 20);
    for loss in 0..losses {
        std::thread::sleep(Duration::from_millis(900 + u64::from(loss) * 397 % 1340));
        signal_slow_disk(&cluster, "STOP");
        let saved =
            cluster.run_as_root(&format!("cp --sparse=always /run/shared-backing/disk /local/{loss}"));
        signal_slow_disk(&cluster, "CONT");
        assert_eq!(saved.code, 0, "{}", saved.text());
    }
    cluster.run("touch stop; until [ -e stopped ]; do sleep 0.1; done");
    let unmounted = cluster.run_as_root("for i in $(seq 50); do umount /disk && break; sleep 0.1; done");
    assert_eq!(unmounted.code, 0, "{}", unmounted.text());
    let mut begun = 0;
    for loss in 0..losses {
        // After a power loss the node has booted anew.
        let booted = cluster.run_as_root(&format!(
            "mount -o loop /local/{loss} /disk && cat /proc/sys/kernel/random/uuid > /tmp/boot && \
             mount --bind /tmp/boot /proc/sys/kernel/random/boot_id"
        ));
        assert_eq!(booted.code, 0, "{}", booted.text());
        begun += u32::from(!cluster.run("ls -d /disk/mizzen-2001/unpack*").stdout.is_empty());
        let again = run_in_time(
            &cluster,
            &format!(
                "mizzen run /local/many.sqsh sh -c \"{LAYERS}; {SUMS}; sleep 4\"; mizzen run /local/many.sqsh sh -c \"{LAYERS}; {SUMS}\""
            ),
        );
        assert_out(&again, 0, &format!("{0}{WITH_LAYER}{0}", MANY.1));
        let left = cluster.run("ls /disk/mizzen-2001 | sed 's/-[0-9a-f]*//' | grep -v skip | tr '\\n' ' '");
        // What was noted last may have been too little.
        assert_eq!(left.stdout, COMPLETE, "power loss {loss}");
        cluster.run_as_root(&format!(
            "umount /proc/sys/kernel/random/boot_id; for i in $(seq 50); do umount /disk && break; sleep 0.1; done; rm /local/{loss}"
        ));
    }
    assert!(begun >= losses / 3, "only {begun} of {losses} losses had something unpacked");
}
