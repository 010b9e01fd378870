//! Copies of images on the node: making one beside `cp` and fsync of the same file, and starting from one.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result};

use super::figures::{Measure, Part, Row, Run};
use super::{Contender, measure, table, timed, times};
use crate::{Cluster, User, target_dir};

const CP: &str = "cp and fsync";
const STAGE: &str = "mizzen stage";
const COPIES: [Contender; 2] = [
    Contender { name: CP, command: "cp /var/tmp/large.sqsh /var/tmp/copy && sync /var/tmp/copy" },
    Contender {
        name: STAGE,
        command: "mizzen stage /var/tmp/large.sqsh > /var/tmp/said 2>&1 || cat /var/tmp/said",
    },
];

const IN_PLACE: &str = "mizzen run, in place";
const STAGED: &str = "mizzen run, staged";
const STARTS: [Contender; 2] = [
    Contender { name: IN_PLACE, command: "mizzen run --stage=never /shared/np.sqsh /bin/true" },
    Contender { name: STAGED, command: "mizzen run --stage=always /shared/np.sqsh /bin/true" },
];

/// What is measured.
pub fn part() -> Part {
    Part { name: "staging", title: "copies on the node", rows: vec![copy_row(), start_row()] }
}

fn copy_row() -> Row {
    Row::new("copy with sha256 from a disk, by `cp` and fsync", Measure::Ratio(STAGE, CP)).goal(1.1)
}

fn start_row() -> Row {
    Row::new("second start, from the copy, by a start in place", Measure::Ratio(STAGED, IN_PLACE))
}

/// Measures both.
pub fn run(cluster: &Cluster, rounds: u32) -> Result<()> {
    let mut run = Run::begin(&part())?;
    copies(cluster, rounds, &mut run)?;
    let mut script = "mizzen run --stage=always /shared/np.sqsh /bin/true 2> /dev/null\n".to_owned();
    script.push_str(&format!("for round in $(seq {}); do\n", rounds * 4));
    for contender in &STARTS {
        script.push_str(&timed(contender.name, contender.command));
    }
    script.push_str("done\n");
    println!("\nsecond start of an image on the node, and a start in place (ms)");
    table(&STARTS, &measure(cluster, User::Alice, &script)?, &[start_row()], &mut run);
    run.save()
}

/// Both contenders read from and write to a disk, and nothing of the file is in memory when they begin. On this machine,
/// because those of a cluster have their files in memory; a directory below target/ takes the place of /var/tmp.
fn copies(cluster: &Cluster, rounds: u32, run: &mut Run) -> Result<()> {
    let disk = target_dir().join("bench-disk");
    fs::create_dir_all(&disk)?;
    let image = cluster.command("ctl", User::Root, &["cat", "/shared/np.sqsh"]).output()?.stdout;
    let mut large = image.repeat(4);
    let length = (large.len() as u64).to_le_bytes();
    // Its superblock says how long an image is; of a file that is much longer no copy is made.
    large.get_mut(40..48).context("an image without a superblock")?.copy_from_slice(&length);
    fs::write(disk.join("large.sqsh"), large)?;
    let mut script = format!("mount --bind {} /var/tmp\n", disk.display());
    // Each is the first one in every other round: what the one before leaves to the disk is not always left to the same.
    for contender in
        (0..rounds).flat_map(|round| [&COPIES[(round % 2) as usize], &COPIES[((round + 1) % 2) as usize]])
    {
        script.push_str("rm -rf /var/tmp/copy /var/tmp/mizzen-0; sync; echo 3 > /proc/sys/vm/drop_caches\n");
        script.push_str(&timed(contender.name, contender.command));
    }
    println!("\ncopy of 4 images in one file on a disk, not in memory before (ms)");
    let programs = target_dir().join("stage/usr/bin");
    let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", programs.display());
    let mut command = Command::new("unshare");
    command.args(["--mount", "bash", "-c", &script]).env("PATH", path);
    let times = times(&mut command);
    fs::remove_dir_all(&disk)?;
    table(&COPIES, &times?, &[copy_row()], run);
    Ok(())
}
