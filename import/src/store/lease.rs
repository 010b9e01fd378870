//! Who imports an image now: of all processes that want it, on all machines that share the store, one.
//!
//! A lease is a file that its owner makes, by a link or with O_EXCL, so that one succeeds, and touches every few seconds: this is
//! what every network file system can do (flock is not). The others watch it. It ends in one of these ways:
//!
//!     removed                  the import has succeeded, or was interrupted: whoever is first goes on
//!     a failure is in it       those who watched it have failed, too; to later ones it is a lease that nobody holds
//!     nobody touches it        its owner is dead, or stopped: one of the others takes over
//!
//! No clock is compared with another machine's: a lease is abandoned if the watcher has not seen it change for a while, by the
//! watcher's own clock; or if the file system's clock says that it has not changed for much longer than clocks differ. On
//! the owner's own machine it is known at once whether the process lives.
//!
//! If an owner that was stopped goes on after all, two import the same image, and the second one replaces the first one's file
//! by the same bytes.
//!
//! Run by: the user, in the importer.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use mizzen_core::Failure;
use rustix::fs::{OFlags, Timespec, Timestamps, UTIME_NOW, futimens};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tracing::debug;

use super::owner::Owner;
use crate::interrupt::OnInterrupt;
use crate::output::{Draft, file_system_time, lacks_links, temporary_name, write_failure};

/// A longer lease is none of ours.
const LIMIT: u64 = 64 << 10;

/// How leases are renewed and watched.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How often the owner touches it.
    pub renew: Duration,
    /// How often the others look.
    pub poll: Duration,
    /// It is abandoned if it has not changed for so long before a watcher's eyes.
    pub silent: Duration,
    /// It is abandoned if it has not changed for so long by the file system's clock. Where clients set the times of files (as
    /// with Lustre) that may be another machine's clock; but Slurm's nodes differ by less than five minutes, or munge
    /// would not let them talk.
    pub old: Duration,
}

impl Default for Timing {
    fn default() -> Timing {
        Timing {
            renew: Duration::from_secs(5),
            poll: Duration::from_millis(300),
            silent: Duration::from_secs(30),
            old: Duration::from_secs(600),
        }
    }
}

/// What is in a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub owner: Owner,
    /// For whom it works: others of the same group have its failure, whenever they come.
    pub group: Option<String>,
    /// Why it did not work, as [`Failure::encode`] writes it.
    pub failure: Option<String>,
}

/// A lease that this process holds.
pub struct Lease {
    path: PathBuf,
    record: Record,
    /// Its end stops the thread that renews it.
    renewer: Option<(Sender<()>, JoinHandle<()>)>,
    _on_interrupt: OnInterrupt,
}

/// What somebody else's lease looks like at a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    /// None if it cannot be read: what stands there may be anything.
    pub record: Option<Record>,
    /// Of the file: number, seconds, nanoseconds.
    changed: (u64, i64, i64),
}

/// Looks at a lease. To be opened is what makes NFS ask the server.
pub(super) fn look(path: &Path) -> io::Result<Option<Seen>> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let opened = File::options().read(true).custom_flags(flags.bits() as i32).open(path);
    let (found, text) = match opened {
        Ok(file) => {
            let mut text = Vec::new();
            // What is no file cannot be read, and says nothing.
            let _ = (&file).take(LIMIT).read_to_end(&mut text);
            (file.metadata(), text)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        // A link, or not for us.
        Err(_) => (fs::symlink_metadata(path), Vec::new()),
    };
    match found {
        Ok(found) => Ok(Some(Seen {
            record: serde_json::from_slice(&text).ok(),
            changed: (found.ino(), found.mtime(), found.mtime_nsec()),
        })),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_held_by(path: &Path, owner: &Owner) -> bool {
    let seen = look(path).ok().flatten();
    seen.and_then(|seen| seen.record).is_some_and(|record| record.owner == *owner)
}

impl Lease {
    /// Takes a lease that nobody has. None if somebody has it.
    pub(super) fn claim(path: &Path, group: Option<&str>, timing: &Timing) -> Result<Option<Lease>, Failure> {
        let record = Record { owner: Owner::own(), group: group.map(str::to_owned), failure: None };
        let made = match make_linked(path, &record)? {
            Made::NoLinks => make_exclusive(path, &record)?,
            made => made,
        };
        let Made::New(file) = made else { return Ok(None) };
        let owner = record.owner.clone();
        let lease = Lease::hold(path, record, file, timing);
        if lease.is_err() {
            remove(path, &owner);
        }
        lease.map(Some)
    }

    /// Takes a lease that its owner has left as it was `seen`. None if that, or anybody else, was faster.
    pub(super) fn take_over(
        path: &Path,
        seen: &Seen,
        group: Option<&str>,
        timing: &Timing,
    ) -> Result<Option<Lease>, Failure> {
        let failed = |error| write_failure(path, "cannot take the lease over", error);
        let Some(_guard) = Guard::claim(path, timing).map_err(failed)? else { return Ok(None) };
        if look(path).map_err(failed)?.as_ref() != Some(seen) {
            return Ok(None);
        }
        debug!(?path, ?seen, "a lease that nobody holds is taken over");
        let record = Record { owner: Owner::own(), group: group.map(str::to_owned), failure: None };
        let file = replace(path, &record).map_err(failed)?;
        Lease::hold(path, record, file, timing).map(Some)
    }

    /// Begins to renew it.
    fn hold(path: &Path, record: Record, file: File, timing: &Timing) -> Result<Lease, Failure> {
        let (stop, stopped) = mpsc::channel();
        let (own, owner, renew) = (path.to_owned(), record.owner.clone(), timing.renew);
        let work = move || {
            while stopped.recv_timeout(renew) == Err(RecvTimeoutError::Timeout) {
                // Who was stopped for long may have lost it.
                if !is_held_by(&own, &owner) {
                    debug!(path = ?own, "somebody has taken the lease over");
                    return;
                }
                touch(&file);
            }
        };
        let thread = std::thread::Builder::new().name("lease".to_owned()).spawn(work);
        let thread = thread.map_err(|error| Failure::caused_by("cannot start a thread", error))?;
        let (own, owner) = (path.to_owned(), record.owner.clone());
        let _on_interrupt = OnInterrupt::new(move || remove(&own, &owner));
        Ok(Lease { path: path.to_owned(), record, renewer: Some((stop, thread)), _on_interrupt })
    }

    /// Tells those who watch it why it did not work.
    pub fn fail(mut self, failure: &Failure) {
        self.stop();
        self.record.failure = Some(failure.encode());
        // Who does not learn it takes over, and finds out.
        if is_held_by(&self.path, &self.record.owner) && replace(&self.path, &self.record).is_ok() {
            self.path = PathBuf::new();
        }
    }

    fn stop(&mut self) {
        if let Some((stop, thread)) = self.renewer.take() {
            drop(stop);
            let _ = thread.join();
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.stop();
        if !self.path.as_os_str().is_empty() {
            remove(&self.path, &self.record.owner);
        }
    }
}

/// What came of trying to make a lease.
enum Made {
    /// It is this process's.
    New(File),
    /// Somebody has it.
    Taken,
    /// The file system has no links.
    NoLinks,
}

/// Makes a lease that is whole from the beginning: who is killed leaves one that tells whose it was, or none.
fn make_linked(path: &Path, record: &Record) -> Result<Made, Failure> {
    let failed = |error: io::Error| write_failure(path, "cannot make the lease", error);
    let draft = Draft::create_in(path.parent().unwrap_or(Path::new(".")))?;
    write(draft.file(), record).map_err(failed)?;
    match draft.publish_exclusively(path.file_name().unwrap_or_default()) {
        Ok(file) => Ok(Made::New(file)),
        Err(Errno::EXIST) => Ok(Made::Taken),
        Err(errno) if lacks_links(errno) => Ok(Made::NoLinks),
        Err(errno) => Err(failed(errno.into())),
    }
}

/// The same without links: for a moment it is empty.
fn make_exclusive(path: &Path, record: &Record) -> Result<Made, Failure> {
    let failed = |error: io::Error| write_failure(path, "cannot make the lease", error);
    let file = match File::options().write(true).create_new(true).mode(0o600).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(Made::Taken),
        Err(error) => return Err(failed(error)),
    };
    if let Err(error) = write(&file, record) {
        let _ = fs::remove_file(path);
        return Err(failed(error));
    }
    Ok(Made::New(file))
}

/// Removes a lease whose owner is certainly gone, or has failed. To be called when the image is there.
pub fn remove_dead(path: &Path) {
    let record = look(path).ok().flatten().and_then(|seen| seen.record);
    if let Some(record) = record
        && (record.failure.is_some() || record.owner.is_dead())
    {
        remove(path, &record.owner);
    }
}

/// Removes a lease, if it still is this owner's.
fn remove(path: &Path, owner: &Owner) {
    if is_held_by(path, owner) {
        let _ = fs::remove_file(path);
    }
}

fn touch(file: &File) {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    let _ = futimens(file, &Timestamps { last_access: now, last_modification: now });
}

fn write(mut file: &File, record: &Record) -> io::Result<()> {
    file.write_all(&serde_json::to_vec(record)?)?;
    // Network file systems tell only now that there is no room.
    file.sync_all()
}

/// Puts another lease in the place of one.
fn replace(path: &Path, record: &Record) -> io::Result<File> {
    let temporary = path.with_file_name(temporary_name("lease"));
    let file = File::options().write(true).create_new(true).mode(0o600).open(&temporary)?;
    let done = write(&file, record).and_then(|()| fs::rename(&temporary, path));
    if done.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    done.map(|()| file)
}

/// The right to take a lease over, which one process has for a moment: two would take it from each other.
struct Guard(PathBuf);

impl Guard {
    /// None if somebody has it.
    fn claim(lease: &Path, timing: &Timing) -> io::Result<Option<Guard>> {
        let mut path = lease.as_os_str().to_owned();
        path.push(".takeover");
        let path = PathBuf::from(path);
        match File::options().write(true).create_new(true).mode(0o600).open(&path) {
            Ok(_) => Ok(Some(Guard(path))),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                // Killed in that moment.
                let modified = fs::symlink_metadata(&path).and_then(|found| found.modified());
                let now = file_system_time(lease.parent().unwrap_or(Path::new(".")));
                if let (Ok(modified), Ok(now)) = (modified, now)
                    && now.duration_since(modified).is_ok_and(|age| age > timing.silent)
                {
                    fs::remove_file(&path)?;
                }
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::testing::Scratch;
    use std::time::Instant;

    /// As on file systems that have nothing but O_EXCL.
    #[test]
    fn one_of_many_makes_it_with_and_without_links() {
        for make in [make_linked, make_exclusive] {
            let scratch = Scratch::new();
            let path = scratch.path().join("lease");
            let record = || Record { owner: Owner::own(), group: None, failure: None };
            let try_once = || matches!(make(&path, &record()).unwrap(), Made::New(_));
            let made = std::thread::scope(|scope| {
                let all: Vec<_> = (0..16).map(|_| scope.spawn(try_once)).collect();
                all.into_iter().map(|one| one.join().unwrap()).filter(|made| *made).count()
            });
            assert_eq!(made, 1);
            assert_eq!(scratch.names(), ["lease"]);
            assert!(look(&path).unwrap().unwrap().record.is_some());
            fs::remove_file(&path).unwrap();
            assert!(try_once());
        }
    }

    #[test]
    fn a_lease_is_renewed_and_removed_by_its_owner_alone() {
        let scratch = Scratch::new();
        let path = scratch.path().join("lease");
        let timing = Timing { renew: Duration::from_millis(20), ..Timing::default() };
        let lease = Lease::claim(&path, None, &timing).unwrap().unwrap();
        assert!(Lease::claim(&path, None, &timing).unwrap().is_none());
        let first = look(&path).unwrap().unwrap();
        let begin = Instant::now();
        while look(&path).unwrap().unwrap().changed == first.changed {
            assert!(begin.elapsed() < Duration::from_secs(20), "nobody touches it");
        }
        // Somebody takes it over.
        let other = Record { owner: Owner::own(), group: None, failure: None };
        replace(&path, &other).unwrap();
        drop(lease);
        assert_eq!(look(&path).unwrap().unwrap().record, Some(other.clone()), "it is not its own any more");
        remove_dead(&path);
        assert!(path.exists(), "its owner lives");
        replace(&path, &Record { failure: Some("125".to_owned()), ..other }).unwrap();
        remove_dead(&path);
        assert!(!path.exists() && scratch.names().is_empty());
    }
}
