//! An environment as `mizzen env render` prints it: a file without parents and variables, or JSON.

use std::fmt::Write;

use serde_json::{Value, json};

use super::document::Placed;
use super::{Loaded, Table};

/// A file that says the same without any other, and in any environment.
pub fn to_toml(loaded: &Loaded) -> String {
    let document = &loaded.document;
    let mut text = String::new();
    let mut line = |key: &str, value: String| {
        // Into memory: it cannot fail.
        let _ = writeln!(text, "{key} = {value}");
    };
    for (key, value) in [("image", &document.image), ("workdir", &document.workdir)] {
        if let Some(value) = value {
            line(key, literal(&value.value));
        }
    }
    for (key, value) in [("entrypoint", document.entrypoint), ("writable", document.writable)] {
        if let Some(value) = value {
            line(key, value.to_string());
        }
    }
    for (key, values) in [("mounts", &document.mounts), ("devices", &document.devices)] {
        let items: Vec<String> =
            values.iter().map(|value| format!("    {},\n", literal(&value.value))).collect();
        if !items.is_empty() {
            line(key, format!("[\n{}]", items.concat()));
        }
    }
    for (name, table) in [("env", &document.env), ("annotations", &document.annotations)] {
        if !table.is_empty() {
            let _ = writeln!(text, "\n[{name}]");
        }
        for (key, value) in table {
            let _ = writeln!(text, "{} = {}", key_literal(key), literal(&value.value));
        }
    }
    text
}

/// For programs.
pub fn to_json(loaded: &Loaded) -> Value {
    let document = &loaded.document;
    let one = |value: &Option<Placed<String>>| value.as_ref().map(|value| value.value.clone());
    let list = |values: &[Placed<String>]| values.iter().map(|value| value.value.clone()).collect::<Vec<_>>();
    let table = |table: &Table| {
        table
            .iter()
            .map(|(name, value)| (name.clone(), json!(value.value)))
            .collect::<serde_json::Map<_, _>>()
    };
    let files: Vec<String> = loaded.files.iter().map(|file| file.to_string_lossy().into_owned()).collect();
    json!({
        "files": files,
        "image": one(&document.image),
        "workdir": one(&document.workdir),
        "entrypoint": document.entrypoint.unwrap_or(true),
        "writable": document.writable.unwrap_or(true),
        "mounts": list(&document.mounts),
        "devices": list(&document.devices),
        "env": table(&document.env),
        "annotations": table(&document.annotations),
    })
}

/// A string that a reader takes as it is: dollars are doubled.
fn literal(text: &str) -> String {
    quoted(&text.replace('$', "$$"))
}

/// A key, which has no variables.
fn key_literal(key: &str) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "_-".contains(letter);
    if !key.is_empty() && key.chars().all(plain) { key.to_owned() } else { quoted(key) }
}

fn quoted(text: &str) -> String {
    let mut quoted = "\"".to_owned();
    for letter in text.chars() {
        match letter {
            '"' | '\\' => quoted.extend(['\\', letter]),
            letter if letter.is_control() => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(letter));
            }
            letter => quoted.push(letter),
        }
    }
    quoted.push('"');
    quoted
}
