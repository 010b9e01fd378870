//! What the tasks of a step leave for slurmstepd: a file in memory with one page for each thing that can be said.
//!
//! slurmstepd makes it and reads it through a description of its own, which no task has. Reading memory never waits,
//! whatever a user's process does with the file at that moment: with a socket or a pipe it could (a reader can hold the lock of
//! either for as long as it likes, by reading into memory that a FUSE file system backs). What is read is a user's text, and is
//! treated as one.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use crate::Failure;
use crate::failure::quote_up_to;

/// No text is longer.
const PAGE: usize = 4096;
/// The size of the file: the first task's process id, how the start went, what has failed, and what the file servers have done.
pub const SIZE: u64 = 4 * PAGE as u64;
const BUILDER_AT: u64 = 0;
const READY_AT: u64 = PAGE as u64;
const FAILURE_AT: u64 = 2 * PAGE as u64;
const WORK_AT: u64 = 3 * PAGE as u64;

/// Begin the pages: a page that begins with zero says nothing.
const READY: u8 = b'+';
const TOLD: u8 = b'-';
const UNTOLD: u8 = b'!';

/// Each byte may become four. Slurm's log keeps the last 8 KiB of a longer line, without what Slurm has put in front.
const LOGGED: usize = 1200;

/// Text of a user, fit for a log and a terminal.
fn quote(text: &[u8]) -> String {
    quote_up_to(text, LOGGED)
}

/// The file, through one of its descriptors.
#[derive(Debug)]
pub struct StepReport(File);

/// Why the step has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedStep {
    /// The reason, escaped.
    pub failure: Failure,
    /// Whether a task has told the user; if not, only slurmstepd can.
    pub told: bool,
}

impl StepReport {
    /// The file behind a descriptor.
    pub fn new(file: File) -> StepReport {
        StepReport(file)
    }

    /// slurmstepd: notes the process of the first task, before any task goes on.
    pub fn note_builder(&self, pid: i32) -> io::Result<()> {
        self.0.write_all_at(&pid.to_ne_bytes(), BUILDER_AT)
    }

    /// The process of the first task, if it has been noted.
    pub fn builder(&self) -> Option<i32> {
        let mut bytes = [0; 4];
        self.0.read_exact_at(&mut bytes, BUILDER_AT).ok()?;
        Some(i32::from_ne_bytes(bytes)).filter(|pid| *pid > 0)
    }

    /// A task: the container is there, and this is what is to be said of it.
    pub fn write_ready(&self, text: &str) -> io::Result<()> {
        self.write(READY_AT, READY, text)
    }

    /// What was said of a container that is there, escaped.
    pub fn ready(&self) -> Option<String> {
        self.read(READY_AT).map(|(_, text)| quote(&text))
    }

    /// A file server that ends: what it has done.
    pub fn add_work(&self, text: &str) -> io::Result<()> {
        let before = self.read(WORK_AT).map(|(_, text)| String::from_utf8_lossy(&text).into_owned());
        let text = before.map_or_else(|| text.to_owned(), |before| format!("{before}; {text}"));
        self.write(WORK_AT, READY, &text)
    }

    /// What the file servers have done, escaped.
    pub fn work(&self) -> Option<String> {
        self.read(WORK_AT).map(|(_, text)| quote(&text))
    }

    /// Says why the step has failed. The first reason stays: later ones follow from it.
    pub fn write_failure(&self, failure: &Failure, told: bool) -> io::Result<()> {
        if self.read(FAILURE_AT).is_some() {
            return Ok(());
        }
        self.write(FAILURE_AT, if told { TOLD } else { UNTOLD }, &failure.encode())
    }

    /// Why the step has failed.
    pub fn failure(&self) -> Option<FailedStep> {
        let (mark, text) = self.read(FAILURE_AT)?;
        Some(FailedStep { failure: Failure::decode(&text, LOGGED), told: mark != UNTOLD })
    }

    fn write(&self, at: u64, mark: u8, text: &str) -> io::Result<()> {
        let mut page = vec![0; PAGE];
        page[0] = mark;
        for (place, byte) in page[1..].iter_mut().zip(text.bytes()) {
            *place = byte;
        }
        self.0.write_all_at(&page, at)
    }

    fn read(&self, at: u64) -> Option<(u8, Vec<u8>)> {
        let mut page = vec![0; PAGE];
        self.0.read_exact_at(&mut page, at).ok()?;
        let text = page.split_off(1);
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        (page[0] != 0).then(|| (page[0], text[..end].to_vec()))
    }
}

impl AsFd for StepReport {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty() -> StepReport {
        let path = std::env::temp_dir().join(format!(
            "step-report-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        file.set_len(SIZE).unwrap();
        StepReport::new(file)
    }

    #[test]
    fn what_is_written_is_read() {
        let report = empty();
        assert_eq!((report.builder(), report.ready(), report.failure()), (None, None, None));
        report.note_builder(77).unwrap();
        report.write_ready("plan 1 ms").unwrap();
        report.add_work("a: 1 MB").unwrap();
        report.add_work("b: 2 MB").unwrap();
        assert_eq!(report.work().as_deref(), Some("a: 1 MB; b: 2 MB"));
        let failure = Failure::new("the file server has ended").hint("look at dmesg");
        report.write_failure(&failure, false).unwrap();
        report.write_failure(&Failure::new("later"), true).unwrap();
        assert_eq!(report.builder(), Some(77));
        assert_eq!(report.ready().as_deref(), Some("plan 1 ms"));
        assert_eq!(report.failure(), Some(FailedStep { failure, told: false }));
    }

    #[test]
    fn a_users_text_is_harmless() {
        let report = empty();
        report.write_ready("a\x1b\u{7}").unwrap();
        assert_eq!(report.ready().as_deref(), Some("a\\u{1b}\\u{7}"));
        report.write_failure(&Failure::new("x".repeat(9000)), true).unwrap();
        assert!(report.failure().unwrap().failure.message.len() < PAGE);
        report.0.write_all_at(&[0xff; SIZE as usize], 0).unwrap();
        assert!(report.failure().unwrap().told);
        assert!(report.ready().unwrap().len() < 5000, "more than Slurm writes in one line");
        report.0.set_len(1).unwrap();
        assert_eq!((report.builder(), report.ready(), report.failure()), (None, None, None));
    }
}
