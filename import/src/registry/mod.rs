//! Registries: from a name to a manifest and its blobs.
//!
//! `client.rs` shows what is asked of a registry, `transport/` how servers are reached, `auth/` how they let us in,
//! `credentials/` with whose name, `login.rs` how those get there.
//!
//! Run by: the user, in the importer.

mod auth;
mod backoff;
mod blob;
mod client;
mod credentials;
mod endpoint;
mod environment;
pub mod fuzz;
mod login;
mod notes;
mod secret;
mod status;
mod transport;

use std::error::Error;
use std::io;

use mizzen_core::Failure;
use mizzen_core::failure::cause;

pub use blob::Blob;
pub use client::{Client, ClientOptions, Fetched, RemoteImage};
pub use environment::Environment;
pub use login::{PasswordSource, login, logout, password_from_stdin};
pub use notes::Notes;
pub use secret::Secret;
pub use transport::Timing;

/// The failure in an error of a stream, also where a decompressor has put its own around it.
pub fn failure_of(error: io::Error) -> Failure {
    let mut inner = error.get_ref().map(|inner| inner as &(dyn Error + 'static));
    while let Some(found) = inner {
        if let Some(failure) = found.downcast_ref::<Failure>() {
            return failure.clone();
        }
        // The reason of an error of input and output is not what it wraps, but the reason of that.
        inner = match found.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
            Some(wrapped) => Some(wrapped as &(dyn Error + 'static)),
            None => found.source(),
        };
    }
    Failure::new(cause(&error))
}
