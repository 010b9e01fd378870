//! The content of an entry: what is stored in the archive, and the holes between.
//!
//! Run by: the user, in the importer.

use std::io::Read;

use super::error::{Result, TarError};
use super::header::{BLOCK_LEN, Block};
use super::sparse::Region;
use super::stream::Stream;

/// What is left of the content of the current entry.
#[derive(Default)]
pub struct Content {
    /// Stored bytes that are still to come.
    stored: u64,
    /// Bytes behind them up to the next block.
    padding: u64,
    sparse: Option<Sparse>,
}

/// A file with holes, read up to `offset`.
struct Sparse {
    regions: std::vec::IntoIter<Region>,
    /// The region that is read, or the next one; without one only a hole is left.
    region: Option<Region>,
    offset: u64,
    size: u64,
}

impl Content {
    pub fn new(stored: u64) -> Content {
        let padding = stored.wrapping_neg() % BLOCK_LEN as u64;
        Content { stored, padding, sparse: None }
    }

    pub fn make_sparse(&mut self, regions: Vec<Region>, size: u64) {
        let mut regions = regions.into_iter();
        let region = regions.next();
        self.sparse = Some(Sparse { regions, region, offset: 0, size });
    }

    pub fn stored(&self) -> u64 {
        self.stored
    }

    /// Leaves the stream at the next header.
    pub fn skip(self, stream: &mut Stream<impl Read>, name: &[u8]) -> Result<()> {
        if stream.skip(self.stored)? < self.stored {
            return Err(TarError::CutContent { name: name.to_vec() });
        }
        // Go is content with an archive that ends where only padding is missing.
        stream.skip(self.padding).map(drop)
    }

    /// A block of the stored content.
    pub fn next_block(&mut self, stream: &mut Stream<impl Read>, name: &[u8]) -> Result<Block> {
        if self.stored < BLOCK_LEN as u64 {
            return Err(TarError::Sparse { name: name.to_vec(), problem: "has a map without an end" });
        }
        let block = stream.read_block()?.ok_or_else(|| TarError::CutContent { name: name.to_vec() })?;
        self.stored -= BLOCK_LEN as u64;
        Ok(block)
    }

    pub fn read(&mut self, stream: &mut Stream<impl Read>, name: &[u8], buffer: &mut [u8]) -> Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        let Some(sparse) = &mut self.sparse else {
            return read_stored(&mut self.stored, u64::MAX, stream, name, buffer);
        };
        let problem = |problem| TarError::Sparse { name: name.to_vec(), problem };
        sparse.leave_finished_regions();
        if sparse.offset >= sparse.size {
            return match self.stored {
                0 => Ok(0),
                _ => Err(problem("has more data than its map")),
            };
        }
        let len = match sparse.region {
            Some(Region { offset, len }) if offset <= sparse.offset => {
                if self.stored == 0 {
                    return Err(problem("has less data than its map"));
                }
                let left = offset + len - sparse.offset;
                read_stored(&mut self.stored, left, stream, name, buffer)?
            }
            region => {
                let end = region.map_or(sparse.size, |region| region.offset);
                let len = (end - sparse.offset).min(buffer.len() as u64) as usize;
                buffer[..len].fill(0);
                len
            }
        };
        sparse.offset += len as u64;
        Ok(len)
    }
}

impl Sparse {
    fn leave_finished_regions(&mut self) {
        while let Some(region) = self.region
            && region.offset + region.len <= self.offset
        {
            self.region = self.regions.next();
        }
    }
}

/// Reads of the stored bytes, but not more than `limit`.
fn read_stored(
    stored: &mut u64,
    limit: u64,
    stream: &mut Stream<impl Read>,
    name: &[u8],
    buffer: &mut [u8],
) -> Result<usize> {
    let len = limit.min(*stored).min(buffer.len() as u64) as usize;
    if len == 0 {
        return Ok(0);
    }
    match stream.read(&mut buffer[..len])? {
        0 => Err(TarError::CutContent { name: name.to_vec() }),
        len => {
            *stored -= len as u64;
            Ok(len)
        }
    }
}
