//! What the maker of an image wrote down about it: environment, working directory, what to run. Runs as the
//! user on the host, on the image's files, which are data here: no shell reads them.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use mizzen_core::failure::quote;
use mizzen_core::{Digest, Failure};

use super::architecture::{self, Architecture, host_architecture};
use super::tree::{self, Entry, Tree};
use super::{in_image, shown};

mod charliecloud;
mod enroot;
mod oci;
mod script;
mod singularity;
mod variables;

use variables::Variables;

/// What to do about a description that its maker cannot have meant.
const REMAKE: &str = "the program that makes the image writes this file; make the image again";

/// The most that is read of one file: real ones have a few kilobytes.
const FILE_LIMIT: usize = 1 << 20;

/// Who made an image, as its files tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maker {
    /// An OCI image, its configuration kept by mizzen in /.mizzen/config.json.
    Oci,
    /// enroot: /etc/rc and /etc/environment.
    Enroot,
    /// Singularity or Apptainer: /.singularity.d.
    Singularity,
    /// Charliecloud: /ch.
    Charliecloud,
    /// Nobody we know: a root file system and nothing else.
    Plain,
}

/// What is known about an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// Variables in the order of their first appearance, each name once, no NUL in them.
    pub environment: Vec<(OsString, OsString)>,
    /// Where to start; absolute.
    pub workdir: Option<PathBuf>,
    /// What runs the command, if the user wants the entrypoint.
    pub entrypoint: Vec<OsString>,
    /// What to run if the user names nothing.
    pub command: Vec<OsString>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Who wrote all this.
    pub maker: Maker,
    /// The machine its programs are made for, as the maker says.
    pub architecture: Option<Architecture>,
    /// Places (`file:line`) whose meaning only a shell would know, or that no environment can hold; the first
    /// hundred.
    pub not_understood: Vec<String>,
    /// The digest of the whole image, if it was computed.
    pub digest: Option<Digest>,
}

impl Metadata {
    /// Nothing known but the maker.
    pub fn new(maker: Maker) -> Metadata {
        Metadata {
            environment: Vec::new(),
            workdir: None,
            entrypoint: Vec::new(),
            command: Vec::new(),
            labels: BTreeMap::new(),
            maker,
            architecture: None,
            digest: None,
            not_understood: Vec::new(),
        }
    }

    fn set_variables(&mut self, variables: Variables) {
        (self.environment, self.not_understood) = variables.finish();
    }

    /// A working directory as documents give it: empty means none, a relative one starts at the root.
    fn set_workdir(&mut self, text: &[u8]) {
        if !text.is_empty() && !text.contains(&0) {
            self.workdir = Some(Path::new("/").join(OsStr::from_bytes(text)));
        }
    }
}

/// Reads what the maker left. Variables of the job that the image refers to (`DISPLAY=${DISPLAY}`) come from
/// our own environment.
pub fn read(tree: &dyn Tree) -> Result<Metadata, Failure> {
    read_with(tree, &job_variable)
}

/// The same with another source for the job's variables.
pub fn read_with(tree: &dyn Tree, job: &dyn Fn(&OsStr) -> Option<OsString>) -> Result<Metadata, Failure> {
    match maker(tree)? {
        Maker::Oci => oci::read(tree),
        Maker::Singularity => singularity::read(tree, job),
        Maker::Charliecloud => charliecloud::read(tree, job),
        Maker::Enroot => enroot::read(tree, job),
        Maker::Plain => Ok(Metadata::new(Maker::Plain)),
    }
}

/// A variable of the job, except those that name the host's files: they would lead the image's programs to
/// libraries and commands that are not there, or are others.
fn job_variable(name: &OsStr) -> Option<OsString> {
    if name == "PATH" || name.as_bytes().starts_with(b"LD_") {
        return None;
    }
    std::env::var_os(name)
}

fn maker(tree: &dyn Tree) -> Result<Maker, Failure> {
    if exists(tree, oci::CONFIG)? {
        return Ok(Maker::Oci);
    }
    if exists(tree, singularity::DIRECTORY)? {
        return Ok(Maker::Singularity);
    }
    if exists(tree, charliecloud::METADATA)? || exists(tree, charliecloud::ENVIRONMENT)? {
        return Ok(Maker::Charliecloud);
    }
    if enroot::made(tree)? {
        return Ok(Maker::Enroot);
    }
    Ok(Maker::Plain)
}

fn exists(tree: &dyn Tree, path: &str) -> Result<bool, Failure> {
    Ok(entry(tree, path)?.is_some())
}

/// What a path is after all links; a file on the way means that it does not exist.
fn entry(tree: &dyn Tree, path: &str) -> Result<Option<Entry>, Failure> {
    match tree::resolve(tree, Path::new(path)) {
        Ok(found) => Ok(found.entry),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(None),
        Err(error) => Err(cannot_read(path, error)),
    }
}

/// A whole file of the maker; none if it does not exist.
fn file(tree: &dyn Tree, path: &str) -> Result<Option<Vec<u8>>, Failure> {
    match tree::read_file(tree, Path::new(path), FILE_LIMIT) {
        Ok(content) => Ok(content),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(None),
        Err(error) => Err(cannot_read(path, error)),
    }
}

fn cannot_read(path: &str, error: io::Error) -> Failure {
    match error.raw_os_error() {
        Some(libc::EFBIG) => {
            Failure::new(format!("{} in the image has more than {FILE_LIMIT} bytes", quote(path.as_bytes())))
                .hint("what an image's maker writes there is short; the image is broken or hostile")
        }
        _ => in_image(Path::new(path), error),
    }
}

/// JSON into a structure, or a failure that names file and position.
fn json<T: serde::de::DeserializeOwned>(path: &str, content: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(content).map_err(|error| {
        // The text may repeat a string of the document.
        Failure::new(format!("{path} in the image is damaged: {}", quote(error.to_string().as_bytes())))
            .hint(REMAKE)
    })
}

/// Labels as documents give them: what is no string is shown as JSON, nothing means none.
fn labels(values: Option<BTreeMap<String, serde_json::Value>>) -> BTreeMap<String, String> {
    let text = |value| match value {
        serde_json::Value::String(text) => text,
        other => other.to_string(),
    };
    values.unwrap_or_default().into_iter().map(|(name, value)| (name, text(value))).collect()
}

/// The distribution's own name for itself. For people only, so what cannot be read is passed over.
pub fn operating_system(tree: &dyn Tree) -> Option<String> {
    let content = ["/etc/os-release", "/usr/lib/os-release"]
        .iter()
        .find_map(|path| tree::read_file(tree, Path::new(path), FILE_LIMIT).ok().flatten())?;
    let value = |wanted: &str| {
        content.split(|byte| *byte == b'\n').find_map(|line| {
            let value = line.trim_ascii().strip_prefix(wanted.as_bytes())?.strip_prefix(b"=")?;
            let quoted = |mark: u8| value.strip_prefix(&[mark]).and_then(|rest| rest.strip_suffix(&[mark]));
            let value = quoted(b'"').or_else(|| quoted(b'\'')).unwrap_or(value);
            (!value.is_empty()).then(|| quote(value))
        })
    };
    value("PRETTY_NAME").or_else(|| match (value("ID"), value("VERSION_ID")) {
        (Some(id), Some(version)) => Some(format!("{id} {version}")),
        (id, _) => id,
    })
}

/// The machine that the image's programs are made for: they are a fact, what its maker says is a claim.
pub fn true_architecture(tree: &dyn Tree, metadata: &Metadata) -> Option<Architecture> {
    architecture::of_image(tree).or(metadata.architecture)
}

/// Refuses an image whose programs this node cannot run; `image` is its path. To find out what they are takes time, so
/// they are looked at only where the maker makes that doubtful; otherwise the program's start shows it.
pub fn check_architecture(image: &Path, tree: &dyn Tree, metadata: &Metadata) -> Result<(), Failure> {
    let host = host_architecture();
    check_against(image, metadata.architecture, host)
        .or_else(|_| check_against(image, true_architecture(tree, metadata), host))
}

fn check_against(
    image: &Path,
    made_for: Option<Architecture>,
    host: Option<Architecture>,
) -> Result<(), Failure> {
    match (made_for, host) {
        (Some(made_for), Some(host)) if !host.runs(made_for) => Err(Failure::new(format!(
            "{}: made for {}, this node is {}",
            shown(image),
            made_for.name(),
            host.name()
        ))
        .hint("choose nodes of that kind (srun --constraint), or get the image for this one")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
