//! `mizzen check-config`: are mizzen.toml and its drop-ins good, and what of what they name is missing on this machine? Runs as the user on the host.

use std::fs;
use std::path::{Path, PathBuf};

use mizzen_core::config::{DEFAULT_PATH, SiteFiles, Source};
use mizzen_core::failure::{cause, quote};
use mizzen_core::options::MountSource;
use mizzen_core::trusted_file::read_trusted;
use mizzen_core::{Config, Failure};
use nix::unistd::{AccessFlags, access};

use crate::host_libraries;
use crate::report::{print, report, report_note};
use crate::stage::cache::Cache;

/// What a directory or file of mizzen.toml must be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Need {
    /// There.
    Exists,
    /// A directory.
    Directory,
    /// A directory in which this user can make files.
    Writable,
    /// A directory of root's, in which nobody else can make anything.
    Roots,
}

/// Checks the file; without a name, the installed one, its drop-ins and the rules beside it.
pub fn run(file: Option<&Path>) -> Result<(), Failure> {
    let (config, files) = match file {
        Some(file) => (load_one(file)?, Vec::new()),
        None => load_all()?,
    };
    if let Some(name) = config.policy.unknown_owner() {
        let name = quote(name.as_bytes());
        return Err(Failure::new(format!("policy: owners: \"{name}\" is not in /etc/passwd"))
            .hint("users from other name services are written by their number (`id -u NAME`)"));
    }
    if file.is_none() {
        host_libraries::check_rules()?;
    }
    let missing: Vec<String> =
        places(&config).into_iter().filter_map(|(key, path, need)| missing(&key, &path, need)).collect();
    missing.iter().for_each(|note| report_note(note));
    // The file may be meant for other machines than this.
    let rest = if missing.is_empty() { "" } else { ", but not all of it is on this machine" };
    let shown = |file: &Path, rest: &str| format!("{}: good{rest}\n", file.display());
    print(&match (file, files.as_slice()) {
        (Some(file), _) => shown(file, rest),
        (None, []) => shown(Path::new(DEFAULT_PATH), rest),
        (None, [only]) => shown(only, rest),
        (None, files) => {
            let each: String = files.iter().map(|file| shown(file, "")).collect();
            format!("{each}together: good{rest}\n")
        }
    })
}

/// This file alone: it may be a drop-in that is not in its place yet.
fn load_one(file: &Path) -> Result<Config, Failure> {
    let path = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
    let text = read_trusted(&path)?.ok_or_else(|| {
        Failure::new(format!("{}: no such file", path.display())).hint("name a file that is there")
    })?;
    Config::parse(&text, &path)
}

/// All files that the plugin reads here, and which they are. Of several that are bad each is told.
fn load_all() -> Result<(Config, Vec<PathBuf>), Failure> {
    let files = SiteFiles::read(&Source::of_this_machine()?)?;
    let mut bad: Vec<Failure> = files.configs().filter_map(|(_, config)| config.err()).collect();
    if let Some(last) = bad.pop() {
        bad.iter().for_each(report);
        return Err(last);
    }
    Ok((files.merge()?.config, files.paths().map(Path::to_owned).collect()))
}

/// What of the copies' directory is wrong, if it is.
pub fn unusable_stage_directory(config: &Config) -> Option<String> {
    missing("stage_directory", &config.stage_directory, Need::Writable)
}

/// The same of the directory of the copies for all users. Until it is made, it is none.
pub fn unusable_stage_shared(config: &Config) -> Option<String> {
    config.stage_shared.exists().then(|| missing("stage_shared", &config.stage_shared, Need::Roots)).flatten()
}

/// Everything in the file that is a path of the machine, with its key.
fn places(config: &Config) -> Vec<(String, PathBuf, Need)> {
    let folders =
        config.image_folders.iter().map(|path| ("image_folders".to_owned(), path.clone(), Need::Directory));
    // The default need not be there.
    let default = &Config::default().environment_folders;
    let environments = config.environment_folders.iter().filter(|folder| !default.contains(folder));
    let environments =
        environments.map(|path| ("environment_folders".to_owned(), path.clone(), Need::Directory));
    let shared = Some(&config.stage_shared).filter(|path| !path.as_os_str().is_empty());
    let shared = shared.map(|path| ("stage_shared".to_owned(), path.clone(), Need::Roots));
    let stage = ("stage_directory".to_owned(), config.stage_directory.clone(), Need::Writable);
    let certificates = config.registries.iter().filter_map(|(host, registry)| {
        Some((format!("registries.\"{host}\".ca_file"), registry.ca_file.clone()?, Need::Exists))
    });
    let mounts = config.settings.mounts.iter().flatten().filter_map(|mount| match &mount.source {
        MountSource::Bind(path) | MountSource::Squashfs(path) => {
            // A user's own is not known here.
            let named = !path.to_string_lossy().contains('%');
            named.then(|| ("mounts".to_owned(), path.clone(), Need::Exists))
        }
        MountSource::Tmpfs(_) | MountSource::Umount => None,
    });
    folders.chain(environments).chain(shared).chain([stage]).chain(certificates).chain(mounts).collect()
}

fn missing(key: &str, path: &Path, need: Need) -> Option<String> {
    let why = match fs::metadata(path) {
        Err(error) => cause(&error),
        Ok(found) if need != Need::Exists && !found.is_dir() => "not a directory".to_owned(),
        Ok(_) if need == Need::Writable => {
            let failed = access(path, AccessFlags::W_OK | AccessFlags::X_OK).err()?;
            format!("users cannot write there: {}", cause(&failed.into()))
        }
        // As a start asks, which does not use the copies otherwise.
        Ok(_) if need == Need::Roots => {
            return Cache::open_site_read_only(path)
                .err()
                .map(|failure| format!("{key}: {}", failure.message));
        }
        Ok(_) => return None,
    };
    Some(format!("{key}: {}: {why}", path.display()))
}
