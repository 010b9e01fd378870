//! What the plugin and the launcher share. Everything here is plain computation on the caller's data, plus
//! reading the configuration file and a few of the kernel's settings and limits; it runs in srun as the user, in slurmstepd as
//! root, and in the launcher.
#![forbid(unsafe_code)]

pub mod cancel;
pub mod config;
pub mod device;
pub mod digest;
pub mod escape;
pub mod failure;
pub mod handover;
pub mod image;
pub mod limits;
pub mod options;
pub mod request;
pub mod settings;
pub mod slurm_conf;
pub mod slurm_options;
pub mod slurm_texts;
pub mod staging;
pub mod step_report;
pub mod trusted_file;
pub mod user_namespace;
pub mod variables;
pub mod wire;

pub use config::Config;
pub use digest::Digest;
pub use failure::Failure;
pub use handover::Handover;
pub use request::Request;
pub use settings::Settings;
pub use slurm_conf::SlurmConf;
pub use step_report::StepReport;
pub use variables::Variables;

/// The node's name, as Slurm's users know it.
pub fn node_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    failure::quote(name.trim().split('.').next().unwrap_or_default().as_bytes())
}
