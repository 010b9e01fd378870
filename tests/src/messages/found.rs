//! The messages in a source file: which calls make one, and where their texts and hints come from.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::source::Source;
use super::tokens::Token;

/// A message and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Message {
    /// The message, with `…` for what differs.
    pub text: String,
    /// Its hints; more than one where it depends.
    pub hints: Vec<String>,
    /// Whether the program goes on after it.
    pub is_note: bool,
}

impl Message {
    fn of(text: &str, hints: &[String], is_note: bool, constants: &BTreeMap<String, String>) -> Message {
        let shown = |text: &str| shown(text, constants);
        let mut text = shown(text);
        // What it is about stands in front.
        if ["is ", "has ", "belongs "].iter().any(|verb| text.starts_with(verb)) {
            text = format!("…: {text}");
        }
        // A part of a hint is none.
        let hints = hints.iter().map(|hint| shown(hint)).filter(|hint| !hint.starts_with([',', ';']));
        Message { text, hints: hints.collect(), is_note }
    }

    /// Less is a word to the next function, which makes a message of it.
    fn is_whole(&self) -> bool {
        let least = match self.is_note {
            true => 4,
            false if self.hints.is_empty() => 3,
            false => 2,
        };
        words(&self.text) >= least && self.text.split(' ').count() > 2 && !self.text.ends_with(": ")
    }
}

/// How many words a text has, without what differs.
fn words(text: &str) -> usize {
    text.split(' ').filter(|word| word.chars().any(char::is_alphabetic)).count()
}

/// Functions whose sentences are notes: the end of the file's path, and the name.
const NOTES: [(&str, &str); 18] = [
    ("check_config.rs", "missing"),
    ("containers/entering.rs", "ignored"),
    ("containers/entering.rs", "missing_pmix"),
    ("containers/mod.rs", "other_image"),
    ("export/layer.rs", "warning"),
    ("host_libraries/abi.rs", "text"),
    ("host_libraries/fabric.rs", "locked_memory"),
    ("host_libraries/show.rs", "closed"),
    ("host_libraries/show.rs", "note"),
    ("pipeline.rs", "go_on_serving"),
    ("plan/mount_options.rs", "asked_mounts"),
    ("plan/mpi.rs", "misfit"),
    ("plan/mpi.rs", "misfit_to_hydra"),
    ("plan/mpi.rs", "newer_than_mpirun"),
    ("plan/mpi.rs", "root_misfit"),
    ("sandbox/dangling.rs", "dangling_link"),
    ("stage/read_through.rs", "give_up"),
    ("step/mod.rs", "unmapped_groups"),
];

/// Functions that give a message and its hint as a pair.
const PAIRS: [(&str, &str); 1] = [("transport/trouble.rs", "of_certificate")];

/// Files of errors that say themselves what they are.
const DISPLAYED: [&str; 2] = ["reader/error.rs", "tar/error.rs"];

/// A place where a message is made.
struct Made {
    open: usize,
    text: Range<usize>,
    hint: Option<Range<usize>>,
    is_note: bool,
}

impl Source {
    /// The texts that a variable may have been given above.
    fn variable(&self, name: &str, at: usize) -> Vec<String> {
        let begin = self.function(at);
        let found = (begin..at).rev().find_map(|place| Some((place, self.declares(place, name)?)));
        let Some((found, part)) = found else { return Vec::new() };
        let mut end = found;
        while end < at && self.tokens[end] != Token::Mark(';') {
            end = if matches!(self.tokens[end], Token::Mark('(' | '[' | '{')) {
                self.closing(end)
            } else {
                end
            } + 1;
        }
        let place = found..end.min(at);
        let places = match part {
            None => vec![place],
            Some((index, count)) => self.parts(place, index, count),
        };
        let texts = places.into_iter().flat_map(|place| {
            let formats = self.formats(place.clone());
            let texts = || self.texts(place).into_iter().filter(|text| words(text) > 1).collect();
            if formats.is_empty() { texts() } else { formats }
        });
        texts.collect()
    }

    /// The texts of the `format!`s at a place, and those that may stand in the place of one: the arms of a `match` or an `if`.
    /// Texts that a `format!` puts in are no messages.
    fn formats(&self, place: Range<usize>) -> Vec<String> {
        let (mut formats, mut others) = (Vec::new(), Vec::new());
        let mut at = place.start;
        while at < place.end {
            match &self.tokens[at] {
                token if token.is("format") && self.tokens.get(at + 2) == Some(&Token::Mark('(')) => {
                    let end = self.closing(at + 2);
                    formats.extend(self.texts(at + 2..end.min(place.end)).into_iter().next());
                    at = end;
                }
                // A separator or the like is no message.
                Token::Text(text) if text.split(' ').count() > 2 => others.push(text.clone()),
                _ => {}
            }
            at += 1;
        }
        if !formats.is_empty() {
            formats.append(&mut others);
        }
        formats
    }

    /// The texts of an argument: itself, or the constants, variables and functions that it names.
    fn argument(&self, place: Range<usize>, constants: &BTreeMap<String, String>) -> Vec<String> {
        let formats = self.formats(place.clone());
        if !formats.is_empty() {
            return formats;
        }
        let words = place.clone().filter_map(|at| match &self.tokens[at] {
            Token::Word(word) => Some((at, word)),
            _ => None,
        });
        let named = words.flat_map(|(at, word)| match constants.get(word) {
            Some(text) => vec![text.clone()],
            None if self.tokens.get(at + 1) == Some(&Token::Mark('(')) && self.body(word).is_some() => {
                self.written_in(word)
            }
            None => self.variable(word, place.start),
        });
        let texts = self.texts(place.clone()).into_iter().filter(|text| text.contains(' '));
        texts.chain(named).collect()
    }

    /// The sentences in a function of this file.
    fn written_in(&self, name: &str) -> Vec<String> {
        let Some(place) = self.body(name) else { return Vec::new() };
        let formats = self.formats(place.clone());
        let end = place.end;
        let texts = if formats.is_empty() { self.texts(place) } else { formats };
        texts
            .into_iter()
            .filter(|text| words(text) > 1)
            .flat_map(|text| self.with_variables(text, end))
            .collect()
    }

    /// All messages, with their hints.
    pub fn messages(&self, constants: &BTreeMap<String, String>) -> Vec<Message> {
        let mut found = Vec::new();
        for at in 0..self.tokens.len() {
            let Some(made) = self.message_at(at) else { continue };
            let own = match made.hint {
                Some(hint) => self.argument(hint, constants),
                None => self.hints(at, made.open, constants),
            };
            let own = self.all_with_variables(own, at);
            let mut texts = self.argument(made.text.clone(), constants);
            if texts.is_empty()
                && let [Token::Word(name)] = &self.tokens[made.text]
            {
                // Perhaps a parameter, which callers give a text.
                texts.push(format!("{{{name}}}"));
            }
            for text in texts.into_iter().flat_map(|text| self.with_variables(text, at)) {
                for (text, hints) in self.filled(&text, at, constants) {
                    let hints = if hints.is_empty() { own.clone() } else { hints };
                    found.push(Message::of(&text, &hints, made.is_note, constants));
                }
            }
        }
        // What an error of a crate of ours says of itself.
        let is_display = |at: usize| {
            DISPLAYED.iter().any(|file| self.file.ends_with(file))
                && self.tokens[at].is("write")
                && self.tokens[at + 1] == Token::Mark('!')
        };
        for at in (0..self.tokens.len()).filter(|at| is_display(*at)) {
            let texts = self.texts(at + 2..self.closing(at + 2)).into_iter().take(1);
            found.extend(texts.map(|text| Message::of(&format!("{{}}: {text}"), &[], false, constants)));
        }
        for (_, name) in PAIRS.iter().filter(|(file, _)| self.file.ends_with(file)) {
            let Some(place) = self.body(name) else { continue };
            let [texts, hints] = [0, 1].map(|index| self.parts(place.clone(), index, 2));
            for (text, hint) in texts.into_iter().zip(hints) {
                let hints = self.argument(hint, constants);
                let texts = self.argument(text, constants).into_iter();
                found.extend(texts.map(|text| Message::of(&text, &hints, false, constants)));
            }
        }
        for (_, name) in NOTES.iter().filter(|(file, _)| self.file.ends_with(file)) {
            let notes = self.written_in(name).into_iter();
            found.extend(notes.map(|text| Message::of(&text, &[], true, constants)));
        }
        let hints: BTreeSet<String> = self.all_hints(constants).into_iter().collect();
        found.retain(|message| message.is_whole() && !(message.is_note && hints.contains(&message.text)));
        found
    }

    /// If a message is made here: its arguments.
    fn message_at(&self, at: usize) -> Option<Made> {
        let is = |place: usize, words: &[&str]| {
            self.tokens.get(place).is_some_and(|token| words.iter().any(|word| token.is(word)))
        };
        let failure = self.tokens[at].is("Failure") && is(at + 3, &["new", "caused_by"]);
        let declared = at > 0 && is(at - 1, &["fn"]);
        let hinted = is(at, &["hinted"]) && !declared;
        let of_notes =
            at > 1 && self.tokens[at - 1] == Token::Mark('.') && is(at - 2, &["notes", "warnings"]);
        let is_note = is(at, &["note", "report_note"]) && !declared || is(at, &["push", "tell"]) && of_notes;
        if !failure && !hinted && !is_note {
            return None;
        }
        let open = if failure { at + 4 } else { at + 1 };
        if self.tokens.get(open) != Some(&Token::Mark('(')) {
            return None;
        }
        let mut arguments = self.arguments(open).into_iter();
        // Its first one is the kind of the failure.
        let text = if hinted { arguments.nth(1)? } else { arguments.next()? };
        Some(Made { open, text, hint: arguments.next().filter(|_| hinted), is_note })
    }

    /// The hints behind a message: in the same expression, or for the variable that it was put in.
    fn hints(&self, at: usize, open: usize, constants: &BTreeMap<String, String>) -> Vec<String> {
        let is_hint =
            |place: usize| self.tokens.get(place).is_some_and(|word| word.is("hint") || word.is("or_hint"));
        let of_hint = |open: usize| self.argument(open + 1..self.closing(open), constants);
        let mut end = self.closing(open) + 1;
        let mut hints = Vec::new();
        // Brackets of Err(…) and the like may close before the chain goes on.
        while let Some(Token::Mark('.' | ')')) = self.tokens.get(end) {
            if self.tokens[end] == Token::Mark(')') {
                end += 1;
                continue;
            }
            if is_hint(end + 1) {
                hints = of_hint(end + 2);
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
                    hints.extend(of_hint(place + 3));
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

    /// A text with what its variables may hold, where that is written above.
    fn with_variables(&self, text: String, at: usize) -> Vec<String> {
        let names = text.split('{').skip(1).filter_map(|part| part.split_once('}'));
        let held =
            names.map(|(name, _)| (name, self.variable(name, at))).find(|(_, texts)| !texts.is_empty());
        match held {
            // Not if it is another variable of the same name that such a text has.
            Some((name, texts)) if !texts.iter().any(|held| held.contains(&format!("{{{name}}}"))) => {
                texts.iter().map(|held| text.replace(&format!("{{{name}}}"), held)).collect()
            }
            _ => vec![text],
        }
    }

    fn all_with_variables(&self, texts: Vec<String>, at: usize) -> Vec<String> {
        texts.into_iter().flat_map(|text| self.with_variables(text, at)).collect()
    }

    /// A text of which the callers of the function or closure that has it give a part: as they give it, with their hints.
    fn filled(
        &self,
        text: &str,
        at: usize,
        constants: &BTreeMap<String, String>,
    ) -> Vec<(String, Vec<String>)> {
        let alone = vec![(text.to_owned(), Vec::new())];
        let begin = self.function(at);
        let closure = self.tokens[begin..at].windows(4).rposition(|four| {
            four[0].is("let") && four[2] == Token::Mark('=') && four[3] == Token::Mark('|')
        });
        let name_at = closure.map_or(begin, |place| begin + place) + 1;
        let (Some(Token::Word(name)), Some(end)) =
            (self.tokens.get(name_at), self.end_of_parameters(name_at))
        else {
            return alone;
        };
        if end > at {
            return alone;
        }
        let parameters = self.parameters(name_at, end);
        let Some(position) = parameters.iter().position(|name| text.contains(&format!("{{{name}}}"))) else {
            return alone;
        };
        let gap = format!("{{{}}}", parameters[position]);
        let calls = (end..self.tokens.len()).chain(0..begin).filter(|place| {
            self.tokens[*place].is(name)
                && self.tokens.get(place + 1) == Some(&Token::Mark('('))
                && (*place == 0 || !self.tokens[place - 1].is("fn"))
        });
        let given = calls.flat_map(|place| {
            let hints = self.all_with_variables(self.hints(place, place + 1, constants), place);
            let argument = self.arguments(place + 1).into_iter().nth(position);
            let formats = argument.clone().map_or_else(Vec::new, |argument| self.formats(argument));
            let texts = match argument {
                Some(argument) if formats.is_empty() => self.texts(argument),
                _ => formats,
            };
            texts.into_iter().map(|given| (text.replace(&gap, &given), hints.clone())).collect::<Vec<_>>()
        });
        let given: Vec<(String, Vec<String>)> = given.collect();
        // Other files may call it, too, with what they have in a variable.
        let is_public = closure.is_none() && begin > 0 && self.tokens[begin - 1].is("pub");
        let says_enough = words(&text.replace(&gap, "")) > 3;
        if given.is_empty() || is_public && says_enough { alone } else { given }
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

#[cfg(test)]
mod tests {
    use super::super::tokens::tokens;
    use super::*;

    #[test]
    fn messages_and_notes_are_found_in_the_forms_of_our_code() {
        let text = r#"
            fn a(name: &str) -> Failure {
                let refused = |why: &str| Failure::new(format!("the thing {name} {why}"));
                if x { return refused("is there twice").hint("remove one"); }
                refused("is not there")
            }
            fn b() -> Failure {
                let what = match x { 1 => format!("cannot read {file}"), _ => "cannot be read".to_owned() };
                Failure::new(format!("{path}: {what} any more"))
            }
            fn c() -> Failure {
                let (what, _) = match (x, "no message") { (1, _) => ("it has no name", "name it"), _ => ("it is gone", "wait") };
                hinted(Kind::Other, format!("{what}: so it ends"), advice(x))
            }
            fn advice(hint: &str) -> &'static str { if x { "do this or that" } else { "do something else" } }
            fn d(notes: &mut Vec<String>) { notes.push(format!("{place} is left out: nothing is there")); }
        "#;
        let source = Source { file: "a.rs".into(), tokens: tokens(text) };
        let found: Vec<(String, String, bool)> = source
            .messages(&BTreeMap::new())
            .into_iter()
            .map(|message| (message.text, message.hints.join("|"), message.is_note))
            .collect();
        let expected = [
            ("the thing … is there twice", "remove one", false),
            ("the thing … is not there", "", false),
            ("…: cannot read … any more", "", false),
            ("…: cannot be read any more", "", false),
            ("it has no name: so it ends", "do this or that|do something else", false),
            ("it is gone: so it ends", "do this or that|do something else", false),
            ("… is left out: nothing is there", "", true),
        ];
        let expected = expected.map(|(text, hint, is_note)| (text.to_owned(), hint.to_owned(), is_note));
        assert_eq!(found, expected);
    }
}
