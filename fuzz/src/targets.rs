//! The parsers of all crates.

use mizzen::fuzz::{TARGETS, Target};

/// All of them.
pub fn all() -> impl Iterator<Item = Target> {
    TARGETS.into_iter().chain(mizzen_import::fuzz::TARGETS)
}
