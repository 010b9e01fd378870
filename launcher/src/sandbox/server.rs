//! The process that serves a squashfs through FUSE. It belongs to the container's life: it ends when the last
//! process that sees the mount ends, and not before, whatever signals the job gets.
//!
//! It starts before anything else, and reads ahead while the container is planned and made. The device over which it
//! serves is opened later, in the container's user namespace: the kernel lets it be mounted only there.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use mizzen_core::Failure;
use mizzen_core::failure::cause;
use mizzen_squashfs::{fuse, squashfs};
use nix::mount::{MsFlags, mount};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, socketpair};

use super::warm;
use crate::plan::Identity;
use crate::sys;

/// A server that waits for its device.
pub struct Server {
    process: OwnedFd,
    uid: u32,
    gid: u32,
}

/// A server whose files can be mounted.
pub struct Mountable {
    server: Server,
    device: File,
}

impl Server {
    /// Starts a server for an image, whose files belong to the user inside. It reads ahead what `command` needs.
    pub fn start(
        image: &Arc<squashfs::Image>,
        command: &[OsString],
        identity: &Identity,
    ) -> Result<Server, Failure> {
        let failed = |error| Failure::new(format!("cannot start the file server: {}", cause(&error)));
        let (wait, process) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
                .map_err(|errno| failed(errno.into()))?;
        let (uid, gid) = (identity.inside_uid, identity.inside_gid);
        let keep = [wait.as_fd(), image.file()];
        sys::spawn_detached(&keep, || {
            become_server();
            let (warming, command) = (Arc::clone(image), command.to_vec());
            std::thread::spawn(move || warm::read(&warming, &warm::first_files(&command, &warming)));
            // Now: afterwards somebody waits for the first answer.
            let threads = threads();
            // The device says that the mount is there; the end of the socket, that there will be none.
            let message = sys::receive_descriptors(&wait, &mut [0], MsgFlags::empty());
            if let Some(device) = message.ok().and_then(|(_, mut fds)| fds.pop()) {
                // Damage in the image has nobody to be told to here; who reads it gets EIO.
                let owner = fuse::Owner::Fixed { uid, gid };
                let _ = fuse::serve(device, Arc::clone(image), owner, threads, &|_| {});
            }
        })
        .map_err(failed)?;
        Ok(Server { process, uid, gid })
    }

    /// Opens the device; called inside the user namespace, where the host's /dev can still be seen.
    pub fn open_device(self) -> Result<Mountable, Failure> {
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").map_err(|error| {
            Failure::new(format!("cannot open /dev/fuse: {}", cause(&error)))
                .hint("load the kernel module fuse, and give /dev/fuse mode 0666")
        })?;
        Ok(Mountable { server: self, device })
    }
}

impl Mountable {
    /// Mounts what the server has; called inside the mount namespace.
    pub fn mount(self, place: &Path) -> Result<(), Failure> {
        let Mountable { server: Server { process, uid, gid }, device } = self;
        let device_fd = device.as_raw_fd();
        let options = format!(
            "fd={device_fd},rootmode=40755,user_id={uid},group_id={gid},allow_other,default_permissions"
        );
        let flags = MsFlags::MS_RDONLY | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        mount(Some("mizzen"), place, Some("fuse"), flags, Some(options.as_str())).map_err(|errno| {
            Failure::new(format!("cannot mount the image through FUSE: {}", errno.desc()))
                .hint("`mizzen doctor` tells whether FUSE works in user namespaces here")
        })?;
        sys::pass_descriptors(&process, &[1], &[device_fd])
            .map_err(|errno| Failure::new(format!("the file server has ended: {}", errno.desc())))
    }
}

/// As many as can work at once, within reason.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 8)
}

/// Leaves everything behind that belongs to the job's program rather than to a server for all its tasks.
fn become_server() {
    let _ = nix::unistd::chdir("/");
    warm::use_all_cpus();
    // No core files of image data, and no files but those it has.
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_CORE) {
        let _ = setrlimit(Resource::RLIMIT_CORE, 0, hard);
    }
    let _ = nix::sys::prctl::set_name(c"mizzen-fuse");
    let _ = nix::sys::prctl::set_no_new_privs();
    let _ = sys::drop_capabilities();
}
