//! `make bench`: mizzen beside the peers that Debian ships, all in one run on one machine, as ratios.
//!
//! The machine is shared and noisy: the contenders take turns, medians are compared, and no number is a promise. What was measured
//! last is in docs/performance.md (`figures.rs`).

mod document;
mod figures;
mod import;
mod mpi;
mod read_through;
mod scale;
mod slurm;
mod staging;
mod training;
mod wheels;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::images::pack;
use crate::release::{Release, make_rootfs};
use crate::{Cluster, Spec, User, run_tool, target_dir};
use figures::{Measure, Part, Row, Run};

/// A command to be timed.
struct Contender {
    name: &'static str,
    command: &'static str,
}

const START: [Contender; 8] = [
    Contender { name: "true, no container", command: "/bin/true" },
    Contender { name: "mizzen run, squashfs", command: "mizzen run /shared/np.sqsh /bin/true" },
    Contender { name: "ch-run, squashfs", command: "ch-run /shared/np.sqsh -- /bin/true" },
    Contender { name: "mizzen run, zstd", command: "mizzen run /shared/np-zstd.sqsh /bin/true" },
    Contender { name: "ch-run, zstd", command: "ch-run /shared/np-zstd.sqsh -- /bin/true" },
    Contender { name: "mizzen run, directory", command: "mizzen run /local/np /bin/true" },
    Contender { name: "ch-run, directory", command: "ch-run /local/np -- /bin/true" },
    Contender {
        name: "bwrap, directory",
        command: "bwrap --ro-bind /local/np / --dev /dev --proc /proc --bind /tmp /tmp --bind /home /home /bin/true",
    },
];

const MOUNTS: [Contender; 4] = [
    Contender { name: "kernel squashfs", command: "mount -t squashfs -o loop,ro /local/np.sqsh /mnt" },
    Contender { name: "squashfuse_ll", command: "squashfuse_ll -o allow_other /local/np.sqsh /mnt" },
    Contender { name: "squashfuse", command: "squashfuse -o allow_other /local/np.sqsh /mnt" },
    Contender {
        name: "mizzen's server",
        command: "/shared/squashfs-serve --threads 2 /local/np.sqsh /mnt & sleep 0.2",
    },
];

/// How often and how warm numpy is imported through a mount.
const IMPORTS: [(&str, u32, bool); 4] = [
    ("import numpy in 1 process, cold", 1, true),
    ("import numpy in 1 process, warm", 1, false),
    ("import numpy in 8 processes on one mount, cold", 8, true),
    ("import numpy in 8 processes on one mount, warm", 8, false),
];

/// All that is measured, in the order of docs/performance.md.
fn parts() -> Vec<Part> {
    vec![
        slurm::part(),
        start_part(),
        mounts_part(),
        mpi::part(),
        staging::part(),
        read_through::part(&read_through::LONG),
        read_through::part(&read_through::SHORT),
        import::part(),
        wheels::part(),
    ]
}

/// Measures everything, prints it, and puts it into docs/performance.md.
pub fn run(rounds: u32) -> Result<()> {
    let cluster = start(rounds)?;
    by_hand(&cluster, rounds)?;
    staging::run(&cluster, rounds)?;
    slurm::run(&cluster, rounds)?;
    drop(cluster);
    import::run(rounds.div_ceil(8))?;
    wheels::run(rounds.div_ceil(8))?;
    read_through::run(&read_through::SHORT)?;
    mpi::run(rounds)
}

/// The same for imports alone.
pub fn run_import(rounds: u32) -> Result<()> {
    import::run(rounds.div_ceil(8))
}

/// The same for imports of TensorFlow and torch in new containers alone.
pub fn run_wheels(rounds: u32) -> Result<()> {
    wheels::run(rounds.div_ceil(8))
}

/// The start of `true` alone.
pub fn run_start(rounds: u32) -> Result<()> {
    start_of_true(&start(rounds)?, rounds)
}

/// The same for messages between the ranks of a step alone.
pub fn run_mpi(rounds: u32) -> Result<()> {
    mpi::run(rounds)
}

/// Trainings and messages, on the node and in a container, so many pairs of each, or of one subject: for docs/performance.md.
pub fn run_training(pairs: u32, only: Option<&str>) -> Result<()> {
    training::run(pairs, only)
}

/// What docs/performance.md says of trainings, of the numbers that are there.
pub fn run_training_report() -> Result<()> {
    training::run_report()
}

/// The table of docs/performance.md that all of these renew, of the figures that are there.
pub fn run_report() -> Result<()> {
    figures::run_report()
}

/// The same for copies of images alone.
pub fn run_staging(rounds: u32) -> Result<()> {
    staging::run(&start(rounds)?, rounds)
}

/// The same for first starts of a large image on a slow file system alone. The whole has a short form of it: with 4 GB it takes a
/// quarter of an hour, and 9 GB of memory.
pub fn run_read_through(rounds: u32, starts_alone: bool) -> Result<()> {
    read_through::run(&read_through::Form { rounds, starts_alone, ..read_through::LONG })
}

/// What starts of many nodes cost, into docs/scale.md; and checked on virtual nodes.
pub fn run_scale(checked: bool) -> Result<()> {
    scale::run(checked)
}

/// The same for steps of Slurm alone.
pub fn run_slurm(rounds: u32) -> Result<()> {
    slurm::run(&start(rounds)?, rounds)
}

/// A cluster with the peers, the image /shared/np.sqsh, and on every machine its copy and its tree in /local.
fn start(rounds: u32) -> Result<Cluster> {
    let peers = make_rootfs(
        Release::Slurm22_05.debian(),
        "peers",
        "slurmctld,slurmd,slurm-client,munge,iproute2,procps,bindfs,bubblewrap,charliecloud,squashfuse",
    )?;
    let numpy = make_rootfs(Release::Slurm22_05.debian(), "numpy", "python3,python3-numpy")?;
    let cluster = Cluster::start(Spec { nodes: 1, cpus: 64, rootfs: Some(peers), ..Cluster::spec("bench") })?;
    println!("image: Debian with numpy, gzip squashfs; {rounds} rounds; medians\n");
    cluster.share("np.sqsh", &pack(&numpy, &["-comp", "gzip", "-e", "var/cache", "var/lib/apt"])?)?;
    cluster.share("np-zstd.sqsh", &pack(&numpy, &["-comp", "zstd", "-e", "var/cache", "var/lib/apt"])?)?;
    for machine in ["ctl", "node1"] {
        let prepared = cluster.run_on(
            machine,
            User::Root,
            "cp /shared/np.sqsh /local; cd /local && mkdir np && squashfuse np.sqsh /mnt && cp -a /mnt/. np/ && \
             umount /mnt && mkdir -p np/home np/tmp",
        );
        ensure!(prepared.code == 0, "{}", prepared.text());
    }
    Ok(cluster)
}

/// Without Slurm: the start of one process, and reading through a mount.
fn by_hand(cluster: &Cluster, rounds: u32) -> Result<()> {
    cluster.share("squashfs-serve", &std::fs::read(server_program()?)?)?;
    let prepared = cluster.run_as_root("chmod 755 /shared/squashfs-serve");
    ensure!(prepared.code == 0, "{}", prepared.text());
    start_of_true(cluster, rounds)?;
    let mut run = Run::begin(&mounts_part())?;
    for (label, processes, cold) in IMPORTS {
        println!("\n{label} (ms)");
        let times = import_times(cluster, rounds.div_ceil(5), processes, cold)?;
        table(&MOUNTS, &times, &mount_rows(label), &mut run);
    }
    run.save()
}

fn mounts_part() -> Part {
    let rows = IMPORTS.iter().flat_map(|(label, ..)| mount_rows(label)).collect();
    Part { name: "mounts", title: "reading through a mount", rows }
}

fn mount_rows(label: &str) -> Vec<Row> {
    let row = |other, what| Row::new(format!("{label}: by {what}"), Measure::Ratio("mizzen's server", other));
    vec![row("squashfuse_ll", "squashfuse_ll"), row("kernel squashfs", "the kernel's squashfs")]
}

/// Beside the same without a container, and with others.
fn start_of_true(cluster: &Cluster, rounds: u32) -> Result<()> {
    let part = start_part();
    let mut run = Run::begin(&part)?;
    println!("start of `true`, one process (ms)");
    let times = start_times(cluster, rounds)?;
    table(&START, &times, &part.rows, &mut run);
    run.save()
}

fn start_part() -> Part {
    let added = |from: &str, other: &str, measured, beside| {
        Row::new(format!("from {from}, by {other}"), Measure::AddedRatio(measured, beside, START[0].name))
    };
    let rows = vec![
        added("a gzip image", "ch-run", "mizzen run, squashfs", "ch-run, squashfs").goal(0.5),
        added("a zstd image", "ch-run", "mizzen run, zstd", "ch-run, zstd").goal(0.5),
        added("a gzip image", "a directory", "mizzen run, squashfs", "mizzen run, directory").goal(1.5),
        added("a zstd image", "a directory", "mizzen run, zstd", "mizzen run, directory").goal(1.5),
        added("a directory", "ch-run", "mizzen run, directory", "ch-run, directory"),
        added("a directory", "bwrap", "mizzen run, directory", "bwrap, directory"),
        Row::new(
            "from a directory, by bwrap, with the time of `true`",
            Measure::Ratio("mizzen run, directory", "bwrap, directory"),
        ),
    ];
    Part { name: "start", title: "what `mizzen run IMAGE true` adds to `true`", rows }
}

type Times = BTreeMap<String, Vec<f64>>;

fn start_times(cluster: &Cluster, rounds: u32) -> Result<Times> {
    let mut script = "export USER=alice\n".to_owned();
    for contender in &START {
        script.push_str(&format!("{} || exit 1\n", contender.command)); // warm, and it must work
    }
    script.push_str(&format!("for round in $(seq {rounds}); do\n"));
    for contender in &START {
        script.push_str(&timed(contender.name, contender.command));
    }
    script.push_str("done\n");
    measure(cluster, User::Alice, &script)
}

fn import_times(cluster: &Cluster, rounds: u32, processes: u32, cold: bool) -> Result<Times> {
    let import = "chroot /mnt /usr/bin/python3 -c 'import numpy'";
    let all = format!(
        "{{ for p in $(seq {processes}); do {import} & pids=\"$pids $!\"; done; wait $pids; pids=; }}"
    );
    let mut script = format!("for round in $(seq {rounds}); do\n");
    for contender in &MOUNTS {
        script.push_str(&format!("{}\n", contender.command));
        script.push_str(if cold { "sync; echo 3 > /proc/sys/vm/drop_caches\n" } else { "" });
        script.push_str(&if cold { String::new() } else { format!("{import}\n") });
        script.push_str(&timed(contender.name, &all));
        script.push_str("umount /mnt; wait\n");
    }
    script.push_str("done\n");
    measure(cluster, User::Root, &script)
}

fn timed(name: &str, command: &str) -> String {
    format!("s=$EPOCHREALTIME; {command}; e=$EPOCHREALTIME; echo \"{name}=$((${{e/./}}-${{s/./}}))\"\n")
}

/// Defines for a script what waits for a condition, and ends the script when that takes too long. What is started until then waits for
/// /tmp/go.
const WITHIN: &str = "within() { for try in $(seq 600); do if eval \"$1\"; then return; fi; sleep 0.1; done; \
                      echo \"not within a minute: $1\" >&2; touch /tmp/go; exit 1; }\n";

fn measure(cluster: &Cluster, user: User, script: &str) -> Result<Times> {
    times(&mut cluster.command("ctl", user, &["bash", "-c", script]))
}

/// The times that a command prints, and nothing else.
fn times(command: &mut Command) -> Result<Times> {
    let output = command.output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && stderr.is_empty(), "{command:?}\n{stderr}");
    let mut times = Times::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let (name, microseconds) =
            line.split_once('=').with_context(|| format!("unexpected output: {line}"))?;
        times.entry(name.to_owned()).or_default().push(microseconds.parse::<f64>()? / 1000.0);
    }
    Ok(times)
}

/// NaN for a contender that was not measured.
fn median(times: &Times, name: &str) -> f64 {
    let mut sorted = times.get(name).cloned().unwrap_or_default();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Prints the medians, and the rows that are made of them.
fn table(contenders: &[Contender], times: &Times, rows: &[Row], run: &mut Run) {
    for Contender { name, .. } in contenders {
        match median(times, name) {
            median if median.is_nan() => println!("  {name:<24}   failed"),
            median => println!("  {name:<24} {median:8.1}"),
        }
    }
    rows.iter().for_each(|row| run.record(row, times));
}

/// The program that serves a squashfs in the foreground, built for speed.
fn server_program() -> Result<PathBuf> {
    run_tool(Command::new("cargo").args(["build", "--quiet", "--release", "-p", "mizzen-squashfs"]))?;
    Ok(target_dir().join("release/squashfs-serve"))
}
