//! Images made to break the reader, through its API: an error or a result each time, no panic, no hang.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{Random, TempDir, make_image, make_tree};
use mizzen_squashfs::{Error, Image, Kind, Result};

const PLAIN_METADATA: &[&str] = &["-noI", "-noX", "-b", "4K"];

fn open(path: &Path) -> Result<Image> {
    Image::open(File::open(path).unwrap(), 0)
}

fn message(path: &Path) -> String {
    open(path).err().expect("must be refused").to_string()
}

/// Reads all of an image that can be reached, up to a limit; returns how many files and errors that gave.
fn walk(image: &Image) -> (usize, usize) {
    let (mut files, mut errors) = (0, 0);
    let mut seen = HashSet::new();
    let mut directories = vec![image.superblock().root];
    let mut count = |failed: bool| errors += usize::from(failed);
    while let Some(reference) = directories.pop() {
        if files > 5000 || !seen.insert(reference) {
            continue;
        }
        let Ok(directory) = image.inode(reference) else { continue };
        let Ok(mut listing) = image.read_dir(&directory, 0) else { continue };
        let (mut children, mut a_name) = (Vec::new(), Vec::new());
        loop {
            match listing.next() {
                Ok(Some(entry)) => {
                    children.push(entry.inode);
                    a_name = entry.name.to_vec();
                }
                end => {
                    count(end.is_err());
                    break;
                }
            }
        }
        count(image.lookup(&directory, &a_name).is_err());
        count(image.lookup(&directory, b"missing").is_err());
        for child in children {
            files += 1;
            let Ok(inode) = image.inode(child) else {
                count(true);
                continue;
            };
            count(image.list_xattrs(&inode).is_err());
            count(image.get_xattr(&inode, b"user.own").is_err());
            count(image.get_xattr(&inode, b"user.shared").is_err());
            match inode.kind {
                Kind::Directory(_) => directories.push(child),
                Kind::File(_) => {
                    count(image.read(&inode, 0, 1 << 20).is_err());
                    count(image.read(&inode, inode.size().saturating_sub(5000), 1 << 20).is_err());
                    count(image.read(&inode, u64::MAX - 3, 1 << 20).is_err());
                }
                Kind::Symlink(_) => count(image.read_link(&inode).is_err()),
                _ => {}
            }
        }
    }
    (files, errors)
}

fn peak_memory_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_whole_image_gives_no_error() {
    let dir = TempDir::new("whole");
    make_tree(&dir.join("tree"));
    make_image(&dir.join("tree"), &dir.join("image"), PLAIN_METADATA);
    let (files, errors) = walk(&open(&dir.join("image")).unwrap());
    assert!(files > 600);
    assert_eq!(errors, 0);
}

#[test]
fn truncated_images_are_refused_with_both_lengths() {
    let dir = TempDir::new("truncated");
    fs::create_dir(dir.join("tree")).unwrap();
    fs::write(dir.join("tree/file"), Random(1).bytes(50_000)).unwrap();
    make_image(&dir.join("tree"), &dir.join("image"), &["-nopad"]);
    let whole = fs::read(dir.join("image")).unwrap();
    let used = open(&dir.join("image")).unwrap().superblock().bytes_used;
    assert_eq!(used, whole.len() as u64);
    let cut = dir.join("cut");
    for len in (0..200).chain((200..whole.len()).step_by(97)).chain([whole.len() - 1]) {
        fs::write(&cut, &whole[..len]).unwrap();
        let expected = match len {
            0..96 => format!("not a squashfs image: too short, {len} bytes (the header alone has 96)"),
            _ => format!("truncated: the header says {used} bytes, the file has {len}"),
        };
        assert_eq!(message(&cut), expected);
    }
    let beyond = Image::open(File::open(dir.join("image")).unwrap(), u64::MAX).err().unwrap();
    assert!(matches!(beyond, Error::TooShort { len: 0 }));
}

#[test]
fn other_files_are_named() {
    let dir = TempDir::new("other");
    let file = dir.join("file");
    let padded = |start: &[u8], at: usize| [&vec![b'z'; at], start, &[b'z'; 40000]].concat();
    for (bytes, expected) in [
        (padded(b"<!DOCTYPE html>", 0), "starts with \"<!DO\""),
        (padded(b"\x1f\x8b\x08\0", 0), "starts with \"\\x1f\\x8b\\x08\\x00\""),
        (padded(b"", 0), "not a squashfs image: starts with \"zzzz\""),
        (padded(b"sqsh", 0), "a big-endian squashfs image (before 4.0), which is not supported"),
    ] {
        fs::write(&file, bytes).unwrap();
        assert!(message(&file).ends_with(expected), "{}", message(&file));
    }
}

#[test]
fn every_superblock_field_may_lie() {
    let dir = TempDir::new("superblock");
    make_tree(&dir.join("tree"));
    make_image(&dir.join("tree"), &dir.join("image"), PLAIN_METADATA);
    let whole = fs::read(dir.join("image")).unwrap();
    let broken = dir.join("broken");
    let patch = |at: usize, value: &[u8]| {
        let mut bytes = whole.clone();
        bytes[at..at + value.len()].copy_from_slice(value);
        fs::write(&broken, bytes).unwrap();
    };
    let fields =
        [(0, 4), (4, 4), (12, 4), (16, 4), (20, 2), (22, 2), (26, 2), (28, 2), (30, 2), (32, 8), (40, 8)];
    for (at, len) in fields.into_iter().chain((48..96).step_by(8).map(|at| (at, 8))) {
        let mut raw = [0; 8];
        raw[..len].copy_from_slice(&whole[at..at + len]);
        let value = u64::from_le_bytes(raw);
        for lie in [0, u64::MAX, value.wrapping_add(1), value.wrapping_sub(1), value ^ 1 << 7, u64::MAX >> 1]
        {
            patch(at, &lie.to_le_bytes()[..len]);
            let start = Instant::now();
            if let Ok(image) = open(&broken) {
                walk(&image);
            }
            assert!(start.elapsed() < Duration::from_secs(5), "field {at} = {lie} takes too long");
        }
    }
    let a_file = open(&dir.join("image")).unwrap().resolve(b"sizes/0").unwrap().reference.raw().to_le_bytes();
    let refused: &[(usize, &[u8], &str)] = &[
        (4, &[0; 4], "corrupt image: the inode count in the header is 0: even / is an inode"),
        (4, &[0xff; 4], "corrupt image: a table has more entries than room"),
        (12, &[0; 4], "the block size in the header is 0: not a power of two"),
        (12, &(2u32 << 20).to_le_bytes(), "the block size in the header is 2097152: not a power of two"),
        (
            20,
            &[9, 0],
            "compressed with method 9, which is not supported (known: gzip, lzma, lzo, xz, lz4, zstd)",
        ),
        (22, &[17, 0], "that agrees with the block log"),
        (26, &[0, 0], "the id count in the header is 0"),
        (28, &[3, 0, 1, 0], "squashfs 3.1, which is not supported; only 4.0 is"),
        (28, &[5, 0], "squashfs 5.0, which is newer than the supported 4.0"),
        (32, &[0xff; 8], "an inode reference has more than 48 bits"),
        (32, &[0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0], "a reference points behind its table"),
        (32, &a_file, "the root inode is not a directory"),
        (40, &[0xff; 8], "truncated: the header says 18446744073709551615 bytes"),
        (48, &[0xff; 8], "the id table start in the header is 18446744073709551615: beyond the end"),
        (64, &[0; 8], "the inode table start in the header is 0: overlaps what precedes it"),
        (72, &[0; 8], "the directory table start in the header is 0: overlaps what precedes it"),
        (80, &[0; 8], "the fragment table start in the header is 0: overlaps what precedes it"),
        (80, &[0xff; 8], "but there is no fragment table"),
    ];
    for (at, value, expected) in refused {
        patch(*at, value);
        assert!(message(&broken).contains(expected), "field {at}: {}", message(&broken));
    }
}

/// Thousands of damaged images, of which plain metadata lets the damage reach the parsers, and compressed metadata
/// the decompressors.
#[test]
fn random_damage_never_panics_hangs_or_eats_memory() {
    let dir = TempDir::new("damage");
    let tree = dir.join("tree");
    make_tree(&tree);
    fs::remove_dir_all(tree.join("level0")).unwrap();
    (60..600).for_each(|n| fs::remove_file(tree.join(format!("many/module_{n}.py"))).unwrap());
    let layouts: &[&[&str]] = &[
        PLAIN_METADATA,
        &["-noI", "-noX", "-noD", "-noF"],
        &["-comp", "gzip"],
        &["-comp", "lzma"],
        &["-comp", "xz"],
        &["-comp", "lzo"],
        &["-comp", "lz4"],
        &["-comp", "zstd"],
    ];
    let mut random = Random(20_260_101);
    for (number, layout) in layouts.iter().enumerate() {
        make_image(&tree, &dir.join("image"), layout);
        let whole = fs::read(dir.join("image")).unwrap();
        let metadata = open(&dir.join("image")).unwrap().superblock().inode_table;
        let used = open(&dir.join("image")).unwrap().superblock().bytes_used;
        let rounds = if number == 0 { 2000 } else { 300 };
        let file = File::options().read(true).write(true).open(dir.join("image")).unwrap();
        for round in 0..rounds {
            // Every fourth round damages the data too, and there only sizes and streams can break.
            let start = if round % 4 == 3 { 96 } else { metadata };
            let flips = 1 + random.below(8);
            let mut places = Vec::new();
            for _ in 0..flips {
                let at = start + random.below(used - start);
                let byte = if random.below(3) == 0 { 0xff } else { random.next() as u8 };
                file.write_all_at(&[byte], at).unwrap();
                places.push(at);
            }
            let begin = Instant::now();
            if let Ok(image) = open(&dir.join("image")) {
                walk(&image);
            }
            assert!(begin.elapsed() < Duration::from_secs(10), "{layout:?} round {round}: {places:?}");
            places.iter().for_each(|at| file.write_all_at(&whole[*at as usize..][..1], *at).unwrap());
        }
    }
    assert!(peak_memory_kib() < 300 << 10, "{} KiB", peak_memory_kib());
}

/// Finds the only place where a name stands in an image with plain metadata.
fn find(bytes: &[u8], name: &[u8]) -> usize {
    let mut places = (0..bytes.len() - name.len()).filter(|at| &bytes[*at..*at + name.len()] == name);
    let place = places.next().expect("the name is there");
    assert_eq!(places.next(), None, "the name is there once");
    place
}

fn list(image: &Image, path: &[u8]) -> Result<Vec<Vec<u8>>> {
    let directory = image.resolve(path)?;
    let mut listing = image.read_dir(&directory, 0)?;
    let mut names = Vec::new();
    while let Some(entry) = listing.next()? {
        names.push(entry.name.to_vec());
    }
    Ok(names)
}

#[test]
fn names_that_are_no_names_are_corrupt() {
    let dir = TempDir::new("names");
    fs::create_dir_all(dir.join("tree/sub")).unwrap();
    for name in ["Q7", "harmless-name"] {
        fs::write(dir.join("tree/sub").join(name), "").unwrap();
    }
    make_image(&dir.join("tree"), &dir.join("image"), PLAIN_METADATA);
    let whole = fs::read(dir.join("image")).unwrap();
    let cases: &[(&[u8], &[u8])] = &[
        (b"Q7", b".."),
        (b"Q7", b"/7"),
        (b"Q7", b"Q\0"),
        (b"harmless-name", b"../../../../x"),
        (b"harmless-name", b"harmless/name"),
    ];
    for (old, new) in cases {
        let mut bytes = whole.clone();
        let at = find(&bytes, old);
        bytes[at..at + new.len()].copy_from_slice(new);
        fs::write(dir.join("image"), bytes).unwrap();
        let error = list(&open(&dir.join("image")).unwrap(), b"sub").unwrap_err();
        assert!(error.to_string().contains("a file name that is no name"), "{error}");
    }
    let mut bytes = whole.clone();
    let at = find(&bytes, b"harmless-name");
    bytes[at - 2..at].copy_from_slice(&255u16.to_le_bytes());
    fs::write(dir.join("image"), bytes).unwrap();
    let error = list(&open(&dir.join("image")).unwrap(), b"sub").unwrap_err();
    assert!(error.to_string().contains("a file name longer than 255 bytes"), "{error}");
}

#[test]
fn directory_loops_end() {
    let dir = TempDir::new("loops");
    fs::create_dir_all(dir.join("tree/outer/middle/inner-name")).unwrap();
    make_image(&dir.join("tree"), &dir.join("image"), PLAIN_METADATA);
    let whole = fs::read(dir.join("image")).unwrap();
    let offset_of = |path: &[u8]| {
        let image = open(&dir.join("image")).unwrap();
        (image.resolve(path).unwrap().reference.raw() & 0xffff) as u16
    };
    let targets = [offset_of(b"outer/middle"), offset_of(b"/"), offset_of(b"outer")];
    let at = find(&whole, b"inner-name") - 8;
    for (number, target) in targets.into_iter().enumerate() {
        let mut bytes = whole.clone();
        bytes[at..at + 2].copy_from_slice(&target.to_le_bytes());
        fs::write(dir.join("image"), bytes).unwrap();
        let image = open(&dir.join("image")).unwrap();
        walk(&image);
        let path =
            b"outer/middle".iter().copied().chain(b"/inner-name/middle".repeat(200)).collect::<Vec<_>>();
        match number {
            2 => assert!(image.resolve(&path).is_ok(), "each step is bounded, so is the path"),
            _ => assert!(list(&image, b"outer/middle").unwrap_err().to_string().contains("contains itself")),
        }
    }
}

#[test]
fn paths_are_resolved_inside_the_image() {
    let dir = TempDir::new("paths");
    make_tree(&dir.join("tree"));
    make_image(&dir.join("tree"), &dir.join("image"), &[]);
    let image = open(&dir.join("image")).unwrap();
    let read = |path: &[u8]| image.read_file(path, 10_000);
    assert_eq!(read(b"names/ ").unwrap(), b"space");
    assert_eq!(read(b"/../../names/./../names//hard link").unwrap(), b"space");
    assert_eq!(read(b"names/absolute").unwrap(), fs::read(dir.join("tree/sizes/4097")).unwrap());
    assert!(matches!(read(b"names/loop1"), Err(Error::TooManyLinks)));
    assert!(matches!(read(b"names/outside"), Err(Error::NotFound)));
    assert!(matches!(read(b"names"), Err(Error::NotAFile)));
    assert!(matches!(read(b"names/ /x"), Err(Error::NotADirectory)));
    assert!(matches!(read(b"sizes/3000000"), Err(Error::TooLarge { size: 3_000_000, limit: 10_000 })));
    assert_eq!(
        image.read_file(b"special/fifo", 10).unwrap_err().to_string(),
        "not a regular file in the image"
    );
    let names = list(&image, b"names").unwrap();
    let mut expected: Vec<_> =
        fs::read_dir(dir.join("tree/names")).unwrap().map(|e| e.unwrap().file_name()).collect();
    expected.sort();
    assert_eq!(names, expected.iter().map(|name| name.as_bytes().to_vec()).collect::<Vec<_>>());
}

/// Continues a listing from each entry in turn.
#[test]
fn listings_continue_anywhere() {
    let dir = TempDir::new("continue");
    fs::create_dir(dir.join("tree")).unwrap();
    for number in 0..3000 {
        fs::write(dir.join("tree").join(format!("file-with-a-name-{number:05}")), "").unwrap();
    }
    make_image(&dir.join("tree"), &dir.join("image"), &[]);
    let image = open(&dir.join("image")).unwrap();
    let root = image.root().unwrap();
    let (mut from, mut names) = (0, Vec::new());
    while let Some(entry) = image.read_dir(&root, from).unwrap().next().unwrap() {
        names.push(entry.name.to_vec());
        from = entry.next;
    }
    assert_eq!(names.len(), 3000);
    assert!(names.is_sorted());
    assert!(names.iter().all(|name| image.lookup(&root, name).unwrap().is_some()));
    assert!(image.lookup(&root, b"file-with-a-name-02999x").unwrap().is_none());
}
