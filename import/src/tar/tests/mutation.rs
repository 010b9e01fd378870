//! Archives changed by chance: any answer is right but a panic, an endless loop or much memory.

use super::*;
use crate::fuzz;

struct XorShift(u64);

impl XorShift {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let (extended, text) =
        pax(&[("path", b"p"), ("size", b"5"), ("mtime", b"-1.5"), ("SCHILY.xattr.user.a", b"b")]);
    let name = [b'n'; 700];
    let (sparse, map) =
        pax(&[("GNU.sparse.major", b"1"), ("GNU.sparse.minor", b"0"), ("GNU.sparse.realsize", b"9000")]);
    let content = [padded(b"2\n10\n5\n8000\n5\n"), b"helloworld".to_vec()].concat();
    let (records, list) =
        pax(&[("GNU.sparse.numblocks", b"1"), ("GNU.sparse.map", b"10,5"), ("GNU.sparse.size", b"20")]);
    let mut old = HeaderBlock::gnu(b'S', "s", 5);
    old.put(386, b"00000000010\x0000000000005\0").put(482, b"\x01").put(483, b"00000010000\0");
    let mut block = [0; 512];
    block[..24].copy_from_slice(b"00000002000\x0000000000000\0");
    vec![
        archive(&[
            (extended, &text),
            (HeaderBlock::new(b'0', "f", 9), b"hello"),
            (HeaderBlock::new(b'5', "d/", 0), b""),
        ]),
        archive(&[
            (HeaderBlock::gnu(b'L', "L", 700), &name),
            (HeaderBlock::gnu(b'K', "K", 700), &name),
            (HeaderBlock::gnu(b'1', "l", 0), b""),
        ]),
        archive(&[(sparse, &map), (HeaderBlock::new(b'0', "f", content.len() as u64), &content)]),
        archive(&[(records, &list), (HeaderBlock::new(b'0', "f", 5), b"hello")]),
        archive(&[(old, &[&block[..], b"hello"].concat())]),
    ]
}

#[test]
fn thousands_of_mutations() {
    let mut random = XorShift(0x9e37_79b9_7f4a_7c15);
    let seeds = seeds();
    for seed in &seeds {
        assert!(fuzz::tar(seed));
    }
    let mut good = 0;
    for round in 0..20_000 {
        let mut bytes = seeds[round % seeds.len()].clone();
        for _ in 0..=random.below(6) {
            let at = random.below(bytes.len());
            match random.below(8) {
                0 => bytes[at] = random.next() as u8,
                1 => bytes[at] ^= 1 << random.below(8),
                2 => bytes[at] = b"0179-, =\n\0"[random.below(10)],
                // The fields that mean most.
                3 => bytes[at / 512 * 512 + 156] = b"01235SLKxgV"[random.below(11)],
                4 => bytes[at / 512 * 512 + 124 + random.below(12)] = random.next() as u8,
                5 => bytes.truncate((at / 512 * 512).max(512)),
                6 => {
                    let from = random.below(bytes.len()) / 512 * 512;
                    let part = bytes[from..(from + 512).min(bytes.len())].to_vec();
                    bytes.splice(at / 512 * 512..at / 512 * 512, part);
                }
                _ => bytes.extend_from_within(at / 512 * 512..),
            }
        }
        if random.below(4) == 0 {
            bytes.truncate(random.below(bytes.len()));
        }
        good += u32::from(fuzz::tar(&bytes));
        let mut archive = Archive::seekable(io::Cursor::new(&bytes));
        while let Ok(Some(entry)) = archive.next_entry() {
            assert!(entry.path.len() as u64 <= MAX_EXTENDED_LEN && entry.stored_size <= i64::MAX as u64);
        }
    }
    assert!(good > 1000, "most mutations should not be found by the checksum alone: {good}");
}
