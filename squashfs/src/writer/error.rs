//! Why an image cannot be written, each as one line for the user.
//!
//! Run by: the user, in the importer.

use std::fmt;
use std::io;

/// Why something cannot be stored, or the image cannot be written.
#[derive(Debug)]
#[allow(missing_docs)] // of the fields, whose names say it
pub enum Error {
    /// The contents of a file could not be read from their source.
    Read(io::Error),
    /// The image could not be written.
    Write(io::Error),
    /// A block could not be compressed.
    Compress(io::Error),
    /// Not a power of two from 4 KiB to 1 MiB.
    BlockSize(u32),
    /// A level that the compressor does not have.
    Level { compressor: &'static str, level: i32 },
    /// Empty, `.`, `..`, longer than 255 bytes, or with a `/` or a zero byte.
    Name { name: Vec<u8>, problem: &'static str },
    /// The directory has this name already.
    Exists { name: Vec<u8> },
    /// Names can only be added to directories.
    NotADirectory { name: Vec<u8> },
    /// A directory has exactly one name.
    LinkToDirectory { name: Vec<u8> },
    /// A node or file that belongs to another tree or writer.
    Unknown { what: &'static str },
    /// More than the twelve permission bits.
    Mode { name: Vec<u8>, mode: u16 },
    /// Linux follows no such link.
    Target { name: Vec<u8>, len: usize },
    /// A device number that the format's 12 + 20 bits cannot express.
    Device { name: Vec<u8>, major: u32, minor: u32 },
    /// An extended attribute that squashfs or Linux does not have.
    Xattr { name: Vec<u8>, attribute: Vec<u8>, problem: &'static str },
    /// A segment cannot be taken into an image of another kind.
    Segment,
    /// A segment's bytes are not what was written.
    Damaged,
    /// The format has a field too small for this.
    TooMany { what: &'static str, limit: u64 },
}

/// The result of everything in this module.
pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Read(source) => write!(f, "reading the contents of a file: {source}"),
            Error::Write(source) => write!(f, "writing the image: {source}"),
            Error::Compress(source) => write!(f, "compressing a block: {source}"),
            Error::BlockSize(size) => {
                write!(f, "a block size of {size}: it must be a power of two from 4096 to 1048576")
            }
            Error::Level { compressor, level } => write!(f, "{compressor} has no compression level {level}"),
            Error::Name { name, problem } => write!(f, "the file name \"{}\" {problem}", short(name)),
            Error::Exists { name } => write!(f, "\"{}\" exists already in its directory", short(name)),
            Error::NotADirectory { name } => {
                write!(f, "\"{}\" cannot be added to what is not a directory", short(name))
            }
            Error::LinkToDirectory { name } => write!(f, "\"{}\" is a hard link to a directory", short(name)),
            Error::Unknown { what } => write!(f, "{what} that was not made here"),
            Error::Mode { name, mode } => {
                write!(f, "\"{}\" has mode {mode:o}: more than permission bits", short(name))
            }
            Error::Target { name, len } => write!(
                f,
                "the symbolic link \"{}\" has a target of {len} bytes: it must have 1 to 4095, none of them zero",
                short(name)
            ),
            Error::Device { name, major, minor } => write!(
                f,
                "the device \"{}\" is {major}:{minor}: squashfs has numbers up to 4095:1048575",
                short(name)
            ),
            Error::Xattr { name, attribute, problem } => {
                write!(f, "the extended attribute \"{}\" of \"{}\" {problem}", short(attribute), short(name))
            }
            Error::Segment => write!(f, "a segment with another compressor or block size than the image"),
            Error::Damaged => write!(f, "a segment has changed since it was written"),
            Error::TooMany { what, limit } => write!(f, "too many {what}: squashfs has at most {limit}"),
        }
    }
}

/// Names come from anywhere: printable, and not longer than a line.
fn short(name: &[u8]) -> String {
    const LIMIT: usize = 80;
    match name.get(..LIMIT) {
        Some(start) => format!("{}...", start.escape_ascii()),
        None => name.escape_ascii().to_string(),
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Read(source) | Error::Write(source) | Error::Compress(source) => Some(source),
            _ => None,
        }
    }
}
