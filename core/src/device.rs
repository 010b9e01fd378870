//! The name of a device in a CDI specification: `vendor.com/class=name`.

use std::fmt;

use crate::Failure;
use crate::failure::quote;

/// A device by its whole name. Both parts have passed [`DeviceName::parse`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceName {
    /// `vendor.com/class`.
    pub kind: String,
    /// The device among those of its kind.
    pub name: String,
}

impl DeviceName {
    /// Parses `vendor.com/class=name`.
    pub fn parse(text: &[u8]) -> Result<DeviceName, Failure> {
        let parts = std::str::from_utf8(text).ok().and_then(|text| text.split_once('='));
        match parts.filter(|(kind, name)| is_device_kind(kind) && is_device_name(name)) {
            Some((kind, name)) => Ok(DeviceName { kind: kind.to_owned(), name: name.to_owned() }),
            None => Err(Failure::new(format!("\"{}\" is not the name of a device", quote(text)))
                .hint("write vendor.com/class=name, as in nvidia.com/gpu=0; several joined by commas")),
        }
    }

    /// Parses several, joined by commas.
    pub fn parse_list(text: &[u8]) -> Result<Vec<DeviceName>, Failure> {
        text.split(|byte| *byte == b',').map(DeviceName::parse).collect()
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}={}", self.kind, self.name)
    }
}

/// Whether a text is `vendor.com/class`.
pub fn is_device_kind(text: &str) -> bool {
    text.split_once('/')
        .is_some_and(|(vendor, class)| is_word(vendor, "_-.", false) && is_word(class, "_-.", false))
}

/// Whether a text can be the name of a device among those of its kind.
pub fn is_device_name(text: &str) -> bool {
    is_word(text, "_-.:", true)
}

/// Letters, digits and some further characters, with a letter at the beginning and a letter or digit at the end.
fn is_word(text: &str, further: &str, digit_first: bool) -> bool {
    let first = |first: char| first.is_ascii_alphabetic() || digit_first && first.is_ascii_digit();
    text.starts_with(first)
        && text.ends_with(|last: char| last.is_ascii_alphanumeric())
        && text.chars().all(|letter| letter.is_ascii_alphanumeric() || further.contains(letter))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed() {
        let names = DeviceName::parse_list(b"nvidia.com/gpu=0,nvidia.com/gpu=GPU-0a:1,x/y.z_a=all").unwrap();
        let texts: Vec<String> = names.iter().map(DeviceName::to_string).collect();
        assert_eq!(texts, ["nvidia.com/gpu=0", "nvidia.com/gpu=GPU-0a:1", "x/y.z_a=all"]);
        for bad in [
            "",
            "0",
            "gpu=0",
            "nvidia.com/gpu",
            "nvidia.com/gpu=",
            "/gpu=0",
            "a/b/c=0",
            "a/b=-",
            "a/b=0,",
            "1a/b=0",
            "a/b=0\n",
        ] {
            let failure = DeviceName::parse_list(bad.as_bytes()).unwrap_err();
            assert!(failure.message.ends_with("is not the name of a device"), "{bad:?}: {failure}");
        }
    }
}
