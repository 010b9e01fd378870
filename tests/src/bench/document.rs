//! What the benches have in common that write into the documents: facts of a run, and sections made of raw numbers.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::{repository, run_tool};

/// How often it is looked whether others use the machine.
const LOOKS: u32 = 20;

/// Where the documents are.
pub fn documents() -> PathBuf {
    repository().join("docs")
}

/// Puts the section between two marks, in place of the page's old one.
pub fn replace_section(page: &str, begin: &str, end: &str, section: &str) -> Result<String> {
    let lost = |mark: &str| format!("the page has lost the line {:?}", mark.trim());
    let (before, rest) = page.split_once(begin).with_context(|| lost(begin))?;
    let (_, after) = rest.split_once(end).with_context(|| lost(end))?;
    Ok(format!("{before}{begin}{section}{end}{after}"))
}

/// The day.
pub fn today() -> Result<String> {
    Ok(run_tool(Command::new("date").arg("+%F"))?.trim().to_owned())
}

/// Cores, processor and kernel.
pub fn machine() -> Result<String> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo")?;
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let release: Vec<&str> = kernel.trim().split('.').take(2).collect();
    Ok(format!(
        "{} cores, {}, Linux {}",
        std::thread::available_parallelism()?,
        model.map_or("unknown processor", |(_, name)| name),
        release.join(".")
    ))
}

/// Processes that run or wait for a core while nothing is measured: those of others on this machine.
pub fn load_of_others() -> Result<f64> {
    // What the last step has left is gone then.
    std::thread::sleep(Duration::from_secs(2));
    let mut waiting = 0;
    for _ in 0..LOOKS {
        let load = fs::read_to_string("/proc/loadavg")?;
        let running = load.split([' ', '/']).nth(3).context("/proc/loadavg")?;
        waiting += running.parse::<u32>()?.saturating_sub(1); // this one
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(f64::from(waiting) / f64::from(LOOKS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_without_its_marks_is_not_touched() {
        let replaced = |page| replace_section(page, "<!-- a -->\n", "<!-- b -->\n", "new\n");
        assert_eq!(
            replaced("1\n<!-- a -->\nold\n<!-- b -->\n2\n").unwrap(),
            "1\n<!-- a -->\nnew\n<!-- b -->\n2\n"
        );
        for page in ["# Performance\n", "<!-- b -->\n<!-- x -->\n"] {
            assert_eq!(replaced(page).unwrap_err().to_string(), "the page has lost the line \"<!-- a -->\"");
        }
        let error = replaced("<!-- a -->\n").unwrap_err();
        assert_eq!(error.to_string(), "the page has lost the line \"<!-- b -->\"");
    }
}
