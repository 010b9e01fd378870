//! The image's entrypoint, once for a step on a node, before its tasks. Runs as the user, inside the container.
//!
//! An entrypoint prepares something, a variable or a file, and becomes the program that it is given: `exec "$@"`. Were it to do so for
//! every task, a step of 64 would print 64 banners and write the same file 64 times. So it is given a program of ours, which
//! notes the environment and the directory that it finds; all tasks have what the entrypoint has changed.
//!
//! That program is this one, by a descriptor: the image has no place for its file. What it notes goes into memory rather than
//! into a pipe, for a service that the entrypoint starts may keep every descriptor open.

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use mizzen_core::Failure;
use mizzen_core::failure::{quote, quote_up_to};
use mizzen_core::settings::Workdir;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl, open};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{Pid, dup2_stderr, dup2_stdin, dup2_stdout};

use crate::options::RunOptions;
use crate::plan::{Explained, Facts, Program};
use crate::{sandbox, sys};

/// What the program that stands for the tasks' is given as its first argument.
const NOTE: &str = "mizzen-note-environment";
/// Where an inherited descriptor is found.
const DESCRIPTORS: &str = "/proc/self/fd/";
/// Scripts choose small numbers for their own descriptors.
const FIRST_DESCRIPTOR: i32 = 100;
/// Longer than most entrypoints take.
const PATIENCE: Duration = Duration::from_secs(30);
/// What is told of the output of one that fails.
const LAST_LINES: usize = 3;
const LAST_BYTES: u64 = 1000;

/// Describe one task and not the others: an entrypoint that runs for all of them does not see them.
const OF_ONE_TASK: [&str; 6] =
    ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID", "PMI_RANK", "PMI_FD", "PMIX_RANK"];
/// Every shell sets these for itself.
const OF_SHELLS: [&str; 4] = ["_", "SHLVL", "PWD", "OLDPWD"];

/// Runs the entrypoint of the plan's facts to its end, and leaves there what it has changed. `wait_note` tells the user that it takes long.
pub fn run_once(
    options: &RunOptions,
    facts: &mut Facts,
    environment: &[(OsString, OsString)],
    wait_note: impl FnOnce(&str),
) -> Result<(), Failure> {
    let entrypoint = std::mem::take(&mut facts.entrypoint);
    let Some(name) = entrypoint.first().map(|name| quote(name.as_bytes())) else { return Ok(()) };
    let about = |failure: Failure| failure.about(format!("the image's entrypoint {name}"));
    let files = Files::open().map_err(|error| about(Failure::caused_by("cannot be prepared", error)))?;
    let environment: Vec<(OsString, OsString)> =
        environment.iter().filter(|(name, _)| !is_one_of(name, &OF_ONE_TASK)).cloned().collect();
    let command = entrypoint.into_iter().chain(files.command()).collect();
    let command = Explained { value: command, why: "the image's entrypoint".to_owned() };
    let mut program = Program::new(options, facts, command, &environment);
    program.kept = vec![files.launcher, files.noted_inherited];
    let logged = options.settings.entrypoint_log();
    let child = sys::spawn_child(|| files.become_entrypoint(&program, logged))
        .map_err(|error| about(Failure::caused_by("cannot be started", error)))?;
    let ended = wait(child, || {
        wait_note(&format!("the image's entrypoint {name} has not ended after 30 s; the tasks wait for it"))
    });
    if let Some(failure) = files.failure() {
        return Err(about(failure));
    }
    let output = if logged { None } else { last_lines(&files.output) };
    let failed = |what: String| {
        let message =
            output.as_ref().map_or(what.clone(), |lines| format!("{what}; its last lines: {lines}"));
        about(Failure::new(message))
    };
    match ended {
        Ok(WaitStatus::Exited(_, 0)) => {}
        Ok(WaitStatus::Exited(_, code)) => {
            return Err(failed(format!("exit code {code}")).hint(hint_for_output(logged)));
        }
        Ok(WaitStatus::Signaled(_, signal, _)) => {
            return Err(failed(format!("ended by {signal}")).hint(hint_for_output(logged)));
        }
        Ok(_) | Err(_) => return Err(failed("cannot be waited for".to_owned())),
    }
    let Some(noted) = files.noted() else {
        return Err(failed("ended without starting the program that it was given".to_owned()).hint(
            "it does not end in `exec \"$@\"`: leave --container-entrypoint out and name what is to run, or use `srun mizzen run --entrypoint`",
        ));
    };
    adopt(options, facts, &program, noted);
    Ok(())
}

fn hint_for_output(logged: bool) -> &'static str {
    if logged {
        "what it has printed is above"
    } else {
        "--container-entrypoint-log shows all that it prints"
    }
}

/// What the entrypoint leaves behind.
#[derive(Debug, PartialEq, Eq)]
struct Noted {
    directory: PathBuf,
    environment: Vec<(OsString, OsString)>,
}

fn adopt(options: &RunOptions, facts: &mut Facts, given: &Program, noted: Noted) {
    let own = |name: &OsStr| is_one_of(name, &OF_ONE_TASK) || is_one_of(name, &OF_SHELLS);
    let before = |name: &OsStr| {
        given.environment.iter().find(|variable| variable.name == name).map(|variable| &variable.value)
    };
    let set = noted.environment.iter().filter(|(name, value)| !own(name) && before(name) != Some(value));
    let mut changes: Vec<(OsString, Option<OsString>)> =
        set.map(|(name, value)| (name.clone(), Some(value.clone()))).collect();
    let stayed = |name: &OsStr| noted.environment.iter().any(|(known, _)| known == name);
    let unset = given.environment.iter().filter(|variable| !own(&variable.name) && !stayed(&variable.name));
    changes.extend(unset.map(|variable| (variable.name.clone(), None)));
    facts.entrypoint_changes = changes;
    // Who names a directory means it. Else a program starts where its entrypoint has gone.
    let is_named = matches!(options.settings.workdir, Some(Workdir::Directory(_)));
    if !is_named && noted.directory != facts.workdir {
        facts.workdir = noted.directory;
        facts.workdir_why = "the image's entrypoint".to_owned();
    }
}

fn is_one_of(name: &OsStr, names: &[&str]) -> bool {
    names.iter().any(|known| name == *known)
}

/// Everything by which the entrypoint and this process hear of each other.
struct Files {
    /// This program, by a number that passes through exec.
    launcher: i32,
    /// What the program notes.
    noted: File,
    /// The same, by a number that passes through exec.
    noted_inherited: i32,
    /// What the entrypoint prints, unless the user is to see it.
    output: File,
    /// Why it could not be executed.
    failure: File,
}

impl Files {
    fn open() -> io::Result<Files> {
        let in_memory = || memfd_create(c"mizzen-entrypoint", MFdFlags::MFD_CLOEXEC).map(File::from);
        let launcher = open("/proc/self/exe", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
        let noted = in_memory()?;
        Ok(Files {
            launcher: inheritable(&launcher)?,
            noted_inherited: inheritable(&noted)?,
            noted,
            output: in_memory()?,
            failure: in_memory()?,
        })
    }

    /// The program in the place of the tasks'.
    fn command(&self) -> [OsString; 3] {
        [
            format!("{DESCRIPTORS}{}", self.launcher).into(),
            NOTE.into(),
            self.noted_inherited.to_string().into(),
        ]
    }

    /// The child: returns only if it cannot be executed.
    fn become_entrypoint(&self, program: &Program, logged: bool) -> i32 {
        // It ends with the task that waits for it; services that it has started end with the step.
        let _ = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL);
        let redirected = File::open("/dev/null").and_then(|null| {
            dup2_stdin(&null)?;
            if !logged {
                dup2_stdout(&self.output)?;
                dup2_stderr(&self.output)?;
            }
            Ok(())
        });
        let failure = match redirected {
            Ok(()) => sandbox::exec_program(program),
            Err(error) => Failure::caused_by("cannot redirect its streams", error),
        };
        let _ = (&self.failure).write_all(failure.encode().as_bytes());
        i32::from(failure.kind.exit_code())
    }

    fn failure(&self) -> Option<Failure> {
        let text = read_all(&self.failure).ok().filter(|text| !text.is_empty())?;
        Some(Failure::decode(&text, 4096))
    }

    fn noted(&self) -> Option<Noted> {
        decode(&read_all(&self.noted).ok()?)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = (nix::unistd::close(self.launcher), nix::unistd::close(self.noted_inherited));
    }
}

/// A second number, out of the way of those that scripts choose, which passes through exec.
fn inheritable(file: &impl AsFd) -> io::Result<i32> {
    let duplicate = |first| fcntl(file, FcntlArg::F_DUPFD(first));
    // Where the limit on open files is very small.
    Ok(duplicate(FIRST_DESCRIPTOR).or_else(|_| duplicate(10))?)
}

fn read_all(file: &File) -> io::Result<Vec<u8>> {
    let length = file.metadata()?.len();
    let mut text = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    file.read_exact_at(&mut text, 0)?;
    Ok(text)
}

/// Waits for the child; says so if that takes long.
fn wait(child: Pid, note: impl FnOnce()) -> nix::Result<WaitStatus> {
    if let Ok(process) = sys::pidfd_of(child.as_raw()) {
        let timeout = PollTimeout::try_from(PATIENCE).unwrap_or(PollTimeout::MAX);
        if ended_within(&process, timeout) == Ok(false) {
            note();
        }
    }
    loop {
        match waitpid(child, None) {
            Err(Errno::EINTR) => {}
            ended => return ended,
        }
    }
}

fn ended_within(process: &OwnedFd, timeout: PollTimeout) -> nix::Result<bool> {
    poll(&mut [PollFd::new(process.as_fd(), PollFlags::POLLIN)], timeout).map(|ready| ready > 0)
}

/// The end of what was printed, in one line.
fn last_lines(output: &File) -> Option<String> {
    let length = output.metadata().ok()?.len();
    let mut text = vec![0; usize::try_from(length.min(LAST_BYTES)).ok()?];
    output.read_exact_at(&mut text, length.saturating_sub(LAST_BYTES)).ok()?;
    let lines: Vec<&[u8]> =
        text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii).filter(|line| !line.is_empty()).collect();
    let last = lines.get(lines.len().saturating_sub(LAST_LINES)..)?;
    let shown: Vec<String> = last.iter().map(|line| quote_up_to(line, 200)).collect();
    (!shown.is_empty()).then(|| shown.join(" | "))
}

/// The first line of a note is the directory, the others are the variables; each ends in a NUL.
fn encode(directory: &Path, environment: impl Iterator<Item = (OsString, OsString)>) -> Vec<u8> {
    let mut text = [directory.as_os_str().as_bytes(), b"\0"].concat();
    for (name, value) in environment {
        text.extend([name.as_bytes(), b"=", value.as_bytes(), b"\0"].concat());
    }
    text
}

fn decode(text: &[u8]) -> Option<Noted> {
    let mut lines = text.strip_suffix(b"\0")?.split(|byte| *byte == 0);
    let directory = PathBuf::from(OsString::from_vec(lines.next()?.to_vec()));
    let pair = |line: &[u8]| {
        let equals = line.iter().position(|byte| *byte == b'=')?;
        Some((
            OsStr::from_bytes(&line[..equals]).to_owned(),
            OsStr::from_bytes(&line[equals + 1..]).to_owned(),
        ))
    };
    Some(Noted { directory, environment: lines.filter_map(pair).collect() })
}

/// Whether this process is the one that an entrypoint was given: the number of the descriptor that it writes to.
pub fn descriptor_to_note(called: &OsStr, words: impl Iterator<Item = OsString>) -> Option<OsString> {
    called.as_bytes().starts_with(DESCRIPTORS.as_bytes()).then_some(())?;
    match words.collect::<Vec<_>>().as_slice() {
        [note, descriptor] if note == NOTE => Some(descriptor.clone()),
        _ => None,
    }
}

/// The program that an entrypoint was given.
pub fn note(descriptor: &OsStr) -> ExitCode {
    let directory = std::env::current_dir().unwrap_or_else(|_| "/".into());
    let text = encode(&directory, std::env::vars_os());
    let file = OpenOptions::new().write(true).truncate(true).open(Path::new(DESCRIPTORS).join(descriptor));
    match file.and_then(|mut file| file.write_all(&text)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mizzen_core::Settings;

    fn pairs(list: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
        list.iter().map(|(name, value)| (name.into(), value.into())).collect()
    }

    #[test]
    fn a_note_is_read_as_it_was_written() {
        let environment = pairs(&[("A", "1=2\n3"), ("B", "")]);
        let text = encode(Path::new("/a b"), environment.clone().into_iter());
        assert_eq!(decode(&text), Some(Noted { directory: "/a b".into(), environment }));
        assert_eq!(decode(b""), None);
        assert_eq!(decode(b"/half"), None);
    }

    #[test]
    fn tasks_have_what_the_entrypoint_has_changed() {
        let given = |workdir: Option<&str>| {
            let options = RunOptions {
                settings: Settings {
                    workdir: workdir.map(|path: &str| Workdir::Directory(path.into())),
                    ..Settings::default()
                },
                ..RunOptions::default()
            };
            let host = pairs(&[("KEPT", "1"), ("CHANGED", "old"), ("GONE", "x")]);
            let mut facts =
                Facts { workdir: workdir.unwrap_or("/work").into(), image: "/i".into(), ..Facts::default() };
            let command = Explained { value: vec!["x".into()], why: String::new() };
            let program = Program::new(&options, &facts, command, &host);
            let mut after: Vec<(OsString, OsString)> = program
                .environment
                .iter()
                .map(|variable| (variable.name.clone(), variable.value.clone()))
                .collect();
            after.retain(|(name, _)| name != "GONE" && name != "CHANGED" && name != "PWD");
            after.extend(pairs(&[
                ("CHANGED", "new"),
                ("NEW", "n"),
                ("SHLVL", "2"),
                ("_", "x"),
                ("PMI_RANK", "0"),
                ("PWD", "/opt"),
            ]));
            adopt(&options, &mut facts, &program, Noted { directory: "/opt".into(), environment: after });
            facts
        };
        let set = |name: &str, value: &str| (OsString::from(name), Some(OsString::from(value)));
        let changes = vec![set("CHANGED", "new"), set("NEW", "n"), ("GONE".into(), None)];
        assert_eq!((given(None).entrypoint_changes, given(None).workdir), (changes, "/opt".into()));
        assert_eq!(given(Some("/mine")).workdir, Path::new("/mine"));
    }
}
