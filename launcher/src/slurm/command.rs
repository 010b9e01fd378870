//! The helper's child for one command: starts the real one for a shim, hands signals on, tells how it ended.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use mizzen_core::failure::{FailureKind, cause, quote};
use mizzen_core::fs_server::{self, FsServer};
use mizzen_core::{Failure, node_name};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, kill, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{AccessFlags, Pid, access, fchdir, setsid};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::helper::child_signals;
use super::named_files::{self, Inode};
use super::wire::{CommandRequest, CommandResult, FROM_TERMINAL};
use super::{COMMANDS, caller_context};
use crate::report::report;
use crate::sys;

/// Where Slurm is when PATH does not say.
const USUAL_PLACES: [&str; 4] = ["/usr/local/bin", "/usr/bin", "/bin", "/opt/slurm/bin"];
/// The kernel takes no more than 6 MiB of words and variables; so an order is not longer, with its NULs.
const ORDER_LIMIT: u64 = 16 << 20;
/// How long a command that was told to end may take. srun cancels its step then.
const GRACE: Duration = Duration::from_secs(5);

/// Looks after one connection, to its end. All signals are blocked here.
pub fn serve(mut stream: &UnixStream, owner: BorrowedFd) {
    let answer = match receive(stream, owner) {
        Ok(None) => return,
        Ok(Some((order, streams))) => run(order, streams, stream, owner),
        Err(error) => Err(Failure::new(format!("the helper did not understand: {}", cause(&error)))),
    };
    // Nobody is left to be told when this fails.
    let _ = stream.write_all(&answer.unwrap_or_else(CommandResult::Refused).encode());
}

/// The order and the standard streams; None if the shim or the owner has ended before.
fn receive(stream: &UnixStream, owner: BorrowedFd) -> io::Result<Option<(CommandRequest, [OwnedFd; 3])>> {
    let watched = |fd| PollFd::new(fd, PollFlags::POLLIN);
    let mut watched = [watched(stream.as_fd()), watched(owner)];
    poll(&mut watched, PollTimeout::NONE)?;
    if watched[1].any() == Some(true) {
        return Ok(None);
    }
    let (length, descriptors) = receive_descriptors(stream)?;
    if length == 0 {
        return Ok(None);
    }
    let broken = || io::Error::other("another version of mizzen?");
    let [order, stdin, stdout, stderr]: [OwnedFd; 4] = descriptors.try_into().map_err(|_| broken())?;
    let mut file = File::from(order);
    if !file.metadata()?.is_file() {
        return Err(broken());
    }
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(ORDER_LIMIT).read_to_end(&mut bytes)?;
    let order = CommandRequest::decode(&bytes).ok_or_else(broken)?;
    Ok(Some((order, [stdin, stdout, stderr])))
}

/// The first byte on a connection, and what came with it.
fn receive_descriptors(stream: &UnixStream) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let received =
        recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            descriptors.extend(passed);
        }
    }
    Ok((received.bytes, descriptors))
}

fn run(
    order: CommandRequest,
    streams: [OwnedFd; 3],
    stream: &UnixStream,
    owner: BorrowedFd,
) -> Result<CommandResult, Failure> {
    let program = find(&order.command).ok_or_else(|| {
        Failure::new(format!("no such command on {}", node_name()))
            .hint("it is looked for in PATH as it is on the host")
            .of_kind(FailureKind::NotFound)
    })?;
    let cwd = Directory::of(&order);
    let hosts: Vec<_> = std::env::vars_os().collect();
    named_files::check(&order.files, cwd.real_path(), &hosts)?;
    let failed = |what: &str, error: io::Error| Failure::caused_by(format!("cannot {what}"), error);
    let ended = child_signals().map_err(|errno| failed("watch processes", errno.into()))?;
    // The streams go with the closure: a copy that stayed here would keep the other end of a pipe waiting.
    let pid = sys::spawn_child(move || become_command(&program, order, &cwd, streams))
        .map_err(|error| failed("start a process on the host", error))?;
    watch(pid, stream, owner, ended.as_fd()).map_err(|error| failed("wait for it", error))
}

/// The real command: in PATH of the helper, which is the host's, or where it usually is. Never this program again.
fn find(command: &OsStr) -> Option<PathBuf> {
    // Not everything that a program inside names, though it could have srun start that.
    COMMANDS.into_iter().find(|known| command == *known)?;
    let own = fs::metadata("/proc/self/exe").map(|own| (own.dev(), own.ino())).ok();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).chain(USUAL_PLACES.map(PathBuf::from));
    let is_program = |candidate: &PathBuf| {
        fs::metadata(candidate).is_ok_and(|found| {
            let executable = found.is_file() && found.permissions().mode() & 0o111 != 0;
            executable && Some((found.dev(), found.ino())) != own
        })
    };
    places.filter(|place| place.is_absolute()).map(|place| place.join(command)).find(is_program)
}

/// Becomes the command; returns an exit code only if that failed. Its session has no terminal, so that a key there
/// reaches it once, through the shim; it reads and sets the terminal that was passed nevertheless.
fn become_command(
    program: &Path,
    order: CommandRequest,
    cwd: &Directory,
    [stdin, stdout, stderr]: [OwnedFd; 3],
) -> i32 {
    cwd.enter(&order, &stderr);
    let environment: Vec<(OsString, OsString)> =
        caller_context::arriving(&order.command, order.environment, std::env::vars_os(), cwd.name());
    let _ = setsid();
    let _ = SigSet::empty().thread_set_mask();
    order.inherited.apply();
    let error = Command::new(program)
        .arg0(&order.command)
        .args(&order.arguments)
        .env_clear()
        .envs(environment)
        .stdin(Stdio::from(stdin))
        .stdout(Stdio::from(stdout))
        .stderr(Stdio::from(stderr))
        .exec();
    // The standard streams are the shim's by now.
    let shown = quote(program.as_os_str().as_bytes());
    report(&Failure::caused_by(format!("{shown}: cannot be started on {}", node_name()), error));
    i32::from(FailureKind::NotExecutable.exit_code())
}

/// Where the command runs.
enum Directory {
    /// In the shim's own directory, which the host has under the same name.
    Shims { opened: OwnedFd, name: PathBuf, real: PathBuf },
    /// In the root directory: the host has none of that name.
    Root,
    /// In the root directory: what the host has under that name is another, which anybody may have filled.
    RootForOther,
}

impl Directory {
    fn of(order: &CommandRequest) -> Directory {
        let look = fs_server::look_unless(&order.directory, FsServer::is_foreign);
        let found = match look.served {
            // The shim is in a file system that another user serves, and so are its commands.
            Some(part) if order.directory_inode.is_some_and(|inode| inode.is_on(part.device)) => {
                let flags = libc::O_PATH | libc::O_DIRECTORY;
                OpenOptions::new().read(true).custom_flags(flags).open(&order.directory)
            }
            // Another one may never answer.
            Some(_) => return Directory::RootForOther,
            None => look.end.map_err(io::Error::from),
        };
        let Some((found, metadata)) = found.ok().and_then(|found| {
            let metadata = found.metadata().ok().filter(fs::Metadata::is_dir)?;
            Some((found, metadata))
        }) else {
            return Directory::Root;
        };
        let is_shims = Some(Inode::of(&metadata)) == order.directory_inode;
        let opened = PathBuf::from(format!("/proc/self/fd/{}", found.as_raw_fd()));
        let searchable = access(&opened, AccessFlags::X_OK).is_ok();
        let real = fs::read_link(opened);
        match real {
            Ok(real) if is_shims && searchable => {
                Directory::Shims { opened: found.into(), name: order.directory.clone(), real }
            }
            _ if !is_shims && searchable && order.directory != Path::new("/") => Directory::RootForOther,
            _ => Directory::Root,
        }
    }

    /// As the shim calls it.
    fn name(&self) -> &Path {
        match self {
            Directory::Shims { name, .. } => name,
            Directory::Root | Directory::RootForOther => Path::new("/"),
        }
    }

    /// Without links: what Slurm's commands begin with when they look for a file.
    fn real_path(&self) -> &Path {
        match self {
            Directory::Shims { real, .. } => real,
            Directory::Root | Directory::RootForOther => Path::new("/"),
        }
    }

    /// Makes it this process's, by its descriptor: its name may lead elsewhere by now. A new job would have its output there,
    /// so its owner is told if it is not.
    fn enter(&self, order: &CommandRequest, stderr: &OwnedFd) {
        match self {
            Directory::Shims { opened, .. } => drop(fchdir(opened)),
            // The helper is there.
            Directory::Root => {}
            Directory::RootForOther if order.command == "sbatch" => {
                let shown = quote(order.directory.as_os_str().as_bytes());
                let note = format!(
                    "mizzen: note: sbatch: {shown} is another directory outside the container; the job starts in /\n"
                );
                let _ = nix::unistd::write(stderr, note.as_bytes());
            }
            Directory::RootForOther => {}
        }
    }
}

/// What is to be done about the command.
enum Phase {
    /// Nothing: it runs.
    Running,
    /// It was told to end, and has until then.
    Ending(Instant),
    /// It was killed.
    Killed,
}

/// Waits for the command's end; sees to it when the shim or the owner ends before.
fn watch(pid: Pid, stream: &UnixStream, owner: BorrowedFd, ended: BorrowedFd) -> io::Result<CommandResult> {
    let mut phase = Phase::Running;
    loop {
        match waitpid(pid, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::Exited(_, code)) => return Ok(CommandResult::Exited(code as u8)),
            Ok(WaitStatus::Signaled(_, signal, _)) => return Ok(CommandResult::Killed(signal as u8)),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let watched = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut watched = [watched(ended), watched(stream.as_fd()), watched(owner)];
        let (count, timeout) = match phase {
            Phase::Running => (3, PollTimeout::NONE),
            Phase::Ending(until) => (1, timeout_until(until)),
            Phase::Killed => (1, PollTimeout::NONE),
        };
        match poll(&mut watched[..count], timeout) {
            Err(Errno::EINTR) => continue,
            polled => polled?,
        };
        if watched[0].any() == Some(true) {
            // Emptied: one that stays readable would not let the next poll wait.
            let _ = nix::unistd::read(ended, &mut [0; 1024]);
        }
        phase = match phase {
            Phase::Running => {
                let shim_ended = watched[1].any() == Some(true) && !hand_signals_on(stream, pid);
                if shim_ended || watched[2].any() == Some(true) { end(pid) } else { Phase::Running }
            }
            Phase::Ending(until) if Instant::now() >= until => {
                // Not its group: srun has a process there that cancels the step when srun was killed.
                let _ = kill(pid, Signal::SIGKILL);
                Phase::Killed
            }
            phase => phase,
        };
    }
}

fn timeout_until(until: Instant) -> PollTimeout {
    let left = until.saturating_duration_since(Instant::now());
    // Rounded up, or the last millisecond would be spent looking.
    PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
}

/// Tells the command to end.
fn end(pid: Pid) -> Phase {
    // One that is stopped is not woken up for this (srun would tell the user of a SIGCONT); it is killed later.
    signal_group(pid, Signal::SIGTERM);
    Phase::Ending(Instant::now() + GRACE)
}

/// Signals the command and its children: a site's srun may be a script.
fn signal_group(pid: Pid, signal: Signal) {
    // Its group exists a moment later than the process.
    if killpg(pid, signal).is_err() {
        let _ = kill(pid, signal);
    }
}

/// Gives the command the signals that the shim has got; false if the shim has ended.
fn hand_signals_on(mut stream: &UnixStream, pid: Pid) -> bool {
    let mut numbers = [0; 64];
    match stream.read(&mut numbers) {
        Ok(0) | Err(_) => false,
        Ok(length) => {
            for number in &numbers[..length] {
                match Signal::try_from(i32::from(number & !FROM_TERMINAL)) {
                    Ok(signal) if number & FROM_TERMINAL != 0 => signal_group(pid, signal),
                    Ok(signal) => {
                        let _ = kill(pid, signal);
                    }
                    Err(_) => {}
                }
            }
            true
        }
    }
}
