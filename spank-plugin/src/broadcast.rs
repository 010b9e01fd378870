//! srun, as the user, when its step is there and the tasks are not: has the launcher send the image to the nodes of the
//! step, if that was asked for. Everything that takes time is the launcher's; srun waits for it, as for its own prolog.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use mizzen_core::config::Source;
use mizzen_core::failure::cause;
use mizzen_core::request::VARIABLE;
use mizzen_core::staging::{self, BROADCAST_VARIABLE, Policy, encode_refusal};
use mizzen_core::{Failure, Request};

use crate::spank::{self, Spank, Step};
use crate::state;

/// Sends the image, and tells the nodes about it. What only this way to the nodes lacks is no failure: they copy the image
/// themselves then. A failure is told to them as well, and ends their tasks: if srun ended here, it would leave a step behind
/// that no task ever ends, and that keeps the job's next step waiting.
pub fn send(spank: &Spank) -> Result<(), Failure> {
    match try_to_send(spank) {
        Ok(None) => {}
        Ok(Some(deliveries)) => spank::set_variable(BROADCAST_VARIABLE, &deliveries),
        Err(failure) => spank::set_variable(BROADCAST_VARIABLE, &encode_refusal(&failure)),
    }
    Ok(())
}

/// What the nodes are to know of it.
fn try_to_send(spank: &Spank) -> Result<Option<String>, Failure> {
    let (request, components) = {
        let state = state::lock();
        (state.request.clone(), state.components)
    };
    let request = match request {
        Some(Request::Container(container)) if container.settings.stage == Some(Policy::Broadcast) => {
            Request::Container(container).encode()
        }
        _ => return Ok(None),
    };
    // Slurm calls this for one of them, and they share srun's environment.
    if components > 1 {
        return without("the components of a heterogeneous job get no broadcast");
    }
    let (Some(Step::Number(_)), Some(step)) = (spank.step(), spank.step_name()) else {
        return without("Slurm does not tell which step this is");
    };
    let launcher = match spank::launcher() {
        Ok(launcher) => launcher,
        Err(failure) => return without(&failure.message),
    };
    let mut command = Command::new(OsStr::from_bytes(launcher.as_bytes()));
    command.arg0(staging::BROADCASTER).arg(step).arg(slurms_programs());
    if let Source::Named(config) = state::lock().config_source()? {
        command.arg(config);
    }
    // Where srun may have components it is not in srun's own environment.
    command.env(VARIABLE, request);
    let started = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = match started {
        Ok(child) => child,
        Err(error) => return without(&format!("{}: {}", launcher.to_string_lossy(), cause(&error))),
    };
    let mut answer = String::new();
    let read = child.stdout.take().map(|mut pipe| pipe.read_to_string(&mut answer));
    let ended = child.wait();
    match (ended.map(|status| status.code()), read) {
        (Ok(Some(0)), Some(Ok(_))) => Ok(Some(answer).filter(|answer| !answer.is_empty())),
        (Ok(Some(1)), Some(Ok(_))) => Err(Failure::decode(answer.as_bytes(), staging::FAILURE_LIMIT)),
        // Ctrl-C, most of the time: whoever interrupts the broadcast does not want to go on without it.
        _ => Err(Failure::new("the broadcast of the image was interrupted")),
    }
}

/// Goes on without a broadcast.
fn without(why: &str) -> Result<Option<String>, Failure> {
    spank::log_info(&format!("every node copies the image itself: {why}"));
    Ok(None)
}

/// The directory of srun itself, where sbcast of the same release is.
fn slurms_programs() -> PathBuf {
    let srun = std::env::current_exe().unwrap_or_default();
    srun.parent().map(PathBuf::from).unwrap_or_default()
}
