//! GPUs in containers: which devices and libraries of the node a step gets. The driver's libraries are NVIDIA's own, from
//! Debian; the devices are nodes of other devices, because what matters is who may open them.

use std::path::PathBuf;

use mizzen_tests::check::{assert_failed, assert_out, assert_told, start_with_busybox};
use mizzen_tests::images::{ImageTree, mpi, packed_once};
use mizzen_tests::release::extract_packages;
use mizzen_tests::{Cluster, Release, Spec, User, target_dir};

/// Three GPUs that open without hardware, and the driver's own device with its real number: no driver answers there.
const DEVICES: [(&str, u64, u64); 8] = [
    ("nvidia0", 1, 7),
    ("nvidia1", 1, 8),
    ("nvidia2", 1, 5),
    ("nvidiactl", 195, 255),
    ("nvidia-uvm", 1, 3),
    ("nvidia-caps/nvidia-cap1", 1, 3),
    ("kfd", 1, 3),
    ("dri/renderD128", 1, 3),
];

/// A cluster with three GPUs on its node, of which a step can open only its own.
fn spec(name: &str, release: Release) -> Spec {
    let spec = Spec {
        release,
        nodes: 1,
        cgroup_v1: true,
        devices: DEVICES.map(|(name, major, minor)| (name.to_owned(), major, minor)).to_vec(),
        slurm_conf: vec!["GresTypes=gpu".to_owned(), "NodeName=DEFAULT Gres=gpu:3".to_owned()],
        ..Cluster::spec(&format!("gpu-{name}"))
    };
    let cgroup = spec.cgroup_conf_text() + "ConstrainDevices=yes\n";
    let files = [("gres.conf", "Name=gpu File=/dev/nvidia[0-2]\n".to_owned()), ("cgroup.conf", cgroup)];
    Spec { slurm_files: files.map(|(name, text)| (name.to_owned(), text)).to_vec(), ..spec }
}

/// The driver's files, and musl's.
fn driver() -> PathBuf {
    let packages = "libcuda1,libnvcuvid1,libnvidia-cfg1,nvidia-smi,musl";
    extract_packages("bookworm", "nvidia", packages).unwrap()
}

/// A cluster whose machines have the driver's libraries and programs, with the image /shared/py.sqsh that has none.
fn with_driver() -> Cluster {
    let cluster = start_with_busybox(Spec {
        rootfs: Some(driver()),
        layers: vec![target_dir().join("stage"), Release::Slurm22_05.rootfs().unwrap()],
        ..spec("driver", Release::Slurm22_05)
    });
    for machine in ["ctl", "node1"] {
        // What the packages' scripts do, if in a simpler way.
        let installed = cluster.run_on(
            machine,
            User::Root,
            "echo /usr/lib/x86_64-linux-gnu/nvidia/current > /etc/ld.so.conf.d/nvidia.conf; ldconfig; \
             ln -s /usr/lib/nvidia/current/nvidia-smi /usr/bin/nvidia-smi",
        );
        assert_out(&installed, 0, "");
    }
    cluster.share("py.sqsh", &mpi().unwrap()).unwrap();
    cluster
}

const PY: &str = "--container=/shared/py.sqsh";
/// Which GPUs can be opened.
const OPEN: &str =
    "sh -c 'for gpu in /dev/nvidia[0-9]; do (: < $gpu) 2>/dev/null && echo ${gpu#/dev/}; done; true'";

/// Whether a GPU is the step's or the task's own, is Slurm's to say.
fn steps_have_their_gpus(cluster: &Cluster, image: &str) {
    assert_out(&cluster.run(&format!("srun --gres=gpu:1 --container={image} {OPEN}")), 0, "nvidia0\n");
    assert_out(
        &cluster.run(&format!("srun --gres=gpu:2 --container={image} {OPEN}")),
        0,
        "nvidia0\nnvidia1\n",
    );
    // And no other is there.
    let there = cluster.run(&format!("srun --gres=gpu:1 --container={image} sh -c 'echo /dev/nvidia[0-9]'"));
    assert_out(&there, 0, "/dev/nvidia0\n");
    let own =
        format!("set -o pipefail; srun --quiet -l -n3 --gpus-per-task=1 --container={image} {OPEN} | sort");
    assert_out(&cluster.run(&own), 0, "0: nvidia0\n1: nvidia1\n2: nvidia2\n");
    let none = cluster.run(&format!("srun --container={image} sh -c 'ls /dev | grep nvidia'"));
    assert_out(&none, 1, "");
}

#[test]
fn slurm_24_11() {
    let cluster = start_with_busybox(spec("24", Release::Slurm24_11));
    steps_have_their_gpus(&cluster, "/shared/bb.sqsh");
    nvidias_variable_chooses(&cluster);
}

#[test]
fn slurm_26_05() {
    steps_have_their_gpus(&start_with_busybox(spec("26", Release::Slurm26_05)), "/shared/bb.sqsh");
}

/// Among the GPUs of the step, by numbers from 0, as pyxis's users do it: the user's word before that of the image.
fn nvidias_variable_chooses(cluster: &Cluster) {
    for (image, value) in [("cuda", "all"), ("void", "void")] {
        let tree = ImageTree::busybox().unwrap();
        let config = format!(r#"{{"config": {{"Env": ["NVIDIA_VISIBLE_DEVICES={value}"]}}}}"#);
        tree.file(".mizzen/config.json", &config).unwrap();
        cluster.share(&format!("{image}.sqsh"), &tree.squashfs(&[]).unwrap()).unwrap();
    }
    let step = |variable: &str, options: &str, image: &str, program: &str| {
        cluster.run(&format!(
            "{variable} srun --quiet --gres=gpu:2 {options} --container=/shared/{image}.sqsh {program}"
        ))
    };
    let both = "nvidia0\nnvidia1\n";
    for (variable, image, expected) in [
        ("", "cuda", both),
        ("NVIDIA_VISIBLE_DEVICES=all", "bb", both),
        ("NVIDIA_VISIBLE_DEVICES=0", "cuda", "nvidia0\n"),
        ("NVIDIA_VISIBLE_DEVICES=1", "bb", "nvidia1\n"),
        ("NVIDIA_VISIBLE_DEVICES=1,0", "bb", both),
        ("NVIDIA_VISIBLE_DEVICES=none", "cuda", ""),
        ("NVIDIA_VISIBLE_DEVICES=void", "cuda", ""),
        ("", "void", ""),
        ("NVIDIA_VISIBLE_DEVICES=1", "void", "nvidia1\n"),
    ] {
        assert_out(&step(variable, "", image, OPEN), 0, expected);
    }
    let devices = "sh -c 'ls /dev | grep -c nvidia'";
    assert_out(&step("NVIDIA_VISIBLE_DEVICES=none", "", "bb", devices), 0, "3\n");
    assert_out(&step("NVIDIA_VISIBLE_DEVICES=void", "", "bb", devices), 1, "0\n");
    // An option of the user's comes before it.
    assert_out(&step("NVIDIA_VISIBLE_DEVICES=void", "--container-gpu=all", "bb", devices), 0, "6\n");
    let named = step("NVIDIA_VISIBLE_DEVICES=GPU-8932f937", "", "bb", OPEN);
    assert_out(&named, 0, both);
    let note = "note: node1: NVIDIA_VISIBLE_DEVICES=GPU-8932f937: only numbers choose among the GPUs of a step, which are all there\n";
    assert_eq!(named.stderr.matches(note).count(), 1, "{}", named.text());
    let missing = step("NVIDIA_VISIBLE_DEVICES=0,2", "", "bb", "true");
    let message =
        "NVIDIA_VISIBLE_DEVICES=0,2: the step's GPUs on this node are 2, counted from 0: there is no 2";
    assert_told(
        &missing,
        125,
        message,
        "export NVIDIA_VISIBLE_DEVICES=all, for all that Slurm has given to the step",
    );
    // A step without GPUs has none to choose.
    let none = cluster
        .run("NVIDIA_VISIBLE_DEVICES=0 srun --container=/shared/bb.sqsh sh -c 'ls /dev | grep nvidia'");
    assert_out(&none, 1, "");
}

/// What pyxis's tests try with NVIDIA's variables, as far as it goes without a card.
fn nvidias_programs_find_the_driver(cluster: &Cluster) {
    let step = |variables: &str, program: &str| {
        cluster.run(&format!("NVIDIA_VISIBLE_DEVICES={variables} srun --quiet --gres=gpu:1 {PY} {program}"))
    };
    let smi = step("all", "nvidia-smi");
    assert!(smi.stdout.starts_with("NVIDIA-SMI has failed because it couldn't"), "{}", smi.text());
    // No cache of the image's dynamic linker names the libraries, and programs find them.
    let found = "sh -c '/sbin/ldconfig -p 2>/dev/null | grep -c libcuda.so.1; ls /.mizzen/host/lib | grep -c libnvcuvid.so; \
                 python3 -c \"import ctypes; print(ctypes.CDLL(\\\"libcuda.so.1\\\").cuInit(0))\"'";
    assert_out(&step("all NVIDIA_DRIVER_CAPABILITIES=utility,compute", found), 0, "0\n0\n100\n");
    let libraries = "sh -c 'ls /.mizzen/host/lib 2>/dev/null | grep -c libcuda.so.1'";
    assert_out(&step("none", libraries), 0, "1\n");
    assert_out(&step("void", libraries), 1, "0\n");
}

#[test]
fn the_nodes_driver() {
    let cluster = with_driver();
    programs_find_the_driver(&cluster);
    nvidias_variable_chooses(&cluster);
    nvidias_programs_find_the_driver(&cluster);
    steps_have_their_gpus(&cluster, "/shared/py.sqsh");
    options_choose(&cluster);
    groups_open_devices(&cluster);
    batch_scripts_have_both(&cluster);
    what_is_decided_is_true(&cluster);
    other_c_libraries_get_nothing(&cluster);
    what_was_found_is_shown(&cluster);
    a_specification_holds_in_place_of_the_rule(&cluster);
    other_versions_are_left_out(&cluster);
    bad_rules_are_refused(&cluster);
}

fn programs_find_the_driver(cluster: &Cluster) {
    let step = |program: &str| cluster.run(&format!("srun --quiet --gres=gpu:1 {PY} {program}"));
    let smi = step("nvidia-smi");
    assert!(
        smi.stdout.starts_with("NVIDIA-SMI has failed because it couldn't communicate with"),
        "{}",
        smi.text()
    );
    let load = "import ctypes; cuda = ctypes.CDLL(\"libcuda.so.1\"); ctypes.CDLL(\"libcuda.so\"); print(cuda.cuInit(0))";
    // 100 is CUDA_ERROR_NO_DEVICE.
    assert_out(&step(&format!("python3 -c '{load}'")), 0, "100\n");
    // All tasks, not only the one that made the container; and whatever the user says about the image's libraries.
    let all = format!(
        "srun --quiet -n2 --gres=gpu:1 --container-env=LD_LIBRARY_PATH=/opt/x {PY} printenv LD_LIBRARY_PATH"
    );
    assert_out(&cluster.run(&all), 0, &"/.mizzen/host/lib:/opt/x\n".repeat(2));
    // Nothing of the image is covered.
    let mounts = step("grep -E ' /(usr|lib|bin|etc)' /proc/self/mounts");
    assert!(mounts.stdout.lines().all(|line| line.contains(" /etc/")), "{}", mounts.text());
    let devices = step("sh -c 'cd /dev; echo nvidia*'").stdout;
    assert_eq!(devices, "nvidia-caps nvidia-uvm nvidia0 nvidiactl\n");
}

fn options_choose(cluster: &Cluster) {
    let count = "sh -c 'ls /dev | grep -c nvidia; ls /.mizzen/host/lib 2>/dev/null | grep -c libcuda.so'";
    let step = |options: &str| cluster.run(&format!("srun --quiet {options} {PY} {count}")).stdout;
    assert_eq!(step("--gres=gpu:1 --container-gpu=none"), "0\n0\n");
    assert_eq!(step("--container-gpu=all"), "6\n3\n");
    let run = |options: &str| cluster.run(&format!("{options} /shared/py.sqsh {count}")).stdout;
    assert_eq!(run("mizzen run"), "6\n3\n");
    assert_eq!(run("mizzen run --gpu=none"), "0\n0\n");
    assert_eq!(run("MIZZEN_CONTAINER_GPU=none srun --quiet --gres=gpu:1 --container"), "0\n0\n");
    assert_eq!(run("NVIDIA_DRIVER_CAPABILITIES=utility mizzen run"), "6\n0\n");
    let wrong = cluster.run(&format!("srun {PY} --container-gpu=two true"));
    assert_failed(&wrong, 1, "--container-gpu: \"two\" is not auto, all or none");
}

/// A device of a group is for its members, inside as outside: Alice is one, Bob is not.
fn groups_open_devices(cluster: &Cluster) {
    let change = "chgrp gpu /dev/kfd /dev/dri/renderD128; chmod 660 /dev/kfd /dev/dri/renderD128";
    let node = |user, script: &str| cluster.run_on("node1", user, script);
    assert_out(&node(User::Root, change), 0, "");
    let open = "sh -c ': < /dev/kfd && : < /dev/dri/renderD128 && echo open'";
    let step = format!("srun --quiet --container-gpu=all {PY} {open}");
    for alices in [cluster.run(&step), node(User::Alice, &format!("mizzen run /shared/py.sqsh {open}"))] {
        assert_out(&alices, 0, "open\n");
        assert_eq!(alices.stderr, "");
    }
    let bobs = node(User::Bob, &format!("mizzen run /shared/py.sqsh {open}"));
    assert_failed(&bobs, 2, "note: you cannot open /dev/kfd (Permission denied): it belongs to group 2101");
    assert_out(&node(User::Root, "chmod 666 /dev/kfd /dev/dri/renderD128"), 0, "");
}

/// The node's libraries and Slurm's commands are neighbours inside.
fn batch_scripts_have_both(cluster: &Cluster) {
    let job = cluster.run(&format!(
        "printf '#!/bin/sh\\nls /.mizzen/host/bin; which srun; srun printenv LD_LIBRARY_PATH\\n' > job; \
         sbatch -W --quiet -o out --gres=gpu:1 {PY} job; cat out"
    ));
    assert_out(&job, 0, "nvidia-smi\n/.mizzen/bin/srun\n/.mizzen/host/lib\n");
}

/// Every library of the node, in an image with an older C library: what is given can be loaded, what is left out cannot.
fn what_is_decided_is_true(cluster: &Cluster) {
    cluster.share("old.sqsh", &packed_once(&Release::Slurm20_11.rootfs().unwrap()).unwrap()).unwrap();
    let rule =
        "switch = \"fabric\"\nwhen = [\"/usr\"]\n[[set]]\nname = \"all\"\noptional = [\"lib*.so.*\"]\n";
    cluster.write_everywhere("/etc/mizzen/host.d/everything.toml", rule).unwrap();
    cluster.share("load.py", include_str!("gpu/load.py").as_bytes()).unwrap();
    let loaded = cluster.run(
        "mizzen plan --json /shared/old.sqsh true > plan.json && \
         mizzen run -m /usr/lib/x86_64-linux-gnu:/node -m /shared/load.py /shared/old.sqsh python3 /shared/load.py",
    );
    for machine in ["ctl", "node1"] {
        assert_out(&cluster.run_on(machine, User::Root, "rm /etc/mizzen/host.d/everything.toml"), 0, "");
    }
    let (given, left_out) = loaded.stdout.trim().split_once(" given, ").unwrap_or_default();
    let numbers = [given, left_out.trim_end_matches(" left out")].map(|number| number.parse::<u32>());
    assert!(
        numbers.iter().all(|number| number.as_ref().is_ok_and(|number| *number > 20)),
        "{}",
        loaded.text()
    );
}

fn other_c_libraries_get_nothing(cluster: &Cluster) {
    let tree = ImageTree::busybox().unwrap();
    std::fs::create_dir(tree.path("lib")).unwrap();
    let musl = driver().join("lib/x86_64-linux-musl/libc.so");
    std::fs::copy(musl, tree.path("lib/ld-musl-x86_64.so.1")).unwrap();
    cluster.share("musl.sqsh", &tree.squashfs(&[]).unwrap()).unwrap();
    for (image, c_library) in [("musl.sqsh", "musl"), ("bb.sqsh", "no C library of its own")] {
        let step = format!("srun --quiet -n2 --gres=gpu:1 --container=/shared/{image} ls /.mizzen");
        let note = format!("note: node1: the image has {c_library}: the node's nvidia libraries need glibc");
        assert_failed(&cluster.run(&step), 1, &note);
    }
}

fn what_was_found_is_shown(cluster: &Cluster) {
    let doctor = cluster.run("mizzen doctor --gpu --fabric");
    for line in [
        "intel                              not on this node: no /sys/module/xe, ",
        "  /dev/kfd                         device",
        "  /dev/nvidia-caps                 devices",
        "  libcuda.so.1                     compute: /usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.",
        "  nvidia-smi                       utility: /usr/lib/nvidia/current/nvidia-smi",
    ] {
        assert!(doctor.stdout.contains(line), "{line}\n{}", doctor.text());
    }
    let plan = cluster.run("mizzen plan /shared/old.sqsh true | grep ^node").stdout;
    for part in [
        "/dev/nvidia2 ",
        "libnvidia-ml.so.535.",
        "left out: it needs libcrypto.so.3, which is left out",
        "left out: it needs GLIBC_2.34, and the image's libc.so.6 has up to GLIBC_2.30",
    ] {
        assert!(plan.contains(part), "{part}\n{plan}");
    }
}

/// A specification like those of nvidia-ctk, for this node.
fn a_specification_holds_in_place_of_the_rule(cluster: &Cluster) {
    let node = "/usr/lib/x86_64-linux-gnu/nvidia/current";
    let listed = cluster.run(&format!("ls {node}")).stdout;
    let versions = |name: &str| listed.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    let libraries = ["libcuda.so.5", "libnvidia-ml.so.5", "libnvidia-ptxjitcompiler.so.5"].map(versions);
    let folder = "/usr/lib/x86_64-linux-gnu";
    let mounts = libraries.iter().map(|name| {
        format!("  - {{containerPath: {folder}/{name}, hostPath: {node}/{name}, options: [ro, nosuid, nodev, rbind, rprivate]}}\n")
    });
    let hook = "    hookName: createContainer\n    path: /usr/bin/nvidia-cdi-hook\n";
    let device = |name: &str, numbers: &[u32]| {
        let nodes: String =
            numbers.iter().map(|number| format!("    - path: /dev/nvidia{number}\n")).collect();
        format!("- name: \"{name}\"\n  containerEdits:\n    deviceNodes:\n{nodes}")
    };
    let devices =
        [device("0", &[0]), device("GPU-1", &[1]), device("2", &[2]), device("all", &[0, 1, 2])].concat();
    let specification = format!(
        "---\ncdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n{devices}containerEdits:\n  env:\n  - NVIDIA_VISIBLE_DEVICES=void\n  \
         deviceNodes:\n  - path: /dev/nvidiactl\n  - path: /dev/nvidia-uvm\n  hooks:\n  - args: [nvidia-cdi-hook, create-symlinks, \
         --link, \"libcuda.so.1::{folder}/libcuda.so\"]\n{hook}  - args: [nvidia-cdi-hook, enable-cuda-compat, \
         --host-driver-version=535.1]\n{hook}  - args: [nvidia-cdi-hook, update-ldcache, --folder, {folder}]\n{hook}  mounts:\n{}",
        mounts.collect::<String>()
    );
    for machine in ["ctl", "node1"] {
        assert_out(&cluster.run_on(machine, User::Root, "mkdir -p /etc/cdi"), 0, "");
    }
    cluster.write_everywhere("/etc/cdi/nvidia.yaml", &specification).unwrap();
    let step = |options: &str, program: &str| cluster.run(&format!("srun --quiet {options} {PY} {program}"));
    let load = "import ctypes, os; cuda = ctypes.CDLL(\"libcuda.so.1\"); print(cuda.cuInit(0), os.environ[\"NVIDIA_VISIBLE_DEVICES\"], \
                {line.split()[-1] for line in open(\"/proc/self/maps\") if \"libcuda\" in line})";
    let loaded = step("--gres=gpu:1", &format!("python3 -c '{load}'"));
    assert_out(&loaded, 0, &format!("100 void {{'{folder}/{}'}}\n", libraries[0]));
    assert_eq!(loaded.stderr, "");
    // The names in the specification are of another order than the devices' numbers.
    let nodes = "sh -c 'cd /dev; echo nvidia*'";
    assert_out(&step("--gres=gpu:2", nodes), 0, "nvidia-uvm nvidia0 nvidia1 nvidiactl\n");
    assert_out(
        &step("--gres=gpu:1 --container-device=nvidia.com/gpu=2", nodes),
        0,
        "nvidia-uvm nvidia2 nvidiactl\n",
    );
    steps_have_their_gpus(cluster, "/shared/py.sqsh");
    // What the specification has set in a container is there for the steps that are started in it, and says nothing of them.
    for (value, expected) in
        [("1", "nvidia-uvm nvidia1 nvidiactl\n"), ("void", "nvidia-uvm nvidia0 nvidia1 nvidiactl\n")]
    {
        let chosen = format!("NVIDIA_VISIBLE_DEVICES={value} srun --quiet --gres=gpu:2 {PY} {nodes}");
        assert_out(&cluster.run(&chosen), 0, expected);
    }
    for machine in ["ctl", "node1"] {
        assert_out(&cluster.run_on(machine, User::Root, "rm -r /etc/cdi"), 0, "");
    }
}

fn other_versions_are_left_out(cluster: &Cluster) {
    let say = |version: &str| {
        let rule = "s|^version_files.*|version_files = [\"/etc/driver-version\"]|";
        cluster.run_as_root(&format!(
            "echo '{version}' > /etc/driver-version; sed -i '{rule}' /etc/mizzen/host.d/nvidia.toml"
        ));
        cluster.run("mizzen run /shared/py.sqsh ls /.mizzen/host/lib")
    };
    let real = cluster.run("ls /usr/lib/x86_64-linux-gnu/nvidia/current").stdout;
    let real = real.lines().find_map(|name| name.strip_prefix("libcuda.so.5")).unwrap();
    let right = say(&format!("NVRM version: NVIDIA UNIX Kernel Module  5{real}  Release Build"));
    assert!(right.stdout.contains("libcuda.so.1\n") && right.stderr.is_empty(), "{}", right.text());
    // An image may have libraries by which its newer CUDA works with this driver.
    let newer = ImageTree::empty().unwrap();
    let node = Release::Slurm22_05.rootfs().unwrap();
    for file in ["bin/dash", "lib64/ld-linux-x86-64.so.2", "lib/x86_64-linux-gnu/libc.so.6"] {
        newer.file(file, "").unwrap();
        std::fs::copy(node.join(file), newer.path(file)).unwrap();
    }
    newer.file("usr/local/cuda-12.4/compat/libcuda.so.550.54.15", "").unwrap();
    newer.link("usr/local/cuda", "cuda-12.4").unwrap();
    cluster.share("newer.sqsh", &newer.squashfs(&[]).unwrap()).unwrap();
    let first = cluster.run("mizzen run /shared/newer.sqsh dash -c 'echo $LD_LIBRARY_PATH'");
    assert_out(&first, 0, "/usr/local/cuda-12.4/compat:/.mizzen/host/lib\n");
    let note =
        format!("libcuda.so.5{real} is left out: its version is 5{real}, and the kernel's driver has 999.1");
    let wrong = say("999.1");
    assert_failed(&wrong, 2, &note);
}

fn bad_rules_are_refused(cluster: &Cluster) {
    let run = |change: &str| {
        cluster.run_as_root(change);
        cluster.run("mizzen run /shared/bb.sqsh true")
    };
    let site = "/etc/mizzen/host.d/site.toml";
    let bad = run(&format!("echo 'switch = \"gpu\"\nwhere = []' > {site}"));
    assert_failed(&bad, 125, &format!("{site}:2: unknown field `where`"));
    let rule = "printf 'switch = \"gpu\"\\nwhen = [\"/x\"]\\n'";
    assert_failed(
        &run(&format!("{rule} > {site}; chmod 666 {site}")),
        125,
        &format!("{site} is writable by others"),
    );
    assert_out(&run(&format!("chmod 644 {site}")), 0, "");
    // Of hardware that the node lacks no more is read than that it lacks it; but the administrator is told.
    assert_out(&run(&format!("echo '[[set]]' >> {site}")), 0, "");
    assert_failed(&cluster.run("mizzen check-config"), 1, &format!("{site}:3: missing field `name`"));
}
