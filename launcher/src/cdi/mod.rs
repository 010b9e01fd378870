//! Devices by the Container Device Interface: files that a vendor's tool writes on the node say what a container needs
//! for a device (github.com/cncf-tags/container-device-interface). Read only when devices are asked for. Runs as the
//! user on the host.

mod files;
pub(crate) mod hooks;
pub(crate) mod spec;

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::device::DeviceName;
use mizzen_core::failure::cause;
use mizzen_core::options::{MountFlags, parse_size};

pub use files::Specs;
use hooks::Effect;
use spec::{ContainerEdits, DeviceNode};

/// What the devices change in a container, checked against the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Edits {
    /// The devices.
    pub devices: Vec<DeviceName>,
    /// Variables; of two with the same name the later holds.
    pub variables: Vec<(String, String)>,
    /// Device nodes, files and directories of the node; of two on the same place the later holds.
    pub binds: Vec<Bind>,
    /// Empty file systems in memory, with their size.
    pub tmpfs: Vec<(PathBuf, Option<String>, MountFlags)>,
    /// Symbolic links, absolute inside, and where they lead.
    pub links: Vec<(PathBuf, PathBuf)>,
    /// Directories inside whose libraries the loader is to find.
    pub library_folders: Vec<PathBuf>,
    /// The driver's version; an image's newer CUDA compatibility libraries win over it.
    pub cuda_driver: Option<String>,
    /// Groups that a program needs to use the devices.
    pub groups: Vec<u32>,
    /// What mizzen leaves out.
    pub notes: Vec<String>,
}

/// A device node, file or directory of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bind {
    /// On the node.
    pub source: PathBuf,
    /// Inside.
    pub target: PathBuf,
    /// Restrictions.
    pub flags: MountFlags,
    /// Whether it is a directory.
    pub is_directory: bool,
    /// The specification that says so.
    pub why: String,
}

impl Edits {
    /// What some devices change together. `left_out` are hooks that the site does without.
    pub fn of(specs: &Specs, wanted: &[DeviceName], left_out: &[String]) -> Result<Edits, Failure> {
        let mut edits = Edits::default();
        let mut seen: Vec<&Path> = Vec::new();
        for name in wanted {
            if edits.devices.contains(name) {
                continue;
            }
            let (file, device) = specs.find(name)?;
            let about = |failure: Failure| failure.about(file.path.display());
            // What all devices of a file need comes before what one of them needs.
            if !seen.contains(&file.path.as_path()) {
                edits.add(&file.spec.container_edits, &file.path, left_out).map_err(about)?;
                seen.push(&file.path);
            }
            edits.add(&device.container_edits, &file.path, left_out).map_err(about)?;
            edits.devices.push(name.clone());
        }
        Ok(edits)
    }

    fn add(&mut self, edits: &ContainerEdits, file: &Path, left_out: &[String]) -> Result<(), Failure> {
        let pairs = edits.env.iter().filter_map(|text| text.split_once('='));
        self.variables.extend(pairs.map(|(name, value)| (name.into(), value.into())));
        for node in &edits.device_nodes {
            let source = device_source(node)?;
            let target = node.path.clone();
            let flags = MountFlags::default();
            self.binds.push(Bind {
                source,
                target,
                flags,
                is_directory: false,
                why: format!("CDI: {}", file.display()),
            });
        }
        for mount in &edits.mounts {
            self.add_mount(mount, file)?;
        }
        for hook in &edits.hooks {
            for effect in hooks::effects(hook, left_out)? {
                match effect {
                    Effect::Link { link, target } => self.links.push((link, target)),
                    Effect::Libraries(folder) => self.library_folders.push(folder),
                    Effect::CudaCompatibility { driver } => self.cuda_driver = Some(driver),
                }
            }
        }
        self.groups.extend(edits.additional_gids.iter().filter(|gid| **gid != 0));
        if edits.intel_rdt.is_some() {
            let file = file.display();
            self.notes
                .push(format!("{file}: intelRdt is left out: only root can divide the processor's cache"));
        }
        for net in &edits.net_devices {
            // A container has the node's interfaces, under their own names.
            if net.name != net.host_interface_name {
                let (file, host, name) = (file.display(), &net.host_interface_name, &net.name);
                self.notes.push(format!("{file}: network interface {host} is not renamed to {name}"));
            }
        }
        Ok(())
    }

    fn add_mount(&mut self, mount: &spec::Mount, file: &Path) -> Result<(), Failure> {
        let target = mount.container_path.clone();
        let named = |what: String| Failure::new(format!("mount on {}: {what}", target.display()));
        let (flags, size) = mount_flags(&mount.options)
            .map_err(|option| named(format!("mizzen cannot mount with the option {option:?}")))?;
        match mount.kind.as_str() {
            "" | "bind" | "none" => {}
            "tmpfs" => {
                self.tmpfs.push((target, size, flags));
                return Ok(());
            }
            other => return Err(named(format!("mizzen cannot mount file systems of type {other:?}"))),
        }
        let source = mount.host_path.clone();
        let found = source.metadata().map_err(|error| stale(&source, &cause(&error)))?;
        let is_directory = found.is_dir();
        self.binds.push(Bind {
            source,
            target,
            flags,
            is_directory,
            why: format!("CDI: {}", file.display()),
        });
        Ok(())
    }
}

/// The node's device for a device node, which must be the one that is meant.
fn device_source(node: &DeviceNode) -> Result<PathBuf, Failure> {
    let source = node.host_path.clone().unwrap_or_else(|| node.path.clone());
    let found = source.metadata().map_err(|error| stale(&source, &cause(&error)))?;
    let kind = found.file_type();
    let fits = match node.kind.as_str() {
        "c" | "u" => kind.is_char_device(),
        "b" => kind.is_block_device(),
        "p" => kind.is_fifo(),
        _ => kind.is_char_device() || kind.is_block_device() || kind.is_fifo(),
    };
    if !fits {
        return Err(stale(&source, "is not a device of the type that is written there"));
    }
    let numbers = (libc::major(found.rdev()), libc::minor(found.rdev()));
    let differs = |written: Option<i64>, real: u32| written.is_some_and(|written| written != i64::from(real));
    // Without a major number both are left open, as generators write zeros then.
    if node.major.is_some_and(|major| major != 0)
        && (differs(node.major, numbers.0) || differs(node.minor, numbers.1))
    {
        let (major, minor) = (node.major.unwrap_or_default(), node.minor.unwrap_or_default());
        let what = format!("is device {}:{}, not {major}:{minor} as is written there", numbers.0, numbers.1);
        return Err(stale(&source, &what));
    }
    Ok(source)
}

fn stale(path: &Path, what: &str) -> Failure {
    Failure::new(format!("{} of the node: {what}", path.display())).hint(
        "the specification does not fit this node any more; have it written anew (nvidia-ctk cdi generate, or its like)",
    )
}

/// What the options of a mount mean, with the size of a tmpfs; or the option that means nothing here.
fn mount_flags(options: &[String]) -> Result<(MountFlags, Option<String>), &str> {
    let mut flags = MountFlags::default();
    let mut size = None;
    for option in options {
        match option.as_str() {
            "ro" => flags.read_only = true,
            "rw" => flags.read_only = false,
            "noexec" => flags.no_exec = true,
            "exec" => flags.no_exec = false,
            // Always so, or without a meaning in a mount namespace that nobody else sees.
            "bind" | "rbind" | "nosuid" | "nodev" | "private" | "rprivate" | "slave" | "rslave"
            | "shared" | "rshared" | "atime" | "noatime" | "diratime" | "nodiratime" | "relatime"
            | "norelatime" | "strictatime" | "nostrictatime" | "sync" | "async" | "defaults" => {}
            // No mount inside gives privileges; devices work below /dev.
            "suid" | "dev" => {}
            other => match other.strip_prefix("size=") {
                Some(limit) => size = Some(parse_size(limit).map_err(|_| other)?),
                None if other.starts_with("mode=") => {}
                None => return Err(other),
            },
        }
    }
    Ok((flags, size))
}

#[cfg(test)]
mod tests;
