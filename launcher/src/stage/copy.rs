//! Reads an image once, from its beginning to its end: its digest is computed, and what is read is written to a copy.
//! Runs as the user on the host.
//!
//! Several threads read large pieces at once, because parallel file systems are fast only then, and write what they
//! have read; the calling thread hashes the pieces in their order. All threads have ended when the function returns.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, Scope};
use std::time::{Duration, Instant};

use mizzen_core::Digest;
use rustix::fs::{Advice, OFlags, fadvise, fcntl_getfl, fcntl_setfl};
use sha2::{Digest as _, Sha256};

use super::place;
use crate::sys;

/// How much is read at once.
const PIECE: u64 = 1 << 20;
/// How many read at once; at most two pieces of each are in memory.
const READERS: u64 = 4;

/// Why there is no digest.
#[derive(Debug)]
pub enum CopyError {
    /// The image cannot be read.
    Source(io::Error),
    /// It has fewer bytes than it had.
    Shorter,
    /// The copy cannot be written.
    Target(io::Error),
}

/// What is read, and where it goes.
#[derive(Clone, Copy)]
struct Work<'a> {
    source: &'a File,
    target: Option<&'a File>,
    size: u64,
}

/// Computes the digest of the first `size` bytes, and writes them to `target`. `advance` is told how many bytes more
/// are done.
pub fn copy(
    source: &File,
    target: Option<&File>,
    size: u64,
    advance: &mut dyn FnMut(u64),
) -> Result<Digest, CopyError> {
    let work = Work { source, target, size };
    let threads = threads();
    // It only makes reading faster. More than that (WillNeed for the pieces to come) makes it slower on a local disk.
    let _ = fadvise(source, 0, None, Advice::Sequential);
    let _unbuffered = place::is_fuse(source).then(|| Unbuffered::new(source));
    let digest = std::thread::scope(|scope| {
        // Each reader has every READERS-th piece, so that their order is known without asking.
        let readers: Vec<Option<Reader>> =
            (0..READERS).map(|first| work.start_reader(scope, first)).collect();
        let mut hasher = Sha256::new();
        for piece in 0..size.div_ceil(PIECE) {
            let buffer = match &readers[(piece % READERS) as usize] {
                // A reader that is gone has sent its error before.
                Some(reader) => reader.pieces.recv().map_err(|_| CopyError::Shorter)??,
                None => work.transfer(piece, Vec::new())?,
            };
            hasher.update(&buffer);
            advance(buffer.len() as u64);
            if let Some(reader) = &readers[(piece % READERS) as usize] {
                let _ = reader.used.try_send(buffer);
            }
        }
        Ok(Digest::new(hasher.finalize().into()))
    });
    wait_for_end(threads);
    digest
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count)
}

/// A thread that has done its work is still a thread for a moment, also when it has been joined; and a process with
/// threads can make no user namespace (EINVAL).
fn wait_for_end(before: usize) {
    let begin = Instant::now();
    while threads() > before && begin.elapsed() < Duration::from_secs(1) {
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Reads past the kernel's memory, as long as it lives. Of a FUSE file system the kernel forgets all that it has read
/// ahead whenever somebody else opens the file: with many starts at once half of it would be read twice.
struct Unbuffered<'a>(&'a File, OFlags);

impl<'a> Unbuffered<'a> {
    fn new(file: &'a File) -> Unbuffered<'a> {
        let flags = fcntl_getfl(file).unwrap_or(OFlags::empty());
        // Where the server cannot, it stays as it is.
        let _ = fcntl_setfl(file, flags | OFlags::DIRECT);
        Unbuffered(file, flags)
    }
}

impl Drop for Unbuffered<'_> {
    fn drop(&mut self) {
        let _ = fcntl_setfl(self.0, self.1);
    }
}

struct Reader {
    /// What it has read.
    pieces: Receiver<Result<Vec<u8>, CopyError>>,
    /// Buffers that it can use again.
    used: SyncSender<Vec<u8>>,
}

impl<'a> Work<'a> {
    /// None if the user may have no more threads; the caller then reads those pieces itself.
    fn start_reader<'scope>(self, scope: &'scope Scope<'scope, '_>, first: u64) -> Option<Reader>
    where
        'a: 'scope,
    {
        if first * PIECE >= self.size {
            return None;
        }
        let (sender, pieces) = sync_channel(1);
        let (used, buffers) = sync_channel(2);
        let reader = Builder::new().stack_size(128 << 10).spawn_scoped(scope, move || {
            for piece in (first..self.size.div_ceil(PIECE)).step_by(READERS as usize) {
                let read = self.transfer(piece, buffers.try_recv().unwrap_or_default());
                let failed = read.is_err();
                if sender.send(read).is_err() || failed {
                    return;
                }
            }
        });
        reader.ok().map(|_| Reader { pieces, used })
    }

    /// Reads a piece and writes it.
    fn transfer(&self, piece: u64, mut buffer: Vec<u8>) -> Result<Vec<u8>, CopyError> {
        let begin = piece * PIECE;
        // At most PIECE.
        buffer.resize((self.size - begin).min(PIECE) as usize, 0);
        let mut filled = 0;
        while filled < buffer.len() {
            match self.source.read_at(&mut buffer[filled..], begin + filled as u64) {
                Ok(0) => return Err(CopyError::Shorter),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(CopyError::Source(error)),
            }
        }
        if let Some(target) = self.target {
            target.write_all_at(&buffer, begin).map_err(CopyError::Target)?;
            // The disk works while we read on; the fsync at the end then has little left to wait for.
            sys::start_writeback(target, begin, buffer.len() as u64);
        }
        Ok(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::testing::Scratch;

    #[test]
    fn copies_are_whole_and_their_digest_is_right() {
        let scratch = Scratch::new();
        for size in [0, 1, PIECE - 1, PIECE, PIECE + 1, 9 * PIECE + 17] {
            let content: Vec<u8> = (0..size).map(|i| (i ^ (i >> 11) ^ (i >> 20)) as u8).collect();
            let source = File::open(scratch.file("source", &content)).unwrap();
            let path = scratch.path().join("target");
            let target = File::create(&path).unwrap();
            let mut done = 0;
            let digest = copy(&source, Some(&target), size, &mut |bytes| done += bytes).unwrap();
            let expected = Digest::new(Sha256::digest(&content).into());
            assert_eq!((digest, done), (expected, size));
            assert!(std::fs::read(&path).unwrap() == content, "{size} bytes");
            assert_eq!(copy(&source, None, size, &mut |_| {}).unwrap(), expected);
        }
    }

    #[test]
    fn failures_tell_their_side() {
        let scratch = Scratch::new();
        let source = File::open(scratch.file("source", vec![1; 5 << 20])).unwrap();
        let read_only = File::open(scratch.file("target", "")).unwrap();
        assert!(matches!(copy(&source, Some(&read_only), 5 << 20, &mut |_| {}), Err(CopyError::Target(_))));
        assert!(matches!(copy(&source, None, 6 << 20, &mut |_| {}), Err(CopyError::Shorter)));
        let directory = File::open(scratch.path()).unwrap();
        assert!(matches!(copy(&directory, None, 5 << 20, &mut |_| {}), Err(CopyError::Source(_))));
    }
}
