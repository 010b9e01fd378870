//! A squashfs image as a tree. Runs as the user on the host.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use super::tree::{Entry, LIST_LIMIT, ReadAt, Tree};
use mizzen_squashfs::{EntryType, Image, Inode, Kind};

impl Tree for Image {
    fn entry(&self, path: &Path) -> io::Result<Option<Entry>> {
        Ok(find(self, path)?.as_ref().map(kind_of))
    }

    fn read_link(&self, path: &Path) -> io::Result<PathBuf> {
        let target = Image::read_link(self, &existing(self, path)?)?;
        Ok(PathBuf::from(OsString::from_vec(target)))
    }

    fn open<'a>(&'a self, path: &Path) -> io::Result<Box<dyn ReadAt + 'a>> {
        Ok(Box::new(File { image: self, inode: existing(self, path)? }))
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<(OsString, Entry)>> {
        let inode = existing(self, directory)?;
        let mut listing = self.read_dir(&inode, 0)?;
        let mut entries = Vec::new();
        while let Some(found) = listing.next()? {
            let entry = match found.file_type {
                EntryType::Directory => Entry::Directory,
                EntryType::File => kind_of(&self.inode(found.inode)?),
                EntryType::Symlink => Entry::Symlink,
                _ => Entry::Other,
            };
            entries.push((OsStr::from_bytes(found.name).to_owned(), entry));
            if entries.len() == LIST_LIMIT {
                break;
            }
        }
        Ok(entries)
    }
}

/// A file of an image.
struct File<'a> {
    image: &'a Image,
    inode: Inode,
}

impl ReadAt for File<'_> {
    fn read_at(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let rest = self.inode.size().saturating_sub(offset);
        let length = usize::try_from(rest).unwrap_or(usize::MAX).min(length);
        let mut content = Vec::new();
        for piece in self.image.read(&self.inode, offset, length)? {
            piece.slices().for_each(|slice| content.extend_from_slice(slice));
        }
        Ok(content)
    }
}

fn kind_of(inode: &Inode) -> Entry {
    match inode.kind {
        Kind::Directory(_) => Entry::Directory,
        Kind::File(_) => Entry::File { executable: inode.mode & 0o111 != 0 },
        Kind::Symlink(_) => Entry::Symlink,
        _ => Entry::Other,
    }
}

/// The inode at a path without links.
fn find(image: &Image, path: &Path) -> io::Result<Option<Inode>> {
    let mut current = image.root()?;
    for component in path.components() {
        let Component::Normal(name) = component else { continue };
        match image.lookup(&current, name.as_bytes())? {
            Some(reference) => current = image.inode(reference)?,
            None => return Ok(None),
        }
    }
    Ok(Some(current))
}

fn existing(image: &Image, path: &Path) -> io::Result<Inode> {
    find(image, path)?.ok_or_else(|| io::ErrorKind::NotFound.into())
}
