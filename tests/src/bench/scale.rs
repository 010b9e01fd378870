//! What starts of many nodes cost a file system: a model of three ways to bring an image to nodes, its picture, and its check on
//! virtual nodes. `vcluster bench scale` renews docs/scale.md and its picture.

use std::fmt::Write;
use std::fs;
use std::time::Instant;

use anyhow::{Result, ensure};

use super::document::replace_section;
use crate::copies::{LARGE, large_image};
use crate::{Cluster, SharedFs, Spec, User, repository};

/// A shared file system.
struct System {
    name: &'static str,
    /// What it reads in a second for all, and for one node, in bytes.
    all: f64,
    node: f64,
}

const SYSTEMS: [System; 3] = [
    System { name: "NFS, 1 GB/s", all: 1e9, node: 1e9 },
    System { name: "Lustre, 100 GB/s", all: 100e9, node: 2.5e9 },
    System { name: "slow, 100 MB/s", all: 100e6, node: 100e6 },
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

/// How an image comes to the nodes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    CopyFirst,
    ReadThrough,
    Broadcast,
}

impl Way {
    const ALL: [Way; 3] = [Way::CopyFirst, Way::ReadThrough, Way::Broadcast];

    fn name(self) -> &'static str {
        match self {
            Way::CopyFirst => "copied first",
            Way::ReadThrough => "read through",
            Way::Broadcast => "broadcast",
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
            let (mut reached, mut sends, mut level) = (0.0, 0.0, 1.0);
            while reached < nodes {
                sends += ((nodes - reached) / level).min(FANOUT);
                level *= FANOUT;
                reached += level;
            }
            // srun's machine reads alone.
            let sent = size / system.node.min(system.all) + sends * size / LINK + size / HASH;
            Cost { read: size, first: sent, local: sent }
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
const COLOURS: [&str; 3] = ["#b03a2e", "#1f618d", "#239b56"];
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
        let left = LEFT + 150.0 * number as f64;
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
        LEFT + 480.0
    );
    svg
}

/// What all virtual nodes of a check read together in a second: each has its part of it.
const CHECKED: u64 = 64 << 20;
/// What `cat /image` reads of its image, with the tables.
const CHECKED_TOUCHED: f64 = 2e6;

/// Starts an image on so many virtual nodes in each way that reads the file system, and compares.
fn check(nodes: u32) -> Result<String> {
    let toml = "network_file_systems = [\"fuse\"]\nstage_keep_free = \"\"\nstage_read_through = \"1m\"\n";
    let cluster = Cluster::start(Spec {
        nodes,
        shared: SharedFs::Fuse,
        mizzen_toml: Some(toml.to_owned()),
        ..Cluster::spec("bench-scale")
    })?;
    cluster.share(LARGE, large_image())?;
    let rate = CHECKED / u64::from(nodes);
    for node in 1..=nodes {
        let mount =
            format!("mkdir /slow; bindfs -o allow_other --read-rate={rate} /run/shared-backing /slow");
        let mounted = cluster.run_on(&format!("node{node}"), User::Root, &mount);
        ensure!(mounted.code == 0, "{}", mounted.text());
    }
    // What a step costs by itself.
    let step = |options: &str, image: &str| -> Result<f64> {
        let begin = Instant::now();
        let done =
            cluster.run(&format!("srun -Q -N{nodes} {options} --container={image} cat /image 2> /dev/null"));
        ensure!(done.stdout == "large\n".repeat(nodes as usize), "{}", done.text());
        Ok(begin.elapsed().as_secs_f64())
    };
    let bare = step("--container-stage=never", &format!("/shared/{LARGE}"))?;
    let size = large_image().len() as f64;
    let share = CHECKED as f64 / f64::from(nodes);
    let system = System { name: "check", all: CHECKED as f64, node: share };
    let mut text = String::new();
    for (way, option) in [(Way::ReadThrough, "auto"), (Way::CopyFirst, "always")] {
        for node in 1..=nodes {
            cluster.run_on(&format!("node{node}"), User::Root, "rm -rf /var/tmp/mizzen-2001");
        }
        let took = step(&format!("--container-stage={option}"), &format!("/slow/{LARGE}"))? - bare;
        let model = cost(way, &system, f64::from(nodes), size, CHECKED_TOUCHED).first;
        let _ = writeln!(text, "| {nodes} | {} | {model:.1} | {took:.1} |", way.name());
    }
    Ok(text)
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
        let mut table = "\n| nodes | way | model, s | measured, s |\n|---|---|---|---|\n".to_owned();
        for nodes in [4, 8, 16, 32] {
            let rows = check(nodes)?;
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
        assert_eq!(cost(Way::Broadcast, nfs, 100.0, 1e9, 1e7).read, 1e9);
    }
}
