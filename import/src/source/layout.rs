//! Images in files: the OCI image layout, in a directory or an archive, and the form of `docker save`. Which of the images is
//! meant, its configuration, and the names of its layers.
//!
//! Names in these documents are looked up among the files that there are; no path is made of them.
//!
//! Run by: the user, in the importer.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use mizzen_core::Failure;
use mizzen_core::failure::quote;
use mizzen_core::image::cannot_open;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::failures::failure_of;
use crate::manifest::{
    BlobDigest, CONFIG_LIMIT, Descriptor, Index, LAYER_LIMIT, MANIFEST_LIMIT, ManifestOrIndex, Platform,
    parse_manifest, select, too_many_layers, wrong_size,
};

/// The annotation of an index that names an image.
const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// containerd's, which `docker save` has beside it; the whole name.
const IMAGE_NAME: &str = "io.containerd.image.name";
const NOT_COMPLETE: &str = "the archive is damaged, or was not copied completely";

/// The forms of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// oci-layout, index.json, blobs.
    Oci,
    /// manifest.json.
    Docker,
}

/// The files of a layout.
pub trait LayoutFiles {
    /// A whole file, if it is there; longer ones than `limit` are a failure.
    fn read(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>, Failure>;

    /// The digest and length of a layer's file, as far as they are known; none if it is not there.
    fn find(&self, name: &str) -> Option<u64>;

    /// Whether a file is a tar that is not compressed.
    fn is_plain_tar(&self, name: &str) -> bool;
}

/// One image of a layout.
#[derive(Debug)]
pub struct Described {
    /// The configuration, as its maker wrote it.
    pub config: Vec<u8>,
    /// The layers, the lowest first.
    pub layers: Vec<DescribedLayer>,
    /// The manifest's digest, if there is a manifest.
    pub manifest: Option<BlobDigest>,
}

/// A layer by the name of its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescribedLayer {
    /// The file.
    pub name: String,
    /// What it must hash to, if that is known.
    pub digest: Option<BlobDigest>,
    /// Its length.
    pub size: u64,
}

/// Finds the image that is meant.
pub fn describe(
    files: &dyn LayoutFiles,
    form: Option<Form>,
    name: Option<&str>,
    platform: &Platform,
) -> Result<Described, Failure> {
    let has_index = files.find("index.json").is_some();
    match form {
        Some(Form::Docker) => describe_docker(files, name),
        Some(Form::Oci) => describe_oci(files, name, platform),
        None if has_index => describe_oci(files, name, platform),
        None => describe_docker(files, name),
    }
}

fn blob_name(digest: &BlobDigest) -> String {
    let text = digest.to_string();
    format!("blobs/{}", text.replacen(':', "/", 1))
}

fn read_blob(files: &dyn LayoutFiles, descriptor: &Descriptor, limit: u64) -> Result<Vec<u8>, Failure> {
    let name = blob_name(&descriptor.digest);
    let missing = || Failure::new(format!("{name} is not there")).hint(NOT_COMPLETE);
    let bytes = files.read(&name, limit)?.ok_or_else(missing)?;
    descriptor.check(&bytes)?;
    Ok(bytes)
}

fn describe_oci(
    files: &dyn LayoutFiles,
    name: Option<&str>,
    platform: &Platform,
) -> Result<Described, Failure> {
    let index = files.read("index.json", MANIFEST_LIMIT)?;
    let index = index.ok_or_else(|| Failure::new("no index.json: not an OCI layout"))?;
    let ManifestOrIndex::Index(index) =
        parse_manifest(&index).map_err(|failure| failure.about("index.json"))?
    else {
        return Err(Failure::new("index.json is a manifest, and not an index"));
    };
    let entry = choose(&index, name, platform)?;
    let bytes = read_blob(files, entry, MANIFEST_LIMIT)?;
    let mut fetch = |descriptor: &Descriptor| read_blob(files, descriptor, MANIFEST_LIMIT);
    let selected = select(bytes, entry.digest, platform, &mut fetch)?;
    let config = read_blob(files, &selected.manifest.config, CONFIG_LIMIT)?;
    let mut layers = Vec::new();
    for layer in &selected.manifest.layers {
        let name = blob_name(&layer.digest);
        let size = files.find(&name).ok_or_else(|| {
            let failure = Failure::new(format!("{name} is not there"));
            let foreign = "it is a layer that may not be given away, and the archive was made without it";
            failure.hint(if layer.is_foreign() { foreign } else { NOT_COMPLETE })
        })?;
        if size != layer.size {
            return Err(wrong_size(&layer.digest, size, layer.size).hint(NOT_COMPLETE));
        }
        layers.push(DescribedLayer { name, digest: Some(layer.digest), size });
    }
    Ok(Described { config, layers, manifest: Some(selected.digest) })
}

/// The entry of an index that has this name; without a name, the one that fits this machine.
fn choose<'a>(index: &'a Index, name: Option<&str>, platform: &Platform) -> Result<&'a Descriptor, Failure> {
    let names = |entry: &'a Descriptor| {
        [IMAGE_NAME, REF_NAME].into_iter().filter_map(|key| entry.annotations.get(key).map(String::as_str))
    };
    let all: Vec<&str> = index.manifests.iter().flat_map(names).collect();
    let Some(name) = name else {
        let mut distinct: Vec<&str> =
            index.manifests.iter().filter_map(|entry| names(entry).next()).collect();
        distinct.dedup();
        if distinct.len() > 1 {
            return Err(Failure::new("it has several images").hint(which(&all)));
        }
        return index.choose(platform);
    };
    let named: Vec<Descriptor> =
        index.manifests.iter().filter(|entry| names(entry).any(|known| known == name)).cloned().collect();
    let Some(first) = named.first() else {
        let message = format!("it has no image \"{}\"", quote(name.as_bytes()));
        return Err(Failure::new(message).hint(which(&all)));
    };
    let digest = if named.len() == 1 {
        first.digest
    } else {
        Index { manifests: named, annotations: Default::default() }.choose(platform)?.digest
    };
    let entry = index.manifests.iter().find(|entry| entry.digest == digest);
    entry.ok_or_else(|| Failure::new("its index contradicts itself"))
}

/// How many names a message has.
const NAMED: usize = 20;

fn which(names: &[&str]) -> String {
    if names.is_empty() {
        return "it names none".to_owned();
    }
    let names: Vec<String> = names.iter().take(NAMED).map(|name| quote(name.as_bytes())).collect();
    format!("name one behind the file, after a colon; there is: {}", names.join(", "))
}

/// An image in the manifest.json of `docker save`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerImage {
    config: String,
    repo_tags: Option<Vec<String>>,
    layers: Option<Vec<String>>,
}

fn describe_docker(files: &dyn LayoutFiles, name: Option<&str>) -> Result<Described, Failure> {
    let missing = || Failure::new("no manifest.json: not an archive of docker save").hint(NOT_COMPLETE);
    let bytes = files.read("manifest.json", MANIFEST_LIMIT)?.ok_or_else(missing)?;
    let images: Vec<DockerImage> = serde_json::from_slice(&bytes).map_err(|error| {
        Failure::new(format!("manifest.json is damaged: {}", quote(error.to_string().as_bytes())))
    })?;
    let tags: Vec<&str> =
        images.iter().flat_map(|image| image.repo_tags.iter().flatten()).map(String::as_str).collect();
    let has = |image: &&DockerImage, name: &str| {
        image.repo_tags.iter().flatten().any(|tag| tag == name || tag.strip_suffix(":latest") == Some(name))
    };
    let image = match (images.as_slice(), name) {
        ([], _) => return Err(Failure::new("manifest.json names no image")),
        ([only], None) => only,
        (_, None) => return Err(Failure::new("it has several images").hint(which(&tags))),
        (all, Some(name)) => all.iter().find(|image| has(image, name)).ok_or_else(|| {
            Failure::new(format!("it has no image \"{}\"", quote(name.as_bytes()))).hint(which(&tags))
        })?,
    };
    let missing =
        |name: &str| Failure::new(format!("{} is not there", quote(name.as_bytes()))).hint(NOT_COMPLETE);
    let config = files.read(&image.config, CONFIG_LIMIT)?.ok_or_else(|| missing(&image.config))?;
    let diff_ids = diff_ids(&config)?;
    let names = image.layers.as_deref().unwrap_or_default();
    if names.len() > LAYER_LIMIT {
        return Err(too_many_layers(names.len()));
    }
    if names.len() != diff_ids.len() {
        let message =
            format!("manifest.json has {} layers, and the configuration {}", names.len(), diff_ids.len());
        return Err(Failure::new(message).hint(NOT_COMPLETE));
    }
    let mut layers = Vec::new();
    for (name, diff_id) in names.iter().zip(diff_ids) {
        let size = files.find(name).ok_or_else(|| missing(name))?;
        // The configuration has the digests of layers that are not compressed, and so are these, as a rule.
        let digest = match digest_in(name) {
            Some(digest) => Some(digest),
            None => files.is_plain_tar(name).then_some(diff_id),
        };
        layers.push(DescribedLayer { name: name.clone(), digest, size });
    }
    Ok(Described { config, layers, manifest: None })
}

/// The digest that a name has: `blobs/sha256/HEX`.
fn digest_in(name: &str) -> Option<BlobDigest> {
    BlobDigest::parse(&name.strip_prefix("blobs/")?.replacen('/', ":", 1)).ok()
}

fn diff_ids(config: &[u8]) -> Result<Vec<BlobDigest>, Failure> {
    #[derive(Deserialize)]
    struct Document {
        rootfs: RootFs,
    }
    #[derive(Deserialize)]
    struct RootFs {
        diff_ids: Option<Vec<String>>,
    }
    let document: Document = serde_json::from_slice(config).map_err(bad_config)?;
    document.rootfs.diff_ids.unwrap_or_default().iter().map(|text| BlobDigest::parse(text)).collect()
}

fn bad_config(error: serde_json::Error) -> Failure {
    Failure::new(format!("the image's configuration is damaged: {}", quote(error.to_string().as_bytes())))
}

/// What of a configuration is kept inside: what describes the content, in one form. Docker and OCI tools write the same
/// image with other empty fields, histories and orders.
pub fn normalised(config: &[u8]) -> Result<Vec<u8>, Failure> {
    const KEPT: [&str; 8] =
        ["architecture", "os", "os.version", "variant", "created", "author", "config", "rootfs"];
    const KEPT_OF_CONFIG: [&str; 10] = [
        "Cmd",
        "Entrypoint",
        "Env",
        "ExposedPorts",
        "Labels",
        "Shell",
        "StopSignal",
        "User",
        "Volumes",
        "WorkingDir",
    ];
    let document: Map<String, Value> = serde_json::from_slice(config).map_err(bad_config)?;
    let mut kept = only(document, &KEPT);
    if let Some(Value::Object(config)) = kept.remove("config") {
        kept.insert("config".to_owned(), Value::Object(only(config, &KEPT_OF_CONFIG)));
    }
    let mut text = serde_json::to_vec_pretty(&kept).map_err(bad_config)?;
    text.push(b'\n');
    Ok(text)
}

/// The fields of these names that are not empty.
fn only(fields: Map<String, Value>, names: &[&str]) -> Map<String, Value> {
    let is_empty = |value: &Value| match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    };
    let wanted = |(name, value): &(String, Value)| names.contains(&name.as_str()) && !is_empty(value);
    fields.into_iter().filter(wanted).collect()
}

/// An OCI layout in a directory.
pub struct OciDirectory(pub PathBuf);

impl OciDirectory {
    /// Opens a blob.
    pub fn open(&self, name: &str) -> Result<File, Failure> {
        let path = self.0.join(name);
        File::open(&path).map_err(|error| cannot_open(&path, error))
    }
}

impl LayoutFiles for OciDirectory {
    fn read(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>, Failure> {
        if self.find(name).is_none() {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        self.open(name)?.take(limit + 1).read_to_end(&mut bytes).map_err(failure_of)?;
        within(bytes, name, limit).map(Some)
    }

    fn find(&self, name: &str) -> Option<u64> {
        self.0.join(name).metadata().ok().filter(|metadata| metadata.is_file()).map(|metadata| metadata.len())
    }

    fn is_plain_tar(&self, _: &str) -> bool {
        false
    }
}

/// A file of a layout that is not too long.
pub fn within(bytes: Vec<u8>, name: &str, limit: u64) -> Result<Vec<u8>, Failure> {
    if bytes.len() as u64 > limit {
        return Err(Failure::new(format!("{} has more than {limit} bytes", quote(name.as_bytes()))));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configurations_of_docker_and_oci_are_the_same_inside() {
        let docker = br#"{"architecture":"amd64","config":{"Env":["A=b"],"Cmd":["sh"],"Volumes":null,"OnBuild":null,"Image":""},
            "container_config":{"Cmd":["x"]},"docker_version":"20","history":[{"created_by":"x"}],"os":"linux",
            "rootfs":{"type":"layers","diff_ids":["sha256:00"]}}"#;
        let oci = br#"{"rootfs":{"diff_ids":["sha256:00"],"type":"layers"},"os":"linux","config":{"Cmd":["sh"],"Env":["A=b"]},
            "architecture":"amd64"}"#;
        assert_eq!(normalised(docker).unwrap(), normalised(oci).unwrap());
        let failure = normalised(b"[]").unwrap_err();
        assert!(failure.message.starts_with("the image's configuration is damaged: "), "{failure}");
    }

    #[test]
    fn digests_stand_in_names() {
        let hex = "ab".repeat(32);
        assert_eq!(digest_in(&format!("blobs/sha256/{hex}")).unwrap().to_string(), format!("sha256:{hex}"));
        assert!(digest_in("a/layer.tar").is_none() && digest_in("blobs/sha256/x").is_none());
    }
}
