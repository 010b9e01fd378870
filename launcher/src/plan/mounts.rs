//! Which mounts a container has, and what must be made so that each has a place.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::failure::{cause, quote};
use mizzen_core::options::{MountFlags, MountOption, MountSource};
use mizzen_core::settings::Writable;

use super::{Identity, Link, Mount, Shape, Skeleton, What, identity};
use crate::host::Host;
use crate::host_libraries::{self, HostLibraries};
use crate::image::{Entry, Resolved, Tree, read_file, resolve};
use crate::options::{Origin, RunOptions};
use crate::slurm;

/// A larger passwd or group file is not an account file.
const ACCOUNTS_LIMIT: usize = 4 << 20;
/// Where every login shell looks for commands: they reset PATH.
const LOGIN_PATH: &str = "/usr/bin";
/// Directories that belong to the image: a current directory in one of them means the image's, not the host's.
const IMAGE_OWNED: [&str; 11] =
    ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/boot", "/proc", "/sys", "/dev"];

/// What other parts of the plan want to have mounted.
pub struct Others<'a> {
    /// Directories for MPI, with the reason.
    pub mpi: &'a [(PathBuf, &'static str)],
    /// What comes from the node.
    pub host_libraries: &'a HostLibraries,
}

/// All mounts, parents first; of two on the same place the later one.
pub fn decide(
    options: &RunOptions,
    tree: &dyn Tree,
    host: &Host,
    identity: &Identity,
    others: &Others,
    notes: &mut Vec<String>,
) -> Result<Vec<Mount>, Failure> {
    let mut wanted = defaults(options, tree, host, identity)?;
    wanted.extend(of_host_libraries(others.host_libraries));
    if let Some(What::Devices(devices)) = wanted.first_mut().map(|mount| &mut mount.what) {
        devices.extend(others.host_libraries.devices.iter().cloned());
    }
    let there = |directory: &Path, wanted: &[Mount]| {
        let same =
            |mount: &Mount| matches!(&mount.what, What::Bind { source, .. } if *source == mount.target);
        wanted.iter().any(|mount| same(mount) && directory.starts_with(&mount.target))
    };
    for (directory, why) in others.mpi {
        if there(directory, &wanted) {
            continue;
        }
        let what = What::Bind { source: directory.clone(), shape: Shape::Directory };
        let (target, flags, why) = (directory.clone(), MountFlags::default(), (*why).to_owned());
        wanted.push(Mount { what, target, flags, origin: None, why });
    }
    wanted.extend(others.host_libraries.mounts.iter().cloned());
    for (option, origin) in &options.mounts {
        wanted.push(from_option(option, *origin, host).map_err(|failure| failure.about(origin.mounts()))?);
    }
    // Parents first, so that what lies in a mount of the host is known; of equals the later one stays the later one.
    wanted.sort_by(|one, other| one.target.cmp(&other.target));
    let mut placed: Vec<Placed> = Vec::new();
    for mount in wanted {
        let outer = placed.iter().rev().find(|outer| lies_in(&mount.target, &outer.asked));
        let target = match outer {
            // Links of the image do not count below a mount.
            Some(outer) => {
                let relative = mount.target.strip_prefix(&outer.asked).unwrap_or(&mount.target);
                match exists_in(&outer.mount, relative) {
                    true => outer.mount.target.join(relative),
                    false if mount.origin.is_some() => return Err(mount.about(missing_in(outer, &mount))),
                    // A default that has lost its place to a mount of the user.
                    false => {
                        let (left_out, outer) = (shown(&mount.target), shown(&outer.asked));
                        notes.push(format!("{left_out} is left out: the mount of {outer} has no such place"));
                        continue;
                    }
                }
            }
            None => place(&mount, tree).map_err(|failure| mount.about(failure))?.path,
        };
        if mount.origin.is_some() {
            refuse_kernel_directories(&mount, &target).map_err(|failure| mount.about(failure))?;
        }
        let asked = mount.target.clone();
        placed.push(Placed { asked, mount: Mount { target, ..mount } });
    }
    let mut last: BTreeMap<PathBuf, Mount> = BTreeMap::new();
    for Placed { mount, .. } in without_strays(placed, notes)? {
        let origin = mount.origin;
        let why = mount.why.clone();
        if let Some(old) = last.insert(mount.target.clone(), mount)
            && origin.is_some()
            && old.why == why
        {
            let (option, target) = (why, old.target.display());
            notes.push(format!("{option}: {target} is mounted twice; the last one holds"));
        }
    }
    // Paths are compared by components: a directory comes before what is below it.
    Ok(last.into_values().collect())
}

/// A mount whose target is its place, and the path that was asked for.
struct Placed {
    asked: PathBuf,
    mount: Mount,
}

/// Mounts that no link of the image has brought onto, into or around another one: such a place would be in the host's
/// files, where an image has nothing to say.
fn without_strays(placed: Vec<Placed>, notes: &mut Vec<String>) -> Result<Vec<Placed>, Failure> {
    let nested = |one: &Path, other: &Path| lies_in(one, other) || lies_in(other, one);
    let mut strays = Vec::new();
    for (index, Placed { asked, mount }) in placed.iter().enumerate() {
        if *asked == mount.target {
            continue;
        }
        let mine = mount.origin.is_some();
        let met = placed.iter().find(|other| {
            let same = mount.target == other.mount.target && *asked != other.asked && !mine;
            same || nested(&mount.target, &other.mount.target) && !nested(asked, &other.asked)
        });
        let Some(met) = met else { continue };
        let stray = format!(
            "in the image it leads to {}, and so to the mount of {}",
            shown(&mount.target),
            shown(&met.asked)
        );
        if mine {
            return Err(mount.about(
                Failure::new(format!("{}: {stray}", shown(asked)))
                    .hint("choose a destination without symbolic links"),
            ));
        }
        notes.push(format!("{} is left out: {stray}", shown(asked)));
        strays.push(index);
    }
    let kept = placed.into_iter().enumerate().filter(|(index, _)| !strays.contains(index));
    Ok(kept.map(|(_, placed)| placed).collect())
}

/// What every container has, unless an option says otherwise.
fn defaults(
    options: &RunOptions,
    tree: &dyn Tree,
    host: &Host,
    identity: &Identity,
) -> Result<Vec<Mount>, Failure> {
    let default = |what, target: &Path| Mount {
        what,
        target: target.to_owned(),
        flags: MountFlags::default(),
        origin: None,
        why: "default".to_owned(),
    };
    let bind = |path: &Path, shape| default(What::Bind { source: path.to_owned(), shape }, path);
    let read_only = MountFlags { read_only: true, ..MountFlags::default() };
    let proc = Path::new("/proc");
    let mut mounts = vec![
        default(What::Devices(host.devices.clone()), Path::new("/dev")),
        if options.unshare.pid { default(What::Proc, proc) } else { bind(proc, Shape::Directory) },
        bind(Path::new("/sys"), Shape::Directory),
        bind(Path::new("/tmp"), Shape::Directory),
    ];
    for file in ["/etc/resolv.conf", "/etc/hosts"].map(Path::new) {
        if file.is_file() {
            mounts.push(Mount { flags: read_only, ..bind(file, Shape::File) });
        }
    }
    // Not through a link, as it usually is: the link's target is one of the image's time zones and must stay so.
    // The variable TZ tells the zone in that case.
    let localtime = Path::new("/etc/localtime");
    if localtime.is_file() && matches!(tree.entry(localtime), Ok(Some(Entry::File { .. }))) {
        mounts.push(Mount { flags: read_only, ..bind(localtime, Shape::File) });
    }
    type Complete = fn(&[u8], &Identity, &Host) -> Option<Vec<u8>>;
    let accounts: [(&str, Complete); 2] =
        [("/etc/passwd", identity::passwd_with_user), ("/etc/group", identity::group_with_users)];
    for (file, complete) in accounts {
        let file = Path::new(file);
        let image = read_file(tree, file, ACCOUNTS_LIMIT).map_err(|error| in_image(file, error))?;
        if let Some(content) = complete(&image.unwrap_or_default(), identity, host) {
            let why = "default: the image's, with the user added".to_owned();
            mounts.push(Mount { flags: read_only, why, ..default(What::File(content), file) });
        }
    }
    if options.step.as_ref().is_some_and(|step| step.commands.is_some()) {
        let launcher = std::env::current_exe().map_err(|error| {
            Failure::new(format!("cannot find the launcher's own file: {}", cause(&error)))
        })?;
        let why = "default: Slurm's commands".to_owned();
        let mount = default(What::Commands(launcher), Path::new(slurm::DIRECTORY));
        mounts.push(Mount { flags: read_only, why, ..mount });
    }
    if let Some(script) = options.step.as_ref().and_then(|step| step.script.as_ref()) {
        let why = "default: the batch script".to_owned();
        mounts.push(Mount { flags: read_only, why, ..bind(script, Shape::File) });
    }
    let home = host.home.as_deref().filter(|home| !options.no_home && !image_owned(home));
    if let Some(home) = home {
        mounts.push(Mount { why: "default: the home directory".to_owned(), ..bind(home, Shape::Directory) });
    }
    let temporary = host.environment.iter().find(|(name, _)| name == "TMPDIR");
    let temporary = temporary.map(|(_, value)| PathBuf::from(value));
    let temporary = temporary.filter(|path| path.is_absolute() && path.is_dir());
    // A writable root may have its own changes there, which no program should meet.
    let temporary = temporary.filter(|_| options.writable == Writable::No || host.tmpfs_has_xattrs);
    for (directory, why) in
        [(temporary.as_ref(), "default: TMPDIR"), (host.cwd.as_ref(), "default: the current directory")]
    {
        let Some(directory) = directory else { continue };
        let covered = mounts.iter().any(|other| directory.starts_with(&other.target));
        let near_home = |home: &Path| directory.starts_with(home) || home.starts_with(directory);
        let left_out = options.no_home && host.home.as_deref().is_some_and(near_home);
        // /var or /opt as a whole would hide the image's.
        let hides_image = directory.components().count() == 2 && matches!(tree.entry(directory), Ok(Some(_)));
        if !image_owned(directory) && !covered && !left_out && !hides_image {
            mounts.push(Mount { why: why.to_owned(), ..bind(directory, Shape::Directory) });
        }
    }
    Ok(mounts)
}

/// The node's libraries and programs in their directory, and what has a place of its own.
fn of_host_libraries(given: &HostLibraries) -> Vec<Mount> {
    let read_only = MountFlags { read_only: true, ..MountFlags::default() };
    let mount = |what, target: &Path, why: String| Mount {
        what,
        target: target.to_owned(),
        flags: read_only,
        origin: None,
        why,
    };
    let mut mounts = Vec::new();
    if !given.files.is_empty() || !given.links.is_empty() {
        let links = given.links.iter().map(|(place, target)| (place.clone(), target.clone())).collect();
        let what = What::HostFiles { files: given.files.clone(), links };
        mounts.push(mount(what, Path::new(host_libraries::DIRECTORY), "the node's libraries".to_owned()));
    }
    for (path, why) in &given.binds {
        let shape = if path.is_dir() { Shape::Directory } else { Shape::File };
        mounts.push(mount(What::Bind { source: path.clone(), shape }, path, why.clone()));
    }
    mounts
}

/// Whether a path of the host means the image's inside.
fn image_owned(path: &Path) -> bool {
    path == Path::new("/") || IMAGE_OWNED.iter().any(|owned| path.starts_with(owned))
}

fn from_option(option: &MountOption, origin: Origin, host: &Host) -> Result<Mount, Failure> {
    let absolute = |path: &Path| host.cwd.as_deref().unwrap_or(Path::new("/")).join(path);
    let existing = |given: &Path| {
        let path = absolute(given);
        match path.metadata() {
            Ok(found) => Ok((path, found)),
            Err(error) => {
                let hint = if given.is_absolute() {
                    "it must exist on this node, and you must be able to see it"
                } else {
                    "a relative source starts at the current directory; flags are joined by +, mounts by commas"
                };
                Err(Failure::new(format!("{}: {}", shown(&path), cause(&error))).hint(hint))
            }
        }
    };
    let (what, target) = match &option.source {
        MountSource::Tmpfs(size) => (What::Tmpfs(size.clone()), option.target.clone()),
        MountSource::Bind(source) => {
            let (source, found) = existing(source)?;
            let shape = if found.is_dir() { Shape::Directory } else { Shape::File };
            (What::Bind { source, shape }, absolute(&option.target))
        }
        MountSource::Squashfs(source) => {
            let (path, found) = existing(source)?;
            if !found.is_file() {
                return Err(Failure::new(format!("{}: not a file", shown(&path)))
                    .hint("the flag squashfs mounts the content of a squashfs file"));
            }
            (What::Squashfs(path), option.target.clone())
        }
    };
    Ok(Mount { what, target, flags: option.flags, origin: Some(origin), why: origin.mounts().to_owned() })
}

/// Where a mount goes, with symbolic links followed inside the image.
fn place(mount: &Mount, tree: &dyn Tree) -> Result<Resolved, Failure> {
    let target = shown(&mount.target);
    let resolved = resolve(tree, &mount.target).map_err(|error| in_image(&mount.target, error))?;
    if resolved.path == Path::new("/") {
        return Err(Failure::new(format!("{target} leads to the image's root directory"))
            .hint("a symbolic link in the image points to /; the image is broken or hostile"));
    }
    let kernels = ["/dev", "/proc", "/sys"].iter().any(|kernel| mount.target == Path::new(kernel));
    if kernels && resolved.path != mount.target {
        let message = format!("{target} in the image is a symbolic link to {}", shown(&resolved.path));
        return Err(
            Failure::new(message).hint("it must be a directory or missing; the image is broken or hostile")
        );
    }
    let misfit = match (mount.what.shape(), &resolved.entry) {
        (Shape::Directory, Some(entry)) if !matches!(entry, Entry::Directory) => {
            Some(("a directory", "is not a directory"))
        }
        (Shape::File, Some(Entry::Directory)) => Some(("a file", "is a directory")),
        _ => None,
    };
    if let Some((source, is)) = misfit {
        let message = format!("cannot mount {source} on {target}, which {is} in the image");
        return Err(Failure::new(message).hint("a file goes on a file, a directory on a directory"));
    }
    Ok(resolved)
}

fn refuse_kernel_directories(mount: &Mount, target: &Path) -> Result<(), Failure> {
    if target != Path::new("/dev") && !["/proc", "/sys"].iter().any(|kernel| target.starts_with(kernel)) {
        return Ok(());
    }
    let message = format!("{}: /proc, /sys and /dev are mizzen's own", shown(&mount.target));
    Err(Failure::new(message).hint("single devices can be mounted below /dev"))
}

/// Directories in which mount points, and links to Slurm's commands, are missing; parents first.
pub fn skeletons(
    mounts: &[Mount],
    commands: bool,
    needed_links: Vec<(PathBuf, Link)>,
    tree: &dyn Tree,
) -> Result<Vec<Skeleton>, Failure> {
    let mut missing: BTreeMap<PathBuf, Vec<(PathBuf, Shape)>> = BTreeMap::new();
    let mut links: BTreeMap<PathBuf, Vec<Link>> = BTreeMap::new();
    for mount in mounts {
        if mounts.iter().any(|outer| lies_in(&mount.target, &outer.target)) {
            continue;
        }
        let resolved = resolve(tree, &mount.target).map_err(|error| in_image(&mount.target, error))?;
        if resolved.entry.is_none() {
            missing.entry(resolved.existing).or_default().push((mount.target.clone(), mount.what.shape()));
        }
    }
    for command in slurm::COMMANDS.into_iter().filter(|_| commands) {
        let link = Path::new(LOGIN_PATH).join(command);
        // What the image has there itself stays, and what a mount covers is not ours.
        if let Ok(Resolved { path, entry: None, existing }) = resolve(tree, &link)
            && !mounts.iter().any(|mount| lies_in(&path, &mount.target))
        {
            let target = Path::new(slurm::DIRECTORY).join("bin").join(command);
            links.entry(existing).or_default().push(Link { path, target, needed: false });
        }
    }
    for (existing, link) in needed_links {
        links.entry(existing).or_default().push(link);
    }
    let mut directories: Vec<PathBuf> = missing.keys().chain(links.keys()).cloned().collect();
    directories.sort();
    directories.dedup();
    let skeleton = |directory: PathBuf| Skeleton {
        added: missing.remove(&directory).unwrap_or_default(),
        links: links.remove(&directory).unwrap_or_default(),
        directory,
    };
    Ok(directories.into_iter().map(skeleton).collect())
}

/// Whether one path is below another.
pub fn lies_in(inner: &Path, outer: &Path) -> bool {
    inner != outer && inner.starts_with(outer)
}

/// Whether a mount has a place below another: on the host that is not ours to make.
fn exists_in(outer: &Mount, relative: &Path) -> bool {
    match &outer.what {
        What::Bind { source, .. } => source.join(relative).exists(),
        What::Tmpfs(_) | What::Devices(_) => true, // empty and ours: made when it is mounted
        // Found out when it is mounted.
        What::Proc | What::File(_) | What::Squashfs(_) | What::Commands(_) | What::HostFiles { .. } => true,
    }
}

fn missing_in(outer: &Placed, inner: &Mount) -> Failure {
    let message = format!("{} does not exist in the mount of {}", shown(&inner.target), shown(&outer.asked));
    Failure::new(message).hint("make it on the host first, or choose another destination")
}

fn in_image(path: &Path, error: io::Error) -> Failure {
    Failure::new(format!("{} in the image: {}", shown(path), cause(&error)))
}

fn shown(path: &Path) -> String {
    quote(path.as_os_str().as_bytes())
}
