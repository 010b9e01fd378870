//! The plan of a container: everything that will be done, computed from plain facts before the first side effect.
//! `mizzen plan` prints it; `sandbox` carries it out. Runs as the user on the host.

mod environment;
mod host_arguments;
mod identity;
mod links;
mod mount_changes;
mod mount_options;
mod mount_points;
mod mounts;
mod mpi;
mod pytorch;
mod root;
mod show;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::config::Compatible;
use mizzen_core::mount_flags::PropagationKind;
use mizzen_core::options::EnvOption;
use mizzen_core::settings::{Key, Workdir};
use serde::{Deserialize, Serialize};

use crate::host::Host;
use crate::host_libraries::{self, HostLibraries};
use crate::image::{Entry, Metadata, Tree, resolve};
use crate::mount::{Link, Mount, MountKind, Shape};
use crate::options::{Origin, RunOptions, Unshare};

pub use environment::{DEFAULT_PATH, DIGEST_VARIABLE, Variable};
pub use identity::Identity;
pub use mount_options::{Asked, asked_mounts};
pub use mount_points::lies_in;
pub use pytorch::Pytorch;
pub use root::{Changes, NamedRoot, Root};

/// A container, decided to the last mount and variable.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Who the program is, inside and outside.
    pub identity: Identity,
    /// Namespaces beside user and mount.
    pub unshare: Unshare,
    /// What the root directory is.
    pub root: Root,
    /// Directories to which mount points are added, because the image lacks them; parents first.
    pub skeletons: Vec<Skeleton>,
    /// Mounts, parents first.
    pub mounts: Vec<Mount>,
    /// Symbolic links in file systems in memory, made when all is mounted.
    pub links: Vec<Link>,
    /// Files in place of the image's in a writable root, where programs can replace them in turn: absolute inside.
    pub files: Vec<(PathBuf, Vec<u8>)>,
    /// What the container's programs have in common.
    pub facts: Facts,
    /// The program.
    pub program: Program,
    /// What of the node is given to the container, or not, and why.
    pub findings: Vec<(String, String)>,
    /// What the user should know although nothing failed.
    pub notes: Vec<String>,
}

/// What every program in a container needs to know of it, and the process that has made the container knows. It goes
/// to the other tasks of a Slurm step as JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// The image's variables.
    pub image_environment: Vec<(OsString, OsString)>,
    /// The image's entrypoint, where programs are started through it.
    pub entrypoint: Vec<OsString>,
    /// What an entrypoint that has run for all tasks has set, or unset.
    pub entrypoint_changes: Vec<(OsString, Option<OsString>)>,
    /// Variables to set or to take from the host: the site's, then the user's.
    pub environment: Vec<(EnvOption, Origin)>,
    /// Where programs start.
    pub workdir: PathBuf,
    /// Which option or rule says so.
    pub workdir_why: String,
    /// The node's time zone.
    pub time_zone: Option<String>,
    /// Variables of Slurm's MPI plugin that need other values inside.
    pub mpi_environment: Vec<(OsString, OsString)>,
    /// What programs need to find the node's libraries.
    pub host_libraries: host_libraries::Variables,
    /// Where the helper for Slurm's commands listens, if there is one.
    pub commands: Option<String>,
    /// The image as the user knows it: a path, or a name in a registry.
    pub image: OsString,
    /// The digest of the image's manifest, or of its content if that was computed.
    pub digest: Option<String>,
    /// The image in a registry that it was made of, with the digest of its manifest.
    pub reference: Option<String>,
    /// The container's own host name, if it has one.
    pub hostname: Option<String>,
    /// What tells PyTorch's programs their place.
    pub pytorch: Pytorch,
    /// Namespaces of its own beside user and mount.
    pub unshare: Unshare,
    /// Whether the user is called root.
    pub remapped: bool,
}

/// A program, ready to be started inside.
#[derive(Clone, Debug)]
pub struct Program {
    /// Its environment.
    pub environment: Vec<Variable>,
    /// Where it starts.
    pub workdir: Explained<PathBuf>,
    /// Its name and its arguments.
    pub command: Explained<Vec<OsString>>,
    /// Whether Slurm itself started this process, which becomes the program.
    pub is_task: bool,
    /// Descriptors that it inherits beside the standard streams and Slurm's.
    pub kept: Vec<i32>,
    /// Whether it is root by name, and what root's programs do to the owners of files appears to succeed.
    pub fake_root: bool,
}

impl Program {
    /// Decides everything about a program, in a container that is known.
    pub fn new(
        options: &RunOptions,
        facts: &Facts,
        command: Explained<Vec<OsString>>,
        host_environment: &[(OsString, OsString)],
    ) -> Program {
        let environment = environment::decide(options, facts, host_environment);
        let workdir = Explained { value: facts.workdir.clone(), why: facts.workdir_why.clone() };
        let (is_task, fake_root) = (options.step.is_some(), facts.remapped);
        Program { environment, workdir, command, is_task, kept: Vec::new(), fake_root }
    }
}

/// A value, and which option, setting, part of the image or rule it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explained<T> {
    /// The value.
    pub value: T,
    /// Its origin.
    pub why: String,
}

/// A directory of the image to which mount points are added. The image itself stays untouched, also where it is a
/// directory that the user could write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skeleton {
    /// The directory, absolute inside, without symbolic links.
    pub directory: PathBuf,
    /// What is added: absolute inside.
    pub added: Vec<(PathBuf, Shape)>,
    /// Symbolic links that are added, also in place of files.
    pub links: Vec<Link>,
}

impl Plan {
    /// Decides everything about a run. `asked` are the mounts that options ask for, `named` the container that keeps its changes.
    pub fn make(
        options: &RunOptions,
        tree: &dyn Tree,
        metadata: &Metadata,
        host: &Host,
        host_libraries: HostLibraries,
        asked: Vec<Asked>,
        named: Option<NamedRoot>,
    ) -> Result<Plan, Failure> {
        let identity = Identity::new(host, options.settings.remap_root());
        let mut notes = host_libraries.notes.clone();
        let mut mpi = mpi::decide(tree, metadata, host, &identity, options.compatible);
        notes.append(&mut mpi.notes);
        let others = mounts::Others { mpi: &mpi.directories, host_libraries: &host_libraries, asked };
        let mounts = mounts::decide(options, tree, host, &identity, others, &mut notes)?;
        let is_named = named.is_some();
        let root = root::decide(&options.settings.writable(), host, named)?;
        let (mounts, files) = mount_changes::split_files(mounts, &root, tree);
        let mut links = links::place(&host_libraries.image_links, &mounts, tree, &mut notes)?;
        let is_shared = matches!(root, Root::Shared { .. });
        if is_shared {
            links.leave_files(tree, &mut notes);
        }
        // Where the image keeps their place from being mounted, nothing that it has there is taken for them.
        let mounted = mounts.iter().any(|mount| matches!(mount.kind, MountKind::Commands(_)));
        let commands = options.step.as_ref().and_then(|step| step.commands.clone()).filter(|_| mounted);
        // What login shells would look for is not put beside others' programs.
        let with_commands = commands.is_some() && !is_shared;
        let skeletons = mount_points::skeletons(&mounts, with_commands, links.in_image, tree)?;
        let workdir = decide_workdir(options, tree, metadata, host, &mounts, &mut notes);
        // What a named container has of its own is not known here.
        let left = || host_arguments::left_on_host(options, tree, host, &mounts, &workdir.value);
        notes.extend((!is_named).then(left).flatten());
        let uts = options.unshare.uts || options.settings.hostname.is_some();
        let unshare = Unshare { uts, ..options.unshare };
        let facts = Facts {
            unshare,
            image_environment: metadata.environment.clone(),
            entrypoint: if options.settings.entrypoint() { metadata.entrypoint.clone() } else { Vec::new() },
            entrypoint_changes: Vec::new(),
            environment: options.environment.clone(),
            workdir: workdir.value,
            workdir_why: workdir.why,
            time_zone: host.time_zone.clone(),
            mpi_environment: mpi.variables,
            host_libraries: host_libraries.variables,
            commands,
            image: options
                .image
                .reference()
                .map_or_else(|| options.image.name(), |name| name.to_string().into()),
            digest: metadata.digest.map(|digest| digest.to_string()),
            reference: options.image.reference().map(ToString::to_string),
            hostname: options.settings.hostname.as_ref().map(|name| name.as_str().to_owned()),
            pytorch: pytorch::decide(options.settings.pytorch, &metadata.environment, options.compatible),
            remapped: options.settings.remap_root(),
        };
        let command = decide_command(options, &facts, tree, metadata, host);
        let program = Program::new(options, &facts, command, &host.environment);
        for line in &metadata.not_understood {
            notes.push(format!("{line}: not understood; the variable that it sets is missing"));
        }
        let findings = host_libraries.findings;
        let links = links.in_memory;
        Ok(Plan { identity, unshare, root, skeletons, mounts, links, files, facts, program, findings, notes })
    }
}

impl Plan {
    /// Whether something that the node mounts later is to appear inside.
    pub fn follows_host(&self) -> bool {
        let slave =
            |mount: &Mount| mount.flags.propagation.map(|found| found.kind) == Some(PropagationKind::Slave);
        self.mounts.iter().any(slave)
    }
}

/// The current directory, where it is visible inside; else the image's own.
fn decide_workdir(
    options: &RunOptions,
    tree: &dyn Tree,
    metadata: &Metadata,
    host: &Host,
    mounts: &[Mount],
    notes: &mut Vec<String>,
) -> Explained<PathBuf> {
    let images_own = || match &metadata.workdir {
        Some(workdir) => Explained { value: workdir.clone(), why: "the image's".to_owned() },
        None => Explained { value: PathBuf::from("/"), why: "default".to_owned() },
    };
    if let Some(Workdir::Directory(workdir)) = &options.settings.workdir {
        let value = host.cwd.as_deref().unwrap_or(Path::new("/")).join(workdir);
        return Explained { value, why: options.user().name_of(Key::Workdir) };
    }
    if let Some(inside) = options.inside().filter(|inside| visible_inside(&inside.workdir, tree, mounts)) {
        return Explained { value: inside.workdir.clone(), why: "that of the calling program".to_owned() };
    }
    if options.settings.workdir == Some(Workdir::Image) {
        return images_own();
    }
    let as_pyxis = options.compatible == Compatible::Pyxis;
    if let Some(cwd) = host.cwd.as_ref().filter(|cwd| !as_pyxis && visible(cwd, tree, mounts)) {
        return Explained { value: cwd.clone(), why: "the current directory".to_owned() };
    }
    let chosen = images_own();
    let left_out = |cwd: &Path| {
        !options.settings.mount_home() && host.home.as_deref().is_some_and(|home| cwd.starts_with(home))
    };
    match &host.cwd {
        Some(cwd) if cwd == Path::new("/") => {}
        // Who leaves the home out knows.
        Some(cwd) if left_out(cwd) => {}
        Some(_) if as_pyxis => {}
        Some(cwd) => {
            let (cwd, chosen) = (cwd.display(), chosen.value.display());
            notes.push(format!("{cwd} is not in the container; the program starts in {chosen}"));
        }
        None => notes.push(format!("no current directory; the program starts in {}", chosen.value.display())),
    }
    chosen
}

/// Whether a directory that another container of this image had is here too.
fn visible_inside(directory: &Path, tree: &dyn Tree, mounts: &[Mount]) -> bool {
    let mounted = mounts.iter().any(|mount| directory.starts_with(&mount.target));
    mounted && visible(directory, tree, mounts)
        || resolve(tree, directory).is_ok_and(|found| found.entry == Some(Entry::Directory))
}

/// Whether a directory of the host is the same inside, or, where no mount covers it, is one of the image.
fn visible(directory: &Path, tree: &dyn Tree, mounts: &[Mount]) -> bool {
    let Ok(resolved) = resolve(tree, directory) else { return false };
    // Below a mount the image's links do not count.
    let inside = [directory, resolved.path.as_path()];
    let enclosing =
        mounts.iter().rev().find(|mount| inside.iter().any(|path| path.starts_with(&mount.target)));
    match enclosing.map(|mount| (&mount.kind, &mount.target)) {
        None => matches!(resolved.entry, Some(Entry::Directory)),
        Some((MountKind::Bind { source, .. }, target)) => inside
            .iter()
            .any(|path| path.strip_prefix(target).is_ok_and(|below| source.join(below) == directory)),
        Some(_) => false,
    }
}

/// The user's command; else the image's; else a shell.
fn decide_command(
    options: &RunOptions,
    facts: &Facts,
    tree: &dyn Tree,
    metadata: &Metadata,
    host: &Host,
) -> Explained<Vec<OsString>> {
    if !options.command.is_empty() {
        return typed_command(options, facts);
    }
    let own: Vec<OsString> = metadata.entrypoint.iter().chain(&metadata.command).cloned().collect();
    if !own.is_empty() {
        return Explained { value: own, why: "the image's".to_owned() };
    }
    let exists = |path: &&Path| resolve(tree, path).is_ok_and(|found| found.entry.is_some());
    let shells = [host.shell.as_deref(), Some(Path::new("/bin/bash")), Some(Path::new("/bin/sh"))];
    let shell = shells.into_iter().flatten().find(exists).unwrap_or(Path::new("/bin/sh"));
    Explained { value: vec![shell.into()], why: "a shell, as the image names no command".to_owned() }
}

/// The user's command, behind the image's entrypoint where that is wanted.
pub fn typed_command(options: &RunOptions, facts: &Facts) -> Explained<Vec<OsString>> {
    if !facts.entrypoint.is_empty() {
        let value = facts.entrypoint.iter().chain(&options.command).cloned().collect();
        return Explained { value, why: "the image's entrypoint with the command line".to_owned() };
    }
    Explained { value: options.command.clone(), why: "the command line".to_owned() }
}
