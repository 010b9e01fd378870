//! What cannot run in its container does not run at all: every way in which a step can fail on a node, in every
//! supported release.

use mizzen_tests::check::{CONTAINER_OPTIONS, assert_failed_closed, assert_out, one_node, with_images};
use mizzen_tests::spec::PLUGIN;
use mizzen_tests::{Cluster, Release, Spec, User, on_every_release};

on_every_release!(
    fails_closed,
    trusts_no_client,
    a_job_outlives_its_image,
    survives_panics,
    a_node_is_called_as_slurm_calls_it,
);

/// Four tasks on each of two nodes with these options fail, and these nodes tell why, once; the same in a batch script
/// and in the step of an allocation. The message is the one of `NODE`, and is in Slurm's log on both.
fn assert_step_fails(cluster: &Cluster, option: &str, options: &str, message: &str, told_by: &[&str]) {
    let on = |node: &str| message.replace("NODE", node);
    let srun = cluster.run(&format!("srun -N2 -n8 {options} touch /shared/marker"));
    for node in told_by {
        assert_failed_closed(cluster, &format!("srun {options}"), &srun, &srun.stderr, &on(node));
    }
    let told = ["node1", "node2"].map(|node| srun.stderr.matches(&on(node)).count());
    assert_eq!(told.iter().sum::<usize>(), told_by.len(), "{}", srun.text());
    assert!(cluster.slurmd_log("node2").contains(&on("node2")), "{}", cluster.slurmd_log("node2"));
    let sbatch = cluster
        .run(&format!("sbatch --wait -w node1 --output=/shared/out {options} --wrap 'touch /shared/marker'"));
    let printed = cluster.run("cat /shared/out; rm /shared/out").stdout;
    assert_failed_closed(cluster, &format!("sbatch {options}"), &sbatch, &printed, &on("node1"));
    if option == "--container-image" || !cluster.release().has_container_option() {
        let salloc = cluster.run(&format!("salloc -w node2 {options} srun touch /shared/marker"));
        assert_failed_closed(cluster, &format!("salloc {options}"), &salloc, &salloc.stderr, &on("node2"));
    }
}

fn fails_closed(release: Release) {
    let cluster = with_images(Spec { nodes: 2, ..one_node(release, "closed") });
    // Good where the job is submitted, and missing or broken where it runs: /tmp is each machine's own.
    cluster.run("cp /shared/a.sqsh /tmp/gone.sqsh; cp /shared/a.sqsh /tmp/broken.sqsh");
    for node in ["node1", "node2"] {
        cluster.run_on(node, User::Alice, "head -c 20000 /shared/a.sqsh > /tmp/broken.sqsh");
    }
    let causes = [
        ("/tmp/gone.sqsh", "", "NODE: /tmp/gone.sqsh: No such file or directory"),
        ("/tmp/broken.sqsh", "", "NODE: /tmp/broken.sqsh: "),
        (
            "/shared/a.sqsh",
            "--container-mounts=/nosuch:/x",
            "NODE: --container-mounts: source path does not exist: /nosuch",
        ),
    ];
    for (requirement, option) in ["required", "optional"].into_iter().zip(CONTAINER_OPTIONS) {
        cluster.set_plugstack(&[&format!("{requirement} {PLUGIN}")]).unwrap();
        for (image, more, message) in causes {
            assert_step_fails(&cluster, option, &format!("{option}={image} {more}"), message, &["node1"]);
        }
    }
    let by_root = |script: &str| {
        for node in ["node1", "node2"] {
            let done = cluster.run_on(node, User::Root, script);
            assert_eq!(done.code, 0, "{}", done.text());
        }
    };
    let image = "--container-image=/shared/a.sqsh";
    let root = cluster.run_as_root(&format!("srun -w node1 {image} touch /shared/marker"));
    let message = "node1: containers are not for root's jobs";
    assert_failed_closed(&cluster, "a job of root's", &root, &root.stderr, message);
    by_root("mv /usr/lib/mizzen/mizzen-enter /root");
    let message = "NODE: /usr/lib/mizzen/mizzen-enter: the launcher is missing";
    assert_step_fails(&cluster, "--container-image", image, message, &["node1", "node2"]);
    by_root("mv /root/mizzen-enter /usr/lib/mizzen; chmod 0 /usr/bin/mizzen");
    let srun = cluster.run(&format!("srun -n2 -w node1 {image} touch /shared/marker"));
    assert!(srun.code != 0 && cluster.run("ls /shared/marker").stdout.is_empty(), "{}", srun.text());
    by_root(
        "chmod 755 /usr/bin/mizzen; cp -p /etc/mizzen/mizzen.toml /root; echo 'x = 1' > /etc/mizzen/mizzen.toml",
    );
    assert_step_fails(
        &cluster,
        "--container-image",
        image,
        "NODE: /etc/mizzen/mizzen.toml:1: unknown field `x`",
        &["node1"],
    );
    by_root("mv /root/mizzen.toml /etc/mizzen/mizzen.toml");
    assert_out(&cluster.run(&format!("srun -w node2 {image} cat /image")), 0, "a\n");
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
    let log = cluster.slurmd_log("node1");
    for (_, _, message) in causes {
        let message = message.replace("NODE", "node1");
        for step in [".0]", ".batch]"] {
            let found = log.lines().any(|line| line.contains(&message) && line.contains(step));
            assert!(found, "{release}: slurmd's log lacks {message} with {step}\n{log}");
        }
    }
}

fn trusts_no_client(release: Release) {
    let cluster = with_images(one_node(release, "clients"));
    for requirement in ["required", "optional"] {
        cluster.set_plugstack(&[&format!("{requirement} {PLUGIN}")]).unwrap();
        // Values that never went through our client: Slurm takes these variables for an option on the node.
        let inject = |option: &str, value: &str, program: &str| {
            cluster.run(&format!("_SLURM_SPANK_OPTION_mizzen_container_{option}='{value}' srun {program}"))
        };
        assert_out(&inject("image", "/shared/a.sqsh", "cat /image"), 0, "a\n");
        for (option, value, message) in [
            ("image", "a.sqsh", "node1: --container-image: a.sqsh is not absolute"),
            ("image", "", "node1: --container-image: the image is empty"),
            ("image", "/no/such", "node1: /no/such: "),
            ("mounts", "/tmp:/x", "node1: --container-mounts: the image is empty"),
            ("join", "0", "node1: --container-join: the image is empty"),
        ] {
            let injected = inject(option, value, "touch /shared/marker");
            let what = format!("{requirement} injected {option}={value}");
            assert_failed_closed(&cluster, &what, &injected, &injected.stderr, message);
        }
        // The client has no plugin, the node does: here it is asked by Slurm's own option alone.
        if release.has_container_option() {
            cluster.run_as_root(
                "rm -rf /shared/conf; cp -r /etc/slurm /shared/conf; : > /shared/conf/plugstack.conf",
            );
            let bare = |image: &str, program: &str| {
                cluster.run(&format!("SLURM_CONF=/shared/conf/slurm.conf srun --container={image} {program}"))
            };
            assert_out(&bare("/shared/a.sqsh", "cat /image"), 0, "a\n");
            let what = format!("{requirement} client without plugin");
            let missing = bare("/no/such", "touch /shared/marker");
            assert_failed_closed(&cluster, &what, &missing, &missing.stderr, "node1: /no/such: ");
            let relative = bare("a.sqsh", "touch /shared/marker");
            let message = "node1: --container: a.sqsh is not absolute";
            assert_failed_closed(&cluster, &what, &relative, &relative.stderr, message);
        }
    }
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
}

fn a_job_outlives_its_image(release: Release) {
    let cluster = with_images(one_node(release, "vanishes"));
    let submitted = cluster.run(
        "cp /shared/a.sqsh here.sqsh; sbatch --hold --parsable --output=/shared/out --container=here.sqsh \
         --wrap 'touch /shared/marker'",
    );
    let job = submitted.stdout.trim();
    let ended = cluster.run(&format!(
        "rm here.sqsh; scontrol release {job}; \
         for i in $(seq 300); do scontrol show job {job} | grep -q JobState=FAILED && break; sleep 0.1; done; \
         scontrol show job {job} | grep -o 'ExitCode=[0-9:]*'; cat /shared/out; ls /shared/marker"
    ));
    let message = "node1: /home/alice/here.sqsh: No such file or directory";
    assert!(ended.stdout.starts_with("ExitCode=125:0\n"), "{release}: {}", ended.text());
    assert_eq!(ended.stdout.matches(message).count(), 1, "{release}: {}", ended.text());
    assert!(!ended.stdout.contains("marker"), "{release}: {}", ended.text());
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
}

fn survives_panics(release: Release) {
    let mut spec = one_node(release, "panics");
    spec.layers.insert(0, mizzen_tests::target_dir().join("stage-inject"));
    let cluster = with_images(spec);
    let srun = "srun --container-image=/shared/a.sqsh touch /shared/marker";
    for requirement in ["required", "optional"] {
        for place in [
            "node:init",
            "node:option",
            "node:task_init",
            "client:init",
            "client:option",
            "client:init_post_opt",
            "client:local_user_init",
        ] {
            cluster.set_plugstack(&[&format!("{requirement} {PLUGIN} inject-panic={place}")]).unwrap();
            let hit = cluster.run(srun);
            let what = format!("{release} {requirement} {place}: {}", hit.text());
            if place.starts_with("node") {
                let message = "node1: internal error: panicked at ";
                // A panic in the hook itself loses the node's name, which its own code would have added.
                let message =
                    if place == "node:task_init" { "mizzen: internal error: panicked at " } else { message };
                assert_failed_closed(&cluster, &what, &hit, &hit.stderr, message);
            } else {
                // Without its options registered, srun itself refuses the unknown one.
                assert!(hit.code != 0 && cluster.run("ls /shared/marker").stdout.is_empty(), "{what}");
                assert!(
                    place == "client:init" || hit.stderr.contains("mizzen: internal error: panicked at "),
                    "{what}"
                );
            }
            let plain = cluster.run("srun --quiet hostname");
            assert_eq!(
                (plain.code, plain.stdout.as_str(), plain.stderr.as_str()),
                (0, "node1\n", ""),
                "{what}"
            );
        }
    }
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
    let left = "for i in $(seq 100); do pgrep slurmstepd || exit 0; sleep 0.1; done; exit 1";
    assert_eq!(cluster.run_on("node1", User::Root, left).code, 0, "a step is left");
}

/// The host's name is another one: `NodeName=node1 NodeHostname=rack7`.
fn a_node_is_called_as_slurm_calls_it(release: Release) {
    let cluster = with_images(one_node(release, "node-name"));
    cluster.run("cp /shared/a.sqsh /tmp/gone.sqsh");
    assert_out(&cluster.run_on("node1", User::Root, "hostname rack7; hostname"), 0, "rack7\n");
    assert_out(&cluster.run("srun -Q --container-image=/shared/a.sqsh hostname"), 0, "rack7\n");
    let failed = cluster.run("srun -n2 --container-image=/tmp/gone.sqsh touch /shared/marker");
    let message = "mizzen: node1: /tmp/gone.sqsh: No such file or directory";
    assert_failed_closed(&cluster, "another host name", &failed, &failed.stderr, message);
    // What the watcher of a file server says, through slurmstepd.
    let message = "mizzen: node1: /shared/a.sqsh: its file server was killed";
    // More than once: srun does not wait for the last words of a task that was killed.
    for _ in 0..10 {
        let killed = cluster.run(
            "srun --container-image=/shared/a.sqsh sleep 100 & until pgrep -x sleep && pgrep -x mizzen-watch; do sleep 0.02; done > /dev/null; \
             sleep 0.1; kill -KILL $(pgrep -x mizzen-fuse); wait $!",
        );
        assert_eq!(killed.stderr.matches(message).count(), 1, "{release}: {}", killed.text());
        assert!(!killed.stderr.contains("rack7"), "{release}: {}", killed.text());
    }
}
