//! Images that the writer makes, as our reader, unsquashfs and the kernel see them. As root.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;
mod limits;
mod model;

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use common::{Random, TempDir, isolated, run};
use mizzen_squashfs::Image;
use mizzen_squashfs::writer::{Attributes, Compression};
use model::{
    Entry, Model, assert_same, attributes, facts_in_directory, facts_in_image, options, with_xattrs,
};

const COMPRESSIONS: [Compression; 5] = [
    Compression::Zstd { level: 3 },
    Compression::Gzip { level: 6 },
    Compression::Xz,
    Compression::Lz4,
    Compression::None,
];
const ZSTD: Compression = COMPRESSIONS[0];
const CAPABILITY: &[u8] = b"\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00";

fn open(image: &[u8], dir: &TempDir) -> Image {
    let path = dir.join("image");
    fs::write(&path, image).unwrap();
    Image::open(File::open(path).unwrap(), 0).unwrap()
}

fn unsquash(image: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    run(Command::new("unsquashfs").args(["-quiet", "-no-progress", "-d"]).args([to, image]));
}

/// Mounts by the kernel, calls, unmounts.
fn with_mount(image: &Path, at: &Path, use_it: impl FnOnce(&Path)) {
    fs::create_dir_all(at).unwrap();
    run(Command::new("mount").args(["-t", "squashfs", "-o", "loop,ro"]).args([image, at]));
    use_it(at);
    run(Command::new("umount").arg(at));
}

/// A tree with every kind of entry, and files of all sizes around the limits of blocks.
fn every_kind(block: usize) -> Model {
    let mut model = Model { root: Attributes { mtime: 5, ..attributes(0o755) }, ..Model::default() };
    let mut random = Random(42);
    model.add("sizes", attributes(0o755), Entry::Directory);
    for size in [0, 1, 100, block - 1, block, block + 1, 2 * block, 7 * block + 17] {
        model.file(format!("sizes/{size}"), random.bytes(size));
        model.file(format!("sizes/zeros-{size}"), vec![0; size]);
    }
    let hole = vec![0; 2 * block];
    model.file("sizes/hole-in-front", [hole.clone(), random.bytes(block + 5)].concat());
    model.file("sizes/hole-inside", [random.bytes(block), hole.clone(), random.bytes(block)].concat());
    model.file("sizes/hole-at-the-end", [random.bytes(block), hole.clone()].concat());
    model.file("sizes/zero-tail", [random.bytes(block), vec![0; 10]].concat());
    model.add("names", attributes(0o1777), Entry::Directory);
    model.file([b"names/".as_slice(), &[b'n'; 255]].concat(), "long");
    model.file(b"names/not\xff\xfeUTF-8", "bytes");
    model.file("names/new\nline", "newline");
    model.file("names/...", "three dots");
    model.add("empty", attributes(0o700), Entry::Directory);
    model.add("link", attributes(0o777), Entry::Symlink(b"../sizes/1".to_vec()));
    model.add("long link", attributes(0o777), Entry::Symlink(vec![b't'; 4000]));
    model.add("null", attributes(0o666), Entry::Char(1, 3));
    model.add("disk", attributes(0o640), Entry::Block(259, 70_000));
    model.add("fifo", attributes(0o600), Entry::Fifo);
    model.add("socket", attributes(0o755), Entry::Socket);
    let owned = Attributes { uid: 1000, gid: 4_000_000_000, mtime: u32::MAX, ..attributes(0o6755) };
    model.add("setuid", owned, Entry::File(b"program".to_vec()));
    model.add("hard link", attributes(0), Entry::Link(b"setuid".to_vec()));
    model.add("names/third", attributes(0), Entry::Link(b"setuid".to_vec()));
    model.add("fifo link", attributes(0), Entry::Link(b"fifo".to_vec()));
    model.add("link link", attributes(0), Entry::Link(b"link".to_vec()));
    add_xattrs(&mut model);
    model
}

fn add_xattrs(model: &mut Model) {
    let large = [b'v'; 1500];
    let common: &[(&str, &[u8])] = &[("user.large", &large), ("user.empty", b""), ("trusted.t", b"t")];
    model.add("x", with_xattrs(0o755, &[("user.of-a-directory", b"d")]), Entry::Directory);
    model.add("x/a", with_xattrs(0o644, common), Entry::File(b"a".to_vec()));
    model.add("x/same", with_xattrs(0o644, common), Entry::File(b"same".to_vec()));
    let other: &[(&str, &[u8])] = &[("user.other", &large), ("security.capability", CAPABILITY)];
    model.add("x/other", with_xattrs(0o755, other), Entry::File(b"other".to_vec()));
    model.add("x/fifo", with_xattrs(0o644, &[("trusted.f", b"f")]), Entry::Fifo);
    model.add("x/socket", with_xattrs(0o644, &[("trusted.f", b"f")]), Entry::Socket);
    model.add("x/null", with_xattrs(0o644, &[("trusted.n", b"n")]), Entry::Char(1, 3));
    model.add("x/link", with_xattrs(0o777, &[("trusted.l", b"l")]), Entry::Symlink(b"a".to_vec()));
}

#[test]
fn every_reader_sees_the_tree_that_was_written() {
    if !isolated("every_reader_sees_the_tree_that_was_written") {
        return;
    }
    let dir = TempDir::new("writer");
    let (path, unpacked, mounted) = (dir.join("image"), dir.join("unpacked"), dir.join("mnt"));
    for block_size in [4 << 10, 128 << 10, 1 << 20] {
        let model = every_kind(block_size as usize);
        let expected = model.facts();
        for compression in COMPRESSIONS {
            let what = format!("{compression:?}, {block_size}");
            println!("{what}");
            let image = model.write(&options(compression, block_size, 2));
            assert_eq!(image.len() % 4096, 0);
            assert_same(&expected, &facts_in_image(&open(&image, &dir)), &format!("{what}, reader"));
            unsquash(&path, &unpacked);
            assert_same(&expected, &facts_in_directory(&unpacked), &format!("{what}, unsquashfs"));
            with_mount(&path, &mounted, |at| {
                assert_same(&expected, &facts_in_directory(at), &format!("{what}, kernel"));
            });
        }
    }
}

#[test]
fn the_number_of_threads_does_not_show() {
    let model = every_kind(4096);
    for compression in COMPRESSIONS {
        let once = model.write(&options(compression, 4096, 1));
        for threads in [1, 2, 7] {
            assert!(once == model.write(&options(compression, 4096, threads)), "{compression:?}, {threads}");
        }
    }
}

/// Seeded random trees: names, kinds, sizes with repeated and zero blocks, links, xattrs.
#[test]
fn random_trees_come_back() {
    let dir = TempDir::new("random");
    for seed in 1..=60 {
        let model = random_tree(seed);
        let random = &mut Random(seed);
        let compression = COMPRESSIONS[random.below(5) as usize];
        let image = model.write(&options(compression, 4096 << random.below(3), 1 + random.below(4) as usize));
        assert_same(&model.facts(), &facts_in_image(&open(&image, &dir)), &format!("seed {seed}"));
        if seed % 10 == 0 {
            unsquash(&dir.join("image"), &dir.join("unpacked"));
            let unpacked = facts_in_directory(&dir.join("unpacked"));
            assert_same(&model.facts(), &unpacked, &format!("seed {seed}, unsquashfs"));
        }
    }
}

fn random_tree(seed: u64) -> Model {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut model = Model { root: attributes(0o755), ..Model::default() };
    let (mut directories, mut others): (Vec<Vec<u8>>, Vec<Vec<u8>>) = (vec![Vec::new()], Vec::new());
    let mut pool = vec![vec![0; 4096]];
    for _ in 0..3 {
        pool.push(random.bytes(4096));
    }
    for number in 0..random.below(700) {
        let directory = &directories[random.below(directories.len() as u64) as usize];
        let name = [number.to_string().into_bytes(), vec![b'x'; random.below(200) as usize]].concat();
        let path = model::join(directory, &name);
        let mut facts = attributes(random.below(0o10000) as u16);
        facts.uid = random.below(70) as u32;
        facts.mtime = random.next() as u32;
        for _ in 0..random.below(8).saturating_sub(5) {
            let value = vec![b'v'; random.below(40) as usize];
            facts.xattrs.insert(format!("trusted.{}", random.below(5)).into_bytes(), value);
        }
        let entry = match random.below(12) {
            0 => Entry::Directory,
            1 => Entry::Symlink(vec![b's'; 1 + random.below(300) as usize]),
            2 => Entry::Char(random.below(4096) as u32, random.below(1 << 20) as u32),
            3 => Entry::Fifo,
            4 if !others.is_empty() => {
                Entry::Link(others[random.below(others.len() as u64) as usize].clone())
            }
            _ => {
                let blocks = (0..random.below(5)).map(|_| pool[random.below(4) as usize].clone());
                let mut contents: Vec<u8> = blocks.flatten().collect();
                contents
                    .truncate(contents.len() - random.below(contents.len() as u64 + 1).min(5000) as usize);
                Entry::File(contents)
            }
        };
        match entry {
            Entry::Directory => directories.push(path.clone()),
            Entry::Link(_) => {}
            _ => others.push(path.clone()),
        }
        // unsquashfs gives links no mode of their own.
        if matches!(entry, Entry::Symlink(_)) {
            facts.mode = 0o777;
        }
        model.add(path, facts, entry);
    }
    model
}
