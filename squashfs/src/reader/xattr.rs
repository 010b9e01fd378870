//! Extended attributes.
//!
//! Run by: the user, in the FUSE server process.

use super::Image;
use super::bytes::{u16_at, u32_at, u64_at};
use super::error::{Error, Result};
use super::inode::Inode;
use super::metadata::{MetadataReader, Place, Table};
use super::superblock::Superblock;

/// Limits of Linux: a value, and the names of one file together.
const VALUE_MAX: u32 = 65536;
const LIST_MAX: usize = 65536;
/// More names than this do not fit into LIST_MAX.
const COUNT_MAX: u32 = 16384;
const NAME_MAX: u16 = 255;

/// Set in an attribute's type if its value is stored elsewhere, shared with other files.
const ELSEWHERE: u16 = 0x100;
const ID_RECORD_LEN: u64 = 16;

/// Where the attributes of the image are.
#[derive(Debug)]
pub struct XattrTables {
    /// Start of names and values.
    start: u64,
    /// Their end: where the head of the table is.
    end: u64,
    /// One record per set of attributes.
    ids: Table,
}

/// The position of one set of attributes, and how many it has.
struct Set<'a> {
    reader: MetadataReader<'a>,
    count: u32,
}

impl Image {
    /// Reads the head of the xattr table, if the image has one.
    pub(super) fn open_xattrs(&self, superblock: &Superblock) -> Result<Option<XattrTables>> {
        let Some(head_at) = superblock.xattr_table else { return Ok(None) };
        let mut head = [0; 16];
        self.read_image(head_at, &mut head)?;
        let (start, count) = (u64_at(&head, 0)?, u32_at(&head, 8)?);
        if start >= head_at {
            return Err(Error::Corrupt("the xattr table starts behind its end"));
        }
        // The index follows the head, up to the end of the image.
        let ids = Table::new(head_at + 16, count.into(), ID_RECORD_LEN, superblock.bytes_used)?;
        Ok(Some(XattrTables { start, end: head_at, ids }))
    }

    /// Whether any file of the image has extended attributes.
    pub fn has_xattrs(&self) -> bool {
        self.xattrs.is_some()
    }

    /// The names of a file's attributes, each ended by a zero byte, as listxattr(2) gives them.
    pub fn list_xattrs(&self, inode: &Inode) -> Result<Vec<u8>> {
        let mut list = Vec::new();
        let Some(mut set) = self.xattr_set(inode)? else { return Ok(list) };
        while let Some(attribute) = set.next()? {
            list.extend_from_slice(attribute.prefix);
            list.extend_from_slice(&attribute.name);
            list.push(0);
            if list.len() > LIST_MAX {
                return Err(Error::Corrupt("a file with too many extended attributes"));
            }
            set.skip_value()?;
        }
        Ok(list)
    }

    /// The value of a file's attribute `name`.
    pub fn get_xattr(&self, inode: &Inode, name: &[u8]) -> Result<Option<Vec<u8>>> {
        let Some(mut set) = self.xattr_set(inode)? else { return Ok(None) };
        while let Some(attribute) = set.next()? {
            if name.strip_prefix(attribute.prefix) != Some(&attribute.name) {
                set.skip_value()?;
                continue;
            }
            if !attribute.elsewhere {
                return read_value(&mut set.reader).map(Some);
            }
            let _size_of_reference = set.reader.u32()?;
            let reference = u64::from_le_bytes(set.reader.array()?);
            return read_value(&mut self.xattr_reader(reference)?).map(Some);
        }
        Ok(None)
    }

    fn xattr_set(&self, inode: &Inode) -> Result<Option<Set<'_>>> {
        let (Some(tables), Some(number)) = (&self.xattrs, inode.xattrs) else { return Ok(None) };
        let record: [u8; ID_RECORD_LEN as usize] = tables.ids.reader(self, number.into())?.array()?;
        let count = u32_at(&record, 8)?;
        if count > COUNT_MAX {
            return Err(Error::Corrupt("a file with too many extended attributes"));
        }
        Ok(Some(Set { reader: self.xattr_reader(u64_at(&record, 0)?)?, count }))
    }

    fn xattr_reader(&self, reference: u64) -> Result<MetadataReader<'_>> {
        let tables = self.xattrs.as_ref().ok_or(Error::Corrupt("no xattr table"))?;
        let place = Place::new(tables.start, reference >> 16, (reference & 0xffff) as u16)?;
        MetadataReader::new(self, place, tables.end)
    }
}

struct Attribute {
    prefix: &'static [u8],
    name: Vec<u8>,
    elsewhere: bool,
}

impl Set<'_> {
    /// The next attribute; its value must be read or skipped before the one after.
    fn next(&mut self) -> Result<Option<Attribute>> {
        if self.count == 0 {
            return Ok(None);
        }
        self.count -= 1;
        let raw: [u8; 4] = self.reader.array()?;
        let (kind, len) = (u16_at(&raw, 0)?, u16_at(&raw, 2)?);
        if len > NAME_MAX {
            return Err(Error::Corrupt("the name of an extended attribute is too long"));
        }
        let mut name = vec![0; len.into()];
        self.reader.read(&mut name)?;
        let prefix: &[u8] = match kind & 0xff {
            0 => b"user.",
            1 => b"trusted.",
            2 => b"security.",
            _ => return Err(Error::Corrupt("an extended attribute of unknown kind")),
        };
        Ok(Some(Attribute { prefix, name, elsewhere: kind & ELSEWHERE != 0 }))
    }

    fn skip_value(&mut self) -> Result<()> {
        let len = value_len(&mut self.reader)?;
        self.reader.skip(len.into())
    }
}

fn value_len(reader: &mut MetadataReader<'_>) -> Result<u32> {
    let len = reader.u32()?;
    if len > VALUE_MAX {
        Err(Error::Corrupt("the value of an extended attribute is too long"))
    } else {
        Ok(len)
    }
}

fn read_value(reader: &mut MetadataReader<'_>) -> Result<Vec<u8>> {
    let mut value = vec![0; value_len(reader)? as usize];
    reader.read(&mut value)?;
    Ok(value)
}
