//! The few system calls that no crate wraps safely. The only unsafe code of the launcher. Runs as the user.
#![allow(unsafe_code)]

mod ended;
mod inherited;
mod leases;
mod mapped;
mod scm_rights;
mod streams;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::signal::{SigHandler, SigSet, Signal};
use nix::sys::stat::{Mode, umask};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, dup2_stderr, dup2_stdin, dup2_stdout, fork, setsid};

pub use ended::{end_of, end_of_self, is_missing};
pub use inherited::{is_ignored, is_pmi_socket, is_sealed_memory, is_seqpacket, is_user_namespace};
pub use leases::{is_open_elsewhere, is_written, nobody_writes};
pub use mapped::Mapped;
pub use scm_rights::{open_in_child, receive_descriptors, send_descriptors};
pub use streams::{check_stdout, leave_stdout_closed};

/// Forks. The caller promises to be the only thread, so that the child may do anything.
fn fork_single_threaded() -> io::Result<ForkResult> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("fork in a program with several threads"));
    }
    // SAFETY: no other thread exists that could hold a lock in the child.
    Ok(unsafe { fork() }?)
}

/// Runs `work` in a process that is nobody's child: the program that this process becomes must not find a child
/// that it did not start. The process has its own session, blocks every signal but KILL and STOP, and has no
/// descriptors but those in `keep` and /dev/null as its standard streams: a forgotten one would keep alive what
/// others wait to see ended.
pub fn spawn_detached(keep: &[BorrowedFd], work: impl FnOnce()) -> io::Result<()> {
    spawn_orphan(|| {
        keep_only(keep);
        work();
    })?
    .finish()
}

/// The same for two processes: one that runs `work` and exits with its result, and its parent, which runs `watch`, or
/// `unstarted` if the other cannot be started. Each has descriptors of its own. The caller goes on meanwhile.
pub fn spawn_watched(
    keep: &[BorrowedFd],
    work: impl FnOnce() -> i32,
    keep_watching: &[BorrowedFd],
    watch: impl FnOnce(Pid),
    unstarted: impl FnOnce(&io::Error),
) -> io::Result<Starting> {
    spawn_orphan(|| {
        // A caller may ignore the end of children; then nobody would hear how this one ended.
        let _ = reset_signal(Signal::SIGCHLD);
        match fork_again() {
            Ok(ForkResult::Child) => {
                keep_only(keep);
                exit_now(std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or(PANICKED))
            }
            Ok(ForkResult::Parent { child }) => {
                keep_only(keep_watching);
                watch(child);
            }
            Err(error) => unstarted(&error),
        }
    })
}

/// The exit code of Rust programs that end by a panic.
const PANICKED: i32 = 101;

/// A process that is being started as nobody's child: the one between, which is a child for a moment.
#[must_use]
pub struct Starting(Option<Pid>);

impl Starting {
    /// Waits until it is nobody's child, or could not be started.
    pub fn finish(mut self) -> io::Result<()> {
        // The one between exits with the error of its own fork. Whoever ignores SIGCHLD does not learn it.
        match self.0.take().map(|between| waitpid(between, None)) {
            Some(Ok(WaitStatus::Exited(_, errno))) if errno != 0 => Err(io::Error::from_raw_os_error(errno)),
            _ => Ok(()),
        }
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        if let Some(between) = self.0 {
            let _ = waitpid(between, None);
        }
    }
}

fn spawn_orphan(work: impl FnOnce()) -> io::Result<Starting> {
    match fork_single_threaded()? {
        ForkResult::Parent { child } => Ok(Starting(Some(child))),
        ForkResult::Child => {
            let _ = setsid();
            let _ = SigSet::all().thread_block();
            let forked = fork_again();
            if let Ok(ForkResult::Child) = forked {
                // A panic ends this process and must not run the parent's destructors.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            }
            exit_now(forked.err().map_or(0, |error| error.raw_os_error().unwrap_or(libc::EAGAIN)))
        }
    }
}

/// Forks a process that was itself just forked.
fn fork_again() -> io::Result<ForkResult> {
    // SAFETY: a forked process has one thread.
    Ok(unsafe { fork() }?)
}

/// Ends a forked process at once, without the exit handlers and destructors of the program it was forked from.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: takes a number, and does not return.
    unsafe { libc::_exit(code) }
}

/// Closes every descriptor but these; the standard streams become /dev/null. In this order: at the limit on open files
/// nothing can be opened before something is closed.
fn keep_only(keep: &[BorrowedFd]) {
    let mut kept: Vec<u32> = keep.iter().map(|fd| fd.as_raw_fd() as u32).collect();
    kept.sort_unstable();
    let mut first = 3;
    for fd in kept {
        if first < fd {
            close_between(first, fd - 1);
        }
        first = first.max(fd + 1);
    }
    close_between(first, u32::MAX);
    if let Ok(null) = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null") {
        let _ = (dup2_stdin(&null), dup2_stdout(&null), dup2_stderr(&null));
    }
}

/// Closes all descriptors from one to another, in a forked process: the objects that own them belong to the process that it was
/// forked from; here none of them is used or dropped any more.
fn close_between(first: u32, last: u32) {
    // SAFETY: takes three numbers; the owners see above.
    if unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } == 0 {
        return;
    }
    // Linux before 5.9.
    let within = |fd: &i32| u32::try_from(*fd).is_ok_and(|fd| (first..=last).contains(&fd));
    for fd in open_descriptors().into_iter().filter(within) {
        // SAFETY: the same.
        unsafe { libc::close(fd) };
    }
}

fn open_descriptors() -> Vec<i32> {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Gives a signal its default effect again: Rust's start-up ignores SIGPIPE, and the caller may ignore SIGCHLD.
pub fn reset_signal(signal: Signal) -> io::Result<()> {
    // SAFETY: installs no handler.
    unsafe { nix::sys::signal::signal(signal, SigHandler::SigDfl) }?;
    Ok(())
}

/// Ignores a signal from now on.
pub fn ignore_signal(signal: Signal) {
    // SAFETY: installs no handler.
    let _ = unsafe { nix::sys::signal::signal(signal, SigHandler::SigIgn) };
}

/// Ignores a signal as long as it lives.
pub struct IgnoreSignal(Signal, Option<SigHandler>);

impl IgnoreSignal {
    /// From now on.
    pub fn new(signal: Signal) -> IgnoreSignal {
        // SAFETY: installs no handler.
        IgnoreSignal(signal, unsafe { nix::sys::signal::signal(signal, SigHandler::SigIgn) }.ok())
    }
}

impl Drop for IgnoreSignal {
    fn drop(&mut self) {
        if let Some(before) = self.1 {
            // SAFETY: what held before; this program has no handlers.
            let _ = unsafe { nix::sys::signal::signal(self.0, before) };
        }
    }
}

/// Another mask for new files as long as it lives: the user's is for the program's files, and may keep their owner from
/// opening them.
pub struct FileMask(Mode);

impl FileMask {
    /// From now on.
    pub fn set(mask: u32) -> FileMask {
        FileMask(umask(Mode::from_bits_truncate(mask)))
    }
}

impl Drop for FileMask {
    fn drop(&mut self) {
        umask(self.0);
    }
}

/// Who has sent a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    /// The kernel, as for a key on the terminal, which reaches all processes in the foreground.
    Kernel,
    /// A process.
    Process(i32),
}

/// Waits for one of the blocked signals; tells who has sent it.
pub fn wait_for_signal(signals: &SigSet) -> io::Result<(Signal, Sender)> {
    // SAFETY: a C structure of numbers for which zeros are valid.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    loop {
        // SAFETY: both pointers are to live structures of the right type.
        let number = unsafe { libc::sigwaitinfo(signals.as_ref(), &raw mut info) };
        if number >= 0 {
            let sender = match info.si_code {
                libc::SI_KERNEL => Sender::Kernel,
                // SAFETY: sent by a process, or SIGCHLD: both have the number of one.
                _ => Sender::Process(unsafe { info.si_pid() }),
            };
            return Ok((Signal::try_from(number)?, sender));
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Lets a descriptor that was inherited by number pass through exec. One that is not open is no matter.
pub fn keep_through_exec(fd: i32) {
    // SAFETY: clears a flag of a descriptor number.
    unsafe { libc::fcntl(fd, libc::F_SETFD, 0) };
}

/// Forks a child that runs `work` and exits with its result; returns the child's pid.
pub fn spawn_child(work: impl FnOnce() -> i32) -> io::Result<Pid> {
    match fork_single_threaded()? {
        ForkResult::Parent { child } => Ok(child),
        ForkResult::Child => {
            exit_now(std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or(PANICKED))
        }
    }
}

/// Lets others go first on CPUs and disks. Not the idle class: on a node whose job keeps all CPUs busy that would get nothing at all.
pub fn lower_priority() {
    const NICE: libc::c_int = 10;
    const WHO_PROCESS: libc::c_int = 1;
    const LOWEST_BEST_EFFORT: libc::c_int = 2 << 13 | 7;
    // SAFETY: takes numbers.
    unsafe { libc::syscall(libc::SYS_setpriority, libc::PRIO_PROCESS, 0, NICE) };
    // SAFETY: takes numbers.
    unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, LOWEST_BEST_EFFORT) };
}

/// A descriptor that becomes readable when this process has ended.
pub fn pidfd_of_self() -> io::Result<OwnedFd> {
    pidfd_of(nix::unistd::getpid().as_raw())
}

/// Takes over a descriptor that was inherited under a known number; none if it is not what it must be. Only inherited ones
/// pass through exec and have no flag to be closed there; all that this program opens has it, and what was taken over gets
/// it. So none gets two owners.
pub fn own_inherited(fd: i32, is_right: impl FnOnce(BorrowedFd) -> bool) -> io::Result<Option<OwnedFd>> {
    // SAFETY: reads a flag of a descriptor, or fails because there is none.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
    if fd <= 2 || flags < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: open, as was just seen; this program closes nothing meanwhile.
    if !is_right(unsafe { BorrowedFd::borrow_raw(fd) }) {
        return Ok(None);
    }
    // SAFETY: sets a flag of an open descriptor.
    if flags != 0 || unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } != 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: open, and nobody's; see above.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Takes over a descriptor that came in a message.
///
/// # Safety
/// The kernel must just have made it for this process, and nobody else may own it.
unsafe fn own_received(fd: i32) -> OwnedFd {
    // SAFETY: the caller's promise.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// A descriptor that becomes readable when the process has ended.
pub fn pidfd_of(pid: i32) -> io::Result<OwnedFd> {
    pidfd_open(pid, 0)
}

/// The same for a thread. EINVAL before Linux 6.9.
pub fn pidfd_of_thread(tid: i32) -> io::Result<OwnedFd> {
    const PIDFD_THREAD: i32 = libc::O_EXCL;
    pidfd_open(tid, PIDFD_THREAD)
}

fn pidfd_open(pid: i32, flags: i32) -> io::Result<OwnedFd> {
    // SAFETY: takes two numbers; the result is checked.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else owns. The kernel has set close-on-exec.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// A descriptor of another process of the same user. ENOSYS before Linux 5.6.
pub fn descriptor_of(process: &OwnedFd, number: i32) -> io::Result<OwnedFd> {
    // SAFETY: takes a descriptor that is open and two numbers; the result is checked.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else owns. The kernel has set close-on-exec.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Lets processes of the same user take descriptors of this one, where the kernel would allow that to its ancestors alone (Yama).
pub fn share_descriptors() {
    const PR_SET_PTRACER: libc::c_int = 0x5961_6d61;
    const PR_SET_PTRACER_ANY: libc::c_ulong = libc::c_ulong::MAX;
    // SAFETY: takes numbers. Without Yama it fails, and nothing is forbidden.
    unsafe { libc::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0) };
}

/// The user namespace in which another one was made. EPERM if that is not below our own.
pub fn parent_namespace(namespace: BorrowedFd) -> io::Result<OwnedFd> {
    const NS_GET_PARENT: libc::Ioctl = 0xb702;
    // SAFETY: takes a descriptor and a number; the result is checked.
    let fd = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_PARENT) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else owns. The kernel has set close-on-exec.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Waits for the end of a process that need not be a child. Before Linux 5.3 it looks from time to time.
pub fn wait_for_end(pid: i32) {
    match pidfd_of(pid) {
        Ok(process) => {
            let mut ended = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
            while poll(&mut ended, PollTimeout::NONE) == Err(Errno::EINTR) {}
        }
        Err(error) if is_missing(&error) => {
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
        // It has ended.
        Err(_) => {}
    }
}

/// Marks every descriptor from `first` on to be closed at exec.
pub fn close_on_exec_from(first: u32) -> io::Result<()> {
    // SAFETY: takes three numbers; closes nothing now.
    let done = unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if done == 0 {
        return Ok(());
    }
    // Linux before 5.11.
    for fd in open_descriptors().into_iter().filter(|fd| i64::from(*fd) >= i64::from(first)) {
        // SAFETY: sets a flag of a descriptor number; a number that is closed by now gives EBADF.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
    Ok(())
}

/// Closes every descriptor from `first` on, in a process that needs none of them any more.
pub fn close_from(first: u32) {
    close_between(first, u32::MAX);
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
    let done = unsafe { libc::ioctl(socket, libc::SIOCSIFFLAGS as libc::Ioctl, &raw const request) };
    let outcome = if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: our own descriptor, closed once.
    unsafe { libc::close(socket) };
    outcome
}

/// From now on the calling thread gets what others leave of the processors and the disks.
pub fn work_in_background() {
    const IOPRIO_WHO_PROCESS: libc::c_int = 1;
    const IDLE: libc::c_int = 3 << 13;
    // To the kernel a thread is a process here. It may always become less. With 19 a node whose processors are all busy would
    // let it wait for seconds, with chunks that others want.
    let _ = rustix::process::setpriority_process(None, 10);
    // SAFETY: takes three numbers; 0 is the calling thread.
    unsafe { libc::syscall(libc::SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, IDLE) };
}

/// Task 0 may be pinned to one CPU; what works for all may use all that the step has, to which the kernel limits this.
pub fn use_all_cpus() {
    let mut all = CpuSet::new();
    for cpu in 0..CpuSet::count() {
        let _ = all.set(cpu);
    }
    let _ = sched_setaffinity(Pid::from_raw(0), &all);
}

/// Lets the disk begin to write a part of a file. It only makes a later fsync shorter.
pub fn start_writeback(file: &std::fs::File, offset: u64, length: u64) {
    let (Ok(offset), Ok(length)) = (offset.try_into(), length.try_into()) else { return };
    // SAFETY: takes a descriptor that is open and three numbers.
    unsafe { libc::sync_file_range(file.as_raw_fd(), offset, length, libc::SYNC_FILE_RANGE_WRITE) };
}
