//! Mounts by descriptor: sources are opened on the host as the user, places inside the container's root, and
//! neither can lead anywhere else. `mount` gets them as /proc/self/fd/N, which every kernel takes.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::failure::quote;
use mizzen_core::mount_flags::{Propagation, PropagationKind};
use mizzen_core::mountinfo::{self, MountLine};
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat, openat2};
use nix::mount::{MsFlags, mount};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::symlinkat;
use tracing::debug;

use super::Mountable;
use super::processes::own_mount_name;
use super::root::{NewRoot, make_link};
use crate::mount::{HostFile, Link, Mount, MountKind, Shape};
use crate::plan::{Changes, Plan, Root, lies_in};
use crate::slurm::Helper;
use crate::{host_libraries, slurm, sys};

/// What a mount of the plan needs from the host.
pub enum OpenSource {
    /// Nothing.
    None,
    /// A file or directory.
    One(OwnedFd),
    /// Devices, or other files.
    Many(Vec<(PathBuf, OwnedFd, Shape)>),
}

const ANY: OFlag = OFlag::O_PATH.union(OFlag::O_CLOEXEC);

/// Opens everything that will be mounted from the host, in the plan's order.
pub fn open_sources(plan: &Plan) -> Result<Vec<OpenSource>, Failure> {
    plan.mounts
        .iter()
        .map(|mount| match &mount.kind {
            MountKind::Bind { source, .. } | MountKind::Commands(source) => {
                Ok(OpenSource::One(open_source(source, mount)?))
            }
            MountKind::Devices(devices) => {
                let mut opened = Vec::new();
                for device in devices {
                    let shape = if device.is_dir() { Shape::Directory } else { Shape::File };
                    match open(device, ANY, Mode::empty()) {
                        Ok(fd) => opened.push((device.clone(), fd, shape)),
                        // A container without /dev/null would be a riddle.
                        Err(errno @ (Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM)) => {
                            let what = format!("cannot open {}", device.display());
                            return Err(Failure::caused_by(what, errno));
                        }
                        // One that has just gone, or that the user may not see, is no loss.
                        Err(errno) => debug!(?device, %errno, "a device is left out"),
                    }
                }
                Ok(OpenSource::Many(opened))
            }
            MountKind::HostFiles { files, .. } => {
                let open = |file: &HostFile| {
                    let shape = if file.source.is_dir() { Shape::Directory } else { Shape::File };
                    Ok((file.source.clone(), open_source(&file.source, mount)?, shape))
                };
                Ok(OpenSource::Many(files.iter().map(open).collect::<Result<_, Failure>>()?))
            }
            MountKind::Proc
            | MountKind::MessageQueues
            | MountKind::Tmpfs(_)
            | MountKind::File(_)
            | MountKind::Squashfs(_) => Ok(OpenSource::None),
        })
        .collect()
}

fn open_source(source: &Path, mount: &Mount) -> Result<OwnedFd, Failure> {
    open(source, ANY, Mode::empty()).map_err(|errno| {
        let (source, target) = (quote(source.as_os_str().as_bytes()), mount.target.display());
        Failure::caused_by(format!("cannot open {source}, to be mounted on {target}"), errno)
    })
}

/// Mounts everything in the plan's order. `servers` are those of the squashfs mounts, in that order.
pub fn apply(
    plan: &Plan,
    root: &NewRoot,
    sources: Vec<OpenSource>,
    servers: Vec<Mountable>,
    helper: Option<&Helper>,
) -> Result<(), Failure> {
    let mut servers = servers.into_iter();
    // Those that the next one may lie in, the innermost last.
    let mut around: Vec<&Mount> = Vec::new();
    for (mount, source) in plan.mounts.iter().zip(sources) {
        let target = &mount.target;
        while around.last().is_some_and(|outer| !lies_in(target, &outer.target)) {
            around.pop();
        }
        let place = open_mount_point(root, mount, around.last().copied())
            .or_else(|errno| make_again(plan, root, mount, errno))
            .map_err(|e| in_container(target, e))?;
        around.push(mount);
        match (&mount.kind, source) {
            (MountKind::Bind { source, .. }, OpenSource::One(opened)) => {
                bind(opened.as_fd(), place.as_fd()).map_err(|errno| {
                    let source = quote(source.as_os_str().as_bytes());
                    Failure::caused_by(format!("cannot mount {source} on {}", target.display()), errno)
                })?;
            }
            (MountKind::Devices(_), OpenSource::Many(devices)) => {
                devices_on(place.as_fd(), root, target, devices)?;
                continue; // the only mount that devices work on
            }
            (MountKind::File(content), _) => file_on(place.as_fd(), content).map_err(|error| {
                Failure::caused_by(format!("cannot put a file on {}", target.display()), error)
            })?,
            (MountKind::Squashfs(_), _) => {
                let server = servers.next().ok_or_else(|| Failure::new("a file server is missing"))?;
                server.mount(&proc_path(place.as_fd()))?;
            }
            (MountKind::Proc, _) => new_file_system("proc", &place, "")?,
            (MountKind::MessageQueues, _) => new_file_system("mqueue", &place, "")?,
            (MountKind::Tmpfs(tmpfs), _) => new_file_system("tmpfs", &place, &tmpfs.text())?,
            (MountKind::Commands(_), OpenSource::One(launcher)) => {
                new_file_system("tmpfs", &place, "mode=0755,size=1m")?;
                let directory = open_in_root(root.as_fd(), target).map_err(|e| in_container(target, e))?;
                commands_in(directory.as_fd(), launcher.as_fd(), helper).map_err(|errno| {
                    let what = format!("cannot put Slurm's commands into {}", target.display());
                    Failure::caused_by(what, errno)
                })?;
            }
            (MountKind::HostFiles { files, links }, OpenSource::Many(opened)) => {
                new_file_system("tmpfs", &place, "mode=0755,size=1m")?;
                let directory = open_in_root(root.as_fd(), target).map_err(|e| in_container(target, e))?;
                host_files_in(directory.as_fd(), files, opened, links)?;
            }
            (
                MountKind::Bind { .. }
                | MountKind::Devices(_)
                | MountKind::Commands(_)
                | MountKind::HostFiles { .. },
                _,
            ) => {}
        }
        let mounted = open_in_root(root.as_fd(), target).map_err(|e| in_container(target, e))?;
        let mut flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        flags.set(MsFlags::MS_NODEV, !target.starts_with("/dev")); // a device that the user asks for must work
        flags.set(MsFlags::MS_RDONLY, mount.flags.read_only);
        flags.set(MsFlags::MS_NOEXEC, mount.flags.no_exec);
        restrict(mounted.as_fd(), target, flags)?;
        let propagation = match mount.flags.propagation {
            Some(propagation) => propagation_flags(propagation),
            None if plan.follows_host() => MsFlags::MS_PRIVATE | MsFlags::MS_REC,
            // As all mounts are here.
            None => continue,
        };
        propagate(mounted.as_fd(), propagation).map_err(|errno| {
            mount.about(Failure::caused_by(
                format!("cannot set the propagation of {}", target.display()),
                errno,
            ))
        })?;
    }
    for Link { path, target, .. } in &plan.links {
        let relative = path.strip_prefix("/").unwrap_or(path);
        match make_link(root.as_fd(), relative, target) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(errno) => return Err(in_container(path, errno)),
        }
    }
    Ok(())
}

/// Opens the place of a mount, which lies in `outer`. In a tmpfs of ours, which was empty when it was planned, it is made.
/// Elsewhere none is: that would be on the host.
fn open_mount_point(root: &NewRoot, mount: &Mount, outer: Option<&Mount>) -> nix::Result<OwnedFd> {
    let ours = outer.filter(|outer| matches!(outer.kind, MountKind::Tmpfs(_) | MountKind::Devices(_)));
    let Some(outer) = ours else { return open_in_root(root.as_fd(), &mount.target) };
    let tmpfs = open_in_root(root.as_fd(), &outer.target)?;
    let relative = mount.target.strip_prefix(&outer.target).map_err(|_| Errno::EINVAL)?;
    let shape = mount.kind.shape();
    // What stands for a file may be a device, which must not be opened to see whether it is there.
    if shape == Shape::File
        && let Ok(place) = open_in_root(tmpfs.as_fd(), relative)
    {
        return Ok(place);
    }
    make_mount_point(tmpfs.as_fd(), relative, shape)?;
    open_in_root(tmpfs.as_fd(), relative)
}

fn propagation_flags(propagation: Propagation) -> MsFlags {
    let kind = match propagation.kind {
        PropagationKind::Slave => MsFlags::MS_SLAVE,
        PropagationKind::Shared => MsFlags::MS_SHARED,
        PropagationKind::Private => MsFlags::MS_PRIVATE,
        PropagationKind::Unbindable => MsFlags::MS_UNBINDABLE,
    };
    if propagation.recursive { kind | MsFlags::MS_REC } else { kind }
}

/// Sets what becomes of mounts that are made below one later.
pub fn propagate(mounted: BorrowedFd, flags: MsFlags) -> nix::Result<()> {
    mount(None::<&str>, &proc_path(mounted), None::<&str>, flags, None::<&str>)
}

/// Makes a mount point that the image has, where it was removed in an earlier run of a named container; or just now.
fn make_again(plan: &Plan, root: &NewRoot, mount: &Mount, errno: Errno) -> nix::Result<OwnedFd> {
    let is_named = matches!(plan.root, Root::Writable(Changes::Named { .. }) | Root::Shared { .. });
    if errno != Errno::ENOENT || !is_named {
        return Err(errno);
    }
    let relative = mount.target.strip_prefix("/").unwrap_or(&mount.target);
    make_mount_point(root.as_fd(), relative, mount.kind.shape())?;
    open_in_root(root.as_fd(), &mount.target)
}

fn new_file_system(kind: &str, place: &OwnedFd, options: &str) -> Result<(), Failure> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("mizzen"), &proc_path(place.as_fd()), Some(kind), flags, Some(options))
        .map_err(|errno| Failure::caused_by(format!("cannot mount {kind} ({options})"), errno))
}

fn file_on(place: BorrowedFd, content: &[u8]) -> io::Result<()> {
    // In the scratch root; the file lives on in the mount when its name is gone.
    let name = Path::new("/file");
    fs::write(name, content)?;
    let file = open(name, ANY, Mode::empty())?;
    bind(file.as_fd(), place)?;
    fs::remove_file(name)
}

fn devices_on(
    place: BorrowedFd,
    root: &NewRoot,
    target: &Path,
    devices: Vec<(PathBuf, OwnedFd, Shape)>,
) -> Result<(), Failure> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    let name = own_mount_name();
    mount(Some(name.as_str()), &proc_path(place), Some("tmpfs"), flags, Some("mode=0755,size=1m"))
        .map_err(|errno| Failure::caused_by("cannot mount a tmpfs on /dev", errno))?;
    let dev = open_in_root(root.as_fd(), target).map_err(|e| in_container(target, e))?;
    for (path, source, shape) in devices {
        let name = path.file_name().unwrap_or_default();
        let put = || -> nix::Result<()> {
            make_mount_point(dev.as_fd(), Path::new(name), shape)?;
            bind(source.as_fd(), open_entry(dev.as_fd(), name, shape)?.as_fd())
        };
        put().map_err(|errno| Failure::caused_by(format!("cannot mount {}", path.display()), errno))?;
    }
    for (name, to) in [("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")] {
        symlinkat(to, &dev, name).map_err(|e| in_container(&target.join(name), e))?;
    }
    Ok(())
}

/// The launcher in a new directory, links to it under the names of Slurm's commands, and who runs these.
fn commands_in(directory: BorrowedFd, launcher: BorrowedFd, helper: Option<&Helper>) -> nix::Result<()> {
    let name = OsStr::new("mizzen");
    make_mount_point(directory, Path::new(name), Shape::File)?;
    bind(launcher, open_entry(directory, name, Shape::File)?.as_fd())?;
    make_mount_point(directory, Path::new("bin"), Shape::Directory)?;
    // A mount point for the node's libraries.
    let below = Path::new(host_libraries::DIRECTORY).strip_prefix(slurm::DIRECTORY);
    make_mount_point(directory, below.map_err(|_| Errno::EINVAL)?, Shape::Directory)?;
    let links = open_entry(directory, OsStr::new("bin"), Shape::Directory)?;
    slurm::COMMANDS.iter().try_for_each(|command| symlinkat("../mizzen", &links, *command))?;
    helper.map_or(Ok(()), |helper| helper.listen_in(directory))
}

/// The node's files in a new directory, and links to them.
fn host_files_in(
    directory: BorrowedFd,
    files: &[HostFile],
    opened: Vec<(PathBuf, OwnedFd, Shape)>,
    links: &[(PathBuf, String)],
) -> Result<(), Failure> {
    for (HostFile { place, .. }, (path, source, shape)) in files.iter().zip(opened) {
        let put = || -> nix::Result<()> {
            make_mount_point(directory, place, shape)?;
            bind(source.as_fd(), open_in_root(directory, place)?.as_fd())
        };
        put().map_err(|errno| Failure::caused_by(format!("cannot mount {}", path.display()), errno))?;
    }
    for (link, target) in links {
        let parent = link.parent().unwrap_or(Path::new(""));
        let put = || -> nix::Result<()> {
            make_mount_point(directory, parent, Shape::Directory)?;
            let name = link.file_name().unwrap_or_default();
            symlinkat(target.as_str(), open_in_root(directory, parent)?, name)
        };
        put().map_err(|errno| in_container(link, errno))?;
    }
    Ok(())
}

/// Binds a file or directory, with all that is mounted below it.
pub fn bind(source: BorrowedFd, place: BorrowedFd) -> nix::Result<()> {
    let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
    mount(Some(&proc_path(source)), &proc_path(place), None::<&str>, flags, None::<&str>)
}

/// A descriptor as a path.
pub fn proc_path(fd: BorrowedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Restricts a mount and everything mounted below it.
pub fn restrict(mounted: BorrowedFd, shown: &Path, flags: MsFlags) -> Result<(), Failure> {
    let attributes = [
        (MsFlags::MS_RDONLY, libc::MOUNT_ATTR_RDONLY),
        (MsFlags::MS_NOSUID, libc::MOUNT_ATTR_NOSUID),
        (MsFlags::MS_NODEV, libc::MOUNT_ATTR_NODEV),
        (MsFlags::MS_NOEXEC, libc::MOUNT_ATTR_NOEXEC),
    ];
    let set =
        attributes.iter().filter(|(flag, _)| flags.contains(*flag)).map(|(_, attribute)| attribute).sum();
    let outcome = match sys::restrict_mounts(mounted, set) {
        Err(error) if sys::is_missing(&error) => {
            debug!("no mount_setattr: mounts are restricted one by one");
            restrict_one_by_one(mounted, flags)
        }
        outcome => outcome,
    };
    outcome.map_err(|error| {
        Failure::caused_by(format!("cannot restrict the mount of {}", shown.display()), error)
    })
}

/// The same for Linux before 5.12: every mount is remounted with the flags that it has and those that are added. By descriptor:
/// others can rename what lies on the path, or serve it. A mount below that cannot be reached so can give no privileges and no
/// devices either, which the user does not have on the node; but what the user wants restricted must be.
fn restrict_one_by_one(mounted: BorrowedFd, added: MsFlags) -> io::Result<()> {
    let must_hold = added.intersects(MsFlags::MS_RDONLY | MsFlags::MS_NOEXEC);
    let (id, lines) = (mountinfo::mount_id(mounted)?, mountinfo::read()?);
    let own = lines.iter().find(|line| line.id == id).ok_or(Errno::ESTALE)?;
    let covered = |line: &MountLine| line.id != own.id && line.place == own.place;
    for line in lines.iter().filter(|line| line.place.starts_with(&own.place) && !covered(line)) {
        let flags = flags_of(line);
        if flags.contains(added) {
            continue;
        }
        let remount = |place: BorrowedFd| {
            let flags = flags | added | MsFlags::MS_REMOUNT | MsFlags::MS_BIND;
            mount(None::<&str>, &proc_path(place), None::<&str>, flags, None::<&str>)
        };
        if line.id == own.id {
            remount(mounted)?;
            continue;
        }
        let done = match open_mount_below(mounted, &own.place, line, &lines) {
            Ok(Some(place)) => remount(place.as_fd()).map_err(io::Error::from),
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        match done {
            Err(error) if !must_hold => {
                debug!(place = ?line.place, %error, "a mount below is not restricted")
            }
            outcome => outcome?,
        }
    }
    Ok(())
}

/// The flags of a mount, as a remount must repeat them.
fn flags_of(line: &MountLine) -> MsFlags {
    let has = |wanted: &str| line.options.split(',').any(|option| option == wanted);
    let known = [
        ("ro", MsFlags::MS_RDONLY),
        ("nosuid", MsFlags::MS_NOSUID),
        ("nodev", MsFlags::MS_NODEV),
        ("noexec", MsFlags::MS_NOEXEC),
        ("noatime", MsFlags::MS_NOATIME),
        ("nodiratime", MsFlags::MS_NODIRATIME),
        ("relatime", MsFlags::MS_RELATIME),
    ];
    let flags =
        known.iter().filter(|(option, _)| has(option)).fold(MsFlags::empty(), |all, (_, flag)| all | *flag);
    let no_times = flags.intersects(MsFlags::MS_NOATIME | MsFlags::MS_RELATIME);
    if no_times { flags } else { flags | MsFlags::MS_STRICTATIME }
}

/// Opens the root of a mount that lies below another one, and asks nothing of its file system, nor of those on the way; none if
/// a later mount covers it.
fn open_mount_below(
    mounted: BorrowedFd,
    top: &Path,
    line: &MountLine,
    lines: &[MountLine],
) -> io::Result<Option<OwnedFd>> {
    // Whoever serves what lies between may never answer.
    let is_between = |other: &&MountLine| {
        other.place != line.place && line.place.starts_with(&other.place) && other.place.starts_with(top)
    };
    if lines.iter().filter(is_between).any(|other| other.fs_type.starts_with("fuse")) {
        return Err(Errno::EACCES.into());
    }
    let relative = line.place.strip_prefix(top).map_err(io::Error::other)?;
    let mut names = relative.components().peekable();
    let mut found = openat(mounted, ".", ANY | OFlag::O_DIRECTORY, Mode::empty())?;
    while let Some(name) = names.next() {
        // A link would be no directory; the last is a mount point, which is no link.
        let kind = if names.peek().is_some() { OFlag::O_DIRECTORY } else { OFlag::empty() };
        found = openat(&found, name.as_os_str(), ANY | OFlag::O_NOFOLLOW | kind, Mode::empty())?;
    }
    let id = mountinfo::mount_id(&found)?;
    if id == line.id {
        return Ok(Some(found));
    }
    match lines.iter().any(|other| other.id == id && other.place == line.place) {
        true => Ok(None),
        false => Err(Errno::ESTALE.into()),
    }
}

/// Opens a path of the container that has no symbolic links; one that has appeared since the plan was made is an
/// error (ELOOP), and nothing outside the root can be reached.
pub fn open_in_root(root: BorrowedFd, path: &Path) -> nix::Result<OwnedFd> {
    let relative = path.strip_prefix("/").unwrap_or(path);
    let relative = if relative.as_os_str().is_empty() { Path::new(".") } else { relative };
    let resolve =
        ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_MAGICLINKS;
    match openat2(root, relative, OpenHow::new().flags(ANY).resolve(resolve)) {
        // Linux before 5.6, or a seccomp filter that does not know the call.
        Err(Errno::ENOSYS | Errno::EPERM) => walk_in_root(root, relative),
        outcome => outcome,
    }
}

/// The same with one `openat` per component, none of which follows a link.
fn walk_in_root(root: BorrowedFd, relative: &Path) -> nix::Result<OwnedFd> {
    let mut current = openat(root, ".", ANY | OFlag::O_DIRECTORY, Mode::empty())?;
    for component in relative.components() {
        match component {
            Component::Normal(name) => {
                let next = openat(&current, name, ANY | OFlag::O_NOFOLLOW, Mode::empty())?;
                if fs::read_link(proc_path(next.as_fd())).is_ok() && is_link(next.as_fd())? {
                    return Err(Errno::ELOOP);
                }
                current = next;
            }
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => return Err(Errno::EINVAL),
        }
    }
    Ok(current)
}

fn is_link(fd: BorrowedFd) -> nix::Result<bool> {
    let mode = nix::sys::stat::fstat(fd)?.st_mode;
    Ok(mode & libc::S_IFMT == libc::S_IFLNK)
}

/// Opens a direct entry of a directory, which must be what it is taken for.
pub fn open_entry(directory: BorrowedFd, name: &OsStr, shape: Shape) -> nix::Result<OwnedFd> {
    let flags = match shape {
        Shape::Directory => OFlag::O_DIRECTORY,
        Shape::File => OFlag::empty(),
    };
    openat(directory, name, ANY | OFlag::O_NOFOLLOW | flags, Mode::empty())
}

/// Makes a mount point below a directory of ours; directories on the way are made too.
pub fn make_mount_point(directory: BorrowedFd, relative: &Path, shape: Shape) -> nix::Result<()> {
    let mut current = openat(directory, ".", ANY | OFlag::O_DIRECTORY, Mode::empty())?;
    let mut components = relative.components().peekable();
    while let Some(component) = components.next() {
        let Component::Normal(name) = component else { return Err(Errno::EINVAL) };
        if components.peek().is_none() && shape == Shape::File {
            // In a container that runs, a program may make a FIFO of that name just now.
            let flags = OFlag::O_CREAT | OFlag::O_WRONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
            openat(&current, name, flags | OFlag::O_CLOEXEC, Mode::from_bits_truncate(0o644))?;
            return Ok(());
        }
        match mkdirat(&current, name, Mode::from_bits_truncate(0o755)) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(errno) => return Err(errno),
        }
        current = open_entry(current.as_fd(), name, Shape::Directory)?;
    }
    Ok(())
}

/// A failure with a path of the container.
pub fn in_container(path: &Path, errno: Errno) -> Failure {
    Failure::caused_by(format!("{} in the container", quote(path.as_os_str().as_bytes())), errno)
}
