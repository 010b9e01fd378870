//! Blobs: from the first byte to the last, whatever happens between.

use std::io::Read;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use mizzen_import::manifest::{BlobDigest, Descriptor};
use mizzen_import::registry::failure_of;

use super::server::{Manner, Reply, Seen, Server};
use super::support::{Setup, content, descriptor, image, read, setup};

const LENGTH: usize = 300_000;

/// A server whose answers depend on how many there were.
fn scripted(script: impl Fn(usize, &Seen) -> Reply + Send + Sync + 'static) -> (Server, Setup) {
    let count = AtomicUsize::new(0);
    let server = Server::start(move |seen| script(count.fetch_add(1, Ordering::Relaxed), seen));
    let setup = setup().plain(&server);
    (server, setup)
}

/// The first answer, then those of a good server.
fn first(reply: Reply) -> (Server, Setup) {
    scripted(move |count, seen| match count {
        0 => reply.clone(),
        _ => Reply::ranged(seen, &content(LENGTH)),
    })
}

fn fetch(server: &Server, setup: &Setup) -> Result<Vec<u8>, mizzen_core::Failure> {
    read(setup.client().blob(&image(&server.host()), &descriptor(&content(LENGTH))))
}

fn ranges(server: &Server) -> Vec<usize> {
    server.seen().iter().map(Seen::offset).collect()
}

#[test]
fn a_blob_is_read() {
    for manner in [Manner::Whole, Manner::Chunked] {
        let (server, setup) = first(Reply::ok(content(LENGTH)).manner(manner));
        assert!(fetch(&server, &setup).unwrap() == content(LENGTH));
        let digest = descriptor(&content(LENGTH)).digest;
        assert_eq!(server.log(), [format!("GET /v2/a/b/blobs/{digest} []")]);
    }
    let (server, setup) = first(Reply::ok(""));
    assert_eq!(read(setup.client().blob(&image(&server.host()), &descriptor(b""))).unwrap(), b"");
}

#[test]
fn a_blob_may_have_a_longer_digest() {
    let (server, setup) = first(Reply::ok("abc"));
    let long = BlobDigest::parse(&format!("sha512:{}", "0".repeat(128))).unwrap();
    let good = Descriptor { digest: long.of_same_kind(b"abc"), ..descriptor(b"abc") };
    let blob = |descriptor: &Descriptor| read(setup.client().blob(&image(&server.host()), descriptor));
    assert_eq!(blob(&good).unwrap(), b"abc");
    assert!(server.log()[0].starts_with("GET /v2/a/b/blobs/sha512:ddaf35a1"));
}

#[test]
fn a_lost_connection_is_gone_on_with() {
    let (server, setup) = first(Reply::ok(content(LENGTH)).manner(Manner::Cut(100_000)));
    assert!(fetch(&server, &setup).unwrap() == content(LENGTH));
    assert_eq!(ranges(&server), [0, 100_000]);
}

#[test]
fn a_stall_is_gone_on_with() {
    let (server, setup) = first(Reply::ok(content(LENGTH)).manner(Manner::Stall(1000)));
    let begin = Instant::now();
    assert!(fetch(&server, &setup).unwrap() == content(LENGTH));
    assert_eq!(ranges(&server), [0, 1000]);
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
}

#[test]
fn a_server_without_ranges_begins_anew() {
    let (server, setup) = scripted(|count, _| match count {
        0 => Reply::ok(content(LENGTH)).manner(Manner::Cut(100_000)),
        1 => Reply::ok(content(LENGTH)).manner(Manner::Cut(50_000)),
        _ => Reply::ok(content(LENGTH)),
    });
    assert!(fetch(&server, &setup).unwrap() == content(LENGTH));
    assert_eq!(ranges(&server), [0, 100_000, 100_000]);
}

#[test]
fn other_content_in_the_second_half_is_seen() {
    let (server, setup) = scripted(|count, seen| match count {
        0 => Reply::ok(content(LENGTH)).manner(Manner::Cut(100_000)),
        _ => Reply::ranged(seen, &vec![0; LENGTH]),
    });
    let failure = fetch(&server, &setup).unwrap_err();
    assert!(failure.message.contains(": the content is another, with the digest sha256:"), "{failure}");
}

#[test]
fn servers_that_are_busy_or_broken_are_waited_for() {
    for reply in [
        Reply::new(503).header("Retry-After", "1"),
        Reply::new(429).header("Retry-After", "0"),
        Reply::new(429),
        Reply::new(500),
        Reply::new(502),
    ] {
        let (server, setup) = scripted(move |count, seen| match count {
            0 => reply.clone(),
            1 => Reply::ok(content(LENGTH)).manner(Manner::Cut(100_000)),
            2 => reply.clone(),
            _ => Reply::ranged(seen, &content(LENGTH)),
        });
        assert!(fetch(&server, &setup).unwrap() == content(LENGTH));
        assert_eq!(ranges(&server), [0, 0, 100_000, 100_000]);
    }
}

#[test]
fn a_wait_that_was_asked_for_is_done_and_told() {
    let (server, setup) = first(Reply::new(503).header("Retry-After", "2"));
    let begin = Instant::now();
    assert!(fetch(&server, &setup).is_ok());
    assert!(begin.elapsed() >= Duration::from_secs(2));
    let host = server.host();
    assert_eq!(setup.notes(), [format!("{host}: it answers 503 Service Unavailable; waiting 2 s")]);
}

#[test]
fn a_server_that_never_gets_better_is_given_up() {
    let (server, setup) = scripted(|_, _| Reply::error(500, "UNKNOWN", "out of order"));
    let failure = fetch(&server, &setup).unwrap_err();
    let host = server.host();
    assert_eq!(failure.message, format!("{host}: it answers 500 Internal Server Error: out of order"));
    assert_eq!(failure.hint.as_deref(), Some("it has a problem of its own; try again later"));
    assert_eq!(server.log().len(), 4);
    // Connections that are lost without getting further are counted as well.
    let (server, setup) = scripted(|_, seen| Reply::ranged(seen, &content(LENGTH)).manner(Manner::Cut(10)));
    let failure = fetch(&server, &setup).unwrap_err();
    assert_eq!(failure.message, format!("{}: the connection was lost", server.host()));
    assert_eq!(ranges(&server), [0, 10, 20, 30]);
}

#[test]
fn progress_gives_new_attempts() {
    let (server, setup) =
        scripted(|_, seen| Reply::ranged(seen, &content(LENGTH)).manner(Manner::Cut(70_000)));
    assert!(fetch(&server, &setup).unwrap() == content(LENGTH));
    assert_eq!(ranges(&server), [0, 70_000, 140_000, 210_000, 280_000]);
}

#[test]
fn a_trickle_is_as_good_as_a_stall() {
    let (server, setup) = scripted(|_, seen| Reply::ranged(seen, &content(LENGTH)).manner(Manner::Drip));
    let begin = Instant::now();
    let failure = fetch(&server, &setup).unwrap_err();
    let expected = format!("{}: it has sent ", server.host());
    assert!(failure.message.starts_with(&expected), "{failure}");
    assert!(failure.message.ends_with(" bytes in 0 s, which is too slow"), "{failure}");
    assert!(begin.elapsed() < Duration::from_secs(6), "{:?}", begin.elapsed());
    assert_eq!(server.log().len(), 4);
}

#[test]
fn what_is_not_as_announced_is_refused() {
    let mut changed = content(LENGTH);
    changed[LENGTH - 1] ^= 1;
    let longer = [content(LENGTH), b"x".to_vec()].concat();
    let shorter = content(LENGTH - 1);
    for (reply, problem) in [
        (Reply::ok(changed), "DIGEST: the content is another, with the digest sha256:"),
        (Reply::ok(longer.clone()), "HOST: DIGEST: it has 300001 bytes, and the manifest says 300000"),
        (Reply::ok(shorter), "HOST: DIGEST: it has 299999 bytes, and the manifest says 300000"),
        (
            Reply::ok(longer).manner(Manner::Chunked),
            "DIGEST: it has more than the 300000 bytes that the manifest says",
        ),
    ] {
        let (server, setup) = first(reply);
        let failure = fetch(&server, &setup).unwrap_err();
        let digest = descriptor(&content(LENGTH)).digest.to_string();
        let expected = problem.replace("HOST", &server.host()).replace("DIGEST", &digest);
        assert!(failure.message.starts_with(&expected), "{failure}");
        assert_eq!(server.log().len(), 1);
    }
}

#[test]
fn a_blob_that_ends_early_is_not_taken_for_whole() {
    let (server, setup) =
        scripted(|_, seen| Reply::ranged(seen, &content(LENGTH)[..200_000]).manner(Manner::Chunked));
    let failure = fetch(&server, &setup).unwrap_err();
    // Without a length its end is that of a lost connection; the next answer says how long it is.
    assert!(failure.message.ends_with("it has 200000 bytes, and the manifest says 300000"), "{failure}");
}

#[test]
fn another_part_than_asked_for_is_refused() {
    for range in ["bytes 99999-299999/300000", "bytes 100000-299999/999999", "nonsense"] {
        let (server, setup) = scripted(move |count, _| match count {
            0 => Reply::ok(content(LENGTH)).manner(Manner::Cut(100_000)),
            _ => {
                let part = content(LENGTH)[100_000..].to_vec();
                Reply::ranged_as(part, range)
            }
        });
        let failure = fetch(&server, &setup).unwrap_err();
        let expected = if range.contains("/9") {
            "it has 999999 bytes, and the manifest says 300000"
        } else {
            "it sends another part than was asked for"
        };
        assert!(failure.message.ends_with(expected), "{failure}");
    }
}

#[test]
fn an_error_stays_one() {
    let (server, setup) = first(Reply::ok(vec![0; LENGTH]));
    let mut blob = setup.client().blob(&image(&server.host()), &descriptor(&content(LENGTH))).unwrap();
    let mut buffer = vec![0; 1 << 16];
    let error = loop {
        match blob.read(&mut buffer) {
            Ok(length) => assert!(length > 0, "the end must not be told"),
            Err(error) => break error,
        }
    };
    let again = blob.read(&mut buffer).unwrap_err();
    // Also inside of what a decompressor makes of it.
    let wrapped = std::io::Error::new(std::io::ErrorKind::InvalidData, again);
    assert_eq!(failure_of(wrapped), failure_of(error));
    assert_eq!(failure_of(std::io::Error::other("x")).message, "x");
}

#[test]
fn who_stops_early_can_still_verify() {
    let (server, setup) = first(Reply::ok(content(LENGTH)));
    let mut blob = setup.client().blob(&image(&server.host()), &descriptor(&content(LENGTH))).unwrap();
    blob.read_exact(&mut [0; 1000]).unwrap();
    blob.finish().unwrap();
    let (server, setup) = first(Reply::ok(vec![0; LENGTH]));
    let mut blob = setup.client().blob(&image(&server.host()), &descriptor(&content(LENGTH))).unwrap();
    blob.read_exact(&mut [0; 1000]).unwrap();
    assert!(blob.finish().unwrap_err().message.contains("the content is another"));
}

#[test]
fn a_short_blob_is_read_as_a_whole() {
    let (server, setup) = first(Reply::ok("{}"));
    let (client, reference) = (setup.client(), image(&server.host()));
    assert_eq!(client.small_blob(&reference, &descriptor(b"{}"), 10).unwrap(), b"{}");
    let failure = client.small_blob(&reference, &descriptor(&content(11)), 10).unwrap_err();
    assert!(failure.message.ends_with(" has 11 bytes, more than 10"), "{failure}");
}

#[test]
fn what_a_registry_lacks_is_told() {
    let (server, setup) = scripted(|_, _| Reply::error(404, "BLOB_UNKNOWN", "blob unknown to registry"));
    let failure = fetch(&server, &setup).unwrap_err();
    let host = server.host();
    assert_eq!(
        failure.message,
        format!("{host}: it lacks a part of the image (404 Not Found: blob unknown to registry)")
    );
    assert_eq!(server.log().len(), 1);
}

#[test]
fn foreign_layers_come_without_credentials() {
    let storage = Server::start(|seen| match seen.path.as_str() {
        "/layer" => Reply::ranged(seen, &content(LENGTH)),
        _ => Reply::new(404),
    });
    let (server, setup) = scripted(|_, _| Reply::new(500));
    let setup = setup.login("me", "secret");
    let urls = vec![storage.url("/gone"), storage.url("/layer")];
    let layer = Descriptor { urls, ..descriptor(&content(LENGTH)) };
    let (client, reference) = (setup.client(), image(&server.host()));
    assert!(read(client.foreign_blob(&reference, &layer)).unwrap() == content(LENGTH));
    assert_eq!(storage.log(), ["GET /gone []", "GET /layer []"]);
    assert!(server.log().is_empty());
    let nowhere = client.foreign_blob(&reference, &descriptor(b"x")).err().unwrap();
    assert!(nowhere.message.ends_with("the manifest does not say where else this layer is"), "{nowhere}");
    for (url, problem) in [
        ("file:///etc/passwd", "file:///etc/passwd: neither https:// nor http://"),
        (
            "http://169.254.169.254/latest/meta-data",
            "169.254.169.254 is a link-local address, where a registry must not send us",
        ),
    ] {
        let layer = Descriptor { urls: vec![url.to_owned()], ..layer.clone() };
        let failure = client.foreign_blob(&reference, &layer).err().unwrap();
        assert!(failure.message.ends_with(problem), "{failure}");
    }
}
