//! Inodes: of each kind a basic form and an extended one, which is taken only where the basic one has no field.
//!
//! Run by: the user, in the importer.

use super::data::FileData;
use super::directory::Listing;
use super::tree::Device;

/// "No fragment" and "no xattrs".
const NONE: u32 = u32::MAX;
/// Added to the type of an inode in its extended form.
const EXTENDED: u16 = 7;

/// What every inode has.
pub(super) struct InodeHead {
    pub mode: u16,
    /// Numbers in the id table.
    pub uid: u16,
    pub gid: u16,
    pub mtime: u32,
    pub number: u32,
    pub nlink: u32,
    pub xattrs: Option<u32>,
}

/// What an inode has according to its kind.
pub(super) enum InodeBody<'a> {
    Directory { listing: &'a Listing, parent: u32 },
    File(&'a FileData),
    Symlink(&'a [u8]),
    BlockDevice(Device),
    CharDevice(Device),
    Fifo,
    Socket,
}

impl InodeBody<'_> {
    /// The basic type, which listings show.
    pub fn file_type(&self) -> u16 {
        match self {
            InodeBody::Directory { .. } => 1,
            InodeBody::File(_) => 2,
            InodeBody::Symlink(_) => 3,
            InodeBody::BlockDevice(_) => 4,
            InodeBody::CharDevice(_) => 5,
            InodeBody::Fifo => 6,
            InodeBody::Socket => 7,
        }
    }

    fn needs_extended(&self, head: &InodeHead) -> bool {
        head.xattrs.is_some()
            || match self {
                InodeBody::Directory { listing, .. } => {
                    listing.len > u16::MAX.into() || listing.index_len > 0
                }
                InodeBody::File(file) => {
                    // The basic form has neither a link count nor holes to report.
                    head.nlink > 1
                        || file.sparse > 0
                        || file.size > u32::MAX.into()
                        || file.start > u32::MAX.into()
                }
                _ => false,
            }
    }
}

/// An inode as it is in the image.
pub(super) fn encode_inode(head: &InodeHead, body: &InodeBody<'_>) -> Vec<u8> {
    let extended = body.needs_extended(head);
    let mut inode = Encoded(Vec::new());
    inode.u16(body.file_type() + if extended { EXTENDED } else { 0 });
    inode.u16(head.mode);
    inode.u16(head.uid);
    inode.u16(head.gid);
    inode.u32(head.mtime);
    inode.u32(head.number);
    match body {
        InodeBody::Directory { listing, parent } if extended => {
            inode.u32(head.nlink);
            inode.u32(listing.len);
            inode.u32(listing.place.block);
            inode.u32(*parent);
            inode.u16(listing.index_len);
            inode.u16(listing.place.offset);
            inode.u32(head.xattrs.unwrap_or(NONE));
            inode.0.extend_from_slice(&listing.index);
            return inode.0;
        }
        InodeBody::Directory { listing, parent } => {
            inode.u32(listing.place.block);
            inode.u32(head.nlink);
            inode.u16(listing.len as u16);
            inode.u16(listing.place.offset);
            inode.u32(*parent);
        }
        InodeBody::File(file) => {
            inode.file(file, extended.then_some((head.nlink, head.xattrs)));
            return inode.0;
        }
        InodeBody::Symlink(target) => {
            inode.u32(head.nlink);
            inode.u32(target.len() as u32);
            inode.0.extend_from_slice(target);
        }
        InodeBody::BlockDevice(device) | InodeBody::CharDevice(device) => {
            inode.u32(head.nlink);
            inode.u32(device_number(*device));
        }
        InodeBody::Fifo | InodeBody::Socket => inode.u32(head.nlink),
    }
    if extended {
        inode.u32(head.xattrs.unwrap_or(NONE));
    }
    inode.0
}

/// As the kernel encodes it (`new_encode_dev`).
fn device_number(device: Device) -> u32 {
    device.minor & 0xff | device.major << 8 | (device.minor & !0xff) << 12
}

struct Encoded(Vec<u8>);

impl Encoded {
    fn u16(&mut self, number: u16) {
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    fn u32(&mut self, number: u32) {
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    fn u64(&mut self, number: u64) {
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    /// A file; in the extended form with its link count and xattrs.
    fn file(&mut self, file: &FileData, extended: Option<(u32, Option<u32>)>) {
        let (fragment, offset) = file.tail.map_or((NONE, 0), |tail| (tail.fragment, tail.offset));
        match extended {
            Some((nlink, xattrs)) => {
                self.u64(file.start);
                self.u64(file.size);
                self.u64(file.sparse);
                self.u32(nlink);
                self.u32(fragment);
                self.u32(offset);
                self.u32(xattrs.unwrap_or(NONE));
            }
            None => {
                self.u32(file.start as u32);
                self.u32(fragment);
                self.u32(offset);
                self.u32(file.size as u32);
            }
        }
        for size in file.blocks.iter() {
            self.u32(*size);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::writer::data::Tail;

    fn encoded(file: &FileData, nlink: u32) -> Vec<u8> {
        let head = InodeHead { mode: 0o644, uid: 1, gid: 2, mtime: 3, number: 4, nlink, xattrs: None };
        encode_inode(&head, &InodeBody::File(file))
    }

    #[test]
    fn a_file_has_the_basic_form_while_its_numbers_fit() {
        let small = FileData { size: u32::MAX.into(), start: u32::MAX.into(), ..FileData::default() };
        assert_eq!(encoded(&small, 1)[..2], [2, 0]);
        assert_eq!(encoded(&small, 2)[..2], [9, 0]);
        for large in [
            FileData { size: 1 << 32, ..small.clone() },
            FileData { start: 1 << 32, ..small.clone() },
            FileData { sparse: 1, ..small.clone() },
        ] {
            assert_eq!(encoded(&large, 1)[..2], [9, 0], "{large:?}");
        }
    }

    #[test]
    fn an_extended_file_has_positions_beyond_4_gib() {
        let tail = Some(Tail { fragment: 5, offset: 6 });
        let start = 0x12_3456_789a;
        let file = FileData { size: 10, start, blocks: [7].into(), tail, ..FileData::default() };
        let inode = encoded(&file, 1);
        assert_eq!(inode.len(), 16 + 40 + 4);
        assert_eq!(inode[16..24], 0x12_3456_789a_u64.to_le_bytes());
        assert_eq!(inode[40..], [1, 5, 6, NONE, 7].map(u32::to_le_bytes).concat());
    }

    #[test]
    fn devices_are_encoded_as_the_kernel_does() {
        assert_eq!(device_number(Device { major: 1, minor: 3 }), 0x103);
        assert_eq!(device_number(Device { major: 4095, minor: (1 << 20) - 1 }), u32::MAX);
        assert_eq!(device_number(Device { major: 259, minor: 0x11170 }), 0x1111_0370);
    }
}
