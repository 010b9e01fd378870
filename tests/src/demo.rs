//! `make demo`: the commands of a first session and their answers, on a two-node cluster. A training comes first: it is what
//! mizzen is for. Every command has the exit code that it must have, and trainings must have learned something on two nodes, so a demo
//! that does not show what it says fails.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use anyhow::{Context, Result, ensure};

use crate::examples::{Example, check_training};
use crate::images::ImageTree;
use crate::{Cluster, User};

/// A command of the session: why it is typed, what is typed, and how it ends.
struct Shown {
    why: &'static str,
    command: &'static str,
    code: i32,
    /// What is wrong with what it has printed, if anything.
    check: fn(&str) -> Result<()>,
}

/// No command of the demo takes longer, even on a machine that is busy otherwise.
const LIMIT_SECONDS: u32 = 900;

const fn shown(why: &'static str, command: &'static str, code: i32) -> Shown {
    Shown { why, command, code, check: |_| Ok(()) }
}

const fn training(why: &'static str, command: &'static str) -> Shown {
    Shown { why, command, code: 0, check: check_training }
}

const TRAINING: &[Shown] = &[
    training(
        "Training in a container: four ranks on two nodes, each with its own images, average their gradients.",
        "srun -N2 -n4 --container=numpy.sqsh --mpi=pmix python3 train.py",
    ),
    training("The same as a batch job.", BATCH_JOB),
];

const BATCH_JOB: &str = "cat train.sbatch; sbatch --wait --quiet --output=train.out train.sbatch; code=$?; cat train.out; exit $code";

const SESSION: &[Shown] = &[
    shown("A real Slurm cluster, thrown away at the end.", "sinfo", 0),
    shown("Jobs without a container are not touched.", "srun -N2 hostname", 0),
    shown(
        "In a container: the image's system, your own identity and files, one container on each node.",
        "srun -N2 -n4 -l --container=busybox.sqsh sh -c '. /etc/os-release; echo $PRETTY_NAME, $(id -un), $(pwd)'",
        0,
    ),
    shown(
        "A batch script runs inside, and calls srun there although the image has no Slurm.",
        "printf '#!/bin/sh\\n#SBATCH -n2 --container=busybox.sqsh\\nhead -n 1 /etc/os-release; srun hostname\\n' > job.sh; \
         sbatch --wait --quiet --output=out.txt job.sh; cat out.txt",
        0,
    ),
    shown(
        "Files of the node, and how long the start took.",
        "srun --container=busybox.sqsh --container-mounts=/shared:/data:ro --container-verbose ls /data",
        0,
    ),
    shown("A mistake is refused before it waits in the queue.", "srun --container=bussybox.sqsh hostname", 1),
    shown(
        "What cannot start in its container does not start at all, and says why, once.",
        "srun -N2 -n4 --container=busybox.sqsh --container-mounts=/nosuch:/data ls /data",
        125,
    ),
    shown(
        "Without Slurm, and what it would do and why.",
        "mizzen run busybox.sqsh id -un; mizzen plan -m /shared:/data:ro busybox.sqsh ls | grep -E 'mount|places'",
        0,
    ),
    shown("And no node is drained.", "sinfo", 0),
];

/// Shows what mizzen does to a user who has not seen it before.
pub fn run() -> Result<()> {
    let cluster = Cluster::start(Cluster::spec("demo"))?;
    Example::NUMPY.install(&cluster)?;
    cluster.share("busybox.sqsh", &ImageTree::busybox()?.squashfs(&["-comp", "zstd"])?)?;
    let linked = cluster.run("ln -s /shared/busybox.sqsh .");
    ensure!(linked.code == 0, "{}", linked.text());
    TRAINING.iter().chain(SESSION).try_for_each(|shown| show(&cluster, shown))
}

/// Shows the batch job of an example.
pub fn run_example(name: &str) -> Result<()> {
    let example = Example::parse(name)?;
    let cluster = Cluster::start(Cluster::spec("demo"))?;
    example.install(&cluster)?;
    show(&cluster, &training("Training in containers, as a batch job of four ranks on two nodes.", BATCH_JOB))
}

/// Runs a command as Alice while its output is seen, and fails if it does not end as it must.
fn show(cluster: &Cluster, shown: &Shown) -> Result<()> {
    let Shown { why, command, code, check } = shown;
    let mut out = std::io::stdout();
    writeln!(out, "# {why}\n$ {command}")?;
    let limit = LIMIT_SECONDS.to_string();
    let words = ["timeout", &limit, "bash", "-c", &format!("exec 2>&1 </dev/null; {command}")];
    let mut running = cluster.command("ctl", User::Alice, &words).stdout(Stdio::piped()).spawn()?;
    let mut printed = Vec::new();
    let mut lines = BufReader::new(running.stdout.take().context("no output")?);
    loop {
        let begin = printed.len();
        if lines.read_until(b'\n', &mut printed)? == 0 {
            break;
        }
        out.write_all(&printed[begin..])?;
    }
    let status = running.wait()?;
    writeln!(out, "({status})\n")?;
    ensure!(status.code() == Some(*code), "this should have ended with exit code {code}: {command}");
    check(&String::from_utf8_lossy(&printed))
        .with_context(|| format!("this did not show what it should: {command}"))
}
