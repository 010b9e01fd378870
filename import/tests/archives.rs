//! One image in all the forms that there are, from files and through standard input: what is imported has one digest.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::layers::{file, item, layer, sample};
use common::layout::{Layout, config, descriptor, digest};
use common::program::{Home, digest_of, unpacked, unsquashed};
use common::registry::Registry;
use common::{Facts, Scratch, facts, run};
use serde_json::{Value, json};
use tar::{Builder, EntryType, Header};

const PLAIN: &str = "--dest-tls-verify=false";

/// A directory with archives of `sample`.
struct Archives {
    scratch: Scratch,
    layout: Layout,
}

impl Archives {
    fn new() -> Archives {
        let scratch = Scratch::new();
        let layout = Layout::new(&scratch.path().join("oci"));
        layout.name("sample", layout.image(&sample(), "amd64"));
        Archives { scratch, layout }
    }

    fn path(&self, name: &str) -> String {
        self.scratch.path().join(name).to_str().unwrap().to_owned()
    }

    /// A copy by skopeo.
    fn copy(&self, transport: &str, name: &str, options: &[&str]) -> String {
        let (from, path) = (format!("oci:{}:sample", self.layout.path().display()), self.path(name));
        let mut skopeo = Command::new("skopeo");
        skopeo.args(["copy", "--quiet", "--insecure-policy"]).args(options);
        run(skopeo.args([from, format!("{transport}:{path}:me/sample:1")]));
        path
    }

    fn gzip(&self, path: &str) -> String {
        let to = format!("{path}.gz");
        let mut encoder =
            flate2::write::GzEncoder::new(File::create(&to).unwrap(), flate2::Compression::fast());
        encoder.write_all(&fs::read(path).unwrap()).unwrap();
        encoder.finish().unwrap();
        to
    }

    fn zstd(&self, path: &str) -> String {
        let to = format!("{path}.zst");
        fs::write(&to, zstd::encode_all(fs::read(path).unwrap().as_slice(), 3).unwrap()).unwrap();
        to
    }
}

/// The digest of an import by somebody who has no layers yet.
#[track_caller]
fn imported(config: &str, words: &[&str]) -> String {
    let home = Home::with_config(config);
    let digest = digest_of(&home.image(words));
    assert_eq!(home.leftovers(), ["image.sqsh"], "{words:?}");
    digest
}

/// The same through standard input.
#[track_caller]
fn streamed(words: &[&str], path: &str) -> String {
    let home = Home::new();
    let words = [&["-o", "image.sqsh"], words, &["-"]].concat();
    let outcome = home.import_from(&words, &fs::read(path).unwrap());
    assert_eq!(outcome.code, Some(0), "{path}: {}", outcome.stderr);
    assert_eq!(home.leftovers(), ["image.sqsh"], "{path}");
    digest_of(&home.path("image.sqsh"))
}

#[test]
fn one_image_has_one_digest_wherever_it_comes_from() {
    let archives = Archives::new();
    let expected = imported("", &[&format!("oci:{}", archives.layout.path().display())]);
    let mut found = Vec::new();
    for format in ["gzip", "zstd"] {
        let registry = Registry::start();
        registry.push(archives.layout.path(), "sample", "a", &["--dest-compress-format", format, PLAIN]);
        for jobs in ["1", "8"] {
            let digest = imported(&registry.plain_config(), &["-j", jobs, &registry.reference("a")]);
            found.push((format!("{format} in a registry, {jobs} threads"), digest));
        }
    }
    let files = [
        ("oci-archive", archives.copy("oci-archive", "oci.tar", &[])),
        ("oci-archive", archives.copy("oci-archive", "gzip.tar", &["--dest-compress-format", "gzip"])),
        ("oci-archive", archives.copy("oci-archive", "zstd.tar", &["--dest-compress-format", "zstd"])),
        ("docker-archive", archives.copy("docker-archive", "docker.tar", &[])),
        ("docker-archive", legacy(&archives)),
    ];
    for (prefix, path) in &files {
        let compressed = [path.clone(), archives.gzip(path), archives.zstd(path)];
        for (number, path) in compressed.iter().enumerate() {
            let jobs = ["1", "8", "3"][number];
            found.push((path.clone(), imported("", &["-j", jobs, path])));
            found
                .push((format!("{prefix}:{path}"), imported("", &["-j", jobs, &format!("{prefix}:{path}")])));
            found.push((format!("{path}, standard input"), streamed(&["-j", jobs], path)));
        }
    }
    let different: Vec<_> = found.iter().filter(|(_, digest)| *digest != expected).collect();
    assert!(different.is_empty(), "{expected}: {different:#?}");
}

fn add(builder: &mut Builder<File>, name: &str, kind: EntryType, content: &[u8]) {
    let mut header = Header::new_ustar();
    header.set_path(name).unwrap();
    header.set_entry_type(kind);
    header.set_mode(0o644);
    if kind == EntryType::Symlink {
        header.set_link_name(str::from_utf8(content).unwrap()).unwrap();
        header.set_size(0);
    } else {
        header.set_size(content.len() as u64);
    }
    header.set_cksum();
    builder.append(&header, if kind == EntryType::Symlink { b"" } else { content }).unwrap();
}

/// An archive as `docker save` wrote it up to version 24: a directory for each layer, and a link where two are equal.
fn save(path: &Path, images: &[(&[Vec<u8>], &[&str])]) {
    let mut builder = Builder::new(File::create(path).unwrap());
    let (mut manifest, mut written) = (Vec::<Value>::new(), Vec::<(String, String)>::new());
    for (layers, tags) in images {
        let config = config(layers, "amd64");
        let mut names = Vec::new();
        for (number, bytes) in layers.iter().enumerate() {
            let id = digest(format!("{number} of {tags:?}").as_bytes()).split_off(7);
            let (content, name) = (digest(bytes), format!("{id}/layer.tar"));
            add(&mut builder, &format!("{id}/VERSION"), EntryType::Regular, b"1.0");
            add(&mut builder, &format!("{id}/json"), EntryType::Regular, b"{}");
            match written.iter().find(|(known, _)| *known == content) {
                Some((_, other)) => {
                    add(&mut builder, &name, EntryType::Symlink, format!("../{other}").as_bytes());
                }
                None => add(&mut builder, &name, EntryType::Regular, bytes),
            }
            written.push((content, name.clone()));
            names.push(name);
        }
        let name = format!("{}.json", digest(config.as_bytes()).split_off(7));
        add(&mut builder, &name, EntryType::Regular, config.as_bytes());
        manifest.push(json!({ "Config": name, "RepoTags": tags, "Layers": names }));
    }
    add(&mut builder, "manifest.json", EntryType::Regular, json!(manifest).to_string().as_bytes());
    add(&mut builder, "repositories", EntryType::Regular, b"{}");
    builder.finish().unwrap();
}

fn legacy(archives: &Archives) -> String {
    let path = archives.path("legacy.tar");
    save(Path::new(&path), &[(&sample(), &["me/sample:1"])]);
    path
}

#[test]
fn layers_that_are_there_twice_are_links() {
    let scratch = Scratch::new();
    let (one, two) = (layer(&[file("a", "first")]), layer(&[file("a", "second"), file("b", "b")]));
    let layers = [one.clone(), two, one];
    common::oci_layout(&scratch.path().join("oci"), &layers);
    let tree = unpacked(&scratch.path().join("oci"), "latest", &scratch);
    let path = scratch.path().join("saved.tar");
    save(&path, &[(&layers, &["twice:latest"])]);
    let list = String::from_utf8(run(Command::new("tar").arg("-tvf").arg(&path))).unwrap();
    assert!(list.contains("/layer.tar -> ../"), "{list}");
    let home = Home::new();
    assert_eq!(home.tree(&[path.to_str().unwrap()]), tree);
    let expected = digest_of(&home.path("image.sqsh"));
    assert_eq!(streamed(&[], path.to_str().unwrap()), expected);
}

#[test]
fn archives_with_several_images_want_a_name() {
    let scratch = Scratch::new();
    let first = [layer(&[file("which", "first")])];
    let second = [layer(&[file("which", "second")]), layer(&[file("more", "")])];
    let path = scratch.path().join("saved.tar");
    save(&path, &[(&first, &["me/first:1", "me/first:latest"]), (&second, &["host.io:5000/second:2"])]);
    let layout = Layout::new(&scratch.path().join("oci"));
    layout.name("me/first:1", layout.image(&first, "amd64"));
    layout.name("host.io:5000/second:2", layout.image(&second, "amd64"));
    let archive = scratch.path().join("oci.tar");
    run(Command::new("tar").arg("-C").arg(layout.path()).arg("-cf").arg(&archive).arg("."));
    let home = Home::new();
    let sources = [("docker-archive", &path), ("oci-archive", &archive), ("oci", &layout.path().to_owned())];
    for (transport, path) in sources {
        let source = format!("{transport}:{}", path.display());
        for (name, files) in [("me/first:1", 2), ("host.io:5000/second:2", 3)] {
            let tree = home.tree(&[&format!("{source}:{name}")]);
            assert_eq!(tree.len(), files, "{source}: {tree:?}");
        }
        let refused = home.import(&["-fo", "image.sqsh", &source]);
        refused.assert_fails(&[
            "it has several images",
            "name one behind the file, after a colon; there is: me/first:1",
            "host.io:5000/second:2",
        ]);
        let refused = home.import(&["-fo", "image.sqsh", &format!("{source}:third")]);
        refused.assert_fails(&["it has no image \"third\"", "there is: me/first:1"]);
    }
    // Docker's own way to leave out the tag.
    assert_eq!(home.tree(&[&format!("docker-archive:{}:me/first", path.display())]).len(), 2);
    for path in [&path, &archive] {
        let refused = home.import_from(&["-fo", "image.sqsh", "-"], &fs::read(path).unwrap());
        refused.assert_fails(&["it has several images", "me/first:1", "host.io:5000/second:2"]);
        let bare = home.import(&["-fo", "image.sqsh", path.to_str().unwrap()]);
        bare.assert_fails(&["it has several images", "me/first:1", "host.io:5000/second:2"]);
    }
    let home = Home::new();
    home.import_from(&["-o", "image.sqsh", "-"], &fs::read(&path).unwrap()).assert_fails(&[]);
    assert!(home.leftovers().is_empty(), "{:?}", home.leftovers());
}

/// A root file system, and as a tar.
fn root_file_system(scratch: &Scratch) -> (PathBuf, PathBuf, Facts) {
    let archives = Archives::new();
    let bundle = scratch.path().join("bundle");
    run(Command::new("umoci")
        .args(["unpack", "--image", &format!("{}:sample", archives.layout.path().display())])
        .arg(&bundle));
    let (root, tar) = (bundle.join("rootfs"), scratch.path().join("root.tar"));
    run(Command::new("tar")
        .args(["--xattrs", "--format=pax", "--numeric-owner", "-C"])
        .arg(&root)
        .arg("-cf")
        .args([&tar, Path::new(".")]));
    let facts = facts(&root);
    (root, tar, facts)
}

#[test]
fn a_directory_and_its_tar_are_the_same_tree() {
    let scratch = Scratch::new();
    let (root, tar, tree) = root_file_system(&scratch);
    let home = Home::new();
    let tar = tar.to_str().unwrap();
    assert_eq!(home.tree(&[root.to_str().unwrap()]), tree);
    assert_eq!(home.tree(&[&format!("tar:{tar}")]), tree);
    assert_eq!(home.tree(&[tar]), tree);
    let expected = digest_of(&home.path("image.sqsh"));
    let archives = Archives { scratch: Scratch::new(), layout: Layout::new(&scratch.path().join("none")) };
    for path in [archives.gzip(tar), archives.zstd(tar)] {
        assert_eq!(imported("", &[&path]), expected, "{path}");
        assert_eq!(imported("", &[&format!("tar:{path}")]), expected, "{path}");
        assert_eq!(streamed(&[], &path), expected, "{path}");
    }
    assert_eq!(streamed(&["-j", "1"], tar), expected);
}

/// Wraps a squashfs into a SIF file, byte by byte as the format says.
fn sif(squashfs: &[u8]) -> Vec<u8> {
    let length = squashfs.len() as i64;
    let mut file = b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\x0001\x0002\0".to_vec();
    file.extend([7; 16]);
    for number in [0, 0, 3, 4, 4096, 4 * 585, 8192, length] {
        file.extend(number.to_le_bytes());
    }
    file.resize(4096, 0);
    file.extend(0x4004_i32.to_le_bytes());
    file.push(1);
    for id in [1_u32, 0xf000_0001, 0] {
        file.extend(id.to_le_bytes());
    }
    for number in [8192, length, length, 0, 0, 0, 0] {
        file.extend(number.to_le_bytes());
    }
    file.extend([0; 128]);
    for number in [1_i32, 2] {
        file.extend(number.to_le_bytes());
    }
    file.extend(b"02\0");
    file.resize(8192, 0);
    [file, squashfs.to_vec()].concat()
}

#[test]
fn images_are_taken_as_they_are() {
    let scratch = Scratch::new();
    let (root, _, tree) = root_file_system(&scratch);
    let squashfs = scratch.path().join("by-another.sqsh");
    run(Command::new("mksquashfs").args([&root, &squashfs]).args([
        "-quiet",
        "-no-progress",
        "-comp",
        "gzip",
    ]));
    let bytes = fs::read(&squashfs).unwrap();
    let wrapped = scratch.path().join("image.sif");
    fs::write(&wrapped, sif(&bytes)).unwrap();
    let home = Home::new();
    for source in [&squashfs, &wrapped] {
        let image = home.image(&[source.to_str().unwrap()]);
        assert!(fs::read(&image).unwrap() == bytes, "{source:?}");
        assert_eq!(unsquashed(&image, &home.path("tree")), tree);
    }
    // Kept in a registry, it is one blob.
    let registry = Registry::start();
    let (config, sif) = (b"{}", fs::read(&wrapped).unwrap());
    registry.put_blob("me/sif", config);
    registry.put_blob("me/sif", &sif);
    let media_type = common::layout::MANIFEST;
    let manifest = json!({
        "schemaVersion": 2, "mediaType": media_type,
        "config": descriptor(config, "application/vnd.sylabs.sif.config.v1+json"),
        "layers": [descriptor(&sif, "application/vnd.sylabs.sif.layer.v1.sif")],
    });
    assert_eq!(registry.put_manifest("me/sif", "1", media_type, &manifest.to_string()).status, 201);
    let home = Home::with_config(&registry.plain_config());
    let image = home.image(&[&format!("oras://{}/me/sif:1", registry.host)]);
    assert!(fs::read(image).unwrap() == sif);
    let refused = home.import(&["-fo", "image.sqsh", &registry.reference("me/sif:1")]);
    let other = format!("hint: write it oras://{}/me/sif:1", registry.host);
    refused.assert_fails(&["it is a SIF file, and no image that is made of layers", &other]);
}

#[test]
fn what_is_none_of_them_is_told_the_forms() {
    let home = Home::new();
    let forms = "hint: sources are docker://NAME, oras://NAME, oci:DIR, oci-archive:FILE, docker-archive:FILE, tar:FILE, a \
                 directory, an image file, or - for standard input";
    fs::write(home.path("page.html"), "<!DOCTYPE html><html>404</html>").unwrap();
    fs::write(home.path("nothing"), "").unwrap();
    fs::write(home.path("noise"), common::layers::large("x", 5000).content).unwrap();
    for name in ["page.html", "nothing", "noise"] {
        let refused = home.import(&["-o", "image.sqsh", name]);
        refused.assert_fails(&[&format!("{name}: not an image"), forms]);
    }
    home.import(&["-o", "image.sqsh", "ftp://host/x"]).assert_fails(&["cannot import from ftp://", forms]);
    home.import(&["-o", "image.sqsh", "missing.tar"]).assert_fails(&[
        "missing.tar: No such file",
        "hint: an image in a registry is written docker://NAME",
    ]);
    home.import_from(&["-o", "image.sqsh", "-"], b"<!DOCTYPE html>").assert_fails(&[
        "it is neither a tar archive nor compressed with gzip, zstd or xz (starts with \"<!DOCTYP",
    ]);
    // A prefix that is wrong.
    let archive = home.path("root.tar");
    fs::write(&archive, layer(&[file("etc/passwd", "x"), item("pipe", EntryType::Fifo, "")])).unwrap();
    for (source, message) in [
        ("oci-archive:root.tar", "root.tar: no index.json: not an OCI layout"),
        ("docker-archive:root.tar", "root.tar: no manifest.json: not an archive of docker save"),
        ("oci:.", "no index.json: not an OCI layout"),
    ] {
        home.import(&["-o", "image.sqsh", source]).assert_fails(&[message]);
    }
    assert_eq!(home.leftovers(), ["noise", "nothing", "page.html", "root.tar"]);
}
