//! The command line: help, man page and shell completions all come from these definitions.

pub mod enroot;
pub mod images;

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Args, FromArgMatches, Parser, Subcommand, value_parser};
use mizzen_core::environment::names_environment_file;
use mizzen_core::failure::quote;
use mizzen_core::options::parse_env;
use mizzen_core::request::ImageSource;
use mizzen_core::settings::{Argument, Key, Spec, TomlForm};
use mizzen_core::staging::Policy;
use mizzen_core::{Config, Failure, Settings, build};

use crate::options::{self, Origin, RunOptions, Sharing};
use crate::report::report_note;
use crate::{environment, find_image};
use images::{ExportArgs, ImagesCommand, ImportArgs, LoginArgs, LogoutArgs};

const EXAMPLES: &str = "\
Examples:
  mizzen run tf.sqsh python train.py          the home directory, /tmp and the current directory are there
  mizzen run -m /data:/data:ro tf.sqsh bash   a directory of the host, read-only
  mizzen run --writable tf.sqsh sh            write anywhere; the changes end with the container
  srun mizzen run tf.sqsh python train.py     in a Slurm job
  mpirun -np 4 mizzen run tf.sqsh ./solver    ranks of MPI, which share one container on each node";

const RUN_USAGE: &str = "mizzen run [OPTIONS] <IMAGE> [COMMAND]...\n       mizzen run [OPTIONS] --environment <NAME> [COMMAND]...";
const PLAN_USAGE: &str = "mizzen plan [OPTIONS] <IMAGE> [COMMAND]...\n       mizzen plan [OPTIONS] --environment <NAME> [COMMAND]...";

/// Containers for Slurm, and without it
#[derive(Debug, Parser)]
#[command(name = "mizzen", version = build::NAME, about, arg_required_else_help = true)]
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
    /// The image is a squashfs or SIF file, a directory, or one in a registry: docker://NAME. Without a program the
    /// image's own command is run, or a shell. The exit code is the program's; 125 if there is no container, 126 if the
    /// program cannot be executed, 127 if it is not found.
    #[command(after_help = EXAMPLES, override_usage = RUN_USAGE)]
    Run(ContainerArgs),
    /// Show what `run` would do: mounts, environment and identity, each with its reason
    #[command(override_usage = PLAN_USAGE)]
    Plan {
        /// For programs
        #[arg(long)]
        json: bool,
        /// The container.
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
    /// Make an image of one in a registry, of an archive or of a directory
    ///
    /// Layers are fetched and converted at the same time, and nothing is unpacked. An image that is in your store already
    /// is not imported again: a registry is asked only what the tag means now. Without -o the path is printed on
    /// standard output.
    #[command(after_help = images::IMPORT_EXAMPLES)]
    Import(ImportArgs),
    /// Make an archive of an image, for Docker, Podman and others
    #[command(after_help = images::EXPORT_EXAMPLES)]
    Export(ExportArgs),
    /// Show and remove images: of the site's folders, and of your image store
    #[command(after_help = images::IMAGES_EXAMPLES)]
    Images {
        /// For programs
        #[arg(long, global = true)]
        json: bool,
        /// What to do with them; without it they are shown.
        #[command(subcommand)]
        command: Option<ImagesCommand>,
    },
    /// Show and remove your named containers on this node
    ///
    /// Those of a job go with it: when you start another one here, or where the site prunes in its epilog. Global ones stay.
    Containers {
        /// For programs
        #[arg(long, global = true)]
        json: bool,
        /// What to do with them.
        #[command(subcommand)]
        command: ContainersCommand,
    },
    /// Show and check environment files, which describe containers (srun --environment=NAME)
    #[command(after_help = ENV_EXAMPLES)]
    Env {
        /// For programs
        #[arg(long, global = true)]
        json: bool,
        /// What to do with them.
        #[command(subcommand)]
        command: EnvCommand,
    },
    /// Keep your credentials for a registry
    ///
    /// They are tried, and kept where Docker and Podman find them too. The password is asked for without showing it, or
    /// read from standard input.
    #[command(after_help = images::LOGIN_EXAMPLES)]
    Login(LoginArgs),
    /// Remove your credentials for a registry
    Logout(LogoutArgs),
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
    /// Show the settings of this site
    Config {
        /// For programs
        #[arg(long, global = true)]
        json: bool,
        /// What to show of them.
        #[command(subcommand)]
        command: ConfigCommand,
    },
    /// Check mizzen.toml, its drop-ins and the rules in host.d: their keys and values, and that only root can write them
    CheckConfig {
        /// Only this file, in place of /etc/mizzen/mizzen.toml, which may be missing, mizzen.d and host.d beside it
        file: Option<PathBuf>,
    },
    /// Print completions for a shell
    Completions {
        /// bash, zsh, fish, elvish or powershell
        shell: clap_complete::Shell,
    },
    /// Write the man pages into a directory
    Man {
        /// Where mizzen.1, the pages of the commands, mizzen.toml.5 and mizzen-slurm.7 go
        directory: PathBuf,
    },
}

const ENV_EXAMPLES: &str = "\
Examples:
  mizzen env list                     the files of your folders (EDF_PATH, or ~/.edf) and of the site's
  mizzen env render torch             torch.toml with its parents and variables, as one file
  mizzen env validate ./torch.toml    is it good?
  mizzen plan --environment torch     every mount and variable of its container";

/// What can be shown of settings.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Show every setting with its value and the file and line that it comes from
    ///
    /// What no file says is marked as a default. The files are those that the plugin reads on this machine: mizzen.toml, or what
    /// plugstack.conf names by config=PATH in its place, and the drop-ins beside it. The output is TOML.
    #[command(after_help = CONFIG_EXAMPLES)]
    Show,
}

const CONFIG_EXAMPLES: &str = "\
Examples:
  mizzen config show                       all of them
  mizzen config show | grep -v '# default' what this site has set
  mizzen config show --json                for programs";

/// What can be done with environment files.
#[derive(Debug, Subcommand)]
pub enum EnvCommand {
    /// Print a file with its parents put below it and its variables replaced
    Render {
        /// For the plugin: the answer, or the failure, in the form that it reads.
        #[arg(long, hide = true)]
        for_slurm: bool,
        /// The configuration that plugstack.conf names.
        #[arg(long, hide = true, value_name = "FILE")]
        config: Option<PathBuf>,
        /// NAME.toml in your folders or the site's; or a path, which begins with . or / or ends in .toml
        name: OsString,
    },
    /// Say whether files are good: their keys and values, their parents, their variables
    ///
    /// What they name and this machine does not have is a note: the nodes may have it. The exit code is 1 if one is not good.
    Validate {
        /// As for `render`
        #[arg(required = true)]
        names: Vec<OsString>,
    },
    /// Show the files of your folders and of the site's, and which of them is hidden by another of the same name
    List,
}

/// What can be done with copies of images.
#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// Show the copies with their sizes, ages and sources, and what the layers of imports take
    List,
    /// Read every copy and compare it with its digest
    ///
    /// A broken one is set aside, and copied again when it is needed. The exit code is 1 if there was one.
    Verify,
    /// Remove the copies and layers that exceed the site's limits, and what was left by crashes
    Prune,
    /// Remove copies
    #[command(
        override_usage = "mizzen cache remove [OPTIONS] <IMAGES>...\n       mizzen cache remove [OPTIONS] --all"
    )]
    Remove {
        /// All that are not in use, and all layers of imports
        #[arg(long, conflicts_with = "images")]
        all: bool,
        /// By digest, or by the path of the image
        #[arg(required_unless_present = "all")]
        images: Vec<String>,
    },
}

/// What can be done with named containers.
#[derive(Debug, Subcommand)]
pub enum ContainersCommand {
    /// Show them: whose they are, whether they run, how much was written in them, and what they were made from
    List,
    /// Remove those that do not run
    #[command(
        override_usage = "mizzen containers remove [OPTIONS] <NAMES>...\n       mizzen containers remove [OPTIONS] --all"
    )]
    Remove {
        /// Those of this job; without it, of the job that this command is in, or the global ones
        #[arg(long)]
        job: Option<u32>,
        /// All of them
        #[arg(long, conflicts_with = "names")]
        all: bool,
        /// Their names
        #[arg(required_unless_present = "all")]
        names: Vec<String>,
    },
    /// Remove those of jobs that have ended, and what was left by crashes
    ///
    /// Slurm is asked which jobs have ended. With --job it is not: for epilogs, as the job's user. What has been sent to this node for that
    /// job alone, with stage_broadcast = "early", is removed too.
    Prune {
        /// Only those of this job, which has ended on this node
        #[arg(long)]
        job: Option<u32>,
    },
}

/// What shapes a container.
#[derive(Debug, Args)]
pub struct ContainerArgs {
    #[command(flatten)]
    settings: SettingArgs,
    /// Set the variables in a file of NAME=VALUE lines
    #[arg(long = "env-file", value_name = "FILE")]
    env_files: Vec<PathBuf>,
    /// Take nothing from the host's environment but what describes the user and the job
    #[arg(long)]
    clean_env: bool,
    /// Run in the container that an environment file describes: NAME.toml in your folders or the site's, or a path
    #[arg(long, visible_alias = "edf", value_name = "NAME")]
    environment: Option<OsString>,
    /// The image, or NAME.toml for an environment file, as it is given to srun; the first word behind it is the program
    #[arg(long, visible_alias = "container-image", value_name = "IMAGE", conflicts_with = "environment")]
    container: Option<PathBuf>,
    /// Be in one container with all who share it on this node: the ranks of an MPI launch, or who gives the same NAME
    ///
    /// Ranks that mpirun or mpiexec starts share one by themselves, if there are several on the node and their images and
    /// options are the same: MPI's single-copy transfers need it. Without NAME and outside of MPI it is shared by what the
    /// same shell or program starts.
    #[arg(long, value_name = "NAME", num_args = 0..=1, require_equals = true, default_missing_value = "",
          overrides_with = "no_share")]
    share: Option<OsString>,
    /// Have a container of one's own under mpirun, too
    #[arg(long, overrides_with = "share")]
    no_share: bool,
    /// A squashfs or SIF file or a directory; IMAGE@sha256:HEX refuses other content; FILE.toml is an environment file; - with --name: what
    /// the container was made from
    #[arg(required_unless_present_any = ["environment", "container"])]
    image: Option<PathBuf>,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

impl ContainerArgs {
    /// Parses what clap leaves as text, finds the image, and adds the site's settings.
    pub fn into_options(self) -> Result<RunOptions, Failure> {
        let mut settings = self.settings.parse()?;
        for file in &self.env_files {
            let mut variables = options::read_env_file(file)?;
            // What is typed holds.
            variables.append(settings.environment.get_or_insert_default());
            settings.environment = Some(variables);
        }
        let config = Config::of_this_machine()?;
        let (image, command) = take_container(self.container, self.image, self.command);
        let (environment, image, command) = take_environment(self.environment, image, command);
        let environment = environment.map(|name| environment::read(&name, &config)).transpose()?;
        if let Some(file) = &environment {
            file.notes.iter().for_each(|note| report_note(note));
            let directory = std::env::current_dir().unwrap_or_else(|_| "/".into());
            settings = settings.absolute(&directory).within(file.settings.clone().absolute(&directory));
        }
        let word = command.first().filter(|word| word.as_encoded_bytes().starts_with(b"-"));
        // An entrypoint may well be given options: `--entrypoint IMAGE -- -c …`.
        if let Some(word) = word.filter(|_| !settings.clone().or(config.settings.clone()).entrypoint()) {
            let word = quote(word.as_encoded_bytes());
            return Err(Failure::new(format!("{word}: not an option of mizzen, and no program")).hint(
                "options stand before the image, the program and its arguments behind it; \
                 --entrypoint gives them to the image's entrypoint",
            ));
        }
        let sharing = match self.share {
            _ if self.no_share => Sharing::No,
            None => Sharing::Ranks,
            Some(name) if name.is_empty() => Sharing::Siblings,
            Some(name) => Sharing::Named(name),
        };
        let image = match &environment {
            Some(file) => find_image::of_environment(file, &config)?,
            None if image.as_os_str() == "-" && settings.name.is_some() => ImageSource::Recorded,
            None if image.as_os_str() == "-" => {
                return Err(Failure::new("-: no image, and no container by its name")
                    .hint("with --name=NAME it stands for the image that the container was made from"));
            }
            None => find_image::to_run(&image, &config)?,
        };
        let options = RunOptions::new(image, command, settings, config, Origin::Option)?;
        Ok(RunOptions { clean_env: self.clean_env, sharing, ..options })
    }
}

/// With an option for the image the first word is the program.
fn take_container(
    named: Option<PathBuf>,
    first: Option<PathBuf>,
    command: Vec<OsString>,
) -> (Option<PathBuf>, Vec<OsString>) {
    match named {
        Some(image) => {
            let program = first.map(PathBuf::into_os_string).into_iter();
            (Some(image), program.chain(command).collect())
        }
        None => (first, command),
    }
}

/// With an environment file the first word is the program. A first word that is the name of such a file is not an image.
fn take_environment(
    named: Option<OsString>,
    first: Option<PathBuf>,
    command: Vec<OsString>,
) -> (Option<OsString>, PathBuf, Vec<OsString>) {
    let first = first.unwrap_or_default();
    let is_file = names_environment_file(first.as_os_str().as_bytes());
    match named {
        Some(name) => {
            let program = Some(first.into_os_string()).filter(|program| !program.is_empty());
            (Some(name), PathBuf::new(), program.into_iter().chain(command).collect())
        }
        None if is_file => (Some(first.into_os_string()), PathBuf::new(), command),
        None => (None, first, command),
    }
}

/// The options that the settings' table names, as they were typed.
#[derive(Clone, Debug, Default)]
struct SettingArgs(Vec<(Key, OsString)>);

impl SettingArgs {
    fn parse(&self) -> Result<Settings, Failure> {
        let mut settings = Settings::default();
        for (key, value) in &self.0 {
            let option = format!("--{}", key.spec().run.unwrap_or_default());
            let about = |failure: Failure| failure.about(&option);
            match key {
                // Not a list here: a comma belongs to the value.
                Key::Env => {
                    let variable = parse_env(value).map_err(about)?;
                    settings.environment.get_or_insert_default().push(variable);
                }
                _ => settings.set(*key, value.as_bytes()).map_err(about)?,
            }
        }
        if settings.stage == Some(Policy::Broadcast) {
            return Err(Failure::new("--stage: bcast is for the steps of a Slurm job")
                .hint("srun --container-stage=bcast sends the image to the nodes of its step"));
        }
        Ok(settings)
    }
}

/// The identifier of the option that turns a setting off.
fn off_id(spec: &Spec) -> String {
    format!("no-{}", spec.name)
}

impl Args for SettingArgs {
    fn augment_args(mut command: clap::Command) -> clap::Command {
        for key in Key::ALL {
            let spec = key.spec();
            let Some(long) = spec.run else { continue };
            let mut option = Arg::new(spec.name).long(long).help(sentence(spec.help));
            if !spec.more.is_empty() {
                option = option.long_help(format!("{}\n\n{}", sentence(spec.help), spec.more));
            }
            if let Some(letter) = spec.letter {
                option = option.short(letter);
            }
            let repeated = key.toml_form() == TomlForm::List;
            let action = if repeated { ArgAction::Append } else { ArgAction::Set };
            option = match spec.argument {
                Argument::No => option.action(ArgAction::SetTrue),
                Argument::Required(name) => {
                    // One variable for each option, and no step to send an image to: see above.
                    let name = match key {
                        Key::Env => name.trim_end_matches(",..."),
                        Key::Stage => name.trim_end_matches("|bcast"),
                        Key::Unshare => "pid,net,ipc,uts",
                        _ => name,
                    };
                    option.action(action).value_name(name).value_parser(value_parser!(OsString))
                }
                Argument::Optional(name) => option
                    .action(action)
                    .value_name(name)
                    .value_parser(value_parser!(OsString))
                    .num_args(0..=1)
                    .require_equals(true)
                    .default_missing_value("yes"),
            };
            if let Some((off, help)) = spec.run_off() {
                let id = off_id(&spec);
                command = command.arg(option.overrides_with(id.clone()));
                option = Arg::new(id).long(off).help(sentence(help)).action(ArgAction::SetTrue);
                option = option.overrides_with(spec.name);
            }
            command = command.arg(option);
        }
        command
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        SettingArgs::augment_args(command)
    }
}

impl FromArgMatches for SettingArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<SettingArgs, clap::Error> {
        let mut args = SettingArgs::default();
        args.update_from_arg_matches(matches)?;
        Ok(args)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for key in Key::ALL.iter().filter(|key| key.spec().run.is_some()) {
            let spec = key.spec();
            if spec.argument == Argument::No {
                self.0.extend(matches.get_flag(spec.name).then(|| (*key, "yes".into())));
            } else {
                let values = matches.get_many::<OsString>(spec.name).unwrap_or_default();
                self.0.extend(values.map(|value| (*key, value.clone())));
            }
            if spec.off.is_some() && matches.get_flag(&off_id(&spec)) {
                self.0.push((*key, "no".into()));
            }
        }
        Ok(())
    }
}

/// A line of the table, which says what an option does, as the beginning of a text.
fn sentence(help: &str) -> String {
    let mut letters = help.chars();
    letters.next().map(|first| first.to_ascii_uppercase()).into_iter().chain(letters).collect()
}
