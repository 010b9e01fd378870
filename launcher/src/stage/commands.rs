//! `mizzen stage` and `mizzen cache`: the copies, for people and for prologs. Runs as the user on the host; as root, on the
//! copies that all users share.

use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use mizzen_core::failure::{cause, quote};
use mizzen_core::find_image::find_file;
use mizzen_core::staging::Amount;
use mizzen_core::{Config, Digest, Failure};
use nix::sys::signal::Signal;
use nix::unistd::geteuid;
use rustix::fs::{FlockOperation, Timespec, Timestamps, UTIME_OMIT, flock, fstat, futimens};
use rustix::io::Errno;
use serde_json::{Value, json};

use super::cache::{self, Cache, SOURCE, describe};
use super::copy::verify;
use super::evict::{self, CachedCopy};
use super::partial::{self, Listed};
use super::source::Manifest;
use super::{Provenance, Requirements, StagingOptions, profile, progress, site};
use crate::find_image;
use crate::image::check_content;
use crate::layer_cache::{self, CachedLayer};
use crate::progress::Progress;
use crate::report::{age, megabytes};
use crate::sys;

/// Copies images to the node before somebody needs them.
pub struct Stager {
    config: Config,
    staging: StagingOptions,
    _mask: sys::FileMask,
}

impl Stager {
    /// With the site's settings.
    pub fn new(config: Config) -> Result<Stager, Failure> {
        let _mask = sys::FileMask::set(cache::MASK);
        let staging = StagingOptions::of_copies(&config, is_roots(&config))?;
        if staging.fills_site {
            // Also where nothing is to be copied: nobody else removes what a crash has left.
            evict::sweep(&Cache::open_site(&config.stage_shared)?);
        }
        Ok(Stager { config, staging, _mask })
    }

    /// Copies one, and says what has come of it.
    pub fn stage(&self, name: &Path) -> Result<String, Failure> {
        let (path, pin) = if self.staging.fills_site {
            let directory = std::env::current_dir().unwrap_or_else(|_| "/".into());
            // Files alone: nothing is fetched as root.
            find_file(name.as_os_str().as_bytes(), &directory, &self.config, |path, _| site::look(path))?
        } else {
            let (path, pin, _) = find_image::to_read(name, &self.config)?;
            (path, pin)
        };
        let ready = super::stage(&path, &Requirements::pinned(pin), &self.staging)?;
        // As root nothing of an image is inflated.
        if !self.staging.fills_site {
            check_content(&ready.opened)?;
        }
        let image = quote(path.as_os_str().as_encoded_bytes());
        let digest = ready.digest.map_or_else(String::new, |digest| digest.to_string());
        Ok(match ready.provenance {
            Provenance::Source => format!("{image}: a directory, used where it is\n"),
            Provenance::Cache => format!("{image}: {digest} was there\n"),
            Provenance::Site => format!("{image}: {digest} is among the site's copies\n"),
            // Who asks for a copy waits for it.
            Provenance::ReadThrough => format!("{image}: used where it is\n"),
            Provenance::Copied => format!("{image}: {digest} copied, {}\n", megabytes(ready.opened.size)),
        })
    }
}

/// A result for people or for programs, and whether all was well.
pub struct Outcome {
    pub text: String,
    pub json: Value,
    pub good: bool,
}

/// Whether the caller looks after the copies that all users share.
fn is_roots(config: &Config) -> bool {
    geteuid().is_root() && !config.stage_shared.as_os_str().is_empty()
}

/// The user's cache, or root's for all.
pub struct Commands {
    cache: Cache,
    staging: StagingOptions,
    /// Root's, which others can look at.
    shared: Option<Cache>,
    /// The layers that the user's imports have left, and how large they may be.
    layers: Option<(PathBuf, Option<Amount>)>,
    /// What a limit on the size of files would do to a process that writes.
    _unharmed: sys::IgnoreSignal,
    _mask: sys::FileMask,
}

impl Commands {
    /// Opens it.
    pub fn new(config: &Config) -> Result<Commands, Failure> {
        let _mask = sys::FileMask::set(cache::MASK);
        let staging = StagingOptions::new(config.settings.stage(), config)?;
        let (cache, shared, layers) = if is_roots(config) {
            (Cache::open_site(&config.stage_shared)?, None, None)
        } else {
            let site = Cache::open_site_read_only(&config.stage_shared).ok().flatten();
            let limit = Amount::parse(&config.layer_cache_max_size)?;
            let layers = layer_cache::directory().ok().map(|directory| (directory, limit));
            (Cache::open(&config.stage_directory)?, site, layers)
        };
        let _unharmed = sys::IgnoreSignal::new(Signal::SIGXFSZ);
        Ok(Commands { cache, staging, shared, layers, _unharmed, _mask })
    }

    /// Shows all copies, the last used first.
    pub fn list(&self) -> Result<Outcome, Failure> {
        let mut own = list(&self.cache)?;
        if let Some(shared) = &self.shared {
            let shared = list(shared)?;
            own.text.push_str(&shared.text);
            own.json["shared"] = shared.json;
        }
        let unpacked = profile::list(&self.cache);
        if !unpacked.is_empty() {
            let size = unpacked.iter().map(|layer| layer.size).sum();
            let count = unpacked.iter().filter(|layer| layer.is_whole).count();
            let directory = quote(self.cache.path.as_os_str().as_encoded_bytes());
            let _ =
                writeln!(own.text, "{directory}: files unpacked for {}, {}", starts(count), megabytes(size));
            own.json["unpacked"] = json!({ "size": size, "count": count });
        }
        let (directory, layers) = self.layers();
        if !layers.is_empty() {
            let size: u64 = layers.iter().map(|layer| layer.size).sum();
            let noun = if layers.len() == 1 { "converted layer" } else { "converted layers" };
            let directory = quote(directory.as_os_str().as_encoded_bytes());
            let _ = writeln!(own.text, "{directory}: {} {noun}, {}", layers.len(), megabytes(size));
            own.json["layers"] = json!({ "directory": directory, "size": size, "count": layers.len() });
        }
        Ok(own)
    }

    /// What imports have left for the next one on the same base.
    fn layers(&self) -> (&Path, Vec<CachedLayer>) {
        let directory = self.layers.as_ref().map_or(Path::new(""), |(directory, _)| directory);
        (directory, layer_cache::list(directory))
    }

    /// Reads every copy and compares it with its digest; what differs is set aside and copied again when it is needed.
    pub fn verify(&self) -> Result<Outcome, Failure> {
        let (mut text, mut listed, mut good) = (String::new(), Vec::new(), true);
        for copy in self.copies()? {
            let Some(found) = self.check(&copy) else { continue };
            let state = found.as_ref().err().cloned().unwrap_or_else(|| "good".to_owned());
            if found.is_err() {
                self.cache.set_aside(&copy.name);
                good = false;
            }
            let _ = writeln!(text, "{}: {state}", copy.digest);
            listed.push(json!({ "digest": copy.digest.to_string(), "good": found.is_ok(), "state": state }));
        }
        Ok(Outcome { text, json: json!({ "copies": listed, "good": good }), good })
    }

    /// What is wrong with a copy. None if it is gone.
    fn check(&self, copy: &CachedCopy) -> Option<Result<(), String>> {
        let file = match self.cache.open_file(&copy.name) {
            Ok(file) => file,
            Err(Errno::NOENT) => return None,
            // A link, or nothing that we would have put there.
            Err(errno) => return Some(Err(format!("broken: {}; set aside", describe(errno)))),
        };
        // Nobody removes it while it is read.
        let _ = flock(&file, FlockOperation::NonBlockingLockShared);
        let stat = fstat(&file).ok()?;
        if let Some(why) = self.cache.why_broken(&stat, None) {
            return Some(Err(format!("broken: {why}; set aside")));
        }
        let mut progress: Progress = progress(&self.cache.path.join(&copy.name), "verifying", copy.size);
        let found = verify(&file, copy.digest, copy.size, &mut |bytes| progress.advance(bytes));
        // To be verified is not to be used.
        let used = Timespec { tv_sec: copy.used.0, tv_nsec: copy.used.1 as _ };
        let same = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
        let _ = futimens(&file, &Timestamps { last_access: used, last_modification: same });
        Some(found.map_err(|why| format!("broken: {why}; set aside")))
    }

    /// Keeps the limits, and removes what belongs to no copy.
    pub fn prune(&self) -> Result<Outcome, Failure> {
        let before: u64 = self.copies()?.iter().map(|copy| copy.size).sum();
        let left_over = evict::sweep(&self.cache);
        let made = evict::reserve(&self.cache, 0, 0, &self.staging.limits);
        let tight = !evict::is_enough(&self.cache, &self.staging.limits).map_err(Failure::new)?;
        if let (Err(why), false) = (made, tight) {
            return Err(Failure::new(why));
        }
        let after: u64 = self.copies()?.iter().map(|copy| copy.size).sum();
        self.forget()?;
        let layers =
            self.layers.as_ref().map_or(0, |(directory, limit)| layer_cache::evict(directory, *limit));
        let freed = before.saturating_sub(after) + layers;
        let mut text = format!(
            "{} freed, {} kept, {left_over} other files removed\n",
            megabytes(freed),
            megabytes(after)
        );
        if tight {
            text.push_str("the limits are exceeded all the same: by copies in use, or by others' files\n");
        }
        let json =
            json!({ "freed": freed, "size": after, "removed_files": left_over, "within_limits": !tight });
        Ok(Outcome { text, json, good: true })
    }

    /// Removes copies, named by digest or by source; `all` removes every one that is not in use.
    pub fn remove(&self, names: &[String], all: bool) -> Result<Outcome, Failure> {
        let manifests = manifests(&self.cache)?;
        let absolute = |name: &str| std::path::absolute(name).unwrap_or_else(|_| Path::new(name).to_owned());
        let matches = |copy: &CachedCopy, name: &str| {
            let path = absolute(name);
            Digest::parse(name) == Some(copy.digest)
                || of_copy(&manifests, copy.digest).any(|manifest| Path::new(&manifest.source) == path)
        };
        let copies = self.copies()?;
        let partial = partials(&self.cache)?;
        let is_of = |one: &Listed, name: &str| one.name == name || Path::new(&one.source) == absolute(name);
        let is_known = |name: &String| {
            copies.iter().any(|copy| matches(copy, name)) || partial.iter().any(|one| is_of(one, name))
        };
        if let Some(name) = names.iter().find(|name| !is_known(name)) {
            return Err(Failure::new(format!("{}: no copy of it is here", quote(name.as_bytes())))
                .hint("`mizzen cache list` shows all copies with their digests and sources"));
        }
        let (mut text, mut listed, mut good) = (String::new(), Vec::new(), true);
        for copy in copies.iter().filter(|copy| all || names.iter().any(|name| matches(copy, name))) {
            let mut removed = evict::remove_unused(&self.cache, &copy.name);
            let state = if removed {
                "removed".to_owned()
            } else if self.is_in_use(copy) {
                good &= all;
                "in use, kept".to_owned()
            } else {
                let errno = self.cache.remove(&copy.name).err().filter(|errno| *errno != Errno::NOENT);
                removed = errno.is_none();
                good &= removed;
                errno.map_or_else(
                    || "removed".to_owned(),
                    |errno| format!("cannot be removed: {}", describe(errno)),
                )
            };
            let _ = writeln!(text, "{}: {state}", copy.digest);
            listed.push(json!({ "digest": copy.digest.to_string(), "removed": removed }));
        }
        for one in partial.iter().filter(|one| all || names.iter().any(|name| is_of(one, name))) {
            let removed = partial::remove_unused(&self.cache, &one.name);
            good &= removed || all;
            let _ = writeln!(text, "{}: {}", one.name, if removed { "removed" } else { "in use, kept" });
            listed.push(json!({ "partial": one.name, "removed": removed }));
        }
        self.forget()?;
        let unpacked = if all { profile::forget_all(&self.cache) } else { 0 };
        if unpacked > 0 {
            let _ = writeln!(text, "unpacked files, {}: removed", megabytes(unpacked));
        }
        let (_, layers) = self.layers();
        let removed = layers.iter().filter(|layer| all && std::fs::remove_file(&layer.path).is_ok()).count();
        if removed > 0 {
            let _ = writeln!(text, "{removed} converted layers: removed");
        }
        Ok(Outcome { text, json: json!({ "copies": listed, "layers": removed, "unpacked": unpacked }), good })
    }

    fn copies(&self) -> Result<Vec<CachedCopy>, Failure> {
        copies(&self.cache)
    }

    fn is_in_use(&self, copy: &CachedCopy) -> bool {
        self.cache.open_file(&copy.name).is_ok_and(|file| self.cache.in_use(file))
    }

    /// Removes manifests and locks of sources whose copies are gone.
    fn forget(&self) -> Result<(), Failure> {
        let copies = self.copies()?;
        for name in self.cache.names(SOURCE).map_err(|error| unlisted(&self.cache, &error))? {
            let manifest = self.cache.manifest(&name.replace(".lock", ".json"));
            let digest = manifest.and_then(|manifest| Digest::parse(&manifest.digest));
            if !copies.iter().any(|copy| Some(copy.digest) == digest) {
                // Not one that somebody holds: they are making the copy.
                evict::remove_unused(&self.cache, &name);
            }
        }
        Ok(())
    }
}

fn starts(count: usize) -> String {
    if count == 1 { "1 start".to_owned() } else { format!("{count} starts") }
}

fn list(cache: &Cache) -> Result<Outcome, Failure> {
    let manifests = manifests(cache)?;
    let mut copies = copies(cache)?;
    copies.sort_by_key(|copy| std::cmp::Reverse(copy.used));
    let (mut text, mut listed) = (String::new(), Vec::new());
    for copy in &copies {
        // Of root's copies others cannot tell.
        let can_tell = !cache.shared || geteuid().is_root();
        let file = can_tell.then(|| cache.open_file(&copy.name).ok()).flatten();
        let in_use = file.map(|file| cache.in_use(file));
        let sources: Vec<&Manifest> = of_copy(&manifests, copy.digest).collect();
        let named = |manifest: &&Manifest| quote(manifest.source.as_bytes());
        let mut paths: Vec<String> = sources.iter().map(named).collect();
        // A file that was touched is a source of its own.
        paths.sort();
        paths.dedup();
        let used =
            if in_use == Some(true) { "in use".to_owned() } else { format!("used {} ago", age(copy.used.0)) };
        let (size, paths) = (megabytes(copy.size), paths.join(", "));
        let _ = writeln!(text, "{}  {size:>12}  {used:<14}  {paths}", copy.digest);
        listed.push(json!({
            "digest": copy.digest.to_string(),
            "size": copy.size,
            "last_used": copy.used.0,
            "in_use": in_use,
            "sources": sources.iter().map(|manifest| json!({
                "path": manifest.source, "staged": manifest.staged,
            })).collect::<Vec<_>>(),
        }));
    }
    let mut in_the_making = Vec::new();
    for one in partials(cache)? {
        let in_use = partial::in_use(cache, &one.name).is_ok_and(|unused| unused.is_none());
        let used = if in_use { "in use".to_owned() } else { format!("used {} ago", age(one.used.0)) };
        let percent = (one.present * 100).checked_div(one.size).unwrap_or(0);
        let (size, source) = (megabytes(one.size), quote(one.source.as_bytes()));
        let _ = writeln!(text, "{}  {percent} % of {size}  {used}  {source}", one.name);
        in_the_making.push(json!({
            "name": one.name,
            "source": one.source,
            "size": one.size,
            "present": one.present,
            "last_used": one.used.0,
            "in_use": in_use,
        }));
    }
    let total: u64 = copies.iter().map(|copy| copy.size).sum();
    let directory = quote(cache.path.as_os_str().as_encoded_bytes());
    let noun = if copies.len() == 1 { "copy" } else { "copies" };
    let _ = writeln!(text, "{directory}: {} {noun}, {}", copies.len(), megabytes(total));
    let json = json!({ "directory": directory, "size": total, "copies": listed, "partial": in_the_making });
    Ok(Outcome { text, json, good: true })
}

fn partials(cache: &Cache) -> Result<Vec<Listed>, Failure> {
    let mut listed = partial::list(cache).map_err(|error| unlisted(cache, &error))?;
    listed.sort_by_key(|one| std::cmp::Reverse(one.used));
    Ok(listed)
}

fn copies(cache: &Cache) -> Result<Vec<CachedCopy>, Failure> {
    evict::list_copies(cache).map_err(|error| unlisted(cache, &error))
}

fn manifests(cache: &Cache) -> Result<Vec<Manifest>, Failure> {
    let names = cache.names(SOURCE).map_err(|error| unlisted(cache, &error))?;
    Ok(names.iter().filter_map(|name| cache.manifest(name)).collect())
}

fn unlisted(cache: &Cache, error: &std::io::Error) -> Failure {
    Failure::new(format!("{}: {}", cache.path.display(), cause(error)))
}

fn of_copy(manifests: &[Manifest], digest: Digest) -> impl Iterator<Item = &Manifest> {
    manifests.iter().filter(move |manifest| Digest::parse(&manifest.digest) == Some(digest))
}
