//! Jobs of scrontab, in a task, as the user. scrontab takes the options of plugins, and then never asks the plugins; of its
//! options the node sees nothing but the lines `#SCRON` in the script. So a container that is asked for there is refused.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;

use mizzen_core::Failure;
use mizzen_core::slurm_scripts::scrontab_option;

use crate::oci;
use crate::spank::{Spank, Step};

/// More than the options before a crontab's command have.
const LIMIT: u64 = 64 << 10;

/// Refuses a job of scrontab with a container. What cannot be read is no script of scrontab's, which slurmd has just written.
pub fn refuse(spank: &Spank) -> Result<(), Failure> {
    if spank.step() != Some(Step::Batch) {
        return Ok(());
    }
    let script = spank.arguments()?.into_iter().next().unwrap_or_default();
    let mut text = Vec::new();
    let read =
        File::open(OsStr::from_bytes(&script)).and_then(|file| file.take(LIMIT).read_to_end(&mut text));
    match (read, scrontab_option(&text, oci::slurm_runs_containers())) {
        (Ok(_), Some(option)) => {
            Err(Failure::new(format!("#SCRON {option}: scrontab does not hand it on to mizzen"))
                .hint("let the crontab's command be `srun --container=IMAGE PROGRAM`"))
        }
        _ => Ok(()),
    }
}
