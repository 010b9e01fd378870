//! Arguments of the program that name what is on the node, and not in the container: `python ../train.py` where only the current
//! directory is mounted. The program will only say that a file does not exist, although its user sees it. Runs as the user, on the
//! host, while the plan is made.
//!
//! A start must not wait for a file system that it does not need, and ask none that another user serves. So a path is looked at
//! part by part, and only where the kernel has the answer itself or the container needs the file system as well.

use std::ffi::{OsStr, OsString};
use std::fs::{self, FileType};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use mizzen_core::failure::quote;
use mizzen_core::fs_server::FsServer;
use mizzen_core::mountinfo::{self, MountLine};
use mizzen_core::settings::Key;

use crate::host::Host;
use crate::image::{Tree, resolve};
use crate::mount::{Mount, MountKind};
use crate::options::RunOptions;
use crate::sandbox::ARGUMENTS_LOOKED_AT;
use crate::trace::OrDebug;

/// Names at the root that an image has its own of: whoever names something there means the image's.
const IMAGES_OWN: [&str; 14] = [
    "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "sys", "usr",
    "var",
];
/// File systems of the kernel's that wait for no other machine.
const LOCAL: [&str; 10] =
    ["bcachefs", "btrfs", "erofs", "ext2", "ext3", "ext4", "overlay", "squashfs", "tmpfs", "xfs"];
/// Links that are followed.
const LINKS: usize = 8;

/// What to tell about the first such argument.
pub fn left_on_host(
    options: &RunOptions,
    tree: &dyn Tree,
    host: &Host,
    mounts: &[Mount],
    workdir: &Path,
) -> Option<String> {
    let cwd = host.cwd.as_deref()?;
    let left_out = host.home.as_deref().filter(|_| !options.settings.mount_home());
    let arguments = options.command.iter().skip(1).take(ARGUMENTS_LOOKED_AT);
    let named = arguments.filter_map(|argument| path_in(argument)).filter_map(|path| {
        let (outside, inside) = (lexical(&cwd.join(path)), lexical(&workdir.join(path)));
        let is_mounted = |path: &Path| {
            mounts.iter().any(|mount| path.starts_with(&mount.target) || mount.target.starts_with(path))
        };
        let is_images = outside.iter().nth(1).is_none_or(|top| IMAGES_OWN.iter().any(|name| *name == top));
        // Who leaves the home out knows.
        let is_meant = !is_images && !left_out.is_some_and(|home| outside.starts_with(home));
        (is_meant && !is_mounted(&outside) && !is_mounted(&inside)).then_some((outside, inside))
    });
    let mut node: Option<Node> = None;
    for (outside, inside) in named {
        let node = match &node {
            Some(node) => node,
            None => node.insert(Node::new(cwd, mounts)?),
        };
        let Some(found) = node.look(&outside) else { continue };
        let is_inside = |path: &Path| resolve(tree, path).map_or(true, |resolved| resolved.entry.is_some());
        if !is_inside(&outside) && !is_inside(&inside) {
            return Some(note(&outside, found, &options.user().name_of(Key::Mounts)));
        }
    }
    None
}

fn note(path: &Path, found: FileType, option: &str) -> String {
    let shown = quote(path.as_os_str().as_bytes());
    let missing = format!("{shown} is on the node, but not in the container");
    let directory = match path.parent() {
        Some(parent) if !found.is_dir() && parent != Path::new("/") => parent,
        _ => path,
    };
    // What a shell or the option would read otherwise is not written here.
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"/._-+@".contains(byte);
    match directory.as_os_str().as_bytes().iter().all(is_plain) {
        true => format!("{missing}: mount it with {option}={}", directory.display()),
        false => missing,
    }
}

/// A path with a slash: the argument, or what is behind its equals sign.
fn path_in(argument: &OsStr) -> Option<&Path> {
    let bytes = argument.as_bytes();
    let text = match bytes.first()? {
        // `--in=../data`
        b'-' => bytes.splitn(2, |byte| *byte == b'=').nth(1)?,
        _ => bytes,
    };
    text.contains(&b'/').then(|| Path::new(OsStr::from_bytes(text)))
}

/// An absolute path without `.` and `..`: links are not followed.
fn lexical(path: &Path) -> PathBuf {
    let mut plain = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::Normal(name) => plain.push(name),
            Component::ParentDir => drop(plain.pop()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    plain
}

/// The node's mounts, and those of them that the container needs.
struct Node {
    lines: Vec<MountLine>,
    needed: Vec<String>,
}

impl Node {
    fn new(cwd: &Path, mounts: &[Mount]) -> Option<Node> {
        let lines = mountinfo::read().or_debug("no argument is looked for on the node")?;
        Some(Node::with(lines, cwd, mounts))
    }

    fn with(lines: Vec<MountLine>, cwd: &Path, mounts: &[Mount]) -> Node {
        let mut node = Node { lines, needed: Vec::new() };
        let sources = mounts.iter().filter_map(|mount| match &mount.kind {
            MountKind::Bind { source, .. } => Some(source.as_path()),
            _ => None,
        });
        let lines = sources.chain([cwd, Path::new("/")]).filter_map(|path| node.line(path));
        node.needed = lines.map(|line| line.id.clone()).collect();
        node
    }

    /// The mount that a path without links is on: the deepest, and of those at one place the last.
    fn line(&self, path: &Path) -> Option<&MountLine> {
        let over = self.lines.iter().filter(|line| path.starts_with(&line.place));
        over.max_by_key(|line| line.place.components().count())
    }

    fn may_be_asked(&self, path: &Path) -> bool {
        self.line(path).is_some_and(|line| {
            !FsServer::of_line(line).is_foreign()
                && (LOCAL.contains(&line.fs_type.as_str()) || self.needed.contains(&line.id))
        })
    }

    /// What is there; none if nothing is, or if it is not to be asked for.
    fn look(&self, path: &Path) -> Option<FileType> {
        let mut rest: Vec<OsString> = names(path);
        let (mut here, mut links) = (PathBuf::from("/"), 0);
        let mut found = None;
        while let Some(name) = rest.pop() {
            here.push(name);
            if !self.may_be_asked(&here) {
                return None;
            }
            let kind = here.symlink_metadata().ok()?.file_type();
            if kind.is_symlink() {
                links += 1;
                let target = fs::read_link(&here).ok().filter(|_| links <= LINKS)?;
                here.pop();
                rest.extend(names(&lexical(&here.join(target))));
                here = PathBuf::from("/");
            }
            found = Some(kind);
        }
        found
    }
}

/// The components of an absolute path, the last one first.
fn names(path: &Path) -> Vec<OsString> {
    path.iter().skip(1).map(OsStr::to_owned).collect::<Vec<_>>().into_iter().rev().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::testing::Scratch;

    #[test]
    fn arguments_name_paths() {
        let named = |argument: &str| path_in(OsStr::new(argument)).map(|path| path.display().to_string());
        for (argument, path) in [
            ("../train.py", Some("../train.py")),
            ("--in=../data", Some("../data")),
            ("a=b/c", Some("a=b/c")),
            ("train.py", None),
            ("-c", None),
            ("-I/opt/x", None),
            ("--in=data", None),
            ("", None),
        ] {
            assert_eq!(named(argument).as_deref(), path, "{argument}");
        }
        assert_eq!(lexical(Path::new("/scratch/p/run1/../train.py")), Path::new("/scratch/p/train.py"));
        assert_eq!(lexical(Path::new("/a/./../../b/")), Path::new("/b"));
    }

    #[test]
    fn a_note_says_how_to_mount_it() {
        let scratch = Scratch::new();
        scratch.file("file", "");
        let kind = |path: &Path| path.symlink_metadata().unwrap().file_type();
        let (directory, file) = (kind(scratch.path()), kind(&scratch.path().join("file")));
        let said = |path: &str, found| note(Path::new(path), found, "--mount");
        assert_eq!(
            said("/scratch/p/train.py", file),
            "/scratch/p/train.py is on the node, but not in the container: mount it with --mount=/scratch/p"
        );
        assert_eq!(
            said("/data", directory),
            "/data is on the node, but not in the container: mount it with --mount=/data"
        );
        assert_eq!(
            said("/file", file),
            "/file is on the node, but not in the container: mount it with --mount=/file"
        );
        assert_eq!(said("/a b/c", file), "/a b/c is on the node, but not in the container");
    }

    #[test]
    fn only_what_answers_is_asked() {
        let scratch = Scratch::new();
        scratch.file("local/file", "");
        scratch.file("nfs/run/file", "");
        scratch.file("other/file", "");
        scratch.file("fuse/file", "");
        scratch.link("link", "local/../local");
        scratch.link("loop", "loop");
        scratch.link("away", scratch.path().join("other").to_str().unwrap());
        let top = scratch.path().canonicalize().unwrap();
        let at = |name: &str, kind: &str, id: u32, options: &str| {
            format!("{id} 1 0:{id} / {}/{name} rw - {kind} x rw{options}\n", top.display())
        };
        let table = [
            "1 0 8:1 / / rw - nfs x rw\n".to_owned(),
            at("nfs", "nfs4", 2, ""),
            at("other", "nfs4", 3, ""),
            at("fuse", "fuse.x", 4, ",user_id=4000000"),
            at("auto", "autofs", 5, ""),
        ];
        let lines = mountinfo::parse(table.concat().as_bytes());
        let node = Node::with(lines, &top.join("nfs/run"), &[]);
        let there = |name: &str| node.look(&top.join(name)).is_some();
        // The root is needed in any case, and so is what the current directory lies on.
        for name in ["local/file", "nfs/run/file", "link/file", "local"] {
            assert!(there(name), "{name}");
        }
        for name in ["local/none", "other/file", "other", "away/file", "fuse/file", "auto/x", "loop"] {
            assert!(!there(name), "{name}");
        }
        assert!(node.look(&top.join("link")).is_some_and(|found| found.is_dir()));
    }
}
