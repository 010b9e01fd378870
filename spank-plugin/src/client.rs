//! srun, sbatch and salloc, as the user: turn the options into one request before anything is submitted.

use std::env::var_os;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

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

/// Whether any component of the job has asked for a container so far.
pub fn container_wanted() -> bool {
    state::lock().wanted || slurms_own_option().is_some() || var_os(VARIABLE).is_some()
}

/// Puts the request into the variable that goes to the node, or refuses the command. Slurm calls this once for
/// each component of a heterogeneous job. The components share one environment and so one request: those that
/// ask for different containers are refused.
pub fn make_request() -> Result<(), Failure> {
    let (failure, reported, first, inherited) = {
        let mut state = state::lock();
        if state.components == 0 {
            state.inherited = var_os(VARIABLE).map(OsStringExt::into_vec);
        }
        state.components += 1;
        let reported = std::mem::take(&mut state.options);
        (state.failure.clone(), reported, state.components == 1, state.inherited.clone())
    };
    if let Some(failure) = failure {
        return Err(failure);
    }
    let option = reported.last().cloned();
    if !first && let Some(other) = reported.iter().find(|other| option.as_ref() != Some(other)) {
        // After a component's own option sbatch reports the first component's once more, as if it were the later
        // one on the command line.
        return Err(different_containers(
            &quote(&other.1),
            &option.map_or_else(String::new, |o| quote(&o.1)),
        ));
    }
    let request = component_request(option, inherited)?;
    if !first {
        let shared = state::lock().request.clone();
        return if shared == request {
            Ok(())
        } else {
            Err(different_containers(&show(&shared), &show(&request)))
        };
    }
    if let Some(request) = &request {
        spank::set_variable(VARIABLE, &request.encode());
    }
    state::lock().request = request;
    Ok(())
}

/// What this component asks for: its own option, else what the enclosing job hands down.
fn component_request(
    ours: Option<(String, Vec<u8>)>,
    inherited: Option<Vec<u8>>,
) -> Result<Option<Request>, Failure> {
    let slurms = slurms_own_option();
    let (option, value) = match (slurms, ours) {
        (None, None) => return inherited.as_deref().map(Request::decode).transpose(),
        (Some(slurms), Some((_, ours))) if slurms != ours => {
            let message = format!("--container={} and --container-image={}", quote(&slurms), quote(&ours));
            return Err(Failure::new(format!("{message}: two images for one container"))
                .hint("give one of them; the variable SLURM_CONTAINER counts as --container"));
        }
        (Some(_), _) if oci::slurm_runs_containers() => {
            spank::inform(
                "--container is run by Slurm itself here (oci.conf); --container-image is mizzen's",
            );
            return Ok(Some(Request::SlurmRuntime));
        }
        (Some(value), _) => ("--container".to_owned(), value),
        (None, Some(option)) => option,
    };
    let config = Config::load(&state::lock().config_source()?)?;
    let directory = std::env::current_dir()
        .map_err(|error| Failure::new(format!("cannot find the current directory: {error}")))?;
    let request = Request::from_option(&option, &value, &directory, &config)?;
    spank::unset_variable(SLURM_CONTAINER);
    Ok(Some(request))
}

fn different_containers(one: &str, other: &str) -> Failure {
    let message =
        format!("the components of a heterogeneous job ask for different containers: {one} and {other}");
    Failure::new(message).hint("give every component the same --container, or run them as separate steps")
}

fn show(request: &Option<Request>) -> String {
    match request {
        Some(Request::Container(container)) => quote(container.image.as_os_str().as_bytes()),
        Some(Request::SlurmRuntime) => "Slurm's own runtime".to_owned(),
        Some(Request::Host) | None => "none".to_owned(),
    }
}

fn slurms_own_option() -> Option<Vec<u8>> {
    var_os(SLURM_CONTAINER).filter(|_| options::slurm_has_container()).map(OsStringExt::into_vec)
}
