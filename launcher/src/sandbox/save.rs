//! Saves a container: what its root has become is written as an image when the program has ended, and with it all tasks of the
//! step on this node.
//!
//! For that the launcher does not become the program, but stays as its parent. The writer is the importer, which converts
//! directories anyway: it is started in the container, by a descriptor from outside, on the root alone, without what is
//! mounted over it. It runs where the task ran, within the limits of the job.
//!
//! Runs as the user, in the container's namespaces; [`SaveTarget::open`] on the host.

use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use mizzen_core::failure::{FailureKind, quote};
use mizzen_core::mountinfo::open_on_same_mount;
use mizzen_core::{Failure, SlurmConf, fs_server, importer};
use nix::fcntl::AtFlags as NixAtFlags;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{Pid, dup2_stdin, dup2_stdout, execveat, fchdir, geteuid, getpid, getppid};
use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags, accessat, fstat, open, openat};
use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, UnmountFlags, mount_bind, open_tree, unmount};
use rustix::thread::{CapabilitySet, capabilities, configure_capability_in_ambient_set, set_capabilities};

use super::exec::exec_program;
use super::wait::{self, End, Waiting};
use crate::plan::Program;
use crate::report::{megabytes, speaks_for_step};
use crate::sys;

/// A failure that the program's process hands to the launcher is no longer.
const FAILURE_LIMIT: usize = 4096;

/// Who else must have ended before the container is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    /// Nobody.
    None,
    /// The other tasks of the step on this node: slurmstepd's other children.
    Tasks,
}

/// The file that a container will be saved as.
pub struct SaveTarget {
    directory: OwnedFd,
    name: OsString,
    path: PathBuf,
    /// The program that writes it.
    writer: OwnedFd,
    /// Whether slurmstepd sends signals to all processes of a step, and not to the tasks alone, as with proctrack/cgroup.
    slurm_signals_all: bool,
    /// Whether progress is shown.
    speaks: bool,
}

/// How a program has ended whose container was to be saved.
pub struct Saved {
    /// As it would have ended by itself.
    pub end: End,
    /// What the user should know, or why there is no image.
    pub outcome: Result<String, Failure>,
}

impl SaveTarget {
    /// What can be known to fail at the end fails now. `writer` is the importer.
    pub fn open(path: &Path, writer: &Path) -> Result<SaveTarget, Failure> {
        let shown = |path: &Path| quote(path.as_os_str().as_bytes());
        let failed = |path: &Path, errno: Errno| Failure::caused_by(shown(path), errno);
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let name = path.file_name().filter(|_| !path.as_os_str().as_bytes().ends_with(b"/"));
        let is_directory =
            || Failure::new(format!("{}: is a directory", shown(path))).hint("name a file in it");
        let (Some(name), Some(parent)) = (name, path.parent()) else { return Err(is_directory()) };
        fs_server::refuse_foreign(path)?;
        let directory = openat(CWD, parent, flags | OFlags::DIRECTORY, Mode::empty())
            .map_err(|errno| failed(parent, errno))?;
        // In a directory where everybody can make names, another user may have mounted something on this one.
        let found = match open_on_same_mount(directory.as_fd(), name) {
            Err(error) if error.raw_os_error() == Some(libc::EXDEV) => fs_server::reach(path),
            opened => opened.map(File::from),
        };
        let found = found.and_then(|found| found.metadata()).ok();
        let leads_to_directory = || fs_server::is_directory(path);
        if found.as_ref().is_some_and(|found| found.is_dir() || found.is_symlink() && leads_to_directory()) {
            return Err(is_directory());
        }
        // As in /tmp: others' files can be replaced neither by a new one nor by renaming.
        let around = fstat(&directory).map_err(|errno| failed(parent, errno))?;
        let others = |uid: u32| uid != geteuid().as_raw();
        if others(around.st_uid)
            && around.st_mode & Mode::SVTX.bits() != 0
            && let Some(uid) = found.map(|found| found.uid()).filter(|uid| others(*uid))
        {
            return Err(Failure::new(format!(
                "{}: belongs to uid {uid}, and only they can replace it in this directory (it is sticky)",
                shown(path)
            ))
            .hint("take another name"));
        }
        accessat(&directory, ".", Access::WRITE_OK | Access::EXEC_OK, AtFlags::empty())
            .map_err(|errno| failed(parent, errno).or_hint("nobody but you can make a file in it for you"))?;
        let writer = openat(CWD, writer, flags, Mode::empty()).map_err(|errno| {
            Failure::caused_by(format!("cannot find the importer: {}", shown(writer)), errno)
                .hint("it writes images; `make install` and the package of mizzen put it there")
        })?;
        let conf = SlurmConf::read(std::env::var_os("SLURM_CONF").map(PathBuf::from).as_deref());
        let proctrack = conf.as_ref().and_then(|conf| conf.value("ProctrackType"));
        let slurm_signals_all = proctrack.is_some_and(|plugin| plugin != "proctrack/cgroup");
        let (name, path) = (name.to_owned(), path.to_owned());
        Ok(SaveTarget { directory, name, path, writer, slurm_signals_all, speaks: speaks_for_step() })
    }

    /// Runs the program to its end, waits for the others, and saves the container. Fails where the program does not start.
    pub fn run(&self, program: &Program, others: Others) -> Result<Saved, Failure> {
        let watched = watch_signals()?;
        let (end, mut signal) = self.run_program(program, &watched)?;
        if others == Others::Tasks {
            wait_for_tasks();
        }
        signal = signal.or_else(|| wait::pending(&watched));
        // The program may have got it, and be gone, before the launcher gets its own.
        if let End::Killed(killed_by) = end {
            signal = signal.or(Some(killed_by));
        }
        // Whoever ends a step in the middle does not want what is half done.
        if let Some(signal) = signal.filter(|signal| ENDING.contains(signal)) {
            let note = format!("{} is not written: the step got {signal}", self.shown());
            return Ok(Saved { end, outcome: Ok(note) });
        }
        Ok(Saved { end, outcome: self.save_and_tell(&watched) })
    }

    /// Saves the container as it is, without a program. What the user should know.
    pub fn save_now(&self) -> Result<String, Failure> {
        self.save_and_tell(&watch_signals()?)
    }

    fn save_and_tell(&self, watched: &SigSet) -> Result<String, Failure> {
        let size = self.save(watched).map_err(|failure| failure.about(self.shown()))?;
        Ok(format!("exported the container to {}, {}", self.shown(), megabytes(size)))
    }

    fn wait_for(&self, child: Pid, watched: &SigSet) -> io::Result<(End, Option<Signal>)> {
        let sends_to_all = self.slurm_signals_all.then(getppid);
        wait::wait_and_hand_on(&Waiting { child, watched, only: Some(child), sends_to_all })
    }

    fn shown(&self) -> String {
        quote(self.path.as_os_str().as_bytes())
    }

    fn run_program(&self, program: &Program, watched: &SigSet) -> Result<(End, Option<Signal>), Failure> {
        let failed = |what: &str, error: io::Error| Failure::caused_by(format!("cannot {what}"), error);
        let (failure, report) = io::pipe().map_err(|error| failed("make a pipe", error))?;
        let launcher = getpid();
        let child = sys::spawn_child(|| {
            // What ends the task ends its program, which Slurm knows nothing of.
            end_with(launcher);
            let _ = watched.thread_unblock();
            let failure = exec_program(program);
            let _ = (&report).write_all(failure.encode().as_bytes());
            i32::from(failure.kind.exit_code())
        })
        .map_err(|error| failed("start the program", error))?;
        drop(report);
        // It ends when the program has been executed.
        let text = read_answer(failure);
        let ended = self.wait_for(child, watched).map_err(|error| failed("wait for the program", error))?;
        match text.is_empty() {
            true => Ok(ended),
            false => Err(Failure::decode(&text, FAILURE_LIMIT)),
        }
    }

    /// Writes the image; returns its size.
    fn save(&self, watched: &SigSet) -> Result<u64, Failure> {
        let failed = |what: &str, error: io::Error| Failure::caused_by(format!("cannot {what}"), error);
        let root = root_alone()
            .map_err(|errno| failed("take the container's root without its mounts", errno.into()))?;
        let (answer, to_parent) = io::pipe().map_err(|error| failed("make a pipe", error))?;
        let launcher = getpid();
        let child = sys::spawn_child(|| {
            end_with(launcher);
            let error = self.become_writer(&root, &to_parent, watched);
            let _ = (&to_parent).write_all(failed("start the importer", error).encode().as_bytes());
            1
        })
        .map_err(|error| failed("start the importer", error))?;
        drop(to_parent);
        // The answer is short enough to lie in the pipe meanwhile.
        let (end, _) =
            self.wait_for(child, watched).map_err(|error| failed("wait for the importer", error))?;
        let text = read_answer(answer);
        match end {
            End::Exited(0) => importer::decode_saved(&text),
            End::Exited(_) if !text.is_empty() => Err(Failure::decode(&text, FAILURE_LIMIT)),
            End::Exited(code) => Err(Failure::new(format!("the importer failed with exit code {code}"))
                .hint("mizzen and mizzen-import must be of the same version")),
            End::Killed(signal) => Err(Failure::new(format!("the importer was ended by {signal}")).hint(
                "a file that was there before is untouched; SIGKILL often means that memory ran out (--mem)",
            )),
        }
    }

    /// In the child: becomes the importer. Returns only why it could not.
    fn become_writer(&self, root: &OwnedFd, answer: &PipeWriter, watched: &SigSet) -> io::Error {
        let start = || -> io::Result<()> {
            dup2_stdin(File::open("/dev/null")?)?;
            dup2_stdout(answer)?;
            // Paths of the host mean nothing here.
            fchdir(&self.directory)?;
            keep_access();
            sys::close_on_exec_from(3)?;
            sys::keep_through_exec(root.as_raw_fd());
            let text = |bytes: &[u8]| CString::new(bytes).map_err(io::Error::from);
            let title = self.path.as_os_str().as_bytes();
            let source = format!("/proc/self/fd/{}", root.as_raw_fd());
            let mut words = vec![
                text(b"mizzen")?,
                text(importer::COMMAND.as_bytes())?,
                text(importer::SAVE_AS.as_bytes())?,
                text(title)?,
                text(b"--output")?,
                text(self.name.as_bytes())?,
            ];
            if !self.speaks {
                words.push(text(b"--quiet")?);
            }
            words.extend([text(b"--")?, text(source.as_bytes())?]);
            let terminal = std::env::var_os("TERM").unwrap_or_default();
            let variables = [text(&[b"TERM=", terminal.as_bytes()].concat())?];
            let _ = watched.thread_unblock();
            let Err(errno) = execveat(&self.writer, c"", &words, &variables, NixAtFlags::AT_EMPTY_PATH);
            Err(errno.into())
        };
        start().err().unwrap_or_else(|| io::Error::other("it did not start"))
    }
}

/// Keeps signals for whoever waits for a child.
fn watch_signals() -> Result<SigSet, Failure> {
    let failed = |what: &str, error: io::Error| Failure::caused_by(format!("cannot {what}"), error);
    // A caller that ignores it would have our own children vanish without a word.
    sys::reset_signal(Signal::SIGCHLD).map_err(|error| failed("reset SIGCHLD", error))?;
    let watched = wait::watched_signals();
    watched.thread_block().map_err(|errno| failed("block signals", errno.into()))?;
    Ok(watched)
}

/// What ends a step, as opposed to what programs make of other signals.
const ENDING: [Signal; 4] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGSTKFLT];

/// Has the calling process end with its parent.
fn end_with(parent: Pid) {
    let _ = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL);
    if getppid() != parent {
        sys::exit_now(i32::from(FailureKind::CannotStart.exit_code()));
    }
}

/// Images have files that not even their owner may read, as /etc/shadow with mode 0000. The user namespace gives the right to,
/// and the program that is executed next keeps it. Where it cannot, it says which file it is.
fn keep_access() {
    let kept = CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
    if let Ok(mut sets) = capabilities(None) {
        sets.inheritable |= kept & sets.permitted;
        let _ = set_capabilities(None, sets);
    }
    for capability in kept.iter() {
        let _ = configure_capability_in_ambient_set(capability, true);
    }
}

fn read_answer(mut pipe: PipeReader) -> Vec<u8> {
    let mut text = Vec::new();
    // What is cut off is no answer, which shows.
    let _ = pipe.by_ref().take(FAILURE_LIMIT as u64 * 4).read_to_end(&mut text);
    text
}

/// The container's root without what is mounted on it.
fn root_alone() -> rustix::io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    match open_tree(CWD, "/", flags) {
        // Before Linux 5.2, or under a seccomp filter that does not know the call: on a mount point, for a moment.
        Err(Errno::NOSYS | Errno::PERM) => {
            let place = "/proc";
            mount_bind("/", place)?;
            let root = open(place, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
            unmount(place, UnmountFlags::DETACH)?;
            root
        }
        taken => taken,
    }
}

/// Waits for the end of slurmstepd's other children, which are the other tasks: it has forked all of them before one goes on.
fn wait_for_tasks() {
    while let Some(task) = other_task() {
        sys::wait_for_end(task);
    }
}

fn other_task() -> Option<i32> {
    let parent = getppid().as_raw();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(|pid: &i32| {
        let path = format!("/proc/{pid}");
        let own = std::fs::metadata(&path).is_ok_and(|found| found.uid() == geteuid().as_raw());
        let status = std::fs::read_to_string(format!("{path}/stat")).unwrap_or_default();
        // "pid (name) state parent …", and the name may be anything.
        let mut fields = status.rsplit(") ").next().unwrap_or_default().split(' ');
        let (state, found) = (fields.next(), fields.next().and_then(|parent| parent.parse().ok()));
        own && *pid != getpid().as_raw() && state != Some("Z") && found == Some(parent)
    })
}
