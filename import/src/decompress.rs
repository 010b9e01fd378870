//! Compressed streams, known by their first bytes and not by what a manifest says of them: gzip, zstd, xz, or nothing.
//!
//! Each needs some buffers and the window of its decoder, whatever the stream says. What comes out may be of any length:
//! bounding it is for the caller, who knows what it is.
//!
//! Run by: the user, in the importer.

use std::io::{self, BufRead, BufReader, Chain, Cursor, Error, ErrorKind, Read};

use flate2::bufread::GzDecoder;
use liblzma::bufread::XzDecoder;
use mizzen_core::failure::quote;

use crate::tar::header::{BLOCK_LEN, has_valid_checksum};

/// The window that zstd's own program accepts: 128 MiB. The levels up to 19 need 8 MiB, `--long` needs this.
const ZSTD_WINDOW_LOG: u32 = 27;
/// `xz -9` needs 65 MiB.
const XZ_MEMORY: u64 = 128 << 20;

const INPUT_LEN: usize = 128 << 10;
/// Decoders are slow in small pieces, and a tar archive has many.
const OUTPUT_LEN: usize = 128 << 10;

/// How a stream is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// A tar archive as it is, or an empty stream, which is an archive without entries.
    None,
    /// gzip, of one or more members.
    Gzip,
    /// zstd, of one or more frames.
    Zstd,
    /// xz, of one or more streams.
    Xz,
}

/// What a stream is, by its first bytes; `None` is what we do not read.
///
/// `head` has a block of a tar archive, if the stream has so much.
fn recognize(head: &[u8]) -> Option<Compression> {
    match head {
        [] => Some(Compression::None),
        [0x1f, 0x8b, ..] => Some(Compression::Gzip),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Some(Compression::Zstd),
        // A frame to skip; some writers begin with one.
        [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Some(Compression::Zstd),
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Some(Compression::Xz),
        _ => {
            let block = head.first_chunk::<BLOCK_LEN>()?;
            let is_tar = has_valid_checksum(block) || block.iter().all(|byte| *byte == 0);
            is_tar.then_some(Compression::None)
        }
    }
}

fn unknown(head: &[u8]) -> Error {
    let text = match head {
        [b'B', b'Z', b'h', ..] => "it is compressed with bzip2, which we do not read".to_owned(),
        [0x04, 0x22, 0x4d, 0x18, ..] => "it is compressed with lz4, which we do not read".to_owned(),
        [0x5d, 0, 0, ..] => "it is compressed with lzma, which we do not read".to_owned(),
        _ => {
            let start = &head[..head.len().min(8)];
            format!(
                "it is neither a tar archive nor compressed with gzip, zstd or xz (starts with \"{}\")",
                quote(start)
            )
        }
    };
    Error::new(ErrorKind::InvalidData, text)
}

/// A stream without its compression.
pub struct Decompressed<R: Read> {
    reader: BufReader<Decoder<R>>,
    compression: Compression,
}

/// Finds out how a stream is compressed. It is read from the start to its end, with everything that is behind the data.
pub fn decompressed<R: Read>(mut reader: R) -> io::Result<Decompressed<R>> {
    let mut head = Vec::with_capacity(BLOCK_LEN);
    reader.by_ref().take(BLOCK_LEN as u64).read_to_end(&mut head)?;
    let Some(compression) = recognize(&head) else { return Err(unknown(&head)) };
    let source = Source {
        reader: Some(BufReader::with_capacity(INPUT_LEN, Cursor::new(head).chain(reader))),
        has_failed: false,
    };
    let decoder = match compression {
        Compression::None => Decoder::None(source),
        Compression::Gzip => Decoder::Gzip(Gzip { decoder: GzDecoder::new(source), is_at_end: false }),
        Compression::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(source)?;
            decoder.window_log_max(ZSTD_WINDOW_LOG)?;
            Decoder::Zstd(decoder)
        }
        Compression::Xz => {
            let stream =
                liblzma::stream::Stream::new_stream_decoder(XZ_MEMORY, liblzma::stream::CONCATENATED)?;
            Decoder::Xz(XzDecoder::new_stream(source, stream))
        }
    };
    Ok(Decompressed { reader: BufReader::with_capacity(OUTPUT_LEN, decoder), compression })
}

impl<R: Read> Decompressed<R> {
    /// How the stream is compressed.
    pub fn compression(&self) -> Compression {
        self.compression
    }
}

impl<R: Read> Read for Decompressed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.reader.read(buffer)
    }
}

impl<R: Read> BufRead for Decompressed<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.reader.fill_buf()
    }

    fn consume(&mut self, len: usize) {
        self.reader.consume(len);
    }
}

enum Decoder<R: Read> {
    None(Source<R>),
    Gzip(Gzip<R>),
    Zstd(zstd::stream::read::Decoder<'static, Source<R>>),
    Xz(XzDecoder<Source<R>>),
}

impl<R: Read> Read for Decoder<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let (result, name, limit, source) = match self {
            Decoder::None(source) => return source.read(buffer),
            Decoder::Gzip(gzip) => (gzip.read(buffer), "gzip", "", gzip.decoder.get_mut()),
            Decoder::Zstd(decoder) => {
                // Of a larger window only zstd's words tell.
                (decoder.read(buffer), "zstd", " with a window of at most 128 MiB", decoder.get_mut())
            }
            Decoder::Xz(decoder) => (decoder.read(buffer), "xz", " in 128 MiB of memory", decoder.get_mut()),
        };
        result.map_err(|error| match error.kind() {
            // A lost connection is not a damaged stream.
            _ if std::mem::take(&mut source.has_failed) => error,
            ErrorKind::Interrupted => error,
            ErrorKind::UnexpectedEof => {
                Error::new(ErrorKind::UnexpectedEof, format!("the {name} stream ends before its data does"))
            }
            _ => Error::new(
                ErrorKind::InvalidData,
                format!("the {name} stream cannot be decompressed{limit}: {error}"),
            ),
        })
    }
}

/// A gzip file: one or more members, then nothing, or zeros.
struct Gzip<R: Read> {
    decoder: GzDecoder<Source<R>>,
    is_at_end: bool,
}

impl<R: Read> Read for Gzip<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        while !self.is_at_end {
            match self.decoder.read(buffer)? {
                0 => self.next_member()?,
                len => return Ok(len),
            }
        }
        Ok(0)
    }
}

impl<R: Read> Gzip<R> {
    /// Goes on with the next member. Layers of eStargz have one for each file: the decoder is kept.
    fn next_member(&mut self) -> io::Result<()> {
        let source = self.decoder.get_mut();
        match source.fill_buf()?.first() {
            None => self.is_at_end = true,
            // The padding of tapes, which gzip ignores, too.
            Some(0) => {
                source.skip_zeros()?;
                self.is_at_end = true;
            }
            Some(0x1f) => {
                let source = Source { reader: source.reader.take(), has_failed: false };
                self.decoder.reset(source);
            }
            // gzip warns and goes on, Go does not. A digest that covers garbage was made of it, too: somebody is wrong.
            Some(_) => {
                return Err(Error::new(ErrorKind::InvalidData, "it has something else behind its end"));
            }
        }
        Ok(())
    }
}

/// The compressed bytes. Knows whether it was they that could not be read.
struct Source<R> {
    /// None only while it moves to another decoder.
    reader: Option<BufReader<Chain<Cursor<Vec<u8>>, R>>>,
    has_failed: bool,
}

impl<R: Read> Source<R> {
    fn skip_zeros(&mut self) -> io::Result<()> {
        loop {
            let bytes = self.fill_buf()?;
            if bytes.is_empty() {
                return Ok(());
            }
            if bytes.iter().any(|byte| *byte != 0) {
                return Err(Error::new(ErrorKind::InvalidData, "it has something else behind its end"));
            }
            let len = bytes.len();
            self.consume(len);
        }
    }
}

impl<R: Read> BufRead for Source<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        let Some(reader) = &mut self.reader else { return Ok(&[]) };
        let has_failed = &mut self.has_failed;
        reader.fill_buf().inspect_err(|_| *has_failed = true)
    }

    fn consume(&mut self, len: usize) {
        if let Some(reader) = &mut self.reader {
            reader.consume(len);
        }
    }
}

impl<R: Read> Read for Source<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Some(reader) = &mut self.reader else { return Ok(0) };
        reader.read(buffer).inspect_err(|_| self.has_failed = true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    use crate::tar::Archive;

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn zstd(bytes: &[u8]) -> Vec<u8> {
        ::zstd::stream::encode_all(bytes, 1).unwrap()
    }

    fn xz(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), 0);
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    type Compress = fn(&[u8]) -> Vec<u8>;
    const FORMS: [(Compress, Compression); 3] =
        [(gzip, Compression::Gzip), (zstd, Compression::Zstd), (xz, Compression::Xz)];

    /// Not a tar archive, which matters only when it is not compressed.
    fn sample() -> Vec<u8> {
        (0..300_000u32).flat_map(|i| (i.wrapping_mul(2_654_435_761) >> 12).to_le_bytes()).collect()
    }

    fn read(bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        decompressed(bytes)?.read_to_end(&mut content)?;
        Ok(content)
    }

    fn problem(bytes: &[u8]) -> String {
        read(bytes).unwrap_err().to_string()
    }

    #[test]
    fn each_compression_is_recognised() {
        for (compress, compression) in FORMS {
            let bytes = compress(&sample());
            assert_eq!(decompressed(bytes.as_slice()).unwrap().compression(), compression);
            assert!(read(&bytes).unwrap() == sample(), "{compression:?}");
            assert!(read(&compress(b"")).unwrap().is_empty(), "{compression:?}");
        }
        let mut archive = ::tar::Builder::new(Vec::new());
        let mut header = ::tar::Header::new_ustar();
        header.set_size(5);
        archive.append_data(&mut header, "f", b"hello".as_slice()).unwrap();
        let archive = archive.into_inner().unwrap();
        assert!(read(&archive).unwrap() == archive);
        assert!(read(&[0; 1024]).unwrap() == [0; 1024]);
    }

    #[test]
    fn a_stream_can_move_to_another_thread() {
        fn is_send(_: &impl Send) {}
        is_send(&Archive::new(decompressed(io::empty()).unwrap()));
    }

    #[test]
    fn an_empty_stream_is_an_archive_without_entries() {
        let mut archive = Archive::new(decompressed(io::empty()).unwrap());
        assert!(archive.next_entry().unwrap().is_none());
    }

    #[test]
    fn the_first_bytes_may_come_one_by_one() {
        struct OneByOne(Cursor<Vec<u8>>);
        impl Read for OneByOne {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                let len = buffer.len().min(1);
                self.0.read(&mut buffer[..len])
            }
        }
        for (compress, _) in FORMS {
            let bytes = compress(b"some text");
            let mut text = String::new();
            decompressed(OneByOne(Cursor::new(bytes))).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "some text");
        }
    }

    #[test]
    fn what_is_refused() {
        assert_eq!(problem(b"BZh91AY&SY"), "it is compressed with bzip2, which we do not read");
        assert_eq!(problem(&[0x04, 0x22, 0x4d, 0x18, 0]), "it is compressed with lz4, which we do not read");
        assert_eq!(
            problem(b"<!DOCTYPE html>"),
            "it is neither a tar archive nor compressed with gzip, zstd or xz (starts with \"<!DOCTYP\")"
        );
        assert!(problem(&[b'x'; 10_000]).starts_with("it is neither a tar archive"));
        assert!(problem(&[0; 100]).starts_with("it is neither a tar archive"));
    }

    #[test]
    fn several_members_frames_and_streams() {
        let sample = sample();
        for (compress, compression) in FORMS {
            let parts: Vec<u8> = sample.chunks(100_000).flat_map(compress).collect();
            assert!(read(&parts).unwrap() == sample, "{compression:?}");
        }
        // As eStargz has them, some without content.
        let members: Vec<u8> =
            sample[..20_000].chunks(10).flat_map(|part| [gzip(part), gzip(b"")].concat()).collect();
        assert!(read(&members).unwrap() == sample[..20_000]);
    }

    #[test]
    fn zeros_behind_gzip_are_fine_and_anything_else_is_not() {
        let padded = [gzip(b"hello"), vec![0; 1_000_000]].concat();
        assert_eq!(read(&padded).unwrap(), b"hello");
        let expected = "the gzip stream cannot be decompressed: it has something else behind its end";
        assert_eq!(problem(&[gzip(b"hello"), b"garbage".to_vec()].concat()), expected);
        assert_eq!(problem(&[padded, vec![1]].concat()), expected);
        let half = [gzip(b"hello"), gzip(b"world")[..15].to_vec()].concat();
        assert_eq!(problem(&half), "the gzip stream ends before its data does");
        let odd = problem(&[gzip(b"hello"), b"\x1fgarbage of a member".to_vec()].concat());
        assert_eq!(odd, "the gzip stream cannot be decompressed: invalid gzip header");
        assert!(
            problem(&[zstd(b"hello"), b"garbage".to_vec()].concat()).starts_with("the zstd stream cannot be")
        );
        assert!(
            problem(&[xz(b"hello"), b"garbage, more than a header".to_vec()].concat())
                .starts_with("the xz stream cannot be")
        );
    }

    #[test]
    fn frames_to_skip() {
        let skippable =
            |len: u32| [&[0x5a, 0x2a, 0x4d, 0x18], &len.to_le_bytes()[..], &vec![7; len as usize]].concat();
        let bytes =
            [skippable(3), zstd(b"hello "), skippable(0), zstd(b"world"), skippable(200_000)].concat();
        assert_eq!(read(&bytes).unwrap(), b"hello world");
        assert!(read(&skippable(10)).unwrap().is_empty());
        let cut = &bytes[..bytes.len() - 1];
        assert_eq!(problem(cut), "the zstd stream ends before its data does");
    }

    /// A frame with a window of this logarithm, and one empty block.
    fn frame_with_window(log: u8) -> Vec<u8> {
        vec![0x28, 0xb5, 0x2f, 0xfd, 0, (log - 10) << 3, 1, 0, 0]
    }

    #[test]
    fn large_windows_are_refused() {
        assert!(read(&frame_with_window(27)).unwrap().is_empty());
        for log in [28, 31, 41] {
            assert_eq!(
                problem(&frame_with_window(log)),
                "the zstd stream cannot be decompressed with a window of at most 128 MiB: Frame requires too much \
                 memory for decoding",
                "{log}"
            );
        }
    }

    #[test]
    fn cut_and_damaged_streams() {
        for (compress, compression) in FORMS {
            let bytes = compress(&sample()[..2000]);
            for len in 1..bytes.len() {
                assert!(read(&bytes[..len]).is_err(), "{compression:?} {len}");
            }
            for len in 20..bytes.len() {
                let error = read(&bytes[..len]).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "{compression:?} {len}: {error}");
            }
            let mut found = 0;
            for at in 0..bytes.len() {
                let mut bytes = bytes.clone();
                bytes[at] ^= 0x10;
                found += u32::from(read(&bytes).is_err());
            }
            // zstd's checksum is off by default.
            assert!(found > 100 || compression == Compression::Zstd, "{compression:?} {found}");
        }
    }

    #[test]
    fn an_error_of_the_source_is_handed_on() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(Error::new(ErrorKind::UnexpectedEof, "the registry closed the connection"))
            }
        }
        for (compress, _) in FORMS {
            let bytes = compress(&sample());
            let source = bytes[..10_000].chain(Broken);
            let error = io::copy(&mut decompressed(source).unwrap(), &mut io::sink()).unwrap_err();
            assert_eq!(error.to_string(), "the registry closed the connection");
        }
        assert!(decompressed(Broken).is_err());
    }
}
