//! How far an import is: one bar per layer on a terminal, a line with the sum now and then elsewhere. What ends within two seconds
//! shows nothing.
//!
//! The bars are counters that threads add to without waiting for each other; one thread of their own draws them.
//!
//! Run by: the user, in the importer.

mod render;

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::termios::tcgetwinsize;

pub use render::WRITING;
use render::{Screen, State, lines, sum};

/// Nothing is shown before.
const DELAY: Duration = Duration::from_secs(2);
/// Between two drawings on a terminal, and between two lines elsewhere.
const REDRAW: Duration = Duration::from_millis(100);
const REPEAT: Duration = Duration::from_secs(5);

/// The bars of one import.
pub struct Bars {
    shared: Arc<Shared>,
    /// Its end stops the thread that draws.
    drawer: Option<(Sender<()>, JoinHandle<()>)>,
}

struct Shared {
    what: String,
    begin: Instant,
    terminal: bool,
    counters: Mutex<Vec<Arc<Counter>>>,
    /// What is on the terminal now; whoever writes there holds it.
    screen: Mutex<Screen>,
}

/// What a bar counts.
struct Counter {
    name: String,
    /// 0 if it is not known.
    total: AtomicU64,
    done: AtomicU64,
    finished: AtomicBool,
    /// How it ended.
    outcome: Mutex<&'static str>,
}

/// One bar. Its copies count for the same.
#[derive(Clone)]
pub struct Bar(Arc<Counter>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Bars {
    /// No bars yet. Nothing is ever shown unless `speaks`.
    pub fn new(speaks: bool) -> Bars {
        Bars::of("importing", speaks)
    }

    /// The same, with what the sum is of: `docker://…: importing`.
    pub fn of(what: impl Into<String>, speaks: bool) -> Bars {
        let dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
        let shared = Arc::new(Shared {
            what: what.into(),
            begin: Instant::now(),
            terminal: std::io::stderr().is_terminal() && !dumb,
            counters: Mutex::default(),
            screen: Mutex::default(),
        });
        let (stop, stopped) = mpsc::channel();
        let drawn = Arc::clone(&shared);
        let draw = move || {
            let mut pause = DELAY;
            while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                drawn.draw();
                pause = if drawn.terminal { REDRAW } else { REPEAT };
            }
        };
        // An import without bars is an import all the same.
        let thread = speaks.then(|| std::thread::Builder::new().name("progress".to_owned()).spawn(draw));
        let drawer = thread.and_then(Result::ok).map(|thread| (stop, thread));
        Bars { shared, drawer }
    }

    /// Adds a bar, of so many bytes if that is known.
    pub fn add(&self, name: impl Into<String>, total: Option<u64>) -> Bar {
        let counter = Arc::new(Counter {
            name: name.into(),
            total: AtomicU64::new(total.unwrap_or(0)),
            done: AtomicU64::new(0),
            finished: AtomicBool::new(false),
            outcome: Mutex::new(""),
        });
        lock(&self.shared.counters).push(Arc::clone(&counter));
        Bar(counter)
    }

    /// Writes a line above the bars: nothing else may write to standard error while there are some.
    pub fn print(&self, line: &str) {
        let mut screen = lock(&self.shared.screen);
        // Progress that cannot be shown is no failure.
        let _ = std::io::stderr().write_all(format!("{}{line}\n", screen.clear()).as_bytes());
    }
}

impl Drop for Bars {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.drawer.take() {
            drop(stop);
            let _ = thread.join();
        }
        let clear = lock(&self.shared.screen).clear();
        let _ = std::io::stderr().write_all(clear.as_bytes());
    }
}

impl Shared {
    fn draw(&self) {
        let counters = lock(&self.counters).clone();
        if counters.is_empty() {
            return;
        }
        let states: Vec<State> = counters.iter().map(|counter| counter.state()).collect();
        let mut screen = lock(&self.screen);
        let text = if self.terminal {
            let (width, height) = size_of_terminal();
            screen.redraw(lines(&states, width, height))
        } else {
            format!("mizzen: {}: {}\n", self.what, sum(&states, self.begin.elapsed()))
        };
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
}

/// Columns and lines.
fn size_of_terminal() -> (usize, usize) {
    let size = tcgetwinsize(std::io::stderr()).map_or((0, 0), |size| (size.ws_col, size.ws_row));
    match size {
        // One that does not tell.
        (0, _) | (_, 0) => (80, 24),
        (columns, lines) => (columns.into(), lines.into()),
    }
}

impl Counter {
    fn state(&self) -> State<'_> {
        let total = self.total.load(Ordering::Relaxed);
        State {
            name: &self.name,
            total: (total > 0).then_some(total),
            done: self.done.load(Ordering::Relaxed),
            outcome: self.finished.load(Ordering::Acquire).then(|| *lock(&self.outcome)),
        }
    }
}

impl Bar {
    /// So many bytes more are done.
    pub fn advance(&self, bytes: u64) {
        self.0.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// It begins again: a download that could not go on where it stopped.
    pub fn restart(&self) {
        self.0.done.store(0, Ordering::Relaxed);
    }

    /// Now it is known how much there is.
    pub fn set_total(&self, total: u64) {
        self.0.total.store(total, Ordering::Relaxed);
    }

    /// It is at its end: "done", "cached".
    pub fn done(&self, outcome: &'static str) {
        *lock(&self.0.outcome) = outcome;
        self.0.finished.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_count_together() {
        let bars = Bars::new(false);
        let bar = bars.add("layer", Some(4000));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let bar = bar.clone();
                scope.spawn(move || (0..1000).for_each(|_| bar.advance(1)));
            }
        });
        assert_eq!(bar.0.state().done, 4000);
        assert_eq!(bar.0.state().outcome, None);
        bar.done("cached");
        assert_eq!(bar.0.state().outcome, Some("cached"));
        bar.restart();
        bar.set_total(7);
        assert_eq!((bar.0.state().done, bar.0.state().total), (0, Some(7)));
    }

    #[test]
    fn what_ends_soon_shows_nothing_and_ends_at_once() {
        let begin = Instant::now();
        let bars = Bars::new(true);
        bars.add("layer", None).advance(5);
        drop(bars);
        assert!(begin.elapsed() < DELAY);
    }
}
