//! What descriptors that were inherited by number really are, who is at the other end of a socket, and what this process
//! inherited about its signals.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::signal::Signal;
use nix::sys::socket::{SockType, getsockopt, sockopt};
use nix::unistd::getppid;

/// Whether it is a socket that keeps messages apart, as the one between the tasks of a step does.
pub fn is_seqpacket(fd: impl AsFd) -> bool {
    getsockopt(&fd, sockopt::SockType) == Ok(SockType::SeqPacket)
}

/// Whether it is a file in memory whose size cannot be changed.
pub fn is_sealed_memory(fd: impl AsFd) -> bool {
    let size = SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK;
    fcntl(fd, FcntlArg::F_GET_SEALS).is_ok_and(|seals| SealFlag::from_bits_truncate(seals).contains(size))
}

/// Whether it is a user namespace.
pub fn is_user_namespace(fd: impl AsFd) -> bool {
    const NS_GET_NSTYPE: libc::Ioctl = 0xb703;
    // SAFETY: takes no argument; fails for what is no namespace.
    unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), NS_GET_NSTYPE) == libc::CLONE_NEWUSER }
}

/// Whether a number that a variable gives for PMI's descriptor may be one. Slurm's is a stream, and so is that of other
/// process managers; nothing of ours is. In a step its other end must be the parent's, slurmstepd.
pub fn is_pmi_socket(fd: i32, in_step: bool) -> bool {
    // SAFETY: asked for once, here, and not kept: whether it is open, the calls tell.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    getsockopt(&fd, sockopt::SockType) == Ok(SockType::Stream)
        && (!in_step
            || getsockopt(&fd, sockopt::PeerCredentials).is_ok_and(|peer| peer.pid() == getppid().as_raw()))
}

/// Whether this process was started with the signal ignored, as `nohup` does.
pub fn is_ignored(signal: Signal) -> bool {
    // SAFETY: a C structure of numbers and pointers for which zeros are valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: changes nothing; the kernel writes to a live structure.
    let done = unsafe { libc::sigaction(signal as libc::c_int, std::ptr::null(), &raw mut action) };
    done == 0 && action.sa_sigaction == libc::SIG_IGN
}
