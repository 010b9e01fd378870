//! What is known of an image file, in a small file beside it: NAME.json. Without it, or with a broken one, the image is as good
//! as before.
//!
//! Run by: the user, in the importer.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use mizzen_core::{Digest, Failure, fs_server};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use super::key::{ImageKey, SIDECAR};
use crate::output::{Draft, Existing, write_failure};

/// A longer one is none of ours.
const LIMIT: u64 = 64 << 10;

/// What the maker of an image knows of it beside its key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Provenance {
    /// Where it came from, as the user wrote it.
    pub source: String,
    /// The sha256 of the file, if somebody has computed it.
    pub file_digest: Option<Digest>,
}

/// What is written down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sidecar {
    /// The name without digest.
    pub reference: String,
    /// `sha256:HEX`.
    pub manifest_digest: String,
    /// `linux/amd64`.
    pub platform: String,
    /// As in the key.
    pub writer: String,
    /// When the file was made, in seconds since 1970.
    pub created: u64,
    /// Bytes of the file.
    pub size: u64,
    /// `sha256:HEX` of the file.
    pub digest: Option<String>,
    /// Where it came from, as the user wrote it.
    pub source: String,
}

impl Sidecar {
    /// For a file that has just been made.
    pub fn new(key: &ImageKey, provenance: &Provenance, size: u64) -> Sidecar {
        Sidecar {
            reference: key.reference.clone(),
            manifest_digest: key.digest.to_string(),
            platform: key.platform.clone(),
            writer: key.writer.clone(),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs()),
            size,
            digest: provenance.file_digest.map(|digest| digest.to_string()),
            source: provenance.source.clone(),
        }
    }

    /// The same image under another name.
    pub fn under(&self, reference: &str) -> Sidecar {
        Sidecar { reference: reference.to_owned(), ..self.clone() }
    }

    /// Of this image file, if it has a good one, and not that of another file which had its name before.
    pub fn read_for(image: &Path, size: u64) -> Option<Sidecar> {
        Sidecar::read(image).filter(|sidecar| sidecar.size == size)
    }

    /// Of this image file, if it has a good one.
    pub fn read(image: &Path) -> Option<Sidecar> {
        // Neither a link nor what another user has mounted there.
        let reached = fs_server::reach_name(image.parent()?, Path::new(path_of(image).file_name()?)).ok()?;
        let options = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).clone();
        let file = options.open(fs_server::proc_path(&reached)).ok()?;
        let mut text = Vec::new();
        file.take(LIMIT).read_to_end(&mut text).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Writes it beside the image file.
    pub fn write(&self, image: &Path) -> Result<(), Failure> {
        let path = path_of(image);
        let failed = |error: io::Error| write_failure(&path, "cannot write it", error);
        let text = serde_json::to_vec_pretty(self).map_err(|error| failed(error.into()))?;
        let directory = image.parent().filter(|parent| !parent.as_os_str().is_empty());
        let draft = Draft::create_in(directory.unwrap_or(Path::new(".")))?;
        draft.file().write_all(&text).map_err(failed)?;
        draft.publish(path.file_name().unwrap_or_default(), Existing::Replace)
    }
}

/// Where the sidecar of an image file is.
pub fn path_of(image: &Path) -> PathBuf {
    let mut path = OsString::from(image);
    path.push(SIDECAR);
    path.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::testing::Scratch;

    fn key() -> ImageKey {
        ImageKey {
            reference: "docker://host.io/a:b".to_owned(),
            digest: Digest::new([7; 32]),
            platform: "linux/amd64".to_owned(),
            writer: "v1".to_owned(),
            suffix: "sqsh",
        }
    }

    #[test]
    fn it_is_read_as_it_was_written() {
        let scratch = Scratch::new();
        let image = scratch.path().join("a.sqsh");
        let provenance = Provenance { source: "docker://host.io/a:b".to_owned(), file_digest: None };
        let first = Sidecar::new(&key(), &provenance, 17);
        first.write(&image).unwrap();
        assert_eq!(Sidecar::read(&image), Some(first));
        let provenance = Provenance { file_digest: Some(Digest::new([9; 32])), ..provenance };
        let second = Sidecar::new(&key(), &provenance, 18);
        second.write(&image).unwrap();
        assert_eq!(Sidecar::read(&image), Some(second));
        assert_eq!(scratch.names(), ["a.sqsh.json"]);
    }

    #[test]
    fn a_broken_one_is_as_good_as_none() {
        let scratch = Scratch::new();
        let image = scratch.path().join("a.sqsh");
        assert_eq!(Sidecar::read(&image), None);
        for text in ["", "{}", "[1]", "{\"reference\": 5}", &"x".repeat(100_000)] {
            std::fs::write(path_of(&image), text).unwrap();
            assert_eq!(Sidecar::read(&image), None, "{text:.20}");
        }
        std::fs::remove_file(path_of(&image)).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", path_of(&image)).unwrap();
        assert_eq!(Sidecar::read(&image), None);
        std::fs::remove_file(path_of(&image)).unwrap();
        std::fs::create_dir(path_of(&image)).unwrap();
        assert_eq!(Sidecar::read(&image), None);
    }
}
