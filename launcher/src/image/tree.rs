//! A look into an image that is not mounted: the same questions to a directory and to a squashfs file, and
//! symbolic links resolved inside the image's own root. Runs as the user on the host.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

mod directory;

pub use directory::DirectoryTree;

/// What a name in an image stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A directory.
    Directory,
    /// A regular file.
    File {
        /// Whether anybody may execute it.
        executable: bool,
    },
    /// A symbolic link.
    Symlink,
    /// A device, a FIFO or a socket.
    Other,
}

/// The most names that [`Tree::list`] gives: what we look for is found in far fewer, and a hostile directory
/// may have millions.
pub const LIST_LIMIT: usize = 65_536;

/// A file that can be read in pieces.
pub trait ReadAt {
    /// Up to `length` bytes from `offset` on; fewer at its end.
    fn read_at(&self, offset: u64, length: usize) -> io::Result<Vec<u8>>;
}

impl ReadAt for File {
    fn read_at(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let rest = self.metadata()?.len().saturating_sub(offset);
        let mut content = vec![0; usize::try_from(rest).unwrap_or(usize::MAX).min(length)];
        let mut filled = 0;
        while filled < content.len() {
            match FileExt::read_at(self, &mut content[filled..], offset + filled as u64)? {
                0 => break, // shorter by now
                read => filled += read,
            }
        }
        content.truncate(filled);
        Ok(content)
    }
}

/// An image's files. Paths are absolute inside the image or relative to its root, and without `..`; no
/// component before the last is a symbolic link: [`resolve`] makes such paths.
pub trait Tree {
    /// What the path is, a symbolic link not followed; none if it does not exist.
    fn entry(&self, path: &Path) -> io::Result<Option<Entry>>;

    /// The target of a symbolic link.
    fn read_link(&self, path: &Path) -> io::Result<PathBuf>;

    /// Opens a regular file.
    fn open<'a>(&'a self, path: &Path) -> io::Result<Box<dyn ReadAt + 'a>>;

    /// The first bytes of a regular file, at most `limit`.
    fn read(&self, path: &Path, limit: usize) -> io::Result<Vec<u8>> {
        self.open(path)?.read_at(0, limit)
    }

    /// The names in a directory in no special order, without `.` and `..`; at most [`LIST_LIMIT`].
    fn list(&self, directory: &Path) -> io::Result<Vec<(OsString, Entry)>>;
}

/// Where a path leads inside an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// Absolute inside the image, without symbolic links, `.` or `..`. Of a path that does not exist: what is
    /// there, plus the missing rest.
    pub path: PathBuf,
    /// What is there; none if nothing is.
    pub entry: Option<Entry>,
    /// The deepest directory of `path` that exists: `path` itself if it is a directory.
    pub existing: PathBuf,
}

/// As many links as the kernel follows.
const LINK_LIMIT: usize = 40;

/// Follows `path` as a process would whose root directory is the image: absolute links start at the image's
/// root, and `..` in the root stays there. A path through a file fails with ENOTDIR, more than 40 links with
/// ELOOP, and a `..` after a name that does not exist with ENOENT.
pub fn resolve(tree: &dyn Tree, path: &Path) -> io::Result<Resolved> {
    let mut pending: VecDeque<OsString> = names(path.as_os_str()).collect();
    let mut current = PathBuf::from("/");
    let mut links = 0;
    while let Some(name) = pending.pop_front() {
        if name == "." {
            continue;
        }
        if name == ".." {
            current.pop();
            continue;
        }
        let next = current.join(&name);
        match tree.entry(&next)? {
            Some(Entry::Directory) => current = next,
            Some(Entry::Symlink) => {
                links += 1;
                if links > LINK_LIMIT {
                    return Err(io::Error::from_raw_os_error(libc::ELOOP));
                }
                let target = tree.read_link(&next)?;
                if target.as_os_str().is_empty() {
                    return Err(io::Error::from_raw_os_error(libc::ENOENT));
                }
                if target.is_absolute() {
                    current = PathBuf::from("/");
                }
                for part in names(target.as_os_str()).collect::<Vec<_>>().into_iter().rev() {
                    pending.push_front(part);
                }
            }
            Some(entry) if pending.is_empty() => {
                return Ok(Resolved { path: next, entry: Some(entry), existing: current });
            }
            Some(_) => return Err(io::Error::from_raw_os_error(libc::ENOTDIR)),
            None => return missing(current, next, pending),
        }
    }
    Ok(Resolved { path: current.clone(), entry: Some(Entry::Directory), existing: current })
}

/// The answer for a path whose end does not exist. A `..` there cannot be taken back by its text alone: what
/// is before it may be made as a link later.
fn missing(existing: PathBuf, first: PathBuf, rest: VecDeque<OsString>) -> io::Result<Resolved> {
    let mut path = first;
    for name in rest {
        match name.as_bytes() {
            b"." => {}
            b".." => return Err(io::Error::from_raw_os_error(libc::ENOENT)),
            _ => path.push(name),
        }
    }
    Ok(Resolved { path, entry: None, existing })
}

/// The components of a path, `.` and `..` kept. `Path::components` would drop the `.` of `file/.`.
fn names(path: &OsStr) -> impl Iterator<Item = OsString> + '_ {
    path.as_bytes()
        .split(|byte| *byte == b'/')
        .filter(|part| !part.is_empty())
        .map(|part| OsStr::from_bytes(part).to_owned())
}

/// A whole file, its path resolved; none if it does not exist. A longer one than `limit` fails with EFBIG, a
/// directory with EISDIR, and anything else with EINVAL.
pub fn read_file(tree: &dyn Tree, path: &Path, limit: usize) -> io::Result<Option<Vec<u8>>> {
    let found = resolve(tree, path)?;
    match found.entry {
        None => Ok(None),
        Some(Entry::File { .. }) => {
            let content = tree.read(&found.path, limit.saturating_add(1))?;
            if content.len() > limit {
                return Err(io::Error::from_raw_os_error(libc::EFBIG));
            }
            Ok(Some(content))
        }
        Some(Entry::Directory) => Err(io::Error::from_raw_os_error(libc::EISDIR)),
        Some(_) => Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
}

#[cfg(test)]
mod tests;
