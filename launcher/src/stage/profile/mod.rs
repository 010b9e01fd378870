//! What the start of a program reads of its image, kept on the node for the next start. Runs as the user on the host.
//!
//!     first start   the file server notes what it is asked for; now and then its watcher writes that down (the profile), and, when it
//!                   has calmed down, unpacks those files beside the copies of images, at low priority
//!     later starts  the unpacked files are a layer over the image: the kernel reads them as those of a directory, from one page
//!                   cache for all containers of the user, and nothing is inflated. Where there is no such layer (yet), the
//!                   server inflates ahead what the profile says.
//!
//!     mizzen-UID/
//!       profile-KEY            what a start reads; KEY is computed from the identity of the image and the program's name
//!       profile-KEY.skip       what an unpacker found not worth it, or had no room for
//!       unpacked-KEY-N/        the files, and `manifest`, which says that they are complete; the N-th has what those before lack
//!       unpacking-KEY/         the next of them, as far as it is made
//!
//! A profile is a hint: whatever is in it, the programs see the image's files. A layer is more, so nothing of it is used unless it
//! is as it was made: see `layer`.

mod choose;
mod layer;
mod overlay;
mod reads;
mod skip;
mod unpack;

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mizzen_core::Digest;
use mizzen_core::staging::{Amount, Policy};
use mizzen_squashfs::Image;
use rustix::fs::{AtFlags, Mode, OFlags, openat, renameat, statat, unlinkat};
use sha2::{Digest as _, Sha256};
use tracing::debug;

use super::cache::{self, Cache, TEMPORARY};
use super::fetch::{Comparison, compare};
use super::obtain::is_settled;
use super::source::FileIdentity;
use super::{Provenance, StagingOptions, evict, own_directory};
use crate::sys;
use crate::trace::OrDebug;
pub use layer::{Layer, list, remove, remove_all};
use reads::Lengths;
pub use reads::{ReadsWriter, parse_reads};

/// Begins the name of a profile.
pub const PROFILE: &str = "profile-";

/// A start that reads less is not worth being written down: the program itself and its C library are inflated ahead in any case.
pub const WORTHWHILE: u64 = 4 << 20;

/// No more than this is written down of a program's starts.
pub const PROFILE_LIMIT: usize = 4 << 20;

/// Profiles of this user, with their locks and what is skipped of them.
const MAX_PROFILES: usize = 192;

/// Removes everything that is not in use; tells how many bytes the unpacked files had.
pub fn forget_all(cache: &Cache) -> u64 {
    for name in cache.names(PROFILE).unwrap_or_default() {
        evict::remove_unused(cache, &name);
    }
    remove_all(cache, || false)
}

/// What is known of a program's starts, and where more is to be written down.
pub struct StartProfile {
    /// Where every user has a directory,
    directory: PathBuf,
    /// and this user's, if it was there before the start. To open it can take for ever if another user wants that.
    cache: Option<Cache>,
    /// How much the unpacked files of this user may take.
    max_size: Option<Amount>,
    /// How much of the file system is left free.
    keep_free: Option<Amount>,
    key: String,
    /// What starts have read, as it was written down.
    text: Arc<Vec<u8>>,
    layers: Vec<Layer>,
    unpacking: Unpacking,
}

/// Whether files can be unpacked.
enum Unpacking {
    /// From a copy, which nobody changes.
    FromCopy,
    /// From the image where it is, as long as it is this one.
    InPlace(FileIdentity),
    /// Not now.
    Never,
}

/// An image whose starts are known.
pub struct StartedImage<'a> {
    /// What it was when it was opened, before anything of it was read: the same whether it is copied or not.
    pub identity: &'a FileIdentity,
    /// Where its bytes come from.
    pub provenance: Provenance,
    /// Whether the content is verified.
    pub is_verified: bool,
}

impl StartProfile {
    /// What is known of this image and program. None where nothing is to be known: where the site or the user wants no copies, or
    /// wants to have the content verified.
    pub fn find(
        image: &StartedImage,
        command: &[OsString],
        staging: &StagingOptions,
    ) -> Option<StartProfile> {
        let is_off = staging.unpacked_max_size == Some(Amount::Bytes(0));
        if is_off || image.is_verified || staging.policy == Policy::Never || staging.fills_site {
            return None;
        }
        let found = own_directory::find(&staging.directory).ok()?;
        let program = command.first().map(|program| Path::new(program).file_name().unwrap_or_default());
        let mut profile = StartProfile {
            directory: staging.directory.clone(),
            cache: found.map(|(dir, path)| Cache { dir, path, shared: false }),
            max_size: staging.unpacked_max_size,
            keep_free: staging.limits.keep_free,
            key: key(image.identity, program.unwrap_or_default()),
            text: Arc::default(),
            layers: Vec::new(),
            unpacking: match image.provenance {
                Provenance::Cache | Provenance::Copied | Provenance::Site => Unpacking::FromCopy,
                // What is written a moment after it was opened would keep its times, and be another file under the same key.
                Provenance::Source if is_settled(image.identity) => {
                    Unpacking::InPlace(image.identity.clone())
                }
                // The unpacker has no part in a copy that is being made.
                Provenance::Source | Provenance::ReadThrough => Unpacking::Never,
            },
        };
        if let Some(cache) = &profile.cache {
            profile.text = Arc::new(profile.read(cache));
            if !profile.text.is_empty() {
                profile.layers = Layer::find(cache, &profile.key);
            }
        }
        debug!(key = profile.key, layers = profile.layers.len(), "what is known of this start");
        Some(profile)
    }

    /// What starts have read, if the server is to inflate it ahead.
    pub fn reads_ahead(&self) -> Option<Arc<Vec<u8>>> {
        (self.layers.is_empty() && !self.text.is_empty()).then(|| Arc::clone(&self.text))
    }

    /// The unpacked files, the last layer first.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// How many files they have.
    pub fn unpacked_files(&self) -> usize {
        self.layers.iter().map(|layer| layer.files.len()).sum()
    }

    /// What keeps the layers from being removed, as long as it is open.
    pub fn locks(&self) -> impl Iterator<Item = &OwnedFd> {
        self.layers.iter().map(|layer| &layer.lock)
    }

    /// What the watcher must have open to write it down.
    pub fn descriptors(&self) -> Option<BorrowedFd<'_>> {
        self.cache.as_ref().map(|cache| cache.dir.as_fd())
    }

    /// Unpacks what earlier starts have read, if there is more of it than the layers have.
    pub fn go_on(&self, image: &Image) {
        self.spawn_unpacker(image, &self.text);
    }

    /// Whether something that starts read could be unpacked right now. Most of what cannot be is found by an unpacker, and written
    /// down: it is not started again for the same.
    fn is_to_be_unpacked(&self, cache: &Cache, text: &[u8]) -> bool {
        if self.layers.len() >= layer::MAX_LAYERS {
            return false;
        }
        let lacking = lacking(text, &self.layers);
        if !lacking.are_worthwhile() {
            return false;
        }
        let skipped = skip::read(cache, &self.skip_name(), self.circumstances(&self.layers));
        let skipped = parse_reads(&skipped).map(Lengths::of).unwrap_or_default();
        lacking.beside(&skipped).are_worthwhile()
    }

    fn skip_name(&self) -> String {
        format!("{PROFILE}{}.skip", self.key)
    }

    fn circumstances(&self, layers: &[Layer]) -> Digest {
        skip::circumstances(layers, &format!("{:?} {:?}", self.max_size, self.keep_free))
    }

    /// Has no other start try the same, for a while or for good.
    fn skip(&self, cache: &Cache, text: &[u8], layers: &[Layer], why: skip::Why) {
        debug!(?why, "nothing is unpacked");
        let text = skip::text(self.circumstances(layers), &lacking(text, layers), why);
        self.replace(cache, &self.skip_name(), &text).or_debug("the next start tries it again");
    }

    /// Removes the profiles that were not written for the longest time.
    fn forget_old(cache: &Cache) {
        let age = |name: &String| {
            statat(&cache.dir, &**name, AtFlags::SYMLINK_NOFOLLOW).map_or(0, |stat| stat.st_mtime)
        };
        let mut names = cache.names(PROFILE).unwrap_or_default();
        names.sort_by_key(|name| std::cmp::Reverse(age(name)));
        for name in names.iter().skip(MAX_PROFILES) {
            evict::remove_unused(cache, name);
        }
    }

    /// Writes down what the server has said in a file, in addition to what the layers have, and unpacks it if the start has calmed
    /// down. The server may be about to say more.
    pub fn note(&self, image: &Image, file: &File, is_quiet: bool) {
        match &self.cache {
            Some(cache) => {
                let text = self.write_from(cache, file);
                if let Some(text) = text.filter(|_| is_quiet) {
                    self.spawn_unpacker(image, &text);
                }
            }
            // The directory is made by a process for which nobody waits.
            None => self.spawn(image, &[file.as_fd()], |cache, end| {
                self.write_from(cache, file);
                if is_quiet && self.can_unpack(image) {
                    unpack::unpack(self, cache, image, end)
                } else {
                    Ok(())
                }
            }),
        }
    }

    /// Gives what is known now.
    fn write_from(&self, cache: &Cache, file: &File) -> Option<Vec<u8>> {
        let mut reads = vec![0; PROFILE_LIMIT];
        let mut length = 0;
        while let Ok(more @ 1..) = file.read_at(reads.get_mut(length..).unwrap_or_default(), length as u64) {
            length += more;
        }
        reads.truncate(length);
        let old = if self.layers.is_empty() { &[][..] } else { &self.text };
        let text = reads::join(old, &reads, PROFILE_LIMIT)?;
        let _mask = sys::FileMask::set(cache::MASK);
        let name = format!("{PROFILE}{}", self.key);
        self.replace(cache, &name, &text).or_debug("the profile of the start is not kept");
        StartProfile::forget_old(cache);
        Some(text)
    }

    fn replace(&self, cache: &Cache, name: &str, text: &[u8]) -> std::io::Result<()> {
        let temporary = format!("{TEMPORARY}{}-profile", std::process::id());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = openat(&cache.dir, &*temporary, flags, Mode::RUSR | Mode::WUSR)?;
        let written = File::from(file).write_all(text);
        let done = written.and_then(|()| Ok(renameat(&cache.dir, &*temporary, &cache.dir, name)?));
        if done.is_err() {
            let _ = unlinkat(&cache.dir, &*temporary, AtFlags::empty());
        }
        done
    }

    /// Unpacks in a process of its own what starts have read (`text`) and no layer has. It ends with this one.
    fn spawn_unpacker(&self, image: &Image, text: &[u8]) {
        let is_to_be_unpacked = |cache| self.is_to_be_unpacked(cache, text);
        if self.can_unpack(image) && self.cache.as_ref().is_some_and(is_to_be_unpacked) {
            self.spawn(image, &[], |cache, end| unpack::unpack(self, cache, image, end));
        }
    }

    /// A source that asks others for its bytes does that by descriptors that watchers and unpackers do not have.
    fn can_unpack(&self, image: &Image) -> bool {
        !matches!(self.unpacking, Unpacking::Never) && image.source().missed().is_none()
    }

    /// Does something in a process of its own, which is told by the end of a pipe that this one has ended.
    fn spawn(
        &self,
        image: &Image,
        keep: &[BorrowedFd],
        work: impl FnOnce(&Cache, &OwnedFd) -> std::io::Result<()>,
    ) {
        let Ok((end, alive)) =
            nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC | nix::fcntl::OFlag::O_NONBLOCK)
        else {
            return;
        };
        let mut keep = keep.to_vec();
        keep.extend([end.as_fd(), image.source().original()]);
        keep.extend(self.descriptors());
        sys::spawn_detached(&keep, || {
            let _ = nix::sys::prctl::set_name(c"mizzen-unpack");
            sys::lower_priority();
            let _mask = sys::FileMask::set(cache::MASK);
            let opened = match &self.cache {
                Some(_) => None,
                None => own_directory::open(&self.directory).ok(),
            };
            let opened = opened.map(|(dir, path)| Cache { dir, path, shared: false });
            if let Some(cache) = self.cache.as_ref().or(opened.as_ref()) {
                work(cache, &end).or_debug("the files of the start are not unpacked");
            }
        })
        .or_debug("nothing can be unpacked");
        // Open as long as this process lives.
        std::mem::forget(alive);
    }

    /// Whether an image that is unpacked is still the one that was opened.
    fn is_unchanged(&self, image: &Image) -> bool {
        match &self.unpacking {
            Unpacking::FromCopy => true,
            Unpacking::InPlace(identity) => image
                .source()
                .original()
                .try_clone_to_owned()
                .is_ok_and(|original| compare(&original.into(), identity) == Comparison::Same),
            Unpacking::Never => false,
        }
    }

    fn read(&self, cache: &Cache) -> Vec<u8> {
        let mut text = Vec::new();
        if let Ok(file) = cache.open_file(&format!("{PROFILE}{}", self.key)) {
            let _ = file.take(PROFILE_LIMIT as u64).read_to_end(&mut text);
        }
        text
    }
}

/// Whether it is what is written down of a layer, or said of one; for fuzzers.
pub fn is_of_layer(text: &[u8]) -> bool {
    let plan = choose::Plan::parse(text);
    assert!(plan.as_ref().is_none_or(|plan| choose::Plan::parse(&plan.text()).as_ref() == Some(plan)));
    layer::Manifest::parse(text).is_some() || layer::Journal::parse(text).is_some() || plan.is_some()
}

/// What starts have read and no layer has.
fn lacking<'a>(text: &'a [u8], layers: &[Layer]) -> Lengths<'a> {
    let is_unpacked = |path: &[u8]| layers.iter().any(|layer| layer.files.contains(path));
    Lengths::of(parse_reads(text).into_iter().flatten().filter(|read| !is_unpacked(read.path)))
}

/// Names the profile of an image and a program.
fn key(identity: &FileIdentity, program: &OsStr) -> String {
    let name = [identity.key().as_bytes(), b"\0", program.as_bytes()].concat();
    Digest::new(Sha256::digest(name).into()).hex()[..32].to_owned()
}
