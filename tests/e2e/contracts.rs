//! What scripts for other programs rely on, row by row: which test tries it, and the tests of the rows that have no other place.
//! A row is quoted as it was read in the other program's sources or documents.

use mizzen_tests::check::{assert_failed, assert_out, assert_told, one_node, with_images};
use mizzen_tests::images::{ImageTree, sif};
use mizzen_tests::registry::{Layout, LocalRegistry};
use mizzen_tests::{Cluster, Release, Spec, User};

/// What is quoted, and the test that tries it: its file, and its name there.
const ROWS: &[(&str, &str, &str)] = &[
    // Options of pyxis.
    ("Every option has a variable `PYXIS_CONTAINER_…`", "pyxis", "variables_stand_for_options"),
    ("other values are ignored", "pyxis", "variables_stand_for_options"),
    ("An option given twice with different values is an error", "contracts", "options_of_pyxis"),
    ("PATH if it begins with `.` or `/`; else `docker://` is put in front", "contracts", "options_of_pyxis"),
    (
        "SRC begins with `.` or `/` (rbind, destination created), or is `tmpfs`",
        "pyxis",
        "mounts_have_enroots_flags",
    ),
    ("chdir inside; `../` ends in `/`", "contracts", "options_of_pyxis"),
    (
        "auto: running, join; existing, reuse its files; else create from the image",
        "named",
        "enters_what_runs",
    ),
    ("create: must not exist", "named", "every_flag_has_its_meaning"),
    ("exec: must run", "named", "every_flag_has_its_meaning"),
    ("no_exec: never join", "named", "every_flag_has_its_meaning"),
    ("Without image and not existing:", "named", "every_flag_has_its_meaning"),
    (
        "Errors: empty name; name with `/`; flag must be one of the four",
        "named",
        "every_flag_has_its_meaning",
    ),
    (
        "An unnamed container of a running step can be joined by the name `JOB.STEP`",
        "named",
        "every_flag_has_its_meaning",
    ),
    (
        "squashfs of the container's root, by the last local task at its end",
        "save",
        "saves_what_a_container_has_become",
    ),
    ("target is a directory: error", "save", "what_cannot_be_saved_is_told_before"),
    ("home (or /root when remapped)", "pyxis", "accounts_and_homes"),
    ("uid_map `0 UID 1` or `UID UID 1`", "pyxis", "accounts_and_homes"),
    ("Both given: error", "contracts", "options_of_pyxis"),
    ("the image's entrypoint, once per node before the tasks", "pyxis", "the_entrypoint_runs_once_on_a_node"),
    ("its output goes to the user", "pyxis", "the_entrypoint_runs_once_on_a_node"),
    (
        "`--container-writable`, `--container-readonly` | | read-only | both: error",
        "contracts",
        "options_of_pyxis",
    ),
    (
        "the host's value wins over the image's, for the entrypoint too",
        "pyxis",
        "variables_of_the_host_and_of_pytorch",
    ),
    ("argument required; empty; `unknown namespace '…'`", "pyxis", "namespaces_of_its_own"),
    ("requested but the container is not in a separate network namespace", "contracts", "options_of_pyxis"),
    ("Without image and name, every other option is only named as ignored", "contracts", "options_of_pyxis"),
    // What its scripts see.
    (
        "`PATH`, `LD_LIBRARY_PATH`, `LD_PRELOAD` are never the host's",
        "contracts",
        "what_scripts_of_pyxis_see",
    ),
    (
        "`LANG`, `LANGUAGE`, `LC_ALL` are unset unless named in --container-env",
        "pyxis",
        "variables_of_the_host_and_of_pytorch",
    ),
    ("`RANK=$SLURM_PROCID`, `LOCAL_RANK=$SLURM_LOCALID`", "pyxis", "variables_of_the_host_and_of_pytorch"),
    (
        "PMIX_SERVER_TMPDIR is mounted and PMIX_MCA_psec/gds follow the server's",
        "contracts",
        "what_scripts_of_pyxis_see",
    ),
    ("the batch script in slurmd's spool is visible", "contracts", "what_scripts_of_pyxis_see"),
    ("a named container keeps what was written between steps", "named", "keeps_what_steps_write"),
    ("a reused named container prints nothing extra", "named", "keeps_what_steps_write"),
    ("with unshare=ipc /dev, /dev/shm and /dev/mqueue are its own", "pyxis", "namespaces_of_its_own"),
    ("sethostname works with uts and remap-root", "pyxis", "namespaces_of_its_own"),
    (
        "Seccomp shows a filter in /proc/self/status with and without remap-root",
        "contracts",
        "what_scripts_of_pyxis_see",
    ),
    ("`container_scope=global|job`", "named", "containers_of_a_job_go_with_it"),
    ("plugstack keys: `runtime_path`, `execute_entrypoint`", "contracts", "keys_of_pyxis_in_plugstack"),
    // Commands of enroot.
    ("`import -o F docker://[USER@][REGISTRY#]IMAGE[:TAG]`", "enroot", "images_are_imported"),
    ("credentials in `$ENROOT_CONFIG_PATH/.credentials`", "enroot", "images_are_imported"),
    (
        "`create -n NAME F`, `start [--rw] [--root] [-m SRC:DST] [-e K=V] NAME|F [CMD]`",
        "enroot",
        "containers_are_made_started_entered_saved_and_removed",
    ),
    // Environment files.
    ("`base_environment` | string or array |", "environment_files", "every_key_has_its_effect"),
    ("`image` | string | required, perhaps from a parent", "environment_files", "every_key_has_its_effect"),
    ("`workdir` | string | the image's", "environment_files", "every_key_has_its_effect"),
    ("`entrypoint` | bool | true", "environment_files", "every_key_has_its_effect"),
    ("`writable` | bool | true", "environment_files", "every_key_has_its_effect"),
    ("`mounts` | array of `SRC[:DST[:FLAGS]]`", "environment_files", "every_key_has_its_effect"),
    ("`devices` | array | CDI names or device paths", "environment_files", "every_key_has_its_effect"),
    ("`[env]` | table | sets;", "environment_files", "every_key_has_its_effect"),
    ("`[annotations]` | table, dotted or nested", "environment_files", "every_key_has_its_effect"),
    (
        "A value that begins with `.` or `/` or ends in `.toml` is a path",
        "environment_files",
        "a_file_names_a_container_in_every_way",
    ),
    (
        "`${VAR}`, `${VAR:-default}`, `$$`; an undefined variable is an error",
        "environment_files",
        "every_key_has_its_effect",
    ),
    (
        "Options `--environment=NAME` (CSCS today) and `--edf=NAME` (sarus-suite)",
        "environment_files",
        "a_file_names_a_container_in_every_way",
    ),
    // Singularity, Charliecloud, udocker.
    (
        "`singularity pull docker://tensorflow/tensorflow`, `pull -F out.sif`, `sregistry pull nvidia://tensorflow:17.11`",
        "contracts",
        "images_are_pulled",
    ),
    (
        "`singularity exec [-B src:dst[:ro]] [--nv] [--pwd d] [-e] [-C] img cmd`, `run`, `shell`; `--fakeroot`, `--writable-tmpfs`, `--overlay`",
        "contracts",
        "what_singularity_and_apptainer_do",
    ),
    (
        "`mpirun -np 4 singularity exec centos_ompi.img /usr/bin/mpi_ring`",
        "mpirun",
        "ranks_on_two_nodes_compute_together",
    ),
    (
        "`ch-convert img dir`, `ch-run [-w] [-b src:dst] [--set-env] img -- cmd`",
        "contracts",
        "what_charliecloud_does",
    ),
    (
        "`mpiexec -n $SLURM_NTASKS -ppn $SLURM_NTASKS_PER_NODE ch-run -b",
        "mpirun",
        "mpich_finds_its_process_manager",
    ),
    (
        "`udocker pull`, `create --name=`, `setup --nvidia`, `run --env= --hostenv --hostauth --user= -v src:dst name cmd`",
        "contracts",
        "what_udocker_does",
    ),
];

#[test]
fn every_row_is_quoted_where_it_is_tried() {
    for (quote, file, test) in ROWS {
        let path = mizzen_tests::repository().join(format!("tests/e2e/{file}.rs"));
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.contains(&format!("fn {test}(")), "{file}: no test {test}");
        // Beside this table, where the row is tried here.
        let comments: Vec<&str> =
            text.lines().filter_map(|line| line.trim_start().strip_prefix("//")).collect();
        let comments =
            comments.iter().map(|line| line.trim_start_matches('/').trim()).collect::<Vec<_>>().join(" ");
        assert!(comments.contains(quote), "{file}: {test} does not quote: {quote}");
    }
}

fn start(release: Release, name: &str, toml: &str) -> Cluster {
    let mizzen_toml = Some(format!("stage_directory = \"/disk\"\n{toml}"));
    let cluster = with_images(Spec { mizzen_toml, ..one_node(release, name) });
    for machine in ["ctl", "node1"] {
        let disk = "mkdir -p /disk && mount -t tmpfs disk /disk && chmod 1777 /disk";
        assert_eq!(cluster.run_on(machine, User::Root, disk).code, 0);
    }
    cluster
}

const TWO_RELEASES: [Release; 2] = [Release::Slurm22_05, Release::Slurm24_11];

#[test]
fn options_of_pyxis() {
    for release in TWO_RELEASES {
        let cluster = start(release, "contract-options", "import = \"never\"\n");
        let srun = |options: &str, program: &str| cluster.run(&format!("srun -Q {options} {program}"));
        let image = "--container-image=/shared/a.sqsh";
        // "PATH if it begins with `.` or `/`; else `docker://` is put in front unless it has `docker://` or `dockerd://`. Errors:
        // argument required": the bare name of a file is one here, unless the site wants pyxis's ways (pyxis.rs).
        cluster.run("cp /shared/b.sqsh .");
        for name in ["./b.sqsh", "/home/alice/b.sqsh", "b.sqsh"] {
            assert_out(&srun(&format!("--container-image={name}"), "cat /image"), 0, "b\n");
        }
        for name in
            ["docker://nvcr.io/nvidia/cuda:12", "nvcr.io#nvidia/cuda:12", "alice@nvcr.io#nvidia/cuda:12"]
        {
            let refused = srun(&format!("--container-image='{name}'"), "touch /shared/marker");
            assert_failed(&refused, 1, "nvcr.io/nvidia/cuda:12: images in registries are not imported");
        }
        let daemon = srun("--container-image=dockerd://mine:1", "touch /shared/marker");
        assert_told(
            &daemon,
            1,
            "dockerd://mine:1: cannot fetch images from dockerd://",
            "docker save mine:1 | mizzen import -o FILE -",
        );
        assert_failed(&srun("--container-image=", "touch /shared/marker"), 1, "--container-image: ");
        // "An option given twice with different values is an error": here the last one holds, as for Slurm's own options, and so
        // it is where pyxis says "Both given: error"; "`--container-writable`, `--container-readonly` | | read-only | both: error".
        assert_out(&srun(&format!("--container-image=/shared/b.sqsh {image}"), "cat /image"), 0, "a\n");
        let write = "sh -c 'touch /x 2>/dev/null && echo yes || echo no'";
        assert_out(&srun(image, write), 0, "no\n");
        assert_out(&srun(&format!("{image} --container-writable --container-readonly"), write), 0, "no\n");
        assert_out(&srun(&format!("{image} --container-readonly --container-writable"), write), 0, "yes\n");
        let home = "sh -c 'ls -A $HOME | grep -c b.sqsh'";
        assert_out(
            &srun(&format!("{image} --no-container-mount-home --container-mount-home"), home),
            0,
            "1\n",
        );
        assert_out(
            &srun(&format!("{image} --container-mount-home --no-container-mount-home"), home),
            1,
            "0\n",
        );
        // "chdir inside; `../` ends in `/`": from the directory of submission, as every relative path, unless the site wants
        // pyxis's ways (pyxis_cases.rs).
        assert_out(&srun(&format!("{image} --container-workdir=/etc/../var"), "pwd"), 0, "/var\n");
        assert_out(&srun(&format!("{image} --container-workdir=../"), "pwd"), 0, "/home\n");
        // "joining a container without it: `requested but the container is not in a separate network namespace` (IPC, UTS likewise)"
        let joined = cluster.run(
            "salloc -Q -n8 bash -c 'export SLURM_NTASKS=1 SLURM_NPROCS=1; srun -Q --overlap --container-image=/shared/a.sqsh --container-name=x sleep 3 & sleep 1.5; \
             for i in net ipc uts; do srun -Q --overlap --container-name=x --container-unshare=$i touch /shared/marker; echo $?; done; wait'",
        );
        assert_out(&joined, 0, "125\n125\n125\n");
        for name in ["network", "IPC", "UTS"] {
            let message = format!(
                "node1: --container-unshare: requested but the container is not in a separate {name} namespace"
            );
            assert_failed(&joined, 0, &message);
        }
        // "Without image and name, every other option is only named as ignored, and the job runs on the host": here it is refused.
        for option in [
            "--container-mounts=/shared:/m",
            "--container-workdir=/",
            "--container-writable",
            "--container-save=x",
        ] {
            let refused = srun(option, "touch /shared/marker");
            assert_eq!(refused.code, 1, "{option}: {}", refused.text());
            let name = option.split('=').next().unwrap();
            assert!(refused.stderr.contains(&format!("mizzen: {name}")), "{}", refused.text());
        }
        assert_eq!(cluster.run("ls /shared/marker").code, 2, "it ran outside");
    }
}

#[test]
fn what_scripts_of_pyxis_see() {
    for release in TWO_RELEASES {
        let cluster = start(release, "contract-seen", "compatible = \"pyxis\"\n");
        let image = "--container-image=/shared/a.sqsh";
        // "`PATH`, `LD_LIBRARY_PATH`, `LD_PRELOAD` are never the host's"
        let seen = cluster.run(&format!(
            "PATH=/opt/host:$PATH LD_LIBRARY_PATH=/opt/host srun -Q --export=ALL,LD_PRELOAD=/opt/host.so {image} \
             sh -c 'echo \"$PATH $LD_LIBRARY_PATH $LD_PRELOAD\" | grep -c opt/host'"
        ));
        assert_out(&seen, 1, "0\n");
        // "PMIX_SERVER_TMPDIR is mounted and PMIX_MCA_psec/gds follow the server's": these with pyxis's defaults alone, as a library
        // looks at the server's own variables.
        let pmix = cluster.run(&format!(
            "srun -Q --mpi=pmix {image} sh -c 'ls -d $PMIX_SERVER_TMPDIR | wc -l; [ \"$PMIX_MCA_psec\" = \"$PMIX_SECURITY_MODE\" ] && \
             [ \"$PMIX_MCA_gds\" = \"$PMIX_GDS_MODULE\" ] && [ -n \"$PMIX_GDS_MODULE$PMIX_SECURITY_MODE\" ] && echo follow'"
        ));
        assert_out(&pmix, 0, "1\nfollow\n");
        // "the batch script in slurmd's spool is visible"
        let script = cluster.run(&format!(
            "printf '#!/bin/sh\\ncat $0 | tail -n1\\n# the end\\n' > job; sbatch -Q --wait -o out {image} job; cat out"
        ));
        assert_out(&script, 0, "# the end\n");
        // "Seccomp shows a filter in /proc/self/status with and without remap-root": here with it alone.
        for (option, mode) in [("--container-remap-root", 2), ("--no-container-remap-root", 0)] {
            let filter = cluster.run(&format!("srun -Q {image} {option} grep Seccomp: /proc/self/status"));
            assert_out(&filter, 0, &format!("Seccomp:\t{mode}\n"));
        }
    }
}

/// "plugstack keys: `runtime_path`, `execute_entrypoint`, `container_scope=global|job` (global), `sbatch_support`, `importer`,
/// `use_squashfuse`, `use_enroot_load`": what they say is said in mizzen.toml, and who copies them is told.
#[test]
fn keys_of_pyxis_in_plugstack() {
    let plugin = format!("required {} ", mizzen_tests::spec::PLUGIN);
    let cluster = with_images(one_node(Release::Slurm24_11, "contract-plugstack"));
    for key in ["runtime_path=/run/pyxis", "execute_entrypoint=1", "container_scope=job", "use_squashfuse=1"]
    {
        cluster.set_plugstack(&[&format!("{plugin}{key}")]).unwrap();
        let refused = cluster.run("srun -Q --container-image=/shared/a.sqsh touch /shared/marker");
        assert_eq!(refused.code, 1, "{key}: {}", refused.text());
        assert!(refused.stderr.contains(&format!("\"{key}\"")), "{}", refused.text());
        // No job without a container minds.
        assert_out(&cluster.run("srun -Q hostname"), 0, "node1\n");
    }
    assert_eq!(cluster.run("ls /shared/marker").code, 2, "it ran outside");
}

/// "`singularity pull docker://tensorflow/tensorflow`, `pull -F out.sif`, `sregistry pull nvidia://tensorflow:17.11`"
#[test]
fn images_are_pulled() {
    let layout = Layout::new().unwrap();
    let base = ImageTree::busybox().unwrap();
    base.file("version", "one\n").unwrap();
    layout.image("one", &[&base], &[]).unwrap();
    let registry = LocalRegistry::start().unwrap();
    registry.push(&layout, "one", "tensorflow/tensorflow:latest", &[]).unwrap();
    registry.push(&layout, "one", "nvidia/tensorflow:17.11", &[]).unwrap();
    let mirrored = |host: &str| format!("[registries.\"{host}\"]\nmirrors = [\"http://ctl:5000\"]\n");
    let toml = format!(
        "{}{}[registries.\"ctl:5000\"]\nplain_http = true\n",
        mirrored("docker.io"),
        mirrored("nvcr.io")
    );
    let cluster = start(Release::Slurm24_11, "contract-pull", &toml);
    let _open = registry.serve_on(&cluster, 5000, None).unwrap();
    let run = |script: &str| cluster.run(script);
    assert_out(
        &run("mizzen import -q -o tf.sqsh docker://tensorflow/tensorflow && mizzen run tf.sqsh cat /version"),
        0,
        "one\n",
    );
    // Without -F what is there stays there.
    let there = run("mizzen import -q -o tf.sqsh docker://tensorflow/tensorflow");
    assert_told(&there, 1, "tf.sqsh: is there already", "--force replaces it");
    assert_eq!(run("mizzen import -q --force -o tf.sqsh docker://tensorflow/tensorflow").code, 0);
    let kept = run(
        "mizzen import -q docker://nvcr.io/nvidia/tensorflow:17.11 && mizzen run docker://nvcr.io/nvidia/tensorflow:17.11 cat /version",
    );
    assert!(kept.code == 0 && kept.stdout.ends_with("one\n"), "{}", kept.text());
}

/// "`singularity exec [-B src:dst[:ro]] [--nv] [--pwd d] [-e] [-C] img cmd`, `run`, `shell`; `--fakeroot`, `--writable-tmpfs`,
/// `--overlay`"
#[test]
fn what_singularity_and_apptainer_do() {
    let cluster = start(Release::Slurm24_11, "contract-singularity", "");
    let tree = ImageTree::busybox().unwrap();
    tree.file(
        ".mizzen/config.json",
        r#"{"config": {"Env": ["X=image"], "Entrypoint": ["/bin/echo", "ran"], "Cmd": ["by itself"]}}"#,
    )
    .unwrap();
    let squashfs = tree.squashfs(&["-comp", "gzip"]).unwrap();
    cluster.share("x.sif", &sif(&squashfs)).unwrap();
    cluster.share("x.sqsh", &squashfs).unwrap();
    let run = |script: &str| cluster.run_on("node1", User::Alice, script);
    run("mkdir -p data; echo data > data/f; touch ~/mark /tmp/mark");
    for (script, code, printed) in [
        // exec -B src:dst:ro --pwd d
        (
            "mizzen run -m $PWD/data:/d:ro --workdir /d /shared/x.sif sh -c 'pwd; cat f; touch f 2>/dev/null || echo ro'",
            0,
            "/d\ndata\nro\n",
        ),
        // exec -e
        ("A=host mizzen run /shared/x.sif sh -c 'echo $A $X'", 0, "host image\n"),
        ("A=host mizzen run --clean-env /shared/x.sif sh -c 'echo $A $X'", 0, "image\n"),
        // exec -C
        (
            "A=host mizzen run --no-home --clean-env --mount umount:/tmp,tmpfs:/tmp /shared/x.sif sh -c 'echo $A$(ls -A /tmp $HOME | grep -c mark)'",
            0,
            "0\n",
        ),
        // exec --fakeroot
        ("mizzen run --remap-root /shared/x.sif id -u", 0, "0\n"),
        // exec --writable-tmpfs
        (
            "mizzen run --writable /shared/x.sif sh -c 'echo x > /x; cat /x'; mizzen run /shared/x.sif ls /x 2>/dev/null",
            1,
            "x\n",
        ),
        // exec --overlay, and again
        (
            "mizzen run --name over /shared/x.sif sh -c 'echo kept > /kept'; mizzen run --name over /shared/x.sif cat /kept",
            0,
            "kept\n",
        ),
        // run; a SIF has no settings of OCI's, and this image's are in it
        ("mizzen run --entrypoint /shared/x.sqsh", 0, "ran by itself\n"),
        ("mizzen run --entrypoint /shared/x.sqsh more words", 0, "ran more words\n"),
        // shell
        (
            "echo 'cat /etc/os-release' | mizzen run /shared/x.sif sh",
            0,
            "PRETTY_NAME=\"Busybox for tests\"\n",
        ),
    ] {
        let done = run(script);
        assert_out(&done, code, printed);
    }
    // exec --nv: nothing to do, and no word where there is no GPU.
    let quiet = run("mizzen run /shared/x.sif true");
    assert_eq!((quiet.code, quiet.stderr.as_str()), (0, ""));
}

/// "`ch-convert img dir`, `ch-run [-w] [-b src:dst] [--set-env] img -- cmd`"
#[test]
fn what_charliecloud_does() {
    let cluster = start(Release::Slurm24_11, "contract-charliecloud", "");
    let run = |script: &str| cluster.run_on("node1", User::Alice, script);
    // ch-convert img dir, and back
    let converted = run(
        "mkdir img && mizzen export -q /shared/a.sqsh | tar -x --exclude='dev/*' -C img && mizzen run ./img cat /image && \
         mizzen import -q -o back.sqsh img && mizzen run back.sqsh cat /image",
    );
    assert_out(&converted, 0, "a\na\n");
    for (script, printed) in [
        // ch-run -b src:dst --set-env=A=b img -- cmd
        (
            "mkdir -p data; echo data > data/f; mizzen run -m $PWD/data:/mnt/0 -e A=b img -- sh -c 'cat /mnt/0/f; echo $A'",
            "data\nb\n",
        ),
        ("mkdir -p lrz; mizzen run -m $PWD/lrz:/lrz/sys/ ./img -- ls -d /lrz/sys", "/lrz/sys\n"),
        // ch-run -w img: what is written is there next time
        (
            "mizzen run --name img ./img -- sh -c 'echo kept > /kept'; mizzen run --name img - -- cat /kept",
            "kept\n",
        ),
        // ch-run --uid=0
        ("mizzen run --remap-root img id -u", "0\n"),
    ] {
        assert_out(&run(script), 0, printed);
    }
}

/// "`udocker pull`, `create --name=`, `setup --nvidia`, `run --env= --hostenv --hostauth --user= -v src:dst name cmd`"
#[test]
fn what_udocker_does() {
    let cluster = start(Release::Slurm24_11, "contract-udocker", "");
    let run = |script: &str| cluster.run_on("node1", User::Alice, script);
    for (script, printed) in [
        // create --name=u img; run u cmd
        (
            "mizzen run --name=u /shared/a.sqsh true; mizzen run --name=u - sh -c 'cat /image; echo kept > /kept'; mizzen run --name=u - cat /kept",
            "a\nkept\n",
        ),
        // run --env=A=b -v src:dst u
        (
            "mkdir -p data; echo data > data/f; mizzen run --name=u -e A=b -m $PWD/data:/d - sh -c 'cat /d/f; echo $A'",
            "data\nb\n",
        ),
        // run --hostenv --hostauth
        ("B=host mizzen run --name=u - sh -c 'echo $B; id -un'", "host\nalice\n"),
        // run --user=root
        ("mizzen run --remap-root --name=u - id -u", "0\n"),
        // ps, rm
        ("mizzen containers list | grep -c '^u '; mizzen containers remove u", "1\nu: removed\n"),
    ] {
        assert_out(&run(script), 0, printed);
    }
}
