//! Opens an image and says what it is, by its content and never by its name. Runs as the user on the host.

use std::fs::File;
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::image::{ImageFormat, ProbedImage};

use super::architecture::Architecture;
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

impl OpenedImage {
    /// Where the squashfs starts in the file; a directory has none.
    pub fn offset(&self) -> Option<u64> {
        match self.kind {
            ImageKind::Squashfs => Some(0),
            ImageKind::Sif { offset, .. } => Some(offset),
            ImageKind::Directory => None,
        }
    }
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
        ImageFormat::Directory => (ImageKind::Directory, None),
    };
    Ok(OpenedImage { path: path.to_owned(), file, kind, size, architecture })
}

type Identified = (ImageKind, Option<Architecture>);

fn partition_of_sif(path: &Path, file: &File, size: u64) -> Result<Identified, Failure> {
    let found = sif::find(file, size).map_err(|failure| failure.about(shown(path)))?;
    Ok((ImageKind::Sif { offset: found.offset, length: found.length }, found.architecture))
}

#[cfg(test)]
mod tests;
