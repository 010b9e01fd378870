//! Where the root file system lies in a SIF file (Singularity, Apptainer). Runs as the user on the host.
//!
//! The format is what Go's `binary.Write` makes of two structures: little-endian, without padding. A header
//! of 128 bytes names a table of descriptors; each describes one object in the file. Every number in it is
//! the maker's claim: it is read as signed, compared with the file, and added with a check.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use mizzen_core::Failure;
use mizzen_core::failure::quote;

use super::DAMAGED;
use super::architecture::Architecture;

/// Bytes of the header.
const HEADER: usize = 128;
/// Bytes of one descriptor.
const DESCRIPTOR: usize = 585;
/// The makers write room for 48 descriptors; a count far beyond is damage or an attack.
const DESCRIPTOR_LIMIT: i64 = 4096;
/// The magic, after 32 bytes of launch script.
const MAGIC: &[u8] = b"SIF_MAGIC\0";
const MAGIC_AT: usize = 32;

/// Kinds of objects.
const PARTITION: i32 = 0x4004;
const OCI_ROOT_INDEX: i32 = 0x400a;
/// Kinds of partitions.
const SYSTEM: i32 = 1;
const PRIMARY_SYSTEM: i32 = 2;

/// The partition that holds the root file system, a squashfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Where it starts in the file.
    pub offset: u64,
    /// Its length in bytes; offset + length is within the file.
    pub length: u64,
    /// The machine it says it is made for.
    pub architecture: Option<Architecture>,
}

/// What a SIF is read from.
pub trait Source {
    /// Fills the buffer from this offset.
    fn fill(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

impl Source for File {
    fn fill(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(buffer, offset)
    }
}

/// Finds the root file system in a SIF of `size` bytes. The messages lack the file's name.
pub fn find(source: &impl Source, size: u64) -> Result<Partition, Failure> {
    let header = Header::read(source, size)?;
    let objects = header.objects(source)?;
    let primary = primary(&objects)?;
    match primary.file_system {
        1 => {}
        2 => return Err(other_file_system("ext3")),
        3 => return Err(other_file_system("an archive")),
        4 => return Err(other_file_system("raw data")),
        5 => {
            return Err(Failure::new("SIF with an encrypted system partition")
                .hint("mizzen has no key; build the image without --encrypt"));
        }
        number => return Err(other_file_system(&format!("of unknown type {number}"))),
    }
    let (offset, end) = primary.range().ok_or_else(|| {
        let (offset, length) = (primary.offset, primary.length);
        damaged(format!("its system partition has offset {offset} and length {length}"))
    })?;
    if end > size {
        return Err(incomplete(format!(
            "SIF is cut off: its system partition ends at byte {end}, the file at {size}"
        )));
    }
    if offset < header.end {
        return Err(damaged(format!("its system partition at byte {offset} overlaps the header")));
    }
    for object in objects.iter().filter(|object| object.number != primary.number) {
        if object.range().is_some_and(|(start, stop)| start < end && offset < stop) {
            let id = object.id;
            return Err(damaged(format!("its system partition overlaps object {id}")));
        }
    }
    let architecture = primary.architecture.or(header.architecture);
    Ok(Partition { offset, length: end - offset, architecture })
}

/// Where the last object of a SIF ends.
pub fn end(source: &impl Source, size: u64) -> Result<u64, Failure> {
    let header = Header::read(source, size)?;
    let objects = header.objects(source)?;
    Ok(objects.iter().filter_map(|object| object.range()).map(|(_, end)| end).max().unwrap_or(header.end))
}

fn other_file_system(name: &str) -> Failure {
    Failure::new(format!("SIF whose system partition is {name}, not squashfs"))
        .hint("convert it: apptainer build NEW.sif OLD.sif")
}

fn damaged(what: String) -> Failure {
    Failure::new(format!("SIF is damaged: {what}")).hint(DAMAGED)
}

fn incomplete(message: String) -> Failure {
    Failure::new(message).hint("the copy or download is probably not complete; compare the sizes")
}

/// What the header says, checked.
struct Header {
    /// Where the descriptors start, and how many there are.
    table: u64,
    count: usize,
    /// The first byte after header and descriptors.
    end: u64,
    architecture: Option<Architecture>,
}

impl Header {
    fn read(source: &impl Source, size: u64) -> Result<Header, Failure> {
        if size < HEADER as u64 {
            return Err(incomplete(format!("SIF header is cut off after {size} bytes")));
        }
        let mut bytes = [0; HEADER];
        source.fill(&mut bytes, 0).map_err(|error| unreadable("header", error))?;
        let mut fields = Fields(&bytes[MAGIC_AT..]);
        let magic = fields.take(MAGIC.len());
        if magic != MAGIC {
            return Err(damaged("its magic is missing".to_owned()));
        }
        let version = digits(fields.take(3));
        if version != b"01" {
            let message = format!("SIF version \"{}\" is not known, only 01", quote(version));
            return Err(Failure::new(message).hint("convert it: apptainer build NEW.sif OLD.sif"));
        }
        let architecture = std::str::from_utf8(digits(fields.take(3))).ok().and_then(Architecture::from_sif);
        // The identifier, two times and the number of free descriptors.
        fields.take(16 + 8 + 8 + 8);
        let (count, table) = (fields.i64(), fields.i64());
        if !(1..=DESCRIPTOR_LIMIT).contains(&count) {
            return Err(damaged(format!(
                "it claims {count} descriptors, 1 to {DESCRIPTOR_LIMIT} make sense"
            )));
        }
        let count = count as usize;
        let end = u64::try_from(table).ok().and_then(|table| table.checked_add((count * DESCRIPTOR) as u64));
        match (u64::try_from(table), end) {
            (Ok(table), Some(end)) if table >= HEADER as u64 => {
                if end > size {
                    return Err(incomplete(format!(
                        "SIF is cut off: its descriptors end at byte {end}, the file at {size}"
                    )));
                }
                Ok(Header { table, count, end, architecture })
            }
            _ => Err(damaged(format!("its descriptors start at byte {table}"))),
        }
    }

    /// The descriptors that are in use.
    fn objects(&self, source: &impl Source) -> Result<Vec<Object>, Failure> {
        let mut bytes = vec![0; self.count * DESCRIPTOR];
        source.fill(&mut bytes, self.table).map_err(|error| unreadable("descriptors", error))?;
        let descriptors = bytes.chunks_exact(DESCRIPTOR).enumerate();
        Ok(descriptors.filter_map(|(number, bytes)| Object::parse(number, bytes)).collect())
    }
}

fn unreadable(what: &str, error: io::Error) -> Failure {
    Failure::caused_by(format!("cannot read the SIF {what}"), error)
        .or_hint("its file system fails; the node's kernel log tells more")
}

/// A descriptor in use. The last three fields mean something only in a partition.
#[derive(Clone, Copy, Debug)]
struct Object {
    /// Its place in the table.
    number: usize,
    /// The number by which siftool knows it.
    id: u32,
    kind: i32,
    offset: i64,
    length: i64,
    file_system: i32,
    purpose: i32,
    architecture: Option<Architecture>,
}

impl Object {
    fn parse(number: usize, bytes: &[u8]) -> Option<Object> {
        let mut fields = Fields(bytes);
        let kind = fields.i32();
        if fields.take(1) == [0] {
            return None;
        }
        let id = fields.i32() as u32;
        // Group and link.
        fields.take(4 + 4);
        let (offset, length) = (fields.i64(), fields.i64());
        // The padded length, two times, uid, gid and the name.
        fields.take(8 + 8 + 8 + 8 + 8 + 128);
        let (file_system, purpose) = (fields.i32(), fields.i32());
        let architecture = std::str::from_utf8(digits(fields.take(3))).ok().and_then(Architecture::from_sif);
        Some(Object { number, id, kind, offset, length, file_system, purpose, architecture })
    }

    /// First byte and end, if they are possible at all and not empty.
    fn range(&self) -> Option<(u64, u64)> {
        let (offset, length) = (u64::try_from(self.offset).ok()?, u64::try_from(self.length).ok()?);
        let end = offset.checked_add(length)?;
        (length > 0).then_some((offset, end))
    }

    fn is_partition(&self, purpose: i32) -> bool {
        self.kind == PARTITION && self.purpose == purpose
    }
}

/// The one primary system partition.
fn primary(objects: &[Object]) -> Result<Object, Failure> {
    let mut found = objects.iter().filter(|object| object.is_partition(PRIMARY_SYSTEM));
    if let Some(first) = found.next() {
        return match found.next() {
            None => Ok(*first),
            Some(second) => Err(Failure::new(format!(
                "SIF with two primary system partitions (objects {} and {})",
                first.id, second.id
            ))
            .hint(format!("remove one of them: siftool del {} FILE", second.id))),
        };
    }
    let failure = Failure::new("SIF without a squashfs system partition");
    if let Some(other) = objects.iter().find(|object| object.is_partition(SYSTEM)) {
        let id = other.id;
        return Err(
            failure.hint(format!("make its system partition the primary one: siftool setprim {id} FILE"))
        );
    }
    if objects.iter().any(|object| object.kind == OCI_ROOT_INDEX) {
        return Err(failure.hint("this is an OCI-SIF; build the image without --oci"));
    }
    Err(failure.hint("convert it: apptainer build NEW.sif OLD.sif"))
}

/// A field of digits, up to its NUL.
fn digits(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    &bytes[..end]
}

/// Fields one after the other. Past the end all is empty or zero; the callers' buffers are long enough.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (field, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        field
    }

    fn i32(&mut self) -> i32 {
        i32::from_le_bytes(self.take(4).try_into().unwrap_or_default())
    }

    fn i64(&mut self) -> i64 {
        i64::from_le_bytes(self.take(8).try_into().unwrap_or_default())
    }
}

#[cfg(test)]
pub(super) mod tests;
