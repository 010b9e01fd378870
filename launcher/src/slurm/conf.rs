//! slurm.conf, where it tells what no variable of a step does. Outside, as the user: the file is public on most nodes.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The nodes of the largest clusters take a fraction of this.
const LIMIT: u64 = 16 << 20;

/// The file of the Slurm that has started us; none if there is none that we can read.
pub fn read(environment: &[(OsString, OsString)]) -> Option<String> {
    let named = environment.iter().find(|(name, _)| name == "SLURM_CONF").map(|(_, value)| value.into());
    let usual = ["/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf"].map(PathBuf::from);
    named.into_iter().chain(usual).find_map(|file: PathBuf| read_file(&file).ok())
}

/// The variable may name anything: a FIFO is not waited for, and of an endless device the beginning is enough.
fn read_file(path: &Path) -> io::Result<String> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    let mut text = String::new();
    file.take(LIMIT).read_to_string(&mut text)?;
    Ok(text)
}

/// The value of a key; of several the last, as Slurm takes it.
pub fn value<'a>(conf: &'a str, wanted: &str) -> Option<&'a str> {
    let mut values = conf.lines().filter_map(|line| {
        let (key, value) = line.split_once('=')?;
        key.trim().eq_ignore_ascii_case(wanted).then(|| value.trim())
    });
    values.next_back()
}

/// Whether the file has further ones.
pub fn includes(conf: &str) -> bool {
    conf.lines()
        .any(|line| line.split_whitespace().next().is_some_and(|word| word.eq_ignore_ascii_case("include")))
}
