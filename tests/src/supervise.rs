//! The process between the owner and pid 1: it makes the cluster's namespaces and outlives them.

use std::process::Command;

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use crate::cgroup;

/// Runs pid 1 in new namespaces with this process's stdin and stdout, and waits for it.
pub fn run() -> Result<()> {
    cgroup::remove_stale();
    unshare(
        CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWNET
            | CloneFlags::CLONE_NEWUTS
            | CloneFlags::CLONE_NEWIPC
            | CloneFlags::CLONE_NEWPID,
    )
    .context("cannot make the cluster's namespaces (root is needed)")?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .context("cannot make mounts private")?;
    let me = std::process::id();
    let status = Command::new(std::env::current_exe()?).arg("role-init").arg(me.to_string()).status();
    cgroup::remove(me);
    let status = status.context("cannot start pid 1")?;
    anyhow::ensure!(status.success(), "pid 1 of the cluster ended with {status}");
    Ok(())
}
