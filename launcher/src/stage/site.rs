//! Site copies: those that root's own `mizzen stage` has made, for all users of the node, of images that everybody may
//! read. `original` runs as root, on a path that root has typed; `find` as the user on the host.
//!
//! A user reads here and does nothing else. What tells the copy is the identity of the original, which the user has
//! opened: root has written down the same, so both see the same mount.

use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use mizzen_core::failure::cause;
use mizzen_core::fs_server::{self, FsServer, place_of};
use mizzen_core::image::{ImageFormat, cannot_open, probe, refuse_special};
use mizzen_core::mountinfo::{self, MountLine};
use mizzen_core::{Digest, Failure};
use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, getxattr, openat};
use rustix::io::Errno;

use super::StageError;
use super::cache::Cache;
use super::obtain::damage;
use super::progress_sink::ProgressSink;
use super::source::{FileIdentity, SourceImage};
use crate::image::{ImageKind, OpenedImage, identify_opened, shown};
use crate::sys;
use crate::trace::OrDebug;

/// File systems of the kernel's own, whose files have no content that would stay.
const PSEUDO: &str = "proc sysfs cgroup cgroup2 debugfs tracefs securityfs selinuxfs smackfs configfs bpf pstore efivarfs fusectl mqueue nsfs \
     binfmt_misc resctrl rpc_pipefs nfsd devpts";

/// The site's copy of an image that the user has opened, if there is one that can be used.
pub fn find(directory: &Path, source: &SourceImage, sink: &mut dyn ProgressSink) -> Option<(File, Digest)> {
    let cache = match Cache::open_site_read_only(directory) {
        Ok(cache) => cache?,
        Err(failure) => {
            sink.note(&format!("the site's copies are not used: {failure}"));
            return None;
        }
    };
    // What lies on a mount that root cannot have seen was not copied.
    let identity = FileIdentity {
        mount: mount_of(source.file).or_debug("no site copy is looked for")?,
        ..source.identity.clone()
    };
    let digest = cache.digest_of(&identity)?;
    match usable(&cache, digest, source, sink) {
        Ok(file) => Some((file, digest)),
        Err(None) => None,
        Err(Some(why)) => {
            let copy = shown(&cache.copy_path(digest));
            sink.note(&format!("{}: the site's copy {copy} is not used: {why}", shown(source.path)));
            None
        }
    }
}

/// The copy; or why it cannot be used, if it is there at all. No lock is taken: as long as it is open it stays.
fn usable(
    cache: &Cache,
    digest: Digest,
    source: &SourceImage,
    sink: &mut dyn ProgressSink,
) -> Result<File, Option<String>> {
    let file = match cache.open_copy_unchecked(digest) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Err(None),
        Err(errno) => return Err(Some(cause(&errno.into()))),
    };
    let size = source.identity.size;
    let stat = fstat(&file).map_err(|errno| Some(cause(&errno.into())))?;
    if let Some(why) = cache.why_broken(&stat, Some(size)) {
        return Err(Some(format!("it is {why}")));
    }
    match damage(source, &file, digest, sink) {
        Some(why) => Err(Some(format!("it is damaged: {why}"))),
        None => Ok(file),
    }
}

/// What lies at a path that root has typed; None if there is nothing.
pub fn look(path: &Path) -> Result<Option<ImageFormat>, Failure> {
    match walk(path) {
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(cannot_reach(path, errno)),
        Ok(PathAccess::Open(reached)) if reached.metadata().is_ok_and(|found| found.is_dir()) => {
            Ok(Some(ImageFormat::Directory))
        }
        // What it is, and why it is closed, is told when it is opened.
        Ok(_) => Ok(Some(ImageFormat::Squashfs)),
    }
}

/// Opens an image that root is to copy for all users; or tells why it is none to be copied. What lies there is looked at
/// through a descriptor that opens nothing. Only a file that everybody may read is then opened: the path may be a user's, and
/// lead to devices, to what is closed to that user, or to a file system that never answers.
pub fn open(path: &Path) -> Result<OpenedImage, StageError> {
    let failed = |error| StageError::Source(Failure::caused_by(shown(path), error));
    let reached = match walk(path).map_err(|errno| StageError::Source(cannot_reach(path, errno)))? {
        PathAccess::Open(reached) => reached,
        PathAccess::Closed(directory, why) => {
            let message = format!("the directory {} {why}", shown(&directory));
            return Err(closed(&message, 'x', &directory, path.starts_with(&directory)));
        }
        PathAccess::Served => return Err(refused(SERVED)),
    };
    let metadata = reached.metadata().map_err(failed)?;
    refuse_special(path, &metadata).map_err(StageError::Source)?;
    if metadata.is_dir() {
        let (path, kind) = (path.to_owned(), ImageKind::Directory);
        return Ok(OpenedImage { path, file: reached, kind, size: 0, architecture: None });
    }
    mount_of(&reached).map_err(|why| refused(&why))?;
    if let Some(why) = why_closed(&reached, metadata.mode(), 0o044) {
        let real = place_of(&reached);
        return Err(closed(&format!("it {why}"), 'r', &real, real == path));
    }
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file =
        openat(CWD, descriptor_path(&reached), flags, Mode::empty()).map_err(|errno| failed(errno.into()))?;
    let opened = probe(path, file.into()).and_then(|opened| identify_opened(path, opened));
    opened.map_err(StageError::Source)
}

/// Whether the path still leads to the file that was opened.
pub fn is_still_there(opened: &OpenedImage) -> bool {
    let Ok(PathAccess::Open(reached)) = walk(&opened.path) else { return false };
    matches!((FileIdentity::of(&opened.file), FileIdentity::of(&reached)), (Ok(one), Ok(other)) if one == other)
}

/// An image that root copies for all users, and has opened.
pub fn source_image(opened: &OpenedImage, verify: bool) -> Result<SourceImage<'_>, StageError> {
    let mount = mount_of(&opened.file).map_err(|why| refused(&why))?;
    let source = SourceImage::new(opened, verify)?;
    // Who has it open could write to it without leaving a trace in its times (by a page that it has mapped).
    if sys::is_written(&opened.file) {
        let failure = Failure::new("no copy for all users: somebody has it open for writing");
        return Err(StageError::Refused(failure.hint("stage it when it is complete")));
    }
    Ok(SourceImage { identity: FileIdentity { mount, ..source.identity }, ..source })
}

fn refused(why: &str) -> StageError {
    StageError::Refused(Failure::new(format!("no copy for all users: {why}")))
}

fn cannot_reach(path: &Path, errno: Errno) -> Failure {
    cannot_open(path, errno.into())
}

fn descriptor_path(fd: &impl AsRawFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// What is mounted where the file lies, with the boot of the node: type and source of the file system. The number of its
/// device alone may be another's tomorrow. A user who mounts something in a namespace of their own, or through FUSE,
/// chooses all of it: that is no mount to know a file by.
fn mount_of(file: &File) -> Result<String, String> {
    let mount = check_mount(&mount_line(file)?)?;
    let boot = "/proc/sys/kernel/random/boot_id";
    let text = fs::read_to_string(boot).map_err(|error| format!("{boot}: {}", cause(&error)))?;
    Ok(format!("{} {mount}", text.trim()))
}

/// The mount that a file lies on.
fn mount_line(file: &File) -> Result<MountLine, String> {
    let found = mountinfo::mount_id(file)
        .and_then(|id| Ok(mountinfo::read()?.into_iter().find(|line| line.id == id)))
        .map_err(|error| format!("/proc: {}", cause(&error)))?;
    found.ok_or_else(|| "it does not lie on a mount of the node".to_owned())
}

/// Why a file is not read for all users.
const SERVED: &str = "it lies on a file system that a user serves";

fn check_mount(mount: &MountLine) -> Result<String, String> {
    let MountLine { fs_type, source, .. } = mount;
    if PSEUDO.split(' ').any(|pseudo| pseudo == fs_type) {
        return Err(format!("it lies on {fs_type}"));
    }
    if FsServer::of_line(mount).is_users() {
        return Err(SERVED.to_owned());
    }
    Ok(format!("{fs_type} {source} "))
}

/// To open what a link leads to is not advised: the link may be another's.
fn closed(why: &str, right: char, path: &Path, is_direct: bool) -> StageError {
    let path = shown(path);
    let own = "users can stage it for themselves";
    let hint = match why.contains(LISTED) {
        _ if !is_direct => format!("a symbolic link leads to {path}; {own}"),
        true => format!("setfacl -b {path}, if everybody may have the image; {own}"),
        false => format!("chmod go+{right} {path}, if everybody may have the image; {own}"),
    };
    StageError::Refused(Failure::new(format!("no copy for all users: {why}")).hint(hint))
}

/// What is said where an access list decides.
const LISTED: &str = "has an access list";

/// Why somebody may lack these rights of the group and of others. A group without them is shut out even where others
/// are not, and so is whoever an access list names.
fn why_closed(fd: &impl AsRawFd, mode: u32, rights: u32) -> Option<String> {
    let lacks = |class: u32| mode & rights & class != rights & class;
    let shown = mode & 0o7777;
    if lacks(0o007) {
        return Some(format!("is closed to others (mode {shown:04o})"));
    }
    if lacks(0o070) {
        return Some(format!("is closed to its group (mode {shown:04o})"));
    }
    let listed = getxattr(descriptor_path(fd), c"system.posix_acl_access", &mut [0u8; 1]);
    // One that needs more room than that is there.
    (listed.is_ok() || listed == Err(Errno::RANGE)).then(|| LISTED.to_owned())
}

/// Where a path leads.
enum PathAccess {
    /// Through directories that everybody may search, to this, which is not open for anything.
    Open(File),
    /// Through this directory, which is closed to somebody, and why.
    Closed(PathBuf, String),
    /// To a file system that a user's process serves, which may never answer.
    Served,
}

/// Follows an absolute path, to what everybody can reach by it.
fn walk(path: &Path) -> Result<PathAccess, Errno> {
    let walked = fs_server::walk(path, |here, server| {
        // Before anything is asked of it.
        if server.is_users() {
            return Ok(ControlFlow::Break(PathAccess::Served));
        }
        let stat = fstat(here).map_err(|errno| nix::Error::from_raw(errno.raw_os_error()))?;
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        Ok(match is_directory.then(|| why_closed(here, stat.st_mode, 0o011)).flatten() {
            Some(why) => ControlFlow::Break(PathAccess::Closed(place_of(here), why)),
            None => ControlFlow::Continue(()),
        })
    });
    Ok(match walked.map_err(|errno| Errno::from_raw_os_error(errno as i32))? {
        ControlFlow::Break(ended) => ended,
        ControlFlow::Continue(reached) => PathAccess::Open(reached),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::testing::Scratch;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn only_mounts_of_roots_are_known() {
        let mounts = "36 35 98:0 / / rw - ext4 /dev/sda rw\n\
                      40 36 0:51 / /a rw shared:7 - fuse.bindfs /x rw,user_id=0,group_id=0\n\
                      41 36 0:52 / /b rw - fuse.sshfs /x rw,user_id=1000,group_id=0\n\
                      42 36 0:53 / /proc rw - proc proc rw\n";
        let mounts = mountinfo::parse(mounts.as_bytes());
        let check_mount = |id| check_mount(mounts.iter().find(|line| line.id == id).unwrap());
        assert_eq!(check_mount("36"), Ok("ext4 /dev/sda ".to_owned()));
        assert_eq!(check_mount("40"), Ok("fuse.bindfs /x ".to_owned()));
        for (id, why) in [("41", "that a user serves"), ("42", "lies on proc")] {
            assert!(check_mount(id).unwrap_err().contains(why), "{id}");
        }
    }

    #[test]
    fn closed_directories_are_found_behind_links() {
        let scratch = Scratch::new();
        scratch.file("open/image", "x");
        scratch.file("closed/image", "x");
        scratch.directory("between");
        scratch.link("open/to-closed", "../closed/image");
        scratch.link("open/to-image", "image");
        scratch.link("open/loop", "loop");
        let whole = scratch.path().join("open");
        scratch.link("between/absolute", whole.to_str().unwrap());
        scratch.link("through", "between/absolute/image");
        let set = |name: &str, mode| {
            let path = scratch.path().join(name);
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        set("", 0o755);
        set("closed", 0o750);
        let way = |name: &str| walk(&scratch.path().join(name));
        for name in ["open/image", "open/to-image", "through", "between/../open/./image"] {
            let Ok(PathAccess::Open(reached)) = way(name) else { panic!("{name}") };
            assert_eq!(fstat(&reached).unwrap().st_size, 1);
        }
        let Ok(PathAccess::Closed(found, why)) = way("open/to-closed") else { panic!() };
        assert_eq!((found, &*why), (scratch.path().join("closed"), "is closed to others (mode 0750)"));
        set("between", 0o701);
        assert!(
            matches!(way("through"), Ok(PathAccess::Closed(_, why)) if why == "is closed to its group (mode 0701)")
        );
        assert!(matches!(way("open/loop"), Err(Errno::LOOP)));
        assert!(matches!(way("open/nothing"), Err(Errno::NOENT)));
        assert!(matches!(way("open/image/x"), Err(Errno::NOTDIR)));
    }
}
