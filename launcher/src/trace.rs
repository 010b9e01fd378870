//! What a start tells of itself: how long its phases took, and, for tickets, everything that was tried
//! (`MIZZEN_LOG=debug`, `--container-verbose=debug`). Runs as the user; slurmstepd has none of it.
//!
//! This is a subscriber of our own for the crate tracing. The spans at level INFO are the phases of a start, the events at
//! level DEBUG are what was tried. It filters by level alone and needs no regular expressions; where nobody asks for events,
//! one costs a comparison.

use std::fmt;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mizzen_core::config::LogFormat;
use mizzen_core::failure::quote_up_to;
use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Metadata, Subscriber, debug};

/// `debug`: everything that is tried is told; `json`: the same as JSON lines.
const VARIABLE: &str = "MIZZEN_LOG";
/// An event may name a user's files; no line is longer.
const LINE_LIMIT: usize = 4096;

static DEBUG: AtomicBool = AtomicBool::new(false);
static JSON: AtomicBool = AtomicBool::new(false);
static PHASES: Mutex<Phases> = Mutex::new(Phases { names: Vec::new(), open: Vec::new(), ended: Vec::new() });

struct Phases {
    /// Of every span that there was; its number is the place in this list.
    names: Vec<&'static str>,
    /// The beginnings of those that are entered. Only the outermost is a phase.
    open: Vec<Instant>,
    ended: Vec<(&'static str, Duration)>,
}

fn lock() -> MutexGuard<'static, Phases> {
    PHASES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins to listen. Called once, at the start of a process.
pub fn init() {
    let wanted = std::env::var_os(VARIABLE).unwrap_or_default();
    JSON.store(wanted == "json", Ordering::Relaxed);
    DEBUG.store(wanted == "json" || wanted == "debug", Ordering::Relaxed);
    // Fails where somebody listens already, which is as good.
    let _ = tracing::subscriber::set_global_default(Recorder);
}

/// From now on everything that is tried is told.
pub fn enable_debug(format: LogFormat) {
    JSON.fetch_or(format == LogFormat::Json, Ordering::Relaxed);
    if !DEBUG.swap(true, Ordering::Relaxed) {
        // Those who have asked before were told that nobody listens.
        tracing::callsite::rebuild_interest_cache();
    }
}

/// How long the phases took: `stage 0.1 ms, plan 1.2 ms`.
pub fn phases() -> String {
    let show = |(name, took): &(&str, Duration)| format!("{name} {:.1} ms", took.as_secs_f64() * 1e3);
    lock().ended.iter().map(show).collect::<Vec<_>>().join(", ")
}

/// An error that is no failure of what is done here: only a ticket tells of it.
pub trait OrDebug<T> {
    /// The value, if there is one; `what` went without it.
    fn or_debug(self, what: &str) -> Option<T>;
}

impl<T, E: fmt::Display> OrDebug<T> for Result<T, E> {
    fn or_debug(self, what: &str) -> Option<T> {
        self.map_err(|error| debug!(%error, "{what}")).ok()
    }
}

struct Recorder;

impl Subscriber for Recorder {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.is_span() || DEBUG.load(Ordering::Relaxed)
    }

    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.enabled(metadata) { Interest::always() } else { Interest::never() }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(if DEBUG.load(Ordering::Relaxed) { LevelFilter::DEBUG } else { LevelFilter::INFO })
    }

    fn new_span(&self, span: &Attributes) -> Id {
        let mut phases = lock();
        phases.names.push(span.metadata().name());
        Id::from_u64(phases.names.len() as u64)
    }

    fn enter(&self, _: &Id) {
        lock().open.push(Instant::now());
    }

    fn exit(&self, span: &Id) {
        let mut phases = lock();
        let index = usize::try_from(span.into_u64()).unwrap_or(usize::MAX) - 1;
        if let (Some(begin), Some(name)) = (phases.open.pop(), phases.names.get(index).copied())
            && phases.open.is_empty()
        {
            phases.ended.push((name, begin.elapsed()));
        }
    }

    fn event(&self, event: &Event) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let line = if JSON.load(Ordering::Relaxed) { json_line(event, fields) } else { text_line(fields) };
        // Nobody is left to be told when this fails.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }

    fn record(&self, _: &Id, _: &Record) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}
}

/// `mizzen: debug: node1: no site copy: path=/shared/tf.sqsh`
fn text_line(fields: Fields) -> String {
    let mut text = fields.message;
    for (name, value) in fields.others {
        text.push_str(&format!(" {name}={value}"));
    }
    format!("mizzen: debug: {}: {}\n", mizzen_core::node_name(), quote_up_to(text.as_bytes(), LINE_LIMIT))
}

fn json_line(event: &Event, fields: Fields) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut line = Map::new();
    line.insert("time".to_owned(), json!(now.as_secs_f64()));
    line.insert("node".to_owned(), json!(mizzen_core::node_name()));
    line.insert("pid".to_owned(), json!(std::process::id()));
    line.insert("module".to_owned(), json!(event.metadata().target()));
    line.insert("message".to_owned(), json!(fields.message));
    line.extend(fields.others.into_iter().map(|(name, value)| (name.to_owned(), Value::from(value))));
    format!("{}\n", Value::from(line))
}

/// What an event says.
#[derive(Default)]
struct Fields {
    message: String,
    others: Vec<(&'static str, String)>,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            name => self.others.push((name, format!("{value:?}"))),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.others.push((field.name(), value.to_owned()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_line_and_harmless() {
        let fields =
            || Fields { message: "no copy".to_owned(), others: vec![("path", "/a\n\u{1b}[31m".to_owned())] };
        let line = text_line(fields());
        let own = mizzen_core::node_name();
        assert_eq!(line, format!("mizzen: debug: {own}: no copy path=/a\\n\\u{{1b}}[31m\n"));
        assert!(text_line(Fields { message: "x".repeat(9000), ..fields() }).len() < 2 * LINE_LIMIT);
    }

    #[test]
    fn the_outermost_spans_are_the_phases() {
        tracing::subscriber::with_default(Recorder, || {
            tracing::info_span!("outer").in_scope(|| tracing::info_span!("inner").in_scope(|| ()));
            tracing::info_span!("second").in_scope(|| ());
        });
        let phases = phases();
        assert!(phases.starts_with("outer ") && phases.contains(" ms, second "), "{phases}");
        assert!(!phases.contains("inner"), "{phases}");
    }
}
