//! A tree as the tests think of it, and the same facts as seen by the reader or in a directory.

use std::collections::BTreeMap;
use std::fs;
use std::io::Cursor;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use mizzen_squashfs::writer::{Attributes, Compression, Content, Device, NodeId, Options, Tree, Writer};
use mizzen_squashfs::{Image, Inode, Kind};

use crate::common::xattrs;

/// What an entry is; paths have no leading slash, and directories come before what is in them.
pub enum Entry {
    Directory,
    File(Vec<u8>),
    Symlink(Vec<u8>),
    Block(u32, u32),
    Char(u32, u32),
    Fifo,
    Socket,
    /// Another name for the entry at this path.
    Link(Vec<u8>),
}

#[derive(Default)]
pub struct Model {
    pub root: Attributes,
    pub entries: Vec<(Vec<u8>, Attributes, Entry)>,
}

/// All that can be seen of one file.
#[derive(Debug, PartialEq, Clone)]
pub struct Facts {
    pub mode: u32,
    pub owner: (u32, u32),
    pub mtime: i64,
    /// Not of directories: what others count there differs.
    pub nlink: u64,
    pub device: (u32, u32),
    /// The first of all names of this inode.
    pub same_as: Vec<u8>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Contents or link target.
    pub contents: Vec<u8>,
}

pub type AllFacts = BTreeMap<Vec<u8>, Facts>;

pub fn attributes(mode: u16) -> Attributes {
    Attributes { mode, uid: 0, gid: 0, mtime: 1_600_000_000, ..Attributes::default() }
}

pub fn with_xattrs(mode: u16, xattrs: &[(&str, &[u8])]) -> Attributes {
    let pairs = xattrs.iter().map(|(name, value)| (name.as_bytes().to_vec(), value.to_vec()));
    Attributes { xattrs: pairs.collect(), ..attributes(mode) }
}

pub fn options(compression: Compression, block_size: u32, threads: usize) -> Options {
    Options { compression, block_size, threads: threads.try_into().unwrap(), ..Options::default() }
}

impl Model {
    pub fn add(&mut self, path: impl AsRef<[u8]>, attributes: Attributes, entry: Entry) {
        self.entries.push((path.as_ref().to_vec(), attributes, entry));
    }

    pub fn file(&mut self, path: impl AsRef<[u8]>, contents: impl Into<Vec<u8>>) {
        self.add(path, attributes(0o644), Entry::File(contents.into()));
    }

    /// The image of it.
    pub fn write(&self, options: &Options) -> Vec<u8> {
        let mut writer = Writer::new(Cursor::new(Vec::new()), options.clone()).unwrap();
        let mut tree = Tree::new(self.root.clone()).unwrap();
        let mut nodes: BTreeMap<&[u8], NodeId> = BTreeMap::from([(b"".as_slice(), Tree::ROOT)]);
        for (path, attributes, entry) in &self.entries {
            let (parent, name) = match path.iter().rposition(|byte| *byte == b'/') {
                Some(slash) => (&path[..slash], &path[slash + 1..]),
                None => (b"".as_slice(), path.as_slice()),
            };
            let device = |major: &u32, minor: &u32| Device { major: *major, minor: *minor };
            let content = match entry {
                Entry::Directory => Content::Directory,
                Entry::File(contents) => Content::File(writer.add_file(contents.as_slice()).unwrap()),
                Entry::Symlink(target) => Content::Symlink(target.clone()),
                Entry::Block(major, minor) => Content::BlockDevice(device(major, minor)),
                Entry::Char(major, minor) => Content::CharDevice(device(major, minor)),
                Entry::Fifo => Content::Fifo,
                Entry::Socket => Content::Socket,
                Entry::Link(target) => {
                    tree.link(nodes[parent], name, nodes[target.as_slice()]).unwrap();
                    continue;
                }
            };
            nodes.insert(path, tree.add(nodes[parent], name, attributes.clone(), content).unwrap());
        }
        writer.finish(&tree).unwrap().into_inner()
    }

    pub fn facts(&self) -> AllFacts {
        let mut all = AllFacts::new();
        let mut first_names: BTreeMap<&[u8], Vec<&[u8]>> = BTreeMap::new();
        let root = (Vec::new(), self.root.clone(), Entry::Directory);
        for (path, attributes, entry) in std::iter::once(&root).chain(&self.entries) {
            if let Entry::Link(target) = entry {
                first_names.entry(target).or_insert_with(|| vec![target]).push(path);
                let facts = all[target.as_slice()].clone();
                all.insert(path.clone(), facts);
                continue;
            }
            let (file_type, contents, device) = match entry {
                Entry::Directory => (0o040000, Vec::new(), (0, 0)),
                Entry::File(contents) => (0o100000, contents.clone(), (0, 0)),
                Entry::Symlink(target) => (0o120000, target.clone(), (0, 0)),
                Entry::Block(major, minor) => (0o060000, Vec::new(), (*major, *minor)),
                Entry::Char(major, minor) => (0o020000, Vec::new(), (*major, *minor)),
                Entry::Fifo => (0o010000, Vec::new(), (0, 0)),
                Entry::Socket => (0o140000, Vec::new(), (0, 0)),
                Entry::Link(_) => unreachable!(),
            };
            let facts = Facts {
                mode: file_type | u32::from(attributes.mode),
                owner: (attributes.uid, attributes.gid),
                mtime: attributes.mtime.into(),
                nlink: u64::from(!matches!(entry, Entry::Directory)),
                device,
                same_as: path.clone(),
                xattrs: attributes.xattrs.clone(),
                contents,
            };
            all.insert(path.clone(), facts);
        }
        for names in first_names.values() {
            let first = names.iter().min().unwrap().to_vec();
            for name in names {
                let facts = all.get_mut(*name).unwrap();
                (facts.nlink, facts.same_as) = (names.len() as u64, first.clone());
            }
        }
        all
    }
}

pub fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    if path.is_empty() { name.to_vec() } else { [path, b"/", name].concat() }
}

pub fn contents(image: &Image, inode: &Inode) -> Vec<u8> {
    let mut contents = Vec::new();
    for piece in image.read(inode, 0, usize::MAX).unwrap() {
        piece.slices().for_each(|slice| contents.extend_from_slice(slice));
    }
    contents
}

/// What our reader sees; it also checks that each name is found by a lookup, and the link counts of directories.
pub fn facts_in_image(image: &Image) -> AllFacts {
    let mut inodes = Vec::new();
    let mut directories = vec![(Vec::new(), image.root().unwrap())];
    while let Some((path, directory)) = directories.pop() {
        let mut listing = image.read_dir(&directory, 0).unwrap();
        let mut below = 0;
        while let Some(entry) = listing.next().unwrap() {
            assert_eq!(image.lookup(&directory, entry.name).unwrap(), Some(entry.inode));
            let inode = image.inode(entry.inode).unwrap();
            assert_eq!(inode.number, entry.number);
            if let Kind::Directory(child) = &inode.kind {
                assert_eq!(child.parent, directory.number);
                directories.push((join(&path, entry.name), inode));
                below += 1;
            } else {
                inodes.push((join(&path, entry.name), inode));
            }
        }
        assert_eq!(directory.nlink, 2 + below);
        inodes.push((path, directory));
    }
    inodes.sort_by(|a, b| a.0.cmp(&b.0));
    let mut first_names = BTreeMap::new();
    let mut all = AllFacts::new();
    for (path, inode) in inodes {
        let list = image.list_xattrs(&inode).unwrap();
        let names = list.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        let xattrs = names.map(|name| (name.to_vec(), image.get_xattr(&inode, name).unwrap().unwrap()));
        let facts = Facts {
            mode: inode.mode,
            owner: (inode.uid, inode.gid),
            mtime: inode.mtime.into(),
            nlink: if matches!(inode.kind, Kind::Directory(_)) { 0 } else { inode.nlink.into() },
            device: split_device(u64::from(inode.device())),
            same_as: first_names.entry(inode.number).or_insert(path.clone()).clone(),
            xattrs: xattrs.collect(),
            contents: match &inode.kind {
                Kind::File(_) => contents(image, &inode),
                Kind::Symlink(_) => image.read_link(&inode).unwrap(),
                _ => Vec::new(),
            },
        };
        all.insert(path, facts);
    }
    all
}

fn split_device(device: u64) -> (u32, u32) {
    (rustix::fs::major(device), rustix::fs::minor(device))
}

/// What is in a directory: a mount of the image, or what unsquashfs made of it.
pub fn facts_in_directory(root: &Path) -> AllFacts {
    let mut paths = vec![Vec::new()];
    let mut seen = Vec::new();
    while let Some(path) = paths.pop() {
        let place = root.join(std::ffi::OsStr::from_bytes(&path));
        let place = if path.is_empty() { root.to_path_buf() } else { place };
        let metadata = fs::symlink_metadata(&place).unwrap();
        if metadata.is_dir() {
            let names = fs::read_dir(&place).unwrap().map(|entry| entry.unwrap().file_name());
            paths.extend(names.map(|name| join(&path, name.as_bytes())));
        }
        seen.push((path, place, metadata));
    }
    seen.sort_by(|a, b| a.0.cmp(&b.0));
    let mut first_names = BTreeMap::new();
    let mut all = AllFacts::new();
    for (path, place, metadata) in seen {
        let xattrs = xattrs(&place).into_iter().map(|(name, value)| (name.into_bytes(), value));
        let facts = Facts {
            mode: metadata.mode(),
            owner: (metadata.uid(), metadata.gid()),
            mtime: metadata.mtime(),
            nlink: if metadata.is_dir() { 0 } else { metadata.nlink() },
            device: split_device(metadata.rdev()),
            same_as: first_names.entry(metadata.ino()).or_insert(path.clone()).clone(),
            xattrs: xattrs.collect(),
            contents: if metadata.is_file() {
                fs::read(&place).unwrap()
            } else if metadata.is_symlink() {
                fs::read_link(&place).unwrap().as_os_str().as_bytes().to_vec()
            } else {
                Vec::new()
            },
        };
        all.insert(path, facts);
    }
    all
}

/// Compares path by path: a difference of whole trees would fill the screen.
#[track_caller]
pub fn assert_same(expected: &AllFacts, got: &AllFacts, what: &str) {
    for (path, expected) in expected {
        let name = path.escape_ascii();
        let got = got.get(path).unwrap_or_else(|| panic!("{what}: {name} is missing"));
        assert!(expected.contents == got.contents, "{what}: {name} has other contents");
        let without = |facts: &Facts| Facts { contents: Vec::new(), ..facts.clone() };
        assert_eq!(without(expected), without(got), "{what}: {name}");
    }
    let more = got.keys().find(|path| !expected.contains_key(*path));
    assert_eq!(more.map(|path| path.escape_ascii().to_string()), None, "{what}: not in the tree");
}
