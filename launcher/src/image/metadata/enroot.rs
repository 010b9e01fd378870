//! Images made by enroot: /etc/environment holds the variables, /etc/rc is the entrypoint. Runs as the user
//! on the host.

use std::path::Path;

use mizzen_core::Failure;

use super::variables::{Job, Variables, lines};
use super::{Entry, Maker, Metadata, Tree, cannot_read, file};

const ENVIRONMENT: &str = "/etc/environment";
const SCRIPT: &str = "/etc/rc";

/// Debian has an /etc/environment, and old Red Hat systems an /etc/rc that is a link to their boot script.
/// Only enroot has both as files, and its script hands its arguments on.
pub fn made(tree: &dyn Tree) -> Result<bool, Failure> {
    for path in [SCRIPT, ENVIRONMENT] {
        match tree.entry(Path::new(path)) {
            Ok(Some(Entry::File { .. })) => {}
            Ok(_) => return Ok(false),
            // /etc is a link or a file.
            Err(error) if error.raw_os_error() == Some(libc::ENOTDIR) => return Ok(false),
            Err(error) => return Err(cannot_read(path, error)),
        }
    }
    let script = file(tree, SCRIPT)?.unwrap_or_default();
    Ok([&b"$@"[..], b"$#"].iter().any(|mark| script.windows(2).any(|pair| pair == *mark)))
}

pub fn read(tree: &dyn Tree, job: Job) -> Result<Metadata, Failure> {
    let mut metadata = Metadata::new(Maker::Enroot);
    let mut variables = Variables::new(job);
    for (place, line) in lines(ENVIRONMENT, &file(tree, ENVIRONMENT)?.unwrap_or_default()) {
        if line.starts_with(b"#") {
            continue;
        }
        let line = substitute(line, &variables);
        variables.set_text(&line, || place)?;
    }
    metadata.set_variables(variables);
    metadata.entrypoint = vec!["/bin/sh".into(), SCRIPT.into()];
    read_script(&file(tree, SCRIPT)?.unwrap_or_default(), &mut metadata);
    Ok(metadata)
}

/// enroot replaces `${NAME}` by the job's variable, and by nothing when the job has none; no other form.
fn substitute(line: &[u8], variables: &Variables) -> Vec<u8> {
    let mut result = Vec::new();
    let mut rest = line;
    while let Some(start) = rest.windows(2).position(|pair| pair == b"${") {
        let inner = &rest[start + 2..];
        let end = inner.iter().position(|byte| !byte.is_ascii_alphanumeric() && *byte != b'_');
        match end {
            Some(end) if end > 0 && inner[end] == b'}' => {
                result.extend(&rest[..start]);
                result.extend(variables.of_job(&inner[..end]).unwrap_or_default());
                rest = &inner[end + 1..];
            }
            _ => {
                result.extend(&rest[..start + 2]);
                rest = inner;
            }
        }
    }
    result.extend(rest);
    result
}

/// enroot's script starts with the labels as comments and an empty line; then it changes to the working
/// directory with `cd "DIR" && unset OLDPWD || exit 1`.
fn read_script(script: &[u8], metadata: &mut Metadata) {
    for line in script.split(|byte| *byte == b'\n').take_while(|line| line.starts_with(b"# ")) {
        let mut words = line[2..].splitn(2, |byte| *byte == b' ');
        if let (Some(name), Some(value)) = (words.next(), words.next()) {
            let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
            metadata.labels.insert(text(name), text(value));
        }
    }
    let workdir = script.split(|byte| *byte == b'\n').find_map(|line| {
        let rest = line.trim_ascii().strip_prefix(b"cd \"")?;
        let end = rest.iter().position(|byte| *byte == b'"')?;
        rest[end..].starts_with(b"\" && unset OLDPWD").then_some(&rest[..end])
    });
    // A name with an expansion in it only a shell understands.
    if let Some(workdir) = workdir.filter(|path| path.starts_with(b"/") && !path.contains(&b'$')) {
        metadata.set_workdir(workdir);
    }
}
