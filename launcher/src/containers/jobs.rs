//! The containers of a job go with it. No process of mizzen's outlives a job, so the next start of a container of the user on the node
//! removes them, or `mizzen containers prune`, which a site can have its epilog run. Runs as the user on the host.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::Read;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use mizzen_core::failure::quote;
use mizzen_core::{Failure, SlurmConf};
use nix::unistd::geteuid;
use rustix::fs::{AtFlags, FlockOperation, flock, renameat, unlinkat};

use super::record::Record;
use super::scope::{GONE, LOCK, NEW, ScopeDirectory, server_end, server_lock};
use super::{lock_file, running};
use crate::remove_tree::{self, open_directory};
use crate::sys;
use crate::trace::OrDebug;

/// The controller may be busy; and nothing is lost where it does not answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The states of a job that runs no more, and will not. Whatever else squeue may say, the job may go on.
const ENDED: [&str; 10] = [
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
];

const UNANSWERED: &str = "nothing is removed while Slurm does not answer";

/// What became of a container that was to be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// It is gone.
    Done,
    /// A process is in it, or somebody is about to start it.
    InUse,
    /// It cannot be removed.
    Failed(rustix::io::Errno),
}

/// How often starts without a name ask Slurm about the same jobs: there may be thousands of them while another job runs.
const PAUSE: Duration = Duration::from_secs(600);

/// When Slurm was last asked, by the time of modification of this file among the scopes.
const ASKED: &str = ".asked";

/// Removes the containers of ended jobs, in a process that nobody waits for. Where there are none to ask about, nobody is asked; and
/// not often by starts that are not `named`.
pub fn prune_in_background(directory: &Path, own: Option<u32>, named: bool) {
    let Ok(scopes) = ScopeDirectory::all(directory) else { return };
    let Some(other) = scopes.iter().find(|scope| scope.job().is_some_and(|job| Some(job) != own)) else {
        return;
    };
    let asked = other.path.with_file_name(ASKED);
    let lately = || asked.metadata().and_then(|found| found.modified()).ok()?.elapsed().ok();
    if !named && lately().is_some_and(|past| past < PAUSE) {
        return;
    }
    std::fs::write(&asked, "").or_debug("Slurm may be asked again soon");
    // It looks at them again itself: nothing that is open here is left to it.
    drop(scopes);
    let pruned = sys::spawn_detached(&[], || {
        let _ = nix::unistd::chdir("/");
        let _ = nix::sys::prctl::set_name(c"mizzen-prune");
        let Ok(scopes) = ScopeDirectory::all(directory) else { return };
        let Ok(ended) = ended(scopes, own) else { return };
        for scope in ended {
            remove_all(&scope);
        }
    });
    pruned.or_debug("containers of ended jobs stay");
}

/// Those of these directories whose jobs have ended. In this order: a job that is not known any more, or has ended, when it is asked
/// about makes no new container.
pub fn ended(scopes: Vec<ScopeDirectory>, own: Option<u32>) -> Result<Vec<ScopeDirectory>, Failure> {
    let cluster = asked_cluster();
    let is_other = |scope: &ScopeDirectory| scope.job().is_some_and(|job| Some(job) != own);
    let others: Vec<ScopeDirectory> = scopes
        .into_iter()
        .filter(|scope| is_other(scope) && cluster.as_ref().is_none_or(|cluster| is_of(scope, cluster)))
        .collect();
    if others.is_empty() {
        return Ok(others);
    }
    let states = job_states()?;
    let has_ended = |job: u32| states.get(&job).is_none_or(|state| ENDED.contains(&state.as_str()));
    Ok(others.into_iter().filter(|scope| scope.job().is_some_and(has_ended)).collect())
}

/// The cluster that squeue asks: a user can name another one's slurm.conf, and to that all jobs of this one are unknown. None where
/// the file cannot be read.
fn asked_cluster() -> Option<String> {
    let conf = SlurmConf::read(std::env::var_os("SLURM_CONF").as_deref().map(Path::new))?;
    conf.value("ClusterName").map(str::to_ascii_lowercase)
}

/// Whether the containers of a scope are of a job of this cluster, as far as they say it.
fn is_of(scope: &ScopeDirectory, cluster: &str) -> bool {
    let records = scope.containers().into_iter().filter_map(|name| Record::read(scope, &name).ok().flatten());
    records.filter_map(|record| record.cluster).all(|known| known.eq_ignore_ascii_case(cluster))
}

/// The states of all jobs of this user that Slurm knows.
fn job_states() -> Result<BTreeMap<u32, String>, Failure> {
    let program = find_squeue().ok_or_else(|| {
        Failure::new("squeue is not found, which tells the jobs that have ended").hint("put it into PATH")
    })?;
    let failed =
        |why: String| Failure::new(format!("{}: {why}", quote(program.as_os_str().as_encoded_bytes())));
    let mut command = Command::new(&program);
    // SQUEUE_… would have it show other jobs, or other columns.
    let kept = ["SLURM_CONF", "SLURM_CONF_SERVER"];
    let kept = kept.into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
    command.env_clear().envs(kept);
    // --all: jobs in hidden partitions as well.
    command.args(["--noheader", "--all", "--states=all", "--format=%A %T", "--user", &geteuid().to_string()]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| failed(error.to_string()))?;
    let end = Instant::now() + TIMEOUT;
    let mut pipe = child.stdout.take();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        pipe.as_mut().map(|pipe| pipe.read_to_string(&mut text)).transpose().map(|_| text)
    });
    let status = loop {
        match child.try_wait().map_err(|error| failed(error.to_string()))? {
            Some(status) => break status,
            None if Instant::now() > end => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(failed(format!("no answer within {} s", TIMEOUT.as_secs())).hint(UNANSWERED));
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let text = reader.join().ok().and_then(Result::ok).unwrap_or_default();
    if !status.success() {
        return Err(failed(format!("{status}")).hint(UNANSWERED));
    }
    text.lines()
        .map(parse_state)
        .collect::<Option<_>>()
        .ok_or_else(|| failed("an answer that is none".to_owned()))
}

fn parse_state(line: &str) -> Option<(u32, String)> {
    let (job, state) = line.trim().split_once(' ')?;
    Some((job.parse().ok()?, state.to_owned()))
}

fn find_squeue() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/local/bin", "/usr/bin", "/bin", "/opt/slurm/bin"].map(PathBuf::from);
    let places = std::env::split_paths(&path).filter(|directory| directory.is_absolute()).chain(usual);
    places.map(|directory| directory.join("squeue")).find(|program| program.is_file())
}

/// Removes all containers of a job, and what was left of others; returns the names of those that are gone. What is in use stays.
pub fn remove_all(scope: &ScopeDirectory) -> Vec<String> {
    let removed =
        scope.containers().into_iter().filter(|name| remove(scope, name) == Removal::Done).collect();
    sweep(scope);
    for name in scope.names() {
        if let Some(container) = name.strip_prefix(LOCK).filter(|container| !scope.has(container)) {
            remove_locks(scope, container);
        }
    }
    if scope.job().is_some() {
        // Only where nothing is left in it.
        let _ = std::fs::remove_dir(&scope.path);
    }
    removed
}

/// Removes one container, unless it is in use.
pub fn remove(scope: &ScopeDirectory, name: &str) -> Removal {
    let Some(_lock) = scope.try_lock(name) else { return Removal::InUse };
    // Of what cannot be read nobody can say where it is mounted; the kernel would not mount it either.
    if let Ok(Some(record)) = Record::read(scope, name)
        && running::processes(&record).next().is_some()
    {
        return Removal::InUse;
    }
    // At once for everybody else, however long it takes.
    let gone = format!("{GONE}{}-{name}", std::process::id());
    if let Err(errno) = renameat(&scope.dir, name, &scope.dir, &*gone) {
        return Removal::Failed(errno);
    }
    let _ = unlinkat(&scope.dir, server_lock(name), AtFlags::empty());
    let _ = unlinkat(&scope.dir, server_end(name), AtFlags::empty());
    let _ = unlinkat(&scope.dir, format!("{LOCK}{name}"), AtFlags::empty());
    match remove_directory(scope, &gone) {
        Ok(()) => Removal::Done,
        Err(errno) => Removal::Failed(errno),
    }
}

fn remove_locks(scope: &ScopeDirectory, name: &str) {
    // Whoever waits for it sees that it is gone, and makes another.
    if let Ok(Some(_lock)) = lock_file(&scope.dir, &format!("{LOCK}{name}"))
        && !scope.has(name)
    {
        let _ = unlinkat(&scope.dir, server_lock(name), AtFlags::empty());
        let _ = unlinkat(&scope.dir, server_end(name), AtFlags::empty());
        let _ = unlinkat(&scope.dir, format!("{LOCK}{name}"), AtFlags::empty());
    }
}

/// Removes what was half made or half removed when somebody was killed.
pub fn sweep(scope: &ScopeDirectory) {
    for name in scope.names().into_iter().filter(|name| name.starts_with(NEW) || name.starts_with(GONE)) {
        remove_directory(scope, &name).or_debug("a part of a container stays");
    }
}

fn remove_directory(scope: &ScopeDirectory, name: &str) -> rustix::io::Result<()> {
    let directory = open_directory(scope.dir.as_fd(), OsStr::new(name))?;
    // Whoever makes one, or removes it, has it locked.
    flock(&directory, FlockOperation::NonBlockingLockExclusive)?;
    let mut all = usize::MAX;
    remove_tree::remove(scope.dir.as_fd(), OsStr::new(name), directory.as_fd(), &mut all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::testing::Scratch;
    use crate::options::Scope;

    #[test]
    fn a_line_of_squeue_is_a_job_and_its_state() {
        assert_eq!(parse_state("7 RUNNING"), Some((7, "RUNNING".to_owned())));
        assert_eq!(parse_state(" 12 COMPLETING"), Some((12, "COMPLETING".to_owned())));
        assert_eq!((parse_state(""), parse_state("slurm_load_jobs error: x")), (None, None));
        assert!(!ENDED.contains(&"COMPLETING") && !ENDED.contains(&"SUSPENDED"));
    }

    /// A container as it is on disk, whose record nobody has written.
    fn container(scope: &ScopeDirectory, name: &str) {
        for directory in ["upper/a/b", "work"] {
            std::fs::create_dir_all(scope.path.join(name).join(directory)).unwrap();
        }
        std::fs::write(scope.path.join(name).join("upper/a/b/file"), "").unwrap();
    }

    #[test]
    fn what_is_in_use_stays() {
        let scratch = Scratch::new();
        let scope = ScopeDirectory::make(scratch.path(), &Scope::Job(7)).unwrap();
        container(&scope, "used");
        container(&scope, "free");
        container(&scope, ".new-1");
        container(&scope, ".new-2");
        let lock = scope.lock("used").unwrap();
        let making = open_directory(scope.dir.as_fd(), OsStr::new(".new-2")).unwrap();
        flock(&making, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert_eq!(scope.containers(), ["free", "used"]);
        assert_eq!(remove(&scope, "used"), Removal::InUse);
        assert_eq!(remove_all(&scope), ["free"]);
        assert_eq!(scope.names(), [".lock-used", ".new-2", "used"]);
        drop((lock, making));
        assert_eq!(remove_all(&scope), ["used"]);
        assert!(!scope.path.exists(), "a job's directory goes with the last container");
    }

    #[test]
    fn a_lock_that_was_removed_is_none() {
        let scratch = Scratch::new();
        let scope = ScopeDirectory::make(scratch.path(), &Scope::Global).unwrap();
        let first = scope.lock("x").unwrap();
        assert!(scope.try_lock("x").is_none());
        std::fs::remove_file(scope.path.join(".lock-x")).unwrap();
        assert!(scope.try_lock("x").is_some(), "it is another file");
        drop(first);
        remove_all(&scope);
        assert_eq!(scope.names(), Vec::<String>::new());
    }
}
