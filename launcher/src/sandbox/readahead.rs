//! What a program needs first, read ahead: while the container is still being planned and mounted, the file server
//! decompresses the program, its dynamic linker and its C library, so that the start does not wait for every piece of
//! them. Only a guess: what it misses is read when it is asked for.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use mizzen_squashfs::Image;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use super::exec::candidates;
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
    let linker = Tree::read(image, &program, HEAD).ok().and_then(|head| file(&dynamic_linker(&head)?));
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

/// Task 0 may be pinned to one CPU; what works for all may use all that the step has, to which the kernel limits this.
pub fn use_all_cpus() {
    let mut all = CpuSet::new();
    for cpu in 0..CpuSet::count() {
        let _ = all.set(cpu);
    }
    let _ = sched_setaffinity(Pid::from_raw(0), &all);
}

/// The dynamic linker that a 64-bit little-endian program names in its first bytes.
fn dynamic_linker(head: &[u8]) -> Option<PathBuf> {
    const PT_INTERP: usize = 3;
    let number = |at: usize, length: usize| {
        let mut bytes = [0; 8];
        bytes.get_mut(..length)?.copy_from_slice(head.get(at..at.checked_add(length)?)?);
        usize::try_from(u64::from_le_bytes(bytes)).ok()
    };
    if !head.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (table, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    let mut headers = (0..count).filter_map(|index| table.checked_add(index.checked_mul(size)?));
    let header = headers.find(|at| number(*at, 4) == Some(PT_INTERP))?;
    let (offset, length) = (number(header.checked_add(8)?, 8)?, number(header.checked_add(32)?, 8)?);
    let name = head.get(offset..offset.checked_add(length)?)?.split(|byte| *byte == 0).next()?;
    Some(PathBuf::from(OsStr::from_bytes(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dynamic_linker_is_found_and_nonsense_is_not() {
        let program = std::fs::read("/proc/self/exe").unwrap();
        let linker = dynamic_linker(&program[..HEAD]).unwrap();
        assert!(linker.is_absolute() && linker.exists(), "{linker:?}");
        assert_eq!(dynamic_linker(b"#!/bin/sh"), None);
        for length in 0..512 {
            dynamic_linker(&program[..length]);
        }
        let mut broken = program[..HEAD].to_vec();
        for at in 0..512 {
            broken[at] ^= 0xff;
            dynamic_linker(&broken);
            broken[at] ^= 0xff;
        }
    }
}
