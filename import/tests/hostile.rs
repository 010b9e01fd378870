//! Archives and layouts that were made to do harm, or by strange programs. Each is refused with a message, or its tree is what
//! a careful reader makes of it; always in little memory, and without a file where none belongs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

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
const MEMORY: &str = "--data=134217728";

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

#[test]
fn names_stay_inside() {
    let bytes = |path: &'static [u8]| Item { path: path.into(), ..file("", "x") };
    let cases: Vec<(&str, Vec<Vec<Item>>, Expected)> = vec![
        (
            "dots and slashes",
            vec![vec![
                file("../../up", "u"),
                file("/absolute", "a"),
                file("a/../../b", "b"),
                file("./c", "c"),
            ]],
            Tree(vec![("up", ""), ("absolute", ""), ("b", ""), ("c", "")]),
        ),
        ("an empty name", vec![vec![file("", "x")]], Refused("the root of the image is not a directory")),
        ("a file called .", vec![vec![file(".", "x")]], Refused("the root of the image is not a directory")),
        (
            "a file called ..",
            vec![vec![file("..", "x")]],
            Refused("the root of the image is not a directory"),
        ),
        (
            "a link called .",
            vec![vec![symlink(".", "/etc")]],
            Refused("the root of the image is not a directory"),
        ),
        (
            "a link over a directory, and a file through it",
            vec![
                vec![dir("d"), file("d/f", "1")],
                vec![symlink("d", "/etc")],
                vec![file("d/passwd", "mine")],
            ],
            Tree(vec![("d", "-> \"/etc\""), ("etc", ""), ("etc/passwd", "")]),
        ),
        (
            "a link up and a file through it",
            vec![vec![symlink("up", "../../../../.."), file("up/x", "x")]],
            Tree(vec![("up", ""), ("x", "")]),
        ),
        (
            "a hard link to a file of the machine",
            vec![vec![link("shadow", "/etc/shadow")]],
            Refused("shadow: a hard link to etc/shadow, which is not there"),
        ),
        (
            "the same by way of a link",
            vec![vec![symlink("etc", "/etc"), link("shadow", "etc/shadow")]],
            Refused("shadow: "),
        ),
        (
            "a whiteout of what is above",
            vec![vec![dir("x")], vec![file("x/.wh...", "")]],
            Refused("a whiteout of a name that no file has"),
        ),
        (
            "an opaque mark through a link",
            vec![vec![dir("d"), file("d/f", "f")], vec![symlink("s", "../../d"), file("s/.wh..wh..opq", "")]],
            Tree(vec![("d", ""), ("s", "")]),
        ),
        (
            "the kernel's own whiteouts are devices",
            vec![vec![file("a", "a")], vec![item("a", EntryType::Char, "0:0")]],
            Tree(vec![("a", "20644")]),
        ),
        (
            "duplicates",
            vec![vec![file("a", "1"), dir("a"), file("a/b", "2"), file("a", "3"), symlink("a", "a")]],
            Tree(vec![("a", "-> \"a\"")]),
        ),
        ("a newline", vec![vec![bytes(b"a\nb")]], Tree(vec![("a\nb", "")])),
        (
            "privileges are data",
            vec![vec![mode(0o6755, file("su", "s")), mode(0, dir("shut")), file("shut/in", "i")]],
            Tree(vec![("su", "106755"), ("shut", "40000"), ("shut/in", "")]),
        ),
    ];
    for (name, layers, expected) in cases {
        let layers: Vec<Vec<u8>> = layers.iter().map(|items| layer(items)).collect();
        check(name, &layers, &expected);
    }
}

#[test]
fn headers_that_say_several_things() {
    let long = "n".repeat(255);
    let path = |len: usize| pax(&[("path", "n".repeat(len).as_bytes())]);
    let time = |change: fn(&mut [u8])| end(&[header(b"f", b'0', 0, change)]);
    let of_pax = |mtime: &str| end(&[pax(&[("mtime", mtime.as_bytes())]), entry(b"f", b'0', b"")]);
    let size =
        |value: &str, content: &[u8]| end(&[pax(&[("size", value.as_bytes())]), entry(b"f", b'0', content)]);
    let cases: Vec<(&str, Vec<u8>, Expected)> = vec![
        // The records win: two blocks belong to the file, and what looks like a header in them is content.
        (
            "a larger size in the records",
            end(&[
                pax(&[("size", b"1024")]),
                header(b"f", b'0', 0, |_| ()),
                entry(b"inside", b'0', b"x"),
                entry(b"g", b'0', b""),
            ]),
            Tree(vec![("f", ""), ("g", "")]),
        ),
        ("a size that is negative", size("-1", b""), Refused("has no valid number for the size")),
        ("a size that is no number", size("x", b""), Refused("has no valid number for the size")),
        (
            "a size beyond the archive",
            size("99999", b"x"),
            Refused("the archive ends in the middle of \"f\""),
        ),
        (
            "records before a long name, which wins as with Go",
            end(&[
                pax(&[("path", b"by-records")]),
                entry(b"././@LongLink", b'L', b"by-long-name\0"),
                entry(b"f", b'0', b"x"),
            ]),
            Tree(vec![("by-long-name", "")]),
        ),
        ("a name of 255 bytes", end(&[path(255), entry(b"f", b'0', b"")]), Tree(vec![(long.leak(), "")])),
        (
            "a name of 256 bytes",
            end(&[path(256), entry(b"f", b'0', b"")]),
            Refused("is longer than 255 bytes"),
        ),
        (
            "a zero byte in a name",
            end(&[pax(&[("path", b"a\0b")]), entry(b"f", b'0', b"")]),
            Refused("a zero byte"),
        ),
        ("a time before 1970", of_pax("-5.5"), Tree(vec![("f", " 0 ")])),
        ("a time in 2200", of_pax("7258118400"), Tree(vec![("f", " 4294967295 ")])),
        ("a time that is no number", of_pax("soon"), Refused("has no valid number for the time")),
        (
            "a time in base 256",
            time(|header| header[136..148].copy_from_slice(&[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2])),
            Tree(vec![("f", " 258 ")]),
        ),
        (
            "a negative time in base 256",
            time(|header| header[136..148].copy_from_slice(&[0xff; 12])),
            Tree(vec![("f", " 0 ")]),
        ),
        (
            "an owner in base 256 that nobody can have",
            time(|header| header[108..116].copy_from_slice(&[0x80, 0, 0, 1, 0, 0, 0, 0])),
            Refused("f: 4294967296 is no owner or group"),
        ),
        (
            "a wrong checksum",
            {
                let mut bytes = end(&[entry(b"a", b'0', b""), entry(b"b", b'0', b"")]);
                bytes[512] = b'x';
                bytes
            },
            Refused("the header at byte 512 of the archive has a wrong checksum"),
        ),
        ("an unknown type", end(&[entry(b"a", b'Q', b"")]), Refused("is of the unknown type 'Q' (\"a\")")),
        ("no end", entry(b"a", b'0', b"x"), Tree(vec![("a", "")])),
        ("half an end", [entry(b"a", b'0', b"x"), vec![0; 512]].concat(), Tree(vec![("a", "")])),
        (
            "something behind half an end",
            [entry(b"a", b'0', b"x"), vec![0; 512], entry(b"b", b'0', b"")].concat(),
            Refused("stands behind a block of zeros"),
        ),
        ("nothing", vec![], Tree(vec![])),
    ];
    for (name, bytes, expected) in cases {
        check(name, &[bytes], &expected);
    }
}

#[test]
fn sparse_files_are_as_long_as_they_say_and_take_no_space() {
    let sparse = |real: &str, map: &str, content: &[u8]| {
        let count = map.split(',').count().div_ceil(2).to_string();
        let records = [
            ("GNU.sparse.major", &b"0"[..]),
            ("GNU.sparse.minor", b"1"),
            ("GNU.sparse.name", b"f"),
            ("GNU.sparse.size", real.as_bytes()),
            ("GNU.sparse.numblocks", count.as_bytes()),
            ("GNU.sparse.map", map.as_bytes()),
        ];
        end(&[pax(&records), entry(b"GNUSparseFile.0/f", b'0', content)])
    };
    // The old form of GNU: a map in the header, and the length behind it.
    let gnu = |real: u64, offset: u64| {
        end(&[[
            header(b"f", b'S', 512, |header| {
                header[257..265].copy_from_slice(b"ustar  \0");
                header[345..500].fill(0);
                header[386..398].copy_from_slice(format!("{offset:011o}\0").as_bytes());
                header[398..410].copy_from_slice(format!("{:011o}\0", 512).as_bytes());
                let mut len = [0; 12];
                len[4..].copy_from_slice(&real.to_be_bytes());
                len[0] = 0x80;
                header[483..495].copy_from_slice(&len);
            }),
            vec![b'x'; 512],
        ]
        .concat()])
    };
    let cases: Vec<(&str, Vec<u8>, Expected)> = vec![
        ("a hole in the records", sparse("300000", "100,1,299999,1", b"ab"), Tree(vec![("f", "")])),
        (
            "8 EiB in the records",
            sparse("9223372036854775807", "0,1", b"a"),
            Refused("f: a file of 9223372036854775807 bytes"),
        ),
        ("a map that goes back", sparse("300000", "100,1,50,1", b"ab"), Refused("map of a sparse file")),
        ("a map beyond the end", sparse("100", "100,1", b"a"), Refused("map of a sparse file")),
        ("less content than in the map", sparse("300000", "0,5", b"ab"), Refused("f")),
        ("a hole in the header", gnu(100_000, 50_000), Tree(vec![("f", "")])),
        (
            "8 EiB in the header",
            gnu(i64::MAX as u64, 50_000),
            Refused("f: a file of 9223372036854775807 bytes"),
        ),
    ];
    for (name, bytes, expected) in cases {
        check(name, &[bytes], &expected);
    }
    let home = bounded();
    let scratch = Scratch::new();
    common::oci_layout(scratch.path(), &[sparse("3000000000", "2999999999,1", b"z")]);
    let started = std::time::Instant::now();
    home.image(&[&format!("oci:{}", scratch.path().display())]);
    assert!(home.path("image.sqsh").metadata().unwrap().len() < 200_000);
    println!("3 GB of zeros: {:?}", started.elapsed());
}

#[test]
fn extended_attributes_are_kept_or_dropped() {
    let with = |name: &str, value: &[u8]| {
        end(&[pax(&[(&format!("SCHILY.xattr.{name}"), value)]), entry(b"f", b'0', b"x")])
    };
    let capability = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    check(
        "a capability",
        &[with("security.capability", &capability)],
        &Tree(vec![("f", "security.capability=[1, 0, 0, 2")]),
    );
    for name in
        ["trusted.overlay.opaque", "trusted.overlay.redirect", "security.selinux", "system.posix_acl_access"]
    {
        let scratch = Scratch::new();
        common::oci_layout(scratch.path(), &[with(name, b"y")]);
        let tree = imported(&bounded(), &format!("oci:{}", scratch.path().display())).unwrap();
        assert!(!tree[Path::new("f")].contains(name), "{tree:?}");
    }
    // No file system that unsquashfs could unpack it to has so much space for it.
    let (home, scratch) = (bounded(), Scratch::new());
    common::oci_layout(scratch.path(), &[with("user.big", &[b'v'; 65_536])]);
    let image = home.image(&[&format!("oci:{}", scratch.path().display())]);
    let image = mizzen_squashfs::Image::open(File::open(image).unwrap(), 0).unwrap();
    let root = image.inode(image.superblock().root).unwrap();
    let found = image.lookup(&root, b"f").unwrap().unwrap();
    let value = image.get_xattr(&image.inode(found).unwrap(), b"user.big").unwrap().unwrap();
    assert!(value == [b'v'; 65_536], "{}", value.len());
    check("of more", &[with("user.big", &[b'v'; 65_537])], &Refused("f: "));
    check(
        "of 2 MB",
        &[with("user.big", &[b'v'; 2 << 20])],
        &Refused("is longer than 1048576 bytes with its extensions"),
    );
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
fn bombs_take_no_memory_and_no_disk() {
    const LEN: u64 = 2 << 30;
    let home = bounded();
    for (name, compress) in [("gzip", gzip as fn(&[u8]) -> Vec<u8>), ("zstd", zstd)] {
        let bytes = bomb(&header(b"zeros", b'0', LEN, |_| ()), LEN, compress);
        assert!(bytes.len() < 20 << 20, "{name}: {}", bytes.len());
        let scratch = Scratch::new();
        let layout = Layout::new(scratch.path());
        let config = layout.put(config(&[], "amd64").as_bytes(), CONFIG);
        layout.name("bomb", layout.manifest(config, vec![layout.put(&bytes, LAYER)]));
        home.image(&[&format!("oci:{}", scratch.path().display())]);
        assert!(home.path("image.sqsh").metadata().unwrap().len() < 1 << 20, "{name}");
        let kept: u64 =
            fs::read_dir(home.layers()).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
        assert!(kept < 2 << 20, "{name}: {kept}");
    }
    for (name, kind) in [("name", b'L'), ("target", b'K'), ("records", b'x'), ("global records", b'g')] {
        let bytes = bomb(&header(b"long", kind, 1 << 30, |_| ()), 1 << 30, gzip);
        check(name, &[bytes], &Refused("is longer than 1048576 bytes with its extensions"));
    }
}

#[test]
fn streams_that_are_compressed_strangely() {
    let tar = layer(&[file("a", "a"), Item { content: vec![7; 300_000].into(), ..file("b", "") }]);
    let tree = || Tree(vec![("a", ""), ("b", "")]);
    let (half, rest) = tar.split_at(1000);
    let members = [gzip(half), gzip(b""), gzip(rest)].concat();
    let frames = [zstd(half), b"\x50\x2a\x4d\x18\x03\0\0\0abc".to_vec(), zstd(rest)].concat();
    // One file in each member, and a footer behind the end of the archive, as eStargz has it.
    let stargz = [tar.chunks(512).map(gzip).collect::<Vec<_>>().concat(), gzip(b"")].concat();
    let broken = {
        let mut bytes = gzip(&tar);
        let last = bytes.len() - 5;
        bytes[last] ^= 1;
        bytes
    };
    // A window of 2 GiB: magic, a descriptor with single-segment off, window byte (21 << 3).
    let window = [&b"\x28\xb5\x2f\xfd\x00\xa8"[..], &zstd(&tar)[6..]].concat();
    let cases = [
        ("members", members.clone(), tree()),
        ("members and zeros", [&members[..], &[0; 700]].concat(), tree()),
        ("eStargz", stargz, tree()),
        ("frames", frames, tree()),
        (
            "garbage behind gzip",
            [&gzip(&tar)[..], b"garbage"].concat(),
            Refused("it has something else behind its end"),
        ),
        (
            "garbage behind zstd",
            [&zstd(&tar)[..], b"garbage"].concat(),
            Refused("the zstd stream cannot be decompressed"),
        ),
        ("a wrong checksum of gzip", broken, Refused("the gzip stream cannot be decompressed")),
        (
            "a window of 2 GiB",
            window,
            Refused("the zstd stream cannot be decompressed with a window of at most 128 MiB"),
        ),
        ("bzip2", b"BZh91AY&SY".to_vec(), Refused("it is compressed with bzip2, which we do not read")),
        ("gzip in gzip", gzip(&gzip(&tar)), Refused("a wrong checksum: damaged, or not a tar archive")),
    ];
    for (name, bytes, expected) in cases {
        check(name, &[bytes], &expected);
    }
}

/// A layer that ends too early, at bytes all over it. What was cut between two entries cannot be known from an archive.
#[test]
fn layers_that_are_cut() {
    let tar = layer(&[file("a", "a"), Item { content: vec![9; 3000].into(), ..file("b", "") }, dir("c")]);
    let step = if std::env::var_os("MIZZEN_TEST_LONG").is_some() { 1 } else { 61 };
    let scratch = Scratch::new();
    let source = format!("oci:{}", scratch.path().join("oci").display());
    for (name, bytes) in [("plain", tar.clone()), ("gzip", gzip(&tar)), ("zstd", zstd(&tar))] {
        let mut refused = 0;
        for cut in (1..bytes.len()).step_by(if name == "plain" { step } else { 1 + step / 20 }) {
            let _ = fs::remove_dir_all(scratch.path().join("oci"));
            common::oci_layout(&scratch.path().join("oci"), &[bytes[..cut].to_vec()]);
            match common::import(&scratch, &source) {
                Ok(_) => {
                    // In the padding behind "a" or "b", between entries, or between the blocks of the end.
                    let whole = [513..=1024, 4536..=4608, 5120..=5120, 5632..=5632];
                    let is_whole = whole.iter().any(|range| range.contains(&cut));
                    assert!(name == "plain" && is_whole, "{name}: cut at {cut}");
                }
                Err(failure) => {
                    refused += 1;
                    let known = [
                        "ends in the middle of",
                        "stream ends before its data does",
                        "it is neither a tar archive",
                    ];
                    assert!(
                        known.iter().any(|text| failure.message.contains(text)),
                        "{name}, {cut}: {failure}"
                    );
                }
            }
        }
        assert!(refused > 20, "{name}: {refused}");
    }
}

#[test]
fn more_of_everything_than_anybody_has() {
    let home = bounded();
    let scratch = Scratch::new();
    let count = 100_000;
    let mut files = Vec::with_capacity(count * 512 + 1024);
    (0..count).for_each(|number| files.extend(entry(format!("d/{number}").as_bytes(), b'0', b"")));
    common::oci_layout(&scratch.path().join("files"), &[end(&[files])]);
    let image = home.image(&[&format!("oci:{}", scratch.path().join("files").display())]);
    let image = mizzen_squashfs::Image::open(File::open(image).unwrap(), 0).unwrap();
    assert_eq!(image.superblock().inodes as usize, count + 4, "with /, d, .mizzen and config.json");

    let depth = 5000;
    let deep = end(&[pax(&[("path", "d/".repeat(depth).as_bytes())]), entry(b"d", b'5', b"")]);
    common::oci_layout(&scratch.path().join("deep"), &[deep]);
    let image = home.image(&[&format!("oci:{}", scratch.path().join("deep").display())]);
    let image = mizzen_squashfs::Image::open(File::open(image).unwrap(), 0).unwrap();
    assert_eq!(image.superblock().inodes as usize, depth + 3);
}

/// A layout of a manifest with this configuration and these layers.
fn described(directory: &Path, change: impl Fn(&Layout, &mut Value)) {
    let layout = Layout::new(directory);
    let layers = [layer(&[file("a", "a")])];
    let mut manifest = json!({
        "schemaVersion": 2, "mediaType": MANIFEST,
        "config": layout.put(config(&layers, "amd64").as_bytes(), CONFIG),
        "layers": [layout.put(&layers[0], LAYER)],
    });
    change(&layout, &mut manifest);
    layout.name("x", layout.put(manifest.to_string().as_bytes(), MANIFEST));
}

type Change = Box<dyn Fn(&Layout, &mut Value)>;

#[test]
fn layouts_that_contradict_themselves() {
    let sparse = |layout: &Layout, len: u64| {
        let digest = digest(format!("{len}").as_bytes());
        File::create(layout.blob(&digest)).unwrap().set_len(len).unwrap();
        json!({ "mediaType": CONFIG, "digest": digest, "size": len })
    };
    let other = |layout: &Layout, descriptor: &Value| {
        let path = layout.blob(descriptor["digest"].as_str().unwrap());
        let mut bytes = fs::read(&path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    let cases: Vec<(&str, Change, &str)> = vec![
        ("nothing wrong", Box::new(|_, _| ()), ""),
        (
            "a configuration of 1 GB",
            Box::new(move |layout, m| m["config"] = sparse(layout, 1 << 30)),
            "has more than 8388608 bytes",
        ),
        (
            "another layer",
            Box::new(move |layout, m| other(layout, &m["layers"][0])),
            "the content is another, with the digest sha256:",
        ),
        (
            "another configuration",
            Box::new(move |layout, m| other(layout, &m["config"])),
            "the content is another, with the digest sha256:",
        ),
        (
            "a wrong size of the layer",
            Box::new(|_, m| m["layers"][0]["size"] = json!(7)),
            "bytes, and the manifest says 7",
        ),
        (
            "a wrong size of the configuration",
            Box::new(|_, m| m["config"]["size"] = json!(7)),
            "bytes, and the manifest says 7",
        ),
        (
            "a missing layer",
            Box::new(|layout, m| {
                fs::remove_file(layout.blob(m["layers"][0]["digest"].as_str().unwrap())).unwrap()
            }),
            "is not there",
        ),
        (
            "a digest that leads out",
            Box::new(|_, m| m["config"]["digest"] = json!("sha256:../../../../../etc/passwd")),
            "64 hexadecimal digits in lower case",
        ),
        (
            "a digest of md5",
            Box::new(|_, m| m["config"]["digest"] = json!(format!("md5:{}", "a".repeat(32)))),
            "only sha256 and sha512",
        ),
        (
            "10,000 layers",
            Box::new(|_, m| m["layers"] = json!(vec![m["layers"][0].clone(); 10_000])),
            "the image has 10000 layers, more than 1000",
        ),
        (
            "an index, too",
            Box::new(|_, m| m["manifests"] = json!([])),
            "it is a manifest and an index at the same time, which is refused",
        ),
        (
            "called an index",
            Box::new(|_, m| m["mediaType"] = json!(INDEX)),
            "and its content that of a manifest; refused",
        ),
        ("of schema 1", Box::new(|_, m| m["schemaVersion"] = json!(1)), "schema 1, a format of before 2016"),
        (
            "a configuration that is a list",
            Box::new(|layout, m| m["config"] = layout.put(b"[]", CONFIG)),
            "the image's configuration is damaged: ",
        ),
    ];
    for (name, change, words) in cases {
        let (home, scratch) = (bounded(), Scratch::new());
        described(scratch.path(), change);
        let source = format!("oci:{}", scratch.path().display());
        if words.is_empty() {
            home.image(&[&source]);
            continue;
        }
        let outcome = home.import(&["-o", "image.sqsh", &source]);
        assert!(outcome.code == Some(1) && outcome.stderr.contains(words), "{name}: {outcome:?}");
        assert!(home.leftovers().is_empty(), "{name}: {:?}", home.leftovers());
        let layers = fs::read_dir(home.layers()).map_or(0, |entries| entries.count());
        assert_eq!(layers, 0, "{name}: a layer was kept");
    }
}

#[test]
fn indexes_that_have_no_end() {
    let (home, scratch) = (bounded(), Scratch::new());
    let layout = Layout::new(scratch.path());
    let mut entry = layout.image(&[layer(&[file("a", "a")])], "amd64");
    let names = ["none", "one", "two", "three"];
    for name in names {
        layout.name(name, entry.clone());
        entry = layout.index(&[entry]);
    }
    let source = |name: &str| format!("oci:{}:{name}", scratch.path().display());
    for name in &names[..3] {
        assert_eq!(home.tree(&[&source(name)]).len(), 2, "{name}");
    }
    let refused = home.import(&["-fo", "image.sqsh", &source("three")]);
    refused.assert_fails(&["an index in an index in an index, which is refused"]);
    // An index that is too long to be read.
    File::options().write(true).open(scratch.path().join("index.json")).unwrap().set_len(1 << 30).unwrap();
    let refused = home.import(&["-fo", "image.sqsh", &source("none")]);
    refused.assert_fails(&["index.json has more than 4194304 bytes"]);
}

/// An archive of docker save, with what it says of its image.
fn saved(config: &str, layers: &[(&str, &[u8])], names: &[&str]) -> Vec<u8> {
    let mut parts = vec![entry(b"config.json", b'0', config.as_bytes())];
    parts.extend(layers.iter().map(|(name, bytes)| entry(name.as_bytes(), b'0', bytes)));
    let manifest = json!([{ "Config": "config.json", "RepoTags": ["x:1"], "Layers": names }]);
    parts.push(entry(b"manifest.json", b'0', manifest.to_string().as_bytes()));
    end(&parts)
}

#[test]
fn archives_of_docker_that_contradict_themselves() {
    let good = layer(&[file("a", "a")]);
    let description = config(std::slice::from_ref(&good), "amd64");
    let wrong = layer(&[file("a", "b")]);
    let many = vec![good.clone(); 1001];
    let link = |name: &[u8], to: &[u8]| {
        header(name, b'2', 0, |header| header[157..157 + to.len()].copy_from_slice(to))
    };
    // The last entry of a name counts.
    let with_links = end(&[
        saved(&description, &[("l.tar", &good)], &["l.tar"]).split_last_chunk::<1024>().unwrap().0.to_vec(),
        link(b"manifest.json", b"/etc/passwd"),
        link(b"loop/a", b"b"),
        link(b"loop/b", b"a"),
    ]);
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("nothing wrong", saved(&description, &[("l.tar", &good)], &["l.tar"]), ""),
        (
            "another layer",
            saved(&description, &[("l.tar", &wrong)], &["l.tar"]),
            "the content is another, with the digest sha256:",
        ),
        (
            "a layer too many",
            saved(&description, &[("l.tar", &good)], &["l.tar", "l.tar"]),
            "manifest.json has 2 layers, and the configuration 1",
        ),
        ("a missing layer", saved(&description, &[], &["l.tar"]), "l.tar is not there"),
        ("a layer of the machine", saved(&description, &[], &["/etc/passwd"]), "is not there"),
        ("a layer that leads out", saved(&description, &[], &["../../etc/passwd"]), "is not there"),
        (
            "1001 layers",
            saved(&config(&many, "amd64"), &[("l.tar", &good)], &["l.tar"; 1001]),
            "the image has 1001 layers, more than 1000",
        ),
        ("links out of the archive", with_links, "no manifest.json"),
    ];
    for (name, bytes, words) in cases {
        let home = bounded();
        fs::write(home.path("archive"), &bytes).unwrap();
        let stream = [&entry(b"repositories", b'0', b"{}")[..], &bytes].concat();
        for from_file in [true, false] {
            let outcome = match from_file {
                true => home.import(&["-o", "image.sqsh", "docker-archive:archive"]),
                false => home.import_from(&["-o", "image.sqsh", "-"], &stream),
            };
            if words.is_empty() {
                assert_eq!(outcome.code, Some(0), "{name}: {outcome:?}");
                fs::remove_file(home.path("image.sqsh")).unwrap();
            } else {
                assert!(outcome.code == Some(1) && outcome.stderr.contains(words), "{name}: {outcome:?}");
            }
            assert_eq!(home.leftovers(), ["archive"], "{name}");
        }
    }
    // A configuration that is longer than a stream may keep.
    let home = bounded();
    let huge = bomb(&header(b"config.json", b'0', 1 << 30, |_| ()), 1 << 30, gzip);
    let start = gzip(&entry(b"repositories", b'0', b"{}"));
    let refused = home.import_from(&["-o", "image.sqsh", "-"], &[start, huge].concat());
    refused.assert_fails(&["no manifest.json: not an archive of docker save"]);
    assert!(home.leftovers().is_empty(), "{:?}", home.leftovers());
}

/// Where the disk is full, in the cache of layers or where the image goes.
#[test]
fn a_full_disk_leaves_nothing() {
    let scratch = Scratch::new();
    let noise: Vec<u8> = (0..2_000_000_u64)
        .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8 ^ (at >> 9) as u8)
        .collect();
    let noise = digest_chain(&noise);
    common::oci_layout(scratch.path(), &[layer(&[Item { content: noise.into(), ..file("noise", "") }])]);
    let source = format!("oci:{}", scratch.path().display());
    for full in ["out", ".cache"] {
        let script = "mkdir -p \"$HOME/out\" \"$HOME/.cache\" && mount -t tmpfs -o size=600k full \"$HOME/FULL\" && \"$0\" \"$@\"; code=$?; \
                      find \"$HOME/out\" \"$HOME/.cache\" -type f >&2; exit $code";
        let script = script.replace("FULL", full);
        let home = Home::new().prefixed(&["unshare", "-m", "sh", "-c", &script]);
        let outcome = home.import(&["-o", "out/image.sqsh", &source]);
        outcome.assert_fails(&["No space left on device", "hint: "]);
        let left: Vec<&str> = outcome
            .stderr
            .lines()
            .filter(|line| line.starts_with('/') && !line.ends_with(".layer"))
            .collect();
        assert!(left.is_empty(), "{full}: {outcome:?}");
    }
}

/// Bytes that do not compress.
fn digest_chain(seed: &[u8]) -> Vec<u8> {
    use sha2::{Digest, Sha256};
    seed.chunks(32)
        .enumerate()
        .flat_map(|(number, chunk)| Sha256::digest([chunk, &number.to_le_bytes()].concat()))
        .collect()
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
