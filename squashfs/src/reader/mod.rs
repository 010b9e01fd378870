//! A read-only reader of squashfs 4.0 images, which trusts nothing in them.
//!
//! Every number out of the image is checked before it is used as a length, a position or an index; memory is
//! bounded by the caches and the format's own limits (a block, a name, a listing); nothing here recurses.
//! All of it takes `&self` and reads with pread(2), so that any number of threads may share an [`Image`].
//!
//! Run by: the user, in the launcher and in the FUSE server process.

#![forbid(unsafe_code)]

mod block_index;
mod buffers;
mod bytes;
mod cache;
mod codec;
mod data;
mod directory;
mod error;
mod inode;
mod lzo;
mod metadata;
mod path;
mod source;
mod superblock;
mod xattr;

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};

use block_index::BlockIndex;
use buffers::Block;
use cache::Cache;
use data::FRAGMENT_RECORD_LEN;
use metadata::{MetadataBlock, Table};
use xattr::XattrTables;

pub use codec::Compressor;
pub use data::Piece;
pub use directory::{Entry, EntryType, Listing};
pub use error::{Error, Result};
pub use inode::{Directory, Inode, Kind, RegularFile, Symlink};
pub use metadata::InodeRef;
pub use source::{ByteSource, TellNote};
pub use superblock::Superblock;

// The caches, together with one block in work per thread, keep a server of 8 threads below 64 MiB.
// Fragments have their own, so that streaming through a large file does not drive out the small ones.
const METADATA_CACHE: usize = 6 << 20;
const FRAGMENT_CACHE: usize = 8 << 20;
const BLOCK_CACHE: usize = 12 << 20;
/// Metadata is looked up for each request; data blocks are few (12 of 1 MiB) and must not be cut into shards.
const METADATA_SHARDS: usize = 8;

/// What to ask the kernel to read ahead when an image is opened.
const METADATA_READAHEAD: u64 = 4 << 20;

/// An open image.
pub struct Image {
    source: Box<dyn ByteSource>,
    /// Where the image starts in the source.
    offset: u64,
    superblock: Superblock,
    ids: Vec<u32>,
    fragment_table: Option<Table>,
    xattrs: Option<XattrTables>,
    metadata: Cache<MetadataBlock>,
    fragments: Cache<Block>,
    blocks: Cache<Block>,
    block_index: BlockIndex,
    read: AtomicU64,
    inflated: AtomicU64,
}

/// What has been done with an image, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// Read from the source.
    pub read: u64,
    /// What came of inflating.
    pub inflated: u64,
}

impl Image {
    /// Opens the image that starts at byte `offset` of `file`, and checks all that can be checked without
    /// reading the whole: the superblock, the tables' bounds, the ids, the root directory.
    pub fn open(file: File, offset: u64) -> Result<Image> {
        Image::open_source(Box::new(file), offset)
    }

    /// The same, wherever its bytes come from.
    pub fn open_source(source: Box<dyn ByteSource>, offset: u64) -> Result<Image> {
        let superblock = Superblock::read(&*source, offset)?;
        let mut image = Image {
            source,
            offset,
            ids: Vec::new(),
            fragment_table: None,
            xattrs: None,
            metadata: Cache::new(METADATA_CACHE, METADATA_SHARDS),
            fragments: Cache::new(FRAGMENT_CACHE, 1),
            blocks: Cache::new(BLOCK_CACHE, 1),
            block_index: BlockIndex::default(),
            read: AtomicU64::new(0),
            inflated: AtomicU64::new(0),
            superblock,
        };
        image.prefetch_metadata();
        image.open_tables()?;
        if !matches!(image.root()?.kind, Kind::Directory(_)) {
            return Err(Error::Corrupt("the root inode is not a directory"));
        }
        Ok(image)
    }

    /// Where its bytes come from, for those who must know which descriptors are needed.
    pub fn source(&self) -> &dyn ByteSource {
        &*self.source
    }

    /// What has been done with it so far.
    pub fn work(&self) -> Work {
        Work { read: self.read.load(Ordering::Relaxed), inflated: self.inflated.load(Ordering::Relaxed) }
    }

    /// The superblock, for statfs and reports.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// The inode of `/`.
    pub fn root(&self) -> Result<Inode> {
        self.inode(self.superblock.root)
    }

    fn open_tables(&mut self) -> Result<()> {
        let superblock = self.superblock.clone();
        let end = superblock.bytes_used;
        let id_end = superblock.xattr_table.unwrap_or(end);
        let id_table = Table::new(superblock.id_table, superblock.ids.into(), 4, id_end)?;
        self.ids = id_table.u32_records(self)?;
        if let Some(index) = superblock.export_table {
            // Not used; but the inode count must agree with it.
            Table::new(index, superblock.inodes.into(), 8, superblock.id_table)?;
        }
        if let Some(index) = superblock.fragment_table {
            let end = superblock.export_table.unwrap_or(superblock.id_table);
            let count = superblock.fragments.into();
            self.fragment_table = Some(Table::new(index, count, FRAGMENT_RECORD_LEN, end)?);
        }
        self.xattrs = self.open_xattrs(&superblock)?;
        Ok(())
    }

    /// The tables are at the end of the image and are read in small pieces by every lookup: have the kernel
    /// fetch them in one go. Only a hint, so that its failure does not matter.
    fn prefetch_metadata(&self) {
        let start = self.superblock.inode_table;
        let len = (self.superblock.bytes_used - start).min(METADATA_READAHEAD);
        if let Some(start) = self.offset.checked_add(start) {
            self.source.will_need(start, len);
        }
    }

    /// Fills `buffer` from byte `position` of the image.
    fn read_image(&self, position: u64, buffer: &mut [u8]) -> Result<()> {
        let end = position.checked_add(buffer.len() as u64);
        if end.is_none_or(|end| end > self.superblock.bytes_used) {
            return Err(Error::Corrupt("a position outside the image"));
        }
        let in_file = self.offset.checked_add(position).ok_or(Error::Corrupt("a position overflows"))?;
        self.read.fetch_add(buffer.len() as u64, Ordering::Relaxed);
        self.source.read_exact_at(buffer, in_file).map_err(|source| Error::Io { at: position, source })
    }

    /// Inflates what was read at byte `position`; tells how many bytes of `output` it has filled.
    fn inflate(&self, input: &[u8], output: &mut [u8], position: u64) -> Result<usize> {
        let inflated = self.superblock.compressor.decompress(input, output, position)?;
        self.inflated.fetch_add(inflated as u64, Ordering::Relaxed);
        Ok(inflated)
    }
}
