//! Text for one environment variable: printable ASCII without quotes, spaces, `=` and `&`, whatever the bytes are.

use std::fmt::Write;

/// Every unusual byte as %XX.
pub fn escape(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for byte in bytes {
        if byte.is_ascii_alphanumeric() || b"/._-+:@,~".contains(byte) {
            text.push(char::from(*byte));
        } else {
            // Writing to a String cannot fail.
            let _ = write!(text, "%{byte:02X}");
        }
    }
    text
}

/// The bytes again; None if a % is not followed by two digits.
pub fn unescape(text: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.iter();
    while let Some(byte) = rest.next() {
        if *byte != b'%' {
            bytes.push(*byte);
            continue;
        }
        let high = char::from(*rest.next()?).to_digit(16)?;
        let low = char::from(*rest.next()?).to_digit(16)?;
        bytes.push(u8::try_from(high * 16 + low).ok()?);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_comes_back() {
        let all: Vec<u8> = (0..=255).collect();
        let text = escape(&all);
        assert!(text.bytes().all(|byte| byte.is_ascii_graphic() && !b"&=\"'\\".contains(&byte)), "{text}");
        assert_eq!(unescape(text.as_bytes()), Some(all));
        for broken in ["%", "%4", "%zz", "a%"] {
            assert_eq!(unescape(broken.as_bytes()), None, "{broken}");
        }
    }
}
