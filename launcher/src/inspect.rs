//! `mizzen inspect`: what an image is. Runs as the user on the host.

use std::fmt::Write;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use mizzen_core::Failure;
use mizzen_core::failure::{cause, quote};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::host::Host;
use crate::image::{Kind, Metadata, Opened};
use crate::pipeline::Image;
use crate::progress::Progress;

/// Everything that can be told about an image.
pub struct Inspected {
    opened: Opened,
    metadata: Metadata,
    /// None for a directory.
    digest: Option<String>,
}

/// Looks into an image and computes its digest.
pub fn inspect(image: &Path) -> Result<Inspected, Failure> {
    let image = Image::find(image, &Host::look())?;
    let metadata = image.metadata()?;
    let digest = match image.opened.kind {
        Kind::Directory => None,
        Kind::Squashfs | Kind::Sif { .. } => Some(sha256(&image.opened)?),
    };
    Ok(Inspected { opened: image.opened, metadata, digest })
}

fn sha256(opened: &Opened) -> Result<String, Failure> {
    let name = quote(opened.path.as_os_str().as_bytes());
    let mut progress = Progress::new(format!("{name}: computing the digest"), opened.size);
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut file = &opened.file;
    let failed = |error: std::io::Error| Failure::new(format!("{name}: cannot read: {}", cause(&error)));
    std::io::Seek::rewind(&mut file).map_err(failed)?;
    loop {
        match file.read(&mut buffer).map_err(failed)? {
            0 => return Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()),
            read => {
                hasher.update(&buffer[..read]);
                progress.advance(read as u64);
            }
        }
    }
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
        line("format", self.format());
        if let Some(digest) = &self.digest {
            line("size", &format!("{} bytes", self.opened.size));
            line("digest", &format!("sha256:{digest}"));
        }
        line("architecture", metadata.architecture.map_or("unknown", |architecture| architecture.name()));
        line("system", metadata.os.as_deref().unwrap_or("unknown"));
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
            "format": self.format(),
            "size": self.digest.as_ref().map(|_| self.opened.size),
            "digest": self.digest.as_ref().map(|digest| format!("sha256:{digest}")),
            "architecture": metadata.architecture.map(|architecture| architecture.name()),
            "system": metadata.os,
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
            Kind::Squashfs => "squashfs",
            Kind::Sif { .. } => "SIF",
            Kind::Directory => "directory",
        }
    }
}
