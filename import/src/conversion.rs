//! The layers of an image, fetched and converted several at once, or taken from the cache.
//!
//! Run by: the user, in the importer.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use mizzen_core::Failure;

use crate::failures::cannot_write;
use crate::import::Importer;
use crate::layer::{Layer, LayerKey, convert};
use crate::manifest::BlobDigest;
use crate::progress::Bar;
use crate::source::LayerBlob;

/// How many layers are fetched and converted at once, as with Docker.
const AT_ONCE: usize = 4;

impl Importer<'_> {
    /// What the converted form of a layer is kept under.
    pub(crate) fn key(&self, blob: &LayerBlob) -> Option<LayerKey> {
        let digest = blob.digest.filter(|_| self.use_cache)?;
        Some(LayerKey::new(&digest.to_string(), self.compressors.options()))
    }

    /// Converts all layers, several at once. The first failure ends the others.
    pub(crate) fn convert_all(&self, blobs: &[LayerBlob]) -> Result<Vec<Layer>, Failure> {
        let distinct = distinct(blobs);
        let converted: Vec<Mutex<Option<Layer>>> = distinct.iter().map(|_| Mutex::new(None)).collect();
        let (next, stop, failure) = (AtomicUsize::new(0), AtomicBool::new(false), Mutex::new(None));
        let bars: Vec<Bar> =
            distinct.iter().map(|blob| self.bars.add(blob.name.as_str(), Some(blob.size))).collect();
        std::thread::scope(|scope| {
            for _ in 0..AT_ONCE.min(distinct.len()) {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        let (Some(blob), Some(bar)) = (distinct.get(number), bars.get(number)) else {
                            return;
                        };
                        let outcome = self.convert_one(blob, bar, &stop);
                        match (outcome, converted.get(number)) {
                            (Ok(layer), Some(place)) => *lock(place) = Some(layer),
                            // What ends because of the first failure says nothing of its own.
                            (Err(found), _) if !stop.swap(true, Ordering::Relaxed) => {
                                *lock(&failure) = Some(found.about(format!("layer {}", blob.name)));
                            }
                            _ => {}
                        }
                    }
                });
            }
        });
        if let Some(failure) = lock(&failure).take() {
            return Err(failure);
        }
        let by_digest: HashMap<_, _> =
            distinct.iter().zip(&converted).map(|(blob, layer)| (identity(blob), layer)).collect();
        let missing = || Failure::new("a layer was not converted");
        blobs
            .iter()
            .map(|blob| {
                by_digest.get(&identity(blob)).and_then(|layer| lock(layer).clone()).ok_or_else(missing)
            })
            .collect()
    }

    fn convert_one(&self, blob: &LayerBlob, bar: &Bar, stop: &AtomicBool) -> Result<Layer, Failure> {
        let key = self.key(blob);
        if let Some(layer) = key.as_ref().and_then(|key| self.cache.get(key)) {
            bar.done("cached");
            return Ok(layer);
        }
        let source = Counted { source: (blob.open)()?, bar, stop };
        let key = match &key {
            Some(key) => key,
            None => {
                let layer = convert(source, self.scratch()?, &self.compressors)?;
                bar.done("converted");
                return Ok(layer);
            }
        };
        let file = self.cache.create(key)?;
        let layer = convert(source, file.file().try_clone().map_err(cannot_write)?, &self.compressors)?;
        file.publish_unsynced()?;
        bar.done("converted");
        Ok(layer)
    }
}

/// Layers that are there twice are converted once.
fn distinct<'a, 'b>(blobs: &'a [LayerBlob<'b>]) -> Vec<&'a LayerBlob<'b>> {
    let mut seen = HashSet::new();
    blobs.iter().filter(|blob| seen.insert(identity(blob))).collect()
}

fn identity<'a>(blob: &'a LayerBlob) -> (Option<BlobDigest>, &'a str) {
    (blob.digest, if blob.digest.is_some() { "" } else { &blob.name })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A source that shows its progress, and ends when others have failed.
pub(crate) struct Counted<'a, R> {
    pub source: R,
    pub bar: &'a Bar,
    pub stop: &'a AtomicBool,
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(io::Error::other("stopped"));
        }
        let count = self.source.read(buffer)?;
        self.bar.advance(count as u64);
        Ok(count)
    }
}
