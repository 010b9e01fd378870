//! Images made by Singularity and Apptainer: /.singularity.d. Runs as the user on the host.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use mizzen_core::Failure;
use serde_json::Value;

use super::script;
use super::variables::{Job, Variables};
use super::{Entry, Maker, Metadata, Tree, cannot_read, entry, file, json, labels, tree};

pub const DIRECTORY: &str = "/.singularity.d";
const SCRIPTS: &str = "/.singularity.d/env";
const RUNSCRIPT: &str = "/.singularity.d/runscript";
const LABELS: &str = "/.singularity.d/labels.json";

/// Files that every image has and that only serve Singularity itself: its prompt, its applications, its bound
/// libraries. They are real programs for a shell and would only fill the list of what we do not understand.
const RUNTIME: &[&str] = &["01-base.sh", "95-apps.sh", "99-base.sh", "99-runtimevars.sh"];
/// Real images have about seven.
const SCRIPT_LIMIT: usize = 64;
/// Singularity's own PATH: the image's scripts extend it.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

pub fn read(tree: &dyn Tree, job: Job) -> Result<Metadata, Failure> {
    let mut metadata = Metadata::new(Maker::Singularity);
    let mut variables = Variables::new(job);
    variables.set(b"PATH".to_vec(), DEFAULT_PATH.into(), true)?;
    for name in scripts(tree)? {
        let path = format!("{SCRIPTS}/{name}");
        let Some(content) = file(tree, &path)? else { continue };
        script::parse_into(&path, &content, &mut variables)?;
        if name.starts_with("10-docker") {
            complete_path(&mut variables)?;
        }
    }
    metadata.set_variables(variables);
    match entry(tree, RUNSCRIPT)? {
        Some(Entry::File { executable: true }) => metadata.entrypoint = vec![RUNSCRIPT.into()],
        Some(Entry::File { executable: false }) => {
            metadata.entrypoint = vec!["/bin/sh".into(), RUNSCRIPT.into()];
        }
        _ => {}
    }
    if let Some(content) = file(tree, LABELS)?.filter(|content| !content.trim_ascii().is_empty()) {
        let values: Option<BTreeMap<String, Value>> = json(LABELS, &content)?;
        metadata.labels = labels(values);
    }
    Ok(metadata)
}

/// The scripts in the order in which a shell's `*.sh` gives them.
fn scripts(tree: &dyn Tree) -> Result<Vec<String>, Failure> {
    let directory = match tree::resolve(tree, Path::new(SCRIPTS)) {
        Ok(found) if found.entry == Some(Entry::Directory) => found.path,
        Ok(_) => return Ok(Vec::new()),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(cannot_read(SCRIPTS, error)),
    };
    let entries = tree.list(&directory).map_err(|error| cannot_read(SCRIPTS, error))?;
    let script = |entry: &Entry| matches!(entry, Entry::File { .. } | Entry::Symlink);
    let mut names: Vec<String> = entries
        .into_iter()
        .filter(|(name, entry)| script(entry) && name.as_bytes().ends_with(b".sh"))
        .filter_map(|(name, _)| name.into_string().ok())
        .filter(|name| !name.starts_with('.') && !RUNTIME.contains(&name.as_str()))
        .collect();
    names.sort();
    if names.len() > SCRIPT_LIMIT {
        let count = names.len();
        return Err(Failure::new(format!(
            "{SCRIPTS} in the image has {count} scripts, more than {SCRIPT_LIMIT}"
        )));
    }
    Ok(names)
}

/// After the variables of a Docker image Singularity appends to PATH what is missing of its own.
fn complete_path(variables: &mut Variables) -> Result<(), Failure> {
    let mut path = variables.own(b"PATH").unwrap_or_default().to_vec();
    for part in DEFAULT_PATH.split(':') {
        if !path.split(|byte| *byte == b':').any(|known| known == part.as_bytes()) {
            if !path.is_empty() {
                path.push(b':');
            }
            path.extend(part.as_bytes());
        }
    }
    variables.set(b"PATH".to_vec(), path, true)
}
