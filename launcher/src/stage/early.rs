//! A broadcast beside the tasks: `stage_broadcast = "early"`, for images that are read through. Runs as the user on the host: in
//! a process beside srun, and in the copiers of the nodes.
//!
//!     srun's machine:  source -> copy in the user's cache here -> sbcast: the copy, then how that ended
//!     each node:       the container reads the original; its copier fills nothing until it knows how that ended: then the
//!                      file, if it is whole and the source is still the same -> the node's cache; else it fills after all
//!
//! Nobody knows the digest when the tasks start, so it comes last, in a file of its own. Such files lie in a directory of all users, so the
//! digest is sealed with what the step alone was told. What is under way when the container or
//! srun ends is of no use to anybody: `delivery::sweep` removes it.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mizzen_core::Digest;
use mizzen_core::failure::cause;
use mizzen_core::staging::Broadcast;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::{set_name, set_pdeathsig};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::{dup2_stderr, getppid};
use rustix::fs::{MemfdFlags, Mode, fchmod, memfd_create};
use rustix::io::Errno;

use super::broadcast::{Ready, Step, not_sent, prepare};
use super::cache::{open_beside, open_place};
use super::copier::become_copier;
use super::delivery::{ABANDONED, Delivery};
use super::fill::{Filler, STALLED, SYNC, Silent};
use super::{
    Requirements, StageError, StagingOptions, cache, changing, evict, lock, open_as_user, with_retries,
};
use crate::sys;
use crate::trace::OrDebug;

/// Ends the name of the file that tells how the sending of another has ended: its digest, or that there is none.
const END: &str = ".end";
/// What it says if the file is not sent.
const FAILED: &str = "failed";
/// No such file is longer.
const END_LIMIT: u64 = 256;
/// How often a node looks what has arrived, in milliseconds.
const LOOK: u16 = 500;

/// What srun's machine sends while the tasks run.
pub struct Sending {
    pub step: Step,
    pub nodes: Option<String>,
    pub staging: StagingOptions,
    pub images: Vec<(Delivery, Requirements)>,
    /// Tells that srun has ended.
    pub srun: OwnedFd,
}

impl Sending {
    /// Sends in a process that is nobody's child: srun need not wait for it, nor hear of its end. It ends with srun.
    pub fn start(self) {
        let unstarted = |error: &std::io::Error| {
            for (delivery, _) in &self.images {
                not_sent(delivery.source(), &cause(error));
            }
        };
        let started = std::io::stderr().as_fd().try_clone_to_owned().and_then(|stderr| {
            sys::spawn_watched(
                &[stderr.as_fd()],
                || {
                    // Notes, and nothing else.
                    let _ = dup2_stderr(&stderr);
                    self.send_all();
                    0
                },
                &[self.srun.as_fd()],
                |sender| {
                    self.wait_for_end(sender.as_raw());
                    // Not waited for yet, so the number is still its own. sbcast ends with it.
                    let _ = kill(sender, Signal::SIGKILL);
                },
                unstarted,
            )?
            .finish()
        });
        if let Err(error) = started {
            unstarted(&error);
        }
    }

    /// Waits until srun or the sender has ended.
    fn wait_for_end(&self, sender: i32) {
        let _ = (set_name(c"mizzen-bcast"), nix::unistd::chdir("/"));
        let sender = sys::end_of(sender).or_debug("the sender's end is not seen");
        let mut ends: Vec<PollFd> = std::iter::once(self.srun.as_fd())
            .chain(sender.as_ref().map(AsFd::as_fd))
            .map(|end| PollFd::new(end, PollFlags::POLLIN))
            .collect();
        while poll(&mut ends, PollTimeout::NONE) == Err(nix::errno::Errno::EINTR) {}
    }

    fn send_all(&self) {
        let _ = SigSet::empty().thread_set_mask();
        let _ = set_pdeathsig(Signal::SIGKILL);
        let _ = (set_name(c"mizzen-bcast"), nix::unistd::chdir("/"));
        for (delivery, requirements) in &self.images {
            let sent = self.send(delivery, requirements);
            if let Err(why) = &sent {
                not_sent(delivery.source(), why);
            }
            let told = self.tell(delivery, &delivery.end_line(sent.as_ref().ok().copied()));
            if let (Ok(_), Err(why)) = (&sent, told) {
                not_sent(delivery.source(), &why);
            }
        }
    }

    fn send(&self, delivery: &Delivery, requirements: &Requirements) -> Result<Digest, String> {
        let path = delivery.source();
        let first = StagingOptions { broadcast: Broadcast::First, ..self.staging.clone() };
        let prepared =
            with_retries(|| open_as_user(path), |opened| prepare(opened, requirements, &first, false));
        let copied = match prepared {
            Ok(Ready::Copy(copied)) => copied,
            Ok(Ready::Later(..) | Ready::Nothing) => return Err(changing(path).message),
            Err(StageError::Cache(why)) => return Err(why),
            Err(StageError::Source(failure) | StageError::Refused(failure)) => return Err(failure.message),
        };
        // The nodes were told of another one.
        if copied.identity != delivery.identity {
            return Err(changing(path).message);
        }
        let target = self.staging.directory.join(delivery.file());
        self.step.transmit(&copied.path(), &target, &mut || {})?;
        self.step.remember(&copied, self.nodes.as_deref());
        Ok(copied.digest)
    }

    /// Sends the nodes a line of text.
    fn tell(&self, delivery: &Delivery, line: &str) -> Result<(), String> {
        let failed = |error: std::io::Error| format!("sbcast: {}", cause(&error));
        let made =
            memfd_create("mizzen-broadcast", MemfdFlags::CLOEXEC).map_err(|errno| failed(errno.into()))?;
        // sbcast gives the file this mode.
        fchmod(&made, Mode::RUSR).map_err(|errno| failed(errno.into()))?;
        let mut file = File::from(made);
        file.write_all(line.as_bytes()).map_err(failed)?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        self.step.transmit(Path::new(&path), &delivery.end(&self.staging.directory), &mut || {})
    }
}

/// The process that has started this one, if it is srun: whoever takes the answer after this call has lived until then.
pub fn end_of_srun() -> Option<OwnedFd> {
    sys::end_of(getppid().as_raw()).or_debug("srun's end could not be seen")
}

/// What a node knows of a file that is sent to it.
enum Arrival {
    UnderWay,
    Whole(Digest),
    Failed,
}

/// A file that is sent to this node while its original is read.
pub struct Awaited<'a> {
    delivery: &'a Delivery,
    directory: &'a Path,
}

impl StagingOptions {
    /// What srun sends of this source, if it has told so.
    pub(super) fn awaited(&self, source: &Path) -> Option<Awaited<'_>> {
        let delivery = self.delivery_of(source).filter(|delivery| delivery.digest.is_none())?;
        Some(Awaited { delivery, directory: &self.directory })
    }
}

impl Awaited<'_> {
    /// Waits until nothing more arrives, and makes what has arrived the copy of the source.
    pub fn receive(&self, filler: &Filler) {
        // What earlier steps have left when they ended is removed first.
        evict::reserve(filler.cache, 0, 0, filler.limits).or_debug("what is left stays for now");
        let mut synced = Instant::now();
        let arrived = self.wait(&mut || {
            std::thread::sleep(Duration::from_millis(LOOK.into()));
            // The sender may have made one here, and others too.
            filler.go_on_from_copy();
            // What is read meanwhile is used, as long as the disk keeps it.
            if synced.elapsed() > SYNC {
                filler.sync();
                synced = Instant::now();
            }
            true
        });
        if let Arrival::Whole(digest) = arrived {
            self.adopt(digest, filler).or_debug("what srun has sent is not used");
        }
        self.remove();
    }

    /// Removes what arrives, in a process that ends with this one: the node has a copy.
    pub fn discard(&self) -> std::io::Result<()> {
        let owner = sys::end_of_self()?;
        sys::spawn_detached(&[owner.as_fd()], || {
            become_copier();
            let mut end = [PollFd::new(owner.as_fd(), PollFlags::POLLIN)];
            self.wait(&mut || poll(&mut end, PollTimeout::from(LOOK)) == Ok(0));
            self.remove();
        })
    }

    /// Looks until it is known how the sending ended, nothing has arrived for very long, or the caller has enough.
    fn wait(&self, goes_on: &mut dyn FnMut() -> bool) -> Arrival {
        let Ok(all) = open_place(self.directory) else { return Arrival::Failed };
        let mut heard = (None, Instant::now());
        loop {
            match self.look(&all) {
                Arrival::UnderWay => {}
                ended => return ended,
            }
            let size = open_beside(&all, self.delivery.file()).ok().flatten();
            let size = size.and_then(|file| Some(file.metadata().ok()?.len()));
            if size != heard.0 {
                heard = (size, Instant::now());
            }
            if heard.1.elapsed() > ABANDONED || !goes_on() {
                return Arrival::Failed;
            }
        }
    }

    fn look(&self, all: &OwnedFd) -> Arrival {
        let name = format!("{}{END}", self.delivery.file());
        let end = match open_beside(all, &name) {
            Ok(Some(end)) => end,
            // Somebody else's: nobody of ours can make one there any more.
            Err(Errno::PERM | Errno::LOOP | Errno::XDEV) => return Arrival::Failed,
            Ok(None) | Err(_) => return Arrival::UnderWay,
        };
        let mut text = String::new();
        let _ = end.take(END_LIMIT).read_to_string(&mut text);
        if !text.ends_with('\n') {
            return Arrival::UnderWay;
        }
        let digest = text.split_once(' ').and_then(|(digest, _)| Digest::parse(digest));
        match digest.filter(|digest| text == self.delivery.end_line(Some(*digest))) {
            Some(digest) => Arrival::Whole(digest),
            None => Arrival::Failed,
        }
    }

    fn adopt(&self, digest: Digest, filler: &Filler) -> Result<(), String> {
        let Filler { cache, source, .. } = filler;
        if !self.delivery.identity.is_same_elsewhere(&source.identity) {
            return Err("it is of another original".to_owned());
        }
        let name = format!("{}{}.lock", cache::SOURCE, source.identity.key());
        let lock = lock::lock_with_timeout(cache, &name, STALLED)?;
        if cache.digest_of(&source.identity).is_none() {
            self.delivery.adopt(digest, self.directory, cache, source, &lock, &mut Silent)?;
            // Others may have copied at the same time.
            evict::reserve(cache, 0, 0, filler.limits).or_debug("the copies exceed their limits for now");
        }
        Ok(())
    }

    fn remove(&self) {
        for path in [self.directory.join(self.delivery.file()), self.delivery.end(self.directory)] {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Delivery {
    /// The file that tells how the sending ended.
    fn end(&self, directory: &Path) -> PathBuf {
        directory.join(format!("{}{END}", self.file()))
    }

    /// What is in that file: the digest of what has been sent, with its seal.
    fn end_line(&self, sent: Option<Digest>) -> String {
        match sent.and_then(|digest| Some((digest, self.seal(digest)?))) {
            Some((digest, seal)) => format!("{digest} {seal}\n"),
            None => format!("{FAILED}\n"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::image::testing::Scratch;
    use crate::stage::FileIdentity;

    #[test]
    fn only_a_whole_line_tells_how_the_sending_ended() {
        let scratch = Scratch::new();
        let identity = FileIdentity::of(File::open("/proc/self/exe").unwrap()).unwrap();
        let delivery = Delivery::new("early-7-", Path::new("/image"), identity, None).unwrap();
        assert!(delivery.file().contains("-broadcast-early-7-"));
        let awaited = Awaited { delivery: &delivery, directory: scratch.path() };
        let look = || awaited.look(&open_place(scratch.path()).unwrap());
        assert!(matches!(look(), Arrival::UnderWay));
        let digest = Digest::new([7; 32]);
        let (end, line) = (delivery.end(scratch.path()), delivery.end_line(Some(digest)));
        let write = |text: &str, mode: u32| {
            std::fs::write(&end, text).unwrap();
            std::fs::set_permissions(&end, PermissionsExt::from_mode(mode)).unwrap();
        };
        // Of another broadcast, which somebody has seen.
        let other = Delivery::new("", Path::new("/image"), delivery.identity.clone(), None).unwrap();
        for (text, is_over, found) in [
            (String::new(), false, None),
            (digest.to_string(), false, None),
            (line.trim_end().to_owned(), false, None),
            (line.clone(), true, Some(digest)),
            (format!("{digest}\n"), true, None),
            (line.replace("sha256:07", "sha256:08"), true, None),
            (other.end_line(Some(digest)), true, None),
            (format!("{FAILED}\n"), true, None),
        ] {
            write(&text, 0o600);
            let whole = match look() {
                Arrival::Whole(digest) => Some(digest),
                Arrival::UnderWay | Arrival::Failed => None,
            };
            assert_eq!((matches!(look(), Arrival::UnderWay), whole), (!is_over, found), "{text:?}");
        }
        // What others can write is not the user's word, nor is what is not their own: a link can be anybody's. Nothing comes there any more.
        write(&line, 0o664);
        assert!(matches!(look(), Arrival::Failed));
        std::fs::rename(&end, scratch.path().join("other")).unwrap();
        std::os::unix::fs::symlink("other", &end).unwrap();
        assert!(matches!(look(), Arrival::Failed));
        awaited.remove();
        assert!(end.symlink_metadata().is_err());
    }
}
