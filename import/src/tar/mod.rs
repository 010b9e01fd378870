//! A reader of tar archives that trusts nothing: v7, ustar, PAX, star and GNU, with long names, large numbers, sparse files
//! and extended attributes. It reads a stream once, from its start to its end, and needs little memory whatever the archive
//! says: at most [`MAX_EXTENDED_LEN`] for the names and records of an entry, and a bounded map of a sparse file.
//!
//! Where programs differ it does what Go's `archive/tar` does: most images are written and unpacked with that. So a long
//! name wins over a PAX path, a PAX header replaces an earlier one for the same entry, global PAX headers change nothing, an
//! empty value of a PAX record is no value, and anything after two blocks of zeros is no part of the archive.
//!
//! Run by: the user, in the importer.

mod content;
mod error;
pub(crate) mod header;
mod pax;
mod sparse;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io::{self, Read, Seek};

use content::Content;
use header::{BLOCK_LEN, Block, Format, Header};
use pax::Records;
use sparse::Form;
use stream::Stream;

pub use error::{Problem, Result, TarError};

/// How many bytes the long names and PAX records of one entry may have together; Go has the same limit for each.
pub const MAX_EXTENDED_LEN: u64 = 1 << 20;

/// What an archive says of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The name, as it is stored: anything without a zero byte, also nothing, `/` or `../..`.
    pub path: Vec<u8>,
    /// What it is.
    pub kind: EntryKind,
    /// Permission bits, at most 0o7777.
    pub mode: u16,
    /// The owner; larger than 32 bits only by an error of the writer.
    pub uid: u64,
    /// The group; larger than 32 bits only by an error of the writer.
    pub gid: u64,
    /// Seconds since 1970, rounded down.
    pub mtime: i64,
    /// How long the content is, with its holes. The archive may have next to nothing of it: see `stored_size`.
    pub size: u64,
    /// How many bytes of the content are in the archive: fewer than `size` if it has holes.
    pub stored_size: u64,
    /// Where the stored content begins, counted from where the archive was opened.
    pub position: u64,
    /// Whether the content has holes, and is not simply the stored bytes.
    pub is_sparse: bool,
    /// Extended attributes, none of them empty.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// The type of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // of the fields, whose names say it
pub enum EntryKind {
    /// A file with content.
    File,
    /// Another name for the file with this name.
    HardLink(Vec<u8>),
    /// A symbolic link to this.
    Symlink(Vec<u8>),
    /// A directory.
    Directory,
    /// A character device.
    CharDevice { major: u32, minor: u32 },
    /// A block device.
    BlockDevice { major: u32, minor: u32 },
    /// A named pipe.
    Fifo,
}

/// An archive that is being read.
///
/// Headers are read in pieces of 512 bytes: the reader should have a buffer.
pub struct Archive<R> {
    stream: Stream<R>,
    state: State,
    content: Content,
    /// Of the current entry, for messages.
    name: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Reading,
    Ended,
    Failed,
}

/// What stands in front of a header and belongs to it.
#[derive(Default)]
struct Extended {
    records: Records,
    name: Vec<u8>,
    link: Vec<u8>,
    /// Bytes of all of it.
    len: u64,
    is_any: bool,
}

impl<R: Read> Archive<R> {
    /// An archive that starts where the reader is.
    pub fn new(reader: R) -> Archive<R> {
        Archive::with(Stream::new(reader))
    }

    /// The same for what is a file: content that nobody reads is skipped without reading it. Do not put a buffer between: it
    /// would be thrown away at each skip.
    pub fn seekable(reader: R) -> Archive<R>
    where
        R: Seek,
    {
        Archive::with(Stream::seekable(reader))
    }

    fn with(stream: Stream<R>) -> Archive<R> {
        Archive { stream, state: State::Reading, content: Content::default(), name: Vec::new() }
    }

    /// The next entry, or none at the end of the archive. Content of the last one that was not read is skipped.
    ///
    /// After an error there is no next entry.
    pub fn next_entry(&mut self) -> Result<Option<Entry>> {
        match self.state {
            State::Reading => {}
            State::Ended => return Ok(None),
            State::Failed => return Err(TarError::AfterError),
        }
        let entry = self.advance();
        match &entry {
            Ok(Some(entry)) => self.name.clone_from(&entry.path),
            Ok(None) => self.state = State::Ended,
            Err(_) => self.state = State::Failed,
        }
        entry
    }

    /// The content of the current entry, from where it was left; the holes of a sparse file are zeros.
    ///
    /// What is not a file has none.
    pub fn contents(&mut self) -> Contents<'_, R> {
        Contents { archive: self }
    }

    /// Reads what is left behind the last entry, which means nothing, to its end: so that a digest can be compared that is
    /// made of all bytes. Returns how many there were.
    pub fn drain(&mut self) -> io::Result<u64> {
        if self.state == State::Reading {
            self.state = State::Ended;
        }
        self.stream.drain()
    }

    /// How many bytes of the reader belong to what was read so far.
    pub fn position(&self) -> u64 {
        self.stream.position()
    }

    /// Gives the reader back.
    pub fn into_inner(self) -> R {
        self.stream.into_inner()
    }

    fn advance(&mut self) -> Result<Option<Entry>> {
        let mut extended = Extended::default();
        loop {
            let content = std::mem::take(&mut self.content);
            content.skip(&mut self.stream, &self.name)?;
            let position = self.stream.position();
            let at = |problem| TarError::Header { position, problem };
            let block = match self.stream.next_header()? {
                Some(block) => block,
                // An archive may end without blocks of zeros, but not between the parts of an entry.
                None if extended.is_any && self.stream.is_at_end() => {
                    return Err(TarError::CutHeader { position });
                }
                None => return Ok(None),
            };
            let header = Header::parse(&block).map_err(at)?;
            match header.flag {
                b'x' => {
                    let bytes = self.read_special(&header, position, &mut extended)?;
                    extended.records = Records::parse(&bytes).map_err(at)?;
                }
                b'g' => {
                    // Only looked at. Go gives it to its caller, and every caller ignores it.
                    let bytes = self.read_special(&header, position, &mut Extended::default())?;
                    Records::parse(&bytes).map_err(at)?;
                }
                b'L' => {
                    let bytes = self.read_special(&header, position, &mut extended)?;
                    extended.name = header::text(&bytes).to_vec();
                }
                b'K' => {
                    let bytes = self.read_special(&header, position, &mut extended)?;
                    extended.link = header::text(&bytes).to_vec();
                }
                // The name of the archive.
                b'V' => {
                    self.content = Content::new(size(header.size).map_err(at)?);
                    extended = Extended::default();
                }
                _ => return self.entry(header, &block, position, extended).map(Some),
            }
        }
    }

    /// The content of a header that describes the next one.
    fn read_special(&mut self, header: &Header, position: u64, extended: &mut Extended) -> Result<Vec<u8>> {
        let at = |problem| TarError::Header { position, problem };
        let len = size(header.size).map_err(at)?;
        extended.is_any = true;
        extended.len = extended.len.saturating_add(len);
        if extended.len > MAX_EXTENDED_LEN {
            return Err(at(Problem::TooLong));
        }
        self.content = Content::new(len);
        let mut bytes = Vec::with_capacity(len as usize);
        while bytes.len() < len as usize {
            let block = self.stream.read_block()?.ok_or(TarError::CutHeader { position })?;
            let part = BLOCK_LEN.min(len as usize - bytes.len());
            bytes.extend_from_slice(&block[..part]);
        }
        self.content = Content::default();
        Ok(bytes)
    }

    fn entry(&mut self, header: Header, block: &Block, position: u64, extended: Extended) -> Result<Entry> {
        let at = |problem| TarError::Header { position, problem };
        let Extended { mut records, name, link, .. } = extended;
        let mut entry = description(&header, &mut records, name, link).map_err(at)?;
        self.name.clone_from(&entry.path);
        let has_content = entry.kind == EntryKind::File;
        self.content = Content::new(if has_content { entry.size } else { 0 });
        let regions = if header.flag == b'S' {
            if header.format != Format::Gnu {
                return Err(at(Problem::Type { flag: header.flag, name: entry.path }));
            }
            entry.size = sparse::real_size(block).and_then(size).map_err(at)?;
            let stream = &mut self.stream;
            let next = || stream.read_block()?.ok_or(Stop::Error(TarError::CutHeader { position }));
            Some(sparse::map_of_header(block, next).map_err(|stop| stop.at(position))?)
        } else {
            self.map_of_records(&mut entry, &records, position)?
        };
        if let Some(regions) = regions {
            if !has_content {
                return Err(at(Problem::Map("although it is not a file")));
            }
            sparse::check(&regions, entry.size).map_err(at)?;
            entry.is_sparse = true;
            self.content.make_sparse(regions, entry.size);
        }
        if !has_content {
            entry.size = 0;
        }
        entry.stored_size = self.content.stored();
        entry.position = self.stream.position();
        Ok(entry)
    }

    /// The map that PAX records have or tell of, and what else they say of a sparse file.
    fn map_of_records(
        &mut self,
        entry: &mut Entry,
        records: &Records,
        position: u64,
    ) -> Result<Option<Vec<sparse::Region>>> {
        let at = |problem| TarError::Header { position, problem };
        let form = sparse::form(records);
        if form == Form::None {
            return Ok(None);
        }
        if let Some(name) = records.get("GNU.sparse.name") {
            entry.path = name.to_vec();
        }
        let real_size = match records.number("GNU.sparse.size", "size").map_err(at)? {
            None => records.number("GNU.sparse.realsize", "size").map_err(at)?,
            size => size,
        };
        if let Some(real_size) = real_size {
            entry.size = size(real_size).map_err(at)?;
        }
        if form == Form::InRecords {
            return sparse::map_of_records(records).map(Some).map_err(at);
        }
        let (content, stream, name) = (&mut self.content, &mut self.stream, &self.name);
        let next = || content.next_block(stream, name).map_err(Stop::Error);
        sparse::map_of_content(next).map(Some).map_err(|stop| stop.at(position))
    }
}

/// Why a map could not be read: because of what it says, or because there is no more of it.
enum Stop {
    Problem(Problem),
    Error(TarError),
}

impl Stop {
    fn at(self, position: u64) -> TarError {
        match self {
            Stop::Problem(problem) => TarError::Header { position, problem },
            Stop::Error(error) => error,
        }
    }
}

impl From<Problem> for Stop {
    fn from(problem: Problem) -> Stop {
        Stop::Problem(problem)
    }
}

impl From<TarError> for Stop {
    fn from(error: TarError) -> Stop {
        Stop::Error(error)
    }
}

/// What header, records and long names say together. The size is that of the stored content.
fn description(
    header: &Header,
    records: &mut Records,
    long_name: Vec<u8>,
    long_link: Vec<u8>,
) -> std::result::Result<Entry, Problem> {
    let choose = |long: Vec<u8>, key, short: &[u8]| match records.get(key) {
        _ if !long.is_empty() => long,
        Some(value) => value.to_vec(),
        None => short.to_vec(),
    };
    let path = choose(long_name, "path", &header.name);
    let link = choose(long_link, "linkpath", &header.link);
    let device = |key, value| {
        let value = records.number(key, "device")?.unwrap_or(value);
        u32::try_from(value).map_err(|_| Problem::Number { field: "device" })
    };
    let devices = || Ok((device("SCHILY.devmajor", header.major)?, device("SCHILY.devminor", header.minor)?));
    let kind = match header.flag {
        // Before there was a type for directories.
        0 if path.ends_with(b"/") => EntryKind::Directory,
        // '7' was for files that should be contiguous on the disk.
        0 | b'0' | b'7' | b'S' => EntryKind::File,
        b'1' => EntryKind::HardLink(link),
        b'2' => EntryKind::Symlink(link),
        b'3' => devices().map(|(major, minor)| EntryKind::CharDevice { major, minor })?,
        b'4' => devices().map(|(major, minor)| EntryKind::BlockDevice { major, minor })?,
        b'5' => EntryKind::Directory,
        b'6' => EntryKind::Fifo,
        flag => return Err(Problem::Type { flag, name: path }),
    };
    let has_content = kind == EntryKind::File;
    let stored = records.number("size", "size")?.unwrap_or(header.size);
    Ok(Entry {
        path,
        kind,
        mode: header.mode,
        uid: id(records.number("uid", "owner")?.unwrap_or(header.uid), "owner")?,
        gid: id(records.number("gid", "group")?.unwrap_or(header.gid), "group")?,
        mtime: records.mtime()?.unwrap_or(header.mtime),
        // Whatever links and directories say, Go finds no content behind them.
        size: if has_content { size(stored)? } else { 0 },
        stored_size: 0,
        position: 0,
        is_sparse: false,
        xattrs: std::mem::take(&mut records.xattrs),
    })
}

fn size(value: i64) -> std::result::Result<u64, Problem> {
    u64::try_from(value).map_err(|_| Problem::Number { field: "size" })
}

/// Some systems have users below 0 and store them so; Linux knows them as the last of 32 bits.
fn id(value: i64, field: &'static str) -> std::result::Result<u64, Problem> {
    match (u64::try_from(value), i32::try_from(value)) {
        (Ok(id), _) => Ok(id),
        (_, Ok(id)) => Ok(u64::from(id as u32)),
        _ => Err(Problem::Number { field }),
    }
}

/// The content of one entry.
pub struct Contents<'a, R> {
    archive: &'a mut Archive<R>,
}

impl<R: Read> Read for Contents<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Archive { stream, content, name, state } = &mut *self.archive;
        match state {
            State::Failed => return Err(TarError::AfterError.into()),
            State::Ended => return Ok(0),
            State::Reading => {}
        }
        content.read(stream, name, buffer).map_err(|error| {
            *state = State::Failed;
            error.into()
        })
    }
}

/// Reads an archive to its end, or as much of the contents as `limit`: for fuzzers. Returns whether it is one.
pub fn read_all(reader: impl Read, limit: u64) -> bool {
    let mut archive = Archive::new(reader);
    let mut left = limit;
    loop {
        match archive.next_entry() {
            Ok(Some(_)) => match io::copy(&mut archive.contents().take(left), &mut io::sink()) {
                Ok(len) => left -= len,
                Err(_) => return false,
            },
            Ok(None) => return archive.drain().is_ok(),
            Err(_) => return false,
        }
    }
}
