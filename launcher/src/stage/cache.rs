//! The copies of images on this node: a user's own, or those that root keeps for all. Runs as the user on the host, or as
//! root in root's own commands.
//!
//!     mizzen-UID/                  0700 (mizzen-UID.1 … where another user has taken the name), or 0755 and root's
//!       sha256-HEX                 an image, named by its content; appears only when it is complete and on disk
//!       source-KEY.json            which content a source has; KEY is computed from the source's identity
//!       source-KEY.lock            who copies that source now
//!       partial-KEY/               a copy in the making, from which the source is used meanwhile (`partial/mod.rs`)
//!       room.lock                  who evicts now
//!       temporary-…, broken-…      left by a crash; removed by the next eviction
//!
//! A process that uses one of its user's copies holds a lock on it through the descriptor that it reads from; the file server
//! keeps that descriptor while the container lives. Eviction checks the lock. Site copies can be opened and locked by anyone, so
//! their locks mean nothing: root asks the kernel (a write lease) whether one is open.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mizzen_core::failure::quote;
use mizzen_core::mountinfo::open_on_same_mount;
use mizzen_core::{Digest, Failure, trusted_file};
use nix::unistd::geteuid;
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_NOW,
    UTIME_OMIT, fchmod, flock, fstat, fsync, ftruncate, futimens, linkat, mkdirat, openat, renameat, statat,
    unlinkat,
};
use rustix::io::Errno;

use super::own_directory;
use super::source::{FileIdentity, Manifest};
use crate::image::shown;
use crate::sys;
use crate::trace::OrDebug;
use tracing::debug;

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
/// The mode of a user's copy, and of every copy until it is complete.
const MODE: u32 = 0o400;
/// The mode of one for all users.
const SHARED_MODE: u32 = 0o444;
/// The mode of the directory of those.
const SHARED_DIRECTORY_MODE: u32 = 0o755;
/// Whoever makes files here does so under this mask: under the user's own they might not even be the owner's to open.
pub const MASK: u32 = 0o022;
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

impl Unfinished {
    /// A file of the cache that has another name, which its maker looks after.
    pub fn of(file: File) -> Unfinished {
        Unfinished { file, name: None }
    }
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
        let (dir, path) = own_directory::open(directory)?;
        Ok(Cache { dir, path, shared: false })
    }

    /// Opens root's directory for all users, and makes it; as root, under [`MASK`]. It must be nobody else's: others could
    /// change what is in it.
    pub fn open_site(directory: &Path) -> Result<Cache, Failure> {
        let failed = |what: String| Failure::new(format!("{}: {what}", shown(directory)));
        trusted_file::check_only_roots(directory.parent().unwrap_or(directory))?;
        match mkdirat(CWD, directory, Mode::from_raw_mode(SHARED_DIRECTORY_MODE)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(failed(format!("cannot make the directory: {}", describe(errno)))),
        }
        let dir = open_directory(directory).map_err(|errno| unopened(directory, errno))?;
        let mode = fstat(&dir).map_err(|errno| failed(describe(errno)))?.st_mode & 0o7777;
        if mode != SHARED_DIRECTORY_MODE {
            return Err(failed(format!("has mode {mode:04o}, not {SHARED_DIRECTORY_MODE:04o}"))
                .hint(format!("chmod {SHARED_DIRECTORY_MODE:o} {}", shown(directory))));
        }
        trusted_file::check_only_roots(directory)?;
        Ok(Cache { dir, path: directory.to_owned(), shared: true })
    }

    /// Root's directory, if it is there, for others to look at. What others than root can change is not looked at.
    pub fn open_site_read_only(directory: &Path) -> Result<Option<Cache>, Failure> {
        let dir = match open_directory(directory) {
            Err(Errno::NOENT) => return Ok(None),
            opened => opened.map_err(|errno| unopened(directory, errno))?,
        };
        trusted_file::check_only_roots(directory)?;
        let stat = fstat(&dir).map_err(|errno| unopened(directory, errno))?;
        // Strictly: in a sticky directory others could make what is not there.
        if stat.st_uid != 0 || stat.st_mode & 0o022 != 0 {
            let mode = stat.st_mode & 0o7777;
            let what = format!("is not root's alone (uid {}, mode {mode:04o})", stat.st_uid);
            return Err(Failure::new(format!("{} {what}", shown(directory))));
        }
        Ok(Some(Cache { dir, path: directory.to_owned(), shared: true }))
    }

    /// The copy of a source, if there is one that can be used.
    pub fn find(&self, identity: &FileIdentity) -> Option<(File, Digest)> {
        let digest = self.digest_of(identity)?;
        let copy = self.open_copy(digest, identity.size)?;
        Some((copy, digest))
    }

    /// The content of a source, if it was copied.
    pub fn digest_of(&self, identity: &FileIdentity) -> Option<Digest> {
        let manifest = self.manifest(&manifest_name(identity))?;
        Digest::parse(&manifest.digest).filter(|_| manifest.identity == *identity)
    }

    /// Reads a manifest. A damaged one is as good as none: it is written again with the next copy.
    pub fn manifest(&self, name: &str) -> Option<Manifest> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(openat(&self.dir, name, flags, Mode::empty()).ok()?);
        let stat = fstat(&file).ok()?;
        if self.shared && (stat.st_uid != 0 || stat.st_mode & 0o022 != 0) {
            return None;
        }
        let mut text = Vec::new();
        file.take(MANIFEST_LIMIT)
            .read_to_end(&mut text)
            .or_debug("what is known of a copy cannot be read")?;
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

    /// Opens a copy, whatever is wrong with it.
    pub fn open_copy_unchecked(&self, digest: Digest) -> Result<File, Errno> {
        self.open_file(&copy_name(digest))
    }

    /// Opens a copy, and takes a shared lock on the user's own. One that is not as it was made is set aside.
    pub fn open_copy(&self, digest: Digest, size: u64) -> Option<File> {
        let name = copy_name(digest);
        let file = match self.open_file(&name) {
            Ok(file) => file,
            // Nothing that we would have put there.
            Err(Errno::LOOP | Errno::NXIO | Errno::ACCESS) => {
                self.set_aside(&name);
                return None;
            }
            Err(errno) => {
                debug!(name, %errno, "no copy is there");
                return None;
            }
        };
        let good = fstat(&file).is_ok_and(|stat| self.why_broken(&stat, Some(size)).is_none());
        if !good {
            self.set_aside(&name);
            return None;
        }
        if !self.shared && !lock_shared(&file) {
            return None;
        }
        // Marks it as used just now. A failure only makes it go earlier.
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let same = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
        let _ = futimens(&file, &Timestamps { last_access: now, last_modification: same });
        Some(file)
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
        debug!(name, "a broken file is set aside");
        renameat(&self.dir, name, &self.dir, aside.as_str()).or_debug("a broken file stays");
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
        // An unfinished site copy has a name, so that root's other commands see how large it will be.
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
    pub fn take(&self, directory: &Path, name: &str, size: u64) -> Result<Option<Unfinished>, Errno> {
        let all = open_place(directory)?;
        let Some(file) = open_beside(&all, name)? else { return Ok(None) };
        if u64::try_from(fstat(&file)?.st_size) != Ok(size) {
            return Ok(None);
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos());
        let temporary = format!("{TEMPORARY}{}-{now}", std::process::id());
        // Whoever makes room leaves it alone as long as we live.
        let _ = flock(&file, FlockOperation::NonBlockingLockShared);
        let dir = self.dir.try_clone().map_err(|_| Errno::MFILE)?;
        renameat(&all, name, &self.dir, temporary.as_str())?;
        Ok(Some(Unfinished { file, name: Some((temporary, dir)) }))
    }

    /// Gives a complete file its name, when all of it is on disk. A good copy that is there already stays.
    pub fn publish(&self, mut copy: Unfinished, digest: Digest, size: u64) -> Result<File, Errno> {
        fchmod(&copy.file, Mode::from_raw_mode(self.mode()))?;
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let untouched = Timespec { tv_sec: UNTOUCHED, tv_nsec: 0 };
        futimens(&copy.file, &Timestamps { last_access: now, last_modification: untouched })?;
        fsync(&copy.file)?;
        let name = copy_name(digest);
        // The second time, what was in the way has been set aside.
        for _ in 0..2 {
            if let Some(there) = self.open_copy(digest, size) {
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
        self.open_copy(digest, size).ok_or(Errno::NOENT)
    }

    /// Writes down which content a source has.
    pub fn write_manifest(&self, manifest: &Manifest) -> io::Result<()> {
        let name = manifest_name(&manifest.identity);
        let temporary = format!("{TEMPORARY}{}-{name}", std::process::id());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(if self.shared { 0o644 } else { 0o600 });
        let mut file = File::from(openat(&self.dir, &*temporary, flags, mode)?);
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

    /// The mode of a copy here.
    fn mode(&self) -> u32 {
        if self.shared { SHARED_MODE } else { MODE }
    }

    /// Why a file cannot be a copy that was made here; its size is compared if it is known.
    pub fn why_broken(&self, stat: &Stat, size: Option<u64>) -> Option<&'static str> {
        let owner = if self.shared { 0 } else { geteuid().as_raw() };
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            Some("not a file")
        } else if stat.st_uid != owner {
            Some("of another owner")
        } else if stat.st_mode & 0o7777 != self.mode() {
            Some("of another mode")
        } else if size.is_some_and(|size| u64::try_from(stat.st_size) != Ok(size)) {
            Some("of another size")
        } else if (stat.st_mtime, stat.st_mtime_nsec) != (UNTOUCHED, 0) {
            Some("written to since it was made")
        } else {
            None
        }
    }

    /// Whether somebody uses the file, or writes it. If not, the caller has an exclusive flock until it is closed: of locks
    /// and of users' own copies. Whoever has one of root's copies open uses it, locked or not.
    pub fn in_use(&self, file: impl AsFd) -> bool {
        flock(&file, FlockOperation::NonBlockingLockExclusive).is_err()
            || self.shared && sys::is_open_elsewhere(file)
    }
}

fn open_directory(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(CWD, path, flags, Mode::empty())
}

/// The directory in which all users have theirs. They need not be able to list it.
pub fn open_place(directory: &Path) -> Result<OwnedFd, Errno> {
    openat(CWD, directory, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// Opens what slurmd has made there for the user: a file of theirs that has no other name, and is open to nobody else. Others can make
/// names there, and mount on them: nothing is asked of what is not the user's file. Nor is it enough that it is theirs. Who may write
/// to a file of the user's can have made it a name, and a link of that is renamed by whoever can write to the link's directory.
pub fn open_beside(all: &OwnedFd, name: &str) -> Result<Option<File>, Errno> {
    let found = match open_on_same_mount(all.as_fd(), name.as_ref()) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
    };
    let stat = fstat(&found)?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
        return Err(Errno::LOOP);
    }
    let usable = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
        && stat.st_uid == geteuid().as_raw()
        && stat.st_mode & 0o077 == 0
        && stat.st_nlink == 1;
    if !usable {
        return Err(Errno::PERM);
    }
    let opened = format!("/proc/self/fd/{}", found.as_raw_fd());
    Ok(Some(openat(CWD, &*opened, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?.into()))
}

fn unopened(directory: &Path, errno: Errno) -> Failure {
    let what = match errno {
        Errno::LOOP | Errno::NOTDIR => "is not a directory".to_owned(),
        errno => format!("cannot open it: {}", describe(errno)),
    };
    Failure::new(format!("{}: {what}", shown(directory)))
}

/// The manifest of a source.
pub fn manifest_name(identity: &FileIdentity) -> String {
    format!("{SOURCE}{}.json", identity.key())
}

/// The file of a content.
pub fn copy_name(digest: Digest) -> String {
    format!("{COPY}{}", digest.hex())
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
