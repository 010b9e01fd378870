//! The node: slurmstepd as root opens a channel for the tasks of a step; each task, as the user, hands over to
//! the launcher, which makes the container or enters it. Until the launcher runs, a task is on the host, where Slurm's
//! prologs belong.

use std::os::fd::{AsFd, AsRawFd};

use mizzen_core::handover::{self, Accounts, Role};
use mizzen_core::request_summary::Summary;
use mizzen_core::{Failure, Handover, Request, build, node_name_from};
use nix::unistd::{Gid, Group, Uid, User};

use crate::channel::StepdChannel;
use crate::requested::{container_wanted, request};
use crate::spank::{self, Spank, Step};
use crate::{crontab, multi_prog, oci, other_nodes, requested, state, userns};

/// slurmd, when it starts: which build the node has. (20.11 does not get here; a step's line has it, too.)
pub fn log_build() -> Result<(), Failure> {
    spank::log_info(&format!("version {} is loaded", build::NAME));
    Ok(())
}

/// slurmstepd, before any task exists: opens the channel over which the tasks find each other.
pub fn open_channel(spank: &Spank) -> Result<(), Failure> {
    requested::remember(spank);
    if !container_wanted(spank) || spank.step() == Some(Step::Extern) {
        return Ok(());
    }
    // A request that is wrong is reported by the tasks.
    let asked = match request(spank) {
        Ok(Request::Container(container)) => Summary(&container).to_string(),
        Ok(Request::Join(step)) => format!("the container of step {step}"),
        _ => return Ok(()),
    };
    let step = spank.step_name().unwrap_or_default();
    spank::log_info(&format!("{}: step {step} starts in {asked}", build::NAME));
    let channel = StepdChannel::open()?;
    state::lock().channel = Some(channel);
    Ok(())
}

/// slurmstepd, when a task has been forked, before any task goes on: notes the process of the first one, and leaves the
/// channel to the tasks after the last one.
pub fn after_fork(spank: &Spank) -> Result<(), Failure> {
    let mut state = state::lock();
    let Some(channel) = &mut state.channel else { return Ok(()) };
    let task = spank.local_task_id();
    if let (Some(0), Some(pid)) = (task, spank.task_pid()) {
        channel
            .report()
            .note_builder(pid)
            .map_err(|error| Failure::caused_by("cannot note the first task's process", error))?;
    }
    let last = spank.local_task_count().and_then(|count| i32::try_from(count).ok()).map(|count| count - 1);
    if task.is_some() && task == last {
        channel.leave_to_tasks();
    }
    Ok(())
}

/// The first task, while it is root: what the launcher needs of root.
pub fn prepare_builder(spank: &Spank) -> Result<(), Failure> {
    if state::lock().channel.is_none() || spank.local_task_id() != Some(0) {
        return Ok(());
    }
    let Ok(Request::Container(container)) = request(spank) else { return Ok(()) };
    // The launcher reports what is wrong with it.
    let Ok(config) = state::lock().config() else { return Ok(()) };
    let settings = container.settings.or(config.settings);
    let (uid, gid, groups) = spank.identity()?;
    // Root's jobs get no container, and a script may stay on the host.
    if uid == 0 || is_script(spank) && !settings.script() {
        return Ok(());
    }
    // A user with one group can map it without help. A primary group that is not among the others could be dropped by taking
    // one of them instead, and with it what is closed to that group.
    if groups.contains(&gid) && groups.iter().any(|group| *group != gid) && userns::may_map() {
        let namespace = userns::create(&userns::Owner { uid, gid, groups }, settings.remap_root())?;
        state::lock().user_namespace = Some(namespace);
    }
    Ok(())
}

/// The node's name: slurmstepd itself does not have the variable that its tasks have.
fn node_name(spank: &Spank) -> String {
    node_name_from(spank.job_variable("SLURMD_NODENAME").ok().flatten().as_deref())
}

/// Whether the task is a script, or an interactive shell, whose steps are its own containers.
fn is_script(spank: &Spank) -> bool {
    matches!(spank.step(), Some(Step::Batch | Step::Interactive))
}

/// A task, as the user, just before Slurm's prologs and its program: hands over to the launcher. A failure ends it.
pub fn hand_over(spank: &Spank) -> Result<(), Failure> {
    if requested::nothing_asked(spank) {
        multi_prog::forget_check(spank);
        return Ok(());
    }
    if !container_wanted(spank) {
        return crontab::refuse(spank).map_err(|failure| failure.about(node_name(spank)));
    }
    let failure = state::lock().failure.clone();
    let done = match failure {
        Some(failure) => Err(failure),
        None => request(spank).and_then(|request| match request {
            Request::Host => {
                multi_prog::forget_check(spank);
                requested::hand_down(spank, &request)
            }
            Request::SlurmRuntime if oci::slurm_runs_containers() => Ok(()),
            Request::SlurmRuntime => Err(Failure::new(
                "--container: this node has no oci.conf, the login node has",
            )
            .hint("Slurm's own runtime must be configured on all nodes; --container-image is mizzen's")),
            Request::Container(_) | Request::Join(_) => start_launcher(spank, &request),
        }),
    };
    done.map_err(|failure| failure.about(node_name(spank)))
}

fn start_launcher(spank: &Spank, request: &Request) -> Result<(), Failure> {
    // Inside, root would have root's power over everything that is mounted from the node.
    if spank.identity()?.0 == 0 {
        return Err(Failure::new("containers are not for root's jobs").hint("submit the job as a user"));
    }
    multi_prog::refuse_on_node(spank)?;
    // For the srun calls in it, also where the client had no plugin to say so.
    requested::hand_down(spank, request)?;
    let config = state::lock().config_source()?;
    if let Request::Container(container) = request
        && is_script(spank)
        && !container.settings.script.map_or_else(|| Ok(state::lock().config()?.settings.script()), Ok)?
    {
        if container.settings.save.is_some() {
            return Err(Failure::new("--container-save: the script runs on the node, not in the container")
                .hint("leave --no-container-script out, or give --container-save to srun in the script"));
        }
        return Ok(());
    }
    let launcher = spank::launcher()?;
    let accounts = accounts(spank)?;
    let mut state = state::lock();
    let namespace = state.user_namespace.take();
    let channel = state.channel.as_ref().ok_or_else(|| Failure::new("the step has no channel"))?;
    let ends = channel.tasks().ok_or_else(|| Failure::new("the step's channel is closed"))?;
    let role = match spank.local_task_id() {
        Some(0) => Role::Builder {
            user_namespace: namespace.as_ref().map(AsRawFd::as_raw_fd),
            accounts,
            alone: spank.local_task_count() == Some(1),
        },
        _ => Role::Member {
            builder: channel
                .report()
                .builder()
                .ok_or_else(|| Failure::new("the first task's process is unknown"))?,
        },
    };
    let handover = Handover {
        node: node_name(spank),
        step: spank.step_name().unwrap_or_default(),
        config,
        receive: ends.receive.as_raw_fd(),
        send: ends.send.as_raw_fd(),
        report: ends.report.as_raw_fd(),
        other_nodes: other_nodes::find(spank),
        role,
        program: spank.replace_program(&launcher)?,
    };
    spank.set_job_variable(handover::VARIABLE, &handover.encode()?)?;
    for fd in ends.descriptors().into_iter().chain(namespace.as_ref().map(AsFd::as_fd)) {
        spank::keep_through_exec(fd);
    }
    std::mem::forget(namespace); // the launcher's now
    Ok(())
}

/// slurmstepd, when a task has ended: tells the user why the step has failed, where no task could. Slurm's log has it in any case.
pub fn report_failure() -> Result<(), Failure> {
    let mut state = state::lock();
    let failed =
        state.channel.as_ref().filter(|_| !state.told).and_then(|channel| channel.report().failure());
    if let Some(failed) = failed {
        state.told = true;
        match failed.told {
            true => spank::log_info(&failed.failure.message),
            false => spank::report(&failed.failure),
        }
    }
    Ok(())
}

/// slurmstepd, at the end of the step: what became of the container goes into Slurm's log, and nothing of ours stays.
pub fn close_channel(spank: &Spank) -> Result<(), Failure> {
    report_failure()?;
    let Some(channel) = state::lock().channel.take() else { return Ok(()) };
    if let Some(ready) = channel.report().ready() {
        spank::log_info(&ready);
    }
    if let Some(work) = channel.report().work() {
        spank::log_info(&work);
    }
    channel.close(spank.identity().ok().map(|(uid, gid, _)| (uid, gid)));
    Ok(())
}

/// The user as the node's name services know them; the launcher cannot ask them. Only the first task needs it.
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
