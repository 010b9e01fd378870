//! The namespaces of a container.

use std::fs;
use std::os::fd::OwnedFd;

use mizzen_core::Failure;
use mizzen_core::user_namespace::{Namespace, NamespaceLimits};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::{geteuid, getgid, getuid, sethostname};
use rustix::fs::CWD;
use rustix::mount::{OpenTreeFlags, open_tree};
use tracing::debug;

use crate::options::Unshare;
use crate::plan::Identity;
use crate::sys;

/// What to do when the kernel refuses a mount of ours.
pub const MOUNTS_REFUSED: &str =
    "a security policy may forbid mounts in user namespaces; `mizzen doctor` tells what works";

/// The namespaces of a container, held open: who has them can enter.
pub struct Namespaces {
    /// Must be entered first.
    pub user: OwnedFd,
    /// With the container's root as its root.
    pub mounts: OwnedFd,
    /// Network, IPC and host name, as far as it has them of its own.
    pub others: Vec<OwnedFd>,
    /// Which of them these are.
    pub unshare: Unshare,
    /// What keeps the container's changes on disk while anybody has it open.
    pub changes_guard: Option<OwnedFd>,
}

/// The names in procfs of the namespaces that tasks can have in common beside user and mount, as far as a container has them of
/// its own.
fn shared_names(own: &Unshare) -> impl Iterator<Item = &'static str> + use<> {
    let wanted = own.names().into_iter().filter(|(name, wanted)| *wanted && *name != "pid");
    wanted.map(|(name, _)| name)
}

/// How many [`Namespaces::others`] such a container has.
pub fn count_others(own: &Unshare) -> usize {
    shared_names(own).count()
}

impl Namespaces {
    /// Those of the calling process, which has these of its own.
    pub fn of_this_process(own: &Unshare) -> Result<Namespaces, Failure> {
        Namespaces::open("self", *own)
    }

    /// Those of another process.
    pub fn of(process: &str) -> Result<Namespaces, Failure> {
        let number = |process: &str, name: &str| fs::read_link(format!("/proc/{process}/ns/{name}")).ok();
        let is_own = |name: &str| number(process, name) != number("self", name);
        let own = Unshare { pid: false, ipc: is_own("ipc"), net: is_own("net"), uts: is_own("uts") };
        Namespaces::open(process, own)
    }

    fn open(process: &str, own: Unshare) -> Result<Namespaces, Failure> {
        let open = |name: &str| {
            let path = format!("/proc/{process}/ns/{name}");
            let file = fs::File::open(&path);
            file.map(OwnedFd::from).map_err(|error| Failure::caused_by(&path, error))
        };
        let others = shared_names(&own).map(open).collect::<Result<_, _>>()?;
        Ok(Namespaces {
            user: open("user")?,
            mounts: open("mnt")?,
            others,
            unshare: own,
            changes_guard: None,
        })
    }

    /// Enters them; whether that made this process root, which it was not.
    pub fn enter_as_root(&self) -> Result<bool, Failure> {
        let was_root = geteuid().is_root();
        self.enter()?;
        Ok(geteuid().is_root() && !was_root)
    }

    /// Enters them.
    pub fn enter(&self) -> Result<(), Failure> {
        // The kernel knows which kind each of them is.
        for namespace in [&self.user, &self.mounts].into_iter().chain(&self.others) {
            setns(namespace, CloneFlags::empty())
                .map_err(|errno| Failure::caused_by("cannot enter the container", errno))?;
        }
        Ok(())
    }
}

impl Namespaces {
    /// The container's root without what is mounted in it, as one mount without a place. The kernel mounts an overlay's upper
    /// directory only once, but whoever is in the container's namespaces may clone the mount; and such a clone can be put into the mount
    /// namespace of another user namespace.
    pub fn clone_root(&self) -> Result<OwnedFd, Failure> {
        let clone = || {
            setns(&self.user, CloneFlags::empty())?;
            setns(&self.mounts, CloneFlags::empty())?;
            Ok(open_tree(CWD, "/", OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?)
        };
        sys::open_in_child(clone).map_err(|error| {
            Failure::caused_by("its files cannot be mounted once more", error).hint(
                "the flag no_exec needs the call open_tree (Linux 5.2), which a seccomp filter may forbid; wait for its end, or leave the flag out",
            )
        })
    }
}

/// Enters the user namespace that was made for the container, in which all groups of the user are known; or makes one, in
/// which the primary group alone is. The process is `identity` then, and has the capabilities to mount. The limits on
/// namespaces that hold outside are returned: inside they cannot be seen.
pub fn enter_user(identity: &Identity, made: Option<OwnedFd>) -> Result<NamespaceLimits, Failure> {
    let Identity { uid, gid, inside_uid, inside_gid, .. } = identity;
    let limits = NamespaceLimits::look();
    debug!(made = made.is_some(), "the user namespace; made by the plugin, or here");
    if let Some(namespace) = made {
        setns(namespace, CloneFlags::CLONE_NEWUSER)
            .map_err(|errno| Failure::caused_by("cannot enter the user namespace", errno))?;
        // Who made it has read the same settings, but earlier.
        if (getuid().as_raw(), getgid().as_raw()) != (*inside_uid, *inside_gid) {
            return Err(Failure::new("the user namespace was made for somebody else")
                .hint("mizzen.toml has changed just now; try again"));
        }
        return Ok(limits);
    }
    make(Namespace::User, &limits)?;
    let write_map = |file: &str, text: &str| {
        fs::write(format!("/proc/self/{file}"), text).map_err(|error| {
            let hint = limits.hint(Namespace::User, error.raw_os_error().unwrap_or(0));
            let what = format!("cannot write /proc/self/{file} of the container's user namespace");
            Failure::caused_by(what, error).hint(hint)
        })
    };
    write_map("uid_map", &format!("{inside_uid} {uid} 1"))?;
    // Before the group map: the kernel wants to be sure that no group can be dropped to gain access.
    write_map("setgroups", "deny")?;
    write_map("gid_map", &format!("{inside_gid} {gid} 1"))?;
    Ok(limits)
}

/// One by one, so that a failure tells which kind the kernel refuses.
fn make(kind: Namespace, limits: &NamespaceLimits) -> Result<(), Failure> {
    let flag = match kind {
        Namespace::User => CloneFlags::CLONE_NEWUSER,
        Namespace::Mount => CloneFlags::CLONE_NEWNS,
        Namespace::Pid => CloneFlags::CLONE_NEWPID,
        Namespace::Ipc => CloneFlags::CLONE_NEWIPC,
        Namespace::Net => CloneFlags::CLONE_NEWNET,
        Namespace::Uts => CloneFlags::CLONE_NEWUTS,
    };
    debug!(?kind, "a new namespace");
    unshare(flag).map_err(|errno| limits.refused(kind, errno as i32))
}

/// Makes a mount namespace, whose mounts nobody outside sees, and the others that are asked for. With a process id
/// namespace only children are in it. `limits` are those outside the container's user namespace. Where the container follows
/// the host, what the host mounts later appears in the mounts that are not made private.
pub fn new_mounts_and_others(
    others: Unshare,
    hostname: Option<&str>,
    follows_host: bool,
    limits: &NamespaceLimits,
) -> Result<(), Failure> {
    for (wanted, kind) in [
        (true, Namespace::Mount),
        (others.pid, Namespace::Pid),
        (others.ipc, Namespace::Ipc),
        (others.net, Namespace::Net),
        (others.uts, Namespace::Uts),
    ] {
        if wanted {
            make(kind, limits)?;
        }
    }
    let propagation = if follows_host { MsFlags::MS_SLAVE } else { MsFlags::MS_PRIVATE };
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | propagation, None::<&str>).map_err(|errno| {
        Failure::caused_by("cannot make the mounts private", errno).or_hint(MOUNTS_REFUSED)
    })?;
    if let Some(hostname) = hostname {
        sethostname(hostname).map_err(|errno| Failure::caused_by("cannot set the host name", errno))?;
    }
    if others.net {
        sys::loopback_up().map_err(|error| Failure::caused_by("cannot bring up the loopback", error))?;
    }
    Ok(())
}
