//! What the start of a program reads is kept: its files are unpacked for the next start, and nobody sees a wrong byte.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use mizzen_tests::check::{assert_out, with_busybox};
use mizzen_tests::images::ImageTree;
use mizzen_tests::{Cluster, User, run_tool};

const UNPACKED: &str = "/var/tmp/mizzen-2001/unpacked-*";
/// What a container whose files were unpacked has in its root's mount.
const LAYERS: &str = "grep -o 'lowerdir=/places:/unpacked-0:/image' /proc/self/mountinfo";

/// A cluster with an image whose /data has enough to be worth it.
fn cluster(name: &str) -> (Cluster, String) {
    let cluster = with_busybox(name);
    configure(&cluster, "");
    let tree = ImageTree::busybox().unwrap();
    let line = "what a program reads when it starts\n";
    tree.file("data/large", &line.repeat((20 << 20) / line.len())).unwrap();
    tree.file("data/small/file", line).unwrap();
    tree.file("data/other", line).unwrap();
    // Directories that are not as others: of all modes, with an extended attribute, and one that its owner cannot write to.
    for (name, mode) in [("sticky", 0o1777), ("group", 0o2755), ("marked", 0o755), ("closed", 0o555)] {
        tree.file(&format!("data/{name}/file"), line).unwrap();
        fs::set_permissions(tree.path(&format!("data/{name}")), PermissionsExt::from_mode(mode)).unwrap();
    }
    let mark = "import os, sys; os.setxattr(sys.argv[1], 'user.mark', b'1')";
    run_tool(Command::new("python3").args(["-c", mark]).arg(tree.path("data/marked"))).unwrap();
    let sums = "find data -type f | sort | xargs md5sum";
    let expected = run_tool(Command::new("sh").args(["-c", sums]).current_dir(tree.path("."))).unwrap();
    cluster.share("all.sqsh", &tree.squashfs(&["-comp", "zstd"]).unwrap()).unwrap();
    (cluster, expected)
}

/// Where tests run, the disk may be fuller than a node's.
fn configure(cluster: &Cluster, toml: &str) {
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", &format!("stage_keep_free = \"\"\n{toml}")).unwrap();
}

/// A start that reads the data, in a container that runs until its files are unpacked. (Not of an image that was written a moment ago.)
const LEARNING: &str = "sleep 0.1; mizzen run /shared/all.sqsh sh -c 'cat /data/large /data/*/file | md5sum; until [ -e ~/go ]; do sleep 0.1; done' & \
     for i in $(seq 600); do [ -e /var/tmp/mizzen-2001/unpacked-*/manifest ] && break; sleep 0.1; done; touch ~/go; wait $!; code=$?; rm ~/go; exit $code";

#[test]
fn the_next_start_finds_its_files_unpacked_and_as_they_are_in_the_image() {
    let (cluster, expected) = cluster("unpacked");
    // Directories have other sizes and numbers of links on each file system.
    let look = "cd /; find data -exec stat -c '%n %F %a %u %g %Y' {} + | sort; find data -type f -exec stat -c '%n %s %h' {} + | sort";
    let before = cluster.run(&format!("mizzen run /shared/all.sqsh sh -c \"{look}\""));
    assert_eq!(before.code, 0, "{}", before.text());
    let learned = cluster.run(LEARNING);
    assert_eq!((learned.code, learned.stderr.as_str()), (0, ""), "{}", learned.text());
    let there = cluster.run(&format!("cd {UNPACKED} && find files -type f | sort | grep data"));
    // What is below directories that a layer cannot have is left to the image.
    let files = ["group/file", "large", "small/file", "sticky/file"];
    assert_out(&there, 0, &files.map(|file| format!("files/data/{file}\n")).concat());

    let sums = "cd /; find data -type f | sort | xargs md5sum";
    let again = cluster.run(&format!("mizzen run /shared/all.sqsh sh -c \"{LAYERS}; {sums}\""));
    assert_out(&again, 0, &format!("lowerdir=/places:/unpacked-0:/image\n{expected}"));
    let after = cluster.run(&format!(
        "mizzen run --verbose /shared/all.sqsh sh -c \"{look}\"; find {UNPACKED}/files -type f | wc -l"
    ));
    assert!(before.stdout.contains("data/sticky directory 1777 "), "{}", before.text());
    let (seen, files) = after.stdout.trim_end().rsplit_once('\n').unwrap();
    assert_eq!(before.stdout.trim_end(), seen);
    // What came from where.
    let work = after.stderr.lines().find(|line| line.starts_with("mizzen: note: /shared/all.sqsh: "));
    let end = format!(" inflated; {files} files were unpacked before");
    assert!(work.is_some_and(|work| work.ends_with(&end)), "{}", after.text());
    let other = cluster.run(&format!("mizzen run /shared/all.sqsh busybox {LAYERS}"));
    assert_out(&other, 1, "");

    let listed = cluster.run("mizzen cache list");
    assert!(
        listed.stdout.contains("/var/tmp/mizzen-2001: files unpacked for 1 start, "),
        "{}",
        listed.text()
    );
    // One that is in use stays.
    let removed = cluster.run(&format!(
        "mizzen run /shared/all.sqsh sh -c 'mkfifo ~/up; echo > ~/up; sleep 3; md5sum /data/large' & until [ -p ~/up ]; do sleep 0.02; done; \
         cat ~/up > /dev/null; mizzen cache remove --all; ls -d {UNPACKED} | wc -l; wait; sleep 1; mizzen cache remove --all; ls -d {UNPACKED} 2> /dev/null | wc -l"
    ));
    let sum = expected.lines().find(|line| line.ends_with("large")).unwrap().replace("  data", "  /data");
    assert!(removed.stdout.starts_with("1\n") && removed.stdout.contains(&sum), "{}", removed.text());
    assert!(removed.stdout.ends_with(": removed\n0\n"), "{}", removed.text());
}

#[test]
fn what_was_changed_damaged_or_left_by_a_crash_is_not_used() {
    let (cluster, expected) = cluster("distrusted");
    let sums = "mizzen run /shared/all.sqsh sh -c \"cd /; find data -type f | sort | xargs md5sum\"";
    for change in [
        "printf X | dd of=$(echo /var/tmp/mizzen-2001/unpacked-*/files/data/large) conv=notrunc bs=1 seek=1000000 2> /dev/null",
        "rm /var/tmp/mizzen-2001/unpacked-*/files/data/small/file",
        "truncate -s -3 /var/tmp/mizzen-2001/unpacked-*/manifest",
        "cd /var/tmp/mizzen-2001/unpacked-*/files/data && cp large copy && touch -r large copy && mv copy large",
        "rm -r /var/tmp/mizzen-2001/unpacked-*/files",
        "echo 00000000000000000000000000000000 > $(echo /var/tmp/mizzen-2001/unpacked-*/files/data)/more",
        "chmod 700 /var/tmp/mizzen-2001/unpacked-*/files/data/small",
    ] {
        let learned = cluster.run(LEARNING);
        assert_eq!(learned.code, 0, "{}", learned.text());
        assert_out(&cluster.run(&format!("ls -d {UNPACKED} | wc -l; {change}")), 0, "1\n");
        assert_out(&cluster.run(sums), 0, &expected);
        // If they have been unpacked again by then, it was from the image.
        let again = cluster.run(&format!(
            "for file in {UNPACKED}/files/data/large; do [ ! -e $file ] || md5sum < $file; done"
        ));
        let sum = expected.lines().find_map(|line| line.strip_suffix("data/large")).unwrap();
        assert!(again.stdout.is_empty() || again.stdout == format!("{sum}-\n"), "{change}: {}", again.text());
        cluster.run("mizzen cache remove --all; rm -rf /var/tmp/mizzen-2001/unpacked-*");
    }
    // A profile is a hint, whatever is in it.
    for text in [
        "",
        "mizzen-profile 1\\n0 99 /data/large\\n",
        "mizzen-profile 1\\n0 9999999999 /data/large\\n5 5 /nothing\\n7 7 /data\\nend\\n",
    ] {
        let written = cluster.run(&format!("for profile in /var/tmp/mizzen-2001/profile-*[0-9a-f]; do printf '{text}' > $profile; done; {sums}"));
        assert_out(&written, 0, &expected);
    }
    // An image that has been replaced is another one.
    assert_eq!(cluster.run(LEARNING).code, 0);
    let tree = ImageTree::busybox().unwrap();
    tree.file("data/large", "another").unwrap();
    cluster.share("new.sqsh", &tree.squashfs(&["-comp", "zstd"]).unwrap()).unwrap();
    assert_eq!(cluster.run_as_root("mv /shared/new.sqsh /shared/all.sqsh").code, 0);
    assert_out(&cluster.run("mizzen run /shared/all.sqsh sh -c 'cat /data/large'"), 0, "another");
}

/// A wait for the disk cannot be killed, and what it would be for does not matter in the next boot.
#[test]
fn a_layer_is_of_one_boot_and_nobody_waits_for_the_disk() {
    let (cluster, expected) = cluster("booted");
    let strace = "strace -f -o /tmp/trace -e trace=sync,syncfs,fsync,fdatasync,sync_file_range";
    let learned = cluster.run(&LEARNING.replacen("mizzen run", &format!("{strace} mizzen run"), 1));
    assert_eq!(learned.code, 0, "{}", learned.text());
    let calls = cluster.run("grep -oE '[a-z_]*sync[a-z_]*\\(' /tmp/trace | sort -u");
    assert_out(&calls, 0, "sync_file_range(\n");
    let start = || {
        cluster.run(&format!(
            "mizzen run /shared/all.sqsh sh -c \"{LAYERS}; cd /; find data -type f | sort | xargs md5sum\""
        ))
    };
    let with_layer = format!("lowerdir=/places:/unpacked-0:/image\n{expected}");
    assert_out(&start(), 0, &with_layer);
    let booted = cluster.run_as_root(
        "cat /proc/sys/kernel/random/uuid > /tmp/boot && mount --bind /tmp/boot /proc/sys/kernel/random/boot_id",
    );
    assert_eq!(booted.code, 0, "{}", booted.text());
    // It is set aside, unpacked again, and removed.
    let again = cluster.run(&format!(
        "(until grep -q $(cat /tmp/boot) {UNPACKED}/manifest; do sleep 0.1; done; touch ~/go) 2> /dev/null & \
         mizzen run /shared/all.sqsh sh -c \"{LAYERS}; cd /; find data -type f | sort | xargs md5sum; until [ -e ~/go ]; do sleep 0.1; done\""
    ));
    assert_out(&again, 0, &expected);
    assert_out(&start(), 0, &with_layer);
    assert_out(&cluster.run("ls /var/tmp/mizzen-2001 | grep -c -e broken -e unpacking"), 1, "0\n");
}

#[test]
fn whoever_wants_no_copies_gets_none() {
    let (cluster, expected) = cluster("not-unpacked");
    let sums = "sh -c \"cd /; find data -type f | sort | xargs md5sum; sleep 4\"";
    let left = "ls /var/tmp/mizzen-2001 2> /dev/null | grep -c -e profile -e unpacked";
    let never = cluster.run(&format!("mizzen run --stage=never /shared/all.sqsh {sums}; {left}"));
    assert_out(&never, 1, &format!("{expected}0\n"));
    configure(&cluster, "stage_unpacked_max_size = \"0\"\n");
    let none = cluster.run(&format!("mizzen run /shared/all.sqsh {sums}; {left}"));
    assert_out(&none, 1, &format!("{expected}0\n"));
    // Less than what a start has read: it is written down, and not unpacked.
    configure(&cluster, "stage_unpacked_max_size = \"10m\"\n");
    let little = cluster.run(&format!("mizzen run /shared/all.sqsh {sums}; ls /var/tmp/mizzen-2001 | grep -c ^unpacked; ls /var/tmp/mizzen-2001 | grep -c '^profile-[0-9a-f]*$'"));
    assert_out(&little, 0, &format!("{expected}0\n1\n"));
}

/// In a container whose changes are lost with it there is nothing that stands for other files than it began with.
#[test]
fn a_writable_container_has_the_files_too_and_its_changes_to_itself() {
    let (cluster, expected) = cluster("unpacked-writable");
    // It is noted as others are.
    let learned = cluster.run(&LEARNING.replacen("mizzen run", "mizzen run --writable", 1));
    assert_eq!((learned.code, learned.stderr.as_str()), (0, ""), "{}", learned.text());
    let writable = "grep -o 'lowerdir=/places:/unpacked-0:/image,upperdir=/changes' /proc/self/mountinfo";
    let sums = "cd /; find data -type f | sort | xargs md5sum";
    let change = "cd /data && echo more >> small/file && wc -l < small/file && rm large && mkdir large && touch sticky/new && \
                  mv group/file group/renamed && mv small moved && chmod 700 moved/file && ls -R | tr '\n' ' '";
    for options in ["--writable", "--writable --remap-root"] {
        let run = cluster
            .run(&format!("mizzen run {options} /shared/all.sqsh sh -c \"{writable}; {sums}; {change}\""));
        let changed = "2\n.: closed group large marked moved other sticky  ./closed: file  ./group: renamed  ./large:  \
                       ./marked: file  ./moved: file  ./sticky: file new ";
        let lower = "lowerdir=/places:/unpacked-0:/image,upperdir=/changes\n";
        assert_out(&run, 0, &format!("{lower}{expected}{changed}"));
    }
    let after = cluster.run(&format!("mizzen run /shared/all.sqsh sh -c \"{LAYERS}; {sums}\""));
    assert_out(&after, 0, &format!("lowerdir=/places:/unpacked-0:/image\n{expected}"));
}

/// Where nothing is unpacked, the server inflates what the profile says before the program asks for it.
#[test]
fn what_is_only_noted_is_inflated_ahead() {
    let (cluster, expected) = cluster("inflated-ahead");
    configure(&cluster, "stage_unpacked_max_size = \"10m\"\n");
    let asleep = "mizzen run --verbose /shared/all.sqsh sh -c 'sleep 1'";
    let inflated = || {
        let run = cluster.run(asleep);
        let work = run.stderr.split("/shared/all.sqsh: ").nth(1).unwrap_or_default();
        let number = work.split("; ").nth(1).and_then(|text| text.strip_suffix(" MB inflated\n"));
        number.and_then(|number| number.parse::<f64>().ok()).unwrap_or_else(|| panic!("{}", run.text()))
    };
    let alone = inflated();
    let sums = "cd /; find data -type f | sort | xargs md5sum";
    let noted = cluster.run(&format!("mizzen run /shared/all.sqsh sh -c \"{sums}; sleep 2\"; ls /var/tmp/mizzen-2001 | grep -c '^profile-[0-9a-f]*$'"));
    assert_out(&noted, 0, &format!("{expected}1\n"));
    let ahead = inflated();
    assert!(alone < 4.0 && ahead > 7.0, "{alone} and {ahead} MB of a start that reads nothing");
    assert_out(&cluster.run(&format!("mizzen run /shared/all.sqsh sh -c \"{sums}\"")), 0, &expected);
}

/// The server's memory is bounded, however much is known of a start.
#[test]
fn sixteen_readers_with_a_full_profile_stay_within_64_mib() {
    let cluster = with_busybox("memory");
    configure(&cluster, "stage_unpacked_max_size = \"1m\"\n");
    let tree = ImageTree::busybox().unwrap();
    let directory = format!("data/{}", "long".repeat(9));
    let mut state = 7_u32;
    let mut byte = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    for number in 10..26 {
        tree.file(&format!("{directory}/{number}"), "").unwrap();
        let content: Vec<u8> = (0..5 << 20).map(|_| byte()).collect();
        fs::write(tree.path(&format!("{directory}/{number}")), content).unwrap();
    }
    cluster.share("all.sqsh", &tree.squashfs(&["-comp", "zstd", "-b", "1M"]).unwrap()).unwrap();
    let noted =
        cluster.run(&format!("mizzen run /shared/all.sqsh sh -c 'cat /{directory}/* | wc -c; sleep 2'"));
    assert_eq!(noted.code, 0, "{}", noted.text());
    // As many lines as a profile may have, and nearly as long as it may be.
    let lines = format!(
        "seq 65536 | awk 'BEGIN {{ print \"mizzen-profile 1\" }} \
         {{ print $1 * 7919 % 5000000, 100 + $1 % 10, \"/{directory}/\" 10 + $1 % 16 }} END {{ print \"end\" }}' > $(ls -d /var/tmp/mizzen-2001/profile-*[0-9a-f])"
    );
    let length = cluster.run(&format!("{lines}; wc -c < $(ls -d /var/tmp/mizzen-2001/profile-*[0-9a-f])"));
    assert!(
        (3_500_000..4 << 20).contains(&length.stdout.trim().parse::<u32>().unwrap()),
        "{}",
        length.text()
    );
    let read = cluster.run(&format!(
        "mizzen run /shared/all.sqsh sh -c 'for n in /{directory}/*; do md5sum $n & done | sort | md5sum; wait; touch ~/read; until [ -e ~/go ]; do sleep 0.05; done' & \
         until [ -e read ]; do sleep 0.05; done; sed -n 's/^VmHWM:[^0-9]*//p' /proc/$(pgrep -u alice -x mizzen-fuse)/status; touch go; wait"
    ));
    let peak = read.stdout.lines().find_map(|line| line.strip_suffix(" kB"));
    let peak: u32 = peak.and_then(|peak| peak.parse().ok()).unwrap();
    println!("{peak} KiB");
    assert!(peak < 64 << 10, "{peak} KiB");
}

/// Files with several names become none of a layer. An unpacker finds that, and the starts after it do not try it again.
#[test]
fn what_cannot_be_unpacked_starts_an_unpacker_once() {
    let cluster = with_busybox("skipped");
    configure(&cluster, "");
    let tree = ImageTree::busybox().unwrap();
    let line = "what a program reads when it starts\n";
    for name in ["linked", "plain"] {
        tree.file(&format!("data/{name}"), &line.repeat((20 << 20) / line.len())).unwrap();
    }
    fs::hard_link(tree.path("data/linked"), tree.path("data/again")).unwrap();
    cluster.share("all.sqsh", &tree.squashfs(&["-comp", "zstd"]).unwrap()).unwrap();
    // How many unpackers a start has, and what is left.
    let unpackers = |files: &str| {
        let run = cluster.run(&format!(
            "sleep 0.1; strace -f -o /tmp/trace -e trace=prctl mizzen run /shared/all.sqsh sh -c 'cd /data; cat {files} > /dev/null; sleep 4'; \
             grep -c 'PR_SET_NAME, \"mizzen-unpack' /tmp/trace; ls /var/tmp/mizzen-2001 | sed 's/-[0-9a-f]*//' | tr '\n' ' '"
        ));
        run.stdout
    };
    let skipped = "profile profile.lock profile.skip room.lock ";
    // The first one makes the directory, too, in processes of the same name.
    let first = unpackers("linked");
    assert!(!first.starts_with('0') && first.ends_with(skipped), "{first}");
    assert_eq!(unpackers("linked"), format!("0\n{skipped}"));
    // There is more to unpack now. What is left is looked at once more.
    assert_eq!(unpackers("linked plain"), format!("1\n{skipped}unpacked-0 "));
    assert_eq!(unpackers("linked plain"), format!("1\n{skipped}unpacked-0 "));
    assert_eq!(unpackers("linked plain"), format!("0\n{skipped}unpacked-0 "));
    // As after any other change of what it depends on.
    configure(&cluster, "stage_unpacked_max_size = \"1g\"\n");
    assert_eq!(unpackers("linked"), format!("1\n{skipped}unpacked-0 "));
    let removed =
        cluster.run("mizzen cache remove --all > /dev/null; ls /var/tmp/mizzen-2001 | grep -c profile");
    assert_out(&removed, 1, "0\n");
}

/// Whose image has more files than are unpacked in a moment, in /data and /more, which do not compress to nothing.
fn many_files(name: &str) -> (Cluster, String) {
    let cluster = with_busybox(name);
    configure(&cluster, "");
    let tree = ImageTree::busybox().unwrap();
    for (directory, number) in ["data", "more"].into_iter().flat_map(|name| (0..200).map(move |n| (name, n)))
    {
        let words =
            (0..12_000_u32).map(|word| format!("{:08x} ", (word ^ number).wrapping_mul(2_654_435_761)));
        tree.file(&format!("{directory}/{number}"), &words.collect::<String>()).unwrap();
    }
    // One that is written in several parts.
    let line = "what a program reads when it starts\n";
    tree.file("data/large", &line.repeat((180 << 20) / line.len())).unwrap();
    let sums = "find data more -type f | sort | xargs md5sum";
    let expected = run_tool(Command::new("sh").args(["-c", sums]).current_dir(tree.path("."))).unwrap();
    cluster.share("many.sqsh", &tree.squashfs(&["-comp", "zstd"]).unwrap()).unwrap();
    (cluster, expected)
}

/// On the node where Alice's steps run.
fn on_node(cluster: &Cluster, script: &str) -> String {
    cluster.run_on("node1", User::Alice, script).stdout
}

/// How many bytes the user's directory has, and what is in it of unfinished layers.
fn left_on_node(cluster: &Cluster) -> (u64, usize) {
    let taken = on_node(cluster, "du -sB1 /var/tmp/mizzen-2001 | cut -f1").trim().parse().unwrap();
    let names = on_node(cluster, "ls /var/tmp/mizzen-2001");
    (
        taken,
        names.lines().filter(|name| name.starts_with("temporary-") || name.starts_with("unpacking-")).count(),
    )
}

#[test]
fn what_killed_unpackers_have_done_is_finished_and_takes_no_more_room() {
    let (cluster, expected) = many_files("unpackers-killed");
    let step = "srun --container=/shared/many.sqsh sh -c 'cat /data/* > /dev/null; until [ -e ~/go ]; do sleep 0.1; done'";
    let manifest = "compgen -G '/var/tmp/mizzen-2001/unpacked-*/manifest' > /dev/null";
    let (mut sizes, mut killed) = (Vec::new(), 0);
    for _ in 0..5 {
        // With what was done before, it may be finished before it can be killed.
        let run = cluster.run_on("node1", User::Alice, &format!(
            "rm -f ~/go; {step} & until {{ sleep 0.1; pkill -KILL -u alice -x mizzen-unpack && echo killed; }} || {manifest}; do :; done; \
             touch ~/go; wait $!"
        ));
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{}", run.text());
        killed += run.stdout.lines().count();
        sizes.push(left_on_node(&cluster));
    }
    let (full, most) = (225 << 20, sizes.iter().map(|(_, unfinished)| *unfinished).max());
    assert!(
        killed >= 2 && most <= Some(1) && sizes.iter().all(|(taken, _)| *taken < full),
        "{killed}: {sizes:?}"
    );
    // Then one is left alone.
    let made = cluster.run_on("node1", User::Alice, &format!(
        "rm -f ~/go; {step} & for i in $(seq 300); do {manifest} && break; sleep 0.1; done; touch ~/go; wait $!"
    ));
    assert_out(&made, 0, "");
    let names = on_node(&cluster, "ls /var/tmp/mizzen-2001 | sed 's/-.*//' | sort -u | tr '\\n' ' '");
    assert_eq!(names, "profile room.lock unpacked ", "{sizes:?}");
    let sums = format!(
        "srun --container=/shared/many.sqsh sh -c \"{LAYERS}; cd /; find data more -type f | sort | xargs md5sum\""
    );
    assert_out(&cluster.run(&sums), 0, &format!("lowerdir=/places:/unpacked-0:/image\n{expected}"));
}

/// Slurm kills all that is left of a step when its program has ended.
#[test]
fn short_steps_leave_layers_to_those_that_follow() {
    let (cluster, expected) = many_files("short-steps");
    // As a program that imports many files: never quiet for a second, and over when the last is read.
    let start = |directory: &str| {
        cluster.run(&format!(
            "srun --container=/shared/many.sqsh sh -c 'for file in /{directory}/*; do cat $file; sleep 0.01; done | wc -c; \
             grep -o lowerdir=/places[^,]* /proc/self/mountinfo'"
        ))
    };
    let layers = |expected: &[&str], directory: &str| {
        for lower in expected {
            let run = start(directory);
            assert!(run.stdout.ends_with(lower), "{expected:?} of {directory}: {}", run.text());
        }
    };
    let (none, one, two) = (":/image\n", ":/unpacked-0:/image\n", ":/unpacked-0:/unpacked-1:/image\n");
    // The first is noted, the second finds that and unpacks it, the third has a layer.
    layers(&[none, none, one], "data");
    // So it is with what a program reads beside it.
    layers(&[one, one, two], "more");
    let sums =
        "srun --container=/shared/many.sqsh sh -c \"cd /; find data more -type f | sort | xargs md5sum\"";
    assert_out(&cluster.run(sums), 0, &expected);
}

#[test]
fn nothing_inflates_outside_the_filter_but_the_launcher() {
    let (cluster, _) = many_files("unpacked-under-a-filter");
    // The second start unpacks from its beginning on.
    for trace in ["", "strace -f -y -o /tmp/trace -e trace=pread64,seccomp,clone,clone3,fork,vfork,prctl "] {
        let run = cluster.run(&format!(
            "{trace}mizzen run /shared/many.sqsh sh -c 'cat /data/* > /dev/null; sleep 2; until ! pgrep -x mizzen-unpack > /dev/null; do sleep 0.1; done'"
        ));
        assert_out(&run, 0, "");
        cluster.run("rm -rf /var/tmp/mizzen-2001/unpack*");
    }
    let trace = cluster.run("cat /tmp/trace").stdout;
    let launcher = trace.split_whitespace().next().unwrap();
    let (mut filtered, mut unpackers) = (HashSet::new(), HashSet::new());
    let mut readers = HashSet::new();
    // What a thread begins with: it may call before the call that has made it is seen to return.
    let mut born = HashSet::new();
    for is_looked_at in [false, true] {
        filtered.clone_from(&born);
        for line in trace.lines() {
            let (pid, call) = line.split_once(' ').unwrap();
            let call = call.trim_start();
            let child =
                call.rsplit(" = ").next().filter(|child| child.bytes().all(|byte| byte.is_ascii_digit()));
            match call {
                // Whole, or the end of one that was interrupted by another line.
                _ if call.contains("seccomp") && call.ends_with(" = 0") => {
                    filtered.insert(pid);
                }
                _ if call.contains("PR_SET_NAME, \"mizzen-unpack\"") => {
                    unpackers.insert(pid);
                }
                _ if (call.contains("clone") || call.contains("fork")) && filtered.contains(pid) => {
                    born.extend(child);
                    filtered.extend(child);
                }
                _ if is_looked_at && call.contains("many.sqsh") && call.starts_with("pread64(") => {
                    readers.insert(pid);
                    assert!(pid == launcher || filtered.contains(pid), "{line}");
                }
                _ => {}
            }
        }
    }
    // It did inflate: children of an unpacker, not the unpacker.
    assert!(unpackers.is_disjoint(&readers) && !unpackers.is_empty(), "{unpackers:?}");
    assert!(filtered.intersection(&readers).count() >= 3, "{filtered:?}: {readers:?}");
}
