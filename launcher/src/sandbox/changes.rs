//! Where a writable root keeps its changes: in memory, or, where the kernel's tmpfs cannot hold what an overlay
//! writes (user xattrs, before Linux 6.6), in a directory on the node's disk.
//!
//! The directory is removed by a process of its own when the program has ended, also by kill -9. It is started
//! before the container's mount namespace exists, like the file servers, because it must not keep that alive.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::failure::cause;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::mkdtemp;
use rustix::fs::{XattrFlags, fsetxattr, setxattr};

use crate::sys;

/// A name that nobody else uses, to see whether a file system takes it.
const PROBE: &str = "user.mizzen.probe";

/// A directory on disk, if memory will not do.
pub fn on_disk_if_needed() -> Result<Option<PathBuf>, Failure> {
    if memory_will_do() {
        return Ok(None);
    }
    let parent = std::env::var_os("TMPDIR").map(PathBuf::from).filter(|path| path.is_absolute());
    let parent = parent.unwrap_or_else(|| PathBuf::from("/var/tmp"));
    let failed = |what: &str, error: std::io::Error| {
        Failure::new(format!("--writable: {}: {what}: {}", parent.display(), cause(&error)))
            .hint("this kernel needs a local disk for the changes; set TMPDIR to a directory on one")
    };
    let path =
        mkdtemp(&parent.join("mizzen-XXXXXX")).map_err(|e| failed("cannot make a directory", e.into()))?;
    remove_at_the_end(path.clone()).map_err(|error| {
        let _ = fs::remove_dir(&path);
        failed("cannot start the process that cleans up", error)
    })?;
    setxattr(&path, PROBE, b"", XattrFlags::empty())
        .map_err(|error| failed("cannot hold an overlay's changes", error.into()))?;
    Ok(Some(path))
}

/// Whether tmpfs takes user xattrs; a memfd is a file on a tmpfs.
fn memory_will_do() -> bool {
    memfd_create(c"mizzen", MFdFlags::MFD_CLOEXEC)
        .is_ok_and(|file| fsetxattr(&file, PROBE, b"", XattrFlags::empty()).is_ok())
}

fn remove_at_the_end(path: PathBuf) -> std::io::Result<()> {
    let program = sys::pidfd_of_self()?;
    sys::spawn_detached(&[program.as_fd()], || {
        let mut ended = [PollFd::new(program.as_fd(), PollFlags::POLLIN)];
        while poll(&mut ended, PollTimeout::NONE) == Err(nix::errno::Errno::EINTR) {}
        make_removable(&path);
        let _ = fs::remove_dir_all(&path);
    })
}

/// An overlay's work directory has mode 000.
fn make_removable(path: &Path) {
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    let _ = fs::set_permissions(path.join("work/work"), mode);
}
