//! The plugin in every supported Slurm release, in all the programs that load it.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test fails by panicking

use std::collections::BTreeSet;
use std::sync::LazyLock;

use mizzen_tests::images::ImageTree;
use mizzen_tests::{Cluster, Output, Release, Spec};

/// A small but real image.
static IMAGE: LazyLock<Vec<u8>> =
    LazyLock::new(|| ImageTree::busybox().unwrap().squashfs(&["-comp", "zstd"]).unwrap());

const PLUGIN: &str = "/usr/lib/mizzen/spank_mizzen.so";

/// Runs each check once for every release, as `slurm_22_05::fails_closed` and so on.
macro_rules! on_every_release {
    ($($check:ident),* $(,)?) => {
        mod slurm_20_11 { $(#[test] fn $check() { super::$check(super::Release::Slurm20_11) })* }
        mod slurm_22_05 { $(#[test] fn $check() { super::$check(super::Release::Slurm22_05) })* }
        mod slurm_24_11 { $(#[test] fn $check() { super::$check(super::Release::Slurm24_11) })* }
        mod slurm_26_05 { $(#[test] fn $check() { super::$check(super::Release::Slurm26_05) })* }
    };
}

on_every_release!(
    loads_in_every_program,
    leaves_plain_jobs_alone,
    fails_closed,
    refuses_bad_requests_before_submission,
    refuses_bad_settings,
    hands_the_container_down,
    keeps_components_apart,
    survives_panics,
    ignores_the_extern_step,
    leaves_slurms_own_runtime_alone,
);

/// One node: with two, a job may run on either while the other still ends its last one.
fn spec(release: Release, name: &str) -> Spec {
    Spec { release, nodes: 1, ..Cluster::spec(&format!("{name}-{}", release.version())) }
}

/// A cluster of the release with two "images" on the shared file system.
fn start(spec: Spec) -> Cluster {
    let cluster = Cluster::start(spec).unwrap();
    for image in ["a.sqsh", "b.sqsh"] {
        cluster.share(image, &IMAGE).unwrap();
    }
    cluster
}

/// All ways to ask for a container that this release has.
fn container_options(release: Release) -> Vec<&'static str> {
    // salloc --container is refused by Slurm itself unless its shell runs on the node.
    if release.has_container_option() {
        vec!["--container", "--container-image"]
    } else {
        vec!["--container-image"]
    }
}

/// The message was printed once, the exit code is right, and nothing ran on the host.
fn assert_failed_closed(cluster: &Cluster, what: &str, output: &Output, printed: &str, message: &str) {
    let context = format!("{} {what}: {}", cluster.release(), output.text());
    assert_eq!(output.code, 125, "{context}");
    assert_eq!(printed.matches(message).count(), 1, "{context}\n{printed}");
    assert_eq!(cluster.run("ls /shared/marker*").stdout, "", "ran on the host: {context}");
}

fn loads_in_every_program(release: Release) {
    let cluster = start(Spec { nodes: 2, ..spec(release, "loads") });
    for command in ["srun", "sbatch", "salloc"] {
        let help = cluster.run(&format!("{command} --help"));
        assert!(help.stdout.contains("--container-image=IMAGE"), "{release} {command}: {}", help.text());
        assert_eq!(help.stderr, "", "{release} {command}");
    }
    let version = cluster.run("srun --version").stdout;
    assert!(version.contains(release.version()), "{version}");
    let srun = cluster.run("srun -N2 --ntasks-per-node=2 hostname | sort");
    assert_eq!(srun.stdout, "node1\nnode1\nnode2\nnode2\n", "{}", srun.text());
    let sbatch =
        cluster.run("sbatch --wait -w node1 --output=/shared/out --wrap 'srun hostname' && cat /shared/out");
    assert!(sbatch.stdout.ends_with("node1\n"), "{}", sbatch.text());
    let salloc = cluster.run("salloc -w node2 srun hostname");
    assert_eq!(salloc.stdout, "node2\n", "{}", salloc.text());
    // slurmd and slurmstepd write here when they cannot load a plugin.
    for node in ["node1", "node2"] {
        let log = cluster.slurmd_log(node);
        assert!(log.contains("slurmd version"), "{log}");
        let complaint = log.lines().find(|line| line.contains("spank") || line.contains("mizzen"));
        assert_eq!(complaint, None, "{release}");
    }
}

fn leaves_plain_jobs_alone(release: Release) {
    let cluster = start(spec(release, "plain"));
    // Everything a task can see of its surroundings, less what differs between any two steps.
    let probe = "srun --quiet bash -c 'env | grep -vE \"^(SLURM_.*(ID|PORT|PID|TIME)|SRUN_COMM_PORT|TMPDIR)=\" | sort; \
                 ls -l /proc/self/fd | wc -l; ulimit -a; grep -E \"^(Sig[PBIC]|Cap|NoNew|Groups)\" /proc/self/status'";
    cluster.set_plugstack(&[]).unwrap();
    let without = cluster.run(probe);
    assert_eq!(without.code, 0, "{}", without.text());
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", "this is not TOML").unwrap();
    for line in [format!("required {PLUGIN}"), format!("required {PLUGIN} no-such-argument")] {
        cluster.set_plugstack(&[&line]).unwrap();
        let with = cluster.run(probe);
        assert_eq!((with.code, &with.stderr), (0, &without.stderr), "{release}");
        let lines = |output: &Output| output.stdout.lines().map(str::to_owned).collect::<BTreeSet<_>>();
        let changed: Vec<String> = lines(&with).symmetric_difference(&lines(&without)).cloned().collect();
        assert!(changed.is_empty(), "{release}: {changed:?}");
    }
    let batch = cluster.run("sbatch --wait --output=/shared/out --wrap 'env; srun env' && cat /shared/out");
    assert!(batch.code == 0 && !batch.stdout.contains("MIZZEN"), "{}", batch.text());
}

fn fails_closed(release: Release) {
    let cluster = start(spec(release, "closed"));
    let message = "node1: /shared/a.sqsh: this version of mizzen cannot start containers yet";
    for requirement in ["required", "optional"] {
        cluster.set_plugstack(&[&format!("{requirement} {PLUGIN}")]).unwrap();
        let mut options = container_options(release);
        if !release.has_container_option() {
            options.push("--container");
        }
        for option in options {
            let what = format!("{requirement} {option}");
            // Four tasks and one message.
            let srun = cluster.run(&format!("srun -n4 {option}=/shared/a.sqsh touch /shared/marker"));
            assert_failed_closed(&cluster, &format!("{what} srun"), &srun, &srun.stderr, message);
            let sbatch = cluster.run(&format!(
                "sbatch --wait --output=/shared/out {option}=/shared/a.sqsh --wrap 'touch /shared/marker'"
            ));
            let printed = cluster.run("cat /shared/out; rm /shared/out").stdout;
            assert_failed_closed(&cluster, &format!("{what} sbatch"), &sbatch, &printed, message);
            if option == "--container" && release.has_container_option() {
                continue; // Slurm refuses salloc --container
            }
            let salloc = cluster.run(&format!("salloc {option}=/shared/a.sqsh srun touch /shared/marker"));
            assert_failed_closed(&cluster, &format!("{what} salloc"), &salloc, &salloc.stderr, message);
        }
        // Values that never went through our client: Slurm takes these variables for an option on the node.
        for (value, message) in [
            ("/shared/a.sqsh", message),
            ("a.sqsh", "node1: --container-image: a.sqsh is not absolute"),
            ("", "node1: --container-image: the image is empty"),
        ] {
            let injected = cluster.run(&format!(
                "_SLURM_SPANK_OPTION_mizzen_container_image='{value}' srun touch /shared/marker"
            ));
            assert_failed_closed(
                &cluster,
                &format!("{requirement} injected {value}"),
                &injected,
                &injected.stderr,
                message,
            );
        }
        // The client has no plugin, the node does: here it is asked by Slurm's own option alone.
        if release.has_container_option() {
            cluster.run_as_root("cp -r /etc/slurm /shared/conf; : > /shared/conf/plugstack.conf");
            let srun = cluster.run(
                "SLURM_CONF=/shared/conf/slurm.conf srun --container=/shared/a.sqsh touch /shared/marker",
            );
            assert_failed_closed(
                &cluster,
                &format!("{requirement} client without plugin"),
                &srun,
                &srun.stderr,
                message,
            );
        }
    }
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
    assert!(cluster.slurmd_log("node1").contains(message), "slurmd's log has the message too");
}

fn refuses_bad_requests_before_submission(release: Release) {
    let cluster = start(spec(release, "refuses"));
    cluster.run_as_root("mkfifo /shared/fifo");
    cluster.share("page.sqsh", format!("<!DOCTYPE html>{:200}", "").as_bytes()).unwrap();
    let cases = [
        ("=", "the image is empty"),
        ("=$'tf\\n.sqsh'", "control character in \"tf\\n.sqsh\""),
        ("=$'\\e[31mred'", "control character in \"\\u{1b}[31mred\""),
        (
            "=$(head -c 100000 /dev/zero | tr '\\0' x)",
            "the image's name has 100000 bytes, more than the 4095 of a path",
        ),
        ("=missing.sqsh", "no such image; tried /home/alice/missing.sqsh"),
        ("=/shared/fifo", "/shared/fifo: not an image (is a FIFO)"),
        ("=/dev/zero", "/dev/zero: not an image (is a character device)"),
        ("=/shared/page.sqsh", "/shared/page.sqsh: not an image (starts with \"<!DO\", looks like HTML)"),
        ("=foo://x/y", "foo://x/y: cannot fetch images from foo://"),
        ("=docker://me:secret@registry/x", "docker://…@registry/x: cannot fetch images from docker://"),
    ];
    let mut options = container_options(release);
    if !release.has_container_option() {
        options.push("--container");
    }
    for requirement in ["required", "optional"] {
        cluster.set_plugstack(&[&format!("{requirement} {PLUGIN}")]).unwrap();
        for option in &options {
            for (value, message) in cases {
                let commands = [
                    format!("srun {option}{value} touch /shared/marker"),
                    format!("sbatch {option}{value} --wrap true"),
                ];
                for command in &commands {
                    let refused = cluster.run(command);
                    assert_eq!(refused.code, 1, "{release} {requirement} {command}: {}", refused.text());
                    let expected = format!("error: mizzen: {option}: {message}");
                    assert_eq!(
                        refused.stderr.matches(&expected).count(),
                        1,
                        "{release} {command}: {}",
                        refused.text()
                    );
                    assert!(!refused.stderr.contains("secret") && !refused.stderr.contains('\u{1b}'));
                }
            }
        }
        let salloc = cluster.run("salloc --container-image=missing.sqsh true");
        assert!(salloc.code == 1 && salloc.stderr.contains("no such image; tried"), "{}", salloc.text());
    }
    let own_code = cluster.run("SLURM_EXIT_ERROR=77 srun --container-image=missing.sqsh true");
    assert_eq!(own_code.code, 77, "Slurm's way to set the exit code: {}", own_code.text());
    if release.has_container_option() {
        let two = cluster.run("srun --container=/shared/a.sqsh --container-image=/shared/b.sqsh true");
        assert_eq!(two.code, 1, "{}", two.text());
        assert!(two.stderr.contains("two images for one container"), "{}", two.text());
    }
    assert_eq!(
        cluster.run("squeue --noheader --states=all").stdout,
        "",
        "{release}: something was submitted"
    );
    assert_eq!(cluster.run("ls /shared/marker").stdout, "");
}

fn refuses_bad_settings(release: Release) {
    let cluster = start(spec(release, "settings"));
    let option = "--container-image=/shared/a.sqsh";
    let settings = "/etc/mizzen/mizzen.toml";
    let refused = |message: &str| {
        let srun = cluster.run(&format!("srun {option} touch /shared/marker"));
        assert_eq!(srun.code, 1, "{release}: {}", srun.text());
        assert_eq!(srun.stderr.matches(message).count(), 1, "{release}: {}", srun.text());
        assert!(srun.stderr.contains("mizzen: hint: "), "{release}: {}", srun.text());
    };
    for (text, message) in [
        (
            "# x\nimage_folder = []\n",
            "mizzen.toml:2: unknown field `image_folder`, expected one of `image_folders`",
        ),
        (
            "image_folders = \"x\"\n",
            "mizzen.toml:1: image_folders: invalid type: string \"x\", expected a sequence",
        ),
        ("image_folders = [\"x\"]\n", "mizzen.toml: image_folders: \"x\" is not absolute"),
        ("\n\n[oops\n", "mizzen.toml:3: "),
    ] {
        cluster.write_everywhere(settings, text).unwrap();
        refused(message);
    }
    // Good on the login node and broken on the compute node: the task ends.
    cluster.write_everywhere(settings, "").unwrap();
    cluster.run_on("node1", mizzen_tests::User::Root, "echo 'x = 1' > /etc/mizzen/mizzen.toml");
    let broken = cluster.run(&format!("srun {option} touch /shared/marker"));
    let message = "node1: /etc/mizzen/mizzen.toml:1: unknown field `x`";
    assert_failed_closed(&cluster, "broken settings on the node", &broken, &broken.stderr, message);
    for (change, message) in [
        ("chown alice", "mizzen.toml belongs to uid 2001, not to root"),
        ("chmod 0664", "mizzen.toml is writable by others than root (mode 0664)"),
        ("chmod 0646", "mizzen.toml is writable by others than root (mode 0646)"),
    ] {
        cluster.run_as_root(&format!("{change} {settings}"));
        refused(message);
        cluster.run_as_root(&format!("chown root {settings}; chmod 0644 {settings}"));
    }
    cluster.run_as_root("chmod 0777 /etc/mizzen");
    refused("its directory /etc/mizzen is writable by others than root (mode 0777)");
    cluster.run_as_root(
        "chmod 0755 /etc/mizzen; mv /etc/mizzen/mizzen.toml /root; ln -s /root/mizzen.toml /etc/mizzen/",
    );
    let link = cluster.run(&format!("srun {option} true"));
    assert!(link.code == 1 && link.stderr.contains("mizzen.toml: is a symbolic link"), "{}", link.text());
    cluster.run_as_root("rm /etc/mizzen/mizzen.toml");
    for (arguments, message) in [
        ("confg=/x", "plugstack.conf: unknown argument \"confg=/x\""),
        ("config=", "plugstack.conf: unknown argument \"config=\""),
        ("config=/nowhere/mizzen.toml", "/nowhere/mizzen.toml: no such file"),
    ] {
        cluster.set_plugstack(&[&format!("required {PLUGIN} {arguments}")]).unwrap();
        refused(message);
    }
    // A file elsewhere, as plugstack.conf names it, is read: its image folder is searched.
    cluster.write_everywhere("/etc/other.toml", "image_folders = [\"/shared\"]").unwrap();
    cluster.set_plugstack(&[&format!("required {PLUGIN} config=/etc/other.toml")]).unwrap();
    let found = cluster.run("srun --container-image=b.sqsh true");
    assert_failed_closed(&cluster, "image folder", &found, &found.stderr, "node1: /shared/b.sqsh: ");
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
}

fn hands_the_container_down(release: Release) {
    let cluster = start(spec(release, "inherits"));
    let inside = |script: &str| {
        cluster.run(&format!("cd /shared; salloc --container-image=a.sqsh bash -c '{script}'"))
    };
    let same = inside("cd /; srun true");
    assert_failed_closed(&cluster, "inherited", &same, &same.stderr, "node1: /shared/a.sqsh: ");
    let none = inside("srun --container-image=none hostname");
    assert_eq!((none.code, none.stdout.as_str()), (0, "node1\n"), "{release}: {}", none.text());
    let kept = inside("srun --export=NONE true");
    assert_failed_closed(&cluster, "--export=NONE", &kept, &kept.stderr, "node1: /shared/a.sqsh: ");
    for option in ["--container", "--container-image"] {
        let other = inside(&format!("srun {option}=b.sqsh true"));
        assert_failed_closed(
            &cluster,
            &format!("nested {option}"),
            &other,
            &other.stderr,
            "node1: /shared/b.sqsh: ",
        );
    }
    let forged = cluster.run("SLURM_MIZZEN_REQUEST='image=a.sqsh' srun touch /shared/marker");
    assert_eq!(forged.code, 1, "{}", forged.text());
    assert!(forged.stderr.contains("SLURM_MIZZEN_REQUEST: \"a.sqsh\" is not absolute"), "{}", forged.text());
    if release.has_container_option() {
        let shown = cluster
            .run("sbatch --hold --parsable --container=/shared/a.sqsh --wrap true | xargs scontrol show job");
        assert!(shown.stdout.contains("Container=/shared/a.sqsh"), "{}", shown.text());
    }
}

fn keeps_components_apart(release: Release) {
    let cluster = start(Spec { nodes: 2, ..spec(release, "components") });
    let mut options = container_options(release);
    if !release.has_container_option() {
        options.push("--container");
    }
    for option in options {
        let (a, b) = (format!("{option}=/shared/a.sqsh"), format!("{option}=/shared/b.sqsh"));
        for command in [
            format!("srun -N1 {a} touch /shared/marker : -N1 {b} touch /shared/marker"),
            format!("srun -N1 touch /shared/marker : -N1 {b} touch /shared/marker"),
            format!("sbatch -N1 {a} : -N1 {b} --wrap 'touch /shared/marker'"),
            format!(
                "printf '#!/bin/sh\\n#SBATCH -N1 {b}\\n#SBATCH hetjob\\n#SBATCH -N1 {a}\\ntouch /shared/marker\\n' | sbatch"
            ),
            format!(
                "printf '#!/bin/sh\\n#SBATCH -N1\\n#SBATCH hetjob\\n#SBATCH -N1 {a}\\ntouch /shared/marker\\n' | sbatch"
            ),
        ] {
            let refused = cluster.run(&command);
            assert_eq!(refused.code, 1, "{release} {command}: {}", refused.text());
            let message = "mizzen: the components of a heterogeneous job ask for different containers: ";
            assert_eq!(refused.stderr.matches(message).count(), 1, "{release} {command}: {}", refused.text());
        }
        let same = cluster.run(&format!("srun -N1 {a} touch /shared/marker : -N1 {a} touch /shared/marker"));
        for node in ["node1", "node2"] {
            assert_failed_closed(&cluster, "het", &same, &same.stderr, &format!("{node}: /shared/a.sqsh: "));
        }
    }
}

fn survives_panics(release: Release) {
    let mut spec = spec(release, "panics");
    spec.layers.insert(0, mizzen_tests::target_dir().join("stage-inject"));
    let cluster = start(spec);
    let srun = "srun --container-image=/shared/a.sqsh touch /shared/marker";
    for requirement in ["required", "optional"] {
        for place in [
            "node:init",
            "node:option",
            "node:task_init",
            "client:init",
            "client:option",
            "client:init_post_opt",
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
    assert_eq!(cluster.run_on("node1", mizzen_tests::User::Root, left).code, 0, "a step is left");
}

fn ignores_the_extern_step(release: Release) {
    let mut spec = spec(release, "extern");
    spec.slurm_conf =
        vec!["PrologFlags=Alloc,Contain".to_owned(), "ProctrackType=proctrack/cgroup".to_owned()];
    spec.cgroup_v1 = release == Release::Slurm22_05 || release == Release::Slurm20_11;
    if !spec.cgroup_v1 {
        // These releases start slurmd without cgroup v1, which is all that this needs.
        spec.slurm_conf = vec!["PrologFlags=Alloc,Contain".to_owned()];
    }
    let cluster = start(spec);
    let plain = cluster.run("srun hostname");
    assert_eq!(plain.stdout, "node1\n", "{}", plain.text());
    let contained = cluster.run("srun --container-image=/shared/a.sqsh touch /shared/marker");
    assert_failed_closed(&cluster, "extern", &contained, &contained.stderr, "node1: /shared/a.sqsh: ");
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
    let log = cluster.slurmd_log("node1");
    assert!(log.contains(".extern]"), "the extern step did run: {log}");
    assert_eq!(log.lines().find(|line| line.contains(".extern]") && line.contains("mizzen")), None);
}

fn leaves_slurms_own_runtime_alone(release: Release) {
    if !release.has_container_option() {
        // The option is ours here, oci.conf or not.
        let cluster = start(spec(release, "oci"));
        cluster.write_everywhere("/etc/slurm/oci.conf", "").unwrap();
        let ours = cluster.run("srun --container=/shared/a.sqsh true");
        return assert_failed_closed(&cluster, "oci", &ours, &ours.stderr, "node1: /shared/a.sqsh: ");
    }
    let cluster = start(spec(release, "oci"));
    // A stand-in for runc that says that Slurm called it.
    cluster
        .write_everywhere("/etc/slurm/oci.conf", "RunTimeQuery=\"true\"\nRunTimeRun=\"echo slurm runs it\"\n")
        .unwrap();
    cluster.run_as_root("mkdir -p /shared/bundle/rootfs; echo '{\"ociVersion\":\"1.0.0\",\"root\":{\"path\":\"rootfs\"},\"process\":{},\"mounts\":[]}' > /shared/bundle/config.json");
    let slurms = cluster.run("srun --container=/shared/bundle touch /shared/marker");
    assert_eq!(cluster.run("ls /shared/marker").stdout, "", "{release}: ran on the host: {}", slurms.text());
    assert!(!slurms.stderr.contains("error: mizzen"), "{release}: {}", slurms.text());
    assert!(
        slurms.stderr.contains("mizzen: --container is run by Slurm itself here"),
        "{release}: {}",
        slurms.text()
    );
    let ours = cluster.run("srun --container-image=/shared/a.sqsh touch /shared/marker");
    assert_failed_closed(&cluster, "oci", &ours, &ours.stderr, "node1: /shared/a.sqsh: ");
    // On the login node only, or not beside the slurm.conf in use: nobody would run the container.
    cluster.run_as_root("cp -r /etc/slurm /shared/conf; rm /etc/slurm/oci.conf");
    let elsewhere = cluster
        .run("SLURM_CONF=/shared/conf/slurm.conf srun --container=/shared/bundle touch /shared/marker");
    assert_failed_closed(
        &cluster,
        "oci on the login node",
        &elsewhere,
        &elsewhere.stderr,
        "this node has no oci.conf",
    );
    cluster.write_everywhere("/etc/oci.conf", "").unwrap();
    let stray = cluster.run("srun --container=/shared/a.sqsh touch /shared/marker");
    assert_failed_closed(&cluster, "a stray oci.conf", &stray, &stray.stderr, "node1: /shared/a.sqsh: ");
}
