//! The user's own directory among those of all users, where everybody can make names. Runs as the user on the host.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use mizzen_core::Failure;
use mizzen_core::failure::cause;
use mizzen_core::mountinfo::open_on_same_mount;
use nix::unistd::geteuid;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, chmod, fstat, mkdirat, openat, unlinkat};
use rustix::io::Errno;

use super::cache::describe;
use crate::image::shown;

/// As many names are tried that everybody can foresee. Then it is one that nobody can take first.
const NAMES: u32 = 16;
/// Among so many entries a name that nobody could foresee is found again: others can make any number of them.
const ENTRIES: usize = 100_000;
/// As many directories are looked at that have such a name. Each is opened to learn whose it is.
const CANDIDATES: usize = 1_000;
/// How often a name is drawn before somebody else has it.
const DRAWS: u32 = 4;
/// For others to make theirs, who have seen none before.
const SETTLING: Duration = Duration::from_millis(100);

/// Opens the user's directory, and makes it: the first that is there of the names that it may have, else under the first
/// that nobody has taken.
pub fn open(directory: &Path) -> Result<(OwnedFd, PathBuf), Failure> {
    let mut taken = None;
    for make in [false, true] {
        if let Some(own) = look(directory, make, &mut taken)? {
            return Ok(own);
        }
    }
    let path = directory.join(names().next().unwrap_or_default());
    let taken = taken.unwrap_or_else(|| Failure::new(format!("{}: cannot be made", shown(&path))));
    let hint = || {
        let user = geteuid();
        let path = shown(&path);
        format!(
            "an administrator can put yours there: rm -rf {path} && mkdir -m 700 {path} && chown -h {user} {path}"
        )
    };
    // All names that can be foreseen are others'.
    let all = open_all(directory)?;
    // One that could not be found again would be made at every start.
    if unforeseen_in(&all).is_none_or(|found| found.are_too_many) {
        return Err(taken.or_hint(hint()));
    }
    for _ in 0..DRAWS {
        let name = format!("{}{}", unforeseen(), random()?);
        if let Own::Missing | Own::Taken(_) = open_own(&all, directory, &name, true)? {
            continue;
        }
        // Other processes of the user's may do the same at this moment: all take the same one then.
        std::thread::sleep(SETTLING);
        for found in unforeseen_in(&all).map(|found| found.own).unwrap_or_default() {
            if let Own::Opened(own) = open_own(&all, directory, &found, false)? {
                if found != name {
                    // Unless somebody uses it already.
                    let _ = unlinkat(&all, &name, AtFlags::REMOVEDIR);
                }
                return Ok((own, directory.join(found)));
            }
        }
    }
    Err(taken.or_hint(hint()))
}

/// Opens it, if it is there.
pub fn find(directory: &Path) -> Result<Option<(OwnedFd, PathBuf)>, Failure> {
    look(directory, false, &mut None)
}

/// Begins the names that nobody can foresee; a number is never behind it.
fn unforeseen() -> String {
    format!("mizzen-{}.x", geteuid())
}

fn random() -> Result<String, Failure> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/uuid")
        .map_err(|error| Failure::caused_by("cannot draw a name", error))?;
    Ok(id.chars().filter(char::is_ascii_hexdigit).take(16).collect())
}

/// The names that it may have.
fn names() -> impl Iterator<Item = String> {
    let name = format!("mizzen-{}", geteuid());
    let further = (1..NAMES).map({
        let name = name.clone();
        move |number| format!("{name}.{number}")
    });
    std::iter::once(name).chain(further)
}

/// `taken` gets why the first of the names cannot be used that somebody else has.
fn look(
    directory: &Path,
    make: bool,
    taken: &mut Option<Failure>,
) -> Result<Option<(OwnedFd, PathBuf)>, Failure> {
    let all = open_all(directory)?;
    let mut is_free = false;
    for name in names() {
        match open_own(&all, directory, &name, make)? {
            Own::Opened(dir) => return Ok(Some((dir, directory.join(name)))),
            Own::Missing => is_free = true,
            Own::Taken(failure) => {
                taken.get_or_insert(failure);
            }
        }
    }
    // One of these is made only where all others are taken. While one of these is taken it is looked for, as others may be free by now.
    if taken.is_none() && is_free {
        return Ok(None);
    }
    for name in unforeseen_in(&all).map(|found| found.own).unwrap_or_default() {
        if let Own::Opened(dir) = open_own(&all, directory, &name, false)? {
            return Ok(Some((dir, directory.join(name))));
        }
    }
    Ok(None)
}

/// The directory of all users, to look for names in it.
fn open_all(directory: &Path) -> Result<OwnedFd, Failure> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat(CWD, directory, flags, Mode::empty())
        .map_err(|errno| Failure::new(format!("{}: {}", shown(directory), describe(errno))))
}

/// Its entries. A site may forbid to list it.
fn list(all: &OwnedFd) -> rustix::io::Result<Dir> {
    openat(all, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).and_then(Dir::new)
}

/// Names that somebody has drawn for this user.
struct Unforeseen {
    /// Those of the user's own directories. Of several, which processes have made at the same time, all take the same.
    own: Vec<String>,
    /// There are more than were looked at.
    are_too_many: bool,
}

/// Looks for such names; None where the directory cannot be listed. Others can make them once they have seen one, or mount
/// something on theirs: nothing is asked of that.
fn unforeseen_in(all: &OwnedFd) -> Option<Unforeseen> {
    let prefix = unforeseen();
    let is_own = |name: &str| {
        let found = open_on_same_mount(all.as_fd(), name.as_ref()).ok();
        found.and_then(|found| fstat(found).ok()).is_some_and(|found| found.st_uid == geteuid().as_raw())
    };
    let mut names = list(all)
        .ok()?
        .take(ENTRIES)
        .flatten()
        .filter(|entry| [FileType::Directory, FileType::Unknown].contains(&entry.file_type()))
        .filter_map(|entry| entry.file_name().to_str().map(str::to_owned).ok())
        .filter(|name| name.starts_with(&prefix));
    let mut own: Vec<String> = names.by_ref().take(CANDIDATES).filter(|name| is_own(name)).collect();
    own.sort_unstable();
    Some(Unforeseen { own, are_too_many: names.next().is_some() })
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

/// Looks at a name in a directory that is everybody's, follows nothing, and asks nothing of what is mounted there. Only what
/// is wrong with the user's own directory is a failure.
fn open_own(all: &OwnedFd, directory: &Path, name: &str, make: bool) -> Result<Own, Failure> {
    let path = &directory.join(name);
    let failed = |what: String| Failure::new(format!("{}: {what}", shown(path)));
    if make {
        match mkdirat(all, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(failed(format!("cannot make the directory: {}", describe(errno)))),
        }
    }
    let found = match open_on_same_mount(all.as_fd(), name.as_ref()) {
        Ok(found) => found,
        Err(error) => {
            return match error.raw_os_error() {
                Some(libc::ENOENT) => Ok(Own::Missing),
                Some(libc::EXDEV) => Ok(Own::Taken(failed("something is mounted there".to_owned()))),
                _ => Err(failed(format!("cannot open it: {}", cause(&error)))),
            };
        }
    };
    let stat = fstat(&found).map_err(|errno| failed(describe(errno)))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return Ok(Own::Taken(failed("is not a directory".to_owned())));
    }
    if stat.st_uid != geteuid().as_raw() {
        return Ok(Own::Taken(failed(format!("belongs to uid {}, not to you", stat.st_uid))));
    }
    let mode = stat.st_mode & 0o7777;
    // Others may have moved a directory here that they could write to.
    if mode & 0o022 != 0 {
        return Ok(Own::Taken(failed(format!("has mode {mode:04o}, not 0700"))));
    }
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
