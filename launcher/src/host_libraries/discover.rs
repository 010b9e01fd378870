//! Facts: what of a rule is on the node, where, and in which version. Nothing is decided here, and the node may be any
//! directory, as in the tests.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::pattern::{self, for_this_machine, matches};
use super::rules::{Rule, Set, belongs_to_libc};
use super::{ld_cache, standard_directories};
use crate::elf::Library;
use crate::image::{DirectoryTree, Entry, resolve};
use crate::trace::OrDebug;

/// Where programs are looked for.
const PROGRAM_DIRECTORIES: [&str; 4] = ["/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin"];

/// The node's files.
pub struct Node {
    root: PathBuf,
    /// For a root that is not the system's own: absolute links lead into it.
    tree: Option<DirectoryTree>,
    cache: OnceCell<Vec<(String, PathBuf)>>,
}

/// What the node has of a rule.
#[derive(Clone, Debug)]
pub struct Found {
    /// The version of the kernel's driver.
    pub version: Option<String>,
    /// Devices that Slurm gives one by one.
    pub gpus: Vec<PathBuf>,
    /// Devices that all have in common.
    pub devices: Vec<PathBuf>,
    /// What there is of each set.
    pub sets: Vec<FoundSet>,
}

/// What the node has of a set.
#[derive(Clone, Debug)]
pub struct FoundSet {
    /// The set.
    pub set: Set,
    /// By name; of each all files that could be meant, the likeliest first.
    pub libraries: BTreeMap<String, Vec<Candidate>>,
    /// Libraries that the node lacks.
    pub missing: Vec<String>,
    /// Programs.
    pub programs: Vec<Candidate>,
    /// Files and directories with places of their own.
    pub files: Vec<PathBuf>,
}

impl FoundSet {
    /// A set of which nothing has been found yet.
    pub fn of(set: Set) -> FoundSet {
        let (libraries, missing) = (BTreeMap::new(), Vec::new());
        FoundSet { set, libraries, missing, programs: Vec::new(), files: Vec::new() }
    }
}

/// A library or program.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Its name.
    pub name: String,
    /// The file itself, no link.
    pub file: PathBuf,
    /// What told where it is.
    pub origin: String,
    /// What it says of itself; none if it is no ELF file for this machine.
    pub library: Option<Library>,
}

impl Candidate {
    /// The name of the file itself.
    pub fn file_name(&self) -> String {
        self.file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// The version that ends the file's name, if it is one like a driver's: 535.183.01, and not the 1 of an interface.
    pub fn version(&self) -> Option<String> {
        let name = self.file_name();
        let (_, version) = name.split_once(".so.")?;
        let major = version.split_once('.')?.0;
        (major.len() >= 3 && version.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.'))
            .then(|| version.to_owned())
    }
}

impl Node {
    /// The system that we run on.
    pub fn this() -> Node {
        Node { root: "/".into(), tree: None, cache: OnceCell::new() }
    }

    /// A node whose root is a directory.
    #[cfg(test)]
    pub fn at(root: &Path) -> Node {
        let tree = DirectoryTree::open(root).unwrap();
        Node { root: root.to_owned(), tree: Some(tree), cache: OnceCell::new() }
    }

    /// Whether the node has what a rule is about.
    pub fn has(&self, rule: &Rule) -> bool {
        rule.when.iter().any(|path| self.exists(path))
    }

    /// Everything that a rule is about, with these of its sets.
    pub fn find(&self, rule: &Rule, sets: &[&Set]) -> Found {
        let version = rule.version_files.iter().find_map(|file| {
            let text = fs::read_to_string(self.file(file)?).ok()?;
            driver_version(&text)
        });
        let all = |patterns: &[String]| patterns.iter().flat_map(|pattern| self.paths(pattern)).collect();
        let sets = sets.iter().map(|set| self.find_set(set, &rule.directories)).collect();
        Found { version, gpus: self.gpus(rule), devices: all(&rule.devices), sets }
    }

    /// The devices of a rule that Slurm gives one by one.
    pub fn gpus(&self, rule: &Rule) -> Vec<PathBuf> {
        rule.gpus.iter().flat_map(|pattern| self.paths(pattern)).collect()
    }

    /// Where a directory of the node really is, if it exists.
    pub fn directory(&self, path: &str) -> Option<PathBuf> {
        self.file(Path::new(&for_this_machine(path))).filter(|directory| directory.is_dir())
    }

    /// The kernel drivers of the node's RDMA adapters.
    pub fn adapter_drivers(&self) -> Vec<String> {
        let adapters = self.directory("/sys/class/infiniband").and_then(|class| fs::read_dir(class).ok());
        let driver = |adapter: fs::DirEntry| fs::read_link(adapter.path().join("device/driver")).ok();
        let drivers = adapters.into_iter().flatten().flatten().filter_map(driver);
        drivers.filter_map(|driver| Some(driver.file_name()?.to_str()?.to_owned())).collect()
    }

    fn find_set(&self, set: &Set, directories: &[String]) -> FoundSet {
        let mut found = FoundSet::of(set.clone());
        for wanted in set.libraries.iter().chain(&set.optional) {
            let libraries = self.libraries(wanted, directories);
            if libraries.is_empty() {
                found.missing.push(wanted.clone());
            }
            found.libraries.extend(libraries);
        }
        for name in &set.programs {
            let places = PROGRAM_DIRECTORIES.iter().map(|directory| Path::new(directory).join(name));
            found.programs.extend(places.filter_map(|path| self.candidate(name, &path, "PATH")).next());
        }
        found.files = set.files.iter().flat_map(|pattern| self.paths(pattern)).collect();
        found
    }

    /// The libraries that a pattern stands for, by name.
    pub fn libraries(&self, wanted: &str, directories: &[String]) -> BTreeMap<String, Vec<Candidate>> {
        let wanted = for_this_machine(wanted);
        let mut found: BTreeMap<String, Vec<Candidate>> = BTreeMap::new();
        let mut add = |name: &str, path: &Path, origin: &str| {
            if belongs_to_libc(name) {
                return;
            }
            if let Some(candidate) = self.candidate(name, path, origin) {
                let known = found.entry(name.to_owned()).or_default();
                if !known.iter().any(|other| other.file == candidate.file) {
                    known.push(candidate);
                }
            }
        };
        if wanted.contains('/') {
            for path in self.paths(&wanted) {
                add(pattern::file_name(&path.to_string_lossy()), &path, "the rule's path");
            }
            return found;
        }
        for (name, path) in self.cache().iter().filter(|(name, _)| matches(&wanted, name)) {
            add(name, path, "ld.so.cache");
        }
        // A node without a cache has no glibc, or none that needs one.
        let standard = if self.cache().is_empty() { standard_directories() } else { Vec::new() };
        let directories = directories.iter().map(|directory| for_this_machine(directory)).chain(standard);
        for directory in directories {
            for path in self.paths(&format!("{directory}/{wanted}")) {
                add(pattern::file_name(&path.to_string_lossy()), &path, &directory);
            }
        }
        found
    }

    fn cache(&self) -> &[(String, PathBuf)] {
        self.cache.get_or_init(|| {
            let file = self.file(Path::new("/etc/ld.so.cache"));
            let content = file
                .and_then(|file| fs::read(file).or_debug("the node's ld.so.cache is not read"))
                .unwrap_or_default();
            ld_cache::read(&content[..content.len().min(ld_cache::LIMIT)])
        })
    }

    pub fn candidate(&self, name: &str, path: &Path, origin: &str) -> Option<Candidate> {
        let file = Some(path).filter(|path| self.exists(path)).and_then(|path| self.file(path))?;
        let opened =
            fs::File::open(&file).ok().filter(|opened| opened.metadata().is_ok_and(|m| m.is_file()))?;
        // What is broken cannot be loaded, as what is for another machine.
        let library = Library::read(&opened).ok().flatten();
        Some(Candidate { name: name.to_owned(), file, origin: origin.to_owned(), library })
    }

    /// The existing paths, on the node, that a pattern stands for; wildcards only in the last part.
    fn paths(&self, pattern: &str) -> Vec<PathBuf> {
        let pattern = for_this_machine(pattern);
        let path = Path::new(&pattern);
        let (Some(directory), Some(wanted)) =
            (path.parent(), path.file_name().and_then(|name| name.to_str()))
        else {
            return Vec::new();
        };
        if !pattern::is_pattern(wanted) {
            return Some(path).filter(|path| self.exists(path)).map(Path::to_owned).into_iter().collect();
        }
        let entries = self.file(directory).and_then(|directory| fs::read_dir(directory).ok());
        let names =
            entries.into_iter().flatten().flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<String> = names.filter(|name| matches(wanted, name)).collect();
        names.sort_by_key(|name| (name.len(), name.clone())); // nvidia10 after nvidia9
        names.into_iter().map(|name| directory.join(name)).collect()
    }

    /// Whether a path is there.
    pub fn exists(&self, path: &Path) -> bool {
        match self.tree {
            None => path.exists(),
            Some(_) => self.file(path).is_some(),
        }
    }

    /// Where a path of the node really is, if it exists.
    fn file(&self, path: &Path) -> Option<PathBuf> {
        match &self.tree {
            // The kernel's own walk also brings automatic mounts.
            None => fs::canonicalize(path).ok(),
            Some(tree) => {
                let found = resolve(tree, path).ok()?;
                let real = found.path.strip_prefix("/").ok()?;
                found.entry.filter(|entry| *entry != Entry::Symlink).map(|_| self.root.join(real))
            }
        }
    }
}

/// `535.183.01` in what the kernel says: that alone, or a sentence with it.
fn driver_version(text: &str) -> Option<String> {
    let number =
        |word: &&str| word.contains('.') && word.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    text.lines().next()?.split_whitespace().find(number).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::testing::Scratch;

    #[test]
    fn versions_of_drivers() {
        let proc = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version:  gcc version 12.2.0";
        assert_eq!(driver_version(proc).as_deref(), Some("535.183.01"));
        assert_eq!(driver_version("550.54.15\n").as_deref(), Some("550.54.15"));
        assert_eq!(driver_version("unknown\n"), None);
    }

    #[test]
    fn a_made_up_node() {
        let root = Scratch::new();
        let own = fs::read("/proc/self/exe").unwrap();
        for gpu in ["dev/nvidia10", "dev/nvidia9", "dev/nvidia-uvm", "dev/nvidiactl"] {
            root.file(gpu, "");
        }
        root.file("sys/module/nvidia/version", "535.1.2\n");
        root.file("opt/driver/libcuda.so.535.1.2", &own);
        root.file("opt/driver/libcuda.so.1.text", "no library");
        // Through absolute links, as Debian's alternatives are.
        root.directory("etc/alternatives");
        root.link("etc/alternatives/libcuda", "/opt/driver/libcuda.so.535.1.2");
        root.directory("usr/lib/extra");
        root.link("usr/lib/extra/libcuda.so.1", "/etc/alternatives/libcuda");
        root.link("usr/lib/extra/libnvidia-ml.so.1", "/gone");
        let rule: Rule = toml::from_str(
            r#"
            switch = "gpu"
            when = ["/dev/nvidiactl"]
            version_files = ["/nothing", "/sys/module/nvidia/version"]
            gpus = ["/dev/nvidia[0-9]*"]
            devices = ["/dev/nvidia-uvm", "/dev/nvidia-caps"]
            directories = ["/usr/lib/extra", "/opt/driver"]
            [[set]]
            name = "compute"
            libraries = ["libcuda.so.1", "libnvidia-ml.so.1", "libcuda.so.*"]
            "#,
        )
        .unwrap();
        let node = Node::at(root.path());
        assert!(node.has(&rule));
        let found = node.find(&rule, &rule.sets.iter().collect::<Vec<_>>());
        assert_eq!(found.version.as_deref(), Some("535.1.2"));
        assert_eq!(found.gpus, ["/dev/nvidia9", "/dev/nvidia10"].map(PathBuf::from));
        assert_eq!(found.devices, [PathBuf::from("/dev/nvidia-uvm")]);
        let set = &found.sets[0];
        assert_eq!(set.missing, ["libnvidia-ml.so.1"]);
        let names: Vec<&str> = set.libraries.keys().map(String::as_str).collect();
        assert_eq!(names, ["libcuda.so.1", "libcuda.so.1.text", "libcuda.so.535.1.2"]);
        let cuda = &set.libraries["libcuda.so.1"][0];
        assert_eq!(cuda.file, root.path().join("opt/driver/libcuda.so.535.1.2"));
        assert_eq!(cuda.version().as_deref(), Some("535.1.2"));
        assert!(cuda.library.is_some() && set.libraries["libcuda.so.1.text"][0].library.is_none());
        let empty = Scratch::new();
        assert!(!Node::at(empty.path()).has(&rule));
    }
}
