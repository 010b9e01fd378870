//! Opens an image and says what it is, by its content and never by its name. Runs as the user on the host.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::image::{FORMS, ImageFormat, ProbedImage};

use super::architecture::Architecture;
use super::tree::{DirectoryTree, Entry, Tree};
use super::{shown, sif};

/// The forms of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageKind {
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

/// An image, open for reading. A file is used through this descriptor, whatever its path means later; a directory is
/// opened again by its path inside the container's mount namespace, where no descriptor from outside can be bound.
#[derive(Debug)]
pub struct OpenedImage {
    /// The path as the user gave it.
    pub path: PathBuf,
    /// The file or directory.
    pub file: File,
    /// What it is.
    pub kind: ImageKind,
    /// Bytes of the file; meaningless for a directory.
    pub size: u64,
    /// The machine that a SIF says it is made for.
    pub architecture: Option<Architecture>,
}

/// Opens the image at `path`.
pub fn identify(path: &Path) -> Result<OpenedImage, Failure> {
    identify_opened(path, mizzen_core::image::open(path)?)
}

/// The same for an image that is open.
pub fn identify_opened(path: &Path, opened: ProbedImage) -> Result<OpenedImage, Failure> {
    let ProbedImage { file, form, size } = opened;
    let (kind, architecture) = match form {
        ImageFormat::Squashfs => (ImageKind::Squashfs, None),
        ImageFormat::Sif => partition_of_sif(path, &file, size)?,
        ImageFormat::Directory => directory(path, &file)?,
    };
    Ok(OpenedImage { path: path.to_owned(), file, kind, size, architecture })
}

type Identified = (ImageKind, Option<Architecture>);

fn partition_of_sif(path: &Path, file: &File, size: u64) -> Result<Identified, Failure> {
    let found = sif::find(file, size).map_err(|failure| failure.about(shown(path)))?;
    Ok((ImageKind::Sif { offset: found.offset, length: found.length }, found.architecture))
}

/// Names of which a root file system has at least one.
const ROOT_NAMES: &[&str] = &["bin", "usr", "lib", "etc", "sbin", ".singularity.d", "ch"];
/// How many programs of a directory are looked at.
const PROGRAM_LIMIT: usize = 64;

fn directory(path: &Path, file: &File) -> Result<Identified, Failure> {
    let why_not = DirectoryTree::from_file(file).and_then(|tree| why_no_root(&tree, &shown(path)));
    match why_not.map_err(|error| Failure::caused_by(format!("{}: cannot read", shown(path)), error))? {
        None => Ok((ImageKind::Directory, None)),
        Some((what, hint)) => {
            let failure = Failure::new(format!("not an image ({what})")).about(shown(path));
            Err(hint.into_iter().fold(failure, Failure::hint))
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
        return Ok(Some(("an empty directory", Some(FORMS.to_owned()))));
    }
    // An image may consist of one static program. A script needs an interpreter: a folder of scripts is none.
    let programs = entries.iter().filter(|(_, entry)| *entry == Entry::File { executable: true });
    let is_elf = |name| tree.read(Path::new(name), 4).is_ok_and(|head| head == b"\x7fELF");
    if programs.take(PROGRAM_LIMIT).any(|(name, _)| is_elf(name)) {
        return Ok(None);
    }
    let hint = "the directory must be the root of a system, in which programs and their libraries are";
    Ok(Some(("a directory without bin, usr, lib, etc or sbin", Some(hint.to_owned()))))
}

#[cfg(test)]
mod tests;
