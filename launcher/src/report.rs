//! What users read: failures and notes on standard error, results on standard output. Runs as the user.

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use mizzen_core::Failure;
use mizzen_core::failure::cause;

use crate::sys;

/// Tells the user why something failed.
pub fn report(failure: &Failure) {
    // Nobody is left to be told when this fails.
    let _ = std::io::stderr().write_all(message(failure).as_bytes());
}

/// A failure as the user reads it.
pub fn message(failure: &Failure) -> String {
    let hint = failure.hint.iter().map(|hint| format!("mizzen: hint: {hint}\n"));
    format!("mizzen: {failure}\n{}", hint.collect::<String>())
}

/// Tells the user something that is no failure.
pub fn report_note(note: &str) {
    let _ = std::io::stderr().write_all(note_message(note).as_bytes());
}

/// A note as the user reads it.
pub fn note_message(note: &str) -> String {
    format!("mizzen: note: {note}\n")
}

/// Of all processes of a job step that wait for the same, one tells the user how it goes.
pub fn speaks_for_step() -> bool {
    let first = |name: &str| std::env::var_os(name).is_none_or(|value| value == "0");
    first("SLURM_NODEID") && first("SLURM_LOCALID")
}

/// Refuses a standard output that was closed, where what is written would be lost.
pub fn check_stdout() -> std::io::Result<()> {
    sys::check_stdout()
}

/// Writes a result.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout();
    let write = check_stdout().and_then(|()| stdout.write_all(text.as_bytes()));
    // What is still in memory at the end of the program would be lost without a word.
    written(write.and_then(|()| stdout.flush()))
}

/// Whether a result has been written. A reader that has gone away (`| head`) is no failure.
pub fn written(outcome: std::io::Result<()>) -> Result<(), Failure> {
    match outcome {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::new(format!("cannot write the result: {}", cause(&error))))
        }
        _ => Ok(()),
    }
}

/// A number of bytes, for people.
pub fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

/// How long ago, roughly, from seconds since 1970.
pub fn age(seconds: i64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs() as i64);
    match (now - seconds).max(0) {
        seconds if seconds < 120 => format!("{seconds} s"),
        seconds if seconds < 7200 => format!("{} min", seconds / 60),
        seconds if seconds < 172_800 => format!("{} h", seconds / 3600),
        seconds => format!("{} days", seconds / 86_400),
    }
}
