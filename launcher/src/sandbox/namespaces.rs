//! The namespaces of a container.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use mizzen_core::Failure;
use mizzen_core::failure::cause;
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::socket::{MsgFlags, recv};

use crate::options::Unshare;
use crate::plan::Identity;
use crate::{report_note, sys};

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

/// Makes a user namespace in which the process is `identity`, and has the capabilities to mount. The broker, if there
/// is one, is asked to make all groups of the user known in it; else the primary one alone is.
pub fn new_user(identity: &Identity, broker: Option<&OwnedFd>) -> Result<(), Failure> {
    unshare(CloneFlags::CLONE_NEWUSER).map_err(|errno| {
        Failure::new(format!("cannot make a user namespace: {}", errno.desc()))
            .hint(hint_for_user_namespace(io::Error::from(errno).raw_os_error().unwrap_or(0)))
    })?;
    let Identity { uid, gid, inside_uid, inside_gid, .. } = identity;
    write_map("uid_map", &format!("{inside_uid} {uid} 1"))?;
    if let Some(broker) = broker {
        return ask_broker(broker, identity);
    }
    // Before the group map: the kernel wants to be sure that no group can be dropped to gain access.
    write_map("setgroups", "deny")?;
    write_map("gid_map", &format!("{inside_gid} {gid} 1"))
}

fn write_map(file: &str, text: &str) -> Result<(), Failure> {
    fs::write(format!("/proc/self/{file}"), text).map_err(|error| {
        Failure::new(format!("cannot write /proc/self/{file} of the container's user namespace: {error}"))
            .hint(hint_for_user_namespace(error.raw_os_error().unwrap_or(0)))
    })
}

/// Asks the broker to map all groups. It is root and wants to see the namespace itself; which groups, it knows.
fn ask_broker(broker: &OwnedFd, identity: &Identity) -> Result<(), Failure> {
    let namespace = Namespaces::of_this_process()?.user;
    let mode = [if identity.inside_uid == 0 && identity.uid != 0 { b'r' } else { b'k' }];
    sys::pass_descriptors(broker, &mode, &[namespace.as_raw_fd()]).map_err(broker_lost)
}

/// Waits until the broker has done it.
pub fn await_broker(broker: OwnedFd) -> Result<(), Failure> {
    let mut answer = [0; 4096];
    let length = recv(broker.as_raw_fd(), &mut answer, MsgFlags::empty()).map_err(broker_lost)?;
    let text = String::from_utf8_lossy(&answer[..length]).into_owned();
    match text.split_at_checked(1) {
        Some(("+", "")) => Ok(()),
        Some(("+", dropped)) => {
            report_note(&format!(
                "files of these groups belong to nobody inside: {dropped}; the kernel maps at most 340 ranges"
            ));
            Ok(())
        }
        Some((_, why)) => Err(Failure::new(format!("cannot map the groups: {why}"))),
        None => Err(Failure::new("the broker has ended without an answer")
            .hint("slurmd's log on the node may tell why")),
    }
}

fn broker_lost(errno: Errno) -> Failure {
    Failure::new(format!("cannot reach the broker: {}", errno.desc()))
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
