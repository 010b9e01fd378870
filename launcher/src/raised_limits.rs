//! The user's limits, as far as they stand in the way of a start: raised to what the administrator allows, and given back
//! to the program. Runs as the user.

use std::sync::OnceLock;

use mizzen_core::Failure;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::mount::MountKind;
use crate::plan::Plan;

/// The soft limits that the user has set, where they have been raised.
static OPEN_FILES: OnceLock<u64> = OnceLock::new();
static STACK: OnceLock<u64> = OnceLock::new();

/// What the launcher has open beside what it mounts.
const OWN_FILES: u64 = 12;

/// The parser of the command line takes a quarter of this. The kernel counts the arguments and the environment too.
const STACK_NEEDED: u64 = 256 << 10;
/// What most users have.
const STACK_USUAL: u64 = 8 << 20;

/// Allows the stack to grow as far as the user could, or refuses. A thread with a stack of its own would not do: who makes
/// namespaces must be alone.
pub fn raise_stack() -> Result<(), Failure> {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_STACK) else { return Ok(()) };
    if soft >= STACK_NEEDED {
        return Ok(());
    }
    if hard >= STACK_NEEDED && setrlimit(Resource::RLIMIT_STACK, hard.min(STACK_USUAL), hard).is_ok() {
        let _ = STACK.set(soft);
        return Ok(());
    }
    let (has, needed) = (soft >> 10, STACK_NEEDED >> 10);
    Err(Failure::new(format!("the stack may have {has} KiB, and {needed} KiB are needed"))
        .hint("your limit on the size of the stack: ulimit -Hs"))
}

/// Allows as many open files as the user could: everything that is mounted from the host is open at the same time.
pub fn raise_open_files() {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return };
    if soft < hard && setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok() {
        let _ = OPEN_FILES.set(soft);
    }
}

/// Gives the program the limits that the user has set.
pub fn restore() {
    for (raised, resource) in [(&OPEN_FILES, Resource::RLIMIT_NOFILE), (&STACK, Resource::RLIMIT_STACK)] {
        if let (Some(soft), Ok((_, hard))) = (raised.get(), getrlimit(resource)) {
            let _ = setrlimit(resource, *soft, hard);
        }
    }
}

/// Refuses a plan that needs more open files than there can be.
pub fn check_open_files(plan: &Plan) -> Result<(), Failure> {
    let needed = plan.mounts.iter().map(|mount| match &mount.kind {
        MountKind::Bind { .. } | MountKind::Commands(_) => 1,
        MountKind::Devices(devices) => devices.len() as u64,
        MountKind::HostFiles { files, .. } => files.len() as u64,
        // The file, and the server's socket and device.
        MountKind::Squashfs(_) => 3,
        MountKind::Proc | MountKind::MessageQueues | MountKind::Tmpfs(_) | MountKind::File(_) => 0,
    });
    let needed = OWN_FILES + needed.sum::<u64>();
    let allowed = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
    if needed <= allowed {
        return Ok(());
    }
    let mounts = plan.mounts.len();
    Err(Failure::new(format!("{mounts} mounts need {needed} open files, but you may have {allowed}")).hint(
        "ulimit -Hn is the limit, the administrator can raise it; or mount a directory in place of its files",
    ))
}
