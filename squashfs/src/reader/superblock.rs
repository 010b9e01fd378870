//! The superblock: read once, and every field checked against the others and the file before any use.
//!
//! Run by: the user, in the launcher and in the FUSE server process.

use super::bytes::{u16_at, u32_at, u64_at};
use super::codec::Compressor;
use super::error::{Error, Result};
use super::metadata::InodeRef;
use super::source::ByteSource;

/// A table that the image does not have.
const ABSENT: u64 = u64::MAX;

const MIN_BLOCK_LOG: u16 = 12;
const MAX_BLOCK_LOG: u16 = 20;

/// The checked superblock. All positions are relative to the start of the image.
#[derive(Debug, Clone)]
pub struct Superblock {
    /// How many inodes the image has.
    pub inodes: u32,
    /// Size of a full data block; a power of two from 4 KiB to 1 MiB.
    pub block_size: u32,
    /// How many fragment blocks the image has.
    pub fragments: u32,
    /// The one compressor of all blocks.
    pub compressor: Compressor,
    /// How many distinct uids and gids the image has.
    pub ids: u16,
    /// Where the inode of `/` is.
    pub root: InodeRef,
    /// Length of the image.
    pub bytes_used: u64,
    /// Start of the uid/gid table's index.
    pub id_table: u64,
    /// Start of the xattr table's head, if there are xattrs.
    pub xattr_table: Option<u64>,
    /// Start of the inodes.
    pub inode_table: u64,
    /// Start of the directory listings, where the inodes end.
    pub directory_table: u64,
    /// Start of the fragment table's index, if there are fragments.
    pub fragment_table: Option<u64>,
    /// Start of the NFS export table's index; unused but checked, since the inode count shows in it.
    pub export_table: Option<u64>,
}

impl Superblock {
    /// Bytes of a superblock on disk.
    pub const LENGTH: usize = 96;

    /// Reads and checks the superblock of the image that starts at `offset` of `source`.
    pub fn read(source: &dyn ByteSource, offset: u64) -> Result<Superblock> {
        let io = |error| Error::Io { at: 0, source: error };
        let present = source.size().map_err(io)?.saturating_sub(offset);
        let mut raw = [0; Superblock::LENGTH];
        if present < Superblock::LENGTH as u64 {
            return Err(Error::TooShort { len: present });
        }
        source.read_exact_at(&mut raw, offset).map_err(io)?;
        check_identity(&raw)?;
        let superblock = parse(&raw)?;
        if superblock.bytes_used > present {
            return Err(Error::Truncated { claimed: superblock.bytes_used, present });
        }
        superblock.check_tables()?;
        Ok(superblock)
    }

    /// Start of the first table behind the directory listings: they end there at the latest.
    pub fn directory_end(&self) -> u64 {
        self.fragment_table.or(self.export_table).unwrap_or(self.id_table)
    }

    /// The tables lie in the one order that mksquashfs writes and the kernel demands, so that each ends where
    /// the next starts.
    fn check_tables(&self) -> Result<()> {
        let tables = [
            ("the inode table start", Some(self.inode_table)),
            ("the directory table start", Some(self.directory_table)),
            ("the fragment table start", self.fragment_table),
            ("the export table start", self.export_table),
            ("the id table start", Some(self.id_table)),
            ("the xattr table start", self.xattr_table),
        ];
        let mut after = Superblock::LENGTH as u64 - 1;
        for (field, start) in tables {
            let Some(start) = start else { continue };
            if start <= after {
                return Err(Error::Superblock { field, value: start, problem: "overlaps what precedes it" });
            }
            if start >= self.bytes_used {
                return Err(Error::Superblock {
                    field,
                    value: start,
                    problem: "beyond the end of the image",
                });
            }
            after = start;
        }
        Ok(())
    }
}

/// Magic and version come first: without them no other field means anything.
fn check_identity(raw: &[u8]) -> Result<()> {
    let start: [u8; 4] = super::bytes::array_at(raw, 0)?;
    match &start {
        b"hsqs" => {}
        b"sqsh" => return Err(Error::BigEndian),
        _ => return Err(Error::NotSquashfs { start }),
    }
    match (u16_at(raw, 28)?, u16_at(raw, 30)?) {
        (4, 0) => Ok(()),
        (major, minor) => Err(Error::Version { major, minor }),
    }
}

fn parse(raw: &[u8]) -> Result<Superblock> {
    let optional = |at| u64_at(raw, at).map(|start| (start != ABSENT).then_some(start));
    let fragments = u32_at(raw, 16)?;
    let (block_size, block_log) = (u32_at(raw, 12)?, u16_at(raw, 22)?);
    if !(MIN_BLOCK_LOG..=MAX_BLOCK_LOG).contains(&block_log) || block_size != 1 << block_log {
        let problem = "not a power of two from 4096 to 1048576 that agrees with the block log";
        return Err(Error::Superblock { field: "the block size", value: block_size.into(), problem });
    }
    let inodes = u32_at(raw, 4)?;
    if inodes == 0 {
        return Err(Error::Superblock { field: "the inode count", value: 0, problem: "even / is an inode" });
    }
    let ids = u16_at(raw, 26)?;
    if ids == 0 {
        return Err(Error::Superblock { field: "the id count", value: 0, problem: "even / has an owner" });
    }
    let fragment_table = optional(80)?.filter(|_| fragments > 0);
    if fragments > 0 && fragment_table.is_none() {
        let problem = "but there is no fragment table";
        return Err(Error::Superblock { field: "the fragment count", value: fragments.into(), problem });
    }
    Ok(Superblock {
        inodes,
        block_size,
        fragments,
        compressor: Compressor::from_id(u16_at(raw, 20)?)?,
        ids,
        root: InodeRef::from_raw(u64_at(raw, 32)?)?,
        bytes_used: u64_at(raw, 40)?,
        id_table: u64_at(raw, 48)?,
        xattr_table: optional(56)?,
        inode_table: u64_at(raw, 64)?,
        directory_table: u64_at(raw, 72)?,
        fragment_table,
        export_table: optional(88)?,
    })
}
