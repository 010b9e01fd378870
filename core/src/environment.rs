//! Environment files (EDF): what was made of one, and how the plugin asks for it. The launcher reads them, as the user, before
//! anything is submitted (launcher/src/environment). A node gets the request that was made of it, and never sees a file: nothing in
//! slurmstepd can parse one.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use crate::answer::{AskedName, AskedProcess};
use crate::failure::quote_up_to;
use crate::reference::names_a_registry;
use crate::settings::Key;
use crate::staging::FAILURE_LIMIT;
use crate::{Failure, Settings, pairs};

/// The command of mizzen that answers, and its option that makes it answer a program.
pub const COMMAND: [&str; 3] = ["env", "render", "--for-slurm"];

const READER: AskedName = AskedName {
    program: "`mizzen env`",
    work: "reading the environment file",
    hint: "spank_mizzen.so and mizzen must be of the same version; install both together",
};

/// A container as an environment file describes it, with its parents and variables: the same as options say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment {
    /// The file, for messages.
    pub file: String,
    /// The image, as `--container-image` takes it, and the place that names it: `FILE:LINE: image`.
    pub image: Option<(String, Vec<u8>)>,
    /// Everything else.
    pub settings: Settings,
    /// What in it has no effect here.
    pub notes: Vec<String>,
}

/// Whether the value of `--container` names an environment file, and no image.
pub fn names_environment_file(value: &[u8]) -> bool {
    value.ends_with(b".toml") && !value.windows(3).any(|part| part == b"://") && !names_a_registry(value)
}

/// Has the launcher read the file that the user names.
pub fn render(process: AskedProcess, name: &[u8]) -> Result<Environment, Failure> {
    let pairs = process.ask(&COMMAND, &[OsStr::new("--"), OsStr::from_bytes(name)], &READER)?;
    Environment::from_pairs(&pairs).map_err(|failure| READER.bad_answer(&failure.message))
}

impl Environment {
    /// The launcher's answer.
    pub fn encode(&self) -> String {
        let image = self.image.iter().flat_map(|(place, value)| {
            [("image-place", place.clone().into_bytes()), ("image", value.clone())]
        });
        let settings = Key::ALL.iter().filter_map(|key| Some((key.name(), self.settings.text(*key)?)));
        let notes = self.notes.iter().map(|note| note.replace('\n', " ")).collect::<Vec<_>>().join("\n");
        let ends = [("file", self.file.clone().into_bytes()), ("notes", notes.into_bytes())];
        pairs::encode(image.chain(settings).chain(ends))
    }

    fn from_pairs(pairs: &[(String, Vec<u8>)]) -> Result<Environment, Failure> {
        let mut environment = Environment::default();
        let shown = |text: &[u8]| quote_up_to(text, FAILURE_LIMIT);
        let (mut place, mut image) = (String::new(), None);
        for (name, value) in pairs {
            match (name.as_str(), Key::ALL.iter().find(|key| key.name() == name)) {
                (_, Some(key)) => environment.settings.set(*key, value)?,
                ("file", None) => environment.file = shown(value),
                ("image-place", None) => place = shown(value),
                ("image", None) => image = Some(value.clone()),
                ("notes", None) => {
                    let lines = value.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
                    environment.notes = lines.map(shown).collect();
                }
                (other, None) => return Err(Failure::new(format!("unknown field \"{other}\""))),
            }
        }
        environment.image = image.map(|image| (place, image));
        Ok(environment)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::config::Source;

    fn ask(script: &str) -> Result<Environment, Failure> {
        let mut program = Command::new("/bin/sh");
        program.args(["-c", script, "mizzen"]);
        render(AskedProcess { program, config: &Source::Default, meanwhile: &mut || {} }, b"torch")
    }

    #[test]
    fn the_answer_is_read() {
        let mut settings = Settings::default();
        for (key, text) in [(Key::Mounts, "/a b:/c:ro"), (Key::Env, "!B,A=x,C=y"), (Key::Workdir, "image:")] {
            settings.set(key, text.as_bytes()).unwrap();
        }
        let environment = Environment {
            file: "/etc/edf/a.toml".to_owned(),
            image: Some(("/etc/edf/a.toml:3: image".to_owned(), b"nvcr.io#a/b".to_vec())),
            settings,
            notes: vec!["one".to_owned(), "two".to_owned()],
        };
        for environment in [environment, Environment::default()] {
            let answer =
                format!("test \"$*\" = 'env render --for-slurm -- torch' && echo '{}'", environment.encode());
            assert_eq!(ask(&answer), Ok(environment));
        }
    }

    #[test]
    fn failures_and_nonsense_are_told() {
        let failure = Failure::new("no such environment file").about("torch").hint("look elsewhere");
        assert_eq!(ask(&format!("printf %s '{}'; exit 1", failure.encode())), Err(failure));
        for (script, message) in [
            ("exit 2", "`mizzen env` failed with exit code 2"),
            ("kill -TERM $$", "reading the environment file was interrupted by signal 15"),
            ("echo other=1", "the answer of `mizzen env` cannot be used: unknown field \"other\""),
            (
                "echo stage=often",
                "the answer of `mizzen env` cannot be used: \"often\" is not auto, always, never or bcast",
            ),
        ] {
            assert_eq!(ask(script).unwrap_err().message, message, "{script}");
        }
    }

    #[test]
    fn a_name_that_ends_in_toml_is_a_file() {
        for name in ["torch.toml", "./a/b.toml", "/etc/edf/x.toml"] {
            assert!(names_environment_file(name.as_bytes()), "{name}");
        }
        for name in ["torch", "a.sqsh", "docker://host/a.toml", "nvcr.io#nvidia/a.toml", "a.toml/", ""] {
            assert!(!names_environment_file(name.as_bytes()), "{name}");
        }
    }
}
