//! mizzen.toml: one file for the site, the same on login and compute nodes.
//!
//! It is read only when a container was asked for, so a broken file never touches other jobs. What it says holds for
//! all users: hence the checks on who may have written it.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::Failure;
use crate::failure::{cause, quote};
use crate::image::special;
use crate::options::{MountOption, MountSource};
use crate::settings::{Fabric, Gpu, Key, Mpi, Settings, Writable};
use crate::staging::{Amount, Policy, Verify};

/// Where the file is unless plugstack.conf says `config=PATH`.
pub const DEFAULT_PATH: &str = "/etc/mizzen/mizzen.toml";

/// What the kernel shows for users that are not in the map of a user namespace.
const UNMAPPED: u32 = 65534;
/// A larger file is not a configuration.
const SIZE_LIMIT: u64 = 1 << 20;

/// The site's settings. `conf/mizzen.toml` shows every key with its default; a test keeps the two equal.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Folders that are searched for an image given by its bare name.
    pub image_folders: Vec<PathBuf>,
    /// Mounts that every container has, written as for --container-mounts.
    pub mounts: Vec<String>,
    /// Variables for every container, written as for --container-env.
    pub env: Vec<String>,
    /// Devices that every container has, written as for --container-device, where the node knows their kind.
    pub devices: Vec<String>,
    /// Hooks of CDI specifications that devices work without: the names of NVIDIA's, the paths of other programs.
    pub cdi_leave_out_hooks: Vec<String>,
    /// Whether containers have the user's home directory.
    pub mount_home: bool,
    /// Whether the root directory can be written.
    pub writable: bool,
    /// Whether users are root inside.
    pub remap_root: bool,
    /// Whether the image's entrypoint starts the program.
    pub entrypoint: bool,
    /// Whether batch scripts and interactive shells run inside, rather than their steps alone.
    pub script: bool,
    /// Whether Slurm's commands can be called in batch scripts and interactive shells that run inside.
    pub slurm_commands: bool,
    /// When an image is copied to the node before it is used.
    pub stage: Policy,
    /// Where each user has a folder for the copies.
    pub stage_directory: PathBuf,
    /// Where root's `mizzen stage` keeps copies that all users of the node can use; empty where it keeps none.
    pub stage_shared: PathBuf,
    /// When a copy that is there is read before it is used.
    pub stage_verify: Verify,
    /// How much the copies of one user may take, as for [`Amount::parse`].
    pub stage_max_size: String,
    /// How much of the file system the copies leave free.
    pub stage_keep_free: String,
    /// Which of the node's GPUs containers have.
    pub gpu: Gpu,
    /// Whose MPI library programs get.
    pub mpi: Mpi,
    /// Whose libraries for the node's fabric programs get.
    pub fabric: Fabric,
    /// Types of file systems that count as network file systems beside those that are known.
    pub network_file_systems: Vec<String>,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            image_folders: Vec::new(),
            mounts: Vec::new(),
            env: Vec::new(),
            devices: Vec::new(),
            cdi_leave_out_hooks: Vec::new(),
            mount_home: true,
            writable: false,
            remap_root: false,
            entrypoint: false,
            script: true,
            slurm_commands: true,
            stage: Policy::Auto,
            stage_directory: "/var/tmp".into(),
            stage_shared: PathBuf::new(),
            stage_verify: Verify::Pinned,
            stage_max_size: "50%".to_owned(),
            stage_keep_free: "10%".to_owned(),
            gpu: Gpu::Auto,
            mpi: Mpi::Image,
            fabric: Fabric::Auto,
            network_file_systems: Vec::new(),
        }
    }
}

/// Which file to read, and whether it may be missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The default file; without it the built-in defaults hold.
    Default,
    /// A file that the administrator named; it has to be there.
    Named(PathBuf),
}

impl Config {
    /// Reads, checks and parses the file.
    pub fn load(source: &Source) -> Result<Config, Failure> {
        let path = match source {
            Source::Default => Path::new(DEFAULT_PATH),
            Source::Named(path) => path,
        };
        match read_trusted(path)? {
            Some(text) => Config::parse(&text, path),
            None if *source == Source::Default => Ok(Config::default()),
            None => Err(Failure::new(format!("{}: no such file", path.display()))
                .hint("plugstack.conf names it with config=PATH")),
        }
    }

    /// Parses the text of a configuration file; a failure names the line.
    pub fn parse(text: &str, path: &Path) -> Result<Config, Failure> {
        let config: Config = toml::from_str(text).map_err(|error| {
            retired(text, path).unwrap_or_else(|| {
                parse_failure(&error, text, path)
                    .hint("the mizzen.toml that comes with mizzen shows every key with its default")
            })
        })?;
        config.check().map_err(|failure| failure.about(path.display()))?;
        Ok(config)
    }

    /// What only the values themselves can show.
    fn check(&self) -> Result<(), Failure> {
        if let Some(folder) = self.image_folders.iter().find(|folder| !folder.is_absolute()) {
            return Err(Failure::new(format!("image_folders: {folder:?} is not absolute"))
                .hint("write the whole path, beginning with /"));
        }
        if !self.stage_directory.is_absolute() {
            return Err(Failure::new(format!("stage_directory: {:?} is not absolute", self.stage_directory))
                .hint("write the whole path, beginning with /"));
        }
        if !self.stage_shared.as_os_str().is_empty() && !self.stage_shared.is_absolute() {
            return Err(Failure::new(format!("stage_shared: {:?} is not absolute", self.stage_shared))
                .hint("write the whole path, beginning with /"));
        }
        Amount::parse(&self.stage_max_size).map_err(|failure| failure.about("stage_max_size"))?;
        Amount::parse(&self.stage_keep_free).map_err(|failure| failure.about("stage_keep_free"))?;
        let settings = self.settings()?;
        let relative = |mount: &&MountOption| match &mount.source {
            MountSource::Bind(path) | MountSource::Squashfs(path) => !path.is_absolute(),
            MountSource::Tmpfs(_) => false,
        };
        match settings.mounts.iter().find(relative) {
            Some(mount) => {
                Err(Failure::new(format!("mounts: \"{}\" is not absolute", quote(&mount.to_text())))
                    .hint("write the whole path, beginning with /"))
            }
            None => Ok(()),
        }
    }

    /// What holds where the user says nothing. Mounts and variables of the site hold in any case.
    pub fn settings(&self) -> Result<Settings, Failure> {
        let mut settings = Settings {
            mount_home: Some(self.mount_home),
            writable: Some(if self.writable { Writable::Yes } else { Writable::No }),
            remap_root: Some(self.remap_root),
            entrypoint: Some(self.entrypoint),
            script: Some(self.script),
            stage: Some(self.stage),
            gpu: Some(self.gpu),
            mpi: Some(self.mpi),
            ..Settings::default()
        };
        for (key, name, values) in [
            (Key::Mounts, "mounts", &self.mounts),
            (Key::Env, "env", &self.env),
            (Key::Device, "devices", &self.devices),
        ] {
            for value in values {
                settings.set(key, value.as_bytes()).map_err(|failure| failure.about(name))?;
            }
        }
        Ok(settings)
    }
}

/// A key that mizzen.toml no longer has, with what is there in its place.
fn retired(text: &str, path: &Path) -> Option<Failure> {
    // Only what the parser takes for the table, however it is written: `[mount]`, `mount.squashfs = …`.
    toml::from_str::<toml::Table>(text).ok()?.get("mount")?;
    let is_mount = |line: &str| {
        let key = line.trim_start().trim_start_matches('[').trim_start();
        let key = key.trim_start_matches(['"', '\'']);
        let rest = key.strip_prefix("mount").map(|rest| rest.trim_start_matches(['"', '\'']).trim_start());
        rest.is_some_and(|rest| rest.starts_with([']', '.', '=']))
    };
    let line = 1 + text.lines().position(is_mount).unwrap_or(0);
    let message = "[mount] is gone: mizzen has no image mounted by the kernel any more";
    Some(Failure::new(format!("{}:{line}: {message}", path.display())).hint(
        "mount images with the node's own means (docs/admins.md, \"Site mounts\") and name the directory",
    ))
}

/// A failure to parse one of the site's files, with the line and the key.
pub fn parse_failure(error: &toml::de::Error, text: &str, path: &Path) -> Failure {
    let line = error.span().map_or(1, |span| 1 + text[..span.start].matches('\n').count());
    // The parser's messages may span lines; one failure is one line.
    let cause = error.message().lines().collect::<Vec<_>>().join(" ");
    let position = format!("{}:{line}", path.display());
    Failure::new(match error.span().and_then(|span| key_at(text, span.start)) {
        Some(key) => format!("{position}: {key}: {cause}"),
        None => format!("{position}: {cause}"),
    })
}

/// The key whose value stands at this offset, for messages about the value.
fn key_at(text: &str, offset: usize) -> Option<&str> {
    let line_start = text[..offset].rfind('\n').map_or(0, |newline| newline + 1);
    let key = text[line_start..offset].split_once('=')?.0.trim();
    (!key.is_empty()).then_some(key)
}

enum Unread {
    Missing,
    Refused(Failure),
}

/// Reads a file that nobody but root can have written; none if it does not exist.
pub fn read_trusted(path: &Path) -> Result<Option<String>, Failure> {
    if !path.is_absolute() {
        return Err(Failure::new(format!("{}: is not an absolute path", path.display())));
    }
    match check_parents(path).and_then(|()| read_file(path)) {
        Ok(text) => Ok(Some(text)),
        Err(Unread::Missing) => Ok(None),
        Err(Unread::Refused(failure)) => Err(failure),
    }
}

/// Reads all such files of a directory whose names end so, in the order of their names; none if it does not exist.
pub fn read_trusted_directory(
    directory: &Path,
    extension: &str,
) -> Result<Option<Vec<(PathBuf, String)>>, Failure> {
    match check_parents(&directory.join(extension)) {
        Ok(()) => {}
        Err(Unread::Missing) => return Ok(None),
        Err(Unread::Refused(failure)) => return Err(failure),
    }
    let entries = directory
        .read_dir()
        .map_err(|error| Failure::new(format!("{}: {}", directory.display(), cause(&error))))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|own| own == extension));
    paths.sort();
    let mut files = Vec::new();
    for path in paths {
        match read_file(&path) {
            Ok(text) => files.push((path, text)),
            Err(Unread::Missing) => {} // since it was listed
            Err(Unread::Refused(failure)) => return Err(failure),
        }
    }
    Ok(Some(files))
}

fn read_file(path: &Path) -> Result<String, Unread> {
    let shown = path.display();
    let refuse =
        |what: &str, hint: String| Unread::Refused(Failure::new(format!("{shown}: {what}")).hint(hint));
    // O_NONBLOCK: a FIFO in the file's place must not block the opener.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Unread::Missing),
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
            let hint = "put the file itself there, or the link on a directory above it".to_owned();
            return Err(refuse("is a symbolic link; mizzen reads only the file itself", hint));
        }
        Err(error) => return Err(Unread::Refused(unreadable(path, error))),
    };
    let found = file.metadata().map_err(|error| Unread::Refused(unreadable(path, error)))?;
    if !found.is_file() {
        let kind =
            if found.is_dir() { "directory" } else { special(found.file_type()).unwrap_or("directory") };
        let hint = format!("put a text file there, or nothing: mv {shown} {shown}.old");
        return Err(refuse(&format!("is a {kind}, not a regular file"), hint));
    }
    trusted(&found).map_err(|why| {
        let message = format!("{} {why}", path.display());
        Unread::Refused(Failure::new(message).hint(format!("chown root and chmod go-w {}", path.display())))
    })?;
    let bytes =
        read_at_most(&file, SIZE_LIMIT + 1).map_err(|error| Unread::Refused(unreadable(path, error)))?;
    if bytes.len() as u64 > SIZE_LIMIT {
        return Err(refuse("is larger than 1 MiB", "is it the right file?".to_owned()));
    }
    String::from_utf8(bytes).map_err(|error| {
        let good = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = 1 + good.iter().filter(|byte| **byte == b'\n').count();
        let hint = format!("it must be text in UTF-8; iconv -f LATIN1 -t UTF-8 {shown} converts other text");
        Unread::Refused(Failure::new(format!("{shown}:{line}: not UTF-8")).hint(hint))
    })
}

/// A file that is there and cannot be read: the launcher reads it as the user.
fn unreadable(path: &Path, error: io::Error) -> Failure {
    let denied = error.kind() == io::ErrorKind::PermissionDenied;
    let failure = Failure::caused_by(format!("{}: cannot read it", path.display()), error);
    match denied {
        true => failure.hint(format!("all users must be able to read it: chmod a+r {}", path.display())),
        false => failure,
    }
}

/// Nobody but root may be able to put another file in its place, at any level: of the path as it is written, and of the
/// one that its links lead to.
fn check_parents(path: &Path) -> Result<(), Unread> {
    let real = path.parent().and_then(|parent| parent.canonicalize().ok()).unwrap_or_default();
    for parent in
        path.ancestors().skip(1).chain(real.ancestors()).filter(|parent| !parent.as_os_str().is_empty())
    {
        match parent.symlink_metadata() {
            // Where it leads is in `real`; another's link, in a directory like /tmp, could lead elsewhere soon.
            Ok(found) if found.is_symlink() && found.uid() == 0 => {}
            Ok(found) => trusted(&found).map_err(|why| {
                let message = format!("{}: its directory {} {why}", path.display(), parent.display());
                let hint = match found.uid() {
                    UNMAPPED => "root is not known in this user namespace; run mizzen outside of it",
                    _ => "only root may be able to write the file and the directories above it",
                };
                Unread::Refused(Failure::new(message).hint(hint))
            })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Unread::Missing),
            Err(error) => {
                let denied = error.kind() == io::ErrorKind::PermissionDenied;
                let failure = Failure::caused_by(path.display(), error);
                return Err(Unread::Refused(match denied {
                    true => {
                        failure.hint("all users must be able to search the directories above it: chmod a+x")
                    }
                    false => failure,
                }));
            }
        }
    }
    Ok(())
}

/// Refuses a file or directory that somebody else than root could have made, or could replace; links are followed.
pub fn check_only_roots(path: &Path) -> Result<(), Failure> {
    let failed = |why: String| Failure::new(format!("{} {why}", path.display()));
    let real = path.canonicalize().map_err(|error| failed(format!("cannot be found: {}", cause(&error))))?;
    for path in [path, &real] {
        match check_parents(path) {
            Ok(()) => {}
            Err(Unread::Refused(failure)) => return Err(failure),
            Err(Unread::Missing) => return Err(failed("has just vanished".to_owned())),
        }
    }
    let found = real.symlink_metadata().map_err(|error| failed(cause(&error)))?;
    trusted(&found).map_err(failed)
}

/// Why root must not believe this file or directory.
fn trusted(found: &Metadata) -> Result<(), String> {
    // A sticky directory (/tmp) lets nobody replace root's entries, but the entry must then exist.
    let sticky_directory = found.is_dir() && found.mode() & 0o1000 != 0;
    if found.uid() != 0 {
        return Err(format!("belongs to uid {}, not to root", found.uid()));
    }
    if found.mode() & 0o022 != 0 && !sticky_directory {
        return Err(format!("is writable by others than root (mode {:04o})", found.mode() & 0o7777));
    }
    Ok(())
}

fn read_at_most(file: &File, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
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
        assert_eq!(parse(shipped), Ok(Config::default()));
        // Serde knows the keys: a wrong one makes it list them all.
        let keys = parse("no_such_key = 1").unwrap_err().message;
        let expected: Vec<&str> =
            keys.split("expected").nth(1).unwrap().split('`').skip(1).step_by(2).collect();
        assert!(!expected.is_empty());
        for key in expected {
            assert!(shipped.contains(&format!("\n{key} = ")), "conf/mizzen.toml lacks the key {key}");
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
            ("image_folders = [\"images\"]", ": image_folders: \"images\" is not absolute"),
            ("image_folders = []\nimage_folders = []", ":2: duplicate key"),
            ("mount_home = 1", ":1: mount_home: invalid type: integer `1`, expected a boolean"),
            ("mounts = [\"/a:b\"]", ": mounts: \"/a:b\": the destination is not absolute"),
            ("mounts = [\"a:/b\"]", ": mounts: \"a:/b:rw\" is not absolute"),
            (
                "stage = \"often\"",
                ":1: stage: unknown variant `often`, expected one of `auto`, `always`, `never`",
            ),
            ("stage_directory = \"tmp\"", ": stage_directory: \"tmp\" is not absolute"),
            ("stage_shared = \"tmp\"", ": stage_shared: \"tmp\" is not absolute"),
            ("# x\n[mount]\nsquashfs = \"fuse\"", ":2: [mount] is gone: "),
            ("stage = \"auto\"\n[ mount ]\nno_such_key = 1", ":2: [mount] is gone: "),
            ("mounts = []\nmount.owners = [0]", ":2: [mount] is gone: "),
            ("mount = { paths = [\"/sw\"] }", ":1: [mount] is gone: "),
            ("stage_max_size = \"lots\"", ": stage_max_size: \"lots\" is not an amount of storage"),
            ("env = [\"=x\"]", ": env: \"=x\": the name is empty"),
            ("devices = [\"gpu\"]", ": devices: \"gpu\" is not the name of a device"),
        ];
        for (text, expected) in cases {
            let failure = parse(text).unwrap_err();
            let message = failure.message.strip_prefix("/etc/mizzen/mizzen.toml").unwrap();
            assert!(message.starts_with(expected), "{text:?} gives {failure:?}");
            assert!(failure.hint.is_some() && !failure.message.contains('\n'), "{failure:?}");
        }
    }
}
