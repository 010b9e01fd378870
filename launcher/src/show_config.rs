//! `mizzen config show`: the settings of the site, each with the file and line that it comes from. Runs as the user on the host.

use std::fmt::Write;
use std::path::Path;

use mizzen_core::config::{Compatible, Entry, Merged, SiteFiles, Source, uncommented};
use mizzen_core::{Config, Failure, plugstack};
use serde::Deserialize;
use serde_json::{Value, json};
use toml::de::ValueDeserializer;

use crate::manual::SAMPLE;
use crate::report::print;

/// A setting as it is shown.
struct Shown {
    /// Its table, as TOML writes it; empty for none.
    table: String,
    key: String,
    value: Value,
    origin: Origin,
}

/// Where a value comes from.
enum Origin {
    /// This line of this file.
    Line(String, usize),
    /// Nobody has set it.
    Default,
    /// Nobody has set it, and pyxis's default holds.
    OfPyxis,
}

impl Origin {
    /// As a comment has it.
    fn text(&self) -> String {
        match self {
            Origin::Line(file, line) => format!("{file}:{line}"),
            Origin::Default => "default".to_owned(),
            Origin::OfPyxis => "default in jobs with compatible = \"pyxis\"".to_owned(),
        }
    }
}

/// Prints all settings.
pub fn run(as_json: bool) -> Result<(), Failure> {
    let source = Source::of_this_machine()?;
    let files = SiteFiles::read(&source)?;
    let settings = collect(&files.merge()?)?;
    print(&match as_json {
        true => to_json(&source, &files, &settings),
        false => heading(&source, &files) + &to_toml(&settings),
    })
}

/// All settings as a file of settings.
pub fn values(merged: &Merged) -> Result<String, Failure> {
    Ok(to_toml(&collect(merged)?))
}

/// What the files say, and the defaults of what they do not, in the order of the file that comes with mizzen. Tables have no
/// defaults.
fn collect(merged: &Merged) -> Result<Vec<Shown>, Failure> {
    let text = uncommented(SAMPLE);
    let mut sample = Merged::default();
    sample.add(Path::new("mizzen.toml"), &text)?;
    let mut defaults = sample.entries();
    defaults.sort_by_key(|entry| entry.position.map(|position| position.line));
    let given = merged.entries();
    let own = |default: &Entry| given.iter().find(|entry| entry.table.is_empty() && entry.key == default.key);
    let plain = defaults.iter().map(|default| match own(default) {
        Some(entry) => shown(entry, true),
        None => shown(default, false).map(|shown| match of_pyxis(&merged.config, &shown.key) {
            Some(value) => Shown { value, origin: Origin::OfPyxis, ..shown },
            None => shown,
        }),
    });
    let in_tables = given.iter().filter(|entry| !entry.table.is_empty()).map(|entry| shown(entry, true));
    plain.chain(in_tables).collect()
}

/// What pyxis has for a key that nobody has set, where that holds.
fn of_pyxis(config: &Config, key: &str) -> Option<Value> {
    if config.compatible != Compatible::Pyxis {
        return None;
    }
    match key {
        "mount_home" => config.mount_home_in_jobs().map(Value::from),
        "container_scope" => Some(Value::from(config.container_scope().word())),
        _ => None,
    }
}

fn shown(entry: &Entry, given: bool) -> Result<Shown, Failure> {
    let value = Value::deserialize(ValueDeserializer::from(entry.value.clone()))
        .map_err(|error| Failure::new(error.message()).about(&entry.key))?;
    let origin = match entry.position.filter(|_| given) {
        Some(position) => Origin::Line(position.file.display().to_string(), position.line),
        None => Origin::Default,
    };
    Ok(Shown { table: entry.table.clone(), key: entry.key.clone(), value, origin })
}

fn to_toml(settings: &[Shown]) -> String {
    let mut text = String::new();
    let mut table = "";
    for setting in settings {
        if setting.table != table {
            table = &setting.table;
            let _ = writeln!(text, "\n[{table}]");
        }
        let _ =
            writeln!(text, "{} = {}  # {}", setting.key, toml_value(&setting.value), setting.origin.text());
    }
    text
}

/// Which files these are.
fn heading(source: &Source, files: &SiteFiles) -> String {
    let mut text = String::new();
    let is_there = files.paths().any(|file| file == source.path());
    let named = match (is_there, named_by(source)) {
        (false, _) => ", which is not there".to_owned(),
        (true, Some((file, line))) => format!(", named by {file}:{line}"),
        (true, None) => String::new(),
    };
    let _ = writeln!(text, "# {}{named}", source.path().display());
    for file in files.paths().filter(|file| *file != source.path()) {
        let _ = writeln!(text, "# {}", file.display());
    }
    text
}

/// The line of plugstack.conf that names the file, if one does.
fn named_by(source: &Source) -> Option<(String, usize)> {
    let line = plugstack::find().filter(|_| *source != Source::Default)?;
    Some((line.file.display().to_string(), line.number))
}

fn to_json(source: &Source, files: &SiteFiles, settings: &[Shown]) -> String {
    let settings: Vec<Value> = settings
        .iter()
        .map(|Shown { table, key, value, origin }| {
            let key = if table.is_empty() { key.clone() } else { format!("{table}.{key}") };
            let (file, line) = match origin {
                Origin::Line(file, line) => (Some(file), Some(line)),
                Origin::Default | Origin::OfPyxis => (None, None),
            };
            json!({ "key": key, "value": value, "default": line.is_none(), "file": file, "line": line })
        })
        .collect();
    let named_by = named_by(source).map(|(file, line)| json!({ "file": file, "line": line }));
    let files: Vec<String> = files.paths().map(|file| file.display().to_string()).collect();
    let report = json!({
        "file": source.path().display().to_string(),
        "named_by": named_by,
        "drop_ins": source.drop_in_directory().display().to_string(),
        "files": files,
        "settings": settings,
    });
    format!("{report:#}\n")
}

/// A value as TOML writes it.
fn toml_value(value: &Value) -> String {
    match value {
        Value::Array(values) => {
            format!("[{}]", values.iter().map(toml_value).collect::<Vec<String>>().join(", "))
        }
        // Strings are those of JSON, but for one letter.
        Value::String(text) => Value::from(text.as_str()).to_string().replace('\u{7f}', "\\u007f"),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_has_its_origin() {
        let mut merged = Merged::default();
        let (main, drop_in) = (Path::new("/m.toml"), Path::new("/m.d/1.toml"));
        let text = "stage = \"never\"\nimage_folders = [\"/a\", \"/b\\\"\\u007f\"]\n[registries.\"a.io\"]\nplain_http = true\n";
        merged.add(main, text).unwrap();
        let text = "stage_keep_free = \"\"\nstage = \"auto\"\n[registries.\"a.io\"]\nmirrors = []\n[policy]\nowners = [0, \"x\"]\n";
        merged.add(drop_in, text).unwrap();
        let text = values(&merged).unwrap();
        for line in [
            "compatible = \"mizzen\"  # default",
            "image_folders = [\"/a\", \"/b\\\"\\u007f\"]  # /m.toml:2",
            "mount_home = true  # default",
            "stage = \"auto\"  # /m.d/1.toml:2",
            "stage_keep_free = \"\"  # /m.d/1.toml:1",
            "[policy]",
            "owners = [0, \"x\"]  # /m.d/1.toml:6",
            "[registries.\"a.io\"]",
            "plain_http = true  # /m.toml:4",
            "mirrors = []  # /m.d/1.toml:4",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line}\n{text}");
        }
        // What is shown means what the files say.
        let again = Config::parse(&text, Path::new("/again.toml")).unwrap();
        let mut expected = merged.config.clone();
        // Lists that are shown as empty are not told from those that nobody has made.
        expected.settings = again.settings.clone();
        // Nor a default that is shown from one that is set.
        expected.container_scope = Some(expected.container_scope());
        assert_eq!(again, expected);
        assert_eq!(again.settings.stage, merged.config.settings.stage);
    }

    #[test]
    fn defaults_of_pyxis_say_so() {
        let shown = |text: &str| {
            let mut merged = Merged::default();
            merged.add(Path::new("/m.toml"), text).unwrap();
            values(&merged).unwrap()
        };
        let text = shown("compatible = \"pyxis\"\n");
        for line in [
            "mount_home = false  # default in jobs with compatible = \"pyxis\"",
            "container_scope = \"global\"  # default in jobs with compatible = \"pyxis\"",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line}\n{text}");
        }
        let text = shown("compatible = \"pyxis\"\ncontainer_scope = \"job\"\nmount_home = true\n");
        for line in ["mount_home = true  # /m.toml:3", "container_scope = \"job\"  # /m.toml:2"] {
            assert!(text.lines().any(|shown| shown == line), "{line}\n{text}");
        }
        assert!(shown("").contains("\ncontainer_scope = \"job\"  # default\n"));
    }
}
