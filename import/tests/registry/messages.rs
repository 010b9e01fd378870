//! What users read when a registry does not give what they want.

use super::server::{Reply, Server};
use super::support::{assert_failure, image, setup};

#[test]
fn every_refusal_says_what_to_do() {
    let login = "`mizzen login HOST`, or --username and --password-stdin";
    for (reply, message, hint) in [
        (Reply::new(401), "it wants a login (401 Unauthorized)", login),
        (
            Reply::error(403, "DENIED", "requested access is denied"),
            "not allowed without a login (403 Forbidden: requested access is denied)",
            login,
        ),
        (
            Reply::error(404, "NAME_UNKNOWN", "repository name not known to registry"),
            "it has no image of that name (404 Not Found: repository name not known to registry)",
            "is the name right? if the image is private: `mizzen login HOST`",
        ),
        (
            Reply::error(404, "MANIFEST_UNKNOWN", "manifest unknown"),
            "it has no such tag or digest of that image (404 Not Found: manifest unknown)",
            "is the tag right? if the image is private: `mizzen login HOST`",
        ),
        (
            Reply::new(404),
            "it has no such image, or not with that tag (404 Not Found)",
            "are name and tag right? if the image is private: `mizzen login HOST`",
        ),
        (
            Reply::error(429, "TOOMANYREQUESTS", "slow down").header("Retry-After", "3600"),
            "too many requests (429 Too Many Requests: slow down)",
            "try again in 60 minutes",
        ),
        (Reply::new(429), "too many requests (429 Too Many Requests)", "try again later"),
        (Reply::new(502), "it answers 502 Bad Gateway", "it has a problem of its own; try again later"),
        (
            Reply::new(400),
            "it answers 400 Bad Request",
            "if it has TLS, plain_http in [registries.\"HOST\"] of mizzen.toml must not be true",
        ),
        (Reply::new(418), "it answers 418 I'm a teapot", ""),
        (Reply::new(307), "it answers 307 Temporary Redirect", ""),
        (Reply::error(418, "X", "a\\u001b[31m"), "it answers 418 I'm a teapot: a\\u{1b}[31m", ""),
    ] {
        let server = Server::start(move |_| reply.clone());
        let failure = setup().plain(&server).client().manifest(&image(&server.host())).unwrap_err();
        let host = server.host();
        let message = format!("{}: {host}: {message}", image(&host));
        assert_failure(&failure, &message, &hint.replace("HOST", &host));
    }
}

#[test]
fn who_is_logged_in_is_told_so() {
    let server = Server::start(|seen| match seen.authorization() {
        None => Reply::new(401).header("WWW-Authenticate", "Basic realm=\"x\""),
        Some(_) => Reply::error(403, "DENIED", "no"),
    });
    let config = format!(
        r#"{{"auths":{{"{}":{{"auth":"{}"}}}}}}"#,
        server.host(),
        super::support::encoded("me:secret")
    );
    let setup = setup().plain(&server).docker_config(&config);
    let failure = setup.client().manifest(&image(&server.host())).unwrap_err();
    let (host, file) = (server.host(), setup.home.path().join(".docker/config.json"));
    let message =
        format!("{}: {host}: not allowed for me, from {}: 403 Forbidden: no", image(&host), file.display());
    assert_failure(&failure, &message, "ask whoever keeps the image for the right to pull it");
}

#[test]
fn a_registry_that_is_not_there_is_not_waited_for() {
    let host = "127.0.0.1:9";
    let config = mizzen_core::config::RegistryConfig { plain_http: true, ..Default::default() };
    let mut setup = setup();
    setup.registries.insert(host.to_owned(), config);
    setup.timing.first_wait = std::time::Duration::from_secs(60);
    let failure = setup.client().manifest(&image(host)).unwrap_err();
    let message = format!("{}: {host}: cannot connect: Connection refused", image(host));
    assert_failure(&failure, &message, "nothing listens there at port 9; is the name right?");
}

#[test]
fn what_does_not_speak_http_is_told() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        use std::io::{Read, Write};
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 1000]);
            let _ = stream.write_all(b"SSH-2.0-OpenSSH_9\r\nmore\r\n\r\n");
        }
    });
    let config = mizzen_core::config::RegistryConfig { plain_http: true, ..Default::default() };
    let mut setup = setup();
    setup.registries.insert(host.clone(), config);
    let failure = setup.client().manifest(&image(&host)).unwrap_err();
    let expected = format!("{}: {host}: it does not speak HTTP: ", image(&host));
    assert!(failure.message.starts_with(&expected), "{failure}");
    assert!(failure.hint.unwrap().starts_with("if it has TLS, plain_http in "));
}
