//! A root file system in a directory, as one layer. As with mksquashfs, everything below is taken, on whatever file system.
//!
//! Run by: the user, in the importer.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use mizzen_core::Failure;
use mizzen_squashfs::writer::Compressors;

use crate::export::{Files, Found, Walk};
use crate::layer::{Entry, EntryContent, Layer, LayerWriter, stored_time};
use crate::tar::EntryKind;
use crate::whiteout::clean_path;

/// Converts what is below a directory, which is called `name` in messages, into `out`, an empty file that can be read.
/// `progress` is told the size of each file.
pub fn convert_directory(
    root: &Path,
    name: &str,
    out: File,
    compressors: &Compressors,
    progress: &dyn Fn(u64),
) -> Result<Layer, Failure> {
    let about = |failure: Failure| failure.about(name);
    let mut layer = LayerWriter::new(out, compressors)?;
    // The first name of what has several.
    let mut links = HashMap::new();
    let mut walk = Walk::new(root, &[]).map_err(about)?;
    while let Some(found) = walk.next().map_err(about)? {
        let size = found.entry.size;
        add(found, &mut layer, &mut links).map_err(about)?;
        progress(size);
    }
    layer.finish()
}

fn add(
    found: Found,
    layer: &mut LayerWriter,
    links: &mut HashMap<(u64, u64), Vec<u8>>,
) -> Result<(), Failure> {
    // It means nothing without the program that made it.
    if found.is_socket {
        return Ok(());
    }
    let Found { entry, identity, content, .. } = found;
    let path = clean_path(&entry.path);
    let first = identity.and_then(|identity| links.get(&identity)).cloned();
    let content = match (first, entry.kind) {
        (Some(first), _) => EntryContent::HardLink(first),
        (None, EntryKind::Directory) => EntryContent::Directory,
        (None, EntryKind::File) => EntryContent::File(layer.add_file(entry.size, content)?),
        (None, EntryKind::Symlink(target)) => EntryContent::Symlink(target),
        (None, EntryKind::CharDevice { major, minor }) => EntryContent::CharDevice(major, minor),
        (None, EntryKind::BlockDevice { major, minor }) => EntryContent::BlockDevice(major, minor),
        (None, EntryKind::Fifo) => EntryContent::Fifo,
        // No directory has one: names of one file are known by its identity.
        (None, EntryKind::HardLink(_)) => return Ok(()),
    };
    identity.map(|identity| links.entry(identity).or_insert_with(|| path.clone()));
    // The kernel has no larger numbers.
    let id = |id: u64| u32::try_from(id).unwrap_or(u32::MAX);
    layer.add(Entry {
        path,
        mode: entry.mode,
        uid: id(entry.uid),
        gid: id(entry.gid),
        mtime: stored_time(entry.mtime),
        xattrs: entry.xattrs,
        content,
    })
}
