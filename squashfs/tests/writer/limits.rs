//! Large directories, deep trees, many attributes, duplicates, and what cannot be stored.

use std::fs;
use std::io::{self, Cursor, Read};
use std::os::unix::fs::{FileExt, MetadataExt};

use mizzen_squashfs::Kind;
use mizzen_squashfs::writer::{
    Attributes, Compression, Compressors, Content, Device, Error, Options, Segment, SegmentWriter, Tree,
    Writer,
};

use crate::common::{Random, TempDir, isolated};
use crate::model::{Entry, Model, assert_same, attributes, facts_in_directory, facts_in_image, options};
use crate::{ZSTD, open, unsquash, with_mount};

fn small() -> Options {
    options(ZSTD, 4096, 2)
}

#[test]
fn directories_of_1000_and_70000_entries() {
    if !isolated("limits::directories_of_1000_and_70000_entries") {
        return;
    }
    let dir = TempDir::new("wide");
    for count in [1000, 70_000] {
        let mut model = Model { root: attributes(0o755), ..Model::default() };
        model.file("first", "x");
        model.add("d", attributes(0o755), Entry::Directory);
        for number in 0..count {
            model.file(format!("d/a rather long name {number}"), (number % 500).to_string());
        }
        // A hard link whose inode number is far from its neighbours'.
        model.add("d/a rather long name 500x", attributes(0), Entry::Link(b"first".to_vec()));
        let expected = model.facts();
        let image = open(&model.write(&small()), &dir);
        with_mount(&dir.join("image"), &dir.join("mnt"), |at| {
            assert_same(&expected, &facts_in_directory(at), "kernel");
        });
        unsquash(&dir.join("image"), &dir.join("unpacked"));
        assert_same(&expected, &facts_in_directory(&dir.join("unpacked")), "unsquashfs");
        assert_same(&expected, &facts_in_image(&image), "reader");
    }
}

#[test]
fn depth_is_no_recursion() {
    let dir = TempDir::new("deep");
    let mut writer = Writer::new(Cursor::new(Vec::new()), small()).unwrap();
    let mut tree = Tree::new(attributes(0o755)).unwrap();
    let mut at = Tree::ROOT;
    for _ in 0..100_000 {
        at = tree.add(at, b"d", attributes(0o755), Content::Directory).unwrap();
    }
    let bottom = writer.add_file(b"deep".as_slice()).unwrap();
    tree.add(at, b"bottom", attributes(0o644), Content::File(bottom)).unwrap();
    let image = open(&writer.finish(&tree).unwrap().into_inner(), &dir);
    let mut inode = image.root().unwrap();
    for _ in 0..100_000 {
        inode = image.inode(image.lookup(&inode, b"d").unwrap().unwrap()).unwrap();
    }
    let file = image.inode(image.lookup(&inode, b"bottom").unwrap().unwrap()).unwrap();
    assert_eq!(crate::model::contents(&image, &file), b"deep");
}

#[test]
fn many_sets_of_attributes() {
    if !isolated("limits::many_sets_of_attributes") {
        return;
    }
    let dir = TempDir::new("many-xattrs");
    let mut model = Model { root: attributes(0o755), ..Model::default() };
    for number in 0..3000 {
        let mut facts = attributes(0o644);
        for attribute in 0..1 + number % 5 {
            // Half of the values are shared by many files.
            let value = if attribute % 2 == 0 { vec![b'v'; 100] } else { vec![b'w'; number % 1000] };
            facts.xattrs.insert(format!("user.{attribute}").into_bytes(), value);
        }
        facts.uid = number as u32;
        model.add(format!("f{number}"), facts, Entry::File(Vec::new()));
    }
    let expected = model.facts();
    let image = model.write(&small());
    assert_same(&expected, &facts_in_image(&open(&image, &dir)), "reader");
    with_mount(&dir.join("image"), &dir.join("mnt"), |at| {
        assert_same(&expected, &facts_in_directory(at), "kernel");
    });
}

#[test]
fn equal_contents_are_stored_once() {
    let large = Random(1).bytes(10 * 4096 + 100);
    let mut once = Model { root: attributes(0o755), ..Model::default() };
    once.file("a", large.clone());
    once.file("b", "other");
    let mut often = Model { root: attributes(0o755), ..Model::default() };
    often.file("a", large.clone());
    often.file("b", "other");
    for number in 0..20 {
        often.file(format!("copy{number}"), large.clone());
        often.file(format!("same blocks{number}"), large[..10 * 4096].to_vec());
    }
    let (once, often) = (once.write(&small()), often.write(&small()));
    // The copies cost nothing but their inodes, and the one at the end leaves nothing behind the image.
    assert!(often.len() <= once.len() + 4096, "{} {}", once.len(), often.len());

    let mut writer = Writer::new(Cursor::new(Vec::new()), small()).unwrap();
    let a = writer.add_file(large.as_slice()).unwrap();
    let b = writer.add_file(large.as_slice()).unwrap();
    let a = writer.file_data(a).unwrap().clone();
    assert_eq!(&a, writer.file_data(b).unwrap());
    assert_eq!((a.size, a.blocks.len(), a.sparse), (10 * 4096 + 100, 10, 0));
    assert!(a.tail.is_some());
}

/// A stream that breaks after some blocks.
struct Broken(usize);

impl Read for Broken {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.0 == 0 {
            return Err(io::Error::other("the network went away"));
        }
        self.0 -= 1;
        buffer.fill(b'b');
        Ok(buffer.len())
    }
}

#[test]
fn a_broken_stream_leaves_nothing() {
    let write = |broken: &[usize]| {
        let mut writer = Writer::new(Cursor::new(Vec::new()), small()).unwrap();
        let mut tree = Tree::new(attributes(0o755)).unwrap();
        for (name, seed) in [(b"a", 1), (b"b", 2)] {
            let file = writer.add_file(Random(seed).bytes(9000).as_slice()).unwrap();
            tree.add(Tree::ROOT, name, attributes(0o644), Content::File(file)).unwrap();
            for reads in broken {
                let error = writer.add_file(Broken(*reads)).unwrap_err();
                assert_eq!(error.to_string(), "reading the contents of a file: the network went away");
            }
        }
        writer.finish(&tree).unwrap().into_inner()
    };
    assert!(write(&[]) == write(&[0, 1, 30, 0]));
}

#[test]
fn what_cannot_be_stored_is_refused_by_name() {
    let mut tree = Tree::new(attributes(0o755)).unwrap();
    let file = tree.add(Tree::ROOT, b"fifo", attributes(0o644), Content::Fifo).unwrap();
    let mut message = |name: &[u8], attributes: Attributes, content| {
        tree.add(Tree::ROOT, name, attributes, content).unwrap_err().to_string()
    };
    let plain = || attributes(0o644);
    for (name, expected) in [
        (b"".as_slice(), "the file name \"\" is empty"),
        (b"..", "the file name \"..\" is not one that a file can have"),
        (b"a/b", "the file name \"a/b\" has a slash or a zero byte"),
        (b"a\0b", "the file name \"a\\x00b\" has a slash or a zero byte"),
        (b"fifo", "\"fifo\" exists already in its directory"),
    ] {
        assert_eq!(message(name, plain(), Content::Fifo), expected);
    }
    assert!(message(&[b'n'; 256], plain(), Content::Fifo).ends_with("nnn...\" is longer than 255 bytes"));
    assert_eq!(
        message(b"m", attributes(0o10000), Content::Fifo),
        "\"m\" has mode 10000: more than permission bits"
    );
    for target in [vec![], vec![b't'; 4096], b"a\0b".to_vec()] {
        assert!(message(b"s", plain(), Content::Symlink(target)).contains("it must have 1 to 4095"));
    }
    let device = Device { major: 4096, minor: 0 };
    assert_eq!(
        message(b"d", plain(), Content::CharDevice(device)),
        "the device \"d\" is 4096:0: squashfs has numbers up to 4095:1048575"
    );
    for (attribute, len, problem) in [
        ("system.posix_acl_access", 1, "is not one of user.*, trusted.* or security.*"),
        ("user.", 1, "is not one of user.*, trusted.* or security.*"),
        (&format!("user.{}", "n".repeat(251)), 1, "has a name of more than 255 bytes"),
        ("user.large", 65_537, "has a value of more than 64 KiB"),
    ] {
        let mut facts = plain();
        facts.xattrs.insert(attribute.as_bytes().to_vec(), vec![0; len]);
        let message = message(b"x", facts, Content::Fifo);
        assert!(message.ends_with(&format!("of \"x\" {problem}")), "{message}");
    }
    let below = tree.add(file, b"x", plain(), Content::Fifo).unwrap_err();
    assert_eq!(below.to_string(), "\"x\" cannot be added to what is not a directory");
    let directory = tree.add(Tree::ROOT, b"dir", plain(), Content::Directory).unwrap();
    let link = tree.link(Tree::ROOT, b"l", directory).unwrap_err();
    assert_eq!(link.to_string(), "\"l\" is a hard link to a directory");
}

#[test]
fn options_out_of_range_are_refused() {
    let message = |compression, block_size| {
        let result = Writer::new(Cursor::new(Vec::new()), options(compression, block_size, 1));
        result.err().unwrap().to_string()
    };
    for size in [0, 2048, 5000, 2 << 20] {
        assert!(message(ZSTD, size).ends_with("it must be a power of two from 4096 to 1048576"));
    }
    assert_eq!(message(Compression::Zstd { level: 20 }, 4096), "zstd has no compression level 20");
    assert_eq!(message(Compression::Gzip { level: 0 }, 4096), "gzip has no compression level 0");
}

#[test]
fn at_most_65535_owners() {
    let dir = TempDir::new("owners");
    let write = |count: u32| {
        let writer = Writer::new(Cursor::new(Vec::new()), small()).unwrap();
        let mut tree = Tree::new(attributes(0o755)).unwrap();
        for uid in 1..count {
            let facts = Attributes { uid, ..attributes(0o644) };
            tree.add(Tree::ROOT, uid.to_string().as_bytes(), facts, Content::Fifo).unwrap();
        }
        writer.finish(&tree).map(Cursor::into_inner)
    };
    let image = open(&write(65_535).unwrap(), &dir);
    assert_eq!(image.superblock().ids, 65_535);
    assert_eq!(image.resolve(b"65534").unwrap().uid, 65_534);
    let error = write(65_536).unwrap_err();
    assert_eq!(error.to_string(), "too many distinct owners and groups: squashfs has at most 65535");
}

#[test]
fn names_can_be_removed_and_contents_stay_unused() {
    let dir = TempDir::new("removed");
    let mut writer = Writer::new(Cursor::new(Vec::new()), small()).unwrap();
    let mut tree = Tree::new(attributes(0o755)).unwrap();
    // More fragment blocks than inodes, which unsquashfs would take for corruption.
    for number in 0..20 {
        writer.add_file([number + 1; 4000].as_slice()).unwrap();
    }
    let hidden = writer.add_file(Random(3).bytes(20_000).as_slice()).unwrap();
    let d = tree.add(Tree::ROOT, b"d", attributes(0o755), Content::Directory).unwrap();
    let file = tree.add(d, b"f", attributes(0o644), Content::File(hidden)).unwrap();
    tree.link(Tree::ROOT, b"kept", file).unwrap();
    assert_eq!(tree.remove(Tree::ROOT, b"d"), Some(d));
    assert_eq!(tree.lookup(Tree::ROOT, b"d"), None);
    tree.set_attributes(Tree::ROOT, attributes(0o711)).unwrap();
    let image = open(&writer.finish(&tree).unwrap().into_inner(), &dir);
    assert_eq!(image.superblock().inodes, 2);
    assert_eq!(image.root().unwrap().mode, 0o040711);
    let kept = image.resolve(b"kept").unwrap();
    assert_eq!((kept.nlink, crate::model::contents(&image, &kept)), (1, Random(3).bytes(20_000)));
    unsquash(&dir.join("image"), &dir.join("unpacked"));
    assert_eq!(fs::read(dir.join("unpacked/kept")).unwrap(), Random(3).bytes(20_000));
}

#[test]
fn contents_of_another_writer_are_refused() {
    let mut other = Writer::new(Cursor::new(Vec::new()), small()).unwrap();
    let file = other.add_file(b"x".as_slice()).unwrap();
    let mut tree = Tree::new(attributes(0o755)).unwrap();
    tree.add(Tree::ROOT, b"f", attributes(0o644), Content::File(file)).unwrap();
    let writer = Writer::new(Cursor::new(Vec::new()), small()).unwrap();
    assert!(matches!(writer.finish(&tree), Err(Error::Unknown { what: "a file" })));
}

#[test]
fn holes_take_no_space_and_sizes_beyond_4_gib_are_kept() {
    if !isolated("limits::holes_take_no_space_and_sizes_beyond_4_gib_are_kept") {
        return;
    }
    let dir = TempDir::new("holes");
    let mut writer = Writer::new(Cursor::new(Vec::new()), options(ZSTD, 1 << 20, 2)).unwrap();
    let mut tree = Tree::new(attributes(0o755)).unwrap();
    let huge = io::repeat(0).take((4 << 30) + (1 << 20)).chain(b"end".as_slice());
    let huge = writer.add_file(huge).unwrap();
    tree.add(Tree::ROOT, b"huge", attributes(0o644), Content::File(huge)).unwrap();
    let holes = (4 << 30) + (1 << 20);
    let data = writer.file_data(huge).unwrap();
    assert_eq!((data.size, data.sparse, data.start, data.blocks.len()), (holes + 3, holes, 0, 4097));
    let image = open(&writer.finish(&tree).unwrap().into_inner(), &dir);
    assert_eq!(image.superblock().bytes_used.next_multiple_of(4096), 4096);
    let inode = image.resolve(b"huge").unwrap();
    assert_eq!(inode.size(), holes + 3);
    assert!(matches!(inode.kind, Kind::File(ref file) if file.sparse == holes));
    with_mount(&dir.join("image"), &dir.join("mnt"), |at| {
        let file = fs::File::open(at.join("huge")).unwrap();
        let metadata = file.metadata().unwrap();
        assert_eq!((metadata.len(), metadata.blocks()), (holes + 3, 1));
        let mut end = [1; 5];
        file.read_exact_at(&mut end, holes - 2).unwrap();
        assert_eq!(&end, b"\0\0end");
    });
}

/// Two layers with files in common, of which every third is hidden, between files that are added directly.
#[test]
fn segments_give_what_is_wanted_of_them() {
    if !isolated("limits::segments_give_what_is_wanted_of_them") {
        return;
    }
    let dir = TempDir::new("segments");
    let contents = |number: u64| match number % 10 {
        0 => Vec::new(),
        1 => vec![0; 10_000],
        _ => Random(number + 1).bytes((number * 97 % 30_000) as usize),
    };
    let mut writer = Writer::new(Cursor::new(Vec::new()), small()).unwrap();
    let mut model = Model { root: attributes(0o755), ..Model::default() };
    let mut tree = Tree::new(attributes(0o755)).unwrap();
    let mut add = |name: String, contents: Vec<u8>, file| {
        tree.add(Tree::ROOT, name.as_bytes(), attributes(0o644), Content::File(file)).unwrap();
        model.file(name, contents);
    };
    let mut used = Vec::new();
    for (layer, files) in [(1, 0..300), (2, 200..400)] {
        let direct = writer.add_file(format!("direct {layer}").as_bytes()).unwrap();
        add(format!("direct {layer}"), format!("direct {layer}").into(), direct);
        let mut segment = SegmentWriter::new(Cursor::new(Vec::new()), &Compressors::new(small()).unwrap());
        let ids: Vec<_> =
            files.clone().map(|number| segment.add_file(contents(number).as_slice()).unwrap()).collect();
        let (mut source, segment, len) = segment.finish().unwrap();
        assert_eq!((segment.len(), source.get_ref().len() as u64), (ids.len(), len));
        // It may have been on a disk in between.
        let mut stored = Vec::new();
        segment.write(&mut stored).unwrap();
        let segment = Segment::read(&mut stored.as_slice(), &small()).unwrap();
        for end in (0..stored.len()).step_by(97) {
            assert!(Segment::read(&mut &stored[..end], &small()).is_err());
        }
        let hidden = |id| ids.iter().position(|other| *other == id).unwrap() % 3 == 1;
        let taken = writer.add_segment(segment, &mut source, |id| !hidden(id)).unwrap();
        for ((number, id), taken) in files.zip(&ids).zip(taken) {
            assert_eq!(taken.is_none(), hidden(*id));
            if let Some(file) = taken {
                add(format!("{layer}-{number}"), contents(number), file);
                used.push((number, writer.file_data(file).unwrap().clone()));
            }
        }
    }
    // What both layers have is there once.
    for (number, data) in used.iter().filter(|(_, data)| data.blocks.iter().any(|size| *size > 0)) {
        let mut same = used.iter().filter(|(other, _)| other == number);
        assert!(same.all(|(_, other)| other.start == data.start), "{number}");
    }
    let image = writer.finish(&tree).unwrap().into_inner();
    assert_same(&model.facts(), &facts_in_image(&open(&image, &dir)), "reader");
    with_mount(&dir.join("image"), &dir.join("mnt"), |at| {
        assert_same(&model.facts(), &facts_in_directory(at), "kernel");
    });
    let (mut source, segment, _) =
        SegmentWriter::new(Cursor::new(Vec::new()), &Compressors::new(options(ZSTD, 8192, 1)).unwrap())
            .finish()
            .unwrap();
    let mut writer = Writer::new(Cursor::new(Vec::new()), small()).unwrap();
    assert!(matches!(writer.add_segment(segment, &mut source, |_| true), Err(Error::Segment)));
}

/// A disk may lose what was written to it long ago; an image must not have it.
#[test]
fn a_segment_that_has_changed_is_an_error() {
    let compressors = Compressors::new(small()).unwrap();
    let mut writer = SegmentWriter::new(Cursor::new(Vec::new()), &compressors);
    for (seed, len) in [(1, 20_000), (2, 100), (3, 4096)] {
        writer.add_file(Random(seed).bytes(len).as_slice()).unwrap();
    }
    let (source, segment, len) = writer.finish().unwrap();
    let take = |source: &[u8]| {
        let mut image = Writer::with(Cursor::new(Vec::new()), &compressors).unwrap();
        image.add_segment(segment.clone(), &mut Cursor::new(source), |_| true).map(|_| ())
    };
    let good = source.into_inner();
    assert!(take(&good).is_ok());
    for at in (0..len as usize).step_by(61) {
        let mut bad = good.clone();
        bad[at] ^= 1;
        assert!(matches!(take(&bad), Err(Error::Damaged)), "{at}");
    }
    assert!(matches!(take(&good[..good.len() - 1]), Err(Error::Damaged)));
}

/// A full disk is an error at the latest when the image is finished.
#[test]
fn a_full_disk_is_an_error() {
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let mut writer = Writer::new(full, small()).unwrap();
    let added = writer.add_file(Random(1).bytes(2_000_000).as_slice());
    let result = added.and_then(|_| writer.finish(&Tree::new(attributes(0o755)).unwrap()).map(drop));
    assert_eq!(result.unwrap_err().to_string(), "writing the image: No space left on device (os error 28)");
}
