//! Mounts an image and serves it in the foreground, for tests and measurements.
//!
//! Run by: the tests, as root.
#![allow(clippy::print_stderr)] // a tool of the tests

use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::ExitCode;
use std::sync::Arc;

use mizzen_squashfs::Image;
use mizzen_squashfs::fuse::{Connection, Owner, Workers, filter, serve};
use rustix::mount::{MountFlags, mount};

const USAGE: &str = "usage: squashfs-serve [--threads N] [--offset BYTES] [--owner UID:GID] IMAGE MOUNTPOINT";

type BoxError = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("squashfs-serve: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), BoxError> {
    let (mut threads, mut offset, mut owner) = (8, 0, Owner::Image);
    let mut paths = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(USAGE);
        match argument.as_str() {
            "--threads" => threads = value()?.parse()?,
            "--offset" => offset = value()?.parse()?,
            "--owner" => {
                let value = value()?;
                let (uid, gid) = value.split_once(':').ok_or(USAGE)?;
                owner = Owner::Fixed { uid: uid.parse()?, gid: gid.parse()? };
            }
            _ => paths.push(argument),
        }
    }
    let [image, mountpoint] = paths.as_slice() else { return Err(USAGE.into()) };
    let image = Image::open(File::open(image)?, offset).map_err(|error| format!("{image}: {error}"))?;
    let device = OwnedFd::from(File::options().read(true).write(true).open("/dev/fuse")?);
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions",
        device.as_raw_fd()
    );
    let flags = MountFlags::RDONLY | MountFlags::NODEV | MountFlags::NOSUID;
    mount("squashfs-serve", mountpoint.as_str(), "fuse", flags, CString::new(options)?.as_c_str())?;
    let workers = Workers::new(threads);
    rustix::thread::set_no_new_privs(true)?;
    filter::install(&[])?;
    serve(device, Connection::New, Arc::new(image), owner, workers, None, &|damage| {
        eprintln!("squashfs-serve: {}", damage.error)
    })?;
    Ok(())
}
