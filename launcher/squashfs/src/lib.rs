//! A read-only squashfs 4.0 reader and a FUSE server for it.
//!
//! Run by: the user, in the FUSE server process (`fuse`) and in the launcher before it (`squashfs`).

#![deny(unsafe_code)]

pub mod fuse;
pub mod squashfs;
