//! What scripts for other programs rely on: `contracts.md` has it row by row, with the tests that prove it. Here are those of the rows
//! that have no other place.

use mizzen_tests::check::{assert_failed, assert_out, assert_told, one_node, with_images};
use mizzen_tests::images::{ImageTree, sif};
use mizzen_tests::registry::{Layout, LocalRegistry};
use mizzen_tests::{Cluster, Release, Spec, User};

/// A row of `contracts.md`: what scripts expect, and the tests that prove it.
struct Row {
    expected: String,
    proofs: Vec<String>,
}

fn rows() -> Vec<Row> {
    let page = std::fs::read_to_string(mizzen_tests::repository().join("tests/e2e/contracts.md")).unwrap();
    let lines = page.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    let cells = lines.map(|line| line.replace("\\|", "\0"));
    let cells = cells.map(|line| line.split(" | ").map(|cell| cell.replace('\0', "|")).collect::<Vec<_>>());
    let rows = cells.filter(|cells| cells.last().is_some_and(|last| last != "proved by"));
    rows.map(|mut cells| {
        let proofs = cells.pop().unwrap();
        let proofs = proofs.split(", ").map(|proof| proof.trim_matches('`').to_owned()).collect();
        Row { expected: cells.pop().unwrap(), proofs }
    })
    .collect()
}

/// The comments of a test, those above it and those in it, and whether it is one that is run.
fn comments_of(text: &str, test: &str) -> Option<(String, bool)> {
    let lines: Vec<&str> = text.lines().collect();
    let head = lines.iter().position(|line| line.trim_start().starts_with(&format!("fn {test}(")))?;
    let indent = &lines[head][..lines[head].len() - lines[head].trim_start().len()];
    let above = lines[..head].iter().rev();
    let above = above.take_while(|line| ["///", "#["].iter().any(|sign| line.trim_start().starts_with(sign)));
    let first = head - above.count();
    let last = head + lines[head..].iter().position(|line| *line == format!("{indent}}}"))?;
    // By itself, or for several releases by a macro that has its name.
    let is_run = lines[first..head].iter().any(|line| line.trim() == "#[test]")
        || text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| *word == test).count() > 1;
    let comments = lines[first..last].iter().filter_map(|line| line.trim_start().strip_prefix("//"));
    let comments: Vec<&str> = comments.map(|line| line.trim_start_matches('/').trim()).collect();
    Some((comments.join(" "), is_run))
}

#[test]
fn every_row_is_quoted_where_it_is_tried() {
    let rows = rows();
    assert!(rows.len() > 60, "only {} rows: has the page another form?", rows.len());
    for Row { expected, proofs } in rows {
        for proof in proofs {
            let (place, test) =
                proof.rsplit_once("::").unwrap_or_else(|| panic!("no test proves: {expected}"));
            let file =
                if place.ends_with(".rs") { place.to_owned() } else { format!("tests/e2e/{place}.rs") };
            let text = std::fs::read_to_string(mizzen_tests::repository().join(&file));
            let text = text.unwrap_or_else(|error| panic!("{file}: {error}"));
            let Some((comments, is_run)) = comments_of(&text, test) else { panic!("{file}: no test {test}") };
            assert!(is_run, "{file}: {test} is no test");
            assert!(comments.contains(&expected), "{file}: {test} does not quote: {expected}\n{comments}");
        }
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
        // "PATH if it begins with `.` or `/`; else `docker://` is put in front unless it has `docker://` or `dockerd://`": the bare
        // name of a file is one here, unless the site wants pyxis's ways (pyxis.rs).
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
        // "Errors: argument required; specified multiple times": the latter is no error here.
        assert_failed(&srun("--container-image=", "touch /shared/marker"), 1, "--container-image: ");
        let nothing = srun("--container-image", "");
        assert!(nothing.code != 0, "{}", nothing.text());
        assert!(
            nothing.stderr.contains("option '--container-image' requires an argument"),
            "{}",
            nothing.text()
        );
        // "An option given twice with different values is an error": here the last one holds, as for Slurm's own options, and so
        // it is where pyxis says "Both given: error" and "read-only by default; both: error".
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
        // "chdir inside; `../` ends in `/`; a missing one: `No such file or directory`": from the directory of submission, as every relative path, unless the site wants
        // pyxis's ways (pyxis_cases.rs).
        assert_out(&srun(&format!("{image} --container-workdir=/etc/../var"), "pwd"), 0, "/var\n");
        assert_out(&srun(&format!("{image} --container-workdir=../"), "pwd"), 0, "/home\n");
        let missing = srun(&format!("{image} --container-workdir=/none"), "touch /shared/marker");
        assert_failed(&missing, 125, "--container-workdir: cannot start in /none: No such file or directory");
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
            "--container-save=x",
            "--container-mount-home",
            "--no-container-mount-home",
            "--container-remap-root",
            "--no-container-remap-root",
            "--container-entrypoint",
            "--no-container-entrypoint",
            "--container-entrypoint-log",
            "--container-writable",
            "--container-readonly",
            "--container-env=PATH",
            "--container-unshare=net",
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
            "srun -Q --mpi=pmix {image} sh -c '[ -n \"$PMIX_SERVER_TMPDIR\" ] && grep -c \" ${{PMIX_SERVER_TMPDIR%/}} \" /proc/self/mountinfo; [ \"$PMIX_MCA_psec\" = \"$PMIX_SECURITY_MODE\" ] && \
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

/// "keys: `runtime_path`, `execute_entrypoint`, `container_scope=global|job` (global), `sbatch_support`, `importer`,
/// `use_squashfuse`, `use_enroot_load`": what they say is said in mizzen.toml, and who copies them is told.
#[test]
fn keys_of_pyxis_in_plugstack() {
    let plugin = format!("required {} ", mizzen_tests::spec::PLUGIN);
    for release in TWO_RELEASES {
        let cluster = with_images(one_node(release, "contract-plugstack"));
        for key in [
            "runtime_path=/run/pyxis",
            "execute_entrypoint=1",
            "container_scope=job",
            "sbatch_support=0",
            "importer=/usr/bin/importer",
            "use_squashfuse=1",
            "use_enroot_load=1",
        ] {
            cluster.set_plugstack(&[&format!("{plugin}{key}")]).unwrap();
            let refused = cluster.run("srun -Q --container-image=/shared/a.sqsh touch /shared/marker");
            assert_eq!(refused.code, 1, "{key}: {}", refused.text());
            assert!(refused.stderr.contains(&format!("\"{key}\"")), "{}", refused.text());
            // No job without a container minds.
            assert_out(&cluster.run("srun -Q hostname"), 0, "node1\n");
        }
        assert_eq!(cluster.run("ls /shared/marker").code, 2, "it ran outside");
    }
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
    let layout = Layout::new().unwrap();
    let base = ImageTree::busybox().unwrap();
    base.file("version", "one\n").unwrap();
    layout.image("one", &[&base], &[]).unwrap();
    let registry = LocalRegistry::start().unwrap();
    registry.push(&layout, "one", "lab/app:1", &[]).unwrap();
    let plain = "[registries.\"ctl:5000\"]\nplain_http = true\n";
    let cluster = start(Release::Slurm24_11, "contract-udocker", plain);
    let _open = registry.serve_on(&cluster, 5000, None).unwrap();
    let run = |script: &str| cluster.run_on("node1", User::Alice, script);
    for (script, printed) in [
        // pull, and create of what was pulled
        (
            "mizzen import -q docker://ctl:5000/lab/app:1 >/dev/null && mizzen run --name=pulled docker://ctl:5000/lab/app:1 cat /version; \
             mizzen containers remove pulled",
            "one\npulled: removed\n",
        ),
        // setup --nvidia: the node's driver is there by itself, and there is nothing to set up where there is none
        ("mizzen run --gpu=auto /shared/a.sqsh cat /image 2>&1", "a\n"),
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
