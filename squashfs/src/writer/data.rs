//! The data stage: the contents of files become blocks, holes and fragments, in the order in which the files come.
//!
//! Only the calling thread reads and writes; the pool compresses and hashes. What is under way stands in one queue in the
//! order of the output, and the front of it is written as soon as too much is under way.
//!
//! Nothing is stored twice. The full blocks of a file (a *run*) and its tail are compared with earlier ones
//! independently. A run is known to be a duplicate only behind its last block; it is already written then, and the
//! output goes back to where it started.
//!
//! Run by: the user, in the importer.

use std::collections::{HashMap, VecDeque};
use std::io::Read;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::FileId;
use super::error::{Error, Result};
use super::output::{Output, PositionedOutput};
use super::pool::{BlockDigest, Pool, PoolUser, Ticket};

/// Entries of the queue, with the holes and ends of files, which no thread has to work on.
const QUEUE_LIMIT: usize = 4096;

/// The bits of a block's size that are its length.
pub(super) const STORED_LEN: u32 = (1 << 24) - 1;

/// Where the contents of one file are in the image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileData {
    /// Length in bytes.
    pub size: u64,
    /// Bytes of it that are holes.
    pub sparse: u64,
    /// Position of the first block in the image; 0 if there is none.
    pub start: u64,
    /// Sizes of the blocks as in the inode: 0 for a hole, with bit 24 for what is not compressed.
    pub blocks: Arc<[u32]>,
    /// The end of the file that does not fill a block.
    pub tail: Option<Tail>,
    /// What the blocks are compared by, if there are any. Most files have none.
    pub(super) run: Option<Box<BlockDigest>>,
}

/// A place in a fragment block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tail {
    /// Number of the fragment block.
    pub fragment: u32,
    /// Offset in the decoded block.
    pub offset: u32,
}

/// Position and size of a fragment block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fragment {
    pub start: u64,
    pub size: u32,
    /// Of the stored bytes, for segments that lie on a disk for months.
    pub digest: BlockDigest,
}

impl Fragment {
    /// As in the fragment table.
    pub fn encode(&self) -> [u8; 16] {
        (u128::from(self.start) | u128::from(self.size) << 64).to_le_bytes()
    }
}

/// What is still to be written, in order.
enum Pending {
    Block(Ticket),
    Hole,
    /// The blocks before belong to this file, or to one that could not be read to its end.
    EndOfRun(Option<FileId>),
    /// With the digest that it must have, if it comes from a segment.
    Fragment(Ticket, Option<BlockDigest>),
}

/// The blocks of one file that are written so far.
#[derive(Default)]
struct Run {
    /// `None` before the first block.
    start: Option<u64>,
    sizes: Vec<u32>,
    digest: Sha256,
}

impl Run {
    /// A hole has no digest.
    fn push(&mut self, size: u32, digest: &[u8], position: u64) {
        self.start.get_or_insert(position);
        self.sizes.push(size);
        self.digest.update(size.to_le_bytes());
        self.digest.update(digest);
    }
}

/// The data stage, and what it knows at its end.
pub(super) struct DataStage<W: Output> {
    pub out: PositionedOutput<W>,
    pub files: Vec<FileData>,
    pub fragments: Vec<Fragment>,
    block_size: usize,
    pool: PoolUser,
    queue: VecDeque<Pending>,
    run: Run,
    runs: HashMap<BlockDigest, (u64, Arc<[u32]>)>,
    /// The fragment block that is being filled, and its number.
    fragment: Vec<u8>,
    fragment_number: u32,
    tails: HashMap<BlockDigest, Tail>,
}

impl<W: Output> DataStage<W> {
    /// A stage that writes from the current position of `out` on.
    pub fn new(out: PositionedOutput<W>, block_size: u32, pool: Arc<Pool>) -> DataStage<W> {
        DataStage {
            out,
            run: Run::default(),
            files: Vec::new(),
            fragments: Vec::new(),
            block_size: block_size as usize,
            pool: PoolUser::new(pool),
            queue: VecDeque::new(),
            runs: HashMap::new(),
            fragment: Vec::new(),
            fragment_number: 0,
            tails: HashMap::new(),
        }
    }

    /// Takes the contents of one file.
    pub fn add_file(&mut self, contents: &mut dyn Read) -> Result<FileId> {
        let id = FileId(self.files.len());
        let mut file = FileData::default();
        let (tail, run_len) = match self.add_blocks(contents, &mut file) {
            Ok(done) => done,
            Err(error) => {
                // Blocks that belong to nothing must not become the start of the next file.
                self.push(Pending::EndOfRun(None))?;
                return Err(error);
            }
        };
        self.files.push(file);
        if run_len > 0 {
            self.push(Pending::EndOfRun(Some(id)))?;
        }
        if !tail.is_empty() {
            let place = self.add_tail(&tail)?;
            if let Some(file) = self.files.get_mut(id.0) {
                file.tail = Some(place);
            }
        }
        self.pool.give_back(tail);
        Ok(id)
    }

    /// Queues all blocks of a file; returns its tail and the number of blocks.
    fn add_blocks(&mut self, contents: &mut dyn Read, file: &mut FileData) -> Result<(Vec<u8>, u64)> {
        let mut count = 0;
        loop {
            let mut block = self.pool.buffer();
            Read::take(&mut *contents, self.block_size as u64)
                .read_to_end(&mut block)
                .map_err(Error::Read)?;
            let len = block.len();
            file.size += len as u64;
            if i64::try_from(file.size).is_err() {
                return Err(Error::TooMany { what: "bytes in a file", limit: i64::MAX as u64 });
            }
            if is_zero(&block) {
                // A tail of zeros is a hole, too: as the last block of a file without a fragment.
                file.sparse += len as u64;
                self.pool.give_back(block);
                self.push(Pending::Hole)?;
            } else if len == self.block_size {
                let ticket = self.pool.encode(block);
                self.push(Pending::Block(ticket))?;
            } else {
                return Ok((block, count));
            }
            count += 1;
            if len < self.block_size {
                return Ok((Vec::new(), count));
            }
        }
    }

    /// Puts a tail into the current fragment block, unless there is an equal one.
    fn add_tail(&mut self, tail: &[u8]) -> Result<Tail> {
        let digest = Sha256::digest(tail).into();
        if let Some(known) = self.tails.get(&digest) {
            return Ok(*known);
        }
        if self.fragment.len() + tail.len() > self.block_size {
            self.end_fragment()?;
        }
        let place = Tail { fragment: self.fragment_number, offset: self.fragment.len() as u32 };
        self.fragment.extend_from_slice(tail);
        self.tails.insert(digest, place);
        Ok(place)
    }

    fn end_fragment(&mut self) -> Result<()> {
        if self.fragment.is_empty() {
            return Ok(());
        }
        self.next_fragment()?;
        let block = std::mem::replace(&mut self.fragment, self.pool.buffer());
        let ticket = self.pool.encode(block);
        self.push(Pending::Fragment(ticket, None))
    }

    fn next_fragment(&mut self) -> Result<()> {
        // The highest number means "no fragment".
        if self.fragment_number == u32::MAX - 1 {
            return Err(Error::TooMany { what: "fragment blocks", limit: u64::from(u32::MAX) - 1 });
        }
        self.fragment_number += 1;
        Ok(())
    }

    fn push(&mut self, pending: Pending) -> Result<()> {
        self.queue.push_back(pending);
        while self.pool.is_full() || self.queue.len() > QUEUE_LIMIT {
            self.write_front()?;
        }
        Ok(())
    }

    /// Writes all that is under way, with the fragment block that is being filled.
    pub fn finish(&mut self) -> Result<()> {
        self.end_fragment()?;
        self.write_queue()
    }

    /// Writes all but the fragment block that is being filled.
    pub fn write_queue(&mut self) -> Result<()> {
        while !self.queue.is_empty() {
            self.write_front()?;
        }
        Ok(())
    }

    fn write_front(&mut self) -> Result<()> {
        match self.queue.pop_front() {
            None => Ok(()),
            Some(Pending::Block(ticket)) => {
                let block = self.pool.take(ticket)?;
                self.run.push(block.size, &block.digest, self.out.position());
                self.write_block(block.bytes)
            }
            Some(Pending::Hole) => {
                self.run.push(0, &[], self.out.position());
                Ok(())
            }
            Some(Pending::EndOfRun(file)) => self.end_run(file),
            Some(Pending::Fragment(ticket, expected)) => {
                let block = self.pool.take(ticket)?;
                if expected.is_some_and(|expected| expected != block.digest) {
                    return Err(Error::Damaged);
                }
                self.fragments.push(Fragment {
                    start: self.out.position(),
                    size: block.size,
                    digest: block.digest,
                });
                self.write_block(block.bytes)
            }
        }
    }

    fn write_block(&mut self, bytes: Vec<u8>) -> Result<()> {
        self.out.write(&bytes)?;
        self.pool.give_back(bytes);
        Ok(())
    }

    fn end_run(&mut self, file: Option<FileId>) -> Result<()> {
        let run = std::mem::take(&mut self.run);
        let Some(start) = run.start else { return Ok(()) };
        let Some(file) = file.and_then(|id| self.files.get_mut(id.0)) else {
            return self.out.seek(start);
        };
        let digest = run.digest.finalize().into();
        // Of a segment's file it is known.
        if **file.run.get_or_insert_with(|| Box::new(digest)) != digest {
            return Err(Error::Damaged);
        }
        if let Some((known, sizes)) = self.runs.get(&digest) {
            (file.start, file.blocks) = (*known, Arc::clone(sizes));
            return self.out.seek(start);
        }
        let only_holes = run.sizes.iter().all(|size| *size == 0);
        (file.start, file.blocks) = (if only_holes { 0 } else { start }, run.sizes.into());
        self.runs.insert(digest, (file.start, Arc::clone(&file.blocks)));
        Ok(())
    }

    /// Memory for a block, empty.
    pub fn buffer(&self) -> Vec<u8> {
        self.pool.buffer()
    }

    /// Takes the blocks of a segment's file, unless equal ones are written. `read` fills memory with a block of this size.
    pub fn add_stored_blocks(
        &mut self,
        id: FileId,
        mut read: impl FnMut(u32, Vec<u8>) -> Result<Vec<u8>>,
    ) -> Result<()> {
        let Some(file) = self.files.get_mut(id.0) else { return Ok(()) };
        if let Some((known, sizes)) = file.run.as_ref().and_then(|run| self.runs.get(&**run)) {
            (file.start, file.blocks) = (*known, Arc::clone(sizes));
            return Ok(());
        }
        for size in Arc::clone(&file.blocks).iter() {
            let pending = match *size {
                0 => Pending::Hole,
                size => Pending::Block(self.pool.hash(read(size, self.pool.buffer())?, size)),
            };
            self.push(pending)?;
        }
        self.push(Pending::EndOfRun(Some(id)))
    }

    /// Ends the stage, and gives the output back, cut off at `len`.
    pub fn into_output(mut self, len: u64) -> Result<W> {
        self.write_queue()?;
        self.out.finish(len)
    }

    /// Takes a fragment block of a segment, while none is being filled; returns its number.
    pub fn add_stored_fragment(&mut self, block: Vec<u8>, from: &Fragment) -> Result<u32> {
        let number = self.fragment_number;
        self.next_fragment()?;
        let ticket = self.pool.hash(block, from.size);
        self.push(Pending::Fragment(ticket, Some(from.digest)))?;
        Ok(number)
    }
}

/// Whether a block is nothing but zeros, and not empty: the first byte is zero, and each equals the one before it,
/// which is compared as fast as memory is read.
fn is_zero(block: &[u8]) -> bool {
    match block {
        [0, rest @ ..] => block.get(..rest.len()) == Some(rest),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::is_zero;

    #[test]
    fn zeros() {
        assert!(is_zero(&[0]) && is_zero(&[0; 4096]));
        assert!(!is_zero(&[]) && !is_zero(&[1]) && !is_zero(&[1, 1, 1]));
        for at in [0, 1, 17, 4095] {
            let mut block = [0; 4096];
            block[at] = 1;
            assert!(!is_zero(&block), "{at}");
        }
    }
}
