//! Where symbolic links go that a container needs: into the image's directories, or into file systems that are made for
//! it. What is mounted from the host is not ours to change.

use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::failure::{cause, quote};

use super::{Mount, What};
use crate::image::{Entry, Tree, resolve};

/// A symbolic link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Absolute inside, its directory without symbolic links.
    pub path: PathBuf,
    /// Where it leads.
    pub target: PathBuf,
    /// Whether it must be there even if it takes further mounts.
    pub needed: bool,
}

/// Links with their places.
#[derive(Debug, Default)]
pub struct Links {
    /// In the image, each with the deepest directory above it that exists. A file there is replaced.
    pub in_image: Vec<(PathBuf, Link)>,
    /// In file systems that are made for the container.
    pub in_memory: Vec<Link>,
}

/// Finds the place of each link, absolute inside; of two with the same name the later holds.
pub fn place(
    wanted: &[(PathBuf, PathBuf)],
    mounts: &[Mount],
    tree: &dyn Tree,
    notes: &mut Vec<String>,
) -> Result<Links, Failure> {
    let mut links = Links::default();
    for (index, (asked, target)) in wanted.iter().enumerate() {
        if wanted[index + 1..].iter().any(|(later, _)| later == asked) {
            continue;
        }
        let shown = quote(asked.as_os_str().as_encoded_bytes());
        let in_image = |error| Failure::new(format!("link {shown} in the image: {}", cause(&error)));
        let (Some(directory), Some(name)) = (asked.parent(), asked.file_name()) else { continue };
        let resolved = resolve(tree, directory).map_err(in_image)?;
        // Below a mount the image's links do not count.
        let covers = |path: &Path| mounts.iter().rev().find(|mount| path.starts_with(&mount.target)).cloned();
        let (path, mount) = match covers(asked) {
            Some(mount) => (asked.clone(), Some(mount)),
            None => (resolved.path.join(name), covers(&resolved.path.join(name))),
        };
        let link = Link { path, target: target.clone(), needed: true };
        let Some(mount) = mount else {
            match tree.entry(&link.path).map_err(in_image)? {
                Some(Entry::Directory) => {
                    return Err(Failure::new(format!("link {shown}: the image has a directory there")));
                }
                Some(Entry::Symlink) if tree.read_link(&link.path).is_ok_and(|old| old == *target) => {}
                _ => links.in_image.push((resolved.existing, link)),
            }
            continue;
        };
        let below = link.path.strip_prefix(&mount.target).unwrap_or(&link.path);
        match &mount.what {
            _ if mount.target == link.path => {}
            What::Tmpfs(_) | What::Devices(_) => links.in_memory.push(link),
            What::Bind { source, .. } if source.join(below).symlink_metadata().is_ok() => {}
            _ => {
                let outer = quote(mount.target.as_os_str().as_encoded_bytes());
                notes.push(format!("the link {shown} is left out: the mount of {outer} has no such name"));
            }
        }
    }
    Ok(links)
}
