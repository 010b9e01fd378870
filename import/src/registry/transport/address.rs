//! Which addresses may be asked. A registry can name other hosts, in redirects and as the place where tokens are given. It
//! must not make us ask what only this machine can reach: its own services, and those of the cloud behind link-local addresses.
//!
//! Run by: the user, in the importer.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, ToSocketAddrs};

use mizzen_core::Failure;
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;

use super::url::Url;

/// What may be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reach {
    /// Anything: the user has named the host.
    Any,
    /// Not link-local addresses: named by a host on this machine, which may name others on it.
    NotLinkLocal,
    /// Nor this machine.
    NotThisMachine,
}

/// Where clouds of Amazon keep a machine's secrets, in IPv6.
const AMAZON: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);

impl Reach {
    /// What a host may name.
    pub fn of_named_by(named: &Url) -> Reach {
        let here = |ip: IpAddr| ip.to_canonical().is_loopback();
        let local = named.names_this_machine()
            || (named.host.trim_matches(['[', ']']), named.port())
                .to_socket_addrs()
                .is_ok_and(|mut addresses| addresses.any(|address| here(address.ip())));
        if local { Reach::NotLinkLocal } else { Reach::NotThisMachine }
    }

    /// Why an address may not be asked.
    pub fn refusal(self, ip: IpAddr) -> Option<&'static str> {
        let ip = ip.to_canonical();
        let link_local = match ip {
            IpAddr::V4(ip) => ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_unicast_link_local() || ip == AMAZON,
        };
        match self {
            Reach::Any => None,
            _ if link_local => Some("a link-local address"),
            Reach::NotThisMachine if ip.is_loopback() || ip.is_unspecified() => {
                Some("an address of this machine")
            }
            _ => None,
        }
    }
}

/// A name that nobody knows.
#[derive(Debug)]
pub struct LookupFailed(pub String);

impl fmt::Display for LookupFailed {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for LookupFailed {}

/// Looks names up, and refuses addresses that may not be asked.
#[derive(Debug)]
pub struct GuardedResolver {
    /// What may be asked.
    pub reach: Reach,
    /// The system's own.
    pub inner: DefaultResolver,
}

impl Resolver for GuardedResolver {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let addresses = self.inner.resolve(uri, config, timeout).map_err(|error| match error {
            ureq::Error::Io(error) => {
                let text = error.to_string();
                let text = text.strip_prefix("failed to lookup address information: ").unwrap_or(&text);
                ureq::Error::Other(Box::new(LookupFailed(text.to_owned())))
            }
            other => other,
        })?;
        // The proxy is the user's own.
        if config.proxy().is_some_and(|proxy| proxy.uri() == uri) {
            return Ok(addresses);
        }
        match addresses.iter().find_map(|address| self.reach.refusal(address.ip())) {
            Some(what) => Err(ureq::Error::Other(Box::new(refused(uri.host().unwrap_or_default(), what)))),
            None => Ok(addresses),
        }
    }
}

/// A host that may not be asked.
pub fn refused(host: &str, what: &str) -> Failure {
    Failure::new(format!("{host} is {what}, where a registry must not send us"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registry_must_not_send_us_home() {
        for (ip, link_local, here) in [
            ("169.254.169.254", true, false),
            ("fe80::1", true, false),
            ("::ffff:169.254.169.254", true, false),
            ("fd00:ec2::254", true, false),
            ("127.0.0.53", false, true),
            ("::1", false, true),
            ("::ffff:127.0.0.1", false, true),
            ("0.0.0.0", false, true),
            ("::", false, true),
            ("10.1.2.3", false, false),
            ("8.8.8.8", false, false),
            ("fd00::1", false, false),
        ] {
            let ip = ip.parse().unwrap();
            assert_eq!(Reach::Any.refusal(ip), None);
            assert_eq!(Reach::NotLinkLocal.refusal(ip).is_some(), link_local, "{ip}");
            assert_eq!(Reach::NotThisMachine.refusal(ip).is_some(), link_local || here, "{ip}");
        }
        let reach = |text: &str| Reach::of_named_by(&Url::parse(text).unwrap());
        assert_eq!(reach("http://127.0.0.1:5000"), Reach::NotLinkLocal);
        assert_eq!(reach("http://localhost"), Reach::NotLinkLocal);
        assert_eq!(reach("https://8.8.8.8"), Reach::NotThisMachine);
    }
}
