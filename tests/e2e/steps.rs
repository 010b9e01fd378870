//! The options of a container on srun, sbatch and salloc: what they mean, who wins, and what is refused. On one
//! release; that all releases take them is for `releases.rs`.

use mizzen_tests::check::{assert_failed, assert_out, one_node, with_images};
use mizzen_tests::images::ImageTree;
use mizzen_tests::{Cluster, Output, Release, Spec};

/// A node with the two images, and /shared/oci.sqsh, whose maker wrote something down.
fn start(name: &str) -> Cluster {
    let cluster = with_images(one_node(Release::Slurm22_05, name));
    let tree = ImageTree::busybox().unwrap();
    let config = r#"{"config": {"Env": ["PATH=/opt/bin:/bin", "FROM_IMAGE=yes", "HOME=/root"],
        "Entrypoint": ["/entry", "word"], "WorkingDir": "/var"}}"#;
    tree.file(".mizzen/config.json", config).unwrap();
    tree.program("entry", "#!/bin/sh\nexport ENTERED=$1\nshift\nexec \"$@\"\n").unwrap();
    cluster.share("oci.sqsh", &tree.squashfs(&[]).unwrap()).unwrap();
    cluster
}

fn srun(cluster: &Cluster, options: &str, program: &str) -> Output {
    cluster.run(&format!("srun -Q {options} {program}"))
}

#[test]
fn every_option_has_its_meaning() {
    let cluster = start("options");
    let a = |options: &str, program: &str| {
        srun(&cluster, &format!("--container=/shared/a.sqsh {options}"), program)
    };
    let oci = |options: &str, program: &str| {
        srun(&cluster, &format!("--container=/shared/oci.sqsh {options}"), program)
    };
    assert_out(&a("--container-workdir=/etc", "pwd"), 0, "/etc\n");
    assert_out(&a("--container-workdir /tmp", "pwd"), 0, "/tmp\n");
    assert_out(&a("--container-mount-home", "sh -c 'cd; pwd'"), 0, "/home/alice\n");
    assert_out(&a("--no-container-mount-home", "sh -c 'ls -A /home/alice; pwd'"), 0, "/\n");
    assert_out(&a("--container-writable", "sh -c 'echo x > /etc/x && cat /etc/x'"), 0, "x\n");
    assert_failed(
        &a("--container-writable=1m", "dd if=/dev/zero of=/x bs=1k count=2000"),
        1,
        "No space left",
    );
    assert_failed(&a("--container-readonly", "touch /x"), 1, "Read-only file system");
    assert_failed(&a("", "touch /x"), 1, "Read-only file system");
    assert_failed(&a("--container-writable --container-readonly", "touch /x"), 1, "Read-only file system");
    assert_out(&a("--container-remap-root", "sh -c 'id -u; id -g'"), 0, "0\n0\n");
    assert_out(&a("--container-remap-root --no-container-remap-root", "id -u"), 0, "2001\n");
    assert_out(&a("--container-env=A=1,B='x\\,y'", "sh -c 'echo $A $B'"), 0, "1 x,y\n");
    assert_out(&a("--container-env=A=1 --container-env=C=3", "sh -c 'echo $A $C'"), 0, "1 3\n");
    let entered = "sh -c 'echo entered by $ENTERED'";
    assert_out(&oci("--container-entrypoint", entered), 0, "entered by word\n");
    assert_out(&oci("--no-container-entrypoint", "echo no"), 0, "no\n");
    assert_out(&oci("-n2 --container-entrypoint", entered), 0, &"entered by word\n".repeat(2));
    let verbose = a("-n2 --container-verbose", "true");
    assert_failed(&verbose, 0, "mizzen: note: node1: stage ");
    let script = |options: &str| {
        cluster.run(&format!(
            "printf '#!/bin/sh\\ncat /image || echo outside\\n' > job; \
             sbatch --wait -o out --container=/shared/a.sqsh {options} job >/dev/null; grep -v cannot out"
        ))
    };
    assert_out(&script("--container-script"), 0, "a\n");
    assert!(script("--no-container-script").stdout.ends_with("outside\n"));
    for command in ["srun", "sbatch", "salloc"] {
        let help = cluster.run(&format!("{command} --help")).stdout;
        for option in [
            "--container-image=IMAGE",
            "--container-mounts=SRC:DST[:FLAGS],...",
            "--container-workdir=DIR",
            "--container-mount-home",
            "--no-container-mount-home",
            "--container-writable=SIZE",
            "--container-readonly",
            "--container-remap-root",
            "--no-container-remap-root",
            "--container-env=NAME[=VALUE],...",
            "--container-entrypoint",
            "--no-container-entrypoint",
            "--container-script",
            "--no-container-script",
            "--container-join=STEP",
            "--container-verbose=debug",
            "--container-hostname=NAME",
        ] {
            assert!(help.split_whitespace().any(|word| word == option), "{command} {option}: {help}");
        }
        assert!(help.contains("Options provided by plugins"), "{help}");
    }
}

#[test]
fn mounts_are_made_as_asked() {
    let cluster = start("step-mounts");
    let a = |options: &str, program: &str| {
        srun(&cluster, &format!("--container=/shared/a.sqsh {options}"), program)
    };
    cluster.run("mkdir -p data/sub; echo here > data/file; echo below > data/sub/file");
    assert_out(&a("--container-mounts=/shared:/mnt/deep", "ls /mnt/deep/a.sqsh"), 0, "/mnt/deep/a.sqsh\n");
    assert_out(&a("--container-mounts=/shared", "ls /shared/a.sqsh"), 0, "/shared/a.sqsh\n");
    // A relative source belongs to where srun was called, not to where the step runs.
    assert_out(
        &a("--chdir=/tmp --container-mounts=data:/data", "sh -c 'cat /data/file; pwd'"),
        0,
        "here\n/tmp\n",
    );
    assert_out(
        &a("--container-mounts=data:/x:ro,data/sub:/y", "sh -c 'touch /x/n || cat /y/file'"),
        0,
        "below\n",
    );
    assert_out(
        &a("--container-mounts=data:/x --container-mounts=data/sub:/y", "cat /x/file /y/file"),
        0,
        "here\nbelow\n",
    );
    assert_out(&a("--container-mounts=tmpfs:/t:size=64k", "sh -c 'echo t > /t/t; cat /t/t'"), 0, "t\n");
    assert_out(&a("--container-mounts=/shared/b.sqsh:/b:squashfs", "cat /b/image"), 0, "b\n");
    assert_out(&a("-n4 --container-mounts=/shared/b.sqsh:/b:squashfs", "cat /b/image"), 0, "b\nb\nb\nb\n");
    assert_out(
        &a(
            "--container-mounts=data:/x:ro+noexec",
            "sh -c 'grep \" /x \" /proc/self/mountinfo | grep -c \"ro,.*noexec\"'",
        ),
        0,
        "1\n",
    );
    assert_out(&a("--container-mounts='data:/c\\:d'", "cat /c:d/file"), 0, "here\n");
    let missing = a("-n4 --container-mounts=nosuch:/x", "true");
    assert_failed(&missing, 125, "node1: --container-mounts: source path does not exist: /home/alice/nosuch");
    let twice = a("-n2 --container-mounts=data:/x,data/sub:/x", "cat /x/file");
    assert_out(&twice, 0, "below\nbelow\n");
    assert_failed(
        &twice,
        0,
        "mizzen: note: node1: --container-mounts: /x is mounted twice; the last one holds",
    );
}

#[test]
fn who_says_it_first_wins() {
    let cluster = start("precedence");
    let toml = |text: &str| cluster.write_everywhere("/etc/mizzen/mizzen.toml", text).unwrap();
    toml("");
    let run = |script: &str| cluster.run(script);
    // Every option as a variable.
    for (variables, program, expected) in [
        ("", "cat /image", "a\n"),
        ("MIZZEN_CONTAINER_MOUNTS=/shared:/m,/tmp:/n", "ls -d /m/a.sqsh /n", "/m/a.sqsh\n/n\n"),
        ("MIZZEN_CONTAINER_WORKDIR=/etc", "pwd", "/etc\n"),
        ("MIZZEN_CONTAINER_MOUNT_HOME=no", "sh -c 'ls -A /home/alice; echo none'", "none\n"),
        ("MIZZEN_CONTAINER_WRITABLE=yes", "sh -c 'touch /x && echo written'", "written\n"),
        ("MIZZEN_CONTAINER_WRITABLE=1m", "sh -c 'touch /x && echo written'", "written\n"),
        ("MIZZEN_CONTAINER_REMAP_ROOT=true", "id -u", "0\n"),
        ("MIZZEN_CONTAINER_ENV=A=1", "sh -c 'echo $A'", "1\n"),
        (
            "MIZZEN_CONTAINER=/shared/oci.sqsh MIZZEN_CONTAINER_ENTRYPOINT=1",
            "sh -c 'echo $ENTERED'",
            "word\n",
        ),
        ("MIZZEN_CONTAINER=none", "hostname", "node1\n"),
    ] {
        let srun = run(&format!("export MIZZEN_CONTAINER=/shared/a.sqsh {variables}; srun -Q {program}"));
        assert_out(&srun, 0, expected);
    }
    let verbose = run("MIZZEN_CONTAINER=/shared/a.sqsh MIZZEN_CONTAINER_VERBOSE=yes srun -Q true");
    assert_failed(&verbose, 0, "mizzen: note: node1: stage ");
    let batch = "printf '#!/bin/sh\\ncat /image 2>/dev/null || echo outside\\n' > job; rm -f out; ";
    let variable = "MIZZEN_CONTAINER=/shared/a.sqsh MIZZEN_CONTAINER_SCRIPT=no";
    assert_out(
        &run(&format!("{batch} {variable} sbatch --wait -o out job >/dev/null; cat out")),
        0,
        "outside\n",
    );
    // An option before a variable, each setting by itself.
    let both = "MIZZEN_CONTAINER=/shared/a.sqsh MIZZEN_CONTAINER_WRITABLE=yes MIZZEN_CONTAINER_WORKDIR=/etc \
                srun -Q --container=/shared/b.sqsh --container-readonly sh -c 'cat /image; pwd; touch /x 2>/dev/null || echo read-only'";
    assert_out(&run(both), 0, "b\n/etc\nread-only\n");
    // What the job has, before the variables, which hold in the outermost command alone.
    let job = |options: &str, script: &str| {
        run(&format!("salloc -Q --container-image=/shared/a.sqsh {options} bash -c '{script}'"))
    };
    assert_out(&job("", "MIZZEN_CONTAINER=/shared/b.sqsh srun cat /image"), 0, "a\n");
    assert_out(&job("--container-workdir=/etc", "MIZZEN_CONTAINER_WORKDIR=/usr srun pwd"), 0, "/etc\n");
    assert_out(&job("", "MIZZEN_CONTAINER_WORKDIR=/usr srun pwd"), 0, "/home/alice\n");
    assert_out(
        &job("--container-workdir=/etc", "srun --container-workdir=/usr pwd; srun pwd"),
        0,
        "/usr\n/etc\n",
    );
    // The job's settings hold for another image too, unless they are said again.
    let other = "srun --container=/shared/b.sqsh sh -c \"cat /image; pwd\"; srun --container=none pwd";
    assert_out(&job("--container-workdir=/etc", other), 0, "b\n/etc\n/home/alice\n");
    assert_out(
        &job("--container-mounts=/shared", "srun --container-mounts=/usr:/u ls -d /u /shared"),
        0,
        "/shared\n/u\n",
    );
    assert_out(
        &run(
            "MIZZEN_CONTAINER=/shared/b.sqsh salloc -Q bash -c 'srun cat /image; MIZZEN_CONTAINER=/shared/a.sqsh srun cat /image'",
        ),
        0,
        "b\nb\n",
    );
    // The site's settings hold where nobody says anything; its mounts and variables in any case.
    toml(
        "mounts = [\"/shared:/site:ro\"]\nenv = [\"SITE=1\", \"A=site\"]\nwritable = true\nremap_root = true\n\
          mount_home = false\nentrypoint = true\nscript = false\n",
    );
    let look =
        "sh -c 'echo $SITE $A; ls -d /site/a.sqsh; touch /x && echo written; id -u; ls -A /home/alice'";
    let site = srun(&cluster, "--container=/shared/a.sqsh", look);
    assert_eq!(site.stdout, "1 site\n/site/a.sqsh\nwritten\n0\n", "{}", site.text());
    let options = "--container=/shared/a.sqsh --container-env=A=mine --container-mounts=/usr:/site --container-readonly \
                   --no-container-remap-root --container-mount-home";
    let own = srun(
        &cluster,
        options,
        "sh -c 'echo $SITE $A; ls -d /site/bin; touch /x 2>/dev/null; id -u; ls -d /home/alice'",
    );
    assert_out(&own, 0, "1 mine\n/site/bin\n2001\n/home/alice\n");
    assert_out(&srun(&cluster, "--container=/shared/oci.sqsh", "sh -c 'echo $ENTERED'"), 0, "word\n");
    assert_out(&srun(&cluster, "--container=/shared/oci.sqsh --no-container-entrypoint", "echo x"), 0, "x\n");
    let script = |options: &str| {
        run(&format!(
            "{batch} sbatch --wait -o out --container=/shared/a.sqsh {options} job >/dev/null; cat out"
        ))
    };
    assert_out(&script(""), 0, "outside\n");
    assert_out(&script("--container-script --container-mount-home"), 0, "a\n");
}

#[test]
fn images_are_found_from_where_the_command_was_typed() {
    let cluster = start("relative");
    cluster.run("mkdir -p sub/images; cp /shared/a.sqsh sub/images; cp /shared/b.sqsh .");
    for (script, expected) in [
        ("srun -Q --container=b.sqsh cat /image", "b\n"),
        ("cd sub; srun -Q --container=images/a.sqsh cat /image", "a\n"),
        ("cd sub; srun -Q --container=../b.sqsh cat /image", "b\n"),
        // --chdir is where the step runs, not where the image is.
        ("srun -Q --chdir=/tmp --container=b.sqsh sh -c 'cat /image; pwd'", "b\n/tmp\n"),
        (
            "cd sub; sbatch -Q --wait --chdir=/tmp -o /home/alice/out --container=images/a.sqsh --wrap 'cat /image; pwd'; cat ../out",
            "a\n/tmp\n",
        ),
        (
            "cd sub; printf '#!/bin/sh\\n#SBATCH --container=images/a.sqsh\\ncat /image\\n' > j; sbatch -Q --wait -o out j; cat out",
            "a\n",
        ),
        ("salloc -Q --container-image=sub/images/a.sqsh bash -c 'cd /; srun cat /image'", "a\n"),
        // A directory is an image too.
        (
            "mizzen run b.sqsh tar -C / -cf - bin etc image > t; mkdir d; tar -C d -xf t; srun -Q --container=d cat /image",
            "b\n",
        ),
    ] {
        let ran = cluster.run(script);
        assert_eq!((ran.code, ran.stdout.as_str()), (0, expected), "{script}: {}", ran.text());
    }
}

#[test]
fn bad_values_are_refused_before_anything_is_submitted() {
    let cluster = start("bad-values");
    let image = "--container-image=/shared/a.sqsh";
    for (options, message) in [
        ("--container-mounts=", "--container-mounts: \"\": the source is empty"),
        ("--container-mounts=:/b", "--container-mounts: \":/b\": the source is empty"),
        ("--container-mounts=/a:", "--container-mounts: \"/a:\": the destination is empty"),
        ("--container-mounts=/a:b", "--container-mounts: \"/a:b\": the destination is not absolute"),
        ("--container-mounts=/a:/b:c:d", "--container-mounts: \"/a:/b:c:d\": more than three parts"),
        ("--container-mounts=/a:/b:wet", "--container-mounts: \"/a:/b:wet\": unknown flag \"wet\""),
        ("--container-mounts=/a:/b,", "--container-mounts: \"\": the source is empty"),
        ("--container-mounts=/a:/", "--container-mounts: \"/a:/\": the destination is the root itself"),
        ("--container-mounts=/a:/b:size=1m", "size= belongs to tmpfs"),
        ("--container-mounts=$'/a:/b\\n'", "control character"),
        ("--container-workdir=", "--container-workdir: \"\" is not a directory's name"),
        ("--container-writable=lots", "--container-writable: \"lots\" is not a size"),
        ("--container-env=", "--container-env: \"\": the name is empty"),
        ("--container-env='A B=1'", "--container-env: \"A B\": not a variable's name"),
        ("--container-join=0", "--container-join and other options of a container"),
        ("--container-name=a/b", "--container-name: \"a/b\": the name has a /"),
        ("--container-mounts=$(seq -s, -f /tmp:/m/%g 9000)", "the container's options have "),
    ] {
        let program = "touch /shared/marker";
        for command in [
            format!("srun {image} {options} {program}"),
            format!("sbatch {image} {options} --wrap '{program}'"),
            format!("salloc {image} {options} {program}"),
        ] {
            let refused = cluster.run(&command);
            assert_failed(&refused, 1, message);
            assert_eq!(
                refused.stderr.matches("error: mizzen: ").count(),
                2,
                "and a hint: {}",
                refused.text()
            );
        }
    }
    for (options, message) in [
        ("--container-join=../0", "--container-join: \"../0\" is not a step"),
        ("--container-writable", "--container-writable: without a container"),
        ("--container=none --container-mounts=/a:b", "the destination is not absolute"),
    ] {
        assert_failed(&cluster.run(&format!("srun {options} touch /shared/marker")), 1, message);
    }
    for (variable, message) in [
        ("MIZZEN_CONTAINER=", "MIZZEN_CONTAINER: the image is empty"),
        ("MIZZEN_CONTAINER=/no/such", "MIZZEN_CONTAINER: no such image; tried /no/such"),
        ("MIZZEN_CONTAINER_MOUNTS=a:b", "MIZZEN_CONTAINER_MOUNTS: \"a:b\": the destination is not absolute"),
        (
            "MIZZEN_CONTAINER_REMAP_ROOT=perhaps",
            "MIZZEN_CONTAINER_REMAP_ROOT: \"perhaps\" is neither yes nor no",
        ),
    ] {
        let set = format!("export MIZZEN_CONTAINER=/shared/a.sqsh {variable}; srun touch /shared/marker");
        assert_failed(&cluster.run(&set), 1, message);
    }
    assert_eq!(cluster.run("squeue -h -t all; ls /shared/marker").stdout, "", "something was submitted");
}

#[test]
fn components_share_one_container() {
    let cluster = with_images(Spec { nodes: 2, ..one_node(Release::Slurm22_05, "step-components") });
    let a = "--container=/shared/a.sqsh";
    let print = "sh -c 'echo $(hostname) $(cat /image) $(pwd)'";
    for (first, second) in [("", ""), ("--container-workdir=/etc", "--container-workdir=/etc")] {
        let workdir = if first.is_empty() { "/home/alice" } else { "/etc" };
        let srun = cluster.run(&format!("srun -Q -N1 {a} {first} {print} : -N1 {a} {second} {print} | sort"));
        assert_out(&srun, 0, &format!("node1 a {workdir}\nnode2 a {workdir}\n"));
    }
    let batch = "printf '#!/bin/sh\\nsrun -Q --het-group=0,1 cat /image\\n' > job";
    let sbatch = cluster.run(&format!(
        "{batch}; sbatch -Q --wait -o out --no-container-script -N1 {a} : -N1 {a} --no-container-script job; cat out"
    ));
    assert_out(&sbatch, 0, "a\na\n");
    let message = "mizzen: the components of a heterogeneous job ask for different containers: ";
    for second in [
        "--container=/shared/b.sqsh",
        "--container=none",
        "--container=/shared/a.sqsh --container-workdir=/usr",
        "--container=/shared/a.sqsh --container-mounts=/usr:/b",
    ] {
        let command =
            format!("sbatch -N1 {a} --container-workdir=/etc : -N1 {second} --wrap 'touch /shared/marker'");
        let refused = cluster.run(&command);
        assert_eq!(refused.stderr.matches(message).count(), 1, "{command}: {}", refused.text());
        assert_eq!(refused.code, 1, "{}", refused.text());
    }
    assert_eq!(cluster.run("ls /shared/marker").stdout, "");
}

#[test]
fn every_component_has_its_own_settings() {
    let cluster = with_images(Spec { nodes: 2, ..one_node(Release::Slurm22_05, "own-settings") });
    let a = "--container=/shared/a.sqsh";
    let print = "sh -c 'echo $(hostname) $(cat /image) $(pwd) $(ls -d /a /b 2>/dev/null) $X'";
    for (first, second, expected) in [
        ("--container-workdir=/etc", "--container-workdir=/usr", "node1 a /etc\nnode2 a /usr\n"),
        ("--container-workdir=/etc", "", "node1 a /etc\nnode2 a /home/alice\n"),
        (
            "--container-mounts=/usr:/a,/etc:/b",
            "--container-mounts=/usr:/b",
            "node1 a /home/alice /a /b\nnode2 a /home/alice /b\n",
        ),
        // What the user exports holds as without mizzen: Slurm hands the list on to the next component.
        ("--export=ALL,X=1", "", "node1 a /home/alice 1\nnode2 a /home/alice 1\n"),
        ("--export=ALL,X=1", "--export=ALL,X=2", "node1 a /home/alice 1\nnode2 a /home/alice 2\n"),
    ] {
        let srun = cluster.run(&format!("srun -Q -N1 {a} {first} {print} : -N1 {a} {second} {print} | sort"));
        assert_out(&srun, 0, expected);
    }
    // The variables stand for every component.
    let variable =
        cluster.run(&format!("MIZZEN_CONTAINER=/shared/a.sqsh srun -Q -N1 {print} : -N1 {print} | sort"));
    assert_out(&variable, 0, "node1 a /home/alice\nnode2 a /home/alice\n");
    let variable =
        cluster.run(&format!("SLURM_CONTAINER=/shared/a.sqsh srun -Q -N1 {print} : -N1 {print} | sort"));
    assert_out(&variable, 0, "node1 a /home/alice\nnode2 a /home/alice\n");
    // A component without a container has the environment of a job without one, and can ask for one itself.
    let nested = "sh -c 'ls /image; echo $SLURM_MIZZEN_SRUN; MIZZEN_CONTAINER=/shared/b.sqsh srun --overlap -Q -N1 -n1 cat /image'";
    let nested = cluster.run(&format!("srun -Q -N1 {nested} : -N1 {a} true"));
    assert_eq!((nested.code, nested.stdout.as_str()), (0, "\nb\n"), "{}", nested.text());
    let export =
        cluster.run(&format!("srun -N1 {a} true : -N1 {a} --export=ALL,SLURM_MIZZEN_REQUEST=none true"));
    assert_failed(&export, 1, "--export: \"SLURM_MIZZEN_REQUEST=none\" beside a container that is asked for");
    let missing = cluster.run(&format!("srun -N1 {a} true : -N1 --container=/shared/missing true"));
    assert_failed(&missing, 1, "--container: no such image; tried /shared/missing");
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
}

#[test]
fn programs_see_the_environment_of_the_users_guide() {
    let cluster = start("step-environment");
    let export =
        "export LD_PRELOAD= LD_LIBRARY_PATH=/host FROM_HOST=1 FROM_IMAGE=host BASH_ENV=/x OMPI_X=1 TZ=UTC";
    let oci = |options: &str, program: &str| {
        cluster.run(&format!("{export}; srun -Q --container=/shared/oci.sqsh {options} {program}"))
    };
    let print = "sh -c 'echo $PATH $FROM_IMAGE $FROM_HOST $HOME $BASH_ENV $LD_LIBRARY_PATH $OMPI_X $TZ $SLURM_PROCID'";
    assert_out(&oci("", print), 0, "/opt/bin:/bin yes 1 /home/alice 1 UTC 0\n");
    assert_out(
        &oci("--container-env=FROM_IMAGE,LD_LIBRARY_PATH", print),
        0,
        "/opt/bin:/bin host 1 /home/alice /host 1 UTC 0\n",
    );
    assert_out(&oci("--export=NONE", "sh -c 'echo $FROM_IMAGE $FROM_HOST $SLURM_PROCID'"), 0, "yes 0\n");
    assert_out(&oci("--export=FROM_IMAGE=2,X=3", "sh -c 'echo $FROM_IMAGE $FROM_HOST $X'"), 0, "yes 3\n");
    assert_out(&oci("--export=ALL,X=3", "sh -c 'echo $FROM_HOST $X'"), 0, "1 3\n");
    // The image, and of mizzen's inner workings what a nested srun and --container-join need.
    let names = oci("", "env").stdout;
    let ours: Vec<&str> = names
        .lines()
        .filter_map(|line| line.split('=').next())
        .filter(|name| name.contains("MIZZEN") || name.contains("CONTAINER"))
        .collect();
    assert_eq!(ours, ["MIZZEN_IMAGE", "SLURM_MIZZEN_REQUEST", "SLURM_MIZZEN_STEP"], "{names}");
    // Where the program starts.
    assert_out(&cluster.run("cd /tmp; srun -Q --container=/shared/oci.sqsh pwd"), 0, "/tmp\n");
    let elsewhere = cluster.run("cd /usr/share; srun -Q -n4 --container=/shared/oci.sqsh pwd");
    assert_out(&elsewhere, 0, "/var\n/var\n/var\n/var\n");
    assert_failed(
        &elsewhere,
        0,
        "mizzen: note: node1: /usr/share is not in the container; the program starts in /var",
    );
    assert_out(&cluster.run("mkdir /shared/project; cd /shared/project; srun -Q --container=/shared/oci.sqsh sh -c 'pwd; echo $PWD'"), 0, "/shared/project\n/shared/project\n");
    let nowhere = oci("-n2 --container-workdir=/no/such", "pwd");
    assert_failed(
        &nowhere,
        125,
        "mizzen: node1: --container-workdir: cannot start in /no/such: No such file or directory",
    );
    assert_failed(
        &nowhere,
        125,
        "mizzen: hint: it must be a directory inside the container; a mount can bring one of the host's",
    );
}

#[test]
fn users_are_themselves_inside() {
    let cluster = start("step-identity");
    let a = |options: &str, program: &str| {
        srun(&cluster, &format!("--container=/shared/a.sqsh {options}"), program)
    };
    let everybody = "uid=2001(alice) gid=2001(alice) groups=2001(alice),2100(research),2101(gpu)\n";
    assert_out(&a("-n2", "id"), 0, &everybody.repeat(2));
    assert_out(
        &a("--container-remap-root", "id"),
        0,
        "uid=0(root) gid=0(root) groups=0(root),2100(research),2101(gpu)\n",
    );
    // Files of a group stay the group's.
    cluster.run_as_root("mkdir /shared/gpu; chgrp gpu /shared/gpu; chmod 2770 /shared/gpu");
    let file = a("--container-mounts=/shared", "sh -c 'touch /shared/gpu/f; stat -c %U:%G /shared/gpu/f'");
    assert_out(&file, 0, "alice:gpu\n");
    assert_out(&cluster.run("stat -c %U:%G /shared/gpu/f"), 0, "alice:gpu\n");
    let groups = a(
        "",
        "sh -c 'cat /proc/self/setgroups; grep -c . /proc/self/gid_map; grep NoNewPrivs /proc/self/status'",
    );
    assert_out(&groups, 0, "deny\n2\nNoNewPrivs:\t1\n");
}
