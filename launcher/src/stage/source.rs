//! The original of a copy: what it is, and what is written down of it. Runs as the user on the host, or as root.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use mizzen_core::Digest;
use rustix::fs::{AtFlags, CWD, Stat, fstat, statat};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{StageError, unreadable};
use crate::image::OpenedImage;

/// A file that is to be copied.
pub struct SourceImage<'a> {
    /// Its path, for people.
    pub path: &'a Path,
    pub file: &'a File,
    pub identity: FileIdentity,
    /// Whether a copy that is there is read as a whole before it is used.
    pub verify: bool,
}

impl<'a> SourceImage<'a> {
    /// An image that has been opened.
    pub(super) fn new(opened: &'a OpenedImage, verify: bool) -> Result<SourceImage<'a>, StageError> {
        let identity = FileIdentity::of(&opened.file)
            .map_err(|error| StageError::Source(unreadable(&opened.path, &error)))?;
        Ok(SourceImage { path: &opened.path, file: &opened.file, identity, verify })
    }
}

/// What a file is, as far as one can see without reading it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    /// What the device's number means: the boot of the node, and what was mounted. The number of a file system that is gone
    /// may be another's the next moment. Empty where nobody could make use of another's.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub mount: String,
    pub dev: u64,
    pub ino: u64,
    pub size: u64,
    pub mtime: (i64, u64),
    pub ctime: (i64, u64),
}

impl FileIdentity {
    /// Of an open file.
    pub fn of(file: impl AsFd) -> io::Result<FileIdentity> {
        Ok(FileIdentity::from_stat(&fstat(file)?))
    }

    /// Of whatever has this path now.
    pub fn at(path: &Path) -> io::Result<FileIdentity> {
        Ok(FileIdentity::from_stat(&statat(CWD, path, AtFlags::empty())?))
    }

    pub(super) fn from_stat(stat: &Stat) -> FileIdentity {
        FileIdentity {
            mount: String::new(),
            dev: stat.st_dev,
            ino: stat.st_ino,
            size: u64::try_from(stat.st_size).unwrap_or(0),
            mtime: (stat.st_mtime, stat.st_mtime_nsec),
            ctime: (stat.st_ctime, stat.st_ctime_nsec),
        }
    }

    /// Whether it is the same as another machine sees it, where devices have other numbers, and on some file systems
    /// inodes too.
    pub fn is_same_elsewhere(&self, other: &FileIdentity) -> bool {
        (self.size, self.mtime, self.ctime) == (other.size, other.mtime, other.ctime)
    }

    /// Names it in the cache.
    pub fn key(&self) -> String {
        let FileIdentity { mount, dev, ino, size, mtime, ctime } = self;
        let text = format!("{mount}{dev} {ino} {size} {mtime:?} {ctime:?}");
        Digest::new(Sha256::digest(text).into()).hex()[..32].to_owned()
    }
}

/// What is known of a source.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Manifest {
    /// Its path, for people.
    pub source: String,
    pub identity: FileIdentity,
    pub digest: String,
    /// When it was copied, in seconds since 1970.
    pub staged: u64,
}

impl Manifest {
    /// For a source that has just been copied.
    pub fn new(source: &Path, identity: &FileIdentity, digest: Digest) -> Manifest {
        let staged = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        let source = source.to_string_lossy().into_owned();
        Manifest { source, identity: identity.clone(), digest: digest.to_string(), staged }
    }
}
