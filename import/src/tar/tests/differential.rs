//! Archives of other programs, read by us and by the crate `tar`.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::*;

/// A directory that is gone with the test.
struct TestDir(PathBuf);

impl TestDir {
    fn new(name: &str) -> TestDir {
        let path = std::env::temp_dir().join(format!("mizzen-tar-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        TestDir(path)
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A tree with everything that a format may not have.
fn make_tree(root: &Path, is_long: bool) {
    fs::create_dir_all(root.join("dir/sub")).unwrap();
    fs::write(root.join("dir/empty"), b"").unwrap();
    fs::write(root.join("dir/hello"), b"hello\n").unwrap();
    fs::write(root.join("dir/block"), [7; 512]).unwrap();
    fs::write(root.join("dir/large"), vec![9; 1_000_001]).unwrap();
    fs::hard_link(root.join("dir/hello"), root.join("dir/sub/hard")).unwrap();
    symlink("../hello", root.join("dir/sub/soft")).unwrap();
    fs::set_permissions(root.join("dir/hello"), fs::Permissions::from_mode(0o4711)).unwrap();
    let sparse = fs::File::create(root.join("dir/sparse")).unwrap();
    sparse.set_len(3 << 20).unwrap();
    for i in 0..40u64 {
        sparse.write_at(format!("data {i}").as_bytes(), i * 65536).unwrap();
    }
    let holes = fs::File::create(root.join("dir/holes")).unwrap();
    holes.set_len(1 << 20).unwrap();
    if is_long {
        let deep = root.join("dir").join("d".repeat(120)).join("e".repeat(120));
        fs::create_dir_all(&deep).unwrap();
        fs::write(deep.join("f".repeat(200)), b"deep").unwrap();
        symlink("t".repeat(300), deep.join("link")).unwrap();
        fs::hard_link(deep.join("f".repeat(200)), deep.join("hard")).unwrap();
        fs::write(root.join("dir/caf\u{e9}"), b"name").unwrap();
    }
}

/// What both readers must agree on.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    path: Vec<u8>,
    flag: u8,
    link: Vec<u8>,
    mode: u32,
    uid: u64,
    gid: u64,
    mtime: u64,
    content: Vec<u8>,
}

fn by_us(bytes: &[u8]) -> Vec<Seen> {
    let seen = |(entry, content): (Entry, Vec<u8>)| {
        assert_eq!(entry.size, content.len() as u64);
        let (flag, link) = match entry.kind {
            EntryKind::File => (b'0', Vec::new()),
            EntryKind::HardLink(target) => (b'1', target),
            EntryKind::Symlink(target) => (b'2', target),
            EntryKind::Directory => (b'5', Vec::new()),
            EntryKind::Fifo => (b'6', Vec::new()),
            kind => panic!("{kind:?}"),
        };
        let Entry { path, mode, uid, gid, mtime, .. } = entry;
        Seen { path, flag, link, mode: u32::from(mode), uid, gid, mtime: mtime as u64, content }
    };
    read(bytes).unwrap().into_iter().map(seen).collect()
}

fn by_the_crate(bytes: &[u8]) -> Vec<Seen> {
    let mut archive = ::tar::Archive::new(bytes);
    let seen = |entry: io::Result<::tar::Entry<&[u8]>>| {
        let mut entry = entry.unwrap();
        let header = entry.header().clone();
        let path = entry.path_bytes().into_owned();
        let flag = match header.entry_type().as_byte() {
            // v7 has no other way.
            0 | b'0' if path.ends_with(b"/") => b'5',
            0 | b'S' => b'0',
            flag => flag,
        };
        let link = match flag {
            b'1' | b'2' => entry.link_name_bytes().unwrap().into_owned(),
            _ => Vec::new(),
        };
        // The crate leaves this record to its users.
        let records = entry.pax_extensions().unwrap();
        let mtime = records.and_then(|mut records| {
            records.find_map(|record| {
                let record = record.unwrap();
                let seconds = record.value().unwrap().split('.').next().unwrap();
                (record.key() == Ok("mtime")).then(|| seconds.parse().unwrap())
            })
        });
        let mtime = mtime.unwrap_or_else(|| header.mtime().unwrap());
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        let (mode, uid, gid) =
            (header.mode().unwrap() & 0o7777, header.uid().unwrap(), header.gid().unwrap());
        Seen { path, flag, link, mode, uid, gid, mtime, content }
    };
    archive.entries().unwrap().map(seen).collect()
}

fn run(command: &mut Command) -> Vec<u8> {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Compares without printing a megabyte.
fn assert_same(ours: &[Seen], theirs: &[Seen], what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (our, their) in ours.iter().zip(theirs) {
        assert!(our == their, "{what}: {} differs", String::from_utf8_lossy(&our.path));
    }
}

#[test]
fn archives_of_gnu_tar() {
    for format in ["v7", "ustar", "gnu", "oldgnu", "pax"] {
        let dir = TestDir::new(format);
        let is_long = matches!(format, "gnu" | "oldgnu" | "pax");
        make_tree(&dir.0, is_long);
        let tar = |options: &[&str]| {
            run(Command::new("tar").arg("-C").arg(&dir.0).args(options).args(["-cf", "-", "dir"]))
        };
        let plain = tar(&["--format", format]);
        let ours = by_us(&plain);
        assert_same(&ours, &by_the_crate(&plain), format);
        assert_eq!(ours.len(), if is_long { 16 } else { 10 }, "{format}");
        let versions: &[&str] = match format {
            "gnu" | "oldgnu" => &["--sparse"],
            "pax" => &["--sparse-version=0.0", "--sparse-version=0.1", "--sparse-version=1.0"],
            _ => &[],
        };
        for version in versions {
            let sparse = tar(&["--format", format, "--sparse", version]);
            assert!(sparse.len() < 2 << 20, "{version}");
            let sparse = by_us(&sparse);
            // The same tree, whatever the holes.
            assert_same(&sparse, &ours, version);
        }
    }
}

#[test]
fn archives_of_python() {
    const PROGRAM: &str = r#"
import io, sys, tarfile
form = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}[sys.argv[1]]
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=form) as archive:
    for i in range(50):
        info = tarfile.TarInfo("d" * (i % 90) + "/" + "n" * (i * 3 % 90 + 1))
        if form != tarfile.USTAR_FORMAT:
            info.name += "/" + "m" * (5 * i + 1)
            info.uid = 1 << (i % 31)
            info.mtime = i << 31
        info.mode = i * 77 & 0o7777
        info.type = [tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE][i % 6]
        if info.type in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            info.linkname = "t" * (i * 2 + 1 if form == tarfile.USTAR_FORMAT else i * 9 + 1)
        if info.isreg():
            info.size = i * 100
        archive.addfile(info, io.BytesIO(bytes([i]) * info.size))
"#;
    for format in ["ustar", "gnu", "pax"] {
        let bytes = run(Command::new("python3").args(["-c", PROGRAM, format]));
        let ours = by_us(&bytes);
        assert_same(&ours, &by_the_crate(&bytes), format);
        assert_eq!(ours.len(), 50);
    }
}

#[test]
fn attributes_and_times_of_gnu_tar() {
    let dir = TestDir::new("xattrs");
    fs::write(dir.0.join("f"), b"x").unwrap();
    let archive = run(Command::new("tar").arg("-C").arg(&dir.0).args([
        "--format=pax",
        "--mtime=1969-12-31 23:59:58.5Z",
        "--pax-option=SCHILY.xattr.user.own:=value",
        "-cf",
        "-",
        "f",
    ]));
    let entry = one(&archive);
    assert_eq!(entry.mtime, -2);
    assert_eq!(entry.xattrs[b"user.own".as_slice()], b"value");
}
