//! `mizzen images`: what there is in the site's folders and in the user's store, and what goes. Runs as the user.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use mizzen::report::{age, megabytes};
use mizzen_core::Failure;
use mizzen_core::failure::{cause, quote};
use mizzen_core::fs_server::refuse_foreign;
use serde_json::{Value, json};

use crate::shown;
use crate::store::Store;
use crate::store::select::{ListedImage, list, select};

/// Digits of a digest that people read.
const SHORT_DIGEST: usize = 12;

/// A result for people or for programs.
pub struct Outcome {
    /// For people.
    pub text: String,
    /// For programs.
    pub json: Value,
}

/// Shows the images of the site's folders and of the user's store, wherever that is, or will be.
pub fn show(folders: &[PathBuf], store: &Path) -> Outcome {
    let (mut text, mut listed) = (String::new(), Vec::new());
    for folder in folders {
        listed.push(show_directory(folder, false, &mut text));
    }
    let store = show_directory(store, true, &mut text);
    Outcome { text, json: json!({ "folders": listed, "store": store }) }
}

/// One directory. That it cannot be read is told, and no failure: the others can.
fn show_directory(directory: &Path, is_store: bool, text: &mut String) -> Value {
    let unread = |problem: String| json!({ "directory": directory.to_string_lossy(), "problem": problem, "images": [] });
    // Before it is read: a server that does not answer would hold whoever asks.
    if let Err(failure) = refuse_foreign(directory) {
        let _ = writeln!(text, "{failure}");
        return unread(failure.message);
    }
    let images = match list(directory) {
        Ok(images) => images,
        // Nobody has to have a store.
        Err(error) if is_store && error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(error) => {
            let problem = cause(&error);
            let _ = writeln!(text, "{}: cannot be read: {problem}", shown(directory));
            return unread(problem);
        }
    };
    for image in &images {
        let _ = writeln!(text, "{}", row(image, is_store));
    }
    // A file with several names takes its place once.
    let files: BTreeMap<u64, u64> =
        images.iter().filter_map(|image| Some((image.file.0, image.size?))).collect();
    let total: u64 = files.values().sum();
    let noun = if images.len() == 1 { "image" } else { "images" };
    let _ = writeln!(text, "{}: {} {noun}, {}", shown(directory), images.len(), megabytes(total));
    json!({
        "directory": directory.to_string_lossy(),
        "size": total,
        "images": images.iter().map(entry).collect::<Vec<_>>(),
    })
}

/// What a user writes for `--container` stands last: it may be long.
fn row(image: &ListedImage, is_store: bool) -> String {
    let size = image.size.map_or_else(|| image.format.to_owned(), megabytes);
    let digest = image.manifest_digest.or(image.file_digest);
    let digest = digest.map_or_else(|| "-".to_owned(), |digest| digest.hex()[..SHORT_DIGEST].to_owned());
    let platform = image.platform.as_deref().map_or_else(|| "-".to_owned(), |text| quote(text.as_bytes()));
    let file = shown(Path::new(image.path.file_name().unwrap_or_default()));
    let reference = image.reference.as_deref().map(|text| quote(text.as_bytes()));
    let name = match (is_store, reference) {
        (true, Some(reference)) => reference,
        (false, Some(reference)) => format!("{file}  ({reference})"),
        (_, None) => file,
    };
    format!("{size:>12}  {:<9}  {digest:<SHORT_DIGEST$}  {platform:<13}  {name}", age(image.created))
}

fn entry(image: &ListedImage) -> Value {
    json!({
        "name": image.path.file_name().unwrap_or_default().to_string_lossy(),
        "path": image.path.to_string_lossy(),
        "format": image.format,
        "size": image.size,
        "reference": image.reference,
        "platform": image.platform,
        "manifest_digest": image.manifest_digest.map(|digest| digest.to_string()),
        "digest": image.file_digest.map(|digest| digest.to_string()),
        "source": image.source,
        "created": image.created,
        "last_used": seconds(image.used),
    })
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// The images of the store.
pub fn stored(store: &Store) -> Result<Vec<ListedImage>, Failure> {
    list(store.directory())
        .map_err(|error| Failure::caused_by(format!("{}: cannot read it", shown(store.directory())), error))
}

/// Removes the images that are meant by these words, or all that were imported.
pub fn remove(store: &Store, words: &[String], all: bool) -> Result<Outcome, Failure> {
    let images = stored(store)?;
    let imported = || images.iter().filter(|image| image.is_imported()).collect();
    let chosen = if all { imported() } else { select(&images, words)? };
    take_away(store, &chosen, false)
}

/// Removes what was not used for so long, but of each reference and platform the last few; and what crashes have left. Files
/// that the user has put there stay.
pub fn prune(store: &Store, older_than: Duration, keep: usize, dry_run: bool) -> Result<Outcome, Failure> {
    let images = stored(store)?;
    let old = unused(&images, SystemTime::now(), older_than, keep);
    let left_over = if dry_run { 0 } else { store.sweep() };
    let mut outcome = take_away(store, &old, dry_run)?;
    if left_over > 0 {
        let _ = writeln!(outcome.text, "{left_over} other files removed");
    }
    outcome.json["removed_files"] = left_over.into();
    Ok(outcome)
}

fn unused(images: &[ListedImage], now: SystemTime, older_than: Duration, keep: usize) -> Vec<&ListedImage> {
    let mut of_reference: BTreeMap<_, Vec<&ListedImage>> = BTreeMap::new();
    for image in images.iter().filter(|image| image.is_imported()) {
        of_reference.entry((&image.reference, &image.platform)).or_default().push(image);
    }
    let mut unused = Vec::new();
    for mut versions in of_reference.into_values() {
        versions.sort_by_key(|image| std::cmp::Reverse(image.used));
        let is_old = |image: &&ListedImage| now.duration_since(image.used).is_ok_and(|age| age >= older_than);
        unused.extend(versions.into_iter().skip(keep).filter(is_old));
    }
    unused
}

fn take_away(store: &Store, images: &[&ListedImage], dry_run: bool) -> Result<Outcome, Failure> {
    let (mut text, mut listed, mut freed) = (String::new(), Vec::new(), 0);
    let mut names_gone: BTreeMap<u64, u64> = BTreeMap::new();
    let verb = if dry_run { "would be removed" } else { "removed" };
    for image in images {
        if !dry_run {
            store.remove(&image.path)?;
        }
        let name = image.reference.clone().unwrap_or_else(|| image.path.display().to_string());
        let digest = image.manifest_digest.map(|digest| format!(" {digest}")).unwrap_or_default();
        let _ = writeln!(text, "{}{digest}: {verb}", quote(name.as_bytes()));
        // A file is gone with its last name.
        let (file, links) = image.file;
        let gone: &mut u64 = names_gone.entry(file).or_default();
        *gone += 1;
        freed += image.size.filter(|_| *gone == links).unwrap_or(0);
        listed.push(entry(image));
    }
    let verb = if dry_run { "would be freed" } else { "freed" };
    let _ = writeln!(text, "{}: {} {verb}", shown(store.directory()), megabytes(freed));
    Ok(Outcome { text, json: json!({ "images": listed, "freed": freed, "dry_run": dry_run }) })
}

#[cfg(test)]
mod tests;
