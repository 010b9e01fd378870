//! Passwords and tokens. No message and no log can show one by accident.
//!
//! Run by: the user, in the importer.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// A password, a token, or a header with one of them in it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// From its text.
    pub fn new(text: impl Into<String>) -> Secret {
        Secret(text.into())
    }

    /// The text, for the one who must know it.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// The header of Basic authentication.
    pub fn basic(user: &str, password: &Secret) -> Secret {
        Secret(format!("Basic {}", STANDARD.encode(format!("{user}:{}", password.0))))
    }

    /// The header with a token.
    pub fn bearer(token: &Secret) -> Secret {
        Secret(format!("Bearer {}", token.0))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("…")
    }
}
