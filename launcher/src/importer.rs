//! Starts `mizzen-import` in place of this process. It has what talks to registries and reads archives; the launcher, which
//! every task executes and which root runs, has none of it. Runs as the user who calls it.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use mizzen_core::Failure;

use crate::image::shown;
use crate::raised_limits;

/// The program's name.
const NAME: &str = "mizzen-import";

/// Becomes the importer, with the words of this command line. Returns only why it could not.
pub fn exec() -> Failure {
    let own = match std::env::current_exe() {
        Ok(own) => own,
        Err(error) => return Failure::caused_by("cannot find the importer: /proc/self/exe", error),
    };
    let places = places(&own);
    let program = places.iter().find(|place| place.exists()).unwrap_or(&places[0]);
    let mut command = Command::new(program);
    // Its messages are those of `mizzen`.
    command.arg0("mizzen").args(std::env::args_os().skip(1));
    raised_limits::restore();
    Failure::caused_by(format!("cannot start the importer: {}", shown(program)), command.exec()).or_hint(
        format!("`make install` and the package of mizzen put it there; copy {NAME} of the same version"),
    )
}

/// Where it may be: where `make install` puts it, and beside the launcher, where a build has it.
fn places(launcher: &Path) -> [PathBuf; 2] {
    let directory = launcher.parent().unwrap_or(Path::new("/"));
    let prefix = directory.parent().unwrap_or(Path::new("/"));
    [prefix.join("lib/mizzen").join(NAME), directory.join(NAME)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_looked_for_where_it_is_installed_and_where_it_is_built() {
        for (launcher, expected) in [
            ("/usr/bin/mizzen", ["/usr/lib/mizzen/mizzen-import", "/usr/bin/mizzen-import"]),
            (
                "/opt/mizzen/bin/mizzen",
                ["/opt/mizzen/lib/mizzen/mizzen-import", "/opt/mizzen/bin/mizzen-import"],
            ),
            ("/mizzen", ["/lib/mizzen/mizzen-import", "/mizzen-import"]),
        ] {
            assert_eq!(places(Path::new(launcher)), expected.map(PathBuf::from), "{launcher}");
        }
    }

    /// The tests' own program has no importer beside it.
    #[test]
    fn what_is_missing_is_named() {
        let failure = exec();
        let expected = "lib/mizzen/mizzen-import: No such file or directory";
        assert!(
            failure.message.starts_with("cannot start the importer: /")
                && failure.message.ends_with(expected),
            "{failure}"
        );
        assert!(failure.hint.unwrap().ends_with("copy mizzen-import of the same version"));
    }
}
