//! What was not unpacked, so that not every start tries it again. Runs as the user on the host.
//!
//! Much that starts read cannot be a layer's: files with several names or extended attributes, a small part of a very large one. And
//! a disk or a quota that an unpacker has filled is full for everybody while it is. The file `profile-KEY.skip` says what
//! an unpacker would begin with (a digest of what starts have read, of the layers, and of the limits) and until when nobody begins
//! with the same again. It is a hint: whatever is in it, programs see the image's files.

use std::io::Read as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mizzen_core::Digest;
use sha2::{Digest as _, Sha256};

use super::choose::lengths;
use super::layer::Layer;
use super::reads::parse_reads;
use crate::stage::cache::Cache;

const HEAD: &str = "mizzen-skip 1";
/// Longer than it ever is.
const LIMIT: u64 = 200;

/// Why nothing was unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It is not worth it, and will not be.
    TooLittle,
    /// There is no room for it among other files.
    NoRoom,
    /// The disk, or the user's part of it, was full while it was being written.
    Full,
}

impl Why {
    /// For how long; for ever if it does not say.
    fn lasts(self) -> Option<Duration> {
        match self {
            Why::TooLittle => None,
            Why::NoRoom => Some(Duration::from_secs(3600)),
            Why::Full => Some(Duration::from_secs(86400)),
        }
    }
}

/// What an unpacker begins with: the files and about how much of them was read, the layers that there are, and the limits. In which
/// order and how often programs read something differs each time.
pub fn begins_with(text: &[u8], layers: &[Layer], limits: &str) -> Digest {
    let mut hash = Sha256::new();
    hash.update(limits);
    for layer in layers {
        hash.update(format!("\n{} {}", layer.dev, layer.ino));
    }
    for (path, length) in parse_reads(text).map(lengths).unwrap_or_default() {
        hash.update(format!("\n{} ", u64::BITS - length.leading_zeros()));
        hash.update(path);
    }
    Digest::new(hash.finalize().into())
}

/// What is written down.
pub fn text(what: Digest, why: Why) -> String {
    let until = why.lasts().map_or(u64::MAX, |lasts| now().saturating_add(lasts.as_secs()));
    format!("{HEAD}\n{} {until}\n", what.hex())
}

/// Whether the file says that nobody is to begin with this now.
pub fn holds(cache: &Cache, name: &str, what: impl FnOnce() -> Digest) -> bool {
    let mut text = String::new();
    let read = cache.open_file(name).map(|file| file.take(LIMIT).read_to_string(&mut text));
    if !matches!(read, Ok(Ok(1..))) {
        return false;
    }
    is_said(&text, what(), now())
}

fn is_said(text: &str, what: Digest, now: u64) -> bool {
    let said = || {
        let (digest, until) =
            text.strip_prefix(HEAD)?.strip_prefix('\n')?.strip_suffix('\n')?.split_once(' ')?;
        Some(digest == what.hex() && now < until.parse().ok()?)
    };
    said().unwrap_or(false)
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_is_skipped_as_long_as_it_lasts() {
        let profile =
            |reads: &str| begins_with(format!("mizzen-profile 1\n{reads}end\n").as_bytes(), &[], "l");
        let what = profile("0 1000 /a\n0 5 /b\n");
        // In another order, in other parts, a little more.
        assert_eq!(what, profile("0 5 /b\n500 510 /a\n0 500 /a\n"));
        for other in
            ["0 1000 /a\n", "0 1000 /a\n0 5 /c\n", "0 9000 /a\n0 5 /b\n", "0 1000 /a\n0 5 /b\n0 0 /c\n"]
        {
            assert_ne!(what, profile(other), "{other}");
        }
        assert_ne!(
            what,
            begins_with(b"mizzen-profile 1\n0 1000 /a\n0 5 /b\nend\n", &[], "m"),
            "other limits"
        );
        for (why, lasts) in [(Why::NoRoom, 3600), (Why::Full, 86400), (Why::TooLittle, u64::MAX - now() - 10)]
        {
            let (text, now) = (text(what, why), now());
            assert!(is_said(&text, what, now) && is_said(&text, what, now + lasts - 10), "{why:?}");
            assert!(!is_said(&text, what, (now + 10).saturating_add(lasts)), "{why:?}");
            assert!(!is_said(&text, profile(""), now));
            assert!(
                text.len() < LIMIT as usize && (0..text.len()).all(|cut| !is_said(&text[..cut], what, now))
            );
        }
    }
}
