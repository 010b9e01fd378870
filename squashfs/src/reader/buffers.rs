//! Memory for decoded blocks, used again and again. A block has the size of a mapping of its own: to take a new one for each, and
//! to have the kernel fill it with zeros and take it back, costs as much as the decoding.
//!
//! Run by: the user, in the launcher and in the FUSE server process.

use std::ops::Deref;
use std::sync::{Mutex, PoisonError};

/// What lies ready, beside the caches: no more than this.
const KEPT: usize = 2 << 20;

static BUFFERS: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// A decoded block.
#[derive(Debug)]
pub struct Block {
    buffer: Vec<u8>,
    len: usize,
}

impl Block {
    /// A block that `fill` writes into a buffer of `size` bytes; it returns how many it has written.
    pub fn filled<E>(size: usize, fill: impl FnOnce(&mut [u8]) -> Result<usize, E>) -> Result<Block, E> {
        let mut block = Block { buffer: take(size), len: 0 };
        block.len = fill(&mut block.buffer)?.min(size);
        // What is much smaller than its buffer would cost more memory than the caches count.
        if block.len < size / 8 * 7 {
            return Ok(Block { buffer: block.to_vec(), len: block.len });
        }
        Ok(block)
    }
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.get(..self.len).unwrap_or_default()
    }
}

impl AsRef<[u8]> for Block {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        let mut kept = BUFFERS.lock().unwrap_or_else(PoisonError::into_inner);
        // Sizes of blocks are powers of two; what has been made smaller is of no use to others.
        let is_whole = buffer.len().is_power_of_two() && kept.iter().all(|other| other.len() == buffer.len());
        if is_whole && buffer.len() * (kept.len() + 1) <= KEPT {
            kept.push(buffer);
        }
    }
}

/// A buffer of this size, with anything in it.
fn take(size: usize) -> Vec<u8> {
    let mut kept = BUFFERS.lock().unwrap_or_else(PoisonError::into_inner);
    // One process reads images of several block sizes at most while it plans; then the last one's are kept.
    if kept.last().is_some_and(|buffer| buffer.len() != size) {
        kept.clear();
    }
    let found = kept.pop();
    drop(kept);
    found.unwrap_or_else(|| vec![0; size])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_what_was_written_and_no_more() {
        for (size, written) in [(4096, 4096), (4096, 4000), (4096, 10), (4096, 0), (8192, 8192)] {
            let filled = Block::filled(size, |buffer| {
                assert_eq!(buffer.len(), size);
                buffer[..written].fill(7);
                Ok::<_, ()>(written)
            });
            assert_eq!(*filled.unwrap(), vec![7; written][..]);
        }
        assert_eq!(Block::filled(4096, |_| Err::<usize, _>("no")).unwrap_err(), "no");
    }
}
