//! The importer: images from registries and archives become squashfs files. A program of its own beside the launcher, so that
//! neither what every task executes nor what root runs has TLS, HTTP or archives in it.
//!
//! Runs as the user, on any machine.

pub mod assemble;
mod commands;
mod conversion;
pub mod decompress;
mod dispatch;
pub mod export;
pub mod failures;
pub mod fuzz;
mod images;
pub mod import;
pub mod interrupt;
pub mod layer;
pub mod manifest;
pub mod output;
pub mod progress;
pub mod registry;
pub mod replay;
pub mod source;
pub mod store;
pub mod tar;
mod whiteout;

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

pub use dispatch::run_process;

/// A path as a message shows it.
pub(crate) fn shown(path: &Path) -> String {
    mizzen_core::failure::quote(path.as_os_str().as_bytes())
}
