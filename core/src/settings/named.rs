//! The settings of containers that outlive a step: their name, and the file that one is saved as.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use super::values::{TomlForm, Value};
use crate::Failure;
use crate::failure::quote;

/// A container that keeps its files between steps on a node: its name, and what a step wants of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerName {
    /// The name: the name of a directory, too.
    pub name: String,
    /// What a step wants of it.
    pub mode: NameMode,
}

/// What a step wants of a named container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NameMode {
    /// Enter it where it runs, else start it, and make it first if it is not there.
    #[default]
    Auto,
    /// Make it: it must not be there.
    Create,
    /// Enter it: it must run.
    Exec,
    /// Start it: it must not run.
    NoExec,
}

impl NameMode {
    const WORDS: [(NameMode, &str); 4] = [
        (NameMode::Auto, "auto"),
        (NameMode::Create, "create"),
        (NameMode::Exec, "exec"),
        (NameMode::NoExec, "no_exec"),
    ];

    fn word(self) -> &'static str {
        NameMode::WORDS.iter().find(|(mode, _)| *mode == self).map_or("auto", |(_, word)| word)
    }
}

impl ContainerName {
    /// A directory's name can have 255 bytes; ours has a few more in front.
    const LIMIT: usize = 200;

    /// The step of a job, as `7.0`, if the name is one: an unnamed container can be entered by it.
    pub fn step(&self) -> Option<&str> {
        let (job, step) = self.name.split_once('.')?;
        let number = |text: &str| text.parse::<u32>().is_ok();
        (number(job) && (number(step) || ["batch", "interactive"].contains(&step))).then_some(&self.name)
    }
}

impl Value for ContainerName {
    const TOML: TomlForm = TomlForm::Text;

    fn parse(text: &[u8]) -> Result<ContainerName, Failure> {
        let shown = quote(text);
        let bad = |why: &str| Failure::new(format!("\"{shown}\": {why}"));
        let text = std::str::from_utf8(text).map_err(|_| bad("the name is not UTF-8"))?;
        let (name, mode) = match text.rsplit_once(':') {
            None => (text, NameMode::Auto),
            Some((name, word)) => {
                let known = NameMode::WORDS.iter().find(|(_, known)| *known == word);
                let (mode, _) = known.ok_or_else(|| {
                    bad("the flag behind the name must be auto, create, exec or no_exec")
                        .hint("write NAME:exec, or the name alone; a name has no colon")
                })?;
                (name, *mode)
            }
        };
        let why = match name {
            "" => Some("the name is empty"),
            _ if name.contains('/') => Some("the name has a /"),
            _ if name.contains(':') => Some("the name has a colon"),
            // Names of our own, and those of every directory.
            _ if name.starts_with('.') => Some("the name begins with a dot"),
            _ if name.chars().any(char::is_control) => Some("the name has a control character"),
            _ if name.len() > ContainerName::LIMIT => Some("the name is longer than 200 bytes"),
            _ => None,
        };
        match why {
            Some(why) => Err(bad(why).hint("a name is letters, digits, - and _, as train or pytorch-2")),
            None => Ok(ContainerName { name: name.to_owned(), mode }),
        }
    }

    fn text(&self) -> Vec<u8> {
        match self.mode {
            NameMode::Auto => self.name.clone().into_bytes(),
            mode => format!("{}:{}", self.name, mode.word()).into_bytes(),
        }
    }
}

/// Whose named containers a node keeps apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContainerScope {
    /// Those of each job: they go with it.
    #[default]
    Job,
    /// Those of each user: they stay until they are removed.
    Global,
}

impl ContainerScope {
    /// As mizzen.toml has it.
    pub fn word(self) -> &'static str {
        match self {
            ContainerScope::Job => "job",
            ContainerScope::Global => "global",
        }
    }
}

/// A file of the host that is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavePath(pub PathBuf);

impl Value for SavePath {
    const TOML: TomlForm = TomlForm::Text;

    fn parse(text: &[u8]) -> Result<SavePath, Failure> {
        if text.is_empty() || text.iter().any(u8::is_ascii_control) {
            let message = format!("\"{}\" is not the name of a file", quote(text));
            return Err(Failure::new(message).hint("name the image to be written, as my.sqsh"));
        }
        Ok(SavePath(OsString::from_vec(text.to_vec()).into()))
    }

    fn text(&self) -> Vec<u8> {
        OsString::from(self.0.clone()).into_vec()
    }

    fn absolute(self, directory: &Path) -> SavePath {
        SavePath(directory.join(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_and_what_is_wanted_of_it() {
        for (text, name, mode) in [
            ("x", "x", NameMode::Auto),
            ("x:auto", "x", NameMode::Auto),
            ("py torch-2.1:create", "py torch-2.1", NameMode::Create),
            ("x:exec", "x", NameMode::Exec),
            ("x:no_exec", "x", NameMode::NoExec),
        ] {
            let parsed = ContainerName::parse(text.as_bytes()).unwrap();
            assert_eq!(parsed, ContainerName { name: name.to_owned(), mode });
            assert_eq!(ContainerName::parse(&parsed.text()), Ok(parsed));
        }
        let step = |text: &str| ContainerName::parse(text.as_bytes()).unwrap().step().map(str::to_owned);
        assert_eq!(step("7.0:exec"), Some("7.0".to_owned()));
        assert_eq!(step("7.batch"), Some("7.batch".to_owned()));
        assert_eq!((step("7.x"), step("a.0"), step("7")), (None, None, None));
    }

    #[test]
    fn bad_names_are_named() {
        let long = "a".repeat(201);
        for (text, why) in [
            ("", "the name is empty"),
            (":exec", "the name is empty"),
            ("a/b", "the name has a /"),
            ("..", "the name begins with a dot"),
            ("a:b:exec", "the name has a colon"),
            ("a\nb", "the name has a control character"),
            (long.as_str(), "the name is longer than 200 bytes"),
            ("x:", "the flag behind the name must be auto, create, exec or no_exec"),
            ("x:often", "the flag behind the name must be auto, create, exec or no_exec"),
        ] {
            let failure = ContainerName::parse(text.as_bytes()).unwrap_err();
            assert_eq!(failure.message, format!("\"{}\": {why}", quote(text.as_bytes())));
        }
        let failure = SavePath::parse(b"").unwrap_err();
        assert_eq!(failure.message, "\"\" is not the name of a file");
    }
}
