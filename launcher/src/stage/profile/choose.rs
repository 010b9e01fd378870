//! Which files of an image become a layer. They are chosen by a process under the file server's filter, which says it as text to the
//! one that writes; that one believes nothing but paths, modes, times and sizes. Runs as the user.

use std::collections::{BTreeMap, HashMap, HashSet};

use mizzen_squashfs::{Image, Inode, Kind};

use super::layer::{Layer, MAX_FILES, Unpacked};
use super::reads::{Lengths, Read, is_path};

/// Of a file that is larger than this, starts must have read a part that is worth unpacking all of it.
const LARGE: u64 = 64 << 20;
const WORTH_PART: u64 = 16;

/// Directories are made for the files; no start needs more.
const MAX_DIRECTORIES: usize = 4 * MAX_FILES;

/// A file of the image that becomes one of the layer, or a directory above it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    pub path: Vec<u8>,
    pub mode: u32,
    pub mtime: u32,
    pub size: u64,
}

/// All that becomes of a layer.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub files: Vec<Planned>,
    /// With the root, which is `/`.
    pub directories: BTreeMap<Vec<u8>, Planned>,
}

const FILE: &str = "f";
const DIRECTORY: &str = "d";

impl Plan {
    /// What the files take.
    pub fn size(&self) -> u64 {
        self.files.iter().fold(0, |sum: u64, file| sum.saturating_add(file.size))
    }

    /// As a line for each.
    pub fn text(&self) -> Vec<u8> {
        let mut text = Vec::new();
        let files = self.files.iter().map(|file| (FILE, file));
        for (kind, Planned { path, mode, mtime, size }) in
            files.chain(self.directories.values().map(|directory| (DIRECTORY, directory)))
        {
            text.extend_from_slice(format!("{kind} {mode} {mtime} {size} ").as_bytes());
            text.extend_from_slice(path);
            text.push(b'\n');
        }
        text
    }

    /// Reads it. None if it is not what could have been written.
    pub fn parse(text: &[u8]) -> Option<Plan> {
        let mut plan = Plan::default();
        for line in text.split_inclusive(|byte| *byte == b'\n') {
            let mut words = line.strip_suffix(b"\n")?.splitn(5, |byte| *byte == b' ');
            let mut word = || std::str::from_utf8(words.next()?).ok();
            let (kind, mode, mtime, size) = (word()?, word()?, word()?, word()?);
            let (mode, mtime): (u32, u32) = (mode.parse().ok()?, mtime.parse().ok()?);
            let path = words.next()?.to_vec();
            let planned = Planned { path: path.clone(), mode, mtime, size: size.parse().ok()? };
            match kind {
                FILE if is_path(&path) && mode & !0o777 == 0 => plan.files.push(planned),
                DIRECTORY
                    if (path == b"/" || is_path(&path)) && mode & !0o7777 == 0 && mode & 0o700 == 0o700 =>
                {
                    plan.directories.insert(path, planned);
                }
                _ => return None,
            }
        }
        let has_directories =
            |file: &Planned| above(&file.path).all(|path| plan.directories.contains_key(path));
        let names: HashSet<&[u8]> = plan.files.iter().map(|file| &*file.path).collect();
        let is_good = names.len() == plan.files.len()
            && plan.files.len() <= MAX_FILES
            && plan.directories.len() <= MAX_DIRECTORIES
            && plan.files.iter().all(has_directories);
        is_good.then_some(plan)
    }
}

/// The files that starts have looked at, as far as they can be files of a directory, and no layer has them yet. What was begun is
/// finished.
pub fn choose<'a>(
    image: &Image,
    reads: impl Iterator<Item = Read<'a>> + Clone,
    begun: &HashMap<Vec<u8>, Unpacked>,
    layers: &[Layer],
) -> Plan {
    let Lengths(lengths) = Lengths::of(reads.clone());
    let mut known: HashSet<&[u8]> =
        layers.iter().flat_map(|layer| layer.files.iter().map(Vec::as_slice)).collect();
    let mut plan = Plan::default();
    // Directories that cannot be made as they are in the image.
    let mut unfit: HashSet<Vec<u8>> = HashSet::new();
    let paths = begun.keys().map(Vec::as_slice).chain(reads.map(|read| read.path));
    for path in paths {
        if plan.files.len() == MAX_FILES || !known.insert(path) {
            continue;
        }
        let Some(inode) = find(image, path) else { continue };
        let is_worth = inode.size() <= LARGE
            || begun.contains_key(path)
            || lengths.get(path).is_some_and(|length| *length >= inode.size() / WORTH_PART);
        // Names of the same file would become different files; what programs see of the rest must be what the image says.
        let is_plain = matches!(inode.kind, Kind::File(_))
            && inode.nlink == 1
            && inode.mode & 0o7000 == 0
            && !inode.has_xattrs();
        if is_worth && is_plain && add_directories(image, path, &mut plan.directories, &mut unfit) {
            let (mode, mtime, size) = (inode.mode & 0o777, inode.mtime, inode.size());
            plan.files.push(Planned { path: path.to_vec(), mode, mtime, size });
        }
    }
    plan
}

/// Adds the directories above a file. The overlay shows them in the place of the image's, so they must be as those are; and their
/// owner, who is the user, must be able to make and remove what is in them. False if one of them cannot be so.
fn add_directories(
    image: &Image,
    path: &[u8],
    directories: &mut BTreeMap<Vec<u8>, Planned>,
    unfit: &mut HashSet<Vec<u8>>,
) -> bool {
    let mut added = Vec::new();
    for directory in above(path) {
        if directories.contains_key(directory) {
            continue;
        }
        let inode = if unfit.contains(directory) { None } else { find(image, directory) };
        let is_fit = |inode: &Inode| inode.mode & 0o700 == 0o700 && !inode.has_xattrs();
        match inode.filter(is_fit) {
            Some(Inode { mode, mtime, .. }) if directories.len() + added.len() < MAX_DIRECTORIES => {
                let (path, mode) = (directory.to_vec(), mode & 0o7777);
                added.push((directory.to_vec(), Planned { path, mode, mtime, size: 0 }));
            }
            _ => {
                unfit.insert(directory.to_vec());
                return false;
            }
        }
    }
    directories.extend(added);
    true
}

/// The inode at a path without links.
pub fn find(image: &Image, path: &[u8]) -> Option<Inode> {
    let mut inode = image.root().ok()?;
    for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
        inode = image.inode(image.lookup(&inode, name).ok()??).ok()?;
    }
    Some(inode)
}

/// The directories above a path, from the root on.
fn above(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    let slashes = path.iter().enumerate().skip(1).filter(|(_, byte)| **byte == b'/');
    std::iter::once(&b"/"[..]).chain(slashes.map(|(at, _)| path.get(..at).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(path: &[u8], mode: u32, size: u64) -> Planned {
        Planned { path: path.to_vec(), mode, mtime: 7, size }
    }

    #[test]
    fn a_plan_survives_its_text() {
        let directories = [planned(b"/", 0o755, 0), planned(b"/a b", 0o2775, 0)];
        let plan = Plan {
            files: vec![planned(b"/a b/c", 0o644, 5), planned(b"/d", 0o444, 0)],
            directories: directories.map(|directory| (directory.path.clone(), directory)).into(),
        };
        assert_eq!(Plan::parse(&plan.text()).unwrap(), plan);
        assert_eq!(plan.size(), 5);
    }

    #[test]
    fn a_process_that_was_taken_over_names_nothing_outside() {
        for text in [
            "f 420 7 5 /../../etc/passwd\nd 493 7 0 /\n",
            "f 420 7 5 etc/passwd\nd 493 7 0 /\n",
            "f 420 7 5 /a\nf 420 7 5 /a\nd 493 7 0 /\n",
            "f 2541 7 5 /a\nd 493 7 0 /\n",
            "f 420 7 5 /a/b\nd 493 7 0 /\n",
            "f 420 7 5 /a\nd 0 7 0 /\n",
            "f 420 7 5 /a\nd 32768 7 0 /\n",
            "f 420 7 x /a\nd 493 7 0 /\n",
            "l 420 7 5 /a\nd 493 7 0 /\n",
            "f 420 7 5 /a",
        ] {
            assert_eq!(Plan::parse(text.as_bytes()), None, "{text}");
        }
        let many: String = (0..=MAX_FILES).map(|number| format!("f 420 7 5 /{number}\n")).collect();
        assert_eq!(Plan::parse(format!("{many}d 493 7 0 /\n").as_bytes()), None);
    }
}
