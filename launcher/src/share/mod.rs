//! One container for all ranks of an MPI launch on a node, where no plugin of Slurm's has started them: under mpirun and
//! mpiexec, which start `mizzen run` once for every rank. In containers of their own, ranks would lose single-copy
//! transfers, as in different user namespaces the kernel lets no process read another's memory.
//!
//!     first rank:  rendezvous -> server of namespaces -> container, and lets the others in --+--> program
//!     the others:  rendezvous -> wait for the first -------------------------------> enter --+
//!
//! Nobody waits for a number of ranks. Whoever finds nobody makes the container; whoever finds somebody waits as long as that
//! one lives. A failure to make the container is told once; a rank that is let in becomes its program, and its end is its own.
//!
//! Runs as the user on the host, and from `enter` on in the container's namespaces.

mod launch;
mod rendezvous;
mod server;

use std::ffi::OsString;
use std::fs;
use std::io::{PipeReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use mizzen_core::handover::{OUTCOME_LIMIT, Outcome};
use mizzen_core::request::ImageSource;
use mizzen_core::settings::{Settings, Verbosity};
use mizzen_core::{Failure, build, cancel};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::MsgFlags;
use tracing::{debug, info_span};

use crate::options::{RunOptions, Sharing};
use crate::plan::{Facts, Program, typed_command};
use crate::report::{report, report_note};
use crate::sandbox::StderrReporter;
use crate::step::channel::{descriptors, read_message, write_facts};
use crate::{pipeline, sandbox, sys};
use launch::Rank;
use rendezvous::{Arrival, Rendezvous};
use server::NamespaceServer;

/// A container that this run has in common with others.
pub struct Shared {
    /// Where it finds them.
    rendezvous: Rendezvous,
    /// What it is among them, if they are the ranks of a launch, and nobody has asked for more.
    rank: Option<Rank>,
}

/// Finds out whether this run shares its container, and with whom.
pub fn find(options: &RunOptions) -> Result<Option<Shared>, Failure> {
    let environment: Vec<(OsString, OsString)> = std::env::vars_os().collect();
    let rank = launch::rank(&environment);
    let (launch, rank) = match &options.sharing {
        Sharing::No => return Ok(None),
        Sharing::Ranks => match rank.filter(|rank| rank.local_size > 1) {
            None => return Ok(None),
            Some(rank) => (rank.launch(), Some(rank)),
        },
        Sharing::Siblings => (rank.as_ref().map_or_else(launch::of_parent, Rank::launch), None),
        Sharing::Named(name) => {
            let job = environment.iter().find(|(name, _)| name == "SLURM_JOB_ID").map(|(_, job)| job);
            (format!("name {name:?} {job:?}"), None)
        }
    };
    if let Some(failure) = unshareable(options) {
        return if rank.is_none() { Err(failure) } else { Ok(None) };
    }
    let key = format!("{} {launch} {}", build::NAME, shape(options, &environment));
    debug!(launch, "the container is shared");
    match (Rendezvous::open(options.staging.directory(), &key), rank) {
        (Ok(rendezvous), rank) => Ok(Some(Shared { rendezvous, rank })),
        (Err(failure), None) => Err(failure.about("--share")),
        (Err(failure), Some(rank)) => {
            note_alone(&rank, &failure);
            Ok(None)
        }
    }
}

/// Why a container like this is nobody else's.
fn unshareable(options: &RunOptions) -> Option<Failure> {
    let unshare = options.unshare;
    if unshare.pid || unshare.ipc || unshare.net || unshare.uts {
        return Some(
            Failure::new("--share: not together with --unshare")
                .hint("who shares a container is in its user and mount namespace; leave one of the two away"),
        );
    }
    // Processes that name the same container are in it together.
    if options.named.is_some() || options.settings.save.is_some() {
        return Some(
            Failure::new("--share: not together with --name or --save")
                .hint("a named container is shared by all who name it; leave --share away"),
        );
    }
    options.command.is_empty().then(|| {
        Failure::new("--share: no program is named")
            .hint("name it behind the image; only the first to arrive would know the image's own command")
    })
}

/// Everything that shapes the container, and nothing that may differ from rank to rank: the program and its variables.
fn shape(options: &RunOptions, environment: &[(OsString, OsString)]) -> String {
    let settings = Settings { verbose: None, ..options.settings.clone() };
    let shaping = RunOptions {
        command: Vec::new(),
        environment: Vec::new(),
        sharing: Sharing::default(),
        settings,
        ..options.clone()
    };
    let variable = |name: &str| environment.iter().find(|(known, _)| known == name).map(|(_, value)| value);
    // /tmp is there in any case. (Slurm 22.05 sets TMPDIR=/tmp for the first task of a node alone.)
    let mounted = |value: &&OsString| !Path::new(value).starts_with("/tmp");
    let mounted = ["HOME", "TMPDIR", "PMIX_SERVER_TMPDIR"].map(|name| variable(name).filter(mounted));
    // A rank may be told its own GPU; whether it has one at all decides what is mounted.
    let gpus = ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"];
    let gpus = gpus.map(|name| variable(name).is_some_and(|value| !value.is_empty() && value != "-1"));
    // This one chooses by its value, if it does not only tell what Slurm has chosen.
    let chosen = variable("NVIDIA_VISIBLE_DEVICES");
    let directory = std::env::current_dir().ok();
    // From another one a container could not be entered, or has another host around it.
    let namespaces = ["user", "mnt", "pid"].map(|name| fs::read_link(format!("/proc/self/ns/{name}")).ok());
    let identity = image_identity(&options.image);
    format!("{shaping:?} {identity:?} {directory:?} {mounted:?} {gpus:?} {chosen:?} {namespaces:?}")
}

/// What tells the image's file from another that has taken its name meanwhile.
fn image_identity(image: &ImageSource) -> Option<(u64, u64, [i64; 5])> {
    let path: &Path = match image {
        ImageSource::File { path, .. } | ImageSource::Stored { path, .. } => path,
        // Its digest is a part of its name.
        ImageSource::Unfetched(_) | ImageSource::Recorded => return None,
    };
    let found = path.metadata().ok()?;
    // Programs may well write to a directory.
    let times = match found.is_dir() {
        true => [0; 5],
        false => {
            let size = i64::try_from(found.size()).unwrap_or(0);
            [size, found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec()]
        }
    };
    Some((found.dev(), found.ino(), times))
}

/// So often may those end who are found, one after the other, before there is a container. Each time somebody must have been
/// killed, or have come to its own end.
const ATTEMPTS: u32 = 1000;
const PAUSE: Duration = Duration::from_millis(1);

/// Becomes the program in the shared container. Returns why not; or its exit code, when the user has been told.
pub fn run(options: &RunOptions, shared: &Shared) -> Result<i32, Failure> {
    let rank = shared.rank.as_ref();
    for _ in 0..ATTEMPTS {
        match shared.rendezvous.arrive() {
            Ok(Arrival::First(listener)) => return build_and_run(options, shared, listener),
            Ok(Arrival::Later(connection)) => match receive(&connection) {
                Ok(Some((Outcome::Ready, fds))) => return enter_and_run(options, fds),
                // The builder has told the user.
                Ok(Some((Outcome::Failed(failure), _))) => return Ok(told(&failure)),
                // Who was there has ended without a word, or with the last of its container.
                Ok(None) => std::thread::sleep(PAUSE),
                Err(errno) => return Err(Failure::caused_by("cannot hear of the shared container", errno)),
            },
            Err(failure) => return run_alone(options, rank, failure),
        }
    }
    run_alone(options, rank, Failure::new(format!("{ATTEMPTS} times who was there ended without a word")))
}

/// Nobody can be met here. Who has not asked for it does without.
fn run_alone(options: &RunOptions, rank: Option<&Rank>, why: Failure) -> Result<i32, Failure> {
    let Some(rank) = rank else { return Err(why.about("--share")) };
    note_alone(rank, &why);
    pipeline::run(options.clone())
}

/// One of the ranks tells it.
fn note_alone(rank: &Rank, why: &Failure) {
    if rank.is_first {
        report_note(&format!("every rank has a container of its own: {why}"));
    }
}

/// The exit code of a rank whose failure the user knows.
fn told(failure: &Failure) -> i32 {
    i32::from(failure.kind.exit_code())
}

/// The first to arrive: makes the container, and lets the others in.
fn build_and_run(options: &RunOptions, shared: &Shared, listener: OwnedFd) -> Result<i32, Failure> {
    let others = shared.rank.as_ref().map_or(0, |rank| rank.local_size.saturating_sub(1));
    let server = NamespaceServer::start(&shared.rendezvous, listener, others)?;
    match make(options, &server) {
        Ok((program, claim)) => Ok(claim.report(&sandbox::exec_program(&program))),
        Err(failure) => {
            // First the user is told: a manager that sees a rank end may end the others at once.
            cancel::hold_back_signals();
            report(&failure);
            server.announce_failure(&failure);
            Ok(told(&failure))
        }
    }
}

fn make(options: &RunOptions, server: &NamespaceServer) -> Result<(Program, Claim), Failure> {
    let reporter = StderrReporter::for_this_process().with_verbosity(options.settings.verbose());
    let prepared = pipeline::prepare_run(options, Box::new(reporter), None)?;
    let claim = Claim::new()?;
    let (plan, namespaces) = pipeline::build_and_enter(options, prepared)?;
    info_span!("announce").in_scope(|| {
        let facts = write_facts(&plan.facts)?;
        let fds = [vec![claim.0.as_raw_fd()], descriptors(&namespaces, &facts)].concat();
        server.announce(&fds);
        Ok(())
    })?;
    Ok((plan.program, claim))
}

/// A later one: enters.
fn enter_and_run(options: &RunOptions, fds: Vec<OwnedFd>) -> Result<i32, Failure> {
    let mut fds = fds.into_iter();
    let Some(claim) = fds.next().map(|fd| Claim(fd.into())) else {
        return Err(Failure::caused_by("cannot take over the container's namespaces", Errno::EMFILE));
    };
    let entered = read_message(fds.collect()).and_then(|(namespaces, facts)| {
        namespaces.enter()?;
        Ok(facts)
    });
    let facts = match entered {
        // The variables are the rank's own.
        Ok(facts) => Facts { environment: options.environment.clone(), ..facts },
        Err(failure) => return Ok(claim.report(&failure)),
    };
    if options.settings.verbose() != Verbosity::Quiet {
        report_note("in the container of another process of this launch");
    }
    let environment: Vec<(OsString, OsString)> = std::env::vars_os().collect();
    let program = Program::new(options, &facts, typed_command(options, &facts), &environment);
    Ok(claim.report(&sandbox::exec_program(&program)))
}

/// Waits for the answer of who is there; none if it has ended.
fn receive(connection: &OwnedFd) -> nix::Result<Option<(Outcome, Vec<OwnedFd>)>> {
    let mut text = vec![0; OUTCOME_LIMIT];
    loop {
        match sys::receive_descriptors(connection, &mut text, MsgFlags::MSG_DONTWAIT) {
            Ok((0, _)) | Err(Errno::ECONNRESET) => return Ok(None),
            Ok((length, fds)) => return Ok(Some((Outcome::decode(&text[..length]), fds))),
            Err(Errno::EAGAIN) => {
                let mut polled = [PollFd::new(connection.as_fd(), PollFlags::POLLIN)];
                match poll(&mut polled, PollTimeout::NONE) {
                    Ok(_) | Err(Errno::EINTR) => {}
                    Err(errno) => return Err(errno),
                }
            }
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// The right to tell the user why a program cannot be started: all ranks of a node usually fail for the same reason. It is one
/// byte in a pipe.
struct Claim(PipeReader);

impl Claim {
    fn new() -> Result<Claim, Failure> {
        let failed = |error| Failure::caused_by("cannot make a pipe", error);
        let (claim, mut byte) = std::io::pipe().map_err(failed)?;
        byte.write_all(&[1]).map_err(failed)?;
        Ok(Claim(claim))
    }

    /// Tells it, if nobody else has.
    fn report(mut self, failure: &Failure) -> i32 {
        cancel::hold_back_signals();
        // Its writer has closed it: who comes later finds the end.
        if matches!(self.0.read(&mut [0]), Ok(1)) {
            report(failure);
        }
        told(failure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Origin;
    use mizzen_core::options::EnvOption;

    fn shape_of(options: &RunOptions, pairs: &[(&str, &str)]) -> String {
        let environment: Vec<_> = pairs.iter().map(|(name, value)| (name.into(), value.into())).collect();
        shape(options, &environment)
    }

    #[test]
    fn ranks_may_differ_in_their_program_and_its_variables() {
        let options = RunOptions { command: vec!["a".into()], ..RunOptions::default() };
        let shape = shape_of(&options, &[("HOME", "/home/a"), ("CUDA_VISIBLE_DEVICES", "0")]);
        let mut other = options.clone();
        other.command = vec!["b".into(), "c".into()];
        other.environment = vec![(EnvOption::Set("RANK".into(), "1".into()), Origin::Option)];
        other.settings.verbose = Some(Verbosity::Times);
        assert_eq!(shape, shape_of(&other, &[("HOME", "/home/a"), ("CUDA_VISIBLE_DEVICES", "1")]));
        assert_ne!(shape, shape_of(&other, &[("HOME", "/home/b"), ("CUDA_VISIBLE_DEVICES", "1")]));
        assert_ne!(shape, shape_of(&other, &[("HOME", "/home/a"), ("CUDA_VISIBLE_DEVICES", "-1")]));
        let chosen = [("HOME", "/home/a"), ("CUDA_VISIBLE_DEVICES", "1"), ("NVIDIA_VISIBLE_DEVICES", "1")];
        assert_ne!(shape, shape_of(&other, &chosen));
        other.settings.remap_root = Some(true);
        assert_ne!(shape, shape_of(&other, &[("HOME", "/home/a"), ("CUDA_VISIBLE_DEVICES", "1")]));
        let temporary = [("HOME", "/home/a"), ("CUDA_VISIBLE_DEVICES", "0"), ("TMPDIR", "/tmp")];
        assert_eq!(shape, shape_of(&options, &temporary));
        let image = RunOptions { image: ImageSource::file("/other.sqsh"), ..options };
        assert_ne!(shape, shape_of(&image, &[("HOME", "/home/a"), ("CUDA_VISIBLE_DEVICES", "0")]));
    }

    #[test]
    fn a_failure_is_told_once() {
        let claim = Claim::new().unwrap();
        let other = Claim(claim.0.try_clone().unwrap());
        let has_byte = |mut claim: Claim| matches!(claim.0.read(&mut [0]), Ok(1));
        assert!(has_byte(claim));
        assert!(!has_byte(other));
    }
}
