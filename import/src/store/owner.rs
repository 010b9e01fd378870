//! Who holds a lease: a process, known so well that another one on the same machine can tell that it is gone.
//!
//! Run by: the user, in the importer.

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// A process, as its lease describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// For people.
    pub host: String,
    /// Its number on that machine.
    pub pid: u32,
    /// When it was started, in the kernel's ticks: numbers are used again.
    started: u64,
    /// Which start of which machine it runs on.
    boot: String,
    /// Where its number means it.
    pid_namespace: String,
    /// When this was written, so that no two are alike.
    nanoseconds: u128,
}

impl Owner {
    /// This process.
    pub fn own() -> Owner {
        let pid = std::process::id();
        Owner {
            host: mizzen_core::node_name(),
            pid,
            started: started(pid).unwrap_or(0),
            boot: boot(),
            pid_namespace: pid_namespace(),
            nanoseconds: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos()),
        }
    }

    /// Whether it is certain that the process does not live any more. That of another machine may always live.
    pub fn is_dead(&self) -> bool {
        let is_here = !self.boot.is_empty()
            && self.boot == boot()
            && !self.pid_namespace.is_empty()
            && self.pid_namespace == pid_namespace();
        is_here && started(self.pid) != Some(self.started)
    }
}

fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

fn pid_namespace() -> String {
    fs::read_link("/proc/self/ns/pid").unwrap_or_default().to_string_lossy().into_owned()
}

/// When a process was started that has not ended.
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program, in brackets, may have anything in it.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    // The 22nd field; the state is the third.
    fields.nth(18)?.parse().ok().filter(|_| !["Z", "X"].contains(&state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_lives_until_it_is_gone() {
        let own = Owner::own();
        assert!(!own.is_dead() && own.started > 0, "{own:?}");
        assert!(Owner { started: own.started + 1, ..own.clone() }.is_dead(), "another with the same number");
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let other = Owner { pid: child.id(), started: started(child.id()).unwrap(), ..own.clone() };
        assert!(!other.is_dead());
        child.kill().unwrap();
        while started(child.id()).is_some() {
            std::thread::yield_now();
        }
        assert!(other.is_dead(), "also before its parent has waited for it");
        child.wait().unwrap();
        assert!(other.is_dead());
        for elsewhere in [
            Owner { boot: "another".to_owned(), ..other.clone() },
            Owner { boot: String::new(), ..other.clone() },
            Owner { pid_namespace: "pid:[1]".to_owned(), ..other.clone() },
        ] {
            assert!(!elsewhere.is_dead(), "nobody can tell from here");
        }
    }
}
