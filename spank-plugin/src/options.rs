//! The options in this Slurm. They are registered in slurmstepd as well, where Slurm calls back with what the client was
//! given, or with what the user put into the environment instead.

use std::sync::LazyLock;

pub use mizzen_core::slurm_options::Meaning;
use mizzen_core::slurm_options::{self, CONTAINER, OptionSpec};
use mizzen_core::{Failure, Settings};

use crate::spank::{self, Spank};
use crate::state::GivenOption;

/// Every option of mizzen, also where this Slurm has it itself.
pub static ALL: LazyLock<Vec<OptionSpec>> = LazyLock::new(slurm_options::all);

/// Whether Slurm has `--container` and leaves its value in SLURM_CONTAINER.
pub fn slurm_has_container() -> bool {
    spank::slurm_version() >= (21, 8)
}

/// Those that this Slurm does not have itself, with their indices.
fn own() -> impl Iterator<Item = (usize, &'static OptionSpec)> {
    ALL.iter().enumerate().filter(|(_, spec)| spec.name != CONTAINER || !slurm_has_container())
}

/// Registers what this Slurm does not have itself.
pub fn register(spank: &Spank) -> Result<(), Failure> {
    own().try_for_each(|(index, spec)| spank.register_option(index, spec))
}

/// Refuses a command with an option of ours that went to another plugin. Of two plugins with the same option Slurm gives
/// it to the first in plugstack.conf, and tells the second that all is well.
pub fn refuse_taken() -> Result<(), Failure> {
    for (_, spec) in own() {
        if let Some(other) = spank::other_owner(&spec.name) {
            return Err(Failure::new(format!(
                "--{}: belongs to the plugin \"{other}\" here, not to mizzen",
                spec.name
            ))
            .hint(
                "mizzen's line must stand before that plugin's in plugstack.conf, or that plugin must go",
            ));
        }
    }
    Ok(())
}

/// The settings among the options that Slurm reported.
pub fn settings(reported: &[GivenOption]) -> Result<Settings, Failure> {
    let mut settings = Settings::default();
    for option in reported {
        if let Some(Meaning::Setting(key, _)) = option.meaning() {
            settings.set(key, &option.value()).map_err(|failure| failure.about(option.name()))?;
        }
    }
    Ok(settings)
}

/// Where sbatch and salloc leave an option's value for the srun calls in the job.
pub fn inherited_variable(spec: &OptionSpec) -> String {
    let name = spec.name.replace('-', "_");
    format!("SLURM_SPANK__SLURM_SPANK_OPTION_mizzen_{name}")
}
