//! Compression by several threads: the stream is cut into pieces of one length, which become members of a gzip file or frames
//! of a zstd file, in order. Every reader of either knows that there may be several, and the number of threads does not show.
//!
//! Run by: the user, in the exporter.

use std::collections::VecDeque;
use std::io::{self, Error, Write};
use std::num::NonZeroUsize;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use super::ExportCompression;

/// A gzip window has 32 KiB: so much longer pieces cost a permille.
const GZIP_PIECE: usize = 1 << 20;
/// Of zstd's level 3 it has 2 MiB.
const ZSTD_PIECE: usize = 4 << 20;
const GZIP_LEVEL: u32 = 6;
const ZSTD_LEVEL: i32 = 3;
/// Pieces on their way to a thread, from it, or in it.
const PIECES_PER_THREAD: usize = 2;

type Compress = fn(&[u8]) -> io::Result<Vec<u8>>;

/// A writer that compresses, or does not.
pub struct CompressedWriter<W> {
    out: W,
    /// Without any the bytes go through as they are.
    workers: Vec<Worker>,
    /// Those that have got a piece, in the order of the output.
    busy: VecDeque<usize>,
    next: usize,
    piece: Vec<u8>,
    piece_len: usize,
    has_pieces: bool,
}

/// A thread that compresses. It ends when nobody sends any more.
struct Worker {
    pieces: SyncSender<Vec<u8>>,
    compressed: Receiver<io::Result<Vec<u8>>>,
}

impl<W: Write> CompressedWriter<W> {
    pub fn new(
        out: W,
        compression: ExportCompression,
        threads: NonZeroUsize,
    ) -> io::Result<CompressedWriter<W>> {
        let (piece_len, compress): (usize, Compress) = match compression {
            ExportCompression::None => (0, |_| Ok(Vec::new())),
            ExportCompression::Gzip => (GZIP_PIECE, gzip),
            ExportCompression::Zstd => (ZSTD_PIECE, zstd),
        };
        let count = if piece_len == 0 { 0 } else { threads.get() };
        let workers: io::Result<Vec<Worker>> = (0..count).map(|_| Worker::start(compress)).collect();
        Ok(CompressedWriter {
            out,
            workers: workers?,
            busy: VecDeque::new(),
            next: 0,
            piece: Vec::with_capacity(piece_len),
            piece_len,
            has_pieces: false,
        })
    }

    /// Gives the output back, with everything in it.
    pub fn finish(mut self) -> io::Result<W> {
        // An empty stream is one empty member.
        if !self.piece.is_empty() || !self.has_pieces {
            self.send()?;
        }
        while !self.busy.is_empty() {
            self.receive()?;
        }
        Ok(self.out)
    }

    fn send(&mut self) -> io::Result<()> {
        if self.workers.is_empty() {
            return Ok(());
        }
        if self.busy.len() == self.workers.len() * PIECES_PER_THREAD {
            self.receive()?;
        }
        let piece = std::mem::replace(&mut self.piece, Vec::with_capacity(self.piece_len));
        self.workers[self.next].pieces.send(piece).map_err(|_| ended())?;
        self.busy.push_back(self.next);
        self.next = (self.next + 1) % self.workers.len();
        self.has_pieces = true;
        Ok(())
    }

    /// Writes the oldest piece that is under way.
    fn receive(&mut self) -> io::Result<()> {
        let Some(worker) = self.busy.pop_front() else { return Ok(()) };
        let compressed = self.workers[worker].compressed.recv().map_err(|_| ended())??;
        self.out.write_all(&compressed)
    }
}

impl<W: Write> Write for CompressedWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.workers.is_empty() {
            return self.out.write(bytes);
        }
        if self.piece.len() == self.piece_len {
            self.send()?;
        }
        let len = bytes.len().min(self.piece_len - self.piece.len());
        self.piece.extend_from_slice(&bytes[..len]);
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl Worker {
    fn start(compress: Compress) -> io::Result<Worker> {
        let (pieces, source) = sync_channel::<Vec<u8>>(PIECES_PER_THREAD);
        let (sink, compressed) = sync_channel(PIECES_PER_THREAD);
        let work = move || {
            for piece in source {
                if sink.send(compress(&piece)).is_err() {
                    break;
                }
            }
        };
        thread::Builder::new().name("compressor".to_owned()).spawn(work)?;
        Ok(Worker { pieces, compressed })
    }
}

/// A member of a gzip file, without name and time.
fn gzip(piece: &[u8]) -> io::Result<Vec<u8>> {
    let out = Vec::with_capacity(piece.len() / 2);
    let mut encoder = flate2::write::GzEncoder::new(out, flate2::Compression::new(GZIP_LEVEL));
    encoder.write_all(piece)?;
    encoder.finish()
}

/// A frame of a zstd file, with a checksum.
fn zstd(piece: &[u8]) -> io::Result<Vec<u8>> {
    let mut compressor = zstd::bulk::Compressor::new(ZSTD_LEVEL)?;
    compressor.include_checksum(true)?;
    compressor.compress(piece)
}

fn ended() -> Error {
    Error::other("a thread that compresses has ended")
}
