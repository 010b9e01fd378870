//! Environment files (EDF), as users of CSCS's container engine have them. Every rule that their scripts rely on is quoted where it
//! is tried.

use mizzen_tests::check::{
    assert_failed, assert_failed_closed, assert_out, assert_told, one_node, with_images,
};
use mizzen_tests::images::ImageTree;
use mizzen_tests::jobs::{BOTH, Job, assert_jobs, without_mizzen};
use mizzen_tests::registry::{Layout, LocalRegistry};
use mizzen_tests::{Cluster, Release, Spec, User, on_every_release};

on_every_release!(a_file_names_a_container_in_every_way, what_is_submitted_is_what_runs);

/// Runs each check with the two releases that most sites have.
macro_rules! on_two_releases {
    ($($check:ident),* $(,)?) => {
        mod two_releases {
            mod slurm_22_05 { $(#[test] fn $check() { super::super::$check(mizzen_tests::Release::Slurm22_05) })* }
            mod slurm_24_11 { $(#[test] fn $check() { super::super::$check(mizzen_tests::Release::Slurm24_11) })* }
        }
    };
}

on_two_releases!(
    every_key_has_its_effect,
    options_win_over_the_file,
    bad_files_are_named,
    nodes_read_no_files
);

const TWO_RELEASES: [Release; 2] = [Release::Slurm22_05, Release::Slurm24_11];

/// An image with variables, a working directory, and an entrypoint that leaves a file.
fn oci_image() -> Vec<u8> {
    let tree = ImageTree::busybox().unwrap();
    tree.program("bin/entry", "#!/bin/sh\n: > /entered\nexec \"$@\"\n").unwrap();
    let config = r#"{"config": {"Env": ["A=image", "B=image", "C=image", "PATH=/bin"], "Entrypoint": ["/bin/entry"],
        "WorkingDir": "/var"}}"#;
    tree.file(".mizzen/config.json", config).unwrap();
    tree.squashfs(&["-comp", "zstd"]).unwrap()
}

fn start(spec: Spec) -> Cluster {
    let cluster = with_images(spec);
    cluster.share("oci.sqsh", &oci_image()).unwrap();
    assert_eq!(cluster.run("mkdir -p .edf").code, 0);
    cluster
}

/// Writes a file of Alice's.
fn write(cluster: &Cluster, path: &str, text: &str) {
    let written = cluster.run(&format!("cat > {path} <<'END'\n{text}\nEND"));
    assert_eq!(written.code, 0, "{path}: {}", written.text());
}

/// Writes a file of root's on the login node alone: nobody reads it elsewhere.
fn write_for_site(cluster: &Cluster, name: &str, text: &str) {
    let written =
        cluster.run_as_root(&format!("mkdir -p /etc/edf; cat > /etc/edf/{name}.toml <<'END'\n{text}\nEND"));
    assert_eq!(written.code, 0, "{}", written.text());
}

/// "A value that begins with `.` or `/` or ends in `.toml` is a path; else NAME.toml in `$EDF_PATH` (colon list, default `~/.edf`),
/// then /etc/edf." "Options `--environment=NAME` (CSCS today) and `--edf=NAME` (sarus-suite)."
fn a_file_names_a_container_in_every_way(release: Release) {
    let cluster = start(one_node(release, "environment-ways"));
    let image = |name: &str| format!("image = \"/shared/{name}.sqsh\"");
    write(&cluster, ".edf/mine.toml", &image("a"));
    write(&cluster, "here.toml", &image("b"));
    write(&cluster, "odd", &image("b"));
    cluster.run("mkdir -p /shared/one /shared/two");
    write(&cluster, "/shared/two/team.toml", &image("b"));
    write_for_site(&cluster, "site", &image("b"));
    write_for_site(&cluster, "mine", &image("b"));
    let path = "EDF_PATH=/shared/one:/shared/two";
    for (variables, options, expected) in [
        ("", "--environment=mine", "a"),
        ("", "--edf=mine", "a"),
        ("", "--environment mine", "a"),
        ("", "--environment=site", "b"),
        ("", "--environment=./here.toml", "b"),
        ("", "--environment=/home/alice/here.toml", "b"),
        ("", "--edf=here.toml", "b"),
        ("", "--environment=./odd", "b"),
        ("", "--container=here.toml", "b"),
        ("", "--container-image=./here.toml", "b"),
        ("", "--container=mine.toml", "a"),
        ("", "--environment=here.toml --edf=mine", "a"),
        (path, "--environment=team", "b"),
        (path, "--environment=mine", "b"),
        ("MIZZEN_ENVIRONMENT=mine", "", "a"),
        ("MIZZEN_EDF=./here.toml", "", "b"),
        ("MIZZEN_CONTAINER=here.toml", "", "b"),
        ("MIZZEN_ENVIRONMENT=mine", "--container=/shared/b.sqsh", "b"),
        ("", "--environment=mine --export=NONE", "a"),
        ("", "--environment=mine --container-image=/shared/b.sqsh", "b"),
    ] {
        let srun = cluster.run(&format!("{variables} srun -Q {options} cat /image"));
        assert_out(&srun, 0, &format!("{expected}\n"));
        assert_eq!(srun.stderr, "", "{release}: {variables} {options}");
    }
    let salloc = cluster
        .run("salloc -Q --environment=mine sh -c 'srun -Q cat /image; srun -Q --edf=here.toml cat /image'");
    assert_out(&salloc, 0, "a\nb\n");
    // The script is inside, and a nested srun inherits; a file of its own, another image or none take its place.
    let nested = format!(
        "{BOTH}; srun -Q --environment=/home/alice/here.toml cat /image; srun -Q --container=/shared/b.sqsh cat /image; \
         srun -Q --container=none /bin/hostname; srun -Q cat /image"
    );
    let all = "a\na\nb\nb\nnode1\na\n";
    assert_jobs(
        &cluster,
        &[
            Job("", "", &format!("#SBATCH --environment=mine\n{nested}"), 0, all),
            Job("", "", &format!("#SBATCH --container=mine.toml\n{BOTH}"), 0, "a\na\n"),
            Job("", "--edf=mine", &nested, 0, all),
            // EDF_PATH of a program inside names files of the container, which nobody reads outside: there it is the host's.
            Job(
                path,
                "--environment=team",
                "EDF_PATH=/nowhere srun -Q --environment=team cat /image; echo -$EDF_PATH-",
                0,
                "b\n--\n",
            ),
            Job("MIZZEN_ENVIRONMENT=mine", "", BOTH, 0, "a\na\n"),
            Job("", "--environment=mine --no-container-script", BOTH, 0, "host\na\n"),
        ],
    );
}

/// "rendered at submission": what is done to a file later does not matter, and nodes need not see it.
fn what_is_submitted_is_what_runs(release: Release) {
    let cluster = start(one_node(release, "environment-edits"));
    let text = "image = \"/shared/a.sqsh\"\nbase_environment = \"base\"\n[env]\nA = \"${WHO}\"";
    write(&cluster, ".edf/job.toml", text);
    write_for_site(&cluster, "base", "[env]\nB = \"before\"");
    write(&cluster, "job", "#!/bin/sh\ncat /image; echo $A $B; srun -Q sh -c 'cat /image; echo $A $B'");
    let submitted = cluster.run("WHO=me sbatch --parsable --hold -o out --environment=job job");
    assert_eq!(submitted.code, 0, "{}", submitted.text());
    write(&cluster, ".edf/job.toml", "image = \"/shared/b.sqsh\"\n[env]\nA = \"later\"");
    cluster.run_as_root("rm /etc/edf/base.toml");
    let job = submitted.stdout.trim();
    let done = cluster.run(&format!(
        "scontrol release {job}; for i in $(seq 300); do [ -z \"$(squeue -h -j {job} 2>/dev/null)\" ] && break; sleep 0.1; done; cat out"
    ));
    assert_out(&done, 0, "a\nme before\na\nme before\n");
    // The same in an allocation: its steps have what salloc has read.
    write(&cluster, ".edf/job.toml", "image = \"/shared/a.sqsh\"");
    let salloc = cluster.run("salloc -Q --environment=job sh -c 'rm .edf/job.toml; srun -Q cat /image'");
    assert_out(&salloc, 0, "a\n");
}

/// A row for each key.
fn every_key_has_its_effect(release: Release) {
    let devices = vec![("card9".to_owned(), 1, 5)];
    let cluster = start(Spec { devices, ..one_node(release, "environment-keys") });
    let cdi = "cdiVersion: 0.6.0\nkind: vendor.com/card\ndevices:\n- name: \"0\"\n  containerEdits:\n    env: [CARD=zero]\n";
    assert_eq!(cluster.run_on("node1", User::Root, "mkdir -p /etc/cdi").code, 0);
    let written = format!("cat > /etc/cdi/vendor.yaml <<'END'\n{cdi}\nEND");
    assert_eq!(cluster.run_on("node1", User::Root, &written).code, 0);
    cluster.run("mkdir -p /shared/data; echo data > /shared/data/file");
    let srun_with = |variables: &str, text: &str, program: &str| {
        write(&cluster, ".edf/e.toml", text);
        cluster.run(&format!("{variables} srun -Q --environment=e {program}"))
    };
    let srun = |text: &str, program: &str| srun_with("", text, program);
    let oci = "image = \"/shared/oci.sqsh\"\n";

    // "string or array; parents, in order, at most 10 levels; scalars overwrite"; "`mounts` and `devices` append, `env` and
    // `annotations` merge". (The levels are counted in a unit test.)
    write_for_site(
        &cluster,
        "base",
        &format!(
            "{oci}workdir = \"/etc\"\nmounts = [\"/shared/data:/base\"]\n[env]\nA = \"base\"\nX = \"base\""
        ),
    );
    write(
        &cluster,
        ".edf/second.toml",
        "base_environment = 'base'\nworkdir = \"/usr\"\n[env]\nX = \"second\"",
    );
    let merged =
        "base_environment = ['second', './third.toml']\nmounts = [\"/shared/data:/own\"]\n[env]\nA = \"own\"";
    write(&cluster, ".edf/third.toml", "[env]\nY = \"third\"");
    let shown = srun(merged, "sh -c 'pwd; cat /base/file /own/file; echo $A $X $Y'");
    assert_out(&shown, 0, "/usr\ndata\ndata\nown second third\n");

    let parent =
        "devices = [\"/dev/card9\"]\n[annotations]\ncom.hooks.cxi.enabled = \"true\"\ncom.of_parent = \"1\"";
    write(&cluster, ".edf/fourth.toml", parent);
    let appended = format!(
        "base_environment = './fourth.toml'\n{oci}devices = [\"vendor.com/card=0\"]\n[annotations]\ncom.of_child = \"1\""
    );
    let fabric = || cluster.slurmd_log("node1").matches("fabric=host").count();
    let before = fabric();
    let shown = srun(&appended, "sh -c 'head -c 3 /dev/card9 | wc -c; echo $CARD'");
    assert_out(&shown, 0, "3\nzero\n");
    assert_eq!(fabric(), before + 1);
    for name in ["com.of_parent", "com.of_child"] {
        assert_failed(&shown, 0, &format!("the annotation {name} is not known here and has no effect\n"));
    }

    // "string; required, perhaps from a parent; `[USER@][REGISTRY#]IMAGE[:TAG]` or a squashfs path"
    let missing = srun("image = \"./b.sqsh\"", "cat /image");
    assert_failed(&missing, 1, "e.toml:1: image: no such image; tried /home/alice/b.sqsh");
    cluster.run("cp /shared/b.sqsh .");
    assert_out(&srun("image = \"./b.sqsh\"", "cat /image"), 0, "b\n");
    assert_out(&srun("image = \"b.sqsh\"", "cat /image"), 0, "b\n");

    // "string; the image's by default"
    assert_out(&srun(oci, "pwd"), 0, "/var\n");
    assert_out(&srun(&format!("{oci}workdir = \"/etc\""), "pwd"), 0, "/etc\n");
    assert_out(&srun("image = \"/shared/a.sqsh\"", "pwd"), 0, "/\n");

    // "bool; true by default"
    assert_out(&srun(oci, "ls /entered"), 0, "/entered\n");
    assert_out(&srun(&format!("{oci}entrypoint = false"), "sh -c 'ls /entered || echo not'"), 0, "not\n");

    // "bool; true by default too"
    assert_out(&srun(oci, "sh -c 'echo x > /x; cat /x'"), 0, "x\n");
    assert_out(&srun(&format!("{oci}writable = true"), "sh -c 'echo x > /x; cat /x'"), 0, "x\n");
    let read_only = srun(&format!("{oci}writable = false\nentrypoint = false"), "touch /x");
    assert_failed(&read_only, 1, "Read-only file system");

    // "array of `SRC[:DST[:FLAGS]]`; flags by `+` (also `,`); `sqsh`: SRC is a squashfs file to be mounted"
    let mounts = format!(
        "{oci}mounts = [\"/shared/data\", \"/shared/data:/ro:ro,noexec\", \"/shared/data:/rw:rw+rbind\", \"/shared/b.sqsh:/sq:sqsh\", \
         \"/shared/b.sqsh:/sq2:ro,sqsh\", \"tmpfs:/t\"]"
    );
    let shown = srun(
        &mounts,
        "sh -c 'cat /shared/data/file /ro/file /rw/file /sq/image /sq2/image; touch /ro/x || echo ro; touch /rw/x /t/x && echo rw'",
    );
    assert_out(&shown, 0, "data\ndata\ndata\nb\nb\nro\nrw\n");

    // "array; CDI names or device paths"
    let both = format!("{oci}devices = [\"/dev/card9\", \"vendor.com/card=0\"]");
    assert_out(&srun(&both, "sh -c 'head -c 3 /dev/card9 | wc -c; echo $CARD'"), 0, "3\nzero\n");
    assert_out(&srun(oci, "sh -c 'ls /dev/card9 2>/dev/null; echo -$CARD-'"), 0, "--\n");

    // "table; sets; "" unsets; EDF over image over host"
    let env = format!("{oci}[env]\nA = \"file, and ${{WHO}}\"\nB = \"\"\nD = \"\"\nE = \"file\"");
    let shown = srun_with(
        "WHO=me A=host C=host D=host E=host F=host",
        &env,
        "sh -c 'echo $A/$C/$E/$F; env | grep -c \"^[BD]=\"'",
    );
    assert_out(&shown, 1, "file, and me/image/file/host\n0\n");

    // "table, dotted or nested"
    for annotations in [
        "[annotations]\ncom.hooks.cxi.enabled = \"true\"",
        "[annotations.com.hooks.cxi]\nenabled = \"true\"",
        "[annotations.com.hooks]\ncxi.enabled = true",
    ] {
        let before = cluster.slurmd_log("node1").matches("fabric=host").count();
        let quiet = srun(&format!("{oci}{annotations}"), "true");
        assert_eq!((quiet.code, quiet.stderr.as_str()), (0, ""), "{annotations}");
        assert_eq!(cluster.slurmd_log("node1").matches("fabric=host").count(), before + 1, "{annotations}");
    }
    // "`com.hooks.cxi.enabled`, `com.hooks.aws_ofi_nccl.enabled/.variant`, `com.hooks.ssh.enabled/.authorize_ssh_key/.port`,
    // `com.hooks.nvidia_cuda_mps.enabled`"
    let noted = srun(
        &format!(
            "{oci}[annotations]\ncom.hooks.aws_ofi_nccl.enabled = \"true\"\ncom.hooks.aws_ofi_nccl.variant = \"cuda12\"\n\
             com.hooks.ssh.enabled = \"true\"\ncom.hooks.ssh.port = \"15263\"\ncom.hooks.ssh.authorize_ssh_key = \"/home/alice/key.pub\"\n\
             com.hooks.nvidia_cuda_mps.enabled = \"true\"\ncom.unknown = \"1\""
        ),
        "true",
    );
    assert_eq!(noted.code, 0, "{}", noted.text());
    for (line, note) in [
        (3, "com.hooks.aws_ofi_nccl: the node's libfabric is used;"),
        (5, "com.hooks.ssh: has no effect: mizzen starts no server;"),
        (8, "com.hooks.nvidia_cuda_mps: has no effect:"),
        (9, "the annotation com.unknown is not known here and has no effect\n"),
    ] {
        assert_failed(&noted, 0, &format!("mizzen: note: /home/alice/.edf/e.toml:{line}: {note}"));
    }
    assert_eq!(noted.stderr.matches("note: ").count(), 4, "{}", noted.text());

    // "`${VAR}`, `${VAR:-default}`, `$$`; an undefined variable is an error."
    let text = format!("{oci}[env]\nX = \"${{WHO}} ${{NOT_SET:-default}} $$HOME\"");
    assert_out(&srun_with("WHO=me", &text, "sh -c 'echo \"$X\"'"), 0, "me default $HOME\n");
    let undefined = srun(&text, "true");
    assert_told(
        &undefined,
        1,
        "mizzen: --environment: /home/alice/.edf/e.toml:3: env.X: the variable WHO is not set",
        "export it before you submit, or write ${WHO:-DEFAULT}",
    );
}

/// "`[USER@][REGISTRY#]IMAGE[:TAG]` or a squashfs path": the image is imported when the job is submitted, as one that an option names.
#[test]
fn images_come_from_registries() {
    let layout = Layout::new().unwrap();
    let base = ImageTree::busybox().unwrap();
    base.file("version", "one\n").unwrap();
    layout.image("one", &[&base], &["--config.env=APP=yes"]).unwrap();
    let registry = LocalRegistry::start().unwrap();
    registry.push(&layout, "one", "lab/app:1", &[]).unwrap();
    registry.push(&layout, "one", "library/app:latest", &[]).unwrap();
    for release in TWO_RELEASES {
        let toml = "[registries.\"docker.io\"]\nmirrors = [\"http://ctl:5000\"]\n[registries.\"ctl:5000\"]\nplain_http = true\n";
        let spec = one_node(release, "environment-registry");
        let cluster = start(Spec { mizzen_toml: Some(toml.to_owned()), ..spec });
        let _open = registry.serve_on(&cluster, 5000, None).unwrap();
        for image in
            ["ctl:5000#lab/app:1", "alice@ctl:5000#lab/app:1", "docker://ctl:5000/lab/app:1", "docker://app"]
        {
            write(&cluster, ".edf/e.toml", &format!("image = \"{image}\""));
            let run = cluster
                .run("srun --environment=e sh -c 'cat /version; echo $APP; touch /x && echo writable'");
            assert_out(&run, 0, "one\nyes\nwritable\n");
        }
        write(&cluster, ".edf/e.toml", "image = \"ctl:5000#lab/none:1\"");
        let missing = cluster.run("srun --environment=e touch /shared/marker");
        assert_eq!(missing.code, 1, "{}", missing.text());
        assert!(
            missing.stderr.contains("e.toml:1: image: docker://ctl:5000/lab/none:1: "),
            "{}",
            missing.text()
        );
        assert_eq!(cluster.run("ls /shared/marker").code, 2, "it ran");
    }
}

fn options_win_over_the_file(release: Release) {
    let cluster = start(one_node(release, "environment-options"));
    cluster.run(
        "mkdir -p /shared/data /shared/more; echo data > /shared/data/file; echo more > /shared/more/file",
    );
    write(
        &cluster,
        ".edf/e.toml",
        "image = \"/shared/oci.sqsh\"\nworkdir = \"/etc\"\nmounts = [\"/shared/data:/d\", \"/shared/data:/e\"]\n\
         [env]\nX = \"file\"\nY = \"file\"",
    );
    let srun =
        |options: &str, program: &str| cluster.run(&format!("srun -Q --environment=e {options} {program}"));
    let show = "sh -c 'pwd; cat /d/file /e/file; echo $X $Y; touch /x 2>/dev/null && echo writable; ls /entered 2>/dev/null; true'";
    assert_out(&srun("", show), 0, "/etc\ndata\ndata\nfile file\nwritable\n/entered\n");
    let options = "--container-workdir=/var --container-mounts=/shared/more:/e --container-env=X=option \
                   --container-readonly --no-container-entrypoint";
    assert_out(&srun(options, show), 0, "/var\ndata\nmore\noption file\n");
    // Variables are below the file.
    let variables = cluster.run(
        "MIZZEN_CONTAINER_WORKDIR=/usr MIZZEN_CONTAINER_HOSTNAME=ship srun -Q --environment=e sh -c 'pwd; hostname'",
    );
    assert_out(&variables, 0, "/etc\nship\n");
    // A step's options are added to what the job's file says; a file of its own takes nothing of the job's.
    write(&cluster, ".edf/other.toml", "image = \"/shared/a.sqsh\"");
    let salloc = cluster.run(
        "salloc -Q --environment=e --container-hostname=ship sh -c 'srun -Q --container-env=Y=step sh -c \"hostname; echo \\$X \\$Y\"; \
         srun -Q --environment=other sh -c \"hostname; cat /image; echo -\\$X-; ls /d\"; true'",
    );
    assert_out(&salloc, 0, "ship\nfile step\nnode1\na\n--\n");
    // The components of a heterogeneous job have one file, which is read once.
    for (options, message) in [
        (
            "--environment=e --container=none",
            "--container=none and --environment=e: two words for one container",
        ),
        (
            "--environment=e --container=x.toml",
            "--container=x.toml and --environment=e: two words for one container",
        ),
        ("--environment=e --container-join=0", "--container-join and other options of a container"),
    ] {
        // Before 21.08 the option is mizzen's own, and named as it was given.
        assert_failed(&cluster.run(&format!("srun {options} touch /shared/marker")), 1, message);
    }
    assert_eq!(cluster.run("ls /shared/marker").code, 2, "it ran");
}

/// File, line and key of whatever is wrong; nothing is submitted.
fn bad_files_are_named(release: Release) {
    let cluster = start(one_node(release, "environment-bad"));
    let e = "/home/alice/.edf/e.toml";
    let image = "image = \"/shared/a.sqsh\"";
    for (text, message, hint) in [
        ("imgae = \"x\"".to_owned(), format!("{e}:1: unknown key \"imgae\""), "did you mean image?"),
        (
            format!("{image}\nsize = 1"),
            format!("{e}:2: unknown key \"size\""),
            "there are base_environment, image,",
        ),
        ("writable = true".to_owned(), format!("{e}: no image"), "write image = \"…\" in it"),
        ("image = \"\"".to_owned(), format!("{e}:1: image: is empty"), "name one;"),
        (
            "image = 5".to_owned(),
            format!("{e}:1: image: an integer, expected a string"),
            "write it between quotes",
        ),
        (
            "image = \"/shared/nosuch.sqsh\"".to_owned(),
            format!("{e}:1: image: no such image; tried /shared/nosuch.sqsh"),
            "it must exist on this node",
        ),
        (
            format!("\n\n{image}\nmounts = [\"/a:b\"]"),
            format!("{e}:4: mounts: \"/a:b\": the destination is not absolute"),
            "write SRC:DST:FLAGS",
        ),
        (
            format!("{image}\nmounts = [\n\"~/x:/x\"]"),
            format!("{e}:3: mounts: \"~/x:/x\": ~ is not expanded"),
            "write ${HOME}",
        ),
        (
            format!("{image}\ndevices = [\"gpu\"]"),
            format!("{e}:2: devices: \"gpu\" is not the name of a device"),
            "write vendor.com/class=name",
        ),
        (
            format!("{image}\n[env]\nA = 1"),
            format!("{e}:3: env.A: an integer, expected a string"),
            "write it between quotes: \"1\"",
        ),
        (
            format!("{image}\nworkdir = \"$HOME\""),
            format!("{e}:2: workdir: \"$HOME\" is not expanded"),
            "write ${NAME} or ${NAME:-DEFAULT}, and $$ for a dollar",
        ),
        (format!("{image}\nimage = \"x\""), format!("{e}:2: duplicate key"), "environment files are TOML"),
        (
            "base_environment = \"nosuch\"".to_owned(),
            format!(
                "{e}:1: base_environment: no such environment file; tried /home/alice/.edf/nosuch.toml, /etc/edf/nosuch.toml"
            ),
            "`mizzen env list` shows",
        ),
        (
            "base_environment = \"e\"".to_owned(),
            format!("{e}:1: base_environment: leads back to itself: {e} -> {e}"),
            "take one of these parents out",
        ),
    ] {
        write(&cluster, ".edf/e.toml", &text);
        let refused = cluster.run("srun --environment=e touch /shared/marker");
        assert_told(&refused, 1, &format!("mizzen: --environment: {message}"), hint);
    }
    // sbatch and salloc read it in the same way.
    for command in ["sbatch --edf=e --wrap 'touch /shared/marker'", "salloc --edf=e touch /shared/marker"] {
        let message = format!("mizzen: --edf: {e}:1: base_environment: leads back to itself");
        assert_told(&cluster.run(command), 1, &message, "take one of these parents out");
    }
    // Eleven levels.
    cluster.run("for i in $(seq 11); do echo \"base_environment = '$((i-1))'\" > .edf/$i.toml; done");
    write(&cluster, ".edf/0.toml", image);
    assert_out(&cluster.run("srun -Q --environment=10 cat /image"), 0, "a\n");
    assert_told(
        &cluster.run("srun --environment=11 touch /shared/marker"),
        1,
        "mizzen: --environment: /home/alice/.edf/1.toml:1: base_environment: more than 10 levels of parents",
        "name fewer parents of parents",
    );
    // What is no file, or nobody's.
    write(&cluster, ".edf/good.toml", image);
    cluster.run(
        "mkfifo .edf/fifo.toml; mkdir .edf/dir.toml; cp .edf/good.toml .edf/closed.toml; chmod 0 .edf/closed.toml; \
         cp .edf/good.toml .edf/open.toml; chmod 666 .edf/open.toml; printf 'image = \"\\377\"' > .edf/latin.toml; \
         head -c 2000000 /dev/zero | tr '\\0' '#' > .edf/large.toml; ln -s nowhere .edf/lost.toml; \
         mkdir -m 777 /shared/wild; cp .edf/good.toml /shared/wild",
    );
    let prepared = cluster.run_on("ctl", User::Bob, "mkdir -p /shared/sticky && chmod 1777 /shared/sticky; echo 'image = \"/shared/b.sqsh\"' | tee /shared/sticky/bobs.toml > /shared/bobs.toml");
    assert_eq!(prepared.code, 0, "{}", prepared.text());
    for (variables, name, message, hint) in [
        (
            "",
            "fifo",
            "/home/alice/.edf/fifo.toml is a FIFO, not an environment file",
            "an environment file is a text file",
        ),
        (
            "",
            "dir",
            "/home/alice/.edf/dir.toml is a directory, not an environment file",
            "an environment file is a text file",
        ),
        (
            "",
            "/dev/zero",
            "/dev/zero is a character device, not an environment file",
            "an environment file is a text file",
        ),
        (
            "",
            "open",
            "/home/alice/.edf/open.toml can be written by everybody (mode 0666)",
            "chmod o-w /home/alice/.edf/open.toml",
        ),
        ("", "latin", "/home/alice/.edf/latin.toml:1: not UTF-8", "an environment file is text in UTF-8"),
        ("", "large", "/home/alice/.edf/large.toml is larger than 1 MiB", "is it an environment file?"),
        ("", "''", "the name of the environment file is empty", "write --environment=NAME"),
        (
            "",
            "gooood",
            "no such environment file; tried /home/alice/.edf/gooood.toml, /etc/edf/gooood.toml",
            "did you mean /home/alice/.edf/good.toml?",
        ),
        ("", "none", "no such environment file; tried ", "--container=none runs on the node"),
        (
            "EDF_PATH=/shared/wild",
            "good",
            "/shared/wild/good.toml lies in a directory in which everybody can replace it (mode 0777)",
            "move it to a directory",
        ),
        ("EDF_PATH=edf", "good", "EDF_PATH: \"edf\" is not absolute", "write whole paths"),
        (
            "cd /shared;",
            "bobs.toml",
            "/shared/bobs.toml belongs to another user, uid 2002",
            "write its path, /shared/bobs.toml, with a slash",
        ),
    ] {
        let refused = cluster.run(&format!("{variables} srun --environment={name} touch /shared/marker"));
        assert_told(&refused, 1, &format!("mizzen: --environment: {message}"), hint);
    }
    write(&cluster, ".edf/e.toml", "\nbase_environment = 'closed'");
    assert_failed(
        &cluster.run("srun --environment=e touch /shared/marker"),
        1,
        "mizzen: --environment: /home/alice/.edf/e.toml:2: base_environment: /home/alice/.edf/closed.toml: Permission denied",
    );
    assert_failed(
        &cluster.run("srun --environment=closed touch /shared/marker"),
        1,
        "mizzen: --environment: /home/alice/.edf/closed.toml: Permission denied",
    );
    // A folder that Alice has named is its owner's; a path is what she means.
    assert_out(&cluster.run("EDF_PATH=/shared/sticky srun -Q --environment=bobs cat /image"), 0, "b\n");
    assert_out(&cluster.run("srun -Q --environment=/shared/bobs.toml cat /image"), 0, "b\n");
    assert_eq!(cluster.run("ls /shared/marker").code, 2, "it ran");
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
}

/// Where mizzen was not active at submission nobody has read the file, and the node does not.
fn nodes_read_no_files(release: Release) {
    let cluster = start(one_node(release, "environment-bare"));
    let conf = without_mizzen(&cluster);
    write(&cluster, "/shared/e.toml", "image = \"/shared/a.sqsh\"");
    for (variables, options, name) in [
        ("MIZZEN_ENVIRONMENT=/shared/e.toml", "", "MIZZEN_ENVIRONMENT"),
        ("MIZZEN_EDF=e", "", "MIZZEN_EDF"),
        // An option that somebody has put into the environment past srun.
        ("_SLURM_SPANK_OPTION_mizzen_environment=/shared/e.toml", "", "--environment"),
        ("MIZZEN_CONTAINER=/shared/e.toml", "", "MIZZEN_CONTAINER"),
        ("", "--container=/shared/e.toml", "--container"),
    ] {
        let done = cluster.run(&format!("env {conf} {variables} srun -Q {options} touch /shared/marker"));
        let message = format!("node1: {name}: ");
        assert_failed_closed(&cluster, name, &done, &done.stderr, &message);
        assert_failed(&done, 125, "environment files are read where a job is submitted");
    }
    // A job without a container does not mind.
    assert_out(&cluster.run("srun -Q hostname"), 0, "node1\n");
}

#[test]
fn without_slurm() {
    let cluster = start(Spec { nodes: 1, ..Cluster::spec("environment-run") });
    write(
        &cluster,
        ".edf/base.toml",
        "image = \"/shared/oci.sqsh\"\nmounts = [\"${HOME}:/h:ro\"]\n[env]\nX = \"base\"",
    );
    write(
        &cluster,
        ".edf/e.toml",
        "base_environment = \"base\"\nworkdir = \"/etc\"\nmounts = [\"/shared/b.sqsh:/b:sqsh\"]\n[env]\nB = \"\"\nP = \"5$$\"\n\
         [annotations]\ncom.hooks.ssh.enabled = \"true\"",
    );
    for command in [
        "mizzen run --environment e",
        "mizzen run --edf=e",
        "mizzen run .edf/e.toml",
        "mizzen run --environment=./.edf/e.toml",
        "cd .edf; mizzen run e.toml",
    ] {
        let run = cluster.run(&format!("{command} sh -c 'pwd; cat /b/image; echo $X $P; ls /entered'"));
        assert_out(&run, 0, "/etc\nb\nbase 5$\n/entered\n");
        assert_eq!(run.stderr.matches("note: ").count(), 1, "{}", run.text());
        assert!(run.stderr.contains("e.toml:8: com.hooks.ssh: has no effect"), "{}", run.text());
    }
    let options = cluster.run("mizzen run --environment e --workdir /var --env X=option --readonly --no-entrypoint sh -c 'pwd; echo $X; touch /x'");
    assert_out(&options, 1, "/var\noption\n");
    assert_out(&cluster.run("mizzen run --environment e -- cat /b/image"), 0, "b\n");
    let plan =
        cluster.run("mizzen plan --environment e pwd | grep -E '^(root|workdir|mount +/(b|h) )' | tr -s ' '");
    assert!(plan.stdout.contains("workdir /etc --workdir\n"), "{}", plan.text());
    assert!(plan.stdout.contains("mount /h from /home/alice read-only --mount\n"), "{}", plan.text());
    assert!(plan.stdout.contains("root writable"), "{}", plan.text());
    // As it is given to srun.
    let whole = |words: &str| cluster.run(&format!("mizzen plan {words} pwd 2>/dev/null")).stdout;
    assert_eq!(whole("--container=e.toml"), whole("--environment=e"));
    assert_eq!(whole("--container-image /shared/a.sqsh"), whole("/shared/a.sqsh"));
    assert!(whole("--container e.toml").contains("/etc"));
    assert_out(&cluster.run("mizzen run --container=/shared/a.sqsh cat /image"), 0, "a\n");
    let both = cluster.run("mizzen plan --container=e.toml --environment=e pwd");
    assert_failed(
        &both,
        2,
        "error: the argument '--container <IMAGE>' cannot be used with '--environment <NAME>'",
    );

    // What is shown is a file that needs no other, in any environment.
    let rendered = cluster.run("mizzen env render e 2>/dev/null | tee one.toml; HOME=/nowhere mizzen env render ./one.toml 2>/dev/null | cmp - one.toml");
    let expected = "image = \"/shared/oci.sqsh\"\nworkdir = \"/etc\"\nmounts = [\n    \"/home/alice:/h:ro\",\n    \"/shared/b.sqsh:/b:sqsh\",\n]\n\n\
                    [env]\nB = \"\"\nP = \"5$$\"\nX = \"base\"\n\n[annotations]\n\"com.hooks.ssh.enabled\" = \"true\"\n";
    assert_out(&rendered, 0, expected);
    let json: serde_json::Value =
        serde_json::from_str(&cluster.run("mizzen env render --json e").stdout).unwrap();
    assert_eq!(json["files"], serde_json::json!(["/home/alice/.edf/base.toml", "/home/alice/.edf/e.toml"]));
    assert_eq!((&json["env"]["P"], &json["writable"]), (&serde_json::json!("5$"), &serde_json::json!(true)));

    write(&cluster, ".edf/far.toml", "image = \"/shared/a.sqsh\"\nmounts = [\"/nosuch:/x\"]");
    write(&cluster, ".edf/bad.toml", "\nimgae = \"x\"");
    let checked = cluster.run("mizzen env validate e far bad base; echo $?");
    assert_out(
        &checked,
        0,
        "/home/alice/.edf/e.toml: good\n/home/alice/.edf/far.toml: good, but not all of it is on this machine\n\
         /home/alice/.edf/base.toml: good\n1\n",
    );
    for said in [
        "mizzen: note: mounts: /nosuch: No such file or directory\n",
        "mizzen: /home/alice/.edf/bad.toml:2: unknown key \"imgae\"\nmizzen: hint: did you mean image?",
    ] {
        assert_failed(&checked, 0, said);
    }

    write_for_site(&cluster, "e", "image = \"/shared/a.sqsh\"");
    write_for_site(&cluster, "site", "image = \"/shared/a.sqsh\"");
    let listed = cluster.run("rm .edf/far.toml .edf/bad.toml; mizzen env list");
    assert_out(
        &listed,
        0,
        "base  /home/alice/.edf/base.toml\ne     /home/alice/.edf/e.toml\n\
         e     /etc/edf/e.toml (hidden by /home/alice/.edf/e.toml)\nsite  /etc/edf/site.toml\n",
    );
    let json: serde_json::Value =
        serde_json::from_str(&cluster.run("EDF_PATH=/shared/none mizzen env list --json").stdout).unwrap();
    assert_eq!(
        json["folders"][0],
        serde_json::json!({"path": "/shared/none", "origin": "EDF_PATH", "error": "No such file or directory"})
    );
    assert_eq!(json["environments"][0]["file"], "/etc/edf/e.toml");
    assert_out(&cluster.run("EDF_PATH=/shared/none HOME=/nowhere mizzen env list | wc -l"), 0, "2\n");

    // The site may have its folder elsewhere.
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", "environment_folders = [\"/sw/edf\"]\n").unwrap();
    cluster.run_as_root("mkdir -p /sw; mv /etc/edf /sw/edf");
    assert_out(
        &cluster.run("mizzen run --environment site cat /image; srun -Q --environment=site cat /image"),
        0,
        "a\na\n",
    );
    for (command, message, hint) in [
        (
            "mizzen run --environment nosuch true",
            "no such environment file; tried /home/alice/.edf/nosuch.toml, /sw/edf/nosuch.toml",
            "`mizzen env list`",
        ),
        (
            "mizzen run nosuch.toml true",
            "no such environment file; tried /home/alice/nosuch.toml, /home/alice/.edf/nosuch.toml, /sw/edf/nosuch.toml",
            "`mizzen env list`",
        ),
    ] {
        assert_told(&cluster.run(command), 125, &format!("mizzen: {message}"), hint);
    }
}

/// What `--container-env=!NAME`, `--container-workdir=image:` and `--container-fabric` do by themselves.
#[test]
fn what_files_say_options_can_say() {
    let cluster = start(Spec { nodes: 1, ..Cluster::spec("environment-settings") });
    let srun = |options: &str, program: &str| {
        cluster.run(&format!("B=host srun -Q --container=/shared/oci.sqsh {options} {program}"))
    };
    let count = "sh -c 'env | grep -c \"^[AB]=\"; true'";
    assert_out(&srun("", count), 0, "2\n");
    assert_out(&srun("--container-env='!A,!B'", count), 0, "0\n");
    assert_out(&srun("--container-env='!A' --container-env=A=again", count), 0, "2\n");
    assert_out(&cluster.run(&format!("mizzen run --env '!B' /shared/oci.sqsh {count}")), 0, "1\n");
    assert_failed(
        &srun("--container-env='!A=1'", "true"),
        1,
        "--container-env: \"!A=1\": not a variable's name",
    );
    assert_out(&srun("", "pwd"), 0, "/home/alice\n");
    assert_out(&srun("--container-workdir=image:", "pwd"), 0, "/var\n");
    assert_out(&cluster.run("mizzen run --workdir=image: /shared/oci.sqsh pwd"), 0, "/var\n");
    assert_out(&srun("--container-fabric=image", "echo"), 0, "\n");
    assert!(cluster.slurmd_log("node1").contains("fabric=image"));
    assert_failed(
        &srun("--container-fabric=x", "true"),
        1,
        "--container-fabric: \"x\" is not auto, host or image",
    );
}

#[test]
fn components_of_a_heterogeneous_job_share_a_file() {
    let cluster = start(Spec { nodes: 2, ..Cluster::spec("environment-components") });
    write(&cluster, ".edf/e.toml", "image = \"/shared/a.sqsh\"\n[annotations]\ncom.unknown = \"1\"");
    let both = cluster.run("srun -Q -N1 --environment=e cat /image : -N1 --environment=e cat /image");
    assert_out(&both, 0, "a\na\n");
    assert_failed(&both, 0, "the annotation com.unknown is not known here and has no effect");
}

#[test]
fn components_of_a_heterogeneous_job_have_files_of_their_own() {
    for release in TWO_RELEASES {
        let cluster = start(Spec { nodes: 2, ..one_node(release, "environment-apart") });
        write(&cluster, ".edf/a.toml", "image = \"/shared/a.sqsh\"\nworkdir = \"/tmp\"\n[env]\nX = \"1\"");
        write(&cluster, ".edf/b.toml", "image = \"/shared/b.sqsh\"\nworkdir = \"/etc\"\n[env]\nY = \"2\"");
        let show = "sh -c 'echo $(cat /image) $(pwd) [$X$Y]'";
        for allocation in ["", "salloc -Q -N2 "] {
            let both = cluster.run(&format!(
                "set -o pipefail; {allocation}srun -Q -N1 --environment=a {show} : -N1 --environment=b {show} | sort"
            ));
            assert_out(&both, 0, "a /tmp [1]\nb /etc [2]\n");
            assert_eq!(both.stderr, "", "{release}");
        }
    }
}
