//! The files of a directory. Its links may lead anywhere and change while we look, so no path is handed to the kernel: each
//! directory is opened name by name, never through a link.
//!
//! Run by: the user, in the exporter and the importer.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use mizzen_core::Failure;
use mizzen_core::failure::quote;
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, fstat, lgetxattr, llistxattr, major, minor, openat,
    readlinkat, statat,
};
use rustix::io::Errno;

use super::files::{Files, Found, is_kept, join};
use crate::tar::{Entry, EntryKind};

/// Linux has no longer lists and values.
const XATTR_LIMIT: usize = 64 << 10;

const OPEN: OFlags = OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC).union(OFlags::NOCTTY);

/// A way through a directory.
pub struct Walk<'a> {
    root: OwnedFd,
    excluded: &'a [&'a [u8]],
    /// Paths that are still to come, the next one last.
    ahead: Vec<Vec<u8>>,
    /// The directory that was opened last: mostly the next path is in it.
    current: (Vec<u8>, OwnedFd),
}

impl<'a> Walk<'a> {
    /// From this directory, without what is excluded. Its own path may have links: the user named it.
    pub fn new(root: &Path, excluded: &'a [&'a [u8]]) -> Result<Walk<'a>, Failure> {
        let open = || openat(CWD, root, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let root = open().map_err(|errno| unreadable(b"", errno))?;
        let copy = root.try_clone().map_err(|error| Failure::caused_by("cannot read", error))?;
        Ok(Walk { root, excluded, ahead: vec![Vec::new()], current: (Vec::new(), copy) })
    }

    /// Makes a directory the current one.
    fn enter(&mut self, path: &[u8]) -> Result<(), Errno> {
        if self.current.0 == path {
            return Ok(());
        }
        let mut directory = openat(&self.root, ".", OPEN | OFlags::DIRECTORY, Mode::empty())?;
        for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
            directory = openat(&directory, OsStr::from_bytes(name), OPEN | OFlags::DIRECTORY, Mode::empty())?;
        }
        self.current = (path.to_vec(), directory);
        Ok(())
    }

    fn found(&mut self, path: Vec<u8>) -> Result<Option<Found<'static>>, Errno> {
        let slash = path.iter().rposition(|byte| *byte == b'/');
        let (parent, name) = slash.map_or((&[][..], path.as_slice()), |at| (&path[..at], &path[at + 1..]));
        self.enter(parent)?;
        let directory = &self.current.1;
        let name = OsStr::from_bytes(if path.is_empty() { b"." } else { name });
        let mut stat = match statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            // Removed while we look.
            Err(Errno::NOENT) => return Ok(None),
            stat => stat?,
        };
        let xattrs = xattrs(directory, name);
        let mut content: Box<dyn Read> = Box::new(io::empty());
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => EntryKind::Directory,
            FileType::RegularFile => {
                // A device must not even be opened; O_NONBLOCK and the second look are for one that is put there in between.
                let file = openat(directory, name, OPEN | OFlags::NONBLOCK, Mode::empty())?;
                stat = fstat(&file)?;
                if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                    return Err(Errno::INVAL);
                }
                content = Box::new(Content { file: file.into(), path: path.clone() });
                EntryKind::File
            }
            FileType::Symlink => EntryKind::Symlink(readlinkat(directory, name, Vec::new())?.into_bytes()),
            FileType::CharacterDevice => {
                EntryKind::CharDevice { major: major(stat.st_rdev), minor: minor(stat.st_rdev) }
            }
            FileType::BlockDevice => {
                EntryKind::BlockDevice { major: major(stat.st_rdev), minor: minor(stat.st_rdev) }
            }
            _ => EntryKind::Fifo,
        };
        if kind == EntryKind::Directory {
            self.list(&path)?;
        }
        Ok(Some(describe(path, kind, &stat, xattrs, content)))
    }

    fn list(&mut self, path: &[u8]) -> Result<(), Errno> {
        self.enter(path)?;
        let first = self.ahead.len();
        for item in Dir::read_from(&self.current.1)? {
            let item = item?;
            let name = item.file_name().to_bytes();
            let path = join(path, name);
            if name != b"." && name != b".." && !self.excluded.contains(&path.as_slice()) {
                self.ahead.push(path);
            }
        }
        self.ahead[first..].sort_by(|one, other| other.cmp(one));
        Ok(())
    }
}

fn describe(
    path: Vec<u8>,
    kind: EntryKind,
    stat: &Stat,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    content: Box<dyn Read>,
) -> Found<'static> {
    let is_directory = kind == EntryKind::Directory;
    let size = if kind == EntryKind::File { u64::try_from(stat.st_size).unwrap_or(0) } else { 0 };
    let mut entry = Entry::new(path, kind, (stat.st_mode & 0o7777) as u16, size);
    (entry.uid, entry.gid, entry.mtime, entry.xattrs) =
        (stat.st_uid.into(), stat.st_gid.into(), stat.st_mtime, xattrs);
    Found {
        entry,
        identity: (stat.st_nlink > 1 && !is_directory).then_some((stat.st_dev, stat.st_ino)),
        content,
        is_socket: FileType::from_raw_mode(stat.st_mode) == FileType::Socket,
    }
}

impl Files for Walk<'_> {
    fn next(&mut self) -> Result<Option<Found<'_>>, Failure> {
        while let Some(path) = self.ahead.pop() {
            let copy = path.clone();
            if let Some(found) = self.found(path).map_err(|errno| unreadable(&copy, errno))? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }
}

/// The extended attributes of a file; those that cannot be read are not there. There are no calls for a name in an open
/// directory, but its link in /proc is one path that cannot lead elsewhere.
fn xattrs(directory: &OwnedFd, name: &OsStr) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let path = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name);
    let mut found = BTreeMap::new();
    let mut list = Vec::with_capacity(XATTR_LIMIT);
    if llistxattr(&path, rustix::buffer::spare_capacity(&mut list)).is_err() {
        return found;
    }
    for name in list.split(|byte| *byte == 0).filter(|name| is_kept(name)) {
        let mut value = Vec::with_capacity(XATTR_LIMIT);
        if lgetxattr(&path, name, rustix::buffer::spare_capacity(&mut value)).is_ok() {
            found.insert(name.to_vec(), value);
        }
    }
    found
}

struct Content {
    file: File,
    path: Vec<u8>,
}

impl Read for Content {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.file.read(buffer).map_err(|error| match Errno::from_io_error(&error) {
            Some(errno) if errno != Errno::INTR => io::Error::other(unreadable(&self.path, errno)),
            _ => error,
        })
    }
}

fn unreadable(path: &[u8], errno: Errno) -> Failure {
    let failure = Failure::caused_by(format!("cannot read /{} in it", quote(path)), errno);
    match errno {
        Errno::ACCESS | Errno::PERM => {
            failure.hint("an image needs all files; make them readable, or do this as their owner")
        }
        _ => failure,
    }
}
