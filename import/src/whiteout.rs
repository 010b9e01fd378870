//! Names in layers: how a path is brought into one form, and which names mean that something below is hidden.
//!
//! Run by: the user, in the importer.

/// Before a name: that name is hidden in the layers below.
const PREFIX: &[u8] = b".wh.";
/// In a directory: everything in it is hidden in the layers below.
const OPAQUE: &[u8] = b".wh..wh..opq";

/// What an entry means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name<'a> {
    /// A file of this name.
    Plain(&'a [u8]),
    /// This name below is hidden.
    Whiteout(&'a [u8]),
    /// All of the directory below is hidden.
    Opaque,
}

/// What the last component of a path means.
pub fn meaning(name: &[u8]) -> Name<'_> {
    match name.strip_prefix(PREFIX) {
        Some(_) if name == OPAQUE => Name::Opaque,
        Some(hidden) => Name::Whiteout(hidden),
        None => Name::Plain(name),
    }
}

/// Whether a path's last component hides something.
pub fn is_whiteout(path: &[u8]) -> bool {
    split_last(path).1.starts_with(PREFIX)
}

/// A path from the root, without empty components, `.` and `..`: what leads above the root ends there.
pub fn clean_path(path: &[u8]) -> Vec<u8> {
    let mut components: Vec<&[u8]> = Vec::new();
    for component in path.split(|byte| *byte == b'/') {
        match component {
            b"" | b"." => {}
            b".." => drop(components.pop()),
            name => components.push(name),
        }
    }
    components.join(&b'/')
}

/// The directory of a clean path, and the name in it; both empty for the root.
pub fn split_last(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (path.get(..at).unwrap_or_default(), path.get(at + 1..).unwrap_or_default()),
        None => (b"", path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_have_one_form() {
        for (path, clean) in [
            ("./a//b/", "a/b"),
            ("/", ""),
            ("", ""),
            ("../../etc/passwd", "etc/passwd"),
            ("a/../../b", "b"),
            ("/abs", "abs"),
            ("a/./b/..", "a"),
        ] {
            assert_eq!(clean_path(path.as_bytes()), clean.as_bytes(), "{path}");
        }
    }

    #[test]
    fn marks_are_known() {
        assert_eq!(meaning(b".wh.foo"), Name::Whiteout(b"foo"));
        assert_eq!(meaning(b".wh..wh..opq"), Name::Opaque);
        assert_eq!(meaning(b".wh."), Name::Whiteout(b""));
        assert_eq!(meaning(b".white"), Name::Plain(b".white"));
        assert!(is_whiteout(b"a/.wh.b") && !is_whiteout(b".wh.a/b") && is_whiteout(b".wh.x"));
        assert_eq!(split_last(b"a/b/c"), (&b"a/b"[..], &b"c"[..]));
        assert_eq!(split_last(b"c"), (&b""[..], &b"c"[..]));
    }
}
