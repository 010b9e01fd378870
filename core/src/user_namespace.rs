//! The user namespace of a container: the map of the user's groups, and why there may be none.

use std::{fs, io};

use crate::{Failure, limits};

/// The kernel's limit on the lines of a map, and, below a page, on its bytes.
const LINES: usize = 340;
const BYTES: usize = 4000;

/// The text for gid_map: the primary group, inside under the given number, and the others as they are. Neighbours
/// share a line. Also the groups for which there is no room, or no number.
pub fn group_map(inside_gid: u32, gid: u32, groups: &[u32]) -> (String, Vec<u32>) {
    let mut others: Vec<u32> = groups.iter().copied().filter(|other| *other != gid).collect();
    others.sort_unstable();
    others.dedup();
    let mut dropped: Vec<u32> = others.iter().copied().filter(|other| *other == inside_gid).collect();
    others.retain(|other| *other != inside_gid);
    let mut map = format!("{inside_gid} {gid} 1\n");
    let mut rest = others.as_slice();
    while let Some(first) = rest.first() {
        let length = rest.iter().zip(*first..).take_while(|(other, expected)| **other == *expected).count();
        let line = format!("{first} {first} {length}\n");
        if map.lines().count() < LINES && map.len() + line.len() < BYTES {
            map.push_str(&line);
        } else {
            dropped.extend(&rest[..length]);
        }
        rest = &rest[length..];
    }
    (map, dropped)
}

/// The kinds of namespaces that a container has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Namespace {
    /// In which the user may mount.
    User,
    /// Of mounts.
    Mount,
    /// Of process ids.
    Pid,
    /// Of System V IPC and message queues.
    Ipc,
    /// Of network devices.
    Net,
    /// Of the host's name.
    Uts,
}

impl Namespace {
    /// All of them.
    pub const ALL: [Namespace; 6] =
        [Namespace::User, Namespace::Mount, Namespace::Pid, Namespace::Ipc, Namespace::Net, Namespace::Uts];

    /// What people call it.
    fn name(self) -> &'static str {
        match self {
            Namespace::User => "user",
            Namespace::Mount => "mount",
            Namespace::Pid => "process id",
            Namespace::Ipc => "IPC",
            Namespace::Net => "network",
            Namespace::Uts => "UTS",
        }
    }

    /// The file in /proc/sys/user, and the setting, with the limit on how many a user may have.
    fn sysctl(self) -> &'static str {
        match self {
            Namespace::User => "max_user_namespaces",
            Namespace::Mount => "max_mnt_namespaces",
            Namespace::Pid => "max_pid_namespaces",
            Namespace::Ipc => "max_ipc_namespaces",
            Namespace::Net => "max_net_namespaces",
            Namespace::Uts => "max_uts_namespaces",
        }
    }
}

/// The kernel's limits on namespaces, as they were when it was made. In a user namespace of its own a process sees only
/// those of that one, which say nothing of the limits outside that hold there too.
#[derive(Clone, Debug, Default)]
pub struct NamespaceLimits(Vec<(Namespace, u64)>);

impl NamespaceLimits {
    /// Those that hold here.
    pub fn look() -> NamespaceLimits {
        let limit = |kind: Namespace| Some((kind, sysctl(&format!("user/{}", kind.sysctl()))?.parse().ok()?));
        NamespaceLimits(Namespace::ALL.into_iter().filter_map(limit).collect())
    }

    /// The kernel does not make a namespace.
    pub fn refused(&self, kind: Namespace, errno: i32) -> Failure {
        let article = if kind == Namespace::Ipc { "an" } else { "a" };
        let what = format!("cannot make {article} {} namespace", kind.name());
        Failure::caused_by(what, io::Error::from_raw_os_error(errno)).hint(self.hint(kind, errno))
    }

    /// What to do when it refuses one.
    pub fn hint(&self, kind: Namespace, errno: i32) -> String {
        let (name, key) = (kind.name(), kind.sysctl());
        let limit = self.0.iter().find(|(known, _)| *known == kind).map(|(_, limit)| *limit);
        match (limit, errno) {
            (Some(0), _) => format!("{name} namespaces are off here (sysctl user.{key} = 0)"),
            (Some(limit), libc::ENOSPC) => {
                let nested = if kind == Namespace::User { ", or more than 32 are nested" } else { "" };
                format!("you have as many {name} namespaces as you may (sysctl user.{key} = {limit}){nested}")
            }
            (None, libc::ENOSPC) => format!("the limit is reached (sysctl user.{key})"),
            (_, libc::EPERM | libc::EACCES) => policy(),
            _ => limits::hint(errno).unwrap_or_else(|| "`mizzen doctor` tells what is missing".to_owned()),
        }
    }
}

/// Who forbids namespaces to users.
fn policy() -> String {
    if sysctl("kernel/unprivileged_userns_clone").as_deref() == Some("0") {
        return "user namespaces are for root only here (sysctl kernel.unprivileged_userns_clone = 0)"
            .to_owned();
    }
    if sysctl("kernel/apparmor_restrict_unprivileged_userns").as_deref() == Some("1") {
        return "AppArmor restricts them (sysctl kernel.apparmor_restrict_unprivileged_userns = 1); \
                mizzen needs a profile with the rule `userns,`"
            .to_owned();
    }
    "in a chroot, or under a security policy, the kernel refuses them".to_owned()
}

fn sysctl(name: &str) -> Option<String> {
    fs::read_to_string(format!("/proc/sys/{name}")).ok().map(|text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_share_a_line_and_the_primary_group_is_first() {
        let (map, dropped) = group_map(2001, 2001, &[2100, 2001, 2101, 4, 2100]);
        assert_eq!((map.as_str(), dropped), ("2001 2001 1\n4 4 1\n2100 2100 2\n", vec![]));
        let (map, dropped) = group_map(0, 2001, &[2001, 0, 7]);
        assert_eq!(
            (map.as_str(), dropped),
            ("0 2001 1\n7 7 1\n", vec![0]),
            "0 means the primary group inside"
        );
    }

    #[test]
    fn the_limit_that_was_met_is_named() {
        let limits =
            NamespaceLimits(vec![(Namespace::User, 100), (Namespace::Mount, 0), (Namespace::Net, 7)]);
        let hint = |kind, errno| limits.hint(kind, errno);
        assert_eq!(
            hint(Namespace::User, libc::ENOSPC),
            "you have as many user namespaces as you may (sysctl user.max_user_namespaces = 100), or more than 32 are nested"
        );
        assert_eq!(
            hint(Namespace::Mount, libc::ENOSPC),
            "mount namespaces are off here (sysctl user.max_mnt_namespaces = 0)"
        );
        assert_eq!(
            hint(Namespace::Net, libc::ENOSPC),
            "you have as many network namespaces as you may (sysctl user.max_net_namespaces = 7)"
        );
        assert_eq!(
            hint(Namespace::Pid, libc::ENOSPC),
            "the limit is reached (sysctl user.max_pid_namespaces)"
        );
    }

    #[test]
    fn what_the_kernel_has_no_room_for_is_named() {
        let many: Vec<u32> = (0..1000).map(|number| number * 2 + 5000).collect();
        let (map, dropped) = group_map(1, 1, &many);
        assert!(map.len() < 4096 && map.lines().count() <= 340);
        assert_eq!(map.lines().count() - 1 + dropped.len(), 1000);
        let neighbours: Vec<u32> = (5000..6000).collect();
        assert_eq!(group_map(1, 1, &neighbours), ("1 1 1\n5000 5000 1000\n".to_owned(), vec![]));
    }
}
