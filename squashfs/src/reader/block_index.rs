//! Where the n-th block of a file is.
//!
//! A file stores the sizes of its blocks, so the position of one is the sum of all sizes before it. For most
//! files that sum is over a few numbers. For large ones checkpoints are kept, or reading 100 GB would take
//! quadratic time.
//!
//! Run by: the user, in the launcher and in the FUSE server process.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::Image;
use super::data::StoredSize;
use super::error::{Error, Result};
use super::inode::RegularFile;
use super::metadata::{InodeRef, MetadataReader, Place};

/// Files whose checkpoints are kept.
const MAX_FILES: usize = 64;
/// Checkpoints per file at most: the larger the file, the wider apart they are.
const MAX_CHECKPOINTS: u64 = 1024;
/// Blocks between checkpoints at least (4 KiB of sizes, half a metadata block).
const MIN_SPACING: u64 = 1024;

/// The state of a walk through a block list at a multiple of the spacing.
#[derive(Clone, Copy)]
struct Checkpoint {
    sizes: Place,
    position: u64,
}

/// The checkpoints of recently read large files: the n-th one is at block (n + 1) * spacing.
#[derive(Default)]
pub struct BlockIndex {
    files: Mutex<HashMap<InodeRef, Vec<Checkpoint>>>,
}

impl BlockIndex {
    /// The last known checkpoint of a file at or before number `wanted`, and its number.
    fn find(&self, file: InodeRef, wanted: u64) -> Option<(u64, Checkpoint)> {
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let checkpoints = files.get(&file)?;
        let number = usize::try_from(wanted).unwrap_or(usize::MAX).min(checkpoints.len());
        checkpoints.get(number.checked_sub(1)?).map(|checkpoint| (number as u64, *checkpoint))
    }

    /// Keeps checkpoint `number`, if it is the next one that is missing.
    fn add(&self, file: InodeRef, number: u64, checkpoint: Checkpoint) {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        if files.len() >= MAX_FILES && !files.contains_key(&file) {
            // Any one will do: 64 large files read at once are rare, and a lost entry costs one walk.
            if let Some(victim) = files.keys().next().copied() {
                files.remove(&victim);
            }
        }
        let checkpoints = files.entry(file).or_default();
        if checkpoints.len() as u64 + 1 == number {
            checkpoints.push(checkpoint);
        }
    }
}

/// Walks through the blocks of a file.
pub struct Blocks<'a> {
    reader: MetadataReader<'a>,
    position: u64,
    block_size: u32,
}

impl<'a> Blocks<'a> {
    /// A walk that starts at block `number` of `file`.
    pub fn seek(image: &'a Image, inode: InodeRef, file: &RegularFile, number: u64) -> Result<Blocks<'a>> {
        let spacing = (image.block_count(file) / MAX_CHECKPOINTS).max(MIN_SPACING);
        let known = image.block_index.find(inode, number / spacing);
        let first = Checkpoint { sizes: file.blocks, position: file.start };
        let (mut checkpoint_number, checkpoint) = known.unwrap_or((0, first));
        let mut blocks = Blocks {
            reader: image.inode_reader(checkpoint.sizes)?,
            position: checkpoint.position,
            block_size: image.superblock.block_size,
        };
        let mut at = checkpoint_number * spacing;
        while at < number {
            blocks.next()?;
            at += 1;
            if at.is_multiple_of(spacing) {
                checkpoint_number += 1;
                let here = Checkpoint { sizes: blocks.reader.place(), position: blocks.position };
                image.block_index.add(inode, checkpoint_number, here);
            }
        }
        Ok(blocks)
    }

    /// Position and size of the next block.
    pub fn next(&mut self) -> Result<(u64, StoredSize)> {
        let size = StoredSize::new(self.reader.u32()?, self.block_size)?;
        let position = self.position;
        self.position = position
            .checked_add(size.bytes().into())
            .ok_or(Error::Corrupt("the position of a data block overflows"))?;
        Ok((position, size))
    }
}
