//! Tokens: the server that a registry's challenge names gives one in exchange for a password, an identity token or nothing.
//!
//! That server may be another host (authn.nvidia.com gives those for nvcr.io). It is spoken to by TLS if the registry is.
//!
//! Run by: the user, in the importer.

use std::time::{Duration, Instant};

use mizzen_core::Failure;
use serde::Deserialize;

use crate::registry::credentials::{Credential, Login};
use crate::registry::endpoint::Endpoint;
use crate::registry::secret::Secret;
use crate::registry::status;
use crate::registry::transport::{Method, Request, Transport, Trouble, Url, form, shown};

/// How long an answer may be.
const LIMIT: u64 = 1 << 20;
/// How long a token is good if its giver does not say, by the specification.
const USUAL_SECONDS: u64 = 60;
/// Seconds before its end at which a token is not used any more.
const MARGIN: u64 = 10;

/// A token, and until when it is good.
pub struct Token {
    /// The header with it.
    pub header: Secret,
    /// When to ask for another.
    pub until: Instant,
}

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    token: Option<String>,
    #[serde(default)]
    access_token: Option<String>,
    #[serde(default)]
    expires_in: Option<u64>,
}

/// What a token is asked for.
pub struct TokenRequest<'a> {
    /// Who has named the server.
    pub endpoint: &'a Endpoint,
    /// That server.
    pub realm: &'a str,
    /// What the registry is called there.
    pub service: &'a str,
    /// What it is to be good for; empty for a login.
    pub scope: &'a str,
    /// Who asks.
    pub login: Option<&'a Login>,
}

/// Gets a token.
pub fn fetch(transport: &Transport, wanted: &TokenRequest) -> Result<Token, Trouble> {
    let url = realm(wanted).map_err(Trouble::lasting)?;
    let mut parameters = Vec::new();
    let filled = [("service", wanted.service), ("scope", wanted.scope)];
    parameters.extend(filled.into_iter().filter(|(_, value)| !value.is_empty()));
    let request = match wanted.login.map(|login| &login.credential) {
        Some(Credential::IdentityToken(token)) => {
            parameters.extend([
                ("grant_type", "refresh_token"),
                ("client_id", "mizzen"),
                ("refresh_token", token.expose()),
            ]);
            Request::new(Method::Post(Secret::new(form(&parameters))), url)
        }
        Some(Credential::Password { user, password }) => {
            parameters.push(("account", user));
            let mut request = Request::new(Method::Get, url.with_query(&parameters));
            request.authorization = Some(Secret::basic(user, password));
            request
        }
        _ => Request::new(Method::Get, url.with_query(&parameters)),
    };
    let begin = Instant::now();
    let response = transport.send(&request, &wanted.endpoint.url)?;
    if response.status != 200 {
        return Err(status::of_token_server(response, wanted.endpoint, wanted.login));
    }
    let host = response.url.authority();
    let bad = |text: &str| Trouble::lasting(Failure::new(format!("{host}: {text}")));
    // The answer is a secret: nothing of it is shown.
    let answer: Answer = serde_json::from_slice(&response.bytes(LIMIT)?)
        .map_err(|_| bad("the answer to the request for a token is not understood"))?;
    let token = answer.token.filter(|token| !token.is_empty()).or(answer.access_token);
    let token = token.filter(|token| !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic()));
    let token = token.ok_or_else(|| bad("there is no token in the answer to the request for one"))?;
    // The times of the other clock are not looked at: it may be wrong. No token lives for more than a day here.
    let seconds = answer.expires_in.unwrap_or(USUAL_SECONDS).clamp(1, 86_400);
    let until = begin + Duration::from_secs(seconds - MARGIN.min(seconds / 2));
    Ok(Token { header: Secret::bearer(&Secret::new(token)), until })
}

/// The address of the server, if it is one that may be told secrets.
fn realm(wanted: &TokenRequest) -> Result<Url, Failure> {
    let host = &wanted.endpoint.host;
    let url =
        Url::parse(wanted.realm).map_err(|failure| failure.about(format!("{host}: its tokens are from")))?;
    if url.scheme < wanted.endpoint.url.scheme {
        let address = shown(wanted.realm);
        return Err(Failure::new(format!(
            "{host}: its tokens are from {address}: http after https, which is refused"
        ))
        .hint("tell who runs the registry: passwords would go to that address without TLS"));
    }
    Ok(url)
}
