//! The patterns in the rules: `*` stands for any text within a name, `[0-9]` for one of these characters, and
//! `{triplet}` for the name that Debian's directories have for this machine.

/// Whether a name matches.
pub fn matches(pattern: &str, name: &str) -> bool {
    match_bytes(pattern.as_bytes(), name.as_bytes())
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

/// Whether it stands for more than one name.
pub fn is_pattern(text: &str) -> bool {
    text.contains(['*', '['])
}

/// The last part of a path.
pub fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Puts this machine's name in.
pub fn for_this_machine(pattern: &str) -> String {
    pattern.replace("{triplet}", &format!("{}-linux-gnu", std::env::consts::ARCH))
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
}
