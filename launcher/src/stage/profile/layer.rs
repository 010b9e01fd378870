//! A layer: files of an image, unpacked, which an overlay puts over the image. Runs as the user on the host.
//!
//!     unpacked-KEY-N/
//!       files/     the files, with the directories that they are in
//!       manifest   the boot of the node, and one line for each of them: its inode, its time of change, its size, its path; written last
//!
//!     unpacking-KEY/   one that is being made
//!       files/
//!       journal        the boot of the node, how much it will be, and the same lines for what is done
//!
//! The kernel reads the files, so nobody can check what it reads. A layer is used only in the boot in which it was made: a node that
//! loses power may lose what it has not written, and nobody waits for the disk (in a step that ends, such a wait cannot be
//! killed, and would cost the node). A file's time of change (ctime) tells of every later write, and no user can set it. All of a
//! layer is compared with its manifest before it is used, the directories too: theirs tells of every name that came or went. What
//! differs is set aside and unpacked again. What a disk loses by itself is not seen, as with every file on it; those who ask for an
//! image by its digest get no layers.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::SystemTime;

use nix::unistd::geteuid;
use rustix::fs::{
    AtFlags, FileType, FlockOperation, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT,
    flock, fstat, futimens, openat, statat,
};

use super::reads::is_path;
use crate::remove_tree;
use crate::stage::cache::{BROKEN, Cache};
use crate::stage::partial::boot;
use crate::trace::OrDebug;
use tracing::debug;

/// Begins the name of a layer.
pub const UNPACKED: &str = "unpacked-";
/// Begins the name of a layer that is being made.
pub const UNPACKING: &str = "unpacking-";
/// The directory with the files.
pub const FILES_NAME: &str = "files";
/// What says that they are complete.
pub const MANIFEST: &str = "manifest";
/// What says which of them are.
pub const JOURNAL: &str = "journal";
const NEW_JOURNAL: &str = "journal.new";

const HEAD: &str = "mizzen-unpacked 3";
const JOURNAL_HEAD: &str = "mizzen-unpacking 1";
const TAIL: &str = "end";

/// Starts of one program may differ; more layers than this only make looking up names slower.
pub const MAX_LAYERS: usize = 4;
/// Each file of a layer is looked at in each start.
pub const MAX_FILES: usize = 8192;
/// Names in a layer: as many directories.
const MAX_NAMES: usize = 8 * MAX_FILES;
const MANIFEST_LIMIT: u64 = 16 << 20;

/// Unpacked files of an image.
#[derive(Debug)]
pub struct Layer {
    /// The directory with them.
    pub path: PathBuf,
    /// What that is.
    pub dev: u64,
    pub ino: u64,
    /// Keeps it from being removed.
    pub lock: OwnedFd,
    /// The files that it has, as paths in the image.
    pub files: HashSet<Vec<u8>>,
}

/// What a line is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    File,
    /// The beginning of a file, as far as it is written.
    Part,
    Directory,
}

impl What {
    fn letter(self) -> &'static str {
        match self {
            What::File => "f",
            What::Part => "p",
            What::Directory => "d",
        }
    }
}

/// A file or directory of a layer, as it was when it was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unpacked {
    pub what: What,
    pub ino: u64,
    pub changed: (i64, i64),
    /// Of a directory, nothing.
    pub size: u64,
    pub path: Vec<u8>,
}

impl Unpacked {
    /// What it is now.
    pub fn new(stat: &Stat, path: &[u8]) -> Unpacked {
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        Unpacked {
            what: if is_directory { What::Directory } else { What::File },
            ino: stat.st_ino,
            changed: (stat.st_ctime, i64::try_from(stat.st_ctime_nsec).unwrap_or(-1)),
            size: if is_directory { 0 } else { u64::try_from(stat.st_size).unwrap_or(0) },
            path: path.to_owned(),
        }
    }

    /// As text.
    pub fn line(&self) -> Vec<u8> {
        let Unpacked { what, ino, changed: (seconds, nanoseconds), size, path } = self;
        let numbers = format!("{} {ino} {seconds} {nanoseconds} {size} ", what.letter());
        [numbers.as_bytes(), path, b"\n"].concat()
    }

    /// Reads a line, without its end.
    fn parse(line: &[u8]) -> Option<Unpacked> {
        let mut words = line.splitn(6, |byte| *byte == b' ');
        let mut word = || std::str::from_utf8(words.next()?).ok();
        let (letter, ino, seconds, nanoseconds, size) = (word()?, word()?, word()?, word()?, word()?);
        let what =
            [What::File, What::Part, What::Directory].into_iter().find(|what| what.letter() == letter)?;
        let changed = (seconds.parse().ok()?, nanoseconds.parse().ok()?);
        let is_root = |path: &[u8]| what == What::Directory && path == b"/";
        let path = words.next().filter(|path| is_root(path) || is_path(path))?.to_vec();
        Some(Unpacked { what, ino: ino.parse().ok()?, changed, size: size.parse().ok()?, path })
    }
}

/// Whether it is a file of this user's.
pub fn is_own_file(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && stat.st_uid == geteuid().as_raw()
}

/// What a complete layer has.
#[derive(Debug, PartialEq, Eq)]
pub struct Manifest {
    /// The boot of the node in which it was made.
    pub boot: String,
    /// Its files and directories.
    pub files: Vec<Unpacked>,
}

impl Manifest {
    /// As text.
    pub fn text(&self) -> Vec<u8> {
        let mut text = format!("{HEAD} {}\n", self.boot).into_bytes();
        text.extend(self.files.iter().flat_map(Unpacked::line));
        text.extend_from_slice(format!("{TAIL}\n").as_bytes());
        text
    }

    /// Reads it. None if it is not complete.
    pub fn parse(text: &[u8]) -> Option<Manifest> {
        let mut lines = text.strip_suffix(b"\n")?.split(|byte| *byte == b'\n');
        let head = std::str::from_utf8(lines.next()?).ok()?;
        let boot = head.strip_prefix(HEAD)?.strip_prefix(' ')?.to_owned();
        let mut lines: Vec<&[u8]> = lines.collect();
        if lines.pop() != Some(TAIL.as_bytes()) || lines.len() > MAX_NAMES {
            return None;
        }
        let whole = |line: &&[u8]| Unpacked::parse(line).filter(|unpacked| unpacked.what != What::Part);
        Some(Manifest { boot, files: lines.iter().map(whole).collect::<Option<_>>()? })
    }

    /// Writes it. It is believed in this boot alone, so nobody waits for the disk.
    pub fn write(&self, directory: &OwnedFd) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(directory, MANIFEST, flags, Mode::RUSR | Mode::WUSR)?;
        File::from(file).write_all(&self.text())
    }
}

/// What is written down of a layer that is being made.
#[derive(Debug, PartialEq, Eq)]
pub struct Journal {
    /// The boot of the node: nothing of it is on disk for certain.
    pub boot: String,
    /// What its files will take.
    pub size: u64,
    /// What is done, and of each file the last that was said of it.
    pub files: Vec<Unpacked>,
}

impl Journal {
    /// Reads that of an open directory.
    pub fn read(directory: &OwnedFd) -> Option<Journal> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let mut text = Vec::new();
        let file = File::from(openat(directory, JOURNAL, flags, Mode::empty()).ok()?);
        file.take(MANIFEST_LIMIT).read_to_end(&mut text).ok()?;
        Journal::parse(&text)
    }

    /// Whoever wrote it may have been killed: the last line may not be whole.
    pub fn parse(text: &[u8]) -> Option<Journal> {
        let mut lines =
            text.split_inclusive(|byte| *byte == b'\n').map_while(|line| line.strip_suffix(b"\n"));
        let head = std::str::from_utf8(lines.next()?).ok()?.strip_prefix(JOURNAL_HEAD)?;
        let (boot, size) = head.strip_prefix(' ')?.split_once(' ')?;
        let mut last: BTreeMap<Vec<u8>, Unpacked> = BTreeMap::new();
        for file in lines.map_while(Unpacked::parse).filter(|file| file.what != What::Directory) {
            last.insert(file.path.clone(), file);
        }
        Some(Journal { boot: boot.to_owned(), size: size.parse().ok()?, files: last.into_values().collect() })
    }

    fn text(&self) -> Vec<u8> {
        let head = format!("{JOURNAL_HEAD} {} {}\n", self.boot, self.size);
        head.into_bytes().into_iter().chain(self.files.iter().flat_map(Unpacked::line)).collect()
    }

    /// Writes it anew.
    pub fn write(&self, directory: &OwnedFd) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(directory, NEW_JOURNAL, flags, Mode::RUSR | Mode::WUSR)?;
        File::from(file).write_all(&self.text())?;
        Ok(rustix::fs::renameat(directory, NEW_JOURNAL, directory, JOURNAL)?)
    }

    /// Opens it, to add lines.
    pub fn append(directory: &OwnedFd) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(openat(directory, JOURNAL, flags, Mode::empty())?.into())
    }
}

impl Layer {
    /// The layers of a profile, the last one first.
    pub fn find(cache: &Cache, key: &str) -> Vec<Layer> {
        let mut layers = Vec::new();
        for number in 0..MAX_LAYERS {
            let name = name(key, number);
            match Layer::open(cache, &name) {
                Ok(Some(layer)) => layers.insert(0, layer),
                Ok(None) => break,
                Err(why) => {
                    debug!(name, why, "unpacked files are not used");
                    set_aside(cache, &name);
                    break;
                }
            }
        }
        layers
    }

    /// Opens one and compares it with its manifest. None if it is not there, or is being removed.
    fn open(cache: &Cache, name: &str) -> Result<Option<Layer>, &'static str> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(lock) = openat(&cache.dir, name, flags, Mode::empty()) else { return Ok(None) };
        if flock(&lock, FlockOperation::NonBlockingLockShared).is_err() {
            return Ok(None);
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let manifest = openat(&lock, MANIFEST, flags, Mode::empty()).map_err(|_| "there is no manifest")?;
        let mut text = Vec::new();
        let mut manifest = File::from(manifest);
        let read = (&mut manifest).take(MANIFEST_LIMIT).read_to_end(&mut text);
        read.map_err(|_| "the manifest cannot be read")?;
        let Manifest { boot: made, files: expected } =
            Manifest::parse(&text).ok_or("the manifest is not whole")?;
        let now = boot();
        if now.is_empty() || made != now {
            return Err("they were unpacked before the node was booted");
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = openat(&lock, FILES_NAME, flags, Mode::empty()).map_err(|_| "there are no files")?;
        for file in &expected {
            let stat = match file.path.strip_prefix(b"/").filter(|relative| !relative.is_empty()) {
                None => fstat(&directory),
                Some(relative) => statat(&directory, relative, AtFlags::SYMLINK_NOFOLLOW),
            };
            let stat = stat.map_err(|_| "a file is missing")?;
            if stat.st_uid != geteuid().as_raw() || Unpacked::new(&stat, &file.path) != *file {
                return Err("a file has been changed");
            }
            if file.what == What::File && !is_own_file(&stat) {
                return Err("a file is none");
            }
        }
        let stat = fstat(&directory).map_err(|_| "there are no files")?;
        // Marks it as used just now: those that were not used for the longest time go first.
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let same = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
        let _ = futimens(&manifest, &Timestamps { last_access: same, last_modification: now });
        Ok(Some(Layer {
            path: cache.path.join(name).join(FILES_NAME),
            dev: stat.st_dev,
            ino: stat.st_ino,
            lock,
            files: expected
                .into_iter()
                .filter(|file| file.what == What::File)
                .map(|file| file.path)
                .collect(),
        }))
    }
}

/// The name of the `number`-th layer.
pub fn name(key: &str, number: usize) -> String {
    format!("{UNPACKED}{key}-{number}")
}

/// A layer among others, as its manifest or its journal tells.
pub struct Listed {
    pub name: String,
    /// Whether it is complete.
    pub is_whole: bool,
    /// What its files take, or will take.
    pub size: u64,
    /// When it was last used, in seconds since 1970.
    pub used: i64,
}

/// All layers of a user.
pub fn list(cache: &Cache) -> Vec<Listed> {
    let names = |prefix| cache.names(prefix).unwrap_or_default();
    let listed = |name: String, is_whole| {
        let directory = openat(&cache.dir, &*name, DIRECTORY_FLAGS, Mode::empty()).ok();
        let size = directory.as_ref().and_then(|directory| {
            if is_whole {
                let Manifest { files, .. } = Manifest::parse(&read_manifest(directory))?;
                Some(files.iter().fold(0_u64, |sum, file| sum.saturating_add(file.size)))
            } else {
                Journal::read(directory).map(|journal| journal.size)
            }
        });
        let file = if is_whole { MANIFEST } else { JOURNAL };
        let stat = directory.map(|directory| statat(directory, file, AtFlags::SYMLINK_NOFOLLOW));
        let used = stat.and_then(Result::ok).map_or(0, |stat| stat.st_mtime);
        Listed { name, is_whole, size: size.unwrap_or(0), used }
    };
    let whole = names(UNPACKED).into_iter().map(|name| listed(name, true));
    whole.chain(names(UNPACKING).into_iter().map(|name| listed(name, false))).collect()
}

const DIRECTORY_FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn read_manifest(directory: &OwnedFd) -> Vec<u8> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut text = Vec::new();
    if let Ok(file) = openat(directory, MANIFEST, flags, Mode::empty()) {
        let _ = File::from(file).take(MANIFEST_LIMIT).read_to_end(&mut text);
    }
    text
}

/// Takes a layer out of the way. It is removed by an unpacker, or when room is made: a start does not wait for that.
fn set_aside(cache: &Cache, name: &str) {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_nanos());
    let aside = format!("{BROKEN}{name}-{now}");
    rustix::fs::renameat(&cache.dir, name, &cache.dir, &*aside).or_debug("unpacked files stay");
}

/// Removes a layer, whole or not, unless somebody uses it.
pub fn remove(cache: &Cache, name: &str) -> bool {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(directory) = openat(&cache.dir, name, flags, Mode::empty()) else { return false };
    if flock(&directory, FlockOperation::NonBlockingLockExclusive).is_err() {
        return false;
    }
    let os_name = std::ffi::OsStr::from_bytes(name.as_bytes());
    let parent = std::os::fd::AsFd::as_fd(&cache.dir);
    remove_tree::remove(parent, os_name, std::os::fd::AsFd::as_fd(&directory), &mut { MAX_NAMES }).is_ok()
}

/// Removes all layers that nobody uses, those that were not used for the longest time first, until `is_enough`; tells how many
/// bytes they had.
pub fn remove_all(cache: &Cache, mut is_enough: impl FnMut() -> bool) -> u64 {
    let mut layers = list(cache);
    layers.sort_by_key(|layer| layer.used);
    let mut freed = 0;
    for layer in layers {
        if is_enough() {
            break;
        }
        if remove(cache, &layer.name) {
            freed += layer.size;
        }
    }
    freed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::testing::Scratch;
    use std::os::fd::AsFd;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    /// A layer with one file, and where that is.
    fn layer_with(cache: &Cache, key: &str, number: usize) -> PathBuf {
        let directory = cache.path.join(name(key, number));
        let file = directory.join("files/usr/lib/libx.so");
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, "content").unwrap();
        let unpacked =
            |path: &[u8], file: &Path| Unpacked::new(&fstat(File::open(file).unwrap()).unwrap(), path);
        let files = vec![
            unpacked(b"/", &directory.join("files")),
            unpacked(b"/usr/lib", file.parent().unwrap()),
            unpacked(b"/usr/lib/libx.so", &file),
        ];
        std::fs::write(directory.join(MANIFEST), Manifest { boot: boot(), files }.text()).unwrap();
        file
    }

    #[test]
    fn a_layer_is_used_as_long_as_nobody_has_touched_it() {
        /// What somebody does to a layer, given its file.
        type Change = fn(&Path);
        let changes: [(Change, bool); 10] = [
            (|_| (), true),
            (|file| assert_eq!(std::fs::read(file).unwrap(), b"content"), true),
            (|file| std::fs::write(file, "CONTENT").unwrap(), false),
            (|file| std::fs::remove_file(file).unwrap(), false),
            // Names that the image does not have.
            (|file| std::fs::write(file.with_extension("more"), "").unwrap(), false),
            (|file| std::fs::create_dir(file.ancestors().nth(3).unwrap().join("more")).unwrap(), false),
            (
                |file| {
                    std::fs::set_permissions(file.parent().unwrap(), PermissionsExt::from_mode(0o700))
                        .unwrap()
                },
                false,
            ),
            (
                |file| {
                    std::fs::copy(file, file.with_extension("new")).unwrap();
                    std::fs::rename(file.with_extension("new"), file).unwrap();
                },
                false,
            ),
            (
                |file| {
                    let manifest = file.ancestors().nth(4).unwrap().join(MANIFEST);
                    let text = std::fs::read(&manifest).unwrap();
                    std::fs::write(manifest, &text[..text.len() - 2]).unwrap();
                },
                false,
            ),
            // One of before the node was booted, in which some of it may never have reached the disk.
            (
                |file| {
                    let manifest = file.ancestors().nth(4).unwrap().join(MANIFEST);
                    let Manifest { files, .. } = Manifest::parse(&std::fs::read(&manifest).unwrap()).unwrap();
                    let other = "00000000-0000-0000-0000-000000000000".to_owned();
                    std::fs::write(manifest, Manifest { boot: other, files }.text()).unwrap();
                },
                false,
            ),
        ];
        for (index, (change, good)) in changes.into_iter().enumerate() {
            let scratch = Scratch::new();
            let cache = Cache::open(scratch.path()).unwrap();
            let file = layer_with(&cache, "k", 0);
            layer_with(&cache, "k", 1);
            // Times of files have the kernel's tick.
            std::thread::sleep(std::time::Duration::from_millis(20));
            change(&file);
            let found = Layer::find(&cache, "k");
            assert_eq!(found.len(), if good { 2 } else { 0 }, "change {index}");
            assert!(found.iter().all(|layer| layer.files.contains(&b"/usr/lib/libx.so"[..])));
            assert_eq!(cache.path.join(name("k", 0)).exists(), good, "change {index}: set aside");
        }
    }

    #[test]
    fn what_is_in_use_stays_and_the_rest_goes() {
        let scratch = Scratch::new();
        let cache = Cache::open(scratch.path()).unwrap();
        layer_with(&cache, "used", 0);
        layer_with(&cache, "unused", 0);
        let used = Layer::find(&cache, "used");
        assert_eq!(remove_all(&cache, || false), 7);
        assert_eq!(cache.names(UNPACKED).unwrap(), [name("used", 0)]);
        assert!(used[0].lock.as_fd().try_clone_to_owned().is_ok());
        drop(used);
        assert_eq!(remove_all(&cache, || true), 0, "there is enough room");
        assert_eq!(remove_all(&cache, || false), 7);
    }

    #[test]
    fn manifests_survive_their_text_and_no_others_are_read() {
        let file =
            Unpacked { what: What::File, ino: 7, changed: (-1, 999), size: 5, path: b"/a b/c".to_vec() };
        let root = Unpacked { what: What::Directory, path: b"/".to_vec(), size: 0, ..file.clone() };
        let manifest = |files| Manifest { boot: "b".to_owned(), files };
        let text = manifest(vec![root, file]).text();
        assert_eq!(Manifest::parse(&text).unwrap().text(), text);
        assert_eq!(Manifest::parse(&manifest(vec![]).text()), Some(manifest(vec![])));
        for cut in 0..text.len() {
            assert_eq!(Manifest::parse(&text[..cut]), None, "{cut}");
        }
        for line in
            ["f 1 1 1 1 a", "f 1 1 1 1 /../a", "f 1 1 1 1 /a//b", "f 1 1 1 1 ", "f 1 1 1 1 /", "p 1 1 1 1 /a"]
        {
            let line = format!("{HEAD} b\n{line}\n{TAIL}\n");
            assert_eq!(Manifest::parse(line.as_bytes()), None, "{line}");
        }
        // Of an earlier version, which did not say the boot.
        assert_eq!(Manifest::parse(b"mizzen-unpacked 2\nend\n"), None);
    }

    #[test]
    fn a_journal_is_read_as_far_as_it_was_written() {
        let part = Unpacked { what: What::Part, ino: 7, changed: (1, 2), size: 5, path: b"/a".to_vec() };
        let file = Unpacked { what: What::File, size: 9, ..part.clone() };
        let journal = Journal { boot: "b".to_owned(), size: 20, files: vec![part.clone()] };
        let text = [journal.text(), file.line()].concat();
        assert_eq!(Journal::parse(&text), Some(Journal { files: vec![file], ..journal }));
        let head = text.iter().position(|byte| *byte == b'\n').unwrap();
        for cut in 0..text.len() {
            let read = Journal::parse(&text[..cut]);
            assert_eq!(read.is_some(), cut > head, "{cut}");
            assert!(read.is_none_or(|read| read.files.is_empty() || read.files == [part.clone()]), "{cut}");
        }
    }
}
