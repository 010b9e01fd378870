//! The copier: a process beside a container's file server that brings what the server misses from the original into the copy in
//! the making, and completes the copy meanwhile. Runs as the user on the host, in the job's cgroup.
//!
//! It is a process of its own because the file server, which inflates foreign bytes, can write no file. The two talk through
//! sockets, one for each thread of the server: a message asks for a range and one answers it. When all sockets are closed,
//! the container has ended, and the copier ends as well; another one goes on from what there is.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{read, write};
use tracing::debug;

use super::cache::Cache;
use super::early::Awaited;
use super::evict::Limits;
use super::fetch::{Fetched, Fetcher};
use super::fill::{Filler, Pace, SYNC, Silent};
use super::partial::{Partial, chunks_of};
use super::source::{FileIdentity, SourceImage};
use crate::sys;

/// A range that somebody waits for: where it begins, and how long it is.
pub const REQUEST: usize = 16;
/// What came of it: a kind, and the number of an error.
pub const ANSWER: usize = 8;

/// Its first word.
const KEPT: i32 = 0;
const UNKEPT: i32 = 1;
const CHANGED: i32 = 2;
const UNREADABLE: i32 = 3;

const STACK: usize = 256 << 10;

/// What came of a demand, as bytes.
fn encode(fetched: Fetched) -> [u8; ANSWER] {
    let (kind, errno) = match fetched {
        Fetched::Kept => (KEPT, 0),
        Fetched::Unkept(errno) => (UNKEPT, errno),
        Fetched::Changed => (CHANGED, 0),
        Fetched::Unreadable(errno) => (UNREADABLE, errno),
    };
    let mut answer = [0; ANSWER];
    answer[..4].copy_from_slice(&kind.to_ne_bytes());
    answer[4..].copy_from_slice(&errno.to_ne_bytes());
    answer
}

/// Reads it back.
pub fn decode(answer: [u8; ANSWER]) -> Option<Fetched> {
    let [kind, errno] =
        [0, 4].map(|at| i32::from_ne_bytes([answer[at], answer[at + 1], answer[at + 2], answer[at + 3]]));
    Some(match kind {
        KEPT => Fetched::Kept,
        UNKEPT => Fetched::Unkept(errno),
        CHANGED => Fetched::Changed,
        UNREADABLE => Fetched::Unreadable(errno),
        _ => return None,
    })
}

/// Everything that a copier works with.
pub struct Job<'a> {
    pub cache: &'a Cache,
    pub path: &'a Path,
    pub original: &'a File,
    pub identity: &'a FileIdentity,
    pub limits: Limits,
    pub partial: &'a Partial,
    /// What srun sends meanwhile, if it does.
    pub awaited: Option<Awaited<'a>>,
    /// Its ends of the sockets.
    pub sockets: Vec<OwnedFd>,
}

impl Job<'_> {
    /// Starts the process.
    pub fn start(self) -> std::io::Result<()> {
        let mut keep: Vec<BorrowedFd> = self.sockets.iter().map(AsFd::as_fd).collect();
        keep.extend([self.cache.dir.as_fd(), self.original.as_fd()]);
        keep.extend(self.partial.descriptors());
        sys::spawn_detached(&keep, || self.run())
    }

    fn run(&self) {
        become_copier();
        // Locks belong to descriptors: those of the launcher are open in other processes as well.
        let opened = self.partial.reopen().and_then(|partial| Ok((partial, self.original.try_clone()?)));
        let (partial, original) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                debug!(%error, "the copy in the making cannot be opened again");
                return;
            }
        };
        let fetcher = Fetcher::new(partial, original, self.identity.clone(), self.cache, &self.limits);
        let open = AtomicUsize::new(self.sockets.len());
        std::thread::scope(|scope| {
            let background = std::thread::Builder::new().name("copier".to_owned()).stack_size(STACK);
            let _ = background.spawn_scoped(scope, || self.fill(&fetcher));
            self.answer_all(scope, &fetcher, &open);
        });
    }

    fn fill(&self, fetcher: &Fetcher) {
        sys::work_in_background();
        let source = SourceImage {
            path: self.path,
            file: &fetcher.original,
            identity: self.identity.clone(),
            verify: false,
        };
        let filler = Filler {
            fetcher,
            cache: self.cache,
            source: &source,
            limits: &self.limits,
            pace: Pace::Background,
        };
        if let Some(awaited) = &self.awaited {
            awaited.receive(&filler);
        }
        match filler.run(&mut Silent) {
            Ok(()) if fetcher.partial.is_complete().unwrap_or(false) => return,
            // The copy was made of what srun has sent, or apart.
            Ok(()) => filler.go_on_from_copy(),
            Err(why) => debug!(?why, "the copy is not completed"),
        }
        filler.sync_until_stopped(SYNC);
    }

    /// Waits for requests. A socket has a thread from its first one on: most have none.
    fn answer_all<'scope>(
        &'scope self,
        scope: &'scope std::thread::Scope<'scope, '_>,
        fetcher: &'scope Fetcher<'scope>,
        open: &'scope AtomicUsize,
    ) {
        let mut idle: Vec<&OwnedFd> = self.sockets.iter().collect();
        while !idle.is_empty() {
            let mut polled: Vec<PollFd> =
                idle.iter().map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN)).collect();
            match poll(&mut polled, PollTimeout::NONE) {
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(_) => sys::exit_now(1),
            }
            let ready: Vec<bool> = polled
                .iter()
                .map(|polled| polled.revents().is_some_and(|events| !events.is_empty()))
                .collect();
            let (woken, sleeping): (Vec<_>, Vec<_>) =
                idle.into_iter().zip(ready).partition(|(_, ready)| *ready);
            idle = sleeping.into_iter().map(|(socket, _)| socket).collect();
            for (socket, _) in woken {
                let serve = move || {
                    answer(socket, fetcher);
                    // The last one is the end of the container.
                    if open.fetch_sub(1, Ordering::AcqRel) == 1 {
                        sys::exit_now(0);
                    }
                };
                if std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, serve).is_err() {
                    // No more threads: nobody else would ever be answered from here.
                    sys::exit_now(1);
                }
            }
        }
    }
}

/// Answers one thread of the server until it ends.
fn answer(socket: &OwnedFd, fetcher: &Fetcher) {
    let mut request = [0; REQUEST];
    loop {
        match read(socket, &mut request) {
            Ok(REQUEST) => {}
            Err(nix::errno::Errno::EINTR) => continue,
            _ => return,
        }
        let [at, length] = [0, 8].map(|at| {
            let mut word = [0; 8];
            word.copy_from_slice(&request[at..at + 8]);
            u64::from_ne_bytes(word)
        });
        // The server may have been taken over by what it serves.
        let within = at.checked_add(length).is_some_and(|end| end <= fetcher.partial.size) && length > 0;
        if !within || write(socket, &encode(fetcher.demand(chunks_of(at, length)))).is_err() {
            return;
        }
    }
}

/// Leaves everything behind that belongs to the job's program.
pub fn become_copier() {
    let _ = nix::unistd::chdir("/");
    let _ = nix::sys::prctl::set_name(c"mizzen-copy");
    let _ = nix::sys::prctl::set_no_new_privs();
    let _ = sys::drop_capabilities();
    sys::use_all_cpus();
}
