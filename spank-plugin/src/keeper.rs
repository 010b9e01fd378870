//! Starts the keeper of the copies that all users share: the launcher's program, as root, beside the first task of a
//! step. What it does is in the launcher's `keeper.rs`; nothing of that is loaded into slurmstepd.
#![allow(unsafe_code)] // fork

use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::panic::AssertUnwindSafe;
use std::path::Path;

use mizzen_core::config::{Source, check_only_roots};
use mizzen_core::{Config, Failure};
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::SigSet;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, execve, fork, getpid, setsid};

use crate::{root, spank};

/// Called so, the launcher's program is the keeper.
const NAME: &str = "mizzen-keeper";

/// Starts the keeper, and returns the launcher's end of its socket.
pub fn start(uid: u32, config: &Config, source: &Source) -> Result<OwnedFd, Failure> {
    let program = spank::launcher()?;
    check_only_roots(Path::new(OsStr::from_bytes(program.as_bytes())))?;
    let mounts = if config.mount.enabled() { "own-mounts" } else { "node-mounts" };
    if config.mount.enabled() {
        private_mounts()?;
    }
    let task = getpid();
    start_process(|socket| become_keeper(&program, &socket, task, uid, mounts, source))
}

/// Gives the task mounts of its own: what is mounted in them nobody outside sees, and what is mounted outside appears in
/// them. They belong to root, not to the user: what the user makes of them later keeps the flags that root has set.
fn private_mounts() -> Result<(), Failure> {
    let failed = |errno: nix::Error| Failure::new(format!("cannot make a mount namespace: {}", errno.desc()));
    unshare(CloneFlags::CLONE_NEWNS).map_err(failed)?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_SLAVE, None::<&str>).map_err(failed)
}

/// Starts a process of root's and returns the launcher's end of its socket. It is nobody's child, so that the task does
/// not find one that it did not start.
fn start_process(work: impl FnOnce(OwnedFd)) -> Result<OwnedFd, Failure> {
    let failed = |errno: Errno| Failure::new(format!("cannot start the keeper: {}", errno.desc()));
    let (ours, launchers) =
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).map_err(failed)?;
    // SAFETY: a task has one thread; its children do nothing but what follows, and end.
    match unsafe { fork() }.map_err(failed)? {
        ForkResult::Parent { child } => {
            drop(ours);
            while waitpid(child, None) == Err(Errno::EINTR) {}
            Ok(launchers)
        }
        ForkResult::Child => {
            // SAFETY: as above.
            if let Ok(ForkResult::Child) = unsafe { fork() } {
                let _ = setsid();
                let _ = nix::unistd::chdir("/");
                // Not one that the kernel spares when memory runs out, as it spares slurmstepd.
                let _ = std::fs::write("/proc/self/oom_score_adj", "0");
                root::close_everything_but(&[ours.as_raw_fd()]);
                let _ = std::panic::catch_unwind(AssertUnwindSafe(|| work(ours)));
            }
            // SAFETY: ends a forked process without slurmstepd's exit handlers.
            unsafe { libc::_exit(0) }
        }
    }
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
