//! What each command needs of the other parts: registries, archives, the writer. Runs as the user.

use std::path::{Path, PathBuf};

use mizzen::cli::images::{AccountArgs, ExportArgs, ImportArgs, LoginArgs, LogoutArgs};
use mizzen_core::image_store::own_directory;
use mizzen_core::{Config, Failure, Reference};
use serde_json::{Value, json};

use crate::images::Outcome;
use crate::output::{Existing, check_existing};
use crate::store::key::ImageKey;
use crate::store::select::ListedImage;
use crate::store::sidecar::Provenance;
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

/// `mizzen import`: into a file, or into the user's store.
pub fn import(args: &ImportArgs, config: &Config) -> Result<Imported, Failure> {
    if let Some(output) = &args.output {
        check_existing(output, Existing::with_force(args.force))?;
        let provenance = import_into(args, config, output)?;
        return Ok(Imported {
            path: output.clone(),
            reference: None,
            json: json!({ "path": output, "source": provenance.source }),
        });
    }
    let reference = resolve(args, config)?;
    let digest = reference.digest.ok_or_else(|| missing("import"))?;
    let key = ImageKey::new(&reference, digest, args.platform.as_deref().unwrap_or("linux/amd64"), "v1");
    let store = Store::open(&own_directory(&config.image_store)?)?;
    let image = store.obtain(&key, &obtain_options(args), |path| import_into(args, config, path))?;
    let json = json!({
        "path": image.path,
        "reference": reference.to_string(),
        "digest": digest.to_string(),
        "platform": key.platform,
        "size": image.size,
    });
    Ok(Imported { path: image.path, reference: Some(reference), json })
}

/// Makes the image, as an `OutputFile` that replaces what is there.
fn import_into(_args: &ImportArgs, _config: &Config, _output: &Path) -> Result<Provenance, Failure> {
    Err(missing("import"))
}

/// Which manifest a name means now: the name with its digest.
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
