//! What the tests of copies on the node start from and assert.

#![allow(clippy::unwrap_used)] // a test fails by panicking

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use crate::check::{assert_out, run_in_time, with_images};
use crate::images::ImageTree;
use crate::{Cluster, SharedFs, Spec, User};

/// FUSE counts as a network file system here, and the copies go to the machine's own disk.
pub const TOML: &str = "network_file_systems = [\"fuse\"]\nstage_keep_free = \"\"\n";
/// Alice's copies.
pub const CACHE: &str = "/var/tmp/mizzen-2001";

/// The calls by which a copy is made; those that a C library may choose from together.
pub const CALLS: [&str; 10] = [
    "open,openat",
    "splice",
    "madvise",
    "pread64",
    "pwrite64",
    "fsync",
    "linkat",
    "renameat",
    "flock",
    "utimensat",
];

/// The option by which strace does something to these calls.
pub fn inject(calls: &str, what: &str) -> String {
    match calls {
        // The content is read and written where the kernel cannot move it.
        "pread64" | "pwrite64" => {
            format!("-e trace={calls},splice -e inject=splice:error=EINVAL -e inject={calls}:{what}")
        }
        _ => format!("-e trace={calls} -e inject={calls}:{what}"),
    }
}

/// One node and the images /shared/a.sqsh and /shared/b.sqsh on FUSE.
pub fn staging_cluster(name: &str, toml: &str) -> Cluster {
    with_images(Spec {
        nodes: 1,
        shared: SharedFs::Fuse,
        mizzen_toml: Some(toml.to_owned()),
        ..Cluster::spec(&format!("staging-{name}"))
    })
}

/// The name of an image of 24 MB that is used while it is copied.
pub const LARGE: &str = "large.sqsh";

/// Its files /data/0, 1 and 2, of 8 MB each.
static DATA: LazyLock<[Vec<u8>; 3]> = LazyLock::new(|| {
    let mut state = 42_u64;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    [0, 1, 2].map(|_| (0..8 << 20).map(|_| byte()).collect())
});

static LARGE_IMAGE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let tree = ImageTree::busybox().unwrap();
    tree.file("image", "large\n").unwrap();
    for (number, data) in DATA.iter().enumerate() {
        tree.file(&format!("data/{number}"), "").unwrap();
        std::fs::write(tree.path(&format!("data/{number}")), data).unwrap();
    }
    tree.squashfs(&["-comp", "zstd"]).unwrap()
});

/// The image.
pub fn large_image() -> &'static [u8] {
    &LARGE_IMAGE
}

/// What `sha256sum` says of one of its files.
pub fn sum_of(number: usize) -> String {
    let mut sum = Command::new("sha256sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    sum.stdin.take().unwrap().write_all(&DATA[number]).unwrap();
    String::from_utf8(sum.wait_with_output().unwrap().stdout).unwrap()
}

/// A staging cluster that has this image as well: from a megabyte on, images are used while they are copied.
pub fn large_cluster(name: &str, toml: &str) -> Cluster {
    let cluster =
        staging_cluster(&format!("through-{name}"), &format!("{TOML}stage_read_through = \"1m\"\n{toml}"));
    cluster.share(LARGE, large_image()).unwrap();
    cluster
}

/// Shows what is in /shared on the login node as /slow as well, through a FUSE server that reads no faster than this.
#[track_caller]
pub fn slow_mount(cluster: &Cluster, rate: &str) {
    let mount = format!("mkdir /slow; bindfs -o allow_other --read-rate={rate} /run/shared-backing /slow");
    let mounted = cluster.run_as_root(&mount);
    assert_eq!(mounted.code, 0, "{}", mounted.text());
}

/// The copies in the making in Alice's folder.
pub fn partials(cluster: &Cluster) -> Vec<String> {
    let found = cluster.run(&format!("ls {CACHE} 2>/dev/null | grep ^partial-"));
    found.stdout.lines().map(str::to_owned).collect()
}

/// The copies in a user's directory on the login node.
pub fn copies_in(cluster: &Cluster, user: User, cache: &str) -> Vec<String> {
    let found = cluster.run_on("ctl", user, &format!("ls {cache} 2>/dev/null | grep ^sha256-"));
    found.stdout.lines().map(str::to_owned).collect()
}

/// Every copy has the content that it is named by, and nothing unfinished has a copy's name.
#[track_caller]
pub fn assert_sound_in(cluster: &Cluster, user: User, cache: &str, what: &str) {
    let script = format!(
        "cd {cache} && for copy in sha256-*; do [ -e $copy ] || continue; \
         [ sha256-$(sha256sum < $copy | cut -d' ' -f1) = $copy ] || echo $copy; done"
    );
    let wrong = cluster.run_on("ctl", user, &script);
    assert_eq!(wrong.stdout, "", "{what}: wrong copies: {}", wrong.text());
}

/// `sha256:` and the digest of a file on the cluster.
pub fn digest_of(cluster: &Cluster, image: &str) -> String {
    let sum = cluster.run(&format!("sha256sum < {image}")).stdout;
    format!("sha256:{}", sum.split(' ').next().unwrap())
}

/// Sends a signal to the FUSE server of /shared on a machine.
#[track_caller]
pub fn signal_server(cluster: &Cluster, machine: &str, signal: &str) {
    let script = format!("for p in $({SERVER}); do kill -{signal} $p && echo $p; done");
    let told = cluster.run_on(machine, User::Root, &script);
    assert_eq!(told.stdout.lines().count(), 1, "{}", told.text());
}

/// Stops the FUSE server that the file of a disk in /shared is behind, or lets it go on.
#[track_caller]
pub fn signal_slow_disk(cluster: &Cluster, signal: &str) {
    let script = format!(
        "for p in $(pgrep -f 'bindfs.*/shared$'); do [ $(readlink /proc/$p/ns/mnt) = $(readlink /proc/self/ns/mnt) ] && kill -{signal} $p && echo $p; done"
    );
    let told = cluster.run_on("ctl", User::Root, &script);
    assert_eq!(told.stdout.lines().count(), 1, "{}", told.text());
}

/// How many bytes the FUSE server of a machine has read for /shared so far, beside the kernel's requests, which are
/// small.
#[track_caller]
pub fn served(cluster: &Cluster, machine: &str) -> u64 {
    let told = cluster.run_on(machine, User::Root, &format!("sed -n 's/^rchar: //p' /proc/$({SERVER})/io"));
    told.stdout.trim().parse().unwrap()
}

/// A shell command that prints the process of the machine's FUSE server; others have theirs.
const SERVER: &str = "for p in $(pgrep -x bindfs); do \
                      [ $(readlink /proc/$p/ns/mnt) = $(readlink /proc/self/ns/mnt) ] && echo $p; done; true";

/// The copies in Alice's folder.
pub fn copies(cluster: &Cluster) -> Vec<String> {
    copies_in(cluster, User::Alice, CACHE)
}

/// Fails unless each of them is whole.
#[track_caller]
pub fn assert_sound(cluster: &Cluster, what: &str) {
    assert_sound_in(cluster, User::Alice, CACHE, what);
}

/// Whatever there is of an image, the next start has the right files, and the copy that comes of it is right.
#[track_caller]
pub fn assert_recovers(cluster: &Cluster, image: &str, what: &str) {
    assert_sound(cluster, what);
    // What the background has not done by then is done at once.
    let again = run_in_time(
        cluster,
        &format!("mizzen run {image} sh -c 'sha256sum < /data/0' && mizzen stage {image} >&2"),
    );
    assert_out(&again, 0, &sum_of(0));
    assert_eq!(copies(cluster), [digest_of(cluster, image).replace(':', "-")], "{what}");
    assert_sound(cluster, what);
}
