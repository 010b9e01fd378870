//! An archive with an image in it, as a stream: `docker save … | mizzen import -`. What its entries mean is known at its end,
//! where the manifest is. So every entry that is a layer is converted as it comes by, and small ones are kept.
//!
//! Run by: the user, in the importer.

use std::collections::HashMap;
use std::io::{self, Read};

use mizzen_core::Failure;
use mizzen_core::failure::quote;
use sha2::{Digest, Sha256};

use super::archive::{Member, followed, member};
use super::layout::{LayoutFiles, within};
use crate::failures::failure_of;
use crate::layer::Layer;
use crate::manifest::{BlobDigest, Hasher, LAYER_LIMIT};
use crate::tar::{Archive, EntryKind};
use crate::whiteout::clean_path;

/// Manifests and configurations together.
const KEPT_LIMIT: usize = 64 << 20;
/// No single one of them is longer.
const SMALL: u64 = 8 << 20;
const HEAD: u64 = 512;

/// What a stream had in it.
#[derive(Default)]
pub struct Streamed {
    members: HashMap<Vec<u8>, Member>,
    small: HashMap<Vec<u8>, Vec<u8>>,
    layers: HashMap<Vec<u8>, StreamedLayer>,
}

struct StreamedLayer {
    layer: Layer,
    digest: BlobDigest,
    is_plain: bool,
}

/// Reads an archive to its end; `convert` makes a layer of an entry's content.
pub fn stream(
    source: impl Read + Send,
    convert: &mut dyn FnMut(&mut (dyn Read + Send)) -> Result<Layer, Failure>,
) -> Result<Streamed, Failure> {
    let mut archive = Archive::new(source);
    let mut streamed = Streamed::default();
    let mut kept = 0;
    while let Some(entry) = archive.next_entry().map_err(|error| failure_of(error.into()))? {
        let name = clean_path(&entry.path);
        if entry.kind == EntryKind::File {
            let mut head = Vec::new();
            archive.contents().take(HEAD).read_to_end(&mut head).map_err(failure_of)?;
            let is_plain = head.get(257..).is_some_and(|rest| rest.starts_with(b"ustar"));
            if is_plain || is_compressed(&head) || is_empty_tar(&head, entry.size) {
                if streamed.layers.len() >= LAYER_LIMIT {
                    return Err(Failure::new(format!("it has more than {LAYER_LIMIT} layers"))
                        .hint("from a file, in place of a stream, those that the image has are enough"));
                }
                let shown = quote(&name);
                let hasher = Hasher::Sha256(Sha256::new());
                let mut content = Hashed { source: io::Cursor::new(head).chain(archive.contents()), hasher };
                let layer = convert(&mut content).map_err(|failure| failure.about(shown))?;
                let digest = content.hasher.finish();
                streamed.layers.insert(name.clone(), StreamedLayer { layer, digest, is_plain });
            } else if entry.size <= SMALL {
                let mut bytes = head;
                archive.contents().read_to_end(&mut bytes).map_err(failure_of)?;
                kept += bytes.len();
                if kept > KEPT_LIMIT {
                    return Err(Failure::new("too many small files for an archive of an image"));
                }
                streamed.small.insert(name.clone(), bytes);
            }
        }
        if let Some(member) = member(&name, &entry) {
            streamed.members.insert(name, member);
        }
    }
    archive.drain().map_err(failure_of)?;
    Ok(streamed)
}

fn is_compressed(head: &[u8]) -> bool {
    let magics = [&b"\x1f\x8b"[..], b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0"];
    magics.iter().any(|magic| head.starts_with(magic))
}

/// A layer without any entry is two blocks of zeros, or some more.
fn is_empty_tar(head: &[u8], size: u64) -> bool {
    (1024..=64 << 10).contains(&size) && head.iter().all(|byte| *byte == 0)
}

impl Streamed {
    /// The layer of this name, which must have this digest.
    pub fn layer(&self, name: &str, digest: Option<&BlobDigest>) -> Result<Layer, Failure> {
        let shown = quote(name.as_bytes());
        let found = followed(&self.members, name).and_then(|(name, _)| self.layers.get(name));
        let found = found.ok_or_else(|| Failure::new(format!("{shown} is not a layer")))?;
        match digest {
            Some(digest) if *digest != found.digest => {
                Err(crate::manifest::wrong_digest(digest, &found.digest).about(shown))
            }
            _ => Ok(found.layer.clone()),
        }
    }
}

impl LayoutFiles for Streamed {
    fn read(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>, Failure> {
        let found = followed(&self.members, name).and_then(|(name, _)| self.small.get(name));
        found.map(|bytes| within(bytes.clone(), name, limit)).transpose()
    }

    fn find(&self, name: &str) -> Option<u64> {
        match followed(&self.members, name)?.1 {
            Member::File { size, .. } => Some(*size),
            Member::Link(_) => None,
        }
    }

    fn is_plain_tar(&self, name: &str) -> bool {
        let found = followed(&self.members, name).and_then(|(name, _)| self.layers.get(name));
        found.is_some_and(|layer| layer.is_plain)
    }
}

/// A reader that hashes what it reads.
struct Hashed<R> {
    source: R,
    hasher: Hasher,
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.source.read(buffer)?;
        if let Some(bytes) = buffer.get(..count) {
            self.hasher.update(bytes);
        }
        Ok(count)
    }
}
