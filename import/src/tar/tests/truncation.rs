//! Ends of archives: right, missing, and in the middle.

use super::*;

fn sample() -> Vec<u8> {
    let (extended, text) = pax(&[("path", b"by-pax"), ("SCHILY.xattr.user.a", b"b")]);
    let long = [&[b'n'; 600][..], b"\0"].concat();
    archive(&[
        (HeaderBlock::new(b'5', "d/", 0), b""),
        (extended, &text),
        (HeaderBlock::new(b'0', "f", 700), &[7; 700]),
        (HeaderBlock::gnu(b'L', "L", 601), &long),
        (HeaderBlock::gnu(b'0', "g", 10), &[8; 10]),
    ])
}

#[test]
fn cut_at_every_byte() {
    let bytes = sample();
    // Where an archive may end: between entries, in the padding behind a content, and at its end.
    let fine = |len: usize| matches!(len, 0 | 512 | 2748..=3072 | 5130..=5632 | 6144 | 6656);
    assert_eq!(bytes.len(), 512 + 512 + 512 + 512 + 1024 + 512 + 1024 + 512 + 512 + 1024);
    for len in 0..=bytes.len() {
        for seek in [false, true] {
            let result = if seek { headers(&bytes[..len]) } else { read(&bytes[..len]).map(drop) };
            match result {
                Ok(()) => assert!(fine(len), "{len} {seek}"),
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{len} {seek}: {error}");
                    assert!(!fine(len), "{len} {seek}: {error}");
                }
            }
        }
    }
}

/// Reads only headers, by seeking.
fn headers(bytes: &[u8]) -> Result<()> {
    let mut archive = Archive::seekable(io::Cursor::new(bytes));
    while archive.next_entry()?.is_some() {}
    Ok(())
}

#[test]
fn messages_say_where_it_ends() {
    let bytes = sample();
    for (len, expected) in [
        (100, "the archive ends in the middle of the header at byte 0"),
        (1100, "the archive ends in the middle of the header at byte 1024"),
        (2100, "the archive ends in the middle of \"by-pax\""),
        (4000, "the archive ends in the middle of the header at byte 3584"),
    ] {
        assert_eq!(problem(&bytes[..len]), expected, "{len}");
    }
}

#[test]
fn what_stands_behind_the_end_is_drained() {
    let mut bytes = sample();
    let end = bytes.len() as u64;
    bytes.extend(vec![9; 100_000]);
    let mut archive = Archive::new(bytes.as_slice());
    while archive.next_entry().unwrap().is_some() {}
    assert!(archive.next_entry().unwrap().is_none());
    assert_eq!((archive.position(), archive.drain().unwrap(), archive.drain().unwrap()), (end, 100_000, 0));
    assert_eq!(archive.contents().read(&mut [0; 10]).unwrap(), 0);
}

#[test]
fn a_header_behind_a_single_block_of_zeros_is_refused() {
    let bytes = [vec![0; 512], sample()].concat();
    let expected =
        "the header at byte 512 of the archive stands behind a block of zeros, which ends an archive";
    assert_eq!(problem(&bytes), expected);
    assert!(read(&[0; 512]).unwrap().is_empty());
    assert!(read(&[]).unwrap().is_empty());
}

#[test]
fn contents_can_be_read_later_from_their_position() {
    let bytes = sample();
    let mut archive = Archive::seekable(io::Cursor::new(bytes.as_slice()));
    let mut found = 0;
    while let Some(entry) = archive.next_entry().unwrap() {
        if entry.kind == EntryKind::File {
            let content = &bytes[entry.position as usize..][..entry.size as usize];
            assert!(content.iter().all(|byte| *byte == content[0]), "{entry:?}");
            found += content.len();
        }
    }
    assert_eq!(found, 710);
}

#[test]
fn skipping_by_seeking_reads_little() {
    struct Counting(io::Cursor<Vec<u8>>, u64);
    impl Read for Counting {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let len = self.0.read(buffer)?;
            self.1 += len as u64;
            Ok(len)
        }
    }
    impl Seek for Counting {
        fn seek(&mut self, to: io::SeekFrom) -> io::Result<u64> {
            self.0.seek(to)
        }
    }
    let large = vec![1; 10 << 20];
    let members =
        [(HeaderBlock::new(b'0', "a", 10 << 20), large.as_slice()), (HeaderBlock::new(b'0', "b", 1), b"b")];
    let mut archive = Archive::seekable(Counting(io::Cursor::new(archive(&members)), 0));
    assert_eq!(archive.next_entry().unwrap().unwrap().position, 512);
    assert_eq!(archive.next_entry().unwrap().unwrap().path, b"b");
    let mut content = String::new();
    archive.contents().read_to_string(&mut content).unwrap();
    assert_eq!(content, "b");
    assert!(archive.into_inner().1 < 4096);
}
