//! The layers of an image, put on top of each other in memory: whiteouts, opaque directories, links. The result is the tree that
//! umoci unpacks. A path of a layer is resolved in the tree itself, so no link leads out of it.
//!
//! Entries of a layer are taken in their order. What a whiteout hides are the layers below, not what its own layer has brought,
//! wherever it stands in the layer.
//!
//! Run by: the user, in the importer.

use std::collections::{HashMap, HashSet};

use mizzen_core::Failure;
use mizzen_core::failure::quote;
use mizzen_squashfs::writer::{self, Attributes, Content, Device, FileId, NodeId, Tree};

use crate::layer::{Entry, EntryContent, Layer};
use crate::whiteout::{Name, meaning, split_last};

/// More links than this on the way to one name are a loop.
const LINK_LIMIT: usize = 255;
/// Directories that a layer uses and does not describe.
const IMPLICIT_MODE: u16 = 0o755;

/// The tree of an image that gets one layer after the other.
pub struct Replay {
    tree: Tree,
    files: usize,
    keep_owners: bool,
    /// The names that the current layer has brought, by directory; only kept for layers with whiteouts.
    touched: Option<HashMap<NodeId, HashSet<Box<[u8]>>>>,
}

/// The way from the root to a directory.
struct Way {
    /// The root first.
    nodes: Vec<NodeId>,
    /// Of all but the root.
    names: Vec<Box<[u8]>>,
    /// What follows and is not there.
    missing: Vec<Box<[u8]>>,
}

impl Way {
    fn end(&self) -> NodeId {
        self.nodes.last().copied().unwrap_or(Tree::ROOT)
    }

    fn leave(&mut self) {
        if self.missing.pop().is_none() && self.names.pop().is_some() {
            self.nodes.pop();
        }
    }
}

impl Replay {
    /// An empty tree. Files belong to root, unless their owners are to be kept.
    pub fn new(keep_owners: bool) -> Result<Replay, Failure> {
        let root = Attributes { mode: IMPLICIT_MODE, ..Attributes::default() };
        Ok(Replay { tree: Tree::new(root).map_err(of_tree)?, files: 0, keep_owners, touched: None })
    }

    /// Puts a layer on top. Its contents have the numbers of [`FileId`] from the returned one on.
    pub fn apply(&mut self, layer: &Layer) -> Result<usize, Failure> {
        let base = self.files;
        self.touched = layer.has_whiteouts().then(HashMap::new);
        let unreadable = |error| Failure::caused_by("reading a converted layer", error);
        let mut entries = layer.read().map_err(unreadable)?;
        while let Some(entry) = entries.next_entry().map_err(unreadable)? {
            if let EntryContent::File(number) = entry.content {
                self.files = self.files.max(base + number as usize + 1);
            }
            let shown = quote(&entry.path);
            self.add(entry, base).map_err(|failure| failure.about(shown))?;
        }
        Ok(base)
    }

    /// The tree, and how many contents its layers have.
    pub fn finish(self) -> (Tree, usize) {
        (self.tree, self.files)
    }

    fn add(&mut self, entry: Entry, base: usize) -> Result<(), Failure> {
        let (directory, name) = split_last(&entry.path);
        match meaning(name) {
            Name::Whiteout(hidden) => self.hide(directory, hidden),
            Name::Opaque => self.hide_all(directory),
            Name::Plain(b"") => match entry.content {
                EntryContent::Directory => {
                    let attributes = self.attributes(&entry);
                    self.tree.set_attributes(Tree::ROOT, attributes).map_err(of_tree)
                }
                _ => Err(Failure::new("the root of the image is not a directory")),
            },
            Name::Plain(name) => {
                let way = self.walk(directory)?;
                let way = self.make_missing(way)?;
                self.put(way.end(), name, &entry, base)?;
                self.touch(&way, name);
                Ok(())
            }
        }
    }

    fn put(&mut self, directory: NodeId, name: &[u8], entry: &Entry, base: usize) -> Result<(), Failure> {
        let attributes = self.attributes(entry);
        let content = match &entry.content {
            EntryContent::Directory => {
                let there = self.tree.lookup(directory, name);
                if let Some(there) = there.filter(|there| self.is_directory(*there)) {
                    return self.tree.set_attributes(there, attributes).map_err(of_tree);
                }
                Content::Directory
            }
            EntryContent::HardLink(target) => return self.link(directory, name, target),
            EntryContent::File(number) => Content::File(FileId::new(base + *number as usize)),
            EntryContent::Symlink(target) => Content::Symlink(target.clone()),
            EntryContent::CharDevice(major, minor) => {
                Content::CharDevice(Device { major: *major, minor: *minor })
            }
            EntryContent::BlockDevice(major, minor) => {
                Content::BlockDevice(Device { major: *major, minor: *minor })
            }
            EntryContent::Fifo => Content::Fifo,
        };
        self.tree.remove(directory, name);
        self.tree.add(directory, name, attributes, content).map(|_| ()).map_err(of_tree)
    }

    fn link(&mut self, directory: NodeId, name: &[u8], target: &[u8]) -> Result<(), Failure> {
        self.tree.remove(directory, name);
        let (parent, last) = split_last(target);
        let way = self.walk(parent)?;
        let found = if way.missing.is_empty() { self.tree.lookup(way.end(), last) } else { None };
        let Some(found) = found else {
            return Err(Failure::new(format!("a hard link to {}, which is not there", quote(target)))
                .hint("the layer is damaged, or was made by a program that gets links wrong"));
        };
        self.tree.link(directory, name, found).map_err(of_tree)
    }

    /// Hides one name of the layers below. Without a name it means the directory itself.
    fn hide(&mut self, directory: &[u8], name: &[u8]) -> Result<(), Failure> {
        let way = self.walk(directory)?;
        match (name, way.nodes.as_slice(), way.names.last()) {
            _ if !way.missing.is_empty() => {}
            (b"." | b"..", ..) => return Err(Failure::new("a whiteout of a name that no file has")),
            (b"", [.., parent, _], Some(name)) => self.hide_untouched(*parent, name.clone()),
            (b"", ..) => {}
            (name, ..) => self.hide_untouched(way.end(), name.into()),
        }
        Ok(())
    }

    fn hide_all(&mut self, directory: &[u8]) -> Result<(), Failure> {
        let way = self.walk(directory)?;
        if way.missing.is_empty() {
            let names: Vec<Box<[u8]>> = self.tree.children(way.end()).map(|(name, _)| name.into()).collect();
            names.into_iter().for_each(|name| self.hide_untouched(way.end(), name));
        }
        Ok(())
    }

    /// Removes a name, or, if the current layer has brought it, what is below it and is not from this layer.
    fn hide_untouched(&mut self, directory: NodeId, name: Box<[u8]>) {
        let mut names = vec![(directory, name)];
        while let Some((directory, name)) = names.pop() {
            let touched = self.touched.as_ref().and_then(|touched| touched.get(&directory));
            if touched.is_none_or(|touched| !touched.contains(&name)) {
                self.tree.remove(directory, &name);
            } else if let Some(below) = self.tree.lookup(directory, &name) {
                names.extend(self.tree.children(below).map(|(name, _)| (below, name.into())));
            }
        }
    }

    /// Remembers that the current layer has brought a name, and the directories on the way to it.
    fn touch(&mut self, way: &Way, name: &[u8]) {
        let Some(touched) = &mut self.touched else { return };
        let mut is_new = touched.entry(way.end()).or_default().insert(name.into());
        for (directory, name) in way.nodes.iter().zip(&way.names).rev() {
            if !is_new {
                return;
            }
            is_new = touched.entry(*directory).or_default().insert(name.clone());
        }
    }

    /// Goes to a directory, as the kernel would if the image's root were the root: links are followed. What is not there
    /// is a part of the way by its name.
    fn walk(&self, path: &[u8]) -> Result<Way, Failure> {
        let mut way = Way { nodes: vec![Tree::ROOT], names: Vec::new(), missing: Vec::new() };
        let mut ahead: Vec<&[u8]> = components(path).rev().collect();
        let mut links = 0;
        while let Some(name) = ahead.pop() {
            match name {
                b"" | b"." => continue,
                b".." => {
                    way.leave();
                    continue;
                }
                _ => {}
            }
            let found = if way.missing.is_empty() { self.tree.lookup(way.end(), name) } else { None };
            let Some(found) = found else {
                way.missing.push(name.into());
                continue;
            };
            match self.tree.content(found).map_err(of_tree)? {
                Content::Directory => {
                    way.nodes.push(found);
                    way.names.push(name.into());
                }
                Content::Symlink(target) => {
                    links += 1;
                    if links > LINK_LIMIT {
                        return Err(Failure::new("a symbolic link on its path leads back to itself"));
                    }
                    if target.starts_with(b"/") {
                        way.nodes.truncate(1);
                        way.names.clear();
                    }
                    ahead.extend(components(target).rev());
                }
                _ => {
                    let message = format!("{} is a file, and not a directory", quote(name));
                    return Err(Failure::new(message).hint("the layers of this image contradict each other"));
                }
            }
        }
        Ok(way)
    }

    /// Makes the directories at the end of a way that are not there.
    fn make_missing(&mut self, mut way: Way) -> Result<Way, Failure> {
        for name in std::mem::take(&mut way.missing) {
            let attributes = Attributes { mode: IMPLICIT_MODE, ..Attributes::default() };
            let made = self.tree.add(way.end(), &name, attributes, Content::Directory).map_err(of_tree)?;
            way.nodes.push(made);
            way.names.push(name);
        }
        Ok(way)
    }

    fn is_directory(&self, node: NodeId) -> bool {
        self.tree.content(node).is_ok_and(|content| *content == Content::Directory)
    }

    fn attributes(&self, entry: &Entry) -> Attributes {
        let (uid, gid) = if self.keep_owners { (entry.uid, entry.gid) } else { (0, 0) };
        Attributes { mode: entry.mode, uid, gid, mtime: entry.mtime, xattrs: entry.xattrs.clone() }
    }
}

fn components(path: &[u8]) -> std::vec::IntoIter<&[u8]> {
    path.split(|byte| *byte == b'/').collect::<Vec<_>>().into_iter()
}

/// What a tree does not take.
pub fn of_tree(error: writer::Error) -> Failure {
    Failure::new(error.to_string())
}
