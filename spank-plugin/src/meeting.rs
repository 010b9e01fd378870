//! Where the tasks of a step meet on a node: two sockets and a number, made by slurmstepd before it forks the tasks
//! and gone with its last process. Made as root, used by the tasks as the user.
//!
//! The first task sends one message, which stays in the socket: every other task reads it without taking it. That
//! works for any number of tasks, in any order, also for those that start when the first has ended. In the other
//! direction lies a single byte: whoever takes it may tell the user what went wrong.
#![allow(unsafe_code)] // a socket option that no crate wraps

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use mizzen_core::Failure;
use mizzen_core::handover::{OUTCOME_LIMIT, Outcome};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};

/// More is not said: the container is there, and somebody has failed.
const OUTCOMES: usize = 2;

/// The meeting place of one step on one node.
pub struct Meeting {
    /// The first task's message is read here.
    pub receive: OwnedFd,
    /// The first task's message is sent here.
    pub send: OwnedFd,
    /// The process id of the first task, which slurmstepd alone knows when it has forked them all.
    builder: File,
}

impl Meeting {
    /// Makes one.
    pub fn open() -> Result<Meeting, Failure> {
        let failed =
            |what: &str, errno: nix::Error| Failure::new(format!("cannot make {what}: {}", errno.desc()));
        let (receive, send_end) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
                .map_err(|errno| failed("a socket for the tasks", errno))?;
        send(receive.as_raw_fd(), b"!", MsgFlags::MSG_DONTWAIT)
            .map_err(|errno| failed("a message for the tasks", errno))?;
        let builder = memfd_create(c"mizzen-builder", MFdFlags::MFD_CLOEXEC)
            .map_err(|errno| failed("memory for the tasks", errno))?;
        Ok(Meeting { receive, send: send_end, builder: builder.into() })
    }

    /// Remembers who builds.
    pub fn note_builder(&self, pid: i32) -> Result<(), Failure> {
        self.builder
            .write_all_at(&pid.to_ne_bytes(), 0)
            .map_err(|error| Failure::new(format!("cannot note the first task's process: {error}")))
    }

    /// Who builds, if slurmstepd has noted it.
    pub fn builder(&self) -> Option<i32> {
        let mut bytes = [0; 4];
        self.builder.read_exact_at(&mut bytes, 0).ok()?;
        Some(i32::from_ne_bytes(bytes))
    }

    /// Whether the caller is the first who has something to tell the user.
    pub fn may_speak(&self) -> bool {
        recv(self.send.as_raw_fd(), &mut [0], MsgFlags::MSG_DONTWAIT) == Ok(1)
    }

    /// What the tasks have said, when all of them have ended. It is looked at, not taken: whoever takes a message closes
    /// what a user put into it, and a socket can make that last (SO_LINGER). At slurmstepd's own end it cannot.
    pub fn outcomes(&self) -> Vec<Outcome> {
        let (option, start): (_, libc::c_int) = (libc::SO_PEEK_OFF, 0);
        let length = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the kernel reads a number of the given size. With this option each look goes on behind the last one.
        let done = unsafe {
            let (socket, start) = (self.receive.as_raw_fd(), (&raw const start).cast());
            libc::setsockopt(socket, libc::SOL_SOCKET, option, start, length)
        };
        let mut text = vec![0; OUTCOME_LIMIT];
        let mut look = || {
            recv(self.receive.as_raw_fd(), &mut text, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK)
                .map(|length| Outcome::decode(&text[..length]))
        };
        // A user's process could go on sending.
        std::iter::from_fn(|| look().ok()).take(if done == 0 { OUTCOMES } else { 1 }).collect()
    }
}
