//! The servers behind a registry's name: its mirrors, in the order of mizzen.toml, and itself.
//!
//! Run by: the user, in the importer.

use mizzen_core::Failure;
use mizzen_core::config::Registries;
use mizzen_core::reference::DOCKER_HUB;

use super::transport::{Scheme, Url};

/// The server of Docker Hub.
pub const DOCKER_HUB_SERVER: &str = "registry-1.docker.io";

/// One server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The name under which its credentials are kept, and for messages.
    pub host: String,
    /// Where it is.
    pub url: Url,
    /// What stands before the names of images there, as with proxies of several registries in one: `dockerhub/`.
    prefix: String,
    /// Whether it only stands in for the registry that was named.
    pub is_mirror: bool,
    /// Whether it is without TLS and mizzen.toml does not say so: on a machine of many users anybody may listen there.
    pub is_guessed: bool,
}

impl Endpoint {
    /// The registry itself. Without TLS only where mizzen.toml says so, or for `scheme`.
    pub fn of_registry(host: &str, scheme: Scheme) -> Result<Endpoint, Failure> {
        let server = if host == DOCKER_HUB { DOCKER_HUB_SERVER } else { host };
        let url = Url::new(scheme, server, "/")?;
        Ok(Endpoint {
            host: host.to_owned(),
            url,
            prefix: String::new(),
            is_mirror: false,
            is_guessed: false,
        })
    }

    /// The registry's mirrors.
    pub fn mirrors(host: &str, registries: &Registries) -> Result<Vec<Endpoint>, Failure> {
        let mirrors = registries.get(host).map_or(&[][..], |registry| &registry.mirrors);
        let endpoint = |mirror: &String| {
            let url = Url::parse(mirror)?;
            let prefix = url.path.trim_matches('/');
            let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
            let url = url.with_path("/");
            Ok(Endpoint { host: url.authority(), url, prefix, is_mirror: true, is_guessed: false })
        };
        mirrors.iter().map(endpoint).collect()
    }

    /// What an image is called there.
    pub fn repository(&self, repository: &str) -> String {
        format!("{}{repository}", self.prefix)
    }

    /// The address of something there.
    pub fn path(&self, repository: &str, kind: &str, name: &str) -> Url {
        self.url.with_path(format!("/v2/{}{repository}/{kind}/{name}", self.prefix))
    }

    /// The address at which a registry says that it is one.
    pub fn root(&self) -> Url {
        self.url.with_path("/v2/")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mizzen_core::config::RegistryConfig;

    #[test]
    fn mirrors_come_first_and_may_have_a_prefix() {
        let mirrors = vec!["https://m.site".to_owned(), "http://harbor.site:5000/hub/".to_owned()];
        let config = RegistryConfig { mirrors, ..RegistryConfig::default() };
        let registries = Registries::from([("docker.io".to_owned(), config)]);
        let found = Endpoint::mirrors("docker.io", &registries).unwrap();
        let addresses: Vec<String> =
            found.iter().map(|endpoint| endpoint.path("library/a", "manifests", "1").to_string()).collect();
        assert_eq!(
            addresses,
            [
                "https://m.site/v2/library/a/manifests/1",
                "http://harbor.site:5000/v2/hub/library/a/manifests/1"
            ]
        );
        assert_eq!(found[1].repository("library/a"), "hub/library/a");
        assert_eq!((found[1].host.as_str(), found[1].is_mirror), ("harbor.site:5000", true));
        let hub = Endpoint::of_registry("docker.io", Scheme::Https).unwrap();
        assert_eq!(hub.root().to_string(), "https://registry-1.docker.io/v2/");
        assert_eq!(hub.host, "docker.io");
    }
}
