//! Copies of images on the node: making one beside `cp` and fsync of the same file, and starting from one.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, ensure};

use super::{Contender, measure, table, timed};
use crate::{Cluster, User, run_tool, target_dir};

const CP: &str = "cp and fsync";
const STAGE: &str = "mizzen stage";
const COPIES: [Contender; 2] = [
    Contender { name: CP, command: "cp /var/tmp/large.sqsh /var/tmp/copy && sync /var/tmp/copy" },
    Contender { name: STAGE, command: "mizzen stage /var/tmp/large.sqsh > /dev/null 2>&1 || echo failed" },
];

const IN_PLACE: &str = "mizzen run, in place";
const STAGED: &str = "mizzen run, staged";
const STARTS: [Contender; 2] = [
    Contender { name: IN_PLACE, command: "mizzen run --stage=never /shared/np.sqsh /bin/true" },
    Contender { name: STAGED, command: "mizzen run --stage=always /shared/np.sqsh /bin/true" },
];

/// Measures both.
pub fn run(cluster: &Cluster, rounds: u32) -> Result<()> {
    // Both contenders read from and write to a disk; nothing of the file is in memory when they begin.
    let disk = Disk::new()?;
    let made = cluster.run_as_root(&format!(
        "mount {} /var/tmp && chmod 1777 /var/tmp && for i in 1 2 3 4; do cat /shared/np.sqsh; done > /var/tmp/large.sqsh; sync",
        disk.device
    ));
    ensure!(made.code == 0, "{}", made.text());
    let mut script = format!("for round in $(seq {}); do\n", rounds.div_ceil(3));
    for contender in &COPIES {
        script.push_str("rm -rf /var/tmp/copy /var/tmp/mizzen-0; sync; echo 3 > /proc/sys/vm/drop_caches\n");
        script.push_str(&timed(contender.name, contender.command));
    }
    script.push_str("done\numount /var/tmp\n");
    println!("\ncopy of 4 images in one file on a disk, not in memory before (ms)");
    table(&COPIES, &measure(cluster, User::Root, &script)?, &[(STAGE, CP)]);
    let mut script = "mizzen run --stage=always /shared/np.sqsh /bin/true 2> /dev/null\n".to_owned();
    script.push_str(&format!("for round in $(seq {}); do\n", rounds * 4));
    for contender in &STARTS {
        script.push_str(&timed(contender.name, contender.command));
    }
    script.push_str("done\n");
    println!("\nsecond start of an image on the node, and a start in place (ms)");
    table(&STARTS, &measure(cluster, User::Alice, &script)?, &[(STAGED, IN_PLACE)]);
    Ok(())
}

/// An ext4 on the disk that this directory is on: the machines of a cluster have their files in memory.
struct Disk {
    file: PathBuf,
    device: String,
}

impl Disk {
    fn new() -> Result<Disk> {
        let file = target_dir().join("bench-disk");
        File::create(&file)?.set_len(3 << 30)?;
        run_tool(Command::new("mkfs.ext4").arg("-q").arg(&file))?;
        // Past the memory of the outer file system, which would hold everything twice.
        let attach = ["--find", "--show", "--direct-io=on"];
        let device = run_tool(Command::new("losetup").args(attach).arg(&file))?;
        Ok(Disk { file, device: device.trim().to_owned() })
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = run_tool(Command::new("losetup").arg("--detach").arg(&self.device));
        let _ = fs::remove_file(&self.file);
    }
}
