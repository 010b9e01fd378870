//! Copies of images on the node: making one beside `cp` and fsync of the same file, and starting from one.

use anyhow::{Result, ensure};

use super::{Contender, measure, table, timed};
use crate::{Cluster, User};

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
    // Both contenders read from and write to the machine's disk; nothing of the file is in memory when they begin.
    let made =
        cluster.run_as_root("for i in 1 2 3 4; do cat /shared/np.sqsh; done > /var/tmp/large.sqsh; sync");
    ensure!(made.code == 0, "{}", made.text());
    let mut script = format!("for round in $(seq {}); do\n", rounds.div_ceil(3));
    for contender in &COPIES {
        script.push_str("rm -rf /var/tmp/copy /var/tmp/mizzen-0; sync; echo 3 > /proc/sys/vm/drop_caches\n");
        script.push_str(&timed(contender.name, contender.command));
    }
    script.push_str("done\nrm -rf /var/tmp/large.sqsh /var/tmp/copy /var/tmp/mizzen-0\n");
    println!("\ncopy of 4 images in one file to the node, not in memory before (ms)");
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
