//! Starts the keeper of the copies that all users share: the launcher's program, as root, beside the first task of a
//! step. What it does is in the launcher's `keeper.rs`; nothing of that is loaded into slurmstepd.

use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use mizzen_core::config::{Source, check_only_roots};
use mizzen_core::{Config, Failure, Request};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::SigSet;
use nix::unistd::{Pid, execve, getpid};

use crate::spank::{self, Spank};
use crate::{node, root, state};

/// Called so, the launcher's program is the keeper.
const NAME: &str = "mizzen-keeper";

/// The first task, while it is root: starts the keeper, if the site wants one.
pub fn start_if_wanted(spank: &Spank) -> Result<(), Failure> {
    if state::lock().meeting.is_none() || spank.local_task_id() != Some(0) {
        return Ok(());
    }
    let Ok(Request::Container(_)) = node::request(spank) else { return Ok(()) };
    let source = state::lock().config_source()?;
    // What is wrong with it, the launcher tells.
    let Ok(config) = Config::load(&source) else { return Ok(()) };
    let (uid, ..) = spank.identity()?;
    if config.stage_shared.as_os_str().is_empty() || uid == 0 {
        return Ok(());
    }
    let program = spank::launcher()?;
    check_only_roots(Path::new(OsStr::from_bytes(program.as_bytes())))?;
    let mounts = if config.mount.enabled() { "own-mounts" } else { "node-mounts" };
    if config.mount.enabled() {
        private_mounts()?;
    }
    let task = getpid();
    let keeper =
        root::start_process("keeper", |socket| become_keeper(&program, &socket, task, uid, mounts, &source))?;
    state::lock().keeper = Some(keeper);
    Ok(())
}

/// Gives the task mounts of its own: what is mounted in them nobody outside sees, and what is mounted outside appears in
/// them. They belong to root, not to the user: what the user makes of them later keeps the flags that root has set.
fn private_mounts() -> Result<(), Failure> {
    let failed = |errno: nix::Error| Failure::new(format!("cannot make a mount namespace: {}", errno.desc()));
    unshare(CloneFlags::CLONE_NEWNS).map_err(failed)?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_SLAVE, None::<&str>).map_err(failed)
}

/// Becomes the keeper.
fn become_keeper(program: &CStr, socket: &OwnedFd, task: Pid, uid: u32, mounts: &str, config: &Source) {
    let words = [NAME, &socket.as_raw_fd().to_string(), &task.to_string(), &uid.to_string(), mounts]
        .map(CString::new);
    let mut words: Vec<CString> = words.into_iter().flatten().collect();
    if let Source::Named(path) = config {
        words.extend(CString::new(path.as_os_str().as_bytes()));
    }
    // Slurm blocks them in a task that is not the user's yet.
    let _ = SigSet::empty().thread_set_mask();
    spank::keep_through_exec(socket.as_fd());
    let _ = execve::<_, CString>(program, &words, &[]);
}
