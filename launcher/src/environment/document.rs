//! One environment file: TOML with a few keys. Every value knows its line, and has its variables replaced.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use mizzen_core::Failure;
use mizzen_core::config::line_at;
use mizzen_core::failure::quote;
use mizzen_core::similar::similar;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::expand::Expander;

/// What a file can say.
pub const KEYS: [&str; 9] = [
    "base_environment",
    "image",
    "workdir",
    "entrypoint",
    "writable",
    "mounts",
    "devices",
    "env",
    "annotations",
];

const REFERENCE: &str = "docs/environment-files.md has every key";

/// A line of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file, fit for a message.
    pub file: String,
    /// Its line.
    pub line: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "{}:{}", self.file, self.line)
    }
}

/// A value, and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed<T> {
    /// The value.
    pub value: T,
    /// Its place.
    pub place: Place,
}

impl<T> Placed<T> {
    /// Says of a failure where it is.
    pub fn about(&self, key: impl fmt::Display, failure: Failure) -> Failure {
        failure.about(key).about(&self.place)
    }
}

/// What a file says, or what it says together with its parents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Document {
    /// The files that it begins with.
    pub parents: Vec<Placed<String>>,
    /// The image.
    pub image: Option<Placed<String>>,
    /// Where programs start; empty for the image's own directory.
    pub workdir: Option<Placed<String>>,
    /// Whether programs are started through the image's entrypoint.
    pub entrypoint: Option<bool>,
    /// Whether the root can be written.
    pub writable: Option<bool>,
    /// What is mounted.
    pub mounts: Vec<Placed<String>>,
    /// Devices, by their names or paths.
    pub devices: Vec<Placed<String>>,
    /// Variables; an empty one is unset.
    pub env: BTreeMap<String, Placed<String>>,
    /// Annotations, by their whole names.
    pub annotations: BTreeMap<String, Placed<String>>,
}

impl Document {
    /// Parses the text of a file; `path` is its name in messages.
    pub fn parse(text: &str, path: &Path, expander: &mut Expander) -> Result<Document, Failure> {
        let file = quote(path.as_os_str().as_encoded_bytes());
        let table = DeTable::parse(text).map_err(|error| {
            let line = error.span().map_or(1, |span| line_at(text, span.start));
            let cause = quote(error.message().as_bytes());
            Failure::new(format!("{file}:{line}: {cause}")).hint("environment files are TOML")
        })?;
        let table = table.into_inner();
        let newlines = text.match_indices('\n').map(|(offset, _)| offset).collect();
        let mut reader = Reader { newlines, file, expander };
        let mut document = Document::default();
        for (key, value) in table {
            let name: &str = key.get_ref();
            match name {
                "base_environment" => document.parents = reader.one_or_more(name, value)?,
                "image" => document.image = Some(reader.not_empty(name, value)?),
                "workdir" => document.workdir = Some(reader.string(name, value)?),
                "entrypoint" => document.entrypoint = Some(reader.boolean(name, value)?),
                "writable" => document.writable = Some(reader.boolean(name, value)?),
                "mounts" => document.mounts = reader.strings(name, value)?,
                "devices" => document.devices = reader.strings(name, value)?,
                "env" => document.env = reader.variables(name, value)?,
                "annotations" => {
                    let table = reader.table(name, value)?;
                    reader.flatten("", table, &mut document.annotations)?;
                }
                _ => return Err(unknown_key(name).about(reader.place(key.span().start))),
            }
        }
        Ok(document)
    }

    /// Puts what another file says on top: single values are replaced, mounts and devices added, variables and annotations
    /// replaced one by one.
    pub fn overlay(&mut self, upper: Document) {
        self.image = upper.image.or(self.image.take());
        self.workdir = upper.workdir.or(self.workdir.take());
        self.entrypoint = upper.entrypoint.or(self.entrypoint);
        self.writable = upper.writable.or(self.writable);
        self.mounts.extend(upper.mounts);
        self.devices.extend(upper.devices);
        self.env.extend(upper.env);
        self.annotations.extend(upper.annotations);
    }
}

fn unknown_key(name: &str) -> Failure {
    let failure = Failure::new(format!("unknown key \"{}\"", quote(name.as_bytes())));
    match similar(name, KEYS.iter().map(|key| (*key).to_owned())) {
        Some(meant) => failure.hint(format!("did you mean {meant}? {REFERENCE}")),
        None => failure.hint(format!("there are {}; {REFERENCE}", KEYS.join(", "))),
    }
}

struct Reader<'a, 'e> {
    /// Where lines end: counting them for every value would take the square of a file's length.
    newlines: Vec<usize>,
    file: String,
    expander: &'a mut Expander<'e>,
}

impl Reader<'_, '_> {
    fn place(&self, offset: usize) -> Place {
        let line = 1 + self.newlines.partition_point(|newline| *newline < offset);
        Place { file: self.file.clone(), line }
    }

    fn wrong(&self, key: &str, value: &Spanned<DeValue>, expected: &str) -> Failure {
        let (found, hint) = match value.get_ref() {
            DeValue::String(_) => ("a string", None),
            DeValue::Integer(number) => ("an integer", Some(number.to_string())),
            DeValue::Float(number) => ("a number", Some(number.to_string())),
            DeValue::Boolean(on) => ("a boolean", Some(on.to_string())),
            DeValue::Datetime(_) => ("a date", None),
            DeValue::Array(_) => ("an array", None),
            DeValue::Table(_) => ("a table", None),
        };
        let message =
            format!("{}: {}: {found}, expected {expected}", self.place(value.span().start), shown(key));
        match hint.filter(|_| expected.contains("string")) {
            Some(value) => Failure::new(message).hint(format!("write it between quotes: \"{value}\"")),
            None => Failure::new(message).hint(REFERENCE),
        }
    }

    fn string(&mut self, key: &str, value: Spanned<DeValue>) -> Result<Placed<String>, Failure> {
        let DeValue::String(text) = value.get_ref() else { return Err(self.wrong(key, &value, "a string")) };
        let place = self.place(value.span().start);
        let expanded = self.expander.expand(text);
        let about = |failure: Failure| failure.about(shown(key)).about(&place);
        let value = expanded.map_err(about)?;
        if value.contains('\0') {
            return Err(about(Failure::new("a NUL character").hint("no value can have one")));
        }
        Ok(Placed { value, place })
    }

    fn not_empty(&mut self, key: &str, value: Spanned<DeValue>) -> Result<Placed<String>, Failure> {
        let found = self.string(key, value)?;
        if !found.value.is_empty() {
            return Ok(found);
        }
        let failure = Failure::new("is empty")
            .hint("name one; a container that is asked for is there, or nothing runs");
        Err(found.about(key, failure))
    }

    fn boolean(&self, key: &str, value: Spanned<DeValue>) -> Result<bool, Failure> {
        match value.get_ref() {
            DeValue::Boolean(on) => Ok(*on),
            _ => Err(self.wrong(key, &value, "true or false")),
        }
    }

    fn strings(&mut self, key: &str, value: Spanned<DeValue>) -> Result<Vec<Placed<String>>, Failure> {
        if !matches!(value.get_ref(), DeValue::Array(_)) {
            return Err(self.wrong(key, &value, "an array of strings"));
        }
        let DeValue::Array(items) = value.into_inner() else { return Ok(Vec::new()) };
        items.into_iter().map(|item| self.string(key, item)).collect()
    }

    fn one_or_more(&mut self, key: &str, value: Spanned<DeValue>) -> Result<Vec<Placed<String>>, Failure> {
        match value.get_ref() {
            DeValue::Array(_) => self.strings(key, value),
            DeValue::String(_) => Ok(vec![self.string(key, value)?]),
            _ => Err(self.wrong(key, &value, "a string or an array of strings")),
        }
    }

    fn table<'i>(&self, key: &str, value: Spanned<DeValue<'i>>) -> Result<DeTable<'i>, Failure> {
        if !matches!(value.get_ref(), DeValue::Table(_)) {
            return Err(self.wrong(key, &value, "a table"));
        }
        match value.into_inner() {
            DeValue::Table(table) => Ok(table),
            _ => Ok(DeTable::new()),
        }
    }

    fn variables(
        &mut self,
        key: &str,
        value: Spanned<DeValue>,
    ) -> Result<BTreeMap<String, Placed<String>>, Failure> {
        let mut variables = BTreeMap::new();
        for (name, value) in self.table(key, value)? {
            let name = name.into_inner().into_owned();
            let value = self.string(&format!("{key}.{name}"), value)?;
            variables.insert(name, value);
        }
        Ok(variables)
    }

    /// Annotations may be written with dots or as tables in tables: `com.hooks.cxi.enabled` in any case.
    fn flatten(
        &mut self,
        prefix: &str,
        table: DeTable,
        annotations: &mut BTreeMap<String, Placed<String>>,
    ) -> Result<(), Failure> {
        for (key, value) in table {
            let name = match prefix {
                "" => key.get_ref().to_string(),
                _ => format!("{prefix}.{}", key.get_ref()),
            };
            let place = self.place(value.span().start);
            let text = match value.get_ref() {
                DeValue::Table(_) => {
                    let table = self.table(&name, value)?;
                    self.flatten(&name, table, annotations)?;
                    continue;
                }
                DeValue::Boolean(on) => on.to_string(),
                DeValue::Integer(number) => number.to_string(),
                DeValue::String(_) => self.string(&format!("annotations.{name}"), value)?.value,
                _ => {
                    let key = format!("annotations.{name}");
                    return Err(self.wrong(&key, &value, "a string, a boolean or an integer"));
                }
            };
            annotations.insert(name, Placed { value: text, place });
        }
        Ok(())
    }
}

fn shown(key: &str) -> String {
    quote(key.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::time::{Duration, Instant};

    use super::super::Loaded;
    use super::super::container::describe;
    use super::*;

    fn parse(text: &str) -> Result<Document, Failure> {
        let variable = |name: &str| (name == "USER").then(|| OsString::from("alice"));
        Document::parse(text, Path::new("/e/a.toml"), &mut Expander::new(&variable))
    }

    fn texts(values: &[Placed<String>]) -> Vec<(&str, usize)> {
        values.iter().map(|value| (value.value.as_str(), value.place.line)).collect()
    }

    #[test]
    fn every_key_is_read_with_its_line() {
        let document = parse(
            "base_environment = ['a', './b.toml']\nimage = \"nvcr.io#nvidia/pytorch:24.01-py3\"\n\
             workdir = '/home/${USER}'\nentrypoint = false\nwritable = true\nmounts = [\n  '/a:/b:ro',\n  '/c',\n]\n\
             devices = ['nvidia.com/gpu=all']\n[env]\nA = '1'\nB = ''\n[annotations]\ncom.hooks.cxi.enabled = 'true'\n\
             [annotations.com.hooks.ssh]\nenabled = false\nport = 15263\n",
        )
        .unwrap();
        assert_eq!(texts(&document.parents), [("a", 1), ("./b.toml", 1)]);
        assert_eq!(texts(document.image.as_slice()), [("nvcr.io#nvidia/pytorch:24.01-py3", 2)]);
        assert_eq!(texts(document.workdir.as_slice()), [("/home/alice", 3)]);
        assert_eq!((document.entrypoint, document.writable), (Some(false), Some(true)));
        assert_eq!(texts(&document.mounts), [("/a:/b:ro", 7), ("/c", 8)]);
        assert_eq!(texts(&document.devices), [("nvidia.com/gpu=all", 10)]);
        let named = |table: BTreeMap<String, Placed<String>>| {
            let pair = |(name, value): (String, Placed<String>)| {
                format!("{name}={}@{}", value.value, value.place.line)
            };
            table.into_iter().map(pair).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(named(document.env), "A=1@12 B=@13");
        assert_eq!(
            named(document.annotations),
            "com.hooks.cxi.enabled=true@15 com.hooks.ssh.enabled=false@17 com.hooks.ssh.port=15263@18"
        );
        assert_eq!(texts(&parse("base_environment = 'one'").unwrap().parents), [("one", 1)]);
        assert_eq!(parse(""), Ok(Document::default()));
    }

    #[test]
    fn failures_name_file_line_and_key() {
        for (text, message, hint) in [
            ("\nimgae = 'x'", ":2: unknown key \"imgae\"", "did you mean image?"),
            ("size = 1", ":1: unknown key \"size\"", "there are base_environment, image,"),
            ("image = 5", ":1: image: an integer, expected a string", "write it between quotes: \"5\""),
            ("image = ''", ":1: image: is empty", "name one;"),
            ("image = [", ":1: ", "environment files are TOML"),
            ("image = 'a'\nimage = 'b'", ":2: duplicate key", "environment files are TOML"),
            ("writable = 'yes'", ":1: writable: a string, expected true or false", "docs/"),
            ("mounts = '/a'", ":1: mounts: a string, expected an array of strings", "docs/"),
            ("mounts = [\n'/a',\n1]", ":3: mounts: an integer, expected a string", "write it"),
            (
                "base_environment = true",
                ":1: base_environment: a boolean, expected a string or an array",
                "write",
            ),
            ("env = ['A=1']", ":1: env: an array, expected a table", "docs/"),
            ("[env]\nA = 1", ":2: env.A: an integer, expected a string", "write it between quotes: \"1\""),
            ("[env]\nA = \"\\u0000\"", ":2: env.A: a NUL character", "no value"),
            ("annotations = 1", ":1: annotations: an integer, expected a table", "docs/"),
            (
                "[annotations]\na.b = []",
                ":2: annotations.a.b: an array, expected a string, a boolean or an integer",
                "docs/",
            ),
            ("\n\nworkdir = '${NOT_SET}'", ":3: workdir: the variable NOT_SET is not set", "export it"),
            ("[env]\nA = '$HOME'", ":2: env.A: \"$HOME\" is not expanded", "write ${NAME}"),
        ] {
            let failure = parse(text).unwrap_err();
            let rest = failure.message.strip_prefix("/e/a.toml");
            assert!(rest.is_some_and(|rest| rest.starts_with(message)), "{text:?}: {failure}");
            assert!(
                failure.hint.as_ref().is_some_and(|found| found.starts_with(hint)),
                "{text:?}: {failure:?}"
            );
        }
    }

    /// The square of the entries would take a minute and more.
    #[test]
    fn a_file_of_many_entries_is_read_in_good_time() {
        let begin = Instant::now();
        let lines = |from: &str, count: usize| -> String {
            (0..count).map(|number| from.replace('#', &number.to_string())).collect()
        };
        let variables = parse(&format!("[env]\n{}", lines("V#='#'\n", 60_000))).unwrap();
        assert_eq!(variables.env["V59999"].place.line, 60_001);
        let hooks =
            parse(&format!("[annotations]\n{}", lines("com.hooks.x#.enabled='true'\n", 25_000))).unwrap();
        assert_eq!(hooks.annotations["com.hooks.x24999.enabled"].place.line, 25_001);
        let loaded = Loaded { document: variables, files: Vec::new() };
        assert_eq!(describe(&loaded).unwrap().settings.environment.map(|found| found.len()), Some(60_000));
        assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    }

    #[test]
    fn a_file_on_top_of_another() {
        let mut both = parse(
            "image = 'a'\nworkdir = '/w'\nwritable = false\nmounts = ['/a']\ndevices = ['x/y=0']\n\
             [env]\nA = '1'\nB = '2'\n[annotations]\na.b = '1'\na.c = '2'",
        )
        .unwrap();
        both.overlay(
            parse(
                "image = 'b'\nentrypoint = false\nmounts = ['/b']\ndevices = ['x/y=1']\n[env]\nB = ''\nC = '3'\n\
                 [annotations]\na.c = '3'",
            )
            .unwrap(),
        );
        let values = |table: &BTreeMap<String, Placed<String>>| {
            table.iter().map(|(name, value)| format!("{name}={}", value.value)).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(both.image.as_ref().map(|image| image.value.as_str()), Some("b"));
        assert_eq!(both.workdir.as_ref().map(|workdir| workdir.value.as_str()), Some("/w"));
        assert_eq!((both.entrypoint, both.writable), (Some(false), Some(false)));
        assert_eq!(texts(&both.mounts), [("/a", 4), ("/b", 3)]);
        assert_eq!(texts(&both.devices), [("x/y=0", 5), ("x/y=1", 4)]);
        assert_eq!(values(&both.env), "A=1 B= C=3");
        assert_eq!(values(&both.annotations), "a.b=1 a.c=3");
    }
}
