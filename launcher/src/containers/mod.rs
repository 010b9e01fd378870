//! Named containers: what is written in one stays on the node for the next step that names it. Runs as the user on the host.
//!
//!     mizzen-UID/containers/SCOPE/      SCOPE is the number of a job, or `global`
//!       NAME/image                      what it was made from
//!       NAME/upper, NAME/work           the overlay's directories: what was written
//!       NAME/started                    what a program must know that enters it while it runs
//!       NAME/started-NUMBER             the same of a second container on its files, by its mount namespace
//!       .lock-NAME                      who starts it now
//!       .server-NAME                    who serves the image's files, and who would go on with that
//!       .ended-NAME                     why it was ended, for the steps that were in it
//!       .new-…, .gone-…                 half made, half removed; whoever prunes removes them
//!
//! An overlay's upper directory must not be mounted twice. The kernel sees to that: it refuses (EBUSY, with the option
//! `index=on`), as long as any process is left in the container that has it mounted. So nothing has to be held, written down
//! or cleaned up while a container runs, whoever is killed; and whether it runs is found out by looking at the processes of
//! the user for one whose root is that overlay.
//!
//! A second container on the files of one that runs (`no_exec`) has no overlay of its own, but a clone of the other's mount.
//!
//! One process at a time starts a container of a given name, under a lock that ends with it. So concurrent steps make one
//! container: the first starts it, the others find that it runs, and enter.

pub mod commands;
mod entering;
mod jobs;
mod record;
mod running;
mod scope;
mod waiting;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mizzen_core::failure::quote;
use mizzen_core::request::ImageSource;
use mizzen_core::settings::{ContainerName, NameMode};
use mizzen_core::{Failure, SlurmConf};
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock, mkdirat, openat, renameat, unlinkat};
use rustix::io::Errno;

use crate::image::Loaded;
use crate::options::{Named, Origin, RunOptions, Scope};
use crate::plan::{Facts, NamedRoot, Plan};
use crate::remove_tree;
use crate::sandbox::{self, Namespaces, Owner, ServerLock, Serving};
use crate::sys;
use crate::trace::OrDebug;

pub use entering::{ignored, missing_pmix, shaping};
use record::{Record, Started};
pub use running::{container_process, step_process};
use scope::ScopeDirectory;

/// A container that was asked for by its name.
pub enum Found {
    /// It runs: to be entered.
    Running(Box<Running>),
    /// The container of a step without a name, by the number of that step, which runs.
    Step(String),
    /// To be started, and made first if it is not there; or, where one runs, a second one on its files.
    Startable(Box<Claim>),
}

/// A container that runs.
pub struct Running {
    /// To be entered.
    pub namespaces: Namespaces,
    /// Whose file server serves it.
    pub server_lock: ServerLock,
    /// That server: as long as its connection to the kernel is open, the files are there.
    pub serving: Serving,
    name: String,
    record: Record,
    started: Started,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// The right to start a container, which nobody else has as long as this lives.
pub struct Claim {
    lock: OwnedFd,
    scope: ScopeDirectory,
    name: String,
    record: Option<Record>,
    /// What the user mounts in it.
    mounts: String,
    /// What else was said that acts when it is made.
    settings: BTreeMap<String, String>,
    /// The container of this name that runs, and is to get a second one on its files.
    running: Option<Box<Running>>,
    /// Who owns the image's files in that.
    running_owner: Option<Owner>,
    /// What the user should know.
    pub note: Option<String>,
}

/// Looks for the container that the options name, as the user wants it to be. Where it is there, its image is the one to use.
pub fn find(options: &mut RunOptions) -> Result<Option<Found>, Failure> {
    prune_in_background(options);
    let Some(Named { name, directory, scope, .. }) = &options.named else { return Ok(None) };
    let ContainerName { name: text, mode } = name;
    let scope = ScopeDirectory::make(directory, scope)?;
    let lock = scope.lock(text)?;
    let record = Record::read(&scope, text)?;
    let refused = |why: &str| Failure::new(format!("the container \"{text}\" {why}"));
    let server_lock = server_lock(&scope, text);
    let running = match &record {
        Some(record) => enterable(record, &server_lock.path)
            .map_err(|failure| failure.about(format!("the container \"{text}\"")))?,
        None => None,
    };
    match (mode, record.clone(), running) {
        (NameMode::Create, Some(_), _) => Err(refused("exists, and the flag create wants a new one")
            .hint("mizzen containers remove, on the node")),
        (_, Some(record), Some((namespaces, serving))) => {
            if let Some(job) = suspendable_job(&record) {
                return Err(refused(&format!(
                    "runs in job {job}, and jobs are suspended here (PreemptMode in slurm.conf)"
                ))
                .hint(format!(
                    "srun --jobid={job} --overlap enters it in a step of that job; or take another name"
                )));
            }
            let started = Started::read(&scope, text, &namespaces.mounts)?;
            let (name, notes) = (text.clone(), Vec::new());
            let mut running = Running { namespaces, server_lock, serving, name, record, started, notes };
            if *mode == NameMode::NoExec {
                let (name, record) = (running.name.clone(), Some(running.record.clone()));
                let claim = Claim::new(options, lock, scope, name, record, Some(Box::new(running)))?;
                return Ok(Some(Found::Startable(Box::new(claim))));
            }
            let own = running.record.image()?;
            running.notes.extend(other_image(text, &own, &options.image)?);
            running.notes.extend(ignored(text, options, Some(&running.started)));
            options.image = own;
            Ok(Some(Found::Running(Box::new(running))))
        }
        (NameMode::Auto | NameMode::Exec, None, _)
            if name.step().is_some_and(|step| step_process(step).is_some()) =>
        {
            if options.image != ImageSource::Recorded {
                let image = crate::image::shown(options.image.name().as_ref());
                return Err(refused(&format!(
                    "is that of a step that runs, so {image} cannot be used for it"
                ))
                .hint("leave the image out to enter it, or take another name"));
            }
            Ok(Some(Found::Step(text.clone())))
        }
        (NameMode::Exec, record, None) => {
            let why = if record.is_some() { "does not run" } else { "does not exist" };
            Err(refused(&format!("{why}, and the flag exec wants to enter it"))
                .hint("start it in another step of this node first, or leave the flag out"))
        }
        (_, None, _) if options.image == ImageSource::Recorded => Err(missing(text)),
        (_, _, _) => {
            let name = text.clone();
            let claim = Claim::new(options, lock, scope, name, record, None)?;
            Ok(Some(Found::Startable(Box::new(claim))))
        }
    }
}

/// Every start of a container removes those of ended jobs, with a name or without.
fn prune_in_background(options: &RunOptions) {
    let Some(directory) = &options.containers else { return };
    let own = match options.named.as_ref().map(|named| &named.scope) {
        Some(Scope::Job(job)) => Some(*job),
        Some(Scope::Global) => None,
        None => std::env::var("SLURM_JOB_ID").ok().and_then(|job| job.parse().ok()),
    };
    jobs::prune_in_background(directory, own, options.named.is_some());
}

/// A step that has ended may take a moment until it is gone, with its file server first.
const ENDING: Duration = Duration::from_secs(5);

/// The namespaces of a container that runs, and its file server. One that is about to end is waited for.
fn enterable(record: &Record, server_lock: &Path) -> Result<Option<(Namespaces, Serving)>, Failure> {
    let end = Instant::now() + ENDING;
    loop {
        let Some(namespaces) = running::find(record)? else { return Ok(None) };
        match sandbox::server_connection(server_lock, &namespaces.user) {
            Ok(serving) => return Ok(Some((namespaces, serving))),
            Err(failure) if Instant::now() > end => return Err(failure),
            Err(_) => {}
        }
        // Nothing of it may be kept: it could not end.
        drop(namespaces);
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Another job in whose container this one must not be. A file server that stands still with its job is not waited for
/// (`sandbox/standby.rs`); but one that stands still and waits for its turn keeps the requests of another that was killed, and whoever
/// has asked cannot be killed.
fn suspendable_job(record: &Record) -> Option<String> {
    let own = std::env::var_os("SLURM_JOB_ID")?;
    let other = running::other_job(record, &own)?;
    let conf = SlurmConf::read(std::env::var_os("SLURM_CONF").as_deref().map(Path::new));
    // Where it cannot be read, nobody knows.
    conf.is_none_or(|conf| conf.may_suspend_jobs()).then(|| quote(other.as_bytes()))
}

/// Where the container is or would be, and what it was made from, for `mizzen plan`.
pub fn look(options: &mut RunOptions) -> Result<Option<NamedRoot>, Failure> {
    let Some(Named { name, directory, scope, .. }) = &options.named else { return Ok(None) };
    let path = scope::path(directory, scope)?.join(&name.name);
    let writable = options.settings.writable.clone();
    let root = NamedRoot { directory: path, id: String::new(), writable, is_shared: false };
    if let Some(scope) = ScopeDirectory::open(directory, scope)?
        && let Some(record) = Record::read(&scope, &name.name)?
    {
        options.image = record.image()?;
    } else if options.image == ImageSource::Recorded {
        return Err(missing(&name.name));
    }
    Ok(Some(root))
}

/// What the user has mounted, as the option says it.
fn user_mounts(options: &RunOptions) -> String {
    let own = options.mounts.iter().filter(|(_, origin)| *origin != Origin::Site);
    let texts: Vec<Vec<u8>> = own.map(|(mount, _)| mount.to_text()).collect();
    String::from_utf8_lossy(&texts.join(&b',')).into_owned()
}

/// What the user should know who asks for another image than that of a container. Who asks for content by its digest gets that
/// or nothing.
fn other_image(name: &str, own: &ImageSource, asked: &ImageSource) -> Result<Option<String>, Failure> {
    if *asked == ImageSource::Recorded || asked == own {
        return Ok(None);
    }
    let shown = |image: &ImageSource| crate::image::shown(image.name().as_ref());
    let made = format!("the container \"{name}\" was made from {}", shown(own));
    if let ImageSource::File { digest: Some(digest), .. } = asked {
        return Err(Failure::new(format!("{made}, and not from {} with {digest}", shown(asked))).hint(
            "leave the digest out to use the container as it is, or remove it: mizzen containers remove",
        ));
    }
    Ok(Some(format!("{made}, so {} is not used; `mizzen containers remove` removes it", shown(asked))))
}

fn missing(name: &str) -> Failure {
    Failure::new(format!("a container with name \"{name}\" does not exist, and --container-image is not set"))
        .hint("give the image to the first step on each node; `mizzen containers list` shows what is there")
}

impl Claim {
    /// With the lock. The image that the options then name is the container's.
    fn new(
        options: &mut RunOptions,
        lock: OwnedFd,
        scope: ScopeDirectory,
        name: String,
        record: Option<Record>,
        running: Option<Box<Running>>,
    ) -> Result<Claim, Failure> {
        let (mounts, settings) = (user_mounts(options), shaping(&options.settings));
        let running_owner = running.as_ref().map(|running| running.owner());
        let mut claim =
            Claim { lock, scope, name, record, mounts, settings, running, running_owner, note: None };
        (options.image, claim.note) = claim.image(&options.image)?;
        Ok(claim)
    }

    /// The container of this name that runs, if there is to be a second one on its files. Whoever has this keeps it from ending.
    pub fn take_running(&mut self) -> Option<Running> {
        self.running.take().map(|running| *running)
    }

    /// The image that the container is made from: its own if it is there, whatever else is asked for. In that case, a note.
    fn image(&self, asked: &ImageSource) -> Result<(ImageSource, Option<String>), Failure> {
        let Some(record) = &self.record else { return Ok((asked.clone(), None)) };
        let own = record.image()?;
        let note = other_image(&self.name, &own, asked)?;
        Ok((own, note))
    }

    /// Where it is kept.
    fn directory(&self) -> PathBuf {
        self.scope.path.join(&self.name)
    }

    /// What the container's root is to be, over this image.
    pub fn root(&mut self, options: &RunOptions, loaded: &Loaded) -> Result<NamedRoot, Failure> {
        let of_step = options.named.as_ref().is_some_and(|named| named.of_step);
        let id = self.id(&options.image, loaded, of_step)?;
        let (directory, writable) = (self.directory(), options.settings.writable.clone());
        Ok(NamedRoot { directory, id, writable, is_shared: self.running_owner.is_some() })
    }

    /// Its own number, where it is there; else one for a new container.
    fn id(&mut self, image: &ImageSource, loaded: &Loaded, of_step: bool) -> Result<String, Failure> {
        let record = match &self.record {
            Some(record) => {
                record
                    .check(loaded)
                    .map_err(|failure| failure.about(format!("the container \"{}\"", self.name)))?;
                record.clone()
            }
            None => Record::new(image, loaded, of_step)?,
        };
        Ok(self.record.insert(record).id.clone())
    }

    /// Whose file server serves it.
    pub fn server_lock(&self) -> ServerLock {
        // Nobody is left in it whom that has ended.
        let _ = unlinkat(&self.scope.dir, scope::server_end(&self.name), AtFlags::empty());
        server_lock(&self.scope, &self.name)
    }

    /// Makes the container's directory, unless it is there. It appears when it is complete.
    pub fn make(&self) -> Result<(), Failure> {
        let Some(record) = &self.record else { return Err(Failure::new("a container without a record")) };
        if self.scope.has(&self.name) {
            return Ok(());
        }
        let failed = |errno: Errno| {
            Failure::caused_by(format!("cannot make {}", crate::image::shown(&self.directory())), errno)
                .or_hint("named containers are kept in stage_directory of mizzen.toml; is there space?")
        };
        let _mask = sys::FileMask::set(0o022);
        let _unharmed = sys::IgnoreSignal::new(nix::sys::signal::Signal::SIGXFSZ);
        let new = format!("{}{}", scope::NEW, record.id);
        let make = || -> rustix::io::Result<()> {
            mkdirat(&self.scope.dir, &*new, Mode::RWXU)?;
            let directory = remove_tree::open_directory(self.scope.dir.as_fd(), OsStr::new(&new))?;
            // Whoever prunes sees by this lock that it is being made.
            flock(&directory, FlockOperation::NonBlockingLockExclusive)?;
            // The root directory's mode is the upper one's.
            mkdirat(&directory, "upper", Mode::from_raw_mode(0o755))?;
            mkdirat(&directory, "work", Mode::RWXU)?;
            record.write(&directory)?;
            renameat(&self.scope.dir, &*new, &self.scope.dir, &*self.name)
        };
        make().map_err(failed)
    }

    /// It runs: others may enter from now on.
    pub fn started(mut self, plan: &Plan) {
        let mounts = self.mounts.clone();
        let directory = remove_tree::open_directory(self.scope.dir.as_fd(), OsStr::new(&self.name));
        let settings = std::mem::take(&mut self.settings);
        let started = Started::new(plan, mounts, settings);
        let written = directory.and_then(|directory| match self.running_owner {
            None => started.write(&directory),
            Some(Owner { uid, gid }) => Started { uid, gid, ..started }.write_of_second(&directory),
        });
        written.or_debug("nobody can enter this container");
        // Explicitly: with a process id namespace another process has it open as well, as long as the container runs.
        let _ = flock(&self.lock, FlockOperation::Unlock);
    }
}

/// The files of those who serve a container.
fn server_lock(scope: &ScopeDirectory, name: &str) -> ServerLock {
    let path = |name: String| scope.path.join(name);
    ServerLock { path: path(scope::server_lock(name)), end: path(scope::server_end(name)), until: None }
}

impl Running {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether this image is still what the container was made from.
    pub fn check(&self, loaded: &Loaded) -> Result<(), Failure> {
        self.record.check(loaded)
    }

    /// Who owns the image's files there.
    pub fn owner(&self) -> Owner {
        Owner { uid: self.started.uid, gid: self.started.gid }
    }

    /// What a program of these options needs to know that enters it.
    pub fn facts(&self, options: &RunOptions) -> Facts {
        Facts {
            // Of the step that has started it.
            mpi_environment: Vec::new(),
            commands: None,
            entrypoint: Vec::new(),
            environment: options.environment.clone(),
            ..self.started.facts.clone()
        }
    }
}

/// Opens a lock's file and takes the lock, if nobody has it. A file that was removed meanwhile is no lock any more.
fn lock_file(directory: &OwnedFd, name: &str) -> rustix::io::Result<Option<OwnedFd>> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    loop {
        let file = File::from(openat(directory, name, flags, Mode::from_raw_mode(0o600))?);
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::INTR) => continue,
            Err(Errno::WOULDBLOCK) => return Ok(None),
            Err(errno) => return Err(errno),
        }
        let named = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW);
        if named.is_ok_and(|named| rustix::fs::fstat(&file).is_ok_and(|own| own.st_ino == named.st_ino)) {
            // For who waits. Nothing depends on it.
            let holder = format!("{:<10}", std::process::id());
            let _ = file.write_all_at(holder.as_bytes(), 0);
            return Ok(Some(file.into()));
        }
    }
}

/// Who has a lock, as far as they have said it.
fn lock_holder(directory: &OwnedFd, name: &str) -> String {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut text = [0; 10];
    let read = openat(directory, name, flags, Mode::empty()).map(File::from);
    let length = read.map_or(0, |file| file.read_at(&mut text, 0).unwrap_or(0));
    let text = String::from_utf8_lossy(&text[..length]).trim().to_owned();
    if text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty() { text } else { "?".to_owned() }
}

/// Writes a file that appears when it is complete.
fn write_file(directory: &OwnedFd, name: &str, content: &[u8]) -> rustix::io::Result<()> {
    let temporary = format!(".{name}");
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(openat(directory, &*temporary, flags, Mode::from_raw_mode(0o600))?);
    if let Err(error) = (&file).write_all(content) {
        let _ = unlinkat(directory, &*temporary, AtFlags::empty());
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
    renameat(directory, &*temporary, directory, name)
}
