//! `--container-save`: what a container has become is an image in the end. The rows that are quoted say what scripts written for
//! pyxis expect of it.

use mizzen_tests::check::{assert_failed, assert_out, assert_told, count, one_node, with_images};
use mizzen_tests::images::ImageTree;
use mizzen_tests::{Cluster, Output, Release, Spec, User, on_every_release};

on_every_release!(saves_what_a_container_has_become);

const TWO_RELEASES: [Release; 2] = [Release::Slurm22_05, Release::Slurm24_11];

fn srun(cluster: &Cluster, options: &str, program: &str) -> Output {
    cluster.run(&format!("srun -Q {options} {program}"))
}

/// "squashfs of the container's root, by the last local task at its end; relative to the job's directory; … says that it
/// exported"
fn saves_what_a_container_has_become(release: Release) {
    let cluster = with_images(one_node(release, "save"));
    let step = "sh -c 'if [ $SLURM_PROCID = 3 ]; then sleep 1.5; fi; echo $SLURM_PROCID > /new$SLURM_PROCID; [ $SLURM_PROCID != 0 ] || rm /etc/os-release'";
    let options = "-n4 --chdir=/tmp --container-image=/shared/a.sqsh --container-save=mine.sqsh --container-mounts=/shared:/mnt/s";
    let saved = srun(&cluster, options, step);
    assert_out(&saved, 0, "");
    assert_failed(&saved, 0, "mizzen: note: node1: exported the container to /home/alice/mine.sqsh, ");
    let run = srun(
        &cluster,
        "--container=mine.sqsh",
        "sh -c 'cat /image /new[0-3]; ls /etc/os-release /mnt/s; echo $?'",
    );
    assert_out(&run, 0, "a\n0\n1\n2\n3\n/mnt/s:\n1\n");
    // In the place of one that is there; and as the program ends.
    for (program, code) in
        [("sh -c 'echo again > /again; exit 7'", 7), ("sh -c 'echo killed > /killed; kill -KILL $$'", 137)]
    {
        let saved = srun(&cluster, "--container=mine.sqsh --container-save=mine.sqsh", program);
        assert_eq!(saved.code, code, "{release}: {}", saved.text());
    }
    assert_out(&srun(&cluster, "--container=mine.sqsh", "cat /again /killed /new0"), 0, "again\nkilled\n0\n");
    let missing = srun(&cluster, "--container=mine.sqsh --container-save=other.sqsh", "nosuch");
    assert_failed(&missing, 127, "nosuch: no such program in the container");
    assert_out(&cluster.run("ls -A | grep -v -e '^\\.bash' -e '^\\.profile'"), 0, "mine.sqsh\n");
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
}

#[test]
fn the_image_runs_as_the_original_does() {
    for release in TWO_RELEASES {
        let cluster = with_images(one_node(release, "saved-image"));
        let tree = ImageTree::busybox().unwrap();
        let config = r#"{"config": {"Env": ["PATH=/opt/bin:/bin", "FROM_IMAGE=yes"], "Entrypoint": ["/bin/env", "ENTRY=yes"], "WorkingDir": "/var"}}"#;
        tree.file(".mizzen/config.json", config).unwrap();
        // As distributions have it: not even its owner may read it.
        tree.file("etc/shadow", "secret\n").unwrap();
        let mode =
            std::process::Command::new("chmod").arg("0000").arg(tree.path("etc/shadow")).status().unwrap();
        assert!(mode.success());
        cluster.share("oci.sqsh", &tree.squashfs(&[]).unwrap()).unwrap();
        let save = srun(&cluster, "--container=/shared/oci.sqsh --container-save=oci.sqsh", "touch /x");
        assert_eq!(save.code, 0, "{}", save.text());
        let run = srun(&cluster, "--container=oci.sqsh --container-entrypoint", "sh -c 'echo $ENTRY'");
        assert_out(&run, 0, "yes\n");
        let run = srun(
            &cluster,
            "--container=oci.sqsh --no-container-mount-home",
            "sh -c 'echo $FROM_IMAGE; ls -l /etc/shadow | cut -c1-10'",
        );
        assert_out(&run, 0, "yes\n----------\n");
        let shadow = cluster.run("mizzen run --remap-root oci.sqsh cat /etc/shadow");
        assert_out(&shadow, 0, "secret\n");
        // By hand; and of what is not changed.
        let by_hand =
            cluster.run("mizzen run --save hand.sqsh /shared/a.sqsh sh -c 'echo $$ > /pid; exit 3'");
        assert_failed(&by_hand, 3, "mizzen: note: exported the container to /home/alice/hand.sqsh, ");
        assert_out(&cluster.run("mizzen run hand.sqsh sh -c '[ -s /pid ] && cat /image'"), 0, "a\n");
        // A batch script's own container; not those of its steps.
        let batch = cluster.run(
            "printf '#!/bin/sh\\necho script > /s; srun -Q sh -c \"echo step > /t\"\\n' > job; \
             sbatch --wait -Q -o out --container-image=/shared/a.sqsh --container-save=batch.sqsh job; cat out; \
             mizzen run batch.sqsh sh -c 'cat /s; ls /t'",
        );
        assert_eq!(
            batch.stdout.matches("exported the container to /home/alice/batch.sqsh").count(),
            1,
            "{}",
            batch.text()
        );
        assert!(batch.stdout.ends_with("script\n"), "{}", batch.text());
    }
}

/// Whether Slurm sends them to all processes of a step or, with proctrack/cgroup, to its tasks alone.
#[test]
fn a_program_gets_every_signal_once() {
    for cgroup_v1 in [false, true] {
        let spec = one_node(Release::Slurm22_05, if cgroup_v1 { "save-cgroup" } else { "save-linuxproc" });
        let cluster = with_images(Spec { cgroup_v1, ..spec });
        let run = cluster.run(
            "srun -Q --container=/shared/a.sqsh --container-save=signal.sqsh sh -c 'trap \"echo got >> /got\" USR1; \
             touch ready; for i in $(seq 50); do sleep 0.1; done; exit 4' & \
             until [ -e ready ]; do sleep 0.1; done; sleep 0.5; scancel --signal=USR1 $(squeue -h -o %A).0; wait $!; echo $?; \
             mizzen run signal.sqsh cat /got",
        );
        assert_out(&run, 0, "4\ngot\n");
    }
}

#[test]
fn what_cannot_be_saved_is_told_before() {
    for release in TWO_RELEASES {
        let cluster = with_images(Spec { nodes: 2, ..one_node(release, "unsaved") });
        cluster.run("mkdir directory; echo old > old.sqsh");
        cluster.run_as_root(
        "mkdir -m 1777 /shared/sticky; echo theirs > /shared/sticky/x.sqsh; chown bob /shared/sticky/x.sqsh",
    );
        let program = "touch /shared/marker";
        for (options, message, hint) in [
            // "target is a directory: error"
            (
                "--container-save=directory",
                "--container-save: /home/alice/directory: is a directory",
                "name a file in it",
            ),
            (
                "--container-save=directory/",
                "--container-save: /home/alice/directory/: is a directory",
                "name a file in it",
            ),
            (
                "--container-save=/usr/x.sqsh",
                "--container-save: /usr: Permission denied",
                "nobody but you can make a file",
            ),
            (
                "--container-save=/shared/sticky/x.sqsh",
                "--container-save: /shared/sticky/x.sqsh: belongs to uid 2002, and only they can replace it in this directory",
                "take another name",
            ),
            (
                "--container-readonly --container-save=x.sqsh",
                "--container-save: nothing can change in a container that is read-only",
                "leave --container-readonly out",
            ),
        ] {
            let refused = srun(
                &cluster,
                &format!("--container=/shared/a.sqsh --container-mounts=/shared {options}"),
                program,
            );
            assert_told(&refused, 125, message, hint);
        }
        let missing = srun(&cluster, "--container=/shared/a.sqsh --container-save=/nosuch/x.sqsh", program);
        assert_failed(&missing, 125, "--container-save: /nosuch: No such file or directory");
        let empty = srun(&cluster, "--container=/shared/a.sqsh --container-save=", program);
        assert_failed(&empty, 1, "--container-save: \"\" is not the name of a file");
        let nodes = srun(&cluster, "-N2 --container=/shared/a.sqsh --container-save=/shared/x.sqsh", program);
        assert_eq!(nodes.code, 125, "{}", nodes.text());
        assert!(
            nodes.stderr.contains("--container-save: /shared/x.sqsh: every node of the step would write it"),
            "{}",
            nodes.text()
        );
        let script = cluster.run(
        "sbatch --wait -Q -o out --container=/shared/a.sqsh --no-container-script --container-save=x.sqsh --wrap 'touch /shared/marker'; cat out",
    );
        assert!(
            script.stdout.contains("--container-save: the script runs on the node, not in the container"),
            "{}",
            script.text()
        );
        let salloc = cluster
            .run("salloc --container-image=/shared/a.sqsh --container-save=x.sqsh touch /shared/marker");
        assert_failed(&salloc, 1, "--container-save: salloc itself runs nothing in the container");
        assert_out(&cluster.run("ls /shared/marker"), 2, "");
        cluster.run_as_root("mkdir -m 1777 /shared/images");
        let each = srun(
            &cluster,
            "-N2 --container=/shared/a.sqsh --container-save=/shared/images/%N.sqsh",
            "sh -c 'hostname > /host'",
        );
        assert_eq!(each.code, 0, "{}", each.text());
        let both = cluster.run("for i in node1 node2; do mizzen run /shared/images/$i.sqsh cat /host; done");
        assert_out(&both, 0, "node1\nnode2\n");
    }
}

/// "inside the job's limits, with progress"
#[test]
fn a_save_is_in_the_limits_of_its_job_and_tells_how_far_it_is() {
    let spec = one_node(Release::Slurm22_05, "save-limits");
    let slurm_files =
        vec![("cgroup.conf".to_owned(), "CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\n".to_owned())];
    let slurm_conf = vec!["SelectTypeParameters=CR_CPU_Memory".to_owned()];
    let cluster = with_images(Spec { cgroup_v1: true, slurm_files, slurm_conf, ..spec });
    // Whoever writes slowly tells how far it is; once a line, as srun's stderr is no terminal.
    let slow = cluster.run(
        "srun -Q --container=/shared/a.sqsh --container-save=x.sqsh sh -c 'head -c 200000000 /dev/urandom > /big' & \
         for i in $(seq 1500); do p=$(pgrep -f -- '[-]-save-as') && break; sleep 0.01; done; \
         kill -STOP $p; sleep 3; kill -CONT $p; wait $!",
    );
    assert_eq!(slow.code, 0, "{}", slow.text());
    assert!(slow.stderr.contains("mizzen: /home/alice/x.sqsh: saving: "), "{}", slow.text());
    assert!(!slow.stderr.contains("layers"), "{}", slow.text());
    assert_failed(&slow, 0, "mizzen: note: node1: exported the container to /home/alice/x.sqsh, ");
    // Files in memory count, and so does the image that is written there: it does not fit.
    cluster.run("echo old > kept.sqsh");
    let large = srun(&cluster, "--mem=60M --container=x.sqsh --container-save=kept.sqsh", "touch /x");
    assert!(large.code != 0, "{}", large.text());
    assert_failed(&large, large.code, "limit of the step (--mem)");
    assert_out(&cluster.run("cat kept.sqsh; ls -A | grep -c -e kept -e tmp"), 0, "old\n1\n");
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
}

/// "loses nothing that was there before"
#[test]
fn a_save_that_fails_loses_nothing() {
    for release in TWO_RELEASES {
        let cluster = with_images(one_node(release, "failed-save"));
        let full = "mkdir /shared/small && mount -t tmpfs -o size=3m,mode=1777 small /shared/small && mount --make-shared /shared/small";
        cluster.run_on("node1", User::Root, full);
        let on_node = |script: &str| cluster.run_on("node1", User::Alice, script);
        on_node("echo old > /shared/small/x.sqsh");
        let random = "sh -c 'dd if=/dev/urandom of=/big bs=1M count=8 2>/dev/null'";
        let failed =
            srun(&cluster, "--container=/shared/a.sqsh --container-save=/shared/small/x.sqsh", random);
        assert_failed(&failed, 125, "mizzen: node1: --container-save: /shared/small/x.sqsh: ");
        assert!(failed.stderr.contains("No space left on device"), "{}", failed.text());
        assert_out(&on_node("cat /shared/small/x.sqsh; ls -A /shared/small"), 0, "old\nx.sqsh\n");
        // Ended in the middle, at any moment, in an orderly way or not.
        let size = count(300, 1000);
        cluster.run("echo old > kept.sqsh");
        for run in 0..count(2, 10) {
            let how = if run % 2 == 0 { "scancel -u alice" } else { "scancel --signal=KILL -u alice" };
            let cancelled = cluster.run(&format!(
            "srun -Q --container=/shared/a.sqsh --container-save=kept.sqsh \
             sh -c 'dd if=/dev/urandom of=/big bs=1M count={size} 2>/dev/null' & \
             for i in $(seq 1500); do p=$(pgrep -f -- '[-]-save-as') && break; sleep 0.01; done; sleep 0.{run:02}; \
             kill -STOP $p && echo in the middle; {how}; sleep 0.5; kill -CONT $p 2>/dev/null; wait; cat kept.sqsh; \
             for i in $(seq 100); do pgrep mizzen >/dev/null || break; sleep 0.1; done; ls -A | grep -e kept -e tmp"
        ));
            assert_out(&cancelled, 0, "in the middle\nold\nkept.sqsh\n");
        }
        // What ends a step before it has ended by itself is not saved.
        let early = cluster.run(
        "srun -Q --container=/shared/a.sqsh --container-save=kept.sqsh sh -c 'echo x > /x; sleep 60' & sleep 2; scancel -u alice; wait; cat kept.sqsh",
    );
        assert_out(&early, 0, "old\n");
        // Slurm's signal may reach the program, and end it, before it reaches the launcher.
        let program = cluster.run(
            "srun -Q --container=/shared/a.sqsh --container-save=kept.sqsh sh -c 'kill $$'; cat kept.sqsh",
        );
        assert_out(&program, 0, "old\n");
        assert_failed(&program, 0, "/home/alice/kept.sqsh is not written: the step got SIGTERM");
        assert!(cluster.all_idle(), "{:?}", cluster.node_states());
    }
}

#[test]
fn a_named_container_is_saved_too() {
    let toml = Some("stage_directory = \"/disk\"\n".to_owned());
    let cluster = with_images(Spec { mizzen_toml: toml, ..one_node(Release::Slurm24_11, "save-named") });
    cluster.run_on("node1", User::Root, "mkdir -p /disk && mount -t tmpfs disk /disk && chmod 1777 /disk");
    let job = cluster.run(
        "salloc -Q -n8 bash -c 'export SLURM_NTASKS=1 SLURM_NPROCS=1; srun -Q --container-image=/shared/a.sqsh --container-name=dev touch /one; \
         srun -Q --container-name=dev --container-save=dev.sqsh touch /two; srun -Q --container=dev.sqsh ls /one /two /image'",
    );
    assert_out(&job, 0, "/image\n/one\n/two\n");
    assert_failed(&job, 0, "exported the container to /home/alice/dev.sqsh, ");
}
