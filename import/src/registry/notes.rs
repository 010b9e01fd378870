//! What the user is told that is no failure: waits, mirrors that fail, files that cannot be read.
//!
//! Run by: the user, in the importer.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// Who is told; shared by all threads.
#[derive(Clone)]
pub struct Notes {
    tell: Arc<dyn Fn(&str) + Send + Sync>,
    said: Arc<Mutex<HashSet<String>>>,
}

impl Notes {
    /// Tells by this function.
    pub fn new(tell: impl Fn(&str) + Send + Sync + 'static) -> Notes {
        Notes { tell: Arc::new(tell), said: Arc::default() }
    }

    /// Tells nobody.
    pub fn silent() -> Notes {
        Notes::new(|_| {})
    }

    /// Tells something.
    pub fn tell(&self, text: &str) {
        (self.tell)(text);
    }

    /// Tells something, and the same not again: every layer would.
    pub fn tell_once(&self, text: &str) {
        let new = self.said.lock().unwrap_or_else(PoisonError::into_inner).insert(text.to_owned());
        if new {
            self.tell(text);
        }
    }
}

impl fmt::Debug for Notes {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Notes")
    }
}
