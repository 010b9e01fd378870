//! A writer of tar archives: ustar, with a PAX header in front of what ustar cannot express. The same entries give the same
//! bytes: neither the time nor the machine shows.
//!
//! Run by: the user, in the exporter.

use std::io::{self, Error, ErrorKind, Read, Write};

use super::header::BLOCK_LEN;
use super::{Entry, EntryKind, MAX_EXTENDED_LEN};

const COPY_LEN: usize = 128 << 10;
const ZEROS: [u8; BLOCK_LEN] = [0; BLOCK_LEN];

/// Lengths of the fields for names.
const NAME_LEN: usize = 100;
const PREFIX_LEN: usize = 155;
/// The largest numbers in 7 and 11 octal digits.
const MAX_SMALL: u64 = 0o7777777;
const MAX_LARGE: u64 = 0o77777777777;

/// An archive that is being written.
pub struct Writer<W> {
    out: W,
    buffer: Vec<u8>,
}

impl<W: Write> Writer<W> {
    /// Starts an archive. Headers are written in pieces of 512 bytes: `out` should have a buffer.
    pub fn new(out: W) -> Writer<W> {
        Writer { out, buffer: Vec::new() }
    }

    /// Adds what has no content.
    pub fn add(&mut self, entry: &Entry) -> io::Result<()> {
        self.add_file(entry, io::empty())
    }

    /// Adds a file. Its content must be as long as the entry says; what comes behind that is not read.
    pub fn add_file(&mut self, entry: &Entry, mut content: impl Read) -> io::Result<()> {
        let size = if entry.kind == EntryKind::File { entry.size } else { 0 };
        let header = Header::new(entry, size)?;
        if !header.records.is_empty() {
            self.add_records(entry, &header.records)?;
        }
        self.out.write_all(&header.block)?;
        let mut left = size;
        while left > 0 {
            if self.buffer.is_empty() {
                self.buffer = vec![0; COPY_LEN];
            }
            let len = self.buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            match content.read(&mut self.buffer[..len]) {
                Ok(0) => return Err(Error::new(ErrorKind::UnexpectedEof, "it is shorter than it was")),
                Ok(part) => {
                    self.out.write_all(&self.buffer[..part])?;
                    left -= part as u64;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.pad(size)
    }

    /// Ends the archive, and gives the output back.
    pub fn finish(mut self) -> io::Result<W> {
        self.out.write_all(&ZEROS)?;
        self.out.write_all(&ZEROS)?;
        Ok(self.out)
    }

    fn add_records(&mut self, entry: &Entry, records: &[u8]) -> io::Result<()> {
        if records.len() as u64 > MAX_EXTENDED_LEN {
            return Err(invalid("its name and attributes are longer than 1 MiB, which no program reads"));
        }
        // Programs that do not know these headers unpack them as files with this name.
        let last = entry.path.split(|byte| *byte == b'/').rfind(|part| !part.is_empty()).unwrap_or_default();
        let last = last.iter().map(|byte| if byte.is_ascii_graphic() { *byte } else { b'_' });
        let name: Vec<u8> = b"PaxHeaders/".iter().copied().chain(last).take(NAME_LEN).collect();
        let mut block = Fields([0; BLOCK_LEN]);
        block.text(0, &name);
        block.numbers(0o644, 0, 0, records.len() as u64, 0);
        self.out.write_all(&block.finish(b'x'))?;
        self.out.write_all(records)?;
        self.pad(records.len() as u64)
    }

    fn pad(&mut self, len: u64) -> io::Result<()> {
        let padding = (len.wrapping_neg() % BLOCK_LEN as u64) as usize;
        self.out.write_all(&ZEROS[..padding])
    }
}

/// A header, and the records in front of it.
struct Header {
    block: [u8; BLOCK_LEN],
    records: Vec<u8>,
}

impl Header {
    fn new(entry: &Entry, size: u64) -> io::Result<Header> {
        let mut fields = Fields([0; BLOCK_LEN]);
        let mut records = Vec::new();
        let mut path = entry.path.clone();
        if entry.kind == EntryKind::Directory && !path.ends_with(b"/") {
            path.push(b'/');
        }
        if path.contains(&0) || path.is_empty() {
            return Err(invalid("a name that no archive can have"));
        }
        let (flag, link) = flag_and_target(&entry.kind);
        if link.contains(&0) {
            return Err(invalid("a link to what cannot be"));
        }
        // In the order of the keys.
        if let Some(id) = beyond(entry.gid, MAX_SMALL) {
            record(&mut records, b"gid", id.as_bytes());
        }
        if link.len() > NAME_LEN || !link.is_ascii() {
            record(&mut records, b"linkpath", link);
        }
        let mtime = match u64::try_from(entry.mtime) {
            Ok(mtime) if mtime <= MAX_LARGE => mtime,
            _ => {
                record(&mut records, b"mtime", entry.mtime.to_string().as_bytes());
                0
            }
        };
        match split(&path) {
            Some((prefix, name)) => {
                fields.text(0, name);
                fields.text(345, prefix);
            }
            None => {
                record(&mut records, b"path", &path);
                fields.text(0, &path);
            }
        }
        if let Some(size) = beyond(size, MAX_LARGE) {
            record(&mut records, b"size", size.as_bytes());
        }
        if let Some(id) = beyond(entry.uid, MAX_SMALL) {
            record(&mut records, b"uid", id.as_bytes());
        }
        for (name, value) in &entry.xattrs {
            if name.is_empty() || name.iter().any(|byte| matches!(byte, 0 | b'=')) {
                return Err(invalid("an extended attribute with a name that no archive can have"));
            }
            record(&mut records, &[b"SCHILY.xattr.", name.as_slice()].concat(), value);
        }
        fields.text(157, link);
        fields.numbers(u64::from(entry.mode & 0o7777), entry.uid, entry.gid, size, mtime);
        if let EntryKind::CharDevice { major, minor } | EntryKind::BlockDevice { major, minor } = entry.kind {
            if u64::from(major.max(minor)) > MAX_SMALL {
                return Err(invalid("a device with a number that no archive can have"));
            }
            fields.octal(329, 7, u64::from(major));
            fields.octal(337, 7, u64::from(minor));
        }
        Ok(Header { block: fields.finish(flag), records })
    }
}

fn flag_and_target(kind: &EntryKind) -> (u8, &[u8]) {
    match kind {
        EntryKind::File => (b'0', b""),
        EntryKind::HardLink(target) => (b'1', target),
        EntryKind::Symlink(target) => (b'2', target),
        EntryKind::CharDevice { .. } => (b'3', b""),
        EntryKind::BlockDevice { .. } => (b'4', b""),
        EntryKind::Directory => (b'5', b""),
        EntryKind::Fifo => (b'6', b""),
    }
}

/// The two fields of a name, if it fits there. Other letters than ASCII are UTF-8 only in PAX records.
fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    if !path.is_ascii() {
        return None;
    }
    if path.len() <= NAME_LEN {
        return Some((b"", path));
    }
    // The slash between is not stored. The first that leaves a name short enough gives the shortest prefix.
    let first = path.len() - NAME_LEN - 1;
    let last = PREFIX_LEN.min(path.len() - 2);
    let at = (first.max(1)..=last).find(|at| path[*at] == b'/')?;
    Some((&path[..at], &path[at + 1..]))
}

/// A number that its field cannot hold.
fn beyond(value: u64, limit: u64) -> Option<String> {
    (value > limit).then(|| value.to_string())
}

/// `LENGTH KEY=VALUE\n`, where the length counts its own digits.
fn record(records: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut len = rest + 1;
    while len != rest + len.to_string().len() {
        len = rest + len.to_string().len();
    }
    records.extend_from_slice(len.to_string().as_bytes());
    for part in [b" ", key, b"=", value, b"\n"] {
        records.extend_from_slice(part);
    }
}

/// The fields of a ustar header.
struct Fields([u8; BLOCK_LEN]);

impl Fields {
    /// What does not fit is cut off; a record has it.
    fn text(&mut self, position: usize, text: &[u8]) {
        let len = text.len().min(if position == 345 { PREFIX_LEN } else { NAME_LEN });
        self.0[position..position + len].copy_from_slice(&text[..len]);
    }

    /// A number that does not fit is 0; a record has it.
    fn octal(&mut self, position: usize, digits: usize, value: u64) {
        let value = if value < 1 << (3 * digits) { value } else { 0 };
        let text = format!("{value:0digits$o}");
        self.0[position..position + digits].copy_from_slice(text.as_bytes());
    }

    fn numbers(&mut self, mode: u64, uid: u64, gid: u64, size: u64, mtime: u64) {
        self.octal(100, 7, mode);
        self.octal(108, 7, uid);
        self.octal(116, 7, gid);
        self.octal(124, 11, size);
        self.octal(136, 11, mtime);
    }

    fn finish(mut self, flag: u8) -> [u8; BLOCK_LEN] {
        self.0[156] = flag;
        self.0[257..265].copy_from_slice(b"ustar\x0000");
        self.0[148..156].fill(b' ');
        let sum: u64 = self.0.iter().map(|byte| u64::from(*byte)).sum();
        self.octal(148, 6, sum);
        self.0[154] = 0;
        self.0
    }
}

fn invalid(problem: &'static str) -> Error {
    Error::new(ErrorKind::InvalidInput, problem)
}
