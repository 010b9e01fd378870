//! What several end-to-end tests start from and assert.

#![allow(clippy::unwrap_used)] // a test fails by panicking

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use crate::images::ImageTree;
use crate::{Cluster, Output, Release, Spec, User};

/// Runs each check once for every release, as `slurm_22_05::fails_closed` and so on.
#[macro_export]
macro_rules! on_every_release {
    ($($check:ident),* $(,)?) => {
        mod slurm_20_11 { $(#[test] fn $check() { super::$check($crate::Release::Slurm20_11) })* }
        mod slurm_22_05 { $(#[test] fn $check() { super::$check($crate::Release::Slurm22_05) })* }
        mod slurm_24_11 { $(#[test] fn $check() { super::$check($crate::Release::Slurm24_11) })* }
        mod slurm_26_05 { $(#[test] fn $check() { super::$check($crate::Release::Slurm26_05) })* }
    };
}

/// The ways to name an image. (Slurm itself refuses `salloc --container`, unless salloc's shell runs on the node.)
pub const CONTAINER_OPTIONS: [&str; 2] = ["--container", "--container-image"];

/// Small but real images, which tell their name in the file /image.
static IMAGES: LazyLock<[Vec<u8>; 2]> = LazyLock::new(|| {
    ["a", "b"].map(|name| {
        let tree = ImageTree::busybox().unwrap();
        tree.file("image", &format!("{name}\n")).unwrap();
        tree.squashfs(&["-comp", "zstd"]).unwrap()
    })
});

/// One node: with two, a job may run on either while the other still ends its last one.
pub fn one_node(release: Release, name: &str) -> Spec {
    Spec { release, nodes: 1, ..Cluster::spec(&format!("{name}-{}", release.version())) }
}

/// A cluster with the images /shared/a.sqsh and /shared/b.sqsh, in which `cat /image` tells which one it is.
/// /shared itself is not in a container by default: a file that a program makes there shows that it ran outside.
pub fn with_images(spec: Spec) -> Cluster {
    let cluster = Cluster::start(spec).unwrap();
    for (name, image) in ["a.sqsh", "b.sqsh"].into_iter().zip(IMAGES.iter()) {
        cluster.share(name, image).unwrap();
    }
    cluster
}

/// One machine with unprivileged users and a mizzen; Slurm on it does not matter.
pub fn machine(name: &str) -> Cluster {
    Cluster::start(Spec { nodes: 1, ..Cluster::spec(name) }).unwrap()
}

/// The same with the image /shared/bb.sqsh.
pub fn with_busybox(name: &str) -> Cluster {
    start_with_busybox(Spec { nodes: 1, ..Cluster::spec(name) })
}

/// Any cluster with the image /shared/bb.sqsh.
pub fn start_with_busybox(spec: Spec) -> Cluster {
    let cluster = Cluster::start(spec).unwrap();
    cluster.share("bb.sqsh", &ImageTree::busybox().unwrap().squashfs(&["-comp", "gzip"]).unwrap()).unwrap();
    cluster
}

/// A command that gave exactly this.
#[track_caller]
pub fn assert_out(output: &Output, code: i32, stdout: &str) {
    assert_eq!((output.code, output.stdout.as_str()), (code, stdout), "{}", output.text());
}

/// A command that failed with this code and said this once.
#[track_caller]
pub fn assert_failed(output: &Output, code: i32, message: &str) {
    assert_eq!(output.code, code, "{}", output.text());
    assert_eq!(output.stderr.matches(message).count(), 1, "expected: {message}\n{}", output.text());
}

/// One message and one hint, and nothing else of ours: neither a second report nor a panic.
#[track_caller]
pub fn assert_told(output: &Output, code: i32, message: &str, hint: &str) {
    assert_failed(output, code, message);
    assert_failed(output, code, &format!("mizzen: hint: {hint}"));
    let lines = output.stderr.lines().filter(|line| line.contains("mizzen: ")).count();
    assert_eq!(lines, 2, "{}", output.text());
    assert!(!output.stderr.contains("panicked"), "{}", output.text());
}

/// A step that mizzen ended: the message was printed once, the exit code is right, and nothing ran outside.
#[track_caller]
pub fn assert_failed_closed(cluster: &Cluster, what: &str, output: &Output, printed: &str, message: &str) {
    let context = format!("{} {what}: {}", cluster.release(), output.text());
    assert_eq!(output.code, 125, "{context}");
    assert_eq!(printed.matches(message).count(), 1, "expected: {message}\n{context}\n{printed}");
    assert_eq!(cluster.run("ls /shared/marker*").stdout, "", "ran outside: {context}");
}

/// What the nodes of a cluster look like when nothing runs on them.
pub struct Emptiness(BTreeMap<String, BTreeSet<String>>);

impl Emptiness {
    /// As they look now.
    pub fn of(cluster: &Cluster, nodes: &[&str]) -> Emptiness {
        Emptiness(nodes.iter().map(|node| ((*node).to_owned(), traces(cluster, node))).collect())
    }

    /// Nothing is left of what ran: no process, mount or file, and the nodes take new work.
    #[track_caller]
    pub fn assert_again(&self, cluster: &Cluster, what: &str) {
        // Alice's processes, ours by whatever user, and Slurm's for a step; all machines see each other's.
        let wait = "for i in $(seq 150); do left=$(pgrep -la -u alice; pgrep -la 'mizzen|slurmstepd'); \
                    [ -z \"$left\" ] && exit; sleep 0.1; done; echo \"$left\"; exit 1";
        let processes = cluster.run_as_root(wait);
        assert_eq!(processes.code, 0, "{what}: processes are left: {}", processes.text());
        for (node, before) in &self.0 {
            let now = traces(cluster, node);
            let changed: Vec<&String> = now.symmetric_difference(before).collect();
            assert!(changed.is_empty(), "{what}: mounts or files are left on {node}: {changed:#?}");
        }
        assert!(cluster.all_idle(), "{what}: {:?}", cluster.node_states());
    }
}

fn traces(cluster: &Cluster, node: &str) -> BTreeSet<String> {
    let script = "cat /proc/self/mountinfo; find /tmp /dev/shm /local /home/alice";
    let traces = cluster.run_on(node, User::Root, script);
    traces.stdout.lines().map(str::to_owned).collect()
}

/// Nothing that fails may take longer, on a machine that does other things too.
const HANG: Duration = Duration::from_secs(15);

/// A small number in `make test`, a large one in `make test-long`.
pub fn count(short: u32, long: u32) -> u32 {
    if std::env::var_os("MIZZEN_TEST_LONG").is_some() { long } else { short }
}

/// Runs a command that must not hang.
#[track_caller]
pub fn run_in_time(cluster: &Cluster, script: &str) -> Output {
    let begin = Instant::now();
    let output = cluster.run(script);
    assert!(begin.elapsed() < HANG, "took {:?}: {script}\n{}", begin.elapsed(), output.text());
    output
}

/// Cancels steps and batch jobs with the image /shared/bb.sqsh at any moment, from before the step exists to when all
/// its tasks run. Nothing is left of them.
#[track_caller]
pub fn cancel_at_any_time(cluster: &Cluster, empty: &Emptiness, runs: u32) {
    let image = "--container-image=/shared/bb.sqsh";
    let program = "sh -c \"cat /bin/busybox >/dev/null; sleep 60\"";
    for run in 0..runs {
        let delay = f64::from(run / 2) * 0.4 / f64::from(runs / 2);
        let start = match run % 2 {
            0 => format!("srun --quiet -n8 --container-writable {image} {program} &"),
            _ => format!(
                "sbatch --quiet --output=/dev/null -n8 {image} --no-container-script --wrap 'srun {program}'"
            ),
        };
        let cancelled = run_in_time(
            cluster,
            &format!(
                "{start}\n sleep {delay:.3}; while [ -n \"$(squeue -h; jobs -r)\" ]; do scancel --quiet -u alice; sleep 0.05; done; wait"
            ),
        );
        assert!(!cancelled.stderr.contains("panic"), "{}", cancelled.text());
        if run % 8 == 7 || run + 1 == runs || runs > 100 {
            empty.assert_again(cluster, &format!("cancelled after {delay:.3} s: {start}"));
        }
    }
}
