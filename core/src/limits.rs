//! Which limit of the process, the job or the kernel explains an error: a user who reads "Resource temporarily unavailable"
//! has to be told what is limited, to how much, and who can change it. Runs wherever something fails: in srun, in a task and
//! in the launcher as the user, in slurmstepd as root.

use std::fs;
use std::path::Path;

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use crate::Failure;

/// A limit of the process.
struct Limit {
    /// What a call that meets it fails with.
    errno: i32,
    resource: Resource,
    /// What it limits.
    of: &'static str,
    /// How a shell shows and sets it, and in units of how many bytes.
    ulimit: &'static str,
    unit: u64,
}

/// Of two with the same error the first one that is set explains it.
const LIMITS: [Limit; 6] = [
    Limit {
        errno: libc::EMFILE,
        resource: Resource::RLIMIT_NOFILE,
        of: "open files",
        ulimit: "ulimit -n",
        unit: 1,
    },
    Limit {
        errno: libc::EAGAIN,
        resource: Resource::RLIMIT_NPROC,
        of: "processes",
        ulimit: "ulimit -u",
        unit: 1,
    },
    Limit {
        errno: libc::ENOMEM,
        resource: Resource::RLIMIT_AS,
        of: "address space",
        ulimit: "ulimit -v",
        unit: 1024,
    },
    Limit {
        errno: libc::ENOMEM,
        resource: Resource::RLIMIT_DATA,
        of: "data",
        ulimit: "ulimit -d",
        unit: 1024,
    },
    Limit {
        errno: libc::EFBIG,
        resource: Resource::RLIMIT_FSIZE,
        of: "the size of files",
        ulimit: "ulimit -f",
        unit: 1024,
    },
    Limit {
        errno: libc::E2BIG,
        resource: Resource::RLIMIT_STACK,
        of: "the stack, a quarter of which is for arguments and variables",
        ulimit: "ulimit -s",
        unit: 1024,
    },
];

/// What to do about an error that a limit explains; none where none does. EAGAIN is taken for a process that could not be
/// started: who waits for something else handles it before.
pub fn hint(errno: i32) -> Option<String> {
    match errno {
        libc::ENFILE => Some(system_limit("fs/file-max", "open files")),
        // Descriptors in messages under way count against the same limit.
        libc::ETOOMANYREFS => of_process(libc::EMFILE),
        libc::EAGAIN => Some(
            full_cgroup()
                .or_else(|| of_process(errno))
                .unwrap_or_else(|| system_limit("kernel/pid_max", "processes")),
        ),
        _ => of_process(errno),
    }
}

/// What the launcher and its file server need to start with: less ends them anywhere, and without a word.
const LEAST_MEMORY: u64 = 64 << 20;

/// Refuses to begin where memory is limited to less than a container needs.
pub fn check_memory() -> Result<(), Failure> {
    let limits = [Resource::RLIMIT_AS, Resource::RLIMIT_DATA].map(getrlimit);
    let least = limits.into_iter().flatten().map(|(soft, _)| soft).min();
    if least.is_none_or(|least| least >= LEAST_MEMORY) {
        return Ok(());
    }
    let failure = Failure::new("a container needs 64 MiB of memory to start");
    Err(of_process(libc::ENOMEM).map_or(failure.clone(), |hint| failure.hint(hint)))
}

fn of_process(errno: i32) -> Option<String> {
    LIMITS.iter().filter(|limit| limit.errno == errno).find_map(|limit| {
        let (soft, hard) = getrlimit(limit.resource).ok().filter(|(soft, _)| *soft != RLIM_INFINITY)?;
        Some(limit.met(soft, hard))
    })
}

impl Limit {
    /// Slurm gives a job the limits of the shell that submits it.
    fn met(&self, soft: u64, hard: u64) -> String {
        let Limit { of, ulimit, unit, .. } = self;
        let raise = match hard {
            RLIM_INFINITY => format!("`{ulimit} unlimited` raises it, for a job before it is submitted"),
            hard if hard > soft => {
                format!("`{ulimit} {}` raises it, for a job before it is submitted", hard / unit)
            }
            _ => "only an administrator can raise it".to_owned(),
        };
        let unit = if *unit == 1024 { " KiB" } else { "" };
        format!("your limit on {of}: {ulimit} is {}{unit}; {raise}", soft / self.unit)
    }
}

fn system_limit(sysctl: &str, of: &str) -> String {
    let value = fs::read_to_string(Path::new("/proc/sys").join(sysctl)).unwrap_or_default();
    let name = sysctl.replace('/', ".");
    format!("the node's limit on {of} is reached (sysctl {name} = {})", value.trim())
}

/// A cgroup above this process that has as many processes as it may.
fn full_cgroup() -> Option<String> {
    let cgroups = fs::read_to_string("/proc/self/cgroup").ok()?;
    cgroups.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        // Of version 2 there is one, without a list of controllers.
        let root = match controllers {
            "" => Path::new("/sys/fs/cgroup"),
            list if list.split(',').any(|controller| controller == "pids") => {
                Path::new("/sys/fs/cgroup/pids")
            }
            _ => return None,
        };
        let cgroup = root.join(path.trim_start_matches('/'));
        let number = |directory: &Path, file: &str| {
            fs::read_to_string(directory.join(file)).ok()?.trim().parse::<u64>().ok()
        };
        cgroup.ancestors().take_while(|directory| directory.starts_with(root)).find_map(|directory| {
            let (max, current) = (number(directory, "pids.max")?, number(directory, "pids.current")?);
            let shown = directory.display();
            (current >= max)
                .then(|| format!("the cgroup {shown} may have {max} processes (pids.max), and has them"))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_says_what_it_is_and_who_can_raise_it() {
        let text = |ulimit: &str, soft, hard| {
            LIMITS.iter().find(|limit| limit.ulimit == ulimit).unwrap().met(soft, hard)
        };
        assert_eq!(
            text("ulimit -n", 12, 64),
            "your limit on open files: ulimit -n is 12; `ulimit -n 64` raises it, for a job before it is submitted"
        );
        assert_eq!(
            text("ulimit -v", 50 << 20, 50 << 20),
            "your limit on address space: ulimit -v is 51200 KiB; only an administrator can raise it"
        );
        assert!(text("ulimit -u", 1, RLIM_INFINITY).contains("`ulimit -u unlimited` raises it"));
    }

    #[test]
    fn an_error_that_is_no_limit_has_no_hint() {
        assert_eq!(hint(libc::ENOENT), None);
        assert_eq!(hint(libc::ENOSPC), None, "too many meanings");
        assert!(hint(libc::EMFILE).unwrap().contains("ulimit -n is "));
        assert_eq!(hint(libc::ETOOMANYREFS), hint(libc::EMFILE));
        assert!(hint(libc::ENFILE).unwrap().contains("(sysctl fs.file-max = "));
    }
}
