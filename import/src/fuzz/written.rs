//! The writer of images and the reader, as a function of bytes: the bytes say what tree to make, and what was written is
//! read back and compared with it.

use std::collections::BTreeMap;
use std::fs::File;
use std::num::NonZeroUsize;
use std::sync::OnceLock;

use mizzen_squashfs::writer::{
    Attributes, Compression, Compressors, Content, Device, FileId, NodeId, Options, Tree, Writer,
};
use mizzen_squashfs::{Image, Inode, Kind};
use rustix::fs::{MemfdFlags, memfd_create};

/// The smallest block: a file of some kilobytes has several, and an end.
const BLOCK_SIZE: u32 = 4096;
/// How much one execution makes.
const CONTENT_LIMIT: usize = 128 << 10;
const COMPRESSIONS: [Compression; 4] =
    [Compression::None, Compression::Zstd { level: 1 }, Compression::Gzip { level: 1 }, Compression::Lz4];

/// A tree with contents, written and read back. What cannot be stored is refused when it is added.
pub fn written(bytes: &[u8]) -> bool {
    let mut script = Script(bytes);
    let Some(compressors) = compressors(script.byte()) else { return false };
    let Ok(file) = memfd_create("image", MemfdFlags::CLOEXEC).map(File::from) else { return false };
    let Ok(mut writer) = Writer::with(file, compressors) else { return false };
    let Some(made) = Made::of(&mut script, &mut writer) else { return false };
    let file = writer.finish(&made.tree);
    assert!(file.is_ok(), "what could be added must be written: {:?}", file.err());
    let Ok(file) = file else { return false };
    let image = Image::open(file, 0);
    assert!(image.is_ok(), "{:?}", image.err());
    let Ok(image) = image else { return false };
    let compared = made.compare(&image);
    assert!(compared.is_ok(), "what was written must be read: {:?}", compared.err());
    made.nodes.len() > 1
}

/// Threads are started once.
fn compressors(number: u8) -> Option<&'static Compressors> {
    static ALL: OnceLock<Vec<Compressors>> = OnceLock::new();
    let all = ALL.get_or_init(|| {
        let options = |compression| Options {
            compression,
            block_size: BLOCK_SIZE,
            threads: NonZeroUsize::MIN,
            ..Options::default()
        };
        COMPRESSIONS
            .into_iter()
            .filter_map(|compression| Compressors::new(options(compression)).ok())
            .collect()
    });
    all.get(usize::from(number) % COMPRESSIONS.len())
}

/// The bytes, and zeros behind them.
struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    fn number(&mut self) -> u32 {
        (0..4).fold(0, |number, _| number << 8 | u32::from(self.byte()))
    }

    fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    /// As long as its first byte says.
    fn text(&mut self) -> &'a [u8] {
        let len = self.byte();
        self.bytes(usize::from(len))
    }
}

/// What was asked for.
struct Made {
    tree: Tree,
    nodes: Vec<NodeId>,
    contents: Vec<Vec<u8>>,
}

impl Made {
    fn of(script: &mut Script, writer: &mut Writer<File>) -> Option<Made> {
        let tree = Tree::new(attributes(script)).ok()?;
        let mut made = Made { tree, nodes: vec![Tree::ROOT], contents: Vec::new() };
        let mut left = CONTENT_LIMIT;
        while !script.0.is_empty() {
            let kind = script.byte();
            let some =
                |number: u8, made: &Made| made.nodes.get(usize::from(number) % made.nodes.len()).copied();
            let directory = some(script.byte(), &made)?;
            let name = script.text();
            let content = match kind % 10 {
                0 | 1 => Content::Directory,
                2..=4 => {
                    let content = content(script, &mut left);
                    let file = writer.add_file(content.as_slice()).ok()?;
                    made.contents.push(content);
                    Content::File(file)
                }
                5 => Content::Symlink(script.text().to_vec()),
                6 => Content::CharDevice(device(script)),
                7 => {
                    if script.byte().is_multiple_of(2) {
                        Content::Fifo
                    } else {
                        Content::BlockDevice(device(script))
                    }
                }
                8 => {
                    let target = some(script.byte(), &made)?;
                    let _ = made.tree.link(directory, name, target);
                    continue;
                }
                _ => {
                    made.tree.remove(directory, name);
                    continue;
                }
            };
            if let Ok(node) = made.tree.add(directory, name, attributes(script), content) {
                made.nodes.push(node);
            }
        }
        Some(made)
    }

    /// Whether an image has this tree, and nothing else.
    fn compare(&self, image: &Image) -> mizzen_squashfs::Result<()> {
        let mut numbers = BTreeMap::new();
        let mut names = BTreeMap::<NodeId, u32>::new();
        let mut left = vec![(Tree::ROOT, image.root()?)];
        let mut inodes = BTreeMap::new();
        while let Some((node, inode)) = left.pop() {
            // One number for one entry, under all its names.
            assert_eq!(*numbers.entry(inode.number).or_insert(node), node);
            *names.entry(node).or_default() += 1;
            self.compare_one(node, &inode, image)?;
            if let Kind::Directory(_) = inode.kind {
                let mut children = self.tree.children(node);
                let mut listing = image.read_dir(&inode, 0)?;
                while let Some(entry) = listing.next()? {
                    let (name, child) = children.next().unzip();
                    assert_eq!(Some(entry.name), name);
                    assert_eq!(image.lookup(&inode, entry.name)?, Some(entry.inode));
                    left.extend(child.map(|child| Ok((child, image.inode(entry.inode)?))).transpose()?);
                }
                assert_eq!(children.next(), None);
            }
            inodes.insert(node, inode);
        }
        assert_eq!(image.superblock().inodes as usize, inodes.len());
        for (node, inode) in inodes.iter().filter(|(_, inode)| !matches!(inode.kind, Kind::Directory(_))) {
            assert_eq!(Some(&inode.nlink), names.get(node));
        }
        Ok(())
    }

    fn compare_one(&self, node: NodeId, inode: &Inode, image: &Image) -> mizzen_squashfs::Result<()> {
        let (Ok(attributes), Ok(content)) = (self.tree.attributes(node), self.tree.content(node)) else {
            return Ok(());
        };
        let found = (inode.mode & 0o7777, inode.uid, inode.gid, inode.mtime);
        assert_eq!(found, (u32::from(attributes.mode), attributes.uid, attributes.gid, attributes.mtime));
        let names: Vec<u8> = attributes.xattrs.keys().flat_map(|name| [name, &b"\0"[..]].concat()).collect();
        let mut listed: Vec<Vec<u8>> = split(&image.list_xattrs(inode)?);
        listed.sort();
        assert_eq!(listed, split(&names));
        for (name, value) in &attributes.xattrs {
            assert_eq!(image.get_xattr(inode, name)?.as_ref(), Some(value));
        }
        match (content, &inode.kind) {
            (Content::Directory, Kind::Directory(_)) | (Content::Fifo, Kind::Fifo) => {}
            (Content::File(file), Kind::File(_)) => self.compare_content(*file, inode, image)?,
            (Content::Symlink(target), Kind::Symlink(_)) => assert_eq!(image.read_link(inode)?, *target),
            (Content::CharDevice(device), Kind::CharDevice(found))
            | (Content::BlockDevice(device), Kind::BlockDevice(found)) => {
                assert_eq!(encoded(*device), *found)
            }
            (content, kind) => {
                let (made, found) = (format!("{content:?}"), format!("{kind:?}"));
                assert_eq!(made, found, "of another kind");
            }
        }
        Ok(())
    }

    fn compare_content(&self, file: FileId, inode: &Inode, image: &Image) -> mizzen_squashfs::Result<()> {
        let expected = self.contents.get(file.number()).map(Vec::as_slice).unwrap_or_default();
        assert_eq!(inode.size(), expected.len() as u64);
        let read = |offset: usize, len: usize| -> mizzen_squashfs::Result<Vec<u8>> {
            let pieces = image.read(inode, offset as u64, len)?;
            Ok(pieces.iter().flat_map(|piece| piece.slices().collect::<Vec<_>>().concat()).collect())
        };
        assert!(read(0, expected.len())? == expected, "other contents");
        // From the middle of a block, to behind the end.
        let middle = expected.len() * 2 / 3;
        assert!(
            read(middle, expected.len())? == expected.get(middle..).unwrap_or_default(),
            "other contents"
        );
        Ok(())
    }
}

fn split(list: &[u8]) -> Vec<Vec<u8>> {
    list.split(|byte| *byte == 0).filter(|name| !name.is_empty()).map(<[u8]>::to_vec).collect()
}

/// As the kernel encodes it.
fn encoded(device: Device) -> u32 {
    device.minor & 0xff | device.major << 8 | (device.minor & !0xff) << 12
}

fn device(script: &mut Script) -> Device {
    let number = script.number();
    Device { major: number >> 20, minor: number & 0xf_ffff }
}

fn attributes(script: &mut Script) -> Attributes {
    let flags = script.byte();
    let mut attributes = Attributes { mode: u16::from(flags) << 4 & 0o7777, ..Attributes::default() };
    if flags & 1 != 0 {
        (attributes.uid, attributes.gid, attributes.mtime) =
            (script.number(), script.number(), script.number());
    }
    for _ in 0..flags >> 1 & 3 {
        let prefix = [&b"user."[..], b"security.", b"trusted."][usize::from(script.byte()) % 3];
        let name = [prefix, script.text()].concat();
        let times = usize::from(script.byte());
        attributes.xattrs.insert(name, script.text().repeat(times));
    }
    attributes
}

/// Pieces of zeros, of one text again and again, and of what does not compress.
fn content(script: &mut Script, left: &mut usize) -> Vec<u8> {
    let mut content = Vec::new();
    for _ in 0..script.byte() % 4 {
        let (kind, len) = (script.byte(), (script.number() >> 16) as usize);
        let len = len.min(*left);
        *left -= len;
        let text = if kind % 3 == 1 { script.text() } else { &[] };
        let mut random = u64::from(kind);
        content.extend((0..len).map(|at| match kind % 3 {
            0 => 0,
            1 => text.get(at % text.len().max(1)).copied().unwrap_or(0),
            _ => {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (random >> 56) as u8
            }
        }));
    }
    content
}

/// Scripts that make something of everything.
pub fn seeds() -> Vec<Vec<u8>> {
    let name = |name: &str| [&[name.len() as u8], name.as_bytes()].concat();
    let root = vec![
        0x0f, 0, 0, 3, 232, 0, 0, 3, 233, 95, 94, 16, 0, 0, 1, b'a', 3, 1, b'x', 0, 1, b'b', 1, 1, b'y', 1,
        1, b'c', 1, 0,
    ];
    let plain = [0xe8];
    let entries = |compressor: u8| {
        [
            vec![compressor],
            root.clone(),
            [&[0, 0][..], &name("dir"), &plain].concat(),
            // Two kilobytes of text, a hole, noise.
            [
                &[2, 1][..],
                &name("file"),
                &[3, 1, 8, 0, 0, 0, 3, b'a', b'b', b'c', 0, 64, 0, 0, 0, 2, 33, 0, 0, 0],
                &plain,
            ]
            .concat(),
            [
                &[2, 1][..],
                &name("same"),
                &[3, 1, 8, 0, 0, 0, 3, b'a', b'b', b'c', 0, 64, 0, 0, 0, 2, 33, 0, 0, 0],
                &plain,
            ]
            .concat(),
            [
                &[3, 0][..],
                &name("small"),
                &[1, 1, 0, 9, 0, 0, 1, b's'],
                &[
                    0xe3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 4, b'n', b'o', b't', b'e', 200, 3, b'v',
                    b'a', b'l',
                ],
            ]
            .concat(),
            [&[4, 1][..], &name("empty"), &[0], &plain].concat(),
            [&[5, 1][..], &name("link"), &name("../dir/file"), &plain].concat(),
            [&[6, 0][..], &name("null"), &[0, 16, 0, 3], &plain].concat(),
            [&[7, 0][..], &name("pipe"), &[0], &plain].concat(),
            [&[7, 0][..], &name("disk"), &[1, 0, 128, 0, 1], &plain].concat(),
            [&[8, 0][..], &name("again"), &[2]].concat(),
            [&[0, 1][..], &name("gone"), &plain].concat(),
            [&[9, 1][..], &name("gone")].concat(),
        ]
        .concat()
    };
    (0..4).map(entries).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        let seeds = seeds();
        for seed in &seeds {
            assert!(written(seed));
        }
        let mut random = 1_u64;
        let mut next = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % below.max(1)
        };
        let mut good = 0;
        for round in 0..2000 {
            let mut bytes = seeds[round % seeds.len()].clone();
            for _ in 0..=next(8) {
                let at = next(bytes.len());
                match next(3) {
                    0 => bytes[at] = next(256) as u8,
                    1 => drop(bytes.drain(at..(at + next(8)).min(bytes.len()))),
                    _ => {
                        let piece = bytes[at..(at + next(80)).min(bytes.len())].to_vec();
                        bytes.extend(piece);
                    }
                }
            }
            good += u32::from(written(&bytes));
        }
        assert!(good > 1500, "{good}");
    }

    /// The seeds reach what they are for: all kinds of entries, files of several blocks, holes, equal contents.
    #[test]
    fn seeds_have_something_of_everything() {
        let seeds = seeds();
        let mut script = Script(&seeds[0][1..]);
        let file = File::from(memfd_create("image", MemfdFlags::CLOEXEC).unwrap());
        let mut writer = Writer::with(file, compressors(0).unwrap()).unwrap();
        let made = Made::of(&mut script, &mut writer).unwrap();
        let names = |node| {
            made.tree
                .children(node)
                .map(|(name, _)| String::from_utf8(name.to_vec()).unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(names(Tree::ROOT), ["again", "dir", "disk", "null", "pipe", "small"]);
        assert_eq!(names(made.nodes[1]), ["empty", "file", "link", "same"]);
        let len: Vec<usize> = made.contents.iter().map(Vec::len).collect();
        assert_eq!(len, [2048 + 16384 + 8448, 2048 + 16384 + 8448, 9, 0]);
        assert_eq!(made.tree.attributes(Tree::ROOT).unwrap().xattrs.len(), 3);
    }
}
