//! Every parser of bytes that somebody else wrote, as a function of bytes: what fuzzers and the tests call.
//!
//! A function returns whether its parser took the bytes. It must not panic, run forever or eat memory, whatever they are;
//! and what a parser promises of its result is asserted here.

use std::collections::{BTreeMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use mizzen_core::config::Merged;
use mizzen_core::device::DeviceName;
use mizzen_core::handover::{Handover, Outcome};
use mizzen_core::settings::{Unshare, Value};
use mizzen_core::{Config, Reference, Request, options, staging};
use mizzen_squashfs::{Image, Inode, Kind};

use crate::cdi::{hooks, spec};
use crate::elf;
use crate::environment;
use crate::host_libraries::ld_cache;
use crate::image::tree::{Entry, ReadAt, Tree};
use crate::image::{metadata, sif};
use crate::show_config;
use crate::slurm::wire;
use crate::stage::{self, profile};

/// A parser: its name, and its function.
pub type Target = (&'static str, fn(&[u8]) -> bool);

/// All of them.
pub const TARGETS: [Target; 14] = [
    ("squashfs", squashfs),
    ("sif", sif_file),
    ("elf", elf_library),
    ("ld-cache", ld_so_cache),
    ("metadata", image_metadata),
    ("cdi", cdi_specification),
    ("request", request),
    ("handover", handover),
    ("config", config),
    ("environment", environment_file),
    ("options", option_texts),
    ("slurm-command", slurm_command),
    ("profile", start_profile),
    ("partial-record", partial_record),
];

/// The record of a copy in the making.
fn partial_record(bytes: &[u8]) -> bool {
    let Some((head, marks)) = stage::decode_record(bytes) else { return false };
    assert!(head.identity.size <= marks.len() as u64 * (128 << 10));
    let again = head.encode().unwrap_or_default();
    assert_eq!(bytes.get(..again.len()), Some(&*again), "one form alone is taken");
    true
}

/// A squashfs image: opened, and as much of it read as a small image has.
fn squashfs(bytes: &[u8]) -> bool {
    let Ok(image) = in_memory(bytes).and_then(|file| Ok(Image::open(file, 0)?)) else { return false };
    let _ = metadata::read_with(&image, &|_| None);
    let _ = image.path_of(image.superblock().root);
    walk(&image)
}

fn in_memory(bytes: &[u8]) -> io::Result<File> {
    let mut file = File::from(rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    Ok(file)
}

/// How many files are looked at: an image can name the same file in every directory.
const FILES: usize = 200;
/// How much of a file is read, at its beginning and at its end.
const PIECE: usize = 64 << 10;

/// Whether everything in an image can be read.
fn walk(image: &Image) -> bool {
    let mut good = true;
    let mut seen = HashSet::new();
    let mut left = vec![image.superblock().root];
    while let Some(reference) = left.pop() {
        if seen.len() >= FILES || !seen.insert(reference) {
            continue;
        }
        let Ok(inode) = image.inode(reference) else {
            good = false;
            continue;
        };
        good &= image.list_xattrs(&inode).is_ok() && image.get_xattr(&inode, b"user.own").is_ok();
        good &= match inode.kind {
            Kind::Directory(_) => list(image, &inode, &mut left).is_ok(),
            Kind::File(_) => {
                let end = inode.size().saturating_sub(100);
                image.read(&inode, 0, PIECE).is_ok() && image.read(&inode, end, PIECE).is_ok()
            }
            Kind::Symlink(_) => image.read_link(&inode).is_ok(),
            _ => true,
        };
    }
    good
}

fn list(
    image: &Image,
    directory: &Inode,
    found: &mut Vec<mizzen_squashfs::InodeRef>,
) -> mizzen_squashfs::Result<()> {
    let mut listing = image.read_dir(directory, 0)?;
    let mut name = Vec::new();
    while let Some(entry) = listing.next()? {
        assert!(!entry.name.is_empty() && !entry.name.contains(&b'/') && !entry.name.contains(&0));
        name = entry.name.to_vec();
        found.push(entry.inode);
        if found.len() > 10 * FILES {
            break;
        }
    }
    image.lookup(directory, &name)?;
    Ok(())
}

/// A SIF file. Its system partition lies in it.
fn sif_file(bytes: &[u8]) -> bool {
    let size = bytes.len() as u64;
    let _ = sif::end(&Bytes(bytes), size);
    let found = sif::find(&Bytes(bytes), size);
    if let Ok(partition) = &found {
        assert!(partition.offset.checked_add(partition.length).is_some_and(|end| end <= size));
    }
    found.is_ok()
}

/// A shared library.
fn elf_library(bytes: &[u8]) -> bool {
    elf::Library::read(&Bytes(bytes)).is_ok_and(|library| library.is_some())
}

/// The list of a system's libraries.
fn ld_so_cache(bytes: &[u8]) -> bool {
    !ld_cache::read(bytes).is_empty()
}

/// What the makers of images leave in them. The first byte says which maker, the files follow with NULs between them.
fn image_metadata(bytes: &[u8]) -> bool {
    let Some((maker, files)) = bytes.split_first() else { return false };
    let paths: &[&str] = match maker {
        b'o' => &[".mizzen/config.json", "etc/os-release"],
        b's' => &[
            ".singularity.d/env/10-docker2singularity.sh",
            ".singularity.d/env/90-environment.sh",
            ".singularity.d/labels.json",
        ],
        b'c' => &["ch/environment", "ch/metadata.json"],
        b'e' => &["etc/environment", "etc/rc"],
        _ => return false,
    };
    let contents = files.splitn(paths.len(), |byte| *byte == 0);
    let files = Files(paths.iter().map(Path::new).zip(contents).collect());
    let job = |name: &OsStr| (name == "DISPLAY").then(|| OsString::from(":0"));
    let _ = metadata::operating_system(&files);
    let read = metadata::read_with(&files, &job);
    if let Ok(metadata) = &read {
        let mut names = HashSet::new();
        for (name, value) in &metadata.environment {
            assert!(names.insert(name), "{name:?} is there twice");
            assert!(!name.is_empty() && !name.as_bytes().contains(&b'='), "{name:?} is no name");
            assert!(![name, value].iter().any(|text| text.as_bytes().contains(&0)), "NUL in {name:?}");
        }
        assert!(metadata.workdir.as_ref().is_none_or(|path| path.is_absolute()));
    }
    read.is_ok()
}

/// A CDI specification, and the hooks in it.
fn cdi_specification(bytes: &[u8]) -> bool {
    let Some(spec) = text(bytes).and_then(|text| spec::Spec::parse(text).ok()) else { return false };
    for hook in spec.devices.iter().flat_map(|device| &device.container_edits.hooks) {
        let _ = hooks::effects(hook, &[]);
    }
    for hook in &spec.container_edits.hooks {
        let _ = hooks::effects(hook, &[]);
    }
    true
}

/// What srun asks of the node, and the name of an image in a registry. It arrives as it was sent.
fn request(bytes: &[u8]) -> bool {
    if let Ok(reference) = Reference::parse(bytes) {
        assert_eq!(Reference::parse(reference.text_with_user().as_bytes()), Ok(reference));
        return true;
    }
    let Ok(request) = Request::decode(bytes) else { return false };
    let again = Request::decode(request.encode().as_bytes());
    assert_eq!(again.as_ref(), Ok(&request));
    true
}

/// What the plugin tells the launcher, and the first task the others.
fn handover(bytes: &[u8]) -> bool {
    let _ = Outcome::decode(bytes);
    let Ok(handover) = Handover::decode(bytes) else { return false };
    // One that is longer than a variable can be goes nowhere.
    assert!(
        handover.encode().is_err()
            || handover.encode().is_ok_and(|text| Handover::decode(text.as_bytes()).is_ok())
    );
    true
}

/// mizzen.toml and its drop-ins, which a NUL parts. What is shown of them is a file again.
fn config(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let (path, mut merged) = (Path::new("mizzen.toml"), Merged::default());
    if text.split('\0').any(|file| merged.add(path, file).is_err()) {
        return false;
    }
    assert!(show_config::values(&merged).is_ok_and(|shown| Config::parse(&shown, path).is_ok()));
    true
}

/// An environment file. What is shown of it is a file again that says the same.
fn environment_file(bytes: &[u8]) -> bool {
    let parse = |text| {
        let (container, shown) = environment::parse_text(text).ok()?;
        Some((container.image.map(|(_, image)| image), container.settings, shown))
    };
    let Some((image, settings, shown)) = text(bytes).and_then(parse) else { return false };
    assert_eq!(parse(&shown), Some((image, settings, shown.clone())));
    true
}

/// The values of options, all in one text with NULs between them: mounts, variables, devices, staging, namespaces.
fn option_texts(bytes: &[u8]) -> bool {
    let mut values = bytes.split(|byte| *byte == 0);
    let mut value = || OsStr::from_bytes(values.next().unwrap_or_default());
    let taken = [
        options::parse_mounts(value()).is_ok(),
        options::parse_env_list(value()).is_ok(),
        DeviceName::parse_list(value().as_bytes()).is_ok(),
        staging::Policy::parse(value().as_bytes()).is_ok(),
        <Unshare as Value>::parse(value().as_bytes()).is_ok(),
        value().to_str().is_some_and(|text| options::parse_size(text).is_ok()),
    ];
    taken.iter().all(|taken| *taken)
}

/// What a program in a container asks of the host's Slurm, and what it is answered.
fn slurm_command(bytes: &[u8]) -> bool {
    if let Some(answer) = wire::CommandResult::decode(bytes) {
        assert_eq!(wire::CommandResult::decode(&answer.encode()), Some(answer));
        return true;
    }
    let Some(order) = wire::CommandRequest::decode(bytes) else { return false };
    assert_eq!(wire::CommandRequest::decode(&order.encode()), Some(order));
    true
}

/// What is kept of a program's starts.
fn start_profile(bytes: &[u8]) -> bool {
    let is_of_layer = profile::is_of_layer(bytes);
    let Some(reads) = profile::parse_reads(bytes) else { return is_of_layer };
    for read in reads {
        let names = || read.path.split(|byte| *byte == b'/').skip(1);
        assert!(read.path.starts_with(b"/") && names().all(|name| !name.is_empty() && name != b".."));
        assert!(read.offset.checked_add(read.len).is_some());
    }
    true
}

fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}

/// A file in memory.
struct Bytes<'a>(&'a [u8]);

impl sif::Source for Bytes<'_> {
    fn fill(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).map_err(|_| io::ErrorKind::UnexpectedEof)?;
        let piece = self.0.get(start..).and_then(|rest| rest.get(..buffer.len()));
        buffer.copy_from_slice(piece.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

impl ReadAt for Bytes<'_> {
    fn read_at(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.0.len());
        Ok(self.0[start..self.0.len().min(start.saturating_add(length))].to_vec())
    }
}

/// A tree in memory, of a few files.
struct Files<'a>(BTreeMap<&'a Path, &'a [u8]>);

impl Files<'_> {
    fn get(&self, path: &Path) -> Option<&[u8]> {
        self.0.get(relative(path)).copied()
    }
}

fn relative(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

impl Tree for Files<'_> {
    fn entry(&self, path: &Path) -> io::Result<Option<Entry>> {
        if self.get(path).is_some() {
            return Ok(Some(Entry::File { executable: true }));
        }
        let is_directory = self.0.keys().any(|file| file.starts_with(relative(path)));
        Ok(is_directory.then_some(Entry::Directory))
    }

    fn read_link(&self, _: &Path) -> io::Result<PathBuf> {
        Err(io::ErrorKind::InvalidInput.into())
    }

    fn open<'a>(&'a self, path: &Path) -> io::Result<Box<dyn ReadAt + 'a>> {
        Ok(Box::new(Bytes(self.get(path).ok_or(io::ErrorKind::NotFound)?)))
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<(OsString, Entry)>> {
        let below = self.0.keys().filter_map(|file| file.strip_prefix(relative(directory)).ok());
        let names: Vec<&OsStr> = below.filter_map(|rest| rest.iter().next()).collect();
        names.iter().map(|name| Ok(((*name).to_owned(), Entry::File { executable: true }))).collect()
    }
}
