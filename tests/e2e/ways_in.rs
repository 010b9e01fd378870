//! Every way in which srun, sbatch and salloc hand a request and an environment on to a node: a container that was asked for
//! is there, or nothing runs; in every supported release.

use mizzen_tests::check::{assert_failed, assert_out, one_node, with_images};
use mizzen_tests::images::spank_plugin;
use mizzen_tests::jobs::{BOTH, Job, WHERE, assert_jobs, let_slurm_log_in};
use mizzen_tests::spec::PLUGIN;
use mizzen_tests::{Release, Spec, on_every_release};

on_every_release!(
    an_environment_file_keeps_the_container,
    no_way_of_exporting_loses_the_container,
    jobs_of_every_kind_have_their_container,
    an_option_of_another_plugin_is_not_lost,
    an_allocation_without_a_shell_hands_nothing_on,
    only_jobs_with_a_container_mind_the_variables,
);

fn an_environment_file_keeps_the_container(release: Release) {
    let cluster = with_images(Spec { nodes: 2, ..one_node(release, "export-file") });
    let_slurm_log_in(&cluster, &["node1", "node2"]);
    cluster.run(
        "cp /shared/a.sqsh here.sqsh; base='PATH=/usr/bin:/bin\\0HOME=/home/alice\\0FROM_FILE=1\\0'; \
         printf $base > file; printf \"${base}MIZZEN_CONTAINER=/shared/b.sqsh\\0\" > names; \
         printf \"${base}MIZZEN_CONTAINER_IMAGE=b.sqsh\\0\" > relative; \
         printf \"${base}SLURM_MIZZEN_REQUEST=image=/shared/b.sqsh\\0\" > inherits",
    );
    // Without --export=ALL, 26.05 also forgets what is in the file.
    let (a, file) = ("/shared/a.sqsh", "--export=ALL --export-file=file");
    let script = format!("{BOTH}; echo $FROM_FILE");
    let sbatch = format!("#SBATCH --container={a} {file}\n{script}");
    assert_jobs(
        &cluster,
        &[
            Job("", &format!("{file} --container={a}"), &script, 0, "a\na\n1\n"),
            Job("", &format!("{file} --container-image=here.sqsh"), &script, 0, "a\na\n1\n"),
            Job("", "", &sbatch, 0, "a\na\n1\n"),
            Job(&format!("MIZZEN_CONTAINER={a}"), file, &script, 0, "a\na\n1\n"),
            Job("", &format!("{file} --container={a} --no-container-script"), &script, 0, "host\na\n1\n"),
            Job(
                "",
                &format!("{file} --container={a} --container-workdir=/etc"),
                "pwd; srun -Q pwd",
                0,
                "/etc\n/etc\n",
            ),
        ],
    );
    let missing = format!("{file} --container={a} --container-mounts=/nosuch:/x");
    assert_jobs(
        &cluster,
        &[
            Job("", &format!("--export-file=file --container={a}"), BOTH, 0, "a\na\n"),
            Job("", &format!("--export-file=file --export=NONE --container={a}"), BOTH, 0, "a\na\n"),
            Job("", &format!("--export-file=file --export=X=1 --container={a}"), BOTH, 0, "a\na\n"),
            Job(
                "",
                &missing,
                "touch /shared/marker",
                125,
                "--container-mounts: source path does not exist: /nosuch",
            ),
            Job(
                "",
                &format!("--export=ALL --export-file=3 --container={a} 3< file"),
                &script,
                0,
                "a\na\n1\n",
            ),
            // What the file itself says, where nothing else does.
            Job("", "--export=ALL --export-file=names", BOTH, 0, "b\nb\n"),
            Job("", "--export=ALL --export-file=names --container=none", BOTH, 0, "host\nhost\n"),
            Job("", &format!("--export=ALL --export-file=names --container={a}"), BOTH, 0, "a\na\n"),
            Job("", &format!("--export=ALL --export-file=inherits --container={a}"), BOTH, 0, "a\na\n"),
        ],
    );
    assert_jobs(
        &cluster,
        &[
            Job(
                "",
                "--export=ALL --export-file=relative",
                "touch /shared/marker",
                125,
                "node1: MIZZEN_CONTAINER_IMAGE: b.sqsh is not absolute",
            ),
            Job("", file, "env | grep -c MIZZEN; cat /image 2>/dev/null || hostname", 0, "0\nnode1\n"),
        ],
    );
    let both = "--no-container-script";
    for (variables, options) in
        [("", format!("--container-image={a} {both}")), ("MIZZEN_CONTAINER=/shared/a.sqsh", String::new())]
    {
        let components = cluster.run(&format!(
            "printf '#!/bin/sh\\nsrun -Q --het-group=0,1 cat /image\\n' > job; \
             env {variables} sbatch -Q --wait -o out {file} -N1 {options} : -N1 {options} job; code=$?; cat out; exit $code"
        ));
        assert_out(&components, 0, "a\na\n");
    }
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
}

fn no_way_of_exporting_loses_the_container(release: Release) {
    let cluster = with_images(one_node(release, "exports"));
    let_slurm_log_in(&cluster, &["node1"]);
    let ways = [
        ("", "--export=NONE"),
        ("", "--export=NIL"),
        ("", "--export=ALL"),
        ("", "--export=HOME"),
        ("", "--export=ALL,X=1"),
        ("SBATCH_EXPORT=NONE SLURM_EXPORT_ENV=NONE", ""),
        ("SBATCH_EXPORT=X=1 SLURM_EXPORT_ENV=X=1", ""),
    ];
    let named = [
        ("", "--container=/shared/a.sqsh"),
        ("", "--container-image=/shared/a.sqsh"),
        ("MIZZEN_CONTAINER_IMAGE=/shared/a.sqsh", ""),
    ];
    let mut jobs = Vec::new();
    for ((variables, export), (variable, option)) in
        ways.into_iter().enumerate().map(|(number, way)| (way, named[number % named.len()]))
    {
        let srun = format!("env {variables} {variable} srun -Q {export} {option} /bin/cat /image");
        assert_out(&cluster.run(&srun), 0, "a\n");
        jobs.push((format!("{variables} {variable}"), format!("{export} {option}")));
    }
    // Only in the list, so that srun itself does not see it.
    let listed = cluster.run("srun -Q --export=ALL,MIZZEN_CONTAINER=/shared/a.sqsh cat /image");
    assert_out(&listed, 0, "a\n");
    // The user's own environment on the node, which has nothing of the request.
    cluster.run("echo export FROM_PROFILE=1 > .bash_profile");
    jobs.push((String::new(), "--get-user-env --container=/shared/a.sqsh".to_owned()));
    jobs.push((String::new(), "--get-user-env --export=NONE --container=/shared/a.sqsh".to_owned()));
    let jobs: Vec<Job> =
        jobs.iter().map(|(variables, options)| Job(variables, options, BOTH, 0, "a\na\n")).collect();
    for some in jobs.chunks(5) {
        assert_jobs(&cluster, some);
    }
    let allocated = cluster.run(
        "salloc -Q --container-image=/shared/a.sqsh bash -c 'srun cat /image; srun --export=NONE /bin/cat /image; \
         env -i SLURM_JOB_ID=$SLURM_JOB_ID SLURM_MIZZEN_REQUEST=$SLURM_MIZZEN_REQUEST /usr/bin/srun /bin/cat /image'",
    );
    assert_out(&allocated, 0, "a\na\na\n");
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
}

fn jobs_of_every_kind_have_their_container(release: Release) {
    let cluster = with_images(one_node(release, "kinds"));
    let a = "--container=/shared/a.sqsh";
    let array = cluster.run(&format!(
        "printf '#!/bin/sh\\necho $SLURM_ARRAY_TASK_ID $(cat /image) $(srun -Q cat /image)\\n' > job; \
         sbatch -Q --wait --array=1-2 -n1 -o out.%a {a} job; code=$?; cat out.1 out.2; exit $code"
    ));
    assert_out(&array, 0, "1 a a\n2 a a\n");
    let wrapped = cluster.run(&format!("sbatch -Q --wait -o out {a} --wrap '{BOTH2}' && cat out"));
    assert_out(&wrapped, 0, "a\na\n");
    // Its first run ends when it is put back into the queue, the second by itself.
    let again = cluster.run(&format!(
        "printf '#!/bin/sh\\ncat /image; [ -n \"$SLURM_RESTART_COUNT\" ] || sleep 100\\n' > job; rm -f out; \
         job=$(sbatch --parsable --requeue --open-mode=append -o out {a} job); \
         until grep -q a out 2>/dev/null; do sleep 0.1; done; scontrol requeuehold $job; \
         until scontrol show job $job | grep -q 'JobState=PENDING'; do sleep 0.1; done; sleep 2; \
         until scontrol release $job 2>/dev/null && scontrol update job=$job starttime=now; do sleep 0.2; done; \
         until scontrol show job $job | grep -q 'JobState=COMPLETED'; do sleep 0.1; done; grep -c '^a$' out"
    ));
    assert_out(&again, 0, "2\n");
    let copied = cluster.run(
        "printf '#!/bin/sh\\ncat /image\\n' > program; chmod +x program; \
         srun -Q --bcast=/tmp/copied --container=/shared/a.sqsh ./program",
    );
    assert_out(&copied, 0, "a\n");
    let attached = cluster.run(&format!(
        "rm -f go ready; srun -Q {a} sh -c 'touch ready; until [ -e go ]; do sleep 0.1; done; cat /image' > first & \
         until [ -e ready ]; do sleep 0.1; done; sattach $(squeue -h --steps -o %i | grep '[.]0$') > second & \
         sleep 1; touch go; wait; cat first second"
    ));
    assert_out(&attached, 0, "a\na\n");
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
}

/// As `BOTH`, for a place within single quotes.
const BOTH2: &str = "cat /image; srun -Q cat /image";

fn an_option_of_another_plugin_is_not_lost(release: Release) {
    let cluster = with_images(one_node(release, "other-plugin"));
    cluster.share("other.so", &spank_plugin("other-plugin", release).unwrap()).unwrap();
    let taken = |name: &str| format!("--{name}: belongs to the plugin \"other\" here, not to mizzen");
    for requirement in ["required", "optional"] {
        let other = "required /shared/other.so container-image container-mounts";
        let mizzen = format!("{requirement} {PLUGIN}");
        cluster.set_plugstack(&[other, &mizzen]).unwrap();
        for (options, name) in [
            ("--container-image=/shared/a.sqsh", "container-image"),
            ("--container=/shared/a.sqsh --container-mounts=/shared:/x", "container-mounts"),
        ] {
            for command in [
                format!("srun -Q {options} touch /shared/marker"),
                format!("sbatch -Q {options} --wrap 'touch /shared/marker'"),
                format!("printf '#!/bin/sh\\n#SBATCH {options}\\ntouch /shared/marker\\n' | sbatch -Q"),
            ] {
                assert_failed(&cluster.run(&command), 1, &taken(name));
            }
        }
        assert_failed(
            &cluster.run("salloc -Q --container-image=/shared/a.sqsh touch /shared/marker"),
            1,
            &taken("container-image"),
        );
        // What is left to mizzen works, and jobs without a container know nothing of all this.
        assert_out(&cluster.run("srun -Q --container=/shared/a.sqsh cat /image"), 0, "a\n");
        let variables = "MIZZEN_CONTAINER=/shared/a.sqsh MIZZEN_CONTAINER_MOUNTS=/shared:/x";
        assert_out(&cluster.run(&format!("{variables} srun -Q ls /x/a.sqsh")), 0, "/x/a.sqsh\n");
        assert_out(&cluster.run("srun -Q hostname"), 0, "node1\n");
        // Behind mizzen the other gets nothing.
        cluster.set_plugstack(&[&mizzen, other]).unwrap();
        assert_out(&cluster.run("srun -Q --container-image=/shared/a.sqsh cat /image"), 0, "a\n");
    }
    // Each of our options, whatever it is for. (Where Slurm has --container itself, no plugin can have it.)
    const OPTIONS: &str =
        "srun --help | grep -oE -e '--(no-)?container-[a-z-]+|--(environment|edf|container)\\>' | sort -u";
    cluster.set_plugstack(&[]).unwrap();
    let slurms = cluster.run(OPTIONS).stdout;
    cluster.set_plugstack(&[&format!("required {PLUGIN}")]).unwrap();
    let help = cluster.run(OPTIONS).stdout;
    let ours: Vec<&str> = help
        .lines()
        .filter(|option| !slurms.lines().any(|slurms| slurms == *option))
        .map(|option| option.trim_start_matches("--"))
        .collect();
    assert!(ours.len() > 25, "{release}: {help}");
    let other = format!("required /shared/other.so {}", ours.join(" "));
    cluster.set_plugstack(&[&other, &format!("required {PLUGIN}")]).unwrap();
    for name in ours {
        let image = if name == "container" { "" } else { "MIZZEN_CONTAINER=/shared/a.sqsh" };
        let refused = cluster.run(&format!("{image} srun -Q --{name}=/shared/a.sqsh touch /shared/marker"));
        assert_failed(&refused, 1, &taken(name));
    }
    assert_eq!(cluster.run("ls /shared/marker*; squeue -h -t pending").stdout, "", "{release}");
}

fn an_allocation_without_a_shell_hands_nothing_on(release: Release) {
    let cluster = with_images(one_node(release, "no-shell"));
    let refused = "--no-shell: nothing would hand the container on to the steps of this allocation";
    for command in [
        "salloc -Q --no-shell --container-image=/shared/a.sqsh",
        "MIZZEN_CONTAINER=/shared/a.sqsh salloc -Q --no-shell",
    ] {
        assert_failed(&cluster.run(command), 1, refused);
    }
    assert_eq!(cluster.run("squeue -h -t all").stdout, "", "{release}");
    // Each step says it for itself.
    let steps = cluster.run(
        "MIZZEN_CONTAINER=/shared/a.sqsh salloc -Q --no-shell --container-image=none; job=$(squeue -h -o %i); \
         srun -Q --jobid=$job --container-image=/shared/a.sqsh cat /image; srun -Q --jobid=$job hostname; scancel $job",
    );
    assert_out(&steps, 0, "a\nnode1\n");
}

fn only_jobs_with_a_container_mind_the_variables(release: Release) {
    let cluster = with_images(one_node(release, "variables"));
    let run = |variables: &str, command: &str| cluster.run(&format!("env {variables} {command}"));
    for variable in
        ["MIZZEN_CONTAINER_WRITABLE=x", "MIZZEN_CONTAINER_MOUNT=/x", "MIZZEN_CONTAINER_MOUNTS=a:b"]
    {
        let plain = run(variable, "srun hostname");
        assert_out(&plain, 0, "node1\n");
        assert_eq!(plain.stderr, "", "{release}");
        assert_out(&run(variable, "salloc -Q srun -Q hostname"), 0, "node1\n");
        assert_out(&run(variable, "srun -Q --container-image=none hostname"), 0, "node1\n");
        assert_out(&run(&format!("{variable} MIZZEN_CONTAINER=none"), "srun -Q hostname"), 0, "node1\n");
        let image = "--container-image=/shared/a.sqsh";
        for command in [
            format!("srun {image} touch /shared/marker"),
            format!("sbatch {image} --wrap 'touch /shared/marker'"),
            format!("salloc {image} touch /shared/marker"),
        ] {
            let name = variable.split('=').next().unwrap();
            let refused = run(variable, &command);
            assert_failed(&refused, 1, &format!("error: mizzen: {name}: "));
            assert_failed(&refused, 1, "error: mizzen: hint: ");
        }
    }
    let unknown = run("MIZZEN_CONTAINER=/shared/a.sqsh MIZZEN_CONTAINER_MOUNT=/x", "srun true");
    assert_failed(&unknown, 1, "MIZZEN_CONTAINER_MOUNT: there is no such variable of mizzen's");
    assert_failed(&unknown, 1, "hint: did you mean MIZZEN_CONTAINER_MOUNTS?");
    let strange = run("MIZZEN_CONTAINER=/shared/a.sqsh MIZZEN_CONTAINER_COLOUR=x", "srun true");
    assert_failed(&strange, 1, "hint: there are MIZZEN_CONTAINER and MIZZEN_CONTAINER_IMAGE, and with");
    assert_out(&run("MIZZEN_CONTAINER_IMAGE=/shared/a.sqsh", "srun -Q cat /image"), 0, "a\n");
    let same = "MIZZEN_CONTAINER=/shared/a.sqsh MIZZEN_CONTAINER_IMAGE=/shared/a.sqsh";
    assert_out(&run(same, "srun -Q cat /image"), 0, "a\n");
    let two = "MIZZEN_CONTAINER=/shared/a.sqsh MIZZEN_CONTAINER_IMAGE=/shared/b.sqsh";
    let message = "MIZZEN_CONTAINER=/shared/a.sqsh and MIZZEN_CONTAINER_IMAGE=/shared/b.sqsh: two images";
    assert_failed(&run(two, "srun touch /shared/marker"), 1, message);
    assert_out(&run(two, "srun -Q --container-image=/shared/b.sqsh cat /image"), 0, "b\n");
    assert_jobs(
        &cluster,
        &[
            Job("MIZZEN_CONTAINER_WRITABLE=x", "", WHERE, 0, "host\n"),
            Job("MIZZEN_CONTAINER_IMAGE=/shared/a.sqsh", "", BOTH, 0, "a\na\n"),
        ],
    );
}

/// scrontab is in Debian's packages from 24.11 on. A crontab's job starts with the next minute, and not earlier.
#[test]
fn crontabs_cannot_ask_for_a_container() {
    let clusters = [Release::Slurm24_11, Release::Slurm26_05].map(|release| {
        let spec = one_node(release, "crontab");
        let cluster =
            with_images(Spec { slurm_conf: vec!["ScronParameters=enable".to_owned()], ..spec });
        let_slurm_log_in(&cluster, &["node1"]);
        let table = "#SCRON --container=/shared/a.sqsh -n1 -o out.0\n* * * * * touch /shared/marker\n\
                     #SCRON -n1 -o out.1\n#SCRON --container-image=/shared/a.sqsh\n* * * * * touch /shared/marker\n\
                     #SCRON -n1 -o out.2 --environment=a\n* * * * * touch /shared/marker\n\
                     #SCRON -n1 -o out.3\n* * * * * hostname; srun -Q --container=/shared/a.sqsh cat /image; touch done\n";
        let made = cluster.run(&format!("printf '{table}' > table; scrontab table; squeue -h | wc -l"));
        assert_out(&made, 0, "4\n");
        cluster
    });
    for cluster in clusters {
        let wait = "for i in $(seq 50); do [ -e done -a -s out.0 -a -s out.1 -a -s out.2 ] && exit; sleep 1; done; exit 1";
        let began = cluster.run(wait).code == 0 || cluster.run(wait).code == 0;
        assert!(began, "{}: {}", cluster.release(), cluster.run("squeue; ls").text());
        let printed = |number: u32| cluster.run(&format!("cat out.{number}"));
        for (number, option) in ["--container", "--container-image", "--environment"].into_iter().enumerate()
        {
            let refused = printed(u32::try_from(number).unwrap());
            let message = format!("mizzen: node1: #SCRON {option}: scrontab does not hand it on to mizzen");
            assert_eq!(
                refused.stdout.matches(&message).count(),
                1,
                "{}: {}",
                cluster.release(),
                refused.text()
            );
        }
        assert_out(&printed(3), 0, "node1\na\n");
        assert_eq!(cluster.run("scrontab -r; ls /shared/marker").stdout, "", "{}", cluster.release());
    }
}
