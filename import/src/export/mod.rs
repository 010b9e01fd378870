//! `mizzen export`: an image becomes an archive that other programs take. A plain tar file of its root file system, or that as
//! the only layer of an OCI or Docker image, with the configuration that the image's maker wrote down.
//!
//! The same image gives the same bytes. Everything is streamed; only a layer must be complete before it can stand in an
//! archive, because its length and digest come first. Until then it is in a file without a name.
//!
//! Run by: the user, in the exporter.

mod compress;
mod config;
mod directory;
mod docker;
mod files;
mod layer;
mod oci;
mod scratch;
mod squashfs;
#[cfg(test)]
mod tests;

use std::io::{self, BufWriter, IsTerminal, StdoutLock, Write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use mizzen::image::{Content, Loaded, identify};
use mizzen::report::check_stdout;
use mizzen_core::failure::quote;
use mizzen_core::{Failure, Reference};

use compress::CompressedWriter;
pub(crate) use directory::Walk;
pub(crate) use files::{Files, Found};
use layer::{HashWriter, Layer, TreeOptions};

const BUFFER_LEN: usize = 256 << 10;

/// What is exported, and to what.
#[derive(Debug, Clone)]
pub struct ExportOptions {
    /// A squashfs or SIF file, or a directory.
    pub image: PathBuf,
    /// What becomes of it.
    pub format: ExportFormat,
    /// How the layer of an OCI archive is compressed, or the whole of another archive. [`ExportFormat::compression`] is what
    /// everybody reads.
    pub compression: ExportCompression,
    /// The name of the image in an archive: `NAME:TAG`.
    pub tag: Option<String>,
    /// Whose files they become.
    pub owners: Owners,
    /// Where a layer is kept until it is complete: see [`scratch_directory`].
    pub scratch: PathBuf,
    /// What the output is called in messages.
    pub output_name: String,
    /// How many threads compress; the archive does not depend on it.
    pub threads: NonZeroUsize,
}

/// The archives that there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportFormat {
    /// The root file system alone.
    Tar,
    /// An OCI layout, for podman, skopeo, buildah and registries.
    OciArchive,
    /// What `docker save` writes, for `docker load`.
    DockerArchive,
}

impl ExportFormat {
    /// The compression that all readers of this archive know.
    pub fn compression(self) -> ExportCompression {
        match self {
            ExportFormat::OciArchive => ExportCompression::Gzip,
            ExportFormat::Tar | ExportFormat::DockerArchive => ExportCompression::None,
        }
    }
}

/// How an archive is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportCompression {
    /// Not at all.
    None,
    /// gzip, level 6.
    Gzip,
    /// zstd, level 3. Docker before 23 does not read it.
    Zstd,
}

/// Whose files they become in the archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owners {
    /// Those of an image file stay, those of a directory become root's unless root exports it: a user who has unpacked an
    /// image owns all of its files, and nobody else has that user.
    Usual,
    /// They stay as they are.
    Keep,
    /// All become root's.
    Root,
}

/// What was exported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// What of the image is not in the archive, each as a line for the user.
    pub warnings: Vec<String>,
}

/// Writes an image to `out` as an archive. `progress` is called with the number of bytes of each piece of the root file
/// system that has been read.
///
/// After a failure a part of the archive is written: the caller gives it its name only after success.
pub fn export(
    options: &ExportOptions,
    out: &mut dyn Write,
    progress: &mut dyn FnMut(u64),
) -> Result<Exported, Failure> {
    let tag = options.tag.as_deref().map(image_name).transpose()?;
    let image = Loaded::new(identify(&options.image)?, None, None)?;
    let out = BufWriter::with_capacity(BUFFER_LEN, out);
    let warnings = match options.format {
        ExportFormat::Tar => write_root(options, &image, out, progress)?,
        _ => write_image(options, &image, out, tag.as_ref(), progress)?,
    };
    Ok(Exported { warnings })
}

/// The root file system alone. Returns warnings.
fn write_root(
    options: &ExportOptions,
    image: &Loaded,
    out: BufWriter<&mut dyn Write>,
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<String>, Failure> {
    let write_failure = |error| cannot_write(options, error);
    let tree = tree_options(options, image, &write_failure);
    let mut files = open_files(image, &[]).map_err(|failure| image.named(failure))?;
    let out = compressed(out, options.compression, options)?;
    let (out, warnings) = layer::write_tree(files.as_mut(), out, &tree, progress)?;
    out.finish().and_then(|mut out| out.flush()).map_err(write_failure)?;
    Ok(warnings)
}

/// The root file system as the layer of an image. Returns warnings.
fn write_image(
    options: &ExportOptions,
    image: &Loaded,
    out: BufWriter<&mut dyn Write>,
    tag: Option<&Reference>,
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<String>, Failure> {
    let is_oci = options.format == ExportFormat::OciArchive;
    // Docker wants its layers as they are; the whole may be compressed.
    let (of_layer, of_archive) = match is_oci {
        true => (options.compression, ExportCompression::None),
        false => (ExportCompression::None, options.compression),
    };
    let scratch = scratch::create(&options.scratch)?;
    let scratch_failure = |error| scratch::cannot_write(&options.scratch, error);
    let tree = tree_options(options, image, &scratch_failure);
    // What is in it stands in the configuration.
    let mut files = open_files(image, &[b".mizzen"]).map_err(|failure| image.named(failure))?;
    let layer = HashWriter::new(BufWriter::with_capacity(BUFFER_LEN, scratch));
    let layer = compressed(layer, of_layer, options)?;
    let mut layer = Layer::write(files.as_mut(), layer, of_layer, &tree, progress)?;
    let mut warnings = std::mem::take(&mut layer.warnings);
    let (config, more) = config::make(image, &layer).map_err(|failure| image.named(failure))?;
    warnings.extend(more);
    let out = compressed(out, of_archive, options)?;
    let written = match is_oci {
        true => oci::write(out, layer, &config, tag),
        false => docker::write(out, layer, &config, tag),
    };
    let flushed = written.and_then(CompressedWriter::finish).and_then(|mut out| out.flush());
    flushed.map_err(|error| cannot_write(options, error))?;
    Ok(warnings)
}

fn tree_options<'a>(
    options: &ExportOptions,
    image: &'a Loaded,
    write_failure: &'a dyn Fn(io::Error) -> Failure,
) -> TreeOptions<'a> {
    TreeOptions {
        image,
        is_layer: options.format != ExportFormat::Tar,
        become_roots: become_roots(options.owners, &image.content),
        write_failure,
    }
}

fn compressed<W: Write>(
    out: W,
    compression: ExportCompression,
    options: &ExportOptions,
) -> Result<CompressedWriter<W>, Failure> {
    CompressedWriter::new(out, compression, options.threads)
        .map_err(|error| Failure::caused_by("cannot start a thread", error))
}

fn cannot_write(options: &ExportOptions, error: io::Error) -> Failure {
    let is_pipe = error.kind() == io::ErrorKind::BrokenPipe;
    let failure = Failure::caused_by(format!("{}: cannot write the archive", options.output_name), error);
    if is_pipe { failure.hint("the program that reads it has ended; look for its message") } else { failure }
}

fn open_files<'a>(image: &'a Loaded, excluded: &'a [&'a [u8]]) -> Result<Box<dyn Files + 'a>, Failure> {
    Ok(match &image.content {
        Content::Squashfs(content) => Box::new(squashfs::Walk::new(content, excluded)),
        Content::Directory(_) => Box::new(Walk::new(&image.opened.path, excluded)?),
    })
}

fn become_roots(owners: Owners, content: &Content) -> bool {
    match owners {
        Owners::Keep => false,
        Owners::Root => true,
        Owners::Usual => matches!(content, Content::Directory(_)) && !rustix::process::geteuid().is_root(),
    }
}

/// A name as `docker tag` takes it.
fn image_name(text: &str) -> Result<Reference, Failure> {
    let about = |failure: Failure| failure.about("--tag");
    let name = Reference::parse(text.as_bytes()).map_err(about)?;
    let is_plain =
        !text.contains("://") && !text.contains('#') && name.user.is_none() && name.digest.is_none();
    if is_plain {
        Ok(name)
    } else {
        Err(about(Failure::new(format!("{}: not NAME:TAG", quote(text.as_bytes())))))
    }
}

/// Where a layer is kept that goes to this file, or to a pipe: beside the file, where there must be space for it anyway.
pub fn scratch_directory(output: Option<&Path>) -> PathBuf {
    match output.map(Path::parent) {
        Some(Some(parent)) if !parent.as_os_str().is_empty() => parent.to_owned(),
        Some(_) => ".".into(),
        None => std::env::temp_dir(),
    }
}

/// Refuses an archive that would become a part of what it is made of.
pub fn check_output(image: &Path, output: &Path) -> Result<(), Failure> {
    let directory = scratch_directory(Some(output)).canonicalize();
    match (image.canonicalize(), directory) {
        (Ok(image), Ok(directory)) if image.is_dir() && directory.starts_with(&image) => {
            Err(Failure::new(format!("{}: is in the directory that is exported", shown(output)))
                .hint("write it elsewhere: -o DIRECTORY/NAME.tar"))
        }
        // What cannot be found fails by itself.
        _ => Ok(()),
    }
}

/// Standard output, unless it is a terminal.
pub fn standard_output() -> Result<StdoutLock<'static>, Failure> {
    let stdout = io::stdout();
    check_stdout().map_err(|error| Failure::caused_by("standard output: cannot write the archive", error))?;
    if stdout.is_terminal() {
        return Err(Failure::new("standard output: is a terminal, and an archive is not for reading")
            .hint("write -o FILE, or | another program"));
    }
    Ok(stdout.lock())
}

fn shown(path: &Path) -> String {
    quote(path.as_os_str().as_encoded_bytes())
}
