//! A copy in the making, in the user's own directory of copies. Runs as the user on the host.
//!
//!     partial-KEY/data      as long as the image, with holes where nothing is yet
//!     partial-KEY/record    which chunks are good (`record.rs`)
//!
//! The directory gets its name when both files are there. Many processes read and fill it at once: a chunk is written by the
//! one that has its lock, which is a lock on the byte of the record with its mark and ends with its holder; it is marked when
//! all of it is written, and never written again. So what is marked is good, whoever is killed, and when all of it is marked
//! nobody writes any more: then the data gets the name of a copy. Whoever uses the data has a shared lock on it, as on a copy.

mod record;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::fcntl::{FcntlArg, fcntl};
use nix::unistd::geteuid;
use rustix::fs::{
    AtFlags, FileType, FlockOperation, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, fdatasync,
    flock, fstat, fsync, ftruncate, futimens, mkdirat, openat, renameat, statat, unlinkat,
};
use rustix::io::Errno;

use super::cache::{BROKEN, Cache, TEMPORARY, describe};
use super::evict::{self, Limits};
use super::source::{FileIdentity, SourceImage};
use crate::sys;
use crate::trace::OrDebug;
pub use record::boot;
pub use record::{CHUNK, DURABLE, Head, Void, chunks, decode};
use record::{DEMAND_AT, HEAD, MISSING, VOID_AT, WRITTEN, are_marks};

/// Begins the name of a copy in the making.
pub const PARTIAL: &str = "partial-";
const DATA: &str = "data";
const RECORD: &str = "record";

/// The mode of the data until it is a copy, which nobody writes.
const MODE: u32 = 0o600;
/// One that was not used for so long goes when room is made: nobody comes back to it.
const FORGOTTEN: Duration = Duration::from_secs(14 * 86400);
/// A record of a larger image than there is on any disk is none.
const MOST_CHUNKS: u64 = 1 << 30;

/// A copy in the making, open.
pub struct Partial {
    /// Its name in the cache.
    pub name: String,
    dir: OwnedFd,
    /// What there is of the image. Whoever has it open keeps it from being removed.
    pub data: File,
    record: File,
    /// How long the image is.
    pub size: u64,
    /// Whether it is complete, and about to be a copy: it cannot be written to.
    pub is_sealed: bool,
}

/// The name of the copy in the making of a source.
pub fn name_of(identity: &FileIdentity) -> String {
    format!("{PARTIAL}{}", identity.key())
}

/// The chunks that have these bytes.
pub fn chunks_of(at: u64, length: u64) -> Range<u64> {
    at / CHUNK..chunks(at.saturating_add(length))
}

impl Partial {
    /// Opens what there is of a source, or begins it where there is nothing and room can be made.
    pub fn open_or_begin(cache: &Cache, source: &SourceImage, limits: &Limits) -> Result<Partial, String> {
        for _ in 0..10 {
            if let Some(partial) = Partial::open(cache, &source.identity)? {
                return Ok(partial);
            }
            begin(cache, source, limits)?;
        }
        Err(format!("{}: {} is removed again and again", cache.path.display(), name_of(&source.identity)))
    }

    /// Opens what there is of a source. What cannot be trusted is set aside, and is as good as nothing.
    pub fn open(cache: &Cache, identity: &FileIdentity) -> Result<Option<Partial>, String> {
        if boot().is_empty() {
            return Err("the kernel does not tell one boot of the node from another".to_owned());
        }
        let name = name_of(identity);
        let failed =
            |what: &str, errno| format!("{}/{what}: {}", cache.path.join(&name).display(), describe(errno));
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = match openat(&cache.dir, &*name, flags, Mode::empty()) {
            Ok(dir) => dir,
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::NOTDIR | Errno::LOOP) => {
                set_aside(cache, &name);
                return Ok(None);
            }
            Err(errno) => return Err(failed("", errno)),
        };
        let (data, is_sealed) = match open_file(&dir, DATA, OFlags::RDWR) {
            Ok(data) => (data, false),
            Err(Errno::ACCESS) => match open_file(&dir, DATA, OFlags::RDONLY) {
                Ok(data) => (data, true),
                Err(errno) => return Err(failed(DATA, errno)),
            },
            Err(Errno::NOENT | Errno::LOOP | Errno::NXIO | Errno::ISDIR) => {
                set_aside(cache, &name);
                return Ok(None);
            }
            Err(errno) => return Err(failed(DATA, errno)),
        };
        // Whoever removes it has it locked for a moment only.
        if !lock_shared(&data) {
            return Ok(None);
        }
        let named = statat(&cache.dir, format!("{name}/{DATA}"), AtFlags::SYMLINK_NOFOLLOW);
        let stat = fstat(&data).map_err(|errno| failed(DATA, errno))?;
        if !named.is_ok_and(|named| (named.st_dev, named.st_ino) == (stat.st_dev, stat.st_ino)) {
            return Ok(None);
        }
        let is_ours = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
            && stat.st_uid == geteuid().as_raw()
            && u64::try_from(stat.st_size) == Ok(identity.size);
        let record = open_file(&dir, RECORD, OFlags::RDWR);
        let partial = record.ok().filter(|_| is_ours).map(|record| Partial {
            name: name.clone(),
            dir,
            data,
            record,
            size: identity.size,
            is_sealed,
        });
        match partial.filter(|partial| partial.renew(identity).or_debug("a record is no good") == Some(true))
        {
            Some(partial) => {
                // Marks it as used just now. A failure only makes it go earlier.
                let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
                let same = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
                let _ = futimens(&partial.data, &Timestamps { last_access: now, last_modification: same });
                Ok(Some(partial))
            }
            None => {
                set_aside(cache, &name);
                Ok(None)
            }
        }
    }

    /// The same, through descriptors of its own: locks on chunks belong to those.
    pub fn reopen(&self) -> io::Result<Partial> {
        let flags = if self.is_sealed { OFlags::RDONLY } else { OFlags::RDWR };
        let data = open_file(&self.dir, DATA, flags)?;
        if !lock_shared(&data) || fstat(&data)?.st_ino != fstat(&self.data)?.st_ino {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(Partial {
            name: self.name.clone(),
            dir: self.dir.try_clone()?,
            data,
            record: open_file(&self.dir, RECORD, OFlags::RDWR)?,
            size: self.size,
            is_sealed: self.is_sealed,
        })
    }

    /// Its descriptors.
    pub fn descriptors(&self) -> [std::os::fd::BorrowedFd<'_>; 3] {
        [self.dir.as_fd(), self.data.as_fd(), self.record.as_fd()]
    }

    /// Descriptors that can only read it.
    pub fn open_read_only(&self) -> io::Result<(File, File)> {
        let data = open_file(&self.dir, DATA, OFlags::RDONLY)?;
        if !lock_shared(&data) || fstat(&data)?.st_ino != fstat(&self.data)?.st_ino {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok((data, open_file(&self.dir, RECORD, OFlags::RDONLY)?))
    }

    /// Whether the record is that of the source. In a new boot of the node only what was on disk is good: the other marks go,
    /// and only when that is on disk as well, the record is of this boot.
    fn renew(&self, identity: &FileIdentity) -> io::Result<bool> {
        // One at a time: another process may be doing the same.
        lock_exclusive(&self.record)?;
        let renewed = self.renew_locked(identity);
        flock(&self.record, FlockOperation::Unlock)?;
        renewed
    }

    fn renew_locked(&self, identity: &FileIdentity) -> io::Result<bool> {
        let mut head = vec![0; HEAD as usize];
        self.record.read_exact_at(&mut head, 0)?;
        let Some(head) = Head::decode(&head).filter(|head| head.identity == *identity) else {
            return Ok(false);
        };
        let count = chunks(self.size);
        if self.record.metadata()?.len() != HEAD + count || count > MOST_CHUNKS {
            return Ok(false);
        }
        let boot = boot();
        if head.boot == boot {
            return Ok(!self.is_sealed || self.is_complete()?);
        }
        let mut marks = self.marks(0..count)?;
        if !are_marks(&marks) {
            return Ok(false);
        }
        marks.iter_mut().filter(|mark| **mark == WRITTEN).for_each(|mark| *mark = MISSING);
        self.record.write_all_at(&marks, HEAD)?;
        fdatasync(&self.record)?;
        let Some(head) = head.in_boot(boot).encode() else { return Ok(false) };
        self.record.write_all_at(&head, 0)?;
        fdatasync(&self.record)?;
        Ok(!self.is_sealed || marks.iter().all(|mark| *mark != MISSING))
    }

    /// The marks of these chunks.
    pub fn marks(&self, chunks: Range<u64>) -> io::Result<Vec<u8>> {
        marks_in(&self.record, chunks)
    }

    /// Whether a chunk is good.
    pub fn has(&self, chunk: u64) -> bool {
        self.marks(chunk..chunk + 1).is_ok_and(|marks| marks.first().is_some_and(|mark| is_good(*mark)))
    }

    /// Whether all of it is good.
    pub fn is_complete(&self) -> io::Result<bool> {
        Ok(self.marks(0..chunks(self.size))?.iter().all(|mark| is_good(*mark)))
    }

    /// How many bytes of it are good.
    pub fn present(&self) -> u64 {
        let marks = self.marks(0..chunks(self.size)).unwrap_or_default();
        present(&marks, self.size)
    }

    /// Takes the lock on a chunk, if no other process has it. It belongs to this object's descriptor.
    pub fn try_lock(&self, chunk: u64) -> bool {
        self.set_lock(chunk, libc::F_WRLCK)
    }

    /// Gives it back.
    pub fn unlock(&self, chunk: u64) {
        self.set_lock(chunk, libc::F_UNLCK);
    }

    fn set_lock(&self, chunk: u64, kind: libc::c_int) -> bool {
        let lock = libc::flock {
            l_type: kind as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: (HEAD + chunk) as libc::off_t,
            l_len: 1,
            l_pid: 0,
        };
        fcntl(&self.record, FcntlArg::F_OFD_SETLK(&lock)).is_ok()
    }

    /// Writes chunks whose locks the caller has, and marks them.
    pub fn keep(&self, chunks: Range<u64>, content: &[u8]) -> io::Result<()> {
        self.data.write_all_at(content, chunks.start * CHUNK)?;
        let marks = vec![WRITTEN; (chunks.end - chunks.start) as usize];
        self.record.write_all_at(&marks, HEAD + chunks.start)
    }

    /// Lets the disk begin to write what there is: there is less to wait for then in `sync`, which nobody can kill.
    pub fn start_writeback(&self) {
        // To the end of the file.
        sys::start_writeback(&self.data, 0, 0);
    }

    /// Has the disk write what there is, and marks that.
    pub fn sync(&self) -> io::Result<()> {
        let before = self.marks(0..chunks(self.size))?;
        if !before.contains(&WRITTEN) {
            return Ok(());
        }
        fdatasync(&self.data)?;
        let mut first = 0;
        for run in before.chunk_by(|one, next| one == next) {
            if run.first() == Some(&WRITTEN) {
                self.record.write_all_at(&vec![DURABLE; run.len()], HEAD + first)?;
            }
            first += run.len() as u64;
        }
        Ok(())
    }

    /// Has nobody use anything of it any more, in whatever process.
    pub fn make_void(&self, why: Void) {
        if self.record.write_all_at(&[why.encode()], VOID_AT).is_err() {
            // A record that cannot be read is void as well.
            ftruncate(&self.record, 0).or_debug("a copy in the making that cannot be trusted stays");
        }
    }

    /// Why nothing of it can be used, if that is so.
    pub fn void(&self) -> Option<Void> {
        void_in(&self.record)
    }

    /// Notes that somebody waits for a chunk now.
    pub fn note_demand(&self) {
        let _ = self.record.write_all_at(&now().to_ne_bytes(), DEMAND_AT);
    }

    /// How long nobody has waited for a chunk.
    pub fn quiet_for(&self) -> Duration {
        let mut last = [0; 8];
        match self.record.read_exact_at(&mut last, DEMAND_AT) {
            Ok(()) => Duration::from_millis(now().saturating_sub(u64::from_ne_bytes(last))),
            Err(_) => Duration::MAX,
        }
    }

    /// Removes its name and its files, when the data has another name or is of no use. Those who have it open keep it.
    pub fn remove(&self, cache: &Cache) {
        let is_named = statat(&cache.dir, format!("{}/{DATA}", self.name), AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|named| fstat(&self.data).is_ok_and(|stat| stat.st_ino == named.st_ino));
        if is_named {
            remove(cache, &self.name);
        }
    }
}

/// The marks of these chunks, in a record that is open.
pub fn marks_in(record: &File, chunks: Range<u64>) -> io::Result<Vec<u8>> {
    let mut marks = vec![MISSING; usize::try_from(chunks.end.saturating_sub(chunks.start)).unwrap_or(0)];
    record.read_exact_at(&mut marks, HEAD + chunks.start)?;
    Ok(marks)
}

/// Why nothing can be used of the copy with this record, if that is so. It costs a read of one byte; a mapping would cost nothing,
/// and a signal if the file is cut off.
pub fn void_in(record: &File) -> Option<Void> {
    let mut reason = [0];
    match record.read_exact_at(&mut reason, VOID_AT) {
        Ok(()) => Void::decode(reason[0]),
        Err(error) => Some(Void::Lost(error.raw_os_error().unwrap_or(libc::EIO))),
    }
}

/// Whether a chunk with this mark can be used: in a record of this boot that is not void.
pub fn is_good(mark: u8) -> bool {
    matches!(mark, WRITTEN | DURABLE)
}

/// How many bytes of a file of this size these marks stand for.
fn present(marks: &[u8], size: u64) -> u64 {
    let good = marks.iter().filter(|mark| is_good(**mark)).count() as u64 * CHUNK;
    let is_whole = !marks.last().is_some_and(|mark| is_good(*mark)) || size.is_multiple_of(CHUNK);
    if is_whole { good } else { good - CHUNK + size % CHUNK }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_millis() as u64)
}

/// Makes both files, and gives them their name.
fn begin(cache: &Cache, source: &SourceImage, limits: &Limits) -> Result<(), String> {
    let size = source.identity.size;
    let room = evict::reserve(cache, size, 0, limits)?;
    let unmade = |errno: Errno| format!("{}: {}", cache.path.display(), describe(errno));
    let head = Head::new(source.path, &source.identity, &boot()).encode().ok_or("its path is too long")?;
    let temporary = format!("{TEMPORARY}{}-{}", std::process::id(), now());
    mkdirat(&cache.dir, &*temporary, Mode::RWXU).map_err(unmade)?;
    let made = make(cache, &temporary, size, &head).and_then(|_locked| {
        match renameat(&cache.dir, &*temporary, &cache.dir, &*name_of(&source.identity)) {
            Ok(()) => Ok(fsync(&cache.dir)?),
            // Another process was faster.
            Err(Errno::NOTEMPTY | Errno::EXIST) => Err(Errno::EXIST),
            Err(errno) => Err(errno),
        }
    });
    drop(room);
    match made {
        Ok(()) => Ok(()),
        Err(errno) => {
            remove(cache, &temporary);
            if errno == Errno::EXIST { Ok(()) } else { Err(unmade(errno)) }
        }
    }
}

fn make(cache: &Cache, directory: &str, size: u64, head: &[u8]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = openat(&cache.dir, directory, flags, Mode::empty())?;
    // Whoever sweeps leaves it alone as long as we live.
    let _ = flock(&dir, FlockOperation::NonBlockingLockShared);
    let new = |name: &str| {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok::<File, Errno>(openat(&dir, name, flags, Mode::from_raw_mode(MODE))?.into())
    };
    ftruncate(&new(DATA)?, size)?;
    let record = new(RECORD)?;
    let write = |bytes: &[u8], at| {
        record.write_all_at(bytes, at).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    };
    write(head, 0)?;
    // Written, and not a hole: what a power loss can leave in it later is what was written there, or this.
    let zeros = vec![0; 64 << 10];
    let end = HEAD + chunks(size);
    let mut at = DEMAND_AT;
    while at < end {
        let piece = (end - at).min(zeros.len() as u64);
        write(&zeros[..piece as usize], at)?;
        at += piece;
    }
    fsync(&record)?;
    fsync(&dir)?;
    Ok(dir)
}

fn open_file(dir: &OwnedFd, name: &str, mode: OFlags) -> Result<File, Errno> {
    let flags = mode | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    openat(dir, name, flags, Mode::empty()).map(File::from)
}

fn lock_shared(file: &File) -> bool {
    (0..100).any(|_| {
        let locked = flock(file, FlockOperation::NonBlockingLockShared).is_ok();
        if !locked {
            std::thread::sleep(Duration::from_millis(10));
        }
        locked
    })
}

fn lock_exclusive(file: &File) -> io::Result<()> {
    for _ in 0..200 {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(Duration::from_millis(10)),
            locked => return Ok(locked?),
        }
    }
    Err(Errno::WOULDBLOCK.into())
}

/// Takes one that cannot be used out of the way.
pub fn set_aside(cache: &Cache, name: &str) {
    let aside = format!("{BROKEN}{name}-{}", now());
    renameat(&cache.dir, name, &cache.dir, &*aside).or_debug("a broken copy in the making stays");
}

/// Removes the directory of one: its files by name, in a directory that is the user's alone.
fn remove(cache: &Cache, name: &str) -> bool {
    // In one step for whoever looks for it.
    let aside = format!("{BROKEN}{name}-{}-{}", std::process::id(), now());
    if renameat(&cache.dir, name, &cache.dir, &*aside).is_err() {
        return false;
    }
    for file in [DATA, RECORD] {
        let _ = unlinkat(&cache.dir, format!("{aside}/{file}"), AtFlags::empty());
    }
    unlinkat(&cache.dir, &*aside, AtFlags::REMOVEDIR).is_ok()
}

/// One as the cache's directory shows it.
pub struct Listed {
    pub name: String,
    /// Its path, for people.
    pub source: String,
    /// Of the whole image.
    pub size: u64,
    /// How much of it is there.
    pub present: u64,
    /// What it takes on the disk.
    pub taken: u64,
    /// When it was last used, in seconds and nanoseconds since 1970.
    pub used: (i64, u64),
}

/// All of them. What has no record is listed without a source.
pub fn list(cache: &Cache) -> io::Result<Vec<Listed>> {
    let mut listed = Vec::new();
    for name in cache.names(PARTIAL)? {
        let Ok(stat) = statat(&cache.dir, format!("{name}/{DATA}"), AtFlags::SYMLINK_NOFOLLOW) else {
            continue;
        };
        let [size, blocks] = [stat.st_size, stat.st_blocks].map(|found| u64::try_from(found).unwrap_or(0));
        let (source, present) = read_record(cache, &name).unwrap_or_default();
        let (taken, used) = (blocks.saturating_mul(512), (stat.st_atime, stat.st_atime_nsec));
        listed.push(Listed { name, source, size, present, taken, used });
    }
    Ok(listed)
}

fn read_record(cache: &Cache, name: &str) -> Option<(String, u64)> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(openat(&cache.dir, format!("{name}/{RECORD}"), flags, Mode::empty()).ok()?);
    let length = file.metadata().ok()?.len();
    if length > HEAD + MOST_CHUNKS {
        return None;
    }
    let mut bytes = vec![0; usize::try_from(length).ok()?];
    file.read_exact_at(&mut bytes, 0).ok()?;
    let (head, marks) = decode(&bytes)?;
    let now = boot();
    let marks: Vec<u8> =
        marks.iter().map(|mark| if *mark == WRITTEN && head.boot != now { MISSING } else { *mark }).collect();
    Some((head.source, present(&marks, head.identity.size)))
}

/// Whether somebody uses it. If not, the caller has it locked until the file is closed, and nobody can open it.
pub fn in_use(cache: &Cache, name: &str) -> Result<Option<File>, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let data = File::from(openat(&cache.dir, format!("{name}/{DATA}"), flags, Mode::empty())?);
    match flock(&data, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(data)),
        Err(_) => Ok(None),
    }
}

/// Removes one unless somebody uses it.
pub fn remove_unused(cache: &Cache, name: &str) -> bool {
    match in_use(cache, name) {
        // Whoever opens it at this moment finds that it has lost its name.
        Ok(Some(_locked)) => remove(cache, name),
        Ok(None) => false,
        // No data: nothing that anybody uses.
        Err(_) => remove(cache, name),
    }
}

/// Removes those that nobody has come back to.
pub fn sweep(cache: &Cache) -> usize {
    let old = |listed: &Listed| {
        let used = UNIX_EPOCH + Duration::from_secs(u64::try_from(listed.used.0).unwrap_or(0));
        SystemTime::now().duration_since(used).is_ok_and(|age| age > FORGOTTEN)
    };
    let listed = list(cache).unwrap_or_default();
    listed.iter().filter(|listed| old(listed) && remove_unused(cache, &listed.name)).count()
}

#[cfg(test)]
mod tests;
