//! What is written down of a named container: what it was made from, and how it was started last. The files are the user's
//! own, to read and to change: what they say is checked as a request is.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt::Display;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::time::{SystemTime, UNIX_EPOCH};

use mizzen_core::Failure;
use mizzen_core::failure::cause;
use mizzen_core::request::ImageSource;
use rustix::fs::{Access, AtFlags, Dir, Mode, OFlags, accessat, fstat, openat, stat, unlinkat};
use rustix::io::Errno;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::scope::ScopeDirectory;
use super::write_file;
use crate::image::{Content, ImageKind, Loaded, shown};
use crate::plan::{Facts, Plan};
use crate::remove_tree::open_directory;

const IMAGE: &str = "image";
const STARTED: &str = "started";
/// Facts have the image's variables, and an environment has a limit of its own.
const LIMIT: u64 = 8 << 20;

/// What a container was made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Tells it from every other container, also from those that have had its name.
    pub id: String,
    /// The image, as a request has it.
    image: String,
    /// Size and time of modification of the image's file. Not its device and inode: a file system of the network may have another
    /// number after a boot, and a file that was put back is as good.
    file: Option<(u64, i64, i64)>,
    /// The first bytes of the squashfs in it, which tell when it was made and where everything is in it: `cp -p` keeps the time.
    #[serde(default)]
    superblock: Option<String>,
    /// When it was made, in seconds since 1970.
    pub made: i64,
    /// Whether a step of a job has made it.
    #[serde(default)]
    pub of_step: bool,
    /// The cluster of that job: another one knows nothing of it.
    #[serde(default)]
    pub cluster: Option<String>,
}

/// A start of a container, for those who enter it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Started {
    /// What every program in it needs to know.
    pub facts: Facts,
    /// Who owns the image's files in it.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// What the user has mounted in it, as the option says it.
    pub mounts: String,
    /// What else was said that acts when it is made: names and values of settings.
    #[serde(default)]
    pub settings: BTreeMap<String, String>,
}

impl Record {
    /// Of a container that is made now from this image.
    pub fn new(image: &ImageSource, loaded: &Loaded, of_step: bool) -> Result<Record, Failure> {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/uuid")
            .map_err(|error| Failure::caused_by("cannot number a new container", error))?;
        let made = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs() as i64);
        Ok(Record {
            id: id.trim().to_owned(),
            image: image.to_text(),
            file: file_of(image, loaded),
            superblock: superblock_of(image, loaded),
            made,
            of_step,
            cluster: std::env::var("SLURM_CLUSTER_NAME").ok(),
        })
    }

    /// That of the container of this name, if there is one.
    pub fn read(scope: &ScopeDirectory, name: &str) -> Result<Option<Record>, Failure> {
        let directory = match open_directory(scope.dir.as_fd(), OsStr::new(name)) {
            Err(Errno::NOENT) => return Ok(None),
            opened => opened.map_err(|errno| Failure::caused_by(shown(&scope.path.join(name)), errno))?,
        };
        let record: Record = read(scope, name, &directory, IMAGE)?;
        // It becomes a part of a mount's options.
        match record.id.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-') {
            true => Ok(Some(record)),
            false => Err(unreadable(scope, name, IMAGE, "its id is none")),
        }
    }

    /// Writes it into the container's directory.
    pub fn write(&self, directory: &OwnedFd) -> rustix::io::Result<()> {
        write(directory, IMAGE, self)
    }

    /// The image.
    pub fn image(&self) -> Result<ImageSource, Failure> {
        ImageSource::from_text(self.image.as_bytes())
            .map_err(|failure| failure.about("what it was made from"))
    }

    /// Whether the image is still what it was: an overlay over another one would show a mixture of both.
    pub fn check(&self, loaded: &Loaded) -> Result<(), Failure> {
        let image = self.image()?;
        let now = file_of(&image, loaded);
        let is_other_file = self.file.is_some() && now.is_some() && self.file != now;
        // A record of an earlier version has none.
        let is_other_content = self.superblock.is_some() && self.superblock != superblock_of(&image, loaded);
        if is_other_file || is_other_content {
            let image = shown(&loaded.opened.path);
            return Err(Failure::new(format!("{image} is another file than the one that it was made from")).hint(
                "its changes belong to that one; remove it with `mizzen containers remove`, or put the old file back",
            ));
        }
        Ok(())
    }
}

/// What changes when somebody writes to the image's file, or puts another in its place. Of an image in a registry the name tells.
fn file_of(image: &ImageSource, loaded: &Loaded) -> Option<(u64, i64, i64)> {
    if image.reference().is_some() || matches!(loaded.opened.kind, ImageKind::Directory) {
        return None;
    }
    // The original, where a copy is used.
    let found = std::fs::metadata(&loaded.opened.path).ok()?;
    Some((found.len(), found.mtime(), found.mtime_nsec()))
}

/// Where an image in a registry is converted anew, its squashfs is another one with the same files: there the name tells.
fn superblock_of(image: &ImageSource, loaded: &Loaded) -> Option<String> {
    const SIZE: usize = 96;
    let (Content::Squashfs(squashfs), None) = (&loaded.content, image.reference()) else { return None };
    let offset = match loaded.opened.kind {
        ImageKind::Sif { offset, .. } => offset,
        ImageKind::Squashfs | ImageKind::Directory => 0,
    };
    let mut bytes = [0; SIZE];
    squashfs.source().read_exact_at(&mut bytes, offset).ok()?;
    Some(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

impl Started {
    /// Of a container that has just been made as planned. What its programs are given beside is their own affair.
    pub fn new(plan: &Plan, mounts: String, settings: BTreeMap<String, String>) -> Started {
        let facts = Facts { environment: Vec::new(), ..plan.facts.clone() };
        Started { facts, uid: plan.identity.inside_uid, gid: plan.identity.inside_gid, mounts, settings }
    }

    /// Of the start of a container that runs, by its mount namespace.
    pub fn read(scope: &ScopeDirectory, name: &str, mounts: &OwnedFd) -> Result<Started, Failure> {
        let failed = |errno| Failure::caused_by(shown(&scope.path.join(name)), errno);
        let directory = open_directory(scope.dir.as_fd(), OsStr::new(name)).map_err(failed)?;
        let of_second = of_second(fstat(mounts).map_err(failed)?.st_ino);
        let is_second = accessat(&directory, &*of_second, Access::EXISTS, AtFlags::empty()).is_ok();
        read(scope, name, &directory, if is_second { &of_second } else { STARTED })
    }

    /// Writes it into the container's directory. Those of earlier second containers say nothing any more.
    pub fn write(&self, directory: &OwnedFd) -> rustix::io::Result<()> {
        for entry in Dir::read_from(directory)?.flatten() {
            if entry.file_name().to_bytes().starts_with(of_second("").as_bytes()) {
                unlinkat(directory, entry.file_name(), AtFlags::empty())?;
            }
        }
        write(directory, STARTED, self)
    }

    /// The same for a second container on the same files, in which this process is.
    pub fn write_of_second(&self, directory: &OwnedFd) -> rustix::io::Result<()> {
        write(directory, &of_second(stat("/proc/self/ns/mnt")?.st_ino), self)
    }
}

/// A second container's [`STARTED`], by the number of its mount namespace: that is no other's as long as the first one runs.
fn of_second(namespace: impl Display) -> String {
    format!("{STARTED}-{namespace}")
}

fn write(directory: &OwnedFd, name: &str, value: &impl Serialize) -> rustix::io::Result<()> {
    let text = serde_json::to_vec(value).map_err(|_| Errno::INVAL)?;
    write_file(directory, name, &text)
}

fn read<T: DeserializeOwned>(
    scope: &ScopeDirectory,
    name: &str,
    directory: &OwnedFd,
    file: &str,
) -> Result<T, Failure> {
    let failed = |why: String| unreadable(scope, name, file, &why);
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened =
        openat(directory, file, flags, Mode::empty()).map_err(|errno| failed(cause(&errno.into())))?;
    let mut text = Vec::new();
    File::from(opened).take(LIMIT).read_to_end(&mut text).map_err(|error| failed(cause(&error)))?;
    serde_json::from_slice(&text).map_err(|error| failed(error.to_string()))
}

fn unreadable(scope: &ScopeDirectory, name: &str, file: &str, why: &str) -> Failure {
    Failure::new(format!("{}: {why}", shown(&scope.path.join(name).join(file))))
        .hint("only mizzen writes this file; remove the container with `mizzen containers remove`")
}
