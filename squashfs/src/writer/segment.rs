//! Segments: contents that are compressed before it is known which of them an image will have, such as the layers of
//! a container image. An image then takes the blocks of those that it has, as they are.
//!
//! Run by: the user, in the importer.

use std::collections::HashMap;
use std::io::{Read, Seek, SeekFrom};

use super::codec::Compression;
use super::data::{DataStage, FileData, Fragment, STORED_LEN};
use super::error::{Error, Result};
use super::output::{Output, PositionedOutput};
use super::{FileId, Options};

const COPY_LEN: usize = 256 << 10;

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
    pub fn new(out: W, options: Options) -> Result<SegmentWriter<W>> {
        options.check()?;
        let data = DataStage::new(PositionedOutput::new(out), &options)?;
        Ok(SegmentWriter { options, data })
    }

    /// As [`super::Writer::add_file`]; the contents are valid for this segment.
    pub fn add_file(&mut self, mut contents: impl Read) -> Result<FileId> {
        self.data.add_file(&mut contents)
    }

    /// Ends the segment. The output is not synced.
    pub fn finish(self) -> Result<(W, Segment)> {
        let SegmentWriter { options, mut data } = self;
        data.finish()?;
        let len = data.out.position();
        let Options { compression, block_size, .. } = options;
        let segment = Segment { compression, block_size, files: data.files, fragments: data.fragments };
        Ok((data.out.finish(len)?, segment))
    }
}

impl<W: Output> DataStage<W> {
    /// Takes those contents of a segment that are `wanted`, in their order.
    pub fn add_segment(
        &mut self,
        segment: &Segment,
        options: &Options,
        source: &mut (impl Read + Seek),
        mut wanted: impl FnMut(FileId) -> bool,
    ) -> Result<Vec<Option<FileId>>> {
        if segment.compression != options.compression || segment.block_size != options.block_size {
            return Err(Error::Segment);
        }
        // Fragment blocks are numbered in the order in which they are written.
        self.finish()?;
        let mut fragments = HashMap::new();
        let mut ids = Vec::with_capacity(segment.files.len());
        for (number, file) in segment.files.iter().enumerate() {
            if !wanted(FileId(number)) {
                ids.push(None);
                continue;
            }
            let mut file = file.clone();
            if let Some(tail) = &mut file.tail {
                tail.fragment = match fragments.get(&tail.fragment) {
                    Some(copied) => *copied,
                    None => {
                        let from = usize::try_from(tail.fragment).ok();
                        let from = from.and_then(|number| segment.fragments.get(number));
                        let copied = self.copy_fragment(*from.ok_or(Error::Segment)?, source)?;
                        fragments.insert(tail.fragment, copied);
                        copied
                    }
                };
            }
            if !file.blocks.is_empty() {
                self.copy_run(&mut file, source)?;
            }
            ids.push(Some(FileId(self.files.len())));
            self.files.push(file);
        }
        Ok(ids)
    }

    fn copy_fragment(&mut self, from: Fragment, source: &mut (impl Read + Seek)) -> Result<u32> {
        let start = self.out.position();
        self.copy(from.start, (from.size & STORED_LEN).into(), source)?;
        self.add_fragment(Fragment { start, size: from.size })
    }

    /// Copies the blocks of a file, unless there are equal ones.
    fn copy_run(&mut self, file: &mut FileData, source: &mut (impl Read + Seek)) -> Result<()> {
        if let Some(known) = self.known_run(file) {
            file.start = known;
            return Ok(());
        }
        let len = file.blocks.iter().map(|size| u64::from(size & STORED_LEN)).sum();
        let start = self.out.position();
        self.copy(file.start, len, source)?;
        file.start = if len == 0 { 0 } else { start };
        self.remember_run(file);
        Ok(())
    }

    fn copy(&mut self, from: u64, mut len: u64, source: &mut (impl Read + Seek)) -> Result<()> {
        source.seek(SeekFrom::Start(from)).map_err(Error::Read)?;
        let mut buffer = vec![0; COPY_LEN.min(usize::try_from(len).unwrap_or(COPY_LEN))];
        while len > 0 {
            let step = len.min(buffer.len() as u64);
            let part = buffer.get_mut(..step as usize).ok_or(Error::Segment)?;
            source.read_exact(part).map_err(Error::Read)?;
            self.out.write(part)?;
            len -= step;
        }
        Ok(())
    }
}
