//! What each command needs of the other parts: registries, archives, the writer. Runs as the user.

use std::path::PathBuf;

use mizzen::cli::images::{AccountArgs, ExportArgs, ImportArgs, LoginArgs, LogoutArgs};
use mizzen_core::{Config, Failure, Reference};
use serde_json::Value;

use crate::images::Outcome;
use crate::store::select::ListedImage;
use crate::store::{ObtainOptions, Store};

/// What was imported.
pub struct Imported {
    /// The image's file.
    pub path: PathBuf,
    /// With the manifest's digest; None for what is in no registry.
    pub reference: Option<Reference>,
    /// All that `--json` shows.
    pub json: Value,
}

/// Where the user's image store is.
pub fn store_directory(_config: &Config) -> Result<PathBuf, Failure> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let data_home = absolute("XDG_DATA_HOME").or(absolute("HOME").map(|home| home.join(".local/share")));
    data_home.map(|directory| directory.join("mizzen/images")).ok_or_else(|| {
        Failure::new("no directory for images: HOME is not set").hint("set HOME, or XDG_DATA_HOME")
    })
}

/// How an image is obtained by this command.
pub fn obtain_options(args: &ImportArgs) -> ObtainOptions {
    ObtainOptions { again: args.force, group: job(), speaks: !args.quiet, ..ObtainOptions::default() }
}

/// The job that this runs in, all tasks of an array being one: they fail together. One that was requeued is another.
fn job() -> Option<String> {
    let variable = |name: &str| std::env::var(name).ok();
    let job = variable("SLURM_ARRAY_JOB_ID").or_else(|| variable("SLURM_JOB_ID"))?;
    Some(format!("{job}.{}", variable("SLURM_RESTART_COUNT").unwrap_or_default()))
}

/// `mizzen import`.
pub fn import(_args: &ImportArgs, _config: &Config) -> Result<Imported, Failure> {
    Err(missing("import"))
}

/// `mizzen import --for-slurm --resolve-only`: which manifest a name means now.
pub fn resolve(_args: &ImportArgs, _config: &Config) -> Result<Reference, Failure> {
    Err(missing("import"))
}

/// `mizzen export`.
pub fn export(_args: &ExportArgs, _config: &Config) -> Result<(), Failure> {
    Err(missing("export"))
}

/// `mizzen images update`: imports those whose tags mean another image by now.
pub fn update(
    _images: &[&ListedImage],
    _store: &Store,
    _account: &AccountArgs,
    _quiet: bool,
    _config: &Config,
) -> Result<Outcome, Failure> {
    Err(missing("images update"))
}

/// `mizzen login`.
pub fn login(_args: &LoginArgs, _config: &Config) -> Result<(), Failure> {
    Err(missing("login"))
}

/// `mizzen logout`.
pub fn logout(_args: &LogoutArgs, _config: &Config) -> Result<(), Failure> {
    Err(missing("logout"))
}

fn missing(command: &str) -> Failure {
    Failure::new(format!("{command}: not in this build"))
}
