//! How the image becomes the root directory, and where the changes of a writable one are kept.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::failure::quote;
use mizzen_core::settings::Writable;

use crate::host::Host;

/// The limit where none is asked for.
const DEFAULT_LIMIT: &str = "50%";

/// How the image becomes the root directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Root {
    /// As it is.
    ReadOnly,
    /// Under an overlay.
    Writable(Changes),
    /// That of a named container that runs, once more.
    Shared {
        /// Whether it is only to be seen.
        read_only: bool,
    },
}

/// Where an overlay's changes are kept while the container lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Changes {
    /// In a tmpfs.
    InMemory {
        /// Its `size=`.
        limit: String,
    },
    /// In the directory of a named container.
    Named {
        /// With `upper` and `work` in it.
        directory: PathBuf,
        /// What tells it from every other container; none in a plan that is only shown.
        id: String,
        /// Whether they are only to be seen.
        read_only: bool,
    },
    /// In a new directory below this one, where tmpfs cannot hold them. Nothing but the free space limits them.
    OnDisk {
        /// On the node's disk.
        parent: PathBuf,
    },
}

/// What is known of a named container.
pub struct NamedRoot {
    /// Where its changes are.
    pub directory: PathBuf,
    /// What tells it from others.
    pub id: String,
    /// What the user says; a named container is writable unless they say no.
    pub writable: Option<Writable>,
    /// Whether it runs, and this is to be a second one with its files.
    pub is_shared: bool,
}

/// Decides it. A limit that is asked for holds, or the run is refused.
pub fn decide(writable: &Writable, host: &Host, named: Option<NamedRoot>) -> Result<Root, Failure> {
    if let Some(NamedRoot { directory, id, writable, is_shared }) = named {
        return match writable {
            Some(Writable::UpTo(limit)) => Err(Failure::new(format!(
                "writable up to {limit}: no limit holds for a named container, whose changes are on disk"
            ))
            .hint("leave the size out, or the name")),
            writable => {
                let read_only = writable == Some(Writable::No);
                if is_shared {
                    return Ok(Root::Shared { read_only });
                }
                Ok(Root::Writable(Changes::Named { directory, id, read_only }))
            }
        };
    }
    let limit = match writable {
        Writable::No => return Ok(Root::ReadOnly),
        Writable::Yes => None,
        Writable::UpTo(limit) => Some(limit),
    };
    if host.tmpfs_has_xattrs {
        let limit = limit.map_or(DEFAULT_LIMIT, String::as_str).to_owned();
        return Ok(Root::Writable(Changes::InMemory { limit }));
    }
    let parent = temporary_directory(host);
    match limit {
        None => Ok(Root::Writable(Changes::OnDisk { parent })),
        Some(limit) => Err(Failure::new(format!(
            "writable up to {limit}: this node's kernel cannot keep the changes in memory, and on disk no limit holds"
        ))
        .hint(format!(
            "without a size they are kept below {} (TMPDIR), as far as there is space; Linux 6.6 knows limits",
            quote(parent.as_os_str().as_bytes())
        ))),
    }
}

fn temporary_directory(host: &Host) -> PathBuf {
    let variable = host.environment.iter().find(|(name, _)| name == "TMPDIR");
    let named = variable.map(|(_, value)| Path::new(value)).filter(|path| path.is_absolute());
    named.unwrap_or(Path::new("/var/tmp")).to_owned()
}

impl Root {
    /// What it is, in a few words.
    pub fn text(&self) -> String {
        match self {
            Root::ReadOnly => "read-only".to_owned(),
            Root::Writable(Changes::InMemory { limit }) => format!("writable in memory, up to {limit}"),
            Root::Writable(Changes::Named { directory, read_only, .. }) => {
                let how = if *read_only { "read-only" } else { "writable" };
                format!("{how}, with the changes in {}", quote(directory.as_os_str().as_bytes()))
            }
            Root::Writable(Changes::OnDisk { parent }) => {
                let parent = quote(parent.as_os_str().as_bytes());
                format!("writable on disk, in a new directory below {parent}")
            }
            Root::Shared { read_only: true } => "read-only, that of a container that runs".to_owned(),
            Root::Shared { read_only: false } => "writable, that of a container that runs".to_owned(),
        }
    }

    /// Which option or rule it comes from.
    pub fn why(&self) -> &'static str {
        match self {
            Root::ReadOnly => "default",
            Root::Writable(Changes::InMemory { .. }) => "by option, or mizzen.toml",
            Root::Writable(Changes::Named { .. }) | Root::Shared { .. } => {
                "a named container, whose changes stay"
            }
            Root::Writable(Changes::OnDisk { .. }) => {
                "by option, or mizzen.toml; the kernel's tmpfs has no user xattrs (Linux 6.6 has), so no limit holds"
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decided(limit: Option<&str>, tmpfs_has_xattrs: bool, tmpdir: Option<&str>) -> Result<Root, Failure> {
        let environment = tmpdir.map(|value| ("TMPDIR".into(), value.into())).into_iter().collect();
        let host = Host { tmpfs_has_xattrs, environment, ..Host::for_tests() };
        let writable = limit.map_or(Writable::Yes, |limit| Writable::UpTo(limit.to_owned()));
        decide(&writable, &host, None)
    }

    #[test]
    fn changes_are_kept_where_the_limit_holds() {
        let memory = |limit: &str| Ok(Root::Writable(Changes::InMemory { limit: limit.to_owned() }));
        let disk = |parent: &str| Ok(Root::Writable(Changes::OnDisk { parent: parent.into() }));
        assert_eq!(decide(&Writable::No, &Host::for_tests(), None), Ok(Root::ReadOnly));
        assert_eq!(decided(None, true, Some("/scratch")), memory("50%"));
        assert_eq!(decided(Some("1g"), true, None), memory("1g"));
        assert_eq!(decided(None, false, None), disk("/var/tmp"));
        assert_eq!(decided(None, false, Some("/scratch")), disk("/scratch"));
        assert_eq!(decided(None, false, Some("relative")), disk("/var/tmp"));
        let decide_named = |writable, is_shared| {
            let named = NamedRoot { directory: "/c/x".into(), id: "7".to_owned(), writable, is_shared };
            decide(&Writable::No, &Host::for_tests(), Some(named))
        };
        let named = |writable| decide_named(writable, false);
        assert_eq!(decide_named(None, true), Ok(Root::Shared { read_only: false }));
        assert_eq!(decide_named(Some(Writable::No), true), Ok(Root::Shared { read_only: true }));
        let kept = |read_only| {
            Ok(Root::Writable(Changes::Named { directory: "/c/x".into(), id: "7".to_owned(), read_only }))
        };
        assert_eq!(named(None), kept(false));
        assert_eq!(named(Some(Writable::Yes)), kept(false));
        assert_eq!(named(Some(Writable::No)), kept(true));
        assert!(
            named(Some(Writable::UpTo("1g".to_owned())))
                .unwrap_err()
                .message
                .starts_with("writable up to 1g: no")
        );
        let refused = decided(Some("50%"), false, Some("/scratch")).unwrap_err();
        assert!(refused.message.starts_with("writable up to 50%: "), "{refused}");
        assert!(refused.hint.unwrap().contains("below /scratch"));
    }
}
