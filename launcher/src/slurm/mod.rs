//! Slurm's commands inside a container whose image has no Slurm.
//!
//! A batch script that runs inside calls `srun python train.py`. What it finds under that name is this program,
//! the shim. A helper outside, of the same user and in the same job step, runs the host's own srun for it:
//!
//!     inside the container                                outside, same step
//!
//!     batch script                                        helper, started by `helper::start_helper`
//!       └─ srun = mizzen, the shim ── /.mizzen/helper ──>   └─ one process for each command
//!            stdin, stdout, stderr ────── descriptors ────>      └─ /usr/bin/srun, on those descriptors
//!            words, variables, directory, limits ─────────>
//!            signals ─────────────────────────────────────>
//!            exit code <──────────────────────────────────
//!
//! Who ends whom: the end of the program that the helper was started for ends the helper and all its commands; the
//! end of a shim, however it comes, ends its command. The socket is in a file system of the container's own, so nothing is left
//! behind, and nobody else finds it.
//!
//! What the image sets for its own programs (PATH, LD_LIBRARY_PATH, …) must not reach the host's, and the programs
//! of the new step must have it again: `caller_context` has the rule.
//!
//! | file      | runs                                                          |
//! |-----------|---------------------------------------------------------------|
//! | `shim`    | inside, in place of a Slurm command                           |
//! | `helper`  | outside: the helper                                           |
//! | `command` | outside: the helper's child that looks after one real command |
//! | `command_words`, `named_files` | inside and outside: are the files that a command names the same? |
//! | `wire`    | what they say to each other                                   |
//! | `caller_context` | the environment on its way out, and in again on any node |

pub mod caller_context;
mod command;
mod command_words;
mod helper;
mod named_files;
pub mod shim;
pub(crate) mod wire;

use std::ffi::OsStr;
use std::path::Path;

pub use {caller_context::CallerContext, helper::Helper, helper::start_helper};

/// The commands that a shim stands in for: all of Slurm's that users call.
pub const COMMANDS: [&str; 18] = [
    "srun", "sbatch", "salloc", "scancel", "scontrol", "squeue", "sinfo", "sacct", "sacctmgr", "sstat",
    "sprio", "sshare", "sattach", "sbcast", "scrontab", "sdiag", "sreport", "strigger",
];

/// Where the launcher is inside, and in its directory `bin` the links to it under these names.
pub const DIRECTORY: &str = "/.mizzen";

/// Where the helper listens, in [`DIRECTORY`].
const SOCKET: &str = "helper";

/// Tells the shims where the helper listens. It means something in its own container only.
pub const HOST_VARIABLE: &str = "SLURM_MIZZEN_HOST";

/// The value of [`HOST_VARIABLE`].
pub fn helper_address() -> String {
    format!("{DIRECTORY}/{SOCKET}")
}

/// The Slurm command as which this program was called, if it was.
pub fn command_named(argv0: &OsStr) -> Option<&'static str> {
    let name = Path::new(argv0).file_name()?;
    COMMANDS.into_iter().find(|command| name == *command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_decides() {
        for (argv0, command) in [
            ("srun", Some("srun")),
            ("/usr/local/bin/sbcast", Some("sbcast")),
            ("mizzen", None),
            ("/usr/bin/mizzen", None),
            ("", None),
            ("srun/", Some("srun")),
            ("/", None),
            ("-srun", None),
        ] {
            assert_eq!(command_named(OsStr::new(argv0)), command, "{argv0}");
        }
    }
}
