//! Tells the user of a step that its container has lost its files, and ends the step on all its nodes. Runs as the user,
//! in the watchers of the file servers: through the standard error of a task while there is one, else through slurmstepd,
//! which sees tasks end.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use mizzen_core::handover::OtherNodes;
use mizzen_core::settings::Verbosity;
use mizzen_core::{Failure, Handover, StepReport, cancel};

use super::channel::TaskChannel;
use crate::sandbox::{
    ContainerProcesses, Reporter, identity_of, standard_error_in, tell, tell_note, verbose_stream,
};

/// For what is written to reach srun. The container is stopped meanwhile, and killed afterwards: srun does not wait for the output
/// of a task that was killed, and that of Slurm 22.05 lost one message in ten.
const DELIVERY: Duration = Duration::from_millis(250);

/// How slurmstepd is told.
pub struct StepReporter {
    report: StepReport,
    node: String,
    step: String,
    other_nodes: Option<OtherNodes>,
    /// The task's standard error as Slurm made it; the program may have another one.
    standard_error: Option<(u64, u64)>,
    /// Where a user who wants to know more is told what the file servers have done.
    verbose: Option<File>,
}

impl StepReporter {
    /// For a step. Of its channel it needs the report alone: with the rest the container itself would be held.
    pub fn new(
        handover: &Handover,
        channel: &TaskChannel,
        verbosity: Verbosity,
    ) -> Result<StepReporter, Failure> {
        let Handover { node, step, other_nodes, .. } = handover.clone();
        let standard_error = identity_of(std::io::stderr());
        let verbose = verbose_stream(verbosity);
        Ok(StepReporter { report: channel.report()?, node, step, other_nodes, standard_error, verbose })
    }
}

impl Reporter for StepReporter {
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        [self.report.as_fd()].into_iter().chain(self.verbose.iter().map(AsFd::as_fd)).collect()
    }

    fn note(&self, container: &ContainerProcesses, text: &str) {
        let stream = self.standard_error.and_then(|stream| standard_error_in(container, stream));
        if let Some(stream) = stream {
            tell_note(&stream, &format!("{}: {text}", self.node));
        }
    }

    fn tell_work(&self, text: &str) {
        // slurmstepd may have looked already.
        let _ = self.report.add_work(text);
        if let Some(stream) = &self.verbose {
            tell_note(stream, &format!("{}: {text}", self.node));
        }
    }

    fn prepare(&self, container: &ContainerProcesses) -> Box<dyn FnOnce(&Failure) + '_> {
        // slurmstepd may be too late: when the last task has ended, releases before 24.11 no longer pass on to srun what it
        // says, and srun may have ended with the step on other nodes.
        let stream = self.standard_error.and_then(|stream| standard_error_in(container, stream));
        Box::new(move |failure| {
            let failure = failure.clone().about(&self.node);
            let told = stream.is_some_and(|stream| tell(&stream, &failure));
            let _ = self.report.write_failure(&failure, told);
            if told {
                std::thread::sleep(DELIVERY);
            }
        })
    }

    fn cancel_step(&self) {
        if let Some(nodes) = &self.other_nodes {
            cancel::cancel_step(&self.step, nodes);
        }
    }
}
