//! A directory on disk as an image. Runs as the user on the host.
//!
//! The directory may change while we look, and its links may point anywhere, so no path is ever handed to the
//! kernel: one component is opened after the other, relative to the one before, and never through a link
//! (O_NOFOLLOW). That also keeps out the magic links of /proc, which only the kernel can follow. openat2
//! could do it in one call, but is missing before Linux 5.6 and sometimes forbidden by seccomp; the few files
//! we look at do not need a second way.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::{Entry, LIST_LIMIT, ReadAt, Tree};

/// A root file system in a directory.
#[derive(Debug)]
pub struct DirectoryTree {
    root: OwnedFd,
}

/// An entry's directory, and its name in it; the root itself has no name.
enum Place<'a> {
    Root,
    In(OwnedFd, &'a OsStr),
}

const STEP: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

impl DirectoryTree {
    /// The tree below `path`, whose own links are followed: the user named it.
    pub fn open(path: &Path) -> io::Result<DirectoryTree> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(DirectoryTree { root: rustix::fs::open(path, flags, Mode::empty())? })
    }

    /// The tree below a directory that is already open.
    pub fn from_file(directory: impl AsFd) -> io::Result<DirectoryTree> {
        Ok(DirectoryTree { root: directory.as_fd().try_clone_to_owned()? })
    }

    /// Walks to the directory that holds the last component.
    fn place<'a>(&self, path: &'a Path) -> io::Result<Place<'a>> {
        let mut names = Vec::new();
        for component in path.components() {
            match component {
                Component::Normal(name) => names.push(name),
                Component::RootDir | Component::CurDir => {}
                Component::ParentDir | Component::Prefix(_) => return Err(Errno::INVAL.into()),
            }
        }
        let Some(last) = names.pop() else { return Ok(Place::Root) };
        let mut directory = self.root.try_clone()?;
        for name in names {
            directory = rustix::fs::openat(&directory, name, STEP, Mode::empty())?;
        }
        Ok(Place::In(directory, last))
    }

    /// Opens the thing itself for reading; never a link. `.` cannot leave a directory, not even the root.
    fn open_at(&self, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let flags = flags | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NOCTTY;
        match self.place(path)? {
            Place::Root => Ok(rustix::fs::openat(&self.root, ".", flags, Mode::empty())?),
            Place::In(directory, name) => Ok(rustix::fs::openat(&directory, name, flags, Mode::empty())?),
        }
    }
}

/// What the mode says.
fn entry_of(stat: &Stat) -> Entry {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => Entry::Directory,
        FileType::RegularFile => Entry::File { executable: stat.st_mode & 0o111 != 0 },
        FileType::Symlink => Entry::Symlink,
        _ => Entry::Other,
    }
}

impl Tree for DirectoryTree {
    fn entry(&self, path: &Path) -> io::Result<Option<Entry>> {
        let stat = match self.place(path) {
            Ok(Place::Root) => return Ok(Some(Entry::Directory)),
            Ok(Place::In(directory, name)) => {
                rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW).map_err(io::Error::from)
            }
            Err(error) => Err(error),
        };
        match stat {
            Ok(stat) => Ok(Some(entry_of(&stat))),
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn read_link(&self, path: &Path) -> io::Result<PathBuf> {
        match self.place(path)? {
            Place::Root => Err(Errno::INVAL.into()),
            Place::In(directory, name) => {
                let target = rustix::fs::readlinkat(&directory, name, Vec::new())?;
                Ok(PathBuf::from(OsString::from_vec(target.into_bytes())))
            }
        }
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn ReadAt>> {
        // A device must not even be opened; O_NONBLOCK and the second look are for one that is put there in
        // between.
        match self.entry(path)? {
            Some(Entry::File { .. }) => {}
            Some(Entry::Directory) => return Err(Errno::ISDIR.into()),
            Some(_) => return Err(Errno::INVAL.into()),
            None => return Err(Errno::NOENT.into()),
        }
        let file = self.open_at(path, OFlags::NONBLOCK)?;
        if !matches!(entry_of(&rustix::fs::fstat(&file)?), Entry::File { .. }) {
            return Err(Errno::INVAL.into());
        }
        Ok(Box::new(File::from(file)))
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<(OsString, Entry)>> {
        let directory = self.open_at(directory, OFlags::DIRECTORY)?;
        let mut entries = Vec::new();
        for item in Dir::read_from(&directory)? {
            let item = item?;
            let name = item.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            if entries.len() == LIST_LIMIT {
                break;
            }
            match rustix::fs::statat(&directory, item.file_name(), AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => entries.push((OsStr::from_bytes(name).to_owned(), entry_of(&stat))),
                // Removed while we look.
                Err(Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(entries)
    }
}
