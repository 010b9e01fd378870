//! What the plugin remembers between two hooks of the same process.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use mizzen_core::config::Source;
use mizzen_core::failure::quote;
use mizzen_core::{Failure, Request};

/// The plugin's memory. A task gets a copy of slurmstepd's when it is forked.
pub struct State {
    /// The words behind the plugin's path in plugstack.conf.
    pub arguments: Vec<Vec<u8>>,
    /// An option of ours was given; never taken back.
    pub wanted: bool,
    /// The container options that Slurm reported, by name and value; the last one counts.
    pub options: Vec<(String, Vec<u8>)>,
    /// The first failure of a hook whose return value Slurm would misread.
    pub failure: Option<Failure>,
    /// Client: how many components of the job have been seen.
    pub components: u32,
    /// Client: the request that the enclosing job hands down.
    pub inherited: Option<Vec<u8>>,
    /// Client: the first component's request.
    pub request: Option<Request>,
}

static STATE: Mutex<State> = Mutex::new(State {
    arguments: Vec::new(),
    wanted: false,
    options: Vec::new(),
    failure: None,
    components: 0,
    inherited: None,
    request: None,
});

/// The state, also after a panic: what one hook broke, the next one must still see.
pub fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// Keeps the first failure: later ones follow from it.
    pub fn latch(&mut self, failure: Failure) {
        self.failure.get_or_insert(failure);
    }

    /// Where mizzen.toml is, by the words in plugstack.conf.
    pub fn config_source(&self) -> Result<Source, Failure> {
        let mut source = Source::Default;
        for argument in &self.arguments {
            match argument.strip_prefix(b"config=") {
                Some(path) if !path.is_empty() => {
                    source = Source::Named(PathBuf::from(OsStr::from_bytes(path)))
                }
                _ if cfg!(feature = "inject-panic") && argument.starts_with(b"inject-panic=") => {}
                _ => {
                    return Err(Failure::new(format!(
                        "plugstack.conf: unknown argument \"{}\"",
                        quote(argument)
                    ))
                    .hint("the only argument of spank_mizzen.so is config=/path/to/mizzen.toml"));
                }
            }
        }
        Ok(source)
    }
}
