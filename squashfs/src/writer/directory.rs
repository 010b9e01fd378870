//! Directory listings: runs of entries behind headers, with an index into large ones.
//!
//! Run by: the user, in the importer.

use super::codec::Encoder;
use super::error::{Error, Result};
use super::metadata::{METADATA_LEN, MetadataRef, MetadataTable};

/// Entries behind one header at most.
const MAX_RUN: usize = 256;
/// What mksquashfs counts for `.` and `..`, and the kernel expects in the inode.
const DOTS_LEN: u32 = 3;

/// One name in a listing.
pub(super) struct ListingEntry<'a> {
    pub name: &'a [u8],
    pub inode: MetadataRef,
    pub number: u32,
    /// The basic inode type, even if the inode is an extended one.
    pub file_type: u16,
}

/// Where a listing is, for its directory's inode.
pub(super) struct Listing {
    pub place: MetadataRef,
    /// Length as the inode has it.
    pub len: u32,
    /// Index entries as they are in the inode, and their number.
    pub index: Vec<u8>,
    pub index_len: u16,
}

/// Writes the listing of a directory; `entries` are sorted by name.
pub(super) fn write_listing(
    entries: &[ListingEntry<'_>],
    table: &mut MetadataTable,
    encoder: &mut Encoder,
) -> Result<Listing> {
    let place = table.place()?;
    let mut listing = Listing { place, len: 0, index: Vec::new(), index_len: 0 };
    let mut indexed_block = 0;
    let mut rest = entries;
    while let [first, ..] = rest {
        let (run, later) = rest.split_at(run_len(rest));
        rest = later;
        // The first header of each further metadata block: readers start there instead of at the beginning.
        let block = (usize::from(place.offset) + listing.len as usize) / METADATA_LEN;
        if block > indexed_block && listing.index_len < u16::MAX {
            indexed_block = block;
            listing.push_index(first.name, table.place()?);
        }
        let bytes = encode_run(run, first);
        table.write(&bytes, encoder)?;
        let len = u32::try_from(bytes.len()).ok().and_then(|len| listing.len.checked_add(len));
        listing.len = len.filter(|len| *len < u32::MAX - DOTS_LEN).ok_or(Error::TooMany {
            what: "bytes of names in one directory",
            limit: (u32::MAX - DOTS_LEN).into(),
        })?;
    }
    listing.len += DOTS_LEN;
    Ok(listing)
}

impl Listing {
    fn push_index(&mut self, name: &[u8], place: MetadataRef) {
        self.index.extend_from_slice(&self.len.to_le_bytes());
        self.index.extend_from_slice(&place.block.to_le_bytes());
        // A name has 1 to 255 bytes.
        self.index.extend_from_slice(&(name.len() as u32 - 1).to_le_bytes());
        self.index.extend_from_slice(name);
        self.index_len += 1;
    }
}

/// How many entries can share a header: it has one metadata block for all their inodes, and the number that theirs
/// are near to.
fn run_len(entries: &[ListingEntry<'_>]) -> usize {
    let Some(first) = entries.first() else { return 0 };
    let fits = |entry: &&ListingEntry<'_>| {
        entry.inode.block == first.inode.block && number_delta(entry, first).is_some()
    };
    entries.iter().take(MAX_RUN).take_while(fits).count()
}

fn number_delta(entry: &ListingEntry<'_>, first: &ListingEntry<'_>) -> Option<i16> {
    i16::try_from(i64::from(entry.number) - i64::from(first.number)).ok()
}

fn encode_run(run: &[ListingEntry<'_>], first: &ListingEntry<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&(run.len() as u32 - 1).to_le_bytes());
    bytes.extend_from_slice(&first.inode.block.to_le_bytes());
    bytes.extend_from_slice(&first.number.to_le_bytes());
    for entry in run {
        bytes.extend_from_slice(&entry.inode.offset.to_le_bytes());
        bytes.extend_from_slice(&number_delta(entry, first).unwrap_or_default().to_le_bytes());
        bytes.extend_from_slice(&entry.file_type.to_le_bytes());
        bytes.extend_from_slice(&(entry.name.len() as u16 - 1).to_le_bytes());
        bytes.extend_from_slice(entry.name);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(block: u32, number: u32) -> ListingEntry<'static> {
        ListingEntry { name: b"n", inode: MetadataRef { block, offset: 0 }, number, file_type: 2 }
    }

    #[test]
    fn a_run_ends_where_its_header_does_not_fit() {
        assert_eq!(run_len(&[]), 0);
        let many: Vec<_> = (1..=300).map(|number| entry(0, number)).collect();
        assert_eq!(run_len(&many), 256);
        assert_eq!(run_len(&[entry(0, 1), entry(0, 2), entry(8000, 3)]), 2);
        assert_eq!(run_len(&[entry(0, 1), entry(0, 32768), entry(0, 32769)]), 2);
        assert_eq!(run_len(&[entry(0, 40000), entry(0, 40000 - 32768), entry(0, 40000 - 32769)]), 2);
    }
}
