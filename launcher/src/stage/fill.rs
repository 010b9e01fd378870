//! Completes a copy in the making, in the background or while somebody waits for it, and makes it a copy. Runs as the user on
//! the host.
//!
//! Of all processes that fill the same copy one does this: the one with the lock of the source, by which whole copies are made as
//! well. When it ends, another takes over. One that hangs is not waited for: to fill a copy twice at once harms nobody, since every
//! chunk has a lock of its own.

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use mizzen_core::{Digest, node_name};
use sha2::{Digest as _, Sha256};
use tracing::debug;

use super::apart::copy_apart;
use super::cache::{self, Cache, describe};
use super::copy::{CopyError, copy};
use super::evict::{self, Limits};
use super::fetch::{Fetcher, Stopped};
use super::fs_type;
use super::lock::{self, Lock, TryLock};
use super::obtain::publish;
use super::partial::{CHUNK, Void, chunks};
use super::progress_sink::{Activity, ProgressSink};
use super::source::SourceImage;
use crate::sys;
use crate::trace::OrDebug;

/// As many chunks are taken at once: a megabyte.
const PIECE: u64 = 8;
/// How many threads fetch from a network; from a disk one does.
const READERS: u64 = 4;
/// A reader is thought to read on for so long after their last demand: the background then fetches only now and then.
const BUSY: Duration = Duration::from_millis(100);
/// Nothing is fetched in the background before that: the container starts, and reads now and then.
const GRACE: Duration = Duration::from_millis(300);
/// It fetches a piece after that time all the same, so that the copy is made some day.
const SLOWEST: Duration = Duration::from_millis(80);
/// What readers will want next is sought so many chunks behind what they wanted last.
const AHEAD: u64 = 64;
/// How often the disk is made to have what there is.
pub const SYNC: Duration = Duration::from_secs(10);
/// How often it is told to begin with that: a step that ends waits for what it still has to write then.
const WRITEBACK: Duration = Duration::from_millis(500);
/// Nothing is tried more often with an original that cannot be read.
const ATTEMPTS: u32 = 5;
/// How often those who wait for the lock look at it.
const LOOK: Duration = Duration::from_millis(500);
/// A holder of the lock that does nothing for so long is not waited for.
pub const STALLED: Duration = Duration::from_secs(10);
/// Nor is one that has the locks of chunks, by somebody who waits for all of them.
const HELD: Duration = Duration::from_secs(5);
/// How long the background sleeps between two looks at chunks that others have.
const MOST_SLEEP: Duration = Duration::from_secs(1);

/// How the copy is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Meanwhile: whoever waits for a chunk comes first.
    Background,
    /// Somebody waits for all of it.
    Foreground,
}

/// What fills.
pub struct Filler<'a> {
    pub fetcher: &'a Fetcher<'a>,
    pub cache: &'a Cache,
    pub source: &'a SourceImage<'a>,
    pub limits: &'a Limits,
    pub pace: Pace,
}

/// Why a copy was not completed.
#[derive(Debug)]
pub enum Unfilled {
    /// The original cannot be read, or is another one.
    Source(std::io::Error),
    Changed,
    /// The copy cannot be written.
    Cache(String),
    /// Another process has what is missing under way, and does nothing.
    Held,
}

impl From<Stopped> for Unfilled {
    fn from(why: Stopped) -> Unfilled {
        match why {
            Stopped::Changed | Stopped::Void(Void::Touched) => Unfilled::Changed,
            Stopped::Void(Void::Lost(errno)) | Stopped::Unwritable(errno) => {
                Unfilled::Cache(mizzen_core::failure::cause(&std::io::Error::from_raw_os_error(errno)))
            }
        }
    }
}

impl Filler<'_> {
    /// Waits until it is this process's turn, fills, and publishes; or returns when another one has.
    pub fn run(&self, sink: &mut dyn ProgressSink) -> Result<(), Unfilled> {
        let Some(lock) = self.take_turn().map_err(Unfilled::Cache)? else { return Ok(()) };
        let done = self.complete(lock.as_ref(), sink).map(drop);
        if matches!(done, Err(Unfilled::Changed)) || self.fetcher.stopped().is_some() {
            // Nobody comes back to it, or it only takes room on a disk that has none. Those who use it have it open.
            self.fetcher.partial.remove(self.cache);
        }
        done
    }

    /// The lock, or `Some(None)` if its holder hangs. None if the copy is there.
    fn take_turn(&self) -> Result<Option<Option<Lock>>, String> {
        let name = format!("{}{}.lock", cache::SOURCE, self.source.identity.key());
        let mut heard = (String::new(), Instant::now());
        loop {
            let taken = lock::try_lock(self.cache, &name)?;
            if self.cache.digest_of(&self.source.identity).is_some() {
                return Ok(None);
            }
            match taken {
                TryLock::Acquired(lock) => return Ok(Some(Some(lock))),
                TryLock::Held(who) if who != heard.0 => heard = (who, Instant::now()),
                TryLock::Held(who) if heard.1.elapsed() > STALLED => {
                    debug!(who, "the copier does nothing: another one goes on");
                    return Ok(Some(None));
                }
                TryLock::Held(_) => {}
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Fills and publishes. The caller has the lock of the source, if there is a point in having it.
    pub fn complete(
        &self,
        lock: Option<&Lock>,
        sink: &mut dyn ProgressSink,
    ) -> Result<(File, Digest), Unfilled> {
        let size = self.source.identity.size;
        let done = AtomicU64::new(self.fetcher.partial.present());
        if self.pace == Pace::Background {
            std::thread::sleep(GRACE);
        }
        let work = Work {
            filler: self,
            next: Mutex::new(first_piece(size, &node_name())),
            done: &done,
            failed: AtomicBool::new(false),
        };
        let readers = if fs_type::is_disk(&self.fetcher.original) { 1 } else { READERS };
        let ended = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..readers)
                .filter_map(|number| {
                    let work = &work;
                    std::thread::Builder::new()
                        .stack_size(STACK)
                        .spawn_scoped(scope, move || work.fill(number))
                        .ok()
                })
                .collect();
            if threads.is_empty() {
                // The user may have no more threads.
                return work.fill(0);
            }
            self.attend(&work, &threads, lock, sink);
            threads.into_iter().try_for_each(|thread| thread.join().unwrap_or(Ok(())))
        });
        match ended {
            Ok(()) => self.publish(lock, sink),
            Err(Unfilled::Held) => copy_apart(self, sink),
            Err(why) => Err(why),
        }
    }

    /// Tells how far it is, and has the disk write, until all threads have ended.
    fn attend<T>(
        &self,
        work: &Work,
        threads: &[std::thread::ScopedJoinHandle<'_, T>],
        lock: Option<&Lock>,
        sink: &mut dyn ProgressSink,
    ) {
        let size = self.source.identity.size;
        let (mut synced, mut said, mut begun) = (Instant::now(), Instant::now(), Instant::now());
        while threads.iter().any(|thread| !thread.is_finished()) {
            std::thread::sleep(Duration::from_millis(20));
            let done = work.done.load(Ordering::Relaxed).min(size);
            sink.advance(Activity::Copying, done, size);
            if said.elapsed() > Duration::from_secs(1) {
                said = Instant::now();
                if let Some(lock) = lock {
                    lock.write_holder(&format!(": {done} of {size} bytes"));
                }
            }
            if begun.elapsed() > WRITEBACK {
                self.fetcher.partial.start_writeback();
                begun = Instant::now();
            }
            if synced.elapsed() > SYNC {
                self.sync();
                synced = Instant::now();
            }
        }
    }

    /// Has readers get what they ask for from the copy, if another process has made one. Nobody comes back to this one.
    pub fn go_on_from_copy(&self) {
        if self.fetcher.has_copy() {
            return;
        }
        if let Some((copy, _)) = self.cache.find(&self.source.identity) {
            self.fetcher.fetch_from(copy);
            self.fetcher.partial.remove(self.cache);
        }
    }

    /// Goes on to have the disk write what readers ask for, when nothing else is filled any more: what is marked as written is used,
    /// and whoever uses it is to hear when it is lost.
    pub fn sync_until_stopped(&self, every: Duration) {
        while self.fetcher.stopped().is_none() {
            std::thread::sleep(every);
            self.sync();
        }
    }

    /// What a disk could not write is not there any more, whatever is marked, and the kernel says so only once.
    pub fn sync(&self) {
        if let Err(error) = self.fetcher.partial.sync() {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            self.fetcher.partial.make_void(Void::Lost(errno));
            self.fetcher.partial.remove(self.cache);
        }
    }

    /// Computes the digest of the whole, and gives it the name of a copy.
    fn publish(&self, lock: Option<&Lock>, sink: &mut dyn ProgressSink) -> Result<(File, Digest), Unfilled> {
        let (partial, identity) = (&self.fetcher.partial, &self.source.identity);
        self.sync();
        if let Some(why) = self.fetcher.stopped() {
            return Err(why.into());
        }
        let mut done = 0;
        // Those who wait must not take this for nothing.
        let mut say = lock.map(|lock| lock.progress_writer(identity.size));
        let digest = copy(&partial.data, None, identity.size, &mut |bytes| {
            done += bytes;
            if let Some(say) = &mut say {
                say(bytes);
            }
            sink.advance(Activity::Verifying, done, identity.size);
        });
        let digest = digest.map_err(|error| match error {
            CopyError::Source(error) | CopyError::Target(error) => {
                // What the disk has lost is fetched again by the next one.
                partial.remove(self.cache);
                Unfilled::Cache(mizzen_core::failure::cause(&error))
            }
            CopyError::Shorter => Unfilled::Cache("it has become shorter".to_owned()),
        })?;
        // Another process may have been told that the disk could not write.
        if let Some(void) = partial.void() {
            return Err(Stopped::Void(void).into());
        }
        // Those who have it open have all that they need.
        if !self.fetcher.is_unchanged() {
            partial.remove(self.cache);
            return Err(Unfilled::Changed);
        }
        let unpublished = |error: std::io::Error| Unfilled::Cache(mizzen_core::failure::cause(&error));
        let file = partial.data.try_clone().map_err(unpublished)?;
        let unfinished = cache::Unfinished::of(file);
        let published = publish(self.cache, self.source, unfinished, digest, sink).map_err(|errno| {
            Unfilled::Cache(format!("{}: {}", self.cache.path.display(), describe(errno)))
        })?;
        partial.remove(self.cache);
        evict::reserve(self.cache, 0, 0, self.limits).or_debug("the copies exceed their limits for now");
        Ok((published, digest))
    }
}

const STACK: usize = 128 << 10;

/// Where a node begins: each somewhere else, so that not all read the same part of a file system at the same time.
fn first_piece(size: u64, node: &str) -> u64 {
    let hash: [u8; 32] = Sha256::digest(node).into();
    let number = hash.iter().take(8).fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
    number % chunks(size).div_ceil(PIECE).max(1)
}

/// What the threads share.
struct Work<'a> {
    filler: &'a Filler<'a>,
    /// The piece that is looked at next. It goes round and round.
    next: Mutex<u64>,
    done: &'a AtomicU64,
    failed: AtomicBool,
}

impl Work<'_> {
    fn fill(&self, number: u64) -> Result<(), Unfilled> {
        let filler = self.filler;
        if filler.pace == Pace::Background {
            sys::work_in_background();
        }
        let pieces = chunks(filler.fetcher.partial.size).div_ceil(PIECE);
        let (mut failures, mut idle, mut wait) = (0, 0, Wait::new());
        // A piece that another one fetches is looked at again in the next round.
        while idle < pieces {
            if self.failed.load(Ordering::Relaxed) {
                return Ok(());
            }
            if let Some(why) = filler.fetcher.stopped() {
                return Err(why.into());
            }
            if self.is_abandoned() {
                return Err(Unfilled::Changed);
            }
            self.give_way(number);
            match self.take_piece() {
                Ok(Some(bytes)) => {
                    self.done.fetch_add(bytes, Ordering::Relaxed);
                    (failures, idle, wait) = (0, 0, Wait::new());
                }
                Ok(None) => {
                    idle += 1;
                    if idle == pieces && !filler.fetcher.partial.is_complete().unwrap_or(false) {
                        wait.wait(filler.fetcher.partial.present());
                        if filler.pace == Pace::Foreground && wait.since.elapsed() > HELD {
                            return Err(Unfilled::Held);
                        }
                        idle = 0;
                    }
                }
                Err(_) if filler.fetcher.stopped().is_some() => {}
                Err(error) => {
                    failures += 1;
                    if failures == ATTEMPTS {
                        self.failed.store(true, Ordering::Relaxed);
                        return Err(Unfilled::Source(error));
                    }
                    std::thread::sleep(Duration::from_millis(200) * failures);
                }
            }
        }
        Ok(())
    }

    /// Of an original that has lost its name no copy is made: nobody could come to use it.
    fn is_abandoned(&self) -> bool {
        rustix::fs::fstat(&self.filler.fetcher.original).is_ok_and(|stat| stat.st_nlink == 0)
    }

    /// Waits as long as others wait for chunks of theirs, within reason. Only one thread goes on then.
    fn give_way(&self, number: u64) {
        if self.filler.pace == Pace::Foreground {
            return;
        }
        let begin = Instant::now();
        let partial = &self.filler.fetcher.partial;
        while partial.quiet_for() < BUSY && (number > 0 || begin.elapsed() < SLOWEST) {
            if self.filler.fetcher.stopped().is_some() {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Fetches the next piece that is missing, or a part of it. None if the one that was looked at is not.
    fn take_piece(&self) -> std::io::Result<Option<u64>> {
        let fetcher = self.filler.fetcher;
        let count = chunks(fetcher.partial.size);
        let length = |fetched: std::ops::Range<u64>| {
            (fetched.end * CHUNK).min(fetcher.partial.size) - fetched.start * CHUNK
        };
        // What somebody is about to read comes first.
        if self.filler.pace == Pace::Background
            && let Some(begin) = fetcher.ahead_of_demand().filter(|begin| *begin < count)
        {
            let marks = fetcher.partial.marks(begin..(begin + AHEAD).min(count))?;
            if let Some(missing) = marks.iter().position(|mark| !super::partial::is_good(*mark)) {
                let first = begin + missing as u64;
                if let Some(fetched) = fetcher.fetch(first..(first + PIECE).min(count))? {
                    return Ok(Some(length(fetched)));
                }
            }
        }
        let first = {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            let piece = *next;
            *next = (piece + 1) % count.div_ceil(PIECE);
            piece * PIECE
        };
        let end = (first + PIECE).min(count);
        let mut bytes = 0;
        let marks = fetcher.partial.marks(first..end)?;
        let mut at = first;
        for mark in marks {
            // A run of chunks may be fetched at once.
            let chunk = at.max(first);
            at = chunk + 1;
            if super::partial::is_good(mark) || fetcher.partial.has(chunk) {
                continue;
            }
            if let Some(fetched) = fetcher.fetch(chunk..end)? {
                bytes += length(fetched);
            }
        }
        Ok((bytes > 0).then_some(bytes))
    }
}

/// Waits for others who have chunks under way: for those who do nothing, less and less often.
struct Wait {
    /// When they did something last,
    since: Instant,
    /// and how much there was then.
    present: u64,
}

impl Wait {
    fn new() -> Wait {
        Wait { since: Instant::now(), present: 0 }
    }

    fn wait(&mut self, present: u64) {
        if present != self.present {
            *self = Wait { since: Instant::now(), present };
        }
        std::thread::sleep((self.since.elapsed() / 10).clamp(Duration::from_millis(20), MOST_SLEEP));
    }
}

/// Tells nobody.
pub struct Silent;

impl ProgressSink for Silent {
    fn advance(&mut self, _doing: Activity, _done: u64, _total: u64) {}

    fn note(&mut self, text: &str) {
        debug!(text, "of a copy in the making");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_begin_at_different_places() {
        let size = 20 << 30;
        let pieces = chunks(size).div_ceil(PIECE);
        let mut tenths = [0_u32; 10];
        for node in 0..1000 {
            let first = first_piece(size, &format!("node{node:04}"));
            assert!(first < pieces);
            tenths[(first * 10 / pieces) as usize] += 1;
        }
        assert!(tenths.iter().all(|nodes| (50..150).contains(nodes)), "{tenths:?}");
        assert_eq!([0, 1, CHUNK].map(|size| first_piece(size, "node1")), [0; 3]);
    }
}
