//! First starts of a large image on a slow network file system: where it is, copied first, and copied meanwhile.
//!
//! The file system is a FUSE server that reads 200 MB in a second, mounted anew before each start, so that nothing of the image
//! is in memory; what is measured against each other takes turns.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::figures::{Measure, Part, Row, Run};
use super::{Contender, Times, WITHIN, measure, table, timed};
use crate::release::{Release, make_rootfs};
use crate::{Cluster, SharedFs, Spec, User, run_tool, target_dir};

/// What the file system reads in a second.
const RATE: &str = "200M";

/// How much is measured.
pub struct Form {
    /// As docs/performance/bench.csv has it.
    pub part: &'static str,
    /// As docs/performance.md has it.
    pub title: &'static str,
    /// Whether the goals are set for it.
    pub has_goals: bool,
    /// The data in the image beside Debian with numpy, in files of a sixteenth of it.
    pub data: u64,
    pub rounds: u32,
    /// Whether first starts are all.
    pub starts_alone: bool,
}

/// By itself.
pub const LONG: Form = Form {
    part: "read-through",
    title: "an image of 4 GiB on a file system that reads 200 MB/s",
    has_goals: true,
    data: 4 << 30,
    rounds: 5,
    starts_alone: false,
};
/// A part of `make bench`.
pub const SHORT: Form = Form {
    part: "read-through-short",
    title: "an image of 512 MiB on a file system that reads 200 MB/s",
    has_goals: false,
    data: 512 << 20,
    rounds: 3,
    starts_alone: false,
};

const IN_PLACE: &str = "in place";
const MEANWHILE: &str = "copied meanwhile";
const FIRST: &str = "copied first";
const AGAIN: &str = "second start";
const LOCAL: &str = "a local image";

const TRUE: [Contender; 2] = [
    Contender { name: IN_PLACE, command: "mizzen run --stage=never /slow/large.sqsh /bin/true" },
    Contender { name: MEANWHILE, command: "mizzen run --stage=auto /slow/large.sqsh /bin/true" },
];
const NUMPY: [Contender; 2] = [
    Contender {
        name: IN_PLACE,
        command: "mizzen run --stage=never /slow/large.sqsh python3 -c 'import numpy'",
    },
    Contender {
        name: MEANWHILE,
        command: "mizzen run --stage=auto /slow/large.sqsh python3 -c 'import numpy'",
    },
];
const EVERYTHING: [Contender; 2] = [
    Contender {
        name: FIRST,
        command: "mizzen run --stage=always /slow/large.sqsh sh -c 'cat /data/* > /dev/null' 2> /dev/null",
    },
    Contender {
        name: MEANWHILE,
        command: "mizzen run --stage=auto /slow/large.sqsh sh -c 'cat /data/* > /dev/null'",
    },
];
const SECOND: [Contender; 2] = [
    Contender { name: LOCAL, command: "mizzen run --stage=auto /local/large.sqsh python3 -c 'import numpy'" },
    Contender { name: AGAIN, command: "mizzen run --stage=auto /slow/large.sqsh python3 -c 'import numpy'" },
];

/// What runs before second starts, until both have what a start reads unpacked: the image of the node, and the copy. That is kept by
/// the name of the program.
const LEARN: &str = "mizzen run --stage=auto IMAGE python3 -c 'import numpy, os, time\n\
                     while not os.path.exists(\"/tmp/go\"): time.sleep(0.1)'";

/// What is measured.
pub fn part(form: &Form) -> Part {
    let row = |name, one, other, goal| {
        let row = Row::new(name, Measure::Ratio(one, other));
        if form.has_goals { row.goal(goal) } else { row }
    };
    let rows = vec![
        row("first start of `true`, by a start in place", MEANWHILE, IN_PLACE, 1.3),
        row("first start, import numpy, by a start in place", MEANWHILE, IN_PLACE, 1.3),
        row("first start of a job that reads everything, by a copy first", MEANWHILE, FIRST, 1.1),
        row("second start, import numpy, by a local image", AGAIN, LOCAL, 1.05),
    ];
    Part { name: form.part, title: form.title, rows }
}

/// Measures all of it, or first starts alone.
pub fn run(form: &Form) -> Result<()> {
    let Form { data, rounds, starts_alone, .. } = *form;
    let part = part(form);
    let cluster = start(data)?;
    let mut run = Run::begin(&part)?;
    println!(
        "\nan image of {} MB on a file system that reads {RATE}B/s; {rounds} rounds; medians",
        data >> 20
    );
    let mut rows = part.rows.chunks(1);
    for (what, contenders, rounds) in [
        ("first start of `true` (ms)", &TRUE, rounds),
        ("first start, import numpy (ms)", &NUMPY, rounds),
        ("first start of a job that reads everything (ms)", &EVERYTHING, rounds.div_ceil(4)),
    ] {
        if starts_alone && what.contains("everything") {
            return run.save();
        }
        println!("\n{what}");
        let mut script = String::new();
        for contender in (0..rounds).flat_map(|round| turns(contenders, round)) {
            script.push_str(&renew("rm -rf /var/tmp/mizzen-2001"));
            script.push_str(&timed(contender.name, &as_alice(contender.command)));
        }
        table(contenders, &measured(&cluster, &script)?, rows.next().unwrap_or_default(), &mut run);
    }
    println!("\nsecond start, import numpy (ms)");
    // The copy itself, as a file of the node.
    let mut script = renew("rm -rf /var/tmp/mizzen-2001");
    script.push_str(&as_alice("mizzen stage /slow/large.sqsh > /dev/null 2>&1"));
    script.push_str("\nln /var/tmp/mizzen-2001/sha256-* /var/tmp/large.sqsh; mkdir -p /local; mount --bind /var/tmp /local\n");
    // An image that was linked a moment ago is not unpacked.
    script.push_str("sleep 2; rm -f /tmp/go\n");
    for image in ["/local/large.sqsh", "/slow/large.sqsh"] {
        script.push_str(&format!("{} &\n", as_alice(&LEARN.replace("IMAGE", image))));
    }
    script.push_str("within '[ $(ls /var/tmp/mizzen-2001/unpacked-*/manifest 2> /dev/null | wc -l) -ge 2 ]'; touch /tmp/go; wait\n");
    for contender in (0..rounds).flat_map(|round| turns(&SECOND, round)) {
        script.push_str(&timed(contender.name, &as_alice(contender.command)));
    }
    table(&SECOND, &measured(&cluster, &script)?, rows.next().unwrap_or_default(), &mut run);
    run.save()
}

/// Each is the first one in every other round.
fn turns(contenders: &'static [Contender; 2], round: u32) -> [&'static Contender; 2] {
    let first = (round % 2) as usize;
    [&contenders[first], &contenders[1 - first]]
}

/// The file system mounted anew, when the last start has ended.
fn renew(before: &str) -> String {
    format!(
        "until ! pgrep -u alice mizzen- > /dev/null; do sleep 0.05; done\n{before}\n\
         umount /slow 2> /dev/null; bindfs -o allow_other --read-rate={RATE} /run/shared-backing /slow\n"
    )
}

fn as_alice(command: &str) -> String {
    format!("runuser -u alice -- bash -c '{}'", command.replace('\'', "'\\''"))
}

fn measured(cluster: &Cluster, script: &str) -> Result<Times> {
    measure(cluster, User::Root, &format!("{WITHIN}mkdir -p /slow; cd /\n{script}"))
}

fn start(data: u64) -> Result<Cluster> {
    let numpy = make_rootfs(Release::Slurm22_05.debian(), "numpy", "python3,python3-numpy")?;
    let toml = "network_file_systems = [\"fuse\"]\nstage_keep_free = \"\"\nstage_max_size = \"\"\n";
    let cluster = Cluster::start(Spec {
        nodes: 1,
        shared: SharedFs::Fuse,
        mizzen_toml: Some(toml.to_owned()),
        ..Cluster::spec("bench-through")
    })?;
    cluster.share("large.sqsh", &fs::read(image(&numpy, data)?)?)?;
    Ok(cluster)
}

/// The image: made once, of what cannot be compressed, and of numpy.
fn image(numpy: &Path, data: u64) -> Result<PathBuf> {
    let image = target_dir().join(format!("bench-{}.sqsh", data >> 20));
    if image.metadata().is_ok_and(|found| found.len() > data) {
        return Ok(image);
    }
    let tree = target_dir().join("bench-tree");
    run_tool(Command::new("cp").arg("-a").args([numpy, &tree]))?;
    fs::create_dir_all(tree.join("data"))?;
    for number in 0..16 {
        let mut random = File::open("/dev/urandom")?.take(data / 16);
        io::copy(&mut random, &mut File::create(tree.join(format!("data/{number}")))?)?;
    }
    let options = ["-comp", "zstd", "-Xcompression-level", "1", "-noappend", "-quiet", "-no-progress"];
    let left_out = ["-e", "var/cache", "var/lib/apt"];
    run_tool(Command::new("mksquashfs").args([&tree, &image]).args(options).args(left_out))?;
    fs::remove_dir_all(&tree)?;
    ensure!(image.metadata().context("no image was made")?.len() > data, "the image is too small");
    Ok(image)
}
