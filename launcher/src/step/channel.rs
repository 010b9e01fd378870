//! How the tasks of a step on a node find each other: the first sends one message with the container's namespaces, which
//! stays in the socket, and all others read it there without taking it. (A message for each task would run into the
//! kernel's limit on descriptors under way.) The socket is the tasks' alone, and gone when the last one has become its program.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use mizzen_core::failure::cause;
use mizzen_core::handover::{self, OUTCOME_LIMIT, Outcome};
use mizzen_core::{Failure, Handover, StepReport};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::kill;
use nix::sys::socket::{MsgFlags, recv};
use nix::unistd::{Pid, getppid};

use crate::plan::Facts;
use crate::sandbox::{Namespaces, count_others};
use crate::sys;
use crate::trace::OrDebug;

/// What the plugin has made for the tasks of a step.
pub struct TaskChannel {
    /// Where the message is read.
    receive: OwnedFd,
    /// Where it is sent; and where the byte lies that gives the right to tell the user.
    send: OwnedFd,
    /// What slurmstepd is to know.
    report: StepReport,
}

impl TaskChannel {
    /// Takes over the descriptors that the plugin names. The variable that names them is the user's to change, so they are
    /// looked at: what is something else may belong to somebody else.
    pub fn take(handover: &Handover) -> Result<TaskChannel, Failure> {
        let unusable = |fd: i32, why: &str| {
            let message = format!("{}: descriptor {fd} {why}", handover::VARIABLE);
            Failure::new(message).hint("only mizzen sets this variable; does a task prolog print it?")
        };
        let take = |fd: i32, is_right: fn(BorrowedFd) -> bool, what: &str| {
            let taken = sys::own_inherited(fd, is_right)
                .map_err(|error| unusable(fd, &format!("cannot be used: {}", cause(&error))))?;
            taken.ok_or_else(|| unusable(fd, &format!("is not {what} of Slurm's plugin")))
        };
        let socket = |fd: i32| take(fd, |fd| sys::is_seqpacket(fd), "a socket");
        // A file in memory, and nothing that waits, or that is on a disk.
        let report = take(handover.report, |fd| sys::is_sealed_memory(fd), "the report")?;
        Ok(TaskChannel {
            receive: socket(handover.receive)?,
            send: socket(handover.send)?,
            report: StepReport::new(report.into()),
        })
    }

    /// Whether the caller is the first of its step on this node that has something to tell the user. When the container has
    /// lost its files, its watcher was.
    pub fn claim_report(&self) -> bool {
        recv(self.send.as_raw_fd(), &mut [0], MsgFlags::MSG_DONTWAIT) == Ok(1)
            && self.report.failure().is_none()
    }

    /// The report by another descriptor, for a process that outlives the task.
    pub fn report(&self) -> Result<StepReport, Failure> {
        let file = self.report.as_fd().try_clone_to_owned();
        file.map(|file| StepReport::new(file.into()))
            .map_err(|error| Failure::caused_by("cannot keep the step's report", error))
    }

    /// The first task: lets the others in.
    pub fn announce(&self, namespaces: &Namespaces, facts: &Facts) -> Result<(), Failure> {
        let facts_file = write_facts(facts)?;
        self.send_message(&Outcome::Ready, &descriptors(namespaces, &facts_file))
            .map_err(|errno| Failure::caused_by("cannot tell the other tasks", errno))
    }

    /// The first task: what Slurm's log is to say of the container.
    pub fn log_ready(&self, text: &str) {
        // The container is there all the same.
        self.report.write_ready(text).or_debug("slurmd's log will not tell of this container");
    }

    /// The first task, when the user has been told: ends those that wait.
    pub fn announce_failure(&self, failure: &Failure) {
        self.send_message(&Outcome::Failed(failure.clone()), &[]).or_debug("the other tasks are not told");
    }

    /// What Slurm's log is to say of a failure that the user has been told.
    pub fn log_failure(&self, failure: &Failure) {
        self.report.write_failure(failure, true).or_debug("slurmd's log will not tell of this failure");
    }

    fn send_message(&self, outcome: &Outcome, fds: &[i32]) -> nix::Result<()> {
        sys::send_descriptors(&self.send, &outcome.encode(), fds)
    }

    /// Another task: waits for the first one's message. The builder's end is noticed too: the socket alone would not
    /// tell, because every task has both ends.
    pub fn receive(&self, builder: i32) -> Result<(Namespaces, Facts), Failure> {
        let process = sys::pidfd_of(builder).ok();
        // Before Linux 5.3 nothing wakes us at its end: look from time to time.
        let patience = if process.is_some() { PollTimeout::NONE } else { PollTimeout::from(100u8) };
        loop {
            // In this order: its last words come before its end.
            let lives = is_sibling(builder);
            match self.peek() {
                Ok((Outcome::Ready, fds)) => return read_message(fds),
                // The first task has told the user.
                Ok((Outcome::Failed(why), _)) => return Err(why),
                Err(Errno::EAGAIN) if lives => {}
                Err(Errno::EAGAIN) => {
                    return Err(Failure::new(
                        "the first task on this node ended before it had made the container",
                    )
                    .hint("it was killed, or a TaskProlog has ended it; slurmd's log tells more"));
                }
                Err(errno) => {
                    return Err(Failure::caused_by("cannot hear of the container", errno));
                }
            }
            let sources = [Some(self.receive.as_fd()), process.as_ref().map(AsFd::as_fd)];
            let mut sources: Vec<PollFd> =
                sources.into_iter().flatten().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
            match poll(&mut sources, patience) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => {
                    return Err(Failure::caused_by("cannot wait for the first task", errno));
                }
            }
        }
    }

    fn peek(&self) -> nix::Result<(Outcome, Vec<OwnedFd>)> {
        let mut text = vec![0; OUTCOME_LIMIT];
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        let (length, fds) = sys::receive_descriptors(&self.receive, &mut text, flags)?;
        Ok((Outcome::decode(&text[..length]), fds))
    }
}

/// What others need to know of a container. It may be long, and a message must not be.
pub fn write_facts(facts: &Facts) -> Result<File, Failure> {
    let failed = |what: &str, error: std::io::Error| Failure::caused_by(format!("cannot {what}"), error);
    let facts_file = memfd_create(c"mizzen-facts", MFdFlags::MFD_CLOEXEC)
        .map_err(|errno| failed("make a file in memory", errno.into()))?;
    let mut facts_file = File::from(facts_file);
    serde_json::to_vec(facts)
        .map_err(std::io::Error::from)
        .and_then(|text| facts_file.write_all(&text))
        .map_err(|error| failed("write down what the other tasks need", error))?;
    Ok(facts_file)
}

/// The descriptors of the message that lets others into a container.
pub fn descriptors(namespaces: &Namespaces, facts_file: &File) -> Vec<i32> {
    let mut fds = vec![namespaces.user.as_raw_fd(), namespaces.mounts.as_raw_fd(), facts_file.as_raw_fd()];
    fds.extend(namespaces.others.iter().map(AsRawFd::as_raw_fd));
    // Nobody needs it; in the message it stays open until all have entered.
    fds.extend(namespaces.changes_guard.as_ref().map(AsRawFd::as_raw_fd));
    fds
}

/// Reads the descriptors of such a message.
pub fn read_message(fds: Vec<OwnedFd>) -> Result<(Namespaces, Facts), Failure> {
    // The kernel leaves out what exceeds the limit on open files, and says nothing.
    let incomplete = || Failure::caused_by("cannot take over the container's namespaces", Errno::EMFILE);
    let mut fds = fds.into_iter();
    let (Some(user), Some(mounts), Some(facts_file)) = (fds.next(), fds.next(), fds.next()) else {
        return Err(incomplete());
    };
    let facts_file = File::from(facts_file);
    // All tasks share the file, and so its position: read at an offset of our own.
    let length = facts_file.metadata().map_or(0, |found| found.len());
    let mut text = vec![0; usize::try_from(length).unwrap_or(0)];
    let facts = facts_file.read_exact_at(&mut text, 0).and_then(|()| Ok(serde_json::from_slice(&text)?));
    let facts: Facts = facts
        .map_err(|error| Failure::new(format!("cannot read what the first task says: {}", cause(&error))))?;
    let others: Vec<OwnedFd> = fds.by_ref().take(count_others(&facts.unshare)).collect();
    if others.len() < count_others(&facts.unshare) {
        return Err(incomplete());
    }
    Ok((Namespaces { user, mounts, others, unshare: facts.unshare, changes_guard: None }, facts))
}

/// Whether the process with this number lives and has the same parent, slurmstepd. Any other process that has the
/// number by now has not. Where procfs hides processes (`hidepid`), a task shows itself only when it has become the
/// launcher; until then it is known by taking signals of the same user.
fn is_sibling(pid: i32) -> bool {
    let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return kill(Pid::from_raw(pid), None).is_ok();
    };
    // "pid (name) state parent …", and the name may be anything.
    let mut fields = status.rsplit(") ").next().unwrap_or_default().split(' ');
    let (state, parent) = (fields.next(), fields.next());
    state != Some("Z") && parent.and_then(|parent| parent.parse().ok()) == Some(getppid().as_raw())
}
