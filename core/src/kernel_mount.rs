//! Which images the kernel itself may mount. Its reader was not made for hostile images, so this is off unless the
//! administrator says whose images are trusted, and from where.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::Failure;
use crate::failure::quote;

/// Who reads the squashfs of a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reader {
    /// Our own server, as the user.
    #[default]
    Fuse,
    /// The kernel. An image that it may not mount is refused.
    Kernel,
    /// The kernel, where it may; else our own server.
    Auto,
}

/// The table `[mount]` of mizzen.toml.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KernelMounts {
    /// Who reads the squashfs of a container.
    pub squashfs: Reader,
    /// Owners of image files that the kernel may mount, by number; empty for root alone.
    pub owners: Vec<u32>,
    /// Directories below which image files may lie that the kernel may mount; empty for no limit by path.
    pub paths: Vec<PathBuf>,
}

/// What root sees of an image file through its descriptor.
#[derive(Clone, Debug)]
pub struct SourceFile {
    /// Where it lies, in root's own mount namespace.
    pub path: PathBuf,
    /// What is mounted there: type and source of the file system.
    pub mount: String,
    /// Its owner.
    pub owner: u32,
    /// Its permissions.
    pub mode: u32,
    /// How many names it has.
    pub links: u64,
}

impl KernelMounts {
    /// Whether the kernel may mount anything.
    pub fn enabled(&self) -> bool {
        self.squashfs != Reader::Fuse
    }

    /// What only the values together can show.
    pub fn check(&self, shared_cache: bool) -> Result<(), Failure> {
        if let Some(path) = self.paths.iter().find(|path| !path.is_absolute()) {
            return Err(Failure::new(format!("mount.paths: {path:?} is not absolute"))
                .hint("write the whole path, beginning with /"));
        }
        if !self.enabled() {
            return Ok(());
        }
        if self.owners.is_empty() && self.paths.is_empty() {
            return Err(Failure::new("mount.squashfs: the kernel mounts nothing without a limit").hint(
                "owners = [0] trusts root's image files; paths = [\"/sw/images\"] those in a directory of yours",
            ));
        }
        if !shared_cache {
            return Err(Failure::new("mount.squashfs: the kernel mounts copies of root's alone")
                .hint("stage_shared = \"/var/cache/mizzen\" has root make them"));
        }
        Ok(())
    }

    /// Why the kernel may not mount this file.
    pub fn refusal(&self, file: &SourceFile) -> Option<String> {
        // Limits by path alone say that the directory is in good hands, not that every file in it is.
        let trusted = if self.owners.is_empty() { &[0] } else { self.owners.as_slice() };
        if !trusted.contains(&file.owner) {
            return Some(format!("it belongs to uid {}, whom mount.owners does not list", file.owner));
        }
        if file.mode & 0o022 != 0 {
            return Some(format!("others than its owner can write it (mode {:04o})", file.mode & 0o7777));
        }
        if file.links != 1 {
            return Some(format!("it has {} names, and so no certain place", file.links));
        }
        // By component: /sw/images2 is not in /sw/images.
        if !self.paths.is_empty() && !self.paths.iter().any(|path| file.path.starts_with(path)) {
            let path = quote(Path::new(&file.path).as_os_str().as_encoded_bytes());
            return Some(format!("{path} is in none of the directories of mount.paths"));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mounts(owners: &[u32], paths: &[&str]) -> KernelMounts {
        let paths = paths.iter().map(PathBuf::from).collect();
        KernelMounts { squashfs: Reader::Kernel, owners: owners.to_vec(), paths }
    }

    #[test]
    fn kernel_mounts_need_limits_and_a_shared_cache() {
        assert!(KernelMounts::default().check(false).is_ok());
        assert!(mounts(&[], &[]).check(true).unwrap_err().message.contains("nothing without a limit"));
        assert!(mounts(&[0], &[]).check(false).unwrap_err().message.contains("copies of root's alone"));
        assert!(mounts(&[0], &["images"]).check(true).unwrap_err().message.contains("not absolute"));
        assert!(mounts(&[0], &[]).check(true).is_ok() && mounts(&[], &["/sw"]).check(true).is_ok());
    }

    #[test]
    fn limits_admit_what_they_say_and_nothing_else() {
        let file = SourceFile {
            path: "/sw/images/tf.sqsh".into(),
            mount: String::new(),
            owner: 0,
            mode: 0o644,
            links: 1,
        };
        let both = mounts(&[0, 500], &["/sw/images"]);
        assert_eq!(both.refusal(&file), None);
        let cases = [
            (SourceFile { owner: 1000, ..file.clone() }, "belongs to uid 1000"),
            (SourceFile { mode: 0o664, ..file.clone() }, "others than its owner can write it (mode 0664)"),
            (SourceFile { mode: 0o602, ..file.clone() }, "others than its owner"),
            (SourceFile { links: 2, ..file.clone() }, "2 names"),
            (SourceFile { links: 0, ..file.clone() }, "0 names"),
            (SourceFile { path: "/sw/images2/tf.sqsh".into(), ..file.clone() }, "in none of the directories"),
            (SourceFile { path: "/home/sw/images/x".into(), ..file.clone() }, "in none of the directories"),
        ];
        for (file, why) in cases {
            let refusal = both.refusal(&file).unwrap_or_default();
            assert!(refusal.contains(why), "{file:?}: {refusal}");
        }
        let own = SourceFile { owner: 1000, ..file.clone() };
        assert!(mounts(&[], &["/sw"]).refusal(&own).unwrap().contains("belongs to uid 1000"));
        assert_eq!(mounts(&[], &["/sw"]).refusal(&file), None, "root's");
        assert_eq!(mounts(&[1000], &[]).refusal(&own), None, "listed by name");
    }
}
