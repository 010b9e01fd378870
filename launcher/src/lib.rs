//! The launcher. `pipeline.rs` shows how a container is started; `dispatch.rs`, which command does what.

mod cdi;
mod check_config;
pub mod cli;
mod containers;
mod dispatch;
mod doctor;
mod elf;
mod enroot;
mod environment;
mod find_image;
pub mod fuzz;
mod host;
mod host_libraries;
pub mod image;
mod importer;
mod inspect;
pub mod layer_cache;
mod manual;
mod mount;
mod options;
mod pipeline;
mod plan;
pub mod progress;
mod raised_limits;
mod remove_tree;
pub mod report;
mod sandbox;
mod save_target;
mod share;
mod show_config;
mod slurm;
pub mod small_file;
mod stage;
mod step;
mod sys;
pub mod trace;
mod variable_rules;

pub use dispatch::{ended, parse_words, run_process};

/// What a process does about signals.
pub mod signals {
    pub use crate::sys::{IgnoreSignal, is_ignored};
}
