//! An image whose content can be read: its files and what its maker wrote down, without mounting it. Runs as the user on the
//! host.

use std::sync::Arc;

use mizzen_core::{Digest, Failure};
use mizzen_squashfs::{self as squashfs, ByteSource};

use super::{DAMAGED, DirectoryTree, ImageKind, Metadata, OpenedImage, Tree, shown, sif};

/// So much may follow an image in its file, and as much again as the image has: padding, signatures, hashes of its blocks.
const TAIL_LIMIT: u64 = 64 << 20;

/// An image that is ready to be looked into and served.
pub struct Loaded {
    /// The file or directory.
    pub opened: OpenedImage,
    /// The digest of its manifest, or of its content if that was computed.
    pub digest: Option<Digest>,
    /// How to look into it.
    pub content: Content,
}

/// How to look into an image.
pub enum Content {
    /// Through our own reader.
    Squashfs(Arc<squashfs::Image>),
    /// Through descriptors that follow no link.
    Directory(DirectoryTree),
}

impl Loaded {
    /// Reads as much of an image as it takes to know that it is one; through a source of its own, if it has one.
    pub fn new(
        opened: OpenedImage,
        source: Option<Box<dyn ByteSource>>,
        digest: Option<Digest>,
    ) -> Result<Loaded, Failure> {
        let content = match &opened.kind {
            ImageKind::Squashfs | ImageKind::Sif { .. } => {
                Content::Squashfs(Arc::new(open_squashfs(&opened, source)?))
            }
            ImageKind::Directory => Content::Directory(
                DirectoryTree::from_file(&opened.file)
                    .map_err(|error| Failure::caused_by(shown(&opened.path), error))?,
            ),
        };
        Ok(Loaded { opened, digest, content })
    }

    /// The files in it.
    pub fn tree(&self) -> &dyn Tree {
        match &self.content {
            Content::Squashfs(image) => image.as_ref(),
            Content::Directory(tree) => tree,
        }
    }

    /// What its maker wrote down.
    pub fn metadata(&self) -> Result<Metadata, Failure> {
        let mut metadata = super::metadata(self.tree()).map_err(|failure| self.named(failure))?;
        metadata.architecture = metadata.architecture.or(self.opened.architecture);
        metadata.digest = self.digest;
        Ok(metadata)
    }

    /// A failure that has to do with what is in the image.
    pub fn named(&self, failure: Failure) -> Failure {
        failure.about(shown(&self.opened.path))
    }
}

/// The content of a file as a squashfs, read from that file or from a source of its own.
pub fn open_squashfs(
    opened: &OpenedImage,
    source: Option<Box<dyn ByteSource>>,
) -> Result<squashfs::Image, Failure> {
    let offset =
        opened.offset().ok_or_else(|| Failure::new(format!("{}: is a directory", shown(&opened.path))))?;
    let source = match source {
        Some(source) => source,
        None => {
            let file = opened.file.try_clone();
            Box::new(file.map_err(|error| Failure::caused_by(shown(&opened.path), error))?)
        }
    };
    squashfs::Image::open_source(source, offset).map_err(|error| unopened(opened, error))
}

/// Whether a file is as long as it says, and can be read.
pub fn check_content(opened: &OpenedImage) -> Result<(), Failure> {
    let end = match opened.kind {
        ImageKind::Squashfs => open_squashfs(opened, None)?.superblock().bytes_used,
        ImageKind::Sif { .. } => {
            open_squashfs(opened, None)?;
            sif::end(&opened.file, opened.size).map_err(|failure| failure.about(shown(&opened.path)))?
        }
        ImageKind::Directory => return Ok(()),
    };
    if opened.size.saturating_sub(end) <= end.saturating_add(TAIL_LIMIT) {
        return Ok(());
    }
    let (shown, size) = (shown(&opened.path), opened.size);
    Err(Failure::new(format!("{shown}: the image in it ends after {end} bytes, the file after {size}"))
        .hint("something else follows the image, or the file is damaged; `truncate -s` cuts it off"))
}

/// The same by the first bytes of the squashfs alone: nothing is inflated.
pub fn check_superblock(opened: &OpenedImage) -> Result<(), Failure> {
    let Some(offset) = opened.offset() else { return Ok(()) };
    squashfs::Superblock::read(&opened.file, offset).map(drop).map_err(|error| unopened(opened, error))
}

fn unopened(opened: &OpenedImage, error: squashfs::Error) -> Failure {
    let shown = shown(&opened.path);
    match error {
        squashfs::Error::Io { source, .. } => Failure::caused_by(format!("{shown}: cannot read"), source)
            .or_hint("its file system fails; the node's kernel log tells more"),
        error @ (squashfs::Error::UnknownCompressor(_)
        | squashfs::Error::BigEndian
        | squashfs::Error::Version { .. }) => {
            Failure::new(format!("{shown}: {error}")).hint("make the image again with mksquashfs 4")
        }
        error => Failure::new(format!("{shown}: {error}")).hint(DAMAGED),
    }
}
