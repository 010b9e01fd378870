//! srun, sbatch and salloc, as the user: turn the options into one request before anything is submitted.

use std::env::var_os;
use std::os::unix::ffi::OsStringExt;

use mizzen_core::failure::quote;
use mizzen_core::request::VARIABLE;
use mizzen_core::{Config, Failure, Request};

use crate::spank::{self, Spank};
use crate::{oci, options, state};

/// Slurm's `--container` ends here. Slurm sets it only when unset, so what stays in the environment would hide
/// the option of a nested srun.
pub const SLURM_CONTAINER: &str = "SLURM_CONTAINER";

/// Registers the options, without the values that an enclosing job was given: those would come back as if typed
/// here, and a relative image would be looked for in another directory. What a job hands down is in the request.
pub fn register_options(spank: &Spank) -> Result<(), Failure> {
    for spec in &options::ALL {
        spank::unset_variable(&options::inherited_variable(spec));
    }
    options::register(spank)
}

/// Whether there is anything to do.
pub fn container_wanted() -> bool {
    slurms_own_option().is_some() || state::lock().option.is_some() || var_os(VARIABLE).is_some()
}

/// Puts the request into the variable that goes to the node, or refuses the command. Slurm calls this once for
/// each component of a heterogeneous job.
pub fn make_request() -> Result<(), Failure> {
    let (first, inherited) = {
        let mut state = state::lock();
        let first = state.components == 0;
        if first {
            state.inherited = var_os(VARIABLE).map(OsStringExt::into_vec);
        }
        state.components += 1;
        (first, state.inherited.clone())
    };
    let request = component_request(inherited)?;
    if first {
        if let Some(request) = &request {
            spank::set_variable(VARIABLE, &request.encode());
        }
        state::lock().request = request;
        return Ok(());
    }
    same_for_all(state::lock().request.as_ref(), request.as_ref())
}

/// What this component asks for: its own option, else what the enclosing job hands down.
fn component_request(inherited: Option<Vec<u8>>) -> Result<Option<Request>, Failure> {
    let slurms = slurms_own_option();
    let (ours, source) = {
        let mut state = state::lock();
        if let Some(failure) = state.failure.clone() {
            return Err(failure);
        }
        (state.option.take(), state.config_source())
    };
    let (option, value) = match (slurms, ours) {
        (None, None) => return inherited.as_deref().map(Request::decode).transpose(),
        (Some(slurms), Some((_, ours))) if slurms != ours => {
            let message = format!("--container={} and --container-image={}", quote(&slurms), quote(&ours));
            return Err(Failure::new(format!("{message}: two images for one container"))
                .hint("give one of them; the variable SLURM_CONTAINER counts as --container"));
        }
        (Some(_), _) if oci::slurm_runs_containers() => {
            spank::inform("--container is run by Slurm itself here (oci.conf); --container-image is mizzen's");
            return Ok(Some(Request::Host));
        }
        (Some(value), _) => ("--container".to_owned(), value),
        (None, Some(option)) => option,
    };
    let config = Config::load(&source?)?;
    let directory = std::env::current_dir()
        .map_err(|error| Failure::new(format!("cannot find the current directory: {error}")))?;
    let request = Request::from_option(&option, &value, &directory, &config)?;
    spank::unset_variable(SLURM_CONTAINER);
    Ok(Some(request))
}

/// All components of a job share srun's environment, and so the request in it.
fn same_for_all(first: Option<&Request>, other: Option<&Request>) -> Result<(), Failure> {
    if first == other {
        return Ok(());
    }
    let show = |request: Option<&Request>| match request {
        Some(Request::Container(container)) => format!("{}", container.image.display()),
        Some(Request::Host) | None => "none".to_owned(),
    };
    let message = format!(
        "the components of a heterogeneous job ask for different containers: {} and {}",
        show(first),
        show(other)
    );
    Err(Failure::new(message).hint("give every component the same --container, or run them as separate steps"))
}

fn slurms_own_option() -> Option<Vec<u8>> {
    var_os(SLURM_CONTAINER).filter(|_| options::slurm_has_container()).map(OsStringExt::into_vec)
}
