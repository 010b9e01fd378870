//! A failure as the user reads it: what went wrong with which thing, and what to do about it.

use std::fmt::{self, Write};

use crate::limits;

/// One failure, one report: it is returned up to whoever talks to the user, and printed there once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The object, the operation and the cause, in one line: the causes, joined.
    pub message: String,
    /// What to do, where we know it.
    pub hint: Option<String>,
    /// What the exit code tells.
    pub kind: FailureKind,
    /// What led to it, from the outermost to the innermost.
    pub causes: Vec<String>,
}

/// What the exit code of a start that has failed tells, as with docker, podman and env.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FailureKind {
    /// There is no container.
    #[default]
    CannotStart,
    /// The program in it cannot be executed.
    NotExecutable,
    /// It has no such program.
    NotFound,
}

impl FailureKind {
    const ALL: [FailureKind; 3] =
        [FailureKind::CannotStart, FailureKind::NotExecutable, FailureKind::NotFound];

    /// The exit code.
    pub const fn exit_code(self) -> u8 {
        match self {
            FailureKind::CannotStart => 125,
            FailureKind::NotExecutable => 126,
            FailureKind::NotFound => 127,
        }
    }
}

impl Failure {
    /// A failure without a hint.
    pub fn new(message: impl Into<String>) -> Failure {
        let message = message.into();
        Failure { causes: vec![message.clone()], message, hint: None, kind: FailureKind::default() }
    }

    /// A failure of a call to the kernel: what could not be done, the kernel's word for the reason, and what to do
    /// where a limit explains it.
    pub fn caused_by(what: impl fmt::Display, error: impl Into<std::io::Error>) -> Failure {
        let error = error.into();
        let hint = error.raw_os_error().and_then(limits::hint);
        Failure { hint, ..Failure::new(cause(&error)).about(what) }
    }

    /// Says in front what it is about.
    pub fn about(mut self, what: impl fmt::Display) -> Failure {
        let what = what.to_string();
        self.message = format!("{what}: {}", self.message);
        self.causes.insert(0, what);
        self
    }

    /// Adds what to do about it.
    pub fn hint(mut self, hint: impl Into<String>) -> Failure {
        self.hint = Some(hint.into());
        self
    }

    /// Adds what to do about it, unless something better is known.
    pub fn or_hint(self, hint: impl Into<String>) -> Failure {
        if self.hint.is_some() { self } else { self.hint(hint) }
    }

    /// Says what the exit code is to tell.
    pub fn of_kind(self, kind: FailureKind) -> Failure {
        Failure { kind, ..self }
    }

    /// Whether the kernel had no memory, process or descriptor left, which says nothing of what was tried. A failure crosses borders as
    /// text, so the innermost cause is compared with the kernel's words.
    pub fn is_shortage(&self) -> bool {
        let word = |number: i32| cause(&std::io::Error::from_raw_os_error(number));
        let innermost = self.causes.last();
        [libc::ENOMEM, libc::EAGAIN, libc::ENFILE, libc::EMFILE]
            .into_iter()
            .any(|number| innermost == Some(&word(number)))
    }

    /// Text for every border that a failure crosses, between processes and privileges: [`Failure::decode`] reads it.
    pub fn encode(&self) -> String {
        let line = |text: &str| text.replace('\n', " ");
        let mut lines =
            vec![self.kind.exit_code().to_string(), line(self.hint.as_deref().unwrap_or_default())];
        lines.extend(self.causes.iter().map(|cause| line(cause)));
        lines.join("\n")
    }

    /// Reads what may be anybody's text, also where its end is missing. No part is longer than `limit`.
    pub fn decode(text: &[u8], limit: usize) -> Failure {
        let mut lines = text.split(|byte| *byte == b'\n').map(|line| quote_up_to(line, limit));
        let code = lines.next().unwrap_or_default();
        let kind = FailureKind::ALL
            .into_iter()
            .find(|kind| kind.exit_code().to_string() == code)
            .unwrap_or_default();
        let hint = lines.next().filter(|hint| !hint.is_empty());
        let causes: Vec<String> = lines.collect();
        Failure { message: quote_up_to(causes.join(": ").as_bytes(), limit), hint, kind, causes }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// How much of a user's text a message quotes.
const QUOTE_LIMIT: usize = 200;

/// A user's bytes, fit for a message: control characters cannot reach a terminal or root's log, other bytes
/// that are not UTF-8 are shown as `\xNN`, and a long text is cut.
pub fn quote(bytes: &[u8]) -> String {
    quote_up_to(bytes, QUOTE_LIMIT)
}

/// Characters that begin a line, or turn the direction of a text: a terminal shows what follows as something else.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// The same for a text that may be as long as `limit`.
pub fn quote_up_to(bytes: &[u8], limit: usize) -> String {
    let mut text = String::new();
    let cut = bytes.len().min(limit);
    for chunk in bytes[..cut].utf8_chunks() {
        for c in chunk.valid().chars() {
            if c.is_control() || is_invisible(c) { text.extend(c.escape_default()) } else { text.push(c) }
        }
        for byte in chunk.invalid() {
            // Writing to a String cannot fail.
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    if cut < bytes.len() {
        text.push('…');
    }
    text
}

/// A reference for messages, without the user and the password that `[scheme://]user:password@host/…` may hold. Passwords may
/// have any character in them, so all before the last `@` that begins no digest goes.
pub fn quote_reference(value: &[u8]) -> String {
    let find = |text: &[u8], wanted: &[u8]| text.windows(wanted.len()).position(|part| part == wanted);
    let is_digest = |at: &usize| {
        let digits = &value[*at + b"@sha256:".len()..];
        digits.len() == 64 && digits.iter().all(u8::is_ascii_hexdigit)
    };
    let end = find(value, b"@sha256:").filter(is_digest).unwrap_or(value.len());
    let begin = find(&value[..end], b"://").map_or(0, |at| at + 3);
    match value[begin..end].iter().rposition(|byte| *byte == b'@') {
        Some(at) if !value.starts_with(b"/") => {
            format!("{}…{}", quote(&value[..begin]), quote(&value[begin + at..]))
        }
        _ => quote(value),
    }
}

/// The errors of files and file systems for which musl has words of its own. People know, and look for, those of the other
/// programs on the node, which are these.
const WORDS: [(i32, &str); 15] = [
    (libc::EIO, "Input/output error"),
    (libc::ENOMEM, "Cannot allocate memory"),
    (libc::EBUSY, "Device or resource busy"),
    (libc::EXDEV, "Invalid cross-device link"),
    (libc::EMFILE, "Too many open files"),
    (libc::ENAMETOOLONG, "File name too long"),
    (libc::ELOOP, "Too many levels of symbolic links"),
    (libc::EOPNOTSUPP, "Operation not supported"),
    (libc::ENOTCONN, "Transport endpoint is not connected"),
    (libc::ESHUTDOWN, "Cannot send after transport endpoint shutdown"),
    (libc::ETOOMANYREFS, "Too many references: cannot splice"),
    (libc::ETIMEDOUT, "Connection timed out"),
    (libc::EUCLEAN, "Structure needs cleaning"),
    (libc::EREMOTEIO, "Remote I/O error"),
    (libc::EDQUOT, "Disk quota exceeded"),
];

/// The system's words for an error, without Rust's "(os error N)".
pub fn cause(error: &std::io::Error) -> String {
    if let Some((_, words)) = WORDS.iter().find(|(number, _)| error.raw_os_error() == Some(*number)) {
        return (*words).to_owned();
    }
    let text = error.to_string();
    match text.find(" (os error") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_env = "gnu")] // with the words that are to be had
    #[test]
    fn causes_have_the_words_of_other_programs() {
        for number in 1..=133 {
            let error = std::io::Error::from_raw_os_error(number);
            assert_eq!(format!("{} (os error {number})", cause(&error)), error.to_string());
        }
    }

    #[test]
    fn a_failure_survives_its_text() {
        let plain = Failure::new("no such image");
        let whole = plain
            .clone()
            .about("--container")
            .about("node1")
            .hint("try another")
            .of_kind(FailureKind::NotFound);
        assert_eq!(whole.message, "node1: --container: no such image");
        assert_eq!(whole.causes, ["node1", "--container", "no such image"]);
        for failure in [plain, whole.clone()] {
            assert_eq!(Failure::decode(failure.encode().as_bytes(), 4096), failure);
        }
        let text = whole.encode();
        for length in 0..text.len() {
            Failure::decode(&text.as_bytes()[..length], 4096);
        }
        let forged = Failure::decode(b"9\nhint\x1b\nno\nimage\xff", 4);
        assert_eq!((forged.message.as_str(), forged.kind), ("no: …", FailureKind::CannotStart));
        assert_eq!(forged.hint.as_deref(), Some("hint…"));
    }

    #[test]
    fn quoted_text_is_harmless_and_short() {
        assert_eq!(quote(b"/shared/tf.sqsh"), "/shared/tf.sqsh");
        assert_eq!(quote("a\u{202e}b\u{2028}c\u{e9}".as_bytes()), "a\\u{202e}b\\u{2028}c\u{e9}");
        assert_eq!(quote(b"a\x1b[31m\nb"), "a\\u{1b}[31m\\nb");
        assert_eq!(quote(b"caf\xc3\xa9 \xff"), "café \\xff");
        assert_eq!(quote("\u{9b}x".as_bytes()), "\\u{9b}x", "C1 controls steer terminals too");
        let long = quote(&[b'a'; 100_000]);
        assert_eq!(long.chars().count(), QUOTE_LIMIT + 1);
        assert!(long.ends_with('…'));
    }

    #[test]
    fn no_message_has_a_password() {
        let long = format!("docker://AWS:{}@host/i", "x".repeat(300));
        for (value, shown) in [
            ("docker://u:secret@host/i:tag", "docker://…@host/i:tag"),
            ("docker://u:se/cr@et@host/i", "docker://…@host/i"),
            ("u:secret@host/i", "…@host/i"),
            (long.as_str(), "docker://…@host/i"),
            ("docker://u:secret@sha256:5@host/i", "docker://…@host/i"),
            ("/images/a@b.sqsh", "/images/a@b.sqsh"),
        ] {
            assert_eq!(quote_reference(value.as_bytes()), shown);
        }
        let pin = format!("@sha256:{}", "0".repeat(64));
        assert_eq!(
            quote_reference(format!("docker://host/i{pin}").as_bytes()),
            format!("docker://host/i{pin}")
        );
        let both = quote_reference(format!("docker://u:secret@host/i{pin}").as_bytes());
        assert_eq!(both, format!("docker://…@host/i{pin}"));
    }
}
