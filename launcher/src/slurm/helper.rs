//! The helper on the host side of a step: the same user, outside the container, for the commands of programs inside.
//! It ends with the program that it was started for and blocks all signals until then.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use mizzen_core::Failure;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, chdir, close, getuid};

use super::command;
use super::wire::CommandResult;
use crate::sys;

/// Starts a helper for the program that this process will become, and returns the value of
/// [`super::HOST_VARIABLE`] for it. To be called on the host, before any namespace of the container is entered, with
/// the host's environment, and with a single thread.
pub fn start_helper() -> Result<String, Failure> {
    let failed = |what: &str, error: io::Error| {
        Failure::caused_by(format!("no Slurm commands in the container: cannot {what}"), error)
    };
    // A caller that ignores it would have our child vanish without a word.
    sys::reset_signal(Signal::SIGCHLD).map_err(|error| failed("reset SIGCHLD", error))?;
    let name = new_name().map_err(|error| failed("read /dev/urandom", error))?;
    let listener = SocketAddr::from_abstract_name(&name)
        .and_then(|address| UnixListener::bind_addr(&address))
        .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
        .map_err(|error| failed("listen", error))?;
    let owner =
        sys::pidfd_of_self().map_err(|error| failed("watch this process (needs Linux 5.3)", error))?;
    let keep = [listener.as_fd(), owner.as_fd()];
    sys::spawn_detached(&keep, || serve(&listener, owner.as_fd()))
        .map_err(|error| failed("start the helper", error))?;
    Ok(name)
}

/// An abstract name, so that nothing is on disk. Not one of the million that the kernel would choose from: a shim
/// whose helper has ended must not find the helper of another job of its user.
fn new_name() -> io::Result<String> {
    let mut random = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut random)?;
    Ok(random.iter().fold("mizzen.".to_owned(), |name, byte| format!("{name}{byte:02x}")))
}

/// The helper: one child for each connection, until the owner ends. The children watch the owner too.
fn serve(listener: &UnixListener, owner: BorrowedFd) {
    // Whatever the step ignores, Slurm's commands shall not; here all signals are blocked anyway.
    for signal in Signal::iterator() {
        let _ = sys::reset_signal(signal);
    }
    let _ = chdir("/");
    let _ = nix::sys::prctl::set_name(c"mizzen-slurm");
    let Ok(ended) = child_signals() else { return };
    let mut strangers = Strangers { held: Vec::new(), closer: None };
    loop {
        let watched = |fd| PollFd::new(fd, PollFlags::POLLIN);
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
            // Everybody on the node can connect to an abstract name. The kernel tells who does.
            Ok((stream, _)) if !is_own(&stream) => strangers.hold(stream),
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

fn is_own(stream: &UnixStream) -> bool {
    sys::peer_uid(stream.as_fd()).is_ok_and(|peer| peer == getuid().as_raw())
}

/// Connections of other users. What they have sent may be descriptors whose last close takes as long as their sender likes, so
/// they are not closed here: they stay open, and now and then a process of its own closes them.
struct Strangers {
    held: Vec<UnixStream>,
    closer: Option<Pid>,
}

impl Strangers {
    const MANY: usize = 64;

    fn hold(&mut self, stream: UnixStream) {
        // The other end sees the end of the connection.
        let _ = stream.shutdown(Shutdown::Both);
        self.held.push(stream);
        let closing = self.closer.is_some_and(|closer| kill(closer, None).is_ok());
        if self.held.len() < Strangers::MANY || closing {
            return;
        }
        let Ok((wait, go)) = io::pipe() else { return };
        let go_number = go.as_raw_fd();
        // It closes them when this process has: not before, or the last close would be here.
        let closer = sys::spawn_child(|| {
            let _ = close(go_number);
            let _ = (&wait).read(&mut [0]);
            0
        });
        if let Ok(closer) = closer {
            self.closer = Some(closer);
            self.held.clear();
        }
    }
}

impl Drop for Strangers {
    /// They are left to the end of the process: there the kernel does not wait.
    fn drop(&mut self) {
        self.held.drain(..).for_each(std::mem::forget);
    }
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
