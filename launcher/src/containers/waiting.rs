//! Waiting for somebody who is starting or removing a container of the same name. That may take as long as a copy of a large image:
//! it is waited for as long as it works, and the user is told for whom. Runs as the user on the host.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use mizzen_core::Failure;

use crate::report::report_note;

/// Who waits for another says so after a while,
const PATIENT: Duration = Duration::from_secs(5);
/// and gives up when that has done nothing for so long.
const STALLED: Duration = Duration::from_secs(60);
/// How long a wait sleeps between two looks: at first little, as most starts are short.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));
/// How often is asked whether the other one works.
const LOOK: Duration = Duration::from_secs(1);

/// One wait.
pub struct Wait<'a> {
    container: &'a str,
    begin: Instant,
    pause: Duration,
    told: bool,
    looked: Instant,
    /// Who it was that we have last seen work, what they had done then, and when that was.
    seen: (String, u64, Instant),
}

impl<'a> Wait<'a> {
    /// For the lock of this container.
    pub fn new(container: &'a str) -> Wait<'a> {
        let now = Instant::now();
        Wait {
            container,
            begin: now,
            pause: PAUSES.0,
            told: false,
            looked: now,
            seen: (String::new(), 0, now),
        }
    }

    /// Sleeps, or says why not to wait any longer. `holder` is the number of the process that has the lock, as far as it is known.
    pub fn pause(&mut self, holder: impl FnOnce() -> String) -> Result<(), Failure> {
        if self.looked.elapsed() > LOOK {
            self.look(&holder())?;
        }
        std::thread::sleep(self.pause);
        self.pause = PAUSES.1.min(self.pause * 2);
        Ok(())
    }

    fn look(&mut self, holder: &str) -> Result<(), Failure> {
        self.looked = Instant::now();
        let work = holder.parse().map_or(0, |holder| work_of(holder, &own_work()));
        if (self.seen.0.as_str(), self.seen.1) != (holder, work) {
            self.seen = (holder.to_owned(), work, Instant::now());
        }
        let is_busy =
            format!("the container \"{}\" is being started or removed by process {holder}", self.container);
        if self.seen.2.elapsed() > STALLED {
            let message = format!("{is_busy}, which has done nothing for {} s", STALLED.as_secs());
            return Err(Failure::new(message).hint("end that process, or let it go on; or take another name"));
        }
        if !self.told && self.begin.elapsed() > PATIENT {
            report_note(&format!("{is_busy}; waiting for it"));
            self.told = true;
        }
        Ok(())
    }
}

/// The parents of all processes, and the time that each has had on a CPU.
fn own_work() -> BTreeMap<u32, (u32, u64)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers
        .filter_map(|pid: u32| Some((pid, parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?)))
        .collect()
}

/// Parent and time in /proc/PID/stat: "pid (name) state parent …", and the name may be anything.
fn parse(stat: &str) -> Option<(u32, u64)> {
    let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
    let number = |field: usize| fields.get(field)?.parse::<u64>().ok();
    Some((u32::try_from(number(1)?).ok()?, number(11)? + number(12)?))
}

/// What a process and those below it have done: an image is imported by a child.
fn work_of(top: u32, all: &BTreeMap<u32, (u32, u64)>) -> u64 {
    let below = |pid: u32| {
        let mut here = Some(pid);
        // A list that was read while processes came and went may go round in circles.
        for _ in 0..all.len() {
            match here {
                Some(pid) if pid == top => return true,
                Some(pid) => here = all.get(&pid).map(|(parent, _)| *parent),
                None => return false,
            }
        }
        false
    };
    // Those that have ended are not in the sum any more: it is compared, and not added to.
    all.iter().filter(|(pid, _)| below(**pid)).map(|(_, (_, time))| time).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_work_of_children_counts() {
        let line = |parent: u32, user: u64, system: u64| {
            format!("7 (a) b) S {parent} 1 1 0 -1 4194304 1 2 3 4 {user} {system} 9 9 20 0")
        };
        assert_eq!(parse(&line(3, 5, 6)), Some((3, 11)));
        assert_eq!(parse("7 (a"), None);
        let all =
            BTreeMap::from([(1, (0, 100)), (2, (1, 10)), (3, (2, 5)), (4, (1, 1)), (8, (9, 1)), (9, (8, 1))]);
        assert_eq!((work_of(2, &all), work_of(4, &all), work_of(5, &all)), (15, 1, 0));
        assert!(own_work().contains_key(&std::process::id()));
    }
}
