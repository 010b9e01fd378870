//! The files of an image, one after the other: each directory before what is in it, names in order.
//!
//! Run by: the user, in the exporter.

use std::io::Read;

use mizzen_core::Failure;

use crate::tar::Entry;

/// What there is to export.
pub trait Files {
    /// The next one; none at the end.
    fn next(&mut self) -> Result<Option<Found<'_>>, Failure>;
}

/// Something in an image.
pub struct Found<'a> {
    /// What it is, with its path below the root, which has an empty one.
    pub entry: Entry,
    /// Which file it is, if it has other names.
    pub identity: Option<(u64, u64)>,
    /// The content of a file. Its errors have a [`Failure`] inside.
    pub content: Box<dyn Read + 'a>,
    /// Whether it is a socket, which no archive can have.
    pub is_socket: bool,
}

/// Which extended attributes belong to a file. Others belong to the machine that it is on: labels of SELinux, marks of
/// overlays, the striping of Lustre.
pub fn is_kept(attribute: &[u8]) -> bool {
    attribute.starts_with(b"user.") || attribute == b"security.capability"
}

/// A path below a directory.
pub fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    if directory.is_empty() { name.to_vec() } else { [directory, b"/", name].concat() }
}
