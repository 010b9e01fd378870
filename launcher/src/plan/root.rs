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
}

/// Where an overlay's changes are kept while the container lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Changes {
    /// In a tmpfs.
    InMemory {
        /// Its `size=`.
        limit: String,
    },
    /// In a new directory below this one, where tmpfs cannot hold them. Nothing but the free space limits them.
    OnDisk {
        /// On the node's disk.
        parent: PathBuf,
    },
}

/// Decides it. A limit that is asked for holds, or the run is refused.
pub fn decide(writable: &Writable, host: &Host) -> Result<Root, Failure> {
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
            Root::Writable(Changes::OnDisk { parent }) => {
                let parent = quote(parent.as_os_str().as_bytes());
                format!("writable on disk, in a new directory below {parent}")
            }
        }
    }

    /// Which option or rule it comes from.
    pub fn why(&self) -> &'static str {
        match self {
            Root::ReadOnly => "default",
            Root::Writable(Changes::InMemory { .. }) => "by option, or mizzen.toml",
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
        decide(&writable, &host)
    }

    #[test]
    fn changes_are_kept_where_the_limit_holds() {
        let memory = |limit: &str| Ok(Root::Writable(Changes::InMemory { limit: limit.to_owned() }));
        let disk = |parent: &str| Ok(Root::Writable(Changes::OnDisk { parent: parent.into() }));
        assert_eq!(decide(&Writable::No, &Host::for_tests()), Ok(Root::ReadOnly));
        assert_eq!(decided(None, true, Some("/scratch")), memory("50%"));
        assert_eq!(decided(Some("1g"), true, None), memory("1g"));
        assert_eq!(decided(None, false, None), disk("/var/tmp"));
        assert_eq!(decided(None, false, Some("/scratch")), disk("/scratch"));
        assert_eq!(decided(None, false, Some("relative")), disk("/var/tmp"));
        let refused = decided(Some("50%"), false, Some("/scratch")).unwrap_err();
        assert!(refused.message.starts_with("writable up to 50%: "), "{refused}");
        assert!(refused.hint.unwrap().contains("below /scratch"));
    }
}
