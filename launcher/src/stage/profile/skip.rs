//! What was not unpacked, so that not every start tries it again. Runs as the user on the host.
//!
//! Much that starts read cannot be a layer's: files with several names or extended attributes, a small part of a very large one. A
//! disk or a quota that an unpacker has filled is full for everybody while it is. And where users have no overlays, no start could use a
//! layer. The file `profile-KEY.skip` has the files that an unpacker did not unpack, how much of them was read, the layers and limits on
//! which that depends, and until when it holds. Only what starts read beside that is a reason to begin again: no two starts read quite
//! the same. It is a hint: whatever is in it, programs see the image's files.

use std::io::Read as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mizzen_core::Digest;
use sha2::{Digest as _, Sha256};

use super::PROFILE_LIMIT;
use super::layer::Layer;
use super::reads::Lengths;
use crate::stage::cache::Cache;

const HEAD: &str = "mizzen-skip 1";

/// Why nothing was unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It is not worth it, and will not be.
    TooLittle,
    /// There is no room for it among other files.
    NoRoom,
    /// The disk, or the user's part of it, was full while it was being written.
    Full,
    /// No start could put it over an image here.
    NoOverlay,
}

impl Why {
    /// For how long; for ever if it does not say.
    fn lasts(self) -> Option<Duration> {
        match self {
            Why::TooLittle => None,
            Why::NoRoom => Some(Duration::from_secs(3600)),
            Why::Full | Why::NoOverlay => Some(Duration::from_secs(86400)),
        }
    }
}

/// On what it depends beside the files.
pub fn circumstances(layers: &[Layer], limits: &str) -> Digest {
    let mut hash = Sha256::new();
    hash.update(limits);
    for layer in layers {
        hash.update(format!("\n{} {}", layer.dev, layer.ino));
    }
    Digest::new(hash.finalize().into())
}

/// What is written down of files that no layer has.
pub fn text(circumstances: Digest, lacking: &Lengths, why: Why) -> Vec<u8> {
    let until = why.lasts().map_or(u64::MAX, |lasts| now().saturating_add(lasts.as_secs()));
    let head = format!("{HEAD} {until} {}\n", circumstances.hex());
    [head.into_bytes(), lacking.text(PROFILE_LIMIT)].concat()
}

/// What the file says, if it holds now.
pub fn read(cache: &Cache, name: &str, circumstances: Digest) -> Vec<u8> {
    let mut text = Vec::new();
    if let Ok(file) = cache.open_file(name) {
        let _ = file.take(2 * PROFILE_LIMIT as u64).read_to_end(&mut text);
    }
    said(&text, circumstances, now()).map(<[u8]>::to_vec).unwrap_or_default()
}

fn said(text: &[u8], circumstances: Digest, now: u64) -> Option<&[u8]> {
    let end = text.iter().position(|byte| *byte == b'\n')?;
    let (head, files) = text.split_at(end + 1);
    let head = std::str::from_utf8(head).ok()?.strip_prefix(HEAD)?.strip_prefix(' ')?;
    let (until, digest) = head.strip_suffix('\n')?.split_once(' ')?;
    (digest == circumstances.hex() && now < until.parse().ok()?).then_some(files)
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs())
}

#[cfg(test)]
mod tests {
    use super::super::reads::parse_reads;
    use super::*;

    fn lengths(text: &[u8]) -> Lengths<'_> {
        parse_reads(text).map(Lengths::of).unwrap_or_default()
    }

    #[test]
    fn the_same_is_skipped_as_long_as_it_lasts() {
        let lacking = lengths(b"mizzen-profile 1\n0 1000 /a\n0 5 /b\nend\n");
        let what = circumstances(&[], "limits");
        assert_ne!(what, circumstances(&[], "others"));
        let lasts = [
            (Why::NoRoom, 3600),
            (Why::Full, 86400),
            (Why::NoOverlay, 86400),
            (Why::TooLittle, u64::MAX - now() - 10),
        ];
        for (why, lasts) in lasts {
            let (text, now) = (text(what, &lacking, why), now());
            for later in [0, lasts - 10] {
                let skipped = lengths(said(&text, what, now + later).unwrap());
                assert_eq!(skipped, lacking, "{why:?}");
            }
            assert_eq!(said(&text, what, (now + 10).saturating_add(lasts)), None, "{why:?}");
            assert_eq!(said(&text, circumstances(&[], "others"), now), None);
            // What is torn says nothing.
            let torn = (0..text.len()).filter_map(|cut| said(&text[..cut], what, now)).map(lengths);
            assert!(torn.into_iter().all(|files| files.0.is_empty()));
        }
    }
}
