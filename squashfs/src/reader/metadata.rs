//! Metadata: 8 KiB blocks, each compressed by itself, that inodes, listings, tables and xattrs are packed
//! into.
//!
//! Run by: the user, in the launcher and in the FUSE server process.

use std::sync::Arc;

use super::Image;
use super::bytes::{u16_at, u64_at};
use super::error::{Error, Result};

/// Decoded size of every metadata block except the last one of a table.
pub const METADATA_LEN: usize = 8192;
/// Set in a block's length if the block is stored as it is.
const STORED: u16 = 0x8000;
/// The length in front of a block.
const HEAD_LEN: usize = 2;

/// Where an inode is: start of its metadata block (relative to the inode table) and the offset in the decoded
/// block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InodeRef(u64);

impl InodeRef {
    /// From the 48 bits that the superblock stores in a 64-bit field.
    pub fn from_raw(raw: u64) -> Result<InodeRef> {
        if raw >> 48 != 0 {
            Err(Error::Corrupt("an inode reference has more than 48 bits"))
        } else {
            Ok(InodeRef(raw))
        }
    }

    /// From the two halves that directories store.
    pub fn new(block: u32, offset: u16) -> InodeRef {
        InodeRef(u64::from(block) << 16 | u64::from(offset))
    }

    /// The 48 bits.
    pub fn raw(self) -> u64 {
        self.0
    }

    /// The place, given where its table starts.
    pub fn place(self, table: u64) -> Result<Place> {
        Place::new(table, self.0 >> 16, (self.0 & 0xffff) as u16)
    }
}

/// A place in metadata: a block's position in the image, and an offset in the decoded block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    block: u64,
    offset: usize,
}

impl Place {
    /// The place at `block` bytes behind the start of `table`.
    pub fn new(table: u64, block: u64, offset: u16) -> Result<Place> {
        let block = table.checked_add(block).ok_or(Error::Corrupt("a metadata position overflows"))?;
        Ok(Place { block, offset: offset.into() })
    }
}

/// A decoded metadata block, and where the next one starts.
pub struct MetadataBlock {
    bytes: Box<[u8]>,
    next: u64,
}

impl AsRef<[u8]> for MetadataBlock {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Reads forward through the metadata of one table, from block to block.
pub struct MetadataReader<'a> {
    image: &'a Image,
    /// No block starts at or behind this position.
    end: u64,
    position: u64,
    block: Arc<MetadataBlock>,
    offset: usize,
}

impl<'a> MetadataReader<'a> {
    /// A reader at `place`, of a table that ends at `end`.
    pub fn new(image: &'a Image, place: Place, end: u64) -> Result<MetadataReader<'a>> {
        let block = image.metadata_block(place.block, end)?;
        if place.offset > block.bytes.len() {
            return Err(Error::Corrupt("an offset points behind its metadata block"));
        }
        Ok(MetadataReader { image, end, position: place.block, block, offset: place.offset })
    }

    /// Where the next byte comes from.
    pub fn place(&self) -> Place {
        Place { block: self.position, offset: self.offset }
    }

    /// Fills `buffer`, through as many blocks as that takes.
    pub fn read(&mut self, mut buffer: &mut [u8]) -> Result<()> {
        while !buffer.is_empty() {
            let available = self.available()?;
            let step = available.len().min(buffer.len());
            let (head, tail) = buffer.split_at_mut(step);
            head.copy_from_slice(&available[..step]);
            buffer = tail;
            self.offset += step;
        }
        Ok(())
    }

    /// The next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.read(&mut bytes)?;
        Ok(bytes)
    }

    /// The next number.
    pub fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    /// Passes over `count` bytes.
    pub fn skip(&mut self, mut count: u64) -> Result<()> {
        while count > 0 {
            let step = count.min(self.available()?.len() as u64);
            self.offset += step as usize;
            count -= step;
        }
        Ok(())
    }

    /// What is left of the current block, never nothing.
    fn available(&mut self) -> Result<&[u8]> {
        if self.offset >= self.block.bytes.len() {
            // A block in the middle of a table is always full, and an empty one would let this loop for ever.
            if self.block.bytes.len() != METADATA_LEN {
                return Err(Error::Corrupt("metadata ends in the middle of a record"));
            }
            self.position = self.block.next;
            self.block = self.image.metadata_block(self.position, self.end)?;
            self.offset = 0;
        }
        match self.block.bytes.get(self.offset..) {
            Some(rest) if !rest.is_empty() => Ok(rest),
            _ => Err(Error::Corrupt("an empty metadata block")),
        }
    }
}

impl Image {
    /// The decoded block at `position`, of a table that ends at `end`.
    fn metadata_block(&self, position: u64, end: u64) -> Result<Arc<MetadataBlock>> {
        if position >= end {
            return Err(Error::Corrupt("a reference points behind its table"));
        }
        self.metadata.get(position, || self.load_metadata(position))
    }

    fn load_metadata(&self, position: u64) -> Result<MetadataBlock> {
        // One read for the length and the block: a few bytes too many cost less than a second system call.
        let longest = (HEAD_LEN + METADATA_LEN) as u64;
        let available = self.superblock.bytes_used.saturating_sub(position).min(longest);
        let mut raw = [0; HEAD_LEN + METADATA_LEN];
        let raw =
            raw.get_mut(..available as usize).ok_or(Error::Corrupt("a metadata block outside the image"))?;
        self.read_image(position, raw)?;
        let head = u16_at(raw, 0)?;
        let stored_len = usize::from(head & !STORED);
        let body = raw
            .get(HEAD_LEN..HEAD_LEN + stored_len)
            .filter(|body| !body.is_empty())
            .ok_or(Error::Corrupt("a metadata block has an impossible length"))?;
        let bytes = match head & STORED {
            0 => {
                let mut decoded = vec![0; METADATA_LEN];
                let len = self.inflate(body, &mut decoded, position)?;
                decoded.truncate(len);
                decoded.into_boxed_slice()
            }
            _ => body.into(),
        };
        let next = position.checked_add((HEAD_LEN + stored_len) as u64);
        Ok(MetadataBlock { bytes, next: next.ok_or(Error::Corrupt("a metadata position overflows"))? })
    }
}

/// A table of equal records (ids, fragments, xattr ids): metadata blocks, found through an index of their
/// positions.
#[derive(Debug)]
pub struct Table {
    index: u64,
    count: u64,
    record_len: u64,
}

impl Table {
    /// The table of `count` records whose index starts at `index` and ends at `end` at the latest.
    pub fn new(index: u64, count: u64, record_len: u64, end: u64) -> Result<Table> {
        let blocks = count.saturating_mul(record_len).div_ceil(METADATA_LEN as u64);
        match blocks.checked_mul(8).and_then(|len| index.checked_add(len)) {
            Some(index_end) if index_end <= end => Ok(Table { index, count, record_len }),
            _ => Err(Error::Corrupt("a table has more entries than room")),
        }
    }

    /// A reader at record `number`. The index entry is read from the file each time: the page cache has it,
    /// and its size is the image's choice, so that no memory is spent on it.
    pub fn reader<'a>(&self, image: &'a Image, number: u64) -> Result<MetadataReader<'a>> {
        if number >= self.count {
            return Err(Error::Corrupt("a table index is out of range"));
        }
        let at = number * self.record_len;
        let (block, offset) = (at / METADATA_LEN as u64, at % METADATA_LEN as u64);
        let mut entry = [0; 8];
        image.read_image(self.index + block * 8, &mut entry)?;
        let place = Place { block: u64_at(&entry, 0)?, offset: offset as usize };
        // The blocks of a table precede its index.
        MetadataReader::new(image, place, self.index)
    }

    /// All records of a table of numbers; for the ids, of which the format has at most 65535.
    pub fn u32_records(&self, image: &Image) -> Result<Vec<u32>> {
        let per_block = METADATA_LEN as u64 / self.record_len;
        let mut records = Vec::new();
        for block in 0..self.count.div_ceil(per_block) {
            let first = block * per_block;
            let mut reader = self.reader(image, first)?;
            for _ in first..self.count.min(first + per_block) {
                records.push(reader.u32()?);
            }
        }
        Ok(records)
    }
}
