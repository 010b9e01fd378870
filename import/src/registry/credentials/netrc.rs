//! enroot's `.credentials`: lines of netrc's form, `machine HOST login USER password SECRET`.
//!
//! enroot gives the file to curl, which takes the line for the host that it asks: the one that gives tokens. So its users have
//! lines for those hosts. We know which registry these belong to; another registry that names one of them as its own is not
//! given what is not its.
//!
//! Run by: the user, in the importer.

use mizzen_core::reference::DOCKER_HUB;

use super::{Credential, Wanted};
use crate::registry::environment::Environment;
use crate::registry::secret::Secret;

/// Hosts whose lines are for a registry.
const HOSTS: [(&str, &[&str]); 2] = [
    (DOCKER_HUB, &["auth.docker.io", "registry-1.docker.io", "index.docker.io"]),
    ("nvcr.io", &["authn.nvidia.com"]),
];

/// A line for one host.
#[derive(Default)]
struct Entry<'a> {
    machine: &'a str,
    login: &'a str,
    password: &'a str,
}

/// What the file has for a registry.
pub fn find(text: &str, wanted: &Wanted, environment: &Environment) -> Option<Credential> {
    let others =
        HOSTS.iter().find(|(registry, _)| *registry == wanted.host).map_or(&[][..], |(_, hosts)| hosts);
    let without_port = match wanted.host.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => host,
        _ => wanted.host,
    };
    let mut hosts = vec![wanted.host, without_port];
    hosts.extend(others);
    let entries = entries(text);
    // The registry's own line wins over that of the host that gives tokens.
    hosts.iter().find_map(|host| {
        entries.iter().filter(|entry| entry.machine.eq_ignore_ascii_case(host)).find_map(|entry| {
            let (user, password) = (expand(entry.login, environment), expand(entry.password, environment));
            let right = wanted.user.is_none_or(|wanted| wanted == user);
            let whole = !user.is_empty() && !password.is_empty();
            (right && whole).then(|| Credential::Password { user, password: Secret::new(password) })
        })
    })
}

fn entries(text: &str) -> Vec<Entry<'_>> {
    let mut entries: Vec<Entry> = Vec::new();
    let lines = text.lines().map(str::trim).filter(|line| !line.starts_with('#'));
    let mut words = lines.flat_map(str::split_whitespace);
    while let Some(word) = words.next() {
        match word {
            "machine" => {
                entries.push(Entry { machine: words.next().unwrap_or_default(), ..Entry::default() })
            }
            // For any host: nobody's that we know.
            "default" => entries.push(Entry::default()),
            "login" | "password" | "account" => {
                let value = unquoted(words.next().unwrap_or_default());
                match (entries.last_mut(), word) {
                    (Some(entry), "login") => entry.login = value,
                    (Some(entry), "password") => entry.password = value,
                    _ => {}
                }
            }
            _ => {}
        }
    }
    entries
}

fn unquoted(word: &str) -> &str {
    word.strip_prefix('"').and_then(|word| word.strip_suffix('"')).unwrap_or(word)
}

/// enroot puts variables of the environment in. `$oauthtoken` is a user's name on NGC, and what is no variable stays as it is.
fn expand(text: &str, environment: &Environment) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(dollar) = rest.find('$') {
        out.push_str(&rest[..dollar]);
        let after = &rest[dollar + 1..];
        let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
        let (name, length) = match after.strip_prefix('{').and_then(|braced| braced.split_once('}')) {
            Some((name, _)) if name.bytes().all(|byte| is_name(&byte)) => (name, name.len() + 2),
            _ => {
                let length = after.bytes().take_while(is_name).count();
                (&after[..length], length)
            }
        };
        match environment.text(name).filter(|_| name != "oauthtoken") {
            Some(value) => out.push_str(&value),
            None => out.push_str(&rest[dollar..dollar + 1 + length]),
        }
        rest = &after[length..];
    }
    out + rest
}
