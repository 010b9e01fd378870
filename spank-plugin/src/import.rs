//! srun, sbatch and salloc, as the user, before anything is submitted: an image in a registry is imported, or only looked up, by
//! the launcher's command `import`. Everything that takes time, asks a registry or knows a password is that program's; the
//! command waits for it. Ctrl-C ends both.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use mizzen_core::answer::AskedProcess;
use mizzen_core::find_image::Importer;
use mizzen_core::{Failure, Reference, image_store, importer};

use crate::state::State;
use crate::{client, spank, state};

/// The launcher's own name: under others it does other things.
const LAUNCHER: &str = "mizzen";

/// Asks the launcher.
pub struct ClientImporter<'a> {
    /// Where the images of each user are.
    pub image_store: &'a str,
}

impl Importer for ClientImporter<'_> {
    fn resolve(&mut self, reference: &Reference) -> Result<Reference, Failure> {
        let known = |state: &State| state.resolved.clone();
        ask_once(reference, known, importer::resolve, |state, answer| state.resolved.push(answer))
    }

    fn import(&mut self, reference: &Reference) -> Result<(PathBuf, Reference), Failure> {
        let known = |state: &State| state.imported.clone();
        ask_once(reference, known, importer::import, |state, answer| state.imported.push(answer))
    }

    fn store(&self) -> Result<PathBuf, Failure> {
        image_store::own_directory(self.image_store)
    }
}

/// Asks once for each name: Slurm calls the hook for every component of a heterogeneous job, and between two answers a tag
/// could have become another image's.
fn ask_once<T: Clone>(
    reference: &Reference,
    known: impl Fn(&State) -> Vec<(Reference, T)>,
    ask: impl Fn(AskedProcess, &Reference) -> Result<T, Failure>,
    remember: impl Fn(&mut State, (Reference, T)),
) -> Result<T, Failure> {
    let answers = known(&state::lock());
    if let Some((_, answer)) = answers.into_iter().find(|(asked, _)| asked == reference) {
        return Ok(answer);
    }
    // Before the image is fetched, and not only afterwards.
    client::check_command()?;
    let answer = ask_launcher(|process| ask(process, reference))?;
    remember(&mut state::lock(), (reference.clone(), answer.clone()));
    Ok(answer)
}

/// Starts the launcher and asks it, so that Ctrl-C ends both.
pub fn ask_launcher<T>(ask: impl FnOnce(AskedProcess) -> Result<T, Failure>) -> Result<T, Failure> {
    let (launcher, config) = (spank::launcher()?, state::lock().config_source()?);
    let mut program = Command::new(OsStr::from_bytes(launcher.as_bytes()));
    program.arg0(LAUNCHER);
    let mut interruptible = spank::Interruptible::new();
    let meanwhile = &mut || interruptible.renew();
    ask(AskedProcess { program, config: &config, meanwhile })
}
