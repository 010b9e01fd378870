//! Images that the site mounts with the node's own means, as docs/admins.md shows it: users name the directory, and mizzen
//! has nothing to do with the mount.

use mizzen_tests::check::{Emptiness, assert_failed, assert_out, one_node, with_images};
use mizzen_tests::release::site_rootfs;
use mizzen_tests::{Cluster, Output, Release, Spec, User};

fn on_node(cluster: &Cluster, script: &str) -> Output {
    cluster.run_on("node1", User::Root, script)
}

/// The loop devices of files in this directory; they are the whole machine's.
fn loops(cluster: &Cluster, directory: &str) -> String {
    on_node(cluster, &format!("losetup -nlO BACK-FILE | grep {directory}/")).stdout
}

/// The line for /etc/auto.images in docs/admins.md.
fn documented_map(name: &str, kind: &str, image: &str) -> String {
    let manual = include_str!("../../docs/admins.md");
    let line = manual.lines().map(str::trim).find(|line| line.contains("-fstype=squashfs")).unwrap();
    line.replace("tf_2.15", name).replace("squashfs", kind).replace("/images/tf-2.15.sqsh", image)
}

#[test]
fn users_name_a_directory_that_the_kernel_has_mounted() {
    let directory = format!("/local/site-mounts-{}", std::process::id());
    let rootfs = Some(site_rootfs().unwrap());
    let cluster = with_images(Spec { nodes: 1, rootfs, ..Cluster::spec("site-mounts") });
    // The images; and the other machine has the directories, so that the names can be checked at submission.
    let made = on_node(
        &cluster,
        &format!(
            "mkdir {directory} && cp /shared/a.sqsh {directory}/a.sqsh && mkdir /tmp/tree /mnt/x && \
             mount -o loop,ro {directory}/a.sqsh /mnt/x && cp -a /mnt/x/. /tmp/tree && umount /mnt/x && echo erofs > /tmp/tree/image && \
             mkfs.erofs --quiet {directory}/e.erofs /tmp/tree && rm -r /tmp/tree"
        ),
    );
    assert_eq!(made.code, 0, "{}", made.text());
    cluster.run_as_root("mkdir -p /sw/images/a/bin /sw/images/e/bin /sw/auto/a/bin /sw/auto/e/bin");
    let empty = Emptiness::of(&cluster, &["node1"]);
    // By mount units, whose effect this is.
    let mounted = on_node(
        &cluster,
        &format!(
            "mkdir -p /sw/images/a /sw/images/e && mount -t squashfs -o loop,ro,nosuid,nodev {directory}/a.sqsh /sw/images/a && \
             mount -t erofs -o loop,ro,nosuid,nodev {directory}/e.erofs /sw/images/e"
        ),
    );
    assert_eq!(mounted.code, 0, "{}", mounted.text());
    let start = |user: User, image: &str| {
        let step = format!(
            "srun -Q -n2 --container={image} sh -c 'cat /image; grep -o \" / / ro,[^ ]* \" /proc/self/mountinfo'"
        );
        let ran = cluster.run_on("ctl", user, &step);
        let mut lines: Vec<String> = ran.stdout.lines().map(str::to_owned).collect();
        lines.sort();
        (ran.code, lines, ran.stderr)
    };
    for (image, content) in [("/sw/images/a", "a"), ("/sw/images/e", "erofs")] {
        for user in [User::Alice, User::Bob] {
            let (code, lines, stderr) = start(user, image);
            assert_eq!((code, &*stderr), (0, ""), "{lines:?}");
            assert_eq!(lines.iter().filter(|line| *line == content).count(), 2, "{lines:?}");
        }
    }
    // It stays as long as the administrator likes: not with the step, and not against it.
    assert_eq!(loops(&cluster, &directory).lines().count(), 2);
    let pinned = cluster.run(&format!("srun --container=/sw/images/a@sha256:{} true", "0".repeat(64)));
    assert_failed(&pinned, 1, "/sw/images/a: a directory has no digest");
    let unmounted = on_node(
        &cluster,
        "umount /sw/images/a /sw/images/e && rmdir /sw/images/a /sw/images/e /sw/images /sw",
    );
    assert_eq!(unmounted.code, 0, "{}", unmounted.text());
    assert_eq!(loops(&cluster, &directory), "");
    // By autofs: mounted when the container is made.
    let maps = [("a", "squashfs", "a.sqsh"), ("e", "erofs", "e.erofs")];
    let map: Vec<String> = maps
        .iter()
        .map(|(name, kind, file)| documented_map(name, kind, &format!("{directory}/{file}")))
        .collect();
    cluster.write_everywhere("/etc/auto.images", &format!("{}\n", map.join("\n"))).unwrap();
    let started = on_node(
        &cluster,
        "mkdir -p /sw/auto /run; echo '/sw/auto /etc/auto.images --timeout=2' > /etc/auto.master; automount -p /run/automount.pid -v && \
         for i in $(seq 50); do grep -q ' /sw/auto .*autofs' /proc/mounts && exit; sleep 0.1; done; exit 1",
    );
    assert_eq!(started.code, 0, "{}", started.text());
    for (image, content) in [("/sw/auto/a", "a"), ("/sw/auto/e", "erofs")] {
        let (code, lines, stderr) = start(User::Alice, image);
        assert_eq!((code, &*stderr), (0, ""), "{lines:?}");
        assert_eq!(lines.iter().filter(|line| *line == content).count(), 2, "{lines:?}");
    }
    let gone = on_node(
        &cluster,
        &format!(
            "for i in $(seq 150); do losetup -nlO BACK-FILE | grep -q {directory}/ || break; sleep 0.1; done; \
                  kill $(cat /run/automount.pid); for i in $(seq 50); do grep -q autofs /proc/mounts || break; sleep 0.1; done; grep -c autofs /proc/mounts; rm -r /sw"
        ),
    );
    assert_eq!(gone.stdout, "0\n", "{}", gone.text());
    assert_eq!(loops(&cluster, &directory), "");
    empty.assert_again(&cluster, "site mounts");
}

/// What the manual has for systemd, as systemd reads it.
#[test]
fn the_units_of_the_manual_are_systemds() {
    let cluster = Cluster::start(one_node(Release::Slurm24_11, "units")).unwrap();
    let manual = include_str!("../../docs/admins.md");
    let mut units = Vec::new();
    for block in manual.split("```ini\n# ").skip(1) {
        let (path, text) = block.split("```").next().unwrap().split_once('\n').unwrap();
        cluster.write_everywhere(path, text).unwrap();
        units.push(path);
    }
    assert_eq!(units.len(), 2, "{units:?}");
    let verified = cluster.run_as_root(&format!("systemd-analyze verify {}", units.join(" ")));
    assert_eq!((verified.code, &*verified.stdout, &*verified.stderr), (0, "", ""));
    let name = "sw-images-tf_2.15.automount";
    assert!(manual.contains(&format!("`systemctl enable --now {name}`")));
    let enabled = cluster
        .run_as_root(&format!("systemctl --root=/ enable {name} && ls /etc/systemd/system/*.wants/{name}"));
    assert_out(&enabled, 0, &format!("/etc/systemd/system/multi-user.target.wants/{name}\n"));
    let escaped = cluster.run_as_root("systemd-escape -p --suffix=mount /sw/images/tf_2.15");
    assert_out(&escaped, 0, "sw-images-tf_2.15.mount\n");
}
