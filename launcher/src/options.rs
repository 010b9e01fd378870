//! What a run is asked to do, parsed once from the command line. Runs as the user on the host.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use mizzen_core::config::{Compatible, ImagePolicy, ImportWhen, Source};
use mizzen_core::device::DeviceName;
use mizzen_core::failure::{cause, quote};
use mizzen_core::options::{EnvOption, MountOption, parse_env};
use mizzen_core::request::ImageSource;
pub use mizzen_core::settings::Unshare;
use mizzen_core::settings::{ContainerName, ContainerScope, Key, Mpi, Settings, Verbosity, Writable};
use mizzen_core::{Config, Failure};
use serde::{Deserialize, Serialize};

use crate::containers::shaping;
use crate::slurm::CallerContext;
use crate::small_file::read_small;
use crate::stage::StagingOptions;
use crate::trace;

/// Everything that shapes a container.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// The image.
    pub image: ImageSource,
    /// Which images may be used here.
    pub policy: ImagePolicy,
    /// Whether it may be imported here.
    pub import: ImportOptions,
    /// The program and its arguments; empty for the image's own.
    pub command: Vec<OsString>,
    /// The user's settings, and where they say nothing the site's. The lists among them are below, with their origins.
    pub settings: Settings,
    /// The site's mounts, then the user's.
    pub mounts: Vec<(MountOption, Origin)>,
    /// Variables to set or to take from the host: the site's, then the user's.
    pub environment: Vec<(EnvOption, Origin)>,
    /// Devices of the node's CDI specifications: the site's, then the user's.
    pub devices: Vec<(DeviceName, Origin)>,
    /// Who wants the node's MPI library in place of the image's, if anybody.
    pub host_mpi: Option<Origin>,
    /// Start from an empty environment instead of the host's.
    pub clean_env: bool,
    /// Further namespaces of the container's own.
    pub unshare: Unshare,
    /// With whom the container is shared.
    pub sharing: Sharing,
    /// Whose defaults hold.
    pub compatible: Compatible,
    /// Where each user has a folder with containers, if this start is to look after those of ended jobs.
    pub containers: Option<PathBuf>,
    /// Hooks of CDI specifications that are left out.
    pub leave_out_hooks: Vec<String>,
    /// When and where the image is copied first.
    pub staging: StagingOptions,
    /// Which container that is kept on the node it is, if it has a name.
    pub named: Option<Named>,
    /// What the user has said themselves that acts when a container is made: names and values of settings.
    pub asked: BTreeMap<String, String>,
    /// What a step of a Slurm job needs beside.
    pub step: Option<StepOptions>,
}

/// How images in registries are imported for a job.
#[derive(Clone, Debug)]
pub struct ImportOptions {
    /// Where the site wants that.
    pub when: ImportWhen,
    /// Where mizzen.toml is, for the importer.
    pub config: Source,
    /// Variables that the importer needs, where the environment lacks them.
    pub variables: Vec<(&'static str, OsString)>,
}

impl Default for ImportOptions {
    fn default() -> ImportOptions {
        ImportOptions { when: ImportWhen::default(), config: Source::Default, variables: Vec::new() }
    }
}

/// Which named container is asked for, and where it is kept.
#[derive(Clone, Debug)]
pub struct Named {
    /// What the user says.
    pub name: ContainerName,
    /// Where each user has a folder.
    pub directory: PathBuf,
    /// Whose containers it is among.
    pub scope: Scope,
    /// Whether a step of a job asks for it, and not somebody by hand.
    pub of_step: bool,
}

/// Whose named containers are kept apart from others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// A job's.
    Job(u32),
    /// A user's.
    Global,
}

impl Scope {
    /// What the site says, in this job if it is one.
    pub fn new(configured: ContainerScope, job: Option<&str>) -> Scope {
        match (configured, job.and_then(|job| job.parse().ok())) {
            (ContainerScope::Job, Some(job)) => Scope::Job(job),
            (ContainerScope::Job, None) | (ContainerScope::Global, _) => Scope::Global,
        }
    }
}

/// What a step of a Slurm job needs beside the container's own settings.
#[derive(Clone, Debug, Default)]
pub struct StepOptions {
    /// A batch script, which lies in a directory of Slurm's.
    pub script: Option<PathBuf>,
    /// Where the helper for Slurm's commands listens, if they can be called inside.
    pub commands: Option<String>,
    /// What a program in a container had when it started this step.
    pub inside: Option<CallerContext>,
}

/// Who wants something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    /// The administrator, in mizzen.toml.
    Site,
    /// The user, by an option of mizzen.
    Option,
    /// The user, by an option of Slurm's commands.
    StepOption,
}

impl Origin {
    /// What it has written, as messages name it: `mizzen.toml: mounts`, `--mount`, `--container-mounts`.
    pub fn name_of(self, key: Key) -> String {
        let spec = key.spec();
        match self {
            Origin::Site => format!("mizzen.toml: {}", spec.toml.unwrap_or(spec.name)),
            Origin::Option => format!("--{}", spec.run.unwrap_or(spec.name)),
            Origin::StepOption => format!("--{}", spec.option()),
        }
    }
}

impl RunOptions {
    /// What the program had that started this step, if it was in the same image.
    pub fn inside(&self) -> Option<&CallerContext> {
        let inside = self.step.as_ref()?.inside.as_ref()?;
        (inside.image == self.image.name()).then_some(inside)
    }

    /// Who gives options here.
    pub fn user(&self) -> Origin {
        if self.step.is_some() { Origin::StepOption } else { Origin::Option }
    }

    /// The user's settings on top of the site's.
    pub fn new(
        image: ImageSource,
        command: Vec<OsString>,
        mut user: Settings,
        config: Config,
        origin: Origin,
    ) -> Result<RunOptions, Failure> {
        let mut site = config.settings.clone();
        // Scripts that were written for pyxis are jobs. What the site says itself holds.
        let compatible = if origin == Origin::StepOption { config.compatible } else { Compatible::Mizzen };
        if origin == Origin::StepOption {
            site.mount_home = config.mount_home_in_jobs();
        }
        let host_mpi = match (user.mpi, site.mpi) {
            (Some(Mpi::Host), _) => Some(origin),
            (None, Some(Mpi::Host)) => Some(Origin::Site),
            _ => None,
        };
        let mounts = with_origins(site.mounts.take(), user.mounts.take(), origin);
        let environment = with_origins(site.environment.take(), user.environment.take(), origin);
        let devices = with_origins(site.devices.take(), user.devices.take(), origin);
        if origin == Origin::StepOption {
            user.check_for_step(|key| origin.name_of(key))?;
        }
        let asked = shaping(&user);
        // Whoever saves a container, or gives it a name, means to change it, whatever holds for others.
        if user.save.is_some() || user.name.is_some() {
            user.writable.get_or_insert(Writable::Yes);
        }
        let settings = user.or(site);
        if settings.verbose() == Verbosity::Debug {
            trace::enable_debug(config.log_format);
        }
        let job = std::env::var("SLURM_JOB_ID").ok();
        let named = settings.name.clone().map(|name| Named {
            name,
            directory: config.stage_directory.clone(),
            scope: Scope::new(config.container_scope(), job.as_deref()),
            of_step: origin == Origin::StepOption,
        });
        Ok(RunOptions {
            image,
            named,
            asked,
            command,
            mounts,
            environment,
            devices,
            host_mpi,
            staging: StagingOptions::new(settings.stage(), &config)?,
            unshare: settings.unshare(),
            settings,
            compatible,
            containers: Some(config.stage_directory.clone()),
            leave_out_hooks: config.cdi_leave_out_hooks,
            policy: config.policy,
            import: ImportOptions { when: config.import, ..ImportOptions::default() },
            ..RunOptions::default()
        })
    }
}

/// The site's list, then the user's.
fn with_origins<T>(site: Option<Vec<T>>, user: Option<Vec<T>>, origin: Origin) -> Vec<(T, Origin)> {
    let site = site.into_iter().flatten().map(|value| (value, Origin::Site));
    site.chain(user.into_iter().flatten().map(|value| (value, origin))).collect()
}

/// With whom a container of `mizzen run` is shared. In a Slurm step all tasks of a node share one in any case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    /// With the other ranks of an MPI launch on this node.
    #[default]
    Ranks,
    /// With nobody.
    No,
    /// With the other ranks; where there is no launch, with whatever else the same process starts.
    Siblings,
    /// With those on this node who give the same name, in the same job.
    Named(OsString),
}

/// The kernel takes no larger environment.
const ENV_FILE_LIMIT: usize = 1 << 20;

/// Reads a file of `NAME=VALUE` lines, as `docker --env-file` does: no quotes, no expansion, `#` comments.
pub fn read_env_file(path: &Path) -> Result<Vec<EnvOption>, Failure> {
    let shown = quote(path.as_os_str().as_bytes());
    let text = read_small(path, ENV_FILE_LIMIT)
        .map_err(|error| Failure::new(format!("--env-file: {shown}: {}", cause(&error))))?;
    let lines = text.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    lines
        .filter(|line| !line.trim_ascii().is_empty() && !line.trim_ascii_start().starts_with(b"#"))
        .map(|line| {
            parse_env(OsStr::from_bytes(line)).map_err(|failure| failure.about("--env-file").about(&shown))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_can_have_the_defaults_of_pyxis() {
        let home = |user: Settings, site: Settings, origin| {
            let config = Config { settings: site, compatible: Compatible::Pyxis, ..Config::default() };
            let options = RunOptions::new(ImageSource::default(), Vec::new(), user, config, origin).unwrap();
            (options.settings.mount_home(), options.compatible)
        };
        let with = |mount_home| Settings { mount_home, ..Settings::default() };
        let none = Settings::default;
        assert_eq!(home(none(), none(), Origin::StepOption), (false, Compatible::Pyxis));
        assert_eq!(home(none(), none(), Origin::Option), (true, Compatible::Mizzen));
        assert_eq!(home(with(Some(true)), none(), Origin::StepOption), (true, Compatible::Pyxis));
        assert_eq!(home(none(), with(Some(true)), Origin::StepOption), (true, Compatible::Pyxis));
    }

    #[test]
    fn outside_a_job_containers_are_the_users() {
        assert_eq!(Scope::new(ContainerScope::Job, Some("7")), Scope::Job(7));
        assert_eq!(Scope::new(ContainerScope::Job, None), Scope::Global);
        assert_eq!(Scope::new(ContainerScope::Job, Some("../x")), Scope::Global);
        assert_eq!(Scope::new(ContainerScope::Global, Some("7")), Scope::Global);
    }
}
