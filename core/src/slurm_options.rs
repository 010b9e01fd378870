//! The options that mizzen adds to srun, sbatch and salloc: the plugin registers them, the man page lists them.

use std::ffi::CStr;

use crate::settings::Key;

/// An option for srun, sbatch and salloc.
pub struct OptionSpec {
    /// Without the dashes.
    pub name: &'static CStr,
    /// Whether it has an argument.
    pub argument: Argument,
    /// The help text.
    pub usage: &'static CStr,
    /// What it says.
    pub meaning: Meaning,
}

/// An option's argument, by the name that the help gives it.
#[derive(Clone, Copy, Debug)]
pub enum Argument {
    /// None.
    No,
    /// May be left out.
    Optional(&'static CStr),
    /// Must be there.
    Required(&'static CStr),
}

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
pub const ALL: [OptionSpec; 22] = [
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
    option(c"container-device", Required(c"VENDOR/CLASS=NAME,..."), Setting(Key::Device, None),
        c"[mizzen] have devices by their names in the node's CDI specifications, as nvidia.com/gpu=0"),
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
    option(c"container-stage", Required(c"auto|always|never|bcast"), Setting(Key::Stage, None),
        c"[mizzen] copy the image to the node first: from network file systems, always, never; bcast: srun sends it"),
    option(c"container-gpu", Required(c"auto|all|none"), Setting(Key::Gpu, None),
        c"[mizzen] have the step's GPUs with the node's driver libraries, all of the node's, none"),
    option(c"container-mpi", Required(c"image|host"), Setting(Key::Mpi, None),
        c"[mizzen] use the image's MPI library, or the node's of the same ABI in its place"),
    option(c"container-verbose", No, Setting(Key::Verbose, YES),
        c"[mizzen] tell how long each part of the start took"),
    option(c"container-name", Required(c"NAME"), Missing,
        c"[mizzen] not supported: every step makes its container from the image"),
];

const fn option(
    name: &'static CStr,
    argument: Argument,
    meaning: Meaning,
    usage: &'static CStr,
) -> OptionSpec {
    OptionSpec { name, argument, usage, meaning }
}

/// Slurm's own option since 21.08, and then refused to plugins.
pub const CONTAINER: &CStr = c"container";
