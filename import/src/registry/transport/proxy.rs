//! The proxy for an address, as the environment says: HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY, in both cases.
//!
//! Run by: the user, in the importer.

use std::net::IpAddr;

use mizzen_core::Failure;

use super::url::{Scheme, Url};
use crate::registry::environment::Environment;

/// A proxy, and who says that it is to be used.
#[derive(Clone, Debug)]
pub struct Proxy {
    /// The variable.
    pub variable: &'static str,
    /// Its value, which may have a password in it.
    pub address: ureq::Proxy,
}

impl Proxy {
    /// For messages: the host without user and password.
    pub fn shown(&self) -> String {
        format!("the proxy {}:{} ({})", self.address.host(), self.address.port(), self.variable)
    }
}

/// The proxy for an address, if there is one.
pub fn proxy_for(environment: &Environment, url: &Url) -> Result<Option<Proxy>, Failure> {
    let names: &[&'static str] = match url.scheme {
        Scheme::Https => &["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"],
        Scheme::Http => &["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"],
    };
    let Some((variable, value)) = environment.first_text(names) else { return Ok(None) };
    let exceptions = environment.first_text(&["NO_PROXY", "no_proxy"]).unwrap_or_default().1;
    // As with curl and Go: no proxy can reach this machine's own services.
    if url.names_this_machine() || is_excepted(&exceptions, url) {
        return Ok(None);
    }
    match ureq::Proxy::new(value.trim()) {
        Ok(address) => Ok(Some(Proxy { variable, address })),
        // The value may have a password in it.
        Err(_) => Err(Failure::new(format!("{variable}: not the address of a proxy"))
            .hint("write http://HOST:PORT, https://HOST:PORT or socks5://HOST:PORT")),
    }
}

/// Whether NO_PROXY has the host: `*`, names with all below them, addresses, networks, each with a port or without.
fn is_excepted(exceptions: &str, url: &Url) -> bool {
    exceptions.split([',', ' ', '\t']).filter(|entry| !entry.is_empty()).any(|entry| {
        if entry == "*" {
            return true;
        }
        if let (Some((network, length)), Some(ip)) = (entry.split_once('/'), url.ip()) {
            return network
                .parse()
                .is_ok_and(|network| length.parse().is_ok_and(|length| is_in(ip, network, length)));
        }
        if entry.trim_matches(['[', ']']).parse::<IpAddr>().is_ok_and(|ip| url.ip() == Some(ip)) {
            return true;
        }
        let (name, port) = match entry.rsplit_once(':') {
            Some((name, port)) if port.parse::<u16>().is_ok() => (name, port.parse().ok()),
            _ => (entry, None),
        };
        let name = name.strip_prefix('*').unwrap_or(name).to_ascii_lowercase();
        let name = name.trim_start_matches('.');
        let below = url.host.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
        !name.is_empty() && below && port.is_none_or(|port: u16| port == url.port())
    })
}

fn is_in(ip: IpAddr, network: IpAddr, length: u32) -> bool {
    let mask = |bits: u32| if length == 0 { 0 } else { u128::MAX << bits.saturating_sub(length).min(127) };
    match (ip, network) {
        (IpAddr::V4(ip), IpAddr::V4(network)) => {
            (u128::from(ip.to_bits()) ^ u128::from(network.to_bits())) & mask(32) == 0
        }
        (IpAddr::V6(ip), IpAddr::V6(network)) => (ip.to_bits() ^ network.to_bits()) & mask(128) == 0,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(variables: &[(&str, &str)], url: &str) -> Option<String> {
        let environment = Environment::of(variables.iter().copied());
        proxy_for(&environment, &Url::parse(url).unwrap()).unwrap().map(|proxy| proxy.shown())
    }

    #[test]
    fn each_scheme_has_its_variable() {
        let both = [("HTTPS_PROXY", "http://u:secret@p.io:3128"), ("http_proxy", "q.io:80")];
        assert_eq!(chosen(&both, "https://a.io").as_deref(), Some("the proxy p.io:3128 (HTTPS_PROXY)"));
        assert_eq!(chosen(&both, "http://a.io").as_deref(), Some("the proxy q.io:80 (http_proxy)"));
        assert_eq!(chosen(&both, "https://localhost:5000"), None);
        assert_eq!(chosen(&both, "http://127.0.0.1:5000"), None);
        let all = [("all_proxy", "socks5://p.io")];
        assert_eq!(chosen(&all, "https://a.io").as_deref(), Some("the proxy p.io:1080 (all_proxy)"));
        assert_eq!(chosen(&[("HTTPS_PROXY", "")], "https://a.io"), None);
        let environment = Environment::of([("HTTPS_PROXY", "mail://u:secret@x")]);
        let failure = proxy_for(&environment, &Url::parse("https://a.io").unwrap()).unwrap_err();
        assert_eq!(failure.message, "HTTPS_PROXY: not the address of a proxy");
    }

    #[test]
    fn no_proxy_has_names_networks_and_ports() {
        for (exceptions, host, excepted) in [
            ("*", "a.io", true),
            ("a.io", "a.io", true),
            ("a.io", "b.a.io", true),
            ("a.io", "ba.io", false),
            (".a.io", "b.a.io", true),
            ("*.a.io", "b.a.io", true),
            ("A.IO", "a.io", true),
            ("x, a.io", "a.io", true),
            ("a.io:5000", "a.io", false),
            ("a.io:5000", "a.io:5000", true),
            ("10.0.0.0/8", "10.1.2.3", true),
            ("10.0.0.0/8", "11.1.2.3", false),
            ("0.0.0.0/0", "11.1.2.3", true),
            ("10.1.2.3/32", "10.1.2.3", true),
            ("10.1.2.3/99", "10.1.2.3", true),
            ("fd00::/8", "[fd12::1]", true),
            ("fd00::1", "[fd00::1]:5000", true),
            ("10.1.2.3", "10.1.2.3:5000", true),
            (",,", "a.io", false),
            ("", "a.io", false),
        ] {
            let url = Url::parse(&format!("https://{host}/")).unwrap();
            assert_eq!(is_excepted(exceptions, &url), excepted, "{exceptions} {host}");
        }
    }
}
