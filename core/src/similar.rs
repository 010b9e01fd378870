//! Names that somebody may have meant.

use std::path::Path;

/// A directory with more is not looked through.
const LOOKED_AT: usize = 2000;

/// A file in a directory whose name differs by a slip: a letter too many, too few, wrong, or two exchanged.
pub fn similar_file(directory: &Path, name: &str) -> Option<String> {
    let entries = std::fs::read_dir(directory).ok()?.take(LOOKED_AT).filter_map(Result::ok);
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    similar(name, names)
}

/// The nearest of these names, if it is near; of several the first in the alphabet.
pub fn similar(name: &str, names: impl Iterator<Item = String>) -> Option<String> {
    let name: Vec<char> = name.chars().collect();
    // Short names differ by little from many.
    let allowed = if name.len() < 5 { 1 } else { 2 };
    let near = names.filter_map(|other| {
        let letters: Vec<char> = other.chars().collect();
        let close = letters.len().abs_diff(name.len()) <= allowed;
        let distance = if close { distance(&name, &letters) } else { usize::MAX };
        (1..=allowed).contains(&distance).then_some((distance, other))
    });
    near.min().map(|(_, other)| other)
}

/// How many slips lead from one word to the other.
fn distance(one: &[char], other: &[char]) -> usize {
    let mut before_last: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=other.len()).collect();
    for (row, letter) in one.iter().enumerate() {
        let mut next = vec![row + 1];
        for (column, theirs) in other.iter().enumerate() {
            let changed = last[column] + usize::from(letter != theirs);
            let mut least = changed.min(last[column + 1] + 1).min(next[column] + 1);
            if row > 0 && column > 0 && *letter == other[column - 1] && one[row - 1] == *theirs {
                least = least.min(before_last[column - 1] + 1);
            }
            next.push(least);
        }
        before_last = std::mem::replace(&mut last, next);
    }
    last.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_recognised() {
        for (typed, names, meant) in [
            ("tff.sqsh", &["tf.sqsh", "torch.sqsh"][..], Some("tf.sqsh")),
            ("ft.sqsh", &["tf.sqsh"], Some("tf.sqsh")),
            ("pytroch.sif", &["pytorch.sif", "torch.sif"], Some("pytorch.sif")),
            ("tf.sqfs", &["tf.sqsh"], Some("tf.sqsh")),
            ("a", &["b", "ab", "cd"], Some("ab")),
            ("numpy.sqsh", &["scipy.tar", "x"], None),
            ("same.sqsh", &["same.sqsh"], None),
        ] {
            let found = similar(typed, names.iter().map(|name| (*name).to_owned()));
            assert_eq!(found.as_deref(), meant, "{typed}");
        }
    }
}
