//! `key=value` pairs in one environment variable: joined by `&`, with every unusual byte as %XX, so that the text
//! survives every shell, log and language on its way.

use crate::Failure;
use crate::escape::{escape, unescape};
use crate::failure::quote;

/// The text of these pairs.
pub fn encode<'a>(pairs: impl IntoIterator<Item = (&'a str, Vec<u8>)>) -> String {
    let pairs: Vec<String> =
        pairs.into_iter().map(|(key, value)| format!("{key}={}", escape(&value))).collect();
    pairs.join("&")
}

/// The pairs in a text that anybody may have written; every key is there once.
pub fn decode(text: &[u8]) -> Result<Vec<(String, Vec<u8>)>, Failure> {
    let mut pairs: Vec<(String, Vec<u8>)> = Vec::new();
    for pair in text.split(|byte| *byte == b'&') {
        let equals = pair.iter().position(|byte| *byte == b'=').unwrap_or(pair.len());
        let (key, value) = (quote(&pair[..equals]), pair.get(equals + 1..).unwrap_or_default());
        let value =
            unescape(value).ok_or_else(|| Failure::new(format!("bad escape in \"{}\"", quote(value))))?;
        if pairs.iter().any(|(known, _)| *known == key) {
            return Err(Failure::new(format!("\"{key}\" is there twice")));
        }
        pairs.push((key, value));
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_survives() {
        let all: Vec<u8> = (0..=255).collect();
        let text = encode([("a", all.clone()), ("b-c", Vec::new())]);
        assert!(text.bytes().all(|byte| byte.is_ascii_graphic()), "{text}");
        assert_eq!(decode(text.as_bytes()), Ok(vec![("a".to_owned(), all), ("b-c".to_owned(), Vec::new())]));
    }

    #[test]
    fn nonsense_is_refused() {
        for (text, message) in [
            (&b"a=%4"[..], "bad escape in \"%4\""),
            (b"a=%zz", "bad escape in \"%zz\""),
            (b"a=1&a=2", "\"a\" is there twice"),
        ] {
            assert_eq!(decode(text).unwrap_err().message, message);
        }
    }
}
