//! The documents as the tests read them: their links, and their blocks of code.
//!
//! Every block is between fences and says what it is; CONTRIBUTING.md ("Documents") has the words.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::examples::Example;
use crate::repository;

/// A page of Markdown.
pub struct Page {
    /// Its path in the repository.
    pub path: PathBuf,
    /// Its text.
    pub text: String,
}

/// Code between fences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The line of its first fence.
    pub line: usize,
    /// The words behind the fence, which commas separate: the language, then what to do with it.
    pub words: Vec<String>,
    /// The lines between the fences.
    pub text: String,
}

impl Block {
    /// The language, or `output`.
    pub fn language(&self) -> &str {
        self.words.first().map_or("", String::as_str)
    }

    /// Whether it has this word.
    pub fn has(&self, word: &str) -> bool {
        self.words.iter().skip(1).any(|found| found == word)
    }

    /// Its first line that is a command to type, or a line of a batch script, as far as a look at its first word tells.
    pub fn command(&self) -> Option<&str> {
        const COMMANDS: [&str; 21] = [
            "srun", "sbatch", "salloc", "scancel", "scontrol", "squeue", "mizzen", "mpirun", "mpiexec",
            "apt", "apt-get", "dnf", "make", "docker", "ssh", "sudo", "module", "python3", "pip", "timeout",
            "#SBATCH",
        ];
        self.text.lines().find(|line| {
            let word = line.trim_start().trim_start_matches("$ ").split_whitespace().next();
            word.is_some_and(|word| COMMANDS.contains(&word) || word.starts_with("#!"))
        })
    }

    /// The value of `KEY=VALUE` among its words.
    pub fn value(&self, key: &str) -> Option<&str> {
        self.words.iter().find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
    }
}

/// A part of a page: prose or code.
enum Piece<'a> {
    Prose(usize, &'a str),
    Code(Block),
}

impl Page {
    /// All pages that users, administrators and contributors read.
    pub fn all() -> Result<Vec<Page>> {
        let mut paths: Vec<PathBuf> = [
            "README.md",
            "SECURITY.md",
            "CONTRIBUTING.md",
            "RELEASE.md",
            "CHANGELOG.md",
            "examples/README.md",
            "packaging/ansible/README.md",
            "packaging/spack/README.md",
        ]
        .map(PathBuf::from)
        .into();
        paths.extend(Example::ALL.map(|example| Path::new("examples").join(example.name).join("README.md")));
        for entry in fs::read_dir(repository().join("docs"))? {
            let name = PathBuf::from(entry?.file_name());
            if name.extension().is_some_and(|extension| extension == "md") {
                paths.push(Path::new("docs").join(name));
            }
        }
        paths.sort();
        paths.into_iter().map(Page::read).collect()
    }

    /// One of them.
    pub fn read(path: impl Into<PathBuf>) -> Result<Page> {
        let path = path.into();
        let text =
            fs::read_to_string(repository().join(&path)).with_context(|| path.display().to_string())?;
        Ok(Page { path, text })
    }

    fn pieces(&self) -> Result<Vec<Piece<'_>>> {
        let mut pieces = Vec::new();
        let mut open: Option<Block> = None;
        for (number, line) in self.text.lines().enumerate() {
            // In a list a block is indented with its item.
            match (line.trim_start().strip_prefix("```"), &mut open) {
                (Some(_), Some(_)) => pieces.extend(open.take().map(Piece::Code)),
                (Some(info), None) => {
                    let words = info.split(',').map(|word| word.trim().to_owned()).collect();
                    open = Some(Block { line: number + 1, words, text: String::new() });
                }
                (None, Some(block)) => {
                    block.text.push_str(line);
                    block.text.push('\n');
                }
                (None, None) => pieces.push(Piece::Prose(number + 1, line)),
            }
        }
        ensure!(open.is_none(), "{}: a block is not closed", self.path.display());
        Ok(pieces)
    }

    /// Its blocks of code.
    pub fn blocks(&self) -> Result<Vec<Block>> {
        let blocks = self.pieces()?.into_iter().filter_map(|piece| match piece {
            Piece::Code(block) => Some(block),
            Piece::Prose(..) => None,
        });
        Ok(blocks.collect())
    }

    /// Its lines without code: number and text, with what stands between backticks taken out.
    pub fn prose(&self) -> Result<Vec<(usize, String)>> {
        let lines = self.pieces()?.into_iter().filter_map(|piece| match piece {
            Piece::Prose(number, line) => Some((number, line.split('`').step_by(2).collect())),
            Piece::Code(_) => None,
        });
        Ok(lines.collect())
    }

    /// The targets of its links, each with its line.
    pub fn links(&self) -> Result<Vec<(usize, String)>> {
        let mut links = Vec::new();
        for (number, line) in self.prose()? {
            for part in line.split("](").skip(1) {
                let target = part.split(')').next().unwrap_or_default();
                links.push((number, target.split(' ').next().unwrap_or_default().to_owned()));
            }
        }
        Ok(links)
    }

    /// The anchors of its headings, as mdBook and GitHub make them.
    pub fn anchors(&self) -> Result<BTreeSet<String>> {
        let headings = self.pieces()?.into_iter().filter_map(|piece| match piece {
            Piece::Prose(_, line) if line.starts_with('#') => {
                Some(anchor(line.trim_start_matches('#').trim()))
            }
            _ => None,
        });
        Ok(headings.collect())
    }
}

fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

/// Whether a text is what was expected, where `…` stands for anything within a line, and a line of it alone for any lines.
pub fn matches(expected: &str, found: &str) -> bool {
    let lines: Vec<&str> = found.lines().collect();
    lines_match(&expected.lines().collect::<Vec<&str>>(), &lines)
}

fn lines_match(expected: &[&str], found: &[&str]) -> bool {
    match (expected.split_first(), found.split_first()) {
        (None, None) => true,
        (Some((&"…", rest)), _) => (0..=found.len()).any(|skipped| lines_match(rest, &found[skipped..])),
        (Some((line, rest)), Some((first, others))) => line_matches(line, first) && lines_match(rest, others),
        _ => false,
    }
}

fn line_matches(expected: &str, found: &str) -> bool {
    match expected.split_once('…') {
        None => expected == found,
        Some((begin, rest)) => found.strip_prefix(begin).is_some_and(|found| {
            let ends = found.char_indices().map(|(at, _)| at).chain([found.len()]);
            ends.into_iter().any(|at| line_matches(rest, &found[at..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_links_and_anchors_are_found() {
        let text =
            "# A `b`, c\n[x](y.md#z) `[no](no)`\n```sh,root\n[no](no)\n```\n- i\n\n  ```output\n  o\n  ```\n";
        let page = Page { path: "p.md".into(), text: text.to_owned() };
        assert_eq!(page.links().unwrap(), [(2, "y.md#z".to_owned())]);
        assert_eq!(page.anchors().unwrap(), BTreeSet::from(["a-b-c".to_owned()]));
        let blocks = page.blocks().unwrap();
        assert_eq!((blocks[0].language(), blocks[0].has("root"), blocks[0].line), ("sh", true, 3));
        assert_eq!((blocks[1].language(), blocks[1].text.as_str()), ("output", "  o\n"));
    }

    #[test]
    fn commands_are_recognised() {
        let command = |text: &str| {
            let block = Block { line: 1, words: vec!["text".to_owned()], text: text.to_owned() };
            block.command().map(str::to_owned)
        };
        assert_eq!(command("a\n  srun -n1 x\n").as_deref(), Some("  srun -n1 x"));
        assert_eq!(command("$ mizzen run x").as_deref(), Some("$ mizzen run x"));
        assert_eq!(command("#!/bin/bash\n").as_deref(), Some("#!/bin/bash"));
        assert_eq!(command("srun: error: mizzen: x\nmizzen: note: x\nmakes\n"), None);
    }

    #[test]
    fn dots_stand_for_what_differs() {
        for (expected, found) in
            [("a\nb …\n", "a\nb 1 2\n"), ("…\nc", "a\nb\nc"), ("1 of … on …: 3", "1 of 4 on n: 3")]
        {
            assert!(matches(expected, found), "{expected}");
        }
        for (expected, found) in [("a", "a\nb"), ("a …c", "a b"), ("…\nc", "a")] {
            assert!(!matches(expected, found), "{expected}");
        }
    }
}
