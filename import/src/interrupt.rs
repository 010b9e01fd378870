//! What an interrupted import removes: Ctrl-C, SIGTERM and SIGHUP end the program as they always do, but first its temporary
//! names go. (After SIGKILL a later run removes them.)
//!
//! Run by: the user, in the importer.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use mizzen::signals::is_ignored;
use mizzen_core::Failure;
use nix::sys::signal::{SigSet, Signal, raise};

/// What ends an import in an orderly way. A core dump (SIGQUIT) is to show the program as it was.
const SIGNALS: [Signal; 3] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];

type Action = Box<dyn Fn() + Send>;

static ACTIONS: Mutex<BTreeMap<u64, Action>> = Mutex::new(BTreeMap::new());

fn actions() -> MutexGuard<'static, BTreeMap<u64, Action>> {
    ACTIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Something that is done if the program is interrupted while this lives.
pub struct OnInterrupt(u64);

impl OnInterrupt {
    /// From now on.
    pub fn new(action: impl Fn() + Send + 'static) -> OnInterrupt {
        let mut actions = actions();
        let number = actions.last_key_value().map_or(0, |(last, _)| last + 1);
        actions.insert(number, Box::new(action));
        OnInterrupt(number)
    }
}

impl Drop for OnInterrupt {
    fn drop(&mut self) {
        actions().remove(&self.0);
    }
}

/// Begins to listen, in a thread: a handler could do next to nothing. To be called before there are other threads, which
/// must not get these signals. Who ignores one (nohup) goes on doing so.
pub fn listen() -> Result<(), Failure> {
    let mut signals = SigSet::empty();
    for signal in SIGNALS.into_iter().filter(|signal| !is_ignored(*signal)) {
        signals.add(signal);
    }
    signals.thread_block().map_err(|errno| Failure::caused_by("cannot block signals", errno))?;
    let wait = move || {
        loop {
            if let Ok(signal) = signals.wait() {
                // Kept until the end: what is begun now would stay.
                let actions = actions();
                actions.values().for_each(|action| action());
                // Now it does what it always does, and the shell learns which it was.
                let _ = signals.thread_unblock();
                let _ = raise(signal);
            }
        }
    };
    let started = std::thread::Builder::new().name("interrupt".to_owned()).spawn(wait);
    started.map(drop).map_err(|error| Failure::caused_by("cannot start a thread", error))
}
