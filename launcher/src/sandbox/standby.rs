//! Who serves the files of a named container, which several steps may be in. Its file server belongs to the step that has
//! started it, and Slurm ends it with that step. So every step that enters starts a server too, which waits, and goes on with
//! the same connection to the kernel when the one before it has ended, however it has ended, or stands still. A node of the file system is a
//! place in the image: there is nothing else that one server would have to tell the next.
//!
//! A lock says whose turn it is: the kernel gives it to the next when its holder is gone. The holder's watcher has the same open
//! file, so that it can keep the next one from serving an image that has made its server crash. The connection is taken from the
//! process that has the lock, which is one of the same user.
//!
//! Places in another image are other files. So who stands by has the very file open that the server has whose turn it is.
//!
//! Run by: the user, in file servers and in launchers.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mizzen_core::Failure;
use mizzen_squashfs::fuse;
use nix::poll::{PollFlags, PollTimeout};
use nix::sched::{CloneFlags, setns};
use nix::unistd::geteuid;
use rustix::fs::{FileType, FlockOperation, flock};
use rustix::io::Errno;
use tracing::debug;

use super::server::ServerLock;
use super::shared_end::SharedEnd;
use super::watcher::wait_for;
use crate::sys;

/// Between the end of a server and the moment when the next one has its turn.
const HANDOVER: Duration = Duration::from_millis(200);

/// How often a server that waits for its turn looks around: often enough for [`goes_on`].
const LOOK: u16 = 50;

/// How often the watcher of a container that several steps may be in looks what has become of it.
pub const WATCH: u16 = 200;

/// The right to serve, as long as it lives.
pub struct Turn {
    lock: Arc<File>,
    is_held: bool,
}

/// Waits until it is this process's turn to serve, and writes down who it is. None when the process `until` has ended first.
///
/// A server that stands still, because its job is suspended, is not waited for: who asks it for a file cannot even be killed
/// before it answers. Two servers of one connection do no harm, because each request goes to one of them.
pub fn take_turn(lock: File, until: Option<BorrowedFd>) -> io::Result<Option<Turn>> {
    loop {
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                write_down(&lock)?;
                return Ok(Some(Turn { lock: Arc::new(lock), is_held: true }));
            }
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) if holder_stands_still(&lock) => {
                return Ok(Some(Turn { lock: Arc::new(lock), is_held: false }));
            }
            Err(Errno::WOULDBLOCK) => match until {
                Some(until) if wait_for(until, PollFlags::POLLIN, PollTimeout::from(LOOK)) => {
                    return Ok(None);
                }
                Some(_) => {}
                None => std::thread::sleep(Duration::from_millis(LOOK.into())),
            },
            Err(errno) => return Err(errno.into()),
        }
    }
}

impl Turn {
    /// Has a thread wait for the lock, where it is still another's. To be called under the server's filter, which the thread
    /// inherits.
    pub fn take_lock_later(&self) -> io::Result<()> {
        if self.is_held {
            return Ok(());
        }
        let lock = Arc::clone(&self.lock);
        let wait = move || {
            while flock(&*lock, FlockOperation::LockExclusive) == Err(Errno::INTR) {}
            let _ = write_down(&lock);
        };
        std::thread::Builder::new().name("lock".to_owned()).spawn(wait).map(drop)
    }
}

/// As long as any process number, so that it replaces the one before it: the server's filter does not let a file be truncated.
fn write_down(mut lock: &File) -> io::Result<()> {
    lock.write_all(format!("{:<10}\n", std::process::id()).as_bytes())
}

/// Whether the server that has the lock is stopped or in a frozen cgroup.
fn holder_stands_still(lock: &File) -> bool {
    let mut text = [0; 16];
    let Ok(len) = lock.read_at(&mut text, 0) else { return false };
    let Some(pid) = str::from_utf8(&text[..len]).ok().and_then(|text| text.trim_end().parse::<u32>().ok())
    else {
        return false;
    };
    // The freezers of cgroup v1 and v2 show themselves by the kernel's function that the process is in, and by nothing else that
    // all kernels have.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, fields)| fields.chars().next());
    let function = fs::read_to_string(format!("/proc/{pid}/wchan")).unwrap_or_default();
    matches!(state, Some('T' | 't')) || ["__refrigerator", "do_freezer_trap"].contains(&function.as_str())
}

/// Whether somebody else goes on with serving, now that a server has ended.
pub fn goes_on(lock: &Path) -> bool {
    // Who waits for its turn has it by then.
    std::thread::sleep(HANDOVER);
    is_served(lock)
}

/// Whether a server has its turn, or the watcher of one that has just ended is to say whether another one may.
pub fn is_served(lock: &Path) -> bool {
    is_held(lock).unwrap_or(false)
}

/// The lock of the servers, and why they all end.
pub struct Shared {
    /// The lock's file.
    pub lock: File,
    /// Where that is, to be opened anew by those who only ask whether it is held.
    pub path: PathBuf,
    /// Why the container ends.
    pub end: SharedEnd,
}

impl Shared {
    /// Opens both, for a server and its watcher, which have the lock together.
    pub fn open(lock: &ServerLock) -> io::Result<Shared> {
        Ok(Shared { lock: open(&lock.path)?, path: lock.path.clone(), end: SharedEnd::open(&lock.end)? })
    }

    /// What both need open.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.lock.as_fd(), self.end.as_fd()]
    }

    /// Another server may have its turn.
    pub fn let_others_serve(&self) {
        let _ = flock(&self.lock, FlockOperation::Unlock);
    }
}

/// The file server that serves a container.
pub enum Serving {
    /// The files are those of a directory.
    Nobody,
    /// There is one, but the kernel does not let its connection be taken: the files end with it.
    Alone(&'static str),
    /// There is one, and this is its connection to the kernel.
    Shared {
        /// The connection.
        connection: OwnedFd,
        /// What tells the files from others that it has open.
        files: Vec<(u64, u64)>,
    },
}

/// Whether a server that has these files open reads one of these.
pub fn reads_one_of(files: &[(u64, u64)], opened: &[BorrowedFd]) -> bool {
    let identity = |file: &BorrowedFd| {
        let found = rustix::fs::fstat(file).ok()?;
        let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
        is_file.then_some((found.st_dev, found.st_ino))
    };
    opened.iter().filter_map(identity).any(|opened| files.contains(&opened))
}

/// The server whose turn it is. One that has ended is a failure.
pub fn connection(lock: &Path, user_namespace: &OwnedFd) -> Result<Serving, Failure> {
    let failed =
        |what: &str, error: io::Error| Failure::caused_by(format!("its file server: cannot {what}"), error);
    let ended = || Failure::new("its files are served no more").hint("end the programs that are left in it");
    let server = || match fs::read_to_string(lock) {
        Ok(text) => text.trim_end().parse::<i32>().map(Some).map_err(|_| ended()),
        // A directory needs none.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("find out who it is", error)),
    };
    let Some(pid) = server()? else { return Ok(Serving::Nobody) };
    let process = match sys::pidfd_of(pid) {
        Ok(process) => process,
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Err(ended()),
        Err(error) => return Err(failed("find it", error)),
    };
    // It was the server when its number was written down, so it is that process as long as nobody else has a turn.
    let own = fs::metadata(format!("/proc/{pid}")).is_ok_and(|found| found.uid() == geteuid().as_raw());
    let held = is_held(lock).map_err(|error| failed("see whether it works", error))?;
    if !own || !held || server()? != Some(pid) {
        return Err(ended());
    }
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else {
        return Ok(Serving::Alone("nobody may look at the file server"));
    };
    let descriptors: Vec<PathBuf> = descriptors.flatten().map(|entry| entry.path()).collect();
    let is_device = |path: &Path| fs::read_link(path).is_ok_and(|target| target == Path::new("/dev/fuse"));
    let mut devices = descriptors.iter().filter(|path| is_device(path));
    let number = devices.find_map(|path| path.file_name()?.to_str()?.parse().ok()).ok_or_else(ended)?;
    // The links lead to the open files, whatever has their names by now. That the process is still the server shows below.
    let found = descriptors.iter().filter_map(|path| fs::metadata(path).ok());
    let files = found.filter(fs::Metadata::is_file).map(|found| (found.dev(), found.ino())).collect();
    let connection = match sys::descriptor_of(&process, number) {
        Ok(connection) => connection,
        Err(error) if [libc::ESRCH, libc::EBADF].contains(&error.raw_os_error().unwrap_or(0)) => {
            return Err(ended());
        }
        // Before Linux 5.6, or where a security module forbids it.
        Err(error) => {
            debug!(%error, "the connection of a file server cannot be taken over");
            return Ok(Serving::Alone(
                "the kernel does not give the connection of the file server to another",
            ));
        }
    };
    if sends_again() {
        return Ok(Serving::Shared { connection, files });
    }
    match open_device_in(user_namespace).and_then(|spare| fuse::with_own_queue(connection, spare)) {
        Ok(connection) => Ok(Serving::Shared { connection, files }),
        Err(error) => {
            debug!(%error, "the connection of a file server cannot be shared");
            Ok(Serving::Alone("the kernel does not let two file servers share a connection"))
        }
    }
}

/// Opens /dev/fuse as a process of the container would, and as the node has it.
fn open_device_in(user_namespace: &OwnedFd) -> io::Result<OwnedFd> {
    sys::open_in_child(|| {
        setns(user_namespace, CloneFlags::CLONE_NEWUSER)?;
        Ok(OpenOptions::new().read(true).write(true).open("/dev/fuse")?.into())
    })
}

/// Whether the kernel sends requests again that a server has not answered: since Linux 6.9.
fn sends_again() -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|part| part.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(9))
}

fn is_held(lock: &Path) -> io::Result<bool> {
    // Not made: it may have gone with the container.
    match options().open(lock) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        opened => match flock(opened?, FlockOperation::NonBlockingLockShared) {
            Ok(()) => Ok(false),
            Err(Errno::WOULDBLOCK) => Ok(true),
            Err(errno) => Err(errno.into()),
        },
    }
}

fn open(lock: &Path) -> io::Result<File> {
    options().create(true).truncate(false).mode(0o600).open(lock)
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    options
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::testing::Scratch;

    #[test]
    fn one_serves_at_a_time_and_is_known() {
        let scratch = Scratch::new();
        let lock = scratch.path().join("server");
        assert!(!is_held(&lock).unwrap());
        let turn = take_turn(open(&lock).unwrap(), None).unwrap();
        assert!(is_held(&lock).unwrap());
        assert_eq!(fs::read_to_string(&lock).unwrap().trim_end(), std::process::id().to_string());
        let namespace = File::open("/proc/self/ns/user").unwrap().into();
        // It has no connection to the kernel.
        let failure = connection(&lock, &namespace).err().unwrap();
        assert_eq!(failure.message, "its files are served no more");
        // Who waits for its turn ends with what it is there for.
        let mut program = std::process::Command::new("true").spawn().unwrap();
        let process = sys::pidfd_of(program.id().cast_signed()).unwrap();
        assert!(take_turn(open(&lock).unwrap(), Some(process.as_fd())).unwrap().is_none());
        program.wait().unwrap();
        drop(turn);
        assert!(take_turn(open(&lock).unwrap(), Some(process.as_fd())).unwrap().is_some(), "its turn");
        assert_eq!(connection(&lock, &namespace).err().unwrap().message, "its files are served no more");
        let none = connection(&scratch.path().join("none"), &namespace).unwrap();
        assert!(matches!(none, Serving::Nobody), "a directory has no server");
    }

    #[test]
    fn a_server_that_stands_still_is_not_waited_for() {
        let scratch = Scratch::new();
        let lock = scratch.path().join("server");
        let script = "exec 9<> $0; flock 9; printf '%-10s\\n' $$ >&9; kill -STOP $$";
        let mut holder = std::process::Command::new("sh").args(["-c", script]).arg(&lock).spawn().unwrap();
        while !open(&lock).is_ok_and(|lock| holder_stands_still(&lock)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let turn = take_turn(open(&lock).unwrap(), None).unwrap().unwrap();
        assert!(!turn.is_held);
        turn.take_lock_later().unwrap();
        holder.kill().unwrap();
        holder.wait().unwrap();
        let own = std::process::id().to_string();
        while fs::read_to_string(&lock).unwrap().trim_end() != own {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(is_held(&lock).unwrap());
    }
}
