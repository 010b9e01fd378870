//! The system calls that a server may make once it reads an image: a seccomp filter. The decompressors are C and read
//! foreign bytes; whoever takes one over gets memory, the image, and the connection to the kernel, and nothing else.
//!
//! A thread that has the filter hands it on to the threads that it starts.
//!
//! The launcher makes another filter with the same means: one that answers some calls of a container's programs.
//!
//! Run by: the user, in the FUSE server process and in the launcher.

use std::io::{self, Write};

use libc::{c_long, sock_filter, sock_fprog};

use super::device::CLONE as FUSE_DEV_IOC_CLONE;

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: Option<u32> = Some(0xc000_003e); // AUDIT_ARCH_X86_64
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: Option<u32> = Some(0xc000_00b7); // AUDIT_ARCH_AARCH64
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const ARCHITECTURE: Option<u32> = None;

/// Whatever their arguments are. The kernel compares from the first to the last, so those of every request come first.
const ALLOWED: &[c_long] = &[
    libc::SYS_read,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_futex,
    // Memory; with mmap and mprotect below.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    // The device arrives; damage is reported.
    libc::SYS_recvmsg,
    libc::SYS_write,
    libc::SYS_close,
    // The beginning and the end of threads and of the process; with clone below.
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_restart_syscall,
    // The seeds of hash tables; time, where there is no vDSO.
    libc::SYS_getrandom,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
];

/// Answered with an error: C libraries try these, and can do without.
const REFUSED: &[(c_long, i32)] = &[
    // Its arguments are in memory, where no filter sees them. ENOSYS makes the C library use clone.
    (libc::SYS_clone3, libc::ENOSYS),
    // abort() of musl; without it, it ends in a fault.
    (libc::SYS_tkill, libc::EPERM),
    // The number of CPUs for glibc's malloc, the backtrace of a panic.
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_open, libc::EPERM),
    (libc::SYS_openat, libc::EPERM),
    (libc::SYS_prctl, libc::EINVAL),
];

/// A call that is allowed if these bits of an argument are as they should be.
struct Condition {
    call: c_long,
    argument: u32,
    bits: u32,
    value: u32,
}

const NEW_NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET;

fn conditions() -> [Condition; 9] {
    let if_bits = |call, argument, bits: i32, value: i32| Condition {
        call,
        argument,
        bits: bits as u32,
        value: value as u32,
    };
    [
        if_bits(libc::SYS_mmap, 2, libc::PROT_EXEC, 0),
        if_bits(libc::SYS_mprotect, 2, libc::PROT_EXEC, 0),
        // Threads, and no processes.
        if_bits(libc::SYS_clone, 0, libc::CLONE_THREAD | NEW_NAMESPACES, libc::CLONE_THREAD),
        // More queues for the connection, or the same one again.
        if_bits(libc::SYS_ioctl, 1, !0, FUSE_DEV_IOC_CLONE as i32),
        if_bits(libc::SYS_fcntl, 1, !0, libc::F_DUPFD_CLOEXEC),
        // musl sets the flag of such a descriptor once more.
        if_bits(libc::SYS_fcntl, 1, !0, libc::F_SETFD),
        // With debug assertions the standard library looks before it closes a descriptor.
        if_bits(libc::SYS_fcntl, 1, !0, libc::F_GETFD),
        // A lock that says who serves a container which several steps are in.
        if_bits(libc::SYS_flock, 1, !0, libc::LOCK_EX),
        // abort() of glibc.
        if_bits(libc::SYS_tgkill, 0, !0, std::process::id() as i32),
    ]
}

/// The same as [`install`], but a kernel that has no filters is no error: then there is none.
pub fn confine(more: &[c_long]) -> io::Result<()> {
    match install(more) {
        Err(error) if is_missing(&error) => Ok(()),
        done => done,
    }
}

/// Whether an error says that the kernel has no filters.
pub fn is_missing(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported
        || matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL))
}

/// From now on this thread, and those that it starts, can make no other system calls: the kernel ends the process by SIGSYS.
/// Needs no_new_privs. An error changes nothing. `more` are calls that this server needs
/// beside those of all servers ([`crate::ByteSource::system_calls`]).
pub fn install(more: &[c_long]) -> io::Result<()> {
    let architecture = ARCHITECTURE.ok_or(io::ErrorKind::Unsupported)?;
    // The crate asks the kernel when it is asked first, by calls that are refused from now on.
    let _ = rustix::param::page_size();
    // A backtrace, which users can ask for by a variable, takes files to read.
    std::panic::set_hook(Box::new(|panic| {
        let _ = writeln!(io::stderr(), "{panic}");
    }));
    load_program(program(architecture, more))
}

/// A system call that is answered without being made.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    /// Its number.
    pub call: c_long,
    /// Only if these bits of an argument have this value: its index, the bits, the value.
    pub if_bits: Option<(u32, u32, u32)>,
    /// The error that it is answered with; 0 is success.
    pub errno: u16,
}

/// From now on these system calls, of this machine's own ABI, are answered in this process and its children, and all others are
/// made. Needs no_new_privs. An error means that the kernel has no filters, and changes nothing.
pub fn install_answers(answers: &[Answer]) -> io::Result<()> {
    let architecture = ARCHITECTURE.ok_or(io::ErrorKind::Unsupported)?;
    load_program(answering_program(architecture, answers))
}

fn answering_program(architecture: u32, answers: &[Answer]) -> Vec<sock_filter> {
    let allow = libc::SECCOMP_RET_ALLOW;
    let mut program =
        vec![step(LOAD, ARCH), jump(architecture, 1, 0), step(RETURN, allow), step(LOAD, NUMBER)];
    for Answer { call, if_bits, errno } in answers {
        let answer = step(RETURN, libc::SECCOMP_RET_ERRNO | u32::from(*errno));
        match if_bits {
            None => program.extend([jump(*call as u32, 0, 1), answer]),
            Some((argument, bits, value)) => program.extend([
                jump(*call as u32, 0, 5),
                step(LOAD, ARGUMENTS + 8 * argument),
                step(AND, *bits),
                jump(*value, 0, 1),
                answer,
                step(LOAD, NUMBER),
            ]),
        }
    }
    program.push(step(RETURN, allow));
    program
}

fn load_program(mut program: Vec<sock_filter>) -> io::Result<()> {
    let length = program.len().try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
    let program = sock_fprog { len: length, filter: program.as_mut_ptr() };
    // Without the flag, kernels before 5.16 slow down every process that has a filter, against attacks (speculative store
    // bypass) on secrets which there are none of here.
    load(&program, libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW).or_else(|_| load(&program, 0))
}

#[allow(unsafe_code)]
fn load(program: &sock_fprog, flags: libc::c_ulong) -> io::Result<()> {
    // SAFETY: the kernel reads `len` instructions behind the pointer of the structure, which live as long as the caller's
    // vector, and checks them.
    let done = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, std::ptr::from_ref(program))
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

// linux/filter.h: load a word of `struct seccomp_data`, mask it, compare it, end.
const LOAD: u16 = 0x20;
const AND: u16 = 0x54;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;

/// Offsets in `struct seccomp_data`; the low half of an argument comes first.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
const ARGUMENTS: u32 = 16;

/// The filter. Calls of another architecture's ABI have other numbers: they end the process too, and so do those of x32,
/// whose numbers are not in the table.
fn program(architecture: u32, more: &[c_long]) -> Vec<sock_filter> {
    let (allow, kill) = (libc::SECCOMP_RET_ALLOW, libc::SECCOMP_RET_KILL_PROCESS);
    let mut program =
        vec![step(LOAD, ARCH), jump(architecture, 1, 0), step(RETURN, kill), step(LOAD, NUMBER)];
    for call in ALLOWED.iter().chain(more) {
        program.extend([jump(*call as u32, 0, 1), step(RETURN, allow)]);
    }
    for (call, errno) in REFUSED {
        let refuse = libc::SECCOMP_RET_ERRNO | *errno as u32;
        program.extend([jump(*call as u32, 0, 1), step(RETURN, refuse)]);
    }
    for Condition { call, argument, bits, value } in conditions() {
        program.extend([
            jump(call as u32, 0, 5),
            step(LOAD, ARGUMENTS + 8 * argument),
            step(AND, bits),
            jump(value, 0, 1),
            step(RETURN, allow),
            // The same call may have another condition.
            step(LOAD, NUMBER),
        ]);
    }
    program.push(step(RETURN, kill));
    program
}

fn step(code: u16, k: u32) -> sock_filter {
    sock_filter { code, jt: 0, jf: 0, k }
}

/// Passes over so many instructions if the loaded word is `k`, or if it is not.
fn jump(k: u32, if_equal: u8, otherwise: u8) -> sock_filter {
    sock_filter { code: JUMP_IF_EQUAL, jt: if_equal, jf: otherwise, k }
}
