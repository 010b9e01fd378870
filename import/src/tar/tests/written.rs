//! What we write is what we read, and what others read.

use std::process::{Command, Stdio};

use super::*;

fn written(entries: &[(Entry, &[u8])]) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new());
    for (entry, content) in entries {
        writer.add_file(entry, *content).unwrap();
    }
    writer.finish().unwrap()
}

/// Entries with everything that a header may not hold.
fn samples() -> Vec<(Entry, &'static [u8])> {
    let file = |path: &[u8]| Entry::new(path, EntryKind::File, 0o644, 5);
    let long = |len: usize| {
        let text: Vec<u8> =
            (0..len).map(|at| if at % 60 == 59 { b'/' } else { b'a' + (at % 26) as u8 }).collect();
        text
    };
    let mut entries = vec![
        Entry::new("./", EntryKind::Directory, 0o755, 0),
        Entry::new("dir/", EntryKind::Directory, 0o1777, 0),
        Entry::new("dir/link", EntryKind::Symlink(b"../x".to_vec()), 0o777, 0),
        Entry::new("dir/long", EntryKind::Symlink(long(1000)), 0o777, 0),
        Entry::new("dir/hard", EntryKind::HardLink(b"hello".to_vec()), 0o644, 0),
        Entry::new("dir/null", EntryKind::CharDevice { major: 1, minor: 3 }, 0o666, 0),
        Entry::new("dir/disk", EntryKind::BlockDevice { major: 4095, minor: 1_048_575 }, 0o660, 0),
        Entry::new("dir/fifo", EntryKind::Fifo, 0o600, 0),
        file(b"caf\xc3\xa9"),
        file(b"\xff\xfe\n"),
        Entry { mode: 0o6755, uid: 0o7777777, gid: 0o7777777, mtime: MAX_TIME, ..file(b"largest") },
        Entry { uid: 0x20_0000, gid: u64::from(u32::MAX), mtime: MAX_TIME + 1, ..file(b"larger") },
        Entry { mtime: -1, ..file(b"earlier") },
    ];
    entries.extend([99, 100, 101, 155, 156, 200, 255, 256, 257, 5000].map(|len| file(&long(len))));
    entries.push(file(&[b'n'; 101]));
    entries.push(file(&[&[b'p'; 156][..], b"/n"].concat()));
    let mut attributed = file(b"attributed");
    attributed.xattrs.insert(b"user.a".to_vec(), b"\0=\n\xff".to_vec());
    attributed.xattrs.insert(b"security.capability".to_vec(), vec![1; 20]);
    attributed.xattrs.insert(b"user.large".to_vec(), vec![7; 65536]);
    entries.push(attributed);
    let with_content = |entry: Entry| {
        let is_file = entry.kind == EntryKind::File;
        (entry, if is_file { b"hello".as_slice() } else { b"" })
    };
    entries.into_iter().map(with_content).collect()
}

const MAX_TIME: i64 = 0o77777777777;

#[test]
fn what_is_written_is_read() {
    let samples = samples();
    let bytes = written(&samples);
    assert_eq!(bytes.len() % 512, 0);
    assert_eq!(bytes, written(&samples), "the same entries are the same bytes");
    let entries = read(&bytes).unwrap();
    assert_eq!(entries.len(), samples.len());
    for ((found, content), (entry, expected)) in entries.into_iter().zip(&samples) {
        assert_eq!(&Entry { position: 0, ..found }, entry);
        assert_eq!(content, *expected);
    }
}

#[test]
fn others_read_it() {
    let samples = samples();
    let bytes = written(&samples);
    let program = "import sys, tarfile\n\
        for m in tarfile.open(fileobj=sys.stdin.buffer, mode='r|', errors='surrogateescape'):\n \
        sys.stdout.buffer.write((m.name + '\\0' + m.linkname + '\\0%d %d %d %d %d\\0' % (m.mode, m.uid, m.gid, m.mtime, m.size)).encode(errors='surrogateescape'))";
    for command in [
        &["python3", "-c", program][..],
        &["tar", "-t", "--null", "--quoting-style=literal", "--show-transformed"],
    ] {
        let mut child = Command::new(command[0]);
        let mut child =
            child.args(&command[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut input = child.stdin.take().unwrap();
        let copy = bytes.clone();
        let feeder = std::thread::spawn(move || io::Write::write_all(&mut input, &copy));
        let output = child.wait_with_output().unwrap();
        feeder.join().unwrap().unwrap();
        assert!(output.status.success(), "{command:?}");
        let mut fields = output.stdout.split(|byte| *byte == 0);
        if command[0] == "tar" {
            assert_eq!(output.stdout.iter().filter(|byte| **byte == b'\n').count(), samples.len() + 1);
            continue;
        }
        for (entry, content) in &samples {
            let name = fields.next().unwrap();
            // Python drops the slash at the end.
            assert_eq!(name, entry.path.strip_suffix(b"/").unwrap_or(&entry.path));
            let target = match &entry.kind {
                EntryKind::Symlink(target) | EntryKind::HardLink(target) => target.as_slice(),
                _ => b"",
            };
            assert_eq!(fields.next().unwrap(), target);
            let numbers =
                format!("{} {} {} {} {}", entry.mode, entry.uid, entry.gid, entry.mtime, content.len());
            assert_eq!(String::from_utf8_lossy(fields.next().unwrap()), numbers, "{:?}", entry.path);
        }
    }
}

#[test]
fn sizes_beyond_8_gib_have_a_record() {
    let size = 1 << 33;
    let entry = Entry::new("large", EntryKind::File, 0o644, size);
    // Only the headers matter: the content ends at once.
    let mut head = Vec::new();
    assert!(Writer::new(&mut head).add(&entry).is_err());
    let mut archive = Archive::new(head.as_slice());
    assert_eq!(archive.next_entry().unwrap().unwrap().size, size);
    assert_eq!(&head[512..533], b"19 size=8589934592\n\0\0");
}

#[test]
fn what_cannot_be_written_is_refused() {
    let refused = |entry: Entry| Writer::new(Vec::new()).add(&entry).unwrap_err().to_string();
    let file = |path: &str| Entry::new(path, EntryKind::File, 0o644, 0);
    assert_eq!(refused(file("")), "a name that no archive can have");
    assert_eq!(refused(file("a\0b")), "a name that no archive can have");
    assert_eq!(
        refused(file(&"n".repeat(2 << 20))),
        "its name and attributes are longer than 1 MiB, which no program reads"
    );
    let device = EntryKind::CharDevice { major: 1 << 22, minor: 0 };
    assert_eq!(refused(Entry::new("d", device, 0, 0)), "a device with a number that no archive can have");
    let mut odd = file("f");
    odd.xattrs.insert(b"user.a=b".to_vec(), b"v".to_vec());
    assert_eq!(refused(odd), "an extended attribute with a name that no archive can have");
    let short = Writer::new(Vec::new()).add_file(&Entry::new("f", EntryKind::File, 0, 10), b"123".as_slice());
    assert_eq!(short.unwrap_err().to_string(), "it is shorter than it was");
}
