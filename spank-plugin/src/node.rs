//! The task, as the user, just before its program starts: enter the container, or end.

use std::os::unix::ffi::OsStrExt;

use mizzen_core::failure::quote;
use mizzen_core::request::VARIABLE;
use mizzen_core::{Config, Failure, Request};

use crate::client::SLURM_CONTAINER;
use crate::spank::Spank;
use crate::{oci, options, state};

/// Whether a container was asked for at all: by the client's request, by an option that reached the node some
/// other way, or by Slurm's own option from a client without mizzen.
pub fn container_wanted(spank: &Spank) -> bool {
    // A job whose environment cannot be read may have asked for one.
    let none_in_environment = spank.job_variable(VARIABLE).is_ok_and(|value| value.is_none());
    let no_bare_option = bare_option(spank).is_ok_and(|option| option.is_none());
    state::lock().wanted || !none_in_environment || !no_bare_option
}

/// Enters the container that the job asks for. A failure ends the task.
pub fn enter(spank: &Spank) -> Result<(), Failure> {
    if !container_wanted(spank) {
        return Ok(());
    }
    let (failure, source) = {
        let state = state::lock();
        (state.failure.clone(), state.config_source())
    };
    let entered = match failure {
        Some(failure) => Err(failure),
        None => request(spank).and_then(|request| match request {
            Request::Host => Ok(()),
            Request::SlurmRuntime if oci::slurm_runs_containers() => Ok(()),
            Request::SlurmRuntime => Err(Failure::new(
                "--container: this node has no oci.conf, the login node has",
            )
            .hint("Slurm's own runtime must be configured on all nodes; --container-image is mizzen's")),
            Request::Container(container) => {
                Config::load(&source?)?;
                let image = quote(container.image.as_os_str().as_bytes());
                Err(Failure::new(format!("{image}: this version of mizzen cannot start containers yet"))
                    .hint("until then: srun mizzen run IMAGE PROGRAM"))
            }
        }),
    };
    entered.map_err(|failure| failure.about(node_name()))
}

/// The request, checked again: everything that reaches the node is the user's to change.
fn request(spank: &Spank) -> Result<Request, Failure> {
    if let Some(text) = spank.job_variable(VARIABLE)? {
        return Request::decode(&text);
    }
    let (option, value) = bare_option(spank)?.unwrap_or_default();
    Request::from_bare_option(&option, &value)
}

/// An option that comes without the client's request.
fn bare_option(spank: &Spank) -> Result<Option<(String, Vec<u8>)>, Failure> {
    let ours = state::lock().options.last().cloned();
    if ours.is_some() {
        return Ok(ours);
    }
    let adopted = options::slurm_has_container() && !oci::slurm_runs_containers();
    let slurms = spank.job_variable(SLURM_CONTAINER)?.filter(|_| adopted);
    Ok(slurms.map(|value| ("--container".to_owned(), value)))
}

/// The node's name, as Slurm's users know it.
fn node_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().split('.').next().unwrap_or_default().to_owned()
}
