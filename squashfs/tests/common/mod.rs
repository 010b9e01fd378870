//! What the tests share: a directory tree with every kind of file, and images of it.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::ffi::{CString, OsStr};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, chown, lchown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{CWD, FileType, Mode, XattrFlags, lsetxattr, makedev, mknodat};

/// A directory that goes away with its owner.
pub struct TempDir(pub PathBuf);

impl TempDir {
    pub fn new(name: &str) -> TempDir {
        let path = std::env::temp_dir().join(format!("sqfs-test-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        TempDir(path)
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Seeded pseudo-random numbers (xorshift64*), so that a failure can be repeated.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Bytes of which the first half compresses well and the second does not.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let text = (0..len / 2)
            .map(|n| b"the quick brown fox "[n % 20] ^ u8::from(n % 977 == 0))
            .collect::<Vec<_>>();
        text.into_iter().chain((len / 2..len).map(|_| self.next() as u8)).collect()
    }
}

pub fn run(command: &mut Command) {
    let output = command.output().expect("the program can be started");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

pub fn make_image(source: &Path, image: &Path, options: &[&str]) {
    let _ = fs::remove_file(image);
    run(Command::new("mksquashfs")
        .args([source, image])
        .args(["-noappend", "-no-progress", "-quiet"])
        .args(options));
}

/// A tree with files of all types and sizes around the limits of blocks.
pub fn make_tree(root: &Path) {
    let mut random = Random(42);
    fs::create_dir_all(root.join("sizes")).unwrap();
    for size in
        [0, 1, 100, 4095, 4096, 4097, 8192, 131_071, 131_072, 131_073, 262_144, (1 << 20) + 7, 3_000_000]
    {
        fs::write(root.join(format!("sizes/{size}")), random.bytes(size)).unwrap();
    }
    make_sparse(&root.join("sizes/holes"), 5_000_000, &[(0, 10), (1_500_000, 200_000), (4_999_990, 10)]);
    make_sparse(&root.join("sizes/only-a-hole"), 1_000_000, &[]);
    make_sparse(&root.join("sizes/ends-in-a-hole"), 1_000_001, &[(5, 5)]);
    make_names(root);
    make_special(root);
    make_xattrs(root);
    let many = root.join("many");
    fs::create_dir(&many).unwrap();
    for number in 0..600 {
        let len = random.below(3000) as usize;
        fs::write(many.join(format!("module_{number}.py")), random.bytes(len)).unwrap();
    }
    chown(many.join("module_1.py"), Some(1000), Some(65534)).unwrap();
    chown(many.join("module_2.py"), Some(4_000_000_000), Some(3)).unwrap();
    let old = fs::File::open(many.join("module_3.py")).unwrap();
    old.set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(86_400)).unwrap();
    fs::set_permissions(many.join("module_4.py"), fs::Permissions::from_mode(0o6755)).unwrap();
    fs::set_permissions(root.join("empty"), fs::Permissions::from_mode(0o1777)).unwrap();
    let deep = (0..60).fold(root.to_path_buf(), |path, level| path.join(format!("level{level}")));
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("bottom"), "deep").unwrap();
}

/// A file of `len` bytes with data at the given (offset, length) places only.
pub fn make_sparse(path: &Path, len: u64, data: &[(u64, usize)]) {
    let file = fs::File::create(path).unwrap();
    file.set_len(len).unwrap();
    for (offset, count) in data {
        file.write_all_at(&Random(7).bytes(*count), *offset).unwrap();
    }
}

fn make_names(root: &Path) {
    let names = root.join("names");
    fs::create_dir(&names).unwrap();
    fs::create_dir(root.join("empty")).unwrap();
    fs::write(names.join("n".repeat(255)), "long").unwrap();
    fs::write(names.join(OsStr::from_bytes(b"not\xff\xfeUTF-8")), "bytes").unwrap();
    fs::write(names.join("new\nline"), "newline").unwrap();
    fs::write(names.join(" "), "space").unwrap();
    fs::write(names.join("..."), "three dots").unwrap();
    fs::hard_link(names.join(" "), names.join("hard link")).unwrap();
    symlink("../sizes/4097", names.join("link")).unwrap();
    symlink("/names/link", names.join("absolute")).unwrap();
    symlink("loop2", names.join("loop1")).unwrap();
    symlink("loop1", names.join("loop2")).unwrap();
    symlink("t".repeat(4000), names.join("long link")).unwrap();
    symlink("../../../../etc", names.join("outside")).unwrap();
}

fn make_special(root: &Path) {
    let special = root.join("special");
    fs::create_dir(&special).unwrap();
    let mode = Mode::from_raw_mode(0o640);
    mknodat(CWD, special.join("null"), FileType::CharacterDevice, mode, makedev(1, 3)).unwrap();
    mknodat(CWD, special.join("large"), FileType::BlockDevice, mode, makedev(259, 70_000)).unwrap();
    mknodat(CWD, special.join("fifo"), FileType::Fifo, mode, 0).unwrap();
    mknodat(CWD, special.join("socket"), FileType::Socket, mode, 0).unwrap();
}

fn make_xattrs(root: &Path) {
    let dir = root.join("xattrs");
    fs::create_dir(&dir).unwrap();
    let set =
        |path: &Path, name: &str, value: &[u8]| lsetxattr(path, name, value, XattrFlags::empty()).unwrap();
    for name in ["a", "b", "c"] {
        let file = dir.join(name);
        fs::write(&file, name).unwrap();
        set(&file, "user.shared", &[b'v'; 1500]);
        set(&file, "user.own", name.as_bytes());
        set(&file, "user.empty", b"");
        set(&file, "trusted.t", b"t");
    }
    set(
        &dir.join("a"),
        "security.capability",
        b"\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
    );
    set(&dir, "user.of-a-directory", b"d");
    symlink("a", dir.join("link")).unwrap();
    set(&dir.join("link"), "trusted.of-a-link", b"l");
    mknodat(CWD, dir.join("fifo"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    set(&dir.join("fifo"), "trusted.of-a-fifo", b"f");
    lchown(dir.join("link"), Some(12), Some(13)).unwrap();
}

pub fn xattrs(path: &Path) -> BTreeMap<CString, Vec<u8>> {
    let mut list = vec![0; 65536];
    let len = match rustix::fs::llistxattr(path, &mut list[..]) {
        Ok(len) => len,
        Err(rustix::io::Errno::OPNOTSUPP) => 0,
        Err(error) => panic!("{}: {error}", path.display()),
    };
    let names = list[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let value = |name: &[u8]| {
        let mut value = vec![0; 65536];
        let len = rustix::fs::lgetxattr(path, name, &mut value[..]).unwrap();
        (CString::new(name).unwrap(), value[..len].to_vec())
    };
    names.map(value).collect()
}

/// True in the run that does the work; else starts that run and reports its result.
pub fn isolated(test: &str) -> bool {
    if std::env::var_os("SQFS_TEST_ISOLATED").is_some() {
        return true;
    }
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    command.arg(std::env::current_exe().unwrap()).args(["--exact", test, "--nocapture"]);
    // In the new pid namespace every run has the same process id: the directory that is its own comes from here.
    let dir = TempDir::new(test);
    let output = command
        .envs([("SQFS_TEST_ISOLATED", "1".as_ref()), ("TMPDIR", dir.0.as_os_str())])
        .output()
        .expect("unshare can be started");
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    false
}
