//! An entry: what header, PAX records and long names say of a file.
//!
//! Run by: the user, in the importer.

use std::collections::BTreeMap;

use super::error::Problem;
use super::header::Header;
use super::pax::Records;

type Result<T> = std::result::Result<T, Problem>;

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

impl Entry {
    /// Something of root's from 1970, without attributes.
    pub fn new(path: impl Into<Vec<u8>>, kind: EntryKind, mode: u16, size: u64) -> Entry {
        Entry {
            path: path.into(),
            kind,
            mode,
            uid: 0,
            gid: 0,
            mtime: 0,
            size,
            stored_size: size,
            position: 0,
            is_sparse: false,
            xattrs: BTreeMap::new(),
        }
    }
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

/// What header, records and long names say together. The size is that of the stored content.
pub(super) fn describe(
    header: &Header,
    records: &mut Records,
    long_name: Vec<u8>,
    long_link: Vec<u8>,
) -> Result<Entry> {
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

pub(super) fn size(value: i64) -> Result<u64> {
    u64::try_from(value).map_err(|_| Problem::Number { field: "size" })
}

/// Some systems have users below 0 and store them so; Linux knows them as the last of 32 bits.
fn id(value: i64, field: &'static str) -> Result<u64> {
    match (u64::try_from(value), i32::try_from(value)) {
        (Ok(id), _) => Ok(id),
        (_, Ok(id)) => Ok(u64::from(id as u32)),
        _ => Err(Problem::Number { field }),
    }
}
