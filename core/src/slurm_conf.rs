//! slurm.conf, where it tells what no variable or option does. The file is public on most nodes; it is read as the user.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The nodes of the largest clusters take a fraction of this.
const LIMIT: u64 = 16 << 20;
/// Where it usually is; /run/slurm/conf is where nodes without files of their own fetch them to. Where Slurm was built to
/// look, only Slurm knows.
const DIRECTORIES: [&str; 4] = ["/etc/slurm", "/run/slurm/conf", "/usr/local/etc", "/etc"];

/// Files that include each other end somewhere.
const INCLUDE_DEPTH: usize = 4;

/// The text of a slurm.conf.
pub struct SlurmConf(String);

impl SlurmConf {
    /// A text that was read before.
    pub fn new(text: impl Into<String>) -> SlurmConf {
        SlurmConf(text.into())
    }

    /// The directory of the file: as SLURM_CONF says, if that is given, else the first of the usual places that has one.
    pub fn find_directory(named: Option<&Path>) -> Option<PathBuf> {
        match named {
            Some(file) => file.parent().map(Path::to_owned),
            None => DIRECTORIES.iter().map(PathBuf::from).find(|usual| usual.join("slurm.conf").exists()),
        }
    }

    /// Reads it; none if there is none that we can read.
    pub fn read(named: Option<&Path>) -> Option<SlurmConf> {
        let usual = DIRECTORIES.iter().map(|directory| Path::new(directory).join("slurm.conf"));
        named
            .map(Path::to_owned)
            .into_iter()
            .chain(usual)
            .find_map(|file| read_file(&file).ok())
            .map(SlurmConf)
    }

    /// The value of a key; of several the last, as Slurm takes it.
    pub fn value(&self, wanted: &str) -> Option<&str> {
        let mut values = self.lines().filter_map(|line| {
            let (key, value) = line.split_once('=')?;
            key.trim().eq_ignore_ascii_case(wanted).then(|| value.trim())
        });
        values.next_back()
    }

    /// The value of a key in this file and in those that it includes.
    pub fn value_with_includes(file: &Path, wanted: &str) -> Option<String> {
        value_in(file, file.parent().unwrap_or(Path::new("/")), wanted, INCLUDE_DEPTH)
    }

    /// Whether the file has further ones.
    pub fn includes_others(&self) -> bool {
        let first = |line: &str| line.split_whitespace().next().map(str::to_ascii_lowercase);
        self.lines().any(|line| first(line).is_some_and(|word| word == "include"))
    }

    /// Whether Slurm suspends jobs by itself, to let others run.
    pub fn suspends_jobs(&self) -> bool {
        let modes = self.value("PreemptMode").unwrap_or_default().split(',').map(str::trim);
        modes.into_iter().any(|mode| ["SUSPEND", "GANG"].iter().any(|known| mode.eq_ignore_ascii_case(known)))
    }

    fn lines(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.0.lines().map(|line| line.split('#').next().unwrap_or_default())
    }
}

/// Names in includes are relative to the directory of slurm.conf, in whichever file they are.
fn value_in(file: &Path, directory: &Path, wanted: &str, depth: usize) -> Option<String> {
    let conf = SlurmConf(read_file(file).ok()?);
    let value_of = |line: &str| {
        let mut words = line.split_whitespace();
        if words.next().is_some_and(|word| word.eq_ignore_ascii_case("include")) && depth > 0 {
            return value_in(&directory.join(words.next()?), directory, wanted, depth - 1);
        }
        let (key, value) = line.split_once('=')?;
        key.trim().eq_ignore_ascii_case(wanted).then(|| value.trim().to_owned())
    };
    conf.lines().filter_map(value_of).next_back()
}

/// A variable may name anything: a FIFO is not waited for, and of an endless device the beginning is enough.
fn read_file(path: &Path) -> io::Result<String> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    let mut text = String::new();
    file.take(LIMIT).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_as_slurm_finds_them() {
        let conf = SlurmConf::new("MpiDefault=none\n TmpFS = /a\nmpidefault=pmix # x=y\n#GresTypes=gpu\n");
        assert_eq!(conf.value("MpiDefault"), Some("pmix"));
        assert_eq!(conf.value("TmpFS"), Some("/a"));
        assert_eq!(conf.value("GresTypes"), None);
        assert!(!conf.includes_others());
        assert!(!conf.suspends_jobs() && !SlurmConf::new("PreemptMode=CANCEL\n").suspends_jobs());
        assert!(SlurmConf::new("PreemptMode=suspend,gang\n").suspends_jobs());
        assert!(SlurmConf::new("x=1\n Include nodes.conf\n").includes_others());
    }
}
