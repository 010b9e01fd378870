//! Variables out of a shell script that only sets some. Runs as the user on the host.
//!
//! The scripts in /.singularity.d/env are for a shell, but nearly all consist of assignments and `export`.
//! Those are read here as data. Everything else (conditions, loops, commands, substitutions) is passed over
//! and its place remembered, so that the user can be told; no shell runs before the container does.

use mizzen_core::Failure;
use mizzen_core::failure::quote;

use super::variables::Variables;
use word::Words;

mod word;

/// Assignments in one statement.
const STATEMENT_LIMIT: usize = 64;
/// Bytes that may be read in vain, as by quotes that never end: a hostile file would otherwise be read to its
/// end again for each of its lines.
const WASTE_LIMIT: usize = 16 << 20;

/// One step of a statement.
enum Statement {
    Set(Vec<u8>, Vec<u8>),
    Export(Vec<u8>),
}

/// Reads a script into the variables; `path` is its name in messages.
pub fn parse_into(path: &str, text: &[u8], variables: &mut Variables) -> Result<(), Failure> {
    let path = quote(path.as_bytes());
    let mut script = Script { text, at: 0, line: 1, wasted: 0 };
    while script.skip_to_statement() {
        let (start, line) = (script.at, script.line);
        match script.statement(variables) {
            Some((steps, exported)) => {
                for step in steps {
                    match step {
                        Statement::Set(name, value) => variables.set(name, value, exported)?,
                        Statement::Export(name) => variables.export(name)?,
                    }
                }
            }
            None => {
                script.wasted += script.at - start;
                (script.at, script.line) = (start, line);
                variables.skip(format!("{path}:{line}"));
                let last = script.skip_unknown();
                if last || script.wasted > WASTE_LIMIT {
                    break;
                }
            }
        }
    }
    Ok(())
}

struct Script<'a> {
    text: &'a [u8],
    at: usize,
    line: usize,
    wasted: usize,
}

impl Script<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    /// Goes on to `to`, counting lines.
    fn advance(&mut self, to: usize) {
        let to = to.min(self.text.len());
        self.line += self.text[self.at..to].iter().filter(|byte| **byte == b'\n').count();
        self.at = to;
    }

    /// Passes blanks, empty lines and comments; false at the end.
    fn skip_to_statement(&mut self) -> bool {
        loop {
            match self.peek() {
                None => return false,
                Some(b' ' | b'\t' | b'\r' | b'\n' | b';') => self.advance(self.at + 1),
                Some(b'#') => self.advance(self.line_end(self.at)),
                Some(_) => return true,
            }
        }
    }

    fn line_end(&self, from: usize) -> usize {
        let rest = self.text.get(from..).unwrap_or_default();
        rest.iter().position(|byte| *byte == b'\n').map_or(self.text.len(), |length| from + length)
    }

    fn skip_blanks(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t')) {
            self.at += 1;
        }
    }

    /// Whether a statement ends here. `A=1 #note` ends, `A=1#note` was one word.
    fn at_end(&self) -> bool {
        matches!(self.peek(), None | Some(b'\n' | b'\r' | b';' | b'#'))
    }

    /// `[export] NAME=word …` or `export NAME …`, and whether it exports. None if it is anything else, like
    /// a command with variables before it.
    fn statement(&mut self, variables: &Variables) -> Option<(Vec<Statement>, bool)> {
        let export = self.text[self.at..].starts_with(b"export")
            && matches!(self.text.get(self.at + 6), Some(b' ' | b'\t'));
        if export {
            self.advance(self.at + 6);
        }
        let mut steps: Vec<Statement> = Vec::new();
        loop {
            self.skip_blanks();
            if self.at_end() {
                return (!steps.is_empty()).then_some((steps, export));
            }
            if steps.len() == STATEMENT_LIMIT {
                return None;
            }
            let name = self.name()?;
            if self.peek() == Some(b'=') {
                // In `A=1 B=$A` the first assignment counts already; the words of `export A=1 B=$A` are all
                // expanded before it sets anything.
                let earlier = if export { &[] } else { &steps[..] };
                let look = |wanted: &[u8]| earlier.iter().rev().find_map(|step| value_of(step, wanted));
                let mut words = Words::new(self.text, self.at + 1, variables, &look);
                let value = words.word();
                let end = words.at();
                self.advance(end);
                let value = value.filter(|value| Variables::fits(&name, value))?;
                steps.push(Statement::Set(name, value));
            } else if export {
                steps.push(Statement::Export(name));
            } else {
                return None;
            }
            if !self.at_end() && !matches!(self.peek(), Some(b' ' | b'\t')) {
                return None;
            }
        }
    }

    fn name(&mut self) -> Option<Vec<u8>> {
        let name = word::name_at(self.text, self.at)?;
        self.at += name.len();
        Some(name.to_vec())
    }

    /// Passes a statement that we do not understand: to the end of its line, or of the block or here-document
    /// that starts there. What is in a block depends on conditions, so no assignment in it may count. True if
    /// the script ends here.
    fn skip_unknown(&mut self) -> bool {
        let mut depth = 0_i64;
        loop {
            let start = self.at;
            let mut end = self.line_end(start);
            while self.text[..end].ends_with(b"\\") && end < self.text.len() {
                end = self.line_end(end + 1);
            }
            let line = &self.text[start..end];
            depth += depth_change(line);
            let first = words_of(line).next().unwrap_or_default();
            let ends = depth <= 0 && matches!(first, b"exit" | b"return");
            self.advance(end + 1);
            if let Some(mark) = here_document(line) {
                self.skip_here_document(mark);
            }
            if ends || self.at >= self.text.len() {
                return true;
            }
            if depth <= 0 {
                return false;
            }
        }
    }

    fn skip_here_document(&mut self, mark: &[u8]) {
        while self.at < self.text.len() {
            let end = self.line_end(self.at);
            let found = self.text[self.at..end].trim_ascii() == mark;
            self.advance(end + 1);
            if found {
                return;
            }
        }
    }
}

fn value_of(step: &Statement, wanted: &[u8]) -> Option<Vec<u8>> {
    match step {
        Statement::Set(name, value) if name == wanted => Some(value.clone()),
        _ => None,
    }
}

/// The words of a line as far as blocks need them; quotes are not minded.
fn words_of(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(|byte| byte.is_ascii_whitespace() || matches!(byte, b';' | b'&' | b'|'))
        .filter(|word| !word.is_empty())
        .take_while(|word| !word.starts_with(b"#"))
}

/// How much deeper in blocks we are after this line. A wrong guess can only pass over more than needed, or
/// believe an assignment of the image in the image.
fn depth_change(line: &[u8]) -> i64 {
    let change = |word: &[u8]| match word {
        b"if" | b"case" | b"for" | b"while" | b"until" | b"select" | b"{" | b"(" => 1,
        b"fi" | b"esac" | b"done" | b"}" | b")" => -1,
        _ if word.ends_with(b"){") => 1,
        _ => 0,
    };
    words_of(line).map(change).sum()
}

/// The word that ends a here-document that starts in this line.
fn here_document(line: &[u8]) -> Option<&[u8]> {
    let at = line.windows(2).position(|pair| pair == b"<<")?;
    let rest = line[at + 2..].strip_prefix(b"-").unwrap_or(&line[at + 2..]).trim_ascii_start();
    let word = rest.split(|byte| byte.is_ascii_whitespace() || matches!(byte, b';' | b'|' | b'>')).next()?;
    let word = word.strip_prefix(b"'").and_then(|word| word.strip_suffix(b"'")).unwrap_or(word);
    let word = word.strip_prefix(b"\"").and_then(|word| word.strip_suffix(b"\"")).unwrap_or(word);
    (!word.is_empty() && !word.starts_with(b"<")).then_some(word)
}

#[cfg(test)]
mod tests;
