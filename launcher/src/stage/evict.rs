//! Makes room for a copy: those that were not used for the longest time go, never one in use. Runs as the user on the
//! host, or as root in the site cache.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::time::Duration;

use mizzen_core::failure::cause;
use mizzen_core::staging::Amount;
use mizzen_core::{Config, Digest, Failure};
use rustix::fs::{AtFlags, fstat, fstatvfs, statat};
use rustix::io::Errno;

use super::cache::{BROKEN, COPY, Cache, SOURCE, TEMPORARY, describe};
use super::lock::{self, Lock};
use super::{ROOM_LOCK, delivery, partial, profile};
use crate::report::megabytes;

/// How much the copies may take.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// All of them together.
    pub max_size: Option<Amount>,
    /// What they leave free on the disk.
    pub keep_free: Option<Amount>,
}

impl Limits {
    /// The site's.
    pub fn new(config: &Config) -> Result<Limits, Failure> {
        Ok(Limits {
            max_size: Amount::parse(&config.stage_max_size)?,
            keep_free: Amount::parse(&config.stage_keep_free)?,
        })
    }
}

/// Making room is a matter of milliseconds.
const TIMEOUT: Duration = Duration::from_secs(10);

/// More would make it slow to find out what there is.
const MOST_COPIES: usize = 4096;

/// How many sources of the same content are remembered.
const SOURCES_OF_A_COPY: usize = 16;

/// A copy, as its name and its inode tell.
pub struct CachedCopy {
    pub name: String,
    pub digest: Digest,
    pub size: u64,
    /// When it was last used, in seconds and nanoseconds since 1970.
    pub used: (i64, u64),
}

/// What the copies take, and the disk has.
#[derive(Clone, Copy)]
struct Space {
    /// How many copies there are.
    copies: usize,
    /// What they take.
    taken: u64,
    /// What the unfinished ones will take.
    promised: u64,
    /// What the disk has for anybody else, when they are finished.
    free: u64,
    disk: u64,
}

impl Space {
    /// As it is now: a file that somebody has open keeps its space when it is removed.
    fn of(cache: &Cache, copies: &[Evictable]) -> Result<Space, String> {
        let disk = fstatvfs(&cache.dir).map_err(describe)?;
        let mut space = Space {
            copies: copies.len(),
            taken: copies.iter().map(|copy| copy.size).sum(),
            promised: 0,
            free: disk.f_bavail.saturating_mul(disk.f_frsize),
            disk: disk.f_blocks.saturating_mul(disk.f_frsize),
        };
        // An unfinished copy has its size from the beginning, and fills it with blocks.
        for name in cache.names(TEMPORARY).map_err(|error| error.to_string())? {
            let Ok(stat) = statat(&cache.dir, &*name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            let [size, blocks] =
                [stat.st_size, stat.st_blocks].map(|found| u64::try_from(found).unwrap_or(0));
            space.promised = space.promised.saturating_add(size);
            space.free = space.free.saturating_sub(size.saturating_sub(blocks.saturating_mul(512)));
        }
        // So has a copy in the making.
        let promised: u64 = copies.iter().map(|copy| copy.size.saturating_sub(copy.taken)).sum();
        space.free = space.free.saturating_sub(promised);
        Ok(space)
    }

    /// As it would be without any copy.
    fn without_copies(self) -> Space {
        Space { copies: 0, taken: 0, free: self.free.saturating_add(self.taken), ..self }
    }

    fn lacks(self, needed: u64, limits: &Limits) -> bool {
        let limit = limits.max_size.map_or(u64::MAX, |amount| amount.of(self.disk));
        let keep = limits.keep_free.map_or(0, |amount| amount.of(self.disk));
        let taken = self.taken.saturating_add(self.promised).saturating_add(needed);
        taken > limit || self.free < needed.saturating_add(keep) || self.copies >= MOST_COPIES
    }
}

/// Makes room for `needed` bytes more within the limits; in any case at least `freed` bytes are freed if they can be. Nobody
/// else makes room before the lock is dropped: by then whoever needs the room has a file of that size.
pub fn reserve(cache: &Cache, needed: u64, freed: u64, limits: &Limits) -> Result<Lock, String> {
    let lock = lock::lock_with_timeout(cache, ROOM_LOCK, TIMEOUT)?;
    sweep(cache);
    let mut copies = evictable(cache)?;
    copies.sort_by_key(|copy| copy.used);
    let no_room = || format!("no room for {} in {}", megabytes(needed), cache.path.display());
    let mut space = Space::of(cache, &copies)?;
    if space.lacks(needed, limits) || freed > 0 {
        // They can be made again from the images.
        profile::remove_all(cache, || false);
        space = Space::of(cache, &copies)?;
    }
    // What cannot have room in any case must not cost others their copies.
    if space.without_copies().lacks(needed, limits) {
        return Err(no_room());
    }
    let mut missing = freed;
    while missing > 0 || space.lacks(needed, limits) {
        let Some(index) = copies.iter().position(|copy| remove_unused(cache, &copy.name)) else { break };
        // Those before it are in use.
        let removed = copies.drain(..=index).next_back();
        missing = missing.saturating_sub(removed.map_or(0, |copy| copy.taken));
        space = Space::of(cache, &evictable(cache)?)?;
    }
    if space.lacks(needed, limits) { Err(no_room()) } else { Ok(lock) }
}

/// Whether the limits hold.
pub fn is_enough(cache: &Cache, limits: &Limits) -> Result<bool, String> {
    Ok(!Space::of(cache, &evictable(cache)?)?.lacks(0, limits))
}

/// What can be removed to make room: a copy, or one in the making.
struct Evictable {
    name: String,
    /// As a whole.
    size: u64,
    /// What it takes by now.
    taken: u64,
    used: (i64, u64),
}

fn evictable(cache: &Cache) -> Result<Vec<Evictable>, String> {
    let unlisted = |error: std::io::Error| format!("cannot list the copies: {}", cause(&error));
    let copies = list_copies(cache).map_err(unlisted)?.into_iter().map(|copy| {
        let CachedCopy { name, size, used, .. } = copy;
        Evictable { name, size, taken: size, used }
    });
    let partial = partial::list(cache).map_err(unlisted)?.into_iter().map(|partial| {
        let partial::Listed { name, size, taken, used, .. } = partial;
        Evictable { name, size, taken, used }
    });
    Ok(copies.chain(partial).collect())
}

/// All copies.
pub fn list_copies(cache: &Cache) -> std::io::Result<Vec<CachedCopy>> {
    let mut copies = Vec::new();
    for name in cache.names(COPY)? {
        let Some(digest) = Digest::parse(name.trim_start_matches(COPY)) else { continue };
        let Ok(stat) = statat(&cache.dir, &*name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        copies.push(CachedCopy { name, digest, size, used: (stat.st_atime, stat.st_atime_nsec) });
    }
    Ok(copies)
}

/// Removes a file unless somebody uses it. Whoever opens it at this moment keeps what they have opened.
pub fn remove_unused(cache: &Cache, name: &str) -> bool {
    if name.starts_with(partial::PARTIAL) {
        return partial::remove_unused(cache, name);
    }
    // Of root's, anybody can keep one open.
    let is_read_at_once = cache.shared && name.ends_with(".json");
    match cache.open_file(name) {
        Ok(_) if is_read_at_once => remove_anything(cache, name),
        Ok(file) => !cache.in_use(&file) && is_named(cache, name, &file) && remove_anything(cache, name),
        Err(Errno::NOENT) => false,
        // A link, a directory: nothing that anybody runs from.
        Err(_) => remove_anything(cache, name),
    }
}

/// Whether the name still means this file.
pub fn is_named(cache: &Cache, name: &str, file: impl AsFd) -> bool {
    let named = statat(&cache.dir, name, AtFlags::SYMLINK_NOFOLLOW);
    matches!((named, fstat(file)), (Ok(named), Ok(opened)) if named.st_ino == opened.st_ino)
}

/// Removes what crashes and damage have left. Returns how many files.
pub fn sweep(cache: &Cache) -> usize {
    if !cache.shared {
        delivery::sweep(cache);
    }
    let left = [TEMPORARY, BROKEN].iter().flat_map(|prefix| cache.names(prefix).unwrap_or_default());
    let removed = left.filter(|name| profile::remove(cache, name) || remove_unused(cache, name)).count();
    let forgotten = partial::sweep(cache);
    forget_sources(cache);
    removed + forgotten
}

/// Removes locks that nobody holds, and what is known of sources whose copy is gone. Of the sources of one copy only the
/// last few are kept: a file becomes another one whenever it is touched.
fn forget_sources(cache: &Cache) {
    let mut known: BTreeMap<String, Vec<(i64, String)>> = BTreeMap::new();
    for name in cache.names(SOURCE).unwrap_or_default() {
        let copied = cache.manifest(&name).filter(|manifest| cache.has_copy(&manifest.digest));
        match (copied, statat(&cache.dir, &*name, AtFlags::SYMLINK_NOFOLLOW)) {
            (Some(manifest), Ok(stat)) => {
                known.entry(manifest.digest).or_default().push((stat.st_mtime, name));
            }
            _ => {
                remove_unused(cache, &name);
            }
        }
    }
    for sources in known.values_mut() {
        sources.sort();
        let surplus = sources.len().saturating_sub(SOURCES_OF_A_COPY);
        for (_, name) in sources.drain(..surplus) {
            remove_unused(cache, &name);
        }
    }
}

fn remove_anything(cache: &Cache, name: &str) -> bool {
    // By path, but in a directory that nobody else can write to. std follows no links here.
    cache.remove(name).is_ok() || std::fs::remove_dir_all(cache.path.join(name)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::testing::Scratch;
    use crate::stage::cache::copy_name;
    use rustix::fs::{FlockOperation, Timespec, Timestamps, flock, futimens};
    use std::fs::File;

    /// A cache with copies of these sizes; the first was not used for the longest time.
    fn cache_of(sizes: &[u64]) -> (Scratch, Cache) {
        let scratch = Scratch::new();
        let cache = Cache::open(scratch.path()).unwrap();
        for (index, size) in sizes.iter().enumerate() {
            let file = File::create(cache.path.join(name_of(index))).unwrap();
            file.set_len(*size).unwrap();
            let used = Timespec { tv_sec: 1000 + index as i64, tv_nsec: 0 };
            futimens(&file, &Timestamps { last_access: used, last_modification: used }).unwrap();
        }
        (scratch, cache)
    }

    fn name_of(index: usize) -> String {
        copy_name(Digest::new([index as u8; 32]))
    }

    fn limited_to(max_size: u64) -> Limits {
        Limits { max_size: Some(Amount::Bytes(max_size)), keep_free: None }
    }

    #[test]
    fn what_was_not_used_for_the_longest_time_goes_first() {
        /// Sizes of the copies, the limit, what is needed, which are left; None: there is no room.
        type Case<'a> = (&'a [u64], u64, u64, Option<&'a [usize]>);
        let table: [Case; 8] = [
            (&[], 100, 50, Some(&[])),
            (&[30, 30, 30], 100, 10, Some(&[0, 1, 2])),
            (&[30, 30, 30], 100, 11, Some(&[1, 2])),
            (&[30, 30, 30], 100, 41, Some(&[2])),
            (&[10, 80, 10], 100, 5, Some(&[1, 2])),
            (&[30, 30, 30], 100, 100, Some(&[])),
            // What cannot have room in any case costs nobody a copy.
            (&[30, 30, 30], 100, 101, None),
            (&[30, 30, 30], 60, 0, Some(&[1, 2])),
        ];
        for (sizes, limit, needed, left) in table {
            let (_scratch, cache) = cache_of(sizes);
            let made = reserve(&cache, needed, 0, &limited_to(limit));
            assert_eq!(made.is_ok(), left.is_some(), "{sizes:?} {limit} {needed}");
            let all: Vec<usize> = (0..sizes.len()).collect();
            let there: Vec<usize> =
                all.iter().copied().filter(|index| cache.path.join(name_of(*index)).exists()).collect();
            assert_eq!(there, left.unwrap_or(&all), "{sizes:?} {limit} {needed}");
        }
    }

    #[test]
    fn what_is_in_use_stays() {
        let (_scratch, cache) = cache_of(&[30, 30, 30]);
        let used = File::open(cache.path.join(name_of(0))).unwrap();
        flock(&used, FlockOperation::LockShared).unwrap();
        assert!(reserve(&cache, 30, 0, &limited_to(100)).is_ok());
        assert!(cache.path.join(name_of(0)).exists() && !cache.path.join(name_of(1)).exists());
        let Err(why) = reserve(&cache, 80, 0, &limited_to(100)) else { panic!("there is no room") };
        assert!(why.starts_with("no room for 0.0 MB in "), "{why}");
    }

    #[test]
    fn so_much_is_freed_whatever_the_limits_say() {
        let (_scratch, cache) = cache_of(&[30, 30, 30]);
        assert!(reserve(&cache, 0, 31, &limited_to(1000)).is_ok());
        let left = list_copies(&cache).unwrap();
        assert_eq!(left.iter().map(|copy| copy.name.clone()).collect::<Vec<_>>(), [name_of(2)]);
    }
}
