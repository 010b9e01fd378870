//! The files of a squashfs image. It may be hostile: a directory that stands in several others, or in itself, is refused.
//!
//! Run by: the user, in the exporter.

use std::collections::{BTreeMap, HashSet};
use std::io::{self, Read};

use mizzen::image::DAMAGED;
use mizzen_core::Failure;
use mizzen_core::failure::quote;
use mizzen_squashfs::{Error, Image, Inode, InodeRef, Kind};

use super::files::{Files, Found, is_kept, join};
use crate::tar::{Entry, EntryKind};

/// A way through an image.
pub struct Walk<'a> {
    image: &'a Image,
    excluded: &'a [&'a [u8]],
    /// What is still to come, the next one last.
    ahead: Vec<(Vec<u8>, InodeRef)>,
    /// Numbers of the directories that were seen.
    directories: HashSet<u32>,
}

impl<'a> Walk<'a> {
    /// From the root, without what is excluded.
    pub fn new(image: &'a Image, excluded: &'a [&'a [u8]]) -> Walk<'a> {
        let ahead = vec![(Vec::new(), image.superblock().root)];
        Walk { image, excluded, ahead, directories: HashSet::new() }
    }

    fn found(&mut self, path: Vec<u8>, inode: Inode) -> Result<Found<'a>, Error> {
        let device = |number: u32| ((number >> 8) & 0xfff, (number & 0xff) | ((number >> 12) & 0xf_ff00));
        let kind = match &inode.kind {
            Kind::Directory(_) => {
                self.list(&path, &inode)?;
                EntryKind::Directory
            }
            Kind::File(_) => EntryKind::File,
            Kind::Symlink(_) => EntryKind::Symlink(self.image.read_link(&inode)?),
            Kind::CharDevice(number) => {
                let (major, minor) = device(*number);
                EntryKind::CharDevice { major, minor }
            }
            Kind::BlockDevice(number) => {
                let (major, minor) = device(*number);
                EntryKind::BlockDevice { major, minor }
            }
            Kind::Fifo | Kind::Socket => EntryKind::Fifo,
        };
        let is_directory = kind == EntryKind::Directory;
        let size = if kind == EntryKind::File { inode.size() } else { 0 };
        let mut entry = Entry::new(path, kind, (inode.mode & 0o7777) as u16, size);
        (entry.uid, entry.gid, entry.mtime) = (inode.uid.into(), inode.gid.into(), inode.mtime.into());
        entry.xattrs = self.xattrs(&inode)?;
        Ok(Found {
            identity: (inode.nlink > 1 && !is_directory).then_some((0, inode.number.into())),
            is_socket: matches!(inode.kind, Kind::Socket),
            content: Box::new(Content { image: self.image, path: entry.path.clone(), inode, offset: 0 }),
            entry,
        })
    }

    fn list(&mut self, path: &[u8], inode: &Inode) -> Result<(), Error> {
        if !self.directories.insert(inode.number) {
            return Err(Error::Corrupt("a directory with several names"));
        }
        let mut listing = self.image.read_dir(inode, 0)?;
        let first = self.ahead.len();
        while let Some(entry) = listing.next()? {
            let path = join(path, entry.name);
            if !self.excluded.contains(&path.as_slice()) {
                self.ahead.push((path, entry.inode));
            }
        }
        self.ahead[first..].sort_by(|(one, _), (other, _)| other.cmp(one));
        Ok(())
    }

    fn xattrs(&self, inode: &Inode) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, Error> {
        let mut xattrs = BTreeMap::new();
        if !inode.has_xattrs() {
            return Ok(xattrs);
        }
        let names = self.image.list_xattrs(inode)?;
        for name in names.split(|byte| *byte == 0).filter(|name| is_kept(name)) {
            if let Some(value) = self.image.get_xattr(inode, name)? {
                xattrs.insert(name.to_vec(), value);
            }
        }
        Ok(xattrs)
    }
}

impl Files for Walk<'_> {
    fn next(&mut self) -> Result<Option<Found<'_>>, Failure> {
        let Some((path, reference)) = self.ahead.pop() else { return Ok(None) };
        let copy = path.clone();
        let found = self.image.inode(reference).and_then(|inode| self.found(path, inode));
        found.map(Some).map_err(|error| unreadable(&copy, error))
    }
}

/// The content of a file. Holes are zeros: not every program knows the forms that tar has for them.
struct Content<'a> {
    image: &'a Image,
    path: Vec<u8>,
    inode: Inode,
    offset: u64,
}

impl Read for Content<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let pieces = self.image.read(&self.inode, self.offset, buffer.len());
        let pieces = pieces.map_err(|error| io::Error::other(unreadable(&self.path, error)))?;
        let mut len = 0;
        for slice in pieces.iter().flat_map(|piece| piece.slices()) {
            let part = slice.len().min(buffer.len() - len);
            buffer[len..len + part].copy_from_slice(&slice[..part]);
            len += part;
        }
        self.offset += len as u64;
        Ok(len)
    }
}

fn unreadable(path: &[u8], error: Error) -> Failure {
    let what = format!("/{} in the image", quote(path));
    match error {
        Error::Io { source, .. } => Failure::caused_by(what, source),
        error => Failure::new(format!("{what}: {error}")).hint(DAMAGED),
    }
}
