//! An archive with an image in it, in a file: its entries are found without reading their contents, and layers are then
//! read where they are, several at once.
//!
//! Run by: the user, in the importer.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use mizzen_core::Failure;
use mizzen_core::failure::quote;
use mizzen_core::image::cannot_open;

use super::layout::{LayoutFiles, within};
use crate::failures::failure_of;
use crate::layer::Region;
use crate::tar::{Archive, EntryKind};
use crate::whiteout::{clean_path, split_last};

/// More than any archive of images has.
const ENTRY_LIMIT: usize = 1_000_000;
/// An entry that is a link to a link to a link.
const LINK_LIMIT: usize = 10;
const MAGIC: &[u8] = b"ustar";
const MAGIC_AT: u64 = 257;

/// An archive, and where its entries are.
pub struct SeekableArchive {
    file: Arc<File>,
    members: HashMap<Vec<u8>, Member>,
}

#[derive(Clone)]
pub(super) enum Member {
    File { position: u64, size: u64 },
    Link(Vec<u8>),
}

impl SeekableArchive {
    /// Reads the headers of an archive; none if the file is compressed, and so can only be read as a stream.
    pub fn open(path: &Path) -> Result<Option<SeekableArchive>, Failure> {
        let file = File::open(path).map_err(|error| cannot_open(path, error))?;
        let about = |failure: Failure| failure.about(quote(path.as_os_str().as_bytes()));
        if !has_tar_magic(&Region::new(Arc::new(file.try_clone().map_err(failure_of)?), 0, u64::MAX)) {
            return Ok(None);
        }
        let mut archive = Archive::seekable(file);
        let mut members = HashMap::new();
        while let Some(entry) = archive.next_entry().map_err(|error| about(failure_of(error.into())))? {
            let name = clean_path(&entry.path);
            if let Some(member) = member(&name, &entry) {
                members.insert(name, member);
            }
            if members.len() > ENTRY_LIMIT {
                return Err(about(Failure::new(format!("more than {ENTRY_LIMIT} entries"))));
            }
        }
        Ok(Some(SeekableArchive { file: Arc::new(archive.into_inner()), members }))
    }

    /// The bytes of a file of the archive.
    pub fn open_member(&self, name: &str) -> Option<Region> {
        let (position, size) = self.place(name)?;
        Some(Region::new(Arc::clone(&self.file), position, size))
    }

    fn place(&self, name: &str) -> Option<(u64, u64)> {
        match followed(&self.members, name)? {
            (_, Member::File { position, size }) => Some((*position, *size)),
            _ => None,
        }
    }
}

/// What of an entry can be asked for: files, and links to them, which `docker save` writes for equal layers.
pub(super) fn member(name: &[u8], entry: &crate::tar::Entry) -> Option<Member> {
    match &entry.kind {
        EntryKind::File if !entry.is_sparse => {
            Some(Member::File { position: entry.position, size: entry.size })
        }
        EntryKind::HardLink(target) => Some(Member::Link(clean_path(target))),
        EntryKind::Symlink(target) => {
            let (directory, _) = split_last(name);
            Some(Member::Link(clean_path(&[directory, b"/", target].concat())))
        }
        _ => None,
    }
}

/// The member of this name behind all links, with the name that it has there.
pub(super) fn followed<'a>(
    members: &'a HashMap<Vec<u8>, Member>,
    name: &str,
) -> Option<(&'a [u8], &'a Member)> {
    let mut found = members.get_key_value(clean_path(name.as_bytes()).as_slice())?;
    for _ in 0..LINK_LIMIT {
        match found.1 {
            Member::Link(target) => found = members.get_key_value(target)?,
            Member::File { .. } => break,
        }
    }
    Some((found.0, found.1))
}

fn has_tar_magic(region: &Region) -> bool {
    region.has_at(MAGIC_AT, MAGIC)
}

impl LayoutFiles for SeekableArchive {
    fn read(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>, Failure> {
        let Some(member) = self.open_member(name) else { return Ok(None) };
        let mut bytes = Vec::new();
        member.take(limit + 1).read_to_end(&mut bytes).map_err(failure_of)?;
        within(bytes, name, limit).map(Some)
    }

    fn find(&self, name: &str) -> Option<u64> {
        self.place(name).map(|(_, size)| size)
    }

    fn is_plain_tar(&self, name: &str) -> bool {
        self.open_member(name).is_some_and(|region| has_tar_magic(&region))
    }
}
