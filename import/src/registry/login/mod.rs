//! `mizzen login` and `mizzen logout`: credentials in the files that Docker and podman keep, so that all tools share them.
//!
//! A login is tried before it is kept. It goes into the file that the user has named (--authfile, REGISTRY_AUTH_FILE), else
//! into ~/.docker/config.json if there is one that keeps passwords itself, else into ~/.config/containers/auth.json.
//!
//! Run by: the user, in the importer.

mod prompt;
mod store;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use mizzen_core::failure::quote;
use mizzen_core::reference::DOCKER_HUB;
use mizzen_core::{Failure, Reference};

pub use self::prompt::password_from_stdin;
use super::client::{Client, ClientOptions};
use super::credentials::auth_file::{AuthFile, DOCKER_HUB_KEY};
use super::credentials::{Credentials, Wanted};
use super::notes::Notes;
use super::secret::Secret;

/// Where a password comes from.
#[derive(Debug)]
pub enum PasswordSource {
    /// Standard input (--password-stdin).
    Stdin,
    /// Somebody types it.
    Terminal,
    /// Known already.
    Given(Secret),
}

/// Tries a login and keeps it. Returns what to tell the user.
pub fn login(
    options: ClientOptions,
    registry: &str,
    user: Option<&str>,
    password: PasswordSource,
) -> Result<String, Failure> {
    let host = registry_host(registry)?;
    let credentials = credentials_of(&options);
    let file = file_for_login(&credentials)?;
    check_helper(&file, &host)?;
    let user = match (user, &password) {
        (Some(user), _) => user.to_owned(),
        (None, PasswordSource::Terminal) => prompt::user(&host)?,
        (None, _) => return Err(Failure::new(format!("{host}: whose password is it?")).hint("add -u USER")),
    };
    if user.is_empty() || user.contains(':') {
        return Err(Failure::new(format!("\"{}\" cannot be a user's name", quote(user.as_bytes()))));
    }
    let password = match password {
        PasswordSource::Stdin => password_from_stdin()?,
        PasswordSource::Terminal => prompt::password(&host, &user)?,
        PasswordSource::Given(password) => password,
    };
    if password.expose().is_empty() {
        return Err(Failure::new(format!("{host}: the password is empty")));
    }
    let notes = options.notes.clone();
    let client = Client::new(ClientOptions { login: Some((user.clone(), password.clone())), ..options });
    client.check_login(&host)?;
    store::add(&file, key_in(&file, &host), &host, &user, &password)?;
    warn_of_others(&credentials, &host, &file, &notes);
    Ok(format!("logged in to {host} as {}; kept in {}\n", quote(user.as_bytes()), file.display()))
}

/// Forgets the logins to a registry, in all files where they may be. Returns what to tell the user.
pub fn logout(options: &ClientOptions, registry: &str) -> Result<String, Failure> {
    let host = registry_host(registry)?;
    let credentials = credentials_of(options);
    let mut text = String::new();
    for place in credentials.auth_files() {
        let Some(content) = AuthFile::read(&place.path)? else { continue };
        let keys = content.keys_of(&host);
        if !keys.is_empty() {
            store::remove(&place.path, &keys)?;
            text.push_str(&format!("removed the login to {host} from {}\n", place.path.display()));
        }
    }
    let wanted = Wanted { host: &host, repository: "", user: None };
    let left = credentials.find(&wanted, false)?;
    match left {
        Some(login) => Err(Failure::new(format!("{host}: there is still a login: {}", login.shown()))
            .hint("what another program keeps, only that can remove")),
        None if text.is_empty() => Err(Failure::new(format!("{host}: there is no login"))),
        None => Ok(text),
    }
}

fn credentials_of(options: &ClientOptions) -> Credentials {
    Credentials {
        given: None,
        authfile: options.authfile.clone(),
        environment: options.environment.clone(),
        notes: options.notes.clone(),
    }
}

/// `HOST[:PORT]`, as references name it. Docker's users also write addresses.
fn registry_host(text: &str) -> Result<String, Failure> {
    let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://")).unwrap_or(text);
    let host = host.strip_prefix("docker://").unwrap_or(host).trim_end_matches('/');
    let host = host.strip_suffix("/v1").or_else(|| host.strip_suffix("/v2")).unwrap_or(host);
    match Reference::parse(format!("docker://{host}#x").as_bytes()) {
        Ok(reference) if !host.contains(['@', '#', '/']) => Ok(reference.registry),
        _ => Err(Failure::new(format!("\"{}\" is not the name of a registry", quote(text.as_bytes())))
            .hint("write HOST or HOST:PORT, for example nvcr.io")),
    }
}

fn file_for_login(credentials: &Credentials) -> Result<PathBuf, Failure> {
    let environment = &credentials.environment;
    if let Some(file) = credentials.authfile.clone().or_else(|| environment.path("REGISTRY_AUTH_FILE")) {
        return Ok(file);
    }
    // The last place is Docker's, the one before it podman's.
    let mut places = credentials.auth_files().into_iter().rev().map(|place| place.path);
    let docker = places.next().filter(|file| is_docker(file));
    if let Some(docker) = docker
        && let Some(content) = AuthFile::read(&docker)?
        && content.creds_store.is_empty()
    {
        return Ok(docker);
    }
    let own = environment.config_home().map(|config| config.join("containers/auth.json"));
    own.ok_or_else(|| {
        Failure::new("HOME is not set: there is no place to keep a login").hint("name one with --authfile")
    })
}

fn is_docker(file: &Path) -> bool {
    file.file_name().is_some_and(|name| name == "config.json")
}

/// Docker looks for Docker Hub under its address only, podman writes its name.
fn key_in<'a>(file: &Path, host: &'a str) -> &'a str {
    if host == DOCKER_HUB && is_docker(file) { DOCKER_HUB_KEY } else { host }
}

/// A helper for the registry is asked first, whatever we write beside it.
fn check_helper(file: &Path, host: &str) -> Result<(), Failure> {
    let Some(content) = AuthFile::read(file)? else { return Ok(()) };
    match content.helper_for(host) {
        Some(helper) => {
            let helper = quote(helper.as_bytes());
            Err(Failure::new(format!(
                "{}: docker-credential-{helper} keeps the logins to {host}",
                file.display()
            ))
            .hint(format!("`docker login {host}`, or name another file with --authfile")))
        }
        None => Ok(()),
    }
}

/// What stands in a file that is read earlier wins.
fn warn_of_others(credentials: &Credentials, host: &str, file: &Path, notes: &Notes) {
    let found = credentials.find(&Wanted { host, repository: "", user: None }, false).ok().flatten();
    if let Some(login) = found.filter(|login| login.origin != file.display().to_string()) {
        notes.tell(&format!("another login to {host} is found first: {}", login.shown()));
    }
}
