//! Converted layers that are kept for the next image on the same base: one file each, in a directory of the user's, named
//! after the digest of the blob and how it was converted.
//!
//! A file appears when it is complete. It is not waited until it is on disk: a layer is compared with its digests whenever it is
//! used, so what a disk or a loss of power has taken costs a download and nothing else. The ones that were not used for the
//! longest time go first.
//!
//! Run by: the user, in the importer.

use std::fs::{self, DirBuilder, FileTimes, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use mizzen::layer_cache::{self, SUFFIX};
use mizzen_core::Failure;
use mizzen_core::fs_server::refuse_foreign;
use mizzen_core::staging::Amount;
use mizzen_core::trusted_file::check_only_users;
use mizzen_squashfs::writer::{Compression, Options};
use rustix::process::geteuid;

use super::Layer;
use crate::output::{Existing, OutputFile, is_own_file};

/// A compressor and its level, in names of files.
pub fn compressor_name(compression: Compression) -> String {
    match compression {
        Compression::Zstd { level } => format!("zstd{level}"),
        Compression::Gzip { level } => format!("gzip{level}"),
        Compression::Xz => "xz".to_owned(),
        Compression::Lz4 => "lz4".to_owned(),
        Compression::None => "none".to_owned(),
    }
}

/// The name of a converted layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerKey(String);

impl LayerKey {
    /// For the blob with this digest (`sha256:…`), converted so.
    pub fn new(digest: &str, options: &Options) -> LayerKey {
        let compression = compressor_name(options.compression);
        let digest = digest.replace(':', "-");
        LayerKey(format!("{digest}.{compression}.{}k.{SUFFIX}", options.block_size >> 10))
    }
}

/// The user's converted layers.
#[derive(Debug)]
pub struct LayerCache {
    directory: PathBuf,
    limit: Option<Amount>,
}

impl LayerCache {
    /// The cache in this directory, which is made if it is not there; it may grow so large.
    pub fn open(directory: PathBuf, limit: Option<Amount>) -> Result<LayerCache, Failure> {
        // Before it is made: a server that does not answer would hold whoever asks.
        refuse_foreign(&directory).map_err(|failure| failure.about("the layer cache"))?;
        DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(|error| {
            Failure::caused_by(format!("cannot make {}", directory.display()), error)
                .or_hint("converted layers are kept there; XDG_CACHE_HOME names another place")
        })?;
        // Whoever can put a layer here decides what is in the images.
        check_only_users(&directory, geteuid().as_raw()).map_err(|failure| {
            failure.about("the layer cache").hint(
                "XDG_CACHE_HOME must name a directory that is yours, below directories in which nobody else can replace it",
            )
        })?;
        Ok(LayerCache { directory, limit })
    }

    /// A directory in which nothing is kept, for the files without a name that a conversion needs meanwhile.
    pub fn scratch(directory: PathBuf) -> LayerCache {
        LayerCache { directory, limit: None }
    }

    /// Where it is.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The layer of this name, if it is there and whole.
    pub fn get(&self, key: &LayerKey) -> Option<Layer> {
        let path = self.directory.join(&key.0);
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(&path).ok()?;
        if !is_own_file(&file) {
            return None;
        }
        // For the order in which layers go; of no other consequence.
        let _ = file.set_times(FileTimes::new().set_modified(SystemTime::now()));
        Layer::open(file).map_err(|_| fs::remove_file(&path)).ok()
    }

    /// A file for a layer that is about to be converted.
    pub fn create(&self, key: &LayerKey) -> Result<OutputFile, Failure> {
        OutputFile::create(&self.directory.join(&key.0), Existing::Replace)
    }

    /// Forgets a layer that turned out to be damaged.
    pub fn remove(&self, key: &LayerKey) {
        let _ = fs::remove_file(self.directory.join(&key.0));
    }

    /// Keeps the limit.
    pub fn evict(&self) {
        layer_cache::evict(&self.directory, self.limit);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn layers_of_others_are_not_believed() {
        let top = std::env::temp_dir().join(format!("mizzen-layers-{}", std::process::id()));
        let cache = LayerCache::open(top.join("layers"), None).unwrap();
        let key = LayerKey::new("sha256:00", &Options::default());
        symlink("/etc/passwd", cache.directory().join(&key.0)).unwrap();
        assert!(cache.get(&key).is_none());
        fs::set_permissions(&top, PermissionsExt::from_mode(0o777)).unwrap();
        let failure = LayerCache::open(top.join("layers"), None).unwrap_err();
        assert!(failure.message.starts_with("the layer cache: "), "{failure}");
        assert!(failure.message.ends_with("can be written by others (mode 0777)"), "{failure}");
        fs::remove_dir_all(top).unwrap();
    }
}
