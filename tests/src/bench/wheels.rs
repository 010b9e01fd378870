//! `import tensorflow` and `import torch` in a new container, first and second start on a node, in one and in eight processes,
//! beside an unpacked directory, squashfuse_ll and the kernel's squashfs.

use anyhow::{Context, Result, ensure};

use super::figures::{Measure, Part, Row, Run};
use super::{Contender, Times, WITHIN, measure, table, timed};
use crate::examples::Example;
use crate::images::pack;
use crate::release::{Release, make_rootfs};
use crate::{Cluster, Spec, User};

const DIRECTORY: &str = "bwrap, directory";
const FIRST: &str = "mizzen run, first start";
const SECOND: &str = "mizzen run, second start";
const AFTER_SHORT: &str = "second start after a short first one";
const LL: &str = "squashfuse_ll";
const KERNEL: &str = "kernel squashfs";
const PLAIN: &str = "mizzen run, uncompressed";
const PLAIN_LL: &str = "squashfuse_ll, uncompressed";
const PLAIN_KERNEL: &str = "kernel squashfs, uncompressed";

/// A first start that runs until its files are unpacked: what a job does that lasts longer than its start.
const LEARN: &str = "mizzen cache remove --all > /dev/null; rm -f /tmp/go\n\
     mizzen run /local/wheels.sqsh sh -c 'python3 -c \"import MODULE\"; until [ -e /tmp/go ]; do sleep 0.1; done' &\n\
     within \"compgen -G '/var/tmp/mizzen-0/unpacked-*/manifest' > /dev/null\"; touch /tmp/go; wait\n";

/// A first start that ends with its import: only what it has written down by then helps the next one. (That is kept by the name of the
/// program, which is `sh` in all of them.)
const LEARN_SHORTLY: &str = "mizzen cache remove --all > /dev/null; mizzen run /local/wheels.sqsh sh -c 'python3 -c \"import MODULE\"'\n";

/// How much memory the file server has when everything was read through it, in KiB: without the pages of the image, which are the
/// kernel's.
const MEMORY: &str = "within '! pgrep -x mizzen-fuse > /dev/null'; rm -f /tmp/go /tmp/imported\n\
     mizzen run /local/wheels.sqsh sh -c 'python3 -c \"import MODULE\"; touch /tmp/imported; until [ -e /tmp/go ]; do sleep 0.1; done' &\n\
     within '[ -e /tmp/imported ]'\n\
     awk '/^Rss(Anon|Shmem):/ { sum += $2 } END { print sum }' /proc/$(pgrep -x mizzen-fuse)/status; touch /tmp/go; wait\n";
/// Of a server that knows nothing of the program, and of one that has the whole profile and inflates ahead what it says, because
/// nothing is unpacked.
const SERVERS: [(&str, &str); 2] = [
    ("at the first start", "mizzen cache remove --all > /dev/null\n"),
    ("with a full profile", "LEARN\nrm -rf /var/tmp/mizzen-0/unpack*\n[ -s /var/tmp/mizzen-0/profile-* ]\n"),
];
/// What it should be at most, in MiB.
const MEMORY_GOAL: f64 = 64.0;
const MEMORY_OF_SERVER: &str = "memory of the file server";

/// Each with what is done before, and not timed. PROGRAM is the import.
const CONTENDERS: [(Contender, &str); 9] = [
    (
        Contender {
            name: DIRECTORY,
            command: "bwrap --ro-bind /local/wheels / --dev /dev --proc /proc --bind /tmp /tmp PROGRAM",
        },
        "",
    ),
    (
        Contender { name: FIRST, command: "mizzen run /local/wheels.sqsh PROGRAM" },
        "mizzen cache remove --all > /dev/null",
    ),
    (Contender { name: SECOND, command: "mizzen run /local/wheels.sqsh PROGRAM" }, LEARN),
    (Contender { name: AFTER_SHORT, command: "mizzen run /local/wheels.sqsh PROGRAM" }, LEARN_SHORTLY),
    (
        Contender { name: LL, command: "chroot /mnt PROGRAM" },
        "squashfuse_ll -o allow_other /local/wheels.sqsh /mnt && mount --bind /tmp /mnt/tmp",
    ),
    (
        Contender { name: KERNEL, command: "chroot /mnt PROGRAM" },
        "mount -t squashfs -o loop,ro /local/wheels.sqsh /mnt && mount --bind /tmp /mnt/tmp",
    ),
    (Contender { name: PLAIN, command: "mizzen run --stage=never /local/plain.sqsh PROGRAM" }, ""),
    (
        Contender { name: PLAIN_LL, command: "chroot /mnt PROGRAM" },
        "squashfuse_ll -o allow_other /local/plain.sqsh /mnt && mount --bind /tmp /mnt/tmp",
    ),
    (
        Contender { name: PLAIN_KERNEL, command: "chroot /mnt PROGRAM" },
        "mount -t squashfs -o loop,ro /local/plain.sqsh /mnt && mount --bind /tmp /mnt/tmp",
    ),
];

const MODULES: [(Example, &str); 2] = [(Example::TENSORFLOW, "tensorflow"), (Example::PYTORCH, "torch")];
const PROCESSES: [u32; 2] = [1, 8];

/// What is measured.
pub fn part() -> Part {
    let rows = MODULES.iter().flat_map(|(_, module)| {
        let times = PROCESSES.into_iter().flat_map(|processes| time_rows(module, processes));
        times.chain(SERVERS.map(|(when, _)| memory_row(module, when)))
    });
    Part { name: "wheels", title: "imports of large packages in a new container", rows: rows.collect() }
}

fn time_rows(module: &str, processes: u32) -> Vec<Row> {
    let plural = if processes == 1 { "" } else { "es" };
    [
        ("first start, by squashfuse_ll", Measure::Ratio(FIRST, LL), Some(0.75)),
        ("second start, by bwrap on a directory", Measure::Ratio(SECOND, DIRECTORY), Some(1.15)),
        ("second start after a short first one, by the same", Measure::Ratio(AFTER_SHORT, DIRECTORY), None),
        ("what the second start saves", Measure::Difference(FIRST, SECOND), None),
        ("uncompressed image, by the kernel's squashfs", Measure::Ratio(PLAIN, PLAIN_KERNEL), Some(1.0)),
        ("uncompressed image, by squashfuse_ll", Measure::Ratio(PLAIN, PLAIN_LL), None),
    ]
    .map(|(what, measure, goal)| {
        let row = Row::new(format!("{module}, {processes} process{plural}: {what}"), measure);
        if let Some(goal) = goal { row.goal(goal) } else { row }
    })
    .into()
}

fn memory_row(module: &str, when: &str) -> Row {
    let name = format!("{module}, 1 process: {MEMORY_OF_SERVER} {when}");
    Row::new(name, Measure::Amount(MEMORY_OF_SERVER)).unit("MiB").goal(MEMORY_GOAL)
}

/// Measures both, so many rounds.
pub fn run(rounds: u32) -> Result<()> {
    let peers = make_rootfs(
        Release::Slurm22_05.debian(),
        "peers",
        "slurmctld,slurmd,slurm-client,munge,iproute2,procps,bindfs,bubblewrap,charliecloud,squashfuse",
    )?;
    let mut run = Run::begin(&part())?;
    let contenders = CONTENDERS.map(|(contender, _)| contender);
    for (example, module) in MODULES {
        let cluster =
            Cluster::start(Spec { nodes: 1, rootfs: Some(peers.clone()), ..Cluster::spec("wheels") })?;
        cluster.write_everywhere("/etc/mizzen/mizzen.toml", "stage_keep_free = \"\"\n")?;
        cluster.share("wheels.sqsh", &example.image()?)?;
        cluster
            .share("plain.sqsh", &pack(&example.tree()?, &["-noI", "-noD", "-noF", "-noX", "-no-xattrs"])?)?;
        let prepared = cluster.run_as_root(
            "cp /shared/wheels.sqsh /shared/plain.sqsh /local; cd /local && mkdir wheels && \
             squashfuse plain.sqsh /mnt && cp -a /mnt/. wheels/ && umount /mnt",
        );
        ensure!(prepared.code == 0, "{}", prepared.text());
        for processes in PROCESSES {
            println!("\nimport {module}, {processes} processes in one new container (ms), {rounds} rounds");
            let times = times(&cluster, module, processes, rounds)?;
            table(&contenders, &times, &time_rows(module, processes), &mut run);
        }
        for (when, before) in SERVERS {
            let before = before.replace("LEARN", LEARN);
            let script = format!("{WITHIN}export USER=root TF_CPP_MIN_LOG_LEVEL=3\nset -e\n{before}{MEMORY}")
                .replace("MODULE", module);
            let told = cluster.command("ctl", User::Root, &["bash", "-c", &script]).output()?;
            let memory = String::from_utf8_lossy(&told.stdout);
            let memory: f64 = memory.trim().parse().with_context(|| format!("{told:?}"))?;
            println!("\nafter import {module}, {when}");
            let memory = Times::from([(MEMORY_OF_SERVER.to_owned(), vec![memory / 1024.0])]);
            run.record(&memory_row(module, when), &memory);
        }
    }
    run.save()
}

fn times(cluster: &Cluster, module: &str, processes: u32, rounds: u32) -> Result<Times> {
    let import = format!("python3 -c \"import {module}\"");
    let program = format!("sh -c 'for p in $(seq {processes}); do {import} & done; wait'");
    let mut script =
        format!("{WITHIN}export USER=root TF_CPP_MIN_LOG_LEVEL=3\nfor round in $(seq {rounds}); do\n");
    for (contender, before) in &CONTENDERS {
        script.push_str(&format!("{}\n", before.replace("MODULE", module)));
        script.push_str(&timed(contender.name, &contender.command.replace("PROGRAM", &program)));
        script.push_str("if mountpoint -q /mnt; then umount /mnt/tmp /mnt; fi\n");
    }
    script.push_str("done\n");
    measure(cluster, User::Root, &script)
}
