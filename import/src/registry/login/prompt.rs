//! A name and a password from the terminal, the password without echo.
//!
//! Run by: the user, in the importer.

use std::io::{self, BufRead, IsTerminal, Read, Write};

use mizzen_core::Failure;
use mizzen_core::failure::quote;
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr};

use crate::registry::secret::Secret;

/// How long a password may be.
const LIMIT: u64 = 64 << 10;

/// All of standard input, without the end of its last line: the password of some registries is a file.
pub fn password_from_stdin() -> Result<Secret, Failure> {
    let mut text = String::new();
    let read = io::stdin().lock().take(LIMIT).read_to_string(&mut text);
    read.map_err(|error| Failure::caused_by("cannot read the password from standard input", error))?;
    let password = text.strip_suffix('\n').unwrap_or(&text);
    let password = password.strip_suffix('\r').unwrap_or(password);
    if password.is_empty() {
        return Err(Failure::new("there is no password on standard input")
            .hint("for example: mizzen login -u USER --password-stdin REGISTRY < FILE"));
    }
    Ok(Secret::new(password))
}

/// Asks for a name.
pub fn user(host: &str) -> Result<String, Failure> {
    need_terminal(host)?;
    ask(&format!("User name for {host}: "));
    let mut line = String::new();
    let read = io::stdin().lock().take(LIMIT).read_line(&mut line);
    read.map_err(|error| Failure::caused_by("cannot read the name", error))?;
    Ok(line.trim().to_owned())
}

/// Asks for a password.
pub fn password(host: &str, user: &str) -> Result<Secret, Failure> {
    need_terminal(host)?;
    ask(&format!("Password of {} for {host}: ", quote(user.as_bytes())));
    let quiet =
        QuietTerminal::new().map_err(|error| Failure::caused_by("cannot turn the echo off", error))?;
    let typed = typed_line(&mut io::stdin().lock());
    drop(quiet);
    ask("\n");
    match typed.map_err(|error| Failure::caused_by("cannot read the password", error))? {
        Some(password) => Ok(Secret::new(password)),
        None => Err(Failure::new("interrupted: there is no login")),
    }
}

fn need_terminal(host: &str) -> Result<(), Failure> {
    if io::stdin().is_terminal() {
        return Ok(());
    }
    Err(Failure::new("standard input is not a terminal: nobody can type a password")
        .hint(format!("mizzen login -u USER --password-stdin {host} reads it from standard input")))
}

fn ask(text: &str) {
    let mut stderr = io::stderr();
    // Who does not see the question can still answer it.
    let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
}

/// The terminal without echo, until this is dropped. Ctrl-C comes as a character: a signal would end us and leave the
/// terminal as it is.
struct QuietTerminal(Termios);

impl QuietTerminal {
    fn new() -> io::Result<QuietTerminal> {
        let stdin = io::stdin();
        let before = tcgetattr(&stdin)?;
        let mut quiet = before.clone();
        quiet.local_modes.remove(LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG);
        quiet.special_codes[SpecialCodeIndex::VMIN] = 1;
        quiet.special_codes[SpecialCodeIndex::VTIME] = 0;
        tcsetattr(&stdin, OptionalActions::Flush, &quiet)?;
        Ok(QuietTerminal(before))
    }
}

impl Drop for QuietTerminal {
    fn drop(&mut self) {
        let _ = tcsetattr(io::stdin(), OptionalActions::Flush, &self.0);
    }
}

/// What was typed until Enter; none if it was broken off.
fn typed_line(input: &mut impl BufRead) -> io::Result<Option<String>> {
    const CTRL_C: u8 = 3;
    const CTRL_D: u8 = 4;
    const CTRL_U: u8 = 21;
    const BACKSPACE: u8 = 8;
    const DELETE: u8 = 127;
    let mut line = Vec::new();
    for byte in input.take(LIMIT).bytes() {
        match byte? {
            CTRL_C => return Ok(None),
            CTRL_D if line.is_empty() => return Ok(None),
            b'\r' | b'\n' | CTRL_D => break,
            CTRL_U => line.clear(),
            // A character may have several bytes.
            BACKSPACE | DELETE => while line.pop().is_some_and(|byte| byte & 0xc0 == 0x80) {},
            byte => line.push(byte),
        }
    }
    String::from_utf8(line).map(Some).map_err(|_| io::Error::other("not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typed_line_can_be_corrected() {
        let typed = |bytes: &[u8]| typed_line(&mut &*bytes).unwrap();
        assert_eq!(typed(b"secret\rmore").as_deref(), Some("secret"));
        assert_eq!(typed(b"secret\n").as_deref(), Some("secret"));
        assert_eq!(typed("sé\x7fecret\x08t\r".as_bytes()).as_deref(), Some("secret"));
        assert_eq!(typed(b"wrong\x15secret\r").as_deref(), Some("secret"));
        assert_eq!(typed(b"\x7f\x7fsecret\x04").as_deref(), Some("secret"));
        assert_eq!(typed(b"sec\x03"), None);
        assert_eq!(typed(b"\x04"), None);
        assert_eq!(typed(b"\r").as_deref(), Some(""));
        assert!(typed_line(&mut &b"\xff\r"[..]).is_err());
    }
}
