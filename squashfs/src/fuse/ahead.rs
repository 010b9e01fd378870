//! Blocks that will be asked for soon, decoded by threads that have nothing else to do.
//!
//! A program that reads a file, or whose linker relocates a library, asks for one piece after the other and waits for each; of a
//! mapped file the kernel asks for 128 KiB at a time, which lie in two blocks as a rule. So the further blocks of a request are
//! decoded while its first one is, and those behind it while the program goes on, the more of them the longer it does so. Nothing
//! is decoded that no request has led to: where nobody reads, the threads sleep.
//!
//! Run by: the user, in the FUSE server process.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::reader::{Image, InodeRef};

/// Files that are read at once and of which it is remembered how far.
const MAX_STREAMS: usize = 16;
/// Bytes ahead of a reader at most: a part of the cache of blocks.
const MAX_WINDOW: u64 = 2 << 20;
/// A request that begins so near to the end of the one before continues it: mappings are read around the place of a fault.
const NEAR: u64 = 256 << 10;
/// Each has a block in work, which counts towards the memory of a server.
pub const MAX_THREADS: usize = 3;
/// Pieces that wait to be decoded; the oldest are given up first.
const MAX_QUEUE: usize = 64;

/// What is to be decoded, and how far whoever reads has come.
pub struct Ahead {
    state: Mutex<State>,
    wake: Condvar,
    block_size: u64,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Piece>,
    /// The last used is the last.
    streams: Vec<Stream>,
    is_closed: bool,
}

/// The block at this place of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    file: InodeRef,
    offset: u64,
}

/// A file that is read from its beginning to its end, as it seems.
#[derive(Debug, Clone, Copy)]
struct Stream {
    file: InodeRef,
    /// Where the next request should begin.
    next: u64,
    /// How much is decoded ahead of that.
    window: u64,
    /// What has been queued.
    queued: u64,
}

impl Ahead {
    /// For an image with blocks of this size.
    pub fn new(block_size: u32) -> Ahead {
        Ahead { state: Mutex::default(), wake: Condvar::new(), block_size: u64::from(block_size.max(1)) }
    }

    /// A request for `len` bytes of a file from `offset` on, which has `size` bytes.
    pub fn follow(&self, file: InodeRef, offset: u64, len: u64, size: u64) {
        let end = offset.saturating_add(len).min(size);
        let mut state = self.lock();
        let known = state.streams.iter().position(|stream| stream.file == file);
        let mut stream = match known.map(|index| state.streams.remove(index)) {
            Some(stream) if stream.next.abs_diff(offset) <= NEAR => {
                let window = (stream.window * 2).clamp(self.block_size, MAX_WINDOW.max(self.block_size));
                Stream { window, ..stream }
            }
            _ => Stream { file, next: 0, window: 0, queued: 0 },
        };
        stream.next = stream.next.max(end);
        // The block in which it begins is decoded by whoever answers.
        let first = (offset / self.block_size + 1) * self.block_size;
        let first = if stream.queued > offset { first.max(stream.queued) } else { first };
        let until = end.saturating_add(stream.window).min(size);
        let mut added = 0;
        let mut at = first;
        while at < until {
            state.queue.push_back(Piece { file, offset: at });
            at += self.block_size;
            added += 1;
        }
        stream.queued = at;
        let surplus = state.queue.len().saturating_sub(MAX_QUEUE);
        state.queue.drain(..surplus);
        if state.streams.len() >= MAX_STREAMS {
            state.streams.remove(0);
        }
        state.streams.push(stream);
        drop(state);
        for _ in 0..added.min(MAX_THREADS) {
            self.wake.notify_one();
        }
    }

    /// What each of the threads does, until there will be no more.
    pub fn decode(&self, image: &Image) {
        while let Some(Piece { file, offset }) = self.next() {
            // What cannot be decoded fails again, and properly, when somebody asks for it.
            let _ = image.inode(file).and_then(|inode| image.read(&inode, offset, 1).map(drop));
        }
    }

    fn next(&self) -> Option<Piece> {
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(piece) = state.queue.pop_front() {
                return Some(piece);
            }
            state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends the threads.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.wake.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = 128 << 10;
    const SIZE: u64 = 100 * BLOCK;

    fn queued(ahead: &Ahead) -> Vec<u64> {
        ahead.lock().queue.drain(..).map(|piece| piece.offset / BLOCK).collect()
    }

    fn file(number: u64) -> InodeRef {
        InodeRef::from_raw(number).unwrap()
    }

    #[test]
    fn the_rest_of_a_request_is_decoded_at_the_same_time() {
        let ahead = Ahead::new(BLOCK as u32);
        ahead.follow(file(1), 10 * BLOCK, BLOCK, SIZE);
        assert_eq!(queued(&ahead), [] as [u64; 0], "it has one block");
        ahead.follow(file(2), BLOCK / 2, BLOCK, SIZE);
        assert_eq!(queued(&ahead), [1], "it has two");
        ahead.follow(file(3), SIZE - 10, 1000, SIZE);
        assert_eq!(queued(&ahead), [] as [u64; 0], "the file ends there");
    }

    #[test]
    fn whoever_goes_on_finds_more_and_more_decoded() {
        let ahead = Ahead::new(BLOCK as u32);
        let mut all = Vec::new();
        for block in 0..40 {
            ahead.follow(file(1), block * BLOCK, BLOCK, SIZE);
            let now = queued(&ahead);
            assert!(now.iter().all(|queued| *queued > block && *queued <= block + 16), "{block}: {now:?}");
            all.extend(now);
        }
        assert_eq!(all, (2..56).collect::<Vec<_>>(), "each once, 2 MiB ahead");
        // Elsewhere, as a linker that looks up symbols.
        ahead.follow(file(1), 90 * BLOCK, BLOCK, SIZE);
        assert_eq!(queued(&ahead), [] as [u64; 0]);
    }

    #[test]
    fn neither_many_files_nor_many_blocks_need_much_memory() {
        let ahead = Ahead::new(4096);
        for number in 0..1000 {
            for request in 0..20 {
                ahead.follow(file(number), request * 131_072, 131_072, u64::MAX);
            }
        }
        let state = ahead.lock();
        assert!(state.queue.len() <= MAX_QUEUE && state.streams.len() <= MAX_STREAMS);
    }

    #[test]
    fn the_threads_end_when_they_are_told_to() {
        let ahead = Ahead::new(4096);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| ahead.next());
            ahead.close();
            assert_eq!(waiting.join().unwrap(), None);
        });
    }
}
