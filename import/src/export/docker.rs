//! An archive as `docker save` has always written it.
//!
//! Run by: the user, in the exporter.

use std::io::{self, Write};

use mizzen_core::Reference;
use mizzen_core::reference::DOCKER_HUB;
use serde_json::{Value, json};

use super::config::Config;
use super::layer::Layer;
use super::oci::{add, digest};
use crate::tar::{Entry, EntryKind, Writer};

/// Writes the archive: small things first, so that who reads it as a stream knows what the layer is.
pub fn write<W: Write>(out: W, layer: Layer, config: &Config, tag: Option<&Reference>) -> io::Result<W> {
    let mut archive = Writer::new(out);
    let config_name = format!("{}.json", digest(&config.text).hex());
    let id = layer.content_digest.hex();
    let layer_name = format!("{id}/layer.tar");
    let (name, tag) = tag.map(short).unzip();
    let whole = name.as_ref().zip(tag.as_ref()).map(|(name, tag)| vec![format!("{name}:{tag}")]);
    let manifest = json!([{ "Config": config_name, "RepoTags": whole, "Layers": [layer_name] }]);
    add(&mut archive, "manifest.json", manifest.to_string().as_bytes())?;
    // For Docker before 1.10, and for programs that list names without reading manifests.
    if let (Some(name), Some(tag)) = (name, tag) {
        let repositories = json!({ name: { tag: id } });
        add(&mut archive, "repositories", repositories.to_string().as_bytes())?;
    }
    add(&mut archive, &config_name, &config.text)?;
    archive.add(&Entry::new(format!("{id}/"), EntryKind::Directory, 0o755, 0))?;
    add(&mut archive, &format!("{id}/VERSION"), b"1.0")?;
    add(&mut archive, &format!("{id}/json"), legacy(config, &id).to_string().as_bytes())?;
    archive.add_file(&Entry::new(layer_name, EntryKind::File, 0o644, layer.len), layer.file)?;
    archive.finish()
}

/// The name as users of Docker know it, and the tag.
fn short(reference: &Reference) -> (String, String) {
    let Reference { registry, repository, tag, .. } = reference;
    let name = match registry.as_str() {
        DOCKER_HUB => repository.strip_prefix("library/").unwrap_or(repository).to_owned(),
        _ => format!("{registry}/{repository}"),
    };
    (name, tag.clone().unwrap_or_else(|| "latest".to_owned()))
}

/// What the first version of the format had for each layer.
fn legacy(config: &Config, id: &str) -> Value {
    let document: Value = serde_json::from_slice(&config.text).unwrap_or_default();
    json!({
        "id": id,
        "created": document["created"],
        "architecture": config.architecture,
        "os": config.os,
        "config": document["config"],
    })
}
