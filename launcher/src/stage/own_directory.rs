//! The user's own directory among those of all users, where everybody can make names. Runs as the user on the host.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use nix::unistd::geteuid;
use rustix::fs::{CWD, Mode, OFlags, chmod, fstat, mkdirat, openat};
use rustix::io::Errno;

use super::cache::describe;
use crate::image::shown;

/// As many names are tried before the image is used where it is.
const NAMES: u32 = 16;

/// Opens the user's directory, and makes it: the first that is there of the names that it may have, else under the first
/// that nobody has taken.
pub fn open(directory: &Path) -> Result<(OwnedFd, PathBuf), Failure> {
    let name = format!("mizzen-{}", geteuid());
    let further = (1..NAMES).map(|number| format!("{name}.{number}"));
    let paths: Vec<PathBuf> =
        std::iter::once(name.clone()).chain(further).map(|name| directory.join(name)).collect();
    let mut taken = None;
    for make in [false, true] {
        for path in &paths {
            match open_own(path, make)? {
                Own::Opened(dir) => return Ok((dir, path.clone())),
                Own::Missing => {}
                Own::Taken(failure) => taken = taken.or(Some(failure)),
            }
        }
    }
    Err(taken.unwrap_or_else(|| Failure::new(format!("{}: cannot be made", shown(&paths[0])))))
}

/// What there is under a name that a user's directory may have.
enum Own {
    /// The user's directory.
    Opened(OwnedFd),
    /// Nothing.
    Missing,
    /// Something of another user's, and why it cannot be used.
    Taken(Failure),
}

/// Looks at a name in a directory that is everybody's, and follows nothing. Only what is wrong with the user's own
/// directory is a failure.
fn open_own(path: &Path, make: bool) -> Result<Own, Failure> {
    let failed = |what: String| Failure::new(format!("{}: {what}", shown(path)));
    if make {
        match mkdirat(CWD, path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(failed(format!("cannot make the directory: {}", describe(errno)))),
        }
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = match openat(CWD, path, flags, Mode::empty()) {
        Ok(found) => found,
        Err(Errno::NOENT) => return Ok(Own::Missing),
        Err(Errno::LOOP | Errno::NOTDIR) => return Ok(Own::Taken(failed("is not a directory".to_owned()))),
        Err(errno) => return Err(failed(format!("cannot open it: {}", describe(errno)))),
    };
    let stat = fstat(&found).map_err(|errno| failed(describe(errno)))?;
    if stat.st_uid != geteuid().as_raw() {
        return Ok(Own::Taken(failed(format!("belongs to uid {}, not to you", stat.st_uid))));
    }
    let mode = stat.st_mode & 0o7777;
    if mode & 0o077 != 0 {
        return Err(
            failed(format!("has mode {mode:04o}, not 0700")).hint(format!("chmod 700 {}", shown(path)))
        );
    }
    // One that not even its owner can use was made under another mask; the directory above may give its own bits.
    if mode != 0o700 {
        let opened = format!("/proc/self/fd/{}", found.as_raw_fd());
        chmod(&*opened, Mode::RWXU)
            .map_err(|errno| failed(format!("cannot chmod it: {}", describe(errno))))?;
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = openat(&found, ".", flags, Mode::empty());
    dir.map(Own::Opened).map_err(|errno| failed(format!("cannot open it: {}", describe(errno))))
}
