//! Squashfs 4.0: a read-only reader that trusts nothing in an image ([`Image`]), and a FUSE server for it ([`fuse`]).
//!
//! Run by: the user, in the launcher (the reader) and in the FUSE server process (both).

#![deny(unsafe_code)]

pub mod fuse;
mod reader;

pub use reader::{
    Compressor, Directory, Entry, EntryType, Error, Image, Inode, InodeRef, Kind, Listing, Piece,
    RegularFile, Result, Superblock, Symlink,
};
