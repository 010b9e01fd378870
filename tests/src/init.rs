//! Pid 1 of a cluster: builds the network, starts the machines, reports, reaps, and ends when its owner does.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::mount::{MsFlags, mount};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use std::os::fd::AsFd;

use crate::run_tool;
use crate::spec::{HOMES, Spec};

/// How long a cluster may take to have all its nodes idle.
const START_LIMIT: Duration = Duration::from_secs(30);

/// What the owner sends to pid 1, one line of JSON.
#[derive(Debug, Serialize, Deserialize)]
pub struct Order {
    /// The cluster to build.
    pub spec: Spec,
    /// Its root file system.
    pub rootfs: PathBuf,
    /// Its directory on disk: `logs/`, and `fs/` as the mount point of everything else.
    pub dir: PathBuf,
}

struct Machine {
    name: String,
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// Reads the order from stdin, builds the cluster, answers `ready` or `failed: why`, waits for the end.
pub fn run(supervisor: u32) -> Result<()> {
    let mut line = String::new();
    // Not through a BufReader: the pipe is polled for its end afterwards.
    std::io::stdin().lock().read_line(&mut line)?;
    let order: Order = serde_json::from_str(&line).context("bad order")?;
    let built = build(&order, supervisor);
    let answer = match &built {
        Ok(_) => "ready".to_owned(),
        Err(error) => format!("failed: {}", format!("{error:#}").replace('\n', " | ")),
    };
    // An owner that is gone does not read the answer, and nobody else needs the cluster.
    if writeln!(std::io::stdout(), "{answer}").is_ok() && built.is_ok() {
        while !owner_is_gone(500)? {
            collect_orphans();
        }
    }
    Ok(()) // the kernel kills every other process of the namespace now
}

fn build(order: &Order, supervisor: u32) -> Result<Vec<Machine>> {
    mount(Some("proc"), "/proc", Some("proc"), MsFlags::empty(), None::<&str>).context("mount /proc")?;
    let fs = order.dir.join("fs");
    mount(Some("mizzen-cluster"), &fs, Some("tmpfs"), MsFlags::empty(), Some("mode=755"))
        .with_context(|| format!("cannot mount a tmpfs at {}", fs.display()))?;
    common_files(order, &fs)?;
    network()?;
    let names = order.spec.machines();
    let mut machines = Vec::new();
    for name in &names {
        machines.push(start_machine(name, supervisor, order)?);
    }
    for (index, machine) in machines.iter_mut().enumerate() {
        expect(machine, "namespaces")?;
        plug_in(machine, index)?;
    }
    for machine in &mut machines {
        expect(machine, "running")?; // the controller first: its munged serves all
    }
    wait_until_idle(&order.spec, &machines)?;
    Ok(machines)
}

/// What all machines share: configuration, homes, the shared file system, munged's socket directory.
fn common_files(order: &Order, fs_root: &Path) -> Result<()> {
    for dir in ["etc-slurm", "shared", "home", "run-munge"] {
        fs::create_dir(fs_root.join(dir))?;
    }
    for (user, uid) in HOMES {
        let home = fs_root.join("home").join(user);
        fs::create_dir(&home)?;
        std::os::unix::fs::chown(&home, Some(uid), Some(uid))?;
    }
    let sticky = std::os::unix::fs::PermissionsExt::from_mode(0o1777);
    fs::set_permissions(fs_root.join("shared"), sticky)?;
    let etc = fs_root.join("etc-slurm");
    fs::write(etc.join("slurm.conf"), order.spec.slurm_conf_text())?;
    fs::write(etc.join("cgroup.conf"), order.spec.cgroup_conf_text())?;
    fs::write(etc.join("plugstack.conf"), order.spec.plugstack.join("\n") + "\n")?;
    for (name, content) in &order.spec.slurm_files {
        fs::write(etc.join(name), content)?;
    }
    Ok(())
}

/// The bridge lives in pid 1's own network namespace and goes with it.
fn network() -> Result<()> {
    for words in ["link set lo up", "link add br0 type bridge", "link set br0 up"] {
        ip(words)?;
    }
    Ok(())
}

fn ip(words: &str) -> Result<()> {
    run_tool(Command::new("ip").args(words.split_whitespace())).map(drop)
}

fn start_machine(name: &str, supervisor: u32, order: &Order) -> Result<Machine> {
    let mut process = Command::new("/proc/self/exe")
        .args(["role-machine", name, &supervisor.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start machine {name}"))?;
    let mut input = process.stdin.take().context("no pipe")?;
    let output = BufReader::new(process.stdout.take().context("no pipe")?);
    writeln!(input, "{}", serde_json::to_string(order)?)?;
    Ok(Machine { name: name.to_owned(), process, input, output })
}

/// Gives a machine its network card and tells it its address.
fn plug_in(machine: &mut Machine, index: usize) -> Result<()> {
    let (port, pid) = (format!("port{index}"), machine.process.id());
    ip(&format!("link add {port} type veth peer name eth0 netns {pid}"))?;
    ip(&format!("link set {port} master br0 up"))?;
    writeln!(machine.input, "{}", Spec::address(index))?;
    Ok(())
}

/// Waits for one of the machine's two reports.
fn expect(machine: &mut Machine, report: &str) -> Result<()> {
    let mut line = String::new();
    machine.output.read_line(&mut line)?;
    if line.trim() != report {
        machine.output.read_to_string(&mut line)?;
        bail!("machine {}: {}", machine.name, line.trim());
    }
    Ok(())
}

fn wait_until_idle(spec: &Spec, machines: &[Machine]) -> Result<()> {
    let ctl = machines.first().context("no controller")?.process.id();
    let begin = Instant::now();
    loop {
        let sinfo = Command::new("nsenter")
            .args(["--target", &ctl.to_string(), "--mount", "--net", "--uts"])
            .args(["sinfo", "--noheader", "--Node", "--format=%T"])
            .output()?;
        let states = String::from_utf8_lossy(&sinfo.stdout);
        if states.lines().filter(|state| *state == "idle").count() == spec.nodes as usize {
            return Ok(());
        }
        if owner_is_gone(0)? {
            bail!("the owner is gone");
        }
        if begin.elapsed() > START_LIMIT {
            let said = String::from_utf8_lossy(&sinfo.stderr);
            bail!("the nodes are not idle after {START_LIMIT:?}: {:?} {said}", states.trim());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Whether the owner's end of the pipe is closed, after waiting so many milliseconds for that.
fn owner_is_gone(wait: u16) -> Result<bool> {
    let stdin = std::io::stdin();
    let mut fds = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::from(wait)).context("poll")?;
    Ok(fds[0].any().unwrap_or(false)) // nothing is ever sent after the order, so this is the end
}

/// Takes leave of processes whose parent died before them, as pid 1 must.
fn collect_orphans() {
    let pending = || waitpid(Pid::from_raw(-1), Some(WaitPidFlag::WNOHANG));
    while !matches!(pending(), Ok(WaitStatus::StillAlive) | Err(_)) {}
}
