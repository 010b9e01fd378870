//! Segments: contents that are compressed before it is known which of them an image will have, such as the layers of
//! a container image. An image then takes the blocks of those that it has, as they are.
//!
//! A segment may lie on a disk for months before that, so all that is taken is compared with its digest.
//!
//! Run by: the user, in the importer.

use std::collections::HashMap;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::sync::Arc;

use super::codec::Compression;
use super::data::{DataStage, FileData, Fragment, STORED_LEN, Tail};
use super::error::{Error, Result};
use super::output::{Output, PositionedOutput};
use super::{Compressors, FileId, Options};

/// So many contents are believed to be there before they are read.
const RESERVED: u64 = 1 << 20;
/// In the place of a fragment's number: none.
const NO_TAIL: u32 = u32::MAX;

/// What is in a segment, and where. The blocks are in the output that it was written to.
#[derive(Debug, Clone)]
pub struct Segment {
    compression: Compression,
    block_size: u32,
    files: Vec<FileData>,
    fragments: Vec<Fragment>,
}

/// A segment that is being written.
pub struct SegmentWriter<W: Output> {
    options: Options,
    data: DataStage<W>,
}

impl<W: Output> SegmentWriter<W> {
    /// Starts a segment at the start of `out`, for images with the same compressor and block size.
    pub fn new(out: W, compressors: &Compressors) -> SegmentWriter<W> {
        let data = compressors.stage(PositionedOutput::new(out));
        SegmentWriter { options: compressors.options().clone(), data }
    }

    /// As [`super::Writer::add_file`]; the contents are valid for this segment.
    pub fn add_file(&mut self, mut contents: impl Read) -> Result<FileId> {
        self.data.add_file(&mut contents)
    }

    /// Ends the segment; also tells its length. The output is not synced.
    pub fn finish(self) -> Result<(W, Segment, u64)> {
        let SegmentWriter { options, mut data } = self;
        data.finish()?;
        let len = data.out.position();
        let Options { compression, block_size, .. } = options;
        let files = std::mem::take(&mut data.files);
        let fragments = std::mem::take(&mut data.fragments);
        let segment = Segment { compression, block_size, files, fragments };
        Ok((data.into_output(len)?, segment, len))
    }
}

impl Segment {
    /// How many contents there are.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Writes it, without the blocks.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(&(self.fragments.len() as u64).to_le_bytes())?;
        for Fragment { start, size, digest } in &self.fragments {
            out.write_all(&start.to_le_bytes())?;
            out.write_all(&size.to_le_bytes())?;
            out.write_all(digest)?;
        }
        out.write_all(&(self.files.len() as u64).to_le_bytes())?;
        for file in &self.files {
            let tail = file.tail.unwrap_or(Tail { fragment: NO_TAIL, offset: 0 });
            for number in [file.size, file.sparse, file.start] {
                out.write_all(&number.to_le_bytes())?;
            }
            out.write_all(&tail.fragment.to_le_bytes())?;
            out.write_all(&tail.offset.to_le_bytes())?;
            out.write_all(&(file.blocks.len() as u64).to_le_bytes())?;
            if !file.blocks.is_empty() {
                out.write_all(file.run.as_deref().unwrap_or(&[0; 32]))?;
            }
            file.blocks.iter().try_for_each(|size| out.write_all(&size.to_le_bytes()))?;
        }
        Ok(())
    }

    /// Reads what [`Segment::write`] wrote, for images with this compressor and block size. The caller knows that the bytes
    /// are the same; memory does not depend on numbers in them.
    pub fn read(source: &mut impl Read, options: &Options) -> io::Result<Segment> {
        let mut fragments = Vec::new();
        for _ in 0..read_u64(source)? {
            let (start, size) = (read_u64(source)?, read_u32(source)?);
            fragments.push(Fragment { start, size, digest: read_bytes(source)? });
        }
        let mut files = Vec::new();
        let count = read_u64(source)?;
        // As many as the digest of the index stands for, and no more than would be believed without.
        files.reserve_exact(count.min(RESERVED) as usize);
        for _ in 0..count {
            let (size, sparse, start) = (read_u64(source)?, read_u64(source)?, read_u64(source)?);
            let (fragment, offset) = (read_u32(source)?, read_u32(source)?);
            let count = read_u64(source)?;
            let run = if count > 0 { Some(Box::new(read_bytes(source)?)) } else { None };
            let blocks = (0..count).map(|_| read_u32(source)).collect::<io::Result<Vec<u32>>>()?;
            let tail = (fragment != NO_TAIL).then_some(Tail { fragment, offset });
            let blocks = if blocks.is_empty() { Arc::default() } else { blocks.into() };
            files.push(FileData { size, sparse, start, blocks, tail, run });
        }
        Ok(Segment { compression: options.compression, block_size: options.block_size, files, fragments })
    }
}

fn read_bytes<const N: usize>(source: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    source.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn read_u32(source: &mut impl Read) -> io::Result<u32> {
    read_bytes(source).map(u32::from_le_bytes)
}

fn read_u64(source: &mut impl Read) -> io::Result<u64> {
    read_bytes(source).map(u64::from_le_bytes)
}

impl<W: Output> DataStage<W> {
    /// Takes those contents of a segment that are `wanted`, in their order.
    pub fn add_segment(
        &mut self,
        segment: Segment,
        options: &Options,
        source: &mut (impl Read + Seek),
        mut wanted: impl FnMut(FileId) -> bool,
    ) -> Result<Vec<Option<FileId>>> {
        if segment.compression != options.compression || segment.block_size != options.block_size {
            return Err(Error::Segment);
        }
        // Fragment blocks are numbered in the order in which they are written.
        self.finish()?;
        let Segment { files: mut taken, fragments: known, .. } = segment;
        let first = self.files.len();
        let mut next = first..;
        let ids: Vec<Option<FileId>> = (0..taken.len())
            .map(|number| if wanted(FileId(number)) { next.next().map(FileId) } else { None })
            .collect();
        // There may be a million of them, so none is there twice.
        let mut is_taken = ids.iter().map(Option::is_some);
        taken.retain(|_| is_taken.next().unwrap_or(false));
        if self.files.is_empty() {
            self.files = taken;
        } else {
            self.files.append(&mut taken);
        }
        let mut fragments = HashMap::new();
        for number in first..self.files.len() {
            self.take_tail(number, &known, &mut fragments, source)?;
            let Some(file) = self.files.get(number).filter(|file| !file.blocks.is_empty()) else { continue };
            let mut position = file.start;
            self.add_stored_blocks(FileId(number), |size, buffer| {
                let block = read_block(position, size, source, buffer);
                position = position.saturating_add(u64::from(size & STORED_LEN));
                block
            })?;
        }
        self.write_queue()?;
        Ok(ids)
    }

    /// Takes the fragment block with the tail of a file, unless `taken` has its new number already.
    fn take_tail(
        &mut self,
        number: usize,
        known: &[Fragment],
        taken: &mut HashMap<u32, u32>,
        source: &mut (impl Read + Seek),
    ) -> Result<()> {
        let Some(Tail { fragment, offset }) = self.files.get(number).and_then(|file| file.tail) else {
            return Ok(());
        };
        let fragment = match taken.get(&fragment) {
            Some(there) => *there,
            None => {
                let from = usize::try_from(fragment).ok().and_then(|fragment| known.get(fragment));
                let from = from.ok_or(Error::Damaged)?;
                let block = read_block(from.start, from.size, source, self.buffer())?;
                let there = self.add_stored_fragment(block, from)?;
                taken.insert(fragment, there);
                there
            }
        };
        if let Some(file) = self.files.get_mut(number) {
            file.tail = Some(Tail { fragment, offset });
        }
        Ok(())
    }
}

/// Fills an empty buffer with a block of this size, as it is stored.
fn read_block(
    position: u64,
    size: u32,
    source: &mut (impl Read + Seek),
    mut buffer: Vec<u8>,
) -> Result<Vec<u8>> {
    buffer.resize((size & STORED_LEN) as usize, 0);
    let read = source.seek(SeekFrom::Start(position)).and_then(|_| source.read_exact(&mut buffer));
    match read {
        Ok(()) => Ok(buffer),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(Error::Damaged),
        Err(error) => Err(Error::Read(error)),
    }
}
