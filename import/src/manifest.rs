//! Manifests and indexes, as registries and archives have them: OCI's and Docker's, schema 2.
//!
//! The bytes are anybody's. What could be read in two ways is refused: a manifest that is also an index, a media type that
//! says something else than the content.
//!
//! Run by: the user, in the importer.

mod digest;
mod platform;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use mizzen_core::Failure;
use mizzen_core::failure::quote;
use serde::{Deserialize, Deserializer};

pub use digest::{BlobDigest, Hasher, sha256};
pub use platform::Platform;

/// How long a manifest or index may be, as with other clients.
pub const MANIFEST_LIMIT: u64 = 4 << 20;
/// How long an image's configuration may be.
pub const CONFIG_LIMIT: u64 = 8 << 20;
/// How many layers an image may have. Docker makes 127 at most.
pub const LAYER_LIMIT: usize = 1000;
/// How many images an index may name.
const INDEX_LIMIT: usize = 10_000;

/// An image's manifest, in OCI's words.
pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// An index of images, in OCI's words.
pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// An image's manifest, in Docker's words.
pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
/// An index of images, in Docker's words.
pub const DOCKER_INDEX: &str = "application/vnd.docker.distribution.manifest.list.v2+json";

/// Something that is kept beside a manifest, and how to know it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// What it is said to be. Compression is seen in the first bytes, not here.
    #[serde(default, deserialize_with = "or_default")]
    pub media_type: String,
    /// What its bytes hash to.
    #[serde(deserialize_with = "digest_text")]
    pub digest: BlobDigest,
    /// How many bytes it has.
    pub size: u64,
    /// Where it can be had if the registry does not keep it.
    #[serde(default, deserialize_with = "or_default")]
    pub urls: Vec<String>,
    /// In an index: what machine it is for.
    #[serde(default)]
    pub platform: Option<Platform>,
    /// What its maker has to say.
    #[serde(default, deserialize_with = "or_default")]
    pub annotations: BTreeMap<String, String>,
}

impl Descriptor {
    /// Whether the registry need not have it (Docker's and OCI's words for layers that may not be given away).
    pub fn is_foreign(&self) -> bool {
        self.media_type.contains(".foreign.") || self.media_type.contains(".nondistributable.")
    }

    /// Whether these are its bytes.
    pub fn check(&self, bytes: &[u8]) -> Result<(), Failure> {
        if bytes.len() as u64 != self.size {
            return Err(wrong_size(&self.digest, bytes.len() as u64, self.size));
        }
        check_digest(&self.digest, bytes)
    }
}

/// Whether these bytes have this digest.
pub fn check_digest(digest: &BlobDigest, bytes: &[u8]) -> Result<(), Failure> {
    let found = digest.of_same_kind(bytes);
    if found == *digest { Ok(()) } else { Err(wrong_digest(digest, &found)) }
}

/// The bytes are not those that were announced.
pub fn wrong_digest(digest: &BlobDigest, found: &BlobDigest) -> Failure {
    Failure::new(format!("{digest}: the content is another, with the digest {found}"))
        .hint("it was changed on its way or where it is kept; try again, and if it stays so, tell who runs the registry")
}

/// There are not as many bytes as announced.
pub fn wrong_size(digest: &BlobDigest, found: u64, expected: u64) -> Failure {
    Failure::new(format!("{digest}: it has {found} bytes, and the manifest says {expected}"))
}

/// Nobody makes such an image; each layer takes a file and time.
pub fn too_many_layers(count: usize) -> Failure {
    Failure::new(format!("the image has {count} layers, more than {LAYER_LIMIT}"))
}

/// One image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// What it says it is; empty in old OCI manifests.
    pub media_type: String,
    /// What other kind of thing it is, if it is no image (`oras://`); empty otherwise.
    pub artifact_type: String,
    /// The image's configuration.
    pub config: Descriptor,
    /// The layers, the lowest first.
    pub layers: Vec<Descriptor>,
    /// What its maker has to say.
    pub annotations: BTreeMap<String, String>,
}

/// Images of one name for several machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    /// Their manifests.
    pub manifests: Vec<Descriptor>,
    /// What its maker has to say.
    pub annotations: BTreeMap<String, String>,
}

/// What a name in a registry can stand for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ManifestOrIndex {
    /// One image.
    Manifest(Box<Manifest>),
    /// Several, to choose from.
    Index(Index),
}

/// Both forms in one, so that what is in both is seen.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    #[serde(default)]
    schema_version: Option<u64>,
    #[serde(default, deserialize_with = "or_default")]
    media_type: String,
    #[serde(default, deserialize_with = "or_default")]
    artifact_type: String,
    #[serde(default)]
    config: Option<Descriptor>,
    #[serde(default)]
    layers: Option<Vec<Descriptor>>,
    #[serde(default)]
    manifests: Option<Vec<Descriptor>>,
    #[serde(default, deserialize_with = "or_default")]
    annotations: BTreeMap<String, String>,
    /// Of schema 1.
    #[serde(default)]
    fs_layers: Option<serde::de::IgnoredAny>,
}

/// Go writes `null` for what is empty.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

fn digest_text<'de, D: Deserializer<'de>>(from: D) -> Result<BlobDigest, D::Error> {
    let text = String::deserialize(from)?;
    BlobDigest::parse(&text).map_err(|failure| serde::de::Error::custom(failure.message))
}

/// Reads a manifest or an index.
pub fn parse_manifest(bytes: &[u8]) -> Result<ManifestOrIndex, Failure> {
    if bytes.len() as u64 > MANIFEST_LIMIT {
        return Err(Failure::new(format!("the manifest has more than {MANIFEST_LIMIT} bytes")));
    }
    let document: Document = serde_json::from_slice(bytes)
        .map_err(|error| Failure::new(format!("not a manifest: {}", quote(error.to_string().as_bytes()))))?;
    if document.schema_version == Some(1) || document.fs_layers.is_some() {
        return Err(schema_1());
    }
    if document.schema_version != Some(2) {
        return Err(Failure::new("not a manifest: its schemaVersion is not 2"));
    }
    match (document.config, document.layers, document.manifests) {
        (Some(config), layers, None) => {
            expect_type(&document.media_type, &[OCI_MANIFEST, DOCKER_MANIFEST], "a manifest")?;
            let layers = layers.unwrap_or_default();
            if layers.len() > LAYER_LIMIT {
                return Err(too_many_layers(layers.len()));
            }
            Ok(ManifestOrIndex::Manifest(Box::new(Manifest {
                media_type: document.media_type,
                artifact_type: document.artifact_type,
                config,
                layers,
                annotations: document.annotations,
            })))
        }
        (None, None, Some(manifests)) => {
            expect_type(&document.media_type, &[OCI_INDEX, DOCKER_INDEX], "an index")?;
            if manifests.len() > INDEX_LIMIT {
                let count = manifests.len();
                return Err(Failure::new(format!("the index has {count} entries, more than {INDEX_LIMIT}")));
            }
            Ok(ManifestOrIndex::Index(Index { manifests, annotations: document.annotations }))
        }
        (None, _, None) => Err(Failure::new("not a manifest: it has neither a config nor manifests")),
        _ => Err(Failure::new("it is a manifest and an index at the same time, which is refused")),
    }
}

/// The same for what came with a media type of its own, in an HTTP header or in a descriptor.
pub fn parse_manifest_as(bytes: &[u8], media_type: &str) -> Result<ManifestOrIndex, Failure> {
    if media_type.starts_with("application/vnd.docker.distribution.manifest.v1+") {
        return Err(schema_1());
    }
    let parsed = parse_manifest(bytes)?;
    // Others are of those who do not know: text/plain, application/json, application/octet-stream.
    if [OCI_MANIFEST, DOCKER_MANIFEST, OCI_INDEX, DOCKER_INDEX].contains(&media_type) {
        match &parsed {
            ManifestOrIndex::Manifest(_) => {
                expect_type(media_type, &[OCI_MANIFEST, DOCKER_MANIFEST], "a manifest")?;
            }
            ManifestOrIndex::Index(_) => expect_type(media_type, &[OCI_INDEX, DOCKER_INDEX], "an index")?,
        }
    }
    Ok(parsed)
}

fn schema_1() -> Failure {
    Failure::new("the image has a manifest of schema 1, a format of before 2016").hint(
        "pull it with a Docker that still reads it and push it again, or ask whoever keeps it for a newer one",
    )
}

/// A type that says something else is an attempt to have two readers see two things.
fn expect_type(media_type: &str, good: &[&str], content: &str) -> Result<(), Failure> {
    if media_type.is_empty() || good.contains(&media_type) {
        return Ok(());
    }
    let shown = quote(media_type.as_bytes());
    Err(Failure::new(format!("its media type is {shown}, and its content that of {content}; refused")))
}

/// The value of buildkit's annotation on what is no image, but says how one was made.
const ATTESTATION: (&str, &str) = ("vnd.docker.reference.type", "attestation-manifest");

impl Index {
    /// The image for a machine: the closest variant, and the first of several.
    pub fn choose(&self, platform: &Platform) -> Result<&Descriptor, Failure> {
        let (name, value) = ATTESTATION;
        let images: Vec<&Descriptor> = self
            .manifests
            .iter()
            .filter(|entry| entry.annotations.get(name).is_none_or(|kind| kind != value))
            .filter(|entry| !entry.platform.as_ref().is_some_and(Platform::is_unknown))
            .collect();
        let ranked =
            images.iter().filter_map(|entry| Some((platform.rank(entry.platform.as_ref()?)?, *entry)));
        if let Some((_, best)) = ranked.min_by_key(|(rank, _)| *rank) {
            return Ok(best);
        }
        // An index of one image that does not say for what: archives have such, and indexes of indexes.
        if let [only] = images.as_slice()
            && only.platform.is_none()
        {
            return Ok(only);
        }
        let mut offered: Vec<String> = Vec::new();
        for entry in images {
            let text = entry.platform.as_ref().map_or_else(|| "not told".to_owned(), Platform::to_string);
            if !offered.contains(&text) {
                offered.push(text);
            }
        }
        Err(none_for(platform, &offered))
    }
}

/// How many of an index's platforms a message names.
const NAMED: usize = 20;

fn none_for(platform: &Platform, offered: &[String]) -> Failure {
    let failure = Failure::new(format!("there is no image for {platform}"));
    if offered.is_empty() {
        return failure.hint("its index names no image at all");
    }
    let more = if offered.len() > NAMED { ", …" } else { "" };
    let named = &offered[..offered.len().min(NAMED)];
    failure.hint(format!("there is: {}{more}; --platform chooses", named.join(", ")))
}

/// One image, found by way of its indexes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selected {
    /// The manifest.
    pub manifest: Manifest,
    /// Its bytes, as they were hashed.
    pub bytes: Vec<u8>,
    /// Their digest.
    pub digest: BlobDigest,
}

/// Goes from what a name stands for to one image. `fetch` gets what an index names; its size and digest are checked here.
///
/// An index may name another one, as some builders make them. A third is refused: one that contains itself has no end.
pub fn select(
    bytes: Vec<u8>,
    digest: BlobDigest,
    platform: &Platform,
    fetch: &mut dyn FnMut(&Descriptor) -> Result<Vec<u8>, Failure>,
) -> Result<Selected, Failure> {
    let mut found = (bytes, digest, String::new());
    for _ in 0..2 {
        let (bytes, digest, media_type) = found;
        let index = match parse_manifest_as(&bytes, &media_type)? {
            ManifestOrIndex::Manifest(manifest) => {
                return Ok(Selected { manifest: *manifest, bytes, digest });
            }
            ManifestOrIndex::Index(index) => index,
        };
        let entry = index.choose(platform)?;
        if entry.size > MANIFEST_LIMIT {
            return Err(Failure::new(format!("{}: more than {MANIFEST_LIMIT} bytes", entry.digest)));
        }
        let bytes = fetch(entry)?;
        entry.check(&bytes)?;
        found = (bytes, entry.digest, entry.media_type.clone());
    }
    match parse_manifest_as(&found.0, &found.2)? {
        ManifestOrIndex::Manifest(manifest) => {
            Ok(Selected { manifest: *manifest, bytes: found.0, digest: found.1 })
        }
        ManifestOrIndex::Index(_) => Err(Failure::new("an index in an index in an index, which is refused")),
    }
}
