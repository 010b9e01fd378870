//! Mounts that users and sites ask for.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::failure::quote;
use mizzen_core::image::cannot_open;
use mizzen_core::mount_flags::Create;
use mizzen_core::options::{MountOption, MountSource, Tmpfs};
use mizzen_core::settings::Key;

use super::mount_points::shown;
use crate::host::Host;
use crate::mount::{Mount, MountKind, Shape};
use crate::options::{Origin, RunOptions};

/// What is asked for, in its order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// To mount something.
    Mount(Mount),
    /// To leave out what would be mounted there, and below it.
    Unmount {
        /// Absolute inside.
        target: PathBuf,
        /// Which option or key says so.
        why: String,
    },
    /// Nothing, or not all that was asked for, for this reason.
    LeftOut(String),
}

/// The mounts that options and mizzen.toml ask for.
pub fn asked_mounts(options: &RunOptions, host: &Host) -> Result<Vec<Asked>, Failure> {
    let mut asked = Vec::new();
    for (option, origin) in &options.mounts {
        let why = origin.name_of(Key::Mounts);
        let mut option = expanded(option, host).map_err(|failure| failure.about(&why))?;
        if !option.without_effect.is_empty() {
            let (target, flags) = (shown(&option.target), option.without_effect.join("+"));
            asked.push(Asked::LeftOut(format!(
                "{why}: {target}: {flags} has no effect: no mount in a container gives privileges"
            )));
        }
        if let MountSource::Tmpfs(tmpfs) = &mut option.source {
            check_owner(tmpfs, host, options.settings.remap_root()).map_err(|failure| failure.about(&why))?;
        }
        asked.push(match to_mount(&option, *origin, host) {
            Err(failure) if option.no_fail => {
                Asked::LeftOut(format!("{why}: {}; it is left out (nofail)", failure.message))
            }
            mount => mount.map_err(|failure| failure.about(&why))?,
        });
    }
    Ok(asked)
}

/// The directory of a tmpfs is the user's in any case, and can have any group that there is inside.
fn check_owner(tmpfs: &mut Tmpfs, host: &Host, as_root: bool) -> Result<(), Failure> {
    let is_own = |id: u32, own: u32| id == own || (as_root && id == 0);
    if let Some(uid) = tmpfs.uid.take().filter(|uid| !is_own(*uid, host.uid)) {
        return Err(Failure::new(format!("uid={uid} is not you")).hint("leave it out: a tmpfs is yours"));
    }
    let Some(gid) = tmpfs.gid.take_if(|gid| !is_own(*gid, host.gid)) else {
        tmpfs.gid = None;
        return Ok(());
    };
    if host.mapped_groups.iter().any(|(group, _)| *group == gid) {
        tmpfs.gid = Some(gid);
        return Ok(());
    }
    Err(Failure::new(format!("gid={gid} is no group of yours that there is inside"))
        .hint("leave it out, for your primary group, or name another of those that `id -G` shows inside"))
}

fn to_mount(option: &MountOption, origin: Origin, host: &Host) -> Result<Asked, Failure> {
    let absolute = |path: &Path| host.cwd.as_deref().unwrap_or(Path::new("/")).join(path);
    let existing = |given: &Path| {
        let path = absolute(given);
        let hint = if given.is_absolute() {
            "the source is a path of the node: it must exist on this node, and you must be able to see it"
        } else {
            "a relative source starts at the current directory; flags are joined by +, mounts by commas"
        };
        match path.metadata() {
            Ok(found) => Ok((path, found)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Err(Failure::new(format!("source path does not exist: {}", shown(&path))).hint(hint))
            }
            Err(error) => Err(cannot_open(&path, error).or_hint(hint)),
        }
    };
    let why = origin.name_of(Key::Mounts);
    let (kind, target) = match &option.source {
        MountSource::Umount => return Ok(Asked::Unmount { target: option.target.clone(), why }),
        MountSource::Tmpfs(tmpfs) => (MountKind::Tmpfs(tmpfs.clone()), option.target.clone()),
        MountSource::Bind(source) => {
            let (source, found) = existing(source)?;
            let shape = if found.is_dir() { Shape::Directory } else { Shape::File };
            check_created(option.create, shape, &source)?;
            (MountKind::Bind { source, shape }, absolute(&option.target))
        }
        MountSource::Squashfs(source) => {
            let (path, found) = existing(source)?;
            if !found.is_file() {
                return Err(Failure::new(format!("{}: not a file", shown(&path)))
                    .hint("the flag squashfs mounts the content of a squashfs file"));
            }
            (MountKind::Squashfs(path), option.target.clone())
        }
    };
    Ok(Asked::Mount(Mount { kind, target, flags: option.flags, origin: Some(origin), why }))
}

/// A mount point is always made as the source needs it; who says what it is to be may have meant another source.
fn check_created(create: Option<Create>, shape: Shape, source: &Path) -> Result<(), Failure> {
    let (flag, is) = match (create, shape) {
        (Some(Create::File), Shape::Directory) => ("x-create=file", "a directory"),
        (Some(Create::Directory), Shape::File) => ("x-create=dir", "a file"),
        _ => return Ok(()),
    };
    Err(Failure::new(format!("{}: {flag}, but it is {is}", shown(source)))
        .hint("leave the flag out: mount points are made as the source is"))
}

/// The option with %u, %j and %% replaced in its paths, as Slurm replaces them in the names of files.
fn expanded(option: &MountOption, host: &Host) -> Result<MountOption, Failure> {
    let expand = |path: &Path| expand(path, host);
    let source = match &option.source {
        MountSource::Bind(path) => MountSource::Bind(expand(path)?),
        MountSource::Squashfs(path) => MountSource::Squashfs(expand(path)?),
        MountSource::Tmpfs(_) | MountSource::Umount => option.source.clone(),
    };
    Ok(MountOption { source, target: expand(&option.target)?, ..option.clone() })
}

fn expand(path: &Path, host: &Host) -> Result<PathBuf, Failure> {
    let mut text = Vec::new();
    let mut bytes = path.as_os_str().as_bytes().iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        match bytes.peek().filter(|_| byte == b'%') {
            Some(b'%') => text.push(b'%'),
            Some(b'u') => text.extend(host.user.bytes()),
            Some(b'j') => {
                let job = host.environment.iter().find(|(name, _)| name == "SLURM_JOB_ID");
                let (_, job) = job.ok_or_else(|| {
                    let path = quote(path.as_os_str().as_bytes());
                    Failure::new(format!("{path}: %j outside a job")).hint("%j is the number of a Slurm job")
                })?;
                text.extend(job.as_bytes());
            }
            _ => {
                text.push(byte);
                continue;
            }
        }
        bytes.next();
    }
    Ok(PathBuf::from(OsString::from_vec(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tmpfs_belongs_to_who_asks_for_it() {
        let host = Host {
            uid: 2001,
            gid: 2001,
            mapped_groups: vec![(2100, "project".to_owned())],
            ..Host::for_tests()
        };
        let checked = |uid, gid, as_root| {
            let mut tmpfs = Tmpfs { uid, gid, ..Tmpfs::default() };
            check_owner(&mut tmpfs, &host, as_root).map(|()| tmpfs.gid).map_err(|failure| failure.message)
        };
        assert_eq!(checked(None, None, false), Ok(None));
        assert_eq!(checked(Some(2001), Some(2001), false), Ok(None));
        assert_eq!(checked(Some(0), Some(0), true), Ok(None));
        assert_eq!(checked(Some(2001), Some(2100), true), Ok(Some(2100)));
        assert_eq!(checked(Some(0), None, false), Err("uid=0 is not you".to_owned()));
        let message = "gid=7 is no group of yours that there is inside";
        assert_eq!(checked(None, Some(7), true), Err(message.to_owned()));
    }

    #[test]
    fn names_of_user_and_job_are_put_in() {
        let outside = Host { user: "alice".to_owned(), environment: Vec::new(), ..Host::for_tests() };
        let job = Host { environment: vec![("SLURM_JOB_ID".into(), "7".into())], ..outside.clone() };
        for (path, expected) in [
            ("/scratch/%u/%j", "/scratch/alice/7"),
            ("/a%%u%", "/a%u%"),
            ("/%d/100%", "/%d/100%"),
            ("/plain", "/plain"),
        ] {
            assert_eq!(expand(Path::new(path), &job), Ok(expected.into()));
        }
        let failure = expand(Path::new("/x/%j"), &outside).unwrap_err();
        assert_eq!(failure.message, "/x/%j: %j outside a job");
    }
}
