//! What several end-to-end tests start from and assert.

#![allow(clippy::unwrap_used)] // a test fails by panicking

use crate::images::ImageTree;
use crate::{Cluster, Output, Spec};

/// One machine with unprivileged users and a mizzen; Slurm on it does not matter.
pub fn machine(name: &str) -> Cluster {
    Cluster::start(Spec { nodes: 1, ..Cluster::spec(name) }).unwrap()
}

/// The same with the image /shared/bb.sqsh.
pub fn with_busybox(name: &str) -> Cluster {
    let cluster = machine(name);
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
