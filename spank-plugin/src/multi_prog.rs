//! `srun --multi-prog` before Slurm 23.11. There each task gets a program of its own, which a plugin can neither see nor
//! replace: the task would run on the host. So it is refused, in srun where it is typed, and again on the node.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use mizzen_core::Failure;

use crate::spank::{self, Spank};

/// Refuses what srun was asked to do, if this Slurm cannot do it in a container.
pub fn refuse_in_client() -> Result<(), Failure> {
    // Other programs than srun have another word for an option that is not theirs.
    if spank::own_option(c"multi-prog").is_some_and(|value| value == b"set") { refuse() } else { Ok(()) }
}

/// The same on the node, where the option's file and its content stand in place of the program and its argument. The
/// file may be on the login node alone; but hardly an argument that somebody types ends with a newline.
pub fn refuse_on_node(spank: &Spank) -> Result<(), Failure> {
    if let [file, content, ..] = spank.arguments()?.as_slice()
        && lists_programs(content)
        && (content.ends_with(b"\n") || read_small(file).as_ref() == Some(content))
    {
        return refuse();
    }
    Ok(())
}

/// A file that can be such a list: not a FIFO, and not one that takes long to read.
fn read_small(name: &[u8]) -> Option<Vec<u8>> {
    const LIMIT: u64 = 1 << 20;
    let path = Path::new(OsStr::from_bytes(name));
    path.metadata().ok().filter(|found| found.is_file() && found.len() <= LIMIT)?;
    fs::read(path).ok()
}

fn refuse() -> Result<(), Failure> {
    if spank::slurm_version() >= (23, 11) {
        return Ok(());
    }
    Err(Failure::new("--multi-prog: not in a container before Slurm 23.11")
        .hint("start one script, which chooses its program by SLURM_PROCID"))
}

/// Whether a file begins with a line `0-3,5 program argument …`, or `* program`. Later lines may be anything: a backslash
/// continues a line on the next.
fn lists_programs(content: &[u8]) -> bool {
    let mut lines = content.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    let first = lines.find(|line| !line.is_empty() && !line.starts_with(b"#")).unwrap_or_default();
    let end = first.iter().position(u8::is_ascii_whitespace).unwrap_or(0);
    end > 0 && first[..end].iter().all(|byte| byte.is_ascii_digit() || b",-*:".contains(byte))
}
