//! Imports: an image of about a gigabyte in six layers, from a registry on this machine to a squashfs, beside skopeo, umoci and
//! mksquashfs, which is what other programs do one after the other.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::registry::{Layout, LocalRegistry};
use crate::release::{Release, make_rootfs};
use crate::{run_tool, target_dir};

/// Runs a shell command; prints its seconds, the seconds of all CPUs, and the most memory that one of its processes had, in MiB.
const MEASURED: &str = "import os, resource, subprocess, sys, time\n\
    begin = time.time()\n\
    subprocess.run(['bash', '-ec', sys.argv[1]], check=True)\n\
    used = resource.getrusage(resource.RUSAGE_CHILDREN)\n\
    print(time.time() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)\n";

/// What one command took.
#[derive(Clone, Copy)]
struct Cost {
    wall: f64,
    cpu: f64,
    memory: f64,
}

/// Measures all, in turns.
pub fn run(rounds: u32) -> Result<()> {
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
    let (mut mine, mut others, mut derived) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        mine.push(measured(&directory, &ours)?);
        others.push(measured(&directory, &theirs)?);
        measured(&directory, &cached)?;
        derived.push(fs::read_to_string(directory.join("derived"))?.trim().parse::<f64>()? / 1e6);
    }
    fs::remove_dir_all(&directory)?;
    let (mine, others) = (medians(&mine), medians(&others));
    for (name, cost) in [("mizzen import", mine), ("skopeo, umoci, mksquashfs", others)] {
        println!("  {name:<28} {:8.1} {:8.1} {:8.0}", cost.wall, cost.cpu, cost.memory);
    }
    println!("  wall {:.2}, CPU {:.2}", mine.wall / others.wall, mine.cpu / others.cpu);
    derived.sort_by(f64::total_cmp);
    println!("  one more layer on a base that is cached, s per GB: {:.2}", derived[derived.len() / 2] / size);
    Ok(())
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

fn measured(directory: &Path, script: &str) -> Result<Cost> {
    let programs = target_dir().join("stage/usr/bin").canonicalize()?;
    let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", programs.display());
    let mut command = Command::new("python3");
    command.args(["-c", MEASURED, script]).current_dir(directory);
    command.env("PATH", path).env("XDG_CACHE_HOME", directory.join("cache")).env("HOME", directory);
    let text = run_tool(&mut command)?;
    let numbers: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [wall, cpu, memory] = numbers[..] else { anyhow::bail!("unexpected output: {text}") };
    Ok(Cost { wall, cpu, memory })
}

fn medians(costs: &[Cost]) -> Cost {
    let middle = |of: fn(&Cost) -> f64| {
        let mut sorted: Vec<f64> = costs.iter().map(of).collect();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
    };
    Cost { wall: middle(|c| c.wall), cpu: middle(|c| c.cpu), memory: middle(|c| c.memory) }
}
