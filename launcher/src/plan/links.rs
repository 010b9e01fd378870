//! Symbolic links. Those that a container needs go into the image's directories, or into file systems that are made for
//! it: what is mounted from the host is not ours to change. Those of the host lead elsewhere inside.

use std::fs;
use std::path::{Component, Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::failure::quote;
use mizzen_core::fs_server;

use super::mount_points::{lies_in, shown};
use super::mounts;
use crate::image::{Entry, Tree, in_image, resolve};
use crate::mount::{Link, Mount, MountKind};

/// Links with their places.
#[derive(Debug, Default)]
pub struct Links {
    /// In the image, each with the deepest directory above it that exists. A file there is replaced.
    pub in_image: Vec<(PathBuf, Link)>,
    /// In file systems that are made for the container.
    pub in_memory: Vec<Link>,
}

impl Links {
    /// Leaves out those that would replace files, which programs of a container that runs may have open.
    pub fn leave_files(&mut self, tree: &dyn Tree, notes: &mut Vec<String>) {
        self.in_image.retain(|(_, link)| {
            let is_free = matches!(tree.entry(&link.path), Ok(None));
            if !is_free {
                let link = shown(&link.path);
                notes.push(format!("the link {link} is not made: the container that runs has a file there"));
            }
            is_free
        });
    }
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
        let in_image = |error| in_image(asked, error).about("link");
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
        match &mount.kind {
            _ if mount.target == link.path => {}
            MountKind::Tmpfs(_) | MountKind::Devices(_) => links.in_memory.push(link),
            MountKind::Bind { source, .. } if fs_server::reach_name(source, below).is_ok() => {}
            _ => {
                let outer = quote(mount.target.as_os_str().as_encoded_bytes());
                notes.push(format!("the link {shown} is left out: the mount of {outer} has no such name"));
            }
        }
    }
    Ok(links)
}

/// As many links as the kernel follows.
const LIMIT: usize = 40;

/// A default that lies in another mount of the host, behind a symbolic link, goes where the link leads inside: a home
/// directory below the current one, for example.
pub fn follow(wanted: &mut Vec<Mount>, notes: &mut Vec<String>) {
    let mut index = 0;
    while index < wanted.len() {
        let mount = &wanted[index];
        if mount.origin.is_some() || !matches!(mount.kind, MountKind::Bind { .. }) {
            index += 1;
            continue;
        }
        match destination(&mount.target, wanted) {
            Some(target) if target == mount.target || !mounts::image_owned(&target) => {
                wanted[index].target = target;
                index += 1;
            }
            led => {
                let to = led.map_or("itself".to_owned(), |target| shown(&target));
                notes.push(format!("{} is left out: its symbolic link leads to {to}", shown(&mount.target)));
                wanted.remove(index);
            }
        }
    }
}

/// Where a path leads inside by the links in mounts of the host; None if there are too many of them.
fn destination(path: &Path, wanted: &[Mount]) -> Option<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..LIMIT {
        let around = wanted.iter().filter(|outer| lies_in(&path, &outer.target));
        let innermost = around.max_by_key(|outer| outer.target.components().count());
        let Some(Mount { kind: MountKind::Bind { source, .. }, target, .. }) = innermost else {
            return Some(path);
        };
        let below = path.strip_prefix(target).unwrap_or(Path::new(""));
        let Some(link) = first_in(source, below) else { return Some(path) };
        let to = fs::read_link(source.join(&link)).ok()?;
        let behind = below.strip_prefix(&link).unwrap_or(Path::new(""));
        let directory = target.join(link.parent().unwrap_or(Path::new("")));
        path = without_dots(&directory.join(to).join(behind));
    }
    None
}

/// The first part of a path below a directory of the host that is a symbolic link.
pub fn first_in(directory: &Path, below: &Path) -> Option<PathBuf> {
    let mut part = PathBuf::new();
    below.components().find_map(|name| {
        part.push(name);
        let found = fs_server::reach_name(directory, &part).and_then(|found| found.metadata());
        found.is_ok_and(|found| found.is_symlink()).then(|| part.clone())
    })
}

/// `..` taken back by its text: the names before it are no links.
fn without_dots(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut plain, component| {
        match component {
            Component::ParentDir => _ = plain.pop(),
            Component::CurDir => {}
            other => plain.push(other),
        }
        plain
    })
}

#[cfg(test)]
mod tests {
    use mizzen_core::options::MountFlags;

    use super::*;
    use crate::image::DirectoryTree;
    use crate::image::testing::Scratch;
    use crate::plan::Shape;
    use mizzen_core::options::Tmpfs;

    fn bind(source: PathBuf, target: &str) -> Mount {
        let kind = MountKind::Bind { source, shape: Shape::Directory };
        Mount { kind, target: target.into(), flags: MountFlags::default(), origin: None, why: String::new() }
    }

    #[test]
    fn links_of_the_host_are_followed_from_the_containers_root() {
        let host = Scratch::new();
        for directory in ["people/real/alice", "other"] {
            host.directory(directory);
        }
        for (link, target) in [
            ("people/absolute", "/data/alice"),
            ("people/relative", "real"),
            ("people/upwards", "../../data/./alice"),
            ("people/away", "/other/back"),
            ("other/back", "/people/real"),
            ("people/loop", "loop"),
        ] {
            host.link(link, target);
        }
        let tmpfs =
            Mount { kind: MountKind::Tmpfs(Tmpfs::default()), ..bind(PathBuf::new(), "/people/real/tmp") };
        let wanted = [
            bind(host.path().join("people"), "/people"),
            bind(host.path().join("other"), "/other"),
            bind(PathBuf::from("/nowhere"), "/people/real/alice/x"),
            tmpfs,
        ];
        for (path, expected) in [
            ("/people/real/alice", Some("/people/real/alice")),
            ("/people/absolute", Some("/data/alice")),
            ("/people/absolute/sub", Some("/data/alice/sub")),
            ("/people/relative/alice", Some("/people/real/alice")),
            ("/people/upwards", Some("/data/alice")),
            ("/people/away/alice", Some("/people/real/alice")),
            ("/people/real/tmp/absolute", Some("/people/real/tmp/absolute")),
            ("/elsewhere/absolute", Some("/elsewhere/absolute")),
            ("/people/loop", None),
        ] {
            assert_eq!(destination(Path::new(path), &wanted), expected.map(PathBuf::from), "{path}");
        }
    }

    #[test]
    fn nothing_is_replaced_in_a_container_that_runs() {
        let image = Scratch::new();
        image.file("lib/libcuda.so", "");
        image.link("lib/libother.so", "elsewhere");
        image.link("lib/libsame.so", "libhost.so");
        let tree = DirectoryTree::open(image.path()).unwrap();
        let wanted = ["libcuda.so", "libother.so", "libsame.so", "libnew.so"]
            .map(|name| (Path::new("/lib").join(name), PathBuf::from("libhost.so")));
        let mut notes = Vec::new();
        let mut links = place(&wanted, &[], &tree, &mut notes).unwrap();
        assert_eq!((links.in_image.len(), notes.len()), (3, 0), "that of the same name is there");
        links.leave_files(&tree, &mut notes);
        let left: Vec<&Path> = links.in_image.iter().map(|(_, link)| link.path.as_path()).collect();
        assert_eq!(left, [Path::new("/lib/libnew.so")]);
        let note = |name: &str| {
            format!("the link /lib/{name} is not made: the container that runs has a file there")
        };
        assert_eq!(notes, ["libcuda.so", "libother.so"].map(note));
    }

    #[test]
    fn a_default_that_would_hide_the_image_is_left_out() {
        let host = Scratch::new();
        host.link("system", "/etc");
        host.link("loop", "loop");
        let target = |name: &str| format!("/here/{name}");
        let mut wanted = vec![bind(host.path().to_owned(), "/here")];
        wanted.extend(["system", "loop", "missing"].map(|name| bind(host.path().join(name), &target(name))));
        let mut notes = Vec::new();
        follow(&mut wanted, &mut notes);
        let left: Vec<&Path> = wanted.iter().map(|mount| mount.target.as_path()).collect();
        assert_eq!(left, [Path::new("/here"), Path::new("/here/missing")]);
        assert_eq!(
            notes,
            [
                "/here/system is left out: its symbolic link leads to /etc",
                "/here/loop is left out: its symbolic link leads to itself"
            ]
        );
    }
}
