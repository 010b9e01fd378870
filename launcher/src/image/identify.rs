//! Opens an image and says what it is, by its content and never by its name. Runs as the user on the host.

use std::fs::{self, File, FileType, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use mizzen_core::Failure;

use super::architecture::Architecture;
use super::tree::{DirectoryTree, Entry, Tree};
use super::{cause, magic, shown, sif};

/// The forms of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The whole file is a squashfs. Only its magic has been seen.
    Squashfs,
    /// A SIF file with a squashfs in it.
    Sif {
        /// Where the squashfs starts.
        offset: u64,
        /// Its length; the end is within the file.
        length: u64,
    },
    /// An unpacked root file system.
    Directory,
}

/// An image, open for reading: whatever its path means later, this is what was looked at.
#[derive(Debug)]
pub struct Opened {
    /// The path as the user gave it.
    pub path: PathBuf,
    /// The file or directory.
    pub file: File,
    /// What it is.
    pub kind: Kind,
    /// Bytes of the file; meaningless for a directory.
    pub size: u64,
    /// The machine that a SIF says it is made for.
    pub architecture: Option<Architecture>,
}

/// Opens the image at `path`.
pub fn identify(path: &Path) -> Result<Opened, Failure> {
    // Once by name, so that no device is opened and no driver wakes up; once more on what was opened.
    refuse_special(path, &fs::metadata(path).map_err(|error| cannot_open(path, &error))?)?;
    // O_NONBLOCK: a FIFO put there in between must not hang us.
    let flags = libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .map_err(|error| cannot_open(path, &error))?;
    let metadata = file.metadata().map_err(|error| cannot_open(path, &error))?;
    refuse_special(path, &metadata)?;
    let size = metadata.len();
    let (kind, architecture) =
        if metadata.is_dir() { directory(path, &file)? } else { regular(path, &file, size)? };
    Ok(Opened { path: path.to_owned(), file, kind, size, architecture })
}

fn refuse_special(path: &Path, metadata: &Metadata) -> Result<(), Failure> {
    match special(metadata.file_type()) {
        Some(name) => Err(Failure::new(format!("{}: not an image (is a {name})", shown(path)))),
        None => Ok(()),
    }
}

fn special(kind: FileType) -> Option<&'static str> {
    match kind {
        _ if kind.is_file() || kind.is_dir() => None,
        _ if kind.is_fifo() => Some("FIFO"),
        _ if kind.is_socket() => Some("socket"),
        _ if kind.is_char_device() => Some("character device"),
        _ if kind.is_block_device() => Some("block device"),
        _ => Some("file of an unknown kind"),
    }
}

type Identified = (Kind, Option<Architecture>);

fn regular(path: &Path, file: &File, size: u64) -> Result<Identified, Failure> {
    let head = read_head(file, 512).map_err(|error| cannot_read(path, &error))?;
    if head.starts_with(b"hsqs") && size >= 96 {
        return Ok((Kind::Squashfs, None));
    }
    if sif::is_sif(&head) {
        let found = sif::find(file, size).map_err(|failure| Failure {
            message: format!("{}: {}", shown(path), failure.message),
            hint: failure.hint,
        })?;
        let kind = Kind::Sif { offset: found.offset, length: found.length };
        return Ok((kind, found.architecture));
    }
    let head = read_head(file, magic::HEAD).map_err(|error| cannot_read(path, &error))?;
    let (look, hint) = magic::describe(&head, size);
    let failure = Failure::new(format!("{}: not an image ({look})", shown(path)));
    Err(Failure { hint: hint.map(str::to_owned), ..failure })
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

/// Names of which a root file system has at least one.
const ROOT_NAMES: &[&str] = &["bin", "usr", "lib", "etc", "sbin", ".singularity.d", "ch"];
/// How many programs of a directory are looked at.
const PROGRAM_LIMIT: usize = 64;

fn directory(path: &Path, file: &File) -> Result<Identified, Failure> {
    let why_not = DirectoryTree::from_file(file).and_then(|tree| why_no_root(&tree, &shown(path)));
    match why_not.map_err(|error| cannot_read(path, &error))? {
        None => Ok((Kind::Directory, None)),
        Some((what, hint)) => {
            Err(Failure { message: format!("{}: not an image ({what})", shown(path)), hint })
        }
    }
}

/// What a directory is instead of a root file system, and what to do; none if it may well be one. `name` is
/// its name in hints.
fn why_no_root(tree: &DirectoryTree, name: &str) -> io::Result<Option<(&'static str, Option<String>)>> {
    let has = |name: &str| Ok::<_, io::Error>(tree.entry(Path::new(name))?.is_some());
    for name in ROOT_NAMES {
        if has(name)? {
            return Ok(None);
        }
    }
    if has("oci-layout")? {
        let command = format!("umoci unpack --rootless --image {name}:TAG BUNDLE");
        let hint = format!("unpack it: {command}; the image is BUNDLE/rootfs");
        return Ok(Some(("an OCI image layout, still in layers", Some(hint))));
    }
    if has("rootfs")? {
        return Ok(Some(("a bundle that contains one", Some(format!("use {name}/rootfs")))));
    }
    let entries = tree.list(Path::new("/"))?;
    if entries.is_empty() {
        return Ok(Some(("an empty directory", None)));
    }
    // An image may consist of one static program. A script needs an interpreter: a folder of scripts is none.
    let programs = entries.iter().filter(|(_, entry)| *entry == Entry::File { executable: true });
    let is_elf = |name| tree.read(Path::new(name), 4).is_ok_and(|head| head == b"\x7fELF");
    if programs.take(PROGRAM_LIMIT).any(|(name, _)| is_elf(name)) {
        return Ok(None);
    }
    Ok(Some(("a directory without bin, usr, lib, etc or sbin", None)))
}

fn cannot_read(path: &Path, error: &io::Error) -> Failure {
    Failure::new(format!("{}: cannot read: {}", shown(path), cause(error)))
}

/// Why an image could not be opened, and the first thing on its path that explains it.
fn cannot_open(path: &Path, error: &io::Error) -> Failure {
    let failure = Failure::new(format!("{}: {}", shown(path), cause(error)));
    match error.raw_os_error() {
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
            failure.hint("you need read permission for the image and x for every directory above it")
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

#[cfg(test)]
mod tests;
