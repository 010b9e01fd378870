//! File systems that another user serves with FUSE, over which `allow_other` lets everybody: what their server says of its files is
//! not believed, and none is asked that may not answer.

use mizzen_tests::check::{assert_failed, assert_out, assert_told, run_in_time, with_busybox, with_images};
use mizzen_tests::copies::digest_of;
use mizzen_tests::images::ImageTree;
use mizzen_tests::registry::{ClusterRegistry, Layout, LocalRegistry};
use mizzen_tests::{Cluster, Release, Spec, User};

const HINT: &str = "whoever serves a file system (FUSE) decides what is in it; use another directory, or ask an administrator to remove it";

/// One node, and on each machine a /scratch of its own in which everybody can make names.
fn start(name: &str, mizzen_toml: Option<&str>) -> Cluster {
    start_release(name, mizzen_toml, Release::Slurm22_05)
}

fn start_release(name: &str, mizzen_toml: Option<&str>, release: Release) -> Cluster {
    let spec = Spec { nodes: 1, release, ..Cluster::spec(name) };
    let cluster = with_images(Spec { mizzen_toml: mizzen_toml.map(str::to_owned), ..spec });
    for machine in ["ctl", "node1"] {
        let scratch = "echo user_allow_other >> /etc/fuse.conf; mkdir -m 1777 /scratch; chmod 1777 /scratch";
        assert_out(&cluster.run_on(machine, User::Root, scratch), 0, "");
    }
    cluster
}

/// The same with a registry whose image `lab/app:1` says that it is genuine, and a store that every user makes in /scratch.
fn with_store(name: &str) -> (Cluster, LocalRegistry, ClusterRegistry) {
    let app = ImageTree::busybox().unwrap();
    app.file("image", "genuine\n").unwrap();
    let layout = Layout::new().unwrap();
    layout.image("one", &[&app], &[]).unwrap();
    let filled = LocalRegistry::start().unwrap();
    filled.push(&layout, "one", "lab/app:1", &[]).unwrap();
    let toml = "image_store = \"/scratch/%u/images\"\n[registries.\"ctl:5000\"]\nplain_http = true\n";
    let cluster = start(name, Some(toml));
    let registry = filled.serve_on(&cluster, 5000, None).unwrap();
    (cluster, filled, registry)
}

/// Bob serves a directory of his as if it were this user's, whatever is in it.
fn serve(cluster: &Cluster, machine: &str, directory: &str, place: &str, user: &str) {
    let mount = format!(
        "mkdir -p {place} && bindfs -o allow_other,attr_timeout=0,entry_timeout=0 --force-user={user} --force-group={user} \
         --create-with-perms=u+rw {directory} {place} && stat -c %U {place}"
    );
    let owner = if user == "2001" { "alice\n" } else { "root\n" };
    assert_out(&cluster.run_on(machine, User::Bob, &mount), 0, owner);
}

/// His server does not answer any more.
fn stop(cluster: &Cluster) {
    assert_out(&cluster.run_on("ctl", User::Bob, "pkill -STOP -u bob -x bindfs"), 0, "");
}

/// There is no server of his any more, and nothing of his in the place.
fn end(cluster: &Cluster, machine: &str, place: &str) {
    let ended = format!("pkill -KILL -u bob -x bindfs; umount -l {place}; rmdir {place}");
    assert_out(&cluster.run_on(machine, User::Root, &ended), 0, "");
}

const IMAGE: &str = "docker://ctl:5000/lab/app:1";

/// Bob makes a store for alice that has his own file under the name of the image.
fn forge_store(cluster: &Cluster) {
    let forge = format!(
        "mizzen import {IMAGE} > /dev/null 2>&1 && mkdir -p -m 755 ~/evil && mkdir -m 700 ~/evil/images && \
         cp /shared/b.sqsh ~/evil/images/$(basename /scratch/bob/images/*.sqsh) && chmod 644 ~/evil/images/*"
    );
    assert_out(&cluster.run_on("ctl", User::Bob, &forge), 0, "");
}

#[test]
fn a_store_that_another_user_serves_is_not_used() {
    let (cluster, _filled, _registry) = with_store("served-store");
    forge_store(&cluster);
    let refused = "the image store: /scratch/alice/images is not safe from other users: \
                   /scratch/alice lies on a file system that uid 2002 serves";
    serve(&cluster, "ctl", "~/evil", "/scratch/alice", "2001");
    let is_refused = || {
        for (command, code) in [
            (format!("mizzen run {IMAGE} cat /image"), 125),
            (format!("srun -Q --container={IMAGE} cat /image"), 1),
            (format!("mizzen import {IMAGE}"), 1),
            ("mizzen images prune --keep 1".to_owned(), 1),
        ] {
            let done = run_in_time(&cluster, &format!("timeout -s KILL 10 {command}"));
            assert_told(&done, code, refused, HINT);
            assert_eq!(done.stdout, "", "{command}");
        }
        let listed = run_in_time(&cluster, "timeout -s KILL 10 mizzen images");
        assert_out(&listed, 0, &format!("{}\n", refused.trim_start_matches("the image store: ")));
    };
    is_refused();
    stop(&cluster);
    is_refused();
    end(&cluster, "ctl", "/scratch/alice");
    // The login node is honest; on the node bob was there first.
    for stopped in [false, true] {
        serve(&cluster, "node1", "~/evil", "/scratch/alice", "2001");
        if stopped {
            stop(&cluster);
        }
        let done =
            run_in_time(&cluster, &format!("timeout -s KILL 12 srun -Q --container={IMAGE} cat /image"));
        let place = "is not safe from other users: /scratch/alice lies on a file system that uid 2002 serves";
        assert_failed(&done, 125, place);
        assert_failed(&done, 125, &format!("mizzen: hint: {HINT}"));
        assert_eq!(done.stdout, "", "{}", done.text());
        end(&cluster, "node1", "/scratch/alice");
    }
    // Without him both work.
    assert_out(&cluster.run(&format!("mizzen run {IMAGE} cat /image")), 0, "genuine\n");
}

#[test]
fn a_layer_cache_that_another_user_serves_is_not_used() {
    let (cluster, _filled, _registry) = with_store("served-layers");
    let cache = "mkdir -m 700 ~/cache && XDG_CACHE_HOME=~/cache mizzen import -o ~/x.sqsh docker://ctl:5000/lab/app:1 > /dev/null 2>&1; \
                 ls ~/cache/mizzen/layers | wc -l";
    assert_out(&cluster.run_on("ctl", User::Bob, cache), 0, "1\n");
    serve(&cluster, "ctl", "~/cache", "/scratch/cache", "2001");
    let refused = "the layer cache: /scratch/cache/mizzen/layers is not safe from other users: \
                   /scratch/cache lies on a file system that uid 2002 serves";
    for stopped in [false, true] {
        if stopped {
            stop(&cluster);
        }
        let import =
            format!("XDG_CACHE_HOME=/scratch/cache timeout -s KILL 10 mizzen import -o new.sqsh {IMAGE}");
        assert_told(&run_in_time(&cluster, &import), 1, refused, HINT);
        let listed = run_in_time(
            &cluster,
            "XDG_CACHE_HOME=/scratch/cache timeout -s KILL 10 mizzen cache list; ls new.sqsh",
        );
        assert_eq!((listed.code, listed.stdout.contains("layer")), (2, false), "{}", listed.text());
    }
    end(&cluster, "ctl", "/scratch/cache");
}

#[test]
fn a_file_that_another_user_serves_is_not_ones_own() {
    let cluster = start("served-names", Some("image_folders = [\"/sw\"]\n"));
    for machine in ["ctl", "node1"] {
        assert_out(&cluster.run_on(machine, User::Root, "mkdir /sw; cp /shared/a.sqsh /sw/tf.sqsh"), 0, "");
    }
    assert_out(&cluster.run_on("ctl", User::Bob, "mkdir ~/evil && cp /shared/b.sqsh ~/evil/tf.sqsh"), 0, "");
    serve(&cluster, "ctl", "~/evil", "/scratch/data", "2001");
    assert_told(
        &cluster.run("cd /scratch/data; srun -Q --container=tf.sqsh cat /image"),
        1,
        "--container: tf.sqsh is an image of the site's, and a file here that others can have made",
        "write /sw/tf.sqsh for the site's, ./tf.sqsh for the file",
    );
    // Root's files neither: no configuration is read from there.
    end(&cluster, "ctl", "/scratch/data");
    assert_out(
        &cluster.run_on("ctl", User::Bob, "echo 'slurm_commands = false' > ~/evil/mizzen.toml"),
        0,
        "",
    );
    serve(&cluster, "ctl", "~/evil", "/scratch/data", "0");
    assert_failed(
        &cluster.run("mizzen check-config /scratch/data/mizzen.toml"),
        1,
        "/scratch/data/mizzen.toml: /scratch/data lies on a file system that uid 2002 serves",
    );
    end(&cluster, "ctl", "/scratch/data");
}

/// An image of which a part is read late, its digest, and how bob changes that part.
fn with_pinned(cluster: &Cluster) -> String {
    let tree = ImageTree::busybox().unwrap();
    tree.program("bin/late", "#!/bin/sh\necho genuine\n").unwrap();
    let image = tree.squashfs(&["-noI", "-noD", "-noF", "-noX"]).unwrap();
    cluster.share("pin.sqsh", &image).unwrap();
    let change = "perl -0777 -pe 's/echo genuine/echo changed/' /shared/pin.sqsh > ~/changed && cat ~/changed > ~/evil/pin.sqsh";
    cluster.share("change", change.as_bytes()).unwrap();
    for machine in ["ctl", "node1"] {
        let own = "mkdir -p ~/evil && cp /shared/pin.sqsh ~/evil/";
        assert_out(&cluster.run_on(machine, User::Bob, own), 0, "");
    }
    digest_of(cluster, "/shared/pin.sqsh")
}

#[test]
fn a_pinned_image_that_another_user_serves_cannot_change_while_it_runs() {
    // Its bindfs can do without the kernel's cache, so that what bob writes is seen.
    let cluster = start_release("served-pinned", None, Release::Slurm26_05);
    let digest = with_pinned(&cluster);
    // He says that it is root's, and that nobody can write to it.
    let mount = "mkdir /scratch/pin && bindfs --direct-io -o allow_other,attr_timeout=0,entry_timeout=0 --force-user=root \
                 --force-group=root -p a=rX ~/evil /scratch/pin && stat -c '%U %a' /scratch/pin/pin.sqsh";
    assert_out(&cluster.run_on("ctl", User::Bob, mount), 0, "root 444\n");
    let running = cluster.run_on(
        "ctl",
        User::Root,
        &format!(
            "cd /home/alice; runuser -u alice -- mizzen run /scratch/pin/pin.sqsh@{digest} sh -c 'echo started; sleep 3; /bin/late' & \
             sleep 1.5; runuser -l bob -c 'sh /shared/change'; wait"
        ),
    );
    assert_out(&running, 0, "started\ngenuine\n");
    assert_failed(
        &cluster.run(&format!("mizzen run /scratch/pin/pin.sqsh@{digest} true")),
        125,
        "its content is ",
    );
    end(&cluster, "ctl", "/scratch/pin");
}

/// Of an image that others can write to a copy is used, or nothing, also where a copy was asked for.
#[test]
fn a_pinned_image_of_somebody_elses_is_not_used_where_it_is() {
    let cluster = start("pinned-uncopied", None);
    let digest = with_pinned(&cluster);
    assert_out(&cluster.run_on("ctl", User::Bob, "cp /shared/pin.sqsh /shared/bobs.sqsh"), 0, "");
    let all = "mkdir /var/tmp/mizzen-2001; for i in $(seq 15); do mkdir /var/tmp/mizzen-2001.$i; done";
    for machine in ["ctl", "node1"] {
        assert_out(&cluster.run_on(machine, User::Bob, all), 0, "");
    }
    let image = format!("/shared/bobs.sqsh@{digest}");
    // A name that nobody could foresee is left.
    let copied =
        cluster.run(&format!("mizzen run {image} /bin/late && ls -d /var/tmp/mizzen-2001.x*/sha256-*"));
    assert_eq!((copied.code, copied.stdout.lines().count()), (0, 2), "{}", copied.text());
    assert!(copied.stdout.starts_with("genuine\n"), "{}", copied.text());
    // It would not be found again where the directory cannot be listed.
    for machine in ["ctl", "node1"] {
        assert_out(&cluster.run_on(machine, User::Root, "chmod 1733 /var/tmp"), 0, "");
    }
    let refused = "/var/tmp/mizzen-2001: belongs to uid 2002, not to you";
    for policy in ["auto", "always"] {
        let run = cluster.run(&format!("mizzen run --stage={policy} {image} /bin/late"));
        let hint = "others can change this image while it runs, so with a digest only a copy of it is used; copy it to a directory of your own";
        assert_told(&run, 125, &format!("mizzen: /shared/bobs.sqsh: {refused}"), hint);
        assert_eq!(run.stdout, "", "{policy}: {}", run.text());
    }
    for policy in ["auto", "always", "bcast"] {
        let step = cluster.run(&format!("srun -Q --container-stage={policy} --container={image} /bin/late"));
        assert_eq!((step.code, step.stdout.as_str()), (125, ""), "{policy}: {}", step.text());
        assert!(
            step.stderr.contains(&format!("mizzen: node1: /shared/bobs.sqsh: {refused}")),
            "{}",
            step.text()
        );
    }
    // What nobody else can write to is used where it is, and so is what the user wants there.
    let own = cluster
        .run(&format!("cp /shared/pin.sqsh . && mizzen run --stage=always pin.sqsh@{digest} /bin/late"));
    assert_out(&own, 0, "genuine\n");
    assert_out(&cluster.run(&format!("mizzen run --stage=never {image} /bin/late")), 0, "genuine\n");
}

/// The root of another process is a directory of another mount namespace, and its path is that of the host's root here.
#[test]
fn the_root_of_another_process_does_not_become_the_hosts() {
    let cluster = with_busybox("process-root");
    let done = cluster.run(
        "mizzen run /shared/bb.sqsh sleep 77 & until P=$(pgrep -u alice -x sleep); do sleep 0.05; done; \
         mizzen run /proc/$P/root touch /home/alice/marker; echo $?; ls marker; kill $P",
    );
    assert_eq!(done.stdout, "125\n", "{}", done.text());
    assert!(
        done.stderr.contains("mizzen: / is another directory than the image that was opened"),
        "{}",
        done.text()
    );
    let hint = "mizzen: hint: an image must be a directory of this node's, not of another process's (/proc/PID/root), and stay where it is";
    assert!(done.stderr.contains(hint), "{}", done.text());
}

/// Bob mounts a server that does not answer on each of these names.
fn stopped_on(cluster: &Cluster, machine: &str, places: &[&str]) {
    let places = places.join(" ");
    let mount = format!(
        "mkdir -p ~/stopped && for p in {places}; do mkdir -p $p && \
         bindfs -o allow_other,attr_timeout=0,entry_timeout=0 ~/stopped $p || exit; done && pkill -STOP -u bob -x bindfs"
    );
    assert_out(&cluster.run_on(machine, User::Bob, &mount), 0, "");
}

#[test]
fn a_server_on_a_name_that_somebody_could_have_drawn_stops_nobody() {
    let cluster = start("served-drawn", None);
    for machine in ["ctl", "node1"] {
        let names = ["2001", "0"].map(|uid| format!("/var/tmp/mizzen-{uid}.xdead"));
        stopped_on(&cluster, machine, &names.each_ref().map(String::as_str));
        // The drawn names are looked for where one of the others is taken.
        assert_out(
            &cluster.run_on(machine, User::Bob, "mkdir /var/tmp/mizzen-2001 /var/tmp/mizzen-0"),
            0,
            "",
        );
    }
    let step =
        "timeout -s KILL 12 srun -Q --container-image=/shared/a.sqsh --container-stage=always cat /image";
    assert_out(&run_in_time(&cluster, step), 0, "a\n");
    let staged = "timeout -s KILL 12 mizzen run --stage=always /shared/a.sqsh cat /image";
    assert_out(&run_in_time(&cluster, staged), 0, "a\n");
    for (user, command) in [
        (User::Alice, "mizzen cache list"),
        (User::Alice, "mizzen containers list"),
        (User::Root, "mizzen cache list"),
        (User::Root, "mizzen containers list"),
        (User::Root, "mizzen stage /shared/a.sqsh"),
    ] {
        let done = cluster.run_on("ctl", user, &format!("timeout -s KILL 10 {command} > /dev/null"));
        assert_eq!(done.code, 0, "{command}: {}", done.text());
    }
}

/// Each such name is opened to learn whose it is, so others could make a start wait with very many.
#[test]
fn very_many_names_that_somebody_could_have_drawn_cost_copies_and_no_time() {
    let cluster = start("drawn-many", None);
    let many = "mkdir /var/tmp/mizzen-2001 /var/tmp/mizzen-2001.{1..15} && cd /var/tmp && seq -f mizzen-2001.x%05.0f 5000 | xargs mkdir";
    assert_out(&cluster.run_on("ctl", User::Bob, many), 0, "");
    let looked = "strace -f -o trace -e trace=openat,newfstatat,statx mizzen run --stage=always /shared/a.sqsh cat /image; \
                  [ $(grep -c '\"mizzen-2001.x' trace) -le 5000 ] || echo many; find /var/tmp -maxdepth 1 -user alice";
    let run = run_in_time(&cluster, looked);
    assert_out(&run, 0, "a\n");
    assert!(run.stderr.contains("/var/tmp/mizzen-2001: belongs to uid 2002, not to you"), "{}", run.text());
}

#[test]
fn a_server_on_an_images_name_stops_nobody() {
    let cluster = start("served-image-names", Some("image_folders = [\"/sw\"]\n"));
    assert_out(&cluster.run_on("ctl", User::Root, "mkdir /sw; cp /shared/a.sqsh /sw/tf.sqsh"), 0, "");
    let places = ["/scratch/tf.sqsh", "/scratch/docker:", "/scratch/busybox", "'/scratch/ctl:5000#lab'"];
    stopped_on(&cluster, "ctl", &places);
    let served = |name: &str| {
        format!(
            "/scratch/{name} is not safe from other users: /scratch/{} lies on a file system that uid 2002 serves",
            name.split('/').next().unwrap_or_default()
        )
    };
    let planted = "tf.sqsh is an image of the site's, and a file here that others can have made".to_owned();
    for (name, message, hint) in [
        ("tf.sqsh", planted, "write /sw/tf.sqsh for the site's, ./tf.sqsh for the file"),
        ("busybox", served("busybox"), "write ./busybox if you mean it"),
        (
            "ctl:5000#lab/app",
            served("ctl:5000#lab/app"),
            "write ./ctl:5000#lab/app for the file, docker://ctl:5000#lab/app for the registry",
        ),
    ] {
        for (command, code) in [("srun --container=", 1), ("mizzen run ", 125)] {
            let run = format!("cd /scratch; timeout -s KILL 10 {command}'{name}' true");
            assert_told(&run_in_time(&cluster, &run), code, &message, hint);
        }
    }
    // A scheme means the registry, whatever is here.
    let registry = "cd /scratch; timeout -s KILL 10 srun --container=docker://localhost:1/busybox true";
    assert_failed(
        &run_in_time(&cluster, registry),
        1,
        "mizzen: --container: docker://localhost:1/busybox:latest: localhost:1: cannot connect",
    );
}

/// As on NFS, a file has a temporary name there, and old ones are looked for.
#[test]
fn a_server_on_a_temporary_name_stops_no_import() {
    let cluster = start("served-temporary", None);
    let nfs = "mkdir /run/backing /scratch/nfs && chmod 1777 /run/backing && bindfs -o allow_other /run/backing /scratch/nfs && \
               mkdir /scratch/nfs/.mizzen-tmp-dead /scratch/nfs/taken.sqsh && chown bob /scratch/nfs/*.sqsh /scratch/nfs/.mizzen*";
    assert_out(&cluster.run_on("ctl", User::Root, nfs), 0, "");
    let mount = "mkdir -p ~/stopped && for p in .mizzen-tmp-dead taken.sqsh; do \
                 bindfs -o allow_other,attr_timeout=0,entry_timeout=0 ~/stopped /scratch/nfs/$p || exit; done && pkill -STOP -u bob -x bindfs";
    assert_out(&cluster.run_on("ctl", User::Bob, mount), 0, "");
    let import = "mkdir -p tree/bin; timeout -s KILL 10 mizzen import -q -o /scratch/nfs/out.sqsh tree && ls -s /scratch/nfs/out.sqsh | wc -l";
    assert_out(&run_in_time(&cluster, import), 0, "1\n");
    let save = "timeout -s KILL 10 mizzen run --save /scratch/nfs/saved.sqsh /shared/a.sqsh cat /image";
    assert_out(&run_in_time(&cluster, save), 0, "a\n");
    let taken = "timeout -s KILL 10 mizzen import -o /scratch/nfs/taken.sqsh tree";
    assert_told(
        &run_in_time(&cluster, taken),
        1,
        "/scratch/nfs/taken.sqsh is not safe from other users: /scratch/nfs/taken.sqsh lies on a file system that uid 2002 serves",
        HINT,
    );
}

/// Words of a command that are no paths, and names of files that are made, are names in the current directory all the same.
#[test]
fn a_server_on_a_name_that_is_only_asked_for_stops_nobody() {
    let cluster = start("served-asked", Some("image_folders = [\"/open\"]\n"));
    let places = [
        "/scratch/hello",
        "/scratch/saved.sqsh",
        "/scratch/%A",
        "/tmp/m",
        "/open/x.sqsh",
        "/open/a.sqsh.json",
    ];
    for machine in ["ctl", "node1"] {
        let folder = "mkdir -m 1777 /open; chmod 1777 /open; cp /shared/a.sqsh /open";
        assert_out(&cluster.run_on(machine, User::Root, folder), 0, "");
        stopped_on(&cluster, machine, &places);
    }
    let served = |name: &str| {
        format!(
            "/scratch/{name} is not safe from other users: /scratch/{name} lies on a file system that uid 2002 serves"
        )
    };
    for start in ["srun -Q --container=/shared/a.sqsh", "mizzen run /shared/a.sqsh"] {
        let words =
            format!("cd /scratch; timeout -s KILL 12 {start} echo hello --in=hello /scratch/hello/x hello/x");
        assert_out(&run_in_time(&cluster, &words), 0, "hello --in=hello /scratch/hello/x hello/x\n");
    }
    for (start, option) in [
        ("srun -Q --container=/shared/a.sqsh --container-save=/scratch/saved.sqsh", "--container-save: "),
        ("mizzen run --save /scratch/saved.sqsh /shared/a.sqsh", "--save: "),
    ] {
        let save = run_in_time(&cluster, &format!("timeout -s KILL 12 {start} true"));
        assert_failed(&save, 125, &format!("{option}{}", served("saved.sqsh")));
        assert_failed(&save, 125, &format!("mizzen: hint: {HINT}"));
    }
    let mount = run_in_time(
        &cluster,
        "timeout -s KILL 12 srun -Q --container=/shared/a.sqsh --container-mounts=/shared:/tmp/m true",
    );
    assert_failed(
        &mount,
        125,
        "/tmp/m is not safe from other users: /tmp/m lies on a file system that uid 2002 serves",
    );
    let listed = run_in_time(&cluster, "timeout -s KILL 10 mizzen images");
    assert_eq!((listed.code, listed.stdout.contains("/open: 1 image, ")), (0, true), "{}", listed.text());
    let enroot = run_in_time(
        &cluster,
        "mkdir names; ln -s /usr/bin/mizzen names/enroot; cd /scratch; timeout -s KILL 10 ~/names/enroot start hello true",
    );
    assert_failed(&enroot, 125, "hello: no such container of yours on this node");
    let import = run_in_time(&cluster, "cd /scratch; timeout -s KILL 10 mizzen import hello");
    assert_failed(
        &import,
        1,
        "hello is not safe from other users: /scratch/hello lies on a file system that uid 2002 serves",
    );
    // Inside a batch job, whose script calls Slurm's commands.
    let script = "#!/bin/sh\ncd /scratch\n\
                  timeout -s KILL 10 squeue -h -o %A/%t 2>&1 | grep -v hint; timeout -s KILL 10 sbatch -J hello ./job.sh 2>&1 | grep -v hint\n";
    cluster.share("job.sh", script.as_bytes()).unwrap();
    let job = "cp /shared/job.sh .; timeout -s KILL 30 sbatch -Q --wait -o out --container=/shared/a.sqsh \
               --container-mounts=/scratch job.sh > /dev/null; cat out";
    let refused = |command: &str, word: &str, place: &str| {
        format!(
            "mizzen: {command}: {word} is taken from outside the container, and {place} lies on a file system that uid 2002 serves\n"
        )
    };
    let expected =
        [refused("squeue", "%A/%t", "/scratch/%A"), refused("sbatch", "hello", "/scratch/hello")].concat();
    assert_out(&cluster.run(job), 0, &expected);
    assert!(cluster.all_idle());
}

#[test]
fn an_environment_file_that_another_user_serves_is_not_ones_own() {
    let cluster = start("served-environment", None);
    let planted = "mkdir ~/planted; echo 'image = \"/shared/b.sqsh\"' > ~/planted/torch.toml";
    assert_out(&cluster.run_on("ctl", User::Bob, planted), 0, "");
    serve(&cluster, "ctl", "~/planted", "/scratch/project", "2001");
    let message = "is not safe from other users: /scratch/project lies on a file system that uid 2002 serves";
    for option in ["--environment", "--container"] {
        let step = cluster.run(&format!("cd /scratch/project; srun {option}=torch.toml cat /image"));
        assert_failed(&step, 1, message);
    }
    end(&cluster, "ctl", "/scratch/project");
}
