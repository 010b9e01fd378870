//! What ends a named container ends every step that is in it, and each of these is to be told: in its own output, in Slurm's log,
//! and on its other nodes. The watcher that has seen it happen can only reach its own step. So it writes the failure down, where
//! the watchers of the other steps find it; and it kills nobody before they have told.
//!
//! Each watcher that may have to tell holds a shared lock on the file. It ends with the watcher, whatever ends that.
//!
//! Runs as the user, in watchers; and in file servers that are about to take their turn.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use mizzen_core::Failure;
use rustix::fs::{FlockOperation, flock};

/// For the watchers of the other steps to find the failure and to tell it.
const TELLING: Duration = Duration::from_secs(4);
/// No failure is longer.
const LIMIT: usize = 8192;
/// Behind the failure: it is complete.
const END: u8 = 0;

/// Where the failure is written that ends a container.
pub struct SharedEnd(File);

impl SharedEnd {
    /// Opens it for a watcher that may have to tell.
    pub fn open(path: &Path) -> io::Result<SharedEnd> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
        // It fails where one is just being ended.
        let _ = flock(&file, FlockOperation::NonBlockingLockShared);
        Ok(SharedEnd(file))
    }

    /// The failure that has ended the container. The file is the user's, who may write there what they like.
    pub fn failure(&self) -> Option<Failure> {
        let mut text = [0; LIMIT];
        let length = self.0.read_at(&mut text, 0).ok()?;
        let end = text[..length].iter().position(|byte| *byte == END)?;
        Some(Failure::decode(&text[..end], LIMIT))
    }

    /// Writes down why the container ends, unless somebody else has.
    pub fn publish(&self, failure: &Failure) {
        if self.failure().is_none() {
            let mut text = failure.encode().into_bytes();
            text.truncate(LIMIT - 1);
            text.push(END);
            // Where the disk is full, the others find that their files are served no more.
            let _ = self.0.write_all_at(&text, 0);
        }
    }

    /// This watcher has told its step.
    pub fn told(&self) {
        let _ = flock(&self.0, FlockOperation::Unlock);
    }

    /// Waits until the watchers of all steps have told, within reason.
    pub fn wait_for_others(&self) {
        let end = Instant::now() + TELLING;
        self.told();
        while flock(&self.0, FlockOperation::NonBlockingLockExclusive).is_err() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
        self.told();
    }
}

impl AsFd for SharedEnd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::testing::Scratch;

    #[test]
    fn nobody_is_killed_before_all_have_told() {
        let scratch = Scratch::new();
        let path = scratch.path().join("end");
        let (first, second) = (SharedEnd::open(&path).unwrap(), SharedEnd::open(&path).unwrap());
        assert!(second.failure().is_none());
        let failure = Failure::new("/i.sqsh: cannot be read").hint("copy it again");
        first.publish(&failure);
        second.publish(&Failure::new("another"));
        let found = second.failure().unwrap();
        assert_eq!((found.message, found.hint), (failure.message, failure.hint));
        let begin = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(300));
                second.told();
            });
            first.wait_for_others();
        });
        assert!(begin.elapsed() >= Duration::from_millis(300) && begin.elapsed() < TELLING);
        // What was written only in part is nothing yet.
        std::fs::write(&path, "125\n").unwrap();
        assert!(second.failure().is_none());
    }
}
