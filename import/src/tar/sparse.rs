//! Sparse files: the archive has their data and a map of where it belongs; the rest are holes. GNU tar has made four forms
//! of that map in its life, and all are in use.
//!
//! Run by: the user, in the importer.

use super::error::Problem;
use super::header::{BLOCK_LEN, Block, number};
use super::pax::{Records, decimal};

type Result<T> = std::result::Result<T, Problem>;

/// How many regions a map may have: 4 MiB of them in memory.
const MAX_REGIONS: usize = 256 << 10;
/// How long the map in front of the content (1.0) may be.
pub const MAX_MAP_LEN: usize = 1 << 20;

const TOO_LONG: Problem = Problem::Map("with too many regions");
const NOT_A_NUMBER: Problem = Problem::Map("without a valid number");

/// Data somewhere in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    pub offset: u64,
    pub len: u64,
}

/// Which form of a map the records tell of.
#[derive(Debug, PartialEq, Eq)]
pub enum Form {
    /// Not a sparse file, or of a version that nobody knows.
    None,
    /// 0.0 and 0.1: in the records.
    InRecords,
    /// 1.0: in front of the content.
    InContent,
}

/// The form, as Go guesses it: the first versions did not say which they are.
pub fn form(records: &Records) -> Form {
    let version = (records.get("GNU.sparse.major"), records.get("GNU.sparse.minor"));
    let has_map = !records.sparse_pairs.is_empty() || records.get("GNU.sparse.map").is_some();
    match version {
        (Some(b"0"), Some(b"0" | b"1")) => Form::InRecords,
        (Some(b"1"), Some(b"0")) => Form::InContent,
        (None, None) if has_map => Form::InRecords,
        _ => Form::None,
    }
}

/// The map of the forms 0.0 and 0.1.
pub fn map_of_records(records: &Records) -> Result<Vec<Region>> {
    let count = records.number_of_pairs().ok_or(NOT_A_NUMBER)?;
    let values: Vec<&[u8]> = if records.sparse_pairs.is_empty() {
        let map = records.get("GNU.sparse.map");
        map.map(|map| map.split(|byte| *byte == b',').collect()).unwrap_or_default()
    } else {
        records.sparse_pairs.iter().map(Vec::as_slice).collect()
    };
    if !values.len().is_multiple_of(2) || usize::try_from(count) != Ok(values.len() / 2) {
        return Err(Problem::Map("of another length than it says"));
    }
    pairs(values.into_iter().map(decimal))
}

fn pairs(mut values: impl Iterator<Item = Option<i64>>) -> Result<Vec<Region>> {
    let mut regions = Vec::new();
    while let Some(offset) = values.next() {
        if regions.len() == MAX_REGIONS {
            return Err(TOO_LONG);
        }
        regions.push(region(offset, values.next().flatten())?);
    }
    Ok(regions)
}

fn region(offset: Option<i64>, len: Option<i64>) -> Result<Region> {
    match (offset.map(u64::try_from), len.map(u64::try_from)) {
        (Some(Ok(offset)), Some(Ok(len))) => Ok(Region { offset, len }),
        _ => Err(NOT_A_NUMBER),
    }
}

/// The map of the form 1.0, from the blocks that `next_block` reads from the content: decimal numbers, each with a newline,
/// of which the first is the number of regions; then the rest of the last block.
pub fn map_of_content<E: From<Problem>>(
    mut next_block: impl FnMut() -> std::result::Result<Block, E>,
) -> std::result::Result<Vec<Region>, E> {
    let mut text: Vec<u8> = Vec::new();
    let mut lines = 0;
    let mut wanted = None;
    loop {
        if text.len() + BLOCK_LEN > MAX_MAP_LEN {
            return Err(TOO_LONG.into());
        }
        let block = next_block()?;
        lines += block.iter().filter(|byte| **byte == b'\n').count();
        text.extend_from_slice(&block);
        if wanted.is_none() && lines > 0 {
            let count = text.split(|byte| *byte == b'\n').next().and_then(decimal).ok_or(NOT_A_NUMBER)?;
            let count = usize::try_from(count).map_err(|_| NOT_A_NUMBER)?;
            if count > MAX_REGIONS {
                return Err(TOO_LONG.into());
            }
            wanted = Some(count);
        }
        if let Some(count) = wanted
            && lines > 2 * count
        {
            let values = text.split(|byte| *byte == b'\n').skip(1).take(2 * count);
            return Ok(pairs(values.map(decimal))?);
        }
    }
}

/// The map of the old GNU form: four regions in the header, and 21 in each block that `next_block` reads behind it.
pub fn map_of_header<E: From<Problem>>(
    header: &Block,
    mut next_block: impl FnMut() -> std::result::Result<Block, E>,
) -> std::result::Result<Vec<Region>, E> {
    let mut regions = Vec::new();
    add_regions(&header[386..482], &mut regions)?;
    let mut goes_on = header[482] != 0;
    while goes_on {
        let block = next_block()?;
        add_regions(&block[..504], &mut regions)?;
        goes_on = block[504] != 0;
    }
    Ok(regions)
}

/// The size of a file with a map in its header.
pub fn real_size(header: &Block) -> Result<i64> {
    number(&header[483..495]).ok_or(Problem::Number { field: "size" })
}

fn add_regions(fields: &[u8], regions: &mut Vec<Region>) -> Result<()> {
    for field in fields.chunks_exact(24) {
        // As with GNU and BSD tar, an empty field ends the regions of this block.
        if field[0] == 0 {
            break;
        }
        if regions.len() == MAX_REGIONS {
            return Err(TOO_LONG);
        }
        regions.push(region(number(&field[..12]), number(&field[12..]))?);
    }
    Ok(())
}

/// Whether regions follow each other within the file.
pub fn check(regions: &[Region], size: u64) -> Result<()> {
    let mut end = 0;
    for region in regions {
        let start = region.offset;
        let next = start.checked_add(region.len).filter(|next| start >= end && *next <= size);
        end = next.ok_or(Problem::Map("with regions that overlap, or are beyond its end"))?;
    }
    Ok(())
}
