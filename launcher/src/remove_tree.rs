//! Removes a directory with everything in it, whatever modes programs have left there. Runs as the user on the host.

use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, Mode, OFlags, RenameFlags};
use rustix::fs::{chmod, fstat, openat, renameat_with, unlinkat};
use rustix::io::{Errno, Result};

/// Removes a directory with everything in it; at most `left` names.
pub fn remove(parent: BorrowedFd, name: &OsStr, directory: BorrowedFd, left: &mut usize) -> Result<()> {
    empty(directory, left)?;
    unlinkat(parent, name, AtFlags::REMOVEDIR)
}

/// Removes what is in a directory. Links are removed like files, never followed. A directory in a directory is moved up first,
/// so that no depth costs a descriptor or a part of the stack for each level.
fn empty(directory: BorrowedFd, left: &mut usize) -> Result<()> {
    let mut directories = remove_files(directory, left)?;
    let mut moved = 0_u64;
    while let Some(name) = directories.pop() {
        let inner = open_removable(directory, &name)?;
        for found in remove_files(inner.as_fd(), left)? {
            if unlinkat(&inner, &found, AtFlags::REMOVEDIR) == Err(Errno::NOTEMPTY) {
                // Its own `..` changes: it must be writable.
                drop(open_removable(inner.as_fd(), &found)?);
                directories.push(move_up(inner.as_fd(), &found, directory, &mut moved)?);
            }
        }
        unlinkat(directory, &name, AtFlags::REMOVEDIR)?;
    }
    Ok(())
}

/// Removes everything in a directory but the directories, and returns their names.
fn remove_files(directory: BorrowedFd, left: &mut usize) -> Result<Vec<CString>> {
    let mut directories = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name: &CStr = entry.file_name();
        if [c".", c".."].contains(&name) {
            continue;
        }
        *left = left.checked_sub(1).ok_or(Errno::BUSY)?;
        match unlinkat(directory, name, AtFlags::empty()) {
            Err(Errno::ISDIR) => directories.push(name.to_owned()),
            outcome => outcome?,
        }
    }
    Ok(directories)
}

/// Gives a directory a name that is free in another one.
fn move_up(from: BorrowedFd, name: &CStr, to: BorrowedFd, moved: &mut u64) -> Result<CString> {
    loop {
        *moved += 1;
        let free = CString::new(format!("moved-{moved}")).unwrap_or_default();
        match renameat_with(from, name, to, &free, RenameFlags::NOREPLACE) {
            Err(Errno::EXIST) => {}
            outcome => return outcome.map(|()| free),
        }
    }
}

/// Opens a directory whose content is to be removed, whatever mode the program, or the overlay, gave it.
fn open_removable(directory: BorrowedFd, name: &CStr) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = openat(directory, name, flags, Mode::empty())?;
    if fstat(&found)?.st_mode & 0o700 != 0o700 {
        chmod(format!("/proc/self/fd/{}", found.as_raw_fd()), Mode::RWXU)?;
    }
    open_directory(found.as_fd(), OsStr::new("."))
}

pub fn open_directory(parent: BorrowedFd, name: &OsStr) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(parent, name, flags, Mode::empty())
}
