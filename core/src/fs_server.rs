//! Who serves the file system that a file lies on. With FUSE any user's process can, and what it says of its files is what it
//! likes: whose they are, who can write to them, what is in them. Or it never answers, and whoever asks it waits.
//!
//! So the kernel is asked, by descriptors that open nothing, before anything is asked of the file system. Runs as the user, in srun,
//! in the launcher and in the importer; as root in root's own `mizzen stage` alone.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat, readlinkat};
use nix::sys::stat::{Mode, makedev};
use nix::sys::statfs::fstatfs;
use nix::unistd::geteuid;

use crate::Failure;
use crate::failure::quote;
use crate::mountinfo::{self, MountLine, mount_id, open_on_same_mount};

/// The kernel's limit.
const LINKS: u32 = 40;

/// What the kernel calls a file system that a process serves.
const FUSE: u32 = 0x6573_5546;

/// Who answers for what a file system says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FsServer {
    /// The kernel, or a process of root's.
    Root,
    /// A process of this user.
    User(u32),
    /// Nobody knows: it is mounted where this process sees no mounts, as in another mount namespace.
    Unknown,
}

impl FsServer {
    /// Of the file system that an open file lies on.
    pub fn of(file: impl AsFd) -> FsServer {
        FsServer::ask(&file).unwrap_or(FsServer::Unknown)
    }

    /// The same; fails where this process has reached a limit.
    fn ask(file: &impl AsFd) -> Result<FsServer, Errno> {
        let asked = match mount_id(file) {
            // Without procfs nobody tells more than the kind of a file system.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(FsServer::of_kind(file)),
            id => known(id.and_then(|id| FsServer::of_mount(&id)))?,
        };
        Ok(asked.unwrap_or(FsServer::Unknown))
    }

    fn of_kind(file: &impl AsFd) -> FsServer {
        match fstatfs(file) {
            // The type differs between C libraries.
            #[allow(clippy::unnecessary_cast)]
            Ok(found) if found.filesystem_type().0 as u32 != FUSE => FsServer::Root,
            _ => FsServer::Unknown,
        }
    }

    fn of_mount(id: &str) -> io::Result<FsServer> {
        match mountinfo::read()?.iter().find(|line| line.id == id) {
            Some(line) => Ok(FsServer::of_line(line)),
            // A chroot to a directory does not see the mount that it is on. Nobody else has put this process there.
            None if mount_id(File::open("/")?)? == id => Ok(FsServer::Root),
            None => Ok(FsServer::Unknown),
        }
    }

    /// Of what is mounted there.
    pub fn of_line(mount: &MountLine) -> FsServer {
        let (kind, _) = mount.fs_type.split_once('.').unwrap_or((&mount.fs_type, ""));
        if !["fuse", "fuseblk"].contains(&kind) {
            return FsServer::Root;
        }
        let user = mount.super_options.split(',').find_map(|option| option.strip_prefix("user_id="));
        match user.and_then(|user| user.parse().ok()) {
            Some(0) => FsServer::Root,
            Some(uid) => FsServer::User(uid),
            None => FsServer::Unknown,
        }
    }

    /// Whether it is neither root nor the user who runs this.
    pub fn is_foreign(self) -> bool {
        match self {
            FsServer::Root => false,
            FsServer::User(uid) => uid != geteuid().as_raw(),
            FsServer::Unknown => true,
        }
    }

    /// Whether it is a user's, be it of the one who runs this.
    pub fn is_users(self) -> bool {
        self != FsServer::Root
    }
}

/// A part of a path at which a file system begins that is not believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedPart {
    /// Where it is, without links.
    pub place: PathBuf,
    /// Who serves it.
    pub server: FsServer,
    /// The device of its files, if it is mounted here.
    pub device: Option<u64>,
}

impl ServedPart {
    pub(crate) fn new(here: &File, server: FsServer) -> ServedPart {
        let device = || {
            let id = mount_id(here).ok()?;
            let line = mountinfo::read().ok()?.into_iter().find(|line| line.id == id)?;
            let (major, minor) = line.device.split_once(':')?;
            Some(makedev(major.parse().ok()?, minor.parse().ok()?))
        };
        ServedPart { place: place_of(here), server, device: device() }
    }

    /// What is said of it.
    pub fn describe(&self) -> String {
        let place = quote(self.place.as_os_str().as_bytes());
        match self.server {
            FsServer::User(uid) => format!("{place} lies on a file system that uid {uid} serves"),
            FsServer::Root | FsServer::Unknown => {
                format!("{place} lies on a mount of which this process sees nothing")
            }
        }
    }
}

/// The first part of a path, link by link, that lies on a file system which is not believed. None has been asked anything.
pub fn find_served(path: &Path, is_refused: impl Fn(FsServer) -> bool) -> io::Result<Option<ServedPart>> {
    let walked = walk(path, |here, server| {
        Ok(match is_refused(server) {
            true => ControlFlow::Break(ServedPart::new(here, server)),
            false => ControlFlow::Continue(()),
        })
    });
    Ok(walked?.break_value())
}

/// Refuses a path, of which the end need not be there, that leads to a file system which another user serves. What else is
/// wrong with it is found by those who open it.
pub fn refuse_foreign(path: &Path) -> Result<(), Failure> {
    match find_served(path, FsServer::is_foreign) {
        Ok(Some(part)) => Err(not_safe(path, &part)),
        Ok(None) | Err(_) => Ok(()),
    }
}

/// How far a path leads. A file system that is not believed has been asked nothing, and is not entered.
pub struct Look {
    /// What is at its end, opened for looking at it; or why that was not reached. EXDEV: there is another's file system on the way.
    pub end: Result<File, Errno>,
    /// The last directory on the way: the end, or what it is in, or that in which the next name is missing.
    pub directory: Option<File>,
    /// The links on the way, and whose they are.
    pub links: Vec<(PathBuf, u32)>,
    /// The part at which such a file system begins.
    pub served: Option<ServedPart>,
}

/// Looks where a path leads, and asks nothing of a file system that is refused.
pub fn look_unless(path: &Path, is_refused: impl Fn(FsServer) -> bool) -> Look {
    let mut look = Look { end: Err(Errno::EXDEV), directory: None, links: Vec::new(), served: None };
    let mut last: Option<File> = None;
    let walked = walk_with_links(path, |here, seen| {
        let copy = || here.try_clone().map_err(errno_of);
        match seen {
            Seen::Part(server) if is_refused(server) => {
                return Ok(ControlFlow::Break(ServedPart::new(here, server)));
            }
            // What something has been looked for in is a directory.
            Seen::Part(_) => look.directory = last.replace(copy()?).or(look.directory.take()),
            Seen::Link => {
                let owner = here.metadata().map_err(errno_of)?.uid();
                look.links.push((place_of(here), owner));
            }
        }
        Ok(ControlFlow::Continue(()))
    });
    if let Some(last) = last.filter(|last| last.metadata().is_ok_and(|found| found.is_dir())) {
        look.directory = Some(last);
    }
    match walked {
        Ok(ControlFlow::Break(part)) => look.served = Some(part),
        Ok(ControlFlow::Continue(file)) => look.end = Ok(file),
        Err(errno) => look.end = Err(errno),
    }
    look
}

/// The same, where nobody but root and the user is believed; but for whoever serves the current directory: who is in such a file
/// system means it.
pub fn look(path: &Path) -> Look {
    look_from(Path::new("."), path)
}

/// The same from another directory, whose server is believed instead.
pub fn look_from(directory: &Path, path: &Path) -> Look {
    let here = || openat(AT_FDCWD, directory, looking(), Mode::empty()).map(FsServer::of).ok();
    look_unless(&directory.join(path), |server| server.is_foreign() && here() != Some(server))
}

/// What a path leads to, opened for looking at it. In a directory where everybody can make names, another user may have mounted a
/// file system of their own on one, whose server answers what it likes, or never. Nothing has been asked of it when this returns
/// EXDEV.
pub fn reach(path: &Path) -> io::Result<File> {
    Ok(look(path).end?)
}

/// The same from another directory; a link at the end is not followed.
pub fn reach_name(directory: &Path, path: &Path) -> io::Result<File> {
    let whole = || Ok(look_from(directory, path).end?);
    let (Some(name), Some(parent)) = (path.file_name(), path.parent()) else { return whole() };
    let found = look_from(directory, parent).end?;
    match open_on_same_mount(found.as_fd(), name) {
        // Root may have mounted something there, or the user.
        Err(error) if error.raw_os_error() == Some(libc::EXDEV) => whole(),
        opened => opened.map(File::from),
    }
}

/// Whether there is something at the end of a path, be it a link that leads nowhere. What another user serves is not.
pub fn is_there(path: &Path) -> bool {
    reach_name(Path::new("."), path).is_ok()
}

/// Whether a path leads to a directory; to none that another user serves.
pub fn is_directory(path: &Path) -> bool {
    reach(path).and_then(|found| found.metadata()).is_ok_and(|found| found.is_dir())
}

fn errno_of(error: io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO))
}

/// Why a path is none to look at.
pub fn not_safe(path: &Path, part: &ServedPart) -> Failure {
    let path = quote(path.as_os_str().as_bytes());
    Failure::new(format!("{path} is not safe from other users: {}", part.describe())).hint(
        "whoever serves a file system (FUSE) decides what is in it; use another directory, or ask an administrator to remove it",
    )
}

/// A path that leads to an open file, whatever has its name by now.
pub fn proc_path(file: &impl AsRawFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// The path of a descriptor, which nobody but the kernel is asked for.
pub fn place_of(file: &impl AsRawFd) -> PathBuf {
    fs::read_link(proc_path(file)).unwrap_or_default()
}

/// Follows a path by hand, component by component and link by link, so that what is looked at is what is gone through: whoever
/// changes a link meanwhile sends us another way, which is looked at as well. `visit` sees everything but links, before
/// anything is asked of it, and may end the walk. Links are text here, also those in /proc: none leads into another mount
/// namespace.
pub fn walk<T>(
    path: &Path,
    mut visit: impl FnMut(&File, FsServer) -> Result<ControlFlow<T>, Errno>,
) -> Result<ControlFlow<T, File>, Errno> {
    walk_with_links(path, |here, seen| match seen {
        Seen::Part(server) => visit(here, server),
        Seen::Link => Ok(ControlFlow::Continue(())),
    })
}

/// What is passed on a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// A directory, or the end of the path, on such a file system.
    Part(FsServer),
    /// A symbolic link in the directory before it, on the same file system. It has been read, and is followed next.
    Link,
}

/// The same; `visit` sees links too.
pub fn walk_with_links<T>(
    path: &Path,
    mut visit: impl FnMut(&File, Seen) -> Result<ControlFlow<T>, Errno>,
) -> Result<ControlFlow<T, File>, Errno> {
    let start = |path: &Path| Step::start(if path.is_absolute() { "/" } else { "." });
    let (mut here, mut names, mut links) = (start(path)?, names_of(path), 0);
    loop {
        if let ControlFlow::Break(found) = visit(&here.file, Seen::Part(here.server))? {
            return Ok(ControlFlow::Break(found));
        }
        let Some(name) = names.pop() else { return Ok(ControlFlow::Continue(here.file)) };
        let (link, target) = match here.enter(&name)? {
            Entered::Other(next) => {
                here = next;
                continue;
            }
            Entered::Link(link, target) => (link, target),
        };
        if let ControlFlow::Break(found) = visit(&link, Seen::Link)? {
            return Ok(ControlFlow::Break(found));
        }
        links += 1;
        if links > LINKS {
            return Err(Errno::ELOOP);
        }
        if target.is_absolute() {
            here = start(&target)?;
        }
        names.extend(names_of(&target));
    }
}

/// Where a walk is. As long as the file is held, its mount's number is no other's.
struct Step {
    file: File,
    mount: Option<String>,
    server: FsServer,
}

enum Entered {
    Link(File, PathBuf),
    Other(Step),
}

impl Step {
    fn start(path: &str) -> Result<Step, Errno> {
        let file = File::from(openat(AT_FDCWD, path, looking(), Mode::empty())?);
        Ok(Step { server: FsServer::ask(&file)?, mount: known(mount_id(&file))?, file })
    }

    /// What has this name in this directory.
    fn enter(&self, name: &OsStr) -> Result<Entered, Errno> {
        // As a directory first: only so what an automounter has for it is mounted.
        let open = |flags| openat(&self.file, name, flags, Mode::empty()).map(File::from);
        let (file, is_directory) = match open(looking() | OFlag::O_DIRECTORY) {
            Err(Errno::ENOTDIR | Errno::ELOOP) => (open(looking())?, false),
            opened => (opened?, true),
        };
        let mount = known(mount_id(&file))?;
        let is_same_mount = mount == self.mount;
        // The mounts are read anew where another one begins.
        let server = match is_same_mount && mount.is_some() {
            true => self.server,
            false => FsServer::ask(&file)?,
        };
        // On a link nothing can be mounted.
        if !is_directory && is_same_mount {
            match readlinkat(&file, "") {
                Ok(target) => return Ok(Entered::Link(file, PathBuf::from(target))),
                Err(Errno::ENOENT | Errno::EINVAL) => {} // no link
                Err(errno) => return Err(errno),
            }
        }
        Ok(Entered::Other(Step { file, mount, server }))
    }
}

/// None if /proc does not tell. That a limit of this process has been reached is its failure.
fn known<T>(asked: io::Result<T>) -> Result<Option<T>, Errno> {
    match asked {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if is_limit(&error) => Err(Errno::from_raw(error.raw_os_error().unwrap_or(0))),
        Err(_) => Ok(None),
    }
}

/// Whether it is this process that has reached a limit.
pub(crate) fn is_limit(error: &io::Error) -> bool {
    [libc::EMFILE, libc::ENFILE, libc::ENOMEM].map(Some).contains(&error.raw_os_error())
}

/// Opens nothing, follows nothing.
fn looking() -> OFlag {
    OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC
}

/// The components of a path, the last one first.
fn names_of(path: &Path) -> Vec<OsString> {
    let name = |component: Component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some(OsString::from("..")),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    };
    path.components().rev().filter_map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_serve_what_the_kernel_says() {
        let mounts = "36 35 98:0 / / rw - ext4 /dev/sda rw\n\
                      40 36 0:51 / /a rw shared:7 - fuse.bindfs user_id=9 rw,user_id=0,group_id=0\n\
                      41 36 0:52 / /b rw - fuse.sshfs /x rw,user_id=1000,group_id=0\n\
                      42 36 0:53 / /c rw - fuse /x rw,user_id=4294967294,group_id=0,allow_other\n\
                      43 36 0:54 / /d rw - fuse.x /x rw\n\
                      44 36 0:55 / /sys/fs/fuse/connections rw - fusectl fusectl rw\n\
                      45 36 8:1 / /e rw - fuseblk.ntfs /dev/sdb rw,user_id=1000\n\
                      46 36 0:56 / /f rw - virtiofs tag rw\n";
        let servers: Vec<FsServer> =
            mountinfo::parse(mounts.as_bytes()).iter().map(FsServer::of_line).collect();
        let user = FsServer::User;
        let (root, unknown) = (FsServer::Root, FsServer::Unknown);
        assert_eq!(servers, [root, root, user(1000), user(4_294_967_294), unknown, root, user(1000), root]);
        assert!(!root.is_foreign() && !user(geteuid().as_raw()).is_foreign());
        assert!(unknown.is_foreign() && user(geteuid().as_raw() + 1).is_foreign());
        assert!(user(geteuid().as_raw()).is_users() && unknown.is_users() && !root.is_users());
    }

    #[test]
    fn every_part_of_a_path_is_seen_before_the_next() {
        let top = std::env::temp_dir().join(format!("mizzen-walk-{}", std::process::id()));
        fs::create_dir_all(top.join("a/b")).unwrap();
        fs::write(top.join("a/b/file"), "x").unwrap();
        let link = |target: &str, name: &str| std::os::unix::fs::symlink(target, top.join(name)).unwrap();
        link("a/b/../b", "relative");
        link("loop", "loop");
        link(top.join("a").to_str().unwrap(), "a/absolute");
        let real = top.canonicalize().unwrap();
        let seen = |path: &Path| {
            let mut places = Vec::new();
            let reached = walk(path, |here, server| {
                assert_eq!(server, FsServer::Root);
                places.push(place_of(here));
                Ok(ControlFlow::<()>::Continue(()))
            });
            reached.map(|reached| (places, reached.continue_value().unwrap()))
        };
        let names = |path: &Path| -> Vec<String> {
            let (places, _) = seen(path).unwrap();
            let below = places.iter().filter_map(|place| place.strip_prefix(&real).ok());
            below.map(|place| place.display().to_string()).collect()
        };
        assert_eq!(names(&top.join("relative/file")), ["", "", "a", "a/b", "a", "a/b", "a/b/file"]);
        assert_eq!(names(&top.join("a/absolute/b")), ["", "a", "", "a", "a/b"]);
        let (_, file) = seen(&top.join("a/b/file")).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 1);
        assert_eq!(place_of(&seen(Path::new(".")).unwrap().1), std::env::current_dir().unwrap());
        for (name, errno) in
            [("loop", Errno::ELOOP), ("nothing", Errno::ENOENT), ("a/b/file/x", Errno::ENOTDIR)]
        {
            assert_eq!(seen(&top.join(name)).unwrap_err(), errno, "{name}");
        }
        let stopped = find_served(&top.join("a/b/c"), |_| true).unwrap().unwrap();
        assert_eq!((stopped.place, stopped.server), (PathBuf::from("/"), FsServer::Root));
        assert_eq!(refuse_foreign(&top.join("a/missing")), Ok(()));
        fs::remove_dir_all(top).unwrap();
    }

    #[test]
    fn it_is_known_how_far_a_path_leads() {
        let top = std::env::temp_dir().join(format!("mizzen-look-{}", std::process::id()));
        fs::create_dir_all(top.join("a/b")).unwrap();
        fs::write(top.join("a/file"), "x").unwrap();
        let link = |target: &str, name: &str| std::os::unix::fs::symlink(target, top.join(name)).unwrap();
        link("a/b", "link");
        link("a/missing", "dangling");
        let real = top.canonicalize().unwrap();
        let relative = |path: PathBuf| path.strip_prefix(&real).map(|path| path.display().to_string());
        let seen = |name: &str| {
            let look = look(&top.join(name));
            let directory = relative(place_of(&look.directory.unwrap())).unwrap();
            let links = look.links.into_iter().filter_map(|(place, _)| relative(place).ok());
            (look.end.err(), directory, links.collect::<Vec<_>>().join(" "))
        };
        for (name, errno, directory, links) in [
            ("a/b", None, "a/b", ""),
            ("a/file", None, "a", ""),
            ("link", None, "a/b", "link"),
            ("link/x/y", Some(Errno::ENOENT), "a/b", "link"),
            ("dangling/x", Some(Errno::ENOENT), "a", "dangling"),
            ("a/file/x", Some(Errno::ENOTDIR), "a", ""),
            ("x", Some(Errno::ENOENT), "", ""),
        ] {
            assert_eq!(seen(name), (errno, directory.to_owned(), links.to_owned()), "{name}");
        }
        assert!(is_there(&top.join("dangling")) && !is_there(&top.join("a/missing")));
        assert!(is_directory(&top.join("link")) && !is_directory(&top.join("a/file")));
        let refused = look_unless(&top.join("a"), |_| true);
        assert_eq!(refused.end.err(), Some(Errno::EXDEV));
        assert!(refused.served.is_some() && refused.directory.is_none());
        fs::remove_dir_all(top).unwrap();
    }

    #[test]
    fn a_mount_that_is_not_listed_is_not_believed() {
        // The kernel's own, which no process sees mounted.
        let (pipe, _) = io::pipe().unwrap();
        assert_eq!(FsServer::of(pipe), FsServer::Unknown);
        let status = File::open("/proc/self/status").unwrap();
        assert_eq!(FsServer::of(&status), FsServer::Root);
        let device = MetadataExt::dev(&status.metadata().unwrap());
        assert_eq!(ServedPart::new(&status, FsServer::Root).device, Some(device));
    }
}
