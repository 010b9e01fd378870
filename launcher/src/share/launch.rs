//! Which launch of a process manager (mpirun, mpiexec, …) this process is a rank of, and how many ranks of it are on this
//! node. The managers tell it in variables. Runs as the user on the host.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;

use nix::unistd::getpid;

/// What a process manager tells its ranks.
#[derive(Debug)]
struct Manager {
    /// Tells a rank from the others of its launch on a node. The manager's own processes do not have it.
    rank: &'static str,
    /// How many of them are on this node.
    local_size: &'static str,
    /// The number of a rank among those.
    local_rank: &'static str,
    /// What names the launch, where something does.
    job: &'static [&'static str],
}

/// The first whose variables are all there is the innermost: mpirun may run in a step of Slurm, whose variables its ranks
/// have too.
const MANAGERS: [Manager; 8] = [
    // Open MPI
    Manager {
        rank: "OMPI_COMM_WORLD_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        job: &["OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"],
    },
    // MPICH and Intel MPI; with -pmi-port there is no PMI_RANK
    Manager {
        rank: "MPI_LOCALRANKID",
        local_size: "MPI_LOCALNRANKS",
        local_rank: "MPI_LOCALRANKID",
        job: &["PMI_JOBID"],
    },
    // HPE's PALS; its mpiexec has PMI_… beside, unless it is told to use PMIx or nothing
    Manager {
        rank: "PALS_RANKID",
        local_size: "PALS_LOCAL_SIZE",
        local_rank: "PALS_LOCAL_RANKID",
        job: &["PALS_APID"],
    },
    // Cray's PMI, whoever has started the ranks
    Manager {
        rank: "PMI_RANK",
        local_size: "PMI_LOCAL_SIZE",
        local_rank: "PMI_LOCAL_RANK",
        job: &["PALS_APID", "PMI_JOBID"],
    },
    // MVAPICH
    Manager {
        rank: "MV2_COMM_WORLD_RANK",
        local_size: "MV2_COMM_WORLD_LOCAL_SIZE",
        local_rank: "MV2_COMM_WORLD_LOCAL_RANK",
        job: &[],
    },
    // IBM's jsrun
    Manager {
        rank: "JSM_NAMESPACE_RANK",
        local_size: "JSM_NAMESPACE_LOCAL_SIZE",
        local_rank: "JSM_NAMESPACE_LOCAL_RANK",
        job: &["JSM_NAMESPACE_ID", "PMIX_NAMESPACE"],
    },
    // srun --mpi=pmix, and srun --mpi=pmi2
    Manager {
        rank: "PMIX_RANK",
        local_size: "SLURM_STEP_TASKS_PER_NODE",
        local_rank: "SLURM_LOCALID",
        job: &["PMIX_NAMESPACE"],
    },
    Manager {
        rank: "PMI_RANK",
        local_size: "SLURM_STEP_TASKS_PER_NODE",
        local_rank: "SLURM_LOCALID",
        job: &["PMI_JOBID"],
    },
];

/// A process that a manager has started.
#[derive(Debug)]
pub struct Rank {
    manager: &'static Manager,
    number: OsString,
    /// What names the launch, as far as the variables do.
    job: String,
    /// How many ranks of the launch are on this node.
    pub local_size: u32,
    /// Whether it is the first of them.
    pub is_first: bool,
}

/// What this process is, by its environment.
pub fn rank(environment: &[(OsString, OsString)]) -> Option<Rank> {
    let variable = |name: &str| {
        let found = environment.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_os_str()).filter(|value| !value.is_empty())
    };
    MANAGERS.iter().find_map(|manager| {
        let node = variable("SLURM_NODEID").and_then(OsStr::to_str).and_then(|index| index.parse().ok());
        let local_size = tasks_on(variable(manager.local_size)?.to_str()?, node)?;
        let job = manager.job.iter().filter_map(|name| Some(format!("{name}={:?} ", variable(name)?)));
        Some(Rank {
            manager,
            number: variable(manager.rank)?.to_owned(),
            job: job.collect(),
            local_size,
            is_first: variable(manager.local_rank).is_none_or(|number| number == "0"),
        })
    })
}

/// `4`; or Slurm's list of what each node has, as `4(x2),3`, of which the node with this index is meant.
fn tasks_on(text: &str, node: Option<u32>) -> Option<u32> {
    if let Ok(number) = text.parse() {
        return Some(number);
    }
    let mut left = node?;
    for part in text.split(',') {
        let (tasks, nodes) = match part.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse::<u32>().ok()?),
            None => (part, 1),
        };
        if left < nodes {
            return tasks.parse().ok();
        }
        left -= nodes;
    }
    None
}

impl Rank {
    /// What all ranks of its launch on this node have in common, and no others: the variables that name the launch, and the
    /// manager's process that has started them. A script may be in between.
    pub fn launch(&self) -> String {
        let started_by = manager_process(self.manager.rank, &self.number);
        format!("{}{}", self.job, process_name(started_by))
    }
}

/// The nearest process above this one that is not the same rank. One whose environment cannot be read is another user's,
/// as slurmstepd is.
fn manager_process(variable: &str, value: &OsStr) -> i32 {
    let own = [variable.as_bytes(), b"=", value.as_bytes()].concat();
    let mut process = getpid().as_raw();
    loop {
        let Some((parent, _)) = parent_and_start(process) else { return process };
        let is_rank = fs::read(format!("/proc/{parent}/environ"))
            .is_ok_and(|environment| environment.split(|byte| *byte == 0).any(|line| line == own));
        if !is_rank {
            return parent;
        }
        process = parent;
    }
}

/// What the children of one process have in common.
pub fn of_parent() -> String {
    process_name(nix::unistd::getppid().as_raw())
}

/// What tells a process from those that had its number before.
fn process_name(process: i32) -> String {
    let start = parent_and_start(process).map_or(0, |(_, start)| start);
    format!("process {process} {start}")
}

/// The parent of a process, and when the process was started, in the kernel's ticks. None where procfs hides it.
fn parent_and_start(process: i32) -> Option<(i32, u64)> {
    let status = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // "pid (name) state parent …", and the name may be anything; the start is the 22nd field of all.
    let mut fields = status.rsplit(") ").next()?.split(' ');
    let parent = fields.nth(1)?.parse().ok()?;
    Some((parent, fields.nth(17)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(pairs: &[(&str, &str)]) -> Option<(u32, bool, String)> {
        let environment: Vec<_> = pairs.iter().map(|(name, value)| (name.into(), value.into())).collect();
        rank(&environment).map(|rank| (rank.local_size, rank.is_first, rank.job))
    }

    #[test]
    fn every_manager_is_recognised() {
        assert_eq!(found(&[("HOME", "/home/a"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]), None);
        let openmpi = [
            ("OMPI_COMM_WORLD_RANK", "5"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("PMIX_NAMESPACE", "77"),
        ];
        assert_eq!(found(&openmpi), Some((4, false, "PMIX_NAMESPACE=\"77\" ".to_owned())));
        // In a step that Slurm has made for Open MPI's daemons.
        let in_step = [("PMI_RANK", "0"), ("SLURM_STEP_TASKS_PER_NODE", "1(x2)"), ("SLURM_NODEID", "1")];
        assert_eq!(found(&[&in_step, &openmpi[..]].concat()).map(|found| found.0), Some(4));
        let mpich = [("PMI_ID", "4"), ("MPI_LOCALNRANKS", "2"), ("MPI_LOCALRANKID", "0")];
        assert_eq!(found(&mpich), Some((2, true, String::new())));
        let pals = [
            ("PALS_RANKID", "7"),
            ("PALS_LOCAL_RANKID", "3"),
            ("PALS_LOCAL_SIZE", "4"),
            ("PALS_APID", "a-b"),
        ];
        assert_eq!(found(&pals), Some((4, false, "PALS_APID=\"a-b\" ".to_owned())));
        let pmi2 = [("PMI_RANK", "0"), ("PMI_JOBID", "7.0"), ("SLURM_STEP_TASKS_PER_NODE", "3")];
        assert_eq!(found(&pmi2), Some((3, true, "PMI_JOBID=\"7.0\" ".to_owned())));
        assert_eq!(found(&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "many")]), None);
    }

    #[test]
    fn slurm_counts_the_tasks_of_each_node() {
        for (node, tasks) in [(0, Some(4)), (1, Some(4)), (2, Some(3)), (3, Some(1)), (4, None)] {
            assert_eq!(tasks_on("4(x2),3,1", Some(node)), tasks, "{node}");
        }
        assert_eq!(tasks_on("4(x2)", None), None);
        assert_eq!(tasks_on("4", None), Some(4));
        assert_eq!(tasks_on("4(y2)", Some(0)), None);
    }

    #[test]
    fn a_process_is_told_from_another_with_its_number() {
        let (parent, start) = parent_and_start(getpid().as_raw()).unwrap();
        assert_eq!(parent, nix::unistd::getppid().as_raw());
        assert!(start > parent_and_start(parent).unwrap().1 || start > 0);
        // This process is no rank, so its parent is what has started it.
        assert_eq!(manager_process("MIZZEN_NO_SUCH", OsStr::new("0")), parent);
        assert_eq!(parent_and_start(i32::MAX), None);
    }
}
