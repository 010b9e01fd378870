//! Threads that compress and hash blocks. Each block comes back through its own channel, so that the order in which the
//! blocks are written is the order in which they were sent, whatever the threads do.
//!
//! Run by: the user, in the importer.

use std::io;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};

use sha2::{Digest, Sha256};

use super::codec::{Compression, Encoder};
use super::error::{Error, Result};

/// Blocks under way for each thread: one in work and some for it to go on with.
const BLOCKS_PER_THREAD: usize = 4;

/// Set in the size of a data block that is stored as it is.
const STORED: u32 = 1 << 24;

/// What blocks are compared by. Strong, since whoever made the layers would otherwise choose two files that are
/// taken for one.
pub(super) type BlockDigest = [u8; 32];

/// A block as it is in the image.
pub(super) struct StoredBlock {
    pub bytes: Vec<u8>,
    /// Its length, with a bit for the ones that are not compressed.
    pub size: u32,
    /// Of `bytes`: they are fewer than the decoded ones, and equal if and only if those are.
    pub digest: BlockDigest,
}

/// A block that a thread works on.
pub(super) struct Ticket(Receiver<Result<StoredBlock>>);

impl Ticket {
    fn wait(self) -> Result<StoredBlock> {
        self.0.recv().unwrap_or_else(|_| Err(Error::Compress(io::Error::other("a compressor thread failed"))))
    }
}

struct Job {
    task: Task,
    reply: SyncSender<Result<StoredBlock>>,
}

/// What a thread has to do.
enum Task {
    /// Compress a block.
    Encode(Vec<u8>),
    /// Only tell the digest of a block of this size that is compressed already.
    Hash(Vec<u8>, u32),
}

/// The threads; they end with it.
pub(super) struct Pool {
    /// `None` only while it is dropped.
    jobs: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
    /// Blocks that were submitted and not yet taken back, of all who use the pool.
    under_way: AtomicUsize,
    limit: usize,
    buffers: Buffers,
}

/// Memory of blocks, to be used again. Blocks are as large as what allocators ask the kernel for anew each time, and the kernel
/// clears its pages each time: that took as long as compressing.
struct Buffers {
    spare: Mutex<Vec<Vec<u8>>>,
    /// Bytes of a block.
    capacity: usize,
    /// So many are kept.
    limit: usize,
}

impl Buffers {
    /// An empty one, with room for a block.
    fn take(&self) -> Vec<u8> {
        let spare = self.spare.lock().ok().and_then(|mut spare| spare.pop());
        spare.unwrap_or_else(|| Vec::with_capacity(self.capacity))
    }

    fn give_back(&self, mut buffer: Vec<u8>) {
        buffer.clear();
        if let Ok(mut spare) = self.spare.lock()
            && spare.len() < self.limit
        {
            spare.push(buffer);
        }
    }
}

impl Pool {
    pub fn new(threads: NonZeroUsize, compression: Compression, block_size: u32) -> Result<Pool> {
        let (jobs, queue) = channel();
        let queue = Arc::new(Mutex::new(queue));
        let limit = threads.get().saturating_mul(BLOCKS_PER_THREAD);
        let buffers = Buffers { spare: Mutex::default(), capacity: block_size as usize, limit };
        let mut pool =
            Pool { jobs: Some(jobs), threads: Vec::new(), under_way: AtomicUsize::new(0), limit, buffers };
        for number in 0..threads.get() {
            let encoder = Encoder::new(compression, block_size)?;
            let queue = Arc::clone(&queue);
            let thread =
                Builder::new().name(format!("compress-{number}")).spawn(move || work(encoder, &queue));
            pool.threads.push(thread.map_err(Error::Compress)?);
        }
        Ok(pool)
    }
}

/// One of those who use a pool. What is under way is bounded for all of them together.
pub(super) struct PoolUser {
    pool: Arc<Pool>,
    under_way: usize,
}

impl PoolUser {
    pub fn new(pool: Arc<Pool>) -> PoolUser {
        PoolUser { pool, under_way: 0 }
    }

    /// Memory for a block, empty.
    pub fn buffer(&self) -> Vec<u8> {
        self.pool.buffers.take()
    }

    /// Takes memory of a block back.
    pub fn give_back(&self, buffer: Vec<u8>) {
        self.pool.buffers.give_back(buffer);
    }

    /// Has a block compressed.
    pub fn encode(&mut self, block: Vec<u8>) -> Ticket {
        self.submit(Task::Encode(block))
    }

    /// Has the digest of a block computed that is stored with this size.
    pub fn hash(&mut self, block: Vec<u8>, size: u32) -> Ticket {
        self.submit(Task::Hash(block, size))
    }

    fn submit(&mut self, task: Task) -> Ticket {
        self.under_way += 1;
        self.pool.under_way.fetch_add(1, Ordering::Relaxed);
        let (reply, ticket) = sync_channel(1);
        if let Some(jobs) = &self.pool.jobs {
            // Fails only if all threads are gone; then waiting for the ticket tells it.
            let _ = jobs.send(Job { task, reply });
        }
        Ticket(ticket)
    }

    /// Waits for a block.
    pub fn take(&mut self, ticket: Ticket) -> Result<StoredBlock> {
        let block = ticket.wait();
        self.under_way -= 1;
        self.pool.under_way.fetch_sub(1, Ordering::Relaxed);
        block
    }

    /// Whether this one should take a block back before it submits another.
    pub fn is_full(&self) -> bool {
        self.under_way > 0 && self.pool.under_way.load(Ordering::Relaxed) > self.pool.limit
    }
}

impl Drop for PoolUser {
    fn drop(&mut self) {
        self.pool.under_way.fetch_sub(self.under_way, Ordering::Relaxed);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn work(mut encoder: Encoder, queue: &Mutex<Receiver<Job>>) {
    loop {
        // The lock is held while waiting: the others would wait for the same.
        let job = match queue.lock() {
            Ok(queue) => queue.recv(),
            Err(_) => return,
        };
        let Ok(Job { task, reply }) = job else { return };
        let _ = reply.send(match task {
            Task::Encode(block) => encode(&mut encoder, block),
            Task::Hash(block, size) => Ok(hashed(block, size)),
        });
    }
}

fn encode(encoder: &mut Encoder, mut block: Vec<u8>) -> Result<StoredBlock> {
    let flag = match encoder.encode(&block)? {
        Some(compressed) => {
            // It is shorter, or it would be stored as it is.
            block.clear();
            block.extend_from_slice(compressed);
            0
        }
        None => STORED,
    };
    let bytes = block;
    // A block has at most 1 MiB.
    let size = bytes.len() as u32 | flag;
    Ok(hashed(bytes, size))
}

fn hashed(bytes: Vec<u8>, size: u32) -> StoredBlock {
    let digest = Sha256::digest(&bytes).into();
    StoredBlock { bytes, size, digest }
}
