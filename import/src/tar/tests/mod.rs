//! Archives made by hand, by other programs, and by chance.

mod bounds;
mod differential;
mod forms;
mod mutation;
mod sparse_files;
mod truncation;
mod written;

use std::io::Read;

use super::*;

/// A header that is made field by field.
#[derive(Clone)]
struct HeaderBlock([u8; 512]);

impl HeaderBlock {
    /// A ustar header of this type.
    fn new(flag: u8, name: &str, size: u64) -> HeaderBlock {
        let mut block = HeaderBlock([0; 512]);
        block.put(0, name.as_bytes());
        block.put(100, b"0000644\0").put(108, b"0000000\0").put(116, b"0000000\0");
        block.put(124, format!("{size:011o}\0").as_bytes()).put(136, b"00000000000\0");
        block.0[156] = flag;
        block.put(257, b"ustar\x0000");
        block
    }

    fn gnu(flag: u8, name: &str, size: u64) -> HeaderBlock {
        let mut block = HeaderBlock::new(flag, name, size);
        block.put(257, b"ustar  \0");
        block
    }

    fn put(&mut self, position: usize, bytes: &[u8]) -> &mut HeaderBlock {
        self.0[position..position + bytes.len()].copy_from_slice(bytes);
        self
    }

    /// The block with its checksum.
    fn bytes(&self) -> Vec<u8> {
        let mut block = self.0;
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        block.to_vec()
    }
}

/// An archive of these headers, each with its content.
fn archive(members: &[(HeaderBlock, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (header, content) in members {
        bytes.extend(header.bytes());
        bytes.extend(padded(content));
    }
    bytes.extend([0; 1024]);
    bytes
}

fn padded(content: &[u8]) -> Vec<u8> {
    let mut bytes = content.to_vec();
    bytes.resize(content.len().next_multiple_of(512), 0);
    bytes
}

/// A PAX header with these records.
fn pax(records: &[(&str, &[u8])]) -> (HeaderBlock, Vec<u8>) {
    let mut content = Vec::new();
    for (key, value) in records {
        content.extend(pax_record(key, value));
    }
    (HeaderBlock::new(b'x', "PaxHeaders", content.len() as u64), content)
}

fn pax_record(key: &str, value: &[u8]) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let mut len = rest;
    while len != rest + len.to_string().len() {
        len = rest + len.to_string().len();
    }
    [format!("{len} {key}=").as_bytes(), value, b"\n"].concat()
}

/// An entry behind a PAX header with these records.
fn with_pax(records: &[(&str, &[u8])], header: HeaderBlock, content: &[u8]) -> Vec<u8> {
    let (extended, text) = pax(records);
    archive(&[(extended, &text), (header, content)])
}

/// All entries with their contents.
fn read(bytes: &[u8]) -> Result<Vec<(Entry, Vec<u8>)>> {
    let mut archive = Archive::new(bytes);
    let mut entries = Vec::new();
    while let Some(entry) = archive.next_entry()? {
        let mut content = Vec::new();
        archive.contents().read_to_end(&mut content).map_err(|error| match error.downcast::<TarError>() {
            Ok(error) => error,
            Err(error) => TarError::Read(error),
        })?;
        entries.push((entry, content));
    }
    Ok(entries)
}

/// The only entry.
fn one(bytes: &[u8]) -> Entry {
    let mut entries = read(bytes).unwrap();
    assert_eq!(entries.len(), 1, "{entries:?}");
    entries.remove(0).0
}

/// What is wrong with an archive.
fn problem(bytes: &[u8]) -> String {
    read(bytes).unwrap_err().to_string()
}
