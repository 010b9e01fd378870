//! The process that serves a squashfs through FUSE. It belongs to the container's life: it ends when the last
//! process that sees the mount ends, and not before, whatever signals the job gets.

use std::fs::{File, OpenOptions};
use std::io::{PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mizzen_core::Failure;
use mizzen_core::failure::cause;
use mizzen_squashfs::{fuse, squashfs};
use nix::mount::{MsFlags, mount};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::Pid;

use super::warm;
use crate::plan::Identity;
use crate::sys;

/// A server that waits for its mount.
pub struct Server {
    device: File,
    go: PipeWriter,
    options: String,
}

impl Server {
    /// Starts a server for an image; called inside the user namespace, before the mount namespace exists. It reads
    /// `first_files` while it waits.
    pub fn start(
        image: Arc<squashfs::Image>,
        first_files: Vec<PathBuf>,
        identity: &Identity,
    ) -> Result<Server, Failure> {
        let broken = |what: &str, error: std::io::Error| Failure::new(format!("{what}: {}", cause(&error)));
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").map_err(|error| {
            broken("cannot open /dev/fuse", error)
                .hint("load the kernel module fuse, and give /dev/fuse mode 0666")
        })?;
        let (wait, go) = std::io::pipe().map_err(|error| broken("cannot make a pipe", error))?;
        let (uid, gid) = (identity.inside_uid, identity.inside_gid);
        let owner = fuse::Owner::Fixed { uid, gid };
        let keep = [device.as_fd(), wait.as_fd(), image.file()];
        sys::spawn_detached(&keep, || {
            become_server();
            let warming = Arc::clone(&image);
            std::thread::spawn(move || warm::read(&warming, &first_files));
            let mut wait = &wait;
            // One byte says that the mount is there; the end of the pipe, that there will be none.
            if wait.read_exact(&mut [0]).is_ok() {
                // Damage in the image has nobody to be told to here; who reads it gets EIO.
                if let Ok(device) = device.try_clone() {
                    let _ = fuse::serve(device.into(), Arc::clone(&image), owner, threads(), &|_| {});
                }
            }
        })
        .map_err(|error| broken("cannot start the file server", error))?;
        let options = format!(
            "fd={},rootmode=40755,user_id={uid},group_id={gid},allow_other,default_permissions",
            device.as_raw_fd()
        );
        Ok(Server { device, go, options })
    }

    /// Mounts what it serves; called inside the mount namespace.
    pub fn mount(mut self, place: &Path) -> Result<(), Failure> {
        let flags = MsFlags::MS_RDONLY | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        mount(Some("mizzen"), place, Some("fuse"), flags, Some(self.options.as_str())).map_err(|errno| {
            Failure::new(format!("cannot mount the image through FUSE: {}", errno.desc()))
                .hint("`mizzen doctor` tells whether FUSE works in user namespaces here")
        })?;
        drop(self.device);
        self.go.write_all(&[1]).map_err(|error| Failure::new(format!("the file server has ended: {error}")))
    }
}

/// As many as can work at once, within reason.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 8)
}

/// Leaves everything behind that belongs to the job's program rather than to a server for all its tasks.
fn become_server() {
    let _ = nix::unistd::chdir("/");
    // Task 0 may be pinned to one CPU; the server may use all that the step has, to which the kernel limits this.
    let mut all = CpuSet::new();
    for cpu in 0..CpuSet::count() {
        let _ = all.set(cpu);
    }
    let _ = sched_setaffinity(Pid::from_raw(0), &all);
    // No core files of image data, and no files but those it has.
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_CORE) {
        let _ = setrlimit(Resource::RLIMIT_CORE, 0, hard);
    }
    let _ = nix::sys::prctl::set_name(c"mizzen-fuse");
    let _ = nix::sys::prctl::set_no_new_privs();
    let _ = sys::drop_capabilities();
}
