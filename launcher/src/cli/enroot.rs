//! The command line of `enroot`, as far as mizzen has what it says: `launcher/src/enroot.rs` translates it.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Parser, Subcommand};
use mizzen_core::build;

const EXAMPLES: &str = "\
Examples:
  enroot import -o tf.sqsh docker://nvcr.io#nvidia/tensorflow:24.01-tf2-py3
  enroot create -n tf tf.sqsh
  enroot start --rw --root -m /data:/data -e A=b tf sh
  enroot exec $(enroot list -f | awk '$1 == \"tf\" { print $2; exit }') ps
  enroot export -o mine.sqsh tf
  enroot remove -f tf";

/// The words of enroot, for scripts that have them. mizzen does the work: see `mizzen --help`
#[derive(Debug, Parser)]
#[command(name = "enroot", version = build::NAME, after_help = EXAMPLES, arg_required_else_help = true)]
pub struct Enroot {
    /// What to do.
    #[command(subcommand)]
    pub command: EnrootCommand,
}

/// What enroot can do, as far as mizzen can.
#[derive(Debug, Subcommand)]
pub enum EnrootCommand {
    /// Make an image of one in a registry
    Import {
        /// The file to write; without it one in the current directory, named after the image
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
        /// The image for another architecture than this node's
        #[arg(short, long)]
        arch: Option<String>,
        /// docker://[USER@][REGISTRY#]IMAGE[:TAG]
        uri: String,
    },
    /// Make a container of an image; the image's file stays in use
    Create {
        /// Its name; without it that of the file
        #[arg(short, long)]
        name: Option<String>,
        /// Replace the one that is there
        #[arg(short, long)]
        force: bool,
        /// A squashfs file
        image: PathBuf,
    },
    /// Run a program in a container, or in one of an image that ends with it
    Start {
        /// What can be written stays written; in a container of an image, until it ends
        #[arg(short = 'w', long)]
        rw: bool,
        /// Be root inside
        #[arg(short, long)]
        root: bool,
        /// Mount files and directories of the node: SRC:DST[:FLAG,...]
        #[arg(short, long = "mount", value_name = "MOUNT")]
        mounts: Vec<OsString>,
        /// Set a variable, or take the node's
        #[arg(short, long = "env", value_name = "NAME[=VALUE]")]
        env: Vec<OsString>,
        /// Refused.
        #[arg(short, long, hide = true)]
        conf: Option<OsString>,
        /// Refused.
        #[arg(long, hide = true)]
        rc: Option<OsString>,
        /// The name of a container, or a squashfs file
        #[arg(value_name = "NAME|FILE")]
        container: String,
        /// The program and its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
    /// Run a program in the container of a process
    Exec {
        /// Set a variable, or take the node's
        #[arg(short, long = "env", value_name = "NAME[=VALUE]")]
        env: Vec<OsString>,
        /// One of yours in a container, as `enroot list -f` shows them
        pid: u32,
        /// The program and its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        command: Vec<OsString>,
    },
    /// Show the containers of this node
    List {
        /// With the processes in them
        #[arg(short, long)]
        fancy: bool,
    },
    /// Make an image of a container
    Export {
        /// The file to write; without it NAME.sqsh
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
        /// Replace the file that is there
        #[arg(short, long)]
        force: bool,
        /// The name of a container
        name: String,
    },
    /// Remove containers
    Remove {
        /// Do not ask: mizzen never does, and refuses without it
        #[arg(short, long)]
        force: bool,
        /// Their names
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Show the version of mizzen
    Version,
    /// What mizzen has not.
    #[command(external_subcommand)]
    Other(Vec<OsString>),
}
