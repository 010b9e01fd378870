//! The digest of a blob, as manifests write it: `sha256:HEX` or `sha512:HEX`.
//!
//! Run by: the user, in the importer.

use std::fmt;

use mizzen_core::failure::quote;
use mizzen_core::{Digest, Failure};
use sha2::{Digest as _, Sha256, Sha512};

/// What a blob's bytes must hash to. Other algorithms are refused: what cannot be checked is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BlobDigest {
    /// SHA-256, which all registries use.
    Sha256([u8; 32]),
    /// SHA-512, which the specification also knows.
    Sha512([u8; 64]),
}

impl BlobDigest {
    /// Reads `sha256:HEX` or `sha512:HEX`, in lower case as the specification wants it: the text is part of names and addresses.
    pub fn parse(text: &str) -> Result<BlobDigest, Failure> {
        let bad = |problem: &str| {
            Failure::new(format!("\"{}\" is not a digest: {problem}", quote(text.as_bytes())))
        };
        match text.split_once(':') {
            Some(("sha256", digits)) => unhex(digits)
                .map(BlobDigest::Sha256)
                .ok_or_else(|| bad("sha256: is followed by 64 hexadecimal digits in lower case")),
            Some(("sha512", digits)) => unhex(digits)
                .map(BlobDigest::Sha512)
                .ok_or_else(|| bad("sha512: is followed by 128 hexadecimal digits in lower case")),
            Some(_) => Err(bad("only sha256 and sha512 can be verified")),
            None => Err(bad("it has no algorithm in front")),
        }
    }

    /// The digest of these bytes, by the same algorithm.
    pub fn of_same_kind(&self, bytes: &[u8]) -> BlobDigest {
        let mut hasher = self.hasher();
        hasher.update(bytes);
        hasher.finish()
    }

    /// Begins to hash what should come to this digest.
    pub fn hasher(&self) -> Hasher {
        match self {
            BlobDigest::Sha256(_) => Hasher::Sha256(Sha256::new()),
            BlobDigest::Sha512(_) => Hasher::Sha512(Box::new(Sha512::new())),
        }
    }

    /// The digits alone, for file names.
    pub fn hex(&self) -> String {
        let bytes: &[u8] = match self {
            BlobDigest::Sha256(bytes) => bytes,
            BlobDigest::Sha512(bytes) => bytes,
        };
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The form that references have; none for SHA-512.
    pub fn sha256(&self) -> Option<Digest> {
        match self {
            BlobDigest::Sha256(bytes) => Some(Digest::new(*bytes)),
            BlobDigest::Sha512(_) => None,
        }
    }
}

impl From<Digest> for BlobDigest {
    fn from(digest: Digest) -> BlobDigest {
        // Its text is the one way to its bytes, and always good.
        BlobDigest::Sha256(unhex(&digest.hex()).unwrap_or_default())
    }
}

impl fmt::Display for BlobDigest {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let algorithm = match self {
            BlobDigest::Sha256(_) => "sha256",
            BlobDigest::Sha512(_) => "sha512",
        };
        write!(f, "{algorithm}:{}", self.hex())
    }
}

fn unhex<const N: usize>(digits: &str) -> Option<[u8; N]> {
    let digits = digits.as_bytes();
    if digits.len() != 2 * N {
        return None;
    }
    let digit = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        *byte = digit(pair[0])? * 16 + digit(pair[1])?;
    }
    Some(bytes)
}

/// The SHA-256 of some bytes, in the form that references have.
pub fn sha256(bytes: &[u8]) -> Digest {
    Digest::new(Sha256::digest(bytes).into())
}

/// A digest under way.
#[derive(Clone)]
pub enum Hasher {
    /// SHA-256.
    Sha256(Sha256),
    /// SHA-512, whose state is larger.
    Sha512(Box<Sha512>),
}

impl Hasher {
    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha256(hasher) => hasher.update(bytes),
            Hasher::Sha512(hasher) => hasher.update(bytes),
        }
    }

    /// The digest of all bytes.
    pub fn finish(self) -> BlobDigest {
        match self {
            Hasher::Sha256(hasher) => BlobDigest::Sha256(hasher.finalize().into()),
            Hasher::Sha512(hasher) => BlobDigest::Sha512(hasher.finalize().into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_read_and_written() {
        let nothing = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let digest = BlobDigest::parse(nothing).unwrap();
        assert_eq!(digest.to_string(), nothing);
        assert_eq!(digest.of_same_kind(b""), digest);
        assert_eq!(BlobDigest::from(sha256(b"")), digest);
        assert_eq!(digest.sha256(), Some(sha256(b"")));
        let long = BlobDigest::parse(&format!("sha512:{}", "0".repeat(128))).unwrap();
        let abc = long.of_same_kind(b"abc").to_string();
        assert!(abc.starts_with("sha512:ddaf35a193617abacc417349ae204131"), "{abc}");
        assert_eq!(BlobDigest::parse(&abc).unwrap().to_string(), abc);
    }

    #[test]
    fn what_cannot_be_verified_is_refused() {
        let hex = "ab".repeat(32);
        for (text, problem) in [
            (format!("md5:{hex}"), "only sha256 and sha512 can be verified"),
            (hex.clone(), "it has no algorithm in front"),
            (format!("sha256:{}", hex.to_uppercase()), "64 hexadecimal digits in lower case"),
            (format!("sha256:{}", &hex[1..]), "64 hexadecimal digits in lower case"),
            (format!("sha512:{hex}"), "128 hexadecimal digits in lower case"),
            (format!("sha256:{}", "é".repeat(32)), "64 hexadecimal digits in lower case"),
            ("sha256:../../x".to_owned(), "64 hexadecimal digits in lower case"),
        ] {
            let failure = BlobDigest::parse(&text).unwrap_err();
            assert!(failure.message.ends_with(problem), "{failure}");
        }
    }
}
