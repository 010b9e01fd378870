//! What a name stands for.

use mizzen_core::Digest;
use mizzen_import::manifest::{OCI_INDEX, OCI_MANIFEST, Platform, sha256};

use super::server::{Reply, Server};
use super::support::{image, manifest_text, setup};

const LIE: &str = "sha256:00000000000000000000000000000000000000000000000000000000000000ff";

#[test]
fn all_types_are_asked_for_at_once_and_the_digest_is_computed() {
    let server = Server::start(|_| {
        Reply::ok(manifest_text())
            .header("Content-Type", format!("{OCI_MANIFEST}; charset=utf-8"))
            .header("Docker-Content-Digest", LIE)
    });
    let setup = setup().plain(&server);
    let fetched = setup.client().manifest(&image(&server.host())).unwrap();
    assert_eq!(fetched.bytes, manifest_text().as_bytes());
    assert_eq!(fetched.digest, sha256(manifest_text().as_bytes()));
    assert_eq!(fetched.media_type, OCI_MANIFEST);
    assert_eq!(server.log(), ["GET /v2/a/b/manifests/1 []"]);
    let seen = server.seen();
    assert_eq!(
        seen[0].header("accept"),
        Some(
            "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json, \
             application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
        )
    );
    assert_eq!(seen[0].header("accept-encoding"), Some("identity"));
    assert!(seen[0].header("user-agent").unwrap().starts_with("mizzen/"));
}

#[test]
fn a_digest_in_the_name_must_be_that_of_the_content() {
    let server = Server::start(|_| Reply::ok(manifest_text()));
    let setup = setup().plain(&server);
    let digest = sha256(manifest_text().as_bytes());
    let pinned = image(&server.host()).pinned(digest);
    assert_eq!(setup.client().manifest(&pinned).unwrap().digest, digest);
    assert_eq!(server.log(), [format!("GET /v2/a/b/manifests/{digest} []")]);
    let other = image(&server.host()).pinned(Digest::parse(LIE).unwrap());
    let failure = setup.client().manifest(&other).unwrap_err();
    let expected =
        format!("{other}: {}: {LIE}: the content is another, with the digest {digest}", server.host());
    assert_eq!(failure.message, expected);
    assert!(failure.hint.unwrap().starts_with("it was changed on its way or where it is kept"));
}

#[test]
fn a_name_is_resolved_by_head() {
    let digest = sha256(manifest_text().as_bytes());
    let server = Server::start(move |seen| match seen.method.as_str() {
        "HEAD" => Reply::ok(manifest_text()).header("Docker-Content-Digest", digest.to_string()),
        _ => Reply::new(500),
    });
    let setup = setup().plain(&server);
    assert_eq!(setup.client().resolve(&image(&server.host())).unwrap(), digest);
    assert_eq!(server.log(), ["HEAD /v2/a/b/manifests/1 []"]);
    // What is pinned is known.
    assert_eq!(setup.client().resolve(&image("nobody.invalid").pinned(digest)).unwrap(), digest);
}

#[test]
fn where_head_does_not_help_get_does() {
    for head in [
        Reply::new(405),
        Reply::ok("x"),
        Reply::new(404),
        Reply::new(403),
        Reply::ok("x").header("Docker-Content-Digest", "sha256:nonsense"),
        Reply::ok("x").header("Docker-Content-Digest", format!("sha512:{}", "a".repeat(128))),
    ] {
        let server = Server::start(move |seen| match seen.method.as_str() {
            "HEAD" => head.clone(),
            _ => Reply::ok(manifest_text()).header("Docker-Content-Digest", LIE),
        });
        let setup = setup().plain(&server);
        let digest = setup.client().resolve(&image(&server.host())).unwrap();
        assert_eq!(digest, sha256(manifest_text().as_bytes()));
        assert_eq!(server.log().len(), 2);
    }
}

#[test]
fn an_image_is_found_by_way_of_its_index() {
    let image_digest = sha256(manifest_text().as_bytes());
    let entry = |architecture: &str, digest: &Digest, size: usize| {
        format!(
            r#"{{"mediaType":"{OCI_MANIFEST}","digest":"{digest}","size":{size},
                "platform":{{"os":"linux","architecture":"{architecture}"}}}}"#
        )
    };
    let right = entry("amd64", &image_digest, manifest_text().len());
    let missing = entry("arm64", &Digest::parse(LIE).unwrap(), 10);
    let index = format!(r#"{{"schemaVersion":2,"mediaType":"{OCI_INDEX}","manifests":[{missing},{right}]}}"#);
    let index_digest = sha256(index.as_bytes());
    let server = Server::start(move |seen| match seen.path.rsplit('/').next().unwrap() {
        "1" => Reply::ok(index.clone()).header("Content-Type", OCI_INDEX),
        digest if digest == image_digest.to_string() => Reply::ok(manifest_text()),
        LIE => Reply::ok("something"),
        _ => Reply::error(404, "MANIFEST_UNKNOWN", "manifest unknown"),
    });
    let setup = setup().plain(&server);
    let reference = image(&server.host());
    let client = setup.client();
    let found = client.image(&reference, &Platform::parse("linux/amd64").unwrap()).unwrap();
    assert_eq!(found.digest, index_digest);
    assert_eq!(found.selected.digest.sha256(), Some(image_digest));
    assert_eq!(found.selected.manifest.layers.len(), 1);
    let failure = client.image(&reference, &Platform::parse("linux/arm64").unwrap()).unwrap_err();
    let host = server.host();
    assert_eq!(
        failure.message,
        format!("{reference}: {host}: {LIE}: it has 9 bytes, and the manifest says 10")
    );
    let failure = client.image(&reference, &Platform::parse("linux/s390x").unwrap()).unwrap_err();
    assert_eq!(failure.message, format!("{reference}: there is no image for linux/s390x"));
    assert_eq!(failure.hint.as_deref(), Some("there is: linux/arm64, linux/amd64; --platform chooses"));
}

#[test]
fn what_is_no_manifest_is_refused() {
    let big = " ".repeat(5 << 20);
    for (reply, problem) in [
        (Reply::ok(r#"{"schemaVersion":1,"fsLayers":[]}"#), "the image has a manifest of schema 1"),
        (
            Reply::ok(manifest_text())
                .header("Content-Type", "application/vnd.docker.distribution.manifest.v1+prettyjws"),
            "the image has a manifest of schema 1",
        ),
        (
            Reply::ok(manifest_text()).header("Content-Type", OCI_INDEX),
            "its media type is application/vnd.oci.image.index.v1+json, and its content that of a manifest; refused",
        ),
        (Reply::ok("<html>"), "not a manifest: expected value at line 1 column 1"),
        (Reply::ok(big.clone()), "HOST: it sends more than 4194304 bytes"),
        (Reply::ok(big).manner(super::server::Manner::Chunked), "HOST: it sends more than 4194304 bytes"),
    ] {
        let server = Server::start(move |_| reply.clone());
        let setup = setup().plain(&server);
        let reference = image(&server.host());
        let failure = setup.client().image(&reference, &Platform::host()).unwrap_err();
        let expected = format!("{reference}: {}", problem.replace("HOST", &server.host()));
        assert!(failure.message.starts_with(&expected), "{failure}");
    }
}
