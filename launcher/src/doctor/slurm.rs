//! What `mizzen doctor` sees of Slurm's configuration: is the plugin named, there, and of the same build as this launcher?
//! Runs as the user on the host; reads files alone.

use std::fs;

use mizzen_core::failure::{cause, quote};
use mizzen_core::plugstack::{self, PLUGIN, slurm_directory};
use mizzen_core::{Failure, build};

/// Sees that plugstack.conf names the plugin, and that it is there and fits.
pub fn plugin() -> Result<String, Failure> {
    let Some(plugstack) = plugstack::path_of_this_machine() else {
        return Ok("no slurm.conf on this machine".to_owned());
    };
    let Some(line) = plugstack::find_in(&plugstack) else {
        let message = format!("{} has no line with {PLUGIN}", plugstack.display());
        return Err(Failure::new(message)
            .hint("add `required /usr/lib/mizzen/spank_mizzen.so`, or include plugstack.conf.d/*.conf"));
    };
    let (plugin, file) = (line.plugin.display(), line.file.display());
    let bytes = fs::read(&line.plugin).map_err(|error| {
        Failure::new(format!("{file} names {plugin}: {}", cause(&error)))
            .hint("every srun and job fails here until the file is there, or the line is gone")
    })?;
    match build::find(&bytes) {
        Some(theirs) if theirs == build::NAME => {}
        other => {
            let theirs = other.map_or_else(|| "an older build".to_owned(), |name| quote(name.as_bytes()));
            let message = format!("{plugin} is {theirs}, and this launcher {}", build::NAME);
            return Err(Failure::new(message).hint("install both from the same package, on all nodes"));
        }
    }
    let risk =
        if line.word == "required" { "" } else { "; optional: where it is missing, jobs run on the node" };
    Ok(format!("{plugin}, by {file}{risk}"))
}

/// Whose `--container` is.
pub fn runtime() -> Result<String, Failure> {
    match slurm_directory().map(|directory| directory.join("oci.conf")).filter(|file| file.exists()) {
        Some(file) => {
            Err(Failure::new(format!("{} gives --container to Slurm's own runtime", file.display()))
                .hint("--container-image is mizzen's; without oci.conf --container is, too"))
        }
        None => Ok("--container is mizzen's".to_owned()),
    }
}
