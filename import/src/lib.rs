//! The importer: images from registries and archives become squashfs files. A program of its own beside the launcher, so that
//! neither what every task executes nor what root runs has TLS, HTTP or archives in it.
//!
//! Runs as the user, on any machine.

pub mod decompress;
pub mod manifest;
pub mod registry;
pub mod tar;
