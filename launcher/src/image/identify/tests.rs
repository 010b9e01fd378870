//! Every kind of file that users hand in by mistake.

use super::super::sif::tests::{ROOT, sif};
use super::super::testing::Scratch;
use super::*;

fn message(path: &Path) -> String {
    let message = identify(path).unwrap_err().message;
    let rest = message.strip_prefix(&shown(path)).unwrap_or(&message);
    rest.strip_prefix(": ").unwrap_or(rest).to_owned()
}

fn hint(path: &Path) -> String {
    identify(path).unwrap_err().hint.unwrap_or_default()
}

#[test]
fn images_are_known_by_content() {
    let place = Scratch::new();
    let mut squashfs = b"hsqs".to_vec();
    squashfs.resize(96, 0);
    let opened = identify(&place.file("image.txt", &squashfs)).unwrap();
    assert_eq!((opened.kind, opened.size, opened.architecture), (ImageKind::Squashfs, 96, None));
    let opened = identify(&place.file("image.sqsh", sif(&[ROOT]))).unwrap();
    assert_eq!(opened.kind, ImageKind::Sif { offset: 8192, length: 4096 });
    assert_eq!(opened.architecture, Some(Architecture::X86_64));
    let path = place.file("old.sif", sif(&[]));
    assert_eq!(message(&path), "SIF without a squashfs system partition");
    assert_eq!(identify(Path::new("/")).unwrap().kind, ImageKind::Directory);
}

#[test]
fn other_files_say_what_they_are() {
    let place = Scratch::new();
    let page = place.file("py.sqsh", "<!DOCTYPE html><html>".repeat(10));
    let failure = identify(&page).unwrap_err();
    let expected = format!("{}: not an image (starts with \"<!DO\", looks like HTML)", page.display());
    assert_eq!(failure.message, expected);
    assert_eq!(failure.hint.unwrap(), "the download probably saved an error page");
    assert_eq!(message(&place.file("empty", "")), "not an image (empty file)");
    assert_eq!(
        message(&place.file("cut", &b"hsqs"[..])),
        "not an image (4 bytes, too short; starts with \"hsqs\", looks like the beginning of a squashfs)"
    );
    let mut disk = vec![0; 70_000];
    disk[0x438..0x43a].copy_from_slice(b"\x53\xef");
    let disk = place.file("disk.img", disk);
    assert_eq!(message(&disk), "not an image (starts with 00 00 00 00, looks like ext4)");
    assert!(hint(&disk).contains("mksquashfs"));
}

#[test]
fn special_files_are_refused_without_waiting() {
    let place = Scratch::new();
    let fifo = place.path().join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RWXU).unwrap();
    assert_eq!(message(&fifo), "not an image (is a FIFO)");
    let socket = place.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    assert_eq!(message(&socket), "not an image (is a socket)");
    assert_eq!(message(Path::new("/dev/zero")), "not an image (is a character device)");
}

#[test]
fn paths_that_lead_nowhere() {
    let place = Scratch::new();
    let file = place.file("file", "x");
    assert_eq!(message(&place.path().join("none")), "No such file or directory");
    let deep = place.path().join("no/such/image");
    let parent = place.path().join("no");
    assert_eq!(hint(&deep), format!("the directory {} does not exist on this node", parent.display()));
    assert_eq!(message(&file.join("x")), "Not a directory");
    place.link("dangling", "/nowhere/x");
    assert_eq!(message(&place.path().join("dangling")), "No such file or directory");
    assert!(hint(&place.path().join("dangling")).contains("symbolic link to /nowhere/x"));
    place.link("loop", "loop");
    assert!(message(&place.path().join("loop")).starts_with("Too many levels of symbolic links"));
    let ugly = Path::new("/nowhere/\x1b[31m\nx");
    assert!(!identify(ugly).unwrap_err().message.contains(['\n', '\x1b']));
}

#[test]
fn directories_must_look_like_a_root() {
    let place = Scratch::new();
    place.directory("empty");
    assert_eq!(message(&place.path().join("empty")), "not an image (an empty directory)");
    place.file("data/train.csv", "x");
    let data = place.path().join("data");
    assert_eq!(message(&data), "not an image (a directory without bin, usr, lib, etc or sbin)");
    for name in ["a/bin", "b/etc", "c/.singularity.d", "d/ch"] {
        place.directory(name);
        let root = place.path().join(&name[..1]);
        assert_eq!(identify(&root).unwrap().kind, ImageKind::Directory, "{name}");
    }
    place.executable("scripts/run.sh", "#!/bin/sh\n");
    assert!(message(&place.path().join("scripts")).starts_with("not an image (a directory without"));
    place.executable("static/server", b"\x7fELF\x02");
    assert_eq!(identify(&place.path().join("static")).unwrap().kind, ImageKind::Directory);
    place.file("layout/oci-layout", "{}");
    place.directory("layout/blobs");
    let layout = place.path().join("layout");
    assert_eq!(message(&layout), "not an image (an OCI image layout, still in layers)");
    assert!(hint(&layout).starts_with("make an image of it: mizzen import oci:"));
    place.directory("bundle/rootfs/bin");
    assert!(hint(&place.path().join("bundle")).ends_with("bundle/rootfs"));
}
