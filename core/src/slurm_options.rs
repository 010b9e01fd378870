//! The options that mizzen adds to srun, sbatch and salloc: the plugin registers them, the man page lists them. Those of
//! settings are made from the settings' table.

use crate::settings::{Argument, Key};

/// An option for srun, sbatch and salloc.
#[derive(Clone, Debug)]
pub struct OptionSpec {
    /// Without the dashes.
    pub name: String,
    /// Whether it has an argument.
    pub argument: Argument,
    /// What it does.
    pub help: &'static str,
    /// What it says.
    pub meaning: Meaning,
}

/// What an option says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// The image.
    Image,
    /// An environment file.
    Environment,
    /// The container of another step.
    Join,
    /// A setting, with the option's argument or with this value.
    Setting(Key, Option<&'static str>),
}

/// Slurm's own option since 21.08, and then refused to plugins.
pub const CONTAINER: &str = "container";

/// Every option; Slurm gives its index back.
pub fn all() -> Vec<OptionSpec> {
    let option =
        |name: &str, argument, help, meaning| OptionSpec { name: name.to_owned(), argument, help, meaning };
    let (image, file) = (Argument::Required("IMAGE"), Argument::Required("NAME"));
    let mut options = vec![
        option(
            "container-image",
            image,
            "run in the container IMAGE, a file, directory or docker://NAME; --container, which Slurm lists as its own, is the same",
            Meaning::Image,
        ),
        option(
            CONTAINER,
            image,
            "run in the container IMAGE, a squashfs or SIF file or a directory; none: on the node",
            Meaning::Image,
        ),
        option(
            "environment",
            file,
            "run in the container that an environment file describes: NAME.toml of $EDF_PATH, ~/.edf or the site's, or a path",
            Meaning::Environment,
        ),
        option("edf", file, "the same as --environment", Meaning::Environment),
        option(
            "container-join",
            Argument::Required("STEP"),
            "enter the container of another step of the job on this node (with srun --overlap)",
            Meaning::Join,
        ),
    ];
    for key in Key::ALL {
        let spec = key.spec();
        let fixed = (spec.argument == Argument::No).then_some("yes");
        options.push(option(&spec.option(), spec.argument, spec.help, Meaning::Setting(*key, fixed)));
        if let Some((name, help)) = spec.off_option() {
            options.push(option(&name, Argument::No, help, Meaning::Setting(*key, Some("no"))));
        }
    }
    options
}
