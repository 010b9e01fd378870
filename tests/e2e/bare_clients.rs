//! Jobs from where mizzen is not: a login node without the plugin, and what only the controller knows. A container that was
//! asked for is there, or nothing runs; in every supported release.

use mizzen_tests::check::{assert_failed, assert_failed_closed, assert_out, one_node, with_images};
use mizzen_tests::jobs::{BOTH, Job, assert_jobs, without_mizzen};
use mizzen_tests::release::site_rootfs;
use mizzen_tests::{Release, Spec, on_every_release};

on_every_release!(
    clients_without_mizzen_are_heard,
    the_controller_can_hand_slurms_option_on,
    several_programs_are_not_started_outside,
);

fn clients_without_mizzen_are_heard(release: Release) {
    let cluster = with_images(one_node(release, "bare-clients"));
    let conf = without_mizzen(&cluster);
    let srun = |variables: &str, options: &str, program: &str| {
        cluster.run(&format!("env {conf} {variables} srun -Q {options} {program}"))
    };
    let refused = |variables: &str, options: &str, message: &str| {
        let done = srun(variables, options, "touch /shared/marker");
        assert_failed_closed(&cluster, &format!("{variables} {options}"), &done, &done.stderr, message);
    };
    for name in ["MIZZEN_CONTAINER", "MIZZEN_CONTAINER_IMAGE"] {
        assert_out(&srun(&format!("{name}=/shared/a.sqsh"), "", "cat /image"), 0, "a\n");
        assert_out(&srun(&format!("{name}=none"), "", "hostname"), 0, "node1\n");
        refused(&format!("{name}=a.sqsh"), "", &format!("node1: {name}: a.sqsh is not absolute"));
        refused(&format!("{name}="), "", &format!("node1: {name}: the image is empty"));
    }
    let a = "MIZZEN_CONTAINER=/shared/a.sqsh";
    assert_out(
        &srun(&format!("{a} MIZZEN_CONTAINER_MOUNTS=/shared:/x"), "", "ls /x/a.sqsh"),
        0,
        "/x/a.sqsh\n",
    );
    for (variable, message) in [
        // Nothing else of what may hold a password.
        (
            "MIZZEN_CONTAINER_MOUNTS=/shared:/y,data:/x",
            "node1: MIZZEN_CONTAINER_MOUNTS: data is not absolute",
        ),
        (
            "MIZZEN_CONTAINER_MOUNTS=/shared,'u\\:secret@h:/x'",
            "node1: MIZZEN_CONTAINER_MOUNTS: …@h is not absolute",
        ),
        ("MIZZEN_CONTAINER_WRITABLE=x", "node1: MIZZEN_CONTAINER_WRITABLE: \"x\" is not a size"),
        ("MIZZEN_CONTAINER_MOUNT=/x", "node1: MIZZEN_CONTAINER_MOUNT: there is no such variable"),
        ("MIZZEN_CONTAINER_IMAGE=/shared/b.sqsh", "two images for one container"),
    ] {
        refused(&format!("{a} {variable}"), "", message);
    }
    let variable = format!("{conf} {a}");
    assert_jobs(
        &cluster,
        &[
            Job(&variable, "", BOTH, 0, "a\na\n"),
            Job(&format!("{variable} MIZZEN_CONTAINER_SCRIPT=no"), "", BOTH, 0, "host\na\n"),
            Job(conf, "", "MIZZEN_CONTAINER=/shared/b.sqsh srun -Q cat /image", 0, "b\n"),
        ],
    );
    // Plain jobs, whatever else the environment has.
    let plain = "MIZZEN_CONTAINER_WRITABLE=x MIZZEN_CONTAINER_NONSENSE=1";
    assert_out(&srun(plain, "", "hostname"), 0, "node1\n");
    if !release.has_container_option() {
        return;
    }
    // Slurm's own option, inside what the enclosing job says.
    for outer in ["none", "image=/shared/a.sqsh", "join=0"] {
        let outer = format!("SLURM_MIZZEN_REQUEST={outer}");
        assert_out(&srun(&outer, "--container=/shared/b.sqsh", "cat /image"), 0, "b\n");
        refused(&outer, "--container=b.sqsh", "node1: --container: b.sqsh is not absolute");
        assert_out(&srun(&outer, "--container=none", "hostname"), 0, "node1\n");
    }
    let settings = "SLURM_MIZZEN_REQUEST='image=/shared/a.sqsh&workdir=/etc'";
    let inner =
        srun(settings, "--container=/shared/b.sqsh", "sh -c 'cat /image; pwd; env | grep -c CONTAINER'");
    assert_out(&inner, 1, "b\n/etc\n0\n");
    assert_jobs(
        &cluster,
        &[
            Job(
                &format!("{conf} SLURM_MIZZEN_REQUEST=none"),
                "--container=/shared/b.sqsh",
                BOTH,
                0,
                "b\nb\n",
            ),
            Job(&format!("{conf} {a}"), "--container=/shared/b.sqsh", BOTH, 0, "b\nb\n"),
        ],
    );
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
}

/// Where neither mizzen nor the environment comes along, as with jobs from the REST interface, the job's record is all there is.
fn the_controller_can_hand_slurms_option_on(release: Release) {
    if !release.has_container_option() {
        return;
    }
    let mut spec = one_node(release, "job-submit");
    spec.slurm_conf = vec!["JobSubmitPlugins=lua".to_owned()];
    spec.slurm_files =
        vec![("job_submit.lua".to_owned(), include_str!("../../conf/job_submit.lua").to_owned())];
    let cluster = with_images(spec);
    let conf = without_mizzen(&cluster);
    cluster.run(
        "printf 'PATH=/usr/bin:/bin\\0' > file; cp /shared/a.sqsh a.sqsh; \
         printf 'PATH=/usr/bin:/bin\\0SLURM_MIZZEN_REQUEST=none\\0' > on-node; \
         printf 'PATH=/usr/bin:/bin\\0SLURM_MIZZEN_REQUEST=image=/shared/a.sqsh\\0' > in-a",
    );
    let bare = "--export=ALL --export-file=file --container=";
    let marker = "touch /shared/marker";
    assert_jobs(
        &cluster,
        &[
            Job(conf, &format!("{bare}/shared/a.sqsh"), BOTH, 0, "a\na\n"),
            Job(conf, &format!("{bare}a.sqsh"), marker, 125, "node1: --container: a.sqsh is not absolute"),
            Job("", &format!("{bare}a.sqsh"), BOTH, 0, "a\na\n"),
            Job("", "--container=a.sqsh", BOTH, 0, "a\na\n"),
            Job(conf, "--export=ALL --export-file=file", BOTH, 0, "host\nhost\n"),
            // A request that the submission has inherited is older than the option.
            Job(
                conf,
                &bare.replace("file=file", "file=on-node").replace("container=", "container=/shared/b.sqsh"),
                BOTH,
                0,
                "b\nb\n",
            ),
            Job(
                conf,
                &bare.replace("file=file", "file=in-a").replace("container=", "container=/shared/b.sqsh"),
                BOTH,
                0,
                "b\nb\n",
            ),
        ],
    );
    // Of a request that grows when it is written again, Slurm would keep the old one.
    let grows = format!("image=/shared/a.sqsh&env=A={}", ["1"; 30000].join(","));
    let done = cluster
        .run(&format!("{conf} SLURM_MIZZEN_REQUEST='{grows}' srun -Q --container=/shared/b.sqsh cat /image"));
    assert_failed(&done, 125, "node1: the request has ");
    assert_out(&cluster.run("srun -Q --container=a.sqsh cat /image; srun -Q hostname"), 0, "a\nnode1\n");
}

fn several_programs_are_not_started_outside(release: Release) {
    let cluster = with_images(one_node(release, "programs"));
    let conf = without_mizzen(&cluster);
    // On the login node alone, and without a newline at its end.
    cluster.run(
        "printf '0 /bin/touch /shared/marker\\n1 /bin/cat /image' > /tmp/programs; \
         printf 'nonsense here\\n0-1 /bin/touch /shared/marker' > /tmp/skipped",
    );
    let srun = |variables: &str, words: &str| cluster.run(&format!("env {variables} srun -Q -n2 {words}"));
    let outer = format!("{conf} SLURM_MIZZEN_REQUEST=image=/shared/a.sqsh");
    let variable = format!("{conf} MIZZEN_CONTAINER=/shared/a.sqsh");
    let old = matches!(release, Release::Slurm20_11 | Release::Slurm22_05);
    for variables in [&outer, &variable] {
        let several = srun(variables, "--multi-prog /tmp/programs");
        if old {
            let message =
                "node1: --multi-prog: not in a container before Slurm 23.11 (the program's first argument";
            assert_failed_closed(&cluster, variables, &several, &several.stderr, message);
            let skipped = srun(variables, "--multi-prog /tmp/skipped");
            assert!(
                skipped.code != 0 && cluster.run("ls /shared/marker").stdout.is_empty(),
                "{}",
                skipped.text()
            );
        } else {
            // Inside is no /shared, so one of them fails.
            assert!(several.code == 1 && several.stdout == "a\n", "{release}: {}", several.text());
        }
        assert_out(&srun(variables, "sh -c 'echo $(cat /image) $0' '0 x'"), 0, "a 0 x\na 0 x\n");
    }
    assert_eq!(cluster.run("ls /shared/marker").stdout, "", "{release}");
    // srun with mizzen knows what it was asked for, and says so to the node alone.
    let image = "--container-image=/shared/a.sqsh";
    assert_out(&srun("", &format!("{image} echo '0 x'")), 0, "0 x\n0 x\n");
    let names = srun("", &format!("{image} env")).stdout;
    assert!(!names.contains("SLURM_MIZZEN_SRUN"), "{release}: {names}");
    let typed = srun("", &format!("{image} --multi-prog /tmp/programs"));
    if old {
        assert_failed(&typed, 1, "--multi-prog: not in a container before Slurm 23.11");
    }
    assert_eq!(cluster.run("ls /shared/marker").stdout, "", "{release}");
}

/// Of the job's description plugins on the node see the environment; its field `container` is the controller's.
#[test]
fn the_rest_interface_can_ask_for_a_container() {
    let mut spec = one_node(Release::Slurm22_05, "rest");
    spec.slurm_conf = vec!["JobSubmitPlugins=lua".to_owned()];
    spec.slurm_files =
        vec![("job_submit.lua".to_owned(), include_str!("../../conf/job_submit.lua").to_owned())];
    let cluster = with_images(Spec { rootfs: Some(site_rootfs().unwrap()), ..spec });
    for (variables, field, code, printed) in [
        ("", "", 0, "host\nhost\n"),
        (r#", "MIZZEN_CONTAINER": "/shared/a.sqsh""#, "", 0, "a\na\n"),
        (
            r#", "MIZZEN_CONTAINER_IMAGE": "a.sqsh""#,
            "",
            125,
            "MIZZEN_CONTAINER_IMAGE: a.sqsh is not absolute",
        ),
        ("", r#", "container": "/shared/b.sqsh""#, 0, "b\nb\n"),
        ("", r#", "container": "b.sqsh""#, 125, "--container: b.sqsh is not absolute"),
    ] {
        let script =
            format!("#!/bin/sh\n{BOTH}\n").replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let body = format!(
            r#"{{"script": "{script}", "job": {{"name": "rest", "current_working_directory": "/home/alice",
            "standard_output": "/shared/out", "environment": {{"PATH": "/usr/bin:/bin"{variables}}}{field}}}}}"#
        );
        let length = body.len();
        let request = format!(
            "POST /slurm/v0.0.38/job/submit HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        cluster.share("request", request.as_bytes()).unwrap();
        let done = cluster.run(
            "(umask 077; cp /shared/request request; slurmrestd -a rest_auth/local -s openapi/v0.0.38 < request > answer 2>&1); \
             job=$(grep -o '\"job_id\": *[0-9]*' answer | grep -o '[0-9]*'); [ -n \"$job\" ] || { cat answer; exit 99; }; \
             while [ -n \"$(squeue -h)\" ]; do sleep 0.1; done; cat /shared/out; rm -f /shared/out; \
             exit $(scontrol show job $job | sed -n 's/.* ExitCode=\\([0-9]*\\):.*/\\1/p')",
        );
        assert_eq!(done.code, code, "{variables}{field}: {}", done.text());
        assert!(
            done.stdout.ends_with(printed) || code != 0 && done.stdout.contains(printed),
            "{}",
            done.text()
        );
    }
}
