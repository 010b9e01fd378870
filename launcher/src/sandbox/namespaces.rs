//! The namespaces of a container.

use std::fs;
use std::io;

use mizzen_core::Failure;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use crate::options::Unshare;
use crate::plan::Identity;
use crate::sys;

/// Makes a user namespace in which the process is `identity`, and has the capabilities to mount.
pub fn new_user(identity: &Identity) -> Result<(), Failure> {
    unshare(CloneFlags::CLONE_NEWUSER).map_err(|errno| {
        Failure::new(format!("cannot make a user namespace: {}", errno.desc()))
            .hint(hint_for_user_namespace(io::Error::from(errno).raw_os_error().unwrap_or(0)))
    })?;
    let Identity { uid, gid, inside_uid, inside_gid } = identity;
    // Before the group map: the kernel wants to be sure that no group can be dropped to gain access.
    for (file, text) in [
        ("setgroups", "deny".to_owned()),
        ("uid_map", format!("{inside_uid} {uid} 1")),
        ("gid_map", format!("{inside_gid} {gid} 1")),
    ] {
        fs::write(format!("/proc/self/{file}"), text).map_err(|error| {
            Failure::new(format!("cannot write /proc/self/{file} of the container's user namespace: {error}"))
                .hint(hint_for_user_namespace(error.raw_os_error().unwrap_or(0)))
        })?;
    }
    Ok(())
}

/// Makes a mount namespace, whose mounts nobody outside sees, and the others that are asked for. With a process id
/// namespace only children are in it.
pub fn new_mounts_and_others(others: Unshare) -> Result<(), Failure> {
    let mut flags = CloneFlags::CLONE_NEWNS;
    for (wanted, flag) in [
        (others.pid, CloneFlags::CLONE_NEWPID),
        (others.ipc, CloneFlags::CLONE_NEWIPC),
        (others.net, CloneFlags::CLONE_NEWNET),
        (others.uts, CloneFlags::CLONE_NEWUTS),
    ] {
        if wanted {
            flags |= flag;
        }
    }
    unshare(flags).map_err(|errno| {
        Failure::new(format!("cannot make the container's namespaces: {}", errno.desc()))
            .hint(hint_for_user_namespace(io::Error::from(errno).raw_os_error().unwrap_or(0)))
    })?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .map_err(|errno| Failure::new(format!("cannot make the mounts private: {}", errno.desc())))?;
    if others.net {
        sys::loopback_up().map_err(|error| Failure::new(format!("cannot bring up the loopback: {error}")))?;
    }
    Ok(())
}

/// What to do when the kernel refuses a user namespace.
fn hint_for_user_namespace(errno: i32) -> String {
    let sysctl =
        |name: &str| fs::read_to_string(format!("/proc/sys/{name}")).ok().map(|text| text.trim().to_owned());
    if sysctl("user/max_user_namespaces").as_deref() == Some("0") {
        return "user namespaces are off here (sysctl user.max_user_namespaces = 0)".to_owned();
    }
    if sysctl("kernel/unprivileged_userns_clone").as_deref() == Some("0") {
        return "user namespaces are for root only here (sysctl kernel.unprivileged_userns_clone = 0)"
            .to_owned();
    }
    if sysctl("kernel/apparmor_restrict_unprivileged_userns").as_deref() == Some("1") {
        return "AppArmor restricts them (sysctl kernel.apparmor_restrict_unprivileged_userns = 1); \
                mizzen needs a profile with the rule `userns,`"
            .to_owned();
    }
    match errno {
        libc::ENOSPC => {
            "the limit is reached (sysctl user.max_user_namespaces), or too many are nested".to_owned()
        }
        libc::EPERM => "in a chroot, or under a security policy, the kernel refuses them".to_owned(),
        _ => "`mizzen doctor` tells what is missing".to_owned(),
    }
}
