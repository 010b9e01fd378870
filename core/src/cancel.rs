//! Ends a step on all its nodes when it cannot have its container on this one: the programs on the others would wait for
//! this one's, under MPI for ever. Runs as the user, in the task that has told the user: in the launcher, or before it starts;
//! and in the watcher of a file server that has failed.
//!
//! scancel does it. SIGKILL would also hit this task, and the tasks that fail for the same reason on other nodes; srun would then
//! return their exit code instead of 125. So every failed task first waits, longer on nodes with a higher index. The first to
//! wake sends SIGTERM, which lets programs clean up and tells the other waiting tasks that they can exit. One second later, or sooner
//! where the controller is slow, it sends SIGSTKFLT, which no program handles. Waiting tasks block both signals. If the container is missing on every node, which
//! is the usual case, all tasks end with 125.
//!
//! That signal is also the only word that a node hears of another one, so it decides who tells the user. The step's first node
//! tells at once. The others wait for their turn first, and whoever gets the signal meanwhile says nothing: a thousand nodes that
//! fail for one reason give one message. (Before the launcher runs, Slurm does not pass signals on to a task: what the plugin
//! itself finds wrong is told by every node.)

use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::handover::OtherNodes;

/// On the step's first node. The other nodes may be about to fail as well.
const WAIT: Duration = Duration::from_millis(500);
/// So much longer on the others; the first one's signal reaches all nodes in less, also where the controller is busy.
const OTHERS: Duration = Duration::from_millis(750);
/// So much longer on each node after the second, up to a limit.
const NEXT: Duration = Duration::from_millis(250);
const NEXT_LIMIT: u32 = 5;
/// For the programs to end by themselves, as far as there is time.
const GRACE: Duration = Duration::from_secs(1);
/// Counted from the failure: by then what ends programs that handle SIGTERM is sent. A step is to end within five seconds, and a
/// controller takes a part of them to reach a thousand nodes.
const LATEST: Duration = Duration::from_secs(4);

/// For Slurm's command, and for it in any case.
const SCANCEL_TIMEOUT: Duration = Duration::from_secs(2);
const SCANCEL_TIME: Duration = Duration::from_millis(500);

/// Ends what is left. Linux itself never sends it.
const FINAL_SIGNAL: Signal = Signal::SIGSTKFLT;

/// Holds back the signals by which a step is ended. To be called before the failure is told.
pub fn hold_back_signals() {
    let mut held = SigSet::empty();
    held.add(Signal::SIGTERM);
    held.add(FINAL_SIGNAL);
    let _ = held.thread_block();
}

/// Waits until it is this node's turn to tell the user; whether another node has ended the step meanwhile, and so has told. Every
/// failed task of a node waits, not only the one that would tell: where srun ends a step whose first task has failed, that one
/// would be ended before its turn.
pub fn is_told_elsewhere(nodes: &OtherNodes, speaks: bool) -> bool {
    let margin = if speaks { Duration::ZERO } else { NEXT };
    nodes.index > 0 && cancelled_elsewhere_within(turn(nodes) + margin)
}

/// Waits for this node's turn and ends the step, unless another node does; returns when this task should end.
pub fn cancel_step(step: &str, nodes: &OtherNodes) {
    let failed = Instant::now();
    if !cancelled_elsewhere_within(turn(nodes)) {
        end_step(step, nodes, failed);
    }
}

/// Ends the step after telling the user, which on all nodes but the first was this node's turn.
pub fn cancel_told_step(step: &str, nodes: &OtherNodes, failed: Instant) {
    match nodes.index {
        0 => cancel_step(step, nodes),
        _ => end_step(step, nodes, failed),
    }
}

fn turn(nodes: &OtherNodes) -> Duration {
    match nodes.index.checked_sub(1) {
        None => WAIT,
        Some(further) => WAIT + OTHERS + NEXT * further.min(NEXT_LIMIT),
    }
}

fn end_step(step: &str, nodes: &OtherNodes, failed: Instant) {
    let left = || (failed + LATEST).saturating_duration_since(Instant::now());
    scancel(&nodes.scancel, "--signal=TERM", step, left().clamp(SCANCEL_TIME, SCANCEL_TIMEOUT));
    std::thread::sleep(left().min(GRACE));
    scancel(&nodes.scancel, &format!("--signal={}", FINAL_SIGNAL as i32), step, SCANCEL_TIMEOUT);
}

/// Whether another node ends the step in that time.
fn cancelled_elsewhere_within(time: Duration) -> bool {
    let mut term = SigSet::empty();
    term.add(Signal::SIGTERM);
    let Ok(arrived) = SignalFd::with_flags(&term, SfdFlags::SFD_CLOEXEC) else { return false };
    let end = Instant::now() + time;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
        match poll(&mut [PollFd::new(arrived.as_fd(), PollFlags::POLLIN)], timeout) {
            Err(Errno::EINTR) => {}
            outcome => return outcome.is_ok_and(|ready| ready > 0),
        }
    }
}

/// Errors are ignored: the user knows what went wrong. A controller that does not answer is not waited for.
fn scancel(program: &Path, signal: &str, step: &str, timeout: Duration) {
    let mut command = Command::new(program);
    // What the job has for its own programs is not for the node's, and SCANCEL_… would have it ask, or match other steps.
    let kept = ["SLURM_CONF", "SLURM_CONF_SERVER"];
    let kept = kept.into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
    command.env_clear().envs(kept);
    command.args(["--quiet", signal, step]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let Ok(mut child) = command.spawn() else { return };
    let end = Instant::now() + timeout;
    while matches!(child.try_wait(), Ok(None)) {
        if Instant::now() > end {
            let _ = child.kill();
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_slow_controller_does_not_delay_the_end() {
        let directory = std::env::temp_dir().join(format!("mizzen-cancel-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let [program, log, takes] = ["scancel", "log", "takes"].map(|name| directory.join(name));
        let text = "#!/bin/sh\ncd ${0%/*}\necho \"$(date +%s%N) $2\" >> log\nexec sleep $(cat takes)\n";
        fs::write(&program, text).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let nodes = OtherNodes { index: 31, scancel: program.clone() };
        // In seconds, how long ago the step failed and how long the command takes; between the two signals, in milliseconds.
        for (ago, seconds, pause) in
            [(0, 0, 1000..1900), (2, 5, 1900..2500), (3, 5, 900..1500), (60, 0, 0..900)]
        {
            fs::write(&takes, seconds.to_string()).unwrap();
            end_step("1.0", &nodes, Instant::now() - Duration::from_secs(ago));
            let text = fs::read_to_string(&log).unwrap();
            let sent: Vec<(u64, &str)> = text
                .lines()
                .filter_map(|line| line.split_once(' '))
                .map(|(at, what)| (at.parse().unwrap(), what))
                .collect();
            let [(first, "--signal=TERM"), (last, "--signal=16")] = sent[..] else { panic!("{text}") };
            let between = (last - first) / 1_000_000;
            assert!(pause.contains(&between), "{ago} {seconds}: {between}");
            fs::remove_file(&log).unwrap();
        }
        fs::remove_dir_all(&directory).unwrap();
    }
}
