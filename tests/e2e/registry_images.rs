//! Images of a real registry: srun, sbatch, `mizzen run` and the importer's commands, from the name to the program.

use mizzen_tests::check::{assert_failed, assert_out, assert_told, one_node};
use mizzen_tests::images::ImageTree;
use mizzen_tests::registry::{ClusterRegistry, Layout, LocalRegistry};
use mizzen_tests::{Cluster, Release, Spec, on_every_release};

on_every_release!(a_step_runs_in_an_image_of_a_registry);

/// Of the registry that everybody may read, and of the one that asks for alice's password, `secret`.
const PORT: u16 = 5000;
const LOCKED: u16 = 5001;
const HTPASSWD: &str = "alice:$2y$05$6hS8ZsFBbGy50MmSqbw4Nej77kMmzAc0N/jI29uCuhCbQDmT1bBQm\n";

const TOML: &str =
    "[registries.\"ctl:5000\"]\nplain_http = true\n[registries.\"ctl:5001\"]\nplain_http = true\n";

/// A cluster with both registries. `app:1` has two layers, a variable and a command; `app:2` is `app:1` with
/// another layer on top.
fn with_registries(spec: Spec, more_toml: &str) -> (Cluster, Registries) {
    let base = ImageTree::busybox().unwrap();
    let app = ImageTree::empty().unwrap();
    app.file("opt/app/version", "one\n").unwrap();
    let newer = ImageTree::empty().unwrap();
    newer.file("opt/app/version", "two\n").unwrap();
    let layout = Layout::new().unwrap();
    let config = ["--config.env=APP=yes", "--config.cmd=cat", "--config.cmd=/opt/app/version"];
    layout.image("one", &[&base, &app], &config).unwrap();
    layout.image("two", &[&base, &app, &newer], &config).unwrap();
    let registry = LocalRegistry::start().unwrap();
    registry.push(&layout, "one", "lab/app:1", &[]).unwrap();
    registry.push(&layout, "two", "lab/app:2", &["--dest-compress-format=zstd"]).unwrap();
    let cluster = Cluster::start(Spec { mizzen_toml: Some(format!("{more_toml}{TOML}")), ..spec }).unwrap();
    let open = registry.serve_on(&cluster, PORT, None).unwrap();
    let _locked = registry.serve_on(&cluster, LOCKED, Some(HTPASSWD)).unwrap();
    (cluster, Registries { open, _locked, _filled: registry })
}

/// Both, and what they serve.
struct Registries {
    open: ClusterRegistry,
    _locked: ClusterRegistry,
    _filled: LocalRegistry,
}

/// Blobs and manifests that were fetched, each as often as it was.
fn fetched(registries: &Registries) -> Vec<String> {
    let mut all = registries.open.requests("GET /v2/lab/app/");
    all.sort();
    all
}

fn a_step_runs_in_an_image_of_a_registry(release: Release) {
    let (cluster, registries) = with_registries(Spec { nodes: 2, ..one_node(release, "registry") }, "");
    let step = cluster.run(
        "srun -N2 -n2 --container=docker://ctl:5000/lab/app:1 sh -c 'echo $(cat /opt/app/version) $APP'",
    );
    assert_eq!(step.stderr, "");
    assert_out(&step, 0, &"one yes\n".repeat(2));
    let all = fetched(&registries);
    let mut distinct = all.clone();
    distinct.dedup();
    // The manifest, the configuration and two layers.
    assert_eq!((all.len(), distinct.len()), (4, 4), "{all:?}");
    // It is in the store now, and its digest is the manifest's.
    let digest =
        cluster.run("mizzen images --json | grep manifest_digest | grep -o 'sha256:[0-9a-f]*'").stdout;
    let step = cluster.run("srun --container=docker://ctl:5000/lab/app:1 sh -c 'echo $MIZZEN_IMAGE_DIGEST'");
    assert_out(&step, 0, &digest);
    let job = cluster.run(
        "printf '#!/bin/sh\\n#SBATCH --container=docker://ctl:5000/lab/app:1\\ncat /opt/app/version; srun cat /opt/app/version\\n' > job.sh; \
         sbatch --quiet --wait --output=out job.sh >/dev/null; cat out",
    );
    assert_out(&job, 0, "one\none\n");
    assert_eq!(fetched(&registries), all, "nothing is fetched twice");
    let log = cluster.slurmd_log("node1");
    assert!(log.contains(&format!("docker://ctl:5000/lab/app:1@{}", digest.trim())), "{log}");
    // What cannot be is said before anything is submitted.
    let missing = cluster.run("srun --container=docker://ctl:5000/lab/app:9 true");
    assert_failed(&missing, 1, "mizzen: --container: docker://ctl:5000/lab/app:9: ");
    assert_eq!(cluster.run("squeue --noheader").stdout, "");
    assert!(cluster.all_idle());
}

#[test]
fn eight_nodes_fetch_every_blob_once() {
    let (cluster, registries) =
        with_registries(Spec { nodes: 8, cpus: 1, ..Cluster::spec("registry-eight") }, "");
    let step = cluster.run("srun -N8 --container=docker://ctl:5000/lab/app:2 cat /opt/app/version");
    assert_out(&step, 0, &"two\n".repeat(8));
    let all = fetched(&registries);
    let mut distinct = all.clone();
    distinct.dedup();
    assert_eq!((all.len(), distinct.len()), (5, 5), "{all:?}");
    // Of an image on the same base only its own layers, and here it has none: the other's lower two.
    let run = cluster.run("mizzen run docker://ctl:5000/lab/app:1");
    assert_out(&run, 0, "one\n");
}

#[test]
fn an_array_of_jobs_imports_once() {
    for (import, name) in [("submit", "registry-array"), ("node", "registry-nodes")] {
        let spec = Spec { slurm_conf: vec!["MaxArraySize=100".to_owned()], ..Cluster::spec(name) };
        let (cluster, registries) =
            with_registries(spec, &format!("import = \"{import}\"\nimage_store = \"/shared/store/%u\"\n"));
        cluster.run_as_root("mkdir -m 1777 /shared/store");
        let jobs = cluster.run(
            "sbatch --quiet --wait --array=1-50 --output=out-%a --container=docker://ctl:5000/lab/app:1 --wrap 'cat /opt/app/version' > /dev/null; \
             echo $?; cat out-* | sort | uniq -c",
        );
        assert_out(&jobs, 0, "0\n     50 one\n");
        let all = fetched(&registries);
        let blobs = all.iter().filter(|request| request.contains("/blobs/")).count();
        assert_eq!(blobs, 3, "{import}: {all:?}");
    }
}

#[test]
fn passwords_are_asked_for_and_stay_where_they_belong() {
    let (cluster, _registries) = with_registries(Spec { nodes: 1, ..Cluster::spec("registry-login") }, "");
    let image = "docker://ctl:5001/lab/app:1";
    let refused = cluster.run(&format!("srun --container={image} true"));
    assert_failed(&refused, 1, &format!("mizzen: --container: {image}: "));
    assert_failed(&refused, 1, "mizzen login ctl:5001");
    let wrong = cluster.run("echo wrong | mizzen login ctl:5001 -u alice --password-stdin");
    assert_eq!(wrong.code, 1, "{}", wrong.text());
    assert_eq!(cluster.run("ls .docker .config/containers 2>/dev/null").stdout, "");
    let right = cluster.run("echo secret | mizzen login ctl:5001 -u alice --password-stdin");
    assert_eq!((right.code, right.stderr.as_str()), (0, ""), "{}", right.text());
    let step = cluster.run(&format!("srun --container={image} sh -c 'cat /opt/app/version; env'"));
    assert_eq!((step.code, step.stdout.starts_with("one\n")), (0, true), "{}", step.text());
    // Not in the job's environment, nor in any log.
    assert!(!step.text().contains("secret") && !cluster.slurmd_log("node1").contains("secret"));
    assert_out(&cluster.run("stat -c %a .config/containers/auth.json"), 0, "600\n");
    cluster.run("rm -rf .local; mizzen logout ctl:5001");
    assert_eq!(cluster.run(&format!("mizzen import {image}")).code, 1);
}

#[test]
fn images_are_listed_updated_and_removed() {
    let (cluster, _registries) = with_registries(Spec { nodes: 1, ..Cluster::spec("registry-images") }, "");
    let path = cluster.run("mizzen import docker://ctl:5000/lab/app:1");
    assert_eq!((path.code, path.stderr.as_str()), (0, ""), "{}", path.text());
    assert!(path.stdout.starts_with("/home/alice/.local/share/mizzen/images/ctl"), "{}", path.stdout);
    let listed = cluster.run("mizzen images");
    assert!(listed.stdout.contains("docker://ctl:5000/lab/app:1"), "{}", listed.text());
    assert_out(
        &cluster.run("mizzen images update | sed 's/@.*: /: /'"),
        0,
        "docker://ctl:5000/lab/app:1: unchanged\n",
    );
    assert_out(
        &cluster.run("srun --container=$(ls .local/share/mizzen/images/*.sqsh) cat /opt/app/version"),
        0,
        "one\n",
    );
    let inspected = cluster.run("mizzen inspect docker://ctl:5000/lab/app:1");
    assert!(inspected.stdout.contains("APP=yes"), "{}", inspected.text());
    let removed =
        cluster.run("mizzen images remove docker://ctl:5000/lab/app:1; ls .local/share/mizzen/images");
    assert!(removed.code == 0 && !removed.stdout.contains(".sqsh\n"), "{}", removed.text());
    // A file of the same name is a file.
    let file = cluster.run(
        "mizzen import -o app.sqsh docker://ctl:5000/lab/app:1 && mizzen import -o app.sqsh docker://ctl:5000/lab/app:1",
    );
    assert_told(&file, 1, "mizzen: app.sqsh: ", "--force");
    assert_out(&cluster.run("srun --container=app.sqsh cat /opt/app/version"), 0, "one\n");
}
