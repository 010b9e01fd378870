//! A source file of ours, as tokens, and the ways to find one's way in it.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::tokens::{Token, tokens};

/// The tokens of a file, but for its tests.
pub struct Source {
    pub(super) file: PathBuf,
    pub(super) tokens: Vec<Token>,
}

impl Source {
    /// Reads a file.
    pub fn read(file: &Path) -> Result<Source> {
        let source = fs::read_to_string(file).with_context(|| file.display().to_string())?;
        // Tests are the end of a file.
        let product = source.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
        Ok(Source { file: file.to_owned(), tokens: tokens(product) })
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
    pub(super) fn find(&self, from: usize, mark: char) -> Option<usize> {
        self.tokens[from..].iter().position(|token| *token == Token::Mark(mark)).map(|length| from + length)
    }

    pub(super) fn texts(&self, place: Range<usize>) -> Vec<String> {
        let texts = self.tokens[place].iter().filter_map(|token| match token {
            Token::Text(text) => Some(text.clone()),
            _ => None,
        });
        texts.collect()
    }

    /// The bracket that closes the one at `open`.
    pub(super) fn closing(&self, open: usize) -> usize {
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
    pub(super) fn function(&self, at: usize) -> usize {
        self.tokens[..at].iter().rposition(|token| token.is("fn")).unwrap_or(0)
    }

    /// The parts with this index of the tuples at a place, which are the values of a `match` or an `if`.
    pub(super) fn parts(&self, place: Range<usize>, index: usize, count: usize) -> Vec<Range<usize>> {
        let opens = place.filter(|at| {
            let is_value = matches!(self.tokens[at - 1], Token::Mark('{' | '>'));
            let end = self.closing(*at) + 1;
            let is_pattern = self.tokens.get(end) == Some(&Token::Mark('='));
            self.tokens[*at] == Token::Mark('(') && is_value && !is_pattern
        });
        let tuples = opens.map(|open| self.arguments(open)).filter(|parts| parts.len() == count);
        tuples.map(|parts| parts[index].clone()).collect()
    }

    /// Whether a `let` here declares the variable of this name; if it is one of several, which, and of how many.
    pub(super) fn declares(&self, at: usize, name: &str) -> Option<Option<(usize, usize)>> {
        if !self.tokens[at].is("let") {
            return None;
        }
        match self.tokens.get(at + 1)? {
            Token::Mark('(') => {
                let names = self.arguments(at + 1);
                let is_it =
                    |place: &Range<usize>| self.tokens[place.clone()].iter().any(|token| token.is(name));
                Some(Some((names.iter().position(is_it)?, names.len())))
            }
            token => token.is(name).then_some(None),
        }
    }

    /// The arguments between brackets.
    pub(super) fn arguments(&self, open: usize) -> Vec<Range<usize>> {
        let close = self.closing(open).min(self.tokens.len());
        let (mut found, mut begin, mut at) = (Vec::new(), open + 1, open + 1);
        while at < close {
            at = match self.tokens[at] {
                Token::Mark('(' | '[' | '{') => self.closing(at) + 1,
                Token::Mark(',') => {
                    found.push(begin..at);
                    begin = at + 1;
                    begin
                }
                _ => at + 1,
            };
        }
        if begin < close {
            found.push(begin..close);
        }
        found
    }

    /// The body of a function of this file.
    pub(super) fn body(&self, name: &str) -> Option<Range<usize>> {
        let declared = self.tokens.windows(2).position(|pair| pair[0].is("fn") && pair[1].is(name))?;
        let open = self.find(declared, '{')?;
        Some(open..self.closing(open))
    }

    pub(super) fn end_of_parameters(&self, name_at: usize) -> Option<usize> {
        match self.tokens.get(name_at + 1)? {
            Token::Mark('(') => Some(self.closing(name_at + 1)),
            Token::Mark('=') => self.find(name_at + 3, '|'),
            _ => None,
        }
    }

    pub(super) fn parameters(&self, begin: usize, end: usize) -> Vec<String> {
        let names = self.tokens[begin..end].windows(2).filter_map(|pair| match pair {
            [Token::Word(name), Token::Mark(':')] => Some(name.clone()),
            _ => None,
        });
        names.collect()
    }
}
