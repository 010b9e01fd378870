//! The plugin in every supported Slurm release, in all the programs that load it.

use std::collections::BTreeSet;

use mizzen_tests::check::{CONTAINER_OPTIONS, assert_failed_closed, assert_out, one_node, with_images};
use mizzen_tests::spec::PLUGIN;
use mizzen_tests::{Output, Release, Spec, User, on_every_release};

on_every_release!(
    loads_in_every_program,
    leaves_plain_jobs_alone,
    refuses_bad_requests_before_submission,
    refuses_bad_settings,
    hands_the_container_down,
    keeps_components_apart,
    ignores_the_extern_step,
    leaves_slurms_own_runtime_alone,
);

fn loads_in_every_program(release: Release) {
    let cluster = with_images(Spec { nodes: 2, ..one_node(release, "loads") });
    for command in ["srun", "sbatch", "salloc"] {
        let help = cluster.run(&format!("{command} --help"));
        assert!(help.stdout.contains("--container-image=IMAGE"), "{release} {command}: {}", help.text());
        // Slurm's own help calls --container something else, and wraps lines.
        let words = help.stdout.split_whitespace().collect::<Vec<&str>>().join(" ");
        let explained = "--container, which Slurm lists as its own, is the same";
        assert!(words.contains(explained), "{release} {command}: {}", help.text());
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
        let is_about_us = |line: &&str| line.contains("spank") || line.contains("mizzen");
        let greets = |line: &&str| line.contains("mizzen: version ") && line.ends_with(" is loaded");
        let complaint = log.lines().filter(is_about_us).find(|line| !greets(line));
        assert_eq!(complaint, None, "{release}");
        // Once, when slurmd starts, and for no job.
        assert!(log.lines().filter(greets).count() <= 1, "{release}: {log}");
    }
}

fn leaves_plain_jobs_alone(release: Release) {
    let cluster = with_images(one_node(release, "plain"));
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

fn refuses_bad_requests_before_submission(release: Release) {
    let cluster = with_images(one_node(release, "refuses"));
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
        ("=./", "/home/alice/./: not an image (an empty directory)"),
        ("=/shared/fifo", "/shared/fifo: not an image (is a FIFO)"),
        ("=/dev/zero", "/dev/zero: not an image (is a character device)"),
        ("=/shared/page.sqsh", "/shared/page.sqsh: not an image (starts with \"<!DO\", looks like HTML)"),
        ("=foo://x/y", "foo://x/y: cannot fetch images from foo://"),
        ("=docker://me:secret@registry/x", "docker://…@registry/x: a password in a name"),
    ];
    for requirement in ["required", "optional"] {
        cluster.set_plugstack(&[&format!("{requirement} {PLUGIN}")]).unwrap();
        for option in CONTAINER_OPTIONS {
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
    let cluster = with_images(one_node(release, "settings"));
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
        ("image_folders = [\"x\"]\n", "mizzen.toml:1: image_folders: \"x\" is not absolute"),
        ("\n\n[oops\n", "mizzen.toml:3: "),
    ] {
        cluster.write_everywhere(settings, text).unwrap();
        refused(message);
    }
    // Good on the login node and broken on the compute node: the task ends.
    cluster.write_everywhere(settings, "").unwrap();
    cluster.run_on("node1", User::Root, "echo 'x = 1' > /etc/mizzen/mizzen.toml");
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
    assert_out(&cluster.run("srun --container-image=b.sqsh cat /image"), 0, "b\n");
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
}

fn hands_the_container_down(release: Release) {
    let cluster = with_images(one_node(release, "inherits"));
    let inside = |script: &str| {
        cluster.run(&format!("cd /shared; salloc --container-image=a.sqsh bash -c '{script}'"))
    };
    assert_out(&inside("cd /; srun cat /image"), 0, "a\n");
    assert_out(&inside("srun --container-image=none hostname"), 0, "node1\n");
    assert_out(&inside("srun --export=NONE cat /image"), 0, "a\n");
    for option in CONTAINER_OPTIONS {
        assert_out(&inside(&format!("srun {option}=b.sqsh cat /image; srun cat /image")), 0, "b\na\n");
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
    let cluster = with_images(Spec { nodes: 2, ..one_node(release, "components") });
    let print = "/bin/sh -c 'echo $(hostname) $(cat /image 2>/dev/null || echo host)'";
    let sorted = |command: &str, expected: &str| {
        let ran = cluster.run(&format!("set -o pipefail; {{ {command}; }} | sort"));
        assert_eq!((ran.code, ran.stdout.as_str()), (0, expected), "{release} {command}: {}", ran.text());
    };
    for option in CONTAINER_OPTIONS {
        let (a, b) = (format!("{option}=/shared/a.sqsh"), format!("{option}=/shared/b.sqsh"));
        let both = format!("srun -Q -N1 {a} {print} : -N1 {b} {print}");
        sorted(&both, "node1 a\nnode2 b\n");
        sorted(&format!("srun -Q -N1 {print} : -N1 {b} {print}"), "node1 host\nnode2 b\n");
        sorted(&format!("srun -Q -N1 {a} {print} : -N1 {print}"), "node1 a\nnode2 host\n");
        sorted(&format!("srun -Q -N1 {a} {print} : -N1 {a} {print}"), "node1 a\nnode2 a\n");
        sorted(
            &format!("srun -Q -N1 {a} --export=NONE {print} : -N1 --export=X=1 {b} {print}"),
            "node1 a\nnode2 b\n",
        );
        // In one allocation, which may have a container itself.
        sorted(&format!("salloc -Q -N2 {both}"), "node1 a\nnode2 b\n");
        // Slurm can refuse its own option to salloc.
        let outer = "--container-image=/shared/a.sqsh";
        sorted(&format!("salloc -Q -N2 {outer} srun -Q -N1 {print} : -N1 {b} {print}"), "node1 a\nnode2 b\n");
        sorted(
            &format!("salloc -Q -N2 {outer} srun -Q -N1 {option}=none {print} : -N1 {print}"),
            "node1 host\nnode2 a\n",
        );
        // In a heterogeneous job, which may have containers itself.
        let groups = format!("srun -Q --het-group=0 {a} {print} : --het-group=1 {b} {print}");
        sorted(&format!("salloc -Q -N1 : -N1 {groups}"), "node1 a\nnode2 b\n");
        let same = format!("srun -Q --het-group=0,1 {b} {print}");
        sorted(&format!("salloc -Q -N1 {outer} : -N1 {same}"), "node1 b\nnode2 b\n");
        // srun of 20.11 cannot start components apart in a job of sbatch, with or without containers.
        let steps = match release {
            Release::Slurm20_11 => {
                format!("srun -Q --het-group=0 {a} {print}; srun -Q --het-group=1 {b} {print}")
            }
            _ => groups,
        };
        let script = format!("cat > job <<'END'\n#!/bin/sh\n{steps}\nEND\n");
        for containers in ["-N1 : -N1".to_owned(), format!("-N1 {outer} : -N1 {outer}")] {
            sorted(
                &format!("{script}sbatch -Q --wait -o out {containers} job; cat out"),
                "node1 a\nnode2 b\n",
            );
        }
        for command in [
            format!("sbatch -N1 {a} : -N1 {b} --wrap 'touch /shared/marker'"),
            // Slurm's own option it would give to both.
            "sbatch -N1 : -N1 --container-image=/shared/b.sqsh --wrap 'touch /shared/marker'".to_owned(),
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
            assert!(
                refused.stderr.contains("mizzen: hint: sbatch cannot hand them on"),
                "{}",
                refused.text()
            );
        }
        assert_eq!(cluster.run("ls /shared/marker").stdout, "", "{release}");
    }
    let (a, b) = ("--container-image=/shared/a.sqsh", "--container-image=/shared/b.sqsh");
    for (first, second, expected) in [
        (a, b, "node1 a\nnode1 a\nnode2 b\nnode2 b\n"),
        ("", b, "node1 host\nnode1 host\nnode2 b\nnode2 b\n"),
        (a, "", "node1 a\nnode1 a\nnode2 host\nnode2 host\n"),
        (a, "--container-image=none", "node1 a\nnode1 a\nnode2 host\nnode2 host\n"),
    ] {
        let steps = format!(
            "srun -Q --het-group=0,1 {print}; srun -Q --het-group=1 --export=NONE {print}; srun -Q {print}"
        );
        let script = format!("cat > steps <<'END'\n{steps}\nEND\n");
        sorted(&format!("{script}salloc -Q -N1 {first} : -N1 {second} sh steps"), expected);
    }
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
}

fn ignores_the_extern_step(release: Release) {
    let mut spec = one_node(release, "extern");
    spec.slurm_conf =
        vec!["PrologFlags=Alloc,Contain".to_owned(), "ProctrackType=proctrack/cgroup".to_owned()];
    spec.cgroup_v1 = release == Release::Slurm22_05 || release == Release::Slurm20_11;
    if !spec.cgroup_v1 {
        // These releases start slurmd without cgroup v1, which is all that this needs.
        spec.slurm_conf = vec!["PrologFlags=Alloc,Contain".to_owned()];
    }
    let cluster = with_images(spec);
    let plain = cluster.run("srun hostname");
    assert_eq!(plain.stdout, "node1\n", "{}", plain.text());
    assert_out(&cluster.run("srun --container-image=/shared/a.sqsh cat /image"), 0, "a\n");
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
    let log = cluster.slurmd_log("node1");
    assert!(log.contains(".extern]"), "the extern step did run: {log}");
    assert_eq!(log.lines().find(|line| line.contains(".extern]") && line.contains("mizzen")), None);
}

fn leaves_slurms_own_runtime_alone(release: Release) {
    if !release.has_container_option() {
        // The option is ours here, oci.conf or not.
        let cluster = with_images(one_node(release, "oci"));
        cluster.write_everywhere("/etc/slurm/oci.conf", "").unwrap();
        return assert_out(&cluster.run("srun --container=/shared/a.sqsh cat /image"), 0, "a\n");
    }
    let cluster = with_images(one_node(release, "oci"));
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
    assert_out(&cluster.run("srun --container-image=/shared/a.sqsh cat /image"), 0, "a\n");
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
    assert_out(&cluster.run("srun --container=/shared/a.sqsh cat /image"), 0, "a\n");
}
