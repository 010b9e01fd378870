//! Which standard streams this process was started without. Rust's start-up puts /dev/null in their places, so that no
//! file that is opened later is taken for one; what is written there is lost without an error.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

static STDOUT_WAS_OPEN: AtomicBool = AtomicBool::new(true);

// SAFETY: a function without arguments, as the C library expects in this table; musl passes none, and glibc's are ignored.
#[unsafe(link_section = ".init_array")]
#[used]
static LOOK: extern "C" fn() = look;

/// Runs before Rust's start-up, and so before there is anything that it could use but system calls.
extern "C" fn look() {
    // SAFETY: asks for the flags of a descriptor number.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
    STDOUT_WAS_OPEN.store(flags >= 0, Ordering::Relaxed);
}

/// Refuses to write a result to a standard output that was closed.
pub fn check_stdout() -> io::Result<()> {
    match STDOUT_WAS_OPEN.load(Ordering::Relaxed) {
        true => Ok(()),
        false => Err(io::Error::from_raw_os_error(libc::EBADF)),
    }
}

/// Closes what was put in the place of a closed standard output, for a program that takes this one's place: its result would be lost.
pub fn leave_stdout_closed() {
    if check_stdout().is_err() {
        // SAFETY: a number, and an error if nothing has it; nothing of this process is written there.
        unsafe { libc::close(libc::STDOUT_FILENO) };
    }
}
