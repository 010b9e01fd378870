//! The process that watches over a file server, which is its child. When the server dies, or meets a part of the image that
//! cannot be read, the programs that use it would end by SIGBUS, or go on with errors that say nothing. So the watcher
//! tells the user, once, and ends the container.
//!
//! Runs as the user, outside the container: in its mount namespace it would keep alive what it waits to see ended. It has
//! none of the program's streams open before it needs them, because others wait for their end.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use mizzen_core::Failure;
use mizzen_core::failure::quote;
use mizzen_squashfs::fuse::Phase;
use mizzen_squashfs::{self as squashfs, Image};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, socketpair};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{Pid, getpid, getppid, read, write};

use super::processes::ContainerProcesses;
use super::reporter::Reporter;
use super::server::ServerLock;
use super::standby::{self, Shared};
use crate::image::DAMAGED as DAMAGED_IMAGE;
use crate::stage::profile::StartProfile;
use crate::sys;
use crate::trace::OrDebug;

/// Who kills all processes of a job does so one after the other, and the watcher is one of them.
const KILLED_TOGETHER: Duration = Duration::from_millis(500);
/// To tell the user, and to end the step on its other nodes, takes less.
const TELLING: Duration = Duration::from_secs(12);
/// Containers are made in less, in milliseconds.
const READY: u16 = 10_000;
/// A start that does not calm down is noted less and less often: in a year, not more often than this.
const MOST_NOTES: u32 = 256;
/// No report of a server is longer.
const LIMIT: usize = 4096;

/// What the watchers of a container's servers have in common.
pub struct Watch {
    /// Holds one message with the container's user namespace, once that exists. The watcher that receives it, and only that
    /// one, reports and ends the container.
    claim: OwnedFd,
    announce: OwnedFd,
    /// This process, which becomes the container's program.
    program: Option<OwnedFd>,
    reporter: Box<dyn Reporter>,
}

impl Watch {
    /// For a container that is yet to be made.
    pub fn new(reporter: Box<dyn Reporter>) -> Result<Watch, Failure> {
        let (claim, announce) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
                .map_err(|errno| Failure::caused_by("cannot watch the file servers", errno))?;
        Ok(Watch { claim, announce, program: sys::pidfd_of_self().ok(), reporter })
    }

    /// The container is made: until now the process that built it has told of every failure, from now on the watchers do. A user
    /// with more containers than descriptors that may be under way at once has one that nobody watches.
    pub fn arm(self, user_namespace: BorrowedFd) {
        sys::send_descriptors(&self.announce, &[1], &[user_namespace.as_raw_fd()])
            .or_debug("the file servers are not watched");
    }

    /// What a watcher needs open.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let mut descriptors = self.reporter.descriptors();
        descriptors.push(self.claim.as_fd());
        descriptors.extend(self.program.as_ref().map(AsFd::as_fd));
        descriptors
    }

    /// Takes the right to report and to end the container, if that is there, and nobody else has it.
    fn claim(&self) -> Option<ContainerProcesses> {
        let message = sys::receive_descriptors(&self.claim, &mut [0], MsgFlags::MSG_DONTWAIT);
        let (_, mut received) = message.ok()?;
        let program = self.program.as_ref().and_then(|program| program.try_clone().ok());
        Some(ContainerProcesses::of(received.pop()?).ok()?.with_program(program))
    }

    /// The container, when it is there, without the right to end it.
    fn look_when_ready(&self) -> Option<ContainerProcesses> {
        // Another watcher may have taken that right, and ends the container.
        wait_for(self.claim.as_fd(), PollFlags::POLLIN, PollTimeout::from(READY));
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK;
        let (_, mut received) = sys::receive_descriptors(&self.claim, &mut [0], flags).ok()?;
        let program = self.program.as_ref().and_then(|program| program.try_clone().ok());
        Some(ContainerProcesses::of(received.pop()?).ok()?.with_program(program))
    }

    /// The same, but waits until the container is there, or its maker has failed.
    fn claim_when_ready(&self) -> Option<ContainerProcesses> {
        wait_for(self.claim.as_fd(), PollFlags::POLLIN, PollTimeout::NONE);
        self.claim()
    }
}

/// The server's end of its connection to the watcher.
pub struct WatcherConnection(OwnedFd);

/// The watcher's end.
pub struct ServerConnection(OwnedFd);

/// Makes the connection of a server and its watcher.
pub fn connection() -> io::Result<(WatcherConnection, ServerConnection)> {
    let pair = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
    Ok((WatcherConnection(pair.0), ServerConnection(pair.1)))
}

impl AsFd for WatcherConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsFd for ServerConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

// The first byte of what a server says.
const DAMAGED: u8 = b'd';
const UNREADABLE: u8 = b'u';
const FAILED: u8 = b'f';
const ENDED: u8 = b'e';
const READS: u8 = b'r';
const NOTE: u8 = b'n';
const SERVES: u8 = b's';

/// A server has no more to tell than this, and foreign code that has taken it over does not get to tell more.
const NOTES: usize = 4;

impl WatcherConnection {
    /// A part of a file of the image cannot be read. Returns when the user has been told, and whether they were.
    pub fn damage(&self, file: Option<&[u8]>, error: &squashfs::Error) -> bool {
        let kind = if matches!(error, squashfs::Error::Io { .. }) { UNREADABLE } else { DAMAGED };
        let text = [file.unwrap_or_default(), b"\0", error.to_string().as_bytes()].concat();
        self.say(kind, &text);
        let mut answer = [0];
        matches!(read(&self.0, &mut answer), Ok(1)) && answer == [1]
    }

    /// More of what the start has read is in the file that both have open, and the start goes on like this.
    pub fn has_reads(&self, phase: Phase) {
        self.say(READS, &[u8::from(phase == Phase::Quiet)]);
    }

    /// The server cannot go on, for this reason.
    pub fn failed(&self, why: &str) {
        self.say(FAILED, why.as_bytes());
    }

    /// It has its turn among those who serve a container one after the other.
    pub fn serves(&self) {
        self.say(SERVES, b"");
    }

    /// Something that the user should know, and that ends nothing.
    pub fn note(&self, text: &str) {
        self.say(NOTE, text.as_bytes());
    }

    /// The server ends, as it should, and has done this.
    pub fn ended(&self, work: &str) {
        self.say(ENDED, work.as_bytes());
    }

    fn say(&self, kind: u8, text: &[u8]) {
        // A watcher that is no longer there hears nothing.
        let _ = write(&self.0, &[&[kind], &text[..text.len().min(LIMIT - 1)]].concat());
    }
}

/// A server, as its watcher sees it.
pub struct Watched<'a> {
    /// The image as the user knows it.
    pub name: &'a str,
    /// The image.
    pub image: &'a Image,
    /// What the server says.
    pub server: &'a ServerConnection,
    /// The other steps, if others may be in the container.
    pub steps: Option<&'a Steps<'a>>,
    /// What is known of the program's starts, and where the server writes what this one reads.
    pub starts: Option<(&'a StartProfile, &'a File)>,
}

impl Watched<'_> {
    /// Watches until the server has ended. Whatever the server says has been made of foreign bytes, perhaps by foreign code.
    pub fn watch(&self, pid: Pid, watch: &Watch) {
        become_watcher();
        let made = self.version();
        if let Some((profile, _)) = self.starts {
            profile.go_on(self.image);
        }
        let (mut last_words, mut has_turn, mut noted, mut notes) = (None, false, 0_u32, 0);
        let mut buffer = [0; LIMIT];
        loop {
            let length = match self.listen(&mut buffer) {
                Event::Said(length) => length,
                Event::Silent => break,
                Event::Ended(failure) => {
                    if let Some(steps) = self.steps {
                        steps.end(watch, &failure);
                    }
                    return;
                }
            };
            match (buffer[0], &buffer[1..length]) {
                (kind @ (DAMAGED | UNREADABLE), text) => {
                    let container = watch.claim();
                    if let Some(container) = &container {
                        container.stop();
                        kill_in_any_case(container);
                        let failure = self.damage(kind, text, made != self.version());
                        self.publish(&failure);
                        watch.reporter.prepare(container)(&failure);
                        watch.reporter.cancel_step();
                        self.wait_for_other_steps();
                        // Those who wait for the server's answer cannot end before they have it.
                        container.kill_once();
                    }
                    let _ = write(&self.server.0, &[u8::from(container.is_some())]);
                    if let Some(container) = container {
                        container.kill();
                    }
                }
                (SERVES, _) => has_turn = true,
                (READS, is_quiet) => {
                    // A server that says it for ever has been taken over.
                    noted = noted.saturating_add(1);
                    if let Some((profile, file)) = self.starts.filter(|_| noted <= MOST_NOTES) {
                        let is_quiet = is_quiet == [1];
                        profile.note(self.image, file, is_quiet);
                        if is_quiet {
                            noted = MOST_NOTES;
                        }
                    }
                }
                (ENDED, work) => {
                    let _ = waitpid(pid, None);
                    watch.reporter.tell_work(&format!("{}: {}", self.name, quote(work)));
                    return;
                }
                (NOTE, text) => {
                    notes += 1;
                    if let Some(container) = (notes <= NOTES).then(|| watch.look_when_ready()).flatten() {
                        watch.reporter.note(&container, &quote(text));
                    }
                }
                (_, text) => last_words = Some(quote(text)),
            }
        }
        self.after_death(pid, watch, last_words, has_turn);
    }

    /// What is next: the server says something, or has ended, or the container has.
    fn listen(&self, buffer: &mut [u8; LIMIT]) -> Event {
        loop {
            if let Some(failure) = self.steps.and_then(|steps| steps.shared.end.failure()) {
                return Event::Ended(failure);
            }
            let time = self.steps.map_or(PollTimeout::NONE, |_| PollTimeout::from(standby::WATCH));
            if self.steps.is_none() || wait_for(self.server.0.as_fd(), PollFlags::POLLIN, time) {
                return match read(&self.server.0, buffer) {
                    Ok(length @ 1..) => Event::Said(length),
                    _ => Event::Silent,
                };
            }
        }
    }

    fn publish(&self, failure: &Failure) {
        if let Some(steps) = self.steps {
            steps.shared.end.publish(failure);
        }
    }

    fn wait_for_other_steps(&self) {
        if let Some(steps) = self.steps {
            steps.shared.end.wait_for_others();
        }
    }

    /// The server has ended without saying so.
    fn after_death(&self, pid: Pid, watch: &Watch, last_words: Option<String>, has_turn: bool) {
        let ended = || waitpid(pid, None).ok();
        let status = if self.steps.is_some() { ended() } else { None };
        if let Some(steps) = self.steps {
            // Whoever kills a server, the kernel perhaps, has nothing against the next one. But nobody goes on with what has made
            // one fail: as long as this process has the lock, nobody has their turn.
            let is_killed = matches!(status, Some(WaitStatus::Signaled(_, Signal::SIGKILL, _)));
            if is_killed && last_words.is_none() || !has_turn {
                steps.shared.let_others_serve();
                if standby::goes_on(&steps.shared.path) {
                    return steps.watch(watch);
                }
            }
        }
        // Its maker has told the user if the container was not ready; another watcher, if it came first.
        let Some(container) = watch.claim_when_ready() else { return };
        container.stop();
        kill_in_any_case(&container);
        let tell = watch.reporter.prepare(&container);
        let status = status.or_else(ended);
        if matches!(status, Some(WaitStatus::Signaled(_, Signal::SIGKILL, _))) {
            std::thread::sleep(KILLED_TOGETHER);
        }
        let failure = self.death(status, last_words);
        self.publish(&failure);
        tell(&failure);
        watch.reporter.cancel_step();
        self.wait_for_other_steps();
        container.kill();
    }

    /// What changes when somebody writes to the image.
    fn version(&self) -> Option<(u64, i64, i64)> {
        let file = File::from(self.image.source().original().try_clone_to_owned().ok()?).metadata().ok()?;
        Some((file.len(), file.mtime(), file.mtime_nsec()))
    }

    fn damage(&self, kind: u8, text: &[u8], is_changed: bool) -> Failure {
        let mut parts = text.splitn(2, |byte| *byte == 0).map(quote);
        let file = parts.next().filter(|file| !file.is_empty());
        let what =
            file.map_or_else(|| "cannot be read".to_owned(), |file| format!("cannot read {file} in it"));
        let why = parts.next().unwrap_or_default();
        let failure = Failure::new(format!("{}: {what}, so the container was ended: {why}", self.name));
        failure.hint(if is_changed {
            "the image was written to while it was in use; put a new one in its place with mv, which leaves the old one to \
             those who use it"
        } else if kind == UNREADABLE {
            "its file system fails; the node's kernel log tells more"
        } else {
            DAMAGED_IMAGE
        })
    }

    fn death(&self, status: Option<WaitStatus>, last_words: Option<String>) -> Failure {
        let failed = |how: &str| {
            Failure::new(format!("{}: its file server {how}, so the container was ended", self.name))
        };
        let bug = "the image is broken or means harm, or this is a bug of mizzen; please report it";
        match (last_words, status) {
            (Some(why), _) => failed(&format!("failed ({why})")).hint(bug),
            (None, Some(WaitStatus::Signaled(_, Signal::SIGKILL, _))) => failed("was killed").hint(
                "the kernel kills processes when memory runs out: see `dmesg` on the node, and the limit of the step (--mem)",
            ),
            (None, Some(WaitStatus::Signaled(_, Signal::SIGSYS, _))) => {
                failed("made a system call that its filter does not allow")
                    .hint(format!("{bug}. The node's kernel log names the call (type=1326)"))
            }
            (None, Some(WaitStatus::Signaled(_, signal, _))) => failed(&format!("crashed ({signal})")).hint(bug),
            (None, _) => failed("ended").hint(bug),
        }
    }
}

/// What a watcher hears.
enum Event {
    /// So many bytes of the server's.
    Said(usize),
    /// The server's end.
    Silent,
    /// Another watcher's failure, which ends the container.
    Ended(Failure),
}

/// The other steps that may be in a container, as the watcher of one sees them.
pub struct Steps<'a> {
    /// What all have in common.
    pub shared: &'a Shared,
    /// The process after whose end nobody of this step is left to be told.
    pub until: Option<BorrowedFd<'a>>,
    /// The image as the user knows it.
    pub name: &'a str,
}

impl Steps<'_> {
    /// Watches where the step has no file server of its own, as long as others serve the container.
    pub fn watch(&self, watch: &Watch) {
        let until = self.until.or(watch.program.as_ref().map(AsFd::as_fd));
        loop {
            if let Some(failure) = self.shared.end.failure() {
                return self.end(watch, &failure);
            }
            if !standby::is_served(&self.shared.path) && !standby::goes_on(&self.shared.path) {
                break;
            }
            match until {
                Some(until) if wait_for(until, PollFlags::POLLIN, PollTimeout::from(standby::WATCH)) => {
                    return;
                }
                Some(_) => {}
                None => std::thread::sleep(Duration::from_millis(standby::WATCH.into())),
            }
        }
        // It may have ended as it should: with the last process in the container.
        if watch.look_when_ready().is_some_and(|container| !container.list().is_empty()) {
            let failure = Failure::new(format!(
                "{}: its file server has ended with the step that had started it, so the container was ended",
                self.name
            ));
            let failure = failure.hint(
                "a note at the start of a step tells why no other can go on for it; let the step that starts a container last longest",
            );
            self.end(watch, &failure);
        }
    }

    /// Tells the step what ends the container, and ends it.
    fn end(&self, watch: &Watch, failure: &Failure) {
        let Some(container) = watch.claim_when_ready() else { return self.shared.end.told() };
        container.stop();
        kill_in_any_case(&container);
        self.shared.end.publish(failure);
        watch.reporter.prepare(&container)(failure);
        watch.reporter.cancel_step();
        self.shared.end.wait_for_others();
        container.kill();
    }
}

/// Watches over a container that others serve, in a process of its own. As long as that has the connection, nobody in the container
/// meets an error before they are told.
pub fn watch_others(
    watch: &Watch,
    lock: &ServerLock,
    name: &Path,
    connection: Option<&OwnedFd>,
) -> Result<(), Failure> {
    let failed =
        |error: io::Error| Failure::caused_by("cannot watch the file server of the container", error);
    let shared = Shared::open(lock).map_err(failed)?;
    let name = quote(name.as_os_str().as_bytes());
    let until = lock.until.as_ref().map(AsFd::as_fd);
    let mut keep = watch.descriptors();
    keep.extend(shared.descriptors());
    keep.extend(until);
    keep.extend(connection.map(AsFd::as_fd));
    sys::spawn_detached(&keep, || {
        become_watcher();
        Steps { shared: &shared, until, name: &name }.watch(watch);
    })
    .map_err(failed)
}

/// A stream may never take what is written to it, and somebody may kill this process while the container is stopped: then
/// another one ends the container.
fn kill_in_any_case(container: &ContainerProcesses) {
    let watcher = getpid();
    // It ends with the container, and nobody waits for it.
    let _ = sys::spawn_child(|| {
        let end = Instant::now() + TELLING;
        while getppid() == watcher && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(50));
        }
        container.kill();
        0
    });
}

/// Leaves everything behind that belongs to the job's program.
fn become_watcher() {
    let _ = nix::unistd::chdir("/");
    let _ = nix::sys::prctl::set_name(c"mizzen-watch");
    let _ = nix::sys::prctl::set_no_new_privs();
    let _ = sys::drop_capabilities();
}

/// Waits for a descriptor; false after the time, or when it cannot be waited for.
pub fn wait_for(fd: BorrowedFd, what: PollFlags, time: PollTimeout) -> bool {
    let mut polled = [PollFd::new(fd, what)];
    loop {
        match poll(&mut polled, time) {
            Err(nix::errno::Errno::EINTR) => {}
            ready => return ready.is_ok_and(|count| count > 0),
        }
    }
}
