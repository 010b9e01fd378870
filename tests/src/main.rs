//! `vcluster`: a throw-away Slurm cluster from the command line, and the roles that a cluster consists of.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};
use mizzen_tests::{Cluster, Release, User, init, machine, supervise};

const USAGE: &str = "\
usage: vcluster releases                 make the root file systems of all Slurm releases
       vcluster shell [RELEASE] [NODES]  a shell as user alice on a cluster (22.05, 2 nodes)
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["releases"] => Release::ALL.into_iter().try_for_each(|release| release.rootfs().map(drop)),
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
    match args {
        [] => {}
        [release] => spec.release = Release::parse(release)?,
        [release, nodes] => (spec.release, spec.nodes) = (Release::parse(release)?, nodes.parse()?),
        _ => bail!("too many arguments\n{USAGE}"),
    }
    let begin = Instant::now();
    let cluster = Cluster::start(spec)?;
    println!(
        "{} is up after {:.1} s. Logs: {}",
        cluster.release(),
        begin.elapsed().as_secs_f32(),
        cluster.logs().display()
    );
    println!(
        "You are alice on the login node; /shared is on every machine. The cluster ends with this shell."
    );
    let prompt = format!("PS1=alice@{}:\\w\\$ ", cluster.release().debian());
    cluster.command("ctl", User::Alice, &["env", &prompt, "TERM=xterm", "bash", "--norc"]).status()?;
    Ok(())
}
