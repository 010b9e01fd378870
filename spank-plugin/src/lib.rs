//! `spank_mizzen.so`: which hook does what in which of Slurm's programs. This file is that table.
//!
//! | hook                 | srun, sbatch, salloc (user) | slurmstepd (root)          | task                        |
//! |----------------------|-----------------------------|----------------------------|-----------------------------|
//! | init                 | register the options        | register the options       |                             |
//! | init_post_opt        | make the request, or refuse | make a place for the tasks |                             |
//! | local_user_init      | srun: send the image        |                            |                             |
//! | task_init_privileged |                             |                            | namespace, keeper (root)    |
//! | task_post_fork       |                             | note the first task        |                             |
//! | task_init            |                             |                            | hand over, or end (user)    |
//! | exit                 |                             | log how it went            |                             |
//!
//! slurmd loads the plugin too and gets nothing to do. How a failure in each of them reaches the user is in
//! `spank/mod.rs`, which is also the only file that talks to Slurm.

mod broadcast;
mod client;
mod keeper;
mod meeting;
mod multi_prog;
mod node;
mod oci;
mod options;
mod root;
mod spank;
mod state;
mod version;

use mizzen_core::Failure;
use spank::Spank;

/// The hooks that are exported to Slurm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hook {
    Init,
    InitPostOpt,
    LocalUserInit,
    TaskInitPrivileged,
    TaskPostFork,
    TaskInit,
    Exit,
}

/// The kinds of program that load the plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Context {
    /// srun, sbatch or salloc, as the user.
    Client,
    /// slurmstepd as root, and its tasks as the user.
    Node,
    /// slurmd, or the slurmstepd of a prolog or epilog.
    Slurmd,
}

/// Does what the table says.
fn dispatch(hook: Hook, context: Context, spank: &Spank) -> Result<(), Failure> {
    match (hook, context) {
        (Hook::Init, Context::Client) => client::register_options(spank),
        (Hook::Init, Context::Node) => options::register(spank),
        (Hook::InitPostOpt, Context::Client) => client::make_request(),
        (Hook::InitPostOpt, Context::Node) => node::open_meeting(spank),
        (Hook::LocalUserInit, Context::Client) => broadcast::send(spank),
        (Hook::TaskInitPrivileged, Context::Node) => node::prepare_builder(spank),
        (Hook::TaskPostFork, Context::Node) => node::note_builder(spank),
        (Hook::TaskInit, Context::Node) => node::hand_over(spank),
        (Hook::Exit, Context::Node) => node::log_outcome(),
        (Hook::TaskInitPrivileged | Hook::TaskPostFork | Hook::TaskInit | Hook::Exit, Context::Client) => {
            Ok(())
        }
        (Hook::LocalUserInit, Context::Node) | (_, Context::Slurmd) => Ok(()),
    }
}

/// Whether a container was asked for at all, however badly.
fn container_wanted(context: Context, spank: &Spank) -> bool {
    match context {
        Context::Client => client::container_wanted(),
        Context::Node => node::container_wanted(spank),
        Context::Slurmd => false,
    }
}

impl Hook {
    fn name(self) -> &'static str {
        match self {
            Hook::Init => "init",
            Hook::InitPostOpt => "init_post_opt",
            Hook::LocalUserInit => "local_user_init",
            Hook::TaskInitPrivileged => "task_init_privileged",
            Hook::TaskPostFork => "task_post_fork",
            Hook::TaskInit => "task_init",
            Hook::Exit => "exit",
        }
    }
}
