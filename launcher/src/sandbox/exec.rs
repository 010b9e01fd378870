//! Starts the program, inside the container. Nothing of the container is loaded or looked up here except the
//! program itself: the launcher has no libraries and asks no name service.

use std::ffi::{CString, OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::failure::quote;
use nix::errno::Errno;
use nix::sys::signal::Signal;
use nix::unistd::{chdir, execve};

use crate::image::architecture::{Architecture, host_architecture};
use crate::plan::Program;
use crate::sys;

/// Why there is no program, and the exit code that says so.
#[derive(Debug)]
pub struct Unstartable {
    /// 125: no container; 126: not executable; 127: not found.
    pub code: u8,
    /// What to tell.
    pub failure: Failure,
}

impl From<Failure> for Unstartable {
    fn from(failure: Failure) -> Unstartable {
        Unstartable { code: 125, failure }
    }
}

/// Becomes the program of the plan; returns only why it could not.
pub fn start(program: &Program) -> Unstartable {
    match prepare(program) {
        Err(failure) => failure.into(),
        Ok((argv, environment)) => execute(program, &argv, &environment),
    }
}

fn prepare(program: &Program) -> Result<(Vec<CString>, Vec<CString>), Failure> {
    let workdir = &program.workdir;
    chdir(&workdir.value).map_err(|errno| {
        let shown = quote(workdir.value.as_os_str().as_bytes());
        Failure::new(format!("cannot start in {shown} ({}): {}", workdir.why, errno.desc()))
            .hint("it must be a directory inside the container; a mount can bring one of the host's")
    })?;
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
    sys::close_on_exec_from(3).map_err(|error| Failure::new(format!("cannot close descriptors: {error}")))?;
    pmi.filter(|fd| *fd > 2).into_iter().for_each(sys::keep_through_exec);
    sys::reset_signal(Signal::SIGPIPE)
        .map_err(|error| Failure::new(format!("cannot reset SIGPIPE: {error}")))?;
    nix::sys::prctl::set_no_new_privs()
        .map_err(|errno| Failure::new(format!("cannot set no_new_privs: {}", errno.desc())))?;
    Ok((argv, environment))
}

fn execute(program: &Program, argv: &[CString], environment: &[CString]) -> Unstartable {
    let name = program.command.value.first().cloned().unwrap_or_default();
    let mut denied = None;
    for path in candidates(&name, &variable(program, "PATH")) {
        let Ok(file) = CString::new(path.as_os_str().as_bytes()) else { continue };
        let Err(errno) = execve(&file, argv, environment);
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
            } else if name.as_bytes().contains(&b'/') {
                "the path is looked up inside the container; a mount can bring files of the host".to_owned()
            } else {
                format!("PATH is {} there", quote(path.as_bytes()))
            };
            Unstartable { code: 127, failure: failure.hint(hint) }
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

fn not_executable(path: &Path, errno: Errno) -> Unstartable {
    let shown = quote(path.as_os_str().as_bytes());
    let (code, message, hint) = match errno {
        Errno::ENOENT => match interpreter(path) {
            Some(interpreter) => {
                let missing = quote(&interpreter);
                let dos = interpreter
                    .ends_with(b"\r")
                    .then_some("the script has DOS line ends; dos2unix changes them");
                (127, format!("{shown}: its interpreter {missing} is not in the container"), dos)
            }
            None => (
                127,
                format!("{shown}: its dynamic linker is not in the container"),
                Some("the program was made for another C library than the image's"),
            ),
        },
        Errno::EACCES if path.is_dir() => (126, format!("{shown}: is a directory"), None),
        Errno::EACCES => (126, format!("{shown}: {}", errno.desc()), Some("is it executable (chmod +x)?")),
        Errno::ENOEXEC => match architecture(path) {
            Some(made_for) => (
                126,
                format!(
                    "{shown}: made for {}, this node is {}",
                    made_for.name(),
                    host_architecture().map_or("another", Architecture::name)
                ),
                Some("choose nodes of that kind (srun --constraint), or get the image for this one"),
            ),
            None => (
                126,
                format!("{shown}: not a program for this machine, and no script with a #! line"),
                Some("run a script without #! through its shell: sh FILE"),
            ),
        },
        errno => (126, format!("{shown}: {}", errno.desc()), None),
    };
    let failure = Failure::new(message);
    Unstartable { code, failure: hint.map_or(failure.clone(), |hint| failure.hint(hint)) }
}

/// The machine that a program was made for, if it is another one's.
fn architecture(path: &Path) -> Option<Architecture> {
    Architecture::from_elf(&head(path)?).filter(|made_for| Some(*made_for) != host_architecture())
}

fn head(path: &Path) -> Option<Vec<u8>> {
    let mut head = vec![0; 256];
    let length = std::io::Read::read(&mut fs::File::open(path).ok()?, &mut head).ok()?;
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
