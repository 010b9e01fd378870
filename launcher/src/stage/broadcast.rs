//! Broadcast: srun's machine reads an image once, and Slurm's own tree of messages (sbcast) brings it to the nodes of the
//! step. Runs as the user on the host: in srun's hook, under the name `mizzen-broadcast`, and on the nodes.
//!
//!     srun's machine:  source -> copy in the user's cache here -> sbcast -> a file beside the cache of every node
//!     each node:       that file, if it is whole and the source is still the same -> the node's cache
//!
//! What is sent is the copy and not the source, because sbcast gives the files the mode of what it sends, in a directory
//! where others can look: a copy's mode lets nobody else read. And its digest is known then, so that the nodes can tell
//! whether all of it has arrived. sbcast makes no directories, so the file cannot go into the user's own at once.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{PipeReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, SystemTime};

use mizzen_core::config::Source;
use mizzen_core::failure::{FailureKind, cause, quote};
use mizzen_core::mountinfo::open_on_same_mount;
use mizzen_core::options::{MountOption, MountSource};
use mizzen_core::request::{self, Container, ImageSource};
use mizzen_core::staging::{Policy, decode_refusal};
use mizzen_core::{Config, Digest, Failure, Request};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::geteuid;
use rustix::fs::{AtFlags, Mode, OFlags, fstat, openat, statat, unlinkat};
use serde::{Deserialize, Serialize};

use super::cache::{self, Cache, describe};
use super::copy::verify;
use super::lock::Lock;
use super::obtain::{obtain, publish};
use super::source::{FileIdentity, SourceImage};
use super::{
    ProgressSink, Requirements, StageError, StagingOptions, StderrSink, Wanted, changing, is_still_there,
    note, open_as_user, progress, wanted, with_retries,
};
use crate::image::{ImageKind, OpenedImage, shown};
use crate::progress::Progress;
use crate::sys;
use crate::trace::OrDebug;

/// Begins the name of what remembers which nodes of a job have been sent an image.
pub const SENT: &str = "sent-";
/// A job that lasts longer sends again.
const REMEMBERED: Duration = Duration::from_secs(7 * 86400);
/// Nothing is written to a file for so long: whoever sent it, or waited for it, is gone.
const ABANDONED: Duration = Duration::from_secs(3600);
/// Of what sbcast says about many nodes, the beginning is enough.
const WORDS: usize = 4096;

/// A file that srun has sent to the nodes of a step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Delivery {
    /// Its name in the directory of the caches.
    file: String,
    /// Of what it is a copy.
    source: OsString,
    /// What srun's machine saw of the source.
    identity: FileIdentity,
    digest: String,
}

/// What srun's hook asks for: sends the images of a step to its nodes. Prints what the nodes must know, if there is
/// something, or why srun must not go on.
pub fn run(mut words: impl Iterator<Item = OsString>) -> ExitCode {
    // srun blocks what its thread for signals takes; Ctrl-C is to end this. An srun that ends waits for nothing.
    let _ = SigSet::empty().thread_set_mask();
    let _ = set_pdeathsig(Signal::SIGTERM);
    let step = words.next().unwrap_or_default().to_string_lossy().into_owned();
    let programs = PathBuf::from(words.next().unwrap_or_default());
    let config = words.next().map_or(Source::Default, |path| Source::Named(path.into()));
    let (text, code) = match send_all(&Step { name: step, programs }, &config) {
        Ok(deliveries) if deliveries.is_empty() => (String::new(), 0),
        Ok(deliveries) => (serde_json::to_string(&deliveries).unwrap_or_default(), 0),
        Err(failure) => (failure.encode(), 1),
    };
    let mut stdout = std::io::stdout();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => ExitCode::from(code),
        Err(_) => ExitCode::FAILURE,
    }
}

/// The step that is to be served.
struct Step {
    /// As `7.0`.
    name: String,
    /// Where Slurm's commands are.
    programs: PathBuf,
}

fn send_all(step: &Step, config: &Source) -> Result<Vec<Delivery>, Failure> {
    let text = std::env::var_os(request::VARIABLE).unwrap_or_default();
    let Request::Container(container) = Request::decode(&text.into_vec())? else { return Ok(Vec::new()) };
    let config = Config::load(config)?;
    let _mask = sys::FileMask::set(cache::MASK);
    let staging = StagingOptions::new(Policy::Broadcast, &config)?;
    let nodes = step.nodes();
    // One node reads once, whichever way.
    if nodes.as_deref().is_some_and(|nodes| !nodes.contains([',', '['])) {
        return Ok(Vec::new());
    }
    let site = config.settings.mounts.unwrap_or_default();
    // Nothing is sent before everything is known to be what it should be.
    let mut all = Vec::new();
    for (path, pin) in files(container, site) {
        match with_retries(|| open_as_user(&path), |opened| copied_here(opened, pin, &staging)) {
            Err(StageError::Cache(why)) => all.push((path, Err(why))),
            Err(StageError::Source(failure)) => return Err(failure),
            Err(StageError::Refused(failure)) => return Err(failure.about(shown(&path))),
            Ok(None) => {}
            Ok(Some(copied)) => all.push((path, Ok(copied))),
        }
    }
    let mut deliveries = Vec::new();
    for (path, copied) in all {
        let sent =
            copied.and_then(|copied| send(step, nodes.as_deref(), &path, &copied, &staging, &mut deliveries));
        if let Err(why) = sent {
            note(
                &format!("{} is not sent to the nodes, which copy it themselves: {why}", shown(&path)),
                None,
            );
        }
    }
    Ok(deliveries)
}

/// The files that the containers of the step are made of.
fn files(Container { image, settings }: Container, site: Vec<MountOption>) -> Vec<(PathBuf, Option<Digest>)> {
    let image = match image {
        ImageSource::File { path, digest } => Some((path, digest)),
        ImageSource::Stored { path, .. } => Some((path, None)),
        // There is no file yet. The nodes copy it when one of them has made it.
        ImageSource::Unfetched(_) | ImageSource::Recorded => None,
    };
    let data = site.into_iter().chain(settings.mounts.into_iter().flatten()).filter_map(|mount| match mount
        .source
    {
        MountSource::Squashfs(path) => Some((path, None)),
        MountSource::Bind(_) | MountSource::Tmpfs(_) | MountSource::Umount => None,
    });
    image.into_iter().chain(data).collect()
}

/// A copy in this machine's cache.
struct Copied {
    cache: Cache,
    /// Nobody removes the copy as long as this is open.
    _in_use: File,
    identity: FileIdentity,
    digest: Digest,
}

/// Copies a file to this machine's cache, unless it is a directory.
fn copied_here(
    opened: OpenedImage,
    pin: Option<Digest>,
    staging: &StagingOptions,
) -> Result<Option<Copied>, StageError> {
    if opened.kind == ImageKind::Directory {
        return Ok(None);
    }
    let (cache, source) = match wanted(&opened, staging.verifies(pin.is_some()), staging) {
        Ok(Wanted::Copy(cache, source)) => (cache, source),
        Ok(_) => return Err(StageError::Cache("no copies are made here".to_owned())),
        Err(StageError::Refused(failure)) => return Err(StageError::Cache(failure.message)),
        Err(trouble) => return Err(trouble),
    };
    let (file, digest, _) = obtain(&cache, &source, staging, &mut StderrSink::new(&opened.path))?;
    if !is_still_there(&opened) {
        return Err(StageError::Source(changing(&opened.path)));
    }
    let identity = source.identity;
    Requirements::pinned(pin).check_content(digest)?;
    // The nodes compare: a source that has been replaced since then would only make them copy it.
    Ok(Some(Copied { cache, _in_use: file, identity, digest }))
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
    let job = step.name.split('.').next().unwrap_or_default();
    let record = nodes.map(|nodes| (format!("{SENT}{job}"), format!("{} {nodes}\n", copied.digest)));
    if record.as_ref().is_some_and(|(name, line)| remembers(&copied.cache, name, line)) {
        return Ok(());
    }
    let file =
        format!("{}{}", prefix(), random().map_err(|error| format!("/dev/urandom: {}", cause(&error)))?);
    let target = staging.directory.join(&file);
    // Also when sending fails: the nodes then remove what they got.
    deliveries.push(Delivery {
        file,
        source: path.into(),
        identity: copied.identity.clone(),
        digest: copied.digest.to_string(),
    });
    step.transmit(&copied.cache.copy_path(copied.digest), &target, path, nodes)?;
    if let Some((name, line)) = record {
        // Without it the next step sends again.
        remember(&copied.cache, &name, &line).or_debug("the next step will be sent this image again");
    }
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

    /// Has Slurm send a file.
    fn transmit(
        &self,
        file: &Path,
        target: &Path,
        shown_as: &Path,
        nodes: Option<&str>,
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
        let pid = sys::spawn_child(move || {
            let _ = set_pdeathsig(Signal::SIGTERM);
            let Ok(output) = writer.try_clone() else {
                return i32::from(FailureKind::CannotStart.exit_code());
            };
            let error = command.stdout(output).stderr(writer).exec();
            // The standard streams are the pipe by now.
            let _ = write!(std::io::stderr(), "sbcast: {}", cause(&error));
            i32::from(FailureKind::CannotStart.exit_code())
        })
        .map_err(failed)?;
        let to = nodes.map_or_else(String::new, |nodes| format!(" to {nodes}"));
        let mut progress =
            Progress::new(format!("{}: {}: sending{to}", mizzen_core::node_name(), shown(shown_as)), 0, true);
        let said = listen(reader, &mut || progress.wait());
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

fn random() -> std::io::Result<String> {
    let mut random = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut random)?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
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

/// Begins the names of the user's files among the caches of all users.
fn prefix() -> String {
    format!("mizzen-{}-broadcast-", geteuid())
}

impl StagingOptions {
    /// Notes what srun has sent to this node. Nonsense is as good as nothing: the image is copied then. A failure is what srun
    /// has failed with.
    pub fn expect(&mut self, variable: &OsStr) -> Result<(), Failure> {
        if let Some(failure) = decode_refusal(variable.as_encoded_bytes()) {
            return Err(failure);
        }
        let deliveries: Vec<Delivery> =
            serde_json::from_slice(variable.as_encoded_bytes()).unwrap_or_default();
        self.deliveries = deliveries
            .into_iter()
            .filter(|delivery| delivery.file.starts_with(&prefix()) && !delivery.file.contains('/'))
            .collect();
        Ok(())
    }

    /// Makes the file that srun has sent the copy of this source, if there is one. The caller has the source's lock.
    pub(super) fn adopt(
        &self,
        cache: &Cache,
        source: &SourceImage,
        lock: &Lock,
        sink: &mut dyn ProgressSink,
    ) -> Option<(File, Digest)> {
        let delivery = self.delivery_of(source.path)?;
        // It was sent before this: what is in it is older than what we see.
        if !delivery.identity.is_same_elsewhere(&source.identity) {
            return None;
        }
        match delivery.adopt(&self.directory, cache, source, lock, sink) {
            Ok(adopted) => adopted,
            Err(why) => {
                note(&format!("{}: what srun has sent cannot be used: {why}", shown(source.path)), None);
                None
            }
        }
    }

    /// Removes what srun has sent and nobody needs any more.
    pub fn discard(&self, source: &Path) {
        if let Some(delivery) = self.delivery_of(source) {
            let _ = std::fs::remove_file(self.directory.join(&delivery.file));
        }
    }

    fn delivery_of(&self, source: &Path) -> Option<&Delivery> {
        self.deliveries.iter().find(|delivery| Path::new(&delivery.source) == source)
    }
}

impl Delivery {
    /// None if it has not arrived, or not as a whole: srun has told the user.
    fn adopt(
        &self,
        directory: &Path,
        cache: &Cache,
        source: &SourceImage,
        lock: &Lock,
        sink: &mut dyn ProgressSink,
    ) -> Result<Option<(File, Digest)>, String> {
        let identity = &source.identity;
        let digest = Digest::parse(&self.digest).ok_or("its digest is none")?;
        let Some(arrived) = cache.take(directory, &self.file, identity.size).map_err(describe)? else {
            return Ok(None);
        };
        let mut progress = progress(source.path, "verifying what srun has sent", identity.size);
        let mut say = lock.progress_writer(identity.size);
        verify(&arrived.file, digest, identity.size, &mut |bytes| {
            progress.advance(bytes);
            say(bytes);
        })?;
        let unchanged = FileIdentity::at(source.path).is_ok_and(|now| now == *identity);
        if !unchanged {
            return Err(changing(source.path).message);
        }
        let file = publish(cache, source, arrived, digest, sink).map_err(describe)?;
        Ok(Some((file, digest)))
    }
}

/// Removes what broadcasts have left that nobody waits for any more: beside the user's cache, and the notes in it.
pub fn sweep(cache: &Cache) {
    let now = SystemTime::now();
    let is_older = |seconds: i64, age: Duration| {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
        now.duration_since(time).is_ok_and(|passed| passed > age)
    };
    for name in cache.names(SENT).unwrap_or_default() {
        let stat = statat(&cache.dir, &*name, AtFlags::SYMLINK_NOFOLLOW);
        if stat.is_ok_and(|stat| is_older(stat.st_mtime, REMEMBERED)) {
            let _ = cache.remove(&name);
        }
    }
    let (Some(directory), prefix) = (cache.path.parent(), prefix()) else { return };
    let Ok(all) = File::open(directory) else { return };
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if !name.as_encoded_bytes().starts_with(prefix.as_bytes()) {
            continue;
        }
        // Everybody can make such names.
        let stat = open_on_same_mount(all.as_fd(), &name).and_then(|found| Ok(fstat(found)?));
        let Ok(stat) = stat else { continue };
        if stat.st_uid == geteuid().as_raw() && is_older(stat.st_mtime, ABANDONED) {
            let _ = unlinkat(&all, &name, AtFlags::empty());
        }
    }
}
