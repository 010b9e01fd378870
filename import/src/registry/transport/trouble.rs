//! What can go wrong on the way to a server, in words that say what to do.
//!
//! Run by: the user, in the importer.

use std::io;
use std::time::Duration;

use mizzen_core::Failure;
use mizzen_core::failure::{cause, quote};
use rustls::{AlertDescription, CertificateError};

use super::address::LookupFailed;
use super::proxy::Proxy;
use super::url::{Scheme, Url};

/// A failure, and whether it is worth trying again.
#[derive(Debug)]
pub struct Trouble {
    /// For the user.
    pub failure: Failure,
    /// What may help.
    pub kind: TroubleKind,
}

/// What may help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TroubleKind {
    /// Time: a lost connection, a stall.
    Passing,
    /// So much time, if the server says it.
    Busy(Option<Duration>),
    /// Time as well, if it has worked before: nobody is there.
    Unreachable,
    /// Nothing but http.
    NotTls,
    /// Nothing.
    Lasting,
}

impl Trouble {
    /// One that time does not heal.
    pub fn lasting(failure: Failure) -> Trouble {
        Trouble { failure, kind: TroubleKind::Lasting }
    }

    /// Says in front what it is about.
    pub fn about(self, what: impl std::fmt::Display) -> Trouble {
        Trouble { failure: self.failure.about(what), ..self }
    }

    /// What came of a request.
    pub fn of_request(error: ureq::Error, url: &Url, proxy: Option<&Proxy>) -> Trouble {
        let (failure, kind) = explain(error, url, proxy);
        Trouble { failure: failure.about(url.authority()), kind }
    }

    /// What came of reading an answer.
    pub fn of_answer(error: &io::Error, url: &Url) -> Trouble {
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<ureq::Error>());
        let failure = match inner {
            Some(ureq::Error::Timeout(_)) => Failure::new("it sends nothing any more"),
            _ if error.kind() == io::ErrorKind::UnexpectedEof => Failure::new("the connection was lost"),
            _ => Failure::new(format!("the connection was lost: {}", quote(cause(error).as_bytes()))),
        };
        Trouble { failure: failure.about(url.authority()), kind: TroubleKind::Passing }
    }
}

const NO_WAY: &str = "is there a way from this machine to it? HTTPS_PROXY names a proxy";

fn explain(error: ureq::Error, url: &Url, proxy: Option<&Proxy>) -> (Failure, TroubleKind) {
    use TroubleKind::{Lasting, Passing, Unreachable};
    let through = |text: String| match proxy {
        Some(proxy) => format!("{text} (through {})", proxy.shown()),
        None => text,
    };
    match error {
        ureq::Error::Rustls(error) => of_tls(&error, url),
        ureq::Error::Io(error) => match inside(&error) {
            Some(error) => of_tls(error, url),
            None => of_connection(&error, url, proxy),
        },
        ureq::Error::Other(inner) => match inner.downcast::<Failure>() {
            Ok(failure) => (*failure, Lasting),
            Err(inner) => of_name(&inner.to_string(), inner.is::<LookupFailed>(), proxy),
        },
        ureq::Error::HostNotFound => of_name("it has no address", true, proxy),
        ureq::Error::Timeout(ureq::Timeout::Connect | ureq::Timeout::Resolve) => {
            (Failure::new(through("cannot connect: no answer".to_owned())).hint(NO_WAY), Unreachable)
        }
        ureq::Error::Timeout(_) => (Failure::new(through("no answer".to_owned())), Passing),
        ureq::Error::ConnectProxyFailed(reason) => {
            let (who, variable) =
                proxy.map_or_else(Default::default, |proxy| (proxy.shown(), proxy.variable));
            let failure =
                Failure::new(format!("{who} does not let us through: {}", quote(reason.as_bytes())));
            (
                failure.hint(format!("{variable} names the proxy, NO_PROXY what is reached without it")),
                Unreachable,
            )
        }
        ureq::Error::Protocol(error) => {
            let failure =
                Failure::new(format!("it does not speak HTTP: {}", quote(error.to_string().as_bytes())));
            (if url.scheme == Scheme::Http { failure.hint(not_plain(url)) } else { failure }, Lasting)
        }
        other => (Failure::new(quote(other.to_string().as_bytes())), Lasting),
    }
}

fn not_plain(url: &Url) -> String {
    format!(
        "if it has TLS, plain_http in [registries.\"{}\"] of mizzen.toml must not be true",
        url.authority()
    )
}

fn of_name(text: &str, is_lookup: bool, proxy: Option<&Proxy>) -> (Failure, TroubleKind) {
    let text = quote(text.as_bytes());
    match proxy {
        _ if !is_lookup => (Failure::new(text), TroubleKind::Lasting),
        Some(proxy) => {
            (Failure::new(format!("cannot find {}: {text}", proxy.shown())), TroubleKind::Unreachable)
        }
        None => (
            Failure::new(format!("cannot look up the name of the host ({text})")).hint(
                "a wrong name, or no way to the internet from here: HTTPS_PROXY names a proxy; or import on a machine that has one, \
                 and copy the file",
            ),
            TroubleKind::Unreachable,
        ),
    }
}

fn of_connection(error: &io::Error, url: &Url, proxy: Option<&Proxy>) -> (Failure, TroubleKind) {
    let cause = quote(cause(error).as_bytes());
    let connecting = [
        io::ErrorKind::ConnectionRefused,
        io::ErrorKind::HostUnreachable,
        io::ErrorKind::NetworkUnreachable,
        io::ErrorKind::AddrNotAvailable,
        io::ErrorKind::TimedOut,
    ];
    if !connecting.contains(&error.kind()) {
        let text = match error.kind() {
            io::ErrorKind::UnexpectedEof => "the connection was lost".to_owned(),
            _ => format!("the connection was lost: {cause}"),
        };
        return (Failure::new(text), TroubleKind::Passing);
    }
    let failure = match proxy {
        Some(proxy) => Failure::new(format!("cannot connect to {}: {cause}", proxy.shown()))
            .hint(format!("{} names the proxy, NO_PROXY what is reached without it", proxy.variable)),
        None if error.kind() == io::ErrorKind::ConnectionRefused => {
            Failure::new(format!("cannot connect: {cause}"))
                .hint(format!("nothing listens there at port {}; is the name right?", url.port()))
        }
        None => Failure::new(format!("cannot connect: {cause}")).hint(NO_WAY),
    };
    (failure, TroubleKind::Unreachable)
}

/// TLS's own error in one of input and output.
fn inside(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

fn of_tls(error: &rustls::Error, url: &Url) -> (Failure, TroubleKind) {
    let host = url.authority();
    let (text, hint) = match error {
        rustls::Error::InvalidCertificate(error) => of_certificate(error, &host),
        rustls::Error::InvalidMessage(_) => {
            let failure = Failure::new("it does not speak TLS")
                .hint(format!("if it has none: plain_http = true in [registries.\"{host}\"] of mizzen.toml"));
            return (failure, TroubleKind::NotTls);
        }
        rustls::Error::AlertReceived(AlertDescription::CertificateRequired) => {
            ("it wants a certificate of ours, and mizzen has none".to_owned(), None)
        }
        other => (format!("TLS: {}", quote(other.to_string().as_bytes())), None),
    };
    let failure = Failure::new(text);
    let failure = match hint {
        Some(hint) => failure.hint(hint),
        None => failure,
    };
    (failure, TroubleKind::Lasting)
}

fn of_certificate(error: &CertificateError, host: &str) -> (String, Option<String>) {
    let authority = || {
        Some(format!(
            "name its authority's certificate with ca_file in [registries.\"{host}\"] of mizzen.toml, \
             or with SSL_CERT_FILE"
        ))
    };
    match error {
        CertificateError::UnknownIssuer => {
            ("its certificate is of an authority that this machine does not know".to_owned(), authority())
        }
        CertificateError::NotValidForName => ("its certificate is for another name".to_owned(), None),
        CertificateError::NotValidForNameContext { presented, .. } => {
            let names: Vec<String> = presented.iter().take(5).map(|name| plain_name(name)).collect();
            let names = if names.is_empty() { "no name".to_owned() } else { names.join(", ") };
            (
                format!("its certificate is for another name: {names}"),
                Some("use the name that it has".to_owned()),
            )
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => (
            "its certificate has expired".to_owned(),
            Some("tell who runs it; or is this machine's clock wrong?".to_owned()),
        ),
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            ("its certificate is not valid yet".to_owned(), Some("is this machine's clock wrong?".to_owned()))
        }
        other if format!("{other:?}").contains("CaUsedAsEndEntity") => (
            "its certificate is that of an authority".to_owned(),
            Some("a server needs one of its own, with CA:FALSE, signed by the authority".to_owned()),
        ),
        other => {
            (format!("its certificate is not good: {}", quote(other.to_string().as_bytes())), authority())
        }
    }
}

/// `other.test` of `DnsName("other.test")`.
fn plain_name(name: &str) -> String {
    let inner = name.split_once('(').and_then(|(_, inner)| inner.strip_suffix(')')).unwrap_or(name);
    quote(inner.trim_matches('"').as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_nobody_knows_are_told() {
        let url = Url::parse("https://registry.test/v2/").unwrap();
        let unknown = || ureq::Error::Other(Box::new(LookupFailed("Name or service not known".to_owned())));
        let trouble = Trouble::of_request(unknown(), &url, None);
        assert_eq!(
            trouble.failure.message,
            "registry.test: cannot look up the name of the host (Name or service not known)"
        );
        assert!(
            trouble.failure.hint.unwrap().starts_with("a wrong name, or no way to the internet from here: ")
        );
        assert_eq!(trouble.kind, TroubleKind::Unreachable);
        let address = ureq::Proxy::new("http://u:secret@proxy.test:3128").unwrap();
        let proxy = Proxy { variable: "HTTPS_PROXY", address };
        let trouble = Trouble::of_request(unknown(), &url, Some(&proxy));
        assert_eq!(
            trouble.failure.message,
            "registry.test: cannot find the proxy proxy.test:3128 (HTTPS_PROXY): Name or service not known"
        );
    }

    #[test]
    fn silence_is_told() {
        let url = Url::parse("https://registry.test/v2/").unwrap();
        let trouble = Trouble::of_request(ureq::Error::Timeout(ureq::Timeout::Connect), &url, None);
        assert_eq!(trouble.failure.message, "registry.test: cannot connect: no answer");
        assert_eq!(trouble.failure.hint.as_deref(), Some(NO_WAY));
        let trouble = Trouble::of_request(ureq::Error::Timeout(ureq::Timeout::PerRead), &url, None);
        assert_eq!(
            (trouble.failure.message.as_str(), trouble.kind),
            ("registry.test: no answer", TroubleKind::Passing)
        );
        let unreachable = ureq::Error::Io(io::ErrorKind::NetworkUnreachable.into());
        let trouble = Trouble::of_request(unreachable, &url, None);
        assert_eq!(trouble.failure.message, "registry.test: cannot connect: network unreachable");
        assert_eq!(trouble.failure.hint.as_deref(), Some(NO_WAY));
    }
}
