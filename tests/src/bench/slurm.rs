//! What a container adds to a step: srun beside srun with the peers, in one allocation and one run.

use std::fmt::Write;

use anyhow::{Context, Result, bail, ensure};

use super::figures::Measure::{AddedRatio, Difference, Ratio};
use super::figures::{Part, Row, Run};
use super::{Contender, measure, table};
use crate::spec::PLUGIN;
use crate::{Cluster, User};

/// Steps that are timed in turns, and what their times are compared to.
struct Table {
    title: &'static str,
    /// Fewer rounds for what takes longer, more for small differences.
    rounds: fn(u32) -> u32,
    contenders: &'static [Contender],
    /// What root does before each command, untimed.
    before: fn(&Contender) -> String,
    rows: fn() -> Vec<Row>,
}

const BARE: &str = "bare srun";
const BWRAP: &str = "bwrap, directory";
const CH_RUN: &str = "ch-run, squashfs";
const BY_HAND: &str = "mizzen run, squashfs";
const CONTAINER: &str = "--container, squashfs";
const DIRECTORY: &str = "--container, directory";
const LOADED: &str = "plugin loaded";
const NOT_LOADED: &str = "plugin not loaded";

/// The options of one step: nothing is waited for but the step itself.
macro_rules! step {
    ($tasks:literal, $rest:expr) => {
        concat!("srun --quiet --overlap -n", $tasks, " ", $rest)
    };
}
/// The same program with every contender; $tasks is a literal to be part of a literal.
macro_rules! contenders {
    ($tasks:literal, $bare:literal, $program:literal) => {
        &[
            Contender { name: BARE, command: step!($tasks, $bare) },
            Contender {
                name: BWRAP,
                command: step!(
                    $tasks,
                    concat!(
                        "bwrap --ro-bind /local/np / --dev /dev --proc /proc --bind /tmp /tmp --bind /home /home ",
                        $program
                    )
                ),
            },
            Contender { name: CH_RUN, command: step!($tasks, concat!("ch-run /shared/np.sqsh -- ", $program)) },
            Contender { name: BY_HAND, command: step!($tasks, concat!("mizzen run /shared/np.sqsh ", $program)) },
            Contender { name: CONTAINER, command: step!($tasks, concat!("--container=/shared/np.sqsh ", $program)) },
            Contender { name: DIRECTORY, command: step!($tasks, concat!("--container=/local/np ", $program)) },
        ]
    };
}

const TABLES: [Table; 4] = [
    Table {
        title: "srun, one task, `true` (ms)",
        rounds: |all| 2 * all,
        contenders: contenders!(1, "/bin/true", "/bin/true"),
        before: |_| String::new(),
        rows: || {
            vec![
                Row::new("one task, added to bare srun, by ch-run", AddedRatio(CONTAINER, CH_RUN, BARE))
                    .goal(0.3),
                Row::new("the same from a directory, by bwrap", AddedRatio(DIRECTORY, BWRAP, BARE)),
            ]
        },
    },
    Table {
        title: "srun, 64 tasks on one node, `true` (ms)",
        rounds: |all| all.div_ceil(3),
        contenders: contenders!(64, "/bin/true", "/bin/true"),
        before: |_| String::new(),
        rows: || {
            vec![
                Row::new("64 tasks on one node, by bare srun", Ratio(CONTAINER, BARE)).goal(1.1),
                Row::new("64 tasks from a directory, by bare srun", Ratio(DIRECTORY, BARE)).goal(1.1),
                Row::new("64 tasks with ch-run, by bare srun", Ratio(CH_RUN, BARE)),
            ]
        },
    },
    Table {
        // Every step makes its own mount, so nothing that an earlier one has read is there; files are in memory.
        title: "srun, 8 ranks import numpy (ms; bare: `true`)",
        rounds: |all| all.div_ceil(5),
        contenders: contenders!(8, "/bin/true", "python3 -c 'import numpy'"),
        before: |_| String::new(),
        rows: || {
            vec![
                Row::new("8 ranks import numpy, by bwrap on a directory", Ratio(CONTAINER, BWRAP)).goal(1.15),
                Row::new("8 ranks import numpy, by ch-run", Ratio(CONTAINER, CH_RUN)),
            ]
        },
    },
    Table {
        title: "srun without --container, one task, `true` (ms)",
        rounds: |all| 4 * all,
        contenders: &[
            Contender { name: NOT_LOADED, command: step!(1, "/bin/true") },
            Contender { name: LOADED, command: step!(1, "/bin/true") },
        ],
        before: |contender| {
            let line = if contender.name == LOADED { format!("required {PLUGIN}") } else { String::new() };
            // One directory on all machines, read anew by every srun and slurmstepd.
            format!("echo '{line}' > /etc/slurm/plugstack.conf")
        },
        rows: || {
            vec![
                Row::new("without a container, added by the plugin", Difference(LOADED, NOT_LOADED))
                    .goal(1.0),
            ]
        },
    },
];

/// What is measured.
pub fn part() -> Part {
    let rows = TABLES.iter().flat_map(|table| (table.rows)()).collect();
    Part { name: "slurm", title: "steps of Slurm", rows }
}

/// Measures and prints all tables. A contender that does not run has no time: the others are measured, and the end
/// is an error that names the command and what it said.
pub fn run(cluster: &Cluster, rounds: u32) -> Result<()> {
    // One allocation for all: what is measured is the step, not the queue.
    let allocated = cluster.run("salloc --quiet --no-shell -N1 -n64 && squeue --noheader --format=%i");
    ensure!(allocated.code == 0, "salloc: {}", allocated.text());
    let job: u32 = allocated.stdout.trim().parse().context("squeue")?;
    let mut run = Run::begin(&part())?;
    let mut failures = String::new();
    for (index, compared) in TABLES.iter().enumerate() {
        println!("\n{}", compared.title);
        let mut script = format!("for round in $(seq {}); do\n", (compared.rounds)(rounds));
        for (number, contender) in compared.contenders.iter().enumerate() {
            let file = cluster.share(&format!("step-{index}-{number}"), step(job, contender).as_bytes())?;
            let before = (compared.before)(contender);
            // What the step before has left to Slurm and to the kernel is not for this one to pay.
            let turn = format!("{before}\nsleep 0.1\nrunuser -u alice -- bash {file} || exit 1\n");
            let first = cluster.run_as_root(&turn);
            if first.code == 0 && first.stderr.is_empty() {
                script.push_str(&turn);
            } else {
                writeln!(failures, "{}: {}", contender.command, first.text())?;
            }
        }
        script.push_str("done\n");
        let times = measure(cluster, User::Root, &script)?;
        table(compared.contenders, &times, &(compared.rows)(), &mut run);
    }
    run.save()?;
    if !failures.is_empty() {
        bail!("these commands did not run:\n{failures}");
    }
    Ok(())
}

/// A script of Alice's that runs the step in her allocation and prints its time.
fn step(job: u32, contender: &Contender) -> String {
    let Contender { name, command } = contender;
    format!(
        "cd; export SLURM_JOB_ID={job} USER=alice\ns=$EPOCHREALTIME; {command} || exit 1; e=$EPOCHREALTIME\n\
         echo \"{name}=$((${{e/./}}-${{s/./}}))\"\n"
    )
}
