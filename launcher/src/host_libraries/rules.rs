//! The rules in /etc/mizzen/host.d: which libraries, programs, devices and files of the node containers get, as data.
//! Each file holds one rule; a site changes them, and adds its own.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::config::parse_failure;
use mizzen_core::trusted_file::read_trusted_directory;
use serde::Deserialize;

use super::pattern;

/// Where the rules are; they belong to the site as mizzen.toml does.
pub const DIRECTORY: &str = "/etc/mizzen/host.d";

/// The rules that hold where the directory does not exist: those that are installed there.
const SHIPPED: [(&str, &str); 6] = [
    ("amd", include_str!("../../../conf/host.d/amd.toml")),
    ("infiniband", include_str!("../../../conf/host.d/infiniband.toml")),
    ("intel", include_str!("../../../conf/host.d/intel.toml")),
    ("libfabric", include_str!("../../../conf/host.d/libfabric.toml")),
    ("mpi", include_str!("../../../conf/host.d/mpi.toml")),
    ("nvidia", include_str!("../../../conf/host.d/nvidia.toml")),
];

/// One file: a kind of hardware, and what programs need of the node to use it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// The file's name, without `.toml`.
    #[serde(skip)]
    pub name: String,
    /// What switches it on and off.
    pub switch: Switch,
    /// It holds where one of these exists: the first thing that is looked at, and on most nodes the last.
    pub when: Vec<PathBuf>,
    /// Files of which the first that can be read tells the version of the kernel's driver.
    #[serde(default)]
    pub version_files: Vec<PathBuf>,
    /// Devices that Slurm gives to a step one by one; patterns.
    #[serde(default)]
    pub gpus: Vec<String>,
    /// A variable that chooses among those of a step, as NVIDIA_VISIBLE_DEVICES does.
    #[serde(default)]
    pub gpus_variable: Option<String>,
    /// The kind of devices in CDI specifications that this rule is about: one on the node holds in place of the rule.
    #[serde(default)]
    pub cdi: Option<String>,
    /// Devices and directories of them that all have in common; patterns.
    #[serde(default)]
    pub devices: Vec<String>,
    /// Where libraries are beside the directories that the node's dynamic linker knows.
    #[serde(default)]
    pub directories: Vec<String>,
    /// Libraries of an image for older drivers, by a pattern that ends in the version: if they are newer than the driver,
    /// they come before the node's.
    #[serde(default)]
    pub compatibility: Option<String>,
    /// A variable that names sets, or `all`, in place of `choice`.
    #[serde(default)]
    pub choice_variable: Option<String>,
    /// The names of the sets that hold if the variable is not set; all without this key.
    #[serde(default)]
    pub choice: Option<Vec<String>>,
    /// Kernel drivers of a fabric's adapters, and the libraries by which an image serves them itself; patterns.
    #[serde(default)]
    pub providers: BTreeMap<String, String>,
    /// The sets.
    #[serde(default, rename = "set")]
    pub sets: Vec<Set>,
}

/// What switches a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// `--container-gpu`.
    Gpu,
    /// The key `fabric` of mizzen.toml; devices are given in any case.
    Fabric,
    /// `--container-mpi`.
    Mpi,
}

/// Files that serve one purpose.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Set {
    /// What it is called in `choice`, and in what `mizzen plan` shows.
    pub name: String,
    /// Libraries by their names, or by their paths; patterns.
    #[serde(default)]
    pub libraries: Vec<String>,
    /// The same, for those that nobody misses.
    #[serde(default)]
    pub optional: Vec<String>,
    /// Rows of names of libraries that are the same to programs: any of the node's serves for all names of its row.
    #[serde(default)]
    pub same: Vec<Vec<String>>,
    /// Directories that lie beside the libraries inside, by the names that they have there.
    #[serde(default)]
    pub beside: BTreeMap<String, String>,
    /// Further names of libraries.
    #[serde(default)]
    pub links: BTreeMap<String, String>,
    /// Programs, by name.
    #[serde(default)]
    pub programs: Vec<String>,
    /// Files and directories that have their places, where the image has nothing there; patterns.
    #[serde(default)]
    pub files: Vec<String>,
    /// Whether the libraries fit only each other: all of them, or none.
    #[serde(default)]
    pub matched: bool,
    /// Variables, with `{lib}` for the directory of the libraries inside, and `{verbs_drivers}` for the providers of
    /// libibverbs there.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
}

impl Set {
    /// One without anything in it.
    pub fn named(name: &str) -> Set {
        Set { name: name.to_owned(), ..Set::default() }
    }
}

impl Rule {
    fn parse(name: &str, text: &str, path: &Path) -> Result<Rule, Failure> {
        let mut rule: Rule = toml::from_str(text).map_err(|error| {
            parse_failure(&error, text, path)
                .or_hint("docs/gpu-and-fabric.md explains the keys of these files")
        })?;
        rule.name = name.to_owned();
        rule.check().map_err(|failure| failure.about(path.display()))?;
        Ok(rule)
    }

    /// What only the values themselves can show.
    fn check(&self) -> Result<(), Failure> {
        if self.when.is_empty() {
            return Err(Failure::new("when: empty, so the rule never holds"));
        }
        let paths = self.when.iter().chain(&self.version_files).map(|path| path.to_string_lossy());
        let patterns = self.gpus.iter().chain(&self.devices).chain(&self.directories);
        let files = self.sets.iter().flat_map(|set| set.files.iter().chain(set.beside.values()));
        let mut absolute =
            paths.chain(patterns.chain(files).map(|pattern| pattern.as_str().into())).collect::<Vec<_>>();
        let libraries = self
            .sets
            .iter()
            .flat_map(|set| set.libraries.iter().chain(&set.optional).chain(set.same.iter().flatten()));
        absolute.extend(libraries.clone().filter(|name| name.contains('/')).map(|path| path.as_str().into()));
        if let Some(path) = absolute.iter().find(|path| !path.starts_with('/')) {
            return Err(Failure::new(format!("\"{path}\" is not absolute")));
        }
        if let Some(device) = self.gpus.iter().chain(&self.devices).find(|path| !is_device(path)) {
            return Err(Failure::new(format!("\"{device}\" is not an entry of /dev"))
                .hint("write /dev/NAME; of a directory all devices are given"));
        }
        if let Some(name) = libraries.clone().find(|name| belongs_to_libc(pattern::file_name(name))) {
            return Err(Failure::new(format!("\"{name}\" belongs to the C library or the compiler"))
                .hint("these are always the image's: programs and these libraries fit only each other"));
        }
        let known = |name: &String| self.sets.iter().any(|set| set.name == *name);
        match self.choice.iter().flatten().find(|name| !known(name)) {
            Some(name) => Err(Failure::new(format!("choice: there is no set \"{name}\""))),
            None => Ok(()),
        }
    }

    /// The sets that hold, given the value of a variable. Names that we do not know are others' business: NVIDIA's
    /// variable has some for hardware that mizzen does not serve.
    pub fn chosen(&self, variable: impl Fn(&str) -> Option<String>) -> Vec<&Set> {
        let named = self.choice_variable.as_deref().and_then(variable).filter(|value| !value.is_empty());
        let chosen: Option<Vec<String>> = match named {
            Some(value) if value.split(',').any(|name| name == "all") => None,
            Some(value) => Some(value.split(',').map(|name| name.trim().to_owned()).collect()),
            None => self.choice.clone(),
        };
        let holds = |set: &&Set| chosen.as_ref().is_none_or(|chosen| chosen.contains(&set.name));
        self.sets.iter().filter(holds).collect()
    }
}

impl Set {
    /// Where in the lists a library's name stands.
    pub fn position(&self, name: &str) -> usize {
        let mut patterns = self.libraries.iter().chain(&self.optional);
        let found = patterns.position(|pattern| pattern::matches(pattern::file_name(pattern), name));
        found.unwrap_or(usize::MAX)
    }
}

fn is_device(path: &str) -> bool {
    path.strip_prefix("/dev/").is_some_and(|name| !name.is_empty() && !name.contains('/'))
}

/// Libraries that come with a C library or a compiler, and fit only that.
pub fn belongs_to_libc(name: &str) -> bool {
    const NAMES: [&str; 18] = [
        "ld-linux",
        "ld-musl",
        "ld64",
        "libBrokenLocale",
        "libanl",
        "libc",
        "libc_malloc_debug",
        "libdl",
        "libgcc_s",
        "libm",
        "libmvec",
        "libnsl",
        "libpthread",
        "libresolv",
        "librt",
        "libstdc++",
        "libthread_db",
        "libutil",
    ];
    let stem = name.split(".so").next().unwrap_or_default();
    NAMES.contains(&stem)
        || stem.starts_with("ld-linux-")
        || stem.starts_with("ld-musl-")
        || stem.starts_with("libnss_")
}

/// What is read of a rule first.
#[derive(Deserialize)]
struct Head {
    switch: Switch,
    when: Vec<PathBuf>,
}

/// Whether a rule may hold, by two of its keys: the rest of a file is parsed only on nodes that it is about, because every
/// start of a container reads all of them. What cannot be told so is left to the whole.
fn may_hold(text: &str, exists: impl Fn(Switch, &Path) -> bool) -> bool {
    // From the line that begins with the key to the end of its value.
    let value = |key: &str, end: &str| {
        let line = format!("{key} = ");
        let first = text.starts_with(&line).then_some(0);
        let start = first.or_else(|| text.find(&format!("\n{line}")).map(|before| before + 1))?;
        let length = text[start..].find(end)?;
        Some(&text[start..start + length + end.len()])
    };
    let (Some(switch), Some(when)) = (value("switch", "\n"), value("when", "]")) else { return true };
    let head: Result<Head, _> = toml::from_str(&format!("{switch}{when}"));
    head.map_or(true, |head| head.when.is_empty() || head.when.iter().any(|path| exists(head.switch, path)))
}

/// Reads the site's rules that hold where something exists for their purpose, in the order of their names; of the shipped
/// ones where the directory does not exist.
pub fn load(directory: &Path, exists: impl Fn(Switch, &Path) -> bool) -> Result<Vec<Rule>, Failure> {
    let files = match read_trusted_directory(directory, "toml")? {
        Some(files) => files.into_iter().map(|(path, text)| (path, Cow::from(text))).collect(),
        None => {
            SHIPPED.iter().map(|(name, text)| (PathBuf::from(name), Cow::from(*text))).collect::<Vec<_>>()
        }
    };
    let mut rules = Vec::new();
    for (path, text) in files {
        if may_hold(&text, &exists) {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            rules.push(Rule::parse(&name, &text, &path)?);
        }
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Rule, Failure> {
        Rule::parse("x", text, Path::new("/etc/mizzen/host.d/x.toml"))
    }

    fn chosen(rule: &Rule, variable: Option<&str>) -> Vec<String> {
        let value = |name: &str| {
            assert_eq!(name, "NVIDIA_DRIVER_CAPABILITIES");
            variable.map(str::to_owned)
        };
        rule.chosen(value).into_iter().map(|set| set.name.clone()).collect()
    }

    #[test]
    fn the_shipped_rules_are_good() {
        let rules = load(Path::new("/no/such/directory"), |_, _| true).unwrap();
        assert_eq!(
            rules.iter().map(|rule| rule.name.as_str()).collect::<Vec<_>>(),
            ["amd", "infiniband", "intel", "libfabric", "mpi", "nvidia"]
        );
        assert!(load(Path::new("/no/such/directory"), |_, _| false).unwrap().is_empty());
        let amd = load(Path::new("/no/such/directory"), |_, path| path == Path::new("/dev/kfd")).unwrap();
        assert_eq!(amd, rules[..1]);
        let nvidia = &rules[5];
        assert_eq!(chosen(nvidia, None), ["compute", "utility", "video"]);
        assert_eq!(chosen(nvidia, Some("")), ["compute", "utility", "video"]);
        assert_eq!(chosen(nvidia, Some("utility,display")), ["utility"]);
        assert_eq!(chosen(nvidia, Some("all")), ["compute", "utility", "video", "graphics"]);
    }

    #[test]
    fn the_guide_explains_every_key() {
        let guide = include_str!("../../../docs/gpu-and-fabric.md");
        let rule = "switch = \"gpu\"\nwhen = [\"/x\"]\n";
        for text in [format!("no_such_key = 1\n{rule}"), format!("{rule}[[set]]\nno_such_key = 1\n")] {
            // Serde knows the keys: a wrong one makes it list them all.
            let listed = parse(&text).unwrap_err().message;
            let keys: Vec<&str> =
                listed.split("expected").nth(1).unwrap().split('`').skip(1).step_by(2).collect();
            assert!(keys.len() > 5, "{listed}");
            for key in keys.into_iter().filter(|key| *key != "set") {
                let explained = [format!("| `{key}`"), format!("`{key}` |"), format!("| `[{key}]`")];
                let explained = explained.iter().any(|text| guide.contains(text.as_str()));
                assert!(explained, "docs/gpu-and-fabric.md lacks the key {key}");
            }
        }
    }

    #[test]
    fn bad_rules_are_named() {
        for (text, message) in [
            ("switch = \"gpu\"\nwhen = []", ": when: empty, so the rule never holds"),
            ("switch = \"gpu\"\nwhen = [\"dev/x\"]", ": \"dev/x\" is not absolute"),
            ("switch = \"tpu\"\nwhen = [\"/dev/x\"]", ":1: switch: unknown variant `tpu`"),
            ("switch = \"gpu\"\nwhen = [\"/x\"]\ndevice = []", ":3: unknown field `device`"),
            (
                "switch = \"gpu\"\nwhen = [\"/x\"]\ndevices = [\"/dev/dri/card0\"]",
                ": \"/dev/dri/card0\" is not an entry of /dev",
            ),
            (
                "switch = \"gpu\"\nwhen = [\"/x\"]\n[[set]]\nname = \"a\"\nlibraries = [\"libc.so.6\"]",
                ": \"libc.so.6\" belongs to the C library or the compiler",
            ),
            ("switch = \"gpu\"\nwhen = [\"/x\"]\nchoice = [\"b\"]", ": choice: there is no set \"b\""),
        ] {
            let failure = parse(text).unwrap_err();
            let expected = format!("/etc/mizzen/host.d/x.toml{message}");
            assert!(failure.message.starts_with(&expected), "{text:?} gives {failure:?}");
        }
    }

    #[test]
    fn an_unknown_key_may_be_a_slip() {
        for (key, hint) in [
            ("device", "did you mean devices?"),
            ("driver_version", "docs/gpu-and-fabric.md explains the keys of these files"),
        ] {
            let failure = parse(&format!("switch = \"gpu\"\nwhen = [\"/x\"]\n{key} = []")).unwrap_err();
            assert_eq!(failure.hint.as_deref(), Some(hint), "{failure:?}");
        }
    }

    #[test]
    fn what_belongs_to_the_c_library() {
        for name in ["libc.so.6", "ld-linux-x86-64.so.2", "libm.so.6", "libstdc++.so.6", "libnss_sss.so.2"] {
            assert!(belongs_to_libc(name), "{name}");
        }
        for name in ["libcuda.so.1", "libcrypt.so.1", "libmpi.so.12", "libnsl3.so"] {
            assert!(!belongs_to_libc(name), "{name}");
        }
    }
}
