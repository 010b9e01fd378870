//! `enroot`: scripts that have its words run with a link of that name to mizzen. The rows that are quoted say what they type.

use mizzen_tests::check::{assert_failed, assert_out, assert_told, one_node};
use mizzen_tests::images::ImageTree;
use mizzen_tests::registry::{Layout, LocalRegistry};
use mizzen_tests::{Cluster, Output, Release, Spec, User, on_every_release};

/// As alice with the command in her path, on the node: named containers need a disk that is no overlay, which only it has.
fn enroot(cluster: &Cluster, script: &str) -> Output {
    cluster.run_on("node1", User::Alice, &format!("PATH=/opt/names:$PATH; {script}"))
}

const TWO_RELEASES: [Release; 2] = [Release::Slurm22_05, Release::Slurm24_11];

fn start(release: Release, name: &str, registries: &str) -> Cluster {
    let mizzen_toml = Some(format!("stage_directory = \"/disk\"\n{registries}"));
    let cluster = Cluster::start(Spec { mizzen_toml, ..one_node(release, name) }).unwrap();
    let made = cluster.run_on(
        "node1",
        User::Root,
        "mkdir -p /disk && mount -t tmpfs disk /disk && chmod 1777 /disk && mkdir -p /opt/names && \
         ln -s /usr/bin/mizzen /opt/names/enroot",
    );
    assert_eq!(made.code, 0, "{}", made.text());
    let tree = ImageTree::busybox().unwrap();
    tree.file("image", "a\n").unwrap();
    cluster.share("a.sqsh", &tree.squashfs(&[]).unwrap()).unwrap();
    cluster
}

/// "`import -o F docker://[USER@][REGISTRY#]IMAGE[:TAG]` (also `dockerd://`)": the latter is refused with what to do instead.
#[test]
fn images_are_imported() {
    let layout = Layout::new().unwrap();
    let base = ImageTree::busybox().unwrap();
    base.file("version", "one\n").unwrap();
    let config = ["--config.env=APP=yes", "--config.entrypoint=/bin/env", "--config.entrypoint=ENTRY=yes"];
    layout.image("one", &[&base], &config).unwrap();
    let registry = LocalRegistry::start().unwrap();
    registry.push(&layout, "one", "lab/app:1", &[]).unwrap();
    let toml = "[registries.\"ctl:5000\"]\nplain_http = true\n[registries.\"ctl:5001\"]\nplain_http = true\n";
    for release in TWO_RELEASES {
        let cluster = start(release, "enroot-import", toml);
        let _open = registry.serve_on(&cluster, 5000, None).unwrap();
        let htpasswd = "alice:$2y$05$6hS8ZsFBbGy50MmSqbw4Nej77kMmzAc0N/jI29uCuhCbQDmT1bBQm\n";
        let _locked = registry.serve_on(&cluster, 5001, Some(htpasswd)).unwrap();
        let imported = enroot(
            &cluster,
            "enroot import -o app.sqsh docker://ctl:5000#lab/app:1 > /dev/null && enroot start app.sqsh sh -c 'cat /version; echo $APP $ENTRY'",
        );
        assert_out(&imported, 0, "one\nyes yes\n");
        assert_failed(
            &enroot(&cluster, "enroot import -o app.sqsh docker://ctl:5000#lab/app:1"),
            1,
            "app.sqsh",
        );
        // "credentials in `$ENROOT_CONFIG_PATH/.credentials` (netrc: `machine HOST login USER password SECRET`)", and enroot's own name for
        // the file that is imported.
        let imported = enroot(
            &cluster,
            "mkdir conf; printf '# of the lab\\nmachine nvcr.io login $oauthtoken password other\\nmachine ctl\\n  login alice\\n  password secret\\n' > conf/.credentials; chmod 600 conf/.credentials; \
         ENROOT_CONFIG_PATH=$PWD/conf enroot import docker://alice@ctl:5001#lab/app:1 > /dev/null && ls *+*",
        );
        assert_out(&imported, 0, "lab+app+1.sqsh\n");
        for (words, message, hint) in [
            (
                "dockerd://mine:1",
                "dockerd://mine:1: images of a daemon are not taken from it",
                "docker save mine:1 | mizzen",
            ),
            (
                "podman://mine",
                "podman://mine: images of a daemon are not taken from it",
                "podman save mine |",
            ),
            (
                "ftp://mine",
                "ftp://mine: not docker://[USER@][REGISTRY#]IMAGE[:TAG]",
                "`mizzen import --help`",
            ),
        ] {
            let refused = enroot(&cluster, &format!("enroot import -o x.sqsh {words}"));
            assert_told(&refused, 1, &format!("mizzen: {message}"), hint);
        }
    }
}

/// "`create -n NAME F`, `start [--rw] [--root] [-m SRC:DST] [-e K=V] NAME|F [CMD]`, `exec PID CMD`, `list [-f]` (NAME, PID …),
/// `export -o F NAME`, `remove -f NAME`"
#[test]
fn containers_are_made_started_entered_saved_and_removed() {
    let cluster = start(Release::Slurm22_05, "enroot", "");
    let run = |script: &str| enroot(&cluster, script);
    assert_out(
        &run("enroot create -n dev /shared/a.sqsh; enroot create /shared/a.sqsh; enroot list"),
        0,
        "a\ndev\n",
    );
    let written =
        run("enroot start --rw dev sh -c 'echo kept > /kept; cat /image'; enroot start dev cat /kept");
    assert_out(&written, 0, "a\nkept\n");
    let read_only = run("enroot start dev sh -c 'echo x > /x'");
    assert!(
        read_only.code != 0 && read_only.stderr.contains("Read-only file system"),
        "{}",
        read_only.text()
    );
    // Neither the home directory nor the current one; root, mounts and variables as asked for.
    let asked = run("mkdir -p data; touch data/file; \
         enroot start --root -m $PWD/data:/mnt/d:ro,nosuid -e A=b -e 'C=d e' dev sh -c 'id -u; ls /mnt/d; echo $A $C; pwd; ls /home/alice; touch /mnt/d/x'");
    assert!(
        asked.stdout.starts_with("0\nfile\nb d e\n/\n") && !asked.stdout.contains("data"),
        "{}",
        asked.text()
    );
    assert!(asked.stderr.contains("/mnt/d/x: Read-only"), "{}", asked.text());
    let home = run(
        "ENROOT_MOUNT_HOME=y ENROOT_REMAP_ROOT=yes enroot start dev sh -c 'ls -d /home/alice/data; id -u'",
    );
    assert_out(&home, 0, "/home/alice/data\n0\n");
    let of_file = run(
        "enroot start --rw /shared/a.sqsh sh -c 'echo x > /x; cat /x'; enroot start /shared/a.sqsh cat /x",
    );
    assert_out(&of_file, 1, "x\n");
    // By a process that runs in it, with its variables.
    let entered = run(
        "enroot start --rw -e FROM=first dev sh -c 'while [ ! -e /go ]; do sleep 0.1; done; cat /go' & \
         until pid=$(enroot list -f | awk '$1 == \"dev\" && $2 { print $2; exit }'); [ -n \"$pid\" ]; do sleep 0.1; done; \
         enroot list -f | head -n 1; enroot exec -e MINE=yes $pid sh -c 'cat /kept; echo $FROM $MINE'; \
         enroot remove -f dev; echo $?; enroot export -o running.sqsh dev; enroot exec $pid sh -c 'echo went > /go'; wait",
    );
    assert_out(&entered, 0, "NAME                      PID COMM\nkept\nfirst yes\n1\nwent\n");
    assert_failed(&entered, 0, "mizzen: dev: in use: it runs, or is being started");
    assert_failed(&entered, 0, "mizzen: note: exported the container to /home/alice/running.sqsh, ");
    // Who has entered stays when the first program ends, and nobody else gets in.
    let stayed = run("enroot start dev sleep 2 & \
         until pid=$(enroot list -f | awk '$1 == \"dev\" && $3 == \"sleep\" { print $2; exit }'); [ -n \"$pid\" ]; do sleep 0.1; done; \
         enroot exec $pid sh -c 'sleep 3; cat /image'; wait");
    assert_out(&stayed, 0, "a\n");
    run(
        "enroot start dev sleep 5 > /dev/null 2>&1 & sleep 0.5; enroot list -f | awk '$3 == \"sleep\" { print $2 }' > /tmp/pid",
    );
    let other = cluster.run_on("node1", User::Bob, "/opt/names/enroot exec $(cat /tmp/pid) cat /kept");
    assert_told(&other, 125, "none of yours in a container on this node", "`enroot list -f` shows them");
    run("kill $(cat /tmp/pid)");
    let exported = run("enroot export -o mine.sqsh dev && mizzen run mine.sqsh sh -c 'cat /image /kept /go'");
    assert_out(&exported, 0, "a\nkept\nwent\n");
    assert_out(&run("mizzen run running.sqsh sh -c 'cat /kept; ls /go 2>&1 | wc -l'"), 0, "kept\n1\n");
    assert_told(
        &run("enroot export -o mine.sqsh dev"),
        1,
        "/home/alice/mine.sqsh: the file exists",
        "--force",
    );
    let again = run("enroot create -f -n dev /shared/a.sqsh && enroot start dev ls /kept");
    assert_eq!((again.code, again.stdout.as_str()), (1, ""), "{}", again.text());
    // Nothing is unpacked: without the image's file there is no container.
    let gone = run(
        "cp /shared/a.sqsh b.sqsh; enroot create b.sqsh; rm b.sqsh; enroot start b cat /image; echo $?; enroot remove -f b",
    );
    assert_out(&gone, 0, "125\n");
    assert_failed(&gone, 0, "mizzen: /home/alice/b.sqsh: No such file or directory");
    assert_out(&run("enroot remove -f dev a; enroot list -f"), 0, "NAME                      PID COMM\n");
}

on_every_release!(steps_have_its_words);

/// What depends on the release: the containers are the user's on the node, whatever job has made them, and those of a step have names.
fn steps_have_its_words(release: Release) {
    let cluster = start(release, "enroot-steps", "");
    let run = |script: &str| enroot(&cluster, script);
    let step = |script: &str| run(&format!("srun -Q {script}"));
    assert_out(&step("enroot create -n dev /shared/a.sqsh"), 0, "");
    assert_out(
        &step("enroot start --root --rw dev sh -c 'id -u; echo kept > /kept; cat /image'"),
        0,
        "0\na\n",
    );
    assert_out(&step("enroot list"), 0, "dev\n");
    assert_out(&run("enroot start dev cat /kept"), 0, "kept\n");
    let named = run(
        "salloc -Q bash -c 'srun -Q --container-image=/shared/a.sqsh --container-name=mine touch /made; \
         srun -Q enroot list | sed s/_${SLURM_JOB_ID}_/_JOB_/; srun -Q enroot export -o mine.sqsh pyxis_${SLURM_JOB_ID}_mine; \
         srun -Q --container-image=./mine.sqsh ls /made'",
    );
    assert_out(&named, 0, "dev\npyxis_JOB_mine\n/made\n");
    assert_out(&step("enroot remove -f dev"), 0, "");
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
}

/// They are not the job's, and stay when it has ended.
#[test]
fn batch_scripts_have_them_too() {
    let cluster = start(Release::Slurm22_05, "enroot-batch", "");
    let job = cluster.run(
        "printf '#!/bin/sh\\nPATH=/opt/names:$PATH\\nenroot create -n dev /shared/a.sqsh\\nenroot start --rw dev sh -c \"echo job > /job\"\\nsrun -Q enroot start dev cat /image /job\\n' > job; \
         sbatch --wait -Q -o out job; cat out",
    );
    assert_out(&job, 0, "a\njob\n");
    let next = cluster.run("srun -Q /opt/names/enroot start dev cat /job; srun -Q /opt/names/enroot list");
    assert_out(&next, 0, "job\ndev\n");
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
}

#[test]
fn what_is_wrong_is_told() {
    let cluster = start(Release::Slurm22_05, "enroot-refused", "");
    assert_eq!(enroot(&cluster, "enroot create -n there /shared/a.sqsh").code, 0);
    for (words, code, message, hint) in [
        ("enroot batch x", 1, "enroot batch: mizzen has nothing like it", "`enroot --help`"),
        ("enroot bundle x.sqsh", 1, "enroot bundle: mizzen has nothing like it", "`enroot --help`"),
        (
            "enroot start --rc x there",
            125,
            "enroot start --rc: mizzen has nothing like it",
            "give the script as the program",
        ),
        (
            "enroot start -c x there",
            125,
            "enroot start --conf: mizzen has nothing like it",
            "write its mounts",
        ),
        (
            "enroot start nosuch true",
            125,
            "nosuch: no such container of yours on this node",
            "`enroot list` shows them",
        ),
        (
            "enroot start no/such.sqsh true",
            125,
            "no/such.sqsh: no such container of yours",
            "`enroot list` shows them",
        ),
        (
            "enroot start -m 'tmpfs /x tmpfs' there true",
            125,
            "--mount: \"tmpfs /x tmpfs\": lines of fstab are not read",
            "write SRC:DST",
        ),
        ("enroot start -m /nosuch:/x there true", 125, "/nosuch", ""),
        ("enroot start -e '=x' there true", 125, "--env: ", ""),
        ("enroot start there nosuch", 127, "nosuch: no such program in the container", "PATH is"),
        (
            "enroot exec 1 true",
            125,
            "process 1: none of yours in a container on this node",
            "`enroot list -f`",
        ),
        ("enroot exec $$ true", 125, "none of yours in a container on this node", "`enroot list -f`"),
        (
            "enroot create -n there /shared/a.sqsh",
            1,
            "the container \"there\" exists",
            "enroot remove -f there",
        ),
        ("enroot create -n a/b /shared/a.sqsh", 1, "\"a/b\": the name has a /", "a name is letters"),
        ("enroot create -n a:b /shared/a.sqsh", 1, "\"a:b\": the name has a colon", "a name is letters"),
        ("enroot create -f -n there /shared/nosuch.sqsh", 1, "/shared/nosuch.sqsh", ""),
        (
            "enroot export nosuch",
            1,
            "nosuch: no such container of yours on this node",
            "`enroot list` shows them",
        ),
        ("enroot export -o /nosuch/x.sqsh there", 1, "/nosuch: No such file or directory", ""),
        (
            "enroot remove there",
            1,
            "enroot remove: without --force enroot asks, and mizzen does not",
            "enroot remove --force",
        ),
        ("enroot remove -f nosuch", 1, "nosuch: no such container on this node", "`enroot list -f`"),
        (
            "ENROOT_REMAP_ROOT=maybe enroot start there true",
            125,
            "ENROOT_REMAP_ROOT: \"maybe\" is neither yes nor no",
            "write yes or no",
        ),
    ] {
        let refused = enroot(&cluster, words);
        match hint {
            "" => assert_failed(&refused, code, message),
            hint => assert_told(&refused, code, message, hint),
        }
    }
    for (words, code) in [
        ("enroot start", 125),
        ("enroot exec x y", 125),
        ("enroot start --nosuch x", 125),
        ("enroot list --nosuch", 2),
    ] {
        let refused = enroot(&cluster, words);
        assert_failed(&refused, code, "error: ");
    }
    // It is still there, whatever was tried.
    assert_out(&enroot(&cluster, "enroot list; enroot start there cat /image"), 0, "there\na\n");
    let help = enroot(&cluster, "enroot --help");
    for word in ["import", "create", "start", "exec", "list", "export", "remove", "mizzen --help"] {
        assert!(help.stdout.contains(word), "{word}: {}", help.text());
    }
    assert_out(
        &enroot(&cluster, "enroot version"),
        0,
        &enroot(&cluster, "mizzen --version").stdout.replace("mizzen ", ""),
    );
}

/// A word that is the name of a container of one's own is that container, whoever's files are here.
#[test]
fn another_users_file_is_not_taken_for_a_container() {
    let cluster = start(Release::Slurm22_05, "enroot-planted", "");
    let planted =
        "mkdir -m 1777 /tmp/project; echo '#!/bin/sh' > /tmp/project/dev; chmod 755 /tmp/project/dev";
    assert_out(&cluster.run_on("node1", User::Bob, planted), 0, "");
    let started = enroot(
        &cluster,
        "enroot create -n dev /shared/a.sqsh; cd /tmp/project; enroot start dev cat /image; cp /shared/a.sqsh b; enroot start b cat /image",
    );
    assert_out(&started, 0, "a\na\n");
    assert_failed(&enroot(&cluster, "cd /tmp/project; enroot start ./dev true"), 125, "not an image");
}
