//! A source file of ours, and the messages in it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::tokens::{Token, tokens};

/// A message and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Message {
    /// The message, with `…` for what differs.
    pub text: String,
    /// Its hints; more than one where it depends.
    pub hints: Vec<String>,
}

/// The tokens of a file, but for its tests.
pub struct Source {
    tokens: Vec<Token>,
}

impl Source {
    /// Reads a file.
    pub fn read(file: &Path) -> Result<Source> {
        let source = fs::read_to_string(file).with_context(|| file.display().to_string())?;
        // Tests are the end of a file.
        let product = source.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
        Ok(Source { tokens: tokens(product) })
    }

    /// `const NAME: &str = "text"`.
    pub fn constants(&self) -> Vec<(String, String)> {
        let mut found = Vec::new();
        for (at, _) in self.tokens.iter().enumerate().filter(|(_, token)| token.is("const")) {
            if let (Some(Token::Word(name)), Some(end)) = (self.tokens.get(at + 1), self.find(at, ';'))
                && let [Token::Mark('='), Token::Text(text)] = &self.tokens[end - 2..end]
            {
                // No format: a brace in it is a brace.
                found.push((name.clone(), text.replace('{', "{{").replace('}', "}}")));
            }
        }
        found
    }

    /// Where the next such character is.
    fn find(&self, from: usize, mark: char) -> Option<usize> {
        self.tokens[from..].iter().position(|token| *token == Token::Mark(mark)).map(|length| from + length)
    }

    fn texts(&self, begin: usize, end: usize) -> Vec<String> {
        let texts = self.tokens[begin..end].iter().filter_map(|token| match token {
            Token::Text(text) => Some(text.clone()),
            _ => None,
        });
        texts.collect()
    }

    /// The bracket that closes the one at `open`.
    fn closing(&self, open: usize) -> usize {
        let mut depth = 0;
        for (at, token) in self.tokens.iter().enumerate().skip(open) {
            match token {
                Token::Mark('(' | '[' | '{') => depth += 1,
                Token::Mark(')' | ']' | '}') => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return at;
            }
        }
        self.tokens.len()
    }

    /// Where the function begins that this is in.
    fn function(&self, at: usize) -> usize {
        self.tokens[..at].iter().rposition(|token| token.is("fn")).unwrap_or(0)
    }

    /// The texts that a variable may have been given above.
    fn variable(&self, name: &str, at: usize) -> Vec<String> {
        let begin = self.function(at);
        let found = self.tokens[begin..at].windows(2).rposition(|pair| pair[0].is("let") && pair[1].is(name));
        let Some(found) = found.map(|place| begin + place) else { return Vec::new() };
        let mut end = found;
        while end < at && self.tokens[end] != Token::Mark(';') {
            end = if matches!(self.tokens[end], Token::Mark('(' | '[' | '{')) {
                self.closing(end)
            } else {
                end
            } + 1;
        }
        let texts = self.texts(found, end.min(at)).into_iter();
        texts.filter(|text| text.contains(' ')).collect()
    }

    /// The texts of the `format!`s between brackets, and those that may stand in the place of one: the arms of a `match` or an `if`.
    /// Texts that a `format!` puts in are no messages.
    fn formats(&self, open: usize, close: usize) -> Vec<String> {
        let (mut formats, mut others) = (Vec::new(), Vec::new());
        let mut at = open + 1;
        while at < close {
            match &self.tokens[at] {
                token if token.is("format") && self.tokens.get(at + 2) == Some(&Token::Mark('(')) => {
                    let end = self.closing(at + 2);
                    formats.extend(self.texts(at + 2, end.min(close)).into_iter().next());
                    at = end;
                }
                // A separator or the like is no message.
                Token::Text(text) if text.split(' ').count() > 3 => others.push(text.clone()),
                _ => {}
            }
            at += 1;
        }
        if !formats.is_empty() {
            formats.append(&mut others);
        }
        formats
    }

    /// The texts of an argument between brackets: itself, or the constants and variables that it names.
    fn argument(&self, open: usize, constants: &BTreeMap<String, String>) -> Vec<String> {
        let close = self.closing(open);
        let texts = self.texts(open, close);
        let formats = self.formats(open, close);
        if !formats.is_empty() {
            return formats;
        }
        let words = self.tokens[open + 1..close].iter().filter_map(|token| match token {
            Token::Word(word) => Some(word),
            _ => None,
        });
        let named = words.flat_map(|word| match constants.get(word) {
            Some(text) => vec![text.clone()],
            None => self.variable(word, open),
        });
        texts.into_iter().filter(|text| text.contains(' ')).chain(named).collect()
    }

    /// All messages, with their hints.
    pub fn messages(&self, constants: &BTreeMap<String, String>) -> Vec<Message> {
        let mut found = Vec::new();
        for at in 0..self.tokens.len() {
            let Some(open) = self.message_at(at) else { continue };
            let hints = self.hints(at, open, constants);
            let mut texts = self.argument(open, constants);
            if texts.is_empty()
                && let [Token::Word(name), Token::Mark(',' | ')'), ..] = &self.tokens[open + 1..]
            {
                // Perhaps a parameter, which callers give a text.
                texts.push(format!("{{{name}}}"));
            }
            for text in texts.into_iter().flat_map(|text| self.filled(&text, at)) {
                let text = shown(&text, constants);
                // Less is a word to the next function, which makes a message of it.
                let words = text.split(' ').filter(|word| word.chars().any(char::is_alphabetic)).count();
                if words > 2 || words == 2 && !hints.is_empty() {
                    found.push(Message {
                        text,
                        hints: hints.iter().map(|hint| shown(hint, constants)).collect(),
                    });
                }
            }
        }
        found
    }

    /// If a message is made here: where its argument opens.
    fn message_at(&self, at: usize) -> Option<usize> {
        let open = |place: usize| (self.tokens.get(place) == Some(&Token::Mark('('))).then_some(place);
        let failure = self.tokens[at].is("Failure")
            && self.tokens.get(at + 3).is_some_and(|word| word.is("new") || word.is("caused_by"));
        let declared = at > 0 && self.tokens[at - 1].is("fn");
        let note = ["note", "report_note"].iter().any(|name| self.tokens[at].is(name)) && !declared;
        if failure {
            open(at + 4)
        } else if note {
            open(at + 1)
        } else {
            None
        }
    }

    /// The hints behind a message: in the same expression, or for the variable that it was put in.
    fn hints(&self, at: usize, open: usize, constants: &BTreeMap<String, String>) -> Vec<String> {
        let is_hint =
            |place: usize| self.tokens.get(place).is_some_and(|word| word.is("hint") || word.is("or_hint"));
        let mut end = self.closing(open) + 1;
        let mut hints = Vec::new();
        // Brackets of Err(…) and the like may close before the chain goes on.
        while let Some(Token::Mark('.' | ')')) = self.tokens.get(end) {
            if self.tokens[end] == Token::Mark(')') {
                end += 1;
                continue;
            }
            if is_hint(end + 1) {
                hints = self.argument(end + 2, constants);
            }
            end = match self.find(end, '(') {
                Some(open) => self.closing(open) + 1,
                None => return hints,
            };
        }
        if hints.is_empty()
            && let [.., before, Token::Word(name), Token::Mark('=')] = &self.tokens[..at]
            && before.is("let")
        {
            let rest = self.tokens[end..]
                .iter()
                .position(|token| token.is("fn"))
                .map_or(self.tokens.len(), |n| end + n);
            for place in end..rest {
                if self.tokens[place].is(name) && is_hint(place + 2) {
                    hints.extend(self.argument(place + 3, constants));
                }
            }
        }
        let mut seen = BTreeSet::new();
        hints.retain(|hint| seen.insert(hint.clone()));
        hints
    }

    /// The hints that are written as a text.
    pub fn all_hints(&self, constants: &BTreeMap<String, String>) -> Vec<String> {
        let is_hint = |at: usize| self.tokens[at].is("hint") || self.tokens[at].is("or_hint");
        let behind_dot =
            (1..self.tokens.len()).filter(|at| is_hint(*at) && self.tokens[at - 1] == Token::Mark('.'));
        let texts = behind_dot.filter_map(|at| match &self.tokens[at + 2..] {
            [Token::Text(text), ..] => Some(shown(text, constants)),
            [format, _, _, Token::Text(text), ..] if format.is("format") => Some(shown(text, constants)),
            _ => None,
        });
        texts.collect()
    }

    /// A text of which the callers of the function or closure that has it give a part: as they give it.
    fn filled(&self, text: &str, at: usize) -> Vec<String> {
        let begin = self.function(at);
        let closure = self.tokens[begin..at].windows(4).rposition(|four| {
            four[0].is("let") && four[2] == Token::Mark('=') && four[3] == Token::Mark('|')
        });
        let name_at = closure.map_or(begin, |place| begin + place) + 1;
        let (Some(Token::Word(name)), Some(end)) =
            (self.tokens.get(name_at), self.end_of_parameters(name_at))
        else {
            return vec![text.to_owned()];
        };
        if end > at {
            return vec![text.to_owned()];
        }
        let parameters: Vec<String> = self.parameters(name_at, end);
        let Some(parameter) = parameters.iter().find(|name| text.contains(&format!("{{{name}}}"))) else {
            return vec![text.to_owned()];
        };
        let calls = (end..self.tokens.len()).chain(0..begin).filter(|place| {
            self.tokens[*place].is(name)
                && self.tokens.get(place + 1) == Some(&Token::Mark('('))
                && (*place == 0 || !self.tokens[place - 1].is("fn"))
        });
        let given: Vec<String> = calls
            .flat_map(|place| self.texts(place + 1, self.closing(place + 1)).into_iter().take(1))
            .map(|given| text.replace(&format!("{{{parameter}}}"), &given))
            .collect();
        if given.is_empty() { vec![text.to_owned()] } else { given }
    }

    fn end_of_parameters(&self, name_at: usize) -> Option<usize> {
        match self.tokens.get(name_at + 1)? {
            Token::Mark('(') => Some(self.closing(name_at + 1)),
            Token::Mark('=') => self.find(name_at + 3, '|'),
            _ => None,
        }
    }

    fn parameters(&self, begin: usize, end: usize) -> Vec<String> {
        let names = self.tokens[begin..end].windows(2).filter_map(|pair| match pair {
            [Token::Word(name), Token::Mark(':')] => Some(name.clone()),
            _ => None,
        });
        names.collect()
    }
}

/// A text as people meet it: constants have their values, and what differs is `…`.
fn shown(text: &str, constants: &BTreeMap<String, String>) -> String {
    let mut shown = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('{') {
        shown.push_str(before);
        if let Some(after) = after.strip_prefix('{') {
            shown.push('{');
            rest = after;
            continue;
        }
        let (name, after) = after.split_once('}').unwrap_or((after, ""));
        let constant = constants.get(name).map(|text| text.replace("{{", "{").replace("}}", "}"));
        shown.push_str(constant.as_deref().unwrap_or("…"));
        rest = after;
    }
    shown.push_str(rest);
    shown.replace("}}", "}").replace('\n', " ")
}
