//! The patterns in the rules: `*` stands for any text within a name, `[0-9]` for one of these characters, and
//! `{triplet}` for the name that Debian's directories have for this machine.

/// Whether a name matches.
pub fn matches(pattern: &str, name: &str) -> bool {
    match_bytes(pattern.as_bytes(), name.as_bytes())
}

fn match_bytes(pattern: &[u8], name: &[u8]) -> bool {
    match (pattern.split_first(), name.split_first()) {
        (None, None) => true,
        (Some((b'*', rest)), _) => (0..=name.len()).any(|skipped| match_bytes(rest, &name[skipped..])),
        (Some((b'[', class)), Some((first, others))) => {
            let Some(end) = class.iter().position(|byte| *byte == b']') else { return false };
            let within = match &class[..end] {
                [from, b'-', to] => (from..=to).contains(&first),
                set => set.contains(first),
            };
            within && match_bytes(&class[end + 1..], others)
        }
        (Some((wanted, rest)), Some((first, others))) => wanted == first && match_bytes(rest, others),
        (Some(_), None) | (None, Some(_)) => false,
    }
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
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }
}
