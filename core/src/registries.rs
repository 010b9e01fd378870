//! `[registries."HOST[:PORT]"]` of mizzen.toml: how a registry is reached. The importer uses it, as the user.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

use crate::Failure;
use crate::config::{BadValue, key_path};
use crate::failure::quote;
use crate::reference::{DOCKER_HUB, is_docker_hub, is_host};

/// The registries that mizzen.toml tells something about, by host and port as references name them.
pub type Registries = BTreeMap<String, RegistryConfig>;

/// How one registry is reached.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RegistryConfig {
    /// Addresses that are asked first, in this order: `https://HOST[:PORT][/PATH]`.
    pub mirrors: Vec<String>,
    /// Whether the registry itself is spoken to without TLS.
    pub plain_http: bool,
    /// Certificates of authorities that vouch for it, beside those of the machine.
    pub ca_file: Option<PathBuf>,
}

/// What only the values themselves can show.
pub(crate) fn check(registries: &Registries) -> Result<(), BadValue> {
    for (host, registry) in registries {
        let table = format!("registries.\"{}\"", quote(host.as_bytes()));
        check_one(host, registry).map_err(|(key, failure)| match key {
            Some(key) => BadValue::new(format!("{}.{key}", key_of(host)), failure.about(key).about(table)),
            None => BadValue::new(key_of(host), failure.about(table)),
        })?;
    }
    Ok(())
}

/// A registry's table, as its position is kept.
fn key_of(host: &str) -> String {
    key_path("registries", host)
}

/// What is wrong, with the key if it is the value of one.
fn check_one(host: &str, registry: &RegistryConfig) -> Result<(), (Option<&'static str>, Failure)> {
    check_host(host).map_err(|failure| (None, failure))?;
    if let Some(mirror) = registry.mirrors.iter().find(|mirror| !is_address(mirror)) {
        // What stands before an @ may be a password.
        let shown = crate::failure::quote_reference(mirror.as_bytes());
        let failure = Failure::new(format!("\"{shown}\" is not the address of a registry"))
            .hint("write https://HOST[:PORT][/PATH], without a user, a password or a query");
        return Err((Some("mirrors"), failure));
    }
    match &registry.ca_file {
        Some(file) if !file.is_absolute() => {
            let failure = Failure::new(format!("{file:?} is not absolute"))
                .hint("write the whole path, beginning with /");
            Err((Some("ca_file"), failure))
        }
        Some(_) if registry.plain_http => {
            let failure = Failure::new("plain_http and ca_file contradict each other")
                .hint("without TLS there are no certificates; leave one of them out");
            Err((None, failure))
        }
        _ => Ok(()),
    }
}

/// Whether references name a registry in this way.
pub(crate) fn check_host(host: &str) -> Result<(), Failure> {
    let shown = quote(host.as_bytes());
    if !is_host(host) || host.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Err(Failure::new(format!("\"{shown}\" is not the name of a registry"))
            .hint("write HOST or HOST:PORT in lower-case letters, without https://"));
    }
    if host != DOCKER_HUB && is_docker_hub(host) {
        return Err(Failure::new(format!("\"{shown}\" is {DOCKER_HUB} by another name"))
            .hint(format!("write {DOCKER_HUB}")));
    }
    Ok(())
}

/// `http[s]://HOST[:PORT][/PATH]`.
fn is_address(text: &str) -> bool {
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    rest.is_some_and(|rest| match rest.split_once('/') {
        Some((host, path)) => is_host(host) && path.chars().all(plain),
        None => is_host(rest),
    })
}
