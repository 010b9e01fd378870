//! The image store: a user's directory of image files that came from registries, named by reference and digest.
//!
//!     images/                                                0700, or any mode in which nobody else can write
//!       docker.io+library+ubuntu~24.04_linux-amd64_v1_….sqsh   appears when it is complete and on disk
//!       docker.io+library+ubuntu~24.04_linux-amd64_v1_….sqsh.json   what is known of it; touched when it is used
//!       .mizzen-lease-…                                      who imports that image now
//!       .mizzen-tmp-…                                        left by a crash; removed by a later import
//!
//! An image that is there under another reference gets a second name, not a second file.
//!
//! Run by: the user, in the importer.

mod candidate;
pub mod key;
pub mod lease;
mod owner;
pub mod select;
pub mod sidecar;

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use mizzen::progress::Progress;
use mizzen_core::Failure;
use mizzen_core::fs_server::{reach_name, refuse_foreign};
use mizzen_core::trusted_file::check_only_users;
use rustix::fs::{AtFlags, CWD, OFlags, Timespec, Timestamps, UTIME_NOW, utimensat};
use rustix::process::geteuid;

use crate::output::{self, file_system_time, is_own_file, write_failure};
use crate::shown;
use candidate::{Acquired, Candidate};
use key::{ImageKey, NamedImage, SIDECAR};
use lease::Timing;
use sidecar::{Provenance, Sidecar};

/// Begins the names of leases.
const LEASE: &str = ".mizzen-lease-";
/// What nobody has touched for so long belongs to nobody.
const ABANDONED: Duration = Duration::from_secs(24 * 3600);
/// What a failure is about.
const STORE: &str = "the image store";
/// A shorter file is no image.
const SMALLEST_IMAGE: u64 = 96;

/// A user's image store.
#[derive(Clone, Debug)]
pub struct Store {
    directory: PathBuf,
}

/// An image in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredImage {
    /// Its file.
    pub path: PathBuf,
    /// Bytes of the file.
    pub size: u64,
    /// What is known of it.
    pub sidecar: Option<Sidecar>,
}

/// How an image is obtained.
#[derive(Clone, Debug)]
pub struct ObtainOptions {
    /// Whether it is imported although it is there.
    pub again: bool,
    /// How long to wait for somebody else who imports the same image.
    pub patience: Duration,
    /// For whom the import is: a job, for example. Who comes after an import of the same group has failed fails as well, and does
    /// not try again.
    pub group: Option<String>,
    /// Whether to tell the user.
    pub speaks: bool,
    /// How leases are watched.
    pub timing: Timing,
}

impl Default for ObtainOptions {
    fn default() -> ObtainOptions {
        ObtainOptions {
            again: false,
            patience: Duration::from_secs(2 * 3600),
            group: None,
            speaks: true,
            timing: Timing::default(),
        }
    }
}

impl Store {
    /// Opens the store in this directory, and makes it.
    pub fn open(directory: &Path) -> Result<Store, Failure> {
        refuse_anothers(directory)?;
        let failed = |error| write_failure(directory, "cannot make the image store", error);
        if let Some(parent) = directory.parent() {
            DirBuilder::new().recursive(true).mode(0o755).create(parent).map_err(failed)?;
        }
        match DirBuilder::new().mode(0o700).create(directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
            _ => {}
        }
        let store = Store { directory: directory.to_owned() };
        store.check()?;
        Ok(store)
    }

    /// The store in this directory, if there is one.
    pub fn open_existing(directory: &Path) -> Result<Option<Store>, Failure> {
        refuse_anothers(directory)?;
        match fs::exists(directory) {
            Ok(false) => return Ok(None),
            Ok(true) => {}
            Err(error) => {
                return Err(Failure::caused_by(format!("{}: cannot open it", shown(directory)), error));
            }
        }
        let store = Store { directory: directory.to_owned() };
        store.check().map(|()| Some(store))
    }

    /// Whoever can write here, or put another directory in its place, decides what the user's jobs run.
    fn check(&self) -> Result<(), Failure> {
        let directory = &self.directory;
        let bad = |what: String| Failure::new(format!("{}: the image store {what}", shown(directory)));
        let found = fs::metadata(directory).map_err(|error| {
            Failure::caused_by(format!("{}: cannot open the image store", shown(directory)), error)
        })?;
        if !found.is_dir() {
            return Err(bad("is not a directory".to_owned()));
        }
        if found.uid() != geteuid().as_raw() {
            return Err(bad(format!("belongs to uid {}, not to you", found.uid()))
                .hint("image_store in mizzen.toml, or XDG_DATA_HOME, names the directory"));
        }
        if found.mode() & 0o022 != 0 {
            let mode = found.mode() & 0o7777;
            return Err(bad(format!("can be written by others (mode {mode:04o})"))
                .hint(format!("chmod go-w {}", shown(directory))));
        }
        check_only_users(directory, geteuid().as_raw()).map_err(|failure| failure.about(STORE))
    }

    /// Where it is.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Where the file of this image is, or will be.
    pub fn path_of(&self, key: &ImageKey) -> PathBuf {
        self.directory.join(key.file_name())
    }

    /// The image, if it is there; it counts as used now. One that is there under another reference gets this one, too.
    pub fn find(&self, key: &ImageKey) -> Option<StoredImage> {
        let path = self.path_of(key);
        if let Some(image) = open_image(&path) {
            mark_as_used(&path);
            return Some(image);
        }
        let names = fs::read_dir(&self.directory).ok()?.flatten().map(|entry| entry.file_name());
        let same = |name: &std::ffi::OsString| name.to_str().is_some_and(|name| key.is_same_image(name));
        let other =
            names.filter(same).map(|name| self.directory.join(name)).find_map(|path| open_image(&path))?;
        mark_as_used(&other.path);
        // Not all file systems have links. Then it is used under the other name.
        let sidecar = other.sidecar.as_ref().map(|sidecar| sidecar.under(&key.reference));
        let named = sidecar.map(|sidecar| sidecar.write(&path)).is_none_or(|written| written.is_ok());
        if named && fs::hard_link(&other.path, &path).is_ok() {
            return open_image(&path).or(Some(other));
        }
        let _ = fs::remove_file(sidecar::path_of(&path));
        Some(other)
    }

    /// The image: the one that is there, or the one that `import` makes. Of all who want it at the same time one imports; the
    /// others wait for it, get its failure, or take over if it dies. `import` is to write the file under the path that it is
    /// given, as an [`output::OutputFile`] that replaces what is there.
    pub fn obtain(
        &self,
        key: &ImageKey,
        options: &ObtainOptions,
        import: impl FnOnce(&Path) -> Result<Provenance, Failure>,
    ) -> Result<StoredImage, Failure> {
        let lease_path = self.directory.join(key.lease_name());
        let candidate = Candidate {
            path: &lease_path,
            group: options.group.as_deref(),
            timing: options.timing,
            deadline: Instant::now() + options.patience,
        };
        let mut progress: Option<Progress> = None;
        // What somebody else has just imported is new enough for everybody.
        let mut use_existing = !options.again;
        let lease = loop {
            if let Some(image) = self.find(key).filter(|_| use_existing) {
                return Ok(self.repaired(key, image));
            }
            let tell = |holder: &str| {
                use_existing = true;
                let what = || format!("{}: waiting for {holder}, which imports it", key.reference);
                progress.get_or_insert_with(|| Progress::new(what(), 0, options.speaks)).wait();
            };
            match candidate.acquire(tell).map_err(|failure| failure.about(&key.reference))? {
                Acquired::Owned(lease) => break lease,
                Acquired::Released => {}
                Acquired::Failed(failure) => return Err(failure),
            }
        };
        drop(progress);
        // Who had the lease before may just have made it.
        if let Some(image) = self.find(key).filter(|_| use_existing) {
            return Ok(image);
        }
        let path = self.path_of(key);
        output::remove_leftovers(&path);
        self.sweep();
        match import(&path).and_then(|provenance| self.record(key, &provenance)) {
            Ok(image) => Ok(image),
            Err(failure) => {
                lease.fail(&failure);
                Err(failure)
            }
        }
    }

    /// An image whose importer was killed when the file was complete, and nothing else.
    fn repaired(&self, key: &ImageKey, image: StoredImage) -> StoredImage {
        lease::remove_dead(&self.directory.join(key.lease_name()));
        if image.sidecar.is_some() || image.path != self.path_of(key) {
            return image;
        }
        let provenance = Provenance { source: key.reference.clone(), file_digest: None };
        self.record(key, &provenance).unwrap_or(image)
    }

    /// Writes down what is known of an image whose file is there.
    pub fn record(&self, key: &ImageKey, provenance: &Provenance) -> Result<StoredImage, Failure> {
        let path = self.path_of(key);
        let found = fs::symlink_metadata(&path)
            .map_err(|error| Failure::caused_by(format!("{}: the image is gone", shown(&path)), error))?;
        Sidecar::new(key, provenance, found.len()).write(&path)?;
        open_image(&path).ok_or_else(|| Failure::new(format!("{}: is not as it was written", shown(&path))))
    }

    /// Removes what crashes have left. Returns how many files.
    pub fn sweep(&self) -> usize {
        let mut removed = output::sweep(&self.directory);
        let (Ok(now), Ok(entries)) = (file_system_time(&self.directory), fs::read_dir(&self.directory))
        else {
            return removed;
        };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let of_image = name.to_str().and_then(|name| name.strip_suffix(SIDECAR));
            let orphaned = of_image.is_some_and(|image| {
                NamedImage::parse(image).is_some() && !self.directory.join(image).exists()
            });
            if !orphaned && !name.as_bytes().starts_with(LEASE.as_bytes()) {
                continue;
            }
            let modified = entry.metadata().ok().and_then(|found| found.modified().ok());
            let age = modified.and_then(|modified| now.duration_since(modified).ok());
            let abandoned = age.is_some_and(|age| age > ABANDONED);
            removed += usize::from(abandoned && fs::remove_file(entry.path()).is_ok());
        }
        removed
    }

    /// Removes an image. Who has it open keeps it.
    pub fn remove(&self, path: &Path) -> Result<(), Failure> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(write_failure(path, "cannot remove it", error));
            }
            _ => {}
        }
        let _ = fs::remove_file(sidecar::path_of(path));
        Ok(())
    }
}

/// Before anything is looked for or made there: a server that does not answer would hold whoever asks.
fn refuse_anothers(directory: &Path) -> Result<(), Failure> {
    refuse_foreign(directory).map_err(|failure| failure.about(STORE))
}

/// An image file that is as it was made: the user's own, complete, and not for others to write.
fn open_image(path: &Path) -> Option<StoredImage> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::options().read(true).custom_flags(flags.bits() as i32).open(path).ok()?;
    let size = file.metadata().ok()?.len();
    let sidecar = Sidecar::read(path);
    let is_whole = sidecar.as_ref().map_or(size >= SMALLEST_IMAGE, |sidecar| sidecar.size == size);
    (is_own_file(&file) && is_whole).then(|| StoredImage { path: path.to_owned(), size, sidecar })
}

/// Remembers that an image is used. A failure only makes it go earlier.
fn mark_as_used(image: &Path) {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    let times = Timestamps { last_access: now, last_modification: now };
    let _ = utimensat(CWD, sidecar::path_of(image), &times, AtFlags::SYMLINK_NOFOLLOW);
}

/// When an image was last used, as well as it is known: named, imported or read.
pub fn last_used(image: &Path) -> Option<SystemTime> {
    let look = |path: &Path| {
        let (directory, name) =
            (path.parent().unwrap_or(Path::new("")), path.file_name().unwrap_or_default());
        reach_name(directory, Path::new(name)).and_then(|found| found.metadata())
    };
    let found = look(image).ok()?;
    let marked = look(&sidecar::path_of(image)).and_then(|found| found.modified()).ok();
    [found.accessed().ok(), found.modified().ok(), marked].into_iter().flatten().max()
}

#[cfg(test)]
mod tests;

#[cfg(test)]
pub(crate) mod testing {
    //! What the tests of several modules need.

    use std::path::{Path, PathBuf};
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A directory that goes away with its owner.
    pub struct Scratch(PathBuf);

    impl Scratch {
        pub fn new() -> Scratch {
            static COUNT: AtomicU32 = AtomicU32::new(0);
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = std::env::temp_dir().join(format!("mizzen-import-{}-{count}", std::process::id()));
            std::fs::create_dir(&path).unwrap();
            Scratch(path)
        }

        pub fn path(&self) -> &Path {
            &self.0
        }

        /// All names in it.
        pub fn names(&self) -> Vec<String> {
            let entries = std::fs::read_dir(&self.0).unwrap();
            let mut names: Vec<String> =
                entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}
