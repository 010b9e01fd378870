//! mizzen.toml with its drop-ins, on the nodes and by hand: what holds, what is refused, and who is told where a value comes from.

use mizzen_tests::check::{
    assert_failed, assert_failed_closed, assert_out, assert_told, one_node, with_images,
};
use mizzen_tests::spec::PLUGIN;
use mizzen_tests::{Cluster, Output, Release, User};

const IMAGE: &str = "--container-image=/shared/a.sqsh";

fn start(name: &str) -> Cluster {
    let cluster = with_images(one_node(Release::Slurm22_05, &format!("settings-{name}")));
    everywhere(&cluster, "mkdir -p /etc/mizzen/mizzen.d");
    cluster
}

/// Runs a shell command as root on both machines.
fn everywhere(cluster: &Cluster, script: &str) {
    for machine in ["ctl", "node1"] {
        let done = cluster.run_on(machine, User::Root, script);
        assert_eq!(done.code, 0, "{machine}: {}", done.text());
    }
}

fn on_node(cluster: &Cluster, script: &str) -> Output {
    cluster.run_on("node1", User::Root, script)
}

#[test]
fn a_later_file_replaces_what_an_earlier_one_says() {
    let cluster = start("order");
    let main =
        "# the site\nimage_folders = [\"/shared\"]\nenv = [\"A=main\", \"B=main\"]\nremap_root = true\n";
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", main).unwrap();
    let show = "sh -c 'echo $A $B; id -u'";
    assert_out(&cluster.run(&format!("srun --container=a.sqsh {show}")), 0, "main main\n0\n");
    // Byte order: 10 before 9, capitals before small letters; neither hidden files nor other endings count.
    for (name, text) in [
        ("10-a", "env = [\"A=ten\"]\nremap_root = false\n"),
        ("9-b", "env = [\"A=nine\"]\n"),
        ("Z", "stage = \"never\"\n"),
        (".z", "env = [\"A=hidden\"]\n"),
    ] {
        cluster.write_everywhere(&format!("/etc/mizzen/mizzen.d/{name}.toml"), text).unwrap();
    }
    cluster.write_everywhere("/etc/mizzen/mizzen.d/zz.toml.dpkg-dist", "oops").unwrap();
    assert_out(&cluster.run(&format!("srun --container=a.sqsh {show}")), 0, "nine\n2001\n");
    assert_out(&cluster.run(&format!("mizzen run /shared/a.sqsh {show}")), 0, "nine\n2001\n");
    let shown = cluster.run("mizzen config show");
    let heading = "# /etc/mizzen/mizzen.toml\n# /etc/mizzen/mizzen.d/10-a.toml\n# /etc/mizzen/mizzen.d/9-b.toml\n\
                   # /etc/mizzen/mizzen.d/Z.toml\ncompatible = \"mizzen\"  # default\n";
    assert!(shown.code == 0 && shown.stdout.starts_with(heading), "{}", shown.text());
    for line in [
        "image_folders = [\"/shared\"]  # /etc/mizzen/mizzen.toml:2\n",
        "env = [\"A=nine\"]  # /etc/mizzen/mizzen.d/9-b.toml:1\n",
        "remap_root = false  # /etc/mizzen/mizzen.d/10-a.toml:2\n",
        "stage = \"never\"  # /etc/mizzen/mizzen.d/Z.toml:1\n",
        "gpu = \"auto\"  # default\n",
    ] {
        assert!(shown.stdout.contains(line), "{line}{}", shown.text());
    }
    let json = cluster.run("mizzen config show --json");
    let found: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    let setting = |key: &str| {
        let settings = found["settings"].as_array().unwrap().iter();
        let setting = settings.filter(|setting| setting["key"] == key).collect::<Vec<_>>();
        (setting[0]["value"].to_string(), setting[0]["file"].clone(), setting[0]["default"] == true)
    };
    let nine = "/etc/mizzen/mizzen.d/9-b.toml".into();
    assert_eq!(setting("env"), ("[\"A=nine\"]".to_owned(), nine, false));
    assert_eq!(setting("gpu"), ("\"auto\"".to_owned(), serde_json::Value::Null, true));
    assert_eq!((&found["drop_ins"], &found["named_by"]), (&"/etc/mizzen/mizzen.d".into(), &().into()));
    // What is shown is TOML, and good.
    on_node(&cluster, "mizzen config show > /root/shown.toml");
    assert_out(&on_node(&cluster, "mizzen check-config /root/shown.toml"), 0, "/root/shown.toml: good\n");
    let good = "/etc/mizzen/mizzen.toml: good\n/etc/mizzen/mizzen.d/10-a.toml: good\n\
                /etc/mizzen/mizzen.d/9-b.toml: good\n/etc/mizzen/mizzen.d/Z.toml: good\ntogether: good\n";
    assert_out(&on_node(&cluster, "mizzen check-config"), 0, good);
    let doctor = cluster.run_on("node1", User::Alice, "mizzen doctor");
    let healthy =
        "ok       settings        /etc/mizzen/mizzen.toml and 3 of /etc/mizzen/mizzen.d are good (for";
    assert!(doctor.code == 0 && doctor.stdout.contains(healthy), "{}", doctor.text());
    // Drop-ins need no file that they add to.
    everywhere(&cluster, "rm /etc/mizzen/mizzen.toml");
    assert_out(&cluster.run(&format!("srun {IMAGE} {show}")), 0, "nine\n2001\n");
    let shown = cluster.run("mizzen config show");
    assert!(
        shown.stdout.starts_with("# /etc/mizzen/mizzen.toml, which is not there\n# /etc/mizzen/mizzen.d/10-"),
        "{}",
        shown.text()
    );
}

#[test]
fn tables_of_several_files_are_one() {
    let cluster = start("tables");
    let main = "[policy]\nfolders = [\"/shared\"]\n[registries.\"a.io\"]\nplain_http = true\n";
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", main).unwrap();
    assert_out(&cluster.run(&format!("srun {IMAGE} cat /image")), 0, "a\n");
    // Another list of the policy: both hold.
    let drop_in = "[policy]\nowners = [4711]\n\n[registries.\"a.io\"]\nmirrors = [\"https://m.io\"]\n";
    on_node(&cluster, &format!("cat > /etc/mizzen/mizzen.d/policy.toml <<'E'\n{drop_in}E"));
    let refused = cluster.run(&format!("srun {IMAGE} touch /shared/marker"));
    let message = "owners of this site's policy do not include its owner, 0, root";
    assert_failed_closed(&cluster, "a policy on the node", &refused, &refused.stderr, message);
    let shown = cluster.run_on("node1", User::Alice, "mizzen config show | tail -n 7");
    let tables = "\n[policy]\nfolders = [\"/shared\"]  # /etc/mizzen/mizzen.toml:2\n\
                  owners = [4711]  # /etc/mizzen/mizzen.d/policy.toml:2\n\n[registries.\"a.io\"]\n\
                  mirrors = [\"https://m.io\"]  # /etc/mizzen/mizzen.d/policy.toml:5\n";
    assert!(shown.stdout.contains(tables.trim_start()), "{}", shown.text());
    // The folders still hold: the second file has said nothing of them.
    on_node(&cluster, "cp /shared/a.sqsh /etc/a.sqsh; chown 4711 /shared/a.sqsh /etc/a.sqsh");
    assert_out(&cluster.run(&format!("srun {IMAGE} cat /image")), 0, "a\n");
    let elsewhere = on_node(&cluster, "runuser -u alice mizzen run /etc/a.sqsh true");
    assert_failed(&elsewhere, 125, "folders of this site's policy do not include /etc/a.sqsh");
}

#[test]
fn a_bad_drop_in_touches_jobs_with_a_container_alone() {
    let cluster = start("bad");
    let file = "/etc/mizzen/mizzen.d/20-x.toml";
    let hint_of_keys = "the mizzen.toml that comes with mizzen shows every key with its default";
    for (make, message, hint) in [
        (
            format!("printf '# x\\n[oops\\n' > {file}"),
            format!("{file}:2: unclosed table, expected `]`"),
            hint_of_keys,
        ),
        (
            format!("printf '\\nimage_folder = []\\n' > {file}"),
            format!("{file}:2: unknown field `image_folder`"),
            "did you mean image_folders?",
        ),
        (
            format!("echo 'image_folders = [\"x\"]' > {file}"),
            format!("{file}:1: image_folders: \"x\" is not absolute"),
            "write the whole path",
        ),
        (
            format!("chmod 664 {file}"),
            format!("{file} is writable by others than root (mode 0664)"),
            "chown root and chmod go-w ",
        ),
        (
            format!("chown alice {file}"),
            format!("{file} belongs to uid 2001, not to root"),
            "chown root and chmod go-w ",
        ),
        (
            format!("chmod 600 {file}"),
            format!("{file}: cannot read it: Permission denied"),
            "all users must be able to read it: chmod a+r ",
        ),
        (
            format!("mv {file} /root/; ln -s /root/20-x.toml {file}"),
            format!("{file}: is a symbolic link; mizzen reads only the file itself"),
            "put the file itself there",
        ),
        (
            format!("rm {file}; mkdir {file}"),
            format!("{file}: is a directory, not a regular file"),
            "put a text file there, or nothing",
        ),
        (
            format!("rm {file}; mkfifo {file}"),
            format!("{file}: is a FIFO, not a regular file"),
            "put a text file there, or nothing",
        ),
        (
            format!("rm {file}; yes '# x' | head -c 1048577 > {file}"),
            format!("{file}: is larger than 1 MiB"),
            "is it the right file?",
        ),
        (
            "cd /etc/mizzen/mizzen.d; for i in 1 2; do yes '# x' | head -c 600000 > $i.toml; done".to_owned(),
            "/etc/mizzen/mizzen.d/2.toml: and the files before it in its directory are larger than 1 MiB"
                .to_owned(),
            "is it the right file?",
        ),
        (
            "cd /etc/mizzen/mizzen.d; seq 1001 | xargs touch".to_owned(),
            "/etc/mizzen/mizzen.d: cannot list it: more than 1000 entries".to_owned(),
            "",
        ),
        (
            "chmod 777 /etc/mizzen/mizzen.d".to_owned(),
            "/etc/mizzen/mizzen.d is writable by others than root (mode 0777)".to_owned(),
            "only root may be able to write",
        ),
        (
            "chmod 1777 /etc/mizzen/mizzen.d".to_owned(),
            "/etc/mizzen/mizzen.d is writable by others than root (mode 1777)".to_owned(),
            "chmod go-w /etc/mizzen/mizzen.d",
        ),
        (
            "chown alice /etc/mizzen/mizzen.d".to_owned(),
            "/etc/mizzen/mizzen.d belongs to uid 2001, not to root".to_owned(),
            "only root may be able to write",
        ),
        (
            "chmod 700 /etc/mizzen/mizzen.d".to_owned(),
            "/etc/mizzen/mizzen.d: cannot read it: Permission denied".to_owned(),
            "all users must be able to read it: chmod a+r ",
        ),
        (
            "rm -r /etc/mizzen/mizzen.d; touch /etc/mizzen/mizzen.d".to_owned(),
            "/etc/mizzen/mizzen.d: is not a directory".to_owned(),
            "make it a directory for drop-ins, or remove it",
        ),
    ] {
        let restore = "rm -rf /etc/mizzen/mizzen.d; mkdir /etc/mizzen/mizzen.d; echo 'stage = \"never\"' > /etc/mizzen/mizzen.d/20-x.toml";
        assert_out(&on_node(&cluster, restore), 0, "");
        assert_out(&on_node(&cluster, &format!("umask 022; {make}")), 0, "");
        let failed = cluster.run(&format!("srun {IMAGE} touch /shared/marker"));
        assert_failed_closed(&cluster, &make, &failed, &failed.stderr, &format!("mizzen: node1: {message}"));
        assert_eq!(
            failed.stderr.matches("mizzen: hint: ").count(),
            usize::from(!hint.is_empty()),
            "{}",
            failed.text()
        );
        assert!(failed.stderr.contains(hint), "{make}: {}", failed.text());
        assert_out(&cluster.run("srun hostname"), 0, "node1\n");
    }
    // Where the job is submitted, too.
    on_node(&cluster, "rm -rf /etc/mizzen/mizzen.d");
    cluster.run_as_root(&format!("echo 'stage = 1' > {file}"));
    let message = format!("mizzen: {file}:1: stage: invalid type: integer `1`, expected a string");
    assert_told(&cluster.run(&format!("srun {IMAGE} touch /shared/marker")), 1, &message, hint_of_keys);
    assert_told(&cluster.run("mizzen run /shared/a.sqsh true"), 125, &message, hint_of_keys);
    assert_out(&cluster.run("srun hostname"), 0, "node1\n");
    // Each bad file is told by check-config; the doctor says that there can be no container.
    cluster.run_as_root("echo 'oops = 1' > /etc/mizzen/mizzen.d/30-y.toml");
    for command in ["check-config", "config show", "doctor"] {
        let failed = cluster.run(&format!("mizzen {command} 2>&1"));
        assert!(failed.code == 1 && failed.stdout.contains("20-x.toml:1: stage: "), "{}", failed.text());
        assert_eq!(failed.stdout.contains("30-y.toml:1: unknown field `oops`"), command == "check-config");
    }
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
}

#[test]
fn by_hand_and_in_steps_the_same_file_holds() {
    let cluster = start("named");
    let programs = ["srun --quiet --container=a.sqsh cat /image", "mizzen run a.sqsh cat /image"];
    let image = |output: Output| output.stdout;
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", "env = [\"WHO=default\"]\n").unwrap();
    everywhere(
        &cluster,
        "mkdir -p /srv/site.d /srv/a /srv/b; cp /shared/a.sqsh /srv/a/; cp /shared/b.sqsh /srv/b/a.sqsh",
    );
    cluster.write_everywhere("/srv/site.toml", "image_folders = [\"/srv/a\"]\n").unwrap();
    cluster.set_plugstack(&[&format!("required {PLUGIN} config=/srv/site.toml")]).unwrap();
    for program in programs {
        assert_eq!(image(cluster.run(program)), "a\n", "{program}");
    }
    // Its drop-ins are beside it.
    cluster.write_everywhere("/srv/site.d/b.toml", "image_folders = [\"/srv/b\"]\n").unwrap();
    cluster.write_everywhere("/etc/mizzen/mizzen.d/x.toml", "image_folders = []\n").unwrap();
    for program in programs {
        assert_eq!(image(cluster.run(program)), "b\n", "{program}");
    }
    let shown = cluster.run("mizzen config show | head -n 2");
    assert_out(&shown, 0, "# /srv/site.toml, named by /etc/slurm/plugstack.conf:1\n# /srv/site.d/b.toml\n");
    let good = "/srv/site.toml: good\n/srv/site.d/b.toml: good\ntogether: good\n";
    assert_out(&cluster.run("mizzen check-config"), 0, good);
    let doctor = cluster.run_on("node1", User::Root, "mizzen doctor");
    let settings =
        "settings        /srv/site.toml and 1 of /srv/site.d are good, as plugstack.conf says (for";
    assert!(doctor.code == 0 && doctor.stdout.contains(settings), "{}", doctor.text());
    assert_eq!(image(cluster.run("mizzen images --json | grep -c /srv/b/a.sqsh")), "1\n");
    // In an included file, which slurm.conf names by way of another file.
    everywhere(&cluster, "true");
    cluster.run_as_root(
        "cd /etc/slurm; mkdir stack.d; mv plugstack.conf stack.d/mizzen.conf; \
         echo 'include stack.d/*.conf' > stack.conf; echo 'PlugStackConfig=/etc/slurm/stack.conf' > more.conf; \
         echo 'Include more.conf' >> slurm.conf",
    );
    let shown = cluster.run("mizzen config show | head -n 1");
    assert_out(&shown, 0, "# /srv/site.toml, named by /etc/slurm/stack.d/mizzen.conf:1\n");
    for program in programs {
        assert_eq!(image(cluster.run(program)), "b\n", "{program}");
    }
    // A user's own SLURM_CONF names nothing; root's does.
    let own = "mkdir -p conf; echo > conf/slurm.conf; echo 'required /x/spank_mizzen.so config=/etc/mizzen/mizzen.toml' > conf/plugstack.conf; \
               SLURM_CONF=$PWD/conf/slurm.conf mizzen config show | head -n 1";
    assert_out(&cluster.run(own), 0, "# /srv/site.toml, named by /etc/slurm/stack.d/mizzen.conf:1\n");
    cluster.run_as_root("cp -r /home/alice/conf /etc/conf; chown -R root /etc/conf");
    // Nor does another file of root's: beside that there are no settings of the site's.
    let other = cluster.run("SLURM_CONF=/etc/hostname mizzen config show | head -n 1");
    assert_out(&other, 0, "# /srv/site.toml, named by /etc/slurm/stack.d/mizzen.conf:1\n");
    let roots = cluster.run("SLURM_CONF=/etc/conf/slurm.conf mizzen config show | head -n 1");
    assert_out(&roots, 0, "# /etc/mizzen/mizzen.toml, named by /etc/conf/plugstack.conf:1\n");
    // What the plugin would refuse is refused by hand.
    cluster.run_as_root(&format!("echo 'required {PLUGIN} confg=/x' > /etc/slurm/stack.d/mizzen.conf"));
    for (program, code) in
        [("mizzen run /shared/a.sqsh true", 125), ("mizzen config show", 1), ("mizzen check-config", 1)]
    {
        let message = "mizzen: plugstack.conf: unknown argument \"confg=/x\"";
        assert_told(&cluster.run(program), code, message, "the only argument of spank_mizzen.so is config=");
    }
    cluster.run_as_root(&format!(
        "echo 'required {PLUGIN} config=/srv/gone.toml' > /etc/slurm/stack.d/mizzen.conf"
    ));
    let gone = cluster.run("mizzen run /shared/a.sqsh true");
    assert_told(
        &gone,
        125,
        "mizzen: /srv/gone.toml: no such file",
        "plugstack.conf names it with config=PATH",
    );
}
