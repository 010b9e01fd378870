//! What is exported, read by the programs that it is for: GNU tar, skopeo and umoci must be installed, and this must be
//! root, who alone can unpack devices and owners.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::num::NonZeroUsize;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use mizzen_import::export::{
    ExportCompression, ExportFormat, ExportOptions, Owners, export, scratch_directory,
};
use rustix::fs::{FileType, Mode};

struct TestDir(PathBuf);

impl TestDir {
    fn new(name: &str) -> TestDir {
        let path = std::env::temp_dir().join(format!("mizzen-export-peers-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        TestDir(path)
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn run(program: &str, words: &[&str]) -> String {
    let output = Command::new(program).args(words).output();
    let output = output.unwrap_or_else(|error| panic!("{program} must be installed: {error}"));
    assert!(output.status.success(), "{program} {words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn make_tree(root: &Path) {
    for directory in ["bin", "etc", "tmp", "usr/share/empty", "dev"] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    fs::set_permissions(root.join("tmp"), fs::Permissions::from_mode(0o1777)).unwrap();
    // The head of a program, and some pieces of what is compressed at once.
    let mut tool = fs::read("/proc/self/exe").unwrap();
    tool.truncate(5 << 20);
    fs::write(root.join("bin/tool"), tool).unwrap();
    fs::set_permissions(root.join("bin/tool"), fs::Permissions::from_mode(0o4755)).unwrap();
    fs::hard_link(root.join("bin/tool"), root.join("bin/same")).unwrap();
    fs::write(root.join("etc/empty"), b"").unwrap();
    fs::write(root.join("etc/caf\u{e9}"), b"coffee").unwrap();
    std::os::unix::fs::lchown(root.join("etc/caf\u{e9}"), Some(1234), Some(3_000_000)).unwrap();
    symlink("../bin/tool", root.join("etc/link")).unwrap();
    let deep = root.join("usr/share").join("d".repeat(200)).join("e".repeat(200));
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("f".repeat(250)), b"deep").unwrap();
    symlink("t".repeat(1000), deep.join("far")).unwrap();
    let node = |name: &str, kind, device| {
        rustix::fs::mknodat(rustix::fs::CWD, root.join(name), kind, Mode::from_raw_mode(0o640), device)
            .unwrap();
    };
    node("dev/null", FileType::CharacterDevice, rustix::fs::makedev(1, 3));
    node("dev/fifo", FileType::Fifo, 0);
    rustix::fs::setxattr(root.join("etc/empty"), "user.mark", b"a\0b", rustix::fs::XattrFlags::empty())
        .unwrap();
    // Valid for the kernel: net_raw, permitted.
    let capability = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    rustix::fs::setxattr(
        root.join("bin/tool"),
        "security.capability",
        &capability,
        rustix::fs::XattrFlags::empty(),
    )
    .unwrap();
    let old = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_234_567_890);
    File::open(root.join("etc/empty")).unwrap().set_modified(old).unwrap();
    File::open(root.join("usr/share/empty")).unwrap().set_modified(old).unwrap();
}

/// What must be the same of two files.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    mode: u32,
    owner: (u32, u32),
    mtime: i64,
    links: u64,
    device: u64,
    content: Vec<u8>,
    xattrs: BTreeMap<String, Vec<u8>>,
}

fn look(root: &Path) -> BTreeMap<PathBuf, Seen> {
    let mut found = BTreeMap::new();
    let mut ahead = vec![root.to_owned()];
    while let Some(path) = ahead.pop() {
        let stat = path.symlink_metadata().unwrap();
        let kind = stat.file_type();
        let is_device = kind.is_char_device() || kind.is_block_device();
        let content = if kind.is_dir() {
            ahead.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            Vec::new()
        } else if kind.is_symlink() {
            fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()
        } else if kind.is_file() {
            fs::read(&path).unwrap()
        } else {
            Vec::new()
        };
        let mut xattrs = BTreeMap::new();
        for name in ["user.mark", "security.capability"] {
            let mut value = Vec::with_capacity(100);
            if rustix::fs::lgetxattr(&path, name, rustix::buffer::spare_capacity(&mut value)).is_ok() {
                xattrs.insert(name.to_owned(), value);
            }
        }
        let seen = Seen {
            mode: stat.mode(),
            owner: (stat.uid(), stat.gid()),
            mtime: stat.mtime(),
            links: if kind.is_dir() { 0 } else { stat.nlink() },
            device: if is_device { stat.rdev() } else { 0 },
            content,
            xattrs,
        };
        found.insert(path.strip_prefix(root).unwrap().to_owned(), seen);
    }
    found
}

fn assert_same(one: &Path, other: &Path) {
    let (one, other) = (look(one), look(other));
    assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>());
    for (path, seen) in &one {
        let mut shown = (seen.mode, seen.owner, seen.mtime, seen.links, seen.device, &seen.xattrs);
        let found = &other[path];
        let there = (found.mode, found.owner, found.mtime, found.links, found.device, &found.xattrs);
        // Of the root directory unpackers keep what they like.
        if path.as_os_str().is_empty() {
            shown.2 = there.2;
        }
        assert_eq!(shown, there, "{}", path.display());
        assert!(seen.content == found.content, "{}", path.display());
    }
}

fn write(image: &Path, output: &Path, format: ExportFormat, compression: ExportCompression) {
    let options = ExportOptions {
        image: image.to_owned(),
        format,
        compression,
        tag: Some("registry.example/me/mine:1.0".to_owned()),
        owners: Owners::Usual,
        scratch: scratch_directory(Some(output)),
        output_name: output.display().to_string(),
        threads: NonZeroUsize::new(2).unwrap(),
    };
    let mut out = File::create(output).unwrap();
    let exported = export(&options, &mut out, &mut |_| ()).unwrap();
    assert!(exported.warnings.is_empty(), "{:?}", exported.warnings);
    out.flush().unwrap();
}

/// A directory, and the same as a squashfs image.
fn sources(dir: &Path) -> [PathBuf; 2] {
    let (root, image) = (dir.join("root"), dir.join("image.sqsh"));
    make_tree(&root);
    run(
        "mksquashfs",
        &[root.to_str().unwrap(), image.to_str().unwrap(), "-noappend", "-quiet", "-comp", "gzip"],
    );
    [root, image]
}

#[test]
fn gnu_tar_unpacks_the_same_tree() {
    let dir = TestDir::new("tar");
    for (number, source) in sources(&dir.0).iter().enumerate() {
        for compression in [ExportCompression::None, ExportCompression::Gzip, ExportCompression::Zstd] {
            let (output, target) = (dir.0.join("out.tar"), dir.0.join(format!("{number}{compression:?}")));
            write(source, &output, ExportFormat::Tar, compression);
            fs::create_dir(&target).unwrap();
            let (output, unpacked) = (output.to_str().unwrap(), target.to_str().unwrap());
            let words = [
                "--xattrs",
                "--xattrs-include=*",
                "--numeric-owner",
                "--same-owner",
                "-p",
                "-xf",
                output,
                "-C",
                unpacked,
            ];
            run("tar", &words);
            assert_same(&dir.0.join("root"), &target);
        }
    }
}

#[test]
fn umoci_unpacks_the_same_tree() {
    let dir = TestDir::new("umoci");
    for (number, source) in sources(&dir.0).iter().enumerate() {
        let archive = dir.0.join("out.tar");
        for compression in [ExportCompression::None, ExportCompression::Gzip] {
            write(source, &archive, ExportFormat::OciArchive, compression);
            let layout = dir.0.join(format!("layout{number}{compression:?}"));
            let bundle = dir.0.join(format!("bundle{number}{compression:?}"));
            fs::create_dir(&layout).unwrap();
            run("tar", &["-xf", archive.to_str().unwrap(), "-C", layout.to_str().unwrap()]);
            let image = format!("{}:1.0", layout.display());
            run("umoci", &["unpack", "--image", &image, bundle.to_str().unwrap()]);
            assert_same(&dir.0.join("root"), &bundle.join("rootfs"));
        }
    }
}

#[test]
fn skopeo_reads_and_copies_the_archives() {
    let dir = TestDir::new("skopeo");
    let [_, image] = sources(&dir.0);
    let archive = dir.0.join("out.tar");
    for (format, name) in
        [(ExportFormat::OciArchive, "oci-archive"), (ExportFormat::DockerArchive, "docker-archive")]
    {
        for compression in [ExportCompression::None, ExportCompression::Gzip, ExportCompression::Zstd] {
            // Some releases of skopeo do not know a docker archive that is compressed as a whole.
            if format == ExportFormat::DockerArchive && compression != ExportCompression::None {
                continue;
            }
            write(&image, &archive, format, compression);
            let source = format!("{name}:{}", archive.display());
            let inspected: serde_json::Value =
                serde_json::from_str(&run("skopeo", &["inspect", &source])).unwrap();
            assert_eq!(
                (&inspected["Os"], inspected["Layers"].as_array().unwrap().len()),
                (&"linux".into(), 1)
            );
            let layout = dir.0.join(format!("{name}{compression:?}"));
            // It compares every digest.
            let target = format!("oci:{}:copy", layout.display());
            run("skopeo", &["--insecure-policy", "copy", &source, &target]);
            if compression != ExportCompression::Zstd {
                let bundle = dir.0.join(format!("bundle-{name}{compression:?}"));
                let from = format!("{}:copy", layout.display());
                run("umoci", &["unpack", "--image", &from, bundle.to_str().unwrap()]);
                assert_same(&dir.0.join("root"), &bundle.join("rootfs"));
            }
        }
    }
    let listed = run("tar", &["-xOf", archive.to_str().unwrap(), "manifest.json"]);
    assert!(listed.contains("registry.example/me/mine:1.0"), "{listed}");
}
