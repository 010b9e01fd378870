//! Waits for a program as its parent, and hands signals on to it.

use std::io;

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal, kill, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::sys::{self, Sender};

/// Signals that are handed on to the program, unless they come from the terminal, which sends them to all.
const HANDED_ON: [Signal; 8] = [
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGXCPU,
    Signal::SIGSTKFLT,
];

/// How a program has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With this exit code.
    Exited(i32),
    /// By this signal.
    Killed(Signal),
}

impl End {
    /// As a shell tells it.
    pub fn code(self) -> i32 {
        match self {
            End::Exited(code) => code,
            End::Killed(signal) => 128 + signal as i32,
        }
    }

    /// Ends this process in the same way; returns the exit code where that is it.
    pub fn imitate(self) -> i32 {
        if let End::Killed(signal) = self {
            // The program has left its core already.
            if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_CORE) {
                let _ = setrlimit(Resource::RLIMIT_CORE, 0, hard);
            }
            let _ = sys::reset_signal(signal);
            let mut set = SigSet::empty();
            set.add(signal);
            let _ = set.thread_unblock();
            let _ = raise(signal);
        }
        self.code()
    }
}

/// The signals that the waiting process must block.
pub fn watched_signals() -> SigSet {
    let mut set = SigSet::empty();
    for signal in HANDED_ON.into_iter().chain([Signal::SIGCHLD]) {
        set.add(signal);
    }
    set
}

/// Whom a process waits for.
pub struct Waiting<'a> {
    /// Its child, which gets the signals.
    pub child: Pid,
    /// Of [`watched_signals`], blocked.
    pub watched: &'a SigSet,
    /// What is collected: process 1 collects everything, others their child alone.
    pub only: Option<Pid>,
    /// Who sends signals to all processes itself.
    pub sends_to_all: Option<Pid>,
}

/// Waits for a child; tells how it has ended, and which signal somebody has sent last.
pub fn wait_and_hand_on(waiting: &Waiting) -> io::Result<(End, Option<Signal>)> {
    let Waiting { child, watched, only, sends_to_all } = *waiting;
    let mut sent = None;
    loop {
        let (signal, sender) = sys::wait_for_signal(watched)?;
        if signal != Signal::SIGCHLD {
            let Sender::Process(sender) = sender else { continue };
            sent = Some(signal);
            let gets_it = sends_to_all.is_some_and(|all| all.as_raw() == sender);
            match if gets_it { Ok(()) } else { kill(child, signal) } {
                Ok(()) | Err(Errno::ESRCH) => continue,
                Err(errno) => return Err(errno.into()),
            }
        }
        loop {
            let ended = waitpid(only.unwrap_or(Pid::from_raw(-1)), Some(WaitPidFlag::WNOHANG));
            match ended {
                Ok(WaitStatus::Exited(pid, code)) if pid == child => {
                    return Ok((End::Exited(code), sent));
                }
                Ok(WaitStatus::Signaled(pid, signal, _)) if pid == child => {
                    return Ok((End::Killed(signal), sent));
                }
                Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => break,
                Ok(_) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

/// A signal that somebody has sent since the last one was waited for.
pub fn pending(watched: &SigSet) -> Option<Signal> {
    let arrived = SignalFd::with_flags(watched, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC).ok()?;
    while let Ok(Some(info)) = arrived.read_signal() {
        let signal = Signal::try_from(i32::try_from(info.ssi_signo).ok()?).ok()?;
        if signal != Signal::SIGCHLD && info.ssi_code != libc::SI_KERNEL {
            return Some(signal);
        }
    }
    None
}
