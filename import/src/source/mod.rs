//! Where an image can come from: what the user wrote, and what is found there.
//!
//! Run by: the user, in the importer.

mod archive;
mod blob;
mod directory;
mod layout;
mod stream;

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use mizzen_core::failure::quote;
use mizzen_core::fs_server;
use mizzen_core::image::{self, ImageFormat, cannot_open};
use mizzen_core::reference::names_a_registry;
use mizzen_core::{Failure, Reference};

pub use archive::SeekableArchive;
pub use blob::{LayerBlob, Verified};
pub use directory::convert_directory;
pub use layout::{Described, DescribedLayer, Form, LayoutFiles, OciDirectory, describe, normalised};
pub use stream::{Streamed, stream};

use crate::decompress::decompressed;
use crate::failures::failure_of;
use crate::tar::Archive;
use crate::whiteout::clean_path;

/// Enough of a stream to see its first entry, with a long name in front of it.
const HEAD: u64 = 64 << 10;

/// What is imported.
#[derive(Debug)]
pub enum Source {
    /// An image in a registry.
    Registry(Reference),
    /// An OCI layout in a directory, and which of its images.
    Layout(PathBuf, Option<String>),
    /// An archive with an image in it; of which form, if the user said so, and which of its images.
    Archive(PathBuf, Option<Form>, Option<String>),
    /// A tar file of a root file system.
    Tar(PathBuf),
    /// A root file system in a directory.
    Directory(PathBuf),
    /// A squashfs file, or a SIF with one in it: taken as it is.
    Image(PathBuf),
    /// An archive, or a tar file of a root file system, on standard input.
    Stdin,
}

const FORMS: &str = "sources are docker://NAME, oras://NAME, oci:DIR, oci-archive:FILE, docker-archive:FILE, tar:FILE, a \
                     directory, an image file, or - for standard input";

impl Source {
    /// Reads what the user wrote. Without a prefix, a file is recognised by its content.
    pub fn parse(text: &OsStr) -> Result<Source, Failure> {
        let bytes = text.as_bytes();
        if bytes == b"-" {
            return Ok(Source::Stdin);
        }
        if bytes.is_empty() {
            return Err(Failure::new("the source is empty").hint(FORMS));
        }
        let is_file = || fs_server::is_there(Path::new(text));
        if names_a_registry(bytes) {
            return Reference::parse(bytes).map(Source::Registry);
        }
        let after = |prefix: &[u8]| bytes.strip_prefix(prefix).map(OsStr::from_bytes);
        if let Some(rest) = after(b"oci:") {
            let (directory, name) = split_name(rest);
            return Ok(Source::Layout(directory, name));
        }
        for (prefix, form) in [(&b"oci-archive:"[..], Form::Oci), (b"docker-archive:", Form::Docker)] {
            if let Some(rest) = after(prefix) {
                let (file, name) = split_name(rest);
                return Ok(Source::Archive(file, Some(form), name));
            }
        }
        if let Some(rest) = after(b"tar:") {
            return Ok(Source::Tar(rest.into()));
        }
        if let Some((scheme, _)) = std::str::from_utf8(bytes).unwrap_or_default().split_once("://")
            && !is_file()
        {
            return Err(
                Failure::new(format!("cannot import from {}://", quote(scheme.as_bytes()))).hint(FORMS)
            );
        }
        recognised(Path::new(text))
    }
}

/// A path, and behind it the name of an image in it. A path may have colons: the longest that exists is it.
fn split_name(text: &OsStr) -> (PathBuf, Option<String>) {
    let bytes = text.as_bytes();
    if !Path::new(text).exists() {
        for (at, _) in bytes.iter().enumerate().rev().filter(|(_, byte)| **byte == b':') {
            let path = Path::new(OsStr::from_bytes(bytes.get(..at).unwrap_or_default()));
            if path.exists() {
                let name = String::from_utf8_lossy(bytes.get(at + 1..).unwrap_or_default());
                return (path.to_owned(), Some(name.into_owned()));
            }
        }
    }
    (text.into(), None)
}

fn recognised(path: &Path) -> Result<Source, Failure> {
    // What is meant as the name of an image in a registry may be that of something which another user has mounted here.
    let is_bare = path.components().count() == 1;
    let look = is_bare.then(|| fs_server::look(path));
    if let Some(part) = look.as_ref().and_then(|look| look.served.as_ref()) {
        return Err(fs_server::not_safe(path, part));
    }
    let failed = |error: std::io::Error| {
        let is_missing = error.kind() == std::io::ErrorKind::NotFound;
        let failure = cannot_open(path, error);
        if is_missing { failure.hint("an image in a registry is written docker://NAME") } else { failure }
    };
    // What has been reached, or nothing: between two looks somebody could mount something there.
    let reached = look.map(|look| look.end).transpose().map_err(|errno| failed(errno.into()))?;
    let place = reached.as_ref().map_or(path.to_owned(), fs_server::proc_path);
    let metadata = place.metadata().map_err(failed)?;
    image::refuse_special(path, &metadata)?;
    if metadata.is_dir() {
        let is_layout = path.join("oci-layout").is_file() && path.join("index.json").is_file();
        return Ok(if is_layout {
            Source::Layout(path.into(), None)
        } else {
            Source::Directory(path.into())
        });
    }
    let not_an_image = match image::open_at(path, &place) {
        Ok(probed) if probed.form != ImageFormat::Directory => return Ok(Source::Image(path.into())),
        Ok(_) => return Ok(Source::Directory(path.into())),
        Err(failure) => failure,
    };
    let mut file = File::open(&place).map_err(|error| cannot_open(path, error))?;
    match first_name(&mut file) {
        Some(name) if is_archive_name(&name) => Ok(Source::Archive(path.into(), None, None)),
        Some(_) => Ok(Source::Tar(path.into())),
        None => Err(not_an_image.hint(FORMS)),
    }
}

/// The name of the first entry, if it is a tar, compressed or not.
fn first_name(source: &mut (impl Read + Send)) -> Option<Vec<u8>> {
    let stream = decompressed(source).ok()?;
    first_name_in(stream.take(HEAD))
}

/// The same without compression. `tar -c .` begins with the root, which says nothing, unless there is nothing else.
fn first_name_in(source: impl Read) -> Option<Vec<u8>> {
    let mut archive = Archive::new(source);
    let first = archive.next_entry().ok().flatten()?.path;
    if !clean_path(&first).is_empty() {
        return Some(first);
    }
    let second = archive.next_entry().ok().flatten();
    Some(second.map_or(first, |entry| entry.path))
}

/// The first name in a tar tells a container's archive from a root file system.
fn is_archive_name(name: &[u8]) -> bool {
    let name = name.strip_prefix(b"./").unwrap_or(name);
    let known = [&b"oci-layout"[..], b"blobs", b"manifest.json", b"index.json", b"repositories"];
    let hexadecimal = name.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    hexadecimal == 64
        || known.iter().any(|known| name == *known || name == [known, &b"/"[..]].concat())
        || name.starts_with(b"blobs/")
}

/// What a stream is: an archive with an image in it, or a root file system. Nothing of it is lost.
pub enum StreamKind<R> {
    /// An image's archive.
    Archive(R),
    /// A root file system.
    Tar(R),
}

/// Sees what a decompressed stream is by its first entry.
pub fn stream_kind<R: Read>(mut source: R) -> Result<StreamKind<impl Read>, Failure> {
    let mut head = Vec::new();
    source.by_ref().take(HEAD).read_to_end(&mut head).map_err(failure_of)?;
    let first = first_name_in(head.as_slice());
    let whole = std::io::Cursor::new(head).chain(source);
    Ok(match first {
        Some(name) if is_archive_name(&name) => StreamKind::Archive(whole),
        _ => StreamKind::Tar(whole),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_told_apart() {
        let parse = |text: &str| Source::parse(OsStr::new(text));
        assert!(matches!(parse("docker://ubuntu"), Ok(Source::Registry(_))));
        assert!(matches!(parse("nvcr.io#nvidia/pytorch"), Ok(Source::Registry(_))));
        assert!(matches!(parse("-"), Ok(Source::Stdin)));
        assert!(
            matches!(parse("oci:/nonexistent:x"), Ok(Source::Layout(path, None)) if path == Path::new("/nonexistent:x"))
        );
        assert!(
            matches!(parse("oci:/:x:y"), Ok(Source::Layout(path, Some(name))) if path == Path::new("/") && name == "x:y")
        );
        assert!(
            matches!(parse("docker-archive:/:a:b"), Ok(Source::Archive(_, Some(Form::Docker), Some(name))) if name == "a:b")
        );
        assert!(matches!(parse("tar:x.tar"), Ok(Source::Tar(_))));
        assert!(matches!(parse("/"), Ok(Source::Directory(_))));
        for (text, message, hint) in [
            ("", "the source is empty", "docker://NAME"),
            ("http://host/x", "cannot import from http://", "docker://NAME"),
            (
                "nonexistent",
                "nonexistent: No such file or directory",
                "an image in a registry is written docker://",
            ),
            ("/dev/null", "/dev/null: not an image (is a character device)", "squashfs"),
        ] {
            let failure = parse(text).unwrap_err();
            assert_eq!(failure.message, message);
            assert!(failure.hint.as_deref().unwrap_or_default().contains(hint), "{failure:?}");
        }
    }

    #[test]
    fn archives_are_known_by_their_first_name() {
        for name in [
            "oci-layout",
            "./oci-layout",
            "blobs/",
            "blobs",
            "blobs/sha256/a",
            "manifest.json",
            &"a".repeat(64),
        ] {
            assert!(is_archive_name(name.as_bytes()), "{name}");
        }
        for name in ["etc/passwd", "./", "blobs2", "manifest.jsonx", "bin"] {
            assert!(!is_archive_name(name.as_bytes()), "{name}");
        }
    }
}
