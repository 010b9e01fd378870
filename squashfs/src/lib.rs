//! Squashfs 4.0: a read-only reader that trusts nothing in an image ([`Image`]), a FUSE server for it ([`fuse`]), and
//! a [`writer`].
//!
//! Run by: the user, in the launcher (the reader), in the FUSE server process (reader and server) and in the
//! importer (the writer).

#![deny(unsafe_code)]

pub mod fuse;
mod reader;
pub mod writer;

pub use reader::{
    ByteSource, Compressor, Directory, Entry, EntryType, Error, Image, Inode, InodeRef, Kind, Listing, Piece,
    RegularFile, Result, Superblock, Symlink, TellNote, Work,
};
