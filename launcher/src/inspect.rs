//! `mizzen inspect`: what an image is. Runs as the user on the host.

use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use mizzen_core::failure::quote;
use mizzen_core::{Config, Digest, Failure, Reference};
use serde_json::{Value, json};

use crate::find_image;
use crate::image::architecture::Architecture;
use crate::image::{self, ImageKind, Loaded, Metadata, OpenedImage};
use crate::stage::{self, Requirements, StagedImage, StagingOptions};

/// Everything that can be told about an image.
pub struct Inspected {
    opened: OpenedImage,
    metadata: Metadata,
    /// The machine its programs are made for.
    architecture: Option<Architecture>,
    /// The distribution.
    system: Option<String>,
    /// None for a directory.
    digest: Option<Digest>,
    /// The image in a registry by which it was named, with the digest of its manifest.
    reference: Option<Reference>,
}

/// Looks into an image and computes its digest.
pub fn inspect(image: &Path) -> Result<Inspected, Failure> {
    let (path, pin, reference) = find_image::to_read(image, &Config::of_this_machine()?)?;
    let StagedImage { opened, digest, .. } =
        stage::stage(&path, &Requirements::pinned(pin), &StagingOptions::never())?;
    let image = Loaded::new(opened, None, digest)?;
    let metadata = image.metadata()?;
    let digest = match image.opened.kind {
        ImageKind::Directory => None,
        ImageKind::Squashfs | ImageKind::Sif { .. } => match image.digest {
            Some(digest) => Some(digest),
            None => Some(stage::digest(&image.opened)?),
        },
    };
    let architecture = image::true_architecture(image.tree(), &metadata);
    let system = image::operating_system(image.tree());
    Ok(Inspected { opened: image.opened, metadata, architecture, system, digest, reference })
}

impl Inspected {
    /// One fact per line.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let mut line = |name: &str, value: &str| {
            let _ = writeln!(text, "{name:<13} {value}");
        };
        let metadata = &self.metadata;
        line("image", &quote(self.opened.path.as_os_str().as_bytes()));
        if let Some(reference) = &self.reference {
            line("reference", &reference.to_string());
        }
        line("format", self.format());
        if let Some(digest) = &self.digest {
            line("size", &format!("{} bytes", self.opened.size));
            line("digest", &digest.to_string());
        }
        line("architecture", self.architecture.map_or("unknown", |architecture| architecture.name()));
        line("system", self.system.as_deref().unwrap_or("unknown"));
        line("made by", &format!("{:?}", metadata.maker).to_lowercase());
        for (name, value) in &metadata.environment {
            line("env", &format!("{}={}", quote(name.as_bytes()), quote(value.as_bytes())));
        }
        if let Some(workdir) = &metadata.workdir {
            line("workdir", &quote(workdir.as_os_str().as_bytes()));
        }
        for (name, words) in [("entrypoint", &metadata.entrypoint), ("command", &metadata.command)] {
            if !words.is_empty() {
                line(name, &words.iter().map(|word| quote(word.as_bytes())).collect::<Vec<_>>().join(" "));
            }
        }
        for (name, value) in &metadata.labels {
            line("label", &format!("{}={}", quote(name.as_bytes()), quote(value.as_bytes())));
        }
        for place in &metadata.not_understood {
            line("note", &format!("{place}: not understood"));
        }
        text
    }

    /// The same for programs.
    pub fn to_json(&self) -> Value {
        let metadata = &self.metadata;
        let words = |words: &[std::ffi::OsString]| {
            words.iter().map(|w| w.to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        json!({
            "image": self.opened.path.to_string_lossy(),
            "reference": self.reference.as_ref().map(Reference::to_string),
            "format": self.format(),
            "size": self.digest.as_ref().map(|_| self.opened.size),
            "digest": self.digest.map(|digest| digest.to_string()),
            "architecture": self.architecture.map(|architecture| architecture.name()),
            "system": self.system,
            "made_by": format!("{:?}", metadata.maker).to_lowercase(),
            "environment": metadata.environment.iter()
                .map(|(name, value)| (name.to_string_lossy().into_owned(), Value::from(value.to_string_lossy())))
                .collect::<serde_json::Map<_, _>>(),
            "workdir": metadata.workdir.as_ref().map(|path| path.to_string_lossy()),
            "entrypoint": words(&metadata.entrypoint),
            "command": words(&metadata.command),
            "labels": metadata.labels,
            "not_understood": metadata.not_understood,
        })
    }

    fn format(&self) -> &'static str {
        match self.opened.kind {
            ImageKind::Squashfs => "squashfs",
            ImageKind::Sif { .. } => "SIF",
            ImageKind::Directory => "directory",
        }
    }
}
