//! The place of every mount: where it goes, and what must be made so that it has one. Places are made in file systems of
//! the container's own and nowhere else: what is mounted from the host is not ours to change.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::failure::quote;
use mizzen_core::fs_server;

use super::{Skeleton, links};
use crate::image::{Entry, Resolved, Tree, in_image, resolve};
use crate::mount::{Link, Mount, MountKind, Shape};
use crate::slurm;

/// Where every login shell looks for commands: they reset PATH.
const LOGIN_PATH: &str = "/usr/bin";

/// A mount whose target is its place, and the path that was asked for.
struct Placed {
    asked: PathBuf,
    mount: Mount,
}

/// Finds all places. The mounts come back parents first; of two on the same place the later one.
pub fn find(mut wanted: Vec<Mount>, tree: &dyn Tree, notes: &mut Vec<String>) -> Result<Vec<Mount>, Failure> {
    // Parents first, so that what lies in a mount of the host is known; of equals the later one stays the later one.
    wanted.sort_by(|one, other| one.target.cmp(&other.target));
    let mut placed: Vec<Placed> = Vec::new();
    // Those that the next one may lie in, the innermost last.
    let mut around: Vec<usize> = Vec::new();
    for mount in wanted {
        while around.last().is_some_and(|outer| !lies_in(&mount.target, &placed[*outer].asked)) {
            around.pop();
        }
        if mount.origin.is_some() {
            refuse_kernel_directories(&mount, &mount.target).map_err(|failure| mount.about(failure))?;
        }
        let target = match around.last().map(|outer| &placed[*outer]) {
            // Links of the image do not count below a mount.
            Some(outer) => match place_in(outer, &mount) {
                Ok(place) => place,
                Err(failure) if mount.origin.is_some() => return Err(mount.about(failure)),
                // A default that has lost its place to a mount of the user.
                Err(_) => {
                    let (left_out, outer) = (shown(&mount.target), shown(&outer.asked));
                    notes.push(format!("{left_out} is left out: the mount of {outer} has no such place"));
                    continue;
                }
            },
            None => place(&mount, tree).map_err(|failure| mount.about(failure))?.path,
        };
        if mount.origin.is_some() {
            refuse_kernel_directories(&mount, &target).map_err(|failure| mount.about(failure))?;
        }
        around.push(placed.len());
        placed.push(Placed { asked: mount.target.clone(), mount: Mount { target, ..mount } });
    }
    let mut last: BTreeMap<PathBuf, Mount> = BTreeMap::new();
    for Placed { mount, .. } in drop_redirected_mounts(placed, notes)? {
        let (asked, why) = (mount.origin.is_some(), mount.why.clone());
        // The same once more is no matter.
        let another = last.get(&mount.target).is_some_and(|old| asked && old.why == why && *old != mount);
        if another {
            notes.push(format!("{why}: {} is mounted twice; the last one holds", mount.target.display()));
        }
        last.insert(mount.target.clone(), mount);
    }
    // Paths are compared by components: a directory comes before what is below it.
    Ok(last.into_values().collect())
}

/// The place of a mount below another one.
fn place_in(outer: &Placed, inner: &Mount) -> Result<PathBuf, Failure> {
    let relative = inner.target.strip_prefix(&outer.asked).unwrap_or(&inner.target);
    match &outer.mount.kind {
        MountKind::Bind { source, .. } => {
            let look = fs_server::look_from(source, relative);
            if let Some(part) = &look.served {
                return Err(fs_server::not_safe(&source.join(relative), part));
            }
            if look.end.is_err() {
                return Err(missing_in(outer, inner));
            }
            // Inside it would be followed from the container's root, and nobody would know where to.
            if let Some(link) = links::first_in(source, relative) {
                let (target, outer) = (shown(&inner.target), shown(&outer.asked));
                let message =
                    format!("{target}: in the mount of {outer} there is the symbolic link {}", shown(&link));
                return Err(Failure::new(message).hint("choose a destination without symbolic links"));
            }
        }
        MountKind::Tmpfs(_) | MountKind::Devices(_) => {} // empty and ours: made when it is mounted
        MountKind::File(_) | MountKind::MessageQueues => return Err(missing_in(outer, inner)),
        // Found out when it is mounted.
        MountKind::Proc | MountKind::Squashfs(_) | MountKind::Commands(_) | MountKind::HostFiles { .. } => {}
    }
    Ok(outer.mount.target.join(relative))
}

/// Mounts that no link of the image has brought onto, into or around another one: such a place would be in the host's
/// files, where an image has nothing to say.
fn drop_redirected_mounts(placed: Vec<Placed>, notes: &mut Vec<String>) -> Result<Vec<Placed>, Failure> {
    let nested = |one: &Path, other: &Path| lies_in(one, other) || lies_in(other, one);
    let mut by_place: BTreeMap<&Path, Vec<&Placed>> = BTreeMap::new();
    for one in &placed {
        by_place.entry(&one.mount.target).or_default().push(one);
    }
    let mut strays = BTreeSet::new();
    for (index, Placed { asked, mount }) in placed.iter().enumerate() {
        if *asked == mount.target {
            continue;
        }
        let mine = mount.origin.is_some();
        let around = mount.target.ancestors().filter_map(|place| by_place.get(place));
        let below = (Bound::Excluded(mount.target.as_path()), Bound::Unbounded);
        let within =
            by_place.range::<Path, _>(below).take_while(|(place, _)| place.starts_with(&mount.target));
        let met = around.chain(within.map(|(_, there)| there)).flatten().find(|other| {
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
        strays.insert(index);
    }
    let kept = placed.into_iter().enumerate().filter(|(index, _)| !strays.contains(index));
    Ok(kept.map(|(_, placed)| placed).collect())
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
    let misfit = match (mount.kind.shape(), &resolved.entry) {
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
    let taken: BTreeSet<&Path> = mounts.iter().map(|mount| mount.target.as_path()).collect();
    for mount in mounts {
        if mount.target.ancestors().skip(1).any(|outer| taken.contains(outer)) {
            continue;
        }
        let resolved = resolve(tree, &mount.target).map_err(|error| in_image(&mount.target, error))?;
        if resolved.entry.is_none() {
            missing.entry(resolved.existing).or_default().push((mount.target.clone(), mount.kind.shape()));
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

fn missing_in(outer: &Placed, inner: &Mount) -> Failure {
    let message = format!("{} does not exist in the mount of {}", shown(&inner.target), shown(&outer.asked));
    Failure::new(message).hint("make it on the host first, or choose another destination")
}

/// A path as a message shows it.
pub fn shown(path: &Path) -> String {
    quote(path.as_os_str().as_bytes())
}
