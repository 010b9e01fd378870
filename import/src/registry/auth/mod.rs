//! Who we are for a registry: nobody, a name with its password, or a token. Found out by what it answers with 401, remembered
//! for every repository, renewed when it ends.
//!
//! Run by: the user, in the importer.

pub mod challenge;
mod token;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use mizzen_core::Failure;

use self::challenge::Challenge;
use self::token::TokenRequest;
use super::credentials::{Credential, Credentials, Login, Wanted};
use super::endpoint::Endpoint;
use super::secret::Secret;
use super::transport::{Response, Transport, Trouble};

/// What access is sought to.
#[derive(Clone, Copy, Debug)]
pub struct Access<'a> {
    /// At which server.
    pub endpoint: &'a Endpoint,
    /// To which repository there; empty for a login.
    pub repository: &'a str,
    /// As whom, if told.
    pub user: Option<&'a str>,
}

/// What is known of one access.
#[derive(Default)]
struct Grant {
    /// None before anybody has looked.
    login: Option<Option<Login>>,
    /// What the registry wanted.
    challenge: Option<Challenge>,
    header: Option<Secret>,
    until: Option<Instant>,
}

type Key = (String, String, Option<String>);

/// Keeps what registries let us in with.
#[derive(Default)]
pub struct Authorizer {
    grants: Mutex<HashMap<Key, Arc<Mutex<Grant>>>>,
}

impl Authorizer {
    /// What to send along: nothing as long as the registry has not asked.
    pub fn header(
        &self,
        access: &Access,
        transport: &Transport,
        credentials: &Credentials,
    ) -> Result<Option<Secret>, Trouble> {
        let grant = self.grant(access);
        let mut grant = grant.lock().unwrap_or_else(PoisonError::into_inner);
        if grant.until.is_some_and(|until| until <= Instant::now()) {
            grant.renew(access, transport, credentials)?;
        }
        Ok(grant.header.clone())
    }

    /// What to send along after a 401 to `used`. None if the registry wants what we do not have.
    pub fn challenged(
        &self,
        access: &Access,
        response: &Response,
        used: Option<&Secret>,
        transport: &Transport,
        credentials: &Credentials,
    ) -> Result<Option<Secret>, Trouble> {
        let grant = self.grant(access);
        // Held while a token is fetched: the other layers wait for the same one.
        let mut grant = grant.lock().unwrap_or_else(PoisonError::into_inner);
        if grant.header.is_some() && grant.header.as_ref() != used {
            return Ok(grant.header.clone());
        }
        let Some(challenge) = challenge::choose(&response.headers("www-authenticate")) else {
            return Ok(None);
        };
        grant.challenge = Some(challenge);
        grant.renew(access, transport, credentials)?;
        Ok(grant.header.clone().filter(|header| Some(header) != used))
    }

    /// With what we went there, for messages.
    pub fn login(&self, access: &Access) -> Option<Login> {
        let grant = self.grant(access);
        let grant = grant.lock().unwrap_or_else(PoisonError::into_inner);
        grant.login.clone().flatten()
    }

    /// Whether there are credentials that the registry has not asked for.
    pub fn has_unused(&self, access: &Access, credentials: &Credentials) -> Result<bool, Failure> {
        let grant = self.grant(access);
        let mut grant = grant.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(grant.challenge.is_none() && grant.login(access, credentials)?.is_some())
    }

    fn grant(&self, access: &Access) -> Arc<Mutex<Grant>> {
        let key =
            (access.endpoint.url.to_string(), access.repository.to_owned(), access.user.map(str::to_owned));
        let mut grants = self.grants.lock().unwrap_or_else(PoisonError::into_inner);
        grants.entry(key).or_default().clone()
    }
}

impl Grant {
    fn login(&mut self, access: &Access, credentials: &Credentials) -> Result<Option<Login>, Failure> {
        if let Some(login) = &self.login {
            return Ok(login.clone());
        }
        let wanted = Wanted { host: &access.endpoint.host, repository: access.repository, user: access.user };
        let found = credentials.find(&wanted, !access.endpoint.is_mirror)?;
        let host = &access.endpoint.host;
        if found.is_some() && access.endpoint.is_guessed {
            return Err(Failure::new(format!("{host} has no TLS, so it gets no credentials")).hint(format!(
                "if that is meant: plain_http = true below [registries.\"{host}\"] in mizzen.toml"
            )));
        }
        self.login = Some(found.clone());
        Ok(found)
    }

    /// Does what the registry wanted once more.
    fn renew(
        &mut self,
        access: &Access,
        transport: &Transport,
        credentials: &Credentials,
    ) -> Result<(), Trouble> {
        let login = self.login(access, credentials).map_err(Trouble::lasting)?;
        (self.header, self.until) = (None, None);
        if let Some(Credential::RegistryToken(token)) = login.as_ref().map(|login| &login.credential) {
            self.header = Some(Secret::bearer(token));
            return Ok(());
        }
        match &self.challenge {
            Some(Challenge::Basic) => {
                if let Some(Credential::Password { user, password }) = login.map(|login| login.credential) {
                    self.header = Some(Secret::basic(&user, &password));
                }
            }
            Some(Challenge::Bearer { realm, service, scope }) => {
                let usual = match access.repository {
                    "" => String::new(),
                    repository => format!("repository:{repository}:pull"),
                };
                let scope = if scope.is_empty() { &usual } else { scope };
                let wanted =
                    TokenRequest { endpoint: access.endpoint, realm, service, scope, login: login.as_ref() };
                let token = token::fetch(transport, &wanted)?;
                (self.header, self.until) = (Some(token.header), Some(token.until));
            }
            None => {}
        }
        Ok(())
    }
}
