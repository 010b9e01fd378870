//! `mizzen containers`: the named containers of this user on this node, for people and for epilogs. Runs as the user on the
//! host.

use std::ffi::OsStr;
use std::fmt::Write;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use mizzen_core::failure::{cause, quote};
use mizzen_core::{Config, Failure};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, openat, statat};
use serde_json::json;

use super::jobs::{self, Removal};
use super::record::Record;
use super::running;
use super::scope::ScopeDirectory;
use crate::options::Scope;
use crate::remove_tree::open_directory;
use crate::report::{age, megabytes};
use crate::stage::commands::Outcome;
use crate::stage::delivery;

/// The containers of this user.
pub struct Containers {
    directory: PathBuf,
    /// Where names belong that are given without a job.
    scope: Scope,
}

impl Containers {
    /// Those of this node. In a job, names are the job's.
    pub fn new(config: &Config, job: Option<u32>) -> Containers {
        let of_environment = std::env::var("SLURM_JOB_ID").ok();
        let scope = match job {
            Some(job) => Scope::Job(job),
            None => Scope::new(config.container_scope(), of_environment.as_deref()),
        };
        Containers { directory: config.stage_directory.clone(), scope }
    }

    /// Those that no job takes with it.
    pub fn global(config: &Config) -> Containers {
        Containers::of(config, Scope::Global)
    }

    /// Those of one scope.
    pub fn of(config: &Config, scope: Scope) -> Containers {
        Containers { directory: config.stage_directory.clone(), scope }
    }

    /// All of this user's on this node, by scope.
    pub fn all(config: &Config) -> Result<Vec<Containers>, Failure> {
        let scopes = ScopeDirectory::all(&config.stage_directory)?.into_iter();
        Ok(scopes.map(|found| Containers::of(config, found.scope)).collect())
    }

    /// Whose they are.
    pub fn scope(&self) -> &Scope {
        &self.scope
    }

    /// Whether a step of a job has made this one.
    pub fn is_of_step(&self, name: &str) -> Result<bool, Failure> {
        let Some(scope) = ScopeDirectory::open(&self.directory, &self.scope)? else { return Ok(false) };
        Ok(Record::read(&scope, name)?.is_some_and(|record| record.of_step))
    }

    /// Whether there is one of this name.
    pub fn has(&self, name: &str) -> Result<bool, Failure> {
        Ok(self.names()?.iter().any(|known| known == name))
    }

    /// Their names.
    pub fn names(&self) -> Result<Vec<String>, Failure> {
        let scope = ScopeDirectory::open(&self.directory, &self.scope)?;
        Ok(scope.map(|scope| scope.containers()).unwrap_or_default())
    }

    /// The numbers of the processes in one.
    pub fn processes(&self, name: &str) -> Result<Vec<String>, Failure> {
        let Some(scope) = ScopeDirectory::open(&self.directory, &self.scope)? else { return Ok(Vec::new()) };
        let record = Record::read(&scope, name)?;
        Ok(record.iter().flat_map(running::processes).collect())
    }

    /// Shows all of them.
    pub fn list(&self) -> Result<Outcome, Failure> {
        let (mut text, mut listed) = (String::new(), Vec::new());
        for scope in ScopeDirectory::all(&self.directory)? {
            let job = scope.job();
            let whose = job.map_or_else(|| "global".to_owned(), |job| format!("job {job}"));
            for name in scope.containers() {
                let shown = quote(name.as_bytes());
                let record = match Record::read(&scope, &name) {
                    Ok(Some(record)) => record,
                    // Just removed.
                    Ok(None) => continue,
                    Err(failure) => {
                        let _ = writeln!(text, "{shown:<20} {whose:<12} {failure}");
                        listed.push(json!({ "name": shown, "job": job, "error": failure.message }));
                        continue;
                    }
                };
                let image = record.image().map_or_else(
                    |_| "?".to_owned(),
                    |image| match image.reference() {
                        Some(reference) => reference.to_string(),
                        None => crate::image::shown(Path::new(&image.name())),
                    },
                );
                let processes = running::processes(&record).count();
                let state = if processes > 0 { "running" } else { "stopped" };
                let size = size_of(&scope, &name);
                let made = age(record.made);
                let _ = writeln!(
                    text,
                    "{shown:<20} {whose:<12} {state:<8} {:>12} {made:>8}  {image}",
                    megabytes(size)
                );
                listed.push(json!({
                    "name": shown, "job": job, "image": image, "state": state, "processes": processes,
                    "size": size, "made": record.made, "directory": scope.path.join(&name).display().to_string(),
                }));
            }
        }
        if !text.is_empty() {
            let heading = format!(
                "{:<20} {:<12} {:<8} {:>12} {:>8}  {}\n",
                "NAME", "SCOPE", "STATE", "CHANGES", "AGE", "IMAGE"
            );
            text.insert_str(0, &heading);
        }
        Ok(Outcome { text, json: json!({ "containers": listed }), good: true })
    }

    /// Removes some by their names, or all.
    pub fn remove(&self, names: &[String], all: bool) -> Result<Outcome, Failure> {
        let scope = ScopeDirectory::open(&self.directory, &self.scope)?;
        let names = match (&scope, all) {
            (Some(scope), true) => scope.containers(),
            _ => names.to_vec(),
        };
        let (mut text, mut removed, mut failed) = (String::new(), Vec::new(), Vec::new());
        for name in &names {
            let shown = quote(name.as_bytes());
            let there = scope
                .as_ref()
                .filter(|scope| !name.starts_with('.') && !name.contains('/') && scope.has(name));
            match there.map(|scope| jobs::remove(scope, name)) {
                Some(Removal::Done) => {
                    let _ = writeln!(text, "{shown}: removed");
                    removed.push(shown);
                }
                other => {
                    let why = match other {
                        None | Some(Removal::Done) => self.absent(),
                        Some(Removal::InUse) => "in use: it runs, or is being started".to_owned(),
                        Some(Removal::Failed(errno)) => cause(&errno.into()),
                    };
                    let _ = writeln!(text, "{shown}: {why}");
                    failed.push(json!({ "name": shown, "error": why }));
                }
            }
        }
        let good = failed.is_empty();
        Ok(Outcome { text, json: json!({ "removed": removed, "failed": failed }), good })
    }

    fn absent(&self) -> String {
        match self.scope {
            Scope::Job(job) => format!("job {job} has no such container on this node"),
            Scope::Global => "no such container on this node".to_owned(),
        }
    }

    /// Removes the containers of ended jobs, or of this one with what has been sent for it, and what was left when somebody was killed.
    pub fn prune(&self, job: Option<u32>) -> Result<Outcome, Failure> {
        let sent = job.map(|job| delivery::remove_of_job(&self.directory, job)).unwrap_or_default();
        let scopes = ScopeDirectory::all(&self.directory)?;
        for scope in scopes.iter().filter(|scope| scope.scope == Scope::Global) {
            jobs::sweep(scope);
        }
        let ended = match job {
            // Slurm's epilogs know it, and must not ask Slurm.
            Some(job) => scopes.into_iter().filter(|scope| scope.job() == Some(job)).collect(),
            None => jobs::ended(scopes, None)?,
        };
        let (mut text, mut removed) = (String::new(), Vec::new());
        for name in &sent {
            let _ = writeln!(text, "{}: removed", quote(self.directory.join(name).as_os_str().as_bytes()));
        }
        for scope in &ended {
            let job = scope.job();
            for name in jobs::remove_all(scope) {
                let shown = quote(name.as_bytes());
                let _ = writeln!(text, "{shown} of job {}: removed", job.unwrap_or_default());
                removed.push(json!({ "name": shown, "job": job }));
            }
        }
        let mut json = json!({ "removed": removed });
        if job.is_some() {
            json["sent"] = json!(sent);
        }
        Ok(Outcome { text, json, good: true })
    }
}

/// What the changes of a container take on the disk, as far as it can be looked at.
fn size_of(scope: &ScopeDirectory, name: &str) -> u64 {
    let Ok(directory) = open_directory(scope.dir.as_fd(), OsStr::new(name)) else { return 0 };
    let Ok(upper) = open_directory(directory.as_fd(), OsStr::new("upper")) else { return 0 };
    let (mut size, mut directories) = (0, vec![PathBuf::from(".")]);
    while let Some(path) = directories.pop() {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = openat(&upper, &path, flags, Mode::empty());
        for entry in opened.as_ref().map(Dir::read_from).into_iter().flatten().flatten().flatten() {
            if [c".", c".."].contains(&entry.file_name()) {
                continue;
            }
            let path = path.join(OsStr::from_bytes(entry.file_name().to_bytes()));
            let Ok(found) = statat(&upper, &path, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            size += u64::try_from(found.st_blocks).unwrap_or(0) * 512;
            if FileType::from_raw_mode(found.st_mode) == FileType::Directory {
                directories.push(path);
            }
        }
    }
    size
}
