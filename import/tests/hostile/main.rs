//! Archives and layouts that were made to do harm, or by strange programs. Each is refused with a message, or its tree is what
//! a careful reader makes of it; always in little memory, and without a file where none belongs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;
mod entries;
mod layouts;
mod streams;

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use common::layers::{Item, dir, file, item, layer, link, mode, symlink};
use common::layout::{CONFIG, INDEX, LAYER, Layout, MANIFEST, config, descriptor, digest};
use common::program::{Home, Outcome, unsquashed};
use common::{Facts, Scratch};
use serde_json::{Value, json};
use tar::{EntryType, Header};

/// Memory that an import may have, stacks and the window of a decompressor included; it ends if it takes more.
const MEMORY: &str = "--data=100663296";

fn bounded() -> Home {
    Home::new().prefixed(&["prlimit", MEMORY])
}

/// A header whose fields are as told, with a good checksum.
fn header(name: &[u8], kind: u8, size: u64, change: impl Fn(&mut [u8])) -> Vec<u8> {
    let mut header = Header::new_ustar();
    header.set_mode(0o644);
    header.set_size(size);
    header.set_mtime(1_600_000_000);
    header.set_uid(0);
    header.set_gid(0);
    let bytes = header.as_mut_bytes();
    bytes[..name.len()].copy_from_slice(name);
    bytes[156] = kind;
    change(bytes);
    header.set_cksum();
    header.as_bytes().to_vec()
}

/// An entry with its content.
fn entry(name: &[u8], kind: u8, content: &[u8]) -> Vec<u8> {
    let mut bytes = header(name, kind, content.len() as u64, |_| ());
    bytes.extend(content);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

/// A header of extended records.
fn pax(records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut text = Vec::new();
    for (key, value) in records {
        let rest = key.len() + value.len() + 3;
        let mut len = rest;
        while len != rest + len.to_string().len() {
            len = rest + len.to_string().len();
        }
        text.extend(format!("{len} {key}=").as_bytes());
        text.extend(*value);
        text.push(b'\n');
    }
    entry(b"pax", b'x', &text)
}

fn end(parts: &[Vec<u8>]) -> Vec<u8> {
    [&parts.concat()[..], &[0; 1024]].concat()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// The tree of an image, or what was said.
fn imported(home: &Home, source: &str) -> Result<Facts, Outcome> {
    let outcome = home.import(&["-fo", "image.sqsh", source]);
    if outcome.code == Some(0) {
        Ok(unsquashed(&home.path("image.sqsh"), &home.path("tree")))
    } else {
        assert_eq!(outcome.code, Some(1), "{outcome:?}");
        Err(outcome)
    }
}

enum Expected {
    /// These paths, with this in what is known of them.
    Tree(Vec<(&'static str, &'static str)>),
    /// A failure with these words.
    Refused(&'static str),
}

use Expected::{Refused, Tree};

#[track_caller]
fn check(name: &str, layers: &[Vec<u8>], expected: &Expected) {
    let home = bounded();
    let scratch = Scratch::new();
    common::oci_layout(scratch.path(), layers);
    match (imported(&home, &format!("oci:{}", scratch.path().display())), expected) {
        (Ok(tree), Tree(expected)) => {
            let paths: Vec<String> =
                tree.keys().skip(1).map(|path| path.to_string_lossy().into_owned()).collect();
            let mut wanted: Vec<&str> = expected.iter().map(|(path, _)| *path).collect();
            wanted.sort_unstable();
            assert_eq!(paths, wanted, "{name}");
            for (path, part) in expected {
                assert!(tree[Path::new(path)].contains(part), "{name}: {path}: {}", tree[Path::new(path)]);
            }
            assert_eq!(home.leftovers(), ["image.sqsh", "tree"], "{name}");
        }
        (Err(outcome), Refused(words)) => {
            assert!(outcome.stderr.contains(words), "{name}: {}", outcome.stderr);
            assert!(home.leftovers().is_empty(), "{name}: {:?}", home.leftovers());
        }
        (Ok(tree), Refused(_)) => panic!("{name}: not refused: {tree:?}"),
        (Err(outcome), Tree(_)) => panic!("{name}: {}", outcome.stderr),
    }
}

/// A stream of so many bytes of zero behind a header, of which 16 MiB are compressed once.
fn bomb(header: &[u8], len: u64, compress: fn(&[u8]) -> Vec<u8>) -> Vec<u8> {
    const PIECE: u64 = 16 << 20;
    assert_eq!(len % PIECE, 0);
    let piece = compress(&vec![0; PIECE as usize]);
    let mut bytes = compress(header);
    (0..len / PIECE).for_each(|_| bytes.extend(&piece));
    bytes.extend(compress(&[0; 1024]));
    bytes
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

#[test]
fn descriptors_say_what_is_stored() {
    // The helpers of these tests make what tools make: else all of the above would prove nothing.
    assert_eq!(descriptor(b"x", LAYER)["size"], json!(1));
    assert_eq!(
        pax(&[("path", b"a")])[512..].iter().take_while(|byte| **byte != 0).count(),
        "9 path=a\n".len()
    );
}
