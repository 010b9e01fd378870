//! Where the bytes of an image come from: a file, or, as long as a copy of it is being made, whatever has them.
//!
//! Run by: the user, in the launcher and in the FUSE server process.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{Advice, fadvise, fstat};

/// Tells the user something that is no failure.
pub type TellNote = Box<dyn Fn(&str) + Send + Sync>;

/// A file as an image is read from it. Any number of threads read at once.
pub trait ByteSource: Send + Sync {
    /// How long it is.
    fn size(&self) -> io::Result<u64>;

    /// Fills `buffer` from byte `at` on; a file that ends before is an error ([`io::ErrorKind::UnexpectedEof`]).
    fn read_exact_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()>;

    /// These bytes will be needed soon. Only a hint.
    fn will_need(&self, at: u64, length: u64);

    /// The image as it was opened first: its times tell whether somebody has written to it.
    fn original(&self) -> BorrowedFd<'_>;

    /// All descriptors that it reads from, for those who close the others.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>>;

    /// Has `tell` told, once, what the user should know and what is no failure.
    fn on_note(&self, tell: TellNote) {
        drop(tell);
    }

    /// How many bytes were read from elsewhere because the copy did not have them; None where there is no copy.
    fn missed(&self) -> Option<u64> {
        None
    }

    /// The system calls that reading takes beside those that every server may make ([`crate::fuse::filter`]).
    fn system_calls(&self) -> &'static [libc::c_long] {
        &[]
    }
}

impl ByteSource for File {
    fn size(&self) -> io::Result<u64> {
        Ok(u64::try_from(fstat(self)?.st_size).unwrap_or(0))
    }

    fn read_exact_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buffer, at)
    }

    fn will_need(&self, at: u64, length: u64) {
        let _ = fadvise(self, at, NonZeroU64::new(length), Advice::WillNeed);
    }

    fn original(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.as_fd()]
    }
}
