//! Devices that CDI specifications of the node describe: those that are asked for by name, and the step's GPUs, for which
//! a specification holds in place of a rule.

use std::ffi::OsString;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::device::DeviceName;
use mizzen_core::options::Tmpfs;
use mizzen_core::settings::Gpu;
use mizzen_core::settings::Key;
use nix::unistd::getgroups;

use super::HostLibraries;
use super::abi::Kind;
use super::discover::{Found, FoundSet, Node};
use super::gpus::{Choice, Chosen};
use super::image_libraries::ImageLibraries;
use super::rules::Set;
use crate::cdi::{Bind, Edits, Specs};
use crate::image::{Metadata, Tree, resolve};
use crate::mount::{Mount, MountKind, Shape};
use crate::options::{Origin, RunOptions};

/// Where CUDA images have libraries for drivers that are older than their CUDA.
const CUDA_COMPATIBILITY: &str = "/usr/local/cuda/compat/libcuda.so.*";

/// The devices that the user and the site name. What the site wants is left out where the node does not know its kind:
/// mizzen.toml is the same on all nodes.
pub fn named(options: &RunOptions, specs: &Specs) -> Result<Vec<DeviceName>, Failure> {
    let there = |origin: &Origin, kind: &str| *origin != Origin::Site || specs.has_kind(kind);
    let wanted = options.devices.iter().filter(|(device, origin)| there(origin, &device.kind));
    wanted
        .map(|(device, origin)| match specs.find(device) {
            Ok(_) => Ok(device.clone()),
            Err(failure) => Err(failure.about(origin.name_of(Key::Device))),
        })
        .collect()
}

/// The devices of a kind for the GPUs that a step has. `nodes` are the node's GPUs.
///
/// Of what NVIDIA_VISIBLE_DEVICES says, only numbers matter here: specifications themselves set it to `void`, and what runs in such a
/// container may start another step.
pub fn gpus(
    kind: &str,
    specs: &Specs,
    chosen: &Chosen,
    nodes: &[PathBuf],
) -> Result<Vec<DeviceName>, Failure> {
    if let Choice::Numbers(_) = chosen.choice {
        let device =
            |gpu: &PathBuf| specs.device_with(kind, gpu).ok_or_else(|| missing(kind, &gpu.display()));
        return chosen.among(nodes.to_vec())?.iter().map(device).collect();
    }
    let (setting, environment) = (chosen.setting, chosen.environment);
    let named = |name: &str| DeviceName { kind: kind.to_owned(), name: name.to_owned() };
    let known = specs.devices(kind);
    let all = || if known.contains(&named("all")) { vec![named("all")] } else { known.clone() };
    let Some(given) = given(setting, environment) else { return Ok(all()) };
    let mut devices = Vec::new();
    for word in given {
        let by_name = named(word);
        let device = match word.parse::<u32>() {
            Err(_) => known.contains(&by_name).then_some(by_name),
            // Slurm's number is that of the device's file; the names in specifications may be numbers of another order.
            Ok(number) => match nodes.iter().find(|node| number_of(node) == Some(number)) {
                Some(node) => specs.device_with(kind, node),
                None => known.contains(&by_name).then_some(by_name),
            },
        };
        devices.push(device.ok_or_else(|| missing(kind, &word))?);
    }
    Ok(devices)
}

fn missing(kind: &str, gpu: &dyn Display) -> Failure {
    Failure::new(format!("no CDI specification of {kind} has GPU {gpu}, which Slurm gave to this step"))
        .hint("have it written anew (nvidia-ctk cdi generate, or its like), or remove it from the node")
}

/// The GPUs that Slurm has given to the step on this node; none if the container gets all of the node's.
fn given(setting: Gpu, environment: &[(OsString, OsString)]) -> Option<Vec<&str>> {
    let variable = |name: &str| {
        let found = environment.iter().find(|(known, _)| known == name);
        found.and_then(|(_, value)| value.to_str()).filter(|value| !value.is_empty())
    };
    if setting != Gpu::Auto || variable("SLURMD_NODENAME").is_none() {
        return None;
    }
    let given: Vec<&str> = variable("SLURM_STEP_GPUS").or(variable("SLURM_JOB_GPUS"))?.split(',').collect();
    // With --gpus-per-task the variable tells each task of its own alone, and the first task makes the container for all.
    if variable("SLURM_GPUS_ON_NODE").is_some_and(|count| count.parse() != Ok(given.len())) {
        return None;
    }
    // Without ConstrainDevices the program's numbers count all GPUs of the node, so it has to see all of them.
    let visible =
        ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"].into_iter().find_map(variable);
    let highest =
        visible.into_iter().flat_map(|list| list.split(',')).filter_map(|word| word.parse().ok()).max();
    highest.is_none_or(|highest: usize| highest < given.len()).then_some(given)
}

/// 3 of /dev/nvidia3.
fn number_of(node: &Path) -> Option<u32> {
    let name = node.file_name()?.to_str()?;
    name[name.trim_end_matches(|letter: char| letter.is_ascii_digit()).len()..].parse().ok()
}

impl HostLibraries {
    /// What these devices change in a container.
    pub(super) fn add_specified(&mut self, edits: Edits, node: &Node, tree: &dyn Tree, metadata: &Metadata) {
        for device in &edits.devices {
            self.findings.push((device.to_string(), "CDI".to_owned()));
        }
        self.add_libraries(&edits, node, tree, metadata);
        // The administrator's word, as mizzen.toml is: without its place the container is not what they meant.
        let origin = Some(Origin::Site);
        let binds = edits.binds.into_iter().map(|bind| {
            let shape = if bind.is_directory { Shape::Directory } else { Shape::File };
            let kind = MountKind::Bind { source: bind.source, shape };
            Mount { kind, target: bind.target, flags: bind.flags, origin, why: bind.why }
        });
        let tmpfs = edits.tmpfs.into_iter().map(|(target, size, flags)| Mount {
            kind: MountKind::Tmpfs(Tmpfs::of_size(size)),
            target,
            flags,
            origin,
            why: "CDI".to_owned(),
        });
        for mount in binds.chain(tmpfs) {
            self.mounts.retain(|other| other.target != mount.target);
            self.mounts.push(mount);
        }
        self.image_links.extend(edits.links);
        self.variables.set.extend(edits.variables);
        self.notes.extend(edits.notes);
        if !edits.groups.is_empty() {
            let own: Vec<u32> = getgroups().unwrap_or_default().iter().map(|group| group.as_raw()).collect();
            let others = edits.groups.iter().filter(|group| !own.contains(group));
            self.notes
                .extend(others.map(|group| format!("the devices belong to group {group}, and you do not")));
        }
    }

    /// What `ldconfig` would do: the libraries in these folders are found, by the names that they have in themselves.
    ///
    /// A new ld.so.cache would need ldconfig, or a second implementation of its file for every release of glibc, and
    /// would not win over a library that the image's LD_LIBRARY_PATH names. The folders on LD_LIBRARY_PATH would: but
    /// with them the image's other libraries there, before those that programs name in their RUNPATH. So links to just
    /// these libraries are put where the node's libraries are in any case.
    fn add_libraries(&mut self, edits: &Edits, node: &Node, tree: &dyn Tree, metadata: &Metadata) {
        let mut set = FoundSet::of(Set::named("update-ldcache"));
        for bind in &edits.binds {
            let folder = bind.target.parent().unwrap_or(&bind.target);
            let name = bind.target.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if bind.is_directory
                || !edits.library_folders.iter().any(|known| known == folder)
                || !name.contains(".so")
            {
                continue;
            }
            let candidate = node.candidate(name, &bind.source, &bind.why);
            set.libraries.entry(name.to_owned()).or_default().extend(candidate);
        }
        if set.libraries.is_empty() {
            return;
        }
        let found = Found { version: None, gpus: Vec::new(), devices: Vec::new(), sets: vec![set] };
        let image = ImageLibraries::of(tree, &metadata.environment);
        let decisions = self.check("CDI", &found, &[], node, &image);
        for decision in decisions.iter().flatten().filter(|decision| decision.incompatibility.is_none()) {
            let of_bind =
                |bind: &&Bind| bind.target.file_name().is_some_and(|name| *name == *decision.candidate.name);
            let Some(bind) =
                edits.binds.iter().rev().find(of_bind).filter(|_| decision.kind == Kind::Library)
            else {
                self.take(decision); // one that these need and the image lacks
                continue;
            };
            let soname = decision.candidate.library.as_ref().and_then(|library| library.soname.clone());
            for name in [Some(decision.candidate.name.clone()), soname].into_iter().flatten() {
                let place = Path::new("lib").join(name);
                // A rule may have found it as well.
                self.files.retain(|file| file.place != place);
                self.links.insert(place, bind.target.display().to_string());
            }
        }
        if let Some(directory) =
            edits.cuda_driver.as_deref().and_then(|driver| newer_in_image(CUDA_COMPATIBILITY, driver, tree))
        {
            self.findings
                .push((directory.display().to_string(), "CDI: newer than the node's CUDA".to_owned()));
            self.variables.libraries.push(directory); // before the node's
        }
    }
}

/// The directory of the image's libraries for older drivers, if they are newer than the driver. The pattern ends in the
/// version.
pub(super) fn newer_in_image(pattern: &str, driver: &str, tree: &dyn Tree) -> Option<PathBuf> {
    let major = |version: &str| version.split('.').next()?.parse::<u32>().ok();
    let (directory, library) = pattern.strip_suffix('*')?.rsplit_once('/')?;
    let directory = resolve(tree, Path::new(directory)).ok()?.path;
    let names = tree.list(&directory).unwrap_or_default();
    let versions = names.iter().filter_map(|(name, _)| {
        let version = name.to_str()?.strip_prefix(library)?;
        version.contains('.').then(|| major(version))?
    });
    (versions.max()? > major(driver)?).then_some(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gpus_of_a_step() {
        let given = |setting, pairs: &[(&str, &str)]| {
            let environment: Vec<(OsString, OsString)> =
                pairs.iter().map(|(name, value)| (name.into(), value.into())).collect();
            given(setting, &environment).map(|words| words.join(" "))
        };
        let node = ("SLURMD_NODENAME", "n1");
        let gpus = ("SLURM_STEP_GPUS", "2,3");
        assert_eq!(given(Gpu::Auto, &[gpus]), None, "not in a job");
        assert_eq!(given(Gpu::All, &[node, gpus]), None);
        assert_eq!(given(Gpu::Auto, &[node, ("CUDA_VISIBLE_DEVICES", "0")]), None);
        assert_eq!(given(Gpu::Auto, &[node, gpus]).as_deref(), Some("2 3"));
        assert_eq!(given(Gpu::Auto, &[node, gpus, ("CUDA_VISIBLE_DEVICES", "0,1")]).as_deref(), Some("2 3"));
        // One of the step's GPUs for each task, but counted from the node's first.
        assert_eq!(given(Gpu::Auto, &[node, gpus, ("CUDA_VISIBLE_DEVICES", "2")]), None);
        assert_eq!(
            given(Gpu::Auto, &[node, gpus, ("CUDA_VISIBLE_DEVICES", "MIG-1")]).as_deref(),
            Some("2 3")
        );
        assert_eq!(given(Gpu::Auto, &[node, gpus, ("SLURM_GPUS_ON_NODE", "2")]).as_deref(), Some("2 3"));
        assert_eq!(
            given(Gpu::Auto, &[node, gpus, ("SLURM_GPUS_ON_NODE", "4")]),
            None,
            "another task has two more"
        );
        assert_eq!(number_of(Path::new("/dev/nvidia13")), Some(13));
        assert_eq!(number_of(Path::new("/dev/dri/renderD128")), Some(128));
        assert_eq!(number_of(Path::new("/dev/nvidiactl")), None);
    }
}
