//! The command line.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

/// Containers for Slurm.
#[derive(Debug, Parser)]
#[command(name = "mizzen", version, about, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Check mizzen.toml: its keys and values, and that only root can write it
    CheckConfig {
        /// The file to check [default: /etc/mizzen/mizzen.toml, which may be missing]
        file: Option<PathBuf>,
    },
}
