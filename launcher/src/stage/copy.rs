//! Reads an image once, from its beginning to its end: its digest is computed, and what is read is written to a copy.
//! Runs as the user on the host.
//!
//! Threads move large pieces, several at once from a network, because parallel file systems are fast only then; the caller's
//! hashes the pieces in their order. All of them have ended when the function returns.
//!
//! Where the kernel can, it moves a piece itself, through a pipe, and the digest is that of the copy, which is then in
//! memory: the content is copied once. Elsewhere it is read into memory of ours, hashed, and written: twice.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::{Builder, Scope};
use std::time::{Duration, Instant};

use mizzen_core::Digest;
use mizzen_core::failure::cause;
use rustix::fs::{Advice, OFlags, fadvise, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, retry_on_intr};
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};
use sha2::{Digest as _, Sha256};

use super::fs_type;
use crate::sys::{self, Mapped};
use crate::trace::OrDebug;

/// How much is moved at once; as much as a pipe can hold.
const PIECE: u64 = 1 << 20;
/// How many move pieces at once. A disk is fastest when it is read in order, a network when much is asked for at once.
const READERS_OF_DISK: u64 = 1;
const READERS_OF_NETWORK: u64 = 4;

/// How many pieces all of them together are ahead of the digest.
const AHEAD: usize = 16;

/// Of each thread.
const STACK: usize = 128 << 10;
/// How much of a piece is written at once, as cp does. With whole pieces a copy took nearly twice as long in a virtual
/// machine that gives free memory back to its host; presumably because the kernel then takes larger blocks of memory.
const WRITTEN_AT_ONCE: u64 = 64 << 10;
/// How many pieces the disk is told to write at once.
const BATCH: u64 = 8;

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
    readers: u64,
}

/// Computes the digest of the first `size` bytes, and writes them to `target`, which is open for reading, too.
/// `advance` is told how many bytes more are done.
pub fn copy(
    source: &File,
    target: Option<&File>,
    size: u64,
    advance: &mut dyn FnMut(u64),
) -> Result<Digest, CopyError> {
    let readers = if fs_type::is_disk(source) { READERS_OF_DISK } else { READERS_OF_NETWORK };
    let work = Work { source, target, size, readers };
    let threads = threads();
    // It only makes reading faster. More than that (WillNeed for the pieces to come) makes it slower on a local disk.
    let _ = fadvise(source, 0, None, Advice::Sequential);
    let _unbuffered = fs_type::is_fuse(source).then(|| Unbuffered::new(source));
    let digest = std::thread::scope(|scope| {
        // With four readers each has every fourth piece, so that their order is known without asking.
        let readers: Vec<Option<Reader>> =
            (0..work.readers).map(|first| work.start_reader(scope, first)).collect();
        let written = target.filter(|_| size >= BATCH * PIECE).and_then(|target| start_writer(scope, target));
        let mut hasher = Sha256::new();
        for piece in 0..size.div_ceil(PIECE) {
            let reader = &readers[(piece % work.readers) as usize];
            let moved = match reader {
                // A reader that is gone has sent its error before.
                Some(reader) => reader.pieces.recv().map_err(|_| CopyError::Shorter)??,
                None => work.transfer(piece, &mut None, Vec::new())?,
            };
            if let (Some(written), 0) = (&written, (piece + 1) % BATCH) {
                let _ = written.send(piece + 1 - BATCH);
            }
            let content: &[u8] = match &moved {
                Moved::Read(content) => content,
                Moved::Spliced(content) => content,
            };
            hasher.update(content);
            advance(content.len() as u64);
            if let Some(reader) = reader {
                let _ = reader.hashed.try_send(moved);
            }
        }
        Ok(Digest::new(hasher.finalize().into()))
    });
    wait_for_end(threads);
    digest
}

/// Reads a file and compares its content with what it should be. The error is what is wrong with it.
pub fn verify(file: &File, digest: Digest, size: u64, advance: &mut dyn FnMut(u64)) -> Result<(), String> {
    match copy(file, None, size, advance) {
        Ok(found) if found == digest => Ok(()),
        Ok(found) => Err(format!("its content is {found}")),
        Err(CopyError::Shorter) => Err("it has become shorter".to_owned()),
        Err(CopyError::Source(error) | CopyError::Target(error)) => {
            Err(format!("it cannot be read: {}", cause(&error)))
        }
    }
}

/// Has the disk write each batch of pieces, by its first one, while we read on; the fsync at the end then has little left
/// to wait for. In a thread of its own, because it waits where the disk has too much to do. None if the user may have
/// no more threads.
fn start_writer<'scope>(scope: &'scope Scope<'scope, '_>, target: &'scope File) -> Option<Sender<u64>> {
    let (written, batches) = channel();
    let write = move || {
        for first in batches {
            sys::start_writeback(target, first * PIECE, BATCH * PIECE);
        }
    };
    Builder::new().stack_size(STACK).spawn_scoped(scope, write).ok().map(|_| written)
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

/// The content of a piece that has been moved.
enum Moved {
    /// Through memory of ours.
    Read(Vec<u8>),
    /// By the kernel: the copy's.
    Spliced(Mapped),
}

struct Reader {
    /// What it has moved.
    pieces: Receiver<Result<Moved, CopyError>>,
    /// What is done with. The reader takes it apart, because the digest takes longest of all.
    hashed: SyncSender<Moved>,
}

/// What the kernel moves a piece through.
struct Pipe {
    out: OwnedFd,
    into: OwnedFd,
}

impl Pipe {
    /// None if there can be no more pipes, or none of that size.
    fn new() -> Option<Pipe> {
        let (out, into) =
            pipe_with(PipeFlags::CLOEXEC).or_debug("the copy is read and written instead of spliced")?;
        // Whose processes have many pipes gets small ones, with which it is faster to read and write.
        fcntl_setpipe_size(&into, PIECE as usize).ok()?;
        Some(Pipe { out, into })
    }
}

impl<'a> Work<'a> {
    /// None if the user may have no more threads; the caller then moves those pieces itself.
    fn start_reader<'scope>(self, scope: &'scope Scope<'scope, '_>, first: u64) -> Option<Reader>
    where
        'a: 'scope,
    {
        if first * PIECE >= self.size {
            return None;
        }
        let mut pipe = if self.target.is_some() && Mapped::is_possible() { Pipe::new() } else { None };
        // The digest has work while a disk pauses. Without a pipe the pieces are in memory of ours; also, which is rare, where
        // the pipe turns out to be of no use.
        let behind = if pipe.is_some() { AHEAD / self.readers as usize } else { 1 };
        let (sender, pieces) = sync_channel(behind);
        let (hashed, old) = sync_channel(behind + 1);
        let reader = Builder::new().stack_size(STACK).spawn_scoped(scope, move || {
            for piece in (first..self.size.div_ceil(PIECE)).step_by(self.readers as usize) {
                let buffer = match old.try_recv() {
                    Ok(Moved::Read(buffer)) => buffer,
                    _ => Vec::new(),
                };
                let moved = self.transfer(piece, &mut pipe, buffer);
                let failed = moved.is_err();
                if sender.send(moved).is_err() || failed {
                    return;
                }
            }
        });
        reader.ok().map(|_| Reader { pieces, hashed })
    }

    /// At most PIECE.
    fn length(&self, piece: u64) -> usize {
        (self.size - piece * PIECE).min(PIECE) as usize
    }

    /// Moves a piece to the copy, or reads it if there is none.
    fn transfer(&self, piece: u64, pipe: &mut Option<Pipe>, buffer: Vec<u8>) -> Result<Moved, CopyError> {
        let Some(target) = self.target else { return self.read(piece, buffer).map(Moved::Read) };
        let (begin, length) = (piece * PIECE, self.length(piece));
        let spliced = pipe.as_ref().and_then(|pipe| {
            self.splice(target, piece, pipe).or_debug("a piece is read and written instead of spliced")?;
            // SAFETY: the file is new, without a name, and this process's alone; each piece is written once, before it is mapped.
            #[allow(unsafe_code)]
            let content = unsafe { Mapped::new(target, begin, length) };
            content.ok()
        });
        match spliced {
            Some(content) => Ok(Moved::Spliced(content)),
            // Not every file system can do that; and if it was an error, reading and writing tell whose. What is left
            // in the pipe is of no use.
            None => {
                *pipe = None;
                let content = self.read(piece, buffer)?;
                target.write_all_at(&content, begin).map_err(CopyError::Target)?;
                Ok(Moved::Read(content))
            }
        }
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
                let rest = (read - written).min(WRITTEN_AT_ONCE) as usize;
                if retry_on_intr(|| splice(&pipe.out, None, target, Some(&mut written), rest, flags))? == 0 {
                    return Err(Errno::IO);
                }
            }
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
