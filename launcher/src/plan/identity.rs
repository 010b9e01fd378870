//! Who the program is, inside and outside.

use crate::host::Host;

/// The user and the groups that the container's user namespace knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// On the host.
    pub uid: u32,
    /// On the host.
    pub gid: u32,
    /// Inside: the same, or 0.
    pub inside_uid: u32,
    /// Inside: the same, or 0.
    pub inside_gid: u32,
    /// The other groups that are known inside, by number and name: none where the user namespace maps one alone.
    pub groups: Vec<(u32, String)>,
}

impl Identity {
    /// The user's own identity, or root's name for it.
    pub fn new(host: &Host, remap_root: bool) -> Identity {
        let (inside_uid, inside_gid) = if remap_root { (0, 0) } else { (host.uid, host.gid) };
        Identity { uid: host.uid, gid: host.gid, inside_uid, inside_gid, groups: host.mapped_groups.clone() }
    }
}

/// The image's passwd file with a line for the user, if it lacks one, so that `whoami` works without a directory
/// service. None: nothing to add.
pub fn passwd_with_user(image: &[u8], identity: &Identity, host: &Host) -> Option<Vec<u8>> {
    let (uid, gid) = (identity.inside_uid, identity.inside_gid);
    let names = names_of(image, uid);
    // Root is root in every image.
    if uid == 0 && !names.is_empty() || names.first() == Some(&host.user.as_bytes()) {
        return None;
    }
    // An account of the image that happens to have the user's number would be taken for the user's name.
    let others = image
        .split_inclusive(|byte| *byte == b'\n')
        .filter(|line| !names.iter().any(|name| is_line_of(line, name)));
    let image = &others.flatten().copied().collect::<Vec<u8>>()[..];
    let home = host.home.as_deref().map_or("/".into(), |home| home.display().to_string());
    let shell = host.shell.as_deref().map_or("/bin/sh".into(), |shell| shell.display().to_string());
    Some(with_line(image, &format!("{}:x:{uid}:{gid}::{home}:{shell}", host.user)))
}

/// The same for the group file and all groups that are known inside.
pub fn group_with_users(image: &[u8], identity: &Identity, host: &Host) -> Option<Vec<u8>> {
    let primary = host.group.clone().unwrap_or_else(|| host.user.clone());
    let groups = [(identity.inside_gid, primary)].into_iter().chain(identity.groups.iter().cloned());
    let missing: Vec<(u32, String)> =
        groups.filter(|(gid, name)| !name.is_empty() && names_of(image, *gid).is_empty()).collect();
    if missing.is_empty() {
        return None;
    }
    let lines = missing.iter().map(|(gid, name)| format!("{name}:x:{gid}:"));
    Some(lines.fold(image.to_vec(), |file, line| with_line(&file, &line)))
}

/// The first fields of the lines whose third field is this number.
fn names_of(file: &[u8], id: u32) -> Vec<&[u8]> {
    let id = id.to_string();
    let lines = file.split(|byte| *byte == b'\n');
    let fields = lines.map(|line| line.split(|byte| *byte == b':').collect::<Vec<_>>());
    fields.filter(|fields| fields.get(2) == Some(&id.as_bytes())).map(|fields| fields[0]).collect()
}

fn is_line_of(line: &[u8], name: &[u8]) -> bool {
    line.split(|byte| *byte == b':').next() == Some(name)
}

fn with_line(file: &[u8], line: &str) -> Vec<u8> {
    let mut content = file.to_vec();
    if !content.is_empty() && !content.ends_with(b"\n") {
        content.push(b'\n');
    }
    content.extend(line.replace(['\n', '\0'], "?").bytes());
    content.push(b'\n');
    content
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_gets_a_line_unless_the_image_has_one() {
        let host = Host { gid: 2100, home: Some("/home/alice".into()), ..Host::for_tests() };
        let identity = Identity::new(&host, false);
        let image = b"root:x:0:0:root:/root:/bin/sh";
        let made = passwd_with_user(image, &identity, &host).unwrap();
        assert_eq!(made, b"root:x:0:0:root:/root:/bin/sh\nalice:x:2001:2100::/home/alice:/bin/sh\n");
        assert_eq!(passwd_with_user(&made, &identity, &host), None);
        assert_eq!(passwd_with_user(image, &Identity::new(&host, true), &host), None);
        let same_number = b"ubuntu:x:2001:1::/:/bin/sh\nroot:x:0:0::/root:/bin/sh\n";
        let made = passwd_with_user(same_number, &identity, &host).unwrap();
        assert_eq!(made, b"root:x:0:0::/root:/bin/sh\nalice:x:2001:2100::/home/alice:/bin/sh\n");
        assert_eq!(group_with_users(b"", &identity, &host).unwrap(), b"alice:x:2100:\n");
        let research = vec![(2200, "research".to_owned()), (4, "adm".to_owned()), (2300, String::new())];
        let identity = Identity { groups: research, ..identity };
        let image = b"adm:x:4:\n";
        let made = group_with_users(image, &identity, &host).unwrap();
        assert_eq!(made, b"adm:x:4:\nalice:x:2100:\nresearch:x:2200:\n");
    }
}
