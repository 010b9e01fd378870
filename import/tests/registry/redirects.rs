//! Where a registry may send us, and what we take along.

use super::server::{Reply, Server};
use super::support::{Setup, content, descriptor, encoded, image, read, setup};

/// A registry with a password that sends everybody elsewhere.
fn sending_to(location: String) -> Server {
    Server::start(move |seen| match seen.authorization() {
        Some(_) => Reply::redirect(&location),
        None => Reply::new(401).header("WWW-Authenticate", "Basic realm=\"x\""),
    })
}

fn storage() -> Server {
    Server::start(|seen| match seen.authorization() {
        // As S3 does.
        Some(_) => Reply::new(400),
        None => Reply::ranged(seen, &content(5000)),
    })
}

fn fetch(setup: &Setup, host: &str) -> Result<Vec<u8>, mizzen_core::Failure> {
    read(setup.client().blob(&image(host), &descriptor(&content(5000))))
}

#[test]
fn storage_gets_no_authorization() {
    let storage = storage();
    let server = sending_to(storage.url("/bucket/x?signature=1"));
    let setup = setup().plain(&server).login("me", "secret");
    assert!(fetch(&setup, &server.host()).unwrap() == content(5000));
    assert_eq!(storage.log(), ["GET /bucket/x?signature=1 []"]);
    assert!(server.log()[1].ends_with(&format!("[Basic {}]", encoded("me:secret"))));
    // The same machine by another name is another host, too.
    let server = sending_to(format!("http://localhost:{}/bucket", storage.port()));
    let setup = super::support::setup().plain(&server).login("me", "secret");
    assert!(fetch(&setup, &server.host()).is_ok());
    assert_eq!(storage.log()[1], "GET /bucket []");
}

#[test]
fn the_same_host_gets_it_again() {
    let server = Server::start(|seen| match (seen.path.as_str(), seen.authorization()) {
        (_, None) => Reply::new(401).header("WWW-Authenticate", "Basic realm=\"x\""),
        ("/elsewhere", Some(_)) => Reply::ok(content(5000)),
        _ => Reply::redirect("/elsewhere"),
    });
    let setup = setup().plain(&server).login("me", "secret");
    assert!(fetch(&setup, &server.host()).is_ok());
    assert_eq!(server.log()[2], format!("GET /elsewhere [Basic {}]", encoded("me:secret")));
}

#[test]
fn who_comes_back_from_elsewhere_has_none_any_more() {
    let server = Server::start(|seen| match (seen.path.as_str(), seen.authorization()) {
        ("/back", None) => Reply::ok(content(5000)),
        (path, None) if path.starts_with("/v2/") => {
            Reply::new(401).header("WWW-Authenticate", "Basic realm=\"x\"")
        }
        (path, Some(_)) if path.starts_with("/v2/") => Reply::redirect(format!("/away?{path}")),
        (_, Some(_)) => Reply::redirect(format!("http://localhost:{}/there", seen.port())),
        _ => Reply::redirect(format!("http://127.0.0.1:{}/back", seen.port())),
    });
    let setup = setup().plain(&server).login("me", "secret");
    assert!(fetch(&setup, &server.host()).is_ok());
    let log = server.log();
    assert_eq!(log[3..], ["GET /there []", "GET /back []"], "{log:?}");
}

#[test]
fn a_refusal_of_the_storage_is_not_one_of_the_login() {
    let storage = Server::start(|_| Reply::new(401).header("WWW-Authenticate", "Basic realm=\"x\""));
    let server = sending_to(storage.url("/x"));
    let setup = setup().plain(&server).login("me", "secret");
    let failure = fetch(&setup, &server.host()).unwrap_err();
    let (host, there) = (server.host(), storage.host());
    assert_eq!(failure.message, format!("{host}: it redirects to: {there}: it answers 401 Unauthorized"));
    assert_eq!(storage.log(), ["GET /x []"]);
}

#[test]
fn not_every_place_is_followed_to() {
    for (location, problem) in [
        ("file:///etc/passwd", "it redirects to: file:///etc/passwd: neither https:// nor http://"),
        ("ftp://127.0.0.1/x", "it redirects to: ftp://127.0.0.1/x: neither https:// nor http://"),
        (
            "http://me:secret@127.0.0.1/x",
            "it redirects to: http://…@127.0.0.1/x: an address with a user in it",
        ),
    ] {
        let server = sending_to(location.to_owned());
        let setup = setup().plain(&server).login("me", "password");
        let failure = fetch(&setup, &server.host()).unwrap_err();
        let host = server.host();
        assert_eq!(failure.message, format!("{host}: {problem}"));
    }
    for location in
        ["http://169.254.169.254/latest/meta-data", "http://[fe80::1]/", "http://[::ffff:169.254.1.1]/"]
    {
        let server = sending_to(location.to_owned());
        let setup = setup().plain(&server).login("me", "password");
        let failure = fetch(&setup, &server.host()).unwrap_err();
        assert!(
            failure.message.ends_with("is a link-local address, where a registry must not send us"),
            "{failure}"
        );
    }
}

#[test]
fn circles_have_an_end() {
    let server = Server::start(|_| Reply::redirect("/again"));
    let failure = fetch(&setup().plain(&server), &server.host()).unwrap_err();
    let host = server.host();
    assert_eq!(failure.message, format!("{host}: more than 10 redirects"));
    assert_eq!(server.log().len(), 11);
}

#[test]
fn http_does_not_follow_https() {
    let storage = storage();
    let to = storage.url("/x?signature=secret");
    let server = Server::start_tls("good.pem", move |_| Reply::redirect(&to));
    let host = format!("localhost:{}", server.port());
    let failure = fetch(&setup().tls(&host), &host).unwrap_err();
    assert_eq!(
        failure.message,
        format!("{host}: it redirects to: {}: http after https, which is refused", storage.url("/x"))
    );
    assert!(storage.log().is_empty());
}

#[test]
fn each_attempt_begins_at_the_registry() {
    let storage = Server::start(|seen| match seen.offset() {
        0 => Reply::ok(content(5000)).manner(super::server::Manner::Cut(2000)),
        _ => Reply::ranged(seen, &content(5000)),
    });
    let server = sending_to(storage.url("/x"));
    let setup = setup().plain(&server).login("me", "secret");
    assert!(fetch(&setup, &server.host()).unwrap() == content(5000));
    assert_eq!(storage.log(), ["GET /x []", "GET /x bytes=2000- []"]);
    assert_eq!(server.log().len(), 3);
    assert_eq!(server.seen()[2].offset(), 2000);
}
