//! The command line: help, man page and shell completions all come from these definitions.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use mizzen_core::config::Source;
use mizzen_core::failure::quote;
use mizzen_core::options::parse_env;
use mizzen_core::settings::{Key, Writable};
use mizzen_core::staging::Policy;
use mizzen_core::{Config, Failure, Settings};

use crate::options::{self, Origin, RunOptions};

const EXAMPLES: &str = "\
Examples:
  mizzen run tf.sqsh python train.py          the home directory, /tmp and the current directory are there
  mizzen run -m /data:/data:ro tf.sqsh bash   a directory of the host, read-only
  mizzen run --writable tf.sqsh sh            write anywhere; the changes end with the container
  srun mizzen run tf.sqsh python train.py     in a Slurm job";

/// Containers for Slurm, and without it
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
    /// Run a program in a container
    ///
    /// The image is a squashfs or SIF file or a directory. Without a program the image's own command is run, or a
    /// shell. The exit code is the program's; 125 if there is no container, 126 if the program cannot be executed,
    /// 127 if it is not found.
    #[command(after_help = EXAMPLES)]
    Run(ContainerArgs),
    /// Show what `run` would do: mounts, environment and identity, each with its reason
    Plan {
        /// For programs
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        container: ContainerArgs,
    },
    /// Show what an image is: format, size, architecture, system, environment, command, digest
    Inspect {
        /// For programs
        #[arg(long)]
        json: bool,
        /// A squashfs or SIF file or a directory
        image: PathBuf,
    },
    /// Copy images to this node before they are needed
    ///
    /// Later starts on this node use the copies, as long as the originals do not change. For people, and for prologs.
    /// Root's copies, of images that everybody may read, serve all users (stage_shared in mizzen.toml).
    Stage {
        /// Squashfs or SIF files
        #[arg(required = true)]
        images: Vec<PathBuf>,
    },
    /// Show and remove the copies of images on this node
    ///
    /// A user's own; root's command is for the site's copies, which all users can use (stage_shared in mizzen.toml).
    Cache {
        /// For programs
        #[arg(long, global = true)]
        json: bool,
        /// What to do with them.
        #[command(subcommand)]
        command: CacheCommand,
    },
    /// Try everything that a container needs of this node, and say what to change
    ///
    /// The exit code is 0 if containers can run here and 1 if not, for health checks.
    Doctor {
        /// Show instead what containers get of this node's GPUs and their drivers
        #[arg(long)]
        gpu: bool,
        /// Show instead what containers get of this node's fabrics
        #[arg(long)]
        fabric: bool,
        /// For programs
        #[arg(long)]
        json: bool,
    },
    /// Check mizzen.toml and the rules in host.d: their keys and values, and that only root can write them
    CheckConfig {
        /// Only this file, in place of /etc/mizzen/mizzen.toml, which may be missing, and /etc/mizzen/host.d
        file: Option<PathBuf>,
    },
    /// Print completions for a shell
    Completions {
        /// bash, zsh, fish, elvish or powershell
        shell: clap_complete::Shell,
    },
    /// Write the man pages into a directory
    Man {
        /// Where mizzen.1, the pages of the commands and mizzen-slurm.7 go
        directory: PathBuf,
    },
}

/// What can be done with copies of images.
#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// Show the copies with their sizes, ages and sources
    List,
    /// Read every copy and compare it with its digest
    ///
    /// A broken one is set aside, and copied again when it is needed. The exit code is 1 if there was one.
    Verify,
    /// Remove the copies that exceed the site's limits, and what was left by crashes
    Prune,
    /// Remove copies
    #[command(
        override_usage = "mizzen cache remove [OPTIONS] <IMAGES>...\n       mizzen cache remove [OPTIONS] --all"
    )]
    Remove {
        /// All that are not in use
        #[arg(long, conflicts_with = "images")]
        all: bool,
        /// By digest, or by the path of the image
        #[arg(required_unless_present = "all")]
        images: Vec<String>,
    },
}

/// What shapes a container.
#[derive(Debug, Args)]
pub struct ContainerArgs {
    /// Mount a file or directory of the host; repeat it or join several by commas
    ///
    /// DST is SRC if not given. FLAGS, joined by +: ro, rw, noexec; nosuid, nodev and rbind always hold. `tmpfs` as
    /// SRC is an empty tmpfs (flag size=SIZE); the flag squashfs mounts the content of a squashfs file. A literal
    /// colon or comma is written \: or \,.
    #[arg(long = "mount", short = 'm', value_name = "SRC[:DST[:FLAGS]]")]
    mounts: Vec<OsString>,
    /// Have the home directory inside, if the site leaves it out
    #[arg(long, overrides_with = "no_home")]
    home: bool,
    /// Leave the home directory out
    #[arg(long, overrides_with = "home")]
    no_home: bool,
    /// Start in this directory of the container
    #[arg(long, short = 'w', value_name = "DIR")]
    workdir: Option<PathBuf>,
    /// Set a variable, or take the host's value in spite of the image's
    #[arg(long = "env", short = 'e', value_name = "NAME[=VALUE]")]
    environment: Vec<OsString>,
    /// Set the variables in a file of NAME=VALUE lines
    #[arg(long = "env-file", value_name = "FILE")]
    env_files: Vec<PathBuf>,
    /// Have a device by its name in the node's CDI specifications, as nvidia.com/gpu=0; repeat it or join several by
    /// commas
    #[arg(long = "device", value_name = "VENDOR/CLASS=NAME")]
    devices: Vec<OsString>,
    /// Take nothing from the host's environment but what describes the user and the job
    #[arg(long)]
    clean_env: bool,
    /// Be root inside
    #[arg(long, overrides_with = "no_remap_root")]
    remap_root: bool,
    /// Be yourself inside, if the site remaps
    #[arg(long, overrides_with = "remap_root")]
    no_remap_root: bool,
    /// Start the program through the image's entrypoint
    #[arg(long, overrides_with = "no_entrypoint")]
    entrypoint: bool,
    /// Start the program itself, if the site prefers the entrypoint
    #[arg(long, overrides_with = "entrypoint")]
    no_entrypoint: bool,
    /// Make the root writable; changes end with the container. They are kept in memory, up to SIZE (512m, 2g; default
    /// 50% of the memory). Before Linux 6.6 they are kept on disk, below TMPDIR or /var/tmp, and SIZE is refused
    #[arg(long, value_name = "SIZE", num_args = 0..=1, require_equals = true, default_missing_value = "yes", overrides_with = "readonly")]
    writable: Option<String>,
    /// Write only to what is mounted from the host, if the site makes roots writable
    #[arg(long, overrides_with = "writable")]
    readonly: bool,
    /// Copy the image to this node first: auto (from network file systems), always, never
    #[arg(long, value_name = "WHEN")]
    stage: Option<String>,
    /// Have the node's GPUs with its driver's libraries: auto (in a Slurm job those of the step, else all), all, none
    #[arg(long, value_name = "WHICH")]
    gpu: Option<String>,
    /// Use the image's MPI library, or the node's of the same ABI in its place: image, host
    #[arg(long, value_name = "WHOSE")]
    mpi: Option<String>,
    /// Tell how long each part of the start took
    #[arg(long, short = 'v')]
    verbose: bool,
    /// Further namespaces of the container's own: pid, ipc, net, uts, joined by commas
    #[arg(long, value_name = "NAMES")]
    unshare: Option<String>,
    /// A squashfs or SIF file or a directory; IMAGE@sha256:HEX refuses other content
    image: PathBuf,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

impl ContainerArgs {
    /// Parses what clap leaves as text, and adds the site's settings.
    pub fn into_options(self) -> Result<RunOptions, Failure> {
        let mut settings = Settings::default();
        for text in &self.mounts {
            set(&mut settings, Key::Mounts, text, "--mount")?;
        }
        for text in &self.devices {
            set(&mut settings, Key::Device, text, "--device")?;
        }
        for file in &self.env_files {
            settings.environment.extend(options::read_env_file(file)?);
        }
        for text in &self.environment {
            // Not a list: a comma belongs to the value.
            settings.environment.push(parse_env(text).map_err(|failure| failure.about("--env"))?);
        }
        if let Some(word) = self.command.first().filter(|word| word.as_encoded_bytes().starts_with(b"-")) {
            let word = quote(word.as_encoded_bytes());
            return Err(Failure::new(format!("{word}: not an option of mizzen, and no program"))
                .hint("options stand before the image, the program and its arguments behind it"));
        }
        if let Some(when) = &self.stage {
            set(&mut settings, Key::Stage, when.as_ref(), "--stage")?;
            if settings.stage == Some(Policy::Broadcast) {
                return Err(Failure::new("--stage: bcast is for the steps of a Slurm job")
                    .hint("srun --container-stage=bcast sends the image to the nodes of its step"));
            }
        }
        if let Some(whose) = &self.mpi {
            set(&mut settings, Key::Mpi, whose.as_ref(), "--mpi")?;
        }
        if let Some(which) = &self.gpu {
            set(&mut settings, Key::Gpu, which.as_ref(), "--gpu")?;
        }
        if let Some(size) = &self.writable {
            set(&mut settings, Key::Writable, size.as_ref(), "--writable")?;
        } else if self.readonly {
            settings.writable = Some(Writable::No);
        }
        let choice = |yes: bool, no: bool| (yes || no).then_some(yes);
        settings.mount_home = choice(self.home, self.no_home);
        settings.remap_root = choice(self.remap_root, self.no_remap_root);
        settings.entrypoint = choice(self.entrypoint, self.no_entrypoint);
        settings.verbose = self.verbose.then_some(true);
        settings.workdir = self.workdir;
        let config = Config::load(&Source::Default)?;
        let unshare = self.unshare.as_deref().map(options::parse_unshare).transpose()?.unwrap_or_default();
        let options = RunOptions::new(self.image, self.command, settings, &config, Origin::Option)?;
        Ok(RunOptions { clean_env: self.clean_env, unshare, ..options })
    }
}

fn set(settings: &mut Settings, key: Key, value: &OsStr, option: &str) -> Result<(), Failure> {
    settings.set(key, value.as_encoded_bytes()).map_err(|failure| failure.about(option))
}
