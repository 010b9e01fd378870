//! `mizzen env`: render, validate and list environment files; and the answer for the plugin. Runs as the user.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use mizzen_core::config::Source;
use mizzen_core::environment::Environment;
use mizzen_core::failure::{cause, quote};
use mizzen_core::options::MountSource;
use mizzen_core::{Config, Failure};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};
use serde_json::json;

use super::find::FolderOrigin;
use super::{container, finder, load, read, show};
use crate::report::{print, report, report_note};

/// Answers the plugin, which has no parser: one line, or the failure.
pub fn answer_program(name: &OsStr, config: Option<&Path>) -> ExitCode {
    // srun blocks what its thread for signals takes; Ctrl-C is to end this. Nobody waits for the answer when the asker is gone.
    let _ = SigSet::empty().thread_set_mask();
    let _ = set_pdeathsig(Signal::SIGTERM);
    let source = config.map_or(Source::Default, |path| Source::Named(path.to_owned()));
    let answer = Config::load(&source).and_then(|config| read(name, &config));
    let (text, code) = match answer {
        Ok(environment) => (environment.encode(), ExitCode::SUCCESS),
        Err(failure) => (failure.encode(), ExitCode::FAILURE),
    };
    match print(&format!("{text}\n")) {
        Ok(()) => code,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Prints a file with its parents and variables.
pub fn render(name: &OsStr, json: bool) -> Result<(), Failure> {
    let loaded = load(name, &Config::of_this_machine()?)?;
    // What is wrong with a value is told here as well.
    container::describe(&loaded)?.notes.iter().for_each(|note| report_note(note));
    let text = if json { format!("{:#}\n", show::to_json(&loaded)) } else { show::to_toml(&loaded) };
    print(&text)
}

/// Says of each file whether it is good, and what of it is not on this machine.
pub fn validate(names: &[OsString]) -> Result<ExitCode, Failure> {
    let config = Config::of_this_machine()?;
    let mut code = ExitCode::SUCCESS;
    for name in names {
        let checked = read(name, &config).and_then(|environment| {
            if environment.image.is_none() {
                return Err(no_image(&environment));
            }
            Ok(environment)
        });
        match checked {
            Ok(environment) => {
                let missing = missing(&environment);
                environment.notes.iter().chain(&missing).for_each(|note| report_note(note));
                let rest = if missing.is_empty() { "" } else { ", but not all of it is on this machine" };
                print(&format!("{}: good{rest}\n", environment.file))?;
            }
            Err(failure) => {
                report(&failure);
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}

/// A file without an image can be a parent of others, and no container.
pub fn no_image(environment: &Environment) -> Failure {
    Failure::new(format!("{}: no image", environment.file))
        .hint("write image = \"…\" in it, or name a base_environment that does")
}

/// What the container needs and this machine does not have; the nodes may.
fn missing(environment: &Environment) -> Vec<String> {
    let image = environment.image.iter().filter(|(_, image)| image.starts_with(b"/"));
    let image = image.map(|(place, image)| (place.clone(), PathBuf::from(&*String::from_utf8_lossy(image))));
    let mounts = environment.settings.mounts.iter().flatten().filter_map(|mount| match &mount.source {
        MountSource::Bind(path) | MountSource::Squashfs(path) => Some(("mounts".to_owned(), path.clone())),
        MountSource::Tmpfs(_) | MountSource::Umount => None,
    });
    let lost = |(what, path): (String, PathBuf)| {
        // %u and %j are not known here.
        let known = !path.to_string_lossy().contains('%');
        let error = path.metadata().err().filter(|_| known)?;
        Some(format!("{what}: {}: {}", quote(path.as_os_str().as_encoded_bytes()), cause(&error)))
    };
    image.chain(mounts).filter_map(lost).collect()
}

/// A file in one of the folders.
struct Listed {
    name: String,
    file: PathBuf,
    origin: FolderOrigin,
    hidden_by: Option<PathBuf>,
}

/// Shows the files of all folders, and which of them is hidden by another of the same name.
pub fn list(json: bool) -> Result<(), Failure> {
    let finder = finder(&Config::of_this_machine()?)?;
    let mut files: Vec<Listed> = Vec::new();
    let mut first: BTreeMap<String, PathBuf> = BTreeMap::new();
    let mut folders = Vec::new();
    for (folder, origin) in &finder.folders {
        let listed = fs::read_dir(folder);
        let error = listed.as_ref().err().map(cause);
        folders.push(json!({ "path": folder.to_string_lossy(), "origin": origin.name(), "error": error }));
        let mut found: Vec<PathBuf> =
            listed.into_iter().flatten().flatten().map(|entry| entry.path()).collect();
        found.retain(|path| path.extension().is_some_and(|end| end == "toml"));
        found.sort();
        for file in found {
            let Some(name) = file.file_stem().and_then(OsStr::to_str).map(str::to_owned) else { continue };
            let hidden_by = first.get(&name).cloned();
            first.entry(name.clone()).or_insert_with(|| file.clone());
            files.push(Listed { name, file, origin: *origin, hidden_by });
        }
    }
    if json {
        let files = files.iter().map(|listed| {
            let hidden_by = listed.hidden_by.as_ref().map(|path| path.to_string_lossy());
            json!({
                "name": listed.name,
                "file": listed.file.to_string_lossy(),
                "origin": listed.origin.name(),
                "hidden_by": hidden_by,
            })
        });
        let files: Vec<_> = files.collect();
        return print(&format!("{:#}\n", json!({ "folders": folders, "environments": files })));
    }
    let shown = |path: &Path| quote(path.as_os_str().as_encoded_bytes());
    let width = files.iter().map(|listed| listed.name.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for Listed { name, file, hidden_by, .. } in &files {
        let name = quote(name.as_bytes());
        let hidden = hidden_by.as_ref().map(|by| format!(" (hidden by {})", shown(by))).unwrap_or_default();
        text.push_str(&format!("{name:width$}  {}{hidden}\n", shown(file)));
    }
    if files.is_empty() {
        let folders: Vec<String> = finder.folders.iter().map(|(folder, _)| shown(folder)).collect();
        text = format!("no environment files in {}\n", folders.join(", "));
    }
    print(&text)
}
