//! Staging: an image on a network file system is copied to the node once, and used from there. Runs as the user on the
//! host; root's commands, as root, on the copies for all users.
//!
//!     source, opened -> root has copied it for all users? -----------------> the site's copy
//!                    -> known, and its copy is good? ----------------------> the copy
//!                    -> large, and its content need not be known? ----------> both: a copy is made meanwhile (read_through.rs), of
//!                                                                             what srun sends, if it does (early.rs)
//!                    -> else, one process at a time: what srun has sent, if it has; room, copy, publish --> the copy
//!                    -> no room, no lock, no cache: a note --------------> the source
//!
//! The source is opened first in any case, so nobody uses a copy of what they cannot read.

mod apart;
pub mod broadcast;
pub mod cache;
pub mod commands;
mod copier;
mod copy;
pub mod delivery;
mod early;
mod evict;
mod fetch;
mod fill;
mod fs_type;
mod in_place;
mod lock;
mod obtain;
pub mod own_directory;
mod partial;
pub mod profile;
mod progress_sink;
mod read_through;
mod requirements;
mod site;
mod source;

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mizzen_core::failure::cause;
use mizzen_core::fs_server::FsServer;
use mizzen_core::staging::{Amount, Broadcast, Policy, Verify};
use mizzen_core::{Config, Digest, Failure};
use mizzen_squashfs::ByteSource;
use nix::sys::signal::Signal;
use nix::unistd::geteuid;
use tracing::debug;

use crate::image::{self, ImageKind, OpenedImage, check_content, check_superblock, shown};
use crate::sys;
use cache::Cache;
use copy::{CopyError, copy};
use delivery::Delivery;
pub use evict::Limits;
use in_place::InPlace;
use obtain::{existing, obtain};
pub(crate) use partial::decode as decode_record;
use progress_sink::{ProgressSink, StderrSink, note, progress};
use read_through::ReadThrough;
pub use requirements::Requirements;
pub use source::FileIdentity;
use source::SourceImage;

/// Who has it makes room in a directory of copies, for these or for unpacked files.
const ROOM_LOCK: &str = "room.lock";

/// What the site and the user say about staging.
#[derive(Clone, Debug, Default)]
pub struct StagingOptions {
    /// When to copy.
    pub policy: Policy,
    directory: PathBuf,
    verify: Verify,
    limits: Limits,
    /// How much the files may take that were unpacked for the next starts.
    unpacked_max_size: Option<Amount>,
    network: Vec<String>,
    /// Images of this size and larger are used while they are copied; none of them are if there is no such size.
    read_through: Option<u64>,
    /// Whether tasks start while srun sends such images.
    broadcast: Broadcast,
    /// What srun has sent to this node, or sends.
    deliveries: Vec<Delivery>,
    /// Where root has copies for all users; empty where there are none.
    site: PathBuf,
    /// Whether it is root who makes them.
    fills_site: bool,
    /// Whether it is a failure that there is no copy; else the source is used.
    copy_required: bool,
}

impl StagingOptions {
    /// The site's settings with this policy.
    pub fn new(policy: Policy, config: &Config) -> Result<StagingOptions, Failure> {
        let limits = Limits::new(config)?;
        let (directory, network) = (config.stage_directory.clone(), config.network_file_systems.clone());
        let read_through = Amount::parse(&config.stage_read_through)?;
        Ok(StagingOptions {
            policy,
            directory,
            verify: config.stage_verify,
            limits,
            unpacked_max_size: Amount::parse(&config.stage_unpacked_max_size)?,
            network,
            read_through: read_through.map(|amount| amount.of(0)),
            broadcast: config.stage_broadcast,
            deliveries: Vec::new(),
            site: config.stage_shared.clone(),
            fills_site: false,
            copy_required: false,
        })
    }

    /// For those who want a copy, and no container; `for_all`, as root, in the directory for all users.
    pub fn of_copies(config: &Config, for_all: bool) -> Result<StagingOptions, Failure> {
        let staging = StagingOptions::new(Policy::Always, config)?;
        Ok(StagingOptions { copy_required: true, fills_site: for_all, ..staging })
    }

    /// Whether a copy that is there is read before it is used.
    pub fn verifies(&self, content_matters: bool) -> bool {
        match self.verify {
            Verify::Never => false,
            Verify::Pinned => content_matters,
            Verify::Always => true,
        }
    }

    /// Whether an image is used while it is copied: only where nobody has to know its content before.
    fn reads_through(&self, source: &SourceImage, content_matters: bool) -> bool {
        let is_early = self.policy == Policy::Broadcast && self.broadcast == Broadcast::Early;
        (self.policy == Policy::Auto || is_early)
            && !self.copy_required
            && !content_matters
            && self.verify != Verify::Always
            && self.read_through.is_some_and(|size| source.identity.size >= size)
    }

    /// Where every user has a directory on this node.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Uses everything where it is.
    pub fn never() -> StagingOptions {
        StagingOptions { policy: Policy::Never, ..StagingOptions::default() }
    }
}

/// An image, ready to be used.
pub struct StagedImage {
    /// The source as it was recognised, with the file that is to be used.
    pub opened: OpenedImage,
    /// What the source was when it was opened, whatever file is used; of a directory, nothing.
    pub identity: Option<FileIdentity>,
    /// Its digest, if somebody had a reason to compute it.
    pub digest: Option<Digest>,
    /// Where that file comes from.
    pub provenance: Provenance,
    /// What its bytes are read from, if that is not the file alone.
    pub source: Option<Box<dyn ByteSource>>,
}

/// Where the file of an image comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provenance {
    /// Where it was found.
    Source,
    /// A copy that was there.
    Cache,
    /// A copy that has just been made.
    Copied,
    /// A site copy.
    Site,
    /// Where it was found, as far as a copy that is being made does not have it.
    ReadThrough,
}

/// Why there is no copy.
enum StageError {
    /// The source cannot be read, or changes: perhaps not the next time.
    Source(Failure),
    /// The cache cannot be used; the source can.
    Cache(String),
    /// It is not what was asked for.
    Refused(Failure),
}

/// What to do about an image of which only a copy may be used.
const UNCOPIED: &str = "others can change this image while it runs, so with a digest only a copy of it is used; copy it to a directory of your own";

/// A source that changes, or a file server that forgets, gets so many chances.
const ATTEMPTS: u32 = 3;

/// Finds, copies and checks an image as is wanted. It is as is required, or this fails.
pub fn stage(
    path: &Path,
    requirements: &Requirements,
    staging: &StagingOptions,
) -> Result<StagedImage, Failure> {
    let open = if staging.fills_site { site::open } else { open_as_user };
    let ready = with_retries(|| open(path), |opened| try_stage(opened, requirements, staging));
    // The copier takes what is on its way.
    if !ready.as_ref().is_ok_and(|ready| ready.provenance == Provenance::ReadThrough) {
        staging.discard(path);
    }
    ready.map_err(|trouble| match trouble {
        StageError::Cache(why) => Failure::new(why),
        StageError::Refused(failure) => failure.about(shown(path)),
        StageError::Source(failure) => failure,
    })
}

fn open_as_user(path: &Path) -> Result<OpenedImage, StageError> {
    image::identify(path).map_err(StageError::Source)
}

/// Opens an image and does something with it, a few times if the source makes trouble.
fn with_retries<T>(
    open: impl Fn() -> Result<OpenedImage, StageError>,
    work: impl Fn(OpenedImage) -> Result<T, StageError>,
) -> Result<T, StageError> {
    // The user's limit on the size of files is a reason to make no copy, not to die of it.
    let _unharmed = sys::IgnoreSignal::new(Signal::SIGXFSZ);
    let _mask = sys::FileMask::set(cache::MASK);
    let mut attempt = 0;
    loop {
        attempt += 1;
        match work(open()?) {
            Err(StageError::Source(_)) if attempt < ATTEMPTS => {
                std::thread::sleep(Duration::from_millis(200) * attempt);
            }
            done => return done,
        }
    }
}

fn try_stage(
    opened: OpenedImage,
    requirements: &Requirements,
    staging: &StagingOptions,
) -> Result<StagedImage, StageError> {
    let place = shown(&opened.path);
    requirements.check_source(&opened)?;
    // What others can write to after its digest was compared is not what was asked for: of that a copy is used, or nothing.
    let own_copy = opened.kind != ImageKind::Directory
        && staging.policy != Policy::Never
        && requirements.content_matters()
        && others_can_write(&opened);
    let policy = if staging.policy == Policy::Auto { Policy::Always } else { staging.policy };
    let with_copy = StagingOptions { policy, copy_required: true, ..staging.clone() };
    let staging = if own_copy { &with_copy } else { staging };
    if opened.kind == ImageKind::Directory {
        let provenance = Provenance::Source;
        return Ok(StagedImage { opened, identity: None, digest: None, provenance, source: None });
    }
    let identity = FileIdentity::of(&opened.file).ok();
    let staged = match wanted(&opened, staging.verifies(requirements.content_matters()), staging) {
        Ok(Wanted::Copy(cache, source)) => {
            // One that was not copied completely itself would be copied as a whole, and stay.
            check_superblock(&opened).map_err(StageError::Source)?;
            let mut sink = StderrSink::new(&opened.path);
            let through = staging.reads_through(&source, requirements.content_matters())
                && existing(&cache, &source, &mut sink).is_none();
            if through {
                match ReadThrough::start(&cache, &source, &staging.limits, staging.awaited(source.path)) {
                    Ok(through) => return Ok(StagedImage { identity, ..read_through(opened, through) }),
                    Err(why) => {
                        note(&format!("{place} is used where it is: {why}"), None);
                        return Ok(StagedImage { identity, ..in_place(opened, requirements)? });
                    }
                }
            }
            Some(obtain(&cache, &source, staging, &mut StderrSink::new(&opened.path)))
        }
        Ok(Wanted::SiteCopy(file, digest)) => Some(Ok((file, digest, Provenance::Site))),
        Ok(Wanted::Nothing) => None,
        Err(StageError::Refused(failure)) if !staging.copy_required => {
            note(&format!("{place} is used where it is: {failure}"), failure.hint.as_deref());
            None
        }
        Err(StageError::Refused(failure)) if own_copy => {
            return Err(StageError::Refused(failure.hint(UNCOPIED)));
        }
        Err(trouble) => return Err(trouble),
    };
    if let Some(Ok((.., Provenance::Copied))) = staged
        && !(if staging.fills_site { site::is_still_there(&opened) } else { is_still_there(&opened) })
    {
        return Err(StageError::Source(changing(&opened.path)));
    }
    let ready = match staged {
        Some(Ok((file, digest, provenance))) => {
            let opened = OpenedImage { file, ..opened };
            StagedImage { opened, identity: None, digest: Some(digest), provenance, source: None }
        }
        Some(Err(StageError::Cache(why))) if staging.copy_required => {
            let failure = Failure::new(format!("no copy: {why}"));
            return Err(StageError::Refused(if own_copy { failure.hint(UNCOPIED) } else { failure }));
        }
        Some(Err(StageError::Cache(why))) => {
            note(&format!("{place} is used where it is: {why}"), None);
            in_place(opened, requirements)?
        }
        Some(Err(trouble)) => return Err(trouble),
        None => in_place(opened, requirements)?,
    };
    if let Some(found) = ready.digest {
        requirements.check_content(found)?;
    }
    Ok(StagedImage { identity, ..ready })
}

/// Whether an image can be changed by somebody beside this user and root: by what its file system says of it, unless somebody
/// else serves that.
fn others_can_write(opened: &OpenedImage) -> bool {
    if FsServer::of(&opened.file).is_foreign() {
        return true;
    }
    let safe = |found: Metadata| [0, geteuid().as_raw()].contains(&found.uid()) && found.mode() & 0o022 == 0;
    !opened.file.metadata().is_ok_and(safe)
}

/// Whether a file still has the name by which it was opened.
fn is_still_there(opened: &OpenedImage) -> bool {
    matches!((FileIdentity::of(&opened.file), FileIdentity::at(&opened.path)), (Ok(one), Ok(other)) if one == other)
}

/// What there is to do for an image.
enum Wanted<'a> {
    /// To use it where it is.
    Nothing,
    /// To use the copy that the site has.
    SiteCopy(File, Digest),
    /// To find a copy here, or make it.
    Copy(Cache, SourceImage<'a>),
}

/// Whether a copy of this image is wanted, and from where. `StageError::Refused`: there can be none.
fn wanted<'a>(
    opened: &'a OpenedImage,
    verify: bool,
    staging: &StagingOptions,
) -> Result<Wanted<'a>, StageError> {
    if staging.fills_site {
        let cache = Cache::open_site(&staging.site).map_err(StageError::Refused)?;
        return Ok(Wanted::Copy(cache, site::source_image(opened, verify)?));
    }
    match staging.policy {
        Policy::Never => return Ok(Wanted::Nothing),
        Policy::Auto if !fs_type::is_network(&opened.file, &staging.network) => {
            debug!(path = ?opened.path, "not on a network file system: used where it is");
            return Ok(Wanted::Nothing);
        }
        Policy::Auto | Policy::Always | Policy::Broadcast => {}
    }
    let source = SourceImage::new(opened, verify)?;
    // What srun sends is there already, and goes into the user's own folder.
    let has_site = staging.policy != Policy::Broadcast && !staging.site.as_os_str().is_empty();
    let mut sink = StderrSink::new(&opened.path);
    let found = has_site.then(|| site::find(&staging.site, &source, &mut sink)).flatten();
    if let Some((file, digest)) = found {
        return Ok(Wanted::SiteCopy(file, digest));
    }
    let cache = Cache::open(&staging.directory).map_err(StageError::Refused)?;
    // Diskless nodes: a copy would go over the same network, or take the job's memory.
    let useless = fs_type::is_network(&cache.dir, &staging.network) || fs_type::is_memory(&cache.dir);
    let made = staging.policy != Policy::Auto || !useless;
    debug!(directory = ?cache.path, made, "copies are made here, or the disk is none");
    Ok(if made { Wanted::Copy(cache, source) } else { Wanted::Nothing })
}

/// The image, with a copy in the making. Nothing is known of its content yet.
fn read_through(opened: OpenedImage, through: ReadThrough) -> StagedImage {
    StagedImage {
        opened,
        identity: None,
        digest: None,
        provenance: Provenance::ReadThrough,
        source: Some(Box::new(through)),
    }
}

/// The image where it is; read as a whole only if its content matters.
fn in_place(opened: OpenedImage, requirements: &Requirements) -> Result<StagedImage, StageError> {
    let mode = opened.file.metadata().map_or(0, |found| found.mode());
    if mode & 0o002 != 0 {
        let warning = "everybody can write to it, also while it is used (chmod o-w)";
        StderrSink::new(&opened.path).note(&format!("{}: {warning}", shown(&opened.path)));
    }
    // Before the digest: what is read later is to be the image that it was computed of.
    let source = match opened.offset() {
        None => None,
        Some(offset) => {
            let source = opened.file.try_clone().and_then(|file| InPlace::new(file, offset));
            let source = source.map_err(|error| StageError::Source(unreadable(&opened.path, &error)))?;
            Some(Box::new(source) as _)
        }
    };
    let digest = requirements.content_matters().then(|| digest(&opened));
    let digest = digest.transpose().map_err(StageError::Source)?;
    Ok(StagedImage { opened, identity: None, digest, provenance: Provenance::Source, source })
}

/// Computes the digest of an image. What cannot be one is not read as a whole first.
pub fn digest(opened: &OpenedImage) -> Result<Digest, Failure> {
    check_content(opened)?;
    let mut progress = progress(&opened.path, "computing the digest", opened.size);
    let computed = copy(&opened.file, None, opened.size, &mut |bytes| progress.advance(bytes));
    computed.map_err(|error| match error {
        CopyError::Source(error) | CopyError::Target(error) => unreadable(&opened.path, &error),
        CopyError::Shorter => changing(&opened.path),
    })
}

fn unreadable(path: &Path, error: &io::Error) -> Failure {
    Failure::new(format!("{}: cannot read: {}", shown(path), cause(error)))
}

fn changing(path: &Path) -> Failure {
    Failure::new(format!("{}: it changes while it is read", shown(path)))
        .hint("start the job when the image is complete; put a new one in its place with mv")
}
