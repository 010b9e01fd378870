//! /etc/ld.so.cache: where the dynamic linker of a system finds its libraries, by name. Read on the node, and in images.

use std::path::PathBuf;

/// A larger file is not a cache.
pub const LIMIT: usize = 16 << 20;

const OLD_MAGIC: &[u8] = b"ld.so-1.7.0\0";
/// Of the format that every glibc since 2.2 writes; older ones put it behind their own.
const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
const OLD_HEADER: usize = 16;
const OLD_ENTRY: usize = 12;
const HEADER: usize = 48;
const ENTRY: usize = 24;

/// Name and path of each library, in the cache's order; a name may be there for several machines. What is broken is left
/// out: directories are searched as well.
pub fn read(cache: &[u8]) -> Vec<(String, PathBuf)> {
    let start = match cache.strip_prefix(OLD_MAGIC) {
        // The new cache follows the old one's entries, aligned for its own.
        Some(_) => {
            (OLD_HEADER + number(cache, 12).unwrap_or(0).saturating_mul(OLD_ENTRY)).next_multiple_of(8)
        }
        None => 0,
    };
    let Some(cache) = cache.get(start..).filter(|cache| cache.starts_with(MAGIC)) else { return Vec::new() };
    let count = number(cache, MAGIC.len()).unwrap_or(0).min(cache.len() / ENTRY);
    let text = |position: usize| {
        let bytes = cache.get(number(cache, position)?..)?.split(|byte| *byte == 0).next()?;
        std::str::from_utf8(bytes).ok().filter(|text| !text.is_empty())
    };
    let entry = |index: usize| {
        let entry = HEADER + index * ENTRY;
        Some((text(entry + 4)?.to_owned(), PathBuf::from(text(entry + 8)?)))
    };
    (0..count).filter_map(entry).filter(|(_, path)| path.is_absolute()).collect()
}

/// The numbers are written in the machine's own byte order, and we read the caches of our own machine.
fn number(bytes: &[u8], at: usize) -> Option<usize> {
    let bytes: [u8; 4] = bytes.get(at..at.checked_add(4)?)?.try_into().ok()?;
    usize::try_from(u32::from_ne_bytes(bytes)).ok()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::image::testing::Random;

    #[test]
    fn the_same_as_ldconfig_says() {
        let cache = read(&std::fs::read("/etc/ld.so.cache").unwrap());
        let listing = Command::new("/sbin/ldconfig").arg("-p").output().unwrap();
        let listing = String::from_utf8(listing.stdout).unwrap();
        let expected: Vec<(String, PathBuf)> = listing
            .lines()
            .filter_map(|line| {
                let (name, path) = line.split_once(" => ")?;
                Some((name.split_whitespace().next()?.to_owned(), path.into()))
            })
            .collect();
        assert!(expected.iter().any(|(name, _)| name == "libc.so.6"), "{listing}");
        assert_eq!(cache, expected);
    }

    #[test]
    fn a_new_cache_behind_an_old_one() {
        let new = std::fs::read("/etc/ld.so.cache").unwrap();
        // Three entries, so that the new cache has to be aligned.
        let mut both = [OLD_MAGIC, &3_u32.to_ne_bytes(), &[0; 3 * OLD_ENTRY]].concat();
        both.resize(both.len().next_multiple_of(8), 0);
        both.extend(&new);
        assert_eq!(read(&both), read(&new));
    }

    #[test]
    fn broken_caches_are_survived() {
        let whole = std::fs::read("/etc/ld.so.cache").unwrap();
        let mut random = Random::new(11);
        for _ in 0..500 {
            let mut bytes = whole.clone();
            random.mutate(&mut bytes, &[MAGIC, OLD_MAGIC, &[0xff; 8]]);
            let _ = read(&bytes);
        }
        assert_eq!(read(b""), []);
        assert_eq!(read(&whole[..HEADER]), []);
    }
}
