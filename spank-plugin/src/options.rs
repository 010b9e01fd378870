//! The options in this Slurm. They are registered in slurmstepd as well, where Slurm calls back with what the client was
//! given, or with what the user put into the environment instead.

use mizzen_core::Failure;
pub use mizzen_core::slurm_options::{ALL, Meaning};
use mizzen_core::slurm_options::{CONTAINER, OptionSpec};

use crate::spank::{self, Spank};

/// Whether Slurm has `--container` and leaves its value in SLURM_CONTAINER.
pub fn slurm_has_container() -> bool {
    spank::slurm_version() >= (21, 8)
}

/// Registers what this Slurm does not have itself.
pub fn register(spank: &Spank) -> Result<(), Failure> {
    for (index, spec) in ALL.iter().enumerate() {
        if spec.name != CONTAINER || !slurm_has_container() {
            spank.register_option(index, spec)?;
        }
    }
    Ok(())
}

/// Where sbatch and salloc leave an option's value for the srun calls in the job.
pub fn inherited_variable(spec: &OptionSpec) -> String {
    let name = spec.name.to_string_lossy().replace('-', "_");
    format!("SLURM_SPANK__SLURM_SPANK_OPTION_mizzen_{name}")
}
