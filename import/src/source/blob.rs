//! A layer where it comes from, to be opened by whoever converts it.
//!
//! Run by: the user, in the importer.

use std::io::{self, Read};

use mizzen_core::Failure;

use crate::manifest::{BlobDigest, Hasher, wrong_digest};

/// Opens a stream of a layer's bytes. What it reads is checked by its end.
pub type OpenLayer<'a> = Box<dyn Fn() -> Result<Box<dyn Read + Send + 'a>, Failure> + Sync + 'a>;

/// A layer that can be converted.
pub struct LayerBlob<'a> {
    /// For progress and messages.
    pub name: String,
    /// What it must hash to, and what its converted form is kept under; none where nobody says.
    pub digest: Option<BlobDigest>,
    /// Bytes of it.
    pub size: u64,
    /// Its bytes.
    pub open: OpenLayer<'a>,
}

/// A reader that compares what was read with a digest when it ends.
pub struct Verified<R> {
    source: R,
    hasher: Option<Hasher>,
    expected: BlobDigest,
}

impl<R: Read> Verified<R> {
    /// Reads `source`, which must have this digest.
    pub fn new(source: R, expected: BlobDigest) -> Verified<R> {
        Verified { source, hasher: Some(expected.hasher()), expected }
    }
}

impl<R: Read> Read for Verified<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.source.read(buffer)?;
        if count > 0 || buffer.is_empty() {
            if let (Some(hasher), Some(bytes)) = (&mut self.hasher, buffer.get(..count)) {
                hasher.update(bytes);
            }
            return Ok(count);
        }
        let found = self.hasher.take().map(Hasher::finish);
        match found.filter(|found| *found != self.expected) {
            Some(found) => Err(io::Error::other(wrong_digest(&self.expected, &found))),
            None => Ok(0),
        }
    }
}
