//! How the importer is asked for an image, and what it answers: one line on standard output, while progress goes to standard
//! error. Runs as the user: the plugin asks in srun, sbatch and salloc, the launcher by hand and on nodes; the importer writes
//! the answer with [`encode_answer`].
//!
//! The environment is the asker's own: HOME, proxies, credentials. None of it is in the arguments, and no password can be, for
//! [`Reference::parse`] refuses one.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::answer::{AskedName, AskedProcess};
use crate::request::{absolute_path, pinned_reference};
use crate::{Failure, Reference, pairs};

/// The command of mizzen that imports.
pub const COMMAND: &str = "import";
/// Its option that makes it answer a program.
pub const FOR_SLURM: &str = "--for-slurm";
/// Beside that: only find out which manifest a name means.
pub const RESOLVE_ONLY: &str = "--resolve-only";
/// Its option that makes it save a container: the directory as an image, which is called so in messages.
pub const SAVE_AS: &str = "--save-as";

const IMPORTER: AskedName = AskedName {
    program: "the importer",
    work: "the import",
    hint: "mizzen and mizzen-import must be of the same version",
};

/// Has an image imported into the user's store, unless it is there. Answers with the image's file, and its name with the digest of
/// its manifest.
pub fn import(process: AskedProcess, reference: &Reference) -> Result<(PathBuf, Reference), Failure> {
    match ask(process, &[], reference)? {
        (Some(path), reference) => Ok((path, reference)),
        (None, _) => Err(IMPORTER.bad_answer("no path")),
    }
}

/// Has the importer find out which manifest a name means: the name with its digest.
pub fn resolve(process: AskedProcess, reference: &Reference) -> Result<Reference, Failure> {
    let (_, found) = ask(process, &[RESOLVE_ONLY], reference)?;
    // Whose credentials are wanted is not in an answer.
    Ok(Reference { user: reference.user.clone(), ..found })
}

/// The importer's answer, which the others read.
pub fn encode_answer(path: Option<&Path>, reference: &Reference) -> String {
    let path = path.map(|path| ("path", path.as_os_str().as_bytes().to_vec()));
    pairs::encode(path.into_iter().chain([("reference", reference.to_string().into_bytes())]))
}

/// The importer's answer when it has saved a container: how large the image is.
pub fn encode_saved(size: u64) -> String {
    pairs::encode([("size", size.to_string().into_bytes())])
}

/// Reads it.
pub fn decode_saved(answer: &[u8]) -> Result<u64, Failure> {
    let pairs =
        pairs::decode(answer.trim_ascii_end()).map_err(|failure| IMPORTER.bad_answer(&failure.message))?;
    let size = pairs.iter().find(|(name, _)| name == "size");
    size.and_then(|(_, size)| std::str::from_utf8(size).ok()?.parse().ok())
        .ok_or_else(|| IMPORTER.bad_answer("no size"))
}

fn ask(
    process: AskedProcess,
    options: &[&str],
    reference: &Reference,
) -> Result<(Option<PathBuf>, Reference), Failure> {
    let words: Vec<&str> = [COMMAND, FOR_SLURM].iter().chain(options).copied().collect();
    let pairs = process.ask(&words, &[OsStr::new(&reference.text_with_user())], &IMPORTER)?;
    let find = |name: &str| pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value);
    let read = || {
        let path = find("path").map(|path| absolute_path(path)).transpose()?;
        let reference = find("reference").ok_or_else(|| Failure::new("no reference"))?;
        Ok((path, pinned_reference(reference)?))
    };
    let (path, found) = read().map_err(|failure: Failure| IMPORTER.bad_answer(&failure.message))?;
    if !is_same(reference, &found) {
        return Err(IMPORTER.bad_answer("it is about another image"));
    }
    Ok((path, found))
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
    use std::process::Command;

    use super::*;
    use crate::Digest;
    use crate::config::Source;

    fn reference() -> Reference {
        Reference::parse(b"docker://me@host.io/a/b:c").unwrap()
    }

    /// A shell script for an importer.
    fn ask_script<T>(
        text: &str,
        config: &Source,
        ask: fn(AskedProcess, &Reference) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let mut program = Command::new("/bin/sh");
        program.args(["-c", text, "importer"]);
        ask(AskedProcess { program, config, meanwhile: &mut || {} }, &reference())
    }

    fn import_by(text: &str) -> Result<(PathBuf, Reference), Failure> {
        ask_script(text, &Source::Named("/etc/m.toml".into()), import)
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
        let resolved = Reference { user: Some("me".to_owned()), ..pinned };
        assert_eq!(ask_script(&answer, &Source::Default, resolve), Ok(resolved));
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
        let unusable = "the answer of the importer cannot be used: ";
        for (answer, message) in [
            ("exit 2".to_owned(), "the importer failed with exit code 2".to_owned()),
            ("exit 1".to_owned(), "the importer failed with exit code 1".to_owned()),
            ("kill -TERM $$".to_owned(), "the import was interrupted by signal 15".to_owned()),
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
        let (program, config) = (Command::new("/nonexistent/x"), &Source::Default);
        let missing = import(AskedProcess { program, config, meanwhile: &mut || {} }, &reference());
        assert_eq!(missing.unwrap_err().message, "cannot run /nonexistent/x: No such file or directory");
    }
}
