//! The plan for people and for programs.

use std::ffi::OsStr;
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use mizzen_core::failure::quote;
use mizzen_core::options::Tmpfs;
use serde_json::{Value, json};

use super::Plan;
use crate::mount::{Mount, MountKind};

impl Plan {
    /// One line per decision, with its reason.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let mut line = |name: &str, value: &str, why: &str| {
            let _ = writeln!(text, "{name:<9} {value:<58} {why}");
        };
        if let Some(reference) = &self.facts.reference {
            line("image", reference, "");
        }
        line("command", &words(&self.program.command.value), &self.program.command.why);
        line("workdir", &path(&self.program.workdir.value), &self.program.workdir.why);
        let identity = &self.identity;
        line("user", &format!("{} is {} inside", identity.uid, identity.inside_uid), "");
        line("group", &format!("{} is {} inside", identity.gid, identity.inside_gid), "");
        line("unshare", &self.namespaces().join(","), "");
        if let Some(hostname) = &self.facts.hostname {
            line("hostname", hostname, "");
        }
        line("root", &self.root.text(), self.root.why());
        for skeleton in &self.skeletons {
            let added: Vec<String> = skeleton.added.iter().map(|(added, _)| path(added)).collect();
            line("places", &path(&skeleton.directory), &format!("the image lacks {}", added.join(", ")));
        }
        let added = self.skeletons.iter().flat_map(|skeleton| &skeleton.links);
        for link in added.filter(|link| link.needed).chain(&self.links) {
            line("link", &format!("{} to {}", path(&link.path), path(&link.target)), "CDI");
        }
        for (file, content) in &self.files {
            line(
                "file",
                &format!("{} of {} bytes", path(file), content.len()),
                "default, in the writable root",
            );
        }
        for mount in &self.mounts {
            line("mount", &format!("{} {}", path(&mount.target), what(mount)), &mount.why);
        }
        for variable in &self.program.environment {
            let shown = format!("{}={}", os(&variable.name), os(&variable.value));
            line("env", &shown, &variable.why);
        }
        for (what, why) in &self.findings {
            line("node", &quote(what.as_bytes()), why);
        }
        for note in &self.notes {
            line("note", note, "");
        }
        text
    }

    /// The same for programs.
    pub fn to_json(&self) -> Value {
        let identity = &self.identity;
        json!({
            "reference": self.facts.reference,
            "command": { "value": self.program.command.value.iter().map(|w| os(w)).collect::<Vec<_>>(), "why": self.program.command.why },
            "workdir": { "value": path(&self.program.workdir.value), "why": self.program.workdir.why },
            "user": { "uid": identity.uid, "gid": identity.gid,
                      "inside_uid": identity.inside_uid, "inside_gid": identity.inside_gid },
            "unshare": self.namespaces(),
            "hostname": self.facts.hostname,
            "root": { "value": self.root.text(), "why": self.root.why() },
            "places": self.skeletons.iter().map(|skeleton| json!({
                "directory": path(&skeleton.directory),
                "added": skeleton.added.iter().map(|(added, _)| path(added)).collect::<Vec<_>>(),
            })).collect::<Vec<_>>(),
            "links": self.skeletons.iter().flat_map(|skeleton| &skeleton.links).chain(&self.links).map(|link| json!({
                "path": path(&link.path), "target": path(&link.target),
            })).collect::<Vec<_>>(),
            "files": self.files.iter().map(|(file, content)| json!({
                "path": path(file), "size": content.len(),
            })).collect::<Vec<_>>(),
            "mounts": self.mounts.iter().map(|mount| json!({
                "target": path(&mount.target), "what": what(mount), "why": mount.why,
                "read_only": mount.flags.read_only, "no_exec": mount.flags.no_exec,
            })).collect::<Vec<_>>(),
            "environment": self.program.environment.iter().map(|variable| json!({
                "name": os(&variable.name), "value": os(&variable.value), "why": variable.why,
            })).collect::<Vec<_>>(),
            "node": self.findings.iter().map(|(what, why)| json!({ "what": what, "why": why })).collect::<Vec<_>>(),
            "notes": self.notes,
        })
    }

    fn namespaces(&self) -> Vec<&'static str> {
        ["user", "mount"]
            .into_iter()
            .chain(self.unshare.names().into_iter().filter(|(_, wanted)| *wanted).map(|(name, _)| name))
            .collect()
    }
}

fn what(mount: &Mount) -> String {
    let mut text = match &mount.kind {
        MountKind::Bind { source, .. } if source == &mount.target => "from the host".to_owned(),
        MountKind::Bind { source, .. } => format!("from {}", path(source)),
        MountKind::Devices(devices) => format!("with {} devices", devices.len()),
        MountKind::Proc => "a new procfs".to_owned(),
        MountKind::MessageQueues => "the container's own message queues".to_owned(),
        MountKind::Tmpfs(Tmpfs { size: None, .. }) => "an empty tmpfs".to_owned(),
        MountKind::Tmpfs(Tmpfs { size: Some(size), .. }) => format!("an empty tmpfs of {size}"),
        MountKind::File(content) => format!("a file of {} bytes", content.len()),
        MountKind::Squashfs(source) => format!("the content of {}", path(source)),
        MountKind::Commands(_) => "Slurm's commands".to_owned(),
        MountKind::HostFiles { files, .. } => format!("with {} files of the node", files.len()),
    };
    for (on, name) in [(mount.flags.read_only, " read-only"), (mount.flags.no_exec, " noexec")] {
        if on {
            text.push_str(name);
        }
    }
    text
}

fn words(words: &[std::ffi::OsString]) -> String {
    words.iter().map(|word| os(word)).collect::<Vec<_>>().join(" ")
}

fn path(path: &Path) -> String {
    os(path.as_os_str())
}

fn os(text: &OsStr) -> String {
    quote(text.as_bytes())
}
