//! `[policy]` of mizzen.toml: which images may be used. The client asks it for the message, before anything is fetched or waits
//! in a queue; the launcher asks it on the node, about the file that it has opened.

use std::fmt;
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};

use crate::failure::quote;
use crate::registries::check_host;
use crate::{Digest, Failure};

/// The rules. What a list does not name is refused; a list that is not there allows everything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ImagePolicy {
    /// Hosts of registries.
    pub registries: Option<Vec<String>>,
    /// Patterns of repositories with their registry: `nvcr.io/nvidia/*`, `docker.io/library/**`.
    pub repositories: Option<Vec<String>>,
    /// Folders below which image files and directories must be.
    pub folders: Option<Vec<PathBuf>>,
    /// Users to whom image files and directories must belong.
    pub owners: Option<Vec<Owner>>,
    /// Digests of image files, and of manifests in registries.
    pub digests: Option<Vec<Digest>>,
}

/// A user, as an administrator writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A name in /etc/passwd. The launcher is a static program and cannot ask other name services.
    Name(String),
    /// A number.
    Uid(u32),
}

impl<'de> Deserialize<'de> for Owner {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Owner, D::Error> {
        struct OwnerVisitor;

        impl Visitor<'_> for OwnerVisitor {
            type Value = Owner;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a user's name or number")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<Owner, E> {
                Ok(Owner::Name(name.to_owned()))
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Owner, E> {
                let bad = |_| E::invalid_value(de::Unexpected::Signed(number), &self);
                u32::try_from(number).map(Owner::Uid).map_err(bad)
            }
        }

        deserializer.deserialize_any(OwnerVisitor)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Digest, D::Error> {
        let text = String::deserialize(deserializer)?;
        Digest::parse(&text).ok_or_else(|| {
            let shown = quote(text.as_bytes());
            de::Error::custom(format_args!("\"{shown}\" is not sha256: and 64 hexadecimal digits"))
        })
    }
}

impl ImagePolicy {
    /// What only the values themselves can show.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        for host in self.registries.iter().flatten() {
            check_host(host).map_err(|failure| failure.about("registries"))?;
        }
        for pattern in self.repositories.iter().flatten() {
            let host = pattern.split_once('/').filter(|(_, name)| !name.is_empty()).map(|(host, _)| host);
            if host.is_none_or(|host| !host.contains(['*', '[']) && check_host(host).is_err()) {
                let shown = quote(pattern.as_bytes());
                return Err(Failure::new(format!(
                    "repositories: \"{shown}\" does not begin with a registry"
                ))
                .hint("write HOST/NAME: docker.io/library/*, nvcr.io/nvidia/**"));
            }
        }
        match self.folders.iter().flatten().find(|folder| !folder.is_absolute()) {
            Some(folder) => Err(Failure::new(format!("folders: {folder:?} is not absolute"))
                .hint("write the whole path, beginning with /")),
            None => Ok(()),
        }
    }
}
