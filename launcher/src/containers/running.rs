//! The processes of containers that run, found among those of the same user. To enter a container needs no privilege beyond
//! that, so a user who forges what is looked for reaches only what is their own.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use mizzen_core::{Failure, mountinfo};
use nix::unistd::geteuid;

use super::record::Record;
use crate::sandbox::{Namespaces, STEP_VARIABLE, overlay_directory};

/// The namespaces of a named container, if any process is in it. What cannot be entered is a failure.
pub fn find(record: &Record) -> Result<Option<Namespaces>, Failure> {
    let mut refused = None;
    for process in processes(record) {
        match Namespaces::of(&process) {
            Ok(namespaces) => return Ok(Some(namespaces)),
            // It may have ended meanwhile; or nobody may look at it.
            Err(_) if has_ended(&process) => {}
            Err(failure) => refused = Some(failure),
        }
    }
    refused.map_or(Ok(None), |failure| {
        Err(failure.about("runs, but cannot be entered").hint("wait until the programs in it have ended"))
    })
}

/// A process that its parent has not waited for yet has no namespaces any more.
fn has_ended(process: &str) -> bool {
    let namespace = fs::read_link(format!("/proc/{process}/ns/mnt"));
    namespace.is_err_and(|error| matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)))
}

/// A job other than this one, of a program that is in a named container.
pub fn other_job(record: &Record, own: &OsStr) -> Option<OsString> {
    processes(record).find_map(|process| {
        let environment = read_environment(&fs::read(format!("/proc/{process}/environ")).ok()?);
        let (_, job) = environment.into_iter().find(|(name, _)| name == "SLURM_JOB_ID")?;
        (job != own).then_some(job)
    })
}

/// The numbers of processes whose root is the container's overlay.
pub fn processes(record: &Record) -> impl Iterator<Item = String> {
    let upper = format!("upperdir={}/upper", overlay_directory(&record.id));
    let own = mount_namespace("self");
    // Most processes share the mount namespaces of few.
    let mut others = BTreeSet::new();
    own_processes().filter(move |process| {
        let namespace = mount_namespace(process);
        if namespace.is_some() && namespace == own
            || namespace.as_ref().is_some_and(|namespace| others.contains(namespace))
        {
            return false;
        }
        let text = fs::read(format!("/proc/{process}/mountinfo")).unwrap_or_default();
        let found = mountinfo::parse(&text).into_iter().any(|mount| {
            mount.place == Path::new("/")
                && mount.fs_type == "overlay"
                && mount.super_options.split(',').any(|option| option == upper)
        });
        if !found {
            others.extend(namespace);
        }
        found
    })
}

fn mount_namespace(process: &str) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{process}/ns/mnt")).ok()
}

/// A process of a step in a container, by the variable that mizzen gave it, and its environment.
pub fn step_process(step: &str) -> Option<(String, Vec<(OsString, OsString)>)> {
    let own = mount_namespace("self")?;
    own_processes().find_map(|process| {
        let environment = read_environment(&fs::read(format!("/proc/{process}/environ")).ok()?);
        let namespace = mount_namespace(&process)?;
        let marked = environment.iter().any(|(name, value)| name == STEP_VARIABLE && value == step);
        (marked && namespace != own).then_some((process, environment))
    })
}

/// The environment of a process of this user's in a container, by its number.
pub fn container_process(process: &str) -> Option<Vec<(OsString, OsString)>> {
    let inside = mount_namespace(process)? != mount_namespace("self")?;
    let text = fs::read(format!("/proc/{process}/environ")).ok()?;
    (inside && is_own(process)).then(|| read_environment(&text))
}

/// The processes of this user. Root could look into those of others; they are not root's to enter either.
fn own_processes() -> impl Iterator<Item = String> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())).filter(|process| is_own(process))
}

fn is_own(process: &str) -> bool {
    fs::metadata(format!("/proc/{process}")).is_ok_and(|found| found.uid() == geteuid().as_raw())
}

/// The variables in the text of /proc/PID/environ.
fn read_environment(text: &[u8]) -> Vec<(OsString, OsString)> {
    let lines = text.split(|byte| *byte == 0).filter(|line| !line.is_empty());
    lines
        .filter_map(|line| {
            let equals = line.iter().position(|byte| *byte == b'=')?;
            let part = |part: &[u8]| OsStr::from_bytes(part).to_owned();
            Some((part(&line[..equals]), part(&line[equals + 1..])))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_has_waited_for_has_ended() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let number = child.id().to_string();
        let state = || fs::read_to_string(format!("/proc/{number}/stat")).unwrap();
        while !state().contains(") Z ") {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(has_ended(&number));
        child.wait().unwrap();
        assert!(has_ended(&number));
        assert!(!has_ended("self"));
    }
}
