//! The way of a container, from the user's words to the running program. Read this file first.
//!
//!     options -> image, by content -> copy on this node -> metadata -> plan (nothing has happened yet) -> sandbox -> program
//!
//! Runs as the user on the host, and from `sandbox::run` on in the container's namespaces.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use mizzen_core::config::Source;
use mizzen_core::failure::quote;
use mizzen_core::{Config, Digest, Failure, limits, request};

use crate::host::Host;
use crate::host_libraries;
use crate::raised_limits;
use mizzen_squashfs as squashfs;

use crate::image::{self, DirectoryTree, Kind, Metadata, Opened, Tree};
use crate::options::RunOptions;
use crate::plan::{Identity, MountKind, Plan};
use crate::report::report_note;
use crate::sandbox::{self, RootSource, Server, Sources, StderrReporter, Unstartable, Watch};
use crate::stage::{self, StagedImage, StagingOptions};

/// So much may follow an image in its file, and as much again as the image has: padding, signatures, hashes of its blocks.
const TAIL_LIMIT: u64 = 64 << 20;

/// Runs a program in a container: becomes it, or returns why not.
pub fn run(options: &RunOptions) -> Result<i32, Unstartable> {
    let mut watch = Stopwatch::start();
    let host = Host::detect();
    let image = Image::find(&options.image, &options.staging)?;
    watch.lap("stage");
    let container_watch = Watch::new(Box::new(StderrReporter { program: std::process::id() }))?;
    let root = image.source(options, &host, &container_watch)?;
    let (plan, data) = plan(options, &image, &host)?;
    let sources = Sources { root, data, watch: container_watch };
    watch.lap("plan");
    plan.notes.iter().for_each(|note| report_note(note));
    if plan.unshare.pid {
        return Ok(sandbox::run_as_child(&plan, sources)?);
    }
    sandbox::build(&plan, sources, None)?;
    watch.lap("mount");
    if options.verbose {
        let digest = plan.facts.digest.iter().map(|digest| format!("{digest}, "));
        report_note(&(digest.collect::<String>() + &watch.text()));
    }
    Err(sandbox::start(&plan.program))
}

/// How long the parts of a start take.
pub struct Stopwatch {
    last: Instant,
    laps: Vec<String>,
}

impl Stopwatch {
    /// Starts the first part.
    pub fn start() -> Stopwatch {
        Stopwatch { last: Instant::now(), laps: Vec::new() }
    }

    /// Ends a part; the next one starts.
    pub fn lap(&mut self, part: &str) {
        let now = Instant::now();
        self.laps.push(format!("{part} {:.1} ms", (now - self.last).as_secs_f64() * 1e3));
        self.last = now;
    }

    /// All parts so far.
    pub fn text(&self) -> String {
        self.laps.join(", ")
    }
}

/// Everything before the first side effect: no copy of the image is made either.
pub fn prepare(options: &RunOptions) -> Result<Plan, Failure> {
    let host = Host::detect();
    let options = RunOptions { staging: StagingOptions::never(), ..options.clone() };
    let image = Image::find(&options.image, &options.staging)?;
    plan(&options, &image, &host).map(|(plan, _)| plan)
}

/// The plan for an image, and the files of its squashfs mounts.
pub fn plan(
    options: &RunOptions,
    image: &Image,
    host: &Host,
) -> Result<(Plan, Vec<Arc<squashfs::Image>>), Failure> {
    raised_limits::raise_open_files();
    let metadata = image.metadata()?;
    image::check_architecture(&image.opened.path, image.tree(), &metadata)?;
    let host_libraries = host_libraries::decide(options, image.tree(), &metadata, host)?;
    let plan = Plan::make(options, image.tree(), &metadata, host, host_libraries)
        .map_err(|failure| image.named(failure))?;
    raised_limits::check_open_files(&plan)?;
    let mut data = Vec::new();
    for mount in &plan.mounts {
        if let MountKind::Squashfs(path) = &mount.what {
            let opened = open_data(path, &options.staging);
            data.push(Arc::new(opened.map_err(|failure| failure.about(&mount.why))?));
        }
    }
    Ok((plan, data))
}

/// An image that has been found and recognised.
pub struct Image {
    /// The file or directory.
    pub opened: Opened,
    /// The digest of its content, if it was computed.
    pub digest: Option<Digest>,
    content: Content,
}

/// How to look into it.
enum Content {
    Squashfs(Arc<squashfs::Image>),
    Directory(DirectoryTree),
}

impl Image {
    /// Finds what the user names, in the current directory or the site's folders, and recognises it.
    pub fn find(name: &Path, staging: &StagingOptions) -> Result<Image, Failure> {
        let (path, pin) = named_image(name, &Config::load(&Source::Default)?)?;
        Image::find_at(&path, pin, staging)
    }

    /// Recognises the image at an absolute path, and copies it to this node if that is wanted.
    pub fn find_at(path: &Path, pin: Option<Digest>, staging: &StagingOptions) -> Result<Image, Failure> {
        limits::check_memory()?;
        let StagedImage { opened, digest, .. } = stage::image(path, pin, staging)?;
        let content = match &opened.kind {
            Kind::Squashfs => Content::Squashfs(Arc::new(open_squashfs(&opened, 0)?)),
            Kind::Sif { offset, .. } => Content::Squashfs(Arc::new(open_squashfs(&opened, *offset)?)),
            Kind::Directory => Content::Directory(
                DirectoryTree::open(path)
                    .map_err(|error| Failure::caused_by(quote(path.as_os_str().as_bytes()), error))?,
            ),
        };
        Ok(Image { opened, digest, content })
    }

    /// The files in it.
    pub fn tree(&self) -> &dyn Tree {
        match &self.content {
            Content::Squashfs(image) => image.as_ref(),
            Content::Directory(tree) => tree,
        }
    }

    /// What its maker wrote down.
    pub fn metadata(&self) -> Result<Metadata, Failure> {
        let mut metadata = image::metadata(self.tree()).map_err(|failure| self.named(failure))?;
        metadata.architecture = metadata.architecture.or(self.opened.architecture);
        metadata.digest = self.digest;
        Ok(metadata)
    }

    /// Where a container gets its files from. A file server starts here, to read ahead while the rest is planned.
    pub fn source(&self, options: &RunOptions, host: &Host, watch: &Watch) -> Result<RootSource, Failure> {
        Ok(match &self.content {
            Content::Squashfs(image) => {
                let identity = Identity::new(host, options.remap_root);
                let path = &self.opened.path;
                RootSource::Squashfs(Server::start(image, path, &options.command, &identity, watch)?)
            }
            // By its own name: inside the container's mount namespace no descriptor can be bound, which a path like
            // /proc/self/fd/0 stands for.
            Content::Directory(_) => {
                let path = &self.opened.path;
                RootSource::Directory(path.canonicalize().unwrap_or_else(|_| path.clone()))
            }
        })
    }

    /// A failure that has to do with what is in the image.
    fn named(&self, failure: Failure) -> Failure {
        let image = quote(self.opened.path.as_os_str().as_bytes());
        failure.about(image)
    }
}

/// The path of what the user names, in the current directory or the site's folders, and the content that it must have.
pub fn named_image(name: &Path, config: &Config) -> Result<(PathBuf, Option<Digest>), Failure> {
    let directory = std::env::current_dir().unwrap_or_else(|_| "/".into());
    request::find_image(name.as_os_str().as_bytes(), &directory, config)
}

/// A squashfs file for a data mount, copied to this node as images are.
fn open_data(path: &Path, staging: &StagingOptions) -> Result<squashfs::Image, Failure> {
    let StagedImage { opened, .. } = stage::image(path, None, staging)?;
    match opened.kind {
        Kind::Squashfs => open_squashfs(&opened, 0),
        Kind::Sif { offset, .. } => open_squashfs(&opened, offset),
        Kind::Directory => Err(Failure::new(format!("{}: is a directory", path.display()))),
    }
}

/// Whether a file is as long as it says, and can be read.
pub fn check_content(opened: &Opened) -> Result<(), Failure> {
    let end = match opened.kind {
        Kind::Squashfs => open_squashfs(opened, 0)?.superblock().bytes_used,
        Kind::Sif { offset, .. } => {
            open_squashfs(opened, offset)?;
            image::sif::end(&opened.file, opened.size)
                .map_err(|failure| failure.about(quote(opened.path.as_os_str().as_bytes())))?
        }
        Kind::Directory => return Ok(()),
    };
    if opened.size.saturating_sub(end) <= end.saturating_add(TAIL_LIMIT) {
        return Ok(());
    }
    let (shown, size) = (quote(opened.path.as_os_str().as_bytes()), opened.size);
    Err(Failure::new(format!("{shown}: the image in it ends after {end} bytes, the file after {size}"))
        .hint("something else follows the image, or the file is damaged; `truncate -s` cuts it off"))
}

/// The same by the first bytes of the squashfs alone: nothing is inflated.
pub fn check_header(opened: &Opened) -> Result<(), Failure> {
    let offset = match opened.kind {
        Kind::Squashfs => 0,
        Kind::Sif { offset, .. } => offset,
        Kind::Directory => return Ok(()),
    };
    squashfs::Superblock::read(&opened.file, offset).map(drop).map_err(|error| unopened(opened, error))
}

fn open_squashfs(opened: &Opened, offset: u64) -> Result<squashfs::Image, Failure> {
    let shown = quote(opened.path.as_os_str().as_bytes());
    let file = opened.file.try_clone().map_err(|error| Failure::caused_by(&shown, error))?;
    squashfs::Image::open(file, offset).map_err(|error| unopened(opened, error))
}

fn unopened(opened: &Opened, error: squashfs::Error) -> Failure {
    let shown = quote(opened.path.as_os_str().as_bytes());
    match error {
        squashfs::Error::Io { source, .. } => Failure::caused_by(format!("{shown}: cannot read"), source)
            .or_hint("its file system fails; the node's kernel log tells more"),
        error @ (squashfs::Error::UnknownCompressor(_)
        | squashfs::Error::BigEndian
        | squashfs::Error::Version { .. }) => {
            Failure::new(format!("{shown}: {error}")).hint("make the image again with mksquashfs 4")
        }
        error => Failure::new(format!("{shown}: {error}")).hint(image::DAMAGED),
    }
}
