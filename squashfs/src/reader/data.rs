//! File contents: data blocks, holes, and fragments that hold the ends of several files.
//!
//! Run by: the user, in the launcher and in the FUSE server process.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use super::Image;
use super::block_index::Blocks;
use super::buffers::Block;
use super::bytes::{u32_at, u64_at};
use super::error::{Error, Result};
use super::inode::{Inode, Kind, RegularFile};

/// Set in a block's size if the block is stored as it is.
const STORED: u32 = 1 << 24;
/// On-disk size of a record in the fragment table.
pub const FRAGMENT_RECORD_LEN: u64 = 16;

static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

thread_local! {
    /// The compressed form of the block that this thread is decoding.
    static COMPRESSED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A piece of a file, still in the cache, so that it can go to the kernel without another copy.
#[derive(Debug, Clone)]
pub enum Piece {
    /// A part of a decoded block.
    Block(Arc<Block>, Range<usize>),
    /// A hole, or a part of one.
    Hole(usize),
}

impl Piece {
    /// Its bytes, in order; a long hole is several slices.
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> {
        let (block, hole) = match self {
            Piece::Block(block, range) => (block.get(range.clone()), 0),
            Piece::Hole(len) => (None, *len),
        };
        let zeros = (0..hole.div_ceil(ZEROS.len())).map(move |n| {
            let rest = hole - n * ZEROS.len();
            ZEROS.get(..rest).unwrap_or(&ZEROS)
        });
        block.into_iter().chain(zeros)
    }
}

/// A size as block lists and fragment records store it.
#[derive(Debug, Clone, Copy)]
pub struct StoredSize(u32);

impl StoredSize {
    /// Checks it against the image's block size: no block grows by compression.
    pub fn new(raw: u32, block_size: u32) -> Result<StoredSize> {
        if raw & !STORED > block_size {
            Err(Error::Corrupt("a data block larger than the block size"))
        } else {
            Ok(StoredSize(raw))
        }
    }

    /// Bytes on disk; none for a hole.
    pub fn bytes(self) -> u32 {
        self.0 & !STORED
    }

    fn is_compressed(self) -> bool {
        self.0 & STORED == 0
    }
}

impl Image {
    /// The contents of a file from `offset` on: `len` bytes, or fewer at its end.
    pub fn read(&self, inode: &Inode, offset: u64, len: usize) -> Result<Vec<Piece>> {
        let Kind::File(file) = &inode.kind else { return Err(Error::NotAFile) };
        let end = offset.saturating_add(len as u64).min(file.size);
        let mut pieces = Vec::new();
        let block_size = u64::from(self.superblock.block_size);
        let mut blocks = None;
        let mut at = offset;
        while at < end {
            let number = at / block_size;
            let start = number * block_size;
            // What of this block exists, and what of that is wanted.
            let block_len = (file.size - start).min(block_size) as usize;
            let wanted = (at - start) as usize..(end - start).min(block_size) as usize;
            at = start + wanted.end as u64;
            if number < self.block_count(file) {
                let blocks = match &mut blocks {
                    Some(blocks) => blocks,
                    none => none.insert(Blocks::seek(self, inode.reference, file, number)?),
                };
                pieces.push(self.block_piece(blocks, block_len, wanted)?);
            } else {
                pieces.push(self.fragment_piece(file, wanted)?);
            }
        }
        Ok(pieces)
    }

    /// How many blocks the file has besides its fragment.
    pub(super) fn block_count(&self, file: &RegularFile) -> u64 {
        let block_size = u64::from(self.superblock.block_size);
        match file.fragment {
            Some(_) => file.size / block_size,
            None => file.size.div_ceil(block_size),
        }
    }

    fn block_piece(&self, blocks: &mut Blocks<'_>, len: usize, wanted: Range<usize>) -> Result<Piece> {
        let (position, size) = blocks.next()?;
        if size.bytes() == 0 {
            return Ok(Piece::Hole(wanted.len()));
        }
        let block = self.blocks.get(position, || self.load_data(position, size))?;
        if block.len() != len {
            return Err(Error::Corrupt("a data block of the wrong length"));
        }
        Ok(Piece::Block(block, wanted))
    }

    fn fragment_piece(&self, file: &RegularFile, wanted: Range<usize>) -> Result<Piece> {
        let (number, offset) = file.fragment.ok_or(Error::Corrupt("a file without its end"))?;
        let table = self.fragment_table.as_ref().ok_or(Error::Corrupt("a fragment without a table"))?;
        let record: [u8; FRAGMENT_RECORD_LEN as usize] = table.reader(self, number.into())?.array()?;
        let position = u64_at(&record, 0)?;
        let size = StoredSize::new(u32_at(&record, 8)?, self.superblock.block_size)?;
        let block = self.fragments.get(position, || self.load_data(position, size))?;
        let offset = offset as usize;
        let range = offset.saturating_add(wanted.start)..offset.saturating_add(wanted.end);
        if range.end > block.len() {
            return Err(Error::Corrupt("a file reaches behind its fragment"));
        }
        Ok(Piece::Block(block, range))
    }

    fn load_data(&self, position: u64, size: StoredSize) -> Result<Block> {
        let len = size.bytes() as usize;
        let block_size = self.superblock.block_size as usize;
        if !size.is_compressed() {
            return Block::filled(block_size, |buffer| {
                let buffer =
                    buffer.get_mut(..len).ok_or(Error::Corrupt("a data block of the wrong length"))?;
                self.read_image(position, buffer)?;
                Ok(len)
            });
        }
        COMPRESSED.with_borrow_mut(|compressed| {
            if compressed.len() < len {
                compressed.resize(len, 0);
            }
            let input =
                compressed.get_mut(..len).ok_or(Error::Corrupt("a data block of the wrong length"))?;
            self.read_image(position, input)?;
            Block::filled(block_size, |buffer| self.inflate(input, buffer, position))
        })
    }
}
