//! The root file system of an image as a tar archive.
//!
//! Run by: the user, in the exporter.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, Read, Seek, Write};

use mizzen::image::Loaded;
use mizzen_core::failure::quote;
use mizzen_core::{Digest, Failure};
use sha2::{Digest as _, Sha256};

use super::ExportCompression;
use super::compress::CompressedWriter;
use super::files::{Files, Found};
use crate::tar::{EntryKind, Writer};

/// In a layer such a name removes what layers below have.
const WHITEOUT: &[u8] = b".wh.";

/// How a tree is written.
pub struct TreeOptions<'a> {
    /// Whose tree it is, for messages.
    pub image: &'a Loaded,
    /// Whether it becomes a layer, where some names mean something else.
    pub is_layer: bool,
    /// Whether all files become root's.
    pub become_roots: bool,
    /// What it means that something could not be written.
    pub write_failure: &'a dyn Fn(io::Error) -> Failure,
}

/// A layer that is complete, in a file.
pub struct Layer {
    pub file: File,
    pub len: u64,
    /// Of the file.
    pub digest: Digest,
    /// Of what is in it, without compression: the `diff_id`.
    pub content_digest: Digest,
    pub compression: ExportCompression,
    pub warnings: Vec<String>,
}

impl Layer {
    /// Writes the tree to a file.
    pub fn write(
        files: &mut dyn Files,
        out: CompressedWriter<HashWriter<BufWriter<File>>>,
        compression: ExportCompression,
        options: &TreeOptions,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Layer, Failure> {
        let (out, warnings) = write_tree(files, HashWriter::new(out), options, progress)?;
        let finish = || {
            let (out, content_digest, _) = out.finish();
            let (out, digest, len) = out.finish()?.finish();
            let mut file = out.into_inner().map_err(|error| error.into_error())?;
            file.rewind()?;
            Ok(Layer { file, len, digest, content_digest, compression, warnings })
        };
        finish().map_err(options.write_failure)
    }
}

/// Writes the tree as a tar archive. Returns the output, and what is not in the archive.
pub fn write_tree<W: Write>(
    files: &mut dyn Files,
    out: W,
    options: &TreeOptions,
    progress: &mut dyn FnMut(u64),
) -> Result<(W, Vec<String>), Failure> {
    let mut archive = Writer::new(out);
    // The first name of what has several.
    let mut links: HashMap<(u64, u64), Vec<u8>> = HashMap::new();
    let (mut sockets, mut whiteouts) = (LeftOut::default(), LeftOut::default());
    while let Some(Found { mut entry, identity, content, is_socket }) =
        files.next().map_err(|failure| options.image.named(failure))?
    {
        let name = entry.path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        if is_socket {
            sockets.add(&entry.path);
            continue;
        }
        if options.is_layer && name.starts_with(WHITEOUT) {
            whiteouts.add(&entry.path);
            continue;
        }
        if entry.path.is_empty() {
            entry.path = b"./".to_vec();
        }
        if options.become_roots {
            (entry.uid, entry.gid) = (0, 0);
        }
        if let Some(identity) = identity {
            if let Some(first) = links.get(&identity) {
                entry.kind = EntryKind::HardLink(first.clone());
                entry.size = 0;
                // They stand at the first name.
                entry.xattrs.clear();
            } else {
                links.insert(identity, entry.path.clone());
            }
        }
        let content = Counted { content, progress: &mut *progress };
        archive.add_file(&entry, content).map_err(|error| entry_failure(&entry.path, error, options))?;
    }
    let out = archive.finish().map_err(options.write_failure)?;
    let warnings = [
        sockets.warning("a socket, which no archive can have"),
        whiteouts.warning("a name that removes files in a layer"),
    ];
    Ok((out, warnings.into_iter().flatten().collect()))
}

/// Whether an entry could not be read, or cannot be expressed, or was not written.
fn entry_failure(path: &[u8], error: io::Error, options: &TreeOptions) -> Failure {
    if let Some(failure) = error.get_ref().and_then(|inner| inner.downcast_ref::<Failure>()) {
        return options.image.named(failure.clone());
    }
    let of_entry = || options.image.named(Failure::new(format!("/{} in it: {error}", quote(path))));
    match (error.raw_os_error(), error.kind()) {
        (None, ErrorKind::InvalidInput) => of_entry(),
        (None, ErrorKind::UnexpectedEof) => of_entry().hint("somebody changes it; try again"),
        _ => (options.write_failure)(error),
    }
}

/// What could not be taken.
#[derive(Default)]
struct LeftOut {
    first: Vec<u8>,
    count: usize,
}

impl LeftOut {
    fn add(&mut self, path: &[u8]) {
        if self.count == 0 {
            self.first = path.to_vec();
        }
        self.count += 1;
    }

    fn warning(&self, what: &str) -> Option<String> {
        let first = quote(&self.first);
        match self.count {
            0 => None,
            1 => Some(format!("left out: /{first} ({what})")),
            count => Some(format!("left out: /{first} and {} more ({what})", count - 1)),
        }
    }
}

/// Tells how much was read.
struct Counted<'a, R> {
    content: R,
    progress: &'a mut dyn FnMut(u64),
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = self.content.read(buffer)?;
        (self.progress)(len as u64);
        Ok(len)
    }
}

/// Knows the digest of what was written.
pub struct HashWriter<W> {
    out: W,
    hash: Sha256,
    len: u64,
}

impl<W: Write> HashWriter<W> {
    pub fn new(out: W) -> HashWriter<W> {
        HashWriter { out, hash: Sha256::new(), len: 0 }
    }

    pub fn finish(self) -> (W, Digest, u64) {
        (self.out, Digest::new(self.hash.finalize().into()), self.len)
    }
}

impl<W: Write> Write for HashWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = self.out.write(bytes)?;
        self.hash.update(&bytes[..len]);
        self.len += len as u64;
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
