//! The parsers of what registries send and credential files hold, as functions of bytes: what fuzzers and the tests call.
//!
//! A function returns whether its parser took the bytes. It must not panic, run forever or eat memory, whatever they are; and
//! what a parser promises of its result is asserted here.

use std::time::UNIX_EPOCH;

use super::auth::challenge;
use super::backoff::parse_retry_after;
use super::blob::parse_range;
use super::credentials::auth_file::AuthFile;
use super::credentials::{Wanted, netrc};
use super::environment::Environment;
use super::notes::Notes;
use super::transport::{Url, shown};
use crate::manifest::{LAYER_LIMIT, ManifestOrIndex, Platform, parse_manifest};

/// A manifest or an index, and the choice from it.
pub fn manifest(bytes: &[u8]) -> bool {
    match parse_manifest(bytes) {
        Ok(ManifestOrIndex::Index(index)) => {
            for platform in ["linux/amd64", "linux/arm/v7", "linux/arm64/v8"] {
                if let Ok(chosen) = Platform::parse(platform).and_then(|platform| index.choose(&platform)) {
                    assert!(index.manifests.contains(chosen));
                }
            }
            true
        }
        Ok(ManifestOrIndex::Manifest(manifest)) => {
            assert!(manifest.layers.len() <= LAYER_LIMIT);
            true
        }
        Err(failure) => {
            assert!(!failure.message.contains('\n'));
            false
        }
    }
}

/// The headers of an answer that are understood: redirects, challenges, times and ranges.
pub fn headers(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    let challenge = challenge::choose(&[text]).is_some();
    let time = parse_retry_after(text, UNIX_EPOCH).is_some();
    let range = parse_range(text).is_some();
    assert!(!shown(text).contains('?'));
    let from = Url::parse("https://registry.test/v2/a/blobs/x").and_then(|url| url.join(text));
    if let Ok(url) = &from {
        // What we understood is what we ask for.
        assert_eq!(Url::parse(&url.to_string()).as_ref(), Ok(url));
        assert!(url.path.starts_with('/') && !url.host.is_empty());
    }
    challenge || time || range || from.is_ok()
}

/// Files of credentials, of either form.
pub fn credentials(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    let wanted = Wanted { host: "nvcr.io", repository: "nvidia/x", user: None };
    let environment = Environment::of([("KEY", "value")]);
    if netrc::find(text, &wanted, &environment).is_some() {
        return true;
    }
    // Without helpers, which are programs.
    AuthFile::parse(text).is_ok_and(|mut file| {
        file.forget_helpers();
        file.find(&wanted, &environment, &Notes::silent(), "").is_some()
    })
}

/// Good inputs, which the fuzzers start from as well.
pub const SEEDS: [(&str, &str); 10] = [
    (
        "manifest",
        r#"{"schemaVersion":2,"config":{"mediaType":"a","digest":"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","size":0},"layers":[]}"#,
    ),
    (
        "manifest",
        r#"{"schemaVersion":2,"manifests":[{"digest":"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","size":0,"platform":{"os":"linux","architecture":"arm","variant":"v6.1"},"annotations":null}]}"#,
    ),
    ("headers", r#"Bearer realm="https://auth.docker.io/token",service="a \"b\"",scope=x, Basic realm="y""#),
    ("headers", "https://storage.test:8443/a/b?c=d#e"),
    ("headers", "Sun, 06 Nov 1994 08:49:37 GMT"),
    ("headers", "bytes 100-199/200"),
    ("headers", "//[::1]:99/../x"),
    ("credentials", r#"{"auths":{"https://nvcr.io/v1/":{"auth":"JG9hdXRodG9rZW46a2V5"}},"credHelpers":{}}"#),
    ("credentials", "machine nvcr.io login $oauthtoken password ${KEY}$KEY"),
    ("credentials", "machine authn.nvidia.com login \"a\" password b"),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// A few thousand broken forms of each: the fuzzers do more, and take longer.
    #[test]
    fn broken_input_is_survived() {
        let mut random = 1_u64;
        let mut next = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % below.max(1)
        };
        let parsers = crate::fuzz::TARGETS;
        for (name, seed) in SEEDS {
            let (_, parser) = parsers.iter().find(|(known, _)| *known == name).unwrap();
            assert!(parser(seed.as_bytes()), "{seed}");
            for length in 0..seed.len() {
                parser(&seed.as_bytes()[..length]);
            }
            for _ in 0..3000 {
                let mut bytes = seed.as_bytes().to_vec();
                for _ in 0..=next(4) {
                    let at = next(bytes.len());
                    match next(4) {
                        0 => bytes[at] = next(256) as u8,
                        1 => bytes[at] = br#"{}[]":,=/\$#@ 09"#[next(16)],
                        2 => drop(bytes.drain(at..(at + next(8)).min(bytes.len()))),
                        _ => {
                            let piece = bytes[at..(at + next(20)).min(bytes.len())].to_vec();
                            let to = next(bytes.len());
                            bytes.splice(to..to, piece);
                        }
                    }
                    if bytes.is_empty() {
                        bytes.push(b'{');
                    }
                }
                parser(&bytes);
            }
        }
    }
}
