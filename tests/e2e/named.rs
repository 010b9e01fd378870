//! Named containers: what is written in one stays on its node for the next step that names it. The rows that are quoted say what
//! scripts written for pyxis expect of `--container-name`.

use std::process::Command;

use mizzen_tests::check::{assert_failed, assert_out, assert_told, count, one_node, with_images};
use mizzen_tests::images::{self, ImageTree};
use mizzen_tests::{Cluster, Output, Release, Spec, User, on_every_release, run_tool};

on_every_release!(keeps_what_steps_write, enters_what_runs);

/// One node with a disk of its own: the overlay that is its root directory cannot be under another.
fn start(release: Release, name: &str) -> Cluster {
    start_with(release, name, "")
}

fn start_with(release: Release, name: &str, toml: &str) -> Cluster {
    let mizzen_toml = Some(format!("stage_directory = \"/disk\"\n{toml}"));
    let cluster = with_images(Spec { mizzen_toml, ..one_node(release, name) });
    for machine in ["ctl", "node1"] {
        let disk = "mkdir -p /disk && mount -t tmpfs disk /disk && chmod 1777 /disk";
        assert_eq!(cluster.run_on(machine, User::Root, disk).code, 0);
    }
    cluster
}

fn on_node(cluster: &Cluster, script: &str) -> Output {
    cluster.run_on("node1", User::Alice, script)
}

/// "a named container keeps what was written between steps; a reused named container prints nothing extra"
fn keeps_what_steps_write(release: Release) {
    let cluster = start(release, "named");
    // As `pip install` does: a package, and a program that uses it.
    let job = cluster.run(
        "salloc -Q -n8 bash -c 'export SLURM_NTASKS=1 SLURM_NPROCS=1; \
         srun -Q --container-image=/shared/a.sqsh --container-name=dev sh -c \"mkdir -p /usr/lib/pkg; echo v1 > /usr/lib/pkg/version; \
           printf \\\"#!/bin/sh\\ncat /usr/lib/pkg/version /image\\n\\\" > /bin/tool; chmod 755 /bin/tool; rm /etc/os-release\"; \
         srun -Q -n4 --container-image=/shared/a.sqsh --container-name=dev sh -c \"echo \\$SLURM_PROCID > /usr/lib/pkg/\\$SLURM_PROCID\"; \
         srun -Q --container-name=dev sh -c \"tool; cat /usr/lib/pkg/[0-3]; [ -e /etc/os-release ] || echo removed\" 2>&1'",
    );
    assert_out(&job, 0, "v1\na\n0\n1\n2\n3\nremoved\n");
    assert_eq!(job.stderr, "", "{release}");
    // Without the name nothing of it is there.
    assert_failed(&cluster.run("srun -Q --container=/shared/a.sqsh tool"), 127, "tool: no such program");
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
}

/// "auto: running, join; existing, reuse its files; else create from the image"
fn enters_what_runs(release: Release) {
    let cluster = start(release, "entered");
    let job = cluster.run(
        "salloc -Q -n8 bash -c 'export SLURM_NTASKS=1 SLURM_NPROCS=1; \
         srun -Q --overlap --container-image=/shared/a.sqsh --container-name=dev --container-mounts=/shared:/mnt/s \
           sh -c \"echo first > /first; readlink /proc/self/ns/mnt; while [ ! -e /second ]; do sleep 0.1; done; cat /second\" & \
         sleep 1.5; srun -Q --overlap -n2 --container-name=dev sh -c \"cat /first; ls /mnt/s/a.sqsh; readlink /proc/self/ns/mnt; \
           sleep 0.5; echo second > /second\" | sort; wait'",
    );
    assert_eq!(job.code, 0, "{release}: {}", job.text());
    let count = |text: &str| job.stdout.lines().filter(|line| line.starts_with(text)).count();
    assert_eq!((count("first"), count("second"), count("/mnt/s/a.sqsh")), (2, 1, 2), "{}", job.text());
    let mut namespaces: Vec<&str> = job.stdout.lines().filter(|line| line.starts_with("mnt:")).collect();
    assert_eq!(namespaces.len(), 3, "{}", job.text());
    namespaces.dedup();
    assert_eq!(namespaces.len(), 1, "one container: {}", job.text());
}

const TWO_RELEASES: [Release; 2] = [Release::Slurm22_05, Release::Slurm24_11];

/// A second container on the files of one that runs, as pyxis has it: its own namespaces, user, mounts and variables.
#[test]
fn no_exec_starts_a_second_container_on_the_same_files() {
    for release in TWO_RELEASES {
        let cluster = start(release, "no-exec");
        let job = cluster.run(
            "rm -f began; salloc -Q -n8 bash -c 'export SLURM_NTASKS=1 SLURM_NPROCS=1; \
             srun -Q --overlap --container-image=/shared/a.sqsh --container-name=x --container-mounts=/shared:/mnt/first \
               sh -c \"echo one > /first; touch began; until [ -e /second0 ] && [ -e /second1 ]; do sleep 0.1; done; cat /second0; id -u; ls -A /mnt/own/dir | wc -l; \
                 grep -c /mnt/own /proc/self/mountinfo; for n in mnt ipc user; do readlink /proc/self/ns/\\$n; done\" > out1 2>&1 & \
             until [ -e began ]; do sleep 0.1; done; \
             srun -Q --overlap -n2 --container-name=x:no_exec --container-mounts=/shared:/mnt/own/dir --container-remap-root --container-unshare=ipc \
               --container-env=WORD=own sh -c \"cat /first; ls /mnt/own/dir/a.sqsh; ls -A /mnt/first | wc -l; id -u; stat -c %u /first; echo \\$WORD; \
                 for n in mnt ipc user; do readlink /proc/self/ns/\\$n; done; chown 0:0 /first; echo two > /second\\$SLURM_PROCID\" | sort | uniq -c; \
             wait; cat out1; srun -Q --container-name=x ls -d /second0 /mnt/own/dir'",
        );
        assert_eq!((job.code, job.stderr.as_str()), (0, ""), "{release}: {}", job.text());
        let mut lines: Vec<String> = job.stdout.lines().map(|line| line.trim().replace("  ", " ")).collect();
        lines.sort();
        let (namespaces, rest): (Vec<&str>, Vec<&str>) =
            lines.iter().map(String::as_str).partition(|line| line.contains(":["));
        // Both tasks of the second are in one container. What it mounts is not seen in the first, but for the directory.
        assert_eq!(
            rest,
            [
                "/mnt/own/dir",
                "/second0",
                "0",
                "0",
                "2 /mnt/own/dir/a.sqsh",
                "2 one",
                "2 own",
                "2001",
                "6 0",
                "two"
            ],
            "{release}: {}",
            job.text()
        );
        let second: Vec<&str> = namespaces.iter().filter_map(|line| line.strip_prefix("2 ")).collect();
        assert_eq!((namespaces.len(), second.len()), (6, 3), "{release}: {}", job.text());
        assert!(!namespaces.iter().any(|line| second.contains(line)), "{release}: {}", job.text());
        assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
    }
}

/// Which of them is there is the container that runs, however many there were.
#[test]
fn a_second_container_is_the_one_that_runs_when_the_first_has_ended() {
    for release in TWO_RELEASES {
        let cluster = start(release, "no-exec-alone");
        let job = cluster.run(
            "rm -f began; salloc -Q -n8 bash -c 'export SLURM_NTASKS=1 SLURM_NPROCS=1; \
             srun -Q --overlap --container-image=/shared/a.sqsh --container-name=x --container-remap-root \
               sh -c \"echo one > /first; touch began; until [ -e /second ]; do sleep 0.1; done\" & first=$!; \
             until [ -e began ]; do sleep 0.1; done; \
             srun -Q --overlap --container-name=x:no_exec --container-mounts=/shared:/mnt/own \
               sh -c \"touch /second; until [ -e /third ]; do sleep 0.1; done; cat /first /third; readlink /proc/self/ns/mnt\" & \
             wait $first; srun -Q --overlap mizzen containers list | grep -o running; srun -Q --overlap mizzen containers remove x; \
             srun -Q --overlap --container-name=x sh -c \"id -u; ls /mnt/own/a.sqsh\"; srun -Q --overlap --container-name=x:exec readlink /proc/self/ns/mnt; \
             srun -Q --overlap --container-name=x:no_exec --container-mounts=/shared:/mnt/third sh -c \"ls /mnt/third/a.sqsh; ls -A /mnt/own | wc -l; echo three > /third\"; \
             wait; srun -Q --container-name=x cat /third; srun -Q mizzen containers list | grep -o stopped'",
        );
        let lines: Vec<&str> = job.stdout.lines().filter(|line| !line.starts_with("mnt:")).collect();
        let expected = [
            "running",
            "x: in use: it runs, or is being started",
            "2001",
            "/mnt/own/a.sqsh",
            "/mnt/third/a.sqsh",
            "0",
            "one",
            "three",
            "three",
            "stopped",
        ];
        assert_eq!(lines, expected, "{release}: {}", job.text());
        let mut namespaces: Vec<&str> = job.stdout.lines().filter(|line| line.starts_with("mnt:")).collect();
        assert_eq!(namespaces.len(), 2, "{}", job.text());
        namespaces.dedup();
        assert_eq!(namespaces.len(), 1, "who enters is in the second: {}", job.text());
    }
}

#[test]
fn each_container_on_the_same_files_is_as_its_own_options_say() {
    let cluster = start(Release::Slurm22_05, "no-exec-options");
    let beside = |first: &str, others: &str| {
        on_node(
            &cluster,
            &format!(
                "rm -f began out; mizzen run --name {first} sh -c 'touch began; until [ -e /done ]; do sleep 0.05; done; touch /y || echo refused; ls /w' > out 2>/dev/null & \
                 until [ -e began ]; do sleep 0.05; done; {others}; mizzen run --name x:no_exec - touch /done; wait; cat out; mizzen containers remove x > /dev/null"
            ),
        )
    };
    let read_only = beside(
        "x /shared/a.sqsh",
        "mizzen run --name x:no_exec --readonly -m /shared:/mnt/new - sh -c 'ls /mnt/new/a.sqsh; touch /x'; echo $?; \
         mizzen run --name x:no_exec /shared/b.sqsh sh -c 'cat /image; touch /w'; mizzen run --name x:no_exec --writable=1g - true; echo $?; \
         mizzen run --name x:no_exec --save saved.sqsh - touch /saved; mizzen run saved.sqsh ls /saved /w",
    );
    assert_out(&read_only, 0, "/mnt/new/a.sqsh\n1\na\n125\n/saved\n/w\n/w\n");
    assert_failed(&read_only, 0, "touch: /x: Read-only file system\n");
    assert_failed(&read_only, 0, "writable up to 1g: no limit holds for a named container");
    let note = "note: the container \"x\" was made from /shared/a.sqsh, so /shared/b.sqsh is not used";
    assert_failed(&read_only, 0, note);
    let writable = beside("x --readonly /shared/a.sqsh", "mizzen run --name x:no_exec - touch /w");
    assert_out(&writable, 0, "refused\n/w\n");
    // The user is in the lists of each, and those of the others are left as they are.
    let users = beside(
        "x --remap-root /shared/a.sqsh",
        "mizzen run --name x:no_exec - whoami; mizzen run --name x:exec - sh -c 'grep -c alice /etc/passwd; whoami'; \
         mizzen run --name x:no_exec --remap-root - sh -c 'echo crew:x:4242: >> /etc/group'; mizzen run --name x:no_exec - grep -c crew /etc/group; \
         mizzen run --name x:no_exec - touch /w",
    );
    assert_out(&users, 0, "alice\n0\nroot\n1\n/w\n");
    // Where the kernel does not allow it, the user is told.
    let calls = "mizzen run --name x:no_exec - true; strace -f -qq -o /dev/null -e inject=open_tree:error=EPERM mizzen run --name x:no_exec - true; echo $?; touch w; \
                 mizzen run --name x:no_exec - touch /w";
    let refused = beside("x /shared/a.sqsh", calls);
    assert_out(&refused, 0, "125\n/w\n");
    assert_told(
        &refused,
        0,
        "mizzen: the container \"x\": its files cannot be mounted once more: Operation not permitted",
        "the flag no_exec needs the call open_tree (Linux 5.2), which a seccomp filter may forbid",
    );
}

/// Many at once, in whatever order, and whoever is killed while they start.
#[test]
fn second_containers_start_side_by_side_and_may_be_killed() {
    let cluster = start(Release::Slurm22_05, "no-exec-many");
    let begin = "mizzen run --name x /shared/a.sqsh sh -c 'touch began; until [ -e /done ]; do sleep 0.1; done; cat /image' & until [ -e began ]; do sleep 0.05; done;";
    let many = on_node(
        &cluster,
        &format!(
            "{begin} for i in $(seq 16); do mizzen run --name x:no_exec -m /shared:/mnt/$i - sh -c \"ls /mnt/$i/a.sqsh >> /log\" & pids=\"$pids $!\"; done; \
             wait $pids; mizzen run --name x:no_exec - sh -c 'sort -u /log | wc -l; touch /done'; wait; mizzen run --name x - rm /done; rm began"
        ),
    );
    assert_out(&many, 0, "16\na\n");
    for run in 0..count(10, 100) {
        let delay = 0.012 * f64::from(run % 10);
        let killed = on_node(
            &cluster,
            &format!(
                "{begin} (exec mizzen run --name x:no_exec - sh -c 'echo {run} >> /log; sleep 60') & second=$!; sleep {delay:.3}; kill -KILL $second; wait $second; \
                 mizzen run --name x:no_exec - cat /image; mizzen run --name x:exec - cat /image; mizzen run --name x:no_exec - touch /done; wait; \
                 mizzen run --name x - rm /done; rm began; pkill -x sleep; true"
            ),
        );
        assert_out(&killed, 0, "a\na\na\n");
    }
    let left = on_node(&cluster, "for i in $(seq 50); do pgrep mizzen || exit 0; sleep 0.1; done; exit 1");
    assert_eq!(left.code, 0, "{}", left.text());
}

#[test]
fn every_flag_has_its_meaning() {
    for release in TWO_RELEASES {
        let cluster = start(release, "flags");
        let job = |script: &str| {
            cluster.run(&format!("salloc -Q -n8 bash -c 'export SLURM_NTASKS=1 SLURM_NPROCS=1; {script}'"))
        };
        let image = "--container-image=/shared/a.sqsh";
        // "create: must not exist"
        let create = "srun -Q --container-image=/shared/a.sqsh --container-name=x:create";
        let twice = job(&format!("{create} touch /here && {create} touch /there"));
        assert_told(
            &twice,
            125,
            "mizzen: node1: the container \"x\" exists, and the flag create wants a new one",
            "mizzen containers remove",
        );
        // "exec: must run"
        let stopped =
            job(&format!("srun -Q {image} --container-name=x true; srun -Q --container-name=x:exec true"));
        assert_failed(&stopped, 125, "the container \"x\" does not run, and the flag exec wants to enter it");
        let missing = job(&format!("srun -Q {image} --container-name=x:exec true"));
        assert_failed(
            &missing,
            125,
            "the container \"x\" does not exist, and the flag exec wants to enter it",
        );
        // "no_exec: never join"
        let running = job(&format!(
            "srun -Q --overlap {image} --container-name=x sh -c \"readlink /proc/self/ns/mnt; sleep 3\" & sleep 1.5; \
             srun -Q --overlap --container-name=x:no_exec readlink /proc/self/ns/mnt; wait; srun -Q --container-name=x:no_exec echo alone"
        ));
        let lines: Vec<&str> = running.stdout.lines().collect();
        assert!(lines.len() == 3 && lines[0] != lines[1] && lines[2] == "alone", "{}", running.text());
        assert_eq!(running.stderr, "", "{release}");
        // "Without image and not existing: …"
        let nothing = job("srun -Q --container-name=x touch /shared/marker");
        assert_told(
            &nothing,
            125,
            "a container with name \"x\" does not exist, and --container-image is not set",
            "give the image to the first step on each node",
        );
        assert_out(&cluster.run("ls /shared/marker"), 2, "");
        // "Errors: empty name; name with `/`; flag must be one of the four"
        for (value, message) in [
            ("", "\"\": the name is empty"),
            (":exec", "\":exec\": the name is empty"),
            ("a/b", "\"a/b\": the name has a /"),
            ("..", "\"..\": the name begins with a dot"),
            ("x:often", "\"x:often\": the flag behind the name must be auto, create, exec or no_exec"),
        ] {
            for command in ["srun touch /shared/marker", "sbatch --wrap true", "salloc true"] {
                let (command, rest) = command.split_once(' ').unwrap();
                let refused = cluster.run(&format!("{command} {image} --container-name={value} {rest}"));
                assert_failed(&refused, 1, &format!("--container-name: {message}"));
            }
        }
        // "An unnamed container of a running step can be joined by the name `JOB.STEP`"
        let step = job(&format!(
            "srun -Q --overlap {image} --container-writable sh -c \"echo unnamed > /u; sleep 3\" & sleep 1.5; \
             srun -Q --overlap -n2 --container-name=$SLURM_JOB_ID.0:exec cat /u; wait"
        ));
        assert_out(&step, 0, "unnamed\nunnamed\n");
        // The job's container is that of its steps; another image is another container.
        let steps = cluster.run(&format!(
            "salloc -Q -n8 {image} --container-name=y bash -c 'export SLURM_NTASKS=1 SLURM_NPROCS=1; srun -Q touch /mine; srun -Q ls /mine; \
             srun -Q --container=/shared/b.sqsh ls /mine'"
        ));
        assert_out(&steps, 1, "/mine\n");
        let variable = cluster.run(&format!(
            "salloc -Q -n8 bash -c 'export SLURM_NTASKS=1 SLURM_NPROCS=1; export MIZZEN_CONTAINER_NAME=z; srun -Q {image} touch /mine; srun -Q ls /mine'"
        ));
        assert_out(&variable, 0, "/mine\n");
        // A batch script in a named container, whose steps enter it.
        let batch = cluster.run(&format!(
            "printf '#!/bin/sh\\necho script > /s; srun -Q cat /s /image\\n' > job; \
             sbatch --wait -Q -o out {image} --container-name=batch:create job; cat out"
        ));
        assert_out(&batch, 0, "script\na\n");
    }
}

#[test]
fn a_container_is_what_it_was_made_from() {
    let cluster = start(Release::Slurm22_05, "made-from");
    let run = |options: &str, program: &str| on_node(&cluster, &format!("mizzen run {options} {program}"));
    on_node(&cluster, "cp /shared/a.sqsh own.sqsh");
    assert_out(&run("--name dev own.sqsh", "sh -c 'echo changed > /image; cat /image'"), 0, "changed\n");
    assert_out(&run("--name dev -", "cat /image"), 0, "changed\n");
    let other = run("--name dev /shared/b.sqsh", "cat /image");
    assert_out(&other, 0, "changed\n");
    assert_failed(
        &other,
        0,
        "note: the container \"dev\" was made from /home/alice/own.sqsh, so /shared/b.sqsh is not used; `mizzen containers remove` removes it",
    );
    let listed = on_node(&cluster, "mizzen containers list");
    assert!(
        listed.stdout.contains("global       stopped") && listed.stdout.contains("/home/alice/own.sqsh"),
        "{}",
        listed.text()
    );
    // Read-only it can be, and limited not.
    let read_only = run("--name dev --readonly -", "touch /x");
    assert_failed(&read_only, 1, "Read-only file system");
    assert_failed(&run("--name dev --writable=1g -", "true"), 125, "no limit holds for a named container");
    let plan = on_node(&cluster, "mizzen plan --name dev - true");
    assert!(
        plan.stdout.contains("writable, with the changes in /disk/mizzen-2001/containers/global/dev"),
        "{}",
        plan.text()
    );
    // Where a mount point was removed, it is made again.
    assert_out(&run("--name dev -", "sh -c 'rmdir /root; ls -d /root'"), 1, "");
    assert_out(&run("--name dev -m /shared:/root -", "ls /root/a.sqsh"), 0, "/root/a.sqsh\n");
    // Its changes belong to that image alone.
    on_node(&cluster, "cp /shared/b.sqsh new && mv new own.sqsh");
    assert_told(
        &run("--name dev -", "cat /image"),
        125,
        "mizzen: the container \"dev\": /home/alice/own.sqsh is another file than the one that it was made from",
        "its changes belong to that one",
    );
    assert_out(
        &on_node(&cluster, "mizzen containers remove dev nosuch"),
        1,
        "dev: removed\nnosuch: no such container on this node\n",
    );
    assert_failed(
        &run("--name dev -", "true"),
        125,
        "a container with name \"dev\" does not exist, and --container-image is not set",
    );
    assert_failed(&run("-", "true"), 125, "mizzen: -: no image, and no container by its name");
    // A directory is an image too.
    let tree =
        "mkdir tree; cd tree; mizzen run /shared/a.sqsh tar -C / -cf - bin etc/group image | tar -xf -; cd";
    on_node(&cluster, tree);
    assert_out(&run("--name tree tree", "sh -c 'echo x > /x; cat /image'"), 0, "a\n");
    assert_out(&on_node(&cluster, "mizzen run --name tree - cat /x; ls tree/x"), 2, "x\n");
    // Without overlays for users there are none.
    let calls =
        on_node(&cluster, "strace -e trace=mount -o calls mizzen run --name tree - true; cat calls").stdout;
    let mounts = calls.lines().filter(|line| line.starts_with("mount("));
    let nth =
        1 + mounts.clone().position(|line| line.contains("\"overlay\"")).expect("an overlay is mounted");
    let old = on_node(
        &cluster,
        &format!(
            "strace -e trace=mount -o calls -e inject=mount:error=EPERM:when={nth} mizzen run --name tree - true"
        ),
    );
    assert_told(
        &old,
        125,
        "mizzen: a named container: cannot mount an overlay: Operation not permitted",
        "overlays in user namespaces need Linux 5.11; run without a name here",
    );
}

#[test]
fn concurrent_steps_make_one_container() {
    for release in TWO_RELEASES {
        let cluster = start(release, "concurrent");
        let job = cluster.run(
            "salloc -Q -n8 bash -c 'export SLURM_NTASKS=1 SLURM_NPROCS=1; for i in $(seq 32); do srun -Q --overlap --container-image=/shared/a.sqsh --container-name=new \
             sh -c \"echo $i >> /log; cat /bin/busybox | md5sum >> /sums\" & done; wait; \
             srun -Q --container-name=new sh -c \"sort -un /log | wc -l; sort -u /sums | wc -l; wc -l < /sums\"; \
             srun -Q ls /disk/mizzen-2001/containers/$SLURM_JOB_ID'",
        );
        assert_out(&job, 0, "32\n1\n32\nnew\n");
    }
}

/// Slurm ends all processes of a step, the file server of the container that it has started among them.
#[test]
fn a_container_goes_on_without_the_step_that_has_started_it() {
    let cluster = start(Release::Slurm22_05, "goes-on");
    let tree = ImageTree::busybox().unwrap();
    for number in 0..400 {
        tree.file(&format!("data/{number}"), &format!("{number}\n").repeat(4000)).unwrap();
    }
    cluster.share("data.sqsh", &tree.squashfs(&[]).unwrap()).unwrap();
    let sum = "cat /data/* | md5sum";
    let expected = on_node(&cluster, &format!("mizzen run /shared/data.sqsh sh -c '{sum}'")).stdout;
    assert!(expected.lines().count() == 1 && !expected.starts_with("d41d8cd9"), "{expected}");
    for run in 0..count(5, 50) {
        let delay = 0.01 * f64::from(run % 10);
        // The file server that goes on says whose the files are, in the numbers of the first one's user namespace.
        let mode = ["exec", "no_exec --remap-root"][run as usize % 2];
        let job = on_node(
            &cluster,
            &format!(
                "mizzen run --name on /shared/data.sqsh sleep 60 & for i in $(seq 50); do pgrep -x sleep >/dev/null && break; sleep 0.05; done; \
                 first=\"$(pgrep -x mizzen-fuse) $(pgrep -x mizzen-watch)\"; \
                 mizzen run --name on:{mode} - sh -c '{sum}; usleep 700000' & entered=$!; \
                 for i in $(seq 100); do [ $(pgrep -c -x mizzen-fuse) = 2 ] && break; sleep 0.01; done; sleep {delay:.3}; kill -KILL $first; wait $entered; echo $?; \
                 mizzen run --name on:exec - sh -c '{sum}'; pkill -x sleep; wait"
            ),
        );
        assert_out(&job, 0, &format!("{expected}0\n{expected}"));
    }
    let left = on_node(&cluster, "for i in $(seq 50); do pgrep mizzen || exit 0; sleep 0.1; done; exit 1");
    assert_eq!(left.code, 0, "{}", left.text());
}

/// The same by Slurm itself, which ends everything in the cgroup of the first step.
#[test]
fn a_step_goes_on_when_slurm_has_ended_the_one_before_it() {
    let mizzen_toml = Some("stage_directory = \"/disk\"\n".to_owned());
    let spec = one_node(Release::Slurm22_05, "steps-in-cgroups");
    let cluster = with_images(Spec { mizzen_toml, cgroup_v1: true, ..spec });
    let disk = "mkdir -p /disk && mount -t tmpfs disk /disk && chmod 1777 /disk";
    assert_eq!(cluster.run_on("node1", User::Root, disk).code, 0);
    for (name, mode) in [("x", ""), ("y", ":no_exec")] {
        let job = cluster.run(&format!(
        "rm -f began; salloc -Q -n8 bash -c 'export SLURM_NTASKS=1 SLURM_NPROCS=1; \
         srun -Q --overlap --container-image=/shared/a.sqsh --container-name={name} sh -c \"touch began; while [ ! -e /go ]; do sleep 0.1; done\" & \
         until [ -e began ]; do sleep 0.1; done; srun -Q --overlap --container-name={name}{mode} sh -c \"for i in \\$(seq 100); do ps | grep -c {{[m]izzen-fuse}} | grep 2 && break; sleep 0.1; done; touch /go; sleep 4; ps | grep -c {{[m]izzen-fuse}}; \
           for i in /bin/*; do cat \\$i; done | md5sum | wc -l; echo y > /y\"; wait; srun -Q --container-name={name} cat /y'"
    ));
        assert_out(&job, 0, "2\n1\n1\ny\n");
    }
}

#[test]
fn whoever_is_killed_the_next_start_works() {
    let cluster = start(Release::Slurm22_05, "killed");
    on_node(&cluster, "mizzen run --name k /shared/a.sqsh sh -c 'echo kept > /kept'");
    for run in 0..count(20, 200) {
        let delay = f64::from(run % 20) * 0.012;
        // Killed once more where it had not begun yet: on a busy machine the shell is still to become it.
        let name = if run % 2 == 0 { "k".to_owned() } else { format!("new{run}") };
        let killed = on_node(
            &cluster,
            &format!(
                "mizzen run --name {name} /shared/a.sqsh sh -c 'echo {run} >> /log; sleep 60' & sleep {delay:.3}; \
                 pkill -KILL -x 'mizzen|mizzen-.*|sleep|sh'; \
                 while [ -n \"$(jobs -r)\" ]; do sleep 0.1; pkill -KILL -x 'mizzen|mizzen-.*|sleep|sh'; done; wait; \
                 mizzen run --name {name} /shared/a.sqsh sh -c 'cat /image; touch /log; cat /kept 2>/dev/null; true'"
            ),
        );
        assert_out(&killed, 0, if run % 2 == 0 { "a\nkept\n" } else { "a\n" });
    }
    // The first prune removes what was half made.
    let pruned = on_node(
        &cluster,
        "mizzen containers prune; ls -A /disk/mizzen-2001/containers/global | grep -c '^.new-'",
    );
    assert_out(&pruned, 1, "0\n");
    let removed = on_node(
        &cluster,
        "mizzen containers remove --all >/dev/null; mizzen containers list; find /disk/mizzen-2001/containers -name upper",
    );
    assert_out(&removed, 0, "");
}

/// "plugstack keys: … `container_scope=global|job`"
#[test]
fn containers_of_a_job_go_with_it() {
    for release in TWO_RELEASES {
        let cluster = start(release, "scope");
        let srun = |name: &str| {
            cluster.run(&format!("srun -Q --container-image=/shared/a.sqsh --container-name={name} true"))
        };
        let names =
            || on_node(&cluster, "mizzen containers list --json | grep '\"name\"' | tr -d ' ,'").stdout;
        assert_eq!((srun("one").code, names().as_str()), (0, "\"name\":\"one\"\n"));
        // The next start of a container removes those of ended jobs, whatever it is.
        cluster.run("srun -Q --container=/shared/a.sqsh sleep 2");
        assert_eq!(names(), "", "{release}");
        // But it does not ask Slurm again and again.
        assert_eq!((srun("one").code, names().as_str()), (0, "\"name\":\"one\"\n"));
        cluster.run("srun -Q --container=/shared/a.sqsh sleep 1");
        assert_eq!(names(), "\"name\":\"one\"\n", "{release}");
        // Another job has containers of its own.
        let other = cluster.run("srun -Q --container-name=one true");
        assert_failed(&other, 125, "a container with name \"one\" does not exist");
        // The next start removes those of ended jobs; it does not wait for that.
        let next = cluster.run("srun -Q --container-image=/shared/a.sqsh --container-name=two sleep 2");
        assert_eq!(next.code, 0, "{}", next.text());
        assert_eq!(names(), "\"name\":\"two\"\n", "{release}");
        // Those of a job that runs stay, also where no process is in them, and in a partition that squeue shows to those alone who
        // ask for all.
        let hide = "scontrol create PartitionName=hidden Nodes=ALL Hidden=YES";
        assert_eq!(cluster.run_as_root(hide).code, 0);
        let pruned = cluster.run(
            "salloc -Q -p hidden -n8 bash -c 'export SLURM_NTASKS=1 SLURM_NPROCS=1; srun -Q --container-image=/shared/a.sqsh --container-name=three touch /x; \
             srun -Q mizzen containers prune; srun -Q --container-name=three ls /x'",
        );
        assert!(pruned.code == 0 && pruned.stdout.ends_with("/x\n"), "{release}: {}", pruned.text());
        // An epilog knows the job, and asks nobody.
        let epilog = on_node(
            &cluster,
            "PATH= /usr/bin/mizzen containers prune --job $(/usr/bin/ls /disk/mizzen-2001/containers)",
        );
        assert!(epilog.code == 0 && epilog.stdout.starts_with("three of job "), "{}", epilog.text());
        assert_eq!(on_node(&cluster, "ls -A /disk/mizzen-2001/containers").stdout, ".asked\n");
        // Where Slurm does not answer, nothing is removed.
        srun("four");
        let unknown = on_node(
            &cluster,
            "SLURM_CONF=/nonexistent mizzen containers prune; mizzen containers list | wc -l",
        );
        assert_out(&unknown, 0, "2\n");
        assert_failed(&unknown, 0, "mizzen: hint: nothing is removed while Slurm does not answer");
        let known = on_node(&cluster, "mizzen containers prune; mizzen containers list");
        assert!(
            known.stdout.starts_with("four of job ") && known.stdout.ends_with(": removed\n"),
            "{}",
            known.text()
        );
    }
    let cluster = start_with(Release::Slurm24_11, "global", "container_scope = \"global\"\n");
    let jobs = cluster.run(
        "srun -Q --container-image=/shared/a.sqsh --container-name=dev touch /x; srun -Q --container-name=dev ls /x",
    );
    assert_out(&jobs, 0, "/x\n");
    // Others have others.
    let bob = cluster.run_on("ctl", User::Bob, "srun -Q --container-name=dev true");
    assert_failed(&bob, 125, "a container with name \"dev\" does not exist");
}

/// "`container_scope=global|job` (global)": where pyxis's defaults hold, as the file that is shipped has them too, a container is there
/// for the next job, which names no image.
#[test]
fn with_pyxiss_defaults_containers_stay() {
    for release in TWO_RELEASES {
        let shipped = include_str!("../../conf/mizzen.toml").replace("/var/tmp", "/disk");
        let pyxis = shipped.replace("\ncompatible = \"mizzen\"\n", "\ncompatible = \"pyxis\"\n");
        let cluster = start(release, "scope-pyxis");
        cluster.write_everywhere("/etc/mizzen/mizzen.toml", &pyxis).unwrap();
        let made = cluster.run(
            "srun -Q --container-image=/shared/a.sqsh --container-name=kept sh -c 'echo kept > /x; ls -A $HOME | wc -l'",
        );
        assert_out(&made, 0, "0\n");
        assert_out(&cluster.run("srun -Q --container-name=kept cat /x /image"), 0, "kept\na\n");
        // Commands by hand know it by the same name, in a job and outside.
        let removed = "mizzen containers remove kept";
        assert_out(
            &cluster.run("srun -Q mizzen containers list --json | grep -c '\"name\": \"kept\"'"),
            0,
            "1\n",
        );
        assert_eq!(on_node(&cluster, removed).code, 0);
        let shown = "mizzen config show | grep -E '^(mount_home|container_scope)'";
        let of_pyxis = "default in jobs with compatible = \"pyxis\"";
        let expected =
            format!("mount_home = false  # {of_pyxis}\ncontainer_scope = \"global\"  # {of_pyxis}\n");
        assert_out(&cluster.run(shown), 0, &expected);
        // What the site says itself holds.
        let own = "container_scope = \"job\"\nmount_home = true\n";
        assert_eq!(cluster.run_as_root("mkdir -p /etc/mizzen/mizzen.d").code, 0);
        assert_eq!(cluster.run_on("node1", User::Root, "mkdir -p /etc/mizzen/mizzen.d").code, 0);
        cluster.write_everywhere("/etc/mizzen/mizzen.d/10.toml", own).unwrap();
        let made = cluster.run(
            "touch mark; srun -Q --container-image=/shared/a.sqsh --container-name=gone sh -c 'ls -A $HOME'",
        );
        assert_out(&made, 0, "mark\n");
        let other = cluster.run("srun -Q --container-name=gone true");
        assert_failed(
            &other,
            125,
            "a container with name \"gone\" does not exist, and --container-image is not set",
        );
        let expected = "mount_home = true  # /etc/mizzen/mizzen.d/10.toml:2\n\
                        container_scope = \"job\"  # /etc/mizzen/mizzen.d/10.toml:1\n";
        assert_out(&cluster.run(shown), 0, expected);
        assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
    }
}

/// Where no client has made a request, a name in a variable of the job asks for a container all the same, and never for the node.
#[test]
fn a_name_in_a_variable_of_the_job_asks_for_a_container() {
    for release in [Release::Slurm22_05, Release::Slurm24_11] {
        let cluster = start_with(release, "name-variable", "container_scope = \"global\"\n");
        let made = cluster.run("srun -Q --container-image=/shared/a.sqsh --container-name=dev cat /image");
        assert_out(&made, 0, "a\n");
        for variable in ["MIZZEN_CONTAINER_NAME", "PYXIS_CONTAINER_NAME"] {
            let step = |name: &str, program: &str| {
                cluster.run(&format!("srun -Q --export=ALL,{variable}={name} {program}"))
            };
            assert_out(&step("dev", "cat /image"), 0, "a\n");
            let missing = step("other", "touch /shared/marker");
            assert_failed(&missing, 125, "a container with name \"other\" does not exist");
            assert_eq!(cluster.run("ls /shared/marker").stdout, "", "{release}: ran outside");
        }
    }
}

/// Who asks for content by its digest gets that or nothing, also where a container of the name runs.
#[test]
fn a_container_of_another_image_is_not_that_of_a_digest() {
    let cluster = start(Release::Slurm22_05, "name-pinned");
    let pinned = "/shared/b.sqsh@sha256:$(sha256sum /shared/b.sqsh | cut -d' ' -f1)";
    let made = on_node(&cluster, "mizzen run --name dev /shared/a.sqsh cat /image");
    assert_out(&made, 0, "a\n");
    let asked = format!("mizzen run --name dev {pinned} true");
    let message =
        "the container \"dev\" was made from /shared/a.sqsh, and not from /shared/b.sqsh with sha256:";
    assert_failed(&on_node(&cluster, &asked), 125, message);
    let running = on_node(
        &cluster,
        &format!(
            "mizzen run --name dev - sleep 60 & until pgrep -x sleep > /dev/null; do sleep 0.05; done; {asked}; echo $?; \
             mizzen run --name dev /shared/b.sqsh cat /image; pkill -x sleep; wait"
        ),
    );
    assert_out(&running, 0, "125\na\n");
    let note = "note: the container \"dev\" was made from /shared/a.sqsh, so /shared/b.sqsh is not used";
    assert_eq!((running.stderr.matches(message).count(), running.stderr.matches(note).count()), (1, 1));
}

/// Whoever enters a container has a file server stand by, which ends with them.
#[test]
fn who_has_been_in_a_container_leaves_nothing_there() {
    let cluster = start(Release::Slurm22_05, "name-standby");
    let entered = on_node(
        &cluster,
        "mizzen run --name dev /shared/a.sqsh sleep 60 & until pgrep -x sleep > /dev/null; do sleep 0.05; done; \
         for i in 1 2 3 4 5; do mizzen run --name dev:exec - true; mizzen run --name dev:no_exec - true; done; \
         for i in $(seq 50); do [ $(pgrep -c mizzen) = 2 ] && break; sleep 0.1; done; pgrep -l mizzen | cut -d' ' -f2 | sort; \
         pkill -x sleep; wait",
    );
    assert_out(&entered, 0, "mizzen-fuse\nmizzen-watch\n");
}

/// The job that has started a container may be suspended. Whoever else is in it goes on with a file server of their own: nobody can
/// kill a program that waits for a file.
#[test]
fn a_file_server_that_is_stopped_stops_nobody_else() {
    let cluster = start(Release::Slurm22_05, "name-stopped");
    let entered = on_node(
        &cluster,
        "mizzen run --name dev /shared/a.sqsh sleep 60 & until pgrep -x sleep > /dev/null; do sleep 0.05; done; \
         server=$(pgrep -x mizzen-fuse); kill -STOP $server; \
         timeout -s KILL 20 mizzen run --name dev:exec - cat /image; echo $?; \
         timeout -s KILL 20 mizzen run --name dev:no_exec - cat /image; echo $?; \
         timeout -s KILL 20 mizzen run --name dev:exec - sh -c 'find / -xdev -type f | head -n 50 | xargs cat > /dev/null; echo read'; \
         kill -CONT $server; pkill -x sleep; wait; \
         for i in $(seq 50); do pgrep mizzen > /dev/null || break; sleep 0.1; done; pgrep -l mizzen",
    );
    assert_out(&entered, 1, "a\n0\na\n0\nread\n");
}

/// Slurm can suspend one of two jobs that are in one container, and with it the one's file server that the other needs.
#[test]
fn where_jobs_are_suspended_a_container_is_one_jobs() {
    let release = Release::Slurm24_11;
    let mizzen_toml = Some("stage_directory = \"/disk\"\ncontainer_scope = \"global\"\n".to_owned());
    // In a file of its own, as on many clusters.
    let slurm_conf = vec!["Include preempt.conf".to_owned()];
    let preempt = "PreemptMode=SUSPEND,GANG\nPreemptType=preempt/partition_prio\n".to_owned();
    let slurm_files = vec![("preempt.conf".to_owned(), preempt)];
    let cluster =
        with_images(Spec { mizzen_toml, slurm_conf, slurm_files, ..one_node(release, "name-suspend") });
    let disk = "mkdir -p /disk && mount -t tmpfs disk /disk && chmod 1777 /disk";
    assert_eq!(cluster.run_on("node1", User::Root, disk).code, 0);
    let done = cluster.run(
        "job=$(sbatch --parsable -o /dev/null --container=/shared/a.sqsh --container-name=g --wrap 'touch /began; sleep 60'); \
         until srun -Q --jobid=$job --overlap --container-name=g ls /began 2>/dev/null; do sleep 0.2; done; \
         srun -Q -n1 --container-name=g touch /shared/marker; echo $?; scancel $job; ls /shared/marker 2>/dev/null; echo $job",
    );
    let (rest, job) = done.stdout.trim_end().rsplit_once('\n').unwrap();
    assert_eq!(rest, "/began\n125", "{}", done.text());
    let message = format!("the container \"g\" runs in job {job}, and jobs are suspended here");
    assert_told(&done, 0, &message, &format!("srun --jobid={job} --overlap"));
}

/// The same by steps of several tasks, where Slurm knows a step's processes by their parents and does not find servers.
#[test]
fn steps_that_have_been_in_a_container_leave_nothing_there() {
    let cluster = start(Release::Slurm22_05, "name-standby-steps");
    let entered = cluster.run(
        "salloc -Q -n8 bash -c 'export SLURM_NTASKS=1 SLURM_NPROCS=1; \
         srun -Q --overlap --container-image=/shared/a.sqsh --container-name=dev sh -c \"touch began; while [ ! -e /go ]; do sleep 0.1; done\" & \
         until [ -e began ]; do sleep 0.1; done; for mode in exec exec no_exec no_exec; do srun -Q --overlap -n2 --container-name=dev:$mode true; done; \
         for i in $(seq 80); do [ $(pgrep -c mizzen) = 2 ] && break; sleep 0.1; done; pgrep -l mizzen | cut -d\" \" -f2 | sort; \
         srun -Q --overlap --container-name=dev touch /go; wait'",
    );
    assert_out(&entered, 0, "mizzen-fuse\nmizzen-watch\n");
}

/// A package as pip installs it, and the pip that Debian's python3-venv brings.
fn share_wheels(cluster: &Cluster) {
    let tree = ImageTree::empty().unwrap();
    tree.file("wheel/crew.py", "answer = 42\n").unwrap();
    tree.file("wheel/crew-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: crew\nVersion: 1.0\n")
        .unwrap();
    let kind = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n";
    tree.file("wheel/crew-1.0.dist-info/WHEEL", kind).unwrap();
    let files =
        ["crew.py", "crew-1.0.dist-info/METADATA", "crew-1.0.dist-info/WHEEL", "crew-1.0.dist-info/RECORD"];
    tree.file("wheel/crew-1.0.dist-info/RECORD", &files.map(|file| format!("{file},,\n")).concat()).unwrap();
    let wheel = tree.path("crew-1.0-py3-none-any.whl");
    let mut zip = Command::new("python3");
    zip.current_dir(tree.path("wheel"))
        .args(["-m", "zipfile", "-c"])
        .arg(&wheel)
        .args(["crew.py", "crew-1.0.dist-info"]);
    run_tool(&mut zip).unwrap();
    cluster.share("crew-1.0-py3-none-any.whl", &std::fs::read(wheel).unwrap()).unwrap();
    let wheels = std::fs::read_dir("/usr/share/python-wheels").expect("python3-venv is not installed");
    let pip =
        wheels.flatten().map(|entry| entry.path()).find(|path| path.to_string_lossy().contains("/pip-"));
    cluster
        .share("pip.whl", &std::fs::read(pip.expect("no pip in /usr/share/python-wheels")).unwrap())
        .unwrap();
}

/// "a named container keeps what was written between steps"
#[test]
fn what_pip_installs_in_the_first_step_is_there_in_the_third() {
    for release in TWO_RELEASES {
        let cluster = start(release, "pip");
        share_wheels(&cluster);
        cluster.share("python.sqsh", &images::mpi().unwrap()).unwrap();
        let install = "python3 /mnt/shared/pip.whl/pip install --quiet --no-index --find-links /mnt/shared --break-system-packages crew";
        let job = cluster.run(&format!(
            "salloc -Q -n8 bash -c 'export SLURM_NTASKS=1 SLURM_NPROCS=1; \
             srun -Q --container-image=/shared/python.sqsh --container-name=dev --container-mounts=/shared:/mnt/shared {install}; \
             srun -Q --container-name=dev sh -c \"echo second > /second\"; \
             srun -Q --container-name=dev python3 -c \"import crew; print(crew.answer, open(chr(47) + \\\"second\\\").read().strip(), crew.__file__)\"'"
        ));
        assert_eq!(job.code, 0, "{release}: {}", job.text());
        assert!(job.stdout.starts_with("42 second /usr/"), "{release}: {}", job.text());
        // Not in the image, nor in a home directory.
        let without = cluster.run("srun -Q --container=/shared/python.sqsh python3 -c 'import crew'");
        assert!(without.code == 1 && without.stderr.contains("No module named 'crew'"), "{}", without.text());
    }
}

/// Who starts a container is waited for as long as they work, and is named.
#[test]
fn whoever_waits_for_a_container_is_told_for_whom() {
    let cluster = start(Release::Slurm22_05, "waited");
    // A start that does nothing in its middle, when it has the lock.
    let idle = count(9, 90);
    let holder = on_node(
        &cluster,
        &format!(
            "(strace -qq -o /dev/null -e inject=pivot_root:delay_enter={idle}000000:when=1 mizzen run --name x /shared/a.sqsh true &) > /dev/null 2>&1; \
             lock=/disk/mizzen-2001/containers/global/.lock-x; for i in $(seq 300); do [ -s $lock ] && break; sleep 0.1; done; cat $lock; \
             (timeout 100 mizzen run --name x /shared/a.sqsh cat /image > out 2> err; echo $? >> out; touch ended) > /dev/null 2>&1 &"
        ),
    );
    let mut waited = on_node(&cluster, "true");
    for _ in 0..3 {
        waited = on_node(
            &cluster,
            "for i in $(seq 400); do [ -e ended ] && break; sleep 0.1; done; cat err >&2; cat out",
        );
    }
    let busy = format!("the container \"x\" is being started or removed by process {}", holder.stdout.trim());
    assert_eq!(
        waited.stderr.matches(&format!("mizzen: note: {busy}; waiting for it\n")).count(),
        1,
        "{}",
        waited.text()
    );
    match idle {
        9 => assert_out(&waited, 0, "a\n0\n"),
        _ => {
            assert_out(&waited, 0, "125\n");
            assert_failed(&waited, 0, &format!("mizzen: {busy}, which has done nothing for 60 s\n"));
        }
    }
}

/// Images whose files are in the same places, and differ: 400 of them, as the one or the other says.
fn share_twins(cluster: &Cluster) {
    for word in ["first", "other"] {
        let tree = ImageTree::busybox().unwrap();
        for number in 0..400 {
            tree.file(&format!("data/{number}"), &format!("{word}{number}\n").repeat(4000)).unwrap();
        }
        cluster.share(&format!("{word}.sqsh"), &tree.squashfs(&[]).unwrap()).unwrap();
    }
}

/// Until a program of the first start sleeps; sets `first` to its server and watcher.
const STARTED: &str = "for i in $(seq 200); do pgrep -x sleep >/dev/null && break; sleep 0.05; done; \
                       first=\"$(pgrep -x mizzen-fuse) $(pgrep -x mizzen-watch)\"";

/// The places of files are those in the image that the container was made from: no other image is read in its stead.
#[test]
fn an_image_that_was_replaced_is_not_served_to_who_is_in_the_container() {
    let cluster = start(Release::Slurm22_05, "name-replaced");
    share_twins(&cluster);
    let note = "mizzen: note: the files of the container \"on\" end with the step that has started it: /home/alice/own.sqsh is another file than the one that it was made from\n";
    let ended = "mizzen: /home/alice/own.sqsh: its file server has ended with the step that had started it, so the container was ended\n";
    // The second looks the same from outside.
    for replace in ["cp /shared/other.sqsh new", "cp /shared/other.sqsh new; touch -r own.sqsh new"] {
        let run = on_node(
            &cluster,
            &format!(
                "cp /shared/first.sqsh own.sqsh; mizzen run --name on own.sqsh sleep 60 & {STARTED}; {replace}; mv new own.sqsh; \
                 mizzen run --name on:exec - sh -c 'touch /in; usleep 1500000; cat /data/* | grep -c ^other; echo went on' & entered=$!; \
                 for i in $(seq 100); do [ -e /disk/mizzen-2001/containers/global/on/upper/in ] && break; sleep 0.05; done; \
                 kill -KILL $first; begin=$SECONDS; wait $entered; echo $?; [ $((SECONDS - begin)) -le 5 ] || echo late; \
                 pkill -x sleep; wait; mizzen containers remove on"
            ),
        );
        assert_out(&run, 0, "137\non: removed\n");
        assert_eq!(
            (run.stderr.matches(note).count(), run.stderr.matches(ended).count()),
            (1, 1),
            "{replace}: {}",
            run.text()
        );
        assert_failed(&run, 0, "hint: a note at the start of ");
    }
    // Another content in the same file, with size and times of the first, is another image also for a container that does not run.
    let run = on_node(
        &cluster,
        "cp /shared/first.sqsh own.sqsh; touch -d @1000000000 own.sqsh; mizzen run --name off own.sqsh true; size=$(stat -c %s own.sqsh); \
         cp /shared/a.sqsh own.sqsh; truncate -s $size own.sqsh; touch -d @1000000000 own.sqsh; mizzen run --name off - true",
    );
    assert_told(
        &run,
        125,
        "mizzen: the container \"off\": /home/alice/own.sqsh is another file than the one that it was made from",
        "its changes belong to that one",
    );
}

/// The same in steps: whoever is in it is told at the start and at the end, and so is slurmd's log.
#[test]
fn a_step_is_told_that_its_files_end_with_another_one() {
    let mizzen_toml = Some("stage_directory = \"/disk\"\n".to_owned());
    let spec = one_node(Release::Slurm22_05, "name-replaced-steps");
    let cluster = with_images(Spec { mizzen_toml, cgroup_v1: true, ..spec });
    let disk = "mkdir -p /disk && mount -t tmpfs disk /disk && chmod 1777 /disk";
    assert_eq!(cluster.run_on("node1", User::Root, disk).code, 0);
    let job = cluster.run(
        "cp /shared/a.sqsh own.sqsh; rm -f began entered; \
         salloc -Q -n8 bash -c 'export SLURM_NTASKS=1 SLURM_NPROCS=1; \
         srun -Q --overlap --container-image=own.sqsh --container-name=x sh -c \"touch began; until [ -e entered ]; do sleep 0.1; done; sleep 1\" & \
         until [ -e began ]; do sleep 0.1; done; cp /shared/b.sqsh new; mv new own.sqsh; \
         srun -Q --overlap -n2 --container-name=x sh -c \"touch entered; sleep 60\"; echo $?; wait'",
    );
    assert_out(&job, 0, "137\n");
    let note = "mizzen: note: node1: the files of the container \"x\" end with the step that has started it: /home/alice/own.sqsh is another file";
    let ended = "mizzen: node1: /home/alice/own.sqsh: its file server has ended with the step that had started it, so the container was ended";
    assert_eq!(
        (job.stderr.matches(note).count(), job.stderr.matches(ended).count()),
        (1, 1),
        "{}",
        job.text()
    );
    let log = cluster.slurmd_log("node1");
    for message in
        ["the files of the container \"x\" end with the step", "its file server has ended with the step"]
    {
        assert!(log.contains(message), "{message}: {log}");
    }
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
}

/// Nobody goes on with what has made a file server crash, and every step is told.
#[test]
#[cfg(target_arch = "x86_64")] // the machine code
fn a_file_server_that_crashes_is_told_to_every_step_and_not_followed() {
    let cluster = start(Release::Slurm22_05, "name-crashed");
    // A write to address 0; and socket, which the filter does not allow.
    for (code, mode, how) in [
        ("\\x31\\xc0\\x88\\x00", "exec", "crashed (SIGSEGV)"),
        ("\\x31\\xc0\\x88\\x00", "no_exec", "crashed (SIGSEGV)"),
        ("\\xb8\\x29\\0\\0\\0\\x0f\\x05", "exec", "made a system call that its filter does not allow"),
    ] {
        let prepared = on_node(
            &cluster,
            "rm -f go first second out1 out2; mizzen containers remove x >/dev/null 2>&1; true",
        );
        assert_eq!(prepared.code, 0);
        let run = std::thread::scope(|scope| {
            let run = scope.spawn(|| {
                on_node(
                    &cluster,
                    &format!(
                        "(mizzen run --name x -m $HOME /shared/a.sqsh sh -c 'touch first; sleep 1000 & until [ -e go ]; do :; done; ls /etc/nothing; echo on' > out1 2>&1; echo $? >> out1) & \
                         until [ -e first ]; do sleep 0.05; done; \
                         (mizzen run --name x:{mode} -m $HOME - sh -c 'touch second; while :; do sleep 1000; done' > out2 2>&1; echo $? >> out2) & \
                         begin=$SECONDS; until [ -e go ]; do sleep 0.05; done; wait; grep -v note: out1 out2"
                    ),
                )
            });
            let injected = cluster.run_on(
                "node1",
                User::Root,
                &format!(
                    "cd /home/alice; until [ -e second ] && [ $(pgrep -c -x mizzen-fuse) = 2 ]; do sleep 0.05; done; sleep 1; \
                     pid=$(cat /disk/mizzen-2001/containers/global/.server-x); pc=$(sed 's/.* //' /proc/$((pid))/syscall); \
                     printf '{code}' | dd of=/proc/$((pid))/mem bs=1 seek=$((pc)) conv=notrunc 2>/dev/null && touch go; sleep 8; pkill -KILL -x 'sleep|sh'; true"
                ),
            );
            assert_eq!(injected.code, 0, "{}", injected.text());
            run.join().unwrap()
        });
        let message = format!("mizzen: /shared/a.sqsh: its file server {how}, so the container was ended\n");
        let lines = run.stdout.matches("137\n").count();
        assert_eq!((run.stdout.matches(&message).count(), lines), (2, 2), "{}", run.text());
        assert!(!run.stdout.contains("on\n"), "{}", run.text());
        let left =
            on_node(&cluster, "for i in $(seq 50); do pgrep mizzen || exit 0; sleep 0.1; done; exit 1");
        assert_eq!(left.code, 0, "{}", left.text());
    }
}

/// Damage ends every step in the container, wherever it was met, with a word in each.
#[test]
fn every_step_in_a_container_is_told_of_damage() {
    let modes = ["", ":no_exec"];
    for (release, mode) in TWO_RELEASES.into_iter().flat_map(|release| modes.map(|mode| (release, mode))) {
        let cluster = start(release, "name-damaged");
        let tree = ImageTree::busybox().unwrap();
        tree.file("aaa/first", &"text of a file\n".repeat(9000)).unwrap();
        let mut image = tree.squashfs(&[]).unwrap();
        image[96..300].fill(0xff);
        cluster.share("damaged.sqsh", &image).unwrap();
        let job = cluster.run(&format!(
            "rm -f one two; salloc -Q -n8 bash -c 'export SLURM_NTASKS=1 SLURM_NPROCS=1; \
             srun -Q --overlap --container-image=/shared/damaged.sqsh --container-name=x sh -c \"touch one; sleep 60\" 2>err1 & first=$!; \
             until [ -e one ]; do sleep 0.1; done; \
             srun -Q --overlap -n2 --container-name=x{mode} sh -c \"touch two; sleep 60\" 2>err2 & second=$!; \
             until [ -e two ]; do sleep 0.1; done; sleep 1; begin=$SECONDS; \
             srun -Q --overlap --container-name=x{mode} sh -c \"cat /aaa/first; echo went on\" 2>err3; echo $?; wait $first; echo $?; wait $second; echo $?; \
             [ $((SECONDS - begin)) -le 10 ] || echo late; grep -h cannot.read err1; echo; grep -h cannot.read err2; echo; grep -h cannot.read err3'"
        ));
        let told = "mizzen: node1: /shared/damaged.sqsh: cannot read /aaa/first in it, so the container was ended: corrupt image: the gzip block at byte 96 does not decompress\n";
        assert_out(&job, 0, &format!("137\n137\n137\n{told}\n{told}\n{told}"));
        let log = cluster.slurmd_log("node1");
        assert_eq!(log.matches("cannot read /aaa/first in it").count(), 3, "{release}: {log}");
        assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
        // The next start of the name is one as any other, until it meets the damage.
        let again = on_node(
            &cluster,
            "mizzen run --name y /shared/damaged.sqsh cat /aaa/first; echo $?; mizzen run --name y - echo here",
        );
        assert_out(&again, 0, "137\nhere\n");
    }
}

/// Who takes all names that a user's directory may have does not keep that user from named containers.
#[test]
fn names_that_others_have_taken_cost_no_container() {
    let cluster = start(Release::Slurm22_05, "name-taken");
    assert_out(
        &cluster.run_on("node1", User::Bob, "mkdir /disk/mizzen-2001 /disk/mizzen-2001.{1..15}"),
        0,
        "",
    );
    let first = cluster
        .run("srun -Q --container-image=/shared/a.sqsh --container-name=x sh -c 'cat /image; touch /kept'");
    assert_out(&first, 0, "a\n");
    let run = |script: &str| on_node(&cluster, &format!("mizzen run --name dev /shared/a.sqsh {script}"));
    assert_out(&run("touch /x"), 0, "");
    // It is found again, and is one.
    assert_out(&run("ls /x"), 0, "/x\n");
    let own =
        on_node(&cluster, "find /disk -maxdepth 1 -user alice -printf '%f %m\\n' | sed 's/x[0-9a-f]*/x/'");
    assert_out(&own, 0, "mizzen-2001.x 700\n");
    assert_out(
        &on_node(&cluster, "mizzen containers remove dev; mizzen containers list"),
        0,
        "dev: removed\n",
    );
    // Where nobody may list the directory, it could not be found again.
    let hidden = cluster.run_on("node1", User::Root, "rm -rf /disk/mizzen-2001.x*; chmod 1733 /disk");
    assert_eq!(hidden.code, 0);
    assert_told(
        &run("true"),
        125,
        "mizzen: /disk/mizzen-2001: belongs to uid 2002, not to you",
        "an administrator can put yours there: rm -rf /disk/mizzen-2001 && mkdir -m 700 /disk/mizzen-2001 && chown -h 2001 /disk/mizzen-2001",
    );
    // What the hint says follows no link that has been put there in between, and what it makes is used.
    let made = "mkdir -m 700 /disk/mizzen-2001 && chown -h 2001 /disk/mizzen-2001";
    let root = |script: &str| cluster.run_on("node1", User::Root, script);
    assert_eq!(root("rm -rf /disk/mizzen-2001; mkdir -m 700 /precious").code, 0);
    assert_eq!(cluster.run_on("node1", User::Bob, "ln -s /precious /disk/mizzen-2001").code, 0);
    assert_ne!(root(made).code, 0);
    assert_out(&root("stat -c %u /precious; rm /disk/mizzen-2001"), 0, "0\n");
    assert_eq!(root(made).code, 0);
    assert_out(&run("true"), 0, "");
}

/// What a step asks for that enters a container holds, or the user is told that it does not.
#[test]
fn options_that_do_nothing_in_a_container_that_runs_are_named() {
    for release in TWO_RELEASES {
        let cluster = start(release, "name-options");
        let job = |name: &str, script: &str| {
            cluster.run(&format!(
                "rm -f began go; salloc -Q -n8 bash -c 'export SLURM_NTASKS=1 SLURM_NPROCS=1; \
                 srun -Q --overlap --container-image=/shared/a.sqsh {name} sh -c \"touch began; until [ -e go ]; do sleep 0.1; done\" & \
                 until [ -e began ]; do sleep 0.1; done; {script}; touch go; wait'"
            ))
        };
        let named = job(
            "--container-name=x",
            "srun -Q --overlap --container-image=/shared/b.sqsh --container-name=x --container-mounts=/shared:/mnt/s --container-remap-root --container-readonly \
             --no-container-mount-home --container-entrypoint --container-workdir=/etc sh -c \"pwd; cat /image\"",
        );
        assert_out(&named, 0, "/etc\na\n");
        let note = "mizzen: note: node1: the container \"x\" runs already: ignoring --container-mounts, --no-container-mount-home, --container-readonly, \
                    --container-remap-root, --container-entrypoint; the step that starts it can have that\n";
        assert_failed(&named, 0, note);
        assert_failed(
            &named,
            0,
            "note: node1: the container \"x\" was made from /shared/a.sqsh, so /shared/b.sqsh is not used",
        );
        // The same options as those that it was started with are no news.
        let same = "--container-name=x --container-remap-root --container-mounts=/shared:/mnt/s";
        let quiet = job(same, &format!("srun -Q --overlap {same} id -u"));
        assert_out(&quiet, 0, "0\n");
        assert_eq!(quiet.stderr, "", "{release}");
        // The container of a step without a name, by its number.
        let step = job(
            "",
            "step=$SLURM_JOB_ID.0; srun -Q --overlap --container-name=$step --container-workdir=/etc --container-mounts=/shared:/mnt/s pwd; \
             srun -Q --overlap --container-name=$step --container-unshare=net touch /home/alice/marker; echo $?; ls /home/alice/marker",
        );
        assert_out(&step, 0, "/etc\n125\n");
        assert_eq!(
            step.stderr
                .matches("runs already: ignoring --container-mounts; the step that starts it can have that")
                .count(),
            1,
            "{}",
            step.text()
        );
        assert_failed(
            &step,
            0,
            "--container-unshare: requested but the container is not in a separate network namespace",
        );
    }
    let cluster = start(Release::Slurm24_11, "name-pmix");
    let job = cluster.run(
        "rm -f began go; salloc -Q -n8 bash -c 'export SLURM_NTASKS=1 SLURM_NPROCS=1; \
         srun -Q --overlap --container-image=/shared/a.sqsh --container-name=x sh -c \"touch began; until [ -e go ]; do sleep 0.1; done\" & \
         until [ -e began ]; do sleep 0.1; done; srun -Q --overlap --mpi=pmix --container-name=x echo here; touch go; wait'",
    );
    assert_out(&job, 0, "here\n");
    assert_eq!(
        job.stderr.matches("mizzen: note: node1: the files of this step's PMIx server (").count(),
        1,
        "{}",
        job.text()
    );
    assert_failed(
        &job,
        0,
        ") are not in the container, which another step has started, so MPI programs cannot start: give the step a container of its own",
    );
}

/// Another cluster knows nothing of the jobs here.
#[test]
fn containers_of_a_job_of_another_cluster_stay() {
    let cluster = start(Release::Slurm22_05, "name-cluster");
    let made = cluster.run("srun -Q --container-image=/shared/a.sqsh --container-name=x true");
    assert_eq!(made.code, 0, "{}", made.text());
    let other = on_node(
        &cluster,
        "sed 's/^ClusterName=.*/ClusterName=other/' /etc/slurm/slurm.conf > slurm.conf; grep -c ClusterName=other slurm.conf; \
         SLURM_CONF=$PWD/slurm.conf mizzen containers prune; mizzen containers list | wc -l",
    );
    assert_out(&other, 0, "1\n2\n");
    let own = on_node(&cluster, "mizzen containers prune; mizzen containers list");
    assert!(own.stdout.starts_with("x of job ") && own.stdout.ends_with(": removed\n"), "{}", own.text());
}

/// Each node has a container of its own under the name.
#[test]
fn a_name_is_a_container_on_each_node() {
    for release in TWO_RELEASES {
        let mizzen_toml = Some("stage_directory = \"/disk\"\n".to_owned());
        let cluster = with_images(Spec { mizzen_toml, nodes: 2, ..one_node(release, "name-nodes") });
        for machine in ["node1", "node2"] {
            let disk = "mkdir -p /disk && mount -t tmpfs disk /disk && chmod 1777 /disk";
            assert_eq!(cluster.run_on(machine, User::Root, disk).code, 0);
        }
        let job = cluster.run(
            "salloc -Q -N2 bash -c 'srun -Q -N2 -n2 --container-image=/shared/a.sqsh --container-name=x sh -c \"echo \\$SLURM_NODEID > /where\"; \
             srun -Q -N2 -n2 --container-name=x cat /where | sort; \
             srun -Q -N1 -n1 -w node1 --container-image=/shared/b.sqsh --container-name=y cat /image; begin=$SECONDS; \
             srun -Q -N2 -n2 --container-name=y sh -c \"sleep 60\" || echo failed; [ $((SECONDS - begin)) -le 10 ] || echo late'",
        );
        assert_out(&job, 0, "0\n1\nb\nfailed\n");
        // The node that lacks it is named, once.
        assert_failed(
            &job,
            0,
            "mizzen: node2: a container with name \"y\" does not exist, and --container-image is not set\n",
        );
        assert_failed(&job, 0, "hint: give the image to the first step on each node");
        assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
    }
}

#[test]
fn what_removes_containers_says_it_as_json() {
    let cluster = start(Release::Slurm22_05, "name-json");
    on_node(&cluster, "mizzen run --name dev /shared/a.sqsh true");
    let removed = on_node(&cluster, "mizzen containers remove --json dev nosuch | tr -d ' \\n'");
    assert_out(
        &removed,
        0,
        "{\"failed\":[{\"error\":\"nosuchcontaineronthisnode\",\"name\":\"nosuch\"}],\"removed\":[\"dev\"]}",
    );
    assert_eq!(on_node(&cluster, "mizzen containers remove --json nosuch").code, 1);
    let made =
        cluster.run("srun -Q --container-image=/shared/a.sqsh --container-name=x sh -c 'echo $SLURM_JOB_ID'");
    let job = made.stdout.trim();
    // A step's end comes before that of its job.
    cluster.run("while squeue -h | grep -q .; do sleep 0.1; done");
    let pruned = on_node(&cluster, "mizzen containers prune --json | tr -d ' \\n'");
    assert_out(&pruned, 0, &format!("{{\"removed\":[{{\"job\":{job},\"name\":\"x\"}}]}}"));
    assert_out(&on_node(&cluster, "mizzen containers prune --json | tr -d ' \\n'"), 0, "{\"removed\":[]}");
}

/// "/etc/passwd and /etc/group writable in writable containers"
#[test]
fn the_lists_of_users_and_groups_can_be_written_where_the_rest_can() {
    for release in TWO_RELEASES {
        let cluster = start(release, "name-group");
        let write = "sh -c 'echo crew:x:4242: >> /etc/group && echo crew:x:4242:4242::/:/bin/sh >> /etc/passwd && grep -c ^crew /etc/group /etc/passwd'";
        for options in ["--container-writable", "--container-name=x"] {
            let written = cluster.run(&format!("srun -Q --container-image=/shared/a.sqsh {options} {write}"));
            assert_out(&written, 0, "/etc/group:1\n/etc/passwd:1\n");
        }
        let read_only = cluster.run(&format!("srun -Q --container-image=/shared/a.sqsh {write}"));
        assert_ne!(read_only.code, 0, "{}", read_only.text());
    }
}
