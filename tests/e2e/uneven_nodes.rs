//! Nodes on which the plugin is not (yet, or any more) what it is elsewhere: what becomes of jobs with and without a container,
//! as docs/admins.md says. In every supported release.

use mizzen_tests::check::{assert_out, with_images};
use mizzen_tests::spec::PLUGIN;
use mizzen_tests::{Cluster, Output, Release, Spec, User, on_every_release};

on_every_release!(what_a_node_without_the_plugin_does, a_feature_keeps_jobs_from_such_nodes);

/// On the second node alone: its plugstack.conf has one line, or none.
fn set_line(cluster: &Cluster, line: &str) {
    let conf = "/etc/slurm/plugstack.conf";
    let script = format!(
        "echo '{line}' > /run/plugstack.conf; grep -q {conf} /proc/mounts || mount --bind /run/plugstack.conf {conf}"
    );
    on_node2(cluster, &script);
}

fn on_node2(cluster: &Cluster, script: &str) {
    let done = cluster.run_on("node2", User::Root, script);
    assert_eq!(done.code, 0, "{}", done.text());
}

fn srun(cluster: &Cluster, options: &str) -> Output {
    cluster.run(&format!("srun -Q -w node2 {options} sh -c 'cat /image 2>/dev/null || echo host'"))
}

/// What a job gets.
#[derive(Debug, PartialEq)]
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

fn a_feature_keeps_jobs_from_such_nodes(release: Release) {
    let lua = include_str!("../../conf/job_submit.lua");
    assert!(lua.contains("local FEATURE = nil -- \"mizzen\"\n"));
    let lua = lua.replace("local FEATURE = nil -- \"mizzen\"\n", "local FEATURE = \"mizzen\"\n");
    let mut spec = Cluster::spec(&format!("feature-{}", release.version()));
    spec.first_node_features = Some("mizzen,fast".to_owned());
    spec.slurm_conf = vec!["JobSubmitPlugins=lua".to_owned()];
    spec.slurm_files = vec![("job_submit.lua".to_owned(), lua)];
    let cluster = with_images(Spec { release, ..spec });
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
    for refused in ["-w node2", "-N2", "--constraint='fast|slow'"] {
        let done = cluster.run(&format!("srun -Q --immediate=2 {refused} {image} touch /shared/marker"));
        assert!(done.code != 0 && done.stdout.is_empty(), "{release}, {refused}: {}", done.text());
        assert_eq!(cluster.run("ls /shared/marker").stdout, "", "{release}, {refused}");
    }
}
