//! The other nodes of a step, and Slurm's command to reach them. As the user, in a task.

use std::path::PathBuf;

use mizzen_core::handover::OtherNodes;

use crate::spank::Spank;

/// What it takes to end the step on its other nodes, if it has any.
pub fn find(spank: &Spank) -> Option<OtherNodes> {
    spank.node_count().filter(|nodes| *nodes > 1)?;
    Some(OtherNodes { scancel: scancel()?, index: spank.node_index().unwrap_or(0) })
}

/// The one that belongs to this Slurm: `../bin/scancel`, seen from slurmstepd.
fn scancel() -> Option<PathBuf> {
    let slurmstepd = std::env::current_exe().ok()?;
    let own = slurmstepd.parent()?.parent()?.join("bin/scancel");
    [own, "/usr/bin/scancel".into()].into_iter().find(|path| path.is_file())
}
