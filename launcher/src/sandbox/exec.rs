//! Starts the program, inside the container. Nothing of the container is loaded or looked up here except the
//! program itself: the launcher has no libraries and asks no name service.

use std::ffi::{CString, OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use mizzen_core::Failure;
use mizzen_core::failure::{FailureKind, cause, quote};
use mizzen_core::limits;
use nix::errno::Errno;
use nix::sys::signal::Signal;
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::{AccessFlags, access, chdir, execve};
use rustix::process::getcwd;
use tracing::debug;

use crate::image::architecture::{Architecture, host_architecture};
use crate::plan::Program;
use crate::sandbox::dangling::dangling_link;
use crate::sandbox::fake_root;
use crate::trace::OrDebug;
use crate::{raised_limits, sys};

/// As long as the watcher of a file server may take to tell the user.
const WATCHER_REPORTS: Duration = Duration::from_secs(4);

/// Becomes the program of the plan; returns only why it could not.
pub fn exec_program(program: &Program) -> Failure {
    match prepare(program) {
        Err(failure) => failure,
        Ok((argv, environment)) => execute(program, &argv, &environment),
    }
}

/// If the file server has failed, its watcher says so better than we could, and ends this process. Errors of this kind that
/// have another reason are told a little later.
fn wait_for_watcher_report(errno: Errno) {
    if matches!(errno, Errno::EIO | Errno::ENOTCONN | Errno::ECONNABORTED) {
        std::thread::sleep(WATCHER_REPORTS);
    }
}

const INSIDE: &str = "it must be a directory inside the container; a mount can bring one of the host's";

fn prepare(program: &Program) -> Result<(Vec<CString>, Vec<CString>), Failure> {
    let workdir = &program.workdir;
    chdir(&workdir.value).map_err(|errno| {
        wait_for_watcher_report(errno);
        let shown = quote(workdir.value.as_os_str().as_bytes());
        let failure = Failure::caused_by(format!("{}: cannot start in {shown}", workdir.why), errno);
        match dangling_link(&workdir.value) {
            Some(why) => failure.hint(why),
            None => failure.or_hint(INSIDE),
        }
    })?;
    // A descriptor that the caller has left open leads out (/proc/self/fd/N), and an image may name it.
    if !getcwd(Vec::new()).is_ok_and(|path| path.as_bytes().starts_with(b"/")) {
        let shown = quote(workdir.value.as_os_str().as_bytes());
        let message = format!("{}: cannot start in {shown}: it is not in the container", workdir.why);
        return Err(Failure::new(message).hint(INSIDE));
    }
    let text = |text: &OsStr| {
        CString::new(text.as_bytes())
            .map_err(|_| Failure::new(format!("NUL in \"{}\"", quote(text.as_bytes()))))
    };
    let argv = program.command.value.iter().map(|word| text(word)).collect::<Result<_, _>>()?;
    let environment = program.environment.iter().map(|variable| {
        let mut line = variable.name.clone();
        line.push("=");
        line.push(&variable.value);
        text(&line)
    });
    let environment = environment.collect::<Result<_, _>>()?;
    // The standard streams alone, and the descriptor over which Slurm's PMI2 talks to the program.
    let pmi: Option<i32> = variable(program, "PMI_FD").to_str().and_then(|number| number.parse().ok());
    sys::close_on_exec_from(3).map_err(|error| Failure::caused_by("cannot close descriptors", error))?;
    // A variable can name anything.
    let pmi = pmi.filter(|fd| *fd > 2 && sys::is_pmi_socket(*fd, program.is_task));
    pmi.into_iter().chain(program.kept.iter().copied()).for_each(sys::keep_through_exec);
    raised_limits::restore();
    nix::sys::prctl::set_no_new_privs()
        .map_err(|errno| Failure::new(format!("cannot set no_new_privs: {}", cause(&errno.into()))))?;
    if program.fake_root {
        // Without filters in the kernel, programs see what is refused.
        fake_root::pretend().or_debug("system calls of root's are refused");
    }
    Ok((argv, environment))
}

fn execute(program: &Program, argv: &[CString], environment: &[CString]) -> Failure {
    let name = program.command.value.first().cloned().unwrap_or_default();
    if name.is_empty() {
        let failure = Failure::new("the program's name is empty")
            .hint("a variable in its place is probably not set where the command was typed");
        return failure.of_kind(FailureKind::NotFound);
    }
    let mut denied = None;
    for path in candidates(&name, &variable(program, "PATH")) {
        let Ok(file) = CString::new(path.as_os_str().as_bytes()) else { continue };
        // Only for the program: we would end without a word if nobody read our standard error.
        let _ = sys::reset_signal(Signal::SIGPIPE);
        let Err(errno) = execve(&file, argv, environment);
        sys::ignore_signal(Signal::SIGPIPE);
        debug!(?path, %errno, "not executed");
        wait_for_watcher_report(errno);
        match errno {
            Errno::ENOENT | Errno::ENOTDIR if !path.exists() => {}
            Errno::EACCES if name.as_bytes().contains(&b'/') || denied.is_none() => {
                denied = Some((path, errno))
            }
            Errno::EACCES => {}
            errno => return not_executable(&path, errno),
        }
    }
    match denied {
        Some((path, errno)) => not_executable(&path, errno),
        None => {
            let failure =
                Failure::new(format!("{}: no such program in the container", quote(name.as_bytes())));
            let path = variable(program, "PATH");
            let hint = if name.as_bytes().contains(&b' ') {
                "all of it is taken as the program's name; leave the quotes away, or use sh -c".to_owned()
            } else if let Some(target) =
                name.as_bytes().contains(&b'/').then(|| fs::read_link(&name).ok()).flatten()
            {
                let target = quote(target.as_os_str().as_bytes());
                format!("it is a symbolic link to {target}, which is not in the container")
            } else if name.as_bytes().contains(&b'/') {
                "the path is looked up inside the container; a mount can bring files of the host".to_owned()
            } else {
                format!("PATH is {} there", quote(path.as_bytes()))
            };
            failure.hint(hint).of_kind(FailureKind::NotFound)
        }
    }
}

/// The possible paths of the program of this name, as a shell would look for them in `path`.
pub fn candidates(name: &OsStr, path: &OsStr) -> Vec<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return vec![PathBuf::from(name)];
    }
    std::env::split_paths(path)
        .map(|directory| if directory.as_os_str().is_empty() { PathBuf::from(".") } else { directory })
        .map(|directory| directory.join(name))
        .collect()
}

fn variable(program: &Program, name: &str) -> OsString {
    let found = program.environment.iter().find(|variable| variable.name == name);
    found.map(|variable| variable.value.clone()).unwrap_or_default()
}

/// How many scripts may be each other's interpreters: the kernel's limit is five.
const INTERPRETERS: usize = 5;

fn not_executable(path: &Path, errno: Errno) -> Failure {
    diagnose(path, errno, INTERPRETERS).about(quote(path.as_os_str().as_bytes()))
}

/// Why the kernel refuses to execute a file. What it says of a script is often meant for the script's interpreter.
fn diagnose(path: &Path, errno: Errno, depth: usize) -> Failure {
    if let Some(why) = interpreter(path)
        .filter(|_| depth > 0)
        .and_then(|interpreter| diagnose_interpreter(path, &interpreter, errno, depth))
    {
        return why;
    }
    match errno {
        Errno::ENOENT if path.metadata().is_err() => {
            Failure::new("is a symbolic link to nothing in the container").of_kind(FailureKind::NotFound)
        }
        Errno::ENOENT => hinted(
            FailureKind::NotFound,
            "its dynamic linker is not in the container".to_owned(),
            "the program was made for another C library than the image's",
        ),
        Errno::EACCES if path.is_dir() => hinted(
            FailureKind::NotExecutable,
            "is a directory".to_owned(),
            "name a program, not the directory in which it is",
        ),
        Errno::EACCES => {
            let hint = match statvfs(path) {
                Ok(found) if found.flags().contains(FsFlags::ST_NOEXEC) => {
                    "its file system is mounted noexec"
                }
                Ok(_) => "is it executable (chmod +x)?",
                Err(_) => "a directory on its path is closed to you",
            };
            hinted(FailureKind::NotExecutable, cause(&errno.into()), hint)
        }
        Errno::ENOEXEC => match architecture(path) {
            Some(made_for) => hinted(
                FailureKind::NotExecutable,
                format!(
                    "made for {}, this node is {}",
                    made_for.name(),
                    host_architecture().map_or("another", Architecture::name)
                ),
                "choose nodes of that kind (srun --constraint), or get the image for this one",
            ),
            None => hinted(
                FailureKind::NotExecutable,
                "not a program for this machine, and no script with a #! line".to_owned(),
                "run a script without #! through its shell: sh FILE",
            ),
        },
        Errno::EIO => hinted(
            FailureKind::NotExecutable,
            cause(&errno.into()),
            "a part of the image cannot be read; copy the image again, or make it again",
        ),
        Errno::ELOOP => hinted(
            FailureKind::NotExecutable,
            cause(&errno.into()),
            "a symbolic link in the container leads back to itself",
        ),
        errno => {
            let error = std::io::Error::from(errno);
            let hint = limits::hint(errno as i32);
            let failure = Failure::new(cause(&error)).of_kind(FailureKind::NotExecutable);
            hint.into_iter().fold(failure, Failure::hint)
        }
    }
}

fn hinted(kind: FailureKind, message: String, hint: &str) -> Failure {
    Failure::new(message).hint(hint).of_kind(kind)
}

/// What is wrong with the interpreter of a script; none if it is the script itself that is refused.
fn diagnose_interpreter(script: &Path, interpreter: &[u8], errno: Errno, depth: usize) -> Option<Failure> {
    let file = Path::new(OsStr::from_bytes(interpreter));
    let shown = quote(interpreter);
    match errno {
        Errno::ENOENT if file.symlink_metadata().is_err() => {
            let message = format!("its interpreter {shown} is not in the container");
            Some(hinted(FailureKind::NotFound, message, missing_interpreter(script, interpreter)))
        }
        Errno::EACCES if access(script, AccessFlags::X_OK).is_err() => None,
        Errno::ENOEXEC if interpreter.is_empty() => Some(hinted(
            FailureKind::NotExecutable,
            "its #! line is empty".to_owned(),
            "name its interpreter: #!/bin/sh",
        )),
        _ => Some(diagnose(file, errno, depth - 1).about(format!("its interpreter {shown}"))),
    }
}

/// What to do about a script without its interpreter.
fn missing_interpreter(script: &Path, interpreter: &[u8]) -> &'static str {
    if interpreter.ends_with(b"\r") {
        return "the script has DOS line ends; dos2unix changes them";
    }
    // Slurm's name for the copy of a batch script.
    if script.file_name().is_some_and(|name| name == "slurm_script") {
        return "the script runs in the container, so the image needs it; --no-container-script runs the script on the node";
    }
    "the image needs it, or the script another first line"
}

/// The machine that a program was made for, if it is another one's.
fn architecture(path: &Path) -> Option<Architecture> {
    Architecture::from_elf(&head(path)?).filter(|made_for| Some(*made_for) != host_architecture())
}

fn head(path: &Path) -> Option<Vec<u8>> {
    // A FIFO or a device must not be waited for.
    let file = fs::metadata(path).ok()?.is_file().then(|| fs::File::open(path).ok())??;
    let mut head = vec![0; 256];
    let length = std::io::Read::read(&mut &file, &mut head).ok()?;
    head.truncate(length);
    Some(head)
}

/// The interpreter that a script's first line names.
fn interpreter(path: &Path) -> Option<Vec<u8>> {
    let head = head(path)?;
    let line = head.split(|byte| *byte == b'\n').next()?.strip_prefix(b"#!")?;
    let word = line.trim_ascii_start().split(|byte| b" \t".contains(byte)).next()?;
    Some(OsString::from_vec(word.to_vec()).into_vec())
}
