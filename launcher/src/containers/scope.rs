//! The directory of the containers of a job, or of a user. Runs as the user on the host.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use rustix::fs::{Dir, Mode, mkdirat};
use rustix::io::Errno;

use super::waiting::Wait;
use super::{lock_file, lock_holder};
use crate::image::shown;
use crate::options::Scope;
use crate::remove_tree::open_directory;
use crate::stage::own_directory;

/// In the user's own directory.
const CONTAINERS: &str = "containers";
/// Of containers that are nobody's in particular.
const GLOBAL: &str = "global";
/// Begins the name of a container that is being made.
pub const NEW: &str = ".new-";
/// Begins the name of one that is being removed.
pub const GONE: &str = ".gone-";
/// Begins the name of the lock of those who start one.
pub const LOCK: &str = ".lock-";

/// The lock of a container's file server.
pub fn server_lock(name: &str) -> String {
    format!(".server-{name}")
}

/// The file in which is written why a container ends.
pub fn server_end(name: &str) -> String {
    format!(".ended-{name}")
}

/// The name of a scope's directory.
fn name_of(scope: &Scope) -> String {
    match scope {
        Scope::Job(job) => job.to_string(),
        Scope::Global => GLOBAL.to_owned(),
    }
}

/// Where the directory of a scope is.
pub fn path(directory: &Path, scope: &Scope) -> Result<PathBuf, Failure> {
    let (_, path) = own_directory::open(directory)?;
    Ok(path.join(CONTAINERS).join(name_of(scope)))
}

/// The directory of a scope.
pub struct ScopeDirectory {
    /// Its descriptor.
    pub dir: OwnedFd,
    /// Where it is.
    pub path: PathBuf,
    /// Whose it is.
    pub scope: Scope,
}

impl ScopeDirectory {
    /// Opens it, and makes it.
    pub fn make(directory: &Path, scope: &Scope) -> Result<ScopeDirectory, Failure> {
        let (own, path) = own_directory::open(directory)?;
        let (all, path) = make_in(&own, &path, CONTAINERS)?;
        let (dir, path) = make_in(&all, &path, &name_of(scope))?;
        Ok(ScopeDirectory { dir, path, scope: scope.clone() })
    }

    /// Opens it, if it is there.
    pub fn open(directory: &Path, scope: &Scope) -> Result<Option<ScopeDirectory>, Failure> {
        Ok(ScopeDirectory::all(directory)?.into_iter().find(|found| found.scope == *scope))
    }

    /// All that there are of this user's.
    pub fn all(directory: &Path) -> Result<Vec<ScopeDirectory>, Failure> {
        let Some((own, path)) = own_directory::find(directory)? else { return Ok(Vec::new()) };
        let path = path.join(CONTAINERS);
        let failed = |errno| Failure::caused_by(shown(&path), errno);
        let all = match open_directory(own.as_fd(), OsStr::new(CONTAINERS)) {
            Err(Errno::NOENT) => return Ok(Vec::new()),
            opened => opened.map_err(failed)?,
        };
        let mut found = Vec::new();
        for name in names(&all).map_err(failed)? {
            let scope = match name.parse() {
                Ok(job) => Scope::Job(job),
                Err(_) if name == GLOBAL => Scope::Global,
                Err(_) => continue,
            };
            // One that has just been removed is no failure.
            if let Ok(dir) = open_directory(all.as_fd(), OsStr::new(&name)) {
                found.push(ScopeDirectory { dir, path: path.join(&name), scope });
            }
        }
        Ok(found)
    }

    /// The job whose it is.
    pub fn job(&self) -> Option<u32> {
        match self.scope {
            Scope::Job(job) => Some(job),
            Scope::Global => None,
        }
    }

    /// Waits for the right to start or remove the container of this name. It ends with whoever has it.
    pub fn lock(&self, name: &str) -> Result<OwnedFd, Failure> {
        let file = format!("{LOCK}{name}");
        let mut wait = Wait::new(name);
        loop {
            let locked = lock_file(&self.dir, &file).map_err(|errno| {
                Failure::caused_by(format!("cannot lock {}", shown(&self.path.join(&file))), errno)
            })?;
            match locked {
                Some(lock) => return Ok(lock),
                None => wait.pause(|| lock_holder(&self.dir, &file))?,
            }
        }
    }

    /// The same, if nobody has it.
    pub fn try_lock(&self, name: &str) -> Option<OwnedFd> {
        lock_file(&self.dir, &format!("{LOCK}{name}")).ok().flatten()
    }

    /// Whether there is a container of this name.
    pub fn has(&self, name: &str) -> bool {
        open_directory(self.dir.as_fd(), OsStr::new(name)).is_ok()
    }

    /// The names of its containers.
    pub fn containers(&self) -> Vec<String> {
        let mut names = self.names();
        names.retain(|name| !name.starts_with('.'));
        names
    }

    /// All names in it.
    pub fn names(&self) -> Vec<String> {
        let mut names = names(&self.dir).unwrap_or_default();
        names.sort_unstable();
        names
    }
}

fn make_in(parent: &OwnedFd, path: &Path, name: &str) -> Result<(OwnedFd, PathBuf), Failure> {
    let path = path.join(name);
    let failed = |errno| Failure::caused_by(format!("cannot make {}", shown(&path)), errno);
    match mkdirat(parent, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(failed(errno)),
    }
    let opened = open_directory(parent.as_fd(), OsStr::new(name)).map_err(failed)?;
    Ok((opened, path))
}

fn names(directory: &OwnedFd) -> rustix::io::Result<Vec<String>> {
    let entries = Dir::read_from(directory)?;
    let name = |entry: rustix::fs::DirEntry| entry.file_name().to_str().map(str::to_owned).ok();
    Ok(entries.flatten().filter_map(name).filter(|name| name != "." && name != "..").collect())
}
