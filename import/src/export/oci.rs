//! An OCI layout in a tar archive.
//!
//! Run by: the user, in the exporter.

use std::io::{self, Write};

use mizzen_core::{Digest, Reference};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::ExportCompression;
use super::config::Config;
use super::layer::Layer;
use crate::tar::{Entry, EntryKind, Writer};

/// Writes the archive: small things first, so that who reads it as a stream knows what the layer is.
pub fn write<W: Write>(out: W, layer: Layer, config: &Config, tag: Option<&Reference>) -> io::Result<W> {
    let mut archive = Writer::new(out);
    let config_digest = digest(&config.text);
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": config_digest.to_string(),
            "size": config.text.len(),
        },
        "layers": [{ "mediaType": media_type(layer.compression), "digest": layer.digest.to_string(), "size": layer.len }],
    });
    let manifest = manifest.to_string().into_bytes();
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": digest(&manifest).to_string(),
            "size": manifest.len(),
            "platform": { "architecture": config.architecture, "os": config.os },
            "annotations": annotations(tag),
        }],
    });
    add(&mut archive, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    add(&mut archive, "index.json", index.to_string().as_bytes())?;
    archive.add(&Entry::new("blobs/", EntryKind::Directory, 0o755, 0))?;
    archive.add(&Entry::new("blobs/sha256/", EntryKind::Directory, 0o755, 0))?;
    add(&mut archive, &blob(digest(&manifest)), &manifest)?;
    add(&mut archive, &blob(config_digest), &config.text)?;
    archive.add_file(&Entry::new(blob(layer.digest), EntryKind::File, 0o644, layer.len), layer.file)?;
    archive.finish()
}

/// Adds a small file.
pub fn add<W: Write>(archive: &mut Writer<W>, name: &str, content: &[u8]) -> io::Result<()> {
    archive.add_file(&Entry::new(name, EntryKind::File, 0o644, content.len() as u64), content)
}

pub fn digest(bytes: &[u8]) -> Digest {
    Digest::new(Sha256::digest(bytes).into())
}

fn blob(digest: Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

fn media_type(compression: ExportCompression) -> &'static str {
    match compression {
        ExportCompression::None => "application/vnd.oci.image.layer.v1.tar",
        ExportCompression::Gzip => "application/vnd.oci.image.layer.v1.tar+gzip",
        ExportCompression::Zstd => "application/vnd.oci.image.layer.v1.tar+zstd",
    }
}

/// The names that programs look for: skopeo and umoci want the tag alone, podman and containerd the whole name.
fn annotations(tag: Option<&Reference>) -> Value {
    let name = tag.and_then(|name| name.tag.as_deref()).unwrap_or("latest");
    let mut annotations = json!({ "org.opencontainers.image.ref.name": name });
    if let Some(reference) = tag {
        let whole = format!("{}/{}:{name}", reference.registry, reference.repository);
        annotations["io.containerd.image.name"] = whole.into();
    }
    annotations
}
