//! A cache of decoded blocks, bounded in bytes, in which each block is decoded by one thread only.
//!
//! Run by: the user, in the launcher and in the FUSE server process.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::error::Result;

/// What an entry costs besides its bytes: two map slots, an `Arc`, the allocator's share.
const ENTRY_OVERHEAD: usize = 160;

/// Decoded blocks by their position in the image. The least recently used go first.
///
/// A lock is held for a map operation, never while a block is read or decoded. Threads that want a block
/// which another one is decoding wait for it: eight processes that import the same module cost one
/// decompression.
pub struct Cache<V> {
    shards: Box<[Shard<V>]>,
    /// Bytes that one shard may hold.
    shard_limit: usize,
}

struct Shard<V> {
    state: Mutex<State<V>>,
    /// Signalled when a load has ended, well or not.
    loaded: Condvar,
}

struct State<V> {
    entries: HashMap<u64, Entry<V>>,
    /// Time of last use -> key; the first one is evicted first.
    by_age: BTreeMap<u64, u64>,
    clock: u64,
    bytes: usize,
}

enum Entry<V> {
    Loading,
    Ready { value: Arc<V>, bytes: usize, last_used: u64 },
}

impl<V: AsRef<[u8]>> Cache<V> {
    /// A cache of `limit` bytes behind `shards` locks. Few shards use the bytes better, many contend less.
    pub fn new(limit: usize, shards: usize) -> Cache<V> {
        let shards = shards.max(1);
        let new_state = || State { entries: HashMap::new(), by_age: BTreeMap::new(), clock: 0, bytes: 0 };
        let new_shard = |_| Shard { state: Mutex::new(new_state()), loaded: Condvar::new() };
        Cache { shards: (0..shards).map(new_shard).collect(), shard_limit: limit / shards }
    }

    /// The block at `key`, from the cache or through `load`. A failure is not kept: each caller tries anew.
    pub fn get(&self, key: u64, load: impl FnOnce() -> Result<V>) -> Result<Arc<V>> {
        // Neighbouring blocks differ in no fixed bits, so spread the key (Fibonacci hashing) before the
        // modulo.
        let spread = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize;
        let Some(shard) = self.shards.get(spread % self.shards.len()) else {
            return load().map(Arc::new);
        };
        let mut state = shard.lock();
        loop {
            match state.touch(key) {
                Lookup::Ready(value) => return Ok(value),
                Lookup::Absent => break,
                Lookup::Loading => {
                    state = shard.loaded.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
        state.entries.insert(key, Entry::Loading);
        drop(state);
        let claim = Claim { shard, key, fulfilled: false };
        let value = Arc::new(load()?);
        claim.fulfil(&value, self.shard_limit);
        Ok(value)
    }
}

/// The duty to end a load: whatever becomes of it, nobody waits for ever.
struct Claim<'a, V> {
    shard: &'a Shard<V>,
    key: u64,
    fulfilled: bool,
}

impl<V: AsRef<[u8]>> Claim<'_, V> {
    fn fulfil(mut self, value: &Arc<V>, limit: usize) {
        self.shard.lock().insert(self.key, value, limit);
        // From here on the entry may be evicted, and then be claimed by another thread.
        self.fulfilled = true;
    }
}

impl<V> Drop for Claim<'_, V> {
    fn drop(&mut self) {
        if !self.fulfilled {
            self.shard.lock().entries.remove(&self.key);
        }
        self.shard.loaded.notify_all();
    }
}

impl<V> Shard<V> {
    /// A poisoned lock is taken all the same: no operation under it leaves the maps half changed.
    fn lock(&self) -> MutexGuard<'_, State<V>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Lookup<V> {
    Ready(Arc<V>),
    Loading,
    Absent,
}

impl<V> State<V> {
    fn touch(&mut self, key: u64) -> Lookup<V> {
        match self.entries.get_mut(&key) {
            None => Lookup::Absent,
            Some(Entry::Loading) => Lookup::Loading,
            Some(Entry::Ready { value, last_used, .. }) => {
                self.by_age.remove(last_used);
                self.clock += 1;
                *last_used = self.clock;
                self.by_age.insert(self.clock, key);
                Lookup::Ready(Arc::clone(value))
            }
        }
    }
}

impl<V: AsRef<[u8]>> State<V> {
    fn insert(&mut self, key: u64, value: &Arc<V>, limit: usize) {
        let bytes = value.as_ref().as_ref().len() + ENTRY_OVERHEAD;
        self.clock += 1;
        self.by_age.insert(self.clock, key);
        self.entries.insert(key, Entry::Ready { value: Arc::clone(value), bytes, last_used: self.clock });
        self.bytes += bytes;
        while self.bytes > limit {
            let Some((_, oldest)) = self.by_age.pop_first() else { break };
            if let Some(Entry::Ready { bytes, .. }) = self.entries.remove(&oldest) {
                self.bytes -= bytes;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::error::Error;
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn many_threads_load_a_block_once() {
        let cache: Cache<Vec<u8>> = Cache::new(1 << 20, 4);
        let loads = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    let value = cache.get(7, || {
                        loads.fetch_add(1, Ordering::SeqCst);
                        std::thread::sleep(std::time::Duration::from_millis(50));
                        Ok(vec![1, 2, 3])
                    });
                    assert_eq!(*value.unwrap(), [1, 2, 3]);
                });
            }
        });
        assert_eq!(loads.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn the_byte_limit_holds_and_the_oldest_goes_first() {
        let cache: Cache<Vec<u8>> = Cache::new(10_000, 1);
        for key in 0..100 {
            cache.get(key, || Ok(vec![0; 1000])).unwrap();
            cache.get(0, || Ok(vec![0; 1000])).unwrap();
        }
        let state = cache.shards[0].lock();
        assert!(state.bytes <= 10_000);
        assert_eq!(state.entries.len(), state.by_age.len());
        assert!(state.entries.contains_key(&0), "used all the time");
        assert!(state.entries.contains_key(&99));
        assert!(!state.entries.contains_key(&1));
    }

    #[test]
    fn a_failed_load_is_not_kept_and_wakes_the_waiters() {
        let cache: Cache<Vec<u8>> = Cache::new(1 << 20, 1);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| assert!(cache.get(1, || Err(Error::NotFound)).is_err()));
            }
        });
        assert!(cache.get(1, || Ok(vec![9])).is_ok());
    }
}
