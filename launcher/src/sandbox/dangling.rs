//! Symbolic links that lead to what is not in the container: the program will only say that a file does not exist, although its
//! user sees it on the host. Runs as the user, inside.

use std::ffi::{OsStr, OsString};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use mizzen_core::failure::quote;
use mizzen_core::fs_server::{self, FsServer};
use mizzen_core::mountinfo::open_on_same_mount;
use nix::errno::Errno;
use nix::fcntl::readlinkat;

/// Programs with more arguments get them from a script, not from a person.
pub const ARGUMENTS_LOOKED_AT: usize = 64;

/// What to tell about the first argument of a command whose path ends at such a link; relative ones belong to the directory where the
/// program starts. Of the program itself that is told when it cannot be executed.
pub fn dangling_argument(command: &[OsString], workdir: &Path) -> Option<String> {
    command.iter().skip(1).take(ARGUMENTS_LOOKED_AT).find_map(|argument| {
        let whole = argument.as_bytes();
        // `--config=/path`
        let behind = whole.splitn(2, |byte| *byte == b'=').nth(1);
        let named = [Some(whole), behind].into_iter().flatten().filter(|text| may_be_path(text));
        // Without a dot in the middle.
        let mut paths =
            named.map(|text| workdir.join(OsStr::from_bytes(text)).components().collect::<PathBuf>());
        paths.find_map(|path| dangling_link(&path))
    })
}

/// A file system may need a while to say that there is no such name: options and numbers are not asked for.
fn may_be_path(text: &[u8]) -> bool {
    let is_letter = |byte: &u8| byte.is_ascii_alphabetic() || !byte.is_ascii();
    text.contains(&b'/') || text.first().is_some_and(|first| *first != b'-') && text.iter().any(is_letter)
}

/// What to tell about a path that ends at such a link. Many words are no paths, so what another user serves is not asked: it may
/// never answer.
pub fn dangling_link(path: &Path) -> Option<String> {
    let look = |path: &Path| fs_server::look_unless(path, FsServer::is_foreign);
    let is_missing = |path: &Path| look(path).end.is_err_and(|errno| errno == Errno::ENOENT);
    let whole = look(path);
    // The kernel's own links, as /proc/self/fd/0, lead elsewhere than they say.
    let is_kernels = |(place, _): &(PathBuf, u32)| place.starts_with("/proc");
    if whole.links.is_empty() || whole.links.iter().any(is_kernels) || !is_missing(path) {
        return None;
    }
    // Behind a link to what is there something else is missing.
    let mut parts: Vec<&Path> = path.ancestors().collect();
    parts.reverse();
    let missing = parts.into_iter().find(|part| is_missing(part))?;
    let directory = look(missing.parent()?).end.ok()?;
    let link = open_on_same_mount(directory.as_fd(), missing.file_name()?).ok()?;
    let target = PathBuf::from(readlinkat(link, "").ok()?);
    let [link, target] = [missing, &target].map(|path| quote(path.as_os_str().as_bytes()));
    Some(format!("{link} is a symbolic link to {target}, which is not in the container"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::testing::Scratch;

    #[test]
    fn links_to_nothing_are_named() {
        let scratch = Scratch::new();
        scratch.file("here", "");
        scratch.link("data", "/lustre/nowhere");
        scratch.link("good", ".");
        let path = scratch.path().display();
        let told = |argument: String| dangling_argument(&["-c".into(), argument.into()], scratch.path());
        let expected =
            format!("{path}/data is a symbolic link to /lustre/nowhere, which is not in the container");
        let relative = ["data", "data/x", "./data", "--in=data"].map(str::to_owned);
        let absolute = [format!("{path}/data"), format!("{path}/data/a/b"), format!("--in={path}/data/x")];
        for argument in absolute.into_iter().chain(relative) {
            assert_eq!(told(argument).as_deref(), Some(expected.as_str()));
        }
        scratch.link("stdin", "/proc/self/fd/0");
        let silent =
            ["stdin", "a/b", "here", "good", "good/missing", "missing", "", "--in=", "-c"].map(str::to_owned);
        for argument in [format!("{path}/here"), format!("{path}/missing")].into_iter().chain(silent) {
            assert_eq!(told(argument), None);
        }
    }
}
