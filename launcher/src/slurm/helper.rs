//! The helper on the host side of a step: the same user, outside the container, for the commands of programs inside.
//! It ends with the program that it was started for and blocks all signals until then.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use mizzen_core::Failure;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
use nix::sys::stat::{FchmodatFlags, Mode, fchmodat};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{chdir, close};

use super::wire::CommandResult;
use super::{SOCKET, command};
use crate::sys;

/// A helper that has started and has no address yet.
pub struct Helper {
    socket: OwnedFd,
    /// A byte in it says that the socket listens.
    ready: PipeWriter,
}

/// Starts a helper for the program that this process will become. To be called on the host, before any namespace of the
/// container is entered, with the host's environment, and with a single thread.
pub fn start_helper() -> Result<Helper, Failure> {
    let failed = |what: &str, error: io::Error| {
        Failure::caused_by(format!("no Slurm commands in the container: cannot {what}"), error)
    };
    // A caller that ignores it would have our child vanish without a word.
    sys::reset_signal(Signal::SIGCHLD).map_err(|error| failed("reset SIGCHLD", error))?;
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)
        .map_err(|errno| failed("make a socket", errno.into()))?;
    let owner = sys::end_of_self().map_err(|error| failed("watch this process", error))?;
    let (wait, ready) = io::pipe().map_err(|error| failed("make a pipe", error))?;
    let listener =
        socket.try_clone().map(UnixListener::from).map_err(|error| failed("make a socket", error))?;
    let keep = [listener.as_fd(), owner.as_fd(), wait.as_fd()];
    sys::spawn_detached(&keep, || serve(&listener, owner.as_fd(), &wait))
        .map_err(|error| failed("start the helper", error))?;
    Ok(Helper { socket, ready })
}

impl Helper {
    /// Has it listen in this directory of the container, under the name [`super::SOCKET`].
    ///
    /// Only who is in the container finds a socket there. To an abstract address everybody on the node could connect, and send
    /// descriptors, which the kernel closes in our name: that can take for ever, even where the process has been killed.
    pub fn listen_in(&self, directory: BorrowedFd) -> nix::Result<()> {
        let path = format!("/proc/self/fd/{}/{SOCKET}", directory.as_raw_fd());
        bind(self.socket.as_raw_fd(), &UnixAddr::new(path.as_str())?)?;
        fchmodat(directory, SOCKET, Mode::S_IRUSR | Mode::S_IWUSR, FchmodatFlags::FollowSymlink)?;
        listen(&self.socket, Backlog::MAXCONN)?;
        (&self.ready).write_all(&[1]).map_err(|_| Errno::EPIPE)
    }
}

/// The helper: one child for each connection, until the owner ends. The children watch the owner too.
fn serve(listener: &UnixListener, owner: BorrowedFd, ready: &PipeReader) {
    // Whatever the step ignores, Slurm's commands shall not; here all signals are blocked anyway.
    for signal in Signal::iterator() {
        let _ = sys::reset_signal(signal);
    }
    let _ = chdir("/");
    let _ = nix::sys::prctl::set_name(c"mizzen-slurm");
    let Ok(ended) = child_signals() else { return };
    let watched = |fd| PollFd::new(fd, PollFlags::POLLIN);
    // The container is being made. If that fails, the pipe ends.
    if !matches!((&*ready).read(&mut [0]), Ok(1)) {
        return;
    }
    loop {
        let mut watched = [watched(owner), watched(ended.as_fd()), watched(listener.as_fd())];
        match poll(&mut watched, PollTimeout::NONE) {
            Err(Errno::EINTR) => continue,
            Err(_) => return,
            Ok(_) if watched[0].any() == Some(true) => return,
            Ok(_) => {}
        }
        while let Ok(Some(_)) = ended.read_signal() {}
        while !matches!(waitpid(None, Some(WaitPidFlag::WNOHANG)), Ok(WaitStatus::StillAlive) | Err(_)) {}
        match listener.accept() {
            Ok((stream, _)) => look_after(stream, listener, owner),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // Out of descriptors or memory; the connection stays in the queue.
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// A descriptor that becomes readable when a child has ended. SIGCHLD is blocked here.
pub fn child_signals() -> nix::Result<SignalFd> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGCHLD);
    SignalFd::with_flags(&set, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
}

fn look_after(mut stream: UnixStream, listener: &UnixListener, owner: BorrowedFd) {
    let listening = listener.as_raw_fd();
    let child = sys::spawn_child(|| {
        // With it open, a shim would wait for a helper that was killed.
        let _ = close(listening);
        command::serve(&stream, owner);
        0
    });
    if let Err(error) = child {
        let failure = Failure::caused_by("cannot start a process on the host", error);
        let _ = stream.write_all(&CommandResult::Refused(failure).encode());
    }
}
