//! The name of an image in a registry, as users write it: `docker://[USER@]REGISTRY/NAME[:TAG][@sha256:HEX]`, Docker Hub's
//! short names, `oras://…` for files kept in a registry, and enroot's `[docker://][USER@]REGISTRY#NAME[:TAG]`.

use std::fmt;

use crate::digest::split_pin;
use crate::failure::quote;
use crate::failure::quote_reference;
use crate::{Digest, Failure};

/// Docker Hub, as users call it. Its server has another name, which is the importer's business.
pub const DOCKER_HUB: &str = "docker.io";
/// The tag of a name that has neither tag nor digest.
const DEFAULT_TAG: &str = "latest";
/// Limits of the distribution specification.
const NAME_LIMIT: usize = 255;
const TAG_LIMIT: usize = 128;

/// What is kept under the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Transport {
    /// An image made of layers.
    Docker,
    /// A file that is an image: a SIF, or a squashfs.
    Oras,
}

/// A name in a registry, checked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reference {
    /// What is kept there.
    pub transport: Transport,
    /// Whose credentials are wanted, where there are several.
    pub user: Option<String>,
    /// The registry's host, perhaps with a port; [`DOCKER_HUB`] for Docker Hub.
    pub registry: String,
    /// The name in it.
    pub repository: String,
    /// None only beside a digest.
    pub tag: Option<String>,
    /// The manifest that it must be.
    pub digest: Option<Digest>,
}

/// Whether the value of `--container` names an image in a registry and not a file. A path is never taken for one.
pub fn names_a_registry(value: &[u8]) -> bool {
    let schemes = [b"docker://".as_slice(), b"oras://"];
    schemes.iter().any(|scheme| value.starts_with(scheme))
        || (!value.starts_with(b"/") && !value.starts_with(b".") && enroot_registry(value).is_some())
}

/// The part before the `#` of enroot's form, if that can be a host.
fn enroot_registry(value: &[u8]) -> Option<&str> {
    let (registry, _) = std::str::from_utf8(value).ok()?.split_once('#')?;
    let host = registry.rsplit_once('@').map_or(registry, |(_, host)| host);
    is_host(host).then_some(registry)
}

impl Reference {
    /// Reads a name in any of the forms above.
    pub fn parse(text: &[u8]) -> Result<Reference, Failure> {
        let bad = |problem: &str| Failure::new(format!("{}: {problem}", quote_reference(text)));
        let whole = std::str::from_utf8(text).map_err(|_| bad("not a name in a registry: not UTF-8"))?;
        let (transport, rest) = match whole.split_once("://") {
            Some(("docker", rest)) => (Transport::Docker, rest),
            Some(("oras", rest)) => (Transport::Oras, rest),
            Some(_) => return Err(bad("not docker:// or oras://")),
            None => (Transport::Docker, whole),
        };
        let (rest, digest) = match split_pin(rest.as_bytes()) {
            (name, Some(digest)) => (&rest[..name.len()], Some(digest)),
            (_, None) => (rest, None),
        };
        let (user, rest) = match rest.rsplit_once('@') {
            None => (None, rest),
            Some((_, after)) if after.starts_with("sha") => {
                return Err(bad("the digest is not sha256: and 64 hexadecimal digits"));
            }
            Some((user, _)) if user.contains(':') => {
                return Err(bad("a password in a name").hint(
                    "others can read command lines; run `mizzen login REGISTRY`, and leave the password out",
                ));
            }
            Some((user, rest)) => (Some(user.to_owned()), rest),
        };
        let (registry, name) = split_registry(rest);
        if !is_host(registry) {
            return Err(bad(&format!("\"{}\" is not the name of a registry", quote(registry.as_bytes())))
                .hint("write docker://HOST[:PORT]/NAME:TAG"));
        }
        let (name, tag) = match name.rsplit_once(':') {
            Some((name, tag)) => (name, Some(tag)),
            None => (name, None),
        };
        if let Some(tag) = tag.filter(|tag| !is_tag(tag)) {
            return Err(bad(&format!("\"{}\" is not a tag", quote(tag.as_bytes())))
                .hint("a tag has letters, digits, dots, dashes and underscores, 128 at most"));
        }
        // Hosts are the same in upper-case letters; credentials, settings and rules are found by this name.
        let registry = registry.to_ascii_lowercase();
        let registry = if is_docker_hub(&registry) { DOCKER_HUB.to_owned() } else { registry };
        let repository = match (registry.as_str(), name.contains('/')) {
            (DOCKER_HUB, false) => format!("library/{name}"),
            _ => name.to_owned(),
        };
        if !is_repository(&repository) {
            return Err(bad(&format!("\"{}\" is not the name of an image", quote(name.as_bytes())))
                .hint("names are lower-case letters and digits, with . _ - and / between them"));
        }
        let tag = match (tag, digest) {
            (None, None) => Some(DEFAULT_TAG.to_owned()),
            (tag, _) => tag.map(str::to_owned),
        };
        Ok(Reference { transport, user, registry, repository, tag, digest })
    }

    /// The whole name with the user, for those who look for credentials. [`Reference::parse`] reads it.
    pub fn text_with_user(&self) -> String {
        let text = self.to_string();
        match (&self.user, text.split_once("://")) {
            (Some(user), Some((scheme, rest))) => format!("{scheme}://{user}@{rest}"),
            _ => text,
        }
    }

    /// The same image, and no other under the same tag.
    pub fn pinned(&self, digest: Digest) -> Reference {
        Reference { digest: Some(digest), ..self.clone() }
    }
}

impl fmt::Display for Reference {
    /// The whole name, without the user.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let scheme = match self.transport {
            Transport::Docker => "docker",
            Transport::Oras => "oras",
        };
        // A host without a dot would be taken for a part of a name on Docker Hub.
        let between = if stands_for_registry(&self.registry) { '/' } else { '#' };
        write!(f, "{scheme}://{}{between}{}", self.registry, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        self.digest.iter().try_for_each(|digest| write!(f, "@{digest}"))
    }
}

/// Registry and name. As with Docker, the first part is a registry if it could not be a part of a name on Docker Hub.
fn split_registry(text: &str) -> (&str, &str) {
    if let Some(parts) = text.split_once('#') {
        return parts;
    }
    match text.split_once('/') {
        Some((first, rest)) if stands_for_registry(first) => (first, rest),
        _ => (DOCKER_HUB, text),
    }
}

fn stands_for_registry(first: &str) -> bool {
    first.contains(['.', ':']) || first == "localhost"
}

/// Docker Hub, by any of its names.
pub(crate) fn is_docker_hub(host: &str) -> bool {
    [DOCKER_HUB, "index.docker.io", "registry-1.docker.io"].contains(&host)
}

/// A host name or address, perhaps with a port.
pub(crate) fn is_host(text: &str) -> bool {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port)),
        _ => (text, None),
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-';
    let in_brackets = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let good = match in_brackets {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => {
            let ends = |c: char| c.is_ascii_alphanumeric();
            host.len() <= NAME_LIMIT
                && host.chars().all(plain)
                && host.starts_with(ends)
                && host.ends_with(ends)
        }
    };
    good && port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port > 0))
}

fn is_tag(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    !text.is_empty() && text.len() <= TAG_LIMIT && text.chars().all(plain) && !text.starts_with(['.', '-'])
}

/// Components of lower-case letters and digits with separators between them.
fn is_repository(text: &str) -> bool {
    let letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let component = |part: &str| {
        part.chars().all(|c| letter(c) || "._-".contains(c))
            && part.starts_with(letter)
            && part.ends_with(letter)
    };
    text.len() <= NAME_LIMIT && text.split('/').all(component)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_completed_as_docker_does() {
        let pin = format!("@sha256:{}", "ab".repeat(32));
        for (text, whole) in [
            ("docker://ubuntu", "docker://docker.io/library/ubuntu:latest".to_owned()),
            (
                "docker://tensorflow/tensorflow:2.13.0-gpu",
                "docker://docker.io/tensorflow/tensorflow:2.13.0-gpu".to_owned(),
            ),
            ("docker://index.docker.io/ubuntu", "docker://docker.io/library/ubuntu:latest".to_owned()),
            ("docker://NVCR.io/nvidia/a:B", "docker://nvcr.io/nvidia/a:B".to_owned()),
            ("docker://localhost/a", "docker://localhost/a:latest".to_owned()),
            ("docker://localhost:5000/a/b:c", "docker://localhost:5000/a/b:c".to_owned()),
            ("docker://[::1]:5000/a", "docker://[::1]:5000/a:latest".to_owned()),
            (
                "docker://$oauthtoken@nvcr.io/nvidia/pytorch:24.01-py3",
                "docker://nvcr.io/nvidia/pytorch:24.01-py3".to_owned(),
            ),
            ("nvcr.io#nvidia/pytorch:24.01-py3", "docker://nvcr.io/nvidia/pytorch:24.01-py3".to_owned()),
            ("login1#nvidia/pytorch:1", "docker://login1#nvidia/pytorch:1".to_owned()),
            ("docker://me@nvcr.io#nvidia/pytorch", "docker://nvcr.io/nvidia/pytorch:latest".to_owned()),
            (&format!("docker://ubuntu{pin}"), format!("docker://docker.io/library/ubuntu{pin}")),
            (&format!("docker://ubuntu:22.04{pin}"), format!("docker://docker.io/library/ubuntu:22.04{pin}")),
            ("oras://ghcr.io/me/tool:1.sif", "oras://ghcr.io/me/tool:1.sif".to_owned()),
        ] {
            assert_eq!(Reference::parse(text.as_bytes()).unwrap().to_string(), whole, "{text}");
        }
        let with_user = Reference::parse(b"docker://$oauthtoken@nvcr.io/a/b").unwrap();
        assert_eq!(with_user.user.as_deref(), Some("$oauthtoken"));
        assert_eq!(with_user.text_with_user(), "docker://$oauthtoken@nvcr.io/a/b:latest");
        assert_eq!(Reference::parse(with_user.text_with_user().as_bytes()), Ok(with_user));
    }

    #[test]
    fn what_is_wrong_is_named_without_passwords() {
        for (text, problem) in [
            ("docker://u:secret@host.io/i", "docker://…@host.io/i: a password in a name"),
            ("docker://Ubuntu", "docker://Ubuntu: \"Ubuntu\" is not the name of an image"),
            ("docker://", "docker://: \"\" is not the name of an image"),
            ("docker://a b", "docker://a b: \"a b\" is not the name of an image"),
            ("docker://./b", "\".\" is not the name of a registry"),
            ("docker://-a.io/b", "\"-a.io\" is not the name of a registry"),
            ("docker://a/../b", "docker://a/../b: \"a/../b\" is not the name of an image"),
            ("docker://host.io:99999/a", "\"host.io:99999\" is not the name of a registry"),
            ("docker://ubuntu:", "\"\" is not a tag"),
            ("docker://ubuntu:a/b@sha256:12", "the digest is not sha256: and 64 hexadecimal digits"),
            ("http://host/a", "http://host/a: not docker:// or oras://"),
        ] {
            let failure = Reference::parse(text.as_bytes()).unwrap_err();
            assert!(failure.message.contains(problem), "{text}: {failure}");
        }
    }

    #[test]
    fn paths_are_not_names() {
        for name in ["docker://a", "oras://a/b", "nvcr.io#nvidia/pytorch", "me@nvcr.io#a"] {
            assert!(names_a_registry(name.as_bytes()), "{name}");
        }
        for path in ["/a#b", "./a#b", "a/b#c", "tf.sqsh", "#a", "../docker://x", "a b#c"] {
            assert!(!names_a_registry(path.as_bytes()), "{path}");
        }
    }
}
