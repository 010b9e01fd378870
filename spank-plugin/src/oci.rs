//! Slurm's own container runtime. With an oci.conf the built-in `--container` is its business, not ours.

use std::path::{Path, PathBuf};

use mizzen_core::Failure;

use crate::spank;

/// Whether this Slurm is configured to run OCI bundles itself: oci.conf is beside the slurm.conf in use.
pub fn slurm_runs_containers() -> bool {
    configuration_directory().is_some_and(|directory| directory.join("oci.conf").exists())
}

/// Slurm's PMIx plugin, from 23.02 on, takes every `--container` for one of Slurm's own runtime and looks for its
/// directory, which is not there: the step would fail. Only srun's own option is to blame, so srun forgets it; the
/// container is in the request. (The job then does not show the image in scontrol.)
pub fn spare_pmix() -> Result<(), Failure> {
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

/// MpiDefault of slurm.conf, `none` if it has none; None if the file cannot be read, or includes others.
fn default_mpi() -> Option<String> {
    let text =
        std::fs::read_to_string(configuration_directory()?.join("slurm.conf")).ok()?.to_ascii_lowercase();
    let lines = || text.lines().map(|line| line.split('#').next().unwrap_or_default());
    match lines().filter_map(|line| line.split_once("mpidefault=")).next_back() {
        Some((_, value)) => value.split_whitespace().next().map(str::to_owned),
        None if lines().any(|line| line.trim_start().starts_with("include")) => None,
        None => Some("none".to_owned()),
    }
}

/// Where slurm.conf is: as SLURM_CONF says, else where Slurm was built to look, which only Slurm knows; so the usual
/// places in turn. /run/slurm/conf is where nodes without files of their own fetch them to.
fn configuration_directory() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("SLURM_CONF") {
        return Path::new(&named).parent().map(Path::to_owned);
    }
    let usual = ["/etc/slurm", "/run/slurm/conf", "/usr/local/etc", "/etc"].map(PathBuf::from);
    usual.into_iter().find(|directory| directory.join("slurm.conf").exists())
}
