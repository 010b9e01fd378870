//! A program of mizzen's that another one starts and asks something: one line on standard output is the answer, or with exit code
//! 1 a failure, which the asker takes over whole. Runs as the user: the plugin asks the launcher in srun, sbatch and salloc, the
//! launcher asks itself on nodes.

use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{ChildStdout, Command, ExitStatus, Stdio};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::config::Source;
use crate::failure::quote;
use crate::staging::FAILURE_LIMIT;
use crate::{Failure, pairs};

/// Where mizzen.toml is, if plugstack.conf names one.
pub const CONFIG: &str = "--config";

/// No answer is longer: a path, a reference, a request, or a failure.
const ANSWER_LIMIT: usize = 256 << 10;

/// A program that can be asked once.
pub struct AskedProcess<'a> {
    /// Starts it.
    pub program: Command,
    /// Where mizzen.toml is.
    pub config: &'a Source,
    /// Done now and then while it works.
    pub meanwhile: &'a mut dyn FnMut(),
}

impl AskedProcess<'_> {
    /// Asks about the subject, the last words of the command line, and reads the pairs of the answer. `name` is the program's in
    /// messages.
    pub(crate) fn ask(
        self,
        words: &[&str],
        subject: &[&OsStr],
        name: &AskedName,
    ) -> Result<Vec<(String, Vec<u8>)>, Failure> {
        let AskedProcess { mut program, config, meanwhile } = self;
        program.args(words);
        if let Source::Named(path) = config {
            program.arg(CONFIG).arg(path);
        }
        program.args(subject).stdin(Stdio::null()).stdout(Stdio::piped());
        let shown = quote(program.get_program().as_bytes());
        let failed = |error: io::Error| Failure::caused_by(format!("cannot run {shown}"), error);
        let mut child = program.spawn().map_err(failed)?;
        // The pipe is closed when this has been read: a program that talks on and on ends, too.
        let answer = child.stdout.take().map(|pipe| read_answer(pipe, meanwhile)).transpose();
        let ended = child.wait().map_err(failed)?;
        decode(ended, &answer.map_err(failed)?.unwrap_or_default(), name)
    }
}

/// What messages call a program that is asked.
pub(crate) struct AskedName {
    /// Who answers: `the importer`.
    pub(crate) program: &'static str,
    /// What it does: `the import`.
    pub(crate) work: &'static str,
    /// What to do where it does not answer as it should.
    pub(crate) hint: &'static str,
}

impl AskedName {
    pub(crate) fn bad_answer(&self, why: &str) -> Failure {
        Failure::new(format!("the answer of {} cannot be used: {why}", self.program)).hint(self.hint)
    }
}

/// Reads to the end, or as much as an answer may have.
fn read_answer(mut pipe: ChildStdout, meanwhile: &mut dyn FnMut()) -> io::Result<Vec<u8>> {
    let (mut answer, mut buffer) = (Vec::new(), [0; 1024]);
    while answer.len() < ANSWER_LIMIT {
        if poll(&mut [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)], PollTimeout::from(100_u8)) == Ok(0) {
            meanwhile();
            continue;
        }
        match pipe.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => answer.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(answer)
}

fn decode(ended: ExitStatus, answer: &[u8], name: &AskedName) -> Result<Vec<(String, Vec<u8>)>, Failure> {
    let AskedName { program, work, hint } = name;
    match (ended.code(), ended.signal()) {
        (Some(0), _) => {
            pairs::decode(answer.trim_ascii_end()).map_err(|failure| name.bad_answer(&failure.message))
        }
        (Some(1), _) if !answer.is_empty() => Err(Failure::decode(answer.trim_ascii_end(), FAILURE_LIMIT)),
        // Ctrl-C, most of the time.
        (None, Some(signal)) => Err(Failure::new(format!("{work} was interrupted by signal {signal}"))),
        (code, _) => {
            Err(Failure::new(format!("{program} failed with exit code {}", code.unwrap_or(-1))).hint(*hint))
        }
    }
}
