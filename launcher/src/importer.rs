//! Starts `mizzen-import`, in place of this process or as a child that is asked for an image. It has what talks to registries and
//! reads archives; the launcher, which every task executes and which root runs, has none of it. Runs as the user who calls it.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use mizzen_core::answer::AskedProcess;
use mizzen_core::config::{ImportWhen, Source};
use mizzen_core::find_image::{Importer, refused_by_key};
use mizzen_core::request::ImageSource;
use mizzen_core::trusted_file::check_only_users;
use mizzen_core::{Failure, Reference, image_store, importer};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::geteuid;

use crate::image::shown;
use crate::options::{ImportOptions, RunOptions};
use crate::raised_limits;
use crate::report::{print, speaks_for_step};
use crate::sys;

/// The program's name.
const NAME: &str = "mizzen-import";

/// Becomes the importer, with the words of this command line. Returns only why it could not.
pub fn exec() -> Failure {
    exec_with(std::env::args_os().skip(1))
}

/// The same with these words.
pub fn exec_with(words: impl Iterator<Item = OsString>) -> Failure {
    let program = match find() {
        Ok(program) => program,
        Err(failure) => return failure,
    };
    let mut command = Command::new(&program);
    // Its messages are those of `mizzen`.
    command.arg0("mizzen").args(words);
    raised_limits::restore();
    sys::leave_stdout_closed();
    Failure::caused_by(format!("cannot start the importer: {}", shown(&program)), command.exec()).or_hint(
        format!("`make install` and the package of mizzen put it there; copy {NAME} of the same version"),
    )
}

/// Where it is, or should be.
pub fn find() -> Result<PathBuf, Failure> {
    let own = std::env::current_exe()
        .map_err(|error| Failure::caused_by("cannot find the importer: /proc/self/exe", error))?;
    let [installed, built] = places(&own);
    Ok(if !installed.exists() && built.exists() { built } else { installed })
}

/// The same for a program that waits for an answer: the plugin, or the launcher.
pub fn exec_for_program() -> ExitCode {
    // srun blocks what its thread for signals takes; Ctrl-C is to end this. Nobody waits for the answer when the asker is gone.
    let _ = SigSet::empty().thread_set_mask();
    let _ = set_pdeathsig(Signal::SIGTERM);
    // Whether it is read or not: it has failed.
    let _ = print(&exec().encode());
    ExitCode::FAILURE
}

/// Asks the importer in a process of its own.
#[derive(Debug, Default)]
pub struct ChildImporter<'a> {
    /// Where the images of each user are.
    pub image_store: &'a str,
}

impl Importer for ChildImporter<'_> {
    fn resolve(&mut self, reference: &Reference) -> Result<Reference, Failure> {
        ask(reference, &by_hand()?, importer::resolve)
    }

    fn import(&mut self, reference: &Reference) -> Result<(PathBuf, Reference), Failure> {
        ask(reference, &by_hand()?, importer::import)
    }

    fn store(&self) -> Result<PathBuf, Failure> {
        image_store::own_directory(self.image_store)
    }
}

/// The importer is to read the settings that this launcher, which no plugin has started, has read.
fn by_hand() -> Result<ImportOptions, Failure> {
    Ok(ImportOptions { config: Source::of_this_machine()?, ..ImportOptions::default() })
}

/// Starts this program once more, which then becomes the importer.
fn ask<T>(
    reference: &Reference,
    options: &ImportOptions,
    ask: impl Fn(AskedProcess, &Reference) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let own = std::env::current_exe()
        .map_err(|error| Failure::caused_by("cannot find the importer: /proc/self/exe", error))?;
    let mut program = Command::new(own);
    program.arg0("mizzen");
    let missing = options.variables.iter().filter(|(name, _)| std::env::var_os(name).is_none());
    program.envs(missing.map(|(name, value)| (name, value)));
    // Of all tasks and nodes that wait, one shows the progress.
    if !speaks_for_step() {
        program.stderr(Stdio::null());
    }
    ask(AskedProcess { program, config: &options.config, meanwhile: &mut || {} }, reference)
}

/// The file of the container's image, which is imported first if the node is to do that. What the site says of images in
/// registries is looked at once more: the request is the user's to change.
pub fn obtain(options: &RunOptions) -> Result<PathBuf, Failure> {
    let check = |reference: &Reference| {
        let policy = &options.policy;
        let checked = policy.check_reference(reference).and_then(|()| policy.check_manifest(reference));
        checked.map_err(|failure| failure.about(reference))
    };
    match (&options.image, options.import.when) {
        (ImageSource::File { path, .. }, _) => Ok(path.clone()),
        (ImageSource::Recorded, _) => Err(Failure::new("no image")),
        (ImageSource::Stored { reference, .. } | ImageSource::Unfetched(reference), ImportWhen::Never) => {
            Err(refused_by_key("never").about(reference))
        }
        (ImageSource::Unfetched(reference), ImportWhen::Submit) => {
            Err(refused_by_key("submit").about(reference))
        }
        (ImageSource::Stored { path, reference }, _) => {
            check(reference)?;
            // Nobody has looked at it since the job was submitted, and the reference says what it is.
            check_only_users(path, geteuid().as_raw()).map_err(|failure| failure.about(reference))?;
            Ok(path.clone())
        }
        (ImageSource::Unfetched(reference), ImportWhen::Node) => {
            check(reference)?;
            ask(reference, &options.import, importer::import).map(|(path, _)| path)
        }
    }
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
    use crate::image::testing::Scratch;
    use mizzen_core::Digest;
    use mizzen_core::config::ImagePolicy;

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

    #[test]
    fn what_the_site_says_holds_for_any_request() {
        let reference = Reference::parse(b"docker://evil.org/a:1").unwrap().pinned(Digest::new([7; 32]));
        let store = Scratch::new();
        let path = store.file("a.sqsh", "");
        let stored = ImageSource::Stored { path: path.clone(), reference: reference.clone() };
        let unfetched = ImageSource::Unfetched(reference.clone());
        let file = ImageSource::file("/a.sqsh");
        let policy = |registry: &str| ImagePolicy {
            registries: Some(vec![registry.to_owned()]),
            ..ImagePolicy::default()
        };
        let key =
            |value: &str, what: &str| format!("{reference}: {what} here (mizzen.toml: import = \"{value}\")");
        let never = key("never", "images in registries are not imported for jobs");
        let refused = format!("{reference}: registries of this site's policy do not include evil.org");
        for (image, when, allowed, expected) in [
            (&file, ImportWhen::Never, "nvcr.io", Ok("/a.sqsh".into())),
            (&stored, ImportWhen::Submit, "evil.org", Ok(path.clone())),
            (&stored, ImportWhen::Node, "evil.org", Ok(path.clone())),
            (&stored, ImportWhen::Never, "evil.org", Err(never.clone())),
            (&stored, ImportWhen::Submit, "nvcr.io", Err(refused.clone())),
            (&unfetched, ImportWhen::Never, "evil.org", Err(never)),
            (&unfetched, ImportWhen::Submit, "evil.org", Err(key("submit", "nodes do not import images"))),
            (&unfetched, ImportWhen::Node, "nvcr.io", Err(refused)),
        ] {
            let options = RunOptions {
                image: image.clone(),
                policy: policy(allowed),
                import: ImportOptions { when, ..ImportOptions::default() },
                ..RunOptions::default()
            };
            let found = obtain(&options).map_err(|failure| failure.message);
            assert_eq!(found, expected, "{image:?} {when:?} {allowed}");
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
