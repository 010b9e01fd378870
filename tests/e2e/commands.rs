//! The commands beside `mizzen run`.

use mizzen_tests::User;
use mizzen_tests::check::{assert_failed, machine, with_busybox};
use serde_json::json;

#[test]
fn the_plan_tells_what_a_run_does_and_why() {
    let cluster = with_busybox("plan");
    cluster.run("mkdir /tmp/data");
    let plan = cluster.run("mizzen plan -m /tmp/data:/data:ro -e A=b /shared/bb.sqsh true");
    assert_eq!(plan.code, 0, "{}", plan.text());
    for line in [
        "command   true",
        "workdir   /home/alice",
        "user      2001 is 2001 inside",
        "root      read-only                                                  default",
        "places    /home                                                      the image lacks /home/alice",
        "mount     /data from /tmp/data read-only                             --mount",
        "mount     /home/alice from the host                                  default: the home directory",
        "env       A=b                                                        --env",
        "env       HOME=/home/alice                                           host",
    ] {
        assert!(plan.stdout.contains(line), "{line}\n{}", plan.stdout);
    }
    let json: serde_json::Value =
        serde_json::from_str(&cluster.run("mizzen plan --json --writable=1g /shared/bb.sqsh").stdout)
            .unwrap();
    assert_eq!(
        json["root"],
        json!({ "value": "writable in memory, up to 1g", "why": "by option, or mizzen.toml" })
    );
    assert_eq!(json["command"]["value"][0], "/bin/sh");
    assert_eq!(cluster.run("pgrep mizzen").stdout, "", "a plan does nothing");
}

#[test]
fn the_doctor_finds_what_is_missing() {
    let cluster = with_busybox("doctor");
    let healthy = cluster.run("mizzen doctor");
    assert_eq!(healthy.code, 0, "{}", healthy.text());
    assert!(
        healthy.stdout.ends_with("containers can run here\n") && !healthy.stdout.contains("FAILED"),
        "{}",
        healthy.text()
    );
    cluster.run_as_root("chmod 600 /dev/fuse");
    let fuse = cluster.run("mizzen doctor");
    cluster.run_as_root("chmod 666 /dev/fuse");
    assert_eq!(fuse.code, 1, "{}", fuse.text());
    assert!(
        fuse.stdout.contains("FAILED   FUSE            cannot open /dev/fuse: Permission denied"),
        "{}",
        fuse.text()
    );
    assert!(fuse.stdout.contains("hint: load the kernel module fuse"), "{}", fuse.text());
    let denied = "strace -f -o /dev/null -e inject=unshare:error=EPERM";
    let namespaces = cluster.run(&format!("{denied} mizzen doctor --json"));
    let json: serde_json::Value = serde_json::from_str(&namespaces.stdout).unwrap();
    assert_eq!((namespaces.code, &json["healthy"]), (1, &serde_json::Value::Bool(false)));
    // What others have left no memory or processes for says nothing of the node.
    let no_process = "strace -f -o /dev/null -e inject=clone,clone3,fork,vfork:error=EAGAIN mizzen doctor";
    let untried = cluster.run(no_process);
    assert_eq!(untried.code, 2, "{}", untried.text());
    let line = "unknown  user namespace  cannot try: Resource temporarily unavailable";
    assert!(untried.stdout.contains(line) && !untried.stdout.contains("FAILED"), "{}", untried.text());
    let verdict = "it cannot be told whether containers can run here\n";
    assert!(untried.stdout.ends_with(verdict), "{}", untried.text());
    let as_root = cluster.run_as_root(no_process);
    let message = "cannot start a process as an unprivileged user: Resource temporarily unavailable";
    assert_failed(&as_root, 2, message);
    let no_memory = cluster.run("strace -f -o /dev/null -e inject=unshare:error=ENOMEM mizzen doctor --json");
    let json: serde_json::Value = serde_json::from_str(&no_memory.stdout).unwrap();
    assert_eq!((no_memory.code, &json["healthy"]), (2, &serde_json::Value::Null), "{}", no_memory.text());
    let run = cluster.run(&format!("{denied} mizzen run /shared/bb.sqsh true"));
    assert_failed(&run, 125, "mizzen: cannot make a user namespace: Operation not permitted\nmizzen: hint: ");
    let full =
        cluster.run("strace -f -o /dev/null -e inject=unshare:error=ENOSPC mizzen run /shared/bb.sqsh true");
    assert_failed(
        &full,
        125,
        "mizzen: hint: you have as many user namespaces as you may (sysctl user.max_user_namespaces = ",
    );
}

#[test]
fn help_completions_and_man_pages_come_from_one_place() {
    let cluster = machine("help");
    let help = cluster.run("mizzen run --help").stdout;
    let man = cluster
        .run_on("ctl", User::Alice, "mkdir man; mizzen man man && ls man && cat man/mizzen-run.1")
        .stdout;
    let completions = cluster.run("mizzen completions bash").stdout;
    for option in [
        "--mount",
        "--no-home",
        "--workdir",
        "--env",
        "--env-file",
        "--clean-env",
        "--remap-root",
        "--writable",
        "--unshare",
    ] {
        assert!(help.contains(option), "{option}: {help}");
        assert!(man.replace("\\-", "-").contains(option), "{option}: {man}");
        assert!(completions.contains(option), "{option}");
    }
    assert!(man.contains("mizzen.1") && man.contains("mizzen-doctor.1"), "{man}");
}
