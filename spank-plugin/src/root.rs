//! The container's user namespace: the only code in slurmstepd that does something as root on behalf of a container.
//! (`keeper.rs` starts a program that does more, where the site wants it.)
//!
//! A user may map one group into a user namespace by himself; root may map all that the user is in. So the first task of
//! a step, while it is still root, makes the namespace for the launcher: a child that exists for nothing else makes it
//! with the user's effective ids, so that it is the user's own, and root writes the maps. Nothing that the user says,
//! has or runs comes into this: who he is and which groups he has, Slurm tells.
#![allow(unsafe_code)] // clone

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};

use mizzen_core::Failure;
use mizzen_core::user_namespace::{group_map, hint};
use nix::errno::Errno;
use nix::sched::{CloneFlags, clone};
use nix::sys::signal::{SigSet, SigmaskHow};
use nix::unistd::{Gid, Pid, Uid, getegid, setegid, seteuid};

/// Enough for a child that makes two calls.
const STACK: usize = 64 << 10;

/// Whose the namespace is.
pub struct Owner {
    /// The user.
    pub uid: u32,
    /// The primary group.
    pub gid: u32,
    /// All groups that Slurm gives the user.
    pub groups: Vec<u32>,
}

/// Whether a process of root's in a namespace of the user's is out of that user's reach. Where the administrator has
/// made such processes debuggable (fs.suid_dumpable), it is not, and then nobody's groups are mapped.
pub fn may_map() -> bool {
    std::fs::read_to_string("/proc/sys/fs/suid_dumpable").is_ok_and(|value| value.trim() != "1")
}

/// Makes a user namespace in which all groups of the user are known, and the user is himself or called root.
pub fn user_namespace(owner: &Owner, as_root: bool) -> Result<OwnedFd, Failure> {
    let failed = |what: &str, errno: Errno| Failure::new(format!("{what}: {}", errno.desc()));
    let (wait, life) = nix::unistd::pipe().map_err(|errno| failed("cannot make a pipe", errno))?;
    // The user may send the child signals, and it must not run slurmstepd's handlers.
    let mask = SigSet::all()
        .thread_swap_mask(SigmaskHow::SIG_SETMASK)
        .map_err(|errno| failed("cannot block signals", errno))?;
    let child = as_user(owner, || start_child(&wait, &life));
    let _ = mask.thread_set_mask();
    let child =
        child?.map_err(|errno| failed("cannot make a user namespace", errno).hint(hint(errno as i32)))?;
    let made = write_maps(child, owner, as_root).and_then(|()| {
        let namespace = File::open(format!("/proc/{child}/ns/user"));
        namespace
            .map(OwnedFd::from)
            .map_err(|error| Failure::new(format!("cannot open a user namespace: {error}")))
    });
    // It would end by itself, unless the user has stopped it.
    drop(life);
    let _ = nix::sys::signal::kill(child, nix::sys::signal::SIGKILL);
    reap(child);
    made
}

/// Does something with the user's effective ids. A task that cannot become root again must not go on.
fn as_user<T>(owner: &Owner, work: impl FnOnce() -> T) -> Result<T, Failure> {
    let failed = |errno: Errno| Failure::new(format!("cannot change the effective ids: {}", errno.desc()));
    let group = getegid();
    setegid(Gid::from_raw(owner.gid)).map_err(failed)?;
    let done = seteuid(Uid::from_raw(owner.uid)).map(|()| work());
    seteuid(Uid::from_raw(0)).and_then(|()| setegid(group)).map_err(failed)?;
    done.map_err(failed)
}

/// Starts a process in a new user namespace; it ends with this one, or when `life` is closed.
fn start_child(wait: &OwnedFd, life: &OwnedFd) -> nix::Result<Pid> {
    let (wait, life) = (wait.as_raw_fd(), life.as_raw_fd());
    let child = Box::new(|| {
        // SAFETY: its own copies of the two descriptors; one byte of its own stack.
        unsafe {
            libc::close(life);
            libc::read(wait, [0_u8].as_mut_ptr().cast(), 1);
        }
        0
    });
    // SAFETY: the child has memory of its own, and makes two calls.
    unsafe { clone(child, &mut [0; STACK], CloneFlags::CLONE_NEWUSER, Some(libc::SIGCHLD)) }
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
        written.map_err(|error| Failure::new(format!("cannot write {file} of a user namespace: {error}")))?;
    }
    Ok(())
}

/// Waits for a child of ours. Slurm collects children too, and may have been faster.
pub fn reap(child: Pid) {
    while nix::sys::wait::waitpid(child, None) == Err(Errno::EINTR) {}
}
