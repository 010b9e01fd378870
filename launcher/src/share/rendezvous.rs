//! Where the ranks of a launch find each other on a node: a socket in the user's own directory (`mizzen-UID`, mode 0700).
//! Runs as the user on the host.
//!
//! Not an abstract address, which ends with its process and leaves no file: everybody on the node could bind it first, fill
//! the queue of its listener, or put descriptors into that queue whose last close takes for ever. Nobody else gets into this
//! directory. What a killed server leaves there, the user's next launch removes.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mizzen_core::{Digest, Failure, node_name};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, getsockopt, listen, socket, sockopt,
};
use nix::unistd::geteuid;
use rustix::fs::{AtFlags, Dir, FlockOperation, Mode, OFlags, chmodat, flock, openat, unlinkat};
use sha2::{Digest as _, Sha256};

use crate::image::shown;
use crate::stage::own_directory;

/// Begins the names of the sockets.
const PREFIX: &str = "share-";
/// As many names are looked at to find those of killed servers.
const LIMIT: usize = 256;
/// To look for a socket and to make one takes less than a millisecond. Who has stopped in the middle stops others no longer.
const LOCKED: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(1);

/// A place where those find each other who have the same key.
pub struct Rendezvous {
    directory: OwnedFd,
    path: PathBuf,
    name: String,
}

/// What a process is at a rendezvous.
pub enum Arrival {
    /// The first: those who come later connect to this socket.
    First(OwnedFd),
    /// A later one, connected to the first one's socket.
    Later(OwnedFd),
}

impl Rendezvous {
    /// The place for this key, in the user's directory below `directory`.
    pub fn open(directory: &Path, key: &str) -> Result<Rendezvous, Failure> {
        let (directory, path) = own_directory::open(directory)?;
        Ok(Rendezvous { directory, path, name: format!("{}{}", of_node(), hash(key)) })
    }

    /// Connects to who is there, or is there for others from now on.
    pub fn arrive(&self) -> Result<Arrival, Failure> {
        let failed = |what: &str, errno: Errno| {
            Failure::caused_by(format!("{}: cannot {what}", shown(&self.path.join(&self.name))), errno)
        };
        let end = Instant::now() + LOCKED;
        loop {
            {
                let _lock = self.lock(end)?;
                match self.connect() {
                    Ok(connection) => return Ok(Arrival::Later(connection)),
                    Err(Errno::ENOENT | Errno::ECONNREFUSED) => {
                        self.remove_stale();
                        return self.listen().map(Arrival::First).map_err(|errno| failed("listen", errno));
                    }
                    // The queue is full.
                    Err(Errno::EAGAIN) if Instant::now() < end => {}
                    Err(errno) => return Err(failed("connect", errno)),
                }
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Removes the socket's name. Only who has made it may call this: as long as that one listens, nobody else does.
    pub fn remove(&self) {
        let _ = unlinkat(&self.directory, &self.name, AtFlags::empty());
    }

    /// What its server needs open.
    pub fn descriptor(&self) -> std::os::fd::BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// One at a time looks whether somebody listens, and if not, listens: else two could take the other's new socket for
    /// one that a killed process has left.
    fn lock(&self, end: Instant) -> Result<OwnedFd, Failure> {
        let failed = |errno: rustix::io::Errno| {
            Failure::caused_by(format!("{}: cannot lock it", shown(&self.path)), std::io::Error::from(errno))
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // Opened anew: a lock belongs to what was opened, which forked processes have in common.
        let directory = openat(&self.directory, ".", flags, Mode::empty()).map_err(failed)?;
        loop {
            match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(directory),
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < end => std::thread::sleep(PAUSE),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(failed(errno)),
            }
        }
    }

    fn address(&self, name: &str) -> nix::Result<UnixAddr> {
        // An address has room for 107 bytes.
        UnixAddr::new(format!("/proc/self/fd/{}/{name}", self.directory.as_raw_fd()).as_str())
    }

    fn connect(&self) -> nix::Result<OwnedFd> {
        let connection = new_socket(SockType::SeqPacket)?;
        connect(connection.as_raw_fd(), &self.address(&self.name)?)?;
        if is_own(&connection) { Ok(connection) } else { Err(Errno::EPERM) }
    }

    fn listen(&self) -> nix::Result<OwnedFd> {
        let listener = new_socket(SockType::SeqPacket)?;
        bind(listener.as_raw_fd(), &self.address(&self.name)?)?;
        // The user's mask may keep even its owner out.
        let mode = Mode::RUSR | Mode::WUSR;
        chmodat(&self.directory, &self.name, mode, AtFlags::empty())
            .map_err(|errno| Errno::from_raw(errno.raw_os_error()))?;
        listen(&listener, Backlog::MAXCONN)?;
        Ok(listener)
    }

    /// Whether nobody has this socket any more. Asked for with a socket of another kind, so that nobody is bothered: the
    /// kernel looks for its owner first (else ECONNREFUSED), and compares the kinds then (EPROTOTYPE).
    fn is_stale(&self, name: &str) -> nix::Result<bool> {
        let other = new_socket(SockType::Stream)?;
        Ok(connect(other.as_raw_fd(), &self.address(name)?) == Err(Errno::ECONNREFUSED))
    }

    /// Removes this node's sockets that killed processes have left.
    fn remove_stale(&self) {
        let Ok(listed) = Dir::read_from(&self.directory) else { return };
        let prefix = of_node();
        for entry in listed.flatten().take(LIMIT) {
            let Ok(name) = entry.file_name().to_str() else { continue };
            if name.starts_with(&prefix) && self.is_stale(name) == Ok(true) {
                let _ = unlinkat(&self.directory, name, AtFlags::empty());
            }
        }
    }
}

/// Whether who is at the other end of a socket, or has made it listen, is this user.
pub fn is_own(connection: impl AsFd) -> bool {
    getsockopt(&connection, sockopt::PeerCredentials).is_ok_and(|peer| peer.uid() == geteuid().as_raw())
}

/// It waits for nothing.
fn new_socket(kind: SockType) -> nix::Result<OwnedFd> {
    socket(AddressFamily::Unix, kind, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)
}

/// Begins the names of the sockets of this node: where nodes have no disk, the directory may be one for several.
fn of_node() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    format!("{PREFIX}{}-", &hash(&format!("{} {boot}", node_name()))[..8])
}

fn hash(text: &str) -> String {
    Digest::new(Sha256::digest(text).into()).hex()[..32].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::testing::Scratch;

    fn names(rendezvous: &Rendezvous) -> Vec<String> {
        let listed = std::fs::read_dir(&rendezvous.path).unwrap().flatten();
        listed.map(|entry| entry.file_name().into_string().unwrap()).collect()
    }

    fn is_first(rendezvous: &Rendezvous) -> bool {
        matches!(rendezvous.arrive().unwrap(), Arrival::First(_))
    }

    #[test]
    fn of_all_that_arrive_one_is_the_first() {
        let scratch = Scratch::new();
        let arrivals: Vec<Arrival> = std::thread::scope(|scope| {
            let arrive = || Rendezvous::open(scratch.path(), "a").unwrap().arrive().unwrap();
            let threads: Vec<_> = (0..16).map(|_| scope.spawn(arrive)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let first = arrivals.iter().filter(|arrival| matches!(arrival, Arrival::First(_))).count();
        assert_eq!(first, 1);
        let other = Rendezvous::open(scratch.path(), "b").unwrap();
        assert!(is_first(&other), "another key is another place");
    }

    #[test]
    fn what_a_killed_process_has_left_is_removed() {
        let scratch = Scratch::new();
        let rendezvous = |key: &str| Rendezvous::open(scratch.path(), key).unwrap();
        drop(rendezvous("a").arrive().unwrap());
        let Arrival::First(kept) = rendezvous("b").arrive().unwrap() else { panic!("nobody else is there") };
        assert!(is_first(&rendezvous("a")), "nobody listens there any more");
        drop(rendezvous("c").arrive().unwrap());
        // Those of a and c are stale now; whoever is first at another place removes them, and not b's.
        assert!(is_first(&rendezvous("d")));
        let mut left = names(&rendezvous("d"));
        left.sort();
        let mut expected = vec![rendezvous("b").name, rendezvous("d").name];
        expected.sort();
        assert_eq!(left, expected);
        let connected = rustix::net::accept(&kept);
        assert_eq!(connected.err(), Some(rustix::io::Errno::AGAIN), "its owner was not bothered");
        rendezvous("b").remove();
        rendezvous("d").remove();
        assert_eq!(names(&rendezvous("b")), Vec::<String>::new());
    }

    #[test]
    fn files_of_others_are_left_alone_and_named() {
        let scratch = Scratch::new();
        let rendezvous = Rendezvous::open(scratch.path(), "a").unwrap();
        std::fs::write(rendezvous.path.join("sha256-x"), "").unwrap();
        std::fs::write(rendezvous.path.join(&rendezvous.name), "").unwrap();
        // A file in the socket's place refuses connections too.
        assert!(is_first(&rendezvous));
        assert_eq!(names(&rendezvous).len(), 2);
    }
}
