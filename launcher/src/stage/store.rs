//! The storekeeper: copies an image into the cache that all users share. It has root's user id, because the copies are
//! root's, and nothing else of root: no capability, and the cache as its root directory. It reads the source through the
//! descriptor that the user has opened, so that everything which may be asked of a reader has been asked of the user.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use mizzen_core::failure::cause;
use nix::sys::prctl::{set_name, set_no_new_privs, set_pdeathsig};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::Signal;
use nix::unistd::{Pid, chroot, fchdir, getppid};

use super::audience::Doing;
use super::cache::Cache;
use super::obtain::staged;
use super::shared::Word;
use super::source::{Identity, Original};
use super::{Audience, Place, Staging, Trouble};
use crate::sys;

/// How often the user can see a change.
const PAUSE: Duration = Duration::from_millis(200);

/// What is to be copied.
pub struct Order<'a> {
    /// The path, for people.
    pub path: &'a Path,
    pub file: &'a File,
    /// The boot of the node, and what is mounted where the file lies.
    pub mount: &'a str,
    /// For whom.
    pub user: u32,
    /// Whether a copy that is there is read before it is given out.
    pub verify: bool,
}

/// Finds or makes the copy, and gives it to the launcher, then to the keeper; or says to both why not. The process is the
/// storekeeper's own, and ends with the keeper's.
pub fn run(
    keeper: Pid,
    [launcher, keepers]: [&OwnedFd; 2],
    cache: &Cache,
    order: &Order,
    staging: &Staging,
) -> i32 {
    let made = match confine(keeper, cache) {
        Err(error) => Err(Word::NoCopy(format!("cannot give up root's powers: {}", cause(&error)))),
        Ok(()) => copy(launcher, cache, order, staging),
    };
    let said = match made {
        Ok((file, word)) => word.send(launcher, Some(&file)).and_then(|()| word.send(keepers, Some(&file))),
        Err(word) => word.send(launcher, None).and_then(|()| word.send(keepers, None)),
    };
    i32::from(said.is_err())
}

/// Leaves root's powers behind. With no_new_privs no program could bring them back, and there is none to be seen.
fn confine(keeper: Pid, cache: &Cache) -> std::io::Result<()> {
    set_name(c"mizzen-store")?;
    set_pdeathsig(Signal::SIGKILL)?;
    if getppid() != keeper {
        return Err(std::io::ErrorKind::BrokenPipe.into());
    }
    // The kernel counts the descriptors that all of root's processes have under way, unread by whoever is to get them.
    if let Some(most) =
        std::fs::read_to_string("/proc/sys/fs/nr_open").ok().and_then(|text| text.trim().parse().ok())
    {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
    }
    // Who waits for a copy waits for the disk; others have work to do.
    sys::be_nice();
    fchdir(&cache.dir)?;
    chroot(".")?;
    set_no_new_privs()?;
    sys::drop_capabilities()
}

fn copy(socket: &OwnedFd, cache: &Cache, order: &Order, staging: &Staging) -> Result<(File, Word), Word> {
    let Order { path, file, mount, user, verify } = *order;
    let identity = Identity::of(file).map_err(|error| Word::NoCopy(cause(&error)))?;
    let identity = Identity { mount: mount.to_owned(), ..identity };
    let source = Original { path, file, identity, user: Some(user), verify };
    let mut line = Line { socket, last: Instant::now() };
    match staged(cache, &source, staging, &mut line) {
        Ok((copy, digest, place)) => Ok((copy, Word::Ready(digest, place == Place::Copied))),
        Err(Trouble::Source(failure)) => Err(Word::Unreadable(failure)),
        Err(Trouble::Refused(failure)) => Err(Word::NoCopy(failure.message)),
        Err(Trouble::Cache(why)) => Err(Word::NoCopy(why)),
    }
}

/// To the user.
struct Line<'a> {
    socket: &'a OwnedFd,
    last: Instant,
}

impl Audience for Line<'_> {
    fn advance(&mut self, doing: Doing, done: u64, total: u64) {
        if self.last.elapsed() >= PAUSE {
            self.last = Instant::now();
            // Nobody may be left to be told.
            let _ = Word::Done(doing, done, total).send(self.socket, None);
        }
    }

    fn note(&mut self, text: &str) {
        let _ = Word::Note(text.to_owned()).send(self.socket, None);
    }
}
