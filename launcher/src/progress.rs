//! Progress of long work: a line that renews itself on a terminal, a line now and then elsewhere. Work that ends
//! within two seconds shows nothing.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Nothing is shown before.
const PATIENCE: Duration = Duration::from_secs(2);

/// The progress of one piece of work.
pub struct Progress {
    what: String,
    total: u64,
    done: u64,
    begin: Instant,
    last: Option<Instant>,
    terminal: bool,
    speaks: bool,
}

impl Progress {
    /// Work on `total` bytes. Nothing is shown unless `speaks`: of many who do the same, one shall tell.
    pub fn new(what: impl Into<String>, total: u64, speaks: bool) -> Progress {
        let terminal = std::io::stderr().is_terminal();
        Progress { what: what.into(), total, done: 0, begin: Instant::now(), last: None, terminal, speaks }
    }

    /// So many bytes more are done.
    pub fn advance(&mut self, bytes: u64) {
        self.done += bytes;
        let percent = self.done.saturating_mul(100).checked_div(self.total).unwrap_or(100);
        let rate = self.done as f64 / self.begin.elapsed().as_secs_f64().max(0.001) / 1e6;
        self.show(|| format!("{percent} % ({rate:.0} MB/s)"));
    }

    /// It goes on, and nobody knows how far it is.
    pub fn wait(&mut self) {
        let seconds = self.begin.elapsed().as_secs();
        self.show(|| format!("{seconds} s"));
    }

    fn show(&mut self, state: impl Fn() -> String) {
        let pause = if self.terminal { Duration::from_millis(200) } else { Duration::from_secs(5) };
        let waited = self.last.map_or(self.begin.elapsed() >= PATIENCE, |last| last.elapsed() >= pause);
        if waited && self.speaks {
            self.last = Some(Instant::now());
            let end = if self.terminal { "\x1b[K\r" } else { "\n" };
            // Progress that cannot be shown is no failure.
            let _ = write!(std::io::stderr(), "mizzen: {}: {}{end}", self.what, state());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.last.is_some() && self.terminal {
            let _ = write!(std::io::stderr(), "\x1b[K\r");
        }
    }
}
