//! Images in and archives out, read again by our own reader.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Cursor, Read};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;

use mizzen_squashfs::writer::{Attributes, Content as Node, Device, Options, Tree, Writer};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::*;
use crate::decompress::decompressed;
use crate::tar::{Archive, Entry, EntryKind};

/// A directory that is gone with the test.
struct TestDir(PathBuf);

impl TestDir {
    fn new(name: &str) -> TestDir {
        let path = std::env::temp_dir().join(format!("mizzen-export-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        TestDir(path)
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const CONFIG: &str = r#"{
    "architecture": "arm64", "os": "linux", "created": "2024-01-02T03:04:05Z",
    "config": { "Env": ["A=b"], "Entrypoint": ["/bin/tool"], "User": "7", "ExposedPorts": { "80/tcp": {} } },
    "rootfs": { "type": "layers", "diff_ids": ["sha256:old", "sha256:older"] }, "history": [{}, {}]
}"#;

/// A squashfs image with everything that an image can have.
fn make_image(path: &Path) {
    let mut writer = Writer::new(fs::File::create(path).unwrap(), Options::default()).unwrap();
    let hello = writer.add_file(b"hello\n".as_slice()).unwrap();
    let empty = writer.add_file(io::empty()).unwrap();
    let config = writer.add_file(CONFIG.as_bytes()).unwrap();
    let large: Vec<u8> = (0..500_000u32).map(|i| (i % 253) as u8).collect();
    let large = writer.add_file(large.as_slice()).unwrap();
    let holes = writer.add_file(io::repeat(0).take(1 << 20)).unwrap();
    let attributes =
        |mode, uid, mtime| Attributes { mode, uid, gid: uid + 1, mtime, xattrs: BTreeMap::new() };
    let mut tree = Tree::new(attributes(0o755, 0, 1)).unwrap();
    let plain = attributes(0o644, 0, 2);
    let etc = tree.add(Tree::ROOT, b"etc", attributes(0o755, 0, 3), Node::Directory).unwrap();
    let own = tree.add(Tree::ROOT, b".mizzen", attributes(0o755, 0, 3), Node::Directory).unwrap();
    tree.add(own, b"config.json", plain.clone(), Node::File(config)).unwrap();
    let mut marked = attributes(0o4711, 1000, 1_700_000_000);
    marked.xattrs.insert(b"user.mark".to_vec(), b"\0\xff".to_vec());
    marked.xattrs.insert(b"security.capability".to_vec(), vec![1; 20]);
    marked.xattrs.insert(b"security.selinux".to_vec(), b"label".to_vec());
    marked.xattrs.insert(b"trusted.overlay.opaque".to_vec(), b"y".to_vec());
    let first = tree.add(etc, b"hello", marked, Node::File(hello)).unwrap();
    tree.link(Tree::ROOT, b"hard", first).unwrap();
    let tmp = tree.add(Tree::ROOT, b"tmp", attributes(0o1777, 0, 4), Node::Directory).unwrap();
    for (name, content) in [
        (b"empty".as_slice(), Node::File(empty)),
        (b"large", Node::File(large)),
        (b"holes", Node::File(holes)),
        (b"caf\xc3\xa9\xff", Node::File(hello)),
        (&[b'n'; 255], Node::File(hello)),
        (b"null", Node::CharDevice(Device { major: 1, minor: 3 })),
        (b"disk", Node::BlockDevice(Device { major: 259, minor: 70_000 })),
        (b"fifo", Node::Fifo),
        (b"socket", Node::Socket),
        (b"another-socket", Node::Socket),
        (b".wh.gone", Node::File(empty)),
    ] {
        tree.add(tmp, name, plain.clone(), content).unwrap();
    }
    let link =
        tree.add(tmp, b"link", attributes(0o777, 0, 5), Node::Symlink(b"../etc/hello".to_vec())).unwrap();
    tree.link(tmp, b"same-link", link).unwrap();
    writer.finish(&tree).unwrap();
}

fn options(image: &Path, format: ExportFormat) -> ExportOptions {
    ExportOptions {
        image: image.to_owned(),
        format,
        compression: format.compression(),
        tag: None,
        owners: Owners::Usual,
        scratch: scratch_directory(None),
        output_name: "out.tar".to_owned(),
        threads: NonZeroUsize::MIN,
    }
}

fn exported(options: &ExportOptions) -> (Vec<u8>, Vec<String>) {
    let mut bytes = Vec::new();
    let exported = export(options, &mut bytes, &mut |_| ()).unwrap();
    (bytes, exported.warnings)
}

fn members(bytes: &[u8]) -> Vec<(Entry, Vec<u8>)> {
    let mut archive = Archive::new(decompressed(bytes).unwrap());
    let mut members = Vec::new();
    while let Some(entry) = archive.next_entry().unwrap() {
        let mut content = Vec::new();
        archive.contents().read_to_end(&mut content).unwrap();
        members.push((entry, content));
    }
    members
}

fn names(members: &[(Entry, Vec<u8>)]) -> Vec<String> {
    members.iter().map(|(entry, _)| String::from_utf8_lossy(&entry.path).into_owned()).collect()
}

fn hex(bytes: &[u8]) -> String {
    mizzen_core::Digest::new(Sha256::digest(bytes).into()).hex()
}

#[test]
fn the_root_file_system_as_it_is() {
    let dir = TestDir::new("tar");
    let image = dir.0.join("image.sqsh");
    make_image(&image);
    let options = options(&image, ExportFormat::Tar);
    let (bytes, warnings) = exported(&options);
    assert_eq!(warnings, ["left out: /tmp/another-socket and 1 more (a socket, which no archive can have)"]);
    let members = members(&bytes);
    let long = "n".repeat(255);
    let expected = [
        "./",
        ".mizzen/",
        ".mizzen/config.json",
        "etc/",
        "etc/hello",
        "hard",
        "tmp/",
        "tmp/.wh.gone",
        "tmp/caf\u{e9}\u{fffd}",
        "tmp/disk",
        "tmp/empty",
        "tmp/fifo",
        "tmp/holes",
        "tmp/large",
        "tmp/link",
        &format!("tmp/{long}"),
        "tmp/null",
        "tmp/same-link",
    ];
    assert_eq!(names(&members), expected);
    let find = |name: &str| members.iter().find(|(entry, _)| entry.path == name.as_bytes()).unwrap();
    let (hello, content) = find("etc/hello");
    assert_eq!((hello.mode, hello.uid, hello.gid, hello.mtime), (0o4711, 1000, 1001, 1_700_000_000));
    assert_eq!(content, b"hello\n");
    let xattrs: Vec<&[u8]> = hello.xattrs.keys().map(Vec::as_slice).collect();
    assert_eq!(xattrs, [b"security.capability".as_slice(), b"user.mark"], "not those of a machine");
    assert_eq!(find("hard").0.kind, EntryKind::HardLink(b"etc/hello".to_vec()));
    assert_eq!(find("tmp/link").0.kind, EntryKind::Symlink(b"../etc/hello".to_vec()));
    assert_eq!(find("tmp/same-link").0.kind, EntryKind::HardLink(b"tmp/link".to_vec()));
    assert_eq!(find("tmp/null").0.kind, EntryKind::CharDevice { major: 1, minor: 3 });
    assert_eq!(find("tmp/disk").0.kind, EntryKind::BlockDevice { major: 259, minor: 70_000 });
    assert_eq!(find("tmp/fifo").0.kind, EntryKind::Fifo);
    assert_eq!((find("tmp/").0.mode, find("./").0.mode, find("./").0.mtime), (0o1777, 0o755, 1));
    assert!(find("tmp/large").1.iter().enumerate().all(|(at, byte)| *byte == (at % 253) as u8));
    assert_eq!(find("tmp/large").1.len(), 500_000);
    assert!(find("tmp/holes").1 == vec![0; 1 << 20]);
    assert_eq!(exported(&options).0, bytes, "the same image is the same archive");
    let roots = exported(&ExportOptions { owners: Owners::Root, ..options }).0;
    assert!(self::members(&roots).iter().all(|(entry, _)| (entry.uid, entry.gid) == (0, 0)));
}

#[test]
fn compressed_archives_do_not_depend_on_threads() {
    let dir = TestDir::new("threads");
    let image = dir.0.join("image.sqsh");
    make_image(&image);
    let plain = exported(&options(&image, ExportFormat::Tar)).0;
    for compression in [ExportCompression::Gzip, ExportCompression::Zstd] {
        let with = |threads| {
            let threads = NonZeroUsize::new(threads).unwrap();
            exported(&ExportOptions { compression, threads, ..options(&image, ExportFormat::Tar) }).0
        };
        let one = with(1);
        assert!(one == with(2) && one == with(7), "{compression:?}");
        let mut content = Vec::new();
        decompressed(one.as_slice()).unwrap().read_to_end(&mut content).unwrap();
        assert!(content == plain, "{compression:?}");
    }
}

#[test]
fn an_oci_archive() {
    let dir = TestDir::new("oci");
    let image = dir.0.join("image.sqsh");
    make_image(&image);
    for (compression, media_type) in [
        (ExportCompression::None, "application/vnd.oci.image.layer.v1.tar"),
        (ExportCompression::Gzip, "application/vnd.oci.image.layer.v1.tar+gzip"),
        (ExportCompression::Zstd, "application/vnd.oci.image.layer.v1.tar+zstd"),
    ] {
        let tag = Some("me/mine:1".to_owned());
        let options = ExportOptions { compression, tag, ..options(&image, ExportFormat::OciArchive) };
        let (bytes, warnings) = exported(&options);
        assert_eq!(exported(&options).0, bytes);
        assert_eq!(warnings[1], "left out: /tmp/.wh.gone (a name that removes files in a layer)");
        let members: BTreeMap<String, Vec<u8>> = names(&members(&bytes))
            .into_iter()
            .zip(members(&bytes).into_iter().map(|(_, content)| content))
            .collect();
        let blob = |digest: &Value| {
            let digits = digest.as_str().unwrap().strip_prefix("sha256:").unwrap();
            let content = &members[&format!("blobs/sha256/{digits}")];
            assert_eq!(hex(content), digits);
            content
        };
        let parse = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
        assert_eq!(members["oci-layout"], br#"{"imageLayoutVersion":"1.0.0"}"#);
        let index = parse(&members["index.json"]);
        let described = &index["manifests"][0];
        assert_eq!(described["platform"]["architecture"], "arm64");
        assert_eq!(described["annotations"]["org.opencontainers.image.ref.name"], "1");
        assert_eq!(described["annotations"]["io.containerd.image.name"], "docker.io/me/mine:1");
        let manifest = parse(blob(&described["digest"]));
        assert_eq!(described["size"], blob(&described["digest"]).len());
        let layer = &manifest["layers"][0];
        assert_eq!(
            (layer["mediaType"].as_str(), &layer["size"]),
            (Some(media_type), &blob(&layer["digest"]).len().into())
        );
        let config = parse(blob(&manifest["config"]["digest"]));
        assert_eq!(
            config["config"]["ExposedPorts"]["80/tcp"],
            serde_json::json!({}),
            "what we do not know is kept"
        );
        assert_eq!(
            (&config["created"], &config["config"]["User"]),
            (&"2024-01-02T03:04:05Z".into(), &"7".into())
        );
        assert_eq!(config["history"].as_array().unwrap().len(), 1);
        let mut content = Vec::new();
        decompressed(blob(&layer["digest"]).as_slice()).unwrap().read_to_end(&mut content).unwrap();
        assert_eq!(config["rootfs"]["diff_ids"], serde_json::json!([format!("sha256:{}", hex(&content))]));
        let files = names(&self::members(&content));
        assert!(!files.iter().any(|name| name.contains(".mizzen") || name.contains(".wh.")), "{files:?}");
        assert_eq!(files.len(), 15);
    }
}

#[test]
fn a_docker_archive() {
    let dir = TestDir::new("docker");
    let image = dir.0.join("image.sqsh");
    make_image(&image);
    let without = options(&image, ExportFormat::DockerArchive);
    let tagged = ExportOptions { tag: Some("mine".to_owned()), ..without.clone() };
    let found = members(&exported(&tagged).0);
    let find = |name: &str| &found.iter().find(|(entry, _)| entry.path == name.as_bytes()).unwrap().1;
    let manifest: Value = serde_json::from_slice(find("manifest.json")).unwrap();
    assert_eq!(manifest[0]["RepoTags"], serde_json::json!(["mine:latest"]));
    let layer = manifest[0]["Layers"][0].as_str().unwrap();
    let id = hex(find(layer));
    assert_eq!(layer, format!("{id}/layer.tar"));
    let config_name = manifest[0]["Config"].as_str().unwrap();
    assert_eq!(config_name, format!("{}.json", hex(find(config_name))));
    let repositories: Value = serde_json::from_slice(find("repositories")).unwrap();
    assert_eq!(repositories, serde_json::json!({ "mine": { "latest": id } }));
    let found = members(&exported(&without).0);
    let manifest: Value = serde_json::from_slice(&found[0].1).unwrap();
    assert_eq!(
        (found[0].0.path.as_slice(), &manifest[0]["RepoTags"]),
        (b"manifest.json".as_slice(), &Value::Null)
    );
    assert!(found.iter().all(|(entry, _)| entry.path != b"repositories"));
    let whole = ExportOptions { compression: ExportCompression::Gzip, ..without.clone() };
    assert!(names(&members(&exported(&whole).0)) == names(&found), "the whole may be compressed");
}

#[test]
fn a_directory() {
    let dir = TestDir::new("directory");
    let root = dir.0.join("root");
    fs::create_dir_all(root.join("usr/bin")).unwrap();
    fs::create_dir_all(root.join("z")).unwrap();
    fs::write(root.join("usr/bin/tool"), b"#!/bin/sh\n").unwrap();
    fs::set_permissions(root.join("usr/bin/tool"), fs::Permissions::from_mode(0o751)).unwrap();
    fs::hard_link(root.join("usr/bin/tool"), root.join("z/tool")).unwrap();
    symlink("/etc", root.join("etc")).unwrap();
    let _socket = UnixListener::bind(root.join("z/socket")).unwrap();
    let sparse = fs::File::create(root.join("z/sparse")).unwrap();
    sparse.write_at(b"end", 99_997).unwrap();
    let options = options(&root, ExportFormat::Tar);
    let (bytes, warnings) = exported(&options);
    assert_eq!(warnings, ["left out: /z/socket (a socket, which no archive can have)"]);
    let members = members(&bytes);
    assert_eq!(
        names(&members),
        ["./", "etc", "usr/", "usr/bin/", "usr/bin/tool", "z/", "z/sparse", "z/tool"]
    );
    assert_eq!(members[1].0.kind, EntryKind::Symlink(b"/etc".to_vec()));
    assert_eq!((members[4].0.mode, members[4].1.as_slice()), (0o751, b"#!/bin/sh\n".as_slice()));
    assert_eq!((members[6].1.len(), &members[6].1[99_997..]), (100_000, b"end".as_slice()));
    assert_eq!(members[7].0.kind, EntryKind::HardLink(b"usr/bin/tool".to_vec()));
    assert!(members.iter().all(|(entry, _)| (entry.uid, entry.gid) == (0, 0)), "whoever has unpacked it");
    // An image without a description still has a configuration.
    let (bytes, _) = exported(&ExportOptions { format: ExportFormat::DockerArchive, ..options });
    let found = self::members(&bytes);
    let config =
        found.iter().find(|(entry, _)| entry.path.ends_with(b".json") && entry.path.len() > 60).unwrap();
    let config: Value = serde_json::from_slice(&config.1).unwrap();
    assert_eq!((&config["os"], &config["created"]), (&"linux".into(), &"1970-01-01T00:00:00Z".into()));
    assert!(config["architecture"].is_string());
}

#[test]
fn what_other_makers_wrote_becomes_the_configuration() {
    let dir = TestDir::new("maker");
    let root = dir.0.join("root");
    fs::create_dir_all(root.join("ch")).unwrap();
    fs::create_dir_all(root.join("bin")).unwrap();
    fs::write(root.join("ch/environment"), b"GREETING=hello world\n").unwrap();
    let metadata = r#"{ "arch": "arm64", "cwd": "/work", "labels": { "maintainer": "me" } }"#;
    fs::write(root.join("ch/metadata.json"), metadata).unwrap();
    let (bytes, _) = exported(&options(&root, ExportFormat::DockerArchive));
    let found = members(&bytes);
    let config =
        found.iter().find(|(entry, _)| entry.path.ends_with(b".json") && entry.path.len() > 60).unwrap();
    let config: Value = serde_json::from_slice(&config.1).unwrap();
    assert_eq!(config["config"]["Env"], serde_json::json!(["GREETING=hello world"]));
    assert_eq!(config["config"]["WorkingDir"], "/work");
    assert_eq!(config["config"]["Labels"]["maintainer"], "me");
    assert_eq!(config["architecture"], "arm64");
}

#[test]
fn failures_name_what_failed() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::Error::from_raw_os_error(rustix::io::Errno::NOSPC.raw_os_error()))
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let dir = TestDir::new("failures");
    let image = dir.0.join("image.sqsh");
    make_image(&image);
    let failed =
        |options: &ExportOptions, out: &mut dyn Write| export(options, out, &mut |_| ()).unwrap_err();
    for format in [ExportFormat::Tar, ExportFormat::OciArchive, ExportFormat::DockerArchive] {
        let failure = failed(&options(&image, format), &mut Full);
        assert_eq!(failure.message, "out.tar: cannot write the archive: No space left on device");
    }
    let mut sink = Vec::new();
    let missing =
        ExportOptions { scratch: dir.0.join("missing"), ..options(&image, ExportFormat::OciArchive) };
    let failure = failed(&missing, &mut sink);
    let expected =
        format!("{}: cannot write the layer: No such file or directory", missing.scratch.display());
    assert_eq!((failure.message, sink.len()), (expected, 0));
    for (tag, problem) in [
        ("Mine:1", "\"Mine\" is not the name of an image"),
        ("docker://mine:1", "not NAME:TAG"),
        ("me@registry.example/mine", "not NAME:TAG"),
        ("mine:a b", "\"a b\" is not a tag"),
    ] {
        let wrong = ExportOptions { tag: Some(tag.to_owned()), ..options(&image, ExportFormat::OciArchive) };
        assert_eq!(failed(&wrong, &mut sink).message, format!("--tag: {tag}: {problem}"));
    }
    let nothing = failed(&options(&dir.0.join("nothing"), ExportFormat::Tar), &mut sink);
    assert!(nothing.message.ends_with("nothing: No such file or directory"), "{}", nothing.message);
    // Some of the data is gone.
    let mut damaged = fs::read(&image).unwrap();
    damaged[100..200].fill(0xaa);
    fs::write(&image, damaged).unwrap();
    let failure = failed(&options(&image, ExportFormat::Tar), &mut Cursor::new(Vec::new()));
    assert!(failure.message.starts_with(&format!("{}: /", image.display())), "{}", failure.message);
    assert!(failure.message.contains(" in the image: "), "{}", failure.message);
    assert_eq!(failure.hint.as_deref(), Some(mizzen::image::DAMAGED));
}

#[test]
fn an_archive_of_itself_is_refused() {
    let dir = TestDir::new("itself");
    let root = dir.0.join("root");
    fs::create_dir_all(root.join("usr")).unwrap();
    let inside = root.join("usr/../usr/out.tar");
    let failure = check_output(&root, &inside).unwrap_err();
    assert_eq!(failure.message, format!("{}: is in the directory that is exported", inside.display()));
    assert!(check_output(&root, &dir.0.join("root.tar")).is_ok());
    assert!(check_output(&root.join("file.sqsh"), &inside).is_ok());
}

#[test]
fn layers_are_kept_beside_the_archive() {
    assert_eq!(scratch_directory(Some(Path::new("/a/b.tar"))), Path::new("/a"));
    assert_eq!(scratch_directory(Some(Path::new("b.tar"))), Path::new("."));
    assert_eq!(scratch_directory(None), std::env::temp_dir());
    let dir = TestDir::new("scratch");
    let image = dir.0.join("image.sqsh");
    make_image(&image);
    let scratch = dir.0.join("scratch");
    fs::create_dir(&scratch).unwrap();
    let mut seen = 0;
    let options = ExportOptions { scratch: scratch.clone(), ..options(&image, ExportFormat::OciArchive) };
    let mut bytes = Vec::new();
    let mut look = |len| {
        seen += len;
        assert_eq!(fs::read_dir(&scratch).unwrap().count(), 0, "it has no name");
    };
    export(&options, &mut bytes, &mut look).unwrap();
    assert_eq!(seen, 6 * 3 + 500_000 + (1 << 20));
}
