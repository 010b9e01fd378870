//! The server, through real mounts, compared with the tree that the image was made from. As root.
//!
//! Each test runs itself again in namespaces of its own: whatever happens, no mount and no server is left.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use common::{Random, TempDir, isolated, make_image, make_sparse, make_tree, run, xattrs};
use rustix::mount::{UnmountFlags, unmount};

const SERVER: &str = env!("CARGO_BIN_EXE_squashfs-serve");

struct Mounted {
    server: Child,
    at: PathBuf,
}

impl Mounted {
    fn new(image: &Path, at: &Path, options: &[&str]) -> Mounted {
        fs::create_dir_all(at).unwrap();
        let before = fs::metadata(at).unwrap().dev();
        let server = Command::new(SERVER).args(options).args([image, at]).spawn().unwrap();
        let start = Instant::now();
        while fs::metadata(at).is_ok_and(|now| now.dev() == before) {
            assert!(start.elapsed() < Duration::from_secs(10), "not mounted");
            std::thread::sleep(Duration::from_millis(1));
        }
        Mounted { server, at: at.to_path_buf() }
    }

    fn peak_memory_kib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.server.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// Unmounts and expects the server to end well by itself.
    fn finish(mut self) {
        unmount(&self.at, UnmountFlags::empty()).unwrap();
        let start = Instant::now();
        while self.server.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < Duration::from_secs(10), "the server is still there");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(self.server.wait().unwrap().success());
    }
}

fn names(path: &Path) -> Vec<OsString> {
    let mut names: Vec<_> = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    names
}

fn assert_same_contents(a: &Path, b: &Path, len: u64) {
    let (file_a, file_b) = (fs::File::open(a).unwrap(), fs::File::open(b).unwrap());
    let (mut bytes_a, mut bytes_b) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    for offset in (0..len).step_by(1 << 20) {
        let count = (len - offset).min(1 << 20) as usize;
        file_a.read_exact_at(&mut bytes_a[..count], offset).unwrap();
        file_b.read_exact_at(&mut bytes_b[..count], offset).unwrap();
        assert!(bytes_a[..count] == bytes_b[..count], "{} differs after byte {offset}", b.display());
    }
    assert_eq!(file_b.read_at(&mut bytes_b, len).unwrap(), 0, "{} is longer", b.display());
}

/// Compares all that can be seen of two trees.
fn assert_same_tree(source: &Path, mounted: &Path, with_xattrs: bool) {
    let mut pairs = vec![(source.to_path_buf(), mounted.to_path_buf())];
    let mut inodes = BTreeMap::new();
    while let Some((a, b)) = pairs.pop() {
        let (meta_a, meta_b) = (fs::symlink_metadata(&a).unwrap(), fs::symlink_metadata(&b).unwrap());
        let facts = |m: &fs::Metadata| (m.mode(), m.uid(), m.gid(), m.mtime(), m.rdev(), m.nlink());
        assert_eq!(facts(&meta_a), facts(&meta_b), "{}", b.display());
        if with_xattrs {
            assert_eq!(xattrs(&a), xattrs(&b), "{}", b.display());
        } else {
            assert!(xattrs(&b).is_empty());
        }
        let other = *inodes.entry(meta_b.ino()).or_insert(meta_a.ino());
        assert_eq!(other, meta_a.ino(), "{}: one inode number, two files", b.display());
        if meta_a.is_dir() {
            assert_eq!(names(&a), names(&b), "{}", b.display());
            pairs.extend(names(&a).into_iter().map(|name| (a.join(&name), b.join(&name))));
            continue;
        }
        assert_eq!(meta_a.len(), meta_b.len(), "{}", b.display());
        if meta_a.is_symlink() {
            assert_eq!(fs::read_link(&a).unwrap(), fs::read_link(&b).unwrap());
        } else if meta_a.is_file() {
            assert_same_contents(&a, &b, meta_a.len());
        } else {
            assert!(meta_a.file_type().is_fifo() || meta_a.rdev() != 0 || meta_a.file_type().is_socket());
        }
    }
}

#[test]
fn every_compressor_and_layout_shows_the_same_tree() {
    if !isolated("every_compressor_and_layout_shows_the_same_tree") {
        return;
    }
    let dir = TempDir::new("layouts");
    make_tree(&dir.join("tree"));
    let layouts: &[&[&str]] = &[
        &["-comp", "gzip"],
        &["-comp", "lzma"],
        &["-comp", "xz"],
        &["-comp", "lzo"],
        &["-comp", "lz4"],
        &["-comp", "lz4", "-Xhc"],
        &["-comp", "zstd"],
        &["-comp", "gzip", "-b", "4K"],
        &["-comp", "lzo", "-b", "4K"],
        &["-comp", "gzip", "-b", "1M"],
        &["-comp", "zstd", "-b", "1M"],
        &["-comp", "lzo", "-b", "1M"],
        &["-comp", "xz", "-b", "1M", "-Xbcj", "x86"],
        &["-comp", "lzma", "-b", "1M"],
        &["-no-fragments"],
        &["-always-use-fragments"],
        &["-no-exports", "-nopad"],
        &["-no-xattrs"],
        &["-noI", "-noD", "-noF", "-noX"],
    ];
    let image = dir.join("image");
    for layout in layouts {
        println!("{layout:?}");
        make_image(&dir.join("tree"), &image, layout);
        let mounted = Mounted::new(&image, &dir.join("mnt"), &[]);
        assert_same_tree(&dir.join("tree"), &mounted.at, !layout.contains(&"-no-xattrs"));
        assert!(mounted.peak_memory_kib() < 64 << 10, "{} KiB", mounted.peak_memory_kib());
        mounted.finish();
    }
}

#[test]
fn an_image_may_start_inside_a_file_and_owners_may_be_fixed() {
    if !isolated("an_image_may_start_inside_a_file_and_owners_may_be_fixed") {
        return;
    }
    let dir = TempDir::new("offset");
    make_tree(&dir.join("tree"));
    make_image(&dir.join("tree"), &dir.join("image"), &["-offset", "12288"]);
    let mounted = Mounted::new(&dir.join("image"), &dir.join("mnt"), &["--offset", "12288"]);
    assert_same_tree(&dir.join("tree"), &mounted.at, true);
    mounted.finish();
    let mounted =
        Mounted::new(&dir.join("image"), &dir.join("mnt"), &["--offset", "12288", "--owner", "7:8"]);
    let file = fs::metadata(mounted.at.join("many/module_1.py")).unwrap();
    assert_eq!((file.uid(), file.gid()), (7, 8));
    assert_eq!(fs::write(mounted.at.join("many/new"), "").unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem);
    let missing = fs::metadata(mounted.at.join("many/missing")).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
    let statfs = rustix::fs::statvfs(&mounted.at).unwrap();
    assert_eq!((statfs.f_bsize, statfs.f_namemax, statfs.f_bfree), (131_072, 255, 0));
    mounted.finish();
}

#[test]
fn a_directory_of_20000_and_a_file_of_3_gib() {
    if !isolated("a_directory_of_20000_and_a_file_of_3_gib") {
        return;
    }
    let dir = TempDir::new("large");
    let big = dir.join("tree/big");
    fs::create_dir_all(&big).unwrap();
    for number in 0..20_000 {
        fs::write(big.join(format!("a rather long file name with the number {number}")), number.to_string())
            .unwrap();
    }
    make_sparse(&dir.join("tree/3GiB"), (3 << 30) + 5, &[(100, 5), (2_600_000_000, 1_000_000), (3 << 30, 5)]);
    for (layout, huge) in [(["-b", "128K"], true), (["-b", "4K"], false)] {
        if !huge {
            fs::remove_file(dir.join("tree/3GiB")).unwrap(); // small blocks take long
        }
        make_image(&dir.join("tree"), &dir.join("image"), &layout);
        let mounted = Mounted::new(&dir.join("image"), &dir.join("mnt"), &[]);
        assert_eq!(names(&mounted.at.join("big")).len(), 20_000);
        assert_same_tree(&dir.join("tree/big"), &mounted.at.join("big"), true);
        if huge {
            assert_same_parts(&dir.join("tree/3GiB"), &mounted.at.join("3GiB"));
        }
        mounted.finish();
    }
}

/// The file of 3 GiB: its length, where its data is, and holes on either side of 2 and 3 GiB.
fn assert_same_parts(one: &Path, other: &Path) {
    assert_eq!(fs::metadata(other).unwrap().len(), (3 << 30) + 5);
    for (offset, length) in [
        (0, 300_000),
        ((2 << 30) - 100_000, 200_000),
        (2_599_900_000, 1_200_000),
        ((3 << 30) - 100_000, 100_005),
    ] {
        let part = |file: &Path| {
            let mut bytes = vec![1; length];
            fs::File::open(file).unwrap().read_exact_at(&mut bytes, offset).unwrap();
            bytes
        };
        assert!(part(one) == part(other), "at {offset}");
    }
}

#[test]
fn sixteen_readers_at_once_stay_within_64_mib() {
    if !isolated("sixteen_readers_at_once_stay_within_64_mib") {
        return;
    }
    let dir = TempDir::new("hammer");
    make_tree(&dir.join("tree"));
    for number in 0..12 {
        fs::write(dir.join("tree").join(format!("large{number}")), Random(number + 1).bytes(9_000_000))
            .unwrap();
    }
    let mut files: Vec<PathBuf> = (0..600).map(|n| format!("many/module_{n}.py").into()).collect();
    files.extend((0..12).map(|n| PathBuf::from(format!("large{n}"))));
    for layout in
        [["-comp", "gzip", "-b", "128K"], ["-comp", "zstd", "-b", "1M"], ["-comp", "xz", "-b", "1M"]]
    {
        make_image(&dir.join("tree"), &dir.join("image"), &layout);
        let mounted = Mounted::new(&dir.join("image"), &dir.join("mnt"), &[]);
        let (tree, at, files) = (&dir.join("tree"), &mounted.at, &files);
        let end = Instant::now() + Duration::from_secs(3);
        std::thread::scope(|scope| {
            for seed in 1..=16 {
                scope.spawn(move || {
                    let mut random = Random(seed);
                    while Instant::now() < end {
                        let name = &files[random.below(files.len() as u64) as usize];
                        let (a, b) = (
                            fs::File::open(tree.join(name)).unwrap(),
                            fs::File::open(at.join(name)).unwrap(),
                        );
                        let len = a.metadata().unwrap().len();
                        let (mut expected, mut got) = (vec![0; 300_000], vec![0; 300_000]);
                        let offset = random.below(len + 1);
                        let count = a.read_at(&mut expected, offset).unwrap();
                        got.truncate(count.max(1));
                        b.read_at(&mut got, offset).unwrap();
                        assert!(expected[..count] == got[..count], "{} at {offset}", name.display());
                        // Have the kernel forget the pages, so that the server is asked again.
                        let _ = rustix::fs::fadvise(&b, 0, None, rustix::fs::Advice::DontNeed);
                    }
                });
            }
        });
        println!("{layout:?}: {} KiB", mounted.peak_memory_kib());
        assert!(mounted.peak_memory_kib() < 64 << 10, "{layout:?}: {} KiB", mounted.peak_memory_kib());
        mounted.finish();
    }
}

#[test]
fn a_killed_server_gives_enotconn_at_once() {
    if !isolated("a_killed_server_gives_enotconn_at_once") {
        return;
    }
    let dir = TempDir::new("killed");
    make_tree(&dir.join("tree"));
    make_image(&dir.join("tree"), &dir.join("image"), &[]);
    let mut mounted = Mounted::new(&dir.join("image"), &dir.join("mnt"), &[]);
    let open = fs::File::open(mounted.at.join("sizes/3000000")).unwrap();
    let mut buffer = [0; 4096];
    open.read_exact_at(&mut buffer, 0).unwrap();
    mounted.server.kill().unwrap();
    mounted.server.wait().unwrap();
    let start = Instant::now();
    let not_connected = Some(rustix::io::Errno::NOTCONN.raw_os_error());
    assert_eq!(open.read_at(&mut buffer, 2_500_000).unwrap_err().raw_os_error(), not_connected);
    let stat = fs::metadata(mounted.at.join("never looked up")).unwrap_err();
    assert_eq!(stat.raw_os_error(), not_connected);
    assert!(start.elapsed() < Duration::from_secs(1));
    drop(open);
    run(Command::new("umount").arg(&mounted.at));
}

/// As mizzen does it: the mount belongs to a user namespace with a single id.
#[test]
fn a_user_namespace_can_mount() {
    if !isolated("a_user_namespace_can_mount") {
        return;
    }
    let dir = TempDir::new("userns");
    make_tree(&dir.join("tree"));
    make_image(&dir.join("tree"), &dir.join("image"), &[]);
    fs::create_dir(dir.join("mnt")).unwrap();
    let script = "\"$1\" --owner 0:0 \"$2\" \"$3\" & until [ -e \"$3/many\" ]; do sleep 0.01; done; \
        stat -c %u:%g \"$3/many/module_2.py\"; cat \"$3/names/ \"; umount \"$3\"; wait";
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", SERVER])
        .args([dir.join("image"), dir.join("mnt")])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0:0\nspace", "{output:?}");
}

#[test]
fn damage_is_an_io_error_for_its_file_only_and_is_reported() {
    if !isolated("damage_is_an_io_error_for_its_file_only_and_is_reported") {
        return;
    }
    let dir = TempDir::new("damaged");
    fs::create_dir(dir.join("tree")).unwrap();
    fs::write(dir.join("tree/1"), "text ".repeat(100_000)).unwrap();
    fs::write(dir.join("tree/2"), "more text ".repeat(100_000)).unwrap();
    make_image(&dir.join("tree"), &dir.join("image"), &[]);
    // The first data block of the first file follows the superblock.
    fs::File::options().write(true).open(dir.join("image")).unwrap().write_all_at(&[0xff; 8], 96).unwrap();
    let script = "\"$1\" \"$2\" \"$3\" & until [ -e \"$3/1\" ]; do sleep 0.01; done; cat \"$3/1\" >/dev/null; \
        cmp \"$3/2\" \"$4\" && echo same; umount \"$3\"; wait";
    fs::create_dir(dir.join("mnt")).unwrap();
    let output = Command::new("sh")
        .args(["-c", script, "sh", SERVER])
        .args([dir.join("image"), dir.join("mnt"), dir.join("tree/2")])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "same\n");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("corrupt image: the gzip block at byte 96 does not decompress"), "{errors}");
    assert!(errors.contains("Input/output error"), "{errors}");
}
