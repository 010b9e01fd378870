//! The process that lets others into a shared container. The rank that makes the container starts it, on the host side, and it
//! ends with the last of those that it has let in: so it does not matter which rank ends first, or comes late.
//!
//!     builder --(namespaces and facts, or its failure)--> server --(the same)--> everybody who connects
//!
//! Runs as the user on the host, in a session of its own, with all signals blocked. It reads nothing of what others send.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use mizzen_core::Failure;
use mizzen_core::handover::{OUTCOME_LIMIT, Outcome};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, getsockopt, socketpair, sockopt};
use rustix::net::{SocketFlags, accept_with};

use super::rendezvous::{Rendezvous, is_own};
use crate::sys;
use crate::trace::OrDebug;

/// The kernel may have no room for more descriptors under way, or this process for another connection.
const RETRY: Duration = Duration::from_millis(20);

/// So long those who come late hear that there is no container: one failure of all ranks is told once.
const LATE: Duration = Duration::from_secs(1);

/// The builder's connection to its server.
pub struct NamespaceServer(OwnedFd);

impl NamespaceServer {
    /// Starts it for the container that this process makes, and that so many others want to share, if that is known. To be
    /// called on the host, with a single thread.
    pub fn start(
        rendezvous: &Rendezvous,
        listener: OwnedFd,
        others: u32,
    ) -> Result<NamespaceServer, Failure> {
        let failed =
            |error: std::io::Error| Failure::caused_by("cannot start the process that lets others in", error);
        // A caller that ignores it would have our child vanish without a word.
        sys::reset_signal(Signal::SIGCHLD).map_err(failed)?;
        let (announce, announced) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
                .map_err(|errno| failed(errno.into()))?;
        let builder = sys::end_of_self().map_err(failed)?;
        let keep = [rendezvous.descriptor(), listener.as_fd(), announced.as_fd(), builder.as_fd()];
        sys::spawn_detached(&keep, || {
            become_server();
            Serving::new(&listener, &announced, &builder, others).serve();
            rendezvous.remove();
        })
        .map_err(failed)?;
        Ok(NamespaceServer(announce))
    }

    /// Lets the others in.
    pub fn announce(&self, fds: &[i32]) {
        // If the server was killed, they make a container for themselves.
        sys::send_descriptors(&self.0, &Outcome::Ready.encode(), fds).or_debug("nobody is let in");
    }

    /// Ends those that wait, when the user has been told.
    pub fn announce_failure(&self, failure: &Failure) {
        sys::send_descriptors(&self.0, &Outcome::Failed(failure.clone()).encode(), &[])
            .or_debug("the other ranks are not told");
    }
}

fn become_server() {
    let _ = nix::unistd::chdir("/");
    let _ = nix::sys::prctl::set_name(c"mizzen-share");
    let _ = nix::sys::prctl::set_no_new_privs();
    let _ = sys::drop_capabilities();
    // A descriptor for each rank, and a node has many.
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

/// What everybody who connects is told.
enum Answer {
    /// Nothing yet: the container is being made.
    None,
    /// How to enter: the message of the builder, with its descriptors.
    Ready { text: Vec<u8>, fds: Vec<OwnedFd> },
    /// Why there is none: the message of the builder.
    Failed { text: Vec<u8>, at: Instant },
}

/// A process that waits for its answer.
struct Waiting {
    connection: OwnedFd,
    process: OwnedFd,
}

struct Serving<'a> {
    listener: &'a OwnedFd,
    announced: &'a OwnedFd,
    builder: &'a OwnedFd,
    /// How many others are known to come, and have no answer yet.
    others: u32,
    answer: Answer,
    waiting: Vec<Waiting>,
    /// Processes that have been let in, and have not ended.
    members: Vec<OwnedFd>,
}

impl<'a> Serving<'a> {
    fn new(listener: &'a OwnedFd, announced: &'a OwnedFd, builder: &'a OwnedFd, others: u32) -> Serving<'a> {
        let (answer, waiting, members) = (Answer::None, Vec::new(), Vec::new());
        Serving { listener, announced, builder, others, answer, waiting, members }
    }

    /// Until nobody is left who could be met. Who connects after that finds the connection ended, and begins anew.
    fn serve(mut self) {
        while self.goes_on() {
            self.accept_all();
            self.answer_all();
            self.wait();
        }
    }

    /// Takes the builder's message when it is there, and forgets those who have ended.
    fn goes_on(&mut self) -> bool {
        // In this order: its last words come before its end.
        let builder_lives = !has_ended(self.builder.as_fd());
        if matches!(self.answer, Answer::None) {
            let mut text = vec![0; OUTCOME_LIMIT];
            match sys::receive_descriptors(self.announced, &mut text, MsgFlags::MSG_DONTWAIT) {
                Ok((length @ 1.., fds)) => {
                    text.truncate(length);
                    self.answer = match Outcome::decode(&text) {
                        Outcome::Ready => Answer::Ready { text, fds },
                        Outcome::Failed(_) => Answer::Failed { text, at: Instant::now() },
                    };
                }
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                // It has ended without a word.
                Ok(_) | Err(_) => return false,
            }
        }
        self.members.retain(|member| !has_ended(member.as_fd()));
        self.waiting.retain(|waiting| !has_hung_up(waiting.connection.as_fd()));
        match self.answer {
            Answer::None => builder_lives,
            Answer::Ready { .. } => builder_lives || !self.members.is_empty() || !self.waiting.is_empty(),
            Answer::Failed { at, .. } => !self.waiting.is_empty() || self.others > 0 && at.elapsed() < LATE,
        }
    }

    fn accept_all(&mut self) {
        loop {
            match accept_with(self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(connection) => self.waiting.extend(Waiting::new(connection)),
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
                Err(rustix::io::Errno::AGAIN) => return,
                // Out of descriptors or memory; the connection stays in the queue.
                Err(_) => return std::thread::sleep(RETRY),
            }
        }
    }

    fn answer_all(&mut self) {
        let (text, fds): (_, &[OwnedFd]) = match &self.answer {
            Answer::None => return,
            Answer::Ready { text, fds } => (text, fds),
            Answer::Failed { text, .. } => (text, &[]),
        };
        let fds: Vec<i32> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        for waiting in std::mem::take(&mut self.waiting) {
            match sys::send_descriptors(&waiting.connection, text, &fds) {
                Ok(()) => {
                    self.others = self.others.saturating_sub(1);
                    // It has what it needs to enter.
                    self.members.push(waiting.process);
                }
                // Too many descriptors are under way: soon.
                Err(Errno::EAGAIN | Errno::ETOOMANYREFS | Errno::ENOBUFS | Errno::ENOMEM) => {
                    self.waiting.push(waiting)
                }
                // It has ended.
                Err(_) => {}
            }
        }
    }

    /// Waits until something happens.
    fn wait(&self) {
        let is_made = !matches!(self.answer, Answer::None);
        let mut sources = vec![PollFd::new(self.listener.as_fd(), PollFlags::POLLIN)];
        if !is_made {
            sources.push(PollFd::new(self.announced.as_fd(), PollFlags::POLLIN));
        }
        let builder = Some(self.builder).filter(|builder| !has_ended(builder.as_fd()));
        let processes = self.members.iter().chain(builder);
        sources.extend(processes.map(|process| PollFd::new(process.as_fd(), PollFlags::POLLIN)));
        // Nothing is read from these: their end alone matters, which is told in any case.
        let connections = self.waiting.iter().map(|waiting| waiting.connection.as_fd());
        sources.extend(connections.map(|connection| PollFd::new(connection, PollFlags::empty())));
        let patience = match self.answer {
            Answer::None => None,
            _ if !self.waiting.is_empty() => Some(RETRY),
            Answer::Ready { .. } => None,
            Answer::Failed { at, .. } => Some(LATE.saturating_sub(at.elapsed())),
        };
        let patience = patience.map_or(PollTimeout::NONE, |time| {
            PollTimeout::try_from(time + Duration::from_millis(1)).unwrap_or(PollTimeout::ZERO)
        });
        let _ = poll(&mut sources, patience);
    }
}

impl Waiting {
    /// Who has connected, if it is the same user. Nothing is taken from others, and nobody else gets into the directory.
    fn new(connection: OwnedFd) -> Option<Waiting> {
        let peer = getsockopt(&connection, sockopt::PeerCredentials).ok().filter(|_| is_own(&connection))?;
        let process = sys::end_of(peer.pid()).ok()?;
        // As long as it has not hung up, its number was not another's when that was opened.
        (!has_hung_up(connection.as_fd())).then_some(Waiting { connection, process })
    }
}

/// Whether a process has ended.
fn has_ended(process: BorrowedFd) -> bool {
    look(process, PollFlags::POLLIN).contains(PollFlags::POLLIN)
}

fn has_hung_up(connection: BorrowedFd) -> bool {
    look(connection, PollFlags::empty()).intersects(PollFlags::POLLHUP | PollFlags::POLLERR)
}

fn look(fd: BorrowedFd, events: PollFlags) -> PollFlags {
    let mut polled = [PollFd::new(fd, events)];
    match poll(&mut polled, PollTimeout::ZERO) {
        Ok(_) => polled[0].revents().unwrap_or(PollFlags::empty()),
        Err(_) => PollFlags::empty(),
    }
}
