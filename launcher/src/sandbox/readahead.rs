//! What a program needs first, read ahead: while the container is still being planned and mounted, the file server
//! decompresses the program, its dynamic linker and its C library, so that the start does not wait for every piece of
//! them. Only a guess: what it misses is read when it is asked for.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use mizzen_squashfs::Image;

use super::exec::candidates;
use crate::elf;
use crate::image::{self, Entry, Resolved, Tree, resolve};
use crate::plan::DEFAULT_PATH;

/// No more of a file than this: large programs use only parts of themselves at once.
const LIMIT: usize = 4 << 20;
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
