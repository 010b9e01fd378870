//! Brings chunks of an image from its original into the copy in the making, for those who wait for them and for the background.
//! Runs as the user on the host, in the copier process.
//!
//! A chunk is read once, whoever asks: one thread of one process has its lock, and the others wait until it is marked. That
//! wait has an end, because a process that is stopped keeps its locks; who has waited too long reads the original itself.
//!
//! What was read is kept only if the original is still the file that was opened: so a copy never has parts of two.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{Advice, AtFlags, Stat, StatxFlags, fadvise, fstat, statx};
use rustix::io::Errno;

use super::cache::Cache;
use super::evict::{self, Limits};
use super::partial::{CHUNK, Partial, Void};
use super::source::FileIdentity;
use crate::trace::OrDebug;

/// As many chunks are read at once.
const AT_ONCE: u64 = 8;
/// Nobody waits longer for a chunk that another process has begun to fetch: that may be stopped, or get no processor.
const PATIENCE: Duration = Duration::from_millis(300);
/// How often those who wait look at what other processes have marked.
const LOOK: Duration = Duration::from_millis(2);
/// As many readers that go forward are told apart.
const STREAMS: usize = 8;

/// Why no more chunks are fetched, for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// The original is not what it was: it was replaced, or written to.
    Changed,
    /// Nothing of the copy can be used.
    Void(Void),
    /// The copy cannot be written.
    Unwritable(i32),
}

/// What came of a demand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetched {
    /// The copy has the chunks.
    Kept,
    /// The copy does not get them, for this reason if there is one: the original has them.
    Unkept(i32),
    /// The original is not what it was.
    Changed,
    /// It cannot be read.
    Unreadable(i32),
}

/// What fetches.
pub struct Fetcher<'a> {
    pub partial: Partial,
    pub original: File,
    pub identity: FileIdentity,
    /// The chunks that threads of this process fetch now.
    busy: Mutex<HashSet<u64>>,
    freed: Condvar,
    stopped: OnceLock<Stopped>,
    /// The copy, if another process has made it of something else than this one in the making.
    copy: OnceLock<File>,
    /// Where the last demands ended.
    streams: Mutex<Vec<Stream>>,
    cache: &'a Cache,
    limits: &'a Limits,
    /// Whether room was made because the disk was full.
    has_made_room: Mutex<bool>,
}

/// Somebody who reads forward.
struct Stream {
    end: u64,
    /// As many chunks are fetched for them at once.
    window: u64,
}

impl<'a> Fetcher<'a> {
    /// `partial` must have descriptors that no other process has.
    pub fn new(
        partial: Partial,
        original: File,
        identity: FileIdentity,
        cache: &'a Cache,
        limits: &'a Limits,
    ) -> Fetcher<'a> {
        // Whole chunks are read, in any order: what the kernel would read beside them would be read twice.
        let _ = fadvise(&original, 0, None, Advice::Random);
        Fetcher {
            partial,
            original,
            identity,
            busy: Mutex::default(),
            freed: Condvar::new(),
            stopped: OnceLock::new(),
            copy: OnceLock::new(),
            streams: Mutex::default(),
            cache,
            limits,
            has_made_room: Mutex::default(),
        }
    }

    /// Why nothing is fetched any more. Another process may have found that out.
    pub fn stopped(&self) -> Option<Stopped> {
        self.partial.void().map(Stopped::Void).or_else(|| self.stopped.get().copied())
    }

    /// Whether the original is the file that was opened, under its name.
    pub fn is_unchanged(&self) -> bool {
        current(&self.original)
            .is_ok_and(|now| FileIdentity { mount: self.identity.mount.clone(), ..now } == self.identity)
    }

    /// From now on chunks are fetched from a copy of the original, which nobody changes.
    pub fn fetch_from(&self, copy: File) {
        let _ = self.copy.set(copy);
    }

    /// Whether they are.
    pub fn has_copy(&self) -> bool {
        self.copy.get().is_some()
    }

    /// Nothing is fetched any more.
    pub fn stop(&self, why: Stopped) {
        let _ = self.stopped.set(why);
    }

    /// Brings chunks that somebody waits for.
    pub fn demand(&self, wanted: Range<u64>) -> Fetched {
        self.partial.note_demand();
        let begin = Instant::now();
        let mut at = wanted.start;
        let mut end = self.window(&wanted);
        while at < wanted.end {
            let stopped = self.stopped();
            if let Some(Stopped::Void(_)) = stopped {
                // The record tells why.
                return Fetched::Unkept(0);
            }
            if self.partial.has(at) {
                at += 1;
                continue;
            }
            match stopped {
                Some(Stopped::Changed) => return Fetched::Changed,
                Some(Stopped::Unwritable(errno)) => return Fetched::Unkept(errno),
                Some(Stopped::Void(_)) | None => {}
            }
            match self.fetch(at..end) {
                Ok(Some(fetched)) => at = fetched.end,
                // Another one fetches it.
                Ok(None) if begin.elapsed() > PATIENCE => return Fetched::Unkept(0),
                Ok(None) => self.wait(),
                Err(error) if self.stopped().is_none() => {
                    return Fetched::Unreadable(error.raw_os_error().unwrap_or(libc::EIO));
                }
                // Why it has stopped is told.
                Err(_) => end = wanted.end,
            }
        }
        Fetched::Kept
    }

    /// Fetches as many of the first chunks as are missing and nobody else fetches. None if the first is not to be had.
    pub fn fetch(&self, wanted: Range<u64>) -> io::Result<Option<Range<u64>>> {
        let claim = self.claim(wanted);
        if claim.chunks.is_empty() {
            return Ok(None);
        }
        self.fill(&claim.chunks)?;
        Ok(Some(claim.chunks.clone()))
    }

    fn claim(&self, wanted: Range<u64>) -> Claim<'_> {
        let mut busy = self.busy();
        let mut end = wanted.start;
        while end < wanted.end.min(wanted.start + AT_ONCE) {
            if busy.contains(&end) || self.partial.has(end) || !self.partial.try_lock(end) {
                break;
            }
            // Its last holder may have fetched it before it gave the lock back.
            if self.partial.has(end) {
                self.partial.unlock(end);
                break;
            }
            busy.insert(end);
            end += 1;
        }
        Claim { fetcher: self, chunks: wanted.start..end }
    }

    fn fill(&self, chunks: &Range<u64>) -> io::Result<()> {
        let begin = chunks.start * CHUNK;
        let length = (chunks.end * CHUNK).min(self.partial.size) - begin;
        let mut content = vec![0; length as usize];
        let is_in_copy = |copy: &File| copy.read_exact_at(&mut content, begin).is_ok();
        if !self.copy.get().is_some_and(is_in_copy) {
            self.read_original(&mut content, begin)?;
        }
        self.keep(chunks.clone(), &content).inspect_err(|error| {
            self.stop(Stopped::Unwritable(error.raw_os_error().unwrap_or(libc::EIO)));
        })
    }

    fn read_original(&self, content: &mut [u8], begin: u64) -> io::Result<()> {
        let read = self.original.read_exact_at(content, begin);
        // Looked at after reading: what was read of a file that is still the same is of that file.
        match compare(&self.original, &self.identity) {
            Comparison::Same => {}
            Comparison::Touched => {
                self.partial.make_void(Void::Touched);
                return Err(Errno::STALE.into());
            }
            Comparison::Changed => {
                self.stop(Stopped::Changed);
                return Err(Errno::STALE.into());
            }
        }
        read?;
        let length = std::num::NonZeroU64::new(content.len() as u64);
        let _ = fadvise(&self.original, begin, length, Advice::DontNeed);
        Ok(())
    }

    /// Writes chunks. Room was made for all of them; but others fill disks too, and quotas are found out by writing. Then copies that
    /// nobody uses go, once.
    fn keep(&self, chunks: Range<u64>, content: &[u8]) -> io::Result<()> {
        let kept = self.partial.keep(chunks.clone(), content);
        let is_full =
            |error: &io::Error| matches!(Errno::from_io_error(error), Some(Errno::NOSPC | Errno::DQUOT));
        if !kept.as_ref().is_err_and(is_full) {
            return kept;
        }
        let mut has_made_room = self.has_made_room.lock().unwrap_or_else(PoisonError::into_inner);
        if !*has_made_room {
            *has_made_room = true;
            let missing = self.partial.size.saturating_sub(self.partial.present());
            evict::reserve(self.cache, 0, missing, self.limits).or_debug("there is no room for all of it");
        }
        drop(has_made_room);
        self.partial.keep(chunks, content)
    }

    /// Up to where chunks are fetched for a demand: further than it goes for those who read forward.
    fn window(&self, wanted: &Range<u64>) -> u64 {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let known = streams.iter().position(|stream| (stream.end..=stream.end + 1).contains(&wanted.start));
        let window = match known {
            Some(place) => (streams.remove(place).window * 2).min(AT_ONCE),
            None => 1,
        };
        let end = wanted.end.max(wanted.start + window).min(super::partial::chunks(self.partial.size));
        if streams.len() >= STREAMS {
            streams.remove(0);
        }
        streams.push(Stream { end, window });
        end
    }

    /// Where somebody goes on to read, as far as one can guess.
    pub fn ahead_of_demand(&self) -> Option<u64> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner).last().map(|stream| stream.end)
    }

    fn wait(&self) {
        let busy = self.busy();
        let _ = self.freed.wait_timeout(busy, LOOK);
    }

    fn busy(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to fetch chunks, as long as it lives.
struct Claim<'a> {
    fetcher: &'a Fetcher<'a>,
    chunks: Range<u64>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut busy = self.fetcher.busy();
        for chunk in self.chunks.clone() {
            self.fetcher.partial.unlock(chunk);
            busy.remove(&chunk);
        }
        drop(busy);
        self.fetcher.freed.notify_all();
    }
}

/// What has become of an open file since it was opened first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// What is read from it is what it had.
    Same,
    /// Its time of change is another one: it was moved, linked, or given another mode or owner. Or it was written to, and got its
    /// time of modification back.
    Touched,
    /// It was written to, or is gone.
    Changed,
}

/// Compares an open file with what it was. One that has lost its last name has another time of change since then, and the same
/// content. (An error, such as ESTALE, means that it is gone.)
pub fn compare(file: &File, identity: &FileIdentity) -> Comparison {
    let Ok(stat) = stat_anew(file) else { return Comparison::Changed };
    let now = FileIdentity { mount: identity.mount.clone(), ..FileIdentity::from_stat(&stat) };
    if now == *identity {
        return Comparison::Same;
    }
    match (FileIdentity { ctime: identity.ctime, ..now } == *identity, stat.st_nlink) {
        (true, 0) => Comparison::Same,
        (true, _) => Comparison::Touched,
        (false, _) => Comparison::Changed,
    }
}

/// What a file is now.
pub fn current(file: &File) -> io::Result<FileIdentity> {
    Ok(FileIdentity::from_stat(&stat_anew(file)?))
}

/// Has the file system be asked anew: what a server says of a file, NFS and FUSE believe for a while. A disk has it at hand.
fn stat_anew(file: &File) -> Result<Stat, Errno> {
    match statx(file, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS) {
        // Where a filter does not know the call, what is believed is all that there is.
        Ok(_) | Err(Errno::NOSYS | Errno::PERM) => fstat(file),
        // One that is gone: fstat may not know yet.
        Err(errno) => Err(errno),
    }
}
