//! Addresses on the web, as far as registries need them: http and https, and what a redirect makes of them.
//!
//! Run by: the user, in the importer.

use std::fmt;
use std::net::IpAddr;

use mizzen_core::Failure;
use mizzen_core::failure::quote;

/// How long an address may be. Those of storage with signatures in them have some kilobytes.
const LIMIT: usize = 32 << 10;

/// With TLS or without.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scheme {
    /// Anybody on the way reads and writes.
    Http,
    /// The server shows a certificate.
    Https,
}

impl Scheme {
    fn default_port(self) -> u16 {
        match self {
            Scheme::Http => 80,
            Scheme::Https => 443,
        }
    }

    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Scheme::Http => "http",
            Scheme::Https => "https",
        }
    }
}

/// An address without a user and without a fragment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Url {
    /// With TLS or without.
    pub scheme: Scheme,
    /// A name in lower case, or an address; in brackets if it is one of IPv6.
    pub host: String,
    /// None for the usual one.
    port: Option<u16>,
    /// Path and query, beginning with a slash.
    pub path: String,
}

impl Url {
    /// What stands in a registry's name, `HOST[:PORT]`, and a path on it.
    pub fn new(scheme: Scheme, authority: &str, path: impl Into<String>) -> Result<Url, Failure> {
        let (host, port) = split_authority(authority)
            .ok_or_else(|| Failure::new(format!("\"{}\" is not a host", quote(authority.as_bytes()))))?;
        Ok(Url { scheme, host, port: port.filter(|port| *port != scheme.default_port()), path: path.into() })
    }

    /// Reads a whole address.
    pub fn parse(text: &str) -> Result<Url, Failure> {
        let bad = |problem: &str| Failure::new(format!("{}: {problem}", shown(text)));
        if text.len() > LIMIT {
            return Err(bad("too long an address"));
        }
        let (scheme, rest) = match text.split_once(':') {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("https") => (Scheme::Https, rest),
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => (Scheme::Http, rest),
            _ => return Err(bad("neither https:// nor http://")),
        };
        let rest = rest.strip_prefix("//").ok_or_else(|| bad("neither https:// nor http://"))?;
        let rest = rest.split('#').next().unwrap_or_default();
        // Visible ASCII only: anything else would be read differently by others.
        if !rest.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\') {
            return Err(bad("not an address"));
        }
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        if authority.contains('@') {
            return Err(bad("an address with a user in it"));
        }
        let (host, port) = split_authority(authority).ok_or_else(|| bad("not an address"))?;
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        Ok(Url { scheme, host, port: port.filter(|port| *port != scheme.default_port()), path })
    }

    /// Where a redirect leads to from here.
    pub fn join(&self, location: &str) -> Result<Url, Failure> {
        let location = location.trim_matches([' ', '\t']);
        let scheme = self.scheme.name();
        let authority = self.authority();
        if location.starts_with("//") {
            Url::parse(&format!("{scheme}:{location}"))
        } else if location.starts_with('/') {
            Url::parse(&format!("{scheme}://{authority}{location}"))
        } else if has_scheme(location) {
            Url::parse(location)
        } else {
            let path = self.path.split('?').next().unwrap_or_default();
            let directory = match location.starts_with('?') {
                true => path,
                false => &path[..path.rfind('/').map_or(0, |slash| slash + 1)],
            };
            Url::parse(&format!("{scheme}://{authority}{directory}{location}"))
        }
    }

    /// Something else on the same server.
    pub fn with_path(&self, path: impl Into<String>) -> Url {
        Url { path: path.into(), ..self.clone() }
    }

    /// The same with these parameters behind.
    pub fn with_query(mut self, parameters: &[(&str, &str)]) -> Url {
        let text = form(parameters);
        if !text.is_empty() {
            self.path.push(if self.path.contains('?') { '&' } else { '?' });
            self.path.push_str(&text);
        }
        self
    }

    /// Host and port, the port only if it is not the usual one.
    pub fn authority(&self) -> String {
        match self.port {
            Some(port) => format!("{}:{port}", self.host),
            None => self.host.clone(),
        }
    }

    /// The port, told or not.
    pub fn port(&self) -> u16 {
        self.port.unwrap_or(self.scheme.default_port())
    }

    /// Whether what is meant for `self` may be told there: the same host and port, and not without TLS after it.
    pub fn trusts(&self, other: &Url) -> bool {
        // The usual ports of http and https belong together.
        self.host == other.host && other.scheme >= self.scheme && self.port == other.port
    }

    /// Its address, if it is one.
    pub fn ip(&self) -> Option<IpAddr> {
        self.host.trim_start_matches('[').trim_end_matches(']').parse().ok()
    }

    /// Whether by its name it is this machine.
    pub fn names_this_machine(&self) -> bool {
        match self.ip() {
            Some(ip) => ip.to_canonical().is_loopback(),
            None => self.host == "localhost" || self.host.ends_with(".localhost"),
        }
    }
}

impl fmt::Display for Url {
    /// Whole, also with what makes it a secret: for requests, not for messages.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}://{}{}", self.scheme.name(), self.authority(), self.path)
    }
}

/// `application/x-www-form-urlencoded`.
pub fn form(parameters: &[(&str, &str)]) -> String {
    let pair = |(name, value): &(&str, &str)| format!("{}={}", escape(name), escape(value));
    parameters.iter().map(pair).collect::<Vec<_>>().join("&")
}

fn escape(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' | b':' => {
                char::from(byte).to_string()
            }
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

/// An address for a message: its query can be a secret (signatures of storage), and what stands before an @ also.
pub fn shown(text: &str) -> String {
    let text = text.split(['?', '#']).next().unwrap_or_default();
    let text = match (text.split_once("://"), text.rfind('@')) {
        (Some((scheme, _)), Some(at)) => format!("{scheme}://…{}", &text[at..]),
        (None, Some(at)) => format!("…{}", &text[at..]),
        _ => text.to_owned(),
    };
    quote(text.as_bytes())
}

fn has_scheme(text: &str) -> bool {
    let letters =
        text.bytes().take_while(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(byte)).count();
    letters > 0 && text.as_bytes().get(letters) == Some(&b':')
}

/// Host in lower case, and port.
fn split_authority(text: &str) -> Option<(String, Option<u16>)> {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port)),
        _ => (text, None),
    };
    let port = match port {
        Some(port) => Some(port.parse::<u16>().ok().filter(|port| *port > 0)?),
        None => None,
    };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    let good = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.len() <= 255 && host.bytes().all(plain),
    };
    good.then(|| (host.to_ascii_lowercase(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap()
    }

    #[test]
    fn addresses_are_read_and_written() {
        for (text, whole) in [
            ("https://host.io", "https://host.io/"),
            ("HTTPS://Host.IO:443/A?b=C#d", "https://host.io/A?b=C"),
            ("http://[::1]:5000/v2/", "http://[::1]:5000/v2/"),
            ("https://host.io?x", "https://host.io/?x"),
        ] {
            assert_eq!(url(text).to_string(), whole);
        }
        for (text, problem) in [
            ("file:///etc/passwd", "file:///etc/passwd: neither https:// nor http://"),
            ("ftp://a/b", "ftp://a/b: neither https:// nor http://"),
            ("https:a", "https:a: neither https:// nor http://"),
            ("https://u:secret@host/?q", "https://…@host/: an address with a user in it"),
            ("https:///path", "https:///path: not an address"),
            ("https://a:99999/", "https://a:99999/: not an address"),
            ("https://a/b c?secret", "https://a/b c: not an address"),
            ("https://a\\@b/", "https://…@b/: not an address"),
            ("https://[::1/", "https://[::1/: not an address"),
        ] {
            assert_eq!(Url::parse(text).unwrap_err().message, problem);
        }
        assert!(Url::parse(&format!("https://a/{}", "x".repeat(LIMIT))).is_err());
    }

    #[test]
    fn redirects_lead_on() {
        let from = url("https://host.io:5000/v2/a/blobs/x?y=1");
        for (location, to) in [
            ("https://other.io/b", "https://other.io/b"),
            ("//other.io/b", "https://other.io/b"),
            ("/b/c?d", "https://host.io:5000/b/c?d"),
            ("b", "https://host.io:5000/v2/a/blobs/b"),
            ("?z", "https://host.io:5000/v2/a/blobs/x?z"),
            (" https://other.io/ ", "https://other.io/"),
        ] {
            assert_eq!(from.join(location).unwrap().to_string(), to);
        }
        assert!(from.join("file:/etc/passwd").unwrap_err().message.ends_with("neither https:// nor http://"));
        assert!(from.join("javascript:x").is_err());
    }

    #[test]
    fn secrets_are_told_to_the_same_host_only() {
        for (from, to, good) in [
            ("https://a.io/", "https://a.io/x", true),
            ("https://a.io/", "https://a.io:443/x", true),
            ("https://a.io/", "http://a.io/", false),
            ("http://a.io/", "https://a.io/", true),
            ("http://a.io:5000/", "https://a.io/", false),
            ("https://a.io/", "https://a.io:8443/", false),
            ("https://a.io/", "https://b.a.io/", false),
            ("https://a.io/", "https://a.io.b.io/", false),
        ] {
            assert_eq!(url(from).trusts(&url(to)), good, "{from} {to}");
        }
    }

    #[test]
    fn parameters_are_escaped() {
        let query = [("scope", "repository:a/b:pull"), ("service", "x y&z=ü")];
        assert_eq!(
            url("https://a/token?x=1").with_query(&query).to_string(),
            "https://a/token?x=1&scope=repository:a/b:pull&service=x%20y%26z%3D%C3%BC"
        );
        assert_eq!(url("https://a/token").with_query(&[]).to_string(), "https://a/token");
    }
}
