//! A file for what is on its way, which has no name and goes with the process.
//!
//! Run by: the user, in the exporter.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use mizzen_core::Failure;
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;

use super::shown;

const HINT: &str =
    "the layer is kept there until it is complete; TMPDIR names another place if the archive goes to a pipe";

/// Makes a file in this directory.
pub fn create(directory: &Path) -> Result<File, Failure> {
    let mode = Mode::from_raw_mode(0o600);
    let failed = |error| cannot_write(directory, error);
    match openat(CWD, directory, OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC, mode) {
        Ok(file) => return Ok(file.into()),
        // File systems without nameless files.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {}
        Err(errno) => return Err(failed(errno.into())),
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos());
    let path = directory.join(format!(".mizzen-tmp-layer-{}-{now}", std::process::id()));
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = openat(CWD, &path, flags, mode).map_err(|errno| failed(errno.into()))?;
    fs::remove_file(&path).map_err(failed)?;
    Ok(file.into())
}

/// What to say if there is no space there.
pub fn cannot_write(directory: &Path, error: io::Error) -> Failure {
    Failure::caused_by(format!("{}: cannot write the layer", shown(directory)), error).or_hint(HINT)
}
