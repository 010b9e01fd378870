//! `[policy]` of mizzen.toml: which images may be used. The client asks it for the message, before anything is fetched or waits
//! in a queue; the launcher asks it on the node, about the file that it has opened.

use std::fmt::{self, Display};
use std::fs::{File, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;
use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};

use crate::config::BadValue;
use crate::failure::quote;
use crate::fs_server::{FsServer, refuse_foreign};
use crate::pattern::matches_path;
use crate::registries::check_host;
use crate::{Digest, Failure, Reference, accounts, image};

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
    pub(crate) fn check(&self) -> Result<(), BadValue> {
        let bad = |list: &str, failure: Failure| {
            BadValue::new(format!("policy.{list}"), failure.about(list).about("policy"))
        };
        for host in self.registries.iter().flatten() {
            check_host(host).map_err(|failure| bad("registries", failure))?;
        }
        for pattern in self.repositories.iter().flatten() {
            let host = pattern.split_once('/').filter(|(_, name)| !name.is_empty()).map(|(host, _)| host);
            if host.is_none_or(|host| !host.contains(['*', '[']) && check_host(host).is_err()) {
                let shown = quote(pattern.as_bytes());
                let failure = Failure::new(format!("\"{shown}\" does not begin with a registry"))
                    .hint("write HOST/NAME: docker.io/library/*, nvcr.io/nvidia/**");
                return Err(bad("repositories", failure));
            }
        }
        match self.folders.iter().flatten().find(|folder| !folder.is_absolute()) {
            Some(folder) => {
                let failure = Failure::new(format!("{folder:?} is not absolute"))
                    .hint("write the whole path, beginning with /");
                Err(bad("folders", failure))
            }
            None => Ok(()),
        }
    }

    /// The rules for where images come from, without those for what may be run.
    pub fn of_registries(&self) -> ImagePolicy {
        let ImagePolicy { registries, repositories, .. } = self.clone();
        ImagePolicy { registries, repositories, ..ImagePolicy::default() }
    }

    /// The rules for the file of an image whose manifest has been checked: the list of digests means that manifest.
    pub fn of_stored_file(&self) -> ImagePolicy {
        ImagePolicy { digests: None, ..self.clone() }
    }

    /// An owner whom /etc/passwd does not name: the rule would hold for nobody.
    pub fn unknown_owner(&self) -> Option<&str> {
        self.owners.iter().flatten().find_map(|owner| match owner {
            Owner::Name(name) if accounts::uid_of(name).is_none() => Some(name.as_str()),
            _ => None,
        })
    }

    /// Whether the rules want anything of files.
    pub fn restricts_files(&self) -> bool {
        self.folders.is_some() || self.owners.is_some()
    }

    /// An image in a registry, by its name.
    pub fn check_reference(&self, reference: &Reference) -> Result<(), Failure> {
        let Reference { registry, repository, .. } = reference;
        if let Some(allowed) = &self.registries
            && !allowed.contains(registry)
        {
            return Err(refused("registries", registry).hint(listed(allowed)));
        }
        let name = format!("{registry}/{repository}");
        match &self.repositories {
            Some(allowed) if !allowed.iter().any(|pattern| matches_path(pattern, &name)) => {
                Err(refused("repositories", &name).hint(listed(allowed)))
            }
            _ => Ok(()),
        }
    }

    /// An image in a registry, by its manifest.
    pub fn check_manifest(&self, reference: &Reference) -> Result<(), Failure> {
        match (&self.digests, reference.digest) {
            (None, _) => Ok(()),
            (Some(_), Some(digest)) => self.check_digest(digest),
            (Some(_), None) => Err(refused("digests", "an image whose digest is not known")),
        }
    }

    /// A digest of a file's content, or of a manifest.
    pub fn check_digest(&self, digest: Digest) -> Result<(), Failure> {
        match &self.digests {
            Some(allowed) if !allowed.contains(&digest) => Err(refused("digests", digest)
                .hint("this site lists the images that may be used; ask its administrators for this one")),
            _ => Ok(()),
        }
    }

    /// Where an image that is not imported yet would be, and whose it would be.
    pub fn check_store(&self, directory: &Path) -> Result<(), Failure> {
        refuse_foreign(directory).map_err(|failure| failure.about("the image store"))?;
        let shown = || format!("the image store, {}", quote(directory.as_os_str().as_bytes()));
        self.check_folder(&resolved(directory), &shown)?;
        self.check_owner(geteuid().as_raw())
    }

    /// An image file or directory that is open, whatever its path means later.
    pub fn check_file(&self, file: &File) -> Result<(), Failure> {
        if !self.restricts_files() && self.digests.is_none() {
            return Ok(());
        }
        let unknown = |error| Failure::caused_by("cannot tell whether this site's policy allows it", error);
        let found = file.metadata().map_err(unknown)?;
        if found.is_dir() && self.digests.is_some() {
            return Err(refused("digests", "directories").hint("use an image file that this site lists"));
        }
        if !self.restricts_files() {
            return Ok(());
        }
        // Its path is text from another mount namespace, which means nothing here.
        let server = FsServer::of(file);
        if server == FsServer::Unknown {
            let what = "a file of another mount namespace";
            let failure = match self.folders {
                Some(_) => refused("folders", what),
                None => refused("owners", what),
            };
            return Err(
                failure.hint("name the file by its path, and not by one of another process (/proc/PID/root)")
            );
        }
        if self.folders.is_some() {
            let path = image::real_path(file).map_err(unknown)?;
            self.check_folder(&path, &|| quote(path.as_os_str().as_bytes()))?;
        }
        // Who serves a file system says whose its files are.
        match server {
            FsServer::User(uid) => self.check_owner(uid),
            FsServer::Root | FsServer::Unknown => {
                self.check_owner(found.uid())?;
                self.check_writers(&found)
            }
        }
    }

    /// An image is its owner's only as long as nobody else can write it. Anybody can make an image of a directory like /tmp,
    /// though it is sticky. What an owner but root opens to their own groups is theirs to decide.
    fn check_writers(&self, found: &Metadata) -> Result<(), Failure> {
        let by_others = if found.uid() == 0 { 0o022 } else { 0o002 };
        if self.owners.is_none() || found.mode() & by_others == 0 {
            return Ok(());
        }
        let what = format!("others who can write it (mode {:04o})", found.mode() & 0o7777);
        Err(refused("owners", what).hint("nobody but its owner may be able to write the image: chmod go-w"))
    }

    fn check_folder(&self, path: &Path, shown: &dyn Fn() -> String) -> Result<(), Failure> {
        let Some(allowed) = &self.folders else { return Ok(()) };
        let holds = |folder: &PathBuf| folder.canonicalize().is_ok_and(|folder| path.starts_with(folder));
        if allowed.iter().any(holds) {
            return Ok(());
        }
        let folders: Vec<String> =
            allowed.iter().map(|folder| quote(folder.as_os_str().as_bytes())).collect();
        Err(refused("folders", shown()).hint(listed(&folders)))
    }

    fn check_owner(&self, uid: u32) -> Result<(), Failure> {
        let Some(allowed) = &self.owners else { return Ok(()) };
        let is_owner = |owner: &Owner| match owner {
            Owner::Uid(number) => *number == uid,
            Owner::Name(name) => accounts::uid_of(name) == Some(uid),
        };
        if allowed.iter().any(is_owner) {
            return Ok(());
        }
        let name =
            accounts::name_of(uid).map_or_else(String::new, |name| format!(", {}", quote(name.as_bytes())));
        let owners: Vec<String> = allowed.iter().map(Owner::to_string).collect();
        Err(refused("owners", format!("its owner, {uid}{name}")).hint(listed(&owners)))
    }
}

impl Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Owner::Name(name) => f.write_str(&quote(name.as_bytes())),
            Owner::Uid(uid) => write!(f, "{uid}"),
        }
    }
}

/// The rule, and what it does not name.
fn refused(rule: &str, what: impl Display) -> Failure {
    Failure::new(format!("{rule} of this site's policy do not include {what}"))
}

/// What a rule names.
fn listed(allowed: &[impl Display]) -> String {
    const SHOWN: usize = 10;
    if allowed.is_empty() {
        return "mizzen.toml allows none".to_owned();
    }
    let names: Vec<String> = allowed.iter().take(SHOWN).map(|name| name.to_string()).collect();
    let more = if allowed.len() > SHOWN { ", …" } else { "" };
    format!("mizzen.toml allows {}{more}", names.join(", "))
}

/// Where a path leads of which the end may not exist yet.
fn resolved(path: &Path) -> PathBuf {
    let found = path.ancestors().find_map(|above| Some((above, above.canonicalize().ok()?)));
    match found {
        Some((above, real)) => real.join(path.strip_prefix(above).unwrap_or(Path::new(""))),
        None => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn reference(text: &str) -> Reference {
        Reference::parse(text.as_bytes()).unwrap()
    }

    fn list(names: &[&str]) -> Option<Vec<String>> {
        Some(names.iter().map(|name| (*name).to_owned()).collect())
    }

    #[test]
    fn names_in_registries_are_checked() {
        let registries =
            ImagePolicy { registries: list(&["nvcr.io", "docker.io"]), ..ImagePolicy::default() };
        let repositories = ImagePolicy {
            repositories: list(&["docker.io/library/*", "nvcr.io/nvidia/**"]),
            ..ImagePolicy::default()
        };
        for (policy, name, message) in [
            (&ImagePolicy::default(), "docker://evil.org/x", None),
            (&registries, "docker://ubuntu", None),
            (&registries, "docker://NVCR.IO/nvidia/x", None),
            (
                &registries,
                "oras://evil.org/x",
                Some("registries of this site's policy do not include evil.org"),
            ),
            (
                &registries,
                "docker://nvcr.io:8443/x",
                Some("registries of this site's policy do not include nvcr.io:8443"),
            ),
            (&repositories, "docker://ubuntu:22.04", None),
            (&repositories, "nvcr.io#nvidia/k8s/dcgm", None),
            (
                &repositories,
                "docker://someone/ubuntu",
                Some("repositories of this site's policy do not include docker.io/someone/ubuntu"),
            ),
        ] {
            let found = policy.check_reference(&reference(name)).err().map(|failure| failure.message);
            assert_eq!(found.as_deref(), message, "{name}");
        }
        let hint = registries.check_reference(&reference("docker://a.io/x")).unwrap_err().hint.unwrap();
        assert_eq!(hint, "mizzen.toml allows nvcr.io, docker.io");
        let nothing = ImagePolicy { registries: list(&[]), ..ImagePolicy::default() };
        let hint = nothing.check_reference(&reference("docker://x")).unwrap_err().hint.unwrap();
        assert_eq!(hint, "mizzen.toml allows none");
    }

    #[test]
    fn digests_are_checked() {
        let good = Digest::new([1; 32]);
        let policy = ImagePolicy { digests: Some(vec![good]), ..ImagePolicy::default() };
        let ubuntu = reference("docker://ubuntu");
        assert_eq!(policy.check_manifest(&ubuntu.pinned(good)), Ok(()));
        let other = policy.check_manifest(&ubuntu.pinned(Digest::new([2; 32]))).unwrap_err();
        assert_eq!(
            other.message,
            format!("digests of this site's policy do not include {}", Digest::new([2; 32]))
        );
        assert!(policy.check_manifest(&ubuntu).is_err());
        let directory = policy.check_file(&File::open("/").unwrap()).unwrap_err();
        assert_eq!(directory.message, "digests of this site's policy do not include directories");
    }

    #[test]
    fn files_are_checked_where_they_really_are() {
        let scratch = std::env::temp_dir().join(format!("mizzen-policy-{}", std::process::id()));
        for folder in ["sw", "swx", "home"] {
            std::fs::create_dir_all(scratch.join(folder)).unwrap();
            std::fs::write(scratch.join(folder).join("a.sqsh"), "x").unwrap();
        }
        let link = |target: &str, name: &str| {
            let _ = std::os::unix::fs::symlink(scratch.join(target), scratch.join(name));
        };
        link("home/a.sqsh", "sw/link.sqsh");
        link("sw/a.sqsh", "home/link.sqsh");
        link("sw", "alias");
        let policy = ImagePolicy {
            folders: Some(vec!["/nonexistent".into(), scratch.join("alias")]),
            ..ImagePolicy::default()
        };
        let check = |name: &str| policy.check_file(&File::open(scratch.join(name)).unwrap());
        for allowed in ["sw/a.sqsh", "home/link.sqsh", "alias/a.sqsh", "home/../sw/a.sqsh", "sw"] {
            assert_eq!(check(allowed), Ok(()), "{allowed}");
        }
        for refused in ["home/a.sqsh", "sw/link.sqsh", "swx/a.sqsh", "sw/../home/a.sqsh", "home"] {
            let failure = check(refused).unwrap_err();
            let real = scratch.join(refused).canonicalize().unwrap();
            let message = format!("folders of this site's policy do not include {}", real.display());
            assert_eq!(failure.message, message);
        }
        assert_eq!(policy.check_store(&scratch.join("sw/new/images")), Ok(()));
        assert!(policy.check_store(&scratch.join("home/new/images")).is_err());
        std::fs::remove_dir_all(scratch).unwrap();
    }

    #[test]
    fn what_others_can_write_is_not_its_owners() {
        let scratch = std::env::temp_dir().join(format!("mizzen-policy-writers-{}", std::process::id()));
        std::fs::create_dir(&scratch).unwrap();
        std::fs::write(scratch.join("file"), "x").unwrap();
        let owner = std::fs::metadata(&scratch).unwrap().uid();
        let owners = ImagePolicy { owners: Some(vec![Owner::Uid(owner)]), ..ImagePolicy::default() };
        let group = owner != 0;
        for (name, mode, allowed) in [
            ("file", 0o644, true),
            ("file", 0o664, group),
            ("file", 0o646, false),
            (".", 0o755, true),
            (".", 0o2775, group),
            (".", 0o1777, false),
        ] {
            let path = scratch.join(name);
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            let checked = owners.check_file(&File::open(&path).unwrap());
            let message = format!(
                "owners of this site's policy do not include others who can write it (mode {mode:04o})"
            );
            let expected = if allowed { None } else { Some(message) };
            assert_eq!(checked.err().map(|failure| failure.message), expected, "{name}");
            let folders = ImagePolicy { folders: Some(vec![scratch.clone()]), ..ImagePolicy::default() };
            assert_eq!(folders.check_file(&File::open(&path).unwrap()), Ok(()));
        }
        std::fs::remove_dir_all(scratch).unwrap();
    }

    #[test]
    fn owners_are_checked() {
        let of = |owners| ImagePolicy { owners: Some(owners), ..ImagePolicy::default() };
        let root = File::open("/").unwrap();
        for good in [Owner::Uid(0), Owner::Name("root".to_owned())] {
            assert_eq!(of(vec![Owner::Uid(7), good]).check_file(&root), Ok(()));
        }
        let failure = of(vec![Owner::Uid(7), Owner::Name("nobody-of-this-name".to_owned())]);
        let failure = failure.check_file(&root).unwrap_err();
        assert_eq!(failure.message, "owners of this site's policy do not include its owner, 0, root");
        assert_eq!(failure.hint.unwrap(), "mizzen.toml allows 7, nobody-of-this-name");
    }
}
