//! Slurm's own container runtime. With an oci.conf the built-in `--container` is its business, not ours.

use std::path::PathBuf;

use mizzen_core::{Failure, SlurmConf};

use crate::spank;

/// Whether this Slurm is configured to run OCI bundles itself: oci.conf is beside the slurm.conf in use.
pub fn slurm_runs_containers() -> bool {
    SlurmConf::find_directory(named_conf().as_deref())
        .is_some_and(|directory| directory.join("oci.conf").exists())
}

/// Slurm's PMIx plugin, from 23.02 on, takes every `--container` for one of Slurm's own runtime and looks for its
/// directory, which is not there: the step would fail. Only srun's own option is to blame, so srun forgets it; the
/// container is in the request. (The job then does not show the image in scontrol.)
pub fn hide_container_option_from_pmix() -> Result<(), Failure> {
    if spank::slurm_version() < (23, 2) || !spank::is_srun() || spank::own_option(c"container").is_none() {
        return Ok(());
    }
    let chosen = spank::own_option(c"mpi").or_else(|| default_mpi().map(String::into_bytes));
    let pmix = chosen.is_none_or(|value| value.starts_with(b"pmix"));
    if !pmix || spank::forget_own_option(c"container") {
        return Ok(());
    }
    Err(Failure::new("--container: Slurm's PMIx plugin would take it for a container of Slurm's own runtime")
        .hint("use --container-image with --mpi=pmix"))
}

/// MpiDefault of slurm.conf, `none` if it has none; None if not all of the file can be read.
fn default_mpi() -> Option<String> {
    let conf = SlurmConf::read(named_conf().as_deref())?;
    match conf.value("MpiDefault") {
        Some(value) => value.split_whitespace().next().map(str::to_ascii_lowercase),
        None if conf.is_incomplete() => None,
        None => Some("none".to_owned()),
    }
}

fn named_conf() -> Option<PathBuf> {
    std::env::var_os("SLURM_CONF").map(PathBuf::from)
}
