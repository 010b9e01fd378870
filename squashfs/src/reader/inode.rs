//! Inodes: all fourteen types, parsed from the inode table on each use (that is cheaper than keeping them).
//!
//! Run by: the user, in the launcher and in the FUSE server process.

use super::Image;
use super::bytes::{u16_at, u32_at, u64_at};
use super::error::{Error, Result};
use super::metadata::{InodeRef, MetadataReader, Place};

/// "No fragment" and "no xattrs".
const NONE: u32 = u32::MAX;
/// Linux has no longer link targets (PATH_MAX less the final zero).
const MAX_TARGET: u32 = 4095;

/// File types as in `st_mode`.
const S_IFIFO: u32 = 0o010000;
const S_IFCHR: u32 = 0o020000;
const S_IFDIR: u32 = 0o040000;
const S_IFBLK: u32 = 0o060000;
const S_IFREG: u32 = 0o100000;
const S_IFLNK: u32 = 0o120000;
const S_IFSOCK: u32 = 0o140000;

/// One file of whatever type.
#[derive(Debug, Clone)]
pub struct Inode {
    /// Where it is in the image.
    pub reference: InodeRef,
    /// Its number, unique in the image: `st_ino`.
    pub number: u32,
    /// Type and permissions: `st_mode`.
    pub mode: u32,
    /// Owner as in the image.
    pub uid: u32,
    /// Group as in the image.
    pub gid: u32,
    /// Seconds since 1970.
    pub mtime: u32,
    /// Number of names.
    pub nlink: u32,
    /// What the type adds.
    pub kind: Kind,
    /// Number of its xattr set, if it has one.
    pub(super) xattrs: Option<u32>,
}

/// The part of an inode that depends on its type.
#[derive(Debug, Clone)]
pub enum Kind {
    /// a directory
    Directory(Directory),
    /// a regular file
    File(RegularFile),
    /// a symbolic link
    Symlink(Symlink),
    /// a block device with this number, encoded as the kernel does
    BlockDevice(u32),
    /// a character device
    CharDevice(u32),
    /// a named pipe
    Fifo,
    /// a socket
    Socket,
}

/// Where a directory's listing is.
#[derive(Debug, Clone)]
pub struct Directory {
    /// Inode number of the directory above.
    pub parent: u32,
    /// Bytes of the listing.
    pub(super) listing_len: u32,
    /// Start of the listing's first metadata block, relative to the directory table.
    pub(super) block: u32,
    /// Offset in that block.
    pub(super) offset: u16,
    /// Number of entries in the index, and where it starts.
    pub(super) index: Option<(u16, Place)>,
}

/// Where a file's contents are.
#[derive(Debug, Clone)]
pub struct RegularFile {
    /// Length in bytes.
    pub size: u64,
    /// Bytes of it that are holes.
    pub sparse: u64,
    /// Position of the first data block in the image.
    pub(super) start: u64,
    /// Where the list of block sizes starts.
    pub(super) blocks: Place,
    /// The fragment with the file's end, and the offset there.
    pub(super) fragment: Option<(u32, u32)>,
}

/// Where a symbolic link's target is.
#[derive(Debug, Clone)]
pub struct Symlink {
    /// Length of the target.
    pub len: u32,
    pub(super) target: Place,
}

impl Inode {
    /// `st_size`
    pub fn size(&self) -> u64 {
        match &self.kind {
            // 3 is what mksquashfs counts for `.` and `..`, and what the kernel shows.
            Kind::Directory(directory) => u64::from(directory.listing_len) + 3,
            Kind::File(file) => file.size,
            Kind::Symlink(link) => link.len.into(),
            _ => 0,
        }
    }

    /// `st_rdev`, encoded as the kernel does.
    pub fn device(&self) -> u32 {
        match self.kind {
            Kind::BlockDevice(device) | Kind::CharDevice(device) => device,
            _ => 0,
        }
    }

    /// Whether it has extended attributes.
    pub fn has_xattrs(&self) -> bool {
        self.xattrs.is_some()
    }
}

impl Image {
    /// The inode at `reference`.
    pub fn inode(&self, reference: InodeRef) -> Result<Inode> {
        let place = reference.place(self.superblock.inode_table)?;
        let mut reader = self.inode_reader(place)?;
        let head: [u8; 16] = reader.array()?;
        let (file_type, kind, nlink, xattrs) = match u16_at(&head, 0)? {
            1 => basic_directory(&mut reader)?,
            2 => basic_file(&mut reader)?,
            3 => symlink(&mut reader, false)?,
            4 => device(&mut reader, S_IFBLK, Kind::BlockDevice, false)?,
            5 => device(&mut reader, S_IFCHR, Kind::CharDevice, false)?,
            6 => ipc(&mut reader, S_IFIFO, Kind::Fifo, false)?,
            7 => ipc(&mut reader, S_IFSOCK, Kind::Socket, false)?,
            8 => extended_directory(&mut reader)?,
            9 => extended_file(&mut reader)?,
            10 => symlink(&mut reader, true)?,
            11 => device(&mut reader, S_IFBLK, Kind::BlockDevice, true)?,
            12 => device(&mut reader, S_IFCHR, Kind::CharDevice, true)?,
            13 => ipc(&mut reader, S_IFIFO, Kind::Fifo, true)?,
            14 => ipc(&mut reader, S_IFSOCK, Kind::Socket, true)?,
            _ => return Err(Error::Corrupt("an inode of unknown type")),
        };
        let number = u32_at(&head, 12)?;
        if number == 0 || number > self.superblock.inodes {
            return Err(Error::Corrupt("an inode number above the inode count"));
        }
        Ok(Inode {
            reference,
            number,
            mode: file_type | u32::from(u16_at(&head, 2)? & 0o7777),
            uid: self.id(u16_at(&head, 4)?)?,
            gid: self.id(u16_at(&head, 6)?)?,
            mtime: u32_at(&head, 8)?,
            nlink,
            kind,
            xattrs,
        })
    }

    /// The target of a symbolic link.
    pub fn read_link(&self, inode: &Inode) -> Result<Vec<u8>> {
        let Kind::Symlink(link) = &inode.kind else { return Err(Error::NotASymlink) };
        let mut target = vec![0; link.len as usize];
        self.inode_reader(link.target)?.read(&mut target)?;
        if target.contains(&0) {
            return Err(Error::Corrupt("a link target with a zero byte"));
        }
        Ok(target)
    }

    /// A reader in the inode table.
    pub(super) fn inode_reader(&self, place: Place) -> Result<MetadataReader<'_>> {
        MetadataReader::new(self, place, self.superblock.directory_table)
    }

    fn id(&self, number: u16) -> Result<u32> {
        self.ids.get(usize::from(number)).copied().ok_or(Error::Corrupt("an owner number above the id count"))
    }
}

/// File type, kind, link count, xattr set.
type Parts = (u32, Kind, u32, Option<u32>);

fn unless_none(number: u32) -> Option<u32> {
    (number != NONE).then_some(number)
}

fn basic_directory(reader: &mut MetadataReader<'_>) -> Result<Parts> {
    let raw: [u8; 16] = reader.array()?;
    let directory = Directory {
        parent: u32_at(&raw, 12)?,
        listing_len: u32::from(u16_at(&raw, 8)?).saturating_sub(3),
        block: u32_at(&raw, 0)?,
        offset: u16_at(&raw, 10)?,
        index: None,
    };
    Ok((S_IFDIR, Kind::Directory(directory), u32_at(&raw, 4)?, None))
}

fn extended_directory(reader: &mut MetadataReader<'_>) -> Result<Parts> {
    let raw: [u8; 24] = reader.array()?;
    let entries = u16_at(&raw, 16)?;
    let directory = Directory {
        parent: u32_at(&raw, 12)?,
        listing_len: u32_at(&raw, 4)?.saturating_sub(3),
        block: u32_at(&raw, 8)?,
        offset: u16_at(&raw, 18)?,
        index: (entries > 0).then(|| (entries, reader.place())),
    };
    Ok((S_IFDIR, Kind::Directory(directory), u32_at(&raw, 0)?, unless_none(u32_at(&raw, 20)?)))
}

fn basic_file(reader: &mut MetadataReader<'_>) -> Result<Parts> {
    let raw: [u8; 16] = reader.array()?;
    let offset = u32_at(&raw, 8)?;
    let file = RegularFile {
        size: u32_at(&raw, 12)?.into(),
        sparse: 0,
        start: u32_at(&raw, 0)?.into(),
        blocks: reader.place(),
        fragment: unless_none(u32_at(&raw, 4)?).map(|number| (number, offset)),
    };
    Ok((S_IFREG, Kind::File(file), 1, None))
}

fn extended_file(reader: &mut MetadataReader<'_>) -> Result<Parts> {
    let raw: [u8; 40] = reader.array()?;
    let (size, offset) = (u64_at(&raw, 8)?, u32_at(&raw, 32)?);
    if i64::try_from(size).is_err() {
        return Err(Error::Corrupt("a file size that Linux cannot express"));
    }
    let file = RegularFile {
        size,
        sparse: u64_at(&raw, 16)?,
        start: u64_at(&raw, 0)?,
        blocks: reader.place(),
        fragment: unless_none(u32_at(&raw, 28)?).map(|number| (number, offset)),
    };
    Ok((S_IFREG, Kind::File(file), u32_at(&raw, 24)?, unless_none(u32_at(&raw, 36)?)))
}

fn symlink(reader: &mut MetadataReader<'_>, extended: bool) -> Result<Parts> {
    let raw: [u8; 8] = reader.array()?;
    let len = u32_at(&raw, 4)?;
    if len == 0 || len > MAX_TARGET {
        return Err(Error::Corrupt("a symbolic link with an impossible length"));
    }
    let target = reader.place();
    let mut xattrs = None;
    if extended {
        reader.skip(len.into())?;
        xattrs = unless_none(reader.u32()?);
    }
    Ok((S_IFLNK, Kind::Symlink(Symlink { len, target }), u32_at(&raw, 0)?, xattrs))
}

fn device(
    reader: &mut MetadataReader<'_>,
    file_type: u32,
    kind: fn(u32) -> Kind,
    extended: bool,
) -> Result<Parts> {
    let raw: [u8; 8] = reader.array()?;
    let xattrs = if extended { unless_none(reader.u32()?) } else { None };
    Ok((file_type, kind(u32_at(&raw, 4)?), u32_at(&raw, 0)?, xattrs))
}

fn ipc(reader: &mut MetadataReader<'_>, file_type: u32, kind: Kind, extended: bool) -> Result<Parts> {
    let nlink = reader.u32()?;
    let xattrs = if extended { unless_none(reader.u32()?) } else { None };
    Ok((file_type, kind, nlink, xattrs))
}
