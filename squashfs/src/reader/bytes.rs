//! Little-endian numbers out of a byte slice, with an error instead of a panic where it ends too early.
//!
//! Run by: the user, in the launcher and in the FUSE server process.

use super::error::{Error, Result};

/// The `N` bytes at `at`.
pub fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N]> {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .copied()
        .ok_or(Error::Corrupt("a record ends too early"))
}

/// The number at `at`.
pub fn u16_at(bytes: &[u8], at: usize) -> Result<u16> {
    array_at(bytes, at).map(u16::from_le_bytes)
}

/// The number at `at`.
pub fn u32_at(bytes: &[u8], at: usize) -> Result<u32> {
    array_at(bytes, at).map(u32::from_le_bytes)
}

/// The number at `at`.
pub fn u64_at(bytes: &[u8], at: usize) -> Result<u64> {
    array_at(bytes, at).map(u64::from_le_bytes)
}
