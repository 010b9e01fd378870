//! What shapes a container beside its image. The same settings come from options, from the job that a nested srun
//! is in, from variables and from mizzen.toml; [`Settings::or`] lets the first of them that says something win.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::Failure;
use crate::device::DeviceName;
use crate::failure::quote;
use crate::options::{EnvOption, MountOption, parse_env_list, parse_mounts, parse_size};
use crate::staging::Policy;

/// The settings that somebody has made; what is None or empty is left to the next in precedence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Further mounts.
    pub mounts: Vec<MountOption>,
    /// Variables to set, or to take from the host.
    pub environment: Vec<EnvOption>,
    /// Devices by their names in the node's CDI specifications.
    pub devices: Vec<DeviceName>,
    /// Where the program starts.
    pub workdir: Option<PathBuf>,
    /// Whether the home directory is there.
    pub mount_home: Option<bool>,
    /// Whether the root can be written.
    pub writable: Option<Writable>,
    /// Whether the user is root inside.
    pub remap_root: Option<bool>,
    /// Whether the image's entrypoint starts the program.
    pub entrypoint: Option<bool>,
    /// Whether a batch script or interactive shell runs inside, rather than its steps alone.
    pub script: Option<bool>,
    /// When the image is copied to the node first.
    pub stage: Option<Policy>,
    /// Which of the node's GPUs the container has.
    pub gpu: Option<Gpu>,
    /// Whose MPI library programs get.
    pub mpi: Option<Mpi>,
    /// Whether the user is told how long each part of the start took.
    pub verbose: Option<bool>,
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

/// Which of the node's GPUs a container has, with what programs need to use them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
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
    const ALL: [Gpu; 3] = [Gpu::Auto, Gpu::All, Gpu::None];

    /// As users and mizzen.toml write it.
    pub fn name(self) -> &'static str {
        match self {
            Gpu::Auto => "auto",
            Gpu::All => "all",
            Gpu::None => "none",
        }
    }

    fn parse(value: &[u8]) -> Result<Gpu, Failure> {
        let found = Gpu::ALL.into_iter().find(|gpu| gpu.name().as_bytes() == value);
        found.ok_or_else(|| Failure::new(format!("\"{}\" is not auto, all or none", quote(value))))
    }
}

/// Whose MPI library the programs in a container get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mpi {
    /// The image's.
    #[default]
    Image,
    /// The node's, of the same ABI.
    Host,
}

impl Mpi {
    /// As users and mizzen.toml write it.
    pub fn name(self) -> &'static str {
        match self {
            Mpi::Image => "image",
            Mpi::Host => "host",
        }
    }

    fn parse(value: &[u8]) -> Result<Mpi, Failure> {
        let found = [Mpi::Image, Mpi::Host].into_iter().find(|mpi| mpi.name().as_bytes() == value);
        found.ok_or_else(|| Failure::new(format!("\"{}\" is neither image nor host", quote(value))))
    }
}

/// Whose libraries for the node's fabric the programs in a container get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fabric {
    /// The node's, if the image has none for the node's adapters.
    #[default]
    Auto,
    /// The node's.
    Host,
    /// The image's.
    Image,
}

/// One of the settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // as the fields of `Settings`
pub enum Key {
    Mounts,
    Env,
    Device,
    Workdir,
    MountHome,
    Writable,
    RemapRoot,
    Entrypoint,
    Script,
    Stage,
    Gpu,
    Mpi,
    Verbose,
}

impl Key {
    /// All of them.
    pub const ALL: [Key; 13] = [
        Key::Mounts,
        Key::Env,
        Key::Device,
        Key::Workdir,
        Key::MountHome,
        Key::Writable,
        Key::RemapRoot,
        Key::Entrypoint,
        Key::Script,
        Key::Stage,
        Key::Gpu,
        Key::Mpi,
        Key::Verbose,
    ];

    /// The name: `mount-home` in --container-mount-home, MIZZEN_CONTAINER_MOUNT_HOME and in the request.
    pub fn name(self) -> &'static str {
        match self {
            Key::Mounts => "mounts",
            Key::Env => "env",
            Key::Device => "device",
            Key::Workdir => "workdir",
            Key::MountHome => "mount-home",
            Key::Writable => "writable",
            Key::RemapRoot => "remap-root",
            Key::Entrypoint => "entrypoint",
            Key::Script => "script",
            Key::Stage => "stage",
            Key::Gpu => "gpu",
            Key::Mpi => "mpi",
            Key::Verbose => "verbose",
        }
    }

    /// The variable that stands for the option.
    pub fn variable(self) -> String {
        format!("MIZZEN_CONTAINER_{}", self.name().to_uppercase().replace('-', "_"))
    }
}

impl Settings {
    /// Takes one value; lists grow, of anything else the last value holds.
    pub fn set(&mut self, key: Key, value: &[u8]) -> Result<(), Failure> {
        let text = OsStr::from_bytes(value);
        match key {
            Key::Mounts => self.mounts.extend(parse_mounts(text)?),
            Key::Env => self.environment.extend(parse_env_list(text)?),
            Key::Device => self.devices.extend(DeviceName::parse_list(value)?),
            Key::Workdir => self.workdir = Some(parse_directory(value)?),
            Key::MountHome => self.mount_home = Some(parse_bool(value)?),
            Key::Writable => self.writable = Some(parse_writable(value)?),
            Key::RemapRoot => self.remap_root = Some(parse_bool(value)?),
            Key::Entrypoint => self.entrypoint = Some(parse_bool(value)?),
            Key::Script => self.script = Some(parse_bool(value)?),
            Key::Stage => self.stage = Some(Policy::parse(value)?),
            Key::Gpu => self.gpu = Some(Gpu::parse(value)?),
            Key::Mpi => self.mpi = Some(Mpi::parse(value)?),
            Key::Verbose => self.verbose = Some(parse_bool(value)?),
        }
        Ok(())
    }

    /// These settings, and where they say nothing the other's.
    pub fn or(self, lower: Settings) -> Settings {
        Settings {
            mounts: if self.mounts.is_empty() { lower.mounts } else { self.mounts },
            environment: if self.environment.is_empty() { lower.environment } else { self.environment },
            devices: if self.devices.is_empty() { lower.devices } else { self.devices },
            workdir: self.workdir.or(lower.workdir),
            mount_home: self.mount_home.or(lower.mount_home),
            writable: self.writable.or(lower.writable),
            remap_root: self.remap_root.or(lower.remap_root),
            entrypoint: self.entrypoint.or(lower.entrypoint),
            script: self.script.or(lower.script),
            stage: self.stage.or(lower.stage),
            gpu: self.gpu.or(lower.gpu),
            mpi: self.mpi.or(lower.mpi),
            verbose: self.verbose.or(lower.verbose),
        }
    }

    /// Relative paths belong to `directory`.
    pub fn absolute(mut self, directory: &Path) -> Settings {
        self.mounts = self.mounts.into_iter().map(|mount| mount.absolute(directory)).collect();
        self.workdir = self.workdir.map(|workdir| directory.join(workdir));
        self
    }

    /// A setting with a relative path, and its text.
    pub fn relative(&self) -> Option<(Key, Vec<u8>)> {
        let absolute = self.clone().absolute(Path::new("/"));
        let relative = Key::ALL.into_iter().find(|key| self.text(*key) != absolute.text(*key))?;
        Some((relative, self.text(relative)?))
    }

    /// The value of a setting as [`Settings::set`] takes it, unless it is left open.
    pub fn text(&self, key: Key) -> Option<Vec<u8>> {
        let list = |texts: Vec<Vec<u8>>| (!texts.is_empty()).then(|| texts.join(&b','));
        let bool = |value: Option<bool>| value.map(|yes| if yes { b"yes".to_vec() } else { b"no".to_vec() });
        match key {
            Key::Mounts => list(self.mounts.iter().map(MountOption::to_text).collect()),
            Key::Env => list(self.environment.iter().map(EnvOption::to_text).collect()),
            Key::Device => list(self.devices.iter().map(|device| device.to_string().into_bytes()).collect()),
            Key::Workdir => self.workdir.clone().map(|workdir| OsString::from(workdir).into_vec()),
            Key::MountHome => bool(self.mount_home),
            Key::Writable => self.writable.as_ref().map(|writable| match writable {
                Writable::No => b"no".to_vec(),
                Writable::Yes => b"yes".to_vec(),
                Writable::UpTo(size) => size.clone().into_bytes(),
            }),
            Key::RemapRoot => bool(self.remap_root),
            Key::Entrypoint => bool(self.entrypoint),
            Key::Script => bool(self.script),
            Key::Stage => self.stage.map(|policy| policy.name().as_bytes().to_vec()),
            Key::Gpu => self.gpu.map(|gpu| gpu.name().as_bytes().to_vec()),
            Key::Mpi => self.mpi.map(|mpi| mpi.name().as_bytes().to_vec()),
            Key::Verbose => bool(self.verbose),
        }
    }
}

fn parse_bool(value: &[u8]) -> Result<bool, Failure> {
    match value {
        b"yes" | b"true" | b"1" => Ok(true),
        b"no" | b"false" | b"0" => Ok(false),
        _ => Err(Failure::new(format!("\"{}\" is neither yes nor no", quote(value)))),
    }
}

fn parse_writable(value: &[u8]) -> Result<Writable, Failure> {
    match parse_bool(value) {
        // 1 and 0 are no sizes either.
        Ok(true) => Ok(Writable::Yes),
        Ok(false) => Ok(Writable::No),
        Err(_) => parse_size(std::str::from_utf8(value).unwrap_or("?")).map(Writable::UpTo),
    }
}

fn parse_directory(value: &[u8]) -> Result<PathBuf, Failure> {
    if value.is_empty() || value.iter().any(u8::is_ascii_control) {
        let message = format!("\"{}\" is not a directory's name", quote(value));
        return Err(Failure::new(message).hint("name a directory inside the container"));
    }
    Ok(PathBuf::from(OsStr::from_bytes(value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(Key, &str)]) -> Settings {
        let mut settings = Settings::default();
        for (key, value) in pairs {
            settings.set(*key, value.as_bytes()).unwrap();
        }
        settings
    }

    #[test]
    fn every_setting_survives_its_text() {
        let all = settings(&[
            (Key::Mounts, "/a:/b:ro,c:/d"),
            (Key::Mounts, "/e"),
            (Key::Env, "A=1,B"),
            (Key::Device, "v.com/c=0,v.com/c=1"),
            (Key::Workdir, "w"),
            (Key::MountHome, "no"),
            (Key::Writable, "2g"),
            (Key::RemapRoot, "true"),
            (Key::Entrypoint, "0"),
            (Key::Script, "no"),
            (Key::Stage, "always"),
            (Key::Gpu, "none"),
            (Key::Mpi, "host"),
            (Key::Verbose, "yes"),
        ])
        .absolute(Path::new("/here"));
        assert_eq!(all.workdir, Some("/here/w".into()));
        let mut copy = Settings::default();
        for key in Key::ALL {
            copy.set(key, &all.text(key).unwrap()).unwrap();
        }
        assert_eq!(copy, all);
        assert!(Key::ALL.iter().all(|key| Settings::default().text(*key).is_none()));
    }

    #[test]
    fn the_first_who_says_something_wins() {
        let option = settings(&[(Key::Mounts, "/a"), (Key::Writable, "no")]);
        let site = settings(&[(Key::Mounts, "/b"), (Key::Writable, "yes"), (Key::MountHome, "no")]);
        let both = option.or(site);
        assert_eq!(both, settings(&[(Key::Mounts, "/a"), (Key::Writable, "no"), (Key::MountHome, "no")]));
    }

    #[test]
    fn bad_values_are_named() {
        for (key, value, message) in [
            (Key::MountHome, "perhaps", "\"perhaps\" is neither yes nor no"),
            (Key::Writable, "10Q", "\"10Q\" is not a size"),
            (Key::Workdir, "", "\"\" is not a directory's name"),
            (Key::Mounts, "/a:b", "\"/a:b\": the destination is not absolute"),
            (Key::Env, "A,=b", "\"=b\": the name is empty"),
            (Key::Device, "gpu", "\"gpu\" is not the name of a device"),
            (Key::Stage, "often", "\"often\" is not auto, always, never or bcast"),
            (Key::Mpi, "mine", "\"mine\" is neither image nor host"),
            (Key::Gpu, "0,1", "\"0,1\" is not auto, all or none"),
        ] {
            assert_eq!(Settings::default().set(key, value.as_bytes()).unwrap_err().message, message);
        }
    }
}
