//! What a shared library says of itself: its machine, its name, what it needs and which symbol versions it has.
//!
//! Only the dynamic section and what it points to are read, a few pieces of a file that may have a hundred megabytes
//! and may lie in an image that is not mounted. The crates for ELF want the whole file in memory. Nothing in the file is
//! believed: every offset is checked, every size has a limit.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use crate::image::ReadAt;
use crate::image::architecture::{Architecture, host_architecture};

/// A shared library of this node's own kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Library {
    /// The name by which others need it.
    pub soname: Option<String>,
    /// The names of the libraries that it needs.
    pub needed: Vec<String>,
    /// Symbol versions that it needs of them.
    pub requires: Vec<Requirement>,
    /// Symbol versions that it has.
    pub offers: BTreeSet<String>,
}

/// A symbol version that a library needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// Of which library.
    pub library: String,
    /// Which version.
    pub version: String,
}

/// The most that is read of each part.
const PROGRAM_HEADERS: usize = 128;
const DYNAMIC_LIMIT: usize = 64 << 10;
const STRINGS_LIMIT: usize = 16 << 20;
const VERSIONS_LIMIT: usize = 16 << 10;
/// How many entries a table of versions may have.
const ENTRIES_LIMIT: u64 = 4096;

const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_INTERP: u32 = 3;

const DT_NEEDED: u64 = 1;
const DT_STRTAB: u64 = 5;
const DT_STRSZ: u64 = 10;
const DT_SONAME: u64 = 14;
const DT_VERDEF: u64 = 0x6fff_fffc;
const DT_VERDEFNUM: u64 = 0x6fff_fffd;
const DT_VERNEED: u64 = 0x6fff_fffe;
const DT_VERNEEDNUM: u64 = 0x6fff_ffff;

/// The file's own name stands among its versions with this flag.
const VER_FLG_BASE: u16 = 1;
/// A version that only weak symbols need: its absence is no failure.
const VER_FLG_WEAK: u16 = 2;

impl Library {
    /// Reads a library; none if it is one for another machine or word size, or no ELF file at all.
    pub fn read(file: &dyn ReadAt) -> io::Result<Option<Library>> {
        let head = file.read_at(0, 4096)?;
        let (wide, little) = (head.get(4) == Some(&2), head.get(5) == Some(&1));
        if Architecture::from_elf(&head).is_none_or(|made_for| Some(made_for) != host_architecture())
            || !wide
            || !little
        {
            return Ok(None);
        }
        let segments = Segments::read(&head, file)?;
        let Some((offset, size)) = segments.dynamic else { return Ok(Some(Library::default())) };
        let section = file.read_at(offset, usize::try_from(size).unwrap_or(usize::MAX).min(DYNAMIC_LIMIT))?;
        let entries: Vec<(u64, u64)> = section
            .chunks_exact(16)
            .map(|entry| (u64_at(entry, 0).unwrap_or(0), u64_at(entry, 8).unwrap_or(0)))
            .take_while(|(tag, _)| *tag != 0)
            .collect();
        let value = |wanted| entries.iter().find(|(tag, _)| *tag == wanted).map(|(_, value)| *value);
        let strings = match (value(DT_STRTAB), value(DT_STRSZ)) {
            (Some(address), Some(size)) => {
                let size = usize::try_from(size).unwrap_or(usize::MAX);
                if size > STRINGS_LIMIT {
                    return Err(broken("its table of names is too large"));
                }
                file.read_at(segments.offset_of(address)?, size)?
            }
            _ => return Err(broken("it has no table of names")),
        };
        let strings = Strings(&strings);
        let mut library = Library::default();
        for (tag, value) in &entries {
            match *tag {
                DT_NEEDED => library.needed.push(strings.at(*value)?),
                DT_SONAME => library.soname = Some(strings.at(*value)?),
                _ => {}
            }
        }
        if let (Some(address), Some(count)) = (value(DT_VERNEED), value(DT_VERNEEDNUM)) {
            let table = file.read_at(segments.offset_of(address)?, VERSIONS_LIMIT)?;
            library.requires = requirements(&table, count, &strings)?;
        }
        if let (Some(address), Some(count)) = (value(DT_VERDEF), value(DT_VERDEFNUM)) {
            let table = file.read_at(segments.offset_of(address)?, VERSIONS_LIMIT)?;
            library.offers = definitions(&table, count, &strings)?;
        }
        Ok(Some(library))
    }
}

/// The dynamic linker that a 64-bit little-endian program names in its first bytes.
pub fn dynamic_linker(head: &[u8]) -> Option<PathBuf> {
    if !head.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (table, size) = (usize::try_from(u64_at(head, 32)?).ok()?, usize::from(u16_at(head, 54)?));
    let count = usize::from(u16_at(head, 56)?).min(PROGRAM_HEADERS);
    let mut headers = (0..count).filter_map(|index| table.checked_add(index.checked_mul(size)?));
    let header = headers.find(|at| u32_at(head, *at) == Some(PT_INTERP))?;
    let number = |at: usize| usize::try_from(u64_at(head, header.checked_add(at)?)?).ok();
    let (offset, length) = (number(8)?, number(32)?);
    let name = head.get(offset..offset.checked_add(length)?)?.split(|byte| *byte == 0).next()?;
    Some(PathBuf::from(OsStr::from_bytes(name)))
}

/// Where the parts of the file lie when it is loaded.
struct Segments {
    /// Address, offset in the file, size.
    loaded: Vec<(u64, u64, u64)>,
    /// Offset and size of the dynamic section.
    dynamic: Option<(u64, u64)>,
}

impl Segments {
    fn read(head: &[u8], file: &dyn ReadAt) -> io::Result<Segments> {
        let truncated = || broken("its header is truncated");
        let offset = u64_at(head, 32).ok_or_else(truncated)?;
        let size = u16_at(head, 54).ok_or_else(truncated)?;
        let count = usize::from(u16_at(head, 56).ok_or_else(truncated)?).min(PROGRAM_HEADERS);
        if head.len() < HEADER || usize::from(size) != PROGRAM_HEADER {
            return Err(broken("its program headers have an unknown size"));
        }
        let table = file.read_at(offset, count * PROGRAM_HEADER)?;
        let mut segments = Segments { loaded: Vec::new(), dynamic: None };
        for entry in table.chunks_exact(PROGRAM_HEADER) {
            let field = |at| u64_at(entry, at).unwrap_or(0);
            let (offset, address, size) = (field(8), field(16), field(32));
            match u32_at(entry, 0) {
                Some(PT_LOAD) => segments.loaded.push((address, offset, size)),
                Some(PT_DYNAMIC) => segments.dynamic = Some((offset, size)),
                _ => {}
            }
        }
        Ok(segments)
    }

    fn offset_of(&self, address: u64) -> io::Result<u64> {
        let inside = |(start, offset, size): &(u64, u64, u64)| {
            let distance = address.checked_sub(*start).filter(|distance| distance < size)?;
            offset.checked_add(distance)
        };
        self.loaded.iter().find_map(inside).ok_or_else(|| broken("an address lies outside the file"))
    }
}

struct Strings<'a>(&'a [u8]);

impl Strings<'_> {
    fn at(&self, offset: u64) -> io::Result<String> {
        let rest = usize::try_from(offset).ok().and_then(|offset| self.0.get(offset..));
        let name = rest.and_then(|rest| rest.split(|byte| *byte == 0).next());
        // Names of libraries and versions are ASCII; others match nothing.
        name.map(|name| String::from_utf8_lossy(name).into_owned())
            .ok_or_else(|| broken("a name lies outside its table"))
    }
}

/// A chain of `Verneed`, each with a chain of `Vernaux`.
fn requirements(table: &[u8], count: u64, strings: &Strings) -> io::Result<Vec<Requirement>> {
    let mut found = Vec::new();
    let mut at = 0;
    for _ in 0..count.min(ENTRIES_LIMIT) {
        let truncated = || broken("its needed versions are truncated");
        let versions = u16_at(table, at + 2).ok_or_else(truncated)?;
        let library = strings.at(u32_at(table, at + 4).ok_or_else(truncated)?.into())?;
        let mut version_at = at + distance(table, at + 8)?;
        for _ in 0..versions {
            let flags = u16_at(table, version_at + 4).ok_or_else(truncated)?;
            let version = strings.at(u32_at(table, version_at + 8).ok_or_else(truncated)?.into())?;
            if flags & VER_FLG_WEAK == 0 {
                found.push(Requirement { library: library.clone(), version });
            }
            match distance(table, version_at + 12)? {
                0 => break,
                next => version_at += next,
            }
        }
        match distance(table, at + 12)? {
            0 => break,
            next => at += next,
        }
    }
    Ok(found)
}

/// A chain of `Verdef`, each with a chain of `Verdaux` of which the first is its name.
fn definitions(table: &[u8], count: u64, strings: &Strings) -> io::Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    let mut at = 0;
    for _ in 0..count.min(ENTRIES_LIMIT) {
        let truncated = || broken("its versions are truncated");
        let flags = u16_at(table, at + 2).ok_or_else(truncated)?;
        let name_at = at + distance(table, at + 12)?;
        let name = strings.at(u32_at(table, name_at).ok_or_else(truncated)?.into())?;
        if flags & VER_FLG_BASE == 0 {
            found.insert(name);
        }
        match distance(table, at + 16)? {
            0 => break,
            next => at += next,
        }
    }
    Ok(found)
}

/// A distance to another entry; the tables are small, so it cannot overflow a position in one.
fn distance(table: &[u8], at: usize) -> io::Result<usize> {
    let value = u32_at(table, at).ok_or_else(|| broken("its versions are truncated"))?;
    usize::try_from(value)
        .ok()
        .filter(|distance| *distance < VERSIONS_LIMIT)
        .ok_or_else(|| broken("its versions lie outside their table"))
}

fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes_at(bytes, at).map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes_at(bytes, at).map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes_at(bytes, at).map(u64::from_le_bytes)
}

fn broken(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.to_owned())
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use super::*;
    use crate::image::testing::Random;

    struct Bytes<'a>(&'a [u8]);

    impl ReadAt for Bytes<'_> {
        fn read_at(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
            let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.0.len());
            Ok(self.0[start..self.0.len().min(start.saturating_add(length))].to_vec())
        }
    }

    fn read(bytes: &[u8]) -> io::Result<Option<Library>> {
        Library::read(&Bytes(bytes))
    }

    /// Libraries of the machine that runs the tests, a C library first. Not those of this process: it may be linked with none.
    fn own_libraries() -> Vec<String> {
        let directories = [format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH), "/usr/lib64".to_owned()];
        let is_there = |directory: &&String| Path::new(directory).join("libc.so.6").exists();
        let directory = directories.iter().find(is_there).unwrap();
        ["libc.so.6", "libm.so.6", "libgcc_s.so.1"].map(|name| format!("{directory}/{name}")).to_vec()
    }

    #[test]
    fn the_same_as_readelf_says() {
        for path in own_libraries() {
            let library = read(&std::fs::read(&path).unwrap()).unwrap().unwrap();
            let readelf = |option| {
                let output = Command::new("readelf").args(["-W", option, &path]).output().unwrap();
                assert!(output.status.success(), "readelf (package binutils)");
                String::from_utf8(output.stdout).unwrap()
            };
            let dynamic = readelf("-d");
            let named = |tag: &str| -> Vec<String> {
                let lines = dynamic.lines().filter(|line| line.contains(tag));
                lines.filter_map(|line| Some(line.split_once('[')?.1.split_once(']')?.0.to_owned())).collect()
            };
            assert_eq!(library.needed, named("(NEEDED)"), "{path}");
            assert_eq!(library.soname.into_iter().collect::<Vec<_>>(), named("(SONAME)"), "{path}");
            let versions = readelf("-V");
            let word = |line: &str| {
                line.split("Name: ").nth(1).and_then(|rest| rest.split_whitespace().next()).map(str::to_owned)
            };
            let (defined, needed) = versions.split_once("'.gnu.version_r'").unwrap_or((&versions, ""));
            let defined = defined.split_once("'.gnu.version_d'").map_or("", |(_, section)| section);
            let expected: BTreeSet<String> = defined
                .lines()
                .filter(|line| line.contains("Rev:") && !line.contains("BASE"))
                .filter_map(word)
                .collect();
            assert_eq!(library.offers, expected, "{path}");
            let expected: Vec<String> =
                needed.lines().filter(|line| !line.contains("File:")).filter_map(word).collect();
            let own: Vec<String> = library.requires.into_iter().map(|need| need.version).collect();
            assert_eq!(own, expected, "{path}");
        }
    }

    #[test]
    fn other_files_are_no_libraries_of_this_node() {
        let own = std::fs::read(own_libraries().remove(0)).unwrap();
        let mut narrow = own[..64].to_vec();
        narrow[4] = 1;
        for bytes in [b"".as_slice(), b"#!/bin/sh\n", b"\x7fELF", &own[..16], &narrow] {
            assert_eq!(read(bytes).unwrap(), None);
        }
        assert!(read(&own[..64]).is_ok_and(|library| library == Some(Library::default())));
    }

    /// A library in an image may be anything.
    #[test]
    fn broken_libraries_are_survived() {
        let whole = std::fs::read(own_libraries().remove(0)).unwrap();
        let mut random = Random::new(6);
        for _ in 0..300 {
            let mut bytes = whole.clone();
            // Where the tables are: the beginning, and the dynamic section in the last part.
            for _ in 0..40 {
                let at = if random.next(2) == 0 {
                    random.next(150_000)
                } else {
                    bytes.len() - 1 - random.next(60_000)
                };
                bytes[at] = random.next(256) as u8;
            }
            bytes.truncate(bytes.len() - random.next(4) * random.next(500_000));
            let _ = read(&bytes);
        }
    }

    #[test]
    fn a_dynamic_linker_is_found_and_nonsense_is_not() {
        let program = std::fs::read("/bin/sh").unwrap();
        let linker = dynamic_linker(&program[..4096]).unwrap();
        assert!(linker.is_absolute() && linker.exists(), "{linker:?}");
        assert_eq!(dynamic_linker(b"#!/bin/sh"), None);
        for length in 0..512 {
            dynamic_linker(&program[..length]);
        }
        let mut broken = program[..4096].to_vec();
        for at in 0..512 {
            broken[at] ^= 0xff;
            dynamic_linker(&broken);
            broken[at] ^= 0xff;
        }
    }
}
