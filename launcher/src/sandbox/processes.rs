//! The processes of a container as they are seen from outside it, by a process of the same user that must not hold the
//! container open. Runs as the user on the host.
//!
//! They are known by the container's user namespace. While that is held, its number cannot become another container's; and
//! to hold it keeps neither the container's mount namespace nor its files alive, as a mount namespace would.
//!
//! Of a process that has executed a file which its user may not read, or has forbidden others to look at it, the kernel
//! shows the same user no namespaces; but it shows everybody the mounts. So the container's own mounts bear that number
//! in their name.

use std::collections::BTreeSet;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use mizzen_core::mountinfo::{self, MountLine};
use nix::poll::{PollFlags, PollTimeout};
use nix::unistd::getuid;
use rustix::process::{Pid, Signal, kill_process, pidfd_send_signal};

use super::watcher::wait_for;
use crate::sys;

/// What is not gone by then waits in the kernel, for a disk or a network, and will go.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The kernel nests user namespaces no deeper.
const DEEPEST: usize = 33;

/// The processes in a container's user namespace, and in those that they have made in it.
pub struct ContainerProcesses {
    /// Its number is its own as long as this is open.
    _user_namespace: OwnedFd,
    number: (u64, u64),
    /// Where this process is. Who is there has helped to make the container, and is not in it.
    own_mounts: (u64, u64),
    /// The process that has made the container, and has become its program. It is ended also where procfs hides it.
    program: Option<OwnedFd>,
}

impl ContainerProcesses {
    /// Those in the user namespace of this process.
    pub fn beside_this() -> io::Result<ContainerProcesses> {
        ContainerProcesses::of(File::open("/proc/self/ns/user")?.into())
    }

    /// Those in this user namespace.
    pub fn of(user_namespace: OwnedFd) -> io::Result<ContainerProcesses> {
        let number = number(&File::from(user_namespace.try_clone()?).metadata()?);
        Ok(ContainerProcesses {
            _user_namespace: user_namespace,
            number,
            own_mounts: number_at("self", "mnt")?,
            program: None,
        })
    }

    /// These and the process that has made the container.
    pub fn with_program(self, program: Option<OwnedFd>) -> ContainerProcesses {
        ContainerProcesses { program, ..self }
    }

    /// Whether a process is one of them, as far as the kernel lets its user see it.
    pub fn contain(&self, process: i32) -> bool {
        self.look_at(&process.to_string()).unwrap_or_else(|_| self.contain_threads_of(process))
    }

    /// Of a process whose first thread has ended, only the others can be looked at.
    fn contain_threads_of(&self, process: i32) -> bool {
        let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
        let mut names = threads.filter_map(|thread| thread.file_name().into_string().ok());
        names.any(|thread| self.look_at(&format!("{process}/task/{thread}")).unwrap_or(false))
    }

    fn look_at(&self, process: &str) -> io::Result<bool> {
        match self.look_at_namespaces(process) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => self.look_at_mounts(process),
            looked => looked,
        }
    }

    fn look_at_mounts(&self, process: &str) -> io::Result<bool> {
        // Other users are not in the container, and can make their table of mounts as long as they like.
        if fs::metadata(format!("/proc/{process}"))?.uid() != getuid().as_raw() {
            return Ok(false);
        }
        let name = mount_name(self.number);
        let mounts = mountinfo::parse(&fs::read(format!("/proc/{process}/mountinfo"))?);
        Ok(are_of_container(&mounts, &name))
    }

    fn look_at_namespaces(&self, process: &str) -> io::Result<bool> {
        if number_at(process, "mnt")? == self.own_mounts {
            return Ok(false);
        }
        if number_at(process, "user")? == self.number {
            return Ok(true);
        }
        let mut namespace = OwnedFd::from(File::open(format!("/proc/{process}/ns/user"))?);
        for _ in 0..DEEPEST {
            // Those that are not below this process's own have no parent for us.
            namespace = sys::parent_namespace(namespace.as_fd())?;
            if number(&File::from(namespace.try_clone()?).metadata()?) == self.number {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The numbers of those that are there now.
    pub fn list(&self) -> Vec<i32> {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        numbers.filter(|process| self.contain(*process)).collect()
    }

    /// Waits until there is none.
    pub fn wait_until_none(&self) {
        loop {
            let left = self.list();
            if left.is_empty() {
                return;
            }
            left.into_iter().for_each(sys::wait_for_end);
        }
    }

    /// Stops all of them: they start no others, and keep their descriptors.
    pub fn stop(&self) {
        let end = Instant::now() + TIMEOUT;
        let mut stopped = BTreeSet::new();
        // Some may have forked before they were stopped: until a look finds nobody new.
        while Instant::now() < end {
            let found = self.signal(Signal::STOP);
            if found.is_subset(&stopped) {
                return;
            }
            stopped.extend(found);
        }
    }

    /// Kills all that are there now.
    pub fn kill_once(&self) {
        self.signal(Signal::KILL);
    }

    /// Kills until none is left.
    pub fn kill(&self) {
        let end = Instant::now() + TIMEOUT;
        while !self.signal(Signal::KILL).is_empty() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Signals all that are there now, and returns their numbers.
    fn signal(&self, signal: Signal) -> BTreeSet<i32> {
        let mut signalled = BTreeSet::new();
        if let Some(program) = self.program.as_ref().filter(|program| is_alive(program))
            && pidfd_send_signal(program, signal).is_ok()
        {
            signalled.insert(0);
        }
        for process in self.list() {
            let by_number =
                || Pid::from_raw(process).is_some_and(|process| kill_process(process, signal).is_ok());
            let sent = match sys::pidfd_of(process) {
                // The number may have been another's when it was opened.
                Ok(held) => {
                    self.contain(process)
                        && (pidfd_send_signal(&held, signal).is_ok() || is_alive(&held) && by_number())
                }
                // Before Linux 5.3 nothing can be held.
                Err(error) if sys::is_missing(&error) => by_number(),
                Err(_) => false,
            };
            if sent {
                signalled.insert(process);
            }
        }
        signalled
    }
}

fn is_alive(process: &OwnedFd) -> bool {
    !wait_for(process.as_fd(), PollFlags::POLLIN, PollTimeout::ZERO)
}

/// What the mounts are called of a container whose user namespace this process is in. Every process of the container sees one
/// of those that have this name.
pub fn own_mount_name() -> String {
    // Without procfs nobody could look for it.
    number_at("self", "user").map_or_else(|_| "mizzen".to_owned(), mount_name)
}

/// Whether a process that sees these mounts is in the container whose mounts are called so. Its root says nothing: another container may
/// have cloned that, with its name (`Namespaces::clone_root`).
fn are_of_container(mounts: &[MountLine], name: &str) -> bool {
    mounts.iter().any(|mount| mount.source == name && mount.place != Path::new("/"))
}

fn mount_name((_, inode): (u64, u64)) -> String {
    format!("mizzen-{inode}")
}

/// What tells a namespace from others, as long as it is there.
fn number(namespace: &Metadata) -> (u64, u64) {
    (namespace.dev(), namespace.ino())
}

fn number_at(process: &str, kind: &str) -> io::Result<(u64, u64)> {
    fs::metadata(format!("/proc/{process}/ns/{kind}")).map(|namespace| number(&namespace))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cloned_root_is_not_that_of_the_container_it_was_cloned_in() {
        let line =
            |place: &str, kind: &str, source: &str| format!("1 2 0:3 / {place} rw - {kind} {source} rw\n");
        let first = line("/", "overlay", "mizzen-1") + &line("/dev", "tmpfs", "mizzen-1");
        let second = line("/", "overlay", "mizzen-1") + &line("/dev", "tmpfs", "mizzen-2");
        for (mounts, of_first, of_second) in [(first, true, false), (second, false, true)] {
            let mounts = mountinfo::parse(mounts.as_bytes());
            assert_eq!(are_of_container(&mounts, "mizzen-1"), of_first);
            assert_eq!(are_of_container(&mounts, "mizzen-2"), of_second);
        }
    }
}
