//! Opens an image and says what form it has, by its content and never by its name: enough for the client to refuse what
//! is no image before a job waits in the queue. Runs as the user.

mod directory;
mod magic;

use std::fs::{self, File, FileType, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::Failure;
use crate::failure::quote;

/// The forms of an image. Only the first bytes have been seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// A squashfs file.
    Squashfs,
    /// A SIF file.
    Sif,
    /// A directory that may well be the root of a system.
    Directory,
}

/// An image, open for reading.
#[derive(Debug)]
pub struct ProbedImage {
    /// The file or directory.
    pub file: File,
    /// What it is.
    pub form: ImageFormat,
    /// Bytes of the file; meaningless for a directory.
    pub size: u64,
}

/// The magic of a SIF file, after 32 bytes of launch script.
const SIF_MAGIC: &[u8] = b"SIF_MAGIC\0";
const SIF_MAGIC_AT: usize = 32;
/// Bytes of the superblock of a squashfs.
const SQUASHFS_HEADER: u64 = 96;

/// What an image can be.
pub const FORMS: &str = "an image is a squashfs or SIF file, or a directory with a root file system";

/// Opens the image at `path`.
pub fn open(path: &Path) -> Result<ProbedImage, Failure> {
    open_at(path, path)
}

/// The same by another path; `path` is its name in messages.
pub fn open_at(path: &Path, place: &Path) -> Result<ProbedImage, Failure> {
    // Once by name, so that no device is opened and no driver wakes up; once more on what was opened.
    refuse_special(path, &fs::metadata(place).map_err(|error| cannot_open(path, error))?)?;
    // O_NONBLOCK: a FIFO put there in between must not hang us.
    let flags = libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY;
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(place);
    probe(path, opened.map_err(|error| cannot_open(path, error))?)
}

/// Sees what form an open file or directory has; `path` is its name in messages.
pub fn probe(path: &Path, file: File) -> Result<ProbedImage, Failure> {
    let metadata = file.metadata().map_err(|error| cannot_open(path, error))?;
    refuse_special(path, &metadata)?;
    let size = metadata.len();
    let form = if metadata.is_dir() {
        directory::check(path, &file)?;
        ImageFormat::Directory
    } else {
        form_of_file(path, &file, size)?
    };
    Ok(ProbedImage { file, form, size })
}

/// The path of an open file or directory, without symbolic links.
pub fn real_path(file: &File) -> io::Result<PathBuf> {
    fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Fails for what is neither a file nor a directory.
pub fn refuse_special(path: &Path, metadata: &Metadata) -> Result<(), Failure> {
    match special(metadata.file_type()) {
        Some(name) => Err(Failure::new(format!("{}: not an image (is a {name})", shown(path))).hint(FORMS)),
        None => Ok(()),
    }
}

/// What a thing is that is neither a file nor a directory.
pub fn special(kind: FileType) -> Option<&'static str> {
    match kind {
        _ if kind.is_file() || kind.is_dir() => None,
        _ if kind.is_fifo() => Some("FIFO"),
        _ if kind.is_socket() => Some("socket"),
        _ if kind.is_char_device() => Some("character device"),
        _ if kind.is_block_device() => Some("block device"),
        _ => Some("file of an unknown kind"),
    }
}

fn form_of_file(path: &Path, file: &File, size: u64) -> Result<ImageFormat, Failure> {
    let head = read_head(file, 512).map_err(|error| cannot_read(path, error))?;
    if head.starts_with(b"hsqs") && size >= SQUASHFS_HEADER {
        return Ok(ImageFormat::Squashfs);
    }
    if head.get(SIF_MAGIC_AT..).is_some_and(|rest| rest.starts_with(SIF_MAGIC)) {
        return Ok(ImageFormat::Sif);
    }
    let head = read_head(file, magic::HEAD).map_err(|error| cannot_read(path, error))?;
    let (look, hint) = magic::describe(&head, size);
    Err(Failure::new(format!("{}: not an image ({look})", shown(path))).hint(hint.unwrap_or(FORMS)))
}

/// The first bytes of a file: fewer than `limit` if it is shorter.
fn read_head(file: &File, limit: usize) -> io::Result<Vec<u8>> {
    let mut head = vec![0; limit];
    let mut filled = 0;
    while filled < limit {
        match file.read_at(&mut head[filled..], filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    head.truncate(filled);
    Ok(head)
}

fn cannot_read(path: &Path, error: io::Error) -> Failure {
    let damaged = error.raw_os_error() == Some(libc::EIO);
    let failure = Failure::caused_by(format!("{}: cannot read", shown(path)), error);
    if damaged { failure.hint("its file system fails; the node's kernel log tells more") } else { failure }
}

/// Why a file could not be opened, and the first thing on its path that explains it.
pub fn cannot_open(path: &Path, error: io::Error) -> Failure {
    let number = error.raw_os_error();
    let failure = Failure::caused_by(shown(path), error);
    match number {
        Some(libc::ENOENT) => match (fs::read_link(path), first_missing(path)) {
            (Ok(target), _) => {
                let target = shown(&target);
                failure.hint(format!("it is a symbolic link to {target}, which is not there on this node"))
            }
            (Err(_), Some(parent)) => {
                failure.hint(format!("the directory {} does not exist on this node", shown(parent)))
            }
            (Err(_), None) => failure,
        },
        Some(libc::EACCES) => {
            failure.hint("you need read permission for it and x for every directory above it")
        }
        Some(libc::ELOOP) => failure.hint("a symbolic link on this path leads back to itself"),
        Some(libc::ENOTDIR) => failure.hint("a file stands where the path needs a directory"),
        Some(libc::ESTALE) => failure.hint("it was replaced on the file server; try again"),
        _ => failure,
    }
}

/// The topmost directory of a path that does not exist.
fn first_missing(path: &Path) -> Option<&Path> {
    let parents: Vec<&Path> = path.ancestors().skip(1).filter(|part| !part.as_os_str().is_empty()).collect();
    let missing = |part: &&&Path| fs::metadata(part).is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
    parents.iter().rev().find(missing).copied()
}

fn shown(path: &Path) -> String {
    quote(path.as_os_str().as_bytes())
}
