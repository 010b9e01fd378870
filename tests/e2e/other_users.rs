//! What another user of the node can do, and what one does to one's own containers: nothing of it reaches anybody else.

use mizzen_tests::check::{
    Emptiness, assert_failed, assert_out, assert_told, machine, one_node, run_in_time, start_with_busybox,
    with_busybox, with_images,
};
use mizzen_tests::copies::digest_of;
use mizzen_tests::images::{ImageTree, c_program};
use mizzen_tests::{Cluster, Release, Spec, User, on_every_release};

on_every_release!(an_exported_variable_is_no_way_to_the_node);

/// Bob mounts a file system of their own on a name, over which `allow_other` lets everybody; its server does not answer.
fn stopped_server(cluster: &Cluster, node: &str, place: &str) {
    let mount = format!(
        "mkdir -p ~/x {place} && bindfs -o allow_other,attr_timeout=0,entry_timeout=0 ~/x {place} && pkill -STOP -u bob -x bindfs"
    );
    assert_out(&cluster.run_on(node, User::Bob, &mount), 0, "");
}

fn two_images(name: &str) -> Cluster {
    let cluster = with_images(Spec { nodes: 1, ..Cluster::spec(name) });
    let everybody = "echo user_allow_other >> /etc/fuse.conf";
    assert_out(&cluster.run_on("node1", User::Root, everybody), 0, "");
    cluster
}

/// A FUSE server says of its files what it likes: whose they are, and when they were written.
#[test]
fn a_directory_that_another_user_serves_is_not_believed() {
    let cluster = two_images("forged-copies");
    let forge = "mizzen stage /shared/a.sqsh > /dev/null && cp -a /var/tmp/mizzen-2002 ~/evil && cd ~/evil && copy=$(ls sha256-*) && \
                 cp -f --remove-destination /shared/b.sqsh $copy && truncate -s $(stat -c %s /shared/a.sqsh) $copy && chmod 400 $copy && touch -d @1 $copy && \
                 mkdir /var/tmp/mizzen-2001 && bindfs -o allow_other --force-user=2001 --force-group=2001 --create-with-perms=u+rw ~/evil /var/tmp/mizzen-2001 && \
                 stat -c '%u %a' /var/tmp/mizzen-2001";
    assert_out(&cluster.run_on("node1", User::Bob, forge), 0, "2001 700\n");
    let step = "srun --container-image=/shared/a.sqsh --container-stage=always cat /image";
    assert_out(&run_in_time(&cluster, step), 0, "a\n");
    // Her copies are elsewhere, and not in his directory.
    let copies = "ls /var/tmp/mizzen-2001.1 | grep -c sha256; ls ~bob/evil | grep -c sha256";
    assert_out(&cluster.run_on("node1", User::Root, copies), 0, "1\n1\n");
}

#[test]
fn a_server_that_does_not_answer_stops_nobody() {
    let cluster = two_images("stopped-servers");
    stopped_server(&cluster, "node1", "/var/tmp/mizzen-2001");
    stopped_server(&cluster, "node1", "/var/tmp/mizzen-2001-broadcast-x");
    let step = "srun --container-image=/shared/a.sqsh --container-stage=always cat /image";
    assert_out(&run_in_time(&cluster, step), 0, "a\n");
    let listed = cluster.run_on("node1", User::Alice, "mizzen cache list");
    assert!(listed.code == 0 && listed.stdout.contains("/shared/a.sqsh"), "{}", listed.text());
    // Changes on disk, as before Linux 6.6.
    let disk = "mkdir /var/tmp/alice && mount -t tmpfs disk /var/tmp/alice && chmod 1777 /var/tmp/alice";
    assert_out(&cluster.run_on("node1", User::Root, disk), 0, "");
    stopped_server(&cluster, "node1", "/var/tmp/alice/mizzen-abcdef");
    let writable = "TMPDIR=/var/tmp/alice strace -o /dev/null -e inject=fsetxattr:error=EOPNOTSUPP mizzen run --writable /shared/b.sqsh cat /image";
    let run = cluster.run_on("node1", User::Alice, writable);
    assert_out(&run, 0, "b\n");
    cluster.run_on("node1", User::Root, "pkill -KILL -x bindfs");
}

#[test]
fn mounts_of_others_below_tmp_do_no_harm() {
    let cluster = with_busybox("mounts-of-others");
    let run = "strace -o /dev/null -e inject=mount_setattr:error=ENOSYS mizzen run /shared/bb.sqsh echo ran";
    // One that does not answer, with another one below it.
    assert_out(&cluster.run_on("ctl", User::Root, "echo user_allow_other >> /etc/fuse.conf"), 0, "");
    let nested = "mkdir -p ~/x/sub /tmp/n && bindfs -o allow_other,attr_timeout=0,entry_timeout=0 ~/x /tmp/n && \
                  bindfs -o allow_other ~/x /tmp/n/sub && kill -STOP $(pgrep -u bob -o -x bindfs)";
    assert_out(&cluster.run_on("ctl", User::Bob, nested), 0, "");
    assert_out(&cluster.run_on("ctl", User::Alice, run), 0, "ran\n");
    // Files of mizzen's own are as they are with newer kernels.
    let accounts = run.replace(
        "echo ran",
        "sh -c 'grep -E \" /etc/(passwd|group) \" /proc/self/mounts | grep -c \" ro,\"'",
    );
    assert_out(&cluster.run_on("ctl", User::Alice, &accounts), 0, "2\n");
    assert_out(&cluster.run_on("ctl", User::Root, "pkill -KILL -x bindfs; umount -l /tmp/n"), 0, "");
    for place in ["/tmp/b/m", "/tmp/$(printf '\\377')"] {
        let mount = format!(
            "mkdir -p ~/x; mkdir -p -m 700 /tmp/b; mkdir {place}; bindfs --no-allow-other ~/x {place}"
        );
        assert_out(&cluster.run_on("ctl", User::Bob, &mount), 0, "");
        assert_out(&cluster.run_on("ctl", User::Alice, run), 0, "ran\n");
        // What is asked to be read-only is, or there is no container.
        let read_only =
            run.replace("mizzen run", "mizzen run -m /tmp:/mnt:ro").replace("echo ran", "touch /mnt/x");
        let refused = cluster.run_on("ctl", User::Alice, &read_only);
        assert_failed(&refused, 125, "cannot restrict the mount of /mnt: Permission denied");
        let unmount = "pkill -u bob -x bindfs; while grep -q fuse.bindfs /proc/mounts; do sleep 0.05; done";
        assert_out(&cluster.run_on("ctl", User::Root, unmount), 0, "");
    }
}

/// The number of a namespace is another's when a server dies long after its container.
#[test]
fn a_server_that_dies_late_ends_no_other_container() {
    let cluster = with_busybox("late-death");
    let rounds = cluster.run(
        "for round in 1 2 3; do mizzen run /shared/bb.sqsh sleep 60 & first=$!; \
         until pgrep -u alice -x sleep > /dev/null; do sleep 0.05; done; server=$(pgrep -u alice -x mizzen-fuse); \
         number=$(readlink /proc/$first/ns/mnt); kill -STOP $server; kill -KILL $first; wait $first; sleep 0.2; others=; \
         for other in $(seq 20); do mizzen run /shared/bb.sqsh sh -c 'sleep 2; echo survived' & others=\"$others $!\"; \
         until [ \"$(cat /proc/$!/comm)\" = sh ]; do sleep 0.02; done; \
         [ \"$(readlink /proc/$!/ns/mnt)\" != \"$number\" ] || break; done; \
         kill -KILL $server; for other in $others; do wait $other || echo $?; done; done 2> /dev/null",
    );
    assert!(rounds.stdout.lines().count() >= 3, "{}", rounds.text());
    assert!(rounds.stdout.lines().all(|line| line == "survived"), "{}", rounds.text());
}

/// Who kills the watcher too leaves no stopped process behind.
#[test]
fn nothing_stays_stopped() {
    let cluster = with_busybox("stopped");
    let killed = run_in_time(
        &cluster,
        "mizzen run /shared/bb.sqsh sleep 1000 & until pgrep -u alice -x sleep > /dev/null; do sleep 0.05; done; \
         watcher=$(pgrep -u alice -x mizzen-watch); pkill -KILL -u alice -x mizzen-fuse; \
         until grep -q '^State:.T' /proc/$!/status; do sleep 0.01; done; kill -KILL $watcher; wait $!; echo $?; pgrep -u alice sleep",
    );
    assert_eq!(killed.stdout, "137\n", "{}", killed.text());
}

/// A program whose first thread has ended cannot be looked at through that.
#[test]
fn a_program_without_its_first_thread_is_ended() {
    let cluster = machine("first-thread");
    let tree = ImageTree::busybox().unwrap();
    tree.program("bin/no-first-thread", "").unwrap();
    std::fs::write(tree.path("bin/no-first-thread"), c_program("no-first-thread").unwrap()).unwrap();
    cluster.share("thread.sqsh", &tree.squashfs(&[]).unwrap()).unwrap();
    let ended = run_in_time(
        &cluster,
        "mizzen run /shared/thread.sqsh no-first-thread & until grep -q '^State:.Z' /proc/$!/status; do sleep 0.05; done; \
         pkill -KILL -u alice -x mizzen-fuse; wait $!; echo $?",
    );
    assert_eq!(ended.stdout, "137\n", "{}", ended.text());
    assert_eq!(ended.stderr.matches("its file server was killed").count(), 1, "{}", ended.text());
}

/// Licensed programs of the node: the user may execute them, and the kernel shows nothing of them.
fn with_licensed(name: &str) -> Cluster {
    let cluster = with_busybox(name);
    let licensed = "mkdir /opt/licensed && cp $(command -v sleep) /opt/licensed/solver && chmod 711 /opt/licensed/solver";
    for machine in ["ctl", "node1"] {
        assert_out(&cluster.run_on(machine, User::Root, licensed), 0, "");
    }
    cluster
}

/// What the program needs inside.
const LICENSED: [&str; 4] =
    ["/opt/licensed:/opt/licensed", "/lib:/lib", "/lib64:/lib64", "/usr/lib:/usr/lib"];

/// Kills the file server when `count` of them run. Prints who of them is left after five seconds, and how the job in the
/// background ends.
fn kill_server(count: u32) -> String {
    format!(
        "until [ \"$(pgrep -c -x solver)\" = {count} ]; do sleep 0.05; done; pkill -KILL -u alice -x mizzen-fuse; \
         for i in $(seq 50); do pgrep -x solver > /dev/null || break; sleep 0.1; done; pgrep -l -x solver; pkill -KILL -x solver; \
         wait $!; echo $?"
    )
}

#[test]
fn a_program_that_cannot_be_read_is_ended() {
    let cluster = with_licensed("unreadable");
    let empty = Emptiness::of(&cluster, &["ctl"]);
    // Alone; a child, and one that has left its parent and its session; in the kinds of roots that there are, and in a
    // namespace of mounts of its own, which any user can make.
    let child = "sh -c \"/opt/licensed/solver 1000 & (setsid /opt/licensed/solver 1000 &) ; wait\"";
    let apart = "unshare -U -m /opt/licensed/solver 1000";
    for (count, options, program) in [
        (1, "", "/opt/licensed/solver 1000"),
        (2, "", child),
        (2, "--writable", child),
        (2, "--unshare pid", child),
        (2, "-m /shared/bb.sqsh:/mnt:squashfs", child),
        (1, "", &format!("sh -c \"{apart}; true\"")),
    ] {
        let ended = run_in_time(
            &cluster,
            &format!(
                "mizzen run -m {} {options} /shared/bb.sqsh {program} & {}",
                LICENSED.join(" -m "),
                kill_server(count)
            ),
        );
        assert_eq!(ended.stdout, "137\n", "{options} {program}: {}", ended.text());
        // Of one that is alone the kernel does not give the standard error.
        let told = ended.stderr.matches("its file server was killed").count();
        assert_eq!(told, usize::from(program.starts_with("sh")), "{options} {program}: {}", ended.text());
        empty.assert_again(&cluster, &format!("{options} {program}"));
    }
}

/// The same for all tasks of a step, of which the watcher holds the first alone.
#[test]
fn a_step_whose_programs_cannot_be_read_is_ended() {
    let cluster = with_licensed("unreadable-step");
    let empty = Emptiness::of(&cluster, &["node1"]);
    let mounts = LICENSED.join(",");
    let step = format!("srun -n3 --container-mounts={mounts} --container-image=/shared/bb.sqsh");
    for (count, program) in [
        (3, "/opt/licensed/solver 1000"),
        (2, "sh -c '[ $SLURM_PROCID = 0 ] || exec /opt/licensed/solver 1000; sleep 1000'"),
    ] {
        let ended = run_in_time(&cluster, &format!("{step} {program} & {}", kill_server(count)));
        assert_eq!(ended.stdout, "137\n", "{program}: {}", ended.text());
        let told = "mizzen: node1: /shared/bb.sqsh: its file server was killed, so the container was ended";
        assert_eq!(ended.stderr.matches(told).count(), 1, "{program}: {}", ended.text());
        empty.assert_again(&cluster, program);
    }
}

/// What names the container on the node is no place for a variable of the user's own.
fn an_exported_variable_is_no_way_to_the_node(release: Release) {
    let cluster = start_with_busybox(one_node(release, "exported"));
    let where_am_i = "sh -c '[ -e /shared ] && echo host || echo inside'";
    for variable in ["SLURM_CONTAINER", "SLURM_MIZZEN_REQUEST", "SLURM_SPANK_MIZZEN_REQUEST"] {
        let image = "--container-image=/shared/bb.sqsh";
        for command in [
            format!("srun --export=ALL,{variable}=none {image} {where_am_i}"),
            format!("sbatch --quiet --export=ALL,{variable}=none {image} --wrap true"),
            format!("srun --export=\"ALL,'{variable}=none'\" {image} {where_am_i}"),
            format!("SLURM_EXPORT_ENV='ALL, {variable}=none' srun {image} {where_am_i}"),
        ] {
            assert_failed(
                &cluster.run(&command),
                1,
                &format!("--export: \"{variable}=none\" beside a container that is asked for"),
            );
        }
    }
    let other = "srun --export=ALL,SLURM_CONTAINERS=none --container-image=/shared/bb.sqsh";
    assert_out(&cluster.run(&format!("{other} {where_am_i}")), 0, "inside\n");
}

#[test]
fn a_pinned_image_of_somebody_elses_cannot_change_while_it_runs() {
    let cluster = two_images("pinned-change");
    let tree = ImageTree::busybox().unwrap();
    tree.program("bin/late", "#!/bin/sh\necho genuine\n").unwrap();
    let image = tree.squashfs(&["-noI", "-noD", "-noF", "-noX"]).unwrap();
    cluster.share("pin.sqsh", &image).unwrap();
    let digest = digest_of(&cluster, "/shared/pin.sqsh");
    cluster.run_as_root("chown bob /shared/pin.sqsh");
    let change = "perl -0777 -pe 's/echo genuine/echo changed/' /shared/pin.sqsh > /tmp/changed && cat /tmp/changed > /shared/pin.sqsh";
    cluster.share("change", change.as_bytes()).unwrap();
    let running = cluster.run_on(
        "ctl",
        User::Root,
        &format!(
            "runuser -u alice -- srun -Q --chdir=/tmp --container=/shared/pin.sqsh@{digest} \
             sh -c 'echo started; sleep 3; /bin/late' & sleep 1.5; runuser -u bob -- sh /shared/change; wait"
        ),
    );
    assert_out(&running, 0, "started\ngenuine\n");
    assert_failed(
        &cluster.run(&format!("srun -Q --container=/shared/pin.sqsh@{digest} true")),
        125,
        "its content is ",
    );
}

#[test]
fn a_planted_file_does_not_take_the_place_of_the_sites_image() {
    let cluster = two_images("planted-name");
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", "image_folders = [\"/sw\"]\n").unwrap();
    for machine in ["ctl", "node1"] {
        cluster.run_on(machine, User::Root, "mkdir /sw; cp /shared/a.sqsh /sw/tf.sqsh");
    }
    assert_out(&cluster.run("srun -Q --container=tf.sqsh cat /image"), 0, "a\n");
    cluster.run_on("ctl", User::Bob, "cp /shared/b.sqsh /shared/tf.sqsh");
    assert_told(
        &cluster.run("cd /shared; srun -Q --container=tf.sqsh cat /image"),
        1,
        "--container: tf.sqsh is an image of the site's, and a file here that others can have made",
        "write /sw/tf.sqsh for the site's, ./tf.sqsh for the file",
    );
    assert_out(&cluster.run("cd /shared; srun -Q --container=./tf.sqsh cat /image"), 0, "b\n");
    assert_out(&cluster.run("cp /shared/b.sqsh tf.sqsh; srun -Q --container=tf.sqsh cat /image"), 0, "b\n");
}

#[test]
fn an_import_of_somebody_elses_directory_follows_none_of_its_links() {
    let cluster = two_images("import-swap");
    cluster.run("mkdir -m 700 .ssh; echo private > .ssh/id_rsa");
    let tree =
        "mkdir -p /shared/root/bin /shared/root/z/.ssh; head -c 30000000 /dev/urandom > /shared/root/z/!big";
    assert_out(&cluster.run_on("ctl", User::Bob, tree), 0, "");
    // The directory is exchanged while the importer reads what comes before it.
    let swap = "runuser -u alice -- strace -f -o /dev/null -P /shared/root/z/!big -e inject=open,openat,fstat:delay_exit=3000000 \
                mizzen import -o /home/alice/new.sqsh /shared/root & sleep 2; \
                runuser -u bob -- sh -c 'mv /shared/root/z /shared/root/old; ln -s /home/alice /shared/root/z'; wait; \
                runuser -u alice -- mizzen export /home/alice/new.sqsh | tar -t | grep id_rsa";
    let done = cluster.run_as_root(swap);
    assert_out(&done, 1, "");
    assert!(done.stderr.contains("cannot read /z/.ssh in it: "), "{}", done.text());
}

/// slurmd waits until nobody has the output of a prolog or epilog open, and a user's process can hand on what it has. So the lines
/// that the manual shows give it nothing of slurmd's.
#[test]
fn a_prologs_user_cannot_keep_slurmds_output() {
    let manual = include_str!("../../docs/admins.md").replace("\\\n", "");
    let lines: Vec<&str> =
        manual.lines().filter(|line| line.contains("runuser -u \"$SLURM_JOB_USER\"")).collect();
    assert_eq!(lines.len(), 2, "{lines:?}");
    let cluster = with_images(one_node(Release::Slurm22_05, "prolog-output"));
    for line in lines {
        let (start, rest) = line.split_once("/usr/bin/mizzen").unwrap();
        let (_, streams) = rest.split_once('<').unwrap_or(("", "/dev/null"));
        // In place of mizzen, a process that stays.
        let script = format!("{start} sh -c 'touch /tmp/started; sleep 30 & sleep 0.2' <{streams}");
        cluster.write_everywhere("/root/line", &script).unwrap();
        let done = cluster.run_on(
            "node1",
            User::Root,
            "SLURM_JOB_USER=alice timeout 15 sh -c 'sh /root/line | cat'; echo $?; ls /tmp/started; rm -f /tmp/started; pkill -x sleep",
        );
        assert_out(&done, 0, "0\n/tmp/started\n");
        // And one that is stopped, as its user can do with it: it is waited for as long as the line says.
        let (before, after) = start.split_once("timeout -s KILL ").unwrap();
        let (seconds, after) = after.split_once(' ').unwrap();
        assert!((10..=600).contains(&seconds.parse::<u32>().unwrap()), "{line}");
        let script =
            format!("{before}timeout -s KILL 2 {after} sh -c 'touch /tmp/started; kill -STOP $$' <{streams}");
        cluster.write_everywhere("/root/line", &script).unwrap();
        let done = cluster.run_on(
            "node1",
            User::Root,
            "SLURM_JOB_USER=alice timeout 15 sh -c 'sh /root/line | cat'; echo $?; ls /tmp/started; rm -f /tmp/started; pkill -KILL -u alice; true",
        );
        assert_out(&done, 0, "0\n/tmp/started\n");
    }
}
