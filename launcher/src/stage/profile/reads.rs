//! What a start has read, as text: one line for each part of a file, in order. Foreign code may have had a hand in it (the file
//! server writes it down), so it is only a hint, and is read with checks. Runs as the user.

use std::collections::{HashMap, HashSet};

use mizzen_squashfs::Image;
use mizzen_squashfs::fuse::Access;

const HEAD: &[u8] = b"mizzen-profile 1\n";
const TAIL: &[u8] = b"end\n";
/// More is no start.
const MAX_READS: usize = 64 << 10;
const MAX_PATH: usize = 1024;

/// A part of a file; of one that was only looked at, nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read {
    /// From the image's root, beginning with `/`, without links.
    pub path: Vec<u8>,
    pub offset: u64,
    pub len: u64,
}

/// What a start has read.
pub struct Reads;

impl Reads {
    /// Writes it down. Files whose paths are not found, or have a line break, are left out.
    pub fn text(image: &Image, accesses: &[Access]) -> Vec<u8> {
        let files: HashSet<_> = accesses.iter().map(|access| access.file).collect();
        let paths: HashMap<_, _> = image.paths_of(&files);
        let mut text = HEAD.to_vec();
        for Access { file, offset, len } in accesses {
            let Some(path) = paths.get(file).filter(|path| is_path(path)) else { continue };
            text.extend_from_slice(format!("{offset} {len} ").as_bytes());
            text.extend_from_slice(path);
            text.push(b'\n');
        }
        text.extend_from_slice(TAIL);
        text
    }

    /// One after the other.
    pub fn join(first: &[u8], second: &[u8]) -> Option<Vec<u8>> {
        let text = [HEAD, lines(first)?, lines(second)?, TAIL].concat();
        parse_reads(&text).map(|_| text)
    }
}

fn lines(text: &[u8]) -> Option<&[u8]> {
    text.strip_prefix(HEAD)?.strip_suffix(TAIL)
}

/// Reads it. None if it is not complete, or not what was written.
pub fn parse_reads(text: &[u8]) -> Option<Vec<Read>> {
    let mut reads = Vec::new();
    for line in lines(text)?.split_inclusive(|byte| *byte == b'\n') {
        let mut words = line.strip_suffix(b"\n")?.splitn(3, |byte| *byte == b' ');
        let mut number = || std::str::from_utf8(words.next()?).ok()?.parse::<u64>().ok();
        let (offset, len) = (number()?, number()?);
        offset.checked_add(len)?;
        let path = words.next().filter(|path| is_path(path))?.to_vec();
        reads.push(Read { path, offset, len });
        if reads.len() > MAX_READS {
            return None;
        }
    }
    Some(reads)
}

/// Whether it is an absolute path without `.`, `..` and empty names.
pub fn is_path(path: &[u8]) -> bool {
    let is_name = |name: &[u8]| !name.is_empty() && name != b"." && name != b".." && name.len() <= 255;
    let is_clean = !path.contains(&0) && !path.contains(&b'\n');
    path.len() <= MAX_PATH
        && is_clean
        && path.strip_prefix(b"/").is_some_and(|rest| rest.split(|byte| *byte == b'/').all(is_name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read() {
        let text = b"mizzen-profile 1\n0 131072 /usr/bin/python3\n4096 0 /a b\xff\nend\n";
        let read = |path: &[u8], offset, len| Read { path: path.to_vec(), offset, len };
        let reads = [read(b"/usr/bin/python3", 0, 131_072), read(b"/a b\xff", 4096, 0)];
        assert_eq!(parse_reads(text).unwrap(), reads);
        assert_eq!(parse_reads(b"mizzen-profile 1\nend\n").unwrap(), []);
        let twice = Reads::join(text, text).unwrap();
        assert_eq!(parse_reads(&twice).unwrap(), [reads.clone(), reads].concat());
    }

    #[test]
    fn what_is_torn_or_hostile_is_not() {
        let lines: [&[u8]; 12] = [
            b"0 1 usr\n",
            b"0 1 /\n",
            b"0 1 /usr/\n",
            b"0 1 /usr//bin\n",
            b"0 1 /usr/../etc/passwd\n",
            b"0 1 /./a\n",
            b"0 1 /a\0b\n",
            b"0 1\n",
            b"-1 1 /a\n",
            b"18446744073709551615 1 /a\n",
            b"x 1 /a\n",
            b"0 1 /a",
        ];
        for line in lines {
            let text = [HEAD, line, TAIL].concat();
            assert_eq!(parse_reads(&text), None, "{:?}", text.escape_ascii().to_string());
        }
        let long = format!("0 1 /{}\n", "a/".repeat(600));
        let many = b"0 1 /a\n".repeat(MAX_READS + 1);
        for line in [long.as_bytes(), &many] {
            assert_eq!(parse_reads(&[HEAD, line, TAIL].concat()), None);
        }
        for torn in [&b""[..], b"mizzen-profile 1\n0 1 /a\n", b"mizzen-profile 2\nend\n", b"end\n"] {
            assert_eq!(parse_reads(torn), None);
            assert_eq!(Reads::join(torn, b"mizzen-profile 1\nend\n"), None);
        }
    }
}
