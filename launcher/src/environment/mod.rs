//! Environment files (EDF): a container described in a file, as CSCS's users have them. Read where a job is submitted, as the user,
//! and made into what options say; a later edit does not matter. docs/environment-files.md has the keys.
//!
//!     name -> find -> read -> document -> its parents below it -> one document -> image and settings
//!
//! Runs as the user: for the plugin (`env render --for-slurm`), for `mizzen run` and `plan`, and for `mizzen env`.

mod annotations;
mod commands;
mod container;
mod document;
mod expand;
mod find;
mod show;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use mizzen_core::environment::Environment;
use mizzen_core::failure::quote;
use mizzen_core::{Config, Failure};
use nix::unistd::geteuid;

pub use commands::{answer_program, list, no_image, render, validate};
use document::{Document, Placed};
use expand::Expander;
use find::{Finder, FoundFile};

/// How many files may inherit from each other.
const LEVELS: usize = 10;
/// How many files one may be made of.
const FILES: usize = 100;

/// A file with its parents: one document, and the files in the order in which they were put on each other.
#[derive(Debug)]
struct Loaded {
    document: Document,
    files: Vec<PathBuf>,
}

/// What `mizzen run` and `plan` run, by the name of an environment file.
pub fn read(name: &OsStr, config: &Config) -> Result<Environment, Failure> {
    container::describe(&load(name, config)?)
}

/// Reads a file and its parents, with the folders and variables of this process.
fn load(name: &OsStr, config: &Config) -> Result<Loaded, Failure> {
    let variable = |name: &str| std::env::var_os(name);
    let name = name.to_str().ok_or_else(|| {
        Failure::new(format!("\"{}\": the name is not UTF-8", quote(name.as_encoded_bytes())))
            .hint("rename the file")
    })?;
    Loader {
        finder: &finder(config)?,
        expander: Expander::new(&variable),
        files: Vec::new(),
        open: Vec::new(),
    }
    .load_all(name)
}

/// The folders of this process's user.
fn finder(config: &Config) -> Result<Finder, Failure> {
    let directory = std::env::current_dir().unwrap_or_else(|_| "/".into());
    let (edf_path, home) = (std::env::var_os("EDF_PATH"), std::env::home_dir());
    Finder::new(directory, edf_path.as_deref(), home.as_deref(), config, geteuid().as_raw())
}

/// Parses a text as far as that goes without other files, for fuzzers: the container, and the file that says the same.
pub fn parse_text(text: &str) -> Result<(Environment, String), Failure> {
    let variable = |name: &str| (name != "NOT_SET").then(|| OsString::from("value"));
    let file = PathBuf::from("environment.toml");
    let document = Document::parse(text, &file, &mut Expander::new(&variable))?;
    let loaded = Loaded { document, files: vec![file] };
    Ok((container::describe(&loaded)?, show::to_toml(&loaded)))
}

struct Loader<'a> {
    finder: &'a Finder,
    expander: Expander<'a>,
    files: Vec<PathBuf>,
    /// The files that inherit from the one that is read now, the first that was named first.
    open: Vec<((u64, u64), PathBuf)>,
}

impl Loader<'_> {
    fn load_all(mut self, name: &str) -> Result<Loaded, Failure> {
        let mut document = Document::default();
        self.load(self.finder.find(name)?, &mut document)?;
        Ok(Loaded { document, files: self.files })
    }

    /// Puts a file on top of what is there, its parents first.
    fn load(&mut self, found: FoundFile, below: &mut Document) -> Result<(), Failure> {
        let document = Document::parse(&found.read()?, &found.path, &mut self.expander)?;
        self.open.push((found.id, found.path.clone()));
        for parent in &document.parents {
            let file = self.find_parent(&parent.value, &found);
            self.load(file.map_err(|failure| parent.about("base_environment", failure))?, below)?;
        }
        self.open.pop();
        self.files.push(found.path);
        below.overlay(Document { parents: Vec::new(), ..document });
        Ok(())
    }

    /// Finds a parent of a file. Recursion ends here.
    fn find_parent(&self, name: &str, child: &FoundFile) -> Result<FoundFile, Failure> {
        let found = self.finder.find_parent(name, child)?;
        if let Some(first) = self.open.iter().position(|(id, _)| *id == found.id) {
            let shown = |path: &PathBuf| quote(path.as_os_str().as_encoded_bytes());
            let circle = self.open[first..].iter().map(|(_, path)| path).chain([&found.path]);
            let circle: Vec<String> = circle.map(shown).collect();
            return Err(Failure::new(format!("leads back to itself: {}", circle.join(" -> ")))
                .hint("take one of these parents out"));
        }
        if self.open.len() > LEVELS {
            return Err(Failure::new(format!("more than {LEVELS} levels of parents")).hint(
                "name fewer parents of parents; `mizzen env render` of one of them shows what it gives",
            ));
        }
        // A list of parents in each of a few files could name millions.
        if self.files.len() + self.open.len() >= FILES {
            return Err(Failure::new(format!("more than {FILES} files")).hint("name each parent once"));
        }
        Ok(found)
    }
}

/// Values by their names, as the tables of a file have them.
type Table = BTreeMap<String, Placed<String>>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::testing::Scratch;

    fn load(files: &[(&str, &str)], name: &str) -> Result<Loaded, String> {
        let scratch = Scratch::new();
        let top = scratch.path().to_owned();
        files.iter().for_each(|(file, text)| drop(scratch.file(file, text)));
        let config = Config { environment_folders: vec![top.join("site")], ..Config::default() };
        let list = top.join("own").into_os_string();
        let finder = Finder::new(top.join("here"), Some(&list), None, &config, geteuid().as_raw()).unwrap();
        let variable = |name: &str| (name == "BASE").then(|| OsString::from("base"));
        let loader = Loader {
            finder: &finder,
            expander: Expander::new(&variable),
            files: Vec::new(),
            open: Vec::new(),
        };
        let loaded = loader.load_all(name);
        loaded.map_err(|failure| failure.message.replace(top.to_str().unwrap(), ""))
    }

    #[test]
    fn parents_lie_below_in_their_order() {
        let loaded = load(
            &[
                (
                    "own/a.toml",
                    "base_environment = ['${BASE}', './local.toml']\nmounts = ['/a']\n[env]\nA = 'a'",
                ),
                (
                    "site/base.toml",
                    "image = 'base'\nworkdir = '/base'\nmounts = ['/base']\n[env]\nA = 'b'\nB = 'b'",
                ),
                ("own/local.toml", "image = 'local'\nmounts = ['/local']\n[env]\nA = 'l'\nL = 'l'"),
            ],
            "a",
        )
        .unwrap();
        let document = loaded.document;
        let mounts: Vec<&str> = document.mounts.iter().map(|mount| mount.value.as_str()).collect();
        assert_eq!(mounts, ["/base", "/local", "/a"]);
        assert_eq!(document.image.unwrap().value, "local");
        assert_eq!(document.workdir.unwrap().value, "/base");
        let env: Vec<String> =
            document.env.iter().map(|(name, value)| format!("{name}={}", value.value)).collect();
        assert_eq!(env, ["A=a", "B=b", "L=l"]);
        let names: Vec<&str> =
            loaded.files.iter().map(|file| file.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["base.toml", "local.toml", "a.toml"]);
    }

    /// "at most 10 levels"
    #[test]
    fn ten_levels_and_no_circles() {
        let chain = |levels: usize| {
            let mut files = vec![("own/0.toml".to_owned(), "image = 'x'".to_owned())];
            let parent = |level: usize| format!("base_environment = '{}'", level - 1);
            files.extend((1..=levels).map(|level| (format!("own/{level}.toml"), parent(level))));
            let files: Vec<(&str, &str)> =
                files.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
            load(&files, &levels.to_string())
        };
        assert_eq!(chain(10).unwrap().files.len(), 11);
        let message = chain(11).unwrap_err();
        assert_eq!(message, "/own/1.toml:1: base_environment: more than 10 levels of parents");
        let circle = [
            ("own/a.toml", "base_environment = 'b'"),
            ("own/b.toml", "image = 'x'\nbase_environment = ['c']"),
            ("own/c.toml", "base_environment = 'b'"),
        ];
        assert_eq!(
            load(&circle, "a").unwrap_err(),
            "/own/c.toml:1: base_environment: leads back to itself: \
             /own/b.toml -> /own/c.toml -> /own/b.toml"
        );
        let many: Vec<(String, String)> = (0..4)
            .map(|level| {
                let parents = vec![format!("'{}'", level + 1); if level < 3 { 10 } else { 0 }];
                (format!("own/{level}.toml"), format!("base_environment = [{}]", parents.join(", ")))
            })
            .collect();
        let many: Vec<(&str, &str)> =
            many.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
        assert!(load(&many, "0").unwrap_err().ends_with("base_environment: more than 100 files"));
    }

    #[test]
    fn a_failure_in_a_parent_is_told_once_with_its_place() {
        for (text, message) in [
            ("imgae = 'x'", "/site/base.toml:1: unknown key \"imgae\""),
            (
                "\nbase_environment = 'gone'",
                "/site/base.toml:2: base_environment: no such environment file; tried /own/gone.toml, /site/gone.toml",
            ),
        ] {
            let files = [("own/a.toml", "base_environment = 'base'"), ("site/base.toml", text)];
            assert_eq!(load(&files, "a").unwrap_err(), message);
        }
    }
}
