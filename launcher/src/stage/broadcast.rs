//! Broadcast: srun's machine reads an image once, and Slurm's own tree of messages (sbcast) brings it to the nodes of the
//! step. Runs as the user on the host: in srun's hook, under the name `mizzen-broadcast`, and on the nodes.
//!
//!     srun's machine:  source -> copy in the user's cache here -> sbcast -> a file beside the cache of every node
//!     each node:       that file, if it is whole and the source is still the same -> the node's cache
//!
//! What is sent is the copy and not the source, because sbcast gives the files the mode of what it sends, in a directory
//! where others can look: a copy's mode lets nobody else read. And its digest is known then, so that the nodes can tell
//! whether all of it has arrived. sbcast makes no directories, so the file cannot go into the user's own at once.
//!
//! srun waits for this, unless the image is to be sent while the tasks run (`early.rs`).

use std::ffi::OsString;
use std::fs::File;
use std::io::{PipeReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use mizzen_core::config::Source;
use mizzen_core::failure::{FailureKind, cause, quote};
use mizzen_core::options::MountSource;
use mizzen_core::request::{self, Container, ImageSource};
use mizzen_core::staging::{Broadcast, Policy};
use mizzen_core::{Config, Digest, Failure, Request};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{getpid, getppid};
use rustix::fs::{Mode, OFlags, openat};

use super::cache::{self, Cache};
use super::delivery::{Delivery, EARLY};
use super::early::{self, Sending};
use super::fill::Silent;
use super::obtain::obtain;
use super::source::FileIdentity;
use super::{
    ProgressSink, Requirements, StageError, StagingOptions, StderrSink, Wanted, changing, is_still_there,
    note, open_as_user, wanted, with_retries,
};
use crate::image::{ImageKind, OpenedImage, shown};
use crate::progress::Progress;
use crate::sys;
use crate::trace::OrDebug;

/// Begins the name of what remembers which nodes of a job have been sent an image.
pub const SENT: &str = "sent-";
/// Of what sbcast says about many nodes, the beginning is enough.
const WORDS: usize = 4096;

/// What srun's hook asks for: sends the images of a step to its nodes. Prints what the nodes must know, if there is
/// something, or why srun must not go on.
pub fn run(mut words: impl Iterator<Item = OsString>) -> ExitCode {
    // srun blocks what its thread for signals takes; Ctrl-C is to end this. An srun that ends waits for nothing.
    let _ = SigSet::empty().thread_set_mask();
    let _ = set_pdeathsig(Signal::SIGTERM);
    let step = words.next().unwrap_or_default().to_string_lossy().into_owned();
    let programs = PathBuf::from(words.next().unwrap_or_default());
    let config = words.next().map_or(Source::Default, |path| Source::Named(path.into()));
    let (text, code, later) = match send_all(Step { name: step, programs }, &config) {
        Ok((deliveries, _)) if deliveries.is_empty() => (String::new(), 0, None),
        Ok((deliveries, later)) => (serde_json::to_string(&deliveries).unwrap_or_default(), 0, later),
        Err(failure) => (failure.encode(), 1, None),
    };
    let mut stdout = std::io::stdout();
    // Nothing is sent for an srun that is gone.
    if stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).is_err() {
        return ExitCode::FAILURE;
    }
    if let Some(later) = later {
        later.start();
    }
    ExitCode::from(code)
}

/// The step that is to be served.
pub struct Step {
    /// As `7.0`.
    name: String,
    /// Where Slurm's commands are.
    programs: PathBuf,
}

/// Sends what the tasks wait for; and what is to be sent while they run.
fn send_all(step: Step, config: &Source) -> Result<(Vec<Delivery>, Option<Sending>), Failure> {
    let text = std::env::var_os(request::VARIABLE).unwrap_or_default();
    let Request::Container(container) = Request::decode(&text.into_vec())? else {
        return Ok((Vec::new(), None));
    };
    let config = Config::load(config)?;
    let _mask = sys::FileMask::set(cache::MASK);
    let mut staging = StagingOptions::new(Policy::Broadcast, &config)?;
    let srun = (staging.broadcast == Broadcast::Early).then(early::end_of_srun).flatten();
    if srun.is_none() {
        // What runs beside it has to end with it.
        staging.broadcast = Broadcast::First;
    }
    let nodes = step.nodes();
    // One node reads once, whichever way.
    if nodes.as_deref().is_some_and(|nodes| !nodes.contains([',', '['])) {
        return Ok((Vec::new(), None));
    }
    // Nothing is sent before everything is known to be what it should be.
    let (mut all, mut images) = (Vec::new(), Vec::new());
    for (path, requirements) in files(container, config) {
        match with_retries(|| open_as_user(&path), |opened| prepare(opened, &requirements, &staging, true)) {
            Err(StageError::Cache(why)) => all.push((path, Err(why))),
            Err(StageError::Source(failure)) => return Err(failure),
            Err(StageError::Refused(failure)) => return Err(failure.about(shown(&path))),
            Ok(Ready::Nothing) => {}
            Ok(Ready::Copy(copied)) => all.push((path, Ok(copied))),
            Ok(Ready::Later(cache, identity)) => {
                let known = cache.digest_of(&identity);
                let is_sent = known.is_some_and(|digest| step.has_sent(&cache, digest, nodes.as_deref()));
                match Delivery::new(&format!("{EARLY}{}-", step.job()), &path, identity, None) {
                    Ok(delivery) if !is_sent => images.push((delivery, requirements)),
                    Ok(_) => {}
                    Err(why) => not_sent(&path, &why),
                }
            }
        }
    }
    let mut deliveries = Vec::new();
    for (path, copied) in all {
        let sent = copied
            .and_then(|copied| send(&step, nodes.as_deref(), &path, &copied, &staging, &mut deliveries));
        if let Err(why) = sent {
            not_sent(&path, &why);
        }
    }
    deliveries.extend(images.iter().map(|(delivery, _)| delivery.clone()));
    let sending = srun.map(|srun| Sending { step, nodes, staging, images, srun });
    Ok((deliveries, sending.filter(|sending| !sending.images.is_empty())))
}

/// Tells the user that the nodes get nothing from srun.
pub(super) fn not_sent(path: &Path, why: &str) {
    note(&format!("{} is not sent to the nodes, which copy it themselves: {why}", shown(path)), None);
}

/// The files that the containers of the step are made of, and what they must be.
fn files(Container { image, settings }: Container, config: Config) -> Vec<(PathBuf, Requirements)> {
    let requirements = Requirements::new(&image, &config.policy);
    let image = match image {
        ImageSource::File { path, .. } | ImageSource::Stored { path, .. } => Some((path, requirements)),
        // There is no file yet. The nodes copy it when one of them has made it.
        ImageSource::Unfetched(_) | ImageSource::Recorded => None,
    };
    let site = config.settings.mounts.unwrap_or_default();
    let data = site.into_iter().chain(settings.mounts.into_iter().flatten()).filter_map(|mount| match mount
        .source
    {
        MountSource::Squashfs(path) => Some((path, Requirements::default())),
        MountSource::Bind(_) | MountSource::Tmpfs(_) | MountSource::Umount => None,
    });
    image.into_iter().chain(data).collect()
}

/// What can be sent of a file.
pub(super) enum Ready {
    /// It is a directory.
    Nothing,
    Copy(Copied),
    /// A copy that is made while the tasks run; of which cache, and of what.
    Later(Cache, FileIdentity),
}

/// A copy in this machine's cache.
pub(super) struct Copied {
    cache: Cache,
    /// Nobody removes the copy as long as this is open.
    _in_use: File,
    pub identity: FileIdentity,
    pub digest: Digest,
}

impl Copied {
    /// Where it is.
    pub fn path(&self) -> PathBuf {
        self.cache.copy_path(self.digest)
    }
}

/// Copies a file to this machine's cache, unless it is a directory or can be copied while the tasks run.
pub(super) fn prepare(
    opened: OpenedImage,
    requirements: &Requirements,
    staging: &StagingOptions,
    speaks: bool,
) -> Result<Ready, StageError> {
    if opened.kind == ImageKind::Directory {
        return Ok(Ready::Nothing);
    }
    let content_matters = requirements.content_matters();
    let (cache, source) = match wanted(&opened, staging.verifies(content_matters), staging) {
        Ok(Wanted::Copy(cache, source)) => (cache, source),
        Ok(_) => return Err(StageError::Cache("no copies are made here".to_owned())),
        Err(StageError::Refused(failure)) => return Err(StageError::Cache(failure.message)),
        Err(trouble) => return Err(trouble),
    };
    if staging.reads_through(&source, content_matters) {
        let identity = source.identity;
        return Ok(Ready::Later(cache, identity));
    }
    let (mut stderr, mut silent) = (StderrSink::new(&opened.path), Silent);
    let sink: &mut dyn ProgressSink = if speaks { &mut stderr } else { &mut silent };
    let (file, digest, _) = obtain(&cache, &source, staging, sink)?;
    if !is_still_there(&opened) {
        return Err(StageError::Source(changing(&opened.path)));
    }
    let identity = source.identity;
    requirements.check_content(digest)?;
    // The nodes compare: a source that has been replaced since then would only make them copy it.
    Ok(Ready::Copy(Copied { cache, _in_use: file, identity, digest }))
}

/// Sends a copy to the nodes, unless they have been sent it before.
fn send(
    step: &Step,
    nodes: Option<&str>,
    path: &Path,
    copied: &Copied,
    staging: &StagingOptions,
    deliveries: &mut Vec<Delivery>,
) -> Result<(), String> {
    if step.has_sent(&copied.cache, copied.digest, nodes) {
        return Ok(());
    }
    let delivery = Delivery::new("", path, copied.identity.clone(), Some(copied.digest))?;
    let target = staging.directory.join(delivery.file());
    // Also when sending fails: the nodes then remove what they got.
    deliveries.push(delivery);
    let to = nodes.map_or_else(String::new, |nodes| format!(" to {nodes}"));
    let mut progress =
        Progress::new(format!("{}: {}: sending{to}", mizzen_core::node_name(), shown(path)), 0, true);
    step.transmit(&copied.path(), &target, &mut || progress.wait())?;
    step.remember(copied, nodes);
    Ok(())
}

impl Step {
    /// The step's nodes as Slurm writes them: `node[1-4]`.
    fn nodes(&self) -> Option<String> {
        let words = ["--noheader", "--format=%N", "--steps", &self.name];
        let found = Command::new(self.programs.join("squeue"))
            .args(words)
            .stdin(Stdio::null())
            .output()
            .or_debug("squeue does not tell the nodes of the step")?;
        let nodes = String::from_utf8(found.stdout).ok()?.trim().to_owned();
        (found.status.success() && !nodes.is_empty() && !nodes.contains(char::is_whitespace)).then_some(nodes)
    }

    fn job(&self) -> &str {
        self.name.split('.').next().unwrap_or_default()
    }

    /// The file that remembers what this step's job has sent, and the line for this.
    fn record(&self, digest: Digest, nodes: Option<&str>) -> Option<(String, String)> {
        Some((format!("{SENT}{}", self.job()), format!("{digest} {}\n", nodes?)))
    }

    /// Whether the nodes have been sent this before.
    fn has_sent(&self, cache: &Cache, digest: Digest, nodes: Option<&str>) -> bool {
        self.record(digest, nodes).is_some_and(|(name, line)| remembers(cache, &name, &line))
    }

    pub(super) fn remember(&self, copied: &Copied, nodes: Option<&str>) {
        if let Some((name, line)) = self.record(copied.digest, nodes) {
            // Without it the next step sends again.
            remember(&copied.cache, &name, &line).or_debug("the next step will be sent this image again");
        }
    }

    /// Has Slurm send a file, and does something now and then.
    pub(super) fn transmit(
        &self,
        file: &Path,
        target: &Path,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), String> {
        let failed = |error: std::io::Error| format!("sbcast: {}", cause(&error));
        let (reader, writer) = std::io::pipe().map_err(failed)?;
        let mut command = Command::new(self.programs.join("sbcast"));
        command.arg(format!("--jobid={}", self.name)).args([file, target]);
        // A file that is there already is not ours to write to. Its own times would make it look like one that was left
        // behind; and a program's libraries are of no use here.
        for name in ["SBCAST_FORCE", "SBCAST_PRESERVE", "SBCAST_SEND_LIBS"] {
            command.env_remove(name);
        }
        command.stdin(Stdio::null());
        let sender = getpid();
        let pid = sys::spawn_child(move || {
            let _ = set_pdeathsig(Signal::SIGTERM);
            if getppid() != sender {
                return i32::from(FailureKind::CannotStart.exit_code());
            }
            let Ok(output) = writer.try_clone() else {
                return i32::from(FailureKind::CannotStart.exit_code());
            };
            let error = command.stdout(output).stderr(writer).exec();
            // The standard streams are the pipe by now.
            let _ = write!(std::io::stderr(), "sbcast: {}", cause(&error));
            i32::from(FailureKind::CannotStart.exit_code())
        })
        .map_err(failed)?;
        let said = listen(reader, meanwhile);
        match waitpid(pid, None) {
            Ok(WaitStatus::Exited(_, 0)) => Ok(()),
            Ok(WaitStatus::Signaled(_, signal, _)) => Err(format!("sbcast was ended by {signal}")),
            _ => Err(said
                .lines()
                .next()
                .map_or_else(|| "sbcast failed".to_owned(), |line| quote(line.as_bytes()))),
        }
    }
}

/// Reads to the end, and does something now and then.
fn listen(mut pipe: PipeReader, meanwhile: &mut dyn FnMut()) -> String {
    let (mut said, mut buffer) = (Vec::new(), [0; 512]);
    loop {
        let ready = poll(&mut [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)], PollTimeout::from(200_u8));
        if ready == Ok(0) {
            meanwhile();
            continue;
        }
        match pipe.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => said.extend(buffer[..count].iter().take(WORDS.saturating_sub(said.len()))),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    String::from_utf8_lossy(&said).into_owned()
}

/// Whether this line was written for the job.
fn remembers(cache: &Cache, name: &str, line: &str) -> bool {
    let mut text = String::new();
    let read = cache.open_file(name).map(|file| file.take(1 << 20).read_to_string(&mut text));
    matches!(read, Ok(Ok(_))) && text.split_inclusive('\n').any(|known| known == line)
}

fn remember(cache: &Cache, name: &str, line: &str) -> std::io::Result<()> {
    let flags = OFlags::WRONLY
        | OFlags::APPEND
        | OFlags::CREATE
        | OFlags::NOFOLLOW
        | OFlags::NONBLOCK
        | OFlags::CLOEXEC;
    File::from(openat(&cache.dir, name, flags, Mode::from_raw_mode(0o600))?).write_all(line.as_bytes())
}
