//! Finds and opens environment files. A name is looked up in the user's folders and the site's; a path is taken as it is.
//!
//! Who writes such a file decides what its reader runs, with the reader's rights. So nobody else's file is used unless the reader
//! has chosen it, or the folder of its owner: by path, or in EDF_PATH. A file that everybody can write is nobody's, and refused.

use std::ffi::OsStr;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use mizzen_core::failure::quote;
use mizzen_core::fs_server::{self, FsServer};
use mizzen_core::image::special;
use mizzen_core::options::expected_of_a_shell;
use mizzen_core::similar::similar_file;
use mizzen_core::{Config, Failure};

/// A larger file is something else.
const SIZE_LIMIT: u64 = 1 << 20;
/// No path is longer.
const NAME_LIMIT: usize = 4095;

/// Where files are looked for.
#[derive(Clone, Debug)]
pub struct Finder {
    /// Where relative paths begin.
    pub directory: PathBuf,
    /// The folders of names, with where each comes from.
    pub folders: Vec<(PathBuf, FolderOrigin)>,
    /// Who asks.
    pub uid: u32,
}

/// Who has named a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FolderOrigin {
    /// The user, in the variable EDF_PATH.
    Variable,
    /// Nobody: the default, in the home directory.
    Home,
    /// The site, in mizzen.toml.
    Site,
}

impl FolderOrigin {
    /// As `mizzen env list` shows it.
    pub fn name(self) -> &'static str {
        match self {
            FolderOrigin::Variable => "EDF_PATH",
            FolderOrigin::Home => "home",
            FolderOrigin::Site => "site",
        }
    }
}

/// A file that was found, open and trusted.
#[derive(Debug)]
pub struct FoundFile {
    /// Its absolute path.
    pub path: PathBuf,
    /// The file.
    file: File,
    /// Device and inode.
    pub id: (u64, u64),
    /// Whose it is.
    pub owner: u32,
}

/// By what a file was found.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FoundBy<'a> {
    /// A path with a slash: the user means this file.
    Path,
    /// A bare name in the current directory.
    BareName,
    /// A relative path in another file, which belongs to this user: the reader has not chosen it.
    Parent(u32),
    /// A name in one of the folders, or in a directory below it.
    Folder(&'a Path, FolderOrigin),
}

impl Finder {
    /// The folders of this user and site. `edf_path` is the variable of that name.
    pub fn new(
        directory: PathBuf,
        edf_path: Option<&OsStr>,
        home: Option<&Path>,
        config: &Config,
        uid: u32,
    ) -> Result<Finder, Failure> {
        let mut folders: Vec<(PathBuf, FolderOrigin)> = match edf_path.filter(|path| !path.is_empty()) {
            Some(list) => {
                let folders = std::env::split_paths(list).filter(|folder| !folder.as_os_str().is_empty());
                folders.map(|folder| (folder, FolderOrigin::Variable)).collect()
            }
            None => home.map(|home| (home.join(".edf"), FolderOrigin::Home)).into_iter().collect(),
        };
        // It would be another folder in each directory, and in some of them anybody's.
        if let Some((folder, _)) = folders.iter().find(|(folder, _)| !folder.is_absolute()) {
            return Err(Failure::new(format!("EDF_PATH: \"{}\" is not absolute", shown(folder)))
                .hint("write whole paths, beginning with /, with colons between them"));
        }
        folders.extend(config.environment_folders.iter().map(|folder| (folder.clone(), FolderOrigin::Site)));
        Ok(Finder { directory, folders, uid })
    }

    /// Finds the file that a name or path means.
    pub fn find(&self, name: &str) -> Result<FoundFile, Failure> {
        self.find_from(name, None)
    }

    /// Finds a parent of a file. A relative path begins where that file is, not where its reader happens to be.
    pub fn find_parent(&self, name: &str, child: &FoundFile) -> Result<FoundFile, Failure> {
        self.find_from(name, Some(child))
    }

    fn find_from(&self, name: &str, child: Option<&FoundFile>) -> Result<FoundFile, Failure> {
        check_name(name)?;
        let is_path = name.starts_with(['.', '/']) || name.ends_with(".toml");
        let path = Path::new(name);
        let is_bare = path.components().count() == 1;
        let file_name = if is_path { name.to_owned() } else { format!("{name}.toml") };
        if !path.components().all(|part| matches!(part, Component::Normal(_))) && !is_path {
            return Err(Failure::new(format!(
                "\"{}\" is not the name of an environment file",
                quote(name.as_bytes())
            ))
            .hint("write a name, or a path that begins with . or /"));
        }
        let mut candidates = Vec::new();
        if is_path {
            let is_relative_to = child.filter(|_| path.is_relative());
            let directory = is_relative_to.and_then(|child| child.path.parent()).unwrap_or(&self.directory);
            let found_by = match is_relative_to {
                Some(child) => FoundBy::Parent(child.owner),
                None if is_bare && !name.starts_with('.') => FoundBy::BareName,
                None => FoundBy::Path,
            };
            candidates.push((directory.join(path), found_by));
        }
        if !is_path || is_bare && !name.starts_with('.') {
            let in_folders = self.folders.iter();
            candidates.extend(
                in_folders
                    .map(|(folder, origin)| (folder.join(&file_name), FoundBy::Folder(folder, *origin))),
            );
        }
        for (path, found_by) in &candidates {
            if let Some(found) = self.open(path, *found_by)? {
                return Ok(found);
            }
        }
        Err(missing(name, &candidates.into_iter().map(|(path, _)| path).collect::<Vec<_>>()))
    }

    /// Opens a file and sees whom it belongs to; None if there is none.
    fn open(&self, path: &Path, found_by: FoundBy<'_>) -> Result<Option<FoundFile>, Failure> {
        let failed = |error: io::Error| Failure::caused_by(shown(path), error);
        // A server of another user's says whose its files are, or never answers. Who writes a path means it. What is looked at is what has
        // been reached: others may mount something there at any time.
        let is_path = found_by == FoundBy::Path;
        let look = (!is_path).then(|| fs_server::look_unless(path, FsServer::is_foreign));
        if let Some(part) = look.as_ref().and_then(|look| look.served.as_ref()) {
            return Err(fs_server::not_safe(path, part));
        }
        let link = match is_path {
            true => path.symlink_metadata(),
            false => fs_server::reach_name(Path::new("."), path).and_then(|found| found.metadata()),
        };
        let link = match link {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                return Err(failed(error).or_hint("it must be there, and you must be able to see it"));
            }
        };
        let reached = look.map(|look| look.end).transpose().map_err(|errno| failed(errno.into()))?;
        let place = reached.as_ref().map_or(path.to_owned(), fs_server::proc_path);
        // Once by name, so that no device is opened; O_NONBLOCK, because a FIFO put there in between must not hang us.
        check_regular(path, &place.metadata().map_err(failed)?)?;
        let flags = libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(&place).map_err(failed)?;
        let found = file.metadata().map_err(failed)?;
        check_regular(path, &found)?;
        self.check_trust(path, &[&link, &found], found_by)?;
        let (id, owner) = ((found.dev(), found.ino()), found.uid());
        Ok(Some(FoundFile { path: path.components().collect(), file, id, owner }))
    }

    /// Refuses a file that somebody else can have put there without the user's knowledge.
    fn check_trust(&self, path: &Path, found: &[&Metadata; 2], found_by: FoundBy<'_>) -> Result<(), Failure> {
        let file = shown(path);
        if found[1].mode() & 0o002 != 0 {
            let mode = found[1].mode() & 0o7777;
            return Err(Failure::new(format!("{file} can be written by everybody (mode {mode:04o})"))
                .hint(format!("chmod o-w {file}")));
        }
        let metadata = |directory: &Path| {
            let found = match found_by {
                FoundBy::Path => directory.metadata(),
                _ => fs_server::reach(directory).and_then(|found| found.metadata()),
            };
            found.map_err(|error| Failure::caused_by(shown(directory), error))
        };
        let mut owners = found.map(Metadata::uid).to_vec();
        let mut named_owner = None;
        let top = match found_by {
            FoundBy::Parent(owner) => {
                named_owner = Some(owner);
                path.parent().unwrap_or(Path::new("/"))
            }
            FoundBy::Path | FoundBy::BareName => path.parent().unwrap_or(Path::new("/")),
            FoundBy::Folder(folder, origin) => {
                let owner = metadata(folder)?.uid();
                if origin == FolderOrigin::Home {
                    owners.push(owner);
                } else {
                    named_owner = Some(owner);
                }
                folder
            }
        };
        // Who may write to a file of the user's can have renamed it to where they can make names, as in /tmp.
        if found_by != FoundBy::Path && found[1].mode() & 0o020 != 0 {
            let around = metadata(path.parent().unwrap_or(Path::new("/")))?;
            // The user, or the site, has named the folder, and so its group.
            let is_named = matches!(found_by, FoundBy::Folder(..)) || around.uid() == found[1].uid();
            let others = if is_named { 0o002 } else { 0o022 };
            if around.mode() & others != 0 {
                return Err(Failure::new(format!(
                    "{file} can be written by its group, and others can make files in its directory"
                ))
                .hint(format!("chmod g-w {file}, if it is yours")));
            }
        }
        for directory in path.ancestors().skip(1).take_while(|directory| directory.starts_with(top)) {
            let found = metadata(directory)?;
            if found.mode() & 0o1002 == 0o002 {
                let mode = found.mode() & 0o7777;
                return Err(Failure::new(format!(
                    "{file} lies in a directory in which everybody can replace it (mode {mode:04o})"
                ))
                .hint("move it to a directory that only you, or those whom you trust, can write"));
            }
            // What lies below the folder may be somebody else's, whose folder it then is.
            if directory != top {
                let link = match found_by {
                    FoundBy::Path => directory.symlink_metadata(),
                    _ => fs_server::reach_name(Path::new("."), directory).and_then(|found| found.metadata()),
                };
                let link = link.map_err(|error| Failure::caused_by(shown(directory), error))?;
                owners.extend([link.uid(), found.uid()]);
            }
        }
        let known = |owner: u32| {
            found_by == FoundBy::Path || owner == self.uid || owner == 0 || Some(owner) == named_owner
        };
        match owners.into_iter().find(|owner| !known(*owner)) {
            Some(owner) => {
                let hint = match found_by {
                    FoundBy::Parent(_) => "a relative path begins at the file that has it; write whole paths in files for others".to_owned(),
                    _ => format!("write its path, {file}, with a slash, if you mean this file"),
                };
                Err(Failure::new(format!("{file} belongs to another user, uid {owner}")).hint(hint))
            }
            None => Ok(()),
        }
    }
}

impl FoundFile {
    /// Its text.
    pub fn read(&self) -> Result<String, Failure> {
        let path = shown(&self.path);
        let mut bytes = Vec::new();
        (&self.file)
            .take(SIZE_LIMIT + 1)
            .read_to_end(&mut bytes)
            .map_err(|error| Failure::caused_by(format!("{path}: cannot read it"), error))?;
        if bytes.len() as u64 > SIZE_LIMIT {
            return Err(
                Failure::new(format!("{path} is larger than 1 MiB")).hint("is it an environment file?")
            );
        }
        String::from_utf8(bytes).map_err(|error| {
            let good = &error.as_bytes()[..error.utf8_error().valid_up_to()];
            let line = 1 + good.iter().filter(|byte| **byte == b'\n').count();
            Failure::new(format!("{path}:{line}: not UTF-8")).hint("an environment file is text in UTF-8")
        })
    }
}

fn check_name(name: &str) -> Result<(), Failure> {
    if name.is_empty() {
        return Err(Failure::new("the name of the environment file is empty")
            .hint("write --environment=NAME; a shell variable in it may be unset"));
    }
    let shown = quote(name.as_bytes());
    if name.len() > NAME_LIMIT {
        return Err(Failure::new(format!("the name has {} bytes: {shown}", name.len()))
            .hint(format!("{NAME_LIMIT} is the limit of a path")));
    }
    if name.bytes().any(|byte| byte.is_ascii_control()) {
        return Err(Failure::new(format!("control character in \"{shown}\"")));
    }
    Ok(())
}

fn check_regular(path: &Path, found: &Metadata) -> Result<(), Failure> {
    if found.is_file() {
        return Ok(());
    }
    let kind =
        if found.is_dir() { "directory" } else { special(found.file_type()).unwrap_or("special file") };
    Err(Failure::new(format!("{} is a {kind}, not an environment file", shown(path)))
        .hint("an environment file is a text file in TOML"))
}

fn missing(name: &str, tried: &[PathBuf]) -> Failure {
    let shown_all: Vec<String> = tried.iter().map(|path| shown(path)).collect();
    let failure = Failure::new(format!("no such environment file; tried {}", shown_all.join(", ")));
    let meant = tried.iter().find_map(|path| {
        let similar = similar_file(path.parent()?, path.file_name()?.to_str()?)?;
        Some(path.with_file_name(similar)).filter(|path| path.extension().is_some_and(|end| end == "toml"))
    });
    match (meant, expected_of_a_shell(name.as_bytes())) {
        (Some(meant), _) => failure.hint(format!("did you mean {}?", shown(&meant))),
        (None, Some(word)) => failure.hint(format!("{word} is not expanded here, as a shell would do")),
        (None, None) if name == "none" => failure.hint("--container=none runs on the node"),
        (None, None) => {
            failure.hint("`mizzen env list` shows those that are there; EDF_PATH names your folders")
        }
    }
}

fn shown(path: &Path) -> String {
    quote(path.as_os_str().as_bytes())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;
    use crate::image::testing::Scratch;

    fn config(folder: &Path) -> Config {
        Config { environment_folders: vec![folder.to_owned()], ..Config::default() }
    }

    #[test]
    fn names_are_looked_up_and_paths_are_not() {
        let scratch = Scratch::new();
        let top = scratch.path();
        for file in [
            "here/a.toml",
            "here/b",
            "one/a.toml",
            "one/sub/c.toml",
            "two/d.toml",
            "site/a.toml",
            "site/e.toml",
        ] {
            scratch.file(file, "");
        }
        let list = std::env::join_paths([top.join("one"), top.join("two"), PathBuf::new()]).unwrap();
        let site = config(&top.join("site"));
        let finder = Finder::new(top.join("here"), Some(&list), None, &site, 0).unwrap();
        let find =
            |name: &str| finder.find(name).map(|found| found.path.strip_prefix(top).unwrap().to_owned());
        for (name, file) in [
            ("a", "one/a.toml"),
            ("d", "two/d.toml"),
            ("e", "site/e.toml"),
            ("sub/c", "one/sub/c.toml"),
            ("a.toml", "here/a.toml"),
            ("e.toml", "site/e.toml"),
            ("./a.toml", "here/a.toml"),
            ("./b", "here/b"),
            ("../one/a.toml", "here/../one/a.toml"),
        ] {
            assert_eq!(find(name).as_deref(), Ok(Path::new(file)), "{name}");
        }
        let absolute = top.join("two/d.toml");
        assert_eq!(find(absolute.to_str().unwrap()).as_deref(), Ok(Path::new("two/d.toml")));
        for (name, message) in [
            ("", "the name of the environment file is empty"),
            ("b", "no such environment file; tried "),
            ("./e.toml", "no such environment file; tried "),
            ("a/../../x", "\"a/../../x\" is not the name of an environment file"),
            ("a\nb", "control character in \"a\\nb\""),
            ("/dev/null", "/dev/null is a character device, not an environment file"),
            (top.to_str().unwrap(), &format!("{} is a directory, not an environment file", top.display())),
        ] {
            let failure = find(name).unwrap_err();
            assert!(failure.message.starts_with(message), "{name}: {failure}");
        }
        assert!(find("d2").unwrap_err().hint.unwrap().ends_with("/a.toml?"));
        assert_eq!(find("none").unwrap_err().hint.unwrap(), "--container=none runs on the node");
        let home = Finder::new("/".into(), Some(OsStr::new("")), Some(&top.join("h")), &site, 0).unwrap();
        assert_eq!(home.folders[0], (top.join("h/.edf"), FolderOrigin::Home));
        let relative = Finder::new("/".into(), Some(OsStr::new("/a:b")), None, &site, 0).unwrap_err();
        assert_eq!(relative.message, "EDF_PATH: \"b\" is not absolute");
    }

    #[test]
    fn nobody_else_decides_what_is_run() {
        let scratch = Scratch::new();
        let top = scratch.path();
        let mode =
            |path: &str, mode| fs::set_permissions(top.join(path), Permissions::from_mode(mode)).unwrap();
        scratch.file("here/own.toml", "");
        scratch.file("folder/own.toml", "");
        let uid = top.metadata().unwrap().uid();
        let list = top.join("folder");
        let finder = |uid| {
            Finder::new(top.join("here"), Some(list.as_os_str()), None, &Config::default(), uid).unwrap()
        };
        let why = |uid, name: &str| finder(uid).find(name).map(|_| ()).map_err(|failure| failure.message);
        assert_eq!(why(uid, "own"), Ok(()));
        mode("folder/own.toml", 0o646);
        let file = top.join("folder/own.toml");
        assert_eq!(
            why(uid, "own"),
            Err(format!("{} can be written by everybody (mode 0646)", file.display()))
        );
        assert!(why(uid, file.to_str().unwrap()).is_err(), "a path is no excuse");
        mode("folder/own.toml", 0o644);
        mode("folder", 0o777);
        assert!(
            why(uid, "own").unwrap_err().contains("lies in a directory in which everybody can replace it")
        );
        mode("folder", 0o1777);
        assert_eq!(why(uid, "own"), Ok(()));
        // A member of the group can have renamed it there.
        for (directory, name) in [("folder", "own"), ("here", "own.toml")] {
            mode(directory, 0o1777);
            mode(&format!("{directory}/own.toml"), 0o664);
            let refused = why(uid, name).unwrap_err();
            assert!(
                refused.ends_with("can be written by its group, and others can make files in its directory")
            );
            mode(directory, 0o755);
            assert_eq!(why(uid, name), Ok(()));
            mode(&format!("{directory}/own.toml"), 0o644);
        }
        mode("folder", 0o1777);
        if uid != 0 {
            return;
        }
        // Another user's: in the folder that they share, in the current directory, and by its path.
        chown(&file, Some(4711), None).unwrap();
        chown(top.join("here/own.toml"), Some(4711), None).unwrap();
        let others = "belongs to another user, uid 4711";
        assert!(why(4712, "own").unwrap_err().ends_with(others));
        assert!(why(4712, "own.toml").unwrap_err().ends_with(others));
        assert_eq!(why(4712, "./own.toml"), Ok(()), "the user means this one");
        assert_eq!(why(4711, "own"), Ok(()));
        // The user has named the folder, and so its owner.
        chown(&list, Some(4711), None).unwrap();
        assert_eq!(why(4712, "own"), Ok(()));
        // Below a folder for all, a directory is its owner's.
        chown(&list, Some(0), None).unwrap();
        scratch.file("folder/ml/own.toml", "");
        assert_eq!(why(4712, "ml/own"), Ok(()));
        chown(list.join("ml"), Some(4711), None).unwrap();
        assert!(why(4712, "ml/own").unwrap_err().ends_with(others));
        chown(list.join("ml/own.toml"), Some(4711), None).unwrap();
        assert!(why(4712, "ml/own").unwrap_err().ends_with(others));
        assert_eq!(why(4711, "ml/own"), Ok(()));
        // The default folder is not one that the user has named.
        scratch.file("h/.edf/own.toml", "");
        let home = Finder::new("/".into(), None, Some(&top.join("h")), &Config::default(), 4712).unwrap();
        assert!(home.find("own").is_ok());
        chown(top.join("h/.edf"), Some(4711), None).unwrap();
        assert!(home.find("own").unwrap_err().message.ends_with(others));
        // A parent is looked for beside the file that names it, and is that file's owner's, root's or the reader's.
        scratch.file("folder/child.toml", "");
        scratch.file("folder/beside.toml", "");
        let child = finder(4712).find("child").unwrap();
        let parent = |uid, name: &str| {
            finder(uid).find_parent(name, &child).map(|found| found.path).map_err(|failure| failure.message)
        };
        assert_eq!(parent(4712, "./beside.toml"), Ok(list.join("beside.toml")));
        assert_eq!(parent(4712, "beside.toml"), Ok(list.join("beside.toml")));
        chown(list.join("beside.toml"), Some(4711), None).unwrap();
        assert!(parent(4712, "./beside.toml").unwrap_err().ends_with(others));
        assert_eq!(parent(4711, "./beside.toml"), Ok(list.join("beside.toml")));
        assert_eq!(parent(4712, list.join("beside.toml").to_str().unwrap()), Ok(list.join("beside.toml")));
        // A link is as good as who has made it.
        scratch.file("root.toml", "");
        symlink(top.join("root.toml"), list.join("link.toml")).unwrap();
        assert_eq!(why(4712, "link"), Ok(()));
        std::os::unix::fs::lchown(list.join("link.toml"), Some(4711), None).unwrap();
        assert!(why(4712, "link").unwrap_err().ends_with(others));
    }
}
