//! The container's user namespace, made by root on the user's behalf: all that root does for a container.
//!
//! A user may map one group into a user namespace without help; root may map all that the user is in. So the first task of
//! a step, while it is still root, makes the namespace for the launcher: a child that exists for nothing else becomes the
//! user and makes it, so that it is the user's own, and root writes the maps. Nothing the user controls is
//! used: the uid and the groups come from Slurm.
#![allow(unsafe_code)] // clone, and to close what slurmstepd has open

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use mizzen_core::Failure;
use mizzen_core::user_namespace::{Namespace, NamespaceLimits, group_map};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sched::{CloneFlags, clone, unshare};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::{Gid, Pid, Uid, pipe2, setgroups, setresgid, setresuid};

/// Enough for the child's few calls.
const STACK: usize = 256 << 10;
/// slurmstepd has a few dozen.
const MOST_DESCRIPTORS: i32 = 1 << 16;
/// A child that has not answered by then has been stopped.
const TIMEOUT_MILLISECONDS: u16 = 10_000;

/// Whose the namespace is.
pub struct Owner {
    /// The user.
    pub uid: u32,
    /// The primary group.
    pub gid: u32,
    /// All groups that Slurm gives the user.
    pub groups: Vec<u32>,
}

/// Whether a process that was root's and is now the user's is out of that user's reach. Where the administrator has made
/// such processes debuggable (fs.suid_dumpable), it is not, and then nobody's groups are mapped.
pub fn may_map() -> bool {
    std::fs::read_to_string("/proc/sys/fs/suid_dumpable").is_ok_and(|value| value.trim() != "1")
}

/// Makes a user namespace in which all groups of the user are known, and the user keeps their own name or is called root.
pub fn create(owner: &Owner, as_root: bool) -> Result<OwnedFd, Failure> {
    let failed = |what: &str, errno: Errno| Failure::caused_by(what, errno);
    let pipe = || pipe2(OFlag::O_CLOEXEC).map_err(|errno| failed("cannot make a pipe", errno));
    let ((answer, say), (wait, life)) = (pipe()?, pipe()?);
    // The user may send the child signals, and it must not run slurmstepd's handlers.
    let mask = SigSet::all()
        .thread_swap_mask(SigmaskHow::SIG_SETMASK)
        .map_err(|errno| failed("cannot block signals", errno))?;
    let child = start_child(owner, &say, &wait);
    let _ = mask.thread_set_mask();
    let child = child.map_err(|errno| failed("cannot fork", errno))?;
    drop((say, wait));
    let made = match await_answer(answer) {
        0 => write_maps(child, owner, as_root).and_then(|()| {
            let failed = |error: std::io::Error| Failure::caused_by("cannot open the user namespace", error);
            File::open(format!("/proc/{child}/ns/user")).map(OwnedFd::from).map_err(failed)
        }),
        errno => Err(NamespaceLimits::look().refused(Namespace::User, errno)),
    };
    // It would end by itself now, unless the user has stopped it.
    drop(life);
    let _ = kill(child, Signal::SIGKILL);
    while waitpid(child, Some(WaitPidFlag::__WALL)) == Err(Errno::EINTR) {}
    made
}

/// What became of the child's attempt: 0, or an error's number.
fn await_answer(answer: OwnedFd) -> i32 {
    let mut ready = [PollFd::new(answer.as_fd(), PollFlags::POLLIN)];
    let mut number = [0; 4];
    loop {
        match poll(&mut ready, TIMEOUT_MILLISECONDS) {
            Err(Errno::EINTR) => {}
            Ok(0) => return libc::ETIMEDOUT,
            _ => break,
        }
    }
    // One that was killed says nothing.
    File::from(answer).read_exact(&mut number).map_or(libc::EINTR, |()| i32::from_ne_bytes(number))
}

/// Starts a process that becomes the user and makes the namespace. It ends with this one, or when the other end of
/// `wait` is closed. Its end is told by no signal: one that Slurm ignores would free its number while we use it.
fn start_child(owner: &Owner, say: &OwnedFd, wait: &OwnedFd) -> nix::Result<Pid> {
    let child = Box::new(|| {
        let errno = become_owner_of_namespace(owner, [say, wait]).map_or_else(|errno| errno as i32, |()| 0);
        let _ = nix::unistd::write(say, &errno.to_ne_bytes());
        let _ = nix::unistd::read(wait, &mut [0]);
        0
    });
    let mut stack = vec![0; STACK];
    // SAFETY: the task has one thread, and the child has memory of its own.
    unsafe { clone(child, &mut stack, CloneFlags::empty(), None) }
}

/// In this order: as long as it has something of slurmstepd's, the user must not get at it.
fn become_owner_of_namespace(owner: &Owner, keep: [&OwnedFd; 2]) -> nix::Result<()> {
    let mut kept = keep.map(AsRawFd::as_raw_fd);
    kept.sort_unstable();
    close_all_but(&kept);
    // In the namespace these are limits on all that the user has; their own, which Slurm sets later, may be up to these.
    for resource in [
        Resource::RLIMIT_NPROC,
        Resource::RLIMIT_MEMLOCK,
        Resource::RLIMIT_SIGPENDING,
        Resource::RLIMIT_MSGQUEUE,
    ] {
        let (_, hard) = getrlimit(resource)?;
        setrlimit(resource, hard, hard)?;
    }
    let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
    setgroups(&owner.groups.iter().copied().map(Gid::from_raw).collect::<Vec<_>>())?;
    setresgid(gid, gid, gid)?;
    setresuid(uid, uid, uid)?;
    // Now: the kernel forgets it when a process changes its user.
    set_pdeathsig(Signal::SIGKILL)?;
    unshare(CloneFlags::CLONE_NEWUSER)
}

/// Writes the maps of a process's namespace.
fn write_maps(process: Pid, owner: &Owner, as_root: bool) -> Result<(), Failure> {
    let Owner { uid, gid, groups } = owner;
    let (inside_uid, inside_gid) = if as_root { (0, 0) } else { (*uid, *gid) };
    let (group_map, _) = group_map(inside_gid, *gid, groups);
    // Without `deny` the user could give up a group in order to get what is closed to that group.
    for (file, text) in
        [("setgroups", "deny"), ("gid_map", &group_map), ("uid_map", &format!("{inside_uid} {uid} 1"))]
    {
        let written = File::options()
            .write(true)
            .open(format!("/proc/{process}/{file}"))
            .and_then(|mut file| file.write_all(text.as_bytes()));
        let failed = |error| Failure::caused_by(format!("cannot write {file} of a user namespace"), error);
        written.map_err(failed)?;
    }
    Ok(())
}

/// Closes every descriptor but these, which are in order. What owned the others in slurmstepd must never be used in this
/// process. Nothing is allocated: slurmstepd has several threads at times, and one may have been forked from in the middle of that.
pub fn close_all_but(kept: &[i32]) {
    let mut first = 0;
    for last in kept.iter().map(|fd| fd - 1).chain([i32::MAX]) {
        // SAFETY: takes three numbers.
        if first <= last && unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } != 0 {
            // Linux before 5.9.
            (first..=last.min(MOST_DESCRIPTORS)).for_each(|fd| {
                // SAFETY: takes a number.
                unsafe { libc::close(fd) };
            });
        }
        first = last.saturating_add(2);
    }
}
