//! A container with process ids of its own. Its process 1 is ours: it starts the program, collects what the
//! program leaves behind, and ends with it. The launcher stays outside, hands signals on and waits.

use std::io::PipeReader;
use std::os::fd::{AsFd, AsRawFd};

use mizzen_core::Failure;
use mizzen_core::failure::FailureKind;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};

use super::wait::{Waiting, wait_and_hand_on, watched_signals};
use super::{Servers, enter_root, exec};
use crate::plan::Plan;
use crate::report::report;
use crate::sys;

const CANNOT_START: i32 = FailureKind::CannotStart.exit_code() as i32;

/// Runs the program to its end and returns its exit code.
pub fn run(plan: &Plan, servers: Servers) -> Result<i32, Failure> {
    let watched = watched_signals();
    let failed = |what: &str, error: std::io::Error| Failure::caused_by(format!("cannot {what}"), error);
    watched.thread_block().map_err(|errno| failed("block signals", errno.into()))?;
    let (launcher_lives, held_open) = std::io::pipe().map_err(|error| failed("make a pipe", error))?;
    let held = held_open.as_raw_fd();
    let process_1 = || {
        // The launcher's end must be the launcher's alone.
        let _ = nix::unistd::close(held);
        init(plan, servers, &watched, &launcher_lives)
    };
    let child = sys::spawn_child(process_1).map_err(|error| failed("start process 1", error))?;
    let waiting = Waiting { child, watched: &watched, only: Some(child), sends_to_all: None };
    let ended = wait_and_hand_on(&waiting);
    ended.map(|(end, _)| end.code()).map_err(|error| failed("wait for the container", error))
}

/// Process 1. It mounts, because the new procfs must be that of its own process ids.
fn init(plan: &Plan, servers: Servers, watched: &SigSet, launcher_lives: &PipeReader) -> i32 {
    // The container ends with its launcher, also if that is killed; before this line the pipe tells.
    let _ = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL);
    let mut launcher = [PollFd::new(launcher_lives.as_fd(), PollFlags::POLLIN)];
    if poll(&mut launcher, PollTimeout::ZERO) != Ok(0) {
        return CANNOT_START;
    }
    if let Err(failure) = enter_root(plan, servers) {
        report(&failure);
        return CANNOT_START;
    }
    let program = sys::spawn_child(|| {
        let _ = watched.thread_unblock();
        let failure = exec::exec_program(&plan.program);
        report(&failure);
        i32::from(failure.kind.exit_code())
    });
    match program {
        Ok(program) => {
            // Process 1 is the container's to look at: it has nothing that the program does not have.
            sys::close_from(3);
            let _ = nix::sys::prctl::set_no_new_privs();
            let _ = sys::drop_capabilities();
            let waiting = Waiting { child: program, watched, only: None, sends_to_all: None };
            wait_and_hand_on(&waiting).map_or(CANNOT_START, |(end, _)| end.code())
        }
        Err(error) => {
            report(&Failure::caused_by("cannot start the program", error));
            CANNOT_START
        }
    }
}
