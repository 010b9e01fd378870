//! What srun sends to the nodes of a step (`broadcast.rs`): a file beside the caches, and what the nodes are told of it. Runs as the
//! user on the host, on the nodes.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use mizzen_core::failure::cause;
use mizzen_core::mountinfo::open_on_same_mount;
use mizzen_core::staging::decode_refusal;
use mizzen_core::{Digest, Failure};
use nix::unistd::geteuid;
use rustix::fs::{AtFlags, Mode, fchmod, fstat, statat, unlinkat};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::broadcast::SENT;
use super::cache::{Cache, describe};
use super::copy::verify;
use super::lock::Lock;
use super::obtain::publish;
use super::source::{FileIdentity, SourceImage};
use super::{ProgressSink, StagingOptions, changing, note, progress};
use crate::image::shown;
use crate::sys::nobody_writes;
use crate::trace::OrDebug;

/// Stands in the name of what is sent while tasks run, before the job, which an epilog knows.
pub const EARLY: &str = "early-";
/// A job that lasts longer sends again.
const REMEMBERED: Duration = Duration::from_secs(7 * 86400);
/// Nothing is written to a file for so long: whoever sent it, or waited for it, is gone.
pub const ABANDONED: Duration = Duration::from_secs(3600);
/// What is sent while tasks run is left by every step that ends before.
const ABANDONED_EARLY: Duration = Duration::from_secs(300);
/// How long a file may still be open for writing that has arrived.
const CLOSING: Duration = Duration::from_secs(2);

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
    /// What a digest that comes later is sealed with: nobody but the step's own user sees it.
    #[serde(default)]
    secret: Option<String>,
}

/// Begins the names of the user's files among the caches of all users.
fn prefix() -> String {
    format!("mizzen-{}-broadcast-", geteuid())
}

fn random<const BYTES: usize>() -> std::io::Result<String> {
    let mut random = [0; BYTES];
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
        let failed = |error: std::io::Error| format!("/dev/urandom: {}", cause(&error));
        let file = format!("{}{kind}{}", prefix(), random::<8>().map_err(failed)?);
        let secret = if digest.is_none() { Some(random::<32>().map_err(failed)?) } else { None };
        Ok(Delivery {
            file,
            source: source.into(),
            identity,
            digest: digest.map(|digest| digest.to_string()),
            secret,
        })
    }

    /// What proves that a digest comes from who has sent the file; None if nothing could. Both parts have a fixed length, so nobody
    /// makes one from another.
    pub fn seal(&self, digest: Digest) -> Option<String> {
        let secret = self.secret.as_ref().filter(|secret| secret.len() == 64)?;
        let sealed = Sha256::new().chain_update(secret).chain_update(digest.hex()).finalize();
        Some(Digest::new(sealed.into()).hex())
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
        take_from_others(&arrived.file)?;
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

/// Sees to it that what is verified next is what is used: it was in a directory of all users, and whoever has it open for writing could
/// exchange what has been read. It is in the user's own directory by now, so nobody else opens it.
fn take_from_others(file: &File) -> Result<(), String> {
    let failed = |errno: Errno| describe(errno);
    fchmod(file, Mode::RUSR).map_err(failed)?;
    if fstat(file).map_err(failed)?.st_nlink != 1 {
        return Err("it has another name".to_owned());
    }
    // slurmd may have just closed it, and a process that it has started meanwhile has not.
    let end = Instant::now() + CLOSING;
    while !nobody_writes(file) {
        if Instant::now() > end {
            return Err("somebody has it open for writing, or its file system cannot tell".to_owned());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
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
    let Some(directory) = cache.path.parent() else { return };
    let early = format!("{}{EARLY}", prefix());
    remove_beside(directory, &prefix(), &|name, seconds| {
        is_older(seconds, if name.starts_with(&early) { ABANDONED_EARLY } else { ABANDONED })
    });
}

/// Removes what has been sent to this node while tasks of a job ran, which has ended here; returns the names.
pub fn remove_of_job(directory: &Path, job: u32) -> Vec<String> {
    remove_beside(directory, &format!("{}{EARLY}{job}-", prefix()), &|_, _| true)
}

/// Removes files of the user's among the caches of all users, by the beginning of their names and, in seconds, when they were last
/// written to.
fn remove_beside(directory: &Path, prefix: &str, is_left: &dyn Fn(&str, i64) -> bool) -> Vec<String> {
    let Ok(all) = File::open(directory) else { return Vec::new() };
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.retain(|name| name.starts_with(prefix));
    names.retain(|name| {
        // Everybody can make such names, and mount on them.
        let stat = open_on_same_mount(all.as_fd(), name.as_ref()).and_then(|found| Ok(fstat(found)?));
        stat.is_ok_and(|stat| stat.st_uid == geteuid().as_raw() && is_left(name, stat.st_mtime))
            && unlinkat(&all, name.as_str(), AtFlags::empty()).is_ok()
    });
    names
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::super::cache::{open_beside, open_place};
    use super::*;
    use crate::image::testing::Scratch;

    #[test]
    fn what_somebody_can_still_write_to_is_not_verified() {
        let scratch = Scratch::new();
        let (path, link) = (scratch.path().join("file"), scratch.path().join("link"));
        let writer = File::create(&path).unwrap();
        let file = File::open(&path).unwrap();
        let refused = "somebody has it open for writing, or its file system cannot tell".to_owned();
        assert_eq!(take_from_others(&file), Err(refused));
        assert_eq!(file.metadata().unwrap().mode() & 0o7777, 0o400, "nobody opens it again");
        drop(writer);
        assert_eq!(take_from_others(&file), Ok(()));
        std::fs::hard_link(&path, &link).unwrap();
        assert_eq!(take_from_others(&file), Err("it has another name".to_owned()));
    }

    #[test]
    fn what_a_job_was_sent_is_removed_with_it() {
        let scratch = Scratch::new();
        let names = ["early-7-a", "early-7-a.end", "early-77-b", "c", "early-8-d"];
        let names = names.map(|name| format!("{}{name}", prefix()));
        for name in &names {
            std::fs::write(scratch.path().join(name), "").unwrap();
        }
        let mut removed = remove_of_job(scratch.path(), 7);
        removed.sort();
        assert_eq!(removed, names[..2]);
        assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 3);
    }

    #[test]
    fn a_file_that_is_open_to_others_has_not_been_sent() {
        let scratch = Scratch::new();
        let all = open_place(scratch.path()).unwrap();
        assert!(matches!(open_beside(&all, "file"), Ok(None)));
        let path = scratch.path().join("file");
        std::fs::write(&path, "").unwrap();
        for (mode, usable) in [(0o400, true), (0o700, true), (0o440, false), (0o664, false), (0o602, false)] {
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let opened = open_beside(&all, "file");
            assert_eq!(matches!(opened, Ok(Some(_))), usable, "{mode:o}");
            assert!(usable || matches!(opened, Err(Errno::PERM)), "{mode:o}");
        }
    }
}
