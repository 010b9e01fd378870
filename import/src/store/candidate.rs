//! Who waits for a lease: watches its owner, gets its failure, or takes over.
//!
//! Run by: the user, in the importer.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use mizzen_core::Failure;
use mizzen_core::staging::FAILURE_LIMIT;

use super::lease::{Lease, Record, Seen, Timing, look};
use crate::output::{file_system_time, write_failure};

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
