//! The patterns in the rules: those of `mizzen_core::pattern` for names, and `{triplet}` for the name that Debian's directories
//! have for this machine.

pub use mizzen_core::pattern::matches;

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
