//! What the tests share: clients with short waits, a scratch home, images.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mizzen_core::config::{Registries, RegistryConfig};
use mizzen_core::{Failure, Reference};
use mizzen_import::manifest::{BlobDigest, Descriptor, sha256};
use mizzen_import::registry::{Blob, Client, ClientOptions, Environment, Notes, Secret, Timing, failure_of};

use super::server::Server;

pub fn certificate(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/registry/certificates").join(name)
}

/// A directory that goes away with its owner.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Scratch {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("mizzen-registry-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Scratch(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file, with its directories.
    pub fn file(&self, name: &str, content: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        path
    }

    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.0.join(name)).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A client to be, with nobody's credentials.
pub struct Setup {
    pub home: Scratch,
    pub registries: Registries,
    pub variables: Vec<(String, String)>,
    pub timing: Timing,
    pub login: Option<(String, Secret)>,
    pub authfile: Option<PathBuf>,
    notes: Arc<Mutex<Vec<String>>>,
}

pub fn short() -> Timing {
    Timing {
        connect: Duration::from_secs(5),
        read: Duration::from_millis(300),
        attempts: 4,
        first_wait: Duration::from_millis(5),
        longest_wait: Duration::from_millis(20),
        longest_retry_after: Duration::from_secs(3),
    }
}

pub fn setup() -> Setup {
    let (registries, variables, notes) = Default::default();
    Setup { home: Scratch::new(), registries, variables, timing: short(), login: None, authfile: None, notes }
}

impl Setup {
    /// This server has no TLS.
    pub fn plain(mut self, server: &Server) -> Setup {
        let config = RegistryConfig { plain_http: true, ..RegistryConfig::default() };
        self.registries.insert(server.host(), config);
        self
    }

    /// This registry, by a name with the server's port, has TLS, with the tests' own authority.
    pub fn tls(mut self, host: &str) -> Setup {
        let config = RegistryConfig { ca_file: Some(certificate("ca.pem")), ..RegistryConfig::default() };
        self.registries.insert(host.to_owned(), config);
        self
    }

    /// The server is asked before the registry.
    pub fn mirror(mut self, registry: &Server, mirror: String) -> Setup {
        self.registries.entry(registry.host()).or_default().mirrors.push(mirror);
        self
    }

    pub fn variable(mut self, name: &str, value: &str) -> Setup {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    pub fn login(self, user: &str, password: &str) -> Setup {
        Setup { login: Some((user.to_owned(), Secret::new(password))), ..self }
    }

    pub fn authfile(self, path: &Path) -> Setup {
        Setup { authfile: Some(path.to_owned()), ..self }
    }

    /// What `docker login` would have left.
    pub fn docker_config(self, content: &str) -> Setup {
        self.home.file(".docker/config.json", content);
        self
    }

    pub fn options(&self) -> ClientOptions {
        let home = self.home.path().to_str().unwrap().to_owned();
        let variables = self.variables.iter().cloned().chain([("HOME".to_owned(), home)]);
        let told = self.notes.clone();
        ClientOptions {
            registries: self.registries.clone(),
            authfile: self.authfile.clone(),
            login: self.login.clone(),
            environment: Environment::of(variables),
            timing: self.timing.clone(),
            notes: Notes::new(move |text| told.lock().unwrap().push(text.to_owned())),
        }
    }

    pub fn client(&self) -> Client {
        Client::new(self.options())
    }

    pub fn notes(&self) -> Vec<String> {
        self.notes.lock().unwrap().clone()
    }
}

/// `a/b:1` in this registry.
pub fn image(host: &str) -> Reference {
    Reference::parse(format!("docker://{host}/a/b:1").as_bytes()).unwrap()
}

pub fn descriptor(content: &[u8]) -> Descriptor {
    Descriptor {
        media_type: "application/vnd.oci.image.layer.v1.tar".to_owned(),
        digest: BlobDigest::from(sha256(content)),
        size: content.len() as u64,
        urls: Vec::new(),
        platform: None,
        annotations: Default::default(),
    }
}

/// Some content that does not repeat itself.
pub fn content(length: usize) -> Vec<u8> {
    (0..length as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

pub fn manifest_text() -> String {
    let part = |content: &[u8]| {
        format!(r#"{{"mediaType":"x","digest":"{}","size":{}}}"#, sha256(content), content.len())
    };
    format!(r#"{{"schemaVersion":2,"config":{},"layers":[{}]}}"#, part(b"{}"), part(b"layer"))
}

pub fn read(blob: Result<Blob, Failure>) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    blob?.read_to_end(&mut bytes).map_err(failure_of)?;
    Ok(bytes)
}

/// `user:password` as credential files have it.
pub fn encoded(login: &str) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(login)
}

#[track_caller]
pub fn assert_failure(failure: &Failure, message: &str, hint: &str) {
    assert_eq!(failure.message, message);
    assert_eq!(failure.hint.as_deref().unwrap_or(""), hint);
}
