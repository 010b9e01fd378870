//! mizzen.toml and the files of mizzen.d: the settings of a site, the same on login and compute nodes.
//!
//! They are read only when a container was asked for, so a broken file never touches other jobs. What they say holds for
//! all users: hence the checks on who may have written them.

mod merge;
mod source;

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeValue, ValueDeserializer};

use crate::failure::quote;
pub use crate::image_policy::ImagePolicy;
pub use crate::registries::{Registries, RegistryConfig};
use crate::settings::{ContainerScope, Key, Settings, TomlForm, Value};
use crate::similar::similar;
use crate::staging::{Amount, Broadcast, Policy, Verify};
use crate::{Failure, image_store, registries};
pub(crate) use merge::key_path;
pub use merge::{Entry, Merged, Position, SiteFiles};
pub use source::{DEFAULT_PATH, Source};

const SAMPLE: &str = "the mizzen.toml that comes with mizzen shows every key with its default";

/// Makes a struct of the keys, with their types, defaults and meanings.
macro_rules! keys {
    ($($(#[doc = $meaning:literal])* $key:ident: $type:ty = $default:expr;)*) => {
        /// The site's settings. `conf/mizzen.toml` shows every key with its default; a test keeps the two equal.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Config {
            /// What holds where the user says nothing. Mounts, variables and devices of the site hold in any case.
            pub settings: Settings,
            $($(#[doc = $meaning])* pub $key: $type,)*
        }

        impl Default for Config {
            fn default() -> Config {
                Config { settings: Settings::default(), $($key: $default,)* }
            }
        }

        /// The keys beside those of the settings' table.
        const KEYS: &[&str] = &[$(stringify!($key)),*];

        impl Config {
            /// Takes the value of one of [`KEYS`].
            fn set(&mut self, key: &str, value: Spanned<DeValue>) -> Result<(), toml::de::Error> {
                match key {
                    $(stringify!($key) => self.$key = read(value)?,)*
                    _ => {}
                }
                Ok(())
            }
        }
    };
}

keys! {
    /// Folders that are searched for an image given by its bare name.
    image_folders: Vec<PathBuf> = Vec::new();
    /// Folders that are searched for an environment file given by its bare name, after the user's own.
    environment_folders: Vec<PathBuf> = vec!["/etc/edf".into()];
    /// Where each user's images from registries are kept, as for [`image_store::store_directory`].
    image_store: String = String::new();
    /// Where images in registries that a job names are imported.
    import: ImportWhen = ImportWhen::Submit;
    /// How much the converted layers of one user may take, as for [`Amount::parse`].
    layer_cache_max_size: String = "20g".to_owned();
    /// Hooks of CDI specifications that devices work without: the names of NVIDIA's, the paths of other programs.
    cdi_leave_out_hooks: Vec<String> = Vec::new();
    /// Whose named containers a node keeps apart, if the site says that: [`Config::container_scope`].
    container_scope: Option<ContainerScope> = None;
    /// Whether Slurm's commands can be called in batch scripts and interactive shells that run inside.
    slurm_commands: bool = true;
    /// Where each user has a folder for the copies of images.
    stage_directory: PathBuf = "/var/tmp".into();
    /// Where root's `mizzen stage` keeps copies that all users of the node can use; empty where it keeps none.
    stage_shared: PathBuf = PathBuf::new();
    /// From which size on an image is used while it is copied, as for [`Amount::parse`]; empty if none is.
    stage_read_through: String = "64m".to_owned();
    /// When the tasks of a step start to whose nodes srun sends its image.
    stage_broadcast: Broadcast = Broadcast::First;
    /// When a copy that is there is read before it is used.
    stage_verify: Verify = Verify::Pinned;
    /// How much the copies of one user may take, as for [`Amount::parse`].
    stage_max_size: String = "50%".to_owned();
    /// How much of the file system the copies leave free.
    stage_keep_free: String = "10%".to_owned();
    /// How much the files of one user may take that were unpacked for the next start, as for [`Amount::parse`].
    stage_unpacked_max_size: String = "10g".to_owned();
    /// How everything that was tried is told, where a user asks for that (`--container-verbose=debug`).
    log_format: LogFormat = LogFormat::Text;
    /// Types of file systems that count as network file systems beside those that are known.
    network_file_systems: Vec<String> = Vec::new();
    /// Whose habits hold where mizzen's own are others on purpose.
    compatible: Compatible = Compatible::Mizzen;
    /// How registries are reached.
    registries: Registries = Registries::new();
    /// Which images may be used.
    policy: ImagePolicy = ImagePolicy::default();
}

/// Keys whose defaults depend on `compatible`. The file that is shipped has them as comments, so that they do not hold against it.
pub const BY_COMPATIBLE: [&str; 2] = ["mount_home", "container_scope"];

/// The shipped file with these keys set.
pub fn uncommented(sample: &str) -> String {
    BY_COMPATIBLE
        .iter()
        .fold(sample.to_owned(), |text, key| text.replace(&format!("\n#{key} = "), &format!("\n{key} = ")))
}

fn read<T: DeserializeOwned>(value: Spanned<DeValue>) -> Result<T, toml::de::Error> {
    T::deserialize(ValueDeserializer::from(value))
}

/// Whose defaults hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compatible {
    /// Ours: the home and the current directory are there, programs start in the latter, a bare name is a file's, a named container
    /// goes with its job.
    #[default]
    Mizzen,
    /// pyxis's: neither is there, programs start in the image's directory, a bare name is that of an image in a registry, a named
    /// container stays.
    Pyxis,
}

/// How events are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object on each line.
    Json,
}

/// Where an image in a registry is imported that a job asks for by its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImportWhen {
    /// On the machine where the job is submitted, before it waits in the queue.
    #[default]
    Submit,
    /// On the first node of the job that needs it.
    Node,
    /// Nowhere: jobs name files.
    Never,
}

/// A value that is wrong, with its key as [`Position`]s are kept by it.
pub(crate) struct BadValue {
    key: String,
    failure: Failure,
}

impl BadValue {
    pub(crate) fn new(key: impl Into<String>, failure: Failure) -> BadValue {
        BadValue { key: key.into(), failure }
    }
}

impl Config {
    /// Reads, checks and merges the files.
    pub fn load(source: &Source) -> Result<Config, Failure> {
        Ok(SiteFiles::read(source)?.merge()?.config)
    }

    /// The settings that the plugin reads on this machine, for who is started by hand.
    pub fn of_this_machine() -> Result<Config, Failure> {
        Config::load(&Source::of_this_machine()?)
    }

    /// Parses the text of one file; a failure names the line.
    pub fn parse(text: &str, path: &Path) -> Result<Config, Failure> {
        let mut merged = Merged::default();
        merged.add(path, text)?;
        Ok(merged.config)
    }

    /// Whose named containers a node keeps apart.
    pub fn container_scope(&self) -> ContainerScope {
        self.container_scope.unwrap_or(match self.compatible {
            Compatible::Mizzen => ContainerScope::Job,
            Compatible::Pyxis => ContainerScope::Global,
        })
    }

    /// Whether steps of jobs have the home directory where the user says nothing, if the site says that or another program's habit
    /// does.
    pub fn mount_home_in_jobs(&self) -> Option<bool> {
        self.settings.mount_home.or((self.compatible == Compatible::Pyxis).then_some(false))
    }

    /// What only the values themselves can show.
    fn check(&self) -> Result<(), BadValue> {
        const WHOLE_PATH: &str = "write the whole path, beginning with /";
        for (key, folders) in
            [("image_folders", &self.image_folders), ("environment_folders", &self.environment_folders)]
        {
            if let Some(folder) = folders.iter().find(|folder| !folder.is_absolute()) {
                let failure = Failure::new(format!("{key}: {folder:?} is not absolute")).hint(WHOLE_PATH);
                return Err(BadValue::new(key, failure));
            }
        }
        for (key, directory) in
            [("stage_directory", &self.stage_directory), ("stage_shared", &self.stage_shared)]
        {
            let is_none = key == "stage_shared" && directory.as_os_str().is_empty();
            if !directory.is_absolute() && !is_none {
                let failure = Failure::new(format!("{key}: {directory:?} is not absolute")).hint(WHOLE_PATH);
                return Err(BadValue::new(key, failure));
            }
        }
        let about = |key: &'static str| move |failure: Failure| BadValue::new(key, failure.about(key));
        image_store::check(&self.image_store).map_err(about("image_store"))?;
        for (key, amount) in [
            ("stage_max_size", &self.stage_max_size),
            ("stage_keep_free", &self.stage_keep_free),
            ("stage_unpacked_max_size", &self.stage_unpacked_max_size),
            ("stage_read_through", &self.stage_read_through),
            ("layer_cache_max_size", &self.layer_cache_max_size),
        ] {
            Amount::parse(amount).map_err(about(key))?;
        }
        if self.stage_read_through.ends_with('%') {
            let failure = Failure::new("stage_read_through: it is a size, not a part of a file system")
                .hint("write a number with k, m, g or t behind it: 64m, 1g; or \"\" for never");
            return Err(BadValue::new("stage_read_through", failure));
        }
        registries::check(&self.registries)?;
        self.policy.check()?;
        if self.settings.stage == Some(Policy::Broadcast) {
            let failure = Failure::new("stage: \"bcast\" is a matter of a job, not of the site")
                .hint("write auto, always or never");
            return Err(BadValue::new("stage", failure));
        }
        match self.settings.mounts.iter().flatten().find(|mount| mount.relative().is_some()) {
            Some(mount) => {
                let mount = quote(&mount.to_text());
                let failure = Failure::new(format!("mounts: \"{mount}\" is not absolute")).hint(WHOLE_PATH);
                Err(BadValue::new("mounts", failure))
            }
            None => Ok(()),
        }
    }
}

/// The value of a setting as options write it.
fn setting_texts(key: Key, value: Spanned<DeValue>) -> Result<Vec<String>, toml::de::Error> {
    Ok(match key.toml_form() {
        TomlForm::Boolean => {
            let on: bool = read(value)?;
            vec![String::from_utf8_lossy(&on.text()).into_owned()]
        }
        TomlForm::Text => vec![read(value)?],
        TomlForm::List => read(value)?,
    })
}

fn unknown_key(name: &str) -> Failure {
    let settings = Key::ALL.iter().filter_map(|key| key.spec().toml);
    let known: Vec<String> = KEYS.iter().copied().chain(settings).map(|key| format!("`{key}`")).collect();
    let failure = Failure::new(format!(
        "unknown field `{}`, expected one of {}",
        quote(name.as_bytes()),
        known.join(", ")
    ));
    match meant_key(&failure.message) {
        Some(meant) => failure.hint(format!("did you mean {meant}?")),
        None => failure.hint(SAMPLE),
    }
}

/// The key that somebody may have meant, from a message about an unknown one: in it the keys that there are stand between backticks.
/// The parser has no other list of what a table takes.
fn meant_key(message: &str) -> Option<String> {
    let mut quoted = message.strip_prefix("unknown field ")?.split('`').skip(1).step_by(2);
    let name = quoted.next()?;
    similar(name, quoted.map(str::to_owned))
}

const RETIRED_MOUNT: &str = "[mount] is gone: mizzen has no image mounted by the kernel any more";
const RETIRED_MOUNT_HINT: &str =
    "mount images with the node's own means (docs/admins.md, \"Site mounts\") and name the directory";

/// A failure to parse one of the site's files, with the line and the key; with a hint only if a key is nearly one that there is.
pub fn parse_failure(error: &toml::de::Error, text: &str, path: &Path) -> Failure {
    let line = error.span().map_or(1, |span| line_at(text, span.start));
    // The parser's messages may span lines; one failure is one line.
    let cause = error.message().lines().collect::<Vec<_>>().join(" ");
    let position = format!("{}:{line}", path.display());
    let failure = Failure::new(match error.span().and_then(|span| key_at(text, span.start)) {
        Some(key) => format!("{position}: {key}: {cause}"),
        None => format!("{position}: {cause}"),
    });
    match meant_key(&cause) {
        Some(meant) => failure.hint(format!("did you mean {meant}?")),
        None => failure,
    }
}

/// The line of a text in which this offset is.
pub fn line_at(text: &str, offset: usize) -> usize {
    1 + text[..offset].matches('\n').count()
}

/// The key whose value stands at this offset, for messages about the value.
fn key_at(text: &str, offset: usize) -> Option<&str> {
    let line_start = text[..offset].rfind('\n').map_or(0, |newline| newline + 1);
    let key = text[line_start..offset].split_once('=')?.0.trim();
    (!key.is_empty()).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, Failure> {
        Config::parse(text, Path::new("/etc/mizzen/mizzen.toml"))
    }

    #[test]
    fn the_shipped_file_holds_every_key_with_its_default() {
        let shipped = include_str!("../../conf/mizzen.toml");
        let Config { settings, .. } = parse(shipped).unwrap();
        assert_eq!(parse(shipped), Ok(Config { settings: settings.clone(), ..Config::default() }));
        // Those of the settings' table are there with their defaults, as the empty ones are.
        let defaults = Settings::default();
        for key in Key::ALL.iter().filter(|key| key.spec().toml.is_some()) {
            if key.toml_form() == TomlForm::List {
                assert_eq!(settings.text(*key), None, "{key:?}");
            }
        }
        assert_eq!(
            (settings.mount_home(), settings.writable(), settings.remap_root(), settings.entrypoint()),
            (defaults.mount_home(), defaults.writable(), defaults.remap_root(), defaults.entrypoint())
        );
        assert_eq!(
            (settings.script(), settings.stage(), settings.gpu(), settings.mpi(), settings.fabric()),
            (defaults.script(), defaults.stage(), defaults.gpu(), defaults.mpi(), defaults.fabric())
        );
        let is_table = |key: &&str| ["registries", "policy"].contains(key);
        let keys = Key::ALL.iter().filter_map(|key| key.spec().toml).chain(KEYS.iter().copied());
        for key in keys.filter(|key| !is_table(key)) {
            // A default that depends on `compatible` must not be set by the file.
            let line =
                if BY_COMPATIBLE.contains(&key) { format!("\n#{key} = ") } else { format!("\n{key} = ") };
            assert!(shipped.contains(&line), "conf/mizzen.toml lacks the key {key}");
        }
        let whole = parse(&uncommented(shipped)).unwrap();
        assert_eq!(whole.container_scope, Some(Config::default().container_scope()));
        assert_eq!(whole.settings.mount_home, Some(Settings::default().mount_home()));
    }

    /// Tables are shown by examples: they have no default to be shown, and stand at the end, where TOML wants them.
    #[test]
    fn the_shipped_file_shows_the_tables_by_examples() {
        let shipped = include_str!("../../conf/mizzen.toml");
        let (_, tables) = shipped.split_once("\n# [registries.").unwrap();
        let examples: Vec<&str> = tables.lines().filter_map(|line| line.strip_prefix("# ")).collect();
        let is_code = |line: &&&str| line.starts_with('[') || line.contains(" = ");
        let code: Vec<&str> = examples.iter().filter(is_code).copied().collect();
        let text = format!("[registries.{}\n{}", tables.lines().next().unwrap(), code.join("\n"));
        let config = parse(&text).unwrap();
        let all_of_one = |registry: &RegistryConfig| !registry.mirrors.is_empty();
        assert!(config.registries.values().any(all_of_one), "{text}");
        assert!(config.registries.values().any(|registry| registry.plain_http), "{text}");
        assert!(config.registries.values().any(|registry| registry.ca_file.is_some()), "{text}");
        let ImagePolicy { registries, repositories, folders, owners, digests } = config.policy;
        assert!(registries.is_some() && repositories.is_some() && folders.is_some(), "{text}");
        assert!(owners.is_some() && digests.is_some(), "{text}");
    }

    #[test]
    fn the_defaults_can_be_those_of_pyxis() {
        assert_eq!(parse("compatible = \"pyxis\"").unwrap().compatible, Compatible::Pyxis);
        let failure = parse("compatible = \"docker\"").unwrap_err();
        let expected = ":1: compatible: unknown variant `docker`, expected `mizzen` or `pyxis`";
        assert!(failure.message.contains(expected), "{failure}");
        // Also in the file as it is shipped, of which administrators edit one line.
        let shipped = include_str!("../../conf/mizzen.toml");
        let edited = shipped.replace("compatible = \"mizzen\"", "compatible = \"pyxis\"");
        for text in ["compatible = \"pyxis\"", &edited] {
            let config = parse(text).unwrap();
            assert_eq!(config.container_scope(), ContainerScope::Global);
            assert_eq!(config.mount_home_in_jobs(), Some(false));
        }
        let own = parse("compatible = \"pyxis\"\ncontainer_scope = \"job\"\nmount_home = true").unwrap();
        assert_eq!((own.container_scope(), own.mount_home_in_jobs()), (ContainerScope::Job, Some(true)));
        let ours = parse("").unwrap();
        assert_eq!((ours.container_scope(), ours.mount_home_in_jobs()), (ContainerScope::Job, None));
    }

    #[test]
    fn an_unknown_key_may_be_a_slip() {
        let none = "the mizzen.toml that comes with mizzen shows every key with its default";
        for (text, hint) in [
            ("image_folder = []", "did you mean image_folders?"),
            ("stage_dirctory = \"/x\"", "did you mean stage_directory?"),
            ("mount_hoem = true", "did you mean mount_home?"),
            ("[polcy]\nowners = []", "did you mean policy?"),
            ("[policy]\nowner = []", "did you mean owners?"),
            ("[registries.\"a.io\"]\nmirorrs = []", "did you mean mirrors?"),
            ("tensorflow = true", none),
            ("[policy]\ntensorflow = true", none),
            ("x = 1", none),
        ] {
            let failure = parse(text).unwrap_err();
            assert!(failure.message.contains(": unknown field `"), "{failure:?}");
            assert_eq!(failure.hint.as_deref(), Some(hint), "{text}");
        }
    }

    #[test]
    fn failures_name_file_line_and_key() {
        let cases = [
            (
                "# x\n\nimage_folder = []\n",
                ":3: unknown field `image_folder`, expected one of `image_folders`",
            ),
            (
                "image_folders = \"/x\"\n",
                ":1: image_folders: invalid type: string \"/x\", expected a sequence",
            ),
            ("\nimage_folders = [1]\n", ":2: image_folders: invalid type: integer `1`"),
            ("image_folders = [\n", ":1: "),
            ("image_folders = [\"images\"]", ":1: image_folders: \"images\" is not absolute"),
            ("# x\nenvironment_folders = [\"edf\"]", ":2: environment_folders: \"edf\" is not absolute"),
            ("image_folders = []\nimage_folders = []", ":2: duplicate key"),
            ("mount_home = 1", ":1: mount_home: invalid type: integer `1`, expected a boolean"),
            ("mounts = [\"/a:b\"]", ":1: mounts: \"/a:b\": the destination is not absolute"),
            ("mounts = [\"a:/b\"]", ":1: mounts: \"a:/b:rw\" is not absolute"),
            ("stage = \"often\"", ":1: stage: \"often\" is not auto, always, never or bcast"),
            ("stage = \"bcast\"", ":1: stage: \"bcast\" is a matter of a job"),
            ("stage_directory = \"tmp\"", ":1: stage_directory: \"tmp\" is not absolute"),
            ("stage_shared = \"tmp\"", ":1: stage_shared: \"tmp\" is not absolute"),
            ("# x\n[mount]\nsquashfs = \"fuse\"", ":2: [mount] is gone: "),
            ("stage = \"auto\"\n[ mount ]\nno_such_key = 1", ":2: [mount] is gone: "),
            ("mounts = []\nmount.owners = [0]", ":2: [mount] is gone: "),
            ("mount = { paths = [\"/sw\"] }", ":1: [mount] is gone: "),
            (
                "stage_read_through = \"5%\"",
                ":1: stage_read_through: it is a size, not a part of a file system",
            ),
            (
                "stage_broadcast = \"late\"",
                ":1: stage_broadcast: unknown variant `late`, expected `first` or `early`",
            ),
            ("stage_max_size = \"lots\"", ":1: stage_max_size: \"lots\" is not an amount of storage"),
            ("image_store = \"/images\"", ":1: image_store: \"/images\" is one directory for all users"),
            ("import = \"often\"", ":1: import: unknown variant `often`, expected one of `submit`, `node`"),
            ("layer_cache_max_size = \"x\"", ":1: layer_cache_max_size: \"x\" is not an amount of storage"),
            ("[registries.\"a b\"]", ":1: registries.\"a b\": \"a b\" is not the name of a registry"),
            (
                "[registries.\"index.docker.io\"]",
                ":1: registries.\"index.docker.io\": \"index.docker.io\" is docker.io by another name",
            ),
            (
                "[registries.\"a.io\"]\nmirrors = [\"https://u:secret@b.io\"]",
                ":2: registries.\"a.io\": mirrors: \"https://…@b.io\" is not the address of a registry",
            ),
            (
                "[registries.\"a.io\"]\nca_file = \"ca.pem\"",
                ":2: registries.\"a.io\": ca_file: \"ca.pem\" is not absolute",
            ),
            (
                "[registries.\"a.io\"]\nca_file = \"/ca.pem\"\nplain_http = true",
                ":1: registries.\"a.io\": plain_http and ca_file contradict each other",
            ),
            ("[registries.\"a.io\"]\n\nmirror = []", ":3: unknown field `mirror`, expected one of `mirrors`"),
            ("[policy]\nregistry = []", ":2: unknown field `registry`, expected one of `registries`"),
            (
                "[policy]\nregistries = [\"https://a.io\"]",
                ":2: policy: registries: \"https://a.io\" is not the",
            ),
            (
                "[policy]\nrepositories = [\"ubuntu\"]",
                ":2: policy: repositories: \"ubuntu\" does not begin with a registry",
            ),
            ("[policy]\nowners = []\nfolders = [\"sw\"]", ":3: policy: folders: \"sw\" is not absolute"),
            ("[policy]\nowners = [true]", ":2: owners: invalid type: boolean `true`, expected a user's name"),
            ("[policy]\nowners = [-1]", ":2: owners: invalid value: integer `-1`, expected a user's name"),
            ("[policy]\ndigests = [\"12\"]", ":2: digests: \"12\" is not sha256: and 64 hexadecimal digits"),
            ("env = [\"=x\"]", ":1: env: \"=…\": the name is empty"),
            ("devices = [\"gpu\"]", ":1: devices: \"gpu\" is not the name of a device"),
        ];
        for (text, expected) in cases {
            let failure = parse(text).unwrap_err();
            let message = failure.message.strip_prefix("/etc/mizzen/mizzen.toml").unwrap();
            assert!(message.starts_with(expected), "{text:?} gives {failure:?}");
            assert!(failure.hint.is_some() && !failure.message.contains('\n'), "{failure:?}");
        }
    }
}
