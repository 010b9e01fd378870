//! The files that a command names. Its caller is inside and sees one file under a name, the command is outside and may
//! find another there, which anybody may have put in a directory like /scratch.
//!
//! So the shim, inside, says which files it has under the names, and the helper's child, outside, refuses the command where it
//! has others. It would be of no use to give the command the file itself: a script has a name in Slurm's records, and a program
//! that is sent to the nodes has it there.

use std::ffi::{OsStr, OsString};
use std::fs::Metadata;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::failure::{cause, quote};
use mizzen_core::fs_server::{self, Look, place_of};
use mizzen_core::trusted_file::reach_only_users;
use mizzen_core::variables;
use nix::errno::Errno;
use nix::unistd::geteuid;

use super::HOST_VARIABLE;
use super::caller_context::belongs_to_one_side;
use super::command_words::{FileWord, file_words};
use super::wire::number;

/// The beginnings of variables that stand for options of Slurm's commands, and of ours.
const OPTION_VARIABLES: [&str; 5] = ["SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "MIZZEN_"];
/// Those that stand for the image of a container, which may be a directory.
const IMAGE_VARIABLES: [&str; 6] = [
    "SLURM_CONTAINER",
    "SRUN_CONTAINER",
    "SBATCH_CONTAINER",
    "SALLOC_CONTAINER",
    variables::IMAGE,
    variables::IMAGE_TOO,
];
/// Tells where the job was submitted, and is no option.
const SUBMIT_DIRECTORY: &str = "SLURM_SUBMIT_DIR";
/// Stands for `--container-save`, a file that is made.
const SAVE_VARIABLE: &str = "MIZZEN_CONTAINER_SAVE";
/// Are srun's `--chdir`.
const WORKING_DIRECTORIES: [&str; 2] = ["SLURM_WORKING_DIR", "SLURM_REMOTE_CWD"];
/// Have srun read its program, as `--bcast` and `--multi-prog` do.
const PROGRAM_READERS: [&str; 2] = ["SLURM_BCAST", "SLURM_SRUN_MULTI"];

/// A file or directory, whatever it is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inode {
    device: u64,
    number: u64,
}

impl Inode {
    /// The file of which this is known.
    pub fn of(found: &Metadata) -> Inode {
        Inode { device: found.dev(), number: found.ino() }
    }

    /// Whether it lies on the file system with this device.
    pub fn is_on(self, device: Option<u64>) -> bool {
        device == Some(self.device)
    }

    /// As text for the wire.
    pub fn encode(inode: Option<Inode>) -> String {
        inode.map_or_else(|| "-".to_owned(), |inode| format!("{}:{}", inode.device, inode.number))
    }

    /// From that text; None if it is none.
    pub fn decode(text: &[u8]) -> Option<Option<Inode>> {
        if text == b"-" {
            return Some(None);
        }
        let colon = text.iter().position(|byte| *byte == b':')?;
        Some(Some(Inode { device: number(&text[..colon])?, number: number(&text[colon + 1..])? }))
    }
}

/// What a command has to do with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It is what the command is about, as the caller sees it.
    Program,
    /// The command starts it outside.
    HostProgram,
    /// Some other word.
    Value,
    /// A variable. One that the job has come with is the node's.
    Variable,
    /// Output goes there.
    Output,
    /// A word that may be a directory in which the command looks for its program.
    Directory,
    /// Where the command or the job begins (`--chdir`), and where files without a directory of their own are.
    WorkingDirectory,
}

/// The roles' names on the wire.
const ROLES: [(Role, &str); 7] = [
    (Role::Program, "program"),
    (Role::HostProgram, "command"),
    (Role::Value, "value"),
    (Role::Variable, "variable"),
    (Role::Output, "output"),
    (Role::Directory, "directory"),
    (Role::WorkingDirectory, "cwd"),
];

/// A file that a command names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedFile {
    /// As the caller has written it.
    pub name: OsString,
    /// The variable whose value that is.
    pub variable: Option<OsString>,
    /// What it is to the command.
    pub role: Role,
    /// What the caller has under that name.
    pub inside: Option<Inode>,
    /// The last directory on the way to it that the caller has: the one in which it is, or would be, or in which that is missing.
    pub parent: Option<Inode>,
}

impl NamedFile {
    /// As bytes for the wire.
    pub fn encode(&self) -> Vec<u8> {
        let role = ROLES.iter().find(|(role, _)| *role == self.role).map_or("", |(_, name)| name);
        let head = format!("{role} {} {} ", Inode::encode(self.inside), Inode::encode(self.parent));
        let variable = self.variable.as_ref().map_or(&b""[..], |name| name.as_bytes());
        [head.as_bytes(), variable, b"=", self.name.as_bytes()].concat()
    }

    /// From those bytes; None if they are none.
    pub fn decode(bytes: &[u8]) -> Option<NamedFile> {
        let mut parts = bytes.splitn(4, |byte| *byte == b' ');
        let role = parts.next()?;
        let (role, _) = ROLES.iter().find(|(_, name)| name.as_bytes() == role)?;
        let (inside, parent) = (Inode::decode(parts.next()?)?, Inode::decode(parts.next()?)?);
        let rest = parts.next()?;
        let sign = rest.iter().position(|byte| *byte == b'=')?;
        let text = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
        let variable = (sign > 0).then(|| text(&rest[..sign]));
        Some(NamedFile { name: text(&rest[sign + 1..]), variable, role: *role, inside, parent })
    }
}

/// The files that a command names which is called now (runs inside).
pub fn named_files(
    command: &str,
    arguments: &[OsString],
    environment: &[(OsString, OsString)],
) -> Result<Vec<NamedFile>, Failure> {
    let value_of = |name: &str| environment.iter().find(|(known, _)| known == name).map(|(_, value)| value);
    let reads_program = PROGRAM_READERS.into_iter().any(|name| value_of(name).is_some());
    let words = file_words(command, arguments, reads_program)?;
    let directories = directories(&words, WORKING_DIRECTORIES.into_iter().filter_map(value_of));
    let program = if command == "salloc" { Role::HostProgram } else { Role::Program };
    // Where relative names of a job's files begin, beside the current directory.
    let begins: Vec<PathBuf> = words
        .iter()
        .filter_map(|word| if let FileWord::Directory(name) = word { Some(*name) } else { None })
        .chain(WORKING_DIRECTORIES.into_iter().filter_map(value_of).map(OsString::as_os_str))
        .filter(|name| !name.is_empty())
        .map(PathBuf::from)
        .collect();
    let words = words.into_iter().flat_map(|word| {
        let (name, role) = match word {
            FileWord::Program(name) => (name, program),
            FileWord::Output(name) => (name, Role::Output),
            FileWord::Directory(name) => return vec![directory(name, Role::WorkingDirectory)],
            FileWord::Image(name) | FileWord::Container(name) | FileWord::Value(name) => (name, Role::Value),
        };
        let is_image = matches!(word, FileWord::Image(_));
        let may_be_nodes = is_image || matches!(word, FileWord::Container(_));
        let names = if may_be_nodes { vec![name.to_owned()] } else { meanings(name, role, &begins) };
        names.iter().filter_map(|name| named_file(name, role, is_image, may_be_nodes)).collect()
    });
    // Which of them name files, each release of Slurm says anew.
    let is_option = |name: &OsStr| {
        OPTION_VARIABLES.iter().any(|prefix| name.as_bytes().starts_with(prefix.as_bytes()))
            && !belongs_to_one_side(name)
            && name != HOST_VARIABLE
            && name != SUBMIT_DIRECTORY
    };
    let variables = environment.iter().filter(|(name, _)| is_option(name)).flat_map(|(name, value)| {
        let is_directory = WORKING_DIRECTORIES.iter().any(|known| name == known) && !value.is_empty()
            || value.as_bytes().contains(&b'/')
                && [&b"_DIR"[..], b"_CWD"].into_iter().any(|end| name.as_bytes().ends_with(end));
        let is_image = IMAGE_VARIABLES.iter().any(|image| name == image);
        let may_be_nodes = is_image || name.as_bytes().starts_with(b"MIZZEN_") && name != SAVE_VARIABLE;
        let files: Vec<NamedFile> = match is_directory {
            true => vec![directory(value, Role::WorkingDirectory)],
            // What is ours is no file's name.
            false if may_be_nodes || name.as_bytes().starts_with(b"SLURM_MIZZEN_") => {
                named_file(value, Role::Variable, is_image, may_be_nodes).into_iter().collect()
            }
            false => meanings(value, Role::Variable, &begins)
                .iter()
                .filter_map(|value| named_file(value, Role::Variable, false, false))
                .collect(),
        };
        files.into_iter().map(|file| NamedFile { variable: Some(name.clone()), ..file })
    });
    Ok(directories.into_iter().chain(words).chain(variables).collect())
}

/// What a word may mean to Slurm. It takes backslashes out of the names of a job's files, and begins with relative ones where the job
/// begins.
fn meanings(name: &OsStr, role: Role, begins: &[PathBuf]) -> Vec<OsString> {
    let mut names = vec![name.to_owned()];
    if matches!(role, Role::Program | Role::HostProgram) {
        return names;
    }
    if name.as_bytes().contains(&b'\\') {
        let without = name.as_bytes().iter().copied().filter(|byte| *byte != b'\\');
        names.push(OsString::from_vec(without.collect()));
    }
    let relative = |name: &&OsString| name.as_bytes().contains(&b'/') && !name.as_bytes().starts_with(b"/");
    let relative: Vec<OsString> = names.iter().filter(relative).cloned().collect();
    let further = begins.iter().flat_map(|begin| relative.iter().map(|name| begin.join(name).into()));
    names.extend(further);
    names
}

/// A name that may be a directory's.
fn directory(name: &OsStr, role: Role) -> NamedFile {
    let look = fs_server::look(Path::new(name));
    let inside = metadata_of(&look).filter(Metadata::is_dir).as_ref().map(Inode::of);
    NamedFile { name: name.to_owned(), variable: None, role, inside, parent: last_directory(&look) }
}

/// What is at the end of a path. Most words are no paths, so what another user serves is not asked: it may never answer. It counts
/// as missing.
fn metadata_of(look: &Look) -> Option<Metadata> {
    look.end.as_ref().ok()?.metadata().ok()
}

fn last_directory(look: &Look) -> Option<Inode> {
    look.directory.as_ref()?.metadata().ok().as_ref().map(Inode::of)
}

/// The directory that a file is in, or would be. Slurm replaces what begins with %, so the one above that counts.
fn parent_of(path: &Path) -> Option<PathBuf> {
    let mut parent: PathBuf =
        path.parent()?.components().take_while(|part| !part.as_os_str().as_bytes().contains(&b'%')).collect();
    if parent.as_os_str().is_empty() {
        parent.push(".");
    }
    Some(parent)
}

/// Where a program with a relative name may be looked for. Which option is `--chdir` need not be known: a directory that is the
/// same on both sides does no harm, and another word is no directory.
fn directories<'a>(words: &[FileWord<'a>], variables: impl Iterator<Item = &'a OsString>) -> Vec<NamedFile> {
    let is_relative =
        |word: &FileWord| matches!(word, FileWord::Program(name) if !name.as_bytes().starts_with(b"/"));
    if !words.iter().any(is_relative) {
        return Vec::new();
    }
    let values = words.iter().filter_map(|word| match word {
        FileWord::Value(name) | FileWord::Directory(name) => Some(*name),
        FileWord::Program(_) | FileWord::Image(_) | FileWord::Output(_) | FileWord::Container(_) => None,
    });
    let names = values.chain(variables.map(OsString::as_os_str)).filter(|name| !name.is_empty());
    names.map(|name| directory(name, Role::Directory)).collect()
}

/// None if there is nothing to compare. A directory may be one that the command writes to, as that of `--bcast`. A name without a slash
/// is looked up in the working directory, which the two sides have in common or the command is in another, and by sbatch and salloc in
/// PATH as it is outside. One that `may_be_nodes` is compared only if the caller has it too.
fn named_file(name: &OsStr, role: Role, is_image: bool, may_be_nodes: bool) -> Option<NamedFile> {
    let is_program = matches!(role, Role::Program | Role::HostProgram);
    let has_slash = name.as_bytes().contains(&b'/');
    // Those are the command's own, and the same: it has the caller's standard streams.
    let is_stream = name == "/dev/stdin" || name.as_bytes().starts_with(b"/dev/fd/");
    if is_stream || !(is_program || has_slash) {
        return None;
    }
    let may_be = |found: &Metadata| {
        found.is_file() || is_image || ((is_program || role == Role::Variable) && !found.is_dir())
    };
    let found = metadata_of(&fs_server::look(Path::new(name)));
    if has_slash && !is_program && !may_be_nodes && found.as_ref().is_some_and(Metadata::is_dir) {
        return Some(directory(name, Role::WorkingDirectory));
    }
    let found = found.filter(may_be);
    let counts = found.is_some() || (has_slash && !may_be_nodes);
    let inside = found.as_ref().map(Inode::of);
    let parent = parent_of(Path::new(name)).and_then(|parent| last_directory(&fs_server::look(&parent)));
    counts.then(|| NamedFile { name: name.to_owned(), variable: None, role, inside, parent })
}

/// Refuses a command that would read other files than its caller sees; `directory` is the command's, and `hosts` are the variables
/// that the job has come with (runs outside).
pub fn check(files: &[NamedFile], directory: &Path, hosts: &[(OsString, OsString)]) -> Result<(), Failure> {
    // By name and value: the same path in another variable is what somebody inside has made of it.
    let is_hosts = |file: &NamedFile| {
        file.variable
            .as_ref()
            .is_some_and(|variable| hosts.iter().any(|(name, value)| name == variable && *value == file.name))
    };
    // Directories first: what begins in one of them is told of as well.
    let is_directory = |file: &&NamedFile| matches!(file.role, Role::Directory | Role::WorkingDirectory);
    let (directories, others): (Vec<_>, Vec<_>) =
        files.iter().filter(|file| !is_hosts(file)).partition(is_directory);
    directories.into_iter().chain(others).try_for_each(|file| file.check(directory))
}

impl NamedFile {
    fn check(&self, directory: &Path) -> Result<(), Failure> {
        let path = directory.join(&self.name);
        let shown = quote(self.name.as_bytes());
        let look = fs_server::look_from(directory, &path);
        match (&look.served, &look.end) {
            (Some(part), _) => return Err(self.unsafe_outside(&part.describe())),
            (None, Err(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM)) => {
                return Err(refusal(format!("{shown} cannot be looked at outside the container")));
            }
            _ => {}
        }
        let outside = metadata_of(&look);
        match (self.inside, outside, self.role) {
            // It may be one by the time that the job starts.
            (inside, Some(outside), Role::Directory | Role::WorkingDirectory) if !outside.is_dir() => {
                self.check_missing(&look, &look)?;
                // The caller has a directory there, and the command would read a file.
                if inside.is_some() { self.refuse_unsafe(&path) } else { Ok(()) }
            }
            (Some(inside), Some(outside), _) if inside == Inode::of(&outside) => {
                self.refuse_foreign_link(&look, outside.uid())?;
                // Under another directory's name it may be a link, whose owner can put something else there.
                let parent = || last_directory(&fs_server::look_from(directory, &parent_of(&path)?));
                match !outside.is_file() || self.parent.is_some() && self.parent == parent() {
                    true => Ok(()),
                    false => self.refuse_unsafe(&path),
                }
            }
            (Some(_), Some(_), Role::Program | Role::Value | Role::Variable | Role::Output) => Err(refusal(
                format!("{shown} is another file outside the container, where this command runs"),
            )),
            (_, Some(_), Role::Directory) => Err(refusal(format!(
                "{shown} is another directory outside the container, where this command would look for its program"
            ))),
            // In one of root's, as in / or /usr, nobody else has put anything.
            (_, Some(outside), Role::WorkingDirectory) => self.check_other_directory(&path, &outside),
            // Somebody may put another there before the command looks, or have one on the node where it is looked for.
            (Some(_), None, Role::Program | Role::Value | Role::Variable) => {
                Err(refusal(format!("{shown} is in the container only, and this command runs outside")))
            }
            // Nothing that the caller sees, but nobody else's to make either.
            (_, Some(_), Role::HostProgram) | (None, Some(_), Role::Program) => self.refuse_unsafe(&path),
            (None, Some(outside), Role::Value | Role::Variable | Role::Output) if outside.is_file() => {
                self.refuse_unsafe(&path)
            }
            // The command may write to it, as to that of `--bcast`, and have started what it has written there.
            (None, Some(outside), Role::Value | Role::Variable | Role::Output) if outside.is_dir() => {
                self.check_other_directory(&path, &outside)
            }
            (_, None, Role::Directory | Role::WorkingDirectory) => self.check_missing(&look, &look),
            // salloc starts its program when the job has been granted, which may be hours later.
            (None, _, Role::Program | Role::Value | Role::Variable | Role::Output)
            | (Some(_), None, Role::Output)
            | (_, None, Role::HostProgram) => match parent_of(&path) {
                Some(parent) => {
                    self.refuse_way_back(directory)?;
                    let up_to_parent = fs_server::look_from(directory, &parent);
                    self.check_missing(&up_to_parent, &look)?;
                    self.refuse_replaced(&path, &parent, &up_to_parent)
                }
                None => Ok(()),
            },
        }
    }

    /// Refuses a directory that is not the caller's, unless it is one in which nobody else can have put anything, as / or /usr.
    fn check_other_directory(&self, path: &Path, outside: &Metadata) -> Result<(), Failure> {
        match self.refuse_unsafe(path) {
            Ok(()) if !others_make_names(outside) => Ok(()),
            _ => Err(refusal(format!(
                "{} is another directory outside the container, where this command runs",
                quote(self.name.as_bytes())
            ))),
        }
    }

    /// Refuses `..` behind what is not there: Slurm makes the directories of an output file, and then it leads elsewhere.
    fn refuse_way_back(&self, directory: &Path) -> Result<(), Failure> {
        let mut before = PathBuf::new();
        for component in Path::new(&self.name).components() {
            let is_missing =
                || !before.as_os_str().is_empty() && fs_server::look_from(directory, &before).end.is_err();
            if component == Component::ParentDir && is_missing() {
                return Err(refusal(format!(
                    "{} leads back (..) from a directory that is not there outside the container",
                    quote(self.name.as_bytes())
                )));
            }
            before.push(component);
        }
        Ok(())
    }

    /// Refuses a directory whose name Slurm makes (`/%x/out`) in one that is neither the caller's nor the user's: it may be anybody's
    /// that is there.
    fn refuse_replaced(&self, path: &Path, parent: &Path, up_to_parent: &Look) -> Result<(), Failure> {
        let is_replaced = path.parent().is_some_and(|whole| whole.components().ne(parent.components()));
        let may_be_output = self.role == Role::Output || Path::new(&self.name).is_absolute();
        let Some(found) = up_to_parent.directory.as_ref().and_then(|opened| opened.metadata().ok()) else {
            return Ok(());
        };
        let is_own = self.parent == Some(Inode::of(&found)) || found.uid() == geteuid().as_raw();
        match is_replaced && may_be_output && !is_own {
            true => Err(self.unsafe_outside("what Slurm puts in place of % may be another user's directory")),
            false => Ok(()),
        }
    }

    /// Refuses what somebody else could have made, where only the outside has it.
    fn refuse_unsafe(&self, path: &Path) -> Result<(), Failure> {
        let missing = |error: std::io::Error| Failure::new(format!("{}: {}", path.display(), cause(&error)));
        reach_only_users(path, geteuid().as_raw())
            .unwrap_or_else(|error| Err(missing(error)))
            .map(drop)
            .map_err(|failure| self.unsafe_outside(&failure.message))
    }

    /// Where there is no file or directory outside, the command may make one, or find what somebody makes until it looks, which may be
    /// when a job starts: in the last directory that is there. That must be one in which the caller sees nothing under the name
    /// either, or one of the user's or root's in which nobody else can make names.
    fn check_missing(&self, up_to_parent: &Look, whole: &Look) -> Result<(), Failure> {
        let found =
            up_to_parent.directory.as_ref().and_then(|opened| Some((opened, opened.metadata().ok()?)));
        let Some((opened, found)) = found else {
            return Err(self.unsafe_outside("its directory cannot be looked at"));
        };
        if self.inside.is_none() && self.parent == Some(Inode::of(&found)) {
            return self.refuse_foreign_link(whole, found.uid());
        }
        let place = place_of(opened);
        self.refuse_unsafe(&place)?;
        self.refuse_foreign_link(whole, geteuid().as_raw())?;
        match others_make_names(&found) {
            true => {
                let place = quote(place.as_os_str().as_bytes());
                Err(self.unsafe_outside(&format!("others can make files in {place}")))
            }
            false => Ok(()),
        }
    }

    /// Refuses a link on the way that belongs neither to the user nor to root nor to the file's owner: it may lead elsewhere as soon as
    /// it has been looked at.
    fn refuse_foreign_link(&self, look: &Look, owner: u32) -> Result<(), Failure> {
        let trusted = [0, geteuid().as_raw(), owner];
        match look.links.iter().find(|(_, uid)| !trusted.contains(uid)) {
            Some((link, _)) => {
                let [shown, link] = [self.name.as_bytes(), link.as_os_str().as_bytes()].map(quote);
                Err(refusal(format!("{shown} is found by another user's link outside: {link}")))
            }
            None => Ok(()),
        }
    }

    fn unsafe_outside(&self, why: &str) -> Failure {
        refusal(format!("{} is taken from outside the container, and {why}", quote(self.name.as_bytes())))
    }
}

/// Whether others can make names in a directory of the user's or of root's, also in one like /tmp, where they cannot take away
/// those of others. The user has not named this one, but another of that name inside: what they open to their group does not count.
fn others_make_names(directory: &Metadata) -> bool {
    directory.mode() & 0o022 != 0
}

fn refusal(why: String) -> Failure {
    Failure::new(why).hint(
        "mount its directory at the same place (--container-mounts), or give sbatch the script as its standard input",
    )
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_named_file_comes_back() {
        let name = OsString::from_vec((1..=255).collect());
        for inside in [None, Some(Inode { device: 1, number: u64::MAX })] {
            for (role, _) in ROLES {
                let variable = (role == Role::Variable).then(|| "SLURM PROLOG".into());
                let file = NamedFile { name: name.clone(), variable, role, inside, parent: inside };
                assert_eq!(NamedFile::decode(&file.encode()), Some(file));
            }
        }
        for bytes in [
            "",
            "program",
            "program -",
            "program - -",
            "other - - =x",
            "value 1 - =x",
            "value 1: - =x",
            "value - a:1 =x",
            "value - - x",
        ] {
            assert_eq!(NamedFile::decode(bytes.as_bytes()), None, "{bytes}");
        }
    }

    #[test]
    fn only_the_callers_own_file_will_do() {
        let top = std::env::temp_dir().join(format!("mizzen-named-{}", std::process::id()));
        fs::create_dir(&top).unwrap();
        let [one, other] = ["one", "other"].map(|name| top.join(name));
        [&one, &other].into_iter().for_each(|path| fs::write(path, "").unwrap());
        let inode = |path: &Path| Some(Inode::of(&fs::metadata(path).unwrap()));
        let check_variable = |variable: Option<&str>, name: &str, role: Role, inside: Option<Inode>| {
            let variable = variable.map(OsString::from);
            let file = NamedFile { name: name.into(), variable, role, inside, parent: None };
            let hosts = [("SLURM_PROLOG".into(), "other".into())];
            check(&[file], &top, &hosts).map_err(|failure| failure.message)
        };
        let check = |name: &str, role: Role, inside: Option<Inode>| {
            check_variable((role == Role::Variable).then_some("SLURM_EPILOG"), name, role, inside)
        };
        let hosts = check_variable(Some("SLURM_PROLOG"), "other", Role::Variable, inode(&one));
        assert_eq!(hosts, Ok(()), "the job has come with it");
        assert!(check("other", Role::Variable, inode(&one)).is_err(), "and not with this one");
        for role in [Role::Value, Role::Variable, Role::Output, Role::Program] {
            assert_eq!(check("one", role, inode(&one)), Ok(()));
            let expected = "one is another file outside the container, where this command runs".to_owned();
            assert_eq!(check("one", role, inode(&other)), Err(expected));
        }
        let expected =
            ".. is another directory outside the container, where this command would look for its program";
        assert_eq!(check("..", Role::Directory, inode(&one)), Err(expected.to_owned()));
        assert_eq!(check("..", Role::Directory, None), Err(expected.to_owned()));
        assert_eq!(check(".", Role::Directory, inode(&top)), Ok(()));
        assert_eq!(check("one", Role::Directory, None), Ok(()));
        assert_eq!(check("missing", Role::Directory, None), Ok(()));
        assert_eq!(check("missing", Role::Output, inode(&one)), Ok(()));
        let expected = "missing is in the container only, and this command runs outside".to_owned();
        for role in [Role::Program, Role::Value, Role::Variable] {
            assert_eq!(check("missing", role, inode(&one)), Err(expected.clone()));
        }
        assert_eq!(check("missing", Role::Program, None), Ok(()));
        // Others could make them before the command looks, if it is not the caller's own directory.
        fs::set_permissions(&top, PermissionsExt::from_mode(0o775)).unwrap();
        for (name, role) in
            [("missing", Role::Output), ("missing/x/%j", Role::Output), ("missing", Role::WorkingDirectory)]
        {
            let refused = check(name, role, None).unwrap_err();
            assert!(
                refused.starts_with(&format!("{name} is taken from outside the container, and ")),
                "{refused}"
            );
            let parent = inode(&top);
            let file = NamedFile { name: name.into(), variable: None, role, inside: None, parent };
            assert_eq!(file.check(&top), Ok(()));
        }
        fs::remove_dir_all(&top).unwrap();
    }

    /// Slurm takes backslashes out of names, begins where the job begins, and makes directories that are missing.
    #[test]
    fn a_name_is_looked_at_as_slurm_reads_it() {
        let names = |words: &[&str], variables: &[(&str, &str)]| {
            let words: Vec<OsString> = words.iter().map(OsString::from).collect();
            let variables: Vec<_> =
                variables.iter().map(|(name, value)| (name.into(), value.into())).collect();
            let found = named_files("sbatch", &words, &variables).unwrap().into_iter();
            found
                .map(|file| format!("{:?} {}", file.role, file.name.display()))
                .collect::<Vec<_>>()
                .join(", ")
        };
        assert_eq!(names(&["-o", r"/x\/y%1"], &[]), r"Output /x\/y%1, Output /x/y%1");
        let begun = "WorkingDirectory /w, Output logs/out, Output /w/logs/out";
        assert_eq!(names(&["-D", "/w", "-o", "logs/out"], &[]), begun);
        let variables = [("SLURM_WORKING_DIR", "w"), ("SBATCH_OUTPUT", "logs/out")];
        let begun = "WorkingDirectory w, Variable logs/out, Variable w/logs/out";
        assert_eq!(names(&[], &variables), begun);
        // What the caller has as a directory may be written to.
        assert_eq!(names(&["--bcast=/etc/"], &[]), "WorkingDirectory /etc/");
        assert_eq!(names(&[], &[("SLURM_BCAST", "/etc/")]), "WorkingDirectory /etc/");
    }

    #[test]
    fn another_directory_or_what_slurm_makes_there_is_refused() {
        let top = std::env::temp_dir().join(format!("mizzen-directories-{}", std::process::id()));
        fs::create_dir(&top).unwrap();
        fs::create_dir(top.join("open")).unwrap();
        fs::write(top.join("own"), "").unwrap();
        let mode = |name: &str, mode: u32| {
            fs::set_permissions(top.join(name), PermissionsExt::from_mode(mode)).unwrap();
        };
        mode("open", 0o777);
        let check = |name: &str, role: Role, inside: Option<Inode>, parent: Option<Inode>| {
            let file = NamedFile { name: name.into(), variable: None, role, inside, parent };
            file.check(&top).map_err(|failure| failure.message)
        };
        let inode = |name: &str| Some(Inode::of(&fs::metadata(top.join(name)).unwrap()));
        let other = "open/ is another directory outside the container, where this command runs".to_owned();
        for role in [Role::Value, Role::Variable, Role::Output, Role::WorkingDirectory] {
            assert_eq!(check("open/", role, None, None), Err(other.clone()), "{role:?}");
        }
        assert_eq!(check("open/", Role::WorkingDirectory, inode("open"), None), Ok(()));
        mode("open", 0o755);
        assert_eq!(check("open/", Role::Value, None, None), Ok(()), "nobody else's");
        // The same file under the name of another directory: its owner can put another there.
        assert_eq!(check("own", Role::Output, inode("own"), None), Ok(()));
        mode("", 0o777);
        assert!(check("own", Role::Output, inode("own"), None).is_err());
        assert_eq!(check("own", Role::Output, inode("own"), inode("")), Ok(()));
        let null = Some(Inode::of(&fs::metadata("/dev/null").unwrap()));
        assert_eq!(check("/dev/null", Role::Variable, null, None), Ok(()), "in a container's own /dev");
        mode("", 0o755);
        let back = "x/../own leads back (..) from a directory that is not there outside the container";
        assert_eq!(check("x/../own", Role::Output, None, None), Err(back.to_owned()));
        assert_eq!(check("open/../new", Role::Output, None, None), Ok(()));
        assert_eq!(check("%x/out", Role::Output, None, None), Ok(()), "the user's own directory");
        assert_eq!(check("/%x/out", Role::Output, None, inode("/")), Ok(()));
        if !geteuid().is_root() {
            let replaced = check("/%x/out", Role::Output, None, None).unwrap_err();
            assert!(replaced.ends_with("what Slurm puts in place of % may be another user's directory"));
        }
        fs::remove_dir_all(&top).unwrap();
    }

    #[test]
    fn names_are_looked_up_as_the_command_would() {
        let names = |command: &str, words: &[&str]| {
            let words: Vec<OsString> = words.iter().map(OsString::from).collect();
            let found =
                named_files(command, &words, &[("SLURM_PROLOG".into(), "/etc/passwd".into())]).unwrap();
            let shown = |file: NamedFile| format!("{} {}", file.name.display(), file.inside.is_some());
            found.into_iter().map(shown).collect::<Vec<_>>().join(", ")
        };
        assert_eq!(names("sbatch", &["/no/such"]), "/no/such false, /etc/passwd true");
        assert_eq!(names("sbatch", &["no-such-file"]), "/etc/passwd true");
        assert_eq!(names("sbatch", &["/dev/stdin"]), "/etc/passwd true");
        assert_eq!(names("sbatch", &["-D", "/etc", "j"]), "/etc true, /etc true, /etc/passwd true");
        assert_eq!(names("sbatch", &["-D/x/y", "/j"]), "/x/y false, /j false, /etc/passwd true");
        assert_eq!(names("sbatch", &["-o", "/x/%j", "/j"]), "/x/%j false, /j false, /etc/passwd true");
        assert_eq!(names("srun", &["--container-workdir=/x/y", "x"]), "/etc/passwd true");
        for image in ["--container=/usr", "--container-image=/usr"] {
            assert_eq!(names("srun", &[image, "x"]), "/usr true, /etc/passwd true");
        }
        assert_eq!(names("srun", &["--container", "/usr", "x"]), "/usr true, /etc/passwd true");
        assert_eq!(names("srun", &["--container-mounts=/usr", "x"]), "/etc/passwd true");
        assert_eq!(names("srun", &["-i", "/etc/group", "/bin/sh"]), "/etc/group true, /etc/passwd true");
        let variables = |name: &str, value: &str| {
            named_files("squeue", &[], &[(name.into(), value.into())]).unwrap().len()
        };
        for (name, value, expected) in [
            ("SBATCH_CONTAINER", "/usr", 1),
            ("MIZZEN_CONTAINER", "/usr", 1),
            ("SLURM_SUBMIT_DIR", "/usr", 0),
            ("SLURM_OF_A_LATER_RELEASE", "/etc/passwd", 1),
            ("SBATCH_WCKEY", "passwd", 0),
            ("DATA", "/etc/passwd", 0),
        ] {
            assert_eq!(variables(name, value), expected, "{name}");
        }
        assert_eq!(
            names("srun", &["-o", "/dev/null", "--chdir=/etc", "-J", "x"]),
            "/dev/null false, /etc true, /etc/passwd true"
        );
    }
}
