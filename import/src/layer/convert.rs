//! One layer, from the bytes of a registry or an archive to its converted form, in one pass: decompress, read the tar,
//! compress blocks. Nothing is unpacked, and nothing in the layer becomes a path of this machine.
//!
//! Run by: the user, in the importer.

use std::fs::File;
use std::io::{self, Read, Seek, Write};

use mizzen_core::Failure;
use mizzen_core::failure::quote;
use mizzen_squashfs::writer::{self, Compressors, SegmentWriter};
use sha2::{Digest, Sha256};

use super::index::{Entry, EntryContent, write_end, write_entry};
use super::{Footer, Layer};
use crate::decompress::decompressed;
use crate::failures::{cannot_write, failure_of};
use crate::tar::{self, Archive, EntryKind};
use crate::whiteout;

/// The index is small and read once.
const INDEX_LEVEL: i32 = 3;
/// More than any image has; what has more was made to take memory.
const ENTRY_LIMIT: u32 = 20_000_000;
/// A sparse file takes time and table space by its length.
const FILE_LIMIT: u64 = 1 << 40;
/// Longer than Linux takes at once; each directory on the way takes memory.
const PATH_LIMIT: usize = 32 << 10;
/// Kept of an entry's extended attributes: what unprivileged programs see, and what makes programs privileged, as data.
/// Labels, access lists and overlay's own marks belong to the file system that they come from.
const KEPT_XATTRS: [&[u8]; 2] = [b"user.", b"security.capability"];

/// Converts a layer into `out`, an empty file that can be read. Reads `source` to its end: what checks the digest of a blob does
/// so there.
pub fn convert(source: impl Read + Send, out: File, compressors: &Compressors) -> Result<Layer, Failure> {
    let mut layer = LayerWriter::new(out, compressors)?;
    let mut source = Watched { source, has_failed: false };
    if let Err(failure) = read_all(&mut source, &mut layer) {
        if source.has_failed {
            return Err(failure);
        }
        // Bytes that make no sense may be others than were announced, and then that is what to tell.
        return Err(io::copy(&mut source, &mut io::sink()).map_or_else(failure_of, |_| failure));
    }
    layer.finish()
}

fn read_all(mut source: impl Read, layer: &mut LayerWriter) -> Result<(), Failure> {
    let mut archive = Archive::new(decompressed(&mut source).map_err(failure_of)?);
    while let Some(entry) = archive.next_entry().map_err(|error| failure_of(error.into()))? {
        let shown = quote(&entry.path);
        add(entry, &mut archive, layer).map_err(|failure| failure.about(shown))?;
    }
    // Behind the end of the archive there may be padding, and the checksum of what is compressed.
    archive.drain().map_err(failure_of)?;
    drop(archive);
    io::copy(&mut source, &mut io::sink()).map_err(failure_of)?;
    Ok(())
}

/// A source that knows whether it was it that failed.
struct Watched<R> {
    source: R,
    has_failed: bool,
}

impl<R: Read> Read for Watched<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.source.read(buffer).inspect_err(|_| self.has_failed = true)
    }
}

fn add(entry: tar::Entry, archive: &mut Archive<impl Read>, layer: &mut LayerWriter) -> Result<(), Failure> {
    let content = match entry.kind {
        EntryKind::Directory => EntryContent::Directory,
        EntryKind::File => EntryContent::File(layer.add_file(entry.size, archive.contents())?),
        EntryKind::HardLink(target) => EntryContent::HardLink(whiteout::clean_path(&target)),
        EntryKind::Symlink(target) => EntryContent::Symlink(target),
        EntryKind::CharDevice { major, minor } => EntryContent::CharDevice(major, minor),
        EntryKind::BlockDevice { major, minor } => EntryContent::BlockDevice(major, minor),
        EntryKind::Fifo => EntryContent::Fifo,
    };
    let id = |id: u64| u32::try_from(id).map_err(|_| Failure::new(format!("{id} is no owner or group")));
    layer.add(Entry {
        path: whiteout::clean_path(&entry.path),
        mode: entry.mode & 0o7777,
        uid: id(entry.uid)?,
        gid: id(entry.gid)?,
        mtime: stored_time(entry.mtime),
        xattrs: entry.xattrs,
        content,
    })
}

/// A time as far as the format goes: from 1970 to 2106.
pub fn stored_time(seconds: i64) -> u32 {
    u32::try_from(seconds.max(0)).unwrap_or(u32::MAX)
}

/// A layer that is being written.
pub struct LayerWriter {
    /// The same file as the segment's, for reading.
    file: File,
    segment: SegmentWriter<File>,
    index: zstd::Encoder<'static, Vec<u8>>,
    count: u32,
    has_whiteouts: bool,
}

impl LayerWriter {
    /// Starts a layer in an empty file that can be read.
    pub fn new(out: File, compressors: &Compressors) -> Result<LayerWriter, Failure> {
        Ok(LayerWriter {
            file: out.try_clone().map_err(cannot_write)?,
            segment: SegmentWriter::new(out, compressors),
            index: zstd::Encoder::new(Vec::new(), INDEX_LEVEL).map_err(cannot_write)?,
            count: 0,
            has_whiteouts: false,
        })
    }

    /// Adds the contents of a file of this size; returns their number.
    pub fn add_file(&mut self, size: u64, contents: impl Read) -> Result<u32, Failure> {
        if size > FILE_LIMIT {
            return Err(Failure::new(format!("a file of {size} bytes"))
                .hint(format!("files of up to {} GiB can be imported", FILE_LIMIT >> 30)));
        }
        let file = self.segment.add_file(contents).map_err(of_writer)?;
        // There are no more files than entries.
        Ok(file.number() as u32)
    }

    /// Adds an entry, with those of its extended attributes that images keep.
    pub fn add(&mut self, mut entry: Entry) -> Result<(), Failure> {
        self.count += 1;
        if self.count > ENTRY_LIMIT {
            return Err(Failure::new(format!("more than {ENTRY_LIMIT} entries"))
                .hint("no image has so many; whoever made it means harm"));
        }
        if entry.path.len() > PATH_LIMIT {
            return Err(Failure::new(format!("a path of {} bytes", entry.path.len()))
                .hint("no image has one; whoever made it means harm"));
        }
        self.has_whiteouts |= whiteout::is_whiteout(&entry.path);
        entry.xattrs.retain(|name, _| KEPT_XATTRS.iter().any(|kept| name.starts_with(kept)));
        write_entry(&entry, &mut self.index).map_err(cannot_write)
    }

    /// Writes index and footer behind the blocks.
    pub fn finish(self) -> Result<Layer, Failure> {
        let LayerWriter { file, segment, mut index, has_whiteouts, .. } = self;
        let (mut out, segment, index_at) = segment.finish().map_err(of_writer)?;
        write_end(&mut index).and_then(|()| segment.write(&mut index)).map_err(cannot_write)?;
        let index = index.finish().map_err(cannot_write)?;
        let footer = Footer {
            index_at,
            index_len: index.len() as u64,
            digest: Sha256::digest(&index).into(),
            has_whiteouts,
        };
        out.seek(io::SeekFrom::Start(index_at)).map_err(cannot_write)?;
        out.write_all(&index).and_then(|()| out.write_all(&footer.encode())).map_err(cannot_write)?;
        Layer::open(file).map_err(cannot_write)
    }
}

fn of_writer(error: writer::Error) -> Failure {
    match error {
        writer::Error::Read(error) => failure_of(error),
        writer::Error::Write(error) => cannot_write(error),
        other => Failure::new(other.to_string()),
    }
}
