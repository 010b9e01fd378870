//! The entries of a converted layer, as bytes. The index of a layer is compared with its digest before it is read, so what
//! is wrong in it is a bug or another program's file: an error, and never more memory than there are bytes.
//!
//! Run by: the user, in the importer.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use super::damaged;

/// Nothing in an entry is longer: a value of an extended attribute has 64 KiB.
const TEXT_LIMIT: u32 = 1 << 20;

/// What a layer says of one path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// From the root, without `.`, `..` and empty components; empty for the root itself.
    pub path: Vec<u8>,
    /// Permissions with setuid, setgid and sticky bit.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Seconds since 1970.
    pub mtime: u32,
    /// Extended attributes that an image keeps.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// What it is.
    pub content: EntryContent,
}

/// What an entry is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryContent {
    /// a directory, new or there already
    Directory,
    /// a file with the contents of this number
    File(u32),
    /// another name for what has this path when the entry is met
    HardLink(Vec<u8>),
    /// a symbolic link
    Symlink(Vec<u8>),
    /// a character device
    CharDevice(u32, u32),
    /// a block device
    BlockDevice(u32, u32),
    /// a named pipe
    Fifo,
}

const END: u8 = 0;
const DIRECTORY: u8 = 1;
const FILE: u8 = 2;
const HARD_LINK: u8 = 3;
const SYMLINK: u8 = 4;
const CHAR_DEVICE: u8 = 5;
const BLOCK_DEVICE: u8 = 6;
const FIFO: u8 = 7;

/// Writes one entry.
pub fn write_entry(entry: &Entry, out: &mut impl Write) -> io::Result<()> {
    let kind = match entry.content {
        EntryContent::Directory => DIRECTORY,
        EntryContent::File(_) => FILE,
        EntryContent::HardLink(_) => HARD_LINK,
        EntryContent::Symlink(_) => SYMLINK,
        EntryContent::CharDevice(..) => CHAR_DEVICE,
        EntryContent::BlockDevice(..) => BLOCK_DEVICE,
        EntryContent::Fifo => FIFO,
    };
    out.write_all(&[kind])?;
    write_text(&entry.path, out)?;
    out.write_all(&entry.mode.to_le_bytes())?;
    for number in [entry.uid, entry.gid, entry.mtime, entry.xattrs.len() as u32] {
        out.write_all(&number.to_le_bytes())?;
    }
    for (name, value) in &entry.xattrs {
        write_text(name, out)?;
        write_text(value, out)?;
    }
    match &entry.content {
        EntryContent::Directory | EntryContent::Fifo => Ok(()),
        EntryContent::File(number) => out.write_all(&number.to_le_bytes()),
        EntryContent::HardLink(target) | EntryContent::Symlink(target) => write_text(target, out),
        EntryContent::CharDevice(major, minor) | EntryContent::BlockDevice(major, minor) => {
            out.write_all(&major.to_le_bytes())?;
            out.write_all(&minor.to_le_bytes())
        }
    }
}

/// Ends the list of entries.
pub fn write_end(out: &mut impl Write) -> io::Result<()> {
    out.write_all(&[END])
}

fn write_text(text: &[u8], out: &mut impl Write) -> io::Result<()> {
    let len = u32::try_from(text.len()).ok().filter(|len| *len <= TEXT_LIMIT).ok_or_else(damaged)?;
    out.write_all(&len.to_le_bytes())?;
    out.write_all(text)
}

/// Reads one entry; none at the end of the list.
pub fn read_entry(source: &mut impl Read) -> io::Result<Option<Entry>> {
    let [kind] = read_bytes(source)?;
    if kind == END {
        return Ok(None);
    }
    let path = read_text(source)?;
    let mode = u16::from_le_bytes(read_bytes(source)?);
    let [uid, gid, mtime] = [read_u32(source)?, read_u32(source)?, read_u32(source)?];
    let mut xattrs = BTreeMap::new();
    for _ in 0..read_u32(source)? {
        let name = read_text(source)?;
        xattrs.insert(name, read_text(source)?);
    }
    let content = match kind {
        DIRECTORY => EntryContent::Directory,
        FILE => EntryContent::File(read_u32(source)?),
        HARD_LINK => EntryContent::HardLink(read_text(source)?),
        SYMLINK => EntryContent::Symlink(read_text(source)?),
        CHAR_DEVICE => EntryContent::CharDevice(read_u32(source)?, read_u32(source)?),
        BLOCK_DEVICE => EntryContent::BlockDevice(read_u32(source)?, read_u32(source)?),
        FIFO => EntryContent::Fifo,
        _ => return Err(damaged()),
    };
    Ok(Some(Entry { path, mode, uid, gid, mtime, xattrs, content }))
}

fn read_bytes<const N: usize>(source: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    source.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn read_u32(source: &mut impl Read) -> io::Result<u32> {
    read_bytes(source).map(u32::from_le_bytes)
}

fn read_text(source: &mut impl Read) -> io::Result<Vec<u8>> {
    let len = read_u32(source)?;
    if len > TEXT_LIMIT {
        return Err(damaged());
    }
    let mut text = Vec::new();
    source.take(len.into()).read_to_end(&mut text)?;
    if text.len() == len as usize { Ok(text) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_back() {
        let contents = [
            EntryContent::Directory,
            EntryContent::File(7),
            EntryContent::HardLink(b"usr/bin/perl".to_vec()),
            EntryContent::Symlink(b"\xff".to_vec()),
            EntryContent::CharDevice(1, 3),
            EntryContent::BlockDevice(8, 0),
            EntryContent::Fifo,
        ];
        let entries: Vec<Entry> = (0..)
            .zip(contents)
            .map(|(number, content)| Entry {
                path: format!("a/{number}").into(),
                mode: 0o4755,
                uid: number,
                gid: number + 1,
                mtime: u32::MAX,
                xattrs: [(b"user.x".to_vec(), vec![0; number as usize])].into(),
                content,
            })
            .collect();
        let mut bytes = Vec::new();
        entries.iter().for_each(|entry| write_entry(entry, &mut bytes).unwrap());
        write_end(&mut bytes).unwrap();
        let mut source = bytes.as_slice();
        let mut read = Vec::new();
        while let Some(entry) = read_entry(&mut source).unwrap() {
            read.push(entry);
        }
        assert_eq!(read, entries);
        for end in 0..bytes.len() - 1 {
            let mut source = &bytes[..end];
            while let Ok(Some(_)) = read_entry(&mut source) {}
        }
    }
}
