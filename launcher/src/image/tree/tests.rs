//! Hostile trees: nothing in an image may lead a look out of it.

use super::super::testing::Scratch;
use super::*;
use std::os::unix::ffi::OsStringExt;

const FILE: Option<Entry> = Some(Entry::File { executable: false });

fn open(image: &Scratch) -> DirectoryTree {
    DirectoryTree::open(image.path()).unwrap()
}

fn resolved(image: &Scratch, path: &str) -> io::Result<(String, Option<Entry>, String)> {
    let found = resolve(&open(image), Path::new(path))?;
    let text = |path: PathBuf| path.into_os_string().into_string().unwrap();
    Ok((text(found.path), found.entry, text(found.existing)))
}

fn error_of(image: &Scratch, path: &str) -> Option<i32> {
    resolved(image, path).unwrap_err().raw_os_error()
}

fn expect(image: &Scratch, path: &str, found: &str, entry: Option<Entry>, existing: &str) {
    assert_eq!(resolved(image, path).unwrap(), (found.to_owned(), entry, existing.to_owned()), "{path}");
}

/// An image beside which a secret lies.
fn image_with_secret() -> (Scratch, Scratch) {
    let outside = Scratch::new();
    outside.file("secret", "do not read");
    let image = Scratch::new();
    image.file("etc/passwd", "inside");
    image.directory("usr/lib");
    (image, outside)
}

#[test]
fn plain_paths() {
    let (image, _outside) = image_with_secret();
    image.executable("usr/tool", "x");
    expect(&image, "/", "/", Some(Entry::Directory), "/");
    expect(&image, "", "/", Some(Entry::Directory), "/");
    expect(&image, "etc/passwd", "/etc/passwd", FILE, "/etc");
    expect(&image, "//usr/./lib/", "/usr/lib", Some(Entry::Directory), "/usr/lib");
    expect(&image, "/usr/tool", "/usr/tool", Some(Entry::File { executable: true }), "/usr");
    expect(&image, "/usr/new/deep/./er", "/usr/new/deep/er", None, "/usr");
    assert_eq!(error_of(&image, "/etc/passwd/x"), Some(libc::ENOTDIR));
    assert_eq!(error_of(&image, "/etc/passwd/."), Some(libc::ENOTDIR));
    assert_eq!(error_of(&image, "/etc/passwd/.."), Some(libc::ENOTDIR));
    assert_eq!(error_of(&image, "/new/../etc/passwd"), Some(libc::ENOENT));
}

#[test]
fn dots_do_not_leave_the_root() {
    let (image, outside) = image_with_secret();
    expect(&image, "/../../../../etc/passwd", "/etc/passwd", FILE, "/etc");
    expect(&image, "/usr/../..", "/", Some(Entry::Directory), "/");
    image.link("up", "../../../../../../../../../..");
    expect(&image, "/up/etc/passwd", "/etc/passwd", FILE, "/etc");
    let secret = format!("/up{}/secret", outside.path().display());
    assert_eq!(resolved(&image, &secret).unwrap().1, None);
}

#[test]
fn links_mean_the_images_root() {
    let (image, outside) = image_with_secret();
    image.link("root", "/");
    expect(&image, "/root/root/root/etc/passwd", "/etc/passwd", FILE, "/etc");
    expect(&image, "/root", "/", Some(Entry::Directory), "/");
    image.link("lib", "usr/lib");
    expect(&image, "/lib", "/usr/lib", Some(Entry::Directory), "/usr/lib");
    expect(&image, "/lib/../lib/x", "/usr/lib/x", None, "/usr/lib");
    image.link("shadow", &format!("{}/secret", outside.path().display()));
    assert_eq!(resolved(&image, "/shadow").unwrap().1, None);
    assert_eq!(read_file(&open(&image), Path::new("/shadow"), 100).unwrap(), None);
    image.link("dangling", "nowhere/at/all");
    expect(&image, "/dangling/x", "/nowhere/at/all/x", None, "/");
}

#[test]
fn etc_itself_is_hostile() {
    for (target, path, found) in [
        ("/", "/etc/hosts", "/hosts"),
        ("../../../../usr", "/etc/hosts", "/usr/hosts"),
        ("/usr/../..", "/etc/hosts", "/hosts"),
    ] {
        let image = Scratch::new();
        image.directory("usr");
        image.link("etc", target);
        assert_eq!(resolved(&image, path).unwrap().0, found, "/etc -> {target}");
    }
    for target in ["../../../../etc", "/etc", "etc/./etc", "/etc/../etc"] {
        let image = Scratch::new();
        image.link("etc", target);
        assert_eq!(error_of(&image, "/etc/hosts"), Some(libc::ELOOP), "/etc -> {target}");
    }
}

#[test]
fn forty_links_and_not_one_more() {
    let image = Scratch::new();
    image.file("l0", "end");
    for n in 1..=41 {
        image.link(&format!("l{n}"), &format!("l{}", n - 1));
    }
    expect(&image, "/l40", "/l0", FILE, "/");
    assert_eq!(error_of(&image, "/l41"), Some(libc::ELOOP));
    image.link("a", "b");
    image.link("b", "a");
    assert_eq!(error_of(&image, "/a"), Some(libc::ELOOP));
    image.link("bomb", "bomb/bomb/bomb/bomb/bomb/bomb/bomb/bomb");
    assert_eq!(error_of(&image, "/bomb"), Some(libc::ELOOP), "the pending names stay bounded");
}

#[test]
fn the_kernel_never_follows_a_link() {
    let (image, outside) = image_with_secret();
    image.link("out", outside.path().to_str().unwrap());
    let tree = open(&image);
    // These break the trait's contract: the answer must be wrong or an error, but never the outside.
    assert_eq!(tree.entry(Path::new("/out")).unwrap(), Some(Entry::Symlink));
    assert_eq!(tree.entry(Path::new("/out/secret")).unwrap(), None);
    assert_eq!(tree.read(Path::new("/out/secret"), 9).unwrap_err().raw_os_error(), Some(libc::ENOENT));
    assert_eq!(tree.read(Path::new("/out"), 9).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    assert!(tree.list(Path::new("/out")).is_err());
    assert!(tree.read_link(Path::new("/out/secret")).is_err());
    assert_eq!(tree.entry(Path::new("../x")).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    assert_eq!(tree.read(Path::new("/etc/../x"), 9).unwrap_err().raw_os_error(), Some(libc::EINVAL));
}

#[test]
fn magic_links_are_only_text() {
    // The host's own root as an image: /proc/self/root and /proc/PID/cwd are there and real.
    let tree = DirectoryTree::open(Path::new("/")).unwrap();
    let id = std::process::id();
    assert_eq!(tree.entry(Path::new(&format!("/proc/{id}/root"))).unwrap(), Some(Entry::Symlink));
    let found = resolve(&tree, Path::new(&format!("/proc/{id}/root/etc"))).unwrap();
    assert_eq!(found.path, Path::new("/etc"), "read as text, the link says /");
    // From inside a smaller root the same names do not exist.
    let image = Scratch::new();
    image.link("escape", "/proc/self/root");
    image.link("cwd", "/proc/1/cwd");
    expect(&image, "/escape/etc/passwd", "/proc/self/root/etc/passwd", None, "/");
    expect(&image, "/cwd", "/proc/1/cwd", None, "/");
    // An open file's link says "/path" or "socket:[1]": never what it opens.
    let file = File::open(image.file("note", "text")).unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&file);
    let path = format!("/proc/{id}/fd/{number}");
    assert!(tree.read(Path::new(&path), 9).is_err());
}

#[test]
fn strange_names() {
    let image = Scratch::new();
    let strange = OsString::from_vec(b"new\nline \xff\xfe".to_vec());
    std::fs::create_dir(image.path().join(&strange)).unwrap();
    std::fs::write(image.path().join(&strange).join("f"), "x").unwrap();
    std::os::unix::fs::symlink(Path::new("/").join(&strange), image.path().join("l")).unwrap();
    let tree = open(&image);
    let found = resolve(&tree, Path::new("/l/f")).unwrap();
    assert_eq!(found.path, Path::new("/").join(&strange).join("f"));
    assert_eq!(tree.read(&found.path, 9).unwrap(), b"x");
    assert!(tree.list(Path::new("/")).unwrap().contains(&(strange, Entry::Directory)));
    let long = "n".repeat(300);
    assert!(tree.entry(Path::new(&long)).is_err(), "ENAMETOOLONG is an error, not absence");
}

#[test]
fn files_are_read_with_a_limit_and_devices_never() {
    let image = Scratch::new();
    image.file("ten", "0123456789");
    image.directory("dir");
    let tree = open(&image);
    let error = |path: &str| read_file(&tree, Path::new(path), 10).unwrap_err().raw_os_error();
    assert_eq!(read_file(&tree, Path::new("/ten"), 10).unwrap().unwrap(), b"0123456789");
    assert_eq!(read_file(&tree, Path::new("/ten"), 9).unwrap_err().raw_os_error(), Some(libc::EFBIG));
    assert_eq!(tree.read(Path::new("/ten"), 4).unwrap(), b"0123");
    assert_eq!(error("/dir"), Some(libc::EISDIR));
    assert_eq!(read_file(&tree, Path::new("/none"), 10).unwrap(), None);
    let fifo = image.path().join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RWXU).unwrap();
    assert_eq!(tree.entry(Path::new("/fifo")).unwrap(), Some(Entry::Other));
    assert_eq!(error("/fifo"), Some(libc::EINVAL));
    let host = DirectoryTree::open(Path::new("/")).unwrap();
    let zero = read_file(&host, Path::new("/dev/zero"), 10);
    assert_eq!(zero.unwrap_err().raw_os_error(), Some(libc::EINVAL));
}

#[test]
fn a_directory_swapped_for_a_link_while_we_look() {
    let (image, outside) = image_with_secret();
    outside.file("passwd", "outside");
    let (real, link) = (image.path().join("etc"), image.path().join("swap"));
    std::os::unix::fs::symlink(outside.path(), &link).unwrap();
    let tree = open(&image);
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                let _ = rustix::fs::renameat_with(
                    rustix::fs::CWD,
                    &real,
                    rustix::fs::CWD,
                    &link,
                    rustix::fs::RenameFlags::EXCHANGE,
                );
            }
        });
        let read = |_| read_file(&tree, Path::new("/etc/passwd"), 100).ok().flatten();
        let all_inside = (0..3000).filter_map(read).all(|content| content == b"inside");
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(all_inside);
    });
}
