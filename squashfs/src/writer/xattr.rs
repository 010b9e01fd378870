//! Extended attributes: every distinct set is stored once, and so is every larger value.
//!
//! Run by: the user, in the importer.

use std::collections::BTreeMap;

use super::codec::Encoder;
use super::error::{Error, Result};
use super::metadata::{MetadataRef, MetadataTable, write_indexed};
use super::output::{Output, PositionedOutput};

/// Limits of Linux: a full name, a value, and the names of one file together.
const NAME_MAX: usize = 255;
const VALUE_MAX: usize = 65536;
const LIST_MAX: usize = 65536;
/// Namespaces of attributes, at the number that they have in the image.
const PREFIXES: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
/// Set in an attribute's type if its value is stored elsewhere, with the first file that had it.
const ELSEWHERE: u16 = 0x100;
/// Length of a reference to a value; values that are not longer are repeated.
const REFERENCE_LEN: usize = 8;

/// A file's extended attributes, by name.
pub(super) type Xattrs = BTreeMap<Vec<u8>, Vec<u8>>;

/// Whether all attributes of the entry `name` can be stored.
pub(super) fn check(name: &[u8], xattrs: &Xattrs) -> Result<()> {
    let mut list = 0;
    for (attribute, value) in xattrs {
        list += attribute.len() + 1;
        let problem = if split(attribute).is_none() {
            "is not one of user.*, trusted.* or security.*"
        } else if attribute.len() > NAME_MAX {
            "has a name of more than 255 bytes"
        } else if attribute.contains(&0) {
            "has a zero byte in its name"
        } else if value.len() > VALUE_MAX {
            "has a value of more than 64 KiB"
        } else if list > LIST_MAX {
            "is one too many: the names are longer than 64 KiB together"
        } else {
            continue;
        };
        return Err(Error::Xattr { name: name.to_vec(), attribute: attribute.clone(), problem });
    }
    Ok(())
}

/// The number of the namespace, and the rest of the name.
fn split(attribute: &[u8]) -> Option<(u16, &[u8])> {
    (0..).zip(PREFIXES).find_map(|(number, prefix)| {
        let rest = attribute.strip_prefix(prefix).filter(|rest| !rest.is_empty())?;
        Some((number, rest))
    })
}

/// The attributes of an image as they are collected.
#[derive(Default)]
pub(super) struct XattrTable<'a> {
    attributes: MetadataTable,
    /// Records of the sets: place, count, length.
    records: Vec<u8>,
    sets: BTreeMap<&'a Xattrs, u32>,
    values: BTreeMap<&'a [u8], MetadataRef>,
}

impl<'a> XattrTable<'a> {
    /// The number of a set of attributes; none for a file without any.
    pub fn number(&mut self, xattrs: &'a Xattrs, encoder: &mut Encoder) -> Result<Option<u32>> {
        if xattrs.is_empty() {
            return Ok(None);
        }
        if let Some(number) = self.sets.get(xattrs) {
            return Ok(Some(*number));
        }
        let too_many = |_| Error::TooMany { what: "sets of extended attributes", limit: u32::MAX.into() };
        let number = u32::try_from(self.sets.len()).map_err(too_many)?;
        let place = self.attributes.place()?;
        let mut len = 0;
        for (attribute, value) in xattrs {
            len += self.write(attribute, value, encoder)?;
        }
        self.records.extend_from_slice(&place.raw().to_le_bytes());
        self.records.extend_from_slice(&(xattrs.len() as u32).to_le_bytes());
        // At most 64 KiB of names, with a value of 64 KiB each: below 2 GiB.
        self.records.extend_from_slice(&(len as u32).to_le_bytes());
        self.sets.insert(xattrs, number);
        Ok(Some(number))
    }

    /// Stores one attribute; returns its length.
    fn write(&mut self, attribute: &[u8], value: &'a [u8], encoder: &mut Encoder) -> Result<usize> {
        let Some((prefix, rest)) = split(attribute) else {
            return Err(Error::Unknown { what: "an extended attribute" });
        };
        let known = self.values.get(value).copied();
        let kind = if known.is_some() { prefix | ELSEWHERE } else { prefix };
        let mut record = Vec::new();
        record.extend_from_slice(&kind.to_le_bytes());
        record.extend_from_slice(&(rest.len() as u16).to_le_bytes());
        record.extend_from_slice(rest);
        self.attributes.write(&record, encoder)?;
        let place = self.attributes.place()?;
        let reference;
        let stored = match known {
            Some(known) => {
                reference = known.raw().to_le_bytes();
                reference.as_slice()
            }
            None => {
                if value.len() > REFERENCE_LEN {
                    self.values.insert(value, place);
                }
                value
            }
        };
        self.attributes.write(&(stored.len() as u32).to_le_bytes(), encoder)?;
        self.attributes.write(stored, encoder)?;
        Ok(record.len() + size_of::<u32>() + stored.len())
    }

    /// Writes all tables; returns where the head is, or none if no file has attributes.
    pub fn finish<W: Output>(
        self,
        out: &mut PositionedOutput<W>,
        encoder: &mut Encoder,
    ) -> Result<Option<u64>> {
        if self.sets.is_empty() {
            return Ok(None);
        }
        let start = out.position();
        self.attributes.finish(out, encoder)?;
        let count = self.sets.len() as u32;
        let head = |out: &mut PositionedOutput<W>| {
            out.write(&start.to_le_bytes())?;
            out.write(&count.to_le_bytes())?;
            out.write(&0_u32.to_le_bytes())
        };
        write_indexed(&self.records, head, out, encoder).map(Some)
    }
}
