//! Paths inside the image, for the launcher, which reads a few small files before anything is mounted, and for what the
//! server has to say of a damaged one.
//!
//! Run by: the user, in the launcher and in the FUSE server process.

use std::collections::{HashMap, HashSet, VecDeque};

use super::Image;
use super::directory::EntryType;
use super::error::{Error, Result};
use super::inode::{Inode, Kind};
use super::metadata::InodeRef;

/// As many as Linux follows.
const MAX_LINKS: usize = 40;
/// Components still to walk; a link's target adds to them, so that this bounds the memory of a hostile image.
const MAX_COMPONENTS: usize = 4096;
/// As many names are looked at to find the path of a file, which takes some tenths of a second; and as much is remembered.
const MAX_NAMES: usize = 200_000;
const MAX_DIRECTORIES: usize = 10_000;
const MAX_PATH: usize = 1024;

impl Image {
    /// The inode at `path`, with symbolic links followed (the last one too) as if the image's root were `/`.
    pub fn resolve(&self, path: &[u8]) -> Result<Inode> {
        // The directories above the current one: `..` never leaves the image.
        let mut above: Vec<Inode> = Vec::new();
        let mut current = self.root()?;
        let mut links = 0;
        // Components to walk, the next one last.
        let mut rest: Vec<Vec<u8>> = Vec::new();
        push_components(&mut rest, path)?;
        while let Some(name) = rest.pop() {
            if !matches!(current.kind, Kind::Directory(_)) {
                return Err(Error::NotADirectory);
            }
            match name.as_slice() {
                b"." => continue,
                b".." => {
                    current = above.pop().unwrap_or(current);
                    continue;
                }
                _ => {}
            }
            let child = self.inode(self.lookup(&current, &name)?.ok_or(Error::NotFound)?)?;
            if !matches!(child.kind, Kind::Symlink(_)) {
                above.push(std::mem::replace(&mut current, child));
                continue;
            }
            links += 1;
            if links > MAX_LINKS {
                return Err(Error::TooManyLinks);
            }
            let target = self.read_link(&child)?;
            if target.starts_with(b"/") {
                above.clear();
                current = self.root()?;
            }
            push_components(&mut rest, &target)?;
        }
        Ok(current)
    }

    /// A path that leads to an inode, if it is soon found. Directories that cannot be read are passed over.
    pub fn path_of(&self, wanted: InodeRef) -> Option<Vec<u8>> {
        self.paths_of(&HashSet::from([wanted])).remove(&wanted)
    }

    /// The same for many inodes at once: those that are soon found, each with one path.
    pub fn paths_of(&self, wanted: &HashSet<InodeRef>) -> HashMap<InodeRef, Vec<u8>> {
        let mut found = HashMap::new();
        let mut directories = VecDeque::from([(self.superblock.root, Vec::new())]);
        let mut left = MAX_NAMES;
        while let Some((reference, path)) = directories.pop_front() {
            let Ok(directory) = self.inode(reference) else { continue };
            let Ok(mut listing) = self.read_dir(&directory, 0) else { continue };
            while let Ok(Some(entry)) = listing.next() {
                if left == 0 || found.len() == wanted.len() {
                    return found;
                }
                left -= 1;
                let below = || [&path, b"/".as_slice(), entry.name].concat();
                if wanted.contains(&entry.inode) {
                    found.entry(entry.inode).or_insert_with(below);
                }
                let is_directory = entry.file_type == EntryType::Directory;
                if is_directory
                    && path.len() + 1 + entry.name.len() < MAX_PATH
                    && directories.len() < MAX_DIRECTORIES
                {
                    directories.push_back((entry.inode, below()));
                }
            }
        }
        found
    }

    /// The contents of the regular file at `path`, which must not be larger than `limit`.
    pub fn read_file(&self, path: &[u8], limit: u64) -> Result<Vec<u8>> {
        let inode = self.resolve(path)?;
        let size = inode.size();
        if size > limit {
            return Err(Error::TooLarge { size, limit });
        }
        let len = usize::try_from(size).map_err(|_| Error::TooLarge { size, limit })?;
        let mut contents = Vec::new();
        for piece in self.read(&inode, 0, len)? {
            piece.slices().for_each(|slice| contents.extend_from_slice(slice));
        }
        Ok(contents)
    }
}

fn push_components(rest: &mut Vec<Vec<u8>>, path: &[u8]) -> Result<()> {
    let components = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty());
    rest.extend(components.rev().map(<[u8]>::to_vec));
    if rest.len() > MAX_COMPONENTS { Err(Error::TooManyLinks) } else { Ok(()) }
}
