//! `stage_broadcast = "early"`: the tasks of a step start while srun sends the image to their nodes.

use mizzen_tests::check::{assert_out, run_in_time, with_images};
use mizzen_tests::copies::{CACHE, LARGE, TOML, digest_of, large_image, served, sum_of};
use mizzen_tests::{Cluster, Output, Release, SharedFs, Spec, User, on_every_release, repository};

const NODES: [&str; 3] = ["node1", "node2", "node3"];
const EARLY: &str = "stage_read_through = \"1m\"\nstage_broadcast = \"early\"\n";
const BROADCAST: &str =
    "srun -N3 --container-stage=bcast --container-mounts=/var/tmp:/host --container=/shared/large.sqsh";

/// Programs say that they have begun
const BEGUN: &str = "touch begun.$SLURM_NODEID";
/// and wait until their node has the copy. What makes it has a low priority.
const COPIED: &str =
    "for i in $(seq 130); do ls /host/mizzen-2001/sha256-* >/dev/null 2>&1 && break; sleep 0.1; done";

/// What sbcast does before it sends: it waits for the file `go`, with the image, or with word of how that ended.
const HOLD_ALL: &str = "until [ -e /home/alice/go ]; do sleep 0.05; done";
const HOLD_END: &str = "case $2 in /proc/*) until [ -e /home/alice/go ]; do sleep 0.05; done;; esac";

/// Three nodes and the image /shared/large.sqsh.
fn cluster(release: Release, name: &str) -> Cluster {
    let cluster = with_images(Spec {
        release,
        nodes: 3,
        shared: SharedFs::Fuse,
        mizzen_toml: Some(format!("{TOML}{EARLY}")),
        ..Cluster::spec(&format!("early-{name}-{}", release.version()))
    });
    cluster.share(LARGE, large_image()).unwrap();
    cluster
}

/// Has srun's machine do this before it sends with sbcast.
fn before_sbcast(cluster: &Cluster, what: &str) {
    let script = format!("#!/bin/sh\n{what}\nexec /usr/bin/sbcast.real \"$@\"\n");
    cluster.share("sbcast", script.as_bytes()).unwrap();
    let done = cluster.run_as_root(
        "cd /usr/bin; [ -e sbcast.real ] || mv sbcast sbcast.real; cp /shared/sbcast sbcast.new; chmod 755 sbcast.new; mv sbcast.new sbcast",
    );
    assert_eq!(done.code, 0, "{}", done.text());
    cluster.run("rm -f go begun.*");
}

/// What a node has in the directory of the caches: Alice's copies, and what is beside them.
fn kept(cluster: &Cluster, node: &str) -> String {
    let listing = "cd /var/tmp; find . -user alice -type f ! -name '*.lock' ! -name '*.json' ! -name 'profile-*' -printf '%P %m\\n' | sort";
    cluster.run_on(node, User::Root, listing).stdout
}

/// The nodes have the copy of the image, and nothing else, soon.
#[track_caller]
fn assert_copied(cluster: &Cluster, what: &str) {
    let hex = &digest_of(cluster, "/shared/large.sqsh")["sha256:".len()..];
    let copy = format!("mizzen-2001/sha256-{hex} 400\n");
    for node in NODES {
        assert_eq!(kept(cluster, node), copy, "{what}: {node}");
        let sum = cluster.run_on(node, User::Alice, &format!("sha256sum < {CACHE}/sha256-{hex}"));
        assert!(sum.stdout.starts_with(hex), "{what}: {node}");
    }
}

fn forget(cluster: &Cluster) {
    for machine in ["ctl"].iter().chain(&NODES) {
        cluster.run_on(machine, User::Root, "rm -rf /var/tmp/mizzen-*");
    }
}

/// Runs a command, and does something else meanwhile, when its programs have begun on all nodes.
fn meanwhile(cluster: &Cluster, command: &str, work: impl FnOnce()) -> Output {
    std::thread::scope(|scope| {
        let running = scope.spawn(|| run_in_time(cluster, command));
        let begun = cluster
            .run("for i in $(seq 600); do set -- begun.*; [ $# = 3 ] && exit; sleep 0.1; done; exit 1");
        if begun.code == 0 {
            work();
        }
        let output = running.join().unwrap();
        assert_eq!(begun.code, 0, "not all programs have begun: {}", output.text());
        output
    })
}

/// These lines from every node, sorted.
fn of_all<const N: usize>(mut lines: [&str; N]) -> String {
    lines.sort_unstable();
    lines.map(|line| line.repeat(NODES.len())).concat()
}

/// Nothing sends any more.
#[track_caller]
fn assert_nobody_sends(cluster: &Cluster, what: &str) {
    let left = cluster.run(
        "for i in $(seq 100); do ps -u alice -o stat=,comm= | grep -q '^[^Z].*\\(sbcast\\|mizzen-bcast\\)' || exit 0; sleep 0.05; done; ps -u alice -o stat=,comm=",
    );
    assert_out(&left, 0, "");
    // Slurm lets a step go on whose srun was killed.
    cluster.run("scancel -u alice");
    assert!(cluster.all_idle(), "{what}: {:?}", cluster.node_states());
}

#[track_caller]
fn assert_quiet(output: &Output, stdout: &str) {
    assert_out(output, 0, stdout);
    assert!(!output.stderr.contains("mizzen"), "{}", output.text());
}

fn tasks_do_not_wait(release: Release) {
    let cluster = cluster(release, "start");
    let size: u64 = cluster.run("stat -c %s /shared/large.sqsh").stdout.trim().parse().unwrap();
    let machines: Vec<&str> = ["ctl"].into_iter().chain(NODES).collect();
    let all_served = || -> Vec<u64> { machines.iter().map(|machine| served(&cluster, machine)).collect() };
    // Users cannot list the directory everywhere.
    for node in NODES {
        cluster.run_on(node, User::Root, "chmod 1733 /var/tmp");
    }
    before_sbcast(&cluster, HOLD_ALL);
    let before = all_served();
    let command = format!(
        "{BROADCAST} sh -c 'cat /image; {BEGUN}; {COPIED}; sha256sum < /data/1; echo ${{SLURM_MIZZEN_BROADCAST-gone}}' | sort"
    );
    let first = meanwhile(&cluster, &command, || {
        for node in NODES {
            assert!(!kept(&cluster, node).contains("sha256-"), "{release}: {}", kept(&cluster, node));
        }
        cluster.run("touch go");
    });
    assert_quiet(&first, &of_all(["large\n", "gone\n", &sum_of(1)]));
    let read: Vec<u64> = all_served().iter().zip(before).map(|(now, before)| now - before).collect();
    // srun's machine reads it once; the nodes, what their programs had to have.
    assert!(read[0] >= size && read[0] <= size + size / 10, "{release}: {read:?} of {size} bytes");
    assert!(read[1..].iter().all(|read| *read < size / 10), "{release}: {read:?} of {size} bytes");
    assert_copied(&cluster, &format!("{release}"));
    assert_nobody_sends(&cluster, &format!("{release}"));
    // The next start has the copy.
    let before = all_served();
    let next = cluster.run("srun -N3 --container=/shared/large.sqsh sha256sum /data/2");
    assert_quiet(&next, &sum_of(2).replace('-', "/data/2").repeat(3));
    let read: Vec<u64> = all_served().iter().zip(before).map(|(now, before)| now - before).collect();
    assert!(read[1..].iter().all(|read| *read < 300_000), "{release}: {read:?}");
    // What another job is sent, and has, is removed when it has arrived.
    let arrived = |there: &str| {
        format!(
            "for i in $(seq 600); do ls -d /host/mizzen-2001-broadcast-* >/dev/null 2>&1 {there} && break; sleep 0.02; done"
        )
    };
    for node in NODES {
        cluster.run_on(node, User::Root, "chmod 1777 /var/tmp");
    }
    before_sbcast(&cluster, HOLD_END);
    let again = meanwhile(
        &cluster,
        &format!(
            "{BROADCAST} sh -c '{}; {BEGUN}; {}; cat /image'",
            arrived(""),
            arrived("|| true; ! ls -d /host/mizzen-2001-broadcast-* >/dev/null 2>&1")
        ),
        || {
            cluster.run("touch go");
        },
    );
    assert_quiet(&again, &"large\n".repeat(3));
    assert_copied(&cluster, &format!("{release}"));
    assert_nobody_sends(&cluster, &format!("{release}"));
}

fn srun_ends_the_sending(release: Release) {
    let cluster = cluster(release, "ends");
    // Held back before the first block, and when the image is there and nothing more.
    for (held, is_there) in [(HOLD_ALL, false), (HOLD_END, true)] {
        for end in ["", "srun", "KILL", "TERM", "scancel", "mizzen-bcast"] {
            let what = format!("{release}: {held}: {end}");
            forget(&cluster);
            before_sbcast(&cluster, held);
            let size = "stat -c %s /host/mizzen-2001-broadcast-early-* 2>/dev/null";
            let wait = format!(
                "for i in $(seq 600); do [ \"$({size})\" = $(stat -c %s /shared/large.sqsh) ] && break; sleep 0.1; done"
            );
            let wait = if is_there { wait.as_str() } else { "true" };
            // The program sees the directory, and not the image.
            let wait = wait.replace("$(stat -c %s /shared/large.sqsh)", &large_image().len().to_string());
            let program = if end.is_empty() { "true" } else { "sleep 100" };
            let ended = meanwhile(
                &cluster,
                &format!("{BROADCAST} sh -c 'cat /image; {wait}; {BEGUN}; {program}'"),
                || match end {
                    "" => {}
                    "srun" => {
                        cluster.run(
                            "for i in $(seq 50); do pkill -INT -u alice -x srun || break; sleep 0.2; done",
                        );
                    }
                    "scancel" => {
                        cluster.run("scancel -u alice");
                    }
                    // The step goes on without.
                    "mizzen-bcast" => {
                        cluster.run("pkill -KILL -u alice -x mizzen-bcast");
                        let alone = cluster.run(
                            "sleep 0.5; ps -u alice -o stat=,comm= | grep '^[^Z].*sbcast'; squeue -h -o %T",
                        );
                        assert_eq!(alone.stdout, "RUNNING\n", "{what}: {}", alone.text());
                        cluster.run("scancel -u alice");
                    }
                    signal => {
                        cluster.run(&format!("pkill -{signal} -u alice -x srun"));
                    }
                },
            );
            assert_eq!(ended.code == 0, end.is_empty(), "{what}: {}", ended.text());
            assert!(!ended.stderr.contains("mizzen: "), "{what}: {}", ended.text());
            assert_nobody_sends(&cluster, &what);
            // Nothing arrives later, and what is there is no copy.
            cluster.run("touch go; sleep 0.3");
            for node in NODES {
                let kept = kept(&cluster, node);
                assert!(!kept.contains("sha256-") && !kept.contains(".end"), "{what}: {kept}");
                assert_eq!(kept.contains("-broadcast-early-"), is_there, "{what}: {kept}");
            }
        }
    }
    // The site's epilog removes it, or the next step that is sent something, when it is old.
    let epilog = format!(
        "cd /var/tmp; set -- *early-*; job=${{1#*early-}}; export SLURM_JOB_ID=${{job%%-*}} SLURM_JOB_USER=alice\n{}\nls -d mizzen-2001-*",
        documented_epilog()
    );
    // Others' names there, on which one may have mounted a file system that does not answer, and of another job.
    let others = "echo user_allow_other >> /etc/fuse.conf; runuser -u bob -- sh -c 'mkdir /var/tmp/innocent ~/stopped && \
                  bindfs -o allow_other,attr_timeout=0,entry_timeout=0 ~/stopped /var/tmp/innocent && pkill -STOP -u bob -x bindfs'; \
                  runuser -u alice -- touch /var/tmp/mizzen-2001-broadcast-early-99999-other";
    assert_out(&cluster.run_on("node1", User::Root, others), 0, "");
    let pruned = cluster.run_on(
        "node1",
        User::Root,
        &format!("timeout -s KILL 30 sh -c '{}'", epilog.replace('\'', "'\\''")),
    );
    assert_out(&pruned, 0, "mizzen-2001-broadcast-early-99999-other\n");
    let end = "rm /var/tmp/mizzen-2001-broadcast-early-99999-other; pkill -KILL -u bob -x bindfs; umount -l /var/tmp/innocent";
    assert_out(&cluster.run_on("node1", User::Root, end), 0, "");
    for node in ["node2", "node3"] {
        let old = "cd /var/tmp; touch -d '6 minutes ago' mizzen-2001-broadcast-early-*";
        cluster.run_on(node, User::Root, old);
    }
    before_sbcast(&cluster, "");
    let next = run_in_time(&cluster, &format!("{BROADCAST} sh -c '{COPIED}; sleep 1; cat /image'"));
    assert_quiet(&next, &"large\n".repeat(3));
    assert_copied(&cluster, &format!("{release}"));
}

/// What docs/admins.md has for an epilog.
fn documented_epilog() -> String {
    let text = std::fs::read_to_string(repository().join("docs/admins.md")).unwrap();
    let (before, after) = text.split_once("/usr/bin/mizzen containers prune --job").unwrap();
    let start = before.rfind("```text,form\n").unwrap() + "```text,form\n".len();
    let (rest, _) = after.split_once("```").unwrap();
    format!("{}/usr/bin/mizzen containers prune --job{rest}", &before[start..])
}

on_every_release!(tasks_do_not_wait, srun_ends_the_sending);

#[test]
fn what_goes_wrong_on_the_way_is_made_good() {
    for release in [Release::Slurm22_05, Release::Slurm24_11] {
        let cluster = cluster(release, "wrong");
        let not_sent =
            "mizzen: note: ctl: /shared/large.sqsh is not sent to the nodes, which copy it themselves: ";
        let run = format!("{BROADCAST} sh -c 'cat /image; {COPIED}; sha256sum < /data/0' | sort");
        let lines = of_all(["large\n", &sum_of(0)]);
        // sbcast fails, or somebody ends it: the nodes hear of it, and copy.
        for (before, why) in [
            (
                "case $2 in /proc/*) ;; *) echo 'sbcast: error: no way' >&2; exit 1;; esac",
                "sbcast: error: no way",
            ),
            ("case $2 in /proc/*) ;; *) kill $$;; esac", "sbcast was ended by SIGTERM"),
        ] {
            forget(&cluster);
            before_sbcast(&cluster, before);
            let failed = run_in_time(&cluster, &run);
            assert_out(&failed, 0, &lines);
            assert_eq!(failed.stderr.matches("mizzen: ").count(), 1, "{}", failed.text());
            assert!(failed.stderr.contains(&format!("{not_sent}{why}\n")), "{}", failed.text());
            assert_copied(&cluster, why);
        }
        // So they do if it arrives damaged.
        forget(&cluster);
        before_sbcast(&cluster, HOLD_END);
        let damaged = meanwhile(
            &cluster,
            &format!(
                "{BROADCAST} sh -c 'f=/host/mizzen-2001-broadcast-early-*; until [ \"$(stat -c %s $f 2>&1)\" = {} ]; do sleep 0.1; done; \
                 set -- $f; chmod 600 $1; printf x | dd of=$1 bs=1 seek=5000000 conv=notrunc 2>/dev/null; \
                 {BEGUN}; cat /image; {COPIED}; sha256sum < /data/0' | sort",
                large_image().len()
            ),
            || {
                cluster.run("touch go");
            },
        );
        assert_quiet(&damaged, &lines);
        assert_copied(&cluster, "damaged");
        // Another original has its place by then: programs have what they have begun with, and there is no copy of it.
        forget(&cluster);
        before_sbcast(&cluster, HOLD_ALL);
        let replaced = meanwhile(
            &cluster,
            &format!(
                "{BROADCAST} sh -c 'cat /image; {BEGUN}; until [ -e go ]; do sleep 0.1; done; sleep 2; cat /image'"
            ),
            || {
                let mv =
                    cluster.run_as_root("cp /shared/b.sqsh /shared/new; mv /shared/new /shared/large.sqsh");
                assert_eq!(mv.code, 0, "{}", mv.text());
                // For a second the nodes believe what they were told of the name. A copy of what it was would be used by nobody.
                cluster.run("sleep 2; touch go");
            },
        );
        assert_eq!(replaced.stdout, "large\n".repeat(6), "{}", replaced.text());
        assert_nobody_sends(&cluster, "replaced");
        for node in NODES {
            assert!(!kept(&cluster, node).contains("sha256-"), "{}", kept(&cluster, node));
        }
        assert_out(&cluster.run("srun -N3 --container=/shared/large.sqsh cat /image"), 0, &"b\n".repeat(3));
    }
}

/// srun's machine is one of the nodes then, and has one cache for both.
#[test]
fn a_batch_script_sends_from_its_node() {
    for release in [Release::Slurm22_05, Release::Slurm24_11] {
        let cluster = cluster(release, "batch");
        let size: u64 = cluster.run("stat -c %s /shared/large.sqsh").stdout.trim().parse().unwrap();
        let step = |program: &str| format!("{BROADCAST} sh -c '{program}' | sort\n");
        let script = format!(
            "#!/bin/sh\n{}{}",
            step(&format!("{COPIED}; sleep 2; sha256sum < /data/1")),
            step("cat /image")
        );
        cluster.share("job", script.as_bytes()).unwrap();
        let before: Vec<u64> = NODES.iter().map(|node| served(&cluster, node)).collect();
        let batch = run_in_time(
            &cluster,
            "sbatch --quiet -W -N3 --ntasks-per-node=1 -o out -e err --export=NONE /shared/job; cat out; cat err >&2",
        );
        assert_quiet(&batch, &(sum_of(1).repeat(3) + &"large\n".repeat(3)));
        let read: Vec<u64> =
            NODES.iter().zip(before).map(|(node, before)| served(&cluster, node) - before).collect();
        assert!(read[0] >= size && read[0] <= size + size / 10, "{release}: {read:?} of {size} bytes");
        assert!(read[1..].iter().all(|read| *read < size / 10), "{release}: {read:?} of {size} bytes");
        cluster.run_on("node1", User::Root, "rm /var/tmp/mizzen-2001/sent-*");
        assert_copied(&cluster, &format!("{release}"));
    }
}

/// Whoever has to know the content waits for all of it.
#[test]
fn a_digest_is_known_before_the_start() {
    let cluster = cluster(Release::Slurm24_11, "pins");
    let digest = digest_of(&cluster, "/shared/large.sqsh");
    let command = |image: &str| {
        format!(
            "srun -N3 --container-stage=bcast --container=/shared/{image} sh -c '{BEGUN}; echo $MIZZEN_IMAGE_DIGEST'"
        )
    };
    let verifies = format!("{TOML}{EARLY}stage_verify = \"always\"\n");
    let lists = |digest: &str| format!("{TOML}{EARLY}[policy]\ndigests = [\"{digest}\"]\n");
    for (toml, image) in [
        (format!("{TOML}{EARLY}"), format!("{LARGE}@{digest}")),
        (verifies, LARGE.to_owned()),
        (lists(&digest), LARGE.to_owned()),
    ] {
        cluster.write_everywhere("/etc/mizzen/mizzen.toml", &toml).unwrap();
        forget(&cluster);
        before_sbcast(&cluster, HOLD_ALL);
        let waiting = std::thread::scope(|scope| {
            let srun = scope.spawn(|| run_in_time(&cluster, &command(&image)));
            let sending = "until ps -u alice -o comm= | grep -q sbcast; do sleep 0.05; done; sleep 1; ls begun.* 2>/dev/null; touch go";
            assert_eq!(cluster.run(sending).stdout, "", "{image}");
            srun.join().unwrap()
        });
        assert_out(&waiting, 0, &format!("{digest}\n").repeat(3));
        assert_copied(&cluster, &image);
    }
    // What the site does not list is not sent.
    let other = digest_of(&cluster, "/shared/b.sqsh");
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", &lists(&other)).unwrap();
    forget(&cluster);
    before_sbcast(&cluster, "touch /home/alice/go");
    let refused = run_in_time(&cluster, &command(LARGE));
    assert_eq!((refused.code, refused.stdout.as_str()), (125, ""), "{}", refused.text());
    assert_eq!(refused.stderr.matches(&digest).count(), 1, "{}", refused.text());
    assert_eq!(cluster.run("ls go begun.* 2>/dev/null").stdout, "");
}
