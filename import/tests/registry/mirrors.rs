//! Servers that stand in for a registry.

use super::server::{Manner, Reply, Server};
use super::support::{content, descriptor, encoded, image, manifest_text, read, setup};

fn registry() -> Server {
    Server::start(|seen| match seen.path.contains("/blobs/") {
        true => Reply::ranged(seen, &content(200_000)),
        false => Reply::ok(manifest_text()),
    })
}

#[test]
fn a_mirror_is_asked_first() {
    let (mirror, server) = (registry(), registry());
    let setup = setup().plain(&server).mirror(&server, mirror.url("/proxy/"));
    let client = setup.client();
    client.manifest(&image(&server.host())).unwrap();
    read(client.blob(&image(&server.host()), &descriptor(&content(200_000)))).unwrap();
    let digest = descriptor(&content(200_000)).digest;
    assert_eq!(
        mirror.log(),
        ["GET /v2/proxy/a/b/manifests/1 []".to_owned(), format!("GET /v2/proxy/a/b/blobs/{digest} []")]
    );
    assert!(server.log().is_empty() && setup.notes().is_empty());
}

#[test]
fn what_a_mirror_lacks_the_registry_has() {
    let mirror = Server::start(|_| Reply::error(404, "MANIFEST_UNKNOWN", "unknown"));
    let server = registry();
    let setup = setup().plain(&server).mirror(&server, mirror.url(""));
    let client = setup.client();
    client.manifest(&image(&server.host())).unwrap();
    client.manifest(&image(&server.host())).unwrap();
    read(client.blob(&image(&server.host()), &descriptor(&content(200_000)))).unwrap();
    assert_eq!(mirror.log().len(), 3, "it may have the next");
    let (there, host) = (mirror.host(), server.host());
    assert_eq!(
        setup.notes(),
        [
            format!(
                "mirror: {there}: it has no such tag or digest of that image (404 Not Found: unknown); asking {host}"
            ),
            format!("mirror: {there}: it lacks a part of the image (404 Not Found: unknown); asking {host}"),
        ]
    );
}

#[test]
fn a_mirror_that_is_not_there_is_asked_once() {
    let server = registry();
    let setup = setup().plain(&server).mirror(&server, "http://127.0.0.1:9".to_owned());
    let client = setup.client();
    client.manifest(&image(&server.host())).unwrap();
    read(client.blob(&image(&server.host()), &descriptor(&content(200_000)))).unwrap();
    let host = server.host();
    let note = format!("mirror: 127.0.0.1:9: cannot connect: Connection refused; asking {host}");
    assert_eq!(setup.notes(), [note]);
    let busy = Server::start(|_| Reply::new(503));
    let setup = super::support::setup().plain(&server).mirror(&server, busy.url(""));
    let client = setup.client();
    client.resolve(&image(&server.host())).unwrap();
    client.manifest(&image(&server.host())).unwrap();
    assert_eq!(busy.log().len(), 1);
}

#[test]
fn a_mirror_is_not_told_the_registrys_password() {
    let challenge = || Reply::new(401).header("WWW-Authenticate", "Basic realm=\"x\"");
    let mirror = Server::start(move |_| challenge());
    let server = Server::start(move |seen| match seen.authorization() {
        Some(_) => Reply::ok(manifest_text()),
        None => Reply::new(401).header("WWW-Authenticate", "Basic realm=\"x\""),
    });
    let setup = setup().plain(&server).mirror(&server, mirror.url("")).login("me", "secret");
    setup.client().manifest(&image(&server.host())).unwrap();
    assert_eq!(mirror.log(), ["GET /v2/a/b/manifests/1 []"]);
    assert_eq!(server.log()[1], format!("GET /v2/a/b/manifests/1 [Basic {}]", encoded("me:secret")));
    // It has its own.
    let config = format!(r#"{{"auths":{{"{}":{{"auth":"{}"}}}}}}"#, mirror.host(), encoded("it:its"));
    let setup = super::support::setup().plain(&server).mirror(&server, mirror.url("")).docker_config(&config);
    assert!(setup.client().manifest(&image(&server.host())).is_err());
    assert_eq!(mirror.log()[2], format!("GET /v2/a/b/manifests/1 [Basic {}]", encoded("it:its")));
}

#[test]
fn a_mirror_cannot_give_something_else_for_a_digest() {
    let mirror = Server::start(|_| Reply::ok("something else"));
    let server = registry();
    let setup = setup().plain(&server).mirror(&server, mirror.url(""));
    let digest = mizzen_import::manifest::sha256(manifest_text().as_bytes());
    let fetched = setup.client().manifest(&image(&server.host()).pinned(digest)).unwrap();
    assert_eq!(fetched.digest, digest);
    assert!(setup.notes()[0].contains(": the content is another, with the digest "), "{:?}", setup.notes());
}

#[test]
fn the_registry_goes_on_where_a_mirror_stopped() {
    let mirror = Server::start(|seen| match seen.offset() {
        0 => Reply::ok(content(200_000)).manner(Manner::Cut(80_000)),
        _ => Reply::new(404),
    });
    let server = registry();
    let setup = setup().plain(&server).mirror(&server, mirror.url(""));
    let blob = setup.client().blob(&image(&server.host()), &descriptor(&content(200_000)));
    assert!(read(blob).unwrap() == content(200_000));
    assert_eq!(server.seen()[0].offset(), 80_000);
}

#[test]
fn without_the_registry_the_failure_is_its_own() {
    let mirror = Server::start(|_| Reply::new(404));
    let server = Server::start(|_| Reply::error(403, "DENIED", "no"));
    let setup = setup().plain(&server).mirror(&server, mirror.url(""));
    let failure = setup.client().manifest(&image(&server.host())).unwrap_err();
    let host = server.host();
    assert_eq!(
        failure.message,
        format!("{}: {host}: not allowed without a login (403 Forbidden: no)", image(&host))
    );
}
