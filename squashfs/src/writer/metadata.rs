//! Metadata: 8 KiB blocks, each compressed by itself, that inodes, listings, tables and xattrs are packed into.
//!
//! Run by: the user, in the importer.

use super::codec::Encoder;
use super::error::{Error, Result};
use super::output::{Output, PositionedOutput};

/// Decoded size of every metadata block except the last one of a table.
pub(super) const METADATA_LEN: usize = 8192;
/// Set in a block's length if the block is stored as it is.
const STORED: u16 = 0x8000;

/// A place in a table: where its block starts behind the table's start, and the offset in the decoded block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MetadataRef {
    /// Inodes and directories have 32 bits for it.
    pub block: u32,
    pub offset: u16,
}

impl MetadataRef {
    /// As the superblock and the xattr table store it.
    pub fn raw(self) -> u64 {
        u64::from(self.block) << 16 | u64::from(self.offset)
    }
}

/// A table that grows in memory, compressed block by block.
#[derive(Default)]
pub(super) struct MetadataTable {
    blocks: Vec<u8>,
    /// Where the blocks start, for tables that have an index.
    starts: Vec<u64>,
    current: Vec<u8>,
}

impl MetadataTable {
    /// Where the next byte comes to be.
    pub fn place(&self) -> Result<MetadataRef> {
        let block = u32::try_from(self.blocks.len());
        let block =
            block.map_err(|_| Error::TooMany { what: "bytes of metadata", limit: u32::MAX.into() })?;
        // A full block is compressed at once, so that the offset is below 8192.
        Ok(MetadataRef { block, offset: self.current.len() as u16 })
    }

    /// Appends `bytes`, over as many blocks as that takes.
    pub fn write(&mut self, mut bytes: &[u8], encoder: &mut Encoder) -> Result<()> {
        while !bytes.is_empty() {
            let step = bytes.len().min(METADATA_LEN - self.current.len());
            let (now, later) = bytes.split_at(step);
            self.current.extend_from_slice(now);
            bytes = later;
            if self.current.len() == METADATA_LEN {
                self.end_block(encoder)?;
            }
        }
        Ok(())
    }

    fn end_block(&mut self, encoder: &mut Encoder) -> Result<()> {
        if self.current.is_empty() {
            return Ok(());
        }
        self.starts.push(self.blocks.len() as u64);
        push_block(&mut self.blocks, &self.current, encoder.encode(&self.current)?);
        self.current.clear();
        Ok(())
    }

    /// Writes the table out; returns where its blocks start.
    pub fn finish<W: Output>(
        mut self,
        out: &mut PositionedOutput<W>,
        encoder: &mut Encoder,
    ) -> Result<Vec<u64>> {
        self.end_block(encoder)?;
        let start = out.position();
        out.write(&self.blocks)?;
        Ok(self.starts.iter().map(|block| start + block).collect())
    }
}

/// A single block that is never compressed: the compressor options, which say how to decompress.
pub(super) fn plain_block(bytes: &[u8]) -> Vec<u8> {
    let mut block = Vec::new();
    push_block(&mut block, bytes, None);
    block
}

fn push_block(blocks: &mut Vec<u8>, plain: &[u8], compressed: Option<&[u8]>) {
    // At most 8192 bytes, whichever is taken.
    let (bytes, flag) = compressed.map_or((plain, STORED), |compressed| (compressed, 0));
    blocks.extend_from_slice(&(bytes.len() as u16 | flag).to_le_bytes());
    blocks.extend_from_slice(bytes);
}

/// Writes a table of records with its index; returns where the index starts.
pub(super) fn write_indexed<W: Output>(
    records: &[u8],
    head: impl FnOnce(&mut PositionedOutput<W>) -> Result<()>,
    out: &mut PositionedOutput<W>,
    encoder: &mut Encoder,
) -> Result<u64> {
    let mut table = MetadataTable::default();
    table.write(records, encoder)?;
    let starts = table.finish(out, encoder)?;
    let index = out.position();
    head(out)?;
    for start in starts {
        out.write(&start.to_le_bytes())?;
    }
    Ok(index)
}
