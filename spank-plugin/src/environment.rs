//! srun, sbatch and salloc, as the user, before anything is submitted: an environment file is read by the launcher's command
//! `env render`. So there is no parser for it in what slurmstepd loads, and a file on storage that hangs can be given up with
//! Ctrl-C. What comes back is the same as options say.

use mizzen_core::Failure;
use mizzen_core::environment::{self, Environment};

use crate::{import, spank, state};

/// Reads a file, once for each name: Slurm calls the hook for every component of a heterogeneous job, and the file could have been
/// edited in between. What has no effect is told to the user.
pub fn read_once(name: &[u8]) -> Result<Environment, Failure> {
    let known = state::lock().environments.iter().find(|(known, _)| known == name).cloned();
    if let Some((_, environment)) = known {
        return Ok(environment);
    }
    let environment = import::ask_launcher(|process| environment::render(process, name))?;
    environment.notes.iter().for_each(|note| spank::log_info(&format!("note: {note}")));
    state::lock().environments.push((name.to_vec(), environment.clone()));
    Ok(environment)
}
