//! Tar archives: a [`Writer`], and a reader ([`Archive`]).
//!
//! The reader trusts nothing. It knows v7, ustar, PAX, star and GNU, with long names, large numbers, sparse files
//! and extended attributes. It reads a stream once, from its start to its end, and needs little memory whatever the archive
//! says: at most [`MAX_EXTENDED_LEN`] for the names and records of an entry, and a bounded map of a sparse file.
//!
//! Where programs differ it does what Go's `archive/tar` does: most images are written and unpacked with that. So a long
//! name wins over a PAX path, a PAX header replaces an earlier one for the same entry, global PAX headers change nothing, an
//! empty value of a PAX record is no value, and anything after two blocks of zeros is no part of the archive.
//!
//! Run by: the user, in the importer.

mod content;
mod entry;
mod error;
pub(crate) mod header;
mod pax;
mod sparse;
mod stream;
#[cfg(test)]
mod tests;
mod writer;

use std::io::{self, Read, Seek};

use content::Content;
use entry::{describe, size};
use header::{BLOCK_LEN, Block, Format, Header};
use pax::Records;
use sparse::Form;
use stream::Stream;

pub use entry::{Entry, EntryKind};
pub use error::{Problem, Result, TarError};
pub use writer::Writer;

/// How many bytes the long names and PAX records of one entry may have together; Go has the same limit for each.
pub const MAX_EXTENDED_LEN: u64 = 1 << 20;

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
        let mut entry = describe(&header, &mut records, name, link).map_err(at)?;
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
