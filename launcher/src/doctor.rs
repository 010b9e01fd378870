//! `mizzen doctor`: tries what a container needs of this node, each in a process of its own, and says what to change.
//! Runs as the user on the host; what root tries is tried as an unprivileged user.

mod slurm;

use std::fs;
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use mizzen_core::config::{SiteFiles, Source};
use mizzen_core::failure::{cause, quote_up_to};
use mizzen_core::{Config, Failure};
use mizzen_squashfs::fuse;
use nix::mount::{MsFlags, mount};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::geteuid;
use serde_json::json;

use crate::check_config::{unusable_stage_directory, unusable_stage_shared};
use crate::host::Host;
use crate::host_libraries::{self, Switch};
use crate::options::Unshare;
use crate::plan::Identity;
use crate::report::{print, report};
use crate::{sandbox, sys};

/// A user without rights, on every system.
const NOBODY: u32 = 65534;
/// No line of a report is longer.
const LINE_LIMIT: usize = 1000;
/// A needed check that fails is made again so often: others may have left the node no memory or processes for a moment.
const REPETITIONS: u32 = 2;
const PAUSE: Duration = Duration::from_millis(200);
/// The exit code where a check could not be made, which says nothing of the node's settings.
const NOT_TRIED: u8 = 2;

/// What is tried, and what it is for.
struct Check {
    name: &'static str,
    /// No container without it; otherwise something is missing or slower.
    needed: bool,
    purpose: &'static str,
    attempt: fn() -> Result<String, Failure>,
}

/// What a check has found.
enum Outcome {
    Good(String),
    Bad(Failure),
    /// It could not be made.
    NotTried(Failure),
}

const CHECKS: [Check; 11] = [
    Check { name: "settings", needed: true, purpose: "mizzen.toml and mizzen.d", attempt: settings },
    Check { name: "plugin", needed: true, purpose: "srun, sbatch and salloc", attempt: slurm::plugin },
    Check { name: "oci.conf", needed: false, purpose: "srun --container", attempt: slurm::runtime },
    Check { name: "user namespace", needed: true, purpose: "every container", attempt: user_namespace },
    Check { name: "mounts", needed: true, purpose: "every container", attempt: mounts },
    Check { name: "FUSE", needed: true, purpose: "squashfs and SIF images", attempt: fuse_mount },
    Check { name: "seccomp", needed: true, purpose: "the file server's filter", attempt: seccomp },
    Check { name: "overlay", needed: false, purpose: "--writable", attempt: overlay },
    Check { name: "copies", needed: false, purpose: "images on network file systems", attempt: copies },
    Check { name: "openat2", needed: false, purpose: "one call instead of many per path", attempt: openat2 },
    Check {
        name: "mount_setattr",
        needed: false,
        purpose: "one call instead of many per mount",
        attempt: mount_setattr,
    },
];

/// Tries everything; 0 if containers can run here, 1 if not, and 2 if that cannot be told.
pub fn examine(as_json: bool) -> ExitCode {
    if let Some(done) = geteuid().is_root().then(|| examine_as_user(as_json)).flatten() {
        return done;
    }
    let results: Vec<(&Check, Outcome)> = CHECKS.iter().map(|check| (check, check.make())).collect();
    let verdict = Verdict::of(&results);
    let text = if as_json { json_report(&results, verdict) } else { text_report(&results, verdict) };
    if let Err(failure) = print(&text) {
        report(&failure);
        return ExitCode::FAILURE;
    }
    match verdict {
        Verdict::Healthy => ExitCode::SUCCESS,
        Verdict::Failed => ExitCode::FAILURE,
        Verdict::Unknown => ExitCode::from(NOT_TRIED),
    }
}

/// Whether containers can run here.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Healthy,
    Failed,
    Unknown,
}

impl Verdict {
    fn of(results: &[(&Check, Outcome)]) -> Verdict {
        let mut needed = results.iter().filter(|(check, _)| check.needed).map(|(_, outcome)| outcome);
        if needed.clone().any(|outcome| matches!(outcome, Outcome::Bad(_))) {
            return Verdict::Failed;
        }
        match needed.any(|outcome| matches!(outcome, Outcome::NotTried(_))) {
            true => Verdict::Unknown,
            false => Verdict::Healthy,
        }
    }
}

impl Check {
    fn make(&self) -> Outcome {
        let mut outcome = in_own_process(self.attempt);
        for _ in 0..REPETITIONS {
            if !self.needed || matches!(outcome, Outcome::Good(_)) {
                break;
            }
            std::thread::sleep(PAUSE);
            outcome = in_own_process(self.attempt);
        }
        outcome
    }
}

/// Shows what rules for GPUs, fabrics or both find on this node.
pub fn host_libraries(as_json: bool, gpu: bool, fabric: bool) -> Result<(), Failure> {
    let kinds = [(gpu, Switch::Gpu), (fabric, Switch::Fabric)];
    let switches: Vec<Switch> = kinds.into_iter().filter(|(on, _)| *on).map(|(_, switch)| switch).collect();
    let lines = host_libraries::examine(&switches)?;
    if as_json {
        let items: Vec<_> =
            lines.iter().map(|(name, detail)| json!({ "name": name.trim(), "detail": detail })).collect();
        return print(&format!("{:#}\n", json!({ "found": items })));
    }
    print(&lines.iter().map(|(name, detail)| format!("{name:<34} {detail}\n")).collect::<String>())
}

fn text_report(results: &[(&Check, Outcome)], verdict: Verdict) -> String {
    let mut text = String::new();
    for (check, outcome) in results {
        let (word, detail, hint) = match outcome {
            Outcome::Good(detail) => ("ok", detail, &None),
            Outcome::Bad(failure) if check.needed => ("FAILED", &failure.message, &failure.hint),
            Outcome::Bad(failure) => ("missing", &failure.message, &failure.hint),
            Outcome::NotTried(failure) => ("unknown", &failure.message, &failure.hint),
        };
        text.push_str(&format!("{word:<8} {:<15} {detail} (for {})\n", check.name, check.purpose));
        if let Some(hint) = hint {
            text.push_str(&format!("         {:<15} hint: {hint}\n", ""));
        }
    }
    let verdict = match verdict {
        Verdict::Healthy => "containers can run here",
        Verdict::Failed => "containers cannot run here",
        Verdict::Unknown => "it cannot be told whether containers can run here",
    };
    text + verdict + "\n"
}

fn json_report(results: &[(&Check, Outcome)], verdict: Verdict) -> String {
    let checks: Vec<_> = results
        .iter()
        .map(|(check, outcome)| {
            let (ok, detail, hint) = match outcome {
                Outcome::Good(detail) => (json!(true), detail, None),
                Outcome::Bad(failure) => (json!(false), &failure.message, Some(&failure.hint)),
                Outcome::NotTried(failure) => (json!(null), &failure.message, Some(&failure.hint)),
            };
            let mut line = json!({ "name": check.name, "ok": ok, "needed": check.needed, "detail": detail });
            if let Some(hint) = hint {
                line["hint"] = json!(hint);
            }
            line
        })
        .collect();
    let healthy = match verdict {
        Verdict::Healthy => json!(true),
        Verdict::Failed => json!(false),
        Verdict::Unknown => json!(null),
    };
    format!("{:#}\n", json!({ "healthy": healthy, "checks": checks }))
}

/// Namespaces cannot be left again, so each attempt has a process of its own and sends its result back.
fn in_own_process(attempt: fn() -> Result<String, Failure>) -> Outcome {
    let tried = || -> std::io::Result<Outcome> {
        let (mut from_child, to_parent) = std::io::pipe()?;
        let child = sys::spawn_child(|| send(attempt(), &to_parent))?;
        drop(to_parent);
        let received = receive(&mut from_child)?;
        let ended = waitpid(child, None)?;
        Ok(match received {
            Some(Ok(detail)) => Outcome::Good(detail),
            Some(Err(failure)) if failure.is_shortage() => Outcome::NotTried(failure),
            Some(Err(failure)) => Outcome::Bad(failure),
            // Where memory runs out the kernel ends processes.
            None if matches!(ended, WaitStatus::Signaled(_, Signal::SIGKILL, _)) => {
                Outcome::NotTried(Failure::new("cannot try: killed"))
            }
            None => Outcome::Bad(Failure::new("crashed")),
        })
    };
    tried().unwrap_or_else(|error| Outcome::NotTried(Failure::caused_by("cannot try", error)))
}

/// Root may do what users cannot, and it is for users that this is asked: has another process do it all, as an unprivileged user.
/// Others may be that user too, so it has nothing of root's: no memory, no variable, no descriptor, no terminal. None if there is no
/// such user here: root may be that of a namespace.
fn examine_as_user(as_json: bool) -> Option<ExitCode> {
    sys::close_on_exec_from(3).ok()?;
    let mut command = Command::new(std::env::current_exe().ok()?);
    command.arg("doctor").args(as_json.then_some("--json")).env_clear().current_dir("/");
    command.envs(std::env::var_os("SLURM_CONF").map(|conf| ("SLURM_CONF", conf)));
    // With it, the standard library leaves root's groups, too.
    command.gid(NOBODY).uid(NOBODY).stdin(Stdio::null()).stderr(Stdio::null());
    let done = match command.output() {
        Ok(done) => done,
        Err(error) if [libc::EINVAL, libc::EPERM].map(Some).contains(&error.raw_os_error()) => return None,
        Err(error) => {
            report(&Failure::caused_by("cannot start a process as an unprivileged user", error));
            return Some(ExitCode::from(NOT_TRIED));
        }
    };
    // Who shares that user's rights may have written something else.
    let lines =
        done.stdout.split_inclusive(|byte| *byte == b'\n').map(|line| match line.strip_suffix(b"\n") {
            Some(line) => quote_up_to(line, LINE_LIMIT) + "\n",
            None => quote_up_to(line, LINE_LIMIT),
        });
    if let Err(failure) = print(&lines.collect::<String>()) {
        report(&failure);
        return Some(ExitCode::FAILURE);
    }
    // Only these are its verdict.
    Some(match done.status.code() {
        Some(0) => ExitCode::SUCCESS,
        Some(1) => ExitCode::FAILURE,
        _ => ExitCode::from(NOT_TRIED),
    })
}

fn send(result: Result<String, Failure>, mut pipe: &PipeWriter) -> i32 {
    let text = match result {
        Ok(detail) => format!("+{detail}"),
        Err(failure) => format!("-{}", failure.encode()),
    };
    i32::from(pipe.write_all(text.as_bytes()).is_err())
}

fn receive(pipe: &mut PipeReader) -> std::io::Result<Option<Result<String, Failure>>> {
    let mut text = String::new();
    pipe.read_to_string(&mut text)?;
    if let Some(detail) = text.strip_prefix('+') {
        return Ok(Some(Ok(detail.to_owned())));
    }
    Ok(text.strip_prefix('-').map(|text| Err(Failure::decode(text.as_bytes(), text.len()))))
}

fn settings() -> Result<String, Failure> {
    let source = Source::of_this_machine()?;
    let files = SiteFiles::read(&source)?;
    files.merge()?;
    let (path, directory) = (source.path(), source.drop_in_directory());
    let drop_ins = files.paths().filter(|file| *file != path).count();
    let has_main = files.paths().any(|file| file == path);
    let (path, directory) = (path.display(), directory.display());
    let named = if source == Source::Default { "" } else { ", as plugstack.conf says" };
    Ok(match (has_main, drop_ins) {
        (true, 0) => format!("{path} is good{named}"),
        (false, 0) => format!("no {path}: defaults"),
        (true, count) => format!("{path} and {count} of {directory} are good{named}"),
        (false, count) => format!("no {path}; {count} of {directory} are good"),
    })
}

fn copies() -> Result<String, Failure> {
    let config = Config::of_this_machine()?;
    if let Some(why) = unusable_stage_directory(&config) {
        return Err(
            Failure::new(why).hint("make it a directory with mode 1777, or name another in mizzen.toml")
        );
    }
    if let Some(why) = unusable_stage_shared(&config) {
        return Err(Failure::new(why).hint(
            "no start uses the copies in it: make it root's, with mode 0755, and all directories above it",
        ));
    }
    Ok(format!("in {}", config.stage_directory.display()))
}

fn user_namespace() -> Result<String, Failure> {
    sandbox::enter_user_namespace(&Identity::new(&Host::detect(), false), None)?;
    let limit = fs::read_to_string("/proc/sys/user/max_user_namespaces").unwrap_or_default();
    Ok(format!("works (at most {} of them)", limit.trim()))
}

fn mounts() -> Result<String, Failure> {
    let _ = own_mounts()?;
    Ok("tmpfs and bind mounts work".to_owned())
}

fn fuse_mount() -> Result<String, Failure> {
    let limits = sandbox::enter_user_namespace(&Identity::new(&Host::detect(), false), None)?;
    let device = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").map_err(|error| {
        Failure::caused_by("cannot open /dev/fuse", error)
            .or_hint("load the kernel module fuse (modprobe fuse), and give /dev/fuse mode 0666")
    })?;
    sandbox::enter_mount_namespace(Unshare::default(), None, false, &limits)?;
    let (uid, gid) = (nix::unistd::getuid(), nix::unistd::getgid());
    let options =
        format!("fd={},rootmode=40755,user_id={uid},group_id={gid},allow_other", device.as_raw_fd());
    try_mount("fuse", "/tmp", &options, "FUSE mounts in user namespaces need Linux 4.18")?;
    Ok("works".to_owned())
}

/// Servers run without a filter only where the kernel has none.
fn seccomp() -> Result<String, Failure> {
    nix::sys::prctl::set_no_new_privs()
        .map_err(|errno| Failure::caused_by("cannot set no_new_privs", errno))?;
    // The result is sent by calls that servers make too.
    match fuse::filter::install(&[]) {
        Ok(()) => Ok("works".to_owned()),
        Err(error) if fuse::filter::is_missing(&error) => {
            Ok("not in this kernel: file servers run without it".to_owned())
        }
        Err(error) => Err(Failure::caused_by("cannot install a filter", error).hint(
            "another filter, or a security module, forbids it; images that are files cannot be used here",
        )),
    }
}

fn overlay() -> Result<String, Failure> {
    let base = own_mounts()?;
    let directory = |name: &str| {
        fs::create_dir(format!("{base}/{name}"))
            .map_err(|error| Failure::new(format!("cannot make a directory on a tmpfs: {}", cause(&error))))
    };
    for name in ["lower", "upper", "work", "root"] {
        directory(name)?;
    }
    let options = format!("lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work,userxattr");
    try_mount("overlay", &format!("{base}/root"), &options, "overlays in user namespaces need Linux 5.11")?;
    Ok("works".to_owned())
}

/// User and mount namespaces of the attempt's own, with a tmpfs in a place that is returned.
fn own_mounts() -> Result<&'static str, Failure> {
    let limits = sandbox::enter_user_namespace(&Identity::new(&Host::detect(), false), None)?;
    sandbox::enter_mount_namespace(Unshare::default(), None, false, &limits)?;
    try_mount("tmpfs", "/tmp", "mode=0755", "a security policy may forbid mounts in user namespaces")?;
    Ok("/tmp")
}

fn try_mount(kind: &str, place: &str, options: &str, hint: &str) -> Result<(), Failure> {
    mount(Some("mizzen"), place, Some(kind), MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Some(options))
        .map_err(|errno| Failure::caused_by(format!("cannot mount {kind}"), errno).hint(hint))
}

fn openat2() -> Result<String, Failure> {
    let how = nix::fcntl::OpenHow::new().flags(nix::fcntl::OFlag::O_PATH);
    match nix::fcntl::openat2(nix::fcntl::AT_FDCWD, "/", how) {
        Ok(_) => Ok("there".to_owned()),
        Err(errno) => Err(Failure::new(cause(&errno.into())).hint("Linux 5.6 has it; mizzen does without")),
    }
}

fn mount_setattr() -> Result<String, Failure> {
    own_mounts()?;
    let place = fs::File::open("/tmp").map_err(|error| Failure::new(cause(&error)))?;
    match sys::restrict_mounts(std::os::fd::AsFd::as_fd(&place), libc::MOUNT_ATTR_NOSUID) {
        Ok(()) => Ok("there".to_owned()),
        Err(error) => Err(Failure::new(cause(&error)).hint("Linux 5.12 has it; mizzen does without")),
    }
}
