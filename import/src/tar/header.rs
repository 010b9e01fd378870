//! A header block: 512 bytes of fields. Which fields there are depends on the format, of which there are four:
//! v7, POSIX (ustar, PAX), star, GNU.
//!
//! Run by: the user, in the importer.

use super::error::Problem;

/// Everything in an archive is a multiple of this.
pub const BLOCK_LEN: usize = 512;

/// A block of an archive.
pub type Block = [u8; BLOCK_LEN];

type Result<T> = std::result::Result<T, Problem>;

/// Who wrote a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    V7,
    Posix,
    Star,
    Gnu,
}

/// The fields of a header, before PAX records and long names replace some of them.
#[derive(Debug)]
pub struct Header {
    pub format: Format,
    pub flag: u8,
    pub name: Vec<u8>,
    pub link: Vec<u8>,
    pub size: i64,
    pub mode: u16,
    pub uid: i64,
    pub gid: i64,
    pub mtime: i64,
    pub major: i64,
    pub minor: i64,
}

impl Header {
    /// Reads all fields; any bad number spoils the header, as with Go.
    pub fn parse(block: &Block) -> Result<Header> {
        if !has_valid_checksum(block) {
            return Err(Problem::Checksum);
        }
        let format = format(block);
        let mut header = Header {
            format,
            flag: block[156],
            name: text(&block[..100]).to_vec(),
            link: text(&block[157..257]).to_vec(),
            size: field(&block[124..136], "size")?,
            mode: (field(&block[100..108], "mode")? & 0o7777) as u16,
            uid: field(&block[108..116], "owner")?,
            gid: field(&block[116..124], "group")?,
            mtime: field(&block[136..148], "time")?,
            major: 0,
            minor: 0,
        };
        if format != Format::V7 {
            header.major = field(&block[329..337], "device")?;
            header.minor = field(&block[337..345], "device")?;
        }
        let prefix = match format {
            Format::V7 => &[],
            Format::Posix => text(&block[345..500]),
            Format::Star => text(&block[345..476]),
            Format::Gnu => prefix_of_early_go(block),
        };
        if !prefix.is_empty() {
            header.name = [prefix, b"/", &header.name].concat();
        }
        Ok(header)
    }
}

/// GNU headers have times where others have a prefix. Go before 1.8 (2017) wrote a prefix there nevertheless, and old
/// images have such layers. As Go does now: what is not a time is taken for a prefix.
fn prefix_of_early_go(block: &Block) -> &[u8] {
    let is_time = |bytes: &[u8]| bytes[0] == 0 || number(bytes).is_some();
    let prefix = text(&block[345..500]);
    let is_prefix = !(is_time(&block[345..357]) && is_time(&block[357..369])) && prefix.is_ascii();
    if is_prefix { prefix } else { &[] }
}

fn format(block: &Block) -> Format {
    match (&block[257..263], &block[263..265], &block[508..]) {
        (b"ustar\0", _, b"tar\0") => Format::Star,
        (b"ustar\0", _, _) => Format::Posix,
        (b"ustar ", b" \0", _) => Format::Gnu,
        _ => Format::V7,
    }
}

/// Whether the sum of all bytes is as the header says. Old writers added signed bytes.
pub fn has_valid_checksum(block: &Block) -> bool {
    let Some(expected) = octal(&block[148..156]) else { return false };
    let (mut unsigned, mut signed) = (0i64, 0i64);
    for (position, byte) in block.iter().enumerate() {
        // The checksum itself counts as spaces.
        let byte = if (148..156).contains(&position) { b' ' } else { *byte };
        unsigned += i64::from(byte);
        signed += i64::from(byte as i8);
    }
    expected == unsigned || expected == signed
}

/// A text up to its zero byte, if it has one.
pub fn text(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    &bytes[..end]
}

fn field(bytes: &[u8], field: &'static str) -> Result<i64> {
    number(bytes).ok_or(Problem::Number { field })
}

/// A number in octal digits, or in two's complement if the first bit is set (GNU, star).
pub fn number(bytes: &[u8]) -> Option<i64> {
    match bytes.first() {
        Some(first) if first & 0x80 != 0 => base_256(bytes),
        _ => octal(bytes),
    }
}

/// The first bit only says that it is such a number; the second is its sign.
fn base_256(bytes: &[u8]) -> Option<i64> {
    let is_negative = bytes.first()? & 0x40 != 0;
    let mut value = if is_negative { -1i64 } else { 0 };
    for (position, byte) in bytes.iter().enumerate() {
        let byte = match (position, is_negative) {
            (0, true) => byte | 0x80,
            (0, false) => byte & 0x7f,
            _ => *byte,
        };
        value = value.checked_mul(256)? | i64::from(byte);
    }
    Some(value)
}

/// Digits between spaces and zero bytes; no digits are 0.
fn octal(bytes: &[u8]) -> Option<i64> {
    let is_padding = |byte: &u8| matches!(byte, b' ' | 0);
    let start = bytes.iter().position(|byte| !is_padding(byte)).unwrap_or(bytes.len());
    let end = bytes.iter().rposition(|byte| !is_padding(byte)).map_or(start, |last| last + 1);
    text(&bytes[start..end]).iter().try_fold(0i64, |value, byte| match byte {
        b'0'..=b'7' => value.checked_mul(8)?.checked_add(i64::from(byte - b'0')),
        _ => None,
    })
}
