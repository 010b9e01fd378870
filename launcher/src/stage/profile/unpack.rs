//! Unpacks the files that starts have read, into a new layer. Runs as the user on the host, in a process of its own at low
//! priority, as long as the container runs.
//!
//! The bytes of the image are inflated by children under the file server's filter: they have the files open that they write, and
//! can open no others.

use std::collections::{BTreeSet, HashSet};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};

use mizzen_squashfs::{Image, Inode, Kind, fuse};
use nix::sys::wait::{WaitStatus, waitpid};
use rustix::fs::{
    FlockOperation, Mode, OFlags, Timespec, Timestamps, fchmod, flock, fstat, fstatvfs, futimens, mkdirat,
    openat, renameat, syncfs,
};
use tracing::debug;

use super::layer::{self, FILES_NAME, Layer, MANIFEST, MAX_FILES, MAX_LAYERS, Unpacked, manifest_text};
use super::{StartProfile, parse_reads};
use crate::stage::cache::{Cache, TEMPORARY};
use crate::stage::lock::{self, TryLock};
use crate::stage::{fs_type, own_directory};
use crate::sys;

/// Less is read faster than it is looked after.
const LEAST: u64 = 16 << 20;
/// Files that are open at once.
const BATCH: usize = 128;
/// What is written at once.
const PIECE: usize = 1 << 20;
/// Of a file that is larger than this, starts must have read a part that is worth unpacking all of it.
const LARGE: u64 = 64 << 20;
const WORTH_PART: u64 = 16;

/// A file of the image that becomes one of the layer.
struct Chosen {
    path: Vec<u8>,
    inode: Inode,
}

/// Makes one more layer. `end` can be read when nobody needs it any more.
pub fn unpack(profile: &StartProfile, image: &Image, end: &OwnedFd) -> io::Result<()> {
    let (dir, path) = own_directory::open(&profile.directory).map_err(io::Error::other)?;
    let cache = Cache { dir, path, shared: false };
    // A disk that is none has nothing to give.
    if fs_type::is_memory(&cache.dir) || fs_type::is_network(&cache.dir, &[]) {
        return Ok(());
    }
    let lock = lock::try_lock(&cache, &format!("{}{}.lock", super::PROFILE, profile.key));
    let TryLock::Acquired(_lock) = lock.map_err(io::Error::other)? else { return Ok(()) };
    let layers = Layer::find(&cache, &profile.key);
    if layers.len() >= MAX_LAYERS {
        return Ok(());
    }
    let chosen = choose(image, &profile.read(&cache), &layers);
    let size = chosen.iter().fold(0, |sum: u64, file| sum.saturating_add(file.inode.size()));
    if size < LEAST || !make_room(profile, &cache, size)? {
        debug!(size, "nothing is unpacked");
        return Ok(());
    }
    let temporary = format!("{TEMPORARY}{}-{}", std::process::id(), profile.key);
    let made = make(image, &chosen, &cache, &temporary, end).and_then(|()| {
        Ok(renameat(&cache.dir, &*temporary, &cache.dir, layer::name(&profile.key, layers.len()))?)
    });
    if made.is_err() {
        layer::remove(&cache, &temporary);
    }
    made
}

/// The files that starts have looked at, as far as they can be files of a directory, and no layer has them yet.
fn choose(image: &Image, text: &[u8], layers: &[Layer]) -> Vec<Chosen> {
    let reads = parse_reads(text).unwrap_or_default();
    let mut known: HashSet<&[u8]> =
        layers.iter().flat_map(|layer| layer.files.iter().map(Vec::as_slice)).collect();
    let mut chosen = Vec::new();
    for read in &reads {
        if chosen.len() == MAX_FILES || !known.insert(&read.path) {
            continue;
        }
        let Some(inode) = find(image, &read.path) else { continue };
        let of_file = |other: &&super::reads::Read| other.path == read.path;
        let is_worth = inode.size() <= LARGE
            || reads.iter().filter(of_file).fold(0_u64, |sum, read| sum.saturating_add(read.len))
                >= inode.size() / WORTH_PART;
        // Names of the same file would become different files; what programs see of the rest must be what the image says.
        let is_plain = matches!(inode.kind, Kind::File(_))
            && inode.nlink == 1
            && inode.mode & 0o7000 == 0
            && !inode.has_xattrs();
        if is_worth && is_plain {
            chosen.push(Chosen { path: read.path.clone(), inode });
        }
    }
    chosen
}

/// The inode at a path without links.
fn find(image: &Image, path: &[u8]) -> Option<Inode> {
    let mut inode = image.root().ok()?;
    for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
        inode = image.inode(image.lookup(&inode, name).ok()??).ok()?;
    }
    Some(inode)
}

/// Makes room for `size` bytes among the user's unpacked files. Copies of images stay.
fn make_room(profile: &StartProfile, cache: &Cache, size: u64) -> io::Result<bool> {
    let disk = fstatvfs(&cache.dir)?;
    let all = disk.f_blocks.saturating_mul(disk.f_frsize);
    let limit = profile.max_size.map_or(u64::MAX, |amount| amount.of(all));
    let keep = profile.keep_free.map_or(0, |amount| amount.of(all));
    if size > limit {
        return Ok(false);
    }
    let has_room = || {
        let taken: u64 = layer::list(cache).iter().map(|layer| layer.size).sum();
        let free = fstatvfs(&cache.dir).map_or(0, |disk| disk.f_bavail.saturating_mul(disk.f_frsize));
        taken.saturating_add(size) <= limit && free >= size.saturating_add(keep)
    };
    layer::remove_all(cache, has_room);
    Ok(has_room())
}

fn make(image: &Image, chosen: &[Chosen], cache: &Cache, temporary: &str, end: &OwnedFd) -> io::Result<()> {
    mkdirat(&cache.dir, temporary, Mode::RWXU)?;
    let layer = open_directory(&cache.dir, temporary.as_bytes())?;
    // Whoever makes room leaves it alone as long as we live.
    flock(&layer, FlockOperation::NonBlockingLockShared)?;
    mkdirat(&layer, FILES_NAME, Mode::RWXU)?;
    let files = open_directory(&layer, FILES_NAME.as_bytes())?;
    let directories: BTreeSet<&[u8]> = chosen.iter().flat_map(|file| above(&file.path)).collect();
    for directory in &directories {
        mkdirat(&files, relative(directory), Mode::RWXU)?;
    }
    let mut manifest = Vec::new();
    for batch in chosen.chunks(BATCH) {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = |file: &Chosen| openat(&files, relative(&file.path), flags, Mode::RUSR | Mode::WUSR);
        let opened: Vec<File> = batch.iter().map(|file| Ok(open(file)?.into())).collect::<io::Result<_>>()?;
        let child = sys::spawn_child(|| i32::from(fill(image, batch, &opened, end).is_err()))?;
        if waitpid(child, None)? != WaitStatus::Exited(child, 0) {
            return Err(io::Error::other("the image cannot be read, or nobody needs the files any more"));
        }
        for (file, opened) in batch.iter().zip(&opened) {
            look_like(opened, &file.inode)?;
            let stat = fstat(opened)?;
            if u64::try_from(stat.st_size) != Ok(file.inode.size()) {
                return Err(io::Error::other("a file has another size than the image says"));
            }
            manifest.push(Unpacked::new(&stat, &file.path));
        }
    }
    // Those below first: what is made in a directory changes its time.
    for directory in directories.iter().rev() {
        if let Some(inode) = find(image, directory) {
            look_like(&open_directory(&files, relative(directory))?, &inode)?;
        }
    }
    look_like(&files, &image.root().map_err(io::Error::from)?)?;
    // Everything at once: thousands of small files one by one would keep the disk busy for much longer.
    syncfs(&layer)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mut file = File::from(openat(&layer, MANIFEST, flags, Mode::RUSR | Mode::WUSR)?);
    file.write_all(&manifest_text(&manifest))?;
    file.sync_all()
}

/// What a child does: it inflates the files into those that are open.
fn fill(image: &Image, batch: &[Chosen], opened: &[File], end: &OwnedFd) -> io::Result<()> {
    // Kernels without filters unpack all the same.
    let _ = fuse::filter::install(image.source().system_calls());
    for (file, mut opened) in batch.iter().zip(opened) {
        let mut at = 0;
        while at < file.inode.size() {
            // Nobody writes into the pipe; its end is that of the container's watcher.
            if nix::unistd::read(end, &mut [0]) == Ok(0) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let pieces = image.read(&file.inode, at, PIECE).map_err(io::Error::from)?;
            for slice in pieces.iter().flat_map(|piece| piece.slices()) {
                opened.write_all(slice)?;
                at += slice.len() as u64;
            }
        }
    }
    Ok(())
}

/// The directories above a path, but for the root.
fn above(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    let slashes = path.iter().enumerate().skip(1).filter(|(_, byte)| **byte == b'/');
    slashes.map(|(at, _)| path.get(..at).unwrap_or_default())
}

fn relative(path: &[u8]) -> &[u8] {
    path.strip_prefix(b"/").unwrap_or(path)
}

fn open_directory(parent: impl AsFd, name: &[u8]) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(parent, name, flags, Mode::empty())?)
}

/// Gives a file the mode and the time that the image says. (The owner is the user in any case.)
fn look_like(file: impl AsFd, inode: &Inode) -> io::Result<()> {
    let time = Timespec { tv_sec: inode.mtime.into(), tv_nsec: 0 };
    fchmod(&file, Mode::from_raw_mode(inode.mode & 0o777))?;
    Ok(futimens(&file, &Timestamps { last_access: time, last_modification: time })?)
}
