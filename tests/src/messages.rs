//! Every message that mizzen can give, with its hint, as the sources have them: docs/messages.md is made of this, by
//! `vcluster messages`, and a test keeps it so.
//!
//! It understands the few forms in which our code writes failures: `Failure::new(…)` and `Failure::caused_by(…)` with a
//! text, or with a variable that was given one above; `.hint(…)` and `.or_hint(…)` behind it, with a text, a constant or a
//! variable; and functions and closures that put a text of their callers in such a message. Names in braces become `…`.

mod source;
mod tokens;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use source::{Message, Source};

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
    for (title, _) in PARTS {
        let Part { messages, hints } = parts.remove(title).unwrap_or_default();
        let (hinted, plain): (Vec<Message>, Vec<Message>) =
            messages.into_iter().partition(|message| !message.hints.is_empty());
        page.push_str(&format!("\n## {title}\n\n| message | what to do |\n|---|---|\n"));
        for (texts, hints) in rows(&hinted) {
            let [texts, hints] =
                [texts, hints].map(|cells| cells.into_iter().map(cell).collect::<Vec<String>>());
            page.push_str(&format!("| {} | {} |\n", texts.join("<br>"), hints.join("<br>or: ")));
        }
        let used: BTreeSet<&String> = hinted.iter().flat_map(|message| &message.hints).collect();
        let others: Vec<&String> = hints.iter().filter(|hint| !used.contains(hint)).collect();
        let plain: Vec<&String> = plain.iter().map(|message| &message.text).collect();
        page.push_str(&list("Hints of several messages", &others));
        page.push_str(&list("Messages without a hint", &plain));
    }
    Ok(page)
}

/// A longer hint stands in one row with all messages that have it.
const SHARED_FROM: usize = 60;

/// The messages of each row, and its hints; in the order of their first messages.
fn rows(hinted: &[Message]) -> Vec<(Vec<&str>, Vec<&str>)> {
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

fn list(title: &str, lines: &[&String]) -> String {
    let lines: String = lines.iter().map(|line| format!("- {}\n", cell(line))).collect();
    if lines.is_empty() { lines } else { format!("\n{title}:\n\n{lines}") }
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
        let message =
            |text: &str, hint: &str| Message { text: text.to_owned(), hints: vec![hint.to_owned()] };
        let long = "x".repeat(SHARED_FROM + 1);
        let found = [message("a", &long), message("b", "short"), message("c", &long), message("d", "short")];
        let expected = vec![
            (vec!["a", "c"], vec![long.as_str()]),
            (vec!["b"], vec!["short"]),
            (vec!["d"], vec!["short"]),
        ];
        assert_eq!(rows(&found), expected);
    }
}
