//! What can be wrong with an image, each as one line for the user.
//!
//! Run by: the user, in the launcher and in the FUSE server process.

use std::fmt;
use std::io;

/// Why an image, or something inside it, cannot be read.
#[derive(Debug)]
#[allow(missing_docs)] // of the fields, whose names say it
pub enum Error {
    /// The image file could not be read at this position.
    Io { at: u64, source: io::Error },
    /// Fewer bytes than a superblock.
    TooShort { len: u64 },
    /// Another kind of file.
    NotSquashfs { start: [u8; 4] },
    /// The byte order of squashfs 1.x to 3.x on big-endian machines.
    BigEndian,
    /// Any version but 4.0.
    Version { major: u16, minor: u16 },
    /// The superblock claims more bytes than the file has.
    Truncated { claimed: u64, present: u64 },
    /// A compressor number that no mksquashfs writes.
    UnknownCompressor(u16),
    /// A superblock field contradicts the others.
    Superblock { field: &'static str, value: u64, problem: &'static str },
    /// Something behind the superblock contradicts the format.
    Corrupt(&'static str),
    /// A block does not decompress.
    Decompress { compressor: &'static str, at: u64 },
    /// No such name inside the image.
    NotFound,
    /// A directory was needed.
    NotADirectory,
    /// A regular file was needed.
    NotAFile,
    /// A symbolic link was needed.
    NotASymlink,
    /// More symbolic links in one path than Linux would follow.
    TooManyLinks,
    /// The file is larger than the caller wants to read.
    TooLarge { size: u64, limit: u64 },
}

/// The result of everything in this module.
pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io { at, source } if source.kind() == io::ErrorKind::UnexpectedEof => {
                write!(f, "the image has become shorter: the block at byte {at} is not whole")
            }
            Error::Io { at, source } => write!(f, "reading the image at byte {at}: {source}"),
            Error::TooShort { len } => {
                write!(f, "not a squashfs image: too short, {len} bytes (the header alone has 96)")
            }
            Error::NotSquashfs { start } => {
                write!(f, "not a squashfs image: starts with \"{}\"", start.escape_ascii())
            }
            Error::BigEndian => write!(f, "a big-endian squashfs image (before 4.0), which is not supported"),
            Error::Version { major, minor } if *major < 4 => {
                write!(f, "squashfs {major}.{minor}, which is not supported; only 4.0 is")
            }
            Error::Version { major, minor } => {
                write!(f, "squashfs {major}.{minor}, which is newer than the supported 4.0")
            }
            Error::Truncated { claimed, present } => {
                write!(f, "truncated: the header says {claimed} bytes, the file has {present}")
            }
            Error::UnknownCompressor(id) => {
                write!(
                    f,
                    "compressed with method {id}, which is not supported (known: gzip, lzma, lzo, xz, lz4, zstd)"
                )
            }
            Error::Superblock { field, value, problem } => {
                write!(f, "corrupt image: {field} in the header is {value}: {problem}")
            }
            Error::Corrupt(what) => write!(f, "corrupt image: {what}"),
            Error::Decompress { compressor, at } => {
                write!(f, "corrupt image: the {compressor} block at byte {at} does not decompress")
            }
            Error::NotFound => write!(f, "no such file in the image"),
            Error::NotADirectory => write!(f, "not a directory in the image"),
            Error::NotAFile => write!(f, "not a regular file in the image"),
            Error::NotASymlink => write!(f, "not a symbolic link in the image"),
            Error::TooManyLinks => write!(f, "too many levels of symbolic links in the image"),
            Error::TooLarge { size, limit } => {
                write!(f, "a file of {size} bytes where at most {limit} are expected")
            }
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> io::Error {
        match error {
            Error::NotFound => rustix::io::Errno::NOENT.into(),
            Error::NotADirectory => rustix::io::Errno::NOTDIR.into(),
            error => io::Error::other(error),
        }
    }
}
