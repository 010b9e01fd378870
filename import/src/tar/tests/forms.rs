//! Each form of a header, and what it means.

use super::*;

fn file(name: &str) -> HeaderBlock {
    HeaderBlock::new(b'0', name, 0)
}

#[test]
fn ustar_fields() {
    let mut header = HeaderBlock::new(b'0', "name", 5);
    header.put(100, b"0104755\0").put(108, b"0001750\0").put(116, b"0001751\0").put(136, b"14512043640\0");
    header.put(345, b"some/prefix");
    let entries = read(&archive(&[(header, b"hello"), (HeaderBlock::new(b'5', "d/", 0), b"")])).unwrap();
    let (entry, content) = &entries[0];
    assert_eq!(entry.path, b"some/prefix/name");
    assert_eq!((entry.mode, entry.uid, entry.gid), (0o4755, 1000, 1001), "the type is not in the mode");
    assert_eq!((entry.mtime, entry.size, entry.stored_size, entry.position), (1_697_138_592, 5, 5, 512));
    assert_eq!((&entry.kind, content.as_slice()), (&EntryKind::File, b"hello".as_slice()));
    assert_eq!((&entries[1].0.kind, entries[1].0.path.as_slice()), (&EntryKind::Directory, b"d/".as_slice()));
}

#[test]
fn v7_has_no_prefix_and_directories_by_a_slash() {
    let mut header = HeaderBlock::new(0, "old/", 0);
    header.put(257, &[0; 8]).put(345, b"prefix");
    let entry = one(&archive(&[(header, b"")]));
    assert_eq!((entry.path.as_slice(), entry.kind), (b"old/".as_slice(), EntryKind::Directory));
    assert_eq!(one(&archive(&[(HeaderBlock::new(0, "f", 0), b"")])).kind, EntryKind::File);
    // Go looks at the slash only with the oldest type.
    assert_eq!(one(&archive(&[(file("f/"), b"")])).kind, EntryKind::File);
    assert_eq!(one(&archive(&[(HeaderBlock::new(b'7', "f", 0), b"")])).kind, EntryKind::File);
}

#[test]
fn star_has_a_shorter_prefix() {
    let mut header = file("name");
    header.put(345, &[b'p'; 131]).put(476, b"00000000000 ").put(488, b"00000000000 ").put(508, b"tar\0");
    assert_eq!(one(&archive(&[(header, b"")])).path, [&[b'p'; 131][..], b"/name"].concat());
}

#[test]
fn gnu_has_times_instead_of_a_prefix_except_with_early_go() {
    let mut header = HeaderBlock::gnu(b'0', "name", 0);
    header.put(345, b"14512043640\0").put(357, b"14512043640\0");
    assert_eq!(one(&archive(&[(header.clone(), b"")])).path, b"name");
    header.put(345, b"usr/share/doc/prefix\0\0\0\0");
    assert_eq!(one(&archive(&[(header, b"")])).path, b"usr/share/doc/prefix/name");
}

#[test]
fn kinds() {
    let link = |flag, target: &[u8]| {
        one(&archive(&[(HeaderBlock::new(flag, "l", 0).put(157, target).clone(), b"")])).kind
    };
    assert_eq!(link(b'1', b"../x"), EntryKind::HardLink(b"../x".to_vec()));
    assert_eq!(link(b'2', &[b't'; 100]), EntryKind::Symlink(vec![b't'; 100]));
    assert_eq!(link(b'6', b""), EntryKind::Fifo);
    let mut device = HeaderBlock::new(b'3', "null", 0);
    device.put(329, b"0000001\0").put(337, b"0000003\0");
    assert_eq!(one(&archive(&[(device.clone(), b"")])).kind, EntryKind::CharDevice { major: 1, minor: 3 });
    device.0[156] = b'4';
    let records: [(&str, &[u8]); 2] = [("SCHILY.devmajor", b"259"), ("SCHILY.devminor", b"70000")];
    assert_eq!(
        one(&with_pax(&records, device, b"")).kind,
        EntryKind::BlockDevice { major: 259, minor: 70000 }
    );
}

#[test]
fn only_files_have_content() {
    for flag in *b"123456" {
        let header = HeaderBlock::new(flag, "name", 512);
        let entries = read(&archive(&[(header, b""), (file("next"), b"")])).unwrap();
        assert_eq!((entries.len(), entries[0].0.size), (2, 0), "{}", flag as char);
    }
}

#[test]
fn numbers_in_base_256() {
    let entry = |mtime: [u8; 12], uid: [u8; 8]| {
        one(&archive(&[(file("f").put(136, &mtime).put(108, &uid).clone(), b"")]))
    };
    let small = [0x80, 0, 0, 0, 0, 0x20, 0, 0];
    // The year 2200, and 1969.
    let mut later = [0; 12];
    later[0] = 0x80;
    later[4..].copy_from_slice(&7_258_118_400_i64.to_be_bytes());
    let mut earlier = [0xff; 12];
    earlier[4..].copy_from_slice(&(-86_400_i64).to_be_bytes());
    assert_eq!((entry(later, small).mtime, entry(later, small).uid), (7_258_118_400, 0x20_0000));
    assert_eq!(entry(earlier, [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe]).mtime, -86_400);
    assert_eq!(entry(earlier, [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe]).uid, 0xffff_fffe);
    let mut largest = [0; 12];
    largest[0] = 0x80;
    largest[4..].copy_from_slice(&i64::MAX.to_be_bytes());
    assert_eq!(entry(largest, small).mtime, i64::MAX);
    assert_eq!(number(&[0xbf; 8]), Some(0x3fbf_bfbf_bfbf_bfbf));
    assert_eq!(number(&[0xff; 12]), Some(-1));
    assert_eq!(number(&[0xc0, 0, 0, 0, 0, 0, 0, 0]), Some(-(1 << 62)));
    assert_eq!(number(&[0x80, 0, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0]), None);
    assert_eq!(number(&[0xc0, 0, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0]), None);
    assert_eq!(number(&[0xff, 0xff, 0xff, 0xff, 0x7f, 0, 0, 0, 0, 0, 0, 0]), None);
}

#[test]
fn octal_numbers() {
    assert_eq!(number(b" 0000644\0"), Some(0o644));
    assert_eq!(number(b"\0\0 644 \0"), Some(0o644));
    assert_eq!(number(b"64 4"), None);
    assert_eq!(number(b"64\x004"), Some(0o64), "the text ends at a zero byte");
    assert_eq!(number(b"\0\0\0"), Some(0));
    assert_eq!(number(b""), Some(0));
    assert_eq!(number(b"-1"), None);
    assert_eq!(number(b"8"), None);
    assert_eq!(number(b"7777777777777777777777777"), None);
}

#[test]
fn checksums_of_both_kinds() {
    let mut header = file("caf\u{e9}").bytes();
    assert!(read(&header).is_ok());
    let signed: i32 = header
        .iter()
        .enumerate()
        .filter(|(at, _)| !(148..156).contains(at))
        .map(|(_, byte)| i32::from(*byte as i8))
        .sum();
    header[148..156].copy_from_slice(format!("{:06o}\0 ", signed + 8 * 32).as_bytes());
    assert!(read(&header).is_ok());
    header[0] ^= 1;
    assert_eq!(
        problem(&header),
        "the header at byte 0 of the archive has a wrong checksum: damaged, or not a tar archive"
    );
}

#[test]
fn long_names_of_gnu() {
    let name = [b"d/".as_slice(), &[b'n'; 300], b"\0"].concat();
    let link = [&[b'l'; 200][..], b"\0"].concat();
    let members = [
        (HeaderBlock::gnu(b'L', "././@LongLink", name.len() as u64), name.as_slice()),
        (HeaderBlock::gnu(b'K', "././@LongLink", link.len() as u64), link.as_slice()),
        (HeaderBlock::gnu(b'2', "short", 0), b"".as_slice()),
        (HeaderBlock::gnu(b'2', "next", 0).put(157, b"target").clone(), b"".as_slice()),
    ];
    let entries = read(&archive(&members)).unwrap();
    assert_eq!(entries[0].0.path, name[..302]);
    assert_eq!(entries[0].0.kind, EntryKind::Symlink(vec![b'l'; 200]));
    assert_eq!(
        (entries[1].0.path.as_slice(), &entries[1].0.kind),
        (b"next".as_slice(), &EntryKind::Symlink(b"target".to_vec()))
    );
}

#[test]
fn a_long_name_wins_over_pax_on_either_side_of_it() {
    let (extended, text) = pax(&[("path", b"by-pax"), ("linkpath", b"link-by-pax")]);
    let long = (HeaderBlock::gnu(b'L', "L", 7), b"by-gnu\0".as_slice());
    let last = (HeaderBlock::new(b'2', "short", 0), b"".as_slice());
    for members in
        [[(extended.clone(), text.as_slice()), long.clone(), last.clone()], [long, (extended, &text), last]]
    {
        let entry = one(&archive(&members));
        assert_eq!(entry.path, b"by-gnu");
        assert_eq!(entry.kind, EntryKind::Symlink(b"link-by-pax".to_vec()));
    }
}

#[test]
fn pax_records_replace_fields() {
    let records: [(&str, &[u8]); 9] = [
        ("path", b"caf\xc3\xa9/\xff\n"),
        ("size", b"3"),
        ("uid", b"4000000"),
        ("gid", b"-2"),
        ("mtime", b"1700000000.999999999"),
        ("SCHILY.xattr.user.a=b", b"not the name"),
        ("SCHILY.xattr.security.capability", b"\x01\0\0\x02\n="),
        ("comment", b"ignored"),
        ("uname", b"root"),
    ];
    let bytes = with_pax(&records, HeaderBlock::new(b'0', "short", 100), b"abc");
    let (entry, content) = read(&bytes).unwrap().remove(0);
    assert_eq!(
        (entry.path.as_slice(), content.as_slice()),
        (b"caf\xc3\xa9/\xff\n".as_slice(), b"abc".as_slice())
    );
    assert_eq!((entry.uid, entry.gid, entry.mtime, entry.size), (4_000_000, 0xffff_fffe, 1_700_000_000, 3));
    let xattrs: Vec<(&[u8], &[u8])> =
        entry.xattrs.iter().map(|(key, value)| (key.as_slice(), value.as_slice())).collect();
    assert_eq!(
        xattrs,
        [(b"security.capability".as_slice(), b"\x01\0\0\x02\n=".as_slice()), (b"user.a", b"b=not the name")]
    );
}

#[test]
fn empty_pax_values_are_none() {
    let records: [(&str, &[u8]); 5] =
        [("path", b"x"), ("path", b""), ("uid", b""), ("mtime", b""), ("SCHILY.xattr.user.e", b"")];
    let entry = one(&with_pax(&records, file("name").put(108, b"0000005\0").clone(), b""));
    assert_eq!((entry.path.as_slice(), entry.uid, entry.mtime), (b"name".as_slice(), 5, 0));
    assert!(entry.xattrs.is_empty());
}

#[test]
fn a_pax_header_replaces_the_last_and_belongs_to_one_entry() {
    let (first, first_text) = pax(&[("path", b"first"), ("uid", b"7")]);
    let (second, second_text) = pax(&[("path", b"second")]);
    let members =
        [(first, first_text.as_slice()), (second, &second_text), (file("a"), b""), (file("b"), b"")];
    let entries = read(&archive(&members)).unwrap();
    assert_eq!((entries[0].0.path.as_slice(), entries[0].0.uid), (b"second".as_slice(), 0));
    assert_eq!(entries[1].0.path, b"b");
}

#[test]
fn global_headers_and_labels_change_nothing() {
    let (_, text) = pax(&[("path", b"global"), ("uid", b"7")]);
    let global = HeaderBlock::new(b'g', "pax_global_header", text.len() as u64);
    let members = [(global, text.as_slice()), (HeaderBlock::gnu(b'V', "backup", 0), b""), (file("a"), b"")];
    let entry = one(&archive(&members));
    assert_eq!((entry.path.as_slice(), entry.uid), (b"a".as_slice(), 0));
}

#[test]
fn times_are_rounded_down() {
    let mtime = |text: &str| one(&with_pax(&[("mtime", text.as_bytes())], file("f"), b"")).mtime;
    for (text, seconds) in [
        ("1", 1),
        ("1.9", 1),
        ("-1", -1),
        ("-1.0", -1),
        ("-1.5", -2),
        ("-0.5", -1),
        ("0.", 0),
        ("+5", 5),
        ("-0.0000000001", 0),
        ("9223372036854775807.9", i64::MAX),
        ("7258118400.123456789123", 7_258_118_400),
    ] {
        assert_eq!(mtime(text), seconds, "{text}");
    }
    for text in ["x", ".5", "1.x", "1e3", "--1", "1.-5", "9223372036854775808", "-9223372036854775808.5"] {
        assert_eq!(
            problem(&with_pax(&[("mtime", text.as_bytes())], file("f"), b"")),
            "the header at byte 1024 of the archive has no valid number for the time",
            "{text}"
        );
    }
}

#[test]
fn attributes_of_libarchive() {
    let records: [(&str, &[u8]); 5] = [
        ("LIBARCHIVE.xattr.user.%41%3d", b"aGVsbG8"),
        ("LIBARCHIVE.xattr.user.both", b"aGVsbG8="),
        ("SCHILY.xattr.user.both", b"wins"),
        ("LIBARCHIVE.xattr.user.%4", b"aGVsbG8"),
        ("LIBARCHIVE.xattr.user.bad", b"a b"),
    ];
    let xattrs = one(&with_pax(&records, file("f"), b"")).xattrs;
    assert_eq!(xattrs.len(), 2);
    assert_eq!(
        (xattrs[b"user.A=".as_slice()].as_slice(), xattrs[b"user.both".as_slice()].as_slice()),
        (b"hello".as_slice(), b"wins".as_slice())
    );
}

use super::super::header::number;
