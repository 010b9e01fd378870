//! The copies of images on this node: a user's own, or those that root keeps for all. Runs as the user on the host, or as
//! root, in the storekeeper (`store.rs`) and in root's own commands.
//!
//!     mizzen-UID/                  0700, or 0755 and root's
//!       sha256-HEX                 an image, named by its content; appears only when it is complete and on disk
//!       source-KEY.json            which content a source has; KEY is computed from the source's identity
//!       source-KEY.lock            who copies that source now
//!       room.lock                  who makes room now
//!       temporary-…, broken-…      nobody's; removed when room is made
//!       mount                      root's: where the kernel's mount of an image goes, in a step's own mount namespace
//!
//! Whoever uses a copy has a lock on it through the descriptor that it is read by, which the file server or the loop
//! device keeps as long as the container lives. Whoever removes one sees it. In a user's own folder that is a flock. In the
//! shared one it is a lock on a range of the file (`F_OFD_SETLK`): who can only read a file cannot lock others out by it,
//! as he could with an exclusive flock.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mizzen_core::failure::quote;
use mizzen_core::{Digest, Failure, config};
use nix::fcntl::{FcntlArg, fcntl};
use nix::unistd::geteuid;
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_NOW,
    UTIME_OMIT, fchmod, flock, fstat, fsync, ftruncate, futimens, linkat, mkdirat, openat, renameat, statat,
    unlinkat,
};
use rustix::io::Errno;

use super::source::{Identity, Manifest};
use crate::image::shown;
use crate::sys;

/// Begins the name of a copy.
pub const COPY: &str = "sha256-";
/// Begins the name of an unfinished copy, where the file system has no nameless files.
pub const TEMPORARY: &str = "temporary-";
/// Begins the name of what was found damaged.
pub const BROKEN: &str = "broken-";
/// Begins the names of what belongs to a source.
pub const SOURCE: &str = "source-";

/// Every copy has this time of modification, in seconds: a file that somebody has written to has another. (The time
/// of access is ours too, and tells when it was last used.)
const UNTOUCHED: i64 = 1;
/// The mode of a copy.
const MODE: u32 = 0o400;
/// A longer manifest is none of ours.
const MANIFEST_LIMIT: u64 = 64 << 10;

/// A directory of copies.
pub struct Cache {
    pub dir: OwnedFd,
    pub path: PathBuf,
    /// Whether it is root's, for all users.
    pub shared: bool,
}

/// The beginning of a copy: nameless, or with a temporary name that goes away with this.
pub struct Unfinished {
    pub file: File,
    name: Option<(String, OwnedFd)>,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some((name, dir)) = &self.name {
            let _ = unlinkat(dir, name.as_str(), AtFlags::empty());
        }
    }
}

impl Cache {
    /// Opens the user's directory, and makes it.
    pub fn open(directory: &Path) -> Result<Cache, Failure> {
        Cache::open_directory(directory.join(format!("mizzen-{}", geteuid())), 0o700, false)
    }

    /// Opens root's directory for all users, and makes it; as root.
    pub fn open_shared(directory: &Path) -> Result<Cache, Failure> {
        config::check_only_roots(directory.parent().unwrap_or(directory))?;
        let cache = Cache::open_directory(directory.to_owned(), 0o755, true)?;
        config::check_only_roots(directory)?;
        Ok(cache)
    }

    /// Root's directory, if it is there, for others to look at.
    pub fn look_at_shared(directory: &Path) -> Option<Cache> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = openat(CWD, directory, flags, Mode::empty()).ok()?;
        Some(Cache { dir, path: directory.to_owned(), shared: true })
    }

    /// It must be nobody else's: others could change what is in it.
    fn open_directory(path: PathBuf, mode: u32, shared: bool) -> Result<Cache, Failure> {
        let failed = |what: String| Failure::new(format!("{}: {what}", shown(&path)));
        match mkdirat(CWD, &path, Mode::from_raw_mode(mode)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(failed(format!("cannot make the directory: {}", describe(errno)))),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = openat(CWD, &path, flags, Mode::empty()).map_err(|errno| {
            failed(match errno {
                Errno::LOOP | Errno::NOTDIR => "is not a directory".to_owned(),
                errno => format!("cannot open it: {}", describe(errno)),
            })
        })?;
        let stat = fstat(&dir).map_err(|errno| failed(describe(errno)))?;
        if stat.st_uid != geteuid().as_raw() {
            return Err(failed(format!("belongs to uid {}, not to you", stat.st_uid)));
        }
        let found = stat.st_mode & 0o7777;
        if found != mode {
            return Err(failed(format!("has mode {found:04o}, not {mode:04o}"))
                .hint(format!("chmod {mode:o} {}", shown(&path))));
        }
        Ok(Cache { dir, path, shared })
    }

    /// The copy of a source, if there is one that can be used.
    pub fn find(&self, identity: &Identity) -> Option<(File, Digest)> {
        let name = manifest_name(identity);
        let manifest = self.manifest(&name).filter(|manifest| manifest.identity == *identity)?;
        let digest = Digest::parse(&manifest.digest)?;
        let copy = self.copy(digest, identity.size)?;
        Some((copy, digest))
    }

    /// Reads a manifest. A damaged one is as good as none: it is written again with the next copy.
    pub fn manifest(&self, name: &str) -> Option<Manifest> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(openat(&self.dir, name, flags, Mode::empty()).ok()?);
        let mut text = Vec::new();
        file.take(MANIFEST_LIMIT).read_to_end(&mut text).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Whether there is a file for this digest.
    pub fn has_copy(&self, digest: &str) -> bool {
        let name = Digest::parse(digest).map(copy_name);
        name.is_some_and(|name| statat(&self.dir, &*name, AtFlags::SYMLINK_NOFOLLOW).is_ok())
    }

    /// Where a copy is.
    pub fn copy_path(&self, digest: Digest) -> PathBuf {
        self.path.join(copy_name(digest))
    }

    /// Opens a copy and takes a shared lock on it. One that is not as it was made is set aside.
    pub fn copy(&self, digest: Digest, size: u64) -> Option<File> {
        let name = copy_name(digest);
        let file = match self.open_file(&name) {
            Ok(file) => file,
            // Nothing that we would have put there.
            Err(Errno::LOOP | Errno::NXIO | Errno::ACCESS) => {
                self.set_aside(&name);
                return None;
            }
            Err(_) => return None,
        };
        let good = fstat(&file).is_ok_and(|stat| why_broken(&stat, Some(size)).is_none());
        if !good {
            self.set_aside(&name);
            return None;
        }
        if !self.lock_for_use(&file) {
            return None;
        }
        // Marks it as used just now. A failure only makes it go earlier.
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let same = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
        let _ = futimens(&file, &Timestamps { last_access: now, last_modification: same });
        Some(file)
    }

    fn lock_for_use(&self, file: &File) -> bool {
        if self.shared {
            return fcntl(file, FcntlArg::F_OFD_SETLK(&range_lock(libc::F_RDLCK))).is_ok();
        }
        lock_shared(file)
    }

    /// Opens a file here, never a link, and without waiting for whoever looks whether it is in use.
    pub fn open_file(&self, name: &str) -> Result<File, Errno> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        for _ in 0..100 {
            match openat(&self.dir, name, flags, Mode::empty()) {
                Err(Errno::AGAIN) => std::thread::sleep(Duration::from_millis(10)),
                opened => return opened.map(File::from),
            }
        }
        Err(Errno::AGAIN)
    }

    /// Takes a damaged or foreign file out of the way; who has it open keeps it.
    pub fn set_aside(&self, name: &str) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos());
        let aside = format!("{BROKEN}{}-{now}", name.trim_start_matches(COPY));
        // Another process may have done it.
        let _ = renameat(&self.dir, name, &self.dir, aside.as_str());
    }

    /// A new file on the cache's disk, which has the size of the copy from the beginning: where it has a name, as in the shared
    /// directory, others see what is still to come.
    pub fn begin(&self, size: u64) -> Result<Unfinished, Errno> {
        let unfinished = self.create()?;
        ftruncate(&unfinished.file, size)?;
        Ok(unfinished)
    }

    fn create(&self) -> Result<Unfinished, Errno> {
        let mode = Mode::from_raw_mode(MODE);
        // A nameless file gets its name through /proc, which the storekeeper does not see.
        let nameless = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        match (!self.shared).then(|| openat(&self.dir, ".", nameless, mode)) {
            Some(Ok(file)) => return Ok(Unfinished { file: file.into(), name: None }),
            // File systems without nameless files.
            None | Some(Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT)) => {}
            Some(Err(errno)) => return Err(errno),
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos());
        let name = format!("{TEMPORARY}{}-{now}", std::process::id());
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = File::from(openat(&self.dir, name.as_str(), flags, mode)?);
        // Whoever makes room leaves it alone as long as we live.
        let _ = flock(&file, FlockOperation::NonBlockingLockShared);
        let dir = self.dir.try_clone().map_err(|_| Errno::MFILE)?;
        Ok(Unfinished { file, name: Some((name, dir)) })
    }

    /// Takes a file that somebody has put beside the user's directory, as the beginning of a copy. None if it is not there,
    /// or not of this size.
    pub fn take(&self, path: &Path, size: u64) -> Result<Option<Unfinished>, Errno> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match openat(CWD, path, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        let stat = fstat(&file)?;
        let usable = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
            && stat.st_uid == geteuid().as_raw()
            && stat.st_nlink == 1
            && u64::try_from(stat.st_size) == Ok(size);
        if !usable {
            return Ok(None);
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos());
        let name = format!("{TEMPORARY}{}-{now}", std::process::id());
        // Whoever makes room leaves it alone as long as we live.
        let _ = flock(&file, FlockOperation::NonBlockingLockShared);
        let dir = self.dir.try_clone().map_err(|_| Errno::MFILE)?;
        renameat(CWD, path, &self.dir, name.as_str())?;
        Ok(Some(Unfinished { file, name: Some((name, dir)) }))
    }

    /// Gives a complete file its name, when all of it is on disk. A good copy that is there already stays.
    pub fn publish(&self, mut copy: Unfinished, digest: Digest, size: u64) -> Result<File, Errno> {
        fchmod(&copy.file, Mode::from_raw_mode(MODE))?;
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let untouched = Timespec { tv_sec: UNTOUCHED, tv_nsec: 0 };
        futimens(&copy.file, &Timestamps { last_access: now, last_modification: untouched })?;
        fsync(&copy.file)?;
        let name = copy_name(digest);
        // The second time, what was in the way has been set aside.
        for _ in 0..2 {
            if let Some(there) = self.copy(digest, size) {
                return Ok(there);
            }
            let linked = match &copy.name {
                Some((temporary, _)) => {
                    linkat(&self.dir, temporary.as_str(), &self.dir, &*name, AtFlags::empty())
                }
                None => {
                    let nameless = format!("/proc/self/fd/{}", copy.file.as_raw_fd());
                    linkat(CWD, &*nameless, &self.dir, &*name, AtFlags::SYMLINK_FOLLOW)
                }
            };
            match linked {
                Ok(()) => break,
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
        }
        if let Some((temporary, _)) = copy.name.take() {
            let _ = unlinkat(&self.dir, temporary.as_str(), AtFlags::empty());
        }
        fsync(&self.dir)?;
        // Through a descriptor that cannot write.
        self.copy(digest, size).ok_or(Errno::NOENT)
    }

    /// Writes down which content a source has.
    pub fn write_manifest(&self, manifest: &Manifest) -> io::Result<()> {
        let name = manifest_name(&manifest.identity);
        let temporary = format!("{TEMPORARY}{}-{name}", std::process::id());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(openat(&self.dir, &*temporary, flags, Mode::from_raw_mode(0o600))?);
        let _ = flock(&file, FlockOperation::NonBlockingLockShared);
        let written = file.write_all(&serde_json::to_vec(manifest)?).and_then(|()| file.sync_all());
        let done = written.and_then(|()| Ok(renameat(&self.dir, &*temporary, &self.dir, &*name)?));
        if done.is_err() {
            let _ = unlinkat(&self.dir, &*temporary, AtFlags::empty());
        }
        done?;
        Ok(fsync(&self.dir)?)
    }

    /// All names that begin so.
    pub fn names(&self, prefix: &str) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.dir)? {
            let name: CString = entry?.file_name().to_owned();
            names.extend(name.into_string().ok().filter(|name| name.starts_with(prefix)));
        }
        Ok(names)
    }

    /// Removes a file by name.
    pub fn remove(&self, name: &str) -> Result<(), Errno> {
        unlinkat(&self.dir, name, AtFlags::empty())
    }
}

/// The manifest of a source.
pub fn manifest_name(identity: &Identity) -> String {
    format!("{SOURCE}{}.json", identity.key())
}

/// The file of a content.
pub fn copy_name(digest: Digest) -> String {
    format!("{COPY}{}", digest.hex())
}

/// Why a file cannot be a copy that we have made; its size is compared if it is known.
pub fn why_broken(stat: &Stat, size: Option<u64>) -> Option<&'static str> {
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        Some("not a file")
    } else if stat.st_uid != geteuid().as_raw() {
        Some("of another owner")
    } else if stat.st_mode & 0o7777 != MODE {
        Some("of another mode")
    } else if size.is_some_and(|size| u64::try_from(stat.st_size) != Ok(size)) {
        Some("of another size")
    } else if (stat.st_mtime, stat.st_mtime_nsec) != (UNTOUCHED, 0) {
        Some("written to since it was made")
    } else {
        None
    }
}

/// A lock on the first byte of a file, held through its descriptor.
fn range_lock(kind: i32) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 1,
        l_pid: 0,
    }
}

/// Whether somebody uses the file, or writes it. If not, the caller has an exclusive flock until it is closed.
pub fn in_use(file: impl AsFd, shared: bool) -> bool {
    let mut other = range_lock(libc::F_WRLCK);
    let looked = fcntl(&file, FcntlArg::F_OFD_GETLK(&mut other));
    looked.is_ok() && i32::from(other.l_type) != libc::F_UNLCK
        || flock(&file, FlockOperation::NonBlockingLockExclusive).is_err()
        // In the shared cache a user could give up the lock and keep the file.
        || shared && sys::is_open_elsewhere(file)
}

/// Who removes or looks at a copy has it locked for a moment only.
fn lock_shared(file: &File) -> bool {
    for _ in 0..100 {
        match flock(file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => return true,
            Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(Duration::from_millis(10)),
            Err(_) => return false,
        }
    }
    false
}

/// The system's words for an error.
pub fn describe(errno: Errno) -> String {
    quote(mizzen_core::failure::cause(&io::Error::from(errno)).as_bytes())
}
