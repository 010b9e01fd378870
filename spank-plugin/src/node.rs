//! The node: slurmstepd as root prepares a meeting place for the tasks of a step; each task, as the user, hands over to
//! the launcher, which makes the container or enters it. Until the launcher runs, a task is on the host, where Slurm's
//! prologs belong.

use std::os::fd::{AsFd, AsRawFd};

use mizzen_core::handover::{self, Accounts, Outcome, Role};
use mizzen_core::request::VARIABLE;
use mizzen_core::{Config, Failure, Handover, Request, node_name};
use nix::unistd::{Gid, Group, Uid, User};

use crate::client::SLURM_CONTAINER;
use crate::meeting::Meeting;
use crate::options::Meaning;
use crate::spank::{self, Spank, Step};
use crate::state::Reported;
use crate::{keeper, multi_prog, oci, options, root, state};

/// Whether a container was asked for at all: by the client's request, by an option that reached the node some
/// other way, or by Slurm's own option from a client without mizzen.
pub fn container_wanted(spank: &Spank) -> bool {
    // A job whose environment cannot be read may have asked for one.
    let none_in_environment = || spank.job_variable(VARIABLE).is_ok_and(|value| value.is_none());
    let no_bare_option = || bare_option(spank).is_ok_and(|option| option.is_none());
    let wanted = state::lock().wanted;
    wanted || !none_in_environment() || !no_bare_option()
}

/// slurmstepd, before any task exists: makes the place where the tasks meet.
pub fn open_meeting(spank: &Spank) -> Result<(), Failure> {
    if !container_wanted(spank) || spank.step() == Some(Step::Extern) {
        return Ok(());
    }
    // A request that is wrong is reported by the tasks.
    if let Ok(Request::Container(_) | Request::Join(_)) = request(spank) {
        let meeting = Meeting::open()?;
        state::lock().meeting = Some(meeting);
    }
    Ok(())
}

/// slurmstepd, when a task has been forked: remembers the process of the first one, before any task goes on.
pub fn note_builder(spank: &Spank) -> Result<(), Failure> {
    match (&state::lock().meeting, spank.local_task_id(), spank.task_pid()) {
        (Some(meeting), Some(0), Some(pid)) => meeting.note_builder(pid),
        _ => Ok(()),
    }
}

/// The first task, while it is root: what the launcher needs of root.
pub fn prepare_builder(spank: &Spank) -> Result<(), Failure> {
    if state::lock().meeting.is_none() || spank.local_task_id() != Some(0) {
        return Ok(());
    }
    let Ok(Request::Container(container)) = request(spank) else { return Ok(()) };
    let source = state::lock().config_source()?;
    // What is wrong with it, the launcher tells.
    let Ok(config) = Config::load(&source) else { return Ok(()) };
    let (uid, gid, groups) = spank.identity()?;
    // Root's jobs get no container, and a script may stay on the host.
    if uid == 0 || is_script(spank) && !container.settings.script.unwrap_or(config.script) {
        return Ok(());
    }
    // A user with one group can map it himself. A primary group that is not among the others could be dropped by taking
    // one of them instead, and with it what is closed to that group.
    if groups.contains(&gid) && groups.iter().any(|group| *group != gid) && root::may_map() {
        let as_root = container.settings.remap_root.unwrap_or(config.remap_root);
        let namespace = root::user_namespace(&root::Owner { uid, gid, groups }, as_root)?;
        state::lock().user_namespace = Some(namespace);
    }
    if !config.stage_shared.as_os_str().is_empty() {
        let keeper = keeper::start(uid, &config, &source)?;
        state::lock().keeper = Some(keeper);
    }
    Ok(())
}

/// Whether the task is a script, or an interactive shell, whose steps are its own containers.
fn is_script(spank: &Spank) -> bool {
    matches!(spank.step(), Some(Step::Batch | Step::Interactive))
}

/// A task, as the user, just before Slurm's prologs and its program: hands over to the launcher. A failure ends it.
pub fn hand_over(spank: &Spank) -> Result<(), Failure> {
    if !container_wanted(spank) {
        return Ok(());
    }
    let failure = state::lock().failure.clone();
    let done = match failure {
        Some(failure) => Err(failure),
        None => request(spank).and_then(|request| match request {
            Request::Host => Ok(()),
            Request::SlurmRuntime if oci::slurm_runs_containers() => Ok(()),
            Request::SlurmRuntime => Err(Failure::new(
                "--container: this node has no oci.conf, the login node has",
            )
            .hint("Slurm's own runtime must be configured on all nodes; --container-image is mizzen's")),
            Request::Container(_) | Request::Join(_) => start_launcher(spank, &request),
        }),
    };
    done.map_err(|failure| failure.about(node_name()))
}

fn start_launcher(spank: &Spank, request: &Request) -> Result<(), Failure> {
    // Inside, root would have root's power over everything that is mounted from the node.
    if spank.identity()?.0 == 0 {
        return Err(Failure::new("containers are not for root's jobs").hint("submit the job as a user"));
    }
    // From here on the request alone says what the job has; Slurm's variable would hide a nested srun's option.
    spank.unset_job_variable(c"SLURM_CONTAINER");
    let config = state::lock().config_source()?;
    let step = spank.step().ok_or_else(|| Failure::new("Slurm does not tell which step this is"))?;
    if let Request::Container(container) = request
        && is_script(spank)
        && !container.settings.script.map_or_else(|| Config::load(&config).map(|site| site.script), Ok)?
    {
        // For the srun calls in the script, also where the client had no plugin to say so.
        return spank.set_job_variable(VARIABLE, &request.encode());
    }
    multi_prog::refuse_on_node(spank)?;
    let launcher = spank::launcher()?;
    let accounts = accounts(spank)?;
    let mut state = state::lock();
    let (namespace, keeper) = (state.user_namespace.take(), state.keeper.take());
    let meeting = state.meeting.as_ref().ok_or_else(|| Failure::new("the tasks have no place to meet"))?;
    let role = match spank.local_task_id() {
        Some(0) => Role::Builder {
            user_namespace: namespace.as_ref().map(AsRawFd::as_raw_fd),
            keeper: keeper.as_ref().map(AsRawFd::as_raw_fd),
            accounts,
            alone: spank.local_task_count() == Some(1),
        },
        _ => Role::Member {
            builder: meeting.builder().ok_or_else(|| Failure::new("the first task's process is unknown"))?,
        },
    };
    let job = spank.job_id().unwrap_or_default();
    let handover = Handover {
        node: node_name(),
        step: match step {
            Step::Number(number) => format!("{job}.{number}"),
            Step::Batch => format!("{job}.batch"),
            Step::Interactive => format!("{job}.interactive"),
            Step::Extern => format!("{job}.extern"),
        },
        config,
        receive: meeting.receive.as_raw_fd(),
        send: meeting.send.as_raw_fd(),
        role,
        program: spank.start_instead(&launcher)?,
    };
    spank.set_job_variable(VARIABLE, &request.encode())?;
    spank.set_job_variable(handover::VARIABLE, &handover.encode())?;
    let ours = [Some(&meeting.receive), Some(&meeting.send), namespace.as_ref(), keeper.as_ref()];
    for fd in ours.into_iter().flatten() {
        spank::keep_through_exec(fd.as_fd());
    }
    std::mem::forget((namespace, keeper)); // the launcher's now
    Ok(())
}

/// slurmstepd, at the end of the step: what became of the container goes into Slurm's log.
pub fn log_outcome() -> Result<(), Failure> {
    let outcomes = state::lock().meeting.as_ref().map(Meeting::outcomes).unwrap_or_default();
    for outcome in outcomes {
        match outcome {
            Outcome::Failed(why) => spank::inform(&why),
            Outcome::Ready(times) => spank::inform(&times),
        }
    }
    Ok(())
}

/// The user as the node's name services know him; the launcher cannot ask them. Only the first task needs it.
fn accounts(spank: &Spank) -> Result<Accounts, Failure> {
    if spank.local_task_id() != Some(0) {
        return Ok(Accounts::default());
    }
    let (uid, gid, groups) = spank.identity()?;
    let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    let others = groups.into_iter().filter(|group| *group != gid);
    let named = |gid: u32| {
        let group = Group::from_gid(Gid::from_raw(gid)).ok().flatten();
        (gid, group.map(|group| group.name).unwrap_or_default())
    };
    Ok(Accounts {
        user: user.as_ref().map(|user| user.name.clone()),
        home: user.as_ref().map(|user| user.dir.clone()),
        shell: user.as_ref().map(|user| user.shell.clone()),
        groups: [gid].into_iter().chain(others).map(named).collect(),
    })
}

/// The request, checked again: everything that reaches the node is the user's to change.
pub fn request(spank: &Spank) -> Result<Request, Failure> {
    if let Some(text) = spank.job_variable(VARIABLE)? {
        return Request::decode(&text);
    }
    let (option, value) = bare_option(spank)?.unwrap_or_default();
    Request::from_bare_option(&option, &value)
}

/// An option that comes without the client's request.
fn bare_option(spank: &Spank) -> Result<Option<(String, Vec<u8>)>, Failure> {
    let reported = state::lock().options.clone();
    if let Some(ours) = reported.iter().rfind(|option| option.meaning() == Some(Meaning::Image)) {
        return Ok(Some((ours.name(), ours.value.clone())));
    }
    let adopted = |_: &Vec<u8>| options::slurm_has_container() && !oci::slurm_runs_containers();
    let slurms = spank.job_variable(SLURM_CONTAINER)?.filter(adopted);
    // An option without an image is an error that names it.
    let other = reported.first().map(Reported::name).map(|option| (option, Vec::new()));
    Ok(slurms.map(|value| ("--container".to_owned(), value)).or(other))
}
