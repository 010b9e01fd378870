//! Who is at the other end of a socket, and what this process inherited about its signals.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::sys::signal::Signal;

/// The user at the other end of a Unix socket, as this user namespace numbers it. (Not through a crate: the number of
/// a process that this pid namespace cannot see is 0, which rustix's type cannot hold.)
pub fn peer_uid(socket: BorrowedFd) -> io::Result<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, the size of the live structure.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    if done == 0 { Ok(peer.uid) } else { Err(io::Error::last_os_error()) }
}

/// Whether this process was started with the signal ignored, as `nohup` does.
pub fn is_ignored(signal: Signal) -> bool {
    // SAFETY: a C structure of numbers and pointers for which zeros are valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: changes nothing; the kernel writes to a live structure.
    let done = unsafe { libc::sigaction(signal as libc::c_int, std::ptr::null(), &raw mut action) };
    done == 0 && action.sa_sigaction == libc::SIG_IGN
}
