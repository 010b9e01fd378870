//! SIF files made byte by byte, one for every way to be wrong.

use super::super::testing::Random;
use super::*;

impl Source for Vec<u8> {
    fn fill(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).map_err(|_| io::ErrorKind::UnexpectedEof)?;
        let end = start.checked_add(buffer.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(self.get(start..end).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// A descriptor before it is written.
#[derive(Clone)]
pub struct Item {
    pub kind: i32,
    pub used: u8,
    pub offset: i64,
    pub length: i64,
    pub file_system: i32,
    pub purpose: i32,
}

/// A primary system partition with squashfs.
pub const ROOT: Item =
    Item { kind: PARTITION, used: 1, offset: 8192, length: 4096, file_system: 1, purpose: 2 };

/// A SIF with these descriptors, room for four, and data up to byte 12288 + 64.
pub fn sif(items: &[Item]) -> Vec<u8> {
    let mut bytes = b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\x0001\x0004\0".to_vec();
    bytes.extend([7; 16]);
    for number in [1_600_000_000_i64, 1_600_000_000, 4 - items.len() as i64, 4, 4096, 585 * 4, 8192, 4096] {
        bytes.extend(number.to_le_bytes());
    }
    assert_eq!(bytes.len(), HEADER);
    bytes.resize(4096, 0);
    for (number, item) in items.iter().enumerate() {
        let start = bytes.len();
        bytes.extend(item.kind.to_le_bytes());
        bytes.push(item.used);
        for id in [number as u32 + 1, 0xf000_0001, 0] {
            bytes.extend(id.to_le_bytes());
        }
        for value in [item.offset, item.length, item.length, 0, 0, 1000, 1000] {
            bytes.extend(value.to_le_bytes());
        }
        bytes.extend([b'n'; 128]);
        bytes.extend(item.file_system.to_le_bytes());
        bytes.extend(item.purpose.to_le_bytes());
        bytes.extend(b"02\0");
        bytes.resize(start + DESCRIPTOR, 0);
    }
    bytes.resize(8192, 0);
    bytes.extend(b"hsqs");
    bytes.resize(12288 + 64, 0);
    bytes
}

fn set(bytes: &mut [u8], at: usize, value: i64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// Where the header has them.
const COUNT_AT: usize = 88;
const TABLE_AT: usize = 96;

fn message(bytes: Vec<u8>) -> String {
    let size = bytes.len() as u64;
    find(&bytes, size).unwrap_err().message
}

#[test]
fn the_system_partition_is_found_among_others() {
    let definition = Item { kind: 0x4001, offset: 7000, length: 100, ..ROOT };
    let unused = Item { used: 0, ..ROOT };
    let signature = Item { kind: 0x4005, offset: 12288, length: 64, ..ROOT };
    let bytes = sif(&[definition, unused, ROOT, signature]);
    let expected = Partition { offset: 8192, length: 4096, architecture: Some(Architecture::X86_64) };
    assert_eq!(find(&bytes, bytes.len() as u64).unwrap(), expected);
}

#[test]
fn the_header_names_the_machine_when_the_partition_does_not() {
    let mut bytes = sif(&[ROOT]);
    bytes[4096 + 201 + 8..4096 + 201 + 11].copy_from_slice(b"00\0");
    let found = find(&bytes, bytes.len() as u64).unwrap();
    assert_eq!(found.architecture, Some(Architecture::Aarch64));
}

#[test]
fn headers_that_lie() {
    let good = sif(&[ROOT]);
    for cut in [42, 100, 127] {
        let expected = format!("SIF header is cut off after {cut} bytes");
        assert_eq!(message(good[..cut].to_vec()), expected);
    }
    assert_eq!(
        message(good[..4100].to_vec()),
        "SIF is cut off: its descriptors end at byte 6436, the file at 4100"
    );
    let mut version = good.clone();
    version[42..45].copy_from_slice(b"9\x1b\0");
    assert_eq!(message(version), "SIF version \"9\\u{1b}\" is not known, only 01");
    for count in [0, -1, 4097, 1 << 32, i64::MAX, i64::MIN] {
        let mut bytes = good.clone();
        set(&mut bytes, COUNT_AT, count);
        assert_eq!(
            message(bytes),
            format!("SIF is damaged: it claims {count} descriptors, 1 to 4096 make sense")
        );
    }
    for table in [-1, 0, 127, i64::MIN] {
        let mut bytes = good.clone();
        set(&mut bytes, TABLE_AT, table);
        assert_eq!(message(bytes), format!("SIF is damaged: its descriptors start at byte {table}"));
    }
    let mut far = good.clone();
    set(&mut far, TABLE_AT, i64::MAX);
    assert!(message(far).starts_with("SIF is cut off: its descriptors end at byte 9223372036854778147"));
}

#[test]
fn partitions_that_are_not_what_we_need() {
    assert_eq!(message(sif(&[])), "SIF without a squashfs system partition");
    let data = Item { purpose: 3, ..ROOT };
    assert_eq!(message(sif(&[data])), "SIF without a squashfs system partition");
    let second = Item { offset: 12288, length: 64, ..ROOT };
    assert_eq!(message(sif(&[ROOT, second])), "SIF with two primary system partitions (objects 1 and 2)");
    for (number, name) in [
        (2, "ext3"),
        (3, "an archive"),
        (4, "raw data"),
        (77, "of unknown type 77"),
        (-1, "of unknown type -1"),
    ] {
        let item = Item { file_system: number, ..ROOT };
        assert_eq!(message(sif(&[item])), format!("SIF whose system partition is {name}, not squashfs"));
    }
    let encrypted = sif(&[Item { file_system: 5, ..ROOT }]);
    let failure = find(&encrypted, encrypted.len() as u64).unwrap_err();
    assert_eq!(failure.message, "SIF with an encrypted system partition");
    assert!(failure.hint.unwrap().contains("--encrypt"));
}

#[test]
fn hints_where_we_know_the_way_out() {
    let hint = |items: &[Item]| find(&sif(items), 12352).unwrap_err().hint.unwrap_or_default();
    let plain = Item { purpose: SYSTEM, ..ROOT };
    assert!(hint(&[plain]).ends_with("siftool setprim 1 FILE"));
    let index = Item { kind: OCI_ROOT_INDEX, purpose: 0, ..ROOT };
    assert!(hint(&[index]).contains("OCI-SIF"));
}

#[test]
fn partitions_outside_the_file_or_on_top_of_things() {
    let at = |offset, length| message(sif(&[Item { offset, length, ..ROOT }]));
    assert_eq!(at(8192, 5000), "SIF is cut off: its system partition ends at byte 13192, the file at 12352");
    assert!(at(i64::MAX, 1).starts_with("SIF is cut off"));
    assert!(at(i64::MAX, i64::MAX).starts_with("SIF is cut off"));
    for (offset, length) in [(-1, 4096), (8192, -1), (8192, 0), (i64::MIN, i64::MIN)] {
        let expected =
            format!("SIF is damaged: its system partition has offset {offset} and length {length}");
        assert_eq!(at(offset, length), expected);
    }
    for offset in [0, 127, 4096, 6435] {
        let expected = format!("SIF is damaged: its system partition at byte {offset} overlaps the header");
        assert_eq!(at(offset, 4096), expected);
    }
    let other = Item { kind: 0x4006, offset: 12287, length: 10, ..ROOT };
    assert_eq!(message(sif(&[ROOT, other])), "SIF is damaged: its system partition overlaps object 2");
}

#[test]
fn a_file_that_shrinks_while_we_read() {
    let bytes = sif(&[ROOT])[..5000].to_vec();
    assert_eq!(
        find(&bytes, 12352).unwrap_err().message,
        "cannot read the SIF descriptors: unexpected end of file"
    );
}

#[test]
fn mutations_never_panic_and_never_leave_the_file() {
    let mut random = Random::new(0x51f);
    let second = Item { kind: 0x4005, offset: 12288, length: 64, ..ROOT };
    let good = sif(&[ROOT, second]);
    let (mut found, mut refused) = (0, 0);
    for _ in 0..6000 {
        let mut bytes = good.clone();
        // Most of the file is padding: aim at the header and the two descriptors.
        for _ in 0..=random.next(4) {
            let base = [32, 4096, 4096 + DESCRIPTOR][random.next(3)];
            let at = base + random.next(220);
            match random.next(3) {
                0 => bytes[at] = random.next(256) as u8,
                1 => set(&mut bytes, at, [0, -1, 1, i64::MAX, i64::MIN, 12352, 1 << 32][random.next(7)]),
                _ => random.mutate(&mut bytes, &[b"SIF_MAGIC\0", b"01\0"]),
            }
            bytes.resize(bytes.len().max(6000), 0);
        }
        let size = bytes.len() as u64;
        match find(&bytes, size) {
            Ok(partition) => {
                assert!(partition.offset >= 128 && partition.length > 0);
                assert!(partition.offset.checked_add(partition.length).unwrap() <= size);
                found += 1;
            }
            Err(failure) => {
                assert!(!failure.message.contains('\n'));
                refused += 1;
            }
        }
    }
    assert!(found > 100 && refused > 100, "the mutations reach both ends: {found}, {refused}");
}
