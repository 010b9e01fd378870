//! The node's MPI and its libraries for RDMA adapters, in containers: real MPICH, real rdma-core.

use mizzen_tests::check::{assert_failed, assert_out};
use mizzen_tests::images::{c_program_with, mpi, mpi_rootfs, packed_once};
use mizzen_tests::release::{extract_packages, hpc_rootfs};
use mizzen_tests::{Cluster, Release, Spec, User, target_dir};

/// A cluster whose nodes have MPICH and rdma-core, and on them an image that has the same: /image is their own root.
fn start(name: &str, nodes: u32, devices: &[(&str, u64, u64)]) -> Cluster {
    let rootfs = Some(hpc_rootfs().unwrap());
    let devices = devices.iter().map(|(name, major, minor)| ((*name).to_owned(), *major, *minor)).collect();
    let cluster = Cluster::start(Spec { nodes, rootfs, devices, ..Cluster::spec(name) }).unwrap();
    let machines = (1..=nodes).map(|number| format!("node{number}")).chain(["ctl".to_owned()]);
    for machine in machines {
        assert_out(&cluster.run_on(&machine, User::Root, "mkdir /image && mount --bind / /image"), 0, "");
    }
    cluster
}

#[test]
fn the_nodes_mpi_takes_the_place_of_an_image_s_of_its_family() {
    let cluster = start("host-mpi", 1, &[]);
    cluster.share("sum.py", include_bytes!("mpi/mpich_sum.py")).unwrap();
    assert_out(&cluster.run("cp /shared/sum.py ."), 0, "");
    // On one node: between nodes Debian's MPICH 4.0.2 sometimes never returns from MPI_Finalize, with or without containers.
    let srun = |options: &str, image: &str, program: &str| {
        cluster.run(&format!(
            "set -o pipefail; srun --quiet -n4 --mpi=pmi2 {options} --container={image} {program} | sort"
        ))
    };
    let expected = |library: &str| -> String {
        (0..4).map(|rank| format!("{rank} of 4: 10 with {library}/libmpich.so.12.2.2\n")).collect()
    };
    let own = srun("", "/image", "python3 sum.py libmpich.so.12");
    assert_out(&own, 0, &expected("/usr/lib/x86_64-linux-gnu"));
    let nodes = srun("--container-mpi=host", "/image", "python3 sum.py libmpich.so.12");
    assert_out(&nodes, 0, &expected("/.mizzen/host/lib"));
    assert_eq!(nodes.stderr, "", "{}", nodes.text());
    // The same for a program that is linked with it.
    let library = hpc_rootfs().unwrap().join("usr/lib/x86_64-linux-gnu/libmpich.so.12");
    cluster.share("linked", &c_program_with("mpich-sum", &library).unwrap()).unwrap();
    assert_out(&cluster.run("install -m 755 /shared/linked ."), 0, "");
    assert_out(&srun("", "/image", "./linked"), 0, &expected("/usr/lib/x86_64-linux-gnu"));
    assert_out(&srun("--container-mpi=host", "/image", "./linked"), 0, &expected("/.mizzen/host/lib"));
    // The other name of the same ABI, which neither side has.
    let other = srun("--container-mpi=host", "/image", "python3 sum.py libmpi.so.12");
    assert_out(&other, 0, &expected("/.mizzen/host/lib"));
    // By the site, for all; a user can have the image's again.
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", "mpi = \"host\"\n").unwrap();
    assert_out(&srun("", "/image", "python3 sum.py libmpich.so.12"), 0, &expected("/.mizzen/host/lib"));
    let own = srun("--container-mpi=image", "/image", "python3 sum.py libmpich.so.12");
    assert_out(&own, 0, &expected("/usr/lib/x86_64-linux-gnu"));

    // Another family, and an older C library.
    cluster.share("py.sqsh", &mpi().unwrap()).unwrap();
    cluster.share("old.sqsh", &packed_once(&Release::Slurm20_11.rootfs().unwrap()).unwrap()).unwrap();
    let families = "the image has Open MPI (libmpi.so.40), and the node MPICH (libmpich.so.12.2.2): what is built for one \
                    cannot use the other\n";
    let refused = cluster.run("srun --container-mpi=host --container=/shared/py.sqsh true");
    assert_failed(&refused, 125, &format!("mizzen: node1: --container-mpi: {families}"));
    let noted = cluster.run("srun --container=/shared/py.sqsh true");
    assert_out(&noted, 0, "");
    assert!(noted.stderr.contains(&format!("the image keeps its own MPI: {families}")), "{}", noted.text());
    let old = cluster.run("mizzen run --mpi=host /shared/old.sqsh true");
    assert_failed(
        &old,
        125,
        "mizzen: --mpi: the node's MPICH (/usr/lib/x86_64-linux-gnu/libmpich.so.12.2.2) does not fit the image: it needs \
         GLIBC_2.3",
    );
    let without = cluster.run("mizzen run /shared/old.sqsh sh -c 'echo \"$LD_LIBRARY_PATH\"'");
    assert_out(&without, 0, "\n");
}

/// The same for the other family, whose components must be the node's as well.
#[test]
fn the_nodes_open_mpi_serves_an_image_with_open_mpi() {
    let slurm = Release::Slurm22_05.rootfs().unwrap();
    let cluster = Cluster::start(Spec {
        nodes: 1,
        rootfs: Some(mpi_rootfs().unwrap()),
        layers: vec![target_dir().join("stage"), slurm],
        ..Cluster::spec("host-open-mpi")
    })
    .unwrap();
    assert_out(&cluster.run_on("node1", User::Root, "ldconfig"), 0, "");
    cluster.share("py.sqsh", &mpi().unwrap()).unwrap();
    let program = "from mpi4py import MPI; world = MPI.COMM_WORLD; total = world.allreduce(world.rank + 1); \
                   files = {line.split()[-1] for line in open('/proc/self/maps') if 'openmpi' in line or 'libmpi.so' in line}; \
                   print(total, *sorted({file.rsplit('/', 1)[0] for file in files}))";
    let srun = |options: &str| {
        cluster.run(&format!(
            "srun --quiet -n2 --mpi=pmix {options} --container=/shared/py.sqsh python3 -c \"{program}\""
        ))
    };
    let own = srun("");
    assert!(own.code == 0 && !own.stdout.contains("/.mizzen"), "{}", own.text());
    let nodes = srun("--container-mpi=host");
    assert_eq!(nodes.stderr, "", "{}", nodes.text());
    assert_out(&nodes, 0, &"3 /.mizzen/host/lib /.mizzen/host/lib/openmpi\n".repeat(2));
}

/// A made-up adapter, which libibverbs looks at through SYSFS_PATH and gives to the provider that knows its number.
const ADAPTER: &str = "verbs=/tmp/sys/class/infiniband_verbs; mkdir -p $verbs/uverbs0/device; echo 6 > $verbs/abi_version; \
                       cd $verbs/uverbs0; echo 1 > abi_version; echo mlx5_0 > ibdev; echo 231:192 > dev; \
                       echo pci:v000015B3d00001017sv000015B3sd00000008bc02sc07i00 > device/modalias; \
                       adapter=/tmp/sys/class/infiniband/mlx5_0; mkdir -p $adapter; \
                       echo 0c42:a103:0065:d1aa > $adapter/node_guid; echo '1: CA' > $adapter/node_type; \
                       ln -s $verbs/uverbs0/device $adapter/device";

#[test]
fn the_nodes_rdma_libraries_serve_an_image_without_providers() {
    let cluster = start("fabric", 1, &[("infiniband/uverbs0", 1, 5)]);
    let bare = "for place in usr/lib/x86_64-linux-gnu/libibverbs etc/libibverbs.d; do mount -t tmpfs none /image/$place; done";
    assert_out(&cluster.run_as_root(bare), 0, "");
    assert_out(&cluster.run(ADAPTER), 0, "");
    let devices = |before: &str, options: &str, image: &str| {
        cluster.run(&format!("{before} SYSFS_PATH=/tmp/sys mizzen run {options} {image} ibv_devices"))
    };
    let listed = "mlx5_0          \t0c42a1030065d1aa";
    let own = cluster.run("SYSFS_PATH=/tmp/sys ibv_devices");
    assert!(own.stdout.contains(listed), "on the node itself: {}", own.text());
    let inside = devices("", "", "/image");
    assert_eq!(inside.code, 0, "{}", inside.text());
    assert!(inside.stdout.contains(listed), "{}", inside.text());
    // The image's own, which does not know the adapter.
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", "fabric = \"image\"\n").unwrap();
    let without = devices("IBV_SHOW_WARNINGS=1", "", "/image");
    assert!(!without.stdout.contains(listed), "{}", without.text());
    assert!(without.stderr.contains("no userspace device-specific driver found"), "{}", without.text());
    // An image with its own is left alone, unless the site wants otherwise.
    cluster.share("py.sqsh", &mpi().unwrap()).unwrap();
    let path = |image: &str| cluster.run(&format!("mizzen run {image} sh -c 'echo $LD_LIBRARY_PATH'")).stdout;
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", "").unwrap();
    assert_eq!(path("/shared/py.sqsh"), "\n");
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", "fabric = \"host\"\n").unwrap();
    assert_eq!(path("/shared/py.sqsh"), "/.mizzen/host/lib\n");
    // An image whose C library is older: all of the set is left out, and the image's programs go on.
    cluster.share("old.sqsh", &packed_once(&Release::Slurm20_11.rootfs().unwrap()).unwrap()).unwrap();
    let old = cluster.run("mizzen run /shared/old.sqsh sh -c 'echo $LD_LIBRARY_PATH'");
    assert_out(&old, 0, "\n");
    assert!(
        old.stderr.contains("note: the node's libibverbs.so.1.14.44.0 is left out: it needs GLIBC_2.3"),
        "{}",
        old.text()
    );
    // Nobody is told who has shown no interest in the fabric.
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", "").unwrap();
    let uninterested = cluster.run("ulimit -l 64; mizzen run /shared/old.sqsh true");
    assert_eq!((uninterested.code, uninterested.stderr.as_str()), (0, ""));
    // Too little memory to lock.
    let little = cluster.run("ulimit -l 64; mizzen run /image true");
    assert!(
        little.stderr.contains("programs may lock 64 KiB of memory only (ulimit -l)"),
        "{}",
        little.text()
    );
}

/// rdma-core of Debian 11 and of Debian 12 know each other by nothing but private versions: 33 and 34.
#[test]
fn libraries_that_know_each_other_by_private_versions_are_not_mixed() {
    let cluster = start("private-abi", 1, &[("infiniband/uverbs0", 1, 5)]);
    let old = extract_packages("bullseye", "verbs", "libibverbs1,ibverbs-providers").unwrap();
    let old = std::fs::read(old.join("usr/lib/x86_64-linux-gnu/libibverbs.so.1")).unwrap();
    cluster.share("libibverbs", &old).unwrap();
    // The image's C library is the node's, its libibverbs an older one, its providers fit that no more than the node's.
    let mixed = "mount --bind /shared/libibverbs $(realpath /image/usr/lib/x86_64-linux-gnu/libibverbs.so.1)";
    assert_out(&cluster.run_as_root(mixed), 0, "");
    assert_out(&cluster.run(ADAPTER), 0, "");
    // A site whose rule forgets that they belong together.
    let rule = "switch = \"fabric\"\nwhen = [\"/dev/infiniband\"]\n[[set]]\nname = \"mlx5\"\nlibraries = [\"libmlx5.so.1\"]\n";
    cluster.write_everywhere("/etc/mizzen/host.d/infiniband.toml", rule).unwrap();
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", "fabric = \"host\"\n").unwrap();
    let noted = cluster.run("mizzen run /image sh -c 'echo $LD_LIBRARY_PATH'");
    assert_out(&noted, 0, "\n");
    let why = "the node's libmlx5.so.1.24.44.0 is left out: it needs IBVERBS_PRIVATE_34, and the image's libibverbs.so.1 has \
               up to IBVERBS_PRIVATE_33";
    assert!(noted.stderr.contains(why), "{}", noted.text());
    // What would have become of it.
    let load = "python3 -c 'import ctypes; ctypes.CDLL(\"libmlx5.so.1\")'";
    let loaded = cluster.run(&format!("mizzen run /image {load}"));
    assert!(
        loaded.code == 1 && loaded.stderr.contains("version `IBVERBS_PRIVATE_34' not found"),
        "{}",
        loaded.text()
    );
    // The rule that mizzen comes with gives all that belong together.
    let rule = include_str!("../../conf/host.d/infiniband.toml");
    cluster.write_everywhere("/etc/mizzen/host.d/infiniband.toml", rule).unwrap();
    assert_out(&cluster.run(&format!("mizzen run /image {load}")), 0, "");
    let devices = cluster.run("SYSFS_PATH=/tmp/sys mizzen run /image ibv_devices");
    assert!(devices.code == 0 && devices.stdout.contains("0c42a1030065d1aa"), "{}", devices.text());
}
