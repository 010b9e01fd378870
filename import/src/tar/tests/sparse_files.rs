//! The four forms of sparse files, good and bad.

use super::*;

/// 1 KiB at 1 KiB and 512 bytes at 4 KiB of a file of 5,000 bytes.
const REGIONS: [(u64, u64); 2] = [(1024, 1024), (4096, 512)];
const SIZE: u64 = 5000;

fn data() -> Vec<u8> {
    (0..1536u32).map(|i| (i % 251) as u8 + 1).collect()
}

fn expected() -> Vec<u8> {
    let mut content = vec![0; SIZE as usize];
    content[1024..2048].copy_from_slice(&data()[..1024]);
    content[4096..4608].copy_from_slice(&data()[1024..]);
    content
}

fn check(bytes: &[u8]) {
    let (entry, content) = read(bytes).unwrap().remove(0);
    assert_eq!((entry.path.as_slice(), entry.size, entry.stored_size), (b"sparse".as_slice(), SIZE, 1536));
    assert!(entry.is_sparse && content == expected());
    let stored = entry.position as usize;
    assert_eq!(bytes[stored..stored + 1536], data());
    // In pieces, and not at all.
    let mut archive = Archive::new(bytes);
    archive.next_entry().unwrap().unwrap();
    let mut pieces = Vec::new();
    loop {
        let mut piece = [9; 700];
        match archive.contents().read(&mut piece).unwrap() {
            0 => break,
            len => pieces.extend_from_slice(&piece[..len]),
        }
    }
    assert!(pieces == expected());
    assert!(archive.next_entry().unwrap().is_none());
    let mut archive = Archive::seekable(io::Cursor::new(bytes));
    archive.next_entry().unwrap().unwrap();
    assert!(archive.next_entry().unwrap().is_none());
}

fn old_gnu(regions: &[(u64, u64)], size: u64, stored: &[u8]) -> Vec<u8> {
    let mut header = HeaderBlock::gnu(b'S', "sparse", stored.len() as u64);
    let field = |(offset, len): &(u64, u64)| format!("{offset:011o}\0{len:011o}\0");
    let (first, rest) = regions.split_at(regions.len().min(4));
    header.put(386, first.iter().map(field).collect::<String>().as_bytes());
    header.put(482, &[u8::from(!rest.is_empty())]).put(483, format!("{size:011o}\0").as_bytes());
    let mut bytes = header.bytes();
    let mut chunks = rest.chunks(21).peekable();
    while let Some(chunk) = chunks.next() {
        let mut block = [0; 512];
        let text: String = chunk.iter().map(field).collect();
        block[..text.len()].copy_from_slice(text.as_bytes());
        block[504] = u8::from(chunks.peek().is_some());
        bytes.extend(block);
    }
    bytes.extend(padded(stored));
    bytes.extend([0; 1024]);
    bytes
}

fn in_content(map: &str, size: &str, stored: &[u8]) -> Vec<u8> {
    let content = [padded(map.as_bytes()), stored.to_vec()].concat();
    let header = HeaderBlock::new(b'0', "GNUSparseFile.0/sparse", content.len() as u64);
    let records: [(&str, &[u8]); 4] = [
        ("GNU.sparse.major", b"1"),
        ("GNU.sparse.minor", b"0"),
        ("GNU.sparse.name", b"sparse"),
        ("GNU.sparse.realsize", size.as_bytes()),
    ];
    with_pax(&records, header, &content)
}

fn in_records(count: &str, map: &str, size: &str, stored: &[u8]) -> Vec<u8> {
    let header = HeaderBlock::new(b'0', "GNUSparseFile.0/sparse", stored.len() as u64);
    let records: [(&str, &[u8]); 4] = [
        ("GNU.sparse.size", size.as_bytes()),
        ("GNU.sparse.numblocks", count.as_bytes()),
        ("GNU.sparse.name", b"sparse"),
        ("GNU.sparse.map", map.as_bytes()),
    ];
    with_pax(&records, header, stored)
}

#[test]
fn all_forms_give_the_file() {
    check(&old_gnu(&REGIONS, SIZE, &data()));
    check(&in_content("2\n1024\n1024\n4096\n512\n", "5000", &data()));
    check(&in_records("2", "1024,1024,4096,512", "5000", &data()));
    let records: [(&str, &[u8]); 6] = [
        ("GNU.sparse.size", b"5000"),
        ("GNU.sparse.numblocks", b"2"),
        ("GNU.sparse.offset", b"1024"),
        ("GNU.sparse.numbytes", b"1024"),
        ("GNU.sparse.offset", b"4096"),
        ("GNU.sparse.numbytes", b"512"),
    ];
    check(&with_pax(&records, HeaderBlock::new(b'0', "sparse", 1536), &data()));
}

#[test]
fn long_maps() {
    let regions: Vec<(u64, u64)> = (0..1000).map(|i| (i * 1024, 1)).collect();
    let stored = vec![b'x'; 1000];
    let map: String = regions.iter().map(|(offset, len)| format!("{offset}\n{len}\n")).collect();
    let list: Vec<String> = regions.iter().map(|(offset, len)| format!("{offset},{len}")).collect();
    for bytes in [
        old_gnu(&regions, 1_024_000, &stored),
        in_content(&format!("1000\n{map}"), "1024000", &stored),
        in_records("1000", &list.join(","), "1024000", &stored),
    ] {
        let (entry, content) = read(&bytes).unwrap().remove(0);
        assert_eq!((entry.size, content.len()), (1_024_000, 1_024_000));
        assert!(content.iter().enumerate().all(|(at, byte)| *byte == if at % 1024 == 0 { b'x' } else { 0 }));
    }
}

#[test]
fn only_holes_up_to_8_eib() {
    for bytes in [
        in_content("0\n", "9223372036854775807", b""),
        in_records("1", "9223372036854775807,0", "9223372036854775807", b""),
    ] {
        let mut archive = Archive::new(bytes.as_slice());
        let entry = archive.next_entry().unwrap().unwrap();
        assert_eq!((entry.size, entry.stored_size), (i64::MAX as u64, 0));
        let mut piece = vec![1; 1 << 20];
        archive.contents().read_exact(&mut piece).unwrap();
        assert!(piece.iter().all(|byte| *byte == 0));
        assert!(archive.next_entry().unwrap().is_none(), "holes are skipped at once");
    }
}

#[test]
fn unknown_versions_are_files() {
    let records: [(&str, &[u8]); 3] =
        [("GNU.sparse.major", b"2"), ("GNU.sparse.minor", b"0"), ("GNU.sparse.name", b"x")];
    let entry = one(&with_pax(&records, HeaderBlock::new(b'0', "f", 3), b"abc"));
    assert_eq!((entry.path.as_slice(), entry.size, entry.is_sparse), (b"f".as_slice(), 3, false));
}

#[test]
fn bad_maps_are_refused() {
    let beyond = "has a map of a sparse file with regions that overlap, or are beyond its end";
    let number = "has a map of a sparse file without a valid number";
    let length = "has a map of a sparse file of another length than it says";
    for (count, map, size, expected) in [
        ("2", "0,10,5,10", "100", beyond),
        ("1", "0,101", "100", beyond),
        ("1", "9223372036854775807,9223372036854775807", "9223372036854775807", beyond),
        ("1", "-1,10", "100", number),
        ("1", "1,-10", "100", number),
        ("1", "1,99999999999999999999", "100", number),
        ("x", "0,10", "100", number),
        ("", "0,10", "100", number),
        ("2", "0,10", "100", length),
        ("-1", "0,10", "100", length),
        ("1", "0,10,20", "100", length),
        ("1", "0,10", "-100", "has no valid number for the size"),
        ("1", "0,10", "x", "has no valid number for the size"),
    ] {
        let text = problem(&in_records(count, map, size, &[1; 10]));
        assert!(text.ends_with(expected), "{count} {map} {size}: {text}");
    }
    let no_end = "the sparse file \"GNUSparseFile.0/sparse\" has a map without an end";
    for (map, expected) in [
        ("1\n0\n", no_end),
        ("1", no_end),
        ("", no_end),
        ("x\n", number),
        ("-1\n", number),
        ("1\n0\nx\n", number),
        ("1\n0\n101\n", beyond),
        ("262145\n", "has a map of a sparse file with too many regions"),
        ("9223372036854775807\n", "has a map of a sparse file with too many regions"),
    ] {
        let text = problem(&in_content(map, "100", b""));
        assert!(text.ends_with(expected), "{map:?}: {text}");
    }
    let digits = "1".repeat(2 << 20);
    assert!(problem(&in_content(&digits, "1", b"")).ends_with("with too many regions"));
    let regions: Vec<(u64, u64)> = (0..(256 << 10) + 1).map(|i| (i, 0)).collect();
    assert!(problem(&old_gnu(&regions, 1 << 20, b"")).ends_with("with too many regions"));
    let overlap = problem(&old_gnu(&[(10, 10), (0, 5)], 100, b""));
    assert!(overlap.ends_with(beyond), "{overlap}");
}

#[test]
fn data_that_does_not_fit_its_map() {
    let more = problem(&in_records("1", "0,10", "100", &[1; 11]));
    assert_eq!(more, "the sparse file \"sparse\" has more data than its map");
    let less = problem(&in_records("1", "0,10", "100", &[1; 9]));
    assert_eq!(less, "the sparse file \"sparse\" has less data than its map");
    let records: [(&str, &[u8]); 2] = [("GNU.sparse.map", b"0,10"), ("GNU.sparse.numblocks", b"1")];
    let text = problem(&with_pax(&records, HeaderBlock::new(b'2', "link", 0), b""));
    assert!(text.ends_with("has a map of a sparse file although it is not a file"), "{text}");
    let records: [(&str, &[u8]); 2] = [("GNU.sparse.offset", b"0"), ("GNU.sparse.offset", b"0")];
    let text = problem(&with_pax(&records, HeaderBlock::new(b'0', "f", 0), b""));
    assert!(text.ends_with("has a map of a sparse file with an offset or a length too many"), "{text}");
    let text = problem(&archive(&[(HeaderBlock::new(b'S', "f", 0), b"")]));
    assert!(text.ends_with("is of the unknown type 'S' (\"f\")"), "{text}");
}
