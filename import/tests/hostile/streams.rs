//! What the bytes of a layer are: compressed strangely, far too many, or not all there.

use super::*;

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
