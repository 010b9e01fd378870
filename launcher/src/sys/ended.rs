//! The end of processes that are nobody's children here, on kernels that have no descriptors of processes (before Linux 5.3), and
//! under seccomp filters that do not know these calls. Runs as the user.

use std::io::{self, PipeWriter, Write};
use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::fs::{Dir, Mode, OFlags, open, openat};
use rustix::io::read;

use super::{pidfd_of, spawn_detached};

/// How often a process looks whether another one has ended.
const LOOK: u16 = 100;

/// Whether a call fails because the kernel does not have it, or because a filter does not know it.
pub fn is_missing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM))
}

/// A descriptor that becomes readable when this process has ended.
pub fn end_of_self() -> io::Result<OwnedFd> {
    end_of(nix::unistd::getpid().as_raw())
}

/// A descriptor that becomes readable when the process has ended, and is good for nothing else: where the kernel has none, it is a
/// pipe from a process that looks from time to time.
pub fn end_of(pid: i32) -> io::Result<OwnedFd> {
    match pidfd_of(pid) {
        Err(error) if is_missing(&error) => end_by_looking(pid),
        opened => opened,
    }
}

fn end_by_looking(pid: i32) -> io::Result<OwnedFd> {
    // It stands for this process for ever, whoever gets the number.
    let process =
        open(format!("/proc/{pid}"), OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(
                |errno| if errno == rustix::io::Errno::NOENT { rustix::io::Errno::SRCH } else { errno },
            )?;
    let (end, tell) = io::pipe()?;
    spawn_detached(&[process.as_fd(), tell.as_fd()], || {
        let _ = nix::sys::prctl::set_name(c"mizzen-wait");
        while !has_ended(&process) {
            if !is_awaited(&tell) {
                return;
            }
        }
        let _ = (&tell).write_all(&[0]);
    })?;
    Ok(end.into())
}

/// Waits a little; whether anybody still wants to know.
fn is_awaited(tell: &PipeWriter) -> bool {
    let mut reader = [PollFd::new(tell.as_fd(), PollFlags::empty())];
    matches!(poll(&mut reader, PollTimeout::from(LOOK)), Ok(0) | Err(Errno::EINTR))
}

/// A process that nobody has waited for yet has ended too, unless only its first thread has.
fn has_ended(process: &OwnedFd) -> bool {
    let look = |name: &str, flags| openat(process, name, flags | OFlags::CLOEXEC, Mode::empty());
    let mut buffer = [0; 512];
    let Ok(length) = look("stat", OFlags::RDONLY).and_then(|stat| read(stat, &mut buffer)) else {
        return true;
    };
    // "pid (name) state …", and the name may be anything.
    let text = &buffer[..length];
    let state = text.iter().rposition(|byte| *byte == b')').and_then(|end| text.get(end + 2));
    let threads = || look("task", OFlags::RDONLY | OFlags::DIRECTORY).and_then(Dir::new);
    match state {
        // This thread, ".", and "..".
        Some(b'Z' | b'X') => threads().is_ok_and(|threads| threads.flatten().count() <= 3),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn the_end_of_a_process_is_seen_without_the_kernels_help() {
        let mut program = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let process = open(format!("/proc/{}", program.id()), flags, Mode::empty()).unwrap();
        assert!(!has_ended(&process));
        drop(program.stdin.take());
        let begin = Instant::now();
        while !has_ended(&process) && begin.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(has_ended(&process), "a zombie");
        program.wait().unwrap();
        assert!(has_ended(&process), "gone");
    }

    #[test]
    fn what_is_not_there_is_told_from_what_has_failed() {
        for (errno, missing) in [(libc::ENOSYS, true), (libc::EPERM, true), (libc::ESRCH, false)] {
            assert_eq!(is_missing(&io::Error::from_raw_os_error(errno)), missing);
        }
        assert_eq!(end_by_looking(i32::MAX).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }
}
