//! Hostile archives: what is refused, and with how little memory.

use super::*;

/// A stream that says how much of it was read.
struct Endless {
    head: io::Cursor<Vec<u8>>,
    read: u64,
}

impl Read for Endless {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = match self.head.read(buffer)? {
            0 => {
                buffer.fill(b'a');
                buffer.len()
            }
            len => len,
        };
        self.read += len as u64;
        Ok(len)
    }
}

#[test]
fn a_name_of_a_gigabyte_is_not_read() {
    for flag in *b"LKxg" {
        let head = HeaderBlock::gnu(flag, "long", 1 << 30).bytes();
        let mut archive = Archive::new(Endless { head: io::Cursor::new(head), read: 0 });
        let text = archive.next_entry().unwrap_err().to_string();
        assert_eq!(
            text,
            "the header at byte 0 of the archive is longer than 1048576 bytes with its extensions"
        );
        assert_eq!(
            archive.next_entry().unwrap_err().to_string(),
            "the archive cannot be read behind an error"
        );
        assert!(archive.contents().read(&mut [0; 10]).is_err());
        assert_eq!(archive.into_inner().read, 512);
    }
}

#[test]
fn names_and_records_are_bounded_together() {
    let name = vec![b'n'; 600 << 10];
    let long = |flag| (HeaderBlock::gnu(flag, "L", name.len() as u64), name.as_slice());
    let file = (HeaderBlock::new(b'0', "f", 0), b"".as_slice());
    let text = problem(&archive(&[long(b'L'), long(b'K'), file.clone()]));
    assert!(text.ends_with("is longer than 1048576 bytes with its extensions"), "{text}");
    let entries = read(&archive(&[long(b'L'), file.clone(), long(b'L'), file])).unwrap();
    assert_eq!((entries.len(), entries[1].0.path.len()), (2, 600 << 10), "each entry has its own");
}

#[test]
fn bad_records_are_refused() {
    for (content, expected) in [
        (b"5 a=\n".as_slice(), None),
        (b"99 a=b\n", Some("a wrong length")),
        (b"6 a=b\n\n", Some("a wrong length")),
        (b"5 a=b\n", Some("a wrong length")),
        (b"a=b\n", Some("a wrong length")),
        (b"-6 a=b\n", Some("a wrong length")),
        (b"0 a=b\n", Some("a wrong length")),
        (b"1 ", Some("a wrong length")),
        (b"2 ", Some("a wrong length")),
        (b"99999999999999999999 a=b\n", Some("a wrong length")),
        (b"6 a=b\n\0\0\0", Some("a wrong length")),
        (b"7 =abc\n", Some("without a key")),
        (b"8 a\0b=c\n", Some("without a key")),
        (b"11 path=\0b\n", Some("without a key")),
        (b"22 GNU.sparse.name=\0b\n", Some("without a key")),
        (b"7 abcd\n", Some("without a value")),
    ] {
        for flag in *b"xg" {
            let extended = HeaderBlock::new(flag, "x", content.len() as u64);
            let result = read(&archive(&[(extended, content), (HeaderBlock::new(b'0', "f", 0), b"")]));
            match (result, expected) {
                (Ok(_), None) => {}
                (Err(error), Some(expected)) => {
                    let text = error.to_string();
                    let start = "the header at byte 0 of the archive has a PAX record with";
                    assert!(text.starts_with(start) && text.ends_with(expected), "{content:?}: {text}");
                }
                (result, expected) => panic!("{content:?}: {result:?}, not {expected:?}"),
            }
        }
    }
}

#[test]
fn bad_numbers_are_refused() {
    for (position, field) in
        [(124, "size"), (108, "owner"), (116, "group"), (136, "time"), (100, "mode"), (329, "device")]
    {
        let mut header = HeaderBlock::new(b'0', "f", 0);
        header.put(position, b"9");
        let expected = format!("the header at byte 0 of the archive has no valid number for the {field}");
        assert_eq!(problem(&archive(&[(header, b"")])), expected);
    }
    let negative = [0xff; 12];
    let mut header = HeaderBlock::new(b'0', "f", 0);
    header.put(124, &negative);
    assert!(problem(&archive(&[(header, b"")])).ends_with("has no valid number for the size"));
    for (key, value, field) in [
        ("size", "9223372036854775808", "size"),
        ("size", "0x10", "size"),
        ("uid", "root", "owner"),
        ("gid", "-2147483649", "group"),
        ("SCHILY.devmajor", "4294967296", "device"),
        ("SCHILY.devminor", "-1", "device"),
    ] {
        let text = problem(&with_pax(&[(key, value.as_bytes())], HeaderBlock::new(b'3', "f", 0), b""));
        let expected = format!("the header at byte 1024 of the archive has no valid number for the {field}");
        assert_eq!(text, expected, "{key}={value}");
    }
    let text = problem(&with_pax(&[("size", b"-1")], HeaderBlock::new(b'0', "f", 0), b""));
    assert_eq!(text, "the header at byte 1024 of the archive has no valid number for the size");
}

#[test]
fn the_size_of_a_pax_record_counts() {
    let bytes = with_pax(&[("size", b"9223372036854775807")], HeaderBlock::new(b'0', "f", 3), b"abc");
    let mut archive = Archive::new(bytes.as_slice());
    assert_eq!(archive.next_entry().unwrap().unwrap().size, i64::MAX as u64);
    let error = archive.next_entry().unwrap_err();
    assert_eq!(
        (error.to_string().as_str(), error.kind()),
        ("the archive ends in the middle of \"f\"", io::ErrorKind::UnexpectedEof)
    );
    let mut archive = Archive::seekable(io::Cursor::new(bytes));
    archive.next_entry().unwrap();
    assert_eq!(archive.next_entry().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
}

#[test]
fn unknown_types_are_named() {
    for flag in *b"89ADEIMNXZ!\xff" {
        let text = problem(&archive(&[(HeaderBlock::new(flag, "odd\x1b", 0), b"")]));
        let expected = format!("is of the unknown type '{}' (\"odd\\u{{1b}}\")", flag.escape_ascii());
        assert!(text.ends_with(&expected), "{text}");
    }
}

#[test]
fn odd_names_are_given_as_they_are() {
    for name in ["", "/", ".", "..", "../../etc/passwd", "/etc/passwd", "a//b", "./", "a\nb"] {
        assert_eq!(one(&archive(&[(HeaderBlock::new(b'0', name, 0), b"")])).path, name.as_bytes());
    }
    for len in [255, 256, 5000] {
        let name = vec![b'n'; len];
        let entry = one(&with_pax(&[("path", &name)], HeaderBlock::new(b'0', "short", 0), b""));
        assert_eq!(entry.path, name);
    }
}

#[test]
fn attributes_may_be_large_and_of_any_kind() {
    let large = vec![0xff; 100 << 10];
    let records: [(&str, &[u8]); 3] = [
        ("SCHILY.xattr.user.large", &large),
        ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
        ("SCHILY.xattr.security.selinux", b"system_u:object_r:t:s0\0"),
    ];
    let xattrs = one(&with_pax(&records, HeaderBlock::new(b'0', "f", 0), b"")).xattrs;
    assert_eq!((xattrs.len(), xattrs[b"user.large".as_slice()].len()), (3, 100 << 10));
    assert_eq!(xattrs[b"security.selinux".as_slice()].last(), Some(&0));
}

#[test]
fn an_error_of_the_stream_is_handed_on() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::from_raw_os_error(5))
        }
    }
    let head = HeaderBlock::new(b'0', "f", 5).bytes();
    let mut archive = Archive::new(io::Cursor::new(head).chain(Broken));
    archive.next_entry().unwrap().unwrap();
    assert_eq!(archive.contents().read(&mut [0; 9]).unwrap_err().raw_os_error(), Some(5));
    assert!(
        matches!(Archive::new(Broken).next_entry(), Err(TarError::Read(error)) if error.raw_os_error() == Some(5))
    );
}
