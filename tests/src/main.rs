//! `vcluster`: a throw-away Slurm cluster from the command line, and the roles that a cluster consists of.
#![allow(clippy::print_stdout, clippy::print_stderr)] // a tool for developers
#![forbid(unsafe_code)]

use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};
use mizzen_tests::images::ImageTree;
use mizzen_tests::release::hpc_rootfs;
use mizzen_tests::{
    Cluster, Release, User, bench, browser, demo, fleet, init, machine, messages, record, repository,
    supervise, vm,
};

const USAGE: &str = "\
usage: vcluster releases                 make the root file systems: all Slurm releases, and one with MPICH and rdma-core
       vcluster demo                     what mizzen does, on a two-node cluster
       vcluster demo [tensorflow|pytorch]  that example, on a two-node cluster
       vcluster bench [start|slurm|staging|import|wheels|mpi]  mizzen beside its peers; or only starts, steps, copies, imports of
                                         images, imports of TensorFlow and torch, or messages between ranks
       vcluster browse                   target/book, in a headless browser
       vcluster fleet                    the Ansible role of packaging/ansible, on clusters that know nothing of mizzen
       vcluster messages                 docs/messages.md, from the sources
       vcluster record                   docs/run.svg, the picture of a session
       vcluster bench read-through [starts]  first starts of a large image on a slow file system
       vcluster bench scale            starts of many nodes: a model, and its check on virtual nodes, into docs/scale.md
       vcluster bench scale-model      the same without the check
       vcluster arm64 PRODUCT [TESTS…]   containers on a virtual machine of that kind, and test programs for it
       vcluster kernels [NAME]           containers on the kernels of Debian and Ubuntu, in virtual machines
       vcluster bench training PAIRS [MPI|torch|TensorFlow]  trainings on nodes and in containers, into docs/performance.md
       vcluster bench training-report    the same, of the numbers that are there
       vcluster bench report             what the others of `vcluster bench` measured, into docs/performance.md
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
        ["demo"] => demo::run(),
        ["demo", name] => demo::run_example(name),
        ["bench"] => bench::run(25),
        ["bench", "slurm"] => bench::run_slurm(25),
        ["bench", "staging"] => bench::run_staging(25),
        ["bench", "read-through"] => bench::run_read_through(5, false),
        ["bench", "read-through", "starts"] => bench::run_read_through(9, true),
        ["bench", "scale"] => bench::run_scale(true),
        ["bench", "scale-model"] => bench::run_scale(false),
        ["bench", "import"] => bench::run_import(25),
        ["bench", "start"] => bench::run_start(25),
        ["bench", "wheels"] => bench::run_wheels(25),
        ["bench", "mpi"] => bench::run_mpi(25),
        ["browse"] => browser::browse(),
        ["fleet"] => fleet::run(),
        ["messages"] => messages::page(&repository())
            .and_then(|page| Ok(std::fs::write(repository().join("docs/messages.md"), page)?)),
        ["record"] => record::record(),
        ["arm64", tests @ ..] => vm::arm64::test(tests),
        ["kernels", only @ ..] if only.len() < 2 => vm::kernels::test(only.first().copied()),
        ["bench", "training", pairs, only @ ..] if only.len() < 2 => pairs
            .parse()
            .map_err(Into::into)
            .and_then(|pairs| bench::run_training(pairs, only.first().copied())),
        ["bench", "report"] => bench::run_report(),
        ["bench", "training-report"] => bench::run_training_report(),
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
