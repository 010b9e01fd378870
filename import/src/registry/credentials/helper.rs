//! Credential helpers, as Docker has them: `docker-credential-NAME get` reads a registry's name and answers with JSON.
//!
//! Run by: the user, in the importer.

use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use mizzen_core::Failure;
use mizzen_core::failure::quote;
use serde::Deserialize;

use super::Credential;
use crate::registry::environment::Environment;
use crate::registry::secret::Secret;

/// A helper that asks somebody is not answered by a job.
const PATIENCE: Duration = Duration::from_secs(10);
/// How much it may say.
const LIMIT: u64 = 256 << 10;

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    username: String,
    secret: String,
}

/// What a helper has for a registry.
pub fn ask(name: &str, key: &str, environment: &Environment) -> Result<Option<Credential>, Failure> {
    let good = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if name.is_empty() || !name.chars().all(good) {
        return Err(Failure::new(format!(
            "\"{}\" is not the name of a credential helper",
            quote(name.as_bytes())
        )));
    }
    let program = format!("docker-credential-{name}");
    let mut command = Command::new(&program);
    if let Some(path) = environment.path("PATH") {
        command.env("PATH", path);
    }
    run(command, key, PATIENCE).map_err(|failure| failure.about(program))
}

fn run(mut command: Command, key: &str, patience: Duration) -> Result<Option<Credential>, Failure> {
    command.arg("get").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| Failure::caused_by("cannot run it", error))?;
    if let Some(mut stdin) = child.stdin.take() {
        // One that does not read has its reasons, and is judged by what it says.
        let _ = stdin.write_all(key.as_bytes());
    }
    let (sender, receiver) = mpsc::channel();
    if let Some(stdout) = child.stdout.take() {
        // Not joined: something that the helper has started may hold the pipe when the helper is gone.
        std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = stdout.take(LIMIT).read_to_end(&mut text);
            let _ = sender.send(text);
        });
    }
    let answer = receiver.recv_timeout(patience);
    if answer.is_err() {
        let _ = child.kill();
    }
    let status = child.wait().map_err(|error| Failure::caused_by("cannot wait for it", error))?;
    let Ok(answer) = answer else {
        return Err(Failure::new(format!("no answer within {} s", patience.as_secs_f32())));
    };
    if !status.success() {
        let text = String::from_utf8_lossy(&answer);
        // The words of Docker's own library for it.
        if text.contains("not found") {
            return Ok(None);
        }
        return Err(Failure::new(format!("it failed: {}", quote(text.trim().as_bytes()))));
    }
    let answer: Answer =
        serde_json::from_slice(&answer).map_err(|_| Failure::new("its answer is not understood"))?;
    let secret = Secret::new(answer.secret);
    Ok(match answer.username.as_str() {
        "" => None,
        "<token>" => Some(Credential::IdentityToken(secret)),
        user => Some(Credential::Password { user: user.to_owned(), password: secret }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn one_that_does_not_answer_is_ended() {
        let begin = Instant::now();
        let mut command = Command::new("/bin/sh");
        // `get` becomes $0; what it starts holds the pipe, and outlives it.
        command.args(["-c", "sleep 5"]);
        let failure = run(command, "a.io", Duration::from_millis(200)).unwrap_err();
        assert_eq!(failure.message, "no answer within 0.2 s");
        assert!(begin.elapsed() < Duration::from_secs(3));
    }
}
