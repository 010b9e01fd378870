//! `spank_mizzen.so`: which hook does what in which of Slurm's programs. This file is that table.
//!
//! | hook                 | srun, sbatch, salloc (user) | slurmstepd (root)          | task                        |
//! |----------------------|-----------------------------|----------------------------|-----------------------------|
//! | init                 | register the options        | register the options       |                             |
//! | init_post_opt        | make the request, or refuse | open the step's channel    |                             |
//! | local_user_init      | srun: send the image        |                            |                             |
//! | task_init_privileged |                             |                            | user namespace (root)       |
//! | task_post_fork       |                             | close own channel ends     |                             |
//! | task_init            |                             |                            | hand over, or end (user)    |
//! | task_exit            |                             | report the failure         |                             |
//! | exit                 |                             | log the outcome, close     |                             |
//!
//! In slurmd init logs which build it is; every other hook does nothing. How a failure in each of them reaches the user is in `spank/mod.rs`, which is also the
//! only file that talks to Slurm.

mod broadcast;
mod channel;
mod client;
mod components;
mod crontab;
mod duplicate_load;
mod environment;
mod import;
mod multi_prog;
mod node;
mod oci;
mod options;
mod other_nodes;
mod requested;
mod spank;
mod state;
mod userns;
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
    TaskExit,
    Exit,
}

/// The kinds of program that load the plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Context {
    /// srun, sbatch or salloc, as the user.
    Client,
    /// slurmstepd as root, and its tasks as the user.
    Stepd,
    /// slurmd.
    Slurmd,
    /// The slurmstepd of a prolog or epilog.
    Script,
}

/// Does what the table says.
fn dispatch(hook: Hook, context: Context, spank: &Spank) -> Result<(), Failure> {
    match (hook, context) {
        (Hook::Init, Context::Client) => client::register_options(spank),
        (Hook::Init, Context::Stepd) => options::register(spank),
        (Hook::Init, Context::Slurmd) => node::log_build(),
        (Hook::InitPostOpt, Context::Client) => client::make_request(spank),
        (Hook::InitPostOpt, Context::Stepd) => node::open_channel(spank),
        (Hook::LocalUserInit, Context::Client) => broadcast::send(spank),
        (Hook::TaskInitPrivileged, Context::Stepd) => node::prepare_builder(spank),
        (Hook::TaskPostFork, Context::Stepd) => node::after_fork(spank),
        (Hook::TaskInit, Context::Stepd) => node::hand_over(spank),
        (Hook::TaskExit, Context::Stepd) => node::report_failure(),
        (Hook::Exit, Context::Stepd) => node::close_channel(spank),
        (
            Hook::TaskInitPrivileged | Hook::TaskPostFork | Hook::TaskInit | Hook::TaskExit | Hook::Exit,
            Context::Client,
        ) => Ok(()),
        (Hook::LocalUserInit, Context::Stepd) | (_, Context::Slurmd | Context::Script) => Ok(()),
    }
}

/// Whether a container was asked for at all, however badly.
fn container_wanted(context: Context, spank: &Spank) -> bool {
    match context {
        Context::Client => client::container_wanted(),
        Context::Stepd => requested::container_wanted(spank),
        Context::Slurmd | Context::Script => false,
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
            Hook::TaskExit => "task_exit",
            Hook::Exit => "exit",
        }
    }
}
