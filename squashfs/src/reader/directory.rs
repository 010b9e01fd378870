//! Directory listings: runs of entries behind headers, with an index into large ones.
//!
//! Run by: the user, in the launcher and in the FUSE server process.

use super::Image;
use super::bytes::{u16_at, u32_at};
use super::error::{Error, Result};
use super::inode::{Directory, Inode, Kind};
use super::metadata::{InodeRef, METADATA_LEN, MetadataReader, Place};

/// Linux has no longer file names. The format allows 256.
const NAME_MAX: usize = 255;
/// Entries behind one header at most.
const MAX_RUN: u32 = 256;

/// One name in a directory.
#[derive(Debug)]
pub struct Entry<'a> {
    /// The name: no `/`, no zero byte, not `.` or `..`.
    pub name: &'a [u8],
    /// Its inode.
    pub inode: InodeRef,
    /// Its inode number.
    pub number: u32,
    /// What the entry says of the inode's type.
    pub file_type: EntryType,
    /// Where `read_dir` continues behind this entry.
    pub next: u64,
}

/// The type of an inode as its directory entry tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // the names say it
pub enum EntryType {
    Directory,
    File,
    Symlink,
    BlockDevice,
    CharDevice,
    Fifo,
    Socket,
}

/// A listing that is being read.
pub struct Listing<'a> {
    image: &'a Image,
    directory: InodeRef,
    /// `None` for an empty directory, which has no place in the directory table.
    reader: Option<MetadataReader<'a>>,
    /// Bytes of the listing before the reader.
    at: u32,
    len: u32,
    run: Run,
    name: [u8; NAME_MAX],
}

/// A header and how many of its entries have been read.
#[derive(Default)]
struct Run {
    start: u32,
    inode_block: u32,
    number: u32,
    entries: u32,
    taken: u32,
}

impl Image {
    /// The inode of `name` in `directory`.
    pub fn lookup(&self, directory: &Inode, name: &[u8]) -> Result<Option<InodeRef>> {
        let Kind::Directory(place) = &directory.kind else { return Err(Error::NotADirectory) };
        let start = self.index_search(place, |_, first_name| first_name <= name)?;
        let mut listing = self.listing(directory.reference, place, start)?;
        while let Some(entry) = listing.next()? {
            if entry.name == name {
                return Ok(Some(entry.inode));
            }
        }
        Ok(None)
    }

    /// The entries of `directory`: all of them for `from` = 0, or those behind an entry with `next` = `from`.
    pub fn read_dir(&self, directory: &Inode, from: u64) -> Result<Listing<'_>> {
        let Kind::Directory(place) = &directory.kind else { return Err(Error::NotADirectory) };
        let (run_start, taken) = ((from >> 16) as u32, (from & 0xffff) as u32);
        let start = self.index_search(place, |offset, _| offset <= run_start)?;
        let mut listing = self.listing(directory.reference, place, start)?;
        while listing.at < run_start && listing.next()?.is_some() {}
        for _ in 0..taken {
            listing.next()?;
        }
        Ok(listing)
    }

    fn listing(&self, directory: InodeRef, place: &Directory, start: Start) -> Result<Listing<'_>> {
        let table = self.superblock.directory_table;
        let reader = match place.listing_len {
            0 => None,
            _ => {
                let at = Place::new(table, start.block.into(), start.offset)?;
                Some(MetadataReader::new(self, at, self.superblock.directory_end())?)
            }
        };
        let (at, len) = (start.listing_offset, place.listing_len);
        Ok(Listing { image: self, directory, reader, at, len, run: Run::default(), name: [0; NAME_MAX] })
    }

    /// The last place in the index that is `not_beyond` what is sought, or the listing's start. Index entries
    /// are sorted, one for each metadata block of the listing, with its first name.
    fn index_search(
        &self,
        place: &Directory,
        mut not_beyond: impl FnMut(u32, &[u8]) -> bool,
    ) -> Result<Start> {
        let mut best = Start { listing_offset: 0, block: place.block, offset: place.offset };
        let Some((entries, index)) = place.index else { return Ok(best) };
        let mut reader = self.inode_reader(index)?;
        let mut name = [0; NAME_MAX];
        for _ in 0..entries {
            let raw: [u8; 12] = reader.array()?;
            let name = name_buffer(&mut name, u32_at(&raw, 8)? as usize)?;
            reader.read(name)?;
            let listing_offset = u32_at(&raw, 0)?;
            if listing_offset >= place.listing_len {
                return Err(Error::Corrupt("a directory index points behind its listing"));
            }
            if !not_beyond(listing_offset, name) {
                break;
            }
            let offset = (u64::from(place.offset) + u64::from(listing_offset)) % METADATA_LEN as u64;
            best = Start { listing_offset, block: u32_at(&raw, 4)?, offset: offset as u16 };
        }
        Ok(best)
    }
}

/// A place in a listing where a header starts.
struct Start {
    listing_offset: u32,
    block: u32,
    offset: u16,
}

impl Listing<'_> {
    /// The next entry. Not an `Iterator`: the name stays in one buffer.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<Option<Entry<'_>>> {
        if self.run.taken == self.run.entries && !self.next_run()? {
            return Ok(None);
        }
        let raw: [u8; 8] = self.read()?;
        let len = usize::from(u16_at(&raw, 6)?);
        let name = name_buffer(&mut self.name, len)?;
        if let Some(reader) = &mut self.reader {
            reader.read(name)?;
        }
        check_name(name)?;
        self.at = advance(self.at, name.len(), self.len)?;
        let inode = InodeRef::new(self.run.inode_block, u16_at(&raw, 0)?);
        // No other loop can be told from a tree here; the kernel refuses them when it looks a name up
        // (ELOOP).
        if inode == self.directory || inode == self.image.superblock.root {
            return Err(Error::Corrupt("a directory contains itself"));
        }
        self.run.taken += 1;
        let run_ends = self.run.taken == self.run.entries;
        let next = if run_ends { (self.at, 0) } else { (self.run.start, self.run.taken) };
        Ok(Some(Entry {
            name,
            inode,
            number: self.run.number.wrapping_add_signed(i32::from(u16_at(&raw, 2)? as i16)),
            file_type: EntryType::from_raw(u16_at(&raw, 4)?)?,
            next: u64::from(next.0) << 16 | u64::from(next.1),
        }))
    }

    /// Reads the next header, if there is one.
    fn next_run(&mut self) -> Result<bool> {
        if self.at >= self.len {
            return Ok(false);
        }
        let start = self.at;
        let raw: [u8; 12] = self.read()?;
        let entries = u32_at(&raw, 0)?.saturating_add(1);
        if entries > MAX_RUN {
            return Err(Error::Corrupt("a directory header with too many entries"));
        }
        self.run = Run { start, inode_block: u32_at(&raw, 4)?, number: u32_at(&raw, 8)?, entries, taken: 0 };
        Ok(true)
    }

    fn read<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.at = advance(self.at, N, self.len)?;
        self.reader.as_mut().ok_or(Error::Corrupt("an empty directory with entries"))?.array()
    }
}

fn advance(at: u32, by: usize, len: u32) -> Result<u32> {
    let at = u32::try_from(by).ok().and_then(|by| at.checked_add(by));
    at.filter(|at| *at <= len).ok_or(Error::Corrupt("a directory entry reaches behind its listing"))
}

/// The part of `buffer` for a name; the image stores a name's length less one.
fn name_buffer(buffer: &mut [u8; NAME_MAX], stored_len: usize) -> Result<&mut [u8]> {
    buffer.get_mut(..stored_len.saturating_add(1)).ok_or(Error::Corrupt("a file name longer than 255 bytes"))
}

fn check_name(name: &[u8]) -> Result<()> {
    if name == b"." || name == b".." || name.contains(&b'/') || name.contains(&0) {
        return Err(Error::Corrupt("a file name that is no name (., .., or with / or a zero byte)"));
    }
    Ok(())
}

impl EntryType {
    fn from_raw(raw: u16) -> Result<EntryType> {
        Ok(match raw {
            1 => EntryType::Directory,
            2 => EntryType::File,
            3 => EntryType::Symlink,
            4 => EntryType::BlockDevice,
            5 => EntryType::CharDevice,
            6 => EntryType::Fifo,
            7 => EntryType::Socket,
            _ => return Err(Error::Corrupt("a directory entry of unknown type")),
        })
    }
}
