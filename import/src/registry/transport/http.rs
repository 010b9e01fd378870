//! One request and its answer.
//!
//! Run by: the user, in the importer.

use std::io::Read;
use std::time::{Duration, Instant};

use mizzen_core::Failure;
use ureq::http::{HeaderMap, Request as HttpRequest, StatusCode, header};
use ureq::{Agent, Body};

use super::trouble::{Trouble, TroubleKind};
use super::url::Url;
use crate::registry::secret::Secret;

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Method {
    /// Get it.
    Get,
    /// Get its headers.
    Head,
    /// Send a form, which may have secrets in it.
    Post(Secret),
}

/// What is asked of a server.
#[derive(Clone, Debug)]
pub struct Request {
    /// What to do.
    pub method: Method,
    /// With what.
    pub url: Url,
    /// Which types are understood.
    pub accept: Option<String>,
    /// Where to begin, if not at the first byte.
    pub offset: u64,
    /// For the host of `url` only.
    pub authorization: Option<Secret>,
}

impl Request {
    /// A request for all of something, without authorization.
    pub fn new(method: Method, url: Url) -> Request {
        Request { method, url, accept: None, offset: 0, authorization: None }
    }
}

/// Sends a request to `url`, which may be another than the request's own after a redirect.
pub fn send(
    agent: &Agent,
    request: &Request,
    url: &Url,
    authorization: Option<&Secret>,
) -> Result<ureq::http::Response<Body>, ureq::Error> {
    let method = match request.method {
        Method::Get => "GET",
        Method::Head => "HEAD",
        Method::Post(_) => "POST",
    };
    let mut builder = HttpRequest::builder().method(method).uri(url.to_string());
    if let Some(accept) = &request.accept {
        builder = builder.header(header::ACCEPT, accept);
    }
    if request.offset > 0 {
        builder = builder.header(header::RANGE, format!("bytes={}-", request.offset));
    }
    if let Some(secret) = authorization {
        let mut value = header::HeaderValue::from_str(secret.expose()).map_err(ureq::http::Error::from)?;
        value.set_sensitive(true);
        builder = builder.header(header::AUTHORIZATION, value);
    }
    match &request.method {
        Method::Post(form) => {
            let builder = builder.header(header::CONTENT_TYPE, "application/x-www-form-urlencoded");
            agent.run(builder.body(form.expose().to_owned())?)
        }
        _ => agent.run(builder.body(())?),
    }
}

/// What a server answers.
pub struct Response {
    /// 200 and so on.
    pub status: u16,
    /// Who has answered.
    pub url: Url,
    /// Whether somebody else than was asked.
    pub redirected: bool,
    headers: HeaderMap,
    body: Body,
    /// How long the whole of a short text may take.
    patience: Duration,
}

impl Response {
    /// From the library's form.
    pub fn new(
        answer: ureq::http::Response<Body>,
        url: Url,
        redirected: bool,
        patience: Duration,
    ) -> Response {
        let (parts, body) = answer.into_parts();
        Response { status: parts.status.as_u16(), url, redirected, headers: parts.headers, body, patience }
    }

    /// One of the headers.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// All headers of one name.
    pub fn headers(&self, name: &str) -> Vec<&str> {
        self.headers.get_all(name).iter().filter_map(|value| value.to_str().ok()).collect()
    }

    /// How many bytes it says it has.
    pub fn length(&self) -> Option<u64> {
        self.header("content-length")?.trim().parse().ok()
    }

    /// Where it sends us.
    pub fn redirect(&self) -> Option<&str> {
        matches!(self.status, 301 | 302 | 303 | 307 | 308).then(|| self.header("location")).flatten()
    }

    /// The status in numbers and words.
    pub fn status_text(&self) -> String {
        let reason = StatusCode::from_u16(self.status).ok().and_then(|status| status.canonical_reason());
        reason.map_or_else(|| self.status.to_string(), |reason| format!("{} {reason}", self.status))
    }

    /// The body, whatever its length.
    pub fn into_reader(self) -> impl Read + Send + 'static {
        self.body.into_reader()
    }

    /// The body, if it is no longer than that and comes in time.
    pub fn bytes(self, limit: u64) -> Result<Vec<u8>, Trouble> {
        let host = self.url.authority();
        let (bytes, end) = self.beginning(limit)?;
        let failure = |text: String| Failure::new(format!("{host}: {text}"));
        match end {
            End::Whole => Ok(bytes),
            End::Limit => Err(Trouble::lasting(failure(format!("it sends more than {limit} bytes")))),
            End::Time => {
                let text = format!("it has sent {} bytes, which is too slow", bytes.len());
                Err(Trouble { failure: failure(text), kind: TroubleKind::Passing })
            }
        }
    }

    /// As much of the body as comes in time and is not too long.
    pub fn beginning(self, limit: u64) -> Result<(Vec<u8>, End), Trouble> {
        let deadline = Instant::now() + 2 * self.patience;
        let url = self.url.clone();
        let mut reader = self.body.into_reader();
        let mut bytes = Vec::new();
        let mut piece = [0; 16 << 10];
        loop {
            match reader.read(&mut piece) {
                Ok(0) => return Ok((bytes, End::Whole)),
                Ok(length) => bytes.extend_from_slice(&piece[..length]),
                Err(error) => return Err(Trouble::of_answer(&error, &url)),
            }
            if bytes.len() as u64 > limit {
                return Ok((bytes, End::Limit));
            }
            if Instant::now() > deadline {
                return Ok((bytes, End::Time));
            }
        }
    }
}

/// Where reading has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// At the end.
    Whole,
    /// It is too long.
    Limit,
    /// It takes too long.
    Time,
}
