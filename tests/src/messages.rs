//! Every message that mizzen can give, with its hint, as the sources have them: docs/messages.md is made of this, by
//! `vcluster messages`, and a test keeps it so.
//!
//! It understands the few forms in which our code writes failures: `Failure::new(…)` and `Failure::caused_by(…)` with a
//! text, or with a variable that was given one above; `hinted(…)`; `.hint(…)` and `.or_hint(…)` behind it, with a text, a
//! constant, a variable or a function; functions and closures that put a text of their callers in such a message; and the ways
//! in which notes are told. Names in braces become `…`. What it cannot see, `remedies.rs` says.

mod found;
mod remedies;
mod source;
mod tokens;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use found::Message;
use source::Source;

/// The parts of the list, with the sources whose messages they have.
const PARTS: [(&str, &[&str]); 9] = [
    ("Options, variables and requests", &["core/src/settings", "core/src", "spank-plugin/src"]),
    (
        "The site's configuration",
        &[
            "core/src/config.rs",
            "core/src/image_policy.rs",
            "core/src/registries.rs",
            "core/src/trusted_file.rs",
            "core/src/image_store.rs",
            "launcher/src/cdi",
            "launcher/src/host_libraries",
        ],
    ),
    (
        "Finding and reading images",
        &[
            "core/src/find_image.rs",
            "core/src/image",
            "core/src/reference.rs",
            "launcher/src/image",
            "launcher/src/find_image.rs",
            "launcher/src/inspect.rs",
            "squashfs/src/reader/error.rs",
        ],
    ),
    ("Environment files", &["core/src/environment.rs", "launcher/src/environment"]),
    ("Copies on the node", &["core/src/staging.rs", "launcher/src/stage", "launcher/src/layer_cache.rs"]),
    (
        "Starting the container",
        &[
            "core/src/limits.rs",
            "core/src/user_namespace.rs",
            "launcher/src",
            "launcher/src/plan",
            "launcher/src/sandbox",
            "launcher/src/step",
            "launcher/src/sys",
        ],
    ),
    ("Slurm's commands inside", &["launcher/src/slurm"]),
    ("Registries and logins", &["import/src/registry"]),
    (
        "Importing, exporting and the image store",
        &["core/src/importer.rs", "launcher/src/importer.rs", "import/src"],
    ),
];

/// A part of the list.
#[derive(Default)]
struct Part {
    messages: BTreeSet<Message>,
    /// All hints of these sources that are written as a text, whatever they belong to.
    hints: BTreeSet<String>,
}

/// All messages, by the title of their part of the list.
fn find(repository: &Path) -> Result<BTreeMap<&'static str, Part>> {
    let mut files = Vec::new();
    for (_, sources) in PARTS {
        for source in sources {
            rust_files(&repository.join(source), &mut files)?;
        }
    }
    files.sort();
    files.dedup();
    let sources: Vec<(PathBuf, Source)> = files
        .into_iter()
        .map(|file| {
            let source = Source::read(&file)?;
            Ok((file, source))
        })
        .collect::<Result<_>>()?;
    let constants: BTreeMap<String, String> =
        sources.iter().flat_map(|(_, source)| source.constants()).collect();
    let mut parts: BTreeMap<&str, Part> = BTreeMap::new();
    for (file, source) in &sources {
        let place = file.strip_prefix(repository)?;
        let of_part = |sources: &[&str]| {
            sources.iter().filter(|source| place.starts_with(source)).map(|source| source.len()).max()
        };
        let part = PARTS.iter().max_by_key(|(_, sources)| of_part(sources)).context("no part")?;
        // Two files may have constants of the same name.
        let known = constants.clone().into_iter().chain(source.constants()).collect();
        let part = parts.entry(part.0).or_default();
        part.messages.extend(source.messages(&known));
        part.hints.extend(source.all_hints(&known));
    }
    Ok(parts)
}

/// The page of the list.
pub fn page(repository: &Path) -> Result<String> {
    let mut parts = find(repository)?;
    let mut page = HEAD.to_owned();
    let (mut used, mut said, mut failures) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let (mut notes, mut plain, mut loose) = (BTreeSet::new(), Vec::new(), BTreeSet::new());
    for (title, _) in PARTS {
        let Part { messages, hints } = parts.remove(title).unwrap_or_default();
        let mut hinted = BTreeSet::new();
        let mut without = BTreeSet::new();
        for mut message in messages {
            if message.hints.is_empty() {
                let remedy = remedies::of(&message.text);
                used.extend(remedy.map(|(pattern, _)| *pattern));
                message.hints = remedy.iter().map(|(_, remedy)| (*remedy).to_owned()).collect();
            }
            match (message.is_note, message.hints.is_empty()) {
                (true, _) => notes.insert(message),
                (false, false) => hinted.insert(message),
                (false, true) => without.insert(message.text),
            };
        }
        hinted.extend(remedies::of_errors(title));
        without.retain(|text| !hinted.iter().any(|message| message.text == *text));
        failures.extend(hinted.iter().map(|message| message.text.clone()));
        said.extend(hinted.iter().flat_map(|message| message.hints.clone()));
        loose.extend(hints);
        page.push_str(&format!("\n## {title}\n\n{}", table("message", "what to do", &hinted)));
        plain.push((title, without));
    }
    // A part of a note is none, and what is a failure elsewhere stands there.
    let texts: Vec<String> = notes.iter().map(|note| note.text.clone()).collect();
    notes.retain(|note| {
        let is_part = texts.iter().any(|text| *text != note.text && text.contains(&note.text));
        !is_part && !failures.contains(&note.text) && !note.text.starts_with(' ')
    });
    let (explained, told): (BTreeSet<Message>, BTreeSet<Message>) =
        notes.into_iter().partition(|note| !note.hints.is_empty());
    page.push_str(&format!(
        "{NOTES}\n{}\nThese say all that there is to know:\n\n",
        table("note", "what it means", &explained)
    ));
    page.extend(told.iter().map(|note| format!("- {}\n", cell(&note.text))));
    page.push_str(PLAIN);
    for (title, texts) in plain.iter().filter(|(_, texts)| !texts.is_empty()) {
        page.push_str(&format!("\n{title}:\n\n"));
        page.extend(texts.iter().map(|text| format!("- {}\n", cell(text))));
    }
    // The beginning of a hint may be a variable whose text is known.
    loose.retain(|hint: &String| {
        !said.iter().any(|said: &String| said.ends_with(hint.trim_start_matches('…')))
    });
    ensure!(loose.is_empty(), "remedies.rs must say of which messages these are the hints: {loose:#?}");
    let unused: Vec<&str> = remedies::patterns().filter(|pattern| !used.contains(pattern)).collect();
    ensure!(unused.is_empty(), "no message is meant by these in remedies.rs: {unused:#?}");
    Ok(page)
}

fn table(what: &str, then: &str, messages: &BTreeSet<Message>) -> String {
    let mut table = format!("| {what} | {then} |\n|---|---|\n");
    for (texts, hints) in rows(messages) {
        let [texts, hints] = [texts, hints].map(|cells| cells.into_iter().map(cell).collect::<Vec<String>>());
        table.push_str(&format!("| {} | {} |\n", texts.join("<br>"), hints.join("<br>or: ")));
    }
    table
}

/// A longer hint stands in one row with all messages that have it.
const SHARED_FROM: usize = 60;

/// The messages of each row, and its hints; in the order of their first messages.
fn rows(hinted: &BTreeSet<Message>) -> Vec<(Vec<&str>, Vec<&str>)> {
    let mut rows: Vec<(Vec<&str>, Vec<&str>)> = Vec::new();
    for message in hinted {
        let hints: Vec<&str> = message.hints.iter().map(String::as_str).collect();
        let long = hints.iter().map(|hint| hint.len()).sum::<usize>() > SHARED_FROM;
        match rows.iter_mut().find(|(_, known)| long && *known == hints) {
            Some((texts, _)) => texts.push(&message.text),
            None => rows.push((vec![&message.text], hints)),
        }
    }
    rows
}

const HEAD: &str = "\
# Messages

Every message of mizzen with its hint, made from the sources by `vcluster messages`. `…` stands for what differs: a path, a name,
a number, the kernel's reason. In front of a message stands what it is about: a node, an option, an image. Search for words of
the message in the page, or in the whole book with the key `s`. Messages with the same long hint stand together.

Some words are not mizzen's own: `error: unexpected argument …`, `error: the following required arguments …` and the like are about the
command line of `mizzen`, with a `tip:` where there is one; `FILE:LINE: KEY: invalid type: …, expected …`
and `unknown variant …` are about a file of the site, and tell what would be right there.

For a ticket, run the command again with `--container-verbose=debug`, or `mizzen run --verbose=debug`.
";

const NOTES: &str = "
## Notes

After a note (`mizzen: note: …`) the program goes on; only what the note says is different.
";

const PLAIN: &str = "
## Messages without a hint

These name what failed; behind it stands the kernel's reason, or what is wrong with a value. If that does not tell you what to do, run the
command again with `--container-verbose=debug` (`mizzen run --verbose=debug`) and give your administrator what it prints.
";

/// Text as it is, in a table: what Markdown would take for its own is escaped, but for code between backticks.
fn cell(text: &str) -> String {
    let text = text.replace('|', "\\|");
    let mut parts: Vec<String> = text.split('`').map(str::to_owned).collect();
    for part in parts.iter_mut().step_by(2) {
        *part = part.replace('<', "&lt;").replace('*', "\\*").replace('_', "\\_").replace('[', "\\[");
    }
    parts.join("`")
}

/// The sources of ours in a directory and below it, or a source itself; tests are left out.
pub fn rust_files(place: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if place.is_file() {
        files.push(place.to_owned());
        return Ok(());
    }
    for entry in fs::read_dir(place).with_context(|| place.display().to_string())? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() && name != "tests" {
            rust_files(&path, files)?;
        } else if name.ends_with(".rs") && !["tests.rs", "fuzz.rs", "written.rs"].contains(&name) {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_with_one_long_hint_are_one_row() {
        let message = |text: &str, hint: &str| Message {
            text: text.to_owned(),
            hints: vec![hint.to_owned()],
            is_note: false,
        };
        let long = "x".repeat(SHARED_FROM + 1);
        let found = [message("a", &long), message("b", "short"), message("c", &long), message("d", "short")];
        let found = BTreeSet::from(found);
        let expected = vec![
            (vec!["a", "c"], vec![long.as_str()]),
            (vec!["b"], vec!["short"]),
            (vec!["d"], vec!["short"]),
        ];
        assert_eq!(rows(&found), expected);
    }
}
