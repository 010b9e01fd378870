//! A registry's client: what a name stands for, and what its manifest names.
//!
//! Every server behind a name is asked in turn: the mirrors of mizzen.toml, then the registry itself. What comes is believed
//! for its digest, not for who has sent it.
//!
//! Run by: the user, in the importer.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use mizzen_core::config::Registries;
use mizzen_core::{Digest, Failure, Reference};

use super::auth::{Access, Authorizer};
use super::backoff::Backoff;
use super::blob::Blob;
use super::credentials::Credentials;
use super::endpoint::Endpoint;
use super::environment::Environment;
use super::notes::Notes;
use super::secret::Secret;
use super::status::{self, Subject};
use super::transport::{Method, Request, Response, Scheme, Timing, Transport, Trouble, TroubleKind, Url};
use crate::manifest::{
    BlobDigest, DOCKER_INDEX, DOCKER_MANIFEST, Descriptor, MANIFEST_LIMIT, OCI_INDEX, OCI_MANIFEST, Platform,
    Selected, check_digest, parse_manifest_as, select, sha256,
};

/// How a client is to work.
#[derive(Debug)]
pub struct ClientOptions {
    /// Of mizzen.toml.
    pub registries: Registries,
    /// A file of credentials that goes before the others.
    pub authfile: Option<PathBuf>,
    /// Name and password for the registry that is named, from the command line.
    pub login: Option<(String, Secret)>,
    /// Where credentials, certificates and proxies are.
    pub environment: Environment,
    /// How long is waited.
    pub timing: Timing,
    /// Who is told of waits and mirrors that fail.
    pub notes: Notes,
}

impl ClientOptions {
    /// With the site's settings, and everything else as usual.
    pub fn new(registries: Registries, notes: Notes) -> ClientOptions {
        let (environment, timing) = (Environment::of_process(), Timing::default());
        ClientOptions { registries, authfile: None, login: None, environment, timing, notes }
    }
}

/// What a name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// As they were sent.
    pub bytes: Vec<u8>,
    /// As the header says, which may be wrong: `parse_manifest_as` compares.
    pub media_type: String,
    /// Of the bytes.
    pub digest: Digest,
}

/// An image, chosen for a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteImage {
    /// What the name stands for: the index where there is one.
    pub digest: Digest,
    /// The image in it.
    pub selected: Selected,
}

/// Talks to registries. Cheap to clone, and for any number of threads.
#[derive(Clone)]
pub struct Client(Arc<Inner>);

/// What all threads share.
pub(super) struct Inner {
    registries: Registries,
    pub(super) transport: Transport,
    authorizer: Authorizer,
    credentials: Credentials,
    pub(super) notes: Notes,
    /// Whether registries on this machine have TLS.
    schemes: Mutex<HashMap<String, Scheme>>,
    /// Mirrors that are not asked again.
    dead: Mutex<HashSet<String>>,
}

/// All types that we understand, in one header: some registries look at the first only, and convert or refuse.
fn accepted() -> String {
    [OCI_INDEX, DOCKER_INDEX, OCI_MANIFEST, DOCKER_MANIFEST].join(", ")
}

impl Client {
    /// A client that has not asked anybody yet.
    pub fn new(options: ClientOptions) -> Client {
        let ClientOptions { registries, authfile, login, environment, timing, notes } = options;
        let credentials =
            Credentials { given: login, authfile, environment: environment.clone(), notes: notes.clone() };
        let transport = Transport::new(registries.clone(), environment, timing);
        let (authorizer, schemes, dead) = Default::default();
        Client(Arc::new(Inner { registries, transport, authorizer, credentials, notes, schemes, dead }))
    }

    /// The digest of what a name stands for. It is only said by the registry: whoever gets it by this digest verifies it.
    pub fn resolve(&self, reference: &Reference) -> Result<Digest, Failure> {
        if let Some(digest) = reference.digest {
            return Ok(digest);
        }
        let resolved = self.0.via_endpoints(reference, &mut |endpoint| {
            let response = self.0.manifest_request(reference, endpoint, Method::Head)?;
            let said = response.header("docker-content-digest");
            let said = said.and_then(|text| BlobDigest::parse(text).ok()).and_then(|digest| digest.sha256());
            match (response.status, said) {
                (200, Some(digest)) => Ok(digest),
                (429 | 500.., _) => Err(self.0.refusal(response, endpoint, Subject::Manifest, reference)),
                // Not every registry answers to HEAD, and in an error it says no reason.
                _ => self.0.get_manifest(reference, endpoint).map(|fetched| fetched.digest),
            }
        });
        resolved.map_err(|failure| failure.about(reference))
    }

    /// What a name stands for. It has the digest that the name has, if that has one.
    pub fn manifest(&self, reference: &Reference) -> Result<Fetched, Failure> {
        let fetched =
            self.0.via_endpoints(reference, &mut |endpoint| self.0.get_manifest(reference, endpoint));
        fetched.map_err(|failure| failure.about(reference))
    }

    /// A manifest that an index names.
    pub fn manifest_of(&self, reference: &Reference, descriptor: &Descriptor) -> Result<Vec<u8>, Failure> {
        self.0.manifest_of(reference, descriptor).map_err(|failure| failure.about(reference))
    }

    /// The image for a machine.
    pub fn image(&self, reference: &Reference, platform: &Platform) -> Result<RemoteImage, Failure> {
        let fetched = self.manifest(reference)?;
        let digest = fetched.digest;
        let selected = parse_manifest_as(&fetched.bytes, &fetched.media_type).and_then(|_| {
            select(fetched.bytes, digest.into(), platform, &mut |entry| self.0.manifest_of(reference, entry))
        });
        Ok(RemoteImage { digest, selected: selected.map_err(|failure| failure.about(reference))? })
    }

    /// A layer or a configuration, as a stream. Its size and digest are verified when its end is read. Its failures do not
    /// name the image.
    pub fn blob(&self, reference: &Reference, descriptor: &Descriptor) -> Result<Blob, Failure> {
        Blob::open(self.0.clone(), reference, descriptor)
    }

    /// A short one as a whole.
    pub fn small_blob(
        &self,
        reference: &Reference,
        descriptor: &Descriptor,
        limit: u64,
    ) -> Result<Vec<u8>, Failure> {
        if descriptor.size > limit {
            return Err(Failure::new(format!(
                "{reference}: {} has {} bytes, more than {limit}",
                descriptor.digest, descriptor.size
            )));
        }
        let about = |failure: Failure| failure.about(reference);
        let mut bytes = Vec::new();
        let mut blob = self.blob(reference, descriptor).map_err(about)?;
        std::io::copy(&mut blob, &mut bytes).map_err(super::failure_of).map_err(about)?;
        Ok(bytes)
    }

    /// A layer that the registry does not keep, from the addresses that the manifest names, and without credentials.
    pub fn foreign_blob(&self, reference: &Reference, descriptor: &Descriptor) -> Result<Blob, Failure> {
        Blob::open_foreign(self.0.clone(), reference, descriptor)
    }

    /// Whether a registry takes the credentials: what `mizzen login` asks.
    pub(super) fn check_login(&self, registry: &str) -> Result<(), Failure> {
        let endpoint = self.0.registry(registry)?;
        let access = Access { endpoint: &endpoint, repository: "", user: None };
        let checked = self.0.patiently(&mut || {
            let response = self.0.exchange(&access, &Request::new(Method::Get, endpoint.root()))?;
            let login = self.0.authorizer.login(&access);
            if response.status != 200 {
                return Err(status::of_registry(response, &endpoint, Subject::Entry, login.as_ref()));
            }
            if login.is_none() {
                self.0
                    .notes
                    .tell_once(&format!("{registry} lets everybody in, and has not tried the password"));
            }
            Ok(())
        });
        checked.map_err(|trouble| trouble.failure)
    }
}

impl Inner {
    /// The servers behind a name.
    pub(super) fn endpoints(&self, registry: &str) -> Result<Vec<Endpoint>, Failure> {
        let mut endpoints = Endpoint::mirrors(registry, &self.registries)?;
        let dead = self.dead.lock().unwrap_or_else(PoisonError::into_inner);
        endpoints.retain(|mirror| !dead.contains(&mirror.url.to_string()));
        drop(dead);
        endpoints.push(self.registry(registry)?);
        Ok(endpoints)
    }

    fn registry(&self, registry: &str) -> Result<Endpoint, Failure> {
        let scheme = self.scheme(registry)?;
        let is_guessed = scheme == Scheme::Http && !self.registries.contains_key(registry);
        let mut endpoint = Endpoint::of_registry(registry, scheme)?;
        endpoint.is_guessed = is_guessed;
        Ok(endpoint)
    }

    /// Whether a registry has TLS: yes, unless mizzen.toml says no. One on this machine may do without, as with Docker, but gets
    /// no credentials then.
    fn scheme(&self, registry: &str) -> Result<Scheme, Failure> {
        if let Some(config) = self.registries.get(registry) {
            return Ok(if config.plain_http { Scheme::Http } else { Scheme::Https });
        }
        if !Url::new(Scheme::Https, registry, "/")?.names_this_machine() {
            return Ok(Scheme::Https);
        }
        let mut schemes = self.schemes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(scheme) = schemes.get(registry) {
            return Ok(*scheme);
        }
        let answers = |scheme: Scheme| -> Result<Result<(), TroubleKind>, Failure> {
            let root = Endpoint::of_registry(registry, scheme)?.root();
            let sent = self.transport.send(&Request::new(Method::Get, root.clone()), &root);
            Ok(sent.map(drop).map_err(|trouble| trouble.kind))
        };
        let scheme = match answers(Scheme::Https)? {
            // A certificate that is not good is no reason to go without.
            Ok(()) | Err(TroubleKind::Lasting) => Scheme::Https,
            Err(_) if answers(Scheme::Http)?.is_ok() => Scheme::Http,
            Err(_) => Scheme::Https,
        };
        schemes.insert(registry.to_owned(), scheme);
        Ok(scheme)
    }

    /// Asks one server after the other.
    fn via_endpoints<T>(
        &self,
        reference: &Reference,
        ask: &mut dyn FnMut(&Endpoint) -> Result<T, Trouble>,
    ) -> Result<T, Failure> {
        for endpoint in self.endpoints(&reference.registry)? {
            let outcome = match endpoint.is_mirror {
                // The registry itself is behind: no waiting.
                true => ask(&endpoint),
                false => self.patiently(&mut || ask(&endpoint)),
            };
            match outcome {
                Ok(found) => return Ok(found),
                Err(trouble) if endpoint.is_mirror => {
                    self.note_mirror(&endpoint, &trouble, &reference.registry)
                }
                Err(trouble) => return Err(trouble.failure),
            }
        }
        Err(Failure::new("there is nobody to ask"))
    }

    /// Tells of a mirror that does not help, and remembers one that is not there.
    pub(super) fn note_mirror(&self, mirror: &Endpoint, trouble: &Trouble, registry: &str) {
        self.notes.tell_once(&format!("mirror: {}; asking {registry}", trouble.failure));
        if trouble.kind != TroubleKind::Lasting {
            self.dead.lock().unwrap_or_else(PoisonError::into_inner).insert(mirror.url.to_string());
        }
    }

    /// Tries until it works or there is no hope.
    fn patiently<T>(&self, attempt: &mut dyn FnMut() -> Result<T, Trouble>) -> Result<T, Trouble> {
        let mut backoff = Backoff::default();
        loop {
            match attempt() {
                Ok(done) => return Ok(done),
                Err(trouble) => backoff.wait(trouble, false, self.transport.timing(), &self.notes)?,
            }
        }
    }

    fn manifest_request(
        &self,
        reference: &Reference,
        endpoint: &Endpoint,
        method: Method,
    ) -> Result<Response, Trouble> {
        let digest = reference.digest.map(|digest| digest.to_string());
        let name = digest.as_deref().or(reference.tag.as_deref()).unwrap_or("latest");
        let url = endpoint.path(&reference.repository, "manifests", name);
        let request = Request { accept: Some(accepted()), ..Request::new(method, url) };
        self.authorized(reference, endpoint, request)
    }

    fn manifest_of(&self, reference: &Reference, descriptor: &Descriptor) -> Result<Vec<u8>, Failure> {
        let name = descriptor.digest.to_string();
        self.via_endpoints(reference, &mut |endpoint| {
            let url = endpoint.path(&reference.repository, "manifests", &name);
            let request = Request { accept: Some(accepted()), ..Request::new(Method::Get, url) };
            let response = self.authorized(reference, endpoint, request)?;
            if response.status != 200 {
                return Err(self.refusal(response, endpoint, Subject::Manifest, reference));
            }
            let bytes = response.bytes(MANIFEST_LIMIT)?;
            descriptor.check(&bytes).map_err(|failure| Trouble::lasting(failure.about(&endpoint.host)))?;
            Ok(bytes)
        })
    }

    fn get_manifest(&self, reference: &Reference, endpoint: &Endpoint) -> Result<Fetched, Trouble> {
        let response = self.manifest_request(reference, endpoint, Method::Get)?;
        if response.status != 200 {
            return Err(self.refusal(response, endpoint, Subject::Manifest, reference));
        }
        let header = response.header("content-type").unwrap_or_default();
        let media_type = header.split(';').next().unwrap_or_default().trim().to_owned();
        let bytes = response.bytes(MANIFEST_LIMIT)?;
        if let Some(pin) = reference.digest {
            let checked = check_digest(&pin.into(), &bytes);
            checked.map_err(|failure| Trouble::lasting(failure.about(&endpoint.host)))?;
        }
        Ok(Fetched { digest: sha256(&bytes), bytes, media_type })
    }

    /// Sends a request for something in the reference's repository, with what the registry wants to see.
    pub(super) fn authorized(
        &self,
        reference: &Reference,
        endpoint: &Endpoint,
        request: Request,
    ) -> Result<Response, Trouble> {
        let repository = endpoint.repository(&reference.repository);
        self.exchange(&self.access(reference, endpoint, &repository), &request)
    }

    fn access<'a>(
        &self,
        reference: &'a Reference,
        endpoint: &'a Endpoint,
        repository: &'a str,
    ) -> Access<'a> {
        // The user that is named is one of the registry's, not of a mirror's.
        let user = reference.user.as_deref().filter(|_| !endpoint.is_mirror);
        Access { endpoint, repository, user }
    }

    fn exchange(&self, access: &Access, request: &Request) -> Result<Response, Trouble> {
        let response = self.exchange_once(access, request)?;
        // Some say that there is no such image, and do not ask who wants to know. What they ask at their root holds.
        if matches!(response.status, 403 | 404)
            && access.endpoint.url.trusts(&response.url)
            && self.authorizer.has_unused(access, &self.credentials).map_err(Trouble::lasting)?
        {
            let root = Request::new(Method::Get, access.endpoint.root());
            self.exchange_once(access, &root)?;
            return self.exchange_once(access, request);
        }
        Ok(response)
    }

    fn exchange_once(&self, access: &Access, request: &Request) -> Result<Response, Trouble> {
        let (transport, credentials) = (&self.transport, &self.credentials);
        let mut header = self.authorizer.header(access, transport, credentials)?;
        // The second 401 may be for a token that has ended while others were renewing it.
        for _ in 0..2 {
            let request = Request { authorization: header.clone(), ..request.clone() };
            let response = transport.send(&request, &access.endpoint.url)?;
            if response.status != 401 || !access.endpoint.url.trusts(&response.url) {
                return Ok(response);
            }
            let next =
                self.authorizer.challenged(access, &response, header.as_ref(), transport, credentials)?;
            match next {
                Some(next) => header = Some(next),
                None => return Ok(response),
            }
        }
        transport.send(&Request { authorization: header, ..request.clone() }, &access.endpoint.url)
    }

    /// Why a registry does not give what was asked for.
    pub(super) fn refusal(
        &self,
        response: Response,
        endpoint: &Endpoint,
        subject: Subject,
        reference: &Reference,
    ) -> Trouble {
        let repository = endpoint.repository(&reference.repository);
        let login = self.authorizer.login(&self.access(reference, endpoint, &repository));
        status::of_registry(response, endpoint, subject, login.as_ref())
    }
}
