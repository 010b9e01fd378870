//! The FUSE device: how requests arrive and answers leave. With unsafe code for one ioctl.
//!
//! Run by: the user, in the FUSE server process.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;

/// FUSE_DEV_IOC_CLONE: joins a newly opened /dev/fuse to the connection of another descriptor.
pub const CLONE: rustix::ioctl::Opcode = rustix::ioctl::opcode::read::<u32>(229, 0);

/// A device that belongs to no connection yet.
pub struct Spare(OwnedFd);

impl Spare {
    /// One that somebody else has opened.
    pub fn new(device: OwnedFd) -> Spare {
        Spare(device)
    }

    /// As many as there are, and `count` at most: /dev/fuse may be hidden from the server. To be called before the filter,
    /// which lets no file be opened.
    pub fn open(count: usize) -> Vec<Spare> {
        let open = |_| File::options().read(true).write(true).open("/dev/fuse").ok();
        (0..count).map_while(open).map(|file| Spare(file.into())).collect()
    }
}

/// A connection to the kernel.
pub struct Device(Arc<OwnedFd>);

impl Device {
    /// A connection through an already mounted descriptor.
    pub fn new(fd: OwnedFd) -> Device {
        Device(Arc::new(fd))
    }

    /// The same connection with a request queue of its own, or, where there is no spare device or the kernel does not
    /// join it, with a shared one.
    pub fn another(&self, spare: Option<Spare>) -> Device {
        let separate = spare.and_then(|spare| self.join(spare).ok());
        Device(separate.map_or_else(|| Arc::clone(&self.0), Arc::new))
    }

    /// Makes a spare one a part of this connection.
    #[allow(unsafe_code)]
    pub fn join(&self, Spare(fd): Spare) -> io::Result<OwnedFd> {
        let original = self.0.as_raw_fd() as u32;
        // SAFETY: FUSE_DEV_IOC_CLONE reads one u32 through the pointer it is given, which Setter makes point
        // to its own copy of `original`; it writes nothing.
        unsafe { rustix::ioctl::ioctl(fd.as_fd(), rustix::ioctl::Setter::<CLONE, u32>::new(original)) }?;
        Ok(fd)
    }

    /// The next request, or `None` when the file system is unmounted or the connection aborted.
    pub fn receive<'a>(&self, buffer: &'a mut [u8]) -> io::Result<Option<&'a [u8]>> {
        loop {
            match rustix::io::read(&self.0, &mut *buffer) {
                Ok(0) | Err(Errno::NODEV) => return Ok(None),
                Ok(len) => return Ok(buffer.get(..len)),
                // ENOENT: the request was interrupted before it got here.
                Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends an answer, which is one write whatever its parts are.
    pub fn send(&self, parts: &[IoSlice<'_>]) {
        // The failures are ENOENT (the asking process was interrupted meanwhile) and ENODEV (unmounted; the
        // next receive tells). Neither leaves anything to do here.
        while rustix::io::writev(&self.0, parts) == Err(Errno::INTR) {}
    }
}
