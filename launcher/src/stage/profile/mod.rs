//! What the start of a program reads of its image, kept on the node for the next start. Runs as the user on the host.
//!
//!     first start   the file server notes what it is asked for; when that has calmed down, its watcher writes it down (the
//!                   profile) and unpacks those files beside the copies of images, at low priority
//!     later starts  the unpacked files are a layer over the image: the kernel reads them as those of a directory, from one page
//!                   cache for all containers of the user, and nothing is inflated. Where there is no such layer (yet), the
//!                   server inflates ahead what the profile says.
//!
//!     mizzen-UID/
//!       profile-KEY            what a start reads; KEY is computed from the identity of the image and the program's name
//!       unpacked-KEY-N/        the files, and `manifest`, which says that they are complete; the N-th has what those before lack
//!
//! A profile is a hint: whatever is in it, the programs see the image's files. A layer is more, so nothing of it is used unless it
//! is as it was made: see `layer`.

mod layer;
mod reads;
mod unpack;

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use mizzen_core::Digest;
use mizzen_core::staging::{Amount, Policy};
use mizzen_squashfs::Image;
use rustix::fs::{AtFlags, Mode, OFlags, openat, renameat, statat, unlinkat};
use sha2::{Digest as _, Sha256};
use tracing::debug;

use super::cache::{self, Cache, TEMPORARY};
use super::source::FileIdentity;
use super::{StagingOptions, evict, own_directory};
use crate::image::OpenedImage;
use crate::sys;
use crate::trace::OrDebug;
pub use layer::{Layer, list, remove, remove_all};
pub use reads::{Reads, parse_reads};

/// Begins the name of a profile.
pub const PROFILE: &str = "profile-";

/// A start that reads less is not worth being written down: the program itself and its C library are inflated ahead in any case.
pub const WORTHWHILE: u64 = 4 << 20;

/// No more than this is written down of a program's starts.
const PROFILE_LIMIT: usize = 4 << 20;

/// Profiles of this user, and their locks.
const MAX_PROFILES: usize = 128;

/// Removes everything that is not in use; tells how many bytes the unpacked files had.
pub fn forget_all(cache: &Cache) -> u64 {
    for name in cache.names(PROFILE).unwrap_or_default() {
        evict::remove_unused(cache, &name);
    }
    remove_all(cache, || false)
}

/// What is known of a program's starts, and where more is to be written down.
pub struct StartProfile {
    /// Where every user has a directory.
    directory: PathBuf,
    /// How much the unpacked files of this user may take.
    max_size: Option<Amount>,
    /// How much of the file system is left free.
    keep_free: Option<Amount>,
    key: String,
    /// What starts have read, as it was written down.
    text: Vec<u8>,
    layers: Vec<Layer>,
}

impl StartProfile {
    /// What is known of this image and program. None where nothing is to be known: where the site or the user wants no copies, or
    /// wants to have the content verified.
    pub fn find(
        opened: &OpenedImage,
        digest: Option<Digest>,
        is_verified: bool,
        command: &[OsString],
        staging: &StagingOptions,
    ) -> Option<StartProfile> {
        let is_off = staging.unpacked_max_size == Some(Amount::Bytes(0));
        if is_off || is_verified || staging.policy == Policy::Never || staging.fills_site {
            return None;
        }
        let program = command.first().map(|program| Path::new(program).file_name().unwrap_or_default());
        let mut profile = StartProfile {
            directory: staging.directory.clone(),
            max_size: staging.unpacked_max_size,
            keep_free: staging.limits.keep_free,
            key: key(opened, digest, program.unwrap_or_default())?,
            text: Vec::new(),
            layers: Vec::new(),
        };
        if let Some(cache) = profile.existing_cache() {
            profile.text = profile.read(&cache);
            if !profile.text.is_empty() {
                profile.layers = Layer::find(&cache, &profile.key);
            }
            debug!(key = profile.key, layers = profile.layers.len(), "what is known of this start");
        }
        Some(profile)
    }

    /// What starts have read, if the server is to inflate it ahead.
    pub fn reads_ahead(&self) -> Option<&[u8]> {
        (self.layers.is_empty() && !self.text.is_empty()).then_some(&*self.text)
    }

    /// The unpacked files, the last layer first.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// What keeps the layers from being removed, as long as it is open.
    pub fn locks(&self) -> impl Iterator<Item = &OwnedFd> {
        self.layers.iter().map(|layer| &layer.lock)
    }

    /// Whether something that a start reads could be unpacked right now.
    pub fn is_to_be_unpacked(&self) -> bool {
        self.reads_ahead().is_some()
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

    /// The same, of what the server has written into a file.
    pub fn write_from(&self, file: &File) {
        let mut reads = Vec::new();
        let mut from_start = file;
        if from_start.rewind().is_ok()
            && from_start.take(PROFILE_LIMIT as u64).read_to_end(&mut reads).is_ok()
        {
            self.write(&reads);
        }
    }

    /// Writes down what a start has read, in addition to what the layers have.
    fn write(&self, reads: &[u8]) {
        if parse_reads(reads).is_none() {
            return;
        }
        let _mask = sys::FileMask::set(cache::MASK);
        let Ok((dir, path)) = own_directory::open(&self.directory) else { return };
        let cache = Cache { dir, path, shared: false };
        let old = if self.layers.is_empty() { &[][..] } else { &self.text };
        let text = Reads::join(old, reads).unwrap_or_else(|| reads.to_vec());
        if text.len() <= PROFILE_LIMIT {
            self.replace(&cache, &text).or_debug("the profile of the start is not kept");
            StartProfile::forget_old(&cache);
        }
    }

    fn replace(&self, cache: &Cache, text: &[u8]) -> std::io::Result<()> {
        let temporary = format!("{TEMPORARY}{}-profile", std::process::id());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = openat(&cache.dir, &*temporary, flags, Mode::RUSR | Mode::WUSR)?;
        let written = File::from(file).write_all(text);
        let done = written.and_then(|()| {
            Ok(renameat(&cache.dir, &*temporary, &cache.dir, format!("{PROFILE}{}", self.key))?)
        });
        if done.is_err() {
            let _ = unlinkat(&cache.dir, &*temporary, AtFlags::empty());
        }
        done
    }

    /// Unpacks in a process of its own what starts have read and no layer has. It ends with this one. `keep` is what the image is
    /// read from.
    pub fn spawn_unpacker(&self, image: &Image) {
        let Ok((end, alive)) =
            nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC | nix::fcntl::OFlag::O_NONBLOCK)
        else {
            return;
        };
        let keep = [std::os::fd::AsFd::as_fd(&end), image.source().original()];
        sys::spawn_detached(&keep, || {
            let _ = nix::sys::prctl::set_name(c"mizzen-unpack");
            sys::lower_priority();
            let _mask = sys::FileMask::set(cache::MASK);
            unpack::unpack(self, image, &end).or_debug("the files of the start are not unpacked");
        })
        .or_debug("nothing can be unpacked");
        // Open as long as this process lives.
        std::mem::forget(alive);
    }

    fn existing_cache(&self) -> Option<Cache> {
        let (dir, path) = own_directory::find(&self.directory).ok()??;
        Some(Cache { dir, path, shared: false })
    }

    fn read(&self, cache: &Cache) -> Vec<u8> {
        let mut text = Vec::new();
        if let Ok(file) = cache.open_file(&format!("{PROFILE}{}", self.key)) {
            let _ = file.take(PROFILE_LIMIT as u64).read_to_end(&mut text);
        }
        text
    }
}

/// Whether it is the manifest of a layer; for fuzzers.
pub fn is_manifest(text: &[u8]) -> bool {
    layer::parse_manifest(text).is_some()
}

/// Names the profile of an image and a program. What has been copied is named by its content, as its times change with each use.
fn key(opened: &OpenedImage, digest: Option<Digest>, program: &OsStr) -> Option<String> {
    let image = match digest {
        Some(digest) => digest.to_string(),
        None => FileIdentity::of(&opened.file).ok()?.key(),
    };
    let name = [image.as_bytes(), b"\0", program.as_bytes()].concat();
    Some(Digest::new(Sha256::digest(name).into()).hex()[..32].to_owned())
}
