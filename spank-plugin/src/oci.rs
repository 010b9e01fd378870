//! Slurm's own container runtime. With an oci.conf the built-in `--container` is its business, not ours.

use std::path::{Path, PathBuf};

/// Whether this Slurm is configured to run OCI bundles itself: oci.conf is beside the slurm.conf in use.
pub fn slurm_runs_containers() -> bool {
    configuration_directory().is_some_and(|directory| directory.join("oci.conf").exists())
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
