//! The processes of a container as they are seen from outside it, by a process of the same user that must not hold the
//! container open. Runs as the user on the host.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use nix::poll::{PollFlags, PollTimeout};
use rustix::process::{Pid, Signal, kill_process, pidfd_send_signal};

use super::watcher::wait_for;
use crate::sys;

/// What is not gone by then waits in the kernel, for a disk or a network, and will go.
const PATIENCE: Duration = Duration::from_secs(5);

/// The number of a process's mount namespace; it means nothing any more when the namespace is gone.
pub fn mount_namespace_of(process: &str) -> Option<u64> {
    fs::metadata(format!("/proc/{process}/ns/mnt")).ok().map(|found| found.ino())
}

/// The processes in a mount namespace, as far as the kernel lets their user see them.
pub fn processes_in(mount_namespace: u64) -> Vec<i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().into_string().ok());
    numbers
        .filter(|process| mount_namespace_of(process) == Some(mount_namespace))
        .filter_map(|process| process.parse().ok())
        .collect()
}

/// Waits until no process is in a mount namespace.
pub fn wait_until_empty(mount_namespace: u64) {
    loop {
        let left = processes_in(mount_namespace);
        if left.is_empty() {
            return;
        }
        for process in left {
            sys::wait_for_end(process);
        }
    }
}

/// The processes of a container, stopped and held, so that they neither start others nor can be taken for others. The number
/// of a namespace that is gone may be another's the next moment: it tells something only as long as one of these is alive.
pub struct ContainerProcesses {
    mount_namespace: u64,
    held: Vec<OwnedFd>,
}

impl ContainerProcesses {
    /// Stops those that are there now.
    pub fn stop(mount_namespace: u64) -> ContainerProcesses {
        let mut members = ContainerProcesses { mount_namespace, held: Vec::new() };
        let end = Instant::now() + PATIENCE;
        // Some may have forked before they were stopped: until a look finds no more than the one before.
        let mut seen = 0;
        while Instant::now() < end {
            members.signal(Signal::STOP);
            if members.held.len() == seen {
                break;
            }
            seen = members.held.len();
        }
        members
    }

    /// Holds those that are there, if the number still means the same, and signals all.
    fn signal(&mut self, signal: Signal) {
        // Before Linux 5.3 nothing can be held.
        if sys::pidfd_of_self().is_err() {
            for process in processes_in(self.mount_namespace) {
                let _ = Pid::from_raw(process).map(|process| kill_process(process, signal));
            }
            return;
        }
        let first = self.held.is_empty();
        let found: Vec<OwnedFd> = processes_in(self.mount_namespace)
            .into_iter()
            .filter_map(|process| {
                let held = sys::pidfd_of(process).ok()?;
                // It may have been another process when it was held.
                (mount_namespace_of(&process.to_string()) == Some(self.mount_namespace)).then_some(held)
            })
            .collect();
        if first || self.held.iter().any(is_alive) {
            self.held = found;
        } else {
            self.held.clear();
        }
        for process in &self.held {
            // One that has ended meanwhile is no matter.
            let _ = pidfd_send_signal(process, signal);
        }
    }

    /// Kills them.
    pub fn kill_once(&mut self) {
        if !self.held.is_empty() || sys::pidfd_of_self().is_err() {
            self.signal(Signal::KILL);
        }
    }

    /// Kills until none is left.
    pub fn kill(&mut self) {
        let end = Instant::now() + PATIENCE;
        self.kill_once();
        while !self.held.is_empty() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
            self.kill_once();
        }
    }
}

fn is_alive(process: &OwnedFd) -> bool {
    !wait_for(process.as_fd(), PollFlags::POLLIN, PollTimeout::ZERO)
}
