//! Installed, used, upgraded, removed: on Debian's releases, on Ubuntu's, and by rpm.

use std::collections::BTreeSet;
use std::process::{Child, Stdio};

use mizzen_tests::check::assert_out;
use mizzen_tests::release::{packages_rootfs, ubuntu_rootfs};
use mizzen_tests::{Output, Release, User, on_every_release};

use crate::site::{Site, Tool, Version, eventually};

on_every_release!(lives);

fn lives(release: Release) {
    lifecycle(&Site::start(Tool::Apt, Site::spec(&format!("package-{}", release.debian()), release, None)));
}

/// Slurm 21.08.
#[test]
fn lives_on_ubuntu_jammy() {
    ubuntu("jammy", Release::Slurm20_11);
}

/// Slurm 23.11.
#[test]
fn lives_on_ubuntu_noble() {
    ubuntu("noble", Release::Slurm22_05);
}

/// Slurm 25.11.
#[test]
fn lives_on_ubuntu_resolute() {
    ubuntu("resolute", Release::Slurm24_11);
}

/// Slurm there is configured as the release of Debian's that is as old or older.
fn ubuntu(name: &str, older: Release) {
    let rootfs = Some(ubuntu_rootfs(name).unwrap());
    lifecycle(&Site::start(Tool::Apt, Site::spec(&format!("package-{name}"), older, rootfs)));
}

#[test]
fn lives_by_rpm() {
    let rootfs = Some(packages_rootfs().unwrap());
    let site = Site::start(Tool::Rpm, Site::spec("package-rpm", Release::Slurm22_05, rootfs));
    wants_little(&site);
    lifecycle(&site);
}

/// What every distribution with rpm has: a shell, and a glibc that is not too new. (What rpm itself must know is no package.)
fn wants_little(site: &Site) {
    let requires =
        site.root("node1", &format!("rpm -qp --requires /shared/{}", site.file_name(Version::This))).stdout;
    let needed: Vec<&str> = requires.lines().filter(|line| !line.starts_with("rpmlib(")).collect();
    let names: BTreeSet<&str> = needed.iter().filter_map(|line| line.split(['(', ' ']).next()).collect();
    let expected =
        ["/bin/sh", "config", "ld-linux-x86-64.so.2", "libc.so.6", "libdl.so.2", "libpthread.so.0"];
    assert_eq!(names, BTreeSet::from(expected), "{requires}");
    let version = |line: &str| {
        let (_, version) = line.split_once("(GLIBC_2.")?;
        version.split(['.', ')']).next()?.parse::<u32>().ok()
    };
    assert!(needed.iter().filter_map(|line| version(line)).max() <= Some(28), "{requires}");
}

const MACHINES: [&str; 3] = ["node1", "node2", "ctl"];
const CONTAINER: &str = "srun -Q -N2 --container=/shared/a.sqsh cat /image";
const RESTART_SLURMD: &str = "pid=$(cat /run/slurmd.pid); kill $pid; while grep -q 'State:.[^Z]' /proc/$pid/status; do sleep 0.1; done; slurmd";
const LINE: &str = "/etc/slurm/plugstack.conf.d/mizzen.conf";

fn lifecycle(site: &Site) {
    let before = site.root("node1", "ls -R /etc/slurm; cat /etc/slurm/plugstack.conf || true").stdout;
    plain_jobs_run(site);
    for machine in MACHINES {
        while_plain_jobs_run(site, || site.install(machine, Version::This));
    }
    containers_run(site);
    the_machines_have_what_they_should(site);
    what_administrators_change(site);
    upgrade_under_running_steps(site);
    what_administrators_changed_is_there(site);
    removal(site, ["node1", "node2", "ctl"]);
    for machine in MACHINES {
        site.install(machine, Version::Next);
    }
    containers_run(site);
    if site.tool == Tool::Apt {
        let line = site.root("node1", &format!("cat {LINE}")).stdout;
        assert!(line.starts_with("optional "), "the administrator's line is back: {line}");
    }
    if site.tool == Tool::Rpm {
        // As docs/admins.md tells where AppArmor restricts user namespaces.
        site.root("node1", "ln -s /usr/share/mizzen/apparmor/mizzen /etc/apparmor.d/mizzen");
    }
    removal(site, ["ctl", "node2", "node1"]);
    nothing_is_left(site, &before);
}

#[track_caller]
fn plain_jobs_run(site: &Site) {
    let plain = site
        .cluster
        .run("srun -Q -N2 hostname | sort; sbatch -Q --wait -N1 -w node1 -o out --wrap hostname && cat out");
    assert_out(&plain, 0, "node1\nnode2\nnode1\n");
}

/// One after the other on both nodes, while the packages change, and once more then.
#[track_caller]
fn while_plain_jobs_run(site: &Site, change: impl FnOnce() -> Output) {
    site.cluster.run("rm -f stop");
    let jobs =
        "n=0; until test -e stop; do srun -Q -N2 true && n=$((n + 1)) || echo failed; done; test $n -gt 0";
    let jobs = start(site, jobs);
    change();
    site.cluster.run("touch stop");
    let output = jobs.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && output.stdout.is_empty(), "a plain job failed, or none ran: {said}");
    plain_jobs_run(site);
}

#[track_caller]
fn containers_run(site: &Site) {
    assert_out(&site.cluster.run(CONTAINER), 0, "a\na\n");
    assert_out(&site.cluster.run("mizzen run /shared/b.sqsh cat /image"), 0, "b\n");
}

fn the_machines_have_what_they_should(site: &Site) {
    let modes = "stat -c '%a %U %G %n' /var/cache/mizzen /var/lib/mizzen /var/lib/mizzen/copies /etc/mizzen/mizzen.toml \
                 /etc/mizzen/host.d/mpi.toml /usr/bin/mizzen /usr/lib/mizzen/spank_mizzen.so /usr/lib/mizzen/mizzen-import \
                 /etc/slurm/plugstack.conf.d/mizzen.conf";
    let expected = "755 root root /var/cache/mizzen\n755 root root /var/lib/mizzen\n1733 root root /var/lib/mizzen/copies\n\
                    644 root root /etc/mizzen/mizzen.toml\n644 root root /etc/mizzen/host.d/mpi.toml\n\
                    755 root root /usr/bin/mizzen\n644 root root /usr/lib/mizzen/spank_mizzen.so\n\
                    755 root root /usr/lib/mizzen/mizzen-import\n644 root root /etc/slurm/plugstack.conf.d/mizzen.conf\n";
    assert_out(&site.root("node1", modes), 0, expected);
    assert_out(&site.root("node1", "mizzen --version"), 0, &site.build(Version::This));
    // What is installed is what was packed.
    let verified = match site.tool {
        Tool::Apt => "dpkg --verify mizzen; dpkg --audit",
        Tool::Rpm => "rpm --verify --nodeps mizzen",
    };
    assert_out(&site.root("node1", verified), 0, "");
    let doctor = site.cluster.run_on("node1", User::Root, "mizzen doctor").stdout;
    assert!(doctor.contains(&format!("/usr/lib/mizzen/spank_mizzen.so, by {LINE}")), "{doctor}");
    // slurmd's log tells which version started the step, and where slurmd asks plugins when it starts, which the node has.
    let build = site.build(Version::This).trim().replacen("mizzen ", "", 1);
    let mut told = vec![format!("mizzen: {build}: step ")];
    if site.cluster.release() != Release::Slurm20_11 {
        told.push(format!("mizzen: version {build} is loaded"));
    }
    site.root("node1", RESTART_SLURMD);
    let has_all = || told.iter().all(|line| site.cluster.slurmd_log("node1").contains(line));
    assert!(eventually(has_all), "{told:?}: {}", site.cluster.slurmd_log("node1"));
    assert!(site.cluster.all_idle(), "{:?}", site.cluster.node_states());
}

fn what_administrators_change(site: &Site) {
    site.root(
        "node1",
        "sed -i 's/^stage = .*/stage = \"never\"/' /etc/mizzen/mizzen.toml; rm /etc/mizzen/host.d/amd.toml",
    );
    site.root("node1", &format!("sed -i '/^#/d; s/^required/optional/' {LINE}"));
    site.root("node1", "chmod 1777 /var/lib/mizzen/copies");
    containers_run(site);
}

fn what_administrators_changed_is_there(site: &Site) {
    let settings = "grep -c '^stage = \"never\"' /etc/mizzen/mizzen.toml; grep -c 'next version' /etc/mizzen/mizzen.toml";
    assert_eq!(site.cluster.run_on("node1", User::Root, settings).stdout, "1\n0\n");
    let beside = match site.tool {
        Tool::Apt => "/etc/mizzen/mizzen.toml.dpkg-dist",
        Tool::Rpm => "/etc/mizzen/mizzen.toml.rpmnew",
    };
    assert_out(&site.root("node1", &format!("grep -c 'next version' {beside}")), 0, "1\n");
    // Where nobody has changed it, the file is the new one.
    assert_out(&site.root("node2", "grep -c 'next version' /etc/mizzen/mizzen.toml"), 0, "1\n");
    let line = site.root("node1", &format!("cat {LINE}")).stdout;
    assert_eq!(line, "optional /usr/lib/mizzen/spank_mizzen.so\n");
    if site.tool == Tool::Apt {
        site.root(
            "node1",
            "! test -e /etc/mizzen/host.d/amd.toml; stat -c %a /var/lib/mizzen/copies | grep -qx 1777",
        );
    }
}

/// A step on both nodes, and a batch script that calls srun from inside: started with one version, ended with the next.
fn upgrade_under_running_steps(site: &Site) {
    site.cluster.run("rm -f started.* go");
    let step = start(
        site,
        "srun -Q -N2 --overcommit --container=/shared/a.sqsh sh -c \
         'touch started.$SLURM_PROCID; while ! test -e go; do sleep 0.1; done; cat /image'",
    );
    let batch = start(
        site,
        "printf '#!/bin/sh\\ntouch started.batch; while ! test -e go; do sleep 0.1; done; cat /image; srun -Q cat /image' >job; \
         sbatch -Q --wait -n1 --container=/shared/b.sqsh -o batch job; cat batch",
    );
    let started = || site.cluster.run("ls started.0 started.1 started.batch").code == 0;
    assert!(eventually(started), "{}", site.cluster.run("ls; squeue; cat batch").text());
    for machine in MACHINES {
        while_plain_jobs_run(site, || site.install(machine, Version::Next));
        assert_out(&site.root(machine, "mizzen --version"), 0, &site.build(Version::Next));
        containers_run(site); // one node or the login node is newer than the others
    }
    site.cluster.run("touch go");
    for (what, process, expected) in [("step", step, "a\na\n"), ("batch", batch, "b\nb\n")] {
        let output = process.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{what}: {said}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{what}: {said}");
    }
    assert!(site.cluster.all_idle(), "{:?}", site.cluster.node_states());
}

fn start(site: &Site, script: &str) -> Child {
    let mut command = site.cluster.command("ctl", User::Alice, &["timeout", "120", "bash", "-c", script]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Whatever the order, jobs without a container run at every moment.
fn removal(site: &Site, order: [&str; 3]) {
    let mut has: Vec<&str> = order.to_vec();
    for machine in order {
        while_plain_jobs_run(site, || site.remove(machine));
        has.retain(|other| *other != machine);
        // Who can ask for a container has it where the package still is.
        for node in ["node1", "node2"] {
            let script = format!("srun -Q -w {node} --container-image=/shared/a.sqsh cat /image");
            if has.contains(&"ctl") && has.contains(&node) {
                assert_out(&site.cluster.run(&script), 0, "a\n");
            } else if !has.contains(&"ctl") {
                let refused = site.cluster.run(&script);
                assert!(refused.code != 0 && refused.stdout.is_empty(), "{}", refused.text());
                assert!(refused.stderr.contains("unrecognized option"), "{}", refused.text());
            }
        }
    }
    assert!(site.cluster.all_idle(), "{:?}", site.cluster.node_states());
}

/// What is mizzen's alone goes; what belongs to users stays.
fn nothing_is_left(site: &Site, before: &str) {
    site.root(
        "node1",
        "mkdir -p /var/lib/mizzen/copies/mizzen-2001 /var/cache/mizzen; touch /var/cache/mizzen/copy",
    );
    if site.tool == Tool::Apt {
        site.root("node1", "DEBIAN_FRONTEND=noninteractive apt-get purge -q -y mizzen");
    }
    let mine = "find / -xdev -iname '*mizzen*' -not -path '/proc/*' -not -path '/shared/*' | sort";
    let left = site.root("node1", mine).stdout;
    let after = site.root("node1", "ls -R /etc/slurm; cat /etc/slurm/plugstack.conf || true").stdout;
    match site.tool {
        Tool::Apt => {
            assert_eq!(left, "/var/lib/mizzen\n/var/lib/mizzen/copies/mizzen-2001\n");
            assert_eq!(after, before);
        }
        Tool::Rpm => {
            assert!(!left.contains("/etc/apparmor.d/"), "{left}");
            // rpm keeps what was changed, as everywhere.
            assert!(left.contains("/etc/slurm/plugstack.conf.d/mizzen.conf.rpmsave\n"), "{left}");
            assert!(left.contains("/etc/mizzen/mizzen.toml.rpmsave\n"), "{left}");
            assert!(!left.contains("/usr/"), "{left}");
        }
    }
}
