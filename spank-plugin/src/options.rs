//! The options that mizzen adds to srun, sbatch and salloc. They are registered in slurmstepd as well, where
//! Slurm calls back with what the client was given, or with what the user put into the environment instead.

use mizzen_core::Failure;
use mizzen_core::settings::Key;

use crate::spank::{self, Argument, OptionSpec, Spank};

/// What an option says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// The image.
    Image,
    /// The container of another step.
    Join,
    /// A setting, with the option's argument or with this value.
    Setting(Key, Option<&'static str>),
    /// An option of pyxis that its users will try: refused with a hint rather than by Slurm, without one.
    Missing,
}

use Argument::{No, Optional, Required};
use Meaning::{Image, Join, Missing, Setting};

const YES: Option<&str> = Some("yes");
const NO: Option<&str> = Some("no");

/// Every option; Slurm gives its index back.
#[rustfmt::skip] // a table
pub const ALL: [OptionSpec; 18] = [
    option(c"container-image", Required(c"IMAGE"), Image,
        c"[mizzen] run in the container IMAGE; the same as --container"),
    option(CONTAINER, Required(c"IMAGE"), Image,
        c"[mizzen] run in the container IMAGE, a squashfs or SIF file or a directory; none: on the node"),
    option(c"container-mounts", Required(c"SRC:DST[:FLAGS],..."), Setting(Key::Mounts, None),
        c"[mizzen] mount files and directories of the node; FLAGS like ro+noexec; tmpfs:DST:size=1g"),
    option(c"container-workdir", Required(c"DIR"), Setting(Key::Workdir, None),
        c"[mizzen] start in this directory of the container"),
    option(c"container-mount-home", No, Setting(Key::MountHome, YES),
        c"[mizzen] have the home directory in the container"),
    option(c"no-container-mount-home", No, Setting(Key::MountHome, NO),
        c"[mizzen] leave the home directory out"),
    option(c"container-writable", Optional(c"SIZE"), Setting(Key::Writable, None),
        c"[mizzen] write anywhere in the container, up to SIZE; the changes end with the step"),
    option(c"container-readonly", No, Setting(Key::Writable, NO),
        c"[mizzen] write only to what is mounted from the node"),
    option(c"container-remap-root", No, Setting(Key::RemapRoot, YES),
        c"[mizzen] be root inside"),
    option(c"no-container-remap-root", No, Setting(Key::RemapRoot, NO),
        c"[mizzen] be yourself inside"),
    option(c"container-env", Required(c"NAME[=VALUE],..."), Setting(Key::Env, None),
        c"[mizzen] set variables, or take the node's values in spite of the image's"),
    option(c"container-entrypoint", No, Setting(Key::Entrypoint, YES),
        c"[mizzen] start the program through the image's entrypoint"),
    option(c"no-container-entrypoint", No, Setting(Key::Entrypoint, NO),
        c"[mizzen] start the program itself"),
    option(c"container-script", No, Setting(Key::Script, YES),
        c"[mizzen] run a batch script or interactive shell inside as well"),
    option(c"no-container-script", No, Setting(Key::Script, NO),
        c"[mizzen] run a batch script or interactive shell on the node, and its steps inside"),
    option(c"container-join", Required(c"STEP"), Join,
        c"[mizzen] enter the container of another step of the job on this node (with srun --overlap)"),
    option(c"container-verbose", No, Setting(Key::Verbose, YES),
        c"[mizzen] tell how long each part of the start took"),
    option(c"container-name", Required(c"NAME"), Missing,
        c"[mizzen] not supported: every step makes its container from the image"),
];

const fn option(
    name: &'static std::ffi::CStr,
    argument: Argument,
    meaning: Meaning,
    usage: &'static std::ffi::CStr,
) -> OptionSpec {
    OptionSpec { name, argument, usage, meaning }
}

/// Slurm's own option since 21.08, and then refused to us.
const CONTAINER: &std::ffi::CStr = c"container";

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
