//! `--container-stage=bcast`: srun reads an image once and sends it to the nodes of its step.

use mizzen_tests::check::{assert_failed, assert_out, run_in_time, with_images};
use mizzen_tests::copies::{TOML, served};
use mizzen_tests::{Cluster, Output, Release, SharedFs, Spec, User, on_every_release};

const NODES: [&str; 3] = ["node1", "node2", "node3"];
const BROADCAST: &str = "srun -N3 --container=/shared/big.sqsh --container-stage=bcast";

/// Three nodes and the image /shared/big.sqsh, which is larger than what a look at it reads.
fn cluster(release: Release) -> Cluster {
    let cluster = with_images(Spec {
        release,
        nodes: 3,
        shared: SharedFs::Fuse,
        mizzen_toml: Some(TOML.to_owned()),
        ..Cluster::spec(&format!("broadcast-{}", release.version()))
    });
    let made = cluster.run("head -c 12000000 /dev/urandom | cat /shared/a.sqsh - > /shared/big.sqsh");
    assert_eq!(made.code, 0, "{}", made.text());
    cluster
}

/// What a node has in the directory of the caches: the copies of Alice, and what is left beside them.
fn kept(cluster: &Cluster, node: &str) -> String {
    let listing =
        "cd /var/tmp; find . -user alice -type f ! -name '*.lock' ! -name '*.json' -printf '%P %m\\n' | sort";
    cluster.run_on(node, User::Root, listing).stdout
}

#[track_caller]
fn assert_kept_everywhere(cluster: &Cluster, expected: &str) {
    for node in NODES {
        assert_eq!(kept(cluster, node), expected, "{node}");
    }
}

fn forget(cluster: &Cluster) {
    for machine in ["ctl"].iter().chain(&NODES) {
        cluster.run_on(machine, User::Root, "rm -rf /var/tmp/mizzen-*");
    }
}

#[track_caller]
fn assert_quiet(output: &Output, stdout: &str) {
    assert_out(output, 0, stdout);
    assert!(!output.stderr.contains("mizzen"), "{}", output.text());
}

fn the_source_is_read_once(release: Release) {
    let cluster = cluster(release);
    let size: u64 = cluster.run("stat -c %s /shared/big.sqsh").stdout.trim().parse().unwrap();
    let hex = cluster.run("sha256sum < /shared/big.sqsh").stdout[..64].to_owned();
    let machines: Vec<&str> = ["ctl"].into_iter().chain(NODES).collect();
    let before: Vec<u64> = machines.iter().map(|machine| served(&cluster, machine)).collect();
    let inside = "sh -c 'echo $(cat /image) $MIZZEN_IMAGE_DIGEST ${SLURM_MIZZEN_BROADCAST-gone}'";
    let first = cluster.run(&format!("{BROADCAST} {inside}"));
    assert_quiet(&first, &format!("a sha256:{hex} gone\n").repeat(3));
    let read: Vec<u64> =
        machines.iter().zip(before).map(|(machine, before)| served(&cluster, machine) - before).collect();
    assert!(read[0] >= size && read[0] <= size + size / 10, "{release}: {read:?} of {size} bytes");
    assert!(read[1..].iter().all(|read| *read < 300_000), "{release}: {read:?} of {size} bytes");
    let copy = format!("mizzen-2001/sha256-{hex} 400\n");
    assert_kept_everywhere(&cluster, &copy);
    // In a job the second step sends nothing, unless it is on other nodes; steps of one node send nothing at all.
    forget(&cluster);
    let traced = "strace -f -qq -e signal=none -e trace=execve -o trace";
    let steps = format!(
        "for nodes in '2 -w node[1-2]' '2 -w node[1-2]' 3 1; do {traced} srun -N $nodes --container=/shared/big.sqsh cat /image | uniq -c; \
         grep -c 'sbcast.* = 0' trace; done\n"
    );
    cluster.share("steps", steps.as_bytes()).unwrap();
    let options = "--container-stage=bcast --container-image=/shared/a.sqsh";
    let job = cluster.run(&format!("salloc --quiet -N3 {options} bash /shared/steps"));
    let words: Vec<&str> = job.stdout.split_whitespace().collect();
    assert_eq!(
        words,
        ["2", "a", "1", "2", "a", "0", "3", "a", "1", "1", "a", "0"],
        "{release}: {}",
        job.text()
    );
    assert_kept_everywhere(&cluster, &copy);
    // A batch script in the container copies for itself; its steps get a broadcast.
    forget(&cluster);
    let script = "#!/bin/sh\nsrun cat /image\n";
    cluster.run(&format!("printf '{}' > job", script.replace('\n', "\\n")));
    let batch = cluster.run(&format!(
        "sbatch --quiet -W -N3 --ntasks-per-node=1 -o out --container-stage=bcast --container-image=/shared/big.sqsh@sha256:{hex} job; cat out"
    ));
    assert_out(&batch, 0, "a\na\na\n");
    // srun's machine is node1 here, and remembers what it has sent.
    for node in ["node2", "node3"] {
        assert_eq!(kept(&cluster, node), copy, "{release}: {node}");
    }
    assert!(
        kept(&cluster, "node1").starts_with("mizzen-2001/sent-"),
        "{release}: {}",
        kept(&cluster, "node1")
    );
    // Other content than was asked for is not sent, nor is anything else if a data mount is missing. The step ends, and the
    // next one of the job has its turn.
    forget(&cluster);
    let other = cluster.run("sha256sum < /shared/b.sqsh").stdout[..64].to_owned();
    for (what, why) in [
        (
            format!("--container-image=/shared/big.sqsh@sha256:{other}"),
            format!("/shared/big.sqsh: its content is sha256:{hex}, not sha256:{other}"),
        ),
        (
            "--container-image=/shared/big.sqsh --container-mounts=/nosuch:/data:squashfs".to_owned(),
            "/nosuch: No such file or directory".to_owned(),
        ),
    ] {
        let refused = run_in_time(
            &cluster,
            &format!(
                "salloc -Q -N3 bash -c 'srun -N3 {what} --container-stage=bcast touch /shared/marker; echo $?; srun -N3 echo next'"
            ),
        );
        assert_out(&refused, 0, &format!("125\n{}", "next\n".repeat(3)));
        assert_eq!(refused.stderr.matches(&why).count(), 1, "{why}: {}", refused.text());
        for node in NODES {
            let log = cluster.slurmd_log(node);
            assert!(log.contains(&format!("mizzen: {node}: {why}")), "{log}");
            assert_eq!(kept(&cluster, node), "", "{node}");
        }
        assert_eq!(cluster.run("ls /shared/marker").stdout, "");
    }
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
}

on_every_release!(the_source_is_read_once);

#[test]
fn what_goes_wrong_on_the_way_is_made_good() {
    let cluster = cluster(Release::Slurm22_05);
    let hex = cluster.run("sha256sum < /shared/big.sqsh").stdout[..64].to_owned();
    let copy = format!("mizzen-2001/sha256-{hex} 400\n");
    let not_sent = "mizzen: note: ctl: /shared/big.sqsh is not sent to the nodes, which copy it themselves: ";
    // No room on one node.
    cluster.run_on("node2", User::Root, "mount -t tmpfs -o size=4m,mode=1777 tmpfs /var/tmp");
    let full = cluster.run(&format!("{BROADCAST} cat /image"));
    assert_out(&full, 0, &"a\n".repeat(3));
    // The rest of the line is Slurm's, which does not tell the reason.
    let why = "sbcast: error: REQUEST_FILE_BCAST(node2): ";
    assert!(full.stderr.contains(&format!("{not_sent}{why}")), "{}", full.text());
    assert!(full.stderr.contains("node2: /shared/big.sqsh is used where it is: no room"), "{}", full.text());
    // slurmd keeps a file open that it could not write.
    assert_out(
        &cluster.run_on("node2", User::Root, "find /var/tmp -name '*broadcast*'; umount -l /var/tmp"),
        0,
        "",
    );
    assert_eq!((kept(&cluster, "node1"), kept(&cluster, "node3")), (copy.clone(), copy.clone()));
    // Half of it, or something else, has arrived.
    for (damage, said) in [
        ("chmod 600 $f; truncate -s 5000000 $f; chmod 400 $f", false),
        ("chmod 600 $f; printf x | dd of=$f bs=1 seek=5000000 conv=notrunc 2>&1; chmod 400 $f", true),
        ("rm -f $f; ln -s /etc/passwd $f", true),
        ("rm -f $f", false),
    ] {
        forget(&cluster);
        cluster.run(&format!("printf '#!/bin/sh\\nf=$(echo /var/tmp/mizzen-2001-broadcast-*)\\n[ -e $f ] || exit 1\\n{damage}\\n' > damage; chmod +x damage"));
        let hurt = cluster.run(&format!("{BROADCAST} --task-prolog=/home/alice/damage cat /image"));
        assert_out(&hurt, 0, &"a\n".repeat(3));
        let note = "note: node1: /shared/big.sqsh: what srun has sent cannot be used: ";
        assert_eq!(hurt.stderr.contains(note), said, "{damage}: {}", hurt.text());
        assert_kept_everywhere(&cluster, &copy);
    }
    // The source is another one by then.
    forget(&cluster);
    cluster.run("printf '#!/bin/sh\\nln /shared/lock /shared/lock.2 2>/dev/null && cp /shared/b.sqsh /shared/big.sqsh\\nsleep 1' > damage; touch /shared/lock");
    let replaced = cluster.run(&format!(
        "{BROADCAST} --task-prolog=/home/alice/damage cat /image; cat /shared/a.sqsh > /shared/big.sqsh"
    ));
    assert_out(&replaced, 0, &"b\n".repeat(3));
    // srun's machine cannot make a copy.
    forget(&cluster);
    cluster.run_as_root("mkdir -m 755 /var/tmp/mizzen-2001{,.{1..15}}; chmod 1733 /var/tmp");
    let alone = cluster.run(&format!("{BROADCAST} cat /image"));
    assert_out(&alone, 0, &"a\n".repeat(3));
    assert!(
        alone.stderr.contains(&format!("{not_sent}/var/tmp/mizzen-2001: belongs to uid 0")),
        "{}",
        alone.text()
    );
    cluster.run_as_root("chmod 1777 /var/tmp");
    // Where copies are shared a broadcast goes to the user's own all the same, with data mounts, and for the next step.
    forget(&cluster);
    let shared = format!("{TOML}stage_shared = \"/var/cache/mizzen\"\n");
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", &shared).unwrap();
    let before: Vec<u64> = NODES.iter().map(|node| served(&cluster, node)).collect();
    let step = "srun -N3 --container-mounts=/shared/big.sqsh:/data:squashfs cat /data/image";
    let options = "--container-stage=bcast --container-image=/shared/b.sqsh";
    let job = cluster.run(&format!("salloc --quiet -N3 {options} sh -c '{step}; {step}'"));
    assert_quiet(&job, &"a\n".repeat(6));
    let read: u64 =
        NODES.iter().zip(before).map(|(node, before)| served(&cluster, node) - before).max().unwrap();
    assert!(read < 300_000, "{read} bytes");
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", TOML).unwrap();
    // A node that does not answer, and a user who has enough of waiting.
    forget(&cluster);
    let slurmd = |signal: &str| {
        let own = "[ $(readlink /proc/$p/ns/mnt) = $(readlink /proc/self/ns/mnt) ]";
        let told = cluster.run_on(
            "node3",
            User::Root,
            &format!("for p in $(pgrep -x slurmd); do {own} && kill -{signal} $p && echo $p; done; true"),
        );
        assert_eq!(told.stdout.lines().count(), 1, "{}", told.text());
    };
    for (whom, code, stdout, said) in [
        ("mizzen-enter", 125, "", "mizzen: node1: the broadcast of the image was interrupted".to_owned()),
        ("sbcast", 0, "a\na\na\n", format!("{not_sent}sbcast was ended by SIGTERM")),
    ] {
        slurmd("STOP");
        let interrupted = std::thread::scope(|scope| {
            let srun = scope.spawn(|| run_in_time(&cluster, &format!("{BROADCAST} cat /image")));
            // One that has ended may not have been collected yet.
            let sending = "for i in $(seq 100); do ps -u alice -o stat=,comm= | grep -q '^[^Z].*sbcast' && break; sleep 0.05; done";
            cluster.run(&format!("{sending}; pkill -TERM -u alice -x {whom}"));
            slurmd("CONT");
            srun.join().unwrap()
        });
        assert_out(&interrupted, code, stdout);
        assert!(interrupted.stderr.contains(&said), "{}", interrupted.text());
        let left = cluster.run("sleep 0.2; ps -u alice -o stat=,comm= | grep '^[^Z].*sbcast'");
        assert_eq!(left.stdout, "", "{whom}");
        assert!(cluster.all_idle(), "{:?}", cluster.node_states());
    }
    // What was left behind is removed with the next copy, once it is old; nothing of others is.
    let old = "cd /var/tmp; touch -d '2 hours ago' mizzen-2001-broadcast-x mizzen-2002-broadcast-x; touch mizzen-2001-broadcast-new; chown alice mizzen-2001-*; \
               runuser -u alice -- mizzen stage /shared/b.sqsh >/dev/null; ls -d *broadcast*";
    assert_out(
        &cluster.run_on("node1", User::Root, &format!("rm -f /var/tmp/*broadcast*; {old}")),
        0,
        "mizzen-2001-broadcast-new\nmizzen-2002-broadcast-x\n",
    );
}

/// Slurm calls the plugin for one component, and all of them share srun's environment.
#[test]
fn components_copy_the_image_themselves() {
    for release in [Release::Slurm22_05, Release::Slurm24_11] {
        let cluster = cluster(release);
        let part = "-N1 --container=/shared/big.sqsh --container-stage=bcast cat /image";
        let run = cluster.run(&format!("srun {part} : {part}"));
        assert_eq!((run.code, run.stdout.as_str()), (0, "a\na\n"), "{release}: {}", run.text());
        let message =
            "every node copies the image itself: the components of a heterogeneous job get no broadcast";
        assert_eq!(run.stderr.matches(message).count(), 1, "{release}: {}", run.text());
        assert!(!run.stderr.contains("error"), "{release}: {}", run.text());
        assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
    }
}

#[test]
fn only_srun_can_send() {
    let cluster = with_images(Spec { nodes: 1, ..Cluster::spec("broadcast-by-hand") });
    assert_failed(
        &cluster.run("mizzen run --stage=bcast /shared/a.sqsh true"),
        125,
        "--stage: bcast is for the steps of a Slurm job",
    );
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", "stage = \"bcast\"\n").unwrap();
    assert_failed(
        &cluster.run("mizzen check-config"),
        1,
        ": stage: \"bcast\" is a matter of a job, not of the site",
    );
}
