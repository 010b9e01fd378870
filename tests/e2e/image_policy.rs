//! The site's policy: which images may be used. Told by the client before a job waits, and held on the node whatever the request
//! says.

use mizzen_tests::check::{assert_failed, assert_out, assert_told, with_images};
use mizzen_tests::copies::digest_of;
use mizzen_tests::{Cluster, Spec, User};

fn cluster(name: &str) -> Cluster {
    let cluster = with_images(Spec { nodes: 1, ..Cluster::spec(name) });
    for machine in ["ctl", "node1"] {
        let made = "mkdir -p /sw/images; cp /shared/a.sqsh /sw/images; cp /shared/b.sqsh /sw; \
                    ln -s /sw/b.sqsh /sw/images/link.sqsh; chmod -R go+rX /sw";
        assert_eq!(cluster.run_on(machine, User::Root, made).code, 0);
    }
    cluster
}

fn set_policy(cluster: &Cluster, policy: &str) {
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", &format!("{policy}\n")).unwrap();
}

/// Refused by srun, by `mizzen run`, and by the node where the client did not look.
#[track_caller]
fn assert_refused(cluster: &Cluster, image: &str, message: &str, hint: &str) {
    let srun = cluster.run(&format!("srun --container={image} touch /shared/marker"));
    assert_told(&srun, 1, &format!("mizzen: --container: {message}"), hint);
    let run = cluster.run(&format!("mizzen run -m /shared {image} touch /shared/marker"));
    assert_told(&run, 125, &format!("mizzen: {message}"), hint);
    assert_refused_by_node(cluster, image, message, hint);
}

#[track_caller]
fn assert_refused_by_node(cluster: &Cluster, image: &str, message: &str, hint: &str) {
    let request = format!("SLURM_MIZZEN_REQUEST='image={image}&mounts=/shared'");
    let node = cluster.run(&format!("{request} srun -n2 touch /shared/marker"));
    assert_failed(&node, 125, &format!("mizzen: node1: {message}"));
    assert_failed(&node, 125, &format!("mizzen: hint: {hint}"));
    assert_eq!(cluster.run("ls /shared/marker").code, 2, "it ran");
}

#[test]
fn images_must_lie_in_the_sites_folders() {
    let cluster = cluster("policy-folders");
    set_policy(
        &cluster,
        "image_folders = [\"/sw/images\"]\n[policy]\nfolders = [\"/sw/images\", \"/nonexistent\"]",
    );
    for image in ["/sw/images/a.sqsh", "a.sqsh", "/sw/../sw/images/a.sqsh"] {
        assert_out(&cluster.run(&format!("srun --container={image} cat /image")), 0, "a\n");
        assert_out(&cluster.run(&format!("mizzen run {image} cat /image")), 0, "a\n");
    }
    cluster.run("ln -s /sw/images/a.sqsh mine.sqsh; cp /shared/b.sqsh b.sqsh");
    assert_out(
        &cluster.run("srun --container=$PWD/mine.sqsh true; mizzen run mine.sqsh cat /image"),
        0,
        "a\n",
    );
    let rule = "folders of this site's policy do not include";
    let hint = "mizzen.toml allows /sw/images, /nonexistent\n";
    for (image, real) in [
        ("/shared/a.sqsh", "/shared/a.sqsh"),
        ("/sw/b.sqsh", "/sw/b.sqsh"),
        ("/sw/images/link.sqsh", "/sw/b.sqsh"),
        ("/sw/images/../b.sqsh", "/sw/b.sqsh"),
    ] {
        assert_refused(&cluster, image, &format!("{image}: {rule} {real}"), hint);
    }
    // A copy of it is not another image.
    let staged = cluster.run("srun --container=/sw/images/a.sqsh --container-stage=always cat /image");
    assert_out(&staged, 0, "a\n");
    // Who may enter a container may enter it with another step.
    let joined = cluster.run(
        "salloc -Q --container-image=/sw/images/a.sqsh sh -c 'srun --overlap sleep 5 & sleep 2; \
         srun --overlap --container-join=0 cat /image'",
    );
    assert_out(&joined, 0, "a\n");
    // Looking at an image is not using it, nor is what is mounted into a container.
    assert_eq!(cluster.run("mizzen inspect /shared/b.sqsh").code, 0);
    let data = cluster.run("mizzen run -m /shared/b.sqsh:/data:squashfs /sw/images/a.sqsh cat /data/image");
    assert_out(&data, 0, "b\n");
    assert_eq!(cluster.run("srun hostname").stdout, "node1\n");
}

#[test]
fn images_must_belong_to_those_whom_the_site_names() {
    let cluster = cluster("policy-owners");
    set_policy(&cluster, "[policy]\nowners = [\"root\", 4711]");
    assert_out(&cluster.run("srun --container=/sw/images/a.sqsh cat /image"), 0, "a\n");
    cluster
        .run("cp /shared/a.sqsh /shared/own.sqsh; mkdir -p /shared/tree/bin; cp /bin/true /shared/tree/bin");
    let rule = "owners of this site's policy do not include its owner, 2001, alice";
    for image in ["/shared/own.sqsh", "/shared/tree"] {
        assert_refused(&cluster, image, &format!("{image}: {rule}"), "mizzen.toml allows root, 4711\n");
    }
    cluster.run_as_root("chown 4711 /shared/own.sqsh");
    assert_out(&cluster.run("srun --container=/shared/own.sqsh cat /image"), 0, "a\n");
    // Root's, but anybody's image: as /tmp, or with a file that others write.
    let opened = "mkdir -m 1777 /open && mkdir -m 2775 /project && chmod 1777 /open";
    for machine in ["ctl", "node1"] {
        assert_out(&cluster.run_on(machine, User::Root, opened), 0, "");
        let made = "mkdir -p /open/bin /open/etc /open/usr && cp /bin/true /open/bin/sh";
        assert_out(&cluster.run_on(machine, User::Alice, made), 0, "");
    }
    cluster.run_as_root("chmod o+w /shared/own.sqsh");
    let hint = "nobody but its owner may be able to write the image: chmod go-w\n";
    for (image, mode) in [("/open", "1777"), ("/shared/own.sqsh", "0646")] {
        let message = format!(
            "{image}: owners of this site's policy do not include others who can write it (mode {mode})"
        );
        assert_refused(&cluster, image, &message, hint);
    }
}

#[test]
fn images_must_have_a_content_that_the_site_lists() {
    let cluster = cluster("policy-digests");
    let (a, b) = (digest_of(&cluster, "/shared/a.sqsh"), digest_of(&cluster, "/shared/b.sqsh"));
    set_policy(&cluster, &format!("[policy]\ndigests = [\"{a}\"]"));
    for stage in ["never", "always", "always"] {
        let allowed =
            cluster.run(&format!("srun --container=/shared/a.sqsh --container-stage={stage} cat /image"));
        assert_out(&allowed, 0, "a\n");
    }
    assert_out(&cluster.run(&format!("mizzen run /shared/a.sqsh@{a} cat /image")), 0, "a\n");
    let rule = format!("digests of this site's policy do not include {b}");
    let hint = "this site lists the images that may be used";
    // srun does not read an image as a whole: the node does.
    assert_refused_by_node(&cluster, "/shared/b.sqsh", &format!("/shared/b.sqsh: {rule}"), hint);
    let staged = cluster.run("srun --container=/shared/b.sqsh --container-stage=always cat /image");
    assert_failed(&staged, 125, &format!("mizzen: node1: /shared/b.sqsh: {rule}"));
    // What the name itself says, it does.
    let pinned = cluster.run(&format!("srun --container=/shared/b.sqsh@{b} cat /image"));
    assert_told(&pinned, 1, &format!("mizzen: --container: /shared/b.sqsh: {rule}"), hint);
    cluster.run("mkdir -p /shared/tree/bin; cp /bin/true /shared/tree/bin");
    let message = "/shared/tree: digests of this site's policy do not include directories";
    assert_refused(&cluster, "/shared/tree", message, "use an image file that this site lists\n");
}

#[test]
fn registries_are_refused_before_anything_is_fetched() {
    let cluster = cluster("policy-registries");
    // Nothing is ever asked of it.
    cluster.run_as_root("printf '#!/bin/sh\\necho asked >> /shared/asked; exit 1\\n' > /usr/lib/mizzen/mizzen-import; chmod 755 /usr/lib/mizzen/mizzen-import; : > /shared/asked; chmod 666 /shared/asked");
    set_policy(
        &cluster,
        "[policy]\nregistries = [\"nvcr.io\", \"docker.io\"]\nrepositories = [\"docker.io/library/*\", \"nvcr.io/nvidia/**\"]",
    );
    let digest = format!("sha256:{}", "7".repeat(64));
    for (image, whole, rule, hint) in [
        (
            "docker://evil.org/x/y",
            "docker://evil.org/x/y:latest",
            "registries of this site's policy do not include evil.org",
            "mizzen.toml allows nvcr.io, docker.io\n",
        ),
        (
            "docker://someone/ubuntu:1",
            "docker://docker.io/someone/ubuntu:1",
            "repositories of this site's policy do not include docker.io/someone/ubuntu",
            "mizzen.toml allows docker.io/library/*, nvcr.io/nvidia/**\n",
        ),
    ] {
        let srun = cluster.run(&format!("srun --container={image} true"));
        assert_told(&srun, 1, &format!("mizzen: --container: {whole}: {rule}"), hint);
        assert_told(
            &cluster.run(&format!("mizzen run {image} true")),
            125,
            &format!("mizzen: {whole}: {rule}"),
            hint,
        );
        let request = format!("SLURM_MIZZEN_REQUEST='image=/shared/a.sqsh&reference={whole}@{digest}'");
        let node = cluster.run(&format!("{request} srun cat /image"));
        assert_failed(&node, 125, &format!("mizzen: node1: {whole}@{digest}: {rule}"));
    }
    // Where the store may not be used, nothing is put into it.
    set_policy(&cluster, "[policy]\nfolders = [\"/sw\"]");
    let store = cluster.run("srun --container=docker://ubuntu true");
    let message = "mizzen: --container: docker://docker.io/library/ubuntu:latest: folders of this site's policy do not include \
                   the image store, /home/alice/.local/share/mizzen/images";
    assert_told(&store, 1, message, "mizzen.toml allows /sw\n");
    set_policy(&cluster, "[policy]\nowners = [\"root\"]");
    let store = cluster.run("mizzen run docker://ubuntu true");
    assert_failed(
        &store,
        125,
        "ubuntu:latest: owners of this site's policy do not include its owner, 2001, alice",
    );
    assert_eq!(cluster.run("cat /shared/asked").stdout, "");
}

/// Neither the path of a file in another mount namespace nor the owner that a user's own file server tells.
#[test]
fn what_users_can_make_up_is_not_believed() {
    let cluster = cluster("policy-made-up");
    set_policy(&cluster, "[policy]\nfolders = [\"/sw/images\"]");
    let done = cluster.run(
        "unshare -U -r -m sh -c 'mount -t tmpfs x /sw/images; cp /shared/b.sqsh /sw/images/own.sqsh; exec sleep 30' & \
         until P=$(pgrep -u alice -x sleep); do sleep 0.05; done; mizzen run /proc/$P/root/sw/images/own.sqsh cat /image; echo $?; kill $P",
    );
    assert_eq!(done.stdout, "125\n", "{}", done.text());
    let message = "folders of this site's policy do not include a file of another mount namespace";
    assert!(done.stderr.contains(message), "{}", done.text());
    let hint = "hint: name the file by its path, and not by one of another process (/proc/PID/root)";
    assert!(done.stderr.contains(hint), "{}", done.text());
    set_policy(&cluster, "[policy]\nowners = [\"root\"]");
    let served = "mkdir -p fs m; cp /shared/b.sqsh fs/own.sqsh; bindfs --no-allow-other --force-user=root --force-group=root -p a=rX fs m; \
                  stat -c %U m/own.sqsh";
    assert_out(&cluster.run(served), 0, "root\n");
    assert_told(
        &cluster.run("mizzen run m/own.sqsh cat /image"),
        125,
        "m/own.sqsh: owners of this site's policy do not include its owner, 2001, alice",
        "mizzen.toml allows root",
    );
    assert_out(&cluster.run("mizzen run /sw/images/a.sqsh cat /image"), 0, "a\n");
    cluster.run("fusermount3 -u m || fusermount -u m");
}
