//! The importer against Debian's docker-registry, filled by skopeo. What it makes of an image is compared with what umoci
//! unpacks from the layout that the image came from. As root: umoci makes devices.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;
mod relay;
#[path = "../registry/server.rs"]
#[allow(dead_code)]
mod server;
#[path = "../registry/support.rs"]
#[allow(dead_code)]
mod support;
mod token;

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::layers::{file, layer, many, sample};
use common::layout::{CONFIG, LAYER, Layout, MANIFEST, config, descriptor, digest};
use common::program::{Home, unpacked};
use common::registry::{Registry, request};
use common::{Facts, Scratch, run};
use relay::Relay;
use serde_json::json;
use server::{Reply, Server};
use token::TokenServer;

const PLAIN: &str = "--dest-tls-verify=false";
const LOGIN: &[&str] = &["--dest-creds", "me:secret"];
/// The user `me` with the password `secret`.
const HTPASSWD: &str = "me:$2y$04$MF5DmS3QPdscQv6zZvxFweGip79j6hntyv7aJ7HPSmqze0Te87ASK\n";

/// A layout with `sample`, and the tree that umoci makes of it.
fn samples() -> (Scratch, Layout, Facts) {
    let scratch = Scratch::new();
    let layout = Layout::new(&scratch.path().join("oci"));
    layout.name("sample", layout.image(&sample(), "amd64"));
    let tree = unpacked(layout.path(), "sample", &scratch);
    assert!(tree.len() > 15, "{tree:?}");
    (scratch, layout, tree)
}

/// What `mizzen login` or `docker login` has left.
fn log_in(home: &Home, host: &str, login: &str) {
    let auths = json!({ "auths": { host: { "auth": support::encoded(login) } } });
    fs::create_dir_all(home.path(".docker")).unwrap();
    fs::write(home.path(".docker/config.json"), auths.to_string()).unwrap();
}

#[test]
fn every_compression_gives_the_tree_of_umoci() {
    let (_scratch, layout, tree) = samples();
    let forms: [(&str, &[&str], &[u8]); 4] = [
        ("plain", &["--preserve-digests"], b"./"),
        ("gzip", &["--dest-compress-format", "gzip"], b"\x1f\x8b"),
        ("zstd", &["--dest-compress-format", "zstd"], b"\x28\xb5\x2f\xfd"),
        ("chunked", &["--dest-compress-format", "zstd:chunked"], b"\x28\xb5\x2f\xfd"),
    ];
    for (name, options, magic) in forms {
        // One for each: skopeo finds layers that it has brought in another form.
        let registry = Registry::start();
        registry.push(layout.path(), "sample", name, &[options, &[PLAIN]].concat());
        let manifest = registry.manifest(name);
        let path = format!("/v2/{name}/blobs/{}", manifest["layers"][0]["digest"].as_str().unwrap());
        assert!(request(&registry.host, "GET", &path, "", b"").body.starts_with(magic), "{name}");
        // What makes a chunked one is named in the manifest alone.
        assert_eq!(
            manifest.to_string().contains("io.containers.zstd-chunked"),
            name == "chunked",
            "{manifest}"
        );
        // A home of its own: no layer comes from a cache.
        let home = Home::with_config(&registry.plain_config());
        assert_eq!(home.tree(&[&registry.reference(name)]), tree, "{name}");
        assert_eq!(home.leftovers(), ["image.sqsh", "tree"], "{name}");
    }
}

#[test]
fn images_have_one_layer_or_127() {
    let scratch = Scratch::new();
    let layout = Layout::new(&scratch.path().join("oci"));
    let registry = Registry::start();
    let home = Home::with_config(&registry.plain_config());
    for count in [1, 127] {
        let name = count.to_string();
        layout.name(&name, layout.image(&many(count), "amd64"));
        registry.push(layout.path(), &name, &name, &[PLAIN]);
        let tree = home.tree(&[&registry.reference(&name)]);
        assert_eq!(tree, unpacked(layout.path(), &name, &scratch), "{count} layers");
        assert_eq!(tree.len(), 3 + count - count / 10, "{tree:?}");
    }
}

#[test]
fn the_platform_is_chosen_and_attestations_are_not() {
    let (scratch, layout, amd64) = samples();
    let arm = layout.image(&[layer(&[file("arm", "64")])], "arm64");
    let amd = layout.image(&sample(), "amd64");
    layout.name("arm64", arm.clone());
    layout.name("multi", layout.index(&[arm.clone(), amd.clone()]));
    // The attestation in front, as nothing promises an order.
    let attested = [layout.attestation(&amd), arm.clone(), amd, layout.attestation(&arm)];
    layout.name("attested", layout.index(&attested));
    layout.name("only-attested", layout.index(&attested[..1]));
    let registry = Registry::start();
    let home = Home::with_config(&registry.plain_config());
    for name in ["multi", "attested"] {
        registry.push(layout.path(), name, name, &["--all", "--preserve-digests", PLAIN]);
        let reference = registry.reference(name);
        assert_eq!(home.tree(&[&reference]), amd64, "{name}");
        let arm64 = unpacked(layout.path(), "arm64", &scratch);
        assert_eq!(home.tree(&["--platform", "linux/arm64", &reference]), arm64, "{name}");
        let missing = home.import(&["-fo", "image.sqsh", "--platform", "linux/s390x", &reference]);
        missing.assert_fails(&[
            "there is no image for linux/s390x",
            "hint: there is: linux/arm64, linux/amd64; --platform",
        ]);
    }
    registry.push(layout.path(), "only-attested", "only", &["--all", "--preserve-digests", PLAIN]);
    let none = home.import(&["-o", "none.sqsh", &registry.reference("only")]);
    none.assert_fails(&["there is no image for linux/amd64", "its index names no image at all"]);
    assert!(!home.path("none.sqsh").exists());
}

#[test]
fn the_store_gets_an_image_once() {
    let (_scratch, layout, tree) = samples();
    let registry = Registry::start();
    registry.push(layout.path(), "sample", "team/sample:1", &[PLAIN]);
    let home = Home::with_config(&registry.plain_config());
    let reference = registry.reference("team/sample:1");
    // Several at once, and then another.
    let started: Vec<_> =
        (0..4).map(|_| home.command(&[&reference]).stdout(Stdio::piped()).spawn().unwrap()).collect();
    let mut paths: Vec<String> = Vec::new();
    for output in started.into_iter().map(|child| child.wait_with_output().unwrap()) {
        assert!(output.status.success());
        paths.push(String::from_utf8(output.stdout).unwrap().trim_end().to_owned());
    }
    let again = home.import(&[&reference]);
    assert_eq!(again.code, Some(0), "{}", again.stderr);
    paths.push(again.stdout.trim_end().to_owned());
    assert!(paths.iter().all(|path| *path == paths[0]), "{paths:?}");
    assert!(paths[0].starts_with(home.store().to_str().unwrap()), "{paths:?}");
    assert_eq!(common::program::unsquashed(paths[0].as_ref(), &home.path("tree")), tree);
    let log = registry.log();
    let fetched = |line: &&str| line.contains("http.request.method=GET") && line.contains("/blobs/sha256:");
    let completed = log.lines().filter(|line| line.contains("response completed")).filter(fetched).count();
    // The configuration and two layers.
    assert_eq!(completed, 3, "{log}");
}

#[test]
fn a_password_is_needed_where_the_registry_asks_for_one() {
    let (scratch, layout, tree) = samples();
    fs::write(scratch.path().join("htpasswd"), HTPASSWD).unwrap();
    let auth =
        format!("auth: {{htpasswd: {{realm: r, path: {}}}}}\n", scratch.path().join("htpasswd").display());
    let registry = Registry::start_with("", &auth);
    registry.push(layout.path(), "sample", "a/b", &[LOGIN, &[PLAIN]].concat());
    let (home, reference) = (Home::with_config(&registry.plain_config()), registry.reference("a/b"));
    let words = ["-o", "image.sqsh", &reference];
    home.import(&words).assert_fails(&["docker://", "hint: ", "mizzen login"]);
    log_in(&home, &registry.host, "me:wrong");
    let wrong = home.import(&words);
    wrong.assert_fails(&["hint: "]);
    let secrets = [":wrong", &support::encoded("me:wrong")];
    assert!(secrets.iter().all(|secret| !wrong.stderr.contains(*secret)), "{wrong:?}");
    assert_eq!(home.leftovers(), [".docker"]);
    log_in(&home, &registry.host, "me:secret");
    assert_eq!(home.tree(&[&reference]), tree);
    // The same without a file.
    let other = Home::with_config(&registry.plain_config());
    let words = ["-o", "image.sqsh", "-u", "me", "--password-stdin", &reference];
    let outcome = other.import_from(&words, b"secret\n");
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert_eq!(common::program::unsquashed(&other.path("image.sqsh"), &other.path("tree")), tree);
}

#[test]
fn tokens_are_renewed_in_the_middle_of_a_blob() {
    let (_scratch, layout, tree) = samples();
    let tokens = TokenServer::start(2);
    let registry = Registry::start_with("", &tokens.config());
    registry.push(layout.path(), "sample", "a/b", &[LOGIN, &[PLAIN, "--preserve-digests"]].concat());
    let pushed = tokens.requests().len();
    let relay = Relay::start(&registry.host, Duration::from_millis(3500));
    let home = Home::with_config(&format!("[registries.\"{}\"]\nplain_http = true\n", relay.host));
    let reference = format!("docker://{}/a/b", relay.host);
    home.import(&["-o", "image.sqsh", &reference]).assert_fails(&["hint: "]);
    log_in(&home, &relay.host, "me:wrong");
    home.import(&["-o", "image.sqsh", &reference]).assert_fails(&["hint: "]);
    log_in(&home, &relay.host, "me:secret");
    let before = tokens.requests().len();
    assert!(before > pushed, "nobody asked for a token without a good password");
    assert_eq!(home.tree(&[&reference]), tree);
    // The rest of the blob was refused with the old token, and sent with a new one.
    let lines = relay.lines();
    let range = lines.iter().position(|line| line == "range").unwrap_or_else(|| panic!("{lines:?}"));
    let then = |status: &str| lines.iter().skip(range).position(|line| line == status);
    assert!(then("401").is_some() && then("401") < then("206"), "{lines:?}");
    let issued = tokens.requests().split_off(before);
    assert!(issued.len() >= 2, "{issued:?}");
    let signed = |request: &&String| request.contains("scope=repository") && request.contains("[Basic ");
    assert!(issued.iter().any(|request| signed(&request)), "{issued:?}");
}

/// An authority of the tests' own, and a certificate of 127.0.0.1 by it.
fn certificates(scratch: &Scratch) -> (String, String, String) {
    let script = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj '/CN=own authority' -keyout ca.key -out ca.crt \
        -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign && \
        openssl req -newkey rsa:2048 -nodes -subj /CN=127.0.0.1 -keyout server.key -out server.csr && \
        printf 'subjectAltName=IP:127.0.0.1\\nbasicConstraints=CA:FALSE\\n' > extensions && \
        openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile extensions -out server.crt";
    let directory = scratch.path().join("certificates");
    fs::create_dir(&directory).unwrap();
    run(Command::new("sh").args(["-c", script]).current_dir(&directory));
    let path = |name: &str| directory.join(name).to_str().unwrap().to_owned();
    (path("ca.crt"), path("server.crt"), path("server.key"))
}

#[test]
fn an_own_authority_is_believed_where_it_is_named() {
    let (scratch, layout, tree) = samples();
    let (authority, certificate, key) = certificates(&scratch);
    let registry = Registry::start_with(&format!(", tls: {{certificate: {certificate}, key: {key}}}"), "");
    let trusted = scratch.path().join("trusted");
    fs::create_dir(&trusted).unwrap();
    fs::copy(&authority, trusted.join("ca.crt")).unwrap();
    registry.push(layout.path(), "sample", "a/b", &["--dest-cert-dir", trusted.to_str().unwrap()]);
    let reference = registry.reference("a/b");
    let home = Home::with_config(&format!("[registries.\"{}\"]\nca_file = \"{authority}\"\n", registry.host));
    assert_eq!(home.tree(&[&reference]), tree);
    let stranger = Home::new();
    let refused = stranger.import(&["-o", "image.sqsh", &reference]);
    refused.assert_fails(&["certificate", "ca_file in [registries.", "SSL_CERT_FILE"]);
    assert!(stranger.leftovers().is_empty(), "{:?}", stranger.leftovers());
    let mut by_environment = stranger.command(&["-o", "image.sqsh", &reference]);
    run(by_environment.env("SSL_CERT_FILE", &authority));
}

/// The base from elsewhere, the rest from the registry.
#[test]
fn foreign_layers_come_from_elsewhere_and_only_if_asked_for() {
    let scratch = Scratch::new();
    let layers = sample();
    common::oci_layout(&scratch.path().join("oci"), &layers);
    let tree = unpacked(&scratch.path().join("oci"), "latest", &scratch);
    let registry = Registry::start();
    let content = layers[0].clone();
    let elsewhere = Server::start(move |seen| match seen.path.as_str() {
        "/layer" => Reply::ranged(seen, &content),
        _ => Reply::new(404),
    });
    let config = config(&layers, "amd64");
    registry.put_blob("a/b", config.as_bytes());
    registry.put_blob("a/b", &layers[1]);
    let docker = |name: &str| format!("application/vnd.docker.{name}");
    let mut foreign = descriptor(&layers[0], &docker("image.rootfs.foreign.diff.tar.gzip"));
    foreign["urls"] = json!([elsewhere.url("/layer")]);
    let media_type = docker("distribution.manifest.v2+json");
    let manifest = json!({
        "schemaVersion": 2, "mediaType": media_type,
        "config": descriptor(config.as_bytes(), &docker("container.image.v1+json")),
        "layers": [foreign, descriptor(&layers[1], &docker("image.rootfs.diff.tar.gzip"))],
    });
    let answer = registry.put_manifest("a/b", "latest", &media_type, &manifest.to_string());
    assert_eq!(answer.status, 201, "{} {}", answer.head, String::from_utf8_lossy(&answer.body));
    let home = Home::with_config(&registry.plain_config());
    log_in(&home, &elsewhere.host(), "me:secret");
    let reference = registry.reference("a/b");
    let refused = home.import(&["-o", "image.sqsh", &reference]);
    refused.assert_fails(&[
        "the registry does not have the layer sha256:",
        "only its address",
        "hint: --foreign-layers fetches it from there, without credentials",
    ]);
    assert!(elsewhere.seen().is_empty(), "{:?}", elsewhere.log());
    assert_eq!(home.leftovers(), [".docker"]);
    assert_eq!(home.tree(&["--foreign-layers", &reference]), tree);
    let seen = elsewhere.seen();
    assert!(
        !seen.is_empty() && seen.iter().all(|seen| seen.authorization().is_none()),
        "{:?}",
        elsewhere.log()
    );
}

/// docker-registry does not take hand-made ones of schema 1: they are signed.
#[test]
fn manifests_of_schema_1_are_refused() {
    let server = Server::start(|seen| match seen.path.as_str() {
        "/v2/" => Reply::ok("{}"),
        "/v2/a/b/manifests/latest" => Reply::ok(
            r#"{"schemaVersion":1,"name":"a/b","tag":"latest","fsLayers":[],"history":[],"signatures":[]}"#,
        )
        .header("Content-Type", "application/vnd.docker.distribution.manifest.v1+prettyjws"),
        _ => Reply::new(404),
    });
    let home = Home::with_config(&format!("[registries.\"{}\"]\nplain_http = true\n", server.host()));
    let refused = home.import(&["-o", "image.sqsh", &format!("docker://{}/a/b", server.host())]);
    refused.assert_fails(&[
        "the image has a manifest of schema 1, a format of before 2016",
        "hint: pull it with a Docker",
    ]);
    assert!(home.leftovers().is_empty(), "{:?}", home.leftovers());
}

/// A registry can be made to store what is not right: a layer that is no archive, a size that is another.
#[test]
fn what_a_registry_should_not_have_is_refused() {
    let registry = Registry::start();
    let layers = sample();
    let config = config(&layers[..1], "amd64");
    let home = Home::with_config(&registry.plain_config());
    registry.put_blob("a/b", config.as_bytes());
    registry.put_blob("a/b", &layers[0]);
    registry.put_blob("a/b", b"<html>not a layer</html>");
    let mut wrong_size = descriptor(&layers[0], LAYER);
    wrong_size["size"] = json!(layers[0].len() + 512);
    for (tag, layer, message) in [
        (
            "html",
            descriptor(b"<html>not a layer</html>", LAYER),
            "it is neither a tar archive nor compressed with",
        ),
        ("size", wrong_size, "and the manifest says"),
    ] {
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST,
            "config": descriptor(config.as_bytes(), CONFIG), "layers": [layer],
        });
        let stored = registry.put_manifest("a/b", tag, MANIFEST, &manifest.to_string());
        assert_eq!(stored.status, 201, "{}", String::from_utf8_lossy(&stored.body));
        let refused = home.import(&["-o", "image.sqsh", &registry.reference(&format!("a/b:{tag}"))]);
        refused.assert_fails(&[message]);
        assert!(home.leftovers().is_empty(), "{tag}: {:?}", home.leftovers());
        assert!(!home.layers().exists() || fs::read_dir(home.layers()).unwrap().count() == 0, "{tag}");
    }
    // By a digest that is not the tag's, with the right one beside it.
    let nothing = registry.reference(&format!("a/b@{}", digest(b"nothing")));
    home.import(&["-o", "image.sqsh", &nothing]).assert_fails(&["hint: "]);
}
