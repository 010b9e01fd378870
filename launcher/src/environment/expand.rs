//! `${NAME}`, `${NAME:-DEFAULT}` and `$$` in environment files, replaced from the environment of whoever submits. No shell is asked,
//! and what a variable holds is not looked at again.

use std::ffi::OsString;

use mizzen_core::Failure;
use mizzen_core::failure::quote;

/// How deep defaults may lie in defaults.
const DEPTH: usize = 10;
/// How many bytes all values of an environment may have together. A request takes much less.
pub const TOTAL: usize = 1 << 20;

/// Replaces variables.
pub struct Expander<'a> {
    /// The value of a variable.
    variable: &'a dyn Fn(&str) -> Option<OsString>,
    /// How many bytes may still be made.
    left: usize,
}

impl<'a> Expander<'a> {
    /// Takes the values from here.
    pub fn new(variable: &'a dyn Fn(&str) -> Option<OsString>) -> Expander<'a> {
        Expander { variable, left: TOTAL }
    }

    /// The text with its variables replaced.
    pub fn expand(&mut self, text: &str) -> Result<String, Failure> {
        let expanded = self.expand_below(text, 0)?;
        self.left = self.left.checked_sub(expanded.len()).ok_or_else(too_long)?;
        Ok(expanded)
    }

    fn expand_below(&self, text: &str, depth: usize) -> Result<String, Failure> {
        let mut expanded = String::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once('$') {
            expanded.push_str(before);
            rest = if let Some(after) = after.strip_prefix('$') {
                expanded.push('$');
                after
            } else if let Some(inner) = after.strip_prefix('{') {
                let end = closing_brace(inner).ok_or_else(|| {
                    Failure::new(format!("\"{}\": a ${{ without its }}", quote(text.as_bytes()))).hint(FORMS)
                })?;
                expanded.push_str(&self.value(&inner[..end], depth)?);
                &inner[end + 1..]
            } else {
                let word: String = after.chars().take_while(|c| is_name_letter(*c)).collect();
                let message = format!("\"${}\" is not expanded", quote(word.as_bytes()));
                return Err(Failure::new(message).hint(FORMS));
            };
            if expanded.len() > self.left {
                return Err(too_long());
            }
        }
        expanded.push_str(rest);
        Ok(expanded)
    }

    /// What `NAME` or `NAME:-DEFAULT` stands for.
    fn value(&self, inner: &str, depth: usize) -> Result<String, Failure> {
        let (name, default) = match inner.split_once(":-") {
            Some((name, default)) => (name, Some(default)),
            None => (inner, None),
        };
        let shown = quote(name.as_bytes());
        if !name.starts_with(|c: char| is_name_letter(c) && !c.is_ascii_digit())
            || !name.chars().all(is_name_letter)
        {
            return Err(Failure::new(format!("\"${{{shown}}}\" names no variable")).hint(FORMS));
        }
        let found = (self.variable)(name);
        match (found.filter(|value| default.is_none() || !value.is_empty()), default) {
            (Some(value), _) => value.into_string().map_err(|_| {
                Failure::new(format!("the variable {shown} is not UTF-8"))
                    .hint("environment files are text in UTF-8")
            }),
            (None, Some(_)) if depth >= DEPTH => {
                Err(Failure::new(format!("more than {DEPTH} defaults in each other")).hint(FORMS))
            }
            (None, Some(default)) => self.expand_below(default, depth + 1),
            (None, None) => Err(Failure::new(format!("the variable {shown} is not set"))
                .hint(format!("export it before you submit, or write ${{{shown}:-DEFAULT}}"))),
        }
    }
}

const FORMS: &str = "write ${NAME} or ${NAME:-DEFAULT}, and $$ for a dollar";

fn too_long() -> Failure {
    Failure::new(format!("the values have more than {} KiB with their variables replaced", TOTAL >> 10))
        .hint("is there a variable that holds a whole file?")
}

fn is_name_letter(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '_'
}

/// Where the brace is that closes one before this text.
fn closing_brace(text: &str) -> Option<usize> {
    let mut open = 0_usize;
    let mut before = ' ';
    for (at, letter) in text.char_indices() {
        match letter {
            '{' if before == '$' => open += 1,
            '}' if open == 0 => return Some(at),
            '}' => open -= 1,
            _ => {}
        }
        before = letter;
    }
    None
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    fn expand(text: &str) -> Result<String, String> {
        let variable = |name: &str| match name {
            "HOME" => Some("/home/alice".into()),
            "EMPTY" => Some("".into()),
            "DOLLAR" => Some("${HOME}".into()),
            "BYTES" => Some(OsString::from_vec(vec![0xff])),
            "LONG" => Some("x".repeat(100_000).into()),
            _ => None,
        };
        Expander::new(&variable).expand(text).map_err(|failure| failure.message)
    }

    #[test]
    fn variables_are_replaced_and_nothing_else() {
        for (text, expected) in [
            ("", ""),
            ("plain { } text", "plain { } text"),
            ("${HOME}/x:${HOME}", "/home/alice/x:/home/alice"),
            ("a$$b", "a$b"),
            ("$${HOME}", "${HOME}"),
            ("${DOLLAR}", "${HOME}"),
            ("<${EMPTY}>", "<>"),
            ("${EMPTY:-default}", "default"),
            ("${NOT_SET:-}", ""),
            ("${NOT_SET:-a:-b}", "a:-b"),
            ("${NOT_SET:-${HOME}/x}!", "/home/alice/x!"),
            ("${NOT_SET:-${EMPTY:-${HOME}}}", "/home/alice"),
            ("${HOME:-${}}", "/home/alice"),
        ] {
            assert_eq!(expand(text).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_cannot_be_replaced_is_named() {
        let nested = "${A:-".repeat(12) + &"}".repeat(12);
        for (text, message) in [
            ("${NOT_SET}", "the variable NOT_SET is not set"),
            ("${NOT_SET:-${GONE}}", "the variable GONE is not set"),
            ("$HOME/x", "\"$HOME\" is not expanded"),
            ("$(id)", "\"$\" is not expanded"),
            ("100$", "\"$\" is not expanded"),
            ("${HOME", "\"${HOME\": a ${ without its }"),
            ("${}", "\"${}\" names no variable"),
            ("${1}", "\"${1}\" names no variable"),
            ("${HOME-x}", "\"${HOME-x}\" names no variable"),
            ("${BYTES}", "the variable BYTES is not UTF-8"),
            (&nested, "more than 10 defaults in each other"),
            (&"${LONG}".repeat(20), "the values have more than 1024 KiB with their variables replaced"),
        ] {
            assert_eq!(expand(text).unwrap_err(), message, "{text}");
        }
    }
}
