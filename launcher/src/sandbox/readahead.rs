//! What a program needs first, read ahead: while the container is still being planned and mounted, the file server
//! decompresses the program, its dynamic linker and its C library, so that the start does not wait for every piece of
//! them. Only a guess: what it misses is read when it is asked for.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mizzen_squashfs::fuse::Recorder;
use mizzen_squashfs::{Image, Inode};

use super::exec::candidates;
use crate::elf;
use crate::image::{self, Entry, Resolved, Tree, resolve};
use crate::plan::DEFAULT_PATH;
use crate::stage::profile::parse_reads;

/// No more of a file than this: large programs use only parts of themselves at once.
const LIMIT: usize = 4 << 20;
/// What is inflated at once.
const STEP: u64 = 128 << 10;
/// The program's headers are in its first bytes.
const HEAD: usize = 4096;

/// The files of the image that a command starts with, without links.
pub fn first_files(command: &[OsString], image: &Image) -> Vec<PathBuf> {
    let Some(name) = command.first() else { return Vec::new() };
    let environment = image::metadata(image).map(|metadata| metadata.environment).unwrap_or_default();
    let path = environment.into_iter().rfind(|(name, _)| name == "PATH");
    let path = path.map_or_else(|| DEFAULT_PATH.into(), |(_, value)| value);
    let file = |path: &Path| match resolve(image, path) {
        Ok(Resolved { path, entry: Some(Entry::File { .. }), .. }) => Some(path),
        _ => None,
    };
    let mut files = Vec::new();
    let Some(program) = candidates(name, &path).iter().find_map(|path| file(path)) else {
        return files;
    };
    let linker = Tree::read(image, &program, HEAD).ok().and_then(|head| file(&elf::dynamic_linker(&head)?));
    // Both are in one directory, wherever the distribution has that.
    let library =
        linker.as_deref().and_then(Path::parent).and_then(|directory| file(&directory.join("libc.so.6")));
    files.push(program);
    files.extend(linker);
    files.extend(library);
    files
}

/// Brings the files into the image's cache.
pub fn read(image: &Image, files: &[PathBuf]) {
    for file in files {
        // What cannot be read fails again, and properly, when the program asks for it.
        let _ = image.resolve(file.as_os_str().as_bytes()).and_then(|inode| {
            let length = usize::try_from(inode.size()).unwrap_or(LIMIT).min(LIMIT);
            image.read(&inode, 0, length).map(drop)
        });
    }
}

/// So much is inflated ahead of what programs ask for: a part of what the image keeps inflated.
const AHEAD: u64 = 8 << 20;
/// How often it is looked whether they have asked for more,
const LOOK: Duration = Duration::from_millis(2);
/// and after how long it is believed that they will not.
const PATIENCE: Duration = Duration::from_secs(2);

/// Brings what earlier starts have read into the image's cache, in the same order, a little ahead of this one.
pub fn read_profile(image: &Image, text: &[u8], recorder: &Recorder) {
    let mut done = 0;
    let mut file: Option<(&[u8], Inode)> = None;
    for read in parse_reads(text).into_iter().flatten() {
        if file.as_ref().is_none_or(|(path, _)| *path != read.path) {
            file = image.resolve(read.path).ok().map(|inode| (read.path, inode));
        }
        let Some((_, inode)) = &file else { continue };
        let mut at = read.offset;
        let end = read.offset.saturating_add(read.len).min(inode.size());
        while at < end {
            let (mut asked, mut since) = (recorder.bytes(), Instant::now());
            while done > asked.saturating_add(AHEAD) {
                std::thread::sleep(LOOK);
                let now = recorder.bytes();
                if recorder.is_ended() {
                    return;
                }
                if now != asked {
                    (asked, since) = (now, Instant::now());
                } else if since.elapsed() > PATIENCE {
                    return;
                }
            }
            let len = (end - at).min(STEP);
            let _ = image.read(inode, at, len as usize);
            at += len;
            done += len;
        }
    }
}
