//! Steps of many nodes say once what holds for all of them.

use std::time::{Duration, Instant};

use mizzen_tests::check::{assert_out, one_node, with_images};
use mizzen_tests::{Cluster, Output, Release, Spec, User, on_every_release};

const NODES: u32 = 32;

on_every_release!(a_failure_of_every_node_is_told_once);

fn message(node: &str) -> String {
    format!("mizzen: {node}: /tmp/a.sqsh: No such file or directory")
}

/// Runs two tasks on each node with an image that only some nodes have.
fn failing_step(cluster: &Cluster, options: &str) -> Output {
    let begin = Instant::now();
    let step = cluster
        .run(&format!("srun -N4 --ntasks-per-node=2 {options} --container-image=/tmp/a.sqsh sleep 60"));
    assert!(begin.elapsed() < Duration::from_secs(6), "{:?}: {}", begin.elapsed(), step.text());
    step
}

fn a_failure_of_every_node_is_told_once(release: Release) {
    let cluster = with_images(Spec { nodes: 4, ..one_node(release, "told-once") });
    assert_out(&cluster.run("cp /shared/a.sqsh /tmp"), 0, "");
    // However srun takes the end of its first task.
    for options in ["", "--kill-on-bad-exit=1"] {
        let step = failing_step(&cluster, options);
        assert_eq!(step.stderr.matches(&message("node1")).count(), 1, "{release}: {}", step.text());
        assert_eq!(step.stderr.matches("mizzen: ").count(), 2, "with its hint: {release}: {}", step.text());
    }
    let step = failing_step(&cluster, "");
    assert_eq!(step.code, 125, "{release}: {}", step.text());
    // Slurm's log has it on every node.
    for node in ["node1", "node4"] {
        assert!(cluster.slurmd_log(node).contains(&message(node)), "{release}: {}", cluster.slurmd_log(node));
    }
    // The first node has nothing to tell, so that the next one does.
    for node in ["node1", "node3"] {
        assert_out(&cluster.run_on(node, User::Alice, "cp /shared/a.sqsh /tmp"), 0, "");
    }
    for options in ["", "--kill-on-bad-exit=1"] {
        let step = failing_step(&cluster, options);
        assert_eq!(step.stderr.matches(&message("node2")).count(), 1, "{release}: {}", step.text());
        assert_eq!(step.stderr.matches("mizzen: ").count(), 2, "{release}: {}", step.text());
    }
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
}

#[test]
fn thirty_two_nodes_speak_with_one_voice() {
    let cluster = with_images(Spec { nodes: NODES, ..Cluster::spec("many-nodes") });
    assert_out(&cluster.run("cp /shared/a.sqsh /tmp"), 0, "");
    let step = cluster.run(&format!("srun -N{NODES} --container-image=/tmp/a.sqsh true"));
    assert_eq!((step.code, step.stderr.matches("mizzen: ").count()), (125, 2), "{}", step.text());
    assert!(step.stderr.contains(&message("node1")), "{}", step.text());
    assert!(step.stderr.contains("\nmizzen: hint: this node does not have the file; "), "{}", step.text());

    let note = "--container-mounts: /x is mounted twice; the last one holds";
    let step = cluster.run(&format!(
        "srun -N{NODES} --container-image=/shared/a.sqsh --container-mounts=/tmp:/x,/etc:/x true"
    ));
    assert_eq!(step.code, 0, "{}", step.text());
    assert_eq!(step.stderr, format!("mizzen: note: node1: {note}\n"));
    let last = format!("node{NODES}");
    assert!(cluster.slurmd_log(&last).contains(note), "{}", cluster.slurmd_log(&last));

    ends_in_time(&cluster);

    // The program's own end is told by every node, once for all its tasks: nothing ends the others here.
    let step = cluster
        .run(&format!("srun -N{NODES} --ntasks-per-node=2 --container-image=/shared/a.sqsh nosuch-program"));
    assert_eq!(step.code, 127, "{}", step.text());
    let told = step.stderr.matches("nosuch-program: no such program in the container").count();
    assert_eq!(told, NODES as usize, "{}", step.text());
}

/// The last node is the one that waits longest for its turn, and what is left of the others ignores SIGTERM.
fn ends_in_time(cluster: &Cluster) {
    let last = format!("node{NODES}");
    for number in 1..NODES {
        let copied = cluster.run_on(&format!("node{number}"), User::Alice, "cp /shared/a.sqsh /tmp");
        assert_out(&copied, 0, "");
    }
    // Before the launcher, so before the failure.
    cluster.share("begin", b"#!/bin/sh\ndate +%s%N > /shared/begun.$SLURM_NODEID\n").unwrap();
    assert_out(&cluster.run_as_root("chmod 755 /shared/begin"), 0, "");
    let step = cluster.run(&format!(
        "srun -N{NODES} --task-prolog=/shared/begin --container-image=/tmp/a.sqsh sh -c 'trap \"\" TERM; exec sleep 60'; code=$?; \
         echo $((($(date +%s%N) - $(cat /shared/begun.{})) / 1000000)); exit $code",
        NODES - 1
    ));
    assert_ne!(step.code, 0, "{}", step.text());
    assert_eq!(step.stderr.matches("mizzen: ").count(), 2, "{}", step.text());
    assert!(step.stderr.contains(&message(&last)), "{}", step.text());
    let took: u32 = step.stdout.trim().parse().unwrap();
    assert!(took < 5000, "{took} ms: {}", step.text());
}
