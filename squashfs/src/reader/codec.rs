//! The six compressors of mksquashfs, each decoding one whole block at a time.
//!
//! Run by: the user, in the launcher and in the FUSE server process.

use std::cell::RefCell;

use liblzma::stream::{Action, Status, Stream};

use super::error::{Error, Result};
use super::lzo;

/// mksquashfs never takes a dictionary above the block size (1 MiB); decoding needs little more than that.
const LZMA_MEMORY_LIMIT: u64 = 4 << 20;

/// How the blocks of an image are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compressor {
    /// zlib streams
    Gzip,
    /// the old .lzma format
    Lzma,
    /// LZO1X
    Lzo,
    /// .xz streams
    Xz,
    /// bare lz4 blocks
    Lz4,
    /// zstd frames
    Zstd,
}

thread_local! {
    // Decoder state is large and costs more to set up than a small block to decode, so each thread keeps its
    // own.
    static DEFLATE: RefCell<libdeflater::Decompressor> = RefCell::new(libdeflater::Decompressor::new());
    static ZSTD: RefCell<Option<zstd::bulk::Decompressor<'static>>> = const { RefCell::new(None) };
}

impl Compressor {
    /// The compressor with this number in the superblock.
    pub fn from_id(id: u16) -> Result<Compressor> {
        Ok(match id {
            1 => Compressor::Gzip,
            2 => Compressor::Lzma,
            3 => Compressor::Lzo,
            4 => Compressor::Xz,
            5 => Compressor::Lz4,
            6 => Compressor::Zstd,
            _ => return Err(Error::UnknownCompressor(id)),
        })
    }

    /// Its name as `mksquashfs -comp` takes it.
    pub fn name(self) -> &'static str {
        match self {
            Compressor::Gzip => "gzip",
            Compressor::Lzma => "lzma",
            Compressor::Lzo => "lzo",
            Compressor::Xz => "xz",
            Compressor::Lz4 => "lz4",
            Compressor::Zstd => "zstd",
        }
    }

    /// Decodes `input`, which starts at byte `at` of the image, into `output`, and tells how many bytes of that it has filled.
    pub fn decompress(self, input: &[u8], output: &mut [u8], at: u64) -> Result<usize> {
        let decoded = match self {
            Compressor::Gzip => DEFLATE.with_borrow_mut(|d| d.zlib_decompress(input, output).ok()),
            Compressor::Lzma => Stream::new_lzma_decoder(LZMA_MEMORY_LIMIT)
                .ok()
                .and_then(|stream| run_lzma(stream, input, output)),
            Compressor::Xz => Stream::new_stream_decoder(LZMA_MEMORY_LIMIT, 0)
                .ok()
                .and_then(|stream| run_lzma(stream, input, output)),
            Compressor::Lzo => lzo::decompress(input, output).ok(),
            Compressor::Lz4 => lz4_flex::block::decompress_into(input, output).ok(),
            Compressor::Zstd => ZSTD.with_borrow_mut(|context| run_zstd(context, input, output)),
        };
        decoded.ok_or(Error::Decompress { compressor: self.name(), at })
    }
}

/// One call decodes the whole block: input and output are complete.
fn run_lzma(mut stream: Stream, input: &[u8], output: &mut [u8]) -> Option<usize> {
    match stream.process(input, output, Action::Finish) {
        Ok(Status::StreamEnd) => usize::try_from(stream.total_out()).ok(),
        _ => None,
    }
}

fn run_zstd(
    context: &mut Option<zstd::bulk::Decompressor<'static>>,
    input: &[u8],
    output: &mut [u8],
) -> Option<usize> {
    if context.is_none() {
        *context = zstd::bulk::Decompressor::new().ok();
    }
    context.as_mut()?.decompress_to_buffer(input, output).ok()
}
