//! What the plugin remembers between two hooks of the same process.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use mizzen_core::config::Source;
use mizzen_core::environment::Environment;
use mizzen_core::settings::Argument;
use mizzen_core::{Config, Failure, Reference, Request, Variables};

use crate::channel::StepdChannel;
use crate::components::{Exported, Groups};
use crate::duplicate_load::LoadRole;
use crate::options::{self, Meaning};

/// The plugin's memory. A task gets a copy of slurmstepd's when it is forked.
pub struct State {
    /// The words behind the plugin's path in plugstack.conf.
    pub arguments: Vec<Vec<u8>>,
    /// How often the first hook was called.
    pub loads: u32,
    /// Another copy of the plugin is there: this one does nothing but refuse containers, or nothing at all.
    pub load_role: LoadRole,
    /// An option of ours was given; never taken back.
    pub wanted: bool,
    /// The options that Slurm reported, in its order.
    pub options: Vec<GivenOption>,
    /// The first failure of a hook whose return value Slurm would misread.
    pub failure: Option<Failure>,
    /// Client: how many components of the job have been seen.
    pub components: u32,
    /// Client: the request that the enclosing job hands down.
    pub inherited: Option<Vec<u8>>,
    /// Client: the requests that it hands down for single groups.
    pub inherited_groups: Vec<(u32, Vec<u8>)>,
    /// srun: which groups its components are for.
    pub groups: Groups,
    /// srun: `--export` with the last component's request, where every component has one of its own.
    pub exported: Option<Exported>,
    /// Client: Slurm's own variable for `--container`, before Slurm itself has set it.
    pub slurm_container: Option<Vec<u8>>,
    /// Client: the variables that stand for options.
    pub variables: Variables,
    /// Client: the first component's request.
    pub request: Option<Request>,
    /// Client: which environment files have been read, by the names that were given.
    pub environments: Vec<(Vec<u8>, Environment)>,
    /// Client: which manifests the importer has found.
    pub resolved: Vec<(Reference, Reference)>,
    /// Client: which images it has imported.
    pub imported: Vec<(Reference, (PathBuf, Reference))>,
    /// mizzen.toml, once it was read.
    config: Option<Result<Config, Failure>>,
    /// Node: what was asked for, once all options were reported.
    pub asked: Option<Result<Option<Request>, Failure>>,
    /// Node: the step's channel.
    pub channel: Option<StepdChannel>,
    /// slurmstepd: the user has been told why the step failed, and Slurm's log has it.
    pub told: bool,
    /// The first task of a step: the container's user namespace.
    pub user_namespace: Option<OwnedFd>,
}

/// An option as Slurm reported it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GivenOption {
    /// Its index in [`options::ALL`].
    pub index: usize,
    /// Its argument; empty where it has none.
    pub value: Vec<u8>,
}

impl GivenOption {
    /// What it says, if it is one of ours.
    pub fn meaning(&self) -> Option<Meaning> {
        options::ALL.get(self.index).map(|spec| spec.meaning)
    }

    /// Its name as the user types it.
    pub fn name(&self) -> String {
        options::ALL.get(self.index).map_or_else(String::new, |spec| format!("--{}", spec.name))
    }

    /// Its argument, or what it stands for.
    pub fn value(&self) -> Vec<u8> {
        match self.meaning() {
            Some(Meaning::Setting(_, Some(fixed))) => fixed.as_bytes().to_vec(),
            // --container-writable alone.
            Some(Meaning::Setting(key, None))
                if self.value.is_empty() && matches!(key.spec().argument, Argument::Optional(_)) =>
            {
                b"yes".to_vec()
            }
            _ => self.value.clone(),
        }
    }
}

static STATE: Mutex<State> = Mutex::new(State {
    arguments: Vec::new(),
    loads: 0,
    load_role: LoadRole::Only,
    wanted: false,
    options: Vec::new(),
    failure: None,
    components: 0,
    inherited: None,
    inherited_groups: Vec::new(),
    groups: Groups::NONE,
    exported: None,
    slurm_container: None,
    variables: Variables::NONE,
    request: None,
    environments: Vec::new(),
    resolved: Vec::new(),
    imported: Vec::new(),
    config: None,
    asked: None,
    channel: None,
    told: false,
    user_namespace: None,
});

/// The state, also after a panic: what one hook broke, the next one must still see.
pub fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// Keeps the first failure: later ones follow from it.
    pub fn keep_first_failure(&mut self, failure: Failure) {
        self.failure.get_or_insert(failure);
    }

    /// mizzen.toml; it is read once in a process.
    pub fn config(&mut self) -> Result<Config, Failure> {
        let read = || self.config_source().and_then(|source| Config::load(&source));
        let config = self.config.clone().unwrap_or_else(read);
        self.config = Some(config.clone());
        config
    }

    /// Where mizzen.toml is, with its drop-ins beside it, by the words in plugstack.conf.
    pub fn config_source(&self) -> Result<Source, Failure> {
        let is_ours =
            |argument: &&Vec<u8>| !(cfg!(feature = "inject-panic") && argument.starts_with(b"inject-panic="));
        Source::from_arguments(self.arguments.iter().filter(is_ours).map(Vec::as_slice))
    }
}
