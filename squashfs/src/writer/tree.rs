//! The tree of an image, in memory: what has which name and which attributes. All that can be wrong with an entry
//! is found when it is added, so that the message can name it.
//!
//! Nodes are kept in one list and refer to each other by number: a hard link is a second name of the same number,
//! and a tree of any depth is walked and dropped without recursion.
//!
//! Run by: the user, in the importer.

use std::collections::{BTreeMap, BTreeSet};

use super::FileId;
use super::error::{Error, Result};
use super::xattr;

/// Linux has no longer file names. The format allows 256.
const NAME_MAX: usize = 255;
/// Linux has no longer link targets (PATH_MAX less the final zero).
const TARGET_MAX: usize = 4095;
const MAJOR_MAX: u32 = (1 << 12) - 1;
const MINOR_MAX: u32 = (1 << 20) - 1;

/// What every kind of file has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attributes {
    /// Permissions with setuid, setgid and sticky bit: `0o7777` at most.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Seconds since 1970, as far as the format goes (2106).
    pub mtime: u32,
    /// Extended attributes by their full names (`user.`, `trusted.`, `security.`).
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// a directory, empty at first
    Directory,
    /// a regular file with these contents
    File(FileId),
    /// a symbolic link to this target
    Symlink(Vec<u8>),
    /// a block device
    BlockDevice(Device),
    /// a character device
    CharDevice(Device),
    /// a named pipe
    Fifo,
    /// a socket
    Socket,
}

/// A device number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // the names say it
pub struct Device {
    pub major: u32,
    pub minor: u32,
}

/// One entry of a [`Tree`], valid for that tree only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub(super) usize);

/// The entries of an image below its root directory.
#[derive(Debug)]
pub struct Tree {
    pub(super) nodes: Vec<Node>,
}

#[derive(Debug)]
pub(super) struct Node {
    pub attributes: Attributes,
    pub content: Content,
    /// Of a directory; sorted by bytes, as the kernel expects listings.
    pub children: BTreeMap<Box<[u8]>, NodeId>,
}

impl Tree {
    /// The root directory of every tree.
    pub const ROOT: NodeId = NodeId(0);

    /// A tree that has only a root directory.
    pub fn new(root: Attributes) -> Result<Tree> {
        check(b"/", &root, &Content::Directory)?;
        let root = Node { attributes: root, content: Content::Directory, children: BTreeMap::new() };
        Ok(Tree { nodes: vec![root] })
    }

    /// Adds an entry to a directory.
    pub fn add(
        &mut self,
        directory: NodeId,
        name: &[u8],
        attributes: Attributes,
        content: Content,
    ) -> Result<NodeId> {
        check(name, &attributes, &content)?;
        let id = NodeId(self.nodes.len());
        self.add_name(directory, name, id)?;
        self.nodes.push(Node { attributes, content, children: BTreeMap::new() });
        Ok(id)
    }

    /// Adds a hard link: another name for an entry that is not a directory.
    pub fn link(&mut self, directory: NodeId, name: &[u8], target: NodeId) -> Result<()> {
        if self.node(target)?.content == Content::Directory {
            return Err(Error::LinkToDirectory { name: name.to_vec() });
        }
        self.add_name(directory, name, target)
    }

    /// Removes a name; what has no name left does not become part of the image.
    pub fn remove(&mut self, directory: NodeId, name: &[u8]) -> Option<NodeId> {
        self.nodes.get_mut(directory.0)?.children.remove(name)
    }

    /// The entry with this name in a directory.
    pub fn lookup(&self, directory: NodeId, name: &[u8]) -> Option<NodeId> {
        self.nodes.get(directory.0)?.children.get(name).copied()
    }

    /// What an entry is.
    pub fn content(&self, node: NodeId) -> Result<&Content> {
        Ok(&self.node(node)?.content)
    }

    /// Replaces the attributes of an entry.
    pub fn set_attributes(&mut self, node: NodeId, attributes: Attributes) -> Result<()> {
        check(b"", &attributes, &Content::Fifo)?;
        let unknown = Error::Unknown { what: "an entry" };
        self.nodes.get_mut(node.0).ok_or(unknown)?.attributes = attributes;
        Ok(())
    }

    /// The attributes of an entry.
    pub fn attributes(&self, node: NodeId) -> Result<&Attributes> {
        Ok(&self.node(node)?.attributes)
    }

    /// The names in a directory, sorted.
    pub fn children(&self, directory: NodeId) -> impl Iterator<Item = (&[u8], NodeId)> {
        let children = self.nodes.get(directory.0).map(|node| &node.children);
        children.into_iter().flatten().map(|(name, id)| (&**name, *id))
    }

    /// The contents of all entries that have a name.
    pub fn files(&self) -> BTreeSet<FileId> {
        let mut files = BTreeSet::new();
        let mut directories = vec![Tree::ROOT];
        while let Some(directory) = directories.pop() {
            for (_, child) in self.children(directory) {
                match self.nodes.get(child.0).map(|node| &node.content) {
                    Some(Content::Directory) => directories.push(child),
                    Some(Content::File(file)) => drop(files.insert(*file)),
                    _ => {}
                }
            }
        }
        files
    }

    /// Puts other contents in the place of those that there are. Only entries without a name may be left as they are.
    pub fn replace_files(&mut self, mut other: impl FnMut(FileId) -> Option<FileId>) {
        for node in &mut self.nodes {
            if let Content::File(file) = &mut node.content
                && let Some(new) = other(*file)
            {
                *file = new;
            }
        }
    }

    pub(super) fn node(&self, id: NodeId) -> Result<&Node> {
        self.nodes.get(id.0).ok_or(Error::Unknown { what: "an entry" })
    }

    fn add_name(&mut self, directory: NodeId, name: &[u8], id: NodeId) -> Result<()> {
        check_name(name)?;
        let unknown = Error::Unknown { what: "a directory" };
        let node = self.nodes.get_mut(directory.0).ok_or(unknown)?;
        if node.content != Content::Directory {
            return Err(Error::NotADirectory { name: name.to_vec() });
        }
        if node.children.contains_key(name) {
            return Err(Error::Exists { name: name.to_vec() });
        }
        node.children.insert(name.into(), id);
        Ok(())
    }
}

fn check_name(name: &[u8]) -> Result<()> {
    let problem = match name {
        b"" => "is empty",
        b"." | b".." => "is not one that a file can have",
        _ if name.len() > NAME_MAX => "is longer than 255 bytes",
        _ if name.iter().any(|byte| matches!(byte, 0 | b'/')) => "has a slash or a zero byte",
        _ => return Ok(()),
    };
    Err(Error::Name { name: name.to_vec(), problem })
}

fn check(name: &[u8], attributes: &Attributes, content: &Content) -> Result<()> {
    if attributes.mode > 0o7777 {
        return Err(Error::Mode { name: name.to_vec(), mode: attributes.mode });
    }
    match content {
        Content::Symlink(target) if target.is_empty() || target.len() > TARGET_MAX || target.contains(&0) => {
            return Err(Error::Target { name: name.to_vec(), len: target.len() });
        }
        Content::BlockDevice(Device { major, minor }) | Content::CharDevice(Device { major, minor })
            if *major > MAJOR_MAX || *minor > MINOR_MAX =>
        {
            return Err(Error::Device { name: name.to_vec(), major: *major, minor: *minor });
        }
        _ => {}
    }
    xattr::check(name, &attributes.xattrs)
}
