//! TLS, certificates and proxies.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use mizzen_core::config::RegistryConfig;

use super::server::{Reply, Server};
use super::support::{Setup, assert_failure, certificate, encoded, image, manifest_text, setup};

fn with_certificate(name: &str) -> (Server, String) {
    let server = Server::start_tls(name, |_| Reply::ok(manifest_text()));
    let host = format!("localhost:{}", server.port());
    (server, host)
}

/// Known to mizzen.toml, which says nothing special about it.
fn known(mut setup: Setup, host: &str) -> Setup {
    setup.registries.insert(host.to_owned(), RegistryConfig::default());
    setup
}

#[test]
fn an_own_authority_is_believed_where_it_is_named() {
    let (_server, host) = with_certificate("good.pem");
    setup().tls(&host).client().manifest(&image(&host)).unwrap();
    let file = certificate("ca.pem");
    let file = file.to_str().unwrap();
    known(setup(), &host).variable("SSL_CERT_FILE", file).client().manifest(&image(&host)).unwrap();
    let directory = setup();
    directory.home.file("certs/some.pem", &std::fs::read_to_string(file).unwrap());
    directory.home.file("certs/README", "nothing");
    let path = directory.home.path().join("certs");
    let directory = known(directory, &host).variable("SSL_CERT_DIR", path.to_str().unwrap());
    directory.client().manifest(&image(&host)).unwrap();
    // As podman's users do it.
    let podman = known(setup(), &host);
    let name = format!(".config/containers/certs.d/{host}/ca.crt");
    podman.home.file(&name, &std::fs::read_to_string(file).unwrap());
    podman.client().manifest(&image(&host)).unwrap();
}

#[test]
fn certificates_that_are_not_good_say_why() {
    for (name, problem, hint) in [
        ("expired.pem", "its certificate has expired", "tell who runs it; or is this machine's clock wrong?"),
        ("other.pem", "its certificate is for another name: other.test", "use the name that it has"),
        (
            "self.pem",
            "its certificate is that of an authority",
            "a server needs one of its own, with CA:FALSE, signed by the authority",
        ),
    ] {
        let (server, host) = with_certificate(name);
        let failure = setup().tls(&host).client().manifest(&image(&host)).unwrap_err();
        assert_failure(&failure, &format!("{}: {host}: {problem}", image(&host)), hint);
        assert!(server.log().is_empty());
    }
    let (server, host) = with_certificate("good.pem");
    let failure = known(setup(), &host).client().manifest(&image(&host)).unwrap_err();
    assert_failure(
        &failure,
        &format!(
            "{}: {host}: its certificate is of an authority that this machine does not know",
            image(&host)
        ),
        &format!(
            "name its authority's certificate with ca_file in [registries.\"{host}\"] of mizzen.toml, or with SSL_CERT_FILE"
        ),
    );
    assert!(server.log().is_empty());
}

#[test]
fn files_of_certificates_that_are_not_good_are_named() {
    let (_server, host) = with_certificate("good.pem");
    let setup = setup();
    let empty = setup.home.file("empty.pem", "nothing");
    for (file, problem) in [
        (empty.clone(), format!("{}: there is no certificate in it", empty.display())),
        (
            "/no/such.pem".into(),
            "/no/such.pem: cannot read the certificates: No such file or directory".to_owned(),
        ),
    ] {
        let mut setup = super::support::setup();
        setup
            .registries
            .insert(host.clone(), RegistryConfig { ca_file: Some(file), ..RegistryConfig::default() });
        let failure = setup.client().manifest(&image(&host)).unwrap_err();
        assert_eq!(failure.message, format!("{}: {problem}", image(&host)));
    }
    let setup = known(setup, &host).variable("SSL_CERT_FILE", "/no/such.pem");
    let failure = setup.client().manifest(&image(&host)).unwrap_err();
    assert!(failure.message.contains(": SSL_CERT_FILE: /no/such.pem: cannot read"), "{failure}");
}

#[test]
fn a_server_without_tls_is_recognised() {
    let server = Server::start(|_| Reply::ok(manifest_text()));
    let setup = known(setup(), &server.host());
    let failure = setup.client().manifest(&image(&server.host())).unwrap_err();
    let host = server.host();
    assert_failure(
        &failure,
        &format!("{}: {host}: it does not speak TLS", image(&host)),
        &format!("if it has none: plain_http = true in [registries.\"{host}\"] of mizzen.toml"),
    );
    assert!(server.log().is_empty());
}

#[test]
fn on_this_machine_a_registry_may_do_without_tls() {
    let server = Server::start(|_| Reply::ok(manifest_text()));
    let client = setup().client();
    client.manifest(&image(&server.host())).unwrap();
    client.manifest(&image(&server.host())).unwrap();
    let log = ["GET /v2/ []", "GET /v2/a/b/manifests/1 []", "GET /v2/a/b/manifests/1 []"];
    assert_eq!(server.log(), log);
    // One with a bad certificate is not spoken to without.
    let (server, host) = with_certificate("expired.pem");
    let failure = setup().client().manifest(&image(&host)).unwrap_err();
    assert!(failure.message.contains("its certificate "), "{failure}");
    assert!(server.log().is_empty());
}

/// A proxy that connects to one server, whatever it is asked for.
/// On a machine of many users anybody may listen at that port.
#[test]
fn on_this_machine_a_registry_without_tls_gets_no_credentials() {
    let challenge = |_: &_| Reply::new(401).header("www-authenticate", "Basic realm=\"x\"");
    let server = Server::start(challenge);
    let host = format!("127.0.0.1:{}", server.port());
    let failure = setup().login("alice", "secret").client().manifest(&image(&host)).unwrap_err();
    assert_failure(
        &failure,
        &format!("{}: {host} has no TLS, so it gets no credentials", image(&host)),
        &format!("if that is meant: plain_http = true below [registries.\"{host}\"] in mizzen.toml"),
    );
    let log = server.log();
    assert!(!log.is_empty() && log.iter().all(|request| request.ends_with(" []")), "{log:?}");
}

fn proxy(to: SocketAddr, answer: &'static str) -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let log = Arc::new(Mutex::new(Vec::new()));
    let seen = log.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, seen) = (stream.unwrap(), seen.clone());
            std::thread::spawn(move || {
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                let mut head = String::new();
                while !head.ends_with("\r\n\r\n") && reader.read_line(&mut head).unwrap() > 0 {}
                seen.lock().unwrap().push(head);
                let mut stream = stream;
                stream.write_all(format!("HTTP/1.1 {answer}\r\n\r\n").as_bytes()).unwrap();
                if !answer.starts_with("200") {
                    return;
                }
                let mut server = TcpStream::connect(to).unwrap();
                let (mut back, mut client) = (server.try_clone().unwrap(), stream.try_clone().unwrap());
                std::thread::spawn(move || std::io::copy(&mut back, &mut client));
                let _ = std::io::copy(&mut reader, &mut server);
            });
        }
    });
    (address, log)
}

#[test]
fn a_proxy_is_used_and_may_want_a_password() {
    let server = Server::start_tls("good.pem", |_| Reply::ok(manifest_text()));
    let (address, log) = proxy(server.address, "200 OK");
    let setup = setup().tls("registry.test").variable("HTTPS_PROXY", &format!("http://u:p%40ss@{address}"));
    setup.client().manifest(&image("registry.test")).unwrap();
    assert_eq!(server.log(), ["GET /v2/a/b/manifests/1 []"]);
    let head = log.lock().unwrap()[0].clone();
    assert!(head.starts_with("CONNECT registry.test:443 HTTP/1.1\r\n"), "{head}");
    assert!(head.contains(&format!("Proxy-Authorization: Basic {}\r\n", encoded("u:p@ss"))), "{head}");
}

#[test]
fn proxies_that_do_not_help_are_named() {
    let server = Server::start(|_| Reply::new(200));
    let (address, _) = proxy(server.address, "407 Proxy Authentication Required");
    let secret = format!("http://u:secret@{address}");
    let failure = known(setup(), "registry.test")
        .variable("https_proxy", &secret)
        .client()
        .manifest(&image("registry.test"))
        .unwrap_err();
    assert_failure(
        &failure,
        &format!(
            "{}: registry.test: the proxy {address} (https_proxy) does not let us through: proxy server responded 407/407",
            image("registry.test")
        ),
        "https_proxy names the proxy, NO_PROXY what is reached without it",
    );
    let setup = known(setup(), "registry.test").variable("HTTPS_PROXY", "http://u:secret@127.0.0.1:9");
    let failure = setup.client().manifest(&image("registry.test")).unwrap_err();
    assert_failure(
        &failure,
        &format!(
            "{}: registry.test: cannot connect to the proxy 127.0.0.1:9 (HTTPS_PROXY): Connection refused",
            image("registry.test")
        ),
        "HTTPS_PROXY names the proxy, NO_PROXY what is reached without it",
    );
}

#[test]
fn a_registry_elsewhere_cannot_send_us_to_this_machine() {
    let here = Server::start_tls("good.pem", |_| Reply::ok("inner secrets"));
    let to = format!("https://127.0.0.1:{}/", here.port());
    let server = Server::start_tls("good.pem", move |_| Reply::redirect(&to));
    let (address, _) = proxy(server.address, "200 OK");
    let setup = setup().tls("registry.test").variable("HTTPS_PROXY", &format!("http://{address}"));
    let failure = setup.client().manifest(&image("registry.test")).unwrap_err();
    let expected = "127.0.0.1 is an address of this machine, where a registry must not send us";
    assert_eq!(failure.message, format!("{}: {expected}", image("registry.test")));
    assert!(here.log().is_empty());
}

/// Docker Hub and the server that gives its tokens, both behind one proxy.
fn docker_hub(reply: Reply) -> (Server, Setup) {
    let server =
        Server::start_tls("good.pem", move |seen| match (seen.path.as_str(), seen.authorization()) {
            (path, _) if path.starts_with("/token") => Reply::ok(r#"{"token":"t","expires_in":300}"#),
            (_, Some("Bearer t")) => reply.clone(),
            _ => Reply::challenge("https://auth.docker.io/token"),
        });
    let (address, _) = proxy(server.address, "200 OK");
    let file = certificate("ca.pem");
    let setup = setup().variable("SSL_CERT_FILE", file.to_str().unwrap());
    (server, setup.variable("HTTPS_PROXY", &format!("http://{address}")))
}

#[test]
fn docker_hub_has_other_names_inside() {
    let (server, setup) = docker_hub(Reply::ok(manifest_text()));
    let auth = encoded("me:secret");
    let setup =
        setup.docker_config(&format!(r#"{{"auths":{{"https://index.docker.io/v1/":{{"auth":"{auth}"}}}}}}"#));
    setup.client().manifest(&image("docker.io")).unwrap();
    let seen = server.seen();
    let hosts: Vec<&str> = seen.iter().map(|seen| seen.header("host").unwrap()).collect();
    assert_eq!(hosts, ["registry-1.docker.io", "auth.docker.io", "registry-1.docker.io"]);
    assert_eq!(seen[1].authorization(), Some(format!("Basic {auth}").as_str()));
    assert_eq!(seen[2].authorization(), Some("Bearer t"));
}

#[test]
fn docker_hub_has_messages_of_its_own() {
    let denied = Reply::error(401, "UNAUTHORIZED", "authentication required");
    let (_server, setup) = docker_hub(denied);
    let failure = setup.client().manifest(&image("docker.io")).unwrap_err();
    assert_failure(
        &failure,
        "docker://docker.io/a/b:1: docker.io: there is no such image, or it is private (401 Unauthorized: \
         authentication required)",
        "is the name right? if the image is private: `mizzen login docker.io`",
    );
    let limit = Reply::error(429, "TOOMANYREQUESTS", "You have reached your pull rate limit.");
    let (_server, setup) = docker_hub(limit.header("Retry-After", "9000"));
    let failure = setup.client().manifest(&image("docker.io")).unwrap_err();
    assert_failure(
        &failure,
        "docker://docker.io/a/b:1: docker.io: too many requests (429 Too Many Requests: You have reached your pull \
         rate limit.)",
        "try again in 150 minutes; `mizzen login docker.io` raises the limit",
    );
}
