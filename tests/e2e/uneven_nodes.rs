//! Nodes on which the plugin is not (yet, or any more) what it is elsewhere: what becomes of jobs with and without a container,
//! as docs/admins.md says. In every supported release.

use mizzen_tests::check::{assert_out, with_images};
use mizzen_tests::jobs::without_mizzen;
use mizzen_tests::spec::PLUGIN;
use mizzen_tests::{Cluster, Output, Release, Spec, User, on_every_release};

on_every_release!(
    what_a_node_without_the_plugin_does,
    installed_and_removed_in_order,
    a_feature_keeps_jobs_from_such_nodes,
);

/// On the second node alone: its plugstack.conf has one line, or none.
fn set_line(cluster: &Cluster, line: &str) {
    set_line_on(cluster, "node2", line);
}

fn set_line_on(cluster: &Cluster, machine: &str, line: &str) {
    let conf = "/etc/slurm/plugstack.conf";
    let script = format!(
        "echo '{line}' > /run/plugstack.conf; grep -q {conf} /proc/mounts || mount --bind /run/plugstack.conf {conf}"
    );
    on_machine(cluster, machine, &script);
}

fn on_node2(cluster: &Cluster, script: &str) {
    on_machine(cluster, "node2", script);
}

fn on_machine(cluster: &Cluster, machine: &str, script: &str) {
    let done = cluster.run_on(machine, User::Root, script);
    assert_eq!(done.code, 0, "{}", done.text());
}

fn srun(cluster: &Cluster, options: &str) -> Output {
    cluster.run(&format!("srun -Q -w node2 {options} sh -c 'cat /image 2>/dev/null || echo host'"))
}

/// What a job gets.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Runs {
    Inside,
    OnTheNode,
    Not,
    Otherwise,
}

fn outcome(done: &Output) -> Runs {
    match (done.code, done.stdout.as_str()) {
        (0, "a\n") => Runs::Inside,
        (0, "host\n") => Runs::OnTheNode,
        (_, "") => Runs::Not,
        _ => Runs::Otherwise,
    }
}

fn what_a_node_without_the_plugin_does(release: Release) {
    let spec = Cluster::spec(&format!("uneven-{}", release.version()));
    let cluster = with_images(Spec { release, ..spec });
    for (line, file, contained, plain) in [
        ("required", true, Runs::Inside, Runs::OnTheNode),
        ("optional", true, Runs::Inside, Runs::OnTheNode),
        ("#", true, Runs::OnTheNode, Runs::OnTheNode),
        ("optional", false, Runs::OnTheNode, Runs::OnTheNode),
        ("required", false, Runs::Not, Runs::Not),
        ("#", false, Runs::OnTheNode, Runs::OnTheNode),
    ] {
        let what = format!("{line}, file: {file}");
        set_line(&cluster, &format!("{line} {PLUGIN}"));
        if !file {
            on_node2(&cluster, &format!("[ ! -e {PLUGIN} ] || mount -t tmpfs none /usr/lib/mizzen"));
        }
        let done = srun(&cluster, "--container-image=/shared/a.sqsh");
        assert_eq!(outcome(&done), contained, "{release}, {what}: {}", done.text());
        let done = srun(&cluster, "");
        assert_eq!(outcome(&done), plain, "{release}, {what}: {}", done.text());
        // Slurm takes a node out of service on which no step can start.
        cluster.run_as_root("scontrol update nodename=node2 state=resume");
        assert!(cluster.all_idle(), "{release}, {what}: {:?}", cluster.node_states());
    }
}

/// A move of an administrator, on one machine.
#[derive(Clone, Copy)]
enum Move {
    Files(&'static str, bool),
    Line(&'static str, bool),
}

impl Move {
    fn make(self, cluster: &Cluster) {
        match self {
            Move::Files(machine, true) => on_machine(cluster, machine, "umount /usr/lib/mizzen"),
            Move::Files(machine, false) => {
                on_machine(cluster, machine, "mount -t tmpfs none /usr/lib/mizzen")
            }
            Move::Line(machine, there) => {
                let line = format!("required {PLUGIN}");
                set_line_on(cluster, machine, if there { &line } else { "" });
            }
        }
    }

    fn undone(self) -> Move {
        match self {
            Move::Files(machine, there) => Move::Files(machine, !there),
            Move::Line(machine, there) => Move::Line(machine, !there),
        }
    }
}

/// What a job with a container and one without get on each of the two nodes. Those without always run.
fn assert_outcomes(cluster: &Cluster, what: &str, expected: [Runs; 2]) {
    for (node, expected) in ["node1", "node2"].into_iter().zip(expected) {
        let step = |options: &str| {
            cluster.run(&format!("srun -Q -w {node} {options} sh -c 'cat /image 2>/dev/null || echo host'"))
        };
        let (contained, plain) = (step("--container-image=/shared/a.sqsh"), step(""));
        let release = cluster.release();
        assert_eq!(outcome(&contained), expected, "{release}, {what}, {node}: {}", contained.text());
        assert_eq!(outcome(&plain), Runs::OnTheNode, "{release}, {what}, {node}: {}", plain.text());
    }
    assert!(cluster.all_idle(), "{what}: {:?}", cluster.node_states());
}

/// The order of docs/admins.md: at no time a job runs in the wrong place. With the login node first there is such a time.
fn installed_and_removed_in_order(release: Release) {
    let spec = Cluster::spec(&format!("order-{}", release.version()));
    let cluster = with_images(Spec { release, ..spec });
    let machines = ["ctl", "node1", "node2"];
    machines.into_iter().for_each(|machine| Move::Line(machine, false).make(&cluster));
    machines.into_iter().for_each(|machine| Move::Files(machine, false).make(&cluster));
    assert_outcomes(&cluster, "nothing is installed", [Runs::Not, Runs::Not]);
    let steps = [
        Move::Files("node1", true),
        Move::Files("node2", true),
        Move::Files("ctl", true),
        Move::Line("node1", true),
        Move::Line("node2", true),
        Move::Line("ctl", true),
    ];
    for (number, step) in steps.iter().enumerate() {
        step.make(&cluster);
        let last = number + 1 == steps.len();
        let expected = || if last { Runs::Inside } else { Runs::Not };
        assert_outcomes(&cluster, &format!("installing, move {number}"), [expected(), expected()]);
    }
    for (number, step) in steps.iter().enumerate().rev() {
        step.undone().make(&cluster);
        assert_outcomes(&cluster, &format!("removing, move {number}"), [Runs::Not, Runs::Not]);
    }
    // The login node's line before that of the second node.
    for step in [steps[0], steps[1], steps[2], steps[3], steps[5]] {
        step.make(&cluster);
    }
    assert_outcomes(&cluster, "the login node first", [Runs::Inside, Runs::OnTheNode]);
    steps[4].make(&cluster);
    assert_outcomes(&cluster, "complete", [Runs::Inside, Runs::Inside]);
}

fn a_feature_keeps_jobs_from_such_nodes(release: Release) {
    let lua = include_str!("../../conf/job_submit.lua");
    assert!(lua.contains("local FEATURE = nil -- \"mizzen\"\n"));
    let lua = lua.replace("local FEATURE = nil -- \"mizzen\"\n", "local FEATURE = \"mizzen\"\n");
    let mut spec = Cluster::spec(&format!("feature-{}", release.version()));
    spec.first_node_features = Some("mizzen,fast".to_owned());
    spec.slurm_conf = vec!["JobSubmitPlugins=lua".to_owned()];
    spec.slurm_files = vec![("job_submit.lua".to_owned(), lua)];
    let cluster = with_images(Spec { release, ..spec });
    cluster.run_as_root("scontrol update nodename=node2 features=slow");
    set_line(&cluster, "");
    let image = "--container-image=/shared/a.sqsh";
    let where_am_i = "sh -c 'echo $SLURMD_NODENAME $(cat /image 2>/dev/null || echo host)'";
    // The other node is chosen for those who want none.
    assert_out(&cluster.run(&format!("srun -Q -w node2 {where_am_i}")), 0, "node2 host\n");
    for command in [
        format!("srun -Q {image} {where_am_i}"),
        format!("srun -Q --constraint=fast {image} {where_am_i}"),
        format!("salloc -Q {image} srun {where_am_i}"),
        format!("MIZZEN_CONTAINER=/shared/a.sqsh srun -Q {where_am_i}"),
        format!("sbatch -Q --wait -o out {image} --wrap=\"{}\"; cat out", where_am_i.replace('$', "\\$")),
    ] {
        assert_out(&cluster.run(&command), 0, "node1 a\n");
    }
    // A client without mizzen submits what the node then takes for a request.
    let conf = without_mizzen(&cluster);
    for variable in
        ["MIZZEN_CONTAINER", "PYXIS_CONTAINER_IMAGE", "MIZZEN_CONTAINER_NAME", "PYXIS_CONTAINER_NAME"]
    {
        let done = cluster.run(&format!(
            "{conf} {variable}=/shared/a.sqsh sbatch -w node2 --wrap 'touch /shared/marker'; ls /shared/marker"
        ));
        assert!(
            done.stderr.contains("Batch job submission failed"),
            "{release}, {variable}: {}",
            done.text()
        );
        assert_eq!(done.stdout, "", "{release}, {variable}");
    }
    for refused in ["-w node2", "-N2"] {
        let done = cluster.run(&format!("srun -Q --immediate=2 {refused} {image} touch /shared/marker"));
        assert!(done.code != 0 && done.stdout.is_empty(), "{release}, {refused}: {}", done.text());
        assert_eq!(cluster.run("ls /shared/marker").stdout, "", "{release}, {refused}");
    }
    assert_expressions_refused(&cluster, image);
    assert_changes_keep_the_feature(&cluster, image);
    if release.has_prefer() {
        // Slurm tries what is preferred in the place of what is required.
        for (preferred, contained, plain) in
            [("fast", Runs::Inside, Runs::OnTheNode), ("slow", Runs::Not, Runs::OnTheNode)]
        {
            let step = |options: &str| {
                let program = "sh -c 'cat /image 2>/dev/null || echo host'";
                cluster.run(&format!("srun -Q --immediate=5 --prefer={preferred} {options} {program}"))
            };
            let done = step(image);
            // What no node has is refused by some releases, and not preferred by others.
            let allowed = [contained, Runs::Inside];
            assert!(allowed.contains(&outcome(&done)), "{release}, {preferred}: {}", done.text());
            let done = step("");
            assert_eq!(outcome(&done), plain, "{release}, {preferred}: {}", done.text());
        }
    }
}

/// An expression that has the feature in it may mean nodes without it.
fn assert_expressions_refused(cluster: &Cluster, image: &str) {
    let release = cluster.release();
    let mut options: Vec<String> = [
        "mizzen|slow",
        "fast|slow",
        "(mizzen|slow)",
        "[mizzen*1&slow*1]",
        "mizzen*1&slow*1",
        "mizzenless|slow",
    ]
    .map(|expression| format!("--constraint='{expression}' -w node2"))
    .to_vec();
    options.push("-N2 --constraint='[mizzen*1&slow*1]'".to_owned());
    if release.has_prefer() {
        options.push("--prefer='mizzen|slow'".to_owned());
    }
    for refused in options {
        let done = cluster.run(&format!("srun -Q --immediate=2 {refused} {image} touch /shared/marker"));
        assert!(done.code != 0 && done.stdout.is_empty(), "{release}, {refused}: {}", done.text());
        let message = "all nodes of a job with a container need the feature mizzen; write mizzen, and other features with & before it";
        assert!(done.stderr.contains(message), "{release}, {refused}: {}", done.text());
        assert_eq!(cluster.run("ls /shared/marker").stdout, "", "{release}, {refused}");
    }
}

/// A job that waits can be changed.
fn assert_changes_keep_the_feature(cluster: &Cluster, image: &str) {
    let release = cluster.release();
    let update = |options: &str, change: &str| {
        cluster.run(&format!(
            "id=$(sbatch -H --parsable {options} --wrap=true); scontrol update jobid=$id {change}; echo $?; \
             scontrol show job $id | grep -oE ' *(Features|Prefer)=[^ ]*'; scancel $id"
        ))
    };
    let changed = update(image, "features=slow");
    assert_out(&changed, 0, "0\n   Features=slow&mizzen\n");
    assert_out(&update(image, "features="), 0, "0\n   Features=mizzen\n");
    let refused = update(image, "features='slow|mizzen'");
    assert!(refused.stdout.starts_with("1\n   Features=mizzen\n"), "{release}: {}", refused.text());
    assert_out(&update("", "features=slow"), 0, "0\n   Features=slow\n");
    if release.has_prefer() {
        let preferred = update(image, "prefer=slow");
        assert!(
            preferred.stdout.starts_with("0\n") && preferred.stdout.contains(" Prefer=slow&mizzen\n"),
            "{release}: {}",
            preferred.text()
        );
    }
}
