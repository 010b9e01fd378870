//! The types of settings, each with how it is written: in an option, a variable, a request and mizzen.toml.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::device::DeviceName;
use crate::failure::quote;
use crate::options::{EnvOption, MountOption, parse_env_list, parse_mounts, parse_size};
use crate::staging::Policy;

/// A value that can be written down.
pub trait Value: Sized {
    /// How mizzen.toml writes it.
    const TOML: TomlForm;

    /// Reads it.
    fn parse(text: &[u8]) -> Result<Self, Failure>;

    /// The text that [`Value::parse`] reads as this value.
    fn text(&self) -> Vec<u8>;

    /// Takes a second value for the same setting: the last one holds, but lists grow.
    fn add(&mut self, more: Self) {
        *self = more;
    }

    /// This value of a step whose job has `outer`: it takes the place of that, but what is mounted and set for the job is
    /// there in its steps.
    fn within(self, _outer: Self) -> Self {
        self
    }

    /// The value with its relative paths taken from `directory`.
    fn absolute(self, _directory: &Path) -> Self {
        self
    }
}

/// How mizzen.toml writes a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TomlForm {
    /// `true` or `false`.
    Boolean,
    /// A string.
    Text,
    /// A list of strings.
    List,
}

impl Value for bool {
    const TOML: TomlForm = TomlForm::Boolean;

    fn parse(text: &[u8]) -> Result<bool, Failure> {
        match text {
            b"yes" | b"true" | b"1" => Ok(true),
            b"no" | b"false" | b"0" => Ok(false),
            _ => Err(Failure::new(format!("\"{}\" is neither yes nor no", quote(text)))),
        }
    }

    fn text(&self) -> Vec<u8> {
        if *self { b"yes".to_vec() } else { b"no".to_vec() }
    }
}

impl Value for Vec<MountOption> {
    const TOML: TomlForm = TomlForm::List;

    fn parse(text: &[u8]) -> Result<Self, Failure> {
        parse_mounts(OsStr::from_bytes(text))
    }

    fn text(&self) -> Vec<u8> {
        self.iter().map(MountOption::to_text).collect::<Vec<_>>().join(&b',')
    }

    fn add(&mut self, more: Self) {
        self.extend(more);
    }

    fn within(self, mut outer: Self) -> Self {
        let own: HashSet<&Path> = self.iter().map(|mount| mount.target.as_path()).collect();
        outer.retain(|mount| !own.contains(mount.target.as_path()));
        outer.extend(self);
        outer
    }

    fn absolute(self, directory: &Path) -> Self {
        self.into_iter().map(|mount| mount.absolute(directory)).collect()
    }
}

impl Value for Vec<EnvOption> {
    const TOML: TomlForm = TomlForm::List;

    fn parse(text: &[u8]) -> Result<Self, Failure> {
        let mut variables = Vec::new();
        Value::add(&mut variables, parse_env_list(OsStr::from_bytes(text))?);
        Ok(variables)
    }

    /// Names without values first: behind a value they could be a part of it.
    fn text(&self) -> Vec<u8> {
        let (values, names): (Vec<_>, Vec<_>) =
            self.iter().partition(|variable| matches!(variable, EnvOption::Set(..)));
        names.into_iter().chain(values).map(EnvOption::to_text).collect::<Vec<_>>().join(&b',')
    }

    /// Of one variable the last value holds, so that the order of different ones does not count.
    fn add(&mut self, more: Self) {
        self.extend(more);
        let mut named = HashSet::new();
        let mut last: Vec<EnvOption> = std::mem::take(self);
        last.reverse();
        last.retain(|variable| named.insert(variable.name().to_owned()));
        last.reverse();
        *self = last;
    }

    fn within(self, mut outer: Self) -> Self {
        outer.add(self);
        outer
    }
}

impl Value for Vec<DeviceName> {
    const TOML: TomlForm = TomlForm::List;

    fn parse(text: &[u8]) -> Result<Self, Failure> {
        DeviceName::parse_list(text)
    }

    fn text(&self) -> Vec<u8> {
        self.iter().map(DeviceName::to_string).collect::<Vec<_>>().join(",").into_bytes()
    }

    fn add(&mut self, more: Self) {
        self.extend(more);
    }
}

/// Where programs start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Workdir {
    /// The image's own working directory, wherever the user is.
    Image,
    /// A directory of the container.
    Directory(PathBuf),
}

impl Workdir {
    /// Stands for the image's own; a directory of that name is `./image:`.
    const IMAGE: &[u8] = b"image:";
}

impl Value for Workdir {
    const TOML: TomlForm = TomlForm::Text;

    fn parse(text: &[u8]) -> Result<Workdir, Failure> {
        if text == Workdir::IMAGE {
            return Ok(Workdir::Image);
        }
        if text.is_empty() || text.iter().any(u8::is_ascii_control) {
            let message = format!("\"{}\" is not a directory's name", quote(text));
            return Err(Failure::new(message).hint("name a directory inside the container"));
        }
        Ok(Workdir::Directory(PathBuf::from(OsStr::from_bytes(text))))
    }

    fn text(&self) -> Vec<u8> {
        match self {
            Workdir::Image => Workdir::IMAGE.to_vec(),
            Workdir::Directory(path) => OsString::from(path.clone()).into_vec(),
        }
    }

    fn absolute(self, directory: &Path) -> Workdir {
        match self {
            Workdir::Image => Workdir::Image,
            Workdir::Directory(path) => Workdir::Directory(directory.join(path)),
        }
    }
}

impl Value for Policy {
    const TOML: TomlForm = TomlForm::Text;

    fn parse(text: &[u8]) -> Result<Policy, Failure> {
        Policy::parse(text)
    }

    fn text(&self) -> Vec<u8> {
        self.name().into()
    }
}

/// Whether the root can be written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Writable {
    /// No.
    #[default]
    No,
    /// Yes; the changes are kept up to a default size.
    Yes,
    /// Yes, up to this size.
    UpTo(String),
}

impl Value for Writable {
    const TOML: TomlForm = TomlForm::Boolean;

    fn parse(text: &[u8]) -> Result<Writable, Failure> {
        match bool::parse(text) {
            // 1 and 0 are no sizes either.
            Ok(true) => Ok(Writable::Yes),
            Ok(false) => Ok(Writable::No),
            Err(_) => parse_size(std::str::from_utf8(text).unwrap_or("?")).map(Writable::UpTo),
        }
    }

    fn text(&self) -> Vec<u8> {
        match self {
            Writable::No => b"no".to_vec(),
            Writable::Yes => b"yes".to_vec(),
            Writable::UpTo(size) => size.clone().into_bytes(),
        }
    }
}

/// Which of the node's GPUs a container has, with what programs need to use them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gpu {
    /// Those of the step, if Slurm has given it any; outside Slurm all.
    #[default]
    Auto,
    /// All that the step may open, whatever Slurm says.
    All,
    /// None.
    None,
}

impl Gpu {
    const WORDS: [(Gpu, &str); 3] = [(Gpu::Auto, "auto"), (Gpu::All, "all"), (Gpu::None, "none")];
}

impl Value for Gpu {
    const TOML: TomlForm = TomlForm::Text;

    fn parse(text: &[u8]) -> Result<Gpu, Failure> {
        one_of(&Gpu::WORDS, text, "is not auto, all or none")
    }

    fn text(&self) -> Vec<u8> {
        word_for(&Gpu::WORDS, self)
    }
}

/// Whose MPI library the programs in a container get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mpi {
    /// The image's.
    #[default]
    Image,
    /// The node's, of the same ABI.
    Host,
}

impl Mpi {
    const WORDS: [(Mpi, &str); 2] = [(Mpi::Image, "image"), (Mpi::Host, "host")];
}

impl Value for Mpi {
    const TOML: TomlForm = TomlForm::Text;

    fn parse(text: &[u8]) -> Result<Mpi, Failure> {
        one_of(&Mpi::WORDS, text, "is neither image nor host")
    }

    fn text(&self) -> Vec<u8> {
        word_for(&Mpi::WORDS, self)
    }
}

/// How much the user is told of a start that goes well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verbosity {
    /// Nothing.
    #[default]
    Quiet,
    /// How long each part took.
    Times,
    /// Everything that was tried.
    Debug,
}

impl Value for Verbosity {
    const TOML: TomlForm = TomlForm::Text;

    fn parse(text: &[u8]) -> Result<Verbosity, Failure> {
        match (text, bool::parse(text)) {
            (b"debug", _) => Ok(Verbosity::Debug),
            (_, Ok(true)) => Ok(Verbosity::Times),
            (_, Ok(false)) => Ok(Verbosity::Quiet),
            (_, Err(_)) => Err(Failure::new(format!("\"{}\" is not yes, no or debug", quote(text)))),
        }
    }

    fn text(&self) -> Vec<u8> {
        match self {
            Verbosity::Quiet => b"no".to_vec(),
            Verbosity::Times => b"yes".to_vec(),
            Verbosity::Debug => b"debug".to_vec(),
        }
    }
}

/// The name that programs in a container see as the node's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hostname(String);

impl Hostname {
    /// The kernel takes no more.
    const LIMIT: usize = 64;

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Value for Hostname {
    const TOML: TomlForm = TomlForm::Text;

    fn parse(text: &[u8]) -> Result<Hostname, Failure> {
        let label = |label: &[u8]| {
            let inner = label.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(byte));
            !label.is_empty() && inner && !label.starts_with(b"-") && !label.ends_with(b"-")
        };
        match std::str::from_utf8(text) {
            Ok(name) if text.len() <= Hostname::LIMIT && text.split(|byte| *byte == b'.').all(label) => {
                Ok(Hostname(name.to_owned()))
            }
            _ => Err(Failure::new(format!("\"{}\" is not a host name", quote(text)))
                .hint("write letters, digits, - and ., at most 64 of them")),
        }
    }

    fn text(&self) -> Vec<u8> {
        self.0.clone().into_bytes()
    }
}

/// Namespaces beside the user and mount namespace, which a container always has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unshare {
    /// Process ids. Not for tasks: Slurm knows them by theirs.
    pub pid: bool,
    /// System V IPC and POSIX message queues, with a /dev/shm of its own.
    pub ipc: bool,
    /// Network: nothing but a loopback of its own.
    pub net: bool,
    /// Host name.
    pub uts: bool,
}

impl Unshare {
    /// Their names, and whether each is wanted.
    pub fn names(&self) -> [(&'static str, bool); 4] {
        [("pid", self.pid), ("ipc", self.ipc), ("net", self.net), ("uts", self.uts)]
    }
}

impl Value for Unshare {
    const TOML: TomlForm = TomlForm::Text;

    fn parse(text: &[u8]) -> Result<Unshare, Failure> {
        const THERE_ARE: &str = "there are net, ipc and uts, and pid for `mizzen run`; user and mount are always the container's own";
        if text.is_empty() {
            return Err(Failure::new("the list of namespaces is empty").hint(THERE_ARE));
        }
        let mut unshare = Unshare::default();
        for name in text.split(|byte| *byte == b',') {
            match name.trim_ascii() {
                b"pid" => unshare.pid = true,
                b"ipc" => unshare.ipc = true,
                b"net" => unshare.net = true,
                b"uts" => unshare.uts = true,
                other => {
                    return Err(Failure::new(format!("unknown namespace '{}'", quote(other))).hint(THERE_ARE));
                }
            }
        }
        Ok(unshare)
    }

    fn text(&self) -> Vec<u8> {
        let wanted = self.names().into_iter().filter(|(_, wanted)| *wanted).map(|(name, _)| name);
        wanted.collect::<Vec<_>>().join(",").into_bytes()
    }

    fn add(&mut self, more: Unshare) {
        *self = Unshare {
            pid: self.pid || more.pid,
            ipc: self.ipc || more.ipc,
            net: self.net || more.net,
            uts: self.uts || more.uts,
        };
    }
}

fn one_of<T: Copy>(words: &[(T, &str)], text: &[u8], otherwise: &str) -> Result<T, Failure> {
    let found = words.iter().find(|(_, word)| word.as_bytes() == text).map(|(value, _)| *value);
    found.ok_or_else(|| Failure::new(format!("\"{}\" {otherwise}", quote(text))))
}

fn word_for<T: PartialEq>(words: &[(T, &str)], value: &T) -> Vec<u8> {
    let found = words.iter().find(|(known, _)| known == value);
    found.map_or_else(Vec::new, |(_, word)| (*word).into())
}

/// Whose libraries for the node's fabric the programs in a container get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fabric {
    /// The node's, if the image has none for the node's adapters.
    #[default]
    Auto,
    /// The node's.
    Host,
    /// The image's.
    Image,
}

impl Fabric {
    const WORDS: [(Fabric, &str); 3] =
        [(Fabric::Auto, "auto"), (Fabric::Host, "host"), (Fabric::Image, "image")];
}

impl Value for Fabric {
    const TOML: TomlForm = TomlForm::Text;

    fn parse(text: &[u8]) -> Result<Fabric, Failure> {
        one_of(&Fabric::WORDS, text, "is not auto, host or image")
    }

    fn text(&self) -> Vec<u8> {
        word_for(&Fabric::WORDS, self)
    }
}
