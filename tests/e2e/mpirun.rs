//! `mpirun` and `mpiexec` of the node, with `mizzen run` below them: the ranks of a launch share one container on each node,
//! whoever of them comes late or ends first, and nothing is left of it.

use mizzen_tests::check::{
    Emptiness, assert_failed, assert_out, assert_told, count, start_with_busybox, with_busybox,
};
use mizzen_tests::images::{ImageTree, mpi, packed_once};
use mizzen_tests::release::{mpirun_rootfs, trixie_mpi_rootfs};
use mizzen_tests::{Cluster, Output, Release, Spec, User};

const TWO_RELEASES: [Release; 2] = [Release::Slurm22_05, Release::Slurm24_11];

/// A cluster whose machines have both MPIs, with the image /shared/bb.sqsh and the programs in Alice's home.
fn start(name: &str, nodes: u32) -> Cluster {
    start_release(Release::Slurm22_05, name, nodes)
}

fn start_release(release: Release, name: &str, nodes: u32) -> Cluster {
    let rootfs = Some(mpirun_rootfs(release).unwrap());
    let cluster = start_with_busybox(Spec { release, nodes, rootfs, ..Cluster::spec(name) });
    for (file, text) in [
        ("allreduce.py", include_str!("mpi/allreduce.py")),
        ("neighbours.py", include_str!("mpi/neighbours.py")),
        ("sum.py", include_str!("mpi/mpich_sum.py")),
    ] {
        cluster.share(file, text.as_bytes()).unwrap();
    }
    assert_out(&cluster.run("cp /shared/*.py ."), 0, "");
    cluster
}

/// Starts a program once for every rank, as a process manager on the node does it.
const RANKS: &str = "ranks() { n=$1; shift; pids=; for i in $(seq 0 $((n-1))); do OMPI_COMM_WORLD_RANK=$i OMPI_COMM_WORLD_LOCAL_RANK=$i \
                     OMPI_COMM_WORLD_LOCAL_SIZE=$n OMPI_MCA_ess_base_jobid=7 \"$@\" & pids=\"$pids $!\"; done; \
                     code=0; for pid in $pids; do wait $pid || code=$?; done; return $code; };";

/// Runs that as Alice on node1.
fn ranks(cluster: &Cluster, script: &str) -> Output {
    cluster.run_on("node1", User::Alice, &format!("rm -f ~/there; {RANKS} {script}"))
}

/// Tells in which container a program is.
const WHERE: &str = "readlink /proc/self/ns/mnt";

/// Tells that and stays until so many ranks are there: who comes late, on a busy machine, finds the others inside.
const HELD: &str =
    "readlink /proc/self/ns/mnt; echo >> ~/there; until [ $(wc -l < ~/there) -ge $1 ]; do sleep 0.05; done";

/// A machine with the image /shared/bb.sqsh, and that as a script in Alice's home.
fn with_held_ranks(name: &str) -> Cluster {
    let cluster = with_busybox(name);
    cluster.share("held", HELD.as_bytes()).unwrap();
    assert_out(&cluster.run("cp /shared/held ."), 0, "");
    cluster
}

/// Exactly this, and not a word on stderr.
#[track_caller]
fn assert_silent(output: &Output, stdout: &str) {
    assert_out(output, 0, stdout);
    assert_eq!(output.stderr, "", "{}", output.text());
}

/// How many different lines a program has printed.
#[track_caller]
fn different(output: &Output, lines: usize) -> usize {
    assert_eq!((output.code, output.stdout.lines().count()), (0, lines), "{}", output.text());
    output.stdout.lines().collect::<std::collections::BTreeSet<_>>().len()
}

/// "`mpirun -np 4 singularity exec centos_ompi.img /usr/bin/mpi_ring`", with Open MPI 4 on the nodes and in the image.
#[test]
fn ranks_on_two_nodes_compute_together() {
    let cluster = start("mpirun", 2);
    cluster.share("py.sqsh", &mpi().unwrap()).unwrap();
    compute_together(&cluster, "--mca orte_tmpdir_base /local");
}

/// Open MPI 5, whose daemons are other ones.
#[test]
fn ranks_of_a_newer_release_compute_together() {
    let cluster = start_release(Release::Slurm24_11, "mpirun-24.11", 2);
    cluster.share("py.sqsh", &packed_once(&trixie_mpi_rootfs().unwrap()).unwrap()).unwrap();
    compute_together(&cluster, "--prtemca prte_tmpdir_base /local");
}

/// The oldest release and the newest one, each with the Open MPI of its Debian and an image of the next one or the one before.
#[test]
fn ranks_compute_together_on_the_oldest_and_the_newest_release() {
    let images = [mpi().unwrap(), packed_once(&trixie_mpi_rootfs().unwrap()).unwrap()];
    for (release, image) in [Release::Slurm20_11, Release::Slurm26_05].into_iter().zip(images) {
        let cluster = start_release(release, &format!("mpirun-{}", release.version()), 2);
        cluster.share("py.sqsh", &image).unwrap();
        let empty = Emptiness::of(&cluster, &["node1", "node2"]);
        let run = cluster.run(
            "set -o pipefail; salloc --quiet -N2 -n4 --ntasks-per-node=2 mpirun.openmpi mizzen run /shared/py.sqsh python3 allreduce.py | sort",
        );
        assert_silent(
            &run,
            "0 of 4 on node1: 10\n1 of 4 on node1: 10\n2 of 4 on node2: 10\n3 of 4 on node2: 10\n",
        );
        empty.assert_again(&cluster, release.version());
    }
}

/// `elsewhere` is what tells mpirun to have its session directory in /local, which no image has.
fn compute_together(cluster: &Cluster, elsewhere: &str) {
    let empty = Emptiness::of(cluster, &["node1", "node2"]);
    let job = "salloc --quiet -N2 -n4 --ntasks-per-node=2";
    let mpirun = |program: &str| {
        cluster.run(&format!(
            "set -o pipefail; {job} mpirun.openmpi mizzen run /shared/py.sqsh {program} | sort"
        ))
    };
    let sums = "0 of 4 on node1: 10\n1 of 4 on node1: 10\n2 of 4 on node2: 10\n3 of 4 on node2: 10\n";
    assert_silent(&mpirun("python3 allreduce.py"), sums);
    let mut expected = String::new();
    for (reader, others) in [(0, [0, 1]), (1, [0, 1]), (2, [2, 3]), (3, [2, 3])] {
        for other in others {
            expected.push_str(&format!("{reader} reads {other}: rank {other}\n"));
        }
    }
    assert_silent(&mpirun("python3 neighbours.py"), &expected);
    // One container on each node, and what mpirun tells its ranks is the same inside.
    let told =
        mpirun("sh -c 'echo $(hostname) $(readlink /proc/self/ns/mnt) $OMPI_COMM_WORLD_SIZE; sleep 1'");
    assert_eq!(different(&told, 4), 2, "{}", told.text());
    // In a batch script, with a session directory that the image does not have.
    let script = format!(
        "#!/bin/bash\\nmpirun.openmpi {elsewhere} mizzen run /shared/py.sqsh python3 allreduce.py\\n"
    );
    let batch = cluster.run(&format!(
        "printf '{script}' > job.sh; sbatch --quiet --wait -N2 -n4 --ntasks-per-node=2 -o job.out job.sh; code=$?; \
         sort job.out; exit $code"
    ));
    assert_silent(&batch, sums);
    // The end of a program is its own.
    let ended = mpirun("sh -c 'exit 3'");
    assert_eq!(ended.code, 3, "{}", ended.text());
    assert!(!ended.stderr.contains("mizzen: "), "{}", ended.text());
    cluster.run("rm -f job.*");
    empty.assert_again(cluster, "mpirun");
}

/// Without a container for all, MPI says that it cannot read its neighbours' memory: this is what is avoided.
#[test]
fn ranks_of_their_own_lose_their_neighbours() {
    let cluster = start("mpirun-alone", 1);
    cluster.share("py.sqsh", &mpi().unwrap()).unwrap();
    let mpirun = |option: &str| {
        let script = format!(
            "set -o pipefail; mpirun.openmpi -np 2 mizzen run {option} /shared/py.sqsh python3 neighbours.py | sort"
        );
        cluster.run_on("node1", User::Alice, &script)
    };
    assert_silent(
        &mpirun(""),
        "0 reads 0: rank 0\n0 reads 1: rank 1\n1 reads 0: rank 0\n1 reads 1: rank 1\n",
    );
    let alone = mpirun("--no-share");
    assert_eq!(alone.stdout.matches("Operation not permitted").count(), 2, "{}", alone.text());
}

/// "`mpiexec -n $SLURM_NTASKS -ppn $SLURM_NTASKS_PER_NODE ch-run -b /lrz/sys/:/lrz/sys/ -w ./img -- python /model/train.py`"
#[test]
fn mpich_finds_its_process_manager() {
    for release in TWO_RELEASES {
        let cluster = start_release(release, "mpiexec", 2);
        for node in ["node1", "node2"] {
            assert_out(&cluster.run_on(node, User::Root, "mkdir /image && mount --bind / /image"), 0, "");
        }
        let mpiexec = |options: &str| {
            let script = format!(
                "set -o pipefail; mpiexec.mpich {options} -n 4 mizzen run /image python3 sum.py libmpich.so.12 | sort"
            );
            cluster.run_on("node1", User::Alice, &script)
        };
        let library = cluster
            .run_on("node1", User::Alice, "readlink -f /usr/lib/x86_64-linux-gnu/libmpich.so.12")
            .stdout;
        let library = library.trim_end();
        let sums: String = (0..4).map(|rank| format!("{rank} of 4: 10 with {library}\n")).collect();
        // Over a descriptor, and over a port.
        assert_silent(&mpiexec(""), &sums);
        assert_silent(&mpiexec("-pmi-port"), &sums);
        let places = cluster.run_on(
            "node1",
            User::Alice,
            &format!("mpiexec.mpich -n 4 sh -c 'mizzen run /image sh -c \"{WHERE}; sleep 1\"; true'"),
        );
        assert_eq!(different(&places, 4), 1, "{}", places.text());
        // In a job, over two nodes: its proxies are started by Slurm. What the ranks compute there is not tried: Debian's MPICH (with
        // UCX) often waits in MPI_Finalize for ever on a busy machine, without a container too.
        let job = "salloc --quiet -N2 -n4 --ntasks-per-node=2 bash -c 'mpiexec.mpich -n $SLURM_NTASKS -ppn 2 \
               mizzen run /shared/bb.sqsh sh -c \"echo \\$(hostname) \\$(readlink /proc/self/ns/mnt); sleep 1\"'";
        let places = cluster.run(job);
        assert_eq!(different(&places, 4), 2, "{}", places.text());
        // As it is typed in batch scripts, with a directory of the site's and changes that are not kept.
        let site = "mkdir -p /lrz/sys && hostname > /lrz/sys/node";
        for node in ["node1", "node2"] {
            assert_out(&cluster.run_on(node, User::Root, site), 0, "");
        }
        let script = "#!/bin/bash\nmpiexec.mpich -n $SLURM_NTASKS -ppn $SLURM_NTASKS_PER_NODE mizzen run -m /lrz/sys/:/lrz/sys/ --writable ./img -- \
                  sh -c 'touch /x && echo $(cat /lrz/sys/node) of $SLURM_NTASKS $(readlink /proc/self/ns/mnt); sleep 1'\n";
        cluster.share("job.sh", script.as_bytes()).unwrap();
        let batch = cluster.run(
        "mkdir img && (cd img && mizzen export -q /shared/bb.sqsh | tar -x --exclude='dev/*'); \
         sbatch --quiet --wait -N2 -n4 --ntasks-per-node=2 -o job.out /shared/job.sh; code=$?; sort job.out; exit $code",
    );
        assert_eq!(different(&batch, 4), 2, "{}", batch.text());
        let nodes: Vec<&str> = batch.stdout.lines().filter_map(|line| line.split(' ').next()).collect();
        assert_eq!(nodes, ["node1", "node1", "node2", "node2"], "{}", batch.text());
        assert_eq!(batch.stdout.matches(" of 4 ").count(), 4, "{}", batch.text());
    }
}

/// Ranks that do not find each other are so many programs of one rank. The note comes before.
#[test]
fn an_mpi_of_another_family_is_named() {
    let cluster = start("mpirun-mismatch", 1);
    for (library, start, note) in [
        (
            "usr/lib/libmpich.so.12",
            "mpirun.openmpi -np 2",
            "mizzen: note: mpirun is Open MPI's, and the image has MPICH (/usr/lib/libmpich.so.12): every rank will be alone; \
             use MPICH's mpiexec, or an image with Open MPI\n",
        ),
        (
            "usr/lib64/openmpi/lib/libmpi.so.40",
            "mpiexec.mpich -n 2",
            "mizzen: note: mpiexec is MPICH's, and the image has Open MPI (/usr/lib64/openmpi/lib/libmpi.so.40): every rank \
             will be alone; use Open MPI's mpirun, or an image with MPICH\n",
        ),
        (
            "usr/lib/openmpi/mca_pmix_pmix112.so",
            "mpirun.openmpi -np 2",
            "mizzen: note: the image's Open MPI has PMIx 1.1.2 (/usr/lib/openmpi/mca_pmix_pmix112.so), which cannot talk to \
             mpirun's PMIx ",
        ),
    ] {
        let tree = ImageTree::busybox().unwrap();
        tree.file(library, "").unwrap();
        cluster.share("odd.sqsh", &tree.squashfs(&["-comp", "zstd"]).unwrap()).unwrap();
        let run = |start: &str| {
            cluster.run_on(
                "node1",
                User::Alice,
                &format!("{start} mizzen run /shared/odd.sqsh sh -c 'sleep 0.5; echo ran'"),
            )
        };
        let mismatch = run(start);
        assert_out(&mismatch, 0, "ran\nran\n");
        assert_eq!(mismatch.stderr.matches(note).count(), 1, "expected once: {note}\n{}", mismatch.text());
        assert_silent(&run(""), "ran\n");
    }
}

/// An image with a newer Open MPI than the nodes'. Where mpirun is on none of the job's nodes, the two do not go together.
#[test]
fn a_newer_open_mpi_talks_to_an_older_mpirun() {
    let cluster = start("mpirun-newer", 2);
    cluster.share("new.sqsh", &packed_once(&trixie_mpi_rootfs().unwrap()).unwrap()).unwrap();
    let batch = "printf '#!/bin/bash\\nmpirun.openmpi mizzen run /shared/new.sqsh python3 allreduce.py\\n' > job.sh; \
                 sbatch --quiet --wait -N2 -n4 --ntasks-per-node=2 -o job.out job.sh; code=$?; sort job.out; exit $code";
    let sums = "0 of 4 on node1: 10\n1 of 4 on node1: 10\n2 of 4 on node2: 10\n3 of 4 on node2: 10\n";
    assert_silent(&cluster.run(batch), sums);
    let elsewhere =
        "salloc --quiet -N2 -n2 --ntasks-per-node=1 mpirun.openmpi mizzen run /shared/new.sqsh echo ran";
    let told = cluster.run(elsewhere);
    assert_failed(
        &told,
        0,
        "mizzen: note: mpirun is of Open MPI 4 and not on the first node of the job, and the image has Open MPI 5 \
         (/usr/lib/x86_64-linux-gnu/libmpi.so.40.40.7): its ranks may wait for ever; start mpirun in a batch script\n",
    );
    assert_eq!(told.stdout, "ran\nran\n");
}

#[test]
fn who_is_meant_by_an_option_is_in_one_container() {
    let cluster = with_held_ranks("share-options");
    let alice = |script: &str| ranks(&cluster, script);
    let image = "/shared/bb.sqsh";
    let held = "sh ~/held";
    // One rank has nobody to share with, and looks for nobody.
    let alone = format!("ranks 1 mizzen run {image} echo ran; test ! -e /var/tmp/mizzen-2001");
    assert_silent(&alice(&alone), "ran\n");
    assert_eq!(different(&alice(&format!("ranks 4 mizzen run {image} {held} 4")), 4), 1);
    assert_eq!(different(&alice(&format!("ranks 4 mizzen run --no-share {image} {held} 4")), 4), 4);
    // Other images, settings and directories are other containers; other variables and programs are not.
    let mixed = format!(
        "ranks 2 mizzen run {image} {held} 6 & ranks 2 mizzen run --writable {image} {held} 6 & \
         (cd /; ranks 2 mizzen run {image} {held} 6) & wait"
    );
    assert_eq!(different(&alice(&mixed), 6), 3);
    let rank = format!(
        "mizzen run --env OWN=$OMPI_COMM_WORLD_RANK {image} sh -c \"echo $OMPI_COMM_WORLD_RANK \\$OWN \\$(sh ~/held 4)\"; :"
    );
    let own = alice(&format!("ranks 4 sh -c '{rank}'"));
    assert_eq!(different(&own, 4), 4, "{}", own.text());
    let mut lines: Vec<Vec<&str>> = own.stdout.lines().map(|line| line.split(' ').collect()).collect();
    lines.sort();
    for (number, words) in lines.iter().enumerate() {
        let number = number.to_string();
        assert_eq!(words[..], [number.as_str(), &number, lines[0][2]], "{}", own.text());
    }
    // By a name, whoever starts them; and without a launch, what one shell starts.
    let named = format!(
        "for i in 1 2 3; do sh -c \"mizzen run --share=n {image} {held} 3; :\" & sleep 0.1; done; wait"
    );
    assert_eq!(different(&alice(&named), 3), 1);
    let siblings = format!("for i in 1 2 3; do mizzen run --share {image} {held} 3 & done; wait");
    assert_eq!(different(&alice(&siblings), 3), 1);
    let strangers = named.replace("--share=n", "--share");
    assert_eq!(different(&alice(&strangers), 3), 3);
    // Ranks that srun has started without the plugin's options; what is no rank of MPI has nothing to share.
    let steps = |mpi: &str| {
        let step = format!("rm -f ~/there; srun --quiet -n4 --mpi={mpi} mizzen run {image} {held} 4");
        different(&cluster.run(&step), 4)
    };
    assert_eq!((steps("pmi2"), steps("none")), (1, 4));
    // What cannot be shared says so.
    let refused = alice(&format!("mizzen run --share --unshare pid {image} true"));
    let hint = "who shares a container is in its user and mount namespace; leave one of the two away";
    assert_told(&refused, 125, "mizzen: --share: not together with --unshare", hint);
    let refused = alice(&format!("mizzen run --share {image}"));
    let hint = "name it behind the image; only the first to arrive would know the image's own command";
    assert_told(&refused, 125, "mizzen: --share: no program is named", hint);
    assert_silent(&alice(&format!("mizzen run --share --no-share {image} echo ran")), "ran\n");
}

/// Process managers that these tests do not have, by the variables that they give their ranks. (As their users read them: none of
/// these has been tried itself.)
#[test]
fn ranks_are_known_by_the_variables_of_their_manager() {
    let cluster = with_held_ranks("share-managers");
    let run = |variables: &str, other: &str| {
        let rank = "mizzen run /shared/bb.sqsh sh ~/held 2";
        ranks(&cluster, &format!("i=0; env {variables} {rank} & i=1; env {variables} {other} {rank} & wait"))
    };
    for (manager, variables, launch) in [
        ("PALS", "PALS_RANKID=$i PALS_LOCAL_RANKID=$i PALS_LOCAL_SIZE=2", "PALS_APID"),
        ("Cray PMI", "PMI_RANK=$i PMI_LOCAL_RANK=$i PMI_LOCAL_SIZE=2 PMI_SIZE=2", "PMI_JOBID"),
        (
            "Intel MPI",
            "PMI_RANK=$i PMI_SIZE=2 MPI_LOCALRANKID=$i MPI_LOCALNRANKS=2 I_MPI_HYDRA_ENV=x",
            "PMI_JOBID",
        ),
        (
            "jsrun",
            "JSM_NAMESPACE_RANK=$i JSM_NAMESPACE_LOCAL_RANK=$i JSM_NAMESPACE_LOCAL_SIZE=2 JSM_NAMESPACE_SIZE=2",
            "PMIX_NAMESPACE",
        ),
        ("mpirun_rsh", "MV2_COMM_WORLD_RANK=$i MV2_COMM_WORLD_LOCAL_RANK=$i MV2_COMM_WORLD_LOCAL_SIZE=2", ""),
    ] {
        let together = run(variables, "");
        assert_eq!(different(&together, 2), 1, "{manager}: {}", together.text());
        // Ranks of another launch are elsewhere.
        if !launch.is_empty() {
            let apart = run(&format!("{variables} {launch}=one"), &format!("{launch}=two"));
            assert_eq!(different(&apart, 2), 2, "{manager}: {}", apart.text());
        }
    }
}

#[test]
fn a_failure_of_all_ranks_is_told_once() {
    let cluster = with_busybox("share-failures");
    let empty = Emptiness::of(&cluster, &["node1"]);
    let broken = ranks(&cluster, "ranks 4 mizzen run -m /nowhere /shared/bb.sqsh true");
    assert_failed(&broken, 125, "mizzen: --mount: source path does not exist: /nowhere");
    // The first of them is inside for a while, so that all are in one container.
    let missing = ranks(
        &cluster,
        "ranks 4 sh -c 'if [ $OMPI_COMM_WORLD_RANK = 0 ]; then exec mizzen run /shared/bb.sqsh sleep 2; fi; sleep 0.5; \
         exec mizzen run /shared/bb.sqsh nothing'",
    );
    assert_failed(&missing, 127, "mizzen: nothing: no such program in the container");
    // The file server of all is killed.
    let killed = ranks(
        &cluster,
        "(sleep 1; pkill -KILL -x mizzen-fuse) & ranks 4 mizzen run /shared/bb.sqsh sh -c 'sleep 10; echo no'",
    );
    assert_failed(
        &killed,
        137,
        "mizzen: /shared/bb.sqsh: its file server was killed, so the container was ended",
    );
    assert_eq!(killed.stdout, "", "{}", killed.text());
    empty.assert_again(&cluster, "failures");
    // There is no room for a socket.
    let full = "mount -t tmpfs -o mode=1777,nr_inodes=2 full /var/tmp";
    assert_out(&cluster.run_on("node1", User::Root, full), 0, "");
    let alone = ranks(&cluster, "ranks 4 mizzen run /shared/bb.sqsh echo ran");
    assert_out(&alone, 0, &"ran\n".repeat(4));
    assert_failed(
        &alone,
        0,
        "mizzen: note: every rank has a container of its own: /var/tmp/mizzen-2001/share-",
    );
    let asked = ranks(&cluster, "mizzen run --share /shared/bb.sqsh echo ran");
    assert_failed(&asked, 125, "mizzen: --share: /var/tmp/mizzen-2001/share-");
    assert_failed(&asked, 125, ": cannot listen: No space left on device");
}

/// Whoever comes first, last, or in between, and whoever is killed: the others are in one container, and nothing is left.
#[test]
fn a_killed_builder_stops_nobody() {
    let cluster = with_busybox("share-killed");
    let empty = Emptiness::of(&cluster, &["node1"]);
    let rank = format!("mizzen run --share=k /shared/bb.sqsh sh -c '{WHERE}; sleep 0.6'");
    for round in 0..count(12, 200) {
        let delay = f64::from(round % 40) * 0.0008;
        let script = format!("timeout -s KILL {delay:.4} {rank} > /dev/null & {rank} & {rank} & wait");
        let output = run_in_time_on_node(&cluster, &script);
        assert_eq!(different(&output, 2), 1, "killed after {delay} s: {}", output.text());
        assert!(!output.stderr.contains("mizzen: "), "{}", output.text());
    }
    // At every step of the way, by the kernel call that it makes there; then the next one makes the container.
    for call in ["bind", "listen", "socketpair", "pivot_root", "sendmsg", "execve:when=2", "setns", "mount"] {
        let killed = format!(
            "strace -qq -o /dev/null -e inject={call}{}:signal=KILL {rank} > /dev/null & sleep 0.05; {rank} & {rank} & wait",
            if call.contains(':') { "" } else { ":when=1" }
        );
        let output = run_in_time_on_node(&cluster, &killed);
        assert_eq!(different(&output, 2), 1, "killed at {call}: {}", output.text());
    }
    // Its server as well, while all are inside: they go on, and later ones make a container for themselves.
    let server = format!("{rank} & {rank} & sleep 0.3; pkill -KILL -x mizzen-share; {rank} & {rank} & wait");
    let output = run_in_time_on_node(&cluster, &server);
    assert_eq!(different(&output, 4), 2, "{}", output.text());
    let files = cluster.run_on("node1", User::Alice, "ls /var/tmp/mizzen-2001");
    assert_silent(&files, "");
    empty.assert_again(&cluster, "killed");
}

#[track_caller]
fn run_in_time_on_node(cluster: &Cluster, script: &str) -> Output {
    let begin = std::time::Instant::now();
    let output = cluster.run_on("node1", User::Alice, script);
    assert!(begin.elapsed().as_secs() < 20, "took {:?}: {script}\n{}", begin.elapsed(), output.text());
    output
}

#[test]
fn many_launches_at_once_end_as_they_like() {
    let cluster = start("mpirun-many", 1);
    let empty = Emptiness::of(&cluster, &["node1"]);
    let program = "echo $0 $OMPI_COMM_WORLD_RANK $(readlink /proc/self/ns/mnt); sleep 0.$((RANDOM % 9))";
    let launches = format!(
        "for i in 0 1 2 3 4 5 6 7 8 9; do mpirun.openmpi --bind-to none --oversubscribe -np 4 mizzen run /shared/bb.sqsh sh -c '{program}' $i & \
         pids=\"$pids $!\"; done; for pid in $pids; do wait $pid || exit; done"
    );
    for _ in 0..count(1, 50) {
        let output = cluster.run_on("node1", User::Alice, &launches);
        assert_eq!((output.code, output.stdout.lines().count()), (0, 40), "{}", output.text());
        assert_eq!(output.stderr, "", "{}", output.text());
        let mut ranks: Vec<String> =
            output.stdout.lines().map(|line| line.split(' ').take(2).collect::<Vec<_>>().join(" ")).collect();
        ranks.sort();
        let expected: Vec<String> =
            (0..10).flat_map(|launch| (0..4).map(move |rank| format!("{launch} {rank}"))).collect();
        assert_eq!(ranks, expected);
        // No container has ranks of two launches.
        let containers: std::collections::BTreeSet<(&str, &str)> = output
            .stdout
            .lines()
            .filter_map(|line| line.split_once(' '))
            .filter_map(|(launch, rest)| Some((launch, rest.split_once(' ')?.1)))
            .collect();
        assert!(containers.len() >= 10 && containers.len() < 20, "{containers:#?}");
        empty.assert_again(&cluster, "ten launches");
    }
}

/// Another user can take the names in a directory that is everybody's, and connect to what listens there.
#[test]
fn another_user_stops_and_misleads_nobody() {
    let cluster = with_held_ranks("share-squatted");
    let image = "/shared/bb.sqsh";
    let bob = |script: &str| cluster.run_on("node1", User::Bob, script);
    assert_silent(
        &bob(
            "mkdir -m 777 /var/tmp/mizzen-2001; mkfifo /var/tmp/mizzen-2001.1; ln -s /tmp /var/tmp/mizzen-2001.2",
        ),
        "",
    );
    let run = || {
        let begin = std::time::Instant::now();
        let output = ranks(&cluster, &format!("ranks 4 mizzen run {image} sh ~/held 4"));
        // Whoever trusted Bob's FIFO would wait for ever.
        assert!(begin.elapsed().as_secs() < 20, "took {:?}: {}", begin.elapsed(), output.text());
        output
    };
    let output = run();
    assert_eq!((different(&output, 4), output.stderr.as_str()), (1, ""), "{}", output.text());
    let directory = cluster.run_on(
        "node1",
        User::Root,
        "stat -c '%U %a' /var/tmp/mizzen-2001.3; ls /var/tmp/mizzen-2001",
    );
    assert_silent(&directory, "alice 700\n");
    // While they run, Bob does not get at the socket.
    let mut running = cluster.command(
        "node1",
        User::Alice,
        &["bash", "-c", &format!("{RANKS} ranks 4 mizzen run {image} sleep 3")],
    );
    let mut running = running.spawn().unwrap();
    let socket = "for i in $(seq 100); do name=$(ls /var/tmp/mizzen-2001.3) && [ -n \"$name\" ] && break; sleep 0.05; done; echo $name";
    let socket = cluster.run_on("node1", User::Alice, socket).stdout;
    assert!(socket.starts_with("share-"), "{socket}");
    let reach = bob(&format!("stat /var/tmp/mizzen-2001.3/{socket}"));
    assert_failed(&reach, 1, "Permission denied");
    assert!(running.wait().unwrap().success());
    // All names that can be foreseen: a drawn one is left, and all ranks find it.
    cluster.run_on("node1", User::Root, "rm -rf /var/tmp/mizzen-2001.3");
    bob("for i in 3 4 5 6 7 8 9 10 11 12 13 14 15; do mkdir /var/tmp/mizzen-2001.$i; done");
    let output = run();
    assert_eq!((different(&output, 4), output.stderr.as_str()), (1, ""), "{}", output.text());
    // They would not where the directory cannot be listed: every rank has a container of its own, and one of them says why.
    cluster.run_on("node1", User::Root, "rm -rf /var/tmp/mizzen-2001.x*; chmod 1733 /var/tmp");
    let output = run();
    assert_eq!(different(&output, 4), 4, "{}", output.text());
    assert_failed(
        &output,
        0,
        "mizzen: note: every rank has a container of its own: /var/tmp/mizzen-2001: belongs to uid 2002, not to you",
    );
}
