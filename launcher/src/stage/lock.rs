//! Locks in a directory of copies. They end with their holder, whatever ends it. Runs as the user on the host, or as root
//! in the shared cache, where no user can open them.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock, fstat, ftruncate, openat, statat};
use rustix::io::Errno;

use super::cache::{Cache, describe};

/// A lock that this process holds.
pub struct Lock(File);

/// What came of trying to get a lock.
pub enum Turn {
    /// It is ours.
    Mine(Lock),
    /// Somebody else has it, who says this.
    Held(String),
}

/// How long a wait sleeps between two looks.
pub const PAUSE: Duration = Duration::from_millis(20);

/// Tries to get a lock once.
pub fn attempt(cache: &Cache, name: &str) -> Result<Turn, String> {
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
            Err(Errno::WOULDBLOCK) => return Ok(Turn::Held(text_of(&file))),
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(failed(errno)),
        }
        // Its last holder may have removed the file in between: then it is no lock any more.
        let named = statat(&cache.dir, name, AtFlags::SYMLINK_NOFOLLOW).ok();
        if named.is_some_and(|named| fstat(&file).is_ok_and(|opened| opened.st_ino == named.st_ino)) {
            let lock = Lock(file);
            lock.say("");
            return Ok(Turn::Mine(lock));
        }
    }
}

/// Waits for a lock.
pub fn patient(cache: &Cache, name: &str, patience: Duration) -> Result<Lock, String> {
    let begin = Instant::now();
    loop {
        match attempt(cache, name)? {
            Turn::Mine(lock) => return Ok(lock),
            Turn::Held(who) if begin.elapsed() > patience => {
                return Err(format!("{} is held by {who}", cache.path.join(name).display()));
            }
            Turn::Held(_) => std::thread::sleep(PAUSE),
        }
    }
}

impl Lock {
    /// Tells those who wait who we are and what we have done so far.
    pub fn say(&self, what: &str) {
        let text = format!("process {} on {}{what}", std::process::id(), mizzen_core::node_name());
        // Nothing depends on it.
        let _ =
            self.0.write_all_at(text.as_bytes(), 0).and_then(|()| Ok(ftruncate(&self.0, text.len() as u64)?));
    }

    /// Tells them how far it is, each second; to be told of every piece that is done.
    pub fn teller(&self, size: u64) -> impl FnMut(u64) + '_ {
        let (mut done, mut said) = (0, Instant::now());
        move |bytes| {
            done += bytes;
            if said.elapsed() > Duration::from_secs(1) {
                said = Instant::now();
                self.say(&format!(": {done} of {size} bytes"));
            }
        }
    }
}

fn text_of(file: &File) -> String {
    let mut text = [0; 200];
    let length = file.read_at(&mut text, 0).unwrap_or(0);
    mizzen_core::failure::quote(&text[..length])
}
