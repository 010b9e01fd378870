//! Whose name and password a registry gets: those on the command line, then the files that Docker, podman and enroot keep.
//!
//! The order is that of podman, with enroot's file behind: --authfile, REGISTRY_AUTH_FILE, containers/auth.json in the user's
//! runtime and configuration directories, ~/.docker/config.json, enroot/.credentials. What is wrong with a file that nobody has
//! named is told, and not a reason to fail: most images are for everybody.
//!
//! Run by: the user, in the importer.

pub mod auth_file;
mod helper;
pub mod netrc;
#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};

use mizzen::small_file::read_small;
use mizzen_core::Failure;

use self::auth_file::AuthFile;
use super::environment::Environment;
use super::notes::Notes;
use super::secret::Secret;

/// How long a file of credentials may be.
const LIMIT: usize = 1 << 20;

/// What proves who the user is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credential {
    /// A name and a password, or something like it (`$oauthtoken` and an API key).
    Password {
        /// The name.
        user: String,
        /// The password.
        password: Secret,
    },
    /// What a registry gave in exchange for a password, good for tokens only.
    IdentityToken(Secret),
    /// A token that is good as it is.
    RegistryToken(Secret),
}

/// Where credentials are from that were found in no file.
const COMMAND_LINE: &str = "the command line";

/// A proof, and where it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Login {
    /// The proof.
    pub credential: Credential,
    /// A file, a helper or an option, for messages.
    pub origin: String,
}

impl Login {
    /// Whether it was just typed, and is not kept anywhere.
    pub fn is_given(&self) -> bool {
        self.origin == COMMAND_LINE
    }

    /// Who, for messages.
    pub fn shown(&self) -> String {
        match &self.credential {
            Credential::Password { user, .. } => {
                format!("{}, from {}", mizzen_core::failure::quote(user.as_bytes()), self.origin)
            }
            _ => format!("the token from {}", self.origin),
        }
    }
}

/// For what credentials are sought.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// The registry as references name it.
    pub host: &'a str,
    /// The name in it.
    pub repository: &'a str,
    /// Nobody else's, if told.
    pub user: Option<&'a str>,
}

/// Where credentials are sought.
#[derive(Debug)]
pub struct Credentials {
    /// From the command line, which win.
    pub given: Option<(String, Secret)>,
    /// Of the option, which must be there.
    pub authfile: Option<PathBuf>,
    /// Where the others are.
    pub environment: Environment,
    /// Who is told what is wrong with a file.
    pub notes: Notes,
}

impl Credentials {
    /// The first that fit. `given` are the command line's, and only for the registry that was named there.
    pub fn find(&self, wanted: &Wanted, is_named: bool) -> Result<Option<Login>, Failure> {
        if let (Some((user, password)), true) = (&self.given, is_named) {
            let credential = Credential::Password { user: user.clone(), password: password.clone() };
            return Ok(Some(Login { credential, origin: COMMAND_LINE.to_owned() }));
        }
        for file in self.auth_files() {
            let found = match AuthFile::read(&file.path) {
                Ok(Some(content)) => {
                    content.find(wanted, &self.environment, &self.notes, &file.path.display().to_string())
                }
                Ok(None) if file.required => {
                    return Err(Failure::new(format!("--authfile: {}: no such file", file.path.display())));
                }
                Ok(None) => None,
                Err(failure) if file.required => return Err(failure.about("--authfile")),
                Err(failure) => {
                    self.notes.tell_once(&format!("{failure}; going on without it"));
                    None
                }
            };
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(self.enroot_login(wanted))
    }

    /// The files of Docker's form, in their order.
    pub fn auth_files(&self) -> Vec<AuthFilePlace> {
        let env = &self.environment;
        let place = |path: Option<PathBuf>| path.map(|path| AuthFilePlace { path, required: false });
        let docker = env.path("DOCKER_CONFIG").or_else(|| Some(env.home()?.join(".docker")));
        let option = self.authfile.clone().map(|path| AuthFilePlace { path, required: true });
        [
            option,
            place(env.path("REGISTRY_AUTH_FILE")),
            place(env.path("XDG_RUNTIME_DIR").map(|dir| dir.join("containers/auth.json"))),
            place(env.config_home().map(|dir| dir.join("containers/auth.json"))),
            place(docker.map(|dir| dir.join("config.json"))),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    fn enroot_login(&self, wanted: &Wanted) -> Option<Login> {
        let directory = self.environment.path("ENROOT_CONFIG_PATH");
        let directory = directory.or_else(|| Some(self.environment.config_home()?.join("enroot")))?;
        let path = directory.join(".credentials");
        let text = match read_text(&path) {
            Ok(text) => text?,
            Err(failure) => {
                self.notes.tell_once(&format!("{failure}; going on without it"));
                return None;
            }
        };
        let credential = netrc::find(&text, wanted, &self.environment)?;
        Some(Login { credential, origin: path.display().to_string() })
    }
}

/// A file of Docker's form.
#[derive(Clone, Debug)]
pub struct AuthFilePlace {
    /// Where it may be.
    pub path: PathBuf,
    /// Whether it must be there.
    pub required: bool,
}

/// The text of a file, if there is one.
pub fn read_text(path: &Path) -> Result<Option<String>, Failure> {
    let failed =
        |error| Failure::caused_by(format!("{}: cannot read the credentials", path.display()), error);
    match read_small(path, LIMIT) {
        Ok(bytes) => String::from_utf8(bytes)
            .map(Some)
            .map_err(|_| failed(io::Error::new(io::ErrorKind::InvalidData, "it is not UTF-8"))),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(failed(error)),
    }
}
