//! Who else has a file open. The kernel tells it to those who ask for a lease, which only the file's owner and root can.

use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;
use nix::sys::signal::{SigHandler, Signal, signal};

/// Whether another descriptor of the file is open anywhere. False also where the file system has no leases.
pub fn is_open_elsewhere(file: impl AsFd) -> bool {
    is_denied(file, libc::F_WRLCK)
}

/// Whether somebody has the file open for writing. False also where the file system has no leases.
pub fn is_written(file: impl AsFd) -> bool {
    is_denied(file, libc::F_RDLCK)
}

/// Whether nobody has the file open for writing, nor mapped; of one that is opened for reading here. False also where the file
/// system has no leases.
pub fn nobody_writes(file: impl AsFd) -> bool {
    ask(file, libc::F_RDLCK).is_ok()
}

/// Whether the kernel denies a lease because of others.
fn is_denied(file: impl AsFd, kind: i32) -> bool {
    ask(file, kind) == Err(Errno::EAGAIN)
}

/// Asks the kernel for a lease. One that it grants is given back at once; who opens the file in between waits so long, and the kernel
/// sends us a signal.
fn ask(file: impl AsFd, kind: i32) -> Result<(), Errno> {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: installs no handler of ours, and puts back what was there.
    let before = unsafe { signal(Signal::SIGIO, SigHandler::SigIgn) };
    // SAFETY: takes numbers.
    let asked = Errno::result(unsafe { libc::fcntl(fd, libc::F_SETLEASE, kind) });
    // SAFETY: likewise. Without a lease it does nothing.
    unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK) };
    if let Ok(before) = before {
        // SAFETY: as above.
        let _ = unsafe { signal(Signal::SIGIO, before) };
    }
    asked.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn open_files_are_noticed() {
        let path = std::env::temp_dir().join(format!("mizzen-lease-{}", std::process::id()));
        let writer = File::create(&path).unwrap();
        let reader = File::open(&path).unwrap();
        assert!(is_written(&reader) && !nobody_writes(&reader) && is_open_elsewhere(&reader));
        drop(writer);
        assert!(!is_written(&reader) && nobody_writes(&reader) && !is_open_elsewhere(&reader));
        let other = File::open(&path).unwrap();
        assert!(!is_written(&reader) && is_open_elsewhere(&reader));
        drop(other);
        std::fs::remove_file(&path).unwrap();
    }
}
