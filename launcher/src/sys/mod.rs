//! The few system calls that no crate wraps safely. The only unsafe code of the launcher; runs as the user.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::sys::signal::SigSet;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork, setsid};

/// Forks. The caller promises to be the only thread, so that the child may do anything.
fn fork_single_threaded() -> io::Result<ForkResult> {
    // SAFETY: no other thread exists that could hold a lock in the child; `is_single_threaded` is checked.
    if !is_single_threaded() {
        return Err(io::Error::other("fork in a program with several threads"));
    }
    // SAFETY: see above.
    Ok(unsafe { fork() }?)
}

fn is_single_threaded() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1)
}

/// Runs `work` in a process that is nobody's child: the program that this process becomes must not find a child
/// that it did not start. The process has its own session and blocks every signal but KILL and STOP.
pub fn spawn_detached(work: impl FnOnce()) -> io::Result<()> {
    match fork_single_threaded()? {
        ForkResult::Parent { child } => {
            waitpid(child, None)?;
            Ok(())
        }
        ForkResult::Child => {
            let _ = setsid();
            let _ = SigSet::all().thread_block();
            if let Ok(ForkResult::Child) = fork_single_threaded() {
                // A panic ends this process and must not run the parent's destructors.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            }
            // SAFETY: ends a forked process at once, without the exit handlers of the program it was forked from.
            unsafe { libc::_exit(0) }
        }
    }
}

/// Forks a child that runs `work` and exits with its result; returns the child's pid.
pub fn spawn_child(work: impl FnOnce() -> i32) -> io::Result<nix::unistd::Pid> {
    match fork_single_threaded()? {
        ForkResult::Parent { child } => Ok(child),
        ForkResult::Child => {
            let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or(125);
            // SAFETY: as in `spawn_detached`.
            unsafe { libc::_exit(code) }
        }
    }
}

/// A descriptor that becomes readable when this process has ended.
pub fn pidfd_of_self() -> io::Result<OwnedFd> {
    // SAFETY: takes two numbers; the result is checked.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else owns. The kernel has set close-on-exec.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Marks every descriptor from `first` on to be closed at exec.
pub fn close_on_exec_from(first: u32) -> io::Result<()> {
    // SAFETY: takes three numbers; closes nothing now.
    let done = unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if done == 0 {
        return Ok(());
    }
    // Linux before 5.11.
    let listed: Vec<i32> = std::fs::read_dir("/proc/self/fd")?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    for fd in listed.into_iter().filter(|fd| i64::from(*fd) >= i64::from(first)) {
        // SAFETY: sets a flag of a descriptor number; a number that is closed by now gives EBADF.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
    Ok(())
}

/// Gives up all capabilities of the calling process.
pub fn drop_capabilities() -> io::Result<()> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    const VERSION_3: u32 = 0x2008_0522;
    let header = Header { version: VERSION_3, pid: 0 };
    let empty = [0u32; 6]; // effective, permitted, inheritable, two words each
    // SAFETY: the kernel reads a header and, for version 3, two sets of three words.
    let done = unsafe { libc::syscall(libc::SYS_capset, &raw const header, empty.as_ptr()) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Adds restrictions (MOUNT_ATTR_…) to a mount and all mounts below it. ENOSYS before Linux 5.12.
pub fn restrict_mounts(mount: BorrowedFd, attributes: u64) -> io::Result<()> {
    #[repr(C)]
    struct MountAttr {
        set: u64,
        clear: u64,
        propagation: u64,
        userns_fd: u64,
    }
    let attr = MountAttr { set: attributes, clear: 0, propagation: 0, userns_fd: 0 };
    let flags = libc::AT_EMPTY_PATH | libc::AT_RECURSIVE;
    // SAFETY: the kernel reads an empty path and a structure of the given size.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attr,
            size_of::<MountAttr>(),
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Brings the loopback interface of the current network namespace up.
pub fn loopback_up() -> io::Result<()> {
    // SAFETY: makes a socket; the result is checked.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a C structure of numbers for which zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (place, byte) in request.ifr_name.iter_mut().zip(b"lo") {
        *place = *byte as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: SIOCSIFFLAGS reads an ifreq.
    let done = unsafe { libc::ioctl(socket, libc::SIOCSIFFLAGS, &raw const request) };
    let outcome = if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: our own descriptor, closed once.
    unsafe { libc::close(socket) };
    outcome
}
