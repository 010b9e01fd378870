//! The records of a PAX header: `LENGTH KEY=VALUE\n`, of which those are kept that we use.
//!
//! Run by: the user, in the importer.

use std::collections::BTreeMap;

use super::error::Problem;

type Result<T> = std::result::Result<T, Problem>;

/// Keys whose values replace something, and their values.
#[derive(Debug, Default)]
pub struct Records {
    values: BTreeMap<&'static str, Vec<u8>>,
    /// Offsets and lengths of GNU.sparse 0.0, whose keys come again and again.
    pub sparse_pairs: Vec<Vec<u8>>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// The keys that are kept as they are.
const KEYS: [&str; 14] = [
    "path",
    "linkpath",
    "size",
    "uid",
    "gid",
    "mtime",
    "SCHILY.devmajor",
    "SCHILY.devminor",
    "GNU.sparse.major",
    "GNU.sparse.minor",
    "GNU.sparse.name",
    "GNU.sparse.size",
    "GNU.sparse.realsize",
    "GNU.sparse.map",
];
const NUMBER_OF_PAIRS: &str = "GNU.sparse.numblocks";

impl Records {
    /// Reads the content of a PAX header. Of equal keys the last counts.
    pub fn parse(mut bytes: &[u8]) -> Result<Records> {
        let mut records = Records::default();
        let mut by_libarchive = BTreeMap::new();
        while !bytes.is_empty() {
            let (key, value, rest) = record(bytes)?;
            bytes = rest;
            if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                records.xattrs.insert(name.to_vec(), value.to_vec());
            } else if let Some(name) = key.strip_prefix(b"LIBARCHIVE.xattr.") {
                by_libarchive.extend(percent_decoded(name).zip(base64_decoded(value)));
            } else {
                records.keep(key, value)?;
            }
        }
        // Libarchive writes both forms, and its own only matters where the other is not there.
        for (name, value) in by_libarchive {
            records.xattrs.entry(name).or_insert(value);
        }
        // As with Go, an empty value means that there is none.
        records.xattrs.retain(|name, value| !name.is_empty() && !value.is_empty());
        Ok(records)
    }

    fn keep(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let is_length = match key {
            b"GNU.sparse.offset" => false,
            b"GNU.sparse.numbytes" => true,
            _ => {
                let known = KEYS.iter().chain([&NUMBER_OF_PAIRS]).find(|known| known.as_bytes() == key);
                if let Some(known) = known {
                    self.values.insert(known, value.to_vec());
                }
                return Ok(());
            }
        };
        // They alternate.
        if is_length != (self.sparse_pairs.len() % 2 == 1) {
            return Err(Problem::Map("with an offset or a length too many"));
        }
        self.sparse_pairs.push(value.to_vec());
        Ok(())
    }

    /// The value of a key, unless it is empty: then there is none.
    pub fn get(&self, key: &str) -> Option<&[u8]> {
        self.values.get(key).map(Vec::as_slice).filter(|value| !value.is_empty())
    }

    /// The number that a key has.
    pub fn number(&self, key: &str, field: &'static str) -> Result<Option<i64>> {
        self.get(key).map(|value| decimal(value).ok_or(Problem::Number { field })).transpose()
    }

    /// How many pairs the map of a sparse file has.
    pub fn number_of_pairs(&self) -> Option<i64> {
        self.get(NUMBER_OF_PAIRS).and_then(decimal)
    }

    /// The time, in whole seconds.
    pub fn mtime(&self) -> Result<Option<i64>> {
        self.get("mtime").map(|value| seconds(value).ok_or(Problem::Number { field: "time" })).transpose()
    }
}

/// The first record, and what follows it.
fn record(bytes: &[u8]) -> Result<(&[u8], &[u8], &[u8])> {
    const BAD_LENGTH: Problem = Problem::Record("with a wrong length");
    let space = bytes.iter().position(|byte| *byte == b' ').ok_or(BAD_LENGTH)?;
    let len = decimal(&bytes[..space]).and_then(|len| usize::try_from(len).ok()).ok_or(BAD_LENGTH)?;
    let (record, rest) = bytes.split_at_checked(len).ok_or(BAD_LENGTH)?;
    let record = record.get(space + 1..).and_then(|record| record.strip_suffix(b"\n")).ok_or(BAD_LENGTH)?;
    let equals = record.iter().position(|byte| *byte == b'=').ok_or(Problem::Record("without a value"))?;
    let (key, value) = (&record[..equals], &record[equals + 1..]);
    let is_text = matches!(key, b"path" | b"linkpath" | b"uname" | b"gname" | b"GNU.sparse.name");
    if key.is_empty() || key.contains(&0) || is_text && value.contains(&0) {
        return Err(Problem::Record("with a zero byte, or without a key"));
    }
    Ok((key, value, rest))
}

/// A number with an optional sign.
pub fn decimal(bytes: &[u8]) -> Option<i64> {
    str::from_utf8(bytes).ok()?.parse().ok()
}

/// Seconds with or without a fraction; the fraction is dropped downwards, also before 1970.
fn seconds(bytes: &[u8]) -> Option<i64> {
    let (whole, fraction) = match bytes.iter().position(|byte| *byte == b'.') {
        Some(dot) => (&bytes[..dot], &bytes[dot + 1..]),
        None => (bytes, &[][..]),
    };
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    // Nanoseconds are the end of what is looked at, as with Go.
    let has_fraction = fraction.iter().take(9).any(|digit| *digit != b'0');
    let seconds = decimal(whole)?;
    if whole.starts_with(b"-") && has_fraction { seconds.checked_sub(1) } else { Some(seconds) }
}

/// The name of an attribute as libarchive writes it.
fn percent_decoded(name: &[u8]) -> Option<Vec<u8>> {
    let mut decoded = Vec::with_capacity(name.len());
    let mut bytes = name.iter();
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'%' => {
                let digits = [*bytes.next()?, *bytes.next()?];
                u8::from_str_radix(str::from_utf8(&digits).ok()?, 16).ok()?
            }
            byte => *byte,
        });
    }
    Some(decoded)
}

/// The value of an attribute as libarchive writes it: base64, mostly without the signs at the end.
fn base64_decoded(value: &[u8]) -> Option<Vec<u8>> {
    let mut decoded = Vec::with_capacity(value.len() / 4 * 3 + 3);
    let (mut bits, mut count) = (0u32, 0);
    for byte in value.iter().filter(|byte| **byte != b'=') {
        let digit = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(digit);
        count += 6;
        if count >= 8 {
            count -= 8;
            decoded.push((bits >> count) as u8);
        }
    }
    Some(decoded)
}
