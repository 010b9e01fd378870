//! What shapes a container beside its image. The same settings come from options, from the job that a nested srun
//! is in, from variables and from mizzen.toml; [`Settings::or`] lets the first of them that says something win.
//!
//! The table below is the only list of them. Options of srun and of `mizzen run`, variables, keys of mizzen.toml, help texts
//! and man pages are made from it: to add a setting, add a line here, and use it where it acts.

mod named;
mod values;

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

pub use named::{ContainerName, ContainerScope, NameMode, SavePath};
pub use values::{Fabric, Gpu, Hostname, Mpi, TomlForm, Unshare, Value, Verbosity, Workdir, Writable};

use crate::Failure;
use crate::device::DeviceName;
use crate::options::{EnvOption, MountOption};
use crate::staging::Policy;

/// A setting, as users write it.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// `mount-home` in --container-mount-home, MIZZEN_CONTAINER_MOUNT_HOME and in the request.
    pub name: &'static str,
    /// Its value in help texts.
    pub argument: Argument,
    /// What it does, in one line.
    pub help: &'static str,
    /// The option that turns it off, if there is one.
    pub off: Option<Off>,
    /// Its option of `mizzen run`, if it has one.
    pub run: Option<&'static str>,
    /// The letter for that.
    pub letter: Option<char>,
    /// Its key in mizzen.toml, if it has one.
    pub toml: Option<&'static str>,
    /// More than fits in one line, for man pages and `--help`.
    pub more: &'static str,
}

/// The argument of an option, by its name in help texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    /// `--container-NAME=VALUE`.
    Required(&'static str),
    /// `--container-NAME[=VALUE]`; without a value it means yes.
    Optional(&'static str),
    /// `--container-NAME`, which means yes.
    No,
}

/// An option that means no.
#[derive(Clone, Copy, Debug)]
pub enum Off {
    /// `--no-container-NAME`, with what it does.
    Negated(&'static str),
    /// An option with another name, and what it does.
    Named(&'static str, &'static str),
}

impl Spec {
    /// The option of srun, sbatch and salloc, without the dashes.
    pub fn option(&self) -> String {
        format!("container-{}", self.name)
    }

    /// The option that turns it off for srun, sbatch and salloc, and what that does.
    pub fn off_option(&self) -> Option<(String, &'static str)> {
        self.off.map(|off| match off {
            Off::Negated(help) => (format!("no-container-{}", self.name), help),
            Off::Named(name, help) => (format!("container-{name}"), help),
        })
    }

    /// The option of `mizzen run` that turns it off, and what that does.
    pub fn run_off(&self) -> Option<(String, &'static str)> {
        let run = self.run?;
        self.off.map(|off| match off {
            Off::Negated(help) => (format!("no-{run}"), help),
            Off::Named(name, help) => (name.to_owned(), help),
        })
    }

    const fn new(name: &'static str, argument: Argument, help: &'static str, off: Option<Off>) -> Spec {
        Spec { name, argument, help, off, run: None, letter: None, toml: None, more: "" }
    }

    const fn run(self, option: &'static str) -> Spec {
        Spec { run: Some(option), ..self }
    }

    const fn letter(self, letter: char) -> Spec {
        Spec { letter: Some(letter), ..self }
    }

    const fn toml(self, key: &'static str) -> Spec {
        Spec { toml: Some(key), ..self }
    }

    const fn more(self, more: &'static str) -> Spec {
        Spec { more, ..self }
    }
}

const fn value(name: &'static str, argument: &'static str, help: &'static str) -> Spec {
    Spec::new(name, Argument::Required(argument), help, None)
}

const fn optional(name: &'static str, argument: &'static str, help: &'static str, off: Option<Off>) -> Spec {
    Spec::new(name, Argument::Optional(argument), help, off)
}

const fn switch(name: &'static str, help: &'static str, off: &'static str) -> Spec {
    Spec::new(name, Argument::No, help, Some(Off::Negated(off)))
}

/// Makes of a table: the keys, a struct with a field for each, its defaults, and what reads and writes all of them.
macro_rules! settings {
    ($($key:ident $field:ident: $type:ty $(= $default:expr)?, $spec:expr;)*) => {
        /// One of the settings.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs)] // the table says what they are
        pub enum Key {
            $($key,)*
        }

        impl Key {
            /// All of them.
            pub const ALL: &'static [Key] = &[$(Key::$key),*];

            /// Its line in the table.
            pub const fn spec(self) -> Spec {
                match self {
                    $(Key::$key => $spec,)*
                }
            }

            /// How mizzen.toml writes it.
            pub const fn toml_form(self) -> TomlForm {
                match self {
                    $(Key::$key => <$type as Value>::TOML,)*
                }
            }
        }

        /// The settings that somebody has made; what is None is left to the next in precedence.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub struct Settings {
            $(pub $field: Option<$type>,)*
        }

        impl Settings {
            $($(
                /// What holds: the setting that was made, or the default.
                pub fn $field(&self) -> $type {
                    self.$field.clone().unwrap_or_else(|| $default)
                }
            )?)*

            /// Takes one value; lists grow, of anything else the last value holds.
            pub fn set(&mut self, key: Key, text: &[u8]) -> Result<(), Failure> {
                match key {
                    $(Key::$key => add(&mut self.$field, Value::parse(text)?),)*
                }
                Ok(())
            }

            /// Forgets what was said about a setting.
            pub fn unset(&mut self, key: Key) {
                match key {
                    $(Key::$key => self.$field = None,)*
                }
            }

            /// The value of a setting as [`Settings::set`] takes it, unless it is left open.
            pub fn text(&self, key: Key) -> Option<Vec<u8>> {
                match key {
                    $(Key::$key => self.$field.as_ref().map(Value::text),)*
                }
            }

            /// These settings, and where they say nothing the other's.
            pub fn or(self, lower: Settings) -> Settings {
                Settings { $($field: self.$field.or(lower.$field),)* }
            }

            /// These settings of a step, in a job with the other's.
            pub fn within(self, outer: Settings) -> Settings {
                Settings { $($field: match (self.$field, outer.$field) {
                    (Some(own), Some(outer)) => Some(own.within(outer)),
                    (own, outer) => own.or(outer),
                },)* }
            }

            /// Relative paths belong to `directory`.
            pub fn absolute(self, directory: &Path) -> Settings {
                Settings { $($field: self.$field.map(|value| value.absolute(directory)),)* }
            }
        }
    };
}

settings! {
    Mounts mounts: Vec<MountOption>,
        value("mounts", "SRC:DST[:FLAGS],...", "mount files and directories of the node")
            .run("mount").letter('m').toml("mounts")
            .more("DST is SRC if not given. FLAGS, joined by +: ro, rw, noexec; nosuid, nodev and rbind always hold. `tmpfs` as \
                   SRC is an empty tmpfs (flag size=SIZE); the flag squashfs mounts the content of a squashfs file. A literal \
                   colon or comma is written \\: or \\,.");
    Env environment: Vec<EnvOption>,
        value("env", "NAME[=VALUE],...", "set variables, or take the node's values in spite of the image's")
            .run("env").letter('e').toml("env");
    Device devices: Vec<DeviceName>,
        value("device", "VENDOR/CLASS=NAME,...", "have devices by their names in the node's CDI specifications, as nvidia.com/gpu=0")
            .run("device").toml("devices");
    Workdir workdir: Workdir,
        value("workdir", "DIR", "start in this directory of the container; image: is the image's own")
            .run("workdir").letter('w');
    Hostname hostname: Hostname,
        value("hostname", "NAME", "have this host name in the container").run("hostname")
            .more("All tasks of the step see it, on every node of the step. Slurm's own names for the node are in SLURMD_NODENAME \
                   and SLURM_JOB_NODELIST.");
    Unshare unshare: Unshare = Unshare::default(),
        value("unshare", "net,ipc,uts", "have namespaces of the container's own: network, IPC, host name").run("unshare")
            .more("All tasks of the step on a node share them. With net there is a loopback and nothing else; with ipc, /dev/shm and \
                   /dev/mqueue are the container's own. `mizzen run` also has pid.");
    Name name: ContainerName,
        value("name", "NAME[:auto|create|exec|no_exec]", "use the container NAME on this node, which keeps its changes for later steps")
            .run("name")
            .more("If it is running, the step enters it; if it exists, it is started with its changes; otherwise it is created from \
                   the image. create: it must not exist yet; exec: it must be running; no_exec: it is not entered; if it is running, a \
                   second container starts on its files, with mounts, namespaces and a user of its own. The image may be left out if \
                   the container exists. JOB.STEP enters the container of a running step.");
    Save save: SavePath,
        value("save", "PATH", "save the container as an image after the last task on the node has ended")
            .run("save")
            .more("A squashfs file; relative to the directory of submission; an existing file is replaced once the new one is \
                   complete. The container is writable, unless --container-readonly. In a step of several nodes PATH needs %N, \
                   which stands for the node's name. A step that was ended by a signal is not saved.");
    MountHome mount_home: bool = true,
        switch("mount-home", "have the home directory in the container", "leave the home directory out")
            .run("home").toml("mount_home");
    Writable writable: Writable = Writable::No,
        optional("writable", "SIZE", "write anywhere in the container, up to SIZE; the changes end with it",
            Some(Off::Named("readonly", "write only to what is mounted from the node")))
            .run("writable").toml("writable")
            .more("The changes are kept in memory, up to SIZE (512m, 2g; default 50% of the memory). Before Linux 6.6 they are \
                   kept on disk, below TMPDIR or /var/tmp, and SIZE is refused.");
    RemapRoot remap_root: bool = false,
        switch("remap-root", "be root inside", "be the same user inside").run("remap-root").toml("remap_root");
    Entrypoint entrypoint: bool = false,
        switch("entrypoint", "start the program through the image's entrypoint", "start the program itself")
            .run("entrypoint").toml("entrypoint")
            .more("With srun it runs once per node before the tasks start, which inherit its variables and working directory.");
    EntrypointLog entrypoint_log: bool = false,
        Spec::new("entrypoint-log", Argument::No, "show what the image's entrypoint prints", None);
    Pytorch pytorch: bool,
        switch("pytorch", "give tasks PyTorch's RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            "do not set RANK and LOCAL_RANK, which tasks in PyTorch images get")
            .run("pytorch")
            .more("They are those that torchrun would set, derived from Slurm's variables. If the image sets PYTORCH_VERSION, tasks of \
                   srun get RANK and LOCAL_RANK even without this option.");
    Script script: bool = true,
        switch("script", "run a batch script or interactive shell inside as well",
            "run a batch script or interactive shell on the node, and its steps inside")
            .toml("script");
    Stage stage: Policy = Policy::Auto,
        value("stage", "auto|always|never|bcast",
            "when to copy the image to the node first: only from network file systems (auto), always, or never")
            .run("stage").toml("stage")
            .more("With srun, bcast reads the image once and sends it to the nodes of the step.");
    Gpu gpu: Gpu = Gpu::Auto,
        value("gpu", "auto|all|none", "which GPUs the container gets, with the node's driver: the step's, all of the node's, or none")
            .run("gpu").toml("gpu");
    Mpi mpi: Mpi = Mpi::Image,
        value("mpi", "image|host", "use the image's MPI library, or replace it with the node's, which must have the same ABI")
            .run("mpi").toml("mpi");
    Fabric fabric: Fabric = Fabric::Auto,
        value("fabric", "auto|host|image",
            "use the node's fabric libraries if the image has none, always, or never")
            .run("fabric").toml("fabric");
    Verbose verbose: Verbosity = Verbosity::Quiet,
        optional("verbose", "debug", "print how long each part of the start took; debug: everything that was tried", None)
            .run("verbose").letter('v');
}

fn add<T: Value>(setting: &mut Option<T>, more: T) {
    match setting {
        Some(value) => value.add(more),
        None => *setting = Some(more),
    }
}

impl Key {
    /// The name: `mount-home` in --container-mount-home, MIZZEN_CONTAINER_MOUNT_HOME and in the request.
    pub fn name(self) -> &'static str {
        self.spec().name
    }

    /// The variable that stands for the option.
    pub fn variable(self) -> String {
        format!("MIZZEN_CONTAINER_{}", self.name().to_uppercase().replace('-', "_"))
    }
}

impl Settings {
    /// Refuses what a step of a job cannot have; `name` tells how a message is to call a setting.
    pub fn check_for_step(&self, name: impl FnOnce(Key) -> String) -> Result<(), Failure> {
        if !self.unshare().pid {
            return Ok(());
        }
        Err(Failure::new("pid is not for the tasks of a step: Slurm knows them by their process ids")
            .hint("leave pid out, or run `srun mizzen run --unshare pid IMAGE PROGRAM`")
            .about(name(Key::Unshare)))
    }

    /// A setting with a relative path, and that path. Not the whole text: it goes into messages, and is the user's.
    pub fn relative(&self) -> Option<(Key, Vec<u8>)> {
        let absolute = self.clone().absolute(Path::new("/"));
        let key = Key::ALL.iter().copied().find(|key| self.text(*key) != absolute.text(*key))?;
        let path = match key {
            Key::Mounts => {
                self.mounts.iter().flatten().find_map(MountOption::relative)?.as_os_str().as_bytes().to_vec()
            }
            _ => self.text(key)?,
        };
        Some((key, path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(Key, &str)]) -> Settings {
        let mut settings = Settings::default();
        for (key, value) in pairs {
            settings.set(*key, value.as_bytes()).unwrap();
        }
        settings
    }

    #[test]
    fn every_setting_survives_its_text() {
        let all = settings(&[
            (Key::Mounts, "/a:/b:ro,c:/d"),
            (Key::Mounts, "/e"),
            (Key::Env, "B,A=1"),
            (Key::Device, "v.com/c=0,v.com/c=1"),
            (Key::Workdir, "w"),
            (Key::Unshare, "uts,net"),
            (Key::MountHome, "no"),
            (Key::Writable, "2g"),
            (Key::RemapRoot, "true"),
            (Key::Entrypoint, "0"),
            (Key::EntrypointLog, "yes"),
            (Key::Pytorch, "yes"),
            (Key::Script, "no"),
            (Key::Stage, "always"),
            (Key::Gpu, "none"),
            (Key::Mpi, "host"),
            (Key::Fabric, "image"),
            (Key::Verbose, "debug"),
            (Key::Hostname, "n1.site"),
            (Key::Name, "dev:exec"),
            (Key::Save, "my.sqsh"),
        ])
        .absolute(Path::new("/here"));
        assert_eq!(all.workdir, Some(Workdir::Directory("/here/w".into())));
        let mut copy = Settings::default();
        for key in Key::ALL {
            copy.set(*key, &all.text(*key).unwrap()).unwrap();
        }
        assert_eq!(copy, all);
        assert!(Key::ALL.iter().all(|key| Settings::default().text(*key).is_none()));
    }

    #[test]
    fn the_first_who_says_something_wins() {
        let option = settings(&[(Key::Mounts, "/a"), (Key::Writable, "no")]);
        let site = settings(&[(Key::Mounts, "/b"), (Key::Writable, "yes"), (Key::MountHome, "no")]);
        let both = option.or(site);
        assert_eq!(both, settings(&[(Key::Mounts, "/a"), (Key::Writable, "no"), (Key::MountHome, "no")]));
    }

    #[test]
    fn mounts_and_variables_of_a_step_are_added_to_the_jobs() {
        let job = settings(&[
            (Key::Mounts, "/a:/x,/b:/y"),
            (Key::Env, "A=1,B=2"),
            (Key::Device, "v.com/c=0"),
            (Key::Writable, "yes"),
        ]);
        let step = settings(&[(Key::Mounts, "/c:/y,/d"), (Key::Env, "A,C=3"), (Key::Device, "v.com/c=1")]);
        let both = settings(&[
            (Key::Mounts, "/a:/x,/c:/y,/d"),
            (Key::Env, "B=2"),
            (Key::Env, "A,C=3"),
            (Key::Device, "v.com/c=1"),
            (Key::Writable, "yes"),
        ]);
        assert_eq!(step.within(job), both);
    }

    #[test]
    fn of_a_relative_setting_only_the_path_is_told() {
        let relative = |key, text| settings(&[(key, text)]).relative();
        assert_eq!(relative(Key::Mounts, "/a:/secret,data:/other,/c"), Some((Key::Mounts, b"data".to_vec())));
        assert_eq!(relative(Key::Workdir, "w"), Some((Key::Workdir, b"w".to_vec())));
        assert_eq!(relative(Key::Mounts, "/a:/b,tmpfs:/c"), None);
        assert_eq!(relative(Key::Workdir, "image:"), None);
    }

    #[test]
    fn bad_values_are_named() {
        for (key, value, message) in [
            (Key::MountHome, "perhaps", "\"perhaps\" is neither yes nor no"),
            (Key::Writable, "10Q", "\"10Q\" is not a size"),
            (Key::Workdir, "", "\"\" is not a directory's name"),
            (Key::Mounts, "/a:b", "\"/a:b\": the destination is not absolute"),
            (Key::Env, "A,=b", "\"=…\": the name is empty"),
            (Key::Device, "gpu", "\"gpu\" is not the name of a device"),
            (Key::Stage, "often", "\"often\" is not auto, always, never or bcast"),
            (Key::Mpi, "mine", "\"mine\" is neither image nor host"),
            (Key::Gpu, "0,1", "\"0,1\" is not auto, all or none"),
            (Key::Fabric, "node", "\"node\" is not auto, host or image"),
            (Key::Verbose, "very", "\"very\" is not yes, no or debug"),
            (Key::Unshare, "", "the list of namespaces is empty"),
            (Key::Unshare, "net,user", "unknown namespace 'user'"),
            (Key::Unshare, "net,", "unknown namespace ''"),
            (Key::Hostname, "-a", "\"-a\" is not a host name"),
            (Key::Hostname, "a b", "\"a b\" is not a host name"),
            (Key::Hostname, "", "\"\" is not a host name"),
        ] {
            assert_eq!(Settings::default().set(key, value.as_bytes()).unwrap_err().message, message);
        }
    }
}
