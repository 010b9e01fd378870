//! From a source to an image file.
//!
//!     registry, OCI layout, archive:  manifest -> layers, several at once -> converted layers -> image
//!     tar, directory, stream:         one pass                            -> converted layers -> image
//!     SIF, squashfs, oras://:         taken as they are
//!
//! Run by: the user, in the importer.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;

use mizzen::image::{ImageKind, OpenedImage, identify_opened};
use mizzen_core::failure::quote;
use mizzen_core::image::{self, cannot_open};
use mizzen_core::reference::Transport;
use mizzen_core::{Digest, Failure, Reference};
use mizzen_squashfs::writer::{Compressors, Output};
use sha2::{Digest as _, Sha256};

use crate::assemble::{AssembleError, assemble};
use crate::conversion::Counted;
use crate::decompress::decompressed;
use crate::failures::{cannot_write, failure_of};
use crate::layer::{Layer, LayerCache, Region, convert};
use crate::manifest::{BlobDigest, CONFIG_LIMIT, Descriptor, Manifest, Platform};
use crate::output::Draft;
use crate::progress::{Bar, Bars, WRITING};
use crate::registry::Client;
use crate::shown;
use crate::source::{
    Described, Form, LayerBlob, OciDirectory, SeekableArchive, Source, StreamKind, Verified,
    convert_directory, describe, normalised, stream, stream_kind,
};

const COPY_LEN: usize = 1 << 20;
/// Begins the media type of a SIF file in a registry.
const SIF_LAYER: &str = "application/vnd.sylabs.sif.layer.";

/// Opens a file of a layout by its name.
type OpenFile<'a> = dyn Fn(&str) -> Result<Box<dyn Read + Send>, Failure> + Sync + 'a;

/// What all imports of a process share.
pub struct Importer<'a> {
    /// The threads that compress, and how.
    pub compressors: Compressors,
    /// Where converted layers are kept.
    pub cache: LayerCache,
    /// Whether they are used, and kept afterwards.
    pub use_cache: bool,
    /// For which machine.
    pub platform: Platform,
    /// Whether files keep their owners.
    pub keep_owners: bool,
    /// Whether layers may come from elsewhere than the registry.
    pub foreign_layers: bool,
    /// Shows how far it is.
    pub bars: &'a Bars,
}

/// What was imported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// Of the image file.
    pub digest: Digest,
    /// Bytes of it.
    pub size: u64,
    /// Of the manifest that it was made from, if there was one.
    pub manifest: Option<BlobDigest>,
}

impl Importer<'_> {
    /// Writes the image that a source has to `output`, an empty file that can be read.
    pub fn import(&self, source: &Source, output: &File, client: &Client) -> Result<Imported, Failure> {
        let manifest = match source {
            Source::Registry(reference) => self.import_registry(reference, client, output)?,
            Source::Layout(path, name) => {
                let files = OciDirectory(path.clone());
                let described = describe(&files, Some(Form::Oci), name.as_deref(), &self.platform)
                    .map_err(|failure| failure.about(shown(path)))?;
                let open = |name: &str| Ok(Box::new(files.open(name)?) as Box<dyn Read + Send>);
                self.import_described(&described, &open, output)?
            }
            Source::Archive(path, form, name) => self.import_archive(path, *form, name.as_deref(), output)?,
            Source::Tar(path) => {
                let file = open_file(path)?;
                let about = |failure: Failure| failure.about(shown(path));
                self.import_tar(file, &shown(path), output).map_err(about)?
            }
            Source::Directory(path) => return self.import_directory(path, &shown(path), output),
            Source::Image(path) => {
                self.take_image(path, output)?;
                None
            }
            Source::Stdin => self.import_stream(io::stdin(), "standard input", None, None, output)?,
        };
        self.finish(output, manifest)
    }

    /// Writes what is below a directory, which is called `name` in messages.
    pub fn import_directory(&self, path: &Path, name: &str, output: &File) -> Result<Imported, Failure> {
        let bar = self.bars.add(name, None);
        let layer =
            convert_directory(path, name, self.scratch()?, &self.compressors, &|bytes| bar.advance(bytes))?;
        bar.done("read");
        self.write(&[layer], None, output).map_err(not_again)?;
        self.finish(output, None)
    }

    /// Sees that all of it is on disk, and what it is.
    fn finish(&self, output: &File, manifest: Option<BlobDigest>) -> Result<Imported, Failure> {
        // The disk can work meanwhile. Its error must be kept: the kernel tells it once.
        let (digest, size) = thread::scope(|scope| {
            let synced = scope.spawn(|| output.sync_data());
            let digest = digest_of(output);
            match synced.join() {
                Ok(Err(error)) => Err(cannot_write(error)),
                _ => digest,
            }
        })?;
        if self.use_cache {
            self.cache.evict();
        }
        Ok(Imported { digest, size, manifest })
    }

    fn import_registry(
        &self,
        reference: &Reference,
        client: &Client,
        output: &File,
    ) -> Result<Option<BlobDigest>, Failure> {
        let about = |failure: Failure| failure.about(reference);
        let selected = client.image(reference, &self.platform)?.selected;
        if reference.transport == Transport::Oras {
            self.take_artifact(reference, &selected.manifest, client, output)?;
            return Ok(Some(selected.digest));
        }
        if selected.manifest.layers.iter().any(|layer| layer.media_type.starts_with(SIF_LAYER)) {
            let other = Reference { transport: Transport::Oras, ..reference.clone() };
            return Err(about(Failure::new("it is a SIF file, and no image that is made of layers"))
                .hint(format!("write it {other}")));
        }
        let config = client.small_blob(reference, &selected.manifest.config, CONFIG_LIMIT)?;
        let config = normalised(&config).map_err(about)?;
        let blobs: Vec<LayerBlob> = selected
            .manifest
            .layers
            .iter()
            .map(|layer| LayerBlob {
                name: short(&layer.digest),
                digest: Some(layer.digest),
                size: layer.size,
                open: Box::new(move || self.open_layer(reference, layer, client)),
            })
            .collect();
        self.import_blobs(&blobs, config, output).map_err(about)?;
        Ok(Some(selected.digest))
    }

    fn open_layer<'a>(
        &self,
        reference: &Reference,
        layer: &Descriptor,
        client: &'a Client,
    ) -> Result<Box<dyn Read + Send + 'a>, Failure> {
        if !layer.is_foreign() || layer.urls.is_empty() {
            return Ok(Box::new(client.blob(reference, layer)?));
        }
        if !self.foreign_layers {
            let message = format!("the registry does not have the layer {}, only its address", layer.digest);
            return Err(
                Failure::new(message).hint("--foreign-layers fetches it from there, without credentials")
            );
        }
        Ok(Box::new(client.foreign_blob(reference, layer)?))
    }

    /// A file that is kept in a registry (`oras://`): the image is that file.
    fn take_artifact(
        &self,
        reference: &Reference,
        manifest: &Manifest,
        client: &Client,
        output: &File,
    ) -> Result<(), Failure> {
        let about = |failure: Failure| failure.about(reference);
        let [layer] = manifest.layers.as_slice() else {
            let message = format!("it has {} files, and an image file is one", manifest.layers.len());
            return Err(
                about(Failure::new(message)).hint("an image that is made of layers is written docker://NAME")
            );
        };
        let mut source = client.blob(reference, layer).map_err(about)?;
        let bar = self.bars.add(short(&layer.digest), Some(layer.size));
        copy(&mut source, output, &bar).map_err(about)?;
        bar.done("fetched");
        probe(Path::new(&reference.to_string()), clone(output)?).map(|_| ())
    }

    fn import_archive(
        &self,
        path: &Path,
        form: Option<Form>,
        name: Option<&str>,
        output: &File,
    ) -> Result<Option<BlobDigest>, Failure> {
        let about = |failure: Failure| failure.about(shown(path));
        let Some(archive) = SeekableArchive::open(path)? else {
            return self.import_stream(open_file(path)?, &shown(path), form, name, output).map_err(about);
        };
        let described = describe(&archive, form, name, &self.platform).map_err(about)?;
        let open = |name: &str| {
            let member = archive.open_member(name);
            let member =
                member.ok_or_else(|| Failure::new(format!("{} is not there", quote(name.as_bytes()))))?;
            Ok(Box::new(member) as Box<dyn Read + Send>)
        };
        self.import_described(&described, &open, output).map_err(about)
    }

    /// Layers that are in files.
    fn import_described(
        &self,
        described: &Described,
        open: &OpenFile,
        output: &File,
    ) -> Result<Option<BlobDigest>, Failure> {
        let config = normalised(&described.config)?;
        let blobs: Vec<LayerBlob> = described
            .layers
            .iter()
            .map(|layer| LayerBlob {
                name: layer.digest.as_ref().map_or_else(|| layer.name.clone(), short),
                digest: layer.digest,
                size: layer.size,
                open: Box::new(move || {
                    let source = open(&layer.name)?;
                    Ok(match layer.digest {
                        Some(digest) => Box::new(Verified::new(source, digest)),
                        None => source,
                    })
                }),
            })
            .collect();
        self.import_blobs(&blobs, config, output)?;
        Ok(described.manifest)
    }

    /// A stream: an archive, whose layers are converted as they come, or one root file system.
    fn import_stream(
        &self,
        source: impl Read + Send,
        name: &str,
        form: Option<Form>,
        image: Option<&str>,
        output: &File,
    ) -> Result<Option<BlobDigest>, Failure> {
        let bar = self.bars.add(name, None);
        let counted = Counted { source, bar: &bar, stop: &AtomicBool::new(false) };
        let kind = stream_kind(decompressed(counted).map_err(failure_of)?)?;
        let archive = match kind {
            StreamKind::Tar(tar) if form.is_none() => return self.import_tar(tar, name, output),
            StreamKind::Tar(tar) => Box::new(tar) as Box<dyn Read + Send>,
            StreamKind::Archive(archive) => Box::new(archive),
        };
        let mut convert =
            |content: &mut (dyn Read + Send)| convert(content, self.scratch()?, &self.compressors);
        let streamed = stream(archive, &mut convert)?;
        bar.done("read");
        let described = describe(&streamed, form, image, &self.platform)?;
        let layers = described.layers.iter().map(|layer| streamed.layer(&layer.name, layer.digest.as_ref()));
        let layers = layers.collect::<Result<Vec<Layer>, Failure>>()?;
        let config = Some(normalised(&described.config)?);
        self.write(&layers, config.as_deref(), output).map_err(not_again)?;
        Ok(described.manifest)
    }

    /// A root file system in a tar, compressed or not.
    fn import_tar(
        &self,
        source: impl Read + Send,
        name: &str,
        output: &File,
    ) -> Result<Option<BlobDigest>, Failure> {
        let bar = self.bars.add(name, None);
        let counted = Counted { source, bar: &bar, stop: &AtomicBool::new(false) };
        let layer = convert(counted, self.scratch()?, &self.compressors)?;
        bar.done("read");
        self.write(&[layer], None, output).map_err(not_again)?;
        Ok(None)
    }

    /// An image that is one already: its squashfs, as it is.
    fn take_image(&self, path: &Path, output: &File) -> Result<(), Failure> {
        let opened = probe(path, open_file(path)?)?;
        let (start, len) = match opened.kind {
            ImageKind::Sif { offset, length } => (offset, length),
            _ => (0, opened.size),
        };
        let bar = self.bars.add(shown(path), Some(len));
        let mut source = Region::new(Arc::new(opened.file), start, len);
        copy(&mut source, output, &bar).map_err(|failure| failure.about(shown(path)))?;
        bar.done("copied");
        Ok(())
    }

    /// Converts layers and writes their image. A layer of the cache that turns out to be damaged is converted again.
    fn import_blobs(&self, blobs: &[LayerBlob], config: Vec<u8>, output: &File) -> Result<(), Failure> {
        for _ in 0..2 {
            let layers = self.convert_all(blobs)?;
            match self.write(&layers, Some(&config), output) {
                Err(AssembleError::DamagedLayer(number)) => {
                    let key = blobs.get(number).and_then(|blob| self.key(blob));
                    key.iter().for_each(|key| self.cache.remove(key));
                }
                other => return other.map_err(not_again),
            }
        }
        Err(not_again(AssembleError::DamagedLayer(0)))
    }

    /// A file for a layer that nobody will ask for again.
    pub(crate) fn scratch(&self) -> Result<File, Failure> {
        clone(Draft::create_in(self.cache.directory())?.file())
    }

    /// Writes the image of converted layers.
    fn write(&self, layers: &[Layer], config: Option<&[u8]>, output: &File) -> Result<(), AssembleError> {
        let total = layers.iter().map(Layer::blocks_len).sum();
        let bar = self.bars.add(WRITING, Some(total));
        let file = clone(output)?;
        file.set_len(0)
            .and_then(|()| (&file).rewind())
            .map_err(|error| AssembleError::Failed(cannot_write(error)))?;
        assemble(layers, config, self.keep_owners, &self.compressors, Shown { file, bar: &bar })?;
        bar.done("written");
        Ok(())
    }
}

/// A layer that was converted a moment ago, or twice, is damaged: no cache is to blame.
fn not_again(error: AssembleError) -> Failure {
    match error {
        AssembleError::Failed(failure) => failure,
        AssembleError::DamagedLayer(_) => {
            Failure::new("a layer that was just written is read back differently")
                .hint("the disk fails; the kernel's log tells more")
        }
    }
}

/// The first digits of a digest, as Docker shows them.
fn short(digest: &BlobDigest) -> String {
    digest.hex().chars().take(12).collect()
}

fn open_file(path: &Path) -> Result<File, Failure> {
    File::open(path).map_err(|error| cannot_open(path, error))
}

fn clone(file: &File) -> Result<File, Failure> {
    file.try_clone().map_err(cannot_write)
}

/// Sees that a file is an image that containers can have.
fn probe(name: &Path, file: File) -> Result<OpenedImage, Failure> {
    identify_opened(name, image::probe(name, file)?)
}

fn copy(source: &mut impl Read, mut to: &File, bar: &Bar) -> Result<(), Failure> {
    let mut buffer = vec![0; COPY_LEN];
    loop {
        let count = source.read(&mut buffer).map_err(failure_of)?;
        if count == 0 {
            return Ok(());
        }
        to.write_all(buffer.get(..count).unwrap_or_default()).map_err(cannot_write)?;
        bar.advance(count as u64);
    }
}

/// The digest and the length of a file.
fn digest_of(file: &File) -> Result<(Digest, u64), Failure> {
    let (mut hash, mut buffer, mut position) = (Sha256::new(), vec![0; COPY_LEN], 0);
    loop {
        let count = file.read_at(&mut buffer, position).map_err(failure_of)?;
        if count == 0 {
            return Ok((Digest::new(hash.finalize().into()), position));
        }
        hash.update(buffer.get(..count).unwrap_or_default());
        position += count as u64;
    }
}

/// An output that shows its progress.
struct Shown<'a> {
    file: File,
    bar: &'a Bar,
}

impl Write for Shown<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.file.write(bytes)?;
        self.bar.advance(count as u64);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Seek for Shown<'_> {
    fn seek(&mut self, to: io::SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

impl Output for Shown<'_> {
    fn truncate(&mut self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }
}
