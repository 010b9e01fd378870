//! The importer as users run it, in a home of its own.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sha2::{Digest, Sha256};

use super::{Facts, Scratch, facts, run};

/// A user who has never imported anything.
pub struct Home {
    scratch: Scratch,
    /// Words in front of the program.
    prefix: Vec<String>,
}

/// How it ended.
#[derive(Debug)]
pub struct Outcome {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Home {
    pub fn new() -> Home {
        Home::with_config("")
    }

    /// With this text as mizzen.toml.
    pub fn with_config(config: &str) -> Home {
        let home = Home { scratch: Scratch::new(), prefix: Vec::new() };
        fs::write(home.path("mizzen.toml"), config).unwrap();
        home
    }

    /// The same user, with these words in front of the program.
    pub fn prefixed(self, words: &[&str]) -> Home {
        Home { prefix: words.iter().map(|word| (*word).to_owned()).collect(), ..self }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// Where images go without -o.
    pub fn store(&self) -> PathBuf {
        self.path(".local/share/mizzen/images")
    }

    /// Where converted layers are kept.
    pub fn layers(&self) -> PathBuf {
        self.path(".cache/mizzen/layers")
    }

    /// `mizzen import` with these words. Owners are kept, as umoci keeps them.
    pub fn command(&self, words: &[&str]) -> Command {
        let program = env!("CARGO_BIN_EXE_mizzen-import");
        let mut command = match self.prefix.split_first() {
            Some((first, rest)) => {
                let mut command = Command::new(first);
                command.args(rest).arg(program);
                command
            }
            None => Command::new(program),
        };
        command.args(["import", "--quiet", "--keep-owners", "--config"]);
        command.arg(self.path("mizzen.toml")).args(words).env_clear();
        if !words.contains(&"--platform") {
            command.args(["--platform", "linux/amd64"]);
        }
        command.env("HOME", self.scratch.path()).env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.stdin(Stdio::null()).current_dir(self.scratch.path());
        command
    }

    pub fn import(&self, words: &[&str]) -> Outcome {
        outcome(&mut self.command(words))
    }

    /// The same with these bytes on standard input.
    pub fn import_from(&self, words: &[&str], input: &[u8]) -> Outcome {
        let mut child = self
            .command(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // It may have ended before.
        let output = std::thread::scope(|scope| {
            scope.spawn(move || drop(stdin.write_all(input)));
            child.wait_with_output().unwrap()
        });
        of(output)
    }

    /// Imports into a file, which must succeed.
    #[track_caller]
    pub fn image(&self, words: &[&str]) -> PathBuf {
        let path = self.path("image.sqsh");
        let outcome = self.import(&[&["--force", "-o", path.to_str().unwrap()], words].concat());
        assert_eq!(outcome.code, Some(0), "{words:?}: {}", outcome.stderr);
        path
    }

    /// The facts of the tree of an image that was just imported.
    #[track_caller]
    pub fn tree(&self, words: &[&str]) -> Facts {
        unsquashed(&self.image(words), &self.path("tree"))
    }

    /// The names in store, cache and home that an import has left, without whole layers.
    pub fn leftovers(&self) -> Vec<String> {
        let mut found = Vec::new();
        for directory in [self.path(""), self.store(), self.layers()] {
            for entry in fs::read_dir(directory).into_iter().flatten() {
                let name = entry.unwrap().file_name().into_string().unwrap();
                let known = ["mizzen.toml", ".cache", ".local"].contains(&name.as_str());
                if !known && !name.ends_with(".layer") {
                    found.push(name);
                }
            }
        }
        found.sort();
        found
    }
}

pub fn outcome(command: &mut Command) -> Outcome {
    of(command.output().unwrap_or_else(|error| panic!("{command:?}: {error}")))
}

fn of(output: std::process::Output) -> Outcome {
    Outcome {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

impl Outcome {
    /// It failed, with these words in what it said.
    #[track_caller]
    pub fn assert_fails(&self, parts: &[&str]) {
        assert_eq!(self.code, Some(1), "{self:?}");
        for part in parts {
            assert!(self.stderr.contains(part), "{part:?} is not in {}", self.stderr);
        }
    }
}

/// The tree of an image, read by another program.
pub fn unsquashed(image: &Path, into: &Path) -> Facts {
    let _ = fs::remove_dir_all(into);
    run(Command::new("unsquashfs").args(["-q", "-n", "-d"]).args([into, image]));
    facts(into)
}

/// The tree that umoci makes of an image in a layout.
pub fn unpacked(layout: &Path, name: &str, scratch: &Scratch) -> Facts {
    let bundle = scratch.path().join("bundle");
    let _ = fs::remove_dir_all(&bundle);
    run(Command::new("umoci")
        .args(["unpack", "--image", &format!("{}:{name}", layout.display())])
        .arg(&bundle));
    facts(&bundle.join("rootfs"))
}

/// The digest of a file.
pub fn digest_of(path: &Path) -> String {
    format!("{:x}", Sha256::digest(fs::read(path).unwrap()))
}
