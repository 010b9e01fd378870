//! What a layer says of its files.

use super::*;

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

#[test]
fn more_of_everything_than_anybody_has() {
    let home = bounded();
    let scratch = Scratch::new();
    let count = if std::env::var_os("MIZZEN_TEST_LONG").is_some() { 500_000 } else { 100_000 };
    // Five times the files take more than twice the memory: about 400 bytes for each.
    let home = if count > 100_000 { Home::new().prefixed(&["prlimit", "--data=301989888"]) } else { home };
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
