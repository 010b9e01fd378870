//! What is mounted in a container, and where: plain data that the plan is made of.

use std::path::PathBuf;

use mizzen_core::Failure;
use mizzen_core::options::{MountFlags, Tmpfs};

use crate::options::Origin;

/// What a mount point is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A directory.
    Directory,
    /// A file.
    File,
}

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// What is mounted.
    pub kind: MountKind,
    /// Where: absolute inside, without symbolic links.
    pub target: PathBuf,
    /// Restrictions; nosuid and nodev always hold, except for the devices.
    pub flags: MountFlags,
    /// Who asks for it; None for what every container has.
    pub origin: Option<Origin>,
    /// Which option or rule wants it.
    pub why: String,
}

impl Mount {
    /// A failure of this mount, named after who asks for it.
    pub fn about(&self, failure: Failure) -> Failure {
        match self.origin {
            Some(_) => failure.about(&self.why),
            None => failure,
        }
    }
}

/// What a mount shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MountKind {
    /// A file or directory of the host with all that is mounted below it.
    Bind {
        /// On the host.
        source: PathBuf,
        /// What it is.
        shape: Shape,
    },
    /// Device nodes of the host, on a tmpfs.
    Devices(Vec<PathBuf>),
    /// A new procfs, for a process id namespace of the container's own.
    Proc,
    /// The message queues of an IPC namespace of the container's own.
    MessageQueues,
    /// An empty tmpfs.
    Tmpfs(Tmpfs),
    /// A file with this content.
    File(Vec<u8>),
    /// The content of a squashfs file.
    Squashfs(PathBuf),
    /// The launcher, and links to it under the names of Slurm's commands.
    Commands(PathBuf),
    /// Files of the host, and links to them, in a directory of their own.
    HostFiles {
        /// The files.
        files: Vec<HostFile>,
        /// The links: their places in the directory, and what is in them.
        links: Vec<(PathBuf, String)>,
    },
}

impl MountKind {
    /// What it must be mounted on.
    pub fn shape(&self) -> Shape {
        match self {
            MountKind::Bind { shape, .. } => *shape,
            MountKind::File(_) => Shape::File,
            MountKind::Devices(_)
            | MountKind::Proc
            | MountKind::MessageQueues
            | MountKind::Tmpfs(_)
            | MountKind::Squashfs(_)
            | MountKind::Commands(_)
            | MountKind::HostFiles { .. } => Shape::Directory,
        }
    }
}

/// A file of the node in the directory inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFile {
    /// Its place there.
    pub place: PathBuf,
    /// The file.
    pub source: PathBuf,
}

/// A symbolic link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Absolute inside, its directory without symbolic links.
    pub path: PathBuf,
    /// Where it leads.
    pub target: PathBuf,
    /// Whether it must be there even if it takes further mounts.
    pub needed: bool,
}
