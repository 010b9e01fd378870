//! Answers that are not what was asked for, in words that say what to do.
//!
//! Run by: the user, in the importer.

use std::time::{Duration, SystemTime};

use mizzen_core::Failure;
use mizzen_core::failure::quote;
use mizzen_core::reference::DOCKER_HUB;
use serde::Deserialize;

use super::backoff::parse_retry_after;
use super::credentials::Login;
use super::endpoint::Endpoint;
use super::transport::{Response, Scheme, Trouble, TroubleKind};

/// How much of an answer is looked at for its reason.
const LIMIT: u64 = 16 << 10;

/// What was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// What a tag or digest stands for.
    Manifest,
    /// A layer or a configuration.
    Blob,
    /// Whether somebody is let in.
    Entry,
}

/// The form of a registry's errors.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Errors {
    errors: Vec<ErrorEntry>,
    /// What token servers say instead.
    details: String,
    message: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ErrorEntry {
    code: String,
    message: String,
}

/// What a registry says to be wrong.
struct Reason {
    /// The status, and its own words.
    text: String,
    code: String,
    retry_after: Option<Duration>,
    status: u16,
}

impl Reason {
    fn of(response: Response) -> Reason {
        let status = response.status;
        let retry_after = response
            .header("retry-after")
            .or(response.header("x-retry-after"))
            .and_then(|text| parse_retry_after(text, SystemTime::now()));
        let mut text = response.status_text();
        // Without a reason it is still an answer.
        let body = response.beginning(LIMIT).map(|(bytes, _)| bytes).unwrap_or_default();
        let errors: Errors = serde_json::from_slice(&body).unwrap_or_default();
        let first = errors.errors.into_iter().next().unwrap_or_default();
        let words = [first.message, errors.details, errors.message, first.code.clone()];
        if let Some(words) = words.iter().find(|words| !words.is_empty()) {
            text = format!("{text}: {}", quote(words.as_bytes()));
        }
        Reason { text, code: first.code, retry_after, status }
    }

    /// What status means the same for everybody.
    fn trouble(&self, host: &str, login: Option<&Login>) -> Trouble {
        let text = &self.text;
        let (failure, kind) = match self.status {
            429 => {
                let failure = Failure::new(format!("{host}: too many requests ({text})"));
                (failure.hint(when_again(host, login, self.retry_after)), TroubleKind::Busy(self.retry_after))
            }
            503 => (broken(host, text), TroubleKind::Busy(self.retry_after)),
            408 | 425 | 500..=599 => (broken(host, text), TroubleKind::Passing),
            407 => {
                let failure = Failure::new(format!("{host}: the proxy wants a login ({text})"));
                (failure.hint("write http://USER:PASSWORD@HOST:PORT into HTTPS_PROXY"), TroubleKind::Lasting)
            }
            _ => (Failure::new(format!("{host}: it answers {text}")), TroubleKind::Lasting),
        };
        Trouble { failure, kind }
    }
}

fn broken(host: &str, text: &str) -> Failure {
    Failure::new(format!("{host}: it answers {text}")).hint("it has a problem of its own; try again later")
}

fn when_again(host: &str, login: Option<&Login>, after: Option<Duration>) -> String {
    let minutes = |after: Duration| after.as_secs().div_ceil(60);
    let when = match after {
        Some(after) if after.as_secs() > 90 => format!("try again in {} minutes", minutes(after)),
        Some(after) => format!("try again in {} s", after.as_secs().max(1)),
        None => "try again later".to_owned(),
    };
    match (host, login) {
        (DOCKER_HUB, None) => format!("{when}; `mizzen login {DOCKER_HUB}` raises the limit"),
        _ => when,
    }
}

/// What a registry's answer means that is none of those that were hoped for.
pub fn of_registry(
    response: Response,
    endpoint: &Endpoint,
    subject: Subject,
    login: Option<&Login>,
) -> Trouble {
    let (redirected, server) = (response.redirected, response.url.clone());
    let reason = Reason::of(response);
    let (host, text) = (&endpoint.host, &reason.text);
    if redirected && !endpoint.url.trusts(&server) {
        // The storage behind it, which knows nothing of logins and names.
        return reason.trouble(&server.authority(), None).about(format!("{host}: it redirects to"));
    }
    let failure = match (reason.status, login) {
        (401, None) if host == DOCKER_HUB => {
            Failure::new(format!("{host}: there is no such image, or it is private ({text})"))
                .hint(format!("is the name right? if the image is private: `mizzen login {host}`"))
        }
        (401, None) => Failure::new(format!("{host}: it wants a login ({text})"))
            .hint(format!("`mizzen login {host}`, or --username and --password-stdin")),
        (401 | 403, Some(login)) if subject == Subject::Entry => refused(host, login, text),
        (401, Some(login)) => {
            Failure::new(format!("{host}: the login is not enough ({}): {text}", login.shown()))
                .hint(format!("is the name right? `mizzen login {host}` logs in as somebody else"))
        }
        (403, None) => Failure::new(format!("{host}: not allowed without a login ({text})"))
            .hint(format!("`mizzen login {host}`, or --username and --password-stdin")),
        (403, Some(login)) => Failure::new(format!("{host}: not allowed for {}: {text}", login.shown()))
            .hint("ask whoever keeps the image for the right to pull it"),
        (404, _) => not_found(&reason, endpoint, subject, login),
        (400, _) if endpoint.url.scheme == Scheme::Http => Failure::new(format!("{host}: it answers {text}"))
            .hint(format!(
                "if it has TLS, plain_http in [registries.\"{host}\"] of mizzen.toml must not be true"
            )),
        _ => return reason.trouble(host, login),
    };
    Trouble::lasting(failure)
}

fn not_found(reason: &Reason, endpoint: &Endpoint, subject: Subject, login: Option<&Login>) -> Failure {
    let (host, text) = (&endpoint.host, &reason.text);
    let (what, mut hint) = match (subject, reason.code.as_str()) {
        (Subject::Manifest, "NAME_UNKNOWN") => {
            ("it has no image of that name", "is the name right?".to_owned())
        }
        (Subject::Manifest, "MANIFEST_UNKNOWN") => {
            ("it has no such tag or digest of that image", "is the tag right?".to_owned())
        }
        (Subject::Manifest, _) => {
            ("it has no such image, or not with that tag", "are name and tag right?".to_owned())
        }
        (Subject::Blob, _) => (
            "it lacks a part of the image",
            "the image is broken there; whoever keeps it has to push it again".to_owned(),
        ),
        (Subject::Entry, _) => ("it is not a registry", "is the name right?".to_owned()),
    };
    if login.is_none() && subject == Subject::Manifest {
        hint = format!("{hint} if the image is private: `mizzen login {host}`");
    }
    Failure::new(format!("{host}: {what} ({text})")).hint(hint)
}

fn refused(host: &str, login: &Login, text: &str) -> Failure {
    let failure = Failure::new(format!("{host}: the login is refused ({}): {text}", login.shown()));
    failure.hint(match login.is_given() {
        true => "are name and password right? some registries want a token in place of the password".to_owned(),
        false => format!(
            "`mizzen login {host}` replaces it; `mizzen logout {host}` goes without, which is enough for public images"
        ),
    })
}

/// What the answer of a server means that was asked for a token.
pub fn of_token_server(response: Response, endpoint: &Endpoint, login: Option<&Login>) -> Trouble {
    let server = response.url.authority();
    let reason = Reason::of(response);
    let (host, text) = (&endpoint.host, &reason.text);
    match (reason.status, login) {
        (400 | 401 | 403, Some(login)) => Trouble::lasting(refused(host, login, text)),
        (401 | 403, None) => {
            Trouble::lasting(Failure::new(format!("{host}: it wants a login ({text})")).hint(format!(
                "is the name right? `mizzen login {host}`, or --username and --password-stdin"
            )))
        }
        _ => reason.trouble(&server, login).about(format!("{host}: its tokens are from")),
    }
}

/// What the answer of somebody else's server means, who was asked without credentials.
pub fn of_other_server(response: Response) -> Trouble {
    let host = response.url.authority();
    Reason::of(response).trouble(&host, None)
}
