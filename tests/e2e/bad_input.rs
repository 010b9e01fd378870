//! What users, other users and the node's files can give the launcher that is not as it should be: names that are taken,
//! strange masks and limits, streams that are closed or full, files without an end, and nesting without measure.

use std::time::{Duration, Instant};

use mizzen_tests::check::{assert_failed, assert_out, run_in_time, start_with_busybox, with_busybox};
use mizzen_tests::copies::{CACHE, TOML, copies_in, digest_of, staging_cluster};
use mizzen_tests::images::ImageTree;
use mizzen_tests::registry::{Layout, LocalRegistry};
use mizzen_tests::{Cluster, Output, Spec, User};

#[test]
fn names_that_others_have_taken_cost_no_copy() {
    let cluster = staging_cluster("taken", TOML);
    let as_bob = |script: &str| assert_out(&cluster.run_on("ctl", User::Bob, script), 0, "");
    let clean = |cluster: &Cluster| cluster.run_as_root(&format!("rm -rf {CACHE}* /tmp/trap"));
    let second = format!("{CACHE}.1");
    let digest = digest_of(&cluster, "/shared/a.sqsh");
    for make in
        ["mkdir", "mkdir -m 777", "mkdir -m 700", "ln -s /tmp/trap", "ln -s /nowhere", "touch", "mkfifo"]
    {
        clean(&cluster);
        as_bob(&format!("mkdir -m 777 /tmp/trap; {make} {CACHE}"));
        let run = cluster.run("mizzen run /shared/a.sqsh cat /image");
        assert_out(&run, 0, "a\n");
        assert_eq!(run.stderr, "", "{make}");
        assert_eq!(copies_in(&cluster, User::Alice, &second).len(), 1, "{make}");
        assert_out(&cluster.run(&format!("stat -c '%a %U' {second}; ls -A /tmp/trap")), 0, "700 alice\n");
        // Every command finds the same one, also when the first name is free again.
        let there = format!("/shared/a.sqsh: {digest} was there\n");
        assert_out(&cluster.run("mizzen stage /shared/a.sqsh"), 0, &there);
        as_bob(&format!("rm -rf {CACHE}"));
        assert_out(&cluster.run("mizzen stage /shared/a.sqsh"), 0, &there);
        let list = cluster.run("mizzen cache list");
        assert!(list.stdout.contains(&format!("\n{second}: 1 copy, ")), "{make}: {}", list.text());
        assert_eq!(cluster.run("mizzen cache verify && mizzen cache remove --all").code, 0);
        assert_eq!(copies_in(&cluster, User::Alice, &second).len(), 0, "{make}");
    }
    // Who takes them all gets no more: then it is one that nobody can foresee, and it is found again.
    clean(&cluster);
    as_bob(&format!("mkdir {CACHE} {CACHE}.{{1..40}}"));
    for start in ["first", "second"] {
        let run = cluster.run("mizzen run /shared/a.sqsh cat /image");
        assert_out(&run, 0, "a\n");
        assert_eq!(run.stderr, "", "{start}");
    }
    let drawn = format!(
        "find /var/tmp -maxdepth 1 -user alice -name 'mizzen-2001.x*' -printf '%m\\n'; ls {CACHE}.x*/sha256-* | wc -l"
    );
    assert_out(&cluster.run(&drawn), 0, "700\n1\n");
    // Where nobody may list the directory, that could not be found again.
    cluster.run_as_root(&format!("rm -rf {CACHE}.x*; chmod 1733 /var/tmp"));
    let run = cluster.run("mizzen run /shared/a.sqsh cat /image");
    assert_out(&run, 0, "a\n");
    let note =
        format!("note: ctl: /shared/a.sqsh is used where it is: {CACHE}: belongs to uid 2002, not to you");
    assert_eq!(run.stderr.matches(&note).count(), 1, "{}", run.text());
    let named = cluster.run("mizzen run --name x /shared/a.sqsh true");
    assert_failed(&named, 125, &format!("mizzen: {CACHE}: belongs to uid 2002, not to you"));
    assert_failed(
        &cluster.run("mizzen cache list"),
        1,
        &format!("mizzen: {CACHE}: belongs to uid 2002, not to you"),
    );
    cluster.run_as_root("chmod 1777 /var/tmp");
    // The same in a step.
    assert_out(&cluster.run_on("node1", User::Bob, &format!("mkdir {CACHE}")), 0, "");
    let step = cluster.run("srun --quiet --container=/shared/a.sqsh cat /image");
    assert_out(&step, 0, "a\n");
    assert_eq!(step.stderr, "");
    let kept = cluster.run_on("node1", User::Alice, &format!("ls {second} | grep -c ^sha256"));
    assert_out(&kept, 0, "1\n");
}

#[test]
fn a_mask_of_the_users_is_for_the_programs_files() {
    let cluster = staging_cluster("masks", TOML);
    let modes = format!("cd {CACHE}; stat -c '%a' .; find . -type f -printf '%m\\n' | sort -u | xargs");
    for mask in ["0777", "0277", "0477", "0177", "0027"] {
        cluster.run_as_root(&format!("rm -rf {CACHE}"));
        let run = cluster.run(&format!("umask {mask}; mizzen run /shared/a.sqsh sh -c 'cat /image; umask'"));
        assert_out(&run, 0, &format!("a\n{mask}\n"));
        assert_eq!(run.stderr, "", "{mask}");
        assert_out(&cluster.run(&modes), 0, "700\n400 600\n");
        let again = cluster.run("mizzen stage /shared/a.sqsh");
        assert!(again.code == 0 && again.stdout.ends_with(" was there\n"), "{mask}: {}", again.text());
        assert_eq!(cluster.run(&format!("umask {mask}; mizzen cache verify && mizzen cache prune")).code, 0);
    }
    // One that was made so before is put right; it is nobody else's.
    for mode in ["000", "500", "2700"] {
        cluster.run_as_root(&format!("chmod {mode} {CACHE}"));
        let run = cluster.run("mizzen run /shared/b.sqsh cat /image");
        assert_out(&run, 0, "b\n");
        assert_eq!(run.stderr, "", "{mode}");
        assert_out(&cluster.run(&format!("stat -c %a {CACHE}")), 0, "700\n");
    }
    // Changes on disk.
    cluster
        .run_as_root("mkdir /var/tmp/alice; mount -t tmpfs disk /var/tmp/alice; chmod 1777 /var/tmp/alice");
    let old = "umask 777; TMPDIR=/var/tmp/alice strace -o /dev/null -e inject=fsetxattr:error=EOPNOTSUPP";
    let run = cluster.run(&format!(
        "{old} mizzen run --writable /shared/a.sqsh sh -c 'umask 22; echo x > /x; mkdir /y; cat /x'"
    ));
    assert_out(&run, 0, "x\n");
    assert_out(&cluster.run("sleep 0.5; ls /var/tmp/alice"), 0, "");
}

/// Everything that prints a result.
const RESULTS: [&str; 25] = [
    "completions bash",
    "completions zsh",
    "--help",
    "--version",
    "help run",
    "run --help",
    "plan /shared/bb.sqsh true",
    "plan --json /shared/bb.sqsh true",
    "inspect /shared/bb.sqsh",
    "inspect --json /shared/bb.sqsh",
    "doctor",
    "doctor --json",
    "doctor --gpu",
    "check-config",
    "stage /shared/bb.sqsh",
    "cache list",
    "env list",
    "cache --json prune",
    "config show",
    "containers list",
    "containers --json list",
    "images list",
    "images --json list",
    "env render /shared/box.toml",
    "env validate /shared/box.toml",
];

#[test]
fn closed_and_full_streams_end_nothing() {
    let cluster = with_busybox("streams");
    cluster.share("box.toml", b"image = \"/shared/bb.sqsh\"\n").unwrap();
    cluster.run("mizzen run --name streams /shared/bb.sqsh true");
    let unharmed = |what: &str, output: &Output| {
        assert!(output.code < 126 && !output.stderr.contains("panic"), "{what}: {}", output.text());
    };
    // Of an archive nobody wants a part.
    for (to, why) in [
        ("> /dev/full", "No space left on device"),
        (">&-", "Bad file descriptor"),
        ("| true; exit ${PIPESTATUS[0]}", "Broken pipe"),
    ] {
        let lost = cluster.run(&format!("mizzen export -o - /shared/bb.sqsh {to}"));
        assert_failed(&lost, 1, &format!("mizzen: standard output: cannot write the archive: {why}\n"));
    }
    for command in RESULTS {
        for (to, why) in [("> /dev/full", "No space left on device"), (">&-", "Bad file descriptor")] {
            let lost = cluster.run(&format!("mizzen {command} {to}"));
            assert_eq!(lost.code, 1, "{command} {to}: {}", lost.text());
            assert_failed(&lost, 1, &format!("mizzen: cannot write the result: {why}\n"));
            unharmed(command, &lost);
        }
        // A reader that goes away has what it wants.
        let gone = cluster.run(&format!("mizzen {command} | sleep 0; exit ${{PIPESTATUS[0]}}"));
        assert_eq!((gone.code, gone.stderr.as_str()), (0, ""), "{command}");
        for streams in ["2> /dev/full", "2>&-", "<&-", "<&- 2>&-", "< /dev/full"] {
            let told = cluster.run(&format!("mizzen {command} {streams}"));
            assert_eq!(told.code, 0, "{command} {streams}: {}", told.text());
            assert_ne!(told.stdout, "", "{command} {streams}");
        }
        let nothing = cluster.run(&format!("mizzen {command} <&- >&- 2>&-"));
        assert_eq!(nothing.code, 1, "{command}");
    }
    // Failures have their codes when nobody can be told.
    for streams in ["2> /dev/full", "2>&-", "> /dev/full 2>&1", "<&- >&- 2>&-"] {
        for (command, code) in [
            ("run /no/such true", 125),
            ("run --no-such-option", 125),
            ("run /shared/bb.sqsh nosuch", 127),
            ("run --unshare pid /shared/bb.sqsh nosuch", 127),
            ("run -v /shared/bb.sqsh sh -c 'exit 3'", 3),
            ("inspect /no/such", 1),
            ("cache remove nosuch", 1),
            ("no-such-command", 2),
        ] {
            let failed = cluster.run(&format!("mizzen {command} {streams}"));
            assert_eq!(failed.code, code, "{command} {streams}: {}", failed.text());
        }
        // Under the name of one of Slurm's commands, outside a container.
        let shim = cluster.run(&format!("(exec -a squeue mizzen) {streams}"));
        assert_eq!(shim.code, 127, "{streams}: {}", shim.text());
    }
    // Nothing that we open takes the place of a stream.
    let streams = "sh -c 'echo $(readlink /proc/$$/fd/0) $(readlink /proc/$$/fd/1) $(readlink /proc/$$/fd/2) > ~/streams; ls /proc/$$/fd >> ~/streams'";
    for options in ["", "--writable", "--unshare pid", "-m /shared/bb.sqsh:/data:squashfs"] {
        let run =
            cluster.run(&format!("mizzen run {options} /shared/bb.sqsh {streams} <&- >&- 2>&-; cat streams"));
        let found: Vec<&str> = run.stdout.lines().collect();
        assert_eq!(found[0], "/dev/null /dev/null /dev/null", "{options}: {}", run.text());
        assert!(
            found[1..].iter().all(|fd| ["0", "1", "2", "3", "10"].contains(fd)),
            "{options}: {}",
            run.text()
        );
    }
    let full = cluster.run("mizzen run /shared/bb.sqsh sh -c 'echo x' > /dev/full");
    assert_failed(&full, 1, "No space left on device");
}

/// What else prints a result, with what has to be done each time before, because the command changes something.
const CHANGES: [(&str, &str); 16] = [
    ("mizzen stage /shared/bb.sqsh", "mizzen cache verify"),
    ("mizzen stage /shared/bb.sqsh", "mizzen cache remove --all"),
    ("enroot create -n gone /shared/bb.sqsh", "mizzen containers remove gone"),
    ("", "mizzen containers --json prune"),
    (IMPORT, "mizzen images update"),
    (IMPORT, "mizzen images remove docker://ctl:5000/lab/app:1"),
    (IMPORT, "mizzen images prune"),
    ("", IMPORT),
    ("rm -f x.sqsh", "mizzen import --json -o x.sqsh docker://ctl:5000/lab/app:1"),
    ("", LOGIN),
    (LOGIN, "mizzen logout ctl:5001"),
    ("enroot create -n there /shared/bb.sqsh", "enroot list"),
    ("enroot create -n there /shared/bb.sqsh", "enroot list --fancy"),
    ("", "enroot version"),
    ("", "enroot --help"),
    ("", "enroot help start"),
];
const IMPORT: &str = "mizzen import docker://ctl:5000/lab/app:1";
const LOGIN: &str = "mizzen login ctl:5001 -u alice --password-stdin <<< secret";

/// What has nothing to print.
const SILENT: [(&str, &str); 6] = [
    ("", "mizzen man /disk/man"),
    ("rm -f x.sqsh", "mizzen import -o x.sqsh docker://ctl:5000/lab/app:1"),
    ("rm -f x.tar", "mizzen export -o x.tar /shared/bb.sqsh"),
    ("enroot remove -f new", "enroot create -n new /shared/bb.sqsh"),
    ("enroot create -n new /shared/bb.sqsh; rm -f x.sqsh", "enroot export -o x.sqsh new"),
    ("enroot create -n new /shared/bb.sqsh", "enroot remove -f new"),
];

#[test]
fn commands_that_change_something_mind_their_streams() {
    let layout = Layout::new().unwrap();
    layout.image("one", &[&ImageTree::busybox().unwrap()], &[]).unwrap();
    let registry = LocalRegistry::start().unwrap();
    registry.push(&layout, "one", "lab/app:1", &[]).unwrap();
    let toml = "stage_directory = \"/disk\"\n[registries.\"ctl:5000\"]\nplain_http = true\n\
                [registries.\"ctl:5001\"]\nplain_http = true\n";
    let spec = Spec { mizzen_toml: Some(toml.to_owned()), nodes: 1, ..Cluster::spec("changes") };
    let cluster = start_with_busybox(spec);
    let _open = registry.serve_on(&cluster, 5000, None).unwrap();
    let htpasswd = "alice:$2y$05$6hS8ZsFBbGy50MmSqbw4Nej77kMmzAc0N/jI29uCuhCbQDmT1bBQm\n";
    let _locked = registry.serve_on(&cluster, 5001, Some(htpasswd)).unwrap();
    let disk = "mkdir /disk /opt/names && mount -t tmpfs disk /disk && chmod 1777 /disk && mkdir -m 777 /disk/man && \
                ln -s /usr/bin/mizzen /opt/names/enroot";
    assert_out(&cluster.run_on("node1", User::Root, disk), 0, "");
    let run = |prepare: &str, command: &str| {
        let prepared =
            if prepare.is_empty() { String::new() } else { format!("({prepare}) > /dev/null 2>&1; ") };
        let done =
            cluster.run_on("node1", User::Alice, &format!("PATH=/opt/names:$PATH; cd; {prepared}{command}"));
        assert!(!done.stderr.contains("panic"), "{command}: {}", done.text());
        done
    };
    let streams = ["2> /dev/full", "2>&-", "<&-", "<&- 2>&-", "< /dev/full"];
    for (prepare, command) in CHANGES {
        for (to, why) in [("> /dev/full", "No space left on device"), (">&-", "Bad file descriptor")] {
            let lost = run(prepare, &format!("{command} {to}"));
            let told = lost.stderr.contains(&format!("mizzen: cannot write the result: {why}\n"));
            assert_eq!((lost.code, told), (1, true), "{command} {to}: {}", lost.text());
        }
        let gone = run(prepare, &format!("{command} | sleep 0; exit ${{PIPESTATUS[0]}}"));
        assert_eq!(gone.code, 0, "{command}: {}", gone.text());
        // One that reads a password needs its input.
        for streams in streams.iter().filter(|streams| !command.contains("<<<") || !streams.contains('<')) {
            let told = run(prepare, &format!("{command} {streams}"));
            assert_eq!(told.code, 0, "{command} {streams}: {}", told.text());
            assert_ne!(told.stdout, "", "{command} {streams}");
        }
    }
    for (prepare, command) in SILENT {
        for streams in [""].into_iter().chain(streams).chain(["> /dev/full", ">&-", "<&- >&- 2>&-"]) {
            let done = run(prepare, &format!("{command} {streams}"));
            assert_eq!((done.code, &*done.stdout), (0, ""), "{command} {streams}: {}", done.text());
        }
    }
}

#[test]
fn files_without_an_end_are_refused() {
    let cluster = with_busybox("endless");
    let run = |options: &str| run_in_time(&cluster, &format!("ulimit -v 2000000; mizzen run {options}"));
    cluster.run("mkfifo fifo; head -c 2000000 /dev/zero | tr '\\0' x > long");
    for (options, message) in [
        ("--env-file /dev/zero", "--env-file: /dev/zero: larger than 1 MiB"),
        ("--env-file /dev/urandom", "--env-file: /dev/urandom: larger than 1 MiB"),
        ("--env-file long", "--env-file: long: larger than 1 MiB"),
        ("--env-file <(yes)", "larger than 1 MiB"),
        ("--env-file fifo", "--env-file: fifo: a pipe whose writer has not ended after 10 s"),
        ("--env-file /", "--env-file: /: Is a directory"),
        ("-m fifo:/x:squashfs", "fifo: not a file"),
        ("-m /dev/zero:/x:squashfs", "/dev/zero: not a file"),
    ] {
        assert_failed(&run(&format!("{options} /shared/bb.sqsh true")), 125, message);
    }
    for image in ["/dev/zero", "fifo"] {
        assert_failed(&run(&format!("{image} true")), 125, "not an image (is a ");
    }
    // What ends is read, from pipes too.
    let program = "/shared/bb.sqsh sh -c 'echo $A'";
    assert_out(&run(&format!("--env-file <(sleep 0.3; echo A=b) {program}")), 0, "b\n");
    assert_out(&run(&format!("--env-file /dev/null {program}")), 0, "\n");
    assert_out(&run(&format!("--env-file /dev/stdin {program} <<< A=c")), 0, "c\n");
    assert_out(&run(&format!("--env-file fifo {program} & sleep 0.3; echo A=d > fifo; wait $!")), 0, "d\n");
    for file in ["/dev/zero", "/home/alice/fifo"] {
        let checked = run_in_time(&cluster, &format!("mizzen check-config {file}"));
        assert_eq!(checked.code, 1, "{}", checked.text());
        let step = format!("SLURM_CONF={file} SLURM_JOB_ID=1 SLURM_STEP_ID=0 PMIX_RANK=0 PMIX_NAMESPACE=x");
        let planned = run_in_time(&cluster, &format!("ulimit -v 2000000; {step} mizzen plan {program}"));
        assert_eq!(planned.code, 0, "{}", planned.text());
    }
    // What the importer reads, in srun's place too.
    for (file, why) in [
        ("fifo", "a pipe whose writer has not ended after 10 s"),
        ("/dev/zero", "larger than 1 MiB"),
        ("long", "larger than 1 MiB"),
    ] {
        let logout = cluster.run(&format!("mizzen logout --authfile {file} localhost"));
        assert_failed(&logout, 1, &format!("{file}: cannot read the credentials: {why}"));
    }
    cluster.run("(echo -----BEGIN; head -c 20000000 /dev/zero) > certificates");
    let srun = "srun --container=docker://127.0.0.1:1/a:1 true";
    for (file, why) in [("/dev/zero", "larger than 16 MiB"), ("certificates", "larger than 16 MiB")] {
        for command in ["mizzen import docker://127.0.0.1:1/a:1", srun] {
            let refused = run_in_time(&cluster, &format!("SSL_CERT_FILE={file} {command}"));
            assert_failed(
                &refused,
                1,
                &format!("SSL_CERT_FILE: {file}: cannot read the certificates: {why}"),
            );
        }
    }
    assert_out(
        &cluster.run_as_root("mkdir /etc/mizzen.test; head -c 2000000 /dev/zero > /etc/mizzen.test/x.toml"),
        0,
        "",
    );
    assert_failed(&cluster.run("mizzen check-config /etc/mizzen.test/x.toml"), 1, "larger than 1 MiB");
}

#[test]
fn an_image_in_a_file_of_another_size_is_told_at_once() {
    let cluster = with_busybox("sizes");
    let size = cluster.run("stat -c %s /shared/bb.sqsh").stdout.trim().to_owned();
    cluster.run("cd /tmp; cp /shared/bb.sqsh long; truncate -s 1P long; head -c 100000 /shared/bb.sqsh > short; cp /shared/bb.sqsh padded; truncate -s +20M padded");
    let zeros = "0".repeat(64);
    let begin = Instant::now();
    for command in ["inspect /tmp/long", "inspect --json /tmp/long"] {
        let told = run_in_time(&cluster, &format!("mizzen {command}"));
        assert_eq!(told.code, 1, "{}", told.text());
        assert!(told.stderr.contains("mizzen: /tmp/long: the image in it ends after "), "{}", told.text());
        assert!(told.stderr.contains(" bytes, the file after 1125899906842624\n"), "{}", told.text());
        assert!(told.stderr.contains("\nmizzen: hint: something else follows the image"), "{}", told.text());
    }
    let pinned = run_in_time(&cluster, &format!("mizzen run /tmp/long@sha256:{zeros} true"));
    assert_failed(&pinned, 125, "mizzen: /tmp/long: the image in it ends after ");
    assert_failed(&cluster.run("mizzen inspect /tmp/short"), 1, "mizzen: /tmp/short: ");
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    // Nobody has to read what follows in order to run it, or to know the digest of what is padded.
    assert_out(&run_in_time(&cluster, "mizzen run /tmp/long echo x"), 0, "x\n");
    let staged = run_in_time(&cluster, "mizzen run --stage=always /tmp/long echo x");
    assert_out(&staged, 0, "x\n");
    assert_eq!(
        staged.stderr.matches("/tmp/long is used where it is: no room for 1").count(),
        1,
        "{}",
        staged.text()
    );
    let padded = cluster.run("mizzen inspect --json /tmp/padded");
    let padded: serde_json::Value = serde_json::from_str(&padded.stdout).unwrap();
    assert_eq!(padded["size"].as_u64().unwrap(), size.parse::<u64>().unwrap() + (20 << 20));
    assert_eq!(padded["digest"], digest_of(&cluster, "/tmp/padded").as_str());
}

#[test]
fn patterns_and_nested_specifications_take_no_time() {
    let cluster = with_busybox("nested");
    for machine in ["ctl", "node1"] {
        let files = format!("mkdir -p /etc/cdi /opt/many; touch /opt/many/{}", "a".repeat(200));
        assert_out(&cluster.run_on(machine, User::Root, &files), 0, "");
    }
    let stars = "*a".repeat(30) + "b";
    let rule = format!(
        "switch = \"gpu\"\nwhen = [\"/opt/many\"]\ndirectories = [\"/opt/many\"]\n[[set]]\nname = \"all\"\n\
         files = [\"/opt/many/{stars}\"]\noptional = [\"{stars}\"]\n"
    );
    cluster.write_everywhere("/etc/mizzen/host.d/stars.toml", &rule).unwrap();
    let doctor = run_in_time(&cluster, "mizzen doctor --gpu");
    assert_eq!(doctor.code, 0, "{}", doctor.text());
    assert!(doctor.stdout.contains("stars"), "{}", doctor.text());
    assert_out(&run_in_time(&cluster, "mizzen run --gpu all /shared/bb.sqsh echo x"), 0, "x\n");
    assert_out(&cluster.run_as_root("rm /etc/mizzen/host.d/stars.toml"), 0, "");
    let head = "cdiVersion: 0.6.0\nkind: vendor.com/card\n";
    let json = "{\"cdiVersion\":\"0.6.0\",\"kind\":\"vendor.com/card\",\"devices\":";
    let deep = 400_000;
    let laughs: String = (1..24).fold("a0: &a0 [x, x]\n".to_owned(), |text, level| {
        let alias = format!("*a{}", level - 1);
        text + &format!("a{level}: &a{level} [{alias}, {alias}, {alias}, {alias}]\n")
    });
    // Nothing is nested here, but 8000 devices have 100,000 variables each.
    let many_devices = format!(
        "{head}containerEdits: {{env: &e [{}]}}\ndevices:\n{}",
        "A=".to_owned() + &", A=".repeat(100_000),
        (0..8000).map(|i| format!("- {{name: d{i}, containerEdits: {{env: *e}}}}\n")).collect::<String>()
    );
    let too_deep = "it is nested more than 64 levels deep";
    for (name, text, message) in [
        ("x.json", format!("{json}{}", "[".repeat(deep)), too_deep),
        ("x.json", format!("{json}{}{}}}", "[".repeat(deep), "]".repeat(deep)), too_deep),
        ("x.json", format!("{json}{}1{}}}", "{\"a\":".repeat(deep / 4), "}".repeat(deep / 4)), too_deep),
        ("x.yaml", format!("{head}devices: {}", "[ \"]\", ".repeat(deep / 5)), too_deep),
        ("x.yaml", format!("{head}devices:\n{}x\n", "- ".repeat(deep)), "vendor.com/card=0"),
        ("x.yaml", format!("{head}devices:\n{}x\n", "? ".repeat(deep)), "vendor.com/card=0"),
        ("x.yaml", format!("{head}annotations:\n{}x\n", "? ".repeat(deep)), "vendor.com/card=0"),
        ("x.yaml", format!("{laughs}{head}devices: *a23\n"), "it repeats a part of itself by an alias"),
        ("x.yaml", format!("{head}devices: &d [*d]\n"), "it repeats a part of itself by an alias"),
        ("x.yaml", many_devices, "it repeats a part of itself by an alias"),
    ] {
        cluster.write_everywhere(&format!("/etc/cdi/{name}"), &text).unwrap();
        let refused = run_in_time(
            &cluster,
            "ulimit -v 2000000; mizzen run --device vendor.com/card=0 /shared/bb.sqsh true",
        );
        assert_failed(&refused, 125, message);
        assert!(refused.stderr.lines().count() <= 2, "{}", refused.text());
        assert_out(&cluster.run_as_root(&format!("rm /etc/cdi/{name}")), 0, "");
    }
}

#[test]
fn a_small_stack_is_enough_or_named() {
    let cluster = with_busybox("stacks");
    let program = "/shared/bb.sqsh sh -c 'ulimit -Ss; ulimit -Hs'";
    // What the user may have more of is taken for the start; the program has the user's own limit.
    for (limits, expected) in [
        ("ulimit -Ss 64", "64\nunlimited\n"),
        ("ulimit -Ss 128; ulimit -Hs 8192", "128\n8192\n"),
        ("ulimit -s 8192", "8192\n8192\n"),
        ("ulimit -s unlimited", "unlimited\nunlimited\n"),
    ] {
        for options in ["", "--unshare pid"] {
            let run = cluster
                .run(&format!("{limits}; for i in 1 2 3 4 5; do mizzen run {options} {program}; done"));
            assert_out(&run, 0, &expected.repeat(5));
            assert_eq!(run.stderr, "", "{limits}");
        }
    }
    // What nobody can start with is named, whatever the kernel makes of the rest.
    for size in [24, 32, 48, 64, 96, 128, 160] {
        let all = cluster.run(&format!(
            "export -n $(compgen -e | grep -v PATH); for i in $(seq 50); do prlimit --stack={} mizzen run {program} 2>&1; echo $?; done | sort | uniq -c",
            size << 10
        ));
        let message = format!("mizzen: the stack may have {size} KiB, and 256 KiB are needed\n");
        let hint = "mizzen: hint: your limit on the size of the stack: ulimit -Hs\n";
        let expected = format!("     50 125\n     50 {hint}     50 {message}");
        assert_eq!(all.stdout, expected, "{size}: {}", all.text());
    }
}
