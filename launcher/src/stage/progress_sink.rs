//! Who is told how a copy goes. Runs as the user on the host.

use std::path::Path;

use mizzen_core::node_name;

use crate::image::shown;
use crate::progress::Progress;
use crate::report::{report_note, speaks_for_step};

/// What takes its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// A copy is made.
    Copying,
    /// One that is there is read.
    Verifying,
}

/// Who is told how a copy goes on.
pub trait ProgressSink {
    /// So many bytes are done.
    fn advance(&mut self, doing: Activity, done: u64, total: u64);
    /// Something that is no failure.
    fn note(&mut self, text: &str);
}

/// The user's terminal, or the output of their job.
pub struct StderrSink<'a> {
    path: &'a Path,
    progress: Option<(Progress, Activity, u64)>,
}

impl<'a> StderrSink<'a> {
    /// For the copy of this image.
    pub fn new(path: &'a Path) -> StderrSink<'a> {
        StderrSink { path, progress: None }
    }
}

impl ProgressSink for StderrSink<'_> {
    fn advance(&mut self, doing: Activity, done: u64, total: u64) {
        let what = match doing {
            Activity::Copying => "copying to the node",
            Activity::Verifying => "verifying the copy on the node",
        };
        // Other work, and a second attempt, begin anew.
        let shown = self.progress.take().filter(|(_, before, shown)| *before == doing && *shown <= done);
        let (mut progress, _, shown) = shown.unwrap_or_else(|| (progress(self.path, what, total), doing, 0));
        progress.advance(done - shown);
        self.progress = Some((progress, doing, done));
    }

    fn note(&mut self, text: &str) {
        if speaks_for_step() {
            note(text, None);
        }
    }
}

/// Shows how far it is.
pub fn progress(path: &Path, what: &str, total: u64) -> Progress {
    Progress::new(format!("{}: {}: {what}", node_name(), shown(path)), total, speaks_for_step())
}

/// Tells the user something that is no failure.
pub fn note(text: &str, hint: Option<&str>) {
    let hint = hint.map_or_else(String::new, |hint| format!(" ({hint})"));
    report_note(&format!("{}: {text}{hint}", node_name()));
}
