//! Where an image is written to: a file that can be written again from an earlier position.
//!
//! Run by: the user, in the importer.

use std::fs::File;
use std::io::{self, BufWriter, Cursor, Seek, SeekFrom, Write};

use super::error::{Error, Result};

const BUFFER_LEN: usize = 256 << 10;

/// Where an image can be written to.
pub trait Output: Write + Seek {
    /// Cuts off all behind the first `len` bytes.
    fn truncate(&mut self, len: u64) -> io::Result<()>;
}

impl Output for File {
    fn truncate(&mut self, len: u64) -> io::Result<()> {
        self.set_len(len)
    }
}

impl Output for Cursor<Vec<u8>> {
    fn truncate(&mut self, len: u64) -> io::Result<()> {
        self.get_mut().truncate(len.try_into().unwrap_or(usize::MAX));
        Ok(())
    }
}

impl<T: Output + ?Sized> Output for &mut T {
    fn truncate(&mut self, len: u64) -> io::Result<()> {
        (**self).truncate(len)
    }
}

/// An output that knows its position.
pub(super) struct PositionedOutput<W: Output> {
    out: BufWriter<W>,
    position: u64,
}

impl<W: Output> PositionedOutput<W> {
    pub fn new(out: W) -> PositionedOutput<W> {
        PositionedOutput { out: BufWriter::with_capacity(BUFFER_LEN, out), position: 0 }
    }

    /// Where the next byte is written to.
    pub fn position(&self) -> u64 {
        self.position
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(Error::Write)?;
        self.position += bytes.len() as u64;
        Ok(())
    }

    pub fn seek(&mut self, position: u64) -> Result<()> {
        if position != self.position {
            self.position = self.out.seek(SeekFrom::Start(position)).map_err(Error::Write)?;
        }
        Ok(())
    }

    /// Gives the output back, cut off at `len`.
    pub fn finish(self, len: u64) -> Result<W> {
        let mut out = self.out.into_inner().map_err(|error| Error::Write(error.into_error()))?;
        out.truncate(len).map_err(Error::Write)?;
        Ok(out)
    }
}
