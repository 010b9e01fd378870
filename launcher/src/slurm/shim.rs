//! The shim: stands inside the container in place of a Slurm command, has the helper outside run the real one on its
//! own standard streams, and behaves towards its caller as if it were that one.

use std::ffi::OsString;
use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;

use mizzen_core::Failure;
use mizzen_core::failure::{FailureKind, cause, quote};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SigSet, Signal, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::named_files::{Inode, named_files};
use super::wire::{CommandRequest, CommandResult, FROM_TERMINAL, Inherited};
use super::{HOST_VARIABLE, caller_context};
use crate::report::{report, report_note};
use crate::sys;

/// Signals that the command gets when the shim does. Those of the terminal reach the shim alone: the command is in
/// a session of its own.
const HANDED_ON: [Signal; 10] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGALRM,
    Signal::SIGWINCH,
    Signal::SIGTSTP,
    Signal::SIGCONT,
];

/// Runs a Slurm command on the host; ends as it ended.
pub fn run(command: &str, arguments: impl Iterator<Item = OsString>) -> ExitCode {
    match attempt(command, arguments.collect()) {
        Ok(CommandResult::Exited(code)) => ExitCode::from(code),
        Ok(CommandResult::Killed(signal)) => die_by(signal),
        Ok(CommandResult::Refused(failure)) | Err(failure) => {
            report(&failure.clone().about(command));
            ExitCode::from(failure.kind.exit_code())
        }
    }
}

fn attempt(command: &str, arguments: Vec<OsString>) -> Result<CommandResult, Failure> {
    let failed = |what: &str, error: std::io::Error| Failure::caused_by(format!("cannot {what}"), error);
    let stream = connect()?;
    // From here on a signal is the command's, also one that comes before the command runs.
    let signals = catch_signals().map_err(|error| failed("catch signals", error))?;
    let directory = current_directory();
    let directory_inode = std::fs::metadata(".").ok().as_ref().map(Inode::of);
    let variables: Vec<(OsString, OsString)> = std::env::vars_os().collect();
    let files = named_files(command, &arguments, &variables)?;
    let (environment, left_out) = caller_context::leaving(command, variables, &directory);
    for name in left_out {
        report_note(&format!("{command}: {} is too long to reach the new step", quote(name.as_bytes())));
    }
    let inherited = Inherited::of_self();
    let command = command.into();
    let order =
        CommandRequest { command, arguments, directory, directory_inode, files, environment, inherited };
    send(&stream, &order).map_err(|error| failed("hand it to the helper outside the container", error))?;
    wait(&stream, &signals)
        .map_err(|error| failed("wait for it", error))?
        .ok_or_else(|| helper_gone("was killed"))
}

fn connect() -> Result<UnixStream, Failure> {
    let Some(name) = std::env::var_os(HOST_VARIABLE) else {
        let failure = Failure::new(format!("not available in this container ({HOST_VARIABLE} is not set)"))
            .hint("Slurm's commands work in containers that Slurm starts; keep the SLURM_ variables there");
        return Err(failure.of_kind(FailureKind::NotFound));
    };
    UnixStream::connect(&name).map_err(|error| {
        helper_gone(&format!("does not answer at {}: {}", quote(name.as_bytes()), cause(&error)))
    })
}

fn helper_gone(how: &str) -> Failure {
    Failure::new(format!("the helper outside the container {how}")).hint(
        "it lives as long as the program that the container was started for, and only in that container",
    )
}

/// The directory may have been removed, or lie outside what the container shows.
fn current_directory() -> PathBuf {
    let named = || std::env::var_os("PWD").map(PathBuf::from).filter(|path| path.is_absolute());
    let known = std::env::current_dir().ok().filter(|path| path.is_absolute());
    known.or_else(named).unwrap_or_else(|| PathBuf::from("/"))
}

fn send(stream: &UnixStream, order: &CommandRequest) -> std::io::Result<()> {
    let mut file = File::from(memfd_create(c"mizzen-order", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(&order.encode())?;
    // Rust's start-up has put /dev/null in the place of a standard stream that was closed.
    let (stdin, stdout, stderr) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
    let descriptors = [file.as_fd(), stdin.as_fd(), stdout.as_fd(), stderr.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    rights.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(stream, &[IoSlice::new(b"O")], &mut rights, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Blocks the signals and makes them readable, except for those that the caller has this program ignore (`nohup`;
/// a shell without job control does it for SIGINT with `&`): a blocked signal would be delivered nevertheless.
fn catch_signals() -> std::io::Result<SignalFd> {
    let mut caught = SigSet::empty();
    HANDED_ON.into_iter().filter(|signal| !sys::is_ignored(*signal)).for_each(|signal| caught.add(signal));
    caught.thread_block()?;
    Ok(SignalFd::with_flags(&caught, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?)
}

/// Hands signals on until the answer is there; None if there will be none.
fn wait(mut stream: &UnixStream, signals: &SignalFd) -> std::io::Result<Option<CommandResult>> {
    loop {
        let mut watched =
            [PollFd::new(stream.as_fd(), PollFlags::POLLIN), PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
        match poll(&mut watched, PollTimeout::NONE) {
            Err(nix::errno::Errno::EINTR) => continue,
            polled => polled?,
        };
        if watched[0].any() == Some(true) {
            let mut bytes = Vec::new();
            return match stream.read_to_end(&mut bytes) {
                Ok(_) => Ok(CommandResult::decode(&bytes)),
                // Killed with signals of ours unread.
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Ok(None),
                Err(error) => Err(error),
            };
        }
        while let Some(signal) = signals.read_signal()? {
            hand_on(stream, signal.ssi_signo, signal.ssi_code == libc::SI_KERNEL);
        }
    }
}

/// A helper that is gone shows in the next poll.
fn hand_on(mut stream: &UnixStream, number: u32, from_kernel: bool) {
    let Ok(number) = u8::try_from(number) else { return };
    let stop = number == Signal::SIGTSTP as u8;
    // The kernel ignores SIGTSTP in a session without a terminal, where the command is.
    let number = if stop { Signal::SIGSTOP as u8 } else { number };
    let _ = stream.write_all(&[if from_kernel { number | FROM_TERMINAL } else { number }]);
    if stop {
        let _ = raise(Signal::SIGSTOP);
    }
}

/// Ends by the signal that ended the command, so that the caller sees the same.
fn die_by(number: u8) -> ExitCode {
    if let Ok(signal) = Signal::try_from(i32::from(number)) {
        // It would be the core of the shim.
        let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
        let _ = sys::reset_signal(signal);
        let mut set = SigSet::empty();
        set.add(signal);
        let _ = set.thread_unblock();
        let _ = raise(signal);
    }
    ExitCode::from(128_u8.saturating_add(number))
}
