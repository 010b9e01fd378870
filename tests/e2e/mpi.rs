//! MPI across nodes in containers: the image's MPI library and the node's Slurm find each other, and ranks on one
//! node share what they share without a container.

use mizzen_tests::check::assert_out;
use mizzen_tests::images::{ImageTree, mpi, packed_once};
use mizzen_tests::{Cluster, Output, Release, Spec};

/// What the launcher says of an image whose MPI cannot talk to the node's PMIx: both sides and their versions.
const OLD_CLIENT: &str = "mizzen: note: node1: the image's Open MPI has PMIx 1.1.2 \
                          (/usr/lib/openmpi/mca_pmix_pmix112.so), which cannot talk to Slurm's PMIx ";
/// The same of an MPI that does not know PMIx at all.
const OTHER_CLIENT: &str = "mizzen: note: node1: the image's MPICH (/usr/lib/libmpich.so.12) speaks PMI, and not PMIx as \
                            Slurm does here; use --mpi=pmi2";

#[test]
fn slurm_20_11() {
    everything(Release::Slurm20_11);
}

#[test]
fn slurm_22_05() {
    everything(Release::Slurm22_05);
}

#[test]
fn slurm_24_11() {
    everything(Release::Slurm24_11);
}

#[test]
fn slurm_26_05() {
    everything(Release::Slurm26_05);
}

/// A two-node cluster with the image /shared/py.sqsh and the programs in Alice's home.
fn start(name: &str, release: Release) -> Cluster {
    let cluster =
        Cluster::start(Spec { release, ..Cluster::spec(&format!("{name}-{}", release.version())) }).unwrap();
    cluster.share("py.sqsh", &mpi().unwrap()).unwrap();
    for (file, text) in [
        ("allreduce.py", include_str!("mpi/allreduce.py")),
        ("neighbours.py", include_str!("mpi/neighbours.py")),
        ("pmi2.py", include_str!("mpi/pmi2.py")),
        ("pmix_init.py", include_str!("mpi/pmix_init.py")),
    ] {
        cluster.share(file, text.as_bytes()).unwrap();
    }
    assert_out(&cluster.run("cp /shared/*.py ."), 0, "");
    cluster
}

/// Four ranks on two nodes in a container; lines of stdout are sorted. Quiet: waiting in the queue is no message.
fn srun(cluster: &Cluster, options: &str, image: &str, program: &str) -> Output {
    cluster.run(&format!(
        "set -o pipefail; srun --quiet -N2 -n4 --ntasks-per-node=2 {options} --container=/shared/{image} {program} \
         | sort"
    ))
}

/// What a program says now and then of the PMIx 4.0.0rc3 that Debian has for Slurm 20.11, and goes on. Without a container as
/// well: in 4 of 96 steps, and in 2 of 96 with one, by turns.
const RACE_OF_PMIX: &str =
    "PMIX ERROR: UNPACK-PAST-END in file ../../../../../../src/mca/gds/hash/gds_hash.c at line 1519";

/// Exactly this, and not a word on stderr: no warning of the MPI library, no note of ours.
#[track_caller]
fn assert_silent(output: &Output, stdout: &str) {
    assert_out(output, 0, stdout);
    let said: Vec<&str> = output.stderr.lines().filter(|line| !line.ends_with(RACE_OF_PMIX)).collect();
    assert!(said.is_empty(), "{}", output.text());
}

fn everything(release: Release) {
    let cluster = start("mpi", release);
    if release.has_pmix() {
        ranks_compute_together(&cluster);
        ranks_read_their_neighbours(&cluster);
        the_session_directory_may_be_elsewhere(&cluster);
    }
    pmi2_keeps_its_descriptor(&cluster);
    without_mpi_nothing_is_added(&cluster);
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
}

fn ranks_compute_together(cluster: &Cluster) {
    let sums = "0 of 4 on node1: 10\n1 of 4 on node1: 10\n2 of 4 on node2: 10\n3 of 4 on node2: 10\n";
    let program = "python3 allreduce.py";
    assert_silent(&srun(cluster, "--mpi=pmix", "py.sqsh", program), sums);
    // Two steps of one job at the same time on the same nodes.
    let two_steps = format!(
        "set -o pipefail; salloc --quiet -N2 -n8 --ntasks-per-node=4 bash -c 'for step in 1 2; do \
         srun --quiet --kill-on-bad-exit=1 -N2 -n4 --ntasks-per-node=2 --exact --mpi=pmix --container=/shared/py.sqsh {program} & \
         done; wait' | sort"
    );
    let mut steps = cluster.run(&two_steps);
    // The same race of PMIx 4.0.0rc3 may end a rank by a signal.
    for _ in 0..2 {
        if cluster.release() == Release::Slurm20_11 && steps.stdout.lines().count() != 8 {
            steps = cluster.run(&two_steps);
        }
    }
    assert_silent(&steps, &sums.lines().map(|line| format!("{line}\n{line}\n")).collect::<String>());
}

fn ranks_read_their_neighbours(cluster: &Cluster) {
    let mut expected = String::new();
    for (reader, others) in [(0, [0, 1]), (1, [0, 1]), (2, [2, 3]), (3, [2, 3])] {
        for other in others {
            expected.push_str(&format!("{reader} reads {other}: rank {other}\n"));
        }
    }
    assert_silent(&srun(cluster, "--mpi=pmix", "py.sqsh", "python3 neighbours.py"), &expected);
    let namespaces =
        srun(cluster, "--mpi=pmix", "py.sqsh", "sh -c 'echo $(hostname) $(readlink /proc/self/ns/user)'");
    let mut lines: Vec<&str> = namespaces.stdout.lines().collect();
    assert_eq!(lines.len(), 4, "{}", namespaces.text());
    lines.dedup();
    assert_eq!(lines.len(), 2, "one user namespace per node: {}", namespaces.text());
}

/// Slurm makes Open MPI's session directory where SLURM_PMIX_TMPDIR or TmpFS says, which need not be in the image.
fn the_session_directory_may_be_elsewhere(cluster: &Cluster) {
    let elsewhere = cluster.run(
        "set -o pipefail; SLURM_PMIX_TMPDIR=/local srun --quiet -N2 -n2 --mpi=pmix --container=/shared/py.sqsh \
         python3 allreduce.py | sort",
    );
    assert_silent(&elsewhere, "0 of 2 on node1: 3\n1 of 2 on node2: 3\n");
}

fn pmi2_keeps_its_descriptor(cluster: &Cluster) {
    let expected: String = (0..4).map(|rank| format!("{rank} of 4: 0 10 20 30\n")).collect();
    assert_silent(&srun(cluster, "--mpi=pmi2", "py.sqsh", "python3 pmi2.py"), &expected);
}

fn without_mpi_nothing_is_added(cluster: &Cluster) {
    let program = "python3 -c 'import os, numpy; print(numpy.arange(5).sum(), \
                   [name for name in os.environ if name.startswith(\"PMI\")])'";
    assert_silent(&srun(cluster, "--mpi=none", "py.sqsh", program), &"10 []\n".repeat(4));
}

/// A library that lacks a component of the node's says so for every rank, unless it is not asked for it: PMIx 4.0
/// has neither the `munge` nor the `shmem2` that Slurm 24.11's PMIx 5.0 names first. Open MPI sets the variable here.
#[test]
fn an_older_pmix_stays_silent() {
    let cluster = start("mpi-older", Release::Slurm24_11);
    cluster.share("old.sqsh", &packed_once(&Release::Slurm20_11.rootfs().unwrap()).unwrap()).unwrap();
    let image = "--mpi=pmix --container=/shared/old.sqsh";
    let talk = cluster.run(&format!(
        "export PMIX_MCA_mca_base_component_show_load_errors=1; set -o pipefail; \
         srun --quiet -N2 -n4 --ntasks-per-node=2 {image} python3 pmix_init.py | sort"
    ));
    assert_silent(&talk, "0\n1\n2\n3\n");
    // What the user says about it holds.
    let own = cluster.run(&format!("PMIX_MCA_psec=munge srun --quiet {image} printenv PMIX_MCA_psec"));
    assert_silent(&own, "munge\n");
}

/// Ranks that do not find each other run as so many programs of one rank, or end in a riddle. The note comes before;
/// it is not an error, because the program need not use the MPI that it is named for.
#[test]
fn an_mpi_that_cannot_talk_to_slurm_is_named() {
    let cluster = start("mpi-mismatch", Release::Slurm22_05);
    let version = cluster.run("srun --quiet --mpi=pmix printenv PMIX_VERSION").stdout;
    assert!(version.starts_with("4.2.2"), "{version}");
    for (library, note) in [
        ("usr/lib/openmpi/mca_pmix_pmix112.so", format!("{OLD_CLIENT}{}", version.trim())),
        ("usr/lib/libmpich.so.12", OTHER_CLIENT.to_owned()),
    ] {
        let tree = ImageTree::busybox().unwrap();
        tree.file(library, "").unwrap();
        cluster.share("odd.sqsh", &tree.squashfs(&["-comp", "zstd"]).unwrap()).unwrap();
        let run = |mpi: &str| {
            cluster.run(&format!(
                "srun --quiet -n2 -N1 -w node1 --mpi={mpi} --container=/shared/odd.sqsh echo ran"
            ))
        };
        let mismatch = run("pmix");
        assert_out(&mismatch, 0, "ran\nran\n");
        assert_eq!(mismatch.stderr.matches(&note).count(), 1, "expected once: {note}\n{}", mismatch.text());
        assert_silent(&run("none"), "ran\nran\n");
    }
}

/// Slurm's PMIx server believes a client that is root inside only if munge says who it is. Debian 11's PMIx has no such
/// component, on either side: each rank would print a page and fail. Told before, once on each node, where it matters.
/// (Slurm 22.05 and 24.11 may hang for good when they end a step whose ranks were refused, so the nodes are not looked at.)
#[test]
fn a_root_that_the_server_would_refuse_is_told() {
    let client = "takes ranks that are root inside by munge alone (munge,native), and the image's PMIx \
                  (/usr/lib/x86_64-linux-gnu/libpmix.so.2) has no munge component: MPI programs will fail; run them \
                  without --container-remap-root, or with an image whose PMIx has it\n";
    let server = "knows ranks by their user id alone (native), not by munge, and inside you are root: MPI programs will \
                  fail; run them without --container-remap-root\n";
    for (release, what) in [(Release::Slurm24_11, client), (Release::Slurm20_11, server)] {
        let cluster = start("mpi-root", release);
        cluster.share("old.sqsh", &packed_once(&Release::Slurm20_11.rootfs().unwrap()).unwrap()).unwrap();
        let version = cluster.run("srun --quiet --mpi=pmix printenv PMIX_VERSION").stdout;
        let root = srun(&cluster, "--mpi=pmix --container-remap-root", "old.sqsh", "python3 pmix_init.py");
        assert_ne!(root.code, 0, "{}", root.text());
        let note = format!("mizzen: note: node1: Slurm's PMIx {} {what}", version.trim());
        assert_eq!(root.stderr.matches(&note).count(), 1, "{note}\n{}", root.text());
        assert!(!root.stderr.contains("note: node2: "), "{}", root.text());
        let user = srun(&cluster, "--mpi=pmix", "old.sqsh", "python3 pmix_init.py");
        assert_silent(&user, "0\n1\n2\n3\n");
        let alone = srun(&cluster, "--mpi=none --container-remap-root", "old.sqsh", "id -u");
        assert_silent(&alone, &"0\n".repeat(4));
        if release == Release::Slurm24_11 {
            let root = "--mpi=pmix --container-remap-root";
            let sums = "0 of 4 on node1: 10\n1 of 4 on node1: 10\n2 of 4 on node2: 10\n3 of 4 on node2: 10\n";
            assert_silent(&srun(&cluster, root, "py.sqsh", "python3 allreduce.py"), sums);
        }
    }
}
