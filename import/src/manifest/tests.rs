//! Manifests that are as they should be, and others.

use super::*;

fn descriptor(content: &[u8], more: &str) -> String {
    let digest = BlobDigest::from(sha256(content));
    format!(r#"{{"mediaType":"x","digest":"{digest}","size":{}{more}}}"#, content.len())
}

fn manifest(more: &str) -> String {
    let (config, layer) = (descriptor(b"{}", ""), descriptor(b"layer", ""));
    format!(r#"{{"schemaVersion":2,"config":{config},"layers":[{layer}]{more}}}"#)
}

fn index(entries: &[String]) -> String {
    format!(r#"{{"schemaVersion":2,"mediaType":"{OCI_INDEX}","manifests":[{}]}}"#, entries.join(","))
}

fn for_platform(content: &[u8], platform: &str) -> String {
    let parsed = Platform::parse(platform).unwrap();
    descriptor(
        content,
        &format!(
            r#","platform":{{"os":"{}","architecture":"{}","variant":"{}"}}"#,
            parsed.os, parsed.architecture, parsed.variant
        ),
    )
}

fn parse_index(text: &str) -> Index {
    match parse_manifest(text.as_bytes()).unwrap() {
        ManifestOrIndex::Index(index) => index,
        ManifestOrIndex::Manifest(_) => panic!("not an index: {text}"),
    }
}

fn host(text: &str) -> Platform {
    Platform::parse(text).unwrap()
}

#[test]
fn a_manifest_is_read() {
    let text =
        manifest(&format!(r#","mediaType":"{DOCKER_MANIFEST}","annotations":null,"subject":{{"a":[1]}}"#));
    let ManifestOrIndex::Manifest(manifest) = parse_manifest(text.as_bytes()).unwrap() else {
        panic!("not a manifest")
    };
    assert_eq!(manifest.layers.len(), 1);
    assert_eq!((manifest.config.size, manifest.layers[0].size), (2, 5));
    manifest.layers[0].check(b"layer").unwrap();
    let failure = manifest.layers[0].check(b"Layer").unwrap_err();
    assert!(failure.message.contains(": the content is another, with the digest sha256:"), "{failure}");
    let failure = manifest.layers[0].check(b"layer2").unwrap_err();
    assert!(failure.message.ends_with(": it has 6 bytes, and the manifest says 5"), "{failure}");
    let foreign = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip";
    assert!(Descriptor { media_type: foreign.to_owned(), ..manifest.config }.is_foreign());
}

#[test]
fn what_can_be_read_in_two_ways_is_refused() {
    let layers = descriptor(b"layer", "");
    let cases = [
        (manifest(r#","manifests":[]"#), "it is a manifest and an index at the same time, which is refused"),
        (
            format!(r#"{{"schemaVersion":2,"layers":[{layers}],"manifests":[]}}"#),
            "it is a manifest and an index at the same time, which is refused",
        ),
        (
            manifest(&format!(r#","mediaType":"{OCI_INDEX}""#)),
            "its media type is application/vnd.oci.image.index.v1+json, and its content that of a manifest; refused",
        ),
        (
            index(&[]).replace(OCI_INDEX, OCI_MANIFEST),
            "its media type is application/vnd.oci.image.manifest.v1+json, and its content that of an index; refused",
        ),
        (manifest(r#","layers":[]"#), "not a manifest: duplicate field `layers` at line 1"),
        (r#"{"schemaVersion":1}"#.to_owned(), "the image has a manifest of schema 1"),
        (r#"{"schemaVersion":2,"fsLayers":[]}"#.to_owned(), "the image has a manifest of schema 1"),
        (r#"{"schemaVersion":3}"#.to_owned(), "not a manifest: its schemaVersion is not 2"),
        ("{}".to_owned(), "not a manifest: its schemaVersion is not 2"),
        (r#"{"schemaVersion":2}"#.to_owned(), "not a manifest: it has neither a config nor manifests"),
        ("<!DOCTYPE html>".to_owned(), "not a manifest: expected value at line 1"),
        ("[".repeat(100_000), "not a manifest: "),
        (manifest("").replace("sha256:", "md5:"), "not a manifest: \\\"md5:"),
        (manifest("").replace("\"size\":5", "\"size\":-5"), "not a manifest: invalid value: integer `-5`"),
        (
            manifest("").replace("\"size\":5", "\"size\":18446744073709551616"),
            "not a manifest: invalid type: floating point",
        ),
        (
            manifest("")
                .replace("\"layers\":[", &format!("\"layers\":[{}", format!("{layers},").repeat(1000))),
            "the image has 1001 layers, more than 1000",
        ),
        (" ".repeat((4 << 20) + 1), "the manifest has more than 4194304 bytes"),
    ];
    for (text, expected) in cases {
        let failure = parse_manifest(text.as_bytes()).unwrap_err();
        let expected = expected.replace("\\\"", "\"");
        assert!(failure.message.starts_with(&expected), "{expected}: {failure}");
    }
}

#[test]
fn the_header_must_say_the_same() {
    let text = manifest("");
    assert!(parse_manifest_as(text.as_bytes(), OCI_MANIFEST).is_ok());
    assert!(parse_manifest_as(text.as_bytes(), "text/plain").is_ok());
    assert!(parse_manifest_as(text.as_bytes(), "").is_ok());
    let failure = parse_manifest_as(text.as_bytes(), DOCKER_INDEX).unwrap_err();
    assert!(failure.message.ends_with("and its content that of a manifest; refused"), "{failure}");
    let old = "application/vnd.docker.distribution.manifest.v1+prettyjws";
    let failure = parse_manifest_as(text.as_bytes(), old).unwrap_err();
    assert!(failure.message.starts_with("the image has a manifest of schema 1"), "{failure}");
    assert!(failure.hint.unwrap().starts_with("pull it with a Docker"));
}

#[test]
fn the_closest_image_is_chosen() {
    let unknown = r#","platform":{"os":"unknown","architecture":"unknown"}"#;
    let attestation = r#","platform":{"os":"linux","architecture":"amd64"},
        "annotations":{"vnd.docker.reference.type":"attestation-manifest"}"#;
    let index = parse_index(&index(&[
        descriptor(b"unknown", unknown),
        descriptor(b"attestation", attestation),
        for_platform(b"v2", "linux/amd64/v2"),
        for_platform(b"amd64", "linux/amd64"),
        for_platform(b"again", "linux/amd64"),
        for_platform(b"v6", "linux/arm/v6"),
        for_platform(b"v7", "linux/arm/v7"),
        for_platform(b"arm64", "linux/arm64/v8"),
    ]));
    for (platform, content) in [
        ("linux/amd64", b"amd64".as_slice()),
        ("linux/amd64/v3", b"v2"),
        ("linux/arm/v7", b"v7"),
        ("linux/arm/v6", b"v6"),
        ("linux/arm64", b"arm64"),
        ("linux/arm64/v8", b"arm64"),
    ] {
        let chosen = index.choose(&host(platform)).unwrap();
        assert_eq!(chosen.digest, BlobDigest::from(sha256(content)), "{platform}");
    }
    let failure = index.choose(&host("linux/ppc64le")).unwrap_err();
    assert_eq!(failure.message, "there is no image for linux/ppc64le");
    assert_eq!(
        failure.hint.as_deref(),
        Some(
            "there is: linux/amd64/v2, linux/amd64, linux/arm/v6, linux/arm/v7, linux/arm64/v8; --platform chooses"
        )
    );
}

#[test]
fn an_index_of_one_image_need_not_tell_for_what() {
    let only = parse_index(&index(&[descriptor(b"only", "")]));
    assert_eq!(only.choose(&host("linux/amd64")).unwrap().size, 4);
    let two = parse_index(&index(&[descriptor(b"one", ""), descriptor(b"two", "")]));
    assert_eq!(
        two.choose(&host("linux/amd64")).unwrap_err().hint.unwrap(),
        "there is: not told; --platform chooses"
    );
    let none = parse_index(&index(&[]));
    assert_eq!(
        none.choose(&host("linux/amd64")).unwrap_err().hint.unwrap(),
        "its index names no image at all"
    );
}

/// The documents, the first of which is what the name stands for; each is found by its digest.
fn selected(documents: &[&str]) -> Result<Selected, Failure> {
    let first = documents[0].as_bytes().to_vec();
    let digest = BlobDigest::from(sha256(&first));
    select(first, digest, &host("linux/amd64"), &mut |wanted| {
        let found = documents.iter().find(|text| BlobDigest::from(sha256(text.as_bytes())) == wanted.digest);
        Ok(found.map_or_else(|| b"something else".to_vec(), |text| text.as_bytes().to_vec()))
    })
}

#[test]
fn indexes_are_followed_one_level_deep() {
    let image = manifest("");
    let one = index(&[for_platform(image.as_bytes(), "linux/amd64")]);
    let two = index(&[descriptor(one.as_bytes(), "")]);
    let three = index(&[descriptor(two.as_bytes(), "")]);
    let digest = BlobDigest::from(sha256(image.as_bytes()));
    for documents in [vec![&*image], vec![&*one, &image], vec![&*two, &one, &image]] {
        let selected = selected(&documents).unwrap();
        assert_eq!((selected.digest, selected.bytes), (digest, image.as_bytes().to_vec()));
    }
    let failure = selected(&[&three, &two, &one, &image]).unwrap_err();
    assert_eq!(failure.message, "an index in an index in an index, which is refused");
    let failure = selected(&[&one]).unwrap_err();
    assert!(failure.message.contains(": it has 14 bytes, and the manifest says "), "{failure}");
    let confused = index(&[descriptor(image.as_bytes(), "").replace("\"x\"", &format!("\"{OCI_INDEX}\""))]);
    let failure = selected(&[&confused, &image]).unwrap_err();
    assert!(failure.message.ends_with("and its content that of a manifest; refused"), "{failure}");
}
