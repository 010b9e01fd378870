//! Docker's config.json and podman's auth.json, which have one form: `auths`, `credHelpers` and `credsStore`.
//!
//! Run by: the user, in the importer.

use std::collections::BTreeMap;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mizzen_core::Failure;
use mizzen_core::reference::DOCKER_HUB;
use serde::{Deserialize, Deserializer};

use super::{Credential, Login, Wanted, helper, read_text};
use crate::registry::environment::Environment;
use crate::registry::notes::Notes;
use crate::registry::secret::Secret;

/// The name that Docker's own files have for Docker Hub.
pub const DOCKER_HUB_KEY: &str = "https://index.docker.io/v1/";

/// What counts in a file.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AuthFile {
    #[serde(deserialize_with = "or_default")]
    auths: BTreeMap<String, Entry>,
    /// The helper for all registries.
    #[serde(deserialize_with = "or_default")]
    pub creds_store: String,
    #[serde(deserialize_with = "or_default")]
    cred_helpers: BTreeMap<String, String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Entry {
    #[serde(deserialize_with = "or_default")]
    auth: String,
    #[serde(deserialize_with = "or_default")]
    username: String,
    #[serde(deserialize_with = "or_default")]
    password: String,
    #[serde(deserialize_with = "or_default")]
    identitytoken: String,
    #[serde(deserialize_with = "or_default")]
    registrytoken: String,
}

fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

impl AuthFile {
    /// Reads a file, if there is one.
    pub fn read(path: &Path) -> Result<Option<AuthFile>, Failure> {
        match read_text(path)? {
            Some(text) => AuthFile::parse(&text).map(Some).map_err(|failure| failure.about(path.display())),
            None => Ok(None),
        }
    }

    /// Reads its text. What is wrong is told by its place: the text has passwords.
    pub fn parse(text: &str) -> Result<AuthFile, Failure> {
        if text.trim().is_empty() {
            return Ok(AuthFile::default());
        }
        serde_json::from_str(text).map_err(|error| {
            Failure::new(format!(
                "not a file of credentials: line {}, column {}",
                error.line(),
                error.column()
            ))
        })
    }

    /// What it has for a registry: the closest name first, and for that its helper, its entry, the helper for all.
    pub fn find(
        &self,
        wanted: &Wanted,
        environment: &Environment,
        notes: &Notes,
        origin: &str,
    ) -> Option<Login> {
        let right = |login: &Login| match (&login.credential, wanted.user) {
            (Credential::Password { user, .. }, Some(wanted)) => user == wanted,
            _ => true,
        };
        let ask = |name: &str, key: &str| {
            let key = if wanted.host == DOCKER_HUB { DOCKER_HUB_KEY } else { key };
            match helper::ask(name, key, environment) {
                Ok(found) => found.map(|credential| Login {
                    credential,
                    origin: format!("docker-credential-{name} ({origin})"),
                }),
                Err(failure) => {
                    notes.tell_once(&format!("{origin}: {failure}; going on without it"));
                    None
                }
            }
        };
        for name in names(wanted.host, wanted.repository) {
            let helper = self.cred_helpers.iter().find(|(key, _)| is_key_of(key, &name));
            if let Some(login) = helper.and_then(|(_, helper)| ask(helper, &name)).filter(right) {
                return Some(login);
            }
            let entries = self.auths.iter().filter(|(key, _)| is_key_of(key, &name));
            let mut logins = entries.filter_map(|(_, entry)| {
                Some(Login { credential: entry.credential()?, origin: origin.to_owned() })
            });
            if let Some(login) = logins.find(right) {
                return Some(login);
            }
        }
        if self.creds_store.is_empty() { None } else { ask(&self.creds_store, wanted.host).filter(right) }
    }

    /// Leaves what stands in the file itself.
    pub fn forget_helpers(&mut self) {
        self.cred_helpers.clear();
        self.creds_store.clear();
    }

    /// The helper that is asked for a registry, whatever stands in `auths`.
    pub fn helper_for(&self, host: &str) -> Option<&str> {
        let found = self.cred_helpers.iter().find(|(key, _)| is_key_of(key, host));
        found.map(|(_, helper)| helper.as_str())
    }

    /// The keys of `auths` that mean this registry as a whole.
    pub fn keys_of(&self, host: &str) -> Vec<String> {
        self.auths.keys().filter(|key| is_key_of(key, host)).cloned().collect()
    }
}

impl Entry {
    /// None if it is empty, as those are whose passwords a helper keeps.
    fn credential(&self) -> Option<Credential> {
        if !self.registrytoken.is_empty() {
            return Some(Credential::RegistryToken(Secret::new(&*self.registrytoken)));
        }
        if !self.identitytoken.is_empty() {
            return Some(Credential::IdentityToken(Secret::new(&*self.identitytoken)));
        }
        let (user, password) = if self.auth.is_empty() {
            (self.username.clone(), self.password.clone())
        } else {
            let bytes = STANDARD.decode(self.auth.trim()).ok()?;
            let text = String::from_utf8(bytes).ok()?;
            let (user, password) = text.split_once(':')?;
            // Old Dockers fill it up with zeros.
            (user.to_owned(), password.trim_end_matches('\0').to_owned())
        };
        let whole = !user.is_empty() && !password.is_empty();
        whole.then(|| Credential::Password { user, password: Secret::new(password) })
    }
}

/// The names under which a repository's credentials may stand, the closest first.
fn names(host: &str, repository: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut rest = repository;
    while !rest.is_empty() {
        names.push(format!("{host}/{rest}"));
        rest = rest.rfind('/').map_or("", |slash| &rest[..slash]);
    }
    names.push(host.to_owned());
    names
}

/// Whether a key in a file means this name. Old keys are addresses: `https://HOST/v1/`.
fn is_key_of(key: &str, name: &str) -> bool {
    let key = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let key = key.trim_end_matches('/');
    let key = key.strip_suffix("/v1").or_else(|| key.strip_suffix("/v2")).unwrap_or(key);
    let (host, path) = key.split_once('/').map_or((key, None), |(host, path)| (host, Some(path)));
    let host = match host {
        "index.docker.io" | "registry-1.docker.io" => DOCKER_HUB,
        other => other,
    };
    let (name_host, name_path) = name.split_once('/').map_or((name, None), |(host, path)| (host, Some(path)));
    host.eq_ignore_ascii_case(name_host) && path == name_path
}
