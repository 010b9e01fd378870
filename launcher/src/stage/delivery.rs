//! What srun sends to the nodes of a step (`broadcast.rs`): a file beside the caches, and what the nodes are told of it. Runs as the
//! user on the host, on the nodes.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, SystemTime};

use mizzen_core::failure::cause;
use mizzen_core::mountinfo::open_on_same_mount;
use mizzen_core::staging::decode_refusal;
use mizzen_core::{Digest, Failure};
use nix::unistd::geteuid;
use rustix::fs::{AtFlags, fstat, statat, unlinkat};
use serde::{Deserialize, Serialize};

use super::broadcast::SENT;
use super::cache::{Cache, describe};
use super::copy::verify;
use super::lock::Lock;
use super::obtain::publish;
use super::source::{FileIdentity, SourceImage};
use super::{ProgressSink, StagingOptions, changing, note, progress};
use crate::image::shown;
use crate::trace::OrDebug;

/// Stands in the name of what is sent while tasks run, before the job, which an epilog knows.
pub const EARLY: &str = "early-";
/// A job that lasts longer sends again.
const REMEMBERED: Duration = Duration::from_secs(7 * 86400);
/// Nothing is written to a file for so long: whoever sent it, or waited for it, is gone.
pub const ABANDONED: Duration = Duration::from_secs(3600);
/// What is sent while tasks run is left by every step that ends before.
const ABANDONED_EARLY: Duration = Duration::from_secs(300);

/// A file that srun has sent to the nodes of a step, or sends while its tasks run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Delivery {
    /// Its name in the directory of the caches.
    file: String,
    /// Of what it is a copy.
    source: OsString,
    /// What srun's machine saw of the source.
    pub identity: FileIdentity,
    /// Unknown as long as it is sent.
    #[serde(default)]
    pub digest: Option<String>,
}

/// Begins the names of the user's files among the caches of all users.
fn prefix() -> String {
    format!("mizzen-{}-broadcast-", geteuid())
}

fn random() -> std::io::Result<String> {
    let mut random = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut random)?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

impl StagingOptions {
    /// Notes what srun has sent to this node. Nonsense is as good as nothing: the image is copied then. A failure is what srun
    /// has failed with.
    pub fn expect(&mut self, variable: &OsStr) -> Result<(), Failure> {
        if let Some(failure) = decode_refusal(variable.as_encoded_bytes()) {
            return Err(failure);
        }
        let deliveries: Vec<Delivery> =
            serde_json::from_slice(variable.as_encoded_bytes()).unwrap_or_default();
        self.deliveries = deliveries
            .into_iter()
            .filter(|delivery| delivery.file.starts_with(&prefix()) && !delivery.file.contains('/'))
            .collect();
        Ok(())
    }

    /// Makes the file that srun has sent the copy of this source, if there is one. The caller has the source's lock.
    pub(super) fn adopt(
        &self,
        cache: &Cache,
        source: &SourceImage,
        lock: &Lock,
        sink: &mut dyn ProgressSink,
    ) -> Option<(File, Digest)> {
        let delivery = self.delivery_of(source.path)?;
        // It was sent before this: what is in it is older than what we see.
        if !delivery.identity.is_same_elsewhere(&source.identity) {
            return None;
        }
        // Without one it is under way: whoever waits for all of the content does not wait for that.
        let digest = Digest::parse(delivery.digest.as_ref()?)?;
        match delivery.adopt(digest, &self.directory, cache, source, lock, sink) {
            Ok(adopted) => adopted,
            Err(why) => {
                note(&format!("{}: what srun has sent cannot be used: {why}", shown(source.path)), None);
                None
            }
        }
    }

    /// Removes what srun has sent and nobody needs any more, or will send.
    pub fn discard(&self, source: &Path) {
        if let Some(awaited) = self.awaited(source) {
            awaited.discard().or_debug("what srun sends is left here");
        } else if let Some(delivery) = self.delivery_of(source) {
            let _ = std::fs::remove_file(self.directory.join(&delivery.file));
        }
    }

    pub(super) fn delivery_of(&self, source: &Path) -> Option<&Delivery> {
        self.deliveries.iter().find(|delivery| delivery.source() == source)
    }
}

impl Delivery {
    /// A file with a name of its own.
    pub fn new(
        kind: &str,
        source: &Path,
        identity: FileIdentity,
        digest: Option<Digest>,
    ) -> Result<Delivery, String> {
        let random = random().map_err(|error| format!("/dev/urandom: {}", cause(&error)))?;
        let file = format!("{}{kind}{random}", prefix());
        Ok(Delivery {
            file,
            source: source.into(),
            identity,
            digest: digest.map(|digest| digest.to_string()),
        })
    }

    /// Its name in the directory of the caches.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Of what it is a copy.
    pub fn source(&self) -> &Path {
        Path::new(&self.source)
    }

    /// None if it has not arrived, or not as a whole: srun has told the user.
    pub fn adopt(
        &self,
        digest: Digest,
        directory: &Path,
        cache: &Cache,
        source: &SourceImage,
        lock: &Lock,
        sink: &mut dyn ProgressSink,
    ) -> Result<Option<(File, Digest)>, String> {
        let identity = &source.identity;
        let Some(arrived) = cache.take(directory, &self.file, identity.size).map_err(describe)? else {
            return Ok(None);
        };
        let mut progress = progress(source.path, "verifying what srun has sent", identity.size);
        let mut say = lock.progress_writer(identity.size);
        verify(&arrived.file, digest, identity.size, &mut |bytes| {
            progress.advance(bytes);
            say(bytes);
        })?;
        let unchanged = FileIdentity::at(source.path).is_ok_and(|now| now == *identity);
        if !unchanged {
            return Err(changing(source.path).message);
        }
        let file = publish(cache, source, arrived, digest, sink).map_err(describe)?;
        Ok(Some((file, digest)))
    }
}

/// Removes what broadcasts have left that nobody waits for any more: beside the user's cache, and the notes in it.
pub fn sweep(cache: &Cache) {
    let now = SystemTime::now();
    let is_older = |seconds: i64, age: Duration| {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
        now.duration_since(time).is_ok_and(|passed| passed > age)
    };
    for name in cache.names(SENT).unwrap_or_default() {
        let stat = statat(&cache.dir, &*name, AtFlags::SYMLINK_NOFOLLOW);
        if stat.is_ok_and(|stat| is_older(stat.st_mtime, REMEMBERED)) {
            let _ = cache.remove(&name);
        }
    }
    let (Some(directory), prefix) = (cache.path.parent(), prefix()) else { return };
    let Ok(all) = File::open(directory) else { return };
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if !name.as_encoded_bytes().starts_with(prefix.as_bytes()) {
            continue;
        }
        // Everybody can make such names.
        let stat = open_on_same_mount(all.as_fd(), &name).and_then(|found| Ok(fstat(found)?));
        let Ok(stat) = stat else { continue };
        let is_early = name.as_encoded_bytes()[prefix.len()..].starts_with(EARLY.as_bytes());
        let age = if is_early { ABANDONED_EARLY } else { ABANDONED };
        if stat.st_uid == geteuid().as_raw() && is_older(stat.st_mtime, age) {
            let _ = unlinkat(&all, &name, AtFlags::empty());
        }
    }
}
