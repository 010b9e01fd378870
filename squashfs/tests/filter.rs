//! The seccomp filter: what a server does still works, and what it does not need ends the process. Each case runs in a
//! process of its own.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, unsafe_code)]

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use mizzen_squashfs::fuse::filter;

const CASE: &str = "FILTER_TEST_CASE";

/// Runs `work` with the filter, in a new process: a signal, or what it says. In that process every other case is nothing.
fn confined(test: &str, case: &str, work: impl FnOnce()) -> Option<Result<String, i32>> {
    let wanted = std::env::var(CASE).ok();
    if wanted.as_ref().is_some_and(|wanted| wanted != case) {
        return None;
    }
    if wanted.is_some() {
        rustix::thread::set_no_new_privs(true).unwrap();
        filter::install(&[]).unwrap();
        work();
        // SAFETY: ends the process, without the test's harness.
        unsafe { libc::_exit(0) }
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(CASE, case).stdin(Stdio::null());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    Some(match output.status.signal() {
        Some(signal) => Err(signal),
        None if output.status.success() => Ok(text),
        None => panic!("{case}: {}: {text}", output.status),
    })
}

fn call(number: libc::c_long, arguments: [libc::c_long; 3]) -> io::Result<libc::c_long> {
    // SAFETY: the calls of these tests take numbers, or fail.
    match unsafe { libc::syscall(number, arguments[0], arguments[1], arguments[2], 0, 0, 0) } {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}

#[test]
fn what_a_server_does_goes_on() {
    let test = "what_a_server_does_goes_on";
    let (zero, null) =
        (File::open("/dev/zero").unwrap(), File::options().write(true).open("/dev/null").unwrap());
    let text = confined(test, "work", || {
        // Threads, and in them memory of all sizes, hash tables, time and panics.
        let threads: Vec<_> = (0..16)
            .map(|number: usize| {
                std::thread::spawn(move || {
                    let mut memory = Vec::new();
                    for size in (0..26).map(|bits| 1_usize << bits) {
                        memory.resize(size, number as u8);
                        memory.shrink_to_fit();
                    }
                    let table: std::collections::HashMap<usize, usize> = (0..1000).map(|n| (n, n)).collect();
                    std::thread::sleep(Duration::from_millis(1));
                    let caught = std::panic::catch_unwind(|| panic!("a panic of thread {number}"));
                    memory.len() + table.len() + usize::from(caught.is_err())
                })
            })
            .collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), (1 << 25) + 1001);
        }
        rustix::io::read(&zero, &mut [0; 10]).unwrap();
        rustix::io::pread(&zero, &mut [0; 10], 0).unwrap();
        (&null).write_all(b"text").unwrap();
        drop(zero.try_clone().unwrap());
        // The real calls, as where there is no vDSO.
        let mut time = [0_i64; 2];
        call(libc::SYS_clock_gettime, [1, time.as_mut_ptr() as libc::c_long, 0]).unwrap();
        // What C libraries try: errors, which they know.
        assert_eq!(File::open("/etc/passwd").unwrap_err().raw_os_error(), Some(libc::EPERM));
        for (number, errno) in [
            (libc::SYS_clone3, libc::ENOSYS),
            (libc::SYS_tkill, libc::EPERM),
            (libc::SYS_prctl, libc::EINVAL),
        ] {
            assert_eq!(call(number, [0; 3]).unwrap_err().raw_os_error(), Some(errno), "{number}");
        }
        println!("done");
    });
    if let Some(text) = text {
        assert!(text.as_ref().is_ok_and(|text| text.contains("done\n")), "{text:?}");
    }
    // A bug that ends the process ends it as such.
    let aborted = confined(test, "abort", || std::process::abort());
    assert!([Some(Err(libc::SIGABRT)), Some(Err(libc::SIGSEGV))].contains(&aborted), "{aborted:?}");
}

#[test]
fn what_it_does_not_need_ends_it() {
    let test = "what_it_does_not_need_ends_it";
    let own = libc::c_long::from(std::process::id());
    for (case, number, arguments) in [
        ("socket", libc::SYS_socket, [1, 1, 0]),
        ("connect", libc::SYS_connect, [0, 0, 0]),
        ("execve", libc::SYS_execve, [0, 0, 0]),
        ("execveat", libc::SYS_execveat, [0, 0, 0]),
        ("ptrace", libc::SYS_ptrace, [0, 0, 0]),
        ("process_vm_readv", libc::SYS_process_vm_readv, [0, 0, 0]),
        ("kill", libc::SYS_kill, [own, 0, 0]),
        ("tgkill of another", libc::SYS_tgkill, [1, 1, 0]),
        ("openat2", libc::SYS_openat2, [-1, 0, 0]),
        ("unlinkat", libc::SYS_unlinkat, [-1, 0, 0]),
        ("mount", libc::SYS_mount, [0, 0, 0]),
        ("unshare", libc::SYS_unshare, [0, 0, 0]),
        ("setns", libc::SYS_setns, [-1, 0, 0]),
        ("io_uring_setup", libc::SYS_io_uring_setup, [0, 0, 0]),
        ("bpf", libc::SYS_bpf, [0, 0, 0]),
        ("sendmsg", libc::SYS_sendmsg, [-1, 0, 0]),
        ("memfd_create", libc::SYS_memfd_create, [0, 0, 0]),
        ("fork", libc::SYS_clone, [libc::c_long::from(libc::SIGCHLD), 0, 0]),
        ("a new namespace", libc::SYS_clone, [libc::c_long::from(libc::CLONE_NEWUSER), 0, 0]),
        ("memory to execute", libc::SYS_mmap, [0, 4096, 7]),
        ("memory made executable", libc::SYS_mprotect, [0, 4096, 5]),
        ("another ioctl", libc::SYS_ioctl, [0, 0x5412, 0]), // TIOCSTI
        ("another fcntl", libc::SYS_fcntl, [0, 4, 0]),      // F_SETFL
        ("x32", 0x4000_0000 | libc::SYS_read, [0, 0, 0]),
        ("no call", 5000, [0, 0, 0]),
    ] {
        let ended = confined(test, case, || {
            println!("{case}: {:?}", call(number, arguments));
        });
        assert!(ended.as_ref().is_none_or(|ended| *ended == Err(libc::SIGSYS)), "{case}: {ended:?}");
    }
}

/// The calls of the other ABI have other numbers, and no rule of ours is for them.
#[test]
#[cfg(target_arch = "x86_64")]
fn the_abi_of_32_bits_ends_it() {
    let ended = confined("the_abi_of_32_bits_ends_it", "int 0x80", || {
        let mut result = 3_u64; // read, there
        // SAFETY: a system call without effect: read() of nothing from no descriptor.
        unsafe { std::arch::asm!("int 0x80", inout("rax") result, in("rcx") 0, in("rdx") 0) };
        println!("{result}");
    });
    assert_eq!(ended, Some(Err(libc::SIGSYS)));
}
