//! What the plugin and the launcher share: settings, request, configuration, failures and what they hand to each other. Most of
//! it is plain computation on the caller's data. Some of it reads: mizzen.toml and its drop-ins, slurm.conf, plugstack.conf, the kernel's settings, limits and mounts;
//! `cancel` runs scancel and waits. It runs in srun as the user, in slurmstepd as root, and in the launcher.
#![forbid(unsafe_code)]

use std::os::unix::ffi::OsStrExt;

pub mod accounts;
pub mod answer;
pub mod build;
pub mod cancel;
pub mod config;
pub mod device;
pub mod digest;
pub mod environment;
pub mod escape;
pub mod failure;
pub mod find_image;
pub mod fs_server;
pub mod handover;
pub mod image;
pub mod image_policy;
pub mod image_store;
pub mod importer;
pub mod limits;
pub mod mount_flags;
pub mod mountinfo;
pub mod options;
pub mod pairs;
pub mod pattern;
pub mod plugstack;
pub mod precedence;
pub mod reference;
pub mod registries;
pub mod request;
pub mod request_summary;
pub mod settings;
pub mod similar;
pub mod slurm_conf;
pub mod slurm_options;
pub mod slurm_scripts;
pub mod staging;
pub mod step_report;
pub mod trusted_file;
pub mod user_namespace;
pub mod variables;

pub use config::Config;
pub use digest::Digest;
pub use failure::Failure;
pub use handover::Handover;
pub use reference::Reference;
pub use request::Request;
pub use settings::Settings;
pub use slurm_conf::SlurmConf;
pub use step_report::StepReport;
pub use variables::Variables;

/// The node's name in all messages: Slurm's own where Slurm has started this process, else the host name.
pub fn node_name() -> String {
    node_name_from(std::env::var_os("SLURMD_NODENAME").as_deref().map(OsStrExt::as_bytes))
}

/// The same where Slurm's name for it comes from elsewhere than the environment.
pub fn node_name_from(slurms: Option<&[u8]>) -> String {
    let name = slurms.filter(|name| !name.is_empty()).map(<[u8]>::to_vec);
    let own = || std::fs::read("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.unwrap_or_else(own);
    failure::quote(name.trim_ascii().split(|byte| *byte == b'.').next().unwrap_or_default())
}
