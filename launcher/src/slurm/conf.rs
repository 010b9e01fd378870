//! slurm.conf, where it tells what no variable of a step does. Outside, as the user: the file is public on most nodes.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

/// The file of the Slurm that has started us; none if there is none that we can read.
pub fn read(environment: &[(OsString, OsString)]) -> Option<String> {
    let named = environment.iter().find(|(name, _)| name == "SLURM_CONF").map(|(_, value)| value.into());
    let usual = ["/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf"].map(PathBuf::from);
    named.into_iter().chain(usual).find_map(|file: PathBuf| fs::read_to_string(file).ok())
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
