//! The environment while it is put together from an image's files. Runs as the user on the host.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use mizzen_core::Failure;
use mizzen_core::failure::quote;

/// The kernel takes no longer `NAME=value`.
const VALUE_LIMIT: usize = 128 * 1024;
/// All names and values together. exec takes about 2 MiB with the arguments, and a few lines like `A=$A$A`
/// must not eat the node's memory.
const TOTAL_LIMIT: usize = 1 << 20;
/// How many places are remembered for the user.
const PLACES: usize = 100;

/// Where variables of the job come from.
pub type Job<'a> = &'a dyn Fn(&OsStr) -> Option<OsString>;

struct Variable {
    name: Vec<u8>,
    /// None after an `export NAME` that comes before the assignment.
    value: Option<Vec<u8>>,
    exported: bool,
}

/// Variables in the order of their first appearance.
pub struct Variables<'a> {
    list: Vec<Variable>,
    /// Where each name is in the list.
    index: HashMap<Vec<u8>, usize>,
    total: usize,
    job: Job<'a>,
    not_understood: Vec<String>,
}

impl<'a> Variables<'a> {
    pub fn new(job: Job<'a>) -> Variables<'a> {
        Variables { list: Vec::new(), index: HashMap::new(), total: 0, job, not_understood: Vec::new() }
    }

    /// Whether this can be a variable at all.
    pub fn fits(name: &[u8], value: &[u8]) -> bool {
        let length = name.len() + value.len();
        let clean = !name.contains(&0) && !name.contains(&b'=') && !value.contains(&0);
        !name.is_empty() && clean && length < VALUE_LIMIT
    }

    /// Sets what `fits`. The last value of a name wins, in the place of the first; once exported, a variable
    /// stays so.
    pub fn set(&mut self, name: Vec<u8>, value: Vec<u8>, exported: bool) -> Result<(), Failure> {
        let known = self.variable(name);
        known.exported |= exported;
        let (old, new) = (known.value.as_ref().map_or(0, Vec::len), value.len());
        known.value = Some(value);
        self.total = self.total - old + new;
        self.check_total()
    }

    /// The variable of this name, made if it is new.
    fn variable(&mut self, name: Vec<u8>) -> &mut Variable {
        let new = self.list.len();
        let at = *self.index.entry(name.clone()).or_insert(new);
        if at == new {
            self.total += name.len();
            self.list.push(Variable { name, value: None, exported: false });
        }
        &mut self.list[at]
    }

    fn check_total(&self) -> Result<(), Failure> {
        if self.total > TOTAL_LIMIT {
            return Err(Failure::new(format!(
                "the image's environment has more than {TOTAL_LIMIT} bytes, no program can be started with it"
            )));
        }
        Ok(())
    }

    /// Sets the variable of a `NAME=value` text; what is none is remembered by its place.
    pub fn set_text(&mut self, text: &[u8], place: impl FnOnce() -> String) -> Result<(), Failure> {
        match split(text).filter(|(name, value)| Variables::fits(name, value)) {
            Some((name, value)) => self.set(name.to_vec(), value.to_vec(), true),
            None => {
                self.skip(place());
                Ok(())
            }
        }
    }

    /// Exports a variable that is set, or will be.
    pub fn export(&mut self, name: Vec<u8>) -> Result<(), Failure> {
        self.variable(name).exported = true;
        self.check_total()
    }

    /// The image's own value.
    pub fn own(&self, name: &[u8]) -> Option<&[u8]> {
        self.index.get(name).and_then(|at| self.list.get(*at)).and_then(|known| known.value.as_deref())
    }

    /// The image's value, or the job's.
    pub fn get(&self, name: &[u8]) -> Option<Vec<u8>> {
        match self.own(name) {
            Some(value) => Some(value.to_vec()),
            None => (self.job)(OsStr::from_bytes(name)).map(OsString::into_vec),
        }
    }

    /// The job's value.
    pub fn of_job(&self, name: &[u8]) -> Option<Vec<u8>> {
        (self.job)(OsStr::from_bytes(name)).map(OsString::into_vec)
    }

    /// Remembers a place whose meaning we do not know.
    pub fn skip(&mut self, place: String) {
        if self.not_understood.len() < PLACES {
            self.not_understood.push(place);
        }
    }

    /// The exported variables, and the places that were not understood.
    pub fn finish(self) -> (Vec<(OsString, OsString)>, Vec<String>) {
        let exported = self.list.into_iter().filter(|known| known.exported);
        let pairs = exported.filter_map(|known| {
            known.value.map(|value| (OsString::from_vec(known.name), OsString::from_vec(value)))
        });
        (pairs.collect(), self.not_understood)
    }
}

/// Name and value around the first `=`.
pub fn split(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let equals = text.iter().position(|byte| *byte == b'=')?;
    Some((&text[..equals], &text[equals + 1..]))
}

/// The lines of a file with their places, as `file:line`. The empty ones are left out.
pub fn lines<'a>(path: &str, content: &'a [u8]) -> impl Iterator<Item = (String, &'a [u8])> {
    let path = quote(path.as_bytes());
    let numbered = content.split(|byte| *byte == b'\n').enumerate();
    let full = numbered.filter(|(_, line)| !line.is_empty());
    full.map(move |(number, line)| (format!("{path}:{}", number + 1), line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_value_wins_in_the_first_place() {
        let mut variables = Variables::new(&|_| None);
        for text in [&b"A=1"[..], b"B=2", b"A=3=4", b"C="] {
            variables.set_text(text, String::new).unwrap();
        }
        for (number, text) in [&b"noequals"[..], b"=x", b"N\0=x", b"N=x\0"].iter().enumerate() {
            variables.set_text(text, || number.to_string()).unwrap();
        }
        let pair = |name: &str, value: &str| (OsString::from(name), OsString::from(value));
        let (environment, places) = variables.finish();
        assert_eq!(environment, [pair("A", "3=4"), pair("B", "2"), pair("C", "")]);
        assert_eq!(places, ["0", "1", "2", "3"]);
    }

    #[test]
    fn too_much_is_refused() {
        assert!(!Variables::fits(b"A", &[b'x'; VALUE_LIMIT]));
        let mut variables = Variables::new(&|_| None);
        let set = |n: usize| variables.set(n.to_string().into_bytes(), vec![b'x'; 100_000], true);
        let failure = (0..11).map(set).find_map(Result::err).unwrap();
        assert!(failure.message.starts_with("the image's environment has more than 1048576 bytes"));
        let mut variables = Variables::new(&|_| None);
        for _ in 0..1000 {
            variables.set(b"SAME".to_vec(), vec![b'x'; 100_000], true).unwrap();
        }
        (0..1000).for_each(|n| variables.skip(n.to_string()));
        assert_eq!(variables.finish().1.len(), PLACES);
    }
}
