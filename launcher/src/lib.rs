//! The launcher. `pipeline.rs` shows how a container is started; `dispatch.rs`, which command does what.

mod cdi;
mod cli;
mod dispatch;
mod doctor;
mod elf;
pub mod fuzz;
mod host;
mod host_libraries;
pub mod image;
mod inspect;
mod manual;
mod mount;
mod mountinfo;
mod options;
mod pipeline;
mod plan;
mod progress;
mod raised_limits;
mod report;
mod sandbox;
mod slurm;
mod stage;
mod step;
mod sys;
mod trace;
mod variable_rules;

pub use dispatch::run_process;
