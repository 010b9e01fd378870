//! mizzen.toml and its drop-ins, in order, as one [`Config`]. What a later file says replaces what the earlier ones say: the whole
//! list of a list. Tables are merged key by key. Each file must be good by itself, and is checked with those before it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::source::Source;
use super::{
    BadValue, Config, KEYS, RETIRED_MOUNT, RETIRED_MOUNT_HINT, SAMPLE, line_at, parse_failure, setting_texts,
    unknown_key,
};
use crate::Failure;
use crate::settings::Key;
use crate::trusted_file::{read_trusted, read_trusted_directory};

/// The files of a site and their texts, in the order in which they hold.
#[derive(Default)]
pub struct SiteFiles(Vec<(PathBuf, String)>);

impl SiteFiles {
    /// Reads them, if nobody but root can have written any of them.
    pub fn read(source: &Source) -> Result<SiteFiles, Failure> {
        let path = source.path();
        let main = match read_trusted(path)? {
            Some(text) => Some((path.to_owned(), text)),
            None if *source == Source::Default => None,
            None => {
                return Err(Failure::new(format!("{}: no such file", path.display()))
                    .hint("plugstack.conf names it with config=PATH"));
            }
        };
        let drop_ins = read_trusted_directory(&source.drop_in_directory(), "toml")?;
        Ok(SiteFiles(main.into_iter().chain(drop_ins.into_iter().flatten()).collect()))
    }

    /// Which they are.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.0.iter().map(|(path, _)| path.as_path())
    }

    /// Each of them by itself.
    pub fn configs(&self) -> impl Iterator<Item = (&Path, Result<Config, Failure>)> {
        self.0.iter().map(|(path, text)| (path.as_path(), Config::parse(text, path)))
    }

    /// What they say together.
    pub fn merge(&self) -> Result<Merged<'_>, Failure> {
        let mut merged = Merged::default();
        self.0.iter().try_for_each(|(path, text)| merged.add(path, text))?;
        Ok(merged)
    }
}

/// Where a value stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position<'a> {
    /// The file.
    pub file: &'a Path,
    /// Its line.
    pub line: usize,
}

/// What several files say together.
#[derive(Default)]
pub struct Merged<'a> {
    /// All settings.
    pub config: Config,
    /// What the files say of them.
    values: DeTable<'a>,
    /// Where they say it, by [`key_path`].
    positions: BTreeMap<String, Position<'a>>,
}

/// A value that a file has set.
pub struct Entry<'a> {
    /// Its table, as TOML writes it between brackets; empty for keys outside of tables.
    pub table: String,
    /// Its key.
    pub key: String,
    /// The value.
    pub value: Spanned<DeValue<'a>>,
    /// Where it stands.
    pub position: Option<Position<'a>>,
}

impl<'a> Merged<'a> {
    /// Puts another file on top.
    pub fn add(&mut self, path: &'a Path, text: &'a str) -> Result<(), Failure> {
        let failed = |error: &toml::de::Error| parse_failure(error, text, path).or_hint(SAMPLE);
        let table = DeTable::parse(text).map_err(|error| failed(&error))?.into_inner();
        for (key, value) in table {
            let name: &str = key.get_ref();
            let line = line_at(text, key.span().start);
            let position = || format!("{}:{line}", path.display());
            if name == "mount" {
                return Err(Failure::new(format!("{}: {RETIRED_MOUNT}", position())).hint(RETIRED_MOUNT_HINT));
            }
            self.note(key_path("", name), &value, Position { file: path, line }, text);
            match Key::ALL.iter().find(|setting| setting.spec().toml == Some(name)) {
                Some(setting) => {
                    let texts = setting_texts(*setting, value.clone()).map_err(|error| failed(&error))?;
                    self.config.settings.unset(*setting);
                    for text in texts {
                        let set = self.config.settings.set(*setting, text.as_bytes());
                        set.map_err(|failure| failure.about(name).about(position()).or_hint(SAMPLE))?;
                    }
                    self.values.insert(key, value);
                }
                None if KEYS.contains(&name) => {
                    // What is wrong with the file's own value has a place in it.
                    self.config.set(name, value.clone()).map_err(|error| failed(&error))?;
                    let name = name.to_owned();
                    overlay(&mut self.values, key, value);
                    if let Some(whole) = self.values.get(name.as_str()) {
                        let set = self.config.set(&name, whole.clone());
                        set.map_err(|error| Failure::new(error.message()).about(&name).about(position()))?;
                    }
                }
                None => return Err(unknown_key(name).about(position())),
            }
        }
        self.config.check().map_err(|bad| self.place(bad, path))
    }

    /// Every value that a file has set, in the order of the keys, those outside of tables first.
    pub fn entries(&self) -> Vec<Entry<'a>> {
        let mut entries = Vec::new();
        self.collect("", &self.values, &mut entries);
        entries.sort_by(|a, b| a.table.cmp(&b.table));
        entries
    }

    fn collect(&self, table: &str, values: &DeTable<'a>, entries: &mut Vec<Entry<'a>>) {
        for (key, value) in values {
            let path = key_path(table, key.get_ref());
            match value.get_ref() {
                DeValue::Table(values) => self.collect(&path, values, entries),
                _ => entries.push(Entry {
                    table: table.to_owned(),
                    key: key.get_ref().to_string(),
                    value: value.clone(),
                    position: self.positions.get(&path).copied(),
                }),
            }
        }
    }

    fn note(&mut self, path: String, value: &Spanned<DeValue<'a>>, position: Position<'a>, text: &str) {
        if let DeValue::Table(values) = value.get_ref() {
            for (key, value) in values {
                let line = line_at(text, key.span().start);
                self.note(key_path(&path, key.get_ref()), value, Position { line, ..position }, text);
            }
        }
        self.positions.insert(path, position);
    }

    /// The failure with the place of the value; it came with this file.
    fn place(&self, BadValue { key, failure }: BadValue, path: &Path) -> Failure {
        match self.positions.get(&key) {
            Some(Position { file, line }) => failure.about(format!("{}:{line}", file.display())),
            None => failure.about(path.display()),
        }
    }
}

/// Sets a value: of a table those that the other names, of anything else the whole.
fn overlay<'a>(
    values: &mut DeTable<'a>,
    key: Spanned<std::borrow::Cow<'a, str>>,
    value: Spanned<DeValue<'a>>,
) {
    match (values.get_mut(key.get_ref().as_ref()).map(Spanned::get_mut), value.get_ref()) {
        (Some(DeValue::Table(lower)), DeValue::Table(_)) => {
            if let DeValue::Table(upper) = value.into_inner() {
                upper.into_iter().for_each(|(key, value)| overlay(lower, key, value));
            }
        }
        _ => drop(values.insert(key, value)),
    }
}

/// A key below its table, as TOML writes it: `registries."docker.io"`.
pub(crate) fn key_path(table: &str, key: &str) -> String {
    let is_bare = |key: &str| {
        !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    };
    let key = if is_bare(key) { key.to_owned() } else { format!("\"{}\"", key.escape_debug()) };
    if table.is_empty() { key } else { format!("{table}.{key}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAIN: &str = "# x\nstage = \"never\"\nimage_folders = [\"/a\", \"/b\"]\nmounts = [\"/sw\"]\nenv = [\"A\"]\n\
                        [registries.\"a.io\"]\nplain_http = true\n[policy]\nfolders = [\"/sw\"]\n";

    fn merge<'a>(files: &[(&'a str, &'a str)]) -> Result<Merged<'a>, String> {
        let mut merged = Merged::default();
        for (path, text) in files {
            let (path, text): (&'a str, &'a str) = (path, text);
            merged.add(Path::new(path), text).map_err(|failure| failure.message)?;
        }
        Ok(merged)
    }

    fn origin(merged: &Merged, key: &str) -> String {
        let position = &merged.positions[key];
        format!("{}:{}", position.file.display(), position.line)
    }

    #[test]
    fn a_later_file_replaces_lists_and_adds_to_tables() {
        let text = "image_folders = [\"/c\"]\nmounts = []\n\n[registries.\"b.io\"]\nmirrors = []\n\
                    [registries.\"a.io\"]\nmirrors = [\"https://m.io\"]\n[policy]\nowners = [0]\n";
        let merged = merge(&[("/m.toml", MAIN), ("/m.d/1.toml", text)]).unwrap();
        let Config { image_folders, settings, registries, policy, .. } = &merged.config;
        assert_eq!(image_folders, &[PathBuf::from("/c")]);
        assert!(settings.mounts.is_none() && settings.environment.as_ref().is_some_and(|env| env.len() == 1));
        assert!(registries["a.io"].plain_http && registries["a.io"].mirrors.len() == 1);
        assert!(registries.contains_key("b.io"));
        assert!(policy.folders.is_some() && policy.owners.is_some());
        for (key, place) in [
            ("stage", "/m.toml:2"),
            ("image_folders", "/m.d/1.toml:1"),
            ("env", "/m.toml:5"),
            ("registries.\"a.io\".plain_http", "/m.toml:7"),
            ("registries.\"a.io\".mirrors", "/m.d/1.toml:7"),
            ("policy.folders", "/m.toml:9"),
            ("policy.owners", "/m.d/1.toml:9"),
        ] {
            assert_eq!(origin(&merged, key), place, "{key}");
        }
        let keys: Vec<String> =
            merged.entries().iter().map(|entry| key_path(&entry.table, &entry.key)).collect();
        let tables = ["policy.folders", "policy.owners", "registries.\"a.io\".mirrors"];
        assert_eq!(keys[..4], ["env", "image_folders", "mounts", "stage"]);
        assert_eq!(keys[4..7], tables);
    }

    #[test]
    fn the_last_of_three_wins() {
        let files = [("/m", "stage = \"auto\""), ("/1", "stage = \"never\""), ("/2", "stage = \"always\"")];
        let merged = merge(&files).unwrap();
        assert_eq!(merged.config.settings.stage, Some(crate::staging::Policy::Always));
        assert_eq!(origin(&merged, "stage"), "/2:1");
    }

    #[test]
    fn a_bad_file_is_named_with_its_own_line() {
        for (text, message) in [
            ("stage = \"auto\"\n[oops\n", "/m.d/1.toml:2: "),
            ("\nx = 1\n", "/m.d/1.toml:2: unknown field `x`"),
            ("\n\nstage = \"often\"", "/m.d/1.toml:3: stage: \"often\" is not auto"),
            ("#\nstage_directory = \"tmp\"", "/m.d/1.toml:2: stage_directory: \"tmp\" is not absolute"),
            ("[policy]\nfolder = []", "/m.d/1.toml:2: unknown field `folder`"),
            ("policy = 1", "/m.d/1.toml:1: policy: invalid type: integer `1`"),
            (
                "[registries.\"a.io\"]\nca_file = \"/ca.pem\"",
                "/m.d/1.toml:1: registries.\"a.io\": plain_http and ca_file contradict each other",
            ),
        ] {
            let failed = merge(&[("/m.toml", MAIN), ("/m.d/1.toml", text)]).err().unwrap();
            assert!(failed.starts_with(message), "{text:?}: {failed}");
        }
        // A bad file stays bad, whatever a later one says.
        let failed = merge(&[("/m.toml", "stage = \"x\""), ("/1.toml", "stage = \"auto\"")]).err().unwrap();
        assert!(failed.starts_with("/m.toml:1: stage: "), "{failed}");
    }

    #[test]
    fn keys_are_written_as_toml_writes_them() {
        assert_eq!(key_path("", "stage"), "stage");
        assert_eq!(key_path("registries", "a.io:5000"), "registries.\"a.io:5000\"");
        assert_eq!(key_path("a", ""), "a.\"\"");
    }
}
