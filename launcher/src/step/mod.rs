//! A task of a Slurm step becomes its program in the step's container. Slurm starts the launcher, under the name
//! `mizzen-enter`, in place of the program, as the user, with everything that it would give the program itself.
//!
//!     first task:  request -> plan -> sandbox, and tells the others --+--> program
//!     the others:  wait for the first ---------------------> enter ---+
//!
//! Whatever goes wrong ends the task; one task of the step tells the user (`core/src/cancel.rs` says on which node).

pub mod channel;
pub mod entrypoint;
pub mod join;
mod step_reporter;

use std::ffi::{OsStr, OsString};
use std::io::IsTerminal;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use mizzen_core::failure::{FailureKind, cause, quote};
use mizzen_core::handover::{self, Accounts, Role};
use mizzen_core::request::{self, Container, ImageSource};
use mizzen_core::settings::Verbosity;
use mizzen_core::staging::BROADCAST_VARIABLE;
use mizzen_core::user_namespace::group_map;
use mizzen_core::{Config, Failure, Handover, Request, cancel, fs_server};
use nix::unistd::geteuid;
use tracing::info_span;

use crate::containers::{self, Claim, Found};
use crate::host::Host;
use crate::options::{Origin, RunOptions, Scope, StepOptions};
use crate::pipeline::{self, Entered, Prepared};
use crate::plan::{Facts, Identity, Plan, Program, typed_command};
use crate::report::{report, report_note};
use crate::sandbox::{self, Namespaces, Others, STEP_VARIABLE, SaveTarget, Saved, Sources};
use crate::save_target::save_target;
use crate::slurm::{self, CallerContext, Helper};
use crate::{sys, trace};
use channel::TaskChannel;
use step_reporter::StepReporter;

/// The name under which Slurm starts the launcher.
pub const NAME: &str = "mizzen-enter";

/// Becomes the program of the task, or tells why not.
pub fn run() -> ExitCode {
    let (handover, channel) = match take_handover() {
        Ok(taken) => taken,
        Err(failure) => {
            report(&failure);
            return ExitCode::from(failure.kind.exit_code());
        }
    };
    let failure = match start(&handover, &channel) {
        Err(failure) => failure.about(&handover.node),
        Ok(Saved { end, outcome: Ok(text) }) => {
            report_note(&format!("{}: {text}", handover.node));
            return ExitCode::from(u8::try_from(end.imitate()).unwrap_or(u8::MAX));
        }
        // The programs have ended: nobody else has to.
        Ok(Saved { outcome: Err(failure), .. }) => {
            let failure = failure.about("--container-save").about(&handover.node);
            if channel.claim_report() {
                report(&failure);
                channel.log_failure(&failure);
            }
            return ExitCode::from(failure.kind.exit_code());
        }
    };
    let failed = Instant::now();
    cancel::hold_back_signals();
    let speaks = channel.claim_report();
    // Only the builder may end the others. They say nothing, because this task has the right to, or another one had it.
    if matches!(handover.role, Role::Builder { .. }) {
        channel.announce_failure(&failure);
    }
    let nodes = handover.other_nodes.as_ref().filter(|_| failure.kind == FailureKind::CannotStart);
    let is_told = nodes.is_some_and(|nodes| cancel::is_told_elsewhere(nodes, speaks));
    if speaks {
        if !is_told {
            report(&failure);
        }
        channel.log_failure(&failure);
    }
    if let Some(nodes) = nodes.filter(|_| speaks && !is_told) {
        cancel::cancel_told_step(&handover.step, nodes, failed);
    }
    ExitCode::from(failure.kind.exit_code())
}

/// What the plugin says; the program inside is not to see it.
fn take_handover() -> Result<(Handover, TaskChannel), Failure> {
    let text = std::env::var_os(handover::VARIABLE).ok_or_else(|| {
        Failure::new(format!("{} is not set", handover::VARIABLE))
            .hint("Slurm's plugin starts this program; to run a container by hand: mizzen run")
    })?;
    let handover = Handover::decode(&text.into_vec())?;
    let channel = TaskChannel::take(&handover)?;
    Ok((handover, channel))
}

/// Becomes the program; or runs it, where the container is to be saved.
fn start(handover: &Handover, channel: &TaskChannel) -> Result<Saved, Failure> {
    let environment: Vec<(OsString, OsString)> = std::env::vars_os()
        .filter(|(name, _)| name != handover::VARIABLE && name != BROADCAST_VARIABLE)
        .collect();
    let (program, save) = match read_request()? {
        Request::Container(container) => enter(handover, channel, container, &environment)?,
        Request::Join(step) => (join::enter(handover, &step, command(handover), &environment)?, None),
        Request::Host | Request::SlurmRuntime => {
            return Err(Failure::new("the request is not for a container"));
        }
    };
    match save {
        None => Err(sandbox::exec_program(&program)),
        Some(save) => save.run(&program, Others::Tasks),
    }
}

fn read_request() -> Result<Request, Failure> {
    let text = std::env::var_os(request::VARIABLE)
        .ok_or_else(|| Failure::new(format!("{} is not set", request::VARIABLE)))?;
    Request::decode(&text.into_vec())
}

/// The program and its arguments, as Slurm would have started it.
fn command(handover: &Handover) -> Vec<OsString> {
    let mut command: Vec<OsString> =
        handover.program.iter().cloned().chain(std::env::args_os().skip(1)).collect();
    if let Some(program) = command.first_mut()
        && let Some(copy) = broadcast_copy(program, &handover.step)
    {
        *program = copy;
    }
    command
}

/// `srun --bcast=DIRECTORY/` names the directory alone; Slurm adds its name for the copy to what it starts itself. Others may
/// write to that directory: it is this name and no other like it, and the user's own file.
fn broadcast_copy(program: &OsStr, step: &str) -> Option<OsString> {
    let directory = program.as_bytes().ends_with(b"/").then_some(Path::new(program))?;
    let mut name = OsString::from(format!("slurm_bcast_{step}_"));
    name.push(std::env::var_os("SLURMD_NODENAME")?);
    let copy = directory.join(name);
    fs_server::refuse_foreign(&copy).ok()?;
    let found = copy.symlink_metadata().ok()?;
    (found.is_file() && found.uid() == geteuid().as_raw()).then(|| copy.into_os_string())
}

/// Makes or enters the container. The first task saves it at the end, if that is wanted.
fn enter(
    handover: &Handover,
    channel: &TaskChannel,
    container: Container,
    environment: &[(OsString, OsString)],
) -> Result<(Program, Option<SaveTarget>), Failure> {
    let mut save = None;
    let command = command(handover);
    let (job, step) = handover.step.split_once('.').unwrap_or_default();
    let script = (step == "batch").then(|| command.first().map(PathBuf::from)).flatten();
    let inside = CallerContext::from_environment(environment);
    let of_step = Some(StepOptions { script, commands: None, inside });
    let (options, facts) = match &handover.role {
        // The first task has read the settings for all.
        Role::Member { builder } => {
            let (namespaces, facts) = channel.receive(*builder)?;
            namespaces.enter()?;
            (RunOptions { image: container.image, command, step: of_step, ..RunOptions::default() }, facts)
        }
        Role::Builder { user_namespace, accounts, alone } => {
            let Container { image, settings } = container;
            let config = Config::load(&handover.config)?;
            let (slurm_commands, container_scope) = (config.slurm_commands, config.container_scope());
            let mut options = RunOptions::new(image, command, settings, config, Origin::StepOption)?;
            options.step = of_step;
            options.import.config = handover.config.clone();
            options.import.variables = account_variables(accounts);
            if let Some(sent) = std::env::var_os(BROADCAST_VARIABLE) {
                options.staging.expect(&sent)?;
            }
            if let Some(named) = &mut options.named {
                named.scope = Scope::new(container_scope, Some(job));
            }
            let others = handover.other_nodes.as_ref().map(|_| handover.node.as_str());
            save = save_target(&options, others)?;
            let claim = match containers::find(&mut options)? {
                None => None,
                Some(Found::Startable(claim)) => Some(*claim),
                Some(found) => {
                    let facts = join_named(handover, channel, found, &options, environment)?;
                    return Ok((program_of(handover, &options, &facts, environment), save));
                }
            };
            // A script, or a step that somebody types at, calls Slurm's commands; a rank of a computation does not.
            let calls = step == "batch" || step == "interactive" || std::io::stdin().is_terminal();
            let mut notes = Notes::new(handover);
            let mut helper = None;
            if let Some(step) = options.step.as_mut().filter(|_| calls && slurm_commands) {
                match slurm::start_helper() {
                    Ok(started) => {
                        helper = Some(started);
                        step.commands = Some(slurm::helper_address());
                    }
                    // The program may never call one.
                    Err(failure) => notes.tell(failure.to_string()),
                }
            }
            let (namespaces, mut plan) =
                build(handover, channel, &options, (helper, claim), *user_namespace, accounts, &mut notes)?;
            entrypoint::run_once(&options, &mut plan.facts, environment, |text| notes.tell(text.to_owned()))?;
            if let Some(text) = sandbox::dangling_argument(&options.command, &plan.facts.workdir) {
                notes.tell(text);
            }
            let started = format!("{}: {}", log_name(&options.image, &plan.facts), trace::phases());
            channel.log_ready(&notes.added_to(started));
            // What lies in a socket counts against the limit on open files of all the user's processes, and a job may
            // have a step for every core of a node.
            if !*alone {
                info_span!("announce").in_scope(|| channel.announce(&namespaces, &plan.facts))?;
            }
            if options.settings.verbose() != Verbosity::Quiet {
                report_note(&format!("{}: {}", handover.node, pipeline::summary(&plan)));
            }
            (options, plan.facts)
        }
    };
    Ok((program_of(handover, &options, &facts, environment), save))
}

/// The program of this task.
fn program_of(
    handover: &Handover,
    options: &RunOptions,
    facts: &Facts,
    environment: &[(OsString, OsString)],
) -> Program {
    let mut environment = environment.to_vec();
    environment.push((STEP_VARIABLE.into(), handover.step.clone().into()));
    Program::new(options, facts, typed_command(options, facts), &environment)
}

/// Enters a container that runs, and lets the other tasks in.
fn join_named(
    handover: &Handover,
    channel: &TaskChannel,
    found: Found,
    options: &RunOptions,
    environment: &[(OsString, OsString)],
) -> Result<Facts, Failure> {
    let mut notes = Notes::new(handover);
    let alone = matches!(handover.role, Role::Builder { alone: true, .. });
    let (namespaces, facts) = match found {
        Found::Step(step) => {
            let (namespaces, mut facts) = join::open(handover, &step, environment)
                .map_err(|failure| failure.about(format!("the container \"{step}\"")))?;
            // As for one with a name: what can be had in it holds, and of what cannot the user is told.
            pipeline::check_namespaces(options, facts.unshare)?;
            containers::ignored(&step, options, None).into_iter().for_each(|text| notes.tell(text));
            let cwd = std::env::current_dir().ok();
            pipeline::start_in_asked_directory(options, cwd.as_deref(), &mut facts);
            facts.remapped = namespaces.enter_as_root()?;
            containers::missing_pmix().into_iter().for_each(|text| notes.tell(text));
            (namespaces, facts)
        }
        Found::Running(running) => {
            let reporter = Box::new(StepReporter::new(handover, channel, options.settings.verbose())?);
            let Entered { namespaces, facts, notes: told, lone } =
                pipeline::enter(*running, options, reporter, alone)?;
            told.into_iter().for_each(|text| notes.tell(text));
            lone.into_iter().for_each(|text| notes.log(text));
            (namespaces, facts)
        }
        Found::Startable(_) => return Err(Failure::new("the container is not to be entered")),
    };
    channel.log_ready(&notes.added_to(format!("entered: {}", log_name(&options.image, &facts))));
    if !alone {
        channel.announce(&namespaces, &facts)?;
    }
    Ok(facts)
}

/// Where the user's store and credentials are, for an importer in a job that was given no environment (`--export=NONE`).
fn account_variables(accounts: &Accounts) -> Vec<(&'static str, OsString)> {
    let home = accounts.home.clone().map(|home| ("HOME", home.into_os_string()));
    let user = accounts.user.clone().map(|user| ("USER", user.into()));
    home.into_iter().chain(user).collect()
}

/// The image as Slurm's log names it: which file, which content, which name in a registry.
fn log_name(image: &ImageSource, facts: &Facts) -> String {
    let shown = |path: &Path| quote(path.as_os_str().as_bytes());
    match image {
        ImageSource::File { path, .. } => {
            let digest = facts.digest.iter().map(|digest| format!("@{digest}"));
            shown(path) + &digest.collect::<String>()
        }
        ImageSource::Stored { path, reference } => format!("{reference} in {}", shown(path)),
        ImageSource::Unfetched(reference) => reference.to_string(),
        ImageSource::Recorded => quote(facts.image.as_bytes()),
    }
}

/// What is to be said of a container that is no failure. Mostly it holds for every node of the step, so the first one tells the
/// user, and the others leave it to Slurm's log.
struct Notes<'a> {
    node: &'a str,
    is_first_node: bool,
    logged: Vec<String>,
}

impl<'a> Notes<'a> {
    fn new(handover: &'a Handover) -> Notes<'a> {
        let is_first_node = handover.other_nodes.as_ref().is_none_or(|nodes| nodes.index == 0);
        Notes { node: &handover.node, is_first_node, logged: Vec::new() }
    }

    fn tell(&mut self, text: String) {
        match self.is_first_node {
            true => report_note(&format!("{}: {text}", self.node)),
            false => self.logged.push(text),
        }
    }

    /// Has it in Slurm's log as well.
    fn log(&mut self, text: String) {
        if !self.logged.contains(&text) {
            self.logged.push(text);
        }
    }

    /// A line for Slurm's log, with what the user is not told.
    fn added_to(&self, line: String) -> String {
        self.logged.iter().fold(line, |line, note| format!("{line}; {note}"))
    }
}

/// Makes the container and enters it.
fn build(
    handover: &Handover,
    channel: &TaskChannel,
    options: &RunOptions,
    (helper, claim): (Option<Helper>, Option<Claim>),
    user_namespace: Option<i32>,
    accounts: &Accounts,
    notes: &mut Notes,
) -> Result<(Namespaces, Plan), Failure> {
    let user_namespace = user_namespace.map(own_user_namespace).transpose()?;
    let host = Host::detect_with(accounts, user_namespace.is_some());
    let reporter = Box::new(StepReporter::new(handover, channel, options.settings.verbose())?);
    let Prepared { plan, sources } = pipeline::prepare(options, &host, reporter, claim)?;
    plan.notes.iter().cloned().for_each(|text| notes.tell(text));
    if let Some(text) = unmapped_groups(&plan.identity, accounts) {
        notes.tell(text);
    }
    let namespaces = pipeline::build(&plan, Sources { helper, ..sources }, user_namespace)?;
    Ok((namespaces, plan))
}

/// The user namespace that the plugin has made; the number is a user's text.
fn own_user_namespace(fd: i32) -> Result<OwnedFd, Failure> {
    let unusable = |why: String| {
        Failure::new(format!("{}: descriptor {fd} {why}", handover::VARIABLE))
            .hint("only mizzen sets this variable; does a task prolog print it?")
    };
    let namespace = sys::own_inherited(fd, |fd| sys::is_user_namespace(fd))
        .map_err(|error| unusable(format!("cannot be used: {}", cause(&error))))?;
    namespace.ok_or_else(|| unusable("is not a user namespace".to_owned()))
}

/// The groups that are not known inside: the kernel has no room for them, or the node maps none but the primary one.
fn unmapped_groups(identity: &Identity, accounts: &Accounts) -> Option<String> {
    let all: Vec<u32> = accounts.groups.iter().map(|(gid, _)| *gid).collect();
    let (missing, why) = if identity.groups.is_empty() {
        (all.into_iter().filter(|gid| *gid != identity.gid).collect(), "this node does not map them")
    } else {
        (group_map(identity.inside_gid, identity.gid, &all).1, "the kernel maps at most 340 ranges")
    };
    let list = missing.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
    (!list.is_empty()).then(|| format!("files of these groups belong to nobody inside: {list}; {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_that_are_not_known_inside_are_named() {
        let groups = |gids: &[u32]| gids.iter().map(|gid| (*gid, String::new())).collect::<Vec<_>>();
        let identity = |inside: u32, others: &[u32]| Identity {
            uid: 2001,
            gid: 2001,
            inside_uid: inside,
            inside_gid: inside,
            groups: groups(others),
        };
        let accounts = |gids: &[u32]| Accounts { groups: groups(gids), ..Accounts::default() };
        let all = [2001, 2100, 2101];
        assert_eq!(unmapped_groups(&identity(2001, &all[1..]), &accounts(&all)), None);
        assert_eq!(unmapped_groups(&identity(2001, &[]), &accounts(&all[..1])), None);
        assert_eq!(
            unmapped_groups(&identity(2001, &[]), &accounts(&all)).unwrap(),
            "files of these groups belong to nobody inside: 2100 2101; this node does not map them"
        );
        let many: Vec<u32> = (0..400).map(|number| 5000 + 2 * number).collect();
        let note = unmapped_groups(&identity(2001, &many), &accounts(&many)).unwrap();
        assert!(note.ends_with(" 5798; the kernel maps at most 340 ranges"), "{note}");
    }
}
