//! What people do on their first day, and what they tripped over.

use mizzen_tests::check::{assert_failed, assert_out, assert_told, one_node, with_images};
use mizzen_tests::documents::Page;
use mizzen_tests::images::ImageTree;
use mizzen_tests::{Cluster, Release, Spec, User};

fn start(name: &str) -> Cluster {
    with_images(one_node(Release::Slurm22_05, name))
}

#[test]
fn commas_in_variables() {
    let cluster = start("env-commas");
    let shown = "sh -c 'echo $CUDA_VISIBLE_DEVICES $B'";
    let srun =
        |env: &str| cluster.run(&format!("srun -Q --container=/shared/a.sqsh --container-env={env} {shown}"));
    assert_out(&srun("CUDA_VISIBLE_DEVICES=0,1"), 0, "0,1\n");
    assert_out(&srun("CUDA_VISIBLE_DEVICES=0,1,B=x"), 0, "0,1 x\n");
    assert_told(
        &srun("B=node1,node2"),
        1,
        "--container-env: \"B=…,…\": what follows the comma could be a variable, or a part of B",
        "write B=…\\,… for a comma in the value, or give the option once for each variable",
    );
}

#[test]
fn paths_that_no_shell_has_seen() {
    let cluster = start("no-shell");
    cluster.run("mkdir data; echo mine > data/file");
    let submit = |line: &str| {
        cluster.run(&format!(
            "printf '#!/bin/sh\\n#SBATCH --container=/shared/a.sqsh\\n#SBATCH {line}\\ncat /data/file\\n' > job; \
             sbatch --wait -o out job && cat out"
        ))
    };
    let hint =
        "write the whole path; %u stands for your user name, %j for the job, \\$ and \\~ for themselves";
    for (mount, word) in [("~/data", "~"), ("$HOME/data", "$HOME"), ("/home/${USER}/data", "${USER")] {
        let message = format!("--container-mounts: \"{mount}:/data\": {word} is not expanded");
        assert_told(&submit(&format!("--container-mounts={mount}:/data")), 1, &message, hint);
    }
    let done = submit("--container-mounts=/home/%%u/data:/data");
    assert!(done.code == 0 && done.stdout.ends_with("mine\n"), "{}", done.text());
    let job = cluster.run(
        "srun -Q --container=/shared/a.sqsh --container-mounts=/tmp:/scratch/%j sh -c 'ls -d /scratch/$SLURM_JOB_ID | wc -l'",
    );
    assert_out(&job, 0, "1\n");
    let image = cluster.run("srun --container='~/a.sqsh' true");
    assert_told(
        &image,
        1,
        "--container: no such image; tried /home/alice/~/a.sqsh",
        "~ is not expanded here, as a shell would do; write the whole path",
    );
    for (image, tried, hint) in [
        (
            "$HOME/a.sqsh",
            "/home/alice/$HOME/a.sqsh",
            "$HOME is not expanded here, as a shell would do; write the whole path",
        ),
        (
            "~/a.sqsh",
            "/home/alice/~/a.sqsh",
            "~ is not expanded here, as a shell would do; write the whole path",
        ),
        (
            "/home/%%u/a.sqsh",
            "/home/%u/a.sqsh",
            "%u is expanded in mounts; an image is looked for before there is a job: write the whole path",
        ),
        (
            "a-%%j.sqsh",
            "/home/alice/a-%j.sqsh",
            "%j is expanded in mounts; an image is looked for before there is a job: write the whole path",
        ),
    ] {
        let script = format!("printf '#!/bin/sh\\n#SBATCH --container={image}\\ntrue\\n' > job; sbatch job");
        let message = format!("--container: no such image; tried {tried}");
        assert_told(&cluster.run(&script), 1, &message, hint);
    }
    for (slip, meant) in
        [("--mout /tmp:/x", "--mount"), ("--wriatble", "--writable"), ("--no-hom", "--no-home")]
    {
        let done = cluster.run(&format!("mizzen run {slip} /shared/a.sqsh true"));
        let tip = format!("tip: a similar argument exists: '{meant}'\n");
        assert!(done.code == 125 && done.stderr.contains(&tip), "{slip}: {}", done.text());
    }
    // Slurm itself expands nothing in --container, and a file may have such a name.
    let literal = cluster.run("cp /shared/a.sqsh %u.sqsh; srun -Q --container=%u.sqsh cat /image");
    assert_out(&literal, 0, "a\n");
    let slip = cluster.run("cd /shared; srun --container=./../shared/aa.sqsh true");
    assert_told(
        &slip,
        1,
        "--container: no such image; tried /shared/aa.sqsh",
        "did you mean /shared/a.sqsh?",
    );
}

#[test]
fn what_a_step_asks_for_is_added_to_the_jobs() {
    let cluster = start("step-adds");
    cluster.run("mkdir one two; echo 1 > one/f; echo 2 > two/f");
    let inside = "sh -c \"cat /one/f /two/f; echo \\$A \\$B\"";
    let done = cluster.run(&format!(
        "salloc -Q --container-image=/shared/a.sqsh --no-container-script --container-mounts=$PWD/one:/one,/tmp:/two \
         --container-env=A=job,B=job srun --container-mounts=$PWD/two:/two --container-env=B=step {inside}"
    ));
    assert_out(&done, 0, "1\n2\njob step\n");
}

#[test]
fn every_program_has_a_home_and_places_for_temporary_files() {
    let cluster = start("home");
    let tree = ImageTree::busybox().unwrap();
    std::fs::create_dir(tree.path("var/tmp")).unwrap();
    cluster.share("debian-like.sqsh", &tree.squashfs(&[]).unwrap()).unwrap();
    let inside = "sh -c 'pwd; ls -A $HOME; echo x > $HOME/x && cat ~/x; echo y > /var/tmp/y && cat /var/tmp/y; echo $MIZZEN_IMAGE'";
    let done = cluster.run(&format!(
        "cd; touch seen; srun -Q --container=/shared/debian-like.sqsh --no-container-mount-home {inside}"
    ));
    assert_out(&done, 0, "/\nx\ny\n/shared/debian-like.sqsh\n");
    assert_eq!(done.stderr, "", "who leaves the home out knows where the program starts");
    assert_out(&cluster.run("ls ~"), 0, "seen\n");
    let nested = "mizzen run --no-home /shared/a.sqsh sh -c 'touch ~/x && echo $MIZZEN_IMAGE'";
    assert_out(&cluster.run(&format!("MIZZEN_IMAGE=other {nested}")), 0, "/shared/a.sqsh\n");
}

#[test]
fn an_entrypoint_takes_options() {
    let cluster = start("entry-options");
    let tree = ImageTree::busybox().unwrap();
    tree.file(".mizzen/config.json", r#"{"config": {"Entrypoint": ["/bin/sh"]}}"#).unwrap();
    cluster.share("sh.sqsh", &tree.squashfs(&[]).unwrap()).unwrap();
    assert_out(
        &cluster.run("mizzen run --entrypoint /shared/sh.sqsh -- -c 'echo it works'"),
        0,
        "it works\n",
    );
    assert_told(
        &cluster.run("mizzen run /shared/sh.sqsh -- -c 'echo it works'"),
        125,
        "-c: not an option of mizzen, and no program",
        "options stand before the image, the program and its arguments behind it; \
         --entrypoint gives them to the image's entrypoint",
    );
}

#[test]
fn links_that_lead_out_of_the_container_are_named() {
    let cluster = start("dangling");
    cluster.run_as_root("mkdir -p /lustre/data && echo 1 > /lustre/data/f");
    cluster.run("ln -s /lustre/data ~/data");
    let note = "/home/alice/data is a symbolic link to /lustre/data, which is not in the container";
    let step = cluster.run("srun -Q -n2 --container=/shared/a.sqsh cat data/f ~/data/f");
    assert_failed(&step, 1, &format!("mizzen: note: node1: {note}\n"));
    assert_eq!(step.stderr.matches("mizzen: note").count(), 1, "{}", step.text());
    assert_failed(
        &cluster.run("mizzen run /shared/a.sqsh cat ~/data/f"),
        1,
        &format!("mizzen: note: {note}\n"),
    );
    // A name without a slash: the link in the directory where the program starts.
    let plain = cluster.run(
        "cd; srun -Q --container=/shared/a.sqsh ls data/ 2>&1; srun -Q --container=/shared/a.sqsh cat data",
    );
    assert_failed(&plain, 1, &format!("mizzen: note: node1: {note}\n"));
    assert!(plain.stdout.starts_with(&format!("mizzen: note: node1: {note}\n")), "{}", plain.text());
    let workdir = cluster.run("srun -Q --container=/shared/a.sqsh --container-workdir=/home/alice/data true");
    assert_failed(&workdir, 125, &format!("mizzen: hint: {note}\n"));
}

#[test]
fn arguments_that_are_on_the_node_alone_are_named() {
    let cluster = start("left-on-host");
    for machine in ["ctl", "node1"] {
        let made = "mkdir -p /scratch/p/run1 /scratch/p/data && echo 1 | tee /scratch/p/train.py > /scratch/p/run1/here";
        assert_out(&cluster.run_on(machine, User::Root, made), 0, "");
    }
    let step = "cd /scratch/p/run1; srun -Q --container=/shared/a.sqsh --container-mounts=/scratch/p/run1";
    let by_hand = "cd /scratch/p/run1; mizzen run --mount=/scratch/p/run1 /shared/a.sqsh";
    let note = |file: &str, option: &str, directory: &str| {
        format!("{file} is on the node, but not in the container: mount it with {option}={directory}\n")
    };
    for (argument, file, directory) in [
        ("../train.py", "/scratch/p/train.py", "/scratch/p"),
        ("--in=../data", "/scratch/p/data", "/scratch/p/data"),
        ("/scratch/p/train.py", "/scratch/p/train.py", "/scratch/p"),
    ] {
        let expected = format!("mizzen: note: node1: {}", note(file, "--container-mounts", directory));
        let told = cluster.run(&format!("{step} -n2 echo {argument}"));
        assert_out(&told, 0, &format!("{argument}\n{argument}\n"));
        assert_eq!(told.stderr, expected);
        let told = cluster.run(&format!("{by_hand} echo {argument}"));
        assert_eq!(told.stderr, format!("mizzen: note: {}", note(file, "--mount", directory)));
    }
    // What is inside, what the node has not either, and what means the image's.
    for argument in ["./here", "/scratch/p", "../none", "/nosuch/x", "/usr/share/doc", "https://a/b", "a/b"] {
        let silent = cluster.run(&format!("{step} echo {argument}"));
        assert_out(&silent, 0, &format!("{argument}\n"));
        assert_eq!(silent.stderr, "", "{argument}");
    }
}

#[test]
fn a_bad_mount_is_not_the_images_fault() {
    let cluster = start("blame");
    let step = cluster.run("srun -Q --container=/shared/a.sqsh --container-mounts=/nosuch:/x true");
    assert_failed(&step, 125, "mizzen: node1: --container-mounts: source path does not exist: /nosuch\n");
}

#[test]
fn slurms_log_tells_what_starts() {
    let cluster = start("start-log");
    let running = cluster.run(
        "srun -Q --container=/shared/a.sqsh --container-mounts=/tmp:/a,tmpfs:/b --container-env=TOKEN=secret \
         --container-writable true",
    );
    assert_eq!(running.code, 0, "{}", running.text());
    let log = cluster.slurmd_log("node1");
    let line = ".0 starts in /shared/a.sqsh, 1 mounted, 1 tmpfs, variables TOKEN, writable=yes\n";
    assert!(log.contains(line) && !log.contains("secret"), "{log}");
}

#[test]
fn the_doctor_tries_what_users_do() {
    let cluster = start("doctor-root");
    let doctor = |user: User| cluster.run_on("node1", user, "mizzen doctor");
    let healthy = doctor(User::Root);
    assert_eq!(healthy.code, 0, "{}", healthy.text());
    assert!(
        healthy.stdout.contains("\nok       plugin          /usr/lib/mizzen/spank_mizzen.so, by /"),
        "{}",
        healthy.text()
    );
    cluster.run_on("node1", User::Root, "chmod 600 /dev/fuse");
    let fuse = doctor(User::Root);
    cluster.run_on("node1", User::Root, "chmod 666 /dev/fuse");
    assert_eq!(fuse.code, 1, "{}", fuse.text());
    assert!(
        fuse.stdout.contains("FAILED   FUSE            cannot open /dev/fuse: Permission denied"),
        "{}",
        fuse.text()
    );
    // Other processes may be that user, too: it gets nothing of root's.
    let traced = "ROOT_TOKEN=hunter2 strace -f -v -s 100 -e trace=execve -o /tmp/trace mizzen doctor; \
                  grep -c execve /tmp/trace; grep -c hunter2 /tmp/trace";
    let traced = cluster.run_on("node1", User::Root, traced);
    assert!(traced.stdout.ends_with("containers can run here\n2\n1\n"), "{}", traced.text());
    let toml = |text: &str| cluster.write_everywhere("/etc/mizzen/mizzen.toml", text).unwrap();
    toml(
        "stage_directory = \"/nosuch\"\nimage_folders = [\"/etc/passwd\"]\nmounts = [\"/x:/y\", \"/home/%u:/z\"]\n",
    );
    let checked = cluster.run_on("node1", User::Root, "mizzen check-config 2>&1");
    let notes = "mizzen: note: image_folders: /etc/passwd: not a directory\n\
                 mizzen: note: stage_directory: /nosuch: No such file or directory\n\
                 mizzen: note: mounts: /x: No such file or directory\n\
                 /etc/mizzen/mizzen.toml: good, but not all of it is on this machine\n";
    assert_out(&checked, 0, notes);
    let copies = doctor(User::Root);
    assert!(
        copies.stdout.contains("missing  copies          stage_directory: /nosuch: No such file"),
        "{}",
        copies.text()
    );
    toml("");
    cluster.set_plugstack(&["optional /usr/lib/mizzen/spank_mizzen.so"]).unwrap();
    let optional = doctor(User::Alice);
    let risk = "; optional: where it is missing, jobs run on the node";
    assert!(optional.code == 0 && optional.stdout.contains(risk), "{}", optional.text());
    cluster.set_plugstack(&["# nothing"]).unwrap();
    let missing = doctor(User::Alice);
    assert!(
        missing.code == 1 && missing.stdout.contains("has no line with spank_mizzen.so"),
        "{}",
        missing.text()
    );
}

#[test]
fn a_directory_of_copies_that_others_can_write_is_named() {
    let cluster = start("site-directory");
    let toml = "stage_shared = \"/var/cache/copies\"\n";
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", toml).unwrap();
    let as_root = |command: &str| cluster.run_on("node1", User::Root, command);
    let is_good = "/etc/mizzen/mizzen.toml: good\n";
    let not_there = "mizzen: note: stage_shared: /var/cache/copies: No such file or directory\n";
    let checked = |user: User| cluster.run_on("node1", user, "mizzen check-config 2>&1");
    let other_machine = "/etc/mizzen/mizzen.toml: good, but not all of it is on this machine\n";
    assert_out(&checked(User::Root), 0, &format!("{not_there}{other_machine}"));
    let healthy = as_root("mizzen doctor");
    assert!(healthy.code == 0 && healthy.stdout.contains("\nok       copies "), "{}", healthy.text());
    let made = as_root("mkdir -p /var/cache/copies && chmod 1777 /var/cache/copies");
    assert_out(&made, 0, "");
    let why = "stage_shared: /var/cache/copies is not root's alone (uid 0, mode 1777)";
    let hint = "no start uses the copies in it: make it root's, with mode 0755, and all directories above it";
    for user in [User::Root, User::Alice] {
        assert_out(&checked(user), 0, &format!("mizzen: note: {why}\n{other_machine}"));
        let doctor = cluster.run_on("node1", user, "mizzen doctor");
        assert!(doctor.stdout.contains(&format!("\nmissing  copies          {why}")), "{}", doctor.text());
        assert!(doctor.stdout.contains(hint), "{}", doctor.text());
    }
    assert_out(&as_root("chmod 755 /var/cache/copies"), 0, "");
    assert_out(&checked(User::Alice), 0, is_good);
    let healthy = as_root("mizzen doctor");
    assert!(healthy.code == 0 && healthy.stdout.contains("\nok       copies "), "{}", healthy.text());
}

/// Half an installation: the files of two versions, and Slurm's own runtime beside it.
#[test]
fn the_doctor_sees_what_does_not_belong_together() {
    let cluster = start("doctor-mixed");
    let plugin = "/usr/lib/mizzen/spank_mizzen.so";
    let doctor = |options: &str| cluster.run_on("node1", User::Root, &format!("mizzen doctor {options}"));
    let whole: serde_json::Value = serde_json::from_str(&doctor("--json").stdout).unwrap();
    assert_eq!(whole["healthy"], true, "{whole:#}");
    let checks = whole["checks"].as_array().unwrap();
    assert!(checks.len() > 8 && checks.iter().all(|check| check["ok"] == true), "{whole:#}");
    for (mark, theirs) in [("mizzen-build:9", "9."), ("mizzen-older:0", "an older build")] {
        let changed = format!(
            "sed 's/mizzen-build:0/{mark}/' {plugin} > /run/other.so && mount --bind /run/other.so {plugin}"
        );
        assert_out(&cluster.run_on("node1", User::Root, &changed), 0, "");
        let told = doctor("");
        let message = format!("FAILED   plugin          {plugin} is {theirs}");
        let hint = "hint: install both from the same package, on all nodes\n";
        let both = told.stdout.contains(&message) && told.stdout.contains(", and this launcher 0.");
        assert!(told.code == 1 && both && told.stdout.contains(hint), "{}", told.text());
        assert!(told.stdout.ends_with("containers cannot run here\n"), "{}", told.text());
        let json = doctor("--json");
        let report: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
        assert_eq!((json.code, &report["healthy"]), (1, &false.into()), "{}", json.text());
        let failed: Vec<_> =
            report["checks"].as_array().unwrap().iter().filter(|check| check["ok"] == false).collect();
        assert!(failed.len() == 1 && failed[0]["name"] == "plugin", "{report:#}");
        assert_eq!(failed[0]["hint"], "install both from the same package, on all nodes");
        assert_out(&cluster.run_on("node1", User::Root, &format!("umount {plugin}")), 0, "");
    }
    assert_out(&cluster.run_on("node1", User::Root, "touch /etc/slurm/oci.conf"), 0, "");
    let runtime = doctor("");
    cluster.run_on("node1", User::Root, "rm /etc/slurm/oci.conf");
    for line in [
        "missing  oci.conf        /etc/slurm/oci.conf gives --container to Slurm's own runtime (for srun --container)\n",
        "hint: --container-image is mizzen's; without oci.conf --container is, too\n",
    ] {
        assert!(runtime.code == 0 && runtime.stdout.contains(line), "{}", runtime.text());
    }
}

/// As docs/admins.md says to set it up: in the environment that slurmd gives it, it finds a good node good, and drains a broken one.
#[test]
fn slurm_can_ask_the_doctor() {
    Release::ALL.into_iter().for_each(slurm_asks_the_doctor);
}

fn slurm_asks_the_doctor(release: Release) {
    let program = "#!/bin/sh\n{ env -0 | tr '\\0' ' '; echo; } >> /run/environments\nsh /shared/check; code=$?; echo $code >> /run/codes; exit $code\n";
    let mut spec = one_node(release, "health");
    spec.slurm_conf =
        vec!["HealthCheckProgram=/etc/slurm/health".to_owned(), "HealthCheckInterval=1".to_owned()];
    let cluster = with_images(Spec { slurm_files: vec![("health".to_owned(), program.to_owned())], ..spec });
    let blocks = Page::read("docs/admins.md").unwrap().blocks().unwrap();
    let shown = blocks.iter().find(|block| block.value("file") == Some("mizzen-health")).unwrap();
    let on_node = |script: &str| cluster.run_on("node1", User::Root, script);
    let next_codes = || {
        let wait = "rm -f /run/codes; timeout 100 sh -c 'until [ $(wc -l 2>/dev/null < /run/codes) -ge 2 ]; do sleep 0.2; done' \
                    2>/dev/null; sort -u /run/codes";
        on_node(wait).stdout
    };
    // By itself it is only told in slurmd's log.
    cluster.share("check", b"mizzen doctor").unwrap();
    assert_out(&on_node("chmod 755 /etc/slurm/health"), 0, "");
    assert_eq!(next_codes(), "0\n", "{}", on_node("tail -n 1 /run/environments").stdout);
    let lose_plugin = "mount -t tmpfs none /usr/lib/mizzen";
    assert_out(&on_node(lose_plugin), 0, "");
    assert_eq!(next_codes(), "1\n");
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
    let log = cluster.slurmd_log("node1");
    let about: Vec<&str> = log.lines().filter(|line| line.to_lowercase().contains("health")).collect();
    let told = if release == Release::Slurm20_11 {
        "exited with status 0x0100"
    } else {
        "health_check failed: rc:1 output:"
    };
    assert!(about.iter().any(|line| line.contains(told)), "{release}: {about:#?}");
    assert_out(&on_node("umount /usr/lib/mizzen"), 0, "");
    // As the page has it.
    cluster.share("check", shown.text.as_bytes()).unwrap();
    assert_eq!(next_codes(), "0\n");
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
    assert_out(&on_node(lose_plugin), 0, "");
    assert_eq!(next_codes(), "1\n");
    let state = cluster.run("scontrol show node node1 | grep -oE 'State=[^ ]*|Reason=.*'").stdout;
    let reason = "Reason=mizzen doctor: FAILED plugin /etc/slurm/plugstack.conf names /usr/lib/mizzen/spank_mizzen.so: No such file or directory";
    assert!(state.starts_with("State=IDLE+DRAIN\n") && state.contains(reason), "{state}");
    assert_out(&on_node("umount /usr/lib/mizzen"), 0, "");
    assert_eq!(next_codes(), "0\n");
    cluster.run_as_root("scontrol update nodename=node1 state=resume");
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
    let inside = cluster.run("srun -Q --container=/shared/a.sqsh cat /image");
    assert_out(&inside, 0, "a\n");
}
