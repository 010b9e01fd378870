//! Root without root's powers: for programs of a container in which the user is called root, the calls by which files and processes
//! get other owners appear to succeed. Package managers make these calls for every file; the user namespace knows one user, so the
//! kernel would refuse them, and the package with them. Nothing is gained by it: what is not done has no effect.
//!
//! Runs as the user, inside, just before a program is executed.

use std::io;

use mizzen_squashfs::fuse::filter::{Answer, install_answers};

const fn succeeds(call: libc::c_long) -> Answer {
    Answer { call, if_bits: None, errno: 0 }
}

/// A device is not made; a pipe, a socket and a file are.
const fn makes_device(call: libc::c_long, mode_argument: u32, kind: u32) -> Answer {
    Answer { call, if_bits: Some((mode_argument, libc::S_IFMT, kind)), errno: 0 }
}

/// Calls that appear to succeed. Those by which a program asks who it is tell the truth: root.
const ANSWERS: &[Answer] = &[
    #[cfg(target_arch = "x86_64")]
    succeeds(libc::SYS_chown),
    #[cfg(target_arch = "x86_64")]
    succeeds(libc::SYS_lchown),
    succeeds(libc::SYS_fchown),
    succeeds(libc::SYS_fchownat),
    succeeds(libc::SYS_setuid),
    succeeds(libc::SYS_setgid),
    succeeds(libc::SYS_setreuid),
    succeeds(libc::SYS_setregid),
    succeeds(libc::SYS_setresuid),
    succeeds(libc::SYS_setresgid),
    succeeds(libc::SYS_setgroups),
    #[cfg(target_arch = "x86_64")]
    makes_device(libc::SYS_mknod, 1, libc::S_IFCHR),
    #[cfg(target_arch = "x86_64")]
    makes_device(libc::SYS_mknod, 1, libc::S_IFBLK),
    makes_device(libc::SYS_mknodat, 2, libc::S_IFCHR),
    makes_device(libc::SYS_mknodat, 2, libc::S_IFBLK),
];

/// From now on, for this process and what it executes.
pub fn pretend() -> io::Result<()> {
    install_answers(ANSWERS)
}
