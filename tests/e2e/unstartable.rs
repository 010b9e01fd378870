//! Programs that cannot start inside, and a plugin that cannot do its work: each says why, and what to do.

use std::os::unix::fs::PermissionsExt;

use mizzen_tests::check::{
    assert_failed, assert_out, assert_told, one_node, run_in_time, start_with_busybox, with_busybox,
};
use mizzen_tests::images::ImageTree;
use mizzen_tests::spec::PLUGIN;
use mizzen_tests::{Release, on_every_release};

on_every_release!(mizzen_twice_in_plugstack_conf_is_named);

#[test]
fn a_program_that_cannot_start_says_why() {
    let cluster = with_busybox("no-start");
    let tree = ImageTree::busybox().unwrap();
    let mut arm = std::fs::read("/bin/busybox").unwrap();
    arm[18] = 183; // the machine in the ELF header: aarch64
    std::fs::write(tree.path("bin/arm"), arm).unwrap();
    std::fs::set_permissions(tree.path("bin/arm"), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::copy("/bin/ls", tree.path("bin/dynamic")).unwrap();
    tree.file("bin/plain", "").unwrap();
    for (name, first) in [
        ("of-none", "#!/bin/none"),
        ("of-arm", "#!/bin/arm"),
        ("of-plain", "#!/bin/plain"),
        ("of-directory", "#!/bin"),
        ("of-nothing", "#!"),
        ("of-script", "#!/bin/of-none"),
        ("of-dynamic", "#!/bin/dynamic -x"),
        ("of-link", "#!/bin/nowhere"),
        ("of-loop", "#!/bin/loop"),
        ("of-dos", "#!/bin/sh\r"),
    ] {
        tree.program(&format!("bin/{name}"), &format!("{first}\necho\n")).unwrap();
    }
    tree.link("bin/nowhere", "/none").unwrap();
    tree.link("bin/loop", "loop").unwrap();
    cluster.share("odd.sqsh", &tree.squashfs(&["-comp", "gzip"]).unwrap()).unwrap();
    let foreign = "choose nodes of that kind (srun --constraint), or get the image for this one";
    let own_link = "a symbolic link in the container leads back to itself";
    for (program, code, message, hint) in [
        (
            "''",
            127,
            "the program's name is empty\n",
            "a variable in its place is probably not set where the command was typed\n",
        ),
        (
            "of-none",
            127,
            "/bin/of-none: its interpreter /bin/none is not in the container\n",
            "the image needs it, or the script another first line\n",
        ),
        (
            "of-arm",
            126,
            "/bin/of-arm: its interpreter /bin/arm: made for aarch64, this node is x86_64\n",
            foreign,
        ),
        (
            "of-plain",
            126,
            "/bin/of-plain: its interpreter /bin/plain: Permission denied\n",
            "is it executable (chmod +x)?\n",
        ),
        (
            "of-directory",
            126,
            "/bin/of-directory: its interpreter /bin: is a directory\n",
            "name a program, not the directory in which it is\n",
        ),
        ("of-nothing", 126, "/bin/of-nothing: its #! line is empty\n", "name its interpreter: #!/bin/sh\n"),
        (
            "of-script",
            127,
            "/bin/of-script: its interpreter /bin/of-none: its interpreter /bin/none is not in the container\n",
            "the image needs it, or the script another first line\n",
        ),
        (
            "of-dynamic",
            127,
            "/bin/of-dynamic: its interpreter /bin/dynamic: its dynamic linker is not in the container\n",
            "the program was made for another C library than the image's\n",
        ),
        (
            "of-loop",
            126,
            "/bin/of-loop: its interpreter /bin/loop: Too many levels of symbolic links\n",
            own_link,
        ),
        (
            "of-dos",
            127,
            "/bin/of-dos: its interpreter /bin/sh\\r is not in the container\n",
            "the script has DOS line ends; dos2unix changes them\n",
        ),
        (
            "/bin/nowhere",
            127,
            "/bin/nowhere: no such program in the container\n",
            "it is a symbolic link to /none, which is not in the container\n",
        ),
        ("/etc", 126, "/etc: is a directory\n", "name a program, not the directory in which it is\n"),
    ] {
        let run = run_in_time(&cluster, &format!("mizzen run /shared/odd.sqsh {program}"));
        assert_told(&run, code, &format!("mizzen: {message}"), hint);
        let srun =
            run_in_time(&cluster, &format!("srun --quiet -n2 --container-image=/shared/odd.sqsh {program}"));
        assert_told(&srun, code, &format!("mizzen: node1: {message}"), hint);
    }
    let link = cluster.run("mizzen run /shared/odd.sqsh of-link");
    let message = "mizzen: /bin/of-link: its interpreter /bin/nowhere: is a symbolic link to nothing in the container\n";
    assert_failed(&link, 127, message);
    // A batch script, which needs an interpreter inside, or none there.
    let script = "slurm_script: its interpreter";
    for (first, code, message, hint) in [
        (
            "#!/usr/bin/nosuch",
            127,
            format!("{script} /usr/bin/nosuch is not in the container\n"),
            "the script runs in the container, so the image needs it; --no-container-script runs the script on the node\n",
        ),
        ("#!/bin/arm", 126, format!("{script} /bin/arm: made for aarch64, this node is x86_64\n"), foreign),
    ] {
        let batch = cluster.run(&format!(
            "printf '{first}\\ntouch /shared/marker\\n' > job.sh; \
             sbatch --quiet --wait --output=out --container-image=/shared/odd.sqsh job.sh; code=$?; cat out >&2; exit $code"
        ));
        assert_told(&batch, code, &message, hint);
    }
    // A file system on which nothing can be executed.
    cluster.run_as_root("mount -t tmpfs -o noexec,mode=777 tmpfs /mnt; cp /bin/true /mnt/");
    let noexec = cluster.run("mizzen run -m /mnt /shared/odd.sqsh /mnt/true");
    assert_told(
        &noexec,
        126,
        "mizzen: /mnt/true: Permission denied\n",
        "its file system is mounted noexec\n",
    );
    assert_eq!(cluster.run("ls /shared/marker").stdout, "", "nothing ran");
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
}

fn mizzen_twice_in_plugstack_conf_is_named(release: Release) {
    let cluster = start_with_busybox(one_node(release, "twice"));
    let image = "--container-image=/shared/bb.sqsh";
    let hint = "remove one of the lines in plugstack.conf and the files that it includes\n";
    cluster.run_as_root(
        "mkdir /shared/copy; cp /usr/lib/mizzen/spank_mizzen.so /shared/copy; ln -s /usr/lib/mizzen /shared/link",
    );
    for (second, files) in [
        (PLUGIN, PLUGIN.to_owned()),
        ("/shared/link/spank_mizzen.so", PLUGIN.to_owned()),
        ("/shared/copy/spank_mizzen.so", format!("{PLUGIN} and /shared/copy/spank_mizzen.so")),
    ] {
        for requirement in ["required", "optional"] {
            cluster
                .set_plugstack(&[&format!("{requirement} {PLUGIN}"), &format!("{requirement} {second}")])
                .unwrap();
            let what = format!("{release} {requirement} {second}");
            let plain = cluster.run("srun --quiet hostname");
            assert_eq!(
                (plain.code, plain.stdout.as_str(), plain.stderr.as_str()),
                (0, "node1\n", ""),
                "{what}: {}",
                plain.text()
            );
            let message = format!("mizzen: spank_mizzen.so is loaded twice: {files}\n");
            assert_told(&cluster.run(&format!("srun {image} touch /shared/marker")), 1, &message, hint);
            let batch = cluster.run(&format!("sbatch {image} --wrap 'touch /shared/marker'"));
            assert_told(&batch, 1, &message, hint);
            // The login node has it once, the compute node twice.
            cluster.run_as_root(&format!(
                "rm -rf /shared/conf; cp -r /etc/slurm /shared/conf; echo 'required {PLUGIN}' > /shared/conf/plugstack.conf"
            ));
            let step = cluster.run(&format!(
                "SLURM_CONF=/shared/conf/slurm.conf srun --quiet -n3 {image} touch /shared/marker"
            ));
            let message = format!("mizzen: node1: spank_mizzen.so is loaded twice: {files}\n");
            assert_told(&step, 125, &message, hint);
        }
    }
    cluster.set_plugstack(&[&format!("required {PLUGIN}")]).unwrap();
    assert_out(&cluster.run(&format!("srun --quiet {image} echo ran")), 0, "ran\n");
    assert_eq!(cluster.run("ls /shared/marker").stdout, "", "on the host");
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
}
