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
use mizzen_core::failure::{cause, quote};
use mizzen_core::{Config, Digest, Failure, request};

use crate::host::Host;
use crate::host_libraries;
use mizzen_squashfs::squashfs;

use crate::image::{self, DirectoryTree, Kind, Metadata, Opened, Tree};
use crate::options::RunOptions;
use crate::plan::{Identity, Plan, What};
use crate::report_note;
use crate::sandbox::{self, RootSource, Server, Sources, Unstartable};
use crate::stage::{self, Ready, Staging};

/// Runs a program in a container: becomes it, or returns why not.
pub fn run(options: &RunOptions) -> Result<i32, Unstartable> {
    let mut watch = Stopwatch::start();
    let host = Host::look();
    let image = Image::find(&options.image, &options.staging)?;
    watch.lap("stage");
    let root = image.source(options, &host)?;
    let (plan, data) = plan(options, &image, &host)?;
    let sources = Sources { root, data };
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
    let host = Host::look();
    let options = RunOptions { staging: Staging::never(), ..options.clone() };
    let image = Image::find(&options.image, &options.staging)?;
    plan(&options, &image, &host).map(|(plan, _)| plan)
}

/// The plan for an image, and the files of its squashfs mounts.
pub fn plan(
    options: &RunOptions,
    image: &Image,
    host: &Host,
) -> Result<(Plan, Vec<Arc<squashfs::Image>>), Failure> {
    let metadata = image.metadata()?;
    image::check_architecture(&image.opened.path, image.tree(), &metadata)?;
    let host_libraries = host_libraries::decide(options, image.tree(), &metadata, host)?;
    let plan = Plan::make(options, image.tree(), &metadata, host, host_libraries)
        .map_err(|failure| image.named(failure))?;
    let mut data = Vec::new();
    for mount in &plan.mounts {
        if let What::Squashfs(path) = &mount.what {
            data.push(Arc::new(open_data(path, &options.staging.for_data())?));
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
    pub fn find(name: &Path, staging: &Staging) -> Result<Image, Failure> {
        let (path, pin) = named_image(name, &Config::load(&Source::Default)?)?;
        Image::find_at(&path, pin, staging)
    }

    /// Recognises the image at an absolute path, and copies it to this node if that is wanted.
    pub fn find_at(path: &Path, pin: Option<Digest>, staging: &Staging) -> Result<Image, Failure> {
        let Ready { opened, digest, .. } = stage::image(path, pin, staging)?;
        let content =
            match &opened.kind {
                Kind::Squashfs => Content::Squashfs(Arc::new(open_squashfs(&opened, 0)?)),
                Kind::Sif { offset, .. } => Content::Squashfs(Arc::new(open_squashfs(&opened, *offset)?)),
                Kind::Directory => Content::Directory(DirectoryTree::open(path).map_err(|error| {
                    Failure::new(format!("{}: {error}", quote(path.as_os_str().as_bytes())))
                })?),
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
    pub fn source(&self, options: &RunOptions, host: &Host) -> Result<RootSource, Failure> {
        Ok(match &self.content {
            Content::Squashfs(image) => {
                let identity = Identity::new(host, options.remap_root);
                RootSource::Squashfs(Server::start(image, &options.command, &identity)?)
            }
            Content::Directory(_) => RootSource::Directory(self.opened.path.clone()),
        })
    }

    /// The same where the kernel has mounted it: it reads ahead as well.
    pub fn mounted_source(&self, options: &RunOptions, place: PathBuf) -> RootSource {
        if let Content::Squashfs(image) = &self.content {
            sandbox::read_ahead(image, &options.command, &place);
        }
        RootSource::Directory(place)
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
fn open_data(path: &Path, staging: &Staging) -> Result<squashfs::Image, Failure> {
    let Ready { opened, .. } = stage::image(path, None, staging)?;
    match opened.kind {
        Kind::Squashfs => open_squashfs(&opened, 0),
        Kind::Sif { offset, .. } => open_squashfs(&opened, offset),
        Kind::Directory => Err(Failure::new(format!("{}: is a directory", path.display()))),
    }
}

/// Whether a file is as long as it says, and can be read.
pub fn check_content(opened: &Opened) -> Result<(), Failure> {
    match opened.kind {
        Kind::Squashfs => open_squashfs(opened, 0).map(drop),
        Kind::Sif { offset, .. } => open_squashfs(opened, offset).map(drop),
        Kind::Directory => Ok(()),
    }
}

fn open_squashfs(opened: &Opened, offset: u64) -> Result<squashfs::Image, Failure> {
    let shown = quote(opened.path.as_os_str().as_bytes());
    let file = opened.file.try_clone().map_err(|error| Failure::new(format!("{shown}: {error}")))?;
    squashfs::Image::open(file, offset).map_err(|error| match error {
        squashfs::Error::Io { source, .. } => {
            Failure::new(format!("{shown}: cannot read: {}", cause(&source)))
                .hint("its file system fails; the node's kernel log tells more")
        }
        error => Failure::new(format!("{shown}: {error}"))
            .hint("the file is broken or was not copied completely; copy it again"),
    })
}
