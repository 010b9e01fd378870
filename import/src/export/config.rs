//! The configuration of an exported image: the one that it was imported with, or what its maker left in other forms.
//!
//! Run by: the user, in the exporter.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use mizzen::image::architecture::{Architecture, host_architecture};
use mizzen::image::{Loaded, Metadata, metadata, read_file, true_architecture};
use mizzen_core::Failure;
use mizzen_core::failure::quote;
use serde_json::{Map, Value, json};

use super::layer::Layer;

/// Where the importer keeps it.
const CONFIG: &str = "/.mizzen/config.json";
const LIMIT: usize = 1 << 20;

/// A configuration.
pub struct Config {
    /// As JSON.
    pub text: Vec<u8>,
    /// In Go's words.
    pub architecture: String,
    pub os: String,
}

/// The configuration of an image with this layer, and what could not be taken into it.
pub fn make(image: &Loaded, layer: &Layer) -> Result<(Config, Vec<String>), Failure> {
    // Not with the variables of whoever exports.
    let described = metadata::read_with(image.tree(), &|_| None)?;
    let mut warnings = Vec::new();
    let mut document = match kept(image)? {
        Some(document) => document,
        None => from_metadata(&described, &mut warnings),
    };
    let text = |document: &Map<String, Value>, key: &str| {
        document.get(key).and_then(Value::as_str).filter(|text| !text.is_empty()).map(str::to_owned)
    };
    let machine = || {
        let known = true_architecture(image.tree(), &described).or(image.opened.architecture);
        // What has no programs is for any machine, but must name one.
        known.or_else(host_architecture).map_or("amd64", Architecture::oci_name).to_owned()
    };
    let architecture = text(&document, "architecture").unwrap_or_else(machine);
    let os = text(&document, "os").unwrap_or_else(|| "linux".to_owned());
    let created = text(&document, "created").unwrap_or_else(|| "1970-01-01T00:00:00Z".to_owned());
    document.insert("architecture".to_owned(), architecture.clone().into());
    document.insert("os".to_owned(), os.clone().into());
    // Of all layers there is one now.
    document.insert("history".to_owned(), json!([{ "created": &created, "created_by": "mizzen export" }]));
    document.insert("created".to_owned(), created.into());
    let digests = [layer.content_digest.to_string()];
    document.insert("rootfs".to_owned(), json!({ "type": "layers", "diff_ids": digests }));
    Ok((Config { text: Value::Object(document).to_string().into_bytes(), architecture, os }, warnings))
}

/// What the image was imported with, if it was.
fn kept(image: &Loaded) -> Result<Option<Map<String, Value>>, Failure> {
    let found = read_file(image.tree(), Path::new(CONFIG), LIMIT);
    // Whether it can be read was found out with the metadata.
    let Ok(Some(text)) = found else { return Ok(None) };
    serde_json::from_slice(&text).map(Some).map_err(|error| {
        Failure::new(format!("{CONFIG} in the image is damaged: {}", quote(error.to_string().as_bytes())))
    })
}

fn from_metadata(metadata: &Metadata, warnings: &mut Vec<String>) -> Map<String, Value> {
    let mut config = Map::new();
    let mut insert = |key: &str, list: Vec<String>| {
        if !list.is_empty() {
            config.insert(key.to_owned(), list.into());
        }
    };
    let variables = metadata.environment.iter().filter_map(|(name, value)| {
        let variable = name.to_str().zip(value.to_str()).map(|(name, value)| format!("{name}={value}"));
        if variable.is_none() {
            warnings.push(format!("left out: the variable {} (not UTF-8)", quote(name.as_encoded_bytes())));
        }
        variable
    });
    insert("Env", variables.collect());
    let lossy = |list: &[OsString]| list.iter().map(|text| utf8(text)).collect();
    insert("Entrypoint", lossy(&metadata.entrypoint));
    insert("Cmd", lossy(&metadata.command));
    if let Some(directory) = &metadata.workdir {
        config.insert("WorkingDir".to_owned(), utf8(directory.as_os_str()).into());
    }
    if !metadata.labels.is_empty() {
        config.insert("Labels".to_owned(), json!(metadata.labels));
    }
    let mut document = Map::new();
    document.insert("config".to_owned(), config.into());
    document
}

fn utf8(text: &OsStr) -> String {
    text.to_string_lossy().into_owned()
}
