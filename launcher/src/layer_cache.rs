//! The layers that the importer has converted and keeps for the next image on the same base: where they are, what there is,
//! and which go first. What is in them is the importer's business. Runs as the user, in the launcher and in the importer.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use mizzen_core::Failure;
use mizzen_core::fs_server::refuse_foreign;
use mizzen_core::staging::Amount;
use rustix::fs::statvfs;

/// Ends the names of their files.
pub const SUFFIX: &str = "layer";

/// A converted layer.
#[derive(Debug)]
pub struct CachedLayer {
    /// Its file.
    pub path: PathBuf,
    /// Bytes of it.
    pub size: u64,
    /// When it was made or used.
    pub used: SystemTime,
}

/// Where the converted layers of the user are.
pub fn directory() -> Result<PathBuf, Failure> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    cache.map(|cache| cache.join("mizzen/layers")).ok_or_else(|| {
        Failure::new("no directory for converted layers: HOME is not set").hint("set HOME, or XDG_CACHE_HOME")
    })
}

/// The layers that are there, the one that was used last in front.
pub fn list(directory: &Path) -> Vec<CachedLayer> {
    // The importer keeps none there, and what another user serves may never answer.
    if refuse_foreign(directory).is_err() {
        return Vec::new();
    }
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut layers: Vec<CachedLayer> = entries
        .filter(|entry| entry.path().extension().is_some_and(|suffix| suffix == SUFFIX))
        .filter_map(|entry| {
            let metadata = entry.metadata().ok()?;
            Some(CachedLayer { path: entry.path(), size: metadata.len(), used: metadata.modified().ok()? })
        })
        .collect();
    layers.sort_by(|one, other| other.used.cmp(&one.used).then_with(|| one.path.cmp(&other.path)));
    layers
}

/// Removes the layers that were not used for the longest time, until the rest is within the limit. An import that uses one
/// has it open, and does not notice. Returns how many bytes were freed.
pub fn evict(directory: &Path, limit: Option<Amount>) -> u64 {
    let (Some(limit), Ok(file_system)) = (limit, statvfs(directory)) else { return 0 };
    let limit = limit.of(file_system.f_blocks.saturating_mul(file_system.f_frsize));
    let (mut total, mut freed) = (0_u64, 0);
    for layer in list(directory) {
        total = total.saturating_add(layer.size);
        if total > limit && fs::remove_file(&layer.path).is_ok() {
            freed += layer.size;
        }
    }
    freed
}

#[cfg(test)]
mod tests {
    use std::fs::FileTimes;
    use std::time::Duration;

    use super::*;
    use crate::image::testing::Scratch;

    #[test]
    fn the_oldest_go_first() {
        let scratch = Scratch::new();
        for (name, age) in [("a.layer", 30), ("b.layer", 10), ("c.layer", 20), ("other", 40)] {
            let path = scratch.file(name, [0; 100]);
            let file = fs::File::options().write(true).open(path).unwrap();
            let used = SystemTime::now() - Duration::from_secs(age);
            file.set_times(FileTimes::new().set_modified(used)).unwrap();
        }
        let names = || -> Vec<String> {
            let layers = list(scratch.path());
            layers
                .iter()
                .map(|layer| layer.path.file_name().unwrap().to_string_lossy().into_owned())
                .collect()
        };
        assert_eq!(names(), ["b.layer", "c.layer", "a.layer"]);
        assert_eq!((evict(scratch.path(), None), evict(scratch.path(), Some(Amount::Bytes(300)))), (0, 0));
        assert_eq!(evict(scratch.path(), Some(Amount::Bytes(250))), 100);
        assert_eq!(names(), ["b.layer", "c.layer"]);
        assert_eq!(evict(scratch.path(), Some(Amount::Bytes(0))), 200);
        assert!(names().is_empty() && scratch.path().join("other").exists());
    }
}
