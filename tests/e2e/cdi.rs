//! Devices by CDI specifications: what they change in a container, and what is said of wrong ones.

use mizzen_tests::check::{assert_failed, assert_out, with_busybox};
use mizzen_tests::images::{ImageTree, mpi};
use mizzen_tests::{Cluster, User};

/// A device with every kind of edit, as a vendor's tool would write it.
const VENDOR: &str = r#"---
cdiVersion: 0.6.0
kind: vendor.com/card
containerEdits:
  env:
  - CARD_DRIVER=7
  mounts:
  - hostPath: /etc/vendor.conf
    containerPath: /opt/vendor/etc/vendor.conf
    options: [ro, nosuid, nodev, rbind, rprivate]
  - hostPath: /etc/vendor.conf
    containerPath: /etc/os-release
    options: [ro, nosuid, nodev, bind]
  - hostPath: /usr/lib/x86_64-linux-gnu/libmnl.so.0.2.0
    containerPath: /opt/vendor/lib/libmnl.so.0.2.0
    options: [ro, nosuid, nodev, bind]
  hooks:
  - hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
    args: [nvidia-cdi-hook, update-ldcache, --folder, /opt/vendor/lib]
devices:
- name: "0"
  containerEdits:
    deviceNodes:
    - path: /dev/card/card0
      hostPath: /dev/zero
    hooks:
    - hookName: createContainer
      path: /usr/bin/nvidia-cdi-hook
      args: [nvidia-cdi-hook, create-symlinks,
        --link, "libmnl.so.0::/opt/vendor/lib/libmnl.so", --link, "/opt/vendor/etc::/bin/uudecode",
        --link, "../card0::/dev/card/by-path/pci-0"]
- name: "1"
  containerEdits:
    env:
    - CARD_NAME=one
    deviceNodes:
    - path: /dev/card/card1
      hostPath: /dev/full
"#;

fn start(name: &str) -> Cluster {
    let cluster = with_busybox(name);
    for machine in ["ctl", "node1"] {
        let made = cluster.run_on(machine, User::Root, "mkdir -p /etc/cdi && echo vendor > /etc/vendor.conf");
        assert_out(&made, 0, "");
    }
    cluster.write_everywhere("/etc/cdi/vendor.yaml", VENDOR).unwrap();
    cluster
}

#[test]
fn a_device_brings_what_its_specification_says() {
    let cluster = start("cdi");
    // With an overlay, without one, and on a directory that the user could write.
    let look = "sh -c 'cat /opt/vendor/etc/vendor.conf /etc/os-release; for link in /opt/vendor/lib/libmnl.so \
                /bin/uudecode /dev/card/by-path/pci-0; do readlink $link; done; head -c 2 /dev/card/by-path/pci-0 | od -An -tx1; ls /dev/card; \
                echo $CARD_DRIVER $CARD_NAME'";
    let inside = "vendor\nvendor\nlibmnl.so.0\n/opt/vendor/etc\n../card0\n 00 00\nby-path\ncard0\n7\n";
    let run = |wrapper: &str, image: &str| {
        cluster.run(&format!("{wrapper} mizzen run --device=vendor.com/card=0 /shared/{image} {look}"))
    };
    assert_out(&run("", "bb.sqsh"), 0, inside);
    let overlays = "strace -e trace=mount -o calls mizzen run --device=vendor.com/card=0 /shared/bb.sqsh true; \
                    grep '^mount(' calls | grep -n 'overlay' | cut -d: -f1";
    let nth = cluster.run(overlays).stdout.trim().to_owned();
    assert_out(
        &run(&format!("strace -o /dev/null -e inject=mount:error=ENODEV:when={nth}"), "bb.sqsh"),
        0,
        inside,
    );
    assert_out(
        &cluster.run("mizzen run /shared/bb.sqsh tar -C / -cf - bin etc | (mkdir tree; tar -C tree -xf -)"),
        0,
        "",
    );
    assert_out(&cluster.run("mv tree /tmp/tree; cd /tmp; ln -s /tmp/tree /tmp/link"), 0, "");
    let before = cluster.run("cd /tmp/tree; find . -ls");
    let tree = cluster.run(&format!("mizzen run --device=vendor.com/card=0 /tmp/link {look}"));
    assert_out(&tree, 0, inside);
    assert_out(&cluster.run("cd /tmp/tree; find . -ls"), 0, &before.stdout);
    // The second device alone, both, and both through Slurm for every task.
    let names = "sh -c 'echo $(ls /dev/card) $CARD_DRIVER $CARD_NAME'";
    let one = cluster.run(&format!("mizzen run --device=vendor.com/card=1 /shared/bb.sqsh {names}"));
    assert_out(&one, 0, "card1 7 one\n");
    let both = "--container-device=vendor.com/card=0,vendor.com/card=1";
    let step = cluster.run(&format!("srun -n2 --container=/shared/bb.sqsh {both} {names}"));
    assert_out(&step, 0, &"by-path card0 card1 7 one\n".repeat(2));
    let site = "devices = [\"vendor.com/card=1\", \"elsewhere.com/card=0\"]\n";
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", site).unwrap();
    assert_out(&cluster.run(&format!("srun --container=/shared/bb.sqsh {names}")), 0, "card1 7 one\n");
    // Who asks for no device, does not wait for specifications to be read.
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", "").unwrap();
    let opened =
        "strace -o calls mizzen run --gpu=none /shared/bb.sqsh true; grep ^open calls | grep -c /cdi";
    assert_out(&cluster.run(opened), 1, "0\n");
    // What the user sets wins.
    let mine = cluster.run(
        "mizzen run --device=vendor.com/card=1 --env CARD_NAME=mine /shared/bb.sqsh sh -c 'echo $CARD_NAME'",
    );
    assert_out(&mine, 0, "mine\n");
}

#[test]
fn libraries_of_a_specification_are_found_as_after_ldconfig() {
    let cluster = start("cdi-libraries");
    cluster.share("py.sqsh", &mpi().unwrap()).unwrap();
    let load = |options: &str| {
        let program = "import ctypes, os; ctypes.CDLL('libmnl.so.0'); print(open('/proc/self/maps').read().count('libmnl'), \
                       os.environ['LD_LIBRARY_PATH'])";
        cluster.run(&format!("mizzen run {options} /shared/py.sqsh python3 -c \"{program}\""))
    };
    assert_failed(&load(""), 1, "OSError: libmnl.so.0: cannot open shared object file");
    let loaded = load("--device=vendor.com/card=0 --env LD_LIBRARY_PATH=/opt/other");
    assert_eq!(loaded.code, 0, "{}", loaded.text());
    assert!(loaded.stdout.ends_with(" /.mizzen/host/lib:/opt/other\n"), "{}", loaded.text());
    assert_eq!(loaded.stderr, "");
    let plan = cluster.run("mizzen plan --device=vendor.com/card=0 /shared/py.sqsh true").stdout;
    for line in ["CDI: /etc/cdi/vendor.yaml", "/opt/vendor/lib/libmnl.so to libmnl.so.0", "vendor.com/card=0"]
    {
        assert!(plan.contains(line), "{line}\n{plan}");
    }
    let musl = cluster.run("mizzen run --device=vendor.com/card=0 /shared/bb.sqsh true").stderr;
    assert_eq!(
        musl,
        "mizzen: note: the image has no C library of its own: the node's CDI libraries need glibc, and are left out\n"
    );
}

#[test]
fn wrong_specifications_and_names_are_told() {
    let cluster = start("cdi-wrong");
    let run = |device: &str| cluster.run(&format!("mizzen run --device={device} /shared/bb.sqsh true"));
    assert_failed(&run("card0"), 125, "mizzen: --device: \"card0\" is not the name of a device\n");
    assert_failed(
        &run("vendor.com/card=2"),
        125,
        "mizzen: --device: vendor.com/card=2: this node has no such device\nmizzen: hint: of vendor.com/card it has 0, 1\n",
    );
    assert_failed(
        &run("other.com/card=0"),
        125,
        "mizzen: --device: other.com/card=0: this node has no CDI specification for other.com/card\n",
    );
    // At submission already, as far as it can be known there.
    let bad = cluster.run("srun --container=/shared/bb.sqsh --container-device=card0 true");
    assert_failed(
        &bad,
        1,
        "srun: error: mizzen: --container-device: \"card0\" is not the name of a device\n",
    );
    let missing = cluster.run("srun --container=/shared/bb.sqsh --container-device=vendor.com/card=2 true");
    assert_failed(
        &missing,
        125,
        "mizzen: node1: --container-device: vendor.com/card=2: this node has no such device\n",
    );
    // Files that others than root can write are not believed.
    let distrusted = |change: &str, message: &str| {
        let make = format!("sed s/vendor.com/x.com/ /etc/cdi/vendor.yaml > /etc/cdi/x.yaml; {change}");
        assert_out(&cluster.run_as_root(&make), 0, "");
        let message = format!("x.com/card=0 is in no valid CDI specification of this node: {message}");
        assert_failed(&run("x.com/card=0"), 125, &message);
        assert_out(&run("vendor.com/card=0"), 0, "");
        assert_out(&cluster.run_as_root("rm /etc/cdi/x.yaml"), 0, "");
    };
    distrusted("chown alice /etc/cdi/x.yaml", "/etc/cdi/x.yaml belongs to uid 2001, not to root");
    distrusted("chmod 666 /etc/cdi/x.yaml", "/etc/cdi/x.yaml is writable by others than root (mode 0666)");
    distrusted(
        "mv /etc/cdi/x.yaml /var/tmp; ln -s /var/tmp/x.yaml /etc/cdi/x.yaml",
        "/etc/cdi/x.yaml: is a symbolic link",
    );
    // An image cannot lead the mounts and links of a specification to the host's files; its own root is its own.
    for (target, code) in [("/tmp", 125), ("/proc/self/root/tmp", 125), ("/", 0)] {
        let tree = ImageTree::busybox().unwrap();
        tree.link("opt", target).unwrap();
        cluster.share("hostile.sqsh", &tree.squashfs(&[]).unwrap()).unwrap();
        let hostile = cluster.run(
            "mizzen run --device=vendor.com/card=0 /shared/hostile.sqsh true; echo $?; ls -d /vendor /tmp/vendor",
        );
        assert_eq!(hostile.stdout, format!("{code}\n"), "/opt -> {target}: {}", hostile.text());
        let refused = "mizzen: /shared/hostile.sqsh: CDI: /etc/cdi/vendor.yaml: ";
        assert_eq!(hostile.stderr.contains(refused), code == 125, "/opt -> {target}: {}", hostile.text());
    }
    // One in /var/run/cdi has priority; two in one directory conflict.
    let copy = "mkdir -p /var/run/cdi; sed s/CARD_DRIVER=7/CARD_DRIVER=8/ /etc/cdi/vendor.yaml > /var/run/cdi/a.yaml";
    assert_out(&cluster.run_as_root(copy), 0, "");
    let driver = "mizzen run --device=vendor.com/card=1 /shared/bb.sqsh sh -c 'echo $CARD_DRIVER'";
    assert_out(&cluster.run(driver), 0, "8\n");
    assert_out(&cluster.run_as_root("mv /var/run/cdi/a.yaml /etc/cdi/a.yaml"), 0, "");
    assert_failed(
        &cluster.run(driver),
        125,
        "vendor.com/card=1: /etc/cdi/a.yaml and /etc/cdi/vendor.yaml both describe it\n",
    );
    let doctor = cluster.run("mizzen doctor --gpu");
    assert!(doctor.stdout.contains("CDI: vendor.com/card 0 1\n"), "{}", doctor.text());
}
