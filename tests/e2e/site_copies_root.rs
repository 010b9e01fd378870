//! Site copies as a matter between users and root: no user has a hold on root's copies but by using one, and root does
//! nothing for a job that uses one.

use std::collections::BTreeMap;
use std::process::Stdio;

use mizzen_tests::User;
use mizzen_tests::check::{assert_failed, assert_out, run_in_time};
use mizzen_tests::copies::digest_of;
use mizzen_tests::site::{CACHE, TOML, assert_sound, cluster, on_node, own_copies};

/// Makes /shared/big.sqsh and /shared/other.sqsh, whose content is a.sqsh's and b.sqsh's with much behind it.
const BIG: &str = "head -c 8000000 /dev/urandom > noise; cat /shared/a.sqsh noise > /shared/big.sqsh; cat /shared/b.sqsh noise > /shared/other.sqsh";

/// Holds a file of root's by every means that a user has, says so, and ends with its standard input.
const HOLDER: &str = r#"use Fcntl qw(:DEFAULT :flock); $| = 1; my @held;
for my $name (@ARGV) {
    open(my $file, '<', $name) or do { print "$name: $!\n"; next };
    print 'flock: ', flock($file, LOCK_EX | LOCK_NB) ? 'done' : $!, "\n";
    my $lock = pack('s s x4 q q i x4', F_RDLCK, 0, 0, 0, 0);
    print 'range: ', fcntl($file, 37, $lock) ? 'done' : $!, "\n";
    print 'lease: ', fcntl($file, 1024, F_RDLCK) ? 'done' : $!, "\n";
    push @held, $file;
}
print "held\n"; <STDIN>;
"#;

#[test]
fn a_user_has_no_hold_on_roots_copies_but_by_using_them() {
    let cluster = cluster("hold", TOML);
    cluster.share("holder", HOLDER.as_bytes()).unwrap();
    let stage = || on_node(&cluster, "mizzen stage /shared/a.sqsh /shared/b.sqsh");
    assert_eq!(stage().code, 0);
    let hold = format!("mkfifo ~/end; perl /shared/holder {CACHE}/* > ~/held 2>&1 < ~/end");
    let mut holder =
        cluster.command("node1", User::Bob, &["bash", "-c", &hold]).stdin(Stdio::null()).spawn().unwrap();
    let held = cluster.run_on(
        "node1",
        User::Bob,
        "until [ -e ~/end ]; do sleep 0.05; done; exec 3> ~/end; until grep -q ^held ~/held; do sleep 0.05; done; cat ~/held; \
         pkill -STOP -u bob -x perl; (sleep 60 >&3) > /dev/null 2>&1 & echo $! > ~/keeper",
    );
    // Two copies and two manifests; never a lock file.
    assert_eq!(held.stdout.matches("flock: done\n").count(), 4, "{}", held.text());
    assert_eq!(held.stdout.matches("range: done\n").count(), 4, "{}", held.text());
    assert_eq!(held.stdout.matches("lease: Permission denied\n").count(), 4, "{}", held.text());
    assert!(held.stdout.matches(".lock: Permission denied\n").count() >= 2, "{}", held.text());
    // Nobody is kept from anything by the locks of a process that is stopped.
    assert_out(&run_in_time(&cluster, "srun --container=/shared/a.sqsh cat /image"), 0, "a\n");
    assert_eq!(own_copies(&cluster), 0);
    let again = stage();
    assert_eq!((again.stdout.matches(" was there\n").count(), again.code), (2, 0), "{}", again.text());
    let verified = on_node(&cluster, "mizzen cache verify");
    assert_eq!((verified.stdout.matches(": good\n").count(), verified.code), (2, 0), "{}", verified.text());
    // What is open stays.
    let kept = on_node(&cluster, "mizzen cache remove --all");
    assert_eq!(kept.stdout.matches("in use, kept").count(), 2, "{}", kept.text());
    let named = on_node(&cluster, "mizzen cache remove /shared/a.sqsh");
    assert!(named.code == 1 && named.stdout.contains("in use, kept"), "{}", named.text());
    on_node(&cluster, "pkill -KILL -u bob -x perl; kill $(cat /home/bob/keeper)");
    holder.wait().unwrap();
    let gone = on_node(&cluster, &format!("mizzen cache remove --all; ls {CACHE}"));
    assert_eq!(gone.stdout.matches(": removed").count(), 2, "{}", gone.text());
    assert!(gone.stdout.ends_with("\nroom.lock\n") || !gone.stdout.contains("source-"), "{}", gone.text());
    // A manifest alone, kept open, keeps nothing.
    assert_eq!(stage().code, 0);
    let manifests = cluster
        .command(
            "node1",
            User::Bob,
            &[
                "bash",
                "-c",
                &format!(
                    "for m in {CACHE}/*.json; do exec {{fd}}< $m; flock $fd; done; touch ~/has; sleep 30"
                ),
            ],
        )
        .spawn();
    on_node(&cluster, "until [ -e /home/bob/has ]; do sleep 0.05; done");
    let gone =
        on_node(&cluster, &format!("mizzen cache remove --all > /dev/null; ls {CACHE} | grep -c source-"));
    assert_eq!(gone.stdout, "0\n", "{}", gone.text());
    let mut manifests = manifests.unwrap();
    manifests.kill().unwrap();
    manifests.wait().unwrap();
}

#[test]
fn a_copy_in_use_stays_until_the_step_ends() {
    let cluster = cluster("use", &format!("{TOML}stage_max_size = \"12m\"\n"));
    cluster.run(BIG);
    assert_eq!(on_node(&cluster, "mizzen stage /shared/big.sqsh").code, 0);
    let mut step = cluster.command(
        "ctl",
        User::Alice,
        &["srun", "-Q", "--container=/shared/big.sqsh", "sh", "-c", "touch running; sleep 6"],
    );
    let step = step.spawn();
    cluster.run("until [ -e running ]; do sleep 0.05; done");
    let kept = on_node(
        &cluster,
        "mizzen cache list; mizzen cache remove --all; mizzen cache prune; mizzen stage /shared/other.sqsh",
    );
    assert_eq!(kept.stdout.matches("  in use  ").count(), 1, "{}", kept.text());
    assert_eq!(kept.stdout.matches(": in use, kept\n").count(), 1, "{}", kept.text());
    assert_failed(&kept, 1, "mizzen: /shared/other.sqsh: no copy: no room for ");
    assert_sound(&cluster, "in use", 1);
    assert!(step.unwrap().wait().unwrap().success());
    let evicted = on_node(&cluster, "mizzen stage /shared/other.sqsh; mizzen cache list");
    assert!(evicted.code == 0 && evicted.stdout.contains("other.sqsh"), "{}", evicted.text());
    assert!(!evicted.stdout.contains("big.sqsh"), "{}", evicted.text());
    assert_sound(&cluster, "evicted", 1);
    assert_eq!(own_copies(&cluster), 0);
    // Whoever opens a copy at the moment in which root asks who has it open gets it all the same.
    let asking = "for i in $(seq 300); do mizzen cache list > /dev/null; done";
    let asking = cluster.command("node1", User::Root, &["bash", "-c", asking]).spawn();
    let opened = cluster.run_on(
        "node1",
        User::Bob,
        "for i in $(seq 40); do mizzen run /shared/other.sqsh cat /image || exit; done | sort | uniq -c",
    );
    assert_eq!(opened.stdout.trim(), "40 b", "{}", opened.text());
    assert_eq!(own_copies(&cluster), 0, "{}", opened.text());
    let mut asking = asking.unwrap();
    asking.kill().unwrap();
    asking.wait().unwrap();
}

/// Whoever owns a directory on the way can lead root elsewhere at any moment; what is closed to others is not copied.
#[test]
fn a_path_that_is_changed_all_the_time_leads_to_nothing_closed() {
    let cluster = cluster("race", TOML);
    let swap = "mkdir /tmp/way /tmp/public; cp /shared/a.sqsh /tmp/public/image; cd /tmp/way; perl -e 'for (;;) { \
                for my $target (\"/root\", \"/tmp/public\") { symlink($target, \"new\"); rename(\"new\", \"link\"); } }'";
    on_node(&cluster, "chmod 700 /root; cp /shared/b.sqsh /root/image; chmod 644 /root/image");
    let mut swapper = cluster.command("node1", User::Alice, &["bash", "-c", swap]).spawn().unwrap();
    let staged = on_node(
        &cluster,
        "until [ -e /tmp/way/link ]; do sleep 0.05; done; \
         for i in $(seq 100); do mizzen stage /tmp/way/link/image; mizzen cache remove --all > /dev/null; done",
    );
    on_node(&cluster, "pkill -KILL -u alice -x perl");
    swapper.wait().unwrap();
    let [public, closed] = ["a", "b"].map(|name| digest_of(&cluster, &format!("/shared/{name}.sqsh")));
    assert!(staged.stdout.contains(&public) && !staged.stdout.contains(&closed), "{}", staged.text());
    let refused = "no copy for all users: the directory /root is closed to others (mode 0700)";
    assert!(staged.stderr.contains(refused), "{}", staged.text());
}

#[test]
fn a_link_of_a_users_makes_root_open_nothing() {
    let cluster = cluster("links", TOML);
    // The server of the container's files does not answer any more: whoever asks for one waits.
    let container = "mizzen run /shared/a.sqsh sleep 60 & until pgrep -u bob -x sleep > /dev/null; do sleep 0.05; done; \
                     ln -s /proc/$(pgrep -u bob -x sleep)/root/image /tmp/inside; pkill -STOP -u bob -x mizzen-fuse; \
                     ln -s /etc/shadow /tmp/shadow; ln -s /dev/zero /tmp/zero; ln -s /proc/1/environ /tmp/environ";
    cluster.run_on("node1", User::Bob, &format!("({container}) < /dev/null > /dev/null 2>&1"));
    for (link, message) in [
        ("inside", "no such image; tried /tmp/inside"),
        ("shadow", "no copy for all users: it is closed to others (mode 0640)"),
        ("zero", "/tmp/zero: not an image (is a character device)"),
        ("environ", "no copy for all users: "),
    ] {
        let staged = on_node(
            &cluster,
            &format!("timeout -s KILL 10 strace -o /tmp/calls -e trace=file mizzen stage /tmp/{link}"),
        );
        assert_failed(&staged, 1, message);
        let opened = on_node(
            &cluster,
            "grep -E 'open.*(shadow|zero|environ|inside|image)' /tmp/calls | grep -v O_PATH | grep -v mizzen",
        );
        assert_eq!(opened.stdout, "", "{link}");
    }
    on_node(&cluster, "pkill -KILL -u bob");
}

/// A system call as `strace -f` writes it, and whether its process was root's then.
struct Call<'a> {
    root: bool,
    text: &'a str,
}

/// Follows who is whose child and who has become whom.
fn calls(trace: &str) -> Vec<Call<'_>> {
    let lines: Vec<(&str, &str)> = trace.lines().filter_map(|line| line.split_once(' ')).collect();
    let made = |text: &str| text.contains("clone") || text.contains("fork");
    let children = lines.iter().filter(|(_, text)| made(text));
    let parents: BTreeMap<&str, &str> =
        children.filter_map(|(parent, text)| Some((text.rsplit_once(" = ")?.1.trim(), *parent))).collect();
    let mut users: BTreeMap<&str, bool> = BTreeMap::new();
    let mut found = Vec::new();
    for (pid, text) in lines {
        let text = text.trim_start();
        let inherited = parents.get(pid).and_then(|parent| users.get(parent)).copied().unwrap_or(false);
        let user = users.entry(pid).or_insert(inherited);
        if text.starts_with("set") && text.contains("uid(") {
            *user = text.contains("2001");
        }
        found.push(Call { root: !*user, text });
    }
    found
}

#[test]
fn root_has_nothing_to_do_with_a_job_that_uses_a_copy() {
    let cluster = cluster("trace", TOML);
    assert_eq!(on_node(&cluster, "mizzen stage /shared/a.sqsh").code, 0);
    let trace = "exec strace -f -qq -s 300 -e signal=none -o /root/trace -e trace=%file,%process,setuid,setreuid,setresuid \
                 -p $(pgrep -ox slurmd) 2>/dev/null";
    let mut tracer = cluster.command("node1", User::Root, &["sh", "-c", trace]).spawn().unwrap();
    let begun = "until grep -q ^TracerPid:.[1-9] /proc/$(pgrep -ox slurmd)/status; do sleep 0.05; done";
    assert_out(&on_node(&cluster, begun), 0, "");
    assert_out(&run_in_time(&cluster, "srun -Q --container-image=/shared/a.sqsh cat /image"), 0, "a\n");
    on_node(&cluster, "kill -INT $(sed -n 's/^TracerPid:.//p' /proc/$(pgrep -ox slurmd)/status)");
    tracer.wait().unwrap();
    let trace = on_node(&cluster, "cat /root/trace").stdout;
    let ours = |text: &str| {
        ["\"/shared/", CACHE, "/var/tmp/mizzen"].iter().any(|name| text.contains(name))
            || text.starts_with("execve(") && text.contains("mizzen")
    };
    let (by_root, by_user): (Vec<Call>, Vec<Call>) =
        calls(&trace).into_iter().filter(|call| ours(call.text)).partition(|call| call.root);
    let by_root: Vec<&str> = by_root.into_iter().map(|call| call.text).collect();
    assert!(by_root.is_empty(), "{by_root:#?}");
    // The launcher's, which has not looked for anything of its own.
    let by_user: Vec<&str> = by_user.into_iter().map(|call| call.text).collect();
    let called = |part: &str| by_user.iter().filter(|text| text.contains(part)).count();
    assert!(
        called("execve(") >= 1 && called("\"/shared/a.sqsh\"") >= 1 && called(CACHE) >= 1,
        "{by_user:#?}"
    );
    assert_eq!(called("/var/tmp/mizzen"), 0, "{by_user:#?}");
}
