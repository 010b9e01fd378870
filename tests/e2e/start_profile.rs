//! What the start of a program reads is kept: its files are unpacked for the next start, and nobody sees a wrong byte.

use mizzen_tests::check::{assert_out, with_busybox};
use mizzen_tests::images::ImageTree;
use mizzen_tests::{Cluster, run_tool};

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
    let sums = "find data -type f | sort | xargs md5sum";
    let expected =
        run_tool(std::process::Command::new("sh").args(["-c", sums]).current_dir(tree.path("."))).unwrap();
    cluster.share("all.sqsh", &tree.squashfs(&["-comp", "zstd"]).unwrap()).unwrap();
    (cluster, expected)
}

/// Where tests run, the disk may be fuller than a node's.
fn configure(cluster: &Cluster, toml: &str) {
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", &format!("stage_keep_free = \"\"\n{toml}")).unwrap();
}

/// A start that reads the data, in a container that runs until its files are unpacked.
const LEARNING: &str = "mizzen run /shared/all.sqsh sh -c 'cat /data/large /data/small/file | md5sum; until [ -e ~/go ]; do sleep 0.1; done' & \
     for i in $(seq 600); do [ -e /var/tmp/mizzen-2001/unpacked-*/manifest ] && break; sleep 0.1; done; touch ~/go; wait $!; code=$?; rm ~/go; exit $code";

#[test]
fn the_next_start_finds_its_files_unpacked_and_as_they_are_in_the_image() {
    let (cluster, expected) = cluster("unpacked");
    let look = "cd /; find data -exec stat -c '%n %a %u %g %s %Y %h' {} + | sort";
    let before = cluster.run(&format!("mizzen run /shared/all.sqsh sh -c \"{look}\""));
    assert_eq!(before.code, 0, "{}", before.text());
    let learned = cluster.run(LEARNING);
    assert_eq!((learned.code, learned.stderr.as_str()), (0, ""), "{}", learned.text());
    let there = cluster.run(&format!("cd {UNPACKED} && find files -type f | sort | grep data"));
    assert_out(&there, 0, "files/data/large\nfiles/data/small/file\n");

    let sums = "cd /; find data -type f | sort | xargs md5sum";
    let again = cluster.run(&format!("mizzen run /shared/all.sqsh sh -c \"{LAYERS}; {sums}\""));
    assert_out(&again, 0, &format!("lowerdir=/places:/unpacked-0:/image\n{expected}"));
    // Directories have other sizes and numbers of links on each file system.
    let plain = |text: &str| -> Vec<String> {
        text.lines()
            .filter(|line| line.contains("large") || line.contains("file"))
            .map(str::to_owned)
            .collect()
    };
    let after = cluster.run(&format!("mizzen run /shared/all.sqsh sh -c \"{look}\""));
    assert_eq!(plain(&before.stdout), plain(&after.stdout));
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
