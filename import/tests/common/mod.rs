//! What several test programs need: directories, trees as plain facts, OCI layouts, imports.
#![allow(dead_code)] // no program uses all of it

pub mod layers;
pub mod layout;
pub mod program;
pub mod registry;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::num::NonZeroUsize;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use mizzen_core::Failure;
use mizzen_core::config::Registries;
use mizzen_import::import::Importer;
use mizzen_import::layer::LayerCache;
use mizzen_import::manifest::Platform;
use mizzen_import::progress::Bars;
use mizzen_import::registry::{Client, ClientOptions, Notes};
use mizzen_import::source::Source;
use mizzen_squashfs::writer::{Compressors, Options};
use sha2::{Digest, Sha256};

/// A directory that goes away with its owner.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Scratch {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("mizzen-import-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Scratch(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs a command that must succeed.
pub fn run(command: &mut Command) -> Vec<u8> {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// What can be known of one file.
pub type Facts = BTreeMap<PathBuf, String>;

/// All files below a directory. Times of directories are left out: umoci gives those that no layer describes the time of day.
pub fn facts(root: &Path) -> Facts {
    let (mut facts, mut inodes) = (Facts::new(), BTreeMap::<u64, Vec<PathBuf>>::new());
    let mut ahead = vec![PathBuf::new()];
    while let Some(path) = ahead.pop() {
        if path.as_os_str() == ".mizzen" {
            continue;
        }
        let full = root.join(&path);
        let metadata = fs::symlink_metadata(&full).unwrap();
        let kind = metadata.file_type();
        let mut text = format!("{:o} {}:{}", metadata.mode(), metadata.uid(), metadata.gid());
        if kind.is_dir() {
            ahead.extend(fs::read_dir(&full).unwrap().map(|entry| path.join(entry.unwrap().file_name())));
        } else {
            text += &format!(" {}", metadata.mtime());
            inodes.entry(metadata.ino()).or_default().push(path.clone());
        }
        if kind.is_file() {
            text += &format!(" {:x}", Sha256::digest(fs::read(&full).unwrap()));
        } else if kind.is_symlink() {
            text += &format!(" -> {:?}", fs::read_link(&full).unwrap());
        } else if kind.is_char_device() || kind.is_block_device() {
            text += &format!(" {:x}", metadata.rdev());
        }
        text += &xattrs(&full);
        facts.insert(path, text);
    }
    for mut names in inodes.into_values().filter(|names| names.len() > 1) {
        names.sort();
        names.iter().for_each(|name| *facts.get_mut(name).unwrap() += &format!(" = {names:?}"));
    }
    facts
}

fn xattrs(path: &Path) -> String {
    let mut list = vec![0; 65536];
    let len = rustix::fs::llistxattr(path, &mut list).unwrap_or(0);
    let mut found = BTreeMap::new();
    for name in list[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let mut value = vec![0; 65536];
        let len = rustix::fs::lgetxattr(path, name, &mut value).unwrap_or(0);
        found.insert(String::from_utf8_lossy(name).into_owned(), value[..len].to_vec());
    }
    found.iter().map(|(name, value)| format!(" {name}={value:?}")).collect()
}

/// An OCI layout with one image, `latest`, of these layers.
pub fn oci_layout(directory: &Path, layers: &[Vec<u8>]) {
    let layout = layout::Layout::new(directory);
    layout.name("latest", layout.image(layers, "amd64"));
}

/// Imports a source; returns the path of the image. Owners are kept, as umoci keeps them.
pub fn import(scratch: &Scratch, source: &str) -> Result<PathBuf, Failure> {
    import_with(scratch, source, 2, Options::default())
}

/// The same with so many threads, and other options.
pub fn import_with(
    scratch: &Scratch,
    source: &str,
    threads: usize,
    options: Options,
) -> Result<PathBuf, Failure> {
    let bars = Bars::new(false);
    let options = Options { threads: NonZeroUsize::new(threads).unwrap(), ..options };
    let importer = Importer {
        compressors: Compressors::new(options).unwrap(),
        cache: LayerCache::open(scratch.path().join("layers"), None)?,
        use_cache: true,
        platform: Platform::parse("linux/amd64")?,
        keep_owners: true,
        foreign_layers: false,
        bars: &bars,
    };
    let path = scratch.path().join("image.sqsh");
    let out = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    let client = Client::new(ClientOptions::new(Registries::new(), Notes::silent()));
    importer.import(&Source::parse(OsStr::new(source))?, &out, &client)?;
    Ok(path)
}
