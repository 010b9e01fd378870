//! The user namespace of a container: the map of the user's groups, and why there may be none.

use std::fs;

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

/// What to do when the kernel refuses a user namespace.
pub fn hint(errno: i32) -> String {
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
    fn what_the_kernel_has_no_room_for_is_named() {
        let many: Vec<u32> = (0..1000).map(|number| number * 2 + 5000).collect();
        let (map, dropped) = group_map(1, 1, &many);
        assert!(map.len() < 4096 && map.lines().count() <= 340);
        assert_eq!(map.lines().count() - 1 + dropped.len(), 1000);
        let neighbours: Vec<u32> = (5000..6000).collect();
        assert_eq!(group_map(1, 1, &neighbours), ("1 1 1\n5000 5000 1000\n".to_owned(), vec![]));
    }
}
