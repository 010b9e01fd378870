//! Layers, entry by entry.

use std::borrow::Cow;

use tar::{Builder, EntryType, Header};

/// An entry of a layer.
#[derive(Clone)]
pub struct Item {
    pub path: Cow<'static, [u8]>,
    pub kind: EntryType,
    pub content: Cow<'static, [u8]>,
    pub mode: u32,
    pub xattr: Option<(&'static str, &'static str)>,
}

pub fn item(path: &'static str, kind: EntryType, content: &'static str) -> Item {
    Item { path: path.as_bytes().into(), kind, content: content.as_bytes().into(), mode: 0o644, xattr: None }
}
pub fn file(path: &'static str, content: &'static str) -> Item {
    item(path, EntryType::Regular, content)
}
pub fn dir(path: &'static str) -> Item {
    Item { mode: 0o755, ..item(path, EntryType::Directory, "") }
}
pub fn symlink(path: &'static str, target: &'static str) -> Item {
    item(path, EntryType::Symlink, target)
}
pub fn link(path: &'static str, target: &'static str) -> Item {
    item(path, EntryType::Link, target)
}
pub fn mode(mode: u32, item: Item) -> Item {
    Item { mode, ..item }
}

/// One layer as a tar; names are stored as they are, which the crate's own functions would not do.
pub fn layer(items: &[Item]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (number, item) in items.iter().enumerate() {
        if let Some((name, value)) = item.xattr {
            let key = format!("SCHILY.xattr.{name}");
            builder.append_pax_extensions([(key.as_str(), value.as_bytes())]).unwrap();
        }
        let mut header = Header::new_ustar();
        header.as_mut_bytes()[..item.path.len()].copy_from_slice(&item.path);
        header.set_entry_type(item.kind);
        header.set_mode(item.mode);
        header.set_mtime(1_600_000_000 + number as u64);
        header.set_uid(number as u64);
        header.set_gid(7);
        let is_link = [EntryType::Symlink, EntryType::Link].contains(&item.kind);
        if is_link {
            header.as_mut_bytes()[157..157 + item.content.len()].copy_from_slice(&item.content);
        }
        if [EntryType::Char, EntryType::Block].contains(&item.kind) {
            let (major, minor) = str::from_utf8(&item.content).unwrap().split_once(':').unwrap();
            header.set_device_major(major.parse().unwrap()).unwrap();
            header.set_device_minor(minor.parse().unwrap()).unwrap();
        }
        let content = if item.kind == EntryType::Regular { item.content.as_ref() } else { b"".as_slice() };
        header.set_size(content.len() as u64);
        header.set_cksum();
        builder.append(&header, content).unwrap();
    }
    builder.into_inner().unwrap()
}

/// A file of so many bytes that compress somewhat.
pub fn large(path: &'static str, len: usize) -> Item {
    let seed = path.len() as u64;
    let byte = |at: usize| {
        let word = (at as u64 / 16 + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (word >> (8 * (at % 8))) as u8 & 0x3f
    };
    Item { content: (0..len).map(byte).collect::<Vec<u8>>().into(), ..file(path, "") }
}

/// The layers of an image with something of everything.
pub fn sample() -> Vec<Vec<u8>> {
    let lower = [
        mode(0o711, dir("./")),
        dir("bin/"),
        mode(0o755, large("bin/program", 700_001)),
        link("bin/alias", "bin/program"),
        symlink("bin/sh", "program"),
        mode(0o4755, file("bin/su", "#!/bin/sh\n")),
        dir("etc/"),
        file("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n"),
        Item { xattr: Some(("user.note", "hello")), ..file("etc/noted", "noted") },
        file("etc/empty", ""),
        dir("opt/old/"),
        large("opt/old/data", 131_072),
        mode(0o1777, dir("tmp/")),
        item("null", EntryType::Char, "1:3"),
        item("pipe", EntryType::Fifo, ""),
    ];
    let upper = [
        file("etc/.wh.empty", ""),
        mode(0o600, file("etc/passwd", "me:x:1:1::/:/bin/sh\n")),
        dir("opt/old/"),
        file("opt/old/.wh..wh..opq", ""),
        large("opt/old/new", 300_000),
        link("etc/program", "bin/program"),
        file("made/on/the/way", "x"),
    ];
    vec![layer(&lower), layer(&upper)]
}

/// As many layers as Docker allows, each of which changes something.
pub fn many(count: usize) -> Vec<Vec<u8>> {
    let text = |number: usize| format!("content of layer {number}");
    let of = |number: usize| {
        let mut items = vec![
            Item {
                path: format!("files/{number}").into_bytes().into(),
                content: text(number).into_bytes().into(),
                ..file("", "")
            },
            Item { content: text(number).into_bytes().into(), ..file("last", "") },
        ];
        if number % 10 == 9 {
            items
                .push(Item { path: format!("files/.wh.{}", number - 5).into_bytes().into(), ..file("", "") });
        }
        layer(&items)
    };
    (0..count).map(of).collect()
}
