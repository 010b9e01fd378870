//! A file that appears under its name when it is complete and on disk, or not at all.
//!
//! Where the file system can do it, it has no name before, and nothing is left whatever happens. Elsewhere (NFS, Lustre, old
//! overlays) it has a temporary name, which goes with its owner; after SIGKILL a later run in that directory removes it.
//!
//! Run by: the user, in the importer.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mizzen_core::fs_server::{reach, refuse_foreign};
use mizzen_core::image::special;
use mizzen_core::mountinfo::open_on_same_mount;
use mizzen_core::{Digest, Failure};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, fstat, fsync, linkat, openat, renameat, renameat_with,
    unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;
use sha2::{Digest as _, Sha256};

use crate::interrupt::OnInterrupt;
use crate::shown;

/// Begins every temporary name.
pub const TEMPORARY: &str = ".mizzen-tmp-";
/// Digits of the hash that marks the temporary names of a file.
const TAG: usize = 12;
/// Less the user's mask. Nobody writes into an image that is complete, so no group may either.
const MODE: u32 = 0o644;
/// Nobody writes to a temporary file for so long who still lives.
const ABANDONED: Duration = Duration::from_secs(24 * 3600);

/// What happens if there is a file under the name already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// It is a failure.
    Refuse,
    /// The new file takes its place, at once and as a whole.
    Replace,
}

impl Existing {
    /// As `--force` says.
    pub fn with_force(force: bool) -> Existing {
        if force { Existing::Replace } else { Existing::Refuse }
    }
}

/// A file that has no name yet.
pub struct Draft {
    file: File,
    directory: OwnedFd,
    path: PathBuf,
    temporary: Option<Temporary>,
}

/// A draft whose name is known from the beginning.
pub struct OutputFile {
    draft: Draft,
    name: OsString,
    existing: Existing,
}

impl OutputFile {
    /// Begins the file `path`. What can be known to fail at the end fails now.
    pub fn create(path: &Path, existing: Existing) -> Result<OutputFile, Failure> {
        let name = path.file_name().ok_or_else(|| not_a_file(path))?;
        if path.as_os_str().as_bytes().ends_with(b"/") {
            return Err(not_a_file(path));
        }
        check_existing(path, existing)?;
        let draft = Draft::create(directory_of(path), &tag(name), true)?;
        Ok(OutputFile { draft, name: name.to_owned(), existing })
    }

    /// What to write to.
    pub fn file(&self) -> &File {
        self.draft.file()
    }

    /// Gives it its name, when all of it is on disk.
    pub fn publish(self) -> Result<(), Failure> {
        self.draft.publish(&self.name, self.existing)
    }

    /// Gives it its name at once: for what is compared with digests whenever it is read, and can be made again. After a loss of
    /// power it may be damaged.
    pub fn publish_unsynced(mut self) -> Result<(), Failure> {
        self.draft.give_name(&self.name, self.existing)
    }
}

impl Draft {
    /// Begins a file in this directory.
    pub fn create_in(directory: &Path) -> Result<Draft, Failure> {
        Draft::create(directory, "draft", true)
    }

    /// The same; `tag` marks the temporary name, and there is one in any case unless `nameless`.
    fn create(directory: &Path, tag: &str, nameless: bool) -> Result<Draft, Failure> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = openat(CWD, directory, flags, Mode::empty());
        let dir = opened.map_err(|errno| no_directory(directory, errno))?;
        let failed = |errno: Errno| write_failure(directory, "cannot make a file in it", errno.into());
        if nameless && let Some(file) = create_nameless(&dir).map_err(failed)? {
            return Ok(Draft { file, directory: dir, path: directory.to_owned(), temporary: None });
        }
        sweep(directory);
        let (file, temporary) = Temporary::create(&dir, directory, tag).map_err(failed)?;
        Ok(Draft { file, directory: dir, path: directory.to_owned(), temporary: Some(temporary) })
    }

    /// What to write to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Gives it a name in its directory, when all of it is on disk.
    pub fn publish(mut self, name: &OsStr, existing: Existing) -> Result<(), Failure> {
        let path = self.path.join(name);
        let failed = |what: &'static str| {
            let path = path.clone();
            move |errno: Errno| write_failure(&path, what, errno.into())
        };
        fsync(&self.file).map_err(failed("cannot write it to disk"))?;
        self.give_name(name, existing)?;
        sync_directory(&self.directory).map_err(failed("cannot write its name to disk"))
    }

    fn give_name(&mut self, name: &OsStr, existing: Existing) -> Result<(), Failure> {
        let path = self.path.join(name);
        match self.temporary.take() {
            Some(temporary) => temporary.rename(&self.directory, name, existing),
            None => self.link(name, existing),
        }
        .map_err(|errno| match errno {
            Errno::EXIST => already_there(&path),
            errno => write_failure(&path, "cannot give it its name", errno.into()),
        })
    }

    /// Gives it a name that nobody has, or fails: also where several try it at the same time. Not all file systems can do it.
    pub(crate) fn publish_exclusively(self, name: &OsStr) -> Result<File, Errno> {
        match &self.temporary {
            Some(temporary) => {
                linkat(&self.directory, &*temporary.name, &self.directory, name, AtFlags::empty())?
            }
            None => self.link(name, Existing::Refuse)?,
        }
        Ok(self.file)
    }

    /// Links a nameless file. A link cannot replace another, so that needs a temporary name after all.
    fn link(&self, name: &OsStr, existing: Existing) -> Result<(), Errno> {
        let nameless = descriptor_path(&self.file);
        match linkat(CWD, &nameless, &self.directory, name, AtFlags::SYMLINK_FOLLOW) {
            Err(Errno::EXIST) if existing == Existing::Replace => {}
            done => return done,
        }
        let temporary = Temporary::reserve(&self.path, "draft");
        linkat(CWD, &nameless, &self.directory, &*temporary.name, AtFlags::SYMLINK_FOLLOW)?;
        temporary.rename(&self.directory, name, existing)
    }
}

/// A file without a name; None where the file system, or the process, cannot have one.
fn create_nameless(dir: impl AsFd) -> Result<Option<File>, Errno> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    match openat(dir, ".", flags, Mode::from_raw_mode(MODE)) {
        Ok(file) => {
            let file = File::from(file);
            // Without /proc it could never get a name.
            Ok(fs::exists(descriptor_path(&file)).unwrap_or(false).then_some(file))
        }
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

fn descriptor_path(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// A temporary name, which goes away with this.
struct Temporary {
    path: PathBuf,
    name: String,
    _on_interrupt: OnInterrupt,
}

impl Temporary {
    /// A name that nobody has; not yet a file.
    fn reserve(directory: &Path, tag: &str) -> Temporary {
        let name = temporary_name(tag);
        let path = directory.join(&name);
        let own = path.clone();
        let remove = move || drop(fs::remove_file(&own));
        Temporary { path, name, _on_interrupt: OnInterrupt::new(remove) }
    }

    fn create(dir: impl AsFd, directory: &Path, tag: &str) -> Result<(File, Temporary), Errno> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let temporary = Temporary::reserve(directory, tag);
        let file = openat(&dir, &*temporary.name, flags, Mode::from_raw_mode(MODE))?;
        Ok((file.into(), temporary))
    }

    /// Gives its file the name that it is for.
    fn rename(self, dir: impl AsFd, name: &OsStr, existing: Existing) -> Result<(), Errno> {
        if existing == Existing::Replace {
            return renameat(&dir, &*self.name, &dir, name);
        }
        match renameat_with(&dir, &*self.name, &dir, name, RenameFlags::NOREPLACE) {
            // NFS does not know the flag.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
            done => return done,
        }
        // The temporary name goes when this is dropped.
        match linkat(&dir, &*self.name, &dir, name, AtFlags::empty()) {
            // Nor does everybody know links. Between the look and the rename somebody may still make the name.
            Err(errno) if lacks_links(errno) => match open_on_same_mount(dir.as_fd(), name) {
                Ok(_) => Err(Errno::EXIST),
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::NOENT) => renameat(&dir, &*self.name, &dir, name),
                    Some(Errno::XDEV) => Err(Errno::EXIST),
                    errno => Err(errno.unwrap_or(Errno::IO)),
                },
            },
            done => done,
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // Mostly it has its real name by now.
        let _ = fs::remove_file(&self.path);
    }
}

/// Whether a link could not be made because the file system has none.
pub(crate) fn lacks_links(errno: Errno) -> bool {
    [Errno::PERM, Errno::NOSYS, Errno::OPNOTSUPP, Errno::MLINK].contains(&errno)
}

/// Marks the temporary names of a file.
pub(crate) fn tag(name: &OsStr) -> String {
    let hash: [u8; 32] = Sha256::digest(name.as_bytes()).into();
    Digest::new(hash).hex()[..TAG].to_owned()
}

/// A new name each time, on all machines that share the directory.
pub fn temporary_name(tag: &str) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos());
    let (host, count) = (mizzen_core::node_name(), COUNT.fetch_add(1, Ordering::Relaxed));
    let host: String = host.chars().filter(char::is_ascii_alphanumeric).take(32).collect();
    format!("{TEMPORARY}{tag}-{host}-{}-{now}-{count}", std::process::id())
}

/// What the file system's clock says. Only that can be compared with the times of files: machines differ.
pub fn file_system_time(directory: &Path) -> io::Result<SystemTime> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = openat(CWD, directory, flags, Mode::empty())?;
    if let Some(file) = create_nameless(&dir)? {
        return file.metadata()?.modified();
    }
    let (file, _temporary) = Temporary::create(&dir, directory, "clock")?;
    file.metadata()?.modified()
}

/// Removes the user's own temporary files that nobody has written to for a day.
pub fn sweep(directory: &Path) -> usize {
    let Ok(now) = file_system_time(directory) else { return 0 };
    let is_old = |modified: SystemTime| now.duration_since(modified).is_ok_and(|age| age > ABANDONED);
    remove_temporary(directory, TEMPORARY, is_old)
}

/// Removes the temporary files of an [`OutputFile`] of this name. To be called by those who know that nobody else writes it.
pub fn remove_leftovers(path: &Path) -> usize {
    let (directory, name) = (path.parent().unwrap_or(Path::new(".")), path.file_name().unwrap_or_default());
    remove_temporary(directory, &format!("{TEMPORARY}{}-", tag(name)), |_| true)
}

fn remove_temporary(directory: &Path, prefix: &str, is_meant: impl Fn(SystemTime) -> bool) -> usize {
    let (Ok(dir), Ok(entries)) = (File::open(directory), fs::read_dir(directory)) else { return 0 };
    let names = entries.flatten().map(|entry| entry.file_name());
    let named = names.filter(|name| name.as_bytes().starts_with(prefix.as_bytes()));
    // In some directories everybody can make such names, and mount something on them.
    let is_left = |name: &OsString| {
        let Ok(found) = look_at(&dir, name) else { return false };
        found.uid() == geteuid().as_raw() && found.is_file() && found.modified().is_ok_and(&is_meant)
    };
    named.filter(is_left).filter(|name| unlinkat(&dir, name, AtFlags::empty()).is_ok()).count()
}

/// What has this name in a directory. Nothing is asked of what is mounted there, whose server may never answer: EXDEV.
fn look_at(dir: impl AsFd, name: &OsStr) -> io::Result<Metadata> {
    File::from(open_on_same_mount(dir.as_fd(), name)?).metadata()
}

/// Some file systems do not sync directories, and need not.
pub fn sync_directory(dir: impl AsFd) -> Result<(), Errno> {
    match fsync(dir) {
        Err(Errno::INVAL | Errno::BADF | Errno::ROFS) => Ok(()),
        done => done,
    }
}

/// Where the file of this path is, or will be.
fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Refuses a name under which there is something that must stay, before anything is done for it.
pub fn check_existing(path: &Path, existing: Existing) -> Result<(), Failure> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = openat(CWD, directory_of(path), flags, Mode::empty()).map_err(io::Error::from);
    let looked = match path.file_name() {
        Some(name) => opened.and_then(|directory| look_at(directory, name)),
        None => path.symlink_metadata(),
    };
    let found = match looked {
        Err(error) if Errno::from_io_error(&error) == Some(Errno::XDEV) => {
            refuse_foreign(path)?;
            reach(path).and_then(|found| found.metadata())
        }
        looked => looked,
    };
    let found = match found {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(write_failure(path, "cannot write it", error)),
    };
    match (existing, special(found.file_type())) {
        _ if found.is_dir() => Err(Failure::new(format!("{}: is a directory", shown(path)))
            .hint("write the name of the file behind it: -o DIRECTORY/NAME.sqsh")),
        // A rename would put a file in the place of a device.
        (_, Some(kind)) if !found.is_symlink() => {
            Err(Failure::new(format!("{}: is a {kind}, and no file can take its place", shown(path))))
        }
        (Existing::Refuse, _) => Err(already_there(path)),
        (Existing::Replace, _) => Ok(()),
    }
}

fn already_there(path: &Path) -> Failure {
    Failure::new(format!("{}: is there already", shown(path)))
        .hint("--force replaces it; -o names another file")
}

fn not_a_file(path: &Path) -> Failure {
    Failure::new(format!("{}: not the name of a file", shown(path))).hint("write -o DIRECTORY/NAME.sqsh")
}

fn no_directory(directory: &Path, errno: Errno) -> Failure {
    let failure = Failure::caused_by(format!("{}: cannot open the directory", shown(directory)), errno);
    match errno {
        Errno::NOENT => failure.hint(format!("make it first: mkdir -p {}", shown(directory))),
        Errno::ACCESS => failure.hint("you need permission to read and to write it"),
        _ => failure,
    }
}

/// Why a file could not be written, and what to do about it.
pub fn write_failure(path: &Path, what: &str, error: io::Error) -> Failure {
    let errno = Errno::from_io_error(&error);
    let failure = Failure::caused_by(format!("{}: {what}", shown(path)), error);
    let directory = path.parent().filter(|_| !path.is_dir()).unwrap_or(path);
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    match errno {
        Some(Errno::NOSPC) => failure.hint(format!(
            "the file system is full (df -h {0}; df -i {0}); `mizzen images prune` removes old images, -o names another place",
            shown(directory)
        )),
        Some(Errno::DQUOT) => failure.hint(
            "your quota there is used up; `mizzen images prune` removes old images, -o names another place",
        ),
        Some(Errno::ROFS) => failure.hint("the file system is mounted read-only here; -o names another place"),
        Some(Errno::ACCESS | Errno::PERM) => failure
            .hint(format!("you need write permission for the directory {}; -o names another place", shown(directory))),
        _ => failure,
    }
}

/// Whether an open file is what this user's process makes: a file, nobody else's, and not for others to write. Its directory has been
/// checked, so it lies on no file system of another user's, who could say so of any file.
pub fn is_own_file(file: impl AsFd) -> bool {
    fstat(file).is_ok_and(|stat| {
        FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
            && stat.st_uid == geteuid().as_raw()
            && stat.st_mode & 0o022 == 0
    })
}

#[cfg(test)]
mod tests;
