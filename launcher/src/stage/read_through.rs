//! An image that is used while it is being copied: what the copy has comes from there, and the rest from the original, through the
//! copier, which keeps it. Runs as the user, in the launcher and in the FUSE server process behind its filter.
//!
//! Whatever is wrong with the copy or the copier, the original is read, as without any copy. Only a change of the original ends that:
//! a program gets bytes of the file that was opened, or an error.
//!
//! Where only the original's time of change is another one, it was moved, linked, or given another mode, which is no reason to end
//! a container; or it was written to by somebody who has set its time of modification back, which nobody can tell from here. Then
//! nothing of the copy is used any more, and the image is used where it is: so there is no mixture of the two, and what a writer
//! does to a running program is what they would do without a copy.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use mizzen_core::failure::cause;
use mizzen_squashfs::{ByteSource, TellNote};
use nix::errno::Errno;
use nix::sys::socket::sockopt::ReceiveTimeout;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recvmsg, setsockopt, socketpair};
use nix::sys::time::TimeVal;
use nix::unistd::{read, write};

use super::cache::Cache;
use super::copier::{ANSWER, Job, REQUEST, decode};
use super::early::Awaited;
use super::evict::Limits;
use super::fetch::{Comparison, Fetched, compare};
use super::partial::{DURABLE, Partial, Void, chunks, chunks_of, is_good, marks_in, void_in};
use super::source::{FileIdentity, SourceImage};
use super::{fs_type, obtain};
use crate::image::shown;

/// As many threads of a server are answered at once: all that a server has.
const SOCKETS: usize = 16;
/// The launcher's.
const OWN: usize = 0;
/// A copier that does not answer for so long is not asked again, in seconds.
const PATIENCE: i64 = 30;

/// Reading takes this beside what every server may call: to see that the original is the same.
const CALLS: &[libc::c_long] = &[libc::SYS_fstat, libc::SYS_statx];

/// The image, from two files.
pub struct ReadThrough {
    original: File,
    identity: FileIdentity,
    /// The image as the user knows it.
    name: String,
    data: File,
    record: File,
    /// A bit for each chunk that this process has seen to be good.
    known: Vec<AtomicU64>,
    /// The process that has made this, and the sockets: the first is its own, the others are its file server's. In each of
    /// the two processes the other one's sockets are never touched.
    launcher: u32,
    sockets: Vec<OwnedFd>,
    pool: Mutex<Pool>,
    is_servers: AtomicBool,
    freed: Condvar,
    /// Whether this process has seen that the original was touched.
    touched: AtomicBool,
    /// How many bytes were not there when they were asked for.
    missed: AtomicU64,
    /// Why the copy is not completed, and who is told.
    note: OnceLock<String>,
    tell: OnceLock<TellNote>,
}

/// The sockets of one process.
struct Pool {
    free: Vec<usize>,
    /// How many have a copier at their other end, free or not.
    alive: usize,
}

impl ReadThrough {
    /// Opens or begins the copy in the making of a source, and starts a copier for it, which fills it unless srun sends the image.
    pub fn start(
        cache: &Cache,
        source: &SourceImage,
        limits: &Limits,
        awaited: Option<Awaited>,
    ) -> Result<ReadThrough, String> {
        obtain::settle(&source.identity);
        let partial = Partial::open_or_begin(cache, source, limits)?;
        let failed =
            |error: io::Error| format!("{}: {}", cache.path.join(&partial.name).display(), cause(&error));
        let (data, record) = partial.open_read_only().map_err(failed)?;
        let original = source.file.try_clone().map_err(failed)?;
        if fs_type::is_fuse(&original) {
            // Of a FUSE file system the kernel forgets all that it has read whenever somebody else opens the file.
            let _ = rustix::fs::fcntl_getfl(&original)
                .and_then(|flags| rustix::fs::fcntl_setfl(&original, flags | rustix::fs::OFlags::DIRECT));
        }
        let (mut sockets, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..SOCKETS {
            let (own, other) =
                socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
                    .map_err(|errno| failed(errno.into()))?;
            setsockopt(&own, ReceiveTimeout, &TimeVal::new(PATIENCE, 0))
                .map_err(|errno| failed(errno.into()))?;
            sockets.push(own);
            theirs.push(other);
        }
        let job = Job {
            cache,
            path: source.path,
            original: &original,
            identity: &source.identity,
            limits: *limits,
            partial: &partial,
            awaited,
            sockets: theirs,
        };
        job.start().map_err(failed)?;
        let words = chunks(partial.size).div_ceil(64);
        Ok(ReadThrough {
            identity: source.identity.clone(),
            name: shown(source.path),
            data,
            record,
            known: (0..words).map(|_| AtomicU64::new(0)).collect(),
            launcher: std::process::id(),
            pool: Mutex::new(Pool { free: vec![OWN], alive: 1 }),
            is_servers: AtomicBool::new(false),
            freed: Condvar::new(),
            sockets,
            original,
            touched: AtomicBool::new(false),
            missed: AtomicU64::new(0),
            note: OnceLock::new(),
            tell: OnceLock::new(),
        })
    }

    /// Whether the copy has these bytes. What is written and not on disk yet counts as long as the copier lives: it has the disk write
    /// that, and tells all if the disk cannot. Without it nobody may ever hear that it is lost.
    fn has(&self, at: u64, length: u64) -> bool {
        // Also of what was good: the disk may have lost it since.
        if self.void().is_some() {
            return false;
        }
        let wanted = chunks_of(at, length);
        let bit = |chunk: u64| (self.known.get((chunk / 64) as usize), 1_u64 << (chunk % 64));
        let is_known = |chunk| match bit(chunk) {
            (Some(word), bit) => word.load(Ordering::Acquire) & bit != 0,
            (None, _) => false,
        };
        let has_copier = self.has_copier();
        if has_copier && wanted.clone().all(is_known) {
            return true;
        }
        let Ok(marks) = marks_in(&self.record, wanted.clone()) else { return false };
        if !marks.iter().all(|mark| *mark == DURABLE || has_copier && is_good(*mark)) {
            return false;
        }
        for chunk in wanted {
            if let (Some(word), bit) = bit(chunk) {
                word.fetch_or(bit, Ordering::Release);
            }
        }
        true
    }

    /// Whether the copier lives: its sockets are open.
    fn has_copier(&self) -> bool {
        let own = if std::process::id() == self.launcher { OWN } else { OWN + 1 };
        let Some(socket) = self.sockets.get(own) else { return false };
        // An answer that is there is another thread's.
        let (mut byte, flags) = ([0], MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT);
        match recvmsg::<()>(socket.as_raw_fd(), &mut [IoSliceMut::new(&mut byte)], None, flags) {
            Ok(message) => message.bytes > 0,
            Err(errno) => matches!(errno, Errno::EAGAIN | Errno::EINTR),
        }
    }

    /// Why nothing of the copy is used any more, if that is so.
    fn void(&self) -> Option<Void> {
        match self.touched.load(Ordering::Relaxed) {
            true => Some(Void::Touched),
            false => void_in(&self.record),
        }
    }

    /// Has the copier bring these bytes. None if there is no copier any more.
    fn ask(&self, at: u64, length: u64) -> Option<Fetched> {
        let socket = self.take_socket()?;
        let mut request = [0; REQUEST];
        request[..8].copy_from_slice(&at.to_ne_bytes());
        request[8..].copy_from_slice(&length.to_ne_bytes());
        let mut answer = [0; ANSWER];
        let asked = write(&self.sockets[socket], &request);
        let answered = asked.and_then(|_| {
            loop {
                match read(&self.sockets[socket], &mut answer) {
                    Err(Errno::EINTR) => {}
                    done => break done,
                }
            }
        });
        // One that has not answered in time would answer the next question with this one's answer.
        let fetched = if answered == Ok(ANSWER) { decode(answer) } else { None };
        let mut pool = self.pool();
        match fetched {
            Some(_) => pool.free.push(socket),
            None => pool.alive -= 1,
        }
        drop(pool);
        self.freed.notify_all();
        fetched
    }

    /// A socket of this process, when one is free. None if all have lost their copier.
    fn take_socket(&self) -> Option<usize> {
        let mut pool = self.pool();
        while pool.alive > 0 {
            match pool.free.pop() {
                Some(socket) => return Some(socket),
                None => pool = self.freed.wait(pool).unwrap_or_else(PoisonError::into_inner),
            }
        }
        None
    }

    /// The file server's process gets sockets of its own when it asks for the first time.
    fn pool(&self) -> MutexGuard<'_, Pool> {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        if std::process::id() != self.launcher && !self.is_servers.swap(true, Ordering::Relaxed) {
            *pool = Pool { free: (OWN + 1..SOCKETS).collect(), alive: SOCKETS - OWN - 1 };
        }
        pool
    }

    /// The copy is not completed, for this reason: the user is told once.
    fn give_up(&self, why: &str) {
        let note = format!(
            "{}: its copy on the node is not completed: {why}; it is read from where it is",
            self.name
        );
        if self.note.set(note).is_ok()
            && let (Some(tell), Some(note)) = (self.tell.get(), self.note.get())
        {
            tell(note);
        }
    }

    fn read_original(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        let read = FileExt::read_exact_at(&self.original, buffer, at);
        match compare(&self.original, &self.identity) {
            Comparison::Same => {}
            Comparison::Touched => {
                self.touched.store(true, Ordering::Relaxed);
                self.give_up(&Void::Touched.cause());
            }
            Comparison::Changed => return Err(changed()),
        }
        read
    }
}

fn changed() -> io::Error {
    io::Error::other("it was changed or replaced while it was being copied to the node")
}

impl ByteSource for ReadThrough {
    fn size(&self) -> io::Result<u64> {
        Ok(self.identity.size)
    }

    fn read_exact_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        let length = buffer.len() as u64;
        if at.checked_add(length).is_none_or(|end| end > self.identity.size) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if length == 0 {
            return Ok(());
        }
        if !self.has(at, length) {
            self.missed.fetch_add(length, Ordering::Relaxed);
            if let Some(void) = self.void() {
                self.give_up(&void.cause());
                return self.read_original(buffer, at);
            }
            match self.ask(at, length) {
                Some(Fetched::Kept) => {}
                Some(Fetched::Changed) => return Err(changed()),
                Some(Fetched::Unreadable(errno)) => return Err(io::Error::from_raw_os_error(errno)),
                Some(Fetched::Unkept(errno)) => {
                    if errno != 0 {
                        self.give_up(&cause(&io::Error::from_raw_os_error(errno)));
                    }
                    if let Some(void) = self.void() {
                        self.give_up(&void.cause());
                    }
                    return self.read_original(buffer, at);
                }
                None => return self.read_original(buffer, at),
            }
        }
        // A disk of the node that fails is no failure of the image.
        FileExt::read_exact_at(&self.data, buffer, at).or_else(|_| self.read_original(buffer, at))
    }

    fn will_need(&self, at: u64, length: u64) {
        // The copier fetches it in the background; it is asked for soon enough.
        let _ = (at, length);
    }

    fn original(&self) -> BorrowedFd<'_> {
        self.original.as_fd()
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let mut descriptors = vec![self.original.as_fd(), self.data.as_fd(), self.record.as_fd()];
        descriptors.extend(self.sockets.iter().skip(OWN + 1).map(AsFd::as_fd));
        descriptors
    }

    fn on_note(&self, tell: TellNote) {
        if self.tell.set(tell).is_ok()
            && let (Some(tell), Some(note)) = (self.tell.get(), self.note.get())
        {
            tell(note);
        }
    }

    fn missed(&self) -> Option<u64> {
        Some(self.missed.load(Ordering::Relaxed))
    }

    fn system_calls(&self) -> &'static [libc::c_long] {
        CALLS
    }
}
