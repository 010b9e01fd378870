//! How the user is told that a container has lost its files, after its maker has become the program.
//!
//! Run by the watchers of the file servers, as the user.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use mizzen_core::Failure;
use mizzen_core::settings::Verbosity;
use nix::poll::{PollFlags, PollTimeout};
use rustix::fs::{Mode, OFlags, fstat, open};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use super::processes::ContainerProcesses;
use super::watcher::wait_for;
use crate::report::{message, note_message};
use crate::sys;

/// A terminal may be stopped, and a pipe full. In milliseconds.
const WRITABLE: u16 = 2000;

/// How the user is told.
pub trait Reporter {
    /// What it needs open for that.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    /// Gets ready to tell, at once: the program may end any moment, and its streams with it.
    fn prepare(&self, container: &ContainerProcesses) -> Box<dyn FnOnce(&Failure) + '_>;

    /// Tells the user something that is no failure.
    fn note(&self, container: &ContainerProcesses, text: &str);

    /// What a file server has done, when it ends.
    fn tell_work(&self, text: &str);

    /// Ends what the container is a part of, on other nodes too. Before the container itself is ended: with it may end
    /// everything that is left here.
    fn cancel_step(&self) {}
}

/// Tells the user through the standard error of the program.
pub struct StderrReporter {
    /// The program, or what will become it. If it has ended, another process of the container will do.
    program: u32,
    /// Where its standard error is, without having it open: whoever waits for the end of a pipe does not wait for this. A program
    /// that lacks a page of its own is gone before anybody can take its stream.
    place: Option<OwnedFd>,
    /// Where a user who wants to know more is told what the file servers have done. Whoever waits for the end of this stream
    /// waits for them as well: a moment.
    verbose: Option<File>,
}

impl StderrReporter {
    /// For the program that this process becomes.
    pub fn for_this_process() -> StderrReporter {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let place = open("/proc/self/fd/2", flags, Mode::empty()).ok();
        StderrReporter { program: std::process::id(), place, verbose: None }
    }

    /// Tells also what the file servers have done, if the user wants to know that.
    pub fn with_verbosity(self, verbosity: Verbosity) -> StderrReporter {
        StderrReporter { verbose: verbose_stream(verbosity), ..self }
    }

    fn stream_of(&self, container: &ContainerProcesses) -> Option<File> {
        let program = i32::try_from(self.program).ok();
        // It may be another process with the same number by now.
        let stream = program.filter(|program| container.contain(*program)).and_then(standard_error);
        let stream = stream.or_else(|| container.list().into_iter().find_map(standard_error));
        stream.or_else(|| self.opened_anew())
    }

    /// The stream that is at this place.
    fn opened_anew(&self) -> Option<File> {
        let path = format!("/proc/self/fd/{}", self.place.as_ref()?.as_raw_fd());
        appending().open(path).ok()
    }
}

impl Reporter for StderrReporter {
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.place.iter().map(AsFd::as_fd).chain(self.verbose.iter().map(AsFd::as_fd)).collect()
    }

    fn note(&self, container: &ContainerProcesses, text: &str) {
        if let Some(stream) = self.stream_of(container) {
            tell_note(&stream, text);
        }
    }

    fn tell_work(&self, text: &str) {
        if let Some(stream) = &self.verbose {
            tell_note(stream, text);
        }
    }

    fn prepare(&self, container: &ContainerProcesses) -> Box<dyn FnOnce(&Failure) + '_> {
        let stream = self.stream_of(container);
        Box::new(move |failure| {
            // Nobody is left to be told when this fails.
            let _ = stream.is_some_and(|stream| tell(&stream, failure));
        })
    }
}

/// What tells a stream from others.
pub fn identity_of(stream: impl AsFd) -> Option<(u64, u64)> {
    fstat(stream).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

/// This stream, if it is still the standard error of a process of a container.
pub fn standard_error_in(container: &ContainerProcesses, identity: (u64, u64)) -> Option<File> {
    let streams = container.list().into_iter().filter_map(standard_error);
    streams.into_iter().find(|stream| identity_of(stream) == Some(identity))
}

/// Writes a failure there; false if that is not possible.
pub fn tell(stream: &File, failure: &Failure) -> bool {
    write(stream, &message(failure))
}

/// Writes something there that is no failure.
pub fn tell_note(stream: &File, text: &str) {
    let _ = write(stream, &note_message(text));
}

fn write(mut stream: &File, text: &str) -> bool {
    wait_for(stream.as_fd(), PollFlags::POLLOUT, PollTimeout::from(WRITABLE))
        && stream.write_all(text.as_bytes()).is_ok()
}

/// Standard error as it is now, for a user who wants to know more.
pub fn verbose_stream(verbosity: Verbosity) -> Option<File> {
    let wanted = verbosity != Verbosity::Quiet;
    wanted.then(|| std::io::stderr().as_fd().try_clone_to_owned().ok().map(File::from)).flatten()
}

/// The standard error of a process: the same open file, so that what is written there does not write over the rest. Of a
/// process whose first thread has ended, another has it. Where the kernel does not give it (before Linux 5.6), opened anew.
fn standard_error(process: i32) -> Option<File> {
    let taken = |pidfd: OwnedFd| pidfd_getfd(pidfd, 2, PidfdGetfdFlags::empty()).ok().map(File::from);
    if let Some(stream) = sys::pidfd_of(process).ok().and_then(taken) {
        return Some(stream);
    }
    let options = appending();
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    threads.into_iter().find_map(|thread| {
        let number = thread.file_name().to_str()?.parse().ok()?;
        let stream = sys::pidfd_of_thread(number).ok().and_then(taken);
        stream.or_else(|| options.open(thread.path().join("fd/2")).ok())
    })
}

/// How a stream is opened that is somebody else's: nothing is written over, nothing waited for.
fn appending() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.append(true).custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK);
    options
}
