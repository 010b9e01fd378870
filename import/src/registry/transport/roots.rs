//! Whose certificates are believed: those of the machine, and for a host those that its configuration names.
//!
//! Run by: the user, in the importer.

use std::fs;
use std::path::{Path, PathBuf};

use mizzen::small_file::read_small;
use mizzen_core::Failure;
use ureq::tls::{Certificate, PemItem, parse_pem};

use crate::registry::environment::Environment;

/// The bundles of Debian, RHEL, SUSE, Alpine, and others like them; the first that is there holds.
const BUNDLES: [&str; 6] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/cacert.pem",
    "/etc/ssl/cert.pem",
];
/// Where Docker's and podman's administrators put the authorities of one registry.
const PER_HOST: [&str; 2] = ["/etc/containers/certs.d", "/etc/docker/certs.d"];
/// How long a file of certificates may be.
const LIMIT: usize = 16 << 20;

/// The certificates of the machine: what SSL_CERT_FILE and SSL_CERT_DIR say, else the system's bundle.
pub fn of_machine(environment: &Environment) -> Result<Vec<Certificate<'static>>, Failure> {
    let mut found = Vec::new();
    let told = (environment.path("SSL_CERT_FILE"), environment.path("SSL_CERT_DIR"));
    if let Some(file) = &told.0 {
        found.extend(read(file).map_err(|failure| failure.about("SSL_CERT_FILE"))?);
    }
    if let Some(directories) = &told.1 {
        for file in std::env::split_paths(directories).flat_map(|directory| files_of(&directory)) {
            // What is not a certificate may lie beside them.
            found.extend(read(&file).unwrap_or_default());
        }
    }
    if told == (None, None)
        && let Some(bundle) = BUNDLES.iter().map(Path::new).find(|bundle| bundle.exists())
    {
        found.extend(read(bundle)?);
    }
    Ok(found)
}

/// Files with more certificates for one host. Only `ca_file` of mizzen.toml has to be there.
pub fn files_for(environment: &Environment, authority: &str, ca_file: Option<&Path>) -> Vec<PathBuf> {
    let own = environment.config_home().map(|config| config.join("containers/certs.d"));
    let directories = own.into_iter().chain(PER_HOST.iter().map(PathBuf::from));
    let in_directory = |directory: PathBuf| {
        let mut files = files_of(&directory.join(authority));
        files.retain(|file| file.extension().is_some_and(|extension| extension == "crt"));
        files
    };
    ca_file.map(Path::to_owned).into_iter().chain(directories.flat_map(in_directory)).collect()
}

fn files_of(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.sort();
    files
}

/// The certificates in a file.
pub fn read(file: &Path) -> Result<Vec<Certificate<'static>>, Failure> {
    let about = |failure: Failure| failure.about(file.display());
    let bytes = read_small(file, LIMIT)
        .map_err(|error| about(Failure::caused_by("cannot read the certificates", error)))?;
    let items = parse_pem(&bytes).filter_map(Result::ok);
    let certificates: Vec<_> = items
        .filter_map(|item| match item {
            PemItem::Certificate(certificate) => Some(certificate),
            _ => None,
        })
        .collect();
    if certificates.is_empty() {
        return Err(about(Failure::new("there is no certificate in it"))
            .hint("a certificate is text between BEGIN CERTIFICATE and END CERTIFICATE"));
    }
    Ok(certificates)
}
