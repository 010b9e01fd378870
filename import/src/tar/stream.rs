//! What an archive is read from: blocks and pieces of content, with the position of each.
//!
//! Run by: the user, in the importer.

use std::io::{self, ErrorKind, Read, Seek, SeekFrom};

use super::error::{Problem, Result, TarError};
use super::header::{BLOCK_LEN, Block};

const SCRATCH_LEN: usize = 64 << 10;

/// A reader that knows where it is.
pub struct Stream<R> {
    reader: R,
    position: u64,
    /// Whether the reader had no more.
    is_at_end: bool,
    /// Skips as many bytes without reading them, if there is a way.
    seek: Option<fn(&mut R, i64) -> io::Result<()>>,
    /// Where skipped bytes are read to.
    scratch: Vec<u8>,
}

impl<R: Read> Stream<R> {
    pub fn new(reader: R) -> Stream<R> {
        Stream { reader, position: 0, is_at_end: false, seek: None, scratch: Vec::new() }
    }

    pub fn seekable(reader: R) -> Stream<R>
    where
        R: Seek,
    {
        let seek = |reader: &mut R, len| reader.seek(SeekFrom::Current(len)).map(drop);
        Stream { seek: Some(seek), ..Stream::new(reader) }
    }

    pub fn position(&self) -> u64 {
        self.position
    }

    pub fn is_at_end(&self) -> bool {
        self.is_at_end
    }

    pub fn into_inner(self) -> R {
        self.reader
    }

    /// As many bytes as there are, at most a buffer of them; 0 at the end.
    pub fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        loop {
            match self.reader.read(buffer) {
                Ok(len) => {
                    // A reader's mistake must not become ours.
                    let len = len.min(buffer.len());
                    self.is_at_end = len == 0 && !buffer.is_empty();
                    self.position += len as u64;
                    return Ok(len);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(TarError::Read(error)),
            }
        }
    }

    /// The next block; none if there is not a byte of it.
    pub fn read_block(&mut self) -> Result<Option<Block>> {
        let position = self.position;
        let mut block = [0; BLOCK_LEN];
        let mut len = 0;
        while len < BLOCK_LEN {
            match self.read(&mut block[len..])? {
                0 if len == 0 => return Ok(None),
                0 => return Err(TarError::CutHeader { position }),
                part => len += part,
            }
        }
        Ok(Some(block))
    }

    /// The next header; none at the end of the archive, which is two blocks of zeros or the end of the stream.
    pub fn next_header(&mut self) -> Result<Option<Block>> {
        let is_zero = |block: &Block| block.iter().all(|byte| *byte == 0);
        match self.read_block()? {
            Some(block) if is_zero(&block) => {
                let position = self.position;
                match self.read_block()? {
                    Some(block) if !is_zero(&block) => {
                        Err(TarError::Header { position, problem: Problem::BehindEnd })
                    }
                    _ => {
                        self.is_at_end = false;
                        Ok(None)
                    }
                }
            }
            block => Ok(block),
        }
    }

    /// Skips as many bytes, or all that there are. Returns how many.
    pub fn skip(&mut self, len: u64) -> Result<u64> {
        let mut left = len;
        let piece_len = left.min(SCRATCH_LEN as u64) as usize;
        // The last byte is read: a file can be left behind its end without an error. What cannot be skipped so, because it
        // is a pipe or the length is absurd, is read.
        if let (Some(seek), Ok(distance)) = (self.seek, i64::try_from(left.saturating_sub(1)))
            && left > SCRATCH_LEN as u64
            && seek(&mut self.reader, distance).is_ok()
        {
            self.position = self.position.saturating_add(distance as u64);
            left = 1;
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        if scratch.len() < piece_len {
            scratch = vec![0; piece_len];
        }
        while left > 0 {
            let piece = left.min(scratch.len() as u64) as usize;
            match self.read(&mut scratch[..piece])? {
                0 => break,
                part => left -= part as u64,
            }
        }
        self.scratch = scratch;
        Ok(len - left)
    }

    /// Reads to the end of the stream. Returns how many bytes there were.
    pub fn drain(&mut self) -> io::Result<u64> {
        // Reading, not seeking: whoever drains wants all bytes to be seen.
        self.seek = None;
        Ok(self.skip(u64::MAX)?)
    }
}
