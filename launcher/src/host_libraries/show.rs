//! What was found and decided, for people.

use std::fmt::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::failure::cause;
use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};

use crate::cdi::Specs;

use super::abi::{Decision, Kind};
use super::discover::{Candidate, Node};
use super::rules::{self, Set, Switch};

/// One line of `mizzen plan`: the file, and what happens to it.
pub fn finding(rule: &str, set: &Set, decision: &Decision) -> (String, String) {
    let what = decision.candidate.file.display().to_string();
    let kind = match &decision.kind {
        Kind::Library | Kind::Optional => String::new(),
        Kind::NeededBy(library) => format!(", needed by {library}"),
        Kind::Program => ", program".to_owned(),
    };
    let outcome = match &decision.incompatibility {
        None => format!("from {}", decision.candidate.origin),
        Some(incompatibility) => format!("left out: {}", incompatibility.text()),
    };
    (what, format!("{rule}: {}{kind}; {outcome}", set.name))
}

/// One line for what is missing inside, and why.
pub fn note(rule: &str, decisions: &[Decision]) -> Option<String> {
    let missed = |decision: &&Decision| decision.incompatibility.is_some() && decision.kind == Kind::Library;
    let mut missed = decisions.iter().filter(missed);
    let first = missed.next()?;
    let incompatibility = first.incompatibility.as_ref()?;
    let mut text =
        format!("the node's {} is left out: {}", first.candidate.file_name(), incompatibility.text());
    if let Some(hint) = incompatibility.hint() {
        let _ = write!(text, "; {hint}");
    }
    match missed.count() {
        0 => {}
        others => {
            let _ = write!(text, " (and {others} more of {rule}; mizzen plan shows them)");
        }
    }
    Some(text)
}

/// `mizzen doctor --gpu --fabric`: everything that rules of these kinds find on this node, whatever the image.
pub fn examine(switches: &[Switch]) -> Result<Vec<(String, String)>, Failure> {
    let node = Node::this();
    let mut lines = Vec::new();
    for rule in rules::load(Path::new(rules::DIRECTORY), |_, _| true)? {
        if !switches.contains(&rule.switch) {
            continue;
        }
        if !node.has(&rule) {
            let when: Vec<String> = rule.when.iter().map(|path| path.display().to_string()).collect();
            lines.push((rule.name.clone(), format!("not on this node: no {}", when.join(", no "))));
            continue;
        }
        let found = node.find(&rule, &rule.sets.iter().collect::<Vec<_>>());
        let version = found.version.clone().unwrap_or_else(|| "unknown".to_owned());
        lines.push((rule.name.clone(), format!("driver version {version}")));
        for device in found.gpus.iter().chain(&found.devices) {
            lines.push((format!("  {}", device.display()), usable(device)));
        }
        for found_set in &found.sets {
            for (name, candidates) in &found_set.libraries {
                for candidate in candidates {
                    lines.push((
                        format!("  {name}"),
                        described(candidate, &found_set.set, found.version.as_deref()),
                    ));
                }
            }
            for program in &found_set.programs {
                lines.push((format!("  {}", program.name), described(program, &found_set.set, None)));
            }
            for file in &found_set.files {
                lines.push((format!("  {}", file.display()), found_set.set.name.clone()));
            }
            if !found_set.missing.is_empty() {
                lines.push((
                    format!("  {}", found_set.set.name),
                    format!("not on this node: {}", found_set.missing.join(", ")),
                ));
            }
        }
    }
    if switches.contains(&Switch::Gpu) {
        lines.extend(specifications());
    }
    Ok(lines)
}

/// The node's CDI specifications.
fn specifications() -> Vec<(String, String)> {
    let specs = Specs::of_node();
    let good = specs.files().iter().map(|file| {
        let names: Vec<&str> = file.spec.devices.iter().map(|device| device.name.as_str()).collect();
        (file.path.display().to_string(), format!("CDI: {} {}", file.spec.kind, names.join(" ")))
    });
    let broken = specs.broken().iter().map(|failure| ("CDI".to_owned(), format!("not used: {failure}")));
    good.chain(broken).collect()
}

fn described(candidate: &Candidate, set: &Set, driver: Option<&str>) -> String {
    let file = candidate.file.display();
    let state = match (&candidate.library, candidate.version(), driver) {
        (None, _, _) => ", not made for this machine",
        (_, Some(own), Some(driver)) if own != driver => ", of another driver",
        _ => "",
    };
    format!("{}: {file}, from {}{state}", set.name, candidate.origin)
}

/// What is said of a device, and whether the user may open it.
fn usable(device: &Path) -> String {
    match closed(device) {
        Some(why) => why,
        None if device.is_dir() => "devices".to_owned(),
        None => "device".to_owned(),
    }
}

/// Why the user cannot open a device: the group that it belongs to. Of a directory one of its devices, but for those that
/// drive displays (card0), which no computation opens.
pub fn closed(device: &Path) -> Option<String> {
    if device.is_dir() {
        let entries = device.read_dir().ok()?.flatten().map(|entry| entry.path());
        let opened = |path: &PathBuf| {
            let display = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"card"));
            !display && path.metadata().is_ok_and(|found| found.file_type().is_char_device())
        };
        return entries.filter(opened).find_map(|path| closed(&path));
    }
    // EPERM is the word of Slurm's device cgroup.
    let errno = access(device, AccessFlags::R_OK | AccessFlags::W_OK)
        .err()
        .filter(|errno| *errno == Errno::EACCES)?;
    let group = device.metadata().ok()?.gid();
    Some(format!(
        "you cannot open {} ({}): it belongs to group {group}",
        device.display(),
        cause(&errno.into())
    ))
}
