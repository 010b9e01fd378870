//! What a file that is no image looks like, so that the message can say it. Runs as the user on the host.

use std::fmt::Write;

/// How many bytes of a file tell what it is; the magic of btrfs is the farthest.
pub const HEAD: usize = 65_536 + 72;

/// Bytes below which no squashfs can be: its superblock has that many.
const SHORTEST: u64 = 96;

const COMPRESSED: &str =
    "if it is an archive of an image or of a root file system: mizzen import -o image.sqsh FILE";
const TAR: &str = "make an image of it: mizzen import -o image.sqsh FILE";
const DISK: &str = "mount it elsewhere and run: mksquashfs MOUNTPOINT image.sqsh";
const PAGE: &str = "the download probably saved an error page";
const OLD: &str = "make it again with a newer mksquashfs";
const DEFINITION: &str = "this is the recipe of an image: build the image first";

/// Where, which bytes, what it is called, and what to do. The first row that fits wins.
const TABLE: &[(usize, &[u8], &str, Option<&str>)] = &[
    (0, b"sqsh", "squashfs in big-endian order", Some(OLD)),
    (0, b"qshs", "squashfs in a vendor's variant", Some(OLD)),
    (0, b"shsq", "squashfs in a vendor's variant", Some(OLD)),
    (0, b"hsqt", "squashfs in a vendor's variant", Some(OLD)),
    (
        8,
        b"AI\x02",
        "AppImage",
        Some("run it with --appimage-extract, then: mksquashfs squashfs-root image.sqsh"),
    ),
    (8, b"AI\x01", "AppImage", None),
    (0, b"\x7fELF", "ELF program or library", None),
    (0, b"\x1f\x8b", "gzip", Some(COMPRESSED)),
    (0, b"\xfd7zXZ\0", "xz", Some(COMPRESSED)),
    (0, b"\x28\xb5\x2f\xfd", "zstd", Some(COMPRESSED)),
    (0, b"BZh", "bzip2", Some(COMPRESSED)),
    (0, b"\x04\x22\x4d\x18", "lz4", Some(COMPRESSED)),
    (0, b"PK\x03\x04", "zip", None),
    (0, b"7z\xbc\xaf\x27\x1c", "7-Zip", None),
    (0, b"Rar!", "RAR", None),
    (257, b"ustar", "tar", Some(TAR)),
    (0, b"070701", "cpio", None),
    (0, b"!<arch>", "Debian package or static library", None),
    (0, b"\xed\xab\xee\xdb", "RPM package", None),
    (0x8001, b"CD001", "ISO 9660", Some(DISK)),
    (0x438, b"\x53\xef", "ext4", Some(DISK)),
    (1024, b"\xe2\xe1\xf5\xe0", "erofs", Some(DISK)),
    (0, b"XFSB", "xfs", Some(DISK)),
    (0x10040, b"_BHRfS_M", "btrfs", Some(DISK)),
    (0, b"\x45\x3d\xcd\x28", "cramfs", Some(DISK)),
    (0, b"LUKS\xba\xbe", "LUKS-encrypted disk", None),
    (512, b"EFI PART", "disk with partitions", None),
    (0, b"QFI\xfb", "qcow2", None),
    (0, b"KDMV", "VMDK", None),
    (0, b"\x89PNG", "PNG", None),
    (0, b"\xff\xd8\xff", "JPEG", None),
    (0, b"GIF8", "GIF", None),
    (0, b"%PDF", "PDF", None),
    (0, b"\x89HDF", "HDF5", None),
    (0, b"SQLite format 3", "SQLite", None),
    (
        0,
        b"#!/usr/bin/env run-singularity",
        "image of Singularity 2",
        Some("convert it: apptainer build NEW.sif FILE"),
    ),
    (0, b"#!", "script", None),
    (0, b"version https://git-lfs", "git-lfs pointer", Some("fetch the file itself: git lfs pull")),
    (0, b"FROM ", "Dockerfile", Some(DEFINITION)),
    (0, b"Bootstrap:", "Singularity definition", Some(DEFINITION)),
    (0, b"bootstrap:", "Singularity definition", Some(DEFINITION)),
    (510, b"\x55\xaa", "disk with partitions", None),
];

/// What goes into the brackets of "not an image (…)", and what to do.
pub fn describe(head: &[u8], size: u64) -> (String, Option<&'static str>) {
    if size == 0 {
        return ("empty file".to_owned(), Some("the copy or download probably failed"));
    }
    let mut text = String::new();
    if size < SHORTEST {
        // Writing to a String cannot fail.
        let _ = write!(text, "{size} byte{}, too short; ", if size == 1 { "" } else { "s" });
    }
    text.push_str("starts with ");
    text.push_str(&start(head));
    let (name, hint) = look(head);
    if let Some(name) = name {
        let _ = write!(text, ", looks like {name}");
    }
    (text, hint)
}

/// The first four bytes, as text where they are text.
fn start(head: &[u8]) -> String {
    let first = &head[..head.len().min(4)];
    if first.iter().all(|byte| byte.is_ascii_graphic() || *byte == b' ') {
        return format!("\"{}\"", String::from_utf8_lossy(first));
    }
    first.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ")
}

fn look(head: &[u8]) -> (Option<&'static str>, Option<&'static str>) {
    if head.starts_with(b"hsqs") {
        return (Some("the beginning of a squashfs"), Some("the copy or download is probably not complete"));
    }
    if head.iter().all(|byte| *byte == 0) {
        return (Some("zeros only"), Some("the copy was probably interrupted, or the disk was full"));
    }
    let fits = |row: &&(usize, &[u8], &str, Option<&str>)| {
        head.get(row.0..).is_some_and(|rest| rest.starts_with(row.1))
    };
    match TABLE.iter().find(fits) {
        Some((_, _, "tar", _)) if is_container_archive(head) => {
            (Some("an archive of docker save or an OCI archive"), Some(TAR))
        }
        Some((_, _, name, hint)) => (Some(name), *hint),
        None => look_of_text(head),
    }
}

/// The name of the first file in a tar tells a container's archive from a root file system.
fn is_container_archive(head: &[u8]) -> bool {
    let name = head.split(|byte| *byte == 0).next().unwrap_or_default();
    let known = [&b"oci-layout"[..], b"blobs/", b"manifest.json", b"index.json", b"repositories"];
    let hexadecimal = name.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    known.iter().any(|start| name.starts_with(start)) || hexadecimal == 64
}

fn look_of_text(head: &[u8]) -> (Option<&'static str>, Option<&'static str>) {
    let control = |byte: &u8| byte.is_ascii_control() && !b"\n\r\t\x0c".contains(byte);
    let text = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head);
    // The head may end within a character.
    let valid = std::str::from_utf8(text).map_or_else(|error| error.valid_up_to(), str::len);
    if text.len() - valid > 3 || text.iter().any(control) {
        return (None, None);
    }
    let start: Vec<u8> = text.trim_ascii_start().iter().take(9).map(u8::to_ascii_lowercase).collect();
    match &start[..] {
        [b'<', b'!', b'd', b'o', ..] | [b'<', b'h', b't', b'm', ..] | [b'<', b'h', b'e', b'a', ..] => {
            (Some("HTML"), Some(PAGE))
        }
        [b'<', ..] => (Some("XML"), Some(PAGE)),
        [b'{' | b'[', ..] => (Some("JSON"), None),
        _ => (Some("text"), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn say(content: &[u8]) -> String {
        let mut content = content.to_vec();
        content.resize(content.len().max(200), b'\0');
        describe(&content, 1 << 20).0
    }

    fn at(offset: usize, magic: &[u8]) -> String {
        let mut head = vec![0; HEAD];
        head[0] = 1;
        head[offset..offset + magic.len()].copy_from_slice(magic);
        describe(&head, 1 << 20).0
    }

    #[test]
    fn the_common_mistakes_are_named() {
        let page = describe(b"<!DOCTYPE html><title>404</title>", 1 << 20);
        assert_eq!(page, ("starts with \"<!DO\", looks like HTML".to_owned(), Some(PAGE)));
        assert_eq!(describe(b"\n <html>", 400).0, "starts with 0a 20 3c 68, looks like HTML");
        assert_eq!(say(b"\x1f\x8b\x08\0"), "starts with 1f 8b 08 00, looks like gzip");
        assert_eq!(
            say(b"\x7fELF\x02\x01\x01\0\0"),
            "starts with 7f 45 4c 46, looks like ELF program or library"
        );
        assert_eq!(say(b"\x7fELF\x02\x01\x01\0AI\x02"), "starts with 7f 45 4c 46, looks like AppImage");
        assert_eq!(say(b"sqsh"), "starts with \"sqsh\", looks like squashfs in big-endian order");
        assert_eq!(say(b"\x89PNG"), "starts with 89 50 4e 47, looks like PNG");
        assert_eq!(say(b"PK\x03\x04"), "starts with 50 4b 03 04, looks like zip");
        assert_eq!(say(b"XFSB"), "starts with \"XFSB\", looks like xfs");
        assert_eq!(say(b"\x99\x98\x97"), "starts with 99 98 97 00");
    }

    #[test]
    fn file_systems_and_archives_have_their_magic_deep_inside() {
        assert_eq!(at(0x438, b"\x53\xef"), "starts with 01 00 00 00, looks like ext4");
        assert_eq!(at(1024, b"\xe2\xe1\xf5\xe0"), "starts with 01 00 00 00, looks like erofs");
        assert_eq!(at(0x8001, b"CD001"), "starts with 01 00 00 00, looks like ISO 9660");
        assert_eq!(at(0x10040, b"_BHRfS_M"), "starts with 01 00 00 00, looks like btrfs");
        assert_eq!(at(257, b"ustar"), "starts with 01 00 00 00, looks like tar");
        for name in ["manifest.json", "blobs/sha256/", &"ab".repeat(32)] {
            let mut head = vec![0; 512];
            head[..name.len()].copy_from_slice(name.as_bytes());
            head[257..262].copy_from_slice(b"ustar");
            let (text, hint) = describe(&head, 1 << 20);
            assert!(text.ends_with("looks like an archive of docker save or an OCI archive"), "{text}");
            assert_eq!(hint, Some(TAR));
        }
    }

    #[test]
    fn texts() {
        let name = |content: &str| describe(content.as_bytes(), 1000).0;
        assert!(name("#!/bin/sh\n").ends_with("looks like script"));
        assert!(name("{\"a\": 1}").ends_with("looks like JSON"));
        assert!(name("Zeichen: äöü").ends_with("looks like text"));
        assert!(name("<?xml version=\"1.0\"?><Error>").ends_with("looks like XML"));
        assert!(name("version https://git-lfs.github.com/spec/v1\n").ends_with("looks like git-lfs pointer"));
        assert!(name("FROM debian\n").ends_with("looks like Dockerfile"));
        assert!(name("#!/usr/bin/env run-singularity\n").ends_with("image of Singularity 2"));
    }

    #[test]
    fn short_files_say_so() {
        assert_eq!(describe(b"", 0).0, "empty file");
        assert_eq!(describe(b"x", 1).0, "1 byte, too short; starts with \"x\", looks like text");
        let cut = describe(b"hsqs\x01\x02", 95).0;
        assert_eq!(cut, "95 bytes, too short; starts with \"hsqs\", looks like the beginning of a squashfs");
        assert!(describe(&[0; 500], 500).0.ends_with("looks like zeros only"));
    }
}
