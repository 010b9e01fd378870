//! Carries out a plan: makes the namespaces, mounts the image and everything else, enters, starts the program.
//! Runs as the user; from `enter` on in namespaces of the container's own.
//!
//! The order matters. The file servers start before the mount namespace exists: one that lived in it would keep alive
//! the mount whose end is its own.

mod changes_guard;
mod dangling;
mod exec;
mod fake_root;
mod mounts;
mod namespaces;
mod pid1;
mod processes;
mod readahead;
mod reporter;
mod root;
mod save;
mod server;
mod shared_end;
mod standby;
mod wait;
mod watcher;

use std::fs::Metadata;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use mizzen_core::Failure;
use mizzen_squashfs as squashfs;
use nix::sys::signal::Signal;

use crate::mount::MountKind;
use crate::plan::{Changes, Plan, Root};
use crate::report::report_note;
use crate::slurm::Helper;
use crate::sys;

pub use dangling::{ARGUMENTS_LOOKED_AT, dangling_argument};
pub use exec::exec_program;
pub use namespaces::{
    Namespaces, count_others, enter_user as enter_user_namespace,
    new_mounts_and_others as enter_mount_namespace,
};
pub use processes::ContainerProcesses;
pub use reporter::{
    Reporter, StderrReporter, identity_of, standard_error_in, tell, tell_note, verbose_stream,
};
pub use root::overlay_directory;
pub use save::{Others, SaveTarget, Saved};
use server::{LastWords, Mountable};
pub use server::{Owner, Server, ServerLock};
pub use standby::{Serving, connection as server_connection, reads_one_of};
pub use watcher::{Watch, watch_others};

/// Marks the programs of a step, for those who want to enter its container.
pub const STEP_VARIABLE: &str = "SLURM_MIZZEN_STEP";

/// Where the image's files come from.
pub enum RootSource {
    /// A squashfs that is served.
    Squashfs(Server),
    /// A directory of the host, by its path, and what was found there when it was opened.
    Directory(PathBuf, Metadata),
    /// The root of a container that runs, cloned. Others serve it.
    Clone(OwnedFd),
}

/// What a container is made of, opened.
pub struct Sources {
    /// The image.
    pub root: RootSource,
    /// The files of the plan's squashfs mounts, in their order.
    pub data: Vec<Arc<squashfs::Image>>,
    /// Who watches over the file servers.
    pub watch: Watch,
    /// Who runs Slurm's commands, if the plan has them.
    pub helper: Option<Helper>,
    /// Done when the container runs.
    pub when_entered: Option<WhenEntered>,
}

/// What is to be done when a container runs.
pub type WhenEntered = Box<dyn FnOnce(&Plan)>;

/// Runs the program in a container with process ids of its own, and returns its exit code.
pub fn run_as_child(plan: &Plan, sources: Sources) -> Result<i32, Failure> {
    let (servers, _) = make_namespaces(plan, sources, None)?;
    pid1::run(plan, servers)
}

/// Makes the container and enters it. Any process that holds the returned descriptors can enter it too. `user` is a user
/// namespace that already exists.
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
    sys::reset_signal(Signal::SIGCHLD).map_err(|error| Failure::caused_by("cannot reset SIGCHLD", error))?;
    let data = start_data_servers(plan, &sources)?;
    let limits = namespaces::enter_user(&plan.identity, user)?;
    let mut servers = Servers::prepare(plan, sources, data)?;
    let hostname = plan.facts.hostname.as_deref();
    namespaces::new_mounts_and_others(plan.unshare, hostname, plan.follows_host(), &limits)?;
    // Opened on the host's procfs: nothing is looked up inside.
    let mut namespaces = Namespaces::of_this_process(&plan.unshare)?;
    servers.user_namespace = Some(
        namespaces
            .user
            .try_clone()
            .map_err(|error| Failure::caused_by("cannot keep the user namespace", error))?,
    );
    namespaces.changes_guard = servers.changes.as_mut().and_then(changes_guard::Directory::hold);
    Ok((servers, namespaces))
}

/// The servers of squashfs mounts. Outside the user namespace: in it, a watcher could not see processes that have
/// capabilities there.
fn start_data_servers(plan: &Plan, sources: &Sources) -> Result<Vec<Server>, Failure> {
    let paths = plan.mounts.iter().filter_map(|mount| match &mount.kind {
        MountKind::Squashfs(path) => Some(path.as_path()),
        _ => None,
    });
    let owner = Owner::new(&plan.identity);
    let start = |(path, image)| Server::start(image, path, &[], owner, &sources.watch, None, None);
    paths.zip(&sources.data).map(start).collect()
}

/// What serves the files of the container, and keeps their changes.
struct Servers {
    watch: Watch,
    /// The container's, as soon as it is there, for the watchers.
    user_namespace: Option<OwnedFd>,
    root: root::Source,
    /// In the order of the plan's squashfs mounts.
    data: Vec<Mountable>,
    /// Where the changes of a writable root go, if not into memory.
    changes: Option<changes_guard::Directory>,
    /// Who runs Slurm's commands.
    helper: Option<Helper>,
    /// Done when the container runs.
    when_entered: Option<WhenEntered>,
}

impl Servers {
    /// In the user namespace, before the mount namespace exists.
    fn prepare(plan: &Plan, sources: Sources, data: Vec<Server>) -> Result<Servers, Failure> {
        let root = match sources.root {
            RootSource::Squashfs(server) => root::Source::Served(server.open_device()?),
            RootSource::Directory(path, opened) => root::Source::Directory(path, opened),
            RootSource::Clone(mount) => root::Source::Mount(mount),
        };
        let data = data.into_iter().map(Server::open_device).collect::<Result<_, _>>()?;
        let changes = match &plan.root {
            Root::Writable(Changes::OnDisk { parent }) => {
                let directory = changes_guard::make_directory(parent)?;
                let shown = directory.path.display();
                report_note(&format!(
                    "changes are kept in {shown}, without a size limit: this kernel is older than 6.6"
                ));
                Some(directory)
            }
            Root::Writable(Changes::InMemory { .. } | Changes::Named { .. })
            | Root::ReadOnly
            | Root::Shared { .. } => None,
        };
        let Sources { watch, helper, when_entered, .. } = sources;
        Ok(Servers { root, data, changes, watch, user_namespace: None, helper, when_entered })
    }

    /// Where each server says why it has not begun.
    fn last_words(&self) -> Vec<LastWords> {
        let root = match &self.root {
            root::Source::Served(server) => Some(server),
            root::Source::Directory(..) | root::Source::Mount(_) => None,
        };
        root.into_iter().chain(&self.data).filter_map(Mountable::last_words).collect()
    }
}

/// Mounts everything and makes it the root directory of the calling process.
fn enter_root(plan: &Plan, servers: Servers) -> Result<(), Failure> {
    // The user's limit on the size of files is a failure with a name, and not the end of this process.
    let _unharmed = sys::IgnoreSignal::new(Signal::SIGXFSZ);
    // The user's mask is for the program's files, not for the container's directories.
    let _mask = sys::FileMask::set(0o022);
    let last_words = servers.last_words();
    // A server may end after its mount was made; what is asked of that then fails with an error that says nothing.
    mount_and_enter(plan, servers)
        .map_err(|failure| last_words.iter().find_map(LastWords::why_ended).unwrap_or(failure))
}

fn mount_and_enter(plan: &Plan, servers: Servers) -> Result<(), Failure> {
    let Servers { root, data, changes, watch, user_namespace, helper, when_entered } = servers;
    // Everything that comes from the host is opened while it can be seen.
    let sources = mounts::open_sources(plan)?;
    let root = root::prepare(plan, root, changes.as_ref().map(|changes| changes.path.as_path()))?;
    mounts::apply(plan, &root, sources, data, helper.as_ref())?;
    root.enter()?;
    if let Some(namespace) = user_namespace {
        watch.arm(namespace.as_fd());
    }
    if let Some(done) = when_entered {
        done(plan);
    }
    Ok(())
}
