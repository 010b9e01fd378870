//! Starts the keeper of the copies that all users share: the launcher's program, as root, beside the first task of a
//! step. What it does is in the launcher's `keeper.rs`; nothing of that is loaded into slurmstepd.
#![allow(unsafe_code)] // fork

use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use mizzen_core::config::{Source, check_only_roots};
use mizzen_core::{Config, Failure, Request};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::SigSet;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::unistd::{ForkResult, execve, fork};

use crate::spank::{self, Spank, keep_through_exec};
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
    check_only_roots(Path::new(std::ffi::OsStr::from_bytes(program.as_bytes())))?;
    if config.mount.enabled() {
        private_mounts()?;
    }
    let keeper = start(&program, uid, &source)?;
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

/// Starts it, and returns the launcher's end of its socket. It is nobody's child, as the broker is.
fn start(program: &CString, uid: u32, config: &Source) -> Result<OwnedFd, Failure> {
    let failed = |errno: nix::Error| Failure::new(format!("cannot start the keeper: {}", errno.desc()));
    let (ours, launchers) =
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).map_err(failed)?;
    let mut words = vec![NAME.to_owned().into_bytes()];
    words.extend([ours.as_raw_fd().to_string().into_bytes(), uid.to_string().into_bytes()]);
    if let Source::Named(path) = config {
        words.push(path.as_os_str().as_bytes().to_vec());
    }
    let words: Result<Vec<CString>, _> = words.into_iter().map(CString::new).collect();
    let words = words.map_err(|_| Failure::new("NUL in the configuration's path"))?;
    // SAFETY: a task has one thread; its children do nothing but what follows, and end.
    match unsafe { fork() }.map_err(failed)? {
        ForkResult::Parent { child } => {
            drop(ours);
            root::reap(child);
            Ok(launchers)
        }
        ForkResult::Child => {
            // SAFETY: as above.
            if let Ok(ForkResult::Child) = unsafe { fork() } {
                root::leave_everything_but(&ours);
                // Slurm blocks them in a task that is not the user's yet.
                let _ = SigSet::empty().thread_set_mask();
                keep_through_exec(std::os::fd::AsFd::as_fd(&ours));
                let _ = execve::<_, CString>(program, &words, &[]);
            }
            // SAFETY: ends a forked process without slurmstepd's exit handlers.
            unsafe { libc::_exit(0) }
        }
    }
}
