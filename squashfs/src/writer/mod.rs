//! A writer of squashfs 4.0 images, in two stages.
//!
//! First the contents of all files ([`Writer::add_file`]), as streams and in any order that the caller can repeat:
//! they are compressed by a pool of threads and written in that order. Then the [`Tree`], which is built in memory
//! and may use each content any number of times ([`Writer::finish`]). So nothing has to be unpacked, and a tree may
//! still change while contents come in.
//!
//! Contents may also be compressed before, as a [`Segment`] of which an image takes what it needs.
//!
//! The same contents and the same tree give the same bytes: neither the number of threads nor the time nor a hash
//! map's order shows. Memory is bounded by some blocks per thread and a small record per file.
//!
//! Run by: the user, in the importer.

#![forbid(unsafe_code)]

mod codec;
mod data;
mod directory;
mod error;
mod inode;
mod metadata;
mod output;
mod pool;
mod segment;
mod superblock;
mod tables;
mod tree;
mod xattr;

use std::io::{Read, Seek};
use std::num::NonZeroUsize;
use std::sync::Arc;

use codec::Encoder;
use data::DataStage;
use metadata::{plain_block, write_indexed};
use output::PositionedOutput;
use pool::Pool;
use superblock::{Positions, SUPERBLOCK_LEN};

pub use codec::Compression;
pub use data::{FileData, Tail};
pub use error::{Error, Result};
pub use output::Output;
pub use segment::{Segment, SegmentWriter};
pub use tree::{Attributes, Content, Device, NodeId, Tree};

/// The length of an image is a multiple of this, as mksquashfs makes it: loop devices need it.
const PADDING: u64 = 4096;
const MIN_BLOCK_SIZE: u32 = 4 << 10;
const MAX_BLOCK_SIZE: u32 = 1 << 20;

/// How an image is written.
#[derive(Debug, Clone)]
pub struct Options {
    /// The compressor of all blocks.
    pub compression: Compression,
    /// Size of a full data block; a power of two from 4 KiB to 1 MiB.
    pub block_size: u32,
    /// How many threads compress; the image does not depend on it.
    pub threads: NonZeroUsize,
    /// The image's time of creation, in seconds since 1970.
    pub mkfs_time: u32,
}

impl Default for Options {
    /// zstd 3, 128 KiB, all processors, 1970.
    fn default() -> Options {
        Options {
            compression: Compression::Zstd { level: 3 },
            block_size: 128 << 10,
            threads: std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
            mkfs_time: 0,
        }
    }
}

impl Options {
    fn check(&self) -> Result<()> {
        let size = self.block_size;
        if !size.is_power_of_two() || !(MIN_BLOCK_SIZE..=MAX_BLOCK_SIZE).contains(&size) {
            return Err(Error::BlockSize(size));
        }
        self.compression.check()
    }
}

/// The contents of one file, valid for the writer that they were given to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileId(usize);

impl FileId {
    /// The contents with this number, in the order in which they were added; also a number that stands in a [`Tree`]
    /// until it is known which contents it will be ([`Tree::replace_files`]).
    pub fn new(number: usize) -> FileId {
        FileId(number)
    }

    /// The number.
    pub fn number(self) -> usize {
        self.0
    }
}

/// Threads that compress, for any number of images and segments at once. What is under way is bounded for all of them
/// together.
#[derive(Clone)]
pub struct Compressors {
    options: Options,
    pool: Arc<Pool>,
}

impl Compressors {
    /// Starts the threads.
    pub fn new(options: Options) -> Result<Compressors> {
        options.check()?;
        let pool = Arc::new(Pool::new(options.threads, options.compression, options.block_size)?);
        Ok(Compressors { options, pool })
    }

    /// How they compress.
    pub fn options(&self) -> &Options {
        &self.options
    }

    fn stage<W: Output>(&self, out: PositionedOutput<W>) -> DataStage<W> {
        DataStage::new(out, self.options.block_size, Arc::clone(&self.pool))
    }
}

/// An image that is being written.
pub struct Writer<W: Output> {
    options: Options,
    data: DataStage<W>,
}

impl<W: Output> Writer<W> {
    /// Starts an image at the start of `out`.
    pub fn new(out: W, options: Options) -> Result<Writer<W>> {
        Writer::with(out, &Compressors::new(options)?)
    }

    /// The same with threads that others use too.
    pub fn with(out: W, compressors: &Compressors) -> Result<Writer<W>> {
        let options = compressors.options.clone();
        let mut out = PositionedOutput::new(out);
        // The superblock is known last. Until then zeros stand for it, so that half an image is not taken for one.
        out.write(&[0; SUPERBLOCK_LEN])?;
        if let Some(bytes) = options.compression.options() {
            out.write(&plain_block(&bytes))?;
        }
        Ok(Writer { options, data: compressors.stage(out) })
    }

    /// Reads the contents of one file to their end. After [`Error::Read`] nothing of them is kept, and the writer
    /// can go on; after other errors it cannot.
    ///
    /// Contents that no entry of the tree uses stay in the image; they only take space.
    pub fn add_file(&mut self, mut contents: impl Read) -> Result<FileId> {
        self.data.add_file(&mut contents)
    }

    /// Takes those contents of a segment that are `wanted`, without compressing them again; `source` is what the
    /// segment was written to. Returns what each is in this image, in the order of the segment.
    ///
    /// A fragment block is copied whole if any file with its end there is wanted. Everything that is copied is compared with
    /// its digest: [`Error::Damaged`].
    pub fn add_segment(
        &mut self,
        segment: Segment,
        source: &mut (impl Read + Seek),
        wanted: impl FnMut(FileId) -> bool,
    ) -> Result<Vec<Option<FileId>>> {
        self.data.add_segment(segment, &self.options, source, wanted)
    }

    /// Where contents are in the image. Waits until all that was added is written: meant for the end of the stage.
    pub fn file_data(&mut self, file: FileId) -> Result<&FileData> {
        self.data.write_queue()?;
        self.data.files.get(file.0).ok_or(Error::Unknown { what: "a file" })
    }

    /// Writes the tree with all tables, and gives the output back. It is not synced.
    pub fn finish(self, tree: &Tree) -> Result<W> {
        let Writer { options, mut data } = self;
        data.finish()?;
        let mut encoder = Encoder::new(options.compression, options.block_size)?;
        let tables = tables::build(tree, &data.files, &mut encoder)?;
        let fragments = tables.fragments.keys().filter_map(|number| data.fragments.get(*number as usize));
        let fragments: Vec<u8> = fragments.flat_map(|fragment| fragment.encode()).collect();
        let ids: Vec<u8> = tables.ids.ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let no_head = |_: &mut PositionedOutput<W>| Ok(());

        let out = &mut data.out;
        // The one order that the kernel accepts.
        let inode_table = out.position();
        tables.inodes.finish(out, &mut encoder)?;
        let directory_table = out.position();
        tables.directories.finish(out, &mut encoder)?;
        let fragment_table = write_indexed(&fragments, no_head, out, &mut encoder)?;
        let id_table = write_indexed(&ids, no_head, out, &mut encoder)?;
        let xattr_table = tables.xattrs.finish(out, &mut encoder)?;
        let bytes_used = out.position();
        let padding = bytes_used.next_multiple_of(PADDING) - bytes_used;
        out.write(&vec![0; padding as usize])?;
        let len = out.position();

        let positions =
            Positions { inode_table, directory_table, fragment_table, id_table, xattr_table, bytes_used };
        out.seek(0)?;
        out.write(&superblock::encode(
            &options,
            &positions,
            superblock::Counts {
                inodes: tables.inode_count,
                // Both are checked where they are counted.
                fragments: tables.fragments.len() as u32,
                ids: tables.ids.ids.len() as u16,
            },
            tables.root,
        ))?;
        // A duplicate at the end may have been longer than all tables.
        data.into_output(len)
    }
}
