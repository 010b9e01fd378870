//! The broker: the only code in slurmstepd that does something as root on behalf of a container. (`keeper.rs` starts a
//! program that does more, where the site wants it.)
//!
//! A user may map one group into a user namespace by himself; root may map all that the user is in. So the first task
//! of a step, while it is still root, forks this process, which waits for one message from the launcher, writes one
//! group map, answers, and ends. Everything in that message is hostile: the launcher is the user's own process. The
//! broker resolves no path of the user's, reads no file and runs no program; which groups the user has, it knows from
//! Slurm.
#![allow(unsafe_code)] // fork, and what the kernel tells about a namespace

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::panic::AssertUnwindSafe;

use mizzen_core::Failure;
use mizzen_core::groups::group_map;
use nix::cmsg_space;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg, send, socketpair,
};
use nix::unistd::{ForkResult, Pid, fork, setsid};

/// A launcher that has not asked by then has been stopped; its step can still be killed.
const PATIENCE_MILLISECONDS: i32 = 3_600_000;
/// A helper that has not entered the namespace by then has been stopped.
const HELPER_MILLISECONDS: u16 = 10_000;

/// Whom the broker serves.
pub struct Client {
    /// The user.
    pub uid: u32,
    /// The primary group.
    pub gid: u32,
    /// All groups that Slurm gives the user.
    pub groups: Vec<u32>,
}

/// Whether a process of root's that enters a user's namespace is out of that user's reach. Where the administrator has
/// made such processes debuggable (fs.suid_dumpable), it is not, and then nobody's groups are mapped.
pub fn may_start() -> bool {
    std::fs::read_to_string("/proc/sys/fs/suid_dumpable").is_ok_and(|value| value.trim() != "1")
}

/// Starts a broker and returns the launcher's end of its socket.
pub fn start(client: &Client) -> Result<OwnedFd, Failure> {
    start_process("broker", |socket| serve(socket, client))
}

/// Starts a process of root's and returns the launcher's end of its socket. It is nobody's child, so that the task does
/// not find one that it did not start.
pub fn start_process(name: &str, work: impl FnOnce(OwnedFd)) -> Result<OwnedFd, Failure> {
    let failed = |errno: Errno| Failure::new(format!("cannot start the {name}: {}", errno.desc()));
    let (ours, launchers) =
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).map_err(failed)?;
    // SAFETY: a task has one thread; its children do nothing but what follows, and end.
    match unsafe { fork() }.map_err(failed)? {
        ForkResult::Parent { child } => {
            drop(ours);
            reap(child);
            Ok(launchers)
        }
        ForkResult::Child => {
            // SAFETY: as above.
            if let Ok(ForkResult::Child) = unsafe { fork() } {
                leave_everything_but(&ours);
                let _ = std::panic::catch_unwind(AssertUnwindSafe(|| work(ours)));
            }
            // SAFETY: ends a forked process without slurmstepd's exit handlers.
            unsafe { libc::_exit(0) }
        }
    }
}

/// Waits for a child of ours. Slurm collects children too, and may have been faster.
fn reap(child: Pid) {
    while nix::sys::wait::waitpid(child, None) == Err(Errno::EINTR) {}
}

/// Keeps nothing of slurmstepd's: no descriptor but this one, no terminal, no directory.
fn leave_everything_but(socket: &OwnedFd) {
    let _ = setsid();
    let _ = nix::unistd::chdir("/");
    // The user must not be able to look into a process of root's, whatever namespace it enters.
    let _ = nix::sys::prctl::set_dumpable(false);
    let _ = nix::sys::prctl::set_name(c"mizzen-broker");
    // Not one that the kernel spares when memory runs out, as it spares slurmstepd.
    let _ = std::fs::write("/proc/self/oom_score_adj", "0");
    let fd = socket.as_raw_fd();
    let close = |first: i32, last: i32| {
        // SAFETY: takes three numbers. What owned these descriptors in slurmstepd is never used in this process.
        first > last || unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } == 0
    };
    if close(0, fd - 1) && close(fd + 1, i32::MAX) {
        return;
    }
    // Linux before 5.9.
    let listed = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let open: Vec<i32> = listed.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    for other in open.into_iter().filter(|other| *other != fd) {
        // SAFETY: as above.
        unsafe { libc::close(other) };
    }
}

/// Answers one message, or ends with the launcher.
fn serve(socket: OwnedFd, client: &Client) {
    let patience = PollTimeout::try_from(PATIENCE_MILLISECONDS).unwrap_or(PollTimeout::MAX);
    let mut asked = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
    if !matches!(poll(&mut asked, patience), Ok(1..)) {
        return;
    }
    let Ok((mode, passed)) = receive(&socket) else { return };
    if let Some(namespace) = passed.first() {
        let answer = match map_groups(namespace, mode, client) {
            Ok(dropped) => {
                let dropped: Vec<String> = dropped.iter().map(u32::to_string).collect();
                format!("+{}", dropped.join(" "))
            }
            Err(failure) => format!("-{failure}"),
        };
        let _ = send(socket.as_raw_fd(), answer.as_bytes(), MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT);
    }
    // In this order: to close what was passed may mean to wait for a file system that is a process of the user's, and what
    // keeps that going may lie in our own socket.
    drop(socket);
    drop(passed);
}

/// The message: who the user is inside, and the user namespace. Nothing is passed when the launcher has ended.
fn receive(socket: &OwnedFd) -> nix::Result<(u8, Vec<OwnedFd>)> {
    let mut mode = [0];
    let mut buffer = [std::io::IoSliceMut::new(&mut mode)];
    let mut space = cmsg_space!([i32; 1]);
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut buffer, Some(&mut space), flags)?;
    let mut passed = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(fds) = control {
            // SAFETY: the kernel has made these descriptors for this process.
            passed.extend(fds.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    Ok((mode[0], passed))
}

/// Writes the map; returns the groups that found no place in it.
fn map_groups(namespace: &OwnedFd, mode: u8, client: &Client) -> Result<Vec<u32>, Failure> {
    check_namespace(namespace, client.uid)?;
    let inside_gid = if mode == b'r' { 0 } else { client.gid };
    let (map, dropped) = group_map(inside_gid, client.gid, &client.groups);
    let broken = |what: &str, error: std::io::Error| Failure::new(format!("{what}: {error}"));
    // A process of ours in the namespace, whose map is the namespace's. A process id from the launcher would be a
    // claim, and the process another one by the time that it is used.
    let (wait, go) = std::io::pipe().map_err(|error| broken("cannot make a pipe", error))?;
    let (entered, enter) = std::io::pipe().map_err(|error| broken("cannot make a pipe", error))?;
    // SAFETY: this process has one thread, and the child only enters, waits and ends.
    let helper = match unsafe { fork() } {
        Ok(ForkResult::Parent { child }) => child,
        Ok(ForkResult::Child) => {
            drop((go, entered));
            if setns(namespace, CloneFlags::CLONE_NEWUSER).is_ok() {
                let _ = (&enter).write_all(b"+");
                let _ = std::io::Read::read(&mut &wait, &mut [0]);
            }
            // SAFETY: as in `start`.
            unsafe { libc::_exit(0) }
        }
        Err(errno) => return Err(broken("cannot fork", errno.into())),
    };
    drop((wait, enter));
    let mut ready = [PollFd::new(entered.as_fd(), PollFlags::POLLIN)];
    let said = matches!(poll(&mut ready, HELPER_MILLISECONDS), Ok(1..));
    let written = if said && matches!(std::io::Read::read(&mut &entered, &mut [0]), Ok(1)) {
        write_map(helper, &map)
    } else {
        Err(Failure::new("cannot enter the user namespace"))
    };
    // In his namespace the user may send it signals: one that he has stopped ends by nothing else. The launcher waits for
    // our answer, so that we do not wait for its end; when we end, it is init's to collect.
    // SAFETY: a child that has not been waited for, so the number is still its own.
    unsafe { libc::kill(helper.as_raw(), libc::SIGKILL) };
    drop(go);
    written.map(|()| dropped)
}

/// Without `deny` the user could give up a group in order to get what is closed to that group.
fn write_map(process: Pid, map: &str) -> Result<(), Failure> {
    for (file, text) in [("setgroups", "deny"), ("gid_map", map)] {
        let written = File::options()
            .write(true)
            .open(format!("/proc/{process}/{file}"))
            .and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(|error| Failure::new(format!("cannot write {file}: {error}")))?;
    }
    Ok(())
}

/// The namespace must be one that this user has made in the namespace of the node.
fn check_namespace(namespace: &OwnedFd, uid: u32) -> Result<(), Failure> {
    const NS_GET_PARENT: libc::Ioctl = 0xb702;
    const NS_GET_OWNER_UID: libc::Ioctl = 0xb704;
    let refused = |why: &str| Err(Failure::new(format!("the broker refuses a namespace: {why}")));
    // Before any ioctl: on a device the same number may mean something else. The kernel itself says what this is, and no
    // file system is asked, which may be a process of the user's; the paths of files begin with a slash.
    let fd = namespace.as_raw_fd();
    let name = std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap_or_default();
    if !name.as_os_str().as_encoded_bytes().starts_with(b"user:[") {
        return refused("not a user namespace");
    }
    let mut owner: libc::uid_t = u32::MAX;
    // SAFETY: the kernel writes a uid_t.
    if unsafe { libc::ioctl(fd, NS_GET_OWNER_UID, &raw mut owner) } != 0 || owner != uid {
        return refused("it belongs to another user");
    }
    // SAFETY: takes no argument and gives a new descriptor, or an error.
    let parent = unsafe { libc::ioctl(fd, NS_GET_PARENT) };
    if parent < 0 {
        return refused("it has no parent");
    }
    // SAFETY: a new descriptor that nobody else owns.
    let parent = File::from(unsafe { OwnedFd::from_raw_fd(parent) });
    let place =
        |found: std::io::Result<std::fs::Metadata>| found.ok().map(|found| (found.dev(), found.ino()));
    let (parent, own) = (place(parent.metadata()), place(std::fs::metadata("/proc/self/ns/user")));
    if parent.is_none() || parent != own { refused("it is nested in another") } else { Ok(()) }
}
