//! A cluster as its owner sees it: start it, run commands on its machines, drop it.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::init::Order;
use crate::release::Release;
use crate::spec::{PLUGIN, SharedFs, Spec, User};
use crate::target_dir;

/// A running cluster. Dropping it ends it.
pub struct Cluster {
    spec: Spec,
    dir: PathBuf,
    supervisor: Child,
    /// Host pids of the machines, by name.
    machines: HashMap<String, u32>,
    keep_logs: bool,
}

/// What a command on the cluster gave back.
#[derive(Debug)]
pub struct Output {
    /// Exit code, or 128 + signal.
    pub code: i32,
    /// Everything on stdout.
    pub stdout: String,
    /// Everything on stderr but srun's words about waiting for its turn.
    pub stderr: String,
}

/// A command on the cluster that takes longer is killed, and its test fails.
const COMMAND_LIMIT: Duration = Duration::from_secs(60);
/// `timeout` exits with this when it had to kill.
const TIMED_OUT: i32 = 137;

static NUMBER: AtomicU32 = AtomicU32::new(0);

impl Cluster {
    /// A usual cluster: two nodes with 8 CPUs, Slurm 22.05, the plugin required, mizzen as installed.
    pub fn spec(name: &str) -> Spec {
        Spec {
            name: name.to_owned(),
            release: Release::Slurm22_05,
            rootfs: None,
            nodes: 2,
            first_node_features: None,
            cpus: 8,
            plugstack: vec![format!("required {PLUGIN}")],
            slurm_conf: Vec::new(),
            configless: false,
            own_etc_slurm: false,
            slurm_files: Vec::new(),
            mizzen_toml: None,
            shared: SharedFs::Tmpfs,
            cgroup_v1: false,
            one_cpu: false,
            devices: Vec::new(),
            layers: vec![target_dir().join("stage")],
        }
    }

    /// Starts a cluster and returns when all its nodes are idle.
    pub fn start(spec: Spec) -> Result<Cluster> {
        for layer in &spec.layers {
            ensure!(layer.is_dir(), "{} is missing: run `make stage`", layer.display());
        }
        let rootfs = match &spec.rootfs {
            Some(rootfs) => rootfs.canonicalize()?,
            None => spec.release.rootfs()?.canonicalize()?,
        };
        let dir = make_directory(&spec.name)?;
        let mut supervisor = Command::new(vcluster_binary()?)
            .arg("role-supervise")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0) // Ctrl-C goes to the owner, whose end ends the cluster
            .spawn()
            .context("cannot start the cluster's supervisor")?;
        let mut spec_with_paths = spec.clone();
        for layer in &mut spec_with_paths.layers {
            *layer = layer.canonicalize()?;
        }
        let order = Order { spec: spec_with_paths, rootfs, dir: dir.clone() };
        let input = supervisor.stdin.as_mut().context("no pipe")?;
        writeln!(input, "{}", serde_json::to_string(&order)?)?;
        let mut answer = String::new();
        BufReader::new(supervisor.stdout.take().context("no pipe")?).read_line(&mut answer)?;
        let mut cluster = Cluster { spec, dir, supervisor, machines: HashMap::new(), keep_logs: false };
        if answer.trim() != "ready" {
            cluster.keep_logs = true;
            bail!(
                "cluster {}: {}; logs are in {}",
                cluster.spec.name,
                answer.trim(),
                cluster.logs().display()
            );
        }
        cluster.machines = machines_of(cluster.supervisor.id())?;
        Ok(cluster)
    }

    /// The release that it runs.
    pub fn release(&self) -> Release {
        self.spec.release
    }

    /// The pid of the process that holds its namespaces.
    pub fn supervisor(&self) -> u32 {
        self.supervisor.id()
    }

    /// The pid of a machine's first process, outside: 0 if there is no such machine.
    pub fn pid_of(&self, machine: &str) -> u32 {
        self.machines.get(machine).copied().unwrap_or(0)
    }

    /// Where the daemons' logs are.
    pub fn logs(&self) -> PathBuf {
        self.dir.join("logs")
    }

    /// Runs a shell command as Alice on the login node.
    pub fn run(&self, script: &str) -> Output {
        self.run_on("ctl", User::Alice, script)
    }

    /// Runs a shell command as root on the login node.
    pub fn run_as_root(&self, script: &str) -> Output {
        self.run_on("ctl", User::Root, script)
    }

    /// Runs a shell command on a machine as a user, in the user's home directory, with a login's environment.
    pub fn run_on(&self, machine: &str, user: User, script: &str) -> Output {
        let limit = COMMAND_LIMIT.as_secs().to_string();
        // What outlives the time limit, in process groups of its own, would keep the pipes open that are read here.
        let limited = "timeout --signal=KILL $0 bash -c \"$1\"; code=$?; [ $SECONDS -lt $0 ] || pkill -KILL -u $UID; exit $code";
        let output = self
            .command(machine, user, &["bash", "-c", limited, &limit, script])
            .stdin(Stdio::null())
            .output();
        let output = match output {
            Ok(output) => output,
            Err(error) => {
                return Output { code: -1, stdout: String::new(), stderr: format!("nsenter: {error}") };
            }
        };
        use std::os::unix::process::ExitStatusExt;
        let code = output.status.code().unwrap_or_else(|| 128 + output.status.signal().unwrap_or(0));
        let mut stderr = without_waiting(&String::from_utf8_lossy(&output.stderr));
        if code == TIMED_OUT {
            stderr.push_str(&format!("(killed after {COMMAND_LIMIT:?}: {script})\n"));
        }
        Output { code, stdout: String::from_utf8_lossy(&output.stdout).into_owned(), stderr }
    }

    /// A command that enters a machine as a user; stdio is the caller's to set.
    pub fn command(&self, machine: &str, user: User, words: &[&str]) -> Command {
        let pid = self.pid_of(machine);
        let home = if user == User::Root { "/root".to_owned() } else { format!("/home/{}", user.name()) };
        let mut command = Command::new("nsenter");
        command
            .args(["--target", &pid.to_string(), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"])
            .args([&format!("--wdns={home}"), "--", "runuser", "-u", user.name(), "--"])
            .args(words)
            .env_clear()
            .env("HOME", &home)
            .env("USER", user.name())
            .env("LOGNAME", user.name())
            .env("LANG", "C.UTF-8")
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        command
    }

    /// Writes a file on the shared file system as root, readable by all; returns its path on the cluster.
    pub fn share(&self, name: &str, content: &[u8]) -> Result<String> {
        // The shared directory is a tmpfs of the cluster; its content is reached through the controller's root.
        let pid = self.machines.get("ctl").context("no controller")?;
        fs::write(format!("/proc/{pid}/root/shared/{name}"), content)?;
        Ok(format!("/shared/{name}"))
    }

    /// Writes a file of root's on every machine.
    pub fn write_everywhere(&self, path: &str, content: &str) -> Result<()> {
        for pid in self.machines.values() {
            fs::write(format!("/proc/{pid}/root{path}"), content).with_context(|| path.to_owned())?;
        }
        Ok(())
    }

    /// Replaces plugstack.conf; Slurm reads it again for every command and step.
    pub fn set_plugstack(&self, lines: &[&str]) -> Result<()> {
        self.write_everywhere("/etc/slurm/plugstack.conf", &(lines.join("\n") + "\n"))
    }

    /// The state of each node, as sinfo tells it.
    pub fn node_states(&self) -> Vec<String> {
        let sinfo = self.run_as_root("sinfo --noheader --Node --format=%T");
        sinfo.stdout.lines().map(str::to_owned).collect()
    }

    /// Waits until no job is left, for a few seconds at most, and tells whether all nodes are idle then.
    pub fn all_idle(&self) -> bool {
        for _ in 0..100 {
            // "planned" is an idle node in the backfill scheduler's plans.
            if self.node_states().iter().all(|state| state == "idle" || state == "planned") {
                return true;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        false
    }

    /// What a node's slurmd and its slurmstepds have logged so far. srun may hear of a step's end before the last line is written, so
    /// steps that end have two seconds for that.
    pub fn slurmd_log(&self, node: &str) -> String {
        let ended = "for i in $(seq 20); do pgrep slurmstepd > /dev/null || break; sleep 0.1; done";
        self.run_on(node, User::Root, ended);
        fs::read_to_string(self.logs().join(format!("slurmd-{node}.log"))).unwrap_or_default()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        drop(self.supervisor.stdin.take()); // the end of this pipe is the end of the cluster
        let _ = self.supervisor.wait();
        if self.keep_logs || std::thread::panicking() {
            eprintln!("the cluster's logs are in {}", self.logs().display());
        } else {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

/// What was printed, without what srun says when the job or step before it has not quite ended: that depends on the
/// machine's load.
pub fn without_waiting(printed: &str) -> String {
    let waits = [
        " queued and waiting for resources\n",
        " has been allocated resources\n",
        " step creation temporarily disabled, retrying (Requested nodes are busy)\n",
        " step creation still disabled, retrying (Requested nodes are busy)\n",
    ];
    let is_waiting = |line: &str| {
        line.starts_with("srun: ")
            && (waits.iter().any(|end| line.ends_with(end)) || line.starts_with("srun: Step created for "))
    };
    printed.split_inclusive('\n').filter(|line| !is_waiting(line)).collect()
}

impl Output {
    /// stderr and stdout, for messages.
    pub fn text(&self) -> String {
        format!("exit code {}\n--- stdout\n{}--- stderr\n{}", self.code, self.stdout, self.stderr)
    }
}

/// Makes `target/cluster/NAME.PID.N` and removes directories of that name whose owner is gone: so the logs of
/// a failure stay until the same test runs again.
fn make_directory(name: &str) -> Result<PathBuf> {
    let base = target_dir().join("cluster");
    fs::create_dir_all(&base)?;
    for entry in fs::read_dir(&base)?.flatten() {
        let file_name = entry.file_name();
        let mut parts = file_name.to_str().unwrap_or_default().rsplitn(3, '.');
        let (_, pid, old) = (parts.next(), parts.next(), parts.next());
        if old == Some(name) && pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let dir = base.join(format!("{name}.{}.{number}", std::process::id()));
    for sub in ["logs", "fs"] {
        fs::create_dir_all(dir.join(sub))?;
    }
    Ok(dir.canonicalize()?)
}

/// The `vcluster` program, beside the test that runs (or itself).
fn vcluster_binary() -> Result<PathBuf> {
    let me = std::env::current_exe()?;
    let mut dir = me.parent().context("no directory")?;
    if dir.ends_with("deps") {
        dir = dir.parent().context("no directory")?;
    }
    let path = dir.join("vcluster");
    ensure!(path.exists(), "{} is missing: run `cargo build -p mizzen-tests`", path.display());
    Ok(path)
}

/// Finds the machines by their command lines: supervisor -> pid 1 -> `vcluster role-machine NAME …`.
fn machines_of(supervisor: u32) -> Result<HashMap<String, u32>> {
    let init = *children_of(supervisor)?.first().context("the cluster has no pid 1")?;
    let mut machines = HashMap::new();
    for pid in children_of(init)? {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = line.split(|b| *b == 0).collect();
        if words.get(1) == Some(&b"role-machine".as_slice())
            && let Some(name) = words.get(2)
        {
            machines.insert(String::from_utf8_lossy(name).into_owned(), pid);
        }
    }
    Ok(machines)
}

fn children_of(parent: u32) -> Result<Vec<u32>> {
    let mut children = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        let status = fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        let is_child = status
            .lines()
            .find_map(|line| line.strip_prefix("PPid:"))
            .is_some_and(|ppid| ppid.trim().parse() == Ok(parent));
        if is_child {
            children.push(pid);
        }
    }
    Ok(children)
}
