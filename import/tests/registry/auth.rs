//! Who gets to see which credentials.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::server::{Manner, Reply, Seen, Server};
use super::support::{Scratch, Setup, content, descriptor, encoded, image, manifest_text, read, setup};

/// A server that gives tokens: `token-1`, `token-2` and so on.
fn token_server() -> Server {
    let count = AtomicUsize::new(1);
    Server::start(move |_| {
        let number = count.fetch_add(1, Ordering::Relaxed);
        Reply::ok(format!(r#"{{"token":"token-{number}","expires_in":300}}"#))
    })
}

/// A registry that lets in whoever has this token.
fn registry(realm: String, token: &'static str) -> Server {
    Server::start(move |seen| {
        if seen.authorization() == Some(token) {
            Reply::ok(manifest_text())
        } else {
            Reply::challenge(&realm)
        }
    })
}

const TOKEN_PATH: &str = "/token?service=the%20registry&scope=repository:a/b:pull";

#[test]
fn nobody_gets_a_token_without_credentials() {
    let tokens = token_server();
    let server = registry(tokens.url("/token"), "Bearer token-1");
    let client = setup().plain(&server).client();
    client.manifest(&image(&server.host())).unwrap();
    client.manifest(&image(&server.host())).unwrap();
    assert_eq!(tokens.log(), [format!("GET {TOKEN_PATH} []")]);
    assert_eq!(
        server.log(),
        [
            "GET /v2/a/b/manifests/1 []",
            "GET /v2/a/b/manifests/1 [Bearer token-1]",
            "GET /v2/a/b/manifests/1 [Bearer token-1]"
        ]
    );
}

#[test]
fn the_password_goes_to_the_realm_and_the_token_to_the_registry() {
    let tokens = token_server();
    let server = registry(tokens.url("/token"), "Bearer token-1");
    let client = setup().plain(&server).login("me", "secret").client();
    client.manifest(&image(&server.host())).unwrap();
    assert_eq!(tokens.log(), [format!("GET {TOKEN_PATH}&account=me [Basic {}]", encoded("me:secret"))]);
    let log = server.log();
    assert_eq!(log, ["GET /v2/a/b/manifests/1 []", "GET /v2/a/b/manifests/1 [Bearer token-1]"]);
}

#[test]
fn an_identity_token_is_exchanged_by_post() {
    let tokens = Server::start(|_| Reply::ok(r#"{"access_token":"token-1"}"#));
    let server = registry(tokens.url("/token"), "Bearer token-1");
    let auth = encoded("me:");
    let config =
        format!(r#"{{"auths":{{"{}":{{"auth":"{auth}","identitytoken":"my+identity"}}}}}}"#, server.host());
    let setup = setup().plain(&server).docker_config(&config);
    setup.client().manifest(&image(&server.host())).unwrap();
    assert_eq!(tokens.log(), ["POST /token []"]);
    let form = "service=the%20registry&scope=repository:a/b:pull&grant_type=refresh_token&client_id=mizzen\
                &refresh_token=my%2Bidentity";
    assert_eq!(tokens.seen()[0].body, form);
    assert_eq!(tokens.seen()[0].header("content-type"), Some("application/x-www-form-urlencoded"));
}

#[test]
fn a_registry_token_is_good_as_it_is() {
    let server = registry("http://127.0.0.1:1/".to_owned(), "Bearer mine");
    let config = format!(r#"{{"auths":{{"{}":{{"registrytoken":"mine"}}}}}}"#, server.host());
    setup().plain(&server).docker_config(&config).client().manifest(&image(&server.host())).unwrap();
    assert_eq!(server.log().len(), 2);
}

#[test]
fn basic_authentication_waits_until_it_is_asked_for() {
    let good = format!("Basic {}", encoded("$oauthtoken:key"));
    let server = Server::start(move |seen| match seen.authorization() {
        Some(header) if header == good => Reply::ok(manifest_text()),
        _ => Reply::new(401).header("WWW-Authenticate", "Basic realm=\"x\""),
    });
    let config =
        format!(r#"{{"auths":{{"{}":{{"auth":"{}"}}}}}}"#, server.host(), encoded("$oauthtoken:key"));
    let setup = setup().plain(&server).docker_config(&config);
    setup.client().manifest(&image(&server.host())).unwrap();
    let expected = format!("GET /v2/a/b/manifests/1 [Basic {}]", encoded("$oauthtoken:key"));
    assert_eq!(server.log(), ["GET /v2/a/b/manifests/1 []", &expected]);
}

/// A blob that is cut, and a token that has ended then.
fn ends_in_the_middle(realm: String) -> Server {
    Server::start(move |seen| match (seen.authorization(), seen.offset()) {
        (Some("Bearer token-1"), 0) => Reply::ok(content(100_000)).manner(Manner::Cut(40_000)),
        (Some("Bearer token-2"), 1..) => Reply::ranged(seen, &content(100_000)),
        _ => Reply::challenge(&realm),
    })
}

#[test]
fn a_token_that_ends_in_the_middle_is_renewed() {
    let tokens = token_server();
    let server = ends_in_the_middle(tokens.url("/token"));
    let client = setup().plain(&server).client();
    let blob = descriptor(&content(100_000));
    assert!(read(client.blob(&image(&server.host()), &blob)).unwrap() == content(100_000));
    let path = format!("GET /v2/a/b/blobs/{}", blob.digest);
    assert_eq!(
        server.log(),
        [
            format!("{path} []"),
            format!("{path} [Bearer token-1]"),
            format!("{path} bytes=40000- [Bearer token-1]"),
            format!("{path} bytes=40000- [Bearer token-2]"),
        ]
    );
    assert_eq!(tokens.log().len(), 2);
}

#[test]
fn a_token_is_renewed_before_it_ends() {
    let count = AtomicUsize::new(1);
    let tokens = Server::start(move |_| {
        let number = count.fetch_add(1, Ordering::Relaxed);
        Reply::ok(format!(r#"{{"token":"token-{number}","expires_in":1}}"#))
    });
    let realm = tokens.url("/token");
    let server = Server::start(move |seen| match seen.authorization() {
        None => Reply::challenge(&realm),
        Some(_) => Reply::ok(manifest_text()),
    });
    let client = setup().plain(&server).client();
    client.manifest(&image(&server.host())).unwrap();
    std::thread::sleep(Duration::from_millis(1100));
    client.manifest(&image(&server.host())).unwrap();
    assert_eq!(
        server.log(),
        [
            "GET /v2/a/b/manifests/1 []",
            "GET /v2/a/b/manifests/1 [Bearer token-1]",
            "GET /v2/a/b/manifests/1 [Bearer token-2]"
        ]
    );
}

#[test]
fn all_layers_share_one_token() {
    let tokens = Server::start(|_| {
        std::thread::sleep(Duration::from_millis(100));
        Reply::ok(r#"{"token":"token-1","expires_in":300}"#)
    });
    let realm = tokens.url("/token");
    let server = Server::start(move |seen| match seen.authorization() {
        Some("Bearer token-1") => Reply::ok(content(1000)),
        _ => Reply::challenge(&realm),
    });
    let client = setup().plain(&server).client();
    std::thread::scope(|scope| {
        for _ in 0..6 {
            let (client, host) = (client.clone(), server.host());
            scope.spawn(move || {
                assert!(
                    read(client.blob(&image(&host), &descriptor(&content(1000)))).unwrap() == content(1000)
                );
            });
        }
    });
    assert_eq!(tokens.log().len(), 1);
}

#[test]
fn each_repository_has_its_token() {
    let tokens = token_server();
    let realm = tokens.url("/token");
    let server = Server::start(move |seen| {
        let name = seen.path.split('/').nth(3).unwrap();
        let challenge = format!(r#"Bearer realm="{realm}",service="s""#);
        match (name, seen.authorization()) {
            ("b", Some("Bearer token-1")) | ("c", Some("Bearer token-2")) => Reply::ok(manifest_text()),
            _ => Reply::new(401).header("WWW-Authenticate", challenge),
        }
    });
    let client = setup().plain(&server).client();
    client.manifest(&image(&server.host())).unwrap();
    let other = mizzen_core::Reference { repository: "a/c".to_owned(), ..image(&server.host()) };
    client.manifest(&other).unwrap();
    client.manifest(&image(&server.host())).unwrap();
    assert_eq!(
        tokens.log(),
        [
            "GET /token?service=s&scope=repository:a/b:pull []",
            "GET /token?service=s&scope=repository:a/c:pull []"
        ]
    );
}

fn failure_with(setup: &Setup, server: &Server) -> String {
    let failure = setup.client().manifest(&image(&server.host())).unwrap_err();
    let hint = failure.hint.unwrap_or_default();
    assert!(!failure.message.contains("secret") && !hint.contains("secret"), "{}", failure.message);
    let text = format!("{} / {hint}", failure.message);
    text.replace(&image(&server.host()).to_string(), "NAME").replace(&server.host(), "HOST")
}

#[test]
fn realms_that_may_not_be_told_secrets_get_none() {
    for (realm, problem) in [
        ("file:///etc/passwd", "its tokens are from: file:///etc/passwd: neither https:// nor http:// / "),
        (
            "http://u:p@169.254.169.254/",
            "its tokens are from: http://…@169.254.169.254/: an address with a user in it / ",
        ),
    ] {
        let server = registry(realm.to_owned(), "no");
        let text = failure_with(&setup().plain(&server).login("me", "secret"), &server);
        assert_eq!(text, format!("NAME: HOST: {problem}"));
    }
    let server = registry("http://169.254.169.254/latest".to_owned(), "no");
    let text = failure_with(&setup().plain(&server).login("me", "secret"), &server);
    assert_eq!(text, "NAME: 169.254.169.254 is a link-local address, where a registry must not send us / ");
}

#[test]
fn a_realm_without_tls_is_refused_to_a_registry_with_it() {
    let tokens = token_server();
    let realm = tokens.url("/token?secret");
    let server = Server::start_tls("good.pem", move |_| Reply::challenge(&realm));
    let host = format!("localhost:{}", server.port());
    let client = setup().tls(&host).login("me", "secret").client();
    let failure = client.manifest(&image(&host)).unwrap_err();
    let address = tokens.url("/token");
    assert_eq!(
        failure.message,
        format!(
            "{}: {host}: its tokens are from {address}: http after https, which is refused",
            image(&host)
        )
    );
    assert!(tokens.log().is_empty());
}

#[test]
fn a_realm_that_redirects_does_not_take_the_password_along() {
    let elsewhere = token_server();
    let to = elsewhere.url("/stolen");
    let tokens = Server::start(move |_| Reply::redirect(&to));
    let server = registry(tokens.url("/token"), "Bearer token-1");
    let setup = setup().plain(&server).login("me", "secret");
    setup.client().manifest(&image(&server.host())).unwrap();
    assert_eq!(elsewhere.log(), ["GET /stolen []"]);
    // What is in the form of an identity token is not sent on at all.
    let config = format!(r#"{{"auths":{{"{}":{{"identitytoken":"secret"}}}}}}"#, server.host());
    let setup = super::support::setup().plain(&server).docker_config(&config);
    let failure = setup.client().manifest(&image(&server.host())).unwrap_err();
    assert!(failure.message.ends_with("/stolen: secrets were sent, which are not sent on"), "{failure}");
    assert_eq!(elsewhere.log().len(), 1);
}

#[test]
fn refusals_say_with_what_was_asked() {
    let refusing = Server::start(|_| Reply::error(401, "UNAUTHORIZED", "incorrect username or password"));
    let server = registry(refusing.url("/token"), "no");
    let text = failure_with(&setup().plain(&server).login("me", "secret"), &server);
    assert_eq!(
        text,
        "NAME: HOST: the login is refused (me, from the command line): 401 Unauthorized: incorrect username or \
         password / are name and password right? some registries want a token in place of the password"
    );
    let kept = format!(r#"{{"auths":{{"{}":{{"auth":"{}"}}}}}}"#, server.host(), encoded("me:secret"));
    let text = failure_with(&setup().plain(&server).docker_config(&kept), &server);
    assert!(text.starts_with("NAME: HOST: the login is refused (me, from /"), "{text}");
    let hint = "`mizzen login HOST` replaces it; `mizzen logout HOST` goes without, which is enough for public images";
    assert!(text.ends_with(hint), "{text}");
    let text = failure_with(&setup().plain(&server), &server);
    assert_eq!(
        text,
        "NAME: HOST: it wants a login (401 Unauthorized: incorrect username or password) / is the name right? \
         `mizzen login HOST`, or --username and --password-stdin"
    );
    let tokens = token_server();
    let server = registry(tokens.url("/token"), "no");
    let text = failure_with(&setup().plain(&server), &server);
    assert_eq!(
        text,
        "NAME: HOST: it wants a login (401 Unauthorized: authentication required) / `mizzen login HOST`, or \
         --username and --password-stdin"
    );
    assert_eq!(server.log().len(), 3, "{:?}", server.log());
    let text = failure_with(&setup().plain(&server).login("me", "secret"), &server);
    assert_eq!(
        text,
        "NAME: HOST: the login is not enough (me, from the command line): 401 Unauthorized: authentication required \
         / is the name right? `mizzen login HOST` logs in as somebody else"
    );
    let basic = Server::start(|_| Reply::new(401).header("WWW-Authenticate", "Basic realm=\"x\""));
    let text = failure_with(&setup().plain(&basic).login("me", "secret"), &basic);
    assert!(
        text.starts_with("NAME: HOST: the login is not enough (me, from the command line): 401"),
        "{text}"
    );
    assert_eq!(basic.log().len(), 2);
}

#[test]
fn answers_of_token_servers_are_not_shown() {
    for (answer, problem) in [
        (r#"{"tokens":"secret"}"#, "there is no token in the answer to the request for one"),
        (r#"{"token":"sec\nret"}"#, "there is no token in the answer to the request for one"),
        (r#"secret"#, "the answer to the request for a token is not understood"),
    ] {
        let tokens = Server::start(move |_| Reply::ok(answer));
        let server = registry(tokens.url("/token"), "no");
        let text = failure_with(&setup().plain(&server), &server);
        assert_eq!(text, format!("NAME: {}: {problem} / ", tokens.host()));
    }
    let broken = Server::start(|_| Reply::new(503));
    let server = registry(broken.url("/token"), "no");
    let text = failure_with(&setup().plain(&server), &server);
    assert!(text.starts_with("NAME: HOST: its tokens are from: "), "{text}");
    assert_eq!(broken.log().len(), 4, "a server that is busy is asked again");
}

#[test]
fn who_does_not_ask_is_asked_what_they_want() {
    let good = format!("Basic {}", encoded("me:secret"));
    let server = Server::start(move |seen: &Seen| match (seen.path.as_str(), seen.authorization()) {
        ("/v2/", None) => Reply::new(401).header("WWW-Authenticate", "Basic realm=\"x\""),
        (_, Some(header)) if header == good => Reply::ok(manifest_text()),
        _ => Reply::error(404, "NAME_UNKNOWN", "no such thing"),
    });
    setup().plain(&server).login("me", "secret").client().manifest(&image(&server.host())).unwrap();
    let basic = format!("[Basic {}]", encoded("me:secret"));
    assert_eq!(
        server.log(),
        [
            "GET /v2/a/b/manifests/1 []".to_owned(),
            "GET /v2/ []".to_owned(),
            format!("GET /v2/ {basic}"),
            format!("GET /v2/a/b/manifests/1 {basic}"),
        ]
    );
    // Without credentials there is nothing to ask for.
    assert!(setup().plain(&server).client().manifest(&image(&server.host())).is_err());
    assert_eq!(server.log().len(), 5);
}

/// Files that somebody has named, and that nobody writes to or that have no end.
#[test]
fn files_without_an_end_hold_nobody_up() {
    let server = Server::start(|seen| match seen.authorization() {
        Some(_) => Reply::ok(manifest_text()),
        None => Reply::new(401).header("WWW-Authenticate", "Basic realm=\"x\""),
    });
    let home = Scratch::new();
    let fifo = home.path().join("fifo");
    let kind = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, kind, rustix::fs::Mode::RUSR, 0).unwrap();
    let silent = "a pipe whose writer has not ended after 10 s";
    for (path, why) in [(fifo.as_path(), silent), (Path::new("/dev/zero"), "larger than 1 MiB")] {
        let shown = path.display();
        let named = setup().plain(&server).authfile(path);
        let failure = named.client().manifest(&image(&server.host())).unwrap_err();
        let message = format!("--authfile: {shown}: cannot read the credentials: {why}");
        assert!(failure.message.ends_with(&message), "{}", failure.message);
        // Of those that nobody has named on the command line, a note tells.
        let note = format!("{shown}: cannot read the credentials: {why}; going on without it");
        let found = setup().plain(&server).variable("REGISTRY_AUTH_FILE", path.to_str().unwrap());
        assert!(found.client().manifest(&image(&server.host())).is_err());
        assert_eq!(found.notes(), [note]);
    }
    // What the shell makes of <(…).
    let (reader, mut writer) = std::io::pipe().unwrap();
    let config = format!(r#"{{"auths":{{"{}":{{"auth":"{}"}}}}}}"#, server.host(), encoded("me:word"));
    std::io::Write::write_all(&mut writer, config.as_bytes()).unwrap();
    drop(writer);
    let pipe = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&reader));
    let piped = setup().plain(&server).authfile(Path::new(&pipe));
    piped.client().manifest(&image(&server.host())).unwrap();
}
