//! Reads an image once, from its beginning to its end: its digest is computed, and what is read is written to a copy.
//! Runs as the user on the host.
//!
//! Several threads move large pieces at once, because parallel file systems are fast only then; the calling thread
//! hashes the pieces in their order. All threads have ended when the function returns.
//!
//! Where the kernel can, it moves a piece itself, through a pipe, and the digest is that of the copy, which is then in
//! memory: the content is copied once. Elsewhere it is read into memory of ours, hashed, and written: twice.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, Scope};
use std::time::{Duration, Instant};

use mizzen_core::Digest;
use rustix::fs::{Advice, OFlags, fadvise, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, retry_on_intr};
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};
use sha2::{Digest as _, Sha256};

use super::place;
use crate::sys::{self, Mapped};

/// How much is moved at once; as much as a pipe can hold.
const PIECE: u64 = 1 << 20;
/// How many move pieces at once; each is at most two ahead of the digest.
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

/// Computes the digest of the first `size` bytes, and writes them to `target`, which is open for reading, too.
/// `advance` is told how many bytes more are done.
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
            let reader = &readers[(piece % READERS) as usize];
            let moved = match reader {
                // A reader that is gone has sent its error before.
                Some(reader) => reader.pieces.recv().map_err(|_| CopyError::Shorter)??,
                None => work.transfer(piece, &mut None, Vec::new())?,
            };
            work.hash(piece, &moved, &mut hasher).map_err(CopyError::Target)?;
            advance(work.length(piece) as u64);
            if let (Some(reader), Moved::Read(buffer)) = (reader, moved) {
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

/// A piece that has been moved.
enum Moved<'a> {
    /// Through memory of ours: its content.
    Read(Vec<u8>),
    /// By the kernel: the copy, which has its content.
    Spliced(&'a File),
}

struct Reader<'a> {
    /// What it has moved.
    pieces: Receiver<Result<Moved<'a>, CopyError>>,
    /// Buffers that it can use again.
    used: SyncSender<Vec<u8>>,
}

/// What the kernel moves a piece through.
struct Pipe {
    out: OwnedFd,
    into: OwnedFd,
}

impl Pipe {
    /// None if there can be no more pipes.
    fn new() -> Option<Pipe> {
        let (out, into) = pipe_with(PipeFlags::CLOEXEC).ok()?;
        // A smaller one is slower.
        let _ = fcntl_setpipe_size(&into, PIECE as usize);
        Some(Pipe { out, into })
    }
}

impl<'a> Work<'a> {
    /// None if the user may have no more threads; the caller then moves those pieces itself.
    fn start_reader<'scope>(self, scope: &'scope Scope<'scope, '_>, first: u64) -> Option<Reader<'a>>
    where
        'a: 'scope,
    {
        if first * PIECE >= self.size {
            return None;
        }
        let (sender, pieces) = sync_channel(1);
        let (used, buffers) = sync_channel(2);
        let reader = Builder::new().stack_size(128 << 10).spawn_scoped(scope, move || {
            let mut pipe = Mapped::is_possible().then(Pipe::new).flatten();
            for piece in (first..self.size.div_ceil(PIECE)).step_by(READERS as usize) {
                let moved = self.transfer(piece, &mut pipe, buffers.try_recv().unwrap_or_default());
                let failed = moved.is_err();
                if sender.send(moved).is_err() || failed {
                    return;
                }
            }
        });
        reader.ok().map(|_| Reader { pieces, used })
    }

    /// At most PIECE.
    fn length(&self, piece: u64) -> usize {
        (self.size - piece * PIECE).min(PIECE) as usize
    }

    /// Moves a piece to the copy, or reads it if there is none.
    fn transfer(&self, piece: u64, pipe: &mut Option<Pipe>, buffer: Vec<u8>) -> Result<Moved<'a>, CopyError> {
        let Some(target) = self.target else { return self.read(piece, buffer).map(Moved::Read) };
        let begin = piece * PIECE;
        let spliced = pipe.as_ref().is_some_and(|pipe| self.splice(target, piece, pipe).is_ok());
        let moved = if spliced {
            Moved::Spliced(target)
        } else {
            // Not every file system can do that; and if it was an error, reading and writing tell whose. What is left
            // in the pipe is of no use.
            *pipe = None;
            let content = self.read(piece, buffer)?;
            target.write_all_at(&content, begin).map_err(CopyError::Target)?;
            Moved::Read(content)
        };
        // The disk works while we read on; the fsync at the end then has little left to wait for.
        sys::start_writeback(target, begin, self.length(piece) as u64);
        Ok(moved)
    }

    fn read(&self, piece: u64, mut buffer: Vec<u8>) -> Result<Vec<u8>, CopyError> {
        buffer.resize(self.length(piece), 0);
        match self.source.read_exact_at(&mut buffer, piece * PIECE) {
            Ok(()) => Ok(buffer),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(CopyError::Shorter),
            Err(error) => Err(CopyError::Source(error)),
        }
    }

    /// Has the kernel move a piece.
    fn splice(&self, target: &File, piece: u64, pipe: &Pipe) -> Result<(), Errno> {
        let flags = SpliceFlags::empty();
        let (mut read, mut written) = (piece * PIECE, piece * PIECE);
        let end = read + self.length(piece) as u64;
        while written < end {
            let rest = (end - read) as usize;
            if retry_on_intr(|| splice(self.source, Some(&mut read), &pipe.into, None, rest, flags))? == 0 {
                return Err(Errno::NODATA);
            }
            while written < read {
                let rest = (read - written) as usize;
                retry_on_intr(|| splice(&pipe.out, None, target, Some(&mut written), rest, flags))?;
            }
        }
        Ok(())
    }

    fn hash(&self, piece: u64, moved: &Moved, hasher: &mut Sha256) -> io::Result<()> {
        match moved {
            Moved::Read(content) => hasher.update(content),
            Moved::Spliced(target) => match Mapped::new(target, piece * PIECE, self.length(piece)) {
                Ok(content) => hasher.update(&content[..]),
                // Not every file system can do that either; and if it was an error, reading tells which.
                Err(_) => {
                    let mut content = vec![0; self.length(piece)];
                    target.read_exact_at(&mut content, piece * PIECE)?;
                    hasher.update(&content);
                }
            },
        }
        Ok(())
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
            let target = File::create_new(&path).unwrap();
            let mut done = 0;
            let digest = copy(&source, Some(&target), size, &mut |bytes| done += bytes).unwrap();
            let expected = Digest::new(Sha256::digest(&content).into());
            assert_eq!((digest, done), (expected, size));
            assert!(std::fs::read(&path).unwrap() == content, "{size} bytes");
            assert_eq!(copy(&source, None, size, &mut |_| {}).unwrap(), expected);
            std::fs::remove_file(&path).unwrap();
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
