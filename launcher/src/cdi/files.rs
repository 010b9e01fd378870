//! The specification files of a node, and which of them a device comes from. They are taken from nobody but root: what
//! they say is mounted over the files of images that other users trust.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::device::DeviceName;
use mizzen_core::failure::cause;
use mizzen_core::trusted_file::read_trusted;

use super::spec::{Device, DeviceNode, Spec};

/// Where they are; a later directory wins over an earlier one.
pub const DIRECTORIES: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// What a node's files describe.
#[derive(Debug, Default)]
pub struct Specs {
    files: Vec<File>,
    broken: Vec<Failure>,
}

/// A valid file.
#[derive(Debug)]
pub struct File {
    /// Where it is.
    pub path: PathBuf,
    /// Its content.
    pub spec: Spec,
    priority: usize,
}

impl Specs {
    /// Reads the files of this node. One that is not valid does not hide the others.
    pub fn of_node() -> Specs {
        Specs::read(&DIRECTORIES.map(Path::new))
    }

    /// Reads the files of some directories; a later one has priority.
    pub fn read(directories: &[&Path]) -> Specs {
        let mut specs = Specs::default();
        for (priority, directory) in directories.iter().enumerate() {
            let names = match fs::read_dir(directory).and_then(Iterator::collect::<io::Result<Vec<_>>>) {
                Ok(names) => names,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => {
                    let message = format!("{}: {}", directory.display(), cause(&error));
                    specs.broken.push(Failure::new(message));
                    continue;
                }
            };
            let mut paths: Vec<PathBuf> = names.into_iter().map(|entry| entry.path()).collect();
            paths.retain(|path| path.extension().is_some_and(|ending| ending == "json" || ending == "yaml"));
            paths.sort();
            for path in paths {
                let text = read(&path);
                specs.add(path, priority, text);
            }
        }
        specs
    }

    pub(super) fn add(&mut self, path: PathBuf, priority: usize, text: Result<String, Failure>) {
        let spec = text.and_then(|text| Spec::parse(&text).map_err(|failure| failure.about(path.display())));
        match spec {
            Ok(spec) => self.files.push(File { path, spec, priority }),
            Err(failure) => self.broken.push(failure),
        }
    }

    /// The files.
    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// Why the others are not valid.
    pub fn broken(&self) -> &[Failure] {
        &self.broken
    }

    /// Whether a file describes devices of this kind.
    pub fn has_kind(&self, kind: &str) -> bool {
        self.files.iter().any(|file| file.spec.kind == kind)
    }

    /// All devices of a kind, each from the file that holds.
    pub fn devices(&self, kind: &str) -> Vec<DeviceName> {
        let of_kind = self.files.iter().filter(|file| file.spec.kind == kind);
        let mut names: Vec<DeviceName> = of_kind
            .flat_map(|file| &file.spec.devices)
            .map(|device| DeviceName { kind: kind.to_owned(), name: device.name.clone() })
            .collect();
        names.sort();
        names.dedup();
        names
    }

    /// The device of a kind that has this device node itself, and the fewest others: not the one for all of them.
    pub fn device_with(&self, kind: &str, node: &Path) -> Option<DeviceName> {
        let nodes = |name: &DeviceName| {
            let (_, device) = self.find(name).ok()?;
            let nodes = &device.container_edits.device_nodes;
            let is_it = |own: &DeviceNode| own.host_path.as_deref().unwrap_or(&own.path) == node;
            nodes.iter().any(is_it).then_some(nodes.len())
        };
        let devices = self.devices(kind).into_iter().filter_map(|name| Some((nodes(&name)?, name)));
        devices.min().map(|(_, name)| name)
    }

    /// The one device that a name stands for.
    pub fn find(&self, wanted: &DeviceName) -> Result<(&File, &Device), Failure> {
        let of_kind = self.files.iter().filter(|file| file.spec.kind == wanted.kind);
        let mut found: Vec<(&File, &Device)> = of_kind
            .flat_map(|file| file.spec.devices.iter().map(move |device| (file, device)))
            .filter(|(_, device)| device.name == wanted.name)
            .collect();
        let highest = found.iter().map(|(file, _)| file.priority).max();
        found.retain(|(file, _)| Some(file.priority) == highest);
        match found.as_slice() {
            [one] => Ok(*one),
            [(one, _), (other, _), ..] => {
                let (one, other) = (one.path.display(), other.path.display());
                Err(Failure::new(format!("{wanted}: {one} and {other} both describe it"))
                    .hint("remove one of the two, or the device from it"))
            }
            [] => Err(self.missing(wanted)),
        }
    }

    fn missing(&self, wanted: &DeviceName) -> Failure {
        // A file that cannot be read may be the one that has it.
        if let Some(failure) = self.broken.first() {
            return failure.clone().about(format!("{wanted} is in no valid CDI specification of this node"));
        }
        let known = self.devices(&wanted.kind);
        if known.is_empty() {
            let kinds: Vec<&str> = self.files.iter().map(|file| file.spec.kind.as_str()).collect();
            let has = match kinds.as_slice() {
                [] => format!("there are none in {}", DIRECTORIES.join(" and ")),
                kinds => format!("there are {}", kinds.join(", ")),
            };
            return Failure::new(format!("{wanted}: this node has no CDI specification for {}", wanted.kind))
                .hint(format!("{has}; `nvidia-ctk cdi generate` and its like write them"));
        }
        let names: Vec<&str> = known.iter().map(|device| device.name.as_str()).collect();
        Failure::new(format!("{wanted}: this node has no such device")).hint(format!(
            "of {} it has {}",
            wanted.kind,
            names.join(", ")
        ))
    }
}

fn read(path: &Path) -> Result<String, Failure> {
    // One that is missing has gone since the directory was listed.
    read_trusted(path)?.ok_or_else(|| Failure::new(format!("{}: no such file", path.display())))
}
