//! As much of Rust's grammar as it takes to find the messages in our sources: words, strings and punctuation.

/// A piece of a source file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Token {
    /// A name, a keyword or a number.
    Word(String),
    /// The value of a string literal.
    Text(String),
    /// Any other character.
    Mark(char),
}

impl Token {
    /// Whether it is this word.
    pub fn is(&self, word: &str) -> bool {
        matches!(self, Token::Word(found) if found == word)
    }
}

/// The tokens of a file, without its comments.
pub fn tokens(source: &str) -> Vec<Token> {
    let letters: Vec<char> = source.chars().collect();
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(letter) = letters.get(at) {
        let next = letters.get(at + 1).copied().unwrap_or(' ');
        match letter {
            '/' if next == '/' => at = end_of_line(&letters, at),
            '"' => {
                let (text, end) = string(&letters, at + 1);
                tokens.push(Token::Text(text));
                at = end;
            }
            'r' if next == '#' || next == '"' => match raw_string(&letters, at + 1) {
                Some((text, end)) => {
                    tokens.push(Token::Text(text));
                    at = end;
                }
                None => at += 1,
            },
            // A character, rather than a lifetime.
            '\'' if next == '\\' => {
                at = letters[at + 3..].iter().position(|l| *l == '\'').map_or(at, |n| at + n + 3) + 1
            }
            '\'' if letters.get(at + 2) == Some(&'\'') => at += 3,
            letter if letter.is_alphanumeric() || *letter == '_' => {
                let rest = letters[at..].iter().take_while(|l| l.is_alphanumeric() || **l == '_');
                let word: String = rest.collect();
                at += word.chars().count();
                tokens.push(Token::Word(word));
            }
            letter => {
                if !letter.is_whitespace() {
                    tokens.push(Token::Mark(*letter));
                }
                at += 1;
            }
        }
    }
    tokens
}

fn end_of_line(letters: &[char], at: usize) -> usize {
    letters[at..].iter().position(|letter| *letter == '\n').map_or(letters.len(), |length| at + length)
}

fn string(letters: &[char], mut at: usize) -> (String, usize) {
    let mut text = String::new();
    while let Some(letter) = letters.get(at) {
        match (letter, letters.get(at + 1)) {
            ('"', _) => return (text, at + 1),
            // The line goes on at the first letter of the next.
            ('\\', Some('\n')) => {
                at += 2;
                at += letters[at..].iter().take_while(|letter| letter.is_whitespace()).count();
            }
            ('\\', Some(escaped)) => {
                text.push(if *escaped == 'n' { '\n' } else { *escaped });
                at += 2;
            }
            _ => {
                text.push(*letter);
                at += 1;
            }
        }
    }
    (text, at)
}

fn raw_string(letters: &[char], at: usize) -> Option<(String, usize)> {
    let hashes = letters[at..].iter().take_while(|letter| **letter == '#').count();
    let begin = at + hashes + 1;
    (letters.get(begin - 1) == Some(&'"')).then_some(())?;
    let end: Vec<char> = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
    let length = letters[begin..].windows(end.len()).position(|window| window == end)?;
    Some((letters[begin..begin + length].iter().collect(), begin + length + end.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_told_from_what_looks_like_them() {
        let source = "fn f<'a>() { // \"no\"\n g('\"', '\\'', \"a \\\"b\\\" \\\n   c\", r#\"d \"e\\\"#) }";
        let texts: Vec<Token> =
            tokens(source).into_iter().filter(|token| matches!(token, Token::Text(_))).collect();
        assert_eq!(texts, [Token::Text("a \"b\" c".to_owned()), Token::Text("d \"e\\".to_owned())]);
    }
}
