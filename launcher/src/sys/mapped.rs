//! Reads a file where the kernel has it in memory, without a copy.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::ptr::{NonNull, null_mut};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// A part of a file.
pub struct Mapped {
    begin: NonNull<u8>,
    length: usize,
}

impl Mapped {
    /// Whether the kernel can read a part of a file into memory beforehand, and so tell of an error instead of sending
    /// SIGBUS later. Since Linux 5.14.
    pub fn is_possible() -> bool {
        // SAFETY: nothing has no content that could change.
        unsafe { madvise(null_mut(), 0, Advice::LinuxPopulateRead) }.is_ok()
    }

    /// Maps what the file has from `offset`, a multiple of the page size, on.
    ///
    /// # Safety
    /// As long as it is mapped, nobody may write to this part of the file, or make the file shorter: whoever reads what is no
    /// longer there gets SIGBUS.
    pub unsafe fn new(file: &File, offset: u64, length: usize) -> io::Result<Mapped> {
        // SAFETY: a new mapping at a place that the kernel chooses.
        let begin = unsafe { mmap(null_mut(), length, ProtFlags::READ, MapFlags::SHARED, file, offset) }?;
        let begin = NonNull::new(begin.cast()).ok_or(io::ErrorKind::InvalidInput)?;
        let mapped = Mapped { begin, length };
        // SAFETY: the mapping just made; its content stays as it is.
        unsafe { madvise(begin.as_ptr().cast(), length, Advice::LinuxPopulateRead) }?;
        Ok(mapped)
    }
}

// SAFETY: a place in memory that any thread may read and give back.
unsafe impl Send for Mapped {}

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: mapped for reading as long as `self` lives.
        unsafe { std::slice::from_raw_parts(self.begin.as_ptr(), self.length) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; whoever borrowed from it is gone.
        let _ = unsafe { munmap(self.begin.as_ptr().cast(), self.length) };
    }
}
