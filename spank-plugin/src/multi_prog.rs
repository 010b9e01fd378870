//! `srun --multi-prog` before Slurm 23.11. There each task gets a program of its own, which a plugin can neither see nor
//! replace: the task would run on the host. So it is refused, in srun where it is typed, and again on the node.
//!
//! srun knows its options; the node sees only the file name and its content where program and argument would be. So srun sets a
//! variable to say that it has checked. A step without that variable is refused if its arguments could be a --multi-prog file. A
//! user who forges the variable only gets tasks on the host, which they may run anyway.

use mizzen_core::Failure;
use mizzen_core::slurm_scripts::is_multi_prog_file;

use crate::spank::{self, Spank};

/// srun has seen that it has no such option. For one step: the node takes it out of the tasks' environment.
pub const CHECKED_VARIABLE: &str = "SLURM_MIZZEN_SRUN";

/// Refuses what srun was asked to do, if this Slurm cannot do it in a container.
pub fn check_in_client() -> Result<(), Failure> {
    if !tasks_are_hidden() || !spank::is_srun() {
        return Ok(());
    }
    if spank::own_option(c"multi-prog").is_some_and(|value| value == b"set") {
        return Err(Failure::new("--multi-prog: not in a container before Slurm 23.11")
            .hint("start one script, which chooses its program by SLURM_PROCID"));
    }
    spank::set_variable(CHECKED_VARIABLE, "1");
    Ok(())
}

/// The same on the node.
pub fn refuse_on_node(spank: &Spank) -> Result<(), Failure> {
    if !tasks_are_hidden() {
        return Ok(());
    }
    if spank.job_variable(CHECKED_VARIABLE)?.is_some() {
        forget_check(spank);
        return Ok(());
    }
    match spank.arguments()?.as_slice() {
        [_, content, ..] if is_multi_prog_file(content) => Err(Failure::new(
            "--multi-prog: not in a container before Slurm 23.11 (the program's first argument may be its file)",
        )
        .hint("mizzen was not active where srun was called; check plugstack.conf there")),
        _ => Ok(()),
    }
}

/// A task: takes the variable out of its environment.
pub fn forget_check(spank: &Spank) {
    spank.unset_job_variable(c"SLURM_MIZZEN_SRUN");
}

/// Whether this Slurm shows a plugin other arguments than its tasks have.
fn tasks_are_hidden() -> bool {
    spank::slurm_version() < (23, 11)
}
