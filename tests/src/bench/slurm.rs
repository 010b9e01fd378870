//! What a container adds to a step: srun beside srun with the peers, in one allocation and one run.

use std::fmt::Write;

use anyhow::{Context, Result, bail, ensure};

use super::{Contender, Times, measure, median};
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
    comparisons: &'static [Comparison],
}

enum Comparison {
    /// One time as a multiple of another.
    Ratio(&'static str, &'static str),
    /// What one adds to a third, as a multiple of what the other adds to it.
    AddedRatio(&'static str, &'static str, &'static str),
    /// One time less another, in ms.
    Difference(&'static str, &'static str),
}
use Comparison::{AddedRatio, Difference, Ratio};

const BARE: &str = "bare srun";
const BWRAP: &str = "bwrap, directory";
const CH_RUN: &str = "ch-run, squashfs";
const BY_HAND: &str = "mizzen run, squashfs";
const CONTAINER: &str = "--container, squashfs";
const DIRECTORY: &str = "--container, directory";
const KERNEL: &str = "--container, kernel mount";
const KERNEL_BESIDE: &str = "the same, beside a step";
const BARE_KERNEL: &str = "bare kernel mount";
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
            Contender { name: KERNEL, command: step!($tasks, concat!("--container=/shared/np.sqsh ", $program)) },
            Contender { name: KERNEL_BESIDE, command: step!($tasks, concat!("--container=/shared/np.sqsh ", $program)) },
            Contender { name: BARE_KERNEL, command: step!($tasks, concat!("unshare -r chroot /mnt ", $program)) },
        ]
    };
}

const TABLES: [Table; 4] = [
    Table {
        title: "srun, one task, `true` (ms)",
        rounds: |all| 2 * all,
        contenders: contenders!(1, "/bin/true", "/bin/true"),
        before: settings,
        comparisons: &[
            AddedRatio(CONTAINER, CH_RUN, BARE),
            AddedRatio(DIRECTORY, BWRAP, BARE),
            AddedRatio(KERNEL, BWRAP, BARE),
            AddedRatio(KERNEL, CONTAINER, BARE),
            AddedRatio(KERNEL_BESIDE, CONTAINER, BARE),
        ],
    },
    Table {
        title: "srun, 64 tasks on one node, `true` (ms)",
        rounds: |all| all.div_ceil(3),
        contenders: contenders!(64, "/bin/true", "/bin/true"),
        before: settings,
        comparisons: &[Ratio(CONTAINER, BARE), Ratio(DIRECTORY, BARE), Ratio(KERNEL, BARE)],
    },
    Table {
        // Every step makes its own mount, so nothing that an earlier one has read is there; files are in memory.
        title: "srun, 8 ranks import numpy (ms; bare: `true`)",
        rounds: |all| all.div_ceil(5),
        contenders: contenders!(8, "/bin/true", "python3 -c 'import numpy'"),
        before: settings,
        comparisons: &[
            Ratio(CONTAINER, BWRAP),
            Ratio(CONTAINER, CH_RUN),
            Ratio(KERNEL, BARE_KERNEL),
            Ratio(KERNEL, CONTAINER),
            Ratio(KERNEL_BESIDE, CONTAINER),
        ],
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
        comparisons: &[Difference(LOADED, NOT_LOADED)],
    },
];

/// Has the kernel mount images of root's.
const KERNEL_TOML: &str = "/etc/slurm/kernel.toml";

/// The plugin with the contender's settings. For the bare mount, a new one on the node, as a step has that is alone; and
/// the other way round a step that has used the image, and goes on as long as the next one needs to start.
fn settings(contender: &Contender) -> String {
    let kernel = [KERNEL, KERNEL_BESIDE].contains(&contender.name);
    let config = if kernel { format!(" config={KERNEL_TOML}") } else { String::new() };
    let plugin = format!("echo 'required {PLUGIN}{config}' > /etc/slurm/plugstack.conf");
    let alone = format!(
        "{plugin}; pkill -u alice -x sleep; while pgrep -u alice srun > /dev/null; do sleep 0.02; done"
    );
    match contender.name {
        BARE_KERNEL => {
            let mount = "umount /mnt 2>/dev/null; mount -t squashfs -o loop,ro /local/np.sqsh /mnt";
            format!("{alone}; nsenter --target $(pgrep -ox slurmd) --mount sh -c '{mount}'")
        }
        KERNEL_BESIDE => {
            let beside = "cd; export SLURM_JOB_ID=$(squeue -hu alice -o %i); srun -Q --overlap -n1 --container=/shared/np.sqsh \
                          sh -c \"python3 -c \\\"import numpy\\\"; touch used; exec sleep 60\" 2> /dev/null";
            let used = "until [ -e /home/alice/used ]; do sleep 0.05; done";
            format!(
                "{alone}; rm -f /home/alice/used; runuser -u alice -- bash -c '{beside}' > /dev/null 2>&1 & {used}"
            )
        }
        _ => alone,
    }
}

/// Measures and prints all tables. A contender that does not run has no time: the others are measured, and the end
/// is an error that names the command and what it said.
pub fn run(cluster: &Cluster, rounds: u32) -> Result<()> {
    let toml = "stage = \"always\"\nstage_shared = \"/var/cache/mizzen\"\n[mount]\nsquashfs = \"kernel\"\nowners = [0]\n";
    cluster.write_everywhere(KERNEL_TOML, toml)?;
    // One allocation for all: what is measured is the step, not the queue.
    let allocated = cluster.run("salloc --quiet --no-shell -N1 -n64 && squeue --noheader --format=%i");
    ensure!(allocated.code == 0, "salloc: {}", allocated.text());
    let job: u32 = allocated.stdout.trim().parse().context("squeue")?;
    let mut failures = String::new();
    for (index, table) in TABLES.iter().enumerate() {
        println!("\n{}", table.title);
        let mut script = format!("for round in $(seq {}); do\n", (table.rounds)(rounds));
        let mut failed = Vec::new();
        for (number, contender) in table.contenders.iter().enumerate() {
            let file = cluster.share(&format!("step-{index}-{number}"), step(job, contender).as_bytes())?;
            let before = (table.before)(contender);
            // What the step before has left to Slurm and to the kernel is not for this one to pay.
            let turn = format!("{before}\nsleep 0.1\nrunuser -u alice -- bash {file} || exit 1\n");
            let first = cluster.run_as_root(&turn);
            if first.code == 0 && first.stderr.is_empty() {
                script.push_str(&turn);
            } else {
                writeln!(failures, "{}: {}", contender.command, first.text())?;
                failed.push(contender.name);
            }
        }
        script.push_str("done\n");
        print(table, &measure(cluster, User::Root, &script)?, &failed);
    }
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

fn print(table: &Table, times: &Times, failed: &[&str]) {
    for Contender { name, .. } in table.contenders {
        if failed.contains(name) {
            println!("  {name:<24}   failed");
        } else {
            println!("  {name:<24} {:8.1}", median(times, name));
        }
    }
    for comparison in table.comparisons {
        let (what, value) = match comparison {
            Ratio(one, other) => (format!("{one} / {other}"), median(times, one) / median(times, other)),
            AddedRatio(one, other, base) => {
                let added = |name| median(times, name) - median(times, base);
                (format!("added by {one} / by {other}"), added(one) / added(other))
            }
            Difference(one, other) => {
                (format!("{one} - {other} (ms)"), median(times, one) - median(times, other))
            }
        };
        if value.is_nan() {
            println!("  {what}: not measured");
        } else {
            println!("  {what}: {value:.2}");
        }
    }
}
