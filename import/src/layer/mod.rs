//! A layer of an image, converted: its files as compressed squashfs blocks, and an index of its entries in their order.
//!
//!     blocks | index (zstd): entries, places of the contents | footer: where the index is, and its digest
//!
//! A layer does not know the ones below it. Every file is compressed once, whether an upper layer hides it or not, and links and
//! whiteouts stay what they are until the layers are put on top of each other (`replay.rs`). So layers can be converted in any
//! order and kept for other images.
//!
//! Run by: the user, in the importer.

mod cache;
mod convert;
mod index;

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use mizzen_squashfs::writer::{Options, Segment};
use sha2::{Digest, Sha256};

pub use cache::{LayerCache, LayerKey, compressor_name};
pub use convert::{LayerWriter, convert, stored_time};
pub use index::{Entry, EntryContent};

use index::read_entry;

/// Begins the footer. The number is that of this form: a layer in another form is converted anew.
const MAGIC: &[u8; 8] = b"mzlayer1";
/// Magic, position and length of the index, its digest, whether there are whiteouts.
const FOOTER_LEN: usize = 8 + 8 + 8 + 32 + 8;
/// Nothing that is made by this program is longer; a file that says so is not ours.
const INDEX_LIMIT: u64 = 4 << 30;

/// A converted layer in a file.
#[derive(Clone)]
pub struct Layer {
    file: Arc<File>,
    index_at: u64,
    index_len: u64,
    has_whiteouts: bool,
}

/// Where the index is, and what it must be.
struct Footer {
    index_at: u64,
    index_len: u64,
    digest: [u8; 32],
    has_whiteouts: bool,
}

impl Footer {
    fn encode(&self) -> [u8; FOOTER_LEN] {
        let mut bytes = [0; FOOTER_LEN];
        let fields = [
            MAGIC.as_slice(),
            &self.index_at.to_le_bytes(),
            &self.index_len.to_le_bytes(),
            &self.digest,
            &u64::from(self.has_whiteouts).to_le_bytes(),
        ];
        for (to, from) in bytes.iter_mut().zip(fields.concat()) {
            *to = from;
        }
        bytes
    }

    fn decode(bytes: &[u8; FOOTER_LEN]) -> Option<Footer> {
        let (magic, rest) = bytes.split_first_chunk::<8>()?;
        let (index_at, rest) = rest.split_first_chunk::<8>()?;
        let (index_len, rest) = rest.split_first_chunk::<8>()?;
        let (digest, rest) = rest.split_first_chunk::<32>()?;
        let footer = Footer {
            index_at: u64::from_le_bytes(*index_at),
            index_len: u64::from_le_bytes(*index_len),
            digest: *digest,
            has_whiteouts: rest.first() == Some(&1),
        };
        (magic == MAGIC && footer.index_len <= INDEX_LIMIT).then_some(footer)
    }
}

fn damaged() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the converted layer is damaged")
}

impl Layer {
    /// Opens a converted layer, and compares its index with the index's digest.
    pub fn open(file: File) -> io::Result<Layer> {
        let len = file.metadata()?.len();
        let footer_at = len.checked_sub(FOOTER_LEN as u64).ok_or_else(damaged)?;
        let mut bytes = [0; FOOTER_LEN];
        file.read_exact_at(&mut bytes, footer_at)?;
        let footer = Footer::decode(&bytes).ok_or_else(damaged)?;
        if footer.index_at.checked_add(footer.index_len) != Some(footer_at) {
            return Err(damaged());
        }
        let layer = Layer {
            file: Arc::new(file),
            index_at: footer.index_at,
            index_len: footer.index_len,
            has_whiteouts: footer.has_whiteouts,
        };
        let mut hash = Sha256::new();
        io::copy(&mut layer.region(footer.index_at, footer.index_len), &mut hash)?;
        if <[u8; 32]>::from(hash.finalize()) == footer.digest { Ok(layer) } else { Err(damaged()) }
    }

    /// Whether an upper layer has any of these: if not, nothing needs to be remembered of its own entries.
    pub fn has_whiteouts(&self) -> bool {
        self.has_whiteouts
    }

    /// The entries in their order, and behind them the places of the contents.
    pub fn read(&self) -> io::Result<LayerReader> {
        let index = zstd::Decoder::new(self.region(self.index_at, self.index_len))?;
        Ok(LayerReader { index: BufReader::new(index) })
    }

    /// Bytes of its blocks.
    pub fn blocks_len(&self) -> u64 {
        self.index_at
    }

    /// The blocks, from the start of the file.
    pub fn blocks(&self) -> Region {
        self.region(0, self.index_at)
    }

    fn region(&self, start: u64, len: u64) -> Region {
        Region { file: Arc::clone(&self.file), start, position: 0, len }
    }
}

/// The index of a layer, from its beginning to its end.
pub struct LayerReader {
    index: BufReader<zstd::Decoder<'static, BufReader<Region>>>,
}

impl LayerReader {
    /// The next entry, or none behind the last.
    pub fn next_entry(&mut self) -> io::Result<Option<Entry>> {
        read_entry(&mut self.index)
    }

    /// The places of the contents; only behind the last entry.
    pub fn segment(mut self, options: &Options) -> io::Result<Segment> {
        Segment::read(&mut self.index, options)
    }
}

/// A part of a file with a position of its own, so that several can read one file.
pub struct Region {
    file: Arc<File>,
    start: u64,
    position: u64,
    len: u64,
}

impl Region {
    /// A part of a file.
    pub fn new(file: Arc<File>, start: u64, len: u64) -> Region {
        Region { file, start, position: 0, len }
    }

    /// Whether these bytes are at this place.
    pub fn has_at(&self, position: u64, bytes: &[u8]) -> bool {
        let mut found = vec![0; bytes.len()];
        let at = self.start.checked_add(position);
        at.is_some_and(|at| self.file.read_exact_at(&mut found, at).is_ok()) && found == bytes
    }
}

impl Read for Region {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.len.saturating_sub(self.position);
        let wanted = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let Some(buffer) = buffer.get_mut(..wanted) else { return Ok(0) };
        let count = self.file.read_at(buffer, self.start + self.position)?;
        self.position += count as u64;
        Ok(count)
    }
}

impl io::Seek for Region {
    fn seek(&mut self, to: io::SeekFrom) -> io::Result<u64> {
        let position = match to {
            io::SeekFrom::Start(position) => Some(position),
            io::SeekFrom::Current(by) => self.position.checked_add_signed(by),
            io::SeekFrom::End(by) => self.len.checked_add_signed(by),
        };
        self.position = position.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}
