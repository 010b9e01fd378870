//! Progress of long work: a bar on a terminal, a line now and then elsewhere. Work that ends within two seconds shows
//! nothing.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use rustix::termios::tcgetwinsize;

/// Nothing is shown before.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Characters of a bar.
const BAR: u64 = 24;
/// Of a terminal that does not tell.
const COLUMNS: usize = 80;

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
        let percent = self.done.saturating_mul(100).checked_div(self.total).unwrap_or(100).min(100);
        let rate = self.done as f64 / self.begin.elapsed().as_secs_f64().max(0.001) / 1e6;
        if self.terminal {
            self.show(|| format!("{} {percent:>3} % {rate:.0} MB/s", bar(percent)));
        } else {
            self.show(|| format!("{percent} % ({rate:.0} MB/s)"));
        }
    }

    /// It goes on, and nobody knows how far it is.
    pub fn wait(&mut self) {
        let seconds = self.begin.elapsed().as_secs();
        self.show(|| format!("{seconds} s"));
    }

    fn show(&mut self, state: impl Fn() -> String) {
        let pause = if self.terminal { Duration::from_millis(200) } else { Duration::from_secs(5) };
        let waited = self.last.map_or(self.begin.elapsed() >= TIMEOUT, |last| last.elapsed() >= pause);
        if waited && self.speaks {
            self.last = Some(Instant::now());
            let what = format!("mizzen: {}: ", self.what);
            let state = state();
            // Progress that cannot be shown is no failure.
            let _ = if self.terminal {
                // A line that the terminal breaks could not be renewed.
                let width = tcgetwinsize(std::io::stderr()).map_or(0, |size| usize::from(size.ws_col));
                let width = if width == 0 { COLUMNS } else { width };
                let room = width.saturating_sub(state.chars().count() + 1);
                write!(std::io::stderr(), "{}{state}\x1b[K\r", shortened(&what, room))
            } else {
                writeln!(std::io::stderr(), "{what}{state}")
            };
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

fn bar(percent: u64) -> String {
    let full = (percent * BAR / 100) as usize;
    format!("[{}{}]", "#".repeat(full), "-".repeat(BAR as usize - full))
}

/// A text that takes no more than so many characters; its end says more than its beginning.
fn shortened(text: &str, room: usize) -> String {
    let surplus = text.chars().count().saturating_sub(room);
    if surplus == 0 { text.to_owned() } else { text.chars().skip(surplus).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_fills_up() {
        assert_eq!(bar(0), format!("[{}]", "-".repeat(24)));
        assert_eq!(bar(50), format!("[{}{}]", "#".repeat(12), "-".repeat(12)));
        assert_eq!(bar(99), format!("[{}-]", "#".repeat(23)));
        assert_eq!(bar(100), format!("[{}]", "#".repeat(24)));
    }

    #[test]
    fn long_names_lose_their_beginning() {
        assert_eq!(shortened("mizzen: é: ", 20), "mizzen: é: ");
        assert_eq!(shortened("mizzen: é: ", 4), " é: ");
        assert_eq!(shortened("mizzen", 0), "");
    }
}
