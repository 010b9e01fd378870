//! What the tasks of a step and slurmstepd have between them: nothing that a user could make slurmstepd wait with, nothing
//! that stays, and a step that cannot have its container on one node ends on all of them.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use mizzen_tests::check::{
    Emptiness, assert_out, one_node, run_in_time, start_with_busybox, with_busybox, with_images,
};
use mizzen_tests::images::{ImageTree, c_program, spank_plugin};
use mizzen_tests::spec::PLUGIN;
use mizzen_tests::{Cluster, Release, Spec, User, on_every_release};

const IMAGE: &str = "--container-image=/shared/bb.sqsh";

on_every_release!(ends_on_all_nodes, slurmstepd_keeps_nothing);

/// Makes a script that everybody can start.
fn script(cluster: &Cluster, name: &str, text: &str) -> String {
    let path = cluster.share(name, text.as_bytes()).unwrap();
    cluster.run_as_root(&format!("chmod 755 {path}"));
    path
}

#[test]
fn nobody_can_make_slurmstepd_wait() {
    let contained = "SlurmdParameters=config_overrides,contain_spank".to_owned();
    for (release, conf) in [(Release::Slurm22_05, vec![]), (Release::Slurm24_11, vec![contained])] {
        let cluster = start_with_busybox(Spec { slurm_conf: conf, ..one_node(release, "waiting") });
        let tree = ImageTree::busybox().unwrap();
        std::fs::write(tree.path("bin/hold"), c_program("hold-socket").unwrap()).unwrap();
        std::fs::set_permissions(tree.path("bin/hold"), PermissionsExt::from_mode(0o755)).unwrap();
        tree.file("unread", &"unread\n".repeat(1000)).unwrap();
        cluster.share("hold.sqsh", &tree.squashfs(&["-comp", "gzip"]).unwrap()).unwrap();
        // In the launcher's place something that has every socket of the launcher's held by a process of the user's. (A user
        // would take them from the launcher's process.)
        script(
            &cluster,
            "wrapper",
            "#!/bin/bash\nif [ $SLURM_LOCALID = 0 ]; then\nfor fd in $(ls /proc/$$/fd); do\n\
             case $(readlink /proc/$$/fd/$fd) in socket:*) [ $fd -gt 2 ] || continue\n\
             eval \"setsid mizzen run /shared/hold.sqsh hold /unread ~/held.$fd <&$fd >/dev/null 2>&1 &\"\n\
             until [ -e ~/held.$fd ]; do sleep 0.02; done;; esac\ndone\n\
             pkill -STOP -u alice -x mizzen-fuse\nls ~/held.* > ~/held\nsleep 1.5\nfi\n\
             exec /usr/lib/mizzen/real/mizzen-enter \"$@\"\n",
        );
        let install = "cd /usr/lib/mizzen; mkdir real; ln -s /usr/bin/mizzen real/mizzen-enter; rm mizzen-enter; install -m 755 /shared/wrapper mizzen-enter";
        assert_out(&cluster.run_on("node1", User::Root, install), 0, "");
        // (Of several tasks, the others would wait as well: what users do to themselves.)
        assert_out(&run_in_time(&cluster, &format!("srun {IMAGE} echo inside")), 0, "inside\n");
        let held = cluster.run_on("node1", User::Alice, "cat ~/held").stdout;
        assert!(held.lines().count() >= 2, "both sockets are held: {held}");
        let waits = cluster.run_on(
            "node1",
            User::Root,
            "for i in $(seq 50); do pgrep -x slurmstepd || exit 0; sleep 0.1; done; exit 1",
        );
        assert_eq!(waits.code, 0, "{release}: slurmstepd waits: {}", waits.text());
        assert!(cluster.all_idle(), "{:?}", cluster.node_states());
        cluster.run_as_root("pkill -KILL -u alice; rm /home/alice/held*");
    }
}

fn slurmstepd_keeps_nothing(release: Release) {
    let cluster = start_with_busybox(one_node(release, "keeps-nothing"));
    let empty = Emptiness::of(&cluster, &["node1"]);
    let open = |options: &str| {
        let step = format!(
            "srun --quiet -n2 {options} sh -c 'touch ~/ready.$SLURM_PROCID; until [ -e ~/go ]; do sleep 0.05; done' & \
             until [ -e ~/ready.0 -a -e ~/ready.1 ]; do sleep 0.05; done"
        );
        cluster.run(&format!("({step}) < /dev/null > /dev/null 2>&1; true"));
        let list = "for i in /proc/$(pgrep -ox slurmstepd)/fd/*; do readlink $i | sed 's/[0-9:]*\\[.*//; s/[0-9]*$//'; done | sort | uniq -c";
        let found = cluster.run_on("node1", User::Root, list).stdout;
        found.lines().map(str::trim).map(str::to_owned).collect::<Vec<_>>()
    };
    let end = "touch ~/go; while [ -n \"$(squeue -h)\" ] || pgrep -x slurmstepd > /dev/null; do sleep 0.05; done; rm ~/go ~/ready.*";
    let plain = open("");
    assert_out(&cluster.run(end), 0, "");
    let with = open(IMAGE);
    let more: Vec<&String> = with.iter().filter(|line| !plain.contains(line)).collect();
    let report: Vec<&&String> = more.iter().filter(|line| line.contains("memfd:mizzen-report")).collect();
    assert!(report.len() == 1 && more.len() == 1, "{release}: {plain:?} {with:?}");
    // Where slurmstepd hangs after the tasks have ended, the container ends all the same.
    let stopped = "pid=$(pgrep -ox slurmstepd); kill -STOP $pid; runuser -u alice touch /home/alice/go; \
                   for i in $(seq 50); do pgrep -x mizzen-fuse >/dev/null || break; sleep 0.1; done; pgrep -lx mizzen-fuse; \
                   kill -CONT $pid";
    assert_out(&cluster.run_on("node1", User::Root, stopped), 0, "");
    assert_out(&cluster.run(end), 0, "");
    empty.assert_again(&cluster, release.version());
}

/// What Slurm does after the last hook, such as ending its PMIx server, may take for ever: by then nothing of ours is open. Another
/// plugin, whose hook comes after ours, writes down what is.
#[test]
fn nothing_is_open_after_the_last_hook() {
    let contained = "SlurmdParameters=config_overrides,contain_spank".to_owned();
    for (release, conf) in
        [(Release::Slurm20_11, vec![]), (Release::Slurm22_05, vec![]), (Release::Slurm24_11, vec![contained])]
    {
        let cluster = start_with_busybox(Spec { slurm_conf: conf, ..one_node(release, "after-exit") });
        cluster.share("other.so", &spank_plugin("other-plugin", release).unwrap()).unwrap();
        cluster.set_plugstack(&[&format!("required {PLUGIN}"), "required /shared/other.so"]).unwrap();
        let open = |command: &str| {
            cluster.run_on("node1", User::Root, "rm -f /run/open-at-exit");
            let step = cluster.run(command);
            let wait = "for i in $(seq 100); do pgrep -x slurmstepd > /dev/null || break; sleep 0.1; done; \
                        sed -E 's/[0-9]+/N/g' /run/open-at-exit | sort | uniq -c";
            let list = cluster.run_on("node1", User::Root, wait).stdout;
            assert!(list.contains("socket:"), "{release}: {command}: {} {list}", step.text());
            list
        };
        // Slurm's own pipes and sockets are closed a little earlier or later; what is left open is there each time.
        let count = |list: &str| -> BTreeMap<String, u32> {
            let lines = list.lines().filter_map(|line| line.trim_start().split_once(' '));
            lines.map(|(count, what)| (what.to_owned(), count.parse().unwrap())).collect()
        };
        let plain: Vec<_> = (0..3).map(|_| count(&open("srun --quiet true"))).collect();
        let most = |what: &str| plain.iter().filter_map(|list| list.get(what)).max().copied().unwrap_or(0);
        let same = |what: &str| {
            for (options, program) in
                [("", "true"), ("", "nosuch"), ("--container-mounts=/nosuch:/x", "true")]
            {
                let has_more = || {
                    let with = count(&open(&format!("srun --quiet {IMAGE} {options} {program}")));
                    with.iter().any(|(what, count)| *count > most(what))
                };
                assert!(!(0..5).all(|_| has_more()), "{release}: {options} {program}{what}: {plain:?}");
            }
        };
        same("");
        // As far as can be seen, processes that become another user's can be traced by that user.
        let traceable = "echo 1 > /run/traceable; mount --bind /run/traceable /proc/sys/fs/suid_dumpable";
        assert_out(&cluster.run_on("node1", User::Root, traceable), 0, "");
        same(", traceable");
    }
}

#[test]
fn no_descriptor_of_ours_reaches_the_program() {
    let cluster = with_busybox("pmi-fd");
    let prolog = script(&cluster, "prolog", "#!/bin/sh\necho export PMI_FD=$WANTED\n");
    for fd in 3..24 {
        let list = cluster.run(&format!(
            "WANTED={fd} srun -n2 --task-prolog={prolog} {IMAGE} sh -c 'ls -l /proc/$$/fd | grep -E \"socket|mizzen|user:\"; echo $PMI_FD'"
        ));
        assert_out(&list, 0, &format!("{fd}\n{fd}\n"));
    }
}

#[test]
fn a_replaced_handover_gives_nothing() {
    let cluster = with_busybox("handover");
    // Each by its number in the variable that the prolog sees.
    for (change, message) in [
        (
            "s/receive=[0-9]*/receive=$report/",
            "SLURM_MIZZEN_HANDOVER: descriptor R is not a socket of Slurm's plugin",
        ),
        ("s/send=[0-9]*/send=2/", "SLURM_MIZZEN_HANDOVER: descriptor 2 cannot be used: "),
        (
            "s/report=[0-9]*/report=$receive/",
            "SLURM_MIZZEN_HANDOVER: descriptor S is not the report of Slurm's plugin",
        ),
        ("s/user-namespace=[0-9]*/user-namespace=$report/", "SLURM_MIZZEN_HANDOVER: descriptor R "),
        ("s/node=.*/node=x/", "SLURM_MIZZEN_HANDOVER: no step"),
    ] {
        let prolog = script(
            &cluster,
            "prolog",
            &format!(
                "#!/bin/bash\nh=$SLURM_MIZZEN_HANDOVER\nnumber() {{ echo \"$h\" | grep -o \"$1=[0-9]*\" | cut -d= -f2; }}\n\
                 receive=$(number receive); report=$(number report)\n\
                 echo \"print $receive $report\"\necho export SLURM_MIZZEN_HANDOVER=$(echo \"$h\" | sed \"{change}\")\n"
            ),
        );
        let step = run_in_time(&cluster, &format!("srun --task-prolog={prolog} {IMAGE} touch /tmp/ran"));
        let mut numbers = step.stdout.split_whitespace();
        let (receive, report) = (numbers.next().unwrap(), numbers.next().unwrap());
        let message = message
            .replace("descriptor R", &format!("descriptor {report}"))
            .replace("descriptor S", &format!("descriptor {receive}"));
        assert_eq!(step.code, 125, "{change}: {}", step.text());
        assert_eq!(step.stderr.matches(&message).count(), 1, "{change}: {message}\n{}", step.text());
        assert_eq!(cluster.run_on("node1", User::Root, "ls /tmp/ran").stdout, "");
    }
}

fn ends_on_all_nodes(release: Release) {
    let cluster = with_images(Spec { nodes: 2, ..one_node(release, "all-nodes") });
    let empty = Emptiness::of(&cluster, &["node1", "node2"]);
    cluster.run("cp /shared/a.sqsh /tmp");
    // The program does not care for SIGTERM.
    let step = |image: &str| {
        let begin = Instant::now();
        let step = cluster.run(&format!(
            "srun -N2 -n4 --container-image={image} sh -c 'trap \"\" TERM; while :; do sleep 0.1; done'"
        ));
        (step, begin.elapsed())
    };
    for (node, other) in [("node1", "node2"), ("node2", "node1")] {
        cluster.run_on(other, User::Alice, "cp /shared/a.sqsh /tmp; rm -f /tmp/b.sqsh");
        cluster.run_on(node, User::Alice, "rm -f /tmp/a.sqsh");
        let (ended, took) = step("/tmp/a.sqsh");
        let message = format!("mizzen: {node}: /tmp/a.sqsh: No such file or directory");
        assert_eq!(ended.stderr.matches(&message).count(), 1, "{release}: {}", ended.text());
        assert!(ended.code != 0 && took < Duration::from_secs(5), "{release}: {took:?}: {}", ended.text());
        assert!(!ended.stderr.contains(&format!("mizzen: {other}")), "{}", ended.text());
    }
    // Variables for the user's own scancel.
    let begin = Instant::now();
    let asked = cluster.run(
        "SCANCEL_INTERACTIVE=true SCANCEL_NAME=other srun -N2 -n2 --container-image=/tmp/a.sqsh sleep 60",
    );
    assert!(asked.code != 0 && begin.elapsed() < Duration::from_secs(5), "{release}: {}", asked.text());
    // A failure of the plugin itself, before there is a launcher.
    cluster.run_on("node1", User::Root, "mv /usr/lib/mizzen/mizzen-enter /root");
    let (ended, took) = step("/shared/a.sqsh");
    cluster.run_on("node1", User::Root, "mv /root/mizzen-enter /usr/lib/mizzen");
    assert_eq!(ended.stderr.matches("mizzen: node1: ").count(), 1, "{release}: {}", ended.text());
    assert!(ended.code != 0 && took < Duration::from_secs(5), "{release}: {took:?}: {}", ended.text());
    cluster.run_on("node2", User::Alice, "rm -f /tmp/a.sqsh");
    cluster.run_on("node1", User::Alice, "rm -f /tmp/a.sqsh");
    empty.assert_again(&cluster, release.version());
    // The program's own failures are its own.
    let own = cluster
        .run("srun -N2 -n2 --container-image=/shared/a.sqsh sh -c 'sleep 2; exit $((SLURM_NODEID * 7))'");
    assert_eq!(own.code, 7, "{}", own.text());
}
