//! Images in registries, as srun, sbatch and salloc ask for them and nodes get them: who asks the importer, when, how often, and
//! what comes of its answer. In the importer's place is a script that notes how it was called; registries have tests of their own.

use mizzen_tests::check::{assert_failed, assert_out, assert_told, one_node, run_in_time, with_images};
use mizzen_tests::jobs::{BOTH, Job, assert_jobs};
use mizzen_tests::{Cluster, Release, Spec, User, on_every_release};

on_every_release!(images_are_imported_before_the_job_waits, an_interrupted_import_submits_nothing);

/// Where the launcher looks for the importer.
const IMPORTER: &str = "/usr/lib/mizzen/mizzen-import";
/// Notes its machine and its words. The image `NAME:TAG` of registry.test is /shared/NAME.sqsh, and its manifest's digest is the
/// tag 64 times; `missing` fails, `slow` takes its time, tag 2 tells of progress.
const SCRIPT: &str = r#"#!/bin/sh
echo "$(hostname): $*" >> /shared/asked
for reference; do :; done
case $reference in *:2*) echo "progress on $(hostname)" >&2 ;; esac
reference=$(echo "$reference" | sed 's,//[^/]*@,//,')
case $reference in *@*) ;; *:*) reference=$reference@sha256:$(printf "${reference##*:}%.0s" $(seq 64)) ;; esac
name=${reference##*/}
name=${name%%:*}
case $name in
  missing) printf '125\nlog in first\n%s\nno such image in registry.test' "$reference"; exit 1 ;;
  slow) echo $$ > /shared/importing; exec sleep 30 ;;
esac
path="path=/shared/$name.sqsh&"
case $* in *--resolve-only*) path= ;; esac
echo "${path}reference=$reference"
"#;

fn with_importer(spec: Spec) -> Cluster {
    let cluster = with_images(spec);
    cluster.write_everywhere(IMPORTER, SCRIPT).unwrap();
    for machine in ["ctl", "node1", "node2"] {
        cluster.run_on(machine, User::Root, &format!("chmod 755 {IMPORTER}; umask 0; : >> /shared/asked"));
    }
    cluster
}

/// How the importer was called since the last time.
fn asked(cluster: &Cluster) -> String {
    cluster.run("cat /shared/asked; : > /shared/asked").stdout
}

fn digest(tag: &str) -> String {
    format!("sha256:{}", tag.repeat(64))
}

fn images_are_imported_before_the_job_waits(release: Release) {
    let cluster = with_importer(Spec { nodes: 2, ..one_node(release, "import") });
    let a = "docker://registry.test/a:1";
    let once = format!("ctl: import --for-slurm {a}\n");
    let step = cluster.run(
        "srun -n2 --container=docker://registry.test/a:2 sh -c 'echo $(cat /image) $MIZZEN_IMAGE_DIGEST'",
    );
    assert_out(&step, 0, &format!("a {}\n", digest("2")).repeat(2));
    assert_eq!((asked(&cluster), step.stderr.as_str()), (once.replace(":1", ":2"), "progress on ctl\n"));
    let log = cluster.slurmd_log("node1");
    let line = format!("mizzen: docker://registry.test/a:2@{} in /shared/a.sqsh: ", digest("2"));
    assert!(log.contains(&line), "{log}");
    // All ways to name it; the steps of a job inherit what the job has.
    for (variables, words) in [
        (format!("MIZZEN_CONTAINER={a}"), String::new()),
        (String::new(), "--container-image=registry.test#a:1".to_owned()),
        (String::new(), format!("--container-image={a}")),
    ] {
        let step = cluster.run(&format!("env {variables} srun -Q {words} cat /image"));
        assert_out(&step, 0, "a\n");
        assert_eq!(asked(&cluster), once, "{variables} {words}");
    }
    assert_jobs(
        &cluster,
        &[
            Job("", &format!("--container={a}"), BOTH, 0, "a\na\n"),
            Job("", "", &format!("#SBATCH --container-image={a}\n{BOTH}"), 0, "a\na\n"),
            Job("", "", &format!("#SBATCH --container-image=registry.test\\#a:1\n{BOTH}"), 0, "a\na\n"),
            Job("", &format!("--container={a}"), "srun -Q --container=/shared/b.sqsh cat /image", 0, "b\n"),
        ],
    );
    assert_eq!(asked(&cluster), once.repeat(4));
    let array = cluster.run(&format!(
        "printf '#!/bin/sh\\ncat /image\\n' > job; sbatch -Q --wait --array=1-3 -n1 -o array.%a --container={a} job; cat array.?"
    ));
    assert_out(&array, 0, "a\na\na\n");
    assert_eq!(asked(&cluster), once);
    let allocated =
        cluster.run(&format!("salloc -Q --container-image={a} sh -c 'srun cat /image; srun cat /image'"));
    assert_out(&allocated, 0, "a\na\n");
    assert_eq!(asked(&cluster), once);
    // A heterogeneous job asks once.
    let components =
        cluster.run(&format!("srun -Q -N1 --container-image={a} : -N1 --container-image={a} cat /image"));
    assert_out(&components, 0, "a\na\n");
    assert_eq!(asked(&cluster), once);
    // What is wrong is told, once, and nothing is submitted.
    for command in ["srun true", "sbatch --wrap=true", "salloc true"] {
        let missing =
            cluster.run(&format!("env MIZZEN_CONTAINER=docker://registry.test/missing:1 {command}"));
        let message =
            format!("mizzen: MIZZEN_CONTAINER: docker://registry.test/missing:1@{}: no", digest("1"));
        assert_told(&missing, 1, &message, "log in first\n");
    }
    asked(&cluster);
    // Not fetched for a command that is refused anyway.
    let refused = cluster.run(&format!("salloc --no-shell --container-image={a}"));
    assert_failed(&refused, 1, "docker://registry.test/a:1: --no-shell: ");
    let refused = cluster.run(&format!("MIZZEN_CONTAINER_WRITABLE=x srun --container={a} true"));
    assert_failed(&refused, 1, "mizzen: MIZZEN_CONTAINER_WRITABLE: ");
    assert_eq!(asked(&cluster), "");
    assert_eq!(cluster.run("squeue --noheader").stdout, "");
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
}

/// By Ctrl-C, which reaches the importer as well, and by a signal to the command alone.
fn an_interrupted_import_submits_nothing(release: Release) {
    let cluster = with_importer(one_node(release, "import-interrupted"));
    let slow = "MIZZEN_CONTAINER=docker://registry.test/slow:1";
    for command in ["srun true", "sbatch --wrap=true", "salloc true"] {
        for (how, code) in [("timeout -s INT 1", 124), ("timeout --foreground -s INT 1", 124)] {
            let ended = run_in_time(&cluster, &format!("rm -f /shared/importing; {slow} {how} {command}"));
            assert_eq!((ended.code, ended.stdout.as_str()), (code, ""), "{how} {command}: {}", ended.text());
            let left = "for i in $(seq 50); do kill -0 $(cat /shared/importing) 2>/dev/null || exit 0; sleep 0.1; done; exit 1";
            assert_eq!(cluster.run(left).code, 0, "{how} {command}: the importer goes on");
        }
    }
    assert_eq!(cluster.run("squeue --noheader").stdout, "");
}

#[test]
fn nodes_import_where_the_site_wants_it() {
    let toml = Some("import = \"node\"\nimage_store = \"/shared/%u\"\n".to_owned());
    let cluster = with_importer(Spec { mizzen_toml: toml, ..Cluster::spec("import-node") });
    let (a, pinned) =
        ("docker://me@registry.test/a:2", format!("docker://me@registry.test/a:2@{}", digest("2")));
    let step = cluster
        .run(&format!("srun -N2 -n4 --container={a} sh -c 'echo $(cat /image) $MIZZEN_IMAGE_DIGEST' | sort"));
    assert_out(&step, 0, &format!("a {}\n", digest("2")).repeat(4));
    // The name is looked up where the job is submitted, and one of the nodes tells how the import goes.
    assert_eq!(step.stderr, "progress on ctl\nprogress on node1\n");
    let calls = asked(&cluster);
    let mut calls: Vec<&str> = calls.lines().collect();
    calls.sort_unstable();
    let resolved = format!("ctl: import --for-slurm --resolve-only {a}");
    let imported = |node: &str| format!("{node}: import --for-slurm {pinned}");
    assert_eq!(calls, [resolved.clone(), imported("node1"), imported("node2")]);
    let log = cluster.slurmd_log("node2");
    let line = format!("mizzen: docker://registry.test/a:2@{}: ", digest("2"));
    assert!(log.contains(&line) && log.contains("import "), "{log}");
    // A batch script's steps have the script's image, whatever its tag means by then.
    let a = "docker://registry.test/a:1";
    assert_jobs(&cluster, &[Job("", &format!("--container={a}"), BOTH, 0, "a\na\n")]);
    let node = format!("node1: import --for-slurm {a}@{}\n", digest("1"));
    assert_eq!(asked(&cluster), format!("ctl: import --for-slurm --resolve-only {a}\n{node}{node}"));
    // srun in a container knows that it is the same one: what names files of the image comes back.
    let script = "export PYTHONPATH=/inside; srun -Q sh -c 'echo $PYTHONPATH'";
    assert_jobs(&cluster, &[Job("", &format!("--container={a}"), script, 0, "/inside\n")]);
    asked(&cluster);
    // A failure of one node is the step's.
    cluster.run_on("node2", User::Root, &format!("sed -i 's/^  missing/  a/' {IMPORTER}"));
    let failed = cluster.run("srun -N2 --container=docker://registry.test/a:1 true");
    let message =
        format!("mizzen: node2: docker://registry.test/a:1@{}: no such image in registry.test", digest("1"));
    assert_told(&failed, 125, &message, "log in first\n");
    // Nothing is sent that is not there; the nodes copy it.
    let sent =
        cluster.run("srun -N1 --container=docker://registry.test/b:1 --container-stage=bcast cat /image");
    assert_out(&sent, 0, "b\n");
    // A job that is given no environment.
    cluster.write_everywhere(IMPORTER, &SCRIPT.replace("echo \"$(hostname)", "echo \"$HOME $USER")).unwrap();
    asked(&cluster);
    let bare = cluster.run("srun -N1 --export=NONE --container=docker://registry.test/b:1 /bin/cat /image");
    assert_out(&bare, 0, "b\n");
    let home = "/home/alice alice: import --for-slurm ";
    let b = format!("docker://registry.test/b:1@{}\n", digest("1"));
    assert_eq!(asked(&cluster), format!("{home}--resolve-only docker://registry.test/b:1\n{home}{b}"));
    cluster.write_everywhere(IMPORTER, SCRIPT).unwrap();
    // By hand there is no other machine to do it.
    asked(&cluster);
    assert_out(&cluster.run(&format!("mizzen run {a} cat /image")), 0, "a\n");
    assert_eq!(asked(&cluster), format!("ctl: import --for-slurm {a}\n"));
    // What it was made of is shown.
    let plan = cluster.run(&format!("mizzen plan {a} true")).stdout;
    assert!(plan.contains(&format!("\nenv       MIZZEN_IMAGE_DIGEST={} ", digest("1"))), "{plan}");
    for command in ["plan", "inspect"] {
        let shown = cluster.run(&format!("mizzen {command} {a} | grep -v ^env | grep '{a}@{}'", digest("1")));
        assert!(shown.code == 0 && shown.stdout.lines().count() == 1, "{command}: {}", shown.text());
        let json = cluster.run(&format!("mizzen {command} --json {a}")).stdout;
        assert!(json.contains(&format!("\"reference\": \"{a}@{}\"", digest("1"))), "{json}");
    }
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
}

#[test]
fn the_sites_key_holds_for_every_request() {
    let toml = |when: &str| format!("import = \"{when}\"\n");
    let cluster =
        with_importer(Spec { nodes: 1, mizzen_toml: Some(toml("never")), ..Cluster::spec("import-key") });
    let a = "docker://registry.test/a:1";
    let by_hand = "make a file of it with `mizzen import NAME -o FILE.sqsh` and name that";
    let never = "docker://registry.test/a:1: images in registries are not imported for jobs here \
                 (mizzen.toml: import = \"never\")";
    for (command, code, option) in [
        (format!("srun --container={a} true"), 1, "--container: "),
        (format!("sbatch --container-image={a} --wrap=true"), 1, "--container-image: "),
        (format!("MIZZEN_CONTAINER={a} salloc true"), 1, "MIZZEN_CONTAINER: "),
        (format!("mizzen run {a} true"), 125, ""),
        (format!("mizzen inspect {a}"), 1, ""),
    ] {
        let refused = cluster.run(&command);
        assert_told(&refused, code, &format!("mizzen: {option}{never}"), by_hand);
    }
    // A hand-made request.
    let pinned = format!("{a}@{}", digest("1"));
    let stored = format!("image=/shared/a.sqsh&reference={pinned}");
    let unfetched = format!("reference={pinned}");
    let ask = |request: &str| cluster.run(&format!("SLURM_MIZZEN_REQUEST='{request}' srun cat /image"));
    let refused = |when: &str, what: &str| {
        format!("mizzen: node1: {pinned}: {what} here (mizzen.toml: import = \"{when}\")")
    };
    for request in [&stored, &unfetched] {
        assert_failed(
            &ask(request),
            125,
            &refused("never", "images in registries are not imported for jobs"),
        );
    }
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", &toml("submit")).unwrap();
    assert_out(&ask(&stored), 0, "a\n");
    assert_failed(&ask(&unfetched), 125, &refused("submit", "nodes do not import images"));
    for (request, message) in [
        ("reference=docker://registry.test/a", "\"docker://registry.test/a\" has no digest"),
        (
            "image=/shared/a.sqsh&reference=docker://u:secret@h.io/a",
            "docker://…@h.io/a: a password in a name",
        ),
    ] {
        let forged = ask(request);
        assert_failed(&forged, 1, &format!("mizzen: SLURM_MIZZEN_REQUEST: {message}"));
    }
    assert_eq!(asked(&cluster), "");
}

#[test]
fn without_an_importer_one_message_says_so() {
    let cluster = with_images(Spec {
        nodes: 1,
        mizzen_toml: Some("import = \"submit\"\n".to_owned()),
        ..Cluster::spec("import-missing")
    });
    cluster.run_as_root(&format!("rm -f {IMPORTER}"));
    cluster.run_on("node1", User::Root, &format!("rm -f {IMPORTER}"));
    let a = "docker://registry.test/a:1";
    let missing = format!("{a}: cannot start the importer: {IMPORTER}: No such file or directory");
    let hint =
        "`make install` and the package of mizzen put it there; copy mizzen-import of the same version";
    for (command, code, option) in [
        (format!("srun --container={a} true"), 1, "--container: "),
        (format!("sbatch --container={a} --wrap=true"), 1, "--container: "),
        (format!("mizzen run {a} true"), 125, ""),
        (format!("mizzen stage {a}"), 1, ""),
    ] {
        assert_told(&cluster.run(&command), code, &format!("mizzen: {option}{missing}"), hint);
    }
    // Not a job's matter that has no such image.
    assert_out(&cluster.run("srun --container=/shared/a.sqsh cat /image"), 0, "a\n");
    assert_eq!(cluster.run("srun true").code, 0);
    // On the node.
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", "import = \"node\"\n").unwrap();
    let request = format!("reference={a}@{}", digest("1"));
    let on_node = cluster.run(&format!("SLURM_MIZZEN_REQUEST='{request}' srun -n2 true"));
    let message = format!("mizzen: node1: cannot start the importer: {IMPORTER}: No such file");
    assert_failed(&on_node, 125, &message);
}

#[test]
fn names_that_are_wrong_are_told_without_passwords() {
    let cluster = with_importer(Spec { nodes: 1, ..Cluster::spec("import-names") });
    let relative = "a relative path starts at the current directory; an image in a registry is written ";
    for (value, message, hint) in [
        (
            "ubuntu:22.04",
            "no such image; tried /home/alice/ubuntu:22.04",
            format!("{relative}docker://ubuntu:22.04\n"),
        ),
        ("tf.sqsh", "no such image; tried /home/alice/tf.sqsh", format!("{relative}docker://NAME\n")),
        (
            "docker://Ubuntu",
            "docker://Ubuntu: \"Ubuntu\" is not the name of an image",
            "names are lower-case letters and digits".to_owned(),
        ),
        (
            "https://registry.test/a",
            "https://registry.test/a: cannot fetch images from https://",
            "an image in a registry is written docker://NAME".to_owned(),
        ),
        (
            "docker://alice:s3cret@registry.test/a",
            "docker://…@registry.test/a: a password in a name",
            "others can read command lines; run `mizzen login REGISTRY`".to_owned(),
        ),
        (
            "alice:s3cret@registry.test#a",
            "…@registry.test#a: a password in a name",
            "others can read command lines".to_owned(),
        ),
    ] {
        for (command, code, option) in [
            (format!("srun --container='{value}' true"), 1, "--container: "),
            (format!("MIZZEN_CONTAINER='{value}' sbatch --wrap=true"), 1, "MIZZEN_CONTAINER: "),
            (format!("mizzen run '{value}' true"), 125, ""),
        ] {
            let refused = cluster.run(&command);
            assert_told(&refused, code, &format!("mizzen: {option}{message}"), &hint);
            assert!(!refused.stderr.contains("s3cret"), "{}", refused.text());
        }
    }
    // Where two contradict each other.
    let one = "docker://alice:s3cret@registry.test/a";
    for command in [
        format!("srun --container={one} --container-image=/shared/a.sqsh true"),
        format!("MIZZEN_CONTAINER={one} MIZZEN_CONTAINER_IMAGE=/shared/a.sqsh srun true"),
        format!("srun --container-image={one} : --container-image=/shared/a.sqsh true"),
        format!("sbatch --container-image={one} : --container-image=/shared/a.sqsh --wrap=true"),
    ] {
        let refused = cluster.run(&command);
        assert!(refused.code == 1 && !refused.stderr.contains("s3cret"), "{}", refused.text());
    }
    assert_eq!(asked(&cluster), "");
    // A path is a file. A name that could be either is refused, and with a scheme it never is a file: others may put some here.
    let files = cluster.run(
        "cp /shared/b.sqsh registry.test#a; srun --container-image=$PWD/registry.test#a cat /image; \
         mizzen run ./registry.test#a cat /image",
    );
    assert_out(&files, 0, "b\nb\n");
    let either = cluster.run("srun --container-image=registry.test#a cat /image");
    assert_told(
        &either,
        1,
        "mizzen: --container-image: registry.test#a is the name of a file here, and of an image in a registry",
        "write ./registry.test#a for the file, docker://registry.test#a for the registry",
    );
    assert_eq!(asked(&cluster), "");
    let named = cluster.run(
        "mkdir -p docker:/registry.test; cp /shared/b.sqsh docker:/registry.test/a:1; \
         srun --container=docker://registry.test/a:1 cat /image",
    );
    assert_out(&named, 0, "a\n");
    assert_eq!(asked(&cluster), "ctl: import --for-slurm docker://registry.test/a:1\n");
}
