//! How the tasks of a step on a node meet: the first sends one message with the container's namespaces, which stays in
//! the socket, and all others read it there without taking it. (A message for each task would run into the kernel's
//! limit on descriptors under way.)

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use mizzen_core::Failure;
use mizzen_core::handover::{OUTCOME_LIMIT, Outcome};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::kill;
use nix::sys::socket::{MsgFlags, recv};
use nix::unistd::{Pid, getppid};

use crate::plan::Facts;
use crate::sandbox::Namespaces;
use crate::sys;

/// The sockets that the plugin has made.
pub struct Meeting {
    /// Where the message is read.
    pub receive: OwnedFd,
    /// Where it is sent; and where the byte lies that gives the right to tell the user.
    pub send: OwnedFd,
}

impl Meeting {
    /// Whether the caller is the first of its step on this node who has something to tell the user.
    pub fn may_speak(&self) -> bool {
        recv(self.send.as_raw_fd(), &mut [0], MsgFlags::MSG_DONTWAIT) == Ok(1)
    }

    /// Whether the container has been announced.
    pub fn is_ready(&self) -> bool {
        matches!(self.peek(), Ok((Outcome::Ready(_), _)))
    }

    /// The first task: lets the others in.
    pub fn announce(&self, namespaces: &Namespaces, facts: &Facts, times: String) -> Result<(), Failure> {
        let failed = |what: &str, why: String| Failure::new(format!("cannot {what}: {why}"));
        // The facts may be long; a message must not be.
        let paper = memfd_create(c"mizzen-facts", MFdFlags::MFD_CLOEXEC)
            .map_err(|errno| failed("make a file in memory", errno.desc().to_owned()))?;
        let mut paper = File::from(paper);
        serde_json::to_vec(facts)
            .map_err(std::io::Error::from)
            .and_then(|text| paper.write_all(&text))
            .map_err(|error| failed("write down what the other tasks need", error.to_string()))?;
        let mut fds = vec![namespaces.user.as_raw_fd(), namespaces.mounts.as_raw_fd(), paper.as_raw_fd()];
        // Nobody needs it; in the message it stays open as long as the step is there.
        fds.extend(namespaces.life.as_ref().map(AsRawFd::as_raw_fd));
        self.send_message(&Outcome::Ready(times), &fds)
            .map_err(|errno| failed("tell the other tasks", errno.desc().to_owned()))
    }

    /// The only task: tells Slurm's log alone. What lies in a socket counts against the limit on open files of all the
    /// user's processes, and a job may have a step for every core of a node.
    pub fn announce_alone(&self, times: String) {
        let _ = self.send_message(&Outcome::Ready(times), &[]);
    }

    /// Ends those who wait, and goes to Slurm's log. The user has been told. Behind the announcement of the container
    /// it is for the log alone.
    pub fn announce_failure(&self, failure: &Failure) {
        let _ = self.send_message(&Outcome::Failed(failure.message.clone()), &[]);
    }

    fn send_message(&self, outcome: &Outcome, fds: &[i32]) -> nix::Result<()> {
        sys::pass_descriptors(&self.send, &outcome.encode(), fds)
    }

    /// Another task: waits for the first one's message. The builder's end is noticed too: the socket alone would not
    /// tell, because slurmstepd has both ends.
    pub fn receive(&self, builder: i32) -> Result<(Namespaces, Facts), Failure> {
        let process = sys::pidfd_of(builder).ok();
        // Before Linux 5.3 nothing wakes us at its end: look from time to time.
        let patience = if process.is_some() { PollTimeout::NONE } else { PollTimeout::from(100u8) };
        loop {
            // In this order: its last words come before its end.
            let lives = is_sibling(builder);
            match self.peek() {
                Ok((Outcome::Ready(_), fds)) => return read_message(fds),
                // The first task has told the user.
                Ok((Outcome::Failed(why), _)) => return Err(Failure::new(why)),
                Err(Errno::EAGAIN) if lives => {}
                Err(Errno::EAGAIN) => {
                    return Err(Failure::new(
                        "the first task on this node ended before it had made the container",
                    )
                    .hint("it was killed, or a TaskProlog has ended it; slurmd's log tells more"));
                }
                Err(errno) => {
                    return Err(Failure::new(format!("cannot hear of the container: {}", errno.desc())));
                }
            }
            let sources = [Some(self.receive.as_fd()), process.as_ref().map(AsFd::as_fd)];
            let mut sources: Vec<PollFd> =
                sources.into_iter().flatten().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
            match poll(&mut sources, patience) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => {
                    return Err(Failure::new(format!("cannot wait for the first task: {}", errno.desc())));
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

fn read_message(mut fds: Vec<OwnedFd>) -> Result<(Namespaces, Facts), Failure> {
    fds.truncate(3);
    let Ok([user, mounts, paper]) = <[OwnedFd; 3]>::try_from(fds) else {
        return Err(Failure::new("cannot take over the container's namespaces")
            .hint("the limit on open files (ulimit -n) may be too low"));
    };
    let paper = File::from(paper);
    // All tasks share the file, and so its position: read at an offset of our own.
    let length = paper.metadata().map_or(0, |found| found.len());
    let mut text = vec![0; usize::try_from(length).unwrap_or(0)];
    let facts = paper.read_exact_at(&mut text, 0).and_then(|()| Ok(serde_json::from_slice(&text)?));
    let facts =
        facts.map_err(|error| Failure::new(format!("cannot read what the first task says: {error}")))?;
    Ok((Namespaces { user, mounts, life: None }, facts))
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
