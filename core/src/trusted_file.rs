//! Files that hold for all users: they are read only if nobody but root can have written them, or have put another in their
//! place. Runs as whoever needs them: the user in srun and in the launcher, root in slurmstepd.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::dir::Dir;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::geteuid;

use crate::Failure;
use crate::failure::cause;
use crate::fs_server::{
    FsServer, Seen, ServedPart, find_served, is_limit, not_safe, place_of, walk_with_links,
};
use crate::image::special;

/// What the kernel shows for users that are not in the map of a user namespace.
const UNMAPPED: u32 = 65534;
/// A larger file is not a configuration; nor are the files of a directory that are larger together.
const SIZE_LIMIT: u64 = 1 << 20;
/// A directory with more in it was made for something else.
const ENTRIES_LIMIT: usize = 1000;

enum Unread {
    Missing,
    Refused(Failure),
}

/// Reads a file that nobody but root can have written; none if it does not exist.
pub fn read_trusted(path: &Path) -> Result<Option<String>, Failure> {
    if !path.is_absolute() {
        return Err(Failure::new(format!("{}: is not an absolute path", path.display())));
    }
    match check_parents(path, path).and_then(|()| read_file(path)) {
        Ok(text) => Ok(Some(text)),
        Err(Unread::Missing) => Ok(None),
        Err(Unread::Refused(failure)) => Err(failure),
    }
}

/// Reads all such files of a directory whose names end so, in the order of the bytes of their names; none if it does not exist.
/// Hidden files are left out: editors make them.
pub fn read_trusted_directory(
    directory: &Path,
    extension: &str,
) -> Result<Option<Vec<(PathBuf, String)>>, Failure> {
    let opened = match open_directory(directory) {
        Ok(opened) => opened,
        Err(Unread::Missing) => return Ok(None),
        Err(Unread::Refused(failure)) => return Err(failure),
    };
    let names = list(&opened, extension)
        .map_err(|error| Failure::caused_by(format!("{}: cannot list it", directory.display()), error))?;
    let (mut files, mut left) = (Vec::new(), SIZE_LIMIT);
    for name in names {
        let path = directory.join(&name);
        // By the directory that is open and was looked at, whatever its path means now.
        let file = openat(&opened, name.as_os_str(), FILE_FLAGS | OFlag::O_CLOEXEC, Mode::empty());
        match read_opened(file.map(File::from).map_err(io::Error::from), &path, left) {
            Ok(text) => {
                left -= text.len() as u64;
                files.push((path, text));
            }
            Err(Unread::Missing) => {} // since it was listed
            Err(Unread::Refused(failure)) => return Err(failure),
        }
    }
    Ok(Some(files))
}

/// Opens a directory in which nobody but root can make files. A sticky one is no exception here: what counts is which files are
/// there, and any user could link an old one of root's into it.
fn open_directory(directory: &Path) -> Result<File, Unread> {
    check_parents(&directory.join("file"), directory)?;
    let opened =
        OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NONBLOCK).open(directory);
    let opened = match opened {
        Ok(opened) => opened,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Unread::Missing),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            let message = format!("{}: is not a directory", directory.display());
            let hint = "make it a directory for drop-ins, or remove it";
            return Err(Unread::Refused(Failure::new(message).hint(hint)));
        }
        Err(error) => return Err(Unread::Refused(unreadable(directory, error))),
    };
    let found = opened.metadata().map_err(|error| Unread::Refused(unreadable(directory, error)))?;
    if found.mode() & 0o022 == 0 {
        return Ok(opened);
    }
    let (shown, mode) = (directory.display(), found.mode() & 0o7777);
    Err(Unread::Refused(
        Failure::new(format!("{shown} is writable by others than root (mode {mode:04o})"))
            .hint(format!("chmod go-w {shown}")),
    ))
}

/// The names in a directory that end so, in order.
fn list(directory: &File, extension: &str) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for (number, entry) in Dir::from_fd(directory.try_clone()?.into())?.into_iter().enumerate() {
        let name = OsString::from_vec(entry?.file_name().to_bytes().to_vec());
        if number >= ENTRIES_LIMIT {
            return Err(io::Error::other(format!("more than {ENTRIES_LIMIT} entries")));
        }
        let hidden = name.as_bytes().starts_with(b".");
        if !hidden && Path::new(&name).extension() == Some(OsStr::new(extension)) {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// O_NONBLOCK: a FIFO in the file's place must not block the opener.
const FILE_FLAGS: OFlag = OFlag::O_NOFOLLOW.union(OFlag::O_NONBLOCK);

fn read_file(path: &Path) -> Result<String, Unread> {
    let file = OpenOptions::new().read(true).custom_flags(FILE_FLAGS.bits()).open(path);
    read_opened(file, path, SIZE_LIMIT)
}

/// Reads what was found in this place, if nobody but root can have written it.
fn read_opened(file: io::Result<File>, path: &Path, limit: u64) -> Result<String, Unread> {
    let shown = path.display();
    let refuse =
        |what: &str, hint: String| Unread::Refused(Failure::new(format!("{shown}: {what}")).hint(hint));
    let file = match file {
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
    let bytes = read_at_most(&file, limit + 1).map_err(|error| Unread::Refused(unreadable(path, error)))?;
    if bytes.len() as u64 > limit {
        let what = match limit {
            SIZE_LIMIT => "is larger than 1 MiB",
            _ => "and the files before it in its directory are larger than 1 MiB",
        };
        return Err(refuse(what, "is it the right file?".to_owned()));
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

/// A file whose directories cannot be looked at.
fn unreachable(path: &Path, error: io::Error) -> Failure {
    let denied = error.kind() == io::ErrorKind::PermissionDenied;
    let failure = Failure::caused_by(path.display(), error);
    match denied {
        true => failure.hint("all users must be able to search the directories above it: chmod a+x"),
        false => failure,
    }
}

/// Nobody but root may be able to put another file in its place, at any level: of the path as it is written, and of the
/// one that its links lead to. `shown` is what messages are about: the path, or the directory in which it would be.
fn check_parents(path: &Path, shown: &Path) -> Result<(), Unread> {
    refuse_users_server(shown)?;
    let real = path.parent().and_then(|parent| parent.canonicalize().ok()).unwrap_or_default();
    for parent in
        path.ancestors().skip(1).chain(real.ancestors()).filter(|parent| !parent.as_os_str().is_empty())
    {
        match parent.symlink_metadata() {
            // Where it leads is in `real`; another's link, in a directory like /tmp, could lead elsewhere soon.
            Ok(found) if found.is_symlink() && found.uid() == 0 => {}
            Ok(found) => trusted(&found).map_err(|why| {
                let message = match parent == shown {
                    true => format!("{} {why}", shown.display()),
                    false => format!("{}: its directory {} {why}", shown.display(), parent.display()),
                };
                let hint = match found.uid() {
                    UNMAPPED => "root is not known in this user namespace; run mizzen outside of it",
                    _ => "only root may be able to write it and the directories above it",
                };
                Unread::Refused(Failure::new(message).hint(hint))
            })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Unread::Missing),
            Err(error) => return Err(Unread::Refused(unreachable(shown, error))),
        }
    }
    Ok(())
}

/// A file system that a user serves says of any file that it is root's. Root itself has such paths from root alone, and walks none:
/// what lies on them may be a user's after all.
fn refuse_users_server(path: &Path) -> Result<(), Unread> {
    if geteuid().is_root() {
        return Ok(());
    }
    match find_served(path, FsServer::is_users) {
        Ok(Some(part)) => {
            let failure = Failure::new(format!("{}: {}", path.display(), part.describe()));
            Err(Unread::Refused(failure.hint("only root may be able to say what is in it")))
        }
        Ok(None) => Ok(()),
        Err(error) if is_limit(&error) => Err(Unread::Refused(unreachable(path, error))),
        // What is wrong with it is told by who reads it.
        Err(_) => Ok(()),
    }
}

/// Refuses a file or directory that somebody else than root could have made, or could replace; links are followed.
pub fn check_only_roots(path: &Path) -> Result<(), Failure> {
    let failed = |why: String| Failure::new(format!("{} {why}", path.display()));
    let real = path.canonicalize().map_err(|error| failed(format!("cannot be found: {}", cause(&error))))?;
    for path in [path, &real] {
        match check_parents(path, path) {
            Ok(()) => {}
            Err(Unread::Refused(failure)) => return Err(failure),
            Err(Unread::Missing) => return Err(failed("has just vanished".to_owned())),
        }
    }
    let found = real.symlink_metadata().map_err(|error| failed(cause(&error)))?;
    trusted(&found).map_err(failed)
}

/// Refuses a file or directory of a user in whose place somebody else could put another, at any level: of the path as it is
/// written, and of what its links lead to. Everything must be the user's or root's, and writable by nobody else. What a
/// user opens to their own groups is theirs to decide. Nothing is asked of a file system that another user serves, and what is
/// looked at is what has been reached, whoever changes the path meanwhile.
pub fn check_only_users(path: &Path, uid: u32) -> Result<(), Failure> {
    walk_only_users(path, uid, Groups::Trusted).map_err(|error| not_found(path, &error))?.map(drop)
}

/// The same for a name that somebody else may have made; what has been reached and judged is given back, opened for looking at it. The
/// error is that of a path which leads nowhere.
pub fn reach_only_users(path: &Path, uid: u32) -> io::Result<Result<File, Failure>> {
    walk_only_users(path, uid, Groups::TrustedAtHome)
}

/// Whether what a group can write counts as its owner's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Groups {
    Trusted,
    /// Not in a directory where others can make names, as in /tmp: there a member of the group can have renamed what was elsewhere.
    TrustedAtHome,
}

fn walk_only_users(path: &Path, uid: u32, groups: Groups) -> io::Result<Result<File, Failure>> {
    let failed = |why: String| Failure::new(format!("{} {why}", path.display()));
    // The directories above the current one count as well.
    let absolute = std::path::absolute(path)?;
    let mut is_home = true;
    let walked = walk_with_links(&absolute, |here, seen| {
        if let Seen::Part(server) = seen
            && server.is_foreign()
        {
            return Ok(ControlFlow::Break(not_safe(path, &ServedPart::new(here, server))));
        }
        let found = match here.metadata() {
            Ok(found) => found,
            Err(error) => return Ok(ControlFlow::Break(failed(cause(&error)))),
        };
        let trusts_group = found.uid() != 0 && (is_home || groups == Groups::Trusted);
        let by_others = if trusts_group { 0o002 } else { 0o022 };
        let is_sticky = found.is_dir() && found.mode() & 0o1000 != 0;
        let why = if found.uid() != 0 && found.uid() != uid {
            format!("belongs to uid {}", found.uid())
        } else if !found.is_symlink() && !is_sticky && found.mode() & by_others != 0 {
            format!("can be written by others (mode {:04o})", found.mode() & 0o7777)
        } else {
            if found.is_dir() {
                let others = if found.uid() == uid { 0o002 } else { 0o022 };
                is_home = found.mode() & others == 0;
            }
            return Ok(ControlFlow::Continue(()));
        };
        let (path, shown) = (path.display(), place_of(here));
        let message = format!("{path} is not safe from other users: {} {why}", shown.display());
        Ok(ControlFlow::Break(Failure::new(message).hint(
            "it and all directories above it must belong to you or to root, and let nobody else write",
        )))
    });
    match walked? {
        ControlFlow::Break(failure) => Ok(Err(failure)),
        ControlFlow::Continue(reached) => Ok(Ok(reached)),
    }
}

fn not_found(path: &Path, error: &io::Error) -> Failure {
    Failure::new(format!("{} cannot be found: {}", path.display(), cause(error)))
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
    use std::fs::{create_dir, remove_dir_all, set_permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_users_directory_is_safe_from_others_at_every_level() {
        let top = std::env::temp_dir().join(format!("mizzen-own-{}", std::process::id()));
        let mode = |path: &Path, mode: u32| set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        let (middle, store) = (top.join("alice"), top.join("alice/images"));
        [&top, &middle, &store].into_iter().for_each(|path| create_dir(path).unwrap());
        symlink(&middle, top.join("link")).unwrap();
        let uid = top.metadata().unwrap().uid();
        let why = |path: &Path| check_only_users(path, uid).map_err(|failure| failure.message).err();
        mode(&top, 0o1777);
        assert_eq!((why(&store), why(&top.join("link/images"))), (None, None));
        mode(&middle, 0o777);
        let expected = format!("{} can be written by others (mode 0777)", middle.display());
        assert!(why(&store).unwrap().ends_with(&expected), "{:?}", why(&store));
        assert!(why(&top.join("link/images")).unwrap().ends_with(&expected));
        mode(&middle, 0o755);
        if uid == 0 {
            // Nobody's, in a sticky directory: whoever owns it can put another in its place.
            std::os::unix::fs::chown(&middle, Some(4711), None).unwrap();
            assert!(why(&store).unwrap().ends_with("belongs to uid 4711"));
            assert!(check_only_users(&middle, 4711).is_ok());
            // A member of the group can have renamed it there.
            mode(&middle, 0o775);
            assert!(check_only_users(&middle, 4711).is_ok());
            let refused = reach_only_users(&middle, 4711).unwrap().unwrap_err().message;
            assert!(refused.ends_with("can be written by others (mode 0775)"), "{refused}");
            mode(&top, 0o755);
            assert!(reach_only_users(&middle, 4711).unwrap().is_ok());
        }
        remove_dir_all(top).unwrap();
    }

    /// Whoever can change the path while it is looked at gains nothing: each part is judged by the descriptor that is gone through.
    #[test]
    fn a_path_that_changes_meanwhile_is_judged_by_what_was_reached() {
        let top = std::env::temp_dir().join(format!("mizzen-swap-{}", std::process::id()));
        let (good, open) = (top.join("good"), top.join("open"));
        for directory in [&top, &good, &open] {
            create_dir(directory).unwrap();
            set_permissions(directory, PermissionsExt::from_mode(0o755)).unwrap();
        }
        for directory in [&good, &open] {
            std::fs::write(directory.join("image"), "").unwrap();
        }
        set_permissions(&open, PermissionsExt::from_mode(0o777)).unwrap();
        let link = top.join("link");
        symlink("good", &link).unwrap();
        let (uid, image) = (top.metadata().unwrap().uid(), link.join("image"));
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let other = top.join("other");
                for target in ["open", "good"].iter().cycle() {
                    if stop.load(std::sync::atomic::Ordering::Relaxed) {
                        return;
                    }
                    symlink(target, &other).unwrap();
                    std::fs::rename(&other, &link).unwrap();
                }
            });
            let mut outcomes = [0, 0];
            let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
            while outcomes.contains(&0) && std::time::Instant::now() < end {
                match check_only_users(&image, uid) {
                    Ok(()) => outcomes[0] += 1,
                    Err(failure) => {
                        let expected = format!("{} can be written by others (mode 0777)", open.display());
                        assert!(failure.message.ends_with(&expected), "{failure}");
                        outcomes[1] += 1;
                    }
                }
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(!outcomes.contains(&0), "{outcomes:?}");
        });
        remove_dir_all(top).unwrap();
    }
}
