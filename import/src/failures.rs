//! Errors of streams and files as failures. What goes wrong deep in a stream has its message and hint already; it travels
//! inside an `io::Error`, because that is what readers give.
//!
//! Run by: the user, in the importer.

use std::io;

use mizzen_core::Failure;

use crate::registry;

/// What went wrong with a stream.
pub fn failure_of(error: io::Error) -> Failure {
    match error.raw_os_error() {
        Some(_) => Failure::caused_by("reading it", error),
        None => registry::failure_of(error),
    }
}

/// What went wrong with a file that is being written.
pub fn cannot_write(error: io::Error) -> Failure {
    let number = error.raw_os_error();
    let failure = match number {
        Some(_) => Failure::caused_by("writing it", error),
        None => return failure_of(error),
    };
    match number {
        Some(libc::ENOSPC) => failure.hint("the file system is full; make room, or choose another one"),
        Some(libc::EDQUOT) => failure.hint(
            "your quota is used up; remove something (`mizzen cache prune` \
             removes layers), or choose another file system",
        ),
        Some(libc::EFBIG) => failure.hint("the limit on file sizes is too small: see `ulimit -f`"),
        _ => failure,
    }
}
