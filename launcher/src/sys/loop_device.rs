//! Loop devices: a file as a block device, which is what the kernel mounts. Runs as root, in the keeper.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

const SET_FD: libc::Ioctl = 0x4c00;
const CLEAR_FD: libc::Ioctl = 0x4c01;
const SET_STATUS: libc::Ioctl = 0x4c04;
const CONFIGURE: libc::Ioctl = 0x4c0a;
const GET_FREE: libc::Ioctl = 0x4c82;
/// Nobody writes to it, and it goes with its last user.
const READ_ONLY_AUTOCLEAR: u32 = 1 | 4;
/// Somebody else may take the free device first, so often.
const ATTEMPTS: u32 = 64;

/// `struct loop_info64`; what is not named is zero.
#[repr(C)]
#[derive(Clone, Copy)]
struct Info {
    numbers: [u64; 5],
    more_numbers: [u32; 3],
    flags: u32,
    names: [u8; 160],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

/// Makes a read-only block device of a file: its descriptor, and its path. It vanishes when nobody has it open or mounted.
pub fn attach(file: &File) -> io::Result<(File, PathBuf)> {
    let control = OpenOptions::new().read(true).write(true).open("/dev/loop-control")?;
    for _ in 0..ATTEMPTS {
        // SAFETY: takes no argument.
        let number = check(unsafe { libc::ioctl(control.as_raw_fd(), GET_FREE) })?;
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = File::open(&path)?;
        match configure(&device, file) {
            Ok(()) => return Ok((device, path)),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::ResourceBusy.into())
}

fn configure(device: &File, file: &File) -> io::Result<()> {
    let info = Info {
        numbers: [0; 5],
        more_numbers: [0; 3],
        flags: READ_ONLY_AUTOCLEAR,
        names: [0; 160],
        init: [0; 2],
    };
    let config = Config { fd: file.as_raw_fd() as u32, block_size: 0, info, reserved: [0; 8] };
    // SAFETY: the kernel reads a structure of this form.
    match check(unsafe { libc::ioctl(device.as_raw_fd(), CONFIGURE, &raw const config) }) {
        Ok(_) => return Ok(()),
        // Linux before 5.8.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOTTY)) => {}
        Err(error) => return Err(error),
    }
    // SAFETY: takes a descriptor's number. The file is open for reading alone, and so is the device.
    check(unsafe { libc::ioctl(device.as_raw_fd(), SET_FD, file.as_raw_fd()) })?;
    // SAFETY: the kernel reads a structure of this form.
    if let Err(error) = check(unsafe { libc::ioctl(device.as_raw_fd(), SET_STATUS, &raw const info) }) {
        // SAFETY: takes no argument.
        unsafe { libc::ioctl(device.as_raw_fd(), CLEAR_FD) };
        return Err(error);
    }
    Ok(())
}

fn check(outcome: i32) -> io::Result<i32> {
    if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(outcome) }
}
