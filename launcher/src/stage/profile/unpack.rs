//! Unpacks the files that starts have read, into a new layer. Runs as the user on the host, in a process of its own at low
//! priority, as long as the container runs.
//!
//! That process may write to the user's directory, so it inflates nothing: all that is read of the image is read by children under
//! the file server's filter. They tell what is in the image, and write into files that are open; they can open no others.
//!
//! Steps may be shorter than this takes, and their end kills everything. So what is done is written down (`journal`), and the next
//! step goes on from there.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, PipeReader, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use mizzen_squashfs::{Image, Inode, Kind, fuse};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use rustix::fs::{
    AtFlags, FlockOperation, Mode, OFlags, Timespec, Timestamps, fchmod, flock, fstat, fstatvfs, futimens,
    mkdirat, openat, renameat, statat, unlinkat,
};

use super::choose::{Plan, Planned, choose, find};
use super::layer::{
    self, FILES_NAME, JOURNAL, Journal, Layer, MAX_LAYERS, Manifest, UNPACKING, Unpacked, What,
};
use super::skip::Why;
use super::{StartProfile, overlay, parse_reads};
use crate::stage::cache::Cache;
use crate::stage::evict;
use crate::stage::lock::{self, TryLock};
use crate::stage::partial::boot;
use crate::stage::{ROOM_LOCK, fs_type};
use crate::sys;

/// Less is read faster than it is looked after.
const LEAST: u64 = 16 << 20;
/// Files that are open at once,
const BATCH: usize = 128;
/// and bytes that one child writes: a step that ends meanwhile loses no more.
const PART: u64 = 32 << 20;
/// What is written at once.
const PIECE: usize = 1 << 20;
/// What a child says of the files and their directories is not longer.
const PLAN_LIMIT: usize = 32 << 20;
/// Making room is a matter of milliseconds.
const ROOM_PATIENCE: Duration = Duration::from_secs(10);
/// The last that a child says: this, or the number of an error.
const DONE: u8 = 0;
const FULL: u8 = libc::ENOSPC as u8;
const OVER_QUOTA: u8 = libc::EDQUOT as u8;
/// An error without a number.
const UNKNOWN: u8 = u8::MAX;

/// Makes one more layer, or goes on with it. `end` can be read when nobody needs it any more.
pub fn unpack(profile: &StartProfile, cache: &Cache, image: &Image, end: &OwnedFd) -> io::Result<()> {
    // A disk that is none has nothing to give; and what is unpacked is believed until the node is booted.
    if boot().is_empty() || fs_type::is_memory(&cache.dir) || fs_type::is_network(&cache.dir, &[]) {
        return Ok(());
    }
    let lock = lock::try_lock(cache, &format!("{}{}.lock", super::PROFILE, profile.key));
    let TryLock::Acquired(_lock) = lock.map_err(io::Error::other)? else { return Ok(()) };
    let layers = Layer::find(cache, &profile.key);
    if layers.len() >= MAX_LAYERS {
        return Ok(());
    }
    let begun = Begun::find(cache, format!("{UNPACKING}{}", profile.key));
    let text = profile.read(cache);
    // Another one may have made what this one was started for.
    if !super::lacking(&text, &layers).are_worthwhile() {
        layer::remove(cache, &begun.name);
        return Ok(());
    }
    let made = begun.finish(profile, cache, image, &layers, &text, end);
    let is_full = |error: &io::Error| matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT));
    let why = match &made {
        Ok(why) => *why,
        Err(error) => is_full(error).then_some(Why::Full),
    };
    if let Some(why) = why {
        layer::remove(cache, &begun.name);
        profile.skip(cache, &text, &layers, why);
    }
    made.map(drop)
}

/// A layer of which a part may have been made.
struct Begun {
    name: String,
    /// The files that are there, whole or from their beginning on.
    done: HashMap<Vec<u8>, Unpacked>,
}

impl Begun {
    /// Makes the layer of what starts have read. Tells why, if there is to be none.
    fn finish(
        &self,
        profile: &StartProfile,
        cache: &Cache,
        image: &Image,
        layers: &[Layer],
        text: &[u8],
        end: &OwnedFd,
    ) -> io::Result<Option<Why>> {
        let plan = || match parse_reads(text) {
            Some(reads) => choose(image, reads, &self.done, layers),
            None => Plan::default(),
        };
        let told = confined(image, end, |say| say.write_all(&plan().text()))?;
        let plan =
            Plan::parse(&told).ok_or_else(|| io::Error::other("what is in the image makes no sense"))?;
        if plan.size() >= LEAST && overlay::is_refused(&cache.dir) {
            return Ok(Some(Why::NoOverlay));
        }
        let directory = match self.make_room(profile, cache, &plan)? {
            Ok(directory) => directory,
            Err(why) => return Ok(Some(why)),
        };
        let made = make(image, &plan, &directory, self.done.clone(), end).and_then(|()| {
            if !profile.is_unchanged(image) {
                return Err(io::Error::other("the image was changed meanwhile"));
            }
            Ok(renameat(&cache.dir, &*self.name, &cache.dir, layer::name(&profile.key, layers.len()))?)
        });
        // What was done stays for the next one, if only the time was too short.
        if made.as_ref().is_err_and(|error| error.kind() != io::ErrorKind::Interrupted) {
            layer::remove(cache, &self.name);
        }
        made.map(|()| None)
    }

    /// What earlier processes have done since the node was booted: what they wrote before may not have reached the disk.
    fn find(cache: &Cache, name: String) -> Begun {
        let done = || -> Option<HashMap<Vec<u8>, Unpacked>> {
            let directory = open_directory(&cache.dir, name.as_bytes()).ok()?;
            let journal = Journal::read(&directory)?;
            let files = open_directory(&directory, FILES_NAME.as_bytes()).ok()?;
            // Of a file that is not whole, what follows was written by a child that was killed.
            let is_there = |file: &Unpacked| {
                statat(&files, relative(&file.path), AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|stat| {
                    let now = Unpacked::new(&stat, &file.path);
                    layer::is_own_file(&stat)
                        && (now == *file
                            || file.what == What::Part && now.ino == file.ino && now.size >= file.size)
                })
            };
            (journal.boot == boot())
                .then(|| journal.files.into_iter().filter(is_there).collect::<Vec<_>>())
                .map(|files| files.into_iter().map(|file| (file.path.clone(), file)).collect())
        };
        match done() {
            Some(done) => Begun { name, done },
            None => {
                layer::remove(cache, &name);
                Begun { name, done: HashMap::new() }
            }
        }
    }

    /// Opens or makes its directory, and has room for it among the user's unpacked files. Copies of images stay. It may not be worth
    /// it, or there may be no room.
    fn make_room(
        &self,
        profile: &StartProfile,
        cache: &Cache,
        plan: &Plan,
    ) -> io::Result<Result<OwnedFd, Why>> {
        let size = plan.size();
        let _lock = lock::lock_with_timeout(cache, ROOM_LOCK, ROOM_PATIENCE).map_err(io::Error::other)?;
        // What was found to be changed, or of before the node was booted, and what killed processes have left.
        evict::sweep(cache);
        if size < LEAST {
            return Ok(Err(Why::TooLittle));
        }
        let disk = fstatvfs(&cache.dir)?;
        let all = disk.f_blocks.saturating_mul(disk.f_frsize);
        let limit = profile.max_size.map_or(u64::MAX, |amount| amount.of(all));
        let keep = profile.keep_free.map_or(0, |amount| amount.of(all));
        if size > limit {
            return Ok(Err(Why::NoRoom));
        }
        let directory = match open_directory(&cache.dir, self.name.as_bytes()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                mkdirat(&cache.dir, &*self.name, Mode::RWXU)?;
                open_directory(&cache.dir, self.name.as_bytes())?
            }
            opened => opened?,
        };
        // Whoever makes room leaves it alone as long as we live.
        flock(&directory, FlockOperation::NonBlockingLockShared)?;
        let done: u64 = self.done.values().map(|file| file.size).sum();
        let needed = size.saturating_sub(done).saturating_add(keep);
        let others = || {
            let others = layer::list(cache).into_iter().filter(|layer| layer.name != self.name);
            others.fold(0, |sum: u64, layer| sum.saturating_add(layer.size))
        };
        let free = || fstatvfs(&cache.dir).map_or(0, |disk| disk.f_bavail.saturating_mul(disk.f_frsize));
        let has_room = || others().saturating_add(size) <= limit && free() >= needed;
        // What cannot have room in any case costs no other start its files.
        if free().saturating_add(others()) < needed {
            return Ok(Err(Why::NoRoom));
        }
        layer::remove_all(cache, has_room);
        if !has_room() {
            return Ok(Err(Why::NoRoom));
        }
        // Before anybody else makes room: it says how much there will be.
        let files: Vec<Unpacked> = self.done.values().cloned().collect();
        Journal { boot: boot(), size, files }.write(&directory)?;
        Ok(Ok(directory))
    }
}

fn make(
    image: &Image,
    plan: &Plan,
    layer: &OwnedFd,
    mut done: HashMap<Vec<u8>, Unpacked>,
    end: &OwnedFd,
) -> io::Result<()> {
    make_directory(layer, FILES_NAME.as_bytes())?;
    let files = open_directory(layer, FILES_NAME.as_bytes())?;
    for directory in plan.directories.keys().filter(|path| *path != b"/") {
        make_directory(&files, relative(directory))?;
    }
    let mut journal = Journal::append(layer)?;
    for batch in batches(plan, &done) {
        let opened: Vec<File> = batch.iter().map(|part| part.open(&files)).collect::<io::Result<_>>()?;
        confined(image, end, |_| fill(image, &batch, &opened))?;
        for (Part { file, from, to }, opened) in batch.iter().zip(&opened) {
            // What is dirty when the step ends, others on the node wait for.
            if to - from >= PIECE as u64 {
                sys::start_writeback(opened, *from, to - from);
            }
            let is_part = *to < file.size;
            if !is_part {
                look_like(opened, file.mode, file.mtime)?;
            }
            let stat = fstat(opened)?;
            if u64::try_from(stat.st_size) != Ok(*to) {
                return Err(io::Error::other("a file has another size than the image says"));
            }
            let what = if is_part { What::Part } else { What::File };
            let unpacked = Unpacked { what, ..Unpacked::new(&stat, &file.path) };
            journal.write_all(&unpacked.line())?;
            done.insert(file.path.clone(), unpacked);
        }
    }
    // Those below first: what is made in a directory changes its time.
    let mut manifest: Vec<Unpacked> = plan.files.iter().filter_map(|file| done.remove(&file.path)).collect();
    for (path, planned) in plan.directories.iter().rev() {
        let name = if path == b"/" { &b"."[..] } else { relative(path) };
        let directory = open_directory(&files, name)?;
        look_like(&directory, planned.mode, planned.mtime)?;
        manifest.push(Unpacked::new(&fstat(&directory)?, path));
    }
    Manifest { boot: boot(), files: manifest }.write(layer)?;
    Ok(unlinkat(layer, JOURNAL, AtFlags::empty())?)
}

/// A part of a file that a child writes.
struct Part<'a> {
    file: &'a Planned,
    from: u64,
    to: u64,
}

impl Part<'_> {
    /// Opens the file at the place where it goes on.
    fn open(&self, files: &OwnedFd) -> io::Result<File> {
        let path = relative(&self.file.path);
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        if self.from == 0 {
            // One that was not finished, and of which nothing is known.
            let _ = unlinkat(files, path, AtFlags::empty());
            let new = flags | OFlags::CREATE | OFlags::EXCL;
            return Ok(openat(files, path, new, Mode::RUSR | Mode::WUSR)?.into());
        }
        let mut file = File::from(openat(files, path, flags, Mode::empty())?);
        file.set_len(self.from)?;
        file.seek(SeekFrom::Start(self.from))?;
        Ok(file)
    }
}

/// What is to be written, each with what one child writes.
fn batches<'a>(plan: &'a Plan, done: &HashMap<Vec<u8>, Unpacked>) -> Vec<Vec<Part<'a>>> {
    let mut batches: Vec<Vec<Part>> = Vec::new();
    let mut size = u64::MAX;
    for file in &plan.files {
        let known = done.get(&file.path);
        let mut from = known.map_or(0, |known| known.size.min(file.size));
        let mut is_done = known.is_some_and(|known| known.what == What::File);
        while !is_done {
            let to = file.size.min(from.saturating_add(PART));
            size = size.saturating_add(to - from);
            match batches.last_mut().filter(|batch| size <= PART && batch.len() < BATCH) {
                Some(batch) => batch.push(Part { file, from, to }),
                None => {
                    size = to - from;
                    batches.push(vec![Part { file, from, to }]);
                }
            }
            from = to;
            is_done = from == file.size;
        }
    }
    batches
}

/// What a child does: it inflates parts of files into those that are open.
fn fill(image: &Image, batch: &[Part], opened: &[File]) -> io::Result<()> {
    for (Part { file, from, to }, mut opened) in batch.iter().zip(opened) {
        let inode: Inode = find(image, &file.path).ok_or(io::ErrorKind::NotFound)?;
        if !matches!(inode.kind, Kind::File(_)) || inode.size() != file.size {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut at = *from;
        while at < *to {
            let length = usize::try_from(to - at).unwrap_or(PIECE).min(PIECE);
            let pieces = image.read(&inode, at, length).map_err(io::Error::from)?;
            for slice in pieces.iter().flat_map(|piece| piece.slices()) {
                opened.write_all(slice)?;
                at += slice.len() as u64;
            }
        }
    }
    Ok(())
}

/// Reads the image in a child under the filter; gives what the child says. It ends with this process, and when nobody needs it any
/// more: whatever has become of it, nobody waits for it then.
fn confined(
    image: &Image,
    end: &OwnedFd,
    work: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<Vec<u8>> {
    let (from_child, to_parent) = io::pipe()?;
    let child = sys::spawn_child(|| {
        let mut say = &to_parent;
        let done = set_pdeathsig(Signal::SIGKILL)
            .map_err(io::Error::from)
            .and_then(|()| fuse::filter::confine(image.source().system_calls()))
            .and_then(|()| work(&mut say));
        let end = match &done {
            Ok(()) => DONE,
            Err(error) => {
                error.raw_os_error().and_then(|number| u8::try_from(number).ok()).unwrap_or(UNKNOWN)
            }
        };
        i32::from(say.write_all(&[end]).is_err() || done.is_err())
    })?;
    drop(to_parent);
    let said = listen(from_child, end);
    let _ = kill(child, Signal::SIGKILL);
    let _ = waitpid(child, None);
    let mut said = said?;
    match said.pop() {
        Some(DONE) => Ok(said),
        Some(error @ (FULL | OVER_QUOTA)) => Err(io::Error::from_raw_os_error(error.into())),
        _ => Err(io::Error::other("the image cannot be read")),
    }
}

/// What a child says, until it has ended, or nobody needs it.
fn listen(mut child: PipeReader, end: &OwnedFd) -> io::Result<Vec<u8>> {
    let mut said = Vec::new();
    let mut piece = [0; 64 << 10];
    loop {
        let mut polled =
            [PollFd::new(child.as_fd(), PollFlags::POLLIN), PollFd::new(end.as_fd(), PollFlags::POLLIN)];
        match poll(&mut polled, PollTimeout::NONE) {
            Err(nix::errno::Errno::EINTR) => continue,
            ready => ready?,
        };
        // Nobody writes into the pipe; its end is that of the container's watcher.
        if polled[1].any() != Some(false) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        match child.read(&mut piece)? {
            0 => return Ok(said),
            length => said.extend_from_slice(piece.get(..length).unwrap_or_default()),
        }
        if said.len() > PLAN_LIMIT {
            return Err(io::Error::other("too much is said of the image"));
        }
    }
}

fn relative(path: &[u8]) -> &[u8] {
    path.strip_prefix(b"/").unwrap_or(path)
}

fn make_directory(parent: impl AsFd, name: &[u8]) -> io::Result<()> {
    match mkdirat(parent, name, Mode::RWXU) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

fn open_directory(parent: impl AsFd, name: &[u8]) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(parent, name, flags, Mode::empty())?)
}

/// Gives a file the mode and the time that the image says. (The owner is the user in any case.)
fn look_like(file: impl AsFd, mode: u32, mtime: u32) -> io::Result<()> {
    let time = Timespec { tv_sec: mtime.into(), tv_nsec: 0 };
    fchmod(&file, Mode::from_raw_mode(mode))?;
    Ok(futimens(&file, &Timestamps { last_access: time, last_modification: time })?)
}
