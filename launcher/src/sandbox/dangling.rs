//! Symbolic links that lead to what is not in the container: the program will only say that a file does not exist, although its
//! user sees it on the host. Runs as the user, inside.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use mizzen_core::failure::quote;

/// Programs with more arguments get them from a script, not from a person.
const LOOKED_AT: usize = 64;

/// What to tell about the first argument of a command whose path ends at such a link. Of the program itself that is told when it
/// cannot be executed.
pub fn dangling_argument(command: &[OsString]) -> Option<String> {
    command.iter().skip(1).take(LOOKED_AT).find_map(|argument| {
        // `--config=/path`
        let behind = argument.as_bytes().iter().position(|byte| *byte == b'=').map_or(0, |equals| equals + 1);
        let texts = [argument.as_bytes(), argument.as_bytes().get(behind..).unwrap_or_default()];
        let named = texts.into_iter().filter(|text| text.contains(&b'/')).map(OsStr::from_bytes);
        named.map(Path::new).find_map(dangling_link)
    })
}

/// What to tell about a path that ends at such a link.
pub fn dangling_link(path: &Path) -> Option<String> {
    match path.metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        _ => return None,
    }
    let last_there = path.ancestors().find(|part| part.symlink_metadata().is_ok())?;
    let target = fs::read_link(last_there).ok()?;
    let [link, target] = [last_there, &target].map(|path| quote(path.as_os_str().as_bytes()));
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
        let path = scratch.path().display();
        let told = |argument: String| dangling_argument(&["-c".into(), argument.into()]);
        let expected =
            format!("{path}/data is a symbolic link to /lustre/nowhere, which is not in the container");
        for argument in [format!("{path}/data"), format!("{path}/data/a/b"), format!("--in={path}/data/x")] {
            assert_eq!(told(argument).as_deref(), Some(expected.as_str()));
        }
        for argument in
            [format!("{path}/here"), format!("{path}/missing"), "data".to_owned(), "a/b".to_owned()]
        {
            assert_eq!(told(argument), None);
        }
    }
}
