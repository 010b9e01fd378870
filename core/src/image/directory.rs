//! Is a directory the root of a system? Asked before a job waits in the queue, and on the node again. Runs as the user.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::{FORMS, shown};
use crate::Failure;

/// Names of which a root file system has at least one.
const ROOT_NAMES: &[&str] = &["bin", "usr", "lib", "etc", "sbin", ".singularity.d", "ch"];
/// How many programs of a directory are looked at.
const PROGRAM_LIMIT: usize = 64;

/// What a directory is instead, and what to do.
type WhyNot = (&'static str, String);

/// Fails for a directory that is no root file system; `path` is its name in messages.
pub fn check(path: &Path, directory: &File) -> Result<(), Failure> {
    match why_no_root(directory, &shown(path)) {
        Ok(None) => Ok(()),
        Ok(Some((what, hint))) => {
            Err(Failure::new(format!("{}: not an image ({what})", shown(path))).hint(hint))
        }
        Err(error) => Err(Failure::caused_by(format!("{}: cannot read", shown(path)), error)),
    }
}

fn why_no_root(directory: &File, name: &str) -> io::Result<Option<WhyNot>> {
    // What was opened, whatever its path means by now.
    let place = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
    let has = |name: &str| match place.join(name).symlink_metadata() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    };
    for name in ROOT_NAMES {
        if has(name)? {
            return Ok(None);
        }
    }
    if has("oci-layout")? {
        let hint = format!("make an image of it: mizzen import oci:{name}");
        return Ok(Some(("an OCI image layout, still in layers", hint)));
    }
    if has("rootfs")? {
        return Ok(Some(("a bundle that contains one", format!("use {name}/rootfs"))));
    }
    let mut entries = fs::read_dir(&place)?.peekable();
    if entries.peek().is_none() {
        return Ok(Some(("an empty directory", FORMS.to_owned())));
    }
    // An image may consist of one static program. A script needs an interpreter: a folder of scripts is none.
    let programs = entries.filter_map(Result::ok).filter(|entry| {
        entry.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    });
    if programs.take(PROGRAM_LIMIT).any(|entry| is_elf(&entry.path()).unwrap_or(false)) {
        return Ok(None);
    }
    let hint = "the directory must be the root of a system, in which programs and their libraries are";
    Ok(Some(("a directory without bin, usr, lib, etc or sbin", hint.to_owned())))
}

fn is_elf(program: &Path) -> io::Result<bool> {
    // Something else may stand there by now.
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW | libc::O_NOCTTY;
    let mut file = File::options().read(true).custom_flags(flags).open(program)?;
    let mut head = [0; 4];
    file.read_exact(&mut head)?;
    Ok(&head == b"\x7fELF")
}
