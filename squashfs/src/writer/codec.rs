//! The compressors of an image that is written, each encoding one whole block at a time.
//!
//! Run by: the user, in the importer.

use std::io;

use liblzma::stream::{Action, Check, Filters, LzmaOptions, Status, Stream};

use super::error::{Error, Result};
use super::metadata::METADATA_LEN;

/// The compressor options of an lz4 image say this: bare blocks. The kernel refuses an image without it.
const LZ4_LEGACY: u32 = 1;
const XZ_PRESET: u32 = 6;
const GZIP_LEVELS: std::ops::RangeInclusive<i32> = 1..=12;

/// How the blocks of an image are to be compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// zstd frames; level 3 is a good one, and levels above 19 are not offered
    Zstd {
        /// 1 to 19
        level: i32,
    },
    /// zlib streams
    Gzip {
        /// 1 to 12
        level: i32,
    },
    /// .xz streams
    Xz,
    /// bare lz4 blocks
    Lz4,
    /// everything as it is
    None,
}

impl Compression {
    /// Its number in the superblock. An image without compression must name one too; every kernel has gzip.
    pub(super) fn id(self) -> u16 {
        match self {
            Compression::Gzip { .. } | Compression::None => 1,
            Compression::Xz => 4,
            Compression::Lz4 => 5,
            Compression::Zstd { .. } => 6,
        }
    }

    /// The compressor options of the image, for whom they matter: the kernel needs them for lz4, `unsquashfs -s`
    /// shows the level of zstd, and for the others their absence means what is used here.
    pub(super) fn options(self) -> Option<Vec<u8>> {
        match self {
            Compression::Lz4 => Some([LZ4_LEGACY.to_le_bytes(), 0_u32.to_le_bytes()].concat()),
            Compression::Zstd { level } => Some(level.to_le_bytes().to_vec()),
            _ => None,
        }
    }

    pub(super) fn check(self) -> Result<()> {
        match self {
            Compression::Zstd { level } if !(1..=19).contains(&level) => {
                Err(Error::Level { compressor: "zstd", level })
            }
            Compression::Gzip { level } if !GZIP_LEVELS.contains(&level) => {
                Err(Error::Level { compressor: "gzip", level })
            }
            _ => Ok(()),
        }
    }
}

/// A compressor with its state, which is large: each thread has one for all its blocks.
pub(super) struct Encoder {
    codec: Codec,
    output: Vec<u8>,
}

enum Codec {
    Zstd(zstd::bulk::Compressor<'static>),
    Gzip(libdeflater::Compressor),
    Xz { dictionary: u32 },
    Lz4,
    None,
}

impl Encoder {
    pub fn new(compression: Compression, block_size: u32) -> Result<Encoder> {
        compression.check()?;
        let codec = match compression {
            Compression::Zstd { level } => {
                Codec::Zstd(zstd::bulk::Compressor::new(level).map_err(Error::Compress)?)
            }
            Compression::Gzip { level } => {
                let known = libdeflater::CompressionLvl::new(level);
                let level = known.map_err(|_| Error::Level { compressor: "gzip", level })?;
                Codec::Gzip(libdeflater::Compressor::new(level))
            }
            // The kernel reserves this much and refuses blocks that want more.
            Compression::Xz => Codec::Xz { dictionary: block_size.max(METADATA_LEN as u32) },
            Compression::Lz4 => Codec::Lz4,
            Compression::None => Codec::None,
        };
        Ok(Encoder { codec, output: Vec::new() })
    }

    /// The compressed block, or `None` if it would not be smaller. The same input always gives the same output.
    pub fn encode(&mut self, block: &[u8]) -> Result<Option<&[u8]>> {
        let bound = self.bound(block.len());
        if self.output.len() < bound {
            self.output.resize(bound, 0);
        }
        let output = self.output.as_mut_slice();
        let failed = |problem: &str| Error::Compress(io::Error::other(problem.to_owned()));
        let len = match &mut self.codec {
            Codec::Zstd(context) => context.compress_to_buffer(block, output).map_err(Error::Compress)?,
            Codec::Gzip(context) => {
                context.zlib_compress(block, output).map_err(|error| failed(&error.to_string()))?
            }
            Codec::Xz { dictionary } => {
                encode_xz(*dictionary, block, output).map_err(|error| Error::Compress(error.into()))?
            }
            Codec::Lz4 => {
                lz4_flex::block::compress_into(block, output).map_err(|error| failed(&error.to_string()))?
            }
            Codec::None => return Ok(None),
        };
        Ok(self.output.get(..len).filter(|output| output.len() < block.len()))
    }

    fn bound(&mut self, len: usize) -> usize {
        match &mut self.codec {
            Codec::Zstd(_) => zstd::zstd_safe::compress_bound(len),
            Codec::Gzip(context) => context.zlib_compress_bound(len),
            // The stream's head, index and foot, and what LZMA2 adds to incompressible chunks of 64 KiB.
            Codec::Xz { .. } => len + len / 1024 + 1024,
            Codec::Lz4 => lz4_flex::block::get_maximum_output_size(len),
            Codec::None => 0,
        }
    }
}

fn encode_xz(
    dictionary: u32,
    block: &[u8],
    output: &mut [u8],
) -> std::result::Result<usize, liblzma::stream::Error> {
    let mut options = LzmaOptions::new_preset(XZ_PRESET)?;
    options.dict_size(dictionary);
    let mut filters = Filters::new();
    filters.lzma2(&options);
    // The kernel's decoder knows no other checksum.
    let mut stream = Stream::new_stream_encoder(&filters, Check::Crc32)?;
    match stream.process(block, output, Action::Finish)? {
        Status::StreamEnd => Ok(stream.total_out() as usize),
        _ => Err(liblzma::stream::Error::Mem),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Compressor;

    const ALL: [Compression; 7] = [
        Compression::Zstd { level: 1 },
        Compression::Zstd { level: 19 },
        Compression::Gzip { level: 1 },
        Compression::Gzip { level: 12 },
        Compression::Xz,
        Compression::Lz4,
        Compression::None,
    ];

    /// Bytes without any pattern that a compressor could find.
    fn noise(len: usize) -> Vec<u8> {
        let mut state = 1_u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        (0..len).map(|_| next()).collect()
    }

    #[test]
    fn blocks_come_back_or_are_stored_when_that_is_smaller() {
        for compression in ALL {
            let mut encoder = Encoder::new(compression, 1 << 20).unwrap();
            for len in [1, 2, 100, 4096, 8192, 1 << 20] {
                assert_eq!(encoder.encode(&noise(len)).unwrap(), None, "{compression:?}, {len}");
            }
            for len in [4096, 8192, 1 << 20] {
                let text: Vec<u8> = noise(64).into_iter().cycle().take(len).collect();
                let Some(encoded) = encoder.encode(&text).unwrap() else {
                    assert_eq!(compression, Compression::None);
                    continue;
                };
                assert!(encoded.len() < len / 10, "{compression:?}, {len}");
                let decoder = Compressor::from_id(compression.id()).unwrap();
                let mut decoded = vec![0; len];
                assert_eq!(decoder.decompress(encoded, &mut decoded, 0).unwrap(), len, "{compression:?}");
                assert!(decoded == text, "{compression:?}, {len}");
            }
        }
    }
}
