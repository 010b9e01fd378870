//! Changes in a file of credentials: everything else in it stays, it appears by rename, and only its owner reads it.
//!
//! Run by: the user, in the importer.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mizzen_core::Failure;
use serde_json::{Map, Value, json};

use crate::registry::credentials::auth_file::AuthFile;
use crate::registry::credentials::read_text;
use crate::registry::secret::Secret;

/// Puts a login in, in place of all others to the same registry.
pub fn add(path: &Path, key: &str, host: &str, user: &str, password: &Secret) -> Result<(), Failure> {
    let old = AuthFile::read(path)?.map(|content| content.keys_of(host)).unwrap_or_default();
    let auth = STANDARD.encode(format!("{user}:{}", password.expose()));
    change(path, |auths| {
        auths.retain(|key, _| !old.contains(key));
        auths.insert(key.to_owned(), json!({ "auth": auth }));
    })
}

/// Takes logins out.
pub fn remove(path: &Path, keys: &[String]) -> Result<(), Failure> {
    change(path, |auths| auths.retain(|key, _| !keys.contains(key)))
}

fn change(path: &Path, change: impl FnOnce(&mut Map<String, Value>)) -> Result<(), Failure> {
    let about = |failure: Failure| failure.about(path.display());
    // A link stays one: the file may be kept elsewhere.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let mut content = read(&target)?;
    let auths = content.entry("auths").or_insert_with(|| json!({}));
    if auths.is_null() {
        *auths = json!({});
    }
    match auths.as_object_mut() {
        Some(auths) => change(auths),
        None => return Err(about(Failure::new("not a file of credentials: auths is not an object"))),
    }
    let mut text = serde_json::to_string_pretty(&Value::Object(content))
        .map_err(|error| about(Failure::new(format!("cannot write it: {error}"))))?;
    text.push('\n');
    write(&target, text.as_bytes()).map_err(|error| about(Failure::caused_by("cannot write it", error)))
}

fn read(path: &Path) -> Result<Map<String, Value>, Failure> {
    let Some(text) = read_text(path)? else { return Ok(Map::new()) };
    if text.trim().is_empty() {
        return Ok(Map::new());
    }
    // The text has passwords: only the place is told.
    serde_json::from_str(&text).map_err(|error| {
        Failure::new(format!("not a file of credentials: line {}, column {}", error.line(), error.column()))
            .about(path.display())
    })
}

fn write(path: &Path, text: &[u8]) -> io::Result<()> {
    if let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    }
    let temporary = Temporary::create(path)?;
    let mut file = &temporary.file;
    file.write_all(text)?;
    file.sync_all()?;
    temporary.publish(path)
}

/// A file that goes away unless it is given its name.
struct Temporary {
    file: File,
    path: PathBuf,
    published: bool,
}

impl Temporary {
    fn create(path: &Path) -> io::Result<Temporary> {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{}.tmp", std::process::id()));
        let path = PathBuf::from(name);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        Ok(Temporary { file, path, published: false })
    }

    fn publish(mut self, path: &Path) -> io::Result<()> {
        fs::rename(&self.path, path)?;
        self.published = true;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.published {
            // It has a password in it; there is nobody to tell.
            let _ = fs::remove_file(&self.path);
        }
    }
}
