//! Messages between two ranks on one node: the same Open MPI on the node itself, and in a container.

use anyhow::{Result, ensure};

use super::figures::{Measure, Part, Row, Run};
use super::{Contender, measure, table};
use crate::images::{mpi, mpi_rootfs};
use crate::{Cluster, Release, Spec, User, target_dir};

const LATENCY: [Contender; 2] = [
    Contender { name: "on the node, 8 bytes", command: "" },
    Contender { name: "--container, 8 bytes", command: "" },
];
const BANDWIDTH: [Contender; 2] = [
    Contender { name: "on the node, 4 MiB", command: "" },
    Contender { name: "--container, 4 MiB", command: "" },
];

/// The time of one way there and back, by size.
pub(super) const PING_PONG: &str = r#"
import time, numpy, sys
from mpi4py import MPI
world, name = MPI.COMM_WORLD, sys.argv[1]
for size, rounds, what in (8, 5000, '8 bytes'), (4 << 20, 100, '4 MiB'):
    data = numpy.zeros(size, dtype='b')
    for part in 'warm', 'timed':
        world.Barrier()
        begin = time.perf_counter()
        for _ in range(rounds):
            if world.rank == 0:
                world.Send(data, 1); world.Recv(data, 1)
            else:
                world.Recv(data, 0); world.Send(data, 0)
        took = time.perf_counter() - begin
    if world.rank == 0:
        print(f'{name}, {what}={took / rounds * 1e9:.0f}')
"#;

const TABLES: [(&[Contender; 2], &str); 2] = [(&LATENCY, "8 bytes"), (&BANDWIDTH, "4 MiB")];

/// What is measured.
pub fn part() -> Part {
    let rows = TABLES.into_iter().map(|(contenders, what)| row(contenders, what));
    Part { name: "mpi", title: "messages between two ranks on one node", rows: rows.collect() }
}

fn row(contenders: &[Contender; 2], what: &str) -> Row {
    let measure = Measure::Ratio(contenders[1].name, contenders[0].name);
    Row::new(format!("{what} there and back, by the same on the node"), measure).unit("us").goal(1.02)
}

/// Measures and prints.
pub fn run(rounds: u32) -> Result<()> {
    let cluster = Cluster::start(Spec {
        nodes: 1,
        rootfs: Some(mpi_rootfs()?),
        layers: vec![target_dir().join("stage"), Release::Slurm22_05.rootfs()?],
        ..Cluster::spec("bench-mpi")
    })?;
    let prepared = cluster.run_on("node1", User::Root, "ldconfig");
    ensure!(prepared.code == 0, "{}", prepared.text());
    cluster.share("py.sqsh", &mpi()?)?;
    cluster.share("ping.py", PING_PONG.as_bytes())?;
    let mut run = Run::begin(&part())?;
    let mut script = format!("for round in $(seq {rounds}); do\n");
    let step = "srun --quiet -n2 --overcommit --mpi=pmix";
    for (name, options) in
        [("on the node", ""), ("--container", "--container=/shared/py.sqsh --container-mounts=/shared")]
    {
        script.push_str(&format!("{step} {options} python3 /shared/ping.py '{name}'\n"));
    }
    script.push_str("done\n");
    let times = measure(&cluster, User::Alice, &script)?;
    for (contenders, what) in TABLES {
        println!("\nmpi4py, 2 ranks on one node, there and back: {what} (us)");
        table(contenders, &times, &[row(contenders, what)], &mut run);
    }
    run.save()
}
