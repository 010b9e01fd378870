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

/// A slurm.conf with the files that it includes.
pub struct SlurmConf {
    text: String,
    /// Whether all that it includes could be read.
    is_whole: bool,
}

impl SlurmConf {
    /// A text that was read before; what it includes is unknown.
    pub fn new(text: impl Into<String>) -> SlurmConf {
        let text = text.into();
        let is_whole = !text.lines().any(|line| included(line).is_some());
        SlurmConf { text, is_whole }
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
        named.map(Path::to_owned).into_iter().chain(usual).find_map(|file| SlurmConf::read_file(&file))
    }

    /// Reads this one.
    pub fn read_file(file: &Path) -> Option<SlurmConf> {
        let mut conf = SlurmConf { text: String::new(), is_whole: true };
        let directory = file.parent().unwrap_or(Path::new("/"));
        conf.append(file, directory, INCLUDE_DEPTH).then_some(conf)
    }

    /// Puts what a file includes in the place of the line that says so. Names in includes are relative to the directory of slurm.conf,
    /// in whichever file they are.
    fn append(&mut self, file: &Path, directory: &Path, depth: usize) -> bool {
        let Ok(text) = read_file(file) else { return false };
        for line in text.lines() {
            match included(line) {
                Some(name) => {
                    let is_read = depth > 0 && self.append(&directory.join(name), directory, depth - 1);
                    self.is_whole &= is_read;
                }
                None => {
                    self.text.push_str(line);
                    self.text.push('\n');
                }
            }
        }
        true
    }

    /// The value of a key; of several the last, as Slurm takes it.
    pub fn value(&self, wanted: &str) -> Option<&str> {
        let mut values = self.text.lines().filter_map(|line| {
            let (key, value) = without_comment(line).split_once('=')?;
            key.trim().eq_ignore_ascii_case(wanted).then(|| value.trim())
        });
        values.next_back()
    }

    /// Whether it includes files that could not be read: then a key that is missing may be there.
    pub fn is_incomplete(&self) -> bool {
        !self.is_whole
    }

    /// Whether Slurm suspends jobs by itself, to let others run; or may, as far as can be seen.
    pub fn may_suspend_jobs(&self) -> bool {
        let is_suspending =
            |mode: &str| ["SUSPEND", "GANG"].iter().any(|known| mode.eq_ignore_ascii_case(known));
        match self.value("PreemptMode") {
            Some(modes) => modes.split(',').map(str::trim).any(is_suspending),
            None => self.is_incomplete(),
        }
    }
}

fn without_comment(line: &str) -> &str {
    line.split('#').next().unwrap_or_default()
}

/// The file that a line includes.
fn included(line: &str) -> Option<&str> {
    let mut words = without_comment(line).split_whitespace();
    words.next().filter(|word| word.eq_ignore_ascii_case("include")).and_then(|_| words.next())
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
        assert!(!conf.is_incomplete());
        assert!(!conf.may_suspend_jobs() && !SlurmConf::new("PreemptMode=CANCEL\n").may_suspend_jobs());
        assert!(SlurmConf::new("PreemptMode=suspend,gang\n").may_suspend_jobs());
        let more = SlurmConf::new("x=1\n Include nodes.conf\n");
        assert!(more.is_incomplete() && more.may_suspend_jobs());
    }

    #[test]
    fn included_files_are_a_part_of_it() {
        let top = std::env::temp_dir().join(format!("mizzen-slurm-conf-{}", std::process::id()));
        std::fs::create_dir_all(top.join("d")).unwrap();
        let write = |name: &str, text: &str| std::fs::write(top.join(name), text).unwrap();
        write("slurm.conf", "TmpFS=/a\nInclude d/more.conf # really\nMpiDefault=none\n");
        write("d/more.conf", "TmpFS=/b\nMpiDefault=pmix\ninclude d/last.conf\n");
        write("d/last.conf", "PreemptMode=SUSPEND,GANG\n");
        let read = || SlurmConf::read_file(&top.join("slurm.conf")).unwrap();
        let conf = read();
        assert_eq!((conf.value("TmpFS"), conf.value("MpiDefault")), (Some("/b"), Some("none")));
        assert!(conf.may_suspend_jobs() && !conf.is_incomplete());
        std::fs::remove_file(top.join("d/last.conf")).unwrap();
        assert!(read().may_suspend_jobs() && read().is_incomplete(), "nobody knows");
        // Files that include each other end somewhere.
        write("d/last.conf", "Include slurm.conf\n");
        assert!(read().is_incomplete());
        assert!(SlurmConf::read_file(&top.join("none")).is_none());
        std::fs::remove_dir_all(&top).unwrap();
    }
}
