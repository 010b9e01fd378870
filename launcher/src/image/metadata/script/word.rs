//! The value of one assignment in a shell script, read as data. Runs as the user on the host.

use super::Variables;

/// References within references: `${A:-${B:-${C}}}`.
const DEPTH_LIMIT: usize = 8;
/// A longer value fits into no environment; the doubling of `A=$A$A` ends here.
const WORD_LIMIT: usize = 128 * 1024;

/// Values set earlier in the same statement.
pub type Earlier<'a> = &'a dyn Fn(&[u8]) -> Option<Vec<u8>>;

/// Reads words from a place in a text. Every method gives none for what only a shell understands.
pub struct Words<'a> {
    text: &'a [u8],
    at: usize,
    variables: &'a Variables<'a>,
    earlier: Earlier<'a>,
}

/// The variable name that starts at a place.
pub fn name_at(text: &[u8], at: usize) -> Option<&[u8]> {
    let rest = text.get(at..)?;
    let part = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    let length = rest.iter().position(|byte| !part(byte)).unwrap_or(rest.len());
    let name = &rest[..length];
    name.first().is_some_and(|byte| !byte.is_ascii_digit()).then_some(name)
}

/// Where a piece of text stands: it decides what quotes and blanks mean.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Within {
    /// Between double quotes.
    Quotes,
    /// In the word of `${NAME:-word}` without quotes around.
    Braces,
    /// In the word of `"${NAME:-word}"`.
    QuotedBraces,
}

impl<'a> Words<'a> {
    pub fn new(text: &'a [u8], at: usize, variables: &'a Variables<'a>, earlier: Earlier<'a>) -> Words<'a> {
        Words { text, at, variables, earlier }
    }

    /// The first byte that was not read.
    pub fn at(&self) -> usize {
        self.at
    }

    fn next(&mut self) -> Option<u8> {
        let byte = self.text.get(self.at).copied()?;
        self.at += 1;
        Some(byte)
    }

    /// The word up to a blank or the end of the statement.
    pub fn word(&mut self) -> Option<Vec<u8>> {
        let mut value = Vec::new();
        loop {
            match self.text.get(self.at) {
                None | Some(b' ' | b'\t' | b'\n' | b'\r' | b';') => return Some(value),
                // A home directory, a substitution, a redirection, a job, an array.
                Some(b'~') if value.is_empty() || value.ends_with(b":") => return None,
                Some(b'`' | b'|' | b'&' | b'<' | b'>' | b'(' | b')') => return None,
                Some(_) => {}
            }
            match self.next()? {
                b'\'' => self.single_quotes(&mut value)?,
                b'"' => self.piece(Within::Quotes, 0, &mut value)?,
                b'$' => self.dollar(false, 0, &mut value)?,
                b'\\' => match self.next()? {
                    b'\n' => {}
                    byte => value.push(byte),
                },
                byte => value.push(byte),
            }
            if value.len() > WORD_LIMIT {
                return None;
            }
        }
    }

    fn single_quotes(&mut self, value: &mut Vec<u8>) -> Option<()> {
        let rest = self.text.get(self.at..)?;
        let length = rest.iter().position(|byte| *byte == b'\'');
        // Read in vain to the end: the caller counts that.
        self.at += length.map_or(rest.len(), |length| length + 1);
        value.extend(&rest[..length?]);
        Some(())
    }

    /// Text between double quotes or braces, its closing mark included.
    fn piece(&mut self, within: Within, depth: usize, value: &mut Vec<u8>) -> Option<()> {
        if depth > DEPTH_LIMIT {
            return None;
        }
        loop {
            match (self.next()?, within) {
                (b'"', Within::Quotes) => return Some(()),
                (b'}', Within::Braces | Within::QuotedBraces) => return Some(()),
                // Singularity writes "${NAME:-"value"}": the inner quotes quote again, in every shell.
                (b'"', Within::Braces | Within::QuotedBraces) => {
                    self.piece(Within::Quotes, depth + 1, value)?;
                }
                (b'\'', Within::Braces) => self.single_quotes(value)?,
                (b'$', _) => self.dollar(within != Within::Braces, depth, value)?,
                (b'`', _) | (b'~', Within::Braces) => return None,
                (b'\\', _) => match self.next()? {
                    b'\n' => {}
                    byte if within == Within::Braces || b"$`\"\\".contains(&byte) => value.push(byte),
                    b'}' if within == Within::QuotedBraces => value.push(b'}'),
                    // In "${A:-"\x"}" shells differ.
                    _ if depth > 0 => return None,
                    byte => value.extend([b'\\', byte]),
                },
                (byte, _) => value.push(byte),
            }
            if value.len() > WORD_LIMIT {
                return None;
            }
        }
    }

    /// What follows a `$`.
    fn dollar(&mut self, quoted: bool, depth: usize, value: &mut Vec<u8>) -> Option<()> {
        if let Some(name) = name_at(self.text, self.at) {
            self.at += name.len();
            value.extend(self.value_of(name).unwrap_or_default());
            // A name can go on in the next line.
            return (!self.text[self.at..].starts_with(b"\\\n")).then_some(());
        }
        match self.text.get(self.at) {
            Some(b'{') => {
                self.at += 1;
                self.braces(quoted, depth, value)
            }
            // `$(…)`, `$[…]`, arguments, the shell's own variables, a name in the next line.
            Some(b'\\') if self.text[self.at..].starts_with(b"\\\n") => None,
            Some(b'(' | b'[' | b'@' | b'*' | b'#' | b'?' | b'-' | b'$' | b'!' | b'0'..=b'9') => None,
            // `$'…'` and `$"…"`.
            Some(b'\'' | b'"') if !quoted => None,
            _ => {
                value.push(b'$');
                Some(())
            }
        }
    }

    /// `{NAME}`, `{NAME:-word}`, `{NAME-word}`, `{NAME:+word}`, `{NAME+word}`, without the first brace.
    fn braces(&mut self, quoted: bool, depth: usize, value: &mut Vec<u8>) -> Option<()> {
        let name = name_at(self.text, self.at)?;
        self.at += name.len();
        let mut mark = self.next()?;
        if mark == b'}' {
            value.extend(self.value_of(name).unwrap_or_default());
            return Some(());
        }
        let empty_counts = mark != b':';
        if mark == b':' {
            mark = self.next()?;
        }
        let within = if quoted { Within::QuotedBraces } else { Within::Braces };
        let mut word = Vec::new();
        self.piece(within, depth + 1, &mut word)?;
        // The image's default holds unless the image itself set the variable: the job's own variables are
        // weighed against the image's by the caller, for every maker in the same way.
        let known = self.own(name).filter(|known| empty_counts || !known.is_empty());
        match mark {
            b'-' => value.extend(known.unwrap_or(word)),
            b'+' if known.is_some() => value.extend(word),
            b'+' => {}
            _ => return None,
        }
        Some(())
    }

    fn own(&self, name: &[u8]) -> Option<Vec<u8>> {
        (self.earlier)(name).or_else(|| self.variables.own(name).map(<[u8]>::to_vec))
    }

    fn value_of(&self, name: &[u8]) -> Option<Vec<u8>> {
        (self.earlier)(name).or_else(|| self.variables.get(name))
    }
}
