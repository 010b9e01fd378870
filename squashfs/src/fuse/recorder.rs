//! What a program that starts reads of the image, in order: for the next start.
//!
//! Run by: the user, in the FUSE server process.

#![forbid(unsafe_code)]

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::reader::InodeRef;

/// As many accesses are remembered; a start that reads more is not at its end by then.
const MAX_ACCESSES: usize = 64 << 10;

/// A part of a file that was read; of one that was only looked at, nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// The file.
    pub file: InodeRef,
    /// Where the part begins.
    pub offset: u64,
    /// Its bytes.
    pub len: u64,
}

/// How a start goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// It reads on.
    Growing,
    /// Nothing was read for a while.
    Quiet,
    /// Nothing more will be read.
    Ended,
}

/// Remembers accesses from the moment when the file system is mounted until the start has calmed down.
pub struct Recorder {
    /// A start that reads fewer bytes is not worth remembering.
    enough: u64,
    state: Mutex<State>,
    /// Enough has been read, or nothing more will be.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Those that nobody has taken yet.
    accesses: Vec<Access>,
    /// How many there were before.
    taken: usize,
    bytes: u64,
    last: Option<Instant>,
    /// When some were taken, or could have been.
    since: Option<Instant>,
    is_ended: bool,
    /// Whether it has calmed down.
    is_over: bool,
}

impl Recorder {
    /// For starts that read so many bytes at least.
    pub fn new(enough: u64) -> Recorder {
        Recorder { enough, state: Mutex::default(), changed: Condvar::new() }
    }

    /// One more. What continues the last one becomes a part of it.
    pub fn add(&self, access: Access) {
        let mut guard = self.lock();
        let state = &mut *guard;
        if state.is_over {
            return;
        }
        let before = state.bytes;
        state.bytes = before.saturating_add(access.len);
        state.last = Some(Instant::now());
        let has_room = state.taken + state.accesses.len() < MAX_ACCESSES;
        match state.accesses.last_mut() {
            Some(last) if last.file == access.file && last.offset + last.len == access.offset => {
                last.len += access.len;
            }
            _ if has_room => state.accesses.push(access),
            _ => {}
        }
        if before < self.enough && state.bytes >= self.enough {
            self.changed.notify_all();
        }
    }

    /// How many bytes have been asked for.
    pub fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    /// Waits until enough has been read, and then until nothing was read for a while (`quiet`), or for some time (`pause`) nobody
    /// has taken what was, or nothing more will be. Gives what was read since the last time; nothing, if all of it is not enough.
    /// Remembers nothing more when the start has calmed down.
    pub fn take(&self, quiet: Duration, pause: Duration) -> (Vec<Access>, Phase) {
        let mut guard = self.lock();
        loop {
            let state = &mut *guard;
            let since = state.last.map_or(Duration::ZERO, |last| last.elapsed());
            let is_enough = state.bytes >= self.enough;
            if state.is_ended || is_enough && since >= quiet {
                state.is_over = true;
                let accesses = std::mem::take(&mut state.accesses);
                let phase = if state.is_ended { Phase::Ended } else { Phase::Quiet };
                return (if is_enough { accesses } else { Vec::new() }, phase);
            }
            // Whoever reads wakes this thread once, when there is enough; then it looks now and then.
            guard = if is_enough {
                let waited = state.since.get_or_insert_with(Instant::now).elapsed();
                if waited >= pause && !state.accesses.is_empty() {
                    state.since = Some(Instant::now());
                    state.taken += state.accesses.len();
                    return (std::mem::take(&mut state.accesses), Phase::Growing);
                }
                let rest = quiet.saturating_sub(since);
                let rest = if waited < pause { rest.min(pause.saturating_sub(waited)) } else { rest };
                self.changed.wait_timeout(guard, rest).unwrap_or_else(PoisonError::into_inner).0
            } else {
                self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
            };
        }
    }

    /// Whether nothing more will be read.
    pub fn is_ended(&self) -> bool {
        self.lock().is_ended
    }

    /// Nothing more will be read.
    pub fn end(&self) {
        self.lock().is_ended = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn access(file: u64, offset: u64, len: u64) -> Access {
        Access { file: InodeRef::from_raw(file).unwrap(), offset, len }
    }

    #[test]
    fn what_was_read_until_it_became_quiet_in_order() {
        let recorder = Recorder::new(40);
        for (file, offset, len) in [(1, 0, 10), (1, 10, 20), (2, 0, 0), (1, 30, 5), (1, 0, 10)] {
            recorder.add(access(file, offset, len));
        }
        let (taken, phase) = recorder.take(Duration::from_millis(20), LONG);
        assert_eq!(taken, [access(1, 0, 30), access(2, 0, 0), access(1, 30, 5), access(1, 0, 10)]);
        assert_eq!(phase, Phase::Quiet);
        recorder.add(access(3, 0, 100));
        recorder.end();
        assert_eq!(recorder.take(Duration::ZERO, LONG), (vec![], Phase::Ended), "that is no start any more");
    }

    #[test]
    fn what_a_start_reads_that_does_not_become_quiet() {
        let recorder = Recorder::new(40);
        let pause = Duration::from_millis(20);
        recorder.add(access(1, 0, 40));
        assert_eq!(recorder.take(LONG, pause), (vec![access(1, 0, 40)], Phase::Growing));
        recorder.add(access(1, 40, 1));
        recorder.add(access(2, 0, 1));
        assert_eq!(recorder.take(LONG, pause), (vec![access(1, 40, 1), access(2, 0, 1)], Phase::Growing));
        // Nothing new is nothing to be taken.
        assert_eq!(recorder.take(3 * pause, pause), (vec![], Phase::Quiet));
    }

    #[test]
    fn a_start_that_reads_little_is_none() {
        let recorder = Recorder::new(40);
        recorder.add(access(1, 0, 10));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| recorder.take(Duration::ZERO, Duration::ZERO));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waiting.is_finished());
            recorder.end();
            assert_eq!(waiting.join().unwrap(), (vec![], Phase::Ended));
        });
    }
}
