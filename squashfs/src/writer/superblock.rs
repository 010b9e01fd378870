//! The superblock of an image that is written.
//!
//! Run by: the user, in the importer.

use super::Options;
use super::codec::Compression;
use super::metadata::MetadataRef;

/// Bytes of a superblock.
pub(super) const SUPERBLOCK_LEN: usize = 96;
/// A table that the image does not have.
const ABSENT: u64 = u64::MAX;

/// Flags. Only the last one means something to the kernel; the others tell `unsquashfs -s` and mksquashfs.
const UNCOMPRESSED: u16 = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 8 | 1 << 11; // inodes, data, fragments, xattrs, ids
const ALWAYS_FRAGMENTS: u16 = 1 << 5;
const DUPLICATES: u16 = 1 << 6;
const NO_XATTRS: u16 = 1 << 9;
const COMPRESSOR_OPTIONS: u16 = 1 << 10;

/// Where the tables are in the image.
pub(super) struct Positions {
    pub inode_table: u64,
    pub directory_table: u64,
    pub fragment_table: u64,
    pub id_table: u64,
    pub xattr_table: Option<u64>,
    pub bytes_used: u64,
}

/// How much the tables have.
pub(super) struct Counts {
    pub inodes: u32,
    pub fragments: u32,
    pub ids: u16,
}

pub(super) fn encode(
    options: &Options,
    positions: &Positions,
    counts: Counts,
    root: MetadataRef,
) -> [u8; SUPERBLOCK_LEN] {
    let mut flags = ALWAYS_FRAGMENTS | DUPLICATES;
    if options.compression == Compression::None {
        flags |= UNCOMPRESSED;
    }
    if positions.xattr_table.is_none() {
        flags |= NO_XATTRS;
    }
    if options.compression.options().is_some() {
        flags |= COMPRESSOR_OPTIONS;
    }
    let mut block = [0; SUPERBLOCK_LEN];
    let mut put = |at: usize, bytes: &[u8]| {
        for (place, byte) in block.iter_mut().skip(at).zip(bytes) {
            *place = *byte;
        }
    };
    put(0, b"hsqs");
    put(4, &counts.inodes.to_le_bytes());
    put(8, &options.mkfs_time.to_le_bytes());
    put(12, &options.block_size.to_le_bytes());
    put(16, &counts.fragments.to_le_bytes());
    put(20, &options.compression.id().to_le_bytes());
    put(22, &(options.block_size.trailing_zeros() as u16).to_le_bytes());
    put(24, &flags.to_le_bytes());
    put(26, &counts.ids.to_le_bytes());
    put(28, &4_u16.to_le_bytes());
    put(30, &0_u16.to_le_bytes());
    put(32, &root.raw().to_le_bytes());
    put(40, &positions.bytes_used.to_le_bytes());
    put(48, &positions.id_table.to_le_bytes());
    put(56, &positions.xattr_table.unwrap_or(ABSENT).to_le_bytes());
    put(64, &positions.inode_table.to_le_bytes());
    put(72, &positions.directory_table.to_le_bytes());
    put(80, &positions.fragment_table.to_le_bytes());
    put(88, &ABSENT.to_le_bytes()); // no NFS export
    block
}
