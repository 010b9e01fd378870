//! A host name of the container's own: one UTS namespace for all tasks of a step on a node.

use mizzen_tests::check::{assert_failed, assert_out, one_node, start_with_busybox, with_busybox};
use mizzen_tests::{Cluster, Release, Spec, on_every_release};

on_every_release!(all_tasks_of_a_step_have_it);

fn all_tasks_of_a_step_have_it(release: Release) {
    let cluster = start_with_busybox(one_node(release, "hostname"));
    let step = "srun -n3 --container-image=/shared/bb.sqsh --container-hostname=ship";
    assert_out(&cluster.run(&format!("{step} hostname")), 0, "ship\nship\nship\n");
    // One namespace for all, and none of the node's.
    let namespaces = cluster.run(&format!(
        "{step} readlink /proc/self/ns/uts | sort -u | grep -vc $(srun readlink /proc/self/ns/uts)"
    ));
    assert_out(&namespaces, 0, "1\n");
    assert_out(&cluster.run("srun hostname"), 0, "node1\n");
    // A program looks its own name up; Slurm's name for the node stays.
    let looked_up =
        cluster.run(&format!("{step} -n1 sh -c 'grep -w ship /etc/hosts; echo $SLURMD_NODENAME'"));
    assert_out(&looked_up, 0, "127.0.1.1 ship\nnode1\n");
    for variable in ["MIZZEN_CONTAINER_HOSTNAME=ship", "MIZZEN_CONTAINER_HOSTNAME=other"] {
        let (_, name) = variable.split_once('=').unwrap();
        let run = cluster.run(&format!("{variable} srun --container-image=/shared/bb.sqsh hostname"));
        assert_out(&run, 0, &format!("{name}\n"));
    }
    assert_failed(
        &cluster.run("srun --container-image=/shared/bb.sqsh --container-hostname=a_b- hostname"),
        1,
        "mizzen: --container-hostname: \"a_b-\" is not a host name",
    );
}

#[test]
fn a_step_that_joins_has_it_too() {
    let cluster = with_busybox("joined-hostname");
    let joined = cluster.run(
        "salloc --quiet -n2 sh -c 'srun --overlap -n1 --container-image=/shared/bb.sqsh --container-hostname=ship sleep 30 & \
         until pgrep -x sleep > /dev/null; do :; done; srun --overlap -n1 --container-join=0 hostname; scancel -s KILL $SLURM_JOB_ID.0; wait'",
    );
    assert!(joined.stdout.starts_with("ship\n"), "{}", joined.text());
}

#[test]
fn without_slurm() {
    let cluster = with_busybox("run-hostname");
    assert_out(&cluster.run("mizzen run --hostname=ship /shared/bb.sqsh hostname"), 0, "ship\n");
    assert_out(
        &cluster.run("mizzen run --unshare pid --hostname ship /shared/bb.sqsh hostname"),
        0,
        "ship\n",
    );
    let plan = cluster
        .run("mizzen plan --hostname ship /shared/bb.sqsh | grep -E '^(hostname|unshare)' | tr -s ' '");
    assert_out(&plan, 0, "unshare user,mount,uts \nhostname ship \n");
    assert_failed(
        &cluster.run("mizzen run --hostname= /shared/bb.sqsh hostname"),
        125,
        "mizzen: --hostname: \"\" is not a host name",
    );
}

/// What a user attaches to a ticket.
#[test]
fn everything_that_was_tried_is_told_where_it_is_asked_for() {
    let cluster = with_busybox("debug");
    let quiet = cluster.run("srun --container-image=/shared/bb.sqsh true");
    assert_eq!(quiet.stderr, "");
    let times = cluster.run("srun --container-image=/shared/bb.sqsh --container-verbose true");
    assert!(times.stderr.starts_with("mizzen: note: node1: stage "), "{}", times.text());
    assert!(!times.stderr.contains("debug"), "{}", times.text());
    for command in [
        "srun --container-image=/shared/bb.sqsh --container-verbose=debug true",
        "MIZZEN_LOG=debug srun --container-image=/shared/bb.sqsh true",
        "srun mizzen run --verbose=debug /shared/bb.sqsh true",
    ] {
        let told = cluster.run(command);
        let image =
            "mizzen: debug: node1: the image path=\"/shared/bb.sqsh\" kind=Squashfs provenance=Source\n";
        assert!(told.code == 0 && told.stderr.contains(image), "{command}: {}", told.text());
        assert!(
            told.stderr.contains("mizzen: debug: node1: a new namespace kind=Mount\n"),
            "{}",
            told.text()
        );
    }
    // A reader that has gone away changes nothing.
    for log in ["", "MIZZEN_LOG=debug", "MIZZEN_LOG=json"] {
        let unread = cluster.run(&format!(
            "{log} mizzen run /shared/bb.sqsh nosuch 2>&1 >/dev/null | true; echo ${{PIPESTATUS[0]}}"
        ));
        assert_out(&unread, 0, "127\n");
    }
    let json = cluster.run("MIZZEN_LOG=json srun --container-image=/shared/bb.sqsh true");
    let lines: Vec<serde_json::Value> =
        json.stderr.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(
        lines.iter().any(|line| line["message"] == "the image" && line["node"] == "node1"),
        "{}",
        json.text()
    );
    let by_site = Spec {
        nodes: 1,
        mizzen_toml: Some("log_format = \"json\"\n".to_owned()),
        ..Cluster::spec("debug-json")
    };
    let cluster = start_with_busybox(by_site);
    let told = cluster.run("srun --container-image=/shared/bb.sqsh --container-verbose=debug true");
    let first = told.stderr.lines().next().unwrap();
    assert_eq!(serde_json::from_str::<serde_json::Value>(first).unwrap()["node"], "node1", "{}", told.text());
}
