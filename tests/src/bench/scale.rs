//! What starts of many nodes cost a file system: a model of four ways to bring an image to nodes, its picture, and its check on
//! virtual nodes. `vcluster bench scale` renews docs/scale.md and its picture.

use std::ffi::OsStr;
use std::fmt::Write;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use nix::sched::{CloneFlags, setns, unshare};
use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

use super::document::replace_section;
use crate::images::ImageTree;
use crate::{Cluster, Spec, User, repository};

/// A shared file system.
struct System {
    name: &'static str,
    /// What it reads in a second for all, and for one node, in bytes.
    all: f64,
    node: f64,
    /// The processors that all nodes share, where they are virtual ones on one machine.
    shared_cores: f64,
}

const SYSTEMS: [System; 3] = [
    System { name: "NFS, 1 GB/s", all: 1e9, node: 1e9, shared_cores: f64::INFINITY },
    System { name: "Lustre, 100 GB/s", all: 100e9, node: 2.5e9, shared_cores: f64::INFINITY },
    System { name: "slow, 100 MB/s", all: 100e6, node: 100e6, shared_cores: f64::INFINITY },
];
const NODES: [f64; 5] = [1.0, 10.0, 100.0, 1000.0, 10_000.0];
const SIZES: [f64; 3] = [1e9, 8e9, 65e9];

/// The part of an image that a program reads before its first own work.
const TOUCHED: f64 = 0.01;
/// What a copier fetches at most in a second while somebody waits: a megabyte in 80 ms.
const GIVING_WAY: f64 = 13e6;
/// The network of one node, for messages of Slurm, and what one core hashes, in bytes a second.
const LINK: f64 = 1.25e9;
const HASH: f64 = 1.5e9;
/// sbcast sends each block to so many nodes, which send it on to as many.
const FANOUT: f64 = 8.0;
/// What slurmd takes in with one core, and what one core packs for one node, in bytes a second: for 67 MB they need 0.105 s and 0.08 s of
/// processor time (Slurm 22.05).
const INTAKE: f64 = 0.64e9;
const PACK: f64 = 0.85e9;

/// How an image comes to the nodes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    CopyFirst,
    ReadThrough,
    Broadcast,
    /// With `stage_broadcast = "early"`.
    EarlyBroadcast,
}

impl Way {
    const ALL: [Way; 4] = [Way::CopyFirst, Way::ReadThrough, Way::Broadcast, Way::EarlyBroadcast];

    fn name(self) -> &'static str {
        match self {
            Way::CopyFirst => "copied first",
            Way::ReadThrough => "read through",
            Way::Broadcast => "broadcast",
            Way::EarlyBroadcast => "early broadcast",
        }
    }

    /// The value of `--container-stage`.
    fn option(self) -> &'static str {
        match self {
            Way::CopyFirst => "always",
            Way::ReadThrough => "auto",
            Way::Broadcast | Way::EarlyBroadcast => "bcast",
        }
    }
}

/// What it costs.
#[derive(Clone, Copy)]
struct Cost {
    /// Bytes read from the file system.
    read: f64,
    /// Seconds to the first instruction, on all nodes.
    first: f64,
    /// Seconds until all nodes have a copy.
    local: f64,
}

/// The model. Every node begins at the same moment; the file system is shared evenly, and nothing else uses it.
fn cost(way: Way, system: &System, nodes: f64, size: f64, touched: f64) -> Cost {
    let share = (system.all / nodes).min(system.node);
    match way {
        Way::CopyFirst => Cost { read: nodes * size, first: size / share, local: size / share },
        Way::ReadThrough => {
            // What is waited for has what the copier leaves of the node's share; at least half of it, as one of two readers.
            let first = touched / (share - GIVING_WAY).max(share / 2.0);
            Cost { read: nodes * size, first, local: (size / share).max(first) + size / HASH }
        }
        // To one node nothing is sent.
        Way::Broadcast if nodes <= 1.0 => cost(Way::CopyFirst, system, nodes, size, touched),
        Way::Broadcast => {
            let (mut reached, mut sends, mut level, mut levels) = (0.0, 0.0, 1.0, 0.0);
            while reached < nodes {
                sends += ((nodes - reached) / level).min(FANOUT);
                level *= FANOUT;
                reached += level;
                levels += 1.0;
            }
            // A block is sent when all nodes have the one before it.
            let apart = sends * size / LINK + levels * size / INTAKE + size / HASH;
            let together =
                nodes * size * (PACK.recip() + INTAKE.recip() + HASH.recip()) / system.shared_cores;
            // srun's machine reads alone.
            let sent = size / system.node.min(system.all) + apart.max(together);
            Cost { read: size, first: sent, local: sent }
        }
        Way::EarlyBroadcast if nodes <= 1.0 => cost(Way::ReadThrough, system, nodes, size, touched),
        Way::EarlyBroadcast => {
            // srun's machine reads as well.
            let first = touched / (system.all / (nodes + 1.0)).min(system.node);
            let sent = cost(Way::Broadcast, system, nodes, size, touched).local;
            Cost { read: size + nodes * touched, first, local: sent.max(first) }
        }
    }
}

/// Seconds, for people.
fn seconds(value: f64) -> String {
    match value {
        value if value < 0.95 => format!("{value:.2} s"),
        value if value < 120.0 => format!("{value:.0} s"),
        value if value < 7200.0 => format!("{:.0} min", value / 60.0),
        value => format!("{:.0} h", value / 3600.0),
    }
}

fn bytes(value: f64) -> String {
    if value < 1e12 { format!("{:.0} GB", value / 1e9) } else { format!("{:.0} TB", value / 1e12) }
}

/// The tables of the model.
fn tables() -> String {
    let mut text = String::new();
    for system in &SYSTEMS {
        let _ = writeln!(text, "\n### {}\n", system.name);
        text.push_str(
            "| image | nodes | way | read from the file system | first instruction | all local |\n",
        );
        text.push_str("|---|---|---|---|---|---|\n");
        for (size, nodes) in SIZES.iter().flat_map(|size| NODES.map(|nodes| (*size, nodes))) {
            for way in Way::ALL {
                let Cost { read, first, local } = cost(way, system, nodes, size, TOUCHED * size);
                let _ = writeln!(
                    text,
                    "| {} | {nodes} | {} | {} | {} | {} |",
                    bytes(size),
                    way.name(),
                    bytes(read),
                    seconds(first),
                    seconds(local)
                );
            }
        }
    }
    text
}

const LEFT: f64 = 70.0;
const WIDTH: f64 = 230.0;
const HEIGHT: f64 = 220.0;
const TOP: f64 = 60.0;
const GAP: f64 = 40.0;
const COLOURS: [&str; 4] = ["#b03a2e", "#1f618d", "#239b56", "#b9770e"];
/// Both axes are logarithmic: seconds from a tenth to ten million.
const LOWEST: f64 = -1.0;
const HIGHEST: f64 = 7.0;

/// The time to the first instruction by the number of nodes, for an image of 8 GB.
fn picture() -> String {
    let width = LEFT + (WIDTH + GAP) * SYSTEMS.len() as f64;
    let height = TOP + HEIGHT + 70.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<title>Seconds to the first instruction, image of 8 GB</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"12\" y=\"22\" font-size=\"15\" font-weight=\"bold\">Seconds to the first instruction, image of 8 GB</text>\n"
    );
    let y = |value: f64| TOP + HEIGHT * (1.0 - (value.log10() - LOWEST) / (HIGHEST - LOWEST));
    for (number, system) in SYSTEMS.iter().enumerate() {
        let left = LEFT + (WIDTH + GAP) * number as f64;
        let x = |nodes: f64| left + WIDTH * nodes.log10() / 4.0;
        let _ = writeln!(svg, "<text x=\"{left}\" y=\"{:.0}\">{}</text>", TOP - 10.0, system.name);
        for decade in 0..=(HIGHEST - LOWEST) as i32 {
            let value = 10_f64.powi(decade + LOWEST as i32);
            let at = y(value);
            let _ = writeln!(
                svg,
                "<line x1=\"{left}\" y1=\"{at:.1}\" x2=\"{:.1}\" y2=\"{at:.1}\" stroke=\"#dddddd\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#555555\">{value}</text>",
                left + WIDTH,
                left - 4.0,
                at + 4.0
            );
        }
        for nodes in NODES {
            let at = x(nodes);
            let _ = writeln!(
                svg,
                "<text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#555555\">{nodes}</text>",
                TOP + HEIGHT + 16.0
            );
        }
        for (way, colour) in Way::ALL.into_iter().zip(COLOURS) {
            let points: Vec<String> = (0..=40)
                .map(|step| 10_f64.powf(f64::from(step) / 10.0))
                .map(|nodes| {
                    let first = cost(way, system, nodes.round(), 8e9, TOUCHED * 8e9).first;
                    format!("{:.1},{:.1}", x(nodes), y(first.max(0.1)))
                })
                .collect();
            let _ = writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
                points.join(" ")
            );
        }
    }
    let bottom = TOP + HEIGHT + 44.0;
    for (number, (way, colour)) in Way::ALL.into_iter().zip(COLOURS).enumerate() {
        let left = LEFT + 140.0 * number as f64;
        let _ = writeln!(
            svg,
            "<rect x=\"{left}\" y=\"{:.0}\" width=\"22\" height=\"4\" fill=\"{colour}\"/>\
             <text x=\"{:.0}\" y=\"{bottom}\">{}</text>",
            bottom - 6.0,
            left + 28.0,
            way.name()
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{:.0}\" y=\"{bottom}\" fill=\"#555555\">by nodes</text>\n</svg>",
        LEFT + 600.0
    );
    svg
}

/// What the file system of a check reads in a second, for all virtual nodes together.
const CHECKED: u64 = 64 << 20;
/// The data in its image, which cannot be compressed: there are as many copies in memory as nodes.
const CHECKED_DATA: u64 = 64 << 20;
const CHECKED_ROUNDS: usize = 3;
const CHECKED_NODES: [u32; 4] = [4, 8, 16, 32];
/// No start takes longer.
const CHECKED_LIMIT: Duration = Duration::from_secs(180);
/// Where the file system is, and the file in everybody's home that ends the containers of a start.
const SLOW: &str = "/slow";
const GO: &str = "home/alice/go";

const SETTINGS: &str =
    "network_file_systems = [\"fuse\"]\nstage_keep_free = \"\"\nstage_read_through = \"1m\"\n";

/// Virtual nodes that share a file system.
struct Check {
    cluster: Cluster,
    nodes: u32,
}

impl Check {
    /// The file system is one FUSE server that reads only so much in a second, whoever asks; and nothing of it stays in the
    /// kernel's memory, which the nodes have together.
    fn start(nodes: u32, image: &[u8]) -> Result<Check> {
        let spec = Spec { nodes, mizzen_toml: Some(SETTINGS.to_owned()), ..Cluster::spec("bench-scale") };
        let cluster = Cluster::start(spec)?;
        cluster.share("scale.sqsh", image)?;
        let mount =
            format!("mkdir {SLOW}; bindfs -o allow_other,direct_io --read-rate={CHECKED} /shared {SLOW}");
        let mounted = cluster.run_as_root(&mount);
        ensure!(mounted.code == 0, "{}", mounted.text());
        show_everywhere(&cluster, nodes)?;
        Ok(Check { cluster, nodes })
    }

    fn root_of(&self, machine: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.cluster.pid_of(machine)))
    }

    fn names(&self) -> impl Iterator<Item = String> {
        (1..=self.nodes).map(|node| format!("node{node}"))
    }

    /// How many bytes the file system has read so far.
    fn read(&self) -> Result<f64> {
        let told = self.cluster.run_as_root("sed -n 's/^rchar: //p' /proc/$(pgrep -x bindfs)/io");
        told.stdout.trim().parse().with_context(|| told.text())
    }

    fn has_copy(&self, machine: &str) -> bool {
        let copies = fs::read_dir(self.root_of(machine).join("var/tmp/mizzen-2001"));
        let is_copy = |name: &OsStr| name.as_encoded_bytes().starts_with(b"sha256-");
        copies.into_iter().flatten().flatten().any(|entry| is_copy(&entry.file_name()))
    }

    /// A start on all nodes, of which none has anything. Its containers last until all have their copies, if they make any.
    fn measure(&self, option: &str) -> Result<Cost> {
        for machine in self.names().chain(["ctl".to_owned()]) {
            let _ = fs::remove_dir_all(self.root_of(&machine).join("var/tmp/mizzen-2001"));
        }
        let go = self.root_of("ctl").join(GO);
        let _ = fs::remove_file(&go);
        let before = self.read()?;
        let script = format!(
            "srun -Q -u -N{} --container={SLOW}/scale.sqsh --container-stage={option} \
             sh -c 'cat /image; until [ -e /{GO} ]; do sleep 0.2; done' 2> /dev/null",
            self.nodes
        );
        let begin = Instant::now();
        let mut srun = self
            .cluster
            .command("ctl", User::Alice, &["bash", "-c", &script])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut lines = BufReader::new(srun.stdout.take().context("no pipe")?).lines();
        for node in 0..self.nodes {
            let line = lines.next().transpose()?;
            ensure!(line.as_deref() == Some("scale"), "{option}: {node} of {} nodes: {line:?}", self.nodes);
        }
        let first = begin.elapsed().as_secs_f64();
        while option != "never" && !self.names().all(|node| self.has_copy(&node)) {
            ensure!(begin.elapsed() < CHECKED_LIMIT, "{option}: not all of {} nodes have a copy", self.nodes);
            std::thread::sleep(Duration::from_millis(20));
        }
        let local = begin.elapsed().as_secs_f64();
        let read = self.read()? - before;
        fs::write(&go, "")?;
        ensure!(srun.wait()?.success() && self.cluster.all_idle(), "{option}: the step did not end well");
        Ok(Cost { read, first, local })
    }

    /// The table's rows for so many nodes.
    fn rows(&self, size: f64) -> Result<String> {
        // A start without copies: what a step costs by itself, and what each node reads for it.
        let mut measured: Vec<Vec<Cost>> = Vec::new();
        for _ in 0..CHECKED_ROUNDS {
            let mut round = vec![self.measure("never")?];
            for way in Way::ALL {
                let word = if way == Way::EarlyBroadcast { "early" } else { "first" };
                let toml = format!("{SETTINGS}stage_broadcast = \"{word}\"\n");
                self.cluster.write_everywhere("/etc/mizzen/mizzen.toml", &toml)?;
                round.push(self.measure(way.option())?);
            }
            measured.push(round);
        }
        let median = |contender: usize, part: fn(&Cost) -> f64| {
            let mut sorted: Vec<f64> = measured.iter().map(|round| part(&round[contender])).collect();
            sorted.sort_by(f64::total_cmp);
            sorted[sorted.len() / 2]
        };
        let nodes = f64::from(self.nodes);
        let cores = std::thread::available_parallelism()?.get() as f64;
        let system = System { name: "check", all: CHECKED as f64, node: CHECKED as f64, shared_cores: cores };
        let touched = median(0, |cost| cost.read) / nodes;
        let step = (median(0, |cost| cost.first) - touched * nodes / system.all).max(0.0);
        let mut text = String::new();
        for (number, way) in Way::ALL.into_iter().enumerate() {
            let model = cost(way, &system, nodes, size, touched);
            let found = Cost {
                read: median(number + 1, |cost| cost.read),
                first: median(number + 1, |cost| cost.first) - step,
                local: median(number + 1, |cost| cost.local) - step,
            };
            let _ = writeln!(
                text,
                "| {} | {} | {:.0} | {:.0} | {:.1} | {:.1} | {:.1} | {:.1} |",
                self.nodes,
                way.name(),
                model.read / 1e6,
                found.read / 1e6,
                model.first,
                found.first,
                model.local,
                found.local
            );
            for (what, model, found) in [
                ("read", model.read, found.read),
                ("first", model.first, found.first),
                ("local", model.local, found.local),
            ] {
                if !(2.0 / 3.0..=4.0 / 3.0).contains(&(found / model)) {
                    println!(
                        "{} nodes, {}: {what} is {found:.2}, and not {model:.2}",
                        self.nodes,
                        way.name()
                    );
                }
            }
        }
        Ok(text)
    }
}

/// Mounts the login node's file system on all nodes as well: the same one, with the same server.
fn show_everywhere(cluster: &Cluster, nodes: u32) -> Result<()> {
    // Opened here, where these processes have these numbers.
    let namespace = |machine: &str| File::open(format!("/proc/{}/ns/mnt", cluster.pid_of(machine)));
    let login = namespace("ctl")?;
    let others: Vec<File> =
        (1..=nodes).map(|node| namespace(&format!("node{node}"))).collect::<io::Result<_>>()?;
    // A thread has a mount namespace of its own once it shares no current directory with others.
    let mount_all = move || -> Result<()> {
        unshare(CloneFlags::CLONE_FS)?;
        setns(&login, CloneFlags::CLONE_NEWNS)?;
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let trees: Vec<OwnedFd> =
            others.iter().map(|_| open_tree(CWD, SLOW, flags)).collect::<rustix::io::Result<_>>()?;
        for (namespace, tree) in others.iter().zip(&trees) {
            setns(namespace, CloneFlags::CLONE_NEWNS)?;
            fs::create_dir_all(SLOW)?;
            move_mount(tree, "", CWD, SLOW, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
        }
        Ok(())
    };
    std::thread::spawn(mount_all).join().map_err(|_| anyhow!("the file system was not mounted"))?
}

/// The image of a check.
fn checked_image() -> Result<Vec<u8>> {
    let tree = ImageTree::busybox()?;
    tree.file("image", "scale\n")?;
    io::copy(&mut File::open("/dev/urandom")?.take(CHECKED_DATA), &mut File::create(tree.path("data"))?)?;
    tree.squashfs(&["-comp", "zstd", "-Xcompression-level", "1"])
}

const BEGIN: &str = "<!-- model: made by `vcluster bench scale` -->";
const CHECK: &str = "<!-- check: made by `vcluster bench scale` -->";
const END: &str = "<!-- end -->";

/// Renews the document: the tables and the picture; with `checked`, the check as well.
pub fn run(checked: bool) -> Result<()> {
    let path = repository().join("docs/scale.md");
    let mut text = fs::read_to_string(&path)?;
    text = replace_section(&text, BEGIN, END, &format!("\n{}\n", tables()))?;
    if checked {
        let mut table = "\n| nodes | way | MB read, model | measured | first instruction, s, model | measured | all local, s, model | measured |\n\
                         |---|---|---|---|---|---|---|---|\n"
            .to_owned();
        let image = checked_image()?;
        for nodes in CHECKED_NODES {
            let rows = Check::start(nodes, &image)?.rows(image.len() as f64)?;
            print!("{rows}");
            table.push_str(&rows);
        }
        text = replace_section(&text, CHECK, END, &format!("\n{table}\n"))?;
    }
    fs::write(path, text)?;
    fs::write(repository().join("docs/performance/scale.svg"), picture())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_says_what_is_plain() {
        let nfs = &SYSTEMS[0];
        let alone = cost(Way::CopyFirst, nfs, 1.0, 1e9, 1e7);
        assert_eq!((alone.read, alone.first), (1e9, 1.0));
        let many = cost(Way::CopyFirst, nfs, 100.0, 1e9, 1e7);
        assert_eq!((many.read, many.first), (1e11, 100.0));
        let through = cost(Way::ReadThrough, nfs, 100.0, 1e9, 1e7);
        assert!(through.first < many.first / 40.0 && through.local > many.local, "{}", through.first);
        let broadcast = cost(Way::Broadcast, nfs, 100.0, 1e9, 1e7);
        assert_eq!(broadcast.read, 1e9);
        let early = cost(Way::EarlyBroadcast, nfs, 100.0, 1e9, 1e7);
        assert_eq!((early.read, early.local), (2e9, broadcast.local));
        assert!(early.first < through.first * 1.02, "{}", early.first);
    }
}
