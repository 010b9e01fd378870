//! The node: what a step was asked to run in, as root in slurmstepd and as the user in its tasks. Nothing that reaches the
//! node is trusted: all of it is the user's to change.
//!
//! There are several ways in which a container can be asked for. The first of these holds:
//!
//! 1. for a batch script, sbatch's request in the variable that passes `--export-file`;
//! 2. SLURM_CONTAINER, the value of Slurm's own option. Clients with mizzen take it away, so this is the option of a client
//!    without it, and newer than any request that the client has inherited;
//! 3. the request in its usual variable, from the client or handed down by the enclosing job;
//! 4. an option, or a variable MIZZEN_CONTAINER…, of which no client has made a request: mizzen was not active where the
//!    job was submitted. An environment file is refused then: nobody has read it, and nodes do not.

use mizzen_core::request::{LIMIT, SUBMITTED_VARIABLE, UNASKED, VARIABLE, unread_environment};
use mizzen_core::{Failure, Request, Settings};

use crate::client::SLURM_CONTAINER;
use crate::oci;
use crate::options::{self, Meaning};
use crate::spank::{Spank, Step};
use crate::state::{self, GivenOption};

/// Whether a container was asked for at all, however badly.
pub fn container_wanted(spank: &Spank) -> bool {
    let wanted = state::lock().wanted;
    // A job whose environment cannot be read may have asked for one.
    wanted || !matches!(find(spank), Ok(None))
}

/// What was asked for, checked again.
pub fn request(spank: &Spank) -> Result<Request, Failure> {
    Ok(find(spank)?.unwrap_or(Request::Host))
}

/// A task: leaves the request as the only thing that its program, and a nested srun, can learn it from. Slurm's variable
/// would hide a nested srun's option.
pub fn hand_down(spank: &Spank, request: &Request) -> Result<(), Failure> {
    for name in [c"SLURM_CONTAINER", c"SLURM_SPANK_MIZZEN_REQUEST", c"SLURM_SPANK_MIZZEN_CONTAINER"] {
        spank.unset_job_variable(name);
    }
    let text = request.encode();
    // Slurm drops what is too long without a word, and the text that was there before would be taken for it.
    if text.len() > LIMIT {
        let message = format!("the request has {} bytes", text.len());
        return Err(
            Failure::new(message).hint("64 KiB is the limit; mount a directory above, not each file in it")
        );
    }
    spank.set_job_variable(VARIABLE, &text)
}

/// slurmstepd, when Slurm has reported all options: decodes the request, once for this process and those that it forks.
pub fn remember(spank: &Spank) {
    let asked = look(spank);
    state::lock().asked = Some(asked);
}

fn find(spank: &Spank) -> Result<Option<Request>, Failure> {
    let asked = state::lock().asked.clone();
    asked.unwrap_or_else(|| look(spank))
}

fn look(spank: &Spank) -> Result<Option<Request>, Failure> {
    // sbatch speaks of the script alone: what a step of it finds there is somebody's own.
    let submitted =
        if spank.step() == Some(Step::Batch) { spank.job_variable(SUBMITTED_VARIABLE)? } else { None };
    if let Some(text) = submitted {
        return Request::decode(&text).map(Some);
    }
    let text = spank.job_variable(VARIABLE)?;
    let unasked = text.as_deref().is_some_and(is_unasked);
    let handed = text.filter(|_| !unasked).map(|text| Request::decode(&text)).transpose()?;
    let adopted = |_: &Vec<u8>| options::slurm_has_container() && !oci::slurm_runs_containers();
    match (spank.job_variable(SLURM_CONTAINER)?.filter(adopted), handed) {
        (Some(value), Some(Request::Container(outer))) => {
            Request::from_bare_option("--container", &value, || Ok(outer.settings)).map(Some)
        }
        (Some(value), None) => {
            let reported = if unasked { Vec::new() } else { state::lock().options.clone() };
            Request::from_bare_option("--container", &value, || bare_settings(spank, &reported)).map(Some)
        }
        (Some(value), Some(Request::Host | Request::Join(_))) => {
            Request::from_bare_option("--container", &value, || Ok(Settings::default())).map(Some)
        }
        (_, Some(request)) => Ok(Some(request)),
        // The options that are reported here are those of another component.
        (None, None) if unasked => bare_option(spank, &[]),
        (None, None) => {
            let reported = state::lock().options.clone();
            bare_option(spank, &reported)
        }
    }
}

/// Whether the client has said that this component of a heterogeneous job asks for nothing, while others do. The task then goes
/// on as in a job without containers. What says so stays in its environment: Slurm hands the options of the others down to it.
pub fn nothing_asked(spank: &Spank) -> bool {
    let says_so = |text: Option<Vec<u8>>| text.is_some_and(|text| is_unasked(&text));
    spank.job_variable(VARIABLE).is_ok_and(says_so) && matches!(find(spank), Ok(None))
}

fn is_unasked(text: &[u8]) -> bool {
    text == UNASKED.as_bytes()
}

/// An option or variable that comes without any request.
fn bare_option(spank: &Spank, reported: &[GivenOption]) -> Result<Option<Request>, Failure> {
    let variables = spank.job_variables()?;
    let last = |meaning| reported.iter().rfind(|option| option.meaning() == Some(meaning));
    if let Some(file) = last(Meaning::Environment) {
        return Err(unread_environment(&file.value).about(file.name()));
    }
    let image = last(Meaning::Image);
    if let Some((name, value)) = variables.environment()?.filter(|_| image.is_none()) {
        return Err(unread_environment(value).about(name));
    }
    let (option, value) = match (image, variables.image()?, reported.first()) {
        (Some(image), _, _) => (image.name(), image.value.clone()),
        (None, Some((name, value)), _) => (name.to_owned(), value.to_vec()),
        // An option without an image is an error that names it.
        (None, None, Some(other)) => (other.name(), Vec::new()),
        // A container by its name, whose image the node knows.
        (None, None, None) if variables.name_a_container() => {
            return Request::from_bare_name(bare_settings(spank, reported)?).map(Some);
        }
        (None, None, None) => return Ok(None),
    };
    Request::from_bare_option(&option, &value, || bare_settings(spank, reported)).map(Some)
}

fn bare_settings(spank: &Spank, reported: &[GivenOption]) -> Result<Settings, Failure> {
    Ok(options::settings(reported)?.or(spank.job_variables()?.settings()?))
}
