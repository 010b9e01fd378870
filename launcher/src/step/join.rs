//! Enters the container of another step of the same job, which runs on this node: for debuggers, profilers and shells.

use std::ffi::{OsStr, OsString};
use std::fs;

use mizzen_core::{Failure, Handover, request};

use crate::containers::step_process;
use crate::options::{RunOptions, StepOptions};
use crate::plan::{DIGEST_VARIABLE, Explained, Facts, Program};
use crate::sandbox::Namespaces;
use crate::variable_rules::belongs_to_one_side;

/// Enters the container of `step`, and gives the program to start there. A step that it starts in turn gets a container like
/// the one that is joined.
pub fn enter(
    handover: &Handover,
    step: &str,
    command: Vec<OsString>,
    environment: &[(OsString, OsString)],
) -> Result<Program, Failure> {
    let (job, _) = handover.step.split_once('.').unwrap_or((&handover.step, ""));
    let step = if step.contains('.') { step.to_owned() } else { format!("{job}.{step}") };
    let mut environment = environment.to_vec();
    environment.retain(|(name, _)| name != request::VARIABLE && name != DIGEST_VARIABLE);
    let about = |failure: Failure| failure.about(format!("--container-join={step}"));
    let (namespaces, mut facts) = open(handover, &step, &environment).map_err(about)?;
    facts.remapped = namespaces.enter_as_root().map_err(about)?;
    let options = RunOptions { step: Some(StepOptions::default()), ..RunOptions::default() };
    let command = Explained { value: command, why: "the command line".to_owned() };
    Ok(Program::new(&options, &facts, command, &environment))
}

/// The container of `step`, for a step of the same job. Its programs have this environment, and that of the program which is joined
/// where this one says nothing, or only what holds outside.
///
/// The file server of the other step serves both. If it were that of another job, which is suspended, then this one's programs
/// could not even be killed, and Slurm would drain the node.
pub fn open(
    handover: &Handover,
    step: &str,
    environment: &[(OsString, OsString)],
) -> Result<(Namespaces, Facts), Failure> {
    let (process, joined) = step_process(step).ok_or_else(|| {
        Failure::new("no such step with a container of yours runs on this node")
            .hint("squeue --steps shows the steps; give srun the step's node with --nodelist, and --overlap")
    })?;
    let job = |step: &str| step.split_once('.').map_or(step, |(job, _)| job).to_owned();
    if job(step) != job(&handover.step) {
        return Err(Failure::new("that step is in another job, and a container is joined within its job")
            .hint(format!(
                "srun --jobid={} --overlap, with the same options, starts a step in that job",
                job(step)
            )));
    }
    open_process(&process, joined, environment)
}

/// The container of this process, whose environment is `joined`.
pub fn open_process(
    process: &str,
    mut joined: Vec<(OsString, OsString)>,
    environment: &[(OsString, OsString)],
) -> Result<(Namespaces, Facts), Failure> {
    let namespaces = Namespaces::of(process)?;
    let workdir = fs::read_link(format!("/proc/{process}/cwd")).unwrap_or_else(|_| "/".into());
    let typed = |name: &OsStr| environment.iter().any(|(known, _)| known == name);
    joined.retain(|(name, _)| !typed(name) || belongs_to_one_side(name));
    let facts = Facts {
        image_environment: joined,
        workdir,
        workdir_why: "the directory of the program that is joined".to_owned(),
        unshare: namespaces.unshare,
        ..Facts::default()
    };
    Ok((namespaces, facts))
}
