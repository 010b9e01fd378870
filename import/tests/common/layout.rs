//! OCI layouts, put together by hand: what no tool makes is also needed.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// `sha256:HEX` of some bytes.
pub fn digest(bytes: &[u8]) -> String {
    format!("sha256:{:x}", Sha256::digest(bytes))
}

/// What stands for some bytes in a manifest.
pub fn descriptor(bytes: &[u8], media_type: &str) -> Value {
    json!({ "mediaType": media_type, "digest": digest(bytes), "size": bytes.len() })
}

/// The configuration of an image of these layers.
pub fn config(layers: &[Vec<u8>], architecture: &str) -> String {
    let diff_ids: Vec<String> = layers.iter().map(|layer| digest(layer)).collect();
    let config = json!({
        "architecture": architecture, "os": "linux", "config": { "Env": ["A=b"] },
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
    });
    config.to_string()
}

/// A layout in a directory.
pub struct Layout {
    directory: PathBuf,
    named: RefCell<Vec<Value>>,
}

impl Layout {
    pub fn new(directory: &Path) -> Layout {
        fs::create_dir_all(directory.join("blobs/sha256")).unwrap();
        fs::write(directory.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        Layout { directory: directory.to_owned(), named: RefCell::default() }
    }

    pub fn path(&self) -> &Path {
        &self.directory
    }

    /// Where a blob is.
    pub fn blob(&self, digest: &str) -> PathBuf {
        self.directory.join("blobs").join(digest.replacen(':', "/", 1))
    }

    /// Stores a blob; returns its descriptor.
    pub fn put(&self, bytes: &[u8], media_type: &str) -> Value {
        fs::write(self.blob(&digest(bytes)), bytes).unwrap();
        descriptor(bytes, media_type)
    }

    /// Stores a manifest of these descriptors; returns its own.
    pub fn manifest(&self, config: Value, layers: Vec<Value>) -> Value {
        let manifest =
            json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers });
        self.put(manifest.to_string().as_bytes(), MANIFEST)
    }

    /// Stores an image of these layers, as they are.
    pub fn image(&self, layers: &[Vec<u8>], architecture: &str) -> Value {
        let config = self.put(config(layers, architecture).as_bytes(), CONFIG);
        let mut manifest = self.manifest(config, layers.iter().map(|layer| self.put(layer, LAYER)).collect());
        manifest["platform"] = json!({ "os": "linux", "architecture": architecture });
        manifest
    }

    /// Stores what says how an image was made, as buildkit does.
    pub fn attestation(&self, of: &Value) -> Value {
        let config = self.put(br#"{"architecture":"unknown","os":"unknown","config":{},"rootfs":{"type":"layers","diff_ids":[]}}"#, CONFIG);
        let statement = self.put(b"{\"_type\": \"statement\"}", "application/vnd.in-toto+json");
        let mut manifest = self.manifest(config, vec![statement]);
        manifest["platform"] = json!({ "os": "unknown", "architecture": "unknown" });
        manifest["annotations"] = json!({
            "vnd.docker.reference.type": "attestation-manifest",
            "vnd.docker.reference.digest": of["digest"],
        });
        manifest
    }

    /// Stores an index of images.
    pub fn index(&self, manifests: &[Value]) -> Value {
        let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": manifests });
        self.put(index.to_string().as_bytes(), INDEX)
    }

    /// Gives something a name.
    pub fn name(&self, name: &str, mut entry: Value) {
        entry["annotations"] = json!({ "org.opencontainers.image.ref.name": name });
        self.named.borrow_mut().push(entry);
        let index = json!({ "schemaVersion": 2, "manifests": *self.named.borrow() });
        fs::write(self.directory.join("index.json"), index.to_string()).unwrap();
    }
}
