//! Requests to servers: one agent for every kind of connection, redirects by rules of our own.
//!
//! - Authorization goes to the host it is for, and not along with a redirect to another one, nor to http after https: storage
//!   refuses it, and it is nobody else's.
//! - A redirect leads to http or https, from https to https only, and to no address that only this machine can reach.
//!
//! Run by: the user, in the importer.

mod address;
mod http;
mod proxy;
mod roots;
mod trouble;
mod url;

pub use http::{Method, Request, Response};
pub use trouble::{Trouble, TroubleKind};
pub use url::{Scheme, Url, form, shown};

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mizzen_core::Failure;
use mizzen_core::config::Registries;
use ureq::Agent;
use ureq::tls::{RootCerts, TlsConfig};
use ureq::unversioned::resolver::DefaultResolver;
use ureq::unversioned::transport::DefaultConnector;

use self::address::{GuardedResolver, Reach};
use self::proxy::Proxy;
use super::environment::Environment;

/// How many redirects are followed.
const REDIRECTS: usize = 10;

/// How long is waited for what.
#[derive(Clone, Debug)]
pub struct Timing {
    /// For a connection, with TLS and a proxy.
    pub connect: Duration,
    /// For the next bytes.
    pub read: Duration,
    /// How often something is tried without getting further.
    pub attempts: u32,
    /// Between the first two attempts; it doubles then.
    pub first_wait: Duration,
    /// The longest that the doubling leads to.
    pub longest_wait: Duration,
    /// The longest that a server may make us wait (Retry-After), once and in all.
    pub longest_retry_after: Duration,
}

impl Default for Timing {
    fn default() -> Timing {
        Timing {
            connect: Duration::from_secs(15),
            read: Duration::from_secs(30),
            attempts: 6,
            first_wait: Duration::from_secs(1),
            longest_wait: Duration::from_secs(30),
            longest_retry_after: Duration::from_secs(300),
        }
    }
}

/// What connections have in common that may share an agent.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct AgentKey {
    reach: Reach,
    proxy: Option<ureq::Proxy>,
    /// None without TLS.
    certificates: Option<Vec<PathBuf>>,
}

/// Sends requests.
pub struct Transport {
    registries: Registries,
    environment: Environment,
    timing: Timing,
    agents: Mutex<HashMap<AgentKey, Agent>>,
    /// What hosts may name, by host.
    reaches: Mutex<HashMap<String, Reach>>,
}

impl Transport {
    /// With the site's settings, and the user's variables.
    pub fn new(registries: Registries, environment: Environment, timing: Timing) -> Transport {
        let (agents, reaches) = Default::default();
        Transport { registries, environment, timing, agents, reaches }
    }

    /// How long is waited.
    pub fn timing(&self) -> &Timing {
        &self.timing
    }

    /// Sends a request and follows redirects. `named` is the server that the user has named: by it, other hosts are.
    pub fn send(&self, request: &Request, named: &Url) -> Result<Response, Trouble> {
        let mut url = request.url.clone();
        let mut authorization = request.authorization.as_ref();
        for hop in 0..=REDIRECTS {
            // Once it was left out it stays so: nobody else may steer where it goes.
            authorization = authorization.filter(|_| request.url.trusts(&url));
            let (agent, proxy) = self.agent(&url, named).map_err(Trouble::lasting)?;
            let answer = http::send(&agent, request, &url, authorization)
                .map_err(|error| Trouble::of_request(error, &url, proxy.as_ref()))?;
            let response = Response::new(answer, url.clone(), hop > 0, self.timing.read);
            let Some(location) = response.redirect() else { return Ok(response) };
            url = self.redirected(request, &url, location).map_err(|failure| {
                Trouble::lasting(failure.about(format!("{}: it redirects to", url.authority())))
            })?;
        }
        let host = request.url.authority();
        Err(Trouble::lasting(Failure::new(format!("{host}: more than {REDIRECTS} redirects"))))
    }

    fn redirected(&self, request: &Request, from: &Url, location: &str) -> Result<Url, Failure> {
        let to = from.join(location)?;
        let refused = |why: &str| Failure::new(format!("{}: {why}", shown(&to.to_string())));
        if to.scheme < from.scheme {
            return Err(refused("http after https, which is refused"));
        }
        if matches!(request.method, Method::Post(_)) {
            return Err(refused("secrets were sent, which are not sent on"));
        }
        Ok(to)
    }

    /// An agent for a connection, and the proxy that it goes through.
    fn agent(&self, url: &Url, named: &Url) -> Result<(Agent, Option<Proxy>), Failure> {
        let reach = if url.host == named.host { Reach::Any } else { self.reach(named) };
        // Behind a proxy no name is looked up here.
        if let Some(what) = url.ip().and_then(|ip| reach.refusal(ip)) {
            return Err(address::refused(&url.host, what));
        }
        let proxy = proxy::proxy_for(&self.environment, url)?;
        let certificates = (url.scheme == Scheme::Https).then(|| {
            let host = url.authority();
            let ca_file =
                self.registries.get(registry_name(&host)).and_then(|registry| registry.ca_file.as_deref());
            roots::files_for(&self.environment, &host, ca_file)
        });
        let key = AgentKey { reach, proxy: proxy.as_ref().map(|proxy| proxy.address.clone()), certificates };
        let mut agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner);
        let agent = match agents.get(&key) {
            Some(agent) => agent.clone(),
            None => {
                let agent = self.new_agent(&key)?;
                agents.insert(key, agent.clone());
                agent
            }
        };
        Ok((agent, proxy))
    }

    fn reach(&self, named: &Url) -> Reach {
        let mut reaches = self.reaches.lock().unwrap_or_else(PoisonError::into_inner);
        *reaches.entry(named.authority()).or_insert_with(|| Reach::of_named_by(named))
    }

    fn new_agent(&self, key: &AgentKey) -> Result<Agent, Failure> {
        let mut tls = TlsConfig::builder()
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()));
        // A proxy may have TLS where the server has none.
        let mut certificates = match (&key.certificates, &key.proxy) {
            (None, None) => Vec::new(),
            _ => roots::of_machine(&self.environment)?,
        };
        for file in key.certificates.iter().flatten() {
            certificates.extend(roots::read(file)?);
        }
        tls = tls.root_certs(RootCerts::new_with_certs(&certificates));
        let Timing { connect, read, .. } = self.timing;
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("mizzen/", env!("CARGO_PKG_VERSION")))
            // What comes is hashed as it is.
            .accept_encoding("identity")
            .max_response_header_size(64 << 10)
            .input_buffer_size(64 << 10)
            .timeout_resolve(Some(connect))
            .timeout_connect(Some(connect))
            .timeout_recv_response(Some(read))
            .timeout_per_read(Some(read))
            .timeout_per_write(Some(read))
            .proxy(key.proxy.clone())
            .tls_config(tls.build())
            .build();
        let resolver = GuardedResolver { reach: key.reach, inner: DefaultResolver::default() };
        Ok(Agent::with_parts(config, DefaultConnector::default(), resolver))
    }
}

/// Docker Hub's server has another name than Docker Hub.
fn registry_name(host: &str) -> &str {
    if host == super::endpoint::DOCKER_HUB_SERVER { mizzen_core::reference::DOCKER_HUB } else { host }
}
