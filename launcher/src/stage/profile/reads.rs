//! What a start has read, as text: one line for each part of a file, in order. Foreign code may have had a hand in it (the file
//! server writes it down), so it is only a hint, and is read with checks. Runs as the user.

use std::collections::{BTreeMap, HashMap, HashSet};

use mizzen_squashfs::fuse::Access;
use mizzen_squashfs::{Image, InodeRef};

use super::WORTHWHILE;

const HEAD: &[u8] = b"mizzen-profile 1\n";
const TAIL: &[u8] = b"end\n";
/// More is no start.
const MAX_READS: usize = 64 << 10;
/// As many files are looked for at once: more paths than that are in memory for nothing, if they do not fit.
const SOUGHT: usize = 4096;
const MAX_PATH: usize = 1024;

/// A part of a file; of one that was only looked at, nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read<'a> {
    /// From the image's root, beginning with `/`, without links.
    pub path: &'a [u8],
    pub offset: u64,
    pub len: u64,
}

impl<'a> Read<'a> {
    /// Reads a line with its end.
    fn parse(line: &'a [u8]) -> Option<Read<'a>> {
        let mut words = line.strip_suffix(b"\n")?.splitn(3, |byte| *byte == b' ');
        let mut number = || std::str::from_utf8(words.next()?).ok()?.parse::<u64>().ok();
        let (offset, len) = (number()?, number()?);
        offset.checked_add(len)?;
        let path = words.next().filter(|path| is_path(path))?;
        Some(Read { path, offset, len })
    }
}

/// Writes down what a start reads, one part after the other. The end of the text is missing.
pub struct ReadsWriter {
    /// The paths of the files, where they were found.
    paths: HashMap<InodeRef, Option<Vec<u8>>>,
    written: usize,
    limit: usize,
    /// Whether nothing more fits.
    is_full: bool,
}

impl ReadsWriter {
    /// Writes no more than so many bytes.
    pub fn new(limit: usize) -> ReadsWriter {
        ReadsWriter { paths: HashMap::new(), written: 0, limit, is_full: false }
    }

    /// Whether anything was written.
    pub fn has_text(&self) -> bool {
        self.written > 0
    }

    /// What is to be written next. Files whose paths are not found, or have a line break, are left out.
    pub fn text(&mut self, image: &Image, accesses: &[Access]) -> Vec<u8> {
        let mut text = if self.written == 0 { HEAD.to_vec() } else { Vec::new() };
        for accesses in accesses.chunks(SOUGHT) {
            if self.is_full {
                break;
            }
            self.find(image, accesses);
            for Access { file, offset, len } in accesses {
                let Some(Some(path)) = self.paths.get(file) else { continue };
                let line = [format!("{offset} {len} ").as_bytes(), path, b"\n"].concat();
                if self.written + text.len() + line.len() + TAIL.len() > self.limit {
                    self.is_full = true;
                    break;
                }
                text.extend_from_slice(&line);
            }
        }
        self.written += text.len();
        text
    }

    /// Looks for the paths of the files that were not seen before.
    fn find(&mut self, image: &Image, accesses: &[Access]) {
        let new = accesses.iter().map(|access| access.file).filter(|file| !self.paths.contains_key(file));
        let new: HashSet<InodeRef> = new.collect();
        let mut found = if new.is_empty() { HashMap::new() } else { image.paths_of(&new) };
        self.paths
            .extend(new.into_iter().map(|file| (file, found.remove(&file).filter(|path| is_path(path)))));
    }
}

/// What was known, and what a server has said, as one complete text: each line once, and no more than fits. None if a server says
/// what it would not.
pub fn join(known: &[u8], said: &[u8], limit: usize) -> Option<Vec<u8>> {
    let said = said.strip_prefix(HEAD)?;
    // It may be writing the last line at this moment.
    let end = said.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    let known = lines(known).unwrap_or_default();
    let (mut text, mut seen) = (HEAD.to_vec(), HashSet::new());
    for line in
        [known, said.get(..end)?].into_iter().flat_map(|part| part.split_inclusive(|byte| *byte == b'\n'))
    {
        if seen.len() == MAX_READS || text.len() + line.len() + TAIL.len() > limit {
            break;
        }
        if seen.insert(line) {
            text.extend_from_slice(line);
        }
    }
    text.extend_from_slice(TAIL);
    let is_good = parse_reads(&text).is_some();
    is_good.then_some(text)
}

fn lines(text: &[u8]) -> Option<&[u8]> {
    text.strip_prefix(HEAD)?.strip_suffix(TAIL)
}

/// What is written in a text, one after the other: the file server has no memory for all of it at once. None if the text is not
/// complete, or not what was written.
pub fn parse_reads(text: &[u8]) -> Option<impl Iterator<Item = Read<'_>> + Clone> {
    let lines = lines(text)?.split_inclusive(|byte| *byte == b'\n');
    let reads = lines.map(Read::parse);
    let mut number = 0;
    let is_good = reads.clone().all(|read| {
        number += 1;
        read.is_some() && number <= MAX_READS
    });
    is_good.then(|| reads.flatten())
}

/// How much of each file was read.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Lengths<'a>(pub BTreeMap<&'a [u8], u64>);

impl<'a> Lengths<'a> {
    /// Of all that was read, each byte once: starts read the same in other parts.
    pub fn of(reads: impl Iterator<Item = Read<'a>>) -> Lengths<'a> {
        let mut parts: BTreeMap<&[u8], Vec<(u64, u64)>> = BTreeMap::new();
        for Read { path, offset, len } in reads {
            parts.entry(path).or_default().push((offset, offset.saturating_add(len)));
        }
        let length = |mut parts: Vec<(u64, u64)>| {
            parts.sort_unstable();
            let (mut length, mut until) = (0, 0);
            for (from, to) in parts {
                length += to.saturating_sub(from.max(until));
                until = until.max(to);
            }
            length
        };
        Lengths(parts.into_iter().map(|(path, parts)| (path, length(parts))).collect())
    }

    /// Without those that are known: files that are not known, or much less of them.
    pub fn beside(self, known: &Lengths) -> Lengths<'a> {
        let is_new =
            |path: &[u8], length: u64| known.0.get(path).is_none_or(|known| length > known.saturating_mul(2));
        Lengths(self.0.into_iter().filter(|(path, length)| is_new(path, *length)).collect())
    }

    /// Whether it is as much as is worth being written down.
    pub fn are_worthwhile(&self) -> bool {
        self.0.values().fold(0, |sum: u64, length| sum.saturating_add(*length)) >= WORTHWHILE
    }

    /// As text, one read for each; no more than fits.
    pub fn text(&self, limit: usize) -> Vec<u8> {
        let mut text = HEAD.to_vec();
        for (path, length) in self.0.iter().take(MAX_READS) {
            let line = [format!("0 {length} ").as_bytes(), path, b"\n"].concat();
            if text.len() + line.len() + TAIL.len() > limit {
                break;
            }
            text.extend_from_slice(&line);
        }
        text.extend_from_slice(TAIL);
        text
    }
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

    /// All that a text says.
    fn all(text: &[u8]) -> Option<Vec<Read<'_>>> {
        parse_reads(text).map(Iterator::collect)
    }

    #[test]
    fn what_was_written_is_read() {
        let text = b"mizzen-profile 1\n0 131072 /usr/bin/python3\n4096 0 /a b\xff\nend\n";
        let read = |path: &'static [u8], offset, len| Read { path, offset, len };
        let reads = [read(b"/usr/bin/python3", 0, 131_072), read(b"/a b\xff", 4096, 0)];
        assert_eq!(all(text).unwrap(), reads);
        assert_eq!(all(b"mizzen-profile 1\nend\n").unwrap(), []);
        // What a server is about to write has no end.
        let said = b"mizzen-profile 1\n0 131072 /usr/bin/python3\n7 7 /c\n8 8 /d";
        let joined = join(text, said, 1000).unwrap();
        assert_eq!(all(&joined).unwrap(), [&reads[..], &[read(b"/c", 7, 7)]].concat());
    }

    #[test]
    fn of_much_the_beginning_is_kept() {
        let many: Vec<u8> = (0..MAX_READS + 10).flat_map(|n| format!("{n} 1 /a\n").into_bytes()).collect();
        let said = [HEAD, &many].concat();
        assert_eq!(all(&join(b"", &said, 4 << 20).unwrap()).unwrap().len(), MAX_READS);
        let little = join(b"", &said, 100).unwrap();
        let reads = all(&little).unwrap();
        assert!(little.len() <= 100 && reads.len() == 11 && reads[10].offset == 10, "{reads:?}");
    }

    #[test]
    fn only_what_was_not_known_counts() {
        let lengths = |text: &'static [u8]| parse_reads(text).map(Lengths::of).unwrap();
        let known = lengths(b"mizzen-profile 1\n0 1000 /a\n0 50 /b\nend\n");
        // In another order, in other parts, a little more or less.
        let same = lengths(b"mizzen-profile 1\n0 50 /b\n500 900 /a\n0 500 /a\n100 1300 /a\n0 9 /a\nend\n");
        assert_eq!(same.0[&b"/a"[..]], 1400);
        assert_eq!(same.beside(&known), Lengths::default());
        let more = lengths(b"mizzen-profile 1\n0 101 /b\n0 5000000 /c\n0 700 /a\nend\n");
        assert!(more.are_worthwhile());
        let new = more.beside(&known);
        assert_eq!(new, lengths(b"mizzen-profile 1\n0 101 /b\n0 5000000 /c\nend\n"));
        assert_eq!(lengths(b"mizzen-profile 1\n0 101 /b\n0 5000000 /c\nend\n").text(1000), new.text(1000));
        assert!(!known.are_worthwhile());
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
            assert_eq!(all(&text), None, "{:?}", text.escape_ascii().to_string());
        }
        let long = format!("0 1 /{}\n", "a/".repeat(600));
        let many = b"0 1 /a\n".repeat(MAX_READS + 1);
        for line in [long.as_bytes(), &many] {
            assert_eq!(all(&[HEAD, line, TAIL].concat()), None);
        }
        for torn in [&b""[..], b"mizzen-profile 1\n0 1 /a\n", b"mizzen-profile 2\nend\n", b"end\n"] {
            assert_eq!(all(torn), None);
            let known = join(torn, b"mizzen-profile 1\n5 5 /b\n", 1000).unwrap();
            assert_eq!(all(&known).unwrap().len(), 1);
        }
        for said in [&b""[..], b"end\n", b"mizzen-profile 1\n0 1 a\n", b"mizzen-profile 1\n0 1 /a\nend\n"] {
            assert_eq!(join(b"", said, 1000), None);
        }
    }
}
