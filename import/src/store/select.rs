//! What images a directory has, and which of them a user means: of the store, and of the site's folders, where files of any
//! origin lie.
//!
//! Run by: the user, in the importer.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use mizzen_core::failure::quote;
use mizzen_core::fs_server;
use mizzen_core::image::{self, ImageFormat};
use mizzen_core::{Digest, Failure, Reference};
use rustix::fs::{Mode, OFlags, openat};

use super::key::{NamedImage, SIDECAR};
use super::last_used;
use super::sidecar::Sidecar;

/// Fewer digits of a digest are taken for something else.
const LEAST_DIGITS: usize = 8;
/// What a root file system has at least one of.
const ROOT_DIRECTORIES: [&str; 4] = ["bin", "usr", "etc", "lib"];

/// An image in a directory.
#[derive(Clone, Debug)]
pub struct ListedImage {
    /// Its file, or directory.
    pub path: PathBuf,
    /// `squashfs`, `SIF` or `directory`.
    pub format: &'static str,
    /// Bytes of the file; None for a directory.
    pub size: Option<u64>,
    /// The file's number, and how many names it has.
    pub file: (u64, u64),
    /// The name in a registry that it was imported by.
    pub reference: Option<String>,
    /// `linux/amd64`.
    pub platform: Option<String>,
    /// The manifest's.
    pub manifest_digest: Option<Digest>,
    /// The file's.
    pub file_digest: Option<Digest>,
    /// What it was imported from, as the user wrote it.
    pub source: Option<String>,
    /// When it was made, in seconds since 1970.
    pub created: i64,
    /// When it was last used.
    pub used: SystemTime,
}

impl ListedImage {
    /// Whether mizzen has imported it, and knows by what name.
    pub fn is_imported(&self) -> bool {
        self.reference.is_some() && self.size.is_some()
    }
}

/// Of each reference and platform the image that was made last: what its tag meant when it was last asked for.
pub fn latest<'a>(images: impl IntoIterator<Item = &'a ListedImage>) -> Vec<&'a ListedImage> {
    let mut latest: BTreeMap<_, &ListedImage> = BTreeMap::new();
    for image in images.into_iter().filter(|image| image.is_imported()) {
        let last = latest.entry((&image.reference, &image.platform)).or_insert(image);
        if image.created > last.created {
            *last = image;
        }
    }
    latest.into_values().collect()
}

/// The images of a directory, in the order of their names; whatever else is there is left out.
pub fn list(directory: &Path) -> io::Result<Vec<ListedImage>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        // One that cannot be read does not hide the others.
        names.extend(entry.map(|entry| entry.file_name()));
    }
    names.sort();
    let is_hidden = |name: &OsStr| name.as_bytes().starts_with(b".");
    let images = names.iter().filter(|name| !is_hidden(name)).map(|name| directory.join(name));
    Ok(images.filter_map(look_at).collect())
}

fn look_at(path: PathBuf) -> Option<ListedImage> {
    let name = path.file_name()?.to_str();
    let named = name.and_then(NamedImage::parse);
    // A site's image may be a link to where it really is. Others may have mounted something under such a name.
    let reached = fs_server::look_from(path.parent()?, Path::new(path.file_name()?)).end.ok()?;
    let found = reached.metadata().ok()?;
    let format = match &named {
        Some(_) if found.is_file() => {
            if path.extension() == Some(OsStr::new("sif")) {
                "SIF"
            } else {
                "squashfs"
            }
        }
        _ => recognise(&path, &reached, &found)?,
    };
    let sidecar = Sidecar::read_for(&path, found.len());
    let modified = found.mtime();
    let digest = |text: &str| Digest::parse(text);
    let (reference, platform, manifest_digest) = match (&sidecar, named) {
        (Some(sidecar), _) => (
            Some(sidecar.reference.clone()),
            Some(sidecar.platform.clone()),
            digest(&sidecar.manifest_digest),
        ),
        (None, Some(named)) => (Some(named.reference), Some(named.platform), Some(named.digest)),
        (None, None) => (None, None, None),
    };
    Some(ListedImage {
        format,
        size: found.is_file().then_some(found.len()),
        file: (found.ino(), found.nlink()),
        reference,
        platform,
        manifest_digest,
        file_digest: sidecar.as_ref().and_then(|sidecar| digest(sidecar.digest.as_deref()?)),
        created: sidecar.as_ref().map_or(modified, |sidecar| i64::try_from(sidecar.created).unwrap_or(0)),
        source: sidecar.map(|sidecar| sidecar.source),
        used: last_used(&path).unwrap_or(UNIX_EPOCH),
        path,
    })
}

/// What an image is, by its content; None if it is none, or cannot be read.
fn recognise(path: &Path, reached: &File, found: &Metadata) -> Option<&'static str> {
    let place = fs_server::proc_path(reached);
    if found.is_dir() {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let has = |name: &&str| openat(reached, *name, flags, Mode::empty()).is_ok();
        let is_root = ROOT_DIRECTORIES.iter().any(has);
        return is_root.then_some("directory");
    }
    if !found.is_file() || path.as_os_str().as_bytes().ends_with(SIDECAR.as_bytes()) {
        return None;
    }
    match image::open_at(path, &place).ok()?.form {
        ImageFormat::Squashfs => Some("squashfs"),
        ImageFormat::Sif => Some("SIF"),
        ImageFormat::Directory => None,
    }
}

/// Those of the images that are meant by these words: a reference, a digest or its beginning, a file's name or path.
pub fn select<'a>(images: &'a [ListedImage], words: &[String]) -> Result<Vec<&'a ListedImage>, Failure> {
    let mut selected: Vec<&ListedImage> = Vec::new();
    for word in words {
        let shown = quote(word.as_bytes());
        let found: Vec<&ListedImage> = images.iter().filter(|image| means(word, image)).collect();
        if found.is_empty() {
            return Err(Failure::new(format!("{shown}: no such image in your store"))
                .hint("`mizzen images` shows all with their references and digests"));
        }
        let mut digests: Vec<Option<Digest>> = found.iter().map(|image| image.manifest_digest).collect();
        digests.sort();
        digests.dedup();
        if digests.len() > 1 && digest_digits(word).is_some() {
            return Err(Failure::new(format!("{shown}: the digests of {} images begin so", digests.len()))
                .hint("give more digits, or the reference"));
        }
        selected.extend(found);
    }
    selected.sort_by(|one, other| one.path.cmp(&other.path));
    selected.dedup_by(|one, other| one.path == other.path);
    Ok(selected)
}

fn means(word: &str, image: &ListedImage) -> bool {
    let name = image.path.file_name().is_some_and(|name| name == word);
    if name || (word.contains('/') && Path::new(word) == image.path) {
        return true;
    }
    if let Some(digits) = digest_digits(word) {
        let digests = [image.manifest_digest, image.file_digest];
        return digests.into_iter().flatten().any(|digest| digest.hex().starts_with(digits));
    }
    let Some(reference) = &image.reference else { return false };
    if reference == word {
        return true;
    }
    let has_scheme = word.contains("://");
    let whole = if has_scheme || word.contains('#') { word.to_owned() } else { format!("docker://{word}") };
    Reference::parse(whole.as_bytes()).is_ok_and(|meant| {
        let named = Reference { digest: None, user: None, ..meant.clone() }.to_string();
        let pinned = meant.digest.is_none_or(|digest| image.manifest_digest == Some(digest));
        // A digest without a tag means that image under any tag.
        pinned && (*reference == named || (meant.tag.is_none() && is_of(reference, &named)))
    })
}

/// Whether a reference is a tag of this name.
fn is_of(reference: &str, name: &str) -> bool {
    reference.strip_prefix(name).is_some_and(|tag| tag.starts_with(':') && !tag.contains('/'))
}

fn digest_digits(word: &str) -> Option<&str> {
    let digits = word.strip_prefix("sha256:").unwrap_or(word);
    let hexadecimal = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
    (digits.len() >= LEAST_DIGITS && digits.chars().all(hexadecimal)).then_some(digits)
}
