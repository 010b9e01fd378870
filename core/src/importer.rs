//! How the importer is asked for an image, and what it answers: one line on standard output, while progress goes to standard
//! error. Runs as the user: the plugin asks in srun, sbatch and salloc, the launcher by hand and on nodes; the importer writes
//! the answer with [`encode_answer`].
//!
//! The environment is the asker's own: HOME, proxies, credentials. None of it is in the arguments, and no password can be, for
//! [`Reference::parse`] refuses one.

use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use crate::config::Source;
use crate::failure::quote;
use crate::request::{absolute_path, pinned_reference};
use crate::staging::FAILURE_LIMIT;
use crate::{Failure, Reference, pairs};

/// The command of mizzen that imports.
pub const COMMAND: &str = "import";
/// Its option that makes it answer a program.
pub const FOR_SLURM: &str = "--for-slurm";
/// Beside that: only find out which manifest a name means.
pub const RESOLVE_ONLY: &str = "--resolve-only";
/// Where mizzen.toml is, if plugstack.conf names one.
pub const CONFIG: &str = "--config";

const SAME_VERSION: &str = "mizzen and mizzen-import must be of the same version";

/// No answer is longer: a path, a reference, or a failure.
const ANSWER_LIMIT: u64 = 64 << 10;

/// Has an image imported into the user's store, unless it is there, by the importer that `program` starts. Answers with the
/// image's file, and its name with the digest of its manifest.
pub fn import(
    program: Command,
    reference: &Reference,
    config: &Source,
) -> Result<(PathBuf, Reference), Failure> {
    match ask(program, &[], reference, config)? {
        (Some(path), reference) => Ok((path, reference)),
        (None, _) => Err(bad_answer("no path")),
    }
}

/// Has the importer find out which manifest a name means: the name with its digest.
pub fn resolve(program: Command, reference: &Reference, config: &Source) -> Result<Reference, Failure> {
    ask(program, &[RESOLVE_ONLY], reference, config).map(|(_, reference)| reference)
}

/// The importer's answer, which the others read.
pub fn encode_answer(path: Option<&Path>, reference: &Reference) -> String {
    let path = path.map(|path| ("path", path.as_os_str().as_bytes().to_vec()));
    pairs::encode(path.into_iter().chain([("reference", reference.to_string().into_bytes())]))
}

fn ask(
    mut program: Command,
    options: &[&str],
    reference: &Reference,
    config: &Source,
) -> Result<(Option<PathBuf>, Reference), Failure> {
    program.args([COMMAND, FOR_SLURM]).args(options);
    if let Source::Named(path) = config {
        program.arg(CONFIG).arg(path);
    }
    program.arg(reference.text_with_user()).stdin(Stdio::null()).stdout(Stdio::piped());
    let shown = quote(program.get_program().as_bytes());
    let failed = |error: std::io::Error| Failure::caused_by(format!("cannot run {shown}"), error);
    let mut child = program.spawn().map_err(failed)?;
    let mut answer = Vec::new();
    // The pipe is closed when this has been read: an importer that talks on and on ends, too.
    let read = child.stdout.take().map(|pipe| pipe.take(ANSWER_LIMIT).read_to_end(&mut answer));
    let ended = child.wait().map_err(failed)?;
    read.transpose().map_err(failed)?;
    let (path, found) = decode_answer(ended, &answer)?;
    if !is_same(reference, &found) {
        return Err(bad_answer("it is about another image"));
    }
    Ok((path, found))
}

fn decode_answer(ended: ExitStatus, answer: &[u8]) -> Result<(Option<PathBuf>, Reference), Failure> {
    match (ended.code(), ended.signal()) {
        (Some(0), _) => {
            let read = pairs::decode(answer.trim_ascii_end()).and_then(|pairs| {
                let find = |name: &str| pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value);
                let path = find("path").map(|path| absolute_path(path)).transpose()?;
                let reference = find("reference").ok_or_else(|| Failure::new("no reference"))?;
                Ok((path, pinned_reference(reference)?))
            });
            read.map_err(|failure| bad_answer(&failure.message))
        }
        (Some(1), _) if !answer.is_empty() => Err(Failure::decode(answer.trim_ascii_end(), FAILURE_LIMIT)),
        // Ctrl-C, most of the time.
        (None, Some(signal)) => Err(Failure::new(format!("the import was interrupted by signal {signal}"))),
        (code, _) => Err(Failure::new(format!("the importer failed with exit code {}", code.unwrap_or(-1)))
            .hint(SAME_VERSION)),
    }
}

fn bad_answer(why: &str) -> Failure {
    Failure::new(format!("the importer's answer cannot be used: {why}")).hint(SAME_VERSION)
}

/// Whether an answer is about the image that was asked for: another tag or manifest would be another image.
fn is_same(asked: &Reference, found: &Reference) -> bool {
    let place = |reference: &Reference| {
        (reference.transport, reference.registry.clone(), reference.repository.clone(), reference.tag.clone())
    };
    place(asked) == place(found) && asked.digest.is_none_or(|digest| found.digest == Some(digest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Digest;

    fn reference() -> Reference {
        Reference::parse(b"docker://me@host.io/a/b:c").unwrap()
    }

    /// A shell script for an importer.
    fn script(text: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", text, "importer"]);
        command
    }

    fn import_by(text: &str) -> Result<(PathBuf, Reference), Failure> {
        import(script(text), &reference(), &Source::Named("/etc/m.toml".into()))
    }

    #[test]
    fn the_answer_is_read() {
        let pinned = Reference { user: None, ..reference().pinned(Digest::new([7; 32])) };
        let stored = encode_answer(Some(Path::new("/store/a b.sqsh")), &pinned);
        let words = "import --for-slurm --config /etc/m.toml docker://me@host.io/a/b:c";
        let answer = format!("test \"$*\" = '{words}' && echo '{stored}'");
        assert_eq!(import_by(&answer), Ok(("/store/a b.sqsh".into(), pinned.clone())));
        let words = "import --for-slurm --resolve-only docker://me@host.io/a/b:c";
        let answer = format!("test \"$*\" = '{words}' && printf %s '{}'", encode_answer(None, &pinned));
        assert_eq!(resolve(script(&answer), &reference(), &Source::Default), Ok(pinned));
    }

    #[test]
    fn a_failure_is_taken_over_whole() {
        let failure = Failure::new("401 Unauthorized").about("docker://host.io/a/b:c").hint("log in");
        let answer = format!("printf %s '{}'; exit 1", failure.encode());
        assert_eq!(import_by(&answer), Err(failure));
    }

    #[test]
    fn what_is_no_answer_is_named() {
        let pinned = reference().pinned(Digest::new([7; 32]));
        let answer = encode_answer(Some(Path::new("/a")), &pinned);
        let unusable = "the importer's answer cannot be used: ";
        for (answer, message) in [
            ("exit 2".to_owned(), "the importer failed with exit code 2".to_owned()),
            ("exit 1".to_owned(), "the importer failed with exit code 1".to_owned()),
            ("kill -INT $$".to_owned(), "the import was interrupted by signal 2".to_owned()),
            ("exec yes".to_owned(), "the import was interrupted by signal 13".to_owned()),
            ("exit 0".to_owned(), format!("{unusable}no reference")),
            ("echo path=a".to_owned(), format!("{unusable}\"a\" is not absolute")),
            ("echo reference=docker://a".to_owned(), format!("{unusable}\"docker://a\" has no digest")),
            (format!("echo '{}'", encode_answer(None, &pinned)), format!("{unusable}no path")),
            (
                format!("echo '{}'", answer.replace("host.io", "evil.io")),
                format!("{unusable}it is about another image"),
            ),
        ] {
            assert_eq!(import_by(&answer).unwrap_err().message, message, "{answer}");
        }
        let missing = import(Command::new("/nonexistent/x"), &reference(), &Source::Default);
        assert_eq!(missing.unwrap_err().message, "cannot run /nonexistent/x: No such file or directory");
    }
}
