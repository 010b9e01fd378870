//! Images that are used while they are copied, when a call of the launcher or the copier fails, or is the last one of its process.
//! Whatever call it is: a program that starts gets the bytes of its image, and the next start makes a copy that is whole.

use std::sync::LazyLock;

use mizzen_tests::Cluster;
use mizzen_tests::check::{assert_out, count, run_in_time};
use mizzen_tests::copies::{CACHE, TOML, assert_sound, copies, digest_of, staging_cluster};
use mizzen_tests::images::ImageTree;

/// Calls by which a copy is made: in the short form the first half is tried.
const CALLS: [(&str, Times); 13] = [
    ("ftruncate", Times::All),
    ("fdatasync", Times::All),
    ("linkat", Times::All),
    ("renameat", Times::All),
    ("pwrite64", Times::Some(5)),
    ("fcntl", Times::Some(29)),
    ("mkdirat", Times::All),
    ("fsync", Times::All),
    ("unlinkat", Times::All),
    ("utimensat", Times::All),
    ("flock", Times::All),
    ("pread64", Times::Some(17)),
    ("openat", Times::Some(13)),
];

/// How often a call is made.
#[derive(Clone, Copy)]
enum Times {
    /// A few times: each is tried, until a start makes no more of them.
    All,
    /// Very often: each so-manieth is tried.
    Some(u32),
}

/// So many are tried in the long form.
const MOST: u32 = 12;

const IMAGE: &str = "/shared/small.sqsh";

/// It has the file /data, of 3 MB.
static SMALL: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let tree = ImageTree::busybox().unwrap();
    let mut state = 7_u32;
    let mut byte = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    tree.file("data", "").unwrap();
    std::fs::write(tree.path("data"), (0..3 << 20).map(|_| byte()).collect::<Vec<u8>>()).unwrap();
    tree.squashfs(&["-comp", "zstd"]).unwrap()
});

/// It goes on until there is a copy, or will be none.
const PROGRAM: &str = "sha256sum < /data; until [ -e finish ]; do sleep 0.05; done";

fn cluster(name: &str) -> Cluster {
    let cluster = staging_cluster(&format!("calls-{name}"), &format!("{TOML}stage_read_through = \"1m\"\n"));
    cluster.share("small.sqsh", &SMALL).unwrap();
    cluster
}

/// What the program prints.
fn sum(cluster: &Cluster) -> String {
    cluster.run(&format!("mizzen run --stage=never {IMAGE} sh -c 'sha256sum < /data'")).stdout
}

/// The next start has the right file, and the copy that comes of it is right.
#[track_caller]
fn assert_recovers(cluster: &Cluster, sum: &str, what: &str) {
    assert_sound(cluster, what);
    let again = run_in_time(
        cluster,
        &format!("mizzen run {IMAGE} sh -c 'sha256sum < /data' && mizzen stage {IMAGE} >&2"),
    );
    assert_out(&again, 0, sum);
    assert_eq!(copies(cluster), [digest_of(cluster, IMAGE).replace(':', "-")], "{what}");
    assert_sound(cluster, what);
}

/// A start whose processes' `when`th call does `what`; how often that happened is its last line.
fn start(cluster: &Cluster, call: &str, what: &str) -> mizzen_tests::Output {
    cluster.run(&format!(
        "rm -rf {CACHE} finish; \
         (for i in $(seq 30); do ls -d {CACHE}/partial-* && begun=1 || [ ! $begun ] || break; sleep 0.1; done; touch finish) > /dev/null 2>&1 & \
         timeout 20 strace -f -o trace -e trace={call} -e inject={call}:{what} mizzen run {IMAGE} sh -c '{PROGRAM}'; \
         wait; grep -cE 'SIGKILL|INJECTED' trace"
    ))
}

#[test]
fn kills_leave_no_wrong_copy() {
    let cluster = cluster("kills");
    let sum = sum(&cluster);
    for (call, times) in CALLS.into_iter().take(count(6, 13) as usize) {
        let mut killed = 0;
        for turn in 1..=count(1, MOST) {
            let when = match times {
                Times::All => turn,
                Times::Some(step) => turn * step,
            };
            let run = start(&cluster, call, &format!("signal=KILL:when={when}"));
            let was_killed = !run.stdout.ends_with("\n0\n") && run.stdout != "0\n";
            assert_recovers(&cluster, &sum, &format!("KILL at {call} {when}"));
            if !was_killed {
                break;
            }
            killed += 1;
        }
        assert!(killed > 0, "no start makes a call of {call}");
    }
}

/// An error of any call that a copy is made by is none of the program's.
#[test]
fn errors_leave_no_wrong_copy() {
    let cluster = cluster("errors");
    let sum = sum(&cluster);
    let errors = ["EIO", "ENOSPC", "EDQUOT", "ESTALE", "ENOLCK", "EPERM"];
    let table = [
        ("ftruncate", "ENOSPC"),
        ("fdatasync", "EIO"),
        ("linkat", "ENOSPC"),
        ("renameat", "EIO"),
        ("fsync", "EIO"),
        ("unlinkat", "EIO"),
        ("utimensat", "EPERM"),
        ("pwrite64", "EDQUOT"),
    ];
    for (call, usual) in table.into_iter().take(count(4, 8) as usize) {
        let all = if count(0, 1) == 1 { &errors[..] } else { &[usual][..] };
        for error in all {
            let run = start(&cluster, call, &format!("error={error}"));
            let (printed, injected) = run.stdout.trim_end().rsplit_once('\n').unwrap_or(("", "0"));
            assert_eq!(format!("{printed}\n"), sum, "{error} of {call}: {}", run.text());
            assert_ne!(injected, "0", "no start makes a call of {call}");
            assert_recovers(&cluster, &sum, &format!("{error} of {call}"));
        }
    }
}
