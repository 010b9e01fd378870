//! The record of a copy in the making: which chunks of it are good. Runs as the user on the host.
//!
//!     0     a line of JSON, and zeros behind it: what the copy is of, and in which boot of the node it was written last
//!     4087  0, or why nothing of it is used any more: the number of an error, or 255 if the original was touched
//!     4088  when somebody last waited for a chunk, in milliseconds since 1970
//!     4096  one byte for each chunk: 0 missing, `w` written, `D` on disk
//!
//! A chunk is marked `w` when all of it is written, and `D` when the disk has said that it has it. A killed process loses
//! nothing that it has written; a node that loses power may, and have the mark all the same. So `w` is believed only in the
//! boot in which it was written.
//!
//! When the disk tells that it could not write, nobody knows what is lost, and what is marked may be read as zeros. Then the whole
//! record is void: whoever has it open looks at that before they use a chunk, and for those who come later it is no record.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::stage::source::FileIdentity;

/// A part of the image that is fetched and marked as a whole: what most file systems read at once.
pub const CHUNK: u64 = 128 << 10;
/// Where the marks begin.
pub const HEAD: u64 = 4096;
/// Where the time of the last demand is.
pub const DEMAND_AT: u64 = HEAD - 8;

/// Why nothing of it is used any more, if it is void. A head has zeros there.
pub const VOID_AT: u64 = DEMAND_AT - 1;

/// The chunk is not there.
pub const MISSING: u8 = 0;
/// It was written in this boot.
pub const WRITTEN: u8 = b'w';
/// It is on disk.
pub const DURABLE: u8 = b'D';

/// Another layout has another number.
const VERSION: u32 = 1;
/// Of a longer path people see the beginning.
const SHOWN: usize = 500;
/// The length of the kernel's name for a boot.
const BOOT: usize = 36;

/// What the record is of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Head {
    version: u32,
    /// The kernel's name for the boot.
    pub boot: String,
    chunk: u64,
    /// The path of the original, for people.
    pub source: String,
    /// The original.
    pub identity: FileIdentity,
}

impl Head {
    /// For a copy that begins in this boot.
    pub fn new(source: &Path, identity: &FileIdentity, boot: &str) -> Head {
        let source = source.to_string_lossy().chars().take(SHOWN).collect();
        Head { version: VERSION, boot: boot.to_owned(), chunk: CHUNK, source, identity: identity.clone() }
    }

    /// The same in another boot.
    pub fn in_boot(self, boot: String) -> Head {
        Head { boot, ..self }
    }

    /// As it is on disk; None if it is too long for its place.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let mut text = serde_json::to_vec(self).ok()?;
        if text.len() >= DEMAND_AT as usize {
            return None;
        }
        text.resize(DEMAND_AT as usize, 0);
        Some(text)
    }

    /// Reads it back. Nothing is believed of what is not as it was written.
    pub fn decode(bytes: &[u8]) -> Option<Head> {
        let bytes = bytes.get(..DEMAND_AT as usize)?;
        let end = bytes.iter().position(|byte| *byte == 0)?;
        let (text, rest) = bytes.split_at(end);
        if rest.iter().any(|byte| *byte != 0) {
            return None;
        }
        let head: Head = serde_json::from_slice(text).ok()?;
        let is_boot =
            head.boot.len() == BOOT && head.boot.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
        let is_known = head.version == VERSION && head.chunk == CHUNK && is_boot;
        // The same said in other words was not written here.
        (is_known && head.encode().is_some_and(|written| written == bytes)).then_some(head)
    }
}

/// Why nothing of a copy in the making is used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Void {
    /// The disk could not write what was marked.
    Lost(i32),
    /// The original's time of change is another one, and nothing else: whether its content is, nobody can tell.
    Touched,
}

const TOUCHED: u8 = 255;

impl Void {
    /// As the record has it: never 0.
    pub fn encode(self) -> u8 {
        match self {
            Void::Touched => TOUCHED,
            Void::Lost(errno) => u8::try_from(errno)
                .ok()
                .filter(|byte| ![0, TOUCHED].contains(byte))
                .unwrap_or(libc::EIO as u8),
        }
    }

    /// Reads it back.
    pub fn decode(byte: u8) -> Option<Void> {
        match byte {
            0 => None,
            TOUCHED => Some(Void::Touched),
            errno => Some(Void::Lost(i32::from(errno))),
        }
    }

    /// The cause, for people.
    pub fn cause(self) -> String {
        match self {
            Void::Lost(errno) => mizzen_core::failure::cause(&std::io::Error::from_raw_os_error(errno)),
            Void::Touched => "its times, names or mode were changed meanwhile".to_owned(),
        }
    }
}

/// How many chunks a file of this size has.
pub fn chunks(size: u64) -> u64 {
    size.div_ceil(CHUNK)
}

/// Whether these are marks.
pub fn are_marks(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| matches!(*byte, MISSING | WRITTEN | DURABLE))
}

/// Reads a whole record: what it is of, and its marks. None if it is not exactly one.
pub fn decode(bytes: &[u8]) -> Option<(Head, &[u8])> {
    let head = Head::decode(bytes)?;
    let marks = bytes.get(HEAD as usize..)?;
    (marks.len() as u64 == chunks(head.identity.size) && are_marks(marks)).then_some((head, marks))
}

/// The kernel's name for this boot of the node; empty if it has none.
pub fn boot() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    text.trim().chars().filter(char::is_ascii).take(BOOT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(size: u64) -> Head {
        let identity =
            FileIdentity { mount: String::new(), dev: 7, ino: 8, size, mtime: (1, 2), ctime: (3, 4) };
        Head::new(Path::new("/shared/a.sqsh"), &identity, &boot())
    }

    fn record(size: u64, marks: &[u8]) -> Vec<u8> {
        let mut bytes = head(size).encode().unwrap();
        bytes.extend(17_u64.to_ne_bytes());
        bytes.extend(marks);
        bytes
    }

    #[test]
    fn what_is_written_is_read() {
        let bytes = record(3 * CHUNK + 1, b"wD\0w");
        assert_eq!(decode(&bytes), Some((head(3 * CHUNK + 1), &b"wD\0w"[..])));
        assert_eq!(decode(&record(0, b"")), Some((head(0), &b""[..])));
    }

    #[test]
    fn nothing_else_is() {
        for (size, marks) in [(CHUNK, &b"ww"[..]), (CHUNK + 1, b"w"), (CHUNK, b"x"), (CHUNK, b"")] {
            assert_eq!(decode(&record(size, marks)), None, "{size} {marks:?}");
        }
        let good = record(CHUNK, b"w");
        assert_eq!(decode(&good[..HEAD as usize - 1]), None);
        // Bytes behind the text, another version, another size of chunks, no boot, a field too many.
        let mut other = good.clone();
        other[4000] = 1;
        assert_eq!(decode(&other), None);
        let text = String::from_utf8(good[..400].to_vec()).unwrap();
        for (from, to) in [
            ("\"version\":1", "\"version\":2"),
            ("\"chunk\":131072", "\"chunk\":131071"),
            ("\"chunk\"", "\"chonk\""),
            ("{\"version\"", "{\"more\":1,\"version\""),
            ("\"boot\":\"", "\"boot\":\"z"),
        ] {
            let changed = text.replace(from, to);
            let mut bytes = good.clone();
            let length = changed.trim_end_matches('\0').len();
            assert_ne!(changed, text, "{from}");
            bytes[..length].copy_from_slice(&changed.as_bytes()[..length]);
            assert_eq!(decode(&bytes), None, "{to}");
        }
    }

    #[test]
    fn a_long_path_has_room() {
        let identity = head(1).identity;
        let long = "\u{1}".repeat(4000);
        assert!(Head::new(Path::new(&long), &identity, &boot()).encode().is_some());
    }
}
