//! What layers mean on top of each other, compared with what umoci unpacks. As root: umoci makes devices.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::path::Path;
use std::process::Command;

use common::layers::{Item, dir, file, item, layer, link, mode, symlink};
use common::{Scratch, facts, import, run};
use tar::EntryType;

/// Every corner that layers have, by name.
fn cases() -> Vec<(&'static str, Vec<Vec<Item>>)> {
    let base = vec![
        dir("a"),
        file("a/one", "1"),
        file("a/two", "2"),
        dir("a/d"),
        file("a/d/x", "x"),
        file("b", "b"),
    ];
    let on_base = |items: Vec<Item>| vec![base.clone(), items];
    vec![
        ("plain", vec![base.clone()]),
        ("no layers at all", vec![]),
        ("an empty layer", on_base(vec![])),
        ("a whiteout", on_base(vec![file("a/.wh.one", "")])),
        ("a whiteout of a directory", on_base(vec![file(".wh.a", "")])),
        ("a whiteout of nothing", on_base(vec![file("a/.wh.three", ""), file("nowhere/.wh.x", "")])),
        ("a whiteout before its name", on_base(vec![file("a/.wh.one", ""), file("a/one", "new")])),
        ("a whiteout behind its name", on_base(vec![file("a/one", "new"), file("a/.wh.one", "")])),
        ("a whiteout behind a name below it", on_base(vec![file("a/d/y", "y"), file("a/.wh.d", "")])),
        ("a whiteout that is a directory", on_base(vec![dir("a/.wh.one")])),
        ("an opaque directory", on_base(vec![dir("a"), file("a/.wh..wh..opq", ""), file("a/three", "3")])),
        (
            "an opaque mark behind new names",
            on_base(vec![file("a/three", "3"), file("a/d/y", "y"), file("a/.wh..wh..opq", "")]),
        ),
        ("an opaque root", on_base(vec![file(".wh..wh..opq", ""), file("c", "c")])),
        ("an opaque mark where nothing is", on_base(vec![file("q/.wh..wh..opq", "")])),
        ("replaced by a file", on_base(vec![file("a", "now a file")])),
        ("replaced by a link", on_base(vec![symlink("a", "b")])),
        ("replaced by a directory", on_base(vec![dir("b"), file("b/in", "in")])),
        (
            "directory, file, directory",
            vec![base.clone(), vec![file("a", "file")], vec![dir("a"), file("a/new", "n")]],
        ),
        ("attributes of a directory", on_base(vec![mode(0o700, dir("a"))])),
        ("attributes of the root", on_base(vec![mode(0o711, dir("./"))])),
        (
            "twice in one layer",
            on_base(vec![file("c", "first"), file("c", "second"), mode(0o600, file("c", "third"))]),
        ),
        ("parents that nobody describes", on_base(vec![file("x/y/z", "z")])),
        ("a hard link", on_base(vec![file("c", "c"), link("d", "c")])),
        ("a hard link into a lower layer", on_base(vec![link("c", "a/one")])),
        ("a hard link with a leading slash", on_base(vec![link("c", "/a/one")])),
        ("a hard link to a hidden file", on_base(vec![link("c", "a/one"), file("a/.wh.one", "")])),
        (
            "a hard link to a file that is replaced later",
            on_base(vec![link("c", "a/one"), file("a/one", "new")]),
        ),
        ("a hard link to a symbolic link", on_base(vec![symlink("s", "b"), link("t", "s")])),
        ("a hard link through a symbolic link", on_base(vec![symlink("s", "a"), link("t", "s/one")])),
        ("a hard link over a file", on_base(vec![link("b", "a/one")])),
        ("a link to a missing file", on_base(vec![link("c", "nowhere")])),
        ("a link before its target", on_base(vec![link("c", "later"), file("later", "l")])),
        ("a link to a directory", on_base(vec![link("c", "a")])),
        ("a link to itself", on_base(vec![link("b", "b")])),
        (
            "a lower file with two names, one replaced",
            vec![vec![file("one", "1"), link("two", "one")], vec![file("one", "changed and longer")]],
        ),
        ("a symbolic link on the way", on_base(vec![symlink("s", "a"), file("s/new", "n")])),
        ("an absolute symbolic link on the way", on_base(vec![symlink("s", "/a/d"), file("s/new", "n")])),
        ("a link out of the root", on_base(vec![symlink("s", "../../../a"), file("s/new", "n")])),
        ("a dangling link on the way", on_base(vec![symlink("s", "made/by/this"), file("s/new", "n")])),
        (
            "a dangling link with dots on the way",
            on_base(vec![symlink("s", "made/../other"), file("s/new", "n")]),
        ),
        (
            "a directory in place of a link on the way",
            on_base(vec![symlink("s", "a"), dir("s"), file("s/new", "n")]),
        ),
        (
            "a whiteout behind a link",
            vec![base.clone(), vec![symlink("s", "a")], vec![file("s/.wh.one", "")]],
        ),
        (
            "kaniko's link and whiteout in one layer",
            on_base(vec![symlink("foo", "a"), file("foo/.wh.one", "")]),
        ),
        (
            "a loop of links on the way",
            on_base(vec![symlink("s", "t"), symlink("t", "s"), file("s/new", "n")]),
        ),
        ("a file on the way", on_base(vec![file("b/new", "n")])),
        (
            "names that lead out",
            on_base(vec![file("../../evil", "e"), file("/abs", "a"), file("x/../../y", "y")]),
        ),
        (
            "dots in names",
            on_base(vec![file("./a/./three", "3"), file("a//four", "4"), file("a/d/../five", "5")]),
        ),
        (
            "names that look like marks",
            on_base(vec![dir(".wh"), file(".wh/x", "x"), file("a.wh.b", "b"), dir("a/wh.")]),
        ),
        (
            "devices and pipes",
            on_base(vec![
                item("null", EntryType::Char, "1:3"),
                item("disk", EntryType::Block, "8:1"),
                item("pipe", EntryType::Fifo, ""),
                item("zero", EntryType::Char, "0:0"),
            ]),
        ),
        (
            "setuid and sticky",
            on_base(vec![mode(0o4755, file("su", "s")), mode(0o1777, dir("tmp")), mode(0, dir("shut"))]),
        ),
        (
            "extended attributes",
            on_base(vec![
                Item { xattr: Some(("user.note", "hello")), ..file("noted", "n") },
                Item { xattr: Some(("user.note", "dir")), ..dir("a") },
            ]),
        ),
        (
            "extended attributes that go with a layer",
            vec![vec![Item { xattr: Some(("user.note", "hello")), ..dir("a") }], vec![dir("a")]],
        ),
        ("bytes that are no text", on_base(vec![Item { path: b"\xff\xfe\n".into(), ..file("", "bytes") }])),
    ]
}

/// What both make of layers: the same tree, or no image.
#[test]
fn layers_mean_what_umoci_unpacks() {
    let (mut different, mut refused) = (Vec::new(), Vec::new());
    for (name, layers) in cases() {
        let scratch = Scratch::new();
        let layers: Vec<Vec<u8>> = layers.iter().map(|items| layer(items)).collect();
        common::oci_layout(&scratch.path().join("oci"), &layers);
        let unpacked = Command::new("umoci")
            .args(["unpack", "--image", "oci:latest", "bundle"])
            .current_dir(scratch.path())
            .output()
            .expect("umoci is needed: apt-get install umoci");
        let theirs = unpacked.status.success().then(|| facts(&scratch.path().join("bundle/rootfs")));
        let ours = import(&scratch, &format!("oci:{}", scratch.path().join("oci").display())).map(|image| {
            let tree = scratch.path().join("tree");
            run(Command::new("unsquashfs").args(["-q", "-n", "-d"]).args([&tree, Path::new(&image)]));
            facts(&tree)
        });
        match (ours, theirs) {
            (Ok(ours), Some(theirs)) if ours == theirs => {}
            (Err(failure), None) => refused.push(format!("{name}: {failure}")),
            (ours, theirs) => different.push(format!("{name}:\n  ours   {ours:?}\n  umoci  {theirs:?}\n")),
        }
    }
    assert!(different.is_empty(), "{}", different.concat());
    assert_eq!(
        refused,
        [
            "a link to a missing file: layer 2: c: a hard link to nowhere, which is not there",
            "a link before its target: layer 2: c: a hard link to later, which is not there",
            "a link to a directory: layer 2: c: \"c\" is a hard link to a directory",
            "a link to itself: layer 2: b: a hard link to b, which is not there",
            "a loop of links on the way: layer 2: s/new: a symbolic link on its path leads back to itself",
            "a file on the way: layer 2: b/new: b is a file, and not a directory",
        ]
    );
}
