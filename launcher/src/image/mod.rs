//! What an image is, what is in it, and what its maker wrote down about it, without mounting it.
//!
//! Everything here runs in the launcher, as the user, on the host. The bytes come from whoever made the image
//! and are hostile until shown otherwise: sizes are bounded, arithmetic is checked, no shell runs, and no
//! symbolic link of the image is ever followed by the host's kernel.

pub mod architecture;
pub mod identify;
mod load;
pub mod metadata;
pub mod sif;
mod squashfs_tree;
pub mod tree;

pub use identify::{ImageKind, OpenedImage, identify, identify_opened};
pub use load::{Content, Loaded, check_content, check_superblock, open_squashfs};
pub use metadata::{Metadata, check_architecture, operating_system, read as metadata, true_architecture};
pub use tree::{DirectoryTree, Entry, ReadAt, Resolved, Tree, read_file, resolve};

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use mizzen_core::Failure;
use mizzen_squashfs as squashfs;

/// What to do about an image that contradicts its own format.
pub const DAMAGED: &str = "the image is broken or was not copied completely; copy it again, or make it again";

/// A path of the image that cannot be read, or is not what it must be.
pub(crate) fn in_image(path: &Path, error: io::Error) -> Failure {
    let shown = shown(path);
    let broken = |what: &str| {
        Failure::new(format!("{shown} in the image {what}"))
            .hint("the image is broken or hostile; make it again")
    };
    match error.raw_os_error() {
        Some(libc::EFBIG) => broken("is too long for what it is"),
        Some(libc::EINVAL) => broken("is not a regular file"),
        Some(libc::EISDIR) => broken("is a directory, and must be a file"),
        number => {
            let damaged = error.get_ref().is_some_and(|inner| inner.is::<squashfs::Error>());
            let failure = Failure::caused_by(format!("{shown} in the image"), error);
            match number {
                Some(libc::ELOOP) => failure.hint("a symbolic link in the image leads back to itself"),
                Some(libc::EACCES) => failure.hint("you need read permission for the image's files"),
                Some(libc::ENOTDIR) => failure.hint("a file of the image stands where a directory is needed"),
                None if damaged => failure.hint(DAMAGED),
                _ => failure,
            }
        }
    }
}

/// A path as a message shows it.
pub(crate) fn shown(path: &Path) -> String {
    mizzen_core::failure::quote(path.as_os_str().as_bytes())
}

#[cfg(test)]
pub(crate) mod testing {
    //! What the tests of several modules need.

    use std::path::{Path, PathBuf};
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A directory that goes away with its owner.
    pub struct Scratch(PathBuf);

    impl Scratch {
        pub fn new() -> Scratch {
            static COUNT: AtomicU32 = AtomicU32::new(0);
            let name =
                format!("mizzen-image-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
            let path = std::env::temp_dir().join(name);
            std::fs::create_dir(&path).unwrap();
            Scratch(path)
        }

        pub fn path(&self) -> &Path {
            &self.0
        }

        /// Writes a file, with its directories.
        pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
            let path = self.0.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, content).unwrap();
            path
        }

        pub fn executable(&self, name: &str, content: impl AsRef<[u8]>) {
            use std::os::unix::fs::PermissionsExt;
            let path = self.file(name, content);
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }

        pub fn directory(&self, name: &str) {
            std::fs::create_dir_all(self.0.join(name)).unwrap();
        }

        pub fn link(&self, name: &str, target: &str) {
            std::os::unix::fs::symlink(target, self.0.join(name)).unwrap();
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// A small deterministic generator (xorshift), so that a failing input comes back on every run.
    pub struct Random(u64);

    impl Random {
        pub fn new(seed: u64) -> Random {
            Random(seed | 1)
        }

        pub fn next(&mut self, below: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 % below.max(1) as u64) as usize
        }

        /// Changes a few bytes, and sometimes cuts, repeats or inserts a telling piece.
        pub fn mutate(&mut self, bytes: &mut Vec<u8>, pieces: &[&[u8]]) {
            for _ in 0..=self.next(6) {
                let at = self.next(bytes.len());
                match self.next(6) {
                    0 => bytes.truncate(at),
                    1 => {
                        let copy = bytes[at..].to_vec();
                        bytes.extend(copy.into_iter().take(200));
                    }
                    2 if !pieces.is_empty() => {
                        let piece = pieces[self.next(pieces.len())];
                        bytes.splice(at..at, piece.iter().copied());
                    }
                    3 if at + 8 <= bytes.len() => {
                        let values = [0, 1, -1, i64::MAX, i64::MIN, 1 << 32, 584, 4096];
                        let value = values[self.next(values.len())];
                        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
                    }
                    _ if at < bytes.len() => bytes[at] = self.next(256) as u8,
                    _ => bytes.push(self.next(256) as u8),
                }
            }
        }
    }
}
