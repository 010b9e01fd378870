//! The tree stage: inodes and listings, then all other tables, of a tree whose contents are written.
//!
//! An entry of a listing refers to an inode, and a directory's inode to its listing. So directories are taken in
//! reverse preorder: everything below a directory is written before it. The inodes of one directory's entries stand
//! together in the order of the names, with numbers that follow each other: that keeps listings short.
//!
//! Run by: the user, in the importer.

use std::collections::{BTreeMap, BTreeSet};

use super::FileId;
use super::codec::Encoder;
use super::data::FileData;
use super::directory::{Listing, ListingEntry, write_listing};
use super::error::{Error, Result};
use super::inode::{InodeBody, InodeHead, encode_inode};
use super::metadata::{MetadataRef, MetadataTable};
use super::tree::{Content, NodeId, Tree};
use super::xattr::XattrTable;

const MAX_IDS: usize = u16::MAX as usize;

/// The tables that come of a tree.
pub(super) struct Tables<'a> {
    pub inodes: MetadataTable,
    pub directories: MetadataTable,
    pub ids: IdTable,
    pub xattrs: XattrTable<'a>,
    /// The numbers that the data stage gave to the fragment blocks in use, each with the one that it has in the image.
    pub fragments: BTreeMap<u32, u32>,
    pub inode_count: u32,
    pub root: MetadataRef,
}

/// The distinct uids and gids, in the order in which they were met.
#[derive(Default)]
pub(super) struct IdTable {
    pub ids: Vec<u32>,
    numbers: BTreeMap<u32, u16>,
}

impl IdTable {
    fn number(&mut self, id: u32) -> Result<u16> {
        if let Some(number) = self.numbers.get(&id) {
            return Ok(*number);
        }
        if self.ids.len() == MAX_IDS {
            return Err(Error::TooMany { what: "distinct owners and groups", limit: MAX_IDS as u64 });
        }
        let number = self.ids.len() as u16;
        self.ids.push(id);
        self.numbers.insert(id, number);
        Ok(number)
    }
}

/// What the stage knows of one node.
#[derive(Default)]
struct NodeState {
    /// 0 for what has no name.
    number: u32,
    nlink: u32,
    /// Of a directory, before its inode is written.
    parent: u32,
    /// Of a directory. There are few of them, and many files.
    listing: Option<Box<Listing>>,
    inode: Option<(MetadataRef, u16)>,
}

/// Turns a tree into its tables.
pub(super) fn build<'a>(tree: &'a Tree, files: &[FileData], encoder: &mut Encoder) -> Result<Tables<'a>> {
    let (order, states, inode_count) = number_nodes(tree)?;
    let fragments = used_fragments(tree, files, &states);
    let mut builder = Builder {
        tree,
        files,
        states,
        tables: Tables {
            inodes: MetadataTable::default(),
            directories: MetadataTable::default(),
            ids: IdTable::default(),
            xattrs: XattrTable::default(),
            fragments,
            inode_count,
            root: MetadataRef { block: 0, offset: 0 },
        },
    };
    for directory in order.into_iter().rev() {
        builder.write_directory(directory, encoder)?;
    }
    (builder.tables.root, _) = builder.write_inode(Tree::ROOT, encoder)?;
    Ok(builder.tables)
}

/// The directories in preorder, and all nodes with their numbers and link counts.
fn number_nodes(tree: &Tree) -> Result<(Vec<NodeId>, Vec<NodeState>, u32)> {
    let mut states: Vec<NodeState> = Vec::new();
    states.resize_with(tree.nodes.len(), NodeState::default);
    let unknown = || Error::Unknown { what: "an entry" };
    let mut last = 1;
    let root = states.first_mut().ok_or_else(unknown)?;
    (root.number, root.nlink) = (last, 2);
    let (mut order, mut stack) = (Vec::new(), vec![Tree::ROOT]);
    while let Some(directory) = stack.pop() {
        order.push(directory);
        let children = &tree.node(directory)?.children;
        let first_below = stack.len();
        let parent = states.get(directory.0).ok_or_else(unknown)?.number;
        let mut directories = 0;
        for child in children.values() {
            let state = states.get_mut(child.0).ok_or_else(unknown)?;
            if state.number == 0 {
                let too_many = Error::TooMany { what: "inodes", limit: u32::MAX.into() };
                last = last.checked_add(1).filter(|last| *last < u32::MAX).ok_or(too_many)?;
                state.number = last;
            }
            if tree.node(*child)?.content == Content::Directory {
                (state.nlink, state.parent) = (2, parent);
                directories += 1;
                stack.push(*child);
            } else {
                state.nlink += 1;
            }
        }
        // The stack gives the last one first.
        if let Some(below) = stack.get_mut(first_below..) {
            below.reverse();
        }
        states.get_mut(directory.0).ok_or_else(unknown)?.nlink += directories;
    }
    // As mksquashfs has it: the root is in no directory of the image.
    states.first_mut().ok_or_else(unknown)?.parent = last + 1;
    Ok((order, states, last))
}

/// The fragment blocks that entries of the tree use. The others are left out of the table: unsquashfs takes an image
/// with more of them than inodes for a corrupt one.
fn used_fragments(tree: &Tree, files: &[FileData], states: &[NodeState]) -> BTreeMap<u32, u32> {
    let named = tree.nodes.iter().zip(states).filter(|(_, state)| state.number != 0);
    let tails = named.filter_map(|(node, _)| match node.content {
        Content::File(FileId(file)) => files.get(file)?.tail,
        _ => None,
    });
    let used: BTreeSet<u32> = tails.map(|tail| tail.fragment).collect();
    used.into_iter().zip(0..).collect()
}

struct Builder<'t, 'f> {
    tree: &'t Tree,
    files: &'f [FileData],
    states: Vec<NodeState>,
    tables: Tables<'t>,
}

impl Builder<'_, '_> {
    /// Writes the inodes of a directory's entries, and its listing.
    fn write_directory(&mut self, directory: NodeId, encoder: &mut Encoder) -> Result<()> {
        let children = &self.tree.node(directory)?.children;
        let mut entries = Vec::with_capacity(children.len());
        for (name, child) in children {
            let (inode, file_type) = self.write_inode(*child, encoder)?;
            entries.push(ListingEntry { name, inode, number: self.state(*child)?.number, file_type });
        }
        let listing = write_listing(&entries, &mut self.tables.directories, encoder)?;
        self.state(directory)?.listing = Some(Box::new(listing));
        Ok(())
    }

    /// Writes an inode, unless it is written already for another name; returns its place and basic type.
    fn write_inode(&mut self, id: NodeId, encoder: &mut Encoder) -> Result<(MetadataRef, u16)> {
        let node = self.tree.node(id)?;
        let state = self.states.get_mut(id.0).ok_or(Error::Unknown { what: "an entry" })?;
        if let Some(written) = state.inode {
            return Ok(written);
        }
        let attributes = &node.attributes;
        let head = InodeHead {
            mode: attributes.mode,
            uid: self.tables.ids.number(attributes.uid)?,
            gid: self.tables.ids.number(attributes.gid)?,
            mtime: attributes.mtime,
            number: state.number,
            nlink: state.nlink,
            xattrs: self.tables.xattrs.number(&attributes.xattrs, encoder)?,
        };
        let listing = state.listing.take();
        let mut file;
        let body = match &node.content {
            Content::Directory => InodeBody::Directory {
                listing: listing.as_ref().ok_or(Error::Unknown { what: "a listing" })?,
                parent: state.parent,
            },
            Content::File(FileId(number)) => {
                file = self.files.get(*number).ok_or(Error::Unknown { what: "a file" })?.clone();
                if let Some(tail) = &mut file.tail {
                    let fragment = self.tables.fragments.get(&tail.fragment);
                    tail.fragment = *fragment.ok_or(Error::Unknown { what: "a fragment block" })?;
                }
                InodeBody::File(&file)
            }
            Content::Symlink(target) => InodeBody::Symlink(target),
            Content::BlockDevice(device) => InodeBody::BlockDevice(*device),
            Content::CharDevice(device) => InodeBody::CharDevice(*device),
            Content::Fifo => InodeBody::Fifo,
            Content::Socket => InodeBody::Socket,
        };
        let written = (self.tables.inodes.place()?, body.file_type());
        self.tables.inodes.write(&encode_inode(&head, &body), encoder)?;
        state.inode = Some(written);
        Ok(written)
    }

    fn state(&mut self, id: NodeId) -> Result<&mut NodeState> {
        self.states.get_mut(id.0).ok_or(Error::Unknown { what: "an entry" })
    }
}
