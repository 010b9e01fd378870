//! A root file system in a directory, as one layer. As with mksquashfs, everything below is taken, on whatever file system.
//!
//! Run by: the user, in the importer.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::failure::quote;
use mizzen_squashfs::writer::Compressors;
use rustix::fs::{lgetxattr, llistxattr, major, minor};

use crate::layer::{Entry, EntryContent, Layer, LayerWriter, stored_time};
use crate::whiteout::clean_path;

/// Linux has no longer lists and values.
const XATTR_LIMIT: usize = 64 << 10;

/// Converts what is below a directory into `out`, an empty file that can be read.
pub fn convert_directory(root: &Path, out: File, compressors: &Compressors) -> Result<Layer, Failure> {
    let mut walk = Walk {
        root,
        layer: LayerWriter::new(out, compressors)?,
        links: HashMap::new(),
        ahead: vec![PathBuf::new()],
    };
    while let Some(path) = walk.ahead.pop() {
        let shown = quote(root.join(&path).as_os_str().as_bytes());
        walk.add(&path).map_err(|failure| failure.about(shown))?;
    }
    walk.layer.finish()
}

struct Walk<'a> {
    root: &'a Path,
    layer: LayerWriter,
    /// The first name of what has several.
    links: HashMap<(u64, u64), Vec<u8>>,
    /// Paths below the root that are still to be taken, the next one last.
    ahead: Vec<PathBuf>,
}

impl Walk<'_> {
    fn add(&mut self, path: &Path) -> Result<(), Failure> {
        let full = self.root.join(path);
        // The root may be named by a link.
        let metadata =
            if path.as_os_str().is_empty() { fs::metadata(&full) } else { fs::symlink_metadata(&full) };
        let metadata = metadata.map_err(unreadable)?;
        let name = clean_path(path.as_os_str().as_bytes());
        let Some(content) = self.content(&full, path, &name, &metadata)? else { return Ok(()) };
        self.layer.add(Entry {
            path: name,
            mode: (metadata.mode() & 0o7777) as u16,
            uid: metadata.uid(),
            gid: metadata.gid(),
            mtime: stored_time(metadata.mtime()),
            xattrs: xattrs(&full),
            content,
        })
    }

    /// What it is; none for a socket, which means nothing without the program that made it.
    fn content(
        &mut self,
        full: &Path,
        path: &Path,
        name: &[u8],
        metadata: &Metadata,
    ) -> Result<Option<EntryContent>, Failure> {
        let kind = metadata.file_type();
        if kind.is_dir() {
            let mut names = Vec::new();
            for entry in fs::read_dir(full).map_err(unreadable)? {
                names.push(path.join(entry.map_err(unreadable)?.file_name()));
            }
            names.sort_by(|one, other| other.as_os_str().as_bytes().cmp(one.as_os_str().as_bytes()));
            self.ahead.append(&mut names);
            return Ok(Some(EntryContent::Directory));
        }
        if metadata.nlink() > 1 {
            let identity = (metadata.dev(), metadata.ino());
            if let Some(first) = self.links.get(&identity) {
                return Ok(Some(EntryContent::HardLink(first.clone())));
            }
            self.links.insert(identity, name.to_vec());
        }
        let device = (major(metadata.rdev()), minor(metadata.rdev()));
        Ok(Some(if kind.is_file() {
            // Nothing is followed or waited for that was put there in between.
            let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
            let file = OpenOptions::new().read(true).custom_flags(flags).open(full).map_err(unreadable)?;
            EntryContent::File(self.layer.add_file(metadata.size(), file)?)
        } else if kind.is_symlink() {
            EntryContent::Symlink(
                fs::read_link(full).map_err(unreadable)?.into_os_string().as_bytes().to_vec(),
            )
        } else if kind.is_char_device() {
            EntryContent::CharDevice(device.0, device.1)
        } else if kind.is_block_device() {
            EntryContent::BlockDevice(device.0, device.1)
        } else if kind.is_fifo() {
            EntryContent::Fifo
        } else {
            return Ok(None);
        }))
    }
}

fn unreadable(error: io::Error) -> Failure {
    let is_refused = error.kind() == io::ErrorKind::PermissionDenied;
    let failure = Failure::caused_by("cannot read it", error);
    if is_refused {
        failure.hint("an image needs all files; make them readable, or import as their owner")
    } else {
        failure
    }
}

/// The extended attributes of a file; those that cannot be read are not there.
fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut list = vec![0; XATTR_LIMIT];
    let Ok(len) = llistxattr(path, &mut list) else { return BTreeMap::new() };
    let names = list.get(..len).unwrap_or_default().split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let mut value = vec![0; XATTR_LIMIT];
    let mut found = BTreeMap::new();
    for name in names {
        if let Ok(len) = lgetxattr(path, name, &mut value) {
            found.insert(name.to_vec(), value.get(..len).unwrap_or_default().to_vec());
        }
    }
    found
}
