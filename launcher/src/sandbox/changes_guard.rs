//! A directory on the node's disk for the changes of a writable root, where memory cannot hold them.
//!
//! It is removed by a process of its own when the program has ended, also by kill -9. That process is started before
//! the container's mount namespace exists, like the file servers, because it must not keep that alive. If it is killed
//! too, as Slurm does with all of a step, the user's next such run removes what is left: a directory that bears our
//! mark and whose lock, which that process held, is free. (systemd-tmpfiles spares locked directories, too.)

use std::ffi::OsStr;
use std::io::{self, PipeWriter, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::mountinfo::open_on_same_mount;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{geteuid, mkdtemp};
use rustix::fs::{AtFlags, Dir, FlockOperation, Mode, OFlags, XattrFlags};
use rustix::fs::{fgetxattr_query, flock, fstat, open, setxattr, unlinkat};
use rustix::io::Errno;

use super::mounts::proc_path;
use super::processes::ContainerProcesses;
use crate::remove_tree::{open_directory, remove};
use crate::sys;
use crate::trace::OrDebug;

/// The extended attribute of our directories, set when they are locked. A name alone may be anybody's.
const MARK: &str = "user.mizzen.changes";
/// The beginning of their names.
const PREFIX: &str = "mizzen-";
/// As many names of the parent are looked at, and as many files of old directories removed, before a run: it must
/// start in good time. What is left is for the next one.
const LIMIT: usize = 65_536;

/// A directory that will be removed.
pub struct Directory {
    /// Where it is.
    pub path: PathBuf,
    /// It is removed when this process has ended, nobody has this open any more, and nobody is left in the container.
    /// The other tasks of a Slurm step may go on when the first, which has made it, has ended.
    guard: Option<PipeWriter>,
}

impl Directory {
    /// Keeps it while this is open: others may still enter the container.
    pub fn hold(&mut self) -> Option<OwnedFd> {
        self.guard.take().map(OwnedFd::from)
    }
}

/// Makes a directory below `parent` that will be removed.
pub fn make_directory(parent: &Path) -> Result<Directory, Failure> {
    let failed = |what: &str, error: io::Error| {
        Failure::caused_by(format!("--writable: {}: {what}", parent.display()), error)
            .or_hint("this kernel needs a local disk for the changes; set TMPDIR to a directory on one")
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened =
        open(parent, flags, Mode::empty()).map_err(|errno| failed("cannot open it", errno.into()))?;
    remove_stale(opened.as_fd());
    let _mask = sys::FileMask::set(0o022);
    let path = mkdtemp(&parent.join(format!("{PREFIX}XXXXXX")))
        .map_err(|errno| failed("cannot make a directory", errno.into()))?;
    let name = path.file_name().unwrap_or_default();
    let guard = guard(opened.as_fd(), name).map_err(|(what, error)| {
        let _ = unlinkat(&opened, name, AtFlags::REMOVEDIR);
        failed(what, error)
    })?;
    Ok(Directory { path, guard: Some(guard) })
}

/// Locks and marks a new directory, and starts the process that removes it.
fn guard(parent: BorrowedFd, name: &OsStr) -> Result<PipeWriter, (&'static str, io::Error)> {
    let because = |what| move |errno: Errno| (what, io::Error::from(errno));
    let directory = open_directory(parent, name).map_err(because("cannot open the new directory"))?;
    flock(&directory, FlockOperation::NonBlockingLockExclusive)
        .map_err(because("cannot lock the new directory"))?;
    setxattr(proc_path(directory.as_fd()), MARK, b"", XattrFlags::empty())
        .map_err(because("cannot hold an overlay's changes"))?;
    remove_at_the_end(parent, name, directory.as_fd())
        .map_err(|error| ("cannot start the process that cleans up", error))
}

fn remove_at_the_end(parent: BorrowedFd, name: &OsStr, directory: BorrowedFd) -> io::Result<PipeWriter> {
    let program = sys::end_of_self()?;
    let (closed, guard) = io::pipe()?;
    sys::spawn_detached(&[program.as_fd(), closed.as_fd(), parent, directory], || {
        let mut ended = [PollFd::new(program.as_fd(), PollFlags::POLLIN)];
        while poll(&mut ended, PollTimeout::NONE) == Err(nix::errno::Errno::EINTR) {}
        let _ = (&closed).read(&mut [0]);
        // It was forked in the container's user namespace, and outside its mounts.
        if let Ok(container) = ContainerProcesses::beside_this() {
            container.wait_until_none();
        }
        let mut all = usize::MAX;
        let _ = remove(parent, name, directory, &mut all);
    })?;
    Ok(guard)
}

/// Removes the directories that runs of this user have left behind.
fn remove_stale(parent: BorrowedFd) {
    if others_rename_in(parent) {
        return;
    }
    // `parent` itself was opened for its name alone.
    let Ok(listed) = open_directory(parent, OsStr::new(".")).and_then(Dir::new) else { return };
    let mut left = LIMIT;
    for entry in listed.flatten().take(LIMIT) {
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if let Some(directory) = stale(parent, name) {
            // One that cannot be removed is in nobody's way.
            remove(parent, name, directory.as_fd(), &mut left).or_debug("old changes of a container stay");
        }
    }
}

/// Whether others can give a directory of this user's one of our names: what was open to their group once may bear our mark. The owner
/// of `parent` can; whoever has a program's files there trusts them. (In the container's user namespace, all others are one.)
fn others_rename_in(parent: BorrowedFd) -> bool {
    let is_safe = |mode: u32| mode & Mode::SVTX.bits() != 0 || mode & 0o022 == 0;
    !fstat(parent).is_ok_and(|stat| is_safe(stat.st_mode))
}

/// A directory of ours that nobody uses any more, now locked by us.
fn stale(parent: BorrowedFd, name: &OsStr) -> Option<OwnedFd> {
    let random = name.as_bytes().strip_prefix(PREFIX.as_bytes())?;
    if random.len() != 6 {
        return None;
    }
    // Everybody can make such names.
    let found = open_on_same_mount(parent, name).ok()?;
    let stat = fstat(&found).ok()?;
    // Whoever can write to a directory of the user's can mark it and move it here. Ours were never open to others.
    if stat.st_uid != geteuid().as_raw() || stat.st_mode & 0o077 != 0 {
        return None;
    }
    let directory = open_directory(found.as_fd(), OsStr::new(".")).ok()?;
    // In this order: a new directory is locked before it is marked.
    fgetxattr_query(&directory, MARK).ok()?;
    flock(&directory, FlockOperation::NonBlockingLockExclusive).ok()?;
    Some(directory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::chmod;
    use std::fs;

    #[test]
    fn removing_follows_no_link_and_has_a_limit() {
        let base = mkdtemp(&std::env::temp_dir().join("changes-XXXXXX")).unwrap();
        let (old, kept) = (base.join("old"), base.join("kept"));
        fs::create_dir_all(old.join("a/b")).unwrap();
        fs::create_dir(&kept).unwrap();
        fs::write(kept.join("file"), "").unwrap();
        for name in ["one", "two"] {
            fs::write(old.join("a/b").join(name), "").unwrap();
        }
        std::os::unix::fs::symlink(&kept, old.join("link")).unwrap();
        chmod(old.join("a/b"), Mode::empty()).unwrap();
        let parent = open(&base, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let remove_at_most = |mut left: usize| {
            let directory = open_directory(parent.as_fd(), OsStr::new("old"))?;
            remove(parent.as_fd(), OsStr::new("old"), directory.as_fd(), &mut left)
        };
        assert_eq!(remove_at_most(4), Err(Errno::BUSY));
        assert!(old.exists());
        assert_eq!(remove_at_most(5), Ok(()));
        assert!(!old.exists() && kept.join("file").exists());
        // Neither is a link taken for a directory of ours.
        std::os::unix::fs::symlink(&kept, base.join("mizzen-abcdef")).unwrap();
        assert!(stale(parent.as_fd(), OsStr::new("mizzen-abcdef")).is_none());
        fs::remove_dir_all(base).unwrap();
    }

    #[test]
    fn a_directory_that_others_could_mark_is_not_taken_for_ours() {
        let base = mkdtemp(&std::env::temp_dir().join("changes-XXXXXX")).unwrap();
        let name = OsStr::new("mizzen-abcdef");
        let moved = base.join(name);
        fs::create_dir(&moved).unwrap();
        setxattr(&moved, MARK, b"", XattrFlags::empty()).unwrap();
        let parent = open(&base, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        for (mode, is_ours) in [(0o777, false), (0o770, false), (0o702, false), (0o750, false), (0o700, true)]
        {
            chmod(&moved, Mode::from_raw_mode(mode)).unwrap();
            assert_eq!(stale(parent.as_fd(), name).is_some(), is_ours, "{mode:o}");
        }
        fs::remove_dir_all(base).unwrap();
    }

    #[test]
    fn where_others_rename_nothing_is_taken_for_ours() {
        let base = mkdtemp(&std::env::temp_dir().join("changes-XXXXXX")).unwrap();
        let parent = open(&base, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        for (mode, stays) in [(0o775, true), (0o777, true), (0o1777, false), (0o755, false), (0o700, false)] {
            chmod(&base, Mode::from_raw_mode(mode)).unwrap();
            let old = base.join("mizzen-abcdef");
            fs::create_dir_all(&old).unwrap();
            chmod(&old, Mode::RWXU).unwrap();
            setxattr(&old, MARK, b"", XattrFlags::empty()).unwrap();
            remove_stale(parent.as_fd());
            assert_eq!(old.exists(), stays, "{mode:o}");
        }
        fs::remove_dir_all(base).unwrap();
    }

    #[test]
    fn any_depth_is_removed() {
        let base = mkdtemp(&std::env::temp_dir().join("changes-XXXXXX")).unwrap();
        let parent = open(&base, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        fs::create_dir(base.join("old")).unwrap();
        let mut inner = open_directory(parent.as_fd(), OsStr::new("old")).unwrap();
        for _ in 0..20_000 {
            rustix::fs::mkdirat(&inner, "moved-1", Mode::RWXU).unwrap();
            inner = open_directory(inner.as_fd(), OsStr::new("moved-1")).unwrap();
        }
        let directory = open_directory(parent.as_fd(), OsStr::new("old")).unwrap();
        assert_eq!(remove(parent.as_fd(), OsStr::new("old"), directory.as_fd(), &mut 20_000), Ok(()));
        fs::remove_dir(base).unwrap();
    }
}
