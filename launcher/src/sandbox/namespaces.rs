//! The namespaces of a container.

use std::fs;
use std::os::fd::OwnedFd;

use mizzen_core::failure::cause;
use mizzen_core::{Failure, user_namespace};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::{getgid, getuid};

use crate::options::Unshare;
use crate::plan::Identity;
use crate::sys;

/// The namespaces of a container, held open: who has them can enter.
pub struct Namespaces {
    /// Must be entered first.
    pub user: OwnedFd,
    /// With the container's root as its root.
    pub mounts: OwnedFd,
    /// What keeps the container's changes on disk while anybody has it open.
    pub life: Option<OwnedFd>,
}

impl Namespaces {
    /// Those of the calling process.
    pub fn of_this_process() -> Result<Namespaces, Failure> {
        Namespaces::of("self")
    }

    /// Those of a process, or `self`.
    pub fn of(process: &str) -> Result<Namespaces, Failure> {
        let open = |name: &str| {
            let path = format!("/proc/{process}/ns/{name}");
            let file = fs::File::open(&path);
            file.map(OwnedFd::from).map_err(|error| Failure::new(format!("{path}: {}", cause(&error))))
        };
        Ok(Namespaces { user: open("user")?, mounts: open("mnt")?, life: None })
    }

    /// Enters them.
    pub fn enter(self) -> Result<(), Failure> {
        for (namespace, flag) in
            [(self.user, CloneFlags::CLONE_NEWUSER), (self.mounts, CloneFlags::CLONE_NEWNS)]
        {
            setns(namespace, flag)
                .map_err(|errno| Failure::new(format!("cannot enter the container: {}", errno.desc())))?;
        }
        Ok(())
    }
}

/// Enters the user namespace that was made for the container, in which all groups of the user are known; or makes one, in
/// which the primary group alone is. The process is `identity` then, and has the capabilities to mount.
pub fn enter_user(identity: &Identity, made: Option<OwnedFd>) -> Result<(), Failure> {
    let Identity { uid, gid, inside_uid, inside_gid, .. } = identity;
    if let Some(namespace) = made {
        setns(namespace, CloneFlags::CLONE_NEWUSER)
            .map_err(|errno| Failure::new(format!("cannot enter the user namespace: {}", errno.desc())))?;
        // Who made it has read the same settings, but earlier.
        if (getuid().as_raw(), getgid().as_raw()) != (*inside_uid, *inside_gid) {
            return Err(Failure::new("the user namespace was made for somebody else")
                .hint("mizzen.toml has changed just now; try again"));
        }
        return Ok(());
    }
    unshare(CloneFlags::CLONE_NEWUSER).map_err(|errno| {
        Failure::new(format!("cannot make a user namespace: {}", errno.desc()))
            .hint(user_namespace::hint(errno as i32))
    })?;
    write_map("uid_map", &format!("{inside_uid} {uid} 1"))?;
    // Before the group map: the kernel wants to be sure that no group can be dropped to gain access.
    write_map("setgroups", "deny")?;
    write_map("gid_map", &format!("{inside_gid} {gid} 1"))
}

fn write_map(file: &str, text: &str) -> Result<(), Failure> {
    fs::write(format!("/proc/self/{file}"), text).map_err(|error| {
        Failure::new(format!("cannot write /proc/self/{file} of the container's user namespace: {error}"))
            .hint(user_namespace::hint(error.raw_os_error().unwrap_or(0)))
    })
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
            .hint(user_namespace::hint(errno as i32))
    })?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .map_err(|errno| Failure::new(format!("cannot make the mounts private: {}", errno.desc())))?;
    if others.net {
        sys::loopback_up().map_err(|error| Failure::new(format!("cannot bring up the loopback: {error}")))?;
    }
    Ok(())
}
