//! Whether the kernel lets this user put the files of a directory over an image. Runs as the user on the host.

use std::io;
use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::fchdir;

use crate::sys;

/// A directory that every system has.
const MOUNT_POINT: &str = "/tmp";
const REFUSED: i32 = 1;

/// Whether no start could have files of this directory as a layer: users have no overlays here, or the file system cannot be below
/// one. Where it cannot be tried, for example because there are too many namespaces just now, that is not said.
pub fn is_refused(directory: &OwnedFd) -> bool {
    let tried = sys::spawn_child(|| match try_mount(directory) {
        Ok(Err(_)) => REFUSED,
        Ok(Ok(())) | Err(_) => 0,
    });
    let ended = tried.and_then(|child| Ok(waitpid(child, None)?));
    matches!(ended, Ok(WaitStatus::Exited(_, REFUSED)))
}

/// Tries it in namespaces of this process' own: the overlay that a start would mount, of this directory and of a tmpfs.
fn try_mount(directory: &OwnedFd) -> io::Result<Result<(), Errno>> {
    // By this it is found in the new namespace, whatever its path.
    fchdir(directory)?;
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("mizzen"), MOUNT_POINT, Some("tmpfs"), flags, None::<&str>)?;
    let options = format!("lowerdir={MOUNT_POINT}:.,userxattr");
    let flags = flags | MsFlags::MS_RDONLY;
    Ok(mount(Some("mizzen"), MOUNT_POINT, Some("overlay"), flags, Some(options.as_str())))
}
