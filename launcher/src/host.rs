//! Facts about the node and the user, gathered once before anything is planned. Runs as the user on the host.
//!
//! Nothing here asks the name service: thousands of tasks start at once, and a static program has none. Slurm and
//! login put what is needed into the environment.

use std::ffi::OsString;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use mizzen_core::SlurmConf;
use mizzen_core::handover::Accounts;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::{getgid, getuid};
use rustix::fs::{XattrFlags, fsetxattr};

/// The user and the node as they are.
#[derive(Clone, Debug)]
pub struct Host {
    /// The user's id.
    pub uid: u32,
    /// The user's primary group.
    pub gid: u32,
    /// The login name, as well as it is known.
    pub user: String,
    /// The name of the primary group, if a file tells it.
    pub group: Option<String>,
    /// Other groups of the user that will be mapped into the container, by number and name.
    pub mapped_groups: Vec<(u32, String)>,
    /// The home directory, if it exists.
    pub home: Option<PathBuf>,
    /// The login shell.
    pub shell: Option<PathBuf>,
    /// The current directory, if it can be told.
    pub cwd: Option<PathBuf>,
    /// The environment.
    pub environment: Vec<(OsString, OsString)>,
    /// The time zone's name, where the node tells it.
    pub time_zone: Option<String>,
    /// Device nodes and directories of them that a program inside may use.
    pub devices: Vec<PathBuf>,
    /// Whether a tmpfs has user xattrs, which an overlay writes with its changes: since Linux 6.6.
    pub tmpfs_has_xattrs: bool,
}

/// Devices that every program expects.
const COMMON_DEVICES: [&str; 7] = ["null", "zero", "full", "random", "urandom", "tty", "ptmx"];
/// Devices and directories below /dev that are given when the node has them: terminals, shared memory, and what
/// fabrics need. A name that ends in `*` stands for all that begin so. GPUs are given by the rules of
/// `host_libraries`.
const FURTHER_DEVICES: [&str; 11] =
    ["pts", "shm", "mqueue", "hugepages", "fuse", "infiniband", "xpmem", "knem", "cxi*", "hfi1*", "vfio"];

impl Host {
    /// Looks around, as a user without a job.
    pub fn detect() -> Host {
        let (uid, gid) = (getuid().as_raw(), getgid().as_raw());
        let account = account_in_file(Path::new("/etc/passwd"), uid);
        let group = group_in_file(Path::new("/etc/group"), gid);
        Host::of(uid, gid, account, group, Vec::new())
    }

    /// Looks around in a job, where Slurm's side has asked the name services, and may have mapped all groups.
    pub fn detect_with(accounts: &Accounts, all_groups: bool) -> Host {
        let (uid, gid) = (getuid().as_raw(), getgid().as_raw());
        let account = accounts.user.clone().map(|name| Account {
            name,
            home: accounts.home.clone().unwrap_or_default(),
            shell: accounts.shell.clone().unwrap_or_default(),
        });
        let (primary, others): (Vec<_>, Vec<_>) =
            accounts.groups.iter().cloned().partition(|(group, _)| *group == gid);
        let group = primary.into_iter().map(|(_, name)| name).find(|name| !name.is_empty());
        Host::of(uid, gid, account, group, if all_groups { others } else { Vec::new() })
    }

    fn of(
        uid: u32,
        gid: u32,
        account: Option<Account>,
        group: Option<String>,
        mapped_groups: Vec<(u32, String)>,
    ) -> Host {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let user = account.as_ref().map(|account| account.name.clone());
        let home = std::env::var_os("HOME").map(PathBuf::from).or(account.as_ref().map(|a| a.home.clone()));
        Host {
            uid,
            gid,
            user: user.or_else(|| variable("USER")).unwrap_or_else(|| format!("user{uid}")),
            group,
            mapped_groups,
            home: home.filter(|home| home.is_absolute() && home.is_dir()),
            shell: variable("SHELL").map(PathBuf::from).or(account.map(|account| account.shell)),
            cwd: std::env::current_dir().ok(),
            environment: std::env::vars_os().collect(),
            time_zone: time_zone(Path::new("/etc/localtime")),
            devices: present_devices(Path::new("/dev")),
            tmpfs_has_xattrs: tmpfs_has_xattrs(),
        }
    }

    /// slurm.conf of the Slurm that has started us, if it can be read.
    pub fn slurm_conf(&self) -> Option<SlurmConf> {
        let named = self.environment.iter().find(|(name, _)| name == "SLURM_CONF");
        SlurmConf::read(named.map(|(_, value)| Path::new(value)))
    }
}

#[cfg(test)]
impl Host {
    /// A host without anything in particular.
    pub fn for_tests() -> Host {
        Host {
            uid: 2001,
            gid: 2001,
            user: "alice".to_owned(),
            group: None,
            mapped_groups: Vec::new(),
            home: None,
            shell: None,
            cwd: None,
            environment: Vec::new(),
            time_zone: None,
            devices: Vec::new(),
            tmpfs_has_xattrs: true,
        }
    }
}

struct Account {
    name: String,
    home: PathBuf,
    shell: PathBuf,
}

fn account_in_file(file: &Path, uid: u32) -> Option<Account> {
    let text = std::fs::read_to_string(file).ok()?;
    text.lines().map(|line| line.split(':').collect::<Vec<_>>()).find_map(|fields| match fields.as_slice() {
        [name, _, id, _, _, home, shell] if id.parse() == Ok(uid) => {
            Some(Account { name: (*name).to_owned(), home: home.into(), shell: shell.into() })
        }
        _ => None,
    })
}

fn group_in_file(file: &Path, gid: u32) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    text.lines().map(|line| line.split(':').collect::<Vec<_>>()).find_map(|fields| match fields.as_slice() {
        [name, _, id, _] if id.parse() == Ok(gid) => Some((*name).to_owned()),
        _ => None,
    })
}

/// `Europe/Berlin` of a link to `/usr/share/zoneinfo/Europe/Berlin`.
fn time_zone(localtime: &Path) -> Option<String> {
    let link = std::fs::read_link(localtime).ok()?;
    Some(link.to_str()?.split_once("/zoneinfo/")?.1.to_owned())
}

/// Tried on a memfd, which is a file on a tmpfs.
fn tmpfs_has_xattrs() -> bool {
    memfd_create(c"mizzen", MFdFlags::MFD_CLOEXEC)
        .is_ok_and(|file| fsetxattr(&file, "user.mizzen.probe", b"", XattrFlags::empty()).is_ok())
}

fn present_devices(dev: &Path) -> Vec<PathBuf> {
    let usable = |path: &PathBuf| {
        path.symlink_metadata().is_ok_and(|found| {
            let kind = found.file_type();
            kind.is_char_device() || kind.is_block_device() || kind.is_dir()
        })
    };
    let listed = std::fs::read_dir(dev).into_iter().flatten().flatten();
    let mut present: Vec<_> = listed.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    present.sort();
    let matches = |name: &str, pattern: &str| match pattern.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix),
        None => name == pattern,
    };
    let patterns = COMMON_DEVICES.iter().chain(&FURTHER_DEVICES);
    let found = patterns.flat_map(|pattern| present.iter().filter(|name| matches(name, pattern)));
    let devices: Vec<PathBuf> = found.map(|name| dev.join(name)).filter(usable).collect();
    devices
}
