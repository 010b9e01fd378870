//! Imports: an image of about a gigabyte in six layers, from a registry on this machine to a squashfs, beside skopeo, umoci and
//! mksquashfs, which is what other programs do one after the other.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::figures::{Measure, Part, Row, Run};
use super::{Times, median};
use crate::registry::{Layout, LocalRegistry};
use crate::release::{Release, make_rootfs};
use crate::{run_tool, target_dir};

/// Runs a shell command; prints its seconds, the seconds of all CPUs, and the most memory that one of its processes had, in MiB.
const MEASURED: &str = "import os, resource, subprocess, sys, time\n\
    begin = time.time()\n\
    subprocess.run(['bash', '-ec', sys.argv[1]], check=True)\n\
    used = resource.getrusage(resource.RUSAGE_CHILDREN)\n\
    print(time.time() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)\n";

/// What the two commands take: wall time, time of all CPUs, memory.
const OURS: [&str; 3] = ["mizzen import, s", "mizzen import, CPU s", "mizzen import, MiB"];
const THEIRS: [&str; 3] = ["others, s", "others, CPU s", "others, MiB"];
/// What a gigabyte of an image takes whose base is cached.
const DERIVED: &str = "derived, s per GB";

/// What is measured.
pub fn part() -> Part {
    let row = |what: &str, number: usize| {
        let name = format!("6 layers from a registry, by skopeo, umoci and mksquashfs: {what}");
        Row::new(name, Measure::Ratio(OURS[number], THEIRS[number]))
    };
    let rows = vec![
        row("wall time", 0).unit("s").goal(0.25),
        row("CPU time", 1).unit("s").goal(0.25),
        row("memory of the largest process", 2).unit("MiB"),
        Row::new("one more layer on a base that is cached, per GB of the image", Measure::Amount(DERIVED))
            .unit("s")
            .goal(1.0),
    ];
    Part { name: "import", title: "imports", rows }
}

/// Measures all, in turns.
pub fn run(rounds: u32) -> Result<()> {
    let part = part();
    let mut run = Run::begin(&part)?;
    let directory = target_dir().join("bench-import");
    fs::create_dir_all(&directory)?;
    let directory = directory.canonicalize()?;
    let registry = LocalRegistry::start()?;
    let size = fill(&registry)?;
    println!("\nimport of {size:.2} GB in 6 layers (gzip), {rounds} rounds, medians: s, CPU s, MiB");
    let from = |name: &str| format!("docker://{}/{name}", registry.address());
    let ours = format!("rm -f out.sqsh; mizzen import --quiet --no-cache -o out.sqsh {}", from("bench:six"));
    let cached = format!(
        // What the first one has written is on disk before the second begins: its base was cached long ago.
        "rm -rf cache out.sqsh; mizzen import --quiet -o out.sqsh {}; rm out.sqsh; sync -f .; s=$EPOCHREALTIME; \
         mizzen import --quiet -o out.sqsh {}; e=$EPOCHREALTIME; echo $((${{e/./}} - ${{s/./}})) > derived",
        from("bench:five"),
        from("bench:six"),
    );
    let theirs = format!(
        "rm -rf oci bundle out.sqsh; skopeo copy --quiet --insecure-policy --src-tls-verify=false {} oci:oci:b; \
         umoci unpack --image oci:b bundle > /dev/null; \
         mksquashfs bundle/rootfs out.sqsh -comp zstd -Xcompression-level 3 -quiet -no-progress",
        from("bench:six"),
    );
    let mut times = Times::new();
    let mut push = |name: &str, number| times.entry(name.to_owned()).or_default().push(number);
    for _ in 0..rounds {
        for (names, script) in [(OURS, &ours), (THEIRS, &theirs)] {
            let numbers = measured(&directory, script)?;
            names.into_iter().zip(numbers).for_each(|(name, number)| push(name, number));
        }
        measured(&directory, &cached)?;
        let microseconds: f64 = fs::read_to_string(directory.join("derived"))?.trim().parse()?;
        push(DERIVED, microseconds / 1e6 / size);
    }
    fs::remove_dir_all(&directory)?;
    for (name, numbers) in [("mizzen import", OURS), ("skopeo, umoci, mksquashfs", THEIRS)] {
        let [wall, cpu, memory] = numbers.map(|name| median(&times, name));
        println!("  {name:<28} {wall:8.1} {cpu:8.1} {memory:8.0}");
    }
    part.rows.iter().for_each(|row| run.record(row, &times));
    run.save()
}

/// Fills the registry; returns how many gigabytes the files of the image have.
fn fill(registry: &LocalRegistry) -> Result<f64> {
    let numpy = make_rootfs(Release::Slurm22_05.debian(), "numpy", "python3,python3-numpy")?;
    let trixie = Release::Slurm24_11.rootfs()?;
    let trees = [
        (numpy.clone(), "/"),
        (Release::Slurm22_05.rootfs()?.join("usr"), "/opt/one"),
        (trixie.join("usr/bin"), "/opt/two/bin"),
        (trixie.join("usr/lib"), "/opt/two/lib"),
        (Release::Slurm26_05.rootfs()?.join("usr/lib"), "/opt/three"),
        (numpy.join("usr/share"), "/opt/four"),
    ];
    let layout = Layout::new()?;
    // The second has a layer more than the first.
    for (tag, count) in [("five", 5), ("six", 6)] {
        layout.image(tag, &[], &[])?;
        for (tree, at) in &trees[..count] {
            let image = format!("{}:{tag}", layout.path().display());
            run_tool(Command::new("umoci").args(["insert", "--image", &image]).arg(tree).arg(at))?;
        }
        registry.push(&layout, tag, &format!("bench:{tag}"), &[])?;
    }
    let bytes = |tree: &Path| -> Result<f64> {
        let du = run_tool(Command::new("du").args(["-sb", "--"]).arg(tree))?;
        Ok(du.split_whitespace().next().context("du is silent")?.parse::<f64>()?)
    };
    trees.iter().map(|(tree, _)| bytes(tree)).sum::<Result<f64>>().map(|bytes| bytes / 1e9)
}

fn measured(directory: &Path, script: &str) -> Result<[f64; 3]> {
    let programs = target_dir().join("stage/usr/bin").canonicalize()?;
    let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", programs.display());
    let mut command = Command::new("python3");
    command.args(["-c", MEASURED, script]).current_dir(directory);
    command.env("PATH", path).env("XDG_CACHE_HOME", directory.join("cache")).env("HOME", directory);
    let text = run_tool(&mut command)?;
    let numbers: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [wall, cpu, memory] = numbers[..] else { bail!("unexpected output: {text}") };
    Ok([wall, cpu, memory])
}
