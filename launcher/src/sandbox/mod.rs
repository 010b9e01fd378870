//! Carries out a plan: makes the namespaces, mounts the image and everything else, enters, starts the program.
//! Runs as the user; from `enter` on in namespaces of the container's own.
//!
//! The order matters. The file servers start before the mount namespace exists: one that lived in it would keep alive
//! the mount whose end is its own.

mod changes;
mod exec;
mod mounts;
mod namespaces;
mod pid1;
mod root;
mod server;
mod warm;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use mizzen_core::Failure;
use mizzen_squashfs::squashfs;
use nix::sys::signal::Signal;
use nix::sys::stat::{Mode, umask};

use crate::plan::{Changes, Plan, Root};
use crate::{report_note, sys};

pub use exec::{Unstartable, start};
pub use namespaces::{
    Namespaces, enter_user as enter_user_namespace, new_mounts_and_others as enter_mount_namespace,
};
use server::Mountable;
pub use server::Server;
pub use warm::read_from_mount as read_ahead;

/// Where the image's files come from.
pub enum RootSource {
    /// A squashfs that is served.
    Squashfs(Server),
    /// A directory of the host.
    Directory(PathBuf),
}

/// What a container is made of, opened.
pub struct Sources {
    /// The image.
    pub root: RootSource,
    /// The files of the plan's squashfs mounts, in their order.
    pub data: Vec<Arc<squashfs::Image>>,
}

/// Runs the program in a container with process ids of its own, and returns its exit code.
pub fn run_as_child(plan: &Plan, sources: Sources) -> Result<i32, Failure> {
    let (servers, _) = make_namespaces(plan, sources, None)?;
    pid1::run(plan, servers)
}

/// Makes the container and enters it. Who has the descriptors that are returned, can enter it too. Its user namespace
/// may have been made before.
pub fn build(plan: &Plan, sources: Sources, user: Option<OwnedFd>) -> Result<Namespaces, Failure> {
    let (servers, namespaces) = make_namespaces(plan, sources, user)?;
    enter_root(plan, servers)?;
    Ok(namespaces)
}

fn make_namespaces(
    plan: &Plan,
    sources: Sources,
    user: Option<OwnedFd>,
) -> Result<(Servers, Namespaces), Failure> {
    // A caller that ignores it would have our own children vanish without a word.
    sys::reset_signal(Signal::SIGCHLD)
        .map_err(|error| Failure::new(format!("cannot reset SIGCHLD: {error}")))?;
    namespaces::enter_user(&plan.identity, user)?;
    let mut servers = Servers::prepare(plan, sources)?;
    namespaces::new_mounts_and_others(plan.unshare)?;
    // Opened on the host's procfs: nothing is looked up inside.
    let mut namespaces = Namespaces::of_this_process()?;
    namespaces.life = servers.changes.as_mut().and_then(|changes| changes.life.take());
    Ok((servers, namespaces))
}

/// What serves the files of the container, and keeps their changes.
struct Servers {
    root: root::Source,
    /// In the order of the plan's squashfs mounts.
    data: Vec<Mountable>,
    /// Where the changes of a writable root go, if not into memory.
    changes: Option<changes::Directory>,
}

impl Servers {
    /// In the user namespace, before the mount namespace exists.
    fn prepare(plan: &Plan, sources: Sources) -> Result<Servers, Failure> {
        let root = match sources.root {
            RootSource::Squashfs(server) => root::Source::Served(server.open_device()?),
            RootSource::Directory(path) => root::Source::Directory(path),
        };
        let mut data = Vec::new();
        for image in &sources.data {
            data.push(Server::start(image, &[], &plan.identity)?.open_device()?);
        }
        let changes = match &plan.root {
            Root::Writable(Changes::OnDisk { parent }) => {
                let directory = changes::make_directory(parent)?;
                let shown = directory.path.display();
                report_note(&format!(
                    "changes are kept in {shown}, without a size limit: this kernel is older than 6.6"
                ));
                Some(directory)
            }
            Root::Writable(Changes::InMemory { .. }) | Root::ReadOnly => None,
        };
        Ok(Servers { root, data, changes })
    }
}

/// Mounts everything and makes it the root directory of the calling process.
fn enter_root(plan: &Plan, servers: Servers) -> Result<(), Failure> {
    // The user's limit on the size of files is a failure with a name, and not the end of this process.
    let _unharmed = sys::Ignored::new(Signal::SIGXFSZ);
    // The user's mask is for the program's files, not for the container's directories.
    let mask = umask(Mode::from_bits_truncate(0o022));
    let entered = mount_and_enter(plan, servers);
    umask(mask);
    entered
}

fn mount_and_enter(plan: &Plan, servers: Servers) -> Result<(), Failure> {
    // Everything that comes from the host is opened while it can be seen.
    let sources = mounts::open_sources(plan)?;
    let root =
        root::prepare(plan, servers.root, servers.changes.as_ref().map(|changes| changes.path.as_path()))?;
    mounts::apply(plan, &root, sources, servers.data)?;
    root.enter()
}
