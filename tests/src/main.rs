//! `vcluster`: a throw-away Slurm cluster from the command line, and the roles that a cluster consists of.
#![forbid(unsafe_code)]

use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};
use mizzen_tests::images::ImageTree;
use mizzen_tests::release::hpc_rootfs;
use mizzen_tests::{
    Cluster, Release, User, bench, browser, init, machine, messages, record, repository, supervise,
};

const USAGE: &str = "\
usage: vcluster releases                 make the root file systems: all Slurm releases, and one with MPICH and rdma-core
       vcluster demo                     what mizzen does, on a two-node cluster
       vcluster bench [slurm|staging|import|mpi]  mizzen beside its peers; or only steps, copies, imports, or messages between ranks
       vcluster browse                   target/book, in a headless browser
       vcluster messages                 docs/messages.md, from the sources
       vcluster record                   docs/run.svg, the picture of a session
       vcluster shell [RELEASE] [NODES]  a shell as user alice on a cluster (22.05, 2 nodes)
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["releases"] => {
            let mut all =
                Release::ALL.into_iter().map(Release::rootfs).chain(std::iter::once_with(hpc_rootfs));
            all.try_for_each(|made| made.map(drop))
        }
        ["demo"] => demo(),
        ["bench"] => bench::run(25),
        ["bench", "slurm"] => bench::run_slurm(25),
        ["bench", "staging"] => bench::run_staging(25),
        ["bench", "import"] => bench::run_import(25),
        ["bench", "mpi"] => bench::run_mpi(25),
        ["browse"] => browser::browse(),
        ["messages"] => messages::page(&repository())
            .and_then(|page| Ok(std::fs::write(repository().join("docs/messages.md"), page)?)),
        ["record"] => record::record(),
        ["shell", rest @ ..] => shell(rest),
        ["role-supervise"] => supervise::run(),
        ["role-init", supervisor] => supervisor.parse().map_err(Into::into).and_then(init::run),
        ["role-machine", name, supervisor] => {
            supervisor.parse().map_err(Into::into).and_then(|pid| machine::run(name, pid))
        }
        _ => {
            eprint!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vcluster: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn shell(args: &[&str]) -> Result<()> {
    let mut spec = Cluster::spec("shell");
    for arg in args {
        match arg.parse() {
            Ok(nodes @ 1..=100) => spec.nodes = nodes,
            Ok(_) => bail!("{arg}: a cluster has 1 to 100 nodes"),
            Err(_) => spec.release = Release::parse(arg)?,
        }
    }
    let (begin, nodes) = (Instant::now(), spec.nodes);
    let cluster = Cluster::start(spec)?;
    cluster.share("bb.sqsh", &ImageTree::busybox()?.squashfs(&["-comp", "zstd"])?)?;
    let mut out = std::io::stdout();
    writeln!(out, "{} is up after {:.1} s.", cluster.release(), begin.elapsed().as_secs_f32())?;
    writeln!(out, "You are alice on the login node; node1 to node{} compute; /shared is everywhere.", nodes)?;
    writeln!(out, "An image to play with: /shared/bb.sqsh")?;
    let enter = |machine: &str| format!("nsenter --all --wdns=/root --target={}", cluster.pid_of(machine));
    writeln!(out, "From another terminal of this machine, as root:")?;
    writeln!(out, "  bring in an image    cp FILE.sqsh /proc/{}/root/shared/", cluster.pid_of("ctl"))?;
    writeln!(out, "  be root in there     {} bash   (node1: {} bash)", enter("ctl"), enter("node1"))?;
    writeln!(
        out,
        "The daemons' logs are in {}. The cluster ends with this shell.",
        cluster.logs().display()
    )?;
    let prompt = format!("PS1=alice@{}:\\w\\$ ", cluster.release().debian());
    cluster.command("ctl", User::Alice, &["env", &prompt, "TERM=xterm", "bash", "--norc"]).status()?;
    Ok(())
}

/// What a user sees: the commands of a first session and their answers.
fn demo() -> Result<()> {
    let cluster = Cluster::start(Cluster::spec("demo"))?;
    cluster.share("tf.sqsh", &ImageTree::busybox()?.squashfs(&["-comp", "zstd"])?)?;
    for (why, command) in [
        ("A real Slurm cluster, thrown away at the end.", "sinfo"),
        ("Jobs without a container are not touched.", "srun -N2 hostname"),
        (
            "The same in a container: the image's system, your own identity and files, one container on each node.",
            "srun -N2 -n4 -l --container=/shared/tf.sqsh sh -c '. /etc/os-release; echo $PRETTY_NAME, $(id -un), $(pwd)'",
        ),
        (
            "A batch script runs inside, and calls srun there although the image has no Slurm.",
            "printf '#!/bin/sh\\n#SBATCH -n2 --container=/shared/tf.sqsh\\nhead -n 1 /etc/os-release; srun hostname\\n' > job.sh; \
             sbatch --wait --quiet --output=out.txt job.sh; cat out.txt",
        ),
        (
            "Files of the node, and how long the start took.",
            "srun --container=/shared/tf.sqsh --container-mounts=/shared:/data:ro --container-verbose ls /data",
        ),
        ("A mistake is refused before it waits in the queue.", "srun --container=tff.sqsh hostname"),
        (
            "What cannot start in its container does not start at all, and says why once on each node.",
            "srun -N2 -n4 --container=/shared/tf.sqsh --container-mounts=/nosuch:/data ls /data",
        ),
        (
            "Without Slurm, and what it would do and why.",
            "mizzen run /shared/tf.sqsh id -un; mizzen plan -m /shared:/data:ro /shared/tf.sqsh ls | grep -E 'mount|places'",
        ),
        ("And no node is drained.", "sinfo"),
    ] {
        let done = cluster.run(&format!("exec 2>&1; {command}"));
        writeln!(std::io::stdout(), "# {why}\n$ {command}\n{}(exit code {})\n", done.stdout, done.code)?;
    }
    Ok(())
}
