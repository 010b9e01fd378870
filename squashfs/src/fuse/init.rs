//! The first request of a connection, in which kernel and server agree on what they can do.
//!
//! Run by: the user, in the FUSE server process.

#![forbid(unsafe_code)]

use std::io::{self, IoSlice};

use rustix::io::Errno;

use super::abi::{self, Message, Request, capability, opcode};
use super::device::Device;
use super::send;

/// All that helps a file system which never changes.
const WANTED: u32 = capability::ASYNC_READ
    // Always, and not only when the kernel believes that it helps (READDIRPLUS_AUTO): Python lists each directory of packages, and
    // then looks up what is in it.
    | capability::DO_READDIRPLUS
    | capability::NO_OPEN_SUPPORT
    | capability::PARALLEL_DIROPS
    | capability::MAX_PAGES
    | capability::CACHE_SYMLINKS
    | capability::NO_OPENDIR_SUPPORT;

/// The largest read. The kernel's own limit, unless its administrator has raised it.
const MAX_READ: usize = 1 << 20;
/// Nothing is ever written; this is the smallest value that the kernel takes.
const MAX_WRITE: u32 = 4096;
/// Readahead requests that may be under way at once; the default of 12 is little for many processes.
const MAX_BACKGROUND: u16 = 64;
const CONGESTION_THRESHOLD: u16 = 48;

/// What the kernel can do of what matters later.
#[derive(Debug, Clone, Copy)]
pub struct Features {
    /// ENOSYS to OPEN means "do not ask again", not failure.
    pub no_open: bool,
    /// The same for OPENDIR.
    pub no_opendir: bool,
}

/// FUSE_NOTIFY_RESEND: what was taken and not answered is to be sent again.
const RESEND: u32 = 7;

/// Goes on where another server has ended.
pub fn resume(device: &Device) -> Features {
    let mut message = Message::default();
    let (length, no_request) = (16, [0, 0]);
    message.u32s(&[length, RESEND]).u32s(&no_request);
    // Before Linux 6.9 there is no such message, and whoever waits for the other one's answers gets none.
    device.send(&[IoSlice::new(message.bytes())]);
    Features { no_open: true, no_opendir: true }
}

/// Answers INIT; `None` if the file system was unmounted before.
pub fn negotiate(device: &Device) -> io::Result<Option<Features>> {
    let mut buffer = vec![0; abi::REQUEST_BUFFER];
    loop {
        let Some(bytes) = device.receive(&mut buffer)? else { return Ok(None) };
        let malformed = || io::Error::new(io::ErrorKind::InvalidData, "a malformed FUSE request");
        let request = Request::parse(bytes).ok_or_else(malformed)?;
        if request.opcode != opcode::INIT {
            send(device, request.unique, Errno::IO.raw_os_error(), &[]);
            continue;
        }
        let fields = request.fields();
        let major = fields.u32(0).ok_or_else(malformed)?;
        let minor = fields.u32(4).ok_or_else(malformed)?;
        if major > abi::MAJOR {
            // The kernel then sends INIT again, with the version it is told here.
            let mut message = Message::default();
            message.u32s(&[abi::MAJOR, abi::MINOR]).raw(&[0; 56]);
            send(device, request.unique, 0, &[IoSlice::new(message.bytes())]);
            continue;
        }
        if major < abi::MAJOR || minor < abi::MIN_MINOR {
            send(device, request.unique, Errno::PROTO.raw_os_error(), &[]);
            let message =
                format!("the kernel speaks FUSE {major}.{minor}; at least 7.{} is needed", abi::MIN_MINOR);
            return Err(io::Error::new(io::ErrorKind::Unsupported, message));
        }
        let readahead = fields.u32(8).ok_or_else(malformed)?;
        let flags = WANTED & fields.u32(12).ok_or_else(malformed)?;
        send(device, request.unique, 0, &[IoSlice::new(init_out(readahead, flags).bytes())]);
        let has = |flag| flags & flag != 0;
        return Ok(Some(Features {
            no_open: has(capability::NO_OPEN_SUPPORT),
            no_opendir: has(capability::NO_OPENDIR_SUPPORT),
        }));
    }
}

/// `struct fuse_init_out`
fn init_out(readahead: u32, flags: u32) -> Message {
    let max_pages = (MAX_READ / rustix::param::page_size()).clamp(1, usize::from(u16::MAX)) as u16;
    let time_granularity = 1;
    let mut message = Message::default();
    message
        .u32s(&[abi::MAJOR, abi::MINOR, readahead, flags])
        .u16s(&[MAX_BACKGROUND, CONGESTION_THRESHOLD])
        .u32s(&[MAX_WRITE, time_granularity])
        .u16s(&[max_pages, 0])
        .u32s(&[0; 8]);
    message
}
