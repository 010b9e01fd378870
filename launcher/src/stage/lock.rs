//! Locks in a directory of copies. They end with their holder, whatever ends it. Runs as the user on the host, or as root
//! in the site cache, where no user can open them.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock, fstat, ftruncate, openat, statat};
use rustix::io::Errno;

use super::cache::{Cache, describe};

/// A lock that this process holds.
pub struct Lock(File);

/// What came of trying to get a lock.
pub enum TryLock {
    /// It is ours.
    Acquired(Lock),
    /// Somebody else has it, who says this.
    Held(String),
}

/// How long a wait sleeps between two looks.
pub const PAUSE: Duration = Duration::from_millis(20);

/// Tries to get a lock once.
pub fn try_lock(cache: &Cache, name: &str) -> Result<TryLock, String> {
    let failed = |errno| format!("{}: cannot lock: {}", cache.path.join(name).display(), describe(errno));
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    loop {
        let file = match openat(&cache.dir, name, flags, Mode::from_raw_mode(0o600)) {
            Ok(file) => File::from(file),
            // Somebody looks whether it is in use (`sys::is_open_elsewhere`): a matter of microseconds.
            Err(Errno::AGAIN) => {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            Err(errno) => return Err(failed(errno)),
        };
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Ok(TryLock::Held(text_of(&file))),
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(failed(errno)),
        }
        // Its last holder may have removed the file in between: then it is no lock any more.
        let named = match statat(&cache.dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => continue,
            named => named.map_err(failed)?,
        };
        if fstat(&file).map_err(failed)?.st_ino == named.st_ino {
            let lock = Lock(file);
            lock.write_holder("");
            return Ok(TryLock::Acquired(lock));
        }
    }
}

/// Waits for a lock.
pub fn lock_with_timeout(cache: &Cache, name: &str, patience: Duration) -> Result<Lock, String> {
    let begin = Instant::now();
    loop {
        match try_lock(cache, name)? {
            TryLock::Acquired(lock) => return Ok(lock),
            TryLock::Held(who) if begin.elapsed() > patience => {
                return Err(format!("{} is held by {who}", cache.path.join(name).display()));
            }
            TryLock::Held(_) => std::thread::sleep(PAUSE),
        }
    }
}

impl Lock {
    /// Tells those who wait who we are and what we have done so far.
    pub fn write_holder(&self, what: &str) {
        let text = format!("process {} on {}{what}", std::process::id(), mizzen_core::node_name());
        // Nothing depends on it.
        let _ =
            self.0.write_all_at(text.as_bytes(), 0).and_then(|()| Ok(ftruncate(&self.0, text.len() as u64)?));
    }

    /// Tells them how far it is, each second; to be told of every piece that is done.
    pub fn progress_writer(&self, size: u64) -> impl FnMut(u64) + '_ {
        let (mut done, mut said) = (0, Instant::now());
        move |bytes| {
            done += bytes;
            if said.elapsed() > Duration::from_secs(1) {
                said = Instant::now();
                self.write_holder(&format!(": {done} of {size} bytes"));
            }
        }
    }
}

fn text_of(file: &File) -> String {
    let mut text = [0; 200];
    let length = file.read_at(&mut text, 0).unwrap_or(0);
    mizzen_core::failure::quote(&text[..length])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::testing::Scratch;

    fn held(cache: &Cache, name: &str) -> Option<String> {
        match try_lock(cache, name).unwrap() {
            TryLock::Acquired(_) => None,
            TryLock::Held(who) => Some(who),
        }
    }

    #[test]
    fn one_at_a_time_and_the_others_know_who() {
        let scratch = Scratch::new();
        let cache = Cache::open(scratch.path()).unwrap();
        let TryLock::Acquired(lock) = try_lock(&cache, "a.lock").unwrap() else {
            panic!("nobody else has it")
        };
        let own = format!("process {} on {}", std::process::id(), mizzen_core::node_name());
        assert_eq!(held(&cache, "a.lock"), Some(own.clone()));
        assert_eq!(held(&cache, "b.lock"), None, "another one");
        lock.write_holder(": 5 of 10 bytes");
        assert_eq!(held(&cache, "a.lock"), Some(own + ": 5 of 10 bytes"));
        drop(lock);
        assert_eq!(held(&cache, "a.lock"), None);
    }

    #[test]
    fn a_wait_has_an_end_and_names_the_holder() {
        let scratch = Scratch::new();
        let cache = Cache::open(scratch.path()).unwrap();
        let lock = lock_with_timeout(&cache, "a.lock", Duration::ZERO).unwrap();
        let Err(why) = lock_with_timeout(&cache, "a.lock", Duration::from_millis(50)) else {
            panic!("it is held")
        };
        assert!(why.contains("a.lock is held by process "), "{why}");
        drop(lock);
        assert!(lock_with_timeout(&cache, "a.lock", Duration::ZERO).is_ok());
    }

    /// The kernel gives a lock back when its holder is killed.
    #[test]
    fn a_lock_ends_with_its_holder() {
        let scratch = Scratch::new();
        let cache = Cache::open(scratch.path()).unwrap();
        drop(try_lock(&cache, "a.lock").unwrap());
        let path = cache.path.join("a.lock");
        let mut holder = std::process::Command::new("flock")
            .args([path.as_os_str(), "sleep".as_ref(), "100".as_ref()])
            .spawn()
            .unwrap();
        while held(&cache, "a.lock").is_none() {
            std::thread::sleep(PAUSE);
        }
        // flock(1) has handed the lock to its child as well.
        let child = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", holder.id())).unwrap();
        for process in child.split_whitespace().map(|pid| pid.parse().unwrap()).chain([holder.id() as i32]) {
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(process), nix::sys::signal::Signal::SIGKILL)
                .unwrap();
        }
        holder.wait().unwrap();
        assert!(lock_with_timeout(&cache, "a.lock", Duration::from_secs(5)).is_ok());
    }

    #[test]
    fn a_file_that_was_removed_is_no_lock_any_more() {
        let scratch = Scratch::new();
        let cache = Cache::open(scratch.path()).unwrap();
        let old = lock_with_timeout(&cache, "a.lock", Duration::ZERO).unwrap();
        std::fs::remove_file(cache.path.join("a.lock")).unwrap();
        assert_eq!(held(&cache, "a.lock"), None, "it is another file");
        drop(old);
    }

    #[test]
    fn what_cannot_be_locked_is_named() {
        let scratch = Scratch::new();
        let cache = Cache::open(scratch.path()).unwrap();
        std::os::unix::fs::symlink("elsewhere", cache.path.join("a.lock")).unwrap();
        let Err(why) = try_lock(&cache, "a.lock") else { panic!("a link is not followed") };
        assert!(why.ends_with("a.lock: cannot lock: Too many levels of symbolic links"), "{why}");
    }
}
