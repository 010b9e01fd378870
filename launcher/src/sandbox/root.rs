//! The container's root directory: the image, with a place for every mount, put together in a scratch root that only
//! we see.

use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mizzen_core::Failure;
use nix::fcntl::{OFlag, open};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, fstat};
use nix::unistd::{fchdir, mkdir, pivot_root, symlinkat};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

use super::Mountable;
use super::mounts::{
    bind, in_container, make_mount_point, open_entry, open_in_root, proc_path, propagate, restrict,
};
use super::namespaces::MOUNTS_REFUSED;
use super::processes::own_mount_name;
use super::server::LayerDirectory;
use crate::mount::{Link, Shape};
use crate::plan::{Changes, Plan, Root, Skeleton};

/// A directory that every system has, on which the scratch root is mounted for a moment.
const MOUNT_POINT: &str = "/tmp";

/// Where the root is put together, in the scratch root.
const ROOT: &str = "/root";

/// Where the image comes from.
pub enum Source {
    /// A file server.
    Served(Mountable),
    /// A directory of the host, by its path, and what was found there when it was opened.
    Directory(PathBuf, Metadata),
    /// A detached mount, as from `open_tree` or `fsmount`.
    Mount(OwnedFd),
}

/// The new root directory, not entered yet.
pub struct NewRoot {
    directory: OwnedFd,
}

/// Mounts the image and makes a place for every mount of the plan.
pub fn prepare(plan: &Plan, source: Source, changes: Option<&Path>) -> Result<NewRoot, Failure> {
    // What comes from the host is opened while it can be seen.
    let changes = match &plan.root {
        Root::Writable(Changes::Named { directory, .. }) => Some(open_directory(directory)?),
        _ => changes.map(open_directory).transpose()?,
    };
    let directory = match &source {
        Source::Directory(path, opened) => Some(open_same_directory(path, opened)?),
        Source::Served(_) | Source::Mount(_) => None,
    };
    let layers = open_layers(&source);
    let source = match directory.as_ref().map(detached_clone).transpose()?.flatten() {
        Some(mount) => Source::Mount(mount),
        None => source,
    };
    enter_scratch_root()?;
    let image = Path::new("/image");
    make_directory(image)?;
    mount_image(source, directory, image)?;
    let root = match &plan.root {
        Root::ReadOnly if plan.skeletons.is_empty() && layers.is_empty() => image,
        Root::ReadOnly => {
            make_directory(Path::new(ROOT))?;
            let layers = bind_layers(layers)?;
            // The overlay is faster to make and leaves fewer mounts; but not every kernel and not every file system
            // below a directory image can be under one, nor every disk with unpacked files.
            let is_mounted = overlay_mount_points(plan, &layers, image)?
                || !layers.is_empty() && overlay_mount_points(plan, &[], image)?;
            if !is_mounted {
                bind_mount_points(plan, image)?;
            }
            Path::new(ROOT)
        }
        Root::Writable(Changes::Named { id, read_only, .. }) => {
            make_directory(Path::new(ROOT))?;
            named(plan, image, id, *read_only, changes)?;
            Path::new(ROOT)
        }
        Root::Writable(kept) => {
            make_directory(Path::new(ROOT))?;
            writable(plan, image, kept, changes, layers)?;
            Path::new(ROOT)
        }
        Root::Shared { read_only } => {
            remount(open_directory(image)?.as_fd(), false)?;
            // Everybody who is in it sees them, and none is made over what is there.
            add_mount_points(plan, image)?;
            remount(open_directory(image)?.as_fd(), *read_only)?;
            image
        }
    };
    Ok(NewRoot { directory: open_directory(root)? })
}

impl NewRoot {
    /// The directory.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// Makes it the root directory of this process, and the host's vanish from its mount namespace.
    pub fn enter(self) -> Result<(), Failure> {
        let pivot = || -> nix::Result<()> {
            fchdir(&self.directory)?;
            // Puts the old root over the new one, from where it is taken away: no directory is needed for it.
            pivot_root(".", ".")?;
            umount2(".", MntFlags::MNT_DETACH)?;
            nix::unistd::chdir("/")
        };
        pivot().map_err(|errno| Failure::caused_by("cannot enter the container's root", errno))
    }
}

/// Everything mounted at and below a directory, as one mount without a place. None where the kernel cannot do that:
/// before Linux 5.2, or under a seccomp filter that does not know the call. The directory must have been opened in the
/// container's mount namespace: no other mounts can be cloned there.
fn detached_clone(directory: &OwnedFd) -> Result<Option<OwnedFd>, Failure> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE
        | OpenTreeFlags::AT_EMPTY_PATH;
    match open_tree(directory, "", flags) {
        Ok(mount) => Ok(Some(mount)),
        Err(Errno::NOSYS | Errno::PERM) => Ok(None),
        Err(errno) => Err(Failure::caused_by("cannot clone the image's mounts", errno)),
    }
}

/// Mounts the image, read-only and without privileges.
fn mount_image(source: Source, directory: Option<OwnedFd>, place: &Path) -> Result<(), Failure> {
    match (source, directory) {
        // With these flags from the start.
        (Source::Served(server), _) => return server.mount(place),
        (Source::Mount(mount), directory) => {
            let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
            match (move_mount(mount, "", rustix::fs::CWD, place, flags), directory) {
                (Ok(()), _) => {}
                // A filter may know the one call and not the other.
                (Err(Errno::NOSYS | Errno::PERM), Some(directory)) => bind_image(&directory, place)?,
                (Err(errno), _) => {
                    return Err(Failure::caused_by("cannot put the image's mount in its place", errno));
                }
            }
        }
        (Source::Directory(..), Some(directory)) => bind_image(&directory, place)?,
        (Source::Directory(..), None) => {}
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_RDONLY;
    let mounted = open_directory(place)?;
    restrict(mounted.as_fd(), place, flags)?;
    // Also in a container that follows the host elsewhere.
    propagate(mounted.as_fd(), MsFlags::MS_PRIVATE | MsFlags::MS_REC)
        .map_err(|errno| Failure::caused_by("cannot make the image's mounts private", errno))
}

fn bind_image(directory: &OwnedFd, place: &Path) -> Result<(), Failure> {
    bind(directory.as_fd(), open_directory(place)?.as_fd())
        .map_err(|errno| Failure::caused_by("cannot bind the image's directory", errno))
}

/// Moves to a root directory of our own, a tmpfs with the host's root below it. Were the root put together on a
/// directory of the host instead, a bind of that directory would bring our own mounts along.
fn enter_scratch_root() -> Result<(), Failure> {
    tmpfs(Path::new(MOUNT_POINT), "size=16m,mode=0755")?;
    let enter = || -> nix::Result<()> {
        nix::unistd::chdir(MOUNT_POINT)?;
        mkdir("host", Mode::from_bits_truncate(0o755))?;
        // `proc_path` goes on to work.
        symlinkat("host/proc", nix::fcntl::AT_FDCWD, "proc")?;
        pivot_root(".", "host")?;
        nix::unistd::chdir("/")
    };
    enter().map_err(|errno| Failure::caused_by("cannot leave the host's root", errno).or_hint(MOUNTS_REFUSED))
}

/// An overlay over the image; what is written stays in memory, or on disk.
fn writable(
    plan: &Plan,
    image: &Path,
    kept: &Changes,
    on_disk: Option<OwnedFd>,
    layers: Vec<OwnedFd>,
) -> Result<(), Failure> {
    let changes = Path::new("/changes");
    make_directory(changes)?;
    match (kept, on_disk) {
        (Changes::InMemory { limit }, _) => {
            tmpfs(changes, &format!("size={limit},mode=0755")).map_err(|failure| {
                failure.hint(format!("\"{limit}\" must be a number of bytes with k, m, g or % behind it"))
            })?
        }
        (Changes::OnDisk { .. }, Some(disk)) => bind(disk.as_fd(), open_directory(changes)?.as_fd())
            .map_err(|errno| Failure::caused_by("--writable: cannot bind the changes", errno))?,
        (Changes::OnDisk { .. } | Changes::Named { .. }, _) => {
            return Err(Failure::new("--writable: the directory for the changes is missing"));
        }
    }
    for directory in ["upper", "work"] {
        make_directory(&changes.join(directory))?;
    }
    // The mount points are a layer too: made through the overlay they would copy the image's directories, whose owner
    // may be one that the container does not know.
    let layers = bind_layers(layers)?;
    let mount = |layers: &[PathBuf]| {
        let lower = mount_point_layer(plan, layers, image)?;
        let options = format!("{lower},upperdir=/changes/upper,workdir=/changes/work,userxattr");
        Ok(overlay(&options, MsFlags::empty()))
    };
    // Not every disk with unpacked files can be below an overlay.
    let mounted = match mount(&layers)? {
        Err(_) if !layers.is_empty() => mount(&[])?,
        mounted => mounted,
    };
    mounted.map_err(|errno| {
        let failure = Failure::caused_by("--writable: cannot mount an overlay", errno);
        failure.or_hint(match kept {
            Changes::OnDisk { .. } if !are_unknown(errno) => NO_DISK,
            _ => "overlays in user namespaces need Linux 5.11; run without --writable",
        })
    })
}

/// Whether users can have no overlays at all: before Linux 5.11, or without the file system.
fn are_unknown(errno: nix::errno::Errno) -> bool {
    matches!(errno, nix::errno::Errno::EPERM | nix::errno::Errno::ENODEV)
}

const NO_DISK: &str =
    "TMPDIR must be a directory on a local disk, not on a network file system or an overlay";

/// Where the changes of a named container are in the scratch root. The overlay's options tell it for ever after.
pub fn overlay_directory(id: &str) -> String {
    format!("/named-{id}")
}

/// The kernel lets an overlay go a little after the last process that has seen it.
const TEARDOWN: Duration = Duration::from_secs(10);

/// An overlay over the image with the changes of a named container. `index=on` is for what the kernel does before it finds that
/// it has no index for users: it refuses a directory that is mounted already.
fn named(
    plan: &Plan,
    image: &Path,
    id: &str,
    read_only: bool,
    changes: Option<OwnedFd>,
) -> Result<(), Failure> {
    let failed = |what: &str, errno: Errno| Failure::caused_by(format!("a named container: {what}"), errno);
    let changes = changes.ok_or_else(|| Failure::new("a named container: its directory is missing"))?;
    // By this name others know that it runs.
    let place = overlay_directory(id);
    make_directory(Path::new(&place))?;
    bind(changes.as_fd(), open_directory(Path::new(&place))?.as_fd())
        .map_err(|errno| Failure::caused_by("a named container: cannot bind its directory", errno))?;
    let lower = mount_point_layer(plan, &[], image)?;
    let options = format!("{lower},upperdir={place}/upper,workdir={place}/work,userxattr,index=on");
    let end = Instant::now() + TEARDOWN;
    loop {
        match overlay(&options, MsFlags::empty()) {
            // The mount, and not its file system, which a second container may write to.
            Ok(()) if read_only => return remount(open_directory(Path::new(ROOT))?.as_fd(), true),
            Ok(()) => return Ok(()),
            Err(nix::errno::Errno::EBUSY) if Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(10))
            }
            Err(nix::errno::Errno::EBUSY) => {
                return Err(failed("its files are mounted elsewhere", Errno::BUSY)
                    .hint("programs that nobody may look at are still in it; end them first"));
            }
            Err(errno) if are_unknown(errno) => {
                return Err(Failure::caused_by("a named container: cannot mount an overlay", errno)
                    .hint("overlays in user namespaces need Linux 5.11; run without a name here"));
            }
            Err(errno) => {
                return Err(Failure::caused_by("a named container: cannot mount an overlay", errno).or_hint(
                    "stage_directory of mizzen.toml must be on a local disk, not on a network file system or an overlay",
                ));
            }
        }
    }
}

/// The directories with unpacked files of the image, as they were when they were looked at. A start does without one that
/// cannot be opened.
fn open_layers(source: &Source) -> Vec<OwnedFd> {
    let Source::Served(server) = source else { return Vec::new() };
    let open = |layer: &LayerDirectory| {
        let directory = open_directory(&layer.path).ok()?;
        let found = fstat(&directory).ok()?;
        ((found.st_dev, found.st_ino) == (layer.dev, layer.ino)).then_some(directory)
    };
    server.layers.iter().map_while(open).collect()
}

/// Gives them places in the scratch root.
fn bind_layers(layers: Vec<OwnedFd>) -> Result<Vec<PathBuf>, Failure> {
    let bind_layer = |(number, layer): (usize, OwnedFd)| {
        let place = PathBuf::from(format!("/unpacked-{number}"));
        make_directory(&place)?;
        bind(layer.as_fd(), open_directory(&place)?.as_fd())
            .map_err(|errno| Failure::caused_by("cannot bind unpacked files", errno))?;
        Ok(place)
    };
    layers.into_iter().enumerate().map(bind_layer).collect()
}

/// The missing mount points, and unpacked files, in layers over the image. False where the kernel cannot do that.
fn overlay_mount_points(plan: &Plan, layers: &[PathBuf], image: &Path) -> Result<bool, Failure> {
    let lower = mount_point_layer(plan, layers, image)?;
    Ok(overlay(&format!("{lower},userxattr"), MsFlags::MS_RDONLY).is_ok())
}

/// A directory with the missing mount points, and the overlay's option for it, for further layers and for the image.
fn mount_point_layer(plan: &Plan, layers: &[PathBuf], image: &Path) -> Result<String, Failure> {
    let places = Path::new("/places");
    if !places.exists() {
        make_directory(places)?;
        add_mount_points(plan, places)?;
    }
    let layers: String = layers.iter().map(|layer| format!("{}:", layer.display())).collect();
    Ok(format!("lowerdir={}:{layers}{}", places.display(), image.display()))
}

fn overlay(options: &str, flags: MsFlags) -> nix::Result<()> {
    let flags = flags | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    // The image's own mount is below it, where nobody sees it.
    mount(Some(own_mount_name().as_str()), ROOT, Some("overlay"), flags, Some(options))
}

fn add_mount_points(plan: &Plan, root: &Path) -> Result<(), Failure> {
    let root = open_directory(root)?;
    for (path, shape) in plan.skeletons.iter().flat_map(|skeleton| &skeleton.added) {
        let relative = path.strip_prefix("/").unwrap_or(path);
        make_mount_point(root.as_fd(), relative, *shape).map_err(|e| in_container(path, e))?;
    }
    for Link { path, target, .. } in plan.skeletons.iter().flat_map(|skeleton| &skeleton.links) {
        let relative = path.strip_prefix("/").unwrap_or(path);
        make_link(root.as_fd(), relative, target).map_err(|e| in_container(path, e))?;
    }
    for (path, content) in &plan.files {
        let relative = path.strip_prefix("/").unwrap_or(path);
        make_file(root.as_fd(), relative, content)
            .map_err(|error| Failure::caused_by(format!("{} in the container", path.display()), error))?;
    }
    Ok(())
}

/// Makes a file below a directory of ours, with the directories on the way.
fn make_file(directory: BorrowedFd, relative: &Path, content: &[u8]) -> io::Result<()> {
    make_mount_point(directory, relative, Shape::File)?;
    fs::write(proc_path(open_in_root(directory, relative)?.as_fd()), content)
}

/// Makes a symbolic link below a directory of ours, with the directories on the way.
pub fn make_link(directory: BorrowedFd, relative: &Path, target: &Path) -> nix::Result<()> {
    let parent = relative.parent().unwrap_or(Path::new(""));
    make_mount_point(directory, parent, Shape::Directory)?;
    symlinkat(target, open_in_root(directory, parent)?, relative.file_name().unwrap_or_default())
}

/// Every directory in which mount points are missing becomes a tmpfs with the same entries, bound from the image.
fn bind_mount_points(plan: &Plan, image: &Path) -> Result<(), Failure> {
    let image = open_directory(image)?;
    let top = open_directory(Path::new(ROOT))?;
    bind(image.as_fd(), top.as_fd()).map_err(|e| in_container(Path::new("/"), e))?;
    // Links to Slurm's commands alone are not worth so many mounts: they are for login shells, others find the commands
    // through PATH.
    let worth =
        |skeleton: &&Skeleton| !skeleton.added.is_empty() || skeleton.links.iter().any(|link| link.needed);
    for skeleton in plan.skeletons.iter().filter(worth) {
        let root = open_directory(Path::new(ROOT))?;
        let failed = |errno| in_container(&skeleton.directory, errno);
        let old = open_in_root(root.as_fd(), &skeleton.directory).map_err(failed)?;
        tmpfs(&proc_path(old.as_fd()), "size=16m,mode=0755")?;
        // A mount on the root itself is not seen through a descriptor of the old root.
        let root = open_directory(Path::new(ROOT))?;
        let new = open_in_root(root.as_fd(), &skeleton.directory).map_err(failed)?;
        fill(skeleton, old.as_fd(), new.as_fd())?;
        remount(new.as_fd(), true)?;
    }
    Ok(())
}

fn fill(skeleton: &Skeleton, old: BorrowedFd, new: BorrowedFd) -> Result<(), Failure> {
    let failed = |name: &OsStr, error: io::Error| {
        let path = skeleton.directory.join(name);
        Failure::caused_by(format!("{} in the container", path.display()), error)
    };
    for entry in fs::read_dir(proc_path(old)).map_err(|error| failed(OsStr::new(""), error))? {
        let entry = entry.map_err(|error| failed(OsStr::new(""), error))?;
        let name = entry.file_name();
        if skeleton.links.iter().any(|link| link.path == skeleton.directory.join(&name)) {
            continue; // replaced
        }
        let take_over = || -> io::Result<()> {
            let kind = entry.file_type()?;
            if kind.is_symlink() {
                return Ok(symlinkat(fs::read_link(entry.path())?.as_path(), new, name.as_os_str())?);
            }
            let shape = if kind.is_dir() { Shape::Directory } else { Shape::File };
            if !kind.is_dir() && !kind.is_file() {
                return Ok(()); // a device or socket of an image is of no use inside
            }
            make_mount_point(new, Path::new(&name), shape)?;
            Ok(bind(open_entry(old, &name, shape)?.as_fd(), open_entry(new, &name, shape)?.as_fd())?)
        };
        take_over().map_err(|error| failed(&name, error))?;
    }
    for (path, shape) in &skeleton.added {
        let relative = path.strip_prefix(&skeleton.directory).unwrap_or(path);
        make_mount_point(new, relative, *shape).map_err(|errno| in_container(path, errno))?;
    }
    for Link { path, target, .. } in &skeleton.links {
        let relative = path.strip_prefix(&skeleton.directory).unwrap_or(path);
        make_link(new, relative, target).map_err(|errno| in_container(path, errno))?;
    }
    Ok(())
}

fn tmpfs(place: &Path, options: &str) -> Result<(), Failure> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("mizzen"), place, Some("tmpfs"), flags, Some(options)).map_err(|errno| {
        Failure::caused_by(format!("cannot mount a tmpfs ({options})"), errno).or_hint(MOUNTS_REFUSED)
    })
}

fn remount(directory: BorrowedFd, read_only: bool) -> Result<(), Failure> {
    let mut flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    flags.set(MsFlags::MS_RDONLY, read_only);
    mount(None::<&str>, &proc_path(directory), None::<&str>, flags, None::<&str>)
        .map_err(|errno| Failure::caused_by("cannot make the root read-only or writable", errno))
}

fn make_directory(path: &Path) -> Result<(), Failure> {
    fs::create_dir(path).map_err(|error| Failure::caused_by(format!("cannot make {}", path.display()), error))
}

/// The directory that was opened before, by its path. Of one in another mount namespace the path is text, which may mean another
/// here: the host's root, for example.
fn open_same_directory(path: &Path, opened: &Metadata) -> Result<OwnedFd, Failure> {
    let directory = open_directory(path)?;
    let found = fstat(&directory)
        .map_err(|errno| Failure::caused_by(format!("cannot open {}", path.display()), errno))?;
    if (found.st_dev, found.st_ino) == (opened.dev(), opened.ino()) {
        return Ok(directory);
    }
    let message = format!("{} is another directory than the image that was opened", path.display());
    Err(Failure::new(message).hint(
        "an image must be a directory of this node's, not of another process's (/proc/PID/root), and stay where it is",
    ))
}

fn open_directory(path: &Path) -> Result<OwnedFd, Failure> {
    open(path, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())
        .map_err(|errno| Failure::caused_by(format!("cannot open {}", path.display()), errno))
}
