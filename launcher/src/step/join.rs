//! Enters the container of another step of the same job, which runs on this node: for debuggers, profilers and shells.
//!
//! Its processes are found by the variable that mizzen gave them, among those of the same user. Entering needs no
//! privilege beyond that, so a user who forges the variable reaches only what is their own.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

use mizzen_core::{Failure, Handover, request};
use nix::unistd::geteuid;

use super::STEP_VARIABLE;
use crate::options::{RunOptions, StepOptions};
use crate::plan::{DIGEST_VARIABLE, Explained, Facts, Program};
use crate::sandbox::Namespaces;
use crate::variable_rules::belongs_to_one_side;

/// Enters the container of `step`, and gives the program to start there: with this step's environment, and with that of
/// the program which it joins where this one says nothing, or only what holds outside. A step that it starts in turn
/// gets a container like the one that is joined.
pub fn enter(
    handover: &Handover,
    step: &str,
    command: Vec<OsString>,
    environment: &[(OsString, OsString)],
) -> Result<Program, Failure> {
    let (job, _) = handover.step.split_once('.').unwrap_or((&handover.step, ""));
    let step = if step.contains('.') { step.to_owned() } else { format!("{job}.{step}") };
    let about = |failure: Failure| failure.about(format!("--container-join={step}"));
    let (process, mut joined) = find(&step).ok_or_else(|| {
        about(Failure::new("no such step with a container of yours runs on this node"))
            .hint("squeue --steps shows the steps; give srun the step's node with --nodelist, and --overlap")
    })?;
    let namespaces = Namespaces::of(&process).map_err(about)?;
    let workdir = fs::read_link(format!("/proc/{process}/cwd")).unwrap_or_else(|_| "/".into());
    let was_root = geteuid().is_root();
    namespaces.enter().map_err(about)?;
    let is_root_inside = geteuid().is_root();
    let mut environment = environment.to_vec();
    environment.retain(|(name, _)| name != request::VARIABLE && name != DIGEST_VARIABLE);
    let typed = |name: &OsStr| environment.iter().any(|(known, _)| known == name);
    joined.retain(|(name, _)| !typed(name) || belongs_to_one_side(name));
    let facts = Facts {
        image_environment: joined,
        workdir,
        workdir_why: "the directory of the step that is joined".to_owned(),
        remapped: is_root_inside && !was_root,
        ..Facts::default()
    };
    let options = RunOptions { step: Some(StepOptions::default()), ..RunOptions::default() };
    let command = Explained { value: command, why: "the command line".to_owned() };
    Ok(Program::new(&options, &facts, command, &environment))
}

/// A process of the step, and its environment.
fn find(step: &str) -> Option<(String, Vec<(OsString, OsString)>)> {
    let own = fs::read_link("/proc/self/ns/mnt").ok()?;
    let numbers =
        fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    numbers.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())).find_map(|process| {
        // Root could look into the processes of others; they are not root's to join either.
        fs::metadata(format!("/proc/{process}")).ok().filter(|found| found.uid() == geteuid().as_raw())?;
        let environment = read_environment(&fs::read(format!("/proc/{process}/environ")).ok()?);
        let namespace = fs::read_link(format!("/proc/{process}/ns/mnt")).ok()?;
        let marked = environment.iter().any(|(name, value)| name == STEP_VARIABLE && value == step);
        (marked && namespace != own).then_some((process, environment))
    })
}

fn read_environment(text: &[u8]) -> Vec<(OsString, OsString)> {
    let lines = text.split(|byte| *byte == 0).filter(|line| !line.is_empty());
    lines
        .filter_map(|line| {
            let equals = line.iter().position(|byte| *byte == b'=')?;
            let part = |part: &[u8]| OsStr::from_bytes(part).to_owned();
            Some((part(&line[..equals]), part(&line[equals + 1..])))
        })
        .collect()
}
