//! Every parser of the importer, as a function of bytes: what fuzzers and the tests call. As in the launcher, a function
//! returns whether its parser took the bytes, and asserts what the parser promises.

mod written;

use std::io::{self, Read};

pub use written::{seeds as writer_seeds, written};

use crate::decompress::decompressed;
use crate::registry::fuzz as registry;
use crate::tar::header::BLOCK_LEN;
use crate::tar::{Archive, Entry, EntryKind, MAX_EXTENDED_LEN, Writer};

/// A parser: its name, and its function.
pub type Target = (&'static str, fn(&[u8]) -> bool);

/// All of them.
pub const TARGETS: [Target; 6] = [
    ("tar", tar),
    ("layer", layer),
    ("manifest", registry::manifest),
    ("headers", registry::headers),
    ("credentials", registry::credentials),
    ("writer", written),
];

/// How much of all contents is read: a sparse file has more zeros than anybody has time.
const CONTENT_LIMIT: u64 = 64 << 10;
/// How much of a compressed layer is read.
const LAYER_LIMIT: u64 = 1 << 20;

/// A tar archive, read to its end. What we read we could also write, and would then read the same.
pub fn tar(bytes: &[u8]) -> bool {
    let bytes = with_checksums(bytes);
    let mut archive = Archive::new(bytes.as_slice());
    let mut left = CONTENT_LIMIT;
    loop {
        let entry = match archive.next_entry() {
            Ok(Some(entry)) => entry,
            Ok(None) => {
                let position = archive.position();
                return archive.drain().is_ok_and(|rest| position + rest == bytes.len() as u64);
            }
            Err(_) => return false,
        };
        assert!(entry.path.len() as u64 <= MAX_EXTENDED_LEN && !entry.path.contains(&0));
        assert!(entry.mode <= 0o7777 && entry.position <= bytes.len() as u64);
        assert!(entry.is_sparse || entry.size == entry.stored_size);
        let mut content = Vec::new();
        let Ok(len) = archive.contents().take(left).read_to_end(&mut content) else { return false };
        left -= len as u64;
        assert!(len as u64 == entry.size || left == 0);
        if len as u64 == entry.size {
            check_written(entry, &content);
        }
    }
}

/// The same archive with right checksums in all headers that are not of the oldest form: a fuzzer does not guess them, and
/// would see nothing of what comes after.
fn with_checksums(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for block in bytes.chunks_exact_mut(BLOCK_LEN).filter(|block| block[257..].starts_with(b"ustar")) {
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    }
    bytes
}

fn check_written(entry: Entry, content: &[u8]) {
    let mut writer = Writer::new(Vec::new());
    // Some names can be read but not be written.
    if writer.add_file(&entry, content).is_err() {
        return;
    }
    let Ok(bytes) = writer.finish() else { return };
    let mut archive = Archive::new(bytes.as_slice());
    let again = archive.next_entry().ok().flatten();
    let path = match &entry.kind {
        EntryKind::Directory if !entry.path.ends_with(b"/") => [&entry.path, b"/".as_slice()].concat(),
        _ => entry.path.clone(),
    };
    let position = again.as_ref().map_or(0, |again| again.position);
    let expected = Entry { path, position, is_sparse: false, stored_size: entry.size, ..entry };
    assert_eq!(again, Some(expected));
}

/// A layer with whatever compression, read to its end or to a limit.
pub fn layer(bytes: &[u8]) -> bool {
    let Ok(stream) = decompressed(bytes) else { return false };
    let mut archive = Archive::new(stream.take(LAYER_LIMIT));
    while let Ok(Some(_)) = archive.next_entry() {
        let mut content = archive.contents().take(CONTENT_LIMIT);
        if io::copy(&mut content, &mut io::sink()).is_err() {
            return false;
        }
    }
    archive.drain().is_ok()
}
