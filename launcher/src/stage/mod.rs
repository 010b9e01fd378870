//! Staging: an image on a network file system is copied to the node once, and used from there. Runs as the user on the
//! host; where the copies are root's, `shared.rs` asks the keeper, whose storekeeper runs `staged` as well.
//!
//!     source, opened -> known, and its copy is good? ----------------------> the copy
//!                    -> else, one process at a time: what srun has sent, if it has; room, copy, publish --> the copy
//!                    -> no room, no lock, no cache: a note --------------> the source
//!
//! The source is opened first in any case, so nobody uses a copy of what he cannot read.

mod audience;
pub mod broadcast;
pub mod cache;
pub mod commands;
mod copy;
mod lock;
mod place;
mod room;
pub mod shared;
pub mod store;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use mizzen_core::failure::cause;
use mizzen_core::staging::Policy;
use mizzen_core::{Config, Digest, Failure};
use rustix::io::Errno;

use crate::image::{self, Kind, Opened, shown};
use audience::{Audience, Terminal, node, note, progress};
use broadcast::Delivery;
use cache::{Cache, Identity, Manifest, describe};
use copy::{CopyError, copy};
use lock::{Lock, Turn};
pub use room::Limits;
use shared::Keeper;

/// What the site and the user say about staging.
#[derive(Clone, Debug, Default)]
pub struct Staging {
    /// When to copy.
    pub policy: Policy,
    directory: PathBuf,
    limits: Limits,
    network: Vec<String>,
    /// What srun has sent to this node.
    deliveries: Vec<Delivery>,
    /// Who makes copies that all users share, if that is how it is done here.
    keeper: Option<Arc<Keeper>>,
    /// Whether the keeper is asked for a mount too, as the site wants it.
    mounts: bool,
}

impl Staging {
    /// The site's settings with this policy.
    pub fn new(policy: Policy, config: &Config) -> Result<Staging, Failure> {
        let limits = Limits::new(config)?;
        let (directory, network) = (config.stage_directory.clone(), config.network_file_systems.clone());
        Ok(Staging {
            policy,
            directory,
            limits,
            network,
            deliveries: Vec::new(),
            keeper: None,
            mounts: false,
        })
    }

    /// The same with a keeper, for the root of a container.
    pub fn set_keeper(&mut self, keeper: Keeper) {
        (self.keeper, self.mounts) = (Some(Arc::new(keeper)), true);
    }

    /// The keeper, if it is needed. What srun sends goes into the user's own folder, and is there for the next step.
    pub fn keeper(&self) -> Option<&Keeper> {
        self.keeper.as_deref().filter(|keeper| self.policy != Policy::Broadcast || keeper.must_mount())
    }

    /// The same for what is mounted in a container beside its root.
    pub fn for_data(&self) -> Staging {
        Staging { mounts: false, ..self.clone() }
    }

    /// Uses everything where it is.
    pub fn never() -> Staging {
        Staging { policy: Policy::Never, ..Staging::default() }
    }
}

/// An image, ready to be used.
pub struct Ready {
    /// The source as it was recognised, with the file that is to be used.
    pub opened: Opened,
    /// Its digest, if somebody had a reason to compute it.
    pub digest: Option<Digest>,
    /// Where it is used.
    pub place: Place,
}

/// Where an image is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Where it was found.
    Source,
    /// A copy that was there.
    Cache,
    /// A copy that has just been made.
    Copied,
}

/// Why there is no copy.
enum Trouble {
    /// The source cannot be read, or changes: perhaps not the next time.
    Source(Failure),
    /// The cache cannot be used; the source can.
    Cache(String),
    /// It is not what was asked for.
    Refused(Failure),
}

/// A source that changes, or a file server that forgets, gets so many chances.
const ATTEMPTS: u32 = 3;
/// Who waits for another's copy says so after a while,
const PATIENT: Duration = Duration::from_secs(5);
/// and gives up when that makes no progress for so long.
const STALLED: Duration = Duration::from_secs(60);

/// Finds, copies and checks an image as is wanted. If `pin` is given it has that content, or this fails.
pub fn image(path: &Path, pin: Option<Digest>, staging: &Staging) -> Result<Ready, Failure> {
    let ready = repeatedly(path, |opened| once(opened, pin, staging));
    staging.discard(path);
    ready.map_err(|trouble| match trouble {
        Trouble::Cache(why) => Failure::new(why),
        Trouble::Refused(failure) => failure.about(shown(path)),
        Trouble::Source(failure) => failure,
    })
}

/// Opens an image and does something with it, a few times if the source makes trouble.
fn repeatedly<T>(path: &Path, work: impl Fn(Opened) -> Result<T, Trouble>) -> Result<T, Trouble> {
    let mut attempt = 0;
    loop {
        attempt += 1;
        match work(image::identify(path).map_err(Trouble::Source)?) {
            Err(Trouble::Source(_)) if attempt < ATTEMPTS => {
                std::thread::sleep(Duration::from_millis(200) * attempt);
            }
            done => return done,
        }
    }
}

fn once(opened: Opened, pin: Option<Digest>, staging: &Staging) -> Result<Ready, Trouble> {
    let place = shown(&opened.path);
    if opened.kind == Kind::Directory {
        return match pin {
            None => Ok(Ready { opened, digest: None, place: Place::Source }),
            Some(_) => Err(Trouble::Refused(Failure::new("a directory has no digest"))),
        };
    }
    let staged = match staging.keeper() {
        Some(keeper) => {
            wanted_of(keeper, &opened.file, staging).then(|| keeper.stage(&opened, staging.mounts))
        }
        None => match wanted(&opened.file, staging) {
            Ok(cache) => cache.map(|cache| {
                let source = Original::of_user(&opened)?;
                staged(&cache, &source, staging, &mut Terminal::new(&opened.path))
            }),
            Err(failure) => {
                note(&format!("{place} is used where it is: {failure}"), failure.hint.as_deref());
                None
            }
        },
    };
    if let Some(Ok((.., Place::Copied))) = staged
        && !is_still_there(&opened)
    {
        return Err(Trouble::Source(changing(&opened.path)));
    }
    let ready = match staged {
        Some(Ok((file, digest, place))) => {
            Ready { opened: Opened { file, ..opened }, digest: Some(digest), place }
        }
        Some(Err(Trouble::Cache(why))) => {
            note(&format!("{place} is used where it is: {why}"), None);
            in_place(opened, pin)?
        }
        Some(Err(trouble)) => return Err(trouble),
        None => in_place(opened, pin)?,
    };
    if let Some(found) = ready.digest {
        check_pin(pin, found)?;
    }
    if let Some(keeper) = staging.keeper().filter(|_| staging.mounts) {
        keeper.mount_copy();
    }
    Ok(ready)
}

fn check_pin(pin: Option<Digest>, found: Digest) -> Result<(), Trouble> {
    match pin {
        Some(pin) if pin != found => {
            let failure = Failure::new(format!("its content is {found}, not {pin}"));
            Err(Trouble::Refused(
                failure.hint("it is another image than the one that was asked for by its digest"),
            ))
        }
        _ => Ok(()),
    }
}

/// Whether a file still has the name by which it was opened.
fn is_still_there(opened: &Opened) -> bool {
    matches!((Identity::of(&opened.file), Identity::at(&opened.path)), (Ok(one), Ok(other)) if one == other)
}

/// Whether the keeper is to copy this file. The kernel mounts nothing but copies.
fn wanted_of(keeper: &Keeper, file: &File, staging: &Staging) -> bool {
    match staging.policy {
        Policy::Never => false,
        Policy::Auto => staging.mounts && keeper.must_mount() || place::is_network(file, &staging.network),
        Policy::Always | Policy::Broadcast => true,
    }
}

/// The user's cache, if a copy of this file is wanted.
fn wanted(file: &File, staging: &Staging) -> Result<Option<Cache>, Failure> {
    match staging.policy {
        Policy::Never => return Ok(None),
        Policy::Auto if !place::is_network(file, &staging.network) => return Ok(None),
        Policy::Auto | Policy::Always | Policy::Broadcast => {}
    }
    let cache = Cache::open(&staging.directory)?;
    // Diskless nodes: a copy would go over the same network, or take the job's memory.
    let useless = place::is_network(&cache.dir, &staging.network) || place::is_memory(&cache.dir);
    Ok((staging.policy != Policy::Auto || !useless).then_some(cache))
}

/// The image where it is; read as a whole only if its content matters.
fn in_place(opened: Opened, pin: Option<Digest>) -> Result<Ready, Trouble> {
    let digest = pin.map(|_| digest(&opened)).transpose().map_err(Trouble::Source)?;
    Ok(Ready { opened, digest, place: Place::Source })
}

/// Computes the digest of an image.
pub fn digest(opened: &Opened) -> Result<Digest, Failure> {
    let mut progress = progress(&opened.path, "computing the digest", opened.size);
    let computed = copy(&opened.file, None, opened.size, &mut |bytes| progress.advance(bytes));
    computed.map_err(|error| match error {
        CopyError::Source(error) | CopyError::Target(error) => unreadable(&opened.path, &error),
        CopyError::Shorter => changing(&opened.path),
    })
}

/// A file that is to be copied.
pub struct Original<'a> {
    /// Its path, for people.
    path: &'a Path,
    file: &'a File,
    identity: Identity,
    /// For whom root copies it.
    user: Option<u32>,
}

impl<'a> Original<'a> {
    /// One that the user copies for himself.
    fn of_user(opened: &'a Opened) -> Result<Original<'a>, Trouble> {
        let identity =
            Identity::of(&opened.file).map_err(|error| Trouble::Source(unreadable(&opened.path, &error)))?;
        Ok(Original { path: &opened.path, file: &opened.file, identity, user: None })
    }
}

/// The copy of an image: the one that is there, the one that somebody else is making, or our own.
fn staged(
    cache: &Cache,
    source: &Original,
    staging: &Staging,
    tell: &mut dyn Audience,
) -> Result<(File, Digest, Place), Trouble> {
    let identity = &source.identity;
    let name = format!("{}{}.lock", cache::SOURCE, identity.key());
    let mut heard = (String::new(), Instant::now());
    let (begin, mut told) = (Instant::now(), false);
    loop {
        if let Some((file, digest)) = cache.find(identity) {
            return Ok((file, digest, Place::Cache));
        }
        match lock::attempt(cache, &name).map_err(Trouble::Cache)? {
            Turn::Mine(lock) => {
                // Its last holder may have made the copy since we looked.
                if let Some((file, digest)) = cache.find(identity) {
                    return Ok((file, digest, Place::Cache));
                }
                let made = match staging.adopt(cache, source, &lock, tell) {
                    Some(adopted) => Ok(adopted),
                    None => make(cache, source, &staging.limits, &lock, tell),
                };
                let (file, digest) = made?;
                // Others may have copied at the same time.
                let _ = room::make(cache, 0, 0, &staging.limits);
                return Ok((file, digest, Place::Copied));
            }
            Turn::Held(who) if who != heard.0 => heard = (who, Instant::now()),
            Turn::Held(who) if heard.1.elapsed() > STALLED => {
                return Err(Trouble::Cache(format!("{who} is copying it and makes no progress")));
            }
            Turn::Held(who) => {
                if !told && begin.elapsed() > PATIENT {
                    tell.note(&format!("{} is being copied to the node by {who}", shown(source.path)));
                    told = true;
                }
                std::thread::sleep(lock::PAUSE);
            }
        }
    }
}

/// Copies the image. The caller has the source's lock.
fn make(
    cache: &Cache,
    source: &Original,
    limits: &Limits,
    lock: &Lock,
    tell: &mut dyn Audience,
) -> Result<(File, Digest), Trouble> {
    let identity = &source.identity;
    settle(identity);
    room::make(cache, identity.size, 0, limits).map_err(Trouble::Cache)?;
    let (unfinished, digest) = match fill(cache, source, lock, tell) {
        Err(Full::Full(_)) => {
            // Another user's files, or a quota: let our own go, once.
            room::make(cache, 0, identity.size, limits).map_err(Trouble::Cache)?;
            fill(cache, source, lock, tell)
        }
        other => other,
    }
    .map_err(|error| match error {
        Full::Full(why) => Trouble::Cache(why),
        Full::Other(trouble) => trouble,
    })?;
    let unpublished = |errno| Trouble::Cache(format!("{}: {}", cache.path.display(), describe(errno)));
    let file = cache.publish(unfinished, digest, identity.size).map_err(unpublished)?;
    conclude(cache, source, digest, tell);
    Ok((file, digest))
}

/// Remembers a copy. Without that the next start copies again; this one has what it needs.
fn conclude(cache: &Cache, source: &Original, digest: Digest, tell: &mut dyn Audience) {
    let manifest = Manifest::new(source.path, &source.identity, digest, source.user);
    if let Err(error) = cache.write_manifest(&manifest) {
        tell.note(&format!("{}: cannot remember the copy: {}", cache.path.display(), cause(&error)));
    }
}

enum Full {
    /// No space: there may be some after making room.
    Full(String),
    Other(Trouble),
}

/// Fills a new file with the source's content, and sees that the source was the same all the time.
fn fill(
    cache: &Cache,
    source: &Original,
    lock: &Lock,
    tell: &mut dyn Audience,
) -> Result<(cache::Unfinished, Digest), Full> {
    let identity = &source.identity;
    let failed = |error: io::Error| {
        let why = format!("{}: cannot write the copy: {}", cache.path.display(), cause(&error));
        match Errno::from_io_error(&error) {
            Some(Errno::NOSPC | Errno::DQUOT) => Full::Full(why),
            _ => Full::Other(Trouble::Cache(why)),
        }
    };
    let unfinished = cache.begin().map_err(|errno| failed(errno.into()))?;
    let (mut done, mut say) = (0, lock.teller(identity.size));
    let digest = copy(source.file, Some(&unfinished.file), identity.size, &mut |bytes| {
        done += bytes;
        tell.copied(done, identity.size);
        say(bytes);
    });
    let digest = digest.map_err(|error| match error {
        CopyError::Target(error) => failed(error),
        CopyError::Source(error) => Full::Other(Trouble::Source(unreadable(source.path, &error))),
        CopyError::Shorter => Full::Other(Trouble::Source(changing(source.path))),
    })?;
    let now = Identity::of(source.file).map(|now| Identity { boot: identity.boot.clone(), ..now });
    if !now.is_ok_and(|now| now == *identity) {
        return Err(Full::Other(Trouble::Source(changing(source.path))));
    }
    Ok((unfinished, digest))
}

/// A file that is written within the same tick of its file system's clock keeps its times. So the copy begins when that
/// tick is over: then every later change can be seen. Some servers count whole seconds.
fn settle(identity: &Identity) {
    let (seconds, nanoseconds) = identity.ctime;
    let tick = if nanoseconds == 0 { Duration::from_millis(1100) } else { Duration::from_millis(50) };
    let Ok(seconds) = u64::try_from(seconds) else { return };
    let changed = SystemTime::UNIX_EPOCH + Duration::new(seconds, u32::try_from(nanoseconds).unwrap_or(0));
    // A time in the future tells only that the clocks differ.
    if let Ok(age) = SystemTime::now().duration_since(changed) {
        std::thread::sleep(tick.saturating_sub(age));
    }
}

fn unreadable(path: &Path, error: &io::Error) -> Failure {
    Failure::new(format!("{}: cannot read: {}", shown(path), cause(error)))
}

fn changing(path: &Path) -> Failure {
    Failure::new(format!("{}: it changes while it is read", shown(path)))
        .hint("start the job when the image is complete; put a new one in its place with mv")
}
