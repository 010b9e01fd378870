//! How the tasks of a step find each other on a node, and how slurmstepd hears of them. Made by slurmstepd as root before it
//! forks the tasks; used by the tasks as the user.
//!
//! Among the tasks there are two sockets. The first task sends one message, which stays in the socket: every other task
//! reads it without taking it. That works for any number of tasks, in any order, also for those that start when the first
//! has ended. In the other direction lies a single byte: whoever takes it may tell the user what went wrong.
//!
//! A process that holds such a socket can block the others: a reader holds the socket's lock while it copies, and the last close
//! runs over whatever users have queued. So slurmstepd closes its copies once all tasks are forked, before any of them
//! continues. It never reads, writes or closes a socket that a user's process has used. What the tasks have to say to it is in
//! the [`StepReport`].
#![allow(unsafe_code)] // clone, and calls on numbers of descriptors

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use mizzen_core::{Failure, StepReport, step_report};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sched::{CloneFlags, clone};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{SigSet, SigmaskHow};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use nix::unistd::{Pid, getpid, pipe2};

use crate::userns::close_all_but;

/// The channel of one step on one node, in slurmstepd and in a task that has not become the launcher yet.
pub struct StepdChannel {
    /// slurmstepd's own description of the report.
    report: StepReport,
    /// What is the tasks'.
    tasks: Option<TaskEnds>,
    /// slurmstepd, whose descriptors these are.
    stepd: Pid,
}

/// What the tasks inherit, and hand to the launcher.
pub struct TaskEnds {
    /// The first task's message is read here.
    pub receive: OwnedFd,
    /// The first task's message is sent here.
    pub send: OwnedFd,
    /// The tasks' description of the report.
    pub report: OwnedFd,
}

impl TaskEnds {
    /// All of them.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 3] {
        [self.receive.as_fd(), self.send.as_fd(), self.report.as_fd()]
    }
}

impl StepdChannel {
    /// Makes one.
    pub fn open() -> Result<StepdChannel, Failure> {
        let failed = |what: &str, error: std::io::Error| {
            Failure::caused_by(format!("cannot make {what} for the tasks"), error)
        };
        let (receive, send_end) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
                .map_err(|errno| failed("a socket", errno.into()))?;
        send(receive.as_raw_fd(), b"!", MsgFlags::MSG_DONTWAIT)
            .map_err(|errno| failed("a message", errno.into()))?;
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let memory = memfd_create(c"mizzen-report", flags).map_err(|errno| failed("memory", errno.into()))?;
        let memory = File::from(memory);
        memory.set_len(step_report::SIZE).map_err(|error| failed("memory", error))?;
        let seals = SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL;
        fcntl(&memory, FcntlArg::F_ADD_SEALS(seals)).map_err(|errno| failed("memory", errno.into()))?;
        let own =
            File::options().read(true).write(true).open(format!("/proc/self/fd/{}", memory.as_raw_fd()));
        Ok(StepdChannel {
            report: StepReport::new(own.map_err(|error| failed("memory", error))?),
            tasks: Some(TaskEnds { receive, send: send_end, report: memory.into() }),
            stepd: getpid(),
        })
    }

    /// The report, as slurmstepd reads it.
    pub fn report(&self) -> &StepReport {
        &self.report
    }

    /// What a task has of it.
    pub fn tasks(&self) -> Option<&TaskEnds> {
        self.tasks.as_ref()
    }

    /// slurmstepd, when the last task is forked and none goes on yet: gives up what is theirs. (With `contain_spank` this hook
    /// runs in a process that has slurmstepd's memory, but descriptors of its own: then nothing is given up here.)
    pub fn leave_to_tasks(&mut self) {
        if getpid() == self.stepd {
            self.tasks = None;
        }
    }

    /// A task: whether it is the first that has something to tell the user.
    pub fn claim_report(&self) -> bool {
        self.tasks
            .as_ref()
            .is_some_and(|ends| recv(ends.send.as_raw_fd(), &mut [0], MsgFlags::MSG_DONTWAIT) == Ok(1))
    }

    /// slurmstepd, when all tasks have ended: closes everything. What is still there of the tasks' is closed by a process
    /// of the user's, because that may take as long as the user likes. It is the user's only when slurmstepd has closed its
    /// own. It runs no other program, which its user could trace, and nobody can look into this one; all that a user can do
    /// is to stop it.
    ///
    /// Where `fs.suid_dumpable` is 1 the kernel would let its user look into it: it makes a process whose effective ids change
    /// traceable then. So one id stays root's, which keeps everybody from tracing it, until the process has said that it is not
    /// to be; that the last id changes does not alter this. It has no core file before that, because all signals are blocked.
    pub fn close(self, user: Option<(u32, u32)>) {
        let Some(ends) = self.tasks else { return };
        let pipe = pipe2(nix::fcntl::OFlag::O_CLOEXEC);
        let (Some((uid, gid)), Ok((closed, open))) = (user, pipe) else {
            // Better to leave them open until slurmstepd ends than to wait.
            std::mem::forget(ends);
            return;
        };
        let [receive, send, report] = ends.descriptors().map(|fd| fd.as_raw_fd());
        let mut kept = [receive, send, report, closed.as_raw_fd()];
        kept.sort_unstable();
        let mut stack = vec![0; 64 << 10];
        // slurmstepd has several threads: the child calls nothing that could wait for one of them.
        let child = Box::new(|| {
            close_all_but(&kept);
            let _ = nix::unistd::read(&closed, &mut [0]);
            // SAFETY: these take numbers and no list. libc's own functions would look for other threads.
            unsafe {
                libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>());
                libc::syscall(libc::SYS_setresgid, gid, gid, gid);
                libc::syscall(libc::SYS_setresuid, uid, uid, 0);
                libc::syscall(libc::SYS_prctl, libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
                libc::syscall(libc::SYS_setresuid, -1, -1, uid);
            }
            0
        });
        // Its user may send it signals, and it must not run slurmstepd's handlers.
        let mask = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK);
        // SAFETY: the child has memory of its own; see above.
        let started = unsafe { clone(child, &mut stack, CloneFlags::empty(), None) };
        let _ = mask.map(|mask| mask.thread_set_mask());
        match started {
            Ok(_) => drop(ends),
            Err(_) => std::mem::forget(ends),
        }
        drop(open);
    }
}
