//! A real Slurm cluster on one machine, for the tests, the demo and the benchmarks.
//!
//! Everything a cluster makes (processes, mounts, network, hosts) lives in namespaces that belong to one
//! process, pid 1 of the cluster. That process watches a pipe held by whoever started the cluster. When the
//! pipe closes, for whatever reason, pid 1 exits and the kernel takes the rest away: there is no clean-up
//! code that a kill could skip. The one exception, cgroup v1 directories, is in [`cgroup`].
//!
//! ```text
//! owner (a test)          -- Cluster, cluster.rs; sees the cluster only through nsenter
//!  └ vcluster supervise   -- makes the namespaces            (supervise.rs)
//!     └ pid 1             -- network, start, reap            (init.rs)
//!        ├ ctl            -- munged, slurmctld, login node   (machine.rs)
//!        ├ node1          -- slurmd
//!        └ node2 …
//! ```
#![allow(clippy::print_stdout, clippy::print_stderr)] // a tool for developers
#![forbid(unsafe_code)]

pub mod bench;
pub mod browser;
pub mod cgroup;
pub mod check;
pub mod cluster;
pub mod copies;
pub mod demo;
pub mod documents;
pub mod examples;
pub mod fleet;
pub mod images;
pub mod init;
pub mod jobs;
pub mod machine;
pub mod messages;
pub mod packages;
pub mod record;
pub mod registry;
pub mod release;
pub mod site;
pub mod spec;
pub mod supervise;
pub mod trace;
pub mod vm;

pub use cluster::{Cluster, Output, without_waiting};
pub use release::Release;
pub use spec::{SharedFs, Spec, User};

use std::path::{Path, PathBuf};
use std::process::Command;

/// Where the sources are.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The repository's `target/` directory, where everything generated is kept.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => PathBuf::from(dir),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"),
    }
}

/// Runs a tool to its end; an error carries the command line and what the tool said.
pub fn run_tool(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().map_err(|e| anyhow::anyhow!("cannot run {command:?}: {e}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        anyhow::bail!("{command:?} failed ({}): {}", output.status, said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
