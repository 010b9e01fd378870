//! What each command needs of the other parts: registries, archives, the writer, the store. Runs as the user.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mizzen::cli::images as cli;
use mizzen::cli::images::{
    AccountArgs, Compressor, ExportArgs, ImportArgs, LoginArgs, LogoutArgs, WritingArgs,
};
use mizzen::layer_cache;
use mizzen::report::{print, report, report_note};
use mizzen_core::failure::quote_reference;
use mizzen_core::find_image::find_file;
use mizzen_core::image;
use mizzen_core::image_store::own_directory;
use mizzen_core::staging::Amount;
use mizzen_core::{Config, Failure, Reference};
use mizzen_squashfs::writer::{Compression, Compressors, Options};
use serde_json::{Value, json};

use crate::export::{self, ExportCompression, ExportFormat, ExportOptions, Owners};
use crate::images::Outcome;
use crate::import::{Imported as ImportedFile, Importer};
use crate::layer::{LayerCache, compressor_name};
use crate::manifest::Platform;
use crate::output::{Existing, OutputFile};
use crate::progress::Bars;
use crate::registry::{self, Client, ClientOptions, Notes, PasswordSource, password_from_stdin};
use crate::shown;
use crate::source::Source;
use crate::store::key::ImageKey;
use crate::store::select::ListedImage;
use crate::store::sidecar::{Provenance, Sidecar};
use crate::store::{ObtainOptions, Store};

/// What images of this writer are called in the store. Another one makes other bytes of the same layers.
const WRITER: &str = "v1";
const GZIP_LEVEL: i32 = 9;
const ZSTD_LEVEL: i32 = 3;

/// What was imported.
pub struct Imported {
    /// The image's file.
    pub path: PathBuf,
    /// With the manifest's digest; None for what is in no registry.
    pub reference: Option<Reference>,
    /// All that `--json` shows.
    pub json: Value,
}

/// What one command line says, for any number of images.
struct Session<'a> {
    config: &'a Config,
    bars: Arc<Bars>,
    client: Client,
    platform: Platform,
    options: Options,
    keep_owners: bool,
    use_cache: bool,
    foreign_layers: bool,
}

impl<'a> Session<'a> {
    fn new(args: &ImportArgs, config: &'a Config) -> Result<Session<'a>, Failure> {
        let what = format!("{}: importing", quote_reference(args.source.as_bytes()));
        let bars = Arc::new(Bars::of(what, !args.quiet));
        let client = Client::new(client_options(config, &args.account, Arc::clone(&bars))?);
        let platform = args.platform.as_deref().map_or_else(|| Ok(Platform::host()), Platform::parse)?;
        let defaults = Options::default();
        Ok(Session {
            config,
            bars,
            client,
            platform,
            options: Options {
                compression: compression(&args.writing)?,
                block_size: args.writing.block_size,
                threads: args.jobs.unwrap_or(defaults.threads),
                ..defaults
            },
            keep_owners: args.keep_owners,
            use_cache: !args.no_cache,
            foreign_layers: args.foreign_layers,
        })
    }

    /// Writes an image to an empty file.
    fn write(&self, source: &Source, output: &File) -> Result<ImportedFile, Failure> {
        let compressors = Compressors::new(self.options.clone());
        let limit = Amount::parse(&self.config.layer_cache_max_size)?;
        let importer = Importer {
            compressors: compressors.map_err(|error| Failure::new(error.to_string()))?,
            cache: LayerCache::open(layer_cache::directory()?, limit)?,
            use_cache: self.use_cache,
            platform: self.platform.clone(),
            keep_owners: self.keep_owners,
            foreign_layers: self.foreign_layers,
            bars: &self.bars,
        };
        importer.import(source, output, &self.client)
    }

    /// Brings an image of a registry, whose digest is known, into the store, unless it is there.
    fn store(&self, reference: &Reference, options: &ObtainOptions) -> Result<Imported, Failure> {
        let digest = reference.digest.ok_or_else(|| Failure::new(format!("{reference} has no digest")))?;
        let key = ImageKey::new(reference, digest, &self.platform.to_string(), &self.writer());
        let store = Store::open(&own_directory(&self.config.image_store)?)?;
        let image = store.obtain(&key, options, |path| {
            let output = OutputFile::create(path, Existing::Replace)?;
            let imported = self.write(&Source::Registry(reference.clone()), output.file())?;
            output.publish()?;
            Ok(Provenance { source: reference.to_string(), file_digest: Some(imported.digest) })
        })?;
        let json = json!({
            "path": image.path,
            "reference": reference.to_string(),
            "digest": digest.to_string(),
            "platform": key.platform,
            "size": image.size,
        });
        Ok(Imported { path: image.path, reference: Some(reference.clone()), json })
    }

    /// The writer, and what is not as usual of what it does.
    fn writer(&self) -> String {
        let defaults = Options::default();
        let mut text = WRITER.to_owned();
        if (self.options.compression, self.options.block_size) != (defaults.compression, defaults.block_size)
        {
            text +=
                &format!("-{}-{}k", compressor_name(self.options.compression), self.options.block_size >> 10);
        }
        if self.keep_owners { text + "-owners" } else { text }
    }

    fn resolve(&self, reference: &Reference) -> Result<Reference, Failure> {
        Ok(reference.pinned(self.client.resolve(reference)?))
    }
}

/// How registries are asked. What is told meanwhile stands above the bars.
fn client_options(config: &Config, account: &AccountArgs, bars: Arc<Bars>) -> Result<ClientOptions, Failure> {
    let notes = Notes::new(move |text| bars.print(&format!("mizzen: note: {text}")));
    let mut options = ClientOptions::new(config.registries.clone(), notes);
    options.authfile.clone_from(&account.authfile);
    if let Some(user) = &account.username {
        options.login = Some((user.clone(), password_from_stdin()?));
    }
    Ok(options)
}

fn compression(args: &WritingArgs) -> Result<Compression, Failure> {
    let level = |default: i32| args.level.map_or(default, |level| i32::try_from(level).unwrap_or(i32::MAX));
    let plain = |compression: Compression| match args.level {
        None => Ok(compression),
        Some(_) => Err(Failure::new(format!("--level: {} has no levels", compressor_name(compression)))
            .hint("zstd and gzip have")),
    };
    match args.compressor {
        Compressor::Zstd => Ok(Compression::Zstd { level: level(ZSTD_LEVEL) }),
        Compressor::Gzip => Ok(Compression::Gzip { level: level(GZIP_LEVEL) }),
        Compressor::Xz => plain(Compression::Xz),
        Compressor::Lz4 => plain(Compression::Lz4),
        Compressor::None => plain(Compression::None),
    }
}

/// How an image is obtained by this command.
fn obtain_options(args: &ImportArgs) -> ObtainOptions {
    ObtainOptions { again: args.force, group: job(), speaks: !args.quiet, ..ObtainOptions::default() }
}

/// The job that this runs in, all tasks of an array being one: they fail together. One that was requeued is another.
fn job() -> Option<String> {
    let variable = |name: &str| std::env::var(name).ok();
    let job = variable("SLURM_ARRAY_JOB_ID").or_else(|| variable("SLURM_JOB_ID"))?;
    Some(format!("{job}.{}", variable("SLURM_RESTART_COUNT").unwrap_or_default()))
}

/// `mizzen import`: into a file, or into the user's store.
pub fn import(args: &ImportArgs, config: &Config) -> Result<Imported, Failure> {
    let source = Source::parse(&args.source)?;
    if let Some(output) = &args.output {
        return import_into(output, &source, args, config);
    }
    let Source::Registry(reference) = source else {
        return import_into(&default_output(&source), &source, args, config);
    };
    let session = Session::new(args, config)?;
    session.store(&session.resolve(&reference)?, &obtain_options(args))
}

/// `--container-save`: what is below a directory becomes an image. Runs in the container, with nothing of the host but the
/// directory of the file, which is the current one.
pub fn save(source: &OsStr, output: &Path, title: &Path, speaks: bool) -> Result<ImportedFile, Failure> {
    let file = OutputFile::create(output, Existing::Replace)?;
    let bars = Bars::of(format!("{}: saving", shown(title)), speaks);
    let compressors =
        Compressors::new(Options::default()).map_err(|error| Failure::new(error.to_string()))?;
    let importer = Importer {
        compressors,
        cache: LayerCache::scratch(".".into()),
        use_cache: false,
        platform: Platform::host(),
        keep_owners: false,
        foreign_layers: false,
        bars: &bars,
    };
    let saved = importer.import_directory(Path::new(source), "the container", file.file())?;
    file.publish()?;
    Ok(saved)
}

/// The file in the current directory that an image gets which is in no registry: named after its source, as enroot does.
fn default_output(source: &Source) -> PathBuf {
    const ENDS: [&str; 12] = [
        ".gz",
        ".zst",
        ".zstd",
        ".xz",
        ".tgz",
        ".tar",
        ".oci",
        ".img",
        ".simg",
        ".sif",
        ".sqsh",
        ".squashfs",
    ];
    let (path, name) = match source {
        Source::Layout(path, name) | Source::Archive(path, _, name) => (path.as_path(), name.as_deref()),
        Source::Tar(path) | Source::Directory(path) | Source::Image(path) => (path.as_path(), None),
        Source::Registry(_) | Source::Stdin => (Path::new("image"), None),
    };
    let canonical = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let file = canonical.file_name().unwrap_or(OsStr::new("image")).as_bytes();
    let mut stem = name.map_or(file, str::as_bytes);
    while let Some(shorter) = ENDS.iter().find_map(|end| stem.strip_suffix(end.as_bytes()))
        && !shorter.is_empty()
    {
        stem = shorter;
    }
    let letters = stem.iter().map(|byte| if matches!(byte, b'/' | b':') { b'+' } else { *byte });
    let mut output: Vec<u8> = letters.collect();
    output.extend_from_slice(b".sqsh");
    PathBuf::from(OsString::from_vec(output))
}

fn import_into(
    path: &Path,
    source: &Source,
    args: &ImportArgs,
    config: &Config,
) -> Result<Imported, Failure> {
    let output = OutputFile::create(path, Existing::with_force(args.force))?;
    let session = Session::new(args, config)?;
    let imported = session.write(source, output.file())?;
    output.publish()?;
    if is_in_folder(path, config) {
        describe_published(path, source, args, &session, &imported)?;
    }
    let json = json!({
        "path": path,
        "size": imported.size,
        "digest": imported.digest.to_string(),
        "manifest": imported.manifest.map(|digest| digest.to_string()),
    });
    Ok(Imported { path: path.to_owned(), reference: None, json })
}

/// Whether a file is in one of the site's folders, which `mizzen images` shows.
fn is_in_folder(path: &Path, config: &Config) -> bool {
    let directory = std::path::absolute(path).ok().and_then(|path| path.parent()?.canonicalize().ok());
    let is_folder = |folder: &PathBuf| folder.canonicalize().ok() == directory;
    directory.is_some() && config.image_folders.iter().any(is_folder)
}

/// Writes down where an image of the site came from.
fn describe_published(
    path: &Path,
    source: &Source,
    args: &ImportArgs,
    session: &Session,
    imported: &ImportedFile,
) -> Result<(), Failure> {
    let manifest = imported.manifest.and_then(|digest| digest.sha256());
    let (Source::Registry(reference), Some(digest)) = (source, manifest) else { return Ok(()) };
    let key = ImageKey::new(reference, digest, &session.platform.to_string(), &session.writer());
    let source = args.source.to_string_lossy().into_owned();
    let provenance = Provenance { source, file_digest: Some(imported.digest) };
    Sidecar::new(&key, &provenance, imported.size).write(path)
}

/// Which manifest a name means now: the name with its digest.
pub fn resolve(args: &ImportArgs, config: &Config) -> Result<Reference, Failure> {
    match Source::parse(&args.source)? {
        Source::Registry(reference) => Session::new(args, config)?.resolve(&reference),
        _ => Err(Failure::new("not the name of an image in a registry")),
    }
}

/// `mizzen export`: into a file, or to standard output.
pub fn export(args: &ExportArgs, config: &Config) -> Result<(), Failure> {
    let directory = std::env::current_dir()
        .map_err(|error| Failure::caused_by("cannot find the current directory", error))?;
    let (image, _) = find_file(args.image.as_os_str().as_bytes(), &directory, config, |path, place| {
        if place.symlink_metadata().is_err() {
            Ok(None)
        } else {
            image::open_at(path, place).map(|opened| Some(opened.form))
        }
    })?;
    let format = match args.format {
        cli::ExportFormat::Tar => ExportFormat::Tar,
        cli::ExportFormat::OciArchive => ExportFormat::OciArchive,
        cli::ExportFormat::DockerArchive => ExportFormat::DockerArchive,
    };
    // As tar and docker have it.
    let output = args.output.as_deref().filter(|path| *path != Path::new("-"));
    let output_name = output.map_or_else(|| "standard output".to_owned(), shown);
    let options = ExportOptions {
        format,
        compression: args.compression.map_or(format.compression(), |compression| match compression {
            cli::ExportCompression::None => ExportCompression::None,
            cli::ExportCompression::Gzip => ExportCompression::Gzip,
            cli::ExportCompression::Zstd => ExportCompression::Zstd,
        }),
        tag: args.tag.clone(),
        owners: Owners::Usual,
        scratch: export::scratch_directory(output),
        output_name: output_name.clone(),
        threads: Options::default().threads,
        image,
    };
    let bars = Bars::of(output_name, !args.quiet);
    let bar = bars.add(shown(&args.image), None);
    let mut progress = |bytes| bar.advance(bytes);
    let exported = match output {
        Some(path) => {
            export::check_output(&options.image, path)?;
            let output = OutputFile::create(path, Existing::with_force(args.force))?;
            let exported = export::export(&options, &mut output.file(), &mut progress)?;
            output.publish()?;
            exported
        }
        None => export::export(&options, &mut export::standard_output()?, &mut progress)?,
    };
    drop(bars);
    exported.warnings.iter().for_each(|warning| report_note(warning));
    Ok(())
}

/// `mizzen images update`: imports those whose tags mean another image by now. One that fails does not keep the others.
pub fn update(
    images: &[&ListedImage],
    account: &AccountArgs,
    quiet: bool,
    config: &Config,
) -> Result<Outcome, Failure> {
    let bars = Arc::new(Bars::new(!quiet));
    let client = Client::new(client_options(config, account, Arc::clone(&bars))?);
    let mut session = Session {
        config,
        bars,
        client,
        platform: Platform::host(),
        options: Options::default(),
        keep_owners: false,
        use_cache: true,
        foreign_layers: false,
    };
    let (mut text, mut lines, mut failed) = (String::new(), Vec::new(), 0);
    for image in images {
        let outcome = update_one(image, &mut session);
        let (reference, state) = match outcome {
            Ok(Some((reference, is_new))) => (reference, if is_new { "updated" } else { "unchanged" }),
            Ok(None) => continue,
            Err(failure) => {
                report(&failure);
                failed += 1;
                continue;
            }
        };
        text += &format!("{reference}: {state}\n");
        lines.push(json!({ "reference": reference.to_string(), "state": state }));
    }
    if failed > 0 {
        print(&text)?;
        return Err(Failure::new(format!("{failed} of {} images could not be looked up", images.len())));
    }
    Ok(Outcome { text, json: Value::Array(lines) })
}

/// The reference with the digest that it means now, and whether that is another one; none for what has no tag.
fn update_one(image: &ListedImage, session: &mut Session) -> Result<Option<(Reference, bool)>, Failure> {
    let Some(name) = &image.reference else { return Ok(None) };
    let reference = Reference { digest: None, ..Reference::parse(name.as_bytes())? };
    // One that was imported by its digest has no tag, and stays what it is.
    if reference.to_string() != *name {
        return Ok(None);
    }
    if let Some(platform) = &image.platform {
        session.platform = Platform::parse(platform)?;
    }
    let now = session.resolve(&reference)?;
    if now.digest == image.manifest_digest {
        return Ok(Some((now, false)));
    }
    session.store(&now, &ObtainOptions::default())?;
    Ok(Some((now, true)))
}

/// `mizzen login`.
pub fn login(args: &LoginArgs, config: &Config) -> Result<(), Failure> {
    let account = AccountArgs { authfile: args.authfile.clone(), ..AccountArgs::default() };
    let options = client_options(config, &account, Arc::new(Bars::new(false)))?;
    let password = if args.password_stdin { PasswordSource::Stdin } else { PasswordSource::Terminal };
    print(&registry::login(options, &args.registry, args.username.as_deref(), password)?)
}

/// `mizzen logout`.
pub fn logout(args: &LogoutArgs, config: &Config) -> Result<(), Failure> {
    let account = AccountArgs { authfile: args.authfile.clone(), ..AccountArgs::default() };
    let options = client_options(config, &account, Arc::new(Bars::new(false)))?;
    print(&registry::logout(&options, &args.registry)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_named_after_their_sources() {
        let archive =
            |path: &str, name: Option<&str>| Source::Archive(path.into(), None, name.map(str::to_owned));
        for (source, output) in [
            (archive("/x/mine.tar.gz", None), "mine.sqsh"),
            (archive("/x/mine.tar", Some("lab/app:1")), "lab+app+1.sqsh"),
            (Source::Tar("root.tgz".into()), "root.sqsh"),
            (Source::Directory("/usr/".into()), "usr.sqsh"),
            (Source::Image("tool.sif".into()), "tool.sqsh"),
            (Source::Tar(".tar".into()), ".tar.sqsh"),
            (Source::Stdin, "image.sqsh"),
        ] {
            assert_eq!(default_output(&source), Path::new(output), "{source:?}");
        }
    }
}
