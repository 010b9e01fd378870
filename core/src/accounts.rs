//! Users in /etc/passwd. The launcher and the importer are static programs, which cannot ask other name services; what the plugin
//! learns of those is in `handover::Accounts`.

const PASSWD: &str = "/etc/passwd";

/// The number of a user.
pub fn uid_of(name: &str) -> Option<u32> {
    uid_in(&std::fs::read_to_string(PASSWD).ok()?, name)
}

/// The name of a user.
pub fn name_of(uid: u32) -> Option<String> {
    name_in(&std::fs::read_to_string(PASSWD).ok()?, uid)
}

fn uid_in(passwd: &str, name: &str) -> Option<u32> {
    entries(passwd).find(|(known, _)| *known == name).map(|(_, uid)| uid)
}

fn name_in(passwd: &str, uid: u32) -> Option<String> {
    entries(passwd).find(|(_, known)| *known == uid).map(|(name, _)| name.to_owned())
}

fn entries(passwd: &str) -> impl Iterator<Item = (&str, u32)> {
    passwd.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let (name, _, uid) = (fields.next()?, fields.next()?, fields.next()?);
        Some((name, uid.parse().ok()?)).filter(|(name, _)| !name.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found() {
        let passwd =
            "root:x:0:0:root:/root:/bin/sh\n+::::::\n:x:5:5::/:/\nalice:x:2001:2001::/home/alice:/bin/sh\n";
        assert_eq!(
            (uid_in(passwd, "alice"), uid_in(passwd, "bob"), uid_in(passwd, "")),
            (Some(2001), None, None)
        );
        assert_eq!((name_in(passwd, 0).as_deref(), name_in(passwd, 5)), (Some("root"), None));
    }
}
