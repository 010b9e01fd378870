//! The copy of an image, from the cache or new. Runs as the user on the host, or as root.
//!
//! However many ask for the same source at once, one of them copies, and the others wait for it; if it dies, the next one
//! goes on.

use std::fs::File;
use std::io;
use std::time::{Duration, Instant, SystemTime};

use mizzen_core::Digest;
use mizzen_core::failure::cause;
use rustix::io::Errno;
use tracing::debug;

use super::cache::{self, Cache, copy_name, describe};
use super::copy::{CopyError, copy, verify};
use super::evict::{self, Limits};
use super::fetch::{Fetcher, current};
use super::fill::{self, Filler, Pace, Unfilled};
use super::lock::{self, Lock, TryLock};
use super::partial::Partial;
use super::progress_sink::{Activity, ProgressSink};
use super::source::{FileIdentity, Manifest, SourceImage};
use super::{Provenance, StageError, StagingOptions, changing, unreadable};
use crate::image::shown;
use crate::trace::OrDebug;

/// Who waits for another's copy says so after a while,
const PATIENT: Duration = Duration::from_secs(5);
/// and gives up when that makes no progress for so long.
const STALLED: Duration = Duration::from_secs(60);

/// The copy of an image: the one that is there, the one that somebody else is making, or our own.
pub fn obtain(
    cache: &Cache,
    source: &SourceImage,
    staging: &StagingOptions,
    sink: &mut dyn ProgressSink,
) -> Result<(File, Digest, Provenance), StageError> {
    let identity = &source.identity;
    let name = format!("{}{}.lock", cache::SOURCE, identity.key());
    let mut heard = (String::new(), Instant::now());
    let (begin, mut told) = (Instant::now(), false);
    loop {
        if let Some((file, digest)) = existing(cache, source, sink) {
            return Ok((file, digest, Provenance::Cache));
        }
        match lock::try_lock(cache, &name).map_err(StageError::Cache)? {
            TryLock::Acquired(lock) => {
                // Its last holder may have made the copy since we looked.
                if let Some((file, digest)) = existing(cache, source, sink) {
                    return Ok((file, digest, Provenance::Cache));
                }
                let made = match staging.adopt(cache, source, &lock, sink) {
                    Some(adopted) => Ok(adopted),
                    None => make(cache, source, &staging.limits, &lock, sink),
                };
                let (file, digest) = made?;
                // Others may have copied at the same time.
                evict::reserve(cache, 0, 0, &staging.limits)
                    .or_debug("the copies exceed their limits for now");
                return Ok((file, digest, Provenance::Copied));
            }
            TryLock::Held(who) if who != heard.0 => heard = (who, Instant::now()),
            TryLock::Held(who) if heard.1.elapsed() > fill::STALLED => {
                // Whoever fills a copy in the making tells of it each second. If its holder does not, as in a suspended job, to
                // fill it at the same time does no harm.
                if let Some((file, digest)) = complete(cache, source, &staging.limits, None, sink)? {
                    return Ok((file, digest, Provenance::Copied));
                }
                if heard.1.elapsed() > STALLED {
                    return Err(StageError::Cache(format!("{who} is copying it and makes no progress")));
                }
                std::thread::sleep(lock::PAUSE);
            }
            TryLock::Held(who) => {
                if !told && begin.elapsed() > PATIENT {
                    sink.note(&format!("{} is being copied to the node by {who}", shown(source.path)));
                    told = true;
                }
                std::thread::sleep(lock::PAUSE);
            }
        }
    }
}

/// The copy that is there, if it can be used.
pub fn existing(cache: &Cache, source: &SourceImage, sink: &mut dyn ProgressSink) -> Option<(File, Digest)> {
    let (file, digest) = cache.find(&source.identity)?;
    is_sound(cache, source, &file, digest, sink).then_some((file, digest))
}

/// Whether a copy has the content that it is named by, as far as anybody wants to know. One that has not is set aside.
fn is_sound(
    cache: &Cache,
    source: &SourceImage,
    file: &File,
    digest: Digest,
    sink: &mut dyn ProgressSink,
) -> bool {
    let Some(why) = damage(source, file, digest, sink) else { return true };
    // Another may have done that meanwhile, and made a new one.
    if evict::is_named(cache, &copy_name(digest), file) {
        cache.set_aside(&copy_name(digest));
    }
    sink.note(&format!("{}: its copy on the node is damaged: {why}", shown(source.path)));
    false
}

/// What is wrong with the content of a copy, as far as anybody wants to know.
pub fn damage(
    source: &SourceImage,
    file: &File,
    digest: Digest,
    sink: &mut dyn ProgressSink,
) -> Option<String> {
    let (mut done, size) = (0, source.identity.size);
    let advance = &mut |bytes| {
        done += bytes;
        sink.advance(Activity::Verifying, done, size);
    };
    if source.verify { verify(file, digest, size, advance).err() } else { None }
}

/// Copies the image. The caller has the source's lock.
fn make(
    cache: &Cache,
    source: &SourceImage,
    limits: &Limits,
    lock: &Lock,
    sink: &mut dyn ProgressSink,
) -> Result<(File, Digest), StageError> {
    let identity = &source.identity;
    settle(identity);
    if let Some(made) = complete(cache, source, limits, Some(lock), sink)? {
        return Ok(made);
    }
    let mut attempt = |freed| {
        let room = evict::reserve(cache, identity.size, freed, limits);
        fill(cache, source, room.map_err(|why| Full::Other(StageError::Cache(why)))?, lock, sink)
    };
    let (unfinished, digest) = match attempt(0) {
        // Another user's files, or a quota: let our own go, once.
        Err(Full::Full(_)) => attempt(identity.size),
        other => other,
    }
    .map_err(|error| match error {
        Full::Full(why) => StageError::Cache(why),
        Full::Other(trouble) => trouble,
    })?;
    let unpublished = |errno| StageError::Cache(format!("{}: {}", cache.path.display(), describe(errno)));
    let file = publish(cache, source, unfinished, digest, sink).map_err(unpublished)?;
    Ok((file, digest))
}

/// Goes on with a copy in the making, if there is one. It has its room already.
fn complete(
    cache: &Cache,
    source: &SourceImage,
    limits: &Limits,
    lock: Option<&Lock>,
    sink: &mut dyn ProgressSink,
) -> Result<Option<(File, Digest)>, StageError> {
    if cache.shared {
        return Ok(None);
    }
    let opened = Partial::open(cache, &source.identity).or_debug("a copy in the making is not used");
    let Some(partial) = opened.flatten() else { return Ok(None) };
    let original = source.file.try_clone().map_err(|error| StageError::Cache(cause(&error)))?;
    let fetcher = Fetcher::new(partial, original, source.identity.clone(), cache, limits);
    let filler = Filler { fetcher: &fetcher, cache, source, limits, pace: Pace::Foreground };
    match filler.complete(lock, sink) {
        Ok(made) => Ok(Some(made)),
        Err(Unfilled::Source(error)) => Err(StageError::Source(unreadable(source.path, &error))),
        Err(Unfilled::Changed) => {
            // Nobody comes back to it.
            fetcher.partial.remove(cache);
            Err(StageError::Source(changing(source.path)))
        }
        Err(Unfilled::Held) => Ok(None),
        Err(Unfilled::Cache(why)) => {
            // It may be damaged, or need more room than there is: a copy of its own may do.
            debug!(why, "a copy in the making cannot be completed");
            fetcher.partial.remove(cache);
            Ok(None)
        }
    }
}

/// Gives a copy its name, and remembers it. A good one that is there already, of another source, stays.
pub fn publish(
    cache: &Cache,
    source: &SourceImage,
    unfinished: cache::Unfinished,
    digest: Digest,
    sink: &mut dyn ProgressSink,
) -> Result<File, Errno> {
    let size = source.identity.size;
    if let Some(there) = cache.open_copy(digest, size) {
        is_sound(cache, source, &there, digest, sink);
    }
    let file = cache.publish(unfinished, digest, size)?;
    // Without this the next start copies again; this one has what it needs.
    let manifest = Manifest::new(source.path, &source.identity, digest);
    if let Err(error) = cache.write_manifest(&manifest) {
        sink.note(&format!("{}: cannot remember the copy: {}", cache.path.display(), cause(&error)));
    }
    Ok(file)
}

enum Full {
    /// No space: there may be some after making room.
    Full(String),
    Other(StageError),
}

/// Fills a new file with the source's content, and sees that the source was the same all the time. `room` is the lock
/// under which room was made for it.
fn fill(
    cache: &Cache,
    source: &SourceImage,
    room: Lock,
    lock: &Lock,
    sink: &mut dyn ProgressSink,
) -> Result<(cache::Unfinished, Digest), Full> {
    let identity = &source.identity;
    let failed = |error: io::Error| {
        let why = format!("{}: cannot write the copy: {}", cache.path.display(), cause(&error));
        match Errno::from_io_error(&error) {
            Some(Errno::NOSPC | Errno::DQUOT) => Full::Full(why),
            Some(Errno::FBIG) => {
                Full::Other(StageError::Cache(format!("{why} (your limit on the size of files: ulimit -f)")))
            }
            _ => Full::Other(StageError::Cache(why)),
        }
    };
    let unfinished = cache.begin(identity.size).map_err(|errno| failed(errno.into()))?;
    drop(room);
    let (mut done, mut say) = (0, lock.progress_writer(identity.size));
    let digest = copy(source.file, Some(&unfinished.file), identity.size, &mut |bytes| {
        done += bytes;
        sink.advance(Activity::Copying, done, identity.size);
        say(bytes);
    });
    let digest = digest.map_err(|error| match error {
        CopyError::Target(error) => failed(error),
        CopyError::Source(error) => Full::Other(StageError::Source(unreadable(source.path, &error))),
        CopyError::Shorter => Full::Other(StageError::Source(changing(source.path))),
    })?;
    let now = current(source.file).map(|now| FileIdentity { mount: identity.mount.clone(), ..now });
    if !now.is_ok_and(|now| now == *identity) {
        return Err(Full::Other(StageError::Source(changing(source.path))));
    }
    Ok((unfinished, digest))
}

/// A file that is written within the same tick of its file system's clock keeps its times. So the copy begins when that
/// tick is over: then every later change can be seen.
pub fn settle(identity: &FileIdentity) {
    std::thread::sleep(rest_of_tick(identity));
}

/// Whether every later change of a file can be seen.
pub fn is_settled(identity: &FileIdentity) -> bool {
    rest_of_tick(identity) == Duration::ZERO
}

/// How long a file can still be written without another time. Some servers count whole seconds.
fn rest_of_tick(identity: &FileIdentity) -> Duration {
    let (seconds, nanoseconds) = identity.ctime;
    let tick = if nanoseconds == 0 { Duration::from_millis(1100) } else { Duration::from_millis(50) };
    let Ok(seconds) = u64::try_from(seconds) else { return Duration::ZERO };
    let changed = SystemTime::UNIX_EPOCH + Duration::new(seconds, u32::try_from(nanoseconds).unwrap_or(0));
    // A time in the future tells only that the clocks differ.
    SystemTime::now().duration_since(changed).map_or(Duration::ZERO, |age| tick.saturating_sub(age))
}
