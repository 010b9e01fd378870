//! Images that are used while they are copied to the node: they start at once, are read once however many start them, and the
//! copy that comes of it is whole.

use std::time::{Duration, Instant};

use mizzen_tests::check::{assert_failed, assert_out, run_in_time};
use mizzen_tests::copies::{
    CACHE, LARGE, assert_sound, copies, digest_of, large_cluster, partials, served, slow_mount, sum_of,
};
use mizzen_tests::{Cluster, User};

/// Waits until the copy is there. What makes it has the lowest priority.
const COPIED: &str =
    "for i in $(seq 150); do ls /var/tmp/mizzen-2001/sha256-* >/dev/null 2>&1 && break; sleep 0.1; done";

/// The first user's copy is as it should be, and nothing is left of its making.
#[track_caller]
fn assert_copied(cluster: &Cluster, image: &str) {
    assert_sound(cluster, image);
    assert_eq!(copies(cluster), [digest_of(cluster, image).replace(':', "-")]);
    assert!(partials(cluster).is_empty(), "{:?}", partials(cluster));
    assert_eq!(cluster.run(&format!("ls {CACHE} | grep -E '^(temporary|broken)'")).stdout, "");
}

#[test]
fn a_large_image_starts_before_it_is_copied() {
    let cluster = large_cluster("at-once", "");
    // To copy it would take twelve seconds.
    slow_mount(&cluster, "2M");
    let begin = Instant::now();
    assert_out(&cluster.run(&format!("mizzen run /slow/{LARGE} cat /image")), 0, "large\n");
    let took = begin.elapsed();
    assert!(took < Duration::from_secs(8), "{took:?}");
    assert!(copies(&cluster).is_empty(), "it was copied first");
    let listed = cluster.run("mizzen cache list");
    let line = listed.stdout.lines().next().unwrap_or_default();
    assert!(line.starts_with("partial-") && line.ends_with(&format!("  /slow/{LARGE}")), "{}", listed.text());
    assert!(line.contains(" % of ") && line.contains("  used "), "{line}");
    let json = cluster.run("mizzen cache list --json").stdout;
    assert!(json.contains("\"partial\": [") && json.contains("\"present\": "), "{json}");
    // The next one goes on from there, and what a program reads is what the image has.
    // In the background it takes as long as others leave it no processor.
    for _ in 0..8 {
        let sum = cluster.run(&format!("mizzen run /slow/{LARGE} sh -c '{COPIED}; sha256sum < /data/0'"));
        assert_out(&sum, 0, &sum_of(0));
        if !copies(&cluster).is_empty() {
            break;
        }
    }
    assert_copied(&cluster, &format!("/slow/{LARGE}"));
    let read = format!(
        "strace -f -y -o trace -e trace=read,pread64,splice mizzen run /slow/{LARGE} cat /image; grep -c 'slow/{LARGE}>' trace"
    );
    let again = cluster.run(&read);
    let reads: u32 = again.stdout.lines().last().unwrap().parse().unwrap();
    assert!(again.stdout.starts_with("large\n") && reads <= 3, "{}", again.text());
}

#[test]
fn many_starts_read_an_image_once() {
    let cluster = large_cluster("many", "");
    let image = format!("/shared/{LARGE}");
    let size: u64 = cluster.run(&format!("stat -c %s {image}")).stdout.trim().parse().unwrap();
    let before = served(&cluster, "ctl");
    let starts = format!(
        "for i in $(seq 64); do mizzen run {image} sh -c 'echo $(cat /image) $(cat /data/* | wc -c)' & done; wait"
    );
    assert_out(&cluster.run(&starts), 0, &"large 25165824\n".repeat(64));
    // The last to end may have been the one that copied.
    assert_eq!(cluster.run(&format!("mizzen stage {image}")).code, 0);
    let read = served(&cluster, "ctl") - before;
    assert!(read <= size + size / 10, "{read} bytes were read of {size}");
    assert_copied(&cluster, &image);
}

/// Programs that are short leave what they have brought to the next ones, whatever ends them.
#[test]
fn what_was_read_is_not_read_again() {
    let cluster = large_cluster("kept", "");
    let image = format!("/slow/{LARGE}");
    slow_mount(&cluster, "6M");
    let size: u64 = cluster.run(&format!("stat -c %s {image}")).stdout.trim().parse().unwrap();
    let present = || {
        let listed = cluster.run("mizzen cache list --json").stdout;
        let found = listed.lines().find_map(|line| line.trim().strip_prefix("\"present\": "));
        found.map(|number| number.trim_end_matches(',').parse::<u64>().unwrap())
    };
    let before = served_slowly(&cluster);
    let mut known = 0;
    for end in [
        "sleep 1",
        "sleep 1; kill -9 $PPID $$",
        "pkill -9 -u alice -x mizzen-copy; head -c 1000 /data/1 > /dev/null",
    ] {
        run_in_time(
            &cluster,
            &format!("mizzen run --writable {image} sh -c '{end}'; pkill -9 -u alice -x mizzen-copy"),
        );
        let now = present().unwrap();
        assert!(now > known, "{end}: {now} after {known}");
        known = now;
    }
    assert_out(
        &cluster.run(&format!("mizzen run {image} sh -c 'sha256sum < /data/2' && mizzen stage {image} >&2")),
        0,
        &sum_of(2),
    );
    let read = served_slowly(&cluster) - before;
    // Of each copier that is killed, what its threads have under way is lost: a megabyte of each.
    let lost = 3 * (5 << 20);
    assert!(read <= size + size / 10 + lost, "{read} bytes were read of {size}");
    assert_copied(&cluster, &image);
}

/// What waits for the whole content waits, and goes on from what there is.
#[test]
fn who_must_know_the_content_waits_for_it() {
    let cluster = large_cluster("pins", "");
    let image = format!("/slow/{LARGE}");
    slow_mount(&cluster, "6M");
    let digest = digest_of(&cluster, &format!("/shared/{LARGE}"));
    let size: u64 = cluster.run(&format!("stat -c %s {image}")).stdout.trim().parse().unwrap();
    let before = served_slowly(&cluster);
    assert_out(
        &cluster.run(&format!("mizzen run {image} sh -c 'echo ${{MIZZEN_IMAGE_DIGEST-none}}'")),
        0,
        "none\n",
    );
    let pinned = cluster.run(&format!("mizzen run {image}@{digest} sh -c 'echo $MIZZEN_IMAGE_DIGEST'"));
    assert_out(&pinned, 0, &format!("{digest}\n"));
    let read = served_slowly(&cluster) - before;
    assert!(read <= size + size / 10, "{read} bytes were read of {size}");
    assert_copied(&cluster, &format!("/shared/{LARGE}"));
    let other = digest_of(&cluster, "/shared/a.sqsh");
    cluster.run("mizzen cache remove --all");
    let wrong = cluster.run(&format!("mizzen run /shared/{LARGE}@{other} true"));
    assert_failed(&wrong, 125, &format!("its content is {digest}, not {other}"));
    // One policy and one key wait as well; so does `mizzen stage`.
    for start in
        [format!("mizzen run --stage=always /shared/{LARGE} true"), format!("mizzen stage /shared/{LARGE}")]
    {
        cluster.run("mizzen cache remove --all");
        cluster.run(&start);
        assert_copied(&cluster, &format!("/shared/{LARGE}"));
    }
}

/// Where the site has all content verified, nobody starts before it is known; meanwhile the user sees how far it is.
#[test]
fn a_site_that_verifies_waits() {
    let cluster = large_cluster("verifies", "stage_verify = \"always\"\n");
    let image = format!("/slow/{LARGE}");
    slow_mount(&cluster, "6M");
    let digest = digest_of(&cluster, &format!("/shared/{LARGE}"));
    let start = format!("mizzen run {image} sh -c 'echo $MIZZEN_IMAGE_DIGEST'");
    let first = cluster.run(&start);
    assert_out(&first, 0, &format!("{digest}\n"));
    assert!(first.stderr.contains(&format!("ctl: {image}: copying to the node: ")), "{}", first.text());
    assert_copied(&cluster, &format!("/shared/{LARGE}"));
    // What there is of it was brought by a start that did not wait, and is not fetched again.
    cluster.run("mizzen cache remove --all");
    let settings = cluster.run("cat /etc/mizzen/mizzen.toml").stdout;
    cluster
        .write_everywhere("/etc/mizzen/mizzen.toml", &settings.replace("\"always\"", "\"never\""))
        .unwrap();
    assert_out(
        &cluster.run(&format!("mizzen run {image} sh -c 'sleep 1; echo ${{MIZZEN_IMAGE_DIGEST-none}}'")),
        0,
        "none\n",
    );
    assert_eq!(partials(&cluster).len(), 1);
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", &settings).unwrap();
    let before = served_slowly(&cluster);
    assert_out(&cluster.run(&start), 0, &format!("{digest}\n"));
    let size: u64 = cluster.run(&format!("stat -c %s {image}")).stdout.trim().parse().unwrap();
    let read = served_slowly(&cluster) - before;
    assert!(read < size, "{read} bytes were read of {size}");
}

/// The thread that fills leaves processors and disks to others; the one that answers does not.
#[test]
fn the_background_has_a_low_priority() {
    let cluster = large_cluster("priority", "");
    slow_mount(&cluster, "4M");
    let told = cluster.run(&format!(
        "mizzen run /slow/{LARGE} sh -c 'touch ready; sleep 2' & until [ -e ready ]; do sleep 0.1; done; sleep 0.5; \
         for t in /proc/$(pgrep -u alice -x mizzen-copy)/task/*; do set -- $(cat $t/stat); echo ${{19}} $(ionice -p ${{t##*/}}); done; wait"
    ));
    let threads: Vec<&str> = told.stdout.lines().collect();
    let (background, others): (Vec<&str>, _) = threads.iter().partition(|thread| thread.ends_with(" idle"));
    assert!(background.contains(&"10 idle"), "{}", told.text());
    // As low as the job's own processes are.
    let is_low =
        |thread: &&str| thread.split(' ').next().is_none_or(|nice| nice.parse::<i32>().unwrap() >= 10);
    assert!(!others.is_empty() && !others.iter().any(is_low), "{}", told.text());
}

/// Whatever starts it: jobs, and steps of one job, at the same time.
#[test]
fn jobs_and_steps_read_an_image_once() {
    let cluster = large_cluster("jobs", "");
    let image = format!("/shared/{LARGE}");
    let size: u64 = cluster.run(&format!("stat -c %s {image}")).stdout.trim().parse().unwrap();
    let before = served(&cluster, "node1");
    let step = format!(
        "srun --exact -n1 -c1 --mem=100 --container={image} sh -c 'echo $(cat /image) $(cat /data/* | wc -c)'"
    );
    let script = format!("#!/bin/sh\n{step} &\n{step} &\nwait\n");
    cluster.write_everywhere("/tmp/job", &script).unwrap();
    let submitted = cluster.run(
        "for i in 1 2 3; do sbatch -n2 --mem=300 -o out.$i /tmp/job; done > /dev/null; \
         while [ -n \"$(squeue -h)\" ]; do sleep 0.2; done; cat out.*",
    );
    assert_out(&submitted, 0, &"large 25165824\n".repeat(6));
    assert_eq!(cluster.run(&format!("srun mizzen stage {image}")).code, 0);
    let read = served(&cluster, "node1") - before;
    assert!(read <= size + size / 10, "{read} bytes were read of {size}");
    let left =
        cluster.run_on("node1", User::Alice, &format!("ls {CACHE} | grep -E 'sha256-|partial-'")).stdout;
    assert_eq!(left, format!("{}\n", digest_of(&cluster, &image).replace(':', "-")));
}

/// As for images: data is there at once, and a copy is made.
#[test]
fn data_is_read_through_like_an_image() {
    let cluster = large_cluster("data", "");
    slow_mount(&cluster, "6M");
    let run = format!("mizzen run --verbose -m /slow/{LARGE}:/more:squashfs /shared/a.sqsh sh -c");
    let begin = Instant::now();
    let first = cluster.run(&format!("{run} 'cat /image /more/image'"));
    assert_out(&first, 0, "a\nlarge\n");
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
    // What came from where.
    let line = first.stderr.lines().find(|line| line.starts_with(&format!("mizzen: note: /slow/{LARGE}: ")));
    let line = line.unwrap();
    assert!(line.contains(" from the copy on the node, ") && line.ends_with(" inflated"), "{line}");
    assert_out(&cluster.run(&format!("{run} 'sha256sum < /more/data/1'")), 0, &sum_of(1));
    let expected = digest_of(&cluster, &format!("/shared/{LARGE}")).replace(':', "-");
    let found = cluster.run(&format!("mizzen stage /slow/{LARGE} >&2; ls {CACHE}"));
    assert!(found.stdout.contains(&expected), "{}", found.text());
}

/// A step starts at once too, and Slurm's log tells where its files came from.
#[test]
fn a_step_is_told_of() {
    let cluster = large_cluster("step", "");
    let step = cluster.run(&format!("srun -n2 --container-verbose --container=/shared/{LARGE} cat /image"));
    assert_out(&step, 0, "large\nlarge\n");
    let origin = format!("/shared/{LARGE}: ");
    let told =
        step.stderr.lines().filter(|line| line.contains(&origin) && line.contains(" inflated")).count();
    assert_eq!(told, 1, "{}", step.text());
    // srun does not wait for slurmstepd.
    let ended = cluster.run_on(
        "node1",
        User::Root,
        "timeout 20 sh -c 'while pgrep -x slurmstepd; do sleep 0.1; done'",
    );
    assert_eq!(ended.code, 0, "{}", ended.text());
    let log = cluster.slurmd_log("node1");
    assert!(
        log.lines().any(|line| line.contains(&origin) && line.contains(" from where the image is")),
        "{log}"
    );
}

/// What a start reads is known by the image, wherever its bytes come from: that start is noted while the image is copied, the next
/// one, from the copy, unpacks the files, and the third has them.
#[test]
fn a_start_while_the_image_is_copied_helps_those_that_follow() {
    let cluster = large_cluster("noted", "");
    let image = format!("/shared/{LARGE}");
    let start = |wait: &str| {
        cluster.run(&format!(
            "mizzen run {image} sh -c 'cat /data/* | wc -c; for i in $(seq 300); do ls {CACHE}/{wait} > /dev/null 2>&1 && break; sleep 0.1; done; \
             grep -o lowerdir=/places[^,]* /proc/self/mountinfo'; ls {CACHE} | sed 's/-.*//' | sort -u"
        ))
    };
    let first = start("profile-*");
    assert!(first.stdout.starts_with("25165824\nlowerdir=/places:/image\n"), "{}", first.text());
    assert!(first.stdout.contains("profile\n") && !first.stdout.contains("unpack"), "{}", first.text());
    assert_eq!(cluster.run(&format!("mizzen stage {image}")).code, 0);
    let second = start("unpacked-*/manifest");
    assert!(second.stdout.starts_with("25165824\nlowerdir=/places:/image\n"), "{}", second.text());
    assert!(second.stdout.contains("unpacked\n"), "{}", second.text());
    let third = cluster.run(&format!(
        "mizzen run {image} sh -c 'grep -o lowerdir=/places[^,]* /proc/self/mountinfo; sha256sum < /data/2'"
    ));
    assert_out(&third, 0, &format!("lowerdir=/places:/unpacked-0:/image\n{}", sum_of(2)));
}

/// How many bytes the FUSE server of /slow has read.
fn served_slowly(cluster: &Cluster) -> u64 {
    let script = "for p in $(pgrep -f 'bindfs.*/slow$'); do [ $(readlink /proc/$p/ns/mnt) = $(readlink /proc/self/ns/mnt) ] \
                  && sed -n 's/^rchar: //p' /proc/$p/io; done";
    let told = cluster.run_on("ctl", User::Root, script);
    told.stdout.trim().parse().unwrap()
}
