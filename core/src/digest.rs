//! The digest of an image's content, and the form in which users write it: `IMAGE@sha256:HEX`.

use std::fmt;

/// A SHA-256 of all bytes of an image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

/// Between an image's name and its digest.
const MARK: &[u8] = b"@sha256:";
/// Hexadecimal digits of a digest.
const DIGITS: usize = 64;

impl Digest {
    /// From the hash itself.
    pub fn new(hash: [u8; 32]) -> Digest {
        Digest(hash)
    }

    /// Reads `sha256:HEX`, or the digits alone.
    pub fn parse(text: &str) -> Option<Digest> {
        let digits = text.strip_prefix("sha256:").unwrap_or(text).as_bytes();
        if digits.len() != DIGITS {
            return None;
        }
        let mut hash = [0; 32];
        for (byte, pair) in hash.iter_mut().zip(digits.chunks(2)) {
            let digit = |digit: u8| char::from(digit).to_digit(16);
            *byte = u8::try_from(digit(pair[0])? * 16 + digit(pair[1])?).ok()?;
        }
        Some(Digest(hash))
    }

    /// The digits alone, for file names.
    pub fn hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

/// Takes the digest off an image's name. Only the whole form counts, so that a name with an `@` in it is a name; a file
/// that is really called so has to be renamed, because a pin that is ignored would be worse.
pub fn split_pin(name: &[u8]) -> (&[u8], Option<Digest>) {
    let Some(at) = name.len().checked_sub(MARK.len() + DIGITS) else { return (name, None) };
    let (image, pin) = name.split_at(at);
    match pin.strip_prefix(MARK).and_then(|hex| Digest::parse(std::str::from_utf8(hex).ok()?)) {
        Some(digest) => (image, Some(digest)),
        None => (name, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_form_is_a_pin() {
        let hex = "0123456789abcdefABCDEF".repeat(3)[..64].to_owned();
        let pinned = format!("/a@b/tf.sqsh@sha256:{hex}");
        let (name, digest) = split_pin(pinned.as_bytes());
        assert_eq!(name, b"/a@b/tf.sqsh");
        assert_eq!(digest.unwrap().to_string(), format!("sha256:{}", hex.to_lowercase()));
        let short = &pinned[..pinned.len() - 1];
        let other = pinned.replace('4', "g");
        for name in [short, &other, "tf.sqsh", "", &pinned.replace("sha256:", "sha512:")] {
            assert_eq!(split_pin(name.as_bytes()), (name.as_bytes(), None));
        }
        assert_eq!(Digest::parse(&"ü".repeat(32)), None);
    }
}
