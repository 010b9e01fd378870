//! Patterns for names: `*` stands for any text within a name, `[0-9]` for one of these characters. Rules for the node's libraries
//! and the site's policy on images use them.

/// Whether a name matches.
pub fn matches(pattern: &str, name: &str) -> bool {
    match_bytes(pattern.as_bytes(), name.as_bytes())
}

/// Whether a name of several parts, with `/` between them, matches. `*` stays within a part; `**` stands for one part or more.
pub fn matches_path(pattern: &str, name: &str) -> bool {
    let pattern: Vec<&str> = pattern.split('/').collect();
    let name: Vec<&str> = name.split('/').collect();
    let (mut at, mut seen) = (0, 0);
    // As below, with parts in place of bytes.
    let mut last_star = None;
    while at < pattern.len() || seen < name.len() {
        match (pattern.get(at), name.get(seen)) {
            (Some(&"**"), Some(_)) => {
                (at, seen) = (at + 1, seen + 1);
                last_star = Some((at, seen));
            }
            (Some(part), Some(text)) if matches(part, text) => (at, seen) = (at + 1, seen + 1),
            _ => match last_star {
                Some((behind, taken)) if taken < name.len() => {
                    (at, seen) = (behind, taken + 1);
                    last_star = Some((behind, taken + 1));
                }
                _ => return false,
            },
        }
    }
    true
}

/// From left to right. Where it goes wrong, the last `*` takes one more byte: what an earlier one took need never change,
/// so the time is at most that for each byte of the name with each of the pattern.
fn match_bytes(pattern: &[u8], name: &[u8]) -> bool {
    let (mut at, mut seen) = (0, 0);
    let mut last_star = None;
    while at < pattern.len() || seen < name.len() {
        if pattern.get(at) == Some(&b'*') {
            at += 1;
            last_star = Some((at, seen));
        } else if let Some(width) = name.get(seen).and_then(|byte| width_of_match(&pattern[at..], *byte)) {
            at += width;
            seen += 1;
        } else {
            match last_star {
                Some((behind, taken)) if taken < name.len() => {
                    (at, seen) = (behind, taken + 1);
                    last_star = Some((behind, taken + 1));
                }
                _ => return false,
            }
        }
    }
    true
}

/// How much of the pattern's beginning stands for this byte.
fn width_of_match(pattern: &[u8], byte: u8) -> Option<usize> {
    let (first, class) = pattern.split_first()?;
    if *first != b'[' {
        return (*first == byte).then_some(1);
    }
    let end = class.iter().position(|byte| *byte == b']')?;
    let within = match &class[..end] {
        [from, b'-', to] => (from..=to).contains(&&byte),
        set => set.contains(&byte),
    };
    within.then_some(end + 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match() {
        for (pattern, name, expected) in [
            ("nvidiactl", "nvidiactl", true),
            ("nvidiactl", "nvidiact", false),
            ("nvidia[0-9]*", "nvidia12", true),
            ("nvidia[0-9]*", "nvidia-uvm", false),
            ("nvidia[0-9]*", "nvidia", false),
            ("lib*.so.*", "libnvidia-compiler.so.535.1", true),
            ("lib*.so.*", "libnvidia-compiler.so", false),
            ("*-rdmav*.so", "libmlx5-rdmav34.so", true),
            ("a[bc]d", "acd", true),
            ("a[bc", "ab", false),
            ("", "", true),
            ("*", "", true),
            ("*a", "", false),
            ("a*", "a", true),
            ("*ab*ab", "abab", true),
            ("*ab*ab", "aabb", false),
            ("*[0-9]b", "a1a2b", true),
            ("a*[", "ab", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn many_stars_take_no_time() {
        let pattern = "*a".repeat(100) + "b";
        assert!(!matches(&pattern, &"a".repeat(255)));
        assert!(matches(&pattern, &("a".repeat(254) + "b")));
    }

    #[test]
    fn names_of_several_parts_match() {
        for (pattern, name, expected) in [
            ("docker.io/library/*", "docker.io/library/ubuntu", true),
            ("docker.io/library/*", "docker.io/library/a/b", false),
            ("docker.io/library/*", "docker.io/library", false),
            ("nvcr.io/nvidia/**", "nvcr.io/nvidia/pytorch", true),
            ("nvcr.io/nvidia/**", "nvcr.io/nvidia/k8s/dcgm", true),
            ("nvcr.io/nvidia/**", "nvcr.io/nvidia", false),
            ("nvcr.io/nvidia/**", "nvcr.io.evil.org/nvidia/a", false),
            ("nvcr.io/nvidia/**", "nvcr.io/nvidiax/a", false),
            ("*.site.org/**/prod", "r.site.org/a/b/prod", true),
            ("*.site.org/**/prod", "r.site.org/a/prod/b", false),
            ("*.site.org/**/prod", "r.site.org/prod", false),
            ("**/a/**/b", "a/a/a/x/b/b", true),
            ("**", "a/b", true),
            ("a/**b", "a/xb", true),
            ("a/**b", "a/x/b", false),
        ] {
            assert_eq!(matches_path(pattern, name), expected, "{pattern} {name}");
        }
        let pattern = "**/a/".repeat(40) + "b";
        assert!(!matches_path(&pattern, &("a/".repeat(120) + "a")));
    }
}
