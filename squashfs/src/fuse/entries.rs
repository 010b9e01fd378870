//! Attributes and directory entries, as the kernel wants them.
//!
//! Run by: the user, in the FUSE server process.

#![forbid(unsafe_code)]

use rustix::io::Errno;

use super::Owner;
use super::abi::{Message, ROOT_ID};
use super::operations::Server;
use crate::reader::{EntryType, Inode, InodeRef, Kind};

/// How long the kernel may believe what it is told, in seconds: ten years, since the image never changes.
pub const FOREVER: u64 = 10 * 365 * 24 * 3600;

/// The node of an inode: its place in the image, moved up because 0 means "no such file" and 1 the root.
pub fn node_of(reference: InodeRef) -> u64 {
    reference.raw() + 2
}

/// The place of a node's inode; `None` for the root.
pub fn reference_of(node: u64) -> Result<Option<InodeRef>, Errno> {
    if node == ROOT_ID {
        return Ok(None);
    }
    let raw = node.checked_sub(2).ok_or(Errno::STALE)?;
    InodeRef::from_raw(raw).map(Some).map_err(|_| Errno::STALE)
}

/// `struct fuse_attr`
pub fn attributes(message: &mut Message, inode: &Inode, owner: Owner, block_size: u32) {
    let (uid, gid) = match owner {
        Owner::Image => (inode.uid, inode.gid),
        Owner::Fixed { uid, gid } => (uid, gid),
    };
    let size = inode.size();
    let on_disk = match &inode.kind {
        Kind::File(file) => size.saturating_sub(file.sparse),
        _ => size,
    };
    let time = u64::from(inode.mtime);
    message.u64s(&[inode.number.into(), size, on_disk.div_ceil(512), time, time, time]).u32s(&[
        0,
        0,
        0,
        inode.mode,
        inode.nlink,
        uid,
        gid,
        inode.device(),
        block_size,
        0,
    ]);
}

/// `struct fuse_entry_out`
pub fn entry(message: &mut Message, inode: &Inode, owner: Owner, block_size: u32) {
    message.u64s(&[node_of(inode.reference), 0, FOREVER, FOREVER]).u32s(&[0, 0]);
    attributes(message, inode, owner, block_size);
}

/// `struct fuse_entry_out` for a name that does not exist, so that the kernel remembers that; as the first
/// part of a `struct fuse_direntplus` it means "nothing known about this one".
pub fn no_entry(message: &mut Message) {
    message.u64s(&[0, 0, FOREVER, 0]).u32s(&[0; 2]).u64s(&[0; 11]);
}

/// An answer to READDIR or READDIRPLUS, up to the size that the kernel has room for.
pub struct EntryList<'a> {
    pub server: &'a Server,
    pub message: &'a mut Message,
    pub room: usize,
    /// Whether to send the attributes too, which saves a LOOKUP per entry.
    pub with_attributes: bool,
}

/// One name of a listing.
pub struct Name<'a> {
    pub name: &'a [u8],
    pub number: u64,
    pub file_type: EntryType,
    /// Where the listing continues behind it.
    pub next: u64,
    /// Its inode; `.` and `..`, which the kernel knows, have none.
    pub inode: Option<InodeRef>,
}

impl EntryList<'_> {
    const ENTRY_LEN: usize = 128;
    const DIRENT_LEN: usize = 24;

    /// Appends a name, or tells that it does not fit any more.
    pub fn push(&mut self, name: &Name<'_>) -> bool {
        let entry_len = if self.with_attributes { Self::ENTRY_LEN } else { 0 };
        let len = entry_len + (Self::DIRENT_LEN + name.name.len()).next_multiple_of(8);
        if self.message.bytes().len() + len > self.room {
            return false;
        }
        if self.with_attributes {
            // A broken inode is reported to whoever looks it up, not to all who list its directory.
            match name.inode.and_then(|reference| self.server.image.inode(reference).ok()) {
                Some(inode) => entry(self.message, &inode, self.server.owner, self.server.block_size()),
                None => no_entry(self.message),
            }
        }
        self.message
            .u64s(&[name.number, name.next])
            .u32s(&[name.name.len() as u32, dirent_type(name.file_type)])
            .raw(name.name)
            .align();
        true
    }
}

/// `d_type`
fn dirent_type(file_type: EntryType) -> u32 {
    match file_type {
        EntryType::Fifo => 1,
        EntryType::CharDevice => 2,
        EntryType::Directory => 4,
        EntryType::BlockDevice => 6,
        EntryType::File => 8,
        EntryType::Symlink => 10,
        EntryType::Socket => 12,
    }
}
