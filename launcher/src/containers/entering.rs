//! What a step does not get that enters a container which runs already: that is as it was started. Runs as the user on the host.

use std::collections::BTreeMap;
use std::path::PathBuf;

use mizzen_core::failure::quote;
use mizzen_core::fs_server;
use mizzen_core::settings::{Key, Settings};

use super::record::Started;
use crate::options::{Origin, RunOptions};

/// Settings that act only when a container is made, and what holds where nobody has said anything. (A container with a name is
/// writable.) Beside these, mounts and namespaces.
const SHAPING: [(Key, &str); 9] = [
    (Key::Device, ""),
    (Key::Hostname, ""),
    (Key::MountHome, "yes"),
    (Key::Writable, "yes"),
    (Key::RemapRoot, "no"),
    (Key::Entrypoint, "no"),
    (Key::Gpu, "auto"),
    (Key::Mpi, "image"),
    (Key::Fabric, "auto"),
];

/// The settings among these that act only when a container is made, by their names.
pub fn shaping(settings: &Settings) -> BTreeMap<String, String> {
    let text = |key: Key| Some(String::from_utf8_lossy(&settings.text(key)?).into_owned());
    SHAPING.into_iter().filter_map(|(key, _)| Some((key.name().to_owned(), text(key)?))).collect()
}

/// A note with the options that have no effect, if there are any: the container was `started` with others, as far as that is known.
pub fn ignored(container: &str, options: &RunOptions, started: Option<&Started>) -> Option<String> {
    let mut ignored = Vec::new();
    let mounts = super::user_mounts(options);
    if !mounts.is_empty() && started.is_none_or(|started| started.mounts != mounts) {
        ignored.push(options.user().name_of(Key::Mounts));
    }
    for (key, default) in SHAPING {
        let Some(asked) = options.asked.get(key.name()) else { continue };
        let has = started.map(|started| started.settings.get(key.name()).map_or(default, String::as_str));
        if has != Some(asked.as_str()) {
            ignored.push(option(options.user(), key, asked));
        }
    }
    (!ignored.is_empty()).then(|| {
        format!(
            "the container \"{container}\" runs already: ignoring {}; the step that starts it can have that",
            ignored.join(", ")
        )
    })
}

/// The option that was given, by its name.
fn option(origin: Origin, key: Key, value: &str) -> String {
    let spec = key.spec();
    let off = match origin {
        Origin::Option => spec.run_off(),
        Origin::StepOption | Origin::Site => spec.off_option(),
    };
    match off.filter(|_| value == "no") {
        Some((name, _)) => format!("--{name}"),
        None => origin.name_of(key),
    }
}

/// What MPI programs will miss that start here, in a container of another step. To be called inside.
pub fn missing_pmix() -> Option<String> {
    let directory = std::env::var_os("PMIX_SERVER_TMPDIR").map(PathBuf::from)?;
    (directory.is_absolute() && !fs_server::is_directory(&directory)).then(|| {
        format!(
            "the files of this step's PMIx server ({}) are not in the container, which another step has started, so MPI programs \
             cannot start: give the step a container of its own, or have it start this one",
            quote(directory.as_os_str().as_encoded_bytes())
        )
    })
}
