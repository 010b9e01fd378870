//! Who imports an image now: of all processes that want it, on all machines that share the store, one.
//!
//! A lease is a file that its owner makes with O_EXCL and touches every few seconds: this is all that every network file system
//! can do (flock it cannot). The others watch it. It ends in one of these ways:
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
use std::time::{Duration, Instant};

use mizzen_core::Failure;
use mizzen_core::staging::FAILURE_LIMIT;
use rustix::fs::{OFlags, Timespec, Timestamps, UTIME_NOW, futimens};
use serde::{Deserialize, Serialize};

use super::owner::Owner;
use crate::interrupt::OnInterrupt;
use crate::output::{file_system_time, temporary_name, write_failure};

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
struct Record {
    owner: Owner,
    /// For whom it works: others of the same group have its failure, whenever they come.
    group: Option<String>,
    /// Why it did not work, as [`Failure::encode`] writes it.
    failure: Option<String>,
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
struct Seen {
    /// None if it cannot be read: what stands there may be anything.
    record: Option<Record>,
    /// Of the file: number, seconds, nanoseconds.
    changed: (u64, i64, i64),
}

/// Looks at a lease. To be opened is what makes NFS ask the server.
fn look(path: &Path) -> io::Result<Option<Seen>> {
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
    fn claim(path: &Path, group: Option<&str>, timing: &Timing) -> Result<Option<Lease>, Failure> {
        let failed = |error| write_failure(path, "cannot make the lease", error);
        let file = match File::options().write(true).create_new(true).mode(0o600).open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let record = Record { owner: Owner::own(), group: group.map(str::to_owned), failure: None };
        let lease =
            write(&file, &record).map_err(failed).and_then(|()| Lease::hold(path, record, file, timing));
        if lease.is_err() {
            let _ = fs::remove_file(path);
        }
        lease.map(Some)
    }

    /// Takes a lease that its owner has left as it was `seen`. None if that, or anybody else, was faster.
    fn take_over(
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

/// What came of waiting for a lease.
pub enum Acquired {
    /// This process has it.
    Owned(Lease),
    /// Who had it has ended well, or was interrupted.
    Released,
    /// Who had it has failed, and so have those who waited.
    Failed(Failure),
}

/// Somebody who wants a lease.
pub struct Candidate<'a> {
    /// The lease's file.
    pub path: &'a Path,
    /// For whom it works.
    pub group: Option<&'a str>,
    /// How leases are watched.
    pub timing: Timing,
    /// When waiting ends.
    pub deadline: Instant,
}

impl Candidate<'_> {
    /// Waits for the lease; `waiting` is called again and again, with who has it.
    pub fn acquire(&self, mut waiting: impl FnMut(&str)) -> Result<Acquired, Failure> {
        let mut watched: Option<(Seen, Instant)> = None;
        let begin = Instant::now();
        loop {
            let seen =
                look(self.path).map_err(|error| write_failure(self.path, "cannot read the lease", error))?;
            let mut holder = "another process".to_owned();
            if let Some(seen) = seen {
                let before = watched.take();
                if let Some(failure) = self.shared_failure(&seen, before.as_ref().map(|(before, _)| before)) {
                    return Ok(Acquired::Failed(failure));
                }
                let first = before.is_none();
                let unchanged = before.filter(|(before, _)| *before == seen);
                let since = unchanged.map_or_else(Instant::now, |(_, since)| since);
                if self.is_abandoned(&seen, since, first)
                    && let Some(lease) = Lease::take_over(self.path, &seen, self.group, &self.timing)?
                {
                    return Ok(Acquired::Owned(lease));
                }
                holder = describe(&seen);
                watched = Some((seen, since));
            } else if watched.is_some() {
                return Ok(Acquired::Released);
            } else if let Some(lease) = Lease::claim(self.path, self.group, &self.timing)? {
                return Ok(Acquired::Owned(lease));
            }
            if Instant::now() >= self.deadline {
                return Err(self.out_of_time(&holder, begin.elapsed()));
            }
            waiting(&holder);
            // A thousand of them must not be a burden for the file server.
            let slower = 1 + (begin.elapsed().as_secs() / 10).min(6) as u32;
            std::thread::sleep(self.timing.poll * slower);
        }
    }

    /// The failure in a lease, if it is this candidate's, too: it has watched that owner work, or is of the same group and not
    /// much later.
    fn shared_failure(&self, seen: &Seen, before: Option<&Seen>) -> Option<Failure> {
        let record = seen.record.as_ref()?;
        let failure = record.failure.as_ref()?;
        let owner_before = before.and_then(|before| before.record.as_ref()).map(|record| &record.owner);
        let same_group = self.group.is_some() && record.group.as_deref() == self.group;
        let shared = owner_before == Some(&record.owner) || (same_group && !self.is_old());
        shared.then(|| Failure::decode(failure.as_bytes(), FAILURE_LIMIT))
    }

    /// Whether nobody holds it any more. The file system's clock is asked at the first look only: it costs a file.
    fn is_abandoned(&self, seen: &Seen, since: Instant, first: bool) -> bool {
        let over = |record: &Record| record.failure.is_some() || record.owner.is_dead();
        if seen.record.as_ref().is_some_and(over) || since.elapsed() >= self.timing.silent {
            return true;
        }
        first && self.is_old()
    }

    /// Whether it has not changed for long, by the file system's clock.
    fn is_old(&self) -> bool {
        let modified = fs::symlink_metadata(self.path).and_then(|found| found.modified());
        let now = file_system_time(self.path.parent().unwrap_or(Path::new(".")));
        let age = now.ok().zip(modified.ok()).and_then(|(now, modified)| now.duration_since(modified).ok());
        age.is_some_and(|age| age >= self.timing.old)
    }

    fn out_of_time(&self, holder: &str, waited: Duration) -> Failure {
        let minutes = waited.as_secs() / 60;
        Failure::new(format!("{holder} is still importing it after {minutes} minutes")).hint(format!(
            "look what it does, or end it: another one takes over; its lease is {}",
            crate::shown(self.path)
        ))
    }
}

fn describe(seen: &Seen) -> String {
    match &seen.record {
        Some(record) => {
            let host = mizzen_core::failure::quote(record.owner.host.as_bytes());
            format!("process {} on {host}", record.owner.pid)
        }
        None => "another process".to_owned(),
    }
}
