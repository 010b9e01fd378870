//! Why an archive cannot be read, each as one line for the user.
//!
//! Run by: the user, in the importer.

use std::fmt;
use std::io;

use mizzen_core::failure::quote;

/// Why an archive cannot be read further.
#[derive(Debug)]
#[allow(missing_docs)] // of the fields, whose names say it
pub enum TarError {
    /// The stream under the archive could not be read.
    Read(io::Error),
    /// The archive ends within a header.
    CutHeader { position: u64 },
    /// The archive ends within the content of an entry.
    CutContent { name: Vec<u8> },
    /// A header that no reader should make something of.
    Header { position: u64, problem: Problem },
    /// The content of a sparse file does not fit its map.
    Sparse { name: Vec<u8>, problem: &'static str },
    /// An earlier error left the archive at an unknown place.
    AfterError,
}

/// What is wrong with a header.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // of the fields, whose names say it
pub enum Problem {
    /// Also of what is not a tar archive at all.
    Checksum,
    /// A block of zeros, which ends an archive, and then another header.
    BehindEnd,
    /// A field that is no number, or too large a one.
    Number { field: &'static str },
    /// Extended headers of more than [`super::MAX_EXTENDED_LEN`].
    TooLong,
    /// A record of a PAX header.
    Record(&'static str),
    /// The map of a sparse file.
    Map(&'static str),
    /// A type of entry that we do not know.
    Type { flag: u8, name: Vec<u8> },
}

/// The result of everything in this module.
pub type Result<T> = std::result::Result<T, TarError>;

impl TarError {
    /// What kind of error it is for [`io::Error`].
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            TarError::Read(source) => source.kind(),
            TarError::CutHeader { .. } | TarError::CutContent { .. } => io::ErrorKind::UnexpectedEof,
            _ => io::ErrorKind::InvalidData,
        }
    }
}

impl fmt::Display for TarError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TarError::Read(source) => write!(f, "{source}"),
            TarError::CutHeader { position } => {
                write!(f, "the archive ends in the middle of the header at byte {position}")
            }
            TarError::CutContent { name } => {
                write!(f, "the archive ends in the middle of \"{}\"", quote(name))
            }
            TarError::Header { position, problem } => {
                write!(f, "the header at byte {position} of the archive {problem}")
            }
            TarError::Sparse { name, problem } => write!(f, "the sparse file \"{}\" {problem}", quote(name)),
            TarError::AfterError => write!(f, "the archive cannot be read behind an error"),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Problem::Checksum => write!(f, "has a wrong checksum: damaged, or not a tar archive"),
            Problem::BehindEnd => write!(f, "stands behind a block of zeros, which ends an archive"),
            Problem::Number { field } => write!(f, "has no valid number for the {field}"),
            Problem::TooLong => {
                write!(f, "is longer than {} bytes with its extensions", super::MAX_EXTENDED_LEN)
            }
            Problem::Record(what) => write!(f, "has a PAX record {what}"),
            Problem::Map(what) => write!(f, "has a map of a sparse file {what}"),
            Problem::Type { flag, name } => {
                write!(f, "is of the unknown type '{}' (\"{}\")", flag.escape_ascii(), quote(name))
            }
        }
    }
}

impl std::error::Error for TarError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            TarError::Read(source) => Some(source),
            _ => None,
        }
    }
}

impl From<TarError> for io::Error {
    fn from(error: TarError) -> io::Error {
        match error {
            TarError::Read(source) => source,
            error => io::Error::new(error.kind(), error),
        }
    }
}
