//! What containers get of the node beside the image: the GPU driver's libraries, which must be those of the node's kernel,
//! and what else rules name.
//!
//!     rules (conf/host.d) -> facts (discover.rs) -> decision (abi.rs) -> part of the plan
//!
//! Runs as the user on the host. Nothing of the image is replaced: libraries and programs lie in a directory of their
//! own inside, which is put on LD_LIBRARY_PATH and PATH.

mod abi;
mod cdi_devices;
mod discover;
mod fabric;
mod gpus;
mod image_libraries;
pub(crate) mod ld_cache;
mod pattern;
mod rules;
mod show;
mod site_mpi;

use std::cell::LazyCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use serde::{Deserialize, Serialize};

use crate::cdi::{Edits, Specs};
use crate::host::Host;
use crate::image::{Metadata, Tree, resolve};
use crate::mount::{HostFile, Mount};
use crate::options::RunOptions;
use abi::{Decision, Kind};
use discover::{Found, Node};
use gpus::{Choice, Chosen};
use image_libraries::{CLibrary, ImageLibraries};
use rules::Rule;

pub use rules::Switch;
pub use show::examine;

/// Where it is all put, inside: a place that no usual mount covers, as one on /run would.
pub const DIRECTORY: &str = "/.mizzen/host";

/// What a container gets of the node.
#[derive(Clone, Debug, Default)]
pub struct HostLibraries {
    /// Devices.
    pub devices: Vec<PathBuf>,
    /// Files for the directory inside.
    pub files: Vec<HostFile>,
    /// Links in that directory: their places, and what is in them.
    pub links: BTreeMap<PathBuf, String>,
    /// Files and directories that are bound where they are on the node, with the reason.
    pub binds: Vec<(PathBuf, String)>,
    /// What CDI specifications mount, also on files of the image.
    pub mounts: Vec<Mount>,
    /// Links that they want in the image or below /dev: absolute, and where they lead.
    pub image_links: Vec<(PathBuf, PathBuf)>,
    /// What programs need to find it all.
    pub variables: Variables,
    /// Every decision, for `mizzen plan`: what, and its reason.
    pub findings: Vec<(String, String)>,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// How the environment of programs changes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Variables {
    /// Directories that go before those of LD_LIBRARY_PATH.
    pub libraries: Vec<PathBuf>,
    /// Directories that go before those of PATH.
    pub programs: Vec<PathBuf>,
    /// Variables of the rules.
    pub set: BTreeMap<String, String>,
}

/// Where a dynamic linker looks without being told.
fn standard_directories() -> Vec<String> {
    let directories = ["/lib/{triplet}", "/usr/lib/{triplet}", "/lib64", "/usr/lib64", "/lib", "/usr/lib"];
    directories.map(pattern::for_this_machine).to_vec()
}

/// Decides what a container of this image gets on this node.
pub fn decide(
    options: &RunOptions,
    tree: &dyn Tree,
    metadata: &Metadata,
    host: &Host,
) -> Result<HostLibraries, Failure> {
    let node = Node::this();
    let asked = |switch| switch != Switch::Mpi || options.host_mpi.is_some();
    let rules = rules::load(Path::new(rules::DIRECTORY), |switch, path| asked(switch) && node.exists(path))?;
    let variable = |name: &str| {
        let of_host = host.environment.iter().find(|(known, _)| known == name);
        let found = of_host.or(metadata.environment.iter().find(|(known, _)| known == name));
        found.and_then(|(_, value)| value.to_str()).map(str::to_owned)
    };
    let mut given = HostLibraries::default();
    // Read when the first asks for devices that they may describe.
    let specs = LazyCell::new(Specs::of_node);
    let mut devices = match options.devices.is_empty() {
        true => Vec::new(),
        false => cdi_devices::named(options, &specs)?,
    };
    for rule in &rules {
        let (on, why) = match rule.switch {
            Switch::Gpu => gpus::wanted(options.settings.gpu(), &host.environment, || host.slurm_conf()),
            Switch::Fabric => (true, "default".to_owned()),
            Switch::Mpi => {
                if let Some(origin) = options.host_mpi {
                    given.replace_mpi(
                        rule,
                        origin,
                        &node,
                        &ImageLibraries::of(tree, &metadata.environment),
                    )?;
                }
                continue;
            }
        };
        if !on {
            given.findings.push((format!("{}: nothing", rule.name), why));
            continue;
        }
        let chosen = rule.gpus_variable.as_deref().and_then(|name| Some((name, variable(name)?)));
        let chosen = Chosen::new(options.settings.gpu(), &host.environment, chosen);
        if chosen.choice == Choice::Unknown {
            let text = chosen.text();
            given
                .notes
                .push(format!("{text}: only numbers choose among the GPUs of a step, which are all there"));
        }
        if let Some(kind) = rule.cdi.as_deref().filter(|kind| specs.has_kind(kind)) {
            // Who names some of them means just those.
            if devices.iter().all(|device| device.kind != *kind) {
                devices.extend(cdi_devices::gpus(kind, &specs, &chosen, &node.gpus(rule))?);
            }
            given.findings.push((rule.name.clone(), format!("{why}; by CDI specification")));
            continue;
        }
        if chosen.choice == Choice::Nothing {
            given.findings.push((format!("{}: nothing", rule.name), format!("{why}; {}", chosen.text())));
            continue;
        }
        if let Some(failure) = rule.cdi.as_ref().and_then(|_| specs.broken().first()) {
            given.notes.push(format!("a CDI specification of this node is not used: {failure}"));
        }
        let (sets, why) = match rule.switch {
            Switch::Fabric => match fabric::images_own(options.settings.fabric(), rule, &node, tree) {
                Some(why) => (Vec::new(), why),
                None => (rule.chosen(variable), why),
            },
            Switch::Gpu | Switch::Mpi => (rule.chosen(variable), why),
        };
        let notes = given.notes.len();
        let mut found = node.find(rule, &sets);
        found.gpus = chosen.among(found.gpus)?;
        given.add(rule, &found, &why, &node, tree, metadata);
        if rule.switch == Switch::Fabric {
            given.notes.extend(fabric::locked_memory());
            // On nodes with a fabric every container gets it. Who does not use it need not read why it does not work.
            let used = || {
                fabric::is_used(
                    options.settings.fabric(),
                    rule,
                    &ImageLibraries::of(tree, &metadata.environment),
                )
            };
            if given.notes.len() > notes && !used() {
                given.notes.truncate(notes);
            }
        }
    }
    if !devices.is_empty() {
        let edits =
            Edits::of(&specs, &devices, &options.leave_out_hooks).map_err(|failure| failure.about("CDI"))?;
        given.add_specified(edits, &node, tree, metadata);
    }
    given.finish();
    Ok(given)
}

/// Reads all rules, also those of hardware that this node does not have.
pub fn check_rules() -> Result<(), Failure> {
    rules::load(Path::new(rules::DIRECTORY), |_, _| true).map(drop)
}

impl HostLibraries {
    /// What a rule's findings give to a container of this image.
    fn add(
        &mut self,
        rule: &Rule,
        found: &Found,
        why: &str,
        node: &Node,
        tree: &dyn Tree,
        metadata: &Metadata,
    ) {
        let version = found.version.as_ref().map_or(String::new(), |version| format!(" {version}"));
        self.findings.push((format!("{}{version}", rule.name), why.to_owned()));
        for device in found.gpus.iter().chain(&found.devices) {
            if !self.devices.contains(device) {
                self.devices.push(device.clone());
                self.findings.push((device.display().to_string(), format!("{}: device", rule.name)));
            }
        }
        self.notes.extend(found.gpus.iter().chain(&found.devices).find_map(|device| show::closed(device)));
        let image = ImageLibraries::of(tree, &metadata.environment);
        let Some(decisions) = self.check(&rule.name, found, &rule.directories, node, &image) else { return };
        if let (Some(pattern), Some(driver)) = (&rule.compatibility, &found.version)
            && let Some(directory) = cdi_devices::newer_in_image(pattern, driver, tree)
        {
            let why = format!("{}: the image's, newer than the driver", rule.name);
            self.findings.push((directory.display().to_string(), why));
            self.variables.libraries.push(directory); // before the node's
        }
        decisions
            .iter()
            .filter(|decision| decision.incompatibility.is_none())
            .for_each(|decision| self.take(decision));
        for found in &found.sets {
            let has = |name: &str| {
                decisions.iter().any(|d| d.incompatibility.is_none() && d.candidate.name == name)
            };
            let links = found.set.links.iter().filter(|(_, target)| has(target));
            self.links.extend(links.map(|(link, target)| (Path::new("lib").join(link), target.clone())));
            let taken = found.libraries.is_empty() || found.libraries.keys().any(|name| has(name));
            if !taken {
                continue;
            }
            self.add_beside(&found.set, node);
            for file in &found.files {
                self.add_file(rule, &found.set.name, file, tree);
            }
        }
    }

    /// Whether the image's programs can load what was found; none if that is out of the question for all of it.
    fn check(
        &mut self,
        name: &str,
        found: &Found,
        directories: &[String],
        node: &Node,
        image: &ImageLibraries,
    ) -> Option<Vec<Decision>> {
        let wanted = found.sets.iter().any(|set| !set.libraries.is_empty() || !set.programs.is_empty());
        let c_library = if wanted { image.c_library() } else { CLibrary::Glibc };
        if c_library != CLibrary::Glibc {
            let which = if c_library == CLibrary::Musl { "musl" } else { "no C library of its own" };
            self.notes.push(format!(
                "the image has {which}: the node's {name} libraries need glibc, and are left out"
            ));
            return None;
        }
        let decisions = abi::decide(found, directories, node, image);
        for decision in &decisions {
            self.findings.push(show::finding(name, &found.sets[decision.set].set, decision));
        }
        self.notes.extend(show::note(name, &decisions));
        Some(decisions)
    }

    fn take(&mut self, decision: &Decision) {
        let (candidate, file_name) = (&decision.candidate, decision.candidate.file_name());
        if decision.kind == Kind::Program {
            let place = Path::new("bin").join(&candidate.name);
            self.files.push(HostFile { place, source: candidate.file.clone() });
            return;
        }
        let place = Path::new("lib").join(&file_name);
        if !self.files.iter().any(|file| file.place == place) {
            self.files.push(HostFile { place, source: candidate.file.clone() });
        }
        let soname = candidate.library.as_ref().and_then(|library| library.soname.clone());
        for name in [Some(candidate.name.clone()), soname].into_iter().flatten() {
            if name != file_name {
                self.links.insert(Path::new("lib").join(name), file_name.clone());
            }
        }
    }

    /// A file with a place of its own, unless the image has something there.
    fn add_file(&mut self, rule: &Rule, set: &str, file: &Path, tree: &dyn Tree) {
        let why = format!("{}: {set}", rule.name);
        let free = resolve(tree, file).is_ok_and(|found| found.entry.is_none());
        if free {
            self.binds.push((file.to_owned(), why.clone()));
        }
        let reason = if free { why } else { format!("{why}; left out: the image has its own") };
        self.findings.push((file.display().to_string(), reason));
    }

    /// Where to look for what there is.
    fn finish(&mut self) {
        // Two rules, or a rule and a specification, may give the same library, each in its own way.
        let files = &self.files;
        self.links.retain(|link, _| !files.iter().any(|file| file.place == *link));
        for (directory, variable) in
            [("lib", &mut self.variables.libraries), ("bin", &mut self.variables.programs)]
        {
            let files = self.files.iter().map(|file| &file.place);
            if files.chain(self.links.keys()).any(|place| place.starts_with(directory)) {
                variable.push(Path::new(DIRECTORY).join(directory));
            }
        }
    }
}
