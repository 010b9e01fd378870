//! `make bench-training`: the same training on the node and in a container, by turns, and messages between ranks likewise.
//!
//! What "on the node" means: the machines' root file system is the very tree that the image was packed from, with Slurm laid over
//! it. So both run the same Python, the same framework and the same MPI, from the node's files there and from a squashfs file in
//! the container here; the program, the step's options and the allocation are the same. Nothing else can differ but the container.

mod plot;
mod report;
mod samples;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::document::{documents, load_of_others, machine, today};
use super::mpi::PING_PONG;
use crate::examples::Example;
use crate::release::Release;
use crate::{Cluster, Spec, User, target_dir};
use samples::{Quantity, Sample, Samples};

/// Nodes and ranks of the steps that are timed.
const SHAPES: [(u32, u32); 5] = [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4)];
/// Nodes and ranks of the steps that send messages.
const PING_PONG_SHAPES: [(u32, u32); 2] = [(1, 2), (2, 2)];

/// A program that is run on the node and in the container.
struct Subject {
    name: &'static str,
    example: Example,
    /// The Slurm release of the image's Debian: its files are laid over those of the image.
    release: Release,
    shapes: &'static [(u32, u32)],
    /// What srun is given after its own options.
    command: &'static str,
    program: Program,
}

/// What kind of numbers it prints.
enum Program {
    Training,
    PingPong,
}

/// The quickest first: whoever has forgotten something hears of it soon.
const SUBJECTS: [Subject; 3] = [
    Subject {
        name: "MPI",
        example: Example::NUMPY,
        release: Release::Slurm22_05,
        shapes: &PING_PONG_SHAPES,
        command: "--mpi=pmix python3 ping.py MPI",
        program: Program::PingPong,
    },
    Subject {
        name: "torch",
        example: Example::PYTORCH,
        release: Release::Slurm24_11,
        shapes: &SHAPES,
        command: "sh -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS exec python3 train.py --steps 10'",
        program: Program::Training,
    },
    Subject {
        name: "TensorFlow",
        example: Example::TENSORFLOW,
        release: Release::Slurm22_05,
        shapes: &SHAPES,
        command: "--mpi=pmix python3 train.py --steps 10",
        program: Program::Training,
    },
];

/// Measures everything, or one subject and keeps the numbers of the others; writes the raw numbers, the table and the plots into
/// the documents.
pub fn run(pairs: u32, only: Option<&str>) -> Result<()> {
    ensure!(pairs >= 2, "one pair has no confidence interval");
    let subjects: Vec<&Subject> =
        SUBJECTS.iter().filter(|subject| only.is_none_or(|name| subject.name == name)).collect();
    ensure!(!subjects.is_empty(), "no such subject (there are MPI, torch, TensorFlow)");
    let documents = documents();
    let mut samples = Samples::new(&facts(pairs)?);
    if let Some(name) = only {
        samples.keep_others(Samples::parse(&fs::read_to_string(raw_numbers(&documents))?)?, name);
    }
    for subject in subjects {
        subject.measure(pairs, &mut samples, &documents)?;
    }
    render(&documents)
}

/// Writes the table and the plots anew, of the raw numbers that are there.
pub fn run_report() -> Result<()> {
    render(&documents())
}

fn render(documents: &Path) -> Result<()> {
    let samples = Samples::parse(&fs::read_to_string(raw_numbers(documents))?)?;
    for (name, picture) in report::pictures(&samples) {
        fs::write(documents.join("performance").join(name), picture)?;
    }
    let page = documents.join("performance.md");
    let text = report::replace_section(&fs::read_to_string(&page)?, &report::section(&samples))?;
    fs::write(&page, text)?;
    println!("{} and its pictures are made of {}", page.display(), raw_numbers(documents).display());
    Ok(())
}

fn raw_numbers(documents: &Path) -> PathBuf {
    documents.join("performance/training.csv")
}

/// When, on what, and how this was measured.
fn facts(pairs: u32) -> Result<Vec<String>> {
    Ok(vec![
        format!("date: {}", today()?),
        format!("machine: {}", machine()?),
        format!("command: vcluster bench training {pairs}"),
    ])
}

impl Subject {
    /// Adds its samples, and saves all when the pairs of a shape are complete: a run that fails late has not been in vain.
    fn measure(&self, pairs: u32, samples: &mut Samples, documents: &Path) -> Result<()> {
        let cluster = self.start()?;
        let job = allocate(&cluster)?;
        for &(nodes, ranks) in self.shapes {
            for container in [false, true] {
                self.step(&cluster, job, nodes, ranks, container)?; // files are in memory then, and it works
            }
            for pair in 1..=pairs {
                // Whatever changes with time does so for both: the one that begins ends in the next pair.
                for container in if pair % 2 == 1 { [false, true] } else { [true, false] } {
                    for (quantity, value) in self.step(&cluster, job, nodes, ranks, container)? {
                        let subject = self.name.to_owned();
                        samples.push(Sample { subject, quantity, nodes, ranks, pair, container, value });
                    }
                }
            }
            samples.note_load(load_of_others()?);
            println!("{}, nodes: {nodes}, ranks: {ranks}: {pairs} pairs", self.name);
            fs::create_dir_all(documents.join("performance"))?;
            fs::write(raw_numbers(documents), samples.to_text())?;
        }
        Ok(())
    }

    /// A cluster whose machines have the image's tree as their own.
    fn start(&self) -> Result<Cluster> {
        let cluster = Cluster::start(Spec {
            release: self.release,
            rootfs: Some(self.example.tree()?),
            layers: vec![target_dir().join("stage"), self.release.rootfs()?],
            ..Cluster::spec("bench-training")
        })?;
        for node in ["node1", "node2"] {
            let prepared = cluster.run_on(node, User::Root, "ldconfig");
            ensure!(prepared.code == 0, "{}", prepared.text());
        }
        self.example.install(&cluster)?;
        cluster.share("ping.py", PING_PONG.as_bytes())?;
        let copied = cluster.run("cp /shared/ping.py .");
        ensure!(copied.code == 0, "{}", copied.text());
        Ok(cluster)
    }

    /// Runs one step.
    fn step(
        &self,
        cluster: &Cluster,
        job: u32,
        nodes: u32,
        ranks: u32,
        container: bool,
    ) -> Result<Vec<(Quantity, f64)>> {
        // torch's ranks meet on the first node.
        let place = if nodes == 1 { "--nodelist=node1" } else { "" };
        let image =
            if container { format!("--container={}", self.example.image_name()) } else { String::new() };
        // What the step before has left to Slurm and to the kernel is not for this one to pay. A port that it had may still be
        // in use.
        let script = format!(
            "export SLURM_JOB_ID={job} MASTER_ADDR=node1 MASTER_PORT=$((20000 + RANDOM % 10000)); sleep 0.5; s=$EPOCHREALTIME\n\
             timeout 600 srun --quiet --overlap --kill-on-bad-exit=1 -N{nodes} {place} -n{ranks} {image} {} || exit 1\n\
             e=$EPOCHREALTIME; echo $((${{e/./}}-${{s/./}}))",
            self.command
        );
        let output = cluster.command("ctl", User::Alice, &["bash", "-c", &script]).output()?;
        let (said, complaint) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        ensure!(output.status.success(), "{script}\n{said}{complaint}");
        self.program.read(&said).with_context(|| format!("unexpected output: {said}"))
    }
}

/// One allocation for all: what is measured is the step, not the queue.
fn allocate(cluster: &Cluster) -> Result<u32> {
    let allocated =
        cluster.run("salloc --quiet --no-shell -N2 --ntasks-per-node=8 && squeue --noheader --format=%i");
    ensure!(allocated.code == 0, "salloc: {}", allocated.text());
    allocated.stdout.trim().parse().context("squeue")
}

impl Program {
    /// The numbers in a step's output, whose last line is the time that it took as a whole.
    fn read(&self, output: &str) -> Option<Vec<(Quantity, f64)>> {
        let number = |text: Option<&str>| -> Option<f64> { text?.parse().ok() };
        let ping_pong = |what| number(output.lines().find_map(|line| line.strip_prefix(what)));
        Some(match self {
            Program::Training => vec![
                (
                    Quantity::ImagesPerSecond,
                    number(output.lines().find_map(|line| line.strip_suffix(" images/s")))?,
                ),
                (Quantity::StepSeconds, number(output.lines().last())? / 1e6),
            ],
            // Nanoseconds of the way there and back.
            Program::PingPong => vec![
                (Quantity::LatencyMicroseconds, ping_pong("MPI, 8 bytes=")? / 2e3),
                (Quantity::MebibytesPerSecond, 8e9 / ping_pong("MPI, 4 MiB=")?),
            ],
        })
    }
}
