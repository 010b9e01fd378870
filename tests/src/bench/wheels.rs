//! `import tensorflow` and `import torch` in a new container, first and second start on a node, in one and in eight processes,
//! beside an unpacked directory, squashfuse_ll and the kernel's squashfs.

use anyhow::{Context, Result, ensure};

use super::{Contender, Times, WITHIN, measure, median, table, timed};
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
const MEMORY_GOAL: u32 = 64;

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

/// Measures both, so many rounds.
pub fn run(rounds: u32) -> Result<()> {
    let peers = make_rootfs(
        Release::Slurm22_05.debian(),
        "peers",
        "slurmctld,slurmd,slurm-client,munge,iproute2,procps,bindfs,bubblewrap,charliecloud,squashfuse",
    )?;
    for (example, module) in [(Example::TENSORFLOW, "tensorflow"), (Example::PYTORCH, "torch")] {
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
        for processes in [1, 8] {
            println!("\nimport {module}, {processes} processes in one new container (ms), {rounds} rounds");
            report(&times(&cluster, module, processes, rounds)?);
        }
        for (when, before) in SERVERS {
            let before = before.replace("LEARN", LEARN);
            let script = format!("{WITHIN}export USER=root TF_CPP_MIN_LOG_LEVEL=3\nset -e\n{before}{MEMORY}")
                .replace("MODULE", module);
            let told = cluster.command("ctl", User::Root, &["bash", "-c", &script]).output()?;
            let memory = String::from_utf8_lossy(&told.stdout);
            let memory: f64 = memory.trim().parse().with_context(|| format!("{told:?}"))?;
            println!(
                "\nmemory of the file server after import {module}, {when}: {:.1} MiB (goal {MEMORY_GOAL})",
                memory / 1024.0
            );
        }
    }
    Ok(())
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

fn report(times: &Times) {
    let contenders: Vec<Contender> =
        CONTENDERS.iter().map(|(Contender { name, command }, _)| Contender { name, command }).collect();
    table(
        &contenders,
        times,
        &[
            (FIRST, LL),
            (SECOND, DIRECTORY),
            (AFTER_SHORT, DIRECTORY),
            (PLAIN, PLAIN_KERNEL),
            (PLAIN, PLAIN_LL),
        ],
    );
    let ahead = median(times, FIRST) - median(times, SECOND);
    println!("  what the second start saves: {ahead:.0} ms");
}
