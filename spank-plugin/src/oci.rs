//! Slurm's own container runtime. With an oci.conf the built-in `--container` is its business, not ours.

use std::path::{Path, PathBuf};

/// Whether this Slurm is configured to run OCI bundles itself.
pub fn slurm_runs_containers() -> bool {
    // Slurm keeps oci.conf beside slurm.conf. Where that is was decided when Slurm was built, unless
    // SLURM_CONF says otherwise; /run/slurm/conf is where nodes without a file of their own fetch it to.
    let named = std::env::var_os("SLURM_CONF").map(PathBuf::from);
    let beside_named = named.as_deref().and_then(Path::parent);
    let usual = ["/etc/slurm", "/run/slurm/conf", "/usr/local/etc", "/etc"].map(Path::new);
    beside_named.into_iter().chain(usual).any(|directory| directory.join("oci.conf").exists())
}
