//! What changes the mounts that every container has: options that take some out, namespaces of its own and a writable root that
//! have others in their place.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::options::{MountFlags, Tmpfs};

use super::{Root, mount_points};
use crate::image::Tree;
use crate::mount::{Mount, MountKind};

/// No container works without these.
const KERNELS: [&str; 3] = ["/proc", "/sys", "/dev"];

/// The files of our own that go into a writable root itself: a program that adds a user makes a new file and gives it the name of
/// the old one, which cannot be done to a mount. In the root of a container that runs, they mostly are already, and others are not
/// changed for those who are in it.
pub fn split_files(
    mounts: Vec<Mount>,
    root: &Root,
    tree: &dyn Tree,
) -> (Vec<Mount>, Vec<(PathBuf, Vec<u8>)>) {
    if *root == Root::ReadOnly {
        return (mounts, Vec::new());
    }
    let places: BTreeSet<PathBuf> = mounts.iter().map(|mount| mount.target.clone()).collect();
    let in_root = |target: &Path| !target.ancestors().skip(1).any(|outer| places.contains(outer));
    let is_there = |target: &Path, content: &[u8]| {
        tree.read(target, content.len().saturating_add(1)).is_ok_and(|found| found == content)
    };
    let is_shared = matches!(root, Root::Shared { .. });
    let (mut kept, mut files) = (Vec::new(), Vec::new());
    for mount in mounts {
        match mount.kind {
            MountKind::File(content) if in_root(&mount.target) => match is_shared {
                true if is_there(&mount.target, &content) => {}
                true => kept.push(Mount { kind: MountKind::File(content), ..mount }),
                false => files.push((mount.target, content)),
            },
            kind => kept.push(Mount { kind, ..mount }),
        }
    }
    (kept, files)
}

/// Takes out what would be mounted at or below a place.
pub fn leave_out(
    wanted: &mut Vec<Mount>,
    target: &Path,
    why: &str,
    notes: &mut Vec<String>,
) -> Result<(), Failure> {
    let shown = mount_points::shown(target);
    if KERNELS.iter().any(|kernel| target == Path::new(kernel)) {
        return Err(Failure::new(format!("{why}: umount:{shown}: /proc, /sys and /dev are mizzen's own"))
            .hint("what is mounted below /dev can be left out, as umount:/dev/shm"));
    }
    let before = wanted.len();
    wanted.retain(|mount| !mount.target.starts_with(target));
    if wanted.len() == before {
        notes.push(format!("{why}: umount:{shown}: nothing is mounted there"));
    }
    Ok(())
}

/// Shared memory and message queues that nobody outside the container sees, in place of the host's.
pub fn own_shared_memory(wanted: &mut Vec<Mount>) {
    let own = [("/dev/shm", MountKind::Tmpfs(Tmpfs::default())), ("/dev/mqueue", MountKind::MessageQueues)];
    for (target, kind) in own {
        let target = PathBuf::from(target);
        wanted.retain(|mount| mount.target != target);
        let why = "default: an IPC namespace of its own".to_owned();
        wanted.push(Mount { kind, target, flags: MountFlags::default(), origin: None, why });
    }
}
